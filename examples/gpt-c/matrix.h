/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_MATRIX_H
#define GPT_MATRIX_H

/* The two matrix routines the model needs. Row-major; a stride is the distance
 * of two rows in elements. */

#include "numeric.h"

#include <stddef.h>

/* c = a b, with a of rows x inner and b of inner x cols. Each element of c is
 * one sum from the first to the last inner index, however the loops are
 * blocked, so its bits do not depend on the shape around it. */
void matrix_multiply(real *c, size_t c_stride, const real *a, size_t a_stride, const real *b, size_t b_stride,
                     size_t rows, size_t inner, size_t cols);

/* out = in transposed; in is rows x cols, out is packed. */
void matrix_transpose(real *out, const real *in, size_t in_stride, size_t rows, size_t cols);

#endif
