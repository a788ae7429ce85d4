/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/mpi_exchange.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define FANOUT 4 /* of the tree that large results go down */

/* ------------------------------------------------------------------- verdicts */

static uint32_t parent_of(uint32_t r) { return (r - 1) / FANOUT; }

static bool descends(uint32_t r, uint32_t from)
{
    while (r > from) {
        r = parent_of(r);
    }
    return r == from;
}

static void set_last(lg__mpi_fabric *f, uint32_t which, const lg__mpi_call *c, uint32_t kind, lg_status status,
                     const lg_error *err)
{
    lg__mpi_message *m = &f->last[which];
    size_t n = strnlen(err->message, LG__MPI_INLINE_BYTES);
    m->h = lg__mpi_head_of(c, kind, n);
    m->h.status = (int32_t)status;
    m->h.rank = err->rank;
    memcpy(m->data, err->message, n);
}

/* Fire and forget: f->last stays as it is, and in memory, for good. */
static void send_last(lg__mpi_fabric *f, uint32_t which, uint32_t to, int tag)
{
    MPI_Request request;
    size_t n = sizeof(lg__mpi_head) + (size_t)f->last[which].h.bytes;
    if (MPI_Isend(&f->last[which], (int)n, MPI_BYTE, (int)to, tag, f->comm, &request) == MPI_SUCCESS) {
        MPI_Request_free(&request);
    }
}

/* Small messages need no partner, but some MPI calls to get going. */
static void push(const lg__mpi_fabric *f)
{
    for (int i = 0; i < 50; i++) {
        int flag;
        if (MPI_Iprobe(MPI_ANY_SOURCE, LG__MPI_TAG_PAIR, f->comm, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS) {
            return;
        }
        sched_yield();
    }
}

/* Rank 0 tells all; those `missing` hear LG_ERR_COMM, as do all who come after
 * a failure. */
static void send_verdict(lg__mpi_call *c, lg_status status, bool (*missing)(const void *arg, uint32_t r),
                         const void *arg, const lg_error *err)
{
    lg__mpi_fabric *f = c->f;
    set_last(f, 0, c, LG__MPI_VERDICT, status, err);
    set_last(f, 1, c, LG__MPI_VERDICT, LG_ERR_COMM, err);
    for (uint32_t r = 1; r < f->size; r++) {
        send_last(f, missing != NULL && missing(arg, r), r, LG__MPI_TAG_DOWN);
    }
    c->told = true;
    push(f);
}

lg_status lg__mpi_break_off(lg__mpi_call *c, lg_error *err)
{
    lg__mpi_fabric *f = c->f;
    lg_status st = err->status;
    f->broken = true;
    if (c->told) {
        return st;
    }
    bool own = st != LG_ERR_TIMEOUT && st != LG_ERR_CONFLICT && st != LG_ERR_PEER;
    if (own) {
        char text[LG__COMM_CALL_TEXT];
        lg_error_wrap(err, "rank %" PRIu32 " failed in %s", f->rank, lg__mpi_call_text(c, text));
        err->rank = (int)f->rank;
    }
    if (f->rank == 0) {
        send_verdict(c, own ? LG_ERR_PEER : st, NULL, NULL, err);
        return st;
    }
    set_last(f, 0, c, LG__MPI_FAILED, LG_ERR_PEER, err);
    set_last(f, 1, c, LG__MPI_VERDICT, LG_ERR_PEER, err);
    send_last(f, 0, 0, LG__MPI_TAG_FAILED);
    /* In a timeout the partners of an all-to-all wait no longer than this rank. */
    bool tell_all = c->pairs && st != LG_ERR_TIMEOUT;
    for (uint32_t r = 1; r < f->size; r++) {
        bool in_tree = c->passes_on && (r == parent_of(f->rank) || descends(r, f->rank));
        if (r != f->rank && (tell_all || in_tree)) {
            send_last(f, 1, r, LG__MPI_TAG_DOWN);
        }
    }
    push(f);
    return st;
}

/* The error that a VERDICT or FAILED message in f->in carries. */
static lg_status error_from_message(lg__mpi_call *c, lg_error *err)
{
    const lg__mpi_message *m = &c->f->in;
    bool known = m->h.status > 0 && m->h.bytes <= LG__MPI_INLINE_BYTES;
    lg_error_set(err, known ? (lg_status)m->h.status : LG_ERR_COMM, "%.*s", known ? (int)m->h.bytes : 0,
                 (const char *)m->data);
    err->rank = m->h.rank;
    return err->status;
}

/* Rank 0 looks whether another rank has failed, and tells all. */
static lg_status hear_failure(lg__mpi_call *c, lg_error *err)
{
    bool got;
    int source;
    LG__MPI_TRY(lg__mpi_take(c, MPI_ANY_SOURCE, LG__MPI_TAG_FAILED, &got, &source, err));
    if (!got) {
        return LG_OK;
    }
    error_from_message(c, err);
    send_verdict(c, LG_ERR_PEER, NULL, NULL, err);
    if (err->rank == 0) {
        err->status = LG_ERR_COMM; /* rank 0 itself was late */
    }
    return err->status;
}

/* ------------------------------------------------------------ rank 0 collects */

typedef struct arrival {
    bool arrived;
    uint64_t bytes;
    unsigned char *small; /* inline data until there is a place for it */
    lg__mpi_inflow in;    /* what comes in chunks */
} arrival;

typedef struct collection {
    arrival *ranks;
    bool data;  /* heads are there; now their data */
    bool heard; /* at least once */
    bool late;  /* another rank had given up before rank 0 came */
} collection;

static bool is_missing(const void *arg, uint32_t r)
{
    const collection *l = arg;
    if (r == 0) {
        return l->late;
    }
    return l->data ? !lg__mpi_in_done(&l->ranks[r].in) : !l->ranks[r].arrived;
}

/* Someone waited long enough: says who was missing, if anyone is. */
static lg_status judge_missing(lg__mpi_call *c, const collection *l, uint32_t waiter, uint64_t waited_ms, lg_error *err)
{
    char ranks[LG__COMM_RANKS_TEXT], text[LG__COMM_CALL_TEXT];
    int first;
    lg__comm_ranks_text(c->f->size, is_missing, l, ranks, &first);
    if (first < 0) {
        return LG_OK; /* the last one came; the result still reaches the waiter in its grace */
    }
    lg_error_set(err, LG_ERR_TIMEOUT, "%s did not %s within %" PRIu64 " ms (rank %" PRIu32 " waited in %s)", ranks,
                 l->data ? "send its data" : "arrive", waited_ms, waiter, lg__mpi_call_text(c, text));
    err->rank = first;
    send_verdict(c, LG_ERR_TIMEOUT, is_missing, l, err);
    if (l->late) {
        err->status = LG_ERR_COMM;
    }
    return err->status;
}

static lg_status arrive(lg__mpi_call *c, collection *l, int source, lg_error *err)
{
    const lg__mpi_head *h = &c->f->in.h;
    arrival *a = &l->ranks[source];
    if (h->seq != c->f->seq || a->arrived) {
        return lg_error_set(err, LG_ERR_COMM, "rank %d is in call #%" PRIu64 ", out of step", source, h->seq);
    }
    if (h->op != c->op || h->root != c->root) {
        char theirs[LG__COMM_CALL_TEXT], ours[LG__COMM_CALL_TEXT];
        return lg_error_set(err, LG_ERR_CONFLICT, "rank %d called %s, but rank 0 called %s", source,
                            lg__comm_call_text((lg__comm_op)h->op, h->root, h->seq, theirs),
                            lg__mpi_call_text(c, ours));
    }
    if (h->bytes <= LG__MPI_INLINE_BYTES && h->bytes > 0) {
        a->small = malloc((size_t)h->bytes);
        if (a->small == NULL) {
            return lg__mpi_no_memory(err);
        }
        memcpy(a->small, c->f->in.data, (size_t)h->bytes);
    }
    a->bytes = h->bytes;
    a->arrived = true;
    return LG_OK;
}

/* Reads what ranks have to say, until nothing more is there. */
static lg_status hear(lg__mpi_call *c, collection *l, uint32_t *n_arrived, lg_error *err)
{
    int gave_up = -1, source = -1;
    uint64_t waited_ms = 0;
    LG__MPI_TRY(hear_failure(c, err));
    for (;;) {
        bool got;
        LG__MPI_TRY(lg__mpi_take(c, MPI_ANY_SOURCE, LG__MPI_TAG_UP, &got, &source, err));
        if (!got) {
            break;
        }
        const lg__mpi_head *h = &c->f->in.h;
        if (h->kind == LG__MPI_ARRIVED) {
            LG__MPI_TRY(arrive(c, l, source, err));
            *n_arrived += 1;
        } else if (h->kind == LG__MPI_GAVE_UP && h->seq == c->f->seq) {
            gave_up = source;
            waited_ms = h->waited_ms;
        } else if (h->kind != LG__MPI_GAVE_UP || h->seq > c->f->seq) {
            return lg_error_set(err, LG_ERR_COMM, "rank %d sent a message of kind %" PRIu32 " to rank 0", source,
                                h->kind);
        } /* else it got its result after all */
    }
    l->late = gave_up >= 0 && !l->heard;
    l->heard = true;
    if (gave_up >= 0) {
        LG__MPI_TRY(judge_missing(c, l, (uint32_t)gave_up, waited_ms, err));
    }
    if (lg__mpi_expired(c)) {
        LG__MPI_TRY(judge_missing(c, l, 0, c->deadline_ms, err));
    }
    return LG_OK;
}

/* The result: all ranks' data by rank; with `sizes`, 8 bytes a rank behind it. */
static lg_status collect_into(lg__mpi_call *c, collection *l, const void *mine, bool sizes, unsigned char **result,
                              uint64_t *result_bytes, lg_error *err)
{
    lg__mpi_fabric *f = c->f;
    size_t total = sizes ? 8 * (size_t)f->size : 0;
    for (uint32_t r = 0; r < f->size; r++) {
        if (__builtin_add_overflow(total, (size_t)l->ranks[r].bytes, &total) || total > SIZE_MAX / 2) {
            return lg_error_set(err, LG_ERR_LIMIT, "sizes add up to more than the address space");
        }
    }
    unsigned char *all = malloc(total > 0 ? total : 1);
    if (all == NULL) {
        return lg__mpi_no_memory(err);
    }
    *result = all;
    *result_bytes = total;
    unsigned char *at = all, *size_at = all + total - (sizes ? 8 * (size_t)f->size : 0);
    for (uint32_t r = 0; r < f->size; r++) {
        arrival *a = &l->ranks[r];
        const void *here = r == 0 ? mine : a->small;
        if (a->bytes > 0 && here != NULL) {
            memcpy(at, here, (size_t)a->bytes);
        } else {
            a->in = (lg__mpi_inflow){.from = r, .tag = LG__MPI_TAG_UP_DATA, .p = at, .bytes = a->bytes};
        }
        at += a->bytes;
        if (sizes) {
            memcpy(size_at, &a->bytes, 8);
            size_at += 8;
        }
    }
    l->data = true;
    uint32_t n_arrived = f->size;
    for (;;) {
        bool done = true;
        for (uint32_t r = 1; r < f->size; r++) {
            if (!lg__mpi_in_done(&l->ranks[r].in)) {
                LG__MPI_TRY(lg__mpi_in_poll(c, &l->ranks[r].in, err));
                done = done && lg__mpi_in_done(&l->ranks[r].in);
            }
        }
        if (done) {
            return LG_OK;
        }
        LG__MPI_TRY(hear(c, l, &n_arrived, err));
        lg__mpi_rest(&c->idle);
    }
}

static lg_status collect(lg__mpi_call *c, const void *mine, uint64_t bytes, bool sizes, unsigned char **result,
                         uint64_t *result_bytes, lg_error *err)
{
    lg__mpi_fabric *f = c->f;
    collection l = {.ranks = calloc(f->size, sizeof(arrival))};
    if (l.ranks == NULL) {
        return lg__mpi_no_memory(err);
    }
    l.ranks[0].arrived = true;
    l.ranks[0].bytes = bytes;
    uint32_t n_arrived = 1;
    lg_status st = LG_OK;
    for (;;) {
        st = hear(c, &l, &n_arrived, err);
        if (st != LG_OK || n_arrived == f->size) {
            break;
        }
        lg__mpi_rest(&c->idle);
    }
    unsigned char *all = NULL;
    if (st == LG_OK) {
        st = collect_into(c, &l, mine, sizes, &all, result_bytes, err);
    }
    bool busy = false;
    for (uint32_t r = 0; r < f->size; r++) {
        free(l.ranks[r].small);
        busy = lg__mpi_in_end(&l.ranks[r].in) || busy;
    }
    free(l.ranks);
    if (st != LG_OK) {
        if (!busy) {
            free(all);
        }
        return st;
    }
    *result = all;
    return LG_OK;
}

/* --------------------------------------------------- others send, and hear back */

static lg_status no_answer(lg__mpi_call *c, lg_error *err)
{
    lg__mpi_fabric *f = c->f;
    char text[LG__COMM_CALL_TEXT], via[64] = "";
    if (parent_of(f->rank) != 0) {
        snprintf(via, sizeof via, " (or rank %" PRIu32 ", which passes on its answers)", parent_of(f->rank));
    }
    lg_error_set(err, LG_ERR_TIMEOUT, "rank 0%s did not answer within %" PRIu64 " ms (rank %" PRIu32 " waited in %s)",
                 via, c->deadline_ms, f->rank, lg__mpi_call_text(c, text));
    err->rank = 0;
    return LG_ERR_TIMEOUT;
}

lg_status lg__mpi_listen(lg__mpi_call *c, bool *got, int *source, lg_error *err)
{
    lg__mpi_fabric *f = c->f;
    *got = false;
    if (f->rank == 0) {
        return hear_failure(c, err);
    }
    LG__MPI_TRY(lg__mpi_take(c, MPI_ANY_SOURCE, LG__MPI_TAG_DOWN, got, source, err));
    if (!*got) {
        return LG_OK;
    }
    const lg__mpi_head *h = &f->in.h;
    if (h->kind == LG__MPI_VERDICT) {
        c->told = *source == 0 || c->pairs; /* else by a neighbour in the tree */
        return error_from_message(c, err);
    }
    if (h->kind != LG__MPI_RESULT || h->seq != f->seq || h->op != c->op || h->root != c->root) {
        return lg_error_set(err, LG_ERR_COMM, "rank %d answered call #%" PRIu64 ", out of step", *source, h->seq);
    }
    return LG_OK;
}

static lg_status await_result(lg__mpi_call *c, lg__mpi_outflow *up, int *source, lg_error *err)
{
    bool gave_up = false, got = false;
    while (!got) {
        LG__MPI_TRY(lg__mpi_out_poll(c, up, up->bytes, err));
        LG__MPI_TRY(lg__mpi_listen(c, &got, source, err));
        if (got) {
            break;
        }
        if (!gave_up && lg__mpi_expired(c)) {
            lg__mpi_head h = lg__mpi_head_of(c, LG__MPI_GAVE_UP, 0);
            h.waited_ms = c->deadline_ms;
            LG__MPI_TRY(lg__mpi_post(c->f, 0, LG__MPI_TAG_UP, &h, NULL, 0, err));
            gave_up = true;
        }
        if (lg__mpi_expired_long(c)) {
            return no_answer(c, err);
        }
        lg__mpi_rest(&c->idle);
    }
    while (!lg__mpi_out_done(up)) { /* it was received, so this is a matter of time */
        LG__MPI_TRY(lg__mpi_out_poll(c, up, up->bytes, err));
        if (lg__mpi_expired_long(c)) {
            return no_answer(c, err);
        }
        lg__mpi_rest(&c->idle);
    }
    return LG_OK;
}

/* -------------------------------------------------------- the result goes down */

static bool is_slow_child(const void *arg, uint32_t r)
{
    const lg__mpi_outflow *children = arg;
    for (uint32_t i = 0; i < FANOUT; i++) {
        if (children[i].to == r && !lg__mpi_out_done(&children[i])) {
            return true;
        }
    }
    return false;
}

/* From `in` (already whole on rank 0) to the children in the tree. */
static lg_status pass_on(lg__mpi_call *c, lg__mpi_inflow *in, lg__mpi_outflow *children, uint32_t n, lg_error *err)
{
    for (;;) {
        bool done = lg__mpi_in_done(in);
        if (!done) {
            LG__MPI_TRY(lg__mpi_in_poll(c, in, err));
        }
        bool got;
        int source;
        LG__MPI_TRY(lg__mpi_listen(c, &got, &source, err));
        if (got) {
            return lg_error_set(err, LG_ERR_COMM, "rank %d answered twice", source);
        }
        for (uint32_t i = 0; i < n; i++) {
            LG__MPI_TRY(lg__mpi_out_poll(c, &children[i], in->got, err));
            done = done && lg__mpi_out_done(&children[i]);
        }
        if (done) {
            return LG_OK;
        }
        if (lg__mpi_expired_long(c)) {
            char ranks[LG__COMM_RANKS_TEXT], text[LG__COMM_CALL_TEXT];
            int first = (int)in->from;
            if (lg__mpi_in_done(in)) {
                lg__comm_ranks_text(c->f->size, is_slow_child, children, ranks, &first);
            } else {
                snprintf(ranks, sizeof ranks, "rank %" PRIu32, in->from);
            }
            lg_error_set(err, LG_ERR_TIMEOUT,
                         "%s did not %s the result within %" PRIu64 " ms (rank %" PRIu32 " waited in %s)", ranks,
                         lg__mpi_in_done(in) ? "take" : "finish sending", c->deadline_ms, c->f->rank,
                         lg__mpi_call_text(c, text));
            err->rank = first;
            return LG_ERR_TIMEOUT;
        }
        lg__mpi_rest(&c->idle);
    }
}

/* Large results: this rank's part in the tree. `from` is itself on rank 0. */
static lg_status distribute(lg__mpi_call *c, uint32_t from, unsigned char *data, uint64_t bytes, bool *busy,
                            lg_error *err)
{
    lg__mpi_fabric *f = c->f;
    lg__mpi_outflow children[FANOUT] = {0};
    lg__mpi_inflow in = {
        .from = from, .tag = LG__MPI_TAG_DOWN_DATA, .p = data, .bytes = bytes, .got = f->rank == 0 ? bytes : 0};
    lg_status st = LG_OK;
    uint32_t n = 0;
    for (uint32_t i = 1; i <= FANOUT && st == LG_OK; i++) {
        uint64_t child = (uint64_t)f->rank * FANOUT + i;
        if (child < f->size) {
            children[n++] =
                (lg__mpi_outflow){.to = (uint32_t)child, .tag = LG__MPI_TAG_DOWN_DATA, .p = data, .bytes = bytes};
            st = lg__mpi_post_head(c, (uint32_t)child, LG__MPI_TAG_DOWN, LG__MPI_RESULT, NULL, bytes, err);
        }
    }
    if (st == LG_OK) {
        st = pass_on(c, &in, children, n, err);
    }
    *busy = lg__mpi_in_end(&in);
    for (uint32_t i = 0; i < n; i++) {
        *busy = lg__mpi_out_end(&children[i]) || *busy;
    }
    return st;
}

/* Rank 0's half of the way down. */
static lg_status hand_out(lg__mpi_call *c, unsigned char *result, uint64_t bytes, bool *busy, lg_error *err)
{
    if (bytes > LG__MPI_INLINE_BYTES) {
        return distribute(c, 0, result, bytes, busy, err);
    }
    for (uint32_t r = 1; r < c->f->size; r++) {
        LG__MPI_TRY(lg__mpi_post_head(c, r, LG__MPI_TAG_DOWN, LG__MPI_RESULT, result, bytes, err));
    }
    return LG_OK;
}

/* The others' half of both ways. */
static lg_status send_and_receive(lg__mpi_call *c, const void *mine, uint64_t bytes, unsigned char **result,
                                  uint64_t *result_bytes, bool *busy, lg_error *err)
{
    lg__mpi_fabric *f = c->f;
    lg__mpi_outflow up = {
        .to = 0, .tag = LG__MPI_TAG_UP_DATA, .p = mine, .bytes = bytes > LG__MPI_INLINE_BYTES ? bytes : 0};
    int source = 0;
    if (up.bytes > 0) {
        LG__MPI_TRY(lg__mpi_out_stage(&up, err));
    }
    lg_status st = lg__mpi_post_head(c, 0, LG__MPI_TAG_UP, LG__MPI_ARRIVED, mine, bytes, err);
    if (st == LG_OK) {
        st = await_result(c, &up, &source, err);
    }
    lg__mpi_out_end(&up);
    LG__MPI_TRY(st);
    *result_bytes = f->in.h.bytes;
    c->passes_on = *result_bytes > LG__MPI_INLINE_BYTES;
    *result = *result_bytes > SIZE_MAX / 2 ? NULL : malloc(*result_bytes > 0 ? (size_t)*result_bytes : 1);
    if (*result == NULL) {
        return lg__mpi_no_memory(err);
    }
    if (*result_bytes > LG__MPI_INLINE_BYTES) {
        return distribute(c, (uint32_t)source, *result, *result_bytes, busy, err);
    }
    memcpy(*result, f->in.data, (size_t)*result_bytes);
    return LG_OK;
}

lg_status lg__mpi_exchange(lg__mpi_call *c, const void *mine, size_t bytes, bool sizes, unsigned char **result,
                           uint64_t *result_bytes, lg_error *err)
{
    unsigned char *all = NULL;
    bool busy = false;
    lg_status st;
    if (c->f->rank == 0) {
        st = collect(c, mine, bytes, sizes, &all, result_bytes, err);
        if (st == LG_OK) {
            st = hand_out(c, all, *result_bytes, &busy, err);
        }
    } else {
        st = send_and_receive(c, mine, bytes, &all, result_bytes, &busy, err);
    }
    if (st != LG_OK) {
        if (!busy) {
            free(all);
        }
        return st;
    }
    *result = all;
    return LG_OK;
}
