/* SPDX-License-Identifier: Apache-2.0 */

/* An MPI program: tests/mpirun.sh 4 test_mpi_launch. Saves in the background
 * while the trainer uses MPI all the time. MPI's profiling interface tells which
 * thread calls it: never another than the main one, with MPI_THREAD_FUNNELED. */

#include "mpi_check.h"
#include "support/fault_store.h"
#include "support/temp_dir.h"

#include <errno.h>
#include <lastgood/mpi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEADLINE_MS UINT64_C(60000)
#define ROWS 1000 /* of each rank */
#define COLUMNS 300
#define PART ((size_t)ROWS * COLUMNS)

static pthread_t main_thread;
static atomic_int elsewhere, calls;

#define MUST(call)                                                                                           \
    do {                                                                                                     \
        lg_error err_ = LG_ERROR_INIT, *err = &err_;                                                         \
        if ((call) != LG_OK) {                                                                               \
            fprintf(stderr, "rank %d: %s:%d: %s: %s\n", me, __FILE__, __LINE__, lg_status_name(err_.status), \
                    err_.message);                                                                           \
            MPI_Abort(MPI_COMM_WORLD, 1);                                                                    \
        }                                                                                                    \
    } while (0)

/* ------------------------------------------------ who calls what lastgood uses */

static void called(void)
{
    atomic_fetch_add(&calls, 1);
    if (!pthread_equal(pthread_self(), main_thread)) {
        atomic_fetch_add(&elsewhere, 1);
    }
}

#define WATCHED(name, declared, given) \
    int MPI_##name declared            \
    {                                  \
        called();                      \
        return PMPI_##name given;      \
    }

WATCHED(Isend, (const void *b, int n, MPI_Datatype t, int to, int tag, MPI_Comm c, MPI_Request *r),
        (b, n, t, to, tag, c, r))
WATCHED(Improbe, (int from, int tag, MPI_Comm c, int *flag, MPI_Message *m, MPI_Status *s), (from, tag, c, flag, m, s))
WATCHED(Imrecv, (void *b, int n, MPI_Datatype t, MPI_Message *m, MPI_Request *r), (b, n, t, m, r))
WATCHED(Iprobe, (int from, int tag, MPI_Comm c, int *flag, MPI_Status *s), (from, tag, c, flag, s))
WATCHED(Test, (MPI_Request * r, int *flag, MPI_Status *s), (r, flag, s))
WATCHED(Get_count, (const MPI_Status *s, MPI_Datatype t, int *n), (s, t, n))
WATCHED(Request_free, (MPI_Request * r), (r))
WATCHED(Comm_rank, (MPI_Comm c, int *rank), (c, rank))
WATCHED(Comm_size, (MPI_Comm c, int *n), (c, n))
WATCHED(Comm_free, (MPI_Comm * c), (c))
WATCHED(Finalized, (int *flag), (flag))
WATCHED(Initialized, (int *flag), (flag))
WATCHED(Query_thread, (int *level), (level))
WATCHED(Is_thread_main, (int *flag), (flag))

/* ------------------------------------------------------------------ a trainer */

typedef struct run {
    char root[256];
    lg_comm *comm;
    lg_store *store;
    fault_store *f; /* this rank's */
    lg_session *s;
    lg_layout *rows;
    float *w; /* lazy */
    uint64_t count;
    double sum; /* of all ranks; what the collectives are for */
} run;

static float value(uint64_t step, int rank, size_t i)
{
    return (float)(step * 1000 + (uint64_t)rank * 17) + (float)(i % 1013) / 8;
}

static void run_open(run *r)
{
    *r = (run){0};
    if (me == 0) {
        temp_dir_make(r->root);
    }
    MPI_Bcast(r->root, sizeof r->root, MPI_CHAR, 0, MPI_COMM_WORLD);
    MUST(lg_mpi_comm_create(MPI_COMM_WORLD, &r->comm, err));
    MUST(lg_store_open(r->root, &r->store, err));
    r->f = fault_store_new(r->store);
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = r->comm;
    o.store = fault_store_handle(r->f);
    o.deadline_ms = DEADLINE_MS;
    MUST(lg_session_open(r->root, &o, &r->s, err));
    uint32_t ranks = (uint32_t)size;
    lg_split split = {0, 0, 0, LG_SPLIT_CEIL};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &ranks, d.n_splits = 1, d.splits = &split;
    MUST(lg_layout_create(&d, &r->rows, err));
    r->w = malloc(PART * sizeof *r->w);
    CHECK(r->w != NULL);
}

static void run_close(run *r)
{
    MUST(lg_session_close(r->s, err));
    lg_layout_free(r->rows);
    lg_comm_free(r->comm);
    fault_store_free(r->f);
    lg_store_free(r->store);
    free(r->w);
    MPI_Barrier(MPI_COMM_WORLD);
    if (me == 0) {
        temp_dir_remove(r->root);
    }
}

static void fill(run *r, uint64_t step)
{
    for (size_t i = 0; i < PART; i++) {
        r->w[i] = value(step, me, i);
    }
    r->count = step;
}

static lg_status launch(run *r, uint64_t step, lg_error *told)
{
    lg_save *save;
    MUST(lg_save_begin(r->s, step, NULL, &save, err));
    const uint64_t shape[] = {(uint64_t)size * ROWS, COLUMNS};
    lg_tensor t = LG_TENSOR_INIT;
    t.name = "w", t.ndim = 2, t.shape = shape, t.data = r->w, t.layout = r->rows, t.flags = LG_TENSOR_LAZY;
    MUST(lg_save_tensor(save, &t, err));
    t = (lg_tensor)LG_TENSOR_INIT;
    t.name = "count", t.dtype = LG_U64, t.data = &r->count;
    MUST(lg_save_tensor(save, &t, err));
    return lg_save_launch(save, NULL, NULL, told);
}

/* Forward and backward of the trainer: its collectives, on its communicator. */
static void exchange(run *r, int n)
{
    double mine[512], all[512];
    for (int k = 0; k < n; k++) {
        for (int i = 0; i < 512; i++) {
            mine[i] = me + k + i;
        }
        MPI_Allreduce(mine, all, 512, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        CHECK(all[7] == size * (k + 7) + size * (size - 1) / 2.0);
        r->sum += all[3];
    }
}

static void check_saved(const run *r, uint64_t step)
{
    float *got = malloc(PART * sizeof *got);
    const uint64_t shape[] = {(uint64_t)size * ROWS, COLUMNS}, offset[] = {(uint64_t)me * ROWS, 0},
                   extent[] = {ROWS, COLUMNS};
    uint64_t count = 0;
    lg_target t[2] = {LG_TARGET_INIT, LG_TARGET_INIT};
    t[0].name = "w", t[0].ndim = 2, t[0].shape = shape, t[0].offset = offset, t[0].extent = extent, t[0].data = got;
    t[1].name = "count", t[1].dtype = LG_U64, t[1].data = &count;
    char where[300];
    snprintf(where, sizeof where, "%s@%llu", r->root, (unsigned long long)step);
    MUST(lg_read(where, t, 2, NULL, err));
    CHECK(count == step);
    size_t wrong = 0;
    for (size_t i = 0; i < PART; i++) {
        wrong += got[i] != value(step, me, i);
    }
    CHECK(wrong == 0);
    free(got);
}

/* ----------------------------------------------------------------- scenarios */

static void saves_while_the_trainer_reduces(void)
{
    run r;
    run_open(&r);
    char anything[64]; /* a receive for anything is posted all the while */
    MPI_Request request;
    MPI_Irecv(anything, sizeof anything, MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &request);
    for (uint64_t step = 1; step <= 12; step++) {
        fill(&r, step);
        MUST(launch(&r, step, err));
        r.count = 999;
        exchange(&r, 40);
        MUST(lg_session_fence(r.s, DEADLINE_MS, err));
        memset(r.w, 0xee, PART * sizeof *r.w); /* the update */
        exchange(&r, 10);
    }
    lg_save_info info;
    MUST(lg_session_wait(r.s, 0, &info, err));
    CHECK(info.step == 12);
    int done = 1;
    PMPI_Test(&request, &done, MPI_STATUS_IGNORE);
    CHECK(!done);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Send("x", 1, MPI_BYTE, (me + 1) % size, 1, MPI_COMM_WORLD);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    for (uint64_t step = 1; step <= 12; step++) {
        check_saved(&r, step);
    }
    run_close(&r);
}

/* The last rank's disk fails behind its back; all are told by the next launch. */
static void errors_reach_all(void)
{
    run r;
    run_open(&r);
    const int last = size - 1;
    char shard[32];
    snprintf(shard, sizeof shard, "shard-%05d-", size);
    fill(&r, 1);
    MUST(launch(&r, 1, err));
    MUST(lg_session_wait(r.s, 0, NULL, err));
    if (me == last) {
        fault_store_arm(r.f, (fault_plan){.kinds = FAULT_BIT(FAULT_WRITE), .path = shard, .os_errno = EIO});
    }
    fill(&r, 2);
    MUST(launch(&r, 2, err));
    exchange(&r, 20);
    MUST(lg_session_fence(r.s, DEADLINE_MS, err));
    fill(&r, 3);
    lg_error told = LG_ERROR_INIT, first;
    CHECK(launch(&r, 3, &told) == LG_ERR_IO);
    first = told;
    MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, MPI_COMM_WORLD);
    CHECK(strcmp(first.message, told.message) == 0 && first.rank == told.rank);
    CHECK(strstr(told.message, "save step 2 in the background") != NULL && strstr(told.message, shard) != NULL);
    CHECK(told.rank == (size > 1 ? last : -1));
    MUST(launch(&r, 3, err));
    exchange(&r, 20);
    MUST(lg_session_wait(r.s, 0, NULL, err));
    check_saved(&r, 3);
    check_saved(&r, 1);
    run_close(&r);
}

typedef struct scenario {
    const char *name;
    void (*run)(void);
} scenario;

static const scenario scenarios[] = {
    {"K06 F091: saves in the background and the trainer's collectives do not meet", saves_while_the_trainer_reduces},
    {"K04 F065: what fails behind one rank's back is told on all by the next launch", errors_reach_all},
};

int main(int argc, char **argv)
{
    int level, bad = 0;
    main_thread = pthread_self();
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
    PMPI_Comm_rank(MPI_COMM_WORLD, &me);
    PMPI_Comm_size(MPI_COMM_WORLD, &size);
    const int n = (int)(sizeof scenarios / sizeof scenarios[0]);
    for (int i = 0; i < n; i++) {
        atomic_store(&calls, 0);
        scenarios[i].run();
        CHECK(size == 1 || atomic_load(&calls) > 0); /* the watch works */
        CHECK(atomic_load(&elsewhere) == 0);
        int all = 0;
        MPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        if (me == 0) {
            printf("%s %d - %s (%d ranks)\n", all == 0 ? "ok" : "not ok", i + 1, scenarios[i].name, size);
            fflush(stdout);
        }
        bad += all != 0;
        failures = 0;
    }
    MPI_Finalize();
    return bad != 0;
}
