/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "store/store.h"

/* The wrappers of store.c look at the handle's bits, not at the table's, so a
 * view is a second handle on the same context. */
lg_status lg_store_without(lg_store *inner, uint32_t caps, lg_store **out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(inner == NULL || out == NULL, err, LG_ERR_INVALID,
                  "lg_store_without: inner and out must not be NULL");
    lg_store *s = lg__calloc(1, sizeof *s);
    if (s == NULL) {
        return lg__nomem(err);
    }
    s->ops = inner->ops;
    s->ctx = inner->ctx;
    s->caps = inner->caps & ~caps;
    s->owns_ctx = false;
    *out = s;
    return LG_OK;
}
