/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_READY_H
#define LG_CORE_READY_H

/* Memory that something else fills, and the number in memory that says when it
 * has: written by a device after its copies, so that nobody has to ask the
 * device. */

#include <lastgood/status.h>

#include <stdatomic.h>
#include <stdint.h>

typedef struct lg__ready {
    const int64_t *at; /* NULL: it is filled */
    int64_t value;     /* that, or more, says so */
    uint64_t deadline_ms;
} lg__ready;

/* Returns when the memory may be read. LG_ERR_TIMEOUT after the deadline, counted
 * from now; LG_ERR_CANCELLED when *given_up (may be NULL) becomes true. */
lg_status lg__ready_wait(const lg__ready *r, atomic_bool *given_up, lg_error *err);

#endif
