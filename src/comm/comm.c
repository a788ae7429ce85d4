/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/comm.h"

#include "base/buf.h"
#include "base/mem.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

lg_status lg_comm_create(const lg_comm_ops *ops, void *ctx, uint32_t rank, uint32_t size, lg_comm **out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(ops == NULL || out == NULL, err, LG_ERR_INVALID, "lg_comm_create: ops and out must be given");
    LG__RETURN_IF(ops->version != LG_COMM_OPS_VERSION, err, LG_ERR_INVALID,
                  "lg_comm_create: ops.version is %" PRIu32 ", this library knows %d", ops->version,
                  LG_COMM_OPS_VERSION);
    LG__RETURN_IF(ops->barrier == NULL || ops->all_gather == NULL || ops->broadcast == NULL || ops->all_to_all == NULL,
                  err, LG_ERR_INVALID, "lg_comm_create: barrier, all_gather, broadcast and all_to_all must be given");
    LG__RETURN_IF(size == 0, err, LG_ERR_INVALID, "lg_comm_create: size is 0");
    LG__RETURN_IF(size > INT32_MAX, err, LG_ERR_LIMIT, "lg_comm_create: size %" PRIu32 " is above %d", size, INT32_MAX);
    LG__RETURN_IF(rank >= size, err, LG_ERR_INVALID,
                  "lg_comm_create: rank %" PRIu32 " is outside of a communicator of %" PRIu32, rank, size);
    lg_comm *c = lg__calloc(1, sizeof *c);
    size_t *sizes = lg__calloc(size, sizeof *sizes);
    if (c == NULL || sizes == NULL) {
        lg__free(c);
        lg__free(sizes);
        return lg__nomem(err);
    }
    c->sizes = sizes;
    c->ops = ops;
    c->ctx = ctx;
    c->rank = rank;
    c->size = size;
    *out = c;
    return LG_OK;
}

void lg_comm_free(lg_comm *c)
{
    if (c == NULL) {
        return;
    }
    if (c->ops->destroy != NULL) {
        c->ops->destroy(c->ctx);
    }
    lg__free(c->sizes);
    lg__free(c);
}

/* Sessions without a communicator are one process alone. */
uint32_t lg_comm_rank(const lg_comm *c) { return c == NULL ? 0 : c->rank; }

uint32_t lg_comm_size(const lg_comm *c) { return c == NULL ? 1 : c->size; }

static lg_status check_open(const lg_comm *c, lg_error *err)
{
    if (!c->broken) {
        return LG_OK;
    }
    lg_error_set(err, LG_ERR_COMM, "the communicator is broken since an earlier error: %s", c->reason.message);
    err->rank = c->reason.rank;
    return LG_ERR_COMM;
}

/* Ends a call. The functions may be the caller's: their error need not be
 * filled in, nor by them. */
static lg_status finish(lg_comm *c, lg_status st, const char *call, lg_error *err)
{
    if (st == LG_OK) {
        return LG_OK;
    }
    if (err->status == LG_OK || err->message[0] == '\0') {
        lg_error_set(err, st, "%s failed: %s", call, lg_status_text(st));
    }
    err->status = st;
    if (c->size > 1) { /* one rank alone is never out of step */
        c->broken = true;
        c->reason = *err;
    }
    return st;
}

static void clear(lg_error *err)
{
    err->status = LG_OK;
    err->os_errno = 0;
    err->rank = -1;
    err->message[0] = '\0';
}

lg_status lg__comm_barrier(lg_comm *c, uint64_t deadline_ms, lg_error *err)
{
    LG__TRY(check_open(c, err));
    clear(err);
    return finish(c, c->ops->barrier(c->ctx, deadline_ms, err), "barrier", err);
}

lg_status lg__comm_all_gather(lg_comm *c, const void *data, size_t bytes, void **all, size_t *sizes,
                              uint64_t deadline_ms, lg_error *err)
{
    LG__TRY(check_open(c, err));
    clear(err);
    void *got = NULL;
    lg_status st = c->ops->all_gather(c->ctx, data, bytes, &got, sizes, deadline_ms, err);
    if (st == LG_OK) {
        size_t total = 0;
        bool overflow = false;
        for (uint32_t r = 0; r < c->size; r++) {
            overflow = overflow || __builtin_add_overflow(total, sizes[r], &total);
        }
        if (overflow || sizes[c->rank] != bytes || (got == NULL && total > 0)) {
            lg_free(got);
            st = lg_error_set(err, LG_ERR_COMM,
                              "the communicator's all_gather gave a wrong result: %zu bytes of rank %" PRIu32
                              " came back as %zu",
                              bytes, c->rank, sizes[c->rank]);
        }
    }
    if (st == LG_OK) {
        *all = got;
    }
    return finish(c, st, "all-gather", err);
}

lg_status lg__comm_broadcast(lg_comm *c, void **data, size_t *bytes, uint32_t root, uint64_t deadline_ms, lg_error *err)
{
    LG__TRY(check_open(c, err));
    clear(err);
    if (root >= c->size) {
        return finish(c,
                      lg_error_set(err, LG_ERR_INVALID, "broadcast from rank %" PRIu32 " of %" PRIu32, root, c->size),
                      "broadcast", err);
    }
    bool give = c->rank == root;
    void *p = give ? *data : NULL;
    size_t n = give ? *bytes : 0;
    lg_status st = c->ops->broadcast(c->ctx, &p, &n, root, deadline_ms, err);
    if (st == LG_OK && !give && p == NULL && n > 0) {
        st = lg_error_set(err, LG_ERR_COMM, "the communicator's broadcast gave a wrong result: no data for %zu bytes",
                          n);
    }
    if (st == LG_OK && !give) {
        *data = p;
        *bytes = n;
    }
    return finish(c, st, "broadcast", err);
}

lg_status lg__comm_all_to_all(lg_comm *c, const void *const *send, const size_t *send_bytes, void **recv,
                              size_t *recv_bytes, uint64_t deadline_ms, lg_error *err)
{
    LG__TRY(check_open(c, err));
    clear(err);
    return finish(c, c->ops->all_to_all(c->ctx, send, send_bytes, recv, recv_bytes, deadline_ms, err), "all-to-all",
                  err);
}

/* --------------------------------------------------------------- agreement */

/* On the wire: nothing when all is well, else three 32-bit numbers, little
 * endian, and the message without its NUL. */
#define WIRE_HEAD 12

static size_t wire_write(const lg_error *err, lg_status status, uint8_t *out)
{
    uint32_t head[3] = {(uint32_t)status, (uint32_t)err->os_errno, (uint32_t)err->rank};
    for (size_t i = 0; i < WIRE_HEAD; i++) {
        out[i] = (uint8_t)(head[i / 4] >> (8 * (i % 4)));
    }
    size_t n = strnlen(err->message, LG_ERROR_MESSAGE_MAX - 1);
    memcpy(out + WIRE_HEAD, err->message, n);
    return WIRE_HEAD + n;
}

static bool wire_read(const uint8_t *in, size_t bytes, lg__wire_error *out)
{
    if (bytes < WIRE_HEAD || bytes - WIRE_HEAD >= sizeof out->message) {
        return false;
    }
    out->status = lg__get_u32le(in);
    out->os_errno = (int32_t)lg__get_u32le(in + 4);
    out->rank = (int32_t)lg__get_u32le(in + 8);
    memcpy(out->message, in + WIRE_HEAD, bytes - WIRE_HEAD);
    out->message[bytes - WIRE_HEAD] = '\0';
    return out->status != LG_OK;
}

/* Does the message name the rank of the error already? */
static bool names_rank(const lg__wire_error *w)
{
    if (w->rank < 0) {
        return false;
    }
    char text[32];
    snprintf(text, sizeof text, "rank %" PRId32 ": ", w->rank);
    return strstr(w->message, text) != NULL;
}

/* The lowest failed rank, real errors before PEER ones; size if none failed. */
static uint32_t choose(const lg_comm *c, const uint8_t *all, lg__wire_error *out, lg_error *err)
{
    const size_t *sizes = c->sizes;
    uint32_t chosen = c->size;
    size_t at = 0;
    for (uint32_t r = 0; r < c->size; r++) {
        if (sizes[r] > 0 && (chosen == c->size || out->status == LG_ERR_PEER)) {
            lg__wire_error w;
            if (!wire_read(all + at, sizes[r], &w)) {
                lg_error_set(err, LG_ERR_COMM, "rank %" PRIu32 " sent %zu bytes that are no error report", r, sizes[r]);
                return UINT32_MAX;
            }
            if (chosen == c->size || w.status != LG_ERR_PEER) {
                *out = w;
                chosen = r;
            }
        }
        at += sizes[r];
    }
    return chosen;
}

/* The communicator failed with `comm_err` while `mine` was to be told. */
static lg_status untold(lg_status mine, const lg_error *comm_err, lg_error *err)
{
    if (mine == LG_OK) {
        *err = *comm_err;
        return comm_err->status;
    }
    lg_error own = *err;
    lg_error_set(err, mine, "%s (other ranks could not be told: %s)", own.message, comm_err->message);
    err->os_errno = own.os_errno;
    err->rank = own.rank;
    return mine;
}

lg_status lg__comm_agree(lg_comm *c, lg_status mine, uint64_t deadline_ms, lg_error *err)
{
    if (mine != LG_OK && (err->status == LG_OK || err->message[0] == '\0')) {
        lg_error_set(err, mine, "%s", lg_status_text(mine));
    }
    if (c->size == 1) {
        return mine;
    }
    if (mine != LG_OK && c->broken) {
        return mine; /* most often the very error that broke it */
    }
    uint8_t wire[WIRE_HEAD + LG_ERROR_MESSAGE_MAX] = {0};
    size_t bytes = mine == LG_OK ? 0 : wire_write(err, mine, wire);
    lg_error comm_err = {.rank = -1};
    void *all = NULL;
    lg_status st = lg__comm_all_gather(c, wire, bytes, &all, c->sizes, deadline_ms, &comm_err);
    if (st != LG_OK) {
        return untold(mine, &comm_err, err);
    }
    lg__wire_error w = {0};
    uint32_t chosen = choose(c, all, &w, &comm_err);
    lg_free(all);
    if (chosen == UINT32_MAX) {
        finish(c, LG_ERR_COMM, "agreement", &comm_err);
        return untold(mine, &comm_err, err);
    }
    if (chosen == c->size) {
        clear(err);
        return LG_OK;
    }
    bool named = names_rank(&w);
    lg_error_set(err, (lg_status)w.status, "%s", w.message);
    if (!named) {
        lg_error_wrap(err, "rank %" PRIu32, chosen);
    }
    err->os_errno = w.os_errno;
    err->rank = named ? w.rank : (int)chosen;
    return err->status;
}
