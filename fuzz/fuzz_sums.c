/* SPDX-License-Identifier: Apache-2.0 */

/* A sums file: its head (also with the checksum that belongs to it), its
 * tables, its report. */

#include "base/error.h"
#include "base/hash.h"
#include "base/mem.h"
#include "format/sums.h"
#include "fuzz.h"

static void report(const char *text, size_t bytes)
{
    lg_error err = LG_ERROR_INIT;
    lg__report *r = NULL, *files = NULL, *second = NULL;
    lg_status quick = lg__report_decode_files(text, bytes, &files, &err);
    if (quick != LG_OK) {
        fuzz_refused(quick, &err);
    }
    lg_status st = lg__report_decode(text, bytes, &r, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        FUZZ_CHECK(r == NULL, "an output in spite of: %s", err.message);
        lg__report_free(files);
        return;
    }
    FUZZ_CHECK(quick == LG_OK && files->n_files == r->n_files && files->rank == r->rank && files->step == r->step,
               "the quick reader differs");
    lg__report_free(files);
    lg__buf one, two;
    lg__buf_init(&one, LG__REPORT_MAX);
    lg__buf_init(&two, LG__REPORT_MAX);
    st = lg__report_encode(r, &one, &err);
    FUZZ_CHECK(st == LG_OK, "decoded, but not written: %s", err.message);
    st = lg__report_decode(one.data, one.len, &second, &err);
    FUZZ_CHECK(st == LG_OK, "what was written is refused: %s", err.message);
    st = lg__report_encode(second, &two, &err);
    FUZZ_CHECK(st == LG_OK && one.len == two.len && memcmp(one.data, two.data, one.len) == 0,
               "written twice, it differs");
    lg__buf_free(&one);
    lg__buf_free(&two);
    lg__report_free(r);
    lg__report_free(second);
}

static void table(const uint8_t *at, size_t bytes, uint64_t block_bytes)
{
    lg_error err = LG_ERROR_INIT;
    lg__table t = {0};
    lg_status st = lg__table_decode(at, bytes, block_bytes, &t, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        return;
    }
    FUZZ_CHECK(t.header_bytes <= t.file_bytes && lg__table_bytes(t.file_bytes - t.header_bytes, block_bytes) == bytes,
               "a table of %zu bytes", bytes);
    lg__buf out;
    lg__buf_init(&out, SIZE_MAX / 2);
    lg__table_encode(&t, &out);
    FUZZ_CHECK(!out.failed && out.len == bytes && memcmp(out.data, at, bytes) == 0, "written again, it differs");
    lg__buf_free(&out);
    lg__free(t.block_crc);
}

static void whole(const uint8_t *data, size_t bytes)
{
    lg_error err = LG_ERROR_INIT;
    lg__sums_head h;
    lg_status st = lg__sums_head_decode(data, bytes, bytes, &h, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        return;
    }
    FUZZ_CHECK(h.report_at <= bytes && h.report_bytes == bytes - h.report_at, "the report is outside");
    report((const char *)data + h.report_at, h.report_bytes);
    /* Where a table ends is said by its own first bytes, as the reader of a
     * checkpoint knows it from the report. */
    uint64_t at = LG__SUMS_HEAD_BYTES;
    for (uint32_t i = 0; i < h.n_tables && h.report_at - at >= LG__TABLE_HEAD_BYTES; i++) {
        uint64_t file = lg__get_u64le(data + at), header = lg__get_u64le(data + at + 8);
        uint64_t blocks = header > file ? 0 : lg__block_count(file - header, h.block_bytes);
        if (blocks > (h.report_at - at - LG__TABLE_HEAD_BYTES) / 4) {
            blocks = (h.report_at - at - LG__TABLE_HEAD_BYTES) / 4; /* too short: refused below */
        }
        table(data + at, LG__TABLE_HEAD_BYTES + 4 * (size_t)blocks, h.block_bytes);
        at += LG__TABLE_HEAD_BYTES + 4 * blocks;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes > 0 && data[0] == '{') {
        report((const char *)data, bytes);
        return 0;
    }
    whole(data, bytes);
    if (bytes >= LG__SUMS_HEAD_BYTES) {
        uint8_t *copy = malloc(bytes);
        FUZZ_CHECK(copy != NULL, "out of memory");
        memcpy(copy, data, bytes);
        uint32_t crc = lg__crc32c(0, copy, 40);
        for (int i = 0; i < 4; i++) {
            copy[40 + i] = (uint8_t)(crc >> (8 * i));
        }
        whole(copy, bytes);
        free(copy);
    }
    return 0;
}
