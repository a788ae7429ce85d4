/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/mpi_exchange.h"

#include <lastgood/mpi.h>
#include <stdlib.h>
#include <string.h>

#define CREATE_DEADLINE_MS UINT64_C(600000)
#define WINDOW 4 /* partners at a time in an all-to-all */

/* ----------------------------------------------------------------- all-to-all */

typedef struct pair { /* one step: to one rank, from another */
    bool started, head_in;
    lg__mpi_outflow out;
    lg__mpi_inflow in;
} pair;

typedef struct pairing {
    lg__mpi_call *c;
    const void *const *send;
    const size_t *send_bytes;
    unsigned char **got; /* by rank */
    size_t *got_bytes;
    pair window[WINDOW];
    uint32_t first; /* the lowest step that is not done; steps are 1 to size - 1 */
} pairing;

static bool is_slow_partner(const void *arg, uint32_t r)
{
    const pairing *p = arg;
    for (uint32_t i = 0; i < WINDOW; i++) {
        const pair *w = &p->window[i];
        if (w->started && ((w->in.from == r && !(w->head_in && lg__mpi_in_done(&w->in))) ||
                           (w->out.to == r && !lg__mpi_out_done(&w->out)))) {
            return true;
        }
    }
    return false;
}

static lg_status pair_start(pairing *p, pair *w, uint32_t step, lg_error *err)
{
    lg__mpi_call *c = p->c;
    uint32_t size = c->f->size, me = c->f->rank;
    uint32_t to = (uint32_t)(((uint64_t)me + step) % size), from = (uint32_t)(((uint64_t)me + size - step) % size);
    uint64_t bytes = p->send_bytes[to];
    *w = (pair){.started = true};
    w->out = (lg__mpi_outflow){
        .to = to, .tag = LG__MPI_TAG_PAIR_DATA, .p = p->send[to], .bytes = bytes > LG__MPI_INLINE_BYTES ? bytes : 0};
    w->in = (lg__mpi_inflow){.from = from, .tag = LG__MPI_TAG_PAIR_DATA};
    if (w->out.bytes > 0) {
        LG__MPI_TRY(lg__mpi_out_stage(&w->out, err));
    }
    return lg__mpi_post_head(c, to, LG__MPI_TAG_PAIR, LG__MPI_PART, p->send[to], bytes, err);
}

static lg_status pair_head(pairing *p, pair *w, lg_error *err)
{
    lg__mpi_call *c = p->c;
    bool got;
    int source;
    LG__MPI_TRY(lg__mpi_take(c, (int)w->in.from, LG__MPI_TAG_PAIR, &got, &source, err));
    if (!got) {
        return LG_OK;
    }
    const lg__mpi_message *m = &c->f->in;
    if (m->h.kind != LG__MPI_PART || m->h.seq != c->f->seq) {
        return lg_error_set(err, LG_ERR_COMM, "rank %d sent its part of call #%" PRIu64 ", out of step", source,
                            m->h.seq);
    }
    w->head_in = true;
    if (m->h.bytes == 0) {
        return LG_OK;
    }
    unsigned char *data = m->h.bytes > SIZE_MAX / 2 ? NULL : malloc((size_t)m->h.bytes);
    if (data == NULL) {
        return lg__mpi_no_memory(err);
    }
    p->got[source] = data;
    p->got_bytes[source] = (size_t)m->h.bytes;
    if (m->h.bytes <= LG__MPI_INLINE_BYTES) {
        memcpy(data, m->data, (size_t)m->h.bytes);
    } else {
        w->in.p = data;
        w->in.bytes = m->h.bytes;
    }
    return LG_OK;
}

static lg_status pair_poll(pairing *p, pair *w, bool *done, lg_error *err)
{
    if (!w->head_in) {
        LG__MPI_TRY(pair_head(p, w, err));
    }
    if (w->head_in && !lg__mpi_in_done(&w->in)) {
        LG__MPI_TRY(lg__mpi_in_poll(p->c, &w->in, err));
    }
    if (!lg__mpi_out_done(&w->out)) {
        LG__MPI_TRY(lg__mpi_out_poll(p->c, &w->out, w->out.bytes, err));
    }
    *done = w->head_in && lg__mpi_in_done(&w->in) && lg__mpi_out_done(&w->out);
    return LG_OK;
}

/* Steps end in any order, but start in theirs, at most WINDOW at a time; the
 * lowest step of all ranks always finds its partners ready. */
static lg_status pair_all(pairing *p, lg_error *err)
{
    lg__mpi_call *c = p->c;
    uint32_t next = 1, last = c->f->size - 1, running = 0;
    while (next <= last || running > 0) {
        for (uint32_t i = 0; i < WINDOW; i++) {
            pair *w = &p->window[i];
            bool done = false;
            if (!w->started && next <= last) {
                LG__MPI_TRY(pair_start(p, w, next++, err));
                running++;
            }
            if (w->started) {
                LG__MPI_TRY(pair_poll(p, w, &done, err));
            }
            if (done) {
                lg__mpi_out_end(&w->out);
                *w = (pair){0};
                running--;
            }
        }
        bool got;
        int source;
        LG__MPI_TRY(lg__mpi_listen(c, &got, &source, err));
        if (got) {
            return lg_error_set(err, LG_ERR_COMM, "rank %d answered twice", source);
        }
        if (lg__mpi_expired_long(c)) {
            char ranks[LG__COMM_RANKS_TEXT], text[LG__COMM_CALL_TEXT];
            int first;
            lg__comm_ranks_text(c->f->size, is_slow_partner, p, ranks, &first);
            lg_error_set(err, LG_ERR_TIMEOUT, "%s did not finish within %" PRIu64 " ms (rank %" PRIu32 " waited in %s)",
                         ranks, c->deadline_ms, c->f->rank, lg__mpi_call_text(c, text));
            err->rank = first;
            return LG_ERR_TIMEOUT;
        }
        lg__mpi_rest(&c->idle);
    }
    return LG_OK;
}

/* ------------------------------------------------------------------ functions */

static lg_status begin(lg__mpi_fabric *f, lg__mpi_call *c, lg__comm_op op, uint32_t root, uint64_t deadline_ms,
                       lg_error *err)
{
    int finalized = 0, main_thread = 1;
    *c = (lg__mpi_call){.f = f, .op = op, .root = root, .deadline_ms = deadline_ms, .begin_ms = lg__mpi_now_ms()};
    f->seq++;
    MPI_Finalized(&finalized);
    if (finalized) {
        f->broken = true;
        return lg_error_set(err, LG_ERR_STATE, "MPI_Finalize was called before the communicator was freed");
    }
    if (!f->any_thread && MPI_Is_thread_main(&main_thread) == MPI_SUCCESS && !main_thread) {
        f->broken = true;
        return lg_error_set(err, LG_ERR_STATE,
                            "called outside of the main thread, but MPI's thread level is below "
                            "MPI_THREAD_SERIALIZED");
    }
    lg_status st = lg__mpi_reap(f, err);
    return st == LG_OK ? LG_OK : lg__mpi_break_off(c, err);
}

static lg_status mpi_barrier(void *ctx, uint64_t deadline_ms, lg_error *err)
{
    lg__mpi_call c;
    unsigned char *none = NULL;
    uint64_t bytes;
    LG__MPI_TRY(begin(ctx, &c, LG__COMM_BARRIER, 0, deadline_ms, err));
    if (lg__mpi_exchange(&c, NULL, 0, false, &none, &bytes, err) != LG_OK) {
        return lg__mpi_break_off(&c, err);
    }
    free(none);
    return LG_OK;
}

/* Reads the sizes behind the data. */
static lg_status split_sizes(const lg__mpi_fabric *f, const unsigned char *all, uint64_t bytes, size_t *sizes,
                             lg_error *err)
{
    uint64_t left = bytes, tail = 8 * (uint64_t)f->size;
    if (left < tail) {
        return lg_error_set(err, LG_ERR_COMM, "a result of %" PRIu64 " bytes has no sizes", bytes);
    }
    left -= tail;
    for (uint32_t pass = 0; pass < 2; pass++) { /* outputs on success only */
        for (uint32_t r = 0; r < f->size; r++) {
            uint64_t n;
            memcpy(&n, all + bytes - tail + 8 * (size_t)r, 8);
            if (pass == 1) {
                sizes[r] = (size_t)n;
            } else if (n > left) {
                return lg_error_set(err, LG_ERR_COMM, "the sizes in a result do not add up");
            } else {
                left -= n;
            }
        }
        if (left != 0) {
            return lg_error_set(err, LG_ERR_COMM, "the sizes in a result do not add up");
        }
    }
    return LG_OK;
}

static lg_status mpi_all_gather(void *ctx, const void *data, size_t bytes, void **all, size_t *sizes,
                                uint64_t deadline_ms, lg_error *err)
{
    lg__mpi_call c;
    unsigned char *got = NULL;
    uint64_t got_bytes = 0;
    LG__MPI_TRY(begin(ctx, &c, LG__COMM_ALL_GATHER, 0, deadline_ms, err));
    lg_status st = lg__mpi_exchange(&c, data, bytes, true, &got, &got_bytes, err);
    if (st == LG_OK) {
        st = split_sizes(c.f, got, got_bytes, sizes, err);
    }
    if (st != LG_OK) {
        free(got);
        return lg__mpi_break_off(&c, err);
    }
    *all = got;
    return LG_OK;
}

static lg_status mpi_broadcast(void *ctx, void **data, size_t *bytes, uint32_t root, uint64_t deadline_ms,
                               lg_error *err)
{
    lg__mpi_call c;
    unsigned char *got = NULL;
    uint64_t got_bytes = 0;
    LG__MPI_TRY(begin(ctx, &c, LG__COMM_BROADCAST, root, deadline_ms, err));
    bool give = c.f->rank == root;
    if (lg__mpi_exchange(&c, give ? *data : NULL, give ? *bytes : 0, false, &got, &got_bytes, err) != LG_OK) {
        return lg__mpi_break_off(&c, err);
    }
    if (give) {
        free(got);
    } else {
        *data = got;
        *bytes = (size_t)got_bytes;
    }
    return LG_OK;
}

static lg_status pair_up(lg__mpi_call *c, const void *const *send, const size_t *send_bytes, unsigned char **got,
                         size_t *got_bytes, lg_error *err)
{
    lg__mpi_fabric *f = c->f;
    size_t own = send_bytes[f->rank];
    if (own > 0) {
        got[f->rank] = malloc(own);
        if (got[f->rank] == NULL) {
            return lg__mpi_no_memory(err);
        }
        memcpy(got[f->rank], send[f->rank], own);
        got_bytes[f->rank] = own;
    }
    pairing p = {.c = c, .send = send, .send_bytes = send_bytes, .got = got, .got_bytes = got_bytes};
    lg_status st = pair_all(&p, err);
    for (uint32_t i = 0; i < WINDOW; i++) {
        pair *w = &p.window[i];
        if (w->started) {
            lg__mpi_out_end(&w->out);
            if (lg__mpi_in_end(&w->in)) {
                got[w->in.from] = NULL; /* MPI may still write to it */
            }
        }
    }
    return st;
}

static lg_status mpi_all_to_all(void *ctx, const void *const *send, const size_t *send_bytes, void **recv,
                                size_t *recv_bytes, uint64_t deadline_ms, lg_error *err)
{
    lg__mpi_call c;
    unsigned char *none = NULL;
    uint64_t bytes;
    LG__MPI_TRY(begin(ctx, &c, LG__COMM_ALL_TO_ALL, 0, deadline_ms, err));
    uint32_t n = c.f->size;
    lg_status st = lg__mpi_exchange(&c, NULL, 0, false, &none, &bytes, err);
    free(none);
    unsigned char **got = calloc(n, sizeof *got);
    size_t *got_bytes = calloc(n, sizeof *got_bytes);
    c.pairs = st == LG_OK;
    if (st == LG_OK && (got == NULL || got_bytes == NULL)) {
        st = lg__mpi_no_memory(err);
    }
    if (st == LG_OK) {
        st = pair_up(&c, send, send_bytes, got, got_bytes, err);
    }
    for (uint32_t r = 0; r < n; r++) {
        if (st == LG_OK) {
            recv[r] = got[r];
            recv_bytes[r] = got_bytes[r];
        } else if (got != NULL) {
            free(got[r]);
        }
    }
    free(got);
    free(got_bytes);
    return st == LG_OK ? LG_OK : lg__mpi_break_off(&c, err);
}

/* What others sent when they had given up, and then got their result after
 * all, must not be left over when the communicator's number is used again. */
static void drain(lg__mpi_fabric *f)
{
    lg__mpi_call c = {.f = f, .begin_ms = lg__mpi_now_ms(), .deadline_ms = 0};
    lg_error err;
    bool got = true;
    int source;
    while (got && lg__mpi_take(&c, MPI_ANY_SOURCE, LG__MPI_TAG_UP, &got, &source, &err) == LG_OK) {
    }
}

static void mpi_destroy(void *ctx)
{
    lg__mpi_fabric *f = ctx;
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (f->broken || finalized) {
        return; /* see mpi_wire.h */
    }
    lg_error err;
    uint64_t begin_ms = lg__mpi_now_ms();
    for (uint32_t idle = 0; f->posted != NULL && lg__mpi_now_ms() - begin_ms < 1000;) {
        if (lg__mpi_reap(f, &err) != LG_OK) {
            return;
        }
        lg__mpi_rest(&idle);
    }
    if (f->posted != NULL) {
        return;
    }
    if (f->rank == 0) {
        drain(f);
    }
    MPI_Comm_free(&f->comm);
    free(f);
}

static const lg_comm_ops mpi_ops = {
    .version = LG_COMM_OPS_VERSION,
    .barrier = mpi_barrier,
    .all_gather = mpi_all_gather,
    .broadcast = mpi_broadcast,
    .all_to_all = mpi_all_to_all,
    .destroy = mpi_destroy,
};

/* --------------------------------------------------------------------- create */

static lg_status duplicate(MPI_Comm comm, uint64_t deadline_ms, lg__mpi_fabric *f, lg_error *err)
{
    MPI_Request request;
    uint64_t begin_ms = lg__mpi_now_ms();
    LG__MPI_TRY(lg__mpi_check(MPI_Comm_idup(comm, &f->comm, &request), "MPI_Comm_idup", err));
    for (uint32_t idle = 0;;) {
        int done = 0;
        LG__MPI_TRY(lg__mpi_check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Comm_idup", err));
        if (done) {
            break;
        }
        if (lg__mpi_now_ms() - begin_ms >= deadline_ms) {
            f->broken = true; /* MPI may still write to it */
            return lg_error_set(err, LG_ERR_TIMEOUT,
                                "not all %" PRIu32 " ranks called lg_mpi_comm_create within %" PRIu64
                                " ms (rank %" PRIu32 " waited)",
                                f->size, deadline_ms, f->rank);
        }
        lg__mpi_rest(&idle);
    }
    return lg__mpi_check(MPI_Comm_set_errhandler(f->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler", err);
}

lg_status lg_mpi_comm_create_within(MPI_Comm comm, uint64_t deadline_ms, lg_comm **out, lg_error *err)
{
    lg_error local;
    err = err != NULL ? err : &local;
    *err = (lg_error){.rank = -1};
    int started = 0, finalized = 0, level = 0, inter = 0, rank = 0, size = 0;
    MPI_Initialized(&started);
    MPI_Finalized(&finalized);
    if (!started || finalized) {
        return lg_error_set(err, LG_ERR_STATE, "lg_mpi_comm_create: MPI is not running (MPI_Init %s)",
                            started ? "and MPI_Finalize were called" : "was not called");
    }
    if (out == NULL || comm == MPI_COMM_NULL) {
        return lg_error_set(err, LG_ERR_INVALID, "lg_mpi_comm_create: comm and out must be given");
    }
    LG__MPI_TRY(lg__mpi_check(MPI_Query_thread(&level), "MPI_Query_thread", err));
    LG__MPI_TRY(lg__mpi_check(MPI_Comm_test_inter(comm, &inter), "MPI_Comm_test_inter", err));
    if (inter) {
        return lg_error_set(err, LG_ERR_INVALID, "lg_mpi_comm_create: an intercommunicator has no single set of ranks");
    }
    LG__MPI_TRY(lg__mpi_check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank", err));
    LG__MPI_TRY(lg__mpi_check(MPI_Comm_size(comm, &size), "MPI_Comm_size", err));
    lg__mpi_fabric *f = calloc(1, sizeof *f);
    if (f == NULL) {
        return lg__mpi_no_memory(err);
    }
    f->comm = MPI_COMM_NULL;
    f->rank = (uint32_t)rank;
    f->size = (uint32_t)size;
    f->any_thread = level >= MPI_THREAD_SERIALIZED;
    lg_status st = duplicate(comm, deadline_ms, f, err);
    if (st == LG_OK) {
        st = lg_comm_create(&mpi_ops, f, f->rank, f->size, out, err);
        if (st != LG_OK) {
            MPI_Comm_free(&f->comm);
        }
    }
    if (st != LG_OK && !f->broken) {
        free(f);
    }
    return st;
}

lg_status lg_mpi_comm_create(MPI_Comm comm, lg_comm **out, lg_error *err)
{
    return lg_mpi_comm_create_within(comm, CREATE_DEADLINE_MS, out, err);
}
