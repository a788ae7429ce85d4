/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "store/store.h"

#include <string.h>

static const char *after(const char *s, const char *prefix)
{
    size_t n = strlen(prefix);
    return strncmp(s, prefix, n) == 0 ? s + n : NULL;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* In place. false for a '%' without two hex digits, and for %00. */
static bool percent_decode(char *s)
{
    char *to = s;
    for (const char *from = s; *from != '\0'; from++) {
        char c = *from;
        if (c == '%') {
            int high = hex_digit(from[1]);
            int low = high < 0 ? -1 : hex_digit(from[2]);
            if (low < 0 || (high == 0 && low == 0)) {
                return false;
            }
            c = (char)(high * 16 + low);
            from += 2;
        }
        *to++ = c;
    }
    *to = '\0';
    return true;
}

/* RFC 8089: what stands between "file://" and the next slash is a host, so
 * "file://runs/a" does not mean the folder runs/a; refused, lest it be written
 * somewhere else than was meant. */
static lg_status open_file_uri(const char *uri, const char *rest, lg_store **out, lg_error *err)
{
    const char *path = after(rest, "localhost/") != NULL ? rest + strlen("localhost") : rest;
    LG__RETURN_IF(path[0] != '/', err, LG_ERR_INVALID,
                  "%s: file:// needs an absolute path (file:///…); write file:%s for a relative one", uri, rest);
    char *decoded = lg__strdup(path);
    if (decoded == NULL) {
        return lg__nomem(err);
    }
    lg_status st =
        percent_decode(decoded)
            ? lg__posix_store_open(decoded, out, err)
            : lg_error_set(err, LG_ERR_INVALID, "%s: '%%' in a file:// URI needs two hex digits, not 00", uri);
    lg__free(decoded);
    return st;
}

lg_status lg_store_open(const char *uri, lg_store **out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(uri == NULL || out == NULL, err, LG_ERR_INVALID, "lg_store_open: uri and out must not be NULL");
    const char *rest;
    if ((rest = after(uri, "file://")) != NULL) {
        return open_file_uri(uri, rest, out, err);
    }
    bool memory = (rest = after(uri, "mem:")) != NULL;
    if (!memory && (rest = after(uri, "file:")) == NULL) {
        rest = uri;
    }
    LG__RETURN_IF(rest[0] == '\0', err, LG_ERR_INVALID, "\"%s\" names no root", uri);
    return memory ? lg__memory_store_open(rest, out, err) : lg__posix_store_open(rest, out, err);
}
