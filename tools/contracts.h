/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TOOLS_CONTRACTS_H
#define LG_TOOLS_CONTRACTS_H

/* What tools/analyze puts in front of each source. The analyzers see one
 * source at a time, and would follow paths on which a function that describes
 * an error returns LG_OK. None does: the first two return the status given,
 * the third that of an error that is there. */

#include <lastgood/backend.h>
#include <stdlib.h>

#include "base/mem.h"

static inline lg_status lg__failed(lg_status status)
{
    if (status == LG_OK) {
        abort();
    }
    return status;
}

#define lg_error_set(...) lg__failed(lg_error_set(__VA_ARGS__))
#define lg_error_set_errno(...) lg__failed(lg_error_set_errno(__VA_ARGS__))
#define lg_error_wrap(...) lg__failed(lg_error_wrap(__VA_ARGS__))
#define lg__nomem(err) lg__failed(lg__nomem(err))

#endif
