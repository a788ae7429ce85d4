/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_BASE_JSON_H
#define LG_BASE_JSON_H

/* Strict reading of JSON (by jansson) and writing of its pieces. Members that
 * are not known are ignored; duplicates, trailing bytes, invalid UTF-8 and deep
 * nesting are errors. Integers beyond 2^53 are written as decimal strings,
 * since jq and JavaScript round them, and read in both forms. */

#include "base/buf.h"

#include <jansson.h>
#include <lastgood/lastgood.h>

#define LG__JSON_MAX_DEPTH 64

/* Parses `bytes` bytes of one JSON value; json_decref(*out) it. */
lg_status lg__json_parse(const char *text, size_t bytes, json_t **out, lg_error *err);

/* The same for a value inside of a longer text: `at` bytes of it are before the
 * value, `depth` objects and arrays around it. */
lg_status lg__json_parse_piece(const char *text, size_t bytes, size_t at, size_t depth, json_t **out, lg_error *err);

/* "an object", "an integer", …: of a value's type in messages. */
const char *lg__json_type_name(json_type type);

/* Is it of that type? JSON_TRUE and JSON_FALSE: a boolean. */
bool lg__json_is(const json_t *value, json_type type);

/* The member `key` of an object. LG_ERR_FORMAT if it is not there or not of
 * `type`; lg__json_optional gives NULL instead where it is absent or null. The
 * reference is borrowed. */
lg_status lg__json_get(const json_t *object, const char *key, json_type type, const json_t **out, lg_error *err);
lg_status lg__json_optional(const json_t *object, const char *key, json_type type, const json_t **out, lg_error *err);

/* A non-negative integer, as number or decimal string; `what` names it. */
lg_status lg__json_u64(const json_t *value, const char *what, uint64_t *out, lg_error *err);
lg_status lg__json_get_u64(const json_t *object, const char *key, uint64_t *out, lg_error *err);
/* A string without NUL in it, at most `max` bytes; borrowed. */
lg_status lg__json_get_str(const json_t *object, const char *key, size_t max, const char **out, lg_error *err);

/* Appends. Strings are escaped; integers become strings beyond 2^53. */
void lg__buf_json_str(lg__buf *b, const char *s, size_t bytes);
void lg__buf_json_u64(lg__buf *b, uint64_t v);
/* A whole value, compact, keys in their order (or sorted). */
lg_status lg__buf_json(lg__buf *b, const json_t *value, bool sorted, lg_error *err);

/* ---- names: tensors, keys, attached files */

bool lg__utf8_valid(const char *s, size_t bytes);
/* A tensor's or key's name: UTF-8, 1 to LG_MAX_NAME bytes, no control bytes
 * (below 0x20, 0x7f), not "__metadata__". LG_ERR_INVALID; `what` is "tensor",
 * "key", …. */
lg_status lg__name_check(const char *what, const char *name, size_t bytes, lg_error *err);
/* A relative path of a store: parts of 1 to 255 bytes without '/', NUL, ".",
 * "..", at most two of them. The one check that every open goes through. */
bool lg__path_valid(const char *path);

#endif
