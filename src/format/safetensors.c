/* SPDX-License-Identifier: Apache-2.0 */
#include "format/safetensors.h"

#include "base/error.h"
#include "base/json.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The header is one JSON object with perhaps a million members. Handing all of
 * it to a JSON library at once would take some ten times its size (and, with
 * hostile text such as "[[],[],…", seventy times). So its members are told
 * apart here, by quotes and brackets alone, and each piece is then parsed
 * strictly by itself: a piece cut wrongly is no valid JSON. */

/* What one tensor's entry may take; the longest real one, of 32 dimensions,
 * takes some 800 bytes. */
#define ENTRY_MAX ((size_t)64 * 1024)

#define SHARDING_KEY "DCP_SHARDING_INFO"
#define SHOWN 200

typedef struct slice {
    const char *at;
    size_t n;
} slice;

/* -------------------------------------------------------- members of an object */

typedef struct members {
    const char *what; /* for messages: what the text is */
    const char *text;
    size_t n, at;
    bool begun;
} members;

static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

static void skip_space(members *m)
{
    while (m->at < m->n && is_space(m->text[m->at])) {
        m->at++;
    }
}

static lg_status unexpected(const members *m, const char *wanted, lg_error *err)
{
    if (m->at >= m->n) {
        return lg_error_set(err, LG_ERR_FORMAT, "invalid JSON in the %s: it ends at byte %zu where %s should come",
                            m->what, m->n, wanted);
    }
    unsigned char c = (unsigned char)m->text[m->at];
    if (c > 0x20 && c < 0x7F) {
        return lg_error_set(err, LG_ERR_FORMAT, "invalid JSON in the %s: '%c' at byte %zu where %s should come",
                            m->what, c, m->at, wanted);
    }
    return lg_error_set(err, LG_ERR_FORMAT, "invalid JSON in the %s: byte 0x%02x at byte %zu where %s should come",
                        m->what, c, m->at, wanted);
}

static bool next_is(const members *m, char c) { return m->at < m->n && m->text[m->at] == c; }

/* Moves past a string, from its opening quote. */
static lg_status skip_string(members *m, lg_error *err)
{
    for (m->at++; m->at < m->n; m->at++) {
        if (m->text[m->at] == '\\') {
            m->at++;
        } else if (m->text[m->at] == '"') {
            m->at++;
            return LG_OK;
        }
    }
    m->at = m->n;
    return unexpected(m, "the end of a string", err);
}

/* Moves past a value: up to a comma or closing bracket outside of it. */
static lg_status skip_value(members *m, lg_error *err)
{
    size_t depth = 0;
    while (m->at < m->n) {
        char c = m->text[m->at];
        if (c == '"') {
            LG__TRY(skip_string(m, err));
            continue;
        }
        if (depth == 0 && (c == ',' || c == '}' || c == ']')) {
            return LG_OK;
        }
        if (c == '{' || c == '[') {
            depth++;
        } else if (c == '}' || c == ']') {
            depth--;
        }
        m->at++;
    }
    return unexpected(m, "the end of a value", err);
}

/* The next member: *key with its quotes, *value with what is around it; *more is
 * false once the object has ended and only spaces follow it. */
static lg_status next_member(members *m, slice *key, slice *value, bool *more, lg_error *err)
{
    skip_space(m);
    bool first = !m->begun;
    if (first) {
        if (!next_is(m, '{')) {
            return unexpected(m, "an object, \"{\",", err);
        }
        m->begun = true;
        m->at++;
        skip_space(m);
    }
    if (next_is(m, '}')) {
        m->at++;
        skip_space(m);
        LG__RETURN_IF(m->at < m->n, err, LG_ERR_FORMAT, "invalid JSON in the %s: bytes follow its end at byte %zu",
                      m->what, m->at);
        *more = false;
        return LG_OK;
    }
    if (!first) {
        if (!next_is(m, ',')) {
            return unexpected(m, "\",\" or \"}\"", err);
        }
        m->at++;
        skip_space(m);
    }
    if (!next_is(m, '"')) {
        return unexpected(m, "a key in quotes", err);
    }
    key->at = m->text + m->at;
    LG__TRY(skip_string(m, err));
    key->n = (size_t)(m->text + m->at - key->at);
    skip_space(m);
    if (!next_is(m, ':')) {
        return unexpected(m, "\":\"", err);
    }
    m->at++;
    value->at = m->text + m->at;
    LG__TRY(skip_value(m, err));
    value->n = (size_t)(m->text + m->at - value->at);
    *more = true;
    return LG_OK;
}

static slice trimmed(slice s)
{
    while (s.n > 0 && is_space(s.at[0])) {
        s.at++;
        s.n--;
    }
    while (s.n > 0 && is_space(s.at[s.n - 1])) {
        s.n--;
    }
    return s;
}

static bool is_null(slice s)
{
    s = trimmed(s);
    return s.n == 4 && memcmp(s.at, "null", 4) == 0;
}

/* ------------------------------------------------------------ strings, numbers */

/* A JSON string of plain ASCII without escapes, as nearly all are, is its own
 * contents. */
static bool plain_string(slice s, slice *out)
{
    if (s.n < 2 || s.at[0] != '"' || s.at[s.n - 1] != '"') {
        return false;
    }
    for (size_t i = 1; i < s.n - 1; i++) {
        unsigned char c = (unsigned char)s.at[i];
        if (c < 0x20 || c > 0x7E || c == '\\' || c == '"') {
            return false;
        }
    }
    *out = (slice){s.at + 1, s.n - 2};
    return true;
}

/* Copies a JSON string's contents into the arena. `what` is "a key", …; with
 * no_nul a NUL in it is an error. */
static lg_status read_string(lg__arena *arena, slice text, const char *what, bool no_nul, slice *out, lg_error *err)
{
    text = trimmed(text);
    slice found;
    json_t *json = NULL;
    if (!plain_string(text, &found)) {
        LG__RETURN_IF(text.n == 0 || text.at[0] != '"', err, LG_ERR_FORMAT, "%s is not a string", what);
        if (lg__json_parse(text.at, text.n, &json, err) != LG_OK) {
            return lg_error_wrap(err, "%s", what);
        }
        found = (slice){json_string_value(json), json_string_length(json)};
    }
    lg_status status = LG_OK;
    if (no_nul && memchr(found.at, '\0', found.n) != NULL) {
        char shown[SHOWN];
        status = lg_error_set(err, LG_ERR_FORMAT, "%s has a NUL byte in it, after \"%s\"", what,
                              lg__printable(found.at, shown, sizeof shown));
    } else {
        out->at = lg__arena_strndup(arena, found.at, found.n);
        out->n = found.n;
        if (out->at == NULL) {
            status = lg__nomem(err);
        }
    }
    json_decref(json);
    return status;
}

/* Arrays of plain digits, as nearly all are, are read here; false leaves the
 * text, whatever is odd about it, to the JSON library. */
static bool plain_numbers(slice s, uint64_t *out, size_t max, size_t *n)
{
    size_t count = 0, i = 1;
    if (s.n < 2 || s.at[0] != '[') {
        return false;
    }
    while (i < s.n && s.at[i] >= '0' && s.at[i] <= '9' && count < max) {
        uint64_t v = 0;
        size_t first = i;
        for (; i < s.n && s.at[i] >= '0' && s.at[i] <= '9'; i++) {
            v = v * 10 + (uint64_t)(s.at[i] - '0');
        }
        if (i - first > 18 || (s.at[first] == '0' && i - first > 1) || i == s.n) {
            return false;
        }
        out[count++] = v;
        if (s.at[i] == ']') {
            break;
        }
        if (s.at[i] != ',' || i + 1 == s.n || s.at[i + 1] == ']') {
            return false;
        }
        i++;
    }
    *n = count;
    return i + 1 == s.n && s.at[i] == ']';
}

static lg_status odd_numbers(slice text, const char *field, uint64_t *out, size_t max, size_t *n, lg_error *err)
{
    json_t *json = NULL;
    if (lg__json_parse(text.at, text.n, &json, err) != LG_OK) {
        return lg_error_wrap(err, "%s", field);
    }
    lg_status status = LG_OK;
    size_t count = json_array_size(json);
    if (!json_is_array(json)) {
        status = lg_error_set(err, LG_ERR_FORMAT, "%s is not an array", field);
    } else if (count > max) {
        status = lg_error_set(err, LG_ERR_LIMIT, "%s has %zu numbers; up to %zu are supported", field, count, max);
    }
    for (size_t i = 0; status == LG_OK && i < count; i++) {
        const json_t *v = json_array_get(json, i);
        if (!json_is_integer(v)) {
            status = lg_error_set(err, LG_ERR_FORMAT, "%s[%zu] is not an integer", field, i);
        } else if (json_integer_value(v) < 0) {
            status = lg_error_set(err, LG_ERR_FORMAT, "%s[%zu] is negative", field, i);
        } else {
            out[i] = (uint64_t)json_integer_value(v);
        }
    }
    json_decref(json);
    /* Zero with a sign is no integer to the reference, and plain zero to the
     * JSON library. */
    if (status == LG_OK && memchr(text.at, '-', text.n) != NULL) {
        status = lg_error_set(err, LG_ERR_FORMAT, "%s has a number with a minus sign", field);
    }
    *n = count;
    return status;
}

/* An array of at most `max` non-negative integers. */
static lg_status read_numbers(slice text, const char *field, uint64_t *out, size_t max, size_t *n, lg_error *err)
{
    text = trimmed(text);
    return plain_numbers(text, out, max, n) ? LG_OK : odd_numbers(text, field, out, max, n, err);
}

static lg_status copy_numbers(lg__arena *arena, const uint64_t *numbers, size_t n, const uint64_t **out, lg_error *err)
{
    uint64_t *copy = lg__arena_array(arena, n, sizeof *copy);
    if (copy == NULL) {
        return lg__nomem(err);
    }
    if (n > 0) {
        memcpy(copy, numbers, n * sizeof *copy);
    }
    *out = copy;
    return LG_OK;
}

/* ---------------------------------------------------------------- one tensor */

static lg_status read_dtype(lg__arena *arena, slice text, lg_dtype *out, lg_error *err)
{
    slice name;
    LG__TRY(read_string(arena, text, "dtype", true, &name, err));
    if (lg_dtype_parse(name.at, out) != LG_OK) {
        char shown[SHOWN];
        return lg_error_set(err, LG_ERR_UNSUPPORTED, "unknown dtype \"%s\"",
                            lg__printable(name.at, shown, sizeof shown));
    }
    return LG_OK;
}

/* Checks a value that nobody asked for. */
static lg_status read_unknown(slice text, lg_error *err)
{
    json_t *json = NULL;
    LG__TRY(lg__json_parse(text.at, text.n, &json, err));
    json_decref(json);
    return LG_OK;
}

static bool same(slice s, const char *text) { return s.n == strlen(text) && memcmp(s.at, text, s.n) == 0; }

static lg_status read_tensor_info(lg__arena *arena, slice text, lg__st_tensor *t, lg_error *err)
{
    LG__RETURN_IF(text.n > ENTRY_MAX, err, LG_ERR_LIMIT, "its entry takes %zu bytes; up to %zu are supported", text.n,
                  ENTRY_MAX);
    bool has_dtype = false, has_shape = false, has_range = false;
    uint64_t numbers[LG_MAX_NDIM];
    size_t n = 0;
    members m = {.what = "entry", .text = text.at, .n = text.n};
    for (;;) {
        slice key_text, key, value;
        bool more = false;
        LG__TRY(next_member(&m, &key_text, &value, &more, err));
        if (!more) {
            break;
        }
        if (!plain_string(key_text, &key)) {
            LG__TRY(read_string(arena, key_text, "a key", false, &key, err));
        }
        bool *seen = same(key, "dtype")          ? &has_dtype
                     : same(key, "shape")        ? &has_shape
                     : same(key, "data_offsets") ? &has_range
                                                 : NULL;
        if (seen == NULL) {
            LG__TRY(read_unknown(value, err));
            continue;
        }
        LG__RETURN_IF(*seen, err, LG_ERR_FORMAT, "\"%.*s\" is given twice", (int)key.n, key.at);
        *seen = true;
        if (seen == &has_dtype) {
            LG__TRY(read_dtype(arena, value, &t->dtype, err));
        } else if (seen == &has_shape) {
            LG__TRY(read_numbers(value, "shape", numbers, LG_MAX_NDIM, &n, err));
            t->ndim = (uint32_t)n;
            LG__TRY(copy_numbers(arena, numbers, n, &t->shape, err));
        } else {
            LG__TRY(read_numbers(value, "data_offsets", numbers, LG_MAX_NDIM, &n, err));
            LG__RETURN_IF(n != 2, err, LG_ERR_FORMAT, "data_offsets has %zu numbers instead of 2", n);
            t->begin = numbers[0];
            t->end = numbers[1];
        }
    }
    LG__RETURN_IF(!has_dtype, err, LG_ERR_FORMAT, "\"dtype\" is missing");
    LG__RETURN_IF(!has_shape, err, LG_ERR_FORMAT, "\"shape\" is missing");
    LG__RETURN_IF(!has_range, err, LG_ERR_FORMAT, "\"data_offsets\" is missing");
    return LG_OK;
}

static lg_status wrap_tensor(const lg__st_tensor *t, lg_error *err)
{
    char shown[SHOWN];
    return lg_error_wrap(err, "tensor \"%s\"", lg__printable(t->name, shown, sizeof shown));
}

/* ------------------------------------------------------------------- metadata */

static int compare_keys(const void *a, const void *b)
{
    /* Entries begin with their key. */
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static lg_status count_members(const char *what, slice text, size_t *out, lg_error *err)
{
    members m = {.what = what, .text = text.at, .n = text.n};
    size_t n = 0;
    for (;;) {
        slice key, value;
        bool more = false;
        LG__TRY(next_member(&m, &key, &value, &more, err));
        if (!more) {
            *out = n;
            return LG_OK;
        }
        n++;
    }
}

static lg_status read_metadata(lg__st_header *h, slice text, lg_error *err)
{
    size_t n = 0;
    LG__TRY(count_members("__metadata__ object", text, &n, err));
    h->metadata = lg__arena_array(h->arena, n, sizeof *h->metadata);
    if (h->metadata == NULL) {
        return lg__nomem(err);
    }
    members m = {.what = "__metadata__ object", .text = text.at, .n = text.n};
    char shown[SHOWN];
    for (;;) {
        slice key_text, key, value_text, value;
        bool more = false;
        LG__TRY(next_member(&m, &key_text, &value_text, &more, err));
        if (!more) {
            break;
        }
        LG__TRY(read_string(h->arena, key_text, "a key of __metadata__", true, &key, err));
        if (read_string(h->arena, value_text, "the value", false, &value, err) != LG_OK) {
            return lg_error_wrap(err, "__metadata__: \"%s\"", lg__printable(key.at, shown, sizeof shown));
        }
        h->metadata[h->n_metadata].key = key.at;
        h->metadata[h->n_metadata].value = value.at;
        h->metadata[h->n_metadata++].value_bytes = value.n;
    }
    if (h->n_metadata > 1) {
        qsort(h->metadata, h->n_metadata, sizeof *h->metadata, compare_keys);
    }
    for (size_t i = 1; i < h->n_metadata; i++) {
        LG__RETURN_IF(strcmp(h->metadata[i - 1].key, h->metadata[i].key) == 0, err, LG_ERR_FORMAT,
                      "__metadata__: \"%s\" is there twice", lg__printable(h->metadata[i].key, shown, sizeof shown));
    }
    h->has_metadata = true;
    return LG_OK;
}

/* ---------------------------------------------------------------- the tensors */

static lg_status read_entries(lg__st_header *h, slice text, lg_error *err)
{
    size_t n = 0;
    LG__TRY(count_members("header", text, &n, err));
    h->tensors = lg__arena_array(h->arena, n, sizeof *h->tensors);
    if (h->tensors == NULL) {
        return lg__nomem(err);
    }
    members m = {.what = "header", .text = text.at, .n = text.n};
    bool metadata_seen = false;
    for (;;) {
        slice key_text, key, value;
        bool more = false;
        LG__TRY(next_member(&m, &key_text, &value, &more, err));
        if (!more) {
            return LG_OK;
        }
        LG__TRY(read_string(h->arena, key_text, "a tensor's name", true, &key, err));
        if (same(key, "__metadata__")) {
            LG__RETURN_IF(metadata_seen, err, LG_ERR_FORMAT, "\"__metadata__\" is there twice");
            metadata_seen = true;
            if (!is_null(value)) {
                LG__TRY(read_metadata(h, value, err));
            }
            continue;
        }
        lg__st_tensor *t = &h->tensors[h->n++];
        t->name = key.at;
        t->name_bytes = key.n;
        if (read_tensor_info(h->arena, value, t, err) != LG_OK) {
            return wrap_tensor(t, err);
        }
    }
}

static int compare_places(const void *a, const void *b)
{
    const lg__st_tensor *x = a, *y = b;
    if (x->begin != y->begin) {
        return x->begin < y->begin ? -1 : 1;
    }
    if (x->end != y->end) {
        return x->end < y->end ? -1 : 1;
    }
    return strcmp(x->name, y->name);
}

static int compare_names(const void *a, const void *b, void *arg)
{
    const lg__st_tensor *tensors = arg;
    return strcmp(tensors[*(const uint32_t *)a].name, tensors[*(const uint32_t *)b].name);
}

static lg_status sort_tensors(lg__st_header *h, lg_error *err)
{
    h->by_name = lg__arena_array(h->arena, h->n, sizeof *h->by_name);
    if (h->by_name == NULL) {
        return lg__nomem(err);
    }
    if (h->n == 0) {
        return LG_OK;
    }
    qsort(h->tensors, h->n, sizeof *h->tensors, compare_places);
    for (size_t i = 0; i < h->n; i++) {
        h->by_name[i] = (uint32_t)i;
    }
    qsort_r(h->by_name, h->n, sizeof *h->by_name, compare_names, h->tensors);
    for (size_t i = 1; i < h->n; i++) {
        const char *name = h->tensors[h->by_name[i]].name;
        char shown[SHOWN];
        LG__RETURN_IF(strcmp(h->tensors[h->by_name[i - 1]].name, name) == 0, err, LG_ERR_FORMAT,
                      "tensor \"%s\" is there twice", lg__printable(name, shown, sizeof shown));
    }
    return LG_OK;
}

/* Bytes that dtype and shape call for. Products are taken from left to right, so
 * that one that overflows is refused even if a zero follows, as the reference
 * does. */
static lg_status needed_bytes(const lg__st_tensor *t, uint64_t *out, lg_error *err)
{
    uint64_t elements = 1, bits = 0;
    for (uint32_t d = 0; d < t->ndim; d++) {
        LG__RETURN_IF(__builtin_mul_overflow(elements, t->shape[d], &elements) || elements > INT64_MAX, err,
                      LG_ERR_FORMAT, "its shape has more elements than 2^63");
    }
    LG__RETURN_IF(__builtin_mul_overflow(elements, (uint64_t)lg_dtype_bits(t->dtype), &bits), err, LG_ERR_FORMAT,
                  "its size in bits is beyond 2^64");
    LG__RETURN_IF(bits % 8 != 0, err, LG_ERR_FORMAT, "%" PRIu64 " elements of %s do not fill whole bytes", elements,
                  lg_dtype_name(t->dtype));
    *out = bits / 8;
    return LG_OK;
}

/* Tensors cover the data from its first byte to the file's last, each byte
 * once. */
static lg_status check_cover(const lg__st_header *h, lg_error *err)
{
    uint64_t covered = 0;
    for (size_t i = 0; i < h->n; i++) {
        const lg__st_tensor *t = &h->tensors[i];
        uint64_t need = 0;
        char shown[SHOWN], before[SHOWN];
        lg__printable(t->name, shown, sizeof shown);
        if (t->begin < covered) {
            return lg_error_set(err, LG_ERR_FORMAT,
                                "tensor \"%s\" begins at byte %" PRIu64 " of the data, inside of tensor \"%s\"", shown,
                                t->begin, lg__printable(h->tensors[i - 1].name, before, sizeof before));
        }
        LG__RETURN_IF(t->begin > covered, err, LG_ERR_FORMAT,
                      "bytes %" PRIu64 " to %" PRIu64 " of the data, before tensor \"%s\", belong to no tensor",
                      covered, t->begin, shown);
        LG__RETURN_IF(t->end < t->begin, err, LG_ERR_FORMAT, "tensor \"%s\" ends before it begins", shown);
        if (needed_bytes(t, &need, err) != LG_OK) {
            return wrap_tensor(t, err);
        }
        LG__RETURN_IF(t->end - t->begin != need, err, LG_ERR_FORMAT,
                      "tensor \"%s\" has %" PRIu64 " bytes of data but its shape and dtype %s call for %" PRIu64, shown,
                      t->end - t->begin, lg_dtype_name(t->dtype), need);
        covered = t->end;
    }
    uint64_t need = h->data_start + covered;
    LG__RETURN_IF(h->file_bytes < need, err, LG_ERR_CORRUPT,
                  "the file is cut short: have %" PRIu64 " bytes, need %" PRIu64, h->file_bytes, need);
    LG__RETURN_IF(h->file_bytes > need, err, LG_ERR_FORMAT,
                  "%" PRIu64 " bytes follow the last tensor: have %" PRIu64 " bytes, need %" PRIu64
                  " (were files joined?)",
                  h->file_bytes - need, h->file_bytes, need);
    return LG_OK;
}

/* --------------------------------------------------------------- saved offsets */

static lg__st_tensor *find(const lg__st_header *h, const char *name)
{
    size_t low = 0, high = h->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        lg__st_tensor *t = &h->tensors[h->by_name[middle]];
        int order = strcmp(name, t->name);
        if (order == 0) {
            return t;
        }
        if (order < 0) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return NULL;
}

static lg_status read_offsets(lg__arena *scratch, lg__arena *arena, slice text, lg__st_tensor *t, lg_error *err)
{
    LG__RETURN_IF(t->has_offsets, err, LG_ERR_FORMAT, "it is there twice");
    members m = {.what = "entry", .text = text.at, .n = text.n};
    for (;;) {
        slice key_text, key, value;
        bool more = false;
        LG__TRY(next_member(&m, &key_text, &value, &more, err));
        if (!more) {
            break;
        }
        if (!plain_string(key_text, &key)) {
            LG__TRY(read_string(scratch, key_text, "a key", false, &key, err));
        }
        if (!same(key, "saved_offsets")) {
            LG__TRY(read_unknown(value, err));
            continue;
        }
        LG__RETURN_IF(t->has_offsets, err, LG_ERR_FORMAT, "\"saved_offsets\" is given twice");
        uint64_t numbers[LG_MAX_NDIM];
        size_t n = 0;
        LG__TRY(read_numbers(value, "saved_offsets", numbers, LG_MAX_NDIM, &n, err));
        LG__RETURN_IF(n != t->ndim, err, LG_ERR_FORMAT, "%zu saved_offsets for a shape of %" PRIu32 " dimensions", n,
                      t->ndim);
        for (uint32_t d = 0; d < t->ndim; d++) {
            LG__RETURN_IF(numbers[d] > INT64_MAX - t->shape[d], err, LG_ERR_FORMAT,
                          "saved_offsets[%" PRIu32 "] plus the shape is beyond 2^63", d);
        }
        LG__TRY(copy_numbers(arena, numbers, n, &t->saved_offsets, err));
        t->has_offsets = true;
    }
    LG__RETURN_IF(!t->has_offsets, err, LG_ERR_FORMAT, "\"saved_offsets\" is missing");
    return LG_OK;
}

static lg_status read_sharding_entries(lg__st_header *h, lg__arena *scratch, slice text, lg_error *err)
{
    members m = {.what = SHARDING_KEY, .text = text.at, .n = text.n};
    for (;;) {
        slice key_text, key, value;
        bool more = false;
        LG__TRY(next_member(&m, &key_text, &value, &more, err));
        if (!more) {
            return LG_OK;
        }
        LG__RETURN_IF(value.n > ENTRY_MAX, err, LG_ERR_LIMIT,
                      SHARDING_KEY ": an entry takes %zu bytes; up to %zu are supported", value.n, ENTRY_MAX);
        LG__TRY(read_string(scratch, key_text, "a name in " SHARDING_KEY, false, &key, err));
        /* No tensor of the file has a NUL in its name. */
        lg__st_tensor *t = strlen(key.at) == key.n ? find(h, key.at) : NULL;
        if ((t == NULL ? read_unknown(value, err) : read_offsets(scratch, h->arena, value, t, err)) != LG_OK) {
            char shown[SHOWN];
            return lg_error_wrap(err, SHARDING_KEY ": tensor \"%s\"", lg__printable(key.at, shown, sizeof shown));
        }
    }
}

static lg_status read_sharding(lg__st_header *h, slice text, lg_error *err)
{
    lg__arena *scratch = lg__arena_new(); /* for names, which are only looked up */
    if (scratch == NULL) {
        return lg__nomem(err);
    }
    lg_status status = read_sharding_entries(h, scratch, text, err);
    lg__arena_free(scratch);
    LG__TRY(status);
    for (size_t i = 0; i < h->n; i++) {
        char shown[SHOWN];
        LG__RETURN_IF(!h->tensors[i].has_offsets, err, LG_ERR_FORMAT, SHARDING_KEY " does not list tensor \"%s\"",
                      lg__printable(h->tensors[i].name, shown, sizeof shown));
    }
    return LG_OK;
}

static lg_status read_saved_offsets(lg__st_header *h, lg_error *err)
{
    for (size_t i = 0; i < h->n_metadata; i++) {
        if (strcmp(h->metadata[i].key, SHARDING_KEY) == 0 && h->metadata[i].value_bytes > 0) {
            return read_sharding(h, (slice){h->metadata[i].value, h->metadata[i].value_bytes}, err);
        }
    }
    return LG_OK;
}

/* --------------------------------------------------------------------- public */

static lg_status parse(lg__st_header *h, slice text, lg_error *err)
{
    LG__TRY(read_entries(h, text, err));
    LG__TRY(sort_tensors(h, err));
    LG__TRY(check_cover(h, err));
    return read_saved_offsets(h, err);
}

lg_status lg__st_parse(const char *text, uint64_t n, uint64_t file_bytes, lg__st_header **out, lg_error *err)
{
    LG__RETURN_IF(n > LG__ST_MAX_HEADER || file_bytes < 8 || n > file_bytes - 8, err, LG_ERR_FORMAT,
                  "a header of %" PRIu64 " bytes does not fit a file of %" PRIu64, n, file_bytes);
    lg__arena *arena = lg__arena_new();
    lg__st_header *h = arena == NULL ? NULL : lg__arena_alloc(arena, sizeof *h);
    if (h == NULL) {
        lg__arena_free(arena);
        return lg__nomem(err);
    }
    h->arena = arena;
    h->data_start = 8 + n;
    h->file_bytes = file_bytes;
    lg_status status = parse(h, (slice){text, (size_t)n}, err);
    if (status != LG_OK) {
        lg__st_free(h);
        return status;
    }
    *out = h;
    return LG_OK;
}

void lg__st_free(lg__st_header *h)
{
    if (h != NULL) {
        lg__arena_free(h->arena);
    }
}

const lg__st_tensor *lg__st_find(const lg__st_header *h, const char *name) { return find(h, name); }

/* ------------------------------------------------------- what the file really is */

static const char *recognise(const uint8_t *p, size_t n)
{
    static const struct {
        const char *magic;
        size_t bytes;
        const char *what;
    } known[] = {
        {"version https://git-lfs", 23, "a Git LFS pointer: the real file was never fetched (git lfs pull)"},
        {"PK\003\004", 4, "a zip archive (of torch.save?)"},
        {"PK\005\006", 4, "an empty zip archive"},
        {"GGUF", 4, "a GGUF file"},
        {"\x1f\x8b", 2, "gzip-compressed; unpack it first"},
        {"\x28\xb5\x2f\xfd", 4, "zstd-compressed; unpack it first"},
        {"\xfd"
         "7zXZ",
         5, "xz-compressed; unpack it first"},
        {"\x80\x02", 2, "a Python pickle, which is never executed here"},
        {"\x80\x03", 2, "a Python pickle, which is never executed here"},
        {"\x80\x04", 2, "a Python pickle, which is never executed here"},
        {"\x80\x05", 2, "a Python pickle, which is never executed here"},
        {"\x89HDF", 4, "an HDF5 file"},
        {"\x93NUMPY", 6, "a NumPy array file"},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (n >= known[i].bytes && memcmp(p, known[i].magic, known[i].bytes) == 0) {
            return known[i].what;
        }
    }
    size_t at = 0;
    while (at < n && is_space((char)p[at])) {
        at++;
    }
    if (at + 1 < n && p[at] == '<' && (p[at + 1] == '!' || p[at + 1] == '?' || p[at + 1] == 'h' || p[at + 1] == 'H')) {
        return "an HTML or XML page (a failed download?)";
    }
    if (at < n && (p[at] == '{' || p[at] == '[')) {
        return "JSON text (an index or a configuration?)";
    }
    return NULL;
}

lg_status lg__st_header_bytes(const uint8_t *first, size_t first_bytes, uint64_t file_bytes, uint64_t *n, lg_error *err)
{
    LG__RETURN_IF(file_bytes == 0, err, LG_ERR_CORRUPT, "the file is empty");
    const char *what = recognise(first, first_bytes);
    if (file_bytes < 8 || first_bytes < 8) {
        LG__RETURN_IF(what != NULL, err, LG_ERR_FORMAT, "not safetensors but %s", what);
        return lg_error_set(err, LG_ERR_CORRUPT,
                            "the file is cut short: have %" PRIu64 " bytes, need 8 for the header's length alone",
                            file_bytes);
    }
    uint64_t length = lg__get_u64le(first);
    bool fits = length <= LG__ST_MAX_HEADER && length <= file_bytes - 8;
    bool opens = first_bytes > 8 && (first[8] == '{' || is_space((char)first[8]));
    LG__RETURN_IF(what != NULL && (!fits || !opens), err, LG_ERR_FORMAT, "not safetensors but %s", what);
    LG__RETURN_IF(length == 0, err, LG_ERR_CORRUPT, "the file begins with zeros: its header was never written");
    LG__RETURN_IF(length > LG__ST_MAX_HEADER, err, LG_ERR_FORMAT,
                  "its first 8 bytes give a header of %" PRIu64 " bytes, and at most %" PRIu64
                  " are allowed: not safetensors, or damaged",
                  length, LG__ST_MAX_HEADER);
    LG__RETURN_IF(!fits, err, LG_ERR_CORRUPT,
                  "the file is cut short: have %" PRIu64 " bytes, need %" PRIu64 " for the header alone", file_bytes,
                  length + 8);
    *n = length;
    return LG_OK;
}
