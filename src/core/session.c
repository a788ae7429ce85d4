/* SPDX-License-Identifier: Apache-2.0 */
#include "core/session.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/thread.h"
#include "core/background.h"
#include "core/owner.h"
#include "core/sweep.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_DEADLINE_MS UINT64_C(600000)
#define DEFAULT_BLOCK_BYTES UINT64_C(65536)
#define MIN_BLOCK_BYTES UINT64_C(4096)
#define MAX_BLOCK_BYTES (UINT64_C(64) << 20)
#define DEFAULT_BUFFER_BYTES (UINT64_C(64) << 20)
#define MIN_BUFFER_BYTES (UINT64_C(1) << 20)

static lg_status take_options(lg_session *s, const lg_session_options *o, lg_error *err)
{
    const uint32_t known = LG_SESSION_NEW_RUN | LG_SESSION_READ_ONLY | LG_SESSION_PLAIN | LG_SESSION_TAKE_OVER;
    LG__RETURN_IF(o->size != sizeof *o, err, LG_ERR_INVALID,
                  "lg_session_options is not set up with LG_SESSION_OPTIONS_INIT (size %zu)", o->size);
    LG__RETURN_IF((o->flags & ~known) != 0, err, LG_ERR_INVALID, "unknown session flags 0x%x", o->flags & ~known);
    s->flags = o->flags;
    s->keep_last = o->keep_last;
    s->keep_every = o->keep_every;
    s->check_replicas = o->check_replicas;
    s->deadline_ms = o->deadline_ms != 0 ? o->deadline_ms : DEFAULT_DEADLINE_MS;
    s->staging_bytes = o->staging_bytes;
    s->kv = o->kv;
    LG__RETURN_IF(o->kv != NULL && (o->kv->ops == NULL || o->kv->ops->version != LG_KV_OPS_VERSION ||
                                    o->kv->ops->set == NULL || o->kv->ops->get == NULL),
                  err, LG_ERR_INVALID, "the key-value store lacks a function or has another version than %d",
                  LG_KV_OPS_VERSION);
    LG__RETURN_IF(s->staging_bytes != 0 && s->staging_bytes < MIN_BUFFER_BYTES, err, LG_ERR_INVALID,
                  "staging_bytes %" PRIu64 " is less than 1 MiB", s->staging_bytes);
    s->block_bytes = o->block_bytes != 0 ? o->block_bytes : DEFAULT_BLOCK_BYTES;
    s->buffer_bytes = o->buffer_bytes != 0 ? o->buffer_bytes : DEFAULT_BUFFER_BYTES;
    LG__RETURN_IF(s->block_bytes < MIN_BLOCK_BYTES || s->block_bytes > MAX_BLOCK_BYTES ||
                      (s->block_bytes & (s->block_bytes - 1)) != 0,
                  err, LG_ERR_INVALID, "block_bytes %" PRIu64 " is no power of two from 4096 to 64 MiB",
                  s->block_bytes);
    LG__RETURN_IF(s->buffer_bytes < MIN_BUFFER_BYTES, err, LG_ERR_INVALID,
                  "buffer_bytes %" PRIu64 " is less than 1 MiB", s->buffer_bytes);
    if (o->domain != NULL) {
        LG__TRY(lg__name_check("failure domain", o->domain, strlen(o->domain), err));
        LG__RETURN_IF(strlen(o->domain) >= sizeof s->domain, err, LG_ERR_LIMIT,
                      "failure domain is longer than %zu bytes", sizeof s->domain - 1);
        lg__text_copy(s->domain, sizeof s->domain, o->domain);
    } else if (gethostname(s->domain, sizeof s->domain) != 0 || s->domain[0] == '\0' ||
               !lg__utf8_valid(s->domain, strnlen(s->domain, sizeof s->domain))) {
        snprintf(s->domain, sizeof s->domain, "localhost");
    }
    s->domain[sizeof s->domain - 1] = '\0';
    return LG_OK;
}

void lg__session_free(lg_session *s)
{
    if (s->owns_store) {
        lg_store_free(s->store);
    }
    if (s->owns_comm) {
        lg_comm_free(s->comm);
    }
    lg__pages_free(s->pages, s->pages_bytes);
    lg__plan_free(s->plan);
    pthread_mutex_destroy(&s->lock);
    lg__free(s->bad);
    lg__free(s);
}

bool lg__session_is_bad(const lg_session *s, lg_generation g)
{
    for (size_t i = 0; i < s->n_bad; i++) {
        if (lg_generation_compare(s->bad[i], g) == 0) {
            return true;
        }
    }
    return false;
}

lg_status lg__session_add_bad(lg_session *s, lg_generation g, lg_error *err)
{
    if (lg__session_is_bad(s, g)) {
        return LG_OK;
    }
    if (!lg__grow((void **)&s->bad, &s->cap_bad, s->n_bad, sizeof *s->bad)) {
        return lg__nomem(err);
    }
    s->bad[s->n_bad++] = g;
    return LG_OK;
}

/* Status, errno, rank: 32 bits each, before the bytes or the message. */
#define TELL_HEAD 12

lg_status lg__session_tell(lg_session *s, lg_status mine, void **data, size_t *bytes, lg_error *err)
{
    if (s->comm->size == 1) {
        return mine;
    }
    lg__buf message;
    lg__buf_init(&message, SIZE_MAX / 2);
    bool speaks = lg__is_coordinator(s);
    if (speaks) {
        if (mine != LG_OK && err->rank < 0) {
            err->rank = 0;
        }
        lg__buf_u32le(&message, (uint32_t)mine);
        lg__buf_u32le(&message, (uint32_t)(mine == LG_OK ? 0 : err->os_errno));
        lg__buf_u32le(&message, (uint32_t)(mine == LG_OK ? 0 : err->rank));
        if (mine == LG_OK) {
            lg__buf_add(&message, *data, *bytes);
        } else {
            lg__buf_str(&message, err->message);
        }
        if (message.failed) {
            /* Nobody can be told; the others run into their deadline. */
            lg__buf_free(&message);
            return lg__nomem(err);
        }
    }
    void *wire = message.data;
    size_t n = message.len;
    lg_error comm_err = LG_ERROR_INIT;
    lg_status st = lg__comm_broadcast(s->comm, &wire, &n, 0, s->deadline_ms, &comm_err);
    if (speaks) {
        lg__buf_free(&message);
        if (mine != LG_OK) {
            return mine;
        }
        if (st != LG_OK) {
            *err = comm_err;
        }
        return st;
    }
    if (st != LG_OK) {
        *err = comm_err;
        return st;
    }
    if (n < TELL_HEAD) {
        lg_free(wire);
        return lg_error_set(err, LG_ERR_INTERNAL, "rank 0 sent a message of %zu bytes", n);
    }
    lg_status theirs = (lg_status)lg__get_u32le(wire);
    size_t body = n - TELL_HEAD;
    if (theirs != LG_OK) {
        lg_error_set(err, theirs, "%.*s", (int)(body < LG_ERROR_MESSAGE_MAX ? body : LG_ERROR_MESSAGE_MAX - 1),
                     (char *)wire + TELL_HEAD);
        err->os_errno = (int)lg__get_u32le((char *)wire + 4);
        err->rank = (int)lg__get_u32le((char *)wire + 8);
        lg_free(wire);
        return theirs;
    }
    memmove(wire, (char *)wire + TELL_HEAD, body);
    *data = wire;
    *bytes = body;
    return LG_OK;
}

/* What every rank says about itself when a session opens. */
typedef struct hello {
    char magic[8];
    uint32_t rank, size;
    uint32_t flags;
    uint32_t status;
    uint64_t block_bytes;
    char message[512];
} hello;

#define HELLO_MAGIC "LGHELLO1"

/* Every rank number once, the same options everywhere; a rank that could not
 * even begin says so here. */
static lg_status greet(lg_session *s, lg_status mine, lg_error *err)
{
    hello h = {.rank = s->comm->rank,
               .size = s->comm->size,
               .flags = s->flags,
               .status = (uint32_t)mine,
               .block_bytes = s->block_bytes};
    memcpy(h.magic, HELLO_MAGIC, sizeof h.magic);
    lg__text_copy(h.message, sizeof h.message, mine != LG_OK ? err->message : "");
    if (s->comm->size == 1) {
        return mine;
    }
    size_t *sizes = lg__calloc(s->comm->size, sizeof *sizes);
    if (sizes == NULL) {
        return lg__nomem(err);
    }
    void *all = NULL;
    lg_status st = lg__comm_all_gather(s->comm, &h, sizeof h, &all, sizes, s->deadline_ms, err);
    for (uint32_t r = 0; st == LG_OK && r < s->comm->size; r++) {
        if (sizes[r] != sizeof h) {
            st = lg_error_set(err, LG_ERR_CONFLICT, "rank %" PRIu32 " runs another version of lastgood", r);
        }
    }
    const hello *of = all;
    for (uint32_t r = 0; st == LG_OK && r < s->comm->size; r++) {
        if (memcmp(of[r].magic, HELLO_MAGIC, sizeof h.magic) != 0) {
            st = lg_error_set(err, LG_ERR_CONFLICT, "rank %" PRIu32 " runs another version of lastgood", r);
        } else if (of[r].rank != r || of[r].size != s->comm->size) {
            st = lg_error_set(err, LG_ERR_CONFLICT,
                              "two processes say that they are rank %" PRIu32 " of %" PRIu32
                              ": check rank and world size that the launcher gives",
                              of[r].rank, of[r].size);
        } else if (of[r].status != LG_OK) {
            st = lg_error_set(err, (lg_status)of[r].status, "rank %" PRIu32 ": %s", r, of[r].message);
            err->rank = (int)r;
        } else if (of[r].flags != of[0].flags || of[r].block_bytes != of[0].block_bytes) {
            st = lg_error_set(err, LG_ERR_CONFLICT,
                              "rank %" PRIu32 " opened the session with other options than rank 0 (flags 0x%x against "
                              "0x%x, block_bytes %" PRIu64 " against %" PRIu64 ")",
                              r, of[r].flags, of[0].flags, of[r].block_bytes, of[0].block_bytes);
        }
    }
    lg_free(all);
    lg__free(sizes);
    return st;
}

static lg_status claim(lg_session *s, uint64_t *epoch, lg_error *err)
{
    const lg__owner_kind kind = (s->flags & LG_SESSION_PLAIN) == 0       ? LG__OWNER_RUN
                                : (s->flags & LG_SESSION_TAKE_OVER) == 0 ? LG__OWNER_PLAIN
                                                                         : LG__OWNER_PLAIN_ANYWAY;
    LG__TRY(lg__owner_claim(s->store, s->domain, kind, epoch, err));
    LG__TRY(lg__owner_end_attempts(s->store, *epoch, err));
    /* What earlier removals left; trouble with it is no reason not to train. */
    lg_error trouble = LG_ERROR_INIT;
    if (lg__sweep_root(s->store, *epoch, false, NULL, NULL, &trouble) != LG_OK) {
        s->status.removal_failures++;
        lg__text_copy(s->status.last_removal_error, sizeof s->status.last_removal_error, trouble.message);
    }
    return LG_OK;
}

lg_status lg_session_open(const char *root, const lg_session_options *options, lg_session **out, lg_error *err)
{
    LG__ERR(err);
    static const lg_session_options defaults = LG_SESSION_OPTIONS_INIT;
    const lg_session_options *o = options != NULL ? options : &defaults;
    lg_session *s = lg__calloc(1, sizeof *s);
    if (s == NULL) {
        return lg__nomem(err);
    }
    pthread_mutex_init(&s->lock, NULL);
    s->forks = lg__forks();
    /* From here on every rank goes through the same exchanges, whatever
     * happened to it: errors travel. */
    s->comm = o->size == sizeof *o ? o->comm : NULL;
    if (s->comm == NULL) {
        lg_status st = lg_comm_single_create(&s->comm, err);
        if (st != LG_OK) {
            lg__session_free(s);
            return st;
        }
        s->owns_comm = true;
    }
    s->rank = s->comm->rank;
    s->world = s->comm->size;
    s->deadline_ms = DEFAULT_DEADLINE_MS;
    lg_status st = take_options(s, o, err);
    if (st == LG_OK && out == NULL) {
        st = lg_error_set(err, LG_ERR_INVALID, "no place for the session");
    }
    if (st == LG_OK && o->store != NULL) {
        s->store = o->store;
    } else if (st == LG_OK) {
        st = root != NULL ? lg_store_open(root, &s->store, err) : lg_error_set(err, LG_ERR_INVALID, "no root given");
        s->owns_store = st == LG_OK;
    }
    st = greet(s, st, err);
    if (st == LG_OK && (s->flags & LG_SESSION_READ_ONLY) == 0) {
        uint64_t epoch = 0;
        lg_status mine = LG_OK;
        if (lg__is_coordinator(s)) {
            mine = lg__store_make_root(s->store, err);
            if (mine == LG_OK) {
                mine = claim(s, &epoch, err);
            }
        }
        void *data = &epoch;
        size_t bytes = sizeof epoch;
        st = lg__session_tell(s, mine, &data, &bytes, err);
        if (st == LG_OK && data != &epoch) {
            memcpy(&epoch, data, sizeof epoch);
            lg_free(data);
        }
        s->epoch = epoch;
    }
    if (st != LG_OK || out == NULL) {
        lg_error_wrap(err, "open %s", root != NULL ? root : "root");
        lg__session_free(s);
        return st;
    }
    *out = s;
    return LG_OK;
}

lg_status lg_session_close(lg_session *session, lg_error *err)
{
    LG__ERR(err);
    if (session == NULL || session->forks != lg__forks()) {
        return LG_OK;
    }
    bool left = false; /* to a save that does not end: it frees it */
    lg_status st = lg__background_close(session, &left, err);
    if (left) {
        return st;
    }
    lg__session_free(session);
    return st;
}

lg_status lg__session_usable(const lg_session *s, const char *what, lg_error *err)
{
    LG__RETURN_IF(s->forks != lg__forks(), err, LG_ERR_STATE,
                  "%s: the session belongs to the process that opened it; a child made by fork cannot use it", what);
    return LG_OK;
}

uint64_t lg_session_epoch(const lg_session *session) { return session != NULL ? session->epoch : 0; }

lg_status lg_session_get_status(const lg_session *session, lg_session_status *out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(session == NULL || out == NULL, err, LG_ERR_INVALID, "lg_session_get_status: NULL");
    LG__TRY(lg__session_usable(session, "lg_session_get_status", err));
    lg_session *s = (lg_session *)(uintptr_t)session; /* for its lock */
    pthread_mutex_lock(&s->lock);
    *out = s->status;
    out->skips_in_a_row = s->skips_in_a_row;
    out->phase = s->last_phase;
    out->phase_step = s->last_step;
    out->staging_bytes = s->pages_bytes;
    pthread_mutex_unlock(&s->lock);
    if (s->job != NULL) {
        lg__background_phase(s->job, &out->phase, &out->phase_step);
    }
    return LG_OK;
}

lg_status lg__session_save_facts(lg_session *s, lg__save_facts *out, lg_error *err)
{
    LG__TRY(lg__session_usable(s, "lg_save_begin", err));
    LG__RETURN_IF((s->flags & LG_SESSION_READ_ONLY) != 0, err, LG_ERR_STATE, "the session is read-only");
    *out = (lg__save_facts){
        .rank = s->comm->rank, .world = s->comm->size, .block_bytes = s->block_bytes, .buffer_bytes = s->buffer_bytes};
    return LG_OK;
}
