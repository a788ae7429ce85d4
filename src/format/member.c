/* SPDX-License-Identifier: Apache-2.0 */
#include "format/member.h"

#include "base/error.h"
#include "base/json.h"
#include "format/tagged.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* -------------------------------------------------------------------- paths */

static void add_path(const lg__at *at, const char *key, lg__buf *b)
{
    if (at != NULL) {
        add_path(at->outer, at->name, b);
        if (at->index != LG__AT_MEMBER) {
            lg__buf_fmt(b, "[%zu]", at->index);
        }
    }
    if (key != NULL) {
        char shown[128];
        lg__buf_fmt(b, "%s%s", b->len > 0 ? "." : "", lg__printable(key, shown, sizeof shown));
    }
}

/* The path as text, in `out`. When memory is out only the key is left. */
static const char *path_text(const lg__at *at, const char *key, char *out, size_t bytes)
{
    lg__buf b;
    lg__buf_init(&b, bytes - 1);
    add_path(at, key, &b);
    snprintf(out, bytes, "%s", b.len > 0 && !b.failed ? b.data : key != NULL ? key : at != NULL ? at->name : "file");
    lg__buf_free(&b);
    return out;
}

lg_status lg__at_error(const lg__at *at, const char *key, lg_error *err, lg_status status, const char *format, ...)
{
    char text[LG_ERROR_MESSAGE_MAX], path[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return lg_error_set(err, status, "%s: %s", path_text(at, key, path, sizeof path), text);
}

lg_status lg__at_wrap(const lg__at *at, const char *key, lg_error *err)
{
    char path[512];
    switch (err->status) {
    case LG_ERR_NOMEM:
        return err->status;
    case LG_ERR_CORRUPT:
    case LG_ERR_VERSION:
    case LG_ERR_COVERAGE:
    case LG_ERR_INTERNAL:
        break;
    default:
        err->status = LG_ERR_FORMAT;
    }
    return lg_error_wrap(err, "%s", path_text(at, key, path, sizeof path));
}

/* ------------------------------------------------------------------ members */

lg_status lg__member_get(const json_t *object, const lg__at *at, const char *key, json_type type, const json_t **out,
                         lg_error *err)
{
    const json_t *value = json_object_get(object, key);
    if (value == NULL) {
        return lg__at_error(at, key, err, LG_ERR_FORMAT, "missing");
    }
    if (!lg__json_is(value, type)) {
        return lg__at_error(at, key, err, LG_ERR_FORMAT, "not %s", lg__json_type_name(type));
    }
    *out = value;
    return LG_OK;
}

lg_status lg__member_optional(const json_t *object, const lg__at *at, const char *key, json_type type,
                              const json_t **out, lg_error *err)
{
    if (json_object_get(object, key) == NULL) {
        *out = NULL;
        return LG_OK;
    }
    return lg__member_get(object, at, key, type, out, err);
}

/* A number at a place; `key` may be NULL for an array's element. */
static lg_status number(const json_t *value, const lg__at *at, const char *key, uint64_t max, uint64_t *out,
                        lg_error *err)
{
    uint64_t v = 0;
    if (lg__json_u64(value, "", &v, err) != LG_OK) {
        return lg__at_error(at, key, err, LG_ERR_FORMAT, "no non-negative integer");
    }
    if (v > max) {
        return lg__at_error(at, key, err, LG_ERR_FORMAT, "%" PRIu64 " is more than %" PRIu64, v, max);
    }
    *out = v;
    return LG_OK;
}

lg_status lg__member_u64(const json_t *object, const lg__at *at, const char *key, uint64_t max, uint64_t *out,
                         lg_error *err)
{
    const json_t *value = json_object_get(object, key);
    if (value == NULL) {
        return lg__at_error(at, key, err, LG_ERR_FORMAT, "missing");
    }
    return number(value, at, key, max, out, err);
}

lg_status lg__member_u32(const json_t *object, const lg__at *at, const char *key, uint32_t max, uint32_t *out,
                         lg_error *err)
{
    uint64_t v = 0;
    LG__TRY(lg__member_u64(object, at, key, max, &v, err));
    *out = (uint32_t)v;
    return LG_OK;
}

lg_status lg__member_bool(const json_t *object, const lg__at *at, const char *key, bool *out, lg_error *err)
{
    const json_t *value = NULL;
    LG__TRY(lg__member_get(object, at, key, JSON_TRUE, &value, err));
    *out = json_is_true(value);
    return LG_OK;
}

lg_status lg__member_text(const json_t *object, const lg__at *at, const char *key, size_t max, const char **out,
                          lg_error *err)
{
    const json_t *value = NULL;
    LG__TRY(lg__member_get(object, at, key, JSON_STRING, &value, err));
    const char *s = json_string_value(value);
    if (strlen(s) != json_string_length(value)) {
        return lg__at_error(at, key, err, LG_ERR_FORMAT, "has a NUL in it");
    }
    if (lg__text_check("text", s, max, err) != LG_OK) {
        return lg__at_wrap(at, key, err);
    }
    *out = s;
    return LG_OK;
}

lg_status lg__member_name(const json_t *object, const lg__at *at, const char *key, const char **out, lg_error *err)
{
    const json_t *value = NULL;
    LG__TRY(lg__member_get(object, at, key, JSON_STRING, &value, err));
    if (lg__name_check("tensor", json_string_value(value), json_string_length(value), err) != LG_OK) {
        return lg__at_wrap(at, key, err);
    }
    *out = json_string_value(value);
    return LG_OK;
}

lg_status lg__member_hex(const json_t *object, const lg__at *at, const char *key, size_t digits, char *out,
                         lg_error *err)
{
    const json_t *value = NULL;
    LG__TRY(lg__member_get(object, at, key, JSON_STRING, &value, err));
    if (json_string_length(value) != digits || !lg__hex_valid(json_string_value(value), digits)) {
        return lg__at_error(at, key, err, LG_ERR_FORMAT, "not %zu lower-case hex digits", digits);
    }
    memcpy(out, json_string_value(value), digits + 1);
    return LG_OK;
}

lg_status lg__member_digest(const json_t *object, const lg__at *at, const char *key, uint8_t out[LG__SHA256_BYTES],
                            lg_error *err)
{
    char hex[2 * LG__SHA256_BYTES + 1];
    LG__TRY(lg__member_hex(object, at, key, sizeof hex - 1, hex, err));
    LG__RETURN_IF(!lg__unhex(hex, out, LG__SHA256_BYTES), err, LG_ERR_INTERNAL, "checked digits do not decode");
    return LG_OK;
}

/* An array of exactly n integers up to `max`. */
static lg_status numbers(const json_t *object, const lg__at *at, const char *key, size_t n, uint64_t max, uint64_t *out,
                         lg_error *err)
{
    const json_t *array = NULL;
    LG__TRY(lg__member_get(object, at, key, JSON_ARRAY, &array, err));
    if (json_array_size(array) != n) {
        return lg__at_error(at, key, err, LG_ERR_FORMAT, "%zu numbers instead of %zu", json_array_size(array), n);
    }
    for (size_t i = 0; i < n; i++) {
        lg__at here = {at, key, i};
        LG__TRY(number(json_array_get(array, i), &here, NULL, max, &out[i], err));
    }
    return LG_OK;
}

lg_status lg__member_generation(const json_t *object, const lg__at *at, const char *key, lg_generation *out,
                                lg_error *err)
{
    uint64_t v[2] = {0, 0};
    LG__TRY(numbers(object, at, key, 2, UINT64_MAX, v, err));
    *out = (lg_generation){v[0], v[1]};
    return LG_OK;
}

lg_status lg__member_created(const json_t *object, const lg__at *at, const char *key, char out[LG_CREATED_TEXT],
                             lg_error *err)
{
    const char *s = "";
    LG__TRY(lg__member_text(object, at, key, 64, &s, err));
    if (!lg__created_valid(s)) {
        return lg__at_error(at, key, err, LG_ERR_FORMAT, "\"%s\" is no time like 2026-11-29T18:31:57Z", s);
    }
    memcpy(out, s, LG_CREATED_TEXT);
    return LG_OK;
}

lg_status lg__member_extent(const json_t *object, const lg__at *at, const char *key, uint32_t n, uint64_t *out,
                            lg_error *err)
{
    return numbers(object, at, key, n, INT64_MAX, out, err);
}

lg_status lg__member_tensor(const json_t *object, const lg__at *at, lg__arena *arena, lg_group *group, lg_dtype *dtype,
                            uint32_t *ndim, const uint64_t **shape, lg_error *err)
{
    const char *s = "";
    LG__TRY(lg__member_text(object, at, "group", 16, &s, err));
    lg_group g;
    if (strcmp(s, "model") == 0) {
        g = LG_GROUP_MODEL;
    } else if (strcmp(s, "optim") == 0) {
        g = LG_GROUP_OPTIM;
    } else {
        return lg__at_error(at, "group", err, LG_ERR_FORMAT, "\"%s\" is neither \"model\" nor \"optim\"", s);
    }
    LG__TRY(lg__member_text(object, at, "dtype", 64, &s, err));
    lg_dtype d;
    if (lg_dtype_parse(s, &d) != LG_OK) {
        return lg__at_error(at, "dtype", err, LG_ERR_FORMAT, "unknown dtype \"%s\"", s);
    }
    const json_t *array = NULL;
    LG__TRY(lg__member_get(object, at, "shape", JSON_ARRAY, &array, err));
    size_t n = json_array_size(array);
    if (n > LG_MAX_NDIM) {
        return lg__at_error(at, "shape", err, LG_ERR_FORMAT, "%zu dimensions; at most %d are possible", n, LG_MAX_NDIM);
    }
    uint64_t *sizes = lg__arena_array(arena, n, sizeof *sizes);
    if (sizes == NULL) {
        return lg__nomem(err);
    }
    LG__TRY(lg__member_extent(object, at, "shape", (uint32_t)n, sizes, err));
    uint64_t bytes = 0;
    if (lg__shape_bytes(d, (uint32_t)n, sizes, &bytes, err) != LG_OK) {
        return lg__at_wrap(at, "shape", err);
    }
    *group = g;
    *dtype = d;
    *ndim = (uint32_t)n;
    *shape = sizes;
    return LG_OK;
}

bool lg__dtype_of(lg__json_piece name, lg_dtype *out)
{
    char text[16];
    if (name.n >= sizeof text) {
        return false;
    }
    memcpy(text, name.at, name.n);
    text[name.n] = '\0';
    return lg_dtype_parse(text, out) == LG_OK;
}

/* ------------------------------------------------------------------- values */

lg_status lg__text_check(const char *what, const char *text, size_t max, lg_error *err)
{
    size_t n = strnlen(text, max + 1);
    LG__RETURN_IF(n > max, err, LG_ERR_LIMIT, "%s is longer than %zu bytes", what, max);
    LG__RETURN_IF(!lg__utf8_valid(text, n), err, LG_ERR_INVALID, "%s is no valid UTF-8", what);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        LG__RETURN_IF(c < 0x20 || c == 0x7F, err, LG_ERR_INVALID, "%s has the control byte 0x%02x in it", what, c);
    }
    return LG_OK;
}

bool lg__hex_valid(const char *text, size_t digits)
{
    for (size_t i = 0; i < digits; i++) {
        char c = text[i];
        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) {
            return false;
        }
    }
    return text[digits] == '\0';
}

bool lg__created_valid(const char *text)
{
    static const char form[] = "0000-00-00T00:00:00Z";
    for (size_t i = 0; i < sizeof form; i++) {
        bool digit = text[i] >= '0' && text[i] <= '9';
        if (form[i] == '0' ? !digit : text[i] != form[i]) {
            return false;
        }
    }
    return true;
}

bool lg__block_bytes_valid(uint64_t bytes)
{
    return bytes >= 4096 && bytes <= UINT64_C(64) << 20 && (bytes & (bytes - 1)) == 0;
}

int lg__generation_order(lg_generation a, lg_generation b)
{
    if (a.epoch != b.epoch) {
        return a.epoch < b.epoch ? -1 : 1;
    }
    return a.serial < b.serial ? -1 : a.serial > b.serial;
}

/* The file's own object and "state" are around a value, and both must still be
 * readable. */
_Static_assert(LG__TAGGED_MAX_DEPTH + 4 <= LG__JSON_MAX_DEPTH, "state may nest deeper than a file that holds it");

lg_status lg__state_check(const json_t *state, const lg__at *at, lg_error *err)
{
    json_t *object = (json_t *)(uintptr_t)state;
    lg__at here = {at, "state", LG__AT_MEMBER};
    for (void *it = json_object_iter(object); it != NULL; it = json_object_iter_next(object, it)) {
        const char *key = json_object_iter_key(it);
        const json_t *value = json_object_iter_value(it);
        if (lg__name_check("key", key, json_object_iter_key_len(it), err) != LG_OK) {
            return lg__at_wrap(at, "state", err);
        }
        if (lg__tagged_check(value, err) != LG_OK) {
            return lg__at_wrap(&here, key, err);
        }
    }
    return LG_OK;
}

/* ------------------------------------------------------------------ writing */

void lg__buf_json_generation(lg__buf *b, lg_generation g)
{
    uint64_t v[] = {g.epoch, g.serial};
    lg__buf_json_u64s(b, v, 2);
}

void lg__buf_json_u64s(lg__buf *b, const uint64_t *v, size_t n)
{
    lg__buf_add(b, "[", 1);
    for (size_t i = 0; i < n; i++) {
        if (i > 0) {
            lg__buf_add(b, ",", 1);
        }
        lg__buf_json_u64(b, v[i]);
    }
    lg__buf_add(b, "]", 1);
}

void lg__buf_json_hex(lg__buf *b, const uint8_t digest[LG__SHA256_BYTES])
{
    char hex[2 * LG__SHA256_BYTES + 1];
    lg__hex(digest, LG__SHA256_BYTES, hex);
    lg__buf_fmt(b, "\"%s\"", hex);
}

void lg__buf_json_text(lg__buf *b, const char *text) { lg__buf_json_str(b, text, strlen(text)); }
