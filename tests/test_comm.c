/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "comm/comm.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define LONG_MS UINT64_C(60000)
#define SHORT_MS UINT64_C(1000)
#define MAX_RANKS 8

/* ------------------------------------------------------------- ranks as threads */

typedef struct rank {
    lg_comm *comm;
    uint32_t r, n;
    void (*run)(struct rank *me);
    void *shared;
    /* what the thread found; asserted by the main thread */
    lg_status st;
    lg_error err;
    uint64_t wrong;
    pthread_t thread;
} rank;

static void *rank_main(void *arg)
{
    rank *me = arg;
    me->run(me);
    return NULL;
}

static void ranks_make(rank *ranks, uint32_t n, void (*run)(rank *me), void *shared)
{
    lg_comm *comms[MAX_RANKS];
    lg_error err;
    assert_int_equal(lg_comm_threads_create(n, comms, &err), LG_OK);
    for (uint32_t r = 0; r < n; r++) {
        ranks[r] = (rank){.comm = comms[r], .r = r, .n = n, .run = run, .shared = shared};
        ranks[r].err.rank = -1;
    }
}

static void rank_start(rank *me) { assert_int_equal(pthread_create(&me->thread, NULL, rank_main, me), 0); }

static void rank_join(rank *me) { assert_int_equal(pthread_join(me->thread, NULL), 0); }

static void ranks_free(rank *ranks, uint32_t n)
{
    for (uint32_t r = 0; r < n; r++) {
        lg_comm_free(ranks[r].comm);
    }
}

/* All ranks run; communicators stay. */
static void ranks_run(rank *ranks, uint32_t n)
{
    for (uint32_t r = 0; r < n; r++) {
        rank_start(&ranks[r]);
    }
    for (uint32_t r = 0; r < n; r++) {
        rank_join(&ranks[r]);
    }
}

/* --------------------------------------- the same functions, given by a caller */

static lg_status caller_barrier(void *ctx, uint64_t ms, lg_error *err) { return lg__comm_barrier(ctx, ms, err); }

static lg_status caller_all_gather(void *ctx, const void *data, size_t bytes, void **all, size_t *sizes, uint64_t ms,
                                   lg_error *err)
{
    return lg__comm_all_gather(ctx, data, bytes, all, sizes, ms, err);
}

static lg_status caller_broadcast(void *ctx, void **data, size_t *bytes, uint32_t root, uint64_t ms, lg_error *err)
{
    return lg__comm_broadcast(ctx, data, bytes, root, ms, err);
}

static lg_status caller_all_to_all(void *ctx, const void *const *send, const size_t *send_bytes, void **recv,
                                   size_t *recv_bytes, uint64_t ms, lg_error *err)
{
    return lg__comm_all_to_all(ctx, send, send_bytes, recv, recv_bytes, ms, err);
}

static void caller_destroy(void *ctx) { lg_comm_free(ctx); }

static const lg_comm_ops caller_ops = {LG_COMM_OPS_VERSION, caller_barrier,    caller_all_gather,
                                       caller_broadcast,    caller_all_to_all, caller_destroy};

static void ranks_wrap(rank *ranks, uint32_t n)
{
    for (uint32_t r = 0; r < n; r++) {
        lg_comm *outer;
        assert_int_equal(lg_comm_create(&caller_ops, ranks[r].comm, r, n, &outer, NULL), LG_OK);
        ranks[r].comm = outer;
    }
}

/* ------------------------------------------------------------------ contents */

/* Byte i of what `from` sends `to` in round k. */
static uint8_t content(uint32_t from, uint32_t to, uint64_t k, size_t i)
{
    return (uint8_t)(from * 31u + to * 17u + k * 7u + i + (i >> 8));
}

static size_t length(uint32_t from, uint32_t to, uint64_t k, size_t unit)
{
    return (from + 2 * to + k) % 3 * unit; /* a third of them empty */
}

static void *fill(uint32_t from, uint32_t to, uint64_t k, size_t bytes)
{
    uint8_t *p = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i++) {
        p[i] = content(from, to, k, i);
    }
    return p;
}

static uint64_t count_wrong(const uint8_t *p, uint32_t from, uint32_t to, uint64_t k, size_t bytes)
{
    uint64_t wrong = 0;
    for (size_t i = 0; i < bytes; i++) {
        wrong += p[i] != content(from, to, k, i);
    }
    return wrong;
}

static void try_all_gather(rank *me, uint64_t k, size_t unit)
{
    size_t mine = length(me->r, 0, k, unit);
    size_t sizes[MAX_RANKS];
    void *data = fill(me->r, 0, k, mine), *all = NULL;
    me->st = lg__comm_all_gather(me->comm, data, mine, &all, sizes, LONG_MS, &me->err);
    free(data);
    if (me->st != LG_OK) {
        return;
    }
    const uint8_t *at = all;
    for (uint32_t r = 0; r < me->n; r++) {
        me->wrong += sizes[r] != length(r, 0, k, unit);
        me->wrong += count_wrong(at, r, 0, k, sizes[r]);
        at += sizes[r];
    }
    lg_free(all);
}

static void try_broadcast(rank *me, uint64_t k, size_t unit)
{
    uint32_t root = (uint32_t)(k % me->n);
    size_t bytes = me->r == root ? length(root, 1, k, unit) : 12345;
    void *data = me->r == root ? fill(root, 1, k, bytes) : NULL, *given = data;
    me->st = lg__comm_broadcast(me->comm, &data, &bytes, root, LONG_MS, &me->err);
    if (me->st == LG_OK) {
        me->wrong += bytes != length(root, 1, k, unit);
        me->wrong += count_wrong(data, root, 1, k, bytes);
        me->wrong += me->r == root && data != given;
    }
    free(data);
}

static void try_all_to_all(rank *me, uint64_t k, size_t unit)
{
    void *send[MAX_RANKS], *recv[MAX_RANKS];
    size_t send_bytes[MAX_RANKS], recv_bytes[MAX_RANKS];
    for (uint32_t r = 0; r < me->n; r++) {
        send_bytes[r] = length(me->r, r, k, unit);
        send[r] = fill(me->r, r, k, send_bytes[r]);
        recv[r] = &recv; /* must be overwritten */
    }
    me->st = lg__comm_all_to_all(me->comm, (const void *const *)send, send_bytes, recv, recv_bytes, LONG_MS, &me->err);
    for (uint32_t r = 0; r < me->n; r++) {
        free(send[r]);
        if (me->st == LG_OK) {
            me->wrong += recv_bytes[r] != length(r, me->r, k, unit);
            me->wrong += (recv[r] == NULL) != (recv_bytes[r] == 0);
            me->wrong += count_wrong(recv[r], r, me->r, k, recv_bytes[r]);
            lg_free(recv[r]);
        }
    }
}

typedef struct rounds {
    uint64_t n;
    size_t unit;
} rounds;

static void run_rounds(rank *me)
{
    const rounds *p = me->shared;
    for (uint64_t k = 0; k < p->n && me->st == LG_OK; k++) {
        switch (k % 4) {
        case 0:
            try_all_gather(me, k, p->unit);
            break;
        case 1:
            try_broadcast(me, k, p->unit);
            break;
        case 2:
            try_all_to_all(me, k, p->unit);
            break;
        default:
            me->st = lg__comm_barrier(me->comm, LONG_MS, &me->err);
            break;
        }
    }
}

static void check_rounds(uint32_t n, rounds p, bool wrap)
{
    rank ranks[MAX_RANKS];
    ranks_make(ranks, n, run_rounds, &p);
    if (wrap) {
        ranks_wrap(ranks, n);
    }
    ranks_run(ranks, n);
    for (uint32_t r = 0; r < n; r++) {
        if (ranks[r].st != LG_OK) {
            print_error("size %u, rank %u: %s\n", n, r, ranks[r].err.message);
        }
        assert_int_equal(ranks[r].st, LG_OK);
        assert_int_equal(ranks[r].wrong, 0);
        assert_int_equal(lg_comm_rank(ranks[r].comm), r);
        assert_int_equal(lg_comm_size(ranks[r].comm), n);
    }
    ranks_free(ranks, n);
}

static void all_calls_move_the_bytes(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= MAX_RANKS; n++) {
        check_rounds(n, (rounds){12, 0}, false); /* zero length */
        check_rounds(n, (rounds){12, 1}, false);
        check_rounds(n, (rounds){100, 1000}, false); /* 100 in a row */
    }
    check_rounds(4, (rounds){4, (size_t)5 << 20}, false);
}

static void callers_functions_move_the_bytes(void **state)
{
    (void)state;
    check_rounds(1, (rounds){12, 10}, true);
    check_rounds(5, (rounds){100, 1000}, true);
}

static void single_moves_the_bytes(void **state)
{
    (void)state;
    rounds p = {40, 1000};
    rank me = {.n = 1, .run = run_rounds, .shared = &p};
    assert_int_equal(lg_comm_single_create(&me.comm, &me.err), LG_OK);
    run_rounds(&me);
    assert_int_equal(me.st, LG_OK);
    assert_int_equal(me.wrong, 0);
    assert_int_equal(lg_comm_rank(me.comm), 0);
    assert_int_equal(lg_comm_size(me.comm), 1);
    lg_comm_free(me.comm);
    lg_comm_free(NULL);
    assert_int_equal(lg_comm_rank(NULL), 0);
    assert_int_equal(lg_comm_size(NULL), 1);
}

/* ------------------------------------------------------------------- failures */

static void run_short_gather(rank *me)
{
    size_t sizes[MAX_RANKS];
    void *all = &sizes;
    me->st = lg__comm_all_gather(me->comm, "x", 1, &all, sizes, SHORT_MS, &me->err);
    me->wrong = me->st != LG_OK && all != &sizes; /* outputs on success only */
}

/* Linked with --wrap=pthread_cond_timedwait: the time is over when `expected`
 * threads wait, however long that takes. */
static struct {
    uint32_t expected, there;
} over;

int __real_pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *lock, const struct timespec *until);
int __wrap_pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *lock, const struct timespec *until);
int __wrap_pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *lock, const struct timespec *until)
{
    static _Thread_local bool counted;
    if (over.expected == 0) {
        return __real_pthread_cond_timedwait(c, lock, until);
    }
    over.there += !counted;
    counted = true;
    return over.there == over.expected ? ETIMEDOUT : pthread_cond_wait(c, lock);
}

static void a_late_rank_is_named(void **state)
{
    (void)state;
    rank ranks[5];
    ranks_make(ranks, 5, run_short_gather, NULL);
    over.expected = 3;
    over.there = 0;
    for (uint32_t r = 0; r < 5; r++) {
        if (r != 2 && r != 4) {
            rank_start(&ranks[r]);
        }
    }
    for (uint32_t r = 0; r < 5; r++) {
        if (r != 2 && r != 4) {
            rank_join(&ranks[r]);
            assert_int_equal(ranks[r].st, LG_ERR_TIMEOUT);
            assert_int_equal(ranks[r].err.status, LG_ERR_TIMEOUT);
            assert_int_equal(ranks[r].err.rank, 2);
            assert_non_null(strstr(ranks[r].err.message, "rank 2, 4 did not arrive within 1000 ms (rank "));
            assert_non_null(strstr(ranks[r].err.message, "waited in all-gather #1)"));
            assert_int_equal(ranks[r].wrong, 0);
        }
    }
    over.expected = 0;
    /* The late ones learn why, at once. */
    rank_start(&ranks[2]);
    rank_join(&ranks[2]);
    assert_int_equal(ranks[2].st, LG_ERR_COMM);
    assert_non_null(strstr(ranks[2].err.message, "rank 2, 4 did not arrive within 1000 ms"));
    assert_int_equal(ranks[2].err.rank, 2);
    ranks_free(ranks, 5);
}

static void many_late_ranks_are_counted(void **state)
{
    (void)state;
    enum { N = 4096 };
    lg_comm **comms = malloc(N * sizeof *comms);
    lg_error err;
    assert_int_equal(lg_comm_threads_create(N, comms, &err), LG_OK);
    assert_int_equal(lg__comm_barrier(comms[0], 0, &err), LG_ERR_TIMEOUT);
    assert_non_null(strstr(err.message, "rank 1, 2, 3,"));
    assert_non_null(strstr(err.message, ", 16 and 4079 more did not arrive within 0 ms"));
    for (uint32_t r = 0; r < N; r++) {
        lg_comm_free(comms[r]);
    }
    free(comms);
}

static void broken_stays_broken(void **state)
{
    (void)state;
    rank ranks[2];
    ranks_make(ranks, 2, NULL, NULL);
    lg_error err;
    assert_int_equal(lg__comm_barrier(ranks[0].comm, 0, &err), LG_ERR_TIMEOUT);
    size_t sizes[2], bytes = 0;
    void *p = NULL;
    const void *send[2] = {NULL, NULL};
    size_t send_bytes[2] = {0, 0};
    void *recv[2];
    for (uint32_t r = 0; r < 2; r++) {
        lg_comm *c = ranks[r].comm;
        lg_status st[4];
        lg_error errs[4];
        st[0] = lg__comm_barrier(c, LONG_MS, &errs[0]);
        st[1] = lg__comm_all_gather(c, NULL, 0, &p, sizes, LONG_MS, &errs[1]);
        st[2] = lg__comm_broadcast(c, &p, &bytes, 0, LONG_MS, &errs[2]);
        st[3] = lg__comm_all_to_all(c, send, send_bytes, recv, sizes, LONG_MS, &errs[3]);
        for (int i = 0; i < 4; i++) {
            assert_int_equal(st[i], LG_ERR_COMM);
            assert_int_equal(errs[i].rank, 1);
            assert_non_null(strstr(errs[i].message, "rank 1 did not arrive within 0 ms (rank 0 waited in barrier #1)"));
        }
    }
    ranks_free(ranks, 2);
}

static void run_other_call(rank *me)
{
    void *p = NULL;
    size_t bytes = 0, sizes[MAX_RANKS];
    if (me->r == 1) {
        me->st = lg__comm_broadcast(me->comm, &p, &bytes, *(uint32_t *)me->shared, LONG_MS, &me->err);
    } else if (*(uint32_t *)me->shared == 0) {
        me->st = lg__comm_all_gather(me->comm, NULL, 0, &p, sizes, LONG_MS, &me->err);
    } else {
        me->st = lg__comm_broadcast(me->comm, &p, &bytes, 0, LONG_MS, &me->err);
    }
}

static void different_calls_are_named(void **state)
{
    (void)state;
    for (uint32_t root = 0; root < 2; root++) { /* another call; the same with another root */
        rank ranks[3];
        ranks_make(ranks, 3, run_other_call, &root);
        ranks_run(ranks, 3);
        int conflicts = 0;
        for (uint32_t r = 0; r < 3; r++) {
            /* whoever was not waiting yet is told of it when it comes */
            assert_true(ranks[r].st == LG_ERR_CONFLICT || ranks[r].st == LG_ERR_COMM);
            conflicts += ranks[r].st == LG_ERR_CONFLICT;
            assert_non_null(strstr(ranks[r].err.message, "rank 1 called broadcast #1 from rank "));
            assert_non_null(strstr(ranks[r].err.message, root == 0 ? "called all-gather #1" : "#1 from rank 0"));
        }
        assert_true(conflicts >= 2);
        ranks_free(ranks, 3);
    }
}

static void run_barrier(rank *me) { me->st = lg__comm_barrier(me->comm, LONG_MS, &me->err); }

static void a_rank_that_left_is_named(void **state)
{
    (void)state;
    rank ranks[3];
    ranks_make(ranks, 3, run_barrier, NULL);
    ranks_run(ranks, 3);
    rank_start(&ranks[0]);
    rank_start(&ranks[2]);
    lg_comm_free(ranks[1].comm); /* before or while they wait */
    ranks[1].comm = NULL;
    for (uint32_t r = 0; r < 3; r += 2) {
        rank_join(&ranks[r]);
        assert_int_equal(ranks[r].st, LG_ERR_COMM);
        assert_int_equal(ranks[r].err.rank, 1);
        assert_non_null(strstr(ranks[r].err.message, "rank 1 left (freed its communicator) while rank "));
    }
    ranks_free(ranks, 3);
}

static void run_barriers_then_free(rank *me)
{
    for (int k = 0; k < 50 && me->st == LG_OK; k++) {
        me->st = lg__comm_barrier(me->comm, LONG_MS, &me->err);
    }
    lg_comm_free(me->comm);
    me->comm = NULL;
}

static void freeing_after_the_last_call_harms_nobody(void **state)
{
    (void)state;
    for (int k = 0; k < 20; k++) {
        rank ranks[4];
        ranks_make(ranks, 4, run_barriers_then_free, NULL);
        ranks_run(ranks, 4);
        for (uint32_t r = 0; r < 4; r++) {
            assert_int_equal(ranks[r].st, LG_OK);
        }
    }
}

static void run_gather_over_limit(rank *me)
{
    /* No memory behind it: the sum of sizes is refused before any is read. */
    size_t sizes[2] = {0, 0};
    void *all = NULL;
    me->st = lg__comm_all_gather(me->comm, &sizes, SIZE_MAX / 2 + 1, &all, sizes, LONG_MS, &me->err);
}

static void sizes_beyond_the_address_space_fail_on_all(void **state)
{
    (void)state;
    rank ranks[2];
    ranks_make(ranks, 2, run_gather_over_limit, NULL);
    ranks_run(ranks, 2);
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(ranks[r].st, LG_ERR_LIMIT);
        assert_non_null(strstr(ranks[r].err.message, "failed in all-gather #1"));
    }
    ranks_free(ranks, 2);
}

/* Each call with bytes between all, and how often all ranks together allocate in it. */
static void run_call_on_a_failing_heap(rank *me)
{
    const uint32_t call = *(const uint32_t *)me->shared;
    size_t sizes[3], bytes = 3, three[3] = {3, 3, 3};
    void *p = call == 1 && me->r == 0 ? (void *)(uintptr_t) "abc" : NULL, *recv[3] = {NULL, NULL, NULL};
    const void *send[3] = {"abc", "def", "ghi"};
    if (call == 0) {
        me->st = lg__comm_all_gather(me->comm, "abc", 3, &p, sizes, LONG_MS, &me->err);
    } else if (call == 1) {
        me->st = lg__comm_broadcast(me->comm, &p, &bytes, 0, LONG_MS, &me->err);
    } else {
        me->st = lg__comm_all_to_all(me->comm, send, three, recv, sizes, LONG_MS, &me->err);
    }
    /* outputs on success only */
    me->wrong = me->st != LG_OK && ((p != NULL && me->r != 0) || recv[0] != NULL || bytes != 3);
    for (uint32_t r = 0; r < 3; r++) {
        lg_free(recv[r]);
    }
    if (call == 0 || me->r != 0) {
        lg_free(p);
    }
}

static void memory_running_out_in_a_call_reaches_all_ranks(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t allocations;
        bool one_each;
    } calls[] = {{"failed in all-gather #1: out of memory", 3, true},
                 {"failed in broadcast #1 from rank 0: out of memory", 2, true},
                 {"failed in all-to-all #1: out of memory", 15, false}};
    for (uint32_t call = 0; call < 3; call++) {
        for (size_t after = 0; after <= calls[call].allocations; after++) {
            rank ranks[3];
            ranks_make(ranks, 3, run_call_on_a_failing_heap, &call);
            lg__mem_fail_after(after);
            ranks_run(ranks, 3);
            lg__mem_fail_after(SIZE_MAX);
            size_t ok = 0, out = 0, peer = 0;
            for (uint32_t r = 0; r < 3; r++) {
                ok += ranks[r].st == LG_OK;
                out += ranks[r].st == LG_ERR_NOMEM;
                peer += ranks[r].st == LG_ERR_PEER;
                assert_int_equal(ranks[r].wrong, 0);
                if (ranks[r].st != LG_OK) {
                    assert_non_null(strstr(ranks[r].err.message, calls[call].text));
                }
            }
            /* none, some or all have memory; never one alone goes on */
            const size_t short_of = calls[call].allocations - after;
            assert_int_equal(ok, short_of == 0 ? 3 : 0);
            assert_int_equal(out + peer, 3 - ok);
            if (calls[call].one_each) {
                assert_int_equal(out, short_of);
            } else {
                assert_true((out > 0) == (short_of > 0));
            }
            ranks_free(ranks, 3);
        }
    }
}

static void creation_survives_a_failing_heap(void **state)
{
    (void)state;
    for (size_t after = 0;; after++) {
        lg_comm *comms[3] = {NULL, NULL, NULL};
        lg_error err;
        lg__mem_fail_after(after);
        lg_status st = lg_comm_threads_create(3, comms, &err);
        lg__mem_fail_after(SIZE_MAX);
        if (st == LG_OK) {
            assert_true(after > 3);
            for (int r = 0; r < 3; r++) {
                lg_comm_free(comms[r]);
            }
            break;
        }
        assert_int_equal(st, LG_ERR_NOMEM);
        assert_null(comms[0]);
    }
}

/* ------------------------------------------------------- caller's own functions */

static void creation_checks_its_arguments(void **state)
{
    (void)state;
    lg_comm_ops ops = caller_ops;
    lg_comm *c = NULL;
    lg_error err;
    assert_int_equal(lg_comm_create(&ops, NULL, 2, 2, &c, &err), LG_ERR_INVALID);
    assert_non_null(strstr(err.message, "rank 2 is outside of a communicator of 2"));
    assert_int_equal(lg_comm_create(&ops, NULL, 7, 2, &c, &err), LG_ERR_INVALID);
    assert_int_equal(lg_comm_create(&ops, NULL, 0, 0, &c, &err), LG_ERR_INVALID);
    assert_int_equal(lg_comm_create(&ops, NULL, 0, UINT32_MAX, &c, &err), LG_ERR_LIMIT);
    assert_int_equal(lg_comm_create(NULL, NULL, 0, 1, &c, NULL), LG_ERR_INVALID);
    ops.version = 9;
    assert_int_equal(lg_comm_create(&ops, NULL, 0, 1, &c, &err), LG_ERR_INVALID);
    assert_non_null(strstr(err.message, "version is 9"));
    ops = caller_ops;
    ops.all_to_all = NULL;
    assert_int_equal(lg_comm_create(&ops, NULL, 0, 1, &c, &err), LG_ERR_INVALID);
    assert_int_equal(lg_comm_threads_create(0, &c, &err), LG_ERR_INVALID);
    assert_int_equal(lg_comm_single_create(NULL, &err), LG_ERR_INVALID);
    assert_null(c);
}

static lg_status silent_failure(void *ctx, uint64_t ms, lg_error *err)
{
    (void)ms, (void)err;
    return *(lg_status *)ctx;
}

static void an_error_without_a_text_gets_one(void **state)
{
    (void)state;
    lg_comm_ops ops = caller_ops;
    ops.barrier = silent_failure;
    ops.destroy = NULL;
    lg_status status = LG_ERR_TIMEOUT;
    lg_comm *c;
    lg_error err;
    assert_int_equal(lg_comm_create(&ops, &status, 0, 2, &c, &err), LG_OK);
    assert_int_equal(lg__comm_barrier(c, LONG_MS, &err), LG_ERR_TIMEOUT);
    assert_int_equal(err.status, LG_ERR_TIMEOUT);
    assert_string_equal(err.message, "barrier failed: deadline passed");
    status = LG_OK; /* too late: broken for good */
    assert_int_equal(lg__comm_barrier(c, LONG_MS, &err), LG_ERR_COMM);
    lg_comm_free(c);
}

static lg_status lying_all_gather(void *ctx, const void *data, size_t bytes, void **all, size_t *sizes, uint64_t ms,
                                  lg_error *err)
{
    (void)data, (void)ms, (void)err;
    int lie = *(int *)ctx;
    sizes[0] = lie == 1 ? bytes + 1 : bytes;
    sizes[1] = lie == 2 ? SIZE_MAX : 1;
    *all = lie == 3 ? NULL : malloc(bytes + 2);
    return LG_OK;
}

static void wrong_results_of_a_callers_function_are_refused(void **state)
{
    (void)state;
    for (int lie = 1; lie <= 3; lie++) {
        lg_comm_ops ops = caller_ops;
        ops.all_gather = lying_all_gather;
        ops.destroy = NULL;
        lg_comm *c;
        lg_error err;
        size_t sizes[2];
        void *all = NULL;
        assert_int_equal(lg_comm_create(&ops, &lie, 0, 2, &c, &err), LG_OK);
        assert_int_equal(lg__comm_all_gather(c, "abc", 3, &all, sizes, LONG_MS, &err), LG_ERR_COMM);
        assert_non_null(strstr(err.message, "all_gather gave a wrong result"));
        assert_null(all);
        lg_comm_free(c);
    }
}

static lg_status lying_broadcast(void *ctx, void **data, size_t *bytes, uint32_t root, uint64_t ms, lg_error *err)
{
    (void)ctx, (void)root, (void)ms, (void)err;
    *data = NULL;
    *bytes = 7;
    return LG_OK;
}

static void a_broadcast_without_the_data_is_refused(void **state)
{
    (void)state;
    lg_comm_ops ops = caller_ops;
    ops.broadcast = lying_broadcast;
    ops.destroy = NULL;
    lg_comm *c;
    lg_error err;
    char mine;
    void *data = &mine;
    size_t bytes = 1;
    assert_int_equal(lg_comm_create(&ops, NULL, 0, 2, &c, &err), LG_OK);
    assert_int_equal(lg__comm_broadcast(c, &data, &bytes, 1, LONG_MS, &err), LG_ERR_COMM);
    assert_string_equal(err.message, "the communicator's broadcast gave a wrong result: no data for 7 bytes");
    assert_true(data == &mine && bytes == 1);
    assert_int_equal(lg__comm_barrier(c, LONG_MS, &err), LG_ERR_COMM); /* broken for good */
    lg_comm_free(c);
}

static void a_broadcast_from_a_rank_outside_is_refused(void **state)
{
    (void)state;
    lg_comm *c;
    lg_error err;
    void *p = NULL;
    size_t bytes = 0;
    assert_int_equal(lg_comm_single_create(&c, &err), LG_OK);
    assert_int_equal(lg__comm_broadcast(c, &p, &bytes, 1, LONG_MS, &err), LG_ERR_INVALID);
    assert_string_equal(err.message, "broadcast from rank 1 of 1");
    lg_comm_free(c);
}

/* ----------------------------------------------------------------- agreement */

typedef struct opinion {
    lg_status status;
    const char *message;
    int rank, os_errno;
} opinion;

typedef struct agreement {
    opinion mine[4];
    lg_status status;
    const char *message;
    int rank, os_errno;
} agreement;

static void run_agree(rank *me)
{
    const opinion *o = &((const agreement *)me->shared)->mine[me->r];
    lg_error_set(&me->err, o->status, "%s", o->message != NULL ? o->message : "left over, no error");
    me->err.rank = o->rank;
    me->err.os_errno = o->os_errno;
    me->st = lg__comm_agree(me->comm, o->status, LONG_MS, &me->err);
}

static void one_ranks_error_reaches_all(void **state)
{
    (void)state;
    const opinion ok = {LG_OK, NULL, -1, 0};
    const opinion peer = {LG_ERR_PEER, "another rank failed", -1, 0};
    const agreement cases[] = {
        {{ok, ok, ok, ok}, LG_OK, "", -1, 0},
        {{ok, ok, {LG_ERR_NO_SPACE, "write shard: no space left", -1, 28}, ok},
         LG_ERR_NO_SPACE,
         "rank 2: write shard: no space left",
         2,
         28},
        {{ok, {LG_ERR_IO, "first", -1, 5}, {LG_ERR_NOMEM, "second", -1, 0}, ok}, LG_ERR_IO, "rank 1: first", 1, 5},
        {{peer, peer, ok, {LG_ERR_CORRUPT, "block 7", -1, 0}}, LG_ERR_CORRUPT, "rank 3: block 7", 3, 0},
        {{ok, peer, peer, ok}, LG_ERR_PEER, "rank 1: another rank failed", 1, 0},
        /* agreed on before, then wrapped: no second prefix */
        {{{LG_ERR_IO, "commit: rank 2: disk", 2, 5},
          {LG_ERR_IO, "commit: rank 2: disk", 2, 5},
          {LG_ERR_IO, "commit: rank 2: disk", 2, 5},
          {LG_ERR_IO, "commit: rank 2: disk", 2, 5}},
         LG_ERR_IO,
         "commit: rank 2: disk",
         2,
         5},
        /* a rank set without being in the text */
        {{ok, ok, ok, {LG_ERR_IO, "disk", 3, 5}}, LG_ERR_IO, "rank 3: disk", 3, 5},
        {{{LG_ERR_STATE, "", -1, 0}, ok, ok, ok}, LG_ERR_STATE, "rank 0: call not allowed now", 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        rank ranks[4];
        agreement a = cases[i];
        ranks_make(ranks, 4, run_agree, &a);
        ranks_run(ranks, 4);
        for (uint32_t r = 0; r < 4; r++) {
            assert_int_equal(ranks[r].st, a.status);
            assert_int_equal(ranks[r].err.status, a.status);
            assert_string_equal(ranks[r].err.message, a.message);
            assert_int_equal(ranks[r].err.rank, a.rank);
            assert_int_equal(ranks[r].err.os_errno, a.os_errno);
        }
        /* An agreed error is no fault of the communicator. */
        for (uint32_t r = 0; r < 4; r++) {
            ranks[r].run = run_barrier;
        }
        ranks_run(ranks, 4);
        for (uint32_t r = 0; r < 4; r++) {
            assert_int_equal(ranks[r].st, LG_OK);
        }
        ranks_free(ranks, 4);
    }
}

static void the_longest_message_travels(void **state)
{
    (void)state;
    char text[LG_ERROR_MESSAGE_MAX];
    memset(text, 'm', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    agreement a = {{{LG_OK, NULL, -1, 0}, {LG_ERR_IO, text, -1, 0}}, LG_ERR_IO, NULL, 1, 0};
    rank ranks[2];
    ranks_make(ranks, 2, run_agree, &a);
    ranks_run(ranks, 2);
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(ranks[r].st, LG_ERR_IO);
        assert_int_equal(strncmp(ranks[r].err.message, "rank 1: mmmm", 12), 0);
        assert_string_equal(ranks[r].err.message, ranks[0].err.message);
        assert_true(strlen(ranks[r].err.message) > LG_ERROR_MESSAGE_MAX - 8);
    }
    ranks_free(ranks, 2);
}

static void one_rank_alone_keeps_its_message(void **state)
{
    (void)state;
    lg_comm *c;
    lg_error err;
    assert_int_equal(lg_comm_single_create(&c, &err), LG_OK);
    lg_error_set(&err, LG_ERR_IO, "disk");
    assert_int_equal(lg__comm_agree(c, LG_ERR_IO, LONG_MS, &err), LG_ERR_IO);
    assert_string_equal(err.message, "disk");
    assert_int_equal(err.rank, -1);
    assert_int_equal(lg__comm_agree(c, LG_OK, LONG_MS, &err), LG_OK);
    lg_comm_free(c);
}

static void an_own_error_survives_a_broken_communicator(void **state)
{
    (void)state;
    rank ranks[2];
    lg_error err;
    ranks_make(ranks, 2, NULL, NULL);
    lg_error_set(&err, LG_ERR_NO_SPACE, "disk full");
    assert_int_equal(lg__comm_agree(ranks[0].comm, LG_ERR_NO_SPACE, 0, &err), LG_ERR_NO_SPACE);
    assert_non_null(strstr(err.message, "disk full (other ranks could not be told: rank 1 did not arrive"));
    lg_error_set(&err, LG_ERR_NO_SPACE, "disk full again");
    assert_int_equal(lg__comm_agree(ranks[0].comm, LG_ERR_NO_SPACE, 0, &err), LG_ERR_NO_SPACE);
    assert_string_equal(err.message, "disk full again");
    assert_int_equal(lg__comm_agree(ranks[0].comm, LG_OK, 0, &err), LG_ERR_COMM);
    assert_non_null(strstr(err.message, "rank 1 did not arrive"));
    ranks_free(ranks, 2);
}

static void garbage_is_no_error_report(void **state)
{
    (void)state;
    int lie = 0;
    lg_comm_ops ops = caller_ops;
    ops.all_gather = lying_all_gather; /* rank 1 "sends" one byte */
    ops.destroy = NULL;
    lg_comm *c;
    lg_error err;
    assert_int_equal(lg_comm_create(&ops, &lie, 0, 2, &c, &err), LG_OK);
    assert_int_equal(lg__comm_agree(c, LG_OK, LONG_MS, &err), LG_ERR_COMM);
    assert_string_equal(err.message, "rank 1 sent 1 bytes that are no error report");
    assert_int_equal(lg__comm_agree(c, LG_OK, LONG_MS, &err), LG_ERR_COMM);
    lg_comm_free(c);
}

#define NAMED(text, fn)                   \
    {                                     \
        .name = (text), .test_func = (fn) \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        NAMED("all calls move the bytes between 1 to 8 threads, empty, small, 5 MiB, 100 in a row",
              all_calls_move_the_bytes),
        NAMED("functions given by the caller move the bytes", callers_functions_move_the_bytes),
        NAMED("one process alone moves the bytes", single_moves_the_bytes),
        NAMED("K06: ranks that do not arrive are named on all others within the deadline", a_late_rank_is_named),
        NAMED("K06: of thousands of late ranks the first 16 are named, the rest counted", many_late_ranks_are_counted),
        NAMED("K06: after an error every call fails on every rank with the first reason", broken_stays_broken),
        NAMED("K06: ranks in different calls are named with their calls", different_calls_are_named),
        NAMED("K06: a rank that freed its communicator is named at once", a_rank_that_left_is_named),
        NAMED("freeing after the last call harms nobody, in any order", freeing_after_the_last_call_harms_nobody),
        NAMED("K16: sizes beyond the address space fail on all ranks", sizes_beyond_the_address_space_fail_on_all),
        NAMED("K06: memory running out in a call reaches all ranks", memory_running_out_in_a_call_reaches_all_ranks),
        NAMED("creation survives a failing heap", creation_survives_a_failing_heap),
        NAMED("K05: creation refuses a rank outside of the communicator and incomplete functions",
              creation_checks_its_arguments),
        NAMED("an error without a text gets one", an_error_without_a_text_gets_one),
        NAMED("wrong results of a caller's function are refused", wrong_results_of_a_callers_function_are_refused),
        NAMED("a caller's broadcast that gives no data is refused", a_broadcast_without_the_data_is_refused),
        NAMED("a broadcast from a rank outside is refused", a_broadcast_from_a_rank_outside_is_refused),
        NAMED("K06: one rank's error reaches all with the same status and text", one_ranks_error_reaches_all),
        NAMED("K06: the longest message travels between ranks", the_longest_message_travels),
        NAMED("one rank alone keeps its message without a prefix", one_rank_alone_keeps_its_message),
        NAMED("K06: a rank's own error survives a broken communicator", an_own_error_survives_a_broken_communicator),
        NAMED("garbage from another rank is no error report", garbage_is_no_error_report),
    };
    return cmocka_run_group_tests_name("comm", tests, NULL, NULL);
}
