/* SPDX-License-Identifier: Apache-2.0 */
#include "base/json_pieces.h"

#include "base/error.h"

#include <string.h>

#define SHOWN 200

/* ------------------------------------------------------------------- cutting */

static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

static void skip_space(lg__json_cursor *c)
{
    while (c->at < c->n && is_space(c->text[c->at])) {
        c->at++;
    }
}

static lg_status unexpected(const lg__json_cursor *c, const char *wanted, lg_error *err)
{
    if (c->at >= c->n) {
        return lg_error_set(err, LG_ERR_FORMAT, "invalid JSON in the %s: it ends at byte %zu where %s should come",
                            c->what, c->n, wanted);
    }
    unsigned char found = (unsigned char)c->text[c->at];
    if (found > 0x20 && found < 0x7F) {
        return lg_error_set(err, LG_ERR_FORMAT, "invalid JSON in the %s: '%c' at byte %zu where %s should come",
                            c->what, found, c->at, wanted);
    }
    return lg_error_set(err, LG_ERR_FORMAT, "invalid JSON in the %s: byte 0x%02x at byte %zu where %s should come",
                        c->what, found, c->at, wanted);
}

static bool next_is(const lg__json_cursor *c, char wanted) { return c->at < c->n && c->text[c->at] == wanted; }

/* Bytes that end a run of others: in strings, outside of them, and in strings
 * that are their own contents (printable ASCII). */
enum { IN_STRING = 1, OUTSIDE = 2, NOT_PLAIN = 4 };
static const unsigned char special[256] = {
    [0x00 ... 0x1F] = NOT_PLAIN,
    [0x7F ... 0xFF] = NOT_PLAIN,
    ['"'] = IN_STRING | OUTSIDE | NOT_PLAIN,
    ['\\'] = IN_STRING | NOT_PLAIN,
    ['{'] = OUTSIDE,
    ['}'] = OUTSIDE,
    ['['] = OUTSIDE,
    [']'] = OUTSIDE,
    [','] = OUTSIDE,
};

static size_t run_end(const char *text, size_t at, size_t n, int kind)
{
    while (at < n && (special[(unsigned char)text[at]] & kind) == 0) {
        at++;
    }
    return at;
}

/* Moves past a string, from its opening quote. */
static lg_status skip_string(lg__json_cursor *c, lg_error *err)
{
    size_t at = run_end(c->text, c->at + 1, c->n, IN_STRING);
    while (at < c->n && c->text[at] == '\\') {
        at = run_end(c->text, at + 2, c->n, IN_STRING);
    }
    if (at >= c->n) {
        c->at = c->n;
        return unexpected(c, "the end of a string", err);
    }
    c->at = at + 1;
    return LG_OK;
}

/* Moves past a value: up to a comma or closing bracket outside of it. */
lg_status lg__json_skip_value(lg__json_cursor *c, lg__json_piece *value, lg_error *err)
{
    size_t depth = 0;
    value->at = c->text + c->at;
    while ((c->at = run_end(c->text, c->at, c->n, OUTSIDE)) < c->n) {
        char now = c->text[c->at];
        if (now == '"') {
            LG__TRY(skip_string(c, err));
            continue;
        }
        if (depth == 0 && (now == ',' || now == '}' || now == ']')) {
            value->n = (size_t)(c->text + c->at - value->at);
            return LG_OK;
        }
        if (now == '{' || now == '[') {
            depth++;
        } else if (now == '}' || now == ']') {
            depth--;
        }
        c->at++;
    }
    return unexpected(c, "the end of a value", err);
}

/* Opens, closes and separates: *more is false once `close` was passed and only
 * spaces follow it. */
static lg_status next(lg__json_cursor *c, char open, char close, const char *opening, const char *others, bool *more,
                      lg_error *err)
{
    skip_space(c);
    const bool first = !c->begun;
    if (first) {
        if (!next_is(c, open)) {
            return unexpected(c, opening, err);
        }
        c->begun = true;
        c->at++;
        skip_space(c);
    }
    if (next_is(c, close)) {
        c->at++;
        *more = false;
        if (c->inside) {
            return LG_OK;
        }
        skip_space(c);
        LG__RETURN_IF(c->at < c->n, err, LG_ERR_FORMAT, "invalid JSON in the %s: bytes follow its end at byte %zu",
                      c->what, c->at);
        return LG_OK;
    }
    if (!first) {
        if (!next_is(c, ',')) {
            return unexpected(c, others, err);
        }
        c->at++;
        skip_space(c);
    }
    *more = true;
    return LG_OK;
}

lg_status lg__json_next_key(lg__json_cursor *c, lg__json_piece *key, bool *more, lg_error *err)
{
    LG__TRY(next(c, '{', '}', "an object, \"{\",", "\",\" or \"}\"", more, err));
    if (!*more) {
        return LG_OK;
    }
    if (!next_is(c, '"')) {
        return unexpected(c, "a key in quotes", err);
    }
    key->at = c->text + c->at;
    LG__TRY(skip_string(c, err));
    key->n = (size_t)(c->text + c->at - key->at);
    skip_space(c);
    if (!next_is(c, ':')) {
        return unexpected(c, "\":\"", err);
    }
    c->at++;
    return LG_OK;
}

lg_status lg__json_next_member(lg__json_cursor *c, lg__json_piece *key, lg__json_piece *value, bool *more,
                               lg_error *err)
{
    LG__TRY(lg__json_next_key(c, key, more, err));
    return *more ? lg__json_skip_value(c, value, err) : LG_OK;
}

lg_status lg__json_next_element(lg__json_cursor *c, bool *more, lg_error *err)
{
    LG__TRY(next(c, '[', ']', "an array, \"[\",", "\",\" or \"]\"", more, err));
    /* An empty element is no JSON, and nothing would parse it. */
    if (*more && (c->at == c->n || c->text[c->at] == ',' || c->text[c->at] == ']')) {
        return unexpected(c, "a value", err);
    }
    return LG_OK;
}

lg_status lg__json_count_elements(const char *what, lg__json_piece text, size_t *out, lg_error *err)
{
    lg__json_cursor c = lg__json_cursor_over(what, text);
    size_t n = 0;
    for (;; n++) {
        lg__json_piece value;
        bool more = false;
        LG__TRY(lg__json_next_element(&c, &more, err));
        if (!more) {
            *out = n;
            return LG_OK;
        }
        LG__TRY(lg__json_skip_value(&c, &value, err));
    }
}

lg__json_piece lg__json_trimmed(lg__json_piece s)
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

bool lg__json_piece_is(lg__json_piece s, const char *text)
{
    return s.n == strlen(text) && memcmp(s.at, text, s.n) == 0;
}

/* ---------------------------------------------------------------- plain text */

bool lg__json_take_string(const char **p, const char *end, lg__json_piece *out)
{
    const char *s = *p;
    if (s == end || *s != '"') {
        return false;
    }
    const char *first = ++s;
    s += run_end(s, 0, (size_t)(end - s), NOT_PLAIN);
    if (s == end || *s != '"') {
        return false;
    }
    *out = (lg__json_piece){first, (size_t)(s - first)};
    *p = s + 1;
    return true;
}

bool lg__json_plain_string(lg__json_piece s, lg__json_piece *out)
{
    const char *p = s.at;
    return lg__json_take_string(&p, s.at + s.n, out) && p == s.at + s.n;
}

bool lg__json_take_number(const char **p, const char *end, uint64_t *out)
{
    const char *s = *p;
    uint64_t v = 0;
    for (; s < end && *s >= '0' && *s <= '9'; s++) {
        if (s - *p == 18) {
            return false;
        }
        v = v * 10 + (uint64_t)(*s - '0');
    }
    /* What a number goes on with is for the library to judge. */
    if (s == *p || (**p == '0' && s - *p > 1) || (s < end && (*s == '.' || *s == 'e' || *s == 'E'))) {
        return false;
    }
    *p = s;
    *out = v;
    return true;
}

bool lg__json_take_numbers(const char **p, const char *end, uint64_t *out, size_t max, size_t *n)
{
    const char *s = *p;
    size_t count = 0;
    if (!LG__JSON_TAKE(&s, end, "[")) {
        return false;
    }
    if (!LG__JSON_TAKE(&s, end, "]")) {
        do {
            if (count == max || !lg__json_take_number(&s, end, &out[count++])) {
                return false;
            }
        } while (LG__JSON_TAKE(&s, end, ","));
        if (!LG__JSON_TAKE(&s, end, "]")) {
            return false;
        }
    }
    *p = s;
    *n = count;
    return true;
}

bool lg__json_plain_numbers(lg__json_piece s, uint64_t *out, size_t max, size_t *n)
{
    const char *p = s.at;
    return lg__json_take_numbers(&p, s.at + s.n, out, max, n) && p == s.at + s.n;
}

/* ------------------------------------------------------------------- strings */

/* Copies a string that is plain but for escaped quotes and backslashes, as JSON
 * inside a JSON string is. *fits is false, and nothing is copied, for others. */
static lg_status copy_escaped(lg__arena *arena, lg__json_piece s, lg__json_piece *out, bool *fits, lg_error *err)
{
    *fits = false;
    if (s.n < 2 || s.at[s.n - 1] != '"') {
        return LG_OK;
    }
    char *copy = lg__arena_alloc(arena, s.n);
    if (copy == NULL) {
        return lg__nomem(err);
    }
    size_t n = 0, at = 1;
    const size_t end = s.n - 1;
    for (;;) {
        size_t stop = run_end(s.at, at, end, NOT_PLAIN);
        memcpy(copy + n, s.at + at, stop - at);
        n += stop - at;
        if (stop == end) {
            break;
        }
        if (s.at[stop] != '\\' || stop + 1 == end || (s.at[stop + 1] != '"' && s.at[stop + 1] != '\\')) {
            return LG_OK;
        }
        copy[n++] = s.at[stop + 1];
        at = stop + 2;
    }
    copy[n] = '\0';
    *out = (lg__json_piece){copy, n};
    *fits = true;
    return LG_OK;
}

static lg_status copy_string(lg__arena *arena, const char *s, size_t n, lg__json_piece *out, lg_error *err)
{
    const char *copy = lg__arena_strndup(arena, s, n);
    if (copy == NULL) {
        return lg__nomem(err);
    }
    *out = (lg__json_piece){copy, n};
    return LG_OK;
}

lg_status lg__json_read_string(lg__arena *arena, lg__json_piece text, const char *what, bool no_nul,
                               lg__json_piece *out, lg_error *err)
{
    text = lg__json_trimmed(text);
    lg__json_piece found;
    if (lg__json_plain_string(text, &found)) {
        return copy_string(arena, found.at, found.n, out, err);
    }
    LG__RETURN_IF(text.n == 0 || text.at[0] != '"', err, LG_ERR_FORMAT, "%s is not a string", what);
    bool fits = false;
    LG__TRY(copy_escaped(arena, text, out, &fits, err));
    if (fits) {
        return LG_OK;
    }
    json_t *json = NULL;
    if (lg__json_parse(text.at, text.n, &json, err) != LG_OK) {
        return lg_error_wrap(err, "%s", what);
    }
    found = (lg__json_piece){json_string_value(json), json_string_length(json)};
    lg_status status;
    if (no_nul && memchr(found.at, '\0', found.n) != NULL) {
        char shown[SHOWN];
        status = lg_error_set(err, LG_ERR_FORMAT, "%s has a NUL byte in it, after \"%s\"", what,
                              lg__printable(found.at, shown, sizeof shown));
    } else {
        status = copy_string(arena, found.at, found.n, out, err);
    }
    json_decref(json);
    return status;
}

/* ------------------------------------------------------------------- objects */

/* Adds the member `key`, once. `value` is taken over. */
static lg_status add_member(json_t *object, lg__json_piece key, json_t *value, lg_error *err)
{
    char shown[SHOWN];
    if (json_object_get(object, key.at) != NULL) {
        json_decref(value);
        return lg_error_set(err, LG_ERR_FORMAT, "invalid JSON: duplicate object key \"%s\"",
                            lg__printable(key.at, shown, sizeof shown));
    }
    return json_object_set_new_nocheck(object, key.at, value) == 0 ? LG_OK : lg__nomem(err);
}

lg_status lg__json_parse_but(lg__json_piece text, size_t depth, const char *apart, json_t **out, lg__json_piece *piece,
                             lg_error *err)
{
    lg__arena *arena = lg__arena_new(); /* for keys */
    json_t *object = json_object();
    lg_status status = arena == NULL || object == NULL ? lg__nomem(err) : LG_OK;
    lg__json_cursor c = lg__json_cursor_over("text", text);
    lg__json_piece found = {NULL, 0};
    bool more = status == LG_OK;
    while (more) {
        lg__json_piece key_text = {NULL, 0}, key = {NULL, 0}, value = {NULL, 0};
        status = lg__json_next_member(&c, &key_text, &value, &more, err);
        if (status != LG_OK || !more) {
            break;
        }
        status = lg__json_read_string(arena, key_text, "a key", true, &key, err);
        json_t *parsed = NULL;
        bool is_apart = status == LG_OK && lg__json_piece_is(key, apart);
        if (is_apart) {
            /* A stand-in, so that a second one is found. */
            found = value;
            parsed = json_null();
        } else if (status == LG_OK) {
            status = lg__json_parse_piece(value.at, value.n, (size_t)(value.at - text.at), depth + 1, &parsed, err);
        }
        if (status == LG_OK) {
            status = add_member(object, key, parsed, err);
        }
        more = status == LG_OK;
    }
    lg__arena_free(arena);
    if (status != LG_OK) {
        json_decref(object);
        return status;
    }
    json_object_del(object, apart);
    *out = object;
    *piece = found;
    return LG_OK;
}
