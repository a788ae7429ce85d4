/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LASTGOOD_LAYOUT_H
#define LASTGOOD_LAYOUT_H

/* Layouts, a part of lastgood.h, which includes this.
 *
 * A layout says which rank holds which part of a tensor. It is shared by all
 * tensors that are cut alike, so that the manifest grows with ranks + tensors.
 *
 * Ranks form a mesh. Each split cuts one dimension of the tensor, in order:
 * by a mesh axis (piece i on the ranks whose coordinate on that axis is i) or
 * by a constant (axis = LG_NO_AXIS: all pieces stay on the same rank, as for a
 * fused query-key-value matrix of which each third is cut again). Axes that no
 * split uses are replica axes: the ranks along them hold the same bytes and
 * are declared to be trained in step.
 *
 *     // rows over 4 ranks (FSDP):
 *     uint32_t sizes[] = {4};
 *     lg_split rows = {0, 0, 0, LG_SPLIT_CEIL};
 *     lg_layout_desc d = LG_LAYOUT_DESC_INIT;
 *     d.mesh_ndim = 1, d.mesh_sizes = sizes, d.n_splits = 1, d.splits = &rows;
 *     lg_layout *layout;
 *     lg_layout_create(&d, &layout, &err);
 */

#include <lastgood/lastgood.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lg_split_mode {
    LG_SPLIT_CEIL = 0, /* pieces of ceil(n/p), the last ones shorter or empty (torch.chunk, FSDP2, DTensor) */
    LG_SPLIT_EVEN = 1  /* sizes differ by at most one, longer ones first (torch.tensor_split) */
} lg_split_mode;

#define LG_NO_AXIS (-1)

typedef struct lg_split {
    uint32_t dim;    /* dimension of the tensor */
    int32_t axis;    /* mesh axis, or LG_NO_AXIS */
    uint32_t pieces; /* with LG_NO_AXIS: how many; else ignored */
    lg_split_mode mode;
} lg_split;

typedef struct lg_layout_desc {
    size_t size; /* LG_LAYOUT_DESC_INIT sets it */
    /* The rank at mesh coordinate c is ranks[row-major index of c] if `ranks`
     * is given, else origin + sum of c[i]*mesh_strides[i] (NULL: row-major). */
    uint32_t mesh_ndim;
    const uint32_t *mesh_sizes;
    const uint32_t *mesh_strides;
    uint32_t mesh_origin;
    const uint32_t *ranks;
    uint32_t n_splits;
    const lg_split *splits;
    /* Flat: a one-dimensional buffer of flat_length elements, cut into
     * ceil-pieces over mesh axis flat_axis; each tensor lies in it in row-major
     * order at its flat_offset. flat_length > 0 selects it; no splits then. */
    uint64_t flat_length;
    int32_t flat_axis;
    /* How many of the R holders of a replica write a piece each; 0 = so many
     * that each writes at least 32 MiB. */
    uint32_t writers;
} lg_layout_desc;

#define LG_LAYOUT_DESC_INIT                                              \
    {                                                                    \
        sizeof(lg_layout_desc), 0, NULL, NULL, 0, NULL, 0, NULL, 0, 0, 0 \
    }

LG_API lg_status lg_layout_create(const lg_layout_desc *desc, lg_layout **out, lg_error *err);
LG_API void lg_layout_free(lg_layout *layout);

/* The part that `layout` gives `rank` of a tensor. Split layouts: its shape goes
 * to local_shape (ndim entries) and its length to *elements; *start is
 * UINT64_MAX, since a part has no single place in the row-major order (see
 * lg_layout_offset). Flat layouts: *elements is the length of the rank's range in
 * the tensor and *start its first element, row-major; local_shape is untouched.
 * Each of the three may be NULL. LG_ERR_INVALID if the rank is not in the
 * layout. */
LG_API lg_status lg_layout_local(const lg_layout *layout, uint32_t rank, uint32_t ndim, const uint64_t *shape,
                                 uint64_t flat_offset, uint64_t *local_shape, uint64_t *start, uint64_t *elements,
                                 lg_error *err);

/* Where that part begins in the tensor, for split layouts (ndim entries): the
 * global index of local index 0. LG_ERR_UNSUPPORTED when the part is several
 * boxes (constant splits) and for flat layouts. */
LG_API lg_status lg_layout_offset(const lg_layout *layout, uint32_t rank, uint32_t ndim, const uint64_t *shape,
                                  uint64_t *offset, lg_error *err);

#ifdef __cplusplus
}
#endif

#endif
