/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/mpi_wire.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LG__MPI_MAGIC UINT32_C(0x6c676d31)

/* --------------------------------------------------------------- small things */

uint64_t lg__mpi_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static uint64_t grace_ms(const lg__mpi_call *c)
{
    uint64_t ms = c->deadline_ms / 4;
    return ms < 1000 ? 1000 : ms > 10000 ? 10000 : ms;
}

bool lg__mpi_expired(const lg__mpi_call *c) { return lg__mpi_now_ms() - c->begin_ms >= c->deadline_ms; }

bool lg__mpi_expired_long(const lg__mpi_call *c)
{
    uint64_t waited = lg__mpi_now_ms() - c->begin_ms;
    return waited >= c->deadline_ms && waited - c->deadline_ms >= grace_ms(c);
}

void lg__mpi_rest(uint32_t *idle)
{
    const uint32_t yields = 5000;
    if (*idle < yields) {
        sched_yield();
    } else {
        uint32_t us = *idle - yields < 200 ? 10 + (*idle - yields) : 200;
        struct timespec t = {0, (long)us * 1000};
        nanosleep(&t, NULL);
    }
    *idle += *idle < UINT32_MAX;
}

const char *lg__mpi_call_text(const lg__mpi_call *c, char out[LG__COMM_CALL_TEXT])
{
    return lg__comm_call_text(c->op, c->root, c->f->seq, out);
}

lg_status lg__mpi_no_memory(lg_error *err) { return lg_error_set(err, LG_ERR_NOMEM, "out of memory"); }

lg_status lg__mpi_check(int rc, const char *what, lg_error *err)
{
    if (rc == MPI_SUCCESS) {
        return LG_OK;
    }
    char text[MPI_MAX_ERROR_STRING + 1];
    int n = 0;
    if (MPI_Error_string(rc, text, &n) != MPI_SUCCESS) {
        n = 0;
    }
    text[n] = '\0';
    return lg_error_set(err, LG_ERR_COMM, "%s: %s", what, n > 0 ? text : "unknown MPI error");
}

/* ------------------------------------------------------------- small messages */

lg_status lg__mpi_post(lg__mpi_fabric *f, uint32_t to, int tag, const lg__mpi_head *h, const void *data, size_t bytes,
                       lg_error *err)
{
    lg__mpi_posted *p = malloc(sizeof *p);
    if (p == NULL) {
        return lg__mpi_no_memory(err);
    }
    p->m.h = *h;
    p->m.h.magic = LG__MPI_MAGIC;
    if (bytes > 0) {
        memcpy(p->m.data, data, bytes);
    }
    int rc = MPI_Isend(&p->m, (int)(sizeof p->m.h + bytes), MPI_BYTE, (int)to, tag, f->comm, &p->request);
    if (rc != MPI_SUCCESS) {
        free(p);
        return lg__mpi_check(rc, "MPI_Isend", err);
    }
    p->next = f->posted;
    f->posted = p;
    return LG_OK;
}

lg_status lg__mpi_reap(lg__mpi_fabric *f, lg_error *err)
{
    for (lg__mpi_posted **at = &f->posted; *at != NULL;) {
        lg__mpi_posted *p = *at;
        int done = 0;
        LG__MPI_TRY(lg__mpi_check(MPI_Test(&p->request, &done, MPI_STATUS_IGNORE), "MPI_Test", err));
        if (done) {
            *at = p->next;
            free(p);
        } else {
            at = &p->next;
        }
    }
    return LG_OK;
}

lg__mpi_head lg__mpi_head_of(const lg__mpi_call *c, uint32_t kind, uint64_t bytes)
{
    return (lg__mpi_head){.magic = LG__MPI_MAGIC,
                          .kind = kind,
                          .op = c->op,
                          .root = c->root,
                          .rank = -1,
                          .seq = c->f->seq,
                          .bytes = bytes};
}

lg_status lg__mpi_post_head(const lg__mpi_call *c, uint32_t to, int tag, uint32_t kind, const void *data,
                            uint64_t bytes, lg_error *err)
{
    lg__mpi_head h = lg__mpi_head_of(c, kind, bytes);
    return lg__mpi_post(c->f, to, tag, &h, data, bytes <= LG__MPI_INLINE_BYTES ? (size_t)bytes : 0, err);
}

lg_status lg__mpi_take(lg__mpi_call *c, int from, int tag, bool *got, int *source, lg_error *err)
{
    lg__mpi_fabric *f = c->f;
    MPI_Message handle;
    MPI_Status status;
    MPI_Request request;
    int flag = 0, count = 0;
    *got = false;
    LG__MPI_TRY(lg__mpi_check(MPI_Improbe(from, tag, f->comm, &flag, &handle, &status), "MPI_Improbe", err));
    if (!flag) {
        return LG_OK;
    }
    LG__MPI_TRY(lg__mpi_check(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count", err));
    *source = status.MPI_SOURCE;
    if (count < (int)sizeof(lg__mpi_head) || count > (int)sizeof(lg__mpi_message)) {
        return lg_error_set(err, LG_ERR_COMM, "rank %d sent %d bytes that are no message of lastgood", *source, count);
    }
    LG__MPI_TRY(lg__mpi_check(MPI_Imrecv(&f->in, count, MPI_BYTE, &handle, &request), "MPI_Imrecv", err));
    for (uint32_t idle = 0;;) {
        int done = 0;
        LG__MPI_TRY(lg__mpi_check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test", err));
        if (done) {
            break;
        }
        if (lg__mpi_expired_long(c)) { /* it began to send and stopped; f->in stays, f is broken */
            MPI_Request_free(&request);
            lg_error_set(err, LG_ERR_TIMEOUT, "rank %d stopped in the middle of a message for %" PRIu64 " ms", *source,
                         c->deadline_ms);
            err->rank = *source;
            return LG_ERR_TIMEOUT;
        }
        lg__mpi_rest(&idle);
    }
    uint64_t inline_bytes = (uint64_t)count - sizeof(lg__mpi_head);
    if (f->in.h.magic != LG__MPI_MAGIC || (f->in.h.bytes <= LG__MPI_INLINE_BYTES ? f->in.h.bytes : 0) != inline_bytes) {
        return lg_error_set(err, LG_ERR_COMM, "rank %d sent a message that another version of lastgood must have made",
                            *source);
    }
    c->idle = 0;
    *got = true;
    return LG_OK;
}

/* -------------------------------------------------------------------- streams */

/* An MPI call that failed may have freed it already, and to free it again would
 * end the whole job. */
static void let_go(MPI_Request *request)
{
    if (*request != MPI_REQUEST_NULL) {
        MPI_Request_free(request);
    }
}

bool lg__mpi_out_done(const lg__mpi_outflow *o) { return o->sent == o->bytes && !o->active; }

lg_status lg__mpi_out_poll(lg__mpi_call *c, lg__mpi_outflow *o, uint64_t available, lg_error *err)
{
    if (o->active) {
        int done = 0;
        LG__MPI_TRY(lg__mpi_check(MPI_Test(&o->request, &done, MPI_STATUS_IGNORE), "MPI_Test", err));
        if (!done) {
            return LG_OK;
        }
        o->active = false;
        o->sent += o->flying;
        c->idle = 0;
    }
    uint64_t n = available - o->sent;
    if (n == 0 || (n < LG__MPI_CHUNK_BYTES && available < o->bytes)) {
        return LG_OK;
    }
    n = n < LG__MPI_CHUNK_BYTES ? n : LG__MPI_CHUNK_BYTES;
    const void *from = o->p + o->sent;
    if (o->stage != NULL) {
        memcpy(o->stage, from, (size_t)n);
        from = o->stage;
    }
    LG__MPI_TRY(lg__mpi_check(MPI_Isend(from, (int)n, MPI_BYTE, (int)o->to, o->tag, c->f->comm, &o->request),
                              "MPI_Isend", err));
    o->active = true;
    o->flying = n;
    return LG_OK;
}

lg_status lg__mpi_out_stage(lg__mpi_outflow *o, lg_error *err)
{
    o->stage = malloc((size_t)(o->bytes < LG__MPI_CHUNK_BYTES ? o->bytes : LG__MPI_CHUNK_BYTES));
    return o->stage == NULL ? lg__mpi_no_memory(err) : LG_OK;
}

bool lg__mpi_out_end(lg__mpi_outflow *o)
{
    if (o->active) {
        let_go(&o->request);
        return true; /* with the stage */
    }
    free(o->stage);
    return false;
}

bool lg__mpi_in_done(const lg__mpi_inflow *i) { return i->got == i->bytes; }

lg_status lg__mpi_in_poll(lg__mpi_call *c, lg__mpi_inflow *i, lg_error *err)
{
    if (i->active) {
        int done = 0;
        LG__MPI_TRY(lg__mpi_check(MPI_Test(&i->request, &done, MPI_STATUS_IGNORE), "MPI_Test", err));
        if (!done) {
            return LG_OK;
        }
        i->active = false;
        i->got += i->flying;
        c->idle = 0;
    }
    if (lg__mpi_in_done(i)) {
        return LG_OK;
    }
    MPI_Message handle;
    MPI_Status status;
    int flag = 0, count = 0;
    LG__MPI_TRY(
        lg__mpi_check(MPI_Improbe((int)i->from, i->tag, c->f->comm, &flag, &handle, &status), "MPI_Improbe", err));
    if (!flag) {
        return LG_OK;
    }
    LG__MPI_TRY(lg__mpi_check(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count", err));
    if (count <= 0 || (uint64_t)count > i->bytes - i->got) {
        return lg_error_set(err, LG_ERR_COMM, "rank %" PRIu32 " sent %d bytes where %" PRIu64 " were left", i->from,
                            count, i->bytes - i->got);
    }
    LG__MPI_TRY(lg__mpi_check(MPI_Imrecv(i->p + i->got, count, MPI_BYTE, &handle, &i->request), "MPI_Imrecv", err));
    i->active = true;
    i->flying = (uint64_t)count;
    c->idle = 0;
    return LG_OK;
}

bool lg__mpi_in_end(lg__mpi_inflow *i)
{
    if (i->active) {
        let_go(&i->request);
    }
    return i->active;
}
