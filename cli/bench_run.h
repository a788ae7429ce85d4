/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_BENCH_RUN_H
#define LG_CLI_BENCH_RUN_H

#include "bench_state.h"

typedef struct bench_result {
    bench_plan plan;
    uint64_t bytes;   /* of the state */
    bool direct;      /* the raw rows went past the page cache */
    double cold_left; /* the most of a file that was in the page cache when it should not */
    bench_samples samples;
} bench_result;

/* Measures in `folder`, which is the benchmark's own: one round to warm up, then
 * plan->rounds that count. In each round what is compared stands side by side, in an
 * order that changes from round to round. */
lg_status bench_run(const cli *c, const bench_plan *plan, const char *folder, bench_result *out, lg_error *err);

#endif
