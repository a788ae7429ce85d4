/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_COMM_COMM_H
#define LG_COMM_COMM_H

/* How the library uses a communicator. */

#include "base/error.h"

#include <stdbool.h>

struct lg_comm {
    const lg_comm_ops *ops;
    void *ctx;
    uint32_t rank, size;
    bool broken;
    lg_error reason; /* the first error, once broken */
    size_t *sizes;   /* room for lg__comm_agree, which must not fail for want of memory */
};

/* Arguments as in lg_comm_ops. After any error, the caller's wrong arguments
 * included, the ranks may be out of step: the communicator is broken for good,
 * and later calls fail with LG_ERR_COMM and the first error's text. */
lg_status lg__comm_barrier(lg_comm *c, uint64_t deadline_ms, lg_error *err);
lg_status lg__comm_all_gather(lg_comm *c, const void *data, size_t bytes, void **all, size_t *sizes,
                              uint64_t deadline_ms, lg_error *err);
lg_status lg__comm_broadcast(lg_comm *c, void **data, size_t *bytes, uint32_t root, uint64_t deadline_ms,
                             lg_error *err);
lg_status lg__comm_all_to_all(lg_comm *c, const void *const *send, const size_t *send_bytes, void **recv,
                              size_t *recv_bytes, uint64_t deadline_ms, lg_error *err);

/* All ranks give what they have in `err` (`mine` is its status); all return
 * the same: LG_OK if all were fine, else the error of the lowest failed rank,
 * with "rank N: " before its message and err->rank set, on every rank alike.
 * A rank's own PEER error yields to another's real one. An error that names its
 * rank already, from an earlier agreement, is not prefixed again; with one rank
 * none is. If the communicator fails, a rank's own error stays its result. */
lg_status lg__comm_agree(lg_comm *c, lg_status mine, uint64_t deadline_ms, lg_error *err);

#endif
