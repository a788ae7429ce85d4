/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_BASE_JSON_PIECES_H
#define LG_BASE_JSON_PIECES_H

/* Long JSON texts, cut into the members of their objects and the elements of
 * their arrays. A header or manifest has perhaps a million of them: handed to a
 * JSON library at once it takes some ten times its size (hostile text such as
 * "[[],[],…" seventy times) and most of the time of a load.
 *
 * Pieces are told apart by quotes and brackets alone. Each is then read by
 * itself: by a function below if it is in the plain form that all writers we
 * know use, else strictly by lg__json_parse. A piece cut wrongly is no valid
 * JSON, so nothing passes that the library would refuse. */

#include "base/json.h"
#include "base/mem.h"

#include <string.h>

typedef struct lg__json_piece {
    const char *at;
    size_t n;
} lg__json_piece;

typedef struct lg__json_cursor {
    const char *what; /* for messages: what the text is */
    const char *text;
    size_t n, at;
    bool begun;
    bool inside; /* more text follows the end of the object or array */
} lg__json_cursor;

static inline lg__json_cursor lg__json_cursor_over(const char *what, lg__json_piece text)
{
    return (lg__json_cursor){.what = what, .text = text.at, .n = text.n};
}

/* The next member of an object: *key with its quotes, *value with what is
 * around it; *more is false once the object has ended and only spaces follow
 * it. LG_ERR_FORMAT names the byte. */
lg_status lg__json_next_member(lg__json_cursor *c, lg__json_piece *key, lg__json_piece *value, bool *more,
                               lg_error *err);
/* The same in two steps, so that the caller may try to read the value where
 * the cursor stands: after the key it is at c->text + c->at. */
lg_status lg__json_next_key(lg__json_cursor *c, lg__json_piece *key, bool *more, lg_error *err);
lg_status lg__json_skip_value(lg__json_cursor *c, lg__json_piece *value, lg_error *err);

/* An array: is there another element? The cursor is then before it, for
 * lg__json_skip_value or a reader of the caller's. */
lg_status lg__json_next_element(lg__json_cursor *c, bool *more, lg_error *err);
/* How many elements an array has. */
lg_status lg__json_count_elements(const char *what, lg__json_piece text, size_t *out, lg_error *err);

lg__json_piece lg__json_trimmed(lg__json_piece s);
bool lg__json_piece_is(lg__json_piece s, const char *text);

/* A string of printable ASCII without escapes, as nearly all are, is its own
 * contents; `s` is the text with its quotes. */
bool lg__json_plain_string(lg__json_piece s, lg__json_piece *out);
/* Any string, its contents copied into the arena; `what` is "a key", …. With
 * no_nul a NUL in it is an error. */
lg_status lg__json_read_string(lg__arena *arena, lg__json_piece text, const char *what, bool no_nul,
                               lg__json_piece *out, lg_error *err);
/* An array of at most `max` plain decimal integers below 10^18. false leaves
 * the text, whatever is odd about it, to the JSON library. */
bool lg__json_plain_numbers(lg__json_piece s, uint64_t *out, size_t max, size_t *n);

/* Readers of plain text: each moves *p, up to `end`, past what it accepts, and
 * says false at anything else. */
static inline bool lg__json_take(const char **p, const char *end, const char *text, size_t n)
{
    if ((size_t)(end - *p) < n || memcmp(*p, text, n) != 0) {
        return false;
    }
    *p += n;
    return true;
}
#define LG__JSON_TAKE(p, end, literal) lg__json_take(p, end, "" literal, sizeof(literal) - 1)
bool lg__json_take_string(const char **p, const char *end, lg__json_piece *out); /* as lg__json_plain_string */
bool lg__json_take_number(const char **p, const char *end, uint64_t *out);
bool lg__json_take_numbers(const char **p, const char *end, uint64_t *out, size_t max, size_t *n);

/* An object whose member `apart` stays text, since it may be long; *piece is
 * {NULL, 0} where it is absent. All other members are parsed, and the rules are
 * those of lg__json_parse_piece, with `depth` objects and arrays around it.
 * json_decref(*out). */
lg_status lg__json_parse_but(lg__json_piece text, size_t depth, const char *apart, json_t **out, lg__json_piece *piece,
                             lg_error *err);

#endif
