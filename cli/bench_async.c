/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_ranks.h"

#include <math.h>

#define DEADLINE_MS UINT64_C(600000)

static lg_status launch_rank(bench_rank *r, void *arg, lg_error *err)
{
    bool lazy = *(const bool *)arg;
    lg_save *save = NULL;
    r->began = bench_now();
    lg_status status = bench_describe(r, lazy ? LG_TENSOR_LAZY : 0, &save, err);
    if (status == LG_OK) {
        status = lg_save_launch(save, NULL, NULL, err);
    }
    r->returned = bench_now();
    if (status == LG_OK) {
        status = lg_session_fence(r->session, DEADLINE_MS, err);
    }
    r->fenced = bench_now();
    if (status == LG_OK) {
        status = lg_session_wait(r->session, DEADLINE_MS, NULL, err);
    }
    r->ended = bench_now();
    return status;
}

lg_status bench_async(bench_state *s, bool lazy, bench_async_times *out, lg_error *err)
{
    bench_next_step(s);
    bench_sample start = bench_now();
    lg_status status = bench_on_ranks(s, launch_rank, &lazy, err);
    if (status != LG_OK) {
        return status;
    }
    out->durable = bench_span(s, start);
    /* What the background did meanwhile cannot be told apart from the trainer's own. */
    out->returned = out->fence = (bench_sample){0, NAN};
    for (uint32_t i = 0; i < bench_ranks(s); i++) {
        const bench_rank *r = bench_rank_at(s, i);
        out->returned.seconds = fmax(out->returned.seconds, r->returned.seconds - r->began.seconds);
        out->fence.seconds = fmax(out->fence.seconds, r->fenced.seconds - r->returned.seconds);
    }
    return LG_OK;
}
