/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_SLICE_H
#define LG_CLI_SLICE_H

/* NumPy's basic slices without steps: "0:10,3,:", "-1", "...,0". */

#include "report.h"

typedef struct slice {
    uint32_t ndim; /* of the tensor */
    uint64_t offset[LG_MAX_NDIM], size[LG_MAX_NDIM];
    uint32_t out_ndim; /* of the result: a number drops its dimension */
    uint64_t out_shape[LG_MAX_NDIM];
    uint32_t out_dim[LG_MAX_NDIM]; /* which dimension of the tensor each one is */
} slice;

/* `given` NULL: all of it. -1, or the exit status after a message that names
 * the dimension. */
int slice_parse(cli *c, const char *given, uint32_t ndim, const uint64_t *shape, slice *out);

#endif
