/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_state.h"

#include "bench_ranks.h"
#include "bench_raw.h"
#include "text.h"

#include <lastgood/backend.h>

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ROW_FLOATS (BENCH_ROW_BYTES / 4)

struct bench_state {
    const char *root;
    size_t n;
    uint64_t rows; /* of every tensor but the first */
    uint64_t bytes, room;
    char *data;
    uint64_t seed, step;
    uint32_t ranks;
    bench_rank *rank;
};

uint64_t bench_state_bytes(const bench_state *s) { return s->bytes; }
uint64_t bench_state_room(const bench_state *s) { return s->room; }
char *bench_state_data(bench_state *s) { return s->data; }
uint32_t bench_ranks(const bench_state *s) { return s->ranks; }
bench_rank *bench_rank_at(bench_state *s, uint32_t rank) { return &s->rank[rank]; }

/* ------------------------------------------------------------------ tensors */

static uint64_t rows_of(const bench_state *s, size_t i)
{
    return i == 0 ? BENCH_TENSOR_BYTES / BENCH_ROW_BYTES : s->rows;
}

static char *data_of(const bench_state *s, size_t i)
{
    return s->data + (i == 0 ? 0 : BENCH_TENSOR_BYTES + (i - 1) * s->rows * BENCH_ROW_BYTES);
}

typedef char tensor_name[48];

static const char *name_of(size_t i, tensor_name out)
{
    if (i == 0) {
        return memcpy(out, "embed.weight", sizeof "embed.weight");
    }
    snprintf(out, sizeof(tensor_name), "%slayers.%zu.weight", i % 3 == 1 ? "" : "optim.", i);
    return out;
}

/* The first of the rows that the rank holds. */
static lg_status first_row(const bench_rank *r, const uint64_t shape[2], uint64_t *row, lg_error *err)
{
    uint64_t offset[2] = {0, 0};
    lg_status status = LG_OK;
    if (r->layout != NULL) {
        status = lg_layout_offset(r->layout, r->rank, 2, shape, offset, err);
    }
    *row = offset[0];
    return status;
}

/* ----------------------------------------------------------------- contents */

/* No two words are alike, so that a file system that compresses gains nothing. */
static uint64_t word(uint64_t seed, uint64_t i)
{
    return (i + seed * UINT64_C(0x9E3779B97F4A7C15)) * UINT64_C(0xD1342543DE82EF95);
}

void bench_state_fill(bench_state *s, uint64_t seed)
{
    uint64_t *to = (uint64_t *)(void *)s->data;
    s->seed = seed;
    for (uint64_t i = 0; i < s->room / 8; i++) {
        to[i] = word(seed, i);
    }
}

/* One word of every page, at a place that differs from page to page: what a load
 * leaves out is seen, and its time is not spent on fresh memory. */
static void spoil(bench_state *s)
{
    uint64_t *to = (uint64_t *)(void *)s->data;
    for (uint64_t page = 0; page < s->bytes / 4096; page++) {
        to[page * 512 + page * 37 % 512] ^= UINT64_MAX;
    }
}

static lg_status check_words(const bench_state *s, const char *data, uint64_t at, uint64_t bytes, lg_error *err)
{
    const uint64_t *have = (const uint64_t *)(const void *)data;
    for (uint64_t i = 0; i < bytes / 8; i++) {
        if (have[i] != word(s->seed, at / 8 + i)) {
            return lg_error_set(err, LG_ERR_INTERNAL, "%s: byte %" PRIu64 " of the state is not what was saved",
                                s->root, at + 8 * i);
        }
    }
    return LG_OK;
}

/* -------------------------------------------------------------------- ranks */

typedef struct rank_call {
    bench_rank *r;
    bench_rank_fn fn;
    void *arg;
} rank_call;

static void *run_rank(void *arg)
{
    rank_call *call = arg;
    call->r->error = (lg_error)LG_ERROR_INIT;
    call->r->status = call->fn(call->r, call->arg, &call->r->error);
    return NULL;
}

lg_status bench_on_ranks(bench_state *s, bench_rank_fn fn, void *arg, lg_error *err)
{
    rank_call *calls = need_calloc(s->ranks, sizeof *calls);
    pthread_t *threads = need_calloc(s->ranks, sizeof *threads);
    for (uint32_t i = 0; i < s->ranks; i++) {
        calls[i] = (rank_call){&s->rank[i], fn, arg};
        if (i > 0 && pthread_create(&threads[i], NULL, run_rank, &calls[i]) != 0) {
            need(NULL); /* those that were started would wait for it */
        }
    }
    run_rank(&calls[0]);
    lg_status status = LG_OK;
    for (uint32_t i = 0; i < s->ranks; i++) {
        if (i > 0) {
            pthread_join(threads[i], NULL);
        }
        if (status == LG_OK && s->rank[i].status != LG_OK) {
            status = s->rank[i].status;
            *err = s->rank[i].error;
        }
    }
    free(calls);
    free(threads);
    return status;
}

bench_sample bench_span(const bench_state *s, bench_sample start)
{
    bench_sample out = bench_since(start);
    double first = INFINITY, last = 0;
    for (uint32_t i = 0; i < s->ranks; i++) {
        first = fmin(first, s->rank[i].began.seconds);
        last = fmax(last, s->rank[i].ended.seconds);
    }
    out.seconds = last - first;
    return out;
}

void bench_next_step(bench_state *s) { s->step++; }

static lg_status open_rank(bench_rank *r, void *arg, lg_error *err)
{
    const bench_plan *plan = arg;
    if (r->s->ranks > 1) {
        lg_split rows = {.dim = 0, .axis = 0, .mode = LG_SPLIT_EVEN};
        lg_layout_desc desc = LG_LAYOUT_DESC_INIT;
        desc.mesh_ndim = 1, desc.mesh_sizes = &r->s->ranks, desc.n_splits = 1, desc.splits = &rows;
        lg_status status = lg_layout_create(&desc, &r->layout, err);
        if (status != LG_OK) {
            return status;
        }
    }
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = r->comm;
    o.buffer_bytes = plan->buffer_bytes;
    return lg_session_open(r->s->root, &o, &r->session, err);
}

static lg_status close_rank(bench_rank *r, void *arg, lg_error *err)
{
    (void)arg;
    lg_status status = r->session != NULL ? lg_session_close(r->session, err) : LG_OK;
    r->session = NULL;
    lg_layout_free(r->layout);
    lg_comm_free(r->comm);
    return status;
}

lg_status bench_state_open(const bench_plan *plan, const char *root, bench_state **out, lg_error *err)
{
    bench_state *s = need_calloc(1, sizeof *s);
    s->root = root;
    s->n = plan->tensors;
    s->ranks = plan->ranks;
    s->rows = (plan->bytes - BENCH_TENSOR_BYTES) / (s->n - 1) / BENCH_ROW_BYTES;
    s->bytes = BENCH_TENSOR_BYTES + (s->n - 1) * s->rows * BENCH_ROW_BYTES;
    s->room = (s->bytes + BENCH_BLOCK - 1) / BENCH_BLOCK * BENCH_BLOCK;
    s->rank = need_calloc(s->ranks, sizeof *s->rank);
    s->data = mmap(NULL, s->room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    lg_comm **comms = need_calloc(s->ranks, sizeof *comms);
    lg_status status = s->data == MAP_FAILED ? lg_error_set_errno(err, errno, "memory for the state")
                                             : lg_comm_threads_create(s->ranks, comms, err);
    if (status == LG_OK) {
        bench_state_fill(s, 0);
        for (uint32_t i = 0; i < s->ranks; i++) {
            s->rank[i] = (bench_rank){.s = s, .rank = i, .comm = comms[i]};
        }
        bench_plan shared = *plan;
        status = bench_on_ranks(s, open_rank, &shared, err);
    }
    free(comms);
    if (status != LG_OK) {
        lg_error ignored = LG_ERROR_INIT;
        bench_state_close(s, &ignored);
        return status;
    }
    *out = s;
    return LG_OK;
}

lg_status bench_state_close(bench_state *s, lg_error *err)
{
    if (s == NULL) {
        return LG_OK;
    }
    lg_status status = s->rank[0].s != NULL ? bench_on_ranks(s, close_rank, NULL, err) : LG_OK;
    if (s->data != MAP_FAILED) {
        munmap(s->data, s->room);
    }
    free(s->rank);
    free(s);
    return status;
}

/* ------------------------------------------------------------------- saving */

lg_status bench_describe(bench_rank *r, uint32_t flags, lg_save **out, lg_error *err)
{
    const bench_state *s = r->s;
    lg_status status = lg_save_begin(r->session, s->step, NULL, out, err);
    for (size_t i = 0; i < s->n && status == LG_OK; i++) {
        const uint64_t shape[2] = {rows_of(s, i), ROW_FLOATS};
        uint64_t row = 0;
        tensor_name name;
        lg_error ignored = LG_ERROR_INIT; /* the commit tells it */
        if (first_row(r, shape, &row, &ignored) != LG_OK) {
            break; /* then the tensor is not covered */
        }
        lg_tensor t = LG_TENSOR_INIT;
        t.name = name_of(i, name), t.ndim = 2, t.shape = shape, t.layout = r->layout, t.flags = flags;
        t.group = strncmp(name, "optim.", 6) == 0 ? LG_GROUP_OPTIM : LG_GROUP_MODEL;
        t.data = data_of(s, i) + row * BENCH_ROW_BYTES;
        if (lg_save_tensor(*out, &t, &ignored) != LG_OK) {
            break;
        }
    }
    return status;
}

static lg_status save_rank(bench_rank *r, void *arg, lg_error *err)
{
    (void)arg;
    lg_save *save = NULL;
    r->began = bench_now();
    lg_status status = bench_describe(r, 0, &save, err);
    if (status == LG_OK) {
        status = lg_save_commit(save, NULL, err);
    }
    r->ended = bench_now();
    return status;
}

lg_status bench_save(bench_state *s, bench_sample *out, lg_error *err)
{
    bench_next_step(s);
    bench_sample start = bench_now();
    lg_status status = bench_on_ranks(s, save_rank, NULL, err);
    *out = bench_span(s, start);
    return status;
}

/* ------------------------------------------------------------------ loading */

static lg_status describe_load(const bench_rank *r, lg_load *load, lg_error *err)
{
    const bench_state *s = r->s;
    lg_status status = LG_OK;
    for (size_t i = 0; i < s->n && status == LG_OK; i++) {
        const uint64_t shape[2] = {rows_of(s, i), ROW_FLOATS};
        uint64_t row = 0;
        tensor_name name;
        status = first_row(r, shape, &row, err);
        lg_target t = LG_TARGET_INIT;
        t.name = name_of(i, name), t.ndim = 2, t.shape = shape, t.layout = r->layout;
        t.rank = r->layout != NULL ? r->rank : LG_RANK_SELF;
        t.data = data_of(s, i) + row * BENCH_ROW_BYTES;
        if (status == LG_OK) {
            status = lg_load_tensor(load, &t, err);
        }
    }
    return status;
}

static lg_status load_rank(bench_rank *r, void *arg, lg_error *err)
{
    (void)arg;
    lg_checkpoint *checkpoint = NULL;
    lg_load *load = NULL;
    r->began = bench_now();
    lg_status status = lg_checkpoint_open(r->s->root, &checkpoint, err);
    if (status == LG_OK) {
        status = lg_load_begin(checkpoint, 0, &load, err);
    }
    if (status == LG_OK) {
        status = describe_load(r, load, err);
    }
    if (status == LG_OK) {
        status = lg_load_run(load, err);
    }
    r->ended = bench_now();
    lg_load_free(load);
    lg_checkpoint_close(checkpoint);
    return status;
}

lg_status bench_load(bench_state *s, bench_sample *out, lg_error *err)
{
    spoil(s);
    bench_sample start = bench_now();
    lg_status status = bench_on_ranks(s, load_rank, NULL, err);
    *out = bench_span(s, start);
    return status == LG_OK ? check_words(s, s->data, 0, s->bytes, err) : status;
}

lg_status bench_load_part(bench_state *s, uint64_t row, uint64_t rows, bench_sample *out, lg_error *err)
{
    size_t bytes = (size_t)(rows * BENCH_ROW_BYTES);
    char *data = need(aligned_alloc(4096, bytes));
    memset(data, 0xA5, bytes);
    const uint64_t shape[2] = {rows_of(s, 0), ROW_FLOATS}, offset[2] = {row, 0}, extent[2] = {rows, ROW_FLOATS};
    tensor_name name;
    lg_target t = LG_TARGET_INIT;
    t.name = name_of(0, name), t.ndim = 2, t.shape = shape, t.offset = offset, t.extent = extent, t.data = data;
    bench_sample start = bench_now();
    lg_status status = lg_read(s->root, &t, 1, NULL, err);
    *out = bench_since(start);
    if (status == LG_OK) {
        status = check_words(s, data, row * BENCH_ROW_BYTES, bytes, err);
    }
    free(data);
    return status;
}

lg_status bench_verify(bench_state *s, unsigned threads, bench_sample *out, lg_error *err)
{
    lg_checkpoint *checkpoint = NULL;
    lg_verify_options o = LG_VERIFY_OPTIONS_INIT;
    lg_verify_result result = {0};
    o.threads = threads;
    bench_sample start = bench_now();
    lg_status status = lg_checkpoint_open(s->root, &checkpoint, err);
    if (status == LG_OK) {
        status = lg_verify(checkpoint, &o, &result, err);
    }
    *out = bench_since(start);
    lg_checkpoint_close(checkpoint);
    return status;
}
