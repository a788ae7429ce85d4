/* SPDX-License-Identifier: Apache-2.0 */
#include "base/buf.h"

#include "base/error.h"
#include "base/mem.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void lg__buf_init(lg__buf *b, size_t max) { *b = (lg__buf){.max = max}; }

void lg__buf_free(lg__buf *b)
{
    lg__free(b->data);
    *b = (lg__buf){.max = b->max};
}

/* Room for `bytes` more and a NUL. */
static bool reserve(lg__buf *b, size_t bytes)
{
    if (b->failed) {
        return false;
    }
    if (bytes > b->max - b->len) {
        b->failed = b->too_long = true;
        return false;
    }
    size_t need = b->len + bytes + 1;
    if (need <= b->cap) {
        return true;
    }
    size_t cap = b->cap < 256 ? 256 : b->cap;
    while (cap < need) {
        cap = cap > SIZE_MAX / 2 ? need : cap * 2;
    }
    if (cap - 1 > b->max) {
        cap = b->max + 1;
    }
    char *p = lg__realloc(b->data, cap);
    if (p == NULL) {
        b->failed = true;
        return false;
    }
    b->data = p;
    b->cap = cap;
    return true;
}

void lg__buf_add_slow(lg__buf *b, const void *data, size_t bytes)
{
    if (reserve(b, bytes)) {
        if (bytes > 0) {
            memcpy(b->data + b->len, data, bytes);
        }
        b->len += bytes;
        b->data[b->len] = '\0';
    }
}

void lg__buf_fmt(lg__buf *b, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (n >= 0 && reserve(b, (size_t)n)) {
        vsnprintf(b->data + b->len, (size_t)n + 1, format, again);
        b->len += (size_t)n;
    }
    va_end(again);
}

void lg__buf_fill(lg__buf *b, char c, size_t n)
{
    if (reserve(b, n)) {
        memset(b->data + b->len, c, n);
        b->len += n;
        b->data[b->len] = '\0';
    }
}

void lg__buf_u64(lg__buf *b, uint64_t v)
{
    char digits[20];
    size_t n = 0;
    do {
        digits[sizeof digits - ++n] = (char)('0' + v % 10);
        v /= 10;
    } while (v > 0);
    lg__buf_add(b, digits + sizeof digits - n, n);
}

void lg__buf_u32le(lg__buf *b, uint32_t v)
{
    unsigned char p[4];
    for (int i = 0; i < 4; i++) {
        p[i] = (unsigned char)(v >> (8 * i));
    }
    lg__buf_add(b, p, sizeof p);
}

void lg__buf_u64le(lg__buf *b, uint64_t v)
{
    unsigned char p[8];
    for (int i = 0; i < 8; i++) {
        p[i] = (unsigned char)(v >> (8 * i));
    }
    lg__buf_add(b, p, sizeof p);
}

lg_status lg__buf_check(const lg__buf *b, const char *what, lg_error *err)
{
    if (!b->failed) {
        return LG_OK;
    }
    if (b->too_long) {
        return lg_error_set(err, LG_ERR_LIMIT, "%s would be longer than %zu bytes", what, b->max);
    }
    return lg__nomem(err);
}

char *lg__buf_take(lg__buf *b)
{
    char *data = b->data;
    *b = (lg__buf){.max = b->max};
    return data;
}

uint32_t lg__get_u32le(const void *p)
{
    const unsigned char *c = p;
    return (uint32_t)c[0] | (uint32_t)c[1] << 8 | (uint32_t)c[2] << 16 | (uint32_t)c[3] << 24;
}

uint64_t lg__get_u64le(const void *p)
{
    const unsigned char *c = p;
    return (uint64_t)lg__get_u32le(c) | (uint64_t)lg__get_u32le(c + 4) << 32;
}
