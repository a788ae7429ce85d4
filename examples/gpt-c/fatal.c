/* SPDX-License-Identifier: Apache-2.0 */
#include "fatal.h"

#include <mpi.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

_Noreturn void fatal(const char *format, ...)
{
    int rank = 0, running = 0;
    MPI_Initialized(&running);
    if (running)
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);

    char text[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    /* one write, so that lines of several ranks do not mix */
    fprintf(stderr, "gpt-c: rank %d: error: %s\n", rank, text);
    fflush(NULL);
    if (running)
        MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

void *allocate(size_t count, size_t element_bytes)
{
    void *memory = calloc(count ? count : 1, element_bytes);
    if (!memory)
        fatal("out of memory for %zu x %zu bytes", count, element_bytes);
    return memory;
}
