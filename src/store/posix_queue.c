/* SPDX-License-Identifier: Apache-2.0 */
#include "store/posix.h"

#include "base/mem.h"
#include "io/choice.h"
#include "io/uring.h"

#include <errno.h>

/* The same transfers as the blocking functions make, call by call, with the
 * calls of several of them in a ring. */

typedef struct slot {
    lg_queue_op op;
    lg__transfer transfer; /* of a read or write */
    bool used;
    bool finished; /* without a call: nothing to move */
} slot;

struct lg_queue {
    lg__uring *ring;
    uint32_t depth;
    slot slots[];
};

lg_status lg__posix_queue_open(void *ctx, const lg_queue_spec *spec, lg_queue **out, lg_error *err)
{
    (void)ctx;
    LG__RETURN_IF(!lg__uring_works(), err, LG_ERR_UNSUPPORTED, "io_uring is not to be had here");
    lg_queue *q = lg__calloc(1, sizeof *q + spec->depth * sizeof *q->slots);
    if (q == NULL) {
        return lg__nomem(err);
    }
    q->depth = spec->depth;
    int e = lg__uring_new(spec->depth, spec->memory, spec->memory_bytes, &q->ring);
    if (e != 0) {
        lg__free(q);
        lg_error_set_errno(err, e, "io_uring");
        return err->status = e == ENOMEM ? LG_ERR_NOMEM : LG_ERR_UNSUPPORTED;
    }
    *out = q;
    return LG_OK;
}

/* Hands the next call of a slot to the ring; an errno. */
static int go_on(lg_queue *q, slot *s)
{
    lg__uring_op op = {.token = (uint64_t)(s - q->slots)};
    lg__call c;
    if (s->op.kind == LG_QUEUE_SYNC) {
        op.kind = LG__URING_SYNC;
        op.fd = s->op.file->fd;
    } else if (lg__transfer_next(&s->transfer, &c)) {
        op.kind = s->transfer.write ? LG__URING_WRITE : LG__URING_READ;
        op.fd = c.fd, op.data = c.data, op.bytes = c.bytes, op.offset = c.offset;
    } else {
        s->finished = true;
        return 0;
    }
    return lg__uring_begin(q->ring, &op);
}

lg_status lg__posix_queue_submit(lg_queue *q, const lg_queue_op *op, lg_error *err)
{
    slot *s = q->slots;
    while (s < q->slots + q->depth && s->used) {
        s++;
    }
    LG__RETURN_IF(s == q->slots + q->depth, err, LG_ERR_INTERNAL, "the queue is full");
    s->op = *op;
    s->finished = false;
    if (op->kind == LG_QUEUE_SYNC) {
        LG__TRY(lg__sync_begin(op->file, err));
    } else {
        LG__TRY(lg__transfer_begin(&s->transfer, op->file, op->kind == LG_QUEUE_WRITE, op->data, op->bytes, op->offset,
                                   err));
    }
    int e = go_on(q, s);
    if (e != 0) {
        return lg__posix_fail_data(err, e, "io_uring for", op->file->path, op->offset);
    }
    s->used = true;
    return LG_OK;
}

static lg_status finish(slot *s, uint64_t *token, lg_status status)
{
    *token = s->op.token;
    s->used = false;
    return status;
}

/* The ring itself failed: nothing is known of what is under way. A sync among
 * it must not be tried again. */
static lg_status fail_all(lg_queue *q, int os_errno, uint64_t *token, lg_error *err)
{
    for (slot *s = q->slots; s < q->slots + q->depth; s++) {
        if (s->used) {
            lg_status st = s->op.kind == LG_QUEUE_SYNC
                               ? lg__sync_end(s->op.file, os_errno, err)
                               : lg__posix_fail_data(err, os_errno, "io_uring for", s->op.file->path, s->op.offset);
            return finish(s, token, st);
        }
    }
    return lg_error_set(err, LG_ERR_INTERNAL, "nothing is under way");
}

lg_status lg__posix_queue_wait(lg_queue *q, uint64_t *token, lg_error *err)
{
    for (slot *s = q->slots; s < q->slots + q->depth; s++) {
        if (s->used && s->finished) {
            return finish(s, token, LG_OK);
        }
    }
    for (;;) {
        uint64_t which;
        int result;
        int e = lg__uring_wait(q->ring, &which, &result);
        if (e != 0) {
            return fail_all(q, e, token, err);
        }
        slot *s = &q->slots[which];
        if (s->op.kind == LG_QUEUE_SYNC) {
            if (result != -EINTR) {
                return finish(s, token, lg__sync_end(s->op.file, result < 0 ? -result : 0, err));
            }
        } else {
            lg_status st = lg__transfer_result(&s->transfer, result, err);
            if (st != LG_OK) {
                return finish(s, token, st);
            }
        }
        e = go_on(q, s);
        if (e != 0) {
            return finish(s, token, lg__posix_fail_data(err, e, "io_uring for", s->op.file->path, s->op.offset));
        }
        if (s->finished) {
            return finish(s, token, LG_OK);
        }
    }
}

void lg__posix_queue_close(lg_queue *q)
{
    lg__uring_free(q->ring);
    lg__free(q);
}
