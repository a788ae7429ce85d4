/* SPDX-License-Identifier: Apache-2.0 */

/* Roots in which somebody else has put things: links, FIFOs, sockets, devices,
 * names with numbers at their limits, files of a terabyte, files that may not
 * be read. Nothing outside of the root is changed or read as a checkpoint,
 * nothing waits, and what is refused is named. */

#include "base/json.h"
#include "core/owner.h"
#include "format/manifest.h"
#include "support/check.h"
#include "support/ranks.h"
#include "support/temp_dir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define SECONDS_MOST 120 /* of one test: what waits for a FIFO is killed */
#define CANARY "untouched\n"
#define TERABYTE ((off_t)1 << 40)

typedef struct fixture {
    char base[256];
    test_root root; /* base/root, with steps 10 and 20 of two ranks */
    char folder[2][64];
    size_t descriptors;
    mode_t umask;
} fixture;

/* base/NAME; valid until three more calls. */
static const char *below(const fixture *x, const char *format, ...) LG_PRINTF(2, 3);
static const char *below(const fixture *x, const char *format, ...)
{
    static char paths[4][1024];
    static int next;
    char *out = paths[next++ % 4], name[700];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    snprintf(out, 1024, "%s/%s", x->base, name);
    return out;
}

static void write_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
    assert_int_equal(fclose(f), 0);
}

static void save_steps(fixture *x, const uint64_t *steps, size_t n, uint32_t keep_last)
{
    run_spec spec = {.world = 2, .steps = steps, .n_steps = n, .keep_last = keep_last};
    root_run(&x->root, &spec);
}

static int setup(void **state)
{
    fixture *x = calloc(1, sizeof *x);
    assert_non_null(x);
    lg_error err = LG_ERROR_INIT;
    x->umask = umask(022);
    x->descriptors = open_descriptors();
    temp_dir_make(x->base);
    x->root = (test_root){.kind = ROOT_POSIX};
    snprintf(x->root.path, sizeof x->root.path, "%.240s/root", x->base);
    OK(lg_store_open(x->root.path, &x->root.store, &err));
    x->root.inner = x->root.store;
    save_steps(x, STEPS(10, 20), 0);
    assert_int_equal(root_folders(&x->root, x->folder, 2), 2);
    assert_int_equal(mkdir(below(x, "outside"), 0777), 0);
    assert_int_equal(mkdir(below(x, "outside/folder"), 0777), 0);
    write_file(below(x, "outside/canary"), CANARY);
    write_file(below(x, "outside/folder/canary"), CANARY);
    alarm(SECONDS_MOST);
    *state = x;
    return 0;
}

static int teardown(void **state)
{
    fixture *x = *state;
    alarm(0);
    umask(x->umask);
    lg_store_free(x->root.store);
    temp_dir_remove(x->base);
    int result = descriptors_left(x->descriptors);
    free(x);
    return result;
}

static void is_canary(const char *path)
{
    char text[64] = "";
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        fail_msg("%s: %s", path, strerror(errno));
    }
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = '\0';
    assert_string_equal(text, CANARY);
}

/* Nothing there but what was there; `more` names were put there by the test. */
static void outside_is_untouched(const fixture *x, size_t more)
{
    is_canary(below(x, "outside/canary"));
    is_canary(below(x, "outside/folder/canary"));
    assert_int_equal(count_names(below(x, "outside")), 2 + more);
    assert_int_equal(count_names(below(x, "outside/folder")), 1);
}

/* ------------------------------------------------------ what can be planted */

enum { LINK, BROKEN_LINK, FIFO, SOCKET, DEVICE, FOLDER, PLANTS };
static const char *const plant_names[PLANTS] = {"symbolic link", "symbolic link", "FIFO", "socket", "device", "folder"};

/* false: this one needs privileges that the test has not. `target` is what a
 * link leads to. */
static bool plant(const char *path, int kind, const char *target)
{
    switch (kind) {
    case LINK:
        assert_int_equal(symlink(target, path), 0);
        return true;
    case BROKEN_LINK:
        assert_int_equal(symlink("none", path), 0);
        return true;
    case FIFO:
        assert_int_equal(mkfifo(path, 0666), 0);
        return true;
    case SOCKET:
        make_socket(path);
        return true;
    case DEVICE:
        return mknod(path, S_IFCHR | 0666, makedev(1, 5)) == 0; /* zeros without end */
    default:
        assert_int_equal(mkdir(path, 0777), 0);
        return true;
    }
}

/* What the root's list says of one name. */
static lg_entry listed(const fixture *x, const char *name)
{
    lg_error err = LG_ERROR_INIT;
    lg_listing *l = NULL;
    lg_entry e = {.kind = LG_ENTRY_FOREIGN};
    bool there = false;
    OK(lg_list(x->root.path, LG_LIST_ALL, &l, &err));
    for (size_t i = 0; i < l->n; i++) {
        if (strcmp(l->entries[i].name, name) == 0) {
            e = l->entries[i];
            there = true;
        }
    }
    lg_listing_free(l);
    if (!there) {
        fail_msg("%s is not listed", name);
    }
    return e;
}

/* Damaged, for a reason that names the file. */
static void is_damaged(const fixture *x, const char *folder, const char *file)
{
    lg_entry e = listed(x, folder);
    if (e.kind != LG_ENTRY_COMMITTED || e.status == LG_OK || strstr(e.reason, file) == NULL) {
        fail_msg("%s: %s, %s: \"%s\" does not name %s", folder, lg_entry_kind_name(e.kind), lg_status_name(e.status),
                 e.reason, file);
    }
}

static void verify_fails(const fixture *x, uint64_t step, const char *file)
{
    char where[400];
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint *c = NULL;
    lg_verify_result result;
    snprintf(where, sizeof where, "%s@%llu", x->root.path, (unsigned long long)step);
    lg_status st = lg_checkpoint_open(where, &c, &err);
    if (st == LG_OK) {
        st = lg_verify(c, NULL, &result, &err);
        lg_checkpoint_close(c);
    }
    if (st == LG_OK || strstr(err.message, file) == NULL) {
        fail_msg("verify: %s: \"%s\" does not name %s", lg_status_name(st), err.message, file);
    }
}

static void nothing_in_the_place_of_a_file_is_followed_or_waited_for(void **state)
{
    fixture *x = *state;
    char files[32][64];
    size_t n = 0;
    DIR *d = opendir(below(x, "root/%s", x->folder[1]));
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (e->d_name[0] != '.') {
            assert_true(n < 32);
            snprintf(files[n++], sizeof files[0], "%.63s", e->d_name);
        }
    }
    closedir(d);
    assert_true(n >= 8);
    for (size_t i = 0; i < n; i++) {
        const char *stolen = below(x, "outside/stolen");
        char path[1024];
        snprintf(path, sizeof path, "%s", below(x, "root/%s/%s", x->folder[1], files[i]));
        assert_int_equal(rename(path, stolen), 0);
        for (int kind = 0; kind < PLANTS; kind++) {
            /* the right bytes are behind the link, but not in the root */
            if (!plant(path, kind, below(x, "outside/stolen"))) {
                print_message("# a device: skipped, mknod needs privileges\n");
                continue;
            }
            print_message("# a %s in place of %s\n", plant_names[kind], files[i]);
            assert_int_equal(newest(x->root.store), 10);
            is_damaged(x, x->folder[1], files[i]);
            verify_fails(x, 20, files[i]);
            assert_int_equal(remove(path), 0);
        }
        outside_is_untouched(x, 1);
        /* A hard link is a file like any other. */
        assert_int_equal(link(below(x, "outside/stolen"), path), 0);
        assert_int_equal(newest(x->root.store), 20);
        assert_int_equal(unlink(path), 0);
        assert_int_equal(rename(below(x, "outside/stolen"), path), 0);
    }
    assert_int_equal(newest(x->root.store), 20);
    outside_is_untouched(x, 0);
}

/* ------------------------------------------------------- names in the root */

static void step_folders_that_are_links_are_foreign(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    char path[1024];
    snprintf(path, sizeof path, "%s", below(x, "root/%s", x->folder[1]));
    assert_int_equal(rename(path, below(x, "outside/20")), 0);
    assert_int_equal(symlink(below(x, "outside/20"), path), 0);
    size_t files = count_names(below(x, "outside/20"));
    assert_int_equal(listed(x, x->folder[1]).kind, LG_ENTRY_FOREIGN);
    assert_int_equal(newest(x->root.store), 10);
    lg_checkpoint *c = NULL;
    FAILS(LG_ERR_FORMAT, lg_checkpoint_open(path, &c, &err));
    SAYS("symbolic link");
    FAILS(LG_ERR_FORMAT, lg_remove(path, &err));
    FAILS(LG_ERR_FORMAT, lg_pin(path, 1, NULL, &err));
    FAILS(LG_ERR_FORMAT, lg_rollback(path, NULL, NULL, &err));
    /* 10 is passed, so it goes; 20 was never there */
    save_steps(x, STEPS(30, 40), 1);
    lg_prune_options prune = LG_PRUNE_OPTIONS_INIT;
    prune.keep_last = 1, prune.dry_run = 0;
    OK(lg_prune(x->root.path, &prune, NULL, NULL, &err));
    OK(lg_sweep(x->root.path, 0, NULL, NULL, &err));
    assert_int_equal(newest(x->root.store), 40);
    struct stat st;
    assert_int_equal(lstat(path, &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    assert_int_equal(count_names(below(x, "outside/20")), files);
    outside_is_untouched(x, 1);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rename(below(x, "outside/20"), path), 0);
    assert_int_equal(newest(x->root.store), 40);
}

static void names_of_ours_that_are_no_files_or_folders_of_ours_do_nothing(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    static const char *const names[] = {".owner-7",
                                        ".owner-8",
                                        "rollback-9.1.json",
                                        "step-000000000099.g9.9",
                                        ".step-000000000030.g1.9.0123456789abcdef.partial",
                                        ".trash-1.0123456789abcdef-step-000000000001.g1.1"};
    enum { N = sizeof names / sizeof *names };
    for (int kind = 0; kind < PLANTS; kind++) {
        size_t planted = 0;
        for (size_t i = 0; i < N; i++) {
            bool is_folder = i >= 3;
            if (kind == FOLDER && is_folder) {
                continue; /* it would be ours */
            }
            const char *target = below(x, "%s", is_folder ? "outside/folder" : "outside/canary");
            planted += plant(below(x, "root/%s", names[i]), kind, target);
        }
        print_message("# %zu names of ours, each a %s\n", planted, plant_names[kind]);
        assert_int_equal(newest(x->root.store), 20);
        OK(lg_sweep(x->root.path, 0, NULL, NULL, &err));
        lg_session *s = open_alone(x->root.path, &err);
        assert_non_null(s);
        lg_session_close(s, NULL);
        outside_is_untouched(x, 0);
        for (size_t i = 0; i < N; i++) {
            struct stat st;
            if (lstat(below(x, "root/%s", names[i]), &st) == 0) {
                lg_entry e = listed(x, names[i]);
                assert_int_equal(e.kind == LG_ENTRY_OWNER || e.kind == LG_ENTRY_FOREIGN, 1);
                assert_int_equal(remove(below(x, "root/%s", names[i])), 0);
                planted -= e.kind == LG_ENTRY_FOREIGN;
            }
        }
        assert_int_equal(planted, 0); /* each of them is as it was */
        assert_int_equal(newest(x->root.store), 20);
    }
}

static void an_owner_file_is_never_created_through_a_link(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    uint64_t highest = 0;
    OK(lg__root_highest_owner(x->root.store, &highest, &err));
    for (uint64_t i = 1; i <= 3; i++) {
        const char *path = below(x, "root/.owner-%llu", (unsigned long long)(highest + i));
        assert_int_equal(symlink(below(x, "outside/made-%llu", (unsigned long long)i), path), 0);
    }
    lg_session *s = open_alone(x->root.path, &err);
    assert_non_null(s);
    assert_int_equal(lg_session_epoch(s), highest + 4);
    lg_session_close(s, NULL);
    outside_is_untouched(x, 0);
}

static void a_name_that_is_taken_fails_one_save_and_the_next_works(void **state)
{
    fixture *x = *state;
    uint64_t step = 20;
    for (int kind = 0; kind < PLANTS; kind++) {
        lg_error err = LG_ERROR_INIT;
        lg_session *s = open_alone(x->root.path, &err);
        assert_non_null(s);
        model m;
        model_init(&m, 0, 1);
        lg_save_info info;
        step += 10;
        model_fill(&m, step);
        OK(model_save(s, &m, step, &info, &err));
        char name[LG__NAME_MAX];
        lg__step_folder(step + 1, (lg_generation){info.generation.epoch, info.generation.serial + 1}, name);
        if (plant(below(x, "root/%s", name), kind, below(x, "outside/folder"))) {
            print_message("# a %s where the next step is to be\n", plant_names[kind]);
            model_fill(&m, step + 1);
            lg_status st = model_save(s, &m, step + 1, &info, &err);
            if (st == LG_OK || strstr(err.message, name) == NULL) {
                fail_msg("%s: \"%s\" does not name %s", lg_status_name(st), err.message, name);
            }
            assert_int_equal(newest(x->root.store), step);
            OK(model_save(s, &m, step + 1, &info, &err));
            assert_int_equal(newest(x->root.store), step + 1);
            struct stat node;
            assert_int_equal(lstat(below(x, "root/%s", name), &node), 0);
            outside_is_untouched(x, 0);
            assert_int_equal(remove(below(x, "root/%s", name)), 0);
        }
        lg_session_close(s, NULL);
    }
}

static void numbers_at_their_limits_stop_writers_with_the_name_and_nothing_else(void **state)
{
    fixture *x = *state;
    static const struct {
        const char *name;
        bool is_folder, stops, hides; /* hides: what is newest is not known any more */
    } cases[] = {
        {".owner-9007199254740992", false, true, false},
        {".owner-18446744073709551615", false, true, false},
        {".step-000000000001.g9007199254740992.1.0123456789abcdef.partial", true, true, false},
        {".trash-18446744073709551615.0123456789abcdef-x", true, true, false},
        {"step-000000000001.g18446744073709551615.1", true, true, false},
        {"rollback-9007199254740992.1.json", false, true, true},
        {".owner-9007199254740990", false, false, false},
        /* not made by us: the number has another form, or is none */
        {".owner-18446744073709551616", false, false, false},
        {".owner-007", false, false, false},
        {".owner--1", false, false, false},
        {".owner-+1", false, false, false},
        {".owner-99 ", false, false, false},
        {".OWNER-9007199254740992", false, false, false},
        {"STEP-000000000099.G9.9", true, false, false},
        {"step-99.g9.9", true, false, false},
        {"step-000000000099.g9", true, false, false},
        {"step-000000000099.g9.9.", true, false, false},
        {"Rollback-9.9.json", false, false, false},
        {"rollback-9.09.json", false, false, false},
        {".trash-1.0123456789ABCDEF-x", true, false, false},
        {"LASTGOOD.JSON", false, false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lg_error err = LG_ERROR_INIT;
        const char *path = below(x, "root/%s", cases[i].name);
        if (cases[i].is_folder) {
            assert_int_equal(mkdir(path, 0777), 0);
        } else {
            write_file(path, "");
        }
        if (!cases[i].hides) {
            assert_int_equal(newest(x->root.store), 20);
        }
        lg_session *s = NULL;
        lg_status st = lg_session_open(x->root.path, NULL, &s, &err);
        print_message("#   %s: %s\n", cases[i].name, st == LG_OK ? "opens" : err.message);
        if (cases[i].stops) {
            assert_int_equal(st, LG_ERR_LIMIT);
            assert_non_null(strstr(err.message, cases[i].name));
        } else {
            assert_int_equal(st, LG_OK);
            lg_session_close(s, NULL);
        }
        assert_int_equal(remove(below(x, "root/%s", cases[i].name)), 0);
        if (strcmp(cases[i].name, ".owner-9007199254740990") == 0) { /* the claim above it stays */
            assert_int_equal(remove(below(x, "root/.owner-9007199254740991")), 0);
        }
    }
    assert_int_equal(newest(x->root.store), 20);
    lg_error err = LG_ERROR_INIT;
    lg_session *s = open_alone(x->root.path, &err);
    assert_non_null(s);
    lg_session_close(s, NULL);
}

/* ------------------------------------------------------------------ removal */

static void fill_with_traps(const fixture *x, const char *folder)
{
    for (int kind = 0; kind < FOLDER; kind++) {
        char name[600];
        snprintf(name, sizeof name, "%.500s/trap-%d", folder, kind);
        plant(below(x, "%s", name), kind, below(x, "outside/folder"));
    }
    assert_int_equal(symlink(below(x, "outside/canary"), below(x, "%s/trap-file", folder)), 0);
    assert_int_equal(link(below(x, "outside/canary"), below(x, "%s/trap-hard", folder)), 0);
    assert_int_equal(symlink("..", below(x, "%s/trap-up", folder)), 0);
}

static void removal_takes_links_away_and_leaves_what_they_lead_to(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    static const char *const names[] = {"root/.trash-1.0123456789abcdef-step-000000000001.g1.1",
                                        "root/.step-000000000030.g0.9.0123456789abcdef.partial"};
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(mkdir(below(x, "%s", names[i]), 0777), 0);
        fill_with_traps(x, names[i]);
    }
    OK(lg_sweep(x->root.path, 0, NULL, NULL, &err));
    for (size_t i = 0; i < 2; i++) {
        assert_int_not_equal(access(below(x, "%s", names[i]), F_OK), 0);
    }
    outside_is_untouched(x, 0);
    /* A checkpoint that goes by retention, and by hand. */
    char folder[200];
    snprintf(folder, sizeof folder, "root/%s", x->folder[0]);
    fill_with_traps(x, folder);
    snprintf(folder, sizeof folder, "root/%s", x->folder[1]);
    fill_with_traps(x, folder);
    char where[300];
    snprintf(where, sizeof where, "%.280s@10", x->root.path);
    OK(lg_remove(where, &err));
    save_steps(x, STEPS(30, 40), 1);
    assert_int_equal(newest(x->root.store), 40);
    assert_int_not_equal(access(below(x, "root/%s", x->folder[1]), F_OK), 0);
    outside_is_untouched(x, 0);
}

static void a_folder_put_into_a_folder_of_ours_stays_and_is_named(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    static const char trash[] = "root/.trash-1.0123456789abcdef-a", other[] = "root/.trash-1.0123456789abcdef-b";
    assert_int_equal(mkdir(below(x, "%s", trash), 0777), 0);
    assert_int_equal(mkdir(below(x, "%s/theirs", trash), 0777), 0);
    write_file(below(x, "%s/theirs/thesis.tex", trash), CANARY);
    assert_int_equal(mkdir(below(x, "%s", other), 0777), 0);
    FAILS(LG_ERR_NOT_EMPTY, lg_sweep(x->root.path, 0, NULL, NULL, &err));
    SAYS("theirs");
    is_canary(below(x, "%s/theirs/thesis.tex", trash));
    assert_int_not_equal(access(below(x, "%s", other), F_OK), 0); /* the others go all the same */
    /* In a checkpoint: the trainer is not stopped, and is told. */
    assert_int_equal(mkdir(below(x, "root/%s/theirs", x->folder[0]), 0777), 0);
    write_file(below(x, "root/%s/theirs/thesis.tex", x->folder[0]), CANARY);
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.keep_last = 1;
    lg_session *s = NULL;
    OK(lg_session_open(x->root.path, &o, &s, &err));
    model m;
    model_init(&m, 0, 1);
    lg_resume_result *r = NULL;
    OK(lg_resume(s, NULL, model_targets, &m, &r, &err));
    lg_resume_result_free(r);
    model_fill(&m, 30);
    OK(model_save(s, &m, 30, NULL, &err));
    lg_session_status status;
    OK(lg_session_get_status(s, &status, &err));
    assert_true(status.removal_failures > 0);
    assert_non_null(strstr(status.last_removal_error, "theirs"));
    lg_session_close(s, NULL);
    assert_int_equal(newest(x->root.store), 30);
}

/* --------------------------------------------------------- names in a file */

/* Puts `name` in the place of the attached file's name, with a right checksum. */
static void attach_as(const fixture *x, const char *folder, const char *name)
{
    lg_error err = LG_ERROR_INIT;
    char path[2 * LG__NAME_MAX];
    snprintf(path, sizeof path, "%.100s/lastgood.json", folder);
    lg__buf bytes, sealed;
    lg__buf_init(&bytes, LG__MANIFEST_MAX);
    lg__buf_init(&sealed, LG__MANIFEST_MAX);
    OK(lg__store_read_all(x->root.store, path, &bytes, &err));
    json_t *top = NULL;
    OK(lg__sealed_json_parse(bytes.data, bytes.len, &top, &err));
    assert_int_equal(json_object_del(top, "crc32c"), 0);
    json_t *row = json_array_get(json_object_get(top, "attached"), 0);
    assert_non_null(row);
    assert_int_equal(json_object_set_new(row, "name", json_string(name)), 0);
    char *text = json_dumps(top, JSON_COMPACT);
    assert_non_null(text);
    OK(lg__sealed_json(text + 1, strlen(text) - 1, &sealed, &err));
    OK(lg__store_remove_file(x->root.store, path, &err));
    OK(lg__store_put_new(x->root.store, path, sealed.data, sealed.len, &err));
    free(text);
    json_decref(top);
    lg__buf_free(&bytes);
    lg__buf_free(&sealed);
}

static void no_name_in_a_manifest_leads_out(void **state)
{
    fixture *x = *state;
    static const char *const names[] = {"../outside/canary",
                                        "../../outside/canary",
                                        "/etc/passwd",
                                        "..",
                                        ".",
                                        "a/b",
                                        "x/../canary",
                                        "lastgood.json",
                                        ""};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        attach_as(x, x->folder[1], names[i]);
        assert_int_equal(newest(x->root.store), 10);
        lg_entry e = listed(x, x->folder[1]);
        print_message("#   %s\n", e.reason);
        assert_int_equal(e.status, LG_ERR_FORMAT);
        assert_non_null(strstr(e.reason, "attached[0]"));
    }
    attach_as(x, x->folder[1], "config.json"); /* the file that is there */
    assert_int_equal(newest(x->root.store), 20);
    outside_is_untouched(x, 0);
}

/* -------------------------------------------------------------------- sizes */

static void make_huge(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT, 0666);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, TERABYTE), 0);
    close(fd);
}

static void files_of_a_terabyte_cost_neither_time_nor_memory(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    static const char *const files[] = {"lastgood.json", "rank-00001.sums",
                                        "shard-00001-model-00001-of-00001.safetensors", "config.json"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s", below(x, "root/%s/%s", x->folder[1], files[i]));
        assert_int_equal(rename(path, below(x, "outside/stolen")), 0);
        make_huge(path);
        assert_int_equal(newest(x->root.store), 10);
        is_damaged(x, x->folder[1], files[i]);
        assert_int_equal(remove(path), 0);
        assert_int_equal(rename(below(x, "outside/stolen"), path), 0);
    }
    make_huge(below(x, "root/.owner-5"));
    make_huge(below(x, "root/%s/lastgood-pin-1.json", x->folder[0]));
    make_huge(below(x, "root/notes.txt"));
    assert_int_equal(newest(x->root.store), 20);
    assert_int_equal(listed(x, ".owner-5").kind, LG_ENTRY_OWNER);
    assert_int_equal(listed(x, x->folder[0]).pinned, 1); /* what cannot be read keeps */
    lg_session *s = open_alone(x->root.path, &err);
    assert_non_null(s);
    assert_int_equal(lg_session_epoch(s), 6);
    lg_session_close(s, NULL);
    /* A rollback record that cannot be read: where it leads is not known. */
    make_huge(below(x, "root/rollback-7.1.json"));
    lg_checkpoint *c = NULL;
    lg_status st = lg_checkpoint_open(x->root.path, &c, &err);
    assert_int_not_equal(st, LG_OK);
    SAYS("rollback-7.1.json");
}

/* ------------------------------------------------------------------- rights */

static int each_file(const char *folder, int (*fn)(const char *path, const struct stat *st, void *arg), void *arg)
{
    DIR *d = opendir(folder);
    assert_non_null(d);
    int sum = 0;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        char path[1400];
        struct stat st;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            continue;
        }
        snprintf(path, sizeof path, "%.1000s/%.300s", folder, e->d_name);
        assert_int_equal(lstat(path, &st), 0);
        sum += fn(path, &st, arg);
        if (S_ISDIR(st.st_mode)) {
            sum += each_file(path, fn, arg);
        }
    }
    closedir(d);
    return sum;
}

static int has_the_rights(const char *path, const struct stat *st, void *arg)
{
    mode_t mask = *(mode_t *)arg, want = (S_ISDIR(st->st_mode) ? 0777u : 0666u) & ~mask;
    if ((st->st_mode & 07777) != want) {
        fail_msg("%s has mode %04o, not %04o", path, st->st_mode & 07777, want);
    }
    return 1;
}

static void all_that_a_session_makes_has_the_umasks_rights(void **state)
{
    fixture *x = *state;
    static const mode_t masks[] = {022, 002, 027, 077};
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        lg_error err = LG_ERROR_INIT;
        mode_t mask = masks[i];
        umask(mask);
        test_root root = {.kind = ROOT_POSIX};
        snprintf(root.path, sizeof root.path, "%.220s/rights-%zu", x->base, i);
        OK(lg_store_open(root.path, &root.store, &err));
        root.inner = root.store;
        run_spec spec = {.world = 2, .steps = (const uint64_t[]){1, 2}, .n_steps = 2};
        root_run(&root, &spec);
        char where[300];
        snprintf(where, sizeof where, "%.280s@1", root.path);
        OK(lg_pin(where, 1, "kept", &err));
        OK(lg_rollback(where, NULL, NULL, &err));
        struct stat st;
        assert_int_equal(lstat(root.path, &st), 0);
        has_the_rights(root.path, &st, &mask);
        assert_true(each_file(root.path, has_the_rights, &mask) > 20);
        lg_store_free(root.store);
    }
}

/* Runs as somebody who owns nothing here. */
static bool as_somebody_else(void) { return geteuid() != 0 || seteuid(65534) == 0; }

static void as_oneself(void)
{
    if (getuid() == 0) {
        assert_int_equal(seteuid(0), 0);
    }
}

static void what_may_not_be_read_is_told_from_what_is_not_there(void **state)
{
    fixture *x = *state;
    static const char *const files[] = {"lastgood.json", "rank-00001.sums",
                                        "shard-00001-model-00001-of-00001.safetensors"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        lg_error err = LG_ERROR_INIT;
        const char *path = below(x, "root/%s/%s", x->folder[1], files[i]);
        float w[13 * 6];
        uint64_t step = 0;
        lg_target t = LG_TARGET_INIT;
        t.name = "w", t.ndim = 2, t.shape = (const uint64_t[]){13, 6}, t.data = w;
        assert_int_equal(chmod(path, 0), 0);
        if (!as_somebody_else()) {
            skip();
        }
        lg_status st = lg_read(x->root.path, &t, 1, &step, &err);
        as_oneself();
        print_message("#   %s\n", err.message);
        assert_int_equal(chmod(path, 0644), 0);
        assert_int_equal(st, LG_ERR_PERMISSION);
        SAYS(files[i]);
    }
    /* A root that may not be written: nothing is begun. */
    lg_error err = LG_ERROR_INIT;
    lg_session *s = NULL;
    size_t before = count_names(x->root.path);
    assert_int_equal(chmod(x->root.path, 0555), 0);
    if (as_somebody_else()) {
        lg_status st = lg_session_open(x->root.path, NULL, &s, &err);
        as_oneself();
        assert_int_equal(st, LG_ERR_PERMISSION);
    }
    assert_int_equal(chmod(x->root.path, 0755), 0);
    assert_int_equal(count_names(x->root.path), before);
    assert_int_equal(newest(x->root.store), 20);
}

/* -------------------------------------------------------- one file by itself */

static void one_file_by_its_name_may_be_a_link_but_nothing_that_waits(void **state)
{
    fixture *x = *state;
    const char *shard = below(x, "root/%s/shard-00001-model-00001-of-00001.safetensors", x->folder[1]);
    const char *path = below(x, "outside/model.safetensors");
    for (int kind = 0; kind < PLANTS; kind++) {
        lg_error err = LG_ERROR_INIT;
        lg_safetensors *f = NULL;
        if (!plant(path, kind, shard)) {
            continue;
        }
        lg_status st = lg_safetensors_open(path, &f, &err);
        if (kind == LINK) {
            OK(st);
            assert_true(lg_safetensors_count(f) > 0);
        } else if (kind == BROKEN_LINK) {
            assert_int_equal(st, LG_ERR_NOT_FOUND);
        } else {
            assert_int_equal(st, LG_ERR_FORMAT);
            SAYS(plant_names[kind]);
        }
        lg_safetensors_close(f);
        assert_int_equal(remove(path), 0);
    }
}

/* ------------------------------------------------------- one root, two runs */

static void whoever_opened_last_has_the_root_and_the_other_is_told_who(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    lg_session *a = open_alone(x->root.path, &err), *b = open_alone(x->root.path, &err);
    assert_non_null(a);
    assert_non_null(b);
    model m;
    model_init(&m, 0, 1);
    model_fill(&m, 30);
    FAILS(LG_ERR_SUPERSEDED, model_save(a, &m, 30, NULL, &err));
    OK(model_save(b, &m, 30, NULL, &err));
    /* What the owner file says is shown as plain text, whoever wrote it. */
    char evil[] =
        "\"kind\":\"owner\",\"version\":1,\"epoch\":77,\"domain\":\"\\u001b[31mred\",\"created\":\"\\u001b[5m\"}";
    lg__buf sealed;
    lg__buf_init(&sealed, 4096);
    OK(lg__sealed_json(evil, strlen(evil), &sealed, &err));
    OK(lg__store_put_new(x->root.store, ".owner-77", sealed.data, sealed.len, &err));
    lg__buf_free(&sealed);
    model_fill(&m, 40);
    FAILS(LG_ERR_SUPERSEDED, model_save(b, &m, 40, NULL, &err));
    SAYS("\\x1b[31mred");
    assert_null(strchr(err.message, '\x1b'));
    assert_null(strchr(listed(x, ".owner-77").created, '\x1b'));
    lg_session_close(a, NULL);
    lg_session_close(b, NULL);
    assert_int_equal(newest(x->root.store), 30);
}

#define HERE(name, fn)                  \
    {                                   \
        name, fn, setup, teardown, NULL \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        HERE("K15 F260: nothing in the place of a file is followed or waited for",
             nothing_in_the_place_of_a_file_is_followed_or_waited_for),
        HERE("K15: step folders that are links are foreign, and never removed",
             step_folders_that_are_links_are_foreign),
        HERE("K15: names of ours that are no files or folders of ours do nothing",
             names_of_ours_that_are_no_files_or_folders_of_ours_do_nothing),
        HERE("K15: an owner file is never created through a link", an_owner_file_is_never_created_through_a_link),
        HERE("K15 K05: a name that is taken fails one save, and the next works",
             a_name_that_is_taken_fails_one_save_and_the_next_works),
        HERE("K02 K15: numbers at their limits stop writers, with the name, and nothing else",
             numbers_at_their_limits_stop_writers_with_the_name_and_nothing_else),
        HERE("K03 K15: removal takes links away and leaves what they lead to",
             removal_takes_links_away_and_leaves_what_they_lead_to),
        HERE("K03 K15: a folder put into a folder of ours stays and is named",
             a_folder_put_into_a_folder_of_ours_stays_and_is_named),
        HERE("K15 K19: no name in a manifest leads out", no_name_in_a_manifest_leads_out),
        HERE("K15 K16: files of a terabyte cost neither time nor memory",
             files_of_a_terabyte_cost_neither_time_nor_memory),
        HERE("K19 F304: all that a session makes has the umask's rights",
             all_that_a_session_makes_has_the_umasks_rights),
        HERE("K19 F305: what may not be read is told from what is not there",
             what_may_not_be_read_is_told_from_what_is_not_there),
        HERE("K13 K15: one file by its name may be a link, but nothing that waits",
             one_file_by_its_name_may_be_a_link_but_nothing_that_waits),
        HERE("K05 F085, K15: whoever opened last has the root, and the other is told who in plain text",
             whoever_opened_last_has_the_root_and_the_other_is_told_who),
    };
    return cmocka_run_group_tests_name("hostile", tests, NULL, NULL);
}
