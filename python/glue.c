/* SPDX-License-Identifier: Apache-2.0 */
#include "glue.h"

#include <string.h>

/* Where the next tensor's entries begin. */
typedef struct cursor {
    const char *name;
    size_t dim;
} cursor;

static void step(cursor *at, uint32_t ndim)
{
    at->name += strlen(at->name) + 1;
    at->dim += ndim;
}

lg_status lgpy_save_tensors(lg_save *save, const lgpy_columns *columns, lg_error *err)
{
    cursor at = {columns->names, 0};
    for (size_t i = 0; i < columns->n; i++) {
        uint32_t form = columns->forms[i];
        lg_tensor t = LG_TENSOR_INIT;
        t.name = at.name;
        t.dtype = (lg_dtype)columns->dtypes[i];
        t.group = (lg_group)columns->groups[i];
        t.ndim = columns->ndims[i];
        t.shape = columns->dims + at.dim;
        t.data = (const void *)(uintptr_t)columns->data[i];
        t.flags = columns->flags[i];
        if (form & LGPY_STRIDED) {
            t.strides = columns->strides + at.dim;
        }
        if (form & LGPY_LOCAL) {
            t.local_shape = columns->local_dims + at.dim;
        }
        if (columns->layouts != NULL) {
            t.layout = (const lg_layout *)(uintptr_t)columns->layouts[i];
            t.flat_offset = columns->flat_offsets[i];
        }
        lg_status status = lg_save_tensor(save, &t, err);
        if (status != LG_OK) {
            return status;
        }
        step(&at, t.ndim);
    }
    return LG_OK;
}

lg_status lgpy_load_tensors(lg_load *load, const lgpy_columns *columns, lg_error *err)
{
    cursor at = {columns->names, 0};
    for (size_t i = 0; i < columns->n; i++) {
        uint32_t form = columns->forms[i];
        lg_target t = LG_TARGET_INIT;
        t.name = at.name;
        t.dtype = (lg_dtype)columns->dtypes[i];
        t.ndim = columns->ndims[i];
        t.shape = columns->dims + at.dim;
        t.data = (void *)(uintptr_t)columns->data[i];
        t.flags = columns->flags[i];
        t.rank = columns->ranks[i];
        if (form & LGPY_STRIDED) {
            t.strides = columns->strides + at.dim;
        }
        if (form & LGPY_REGION) {
            t.offset = columns->offsets + at.dim;
            t.extent = columns->extents + at.dim;
        }
        if (columns->layouts != NULL) {
            t.layout = (const lg_layout *)(uintptr_t)columns->layouts[i];
            t.flat_offset = columns->flat_offsets[i];
        }
        lg_status status = lg_load_tensor(load, &t, err);
        if (status != LG_OK) {
            return status;
        }
        step(&at, t.ndim);
    }
    return LG_OK;
}

lg_status lgpy_tensor_infos(lg_checkpoint *c, lg_tensor_info *out, size_t n, lg_error *err)
{
    for (size_t i = 0; i < n; i++) {
        lg_status status = lg_checkpoint_tensor(c, i, &out[i], err);
        if (status != LG_OK) {
            return status;
        }
    }
    return LG_OK;
}

void lgpy_sampler_peek(const lg_sampler *s, uint64_t n, uint64_t *out)
{
    for (uint64_t i = 0; i < n; i++) {
        out[i] = lg_sampler_peek(s, i);
    }
}
