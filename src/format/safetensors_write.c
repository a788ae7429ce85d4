/* SPDX-License-Identifier: Apache-2.0 */
#include "format/safetensors.h"

#include "base/error.h"
#include "base/json.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define SHOWN 200

/* The members that every shard has, in this order, before the caller's own. */
static const char *const own_keys[] = {"format", "DCP_VERSION", "DCP_SHARDING_INFO"};

/* ------------------------------------------------------------------- estimates */

/* Bytes that the header spends on a name: once escaped, and once more, escaped
 * twice, in the sharding info. */
static uint64_t name_bytes(const char *name, bool both)
{
    uint64_t once = 0, twice = 0;
    for (const unsigned char *p = (const unsigned char *)name; *p != '\0'; p++) {
        bool quoted = *p == '"' || *p == '\\';
        once += quoted ? 2 : *p < 0x20 ? 6 : 1;
        twice += quoted ? 4 : *p < 0x20 ? 7 : 1;
    }
    return both ? once + twice : once;
}

#define DIGITS_MAX 20 /* of a 64-bit integer */

/* Without the name. */
static uint64_t entry_frame(uint32_t ndim)
{
    uint64_t list = (uint64_t)ndim * (DIGITS_MAX + 1);
    uint64_t entry = sizeof ",\"\":{\"dtype\":\"F8_E5M2FNUZ\",\"shape\":[],\"data_offsets\":[,]}" - 1 + 2 * DIGITS_MAX;
    uint64_t info = sizeof ",\\\"\\\":{\\\"saved_offsets\\\":[]}" - 1;
    return entry + list + info + list;
}

uint64_t lg__st_entry_bytes(const char *name, uint32_t ndim) { return entry_frame(ndim) + name_bytes(name, true); }

/* A control byte takes the most: 6 bytes and 7. */
uint64_t lg__st_entry_most(size_t bytes, uint32_t ndim) { return entry_frame(ndim) + 13 * (uint64_t)bytes; }

/* What an entry takes at the least. */
static uint64_t entry_bytes_least(const char *name, uint32_t ndim, bool plain)
{
    uint64_t entry = sizeof "\"\":{\"dtype\":\"F4\",\"shape\":[],\"data_offsets\":[0,0]}" - 1;
    uint64_t info = plain ? 0 : sizeof "\\\"\\\":{\\\"saved_offsets\\\":[]}" - 1;
    return entry + info + (plain ? 1 : 2) * (uint64_t)ndim + name_bytes(name, !plain);
}

/* ---------------------------------------------------------------------- checks */

static int compare_canonical(const void *a, const void *b)
{
    const lg__st_entry *x = a, *y = b;
    if (x->dtype != y->dtype) {
        return x->dtype > y->dtype ? -1 : 1;
    }
    return strcmp(x->name, y->name);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static lg_status check_distinct(const char **names, size_t n, const char *what, lg_error *err)
{
    if (n > 1) {
        qsort(names, n, sizeof *names, compare_names);
    }
    for (size_t i = 1; i < n; i++) {
        char shown[SHOWN];
        LG__RETURN_IF(strcmp(names[i - 1], names[i]) == 0, err, LG_ERR_INVALID, "%s \"%s\" is there twice", what,
                      lg__printable(names[i], shown, sizeof shown));
    }
    return LG_OK;
}

static lg_status check_names(const lg__st_entry *entries, size_t n, lg_error *err)
{
    for (size_t i = 0; i < n; i++) {
        const char *name = entries[i].name;
        /* Raw files put "t:" or "b:" before a name of any allowed length. */
        size_t bytes = strlen(name);
        bool raw = bytes > LG_MAX_NAME && (name[0] == 't' || name[0] == 'b') && name[1] == ':';
        LG__TRY(raw ? lg__name_check("tensor", name + 2, bytes - 2, err) : lg__name_check("tensor", name, bytes, err));
    }
    return LG_OK;
}

/* Entries are in canonical order: by name as well, if they are of one dtype. */
static lg_status check_distinct_names(const lg__st_entry *entries, size_t n, lg_error *err)
{
    size_t i = 1;
    while (i < n && entries[i].dtype == entries[0].dtype && strcmp(entries[i - 1].name, entries[i].name) < 0) {
        i++;
    }
    if (i >= n) {
        return LG_OK;
    }
    const char **names = lg__calloc(n, sizeof *names);
    if (names == NULL) {
        return lg__nomem(err);
    }
    for (i = 0; i < n; i++) {
        names[i] = entries[i].name;
    }
    lg_status status = check_distinct(names, n, "tensor", err);
    lg__free(names);
    return status;
}

static lg_status check_meta(const lg__st_meta *meta, size_t n, bool plain, lg_error *err)
{
    size_t n_own = plain ? 0 : sizeof own_keys / sizeof own_keys[0];
    const char **keys = lg__calloc(n + n_own, sizeof *keys);
    if (keys == NULL) {
        return lg__nomem(err);
    }
    lg_status status = LG_OK;
    for (size_t i = 0; status == LG_OK && i < n; i++) {
        char shown[SHOWN];
        keys[i] = meta[i].key;
        if (!lg__utf8_valid(meta[i].key, strlen(meta[i].key)) ||
            !lg__utf8_valid(meta[i].value, strlen(meta[i].value))) {
            status = lg_error_set(err, LG_ERR_INVALID, "metadata \"%s\" is no valid UTF-8",
                                  lg__printable(meta[i].key, shown, sizeof shown));
        }
    }
    for (size_t i = 0; i < n_own; i++) {
        keys[n + i] = own_keys[i];
    }
    if (status == LG_OK) {
        status = check_distinct(keys, n + n_own, "metadata key", err);
    }
    lg__free(keys);
    return status;
}

/* For messages: lives as long as the statement. */
#define NAME(e) lg__printable((e)->name, (char[SHOWN]){0}, SHOWN)

/* Gives each entry its place in the data, one after the other. */
static lg_status place(lg__st_entry *e, uint64_t *at, lg_error *err)
{
    LG__RETURN_IF(lg_dtype_bits(e->dtype) == 0, err, LG_ERR_INVALID, "tensor \"%s\": unknown dtype", NAME(e));
    LG__RETURN_IF(e->ndim > LG_MAX_NDIM, err, LG_ERR_LIMIT, "tensor \"%s\" has %" PRIu32 " dimensions; %d are allowed",
                  NAME(e), e->ndim, LG_MAX_NDIM);
    uint64_t elements = 1, bits = 0, end = 0;
    for (uint32_t d = 0; d < e->ndim; d++) {
        LG__RETURN_IF(__builtin_mul_overflow(elements, e->shape[d], &elements) || elements > INT64_MAX ||
                          e->shape[d] > INT64_MAX,
                      err, LG_ERR_LIMIT, "tensor \"%s\" has more elements than 2^63", NAME(e));
        LG__RETURN_IF(e->offset != NULL && e->offset[d] > INT64_MAX - e->shape[d], err, LG_ERR_LIMIT,
                      "tensor \"%s\": offset %" PRIu64 " is beyond 2^63", NAME(e), e->offset[d]);
    }
    LG__RETURN_IF(__builtin_mul_overflow(elements, (uint64_t)lg_dtype_bits(e->dtype), &bits), err, LG_ERR_LIMIT,
                  "tensor \"%s\" has more bits than 2^64", NAME(e));
    LG__RETURN_IF(bits % 8 != 0, err, LG_ERR_INVALID,
                  "tensor \"%s\": %" PRIu64 " elements of %s do not fill whole bytes", NAME(e), elements,
                  lg_dtype_name(e->dtype));
    LG__RETURN_IF(__builtin_add_overflow(*at, bits / 8, &end) || end > INT64_MAX, err, LG_ERR_LIMIT,
                  "tensor \"%s\" ends beyond 2^63 bytes", NAME(e));
    e->begin = *at;
    e->end = end;
    *at = end;
    return LG_OK;
}

/* --------------------------------------------------------------------- writing */

static void add_numbers(lg__buf *b, const uint64_t *numbers, uint32_t n)
{
    lg__buf_str(b, "[");
    for (uint32_t i = 0; i < n; i++) {
        if (i > 0) {
            lg__buf_str(b, ",");
        }
        lg__buf_u64(b, numbers != NULL ? numbers[i] : 0);
    }
    lg__buf_str(b, "]");
}

static void add_string(lg__buf *b, const char *s) { lg__buf_json_str(b, s, strlen(s)); }

/* A name inside of JSON text that is itself a JSON string. */
static void add_name_twice(lg__buf *b, const char *name)
{
    lg__buf_str(b, "\\\"");
    const char *p = name;
    while (*p >= 0x20 && *p != '"' && *p != '\\' && *p != 0x7F) {
        p++;
    }
    if (*p == '\0') {
        lg__buf_add(b, name, (size_t)(p - name));
    } else {
        lg__buf once, twice;
        lg__buf_init(&once, (size_t)LG__ST_MAX_HEADER);
        lg__buf_init(&twice, (size_t)LG__ST_MAX_HEADER);
        add_string(&once, name);
        if (once.len > 2) {
            lg__buf_json_str(&twice, once.data + 1, once.len - 2);
        }
        if (twice.len > 2) {
            lg__buf_add(b, twice.data + 1, twice.len - 2);
        }
        b->failed = b->failed || once.failed || twice.failed;
        lg__buf_free(&once);
        lg__buf_free(&twice);
    }
    lg__buf_str(b, "\\\"");
}

static void add_sharding_info(lg__buf *b, const lg__st_entry *entries, size_t n)
{
    lg__buf_str(b, "\"{");
    for (size_t i = 0; i < n; i++) {
        if (i > 0) {
            lg__buf_str(b, ",");
        }
        add_name_twice(b, entries[i].name);
        lg__buf_str(b, ":{\\\"saved_offsets\\\":");
        add_numbers(b, entries[i].offset, entries[i].ndim);
        lg__buf_str(b, "}");
    }
    lg__buf_str(b, "}\"");
}

/* The caller's members; `first`: nothing is before them. */
static void add_members(lg__buf *b, const lg__st_meta *meta, size_t n, bool first)
{
    for (size_t i = 0; i < n; i++) {
        if (i > 0 || !first) {
            lg__buf_str(b, ",");
        }
        add_string(b, meta[i].key);
        lg__buf_str(b, ":");
        add_string(b, meta[i].value);
    }
}

static void add_metadata(lg__buf *b, const lg__st_entry *entries, size_t n, const lg__st_meta *meta, size_t n_meta,
                         bool plain, lg__st_place *members)
{
    if (plain && n_meta == 0) {
        return;
    }
    lg__buf_str(b, "\"__metadata__\":{");
    if (!plain) {
        lg__buf_str(b, "\"format\":\"pt\",\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":");
        add_sharding_info(b, entries, n);
    }
    members->at = b->len;
    add_members(b, meta, n_meta, plain);
    members->bytes = b->len - members->at;
    lg__buf_str(b, n > 0 ? "}," : "}");
}

/* Pads the header that begins at `start` and says how long it is. */
static lg_status close_header(lg__buf *b, size_t start, uint64_t align, lg_error *err)
{
    lg__buf_fill(b, ' ', (size_t)((align - (b->len - start) % align) % align));
    LG__TRY(lg__buf_check(b, "header", err));
    uint64_t length = b->len - start - 8;
    LG__RETURN_IF(length > LG__ST_MAX_HEADER, err, LG_ERR_LIMIT,
                  "a header takes %" PRIu64 " bytes; at most %" PRIu64 " are allowed", length, LG__ST_MAX_HEADER);
    for (int i = 0; i < 8; i++) {
        b->data[start + (size_t)i] = (char)(unsigned char)(length >> (8 * i));
    }
    return LG_OK;
}

static lg_status write_header(lg__buf *b, const lg__st_entry *entries, size_t n, const lg__st_meta *meta, size_t n_meta,
                              bool plain, uint64_t align, lg__st_place *members, lg_error *err)
{
    size_t start = b->len;
    lg__buf_u64le(b, 0);
    lg__buf_str(b, "{");
    add_metadata(b, entries, n, meta, n_meta, plain, members);
    for (size_t i = 0; i < n; i++) {
        const lg__st_entry *e = &entries[i];
        if (i > 0) {
            lg__buf_str(b, ",");
        }
        add_string(b, e->name);
        lg__buf_str(b, ":{\"dtype\":\"");
        lg__buf_str(b, lg_dtype_name(e->dtype));
        lg__buf_str(b, "\",\"shape\":");
        add_numbers(b, e->shape, e->ndim);
        lg__buf_str(b, ",\"data_offsets\":");
        add_numbers(b, (uint64_t[]){e->begin, e->end}, 2);
        lg__buf_str(b, "}");
    }
    lg__buf_str(b, "}");
    return close_header(b, start, align, err);
}

lg_status lg__st_plan_renewable(lg__st_entry *entries, size_t n, const lg__st_meta *meta, size_t n_meta, bool plain,
                                uint64_t align, lg__buf *out, lg__st_place *members, uint64_t *data_bytes,
                                lg_error *err)
{
    LG__RETURN_IF(align != 8 && align != LG__ST_DATA_ALIGN, err, LG_ERR_INVALID,
                  "tensor data cannot be aligned to %" PRIu64, align);
    uint64_t least = 0, most = 0;
    for (size_t i = 0; i < n && most <= LG__ST_MAX_HEADER; i++) {
        most += lg__st_entry_most(strlen(entries[i].name), entries[i].ndim);
    }
    for (size_t i = 0; i < n && most > LG__ST_MAX_HEADER; i++) {
        least += entry_bytes_least(entries[i].name, entries[i].ndim, plain);
        LG__RETURN_IF(least > LG__ST_MAX_HEADER, err, LG_ERR_LIMIT,
                      "a header for %zu tensors would be longer than %" PRIu64 " bytes", n, LG__ST_MAX_HEADER);
    }
    LG__TRY(check_names(entries, n, err));
    LG__TRY(check_meta(meta, n_meta, plain, err));
    if (n > 1) {
        qsort(entries, n, sizeof *entries, compare_canonical);
    }
    LG__TRY(check_distinct_names(entries, n, err));
    uint64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        LG__TRY(place(&entries[i], &at, err));
    }
    LG__TRY(lg__buf_check(out, "header", err));
    size_t start = out->len;
    lg__st_place where = {0};
    lg_status status = write_header(out, entries, n, meta, n_meta, plain, align, &where, err);
    if (status != LG_OK) {
        out->len = start;
        out->failed = out->too_long = false;
        return status;
    }
    *members = where;
    *data_bytes = at;
    return LG_OK;
}

lg_status lg__st_plan(lg__st_entry *entries, size_t n, const lg__st_meta *meta, size_t n_meta, bool plain,
                      uint64_t align, lg__buf *out, uint64_t *data_bytes, lg_error *err)
{
    lg__st_place ignored;
    return lg__st_plan_renewable(entries, n, meta, n_meta, plain, align, out, &ignored, data_bytes, err);
}

size_t lg__st_text_end(const lg__buf *header)
{
    size_t end = header->len;
    while (end > 0 && header->data[end - 1] == ' ') {
        end--;
    }
    return end;
}

/* The text of the members is `text` from now on. */
static lg_status replace_members(lg__buf *header, lg__st_place *members, const lg__buf *text, uint64_t align,
                                 lg_error *err)
{
    const size_t behind = members->at + members->bytes, end = lg__st_text_end(header);
    LG__RETURN_IF(behind > end, err, LG_ERR_INTERNAL, "metadata ends behind its header");
    header->len = end;
    if (text->len > members->bytes) {
        lg__buf_fill(header, ' ', text->len - members->bytes);
        LG__TRY(lg__buf_check(header, "header", err));
    }
    memmove(header->data + members->at + text->len, header->data + behind, end - behind);
    memcpy(header->data + members->at, text->data, text->len);
    header->len = members->at + text->len + (end - behind);
    members->bytes = text->len;
    return close_header(header, 0, align, err);
}

lg_status lg__st_renew(lg__buf *header, lg__st_place *members, const lg__st_meta *meta, size_t n_meta, uint64_t align,
                       lg_error *err)
{
    LG__TRY(check_meta(meta, n_meta, false, err));
    lg__buf text;
    lg__buf_init(&text, (size_t)LG__ST_MAX_HEADER);
    add_members(&text, meta, n_meta, false);
    lg_status status = lg__buf_check(&text, "metadata", err);
    if (status == LG_OK && text.len > 0) {
        status = replace_members(header, members, &text, align, err);
    }
    lg__buf_free(&text);
    return status;
}
