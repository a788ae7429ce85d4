/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_SESSION_H
#define LG_CORE_SESSION_H

/* A session on a root: its owner epoch, its run, and what it knows about the
 * checkpoints there. */

#include "comm/comm.h"
#include "core/save.h"
#include "core/walk.h"

#include <pthread.h>

typedef struct lg__background lg__background;

struct lg_session {
    lg_store *store;
    bool owns_store;
    lg_comm *comm; /* not for background threads: the caller may free it first */
    bool owns_comm;
    uint32_t rank, world;
    uint32_t flags;
    uint32_t keep_last;
    uint64_t keep_every;
    uint32_t check_replicas;
    uint64_t deadline_ms;
    uint64_t block_bytes, buffer_bytes;
    char domain[256];

    /* the same on all ranks */
    uint64_t epoch; /* 0: read-only */
    uint64_t saves; /* calls of lg_save_commit */
    bool settled;   /* resumed, or resume found the root empty */
    bool has_run;
    char run_id[LG_RUN_ID_TEXT];
    bool has_parent;
    lg_generation parent;
    uint64_t parent_step;
    bool parent_verified;
    lg__plan *plan;   /* of the save before, see lg__plan_get; this rank's */
    lg_status broken; /* SUPERSEDED and the like: every later save fails */
    char broken_message[LG_ERROR_MESSAGE_MAX];
    lg_session_status status; /* under `lock` while a save is in flight */

    /* saving in the background */
    uint64_t forks; /* lg__forks when it was opened: children must not use it */
    pthread_mutex_t lock;
    lg__background *job; /* launched and not yet settled with the other ranks; NULL: none */
    uint64_t staging_bytes;
    lg_kv *kv;
    void *pages; /* memory for copies, kept */
    size_t pages_bytes;
    uint32_t skips_in_a_row;
    lg_save_phase last_phase; /* of the newest one that was settled */
    uint64_t last_step;
    lg_save_info last_launched; /* the newest one that was launched and committed */

    /* coordinator only */
    uint64_t serial;
    bool not_durable;   /* a commit's last sync failed: remove nothing until one succeeds */
    lg_generation *bad; /* found damaged while loading */
    size_t n_bad, cap_bad;
};

void lg__session_free(lg_session *s);

/* LG_ERR_STATE in a child of fork: `what` names the call. */
lg_status lg__session_usable(const lg_session *s, const char *what, lg_error *err);

static inline bool lg__is_coordinator(const lg_session *s) { return s->rank == 0; }

bool lg__session_is_bad(const lg_session *s, lg_generation g);
lg_status lg__session_add_bad(lg_session *s, lg_generation g, lg_error *err);

/* The coordinator gives what it has in `err` and some bytes; every rank gets
 * both: the coordinator's error, or LG_OK and a copy of the bytes (*data
 * lg_free'd by the caller; on the coordinator untouched). */
lg_status lg__session_tell(lg_session *s, lg_status mine, void **data, size_t *bytes, lg_error *err);

#endif
