/* SPDX-License-Identifier: Apache-2.0 */

/* Runs: saving, resuming on the same or another number of ranks, falling back,
 * retention, rollback. Every test runs on every kind of root. */

#include "support/ranks.h"

#include "base/buf.h"
#include "comm/comm.h"
#include "core/walk.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static run_spec spec_of(uint32_t world, const uint64_t *steps, size_t n)
{
    return (run_spec){.world = world, .steps = steps, .n_steps = n};
}

ON_EVERY_ROOT(an_empty_root_is_a_fresh_start)
{
    run_spec s = spec_of(2, NULL, 0);
    root_run(root, &s);
    assert_int_equal(s.resumed_from, UINT64_MAX);
}

ON_EVERY_ROOT(k08_a_run_resumes_on_any_number_of_ranks)
{
    static const uint32_t worlds[] = {1, 3, 4, 2, 13, 5, 1, 16};
    uint64_t step = 0;
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        uint64_t next[2] = {step + 10, step + 20};
        run_spec s = spec_of(worlds[i], next, 2);
        root_run(root, &s);
        assert_int_equal(s.resumed_from, step == 0 ? UINT64_MAX : step);
        step += 20;
    }
}

/* Serial numbers, epochs and steps of one and of more digits: no order of strings
 * is that of numbers. */
ON_EVERY_ROOT(k02_f022_f023_f025_the_newest_is_the_newest_by_numbers)
{
    uint64_t last = 0;
    for (uint64_t session = 1; session <= 11; session++) {
        uint64_t steps[11];
        for (uint64_t i = 0; i < 11; i++) {
            steps[i] = last += i == 9 ? 999 : 1; /* 9 to 10 and 99 to 1000, among others */
        }
        run_spec s = spec_of(1, steps, session == 2 || session == 10 ? 11 : 1);
        last = s.steps[s.n_steps - 1];
        root_run(root, &s);
        run_spec look = spec_of(2, NULL, 0);
        root_run(root, &look);
        assert_int_equal(look.resumed_from, last);
        assert_int_equal(look.skipped, 0);
    }
    char folders[64][64];
    const size_t n = root_folders(root, folders, 64);
    assert_non_null(strstr(folders[n - 1], "g21.1")); /* two sessions each */
}

/* ------------------------------------------------------------ falling back */

typedef struct damage_case {
    const char *name;
    const char *file;
    int64_t flip; /* offset, or -1 */
    int64_t cut;  /* new length, or -1: remove */
} damage_case;

static void damage(test_root *root, const char *folder, const damage_case *d)
{
    if (d->flip >= 0) {
        root_flip(root, folder, d->file, (uint64_t)d->flip);
        return;
    }
    char path[512];
    lg_error err = LG_ERROR_INIT;
    assert_true(lg__path_join(path, sizeof path, folder, d->file));
    lg__buf b;
    lg__buf_init(&b, 1 << 24);
    assert_int_equal(lg__store_read_all(root->inner, path, &b, &err), LG_OK);
    assert_int_equal(lg__store_remove_file(root->inner, path, &err), LG_OK);
    if (d->cut >= 0) {
        assert_true((size_t)d->cut < b.len);
        lg_file *f;
        assert_int_equal(lg__store_create(root->inner, path, 0, &f, &err), LG_OK);
        if (d->cut > 0) {
            assert_int_equal(lg__store_write(root->inner, f, b.data, (size_t)d->cut, 0, &err), LG_OK);
        }
        assert_int_equal(lg__store_close(root->inner, f, &err), LG_OK);
    }
    lg__buf_free(&b);
}

ON_EVERY_ROOT(k01_k02_resume_falls_back_past_damage_and_goes_on_without_a_name_clash)
{
    static const damage_case cases[] = {
        {"manifest flipped", "lastgood.json", 100, 0},
        {"manifest cut", "lastgood.json", -1, 40},
        {"manifest empty", "lastgood.json", -1, 0},
        {"data of one rank flipped", "shard-00002-model-00001-of-00001.safetensors", 4096 + 3, 0},
        {"header flipped", "shard-00001-model-00001-of-00001.safetensors", 30, 0},
        {"shard cut", "shard-00003-optim-00001-of-00002.safetensors", -1, 4098},
        {"shard empty", "shard-00001-optim-00002-of-00002.safetensors", -1, 0},
        {"shard missing", "shard-00002-model-00001-of-00001.safetensors", -1, -1},
        {"sums flipped", "rank-00002.sums", 60, 0},
        {"sums missing", "rank-00003.sums", -1, -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        print_message("#   %s\n", cases[i].name);
        test_root fresh;
        root_make(&fresh, root->kind);
        run_spec s = spec_of(3, STEPS(10, 20, 30));
        root_run(&fresh, &s);
        char folders[8][64];
        assert_int_equal(root_folders(&fresh, folders, 8), 3);
        damage(&fresh, folders[2], &cases[i]);
        run_spec again = spec_of(3, STEPS(30, 40));
        root_run(&fresh, &again);
        assert_int_equal(again.resumed_from, 20);
        assert_int_equal(again.skipped, 1);
        run_spec last = spec_of(2, NULL, 0);
        root_run(&fresh, &last);
        assert_int_equal(last.resumed_from, 40);
        assert_int_equal(last.skipped, 0);
        root_drop(&fresh);
    }
}

ON_EVERY_ROOT(a_root_with_only_damaged_checkpoints_is_no_fresh_start)
{
    run_spec s = spec_of(2, STEPS(5, 6));
    root_run(root, &s);
    char folders[8][64];
    assert_int_equal(root_folders(root, folders, 8), 2);
    root_flip(root, folders[0], "shard-00001-model-00001-of-00001.safetensors", 4100);
    root_flip(root, folders[1], "shard-00002-model-00001-of-00001.safetensors", 4100);
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = root->store;
    lg_session *session;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg_session_open("root", &o, &session, &err), LG_OK);
    model m;
    model_init(&m, 0, 1);
    lg_resume_result *r = NULL;
    assert_int_equal(lg_resume(session, NULL, model_targets, &m, &r, &err), LG_ERR_NO_GOOD);
    assert_int_equal(r->n_skipped, 2);
    assert_int_equal(r->skipped[0].step, 6);
    assert_non_null(strstr(r->skipped[0].reason, "shard-00002-model"));
    assert_non_null(strstr(r->skipped[1].reason, "shard-00001-model"));
    lg_resume_result_free(r);
    /* and nothing can be saved over it by accident */
    model_fill(&m, 7);
    assert_int_equal(model_save(session, &m, 7, NULL, &err), LG_ERR_OTHER_RUN);
    lg_session_close(session, NULL);
}

ON_EVERY_ROOT(strict_resume_refuses_a_damaged_newest)
{
    run_spec s = spec_of(1, STEPS(1, 2));
    root_run(root, &s);
    char folders[8][64];
    root_folders(root, folders, 8);
    root_flip(root, folders[1], "shard-00001-model-00001-of-00001.safetensors", 4100);
    lg_session *session = open_to_read(root->store);
    lg_error err = LG_ERROR_INIT;
    model m;
    model_init(&m, 0, 1);
    lg_resume_options ro = LG_RESUME_OPTIONS_INIT;
    ro.flags = LG_RESUME_STRICT;
    lg_resume_result *r = NULL;
    assert_int_equal(lg_resume(session, &ro, model_targets, &m, &r, &err), LG_ERR_NOT_WHOLE);
    assert_non_null(strstr(err.message, folders[1]));
    uint64_t step = 1;
    ro.flags = 0;
    ro.step = &step;
    assert_int_equal(lg_resume(session, &ro, model_targets, &m, &r, &err), LG_OK);
    assert_null(model_wrong(&m, 1));
    lg_resume_result_free(r);
    lg_generation g = {9, 9};
    ro.step = NULL;
    ro.generation = &g;
    assert_int_equal(lg_resume(session, &ro, model_targets, &m, &r, &err), LG_ERR_NOT_FOUND);
    lg_session_close(session, NULL);
}

static lg_status no_words(lg_load *load, void *arg, lg_error *err)
{
    (void)load, (void)arg, (void)err;
    return LG_ERR_CANCELLED;
}

ON_EVERY_ROOT(a_resume_that_cannot_be_says_why)
{
    run_spec s = spec_of(1, STEPS(1));
    root_run(root, &s);
    lg_session *session = open_to_read(root->store);
    lg_error err = LG_ERROR_INIT;
    model m;
    model_init(&m, 0, 1);
    lg_resume_options ro = LG_RESUME_OPTIONS_INIT;
    uint64_t step = 99;
    ro.step = &step;
    lg_resume_result *r = NULL;
    assert_int_equal(lg_resume(session, &ro, model_targets, &m, &r, &err), LG_ERR_NOT_FOUND);
    assert_non_null(strstr(err.message, "no checkpoint of step 99"));
    assert_int_equal(lg_resume(session, NULL, no_words, NULL, &r, &err), LG_ERR_CANCELLED);
    assert_non_null(strstr(err.message, "the targets callback returned LG_ERR_CANCELLED"));
    lg_session_close(session, NULL);
}

/* -------------------------------------------------------------- retention */

static void expect_steps(test_root *root, const uint64_t *steps, size_t n)
{
    char folders[64][64];
    size_t got = root_folders(root, folders, 64);
    char want[64];
    for (size_t i = 0; i < got; i++) {
        print_message("#   there: %s\n", folders[i]);
    }
    assert_int_equal(got, n);
    for (size_t i = 0; i < n; i++) {
        snprintf(want, sizeof want, "step-%012llu.", (unsigned long long)steps[i]);
        assert_int_equal(strncmp(folders[i], want, strlen(want)), 0);
    }
}

ON_EVERY_ROOT(k03_retention_keeps_the_last_ones_and_every_kth_step)
{
    run_spec s = spec_of(2, STEPS(9000, 9500, 9900, 10000, 10100, 10200, 10300));
    s.keep_last = 2;
    s.keep_every = 5000;
    root_run(root, &s);
    expect_steps(root, STEPS(10000, 10200, 10300));
}

ON_EVERY_ROOT(k03_retention_of_one_keeps_the_last_good_one)
{
    run_spec s = spec_of(2, STEPS(1, 2, 3, 4));
    s.keep_last = 1;
    root_run(root, &s);
    expect_steps(root, STEPS(4));
}

ON_EVERY_ROOT(k03_damaged_ones_do_not_count_towards_what_is_kept)
{
    run_spec s = spec_of(1, STEPS(1, 2, 3));
    root_run(root, &s);
    char folders[8][64];
    root_folders(root, folders, 8);
    root_flip(root, folders[2], "shard-00001-model-00001-of-00001.safetensors", 4100);
    run_spec more = spec_of(1, STEPS(4));
    more.keep_last = 2;
    root_run(root, &more);
    assert_int_equal(more.resumed_from, 2);
    expect_steps(root, STEPS(2, 3, 4));
    run_spec enough = spec_of(1, STEPS(5));
    enough.keep_last = 2;
    root_run(root, &enough);
    expect_steps(root, STEPS(4, 5));
}

ON_EVERY_ROOT(k03_one_that_lost_a_file_does_not_count_towards_what_is_kept)
{
    run_spec s = spec_of(1, STEPS(1, 2, 3));
    root_run(root, &s);
    char folders[8][64], path[256];
    root_folders(root, folders, 8);
    snprintf(path, sizeof path, "%s/rank-00001.sums", folders[1]);
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg__store_remove_file(root->inner, path, &err), LG_OK);
    run_spec more = spec_of(1, STEPS(4));
    more.keep_last = 3;
    root_run(root, &more); /* 2 was neither loaded nor looked at before */
    assert_int_equal(more.resumed_from, 3);
    expect_steps(root, STEPS(1, 2, 3, 4));
}

ON_EVERY_ROOT(the_same_step_committed_twice_makes_two_generations)
{
    run_spec s = spec_of(2, STEPS(7, 7));
    root_run(root, &s);
    expect_steps(root, STEPS(7, 7));
    run_spec again = spec_of(3, STEPS(7));
    root_run(root, &again);
    assert_int_equal(again.resumed_from, 7);
    expect_steps(root, STEPS(7, 7, 7));
}

static void save_if_new(rank_env *env)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    lg_resume_result *r = NULL;
    lg_status st = lg_resume(s, NULL, model_targets, &m, &r, &env->err);
    RANK_CHECK(env, st == LG_OK || st == LG_ERR_EMPTY);
    lg_resume_result_free(r);
    lg_save_options so = LG_SAVE_OPTIONS_INIT;
    so.flags = LG_SAVE_IF_NEW;
    for (int i = 0; i < 2; i++) {
        lg_save *save;
        lg_save_info info;
        model_fill(&m, 9);
        RANK_TRY(env, lg_save_begin(s, 9, &so, &save, &env->err));
        RANK_TRY(env, model_add(save, &m, &env->err));
        RANK_TRY(env, lg_save_commit(save, &info, &env->err));
        RANK_CHECK(env, info.skipped == (i == 1 || st == LG_OK));
        RANK_CHECK(env, info.folder[0] == 's');
    }
    RANK_TRY(env, lg_session_close(s, &env->err));
}

ON_EVERY_ROOT(a_step_that_is_committed_is_not_saved_again_on_request)
{
    for (int i = 0; i < 2; i++) {
        rank_env env[2];
        run_ranks(2, root->store, save_if_new, NULL, env);
        for (int r = 0; r < 2; r++) {
            assert_string_equal(env[r].err.status == LG_ERR_EMPTY ? "" : env[r].err.message, "");
            assert_int_equal(env[r].status, LG_OK);
        }
        expect_steps(root, STEPS(9));
    }
}

/* ------------------------------------------------------------------- runs */

ON_EVERY_ROOT(a_session_that_did_not_resume_may_not_save_beside_another_run)
{
    run_spec s = spec_of(1, STEPS(5));
    root_run(root, &s);
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = root->store;
    lg_error err = LG_ERROR_INIT;
    model m;
    model_init(&m, 0, 1);
    model_fill(&m, 6);
    lg_session *session;
    assert_int_equal(lg_session_open("root", &o, &session, &err), LG_OK);
    assert_int_equal(model_save(session, &m, 6, NULL, &err), LG_ERR_OTHER_RUN);
    assert_non_null(strstr(err.message, "step-000000000005"));
    lg_session_close(session, NULL);
    expect_steps(root, STEPS(5));
    o.flags = LG_SESSION_NEW_RUN;
    assert_int_equal(lg_session_open("root", &o, &session, &err), LG_OK);
    assert_int_equal(model_save(session, &m, 6, NULL, &err), LG_OK);
    lg_session_close(session, NULL);
    expect_steps(root, STEPS(5, 6));
}

ON_EVERY_ROOT(a_session_taken_over_fails_its_next_save_and_all_after_it)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = root->store;
    lg_error err = LG_ERROR_INIT;
    lg_session *first, *second;
    model m;
    model_init(&m, 0, 1);
    model_fill(&m, 1);
    assert_int_equal(lg_session_open("root", &o, &first, &err), LG_OK);
    assert_int_equal(model_save(first, &m, 1, NULL, &err), LG_OK);
    assert_int_equal(lg_session_open("root", &o, &second, &err), LG_OK);
    assert_int_equal(lg_session_epoch(second), lg_session_epoch(first) + 1);
    model_fill(&m, 2);
    assert_int_equal(model_save(first, &m, 2, NULL, &err), LG_ERR_SUPERSEDED);
    assert_int_equal(model_save(first, &m, 2, NULL, &err), LG_ERR_SUPERSEDED);
    lg_resume_result *r;
    assert_int_equal(lg_resume(second, NULL, model_targets, &m, &r, &err), LG_OK);
    assert_int_equal(r->step, 1);
    lg_resume_result_free(r);
    lg_session_close(first, NULL);
    lg_session_close(second, NULL);
    expect_steps(root, STEPS(1));
}

static void save_one_odd_rank(rank_env *env)
{
    const char *what = env->arg;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.deadline_ms = 10000;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    model_fill(&m, 1);
    lg_save *save;
    uint64_t step = strcmp(what, "step") == 0 && env->rank == 2 ? 2 : 1;
    RANK_TRY(env, lg_save_begin(s, step, NULL, &save, &env->err));
    bool odd = env->rank == 2;
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    uint32_t sizes[1] = {env->world};
    lg_split rows = {0, 0, 0, LG_SPLIT_CEIL};
    d.mesh_ndim = 1, d.mesh_sizes = sizes, d.n_splits = 1, d.splits = &rows;
    lg_layout *layout;
    RANK_TRY(env, lg_layout_create(&d, &layout, &env->err));
    static const uint64_t shape[1] = {8};
    static const double data[8] = {0};
    lg_tensor t = LG_TENSOR_INIT;
    t.name = "a", t.ndim = 1, t.shape = shape, t.data = data, t.layout = layout;
    RANK_TRY(env, lg_save_tensor(save, &t, &env->err));
    t.name = "odd.one";
    t.dtype = strcmp(what, "dtype") == 0 && odd ? LG_F64 : LG_F32;
    if (strcmp(what, "lacks") != 0 || !odd) {
        RANK_TRY(env, lg_save_tensor(save, &t, &env->err));
    }
    RANK_TRY(env, lg_save_global_u64(save, "key", strcmp(what, "state") == 0 && odd ? 4 : 5, &env->err));
    static const float other[2] = {1, 2}, same[2] = {1, 3};
    static const uint64_t two[1] = {2};
    lg_tensor u = LG_TENSOR_INIT;
    u.name = "undeclared", u.ndim = 1, u.shape = two;
    u.data = strcmp(what, "parameter") == 0 && odd ? other : same;
    RANK_TRY(env, lg_save_tensor(save, &u, &env->err));
    lg_layout_free(layout);
    env->status = lg_save_commit(save, NULL, &env->err);
    lg_session_close(s, NULL);
}

static void open_as_odd_rank(rank_env *env)
{
    const char *what = env->arg;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = env->comm;
    o.store = env->store;
    o.deadline_ms = 10000;
    if (env->rank == 1) {
        o.block_bytes = strcmp(what, "block") == 0 ? 8192 : strcmp(what, "bad block") == 0 ? 5000 : o.block_bytes;
        o.flags |= strcmp(what, "flags") == 0 ? LG_SESSION_NEW_RUN : 0;
        env->comm->rank = strcmp(what, "rank") == 0 ? 2 : env->comm->rank; /* as its launcher says */
    }
    lg_session *s = NULL;
    env->status = lg_session_open("root", &o, &s, &env->err);
    lg_session_close(s, NULL);
}

ON_EVERY_ROOT(k05_k06_ranks_that_open_in_different_ways_are_named_on_all_ranks)
{
    static const struct {
        const char *what;
        lg_status status;
        const char *says;
    } cases[] = {
        {"block", LG_ERR_CONFLICT, "rank 1 opened the session with other options than rank 0"},
        {"flags", LG_ERR_CONFLICT, "rank 1 opened the session with other options than rank 0"},
        {"bad block", LG_ERR_INVALID, "block_bytes"},
        {"rank", LG_ERR_CONFLICT, "two processes say that they are rank 2 of 3"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rank_env env[3];
        run_ranks(3, root->store, open_as_odd_rank, (void *)(uintptr_t)cases[i].what, env);
        for (int r = 0; r < 3; r++) {
            print_message("#   %s, rank %d: %s\n", cases[i].what, r, env[r].err.message);
            assert_int_equal(env[r].status, cases[i].status);
            assert_non_null(strstr(env[r].err.message, cases[i].says));
        }
    }
}

ON_EVERY_ROOT(k05_k06_ranks_that_contradict_each_other_are_named_on_all_ranks)
{
    static const struct {
        const char *what;
        lg_status status;
        const char *says[3];
    } cases[] = {
        {"lacks", LG_ERR_CONFLICT, {"2", NULL}},
        {"dtype", LG_ERR_CONFLICT, {"2", NULL}},
        {"step", LG_ERR_CONFLICT, {"rank 2", "step 2", NULL}},
        {"state", LG_ERR_CONFLICT, {"key", "2", NULL}},
        {"parameter", LG_ERR_CONFLICT, {"undeclared", "2", NULL}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rank_env env[4];
        run_ranks(4, root->store, save_one_odd_rank, (void *)(uintptr_t)cases[i].what, env);
        for (int r = 0; r < 4; r++) {
            if (r == 0) {
                print_message("#   %s: %s\n", cases[i].what, env[r].err.message);
            }
            assert_int_equal(env[r].status, cases[i].status);
            /* each rank names the step it was asked for itself */
            assert_string_equal(strchr(env[r].err.message, ':'), strchr(env[0].err.message, ':'));
            for (int k = 0; cases[i].says[k] != NULL; k++) {
                assert_non_null(strstr(env[r].err.message, cases[i].says[k]));
            }
        }
        expect_steps(root, NULL, 0);
    }
}

/* One rank's mistake while it describes its save: it calls commit all the same,
 * and all ranks get its error at once. */
static void one_bad_call(rank_env *env)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    model_fill(&m, 4);
    lg_save *save;
    RANK_TRY(env, lg_save_begin(s, 4, NULL, &save, &env->err));
    RANK_TRY(env, model_add(save, &m, &env->err));
    if (env->rank == 1) {
        if (env->arg == NULL) {
            RANK_CHECK(env, lg_save_alias(save, "x", "no such tensor", &env->err) == LG_ERR_INVALID);
        } else { /* the first of them counts */
            RANK_TRY(env, lg_save_fail(save, LG_ERR_CANCELLED, "the trainer's own trouble", &env->err));
            RANK_TRY(env, lg_save_fail(save, LG_ERR_IO, "later", &env->err));
        }
    }
    env->status = lg_save_commit(save, NULL, &env->err);
    lg_session_close(s, NULL);
}

ON_EVERY_ROOT(k06_an_error_while_describing_a_save_reaches_all_ranks_through_the_commit)
{
    rank_env env[3];
    run_ranks(3, root->store, one_bad_call, NULL, env);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(env[r].status, LG_ERR_INVALID);
        assert_int_equal(env[r].err.rank, 1);
        assert_non_null(strstr(env[r].err.message, "rank 1: alias"));
    }
    expect_steps(root, NULL, 0);
}

ON_EVERY_ROOT(k06_a_trouble_of_the_caller_s_own_reaches_all_ranks_through_the_commit)
{
    rank_env env[3];
    run_ranks(3, root->store, one_bad_call, "fail", env);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(env[r].status, LG_ERR_CANCELLED);
        assert_int_equal(env[r].err.rank, 1);
        assert_non_null(strstr(env[r].err.message, "rank 1: the trainer's own trouble"));
    }
    expect_steps(root, NULL, 0);
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg_save_fail(NULL, LG_ERR_IO, "x", &err), LG_ERR_INVALID);
}

ON_EVERY_ROOT(an_unverified_resume_is_recorded_in_the_next_checkpoint)
{
    run_spec first = spec_of(1, STEPS(1));
    root_run(root, &first);
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = root->store;
    lg_session *s;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg_session_open("root", &o, &s, &err), LG_OK);
    model m;
    model_init(&m, 0, 1);
    lg_resume_options ro = LG_RESUME_OPTIONS_INIT;
    ro.flags = LG_RESUME_UNVERIFIED;
    lg_resume_result *r;
    assert_int_equal(lg_resume(s, &ro, model_targets, &m, &r, &err), LG_OK);
    assert_int_equal(r->verified, 0);
    lg_resume_result_free(r);
    for (uint64_t step = 2; step < 4; step++) {
        model_fill(&m, step);
        assert_int_equal(model_save(s, &m, step, NULL, &err), LG_OK);
    }
    lg_session_close(s, NULL);
    lg__walk *w;
    assert_int_equal(lg__walk_read(root->store, &w, &err), LG_OK);
    assert_int_equal(w->n, 3);
    assert_true(w->items[0].m->parent_verified);  /* 3, after 2 of this session */
    assert_false(w->items[1].m->parent_verified); /* 2, after 1 loaded unchecked */
    assert_int_equal(w->items[1].m->parent_step, 1);
    assert_false(w->items[2].m->has_parent);
    lg__walk_free(w);
}

static void differing_buffers(rank_env *env)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    m.stats_differ = true;
    lg_resume_result *r = NULL;
    lg_status st = lg_resume(s, NULL, model_targets, &m, &r, &env->err);
    if (st == LG_OK) {
        RANK_CHECK(env, model_wrong(&m, 3) == NULL); /* each rank its own again */
        void *blob;
        size_t bytes;
        RANK_TRY(env, lg_checkpoint_rank_bytes(r->checkpoint, "blob", env->rank, env->world, &blob, &bytes, &env->err));
        char want[64];
        snprintf(want, sizeof want, "rank %u step 3", env->rank);
        RANK_CHECK(env, bytes == strlen(want) && memcmp(blob, want, bytes) == 0);
        lg_free(blob);
        RANK_CHECK(env, lg_checkpoint_rank_bytes(r->checkpoint, "blob", 0, env->world + 1, &blob, &bytes, &env->err) ==
                            LG_ERR_WORLD);
        lg_resume_result_free(r);
    } else {
        RANK_CHECK(env, st == LG_ERR_EMPTY);
        model_fill(&m, 3);
        lg_save_info info;
        RANK_TRY(env, model_save(s, &m, 3, &info, &env->err));
        RANK_CHECK(env, info.unshared == 1);
    }
    env->status = lg_session_close(s, &env->err);
}

ON_EVERY_ROOT(buffers_that_differ_are_kept_for_each_rank)
{
    for (int i = 0; i < 2; i++) {
        rank_env env[3];
        run_ranks(3, root->store, differing_buffers, NULL, env);
        for (int r = 0; r < 3; r++) {
            if (env[r].status != LG_OK) {
                fail_msg("rank %d: %s", r, env[r].err.message);
            }
        }
    }
}

/* ------------------------------------------- ranks that declare all they have */

static void save_with_one_undeclared(rank_env *env)
{
    const uint32_t odd = *(const uint32_t *)env->arg; /* alone has an undeclared tensor */
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    uint32_t sizes[1] = {env->world};
    lg_split rows = {0, 0, 0, LG_SPLIT_CEIL};
    d.mesh_ndim = 1, d.mesh_sizes = sizes, d.n_splits = 1, d.splits = &rows;
    lg_layout *layout;
    RANK_TRY(env, lg_layout_create(&d, &layout, &env->err));
    static const uint64_t shape[1] = {9}, two[1] = {2};
    static const float data[9] = {0}, mean[2] = {3, 4};
    lg_tensor t = LG_TENSOR_INIT;
    t.name = "declared", t.ndim = 1, t.shape = shape, t.data = data, t.layout = layout;
    lg_save *save;
    RANK_TRY(env, lg_save_begin(s, 1, NULL, &save, &env->err));
    RANK_TRY(env, lg_save_tensor(save, &t, &env->err));
    lg_tensor u = LG_TENSOR_INIT;
    u.name = "running.mean", u.ndim = 1, u.shape = two, u.data = mean, u.flags = LG_TENSOR_BUFFER;
    if (env->rank == odd) {
        RANK_TRY(env, lg_save_tensor(save, &u, &env->err));
    }
    RANK_TRY(env, lg_save_commit(save, NULL, &env->err));
    lg_layout_free(layout);
    RANK_TRY(env, lg_session_close(s, &env->err));
}

ON_EVERY_ROOT(a_rank_that_declares_all_its_tensors_saves_beside_one_that_does_not)
{
    for (uint32_t odd = 0; odd < 3; odd++) {
        rank_env env[3];
        test_root fresh;
        root_make(&fresh, root->kind);
        run_ranks(3, fresh.store, save_with_one_undeclared, &odd, env);
        for (int r = 0; r < 3; r++) {
            if (env[r].status != LG_OK) {
                fail_msg("rank %d, odd one %u: %s", r, odd, env[r].err.message);
            }
        }
        lg_error err = LG_ERROR_INIT;
        lg__walk *w;
        assert_int_equal(lg__walk_read(fresh.store, &w, &err), LG_OK);
        assert_int_equal(w->n, 1);
        assert_non_null(lg__manifest_find(w->items[0].m, "running.mean"));
        assert_non_null(lg__manifest_find(w->items[0].m, "declared"));
        lg__walk_free(w);
        root_drop(&fresh);
    }
}

/* ------------------------------------------------------------ resume in rounds */

enum { ROUND_TENSORS = 4, ROUND_ELEMENTS = 4096 };
static const uint64_t round_shape[1] = {ROUND_ELEMENTS};

static float round_value(uint64_t step, int tensor, int i)
{
    return (float)(step * 100000 + (uint64_t)(tensor * 10000 + i));
}

static void save_for_rounds(rank_env *env)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.block_bytes = 4096;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    static float data[ROUND_TENSORS][ROUND_ELEMENTS]; /* of rank 0, which alone has the tensors */
    for (uint64_t step = 1; step <= 2; step++) {
        lg_save *save;
        RANK_TRY(env, lg_save_begin(s, step, NULL, &save, &env->err));
        for (int t = 0; t < ROUND_TENSORS && env->rank == 0; t++) {
            for (int i = 0; i < ROUND_ELEMENTS; i++) {
                data[t][i] = round_value(step, t, i);
            }
            char name[8];
            snprintf(name, sizeof name, "t%d", t);
            lg_tensor tensor = LG_TENSOR_INIT;
            tensor.name = name, tensor.ndim = 1, tensor.shape = round_shape, tensor.data = data[t];
            RANK_TRY(env, lg_save_tensor(save, &tensor, &env->err));
        }
        RANK_TRY(env, lg_save_commit(save, NULL, &env->err));
    }
    RANK_TRY(env, lg_session_close(s, &env->err));
}

typedef struct rounds {
    uint32_t n;                   /* wanted, one tensor each */
    uint32_t calls;               /* for all checkpoints that were tried */
    float memory[ROUND_ELEMENTS]; /* used again in each */
    bool wrong;
} rounds;

static void check_round(rounds *want, uint64_t step, uint32_t tensor)
{
    for (int i = 0; i < ROUND_ELEMENTS; i++) {
        want->wrong = want->wrong || want->memory[i] != round_value(step, (int)tensor, i);
    }
}

static lg_status targets_in_rounds(lg_load *load, void *arg, lg_error *err)
{
    rounds *want = arg;
    lg_checkpoint_info info;
    lg_status st = lg_checkpoint_get_info(lg_load_checkpoint(load), &info, err);
    if (st != LG_OK) {
        return st;
    }
    want->calls++;
    const uint32_t now = lg_load_round(load);
    if (now > 0 && now <= want->n) {
        check_round(want, info.step, now - 1);
    }
    if (now < want->n) {
        char name[16];
        snprintf(name, sizeof name, "t%u", now);
        lg_target t = LG_TARGET_INIT;
        t.name = name, t.ndim = 1, t.shape = round_shape, t.data = want->memory;
        st = lg_load_tensor(load, &t, err);
        if (now + 1 < want->n) {
            lg_load_again(load);
        }
    }
    return st;
}

typedef struct round_case {
    uint32_t flags;
    uint64_t step; /* that is found */
    uint32_t n[3]; /* rounds of each rank */
    uint32_t calls[3];
} round_case;

static void resume_in_rounds(rank_env *env)
{
    const round_case *c = env->arg;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    lg_resume_options ro = LG_RESUME_OPTIONS_INIT;
    ro.flags = LG_RESUME_ROUNDS | c->flags;
    rounds want = {.n = c->n[env->rank]};
    lg_resume_result *r = NULL;
    RANK_TRY(env, lg_resume(s, &ro, targets_in_rounds, &want, &r, &env->err));
    RANK_CHECK(env, r->step == c->step);
    RANK_CHECK(env, r->tensors_loaded == want.n && r->bytes_loaded == want.n * sizeof want.memory);
    if (want.n > 0) {
        check_round(&want, r->step, want.n - 1);
    }
    RANK_CHECK(env, !want.wrong);
    RANK_CHECK(env, want.calls == c->calls[env->rank]);
    lg_resume_result_free(r);
    RANK_TRY(env, lg_session_close(s, &env->err));
}

static void expect_rounds(test_root *root, const round_case *c)
{
    rank_env env[3];
    run_ranks(3, root->store, resume_in_rounds, (void *)(uintptr_t)c, env);
    for (int r = 0; r < 3; r++) {
        if (env[r].status != LG_OK) {
            fail_msg("rank %d: %s", r, env[r].err.message);
        }
    }
}

ON_EVERY_ROOT(k06_k07_ranks_read_in_as_many_rounds_as_each_needs_and_step_back_together_from_any)
{
    rank_env env[3];
    run_ranks(3, root->store, save_for_rounds, NULL, env);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(env[r].status, LG_OK);
    }
    static const uint32_t shares[] = {0, LG_RESUME_SHARE, LG_RESUME_NO_SHARE};
    for (size_t i = 0; i < 3; i++) {
        /* Who needs fewer is asked all the same, and has nothing to add. */
        const round_case uneven = {shares[i], 2, {4, 1, 0}, {4, 4, 4}};
        expect_rounds(root, &uneven);
    }
    char folders[4][64];
    assert_int_equal(root_folders(root, folders, 4), 2);
    root_flip(root, folders[1], "shard-00001-model-00001-of-00001.safetensors",
              4096 + 3 * ROUND_ELEMENTS * sizeof(float) + 7); /* in t3 */
    for (size_t i = 0; i < 3; i++) {
        const round_case damaged = {shares[i], 1, {1, 4, 2}, {8, 8, 8}};
        expect_rounds(root, &damaged);
        const round_case unseen = {shares[i], 2, {3, 2, 3}, {3, 3, 3}};
        expect_rounds(root, &unseen);
    }
}

static void rounds_unasked(rank_env *env)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    rounds want = {.n = 2};
    lg_resume_result *r = NULL;
    RANK_CHECK(env, lg_resume(s, NULL, targets_in_rounds, &want, &r, &env->err) == LG_ERR_INVALID);
    RANK_CHECK(env, strstr(env->err.message, "LG_RESUME_ROUNDS") != NULL);
    RANK_TRY(env, lg_session_close(s, &env->err));
}

ON_EVERY_ROOT(rounds_that_the_resume_was_not_asked_for_are_an_error)
{
    rank_env env[3];
    run_ranks(3, root->store, save_for_rounds, NULL, env);
    run_ranks(3, root->store, rounds_unasked, NULL, env);
    for (int r = 0; r < 3; r++) {
        if (env[r].status != LG_OK) {
            fail_msg("rank %d: %s", r, env[r].err.message);
        }
    }
}

/* ------------------------------------------------------- plain saves and runs */

static lg_status open_as(test_root *root, uint32_t flags, lg_error *err)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = root->store;
    o.flags = flags;
    lg_session *s = NULL;
    lg_status st = lg_session_open("root", &o, &s, err);
    if (st == LG_OK) {
        lg_session_close(s, NULL);
    }
    return st;
}

ON_EVERY_ROOT(a_plain_session_does_not_take_the_root_of_a_run)
{
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(open_as(root, LG_SESSION_PLAIN, &err), LG_OK);
    assert_int_equal(open_as(root, LG_SESSION_PLAIN, &err), LG_OK);
    assert_int_equal(open_as(root, 0, &err), LG_OK);
    assert_int_equal(open_as(root, LG_SESSION_PLAIN, &err), LG_ERR_PROTECTED);
    assert_non_null(strstr(err.message, "belongs to a training run (owner epoch 3"));
    uint64_t highest = 0;
    assert_int_equal(lg__root_highest_owner(root->store, &highest, &err), LG_OK);
    assert_int_equal(highest, 3); /* nothing was claimed */
    assert_int_equal(open_as(root, LG_SESSION_PLAIN | LG_SESSION_TAKE_OVER, &err), LG_OK);
    assert_int_equal(open_as(root, LG_SESSION_PLAIN, &err), LG_OK);
    /* An owner file that cannot be read is taken for a run's. */
    assert_int_equal(lg__store_put_new(root->store, ".owner-9", "x", 1, &err), LG_OK);
    assert_int_equal(open_as(root, LG_SESSION_PLAIN, &err), LG_ERR_PROTECTED);
    assert_int_equal(open_as(root, 0, &err), LG_OK);
}

/* ------------------------------------------------------- what a resume lacks */

static lg_status targets_and_ghosts(lg_load *load, void *arg, lg_error *err)
{
    static const char *const ghosts[] = {"ghost", "another.ghost"};
    for (size_t i = 0; i < 2; i++) {
        int64_t nothing = 0;
        lg_target t = LG_TARGET_INIT;
        t.name = ghosts[i], t.dtype = LG_I64, t.data = &nothing, t.flags = LG_TENSOR_OPTIONAL;
        lg_status st = lg_load_tensor(load, &t, err);
        if (st != LG_OK) {
            return st;
        }
    }
    return model_targets(load, arg, err);
}

static void resume_with_ghosts(rank_env *env)
{
    const bool *damaged = env->arg;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.flags = LG_SESSION_READ_ONLY;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    lg_resume_result *r = NULL;
    lg_resume_options ro = LG_RESUME_OPTIONS_INIT;
    ro.flags = LG_RESUME_NO_SHARE;            /* each rank reads by itself, and only one meets the damage */
    for (int again = 0; again < 2; again++) { /* the second time it is known to be damaged */
        RANK_TRY(env, lg_resume(s, &ro, targets_and_ghosts, &m, &r, &env->err));
        RANK_CHECK(env, r->step == (*damaged ? 10 : 20) && model_wrong(&m, r->step) == NULL);
        RANK_CHECK(env, r->n_skipped == (*damaged ? 1 : 0));
        RANK_CHECK(env, r->n_missing == 2);
        RANK_CHECK(env, strcmp(r->missing[0], "ghost") == 0 && strcmp(r->missing[1], "another.ghost") == 0);
        lg_resume_result_free(r);
        r = NULL;
    }
    /* Nothing is asked for: the checkpoint is open all the same. */
    RANK_TRY(env, lg_resume(s, NULL, NULL, NULL, &r, &env->err));
    RANK_CHECK(env, r->tensors_loaded == 0 && r->n_missing == 0 && r->checkpoint != NULL);
    RANK_TRY(env, model_load_state(&m, r->checkpoint, &env->err));
    lg_resume_result_free(r);
    lg_session_close(s, NULL);
}

/* Also on the ranks that had loaded the newest when another one could not. */
ON_EVERY_ROOT(k22_what_is_optional_and_missing_is_listed_once_by_every_rank)
{
    run_spec s = spec_of(2, STEPS(10, 20));
    root_run(root, &s);
    bool damaged = false;
    run_all(2, root->store, resume_with_ghosts, &damaged);
    char folders[2][64];
    assert_int_equal(root_folders(root, folders, 2), 2);
    root_flip(root, folders[1], "shard-00002-optim-00001-of-00002.safetensors", 4096 + 3); /* of rank 1 alone */
    damaged = true;
    run_all(2, root->store, resume_with_ghosts, &damaged);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_empty_root_is_a_fresh_start),
        cmocka_unit_test(k08_a_run_resumes_on_any_number_of_ranks),
        cmocka_unit_test(k02_f022_f023_f025_the_newest_is_the_newest_by_numbers),
        cmocka_unit_test(k01_k02_resume_falls_back_past_damage_and_goes_on_without_a_name_clash),
        cmocka_unit_test(a_root_with_only_damaged_checkpoints_is_no_fresh_start),
        cmocka_unit_test(strict_resume_refuses_a_damaged_newest),
        cmocka_unit_test(a_resume_that_cannot_be_says_why),
        cmocka_unit_test(k03_retention_keeps_the_last_ones_and_every_kth_step),
        cmocka_unit_test(k03_retention_of_one_keeps_the_last_good_one),
        cmocka_unit_test(k03_damaged_ones_do_not_count_towards_what_is_kept),
        cmocka_unit_test(k03_one_that_lost_a_file_does_not_count_towards_what_is_kept),
        cmocka_unit_test(the_same_step_committed_twice_makes_two_generations),
        cmocka_unit_test(a_step_that_is_committed_is_not_saved_again_on_request),
        cmocka_unit_test(a_session_that_did_not_resume_may_not_save_beside_another_run),
        cmocka_unit_test(a_session_taken_over_fails_its_next_save_and_all_after_it),
        cmocka_unit_test(k05_k06_ranks_that_contradict_each_other_are_named_on_all_ranks),
        cmocka_unit_test(k05_k06_ranks_that_open_in_different_ways_are_named_on_all_ranks),
        cmocka_unit_test(k06_an_error_while_describing_a_save_reaches_all_ranks_through_the_commit),
        cmocka_unit_test(k06_a_trouble_of_the_caller_s_own_reaches_all_ranks_through_the_commit),
        cmocka_unit_test(an_unverified_resume_is_recorded_in_the_next_checkpoint),
        cmocka_unit_test(buffers_that_differ_are_kept_for_each_rank),
        cmocka_unit_test(a_rank_that_declares_all_its_tensors_saves_beside_one_that_does_not),
        cmocka_unit_test(k06_k07_ranks_read_in_as_many_rounds_as_each_needs_and_step_back_together_from_any),
        cmocka_unit_test(rounds_that_the_resume_was_not_asked_for_are_an_error),
        cmocka_unit_test(k22_what_is_optional_and_missing_is_listed_once_by_every_rank),
        cmocka_unit_test(a_plain_session_does_not_take_the_root_of_a_run),
    };
    return cmocka_run_group_tests_name("session", tests, NULL, NULL);
}
