/* SPDX-License-Identifier: Apache-2.0 */
#include "base/json.h"

#include "base/error.h"
#include "base/mem.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------- memory that runs out
 *
 * jansson's reader ignores that its buffer for a token could not grow: a string
 * or number then lacks a byte, or an assertion ends the program. So its
 * allocator notes every failure, and what was read with one does not count. And
 * so that the reader comes to its end in order, the first request that fails is
 * met from a reserve as large as any token needs, and the text ends there: it
 * is handed over byte by byte.
 *
 * The hooks are set when the library is loaded, and hand on to those that were
 * set before. */

static json_malloc_t next_malloc;
static json_free_t next_free;

static _Thread_local struct {
    bool refused; /* a request failed since this was cleared */
    void *block;  /* the reserve while a text is read */
    size_t left;  /* its size until it is taken, then 0 */
} memory;

static void *noting_malloc(size_t bytes)
{
    void *p = lg__mem_must_fail() ? NULL : next_malloc(bytes);
    if (p == NULL) {
        memory.refused = true;
        if (bytes <= memory.left) {
            memory.left = 0;
            return memory.block;
        }
    }
    return p;
}

static void noting_free(void *p)
{
    if (p == NULL || p != memory.block) {
        next_free(p);
    }
}

__attribute__((constructor)) static void hook_jansson(void)
{
    json_get_alloc_funcs(&next_malloc, &next_free);
    json_set_alloc_funcs(noting_malloc, noting_free);
}

/* Whoever unloads the library goes on with jansson as it was. */
__attribute__((destructor)) static void unhook_jansson(void)
{
    json_malloc_t now;
    json_get_alloc_funcs(&now, NULL);
    if (now == noting_malloc) {
        json_set_alloc_funcs(next_malloc, next_free);
    }
}

typedef struct source {
    const char *text;
    size_t bytes, at;
} source;

static size_t next_byte(void *to, size_t room, void *arg)
{
    source *s = arg;
    (void)room;
    if (memory.refused || s->at == s->bytes) {
        return 0;
    }
    *(char *)to = s->text[s->at++];
    return 1;
}

/* The reader's buffer doubles until a token fits. */
#define RESERVE_SMALL 1024

static json_t *load(const char *text, size_t bytes, size_t longest, json_error_t *why)
{
    _Alignas(16) char small[RESERVE_SMALL];
    const size_t need = 2 * longest + 64;
    void *reserve = need <= sizeof small ? small : lg__malloc(need);
    if (reserve == NULL) {
        memory.refused = true;
        return NULL;
    }
    memory.refused = false;
    memory.block = reserve;
    memory.left = need;
    source s = {text, bytes, 0};
    json_t *value = json_load_callback(next_byte, &s, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, why);
    if (memory.refused) {
        json_decref(value); /* while the reserve is there, of which it may be made */
        value = NULL;
    }
    memory.block = NULL;
    memory.left = 0;
    if (reserve != small) {
        lg__free(reserve);
    }
    return value;
}

/* ------------------------------------------------------------------- reading */

/* jansson's own depth limit is far above ours; count before it recurses.
 * *longest is the length of the longest token. */
static bool too_deep(const char *text, size_t bytes, size_t depth, size_t *longest)
{
    bool in_string = false;
    size_t most = 0, begin = 0; /* of the string, or of what is between others */
    for (size_t i = 0; i < bytes; i++) {
        char c = text[i];
        if (in_string) {
            if (c == '\\') {
                i++;
                continue;
            }
            if (c != '"') {
                continue;
            }
            in_string = false;
            most = i + 1 - begin > most ? i + 1 - begin : most;
            begin = i + 1;
            continue;
        }
        switch (c) {
        case '"':
            in_string = true;
            break;
        case '{':
        case '[':
            if (++depth > LG__JSON_MAX_DEPTH) {
                return true;
            }
            break;
        case '}':
        case ']':
            depth -= depth > 0;
            break;
        case ',':
        case ':':
            break;
        default:
            continue;
        }
        most = i - begin > most ? i - begin : most;
        begin = in_string ? i : i + 1;
    }
    *longest = bytes - begin > most ? bytes - begin : most;
    return false;
}

lg_status lg__json_parse_piece(const char *text, size_t bytes, size_t at, size_t depth, json_t **out, lg_error *err)
{
    size_t longest = 0;
    LG__RETURN_IF(too_deep(text, bytes, depth, &longest), err, LG_ERR_FORMAT, "invalid JSON: nested more than %d deep",
                  LG__JSON_MAX_DEPTH);
    /* jansson drops a NUL behind a number or word; no JSON text has one. */
    const char *nul = bytes > 0 ? memchr(text, '\0', bytes) : NULL;
    LG__RETURN_IF(nul != NULL, err, LG_ERR_FORMAT, "invalid JSON at byte %zu: a NUL", at + (size_t)(nul - text));
    json_error_t why = {.text = ""};
    json_t *value = load(text, bytes, longest, &why);
    if (value == NULL) {
        if (memory.refused || why.text[0] == '\0' || json_error_code(&why) == json_error_out_of_memory) {
            return lg__nomem(err);
        }
        char shown[2 * sizeof why.text];
        return lg_error_set(err, LG_ERR_FORMAT, "invalid JSON at byte %zu: %s",
                            at + (why.position > 0 ? (size_t)why.position : 0),
                            lg__printable(why.text, shown, sizeof shown));
    }
    *out = value;
    return LG_OK;
}

lg_status lg__json_parse(const char *text, size_t bytes, json_t **out, lg_error *err)
{
    return lg__json_parse_piece(text, bytes, 0, 0, out, err);
}

const char *lg__json_type_name(json_type type)
{
    switch (type) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    case JSON_NULL:
        return "null";
    }
    return "?";
}

bool lg__json_is(const json_t *value, json_type type)
{
    if (type == JSON_TRUE || type == JSON_FALSE) {
        return json_is_boolean(value);
    }
    return json_typeof(value) == type;
}

lg_status lg__json_optional(const json_t *object, const char *key, json_type type, const json_t **out, lg_error *err)
{
    const json_t *value = json_object_get(object, key);
    if (value == NULL || json_is_null(value)) {
        *out = NULL;
        return LG_OK;
    }
    LG__RETURN_IF(!lg__json_is(value, type), err, LG_ERR_FORMAT, "\"%s\" is not %s", key, lg__json_type_name(type));
    *out = value;
    return LG_OK;
}

lg_status lg__json_get(const json_t *object, const char *key, json_type type, const json_t **out, lg_error *err)
{
    const json_t *value = NULL;
    LG__TRY(lg__json_optional(object, key, type, &value, err));
    LG__RETURN_IF(value == NULL, err, LG_ERR_FORMAT, "\"%s\" is missing", key);
    *out = value;
    return LG_OK;
}

lg_status lg__json_u64(const json_t *value, const char *what, uint64_t *out, lg_error *err)
{
    if (json_is_integer(value)) {
        json_int_t v = json_integer_value(value);
        LG__RETURN_IF(v < 0, err, LG_ERR_FORMAT, "\"%s\" is negative", what);
        *out = (uint64_t)v;
        return LG_OK;
    }
    if (json_is_string(value)) {
        const char *s = json_string_value(value);
        size_t n = json_string_length(value);
        uint64_t v = 0;
        bool good = n > 0 && n <= 20 && (n == 1 || s[0] != '0');
        for (size_t i = 0; good && i < n; i++) {
            unsigned d = (unsigned)(s[i] - '0');
            good = d <= 9 && (v < UINT64_MAX / 10 || (v == UINT64_MAX / 10 && d <= UINT64_MAX % 10));
            v = v * 10 + d;
        }
        if (good) {
            *out = v;
            return LG_OK;
        }
    }
    return lg_error_set(err, LG_ERR_FORMAT, "\"%s\" is no non-negative integer", what);
}

lg_status lg__json_get_u64(const json_t *object, const char *key, uint64_t *out, lg_error *err)
{
    const json_t *value = json_object_get(object, key);
    LG__RETURN_IF(value == NULL, err, LG_ERR_FORMAT, "\"%s\" is missing", key);
    return lg__json_u64(value, key, out, err);
}

lg_status lg__json_get_str(const json_t *object, const char *key, size_t max, const char **out, lg_error *err)
{
    const json_t *value = NULL;
    LG__TRY(lg__json_get(object, key, JSON_STRING, &value, err));
    const char *s = json_string_value(value);
    size_t n = json_string_length(value);
    LG__RETURN_IF(strlen(s) != n, err, LG_ERR_FORMAT, "\"%s\" has a NUL in it", key);
    LG__RETURN_IF(n > max, err, LG_ERR_LIMIT, "\"%s\" is longer than %zu bytes", key, max);
    *out = s;
    return LG_OK;
}

void lg__buf_json_str(lg__buf *b, const char *s, size_t bytes)
{
    lg__buf_add(b, "\"", 1);
    size_t from = 0;
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\') {
            continue;
        }
        lg__buf_add(b, s + from, i - from);
        from = i + 1;
        switch (c) {
        case '"':
            lg__buf_str(b, "\\\"");
            break;
        case '\\':
            lg__buf_str(b, "\\\\");
            break;
        case '\b':
            lg__buf_str(b, "\\b");
            break;
        case '\t':
            lg__buf_str(b, "\\t");
            break;
        case '\n':
            lg__buf_str(b, "\\n");
            break;
        case '\f':
            lg__buf_str(b, "\\f");
            break;
        case '\r':
            lg__buf_str(b, "\\r");
            break;
        default:
            lg__buf_fmt(b, "\\u%04x", c);
        }
    }
    lg__buf_add(b, s + from, bytes - from);
    lg__buf_add(b, "\"", 1);
}

void lg__buf_json_u64(lg__buf *b, uint64_t v)
{
    if (v <= UINT64_C(1) << 53) {
        lg__buf_u64(b, v);
        return;
    }
    lg__buf_add(b, "\"", 1);
    lg__buf_u64(b, v);
    lg__buf_add(b, "\"", 1);
}

static int dump(const char *data, size_t bytes, void *arg)
{
    lg__buf *b = arg;
    lg__buf_add(b, data, bytes);
    return b->failed ? -1 : 0;
}

lg_status lg__buf_json(lg__buf *b, const json_t *value, bool sorted, lg_error *err)
{
    size_t flags = JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(17) | (sorted ? JSON_SORT_KEYS : 0);
    memory.refused = false;
    if (json_dump_callback(value, dump, b, flags) != 0 || memory.refused) {
        LG__TRY(lg__buf_check(b, "JSON text", err));
        return lg__nomem(err);
    }
    return LG_OK;
}

bool lg__utf8_valid(const char *s, size_t bytes)
{
    const unsigned char *p = (const unsigned char *)s;
    size_t i = 0;
    while (i < bytes) {
        unsigned char c = p[i];
        size_t n;
        uint32_t min, code;
        if (c < 0x80) {
            i++;
            continue;
        }
        if ((c & 0xE0) == 0xC0) {
            n = 1, min = 0x80, code = c & 0x1F;
        } else if ((c & 0xF0) == 0xE0) {
            n = 2, min = 0x800, code = c & 0x0F;
        } else if ((c & 0xF8) == 0xF0) {
            n = 3, min = 0x10000, code = c & 0x07;
        } else {
            return false;
        }
        if (bytes - i <= n) {
            return false;
        }
        for (size_t k = 1; k <= n; k++) {
            if ((p[i + k] & 0xC0) != 0x80) {
                return false;
            }
            code = code << 6 | (p[i + k] & 0x3F);
        }
        if (code < min || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) {
            return false;
        }
        i += n + 1;
    }
    return true;
}

lg_status lg__name_check(const char *what, const char *name, size_t bytes, lg_error *err)
{
    size_t plain = 0; /* printable ASCII, as most are from end to end */
    while (plain < bytes && name[plain] >= 0x20 && name[plain] < 0x7F) {
        plain++;
    }
    if (plain == bytes && bytes > 0 && bytes <= LG_MAX_NAME && name[0] != '_') {
        return LG_OK;
    }
    LG__RETURN_IF(bytes == 0, err, LG_ERR_INVALID, "a %s needs a name that is not empty", what);
    LG__RETURN_IF(!lg__utf8_valid(name, bytes), err, LG_ERR_INVALID, "a %s name is no valid UTF-8", what);
    if (bytes > LG_MAX_NAME) {
        char copy[101], shown[80];
        memcpy(copy, name, 100);
        copy[100] = '\0';
        return lg_error_set(err, LG_ERR_LIMIT, "%s name \"%s\" has %zu bytes; %d are allowed", what,
                            lg__printable(copy, shown, sizeof shown), bytes, LG_MAX_NAME);
    }
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)name[i];
        if (c < 0x20 || c == 0x7F) {
            char copy[LG_MAX_NAME + 1], shown[256];
            memcpy(copy, name, bytes);
            copy[bytes] = '\0';
            return lg_error_set(err, LG_ERR_INVALID, "%s name \"%s\" has the control byte 0x%02x in it", what,
                                lg__printable(copy, shown, sizeof shown), c);
        }
    }
    LG__RETURN_IF(bytes == 12 && memcmp(name, "__metadata__", 12) == 0, err, LG_ERR_INVALID,
                  "a %s cannot be called \"__metadata__\": safetensors keeps that name", what);
    return LG_OK;
}

bool lg__path_valid(const char *path)
{
    int parts = 0;
    for (const char *p = path;; p++) {
        size_t n = strcspn(p, "/");
        if (n == 0 || n > 255 || ++parts > 2 || (n == 1 && p[0] == '.') || (n == 2 && p[0] == '.' && p[1] == '.')) {
            return false;
        }
        p += n;
        if (*p == '\0') {
            return true;
        }
    }
}
