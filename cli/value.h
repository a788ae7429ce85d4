/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_VALUE_H
#define LG_CLI_VALUE_H

/* Single elements, as they are stored (little-endian). */

#include "cli.h"

#define VALUE_TEXT 80
/* The shortest decimal text that is the same number when read again in this
 * precision (half-precision ones as F32). dtypes below 8 bits: not for these. */
const char *value_text(lg_dtype dtype, const void *element, char out[VALUE_TEXT]);
json_t *value_json(lg_dtype dtype, const void *element);

/* The number, for dtypes of floating point (C64: the real part). */
double value_double(lg_dtype dtype, const void *element);

/* How NumPy describes the dtype ("<f4"); dtypes that it lacks get whole numbers
 * of the same size, and *note what to say about it (else NULL). */
const char *value_npy(lg_dtype dtype, const char **note);

#endif
