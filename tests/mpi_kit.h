/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_MPI_KIT_H
#define LG_TESTS_MPI_KIT_H

/* Shared by the MPI programs that test the communicator: checks that name the
 * rank, and scenarios. Each scenario runs on a communicator of its own; between
 * scenarios MPI_COMM_WORLD keeps the ranks together. */

#include "comm/comm.h"
#include "mpi_check.h"

#include <lastgood/mpi.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define LONG_MS UINT64_C(60000)
#define SHORT_MS UINT64_C(1000)
#define MAX_RANKS 64

#define CHECK_TEXT(err, part)                                                                                         \
    do {                                                                                                              \
        if (strstr((err)->message, (part)) == NULL) {                                                                 \
            fprintf(stderr, "rank %d: %s:%d: \"%s\" lacks \"%s\"\n", me, __FILE__, __LINE__, (err)->message, (part)); \
            failures++;                                                                                               \
        }                                                                                                             \
    } while (0)

#define CHECK_STATUS(st, want, err)                                                                          \
    do {                                                                                                     \
        lg_status is_ = (st), want_ = (want);                                                                \
        if (is_ != want_) {                                                                                  \
            fprintf(stderr, "rank %d: %s:%d: %s, not %s: %s\n", me, __FILE__, __LINE__, lg_status_name(is_), \
                    lg_status_name(want_), (err)->message);                                                  \
            failures++;                                                                                      \
        }                                                                                                    \
    } while (0)

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void sync_ranks(void) { MPI_Barrier(MPI_COMM_WORLD); }

typedef struct scenario {
    const char *name;
    int ranks; /* at least */
    void (*run)(lg_comm *c);
} scenario;

static int run_scenarios(const scenario *scenarios, int n)
{
    lg_comm *c = NULL;
    lg_error err;
    int bad = 0;
    for (int i = 0; i < n; i++) {
        if (size < scenarios[i].ranks) {
            continue;
        }
        double t = seconds();
        c = NULL;
        CHECK_STATUS(lg_mpi_comm_create(MPI_COMM_WORLD, &c, &err), LG_OK, &err);
        if (c != NULL) {
            scenarios[i].run(c);
        }
        sync_ranks();
        lg_comm_free(c);
        int all = 0;
        MPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        if (me == 0) {
            printf("%s %d - %s (%d ranks, %.2f s)\n", all == 0 ? "ok" : "not ok", i + 1, scenarios[i].name, size,
                   seconds() - t);
            fflush(stdout);
        }
        bad += all != 0;
        failures = 0;
    }
    return bad;
}

#endif
