/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"

#include "base/json.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define STRINGIFY_(x) #x
#define STRINGIFY(x) STRINGIFY_(x)

const char *lg_version(void)
{
    return STRINGIFY(LG_VERSION_MAJOR) "." STRINGIFY(LG_VERSION_MINOR) "." STRINGIFY(LG_VERSION_PATCH);
}

const char *lg_status_name(lg_status status)
{
    switch (status) {
#define CASE(name, number, text) \
    case name:                   \
        return #name;
        LG_STATUS_MAP(CASE)
#undef CASE
    }
    return "LG_ERR_?";
}

const char *lg_status_text(lg_status status)
{
    switch (status) {
#define CASE(name, number, text) \
    case name:                   \
        return text;
        LG_STATUS_MAP(CASE)
#undef CASE
    }
    return "unknown status";
}

lg_error *lg__error_begin(lg_error *err, lg_error *local)
{
    lg_error *use = err != NULL ? err : local;
    use->status = LG_OK;
    use->os_errno = 0;
    use->rank = -1;
    use->message[0] = '\0';
    return use;
}

/* Cuts an overlong message at a character's edge. */
static void end_message(char *message, int wanted)
{
    if (wanted < LG_ERROR_MESSAGE_MAX) {
        return;
    }
    static const char dots[] = "…";
    size_t end = LG_ERROR_MESSAGE_MAX - sizeof dots;
    while (end > 0 && ((unsigned char)message[end] & 0xC0) == 0x80) {
        end--;
    }
    memcpy(message + end, dots, sizeof dots);
}

static lg_status set_v(lg_error *err, lg_status status, int os_errno, const char *format, va_list args)
{
    err->status = status;
    err->os_errno = os_errno;
    err->rank = -1;
    int n = vsnprintf(err->message, sizeof err->message, format, args);
    end_message(err->message, n);
    return status;
}

lg_status lg_error_set(lg_error *err, lg_status status, const char *format, ...)
{
    LG__ERR(err);
    va_list args;
    va_start(args, format);
    set_v(err, status, 0, format, args);
    va_end(args);
    return status;
}

static lg_status status_of_errno(int os_errno)
{
    switch (os_errno) {
    case ENOENT:
    case ENOTDIR:
        return LG_ERR_NOT_FOUND;
    case EEXIST:
        return LG_ERR_EXISTS;
    case ENOTEMPTY:
        return LG_ERR_NOT_EMPTY;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return LG_ERR_NO_SPACE;
    case EACCES:
    case EPERM:
        return LG_ERR_PERMISSION;
    case EROFS:
        return LG_ERR_READ_ONLY;
    case ENOMEM:
        return LG_ERR_NOMEM;
    case EINVAL:
    case ENAMETOOLONG:
        return LG_ERR_INVALID;
    case ENOSYS:
    case EOPNOTSUPP:
        return LG_ERR_UNSUPPORTED;
    case ETIMEDOUT:
        return LG_ERR_TIMEOUT;
    default:
        return LG_ERR_IO;
    }
}

lg_status lg_error_set_errno(lg_error *err, int os_errno, const char *format, ...)
{
    LG__ERR(err);
    char text[LG_ERROR_MESSAGE_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    char why[128];
    /* The GNU form returns the text, which may or may not be in `why`. */
    const char *s = strerror_r(os_errno, why, sizeof why);
    lg_status status = status_of_errno(os_errno);
    lg_error_set(err, status, "%s: %s", text, s);
    err->os_errno = os_errno;
    return status;
}

lg_status lg_error_wrap(lg_error *err, const char *format, ...)
{
    if (err == NULL) {
        return LG_ERR_INTERNAL;
    }
    char head[LG_ERROR_MESSAGE_MAX], both[LG_ERROR_MESSAGE_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(head, sizeof head, format, args);
    va_end(args);
    int n = snprintf(both, sizeof both, "%s: %s", head, err->message);
    end_message(both, n);
    memcpy(err->message, both, sizeof both);
    return err->status;
}

void lg__text_copy(char *out, size_t out_bytes, const char *text)
{
    size_t n = strnlen(text, out_bytes);
    if (n == out_bytes) {
        n--;
        /* What is no UTF-8 may be cut anywhere. */
        for (int i = 0; i < 3 && n > 0 && ((unsigned char)text[n] & 0xC0) == 0x80; i++) {
            n--;
        }
    }
    memcpy(out, text, n);
    out[n] = '\0';
}

/* Bytes of the UTF-8 character at s, 0 if there is none. */
static size_t character(const char *s)
{
    unsigned char c = (unsigned char)*s;
    size_t n = c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    return strnlen(s, n) == n && lg__utf8_valid(s, n) ? n : 0;
}

const char *lg__printable(const char *s, char *out, size_t out_bytes)
{
    size_t n = 0;
    while (*s != '\0') {
        unsigned char c = (unsigned char)*s;
        size_t bytes = character(s);
        bool raw = bytes > 0 && c >= 0x20 && c != 0x7F;
        size_t need = raw ? bytes : 4;
        if (n + need + sizeof "…" > out_bytes) {
            memcpy(out + n, "…", sizeof "…");
            return out;
        }
        if (raw) {
            memcpy(out + n, s, bytes);
        } else {
            snprintf(out + n, out_bytes - n, "\\x%02x", c);
        }
        n += need;
        s += raw ? bytes : 1;
    }
    out[n] = '\0';
    return out;
}
