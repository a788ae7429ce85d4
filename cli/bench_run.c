/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_run.h"

#include "bench_place.h"
#include "bench_raw.h"
#include "progress.h"
#include "text.h"

#include <math.h>
#include <stdlib.h>

#define PARTS 5 /* reads of a part in one round; their median counts */

typedef struct bench_runner {
    bench_state *state;
    char *root, *raw; /* the checkpoints; the raw file */
    unsigned round;   /* 0 warms up */
    bench_result *to;
} runner;

typedef lg_status (*step_fn)(runner *r, lg_error *err);

typedef struct step {
    const char *name;
    step_fn fn;
} step;

static void take(runner *r, bench_row row, bench_sample sample, uint64_t bytes)
{
    bench_samples *s = &r->to->samples;
    if (r->round > 0) {
        s->at[row][r->round - 1] = sample;
        s->bytes[row] = bytes;
        s->have[row] = true;
    }
}

static void drop_cache(runner *r) { r->to->cold_left = fmax(r->to->cold_left, bench_cache_drop(r->root)); }

/* ------------------------------------------------------------------- saving */

static lg_status raw_write(runner *r, lg_error *err)
{
    bench_sample took;
    uint64_t bytes = bench_state_room(r->state);
    lg_status status = bench_raw_write(r->raw, bench_state_data(r->state), bytes, r->to->direct, &took, err);
    if (status == LG_OK) {
        take(r, ROW_RAW_WRITE, took, bytes);
    }
    return status;
}

/* The checkpoint before goes first, so that there is never more than one. */
static lg_status save(runner *r, lg_error *err)
{
    bench_sample took;
    lg_status status = bench_steps_remove(r->root, err);
    if (status == LG_OK) {
        status = bench_save(r->state, &took, err);
    }
    if (status == LG_OK) {
        take(r, ROW_SAVE, took, r->to->bytes);
    }
    return status;
}

static lg_status save_eager(runner *r, lg_error *err)
{
    bench_async_times took;
    lg_status status = bench_steps_remove(r->root, err);
    if (status == LG_OK) {
        status = bench_async(r->state, false, &took, err);
    }
    if (status == LG_OK) {
        take(r, ROW_ASYNC, took.durable, r->to->bytes);
        take(r, ROW_STALL_EAGER, took.returned, r->to->bytes);
    }
    return status;
}

static lg_status save_lazy(runner *r, lg_error *err)
{
    bench_async_times took;
    lg_status status = bench_steps_remove(r->root, err);
    if (status == LG_OK) {
        status = bench_async(r->state, true, &took, err);
    }
    if (status == LG_OK) {
        take(r, ROW_STALL_LAZY, took.returned, r->to->bytes);
        take(r, ROW_FENCE, took.fence, r->to->bytes);
    }
    return status;
}

/* ------------------------------------------------------------------ loading */

static lg_status raw_read(runner *r, lg_error *err)
{
    bench_sample took;
    uint64_t bytes = bench_state_room(r->state);
    if (!r->to->direct) {
        bench_raw_drop(r->raw);
    }
    lg_status status = bench_raw_read(r->raw, 0, bytes, r->to->direct, &took, err);
    if (status == LG_OK) {
        take(r, ROW_RAW_READ, took, bytes);
    }
    return status;
}

static lg_status load_cold(runner *r, lg_error *err)
{
    bench_sample took;
    drop_cache(r);
    lg_status status = bench_load(r->state, &took, err);
    if (status == LG_OK) {
        take(r, ROW_LOAD_COLD, took, r->to->bytes);
    }
    return status;
}

static int faster(const void *a, const void *b)
{
    double x = ((const bench_sample *)a)->seconds, y = ((const bench_sample *)b)->seconds;
    return x < y ? -1 : x > y;
}

/* Places that differ within a round and from round to round, in rows. */
static uint64_t place_of(const runner *r, unsigned i, uint64_t rows) { return (r->round * PARTS + i) * 769 % rows; }

/* A part of the raw file, or of the first tensor, read cold at several places. */
static lg_status read_parts(runner *r, bench_row row, bool raw, uint64_t bytes, lg_error *err)
{
    bench_sample took[PARTS];
    lg_status status = LG_OK;
    uint64_t rows = bytes / BENCH_ROW_BYTES;
    uint64_t spare = (raw ? bench_state_room(r->state) : BENCH_TENSOR_BYTES) / BENCH_ROW_BYTES - rows + 1;
    for (unsigned i = 0; i < PARTS && status == LG_OK; i++) {
        uint64_t at = place_of(r, i, spare);
        if (raw) {
            if (!r->to->direct) {
                bench_raw_drop(r->raw);
            }
            status = bench_raw_read(r->raw, at * BENCH_ROW_BYTES, bytes, r->to->direct, &took[i], err);
        } else {
            drop_cache(r);
            status = bench_load_part(r->state, at, rows, &took[i], err);
        }
    }
    if (status == LG_OK) {
        qsort(took, PARTS, sizeof *took, faster);
        take(r, row, took[PARTS / 2], bytes);
    }
    return status;
}

static lg_status raw_tensor(runner *r, lg_error *err)
{
    return read_parts(r, ROW_RAW_TENSOR, true, BENCH_TENSOR_BYTES, err);
}

static lg_status one_tensor(runner *r, lg_error *err)
{
    return read_parts(r, ROW_TENSOR, false, BENCH_TENSOR_BYTES, err);
}

static lg_status raw_slice(runner *r, lg_error *err)
{
    return read_parts(r, ROW_RAW_SLICE, true, BENCH_SLICE_BYTES, err);
}

static lg_status one_slice(runner *r, lg_error *err) { return read_parts(r, ROW_SLICE, false, BENCH_SLICE_BYTES, err); }

/* ------------------------------------------------------------------- memory */

/* Half of the state over the other half, twice: as many bytes as the state has, and
 * no memory beside it. Whatever comes next fills or loads it anew. */
static lg_status copy_with(runner *r, bench_row row, unsigned threads, lg_error *err)
{
    size_t half = bench_state_room(r->state) / 2;
    char *data = bench_state_data(r->state);
    bench_sample there, back;
    lg_status status = bench_copy(data + half, data, half, threads, &there, err);
    if (status == LG_OK) {
        status = bench_copy(data, data + half, half, threads, &back, err);
    }
    if (status == LG_OK) {
        take(r, row, (bench_sample){there.seconds + back.seconds, there.cpu + back.cpu}, 2 * half);
    }
    return status;
}

static lg_status copy_1(runner *r, lg_error *err) { return copy_with(r, ROW_COPY_1, 1, err); }
static lg_status copy_n(runner *r, lg_error *err) { return copy_with(r, ROW_COPY_N, r->to->plan.threads, err); }

static lg_status load_warm(runner *r, lg_error *err)
{
    bench_sample took;
    lg_status status = bench_cache_fill(r->root, err);
    if (status == LG_OK) {
        status = bench_load(r->state, &took, err);
    }
    if (status == LG_OK) {
        take(r, ROW_LOAD_WARM, took, r->to->bytes);
    }
    return status;
}

static lg_status verify_with(runner *r, bench_row row, unsigned threads, lg_error *err)
{
    bench_sample took;
    lg_status status = bench_cache_fill(r->root, err);
    if (status == LG_OK) {
        status = bench_verify(r->state, threads, &took, err);
    }
    if (status == LG_OK) {
        take(r, row, took, r->to->bytes);
    }
    return status;
}

static lg_status verify_1(runner *r, lg_error *err) { return verify_with(r, ROW_VERIFY_1, 1, err); }
static lg_status verify_n(runner *r, lg_error *err) { return verify_with(r, ROW_VERIFY_N, r->to->plan.threads, err); }

/* ------------------------------------------------------------------- rounds */

#define GROUP_MAX 5

/* Within a group each step may be the first one. What a later group reads, an
 * earlier one has left. With one thread the two last steps say all. */
static const step groups[][GROUP_MAX] = {
    {{"raw write", raw_write}, {"save", save}, {"async save", save_eager}, {"async save, lazy", save_lazy}},
    {{"raw read", raw_read}, {"cold load", load_cold}},
    {{"raw read of 16 MiB", raw_tensor}, {"one tensor", one_tensor}},
    {{"raw read of 64 KiB", raw_slice}, {"64 KiB", one_slice}},
    {{"memcpy", copy_n}, {"warm load", load_warm}, {"verify", verify_n}, {"memcpy", copy_1}, {"verify", verify_1}},
};
#define N_GROUPS (sizeof groups / sizeof *groups)

static unsigned steps_in(const runner *r, size_t group)
{
    unsigned n = 0;
    while (n < GROUP_MAX && groups[group][n].name != NULL) {
        n++;
    }
    return group + 1 == N_GROUPS && r->to->plan.threads == 1 ? 3 : n;
}

static lg_status run_round(runner *r, unsigned *done, unsigned total, lg_error *err)
{
    lg_status status = LG_OK;
    for (size_t g = 0; g < N_GROUPS && status == LG_OK; g++) {
        unsigned n = steps_in(r, g);
        if (g == 0) {
            bench_state_fill(r->state, r->round + 1);
        }
        for (unsigned i = 0; i < n && status == LG_OK; i++) {
            const step *s = &groups[g][(i + r->round) % n];
            char what[80];
            if (r->round == 0) {
                snprintf(what, sizeof what, "warming up: %s", s->name);
            } else {
                snprintf(what, sizeof what, "round %u of %u: %s", r->round, r->to->plan.rounds, s->name);
            }
            progress_step(what, (*done)++, total);
            status = s->fn(r, err);
        }
    }
    return status;
}

static lg_status run_rounds(const cli *c, runner *r, lg_error *err)
{
    unsigned done = 0, total = 0;
    for (size_t g = 0; g < N_GROUPS; g++) {
        total += steps_in(r, g) * (r->to->plan.rounds + 1);
    }
    lg_status status = LG_OK;
    progress_begin(c, "benchmark");
    while (status == LG_OK && r->round <= r->to->plan.rounds) {
        status = run_round(r, &done, total, err);
        r->round++;
    }
    progress_end();
    return status;
}

lg_status bench_run(const cli *c, const bench_plan *plan, const char *folder, bench_result *out, lg_error *err)
{
    *out = (bench_result){.plan = *plan, .direct = bench_raw_direct(folder)};
    runner r = {.root = need_format("%s/checkpoints", folder), .raw = need_format("%s/raw", folder), .to = out};
    lg_status status = bench_state_open(plan, r.root, &r.state, err);
    if (status == LG_OK) {
        out->bytes = bench_state_bytes(r.state);
        status = run_rounds(c, &r, err);
        lg_error second = LG_ERROR_INIT;
        lg_status closed = bench_state_close(r.state, &second);
        if (status == LG_OK && closed != LG_OK) {
            status = closed;
            *err = second;
        }
    }
    out->samples.n = plan->rounds;
    free(r.root);
    free(r.raw);
    return status;
}
