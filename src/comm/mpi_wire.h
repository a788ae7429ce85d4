/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_COMM_MPI_WIRE_H
#define LG_COMM_MPI_WIRE_H

/* Ranks that talk by MPI. MPI's collectives cannot time out, so every call is
 * made of Isend, Improbe and Test, in a loop that looks at a clock.
 *
 * One call: each rank tells rank 0 that it ARRIVED, with its data. Once all
 * have, rank 0 sends the RESULT: straight to all when it is small, else down a
 * tree, whose ranks pass on what they have while the rest still comes. The
 * parts of an all-to-all then go directly from rank to rank.
 *
 * Failure: rank 0 alone judges, so that all say the same. When its deadline
 * passes, or another rank tells that it GAVE_UP, or that it FAILED in this or
 * an earlier call, rank 0 sends every rank a VERDICT that names the missing
 * ones; a late rank finds it when it comes. Others wait a little longer than
 * their deadline for the verdict, and if none comes, rank 0 is who is missing.
 * A rank that fails while results go down the tree, or parts go from rank to
 * rank, sends the verdict itself to those who may be waiting for it: rank 0 may
 * be through with the call.
 *
 * Memory: data of the caller is sent from buffers of our own, since a send that
 * is given up cannot be taken back: MPI may read the buffer later. What such a
 * send or receive may still touch is never freed, nor then is the
 * communicator's own memory or its MPI duplicate (the core makes no further
 * call to it). Nothing is lost but in a run that has failed.
 *
 * The library lastgood-mpi sees only the core's public symbols; so results come
 * from malloc itself, for lg_free. */

#include "comm/text.h"

#include <lastgood/backend.h>
#include <mpi.h>

#define LG__MPI_TRY(expr)       \
    do {                        \
        lg_status st_ = (expr); \
        if (st_ != LG_OK) {     \
            return st_;         \
        }                       \
    } while (0)

#define LG__MPI_CHUNK_BYTES ((uint64_t)1 << 20) /* of one MPI message; far below its int counts */
#define LG__MPI_INLINE_BYTES 2048               /* data that travels with a head; a verdict's text too */

enum {
    LG__MPI_TAG_UP = 1,
    LG__MPI_TAG_UP_DATA,
    LG__MPI_TAG_FAILED, /* to rank 0 */
    LG__MPI_TAG_DOWN,
    LG__MPI_TAG_DOWN_DATA,
    LG__MPI_TAG_PAIR,
    LG__MPI_TAG_PAIR_DATA
};

enum { LG__MPI_ARRIVED = 1, LG__MPI_GAVE_UP, LG__MPI_FAILED, LG__MPI_RESULT, LG__MPI_VERDICT, LG__MPI_PART };

/* All ranks run the same program on the same kind of machine: fields travel as
 * they are in memory. */
typedef struct lg__mpi_head {
    uint32_t magic;
    uint32_t kind;
    uint32_t op, root;
    int32_t status, rank; /* VERDICT and FAILED: of the error */
    uint64_t seq;         /* number of the call */
    uint64_t bytes;       /* of data; inline if they fit, else in chunks that follow */
    uint64_t waited_ms;   /* GAVE_UP */
} lg__mpi_head;

typedef struct lg__mpi_message {
    lg__mpi_head h;
    unsigned char data[LG__MPI_INLINE_BYTES];
} lg__mpi_message;

typedef struct lg__mpi_posted { /* a small message under way */
    struct lg__mpi_posted *next;
    MPI_Request request;
    lg__mpi_message m;
} lg__mpi_posted;

typedef struct lg__mpi_fabric {
    MPI_Comm comm;
    uint32_t rank, size;
    uint64_t seq;
    bool any_thread; /* calls may come from any thread */
    bool broken;
    lg__mpi_posted *posted;
    lg__mpi_message in;      /* the message just received */
    lg__mpi_message last[2]; /* what is told when it breaks; [1] for ranks that were missing */
} lg__mpi_fabric;

typedef struct lg__mpi_call {
    lg__mpi_fabric *f;
    lg__comm_op op;
    uint32_t root;
    uint64_t deadline_ms, begin_ms;
    uint32_t idle;  /* polls without progress */
    bool told;      /* all others know of the failure */
    bool passes_on; /* this rank's descendants wait for it */
    bool pairs;     /* parts go from rank to rank: all wait for all */
} lg__mpi_call;

/* ---- time and words */

uint64_t lg__mpi_now_ms(void);
/* The deadline has passed; so has the grace in which rank 0's verdict comes. */
bool lg__mpi_expired(const lg__mpi_call *c);
bool lg__mpi_expired_long(const lg__mpi_call *c);
/* Between two polls. Ranks often share cores with each other and with the
 * trainer: gives way first, for some milliseconds, since MPI moves large messages
 * only while it is called; then sleeps, up to 200 microseconds. *idle counts the
 * polls since something moved. */
void lg__mpi_rest(uint32_t *idle);
const char *lg__mpi_call_text(const lg__mpi_call *c, char out[LG__COMM_CALL_TEXT]);
lg_status lg__mpi_no_memory(lg_error *err);
lg_status lg__mpi_check(int rc, const char *what, lg_error *err);

/* ---- small messages */

lg__mpi_head lg__mpi_head_of(const lg__mpi_call *c, uint32_t kind, uint64_t bytes);
/* Sends head and inline data from memory of its own; done when MPI likes. */
lg_status lg__mpi_post(lg__mpi_fabric *f, uint32_t to, int tag, const lg__mpi_head *h, const void *data, size_t bytes,
                       lg_error *err);
/* Head and, if they fit, data. */
lg_status lg__mpi_post_head(const lg__mpi_call *c, uint32_t to, int tag, uint32_t kind, const void *data,
                            uint64_t bytes, lg_error *err);
/* Frees what is sent. */
lg_status lg__mpi_reap(lg__mpi_fabric *f, lg_error *err);
/* Takes one small message into f->in, if there is one. */
lg_status lg__mpi_take(lg__mpi_call *c, int from, int tag, bool *got, int *source, lg_error *err);

/* ---- streams */

/* Data in chunks to one rank. With `stage` from there, else right from `p`,
 * which then is memory of ours. */
typedef struct lg__mpi_outflow {
    uint32_t to;
    int tag;
    const unsigned char *p;
    uint64_t bytes, sent, flying;
    unsigned char *stage;
    MPI_Request request;
    bool active;
} lg__mpi_outflow;

bool lg__mpi_out_done(const lg__mpi_outflow *o);
/* Gives o its stage. */
lg_status lg__mpi_out_stage(lg__mpi_outflow *o, lg_error *err);
/* Goes on; the first `available` bytes are there. */
lg_status lg__mpi_out_poll(lg__mpi_call *c, lg__mpi_outflow *o, uint64_t available, lg_error *err);
/* True if MPI may still read the memory: never free it then. */
bool lg__mpi_out_end(lg__mpi_outflow *o);

typedef struct lg__mpi_inflow {
    uint32_t from;
    int tag;
    unsigned char *p;
    uint64_t bytes, got, flying;
    MPI_Request request;
    bool active;
} lg__mpi_inflow;

bool lg__mpi_in_done(const lg__mpi_inflow *i);
lg_status lg__mpi_in_poll(lg__mpi_call *c, lg__mpi_inflow *i, lg_error *err);
/* True if MPI may still write to the memory: never free it then. */
bool lg__mpi_in_end(lg__mpi_inflow *i);

#endif
