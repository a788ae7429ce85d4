/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_FORMAT_TAGGED_H
#define LG_FORMAT_TAGGED_H

/* Tagged JSON: structured values that keep what plain JSON loses. An object
 * whose only key begins with "$" is a tag; docs/format-shards.md lists them all. */

#include <jansson.h>
#include <lastgood/lastgood.h>

/* Arrays and objects of one value, tags included, may nest this deep: less than
 * JSON text in general, so that the manifest around them stays readable. */
#define LG__TAGGED_MAX_DEPTH 56

/* Checks that a value is tagged JSON by the rules: known tags, well-formed
 * contents, no plain object with a key that begins with "$", no NaN or
 * infinity as a number, integers beyond 2^53 as {"$int": "decimal"}. */
lg_status lg__tagged_check(const json_t *value, lg_error *err);

/* Values; json_decref them. NULL when memory is out. */
json_t *lg__tagged_u64(uint64_t v);
json_t *lg__tagged_i64(int64_t v);
json_t *lg__tagged_f64(double v);                         /* all bits kept: -0.0, inf, nan with payload */
json_t *lg__tagged_bytes(const void *data, size_t bytes); /* {"$bytes": base64} */

/* LG_ERR_MISMATCH if the value is of another kind or does not fit. */
lg_status lg__tagged_get_u64(const json_t *v, uint64_t *out, lg_error *err);
lg_status lg__tagged_get_i64(const json_t *v, int64_t *out, lg_error *err);
lg_status lg__tagged_get_f64(const json_t *v, double *out, lg_error *err);
/* *data is lg__malloc'ed. */
lg_status lg__tagged_get_bytes(const json_t *v, void **data, size_t *bytes, lg_error *err);

#endif
