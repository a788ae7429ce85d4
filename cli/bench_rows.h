/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_BENCH_ROWS_H
#define LG_CLI_BENCH_ROWS_H

/* What `lastgood bench` measures, and what follows from it.
 *
 *   cmd_bench.c       options; a child that works, a parent that cleans up
 *   bench_place.c     folder, space, memory, what machine this is
 *   bench_raw.c       the device by plain calls, memcpy, the page cache
 *   bench_state.c     a state on its ranks: save, load, verify
 *   bench_async.c     saving in the background
 *   bench_run.c       the rounds
 *   bench_rows.c      the rows, medians and intervals
 *   bench_report.c    table and JSON; bench_words.c: in words; bench_svg.c: picture */

#include "cli.h"

#define BENCH_MAX_ROUNDS 100
/* With fewer values the least and the greatest are no 95 % interval of the
 * median: 1 - 2 * 2^-5 is 0.94, 1 - 2 * 2^-6 is 0.97. */
#define BENCH_RESOLVING_ROUNDS 6

#define BENCH_TENSOR_BYTES (UINT64_C(16) << 20) /* the tensor that is read alone */
#define BENCH_SLICE_BYTES (UINT64_C(64) << 10)  /* and the part of it */

typedef enum bench_row {
    ROW_RAW_WRITE,
    ROW_RAW_READ,
    ROW_RAW_TENSOR,
    ROW_RAW_SLICE,
    ROW_COPY_N,
    ROW_COPY_1,
    ROW_SAVE,
    ROW_ASYNC,
    ROW_STALL_EAGER,
    ROW_STALL_LAZY,
    ROW_FENCE,
    ROW_LOAD_COLD,
    ROW_LOAD_WARM,
    ROW_TENSOR,
    ROW_SLICE,
    ROW_VERIFY_1,
    ROW_VERIFY_N,
    N_ROWS,
    NO_ROW = N_ROWS
} bench_row;

typedef struct bench_row_kind {
    const char *id;   /* in JSON */
    const char *name; /* in the table and the picture */
    bench_row limit;  /* what the row is held against, or NO_ROW */
} bench_row_kind;

extern const bench_row_kind bench_rows[N_ROWS];

typedef struct bench_sample {
    double seconds; /* by the clock */
    double cpu;     /* processor time of the process; NAN where it cannot be told apart */
} bench_sample;

bench_sample bench_now(void);
bench_sample bench_since(bench_sample start);

typedef struct bench_samples {
    size_t n;               /* rounds that count */
    bool have[N_ROWS];      /* measured at all */
    uint64_t bytes[N_ROWS]; /* moved by one measurement */
    bench_sample at[N_ROWS][BENCH_MAX_ROUNDS];
} bench_samples;

/* A median and its 95 % interval; with fewer than BENCH_RESOLVING_ROUNDS values
 * the least and the greatest. */
typedef struct bench_estimate {
    double median, low, high;
} bench_estimate;

/* Is the row near its limit: from BENCH_NEAR of the limit's speed on? The whole
 * interval of the ratio must lie on one side; or it lies across, is at most a fifth
 * of the median wide, and the median decides. Else that is not resolved, nor with
 * fewer than BENCH_RESOLVING_ROUNDS rounds. */
typedef enum bench_verdict { BENCH_IS_NEAR, BENCH_IS_BELOW, BENCH_NOT_RESOLVED, N_BENCH_VERDICTS } bench_verdict;

#define BENCH_NEAR 0.85

typedef struct bench_summary {
    bench_estimate seconds;
    double cpu;  /* median; NAN */
    double rate; /* bytes a second, by the median */
    bool has_ratio;
    bench_estimate ratio; /* speed over the limit's speed, round by round */
    bench_verdict verdict;
} bench_summary;

const char *bench_verdict_name(bench_verdict verdict); /* "near", "below", "not resolved" */

bench_estimate bench_estimate_of(const double *values, size_t n);
/* `row` was measured. */
bench_summary bench_summarise(const bench_samples *s, bench_row row);

#endif
