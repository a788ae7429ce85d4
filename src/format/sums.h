/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_FORMAT_SUMS_H
#define LG_FORMAT_SUMS_H

/* rank-00001.sums: checksums of one rank's files, and the rank's report.
 *
 *   0   8   "LGSUMS1\n"
 *   8   4   version 1
 *   12  4   algorithm: 1 = CRC32C
 *   16  4   block bytes (power of two in [4096, 64 MiB])
 *   20  4   number of tables
 *   24  8   where the report starts
 *   32  8   length of the report
 *   40  4   CRC32C of bytes 0..39
 *   44  4   zero
 *   48      tables, each, in file order:
 *             8  length of the file
 *             8  length of its header: where the data starts
 *             4  CRC32C of the header, bytes [0, header length)
 *             4  zero
 *             4  for each block of data, counted from the start of the data;
 *                the last may be short
 *   then the report (JSON), which ends the file.
 */

#include "base/buf.h"
#include "base/mem.h"
#include "format/layout.h"

#define LG__SUMS_HEAD_BYTES 48
#define LG__TABLE_HEAD_BYTES 24
#define LG__REPORT_MAX ((size_t)256 << 20)

typedef struct lg__table {
    uint64_t file_bytes;
    uint64_t header_bytes;
    uint32_t header_crc;
    uint64_t n_blocks;
    uint32_t *block_crc; /* n_blocks entries */
} lg__table;

static inline uint64_t lg__block_count(uint64_t data_bytes, uint64_t block_bytes)
{
    return data_bytes / block_bytes + (data_bytes % block_bytes != 0);
}

/* Appends a table as on disk. */
void lg__table_encode(const lg__table *t, lg__buf *out);
/* Parses one that takes exactly `bytes`; block_crc is lg__malloc'ed. */
lg_status lg__table_decode(const void *data, size_t bytes, uint64_t block_bytes, lg__table *out, lg_error *err);
static inline uint64_t lg__table_bytes(uint64_t data_bytes, uint64_t block_bytes)
{
    return LG__TABLE_HEAD_BYTES + 4 * lg__block_count(data_bytes, block_bytes);
}

typedef struct lg__sums_head {
    uint32_t block_bytes;
    uint32_t n_tables;
    uint64_t report_at, report_bytes;
} lg__sums_head;

void lg__sums_head_encode(const lg__sums_head *h, lg__buf *out);
lg_status lg__sums_head_decode(const void *data, size_t bytes, uint64_t file_bytes, lg__sums_head *out, lg_error *err);

/* ---- the report: what one rank says it wrote. JSON, see docs/format.md. */

typedef struct lg__report_file {
    lg_group group;
    uint32_t number;
    uint64_t bytes;
    uint64_t header_bytes;
    uint8_t table[LG__SHA256_BYTES]; /* digest of its table as on disk */
} lg__report_file;

typedef struct lg__report_use { /* a layout this rank takes part in */
    uint8_t id[LG__LAYOUT_ID_BYTES];
    uint64_t tensors; /* how many, those with empty boxes included */
    uint64_t sum;     /* of fingerprints, mod 2^64 */
} lg__report_use;

typedef struct lg__report_tensor {
    const char *name;
    lg_group group;
    lg_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape;
    uint64_t flat_offset;
    size_t layout;           /* index into layouts, or LG__IRREGULAR */
    const lg__region *boxes; /* irregular: this rank's, in row-major order */
    size_t n_boxes;
    uint64_t fingerprint; /* lg__tensor_fingerprint; 0: not known. Not in the file */
} lg__report_tensor;

typedef struct lg__report_alias {
    const char *alias, *name;
    bool stored;
} lg__report_alias;

typedef struct lg__report {
    lg__arena *arena;
    char run_id[LG_RUN_ID_TEXT];
    char attempt[33];
    lg_generation generation;
    uint64_t step;
    uint32_t rank, world;
    const char *domain;
    lg__report_file *files; /* by group, then number */
    size_t n_files;
    lg__report_use *uses;
    size_t n_uses;
    lg_layout **layouts; /* those whose first rank this is; unref'ed */
    size_t n_layouts;
    lg__report_tensor *tensors; /* of those layouts, and all irregular ones here */
    size_t n_tensors;
    lg__report_alias *aliases;
    size_t n_aliases;
    json_t *state; /* global state, object */
} lg__report;

lg_status lg__report_new(lg__report **out, lg_error *err);
void lg__report_free(lg__report *r);
lg_status lg__report_encode(const lg__report *r, lg__buf *out, lg_error *err);
lg_status lg__report_decode(const char *text, size_t bytes, lg__report **out, lg_error *err);
/* Only what it is and its files: for those who checked its digest and read
 * tensors by it. The rows of tensors are not looked at. */
lg_status lg__report_decode_files(const char *text, size_t bytes, lg__report **out, lg_error *err);

#endif
