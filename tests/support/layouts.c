/* SPDX-License-Identifier: Apache-2.0 */
#include "layouts.h"

#include "oops.h"

lg__tensor_desc layout_tensor(lg_dtype dtype, uint32_t ndim, const uint64_t *shape)
{
    return (lg__tensor_desc){.name = "w", .group = LG_GROUP_MODEL, .dtype = dtype, .ndim = ndim, .shape = shape};
}

lg_layout *layout_create(const lg_layout_desc *d)
{
    lg_layout *l = NULL;
    CHECK(lg_layout_create(d, &l, oops));
    return l;
}

lg_layout *layout_resolve(lg_layout *l, lg__tensor_desc t)
{
    lg_layout *r = NULL;
    CHECK(lg__layout_resolve(l, &t, &r, oops));
    return r;
}

lg_layout *rows_layout(uint32_t ranks, uint64_t rows)
{
    lg_layout *layout = NULL, *resolved = NULL;
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    lg_split split = {0, 0, 0, LG_SPLIT_CEIL};
    d.mesh_ndim = 1, d.mesh_sizes = &ranks, d.n_splits = 1, d.splits = &split;
    CHECK(lg_layout_create(&d, &layout, oops));
    lg__tensor_desc t = {"t", LG_GROUP_MODEL, LG_F32, 2, (uint64_t[]){rows, 6}, 0};
    CHECK(lg__layout_resolve(layout, &t, &resolved, oops));
    lg_layout_free(layout);
    return resolved;
}

lg_layout *flat_layout(uint32_t ranks, uint64_t length)
{
    lg_layout *layout = NULL, *resolved = NULL;
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &ranks, d.flat_length = length;
    CHECK(lg_layout_create(&d, &layout, oops));
    lg__tensor_desc t = {"t", LG_GROUP_OPTIM, LG_F32, 1, &length, 0};
    CHECK(lg__layout_resolve(layout, &t, &resolved, oops));
    lg_layout_free(layout);
    return resolved;
}
