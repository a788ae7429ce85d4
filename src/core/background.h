/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_BACKGROUND_H
#define LG_CORE_BACKGROUND_H

/* One save behind the trainer's back: staging, writing, committing, and what
 * the next exchange of the ranks has to know of it. The foreground starts it
 * (launch.c) and settles it (commit.c); no other call of the session changes
 * what it reads meanwhile. */

#include "core/commit.h"

typedef enum lg__last_state {
    LG__LAST_NONE = 0,
    LG__LAST_IN_FLIGHT,
    LG__LAST_COMMITTED,
    LG__LAST_FAILED
} lg__last_state;

/* This rank's view of it. */
typedef struct lg__last {
    lg__last_state state;
    bool own;      /* the failure is of this rank's own part */
    bool in_place; /* failed, but the checkpoint is there (not known durable) */
    uint64_t step, bytes_total;
    lg_error err;
} lg__last;

/* Before the first exchange, so that want of memory is told there. Takes the
 * save. */
lg_status lg__background_new(lg_session *s, lg_save *save, lg__background **out, lg_error *err);
/* Waits for its thread. NULL is fine. */
void lg__background_free(lg__background *job);

/* It becomes the session's. Returns when all that is not lazy is safe. Trouble
 * of this rank alone (`mine` before this, *cause) is told by a later exchange. */
void lg__background_start(lg__background *job, const lg__attempt *a, const lg_launch_options *o, lg_status mine,
                          const lg_error *cause, lg_launch_info *info);

/* NULL is fine: none. */
lg__last lg__background_last(lg__background *job);

/* Waits until it is over; LG_ERR_TIMEOUT says what it is at. */
lg_status lg__background_wait(lg__background *job, uint64_t deadline_ms, lg_error *err);
/* Waits until everything is copied; checks the sources if that was asked for. */
lg_status lg__background_fence(lg__background *job, uint64_t deadline_ms, lg_error *err);
bool lg__background_staged(lg__background *job);
/* Fails it, if what this rank writes cannot have been committed yet; else false,
 * and at least nothing older is removed for it. */
bool lg__background_refuse(lg__background *job, lg_status status, const char *message);
void lg__background_phase(lg__background *job, lg_save_phase *phase, uint64_t *step);

/* It is over and all ranks know the result: committed, or failed, then perhaps in
 * place. Frees it, and brings the session up to date. */
void lg__background_settle(lg_session *s, bool committed, bool in_place, uint64_t bytes_total);

/* At the end of a session. *left: it still runs (LG_ERR_TIMEOUT), and frees
 * itself and the session when it ends. */
lg_status lg__background_close(lg_session *s, bool *left, lg_error *err);

/* Saves that still run though their sessions were closed. */
extern _Atomic uint32_t lg__background_left;

#endif
