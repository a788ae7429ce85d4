/* SPDX-License-Identifier: Apache-2.0 */

/* Pins, prune, remove and sweep by hand, and the rules that protect what must
 * stay (K03). */

#include "support/fault_store.h"
#include "support/ranks.h"

#include "core/walk.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

static void make_run(test_root *root, int kind, const uint64_t *steps, size_t n)
{
    root_make(root, kind);
    run_spec s = {.world = 2, .steps = steps, .n_steps = n};
    root_run(root, &s);
}

static void expect(test_root *root, const uint64_t *steps, size_t n)
{
    char folders[64][64], want[64];
    size_t got = root_folders(root, folders, 64);
    assert_int_equal(got, n);
    for (size_t i = 0; i < n; i++) {
        snprintf(want, sizeof want, "step-%012llu.", (unsigned long long)steps[i]);
        assert_int_equal(strncmp(folders[i], want, strlen(want)), 0);
    }
}

static char *at_step(const test_root *root, uint64_t step)
{
    static char where[2][320];
    static int next;
    next ^= 1;
    snprintf(where[next], sizeof where[next], "%s@%llu", root->path, (unsigned long long)step);
    return where[next];
}

#define OK(expr)                                    \
    do {                                            \
        if ((expr) != LG_OK) {                      \
            fail_msg("%s: %s", #expr, err.message); \
        }                                           \
    } while (0)

typedef struct seen {
    size_t n, removed;
    char why[16][256];
    uint64_t step[16];
} seen;

static void see(const lg_prune_item *item, void *arg)
{
    seen *s = arg;
    s->step[s->n] = item->step;
    snprintf(s->why[s->n++], sizeof s->why[0], "%s", item->reason);
    s->removed += item->removed != 0;
    assert_true(item->bytes > 1000);
}

static void k03_a_pinned_checkpoint_survives_retention_and_prune_until_it_is_unpinned(void **state)
{
    (void)state;
    for (int kind = 0; kind < ROOT_NO_RENAME; kind++) {
        test_root root;
        lg_error err = LG_ERROR_INIT;
        make_run(&root, kind, STEPS(1, 2, 3));
        OK(lg_pin(at_step(&root, 1), 1, "best so far", &err));
        OK(lg_pin(at_step(&root, 1), 1, "best so far", &err)); /* again is fine */
        run_spec more = {.world = 1, .steps = (const uint64_t[]){4}, .n_steps = 1, .keep_last = 1};
        root_run(&root, &more);
        expect(&root, STEPS(1, 4));
        assert_int_equal(lg_remove(at_step(&root, 1), &err), LG_ERR_PROTECTED);
        assert_non_null(strstr(err.message, "best so far"));
        OK(lg_pin(at_step(&root, 1), 0, NULL, &err));
        lg_prune_options o = LG_PRUNE_OPTIONS_INIT;
        o.keep_last = 1;
        seen s = {0};
        OK(lg_prune(root.path, &o, see, &s, &err)); /* dry run by default */
        assert_int_equal(s.n, 2);
        assert_int_equal(s.removed, 1);
        expect(&root, STEPS(1, 4));
        o.dry_run = 0;
        OK(lg_prune(root.path, &o, NULL, NULL, &err));
        expect(&root, STEPS(4));
        /* the last good one stays, whatever is asked for */
        assert_int_equal(lg_remove(at_step(&root, 4), &err), LG_ERR_PROTECTED);
        OK(lg_prune(root.path, &o, NULL, NULL, &err));
        expect(&root, STEPS(4));
        /* but for who knows that it is wrong; a pin holds even then */
        OK(lg_pin(at_step(&root, 4), 1, "", &err));
        assert_int_equal(lg_remove_last(at_step(&root, 4), &err), LG_ERR_PROTECTED);
        OK(lg_pin(at_step(&root, 4), 0, NULL, &err));
        OK(lg_remove_last(at_step(&root, 4), &err));
        expect(&root, NULL, 0);
        root_drop(&root);
    }
}

static void k03_a_pin_record_that_is_damaged_counts_as_pinned(void **state)
{
    (void)state;
    test_root root;
    lg_error err = LG_ERROR_INIT;
    make_run(&root, ROOT_POSIX, STEPS(1, 2));
    OK(lg_pin(at_step(&root, 1), 1, "", &err));
    char folders[4][64];
    root_folders(&root, folders, 4);
    root_flip(&root, folders[0], "lastgood-pin-1.json", 50);
    assert_int_equal(lg_remove(at_step(&root, 1), &err), LG_ERR_PROTECTED);
    /* so it does when the manifest it belongs to cannot be read */
    root_flip(&root, folders[0], "lastgood.json", 100);
    assert_int_equal(lg_remove(at_step(&root, 1), &err), LG_ERR_PROTECTED);
    root_flip(&root, folders[0], "lastgood.json", 100);
    /* one more record decides */
    OK(lg_pin(at_step(&root, 1), 0, NULL, &err));
    OK(lg_remove(at_step(&root, 1), &err));
    expect(&root, STEPS(2));
    root_drop(&root);
}

static void k03_prune_trusts_only_what_it_verified(void **state)
{
    (void)state;
    test_root root;
    lg_error err = LG_ERROR_INIT;
    make_run(&root, ROOT_POSIX, STEPS(1, 2, 3, 4));
    char folders[8][64];
    root_folders(&root, folders, 8);
    /* sizes are right, a byte is not: only reading it all shows */
    root_flip(&root, folders[3], "shard-00001-model-00001-of-00001.safetensors", 4097);
    lg_prune_options o = LG_PRUNE_OPTIONS_INIT;
    o.keep_last = 1;
    o.dry_run = 0;
    seen s = {0};
    OK(lg_prune(root.path, &o, see, &s, &err));
    expect(&root, STEPS(3, 4)); /* 3 is the last good one, 4 may be repaired */
    /* nothing good at all: nothing is removed */
    root_flip(&root, folders[2], "shard-00002-model-00001-of-00001.safetensors", 4097);
    assert_int_equal(lg_prune(root.path, &o, NULL, NULL, &err), LG_ERR_NO_GOOD);
    expect(&root, STEPS(3, 4));
    o.keep_last = 0;
    assert_int_equal(lg_prune(root.path, &o, NULL, NULL, &err), LG_ERR_INVALID);
    root_drop(&root);
}

static void k03_order_is_by_generation_whatever_times_and_names_say(void **state)
{
    (void)state;
    test_root root;
    make_run(&root, ROOT_POSIX, STEPS(9000, 9900, 10000, 10500));
    char command[600];
    snprintf(command, sizeof command, "cd '%s' && touch -d 2001-01-01 step-*10500* && touch -d 2040-01-01 step-*9000*",
             root.path);
    assert_int_equal(system(command), 0);
    run_spec more = {.world = 1, .steps = (const uint64_t[]){300}, .n_steps = 1, .keep_last = 2};
    root_run(&root, &more);
    assert_int_equal(more.resumed_from, 10500);
    expect(&root, STEPS(10500, 300)); /* step 300 was committed last */
    root_drop(&root);
}

static void k03_removal_never_leaves_the_root_and_never_fails_the_trainer(void **state)
{
    (void)state;
    test_root root, other;
    lg_error err = LG_ERROR_INIT;
    make_run(&root, ROOT_POSIX, STEPS(1));
    make_run(&other, ROOT_POSIX, STEPS(1, 2));
    char command[900];
    snprintf(command, sizeof command,
             "cd '%s' && ln -s '%s'/step-*1.g1.1 step-000000000007.g1.7 && mkdir step-000000000001.g1.1/sub", root.path,
             other.path);
    assert_int_equal(system(command), 0);
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = root.store;
    o.keep_last = 1;
    lg_session *s;
    OK(lg_session_open("root", &o, &s, &err));
    model m;
    model_init(&m, 0, 1);
    lg_resume_result *r;
    OK(lg_resume(s, NULL, model_targets, &m, &r, &err));
    lg_resume_result_free(r);
    model_fill(&m, 2);
    OK(model_save(s, &m, 2, NULL, &err)); /* step 1 cannot be emptied: a folder is in it */
    lg_session_status st;
    OK(lg_session_get_status(s, &st, &err));
    assert_int_equal(st.saves_committed, 1);
    assert_int_equal(st.removal_failures, 1);
    assert_non_null(strstr(st.last_removal_error, "sub"));
    lg_session_close(s, NULL);
    expect(&root, STEPS(2));
    expect(&other, STEPS(1, 2));
    root_drop(&root);
    root_drop(&other);
}

static void k18_f296_removing_one_leaves_those_whose_names_begin_alike(void **state)
{
    (void)state;
    test_root root;
    lg_error err = LG_ERROR_INIT;
    char where[320], folders[16][64];
    make_run(&root, ROOT_POSIX, STEPS(7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7));
    snprintf(where, sizeof where, "%s@g1.1", root.path); /* 1.10 and 1.11 are there too */
    OK(lg_remove(where, &err));
    assert_int_equal(root_folders(&root, folders, 16), 10);
    for (size_t i = 0; i < 10; i++) {
        char want[64];
        snprintf(want, sizeof want, "step-000000000007.g1.%zu", i + 2);
        assert_string_equal(folders[i], want);
    }
    snprintf(where, sizeof where, "%s@7", root.path);
    OK(lg_remove(where, &err)); /* the newest of that step */
    assert_int_equal(root_folders(&root, folders, 16), 9);
    assert_string_equal(folders[8], "step-000000000007.g1.10");
    root_drop(&root);
}

static void discarded_checkpoints_go_only_when_enough_good_ones_are_newer(void **state)
{
    (void)state;
    test_root root;
    lg_error err = LG_ERROR_INIT;
    make_run(&root, ROOT_MEMORY, STEPS(1, 2, 3, 4));
    OK(lg_rollback(at_step(&root, 2), "diverged", NULL, &err));
    run_spec one = {.world = 1, .steps = (const uint64_t[]){5}, .n_steps = 1, .keep_last = 2};
    root_run(&root, &one);
    assert_int_equal(one.resumed_from, 2);
    expect(&root, STEPS(2, 3, 4, 5)); /* 3 and 4 could still be wanted back */
    run_spec two = {.world = 1, .steps = (const uint64_t[]){6}, .n_steps = 1, .keep_last = 2};
    root_run(&root, &two);
    expect(&root, STEPS(5, 6));
    root_drop(&root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k03_a_pinned_checkpoint_survives_retention_and_prune_until_it_is_unpinned),
        cmocka_unit_test(k03_a_pin_record_that_is_damaged_counts_as_pinned),
        cmocka_unit_test(k03_prune_trusts_only_what_it_verified),
        cmocka_unit_test(k03_order_is_by_generation_whatever_times_and_names_say),
        cmocka_unit_test(k03_removal_never_leaves_the_root_and_never_fails_the_trainer),
        cmocka_unit_test(k18_f296_removing_one_leaves_those_whose_names_begin_alike),
        cmocka_unit_test(discarded_checkpoints_go_only_when_enough_good_ones_are_newer),
    };
    return cmocka_run_group_tests_name("retention", tests, NULL, NULL);
}
