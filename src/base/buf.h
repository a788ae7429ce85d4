/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_BASE_BUF_H
#define LG_BASE_BUF_H

/* A growable byte buffer with a hard maximum. After a failed append (memory or
 * maximum) it is `failed` and later appends do nothing, so that a long text can
 * be built first and checked once, by lg__buf_check. */

#include <lastgood/lastgood.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct lg__buf {
    char *data;           /* NUL-terminated behind len, NULL before the first append */
    size_t len, cap, max; /* cap: never more than max + 1 */
    bool failed;
    bool too_long; /* why: the maximum, not memory */
} lg__buf;

void lg__buf_init(lg__buf *b, size_t max);
void lg__buf_free(lg__buf *b); /* also resets it */
void lg__buf_add_slow(lg__buf *b, const void *data, size_t bytes);

/* Here, since texts are made of a million short pieces. */
static inline void lg__buf_add(lg__buf *b, const void *data, size_t bytes)
{
    if (b->failed || bytes == 0 || bytes >= b->cap - b->len) {
        lg__buf_add_slow(b, data, bytes);
        return;
    }
    memcpy(b->data + b->len, data, bytes);
    b->len += bytes;
    b->data[b->len] = '\0';
}

static inline void lg__buf_str(lg__buf *b, const char *s) { lg__buf_add(b, s, strlen(s)); }

void lg__buf_fmt(lg__buf *b, const char *format, ...) LG_PRINTF(2, 3);
void lg__buf_fill(lg__buf *b, char c, size_t n);
void lg__buf_u64(lg__buf *b, uint64_t v); /* in decimal */
void lg__buf_u32le(lg__buf *b, uint32_t v);
void lg__buf_u64le(lg__buf *b, uint64_t v);

/* LG_ERR_NOMEM or LG_ERR_LIMIT if an append failed; `what` names the text. */
lg_status lg__buf_check(const lg__buf *b, const char *what, lg_error *err);

/* Hands the bytes over (free with lg__free) and resets the buffer. */
char *lg__buf_take(lg__buf *b);

uint32_t lg__get_u32le(const void *p);
uint64_t lg__get_u64le(const void *p);

#endif
