/* SPDX-License-Identifier: Apache-2.0 */
#include "format/sums.h"

#include "base/error.h"
#include "format/member.h"

#include <inttypes.h>
#include <string.h>

#define MAGIC "LGSUMS1\n"
#define MAGIC_BYTES (sizeof MAGIC - 1)
#define SUMS_VERSION 1
#define ALGORITHM_CRC32C 1

/* ------------------------------------------------------------------- tables */

void lg__table_encode(const lg__table *t, lg__buf *out)
{
    lg__buf_u64le(out, t->file_bytes);
    lg__buf_u64le(out, t->header_bytes);
    lg__buf_u32le(out, t->header_crc);
    lg__buf_u32le(out, 0);
    for (uint64_t i = 0; i < t->n_blocks; i++) {
        lg__buf_u32le(out, t->block_crc[i]);
    }
}

lg_status lg__table_decode(const void *data, size_t bytes, uint64_t block_bytes, lg__table *out, lg_error *err)
{
    const unsigned char *p = data;
    LG__RETURN_IF(!lg__block_bytes_valid(block_bytes), err, LG_ERR_INTERNAL, "table with blocks of %" PRIu64 " bytes",
                  block_bytes);
    LG__RETURN_IF(bytes < LG__TABLE_HEAD_BYTES, err, LG_ERR_FORMAT, "table of %zu bytes; its head alone takes %d",
                  bytes, LG__TABLE_HEAD_BYTES);
    lg__table t = {.file_bytes = lg__get_u64le(p), .header_bytes = lg__get_u64le(p + 8)};
    t.header_crc = lg__get_u32le(p + 16);
    LG__RETURN_IF(lg__get_u32le(p + 20) != 0, err, LG_ERR_FORMAT, "table with bytes set at 20 that must be zero");
    LG__RETURN_IF(t.header_bytes > t.file_bytes, err, LG_ERR_FORMAT,
                  "table of a file of %" PRIu64 " bytes whose header would take %" PRIu64, t.file_bytes,
                  t.header_bytes);
    uint64_t data_bytes = t.file_bytes - t.header_bytes;
    /* Blocks have at least 4096 bytes, so this cannot overflow. */
    LG__RETURN_IF(lg__table_bytes(data_bytes, block_bytes) != bytes, err, LG_ERR_FORMAT,
                  "table of %zu bytes where %" PRIu64 " bytes of data in blocks of %" PRIu64 " need %" PRIu64, bytes,
                  data_bytes, block_bytes, lg__table_bytes(data_bytes, block_bytes));
    t.n_blocks = lg__block_count(data_bytes, block_bytes);
    t.block_crc = lg__calloc((size_t)t.n_blocks, sizeof *t.block_crc);
    if (t.block_crc == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0; i < t.n_blocks; i++) {
        t.block_crc[i] = lg__get_u32le(p + LG__TABLE_HEAD_BYTES + 4 * i);
    }
    *out = t;
    return LG_OK;
}

/* --------------------------------------------------------------------- head */

void lg__sums_head_encode(const lg__sums_head *h, lg__buf *out)
{
    lg__buf head;
    lg__buf_init(&head, LG__SUMS_HEAD_BYTES);
    lg__buf_add(&head, MAGIC, MAGIC_BYTES);
    lg__buf_u32le(&head, SUMS_VERSION);
    lg__buf_u32le(&head, ALGORITHM_CRC32C);
    lg__buf_u32le(&head, h->block_bytes);
    lg__buf_u32le(&head, h->n_tables);
    lg__buf_u64le(&head, h->report_at);
    lg__buf_u64le(&head, h->report_bytes);
    lg__buf_u32le(&head, lg__crc32c(0, head.data, head.len));
    lg__buf_u32le(&head, 0);
    out->failed = out->failed || head.failed;
    lg__buf_add(out, head.data, head.len);
    lg__buf_free(&head);
}

lg_status lg__sums_head_decode(const void *data, size_t bytes, uint64_t file_bytes, lg__sums_head *out, lg_error *err)
{
    const unsigned char *p = data;
    LG__RETURN_IF(file_bytes == 0, err, LG_ERR_CORRUPT, "empty: 0 bytes are there");
    LG__RETURN_IF(bytes < LG__SUMS_HEAD_BYTES || file_bytes < LG__SUMS_HEAD_BYTES, err, LG_ERR_CORRUPT,
                  "cut short: %" PRIu64 " bytes are there, the head alone takes %d",
                  file_bytes < bytes ? file_bytes : (uint64_t)bytes, LG__SUMS_HEAD_BYTES);
    LG__RETURN_IF(memcmp(p, MAGIC, MAGIC_BYTES) != 0, err, LG_ERR_FORMAT,
                  "not a sums file of lastgood, or its first bytes are damaged");
    uint32_t crc = lg__crc32c(0, p, 40);
    LG__RETURN_IF(crc != lg__get_u32le(p + 40), err, LG_ERR_CORRUPT,
                  "checksum mismatch in the head: CRC32C of bytes 0 to 39 is %08" PRIx32 ", the file says %08" PRIx32,
                  crc, lg__get_u32le(p + 40));
    uint32_t version = lg__get_u32le(p + 8), algorithm = lg__get_u32le(p + 12);
    LG__RETURN_IF(version > SUMS_VERSION, err, LG_ERR_VERSION, "sums file of version %" PRIu32 "; known is %d", version,
                  SUMS_VERSION);
    LG__RETURN_IF(version == 0, err, LG_ERR_FORMAT, "sums file of version 0");
    LG__RETURN_IF(algorithm != ALGORITHM_CRC32C, err, LG_ERR_VERSION,
                  "checksum algorithm %" PRIu32 "; known is %d (CRC32C)", algorithm, ALGORITHM_CRC32C);
    LG__RETURN_IF(lg__get_u32le(p + 44) != 0, err, LG_ERR_CORRUPT, "bytes 44 to 47 must be zero");
    lg__sums_head h = {.block_bytes = lg__get_u32le(p + 16),
                       .n_tables = lg__get_u32le(p + 20),
                       .report_at = lg__get_u64le(p + 24),
                       .report_bytes = lg__get_u64le(p + 32)};
    LG__RETURN_IF(!lg__block_bytes_valid(h.block_bytes), err, LG_ERR_FORMAT,
                  "blocks of %" PRIu32 " bytes: not a power of two in [4096, 64 MiB]", h.block_bytes);
    uint64_t tables = h.n_tables * (uint64_t)LG__TABLE_HEAD_BYTES;
    LG__RETURN_IF(h.report_at < LG__SUMS_HEAD_BYTES + tables || (h.report_at - LG__SUMS_HEAD_BYTES) % 4 != 0 ||
                      (h.n_tables == 0 && h.report_at != LG__SUMS_HEAD_BYTES),
                  err, LG_ERR_FORMAT,
                  "the report would begin at %" PRIu64 ", which leaves no room for %" PRIu32 " tables", h.report_at,
                  h.n_tables);
    LG__RETURN_IF(h.report_bytes > LG__REPORT_MAX, err, LG_ERR_FORMAT,
                  "a report of %" PRIu64 " bytes; at most %zu are possible", h.report_bytes, LG__REPORT_MAX);
    LG__RETURN_IF(h.report_at > file_bytes || file_bytes - h.report_at != h.report_bytes, err, LG_ERR_CORRUPT,
                  "%" PRIu64 " bytes are there, but a report of %" PRIu64 " bytes at %" PRIu64 " should end the file",
                  file_bytes, h.report_bytes, h.report_at);
    *out = h;
    return LG_OK;
}
