/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

const bench_row_kind bench_rows[N_ROWS] = {
    [ROW_RAW_WRITE] = {"raw_write", "raw write", NO_ROW},
    [ROW_RAW_READ] = {"raw_read", "raw read", NO_ROW},
    [ROW_RAW_TENSOR] = {"raw_read_16m", "raw read of 16 MiB", NO_ROW},
    [ROW_RAW_SLICE] = {"raw_read_64k", "raw read of 64 KiB", NO_ROW},
    [ROW_COPY_N] = {"memcpy_n", "memcpy, n threads", NO_ROW},
    [ROW_COPY_1] = {"memcpy_1", "memcpy, 1 thread", NO_ROW},
    [ROW_SAVE] = {"save", "save, durable", ROW_RAW_WRITE},
    [ROW_ASYNC] = {"async_save", "async save, durable", ROW_RAW_WRITE},
    [ROW_STALL_EAGER] = {"stall_eager", "stall, eager", ROW_COPY_N},
    [ROW_STALL_LAZY] = {"stall_lazy", "stall, lazy", NO_ROW},
    [ROW_FENCE] = {"fence", "fence at once, lazy", ROW_COPY_N},
    [ROW_LOAD_COLD] = {"load_cold", "load, cold", ROW_RAW_READ},
    [ROW_LOAD_WARM] = {"load_warm", "load, warm", ROW_COPY_N},
    [ROW_TENSOR] = {"tensor_16m", "16 MiB tensor, cold", ROW_RAW_TENSOR},
    [ROW_SLICE] = {"slice_64k", "64 KiB of it, cold", ROW_RAW_SLICE},
    [ROW_VERIFY_1] = {"verify_1", "verify, 1 thread", ROW_COPY_1},
    [ROW_VERIFY_N] = {"verify_n", "verify, n threads", ROW_COPY_N},
};

const char *bench_verdict_name(bench_verdict verdict)
{
    static const char *const names[N_BENCH_VERDICTS] = {"near", "below", "not resolved"};
    return names[verdict];
}

static double seconds_of(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

bench_sample bench_now(void)
{
    return (bench_sample){seconds_of(CLOCK_MONOTONIC), seconds_of(CLOCK_PROCESS_CPUTIME_ID)};
}

bench_sample bench_since(bench_sample start)
{
    bench_sample end = bench_now();
    return (bench_sample){end.seconds - start.seconds, end.cpu - start.cpu};
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median_of(double *values, size_t n)
{
    qsort(values, n, sizeof *values, compare);
    return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* The interval by bootstrap over the rounds, with a fixed seed: the same figures
 * give the same interval. */
bench_estimate bench_estimate_of(const double *values, size_t n)
{
    enum { DRAWS = 2000 };
    static double medians[DRAWS];
    double drawn[BENCH_MAX_ROUNDS];
    memcpy(drawn, values, n * sizeof *values);
    bench_estimate e;
    e.median = median_of(drawn, n);
    e.low = drawn[0];
    e.high = drawn[n - 1];
    if (n < BENCH_RESOLVING_ROUNDS) {
        return e;
    }
    uint64_t seed = 1;
    for (size_t i = 0; i < DRAWS; i++) {
        for (size_t k = 0; k < n; k++) {
            seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            drawn[k] = values[(seed >> 33) % n];
        }
        medians[i] = median_of(drawn, n);
    }
    qsort(medians, DRAWS, sizeof *medians, compare);
    e.low = medians[DRAWS / 40];
    e.high = medians[DRAWS - 1 - DRAWS / 40];
    return e;
}

static double rate_at(const bench_samples *s, bench_row row, size_t round)
{
    double seconds = s->at[row][round].seconds;
    return (double)s->bytes[row] / (seconds > 1e-9 ? seconds : 1e-9);
}

static bench_verdict judge(const bench_estimate *ratio, size_t n)
{
    bool narrow = ratio->high - ratio->low <= 0.2 * ratio->median;
    if (n < BENCH_RESOLVING_ROUNDS) {
        return BENCH_NOT_RESOLVED;
    }
    if (ratio->low >= BENCH_NEAR || (narrow && ratio->median >= BENCH_NEAR)) {
        return BENCH_IS_NEAR;
    }
    return ratio->high < BENCH_NEAR || narrow ? BENCH_IS_BELOW : BENCH_NOT_RESOLVED;
}

bench_summary bench_summarise(const bench_samples *s, bench_row row)
{
    double values[BENCH_MAX_ROUNDS];
    bench_summary out = {.cpu = NAN};
    for (size_t i = 0; i < s->n; i++) {
        values[i] = s->at[row][i].seconds;
    }
    out.seconds = bench_estimate_of(values, s->n);
    out.rate = (double)s->bytes[row] / (out.seconds.median > 1e-9 ? out.seconds.median : 1e-9);
    if (!isnan(s->at[row][0].cpu)) {
        for (size_t i = 0; i < s->n; i++) {
            values[i] = s->at[row][i].cpu;
        }
        out.cpu = median_of(values, s->n);
    }
    bench_row limit = bench_rows[row].limit;
    if (limit != NO_ROW && s->have[limit]) {
        for (size_t i = 0; i < s->n; i++) {
            values[i] = rate_at(s, row, i) / rate_at(s, limit, i);
        }
        out.has_ratio = true;
        out.ratio = bench_estimate_of(values, s->n);
        out.verdict = judge(&out.ratio, s->n);
    }
    return out;
}
