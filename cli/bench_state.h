/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_BENCH_STATE_H
#define LG_CLI_BENCH_STATE_H

/* A state to save: F32 tensors with rows of 4 KiB, the first of 16 MiB, the others
 * equal, one after the other in memory that is used for saving and for loading
 * (K07: nothing doubles it). With several ranks each holds some rows of every tensor;
 * ranks are threads.
 *
 * Its contents are a function of a seed, so that what was loaded can be checked
 * against nothing but the seed. */

#include "bench_rows.h"

typedef struct bench_plan {
    uint64_t bytes;        /* as asked; the state is at most this, rounded */
    size_t tensors;        /* at least 2 */
    unsigned rounds;       /* that count; one more comes before */
    uint32_t ranks;        /* threads */
    uint64_t buffer_bytes; /* lg_session_options.buffer_bytes; 0: the library's choice */
    unsigned threads;      /* of memcpy and verify, "n" */
} bench_plan;

typedef struct bench_state bench_state;

/* Makes the state, and opens a session in `root` on every rank. */
lg_status bench_state_open(const bench_plan *plan, const char *root, bench_state **out, lg_error *err);
lg_status bench_state_close(bench_state *s, lg_error *err);

uint64_t bench_state_bytes(const bench_state *s);
/* The memory, aligned to 4096 and as long as bench_state_room says: the bytes rounded
 * up to 1 MiB. */
char *bench_state_data(bench_state *s);
uint64_t bench_state_room(const bench_state *s);

void bench_state_fill(bench_state *s, uint64_t seed);

/* From describing the tensors until the checkpoint is durable on all ranks. */
lg_status bench_save(bench_state *s, bench_sample *out, lg_error *err);

/* Opens the newest checkpoint and loads all of it, each rank its part, into memory
 * that was spoiled before; compares with what the last fill wrote. */
lg_status bench_load(bench_state *s, bench_sample *out, lg_error *err);

/* The same for BENCH_TENSOR_BYTES or less of the first tensor, by one process,
 * into memory of its own. */
lg_status bench_load_part(bench_state *s, uint64_t first_row, uint64_t rows, bench_sample *out, lg_error *err);

#define BENCH_ROW_BYTES UINT64_C(4096)

/* lg_verify of the newest checkpoint. */
lg_status bench_verify(bench_state *s, unsigned threads, bench_sample *out, lg_error *err);

typedef struct bench_async_times {
    bench_sample returned; /* lg_save_begin to the return of lg_save_launch; the slowest rank */
    bench_sample fence;    /* lazy: lg_session_fence, called at once */
    bench_sample durable;  /* lg_save_begin until the checkpoint is durable */
} bench_async_times;

/* Saves in the background; lazy: all tensors may be copied after the launch. */
lg_status bench_async(bench_state *s, bool lazy, bench_async_times *out, lg_error *err);

#endif
