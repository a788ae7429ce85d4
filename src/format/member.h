/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_FORMAT_MEMBER_H
#define LG_FORMAT_MEMBER_H

/* JSON members that manifest, report and records have in common: read with
 * every check, written in one way. Errors begin with the member's path in the
 * file, as in `tensors[12].shape[1]: …`, and are LG_ERR_FORMAT. */

#include "base/buf.h"
#include "base/hash.h"
#include "base/json_pieces.h"
#include "base/mem.h"
#include "format/region.h"

#include <jansson.h>

/* A place in a file, as a list from the inside out; it lives on the stack and
 * costs nothing until an error is written. NULL is the top. */
typedef struct lg__at {
    const struct lg__at *outer;
    const char *name;
    size_t index; /* in the array `name`, or LG__AT_MEMBER */
} lg__at;

#define LG__AT_MEMBER SIZE_MAX

/* "tensors[12].shape: <message>"; `key` may be NULL. Returns the status. */
lg_status lg__at_error(const lg__at *at, const char *key, lg_error *err, lg_status status, const char *format, ...)
    LG_PRINTF(5, 6);
/* Puts the path before a message that another check wrote. What such checks
 * call invalid, too large or different is a malformed file here: all but
 * NOMEM, CORRUPT, VERSION, COVERAGE and INTERNAL become LG_ERR_FORMAT. */
lg_status lg__at_wrap(const lg__at *at, const char *key, lg_error *err);

/* `at` is the place of `object`. Outputs are borrowed from the JSON. */
lg_status lg__member_get(const json_t *object, const lg__at *at, const char *key, json_type type, const json_t **out,
                         lg_error *err);
/* NULL when it is absent; null is an error, since we never write it so. */
lg_status lg__member_optional(const json_t *object, const lg__at *at, const char *key, json_type type,
                              const json_t **out, lg_error *err);
lg_status lg__member_u64(const json_t *object, const lg__at *at, const char *key, uint64_t max, uint64_t *out,
                         lg_error *err);
lg_status lg__member_u32(const json_t *object, const lg__at *at, const char *key, uint32_t max, uint32_t *out,
                         lg_error *err);
lg_status lg__member_bool(const json_t *object, const lg__at *at, const char *key, bool *out, lg_error *err);
/* UTF-8 of at most `max` bytes without control bytes. */
lg_status lg__member_text(const json_t *object, const lg__at *at, const char *key, size_t max, const char **out,
                          lg_error *err);
/* A tensor's name, by lg__name_check. */
lg_status lg__member_name(const json_t *object, const lg__at *at, const char *key, const char **out, lg_error *err);
/* Exactly `digits` lower-case hex digits; `out` has room for a NUL. */
lg_status lg__member_hex(const json_t *object, const lg__at *at, const char *key, size_t digits, char *out,
                         lg_error *err);
lg_status lg__member_digest(const json_t *object, const lg__at *at, const char *key, uint8_t out[LG__SHA256_BYTES],
                            lg_error *err);
lg_status lg__member_generation(const json_t *object, const lg__at *at, const char *key, lg_generation *out,
                                lg_error *err);
lg_status lg__member_created(const json_t *object, const lg__at *at, const char *key, char out[LG_CREATED_TEXT],
                             lg_error *err);
/* An array of exactly `n` non-negative integers below 2^63. */
lg_status lg__member_extent(const json_t *object, const lg__at *at, const char *key, uint32_t n, uint64_t *out,
                            lg_error *err);
/* "group" (model or optim), "dtype" and "shape"; the product of the shape is
 * checked. The shape is copied into `arena`. */
lg_status lg__member_tensor(const json_t *object, const lg__at *at, lg__arena *arena, lg_group *group, lg_dtype *dtype,
                            uint32_t *ndim, const uint64_t **shape, lg_error *err);

/* A dtype by a name that is not NUL-terminated. */
bool lg__dtype_of(lg__json_piece name, lg_dtype *out);

/* ---- checks of values in memory, used before writing and after reading */

/* LG_ERR_LIMIT when too long, LG_ERR_INVALID for what is no plain text. */
lg_status lg__text_check(const char *what, const char *text, size_t max, lg_error *err);
bool lg__hex_valid(const char *text, size_t digits);        /* that many lower-case digits, then NUL */
bool lg__created_valid(const char *text);                   /* "2026-11-29T18:31:57Z" */
bool lg__block_bytes_valid(uint64_t bytes);                 /* power of two in [4096, 64 MiB] */
int lg__generation_order(lg_generation a, lg_generation b); /* -1, 0, 1 */
/* Global state: an object of tagged JSON by key. */
lg_status lg__state_check(const json_t *state, const lg__at *at, lg_error *err);

/* ---- writing */

void lg__buf_json_generation(lg__buf *b, lg_generation g); /* [3,17] */
void lg__buf_json_u64s(lg__buf *b, const uint64_t *v, size_t n);
void lg__buf_json_hex(lg__buf *b, const uint8_t digest[LG__SHA256_BYTES]); /* quoted */
void lg__buf_json_text(lg__buf *b, const char *text);                      /* NUL-terminated, quoted */

#endif
