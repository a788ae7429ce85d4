/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_FORMAT_REGION_H
#define LG_FORMAT_REGION_H

/* Boxes of tensors: arithmetic with checks, runs of contiguous bytes, and the
 * proof that boxes tile a tensor. */

#include <lastgood/lastgood.h>
#include <stdbool.h>
#include <stdint.h>

/* A box: `size[d]` elements from `offset[d]` in each of `ndim` dimensions. */
typedef struct lg__region {
    uint32_t ndim;
    uint64_t offset[LG_MAX_NDIM];
    uint64_t size[LG_MAX_NDIM];
} lg__region;

/* Product of a shape; LG_ERR_LIMIT on overflow of 2^63. 1 for ndim 0. */
lg_status lg__shape_elements(uint32_t ndim, const uint64_t *shape, uint64_t *out, lg_error *err);
/* Bytes of a whole tensor: LG_ERR_INVALID if bits do not fill bytes. */
lg_status lg__shape_bytes(lg_dtype dtype, uint32_t ndim, const uint64_t *shape, uint64_t *out, lg_error *err);

lg__region lg__region_whole(uint32_t ndim, const uint64_t *shape);
bool lg__region_empty(const lg__region *r);        /* some size is 0; a 0-d region is not empty */
uint64_t lg__region_elements(const lg__region *r); /* of a region known to fit its shape */
bool lg__region_inside(const lg__region *r, uint32_t ndim, const uint64_t *shape); /* no overflow */
/* false if the intersection is empty */
bool lg__region_intersect(const lg__region *a, const lg__region *b, lg__region *out);
/* Compares row-major order of offsets. */
int lg__region_compare(const lg__region *a, const lg__region *b);
/* "[0:4, 2:6]" ("[]" for 0-d), cut with "…" if too long; returns out. */
const char *lg__region_text(const lg__region *r, char *out, size_t bytes);

/* Walks `part` (global coordinates) inside two row-major or strided arrays at
 * once, as a list of runs that are contiguous in both. One side is a *box*
 * stored packed row-major (`box` gives where it lies globally); the other side
 * is memory with byte strides whose element 0 is the global position
 * `mem_origin`. fn gets the run's byte position in the packed box, its
 * position in memory (bytes from data, may be negative with negative strides)
 * and its length; a nonzero return stops and is returned. Runs come in
 * ascending order of the position in the box and are as long as both sides
 * allow. LG_ERR_UNSUPPORTED when a run of a sub-byte dtype does not begin and
 * end on a byte (sub-byte memory must be packed in the last dimension).
 * strides NULL: memory is packed row-major with shape mem_size. */
typedef struct lg__run_walk {
    lg_dtype dtype;
    const lg__region *box;
    const lg__region *part;     /* inside box */
    const uint64_t *mem_origin; /* ndim entries */
    const uint64_t *mem_size;   /* ndim entries; used when strides is NULL */
    const int64_t *strides;     /* bytes, or NULL */
} lg__run_walk;
typedef lg_status (*lg__run_fn)(uint64_t box_byte, int64_t mem_byte, uint64_t bytes, void *arg, lg_error *err);
lg_status lg__region_runs(const lg__run_walk *walk, lg__run_fn fn, void *arg, lg_error *err);

/* Cuts the row-major element range [begin, end) of a tensor into boxes, by the
 * rule of docs/format.md: partial head, whole rows, partial tail, descending
 * into one index. Boxes come in row-major order of their offsets. At most
 * 2*ndim boxes. An empty range gives none. 0-d: one box. */
#define LG__MAX_FLAT_BOXES (2 * LG_MAX_NDIM)
size_t lg__region_cut_flat(uint32_t ndim, const uint64_t *shape, uint64_t begin, uint64_t end,
                           lg__region out[LG__MAX_FLAT_BOXES]);

/* Proves that boxes tile a tensor exactly: in bounds, no hole, no overlap, no
 * empty box unless the tensor is empty (then exactly one box, the whole).
 * The sum of the boxes' indicator functions equals the tensor's if and only if
 * their signed corners cancel to the tensor's: O(n 2^k log n), k being the
 * dimensions in which some box does not span the tensor. On failure
 * LG_ERR_COVERAGE with the place and, for overlaps, both boxes and their
 * ranks. `name` is for messages, ranks[i] the rank of box i (NULL: none). */
lg_status lg__region_check_tiling(const char *name, uint32_t ndim, const uint64_t *shape, const lg__region *boxes,
                                  const uint32_t *ranks, size_t n, lg_error *err);

#endif
