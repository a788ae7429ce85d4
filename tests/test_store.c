/* SPDX-License-Identifier: Apache-2.0 */

/* What every store promises, run on each of them; then what belongs to the
 * handle, to URIs and to memory alone. */

#include "store/store.h"

#include "base/mem.h"
#include "store/posix.h"
#include "support/check.h"
#include "support/fault_store.h"
#include "support/temp_dir.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ---------------------------------------------------------------- fixture */

typedef enum wrapping { PLAIN, WITHOUT_RENAME, NO_REPLACE_UNKNOWN, FAULT } wrapping;

typedef struct factory {
    const char *name;
    bool memory;
    wrapping how;
} factory;

static const factory factories[] = {
    {"posix", false, PLAIN},
    {"posix without folder renames", false, WITHOUT_RENAME},
    {"posix on a kernel without no-replace", false, NO_REPLACE_UNKNOWN},
    {"memory", true, PLAIN},
    {"memory without folder renames", true, WITHOUT_RENAME},
    {"memory in a fault store", true, FAULT},
};

typedef struct fixture {
    const factory *kind;
    char dir[256], uri[300];
    lg_store *s;     /* under test */
    lg_store *inner; /* if s wraps it */
    fault_store *fault;
    size_t descriptors;
} fixture;

static int renameat2_unknown(int a, const char *from, int b, const char *to, unsigned flags)
{
    (void)a, (void)from, (void)b, (void)to, (void)flags;
    errno = EINVAL;
    return -1;
}

static int setup(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = calloc(1, sizeof *x);
    assert_non_null(x);
    x->kind = *state;
    x->descriptors = open_descriptors();
    temp_dir_make(x->dir);
    snprintf(x->uri, sizeof x->uri, "%s%s/root", x->kind->memory ? "mem:" : "", x->dir);
    if (x->kind->how == NO_REPLACE_UNKNOWN) {
        lg__posix.renameat2 = renameat2_unknown;
    }
    OK(lg_store_open(x->uri, &x->s, &err));
    if (x->kind->how == WITHOUT_RENAME) {
        x->inner = x->s;
        OK(lg_store_without(x->inner, LG_CAP_RENAME_DIR | LG_CAP_NO_REPLACE, &x->s, &err));
    } else if (x->kind->how == FAULT) {
        x->inner = x->s;
        x->fault = fault_store_new(x->inner);
        x->s = fault_store_handle(x->fault);
    }
    OK(lg__store_make_root(x->s, &err));
    *state = x;
    return 0;
}

static int teardown(void **state)
{
    fixture *x = *state;
    if (x->fault != NULL) {
        fault_store_free(x->fault);
    } else {
        lg_store_free(x->s);
    }
    lg_store_free(x->inner);
    lg__posix = lg__posix_real;
    lg_memory_store_drop(x->uri + 4);
    temp_dir_remove(x->dir);
    int result = descriptors_left(x->descriptors);
    free(x);
    return result;
}

static void put(lg_store *s, const char *path, const char *text)
{
    lg_error err = LG_ERROR_INIT;
    OK(lg__store_put_new(s, path, text, strlen(text), &err));
}

static void holds(lg_store *s, const char *path, const char *text)
{
    lg_error err = LG_ERROR_INIT;
    lg__buf b;
    lg__buf_init(&b, 1 << 20);
    OK(lg__store_read_all(s, path, &b, &err));
    assert_int_equal(b.len, strlen(text));
    assert_memory_equal(b.len > 0 ? b.data : "", text, b.len);
    lg__buf_free(&b);
}

/* All names of a folder, sorted, as "a/ b:3 ": folders with '/', files with
 * their length, others with '?'. */
typedef struct names {
    size_t n;
    char text[64][300];
} names;

static int add_name(const lg_node *node, void *arg)
{
    names *all = arg;
    assert_true(all->n < 64);
    if (node->type == LG_NODE_FILE) {
        snprintf(all->text[all->n], 300, "%s:%llu ", node->name, (unsigned long long)node->bytes);
    } else {
        snprintf(all->text[all->n], 300, "%s%c ", node->name, node->type == LG_NODE_DIR ? '/' : '?');
    }
    all->n++;
    return 0;
}

static int by_text(const void *a, const void *b) { return strcmp(a, b); }

static void has_names(lg_store *s, const char *folder, const char *want)
{
    lg_error err = LG_ERROR_INIT;
    static names all;
    char text[4096] = "";
    all.n = 0;
    OK(lg__store_list(s, folder, add_name, &all, &err));
    qsort(all.text, all.n, sizeof all.text[0], by_text);
    for (size_t i = 0; i < all.n; i++) {
        strncat(text, all.text[i], sizeof text - strlen(text) - 1);
    }
    assert_string_equal(text, want);
}

/* ------------------------------------------------- what every store promises */

static void a_root_not_made(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    char uri[310];
    lg_store *s;
    lg_file *f = NULL;
    uint64_t bytes = 7;
    snprintf(uri, sizeof uri, "%s-2", x->uri);
    OK(lg_store_open(uri, &s, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_list(s, "", add_name, NULL, &err));
    SAYS(lg__store_name(s));
    FAILS(LG_ERR_NOT_FOUND, lg__store_open_file(s, "a", &f, &bytes, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_create(s, "a", 0, &f, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_make_dir(s, "a", &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_put_new(s, "a", "x", 1, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_sync_dir(s, "", &err));
    assert_null(f);
    assert_int_equal(bytes, 7);
    OK(lg__store_make_root(s, &err));
    OK(lg__store_make_root(s, &err));
    has_names(s, "", "");
    OK(lg__store_sync_dir(s, "", &err));
    lg_store_free(s);
    lg_memory_store_drop(uri + 4);
}

static void create_is_exclusive(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    lg_file *f = NULL;
    OK(lg__store_make_dir(s, "d", &err));
    put(s, "d/a", "first");
    FAILS(LG_ERR_EXISTS, lg__store_create(s, "d/a", 100, &f, &err));
    FAILS(LG_ERR_EXISTS, lg__store_create(s, "d", 0, &f, &err));
    FAILS(LG_ERR_EXISTS, lg__store_make_dir(s, "d", &err));
    FAILS(LG_ERR_EXISTS, lg__store_make_dir(s, "d/a", &err));
    assert_null(f);
    holds(s, "d/a", "first");
}

static void writes_at_offsets(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    lg_file *f;
    uint64_t bytes;
    OK(lg__store_create(s, "a", 1 << 20, &f, &err)); /* reserved too much: the length is what was written */
    OK(lg__store_write(s, f, "world", 5, 6, &err));
    OK(lg__store_write(s, f, "hello", 5, 0, &err));
    OK(lg__store_write(s, f, "", 0, 3, &err));
    OK(lg__store_sync(s, f, &err));
    OK(lg__store_close(s, f, &err));
    has_names(s, "", "a:11 ");
    OK(lg__store_open_file(s, "a", &f, &bytes, &err));
    assert_int_equal(bytes, 11);
    char got[11];
    OK(lg__store_read(s, f, got, 11, 0, &err));
    assert_memory_equal(got, "hello\0world", 11);
    OK(lg__store_read(s, f, got, 3, 7, &err));
    assert_memory_equal(got, "orl", 3);
    OK(lg__store_read(s, f, got, 0, 11, &err));
    FAILS(LG_ERR_INVALID, lg__store_write(s, f, "x", 1, 0, &err));
    OK(lg__store_close(s, f, &err));
    OK(lg__store_create(s, "empty", 0, &f, &err));
    FAILS(LG_ERR_INVALID, lg__store_read(s, f, got, 1, 0, &err));
    OK(lg__store_sync(s, f, &err));
    OK(lg__store_close(s, f, &err));
    holds(s, "empty", "");
    OK(lg__store_close(s, NULL, &err));
}

static void reading_past_the_end(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    lg_file *f;
    uint64_t bytes;
    char got[16];
    put(s, "a", "12345");
    OK(lg__store_open_file(s, "a", &f, &bytes, &err));
    static const struct {
        size_t bytes;
        uint64_t offset;
        lg_status want;
    } cases[] = {
        {5, 0, LG_OK},
        {6, 0, LG_ERR_CORRUPT},
        {1, 5, LG_ERR_CORRUPT},
        {1, 1 << 20, LG_ERR_CORRUPT},
        {1, INT64_MAX, LG_ERR_INVALID},
        {1, UINT64_MAX, LG_ERR_INVALID},
        {16, UINT64_MAX - 8, LG_ERR_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check_status(lg__store_read(s, f, got, cases[i].bytes, cases[i].offset, &err), cases[i].want, "read", &err,
                     __FILE__, __LINE__);
        if (cases[i].want == LG_ERR_CORRUPT) {
            SAYS("a: the file ends at");
        }
    }
    OK(lg__store_close(s, f, &err));
}

static void not_found_and_wrong_kinds(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    lg_file *f = NULL;
    uint64_t bytes;
    OK(lg__store_make_dir(s, "d", &err));
    put(s, "file", "x");
    FAILS(LG_ERR_NOT_FOUND, lg__store_open_file(s, "none", &f, &bytes, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_open_file(s, "d/none", &f, &bytes, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_open_file(s, "none/a", &f, &bytes, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_create(s, "none/a", 0, &f, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_put_new(s, "none/a", "x", 1, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_make_dir(s, "none/a", &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_sync_dir(s, "none", &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_list(s, "none", add_name, NULL, &err));
    SAYS("list none");
    FAILS(LG_ERR_NOT_FOUND, lg__store_rename_file(s, "none", "b", &err));
    /* there, but something else: never called absent */
    FAILS(LG_ERR_FORMAT, lg__store_open_file(s, "d", &f, &bytes, &err));
    SAYS("it is a folder");
    FAILS(LG_ERR_FORMAT, lg__store_open_file(s, "file/a", &f, &bytes, &err));
    FAILS(LG_ERR_FORMAT, lg__store_create(s, "file/a", 0, &f, &err));
    FAILS(LG_ERR_FORMAT, lg__store_put_new(s, "file/a", "x", 1, &err));
    FAILS(LG_ERR_FORMAT, lg__store_list(s, "file", add_name, NULL, &err));
    FAILS(LG_ERR_FORMAT, lg__store_sync_dir(s, "file", &err));
    FAILS(LG_ERR_FORMAT, lg__store_remove_file(s, "d", &err));
    FAILS(LG_ERR_FORMAT, lg__store_remove_dir(s, "file", &err));
    FAILS(LG_ERR_FORMAT, lg__store_rename_file(s, "d", "e", &err));
    FAILS(LG_ERR_FORMAT, lg__store_rename_file(s, "file", "d", &err));
    assert_null(f);
    has_names(s, "", "d/ file:1 ");
}

static void renaming_folders(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_store *s = x->s;
    OK(lg__store_make_dir(s, "full", &err));
    put(s, "full/a", "a");
    OK(lg__store_make_dir(s, "other", &err));
    put(s, "other/b", "bb");
    OK(lg__store_make_dir(s, "empty", &err));
    put(s, "file", "x");
    if (x->kind->how == WITHOUT_RENAME) {
        assert_int_equal(lg_store_caps(s) & (LG_CAP_RENAME_DIR | LG_CAP_NO_REPLACE), 0);
        assert_int_equal(lg_store_caps(x->inner) & LG_CAP_RENAME_DIR, LG_CAP_RENAME_DIR);
        FAILS(LG_ERR_UNSUPPORTED, lg__store_rename_dir(s, "full", "new", &err));
        has_names(s, "", "empty/ file:1 full/ other/ ");
        return;
    }
    assert_int_equal(lg__store_can(s, LG_CAP_NO_REPLACE), x->kind->how != NO_REPLACE_UNKNOWN);
    FAILS(LG_ERR_EXISTS, lg__store_rename_dir(s, "full", "other", &err));
    FAILS(LG_ERR_EXISTS, lg__store_rename_dir(s, "full", "empty", &err));
    FAILS(LG_ERR_EXISTS, lg__store_rename_dir(s, "full", "file", &err));
    FAILS(LG_ERR_EXISTS, lg__store_rename_dir(s, "full", "full", &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_rename_dir(s, "none", "new", &err));
    FAILS(LG_ERR_FORMAT, lg__store_rename_dir(s, "file", "new", &err));
    FAILS(LG_ERR_INVALID, lg__store_rename_dir(s, "full", "full/below", &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_rename_dir(s, "full", "none/below", &err));
    has_names(s, "", "empty/ file:1 full/ other/ ");
    OK(lg__store_rename_dir(s, "full", "new", &err));
    has_names(s, "", "empty/ file:1 new/ other/ ");
    holds(s, "new/a", "a");
    FAILS(LG_ERR_NOT_FOUND, lg__store_rename_dir(s, "full", "new-2", &err));
}

static void writing_goes_on_in_a_renamed_folder(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_store *s = x->s;
    lg_file *f;
    if (x->kind->how == WITHOUT_RENAME) {
        return;
    }
    OK(lg__store_make_dir(s, "part", &err));
    OK(lg__store_create(s, "part/a", 0, &f, &err));
    OK(lg__store_write(s, f, "before ", 7, 0, &err));
    OK(lg__store_rename_dir(s, "part", "trash", &err));
    OK(lg__store_write(s, f, "after", 5, 7, &err));
    OK(lg__store_sync(s, f, &err));
    OK(lg__store_close(s, f, &err));
    holds(s, "trash/a", "before after");
    FAILS(LG_ERR_NOT_FOUND, lg__store_create(s, "part/b", 0, &f, &err));
}

static void renaming_files(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    OK(lg__store_make_dir(s, "d", &err));
    put(s, "d/a", "new");
    put(s, "d/b", "old");
    OK(lg__store_rename_file(s, "d/a", "d/b", &err));
    has_names(s, "d", "b:3 ");
    holds(s, "d/b", "new");
    OK(lg__store_rename_file(s, "d/b", "d/b", &err));
    OK(lg__store_rename_file(s, "d/b", "d/c", &err));
    has_names(s, "d", "c:3 ");
    FAILS(LG_ERR_NOT_FOUND, lg__store_rename_file(s, "d/b", "d/e", &err));
    FAILS(LG_ERR_INVALID, lg__store_rename_file(s, "d/c", "c", &err));
    FAILS(LG_ERR_INVALID, lg__store_rename_file(s, "d/c", "e/c", &err));
    has_names(s, "d", "c:3 ");
    /* no prefix of a name counts as the same folder */
    OK(lg__store_make_dir(s, "d2", &err));
    FAILS(LG_ERR_INVALID, lg__store_rename_file(s, "d/c", "d2/c", &err));
}

static void put_new_is_all_or_nothing(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    OK(lg__store_make_dir(s, "d", &err));
    put(s, "d/empty", "");
    put(s, "d/a", "first");
    FAILS(LG_ERR_EXISTS, lg__store_put_new(s, "d/a", "second", 6, &err));
    SAYS("d/a");
    FAILS(LG_ERR_EXISTS, lg__store_put_new(s, "d", "second", 6, &err));
    holds(s, "d/a", "first");
    has_names(s, "d", "a:5 empty:0 ");
    has_names(s, "", "d/ ");
}

enum { RACERS = 8, RACES = 25, RACE_BYTES = 20000 };

typedef struct racer {
    lg_store *s;
    pthread_barrier_t *start;
    unsigned number;
    bool by_create;
    lg_status results[RACES];
} racer;

static void *race(void *arg)
{
    racer *r = arg;
    lg_error err = LG_ERROR_INIT;
    char *mine = malloc(RACE_BYTES);
    memset(mine, 'A' + (int)r->number, RACE_BYTES);
    for (int i = 0; i < RACES; i++) {
        char path[32];
        snprintf(path, sizeof path, "d/race-%d", i);
        pthread_barrier_wait(r->start);
        if (r->by_create) {
            lg_file *f;
            r->results[i] = lg__store_create(r->s, path, 0, &f, &err);
            if (r->results[i] == LG_OK) {
                lg__store_write(r->s, f, mine, RACE_BYTES, 0, &err);
                lg__store_close(r->s, f, &err);
            }
        } else {
            r->results[i] = lg__store_put_new(r->s, path, mine, RACE_BYTES, &err);
        }
    }
    free(mine);
    return NULL;
}

static void eight_race(lg_store *s, bool by_create)
{
    lg_error err = LG_ERROR_INIT;
    static racer racers[RACERS];
    pthread_t threads[RACERS];
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, RACERS);
    OK(lg__store_make_dir(s, "d", &err));
    for (unsigned i = 0; i < RACERS; i++) {
        racers[i] = (racer){.s = s, .start = &start, .number = i, .by_create = by_create};
        assert_int_equal(pthread_create(&threads[i], NULL, race, &racers[i]), 0);
    }
    for (unsigned i = 0; i < RACERS; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_barrier_destroy(&start);
    for (int k = 0; k < RACES; k++) {
        int winner = -1;
        for (int i = 0; i < RACERS; i++) {
            if (racers[i].results[k] == LG_OK) {
                assert_int_equal(winner, -1);
                winner = i;
            } else {
                assert_int_equal(racers[i].results[k], LG_ERR_EXISTS);
            }
        }
        assert_int_not_equal(winner, -1);
        char path[32], want[RACE_BYTES + 1];
        snprintf(path, sizeof path, "d/race-%d", k);
        memset(want, 'A' + winner, RACE_BYTES);
        want[RACE_BYTES] = '\0';
        holds(s, path, want);
    }
    names all = {0};
    OK(lg__store_list(s, "d", add_name, &all, &err));
    assert_int_equal(all.n, RACES); /* and nothing temporary */
}

static void put_new_race(void **state) { eight_race(((fixture *)*state)->s, false); }
static void create_race(void **state) { eight_race(((fixture *)*state)->s, true); }

static int stop_at_second(const lg_node *node, void *arg)
{
    (void)node;
    return ++*(int *)arg == 2;
}

typedef struct remover {
    lg_store *s;
    int n;
} remover;

static int remove_it(const lg_node *node, void *arg)
{
    lg_error err = LG_ERROR_INIT;
    remover *r = arg;
    char path[300];
    assert_true(lg__path_join(path, sizeof path, "d", node->name));
    OK(lg__store_remove_file(r->s, path, &err));
    r->n++;
    return 0;
}

static void listing(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    OK(lg__store_make_dir(s, "d", &err));
    has_names(s, "d", "");
    put(s, "d/two", "22");
    put(s, "d/.hidden", "");
    put(s, "d/na[m]e *?", "1");
    OK(lg__store_make_dir(s, "d/sub", &err));
    has_names(s, "d", ".hidden:0 na[m]e *?:1 sub/ two:2 ");
    has_names(s, "", "d/ ");
    int calls = 0;
    OK(lg__store_list(s, "d", stop_at_second, &calls, &err));
    assert_int_equal(calls, 2);
    OK(lg__store_remove_dir(s, "d/sub", &err));
    for (int i = 0; i < 300; i++) {
        char path[32];
        snprintf(path, sizeof path, "d/file-%03d", i);
        put(s, path, "");
    }
    remover r = {s, 0};
    OK(lg__store_list(s, "d", remove_it, &r, &err)); /* none skipped because others go */
    assert_int_equal(r.n, 303);
    has_names(s, "d", "");
}

static void removing(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    OK(lg__store_make_dir(s, "d", &err));
    put(s, "d/a", "a");
    FAILS(LG_ERR_NOT_EMPTY, lg__store_remove_dir(s, "d", &err));
    SAYS("d: ");
    OK(lg__store_remove_file(s, "d/a", &err));
    OK(lg__store_remove_file(s, "d/a", &err));
    OK(lg__store_remove_dir(s, "d", &err));
    OK(lg__store_remove_dir(s, "d", &err));
    OK(lg__store_remove_file(s, "d/a", &err));
    has_names(s, "", "");
}

static void removed_but_open(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    lg_file *f;
    uint64_t bytes;
    const void *data;
    void *base;
    size_t mapped;
    char got[5];
    put(s, "a", "12345");
    OK(lg__store_open_file(s, "a", &f, &bytes, &err));
    OK(lg__store_map(s, f, 1, 3, &data, &base, &mapped, &err));
    OK(lg__store_remove_file(s, "a", &err));
    put(s, "a", "other");
    OK(lg__store_read(s, f, got, 5, 0, &err));
    assert_memory_equal(got, "12345", 5);
    OK(lg__store_close(s, f, &err));
    assert_memory_equal(data, "234", 3);
    lg__store_unmap(s, base, mapped);
}

static void mapping(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    enum { N = 3 * 65536 + 5 };
    unsigned char *want = malloc(N);
    for (int i = 0; i < N; i++) {
        want[i] = (unsigned char)(i * 7 + i / 251);
    }
    OK(lg__store_put_new(s, "a", want, N, &err));
    lg_file *f;
    uint64_t bytes;
    OK(lg__store_open_file(s, "a", &f, &bytes, &err));
    static const struct {
        uint64_t offset;
        size_t bytes;
        lg_status want;
    } cases[] = {
        {0, N, LG_OK},          {1, N - 1, LG_OK},      {4096, 4096, LG_OK},
        {65535, 2, LG_OK},      {N - 1, 1, LG_OK},      {N, 0, LG_OK},
        {N, 1, LG_ERR_CORRUPT}, {1, N, LG_ERR_CORRUPT}, {UINT64_MAX, 2, LG_ERR_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const void *data = NULL;
        void *base = NULL;
        size_t mapped = 0;
        check_status(lg__store_map(s, f, cases[i].offset, cases[i].bytes, &data, &base, &mapped, &err), cases[i].want,
                     "map", &err, __FILE__, __LINE__);
        if (cases[i].want == LG_OK) {
            assert_non_null(data);
            assert_memory_equal(data, want + cases[i].offset, cases[i].bytes);
            lg__store_unmap(s, base, mapped);
        } else {
            assert_null(data);
        }
    }
    OK(lg__store_close(s, f, &err));
    free(want);
}

static void invalid_paths(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    char long_name[300];
    memset(long_name, 'n', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    const char *const bad[] = {".",   "..",   "/",  "/etc/passwd", "../x",   "a/..",    "a/.",
                               "./a", "a//b", "a/", "a/b/c",       "..\n/x", long_name, NULL};
    lg_file *f = NULL;
    uint64_t bytes;
    put(s, "ok", "x");
    for (size_t i = 0; bad[i] != NULL; i++) {
        const char *p = bad[i];
        if (strcmp(p, "..\n/x") == 0) { /* valid, if strange: parts only look like ".." */
            continue;
        }
        FAILS(LG_ERR_INVALID, lg__store_make_dir(s, p, &err));
        FAILS(LG_ERR_INVALID, lg__store_create(s, p, 0, &f, &err));
        FAILS(LG_ERR_INVALID, lg__store_open_file(s, p, &f, &bytes, &err));
        FAILS(LG_ERR_INVALID, lg__store_put_new(s, p, "x", 1, &err));
        FAILS(LG_ERR_INVALID, lg__store_rename_file(s, p, "b", &err));
        FAILS(LG_ERR_INVALID, lg__store_rename_file(s, "ok", p, &err));
        FAILS(LG_ERR_INVALID, lg__store_rename_dir(s, p, "b", &err));
        FAILS(LG_ERR_INVALID, lg__store_rename_dir(s, "ok", p, &err));
        FAILS(LG_ERR_INVALID, lg__store_remove_file(s, p, &err));
        FAILS(LG_ERR_INVALID, lg__store_remove_dir(s, p, &err));
        FAILS(LG_ERR_INVALID, lg__store_list(s, p, add_name, NULL, &err));
        FAILS(LG_ERR_INVALID, lg__store_sync_dir(s, p, &err));
    }
    FAILS(LG_ERR_INVALID, lg__store_create(s, "", 0, &f, &err));
    FAILS(LG_ERR_INVALID, lg__store_remove_dir(s, "", &err));
    FAILS(LG_ERR_INVALID, lg__store_open_file(s, NULL, &f, &bytes, &err));
    assert_null(f);
    has_names(s, "", "ok:1 ");
}

static void helpers(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    OK(lg__store_make_dir(s, "d", &err));
    put(s, "d/a", "12345");
    lg__buf b;
    lg__buf_init(&b, 4);
    FAILS(LG_ERR_LIMIT, lg__store_read_all(s, "d/a", &b, &err));
    SAYS("5 bytes");
    assert_int_equal(b.len, 0);
    lg__buf_free(&b);
    lg__buf_init(&b, 5);
    lg__buf_str(&b, "old");
    OK(lg__store_read_all(s, "d/a", &b, &err));
    assert_string_equal(b.data, "12345");
    lg__buf_free(&b);
    bool there = false;
    OK(lg__store_exists(s, "d", "a", &there, &err));
    assert_true(there);
    OK(lg__store_exists(s, "d", "b", &there, &err));
    assert_false(there);
    OK(lg__store_exists(s, "", "d", &there, &err));
    assert_true(there);
    FAILS(LG_ERR_NOT_FOUND, lg__store_exists(s, "none", "a", &there, &err));
    char out[8];
    assert_true(lg__path_join(out, sizeof out, "abc", "def"));
    assert_string_equal(out, "abc/def");
    assert_true(lg__path_join(out, sizeof out, "", "def"));
    assert_string_equal(out, "def");
    assert_false(lg__path_join(out, sizeof out, "abcd", "def"));
}

static void errors_name_root_and_file(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    lg_file *f;
    uint64_t bytes;
    FAILS(LG_ERR_NOT_FOUND, lg__store_open_file(s, "some\nfile", &f, &bytes, &err));
    const char *name = lg__store_name(s);
    assert_memory_equal(err.message, name, strlen(name));  /* outside in */
    assert_null(strstr(err.message + strlen(name), name)); /* and once */
    SAYS("some\\x0afile");
    assert_null(strchr(err.message, '\n'));
    /* success leaves the error alone that one cleans up with */
    lg_error_set(&err, LG_ERR_CORRUPT, "first");
    put(s, "a", "x");
    OK(lg__store_remove_file(s, "a", &err));
    OK(lg__store_remove_file(s, "a", &err));
    OK(lg__store_sync_dir(s, "", &err));
    assert_int_equal(err.status, LG_ERR_CORRUPT);
    assert_string_equal(err.message, "first");
}

typedef struct worker {
    lg_store *s;
    unsigned number;
    lg_status st;
} worker;

static lg_status work(worker *w, lg_error *err)
{
    char path[32], tmp[40];
    unsigned char data[3000], got[3000];
    for (unsigned i = 0; i < 40; i++) {
        snprintf(path, sizeof path, "d/w%u-%u", w->number, i);
        snprintf(tmp, sizeof tmp, "%s.tmp", path);
        memset(data, (int)(w->number * 40 + i), sizeof data);
        lg_file *f;
        uint64_t bytes;
        LG__TRY(lg__store_create(w->s, tmp, sizeof data, &f, err));
        for (size_t at = 0; at < sizeof data; at += 1000) {
            LG__TRY(lg__store_write(w->s, f, data + at, 1000, at, err));
        }
        LG__TRY(lg__store_close(w->s, f, err));
        LG__TRY(lg__store_rename_file(w->s, tmp, path, err));
        LG__TRY(lg__store_open_file(w->s, path, &f, &bytes, err));
        LG__TRY(lg__store_read(w->s, f, got, sizeof got, 0, err));
        LG__TRY(lg__store_close(w->s, f, err));
        LG__RETURN_IF(memcmp(data, got, sizeof got) != 0, err, LG_ERR_CORRUPT, "%s differs", path);
        if (i % 2 == 0) {
            LG__TRY(lg__store_remove_file(w->s, path, err));
        }
        bool there;
        LG__TRY(lg__store_exists(w->s, "d", strchr(path, '/') + 1, &there, err));
        LG__RETURN_IF(there != (i % 2 == 1), err, LG_ERR_INTERNAL, "%s", path);
    }
    return LG_OK;
}

static void *run_worker(void *arg)
{
    lg_error err = LG_ERROR_INIT;
    worker *w = arg;
    w->st = work(w, &err);
    if (w->st != LG_OK) {
        print_error("%s\n", err.message);
    }
    return NULL;
}

static void threads_on_different_files(void **state)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = ((fixture *)*state)->s;
    worker w[8];
    pthread_t t[8];
    OK(lg__store_make_dir(s, "d", &err));
    for (unsigned i = 0; i < 8; i++) {
        w[i] = (worker){s, i, LG_ERR_INTERNAL};
        assert_int_equal(pthread_create(&t[i], NULL, run_worker, &w[i]), 0);
    }
    for (unsigned i = 0; i < 8; i++) {
        pthread_join(t[i], NULL);
        assert_int_equal(w[i].st, LG_OK);
    }
}

static void two_handles_one_root(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_store *second;
    OK(lg_store_open(x->uri, &second, &err));
    put(x->s, "a", "x");
    holds(second, "a", "x");
    FAILS(LG_ERR_EXISTS, lg__store_put_new(second, "a", "y", 1, &err));
    put(second, "b", "y");
    holds(x->s, "b", "y");
    lg_store_free(second);
}

/* One of everything; what the allocations in it make fail must leave nothing
 * behind (the address sanitizer sees to it) and say so. */
static lg_status one_of_everything(lg_store *s, bool rename, lg_error *err)
{
    lg_file *f = NULL;
    uint64_t bytes;
    LG__TRY(lg__store_make_dir(s, "d", err));
    LG__TRY(lg__store_create(s, "d/a", 10, &f, err));
    lg_status st = lg__store_write(s, f, "0123456789ABC", 13, 0, err);
    lg__store_close(s, f, err);
    LG__TRY(st);
    LG__TRY(lg__store_put_new(s, "d/b", "b", 1, err));
    LG__TRY(lg__store_rename_file(s, "d/b", "d/c", err));
    if (rename) {
        LG__TRY(lg__store_rename_dir(s, "d", "e", err));
        LG__TRY(lg__store_rename_dir(s, "e", "d", err));
    }
    bool there;
    LG__TRY(lg__store_exists(s, "d", "none", &there, err));
    LG__TRY(lg__store_open_file(s, "d/a", &f, &bytes, err));
    return lg__store_close(s, f, err);
}

static void clean(lg_store *s)
{
    lg_error err = LG_ERROR_INIT;
    const char *const left[] = {"d/a", "d/b", "d/c", "e/a", "e/b", "e/c"};
    for (size_t i = 0; i < 6; i++) {
        OK(lg__store_remove_file(s, left[i], &err));
    }
    OK(lg__store_remove_dir(s, "d", &err));
    OK(lg__store_remove_dir(s, "e", &err));
    has_names(s, "", "");
}

static void memory_runs_out(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    size_t n = 0;
    for (;; n++) {
        lg__mem_fail_after(n);
        lg_status st = one_of_everything(x->s, x->kind->how != WITHOUT_RENAME, &err);
        lg__mem_fail_after(SIZE_MAX);
        clean(x->s);
        if (st == LG_OK) {
            break;
        }
        assert_int_equal(st, LG_ERR_NOMEM);
        assert_true(n < 1000);
    }
    assert_true(n >= 3); /* it did fail somewhere */
    lg_store *s = NULL;
    for (n = 0; s == NULL; n++) {
        lg__mem_fail_after(n);
        lg_status st = lg_store_open(x->uri, &s, &err);
        lg__mem_fail_after(SIZE_MAX);
        assert_true(st == LG_OK || (st == LG_ERR_NOMEM && s == NULL));
    }
    lg_store_free(s);
}

/* ------------------------------------------------ handles, URIs, memory alone */

static void uris(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    char dir[256], cwd[1024];
    temp_dir_make(dir);
    assert_non_null(getcwd(cwd, sizeof cwd));
    assert_int_equal(chdir(dir), 0);
    char absolute[300], local[300], odd[300];
    snprintf(absolute, sizeof absolute, "file://%s/abs", dir);
    snprintf(local, sizeof local, "file://localhost%s/a%%20b%%5bc%%25", dir);
    snprintf(odd, sizeof odd, "file:%s/p%%20q", dir);
    const struct {
        const char *uri, *name; /* of the folder that it is */
    } good[] = {
        {"plain", "plain"},
        {"a[1]b", "a[1]b"},
        {"a:b", "a:b"},
        {"C:\\x", "C:\\x"},
        {"*?{a,b}", "*?{a,b}"},
        {"~", "~"},
        {"$HOME", "$HOME"},
        {"slash/", "slash"},
        {"file", "file"},
        {"mem", "mem"},
        {"./mem:x", "mem:x"},
        {"file:mem:y", "mem:y"},
        {"file:rel", "rel"},
        {"filex:rel", "filex:rel"},
        {"per%20cent", "per%20cent"},
        {"ümläut 名", "ümläut 名"},
        {absolute, "abs"},
        {local, "a b[c%"},
        {odd, "p%20q"},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        lg_store *s;
        OK(lg_store_open(good[i].uri, &s, &err));
        FAILS(LG_ERR_NOT_FOUND, lg__store_list(s, "", add_name, NULL, &err));
        OK(lg__store_make_root(s, &err));
        put(s, "mark", "x");
        lg_store_free(s);
        char path[600];
        snprintf(path, sizeof path, "%s/%s/mark", dir, good[i].name);
        if (access(path, F_OK) != 0) {
            fail_msg("\"%s\" did not make \"%s\"", good[i].uri, path);
        }
    }
    const char *const bad[] = {"",          "file:",      "mem:",          "file://",    "file://rel", "file://host/x",
                               "file:///%", "file:///%2", "file:///a%00b", "file:///%zz"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        lg_store *s = NULL;
        FAILS(LG_ERR_INVALID, lg_store_open(bad[i], &s, &err));
        assert_null(s);
    }
    lg_store *s = NULL;
    FAILS(LG_ERR_INVALID, lg_store_open(NULL, &s, &err));
    FAILS(LG_ERR_INVALID, lg_store_open("x", NULL, &err));
    assert_int_equal(lg_store_open("", &s, NULL), LG_ERR_INVALID);
    /* "s3://" is a path here, which then is not there; the message says so */
    OK(lg_store_open("s3://bucket/x", &s, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_make_root(s, &err));
    SAYS("\"s3://\" is no scheme");
    lg_store_free(s);
    assert_int_equal(chdir(cwd), 0);
    temp_dir_remove(dir);
}

static void memory_roots(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg_store *a, *b, *c;
    OK(lg_store_open("mem:one", &a, &err));
    OK(lg_store_open("mem:two", &b, &err));
    OK(lg__store_make_root(a, &err));
    OK(lg__store_make_root(b, &err));
    put(a, "x", "1");
    has_names(b, "", "");
    lg_store_free(a);
    OK(lg_store_open("mem:one", &a, &err)); /* kept with no handle open */
    holds(a, "x", "1");
    /* dropped while open: this handle goes on, the name is free */
    lg_memory_store_drop("one");
    holds(a, "x", "1");
    OK(lg_store_open("mem:one", &c, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_list(c, "", add_name, NULL, &err));
    OK(lg__store_make_root(c, &err));
    has_names(c, "", "");
    put(a, "y", "2");
    has_names(c, "", "");
    lg_file *f = NULL;
    FAILS(LG_ERR_NOMEM, lg__store_create(b, "large", UINT64_MAX, &f, &err));
    has_names(b, "", "");
    lg_store_free(a);
    lg_store_free(b);
    lg_store_free(c);
    lg_memory_store_drop("one");
    lg_memory_store_drop("two");
    lg_memory_store_drop("never");
    lg_memory_store_drop(NULL);
}

static void memory_maps_survive_growth(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg_store *s;
    lg_file *w, *r;
    uint64_t bytes;
    const void *data;
    void *base;
    size_t mapped;
    char big[10000];
    memset(big, 'z', sizeof big);
    OK(lg_store_open("mem:grow", &s, &err));
    OK(lg__store_make_root(s, &err));
    OK(lg__store_create(s, "a", 0, &w, &err));
    OK(lg__store_write(s, w, "start", 5, 0, &err));
    OK(lg__store_open_file(s, "a", &r, &bytes, &err));
    OK(lg__store_map(s, r, 0, 5, &data, &base, &mapped, &err));
    for (int i = 0; i < 50; i++) {
        OK(lg__store_write(s, w, big, sizeof big, 5 + (uint64_t)i * sizeof big, &err));
    }
    assert_memory_equal(data, "start", 5);
    OK(lg__store_close(s, w, &err));
    OK(lg__store_close(s, r, &err));
    lg_store_free(s);
    lg_memory_store_drop("grow");
    assert_memory_equal(data, "start", 5); /* until unmap, whatever goes */
    OK(lg_store_open("mem:grow", &s, &err));
    lg__store_unmap(s, base, mapped);
    lg_store_free(s);
}

static const char *describe_nothing(void *ctx)
{
    (void)ctx;
    return "nowhere";
}

static lg_status silent_failure(void *ctx, lg_error *err)
{
    (void)ctx, (void)err;
    return LG_ERR_READ_ONLY;
}

static int destroyed;
static void count_destroy(void *ctx)
{
    (void)ctx;
    destroyed++;
}

static void creating_a_store(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg_store *memory, *s = NULL;
    OK(lg_store_open("mem:ops", &memory, &err));
    lg_store_ops ops = *memory->ops;
    ops.destroy = count_destroy;
    ops.describe = describe_nothing;
    ops.make_root = silent_failure;
    ops.version = LG_STORE_OPS_VERSION + 1;
    FAILS(LG_ERR_INVALID, lg_store_create(&ops, NULL, &s, &err));
    SAYS("version 2");
    ops.version = LG_STORE_OPS_VERSION;
    ops.map = NULL;
    FAILS(LG_ERR_INVALID, lg_store_create(&ops, NULL, &s, &err)); /* LG_CAP_MAP without map */
    FAILS(LG_ERR_INVALID, lg_store_create(NULL, NULL, &s, &err));
    assert_null(s);
    assert_int_equal(destroyed, 0);
    ops.caps &= ~(uint32_t)(LG_CAP_MAP | LG_CAP_SYNC_DIR | LG_CAP_CONDITIONAL_CREATE);
    ops.put_new = NULL;
    ops.sync_dir = NULL;
    OK(lg_store_create(&ops, NULL, &s, &err));
    OK(lg__store_sync_dir(s, "", &err)); /* names are durable at once */
    FAILS(LG_ERR_UNSUPPORTED, lg__store_put_new(s, "a", "x", 1, &err));
    FAILS(LG_ERR_UNSUPPORTED, lg__store_map(s, NULL, 0, 0, NULL, NULL, NULL, &err));
    FAILS(LG_ERR_READ_ONLY, lg__store_make_root(s, &err)); /* which said nothing */
    SAYS("nowhere: make the root: read-only");
    lg_store *view = NULL;
    OK(lg_store_without(s, LG_CAP_RENAME_DIR, &view, &err));
    FAILS(LG_ERR_INVALID, lg_store_without(NULL, 0, &view, &err));
    lg_store_free(view);
    assert_int_equal(destroyed, 0); /* a view owns nothing */
    lg_store_free(s);
    assert_int_equal(destroyed, 1);
    lg_store_free(NULL);
    assert_int_equal(lg_store_caps(NULL), 0);
    lg_store_free(memory);
}

/* -------------------------------------------------------------------- main */

typedef struct behaviour {
    const char *name;
    CMUnitTestFunction test;
} behaviour;

static const behaviour behaviours[] = {
    {"a root that was not made is not found, and is named", a_root_not_made},
    {"K05 F085: create and make_dir are exclusive", create_is_exclusive},
    {"bytes written at any offset come back, and the length is what was written", writes_at_offsets},
    {"reading past the end is damage, out of range is invalid", reading_past_the_end},
    {"not found means not there; a wrong kind of node is told apart", not_found_and_wrong_kinds},
    {"renaming a folder moves its contents and replaces nothing", renaming_folders},
    {"a file goes on being written in its renamed folder", writing_goes_on_in_a_renamed_folder},
    {"renaming a file replaces the target, within one folder", renaming_files},
    {"put_new creates all or nothing and leaves no other name", put_new_is_all_or_nothing},
    {"K05 F083: of eight put_new at once one wins, and its contents are whole", put_new_race},
    {"K05 F083: of eight creates at once one wins", create_race},
    {"list gives every name, and its callback may remove them", listing},
    {"removing twice succeeds, a folder with names in it stays", removing},
    {"a removed file stays readable and mapped for who has it open", removed_but_open},
    {"map gives any range of a file and refuses what lies behind its end", mapping},
    {"K15 F259: no path leads out of the root", invalid_paths},
    {"read_all keeps to its limit, exists looks by listing", helpers},
    {"an error names root and file once; success leaves it alone", errors_name_root_and_file},
    {"eight threads work on different files at once", threads_on_different_files},
    {"two handles on one root see the same", two_handles_one_root},
    {"an allocation that fails anywhere is reported and leaves nothing", memory_runs_out},
};

static const behaviour others[] = {
    {"K19 F307 F308: paths are no patterns, only file: and mem: are schemes", uris},
    {"memory roots are kept by name until dropped", memory_roots},
    {"a mapping in memory stays where it is when the file grows", memory_maps_survive_growth},
    {"lg_store_create refuses tables that lack what they promise", creating_a_store},
};

int main(void)
{
    enum { F = sizeof factories / sizeof factories[0], B = sizeof behaviours / sizeof behaviours[0] };
    enum { O = sizeof others / sizeof others[0] };
    static char text[F * B][200];
    static struct CMUnitTest tests[F * B + O];
    size_t n = 0;
    for (size_t f = 0; f < F; f++) {
        for (size_t b = 0; b < B; b++, n++) {
            snprintf(text[n], sizeof text[n], "%s: %s", factories[f].name, behaviours[b].name);
            tests[n] = (struct CMUnitTest){text[n], behaviours[b].test, setup, teardown, (void *)&factories[f]};
        }
    }
    for (size_t o = 0; o < O; o++, n++) {
        tests[n] = (struct CMUnitTest){others[o].name, others[o].test, NULL, NULL, NULL};
    }
    return _cmocka_run_group_tests("store", tests, n, NULL, NULL);
}
