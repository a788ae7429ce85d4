/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_LAYOUTS_H
#define LG_TESTS_LAYOUTS_H

/* Layouts for tests: descriptions made and applied to tensors, or the test
 * fails with the reason. */

#include "format/layout.h"

#define SHAPE(...) \
    (const uint64_t[]) { __VA_ARGS__ }

/* A tensor "w" of the model; `shape` stays the caller's. */
lg__tensor_desc layout_tensor(lg_dtype dtype, uint32_t ndim, const uint64_t *shape);

/* Both are freed with lg_layout_free. */
lg_layout *layout_create(const lg_layout_desc *d);
lg_layout *layout_resolve(lg_layout *l, lg__tensor_desc t);

/* Resolved for a tensor of the same form: rows of 6 elements over `ranks` ranks,
 * a flat buffer of `length` elements over them. */
lg_layout *rows_layout(uint32_t ranks, uint64_t rows);
lg_layout *flat_layout(uint32_t ranks, uint64_t length);

#endif
