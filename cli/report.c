/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include "progress.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static void line(const cli *c, const char *message)
{
    progress_clear();
    fflush(stdout);
    fputs("lastgood: ", stderr);
    if (c->command != NULL) {
        fprintf(stderr, "%s: ", c->command->name);
    }
    text_put(stderr, message);
    fputc('\n', stderr);
}

static void hint_line(const char *hint)
{
    if (hint != NULL) {
        fputs("  hint: ", stderr);
        text_put(stderr, hint);
        fputc('\n', stderr);
    }
}

static void into_document(cli *c, lg_status status, const char *message, const char *hint)
{
    if (!c->json || c->document == NULL) {
        return;
    }
    json_t *e = need(json_object());
    json_put(e, "status", json_text(lg_status_name(status)));
    json_put(e, "message", json_text(message));
    if (hint != NULL) {
        json_put(e, "hint", json_text(hint));
    }
    json_put(c->document, "error", e);
}

static void report_v(cli *c, lg_status status, const char *hint, const char *format, va_list args)
{
    char *message = NULL;
    if (vasprintf(&message, format, args) < 0) {
        message = NULL;
    }
    line(c, need(message));
    hint_line(hint);
    into_document(c, status, message, hint);
    free(message);
}

int report_trouble(cli *c, const char *hint, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    report_v(c, LG_ERR_INVALID, hint, format, args);
    va_end(args);
    return CLI_TROUBLE;
}

int report_as(cli *c, lg_status status, const char *hint, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    report_v(c, status, hint, format, args);
    va_end(args);
    return report_exit(status);
}

int report_exit(lg_status status)
{
    switch (status) {
    case LG_OK:
        return CLI_YES;
    case LG_ERR_CORRUPT:
    case LG_ERR_FORMAT:
    case LG_ERR_COVERAGE:
    case LG_ERR_NOT_WHOLE:
    case LG_ERR_EMPTY:
    case LG_ERR_MISSING:
    case LG_ERR_NO_GOOD:
    case LG_ERR_PROTECTED:
        return CLI_NO;
    default:
        return CLI_TROUBLE;
    }
}

static const char *usual_hint(lg_status status)
{
    switch (status) {
    case LG_ERR_CORRUPT:
    case LG_ERR_COVERAGE:
    case LG_ERR_NOT_WHOLE:
        return "'lastgood verify' lists all that is damaged; 'lastgood ls' shows which other checkpoints there are";
    case LG_ERR_EMPTY:
        return "'lastgood ls -a' shows what else lies there";
    case LG_ERR_NO_GOOD:
        return "'lastgood ls' says why for each; 'lastgood verify' names the damaged bytes";
    case LG_ERR_VERSION:
        return "use the version of lastgood that wrote it, or a later one";
    case LG_ERR_CONFLICT:
        return "two folders claim the same generation: move the wrong one out of the root";
    default:
        return NULL;
    }
}

int report_error(cli *c, const lg_error *err, const char *hint)
{
    hint = hint == NULL ? usual_hint(err->status) : hint[0] == '\0' ? NULL : hint;
    line(c, err->message);
    hint_line(hint);
    into_document(c, err->status, err->message, hint);
    return report_exit(err->status);
}

void report_note(cli *c, const char *format, ...)
{
    if (c->quiet) {
        return;
    }
    char *message = NULL;
    va_list args;
    va_start(args, format);
    if (vasprintf(&message, format, args) < 0) {
        message = NULL;
    }
    va_end(args);
    line(c, need(message));
    free(message);
}

/* --------------------------------------------------------------------- JSON */

json_t *json_u64(uint64_t v)
{
    if (v <= UINT64_C(1) << 53) {
        return need(json_integer((json_int_t)v));
    }
    char digits[24];
    snprintf(digits, sizeof digits, "%" PRIu64, v);
    return need(json_string(digits));
}

json_t *json_text(const char *s)
{
    json_t *t = json_string(s); /* NULL if it is no UTF-8 */
    if (t == NULL) {
        char *safe = text_escape(s);
        t = json_string(safe);
        free(safe);
    }
    return need(t);
}

json_t *json_generation(lg_generation g)
{
    json_t *a = need(json_array());
    json_push(a, json_u64(g.epoch));
    json_push(a, json_u64(g.serial));
    return a;
}

json_t *json_shape(uint32_t ndim, const uint64_t *shape)
{
    json_t *a = need(json_array());
    for (uint32_t d = 0; d < ndim; d++) {
        json_push(a, json_u64(shape[d]));
    }
    return a;
}

json_t *json_double(double v)
{
    if (isfinite(v)) {
        return need(json_real(v));
    }
    return need(json_string(isnan(v) ? "nan" : v < 0 ? "-inf" : "inf"));
}

void json_put(json_t *object, const char *key, json_t *value)
{
    if (json_object_set_new(object, key, value) != 0) {
        need(NULL);
    }
}

void json_push(json_t *array, json_t *value)
{
    if (json_array_append_new(array, value) != 0) {
        need(NULL);
    }
}

void report_finish(cli *c)
{
    if (c->document == NULL) {
        return;
    }
    /* ASCII alone, so that no escape sequence in a name reaches a terminal. */
    char *all = need(json_dumps(c->document, JSON_INDENT(2) | JSON_ENSURE_ASCII | JSON_REAL_PRECISION(17)));
    for (const char *p = all; *p != '\0'; p++) {
        if (*p == 0x7F) { /* jansson leaves DEL as it is */
            fputs("\\u007f", stdout);
        } else {
            putchar(*p);
        }
    }
    putchar('\n');
    free(all);
    json_decref(c->document);
    c->document = NULL;
}
