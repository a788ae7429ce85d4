/* SPDX-License-Identifier: Apache-2.0 */

/* Failures of every kind at every point of the protocol: requests to the store
 * that fail, lie, are cut short or come late; memory that runs out once or for
 * good. Whatever happens, the error arrives on all ranks, what was committed
 * stays, nothing is left open, and the next try works once the cause is gone.
 *
 * LASTGOOD_PROVE=full: all combinations instead of some. */

#include "support/environment.h"
#include "support/fault_store.h"
#include "support/ranks.h"

#include "base/hash.h"
#include "base/mem.h"
#include "base/thread.h"
#include "comm/comm.h"

#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static size_t open_files(void)
{
    size_t n = 0;
    DIR *d = opendir("/proc/self/fd");
    assert_non_null(d);
    while (readdir(d) != NULL) {
        n++;
    }
    closedir(d);
    return n;
}

/* ----------------------------------------- a request to the store goes wrong */

typedef struct trouble {
    fault_store *f;
    fault_plan plan;
    bool retry; /* save once more in the same session */
    bool fired;
    lg_status status[RANKS_MAX];
    lg_error told[RANKS_MAX];
} trouble;

static void save_in_trouble(rank_env *env)
{
    trouble *t = env->arg;
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.deadline_ms = 20000;
    o.keep_last = 2;
    RANK_TRY(env, open_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    model_fill(&m, 1);
    RANK_TRY(env, model_save(s, &m, 1, NULL, &env->err));
    if (env->rank == 0) {
        fault_store_arm(t->f, t->plan);
    }
    RANK_TRY(env, lg__comm_barrier(env->comm, 20000, &env->err));
    model_fill(&m, 2);
    t->status[env->rank] = model_save(s, &m, 2, NULL, &t->told[env->rank]);
    RANK_TRY(env, lg__comm_barrier(env->comm, 20000, &env->err));
    if (env->rank == 0) {
        t->fired = fault_store_fired(t->f) > 0;
        fault_store_disarm(t->f);
    }
    RANK_TRY(env, lg__comm_barrier(env->comm, 20000, &env->err));
    if (t->retry) {
        model_fill(&m, 3);
        RANK_TRY(env, model_save(s, &m, 3, NULL, &env->err));
    }
    lg_session_close(s, NULL);
}

static const struct {
    int os_errno;
    const char *name;
} errors[] = {{ENOSPC, "ENOSPC"}, {EIO, "EIO"},     {EDQUOT, "EDQUOT"}, {EINTR, "EINTR"},
              {ESTALE, "ESTALE"}, {EROFS, "EROFS"}, {ENOENT, "ENOENT"}, {EEXIST, "EEXIST"}};
#define N_ERRORS (sizeof errors / sizeof *errors)

typedef struct tally {
    uint64_t cases, failed;
} tally;

/* The n-th request of a save of two ranks; false: it makes fewer. */
static bool nth_request_fails(int kind, uint64_t n, fault_how how, size_t error, tally *c)
{
    test_root root;
    root_make(&root, kind);
    const size_t before = open_files();
    trouble t = {.f = fault_store_new(root.store),
                 .plan = {.nth = n, .how = how, .os_errno = errors[error].os_errno},
                 .retry = n % 2 == 0};
    run_all(2, fault_store_handle(t.f), save_in_trouble, &t);
    fault_store_free(t.f);
    char what[120];
    snprintf(what, sizeof what, "%s at request %llu on %s (how %d)", errors[error].name, (unsigned long long)n,
             root_kind_name(kind), (int)how);
    if (t.status[0] != t.status[1]) {
        fail_msg("%s: rank 0 got %s: %s; rank 1 %s: %s", what, lg_status_name(t.status[0]), t.told[0].message,
                 lg_status_name(t.status[1]), t.told[1].message);
    }
    if (open_files() != before) {
        fail_msg("%s: %zu files were open before, %zu are now", what, before, open_files());
    }
    const uint64_t found = newest(root.store);
    const lg_status st = t.status[0];
    const bool may_be_2 = st == LG_OK || st == LG_ERR_NOT_DURABLE, may_be_1 = st != LG_OK;
    if (t.retry ? found != 3 : !((may_be_1 && found == 1) || (may_be_2 && found == 2))) {
        fail_msg("%s: the save ended with %s, then step %llu is the newest", what, lg_status_name(st),
                 (unsigned long long)found);
    }
    assert_int_not_equal(st, LG_ERR_INTERNAL);
    run_spec next = {.world = 1, .steps = (const uint64_t[]){9}, .n_steps = 1};
    root_run(&root, &next);
    assert_int_equal(next.resumed_from, found);
    assert_int_equal(newest(root.store), 9);
    root_drop(&root);
    c->cases += t.fired;
    c->failed += st != LG_OK;
    return t.fired;
}

static void k01_k06_every_request_that_fails_in_every_way_is_told_on_all_ranks_and_does_no_harm(void **state)
{
    (void)state;
    static const fault_how hows[] = {FAULT_INSTEAD, FAULT_AFTER, FAULT_TORN};
    for (int kind = 0; kind < ROOT_KINDS; kind++) {
        tally c = {0};
        for (size_t h = 0; h < sizeof hows / sizeof *hows; h++) {
            bool there = true;
            for (uint64_t n = 1; there; n++) {
                if (in_full()) {
                    for (size_t e = 0; e < N_ERRORS; e++) {
                        there = nth_request_fails(kind, n, hows[h], e, &c) && there;
                    }
                } else {
                    there = nth_request_fails(kind, n, hows[h], (size_t)(n + h + (uint64_t)kind) % N_ERRORS, &c);
                }
            }
        }
        print_message("# %s: %llu failing requests, %llu failed saves\n", root_kind_name(kind),
                      (unsigned long long)c.cases, (unsigned long long)c.failed);
        assert_true(c.cases > 150 && c.failed > 60);
    }
}

/* --------------------------------------------------- a request comes too late */

#define DEADLINE_MS short_ms(200)
#define LATE_MS (3 * DEADLINE_MS)

typedef struct slowness {
    uint32_t kinds;
    const char *path;
    atomic_bool done;
    fault_store *of_rank[RANKS_MAX];
    uint32_t slow;
    lg_status status[RANKS_MAX];
    lg_error told[RANKS_MAX];
} slowness;

static lg_status come_late(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)f, (void)err;
    slowness *l = arg;
    const bool here = before && (FAULT_BIT(event->op) & l->kinds) != 0 &&
                      (strstr(event->path, l->path) != NULL || strstr(event->to, l->path) != NULL);
    if (here && !atomic_exchange(&l->done, true)) {
        const uint64_t until = lg__deadline(LATE_MS);
        while (lg__now_ms() < until) {
            lg__pause(100);
        }
    }
    return LG_OK;
}

static void save_with_a_late_rank(rank_env *env)
{
    slowness *l = env->arg;
    env->store = fault_store_handle(l->of_rank[env->rank]);
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.deadline_ms = DEADLINE_MS;
    RANK_TRY(env, open_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    model_fill(&m, 2);
    l->status[env->rank] = model_save(s, &m, 2, NULL, &l->told[env->rank]);
    lg_session_close(s, NULL);
}

static void one_request_is_late(int kind)
{
    static const struct {
        uint32_t rank, kinds;
        const char *path;
    } late[] = {
        {1, FAULT_BIT(FAULT_CREATE), "shard-00002-model"},
        {1, FAULT_BIT(FAULT_WRITE), "shard-00002-optim"},
        {2, FAULT_BIT(FAULT_SYNC), "shard-00003"},
        {2, FAULT_BIT(FAULT_RENAME_FILE), "rank-00003.sums"},
        {0, FAULT_BIT(FAULT_MAKE_DIR), "step-000000000002"},
        {0, FAULT_BIT(FAULT_CREATE) | FAULT_BIT(FAULT_PUT_NEW), "lastgood.json"},
        {0, FAULT_BIT(FAULT_RENAME_DIR) | FAULT_BIT(FAULT_PUT_NEW), "step-000000000002"},
    };
    size_t kept = 0;
    for (size_t i = 0; i < sizeof late / sizeof *late; i++) {
        test_root fresh;
        root_make(&fresh, kind);
        run_spec first = {.world = 3, .steps = (const uint64_t[]){1}, .n_steps = 1};
        root_run(&fresh, &first);
        const size_t before = open_files();
        slowness l = {.kinds = late[i].kinds, .path = late[i].path, .slow = late[i].rank};
        for (uint32_t r = 0; r < 3; r++) {
            l.of_rank[r] = fault_store_new(fresh.store);
        }
        fault_store_set_hook(l.of_rank[l.slow], come_late, &l);
        run_all(3, fresh.store, save_with_a_late_rank, &l);
        for (uint32_t r = 0; r < 3; r++) {
            fault_store_free(l.of_rank[r]);
        }
        assert_true(l.done);
        assert_int_equal(open_files(), before);
        char name[16];
        snprintf(name, sizeof name, "rank %u", l.slow);
        bool reported = false;
        for (uint32_t r = 0; r < 3; r++) {
            reported = reported || l.status[r] == LG_OK;
            if (r != l.slow && (l.status[r] != LG_ERR_TIMEOUT || strstr(l.told[r].message, name) == NULL)) {
                fail_msg("%s of rank %u comes late: rank %u got %s: %s", late[i].path, l.slow, r,
                         lg_status_name(l.status[r]), l.told[r].message);
            }
        }
        run_spec next = {.world = 2, .steps = (const uint64_t[]){9}, .n_steps = 1};
        root_run(&fresh, &next);
        kept += next.resumed_from == 1;
        if (next.resumed_from != 2 && (reported || next.resumed_from != 1)) {
            fail_msg("%s of rank %u comes late: resumed from %llu", late[i].path, l.slow,
                     (unsigned long long)next.resumed_from);
        }
        assert_int_equal(next.skipped, 0);
        assert_int_equal(newest(fresh.store), 9);
        root_drop(&fresh);
    }
    assert_true(kept >= 4);
}

static void k06_a_request_that_takes_longer_than_the_deadline_fails_the_save_and_names_the_rank(void **state)
{
    (void)state;
    for (int kind = in_full() ? 0 : ROOT_MEMORY; kind < ROOT_KINDS; kind++) {
        one_request_is_late(kind);
    }
}

/* ------------------------------------------------------------ memory runs out */

/* Fails the test unless it is want of memory; true: once more, please. */
static bool wants_memory(lg_status st, const lg_error *err, const char *what, size_t n)
{
    if (st != LG_OK && st != LG_ERR_NOMEM) {
        fail_msg("allocation %zu fails once: %s: %s: %s", n, what, lg_status_name(st), err->message);
    }
    return st == LG_ERR_NOMEM;
}

/* A session from its start to its end, in which one allocation fails: each call
 * that says so works when it is repeated. True: one failed. */
static bool live_with_a_hole(test_root *root, size_t n, uint64_t *step, size_t *told)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = root->store;
    o.keep_last = 2;
    lg_error err = LG_ERROR_INIT;
    lg_session *s = NULL;
    model m;
    model_init(&m, 0, 1);
    m.lazy = n % 2 == 1;
    lg__mem_fail_once(n);
    while (wants_memory(lg_session_open("root", &o, &s, &err), &err, "open", n)) {
        ++*told;
    }
    lg_resume_result *r = NULL;
    lg_status st;
    while (wants_memory(st = lg_resume(s, NULL, model_targets, &m, &r, &err), &err, "resume", n)) {
        lg_resume_result_free(r);
        r = NULL;
        ++*told;
    }
    assert_int_equal(r->step, *step);
    assert_int_equal(r->n_skipped, 0);
    assert_null(model_wrong(&m, *step));
    lg_resume_result_free(r);
    model_fill(&m, *step + 1);
    while (wants_memory(model_save(s, &m, *step + 1, NULL, &err), &err, "save", n)) {
        assert_int_equal(newest(root->store), *step);
        ++*told;
    }
    ++*step;
    model_fill(&m, *step + 1);
    do {
        st = model_launch(s, &m, *step + 1, NULL, NULL, &err);
        if (st == LG_OK) {
            st = lg_session_fence(s, 60000, &err);
        }
        lg_save_info info = {0};
        lg_error of_wait = LG_ERROR_INIT;
        lg_status waited = lg_session_wait(s, 60000, &info, &of_wait);
        if (st == LG_OK && waited == LG_ERR_NOMEM && lg_session_wait(s, 60000, &info, NULL) == LG_OK &&
            info.step == *step + 1) {
            waited = LG_OK; /* it was the wait itself that had no memory */
            ++*told;
        }
        if (st == LG_OK && waited != LG_OK) {
            st = waited;
            err = of_wait;
        }
        *told += st != LG_OK;
    } while (wants_memory(st, &err, "launch", n));
    ++*step;
    st = lg_session_close(s, &err);
    *told += wants_memory(st, &err, "close", n);
    bool fired = lg__mem_reset();
    const uint64_t found = newest(root->store);
    if (found != *step) {
        fail_msg("allocation %zu fails once: step %llu was saved, %llu is the newest", n, (unsigned long long)*step,
                 (unsigned long long)found);
    }
    return fired;
}

/* In full every third, from another first one on each of the three kinds of root. */
ON_EVERY_ROOT(k06_any_allocation_that_fails_once_is_told_and_the_same_call_works_again)
{
    const size_t stride = (size_t)number_from("LASTGOOD_MEMORY_STRIDE", in_full() ? 3 : in_brief() ? 97 : 23);
    run_spec first = {.world = 2, .steps = (const uint64_t[]){1}, .n_steps = 1};
    root_run(root, &first);
    uint64_t step = 1;
    size_t told = 0, lives = 0;
    const size_t before = open_files();
    for (size_t n = (size_t)root->kind; live_with_a_hole(root, n, &step, &told); n += stride) {
        assert_int_equal(open_files(), before);
        lives++;
    }
    print_message("# %zu sessions, %zu errors told\n", lives, told);
    assert_true(lives > 30 && told > lives / 2);
}

/* Two ranks: which of them has no memory, and where the other one is then,
 * differs from run to run. */
static void save_or_say_why(rank_env *env)
{
    if (env->rank == 0) {
        lg__mem_fail_once(*(size_t *)env->arg);
    }
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.deadline_ms = 1000;
    if (open_session(env, o, &s) != LG_OK) {
        env->status = env->err.status;
        return;
    }
    model m;
    model_init(&m, env->rank, env->world);
    model_fill(&m, 2);
    env->status = model_save(s, &m, 2, NULL, &env->err);
    lg_session_close(s, NULL);
}

static void k06_an_allocation_that_fails_on_one_of_two_ranks_reaches_the_other_and_loses_nothing(void **state)
{
    (void)state;
    const size_t stride = (size_t)number_from("LASTGOOD_MEMORY_STRIDE", in_full() ? 3 : in_brief() ? 97 : 29);
    size_t failed = 0, late = 0, healed = 0;
    bool fired = true;
    for (size_t n = 0; fired; n += stride) {
        test_root root;
        root_make(&root, ROOT_MEMORY);
        run_spec first = {.world = 2, .steps = (const uint64_t[]){1}, .n_steps = 1};
        root_run(&root, &first);
        rank_env env[2];
        run_ranks(2, root.store, save_or_say_why, &n, env);
        fired = lg__mem_reset();
        const uint64_t found = newest(root.store);
        for (int r = 0; r < 2; r++) {
            if (env[r].status == LG_OK && found != 2) {
                fail_msg("allocation %zu fails once: rank %d was told that step 2 is saved, but %llu is the newest", n,
                         r, (unsigned long long)found);
            }
            const bool told_why = env[r].status == LG_ERR_PEER && strstr(env[r].err.message, "out of memory") != NULL;
            const bool by_other = env[r].status == LG_ERR_TIMEOUT || env[r].status == LG_ERR_COMM || told_why;
            if (env[r].status != LG_OK && env[r].status != LG_ERR_NOMEM && !by_other) {
                fail_msg("allocation %zu fails once: rank %d: %s: %s", n, r, lg_status_name(env[r].status),
                         env[r].err.message);
            }
            late += by_other;
        }
        assert_true(found == 1 || found == 2);
        failed += env[0].status != LG_OK && env[1].status != LG_OK;
        healed += env[0].status == LG_OK && env[1].status == LG_OK;
        run_spec next = {.world = 2, .steps = (const uint64_t[]){9}, .n_steps = 1};
        root_run(&root, &next);
        assert_int_equal(next.resumed_from, found);
        root_drop(&root);
    }
    print_message("# %zu saves failed on both ranks, %zu on none; %zu ranks learned it from the communicator\n", failed,
                  healed, late);
    assert_true(failed > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k01_k06_every_request_that_fails_in_every_way_is_told_on_all_ranks_and_does_no_harm),
        cmocka_unit_test(k06_a_request_that_takes_longer_than_the_deadline_fails_the_save_and_names_the_rank),
        cmocka_unit_test(k06_any_allocation_that_fails_once_is_told_and_the_same_call_works_again),
        cmocka_unit_test(k06_an_allocation_that_fails_on_one_of_two_ranks_reaches_the_other_and_loses_nothing),
    };
    return cmocka_run_group_tests_name("faults", tests, NULL, NULL);
}
