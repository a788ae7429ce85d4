/* SPDX-License-Identifier: Apache-2.0 */

/* What saving in the background costs the trainer.
 *
 *   stall [--mib N] [--tensors N] [--pairs N] [--compute N] [--dir DIR] [--json]
 *
 * One process, one state (N MiB in equal F32 tensors, default 512 in 64), in
 * memory that was touched. In each round, in an order that changes:
 *   memcpy        the state to memory touched before, by as many threads as
 *                 an eager launch uses (one a processor)
 *   eager         lg_save_launch with nothing lazy: the call
 *   eager durable from the launch until lg_session_wait returns
 *   lazy          lg_save_launch with everything lazy: the call
 *   lazy copied   from the launch until the fence, called at once, returns
 *   lazy durable  from the launch until lg_session_wait returns
 *   save          lg_save_commit
 *   training      a fixed loop of matrix products by 1 and by 2 threads, with
 *                 no save, and with one launched (lazy) and a fence before the
 *                 end of each step: what it lost, and how long the fence of the
 *                 step of the launch waited; the loop is longer than the save
 * `lost` is the time of the loop with a save less that without, of the same
 * round. Memory: VmHWM less the VmRSS before, of the rounds after the first. */

#include "base/json.h"
#include "base/thread.h"
#include "measure.h"

#include <getopt.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define EDGE 256 /* of a matrix */

typedef struct state {
    size_t n, each, bytes;
    char *data, *other;
    char (*names)[64];
} state;

enum {
    COPY,
    EAGER,
    EAGER_DURABLE,
    LAZY,
    LAZY_COPIED,
    LAZY_DURABLE,
    SAVE,
    LOOP1,
    LOOP1_SAVE,
    FENCE1,
    LOOP2,
    LOOP2_SAVE,
    FENCE2,
    N_KINDS
};
static const char *const kinds[N_KINDS] = {
    "memcpy",          "eager",       "eager durable",  "lazy",        "lazy copied",
    "lazy durable",    "save",        "1 thread: loop", "with a save", "its fence",
    "2 threads: loop", "with a save", "its fence"};

static double seconds[N_KINDS][MAX_ROUNDS], cpu[N_KINDS][MAX_ROUNDS];
static size_t peak_eager, peak_lazy, peak_save;

static void keep(int kind, size_t round, took t)
{
    seconds[kind][round] = t.seconds;
    cpu[kind][round] = t.cpu;
}

/* ------------------------------------------------------------------- memcpy */

typedef struct slice {
    char *to;
    const char *from;
    size_t bytes;
} slice;

static void *copy_slice(void *arg)
{
    slice *s = arg;
    memcpy(s->to, s->from, s->bytes);
    return NULL;
}

static took copy(const state *st, uint32_t threads)
{
    pthread_t t[64];
    slice s[64];
    took start = now();
    for (uint32_t i = 0; i < threads; i++) {
        const size_t from = st->bytes / threads * i, to = i + 1 == threads ? st->bytes : st->bytes / threads * (i + 1);
        s[i] = (slice){st->other + from, st->data + from, to - from};
        if (i + 1 == threads) {
            copy_slice(&s[i]);
        } else if (!lg__thread_start(&t[i], copy_slice, &s[i])) {
            die("thread", NULL);
        }
    }
    for (uint32_t i = 0; i + 1 < threads; i++) {
        pthread_join(t[i], NULL);
    }
    return since(start);
}

/* ------------------------------------------------------------------- saving */

static lg_save *describe(const state *st, lg_session *session, uint64_t step, bool lazy)
{
    lg_error error = LG_ERROR_INIT, *err = &error;
    lg_save *s = NULL;
    const uint64_t shape[] = {st->each / 4};
    MUST(lg_save_begin(session, step, NULL, &s, err));
    for (size_t i = 0; i < st->n; i++) {
        lg_tensor t = LG_TENSOR_INIT;
        t.name = st->names[i], t.dtype = LG_F32, t.ndim = 1, t.shape = shape, t.data = st->data + i * st->each;
        t.group = i % 3 == 0 ? LG_GROUP_MODEL : LG_GROUP_OPTIM;
        t.flags = lazy ? LG_TENSOR_LAZY : 0;
        MUST(lg_save_tensor(s, &t, err));
    }
    return s;
}

static void background(const state *st, lg_session *session, uint64_t step, bool lazy, size_t round)
{
    lg_error error = LG_ERROR_INIT, *err = &error;
    memory_restart();
    const size_t before = memory_now("VmRSS:");
    lg_session_status status;
    MUST(lg_session_get_status(session, &status, err));
    lg_save *s = describe(st, session, step, lazy);
    took start = now();
    MUST(lg_save_launch(s, NULL, NULL, err));
    keep(lazy ? LAZY : EAGER, round, since(start));
    if (lazy) {
        MUST(lg_session_fence(session, 0, err));
        keep(LAZY_COPIED, round, since(start));
    }
    MUST(lg_session_wait(session, 0, NULL, err));
    keep(lazy ? LAZY_DURABLE : EAGER_DURABLE, round, since(start));
    size_t *peak = lazy ? &peak_lazy : &peak_eager;
    const size_t used = memory_now("VmHWM:") - before + (size_t)status.staging_bytes; /* kept from before */
    *peak = round > 0 && used > *peak ? used : *peak;
}

static void save(const state *st, lg_session *session, uint64_t step, size_t round)
{
    lg_error error = LG_ERROR_INIT, *err = &error;
    memory_restart();
    const size_t before = memory_now("VmRSS:");
    lg_save *s = describe(st, session, step, false);
    took start = now();
    MUST(lg_save_commit(s, NULL, err));
    keep(SAVE, round, since(start));
    const size_t used = memory_now("VmHWM:") - before;
    peak_save = round > 0 && used > peak_save ? used : peak_save;
}

/* ----------------------------------------------------------------- training */

typedef struct worker {
    float *a, *b, *c;
    size_t products;
    pthread_barrier_t *gate; /* NULL: this is the main thread alone */
    size_t steps;
} worker;

static void multiply(const worker *w)
{
    for (size_t i = 0; i < EDGE; i++) {
        for (size_t k = 0; k < EDGE; k++) {
            const float x = w->a[i * EDGE + k];
            for (size_t j = 0; j < EDGE; j++) {
                w->c[i * EDGE + j] += x * w->b[k * EDGE + j];
            }
        }
    }
}

static void step_of(const worker *w)
{
    for (size_t p = 0; p < w->products; p++) {
        multiply(w);
    }
}

static void *second(void *arg)
{
    worker *w = arg;
    for (size_t i = 0; i < w->steps; i++) {
        pthread_barrier_wait(w->gate);
        step_of(w);
        pthread_barrier_wait(w->gate);
    }
    return NULL;
}

static worker worker_new(size_t products)
{
    worker w = {.products = products};
    float **each[] = {&w.a, &w.b, &w.c};
    for (size_t i = 0; i < 3; i++) {
        *each[i] = aligned_alloc(64, EDGE * EDGE * sizeof(float));
        for (size_t k = 0; k < (size_t)EDGE * EDGE; k++) {
            (*each[i])[k] = 1e-3f * (float)(k % 97);
        }
    }
    return w;
}

/* One loop; with a save if `s` is given, launched at the start of its second
 * step. */
static took train(worker w[2], uint32_t threads, size_t steps, lg_session *session, lg_save *s, double *fence)
{
    lg_error error = LG_ERROR_INIT, *err = &error;
    pthread_barrier_t gate;
    pthread_t other;
    pthread_barrier_init(&gate, NULL, 2);
    w[1].gate = &gate;
    w[1].steps = steps;
    took start = now();
    if (threads == 2 && !lg__thread_start(&other, second, &w[1])) {
        die("thread", NULL);
    }
    for (size_t i = 0; i < steps; i++) {
        if (i == 1 && s != NULL) {
            MUST(lg_save_launch(s, NULL, NULL, err));
        }
        if (threads == 2) {
            pthread_barrier_wait(&gate);
        }
        step_of(&w[0]);
        if (threads == 2) {
            pthread_barrier_wait(&gate);
        }
        if (s != NULL) {
            took before = now();
            MUST(lg_session_fence(session, 0, err));
            *fence = i == 1 ? since(before).seconds : *fence;
        }
    }
    took t = since(start);
    if (threads == 2) {
        pthread_join(other, NULL);
    }
    pthread_barrier_destroy(&gate);
    return t;
}

static void training(const state *st, lg_session *session, uint64_t *step, worker w[2], size_t steps, size_t round)
{
    lg_error error = LG_ERROR_INIT, *err = &error;
    static const int plain[] = {LOOP1, LOOP2}, saving[] = {LOOP1_SAVE, LOOP2_SAVE}, fences[] = {FENCE1, FENCE2};
    for (uint32_t threads = 1; threads <= 2; threads++) {
        for (int half = 0; half < 2; half++) {
            double fence = 0;
            if (half == (int)(round % 2)) {
                keep(plain[threads - 1], round, train(w, threads, steps, session, NULL, &fence));
                continue;
            }
            lg_save *s = describe(st, session, ++*step, true);
            keep(saving[threads - 1], round, train(w, threads, steps, session, s, &fence));
            keep(fences[threads - 1], round, (took){fence, 0});
            MUST(lg_session_wait(session, 0, NULL, err));
        }
    }
}

/* --------------------------------------------------------------------- report */

static void lost(json_t *out, const char *name, const double *with, const double *without, size_t n, bool as_json)
{
    double values[MAX_ROUNDS], low, high;
    for (size_t i = 0; i < n; i++) {
        values[i] = with[i] - without[i];
    }
    interval(values, n, &low, &high);
    json_object_set_new(out, name, json_pack("{s:f,s:f,s:f}", "median", median(values, n), "low", low, "high", high));
    if (!as_json) {
        printf("%-32s %8.3f   %.3f to %.3f s\n", name, median(values, n), low, high);
    }
}

static void report(const state *st, size_t n, size_t steps, uint32_t threads, bool as_json)
{
    json_t *out = json_pack("{s:I,s:I,s:I,s:I,s:I,s:[],s:{},s:{},s:{}}", "bytes", (json_int_t)st->bytes, "tensors",
                            (json_int_t)st->n, "rounds", (json_int_t)n, "copy_threads", (json_int_t)threads, "steps",
                            (json_int_t)steps, "rows", "ratios", "lost", "memory");
    if (!as_json) {
        printf("%zu tensors, %.1f MB, %zu rounds, %" PRIu32 " copy threads, loops of %zu steps\n\n", st->n,
               (double)st->bytes / 1e6, n, threads, steps);
        printf("%-18s %10s %10s\n", "", "median s", "cpu s");
    }
    for (int k = 0; k < N_KINDS; k++) {
        json_array_append_new(json_object_get(out, "rows"), json_pack("{s:s,s:f,s:f}", "name", kinds[k], "seconds",
                                                                      median(seconds[k], n), "cpu", median(cpu[k], n)));
        if (!as_json) {
            printf("%-18s %10.4f %10.4f\n", kinds[k], median(seconds[k], n), median(cpu[k], n));
        }
    }
    json_t *ratios = json_object_get(out, "ratios"), *loss = json_object_get(out, "lost");
    if (!as_json) {
        printf("\n%-32s %8s   %s\n", "", "median", "95 % interval");
    }
    ratio(ratios, "memcpy / eager launch", seconds[COPY], seconds[EAGER], n, !as_json);
    ratio(ratios, "eager durable / save", seconds[EAGER_DURABLE], seconds[SAVE], n, !as_json);
    ratio(ratios, "lazy durable / save", seconds[LAZY_DURABLE], seconds[SAVE], n, !as_json);
    lost(loss, "lost, 1 compute thread", seconds[LOOP1_SAVE], seconds[LOOP1], n, as_json);
    lost(loss, "lost, 2 compute threads", seconds[LOOP2_SAVE], seconds[LOOP2], n, as_json);
    json_t *memory = json_object_get(out, "memory");
    json_object_set_new(memory, "eager", json_integer((json_int_t)peak_eager));
    json_object_set_new(memory, "lazy", json_integer((json_int_t)peak_lazy));
    json_object_set_new(memory, "save", json_integer((json_int_t)peak_save));
    if (as_json) {
        json_dumpf(out, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
        putchar('\n');
    } else {
        printf("\nmemory beyond the state: eager %.0f MiB, lazy %.0f MiB, save %.0f MiB\n", (double)peak_eager / MIB,
               (double)peak_lazy / MIB, (double)peak_save / MIB);
    }
    json_decref(out);
}

int main(int argc, char **argv)
{
    size_t mib = 512, n = 64, pairs = 10;
    bool as_json = false;
    const char *dir = ".";
    static const struct option options[] = {
        {"mib", required_argument, NULL, 'm'},   {"tensors", required_argument, NULL, 't'},
        {"pairs", required_argument, NULL, 'p'}, {"dir", required_argument, NULL, 'd'},
        {"json", no_argument, NULL, 'j'},        {NULL, 0, NULL, 0}};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (c) {
        case 'm':
            mib = strtoul(optarg, NULL, 10);
            break;
        case 't':
            n = strtoul(optarg, NULL, 10);
            break;
        case 'p':
            pairs = strtoul(optarg, NULL, 10);
            break;
        case 'd':
            dir = optarg;
            break;
        case 'j':
            as_json = true;
            break;
        default:
            fprintf(stderr, "usage: stall [--mib N] [--tensors N] [--pairs N] [--dir DIR] [--json]\n");
            return 2;
        }
    }
    if (n == 0 || pairs == 0 || pairs > MAX_ROUNDS || mib * MIB / n < 4) {
        fprintf(stderr, "stall: no such numbers\n");
        return 2;
    }
    char root[4096];
    snprintf(root, sizeof root, "%s/lastgood-bench-XXXXXX", dir);
    if (mkdtemp(root) == NULL) {
        die(root, NULL);
    }
    state st = {.n = n, .each = mib * MIB / n / 4 * 4};
    st.bytes = st.n * st.each;
    st.data = aligned_alloc(4096, (st.bytes + 4095) / 4096 * 4096);
    st.other = aligned_alloc(4096, (st.bytes + 4095) / 4096 * 4096);
    st.names = calloc(n, sizeof *st.names);
    if (st.data == NULL || st.other == NULL || st.names == NULL) {
        die("memory", NULL);
    }
    for (size_t i = 0; i < st.bytes / 4; i++) {
        ((uint32_t *)(void *)st.data)[i] = (uint32_t)(i * UINT32_C(2654435761));
    }
    memset(st.other, 1, st.bytes);
    for (size_t i = 0; i < n; i++) {
        snprintf(st.names[i], sizeof st.names[i], "model.layers.%zu.mlp.up_proj.weight", i);
    }
    lg_error error = LG_ERROR_INIT, *err = &error;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.keep_last = 1;
    lg_session *session;
    MUST(lg_session_open(root, &o, &session, err));
    uint32_t threads = lg__processors();
    threads = threads > 8 ? 8 : threads;
    uint64_t step = 0;
    background(&st, session, ++step, false, 0); /* the memory of the copy is touched from here on */
    background(&st, session, ++step, false, 0);
    worker w[2] = {worker_new(1), worker_new(1)};
    /* A step takes a quarter of a second, and a loop half as long again as a save. */
    took start = now();
    step_of(&w[0]);
    step_of(&w[0]);
    w[0].products = w[1].products = 1 + (size_t)(0.25 / (since(start).seconds / 2));
    const size_t steps = 4 + (size_t)(1.5 * seconds[EAGER_DURABLE][0] / 0.25);
    for (size_t round = 0; round < pairs; round++) {
        for (size_t k = 0; k < 4; k++) {
            switch ((k + round) % 4) {
            case 0:
                (void)copy(&st, threads);
                keep(COPY, round, copy(&st, threads));
                break;
            case 1:
                background(&st, session, ++step, false, round);
                break;
            case 2:
                background(&st, session, ++step, true, round);
                break;
            default:
                save(&st, session, ++step, round);
            }
        }
        training(&st, session, &step, w, steps, round);
        if (!as_json && isatty(STDERR_FILENO)) {
            fprintf(stderr, "\rround %zu of %zu", round + 1, pairs);
        }
    }
    if (!as_json && isatty(STDERR_FILENO)) {
        fputc('\n', stderr);
    }
    MUST(lg_session_close(session, err));
    remove_tree(root);
    report(&st, pairs, steps, threads, as_json);
    return 0;
}
