/* SPDX-License-Identifier: Apache-2.0 */
#include "matrix.h"

/* Four numbers (two doubles) as one register of any 64-bit machine; loads and
 * stores need no alignment. Lanes are different elements of c, so their sums
 * stay apart. */
typedef real vector __attribute__((vector_size(16), aligned(sizeof(real)), may_alias));
enum { LANES = 16 / sizeof(real) };

/* A block of c that stays in registers. */
enum { BLOCK_ROWS = 4, BLOCK_VECTORS = 2, BLOCK_COLS = BLOCK_VECTORS * LANES };

static void multiply_block(real *c, size_t c_stride, const real *a, size_t a_stride, const real *b, size_t b_stride,
                           size_t inner)
{
    vector sum[BLOCK_ROWS][BLOCK_VECTORS] = {{{0}}};
    for (size_t k = 0; k < inner; k++) {
        const vector *row = (const vector *)(b + k * b_stride);
#pragma GCC unroll 4
        for (size_t i = 0; i < BLOCK_ROWS; i++) {
            real factor = a[i * a_stride + k];
#pragma GCC unroll 2
            for (size_t j = 0; j < BLOCK_VECTORS; j++)
                sum[i][j] += factor * row[j];
        }
    }
    for (size_t i = 0; i < BLOCK_ROWS; i++)
        for (size_t j = 0; j < BLOCK_VECTORS; j++)
            ((vector *)(c + i * c_stride))[j] = sum[i][j];
}

/* What the blocks leave over at the lower and right edges. */
static void multiply_rest(real *c, size_t c_stride, const real *a, size_t a_stride, const real *b, size_t b_stride,
                          size_t rows, size_t inner, size_t cols)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < cols; j++) {
            real sum = 0;
            for (size_t k = 0; k < inner; k++)
                sum += a[i * a_stride + k] * b[k * b_stride + j];
            c[i * c_stride + j] = sum;
        }
}

void matrix_multiply(real *c, size_t c_stride, const real *a, size_t a_stride, const real *b, size_t b_stride,
                     size_t rows, size_t inner, size_t cols)
{
    size_t whole_rows = rows - rows % BLOCK_ROWS, whole_cols = cols - cols % BLOCK_COLS;
    for (size_t j = 0; j < whole_cols; j += BLOCK_COLS)
        for (size_t i = 0; i < whole_rows; i += BLOCK_ROWS)
            multiply_block(c + i * c_stride + j, c_stride, a + i * a_stride, a_stride, b + j, b_stride, inner);
    if (whole_cols < cols)
        multiply_rest(c + whole_cols, c_stride, a, a_stride, b + whole_cols, b_stride, whole_rows, inner,
                      cols - whole_cols);
    if (whole_rows < rows)
        multiply_rest(c + whole_rows * c_stride, c_stride, a + whole_rows * a_stride, a_stride, b, b_stride,
                      rows - whole_rows, inner, cols);
}

void matrix_transpose(real *out, const real *in, size_t in_stride, size_t rows, size_t cols)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < cols; j++)
            out[j * rows + i] = in[i * in_stride + j];
}
