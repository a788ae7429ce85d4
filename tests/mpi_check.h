/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_MPI_CHECK_H
#define LG_TESTS_MPI_CHECK_H

/* A check of an MPI program: it names the rank, and the program goes on. */

#include <stdio.h>

static int me, size, failures;

#define CHECK(cond)                                                                     \
    do {                                                                                \
        if (!(cond)) {                                                                  \
            fprintf(stderr, "rank %d: %s:%d: not %s\n", me, __FILE__, __LINE__, #cond); \
            failures++;                                                                 \
        }                                                                               \
    } while (0)

#endif
