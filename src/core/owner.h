/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_OWNER_H
#define LG_CORE_OWNER_H

/* Who may write to a root: owner epochs, the end of earlier attempts, and
 * removal by renaming. On the coordinator only. */

#include "core/walk.h"

/* Claims the next epoch: exclusive create of .owner-N, N being above every
 * epoch in a name or manifest, synced with the root. When the disk is full,
 * attempts of earlier epochs are ended first: that is what the claim is for,
 * and it makes room. */
typedef enum lg__owner_kind {
    LG__OWNER_RUN = 0,
    LG__OWNER_PLAIN, /* for one save by itself: LG_ERR_PROTECTED where a run holds the root, which would lose it */
    LG__OWNER_PLAIN_ANYWAY,
    LG__OWNER_AS_BEFORE /* whatever kind the owner before was of */
} lg__owner_kind;
lg_status lg__owner_claim(lg_store *store, const char *domain, lg__owner_kind kind, uint64_t *epoch, lg_error *err);

/* What `.owner-<epoch>` says: "HOST at 2026-11-29T18:31:57Z", or "" if it cannot
 * be read. Fields may be NULL. */
void lg__owner_who(lg_store *store, uint64_t epoch, char domain[256], char created[LG_CREATED_TEXT]);

/* Ends every attempt of an epoch below `epoch`, so that its late owner cannot
 * commit any more, and makes what is committed durable. */
lg_status lg__owner_end_attempts(lg_store *store, uint64_t epoch, lg_error *err);

/* Ends one attempt: LG_OK when it can no longer commit, LG_ERR_EXISTS when it
 * has committed. `folder` is the partial folder, or the step folder on stores
 * without folder rename. What it wrote is removed afterwards as far as
 * possible; a tombstone stays. */
lg_status lg__attempt_end(lg_store *store, const char *folder, const char *run_id, lg_generation g, const char *attempt,
                          uint64_t epoch, lg_error *err);

/* The same for an attempt that failed, by its own session: the file `failed`, with
 * the cause, stays, in the folder whose name lg__attempt_trash gives (on stores
 * without folder rename in `folder`), until lg__attempt_forget. */
lg_status lg__attempt_fail(lg_store *store, const char *folder, const char *run_id, lg_generation g,
                           const char *attempt, uint64_t epoch, lg_error *err);
void lg__attempt_trash(const lg_store *store, const char *folder, const char *attempt, uint64_t epoch,
                       char out[LG__NAME_MAX]);
void lg__attempt_forget(lg_store *store, const char *folder, const char *attempt, uint64_t epoch);

/* LG_ERR_SUPERSEDED if an owner above `epoch` is there. */
lg_status lg__owner_check(lg_store *store, uint64_t epoch, lg_error *err);

/* Removes a committed checkpoint: renamed to trash and the root synced, then
 * unlinked; on stores without folder rename the manifest goes first. `epoch`
 * is written into the trash's name. */
lg_status lg__checkpoint_remove(lg_store *store, const char *folder, uint64_t epoch, lg_error *err);

/* Unlinks a folder and what is in it; NOT_FOUND anywhere is success. */
lg_status lg__folder_remove(lg_store *store, const char *folder, lg_error *err);
lg_status lg__folder_bytes(lg_store *store, const char *folder, uint64_t *out, lg_error *err);

#endif
