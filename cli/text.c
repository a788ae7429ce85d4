/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

void *need(void *memory)
{
    if (memory == NULL) {
        fputs("lastgood: out of memory\n", stderr);
        exit(CLI_TROUBLE);
    }
    return memory;
}

void *need_calloc(size_t n, size_t size) { return need(calloc(n > 0 ? n : 1, size)); }

char *need_strdup(const char *s) { return need(strdup(s)); }

char *need_format(const char *format, ...)
{
    char *out = NULL;
    va_list args;
    va_start(args, format);
    if (vasprintf(&out, format, args) < 0) {
        out = NULL;
    }
    va_end(args);
    return need(out);
}

void need_room(void **array, size_t *cap, size_t n, size_t size)
{
    if (n < *cap) {
        return;
    }
    size_t more = *cap < 8 ? 8 : *cap + *cap / 2;
    *array = need(reallocarray(*array, more, size));
    *cap = more;
}

/* ------------------------------------------------------------------ growing */

void text_add(text *t, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (n < 0) {
        va_end(again);
        need(NULL);
    }
    size_t want = t->len + (size_t)n + 1;
    if (want > t->cap) {
        t->cap = want + want / 2;
        t->data = need(realloc(t->data, t->cap));
    }
    vsnprintf(t->data + t->len, t->cap - t->len, format, again);
    va_end(again);
    t->len += (size_t)n;
}

void text_free(text *t)
{
    free(t->data);
    *t = (text){0};
}

const char *text_str(const text *t) { return t->data != NULL ? t->data : ""; }

/* ----------------------------------------------------------------- escaping */

/* Bytes of the well-formed UTF-8 character at s (RFC 3629), 0 if it is none.
 * *code gets its number. */
static size_t character(const unsigned char *s, uint32_t *code)
{
    if (s[0] < 0x80) {
        *code = s[0];
        return 1;
    }
    size_t n = s[0] >= 0xF0 && s[0] <= 0xF4 ? 4 : s[0] >= 0xE0 ? 3 : s[0] >= 0xC2 ? 2 : 0;
    if (n == 0 || s[0] > 0xF4) {
        return 0;
    }
    uint32_t v = s[0] & (0xFFu >> (n + 1));
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xC0) != 0x80) {
            return 0;
        }
        v = v << 6 | (s[i] & 0x3Fu);
    }
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (v < least[n] || v > 0x10FFFF || (v >= 0xD800 && v <= 0xDFFF)) {
        return 0;
    }
    *code = v;
    return n;
}

/* Controls, line and paragraph separators, what reorders or hides text. */
static bool unsafe(uint32_t v)
{
    return v < 0x20 || (v >= 0x7F && v <= 0x9F) || (v >= 0x200B && v <= 0x200F) || (v >= 0x2028 && v <= 0x202E) ||
           (v >= 0x2060 && v <= 0x2069) || v == 0xFEFF || (v >= 0xE0000 && v <= 0xE007F);
}

char *text_escape(const char *s)
{
    char *out = need(malloc(4 * strlen(s) + 1)), *to = out;
    const unsigned char *p = (const unsigned char *)s;
    while (*p != '\0') {
        uint32_t code = 0;
        size_t n = character(p, &code);
        bool safe = n > 0 && !unsafe(code);
        n = n > 0 ? n : 1;
        for (size_t i = 0; i < n; i++) {
            if (safe) {
                *to++ = (char)p[i];
            } else {
                to += sprintf(to, "\\x%02x", p[i]);
            }
        }
        p += n;
    }
    *to = '\0';
    return out;
}

void text_put(FILE *to, const char *s)
{
    char *safe = text_escape(s);
    fputs(safe, to);
    free(safe);
}

/* --------------------------------------------------------------- small texts */

const char *size_text(const cli *c, uint64_t bytes, char out[SIZE_TEXT])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double v = (double)bytes;
    size_t u = 0;
    /* 1023.96 KiB would print as 1024.0 KiB. */
    while (u + 1 < sizeof units / sizeof *units && v >= (u == 0 ? 1024 : 1023.95)) {
        v /= 1024;
        u++;
    }
    int n =
        u == 0 ? snprintf(out, SIZE_TEXT, "%" PRIu64 " B", bytes) : snprintf(out, SIZE_TEXT, "%.1f %s", v, units[u]);
    if (c->bytes && u > 0) {
        snprintf(out + n, SIZE_TEXT - (size_t)n, " (%" PRIu64 ")", bytes);
    }
    return out;
}

char *shape_text(uint32_t ndim, const uint64_t *shape)
{
    text t = {0};
    text_add(&t, "[");
    for (uint32_t d = 0; d < ndim; d++) {
        text_add(&t, "%s%" PRIu64, d > 0 ? ", " : "", shape[d]);
    }
    text_add(&t, "]");
    return t.data;
}

const char *count_text(uint64_t n, const char *one, const char *many, char out[COUNT_TEXT])
{
    snprintf(out, COUNT_TEXT, "%" PRIu64 " %s", n, n == 1 ? one : many);
    return out;
}

const char *generation_text(lg_generation g, char out[GENERATION_TEXT])
{
    snprintf(out, GENERATION_TEXT, "g%" PRIu64 ".%" PRIu64, g.epoch, g.serial);
    return out;
}

const char *created_text(const char *created, char out[32])
{
    if (strlen(created) != 20) {
        return memcpy(out, "-", 2);
    }
    snprintf(out, 32, "%.10s %.8s", created, created + 11);
    return out;
}

/* ------------------------------------------------------------------ colours */

const char *style_begin(const cli *c, text_style s)
{
    static const char *const codes[] = {"", "\033[1m", "\033[2m", "\033[32m", "\033[31m", "\033[33m"};
    return c->color ? codes[s] : "";
}

const char *style_end(const cli *c, text_style s) { return c->color && s != STYLE_PLAIN ? "\033[0m" : ""; }

size_t text_columns(const char *s)
{
    size_t n = 0;
    for (; *s != '\0'; s++) {
        n += ((unsigned char)*s & 0xC0) != 0x80;
    }
    return n;
}

void text_wrap(FILE *to, const char *s, unsigned indent, unsigned at)
{
    char *safe = text_escape(s);
    size_t column = at;
    bool first = true;
    for (const char *p = safe; *p != '\0';) {
        size_t n = strcspn(p, " ");
        char *word = need_format("%.*s", (int)n, p);
        size_t wide = text_columns(word);
        if (column > indent && column + !first + wide > TEXT_COLUMNS) {
            fprintf(to, "\n%*s", (int)indent, "");
            column = indent;
        } else if (!first) {
            fputc(' ', to);
            column++;
        }
        first = false;
        fputs(word, to);
        column += wide;
        free(word);
        p += n;
        p += strspn(p, " ");
    }
    free(safe);
}
