/* SPDX-License-Identifier: Apache-2.0 */
#include "core/ready.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/thread.h"

#include <inttypes.h>

lg_status lg__ready_wait(const lg__ready *r, atomic_bool *given_up, lg_error *err)
{
    if (r->at == NULL) {
        return LG_OK;
    }
    const uint64_t began = lg__now_ms(), until = lg__deadline(r->deadline_ms);
    /* What was written before the number is seen after it. */
    while (__atomic_load_n(r->at, __ATOMIC_ACQUIRE) < r->value) {
        LG__RETURN_IF(given_up != NULL && atomic_load(given_up), err, LG_ERR_CANCELLED, "given up");
        const uint64_t now = lg__now_ms();
        LG__RETURN_IF(now >= until, err, LG_ERR_TIMEOUT,
                      "the memory to be saved was not filled within %" PRIu64 " ms: the device's copies did not end",
                      r->deadline_ms);
        lg__pause(now - began);
    }
    return LG_OK;
}
