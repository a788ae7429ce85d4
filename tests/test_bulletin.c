/* SPDX-License-Identifier: Apache-2.0 */

/* What ranks of a save in the background read of each other: notes that are cut
 * or garbled, files that a folder shows late, a coordinator that says nothing. */

#include "support/check.h"
#include "support/fault_store.h"
#include "support/pairs.h"
#include "support/ranks.h"

#include "core/bulletin.h"
#include "format/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FOLDER ".step-000000000020.g1.2.0123456789abcdef.partial"
static const lg__attempt attempt = {
    .token = "0123456789abcdef", .generation = {1, 2}, .folder = FOLDER, .final = "step-000000000020.g1.2"};

/* What rank `rank` of two looks at. */
static lg__bulletin of_rank(lg_store *store, lg_kv *kv, uint32_t rank)
{
    return (lg__bulletin){.store = store, .kv = kv, .attempt = &attempt, .epoch = 1, .rank = rank, .world = 2};
}

static void put(lg_store *store, const char *name, const void *data, size_t bytes)
{
    char path[2 * LG__NAME_MAX];
    lg_error err = LG_ERROR_INIT;
    lg__path_join(path, sizeof path, FOLDER, name);
    OK(lg__store_put_new(store, path, data, bytes, &err));
}

/* The sums file that rank 1 of a real save of two ranks wrote. */
static void read_sums(test_root *root, lg__buf *out)
{
    run_spec s = {.world = 2};
    static const uint64_t steps[] = {10};
    s.steps = steps, s.n_steps = 1;
    root_run(root, &s);
    char folders[1][64], name[LG__NAME_MAX], path[2 * LG__NAME_MAX];
    assert_int_equal(root_folders(root, folders, 1), 1);
    lg__sums_file(1, name);
    lg__path_join(path, sizeof path, folders[0], name);
    lg_error err = LG_ERROR_INIT;
    lg__buf_init(out, (size_t)1 << 20);
    OK(lg__store_read_all(root->store, path, out, &err));
    OK(lg__store_make_dir(root->store, FOLDER, &err));
}

/* ------------------------------------------------------------ no word of rank 0 */

ON_EVERY_ROOT(a_rank_that_hears_nothing_of_rank_0_says_so_at_its_deadline)
{
    pairs *p = pairs_new();
    lg_kv kv = pairs_kv(p);
    lg_error err = LG_ERROR_INIT;
    OK(lg__store_make_root(root->store, &err));
    OK(lg__store_make_dir(root->store, FOLDER, &err));
    for (int keys = 0; keys < 2; keys++) {
        lg__bulletin b = of_rank(root->store, keys ? &kv : NULL, 1);
        FAILS(LG_ERR_TIMEOUT, lg__bulletin_watch(&b, 0, &err));
        SAYS("rank 0 has neither committed nor given up 0 ms after rank 1 wrote its part");
    }
    OK(lg__store_remove_dir(root->store, FOLDER, &err));
    for (int keys = 0; keys < 2; keys++) {
        lg__bulletin b = of_rank(root->store, keys ? &kv : NULL, 1);
        FAILS(LG_ERR_SUPERSEDED, lg__bulletin_watch(&b, 0, &err));
        SAYS(FOLDER " vanished");
    }
    pairs_free(p);
}

/* --------------------------------------------------------------- garbled notes */

#define DIGEST "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

static void a_value_that_is_no_note_fails_the_save_with_the_name_of_its_key(void **state)
{
    (void)state;
    static char long_one[LG_ERROR_MESSAGE_MAX + 600];
    snprintf(long_one, sizeof long_one, "lastgood 1 0 0 -1 %s 100 200\n", DIGEST);
    memset(long_one + strlen(long_one), 'x', sizeof long_one - 1 - strlen(long_one));
    const char *const bad[] = {
        "",
        "hello",
        "lastgood 2 0 0 -1 " DIGEST " 100 200\n",  /* another version's */
        "lastgood 1 0 0 -1 " DIGEST " 100",        /* cut */
        "lastgood 1 0 0 -1 " DIGEST " 100 200",    /* cut before its end */
        "lastgood 1 0 0 -1 " DIGEST " 100 200 \n", /* more than that */
        "lastgood 1 0 0 -1 0011 100 200\n",        /* no digest */
        "lastgood 1 9999 0 -1 " DIGEST " 100 200\n",
        long_one,
    };
    test_root root;
    root_make(&root, ROOT_MEMORY);
    lg_error err = LG_ERROR_INIT;
    OK(lg__store_make_root(root.store, &err));
    OK(lg__store_make_dir(root.store, FOLDER, &err));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        pairs *p = pairs_new();
        lg_kv kv = pairs_kv(p);
        OK(kv.ops->set(kv.ctx, "lastgood/0123456789abcdef/rank-1", bad[i], strlen(bad[i]), &err));
        OK(kv.ops->set(kv.ctx, "lastgood/0123456789abcdef/result", bad[i], strlen(bad[i]), &err));
        lg__bulletin first = of_rank(root.store, &kv, 0), second = of_rank(root.store, &kv, 1);
        lg__written written[2];
        FAILS(LG_ERR_COMM, lg__bulletin_collect(&first, 20000, written, &err));
        SAYS("the value of lastgood/0123456789abcdef/rank-1 is garbled");
        FAILS(LG_ERR_COMM, lg__bulletin_watch(&second, 20000, &err));
        SAYS("the value of lastgood/0123456789abcdef/result is garbled");
        pairs_free(p);
    }
    root_drop(&root);
}

/* A file may be read before it is whole: then it is as good as not there. */
ON_EVERY_ROOT(a_cause_that_is_not_whole_yet_is_waited_for)
{
    lg_error err = LG_ERROR_INIT;
    OK(lg__store_make_root(root->store, &err));
    OK(lg__store_make_dir(root->store, FOLDER, &err));
    put(root->store, LG__FAILED, "lastgood 1 ", 11);
    lg__bulletin b = of_rank(root->store, NULL, 1);
    FAILS(LG_ERR_TIMEOUT, lg__bulletin_watch(&b, 0, &err));
    SAYS("rank 0 has neither committed nor given up");
}

/* -------------------------------------------------- a file later than its key */

typedef struct late_file {
    test_root *root;
    const lg__buf *sums;
    int asked;
} late_file;

/* The folder shows it from the second look on. */
static lg_status show_late(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    (void)f;
    (void)err;
    late_file *l = arg;
    char name[LG__NAME_MAX];
    lg__sums_file(1, name);
    if (before && e->op == FAULT_OPEN && strstr(e->path, name) != NULL && ++l->asked == 2) {
        put(l->root->store, name, l->sums->data, l->sums->len);
    }
    return LG_OK;
}

ON_EVERY_ROOT(a_file_that_the_folder_shows_later_than_the_key_is_waited_for)
{
    lg__buf sums;
    read_sums(root, &sums);
    pairs *p = pairs_new();
    lg_kv kv = pairs_kv(p);
    late_file l = {.root = root, .sums = &sums};
    fault_store *f = fault_store_new(root->store);
    fault_store_set_hook(f, show_late, &l);
    lg_error err = LG_ERROR_INIT, none = LG_ERROR_INIT;
    lg__bulletin first = of_rank(fault_store_handle(f), &kv, 0), second = of_rank(fault_store_handle(f), &kv, 1);
    lg__written mine = {.sums_bytes = sums.len, .bytes = 12345}, written[2] = {{.bytes = 0}};
    memset(mine.report, 7, sizeof mine.report);
    OK(lg__bulletin_post(&second, LG_OK, &mine, &none, &err));
    OK(lg__bulletin_collect(&first, 20000, written, &err));
    assert_int_equal(l.asked, 2);
    assert_int_equal(written[1].sums_bytes, sums.len);
    assert_memory_equal(written[1].report, mine.report, sizeof mine.report); /* as it was told */
    assert_true(written[1].bytes > sums.len);                                /* as the file says */
    lg__buf_free(&sums);
    fault_store_free(f);
    pairs_free(p);
}

ON_EVERY_ROOT(a_file_that_never_comes_though_its_key_is_there_fails_at_the_deadline)
{
    pairs *p = pairs_new();
    lg_kv kv = pairs_kv(p);
    lg_error err = LG_ERROR_INIT, none = LG_ERROR_INIT;
    OK(lg__store_make_root(root->store, &err));
    OK(lg__store_make_dir(root->store, FOLDER, &err));
    lg__bulletin first = of_rank(root->store, &kv, 0), second = of_rank(root->store, &kv, 1);
    lg__written mine = {.sums_bytes = 100}, written[2];
    OK(lg__bulletin_post(&second, LG_OK, &mine, &none, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__bulletin_collect(&first, 0, written, &err));
    SAYS("report of rank 1: ");
    pairs_free(p);
}

ON_EVERY_ROOT(a_sums_file_that_is_cut_fails_the_save_with_the_name_of_its_rank)
{
    static const size_t lengths[] = {0, 10, LG__SUMS_HEAD_BYTES - 1, LG__SUMS_HEAD_BYTES, LG__SUMS_HEAD_BYTES + 30};
    lg__buf sums;
    read_sums(root, &sums);
    char name[LG__NAME_MAX], path[2 * LG__NAME_MAX];
    lg__sums_file(1, name);
    lg__path_join(path, sizeof path, FOLDER, name);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        assert_true(lengths[i] < sums.len);
        put(root->store, name, sums.data, lengths[i]);
        lg__bulletin first = of_rank(root->store, NULL, 0);
        lg__written written[2];
        lg_error err = LG_ERROR_INIT;
        FAILS(LG_ERR_CORRUPT, lg__bulletin_collect(&first, 20000, written, &err));
        SAYS("report of rank 1: ");
        if (lengths[i] < LG__SUMS_HEAD_BYTES) {
            char text[LG__NAME_MAX + 64];
            snprintf(text, sizeof text, "%s has only %zu bytes", name, lengths[i]);
            SAYS(text);
        }
        OK(lg__store_remove_file(root->store, path, &err));
    }
    lg__buf_free(&sums);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_that_hears_nothing_of_rank_0_says_so_at_its_deadline),
        cmocka_unit_test(a_value_that_is_no_note_fails_the_save_with_the_name_of_its_key),
        cmocka_unit_test(a_cause_that_is_not_whole_yet_is_waited_for),
        cmocka_unit_test(a_file_that_the_folder_shows_later_than_the_key_is_waited_for),
        cmocka_unit_test(a_file_that_never_comes_though_its_key_is_there_fails_at_the_deadline),
        cmocka_unit_test(a_sums_file_that_is_cut_fails_the_save_with_the_name_of_its_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
