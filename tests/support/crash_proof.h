/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_CRASH_PROOF_H
#define LG_TESTS_CRASH_PROOF_H

/* Sessions on a crash_store, and the proof that whatever a power cut leaves of
 * what they did, the next start is right: each tree that may be left (crash_disk.h;
 * equal ones once) is looked at, and started from by one rank and by several.
 * What is resumed must be the last step whose commit had returned, or one that
 * was being committed, with all its values; nothing is passed over, no other kept
 * checkpoint is lost, the next save works and is found by the one after it.
 *
 * It goes in rounds. The first makes all trees where there are few, else some of
 * them; each further one makes more, until all were made or the time is over.
 *
 * Fails the running test (cmocka) when something is wrong. */

#include "crash_disk.h"

#include <stdatomic.h>
#include <stdbool.h>

#define NONE UINT64_MAX
#define MAX_STEPS 32
#define WORLD_MAX 4

/* What the scenes say, with a step, in the record of a crash_store. */
enum {
    BEGUN = 1,      /* a step: its save was called */
    DONE,           /* … and returned */
    FAILED,         /* … and returned an error that says it will never be there */
    RESUMED,        /* from a step; NONE: a fresh start */
    ROLLBACK_BEGUN, /* to a step */
    ROLLBACK_DONE
};

/* ----------------------------------------------------------------- who acts */

typedef struct actor {
    crash_store *disk;                                             /* for marks; NULL: none */
    void (*tell)(uint32_t mark, uint64_t value, uint64_t session); /* the same for another record; NULL: none */
    uint64_t session;
    uint64_t steps[4];
    size_t n_steps;
    uint32_t keep_last;
    enum { COMMIT, LAUNCH_AND_WAIT, LAUNCH_ON } how;
    bool may_fail;
    bool dies;          /* what it says of its own failures is not heard */
    atomic_bool *ready; /* set before its first save; may be NULL */
    /* out */
    uint64_t resumed_from;
    size_t skipped;
    bool saved[4];
    lg_error last_error; /* of a save, on rank 0 */
} actor;

/* A whole session of `world` ranks. LG_OK, or the first error. */
lg_status act(actor *a, uint32_t world, lg_store *store, lg_error *err);
void must_act(actor *a, uint32_t world, lg_store *store);

/* ------------------------------------------------------------- the proof */

/* What is promised at a moment. */
typedef struct expect {
    uint64_t chain[MAX_STEPS]; /* committed, the newest last */
    size_t n;
    uint64_t may[MAX_STEPS]; /* may have been committed */
    size_t n_may;
    uint64_t begun[MAX_STEPS], done[MAX_STEPS];
    size_t n_begun, n_done;
    uint64_t session, resumed; /* the newest that resumed, and its mark */
    uint32_t keep_last;
    bool broken; /* a live session resumed from what was not there */
} expect;

typedef struct counts {
    uint64_t points, exhausted;           /* moments; those where all combinations were made */
    uint64_t more_points, more_exhausted; /* the same of starts that were cut again, each by one job */
    uint64_t made, states;                /* trees; different ones (with what is promised there) */
    uint64_t resumes;
    uint64_t older, newer, empty; /* what they found */
} counts;

/* After a word of a scene; and what must be true of a root then. */
void proof_hear(expect *e, const crash_event *mark);
uint64_t proof_newest(const expect *e); /* NONE: nothing */

typedef struct verdict {
    char why[LG_ERROR_MESSAGE_MAX + 200];
} verdict;

/* What is there is right, and a session of `world` ranks and then one of `then`
 * go on from it. False: `v` says why not. */
bool proof_check(const expect *e, lg_store *store, uint32_t world, uint32_t then, counts *c, verdict *v);

typedef struct seen {
    uint64_t *hash;
    size_t n, cap;
} seen;

typedef struct proof {
    const char *name;
    crash_store *disk;
    uint32_t caps, other_world;
    crash_effort effort;  /* of the first round; its `random` is the proof's own */
    crash_effort again;   /* of a start that is cut again */
    uint64_t again_every; /* start from each so-many-th state once more, and cut that; 0: from none */
    bool both;            /* from each state by one rank and by several; else by turns */
    bool every_moment;    /* else, in the first round, only right before what ends a choice */
    uint64_t seed;        /* of what is chosen */
    uint64_t until_ms;    /* of lg__now_ms: more rounds until then; 0: one round */
    uint32_t n_jobs;      /* processes that share the states */
    expect now;
    size_t at, from; /* events; no tree is looked at before `from` */
    /* while it runs */
    uint32_t job, round;
    bool hurried; /* `until_ms` holds in the first round too */
    bool late, failed;
    uint64_t random;
    seen all;
    counts c;
} proof;

void prove(proof *p, counts *total);

#endif
