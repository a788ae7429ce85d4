/* SPDX-License-Identifier: Apache-2.0 */

/* An MPI program: tests/mpirun.sh 3 test_mpi_faults. An MPI that fails, that
 * keeps messages back, and messages that no lastgood of this version sends.
 *
 * The MPI functions of this file stand in front of MPI's own (its profiling
 * interface), and time stands still where a deadline is to pass, so that nothing
 * depends on how fast the machine is. */

#include "comm/mpi_wire.h"
#include "mpi_kit.h"

#include <stdlib.h>

/* ------------------------------------------------------------------- the clock */

/* Linked with --wrap=clock_gettime. */
static struct {
    bool still;
    uint64_t ms;
} now;

int __real_clock_gettime(clockid_t id, struct timespec *t);
int __wrap_clock_gettime(clockid_t id, struct timespec *t);
int __wrap_clock_gettime(clockid_t id, struct timespec *t)
{
    if (!now.still) {
        return __real_clock_gettime(id, t);
    }
    *t = (struct timespec){(time_t)(now.ms / 1000), (long)(now.ms % 1000) * 1000000};
    return 0;
}

static void stop_the_clock(void)
{
    now.still = true;
    now.ms = 1000000;
}

/* ------------------------------------------------------------- calls that fail */

typedef enum fault {
    NO_FAULT,
    FAIL_ISEND,
    FAIL_IPROBE,
    FAIL_IMPROBE, /* of those that find a message */
    FAIL_GET_COUNT,
    FAIL_IMRECV,
    FAIL_TEST, /* of those that find something done */
    FAIL_IDUP,
    FAIL_ERRHANDLER,
    FAIL_MALLOC,
    FAIL_CALLOC,
} fault;

static struct {
    fault kind;
    unsigned nth, seen; /* from 1 on */
    bool all_later;     /* too */
    bool fired;
} plan;

static bool fails(fault kind)
{
    if (plan.kind != kind) {
        return false;
    }
    plan.seen++;
    bool yes = plan.seen == plan.nth || (plan.all_later && plan.seen > plan.nth);
    plan.fired = plan.fired || yes;
    return yes;
}

static void plan_fault(fault kind, unsigned nth, bool all_later)
{
    plan.nth = nth;
    plan.seen = 0;
    plan.all_later = all_later;
    plan.fired = false;
    plan.kind = kind;
}

/* Linked with --wrap=malloc and --wrap=calloc. */
void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes) { return fails(FAIL_MALLOC) ? NULL : __real_malloc(bytes); }
void *__real_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes) { return fails(FAIL_CALLOC) ? NULL : __real_calloc(n, bytes); }

/* ----------------------------------------------------------- messages kept back */

static struct {
    int never_sent;  /* a message with this tag is taken and goes nowhere … */
    int never_done;  /* … or is under way, in or out, for ever */
    bool until_down; /* never_done: until a result has come */
    MPI_Request held[8];
    unsigned n_held;
    int last_tag; /* of the message that was last found */
    /* So many looks in vain, and the clock jumps; 0: it does not. */
    unsigned patience, looks;
    uint64_t jump_ms;
    int looks_for;   /* a message with this tag; 0: the end of what is held */
    bool after_down; /* looks count once a result has come */
    bool down;
} net;

static void looked_in_vain(int tag)
{
    if (net.patience > 0 && tag == net.looks_for && (net.down || !net.after_down) && ++net.looks == net.patience) {
        now.ms += net.jump_ms;
    }
}

static void hold(MPI_Request request)
{
    if (net.n_held < sizeof net.held / sizeof net.held[0]) {
        net.held[net.n_held++] = request;
    }
}

static bool is_held(MPI_Request request)
{
    for (unsigned i = 0; i < net.n_held; i++) {
        if (net.held[i] == request) {
            return true;
        }
    }
    return false;
}

/* Rank 0 hears rank 1 arrive, and then nothing until rank 1 has given up and
 * rank 2 has come. */
static struct {
    enum { HEARS_ALL, FIRST_RANK_ONE, THEN_BOTH } phase;
} deaf;

static bool is_there(int from, int tag, MPI_Comm comm)
{
    int flag = 0;
    PMPI_Iprobe(from, tag, comm, &flag, MPI_STATUS_IGNORE);
    return flag != 0;
}

/* -------------------------------------------------- messages that are different */

static struct {
    int tag; /* 0: none is changed */
    void (*change)(lg__mpi_message *m, int *bytes);
    int copies;
} forger;

/* ------------------------------------------------------------ in front of MPI */

int MPI_Isend(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request)
{
    static struct {
        lg__mpi_message m;
        char more[4096];
    } forged;
    if (fails(FAIL_ISEND)) {
        return MPI_ERR_OTHER;
    }
    if (net.never_sent == tag) { /* a request that never ends: nobody sends with this tag */
        static char nothing;
        int rc = PMPI_Irecv(&nothing, 1, MPI_BYTE, 0, 1000, MPI_COMM_SELF, request);
        hold(*request);
        return rc;
    }
    if (forger.tag != 0 && forger.tag == tag) {
        int bytes = count;
        memset(&forged, 0, sizeof forged);
        memcpy(&forged, data, (size_t)count);
        if (forger.change != NULL) {
            forger.change(&forged.m, &bytes);
        }
        forger.tag = 0;
        for (int i = 1; i < forger.copies; i++) {
            PMPI_Send(&forged, bytes, type, to, tag, comm);
        }
        PMPI_Send(&forged, bytes, type, to, tag, comm); /* small enough to go at once */
        *request = MPI_REQUEST_NULL;
        return MPI_SUCCESS;
    }
    int rc = PMPI_Isend(data, count, type, to, tag, comm, request);
    if (net.never_done == tag) {
        hold(*request);
    }
    return rc;
}

int MPI_Iprobe(int from, int tag, MPI_Comm comm, int *flag, MPI_Status *status)
{
    return fails(FAIL_IPROBE) ? MPI_ERR_OTHER : PMPI_Iprobe(from, tag, comm, flag, status);
}

int MPI_Improbe(int from, int tag, MPI_Comm comm, int *flag, MPI_Message *message, MPI_Status *status)
{
    if (tag == LG__MPI_TAG_UP && deaf.phase == FIRST_RANK_ONE) {
        from = 1;
    } else if (tag == LG__MPI_TAG_UP && deaf.phase == THEN_BOTH) {
        if (!is_there(1, tag, comm) || !is_there(2, tag, comm)) {
            *flag = 0;
            return MPI_SUCCESS;
        }
        deaf.phase = HEARS_ALL;
    }
    int rc = PMPI_Improbe(from, tag, comm, flag, message, status);
    if (rc == MPI_SUCCESS && *flag) {
        if (fails(FAIL_IMPROBE)) {
            return MPI_ERR_OTHER;
        }
        net.last_tag = tag;
        if (tag == LG__MPI_TAG_UP && deaf.phase == FIRST_RANK_ONE) {
            deaf.phase = THEN_BOTH;
        }
        if (tag == LG__MPI_TAG_DOWN) {
            net.down = true;
            net.never_done = net.until_down ? 0 : net.never_done;
        }
    } else {
        looked_in_vain(tag);
    }
    return rc;
}

int MPI_Get_count(const MPI_Status *status, MPI_Datatype type, int *count)
{
    return fails(FAIL_GET_COUNT) ? MPI_ERR_OTHER : PMPI_Get_count(status, type, count);
}

int MPI_Imrecv(void *data, int count, MPI_Datatype type, MPI_Message *message, MPI_Request *request)
{
    if (fails(FAIL_IMRECV)) {
        return MPI_ERR_OTHER;
    }
    int rc = PMPI_Imrecv(data, count, type, message, request);
    if (net.never_done != 0 && net.never_done == net.last_tag) {
        hold(*request);
    }
    return rc;
}

int MPI_Test(MPI_Request *request, int *done, MPI_Status *status)
{
    bool never = (net.never_done != 0 || net.never_sent != 0) && is_held(*request);
    if (never) {
        *done = 0;
        looked_in_vain(0);
        return MPI_SUCCESS;
    }
    int rc = PMPI_Test(request, done, status);
    return rc == MPI_SUCCESS && *done && fails(FAIL_TEST) ? MPI_ERR_OTHER : rc;
}

int MPI_Comm_idup(MPI_Comm comm, MPI_Comm *out, MPI_Request *request)
{
    return fails(FAIL_IDUP) ? MPI_ERR_OTHER : PMPI_Comm_idup(comm, out, request);
}

int MPI_Comm_set_errhandler(MPI_Comm comm, MPI_Errhandler handler)
{
    return fails(FAIL_ERRHANDLER) ? MPI_ERR_OTHER : PMPI_Comm_set_errhandler(comm, handler);
}

static bool no_words; /* for any error */

int MPI_Error_string(int code, char *text, int *bytes)
{
    return no_words ? MPI_ERR_ARG : PMPI_Error_string(code, text, bytes);
}

/* As it should be again. */
static void repair(void)
{
    plan_fault(NO_FAULT, 0, false);
    memset(&net, 0, sizeof net);
    memset(&forger, 0, sizeof forger);
    deaf.phase = HEARS_ALL;
    now.still = false;
    no_words = false;
}

/* ----------------------------------------------------------------------- calls */

#define SMALL_BYTES 10
#define LARGE_BYTES 3000 /* more than travels with a head */

typedef enum call { BARRIER, SMALL_GATHER, LARGE_GATHER, BROADCAST, SMALL_PAIRS, LARGE_PAIRS } call;

static lg_status make(lg_comm *c, call what, lg_error *err)
{
    static unsigned char zeros[LARGE_BYTES];
    const uint32_t n = lg_comm_size(c);
    const size_t bytes = what == LARGE_GATHER || what == LARGE_PAIRS ? LARGE_BYTES : SMALL_BYTES;
    const void *send[MAX_RANKS];
    void *got[MAX_RANKS] = {NULL}, *data = zeros;
    size_t send_bytes[MAX_RANKS], sizes[MAX_RANKS], data_bytes = LARGE_BYTES;
    lg_status st;
    switch (what) {
    case BARRIER:
        return lg__comm_barrier(c, LONG_MS, err);
    case SMALL_GATHER:
    case LARGE_GATHER:
        st = lg__comm_all_gather(c, zeros, bytes, &got[0], sizes, LONG_MS, err);
        break;
    case BROADCAST:
        st = lg__comm_broadcast(c, &data, &data_bytes, 0, LONG_MS, err);
        got[0] = st == LG_OK && lg_comm_rank(c) != 0 ? data : NULL;
        CHECK(data_bytes == LARGE_BYTES);
        break;
    default:
        for (uint32_t r = 0; r < n; r++) {
            send[r] = zeros;
            send_bytes[r] = bytes;
        }
        st = lg__comm_all_to_all(c, send, send_bytes, got, sizes, LONG_MS, err);
        break;
    }
    for (uint32_t r = 0; r < n; r++) {
        CHECK(st == LG_OK || got[r] == NULL);
        lg_free(got[r]);
    }
    return st;
}

/* The failure that one rank had: all others hear of it, in this call or, if that
 * was over for them, in the next. */
static void all_hear(lg_comm *c, lg_status st, lg_error *err, const char *text)
{
    if (st == LG_OK) {
        st = lg__comm_barrier(c, LONG_MS, err);
    }
    CHECK(st != LG_OK);
    CHECK_TEXT(err, text);
    CHECK(lg__comm_barrier(c, LONG_MS, err) == LG_ERR_COMM);
    CHECK_TEXT(err, text);
}

static lg_comm *comm_of_two(void)
{
    MPI_Comm two;
    lg_comm *c = NULL;
    lg_error err;
    MPI_Comm_split(MPI_COMM_WORLD, me < 2 ? 0 : MPI_UNDEFINED, me, &two);
    if (me < 2) {
        CHECK_STATUS(lg_mpi_comm_create(two, &c, &err), LG_OK, &err);
        MPI_Comm_free(&two);
    }
    return c;
}

/* ------------------------------------------------------------------- scenarios */

static lg_status traffic(lg_comm *c, lg_error *err)
{
    static const call calls[] = {SMALL_GATHER, LARGE_GATHER, BROADCAST, SMALL_PAIRS, LARGE_PAIRS, BARRIER};
    lg_status st = LG_OK;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0] && st == LG_OK; i++) {
        st = make(c, calls[i], err);
    }
    return st;
}

/* Fails the first call of a kind on one rank, then the second, and so on. */
static void sweep(fault kind, int who, lg_status want, const char *text)
{
    int fired = 1;
    for (unsigned nth = 1; fired && failures == 0; nth++) {
        lg_comm *c = NULL;
        lg_error err;
        char failed[32];
        CHECK_STATUS(lg_mpi_comm_create(MPI_COMM_WORLD, &c, &err), LG_OK, &err);
        if (me == who) {
            plan_fault(kind, nth, false);
        }
        lg_status st = traffic(c, &err);
        fired = plan.fired;
        repair();
        MPI_Bcast(&fired, 1, MPI_INT, who, MPI_COMM_WORLD);
        if (fired) {
            snprintf(failed, sizeof failed, "rank %d failed in ", who);
            if (me == who) {
                CHECK_STATUS(st, want, &err);
                CHECK_TEXT(&err, text);
                CHECK(err.rank == who);
            } else {
                CHECK(st == LG_OK || st == LG_ERR_PEER);
            }
            all_hear(c, st, &err, failed);
        } else {
            CHECK_STATUS(st, LG_OK, &err);
            CHECK(nth > 3); /* it did fail before */
        }
        sync_ranks();
        lg_comm_free(c);
        MPI_Allreduce(MPI_IN_PLACE, &failures, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    }
}

static void mpi_fails(lg_comm *unused)
{
    (void)unused;
    for (int who = 0; who < 2; who++) {
        sweep(FAIL_ISEND, who, LG_ERR_COMM, "MPI_Isend: ");
        sweep(FAIL_IMPROBE, who, LG_ERR_COMM, "MPI_Improbe: ");
        sweep(FAIL_GET_COUNT, who, LG_ERR_COMM, "MPI_Get_count: ");
        sweep(FAIL_IMRECV, who, LG_ERR_COMM, "MPI_Imrecv: ");
        sweep(FAIL_TEST, who, LG_ERR_COMM, "MPI_Test: ");
    }
}

static void no_memory(lg_comm *unused)
{
    (void)unused;
    for (int who = 0; who < 2; who++) {
        sweep(FAIL_MALLOC, who, LG_ERR_NOMEM, "out of memory");
        sweep(FAIL_CALLOC, who, LG_ERR_NOMEM, "out of memory");
    }
}

static void creation_fails(lg_comm *unused)
{
    (void)unused;
    static const struct {
        fault kind;
        unsigned times;
        lg_status want;
        const char *text;
        bool no_words;
    } cases[] = {{FAIL_IDUP, 1, LG_ERR_COMM, "MPI_Comm_idup: ", false},
                 {FAIL_IDUP, 1, LG_ERR_COMM, "MPI_Comm_idup: unknown MPI error", true},
                 {FAIL_TEST, 1, LG_ERR_COMM, "MPI_Comm_idup: ", false},
                 {FAIL_ERRHANDLER, 1, LG_ERR_COMM, "MPI_Comm_set_errhandler: ", false},
                 {FAIL_CALLOC, 3, LG_ERR_NOMEM, "out of memory", false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (unsigned nth = 1; nth <= cases[i].times; nth++) {
            lg_comm *c = NULL;
            lg_error err;
            no_words = cases[i].no_words;
            plan_fault(cases[i].kind, nth, false);
            CHECK_STATUS(lg_mpi_comm_create(MPI_COMM_WORLD, &c, &err), cases[i].want, &err);
            CHECK(plan.fired);
            repair();
            CHECK_TEXT(&err, cases[i].text);
            CHECK(c == NULL);
            sync_ranks();
        }
    }
    lg_comm *c = NULL;
    lg_error err;
    CHECK_STATUS(lg_mpi_comm_create(MPI_COMM_WORLD, &c, &err), LG_OK, &err);
    CHECK_STATUS(make(c, BARRIER, &err), LG_OK, &err);
    lg_comm_free(c);
}

/* One of two ranks waits for what is kept back, until its deadline and the time
 * that rank 0's word may take have passed. */
typedef struct keeping {
    call what;
    int never_sent, never_done;
    int by;        /* the rank that keeps it */
    int waits;     /* the rank whose clock jumps */
    int looks_for; /* see net */
    bool after_down;
    const char *text;
    int named; /* in the error of the one that waits */
} keeping;

static const keeping kept[] = {
    {LARGE_PAIRS, LG__MPI_TAG_PAIR_DATA, 0, 1, 0, LG__MPI_TAG_PAIR_DATA, false,
     "rank 1 did not finish within 60000 ms (rank 0 waited in all-to-all #1)", 1},
    {LARGE_PAIRS, LG__MPI_TAG_PAIR_DATA, 0, 1, 1, 0, false,
     "rank 0 did not finish within 60000 ms (rank 1 waited in all-to-all #1)", 0},
    {LARGE_PAIRS, 0, LG__MPI_TAG_PAIR_DATA, 0, 0, 0, false,
     "rank 1 did not finish within 60000 ms (rank 0 waited in all-to-all #1)", 1},
    {SMALL_PAIRS, LG__MPI_TAG_PAIR, 0, 1, 0, LG__MPI_TAG_PAIR, false,
     "rank 1 did not finish within 60000 ms (rank 0 waited in all-to-all #1)", 1},
    {BROADCAST, LG__MPI_TAG_DOWN_DATA, 0, 0, 0, 0, false,
     "rank 1 did not take the result within 60000 ms (rank 0 waited in broadcast #1 from rank 0)", 1},
    {BROADCAST, LG__MPI_TAG_DOWN_DATA, 0, 0, 1, LG__MPI_TAG_DOWN_DATA, false,
     "rank 0 did not finish sending the result within 60000 ms (rank 1 waited in broadcast #1 from rank 0)", 0},
    {LARGE_GATHER, 0, LG__MPI_TAG_UP_DATA, 1, 1, 0, true,
     "rank 0 did not answer within 60000 ms (rank 1 waited in all-gather #1)", 0},
    {BARRIER, 0, LG__MPI_TAG_UP, 0, 0, 0, false, "rank 1 stopped in the middle of a message for 60000 ms", 1},
};

static void messages_kept_back(lg_comm *unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
        const keeping *k = &kept[i];
        lg_comm *c = comm_of_two();
        lg_error err;
        if (c != NULL) {
            stop_the_clock();
            if (me == k->by) {
                net.never_sent = k->never_sent;
                net.never_done = k->never_done;
            }
            if (me == k->waits) {
                net.patience = 5;
                net.jump_ms = 2 * LONG_MS;
                net.looks_for = k->looks_for;
                net.after_down = k->after_down;
            }
            lg_status st = make(c, k->what, &err);
            repair();
            if (me == k->waits) {
                CHECK_STATUS(st, LG_ERR_TIMEOUT, &err);
                CHECK(err.rank == k->named);
            }
            all_hear(c, st, &err, k->text);
        }
        sync_ranks();
        lg_comm_free(c);
    }
}

/* A message that MPI calls sent only after the answer to it has come. */
static void sent_late(lg_comm *unused)
{
    (void)unused;
    lg_comm *c = comm_of_two();
    lg_error err;
    if (c != NULL) {
        net.never_done = me == 1 ? LG__MPI_TAG_UP_DATA : 0;
        net.until_down = true;
        CHECK_STATUS(make(c, LARGE_GATHER, &err), LG_OK, &err);
        CHECK(me == 0 || net.n_held == 1);
        repair();
        CHECK_STATUS(make(c, BARRIER, &err), LG_OK, &err);
    }
    sync_ranks();
    lg_comm_free(c);
}

/* Rank 1 gives up, and before rank 0 reads that the last rank has come: rank 1
 * gets its result in its grace, and nobody fails. */
static void in_the_grace(lg_comm *c)
{
    lg_error err;
    stop_the_clock();
    if (me == 0) {
        deaf.phase = FIRST_RANK_ONE;
    } else if (me == 1) {
        net.patience = 5;
        net.jump_ms = LONG_MS;
        net.looks_for = LG__MPI_TAG_DOWN;
    }
    CHECK_STATUS(make(c, BARRIER, &err), LG_OK, &err);
    CHECK(me != 0 || deaf.phase == HEARS_ALL);
    CHECK(me != 1 || net.looks >= net.patience);
    repair();
    CHECK_STATUS(traffic(c, &err), LG_OK, &err);
}

static void too_short(lg__mpi_message *m, int *bytes)
{
    (void)m;
    *bytes = 10;
}

static void too_long(lg__mpi_message *m, int *bytes)
{
    (void)m;
    *bytes = (int)sizeof *m + 1;
}

static void other_magic(lg__mpi_message *m, int *bytes)
{
    (void)bytes;
    m->h.magic++;
}

static void more_inline(lg__mpi_message *m, int *bytes)
{
    (void)bytes;
    m->h.bytes = 5;
}

static void other_kind(lg__mpi_message *m, int *bytes)
{
    (void)bytes;
    m->h.kind = LG__MPI_RESULT;
}

static void next_call(lg__mpi_message *m, int *bytes)
{
    (void)bytes;
    m->h.seq++;
}

static void other_op(lg__mpi_message *m, int *bytes)
{
    (void)bytes;
    m->h.op = 9;
}

static void no_sizes(lg__mpi_message *m, int *bytes)
{
    m->h.bytes = 3;
    *bytes = (int)sizeof m->h + 3;
}

static void first_size(lg__mpi_message *m, uint64_t n) { memcpy(m->data + m->h.bytes - 16, &n, sizeof n); }

static void size_too_large(lg__mpi_message *m, int *bytes)
{
    (void)bytes;
    first_size(m, 1000);
}

static void size_too_small(lg__mpi_message *m, int *bytes)
{
    (void)bytes;
    first_size(m, 1);
}

static void more_data(lg__mpi_message *m, int *bytes)
{
    (void)m;
    *bytes += 8;
}

typedef struct forgery {
    call what;
    int from, tag; /* to the other of two ranks */
    void (*change)(lg__mpi_message *m, int *bytes);
    int copies;
    lg_status want;
    const char *text;
} forgery;

static const forgery forgeries[] = {
    {BARRIER, 1, LG__MPI_TAG_UP, too_short, 1, LG_ERR_COMM, "rank 1 sent 10 bytes that are no message of lastgood"},
    {BARRIER, 0, LG__MPI_TAG_DOWN, too_short, 1, LG_ERR_COMM, "rank 0 sent 10 bytes that are no message of lastgood"},
    {BARRIER, 1, LG__MPI_TAG_UP, too_long, 1, LG_ERR_COMM, "bytes that are no message of lastgood"},
    {BARRIER, 1, LG__MPI_TAG_UP, other_magic, 1, LG_ERR_COMM,
     "rank 1 sent a message that another version of lastgood must have made"},
    {BARRIER, 1, LG__MPI_TAG_UP, more_inline, 1, LG_ERR_COMM,
     "rank 1 sent a message that another version of lastgood must have made"},
    {BARRIER, 1, LG__MPI_TAG_UP, other_kind, 1, LG_ERR_COMM, "rank 1 sent a message of kind 4 to rank 0"},
    {BARRIER, 1, LG__MPI_TAG_UP, next_call, 1, LG_ERR_COMM, "rank 1 is in call #2, out of step"},
    {BARRIER, 1, LG__MPI_TAG_UP, other_op, 1, LG_ERR_CONFLICT,
     "rank 1 called unknown call #1, but rank 0 called barrier #1"},
    {BARRIER, 0, LG__MPI_TAG_DOWN, next_call, 1, LG_ERR_COMM, "rank 0 answered call #2, out of step"},
    {SMALL_GATHER, 0, LG__MPI_TAG_DOWN, no_sizes, 1, LG_ERR_COMM, "a result of 3 bytes has no sizes"},
    {SMALL_GATHER, 0, LG__MPI_TAG_DOWN, size_too_large, 1, LG_ERR_COMM, "the sizes in a result do not add up"},
    {SMALL_GATHER, 0, LG__MPI_TAG_DOWN, size_too_small, 1, LG_ERR_COMM, "the sizes in a result do not add up"},
    {BROADCAST, 0, LG__MPI_TAG_DOWN_DATA, more_data, 1, LG_ERR_COMM, "rank 0 sent 3008 bytes where 3000 were left"},
    {BROADCAST, 0, LG__MPI_TAG_DOWN, NULL, 2, LG_ERR_COMM, "rank 0 answered twice"},
    {SMALL_PAIRS, 0, LG__MPI_TAG_DOWN, NULL, 2, LG_ERR_COMM, "rank 0 answered twice"},
    {SMALL_PAIRS, 0, LG__MPI_TAG_PAIR, next_call, 1, LG_ERR_COMM, "rank 0 sent its part of call #2, out of step"},
    {SMALL_PAIRS, 1, LG__MPI_TAG_PAIR, next_call, 1, LG_ERR_COMM, "rank 1 sent its part of call #2, out of step"},
    {LARGE_PAIRS, 1, LG__MPI_TAG_PAIR_DATA, more_data, 1, LG_ERR_COMM, "rank 1 sent 3008 bytes where 3000 were left"},
};

static void forge(const forgery *f, bool probes_fail)
{
    lg_comm *c = comm_of_two();
    lg_error err;
    if (c != NULL) {
        if (me == f->from) {
            forger.tag = f->tag;
            forger.change = f->change;
            forger.copies = f->copies;
        }
        if (probes_fail) {
            plan_fault(FAIL_IPROBE, 1, true);
        }
        lg_status st = make(c, f->what, &err);
        if (me != f->from) {
            CHECK_STATUS(st, f->want, &err);
            CHECK(plan.fired == probes_fail);
        }
        repair();
        all_hear(c, st, &err, f->text);
    }
    sync_ranks();
    lg_comm_free(c);
}

static void foreign_messages(lg_comm *unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof forgeries / sizeof forgeries[0]; i++) {
        forge(&forgeries[i], false);
    }
    /* MPI that fails altogether while the others are told */
    forge(&forgeries[0], true);
}

/* Freeing a communicator waits for no message for ever, and frees nothing that
 * MPI may still read. */
static void freed_too_early(lg_comm *unused)
{
    (void)unused;
    for (int stuck = 0; stuck < 2; stuck++) {
        lg_comm *c = NULL;
        lg_error err;
        CHECK_STATUS(lg_mpi_comm_create(MPI_COMM_WORLD, &c, &err), LG_OK, &err);
        net.never_done = !stuck ? 0 : me == 0 ? LG__MPI_TAG_DOWN : LG__MPI_TAG_UP;
        CHECK_STATUS(make(c, BARRIER, &err), LG_OK, &err);
        sync_ranks();
        if (stuck) {
            stop_the_clock();
            net.patience = 5;
            net.jump_ms = 1000;
        } else {
            plan_fault(FAIL_TEST, 1, true);
        }
        lg_comm_free(c);
        CHECK(stuck ? net.looks >= net.patience : plan.fired);
        repair();
    }
    lg_comm *c = NULL;
    lg_error err;
    CHECK_STATUS(lg_mpi_comm_create(MPI_COMM_WORLD, &c, &err), LG_OK, &err);
    CHECK_STATUS(traffic(c, &err), LG_OK, &err);
    lg_comm_free(c);
}

static const scenario scenarios[] = {
    {"K06: whichever MPI call fails on a rank, all are told, and none waits", 2, mpi_fails},
    {"K06: whichever allocation fails on a rank, all are told, and none waits", 2, no_memory},
    {"a communicator that cannot be made is reported, and the next one works", 2, creation_fails},
    {"K06: who does not finish a call is named on all", 2, messages_kept_back},
    {"a message may be sent later than it is answered", 2, sent_late},
    {"K06: a rank that has just given up gets its result if all have come", 3, in_the_grace},
    {"K06: messages that are none of this version's are refused, and all are told", 2, foreign_messages},
    {"a communicator can be freed with messages under way", 2, freed_too_early},
};

int main(int argc, char **argv)
{
    int level;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int bad = run_scenarios(scenarios, (int)(sizeof scenarios / sizeof scenarios[0]));
    MPI_Finalize();
    return bad != 0;
}
