/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_CHECK_H
#define LG_TESTS_CHECK_H

/* Checks of a status that show the error's message when they fail. Each needs a
 * variable `lg_error err` in scope. */

#include <lastgood/lastgood.h>
/* cmocka wants these before it */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

static inline void check_status(lg_status got, lg_status want, const char *what, const lg_error *err, const char *file,
                                int line)
{
    if (got != want) {
        print_error("%s is %s, not %s: %s\n", what, lg_status_name(got), lg_status_name(want),
                    got == LG_OK ? "" : err->message);
        _fail(file, line);
    }
    if (want != LG_OK && (err->status != want || err->message[0] == '\0')) {
        print_error("%s: err has %s, \"%s\"\n", what, lg_status_name(err->status), err->message);
        _fail(file, line);
    }
}

#define OK(expr) check_status((expr), LG_OK, #expr, &err, __FILE__, __LINE__)
#define FAILS(want, expr) check_status((expr), (want), #expr, &err, __FILE__, __LINE__)

static inline void check_says(const lg_error *err, const char *text, const char *file, int line)
{
    if (strstr(err->message, text) == NULL) {
        print_error("\"%s\" does not say \"%s\"\n", err->message, text);
        _fail(file, line);
    }
}

/* The last error's message contains `text`. */
#define SAYS(text) check_says(&err, (text), __FILE__, __LINE__)

#endif
