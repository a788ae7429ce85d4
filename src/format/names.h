/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_FORMAT_NAMES_H
#define LG_FORMAT_NAMES_H

/* The names in a root and in a step folder: made and read in one place. A name
 * counts only if making it anew from its parts gives the same bytes. */

#include <lastgood/lastgood.h>
#include <stdbool.h>

#define LG__NAME_MAX 256
#define LG__ATTEMPT_HEX 16 /* digits of an attempt */
#define LG__MANIFEST "lastgood.json"
#define LG__FAILED "failed"

typedef enum lg__root_kind {
    LG__ROOT_FOREIGN = 0,
    LG__ROOT_STEP,    /* step-000000000500.g3.17 */
    LG__ROOT_PARTIAL, /* .step-000000001000.g3.18.<attempt>.partial */
    LG__ROOT_OWNER,   /* .owner-3 */
    LG__ROOT_TRASH,   /* .trash-<epoch of who removes>.<16 hex digits>-<name without leading dots> */
    LG__ROOT_ROLLBACK /* rollback-4.1.json */
} lg__root_kind;

typedef struct lg__root_name {
    lg__root_kind kind;
    uint64_t step;                     /* step, partial */
    lg_generation generation;          /* step, partial, rollback; owner, trash: epoch only */
    char attempt[LG__ATTEMPT_HEX + 1]; /* partial */
} lg__root_name;

lg__root_name lg__root_name_parse(const char *name);
void lg__step_folder(uint64_t step, lg_generation g, char out[LG__NAME_MAX]);
void lg__partial_folder(uint64_t step, lg_generation g, const char *attempt, char out[LG__NAME_MAX]);
void lg__owner_file(uint64_t epoch, char out[LG__NAME_MAX]);
void lg__rollback_file(lg_generation g, char out[LG__NAME_MAX]);
/* `token`: 16 hex digits; names too long for a file system are cut. */
void lg__trash_name(uint64_t epoch, const char *token, const char *name, char out[LG__NAME_MAX]);

/* Files in a step folder; rank, box number and count are from 0 / a count here,
 * from 1 on disk. */
void lg__shard_file(uint32_t rank, lg_group group, uint32_t number, uint32_t count, char out[LG__NAME_MAX]);
void lg__sums_file(uint32_t rank, char out[LG__NAME_MAX]);
/* Where a rank that fails in the background leaves the cause: rank-00001.failed. */
void lg__rank_failed_file(uint32_t rank, char out[LG__NAME_MAX]);
/* lastgood-<kind>-<n>.json; false if the name is none of a side record. */
void lg__side_file(const char *kind, uint32_t n, char out[LG__NAME_MAX]);
bool lg__side_name_parse(const char *name, char kind[32], uint32_t *n);
/* May a user attach a file of this name? Plain, no leading dot, none of ours,
 * no .safetensors, no temporary name. */
lg_status lg__attach_name_check(const char *name, lg_error *err);

#endif
