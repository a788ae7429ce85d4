/* SPDX-License-Identifier: Apache-2.0 */

/* An MPI program: tests/mpirun.sh 6 test_mpi_comm. */

#include "mpi_kit.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Linked with --wrap=malloc: allocations of at least so many bytes fail. */
static atomic_size_t fail_from = SIZE_MAX;
void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes) { return bytes >= atomic_load(&fail_from) ? NULL : __real_malloc(bytes); }

/* ------------------------------------------------------------------ contents */

static uint8_t content(int from, int to, int k, size_t i)
{
    return (uint8_t)((size_t)(from * 31 + to * 17 + k * 7) + i + (i >> 8) + (i >> 16));
}

static size_t length(int from, int to, int k, size_t unit) { return (size_t)((from + 2 * to + k) % 3) * unit; }

static void *fill(int from, int to, int k, size_t bytes)
{
    uint8_t *p = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i++) {
        p[i] = content(from, to, k, i);
    }
    return p;
}

static void check_content(const uint8_t *p, int from, int to, int k, size_t bytes)
{
    size_t wrong = 0;
    for (size_t i = 0; i < bytes; i++) {
        wrong += p[i] != content(from, to, k, i);
    }
    CHECK(wrong == 0);
}

static void try_all_gather(lg_comm *c, int k, size_t unit)
{
    size_t sizes[MAX_RANKS], mine = length(me, 0, k, unit);
    void *data = fill(me, 0, k, mine), *all = NULL;
    lg_error err;
    lg_status st = lg__comm_all_gather(c, data, mine, &all, sizes, LONG_MS, &err);
    CHECK_STATUS(st, LG_OK, &err);
    free(data);
    if (st == LG_OK) {
        const uint8_t *at = all;
        for (int r = 0; r < size; r++) {
            CHECK(sizes[r] == length(r, 0, k, unit));
            check_content(at, r, 0, k, sizes[r]);
            at += sizes[r];
        }
        lg_free(all);
    }
}

static void try_broadcast(lg_comm *c, int k, size_t unit)
{
    int root = k % size;
    size_t bytes = me == root ? length(root, 1, k, unit) : 12345;
    void *data = me == root ? fill(root, 1, k, bytes) : NULL, *given = data;
    lg_error err;
    lg_status st = lg__comm_broadcast(c, &data, &bytes, (uint32_t)root, LONG_MS, &err);
    CHECK_STATUS(st, LG_OK, &err);
    if (st == LG_OK) {
        CHECK(bytes == length(root, 1, k, unit));
        check_content(data, root, 1, k, bytes);
        CHECK(me != root || data == given);
    }
    free(data);
}

static void try_all_to_all(lg_comm *c, int k, size_t unit)
{
    void *send[MAX_RANKS], *recv[MAX_RANKS];
    size_t send_bytes[MAX_RANKS], recv_bytes[MAX_RANKS];
    for (int r = 0; r < size; r++) {
        send_bytes[r] = length(me, r, k, unit);
        send[r] = fill(me, r, k, send_bytes[r]);
        recv[r] = &recv;
    }
    lg_error err;
    lg_status st = lg__comm_all_to_all(c, (const void *const *)send, send_bytes, recv, recv_bytes, LONG_MS, &err);
    CHECK_STATUS(st, LG_OK, &err);
    for (int r = 0; r < size; r++) {
        free(send[r]);
        if (st == LG_OK) {
            CHECK(recv_bytes[r] == length(r, me, k, unit));
            CHECK((recv[r] == NULL) == (recv_bytes[r] == 0));
            check_content(recv[r], r, me, k, recv_bytes[r]);
            lg_free(recv[r]);
        }
    }
}

static void rounds(lg_comm *c, int n, size_t unit)
{
    lg_error err;
    for (int k = 0; k < n && failures == 0; k++) {
        switch (k % 4) {
        case 0:
            try_all_gather(c, k, unit);
            break;
        case 1:
            try_broadcast(c, k, unit);
            break;
        case 2:
            try_all_to_all(c, k, unit);
            break;
        default:
            CHECK_STATUS(lg__comm_barrier(c, LONG_MS, &err), LG_OK, &err);
            break;
        }
    }
}

static void moves_small(lg_comm *c)
{
    CHECK((int)lg_comm_rank(c) == me && (int)lg_comm_size(c) == size);
    rounds(c, 12, 0);
    rounds(c, 12, 1);
    rounds(c, 12, 2048); /* the edge of what travels with a head */
    rounds(c, 12, 2049);
    rounds(c, 100, 1000);
}

static void moves_large(lg_comm *c)
{
    rounds(c, 3, (size_t)5 << 20);
    rounds(c, 3, (size_t)2 << 20); /* ends on the edge of a chunk */
}

/* ------------------------------------------------------------------- failures */

static void broken_for_good(lg_comm *c, const char *reason)
{
    lg_error err;
    double t = seconds();
    CHECK_STATUS(lg__comm_barrier(c, LONG_MS, &err), LG_ERR_COMM, &err);
    CHECK_TEXT(&err, reason);
    CHECK(seconds() - t < 10);
}

static lg_status short_gather(lg_comm *c, lg_error *err)
{
    size_t sizes[MAX_RANKS];
    void *all = &sizes;
    lg_status st = lg__comm_all_gather(c, "x", 1, &all, sizes, SHORT_MS, err);
    CHECK(st == LG_OK || all == &sizes);
    return st;
}

static void late_rank(lg_comm *c)
{
    lg_error err;
    const char *text =
        size > 4 ? "rank 1, 4 did not arrive within 1000 ms (rank " : "rank 1 did not arrive within 1000 ms (rank ";
    bool late = me == 1 || me == 4;
    if (!late) {
        double t = seconds();
        CHECK_STATUS(short_gather(c, &err), LG_ERR_TIMEOUT, &err);
        CHECK(seconds() - t < 30);
        CHECK_TEXT(&err, text);
        CHECK_TEXT(&err, "waited in all-gather #1)");
        CHECK(err.rank == 1);
        broken_for_good(c, text);
    }
    sync_ranks();
    if (late) { /* learns at once why it is too late */
        double t = seconds();
        CHECK_STATUS(lg__comm_barrier(c, LONG_MS, &err), LG_ERR_COMM, &err);
        CHECK(seconds() - t < 30);
        CHECK_TEXT(&err, text);
        CHECK(err.rank == 1);
    }
}

static void late_rank_zero(lg_comm *c)
{
    lg_error err;
    if (me != 0) {
        CHECK_STATUS(short_gather(c, &err), LG_ERR_TIMEOUT, &err);
        CHECK_TEXT(&err, "rank 0");
        CHECK_TEXT(&err, "did not answer within 1000 ms (rank ");
        CHECK(err.rank == 0);
    }
    sync_ranks();
    if (me == 0) {
        CHECK_STATUS(short_gather(c, &err), LG_ERR_COMM, &err);
        CHECK_TEXT(&err, "rank 0");
        CHECK(err.rank == 0);
    }
    sync_ranks();
    broken_for_good(c, "rank 0");
}

/* Rank 0 comes when the others have given up but still hope for its word. */
static void rank_zero_in_the_grace(lg_comm *c)
{
    lg_error err;
    if (me == 0) {
        double t = seconds();
        while (seconds() - t < 1.5) {
            int flag; /* lets MPI work, as a trainer would */
            MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE);
        }
    }
    CHECK_STATUS(short_gather(c, &err), me == 0 ? LG_ERR_COMM : LG_ERR_TIMEOUT, &err);
    CHECK_TEXT(&err, "rank 0");
    CHECK_TEXT(&err, "within 1000 ms (rank ");
    CHECK(err.rank == 0);
    broken_for_good(c, "rank 0");
}

/* The first deadline of any rank ends the wait of all. */
static void first_deadline_counts(lg_comm *c)
{
    lg_error err;
    double t = seconds();
    if (me == 1) {
        CHECK_STATUS(lg__comm_barrier(c, SHORT_MS, &err), LG_ERR_TIMEOUT, &err);
    } else if (me != size - 1) {
        CHECK_STATUS(lg__comm_barrier(c, LONG_MS, &err), LG_ERR_TIMEOUT, &err);
    }
    if (me != size - 1) {
        CHECK(seconds() - t < 30);
        char text[96];
        snprintf(text, sizeof text, "rank %d did not arrive within 1000 ms (rank 1 waited in barrier #1)", size - 1);
        CHECK_TEXT(&err, text);
    }
    sync_ranks();
}

static void other_call(lg_comm *c)
{
    lg_error err;
    size_t bytes = 0, sizes[MAX_RANKS];
    void *p = NULL;
    lg_status st;
    rounds(c, 4, 10);
    if (me == size - 1) {
        st = lg__comm_broadcast(c, &p, &bytes, 0, LONG_MS, &err);
    } else {
        st = lg__comm_all_gather(c, NULL, 0, &p, sizes, LONG_MS, &err);
    }
    CHECK_STATUS(st, LG_ERR_CONFLICT, &err);
    char text[96];
    snprintf(text, sizeof text, "rank %d called broadcast #5 from rank 0, but rank 0 called all-gather #5", size - 1);
    CHECK_TEXT(&err, text);
    broken_for_good(c, text);
}

static void other_root(lg_comm *c)
{
    lg_error err;
    size_t bytes = 0;
    void *p = NULL;
    CHECK_STATUS(lg__comm_broadcast(c, &p, &bytes, me == 0 ? 1 : 0, LONG_MS, &err), LG_ERR_CONFLICT, &err);
    CHECK_TEXT(&err, "called broadcast #1 from rank 0, but rank 0 called broadcast #1 from rank 1");
}

static void error_reaches_all(lg_comm *c)
{
    lg_error err;
    lg_status mine = me == 1 ? LG_ERR_NO_SPACE : LG_OK;
    if (me == 1) {
        lg_error_set_errno(&err, 28, "write shard");
    }
    CHECK_STATUS(lg__comm_agree(c, mine, LONG_MS, &err), LG_ERR_NO_SPACE, &err);
    CHECK_TEXT(&err, "rank 1: write shard: ");
    CHECK(err.rank == 1 && err.os_errno == 28);
    CHECK_STATUS(lg__comm_agree(c, LG_OK, LONG_MS, &err), LG_OK, &err);
    rounds(c, 8, 10);
}

static void sizes_too_large(lg_comm *c)
{
    lg_error err;
    size_t sizes[MAX_RANKS] = {0};
    void *all = NULL;
    size_t bytes = me == 0 ? SIZE_MAX / 2 + 1 : 1;
    lg_status st = lg__comm_all_gather(c, sizes, bytes, &all, sizes, LONG_MS, &err);
    CHECK_STATUS(st, me == 0 ? LG_ERR_LIMIT : LG_ERR_PEER, &err);
    CHECK_TEXT(&err, "rank 0 failed in all-gather #1: sizes add up");
    broken_for_good(c, "rank 0 failed in all-gather #1");
}

/* Rank 1 cannot hold the result; rank 5 waits for it behind rank 1. */
static void no_memory_for_the_result(lg_comm *c)
{
    lg_error err;
    size_t sizes[MAX_RANKS];
    void *all = NULL, *data = fill(me, 0, 0, 100000);
    if (me == 1) {
        atomic_store(&fail_from, (size_t)(100000 * size));
    }
    double t = seconds();
    lg_status st = lg__comm_all_gather(c, data, 100000, &all, sizes, LONG_MS, &err);
    atomic_store(&fail_from, SIZE_MAX);
    free(data);
    lg_free(all);
    lg_error first = err;
    if (me == 1) {
        CHECK_STATUS(st, LG_ERR_NOMEM, &err);
    } else if (me == 5) {
        CHECK_STATUS(st, LG_ERR_PEER, &err);
    }
    bool failed = st != LG_OK;
    st = lg__comm_barrier(c, LONG_MS, &err);
    if (me != 1) {
        CHECK_STATUS(st, failed ? LG_ERR_COMM : LG_ERR_PEER, &err);
    }
    CHECK(seconds() - t < 30);
    CHECK_TEXT(failed ? &first : &err, "rank 1 failed in all-gather #1: out of memory");
    CHECK((failed ? &first : &err)->rank == 1);
}

/* The same among the parts of an all-to-all, on rank 0 and on another. */
static void no_memory_for_a_part_on(lg_comm *c, int who)
{
    lg_error err, next;
    void *send[MAX_RANKS], *recv[MAX_RANKS];
    size_t bytes[MAX_RANKS], recv_bytes[MAX_RANKS];
    for (int r = 0; r < size; r++) {
        bytes[r] = r == who ? 300000 : 10;
        send[r] = fill(me, r, 0, bytes[r]);
    }
    if (me == who) {
        atomic_store(&fail_from, 300000);
    }
    double t = seconds();
    lg_status st = lg__comm_all_to_all(c, (const void *const *)send, bytes, recv, recv_bytes, LONG_MS, &err);
    atomic_store(&fail_from, SIZE_MAX);
    for (int r = 0; r < size; r++) {
        free(send[r]);
        if (st == LG_OK) {
            lg_free(recv[r]);
        }
    }
    CHECK(st != LG_OK || me != who);
    lg_status st2 = lg__comm_barrier(c, LONG_MS, &next);
    CHECK(st2 != LG_OK);
    CHECK(seconds() - t < 30);
    char text[64];
    snprintf(text, sizeof text, "rank %d failed in all-to-all #1: out of memory", who);
    CHECK_TEXT(st != LG_OK ? &err : &next, text);
}

static void no_memory_for_a_part(lg_comm *c) { no_memory_for_a_part_on(c, size - 1); }

static void no_memory_for_a_part_on_zero(lg_comm *c) { no_memory_for_a_part_on(c, 0); }

typedef struct threaded {
    lg_comm *c;
    lg_error err;
} threaded;

static void *barrier_thread(void *arg)
{
    threaded *t = arg;
    lg__comm_barrier(t->c, LONG_MS, &t->err);
    return NULL;
}

static void wrong_thread(lg_comm *c)
{
    threaded t = {.c = c};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, barrier_thread, &t) == 0);
    pthread_join(thread, NULL);
    CHECK_STATUS(t.err.status, LG_ERR_STATE, &t.err);
    CHECK_TEXT(&t.err, "main thread");
}

static void does_not_mix(lg_comm *c)
{
    /* The trainer's receive for anything is posted all the while. */
    char buffer[64];
    MPI_Request request;
    MPI_Irecv(buffer, sizeof buffer, MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &request);
    rounds(c, 12, 30);
    int done = 1;
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    CHECK(!done);
    sync_ranks();
    MPI_Send("x", 1, MPI_BYTE, (me + 1) % size, 1, MPI_COMM_WORLD);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(buffer[0] == 'x');
}

static void creation_times_out(lg_comm *unused)
{
    (void)unused;
    MPI_Comm part; /* so that MPI_COMM_WORLD has no collective left open */
    MPI_Comm_split(MPI_COMM_WORLD, 0, me, &part);
    lg_comm *c = NULL;
    lg_error err;
    if (me != 1) {
        CHECK_STATUS(lg_mpi_comm_create_within(part, SHORT_MS, &c, &err), LG_ERR_TIMEOUT, &err);
        CHECK_TEXT(&err, "ranks called lg_mpi_comm_create within 1000 ms");
        CHECK(c == NULL);
    }
    CHECK_STATUS(lg_mpi_comm_create(MPI_COMM_NULL, &c, &err), LG_ERR_INVALID, &err);
    CHECK_STATUS(lg_mpi_comm_create(part, NULL, NULL), LG_ERR_INVALID, &err);
}

static void many_one_after_the_other(lg_comm *unused)
{
    (void)unused;
    for (int k = 0; k < 50; k++) {
        lg_comm *c;
        lg_error err;
        lg_status st = lg_mpi_comm_create(MPI_COMM_WORLD, &c, &err);
        CHECK_STATUS(st, LG_OK, &err);
        if (st != LG_OK) {
            return;
        }
        rounds(c, k % 5, 100);
        lg_comm_free(c);
    }
}

static void two_groups(lg_comm *unused)
{
    (void)unused;
    MPI_Comm mine, both;
    lg_comm *c = NULL;
    lg_error err;
    MPI_Comm_split(MPI_COMM_WORLD, me == 0, me, &mine);
    MPI_Intercomm_create(mine, 0, MPI_COMM_WORLD, me == 0 ? 1 : 0, 1, &both);
    CHECK_STATUS(lg_mpi_comm_create(both, &c, &err), LG_ERR_INVALID, &err);
    CHECK_TEXT(&err, "intercommunicator has no single set of ranks");
    CHECK(c == NULL);
    MPI_Comm_free(&both);
    MPI_Comm_free(&mine);
}

/* A communicator that outlived MPI is refused, and can be freed. */
static void after_mpi(lg_comm *c)
{
    lg_error err;
    for (int i = 0; i < 2; i++) {
        CHECK_STATUS(lg__comm_barrier(c, LONG_MS, &err), i == 0 || size == 1 ? LG_ERR_STATE : LG_ERR_COMM, &err);
        CHECK_TEXT(&err, "MPI_Finalize was called before the communicator was freed");
    }
    lg_comm_free(c);
    CHECK_STATUS(lg_mpi_comm_create(MPI_COMM_WORLD, &c, &err), LG_ERR_STATE, &err);
    CHECK_TEXT(&err, "MPI_Finalize were called");
}

static const scenario scenarios[] = {
    {"all calls move the bytes, empty and small, 100 in a row", 1, moves_small},
    {"K16: all calls move the bytes, large", 1, moves_large},
    {"messages do not mix with the trainer's own", 1, does_not_mix},
    {"communicators can be made and freed one after the other", 1, many_one_after_the_other},
    {"K06: ranks that do not arrive are named on all others, and learn it themselves", 2, late_rank},
    {"K06: a late rank 0 is named on all others", 2, late_rank_zero},
    {"K06: a rank 0 that comes when others have just given up is named on all", 2, rank_zero_in_the_grace},
    {"K06: the first deadline of any rank ends the wait of all", 3, first_deadline_counts},
    {"K06: ranks in different calls are named with their calls, on all", 2, other_call},
    {"K06: broadcasts from different ranks are told apart", 2, other_root},
    {"K06: one rank's error reaches all, and the communicator goes on", 2, error_reaches_all},
    {"K16: sizes beyond the address space fail on all", 2, sizes_too_large},
    {"K06: a rank without memory for a result is named on all within one further call", 2, no_memory_for_the_result},
    {"K06: a rank without memory for its part is named on all", 2, no_memory_for_a_part},
    {"K06: rank 0 without memory for its part is named on all", 2, no_memory_for_a_part_on_zero},
    {"calls from another than the main thread are refused", 1, wrong_thread},
    {"ranks of two groups have no communicator", 2, two_groups},
    {"K06 F103: creation that not all ranks call times out", 2, creation_times_out},
};

int main(int argc, char **argv)
{
    lg_comm *c = NULL;
    lg_error err;
    int level, bad = 0;
    CHECK_STATUS(lg_mpi_comm_create(MPI_COMM_WORLD, &c, &err), LG_ERR_STATE, &err);
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    bad = run_scenarios(scenarios, (int)(sizeof scenarios / sizeof scenarios[0]));
    CHECK_STATUS(lg_mpi_comm_create(MPI_COMM_WORLD, &c, &err), LG_OK, &err);
    MPI_Finalize();
    after_mpi(c);
    return bad != 0 || failures != 0;
}
