/* SPDX-License-Identifier: Apache-2.0 */
#include "format/tagged.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/mem.h"

#include <inttypes.h>
#include <math.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHOWN 120
#define LARGEST_PLAIN (INT64_C(1) << 53)
#define DEFAULT_NAN UINT64_C(0x7ff8000000000000)

/* ------------------------------------------------------------------ primitives */

/* The tag and contents of {"$tag": contents}; false for any other value. */
static bool tag_of(const json_t *v, const char **tag, const json_t **contents)
{
    if (!json_is_object(v) || json_object_size(v) != 1) {
        return false;
    }
    void *i = json_object_iter((json_t *)v);
    const char *key = json_object_iter_key(i);
    if (key[0] != '$') {
        return false;
    }
    *tag = key;
    *contents = json_object_iter_value(i);
    return true;
}

/* A string without NUL under the tag, or NULL. */
static const char *tagged_text(const json_t *v, const char *tag)
{
    const char *found;
    const json_t *contents;
    if (!tag_of(v, &found, &contents) || strcmp(found, tag) != 0 || !json_is_string(contents)) {
        return NULL;
    }
    const char *s = json_string_value(contents);
    return strlen(s) == json_string_length(contents) ? s : NULL;
}

static double double_of(uint64_t bits)
{
    double d;
    memcpy(&d, &bits, sizeof d);
    return d;
}

static uint64_t bits_of(double d)
{
    uint64_t bits;
    memcpy(&bits, &d, sizeof bits);
    return bits;
}

/* A decimal integer beyond ±2^53, of any length, without needless digits. */
static bool is_big_int(const char *s)
{
    if (*s == '-') {
        s++;
    }
    size_t n = strlen(s);
    if (n != strspn(s, "0123456789") || n < 16 || s[0] == '0') {
        return false;
    }
    return n > 16 || strcmp(s, "9007199254740992") > 0;
}

/* The text of a $float. */
static bool read_float(const char *s, double *out)
{
    static const struct {
        const char *text;
        uint64_t bits;
    } names[] = {{"inf", UINT64_C(0x7ff0000000000000)},
                 {"-inf", UINT64_C(0xfff0000000000000)},
                 {"nan", DEFAULT_NAN},
                 {"-0.0", UINT64_C(0x8000000000000000)}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(s, names[i].text) == 0) {
            *out = double_of(names[i].bits);
            return true;
        }
    }
    uint8_t bytes[8];
    if (strncmp(s, "0x", 2) != 0 || !lg__unhex(s + 2, bytes, sizeof bytes)) {
        return false;
    }
    uint64_t bits = 0;
    for (size_t i = 0; i < sizeof bytes; i++) {
        bits = bits << 8 | bytes[i];
    }
    double d = double_of(bits);
    if (!isnan(d) || bits == DEFAULT_NAN) {
        return false; /* has a shorter form */
    }
    *out = d;
    return true;
}

static const char base64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/* Standard alphabet, padded, no spaces, no stray bits: one text for one value. */
static bool is_base64(const char *s, size_t n)
{
    if (n % 4 != 0) {
        return false;
    }
    size_t pad = n == 0 ? 0 : s[n - 1] != '=' ? 0 : s[n - 2] != '=' ? 1 : 2;
    if (strspn(s, base64) != n - pad) {
        return false;
    }
    if (pad > 0) {
        size_t last = (size_t)(strchr(base64, s[n - pad - 1]) - base64);
        return (last & (pad == 1 ? 3u : 15u)) == 0;
    }
    return true;
}

static bool is_pattern_word(const char *s, const char *first, const char *rest, size_t max)
{
    size_t n = strlen(s);
    return n > 0 && n <= max && strspn(s, first) > 0 && 1 + strspn(s + 1, rest) == n;
}

#define LOWER "abcdefghijklmnopqrstuvwxyz"
#define DIGITS "0123456789"

static bool is_dtype(const char *s)
{
    static const char torch[] = "torch.";
    return strncmp(s, torch, sizeof torch - 1) == 0 &&
           is_pattern_word(s + sizeof torch - 1, LOWER, LOWER DIGITS "_", 58);
}

/* "cpu", "cuda:0" */
static bool is_device(const char *s)
{
    size_t kind = strcspn(s, ":");
    if (kind == 0 || kind > 32 || strspn(s, LOWER) != kind) {
        return false;
    }
    if (s[kind] == '\0') {
        return true;
    }
    const char *number = s + kind + 1;
    size_t n = strlen(number);
    return n >= 1 && n <= 5 && strspn(number, DIGITS) == n && (number[0] != '0' || n == 1);
}

/* Bytes of a NumPy scalar type as this format writes it; 0 if it is none. */
static size_t numpy_bytes(const char *dtype)
{
    static const struct {
        const char *name;
        size_t bytes;
    } types[] = {{"|b1", 1}, {"|i1", 1}, {"|u1", 1}, {"<i2", 2}, {"<u2", 2}, {"<f2", 2}, {"<i4", 4},
                 {"<u4", 4}, {"<f4", 4}, {"<i8", 8}, {"<u8", 8}, {"<f8", 8}, {"<c8", 8}, {"<c16", 16}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        if (strcmp(dtype, types[i].name) == 0) {
            return types[i].bytes;
        }
    }
    return 0;
}

/* -------------------------------------------------------------------- checking */

static lg_status check(const json_t *v, size_t depth, lg_error *err);

/* Can Python use the value as a key or in a set? */
static bool hashable(const json_t *v)
{
    const char *tag;
    const json_t *contents;
    if (json_is_array(v)) {
        return false;
    }
    if (!json_is_object(v)) {
        return true;
    }
    if (!tag_of(v, &tag, &contents)) {
        return false;
    }
    if (strcmp(tag, "$tuple") == 0) {
        for (size_t i = 0; i < json_array_size(contents); i++) {
            if (!hashable(json_array_get(contents, i))) {
                return false;
            }
        }
        return true;
    }
    static const char *const good[] = {"$int",     "$float", "$bytes", "$frozenset",
                                       "$complex", "$numpy", "$dtype", "$device"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        if (strcmp(tag, good[i]) == 0) {
            return true;
        }
    }
    return false;
}

static int compare_texts(const void *a, const void *b)
{
    const lg__buf *x = a, *y = b;
    if (x->len != y->len) {
        return x->len < y->len ? -1 : 1;
    }
    return memcmp(x->data, y->data, x->len);
}

/* Elements of a set, or first halves of pairs, may be there once, and must be
 * of a kind that can be one. */
static lg_status check_keys(const json_t *list, bool pairs, lg_error *err)
{
    size_t n = json_array_size(list);
    lg__buf *texts = lg__calloc(n, sizeof *texts);
    if (texts == NULL) {
        return lg__nomem(err);
    }
    lg_status status = LG_OK;
    size_t made = 0;
    for (; status == LG_OK && made < n; made++) {
        const json_t *v = json_array_get(list, made);
        v = pairs ? json_array_get(v, 0) : v;
        lg__buf_init(&texts[made], SIZE_MAX / 2);
        status = hashable(v) ? lg__buf_json(&texts[made], v, true, err)
                             : lg_error_set(err, LG_ERR_FORMAT, "element %zu is of a kind that cannot be a key", made);
    }
    if (status == LG_OK && n > 1) {
        qsort(texts, n, sizeof *texts, compare_texts);
        for (size_t i = 1; status == LG_OK && i < n; i++) {
            if (compare_texts(&texts[i - 1], &texts[i]) == 0) {
                char shown[SHOWN];
                status = lg_error_set(err, LG_ERR_FORMAT, "%s is there twice",
                                      lg__printable(texts[i].data, shown, sizeof shown));
            }
        }
    }
    for (size_t i = 0; i < made; i++) {
        lg__buf_free(&texts[i]);
    }
    lg__free(texts);
    return status;
}

static lg_status check_list(const json_t *list, size_t depth, lg_error *err)
{
    LG__RETURN_IF(!json_is_array(list), err, LG_ERR_FORMAT, "it holds no array");
    for (size_t i = 0; i < json_array_size(list); i++) {
        if (check(json_array_get(list, i), depth + 1, err) != LG_OK) {
            return lg_error_wrap(err, "[%zu]", i);
        }
    }
    return LG_OK;
}

static lg_status check_set(const json_t *list, size_t depth, lg_error *err)
{
    LG__TRY(check_list(list, depth, err));
    return check_keys(list, false, err);
}

static bool is_number(const json_t *v)
{
    return json_is_number(v) || tagged_text(v, "$int") != NULL || tagged_text(v, "$float") != NULL;
}

static lg_status check_pairs(const json_t *list, bool counts, size_t depth, lg_error *err)
{
    LG__RETURN_IF(!json_is_array(list), err, LG_ERR_FORMAT, "it holds no array of pairs");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *pair = json_array_get(list, i);
        LG__RETURN_IF(!json_is_array(pair) || json_array_size(pair) != 2, err, LG_ERR_FORMAT,
                      "element %zu is not a [key, value] pair", i);
        if (check_list(pair, depth + 1, err) != LG_OK) {
            return lg_error_wrap(err, "[%zu]", i);
        }
        LG__RETURN_IF(counts && !is_number(json_array_get(pair, 1)), err, LG_ERR_FORMAT,
                      "the count of element %zu is not a number", i);
    }
    return check_keys(list, true, err);
}

static lg_status check_defaultdict(const json_t *v, size_t depth, lg_error *err)
{
    static const char *const factories[] = {"int", "float", "list", "dict", "set", "str"};
    const json_t *factory = json_object_get(v, "factory");
    const json_t *items = json_object_get(v, "items");
    LG__RETURN_IF(json_object_size(v) != 2 || factory == NULL || items == NULL, err, LG_ERR_FORMAT,
                  "it needs \"factory\" and \"items\" and nothing else");
    bool good = json_is_null(factory);
    for (size_t i = 0; !good && json_is_string(factory) && i < sizeof factories / sizeof factories[0]; i++) {
        good = json_string_length(factory) == strlen(factories[i]) &&
               strcmp(json_string_value(factory), factories[i]) == 0;
    }
    LG__RETURN_IF(!good, err, LG_ERR_FORMAT, "its \"factory\" is none of int, float, list, dict, set, str and null");
    return check_pairs(items, false, depth + 1, err);
}

static lg_status check_deque(const json_t *v, size_t depth, lg_error *err)
{
    const json_t *maxlen = json_object_get(v, "maxlen");
    const json_t *items = json_object_get(v, "items");
    LG__RETURN_IF(json_object_size(v) != 2 || maxlen == NULL || items == NULL, err, LG_ERR_FORMAT,
                  "it needs \"maxlen\" and \"items\" and nothing else");
    LG__RETURN_IF(!json_is_null(maxlen) && (!json_is_integer(maxlen) || json_integer_value(maxlen) < 0 ||
                                            json_integer_value(maxlen) > LARGEST_PLAIN),
                  err, LG_ERR_FORMAT, "its \"maxlen\" is neither null nor a count");
    LG__TRY(check_list(items, depth + 1, err));
    LG__RETURN_IF(json_is_integer(maxlen) && json_array_size(items) > (size_t)json_integer_value(maxlen), err,
                  LG_ERR_FORMAT, "it has more items than its \"maxlen\"");
    return LG_OK;
}

static lg_status check_complex(const json_t *v, size_t depth, lg_error *err)
{
    LG__RETURN_IF(!json_is_array(v) || json_array_size(v) != 2, err, LG_ERR_FORMAT, "it holds no pair of numbers");
    for (size_t i = 0; i < 2; i++) {
        const json_t *part = json_array_get(v, i);
        LG__RETURN_IF(!json_is_real(part) && tagged_text(part, "$float") == NULL, err, LG_ERR_FORMAT,
                      "part %zu is not a floating-point number", i);
    }
    return check_list(v, depth, err);
}

static lg_status check_numpy(const json_t *v, lg_error *err)
{
    const json_t *dtype = json_object_get(v, "dtype"), *hex = json_object_get(v, "hex");
    LG__RETURN_IF(json_object_size(v) != 2 || !json_is_string(dtype) || !json_is_string(hex), err, LG_ERR_FORMAT,
                  "it needs \"dtype\" and \"hex\" and nothing else");
    char shown[SHOWN];
    size_t bytes = numpy_bytes(json_string_value(dtype));
    LG__RETURN_IF(bytes == 0 || strlen(json_string_value(dtype)) != json_string_length(dtype), err, LG_ERR_FORMAT,
                  "unknown dtype \"%s\"", lg__printable(json_string_value(dtype), shown, sizeof shown));
    uint8_t value[16];
    LG__RETURN_IF(json_string_length(hex) != 2 * bytes || !lg__unhex(json_string_value(hex), value, bytes), err,
                  LG_ERR_FORMAT, "\"hex\" is not %zu lower-case digits", 2 * bytes);
    LG__RETURN_IF(json_string_value(dtype)[1] == 'b' && value[0] > 1, err, LG_ERR_FORMAT,
                  "a boolean is neither 00 nor 01");
    return LG_OK;
}

static lg_status check_text(const json_t *v, const char *s, bool good, const char *wanted, lg_error *err)
{
    LG__RETURN_IF(!json_is_string(v), err, LG_ERR_FORMAT, "it holds no string");
    char shown[SHOWN];
    LG__RETURN_IF(!good || strlen(s) != json_string_length(v), err, LG_ERR_FORMAT, "\"%s\" is not %s",
                  lg__printable(s, shown, sizeof shown), wanted);
    return LG_OK;
}

static lg_status check_tensor(const char *s, lg_error *err)
{
    if (lg__name_check("tensor", s, strlen(s), err) != LG_OK) {
        err->status = LG_ERR_FORMAT; /* a bad name in a file is no caller's mistake */
        return LG_ERR_FORMAT;
    }
    return LG_OK;
}

static lg_status check_contents(const char *tag, const json_t *v, size_t depth, lg_error *err)
{
    const char *s = json_is_string(v) ? json_string_value(v) : "";
    size_t n = json_string_length(v);
    double ignored;
    if (strcmp(tag, "$int") == 0) {
        return check_text(v, s, is_big_int(s), "a decimal integer beyond 2^53", err);
    }
    if (strcmp(tag, "$float") == 0) {
        return check_text(v, s, read_float(s, &ignored), "inf, -inf, nan, -0.0 or the 16 hex digits of another NaN",
                          err);
    }
    if (strcmp(tag, "$bytes") == 0) {
        return check_text(v, s, is_base64(s, n), "canonical base64", err);
    }
    if (strcmp(tag, "$dtype") == 0) {
        return check_text(v, s, is_dtype(s), "a dtype such as torch.float32", err);
    }
    if (strcmp(tag, "$device") == 0) {
        return check_text(v, s, is_device(s), "a device such as cuda:0", err);
    }
    if (strcmp(tag, "$tensor") == 0) {
        LG__TRY(check_text(v, s, true, "a tensor's name", err));
        return check_tensor(s, err);
    }
    if (strcmp(tag, "$tuple") == 0) {
        return check_list(v, depth, err);
    }
    if (strcmp(tag, "$set") == 0 || strcmp(tag, "$frozenset") == 0) {
        return check_set(v, depth, err);
    }
    if (strcmp(tag, "$dict") == 0 || strcmp(tag, "$ordered") == 0) {
        return check_pairs(v, false, depth, err);
    }
    if (strcmp(tag, "$counter") == 0) {
        return check_pairs(v, true, depth, err);
    }
    if (strcmp(tag, "$defaultdict") == 0) {
        return check_defaultdict(v, depth, err);
    }
    if (strcmp(tag, "$deque") == 0) {
        return check_deque(v, depth, err);
    }
    if (strcmp(tag, "$complex") == 0) {
        return check_complex(v, depth, err);
    }
    if (strcmp(tag, "$numpy") == 0) {
        return check_numpy(v, err);
    }
    return lg_error_set(err, LG_ERR_FORMAT, "unknown tag");
}

static lg_status check_object(const json_t *object, size_t depth, lg_error *err)
{
    const char *key;
    const json_t *v;
    char shown[SHOWN];
    if (tag_of(object, &key, &v)) {
        if (check_contents(key, v, depth + 1, err) != LG_OK) {
            return lg_error_wrap(err, "%s", lg__printable(key, shown, sizeof shown));
        }
        return LG_OK;
    }
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        lg__printable(key, shown, sizeof shown);
        LG__RETURN_IF(key[0] == '$', err, LG_ERR_FORMAT,
                      "\"%s\": a key that begins with \"$\" needs the $dict form unless it is a tag alone", shown);
        if (check(value, depth + 1, err) != LG_OK) {
            return lg_error_wrap(err, "\"%s\"", shown);
        }
    }
    return LG_OK;
}

static lg_status check(const json_t *v, size_t depth, lg_error *err)
{
    LG__RETURN_IF(depth > LG__TAGGED_MAX_DEPTH && (json_is_array(v) || json_is_object(v)), err, LG_ERR_FORMAT,
                  "nested more than %d deep", LG__TAGGED_MAX_DEPTH);
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return check_object(v, depth, err);
    case JSON_ARRAY:
        return check_list(v, depth, err);
    case JSON_INTEGER:
        LG__RETURN_IF(json_integer_value(v) > LARGEST_PLAIN || json_integer_value(v) < -LARGEST_PLAIN, err,
                      LG_ERR_FORMAT, "the integer %" JSON_INTEGER_FORMAT " is beyond 2^53 and needs the $int form",
                      json_integer_value(v));
        return LG_OK;
    case JSON_REAL:
        LG__RETURN_IF(!isfinite(json_real_value(v)) || bits_of(json_real_value(v)) == UINT64_C(1) << 63, err,
                      LG_ERR_FORMAT, "the number %g needs the $float form", json_real_value(v));
        return LG_OK;
    case JSON_STRING:
    case JSON_TRUE:
    case JSON_FALSE:
    case JSON_NULL:
        return LG_OK;
    }
    return lg_error_set(err, LG_ERR_INTERNAL, "unknown kind of JSON value");
}

lg_status lg__tagged_check(const json_t *value, lg_error *err) { return check(value, 1, err); }

/* ---------------------------------------------------------------------- making */

static json_t *make_tag(const char *tag, json_t *contents)
{
    json_t *object = json_object();
    if (object == NULL || json_object_set_new(object, tag, contents) != 0) {
        /* set_new has taken the contents in either case. */
        if (object == NULL) {
            json_decref(contents);
        }
        json_decref(object);
        return NULL;
    }
    return object;
}

json_t *lg__tagged_u64(uint64_t v)
{
    if (v <= (uint64_t)LARGEST_PLAIN) {
        return json_integer((json_int_t)v);
    }
    char text[24];
    snprintf(text, sizeof text, "%" PRIu64, v);
    return make_tag("$int", json_string(text));
}

json_t *lg__tagged_i64(int64_t v)
{
    if (v <= LARGEST_PLAIN && v >= -LARGEST_PLAIN) {
        return json_integer(v);
    }
    char text[24];
    snprintf(text, sizeof text, "%" PRId64, v);
    return make_tag("$int", json_string(text));
}

json_t *lg__tagged_f64(double v)
{
    uint64_t bits = bits_of(v);
    if (isfinite(v) && bits != UINT64_C(1) << 63) {
        return json_real(v);
    }
    char text[24];
    if (isnan(v) && bits != DEFAULT_NAN) {
        snprintf(text, sizeof text, "0x%016" PRIx64, bits);
    } else {
        snprintf(text, sizeof text, "%s", isnan(v) ? "nan" : v > 0 ? "inf" : v < 0 ? "-inf" : "-0.0");
    }
    return make_tag("$float", json_string(text));
}

/* OpenSSL counts in int: larger data goes through in parts of whole groups. */
#define PART_GROUPS ((size_t)1 << 26)

json_t *lg__tagged_bytes(const void *data, size_t bytes)
{
    if (bytes > SIZE_MAX / 4) {
        return NULL;
    }
    size_t n = (bytes + 2) / 3 * 4;
    char *text = lg__malloc(n + 1);
    if (text == NULL) {
        return NULL;
    }
    text[0] = '\0';
    const unsigned char *from = data;
    for (size_t at = 0; bytes > 0;) {
        size_t part = bytes < PART_GROUPS * 3 ? bytes : PART_GROUPS * 3;
        at += (size_t)EVP_EncodeBlock((unsigned char *)text + at, from, (int)part);
        from += part;
        bytes -= part;
    }
    json_t *v = make_tag("$bytes", json_stringn_nocheck(text, n));
    lg__free(text);
    return v;
}

/* --------------------------------------------------------------------- reading */

lg_status lg__tagged_get_u64(const json_t *v, uint64_t *out, lg_error *err)
{
    if (json_is_integer(v)) {
        json_int_t i = json_integer_value(v);
        LG__RETURN_IF(i < 0, err, LG_ERR_MISMATCH, "the integer %" JSON_INTEGER_FORMAT " is negative", i);
        *out = (uint64_t)i;
        return LG_OK;
    }
    const char *s = tagged_text(v, "$int");
    LG__RETURN_IF(s == NULL || !is_big_int(s), err, LG_ERR_MISMATCH, "the value is not an integer");
    uint64_t number = 0;
    for (const char *p = s; *p != '\0'; p++) {
        LG__RETURN_IF(*p == '-' || __builtin_mul_overflow(number, (uint64_t)10, &number) ||
                          __builtin_add_overflow(number, (uint64_t)(*p - '0'), &number),
                      err, LG_ERR_MISMATCH, "the integer %.40s does not fit 64 bits without a sign", s);
    }
    *out = number;
    return LG_OK;
}

lg_status lg__tagged_get_i64(const json_t *v, int64_t *out, lg_error *err)
{
    if (json_is_integer(v)) {
        *out = json_integer_value(v);
        return LG_OK;
    }
    const char *s = tagged_text(v, "$int");
    LG__RETURN_IF(s == NULL || !is_big_int(s), err, LG_ERR_MISMATCH, "the value is not an integer");
    bool negative = *s == '-';
    int64_t number = 0;
    for (const char *p = s + negative; *p != '\0'; p++) {
        int64_t digit = *p - '0';
        LG__RETURN_IF(__builtin_mul_overflow(number, (int64_t)10, &number) ||
                          __builtin_add_overflow(number, negative ? -digit : digit, &number),
                      err, LG_ERR_MISMATCH, "the integer %.40s does not fit 64 bits", s);
    }
    *out = number;
    return LG_OK;
}

lg_status lg__tagged_get_f64(const json_t *v, double *out, lg_error *err)
{
    if (json_is_real(v)) {
        *out = json_real_value(v);
        return LG_OK;
    }
    const char *s = tagged_text(v, "$float");
    LG__RETURN_IF(s == NULL || !read_float(s, out), err, LG_ERR_MISMATCH, "the value is not a floating-point number");
    return LG_OK;
}

lg_status lg__tagged_get_bytes(const json_t *v, void **data, size_t *bytes, lg_error *err)
{
    const char *s = tagged_text(v, "$bytes");
    size_t n = s == NULL ? 0 : strlen(s);
    LG__RETURN_IF(s == NULL || !is_base64(s, n), err, LG_ERR_MISMATCH, "the value is not a byte string");
    size_t pad = n == 0 ? 0 : s[n - 1] != '=' ? 0 : s[n - 2] != '=' ? 1 : 2;
    unsigned char *to = lg__malloc(n / 4 * 3);
    if (to == NULL) {
        return lg__nomem(err);
    }
    for (size_t at = 0; at < n;) {
        size_t part = n - at < PART_GROUPS * 4 ? n - at : PART_GROUPS * 4;
        if (EVP_DecodeBlock(to + at / 4 * 3, (const unsigned char *)s + at, (int)part) < 0) {
            lg__free(to);
            return lg_error_set(err, LG_ERR_MISMATCH, "the value is not a byte string");
        }
        at += part;
    }
    *data = to;
    *bytes = n / 4 * 3 - pad;
    return LG_OK;
}
