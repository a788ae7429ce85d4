/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_CHUNK_H
#define LG_CLI_CHUNK_H

/* Reading a region piece by piece, in row-major order and bounded memory, and
 * loading one region. */

#include "cli.h"

typedef struct chunks {
    uint32_t ndim;
    uint64_t first[LG_MAX_NDIM], total[LG_MAX_NDIM]; /* the region */
    uint64_t at[LG_MAX_NDIM];                        /* where the next one begins, in the region */
    uint32_t dim;                                    /* the dimension that is cut */
    uint64_t rows;                                   /* of it, at a time */
    bool done;
    /* the one that chunks_next gave */
    uint64_t offset[LG_MAX_NDIM], size[LG_MAX_NDIM];
    uint64_t elements;
} chunks;

/* Pieces of at most max_bytes each, but at least one row of the last dimension
 * cut; dtypes below 8 bits are never cut inside a byte. */
void chunks_begin(chunks *k, uint32_t ndim, const uint64_t *offset, const uint64_t *size, lg_dtype dtype,
                  uint64_t max_bytes);
bool chunks_next(chunks *k);
/* The most elements that one piece has. */
uint64_t chunks_most(const chunks *k);

uint64_t elements_of(uint32_t ndim, const uint64_t *size);
/* Packed; whole bytes. */
uint64_t bytes_of(lg_dtype dtype, uint64_t elements);

/* Loads a region, verified. `strides` NULL: packed. `copy_of` UINT32_MAX: of a
 * tensor kept per rank, the first rank's copy. */
lg_status load_region(lg_checkpoint *k, const lg_tensor_info *t, const uint64_t *offset, const uint64_t *size,
                      void *data, const int64_t *strides, uint32_t copy_of, lg_error *err);

#endif
