/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_FORMAT_MANIFEST_H
#define LG_FORMAT_MANIFEST_H

/* lastgood.json: the manifest, in memory and as bytes.
 *
 * On disk: {"crc32c":"xxxxxxxx",...} where the eight hex digits are the CRC32C
 * of all bytes after the closing quote and the comma, that is from byte 21 to
 * the end of the file. The same prefix is used by side and rollback records. */

#include "base/buf.h"
#include "base/json_pieces.h"
#include "base/mem.h"
#include "format/layout.h"

#include <jansson.h>

#define LG__FORMAT_MAJOR 1
#define LG__FORMAT_MINOR 0
#define LG__MANIFEST_MAX ((size_t)256 << 20) /* bytes */
#define LG__MAX_WORLD 1000000
#define LG__MAX_FILES 99999 /* of one rank in one group */

typedef struct lg__rank_row {
    uint32_t n_files[LG_GROUP_COUNT];
    const uint64_t *file_bytes[LG_GROUP_COUNT]; /* n_files entries each */
    uint64_t sums_bytes;                        /* length of the sums file */
    uint8_t report[LG__SHA256_BYTES];           /* digest of the report in it */
    const char *domain;
} lg__rank_row;

typedef struct lg__stored_piece {
    uint32_t rank;
    uint32_t number; /* b: which box of the rank, hence which file */
    lg__region box;
} lg__stored_piece;

#define LG__IRREGULAR SIZE_MAX

typedef struct lg__manifest_tensor {
    const char *name;
    lg_group group;
    lg_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape;
    uint64_t flat_offset;
    size_t layout;                  /* index, or LG__IRREGULAR */
    const lg__stored_piece *pieces; /* irregular: sorted by (rank, number) */
    size_t n_pieces;
    const char *alias_of; /* NULL, or the name of another entry that is no alias */
    bool stored;          /* false: an alias whose bytes are only under alias_of */
    uint64_t fingerprint; /* while reports are merged; 0: not known. Not in the file */
} lg__manifest_tensor;

typedef struct lg__attached {
    const char *name;
    uint64_t bytes;
    uint8_t sha256[LG__SHA256_BYTES];
} lg__attached;

typedef struct lg__manifest {
    lg__arena *arena; /* owns strings and arrays; layouts are unref'ed, state decref'ed */
    bool tombstone;   /* then only run_id, generation, attempt, superseded_by count */
    uint64_t superseded_by;
    uint32_t major, minor;
    char run_id[LG_RUN_ID_TEXT];
    lg_generation generation;
    char attempt[33];
    uint64_t step;
    bool has_parent;
    lg_generation parent;
    uint64_t parent_step;
    bool parent_verified;
    char created[LG_CREATED_TEXT];
    uint32_t world;
    uint64_t block_bytes;
    lg__rank_row *ranks; /* world entries */
    lg__attached *attached;
    size_t n_attached;
    lg_layout **layouts;
    size_t n_layouts;
    lg__manifest_tensor *tensors; /* sorted by name */
    size_t n_tensors;
    json_t *state;                    /* object: global state by key, tagged JSON */
    uint8_t sha256[LG__SHA256_BYTES]; /* of the file's bytes; set by encode and decode */
} lg__manifest;

lg_status lg__manifest_new(lg__manifest **out, lg_error *err);
void lg__manifest_free(lg__manifest *m);

/* Appends the file's bytes to `out` and sets m->sha256. One row a line for
 * ranks, layouts and tensors, so that people can read and grep it. */
lg_status lg__manifest_encode(lg__manifest *m, lg__buf *out, lg_error *err);

/* LG_ERR_CORRUPT: checksum; LG_ERR_FORMAT: contents; LG_ERR_VERSION: a newer
 * major version or an unknown feature in "requires". Everything is validated:
 * bounds, sorted unique names, layouts, tensors against layouts, tiling of
 * irregular boxes, aliases, attached names. */
lg_status lg__manifest_decode(const char *bytes, size_t n, lg__manifest **out, lg_error *err);

/* What decode checks beyond the form of the JSON, and encode before it writes:
 * whatever was encoded can be decoded. Errors begin with the member's path. */
lg_status lg__manifest_check(const lg__manifest *m, lg_error *err);

/* NULL if absent. */
const lg__manifest_tensor *lg__manifest_find(const lg__manifest *m, const char *name);
lg__tensor_desc lg__manifest_desc(const lg__manifest_tensor *t);
bool lg__manifest_is_copies(const lg__manifest *m, const lg__manifest_tensor *t);

/* The CRC prefix shared with records: wraps `body` (from the byte after "{" to
 * the closing brace) and checks and strips it. */
lg_status lg__sealed_json(const char *body, size_t bytes, lg__buf *out, lg_error *err);
/* The same for a body that is appended to `out` between the two; `start` is
 * where `out` ended before. */
void lg__sealed_json_begin(lg__buf *out);
lg_status lg__sealed_json_end(lg__buf *out, size_t start, lg_error *err);
lg_status lg__sealed_json_parse(const char *bytes, size_t n, json_t **out, lg_error *err);
/* The same check; *out is the text of the object, not parsed yet. */
lg_status lg__sealed_json_text(const char *bytes, size_t n, lg__json_piece *out, lg_error *err);

#endif
