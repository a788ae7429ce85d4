/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_CONTAINER_H
#define LG_TESTS_CONTAINER_H

/* Opening safetensors files that lie in memory. Include cmocka.h before. */

#include "base/error.h"
#include "base/json.h"
#include "format/safetensors.h"
#include "vectors.h"

/* Opens a whole file in memory as the library does: first the length, then the
 * header. */
static inline lg_status open_bytes(const void *data, size_t bytes, lg__st_header **out, lg_error *err)
{
    uint64_t n = 0;
    size_t first = bytes < 64 ? bytes : 64;
    uint8_t *copy = malloc(first ? first : 1); /* exact, for the address sanitizer */
    memcpy(copy, data, first);
    lg_status status = lg__st_header_bytes(copy, first, bytes, &n, err);
    free(copy);
    if (status != LG_OK) {
        return status;
    }
    char *text = malloc(n ? n : 1);
    memcpy(text, (const char *)data + 8, n);
    status = lg__st_parse(text, n, bytes, out, err);
    free(text);
    return status;
}

/* A file of a header and `data_bytes` zeros; *bytes gets its length. */
static inline uint8_t *make_file(const char *header, size_t header_bytes, size_t data_bytes, size_t *bytes)
{
    *bytes = 8 + header_bytes + data_bytes;
    uint8_t *file = calloc(1, *bytes + 1);
    for (int i = 0; i < 8; i++) {
        file[i] = (uint8_t)((uint64_t)header_bytes >> (8 * i));
    }
    memcpy(file + 8, header, header_bytes);
    return file;
}

static inline lg_status open_header(const char *header, size_t data_bytes, lg__st_header **out, lg_error *err)
{
    size_t bytes;
    uint8_t *file = make_file(header, strlen(header), data_bytes, &bytes);
    lg_status status = open_bytes(file, bytes, out, err);
    free(file);
    return status;
}

static inline void refuse(const char *header, size_t data_bytes, lg_status want, const char *words)
{
    lg_error err = LG_ERROR_INIT;
    lg__st_header *h = NULL;
    lg_status status = open_header(header, data_bytes, &h, &err);
    if (status == LG_OK) {
        lg__st_free(h);
        fail_msg("accepted: %s", header);
    }
    if (status != want || strstr(err.message, words) == NULL) {
        fail_msg("%s: got %s, \"%s\" instead of %s, \"%s\"", header, lg_status_name(status), err.message,
                 lg_status_name(want), words);
    }
    assert_null(h);
    assert_true(lg__utf8_valid(err.message, strlen(err.message)));
}

static inline lg__st_header *accept(const char *header, size_t data_bytes)
{
    lg_error err = LG_ERROR_INIT;
    lg__st_header *h = NULL;
    if (open_header(header, data_bytes, &h, &err) != LG_OK) {
        fail_msg("%s: refused: %s", header, err.message);
    }
    return h;
}

#endif
