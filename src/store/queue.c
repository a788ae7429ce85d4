/* SPDX-License-Identifier: Apache-2.0 */
#include "store/queue.h"

#include "base/mem.h"
#include "io/choice.h"
#include "io/pool.h"

/* Below this a save or load is done before threads or a ring would have started. */
#define SMALL_BYTES (UINT64_C(1) << 20)

typedef struct job { /* in threads, or in the caller's thread */
    lg_store *store;
    lg_queue_op op;
    lg_status status;
    lg_error err;
} job;

struct lg__queue {
    lg_store *store;
    lg_queue *own; /* the store's; NULL: `pool`, and without that in the caller's thread */
    lg__pool *pool;
    job *jobs;   /* depth */
    job **spare; /* those not in use; blocking: used ones lie behind, oldest first */
    uint32_t depth, under_way, oldest;
};

static void run(void *arg)
{
    job *j = arg;
    j->err = (lg_error)LG_ERROR_INIT;
    switch (j->op.kind) {
    case LG_QUEUE_READ:
        j->status = lg__store_read(j->store, j->op.file, j->op.data, j->op.bytes, j->op.offset, &j->err);
        break;
    case LG_QUEUE_WRITE:
        j->status = lg__store_write(j->store, j->op.file, j->op.data, j->op.bytes, j->op.offset, &j->err);
        break;
    default:
        j->status = lg__store_sync(j->store, j->op.file, &j->err);
    }
}

/* The store's own queue; UNSUPPORTED if there is none, or not now. */
static lg_status open_own(lg__queue *q, const lg_queue_spec *spec, lg_error *err)
{
    if (q->store->ops->queue_open == NULL) {
        return LG_ERR_UNSUPPORTED;
    }
    lg_error why = LG_ERROR_INIT;
    lg_status st = q->store->ops->queue_open(q->store->ctx, spec, &q->own, &why);
    if (st == LG_OK || (st == LG_ERR_UNSUPPORTED && lg__io_wanted_engine() != LG__IO_URING)) {
        return st;
    }
    *err = why;
    lg__store_result(q->store, st, "open a queue", err);
    return err->status = st == LG_ERR_UNSUPPORTED ? LG_ERR_INVALID : st;
}

static lg_status choose(lg__queue *q, const lg_queue_spec *spec, uint64_t expected, lg_error *err)
{
    lg__io_engine engine = lg__io_wanted_engine();
    LG__RETURN_IF(engine == LG__IO_UNKNOWN, err, LG_ERR_INVALID,
                  "the environment's LASTGOOD_IO is none of auto, uring, threads, blocking");
    LG__RETURN_IF(lg__io_wanted_direct() == LG__DIRECT_UNKNOWN, err, LG_ERR_INVALID,
                  "the environment's LASTGOOD_DIRECT is none of auto, on, off");
    LG__RETURN_IF(lg__io_wanted_depth() == LG__DEPTH_UNKNOWN, err, LG_ERR_INVALID,
                  "the environment's LASTGOOD_DEPTH is no number from 1 to %d", LG__MAX_DEPTH);
    if (engine == LG__IO_BLOCKING || (engine == LG__IO_AUTO && expected < SMALL_BYTES)) {
        return LG_OK;
    }
    lg_status st = engine == LG__IO_THREADS ? LG_ERR_UNSUPPORTED : open_own(q, spec, err);
    if (st == LG_ERR_UNSUPPORTED) {
        q->pool = lg__pool_new(spec->depth, run);
        st = q->pool == NULL ? lg__nomem(err) : LG_OK;
    }
    return st;
}

lg_status lg__queue_open(lg_store *s, const lg_queue_spec *spec, uint64_t expected, lg__queue **out, lg_error *err)
{
    lg__queue *q = lg__calloc(1, sizeof *q);
    if (q == NULL) {
        return lg__nomem(err);
    }
    q->store = s;
    q->depth = spec->depth;
    lg_status st = choose(q, spec, expected, err);
    if (st == LG_OK && q->own == NULL) {
        q->jobs = lg__calloc(q->depth, sizeof *q->jobs);
        q->spare = lg__calloc(q->depth, sizeof(job *));
        st = q->jobs == NULL || q->spare == NULL ? lg__nomem(err) : LG_OK;
        for (uint32_t i = 0; i < q->depth && st == LG_OK; i++) {
            q->spare[i] = &q->jobs[i];
        }
    }
    if (st != LG_OK) {
        lg__queue_close(q);
        return st;
    }
    *out = q;
    return LG_OK;
}

void lg__queue_close(lg__queue *q)
{
    if (q == NULL) {
        return;
    }
    while (q->under_way > 0) {
        uint64_t token;
        lg_error ignored = LG_ERROR_INIT;
        (void)lg__queue_wait(q, &token, &ignored);
    }
    if (q->own != NULL) {
        q->store->ops->queue_close(q->own);
    }
    lg__pool_free(q->pool);
    lg__free(q->jobs);
    lg__free(q->spare);
    lg__free(q);
}

uint32_t lg__queue_under_way(const lg__queue *q) { return q->under_way; }
bool lg__queue_full(const lg__queue *q) { return q->under_way == q->depth; }

lg_status lg__queue_submit(lg__queue *q, const lg_queue_op *op, lg_error *err)
{
    LG__RETURN_IF(lg__queue_full(q), err, LG_ERR_INTERNAL, "the queue is full");
    if (q->own != NULL) {
        LG__TRY(lg__store_result(q->store, q->store->ops->queue_submit(q->own, op, err), "submit", err));
        q->under_way++;
        return LG_OK;
    }
    /* The pool hands jobs back in any order, the other case in the given one:
     * `spare` is a ring, of which `under_way` places from `oldest` on are in use. */
    job *j = q->spare[(q->oldest + q->under_way) % q->depth];
    j->store = q->store;
    j->op = *op;
    q->under_way++;
    if (q->pool != NULL) {
        lg__pool_add(q->pool, j);
    } else {
        run(j);
    }
    return LG_OK;
}

lg_status lg__queue_wait(lg__queue *q, uint64_t *token, lg_error *err)
{
    LG__RETURN_IF(q->under_way == 0, err, LG_ERR_INTERNAL, "nothing is under way in the queue");
    q->under_way--;
    if (q->own != NULL) {
        return lg__store_result(q->store, q->store->ops->queue_wait(q->own, token, err), "transfer", err);
    }
    job *j = q->pool != NULL ? lg__pool_take(q->pool) : q->spare[q->oldest];
    q->spare[q->oldest] = j;
    q->oldest = (q->oldest + 1) % q->depth;
    *token = j->op.token;
    if (j->status != LG_OK) {
        *err = j->err;
    }
    return j->status;
}

const char *lg__queue_engine(const lg__queue *q)
{
    return q->own != NULL ? "uring" : q->pool != NULL ? "threads" : "blocking";
}
