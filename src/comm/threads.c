/* SPDX-License-Identifier: Apache-2.0 */

/* Ranks that are threads of one process. A call has two phases: all arrive and
 * publish where their data is; then each copies what it wants from the others'
 * memory, without the lock; and nobody returns before all have copied. So one
 * slot a rank is enough, and data is copied once.
 *
 * Arriving can fail: a rank is late, gone or in another call. Then the hub is
 * broken for all ranks, with one text. Once all have arrived nobody is waited
 * for but threads that copy memory, so the second phase needs no deadline. */

#include "base/mem.h"
#include "comm/comm.h"
#include "comm/text.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

typedef struct slot {
    uint64_t seq; /* calls that this rank has entered */
    bool gone;    /* its handle was freed */
    lg__comm_op op;
    uint32_t root;
    const void *data; /* all-gather, broadcast */
    size_t bytes;
    const void *const *send; /* all-to-all */
    const size_t *send_bytes;
} slot;

typedef struct hub {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t size, handles;
    uint32_t arrived, left; /* of the call going on */
    uint64_t opened;        /* calls at which all have arrived */
    uint64_t closed;        /* calls that all have left */
    uint64_t copy_failed;   /* the call in which a rank could not copy, 0 if none */
    lg_error broken;        /* LG_OK until then */
    slot slots[];
} hub;

typedef struct member {
    hub *hub;
    uint32_t rank;
    uint64_t seq;
} member;

static void hub_break(hub *h, const lg_error *why)
{
    if (h->broken.status == LG_OK) {
        h->broken = *why;
    }
    pthread_cond_broadcast(&h->changed);
}

typedef struct absent {
    const hub *hub;
    uint64_t seq;
} absent;

static bool is_absent(const void *arg, uint32_t r)
{
    const absent *a = arg;
    return a->hub->slots[r].seq < a->seq;
}

static bool is_gone(const void *arg, uint32_t r)
{
    const absent *a = arg;
    return a->hub->slots[r].gone;
}

/* Waiting for a rank that will never come is pointless: breaks the hub. */
static void check_gone(hub *h, const member *m)
{
    absent a = {h, m->seq};
    char ranks[LG__COMM_RANKS_TEXT], call[LG__COMM_CALL_TEXT];
    int first;
    lg__comm_ranks_text(h->size, is_gone, &a, ranks, &first);
    if (first < 0) {
        return;
    }
    const slot *s = &h->slots[m->rank];
    lg_error why;
    lg_error_set(&why, LG_ERR_COMM, "%s left (freed its communicator) while rank %" PRIu32 " waited in %s", ranks,
                 m->rank, lg__comm_call_text(s->op, s->root, s->seq, call));
    why.rank = first;
    hub_break(h, &why);
}

static void check_same_call(hub *h, const member *m)
{
    const slot *mine = &h->slots[m->rank];
    for (uint32_t r = 0; r < h->size; r++) {
        const slot *s = &h->slots[r];
        if (s->seq == mine->seq && (s->op != mine->op || s->root != mine->root)) {
            char a[LG__COMM_CALL_TEXT], b[LG__COMM_CALL_TEXT];
            lg_error why;
            lg_error_set(&why, LG_ERR_CONFLICT, "rank %" PRIu32 " called %s, but rank %" PRIu32 " called %s", m->rank,
                         lg__comm_call_text(mine->op, mine->root, mine->seq, a), r,
                         lg__comm_call_text(s->op, s->root, s->seq, b));
            hub_break(h, &why);
            return;
        }
    }
}

static void time_out(hub *h, const member *m, uint64_t deadline_ms)
{
    absent a = {h, m->seq};
    const slot *s = &h->slots[m->rank];
    char ranks[LG__COMM_RANKS_TEXT], call[LG__COMM_CALL_TEXT];
    int first;
    lg__comm_ranks_text(h->size, is_absent, &a, ranks, &first);
    lg_error why;
    lg_error_set(&why, LG_ERR_TIMEOUT, "%s did not arrive within %" PRIu64 " ms (rank %" PRIu32 " waited in %s)", ranks,
                 deadline_ms, m->rank, lg__comm_call_text(s->op, s->root, s->seq, call));
    why.rank = first;
    hub_break(h, &why);
}

/* No deadline lies further ahead than a century. */
static struct timespec deadline_at(uint64_t deadline_ms)
{
    const uint64_t most_ms = UINT64_C(100) * 366 * 86400 * 1000;
    uint64_t ms = deadline_ms < most_ms ? deadline_ms : most_ms;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += (time_t)(ms / 1000);
    t.tv_nsec += (long)(ms % 1000) * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

/* First phase: publishes `s` and waits for all. On success every rank's slot
 * holds still until this rank calls leave. */
static lg_status arrive(member *m, slot s, uint64_t deadline_ms, lg_error *err)
{
    hub *h = m->hub;
    struct timespec until = deadline_at(deadline_ms);
    pthread_mutex_lock(&h->lock);
    s.seq = ++m->seq;
    if (h->broken.status == LG_OK) {
        h->slots[m->rank] = s;
        check_same_call(h, m);
    } else {
        /* Decided while this rank was elsewhere: not its own wait that failed. */
        lg_error_set(err, LG_ERR_COMM, "%s", h->broken.message);
        err->rank = h->broken.rank;
        pthread_mutex_unlock(&h->lock);
        return LG_ERR_COMM;
    }
    if (h->broken.status == LG_OK && ++h->arrived == h->size) {
        h->arrived = 0;
        h->opened = m->seq;
        pthread_cond_broadcast(&h->changed);
    }
    while (h->opened < m->seq && h->broken.status == LG_OK) {
        check_gone(h, m);
        if (h->broken.status != LG_OK) {
            break;
        }
        if (pthread_cond_timedwait(&h->changed, &h->lock, &until) == ETIMEDOUT && h->opened < m->seq &&
            h->broken.status == LG_OK) {
            time_out(h, m, deadline_ms);
        }
    }
    /* Nothing breaks the hub between opening and leaving but a failed copy, of
     * which leave tells. */
    bool open = h->opened >= m->seq;
    if (!open) {
        *err = h->broken;
    }
    pthread_mutex_unlock(&h->lock);
    return open ? LG_OK : err->status;
}

/* Second phase ends: waits until all have copied. One rank's failure to copy
 * fails the call on all. */
static lg_status leave(member *m, lg_status st, lg_error *err)
{
    hub *h = m->hub;
    pthread_mutex_lock(&h->lock);
    if (st != LG_OK) {
        char call[LG__COMM_CALL_TEXT];
        const slot *s = &h->slots[m->rank];
        lg_error_wrap(err, "rank %" PRIu32 " failed in %s", m->rank, lg__comm_call_text(s->op, s->root, s->seq, call));
        err->rank = (int)m->rank;
        h->copy_failed = m->seq;
        if (h->size > 1) { /* one rank alone is never out of step */
            hub_break(h, err);
        }
    }
    if (++h->left == h->size) {
        h->left = 0;
        h->closed = m->seq;
        pthread_cond_broadcast(&h->changed);
    }
    while (h->closed < m->seq) {
        pthread_cond_wait(&h->changed, &h->lock);
    }
    if (st == LG_OK && h->copy_failed == m->seq) {
        *err = h->broken;
        err->status = st = LG_ERR_PEER;
    }
    pthread_mutex_unlock(&h->lock);
    return st;
}

/* ------------------------------------------------------------------- calls */

static lg_status threads_barrier(void *ctx, uint64_t deadline_ms, lg_error *err)
{
    member *m = ctx;
    LG__TRY(arrive(m, (slot){.op = LG__COMM_BARRIER}, deadline_ms, err));
    return leave(m, LG_OK, err);
}

static lg_status copy_all(const hub *h, void **out, lg_error *err)
{
    size_t total = 0;
    for (uint32_t r = 0; r < h->size; r++) {
        LG__RETURN_IF(__builtin_add_overflow(total, h->slots[r].bytes, &total), err, LG_ERR_LIMIT,
                      "sizes add up to more than the address space");
    }
    uint8_t *all = lg__malloc(total);
    if (all == NULL) {
        return lg__nomem(err);
    }
    size_t at = 0;
    for (uint32_t r = 0; r < h->size; r++) {
        if (h->slots[r].bytes > 0) {
            memcpy(all + at, h->slots[r].data, h->slots[r].bytes);
        }
        at += h->slots[r].bytes;
    }
    *out = all;
    return LG_OK;
}

static lg_status threads_all_gather(void *ctx, const void *data, size_t bytes, void **all, size_t *sizes,
                                    uint64_t deadline_ms, lg_error *err)
{
    member *m = ctx;
    hub *h = m->hub;
    LG__TRY(arrive(m, (slot){.op = LG__COMM_ALL_GATHER, .data = data, .bytes = bytes}, deadline_ms, err));
    void *copy = NULL;
    lg_status st = copy_all(h, &copy, err);
    if (st == LG_OK) {
        for (uint32_t r = 0; r < h->size; r++) {
            sizes[r] = h->slots[r].bytes;
        }
    }
    st = leave(m, st, err);
    if (st != LG_OK) {
        lg__free(copy);
        return st;
    }
    *all = copy;
    return LG_OK;
}

static lg_status threads_broadcast(void *ctx, void **data, size_t *bytes, uint32_t root, uint64_t deadline_ms,
                                   lg_error *err)
{
    member *m = ctx;
    slot s = {.op = LG__COMM_BROADCAST, .root = root};
    if (m->rank == root) {
        s.data = *data;
        s.bytes = *bytes;
    }
    LG__TRY(arrive(m, s, deadline_ms, err));
    void *copy = NULL;
    size_t n = m->hub->slots[root].bytes;
    lg_status st = LG_OK;
    if (m->rank != root) {
        copy = lg__memdup(m->hub->slots[root].data, n);
        st = copy == NULL ? lg__nomem(err) : LG_OK;
    }
    st = leave(m, st, err);
    if (st != LG_OK) {
        lg__free(copy);
        return st;
    }
    if (m->rank != root) {
        *data = copy;
        *bytes = n;
    }
    return LG_OK;
}

static lg_status threads_all_to_all(void *ctx, const void *const *send, const size_t *send_bytes, void **recv,
                                    size_t *recv_bytes, uint64_t deadline_ms, lg_error *err)
{
    member *m = ctx;
    hub *h = m->hub;
    LG__TRY(arrive(m, (slot){.op = LG__COMM_ALL_TO_ALL, .send = send, .send_bytes = send_bytes}, deadline_ms, err));
    lg_status st = LG_OK;
    void **got = lg__calloc(h->size, sizeof *got);
    size_t *got_bytes = lg__calloc(h->size, sizeof *got_bytes);
    if (got == NULL || got_bytes == NULL) {
        st = lg__nomem(err);
    }
    for (uint32_t r = 0; st == LG_OK && r < h->size; r++) {
        got_bytes[r] = h->slots[r].send_bytes[m->rank];
        if (got_bytes[r] > 0) {
            got[r] = lg__memdup(h->slots[r].send[m->rank], got_bytes[r]);
            st = got[r] == NULL ? lg__nomem(err) : LG_OK;
        }
    }
    st = leave(m, st, err);
    for (uint32_t r = 0; r < h->size; r++) {
        if (st == LG_OK) {
            recv[r] = got[r];             /* NOLINT(clang-analyzer-core.NullDereference): leave keeps a failure */
            recv_bytes[r] = got_bytes[r]; /* NOLINT(clang-analyzer-core.NullDereference): likewise */
        } else if (got != NULL) {
            lg__free(got[r]);
        }
    }
    lg__free(got);
    lg__free(got_bytes);
    return st;
}

/* ------------------------------------------------------------ make and free */

static void hub_free(hub *h)
{
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->lock);
    lg__free(h);
}

static void threads_destroy(void *ctx)
{
    member *m = ctx;
    hub *h = m->hub;
    pthread_mutex_lock(&h->lock);
    h->slots[m->rank].gone = true;
    bool last = --h->handles == 0;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
    if (last) {
        hub_free(h);
    }
    lg__free(m);
}

static const lg_comm_ops threads_ops = {
    .version = LG_COMM_OPS_VERSION,
    .barrier = threads_barrier,
    .all_gather = threads_all_gather,
    .broadcast = threads_broadcast,
    .all_to_all = threads_all_to_all,
    .destroy = threads_destroy,
};

static hub *hub_new(uint32_t n)
{
    size_t bytes;
    if (__builtin_mul_overflow((size_t)n, sizeof(slot), &bytes) || __builtin_add_overflow(bytes, sizeof(hub), &bytes)) {
        return NULL;
    }
    hub *h = lg__calloc(1, bytes);
    if (h == NULL) {
        return NULL;
    }
    h->size = n;
    h->broken.rank = -1;
    pthread_mutex_init(&h->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&h->changed, &attr);
    pthread_condattr_destroy(&attr);
    return h;
}

static lg_status member_new(hub *h, uint32_t rank, lg_comm **out, lg_error *err)
{
    member *m = lg__calloc(1, sizeof *m);
    if (m == NULL) {
        return lg__nomem(err);
    }
    m->hub = h;
    m->rank = rank;
    lg_status st = lg_comm_create(&threads_ops, m, rank, h->size, out, err);
    if (st != LG_OK) {
        lg__free(m);
        return st;
    }
    h->handles++;
    return LG_OK;
}

lg_status lg_comm_threads_create(uint32_t n, lg_comm **out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(n == 0 || out == NULL, err, LG_ERR_INVALID,
                  "lg_comm_threads_create: at least one rank and a place for it");
    hub *h = hub_new(n);
    lg_comm **made = lg__calloc(n, sizeof(lg_comm *));
    lg_status st = h == NULL || made == NULL ? lg__nomem(err) : LG_OK;
    uint32_t done = 0;
    while (st == LG_OK && done < n) {
        st = member_new(h, done, &made[done], err);
        done += st == LG_OK;
    }
    if (st == LG_OK) {
        memcpy(out, made, n * sizeof(lg_comm *));
    } else if (done > 0) {
        for (uint32_t r = 0; r < done; r++) {
            lg_comm_free(made[r]); /* the last one takes the hub along */
        }
    } else if (h != NULL) {
        hub_free(h);
    }
    lg__free(made);
    return st;
}
