/* SPDX-License-Identifier: Apache-2.0 */
#include "format/safetensors.h"

#include "base/error.h"
#include "base/json_pieces.h"
#include "format/member.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* What one tensor's entry may take; the longest real one, of 32 dimensions,
 * takes some 800 bytes. */
#define ENTRY_MAX ((size_t)64 * 1024)

/* What it takes at the least: "":{"dtype":"F4","shape":[],"data_offsets":[0,0]} */
#define ENTRY_MIN ((size_t)40)

#define SHARDING_KEY "DCP_SHARDING_INFO"
#define SHOWN 200

typedef lg__json_piece slice;

/* ------------------------------------------------------------ strings, numbers */

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
    text = lg__json_trimmed(text);
    return lg__json_plain_numbers(text, out, max, n) ? LG_OK : odd_numbers(text, field, out, max, n, err);
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
    LG__TRY(lg__json_read_string(arena, text, "dtype", true, &name, err));
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

/* A member with its key read; one with escapes is copied into the arena. */
static lg_status next_member(lg__arena *arena, lg__json_cursor *m, slice *key, slice *value, bool *more, lg_error *err)
{
    slice text;
    LG__TRY(lg__json_next_member(m, &text, value, more, err));
    return !*more || lg__json_plain_string(text, key) ? LG_OK
                                                      : lg__json_read_string(arena, text, "a key", false, key, err);
}

static lg_status read_tensor_info(lg__arena *arena, slice text, lg__st_tensor *t, lg_error *err)
{
    LG__RETURN_IF(text.n > ENTRY_MAX, err, LG_ERR_LIMIT, "its entry takes %zu bytes; up to %zu are supported", text.n,
                  ENTRY_MAX);
    bool has_dtype = false, has_shape = false, has_range = false;
    uint64_t numbers[LG_MAX_NDIM];
    size_t n = 0;
    lg__json_cursor m = lg__json_cursor_over("entry", text);
    for (;;) {
        slice key, value;
        bool more = false;
        LG__TRY(next_member(arena, &m, &key, &value, &more, err));
        if (!more) {
            break;
        }
        bool *seen = lg__json_piece_is(key, "dtype")          ? &has_dtype
                     : lg__json_piece_is(key, "shape")        ? &has_shape
                     : lg__json_piece_is(key, "data_offsets") ? &has_range
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

/* The same for an entry in the form that writers use, at `*p`; false leaves *p
 * and the text, whatever is odd about it, to read_tensor_info. */
static bool take_tensor_info(const char **p, const char *end, uint64_t shape[LG_MAX_NDIM], lg__st_tensor *t)
{
    const char *s = *p;
    slice dtype;
    uint64_t range[2];
    size_t ndim = 0, n = 0;
    if (!LG__JSON_TAKE(&s, end, "{\"dtype\":") || !lg__json_take_string(&s, end, &dtype) ||
        !lg__dtype_of(dtype, &t->dtype) || !LG__JSON_TAKE(&s, end, ",\"shape\":") ||
        !lg__json_take_numbers(&s, end, shape, LG_MAX_NDIM, &ndim) || !LG__JSON_TAKE(&s, end, ",\"data_offsets\":") ||
        !lg__json_take_numbers(&s, end, range, 2, &n) || n != 2 || !LG__JSON_TAKE(&s, end, "}")) {
        return false;
    }
    t->ndim = (uint32_t)ndim;
    t->begin = range[0];
    t->end = range[1];
    *p = s;
    return true;
}

static lg_status wrap_tensor(const lg__st_tensor *t, lg_error *err)
{
    char shown[SHOWN];
    return lg_error_wrap(err, "tensor \"%s\"", lg__printable(t->name, shown, sizeof shown));
}

/* ------------------------------------------------------------------- metadata */

static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

static int compare_keys(const void *a, const void *b)
{
    /* Entries begin with their key. */
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Members as they are read; `at` is NULL while there is none. */
typedef struct members {
    lg__st_member *at;
    size_t n, cap;
} members;

/* Reads the members at the cursor into `list`, which it grows. */
static lg_status read_members(lg__arena *arena, lg__json_cursor *m, members *list, lg_error *err)
{
    for (;;) {
        slice key_text, key, value_text, value;
        bool more = false;
        LG__TRY(lg__json_next_member(m, &key_text, &value_text, &more, err));
        if (!more) {
            return LG_OK;
        }
        char shown[SHOWN];
        LG__TRY(lg__json_read_string(arena, key_text, "a key of __metadata__", true, &key, err));
        if (lg__json_read_string(arena, value_text, "the value", false, &value, err) != LG_OK) {
            return lg_error_wrap(err, "__metadata__: \"%s\"", lg__printable(key.at, shown, sizeof shown));
        }
        if (!lg__grow((void **)&list->at, &list->cap, list->n, sizeof *list->at)) {
            return lg__nomem(err);
        }
        list->at[list->n++] = (lg__st_member){.key = key.at, .value = value.at, .value_bytes = value.n};
    }
}

static lg_status keep_members(lg__st_header *h, const members *list, lg_error *err)
{
    if (list->n > 1) {
        qsort(list->at, list->n, sizeof *list->at, compare_keys);
    }
    for (size_t i = 1; i < list->n; i++) {
        char shown[SHOWN];
        LG__RETURN_IF(strcmp(list->at[i - 1].key, list->at[i].key) == 0, err, LG_ERR_FORMAT,
                      "__metadata__: \"%s\" is there twice", lg__printable(list->at[i].key, shown, sizeof shown));
    }
    h->metadata = lg__arena_array(h->arena, list->n, sizeof *h->metadata);
    if (h->metadata == NULL) {
        return lg__nomem(err);
    }
    if (list->n > 0) {
        memcpy(h->metadata, list->at, list->n * sizeof *list->at);
    }
    h->n_metadata = list->n;
    h->has_metadata = true;
    return LG_OK;
}

/* The value of "__metadata__", where the cursor is; null is as good as none. */
static lg_status read_metadata(lg__st_header *h, lg__json_cursor *m, lg_error *err)
{
    const char *p = m->text + m->at, *end = m->text + m->n;
    while (p < end && is_space(*p)) {
        p++;
    }
    if (p == end || *p != '{') {
        slice value;
        LG__TRY(lg__json_skip_value(m, &value, err));
        if (lg__json_piece_is(lg__json_trimmed(value), "null")) {
            return LG_OK;
        }
        p = value.at;
        end = value.at + value.n;
    }
    lg__json_cursor inner = {.what = "__metadata__ object", .text = p, .n = (size_t)(end - p), .inside = true};
    members list = {0};
    lg_status status = read_members(h->arena, &inner, &list, err);
    if (status == LG_OK) {
        status = keep_members(h, &list, err);
    }
    lg__free(list.at);
    m->at = (size_t)(p - m->text) + inner.at;
    return status;
}

/* ---------------------------------------------------------------- the tensors */

static size_t entries_most(size_t bytes) { return bytes / ENTRY_MIN + 1; }

/* One tensor, whose entry begins where the cursor is. */
static lg_status read_entry(lg__st_header *h, lg__json_cursor *m, slice key, lg_error *err)
{
    LG__RETURN_IF(h->n == entries_most(m->n), err, LG_ERR_INTERNAL, "more entries than fit their text");
    lg__st_tensor *t = &h->tensors[h->n++];
    t->name = key.at;
    t->name_bytes = key.n;
    uint64_t shape[LG_MAX_NDIM];
    const char *p = m->text + m->at;
    if (take_tensor_info(&p, m->text + m->n, shape, t)) {
        m->at = (size_t)(p - m->text);
        return copy_numbers(h->arena, shape, t->ndim, &t->shape, err);
    }
    slice value;
    LG__TRY(lg__json_skip_value(m, &value, err));
    return read_tensor_info(h->arena, value, t, err) == LG_OK ? LG_OK : wrap_tensor(t, err);
}

static lg_status read_entries(lg__st_header *h, slice text, lg_error *err)
{
    h->tensors = lg__arena_array(h->arena, entries_most(text.n), sizeof *h->tensors);
    if (h->tensors == NULL) {
        return lg__nomem(err);
    }
    lg__json_cursor m = lg__json_cursor_over("header", text);
    bool metadata_seen = false;
    for (;;) {
        slice key_text, key;
        bool more = false;
        LG__TRY(lg__json_next_key(&m, &key_text, &more, err));
        if (!more) {
            return LG_OK;
        }
        LG__TRY(lg__json_read_string(h->arena, key_text, "a tensor's name", true, &key, err));
        if (!lg__json_piece_is(key, "__metadata__")) {
            LG__TRY(read_entry(h, &m, key, err));
            continue;
        }
        LG__RETURN_IF(metadata_seen, err, LG_ERR_FORMAT, "\"__metadata__\" is there twice");
        metadata_seen = true;
        LG__TRY(read_metadata(h, &m, err));
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

/* Canonical headers are in order as they are. */
static bool in_order(const lg__st_header *h)
{
    size_t i = 1;
    while (i < h->n && compare_places(&h->tensors[i - 1], &h->tensors[i]) < 0) {
        i++;
    }
    return i >= h->n;
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
    if (!in_order(h)) {
        qsort(h->tensors, h->n, sizeof *h->tensors, compare_places);
    }
    bool sorted = true;
    for (size_t i = 0; i < h->n; i++) {
        h->by_name[i] = (uint32_t)i;
        sorted = sorted && (i == 0 || strcmp(h->tensors[i - 1].name, h->tensors[i].name) < 0);
    }
    if (sorted) {
        return LG_OK;
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
        if (t->begin < covered) {
            return lg_error_set(err, LG_ERR_FORMAT,
                                "tensor \"%s\" begins at byte %" PRIu64 " of the data, inside of tensor \"%s\"",
                                lg__printable(t->name, shown, sizeof shown), t->begin,
                                lg__printable(h->tensors[i - 1].name, before, sizeof before));
        }
        LG__RETURN_IF(t->begin > covered, err, LG_ERR_FORMAT,
                      "bytes %" PRIu64 " to %" PRIu64 " of the data, before tensor \"%s\", belong to no tensor",
                      covered, t->begin, lg__printable(t->name, shown, sizeof shown));
        LG__RETURN_IF(t->end < t->begin, err, LG_ERR_FORMAT, "tensor \"%s\" ends before it begins",
                      lg__printable(t->name, shown, sizeof shown));
        if (needed_bytes(t, &need, err) != LG_OK) {
            return wrap_tensor(t, err);
        }
        LG__RETURN_IF(t->end - t->begin != need, err, LG_ERR_FORMAT,
                      "tensor \"%s\" has %" PRIu64 " bytes of data but its shape and dtype %s call for %" PRIu64,
                      lg__printable(t->name, shown, sizeof shown), t->end - t->begin, lg_dtype_name(t->dtype), need);
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

static lg_status keep_offsets(lg__arena *arena, const uint64_t *numbers, size_t n, lg__st_tensor *t, lg_error *err)
{
    LG__RETURN_IF(n != t->ndim, err, LG_ERR_FORMAT, "%zu saved_offsets for a shape of %" PRIu32 " dimensions", n,
                  t->ndim);
    for (uint32_t d = 0; d < t->ndim; d++) {
        LG__RETURN_IF(numbers[d] > INT64_MAX - t->shape[d], err, LG_ERR_FORMAT,
                      "saved_offsets[%" PRIu32 "] plus the shape is beyond 2^63", d);
    }
    LG__TRY(copy_numbers(arena, numbers, n, &t->saved_offsets, err));
    t->has_offsets = true;
    return LG_OK;
}

static lg_status read_offsets(lg__arena *scratch, lg__arena *arena, slice text, lg__st_tensor *t, lg_error *err)
{
    LG__RETURN_IF(t->has_offsets, err, LG_ERR_FORMAT, "it is there twice");
    lg__json_cursor m = lg__json_cursor_over("entry", text);
    for (;;) {
        slice key, value;
        bool more = false;
        LG__TRY(next_member(scratch, &m, &key, &value, &more, err));
        if (!more) {
            break;
        }
        if (!lg__json_piece_is(key, "saved_offsets")) {
            LG__TRY(read_unknown(value, err));
            continue;
        }
        LG__RETURN_IF(t->has_offsets, err, LG_ERR_FORMAT, "\"saved_offsets\" is given twice");
        uint64_t numbers[LG_MAX_NDIM];
        size_t n = 0;
        LG__TRY(read_numbers(value, "saved_offsets", numbers, LG_MAX_NDIM, &n, err));
        LG__TRY(keep_offsets(arena, numbers, n, t, err));
    }
    LG__RETURN_IF(!t->has_offsets, err, LG_ERR_FORMAT, "\"saved_offsets\" is missing");
    return LG_OK;
}

/* The same for an entry in the form that writers use, as take_tensor_info. */
static bool take_offsets(const char **p, const char *end, uint64_t numbers[LG_MAX_NDIM], size_t *n)
{
    const char *s = *p;
    if (!LG__JSON_TAKE(&s, end, "{\"saved_offsets\":") || !lg__json_take_numbers(&s, end, numbers, LG_MAX_NDIM, n) ||
        !LG__JSON_TAKE(&s, end, "}")) {
        return false;
    }
    *p = s;
    return true;
}

/* The tensor `name`; `*next` is where it is if both lists have one order. */
static lg__st_tensor *find_listed(const lg__st_header *h, slice name, size_t *next)
{
    lg__st_tensor *t = *next < h->n ? &h->tensors[*next] : NULL;
    if (t == NULL || t->name_bytes != name.n || memcmp(t->name, name.at, name.n) != 0) {
        /* No tensor of the file has a NUL in its name. */
        t = strlen(name.at) == name.n ? find(h, name.at) : NULL;
    }
    if (t != NULL) {
        *next = (size_t)(t - h->tensors) + 1;
    }
    return t;
}

static lg_status read_sharding_entries(lg__st_header *h, lg__arena *scratch, slice text, lg_error *err)
{
    lg__json_cursor m = lg__json_cursor_over(SHARDING_KEY, text);
    for (size_t next = 0;;) {
        slice key_text, key, value;
        bool more = false;
        LG__TRY(lg__json_next_key(&m, &key_text, &more, err));
        if (!more) {
            return LG_OK;
        }
        LG__TRY(lg__json_read_string(scratch, key_text, "a name in " SHARDING_KEY, false, &key, err));
        lg__st_tensor *t = find_listed(h, key, &next);
        uint64_t numbers[LG_MAX_NDIM];
        size_t n = 0;
        const char *p = m.text + m.at;
        lg_status status;
        if (t != NULL && !t->has_offsets && take_offsets(&p, m.text + m.n, numbers, &n)) {
            m.at = (size_t)(p - m.text);
            status = keep_offsets(h->arena, numbers, n, t, err);
        } else {
            LG__TRY(lg__json_skip_value(&m, &value, err));
            LG__RETURN_IF(value.n > ENTRY_MAX, err, LG_ERR_LIMIT,
                          SHARDING_KEY ": an entry takes %zu bytes; up to %zu are supported", value.n, ENTRY_MAX);
            status = t == NULL ? read_unknown(value, err) : read_offsets(scratch, h->arena, value, t, err);
        }
        if (status != LG_OK) {
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
