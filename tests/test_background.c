/* SPDX-License-Identifier: Apache-2.0 */

/* Saves in the background, attacked: a rank dies or fails at any operation,
 * calls come in any order, a process forks, exits and gets signals, threads,
 * memory and key-value stores are not to be had. */

#include "support/build.h"
#include "support/environment.h"
#include "support/fault_store.h"
#include "support/pairs.h"
#include "support/ranks.h"

#include "base/mem.h"
#include "base/thread.h"
#include "core/background.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#ifdef __SANITIZE_THREAD__
/* Children of fork inherit the record of the parent's threads. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "report_thread_leaks=0"; }
#endif

/* Linked with --wrap=lg__thread_start: so many more threads can be had. */
static _Atomic int threads_left = INT32_MAX;
bool __real_lg__thread_start(pthread_t *out, void *(*run)(void *arg), void *arg);
bool __wrap_lg__thread_start(pthread_t *out, void *(*run)(void *arg), void *arg);
bool __wrap_lg__thread_start(pthread_t *out, void *(*run)(void *arg), void *arg)
{
    return atomic_fetch_sub(&threads_left, 1) > 0 && __real_lg__thread_start(out, run, arg);
}

/* Waits until what closed sessions left behind has ended. */
static void wait_for_what_was_left(void)
{
    while (lg__background_left > 0) {
        lg__pause(0);
    }
}

/* --------------------------------------------- every operation fails once */

#define OPERATIONS_MAX 400

typedef struct operation {
    fault_op op;
    char path[128]; /* what identifies it: the part behind the folder, or a pattern */
} operation;

typedef struct operations {
    operation all[OPERATIONS_MAX];
    size_t n;
} operations;

/* Those of one save, but for their order: random names are cut off. */
static void list_operations(fault_store *f, operations *out)
{
    size_t n;
    const fault_event *log = fault_store_log(f, &n);
    out->n = 0;
    for (size_t i = 0; i < n; i++) {
        operation o = {.op = log[i].op};
        const char *file = strrchr(log[i].path, '/');
        snprintf(o.path, sizeof o.path, "%.100s", file != NULL ? file + 1 : log[i].path);
        char *random = strstr(o.path, ".partial");
        if (file == NULL && random != NULL) {
            snprintf(o.path, sizeof o.path, ".partial");
        }
        bool known = false;
        for (size_t k = 0; k < out->n && !known; k++) {
            known = out->all[k].op == o.op && strcmp(out->all[k].path, o.path) == 0;
        }
        if (!known) {
            assert_true(out->n < OPERATIONS_MAX);
            out->all[out->n++] = o;
        }
    }
}

typedef struct failing {
    fault_store *f;
    fault_plan plan;
    uint64_t deadline_ms;
    bool by_close;
    operations *list; /* NULL: arm the plan; else record */
    lg_kv *kv;
    lg_status status[RANKS_MAX];
    lg_error told[RANKS_MAX];
} failing;

/* *open is the session until it is closed. */
static void fail_and_go_on(rank_env *env, lg_session **open)
{
    failing *c = env->arg;
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.deadline_ms = c->deadline_ms;
    o.keep_last = 2;
    o.kv = c->kv;
    RANK_TRY(env, open_session(env, o, &s));
    *open = s;
    model m;
    model_init(&m, env->rank, env->world);
    m.lazy = true;
    model_fill(&m, 1);
    RANK_TRY(env, model_save(s, &m, 1, NULL, &env->err));
    RANK_TRY(env, lg__comm_barrier(env->comm, 20000, &env->err));
    if (env->rank == 0) {
        fault_store_log_clear(c->f);
        if (c->list == NULL && c->plan.path != NULL) {
            fault_store_arm(c->f, c->plan);
        }
    }
    RANK_TRY(env, lg__comm_barrier(env->comm, 20000, &env->err));
    model_fill(&m, 2);
    lg_error *told = &c->told[env->rank];
    lg_status st = model_launch(s, &m, 2, NULL, NULL, told);
    if (st == LG_OK) {
        RANK_TRY(env, lg_session_fence(s, 20000, &env->err));
        if (c->by_close) {
            *open = NULL;
            c->status[env->rank] = lg_session_close(s, told);
            return;
        }
        st = lg_session_wait(s, 0, NULL, told);
    }
    c->status[env->rank] = st;
    RANK_TRY(env, lg__comm_barrier(env->comm, 20000, &env->err));
    if (env->rank == 0) {
        if (c->list != NULL) {
            list_operations(c->f, c->list);
        }
        fault_store_disarm(c->f);
    }
    RANK_TRY(env, lg__comm_barrier(env->comm, 20000, &env->err));
    if (st == LG_ERR_TIMEOUT) { /* it is still in flight: once more */
        lg_error later = LG_ERROR_INIT;
        (void)lg_session_wait(s, 20000, NULL, &later);
    }
    /* whatever it was, the next one works, the same or another step */
    model_fill(&m, 3);
    RANK_TRY(env, model_launch(s, &m, 3, NULL, NULL, &env->err));
    lg_save_info info;
    RANK_TRY(env, lg_session_wait(s, 20000, &info, &env->err));
    RANK_CHECK(env, info.step == 3);
    *open = NULL;
    RANK_TRY(env, lg_session_close(s, &env->err));
}

static void fail_in_the_background(rank_env *env)
{
    lg_session *open = NULL;
    fail_and_go_on(env, &open);
    lg_session_close(open, NULL);
}

static void all_were_told_the_same(const failing *c, uint32_t world, const char *what)
{
    for (uint32_t r = 1; r < world; r++) {
        if (c->status[r] != c->status[0] ||
            (c->status[0] != LG_OK && strcmp(c->told[r].message, c->told[0].message) != 0)) {
            fail_msg("%s: rank 0 got %s: %s; rank %u %s: %s", what, lg_status_name(c->status[0]), c->told[0].message, r,
                     lg_status_name(c->status[r]), c->told[r].message);
        }
    }
}

static void k06_any_operation_that_fails_is_told_on_all_ranks_in_the_same_words(void **state)
{
    (void)state;
    static const fault_how hows[] = {FAULT_INSTEAD, FAULT_AFTER};
    uint32_t failed = 0, healed = 0;
    for (int kind = 0; kind < ROOT_KINDS; kind++) {
        test_root root;
        root_make(&root, kind);
        operations list = {.n = 0};
        failing record = {.f = fault_store_new(root.store), .deadline_ms = 20000, .list = &list};
        run_all(3, fault_store_handle(record.f), fail_in_the_background, &record);
        fault_store_free(record.f);
        root_drop(&root);
        assert_true(list.n > 30);
        for (size_t i = 0; i < 2 * list.n; i++) {
            const operation *o = &list.all[i / 2];
            test_root fresh;
            root_make(&fresh, kind);
            failing c = {.f = fault_store_new(fresh.store),
                         .deadline_ms = 3000,
                         .plan = {.kinds = FAULT_BIT(o->op), .path = o->path, .os_errno = EIO, .how = hows[i % 2]}};
            char what[256];
            snprintf(what, sizeof what, "%s of \"%s\" on %s%s", fault_op_name(o->op), o->path, root_kind_name(kind),
                     i % 2 == 1 ? ", done but reported as failed" : "");
            run_all(3, fault_store_handle(c.f), fail_in_the_background, &c);
            all_were_told_the_same(&c, 3, what);
            failed += c.status[0] != LG_OK;
            healed += c.status[0] == LG_OK;
            if (c.status[0] != LG_OK && strstr(c.told[0].message, "injected") == NULL &&
                strstr(c.told[0].message, "not be durable") == NULL) {
                fail_msg("%s: the cause is not told: %s", what, c.told[0].message);
            }
            fault_store_free(c.f);
            assert_int_equal(newest(fresh.store), 3);
            root_drop(&fresh);
        }
    }
    print_message("# %u operations failed the save, %u did not\n", failed, healed);
    assert_true(failed > 60);
}

/* ---------------------------------------------- one rank dies at any moment */

typedef struct dying {
    lg_store *own[RANKS_MAX];
    bool saved[RANKS_MAX];
} dying;

static void go_on_while_one_dies(rank_env *env)
{
    dying *d = env->arg;
    env->store = d->own[env->rank];
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.deadline_ms = short_ms(300);
    o.keep_last = 1;
    lg_error ignored = LG_ERROR_INIT;
    if (open_session(env, o, &s) != LG_OK) {
        return;
    }
    model m;
    model_init(&m, env->rank, env->world);
    m.lazy = true;
    model_fill(&m, 1);
    lg_status st = model_save(s, &m, 1, NULL, &ignored);
    d->saved[env->rank] = false;
    if (st == LG_OK) {
        model_fill(&m, 2);
        st = model_launch(s, &m, 2, NULL, NULL, &ignored);
    }
    if (st == LG_OK) {
        st = lg_session_close(s, &ignored); /* no exchange: each by itself */
        d->saved[env->rank] = st == LG_OK;
        return;
    }
    (void)lg_session_close(s, &ignored);
}

/* Its store does nothing any more from the n-th operation of the launch on; the
 * other ranks live. */
static void k01_k06_one_rank_that_dies_at_any_operation_loses_nothing_and_holds_nobody(void **state)
{
    (void)state;
    uint32_t olds = 0, news = 0, cases = 0;
    const uint64_t stride = number_from("LASTGOOD_STRIDE", in_brief() ? 9 : 1);
    for (int kind = ROOT_MEMORY; kind < ROOT_KINDS; kind++) {
        for (uint32_t victim = 0; victim < 3; victim++) {
            uint64_t first = 0;
            for (uint64_t n = 1;; n += stride) {
                test_root root;
                root_make(&root, kind);
                fault_store *f = fault_store_new(root.store);
                dying d = {.own = {root.store, root.store, root.store}};
                d.own[victim] = fault_store_handle(f);
                if (first == 0) { /* how many operations come before the launch? */
                    run_spec one = {.world = 1};
                    run_ranks(3, root.store, go_on_while_one_dies, &d, (rank_env[3]){{0}});
                    size_t all;
                    const fault_event *log = fault_store_log(f, &all);
                    for (size_t i = 0; i < all; i++) {
                        if (strstr(log[i].path, "step-000000000002") != NULL) {
                            break;
                        }
                        first += (FAULT_CHANGES >> log[i].op & 1) != 0;
                    }
                    assert_true(first > 0);
                    root_run(&root, &one);
                    assert_int_equal(one.resumed_from, 2);
                    fault_store_free(f);
                    root_drop(&root);
                    continue;
                }
                fault_store_arm(f, (fault_plan){.kinds = FAULT_CHANGES, .nth = first + n, .how = FAULT_DIE});
                run_ranks(3, root.store, go_on_while_one_dies, &d, (rank_env[3]){{0}});
                wait_for_what_was_left();
                const bool fired = fault_store_fired(f) > 0;
                const bool saved = d.saved[0] || d.saved[1] || d.saved[2];
                fault_store_free(f);
                run_spec again = {.world = 2, .steps = (const uint64_t[]){9}, .n_steps = 1};
                root_run(&root, &again);
                if (again.resumed_from != 1 && again.resumed_from != 2) {
                    fail_msg("rank %u died at operation %llu on %s: resumed from %llu", victim, (unsigned long long)n,
                             root_kind_name(kind), (unsigned long long)again.resumed_from);
                }
                if (saved && again.resumed_from != 2) {
                    fail_msg("rank %u died at operation %llu on %s: a rank was told that step 2 is saved, it is not",
                             victim, (unsigned long long)n, root_kind_name(kind));
                }
                olds += again.resumed_from == 1;
                news += again.resumed_from == 2;
                cases++;
                root_drop(&root);
                if (!fired) {
                    break;
                }
            }
        }
    }
    print_message("# %u moments: %u kept the old step, %u the new one\n", cases, olds, news);
    assert_true(olds > 10 / stride && news > 2 / stride);
}

/* --------------------------------------------- closing while others still save */

static void k06_ranks_that_close_at_once_learn_the_cause_from_the_rank_that_failed(void **state)
{
    (void)state;
    static const struct {
        uint32_t kinds;
        const char *path;
        const char *says;
    } cases[] = {
        {FAULT_BIT(FAULT_WRITE), "shard-00001-model", "shard-00001-model"},
        {FAULT_BIT(FAULT_WRITE), "shard-00002-model", "shard-00002-model"},
        {FAULT_BIT(FAULT_CREATE) | FAULT_BIT(FAULT_PUT_NEW), "lastgood.json", "lastgood.json"},
    };
    for (int kind = 0; kind < ROOT_KINDS; kind++) {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            test_root root;
            root_make(&root, kind);
            failing c = {.f = fault_store_new(root.store),
                         .deadline_ms = 20000,
                         .by_close = true,
                         .plan = {.kinds = cases[i].kinds, .path = cases[i].path, .os_errno = EDQUOT}};
            run_all(3, fault_store_handle(c.f), fail_in_the_background, &c);
            for (uint32_t r = 0; r < 3; r++) {
                if (c.status[r] != LG_ERR_NO_SPACE || strstr(c.told[r].message, cases[i].says) == NULL) {
                    fail_msg("rank %u got %s: %s", r, lg_status_name(c.status[r]), c.told[r].message);
                }
            }
            fault_store_free(c.f);
            assert_int_equal(newest(root.store), 1);
            run_spec next = {.world = 2, .steps = (const uint64_t[]){5}, .n_steps = 1};
            root_run(&root, &next); /* and sweeps what was left */
            lg_listing *all;
            lg_error err = LG_ERROR_INIT;
            if (kind != ROOT_NO_RENAME) {
                assert_int_equal(lg_list(root.path, LG_LIST_ALL, &all, &err), LG_OK);
                for (size_t k = 0; k < all->n; k++) {
                    assert_true(all->entries[k].kind == LG_ENTRY_COMMITTED || all->entries[k].kind == LG_ENTRY_OWNER);
                }
                lg_listing_free(all);
            }
            root_drop(&root);
        }
    }
}

/* -------------------------------------------------------------- a full disk */

/* Full from the first write of a shard on; there is room again when any shard was
 * removed. */
typedef struct full_disk {
    const char *shard; /* whose write does not fit */
    atomic_int full;
} full_disk;

static lg_status on_full_disk(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    (void)f;
    full_disk *d = arg;
    if (strstr(e->path, "step-000000000002") == NULL) {
        return LG_OK;
    }
    if (!before) {
        if (e->op == FAULT_REMOVE_FILE && strstr(e->path, "shard-") != NULL && d->full == 1) {
            d->full = -1; /* for good */
        }
        return LG_OK;
    }
    if (e->op == FAULT_WRITE && strstr(e->path, d->shard) != NULL && d->full == 0) {
        d->full = 1;
    }
    const bool needs_room = e->op == FAULT_WRITE || e->op == FAULT_CREATE || e->op == FAULT_PUT_NEW;
    return d->full == 1 && needs_room ? lg_error_set_errno(err, ENOSPC, "%s injected", e->path) : LG_OK;
}

static void k01_k06_a_disk_too_full_for_the_cause_makes_room_for_it(void **state)
{
    (void)state;
    for (int kind = 0; kind < ROOT_KINDS; kind++) {
        for (int who = 1; who <= 2; who++) {
            for (int by_close = 0; by_close < 2; by_close++) {
                test_root root;
                root_make(&root, kind);
                full_disk d = {.shard = who == 1 ? "shard-00001-" : "shard-00002-"};
                failing c = {.f = fault_store_new(root.store), .deadline_ms = 20000, .by_close = by_close == 1};
                fault_store_set_hook(c.f, on_full_disk, &d);
                const uint64_t began = lg__now_ms();
                run_all(3, fault_store_handle(c.f), fail_in_the_background, &c);
                assert_true(lg__now_ms() - began < 9000); /* no deadline had to pass */
                for (uint32_t r = 0; r < 3; r++) {
                    if (c.status[r] != LG_ERR_NO_SPACE || strstr(c.told[r].message, "injected") == NULL) {
                        fail_msg("rank %u got %s: %s", r, lg_status_name(c.status[r]), c.told[r].message);
                    }
                }
                fault_store_free(c.f);
                assert_int_equal(newest(root.store), by_close ? 1 : 3);
                root_drop(&root);
            }
        }
    }
}

/* ------------------------------------------------------- key-value stores */

static void k06_a_key_value_store_that_fails_fails_the_save_on_all_ranks_alike(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    pairs *p = pairs_new();
    lg_kv kv = pairs_kv(p);
    failing record = {.f = fault_store_new(root.store), .deadline_ms = 20000, .kv = &kv};
    p->hide = 3; /* slow */
    run_all(3, fault_store_handle(record.f), fail_in_the_background, &record);
    assert_int_equal(record.status[0], LG_OK);
    assert_int_equal(p->n, 0);
    const uint64_t calls = p->calls < 60 ? p->calls : 60;
    fault_store_free(record.f);
    pairs_free(p);
    root_drop(&root);
    uint32_t failed = 0;
    for (uint64_t from = 1; from <= calls; from += 3) {
        for (uint64_t n = 1; n < 1000; n += 500) { /* one call, or all from there on */
            root_make(&root, ROOT_MEMORY);
            p = pairs_new();
            kv = pairs_kv(p);
            failing c = {.f = fault_store_new(root.store), .deadline_ms = 400, .kv = &kv, .by_close = n > 1};
            p->fail_from = from, p->fail_to = from + n - 1;
            rank_env env[3];
            run_ranks(3, fault_store_handle(c.f), fail_in_the_background, &c, env);
            wait_for_what_was_left();
            if (!c.by_close) {
                all_were_told_the_same(&c, 3, "key-value store");
                failed += c.status[0] != LG_OK;
            }
            const uint64_t found = newest(root.store);
            assert_true(found >= 1 && found <= 3);
            for (uint32_t r = 0; r < 3 && c.by_close; r++) {
                assert_true(c.status[r] != LG_OK || found == 2);
            }
            fault_store_free(c.f);
            pairs_free(p);
            root_drop(&root);
        }
    }
    print_message("# %llu calls failed in turn, %u failed the save\n", (unsigned long long)calls, failed);
}

/* --------------------------------------------------------- any order of calls */

typedef struct orders {
    uint64_t seed;
    fault_store *f;
    uint64_t committed; /* out: the newest step that a call reported as durable */
    uint64_t launched;  /* the newest one that may be there */
} orders;

static void calls_in_any_order(rank_env *env)
{
    orders *o = env->arg;
    uint64_t dice = o->seed; /* the same on all ranks */
    lg_session_options so = LG_SESSION_OPTIONS_INIT;
    so.keep_last = 1 + (uint32_t)(build_random(&dice) % 3);
    so.deadline_ms = 30000;
    const uint64_t caps[] = {0, 0, 1 << 20};
    so.staging_bytes = caps[build_random(&dice) % 3];
    const uint64_t blocks[] = {4096, 65536, UINT64_C(64) << 20};
    so.block_bytes = blocks[build_random(&dice) % 3];
    lg_session *s;
    RANK_TRY(env, open_session(env, so, &s));
    model m;
    model_init(&m, env->rank, env->world);
    uint64_t step = 0, pending = 0, durable = 0;
    for (int i = 0; i < 24; i++) {
        const uint64_t what = build_random(&dice) % 16, flags = build_random(&dice);
        lg_error told = LG_ERROR_INIT;
        lg_status st = LG_OK;
        lg_save_info info = {0};
        if (flags % 7 == 0 && env->rank == 0) {
            fault_store_arm(o->f, (fault_plan){.kinds = FAULT_BIT(FAULT_WRITE) | FAULT_BIT(FAULT_SYNC),
                                               .path = flags % 2 == 0 ? "shard-00002" : "shard-00001",
                                               .nth = 1 + flags / 7 % 3,
                                               .os_errno = EIO});
        }
        if (what < 6) {
            model_fill(&m, ++step);
            m.lazy = flags % 2 == 0;
            lg_launch_options lo = LG_LAUNCH_OPTIONS_INIT;
            lo.flags = (flags % 3 == 0 ? LG_LAUNCH_SKIP : 0) | (flags % 5 == 0 ? LG_LAUNCH_CHECK_SOURCES : 0);
            lo.copy_threads = (uint32_t)(flags % 17), lo.lazy_threads = (uint32_t)(flags / 17 % 17);
            lg_launch_info li = {0};
            st = model_launch(s, &m, step, &lo, &li, &told);
            if (st == LG_OK && li.skipped == LG_SKIP_NONE) {
                durable = pending != 0 ? pending : durable; /* the one before was settled */
                pending = step;
                RANK_TRY(env, lg_session_fence(s, 30000, &env->err));
            }
            RANK_CHECK(env, !m.lazy || st == LG_OK || told.message[0] != '\0');
        } else if (what < 9) {
            model_fill(&m, ++step);
            st = model_save(s, &m, step, &info, &told);
            if (st == LG_OK) {
                durable = step, pending = 0;
            }
        } else if (what < 11) {
            st = lg_session_wait(s, 30000, &info, &told);
            if (st == LG_OK && pending != 0) {
                RANK_CHECK(env, info.step == pending);
                durable = pending, pending = 0;
            }
        } else if (what < 13 && durable != 0) {
            lg_resume_result *r = NULL;
            st = lg_resume(s, NULL, model_targets, &m, &r, &told);
            if (st == LG_OK) {
                durable = pending != 0 ? pending : durable, pending = 0;
                RANK_CHECK(env, r->step == durable && model_wrong(&m, durable) == NULL);
            }
            lg_resume_result_free(r);
        } else {
            lg_session_status status;
            RANK_TRY(env, lg_session_get_status(s, &status, &env->err));
            RANK_TRY(env, lg_session_fence(s, 30000, &env->err));
        }
        if (st != LG_OK && st != LG_ERR_IO && st != LG_ERR_NOT_DURABLE) {
            env->status = st;
            env->err = told;
            return;
        }
        if (st != LG_OK && strstr(told.message, "in the background") != NULL) {
            RANK_CHECK(env, pending != 0);
            pending = 0;
        }
    }
    lg_status st = lg_session_close(s, &env->err);
    RANK_CHECK(env, st == LG_OK || (pending != 0 && (st == LG_ERR_IO || st == LG_ERR_NOT_DURABLE)));
    durable = st == LG_OK && pending != 0 ? pending : durable;
    if (env->rank == 0) {
        o->committed = durable;
        o->launched = pending;
    }
}

static void k04_calls_in_any_order_with_failures_lose_nothing_that_was_reported(void **state)
{
    (void)state;
    const uint64_t seed = number_from("LASTGOOD_SEED", 20261129);
    const uint64_t rounds = number_from("LASTGOOD_ROUNDS", in_brief() ? 10 : 60);
    print_message("# LASTGOOD_SEED=%llu\n", (unsigned long long)seed);
    for (uint64_t i = 0; i < rounds; i++) {
        test_root root;
        root_make(&root, (int)(i % ROOT_KINDS));
        orders o = {.seed = seed * 1000003 + i, .f = fault_store_new(root.store)};
        rank_env env[4];
        const uint32_t world = 1 + (uint32_t)(i % 4);
        run_ranks(world, fault_store_handle(o.f), calls_in_any_order, &o, env);
        for (uint32_t r = 0; r < world; r++) {
            if (env[r].status != LG_OK) {
                fail_msg("round %llu, rank %u: %s: %s", (unsigned long long)i, r, lg_status_name(env[r].status),
                         env[r].err.message);
            }
        }
        fault_store_free(o.f);
        const uint64_t found = newest(root.store);
        if (found != o.committed && found != o.launched) {
            fail_msg("round %llu: step %llu was reported, %llu is the newest", (unsigned long long)i,
                     (unsigned long long)o.committed, (unsigned long long)found);
        }
        root_drop(&root);
    }
}

/* ------------------------------------------------------- retention, by others */

typedef struct poll {
    test_root *root;
    atomic_bool stop;
    uint64_t looks, newest;
    char wrong[256];
} poll;

static void *look_all_the_time(void *arg)
{
    poll *p = arg;
    while (!p->stop && p->wrong[0] == '\0') {
        lg_checkpoint *c = NULL;
        lg_error err = LG_ERROR_INIT;
        lg_status st = lg_checkpoint_open(p->root->path, &c, &err);
        uint64_t step = 0;
        if (st == LG_OK && lg_checkpoint_global_u64(c, "step", &step, &err) == LG_OK) {
            p->looks++;
            if (step < p->newest) {
                snprintf(p->wrong, sizeof p->wrong, "step %llu after %llu", (unsigned long long)step,
                         (unsigned long long)p->newest);
            }
            p->newest = step;
        } else if (st == LG_ERR_EMPTY ? p->newest != 0 : st != LG_ERR_NOT_FOUND && st != LG_ERR_NOT_WHOLE) {
            snprintf(p->wrong, sizeof p->wrong, "%.200s", err.message);
        }
        lg_checkpoint_close(c);
    }
    return NULL;
}

static void launch_many(rank_env *env)
{
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.keep_last = 2;
    RANK_TRY(env, open_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    for (uint64_t step = 1; step <= 60; step++) {
        model_fill(&m, step);
        RANK_TRY(env, model_launch(s, &m, step, NULL, NULL, &env->err));
    }
    lg_session_status status;
    RANK_TRY(env, lg_session_wait(s, 60000, NULL, &env->err));
    RANK_TRY(env, lg_session_get_status(s, &status, &env->err));
    RANK_CHECK(env, env->rank != 0 || (status.removed == 58 && status.removal_failures == 0));
    RANK_TRY(env, lg_session_close(s, &env->err));
}

static void k04_f061_k03_at_any_time_the_newest_there_is_whole_while_the_background_commits_and_removes(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    poll p = {.root = &root};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, look_all_the_time, &p), 0);
    run_all(2, root.store, launch_many, NULL);
    p.stop = true;
    pthread_join(thread, NULL);
    if (p.wrong[0] != '\0') {
        fail_msg("%s", p.wrong);
    }
    print_message("# %llu looks\n", (unsigned long long)p.looks);
    assert_true(p.looks > 3);
    root_drop(&root);
}

/* ------------------------------------------------------- forks, exits, signals */

/* Registered first, so it runs last: what the parent's threads had in their hands
 * is no leak of the child. */
static bool is_child;
static void leave(void)
{
    if (is_child) {
        leave_child(0);
    }
}

static void k06_f094_k20_a_child_of_fork_exits_at_once_whatever_the_parent_saves(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    lg_error err = LG_ERROR_INIT;
    lg_session *s = open_alone(root.path, &err);
    assert_non_null(s);
    model m;
    model_init(&m, 0, 1);
    for (uint64_t step = 1; step <= 30; step++) {
        model_fill(&m, step);
        assert_int_equal(model_launch(s, &m, step, NULL, NULL, &err), LG_OK);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            is_child = true;
            alarm(20); /* a child that hangs dies of it */
            lg_session_status status;
            if (lg_session_get_status(s, &status, &err) != LG_ERR_STATE) {
                _exit(2);
            }
            lg_session_close(s, &err);
            exit(0); /* runs the handlers that were registered before the fork */
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    assert_int_equal(lg_session_close(s, &err), LG_OK);
    assert_int_equal(newest(root.store), 30);
    root_drop(&root);
}

static lg_status slow(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    (void)f, (void)arg, (void)err;
    for (int i = 0; before && e->op == FAULT_SYNC && i < 10; i++) {
        lg__pause(1000);
    }
    return LG_OK;
}

/* A session that closed before its save was durable; the end of the program waits
 * for it all the same. */
static void k04_f067_f068_the_end_of_a_program_waits_for_what_a_closed_session_left(void **state)
{
    (void)state;
    for (int checked = 0; checked < 2; checked++) {
        test_root root;
        root_make(&root, ROOT_POSIX);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            alarm(60);
            lg_error err = LG_ERROR_INIT;
            fault_store *f = fault_store_new(root.store);
            fault_store_set_hook(f, slow, NULL);
            lg_session_options o = LG_SESSION_OPTIONS_INIT;
            o.store = fault_store_handle(f);
            lg_session *s;
            static model m;
            model_init(&m, 0, 1);
            m.lazy = true;
            model_fill(&m, 7);
            lg_launch_options lo = LG_LAUNCH_OPTIONS_INIT;
            lo.flags = checked ? LG_LAUNCH_CHECK_SOURCES : 0;
            if (lg_session_open("root", &o, &s, &err) != LG_OK || model_launch(s, &m, 7, &lo, NULL, &err) != LG_OK) {
                _exit(9);
            }
            if (!checked) {
                s->deadline_ms = 10;
                if (lg_session_close(s, &err) != LG_ERR_TIMEOUT || strstr(err.message, "may be lost") == NULL) {
                    _exit(8);
                }
            }
            exit(0);
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
        assert_int_equal(newest(root.store), 7);
        root_drop(&root);
    }
}

static atomic_int alarms;
static pthread_t trainer;
static atomic_bool elsewhere;

static void on_alarm(int number)
{
    (void)number;
    alarms++;
    if (!pthread_equal(pthread_self(), trainer)) {
        elsewhere = true;
    }
}

static void k20_signals_while_staging_go_to_the_trainer_and_disturb_nothing(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    lg_error err = LG_ERROR_INIT;
    lg_session *s = open_alone(root.path, &err);
    assert_non_null(s);
    trainer = pthread_self();
    struct sigaction catch = {.sa_handler = on_alarm}, before; /* no SA_RESTART */
    sigemptyset(&catch.sa_mask);
    assert_int_equal(sigaction(SIGALRM, &catch, &before), 0);
    const suseconds_t pause_us = in_brief() ? 50000 : 500;
    const struct itimerval often = {{0, pause_us}, {0, pause_us}}, never = {{0, 0}, {0, 0}};
    assert_int_equal(setitimer(ITIMER_REAL, &often, NULL), 0);
    model m;
    model_init(&m, 0, 1);
    m.lazy = true;
    for (uint64_t step = 1; step <= 60; step++) {
        model_fill(&m, step);
        assert_int_equal(model_launch(s, &m, step, NULL, NULL, &err), LG_OK);
        assert_int_equal(lg_session_fence(s, 60000, &err), LG_OK);
    }
    lg_save_info info;
    assert_int_equal(lg_session_wait(s, 60000, &info, &err), LG_OK);
    while (alarms < 20) {
        pause();
    }
    setitimer(ITIMER_REAL, &never, NULL);
    sigaction(SIGALRM, &before, NULL);
    assert_int_equal(info.step, 60);
    assert_false(elsewhere);
    assert_int_equal(lg_session_close(s, &err), LG_OK);
    assert_int_equal(newest(root.store), 60);
    root_drop(&root);
}

/* ------------------------------------------------------- what is not to be had */

static void k06_without_any_thread_the_launch_does_all_the_work_itself(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    lg_error err = LG_ERROR_INIT;
    for (int windowed = 0; windowed < 2; windowed++) {
        for (uint64_t n = 0; n < 8; n++) { /* so many threads can be had */
            lg_session *s = open_alone(root.path, &err);
            assert_non_null(s);
            s->staging_bytes = windowed ? 64 : 0; /* fits nothing */
            model m;
            model_init(&m, 0, 1);
            m.lazy = true;
            const uint64_t step = 1 + n / 2 + 10 * (uint64_t)windowed;
            model_fill(&m, step);
            lg_launch_options o = LG_LAUNCH_OPTIONS_INIT;
            o.flags = n % 2 == 0 ? LG_LAUNCH_CHECK_SOURCES : 0;
            o.lazy_threads = 3;
            threads_left = (int)n / 2;
            lg_launch_info info;
            assert_int_equal(model_launch(s, &m, step, &o, &info, &err), LG_OK);
            threads_left = INT32_MAX;
            assert_int_equal(info.windowed, windowed);
            assert_int_equal(lg_session_fence(s, 60000, &err), LG_OK);
            assert_int_equal(lg_session_close(s, &err), LG_OK);
            assert_int_equal(newest(root.store), step);
        }
    }
    root_drop(&root);
}

static void k06_a_deadline_of_any_length_is_one(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    lg_error err = LG_ERROR_INIT;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = root.store;
    o.deadline_ms = UINT64_MAX;
    lg_session *s;
    assert_int_equal(lg_session_open("root", &o, &s, &err), LG_OK);
    model m;
    model_init(&m, 0, 1);
    m.lazy = true;
    for (uint64_t step = 1; step <= 20; step++) {
        model_fill(&m, step);
        assert_int_equal(model_launch(s, &m, step, NULL, NULL, &err), LG_OK);
        assert_int_equal(lg_session_fence(s, UINT64_MAX - step, &err), LG_OK);
        lg_save_info info;
        assert_int_equal(lg_session_wait(s, step % 2 == 0 ? UINT64_MAX : 0, &info, &err), LG_OK);
        assert_int_equal(info.step, step);
    }
    assert_int_equal(lg_session_close(s, &err), LG_OK);
    assert_int_equal(newest(root.store), 20);
    root_drop(&root);
}

/* ------------------------------------------------------------------ windows */

#define PIECE ((size_t)1 << 20)

static const lg_save *last_save; /* valid until it is settled */

static lg_status launch_pieces(lg_session *s, uint64_t step, uint8_t *const *data, size_t n, uint32_t lazy,
                               const lg_launch_options *o, lg_launch_info *info, lg_error *err)
{
    lg_save *save;
    lg_status st = lg_save_begin(s, step, NULL, &save, err);
    for (size_t i = 0; i < n && st == LG_OK; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%zu", i);
        const uint64_t shape[] = {PIECE};
        lg_tensor t = LG_TENSOR_INIT;
        t.name = name, t.dtype = LG_U8, t.ndim = 1, t.shape = shape, t.data = data[i];
        t.flags = (lazy >> i & 1) != 0 ? LG_TENSOR_LAZY : 0;
        st = lg_save_tensor(save, &t, err);
    }
    last_save = save;
    return lg_save_launch(save, o, info, err);
}

static void k07_the_cap_holds_for_copies_and_windows_together_and_checks_take_no_copy_for_a_source(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    lg_error err = LG_ERROR_INIT;
    lg_session_options so = LG_SESSION_OPTIONS_INIT;
    so.store = root.store;
    so.staging_bytes = 5 * PIECE;
    lg_session *s;
    assert_int_equal(lg_session_open("root", &so, &s, &err), LG_OK);
    uint8_t *data[12];
    for (size_t i = 0; i < 12; i++) {
        data[i] = malloc(PIECE);
        assert_non_null(data[i]);
        memset(data[i], (int)i + 1, PIECE);
    }
    lg_launch_options o = LG_LAUNCH_OPTIONS_INIT;
    o.flags = LG_LAUNCH_CHECK_SOURCES;
    lg_launch_info info;
    lg_session_status status;
    for (uint64_t step = 1; step <= 6; step++) {
        const size_t n = step % 2 == 1 ? 4 : 12; /* fits, and does not */
        const uint32_t lazy = step % 3 == 0 ? 0xfff : 0x5a5;
        assert_int_equal(launch_pieces(s, step, data, n, lazy, &o, &info, &err), LG_OK);
        assert_int_equal(info.windowed, n == 12);
        const uint64_t lazies = (uint64_t)__builtin_popcount(lazy & ((1u << n) - 1));
        assert_int_equal(info.bytes_lazy, lazies * PIECE);
        assert_int_equal(info.bytes_staged, (n - lazies) * PIECE);
        assert_int_equal(lg_session_get_status(s, &status, &err), LG_OK);
        if (n == 12) { /* what is left of the cap is for the windows */
            assert_true(status.staging_bytes + last_save->buffer_bytes <= so.staging_bytes);
        }
        lg_status st = lg_session_fence(s, 60000, &err);
        if (st != LG_OK) {
            fail_msg("step %llu: %s", (unsigned long long)step, err.message);
        }
        assert_int_equal(lg_session_wait(s, 60000, NULL, &err), LG_OK);
    }
    assert_int_equal(lg_session_close(s, &err), LG_OK);
    for (size_t i = 0; i < 12; i++) {
        free(data[i]);
    }
    root_drop(&root);
}

int main(void)
{
    atexit(leave);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k06_any_operation_that_fails_is_told_on_all_ranks_in_the_same_words),
        cmocka_unit_test(k01_k06_one_rank_that_dies_at_any_operation_loses_nothing_and_holds_nobody),
        cmocka_unit_test(k06_ranks_that_close_at_once_learn_the_cause_from_the_rank_that_failed),
        cmocka_unit_test(k01_k06_a_disk_too_full_for_the_cause_makes_room_for_it),
        cmocka_unit_test(k06_a_key_value_store_that_fails_fails_the_save_on_all_ranks_alike),
        cmocka_unit_test(k04_calls_in_any_order_with_failures_lose_nothing_that_was_reported),
        cmocka_unit_test(k04_f061_k03_at_any_time_the_newest_there_is_whole_while_the_background_commits_and_removes),
        cmocka_unit_test(k06_f094_k20_a_child_of_fork_exits_at_once_whatever_the_parent_saves),
        cmocka_unit_test(k04_f067_f068_the_end_of_a_program_waits_for_what_a_closed_session_left),
        cmocka_unit_test(k20_signals_while_staging_go_to_the_trainer_and_disturb_nothing),
        cmocka_unit_test(k06_without_any_thread_the_launch_does_all_the_work_itself),
        cmocka_unit_test(k06_a_deadline_of_any_length_is_one),
        cmocka_unit_test(k07_the_cap_holds_for_copies_and_windows_together_and_checks_take_no_copy_for_a_source),
    };
    cmocka_set_test_filter(getenv("LASTGOOD_TEST")); /* a pattern */
    return cmocka_run_group_tests_name("background", tests, NULL, NULL);
}
