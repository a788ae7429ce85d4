/* SPDX-License-Identifier: Apache-2.0 */

/* What the model of a disk after a power cut holds possible, in small. */

#include "support/crash_disk.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MAX_TREES 512

typedef struct trees {
    char text[MAX_TREES][512];
    size_t n;
} trees;

static int by_text(const void *a, const void *b) { return strcmp(a, b); }

static void to_text(const crash_tree *t, char out[512])
{
    char lines[16][128];
    assert_true(t->n <= 16);
    for (size_t i = 0; i < t->n; i++) {
        const crash_item *item = &t->items[i];
        int at = snprintf(lines[i], sizeof lines[i], "%s/%s%s", item->folder, item->name, item->is_dir ? "/" : "=");
        for (size_t k = 0; k < item->bytes; k++) { /* zeros and garbage as signs */
            lines[i][at++] = item->data[k] == 0 ? '0' : item->data[k] < 0x7f ? (char)item->data[k] : '?';
        }
        memcpy(lines[i] + at, " ", 2);
    }
    qsort(lines, t->n, sizeof *lines, by_text);
    out[0] = '\0';
    for (size_t i = 0; i < t->n; i++) {
        strcat(out, lines[i]);
    }
}

static int only_one(const crash_tree *t, void *hash)
{
    *(uint64_t *)hash = t->hash;
    return 0;
}

static int note(const crash_tree *t, void *arg)
{
    trees *all = arg;
    char text[512];
    to_text(t, text);
    for (size_t i = 0; i < all->n; i++) {
        if (strcmp(all->text[i], text) == 0) {
            return 0;
        }
    }
    assert_true(all->n < MAX_TREES);
    strcpy(all->text[all->n++], text);
    /* The next start finds just this, and nothing of it is open any more. */
    crash_store *s = crash_tree_boot(t, CRASH_CAPS, true);
    crash_disk *d = crash_disk_new(s);
    while (crash_disk_step(d) != NULL) {
    }
    const crash_effort effort = {.all = 1};
    uint64_t hash = 0;
    assert_true(crash_disk_visit(d, &effort, only_one, &hash));
    assert_true(hash == t->hash);
    crash_disk_free(d);
    crash_store_free(s);
    return 0;
}

/* What a cut now may leave. */
static trees *after(crash_store *s)
{
    trees *all = calloc(1, sizeof *all);
    assert_non_null(all);
    crash_disk *d = crash_disk_new(s);
    while (crash_disk_step(d) != NULL) {
    }
    const crash_effort effort = {.all = 100000};
    assert_true(crash_disk_visit(d, &effort, note, all));
    crash_disk_free(d);
    return all;
}

static bool holds(const trees *all, const char *text)
{
    for (size_t i = 0; i < all->n; i++) {
        if (strcmp(all->text[i], text) == 0) {
            return true;
        }
    }
    return false;
}

/* The trees are these and no others; free()s them. */
static void expect_trees(trees *all, size_t n, const char *const *texts)
{
    for (size_t i = 0; i < n; i++) {
        if (!holds(all, texts[i])) {
            fail_msg("not held possible: \"%s\"", texts[i]);
        }
    }
    if (all->n != n) {
        for (size_t i = 0; i < all->n; i++) {
            print_error("%s\n", all->text[i]);
        }
        fail_msg("%zu trees, not %zu", all->n, n);
    }
    free(all);
}

#define EXPECT(all, ...)                                 \
    do {                                                 \
        static const char *const t_[] = {__VA_ARGS__};   \
        expect_trees((all), sizeof t_ / sizeof *t_, t_); \
    } while (0)

#define MUST(call)                                 \
    do {                                           \
        lg_error e_ = LG_ERROR_INIT;               \
        if ((call) != LG_OK) {                     \
            fail_msg("%s: %s", #call, e_.message); \
        }                                          \
    } while (0)

static void put(lg_store *s, const char *path, const char *text, bool sync)
{
    lg_file *f = NULL;
    MUST(lg__store_create(s, path, 0, &f, &e_));
    MUST(lg__store_write(s, f, text, strlen(text), 0, &e_));
    if (sync) {
        MUST(lg__store_sync(s, f, &e_));
    }
    MUST(lg__store_close(s, f, &e_));
}

static void names_and_contents_are_open_until_their_sync(void **state)
{
    (void)state;
    crash_store *c = crash_store_new(CRASH_CAPS);
    lg_store *s = crash_store_handle(c);
    put(s, "f", "abcd", true);
    EXPECT(after(c), "", "/f=abcd ");
    MUST(lg__store_sync_dir(s, "", &e_));
    EXPECT(after(c), "/f=abcd ");
    put(s, "g", "1234", true);
    put(s, "h", "56", true);
    EXPECT(after(c), "/f=abcd ", "/f=abcd /g=1234 ", "/f=abcd /h=56 ", "/f=abcd /g=1234 /h=56 ");
    crash_store_free(c);
}

static void unsynced_contents_are_lost_torn_or_somebody_elses(void **state)
{
    (void)state;
    crash_store *c = crash_store_new(CRASH_CAPS);
    lg_store *s = crash_store_handle(c);
    put(s, "f", "abcd", false);
    MUST(lg__store_sync_dir(s, "", &e_));
    trees *all = after(c);
    assert_true(holds(all, "/f=abcd ") && holds(all, "/f= ") && holds(all, "/f=ab "));
    assert_int_equal(all->n, 6); /* and zeros, the tail, garbage */
    free(all);
    MUST(lg__store_remove_file(s, "f", &e_));
    MUST(lg__store_sync_dir(s, "", &e_));
    put(s, "f", "ABCD", false);
    MUST(lg__store_sync_dir(s, "", &e_));
    all = after(c);
    assert_true(holds(all, "/f=abcd "));
    assert_int_equal(all->n, 7);
    free(all);
    crash_store_free(c);
}

static void a_folder_takes_along_what_is_in_it_durable_or_not(void **state)
{
    (void)state;
    crash_store *c = crash_store_new(CRASH_CAPS);
    lg_store *s = crash_store_handle(c);
    MUST(lg__store_make_dir(s, "p", &e_));
    put(s, "p/a", "1", true);
    MUST(lg__store_sync_dir(s, "p", &e_));
    EXPECT(after(c), "", "/p/ p/a=1 ");
    MUST(lg__store_sync_dir(s, "", &e_));
    put(s, "p/b", "2", true);
    MUST(lg__store_rename_dir(s, "p", "q", &e_));
    EXPECT(after(c), "/p/ p/a=1 ", "/p/ p/a=1 p/b=2 ", "/q/ q/a=1 ", "/q/ q/a=1 q/b=2 ");
    MUST(lg__store_sync_dir(s, "", &e_));
    EXPECT(after(c), "/q/ q/a=1 ", "/q/ q/a=1 q/b=2 ");
    crash_store_free(c);
}

static void later_changes_may_be_kept_when_earlier_ones_are_lost(void **state)
{
    (void)state;
    crash_store *c = crash_store_new(CRASH_CAPS);
    lg_store *s = crash_store_handle(c);
    MUST(lg__store_make_dir(s, "p", &e_));
    put(s, "p/a", "1", true);
    MUST(lg__store_sync_dir(s, "p", &e_));
    MUST(lg__store_sync_dir(s, "", &e_));
    MUST(lg__store_rename_dir(s, "p", "t", &e_));
    MUST(lg__store_remove_file(s, "t/a", &e_));
    MUST(lg__store_remove_dir(s, "t", &e_));
    /* The rename is lost and what was removed after it is gone. */
    EXPECT(after(c), "/p/ p/a=1 ", "/p/ ", "/t/ t/a=1 ", "/t/ ", "");
    crash_store_free(c);
}

static void a_conditional_create_is_all_or_nothing_beside_a_temporary_file(void **state)
{
    (void)state;
    crash_store *c = crash_store_new(CRASH_CAPS);
    lg_store *s = crash_store_handle(c);
    MUST(lg__store_put_new(s, "r", "xy", 2, &e_));
    EXPECT(after(c), "", "/r=xy ", "/.tmp-0000000000000001=xy ", "/.tmp-0000000000000001=xy /r=xy ");
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg__store_put_new(s, "r", "zz", 2, &err), LG_ERR_EXISTS);
    MUST(lg__store_sync_dir(s, "", &e_));
    EXPECT(after(c), "/r=xy ");
    crash_store_free(c);
}

static int count(const crash_tree *t, void *n)
{
    (void)t;
    ++*(size_t *)n;
    return 0;
}

static void too_many_combinations_are_sampled_and_that_is_told(void **state)
{
    (void)state;
    crash_store *c = crash_store_new(CRASH_CAPS);
    for (int i = 0; i < 12; i++) {
        char name[8];
        snprintf(name, sizeof name, "f%d", i);
        put(crash_store_handle(c), name, "abcd", false);
    }
    crash_disk *d = crash_disk_new(c);
    while (crash_disk_step(d) != NULL) {
    }
    uint64_t random = 5;
    size_t n = 0;
    const crash_effort effort = {.all = 1000, .samples = 77, .random = &random};
    assert_false(crash_disk_visit(d, &effort, count, &n));
    assert_int_equal(n, 77);
    crash_disk_free(d);
    crash_store_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_contents_are_open_until_their_sync),
        cmocka_unit_test(unsynced_contents_are_lost_torn_or_somebody_elses),
        cmocka_unit_test(a_folder_takes_along_what_is_in_it_durable_or_not),
        cmocka_unit_test(later_changes_may_be_kept_when_earlier_ones_are_lost),
        cmocka_unit_test(a_conditional_create_is_all_or_nothing_beside_a_temporary_file),
        cmocka_unit_test(too_many_combinations_are_sampled_and_that_is_told),
    };
    return cmocka_run_group_tests_name("crash_disk", tests, NULL, NULL);
}
