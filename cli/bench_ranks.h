/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_BENCH_RANKS_H
#define LG_CLI_BENCH_RANKS_H

/* Inside of bench_state.c and bench_async.c: the ranks of a state. */

#include "bench_state.h"

typedef struct bench_rank {
    bench_state *s;
    uint32_t rank;
    lg_comm *comm;
    lg_session *session;
    lg_layout *layout; /* NULL with one rank */
    bench_sample began, returned, fenced, ended;
    lg_status status;
    lg_error error;
} bench_rank;

typedef lg_status (*bench_rank_fn)(bench_rank *r, void *arg, lg_error *err);

/* Runs fn on every rank at once, each in its own thread (one rank: in this one),
 * and waits for all. The first rank's error, if any has one. */
lg_status bench_on_ranks(bench_state *s, bench_rank_fn fn, void *arg, lg_error *err);

uint32_t bench_ranks(const bench_state *s);
bench_rank *bench_rank_at(bench_state *s, uint32_t rank);

/* From the first rank's begin to the last one's end. `start` is when the call
 * began, for the processor time of all. */
bench_sample bench_span(const bench_state *s, bench_sample start);

/* Before each save: steps count up. */
void bench_next_step(bench_state *s);

/* Begins a save of that step and describes this rank's part of the state. A
 * tensor that cannot be added fails the save when it is committed, on all ranks. */
lg_status bench_describe(bench_rank *r, uint32_t flags, lg_save **out, lg_error *err);

#endif
