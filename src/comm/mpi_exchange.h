/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_COMM_MPI_EXCHANGE_H
#define LG_COMM_MPI_EXCHANGE_H

/* All ranks to rank 0 and back: the core of every call, and who is told what
 * when one fails. */

#include "comm/mpi_wire.h"

/* All ranks' data by rank, malloc'ed, on all ranks; with `sizes`, 8 bytes a
 * rank behind it. Whatever fails, break_off comes next. */
lg_status lg__mpi_exchange(lg__mpi_call *c, const void *mine, size_t bytes, bool sizes, unsigned char **result,
                           uint64_t *result_bytes, lg_error *err);

/* Looks for news of the call: a verdict, or on rank 0 another rank's failure, is
 * an error; *got when a result's head is in f->in. */
lg_status lg__mpi_listen(lg__mpi_call *c, bool *got, int *source, lg_error *err);

/* Ends a failed call: tells whom the failure concerns, unless they know.
 * Returns err's status. */
lg_status lg__mpi_break_off(lg__mpi_call *c, lg_error *err);

#endif
