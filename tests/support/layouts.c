/* SPDX-License-Identifier: Apache-2.0 */
#include "layouts.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

lg__tensor_desc layout_tensor(lg_dtype dtype, uint32_t ndim, const uint64_t *shape)
{
    return (lg__tensor_desc){.name = "w", .group = LG_GROUP_MODEL, .dtype = dtype, .ndim = ndim, .shape = shape};
}

lg_layout *layout_create(const lg_layout_desc *d)
{
    lg_error err = LG_ERROR_INIT;
    lg_layout *l = NULL;
    if (lg_layout_create(d, &l, &err) != LG_OK) {
        fail_msg("%s", err.message);
    }
    return l;
}

lg_layout *layout_resolve(lg_layout *l, lg__tensor_desc t)
{
    lg_error err = LG_ERROR_INIT;
    lg_layout *r = NULL;
    if (lg__layout_resolve(l, &t, &r, &err) != LG_OK) {
        fail_msg("%s", err.message);
    }
    return r;
}
