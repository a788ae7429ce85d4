/* SPDX-License-Identifier: Apache-2.0 */
#include <lastgood/mpi.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank = 0, size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    lg_error err = LG_ERROR_INIT;
    lg_comm *comm = NULL;
    lg_status status = lg_mpi_comm_create(MPI_COMM_WORLD, &comm, &err);
    if (status != LG_OK) {
        printf("%s\n", err.message);
    } else if (lg_comm_rank(comm) != (uint32_t)rank || lg_comm_size(comm) != (uint32_t)size) {
        status = LG_ERR_COMM;
    }
    lg_comm_free(comm);
    MPI_Finalize();
    return status == LG_OK ? 0 : 1;
}
