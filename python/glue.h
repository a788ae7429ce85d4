/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LASTGOOD_PYTHON_GLUE_H
#define LASTGOOD_PYTHON_GLUE_H

/* What the Python package needs besides the public interface: the same calls for
 * many tensors at once, since a call from Python costs more than the C behind it. */

#include <lastgood/lastgood.h>

enum {
    LGPY_STRIDED = 1u << 0, /* the tensor's entries in `strides` count; else packed row-major */
    LGPY_REGION = 1u << 1,  /* loading: its entries in `offsets` and `extents` count; else all of it */
    LGPY_LOCAL = 1u << 2    /* saving: its entries in `local_dims` count */
};

/* Descriptions of n tensors, a column for each member of lg_tensor and lg_target.
 * Columns of dimensions have the tensors' entries one behind the other. Columns
 * that no tensor needs may be NULL. */
typedef struct lgpy_columns {
    size_t n;
    const char *names; /* NUL-terminated, one behind the other */
    const int32_t *dtypes;
    const int32_t *groups;
    const uint32_t *ndims;
    const uint64_t *dims;
    const uint64_t *local_dims;
    const int64_t *strides;
    const uint64_t *offsets;
    const uint64_t *extents;
    const uint64_t *data;    /* addresses */
    const uint64_t *layouts; /* addresses, 0 for none */
    const uint64_t *flat_offsets;
    const uint32_t *ranks;
    const uint32_t *flags; /* LG_TENSOR_… */
    const uint32_t *forms; /* LGPY_… */
} lgpy_columns;

/* Stop at the first error. */
lg_status lgpy_save_tensors(lg_save *save, const lgpy_columns *columns, lg_error *err);
lg_status lgpy_load_tensors(lg_load *load, const lgpy_columns *columns, lg_error *err);

/* All tensors of a checkpoint, `n` of them by lg_checkpoint_get_info. */
lg_status lgpy_tensor_infos(lg_checkpoint *c, lg_tensor_info *out, size_t n, lg_error *err);

/* The next n samples; nothing moves. */
void lgpy_sampler_peek(const lg_sampler *s, uint64_t n, uint64_t *out);

/* From now on SIGTERM ends this process only if process `trainer` sends it, and
 * SIGUSR1 does nothing. In C, since a handler in Python does not learn who sent a
 * signal; a program that this one starts has neither. */
lg_status lgpy_outlive_signals(int64_t trainer, lg_error *err);

#endif
