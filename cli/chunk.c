/* SPDX-License-Identifier: Apache-2.0 */
#include "chunk.h"

#include <string.h>

uint64_t elements_of(uint32_t ndim, const uint64_t *size)
{
    /* Parts of a tensor whose bytes fit 63 bits, so this cannot overflow once
     * empty dimensions are out of the way. */
    uint64_t n = 1;
    for (uint32_t d = 0; d < ndim; d++) {
        if (size[d] == 0) {
            return 0;
        }
    }
    for (uint32_t d = 0; d < ndim; d++) {
        n *= size[d];
    }
    return n;
}

uint64_t bytes_of(lg_dtype dtype, uint64_t elements)
{
    unsigned bits = lg_dtype_bits(dtype);
    return bits % 8 == 0 ? elements * (bits / 8) : elements / 8 * bits + (elements % 8 * bits + 7) / 8;
}

void chunks_begin(chunks *k, uint32_t ndim, const uint64_t *offset, const uint64_t *size, lg_dtype dtype,
                  uint64_t max_bytes)
{
    *k = (chunks){.ndim = ndim};
    if (ndim > 0) {
        memcpy(k->first, offset, ndim * sizeof *offset);
        memcpy(k->total, size, ndim * sizeof *size);
    }
    unsigned bits = lg_dtype_bits(dtype);
    k->done = elements_of(ndim, size) == 0;
    if (k->done || ndim == 0) {
        return;
    }
    /* The first dimension below which everything fits into one piece. */
    uint64_t budget = max_bytes * 8 / bits, inner = 1;
    uint32_t dim = ndim - 1;
    while (dim > 0 && inner * size[dim] <= budget) {
        inner *= size[dim--];
    }
    uint64_t rows = budget / inner;
    rows = rows < 1 ? 1 : rows > size[dim] ? size[dim] : rows;
    if (bits % 8 != 0) {
        /* Eight rows fill whole bytes; the last piece of a run does when the
         * run does. Else all at once: such a tensor is rare, and small. */
        bool run_is_whole = dim == 0 || size[dim] * inner * bits % 8 == 0;
        rows = rows < 8 ? 8 : rows - rows % 8;
        if (!run_is_whole) {
            dim = 0;
            rows = size[0];
        }
    }
    k->dim = dim;
    k->rows = rows;
}

uint64_t chunks_most(const chunks *k)
{
    uint64_t n = k->ndim > 0 ? (k->rows < k->total[k->dim] ? k->rows : k->total[k->dim]) : 1;
    for (uint32_t d = k->dim + 1; d < k->ndim; d++) {
        n *= k->total[d];
    }
    return n;
}

bool chunks_next(chunks *k)
{
    if (k->done) {
        return false;
    }
    for (uint32_t d = 0; d < k->ndim; d++) {
        uint64_t left = k->total[d] - k->at[d];
        k->offset[d] = k->first[d] + k->at[d];
        k->size[d] = d < k->dim ? 1 : d > k->dim ? k->total[d] : left < k->rows ? left : k->rows;
    }
    k->elements = elements_of(k->ndim, k->size);
    k->done = true;
    for (uint32_t d = k->ndim > 0 ? k->dim + 1 : 0; d-- > 0;) {
        k->at[d] += k->size[d];
        if (k->at[d] < k->total[d]) {
            k->done = false;
            break;
        }
        k->at[d] = 0;
    }
    return true;
}

lg_status load_region(lg_checkpoint *k, const lg_tensor_info *t, const uint64_t *offset, const uint64_t *size,
                      void *data, const int64_t *strides, uint32_t copy_of, lg_error *err)
{
    lg_load *load = NULL;
    lg_status status = lg_load_begin(k, 0, &load, err);
    if (status != LG_OK) {
        return status;
    }
    static const uint64_t none[1] = {0};
    lg_target target = LG_TARGET_INIT;
    target.name = t->name;
    target.dtype = t->dtype;
    target.ndim = t->ndim;
    target.shape = t->shape;
    target.offset = t->ndim > 0 ? offset : none;
    target.extent = t->ndim > 0 ? size : none;
    target.data = data;
    target.strides = strides;
    if (copy_of != UINT32_MAX) {
        target.rank = copy_of;
        target.flags = LG_TENSOR_COPY_OF_RANK;
    }
    status = lg_load_tensor(load, &target, err);
    if (status == LG_OK) {
        status = lg_load_run(load, err);
    }
    lg_load_free(load);
    return status;
}
