/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LASTGOOD_MPI_H
#define LASTGOOD_MPI_H

/* The communicator over MPI: library lastgood-mpi, so that liblastgood itself
 * does not depend on MPI. Needs MPI 3.0. */

#include <lastgood/lastgood.h>
#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The ranks of an intracommunicator. *Collective* over it. Works on a duplicate,
 * so that nothing mixes with the trainer's own messages; `comm` stays the
 * caller's. Free with lg_comm_free, before MPI_Finalize.
 *
 * No call waits longer than its deadline and a short grace, also when a rank is
 * late, dead, or in another call; the error names it. With a thread level below
 * MPI_THREAD_SERIALIZED, every call that takes the communicator must come from
 * the main thread (LG_ERR_STATE otherwise). lastgood itself uses MPI in the
 * calling thread only.
 *
 *     lg_comm *comm;
 *     if (lg_mpi_comm_create(MPI_COMM_WORLD, &comm, &err) != LG_OK) …
 *
 * LG_ERR_TIMEOUT when not all ranks call it within ten minutes. */
LG_API lg_status lg_mpi_comm_create(MPI_Comm comm, lg_comm **out, lg_error *err);

/* The same with another deadline. */
LG_API lg_status lg_mpi_comm_create_within(MPI_Comm comm, uint64_t deadline_ms, lg_comm **out, lg_error *err);

#ifdef __cplusplus
}
#endif

#endif
