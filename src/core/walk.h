/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_WALK_H
#define LG_CORE_WALK_H

/* What a root holds, and which checkpoint is the newest.
 *
 * The walk reads every manifest and rollback record, orders them by descending
 * generation and follows the records: at a record it goes on at its target,
 * and what lies between is discarded. What is not discarded is the order in
 * which resume tries. */

#include "format/manifest.h"
#include "format/names.h"
#include "format/record.h"
#include "store/store.h"

#define LG__REASON_MAX 512

typedef struct lg__walk_item {
    char name[LG__NAME_MAX];
    lg_generation generation; /* the manifest's; the name's where it cannot be read */
    uint64_t step;
    bool is_rollback;
    bool discarded;
    lg_status status; /* of the manifest or record: OK, CORRUPT, FORMAT, VERSION, NOT_FOUND, CONFLICT */
    char reason[LG__REASON_MAX];
    lg__buf bytes;   /* of the manifest */
    lg__manifest *m; /* NULL unless status is OK or CONFLICT */
    lg__rollback_record rollback;
} lg__walk_item;

/* Another name in the root. */
typedef struct lg__root_item {
    char name[LG__NAME_MAX];
    lg__root_name parsed; /* a tombstone has kind LG__ROOT_STEP */
    bool tombstone;
    lg_node_type type;
    uint64_t bytes;
} lg__root_item;

typedef struct lg__walk {
    lg__walk_item *items; /* descending generation */
    size_t n, cap;
    lg__root_item *others; /* owners, partial and trash folders, tombstones, foreign names */
    size_t n_others, cap_others;
    uint64_t highest_epoch;          /* in any name or manifest */
    char highest_name[LG__NAME_MAX]; /* the name that has it; "" while it is 0 */
    uint64_t highest_owner;          /* of owner files */
    bool unreadable_newer;           /* a manifest or record of a newer version is there */
} lg__walk;

/* Reads the whole root. On stores without folder rename a step folder without
 * a manifest is an unfinished attempt (among the others); elsewhere it is a
 * checkpoint that lost its manifest. */
lg_status lg__walk_read(lg_store *store, lg__walk **out, lg_error *err);
void lg__walk_free(lg__walk *w);

/* Not damage but something a person must look at: a newer version, no
 * permission, two that contradict each other. Nobody goes on with an older
 * checkpoint behind such a one, and nobody removes it. */
static inline bool lg__walk_must_ask(lg_status status)
{
    return status == LG_ERR_VERSION || status == LG_ERR_PERMISSION || status == LG_ERR_CONFLICT;
}

/* Only names, no file is opened: for epoch checks. */
lg_status lg__root_highest_owner(lg_store *store, uint64_t *out, lg_error *err);

/* Is every file of the item's manifest there with its size? Sets status and
 * reason when not; LG_OK unless the check itself could not be made. */
lg_status lg__walk_check_whole(lg_store *store, lg__walk_item *item, lg_error *err);

/* Was the checkpoint in `folder` removed since it was listed? Whoever finds files
 * missing asks this first: what another process has removed is not damaged. */
bool lg__folder_gone(lg_store *store, const char *folder);

/* How often a walk is read anew because checkpoints went while it was used. */
#define LG__WALK_TRIES 20

/* Pin state by the highest side record that belongs to this manifest; a
 * damaged pin record counts as pinned. `manifest`: its SHA-256, or NULL where it
 * cannot be read; then every record counts. A folder that is gone is not pinned. */
typedef struct lg__pin_state {
    bool pinned;
    uint32_t highest; /* n of the highest record; 0 = none */
    char reason[256];
} lg__pin_state;
lg_status lg__pin_read(lg_store *store, const char *folder, const uint8_t *manifest, lg__pin_state *out, lg_error *err);

#endif
