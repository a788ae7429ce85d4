/* SPDX-License-Identifier: Apache-2.0 */

/* Where a user points, and what may be done to a checkpoint that can hardly be
 * read any more. */

#include "support/check.h"
#include "support/ranks.h"

#include "core/where.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static void run_of(test_root *root, uint32_t world, const uint64_t *steps, size_t n)
{
    run_spec s = {.world = world, .steps = steps, .n_steps = n};
    root_run(root, &s);
}

/* A posix root with steps 10, 20 and 30 of two ranks. */
static void make(test_root *root, char folders[3][64])
{
    root_make(root, ROOT_POSIX);
    run_of(root, 2, STEPS(10, 20, 30));
    assert_int_equal(root_folders(root, folders, 3), 3);
}

static const char *at(char out[600], const test_root *root, const char *format, const char *text)
{
    snprintf(out, 600, "%s", root->path);
    snprintf(out + strlen(out), 600 - strlen(out), format, text);
    return out;
}

static bool there(const test_root *root, const char *folder)
{
    char path[600];
    return access(at(path, root, "/%s", folder), F_OK) == 0;
}

static uint64_t step_of(const char *where)
{
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint *c = NULL;
    OK(lg_checkpoint_open(where, &c, &err));
    lg_checkpoint_info info;
    OK(lg_checkpoint_get_info(c, &info, &err));
    lg_checkpoint_close(c);
    return info.step;
}

static void a_checkpoint_is_found_by_root_folder_step_and_generation(void **state)
{
    (void)state;
    test_root root;
    char folders[3][64], where[600];
    make(&root, folders);
    assert_int_equal(step_of(root.path), 30);
    assert_int_equal(step_of(at(where, &root, "%s", "@20")), 20);
    assert_int_equal(step_of(at(where, &root, "%s", "@g1.1")), 10);
    assert_int_equal(step_of(at(where, &root, "/%s", folders[1])), 20);
    assert_int_equal(step_of(at(where, &root, "/%s//", folders[1])), 20);
    char file[700];
    snprintf(file, sizeof file, "file:%s", where);
    assert_int_equal(step_of(file), 20);
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint *c = NULL;
    FAILS(LG_ERR_NOT_FOUND, lg_checkpoint_open(at(where, &root, "%s", "@25"), &c, &err));
    SAYS("no checkpoint of step 25");
    FAILS(LG_ERR_NOT_FOUND, lg_checkpoint_open(at(where, &root, "%s", "@g9.9"), &c, &err));
    SAYS("9.9");
    FAILS(LG_ERR_NOT_FOUND, lg_checkpoint_open(at(where, &root, "%s", "@newest"), &c, &err));
    root_drop(&root);
}

static void a_generation_that_two_folders_claim_names_neither_of_them(void **state)
{
    (void)state;
    test_root root;
    char folders[3][64], where[600], from[600];
    make(&root, folders);
    at(from, &root, "/%s", folders[1]);
    assert_int_equal(rename(from, at(where, &root, "/%s", "step-000000000020.g1.1")), 0);
    root_flip(&root, "step-000000000020.g1.1", "lastgood.json", 200); /* else its manifest says 1.2 */
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint *c = NULL;
    at(where, &root, "%s", "@g1.1");
    FAILS(LG_ERR_CONFLICT, lg_checkpoint_open(where, &c, &err));
    SAYS("claims generation 1.1");
    FAILS(LG_ERR_CONFLICT, lg_remove(where, &err));
    FAILS(LG_ERR_CONFLICT, lg_pin(where, 1, NULL, &err));
    FAILS(LG_ERR_CONFLICT, lg_rollback(where, NULL, NULL, &err));
    assert_int_equal(step_of(at(where, &root, "%s", "@10")), 10);
    assert_int_equal(step_of(at(where, &root, "/%s", folders[0])), 10);
    assert_int_equal(step_of(at(where, &root, "%s", "@g1.3")), 30);
    root_drop(&root);
}

static void a_folder_that_was_moved_away_opens_under_any_name(void **state)
{
    (void)state;
    test_root root;
    char folders[3][64], from[600], to[600];
    make(&root, folders);
    at(from, &root, "/%s", folders[0]);
    at(to, &root, "/%s", "kept@99");
    assert_int_equal(rename(from, to), 0);
    assert_int_equal(step_of(to), 10);
    root_flip(&root, "kept@99", "lastgood.json", 200);
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint *c = NULL;
    FAILS(LG_ERR_CORRUPT, lg_checkpoint_open(to, &c, &err));
    SAYS("kept@99/lastgood.json");
    root_drop(&root);
}

/* Names alone, from the folder in which the root lies. */
static void a_checkpoint_is_found_by_a_relative_name_with_and_without_file(void **state)
{
    (void)state;
    test_root root;
    char folders[3][64], before[1024], from[600], file[700];
    make(&root, folders);
    assert_int_equal(rename(at(from, &root, "/%s", folders[1]), at(file, &root, "/%s", "kept")), 0);
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(root.path), 0);
    assert_int_equal(step_of(folders[0]), 10);
    snprintf(file, sizeof file, "file:%s", folders[0]);
    assert_int_equal(step_of(file), 10);
    assert_int_equal(step_of("kept"), 20);
    assert_int_equal(step_of("file:kept"), 20);
    assert_int_equal(step_of("file:kept/"), 20);
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint *c = NULL;
    FAILS(LG_ERR_INVALID, lg_checkpoint_open("kept/.", &c, &err));
    SAYS("name it by its own name");
    assert_int_equal(chdir(before), 0);
    root_drop(&root);
}

static void a_name_that_is_too_long_for_any_file_is_an_ordinary_error(void **state)
{
    (void)state;
    char name[LG__NAME_MAX + 40];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    memcpy(name, "mem:", 4);
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint *c = NULL;
    assert_int_not_equal(lg_checkpoint_open(name, &c, &err), LG_OK);
    assert_true(strlen(err.message) > 0);
    assert_null(c);
}

/* What an attempt left that was ended on a store without folder rename. */
static void a_tombstone_under_any_name_is_no_checkpoint(void **state)
{
    (void)state;
    test_root root;
    char folders[3][64], to[600];
    make(&root, folders);
    lg_error err = LG_ERROR_INIT;
    lg__manifest *m = NULL;
    OK(lg__manifest_new(&m, &err));
    m->tombstone = true;
    m->superseded_by = 4;
    m->generation = (lg_generation){1, 4};
    memset(m->run_id, '0', sizeof m->run_id - 1);
    memset(m->attempt, '0', LG__ATTEMPT_HEX);
    lg__buf text;
    lg__buf_init(&text, LG__RECORD_MAX);
    OK(lg__manifest_encode(m, &text, &err));
    OK(lg__store_make_dir(root.store, "moved", &err));
    OK(lg__store_put_new(root.store, "moved/" LG__MANIFEST, text.data, text.len, &err));
    lg__buf_free(&text);
    lg__manifest_free(m);
    lg_checkpoint *c = NULL;
    FAILS(LG_ERR_NOT_FOUND, lg_checkpoint_open(at(to, &root, "/%s", "moved"), &c, &err));
    SAYS("it was left by an attempt that was ended, not by a checkpoint");
    FAILS(LG_ERR_NOT_FOUND, lg_rollback(to, NULL, NULL, &err));
    root_drop(&root);
}

static void partial_and_trash_folders_are_no_checkpoints_whatever_they_hold(void **state)
{
    (void)state;
    static const char *const names[] = {".step-000000000010.g1.1.0123456789abcdef.partial",
                                        ".trash-1.0123456789abcdef-step-000000000010.g1.1"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        test_root root;
        char folders[3][64], from[600], to[600];
        make(&root, folders);
        at(from, &root, "/%s", folders[0]);
        at(to, &root, "/%s", names[i]);
        assert_int_equal(rename(from, to), 0);
        lg_error err = LG_ERROR_INIT;
        lg_checkpoint *c = NULL;
        FAILS(LG_ERR_NOT_FOUND, lg_checkpoint_open(to, &c, &err));
        SAYS(names[i]);
        FAILS(LG_ERR_NOT_FOUND, lg_remove(to, &err));
        FAILS(LG_ERR_NOT_FOUND, lg_rollback(to, NULL, NULL, &err));
        assert_true(there(&root, names[i]));
        root_drop(&root);
    }
}

/* Ways in which a manifest can be lost; what opening says. */
static const struct lost {
    const char *how;
    lg_status status;
} lost[] = {{"flipped", LG_ERR_CORRUPT}, {"gone", LG_ERR_NOT_WHOLE}, {"empty", LG_ERR_CORRUPT}};

static void lose(test_root *root, const char *folder, const char *how)
{
    char path[600], file[100];
    snprintf(file, sizeof file, "/%s/lastgood.json", folder);
    at(path, root, "%s", file);
    if (strcmp(how, "gone") == 0) {
        assert_int_equal(unlink(path), 0);
    } else if (strcmp(how, "empty") == 0) {
        assert_int_equal(truncate(path, 0), 0);
    } else {
        root_flip(root, folder, "lastgood.json", 300);
    }
}

static void a_checkpoint_without_a_readable_manifest_can_be_named_and_removed(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof lost / sizeof *lost; i++) {
        for (int by_step = 0; by_step < 2; by_step++) {
            test_root root;
            char folders[3][64], where[600];
            make(&root, folders);
            lose(&root, folders[1], lost[i].how);
            if (by_step) {
                at(where, &root, "%s", "@20");
            } else {
                at(where, &root, "/%s", folders[1]);
            }
            lg_error err = LG_ERROR_INIT;
            lg_checkpoint *c = NULL;
            FAILS(lost[i].status, lg_checkpoint_open(where, &c, &err));
            SAYS(folders[1]);
            SAYS("lastgood.json");
            lg_status pinned = lg_pin(where, 1, NULL, &err);
            assert_int_not_equal(pinned, LG_OK);
            lg_status back = lg_rollback(where, NULL, NULL, &err);
            assert_int_not_equal(back, LG_OK);
            SAYS("not good");
            OK(lg_remove(where, &err));
            assert_false(there(&root, folders[1]));
            assert_true(there(&root, folders[0]) && there(&root, folders[2]));
            root_drop(&root);
        }
    }
}

static void the_last_good_one_stays_even_when_a_damaged_one_is_newer(void **state)
{
    (void)state;
    test_root root;
    char folders[3][64], where[600];
    make(&root, folders);
    lose(&root, folders[2], "flipped");
    lose(&root, folders[1], "gone");
    lg_error err = LG_ERROR_INIT;
    FAILS(LG_ERR_PROTECTED, lg_remove(at(where, &root, "%s", "@10"), &err));
    assert_true(there(&root, folders[0]));
    OK(lg_remove(at(where, &root, "%s", "@30"), &err));
    OK(lg_remove(at(where, &root, "%s", "@20"), &err));
    FAILS(LG_ERR_PROTECTED, lg_remove(at(where, &root, "%s", "@10"), &err));
    SAYS("last checkpoint here that may be good");
    root_drop(&root);
}

static void damage_in_what_stays_forbids_removal(void **state)
{
    (void)state;
    test_root root;
    char folders[3][64], where[600];
    make(&root, folders);
    /* Sizes are right and manifests too: only reading every byte tells. */
    root_flip(&root, folders[0], "shard-00002-model-00001-of-00001.safetensors", 4096);
    root_flip(&root, folders[1], "shard-00001-optim-00001-of-00001.safetensors", 4100);
    lg_error err = LG_ERROR_INIT;
    FAILS(LG_ERR_PROTECTED, lg_remove(at(where, &root, "%s", "@30"), &err));
    assert_true(there(&root, folders[2]));
    OK(lg_remove(at(where, &root, "%s", "@20"), &err));
    assert_false(there(&root, folders[1]));
    root_drop(&root);
}

static void a_pinned_one_and_a_root_are_not_removed(void **state)
{
    (void)state;
    test_root root;
    char folders[3][64], where[600];
    make(&root, folders);
    lg_error err = LG_ERROR_INIT;
    at(where, &root, "%s", "@20");
    OK(lg_pin(where, 1, "for the paper", &err));
    FAILS(LG_ERR_PROTECTED, lg_remove(where, &err));
    SAYS("for the paper");
    OK(lg_pin(where, 0, NULL, &err));
    FAILS(LG_ERR_INVALID, lg_remove(root.path, &err));
    OK(lg_remove(where, &err));
    assert_false(there(&root, folders[1]));
    root_drop(&root);
}

/* ------------------------------------------------- copies kept for each rank */

static void save_copies(rank_env *env)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.deadline_ms = 20000;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    double stats[3] = {env->rank + 0.5, env->rank + 1.5, env->rank + 2.5};
    uint64_t shape[1] = {3};
    lg_save *save;
    env->status = lg_save_begin(s, 10, NULL, &save, &env->err);
    if (env->status == LG_OK) {
        lg_tensor t = LG_TENSOR_INIT;
        t.name = "stats", t.dtype = LG_F64, t.ndim = 1, t.shape = shape, t.data = stats, t.flags = LG_TENSOR_BUFFER;
        env->status = lg_save_tensor(save, &t, &env->err);
        if (env->status == LG_OK) {
            env->status = lg_save_commit(save, NULL, &env->err);
        } else {
            lg_save_abort(save);
        }
    }
    lg_session_close(s, NULL);
}

static void of_a_tensor_kept_per_rank_any_ranks_copy_can_be_loaded(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    rank_env env[3];
    run_ranks(3, root.store, save_copies, NULL, env);
    for (int i = 0; i < 3; i++) {
        assert_string_equal(env[i].err.message, "");
        assert_int_equal(env[i].status, LG_OK);
    }
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint *c;
    OK(lg_checkpoint_open(root.path, &c, &err));
    uint64_t shape[1] = {3};
    double got[3];
    lg_target t = LG_TARGET_INIT;
    t.name = "stats", t.dtype = LG_F64, t.ndim = 1, t.shape = shape, t.data = got;
    for (uint32_t rank = 0; rank < 4; rank++) {
        lg_load *load;
        OK(lg_load_begin(c, 0, &load, &err));
        t.rank = rank;
        t.flags = LG_TENSOR_COPY_OF_RANK;
        if (rank == 3) {
            FAILS(LG_ERR_MISSING, lg_load_tensor(load, &t, &err));
            SAYS("rank 3 kept no copy");
        } else {
            OK(lg_load_tensor(load, &t, &err));
            OK(lg_load_run(load, &err));
            assert_true(got[0] == rank + 0.5 && got[2] == rank + 2.5);
        }
        lg_load_free(load);
    }
    t.rank = 2;
    t.flags = 0; /* without the flag the rank says nothing: the first rank's copy */
    lg_load *load;
    OK(lg_load_begin(c, 0, &load, &err));
    OK(lg_load_tensor(load, &t, &err));
    OK(lg_load_run(load, &err));
    assert_true(got[0] == 0.5);
    lg_load_free(load);
    lg_checkpoint_close(c);
    root_drop(&root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_checkpoint_is_found_by_root_folder_step_and_generation),
        cmocka_unit_test(a_generation_that_two_folders_claim_names_neither_of_them),
        cmocka_unit_test(a_folder_that_was_moved_away_opens_under_any_name),
        cmocka_unit_test(a_checkpoint_is_found_by_a_relative_name_with_and_without_file),
        cmocka_unit_test(a_name_that_is_too_long_for_any_file_is_an_ordinary_error),
        cmocka_unit_test(a_tombstone_under_any_name_is_no_checkpoint),
        cmocka_unit_test(partial_and_trash_folders_are_no_checkpoints_whatever_they_hold),
        cmocka_unit_test(a_checkpoint_without_a_readable_manifest_can_be_named_and_removed),
        cmocka_unit_test(the_last_good_one_stays_even_when_a_damaged_one_is_newer),
        cmocka_unit_test(damage_in_what_stays_forbids_removal),
        cmocka_unit_test(a_pinned_one_and_a_root_are_not_removed),
        cmocka_unit_test(of_a_tensor_kept_per_rank_any_ranks_copy_can_be_loaded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
