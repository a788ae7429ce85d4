/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_FORMAT_SAFETENSORS_H
#define LG_FORMAT_SAFETENSORS_H

/* The safetensors container: headers read strictly and written canonically
 * (order, escapes and padding of the reference writer, except that the header
 * is padded so that data starts at a multiple of 4096). */

#include "base/buf.h"
#include "base/mem.h"
#include "format/region.h"

#define LG__ST_MAX_HEADER UINT64_C(100000000)
/* Files of ours open a next one before the header passes this. */
#define LG__ST_SPLIT_HEADER UINT64_C(24000000)
#define LG__ST_DATA_ALIGN 4096

typedef struct lg__st_tensor {
    const char *name;
    size_t name_bytes;
    lg_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape;
    uint64_t begin, end;           /* from the start of the data */
    bool has_offsets;              /* DCP_SHARDING_INFO has saved_offsets for it */
    const uint64_t *saved_offsets; /* ndim entries */
} lg__st_tensor;

typedef struct lg__st_member { /* of "__metadata__" */
    const char *key, *value;
    size_t value_bytes;
} lg__st_member;

typedef struct lg__st_header {
    lg__arena *arena;    /* owns everything */
    uint64_t data_start; /* 8 + N */
    uint64_t file_bytes;
    lg__st_tensor *tensors; /* sorted by (begin, end, name) */
    size_t n;
    uint32_t *by_name;       /* indices sorted by name */
    lg__st_member *metadata; /* sorted by key; keys and values may hold any text */
    size_t n_metadata;
    bool has_metadata; /* "__metadata__" was there */
} lg__st_header;

/* Reads N from the first 8 bytes and checks it against the file's length; says
 * what the file is when it clearly is something else. `first`/`first_bytes`:
 * up to the first 64 bytes of the file. */
lg_status lg__st_header_bytes(const uint8_t *first, size_t first_bytes, uint64_t file_bytes, uint64_t *n,
                              lg_error *err);

/* Parses the N bytes behind the first 8. Refuses what docs/format-shards.md lists:
 * duplicates, holes, overlaps, overflow, unknown dtypes, trailing data. */
lg_status lg__st_parse(const char *text, uint64_t n, uint64_t file_bytes, lg__st_header **out, lg_error *err);
void lg__st_free(lg__st_header *h);
const lg__st_tensor *lg__st_find(const lg__st_header *h, const char *name);

/* ---- writing */

typedef struct lg__st_entry {
    const char *name;
    lg_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape;  /* of the box */
    const uint64_t *offset; /* saved_offsets, ndim entries; NULL: all 0 */
    uint64_t begin, end;    /* set by lg__st_plan */
    size_t number;          /* the caller's own */
} lg__st_entry;

typedef struct lg__st_meta {
    const char *key, *value;
} lg__st_meta;

/* Sorts entries canonically (dtype descending, name ascending), sets begin and
 * end, appends the 8-byte length and the padded header to `out`: format,
 * DCP_VERSION, DCP_SHARDING_INFO (unless plain) and `meta` in the given order.
 * align: 8 or LG__ST_DATA_ALIGN. */
lg_status lg__st_plan(lg__st_entry *entries, size_t n, const lg__st_meta *meta, size_t n_meta, bool plain,
                      uint64_t align, lg__buf *out, uint64_t *data_bytes, lg_error *err);

/* A header whose entries stay while the caller's metadata changes, as those of
 * save after save do: *members is where the text of `meta` lies in `out`, which
 * holds nothing before the header. */
typedef struct lg__st_place {
    size_t at, bytes;
} lg__st_place;
lg_status lg__st_plan_renewable(lg__st_entry *entries, size_t n, const lg__st_meta *meta, size_t n_meta, bool plain,
                                uint64_t align, lg__buf *out, lg__st_place *members, uint64_t *data_bytes,
                                lg_error *err);
/* Makes it what lg__st_plan makes of the same entries and this `meta`, at least
 * one member (not plain). After an error the header is of no use. */
lg_status lg__st_renew(lg__buf *header, lg__st_place *members, const lg__st_meta *meta, size_t n_meta, uint64_t align,
                       lg_error *err);
/* Where the text of a header ends and its padding begins. */
size_t lg__st_text_end(const lg__buf *header);

/* Upper bound of what one entry adds to the header, sharding info included. */
uint64_t lg__st_entry_bytes(const char *name, uint32_t ndim);
/* The same for any name of that length, without looking at it. */
uint64_t lg__st_entry_most(size_t name_bytes, uint32_t ndim);

#endif
