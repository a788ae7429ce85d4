/* SPDX-License-Identifier: Apache-2.0 */

/* Saves in the background: what is saved is what was there at the launch, the
 * trainer gets its memory back, errors reach all ranks, nothing is lost. */

#include "support/environment.h"
#include "support/fault_store.h"
#include "support/pairs.h"
#include "support/ranks.h"
#include "support/temp_dir.h"

#include "base/mem.h"
#include "base/thread.h"
#include "core/background.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#ifdef __SANITIZE_THREAD__
/* Children of fork inherit the record of the parent's threads. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "report_thread_leaks=0"; }
#endif

/* ---------------------------------------------------------- what is saved */

static void change_after_launch_and_fence(rank_env *env)
{
    lg_session *s;
    RANK_TRY(env, open_session(env, (lg_session_options)LG_SESSION_OPTIONS_INIT, &s));
    for (uint64_t step = 1; step <= 8; step++) {
        model m;
        model_init(&m, env->rank, env->world);
        m.lazy = step % 2 == 0;
        m.stats_differ = step > 6;
        model_fill(&m, step);
        lg_launch_info info;
        RANK_TRY(env, model_launch(s, &m, step, NULL, &info, &env->err));
        RANK_CHECK(env, info.step == step && info.skipped == LG_SKIP_NONE && !info.windowed);
        RANK_CHECK(env, (info.bytes_lazy > info.bytes_staged) == m.lazy);
        m.count = 999; /* eager in both cases */
        memset(m.stats, 0xee, sizeof m.stats);
        if (!m.lazy) {
            memset(&m, 0xee, sizeof m);
        }
        RANK_TRY(env, lg_session_fence(s, 60000, &env->err));
        int staged = 0;
        RANK_TRY(env, lg_session_staged(s, &staged, &env->err));
        RANK_CHECK(env, staged == 1);
        memset(&m, 0xdd, sizeof m);
        if (step % 3 == 0) {
            lg_save_info done;
            RANK_TRY(env, lg_session_wait(s, 60000, &done, &env->err));
            RANK_CHECK(env, done.step == step && done.bytes_total >= done.bytes_written && done.bytes_written > 0);
        }
    }
    lg_session_status status;
    RANK_TRY(env, lg_session_wait(s, 60000, NULL, &env->err));
    RANK_TRY(env, lg_session_get_status(s, &status, &env->err));
    RANK_CHECK(env, status.saves_committed == 8 && status.saves_failed == 0 && status.phase == LG_PHASE_COMMITTED &&
                        status.phase_step == 8 && status.staging_bytes > 0);
    RANK_TRY(env, lg_session_close(s, &env->err));
}

ON_EVERY_ROOT(k04_f056_what_was_there_at_the_launch_is_what_is_saved)
{
    static const uint32_t worlds[] = {1, 3, 2, 5};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        test_root fresh;
        root_make(&fresh, root->kind);
        run_all(worlds[i], fresh.store, change_after_launch_and_fence, NULL);
        assert_int_equal(newest(fresh.store), 8);
        char folders[16][64];
        assert_int_equal(root_folders(&fresh, folders, 16), 8);
        root_drop(&fresh);
    }
}

/* ------------------------------------------------------ a store that stalls */

/* Holds back writes to files whose path contains `path` until let go. */
typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    const char *path;
    bool shut;
    uint32_t waiting;
} gate;

static lg_status at_gate(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    (void)f, (void)err;
    gate *g = arg;
    if (!before || e->op != FAULT_WRITE || strstr(e->path, g->path) == NULL) {
        return LG_OK;
    }
    pthread_mutex_lock(&g->lock);
    g->waiting++;
    pthread_cond_broadcast(&g->changed);
    while (g->shut) {
        pthread_cond_wait(&g->changed, &g->lock);
    }
    pthread_mutex_unlock(&g->lock);
    return LG_OK;
}

static gate *gate_new(fault_store *f, const char *path)
{
    gate *g = calloc(1, sizeof *g);
    assert_non_null(g);
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->changed, NULL);
    g->path = path;
    fault_store_set_hook(f, at_gate, g);
    return g;
}

static void gate_set(gate *g, bool shut)
{
    pthread_mutex_lock(&g->lock);
    g->shut = shut;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static void train_while_the_disk_stalls(rank_env *env)
{
    gate *g = env->arg;
    lg_session *s;
    RANK_TRY(env, open_session(env, (lg_session_options)LG_SESSION_OPTIONS_INIT, &s));
    model m;
    model_init(&m, env->rank, env->world);
    m.lazy = true;
    model_fill(&m, 1);
    if (env->rank == 0) {
        gate_set(g, true);
    }
    RANK_TRY(env, model_launch(s, &m, 1, NULL, NULL, &env->err));
    RANK_TRY(env, lg_session_fence(s, 60000, &env->err)); /* needs no disk */
    model_fill(&m, 2);
    lg_save_info info;
    lg_error late = LG_ERROR_INIT;
    RANK_CHECK(env, lg_session_wait(s, 50, &info, &late) == LG_ERR_TIMEOUT);
    RANK_CHECK(env, strstr(late.message, "step 1") != NULL);
    lg_session_status status;
    RANK_TRY(env, lg_session_get_status(s, &status, &env->err));
    RANK_CHECK(env, status.saves_committed == 0 && status.phase != LG_PHASE_COMMITTED);
    /* policy skip: all ranks alike */
    lg_launch_options o = LG_LAUNCH_OPTIONS_INIT;
    o.flags = LG_LAUNCH_SKIP;
    o.max_skips = 2;
    for (uint32_t k = 1; k <= 2; k++) {
        lg_launch_info li;
        RANK_TRY(env, model_launch(s, &m, 2, &o, &li, &env->err));
        RANK_CHECK(env, li.skipped == LG_SKIP_IN_FLIGHT);
        RANK_TRY(env, lg_session_get_status(s, &status, &env->err));
        RANK_CHECK(env, status.skips_in_a_row == k && status.saves_skipped == k);
    }
    if (env->rank == 0) {
        gate_set(g, false);
    }
    /* and the next one is not skipped for ever (F071): it waits */
    lg_launch_info li;
    RANK_TRY(env, model_launch(s, &m, 2, &o, &li, &env->err));
    RANK_CHECK(env, li.skipped == LG_SKIP_NONE);
    RANK_TRY(env, lg_session_get_status(s, &status, &env->err));
    RANK_CHECK(env, status.skips_in_a_row == 0 && status.saves_committed == 1);
    RANK_TRY(env, lg_session_close(s, &env->err)); /* drains */
}

ON_EVERY_ROOT(k04_f062_f071_a_stalled_disk_holds_neither_the_trainer_nor_later_saves_for_ever)
{
    for (uint32_t world = 1; world <= 3; world += 2) {
        test_root fresh;
        root_make(&fresh, root->kind);
        fault_store *f = fault_store_new(fresh.store);
        gate *g = gate_new(f, "shard-00001");
        run_all(world, fault_store_handle(f), train_while_the_disk_stalls, g);
        fault_store_free(f);
        free(g);
        assert_int_equal(newest(fresh.store), 2);
        root_drop(&fresh);
    }
}

/* Two saves one behind the other use the same memory: the second must not
 * overwrite what the first still writes. */
static void back_to_back(rank_env *env)
{
    lg_session *s;
    RANK_TRY(env, open_session(env, (lg_session_options)LG_SESSION_OPTIONS_INIT, &s));
    model m;
    model_init(&m, env->rank, env->world);
    size_t pages = 0;
    for (uint64_t step = 1; step <= 100; step++) {
        m.lazy = step % 2 == 0;
        model_fill(&m, step);
        RANK_TRY(env, model_launch(s, &m, step, NULL, NULL, &env->err));
        RANK_TRY(env, lg_session_fence(s, 60000, &env->err));
        lg_session_status status;
        RANK_TRY(env, lg_session_get_status(s, &status, &env->err));
        pages = step == 1 ? status.staging_bytes : pages;
        RANK_CHECK(env, status.staging_bytes == pages);
    }
    RANK_TRY(env, lg_session_close(s, &env->err));
}

static void k04_f058_k07_f118_a_hundred_saves_back_to_back_share_one_pool_that_does_not_grow(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    run_all(2, root.store, back_to_back, NULL);
    for (uint64_t step = 1; step <= 100; step++) {
        lg_session *s = open_to_read(root.store);
        lg_error err = LG_ERROR_INIT;
        model m;
        model_init(&m, 0, 1);
        lg_resume_options ro = LG_RESUME_OPTIONS_INIT;
        ro.step = &step;
        lg_resume_result *r;
        assert_int_equal(lg_resume(s, &ro, model_targets, &m, &r, &err), LG_OK);
        assert_null(model_wrong(&m, step));
        lg_resume_result_free(r);
        lg_session_close(s, NULL);
    }
    root_drop(&root);
}

/* ------------------------------------------------------------------ errors */

typedef struct failing {
    fault_store *f;
    fault_plan plan;
    lg_status want;
    const char *says;
    bool by_wait; /* told by lg_session_wait, else by the next launch */
    lg_error told[RANKS_MAX];
} failing;

static void fail_once(rank_env *env)
{
    failing *c = env->arg;
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.deadline_ms = 20000;
    RANK_TRY(env, open_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    m.lazy = true;
    model_fill(&m, 1);
    RANK_TRY(env, model_save(s, &m, 1, NULL, &env->err));
    if (env->rank == 0) {
        fault_store_arm(c->f, c->plan);
    }
    model_fill(&m, 2);
    RANK_TRY(env, model_launch(s, &m, 2, NULL, NULL, &env->err));
    RANK_TRY(env, lg_session_fence(s, 20000, &env->err));
    model_fill(&m, 3);
    lg_error *told = &c->told[env->rank];
    lg_status st = c->by_wait ? lg_session_wait(s, 20000, NULL, told) : model_launch(s, &m, 3, NULL, NULL, told);
    if (st != c->want && env->rank == 0) {
        print_message("# got %s: %s\n", lg_status_name(st), st != LG_OK ? told->message : "");
    }
    RANK_CHECK(env, st == c->want);
    RANK_CHECK(env, strstr(told->message, "save step 2 in the background") != NULL);
    RANK_CHECK(env, strstr(told->message, c->says) != NULL);
    lg_session_status status;
    RANK_TRY(env, lg_session_get_status(s, &status, &env->err));
    RANK_CHECK(env, status.saves_failed == 1 && status.phase == LG_PHASE_FAILED && status.phase_step == 2);
    /* told once; the same can be tried again */
    RANK_TRY(env, model_launch(s, &m, 3, NULL, NULL, &env->err));
    lg_save_info info;
    RANK_TRY(env, lg_session_wait(s, 20000, &info, &env->err));
    RANK_CHECK(env, info.step == 3);
    RANK_TRY(env, lg_session_close(s, &env->err));
}

ON_EVERY_ROOT(k04_f065_k06_an_error_in_the_background_is_told_by_the_next_call_on_every_rank)
{
    static const struct {
        uint32_t kinds;
        const char *path;
        int os_errno;
        lg_status want;
        const char *says;
    } cases[] = {
        {FAULT_BIT(FAULT_WRITE), "shard-00002-model", ENOSPC, LG_ERR_NO_SPACE, "shard-00002-model"},
        {FAULT_BIT(FAULT_SYNC), "shard-00003-optim", EIO, LG_ERR_IO, "rank 2"},
        {FAULT_BIT(FAULT_CREATE), "shard-00001-model", EDQUOT, LG_ERR_NO_SPACE, "shard-00001-model"},
        {FAULT_BIT(FAULT_WRITE), "rank-00003.sums", EIO, LG_ERR_IO, "rank-00003.sums"},
        {FAULT_BIT(FAULT_CREATE) | FAULT_BIT(FAULT_PUT_NEW), "lastgood.json", EROFS, LG_ERR_READ_ONLY, "lastgood.json"},
        {FAULT_BIT(FAULT_CREATE), "config.json", EIO, LG_ERR_IO, "config.json"},
    };
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        test_root fresh;
        root_make(&fresh, root->kind);
        failing c = {
            .f = fault_store_new(fresh.store),
            .plan = {.kinds = cases[i / 2].kinds, .path = cases[i / 2].path, .os_errno = cases[i / 2].os_errno},
            .want = cases[i / 2].want,
            .says = cases[i / 2].says,
            .by_wait = i % 2 == 1};
        run_all(3, fault_store_handle(c.f), fail_once, &c);
        for (uint32_t r = 1; r < 3; r++) {
            assert_int_equal(c.told[r].rank, c.told[0].rank);
            assert_string_equal(c.told[r].message, c.told[0].message);
        }
        fault_store_free(c.f);
        assert_int_equal(newest(fresh.store), 3);
        char folders[8][64];
        assert_int_equal(root_folders(&fresh, folders, 8), 2);
        root_drop(&fresh);
    }
}

static void stall_one_rank(rank_env *env)
{
    gate *g = env->arg;
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.deadline_ms = 600;
    RANK_TRY(env, open_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    model_fill(&m, 1);
    RANK_TRY(env, model_save(s, &m, 1, NULL, &env->err));
    if (env->rank == 0) {
        gate_set(g, true);
    }
    RANK_TRY(env, model_launch(s, &m, 2, NULL, NULL, &env->err));
    lg_error late = LG_ERROR_INIT;
    lg_status st = env->rank == 1 ? lg_session_close(s, &late) : LG_OK;
    if (env->rank == 1) {
        RANK_CHECK(env, st == LG_ERR_TIMEOUT);
        RANK_CHECK(env, strstr(late.message, "may be lost") != NULL && strstr(late.message, "writing") != NULL);
        return;
    }
    st = lg_session_close(s, &late);
    RANK_CHECK(env, st == LG_ERR_TIMEOUT);
    RANK_CHECK(env, env->rank != 0 || strstr(late.message, "rank 1 had not written its part") != NULL ||
                        strstr(late.message, "waiting for other ranks") != NULL);
}

/* F092, F104: a store that never answers. */
static void k06_f092_a_rank_that_hangs_in_its_store_is_named_by_the_others_and_closing_returns(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    fault_store *f = fault_store_new(root.store);
    gate *g = gate_new(f, "shard-00002");
    run_all(3, fault_store_handle(f), stall_one_rank, g);
    assert_int_equal(newest(root.store), 1);
    gate_set(g, false);
    while (lg__background_left > 0) { /* what was left behind ends by itself */
        lg__pause(0);
    }
    fault_store_free(f);
    free(g);
    root_drop(&root);
}

/* All but the one whose store hangs give up at the deadline by themselves: rank 0
 * that waits for its part, and those that wait for rank 0. */
static void k06_f104_what_waits_in_the_background_for_a_rank_that_hangs_ends_at_the_deadline(void **state)
{
    (void)state;
    static const char *const paths[] = {"shard-00002", "lastgood.json"};
    for (size_t i = 0; i < 2; i++) {
        test_root root;
        root_make(&root, ROOT_POSIX);
        fault_store *f = fault_store_new(root.store);
        gate *g = gate_new(f, paths[i]);
        rank_env env[3];
        run_ranks(3, fault_store_handle(f), stall_one_rank, g, env);
        const uint64_t began = lg__now_ms();
        while (lg__background_left > 1 && lg__now_ms() - began < 20000) {
            lg__pause(0);
        }
        assert_int_equal(lg__background_left, 1);
        gate_set(g, false);
        while (lg__background_left > 0) {
            lg__pause(0);
        }
        fault_store_free(f);
        free(g);
        root_drop(&root);
    }
}

/* ---------------------------------------------------------------- crashes */

static void die_in_the_background(rank_env *env)
{
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.keep_last = 1;
    o.deadline_ms = 4000;
    env->status = open_session(env, o, &s);
    RANK_CHECK(env, env->status == LG_OK);
    model m;
    model_init(&m, env->rank, env->world);
    m.lazy = true;
    model_fill(&m, 1);
    lg_error ignored = LG_ERROR_INIT;
    lg_status st = model_save(s, &m, 1, NULL, &ignored);
    model_fill(&m, 2);
    st = st == LG_OK ? model_launch(s, &m, 2, NULL, NULL, &ignored) : st;
    if (st == LG_OK) {
        (void)lg_session_fence(s, 10000, &ignored);
    }
    (void)lg_session_close(s, &ignored);
}

ON_EVERY_ROOT(k01_a_crash_at_any_operation_of_a_background_save_loses_nothing_that_was_committed)
{
    static const fault_how hows[] = {FAULT_DIE, FAULT_DIE_AFTER, FAULT_DIE_TORN};
    for (size_t h = 0; h < sizeof hows / sizeof *hows; h++) {
        uint64_t old = 0, new = 0, first = 0;
        for (uint64_t n = 1;; n++) {
            test_root fresh;
            root_make(&fresh, root->kind);
            fault_store *f = fault_store_new(fresh.store);
            fault_store_arm(f, (fault_plan){.kinds = FAULT_CHANGES, .nth = first + n, .how = hows[h]});
            run_ranks(1, fault_store_handle(f), die_in_the_background, NULL, &(rank_env){0});
            bool fired = fault_store_fired(f) > 0;
            fault_store_free(f);
            run_spec again = {.world = 2};
            root_run(&fresh, &again);
            uint64_t found = again.resumed_from;
            root_drop(&fresh);
            if (found == UINT64_MAX) { /* before the first one was there */
                assert_int_equal(old + new, 0);
                first += n - 0;
                n = 0;
                continue;
            }
            assert_true(found == 1 || found == 2);
            assert_true(new == 0 || found == 2);
            old += found == 1;
            new += found == 2;
            if (!fired) {
                assert_int_equal(found, 2);
                break;
            }
        }
        print_message("# %llu crash points kept the old step, %llu the new one\n", (unsigned long long)old,
                      (unsigned long long)new);
        assert_true(old > 10 && new > 1);
    }
}

static void be_superseded(rank_env *env)
{
    test_root *root = env->arg;
    lg_session *s;
    RANK_TRY(env, open_session(env, (lg_session_options)LG_SESSION_OPTIONS_INIT, &s));
    model m;
    model_init(&m, env->rank, env->world);
    model_fill(&m, 1);
    RANK_TRY(env, model_save(s, &m, 1, NULL, &env->err));
    (void)root;
    model_fill(&m, 2);
    RANK_TRY(env, model_launch(s, &m, 2, NULL, NULL, &env->err));
    lg_error told = LG_ERROR_INIT;
    lg_status st = lg_session_wait(s, 60000, NULL, &told);
    if (st != LG_ERR_SUPERSEDED) {
        print_message("# got %s: %s\n", lg_status_name(st), st != LG_OK ? told.message : "");
    }
    RANK_CHECK(env, st == LG_ERR_SUPERSEDED);
    lg_error again = LG_ERROR_INIT;
    RANK_CHECK(env, model_launch(s, &m, 3, NULL, NULL, &again) == LG_ERR_SUPERSEDED);
    RANK_TRY(env, lg_session_close(s, &env->err));
}

typedef struct takeover {
    test_root *root;
    fault_op when; /* on rank 2's sums file */
    atomic_int done;
} takeover;

/* Another session takes over when rank 2 is about to make its sums file, or
 * when the coordinator, who has seen its name, is about to read it. */
static lg_status take_over(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    (void)f, (void)err;
    takeover *t = arg;
    if (before && e->op == t->when && strstr(e->path, "step-000000000002") != NULL &&
        strstr(e->path, "rank-00002.sums") != NULL && atomic_exchange(&t->done, 1) == 0) {
        run_spec other = {.world = 1};
        root_run(t->root, &other);
        if (other.resumed_from != 1) {
            abort();
        }
    }
    return LG_OK;
}

ON_EVERY_ROOT(k05_a_session_superseded_during_a_background_save_learns_it_on_all_ranks)
{
    static const fault_op when[] = {FAULT_WRITE, FAULT_OPEN};
    for (size_t i = 0; i < sizeof when / sizeof *when; i++) {
        test_root fresh;
        root_make(&fresh, root->kind);
        takeover t = {.root = &fresh, .when = when[i]};
        fault_store *f = fault_store_new(fresh.store);
        fault_store_set_hook(f, take_over, &t);
        run_all(3, fault_store_handle(f), be_superseded, &fresh);
        assert_int_equal(t.done, 1);
        fault_store_free(f);
        assert_int_equal(newest(fresh.store), 1);
        root_drop(&fresh);
    }
}

/* ------------------------------------------------- processes, forks, exits */

/* 0: as it must be. */
static int child_of_a_session(lg_session *s, lg_save *begun, const void *pages)
{
    lg_error err = LG_ERROR_INIT;
    lg_save *save;
    int staged;
    lg_session_status status;
    if (lg_save_begin(s, 5, NULL, &save, &err) != LG_ERR_STATE || strstr(err.message, "fork") == NULL) {
        return 1;
    }
    if (lg_save_commit(begun, NULL, &err) != LG_ERR_STATE || strstr(err.message, "fork") == NULL) {
        return 6;
    }
    if (lg_session_fence(s, 10, &err) != LG_ERR_STATE || lg_session_wait(s, 10, NULL, &err) != LG_ERR_STATE ||
        lg_session_staged(s, &staged, &err) != LG_ERR_STATE ||
        lg_session_get_status(s, &status, &err) != LG_ERR_STATE) {
        return 2;
    }
    if (lg_session_close(s, &err) != LG_OK) {
        return 3;
    }
    /* MADV_DONTFORK: the copy is not inherited */
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        unsigned long from, to;
        if (sscanf(line, "%lx-%lx", &from, &to) == 2 && from <= (uintptr_t)pages && (uintptr_t)pages < to) {
            return 4;
        }
    }
    return maps == NULL ? 5 : 0;
}

static void k06_f094_k20_children_of_fork_inherit_nothing_harmful(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    lg_error err = LG_ERROR_INIT;
    lg_session *s = open_alone(root.path, &err);
    assert_non_null(s);
    model m;
    model_init(&m, 0, 1);
    m.lazy = true;
    for (uint64_t step = 1; step <= 20; step++) {
        model_fill(&m, step);
        assert_int_equal(model_launch(s, &m, step, NULL, NULL, &err), LG_OK);
        lg_save *next = NULL;
        assert_int_equal(lg_save_begin(s, step + 100, NULL, &next, &err), LG_OK);
        pid_t child = fork(); /* in the middle of a save */
        assert_true(child >= 0);
        if (child == 0) {
            leave_child(child_of_a_session(s, next, s->pages));
        }
        lg_save_abort(next);
        assert_int_equal(lg_session_fence(s, 60000, &err), LG_OK);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    assert_int_equal(lg_session_close(s, &err), LG_OK);
    assert_int_equal(newest(root.store), 20);
    root_drop(&root);
}

static void k04_f067_a_program_that_launches_and_returns_from_main_loses_nothing(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        lg_error err = LG_ERROR_INIT;
        lg_session *s = open_alone(root.path, &err);
        static model m;
        model_init(&m, 0, 1);
        m.lazy = true;
        model_fill(&m, 7);
        if (s == NULL || model_launch(s, &m, 7, NULL, NULL, &err) != LG_OK) {
            _exit(9);
        }
        exit(0); /* as main does when it returns */
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(newest(root.store), 7);
    root_drop(&root);
}

/* --------------------------------------------------------- checked sources */

static void k04_debug_mode_names_a_lazy_tensor_that_was_changed_before_the_fence(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    fault_store *f = fault_store_new(root.store);
    lg_session_options so = LG_SESSION_OPTIONS_INIT;
    so.store = fault_store_handle(f);
    lg_session *s;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg_session_open("root", &so, &s, &err), LG_OK);
    lg_launch_options o = LG_LAUNCH_OPTIONS_INIT;
    o.flags = LG_LAUNCH_CHECK_SOURCES;
    model m;
    model_init(&m, 0, 1);
    m.lazy = true;
    model_fill(&m, 1);
    assert_int_equal(model_launch(s, &m, 1, &o, NULL, &err), LG_OK);
    assert_int_equal(lg_session_fence(s, 60000, &err), LG_OK);
    assert_int_equal(lg_session_wait(s, 60000, NULL, &err), LG_OK);
    for (uint64_t step = 2; step <= 3; step++) { /* found by the fence; and by a wait without one */
        model_fill(&m, step);
        assert_int_equal(model_launch(s, &m, step, &o, NULL, &err), LG_OK);
        for (int staged = 0; !staged; lg__pause(0)) { /* copied before: no race */
            assert_int_equal(lg_session_staged(s, &staged, &err), LG_OK);
        }
        ((char *)m.moments[1])[40] ^= 1;
        if (step == 2) {
            assert_int_equal(lg_session_fence(s, 60000, &err), LG_ERR_CONFLICT);
            assert_non_null(strstr(err.message, "optim.state.w.exp_avg_sq"));
        }
        assert_int_equal(lg_session_wait(s, 60000, NULL, &err), LG_ERR_CONFLICT);
        assert_non_null(strstr(err.message, "optim.state.w.exp_avg_sq"));
    }
    model_fill(&m, 4);
    assert_int_equal(model_launch(s, &m, 4, &o, NULL, &err), LG_OK);
    assert_int_equal(lg_session_close(s, &err), LG_OK); /* checks too */
    fault_store_free(f);
    assert_int_equal(newest(root.store), 4);
    char folders[8][64];
    assert_int_equal(root_folders(&root, folders, 8), 2);
    root_drop(&root);
}

/* ---------------------------------------------- what the trainer says is torn */

static void refuse_on_one_rank(rank_env *env)
{
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.keep_last = 1;
    RANK_TRY(env, open_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    m.lazy = true;
    int refused = 7;
    RANK_TRY(env, lg_session_refuse(s, LG_ERR_CONFLICT, "nothing is under way", &refused, &env->err));
    RANK_CHECK(env, refused == 0);
    model_fill(&m, 1);
    RANK_TRY(env, model_launch(s, &m, 1, NULL, NULL, &env->err));
    RANK_TRY(env, lg_session_fence(s, 60000, &env->err));
    RANK_TRY(env, lg_session_wait(s, 60000, NULL, &env->err));
    gate *g = env->arg;
    if (env->rank == 0) {
        gate_set(g, true);
    }
    RANK_TRY(env, lg__comm_barrier(env->comm, 60000, &env->err));
    RANK_TRY(env, model_launch(s, &m, 2, NULL, NULL, &env->err));
    if (env->rank == 1) { /* its data are not written yet */
        RANK_TRY(env, lg_session_refuse(s, LG_ERR_CONFLICT, "\"w\" was changed too early", &refused, &env->err));
        RANK_CHECK(env, refused == 1);
        gate_set(g, false);
    }
    RANK_CHECK(env, lg_session_wait(s, 60000, NULL, &env->err) == LG_ERR_CONFLICT);
    RANK_CHECK(env, strstr(env->err.message, "\"w\" was changed too early") != NULL && env->err.rank == 1);
    model_fill(&m, 3);
    RANK_TRY(env, model_launch(s, &m, 3, NULL, NULL, &env->err));
    RANK_TRY(env, lg_session_fence(s, 60000, &env->err));
    RANK_TRY(env, lg_session_close(s, &env->err));
}

static void k04_a_save_that_one_rank_says_is_torn_fails_on_all(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    fault_store *f = fault_store_new(root.store);
    gate *g = gate_new(f, "shard-00002");
    run_all(2, fault_store_handle(f), refuse_on_one_rank, g);
    fault_store_free(f);
    free(g);
    char folders[4][64];
    assert_int_equal(root_folders(&root, folders, 4), 1);
    assert_int_equal(newest(root.store), 3);
    root_drop(&root);
}

static void k03_k04_nothing_older_goes_for_a_checkpoint_before_its_fence(void **state)
{
    (void)state;
    for (int late = 0; late < 3; late++) { /* fenced; refused; closed without either */
        test_root root;
        root_make(&root, ROOT_POSIX);
        lg_session_options so = LG_SESSION_OPTIONS_INIT;
        so.store = root.store;
        so.keep_last = 1;
        lg_session *s;
        lg_error err = LG_ERROR_INIT;
        assert_int_equal(lg_session_open("root", &so, &s, &err), LG_OK);
        model m;
        model_init(&m, 0, 1);
        m.lazy = true;
        char folders[4][64];
        for (uint64_t step = 1; step <= 2; step++) {
            model_fill(&m, step);
            assert_int_equal(model_launch(s, &m, step, NULL, NULL, &err), LG_OK);
            lg_session_status status;
            do {
                assert_int_equal(lg_session_get_status(s, &status, &err), LG_OK);
            } while (status.phase != LG_PHASE_COMMITTED);
            if (step == 1) {
                assert_int_equal(lg_session_wait(s, 60000, NULL, &err), LG_OK);
            }
        }
        assert_int_equal(root_folders(&root, folders, 4), 2); /* the one before is needed, if this one is torn */
        if (late == 0) {
            assert_int_equal(lg_session_fence(s, 60000, &err), LG_OK);
        } else if (late == 1) {
            int refused = 7;
            assert_int_equal(lg_session_refuse(s, LG_ERR_CONFLICT, "torn", &refused, &err), LG_OK);
            assert_int_equal(refused, 0); /* too late: the caller removes it */
            char where[400];
            snprintf(where, sizeof where, "%s@2", root.path);
            assert_int_equal(lg_remove_last(where, &err), LG_OK);
        }
        assert_int_equal(late == 0 ? lg_session_wait(s, 60000, NULL, &err) : LG_OK, LG_OK);
        assert_int_equal(lg_session_close(s, &err), LG_OK);
        assert_int_equal(root_folders(&root, folders, 4), 1);
        assert_int_equal(newest(root.store), late == 1 ? 1 : 2);
        root_drop(&root);
    }
}

/* ------------------------------------------------------------------ windows */

#define BIG ((size_t)3 << 20) /* bytes of one tensor */

static lg_status add_big(lg_save *save, const char *name, const uint8_t *data, uint32_t flags, lg_error *err)
{
    const uint64_t shape[] = {BIG};
    lg_tensor t = LG_TENSOR_INIT;
    t.name = name, t.dtype = LG_U8, t.ndim = 1, t.shape = shape, t.data = data, t.flags = flags;
    return lg_save_tensor(save, &t, err);
}

static void k07_a_state_that_does_not_fit_the_cap_is_copied_in_windows(void **state)
{
    (void)state;
    static const char *const names[] = {"a", "b", "c", "d"};
    static uint8_t data[4][BIG], want[4][BIG], got[BIG];
    for (uint32_t lazy = 0; lazy < 16; lazy += 5) { /* none, a and c, b and d, all */
        test_root root;
        root_make(&root, ROOT_POSIX);
        lg_session_options so = LG_SESSION_OPTIONS_INIT;
        so.store = root.store;
        so.staging_bytes = (uint64_t)7 << 20; /* of 12 */
        lg_session *s;
        lg_error err = LG_ERROR_INIT;
        assert_int_equal(lg_session_open("root", &so, &s, &err), LG_OK);
        for (uint64_t step = 1; step <= 2; step++) { /* what was moved aside is not taken for the trainer's memory */
            lg_save *save;
            assert_int_equal(lg_save_begin(s, step, NULL, &save, &err), LG_OK);
            for (int i = 0; i < 4; i++) {
                for (size_t k = 0; k < BIG; k++) {
                    data[i][k] = (uint8_t)(k * 7 + k / 251 + (size_t)i * 13 + lazy + step);
                }
                memcpy(want[i], data[i], BIG);
                assert_int_equal(add_big(save, names[i], data[i], (lazy >> i & 1) != 0 ? LG_TENSOR_LAZY : 0, &err),
                                 LG_OK);
            }
            lg_launch_info info;
            assert_int_equal(lg_save_launch(save, NULL, &info, &err), LG_OK);
            assert_true(info.windowed);
            for (int i = 0; i < 4; i++) {
                if ((lazy >> i & 1) == 0) {
                    memset(data[i], 0xee, BIG);
                }
            }
            lg_session_status status;
            assert_int_equal(lg_session_get_status(s, &status, &err), LG_OK);
            assert_true(status.staging_bytes <= so.staging_bytes / 2);
            assert_int_equal(lg_session_fence(s, 60000, &err), LG_OK);
            memset(data, 0xdd, sizeof data);
        }
        assert_int_equal(lg_session_close(s, &err), LG_OK);
        for (int i = 0; i < 4; i++) {
            const uint64_t shape[] = {BIG};
            lg_target t = LG_TARGET_INIT;
            t.name = names[i], t.dtype = LG_U8, t.ndim = 1, t.shape = shape, t.data = got;
            assert_int_equal(lg_read(root.path, &t, 1, NULL, &err), LG_OK);
            assert_memory_equal(got, want[i], BIG);
        }
        root_drop(&root);
    }
}

/* ------------------------------------------------------- key-value store */

typedef struct kv_case {
    lg_kv kv;
    fault_store *f;
} kv_case;

static void save_with_keys(rank_env *env)
{
    kv_case *c = env->arg;
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.kv = &c->kv;
    o.deadline_ms = 20000;
    RANK_TRY(env, open_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    for (uint64_t step = 1; step <= 4; step++) {
        model_fill(&m, step);
        if (step == 3 && env->rank == 0) {
            fault_store_arm(c->f,
                            (fault_plan){.kinds = FAULT_BIT(FAULT_SYNC), .path = "shard-00002-optim", .os_errno = EIO});
        }
        RANK_TRY(env, model_launch(s, &m, step, NULL, NULL, &env->err));
        lg_save_info info;
        lg_error told = LG_ERROR_INIT;
        lg_status st = lg_session_wait(s, 20000, &info, &told);
        if (step == 3) {
            if (st != LG_ERR_IO) {
                print_message("# got %s: %s\n", lg_status_name(st), st != LG_OK ? told.message : "");
            }
            RANK_CHECK(env, st == LG_ERR_IO);
            RANK_CHECK(env, told.rank == 1 && strstr(told.message, "shard-00002-optim") != NULL);
        } else {
            RANK_CHECK(env, st == LG_OK && info.step == step);
        }
    }
    RANK_TRY(env, lg_session_close(s, &env->err));
}

ON_EVERY_ROOT(ranks_may_tell_each_other_through_a_key_value_store)
{
    pairs *p = pairs_new();
    kv_case c = {.kv = pairs_kv(p), .f = fault_store_new(root->store)};
    run_all(3, fault_store_handle(c.f), save_with_keys, &c);
    fault_store_free(c.f);
    assert_int_equal(newest(root->store), 4);
    assert_true(p->sets >= 4 * 3);
    assert_int_equal(p->n, 0); /* and none stays */
    pairs_free(p);
}

/* --------------------------------------------------------- contradictions */

static void contradict(rank_env *env)
{
    lg_session *s;
    RANK_TRY(env, open_session(env, (lg_session_options)LG_SESSION_OPTIONS_INIT, &s));
    model m;
    model_init(&m, env->rank, env->world);
    model_fill(&m, 1);
    lg_error told = LG_ERROR_INIT;
    lg_status st = env->rank == 0 ? model_launch(s, &m, 1, NULL, NULL, &told) : model_save(s, &m, 1, NULL, &told);
    RANK_CHECK(env, st == LG_ERR_CONFLICT);
    RANK_CHECK(env, strstr(told.message, "lg_save_launch") != NULL && strstr(told.message, "lg_save_commit") != NULL);
    st = env->rank == 0 ? lg_session_wait(s, 0, NULL, &told) : model_save(s, &m, 1, NULL, &told);
    RANK_CHECK(env, st == LG_ERR_CONFLICT);
    st = model_launch(s, &m, 1 + env->rank, NULL, NULL, &told);
    RANK_CHECK(env, st == LG_ERR_CONFLICT);
    lg_launch_options o = LG_LAUNCH_OPTIONS_INIT;
    o.flags = env->rank == 0 ? 0x80u : 0;
    st = model_launch(s, &m, 1, &o, NULL, &told);
    RANK_CHECK(env, st == LG_ERR_INVALID && strstr(told.message, "unknown launch flags") != NULL);
    RANK_TRY(env, lg_session_close(s, &env->err));
}

static void k06_ranks_in_different_calls_are_told_so(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    run_all(2, root.store, contradict, NULL);
    assert_int_equal(newest(root.store), 0);
    root_drop(&root);
}

/* F064: a resume in the same session waits for what is in flight. */
static void resume_right_after(rank_env *env)
{
    lg_session *s;
    RANK_TRY(env, open_session(env, (lg_session_options)LG_SESSION_OPTIONS_INIT, &s));
    model m;
    model_init(&m, env->rank, env->world);
    for (uint64_t step = 1; step <= 5; step++) {
        model_fill(&m, step);
        RANK_TRY(env, model_launch(s, &m, step, NULL, NULL, &env->err));
        model_clear(&m);
        lg_resume_result *r;
        RANK_TRY(env, lg_resume(s, NULL, model_targets, &m, &r, &env->err));
        RANK_CHECK(env, r->step == step);
        lg_resume_result_free(r);
        RANK_CHECK(env, model_wrong(&m, step) == NULL);
    }
    RANK_TRY(env, lg_session_close(s, &env->err));
}

ON_EVERY_ROOT(k04_f064_a_resume_waits_for_the_save_in_flight) { run_all(3, root->store, resume_right_after, NULL); }

/* ----------------------------------------------------------- failing memory */

static void k06_every_allocation_that_fails_in_turn_fails_the_launch_or_the_save_and_loses_nothing(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    run_spec first = {.world = 1, .steps = (const uint64_t[]){1}, .n_steps = 1};
    root_run(&root, &first);
    lg_error err = LG_ERROR_INIT;
    size_t failed = 0;
    for (size_t n = 0;; n++) {
        lg_session *s = open_alone(root.path, &err);
        assert_non_null(s);
        model m;
        model_init(&m, 0, 1);
        m.lazy = true;
        model_fill(&m, 2 + n);
        lg_save *save;
        assert_int_equal(lg_save_begin(s, 2 + n, NULL, &save, &err), LG_OK);
        assert_int_equal(model_add(save, &m, &err), LG_OK);
        lg__mem_fail_after(n);
        lg_status st = lg_save_launch(save, NULL, NULL, &err);
        lg_status waited = st == LG_OK ? lg_session_wait(s, 60000, NULL, &err) : st;
        lg__mem_fail_after(SIZE_MAX);
        lg_save_info info = {0};
        if (waited != LG_OK) {
            failed++;
            if (waited != LG_ERR_NOMEM) {
                fail_msg("with allocation %zu failing: %s", n, err.message);
            }
        }
        /* a wait that had no memory itself says nothing of the save: once more */
        lg_status again = lg_session_wait(s, 60000, &info, &err);
        assert_true(again == LG_OK || again == LG_ERR_NOMEM);
        assert_int_equal(newest(root.store) == 2 + n, info.step == 2 + n);
        assert_int_equal(lg_session_close(s, &err), LG_OK);
        if (waited == LG_OK) {
            break;
        }
    }
    print_message("# %zu allocations failed\n", failed);
    root_drop(&root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k04_f056_what_was_there_at_the_launch_is_what_is_saved),
        cmocka_unit_test(k04_f062_f071_a_stalled_disk_holds_neither_the_trainer_nor_later_saves_for_ever),
        cmocka_unit_test(k04_f058_k07_f118_a_hundred_saves_back_to_back_share_one_pool_that_does_not_grow),
        cmocka_unit_test(k04_f065_k06_an_error_in_the_background_is_told_by_the_next_call_on_every_rank),
        cmocka_unit_test(k06_f092_a_rank_that_hangs_in_its_store_is_named_by_the_others_and_closing_returns),
        cmocka_unit_test(k06_f104_what_waits_in_the_background_for_a_rank_that_hangs_ends_at_the_deadline),
        cmocka_unit_test(k01_a_crash_at_any_operation_of_a_background_save_loses_nothing_that_was_committed),
        cmocka_unit_test(k05_a_session_superseded_during_a_background_save_learns_it_on_all_ranks),
        cmocka_unit_test(k06_f094_k20_children_of_fork_inherit_nothing_harmful),
        cmocka_unit_test(k04_f067_a_program_that_launches_and_returns_from_main_loses_nothing),
        cmocka_unit_test(k04_debug_mode_names_a_lazy_tensor_that_was_changed_before_the_fence),
        cmocka_unit_test(k04_a_save_that_one_rank_says_is_torn_fails_on_all),
        cmocka_unit_test(k03_k04_nothing_older_goes_for_a_checkpoint_before_its_fence),
        cmocka_unit_test(k07_a_state_that_does_not_fit_the_cap_is_copied_in_windows),
        cmocka_unit_test(ranks_may_tell_each_other_through_a_key_value_store),
        cmocka_unit_test(k06_ranks_in_different_calls_are_told_so),
        cmocka_unit_test(k04_f064_a_resume_waits_for_the_save_in_flight),
        cmocka_unit_test(k06_every_allocation_that_fails_in_turn_fails_the_launch_or_the_save_and_loses_nothing),
    };
    cmocka_set_test_filter(getenv("LASTGOOD_TEST")); /* a pattern */
    return cmocka_run_group_tests_name("launch", tests, NULL, NULL);
}
