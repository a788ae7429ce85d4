/* SPDX-License-Identifier: Apache-2.0 */

/* Scenes of the protocol: what happens when sessions, crashes and people get in
 * each other's way. Each runs on every kind of root; a "crash" is a store that
 * dies at a chosen operation, after which another session starts. */

#include "support/fault_store.h"
#include "support/ranks.h"

#include "base/buf.h"
#include "core/sweep.h"
#include "core/walk.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/scene.h"

/* ------------------------------------------------ a crash at any operation */

typedef struct crash_scene {
    uint32_t world;
    lg_status status[4];
} crash_scene;

static void train_on_dying_store(rank_env *env)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = env->comm;
    o.store = env->store;
    o.keep_last = 1;
    o.deadline_ms = 20000;
    lg_session *s;
    env->status = lg_session_open("root", &o, &s, &env->err);
    if (env->status != LG_OK) {
        return;
    }
    model m;
    model_init(&m, env->rank, env->world);
    lg_resume_result *r = NULL;
    env->status = lg_resume(s, NULL, model_targets, &m, &r, &env->err);
    lg_resume_result_free(r);
    if (env->status == LG_OK) {
        model_fill(&m, 20);
        env->status = model_save(s, &m, 20, NULL, &env->err);
    }
    lg_session_close(s, NULL);
}

static void crash_everywhere(test_root *root, uint32_t world, fault_how how, const char *what)
{
    uint64_t points = 0, kept_old = 0, took_new = 0;
    for (uint64_t n = 1;; n++) {
        test_root fresh;
        root_make(&fresh, root->kind);
        run_spec first = run_of(world, STEPS(10));
        root_run(&fresh, &first);
        fault_store *f = fault_store_new(fresh.store);
        fault_store_arm(f, (fault_plan){.kinds = FAULT_CHANGES, .nth = n, .how = how, .os_errno = EIO});
        rank_env env[4];
        run_ranks(world, fault_store_handle(f), train_on_dying_store, NULL, env);
        bool died = fault_store_fired(f) > 0;
        bool saved = true;
        for (uint32_t r = 0; r < world; r++) {
            saved = saved && env[r].status == LG_OK;
        }
        fault_store_free(f);
        run_spec again = run_of(1, STEPS(20)); /* and comes to the same step once more */
        root_run(&fresh, &again);              /* checks all values against the step */
        if (saved && again.resumed_from != 20) {
            fail_msg("operation %llu: the save reported success, but step %llu was resumed", (unsigned long long)n,
                     (unsigned long long)again.resumed_from);
        }
        if (again.resumed_from != 10 && again.resumed_from != 20) {
            fail_msg("operation %llu: resumed from %llu", (unsigned long long)n,
                     (unsigned long long)again.resumed_from);
        }
        assert_int_equal(again.skipped, 0);
        /* and what the crash left is gone */
        assert_int_equal(count_kind(fresh.store, LG__ROOT_PARTIAL), 0);
        assert_int_equal(count_kind(fresh.store, LG__ROOT_TRASH), 0);
        assert_int_equal(resume_finds(&fresh), 20);
        kept_old += again.resumed_from == 10;
        took_new += again.resumed_from == 20;
        points += died;
        root_drop(&fresh);
        if (!died) {
            assert_true(saved);
            break;
        }
    }
    print_message("# %s, %u ranks, %s: %llu crash points, %llu kept the old step, %llu the new one\n",
                  root_kind_name(root->kind), world, what, (unsigned long long)points, (unsigned long long)kept_old,
                  (unsigned long long)took_new);
    assert_true(points > 20 && kept_old > 5 && took_new > 1);
}

ON_EVERY_ROOT(k01_a_crash_at_any_operation_loses_nothing_that_was_committed)
{
    crash_everywhere(root, 1, FAULT_DIE, "before it");
    crash_everywhere(root, 1, FAULT_DIE_AFTER, "after it");
    crash_everywhere(root, 1, FAULT_DIE_TORN, "half of it");
    crash_everywhere(root, 3, FAULT_DIE_AFTER, "after it");
}

/* --------------------------------------- each operation fails once, no crash */

ON_EVERY_ROOT(k01_an_operation_that_fails_fails_the_save_and_the_next_save_works)
{
    uint64_t failed = 0, survived = 0;
    for (uint64_t n = 1;; n++) {
        test_root fresh;
        root_make(&fresh, root->kind);
        fault_store *f = fault_store_new(fresh.store);
        model m;
        lg_error err = LG_ERROR_INIT;
        lg_session *s = must_resume(fault_store_handle(f), 0, &m);
        assert_int_equal(save_step(s, &m, 1, &err), LG_OK);
        fault_store_arm(f, (fault_plan){.nth = n, .os_errno = ENOSPC});
        lg_status st = save_step(s, &m, 2, &err);
        bool fired = fault_store_fired(f) > 0;
        fault_store_disarm(f);
        if (st != LG_OK) {
            failed++;
            if (err.status != LG_ERR_NO_SPACE && err.status != LG_ERR_NOT_DURABLE) {
                fail_msg("operation %llu: %s: %s", (unsigned long long)n, lg_status_name(err.status), err.message);
            }
            assert_non_null(strstr(err.message, "save step 2"));
        } else {
            survived += fired;
        }
        lg_error again = LG_ERROR_INIT;
        if (save_step(s, &m, 3, &again) != LG_OK) {
            fail_msg("operation %llu (%s): the next save fails too: %s", (unsigned long long)n, err.message,
                     again.message);
        }
        lg_session_close(s, NULL);
        fault_store_free(f);
        assert_int_equal(resume_finds(&fresh), 3);
        root_drop(&fresh);
        if (!fired) {
            break;
        }
    }
    print_message("# %llu failed, %llu survived\n", (unsigned long long)failed, (unsigned long long)survived);
    assert_true(failed > 15);
}

ON_EVERY_ROOT(a_rename_or_create_that_reports_failure_after_success_is_a_success)
{
    test_root fresh;
    root_make(&fresh, root->kind);
    fault_store *f = fault_store_new(fresh.store);
    model m;
    lg_error err = LG_ERROR_INIT;
    lg_session *s = must_resume(fault_store_handle(f), 0, &m);
    uint32_t kind = root->kind == ROOT_NO_RENAME ? FAULT_PUT_NEW : FAULT_RENAME_DIR;
    static const int errnos[] = {ENOENT, EIO, EEXIST, ESTALE};
    for (uint64_t i = 0; i < 4; i++) {
        fault_store_arm(f, (fault_plan){.kinds = FAULT_BIT(kind), .how = FAULT_AFTER, .os_errno = errnos[i]});
        if (save_step(s, &m, i + 1, &err) != LG_OK) {
            fail_msg("errno %d: %s", errnos[i], err.message);
        }
        assert_int_equal(fault_store_fired(f), 1);
        fault_store_disarm(f);
        assert_int_equal(save_step(s, &m, 100 + i, &err), LG_OK);
    }
    lg_session_close(s, NULL);
    fault_store_free(f);
    assert_int_equal(resume_finds(&fresh), 103);
    root_drop(&fresh);
}

/* A failed sync is never repeated: the last one of a commit makes the save fail
 * as not known durable, and nothing is removed until a later save commits. */
ON_EVERY_ROOT(a_failed_last_sync_is_not_durable_and_stops_removal)
{
    lg_error err = LG_ERROR_INIT;
    faulty x;
    faulty_begin(&x, root, 1);
    assert_int_equal(save_step(x.s, &x.m, 1, &err), LG_OK);
    /* Find out how many folder syncs a save makes, then fail the last before
     * retention. */
    fault_store_log_clear(x.f);
    assert_int_equal(save_step(x.s, &x.m, 2, &err), LG_OK);
    size_t n;
    const fault_event *log = fault_store_log(x.f, &n);
    uint64_t syncs = 0, commit_sync = 0;
    for (size_t i = 0; i < n; i++) {
        bool commit =
            log[i].op == FAULT_RENAME_DIR || (log[i].op == FAULT_PUT_NEW && strstr(log[i].path, "lastgood.json"));
        if (log[i].op == FAULT_SYNC_DIR) {
            syncs++;
        }
        if (commit && commit_sync == 0) {
            commit_sync = syncs + 1;
        }
    }
    assert_true(commit_sync > 0);
    fault_store_arm(x.f, (fault_plan){.kinds = FAULT_BIT(FAULT_SYNC_DIR), .nth = commit_sync, .os_errno = EIO});
    assert_int_equal(save_step(x.s, &x.m, 3, &err), LG_ERR_NOT_DURABLE);
    assert_int_equal(fault_store_fired(x.f), 1);
    fault_store_disarm(x.f);
    char folders[8][64];
    assert_int_equal(root_folders(root, folders, 8), 2); /* 2 was not removed */
    assert_int_equal(save_step(x.s, &x.m, 4, &err), LG_OK);
    assert_int_equal(root_folders(root, folders, 8), 1);
    faulty_end(&x);
    assert_int_equal(resume_finds(root), 4);
}

/* --------------------------------------------- coordinator dies, ranks go on */

static void coordinator_dies(rank_env *env)
{
    fault_store *f = env->arg;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = env->comm;
    o.store = env->rank == 0 ? fault_store_handle(f) : env->store;
    o.deadline_ms = 3000;
    lg_session *s;
    RANK_TRY(env, lg_session_open("root", &o, &s, &env->err));
    model m;
    model_init(&m, env->rank, env->world);
    lg_resume_result *r = NULL;
    RANK_TRY(env, lg_resume(s, NULL, model_targets, &m, &r, &env->err));
    lg_resume_result_free(r);
    model_fill(&m, 20);
    env->status = model_save(s, &m, 20, NULL, &env->err);
    lg_session_close(s, NULL);
}

/* After the rename everything the coordinator does fails, as if it had died
 * there. The others get an error within the deadline; the checkpoint is there. */
ON_EVERY_ROOT(k06_the_coordinator_dying_between_rename_and_answer_leaves_a_committed_checkpoint)
{
    run_spec first = run_of(3, STEPS(10));
    root_run(root, &first);
    fault_store *f = fault_store_new(root->store);
    uint32_t kind = root->kind == ROOT_NO_RENAME ? FAULT_PUT_NEW : FAULT_RENAME_DIR;
    fault_store_arm(f, (fault_plan){.kinds = FAULT_BIT(kind), .path = "step-000000000020", .how = FAULT_DIE_AFTER});
    rank_env env[3];
    run_ranks(3, root->store, coordinator_dies, f, env);
    assert_int_equal(fault_store_fired(f), 1);
    fault_store_free(f);
    for (int r = 0; r < 3; r++) {
        print_message("#   rank %d: %s\n", r, env[r].err.message);
        assert_int_not_equal(env[r].status, LG_OK);
        assert_int_not_equal(env[r].status, LG_ERR_INTERNAL);
    }
    assert_int_equal(resume_finds(root), 20);
}

static void absent_rank(rank_env *env)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.deadline_ms = 700;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    model_fill(&m, 20);
    if (env->rank == 1) {
        lg_session_close(s, NULL);
        return; /* its communicator is freed by the harness: gone */
    }
    env->status = model_save(s, &m, 20, NULL, &env->err);
    lg_session_close(s, NULL);
}

ON_EVERY_ROOT(k06_a_rank_that_never_arrives_is_named_on_all_others)
{
    rank_env env[4];
    run_ranks(4, root->store, absent_rank, NULL, env);
    for (int r = 0; r < 4; r++) {
        if (r != 1) {
            assert_true(env[r].status == LG_ERR_TIMEOUT || env[r].status == LG_ERR_COMM);
            if (strstr(env[r].err.message, "rank 1") == NULL) {
                fail_msg("rank %d: %s", r, env[r].err.message);
            }
        }
    }
    assert_int_equal(resume_finds(root), UINT64_MAX);
}

static void one_rank_cannot_write(rank_env *env)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = env->comm;
    o.store = env->rank == 2 ? fault_store_handle(env->arg) : env->store;
    o.deadline_ms = 20000;
    lg_session *s;
    RANK_TRY(env, lg_session_open("root", &o, &s, &env->err));
    model m;
    model_init(&m, env->rank, env->world);
    model_fill(&m, 20);
    env->status = model_save(s, &m, 20, NULL, &env->err);
    RANK_CHECK(env, env->status == LG_ERR_NO_SPACE);
    RANK_CHECK(env, strstr(env->err.message, "rank 2") != NULL && strstr(env->err.message, "shard-00003") != NULL);
    RANK_CHECK(env, env->err.rank == 2);
    fault_store_disarm(env->arg);
    env->status = model_save(s, &m, 20, NULL, &env->err); /* space was made: it works */
    lg_session_close(s, NULL);
}

ON_EVERY_ROOT(k01_k06_a_full_disk_on_one_rank_is_reported_on_all_and_a_retry_works)
{
    fault_store *f = fault_store_new(root->store);
    fault_store_arm(f, (fault_plan){.kinds = FAULT_BIT(FAULT_WRITE), .times = UINT64_MAX, .os_errno = ENOSPC});
    rank_env env[4];
    run_ranks(4, root->store, one_rank_cannot_write, f, env);
    for (int r = 0; r < 4; r++) {
        if (env[r].status != LG_OK) {
            fail_msg("rank %d: %s", r, env[r].err.message);
        }
    }
    fault_store_free(f);
    assert_int_equal(resume_finds(root), 20);
}

/* ------------------------------------- sweep, retention and rollback cut off */

ON_EVERY_ROOT(k03_retention_killed_half_way_is_finished_by_the_next_session)
{
    for (uint64_t n = 1;; n++) {
        test_root fresh;
        root_make(&fresh, root->kind);
        fault_store *f = fault_store_new(fresh.store);
        model m;
        lg_error err = LG_ERROR_INIT;
        lg_session *s = must_resume(fault_store_handle(f), 1, &m);
        assert_int_equal(save_step(s, &m, 1, &err), LG_OK);
        fault_store_arm(f,
                        (fault_plan){.kinds = FAULT_CHANGES, .path = "step-000000000001", .nth = n, .how = FAULT_DIE});
        assert_int_equal(save_step(s, &m, 2, &err), LG_OK); /* retention's trouble is not the save's */
        bool died = fault_store_fired(f) > 0;
        lg_session_close(s, NULL);
        fault_store_free(f);
        run_spec again = run_of(1, STEPS(3));
        again.keep_last = 1;
        root_run(&fresh, &again);
        assert_int_equal(again.resumed_from, 2);
        char folders[8][64];
        assert_int_equal(root_folders(&fresh, folders, 8), 1);
        assert_int_equal(count_kind(fresh.store, LG__ROOT_TRASH), 0);
        root_drop(&fresh);
        if (!died) {
            assert_true(n > 4);
            break;
        }
    }
}

/* lg_sweep, lg_rollback and the like take a URI; roots without rename are not
 * reached by one, so these run on the other kinds. */
static void a_sweep_killed_half_way_is_finished_by_the_next(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    run_spec first = run_of(2, STEPS(1));
    root_run(&root, &first);
    char command[1024];
    snprintf(command, sizeof command,
             "cd '%s' && cp -r step-*1.g1.1 .trash-1.0123456789abcdef-step-000000000001.g1.1 && "
             "cp -r step-*1.g1.1 .step-000000000009.g1.5.0123456789abcdef.partial && "
             "rm .trash-*/lastgood.json .trash-*/shard-00001-model* .step*/rank-00001.sums",
             root.path);
    assert_int_equal(system(command), 0);
    lg_error err = LG_ERROR_INIT;
    /* the partial is of the highest epoch: not the sweep's business */
    assert_int_equal(lg_sweep(root.path, 0, NULL, NULL, &err), LG_OK);
    assert_int_equal(count_kind(root.store, LG__ROOT_TRASH), 0);
    assert_int_equal(count_kind(root.store, LG__ROOT_PARTIAL), 1);
    run_spec again = run_of(2, STEPS(2));
    root_run(&root, &again);
    assert_int_equal(again.resumed_from, 1);
    assert_int_equal(count_kind(root.store, LG__ROOT_PARTIAL), 0);
    root_drop(&root);
}

/* A process that dies right after it has renamed a checkpoint to trash leaves a
 * name that a cut of the power may take back. Whoever empties it makes it durable
 * before. */
static void k03_trash_has_its_name_for_good_before_it_is_emptied(void **state)
{
    (void)state;
    for (int kind = 0; kind < ROOT_NO_RENAME; kind++) {
        for (int by_session = 0; by_session < 2; by_session++) {
            test_root root;
            root_make(&root, kind);
            lg_error err = LG_ERROR_INIT;
            faulty x;
            faulty_begin(&x, &root, 1);
            assert_int_equal(save_step(x.s, &x.m, 1, &err), LG_OK);
            fault_store_arm(x.f, (fault_plan){.kinds = FAULT_BIT(FAULT_RENAME_DIR),
                                              .path = ".trash-",
                                              .how = FAULT_DIE_AFTER,
                                              .os_errno = EIO});
            assert_int_equal(save_step(x.s, &x.m, 2, &err), LG_OK);
            assert_int_equal(fault_store_fired(x.f) > 0, 1);
            faulty_end(&x);
            assert_int_equal(count_kind(root.store, LG__ROOT_TRASH), 1);

            fault_store *f = fault_store_new(root.store);
            if (by_session) {
                lg_session_close(must_resume(fault_store_handle(f), 1, &x.m), NULL);
            } else {
                assert_int_equal(lg__sweep_root(fault_store_handle(f), 1, false, NULL, NULL, &err), LG_OK);
            }
            size_t n, synced = 0;
            const fault_event *log = fault_store_log(f, &n);
            for (size_t i = 0; i < n; i++) {
                synced += log[i].op == FAULT_SYNC_DIR && log[i].path[0] == '\0';
                if (log[i].op == FAULT_REMOVE_FILE && strncmp(log[i].path, ".trash-", 7) == 0) {
                    assert_true(synced > 0);
                    synced += n; /* there was something to empty */
                }
            }
            assert_true(synced > n);
            fault_store_free(f);
            assert_int_equal(count_kind(root.store, LG__ROOT_TRASH), 0);
            assert_int_equal(resume_finds(&root), 2);
            root_drop(&root);
        }
    }
}

ON_ROOTS_WITH_RENAME(rollback_is_recorded_survives_a_kill_and_can_be_rolled_back)
{
    lg_error err = LG_ERROR_INIT;
    model m;
    lg_session *live = must_resume(root->store, 0, &m);
    for (uint64_t step = 100; step <= 900; step += 100) {
        assert_int_equal(save_step(live, &m, step, &err), LG_OK);
    }
    char where[300];
    snprintf(where, sizeof where, "%s@400", root->path);
    lg_generation record;
    if (lg_rollback(where, "loss went up at 450", &record, &err) != LG_OK) {
        fail_msg("%s", err.message);
    }
    /* the session that still runs finds out */
    assert_int_equal(save_step(live, &m, 1000, &err), LG_ERR_SUPERSEDED);
    lg_session_close(live, NULL);
    /* a kill before the next save: a session that resumed and died */
    assert_int_equal(resume_finds(root), 400);
    assert_int_equal(resume_finds(root), 400);
    run_spec s = run_of(1, STEPS(450));
    root_run(root, &s);
    assert_int_equal(s.resumed_from, 400);
    assert_int_equal(resume_finds(root), 450); /* beats the abandoned 900 */
    lg_listing *l;
    assert_int_equal(lg_list(root->path, 0, &l, &err), LG_OK);
    size_t discarded = 0;
    for (size_t i = 0; i < l->n; i++) {
        discarded += l->entries[i].discarded != 0;
        if (l->entries[i].kind == LG_ENTRY_ROLLBACK) {
            assert_string_equal(l->entries[i].note, "loss went up at 450");
            assert_int_equal(l->entries[i].target_step, 400);
        }
    }
    assert_int_equal(discarded, 5); /* 500 to 900 */
    lg_listing_free(l);
    /* nothing was deleted, so the rollback can be rolled back */
    snprintf(where, sizeof where, "%s@900", root->path);
    assert_int_equal(lg_rollback(where, NULL, NULL, &err), LG_OK);
    assert_int_equal(resume_finds(root), 900);
}

static void a_rollback_record_that_cannot_be_read_stops_resume(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    run_spec s = run_of(1, STEPS(1, 2, 3));
    root_run(&root, &s);
    lg_error err = LG_ERROR_INIT;
    char where[300];
    snprintf(where, sizeof where, "%s@1", root.path);
    lg_generation g;
    assert_int_equal(lg_rollback(where, "", &g, &err), LG_OK);
    char name[64];
    snprintf(name, sizeof name, "rollback-%llu.%llu.json", (unsigned long long)g.epoch, (unsigned long long)g.serial);
    root_flip(&root, "", name, 40);
    model m;
    model_init(&m, 0, 1);
    lg_session *session = open_on(root.store, 0, &err);
    assert_non_null(session);
    lg_resume_result *r = NULL;
    assert_int_equal(lg_resume(session, NULL, model_targets, &m, &r, &err), LG_ERR_CORRUPT);
    assert_non_null(strstr(err.message, name));
    lg_session_close(session, NULL);
    assert_int_equal(lg_rollback(where, "", &g, &err), LG_OK); /* a new record helps */
    assert_int_equal(resume_finds(&root), 1);
    /* A whole record under the name of a later one. */
    char command[700];
    snprintf(command, sizeof command, "cd '%s' && cp rollback-%llu.%llu.json rollback-%llu.9.json", root.path,
             (unsigned long long)g.epoch, (unsigned long long)g.serial, (unsigned long long)g.epoch + 9);
    assert_int_equal(system(command), 0);
    session = open_on(root.store, 0, &err);
    assert_non_null(session);
    assert_int_equal(lg_resume(session, NULL, model_targets, &m, &r, &err), LG_ERR_FORMAT);
    assert_non_null(strstr(err.message, "it is the record of another generation"));
    lg_session_close(session, NULL);
    root_drop(&root);
}

/* -------------------------------------------------------- swapped and foreign */

static void shell(test_root *root, const char *script)
{
    char command[2048];
    snprintf(command, sizeof command, "cd '%s' && { %s; }", root->path, script);
    if (system(command) != 0) {
        fail_msg("failed: %s", command);
    }
}

static void k01_sums_and_shards_swapped_between_ranks_and_steps_are_found(void **state)
{
    (void)state;
    static const char *const swaps[] = {
        "cp \"$new\"/rank-00001.sums x; cp \"$new\"/rank-00002.sums \"$new\"/rank-00001.sums; cp x "
        "\"$new\"/rank-00002.sums; rm x",
        "cp \"$old\"/rank-00002.sums \"$new\"/rank-00002.sums",
        "cp \"$old\"/shard-00001-model-00001-of-00001.safetensors \"$new\"/",
        "cp \"$old\"/shard-00002-optim-00001-of-00002.safetensors \"$new\"/",
        "cp \"$old\"/lastgood.json \"$new\"/",
        "cp \"$old\"/rank-*.sums \"$new\"/; cp \"$old\"/shard-* \"$new\"/",
        "cp \"$new\"/shard-00001-model-00001-of-00001.safetensors "
        "\"$new\"/shard-00002-model-00001-of-00001.safetensors",
    };
    for (size_t i = 0; i < sizeof swaps / sizeof *swaps; i++) {
        test_root root;
        root_make(&root, ROOT_POSIX);
        run_spec s = run_of(2, STEPS(11, 12));
        root_run(&root, &s);
        char script[1024];
        snprintf(script, sizeof script, "old=$(ls -d step-*11.*); new=$(ls -d step-*12.*); %s", swaps[i]);
        shell(&root, script);
        uint64_t found = resume_finds(&root); /* values are checked against the step */
        print_message("#   %s -> %llu\n", swaps[i], (unsigned long long)found);
        assert_int_equal(found, 11);
        root_drop(&root);
    }
}

static lg_status put_old_report(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)f;
    (void)err;
    if (before && event->op == FAULT_OPEN && strstr(event->path, "rank-00001.sums") != NULL) {
        shell(arg, "cp old.sums $(ls -d .step-*.partial step-*6.* 2>/dev/null | head -n 1)/rank-00001.sums");
    }
    return LG_OK;
}

static void k05_a_report_of_another_attempt_is_refused(void **state)
{
    (void)state;
    static const int kinds[] = {ROOT_POSIX, ROOT_NO_RENAME};
    for (size_t i = 0; i < 2; i++) {
        test_root root;
        root_make(&root, kinds[i]);
        lg_error err = LG_ERROR_INIT;
        faulty x;
        faulty_begin(&x, &root, 0);
        assert_int_equal(save_step(x.s, &x.m, 5, &err), LG_OK);
        shell(&root, "cp step-*5.g1.1/rank-00001.sums old.sums");
        /* Just before the coordinator reads the report, the earlier attempt's
         * file of the same length is put in its place. */
        fault_store_set_hook(x.f, put_old_report, &root);
        assert_int_equal(save_step(x.s, &x.m, 6, &err), LG_ERR_CORRUPT);
        assert_non_null(strstr(err.message, "rank-00001.sums"));
        fault_store_set_hook(x.f, NULL, NULL);
        assert_int_equal(save_step(x.s, &x.m, 7, &err), LG_OK);
        faulty_end(&x);
        assert_int_equal(resume_finds(&root), 7);
        root_drop(&root);
    }
}

/* Flips a byte of the other rank's report before the coordinator reads it. */
typedef struct flip {
    const test_root *root;
    uint64_t at; /* counted from the report's start */
    bool done;
    bool over; /* it has no such byte */
} flip;

static lg_status flip_report(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)f;
    (void)err;
    flip *x = arg;
    if (!x->done && before && event->op == FAULT_OPEN && strstr(event->path, "rank-00002.sums") != NULL) {
        x->done = true;
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", x->root->path, event->path);
        FILE *file = fopen(path, "r+b");
        unsigned char head[64], byte;
        assert_non_null(file);
        assert_int_equal(fread(head, 1, sizeof head, file), sizeof head);
        const uint64_t at = lg__get_u64le(head + 24) + x->at;
        x->over = fseek(file, (long)at, SEEK_SET) != 0 || fread(&byte, 1, 1, file) != 1;
        if (!x->over) {
            byte = (unsigned char)(byte ^ 1u << (x->at % 8));
            assert_int_equal(fseek(file, (long)at, SEEK_SET), 0);
            assert_int_equal(fwrite(&byte, 1, 1, file), 1);
        }
        assert_int_equal(fclose(file), 0);
    }
    return LG_OK;
}

static void save_until_no_byte_is_left(rank_env *env)
{
    flip *x = env->arg;
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.deadline_ms = 20000;
    RANK_TRY(env, open_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    uint64_t refused = 0;
    for (;; refused++) {
        if (env->rank == 0) {
            x->at = 7 * refused;
            x->done = false;
        }
        model_fill(&m, refused);
        lg_status st = model_save(s, &m, refused, NULL, &env->err);
        RANK_CHECK(env, env->rank != 0 || (st == LG_OK) == x->over);
        if (st == LG_OK) {
            break;
        }
        RANK_CHECK(env, strstr(env->err.message, "rank-00002.sums") != NULL);
    }
    lg_session_close(s, NULL);
    RANK_CHECK(env, refused > 50);
}

static void k05_a_report_that_changed_in_any_byte_before_it_is_collected_is_refused(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    fault_store *f = fault_store_new(root.store);
    flip x = {.root = &root};
    fault_store_set_hook(f, flip_report, &x);
    run_all(2, fault_store_handle(f), save_until_no_byte_is_left, &x);
    fault_store_free(f);
    print_message("# %llu bytes of a report\n", (unsigned long long)x.at);
    root_drop(&root);
}

/* A disk that is full is not made fuller. */
ON_EVERY_ROOT(k01_a_save_that_failed_leaves_no_shard_behind)
{
    lg_error err = LG_ERROR_INIT;
    faulty x;
    faulty_begin(&x, root, 0);
    assert_int_equal(save_step(x.s, &x.m, 1, &err), LG_OK);
    fault_store_arm(x.f, (fault_plan){.kinds = FAULT_BIT(FAULT_WRITE), .path = "optim", .os_errno = ENOSPC});
    assert_int_equal(save_step(x.s, &x.m, 2, &err), LG_ERR_NO_SPACE);
    assert_int_equal(count_kind(root->store, LG__ROOT_PARTIAL), 0);
    assert_int_equal(count_kind(root->store, LG__ROOT_TRASH), 0);
    if (root->kind != ROOT_MEMORY) {
        shell(root, "! ls -d step-*2.*/shard-* .step*/shard-* 2>/dev/null | grep .");
    }
    faulty_end(&x);
}

static void a_root_copied_without_its_dot_files_moved_or_beside_strange_files_works(void **state)
{
    (void)state;
    test_root root, copy;
    root_make(&root, ROOT_POSIX);
    root_make(&copy, ROOT_POSIX);
    run_spec s = run_of(2, STEPS(1, 2));
    root_run(&root, &s);
    char script[1024];
    snprintf(script, sizeof script, "cp -r step-* '%s'/", copy.path);
    shell(&root, script);
    shell(&copy,
          "mkdir checkpoint-99 step-5 step-000000000777 lost+found; touch latest notes.txt step-000000000500.g9.9x; "
          "ln -s step-000000000001.g1.1 step-000000000888.g8.8; ln -s . loop; mkfifo step-000000000999.g9.9; "
          "touch .owner-x .DS_Store; mkdir 'a[1]b'");
    run_spec again = run_of(3, STEPS(3));
    root_run(&copy, &again);
    assert_int_equal(again.resumed_from, 2);
    assert_int_equal(resume_finds(&copy), 3);
    /* generations go on above the highest one there, although .owner files were lost */
    char folders[8][64];
    size_t n = root_folders(&copy, folders, 8);
    assert_int_equal(n, 3);
    assert_non_null(strstr(folders[2], "step-000000000003.g2."));
    /* foreign names are untouched */
    shell(
        &copy,
        "test -d checkpoint-99 && test -d step-5 && test -p step-000000000999.g9.9 && test -L loop && test -f latest");
    root_drop(&root);
    root_drop(&copy);
}

static void a_read_only_root_resumes_read_only_and_says_so_when_writing(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    run_spec s = run_of(1, STEPS(4));
    root_run(&root, &s);
    fault_store *f = fault_store_new(root.store);
    fault_store_arm(f, (fault_plan){.kinds = FAULT_CHANGES, .times = UINT64_MAX, .os_errno = EROFS});
    lg_error err = LG_ERROR_INIT;
    assert_null(open_on(fault_store_handle(f), 0, &err));
    assert_int_equal(err.status, LG_ERR_READ_ONLY);
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = fault_store_handle(f);
    o.flags = LG_SESSION_READ_ONLY;
    lg_session *session;
    assert_int_equal(lg_session_open("root", &o, &session, &err), LG_OK);
    model m;
    model_init(&m, 0, 1);
    lg_resume_result *r;
    assert_int_equal(lg_resume(session, NULL, model_targets, &m, &r, &err), LG_OK);
    assert_null(model_wrong(&m, 4));
    lg_resume_result_free(r);
    lg_save *save;
    assert_int_equal(lg_save_begin(session, 5, NULL, &save, &err), LG_ERR_STATE);
    lg_session_close(session, NULL);
    fault_store_free(f);
    root_drop(&root);
}

static void rewrite_manifest(test_root *root, const char *folder, const char *find, const char *put)
{
    char path[512];
    lg_error err = LG_ERROR_INIT;
    lg__path_join(path, sizeof path, folder, "lastgood.json");
    lg__buf text, body, sealed;
    lg__buf_init(&text, 1 << 24);
    lg__buf_init(&body, 1 << 24);
    lg__buf_init(&sealed, 1 << 24);
    assert_int_equal(lg__store_read_all(root->inner, path, &text, &err), LG_OK);
    char *at = strstr(text.data, find);
    assert_non_null(at);
    const size_t prefix = strlen("{\"crc32c\":\"01234567\",");
    lg__buf_add(&body, text.data + prefix, (size_t)(at - text.data) - prefix);
    lg__buf_str(&body, put);
    lg__buf_str(&body, at + strlen(find));
    body.len -= body.data[body.len - 1] == '\n';
    assert_int_equal(lg__sealed_json(body.data, body.len, &sealed, &err), LG_OK);
    assert_int_equal(lg__store_remove_file(root->inner, path, &err), LG_OK);
    assert_int_equal(lg__store_put_new(root->inner, path, sealed.data, sealed.len, &err), LG_OK);
    lg__buf_free(&text);
    lg__buf_free(&body);
    lg__buf_free(&sealed);
}

/* A disk that a dead session's attempt fills: the claim makes room. */
static lg_status no_space_until_swept(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)arg;
    if (before && event->op == FAULT_PUT_NEW && strstr(event->path, ".owner-") != NULL) {
        bool full = false;
        lg_error ignored = LG_ERROR_INIT;
        lg__walk *w;
        if (lg__walk_read(fault_store_inner(f), &w, &ignored) == LG_OK) {
            for (size_t i = 0; i < w->n_others; i++) {
                full =
                    full || w->others[i].parsed.kind == LG__ROOT_PARTIAL || w->others[i].parsed.kind == LG__ROOT_TRASH;
            }
            lg__walk_free(w);
        }
        if (full) {
            return lg_error_set_errno(err, ENOSPC, "write %s", event->path);
        }
    }
    return LG_OK;
}

ON_ROOTS_WITH_RENAME(k01_a_disk_filled_by_a_dead_sessions_attempt_is_freed_by_the_next_session)
{
    fault_store *f = fault_store_new(root->store);
    model m;
    lg_error err = LG_ERROR_INIT;
    lg_session *s = must_resume(fault_store_handle(f), 0, &m);
    assert_int_equal(save_step(s, &m, 1, &err), LG_OK);
    fault_store_arm(f, (fault_plan){.kinds = FAULT_BIT(FAULT_CREATE), .path = "lastgood.json", .how = FAULT_DIE});
    assert_int_not_equal(save_step(s, &m, 2, &err), LG_OK);
    lg_session_close(s, NULL);
    fault_store_free(f);
    assert_int_equal(count_kind(root->store, LG__ROOT_PARTIAL), 1);
    fault_store *g = fault_store_new(root->store);
    fault_store_set_hook(g, no_space_until_swept, NULL);
    s = must_resume(fault_store_handle(g), 0, &m);
    assert_int_equal(m.step, 1);
    assert_int_equal(count_kind(root->store, LG__ROOT_PARTIAL), 0);
    assert_int_equal(save_step(s, &m, 2, &err), LG_OK);
    lg_session_close(s, NULL);
    fault_store_free(g);
}

ON_EVERY_ROOT(k22_a_manifest_of_a_newer_version_stops_resume_and_all_removal)
{
    run_spec s = run_of(1, STEPS(1, 2));
    root_run(root, &s);
    char folders[8][64];
    root_folders(root, folders, 8);
    rewrite_manifest(root, folders[1], "\"version\":[1,0]", "\"version\":[2,0]");
    lg_error err = LG_ERROR_INIT;
    lg_session *session = open_on(root->store, 1, &err);
    if (session == NULL) {
        fail_msg("%s", err.message);
    }
    model m;
    model_init(&m, 0, 1);
    lg_resume_result *r = NULL;
    assert_int_equal(lg_resume(session, NULL, model_targets, &m, &r, &err), LG_ERR_VERSION);
    assert_non_null(strstr(err.message, folders[1]));
    lg_checkpoint *c;
    assert_int_equal(lg_checkpoint_open(root->path, &c, &err), LG_ERR_VERSION); /* no older one in its place */
    lg_resume_options ro = LG_RESUME_OPTIONS_INIT;
    uint64_t step = 1;
    ro.step = &step; /* a person may choose */
    assert_int_equal(lg_resume(session, &ro, model_targets, &m, &r, &err), LG_OK);
    lg_resume_result_free(r);
    assert_int_equal(save_step(session, &m, 3, &err), LG_OK);
    lg_session_close(session, NULL);
    assert_int_equal(root_folders(root, folders, 8), 3); /* keep_last 1, yet nothing went */
}

ON_EVERY_ROOT(two_manifests_of_one_generation_are_an_error_that_names_both)
{
    run_spec s = run_of(1, STEPS(1, 2));
    root_run(root, &s);
    char folders[8][64];
    root_folders(root, folders, 8);
    rewrite_manifest(root, folders[1], "\"generation\":[1,2]", "\"generation\":[1,1]");
    lg_error err = LG_ERROR_INIT;
    lg_session *session = open_on(root->store, 0, &err);
    if (session == NULL) {
        fail_msg("%s", err.message);
    }
    model m;
    model_init(&m, 0, 1);
    lg_resume_result *r = NULL;
    assert_int_equal(lg_resume(session, NULL, model_targets, &m, &r, &err), LG_ERR_CONFLICT);
    assert_non_null(strstr(err.message, folders[0]));
    assert_non_null(strstr(err.message, folders[1]));
    lg_session_close(session, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k01_a_crash_at_any_operation_loses_nothing_that_was_committed),
        cmocka_unit_test(k01_an_operation_that_fails_fails_the_save_and_the_next_save_works),
        cmocka_unit_test(a_rename_or_create_that_reports_failure_after_success_is_a_success),
        cmocka_unit_test(a_failed_last_sync_is_not_durable_and_stops_removal),
        cmocka_unit_test(k06_the_coordinator_dying_between_rename_and_answer_leaves_a_committed_checkpoint),
        cmocka_unit_test(k06_a_rank_that_never_arrives_is_named_on_all_others),
        cmocka_unit_test(k01_k06_a_full_disk_on_one_rank_is_reported_on_all_and_a_retry_works),
        cmocka_unit_test(k03_retention_killed_half_way_is_finished_by_the_next_session),
        cmocka_unit_test(a_sweep_killed_half_way_is_finished_by_the_next),
        cmocka_unit_test(k03_trash_has_its_name_for_good_before_it_is_emptied),
        cmocka_unit_test(rollback_is_recorded_survives_a_kill_and_can_be_rolled_back),
        cmocka_unit_test(a_rollback_record_that_cannot_be_read_stops_resume),
        cmocka_unit_test(k01_sums_and_shards_swapped_between_ranks_and_steps_are_found),
        cmocka_unit_test(k05_a_report_of_another_attempt_is_refused),
        cmocka_unit_test(k05_a_report_that_changed_in_any_byte_before_it_is_collected_is_refused),
        cmocka_unit_test(k01_a_save_that_failed_leaves_no_shard_behind),
        cmocka_unit_test(a_root_copied_without_its_dot_files_moved_or_beside_strange_files_works),
        cmocka_unit_test(a_read_only_root_resumes_read_only_and_says_so_when_writing),
        cmocka_unit_test(k01_a_disk_filled_by_a_dead_sessions_attempt_is_freed_by_the_next_session),
        cmocka_unit_test(k22_a_manifest_of_a_newer_version_stops_resume_and_all_removal),
        cmocka_unit_test(two_manifests_of_one_generation_are_an_error_that_names_both),
    };
    return cmocka_run_group_tests_name("scenes", tests, NULL, NULL);
}
