/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "format/manifest.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A sealed file is
 *
 *     {"crc32c":"xxxxxxxx",<rest>
 *
 * in exactly these bytes; the digits are the CRC32C of <rest>, up to the end
 * of the file. So no byte of the file is outside the check. */

#define OPENING "{\"crc32c\":\""
#define OPENING_BYTES (sizeof OPENING - 1)
#define DIGITS 8
#define PREFIX_BYTES (OPENING_BYTES + DIGITS + 2)

void lg__sealed_json_begin(lg__buf *out) { lg__buf_str(out, OPENING "00000000\","); }

lg_status lg__sealed_json_end(lg__buf *out, size_t start, lg_error *err)
{
    lg__buf_str(out, "\n");
    LG__TRY(lg__buf_check(out, "sealed JSON", err));
    char *text = out->data + start, digits[DIGITS + 1];
    size_t bytes = out->len - start;
    LG__RETURN_IF(bytes < PREFIX_BYTES + 2 || text[bytes - 2] != '}', err, LG_ERR_INTERNAL,
                  "sealed JSON does not end in a brace");
    snprintf(digits, sizeof digits, "%08" PRIx32, lg__crc32c(0, text + PREFIX_BYTES, bytes - PREFIX_BYTES));
    memcpy(text + OPENING_BYTES, digits, DIGITS);
    return LG_OK;
}

lg_status lg__sealed_json(const char *body, size_t bytes, lg__buf *out, lg_error *err)
{
    size_t start = out->len;
    lg__sealed_json_begin(out);
    lg__buf_add(out, body, bytes);
    return lg__sealed_json_end(out, start, err);
}

/* What a file that does not begin as it should looks like. */
static lg_status not_ours(const char *bytes, size_t n, lg_error *err)
{
    size_t same = n < OPENING_BYTES ? n : OPENING_BYTES;
    LG__RETURN_IF(memcmp(bytes, OPENING, same) == 0, err, LG_ERR_CORRUPT,
                  "cut short: %zu bytes are there, fewer than the first member takes", n);
    size_t zeros = 0;
    while (zeros < n && bytes[zeros] == '\0') {
        zeros++;
    }
    LG__RETURN_IF(zeros == n, err, LG_ERR_CORRUPT, "damaged: all %zu bytes are zero", n);
    char first[17] = {0}, shown[80];
    memcpy(first, bytes, n < sizeof first - 1 ? n : sizeof first - 1);
    LG__RETURN_IF(!lg__utf8_valid(first, strlen(first)), err, LG_ERR_FORMAT,
                  "not a file of lastgood, or its first bytes are damaged: %zu bytes that do not begin with "
                  "{\"crc32c\": but with the byte 0x%02x",
                  n, (unsigned char)first[0]);
    return lg_error_set(err, LG_ERR_FORMAT,
                        "not a file of lastgood, or its first bytes are damaged: %zu bytes that do not begin with "
                        "{\"crc32c\": but with \"%s\"",
                        n, lg__printable(first, shown, sizeof shown));
}

lg_status lg__sealed_json_text(const char *bytes, size_t n, lg__json_piece *out, lg_error *err)
{
    LG__RETURN_IF(n == 0, err, LG_ERR_CORRUPT, "empty: 0 bytes are there");
    if (n < PREFIX_BYTES || memcmp(bytes, OPENING, OPENING_BYTES) != 0) {
        return not_ours(bytes, n, err);
    }
    char expected[PREFIX_BYTES + 1];
    uint32_t crc = lg__crc32c(0, bytes + PREFIX_BYTES, n - PREFIX_BYTES);
    snprintf(expected, sizeof expected, OPENING "%08" PRIx32 "\",", crc);
    if (memcmp(bytes, expected, PREFIX_BYTES) != 0) {
        bool whole = bytes[n - 1] == '}' || (bytes[n - 1] == '\n' && n >= 2 && bytes[n - 2] == '}');
        return lg_error_set(
            err, LG_ERR_CORRUPT,
            "checksum mismatch: %zu bytes are there, their CRC32C is %08" PRIx32 ", the file says otherwise%s", n, crc,
            whole ? "" : "; it does not end as it should, so it was cut or something follows it");
    }
    size_t end = n - (bytes[n - 1] == '\n');
    LG__RETURN_IF(bytes[end - 1] != '}', err, LG_ERR_FORMAT, "bytes behind the closing brace: %zu bytes are there", n);
    *out = (lg__json_piece){bytes, end};
    return LG_OK;
}

lg_status lg__sealed_json_parse(const char *bytes, size_t n, json_t **out, lg_error *err)
{
    lg__json_piece text = {NULL, 0};
    LG__TRY(lg__sealed_json_text(bytes, n, &text, err));
    /* It begins with a brace, so it can be nothing but an object. */
    return lg__json_parse(text.at, text.n, out, err);
}
