/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_OOPS_H
#define LG_TESTS_OOPS_H

/* A check of a status for places that have no error of their own: `oops` in the
 * expression is one. */

#include <lastgood/lastgood.h>
/* cmocka wants these before it */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define CHECK(expr)                                                                     \
    do {                                                                                \
        lg_error oops_ = LG_ERROR_INIT, *oops = &oops_;                                 \
        if ((expr) != LG_OK) {                                                          \
            fail_msg("%s: %s: %s", #expr, lg_status_name(oops->status), oops->message); \
        }                                                                               \
    } while (0)

#endif
