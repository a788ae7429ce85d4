/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_FORMAT_RECORD_H
#define LG_FORMAT_RECORD_H

/* Small sealed JSON records: side records in a step folder (pins) and rollback
 * records in the root. */

#include "format/manifest.h"

#define LG__RECORD_MAX ((size_t)1 << 20)

typedef struct lg__pin_record {
    uint32_t n; /* the highest n counts */
    bool pinned;
    uint8_t manifest[LG__SHA256_BYTES]; /* of the manifest it belongs to */
    char created[LG_CREATED_TEXT];
    char reason[256];
} lg__pin_record;

lg_status lg__pin_encode(const lg__pin_record *r, lg__buf *out, lg_error *err);
lg_status lg__pin_decode(const char *bytes, size_t n, lg__pin_record *out, lg_error *err);

typedef struct lg__rollback_record {
    char run_id[LG_RUN_ID_TEXT];
    lg_generation generation;
    lg_generation target;
    uint64_t target_step;
    uint8_t target_manifest[LG__SHA256_BYTES];
    char created[LG_CREATED_TEXT];
    char reason[256];
} lg__rollback_record;

lg_status lg__rollback_encode(const lg__rollback_record *r, lg__buf *out, lg_error *err);
lg_status lg__rollback_decode(const char *bytes, size_t n, lg__rollback_record *out, lg_error *err);

#endif
