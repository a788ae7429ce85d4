/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_COMMIT_H
#define LG_CORE_COMMIT_H

/* The steps of a commit, for those who walk through them: commit.c in the
 * foreground, background.c behind the trainer's back. */

#include "core/session.h"

/* What all ranks know once the folder is there. */
typedef struct lg__attempt {
    uint32_t skip; /* lg_skip_reason */
    char run_id[LG_RUN_ID_TEXT];
    char token[LG__ATTEMPT_HEX + 1];
    lg_generation generation;
    char folder[LG__NAME_MAX]; /* where ranks write */
    char final[LG__NAME_MAX];
} lg__attempt;

/* Memory that a save needs between ranks, taken before the first exchange: a
 * rank that has none says so there instead of leaving the others waiting. */
typedef struct lg__commit_scratch {
    size_t *sizes;
    lg__written *written;
    bool earlier; /* out: the error of lg__commit_open is that of the save before, counted and worded */
} lg__commit_scratch;

lg_status lg__commit_scratch_new(uint32_t world, lg__commit_scratch *out, lg_error *err);
void lg__commit_scratch_free(lg__commit_scratch *to);

/* What ranks open an exchange for; all the same. */
typedef enum lg__purpose { LG__TO_COMMIT = 1, LG__TO_LAUNCH, LG__TO_LAUNCH_OR_SKIP, LG__TO_WAIT } lg__purpose;

/* The first exchange of a save, up to where the attempt's folder is there.
 * `mine`: what happened to this rank before, with *err. The result is the same
 * on all ranks. *local, when that is LG_OK: this rank's own trouble, which the
 * others do not know yet, with *local_err. a->skip: nothing is to be done.
 * sync_root: the folder's name is durable on return; else before the commit. */
lg_status lg__commit_open(lg_save *save, lg__purpose purpose, bool sync_root, lg__commit_scratch *to, lg_status mine,
                          lg__attempt *a, lg_status *local, lg_error *local_err, lg_error *err);

/* An exchange without a save: settles what is in flight (lg_session_wait). Other
 * ranks may come up to `later_ms` later. */
lg_status lg__commit_settle(lg_session *s, uint64_t later_ms, lg_status mine, lg_error *err);

void lg__commit_ids(const lg_session *s, const lg__attempt *a, lg__save_ids *out);

/* Files that the user attached; the coordinator's. */
lg_status lg__commit_attached(lg_save *save, const lg__attempt *a, uint64_t *bytes, lg_error *err);

/* LG_ERR_NOT_FOUND means that the folder is gone. */
lg_status lg__commit_vanished(lg_status st, const lg__attempt *a, lg_error *err);
/* The same while writing, where it may also be the answer to a request that took
 * place: then the attempt was not ended, and st stays what it is. */
lg_status lg__commit_unwritten(const lg_session *s, lg_status st, const lg__attempt *a, lg_error *err);

/* Steps 2 to 5, on the coordinator. *committed: the checkpoint is in place,
 * whatever comes after. Sets the session's not_durable. */
lg_status lg__commit_coordinate(lg_save *save, const lg__attempt *a, const lg__written *written, bool *committed,
                                lg_error *err);

/* Does a committed manifest of this very attempt lie in `folder`? *other tells
 * that some manifest (or tombstone) is there that is not ours. */
bool lg__commit_is_ours(lg_store *store, const char *folder, const char *token, bool *other);

/* Counts and words the failure of a save that was not launched; after
 * LG_ERR_SUPERSEDED every later one fails the same way. */
void lg__commit_failed(lg_session *s, uint64_t step, lg_status st, lg_error *err);

/* What later saves follow: the run and the parent. A checkpoint that is in
 * place counts even where the save is reported as failed. */
void lg__commit_remember(lg_session *s, uint64_t step, const lg__attempt *a);

#endif
