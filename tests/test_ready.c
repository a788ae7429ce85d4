/* SPDX-License-Identifier: Apache-2.0 */

/* Memory that something else fills while a save is under way, as a device's
 * copies do: it is not read before it is said to be filled. */

#include "support/environment.h"
#include "support/fault_store.h"
#include "support/ranks.h"

#include "base/thread.h"
#include "core/background.h"
#include "core/ready.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N ((size_t)200000) /* floats of a rank's part: several windows of the writer */
#define POISON 0xab

/* A device with one copy: begun by the launch, done when the gate opens. */
typedef struct device {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool open;
    int64_t ready; /* the number of fills that are done */
    uint32_t fills;
    lg_status refuse;
    bool silent; /* it refuses without a word */
    float *to;
    float from;
    pthread_t thread;
    bool running;
} device;

static void *copy(void *arg)
{
    device *d = arg;
    pthread_mutex_lock(&d->lock);
    while (!d->open) {
        pthread_cond_wait(&d->changed, &d->lock);
    }
    pthread_mutex_unlock(&d->lock);
    for (size_t i = 0; i < N; i++) {
        d->to[i] = d->from + (float)i;
    }
    __atomic_fetch_add(&d->ready, 1, __ATOMIC_RELEASE);
    return NULL;
}

static lg_status fill(void *arg, lg_error *err)
{
    device *d = arg;
    d->fills++;
    if (d->refuse != LG_OK && d->silent) {
        return d->refuse;
    }
    if (d->refuse != LG_OK) {
        return lg_error_set(err, d->refuse, "the device is on fire");
    }
    d->running = pthread_create(&d->thread, NULL, copy, d) == 0;
    return d->running ? LG_OK : lg_error_set(err, LG_ERR_NOMEM, "no thread");
}

static void device_init(device *d, float *to)
{
    *d = (device){.to = to};
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
}

/* Lets the copy end, and waits for it. */
static void device_finish(device *d)
{
    pthread_mutex_lock(&d->lock);
    d->open = true;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
    if (d->running) {
        pthread_join(d->thread, NULL);
        d->running = false;
    }
    d->open = false;
}

/* A rank's state: "w" on the device, copied to `host`; "v" in host memory; "count". */
typedef struct state {
    device device;
    float *host, *v;
    int64_t count;
    lg_layout *rows;
} state;

static void state_init(state *s, uint32_t world)
{
    s->host = malloc(N * sizeof *s->host);
    s->v = malloc(N * sizeof *s->v);
    assert_true(s->host != NULL && s->v != NULL);
    device_init(&s->device, s->host);
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    const uint32_t sizes[1] = {world};
    const lg_split rows = {0, 0, 0, LG_SPLIT_CEIL};
    d.mesh_ndim = 1, d.mesh_sizes = sizes, d.n_splits = 1, d.splits = &rows;
    s->rows = NULL;
    assert_int_equal(lg_layout_create(&d, &s->rows, NULL), LG_OK);
}

static void state_free(state *s)
{
    device_finish(&s->device);
    pthread_mutex_destroy(&s->device.lock);
    pthread_cond_destroy(&s->device.changed);
    lg_layout_free(s->rows);
    free(s->host);
    free(s->v);
}

static float value(uint64_t step, uint32_t rank) { return (float)(step * 1000 + rank * 100); }

static void state_fill(state *s, uint64_t step, uint32_t rank)
{
    memset(s->host, POISON, N * sizeof *s->host);
    s->device.from = value(step, rank);
    for (size_t i = 0; i < N; i++) {
        s->v[i] = -value(step, rank) - (float)i;
    }
    s->count = (int64_t)step;
}

static lg_status launch(lg_session *session, state *s, uint32_t world, uint64_t step, uint32_t v_flags,
                        lg_launch_options o, lg_launch_info *info, lg_error *err)
{
    lg_save *save;
    lg_status st = lg_save_begin(session, step, NULL, &save, err);
    if (st != LG_OK) {
        return st;
    }
    const uint64_t shape[] = {world * N}, none[] = {0};
    lg_tensor t = LG_TENSOR_INIT;
    t.name = "w", t.ndim = 1, t.shape = shape, t.layout = s->rows, t.data = s->host, t.flags = LG_TENSOR_KEPT;
    (void)lg_save_tensor(save, &t, err);
    t.name = "v", t.data = s->v, t.flags = v_flags;
    (void)lg_save_tensor(save, &t, err);
    t = (lg_tensor)LG_TENSOR_INIT;
    t.name = "count", t.dtype = LG_I64, t.data = &s->count;
    (void)lg_save_tensor(save, &t, err);
    t.name = "none", t.ndim = 1, t.shape = none;
    (void)lg_save_tensor(save, &t, err);
    (void)lg_save_rank_bytes(save, "blob", "bytes", 5, err);
    o.ready = &s->device.ready;
    o.ready_value = s->device.ready + 1;
    o.fill = fill;
    o.fill_arg = &s->device;
    return lg_save_launch(save, &o, info, err);
}

/* ---------------------------------------------------------- filled in time */

typedef struct variant {
    uint32_t v_flags;
    uint64_t staging_bytes;
    uint32_t launch_flags;
} variant;

static void fill_late(rank_env *env)
{
    const variant *c = env->arg;
    lg_session *session;
    lg_session_options so = LG_SESSION_OPTIONS_INIT;
    so.comm = env->comm, so.store = env->store, so.staging_bytes = c->staging_bytes;
    RANK_TRY(env, lg_session_open("root", &so, &session, &env->err));
    state s;
    state_init(&s, env->world);
    lg_launch_options o = LG_LAUNCH_OPTIONS_INIT;
    o.flags = c->launch_flags;
    for (uint64_t step = 1; step <= 3; step++) {
        state_fill(&s, step, env->rank);
        lg_launch_info info;
        RANK_TRY(env, launch(session, &s, env->world, step, c->v_flags, o, &info, &env->err));
        RANK_CHECK(env, s.device.fills == step && s.device.ready == (int64_t)step - 1);
        RANK_CHECK(env, info.bytes_lazy >= N * sizeof(float) && !info.windowed);
        lg_error early = LG_ERROR_INIT;
        if (c->v_flags == LG_TENSOR_LAZY) { /* "v" is copied behind "w" */
            RANK_CHECK(env, lg_session_fence(session, 20, &early) == LG_ERR_TIMEOUT);
        } else { /* nothing of the trainer's memory is read any more */
            RANK_TRY(env, lg_session_fence(session, 20000, &env->err));
            s.count = -1;
        }
        if (c->v_flags == 0) {
            memset(s.v, POISON, N * sizeof *s.v);
        }
        RANK_CHECK(env, lg_session_wait(session, 20, NULL, &early) == LG_ERR_TIMEOUT);
        device_finish(&s.device);
        RANK_TRY(env, lg_session_fence(session, 20000, &env->err));
        if (c->v_flags != LG_TENSOR_KEPT) {
            memset(s.v, POISON, N * sizeof *s.v);
        }
        RANK_TRY(env, lg_session_wait(session, 20000, NULL, &env->err));
        lg_session_status status;
        RANK_TRY(env, lg_session_get_status(session, &status, &env->err));
        /* "w" was not copied a second time */
        RANK_CHECK(env, c->v_flags == LG_TENSOR_LAZY || status.staging_bytes < 2 * N * sizeof(float));
    }
    RANK_TRY(env, lg_session_close(session, &env->err));
    state_free(&s);
}

static void check_saved(const char *where, uint32_t world, uint64_t step)
{
    float *w = malloc(world * N * sizeof *w), *v = malloc(world * N * sizeof *v);
    assert_true(w != NULL && v != NULL);
    int64_t count = 0;
    const uint64_t shape[] = {world * N};
    lg_target t[3] = {LG_TARGET_INIT, LG_TARGET_INIT, LG_TARGET_INIT};
    t[0].name = "w", t[0].ndim = 1, t[0].shape = shape, t[0].data = w;
    t[1].name = "v", t[1].ndim = 1, t[1].shape = shape, t[1].data = v;
    t[2].name = "count", t[2].dtype = LG_I64, t[2].data = &count;
    uint64_t found = 0;
    lg_error err = LG_ERROR_INIT;
    if (lg_read(where, t, 3, &found, &err) != LG_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(found, step);
    assert_int_equal(count, step);
    for (uint32_t r = 0; r < world; r++) {
        for (size_t i = 0; i < N; i++) {
            if (w[r * N + i] != value(step, r) + (float)i || v[r * N + i] != -value(step, r) - (float)i) {
                fail_msg("step %d, rank %u, element %zu: %g, %g", (int)step, r, i, (double)w[r * N + i],
                         (double)v[r * N + i]);
            }
        }
    }
    free(w);
    free(v);
}

static void k04_memory_that_is_filled_late_is_not_read_before(void **unused)
{
    (void)unused;
    static const variant variants[] = {
        {0, 0, 0},                                        /* written from where it lies */
        {LG_TENSOR_KEPT, 0, 0},                           /* all of it */
        {LG_TENSOR_LAZY, 0, 0},                           /* by way of an image */
        {0, UINT64_C(4) << 20, 0},                        /* with a cap that holds the rest */
        {LG_TENSOR_LAZY, 0, LG_LAUNCH_CHECK_SOURCES},     /* the trainer's sources are checked, the filled are not */
        {0, 0, LG_LAUNCH_SKIP | LG_LAUNCH_CHECK_SOURCES}, /* likewise */
    };
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        for (uint32_t world = 1; world <= 3; world += 2) {
            test_root root;
            root_make(&root, ROOT_POSIX);
            run_all(world, root.store, fill_late, (void *)(uintptr_t)&variants[i]);
            check_saved(root.path, world, 3);
            root_drop(&root);
        }
    }
}

/* -------------------------------------------------------------- not in time */

static void never_fill(rank_env *env)
{
    lg_session *session;
    lg_session_options so = LG_SESSION_OPTIONS_INIT;
    so.comm = env->comm, so.store = env->store, so.deadline_ms = short_ms(500);
    RANK_TRY(env, lg_session_open("root", &so, &session, &env->err));
    state s;
    state_init(&s, env->world);
    for (uint64_t step = 1; step <= 2; step++) {
        state_fill(&s, step, env->rank);
        const uint32_t flags = step == 1 ? 0 : LG_TENSOR_LAZY;
        RANK_TRY(env, launch(session, &s, env->world, step, flags, (lg_launch_options)LG_LAUNCH_OPTIONS_INIT, NULL,
                             &env->err));
        if (env->rank != 1) {
            device_finish(&s.device);
        }
        lg_error told = LG_ERROR_INIT;
        lg_status st = LG_ERR_TIMEOUT;
        while (st == LG_ERR_TIMEOUT && strstr(told.message, "in the background") == NULL) {
            st = lg_session_wait(session, 2000, NULL, &told);
        }
        RANK_CHECK(env, st == LG_ERR_TIMEOUT && told.rank == 1);
        char within[64];
        snprintf(within, sizeof within, "was not filled within %d ms", (int)short_ms(500) / 2);
        RANK_CHECK(env, strstr(told.message, within) != NULL);
        device_finish(&s.device); /* afterwards nobody reads it */
    }
    /* and the session goes on */
    state_fill(&s, 3, env->rank);
    RANK_TRY(env, launch(session, &s, env->world, 3, 0, (lg_launch_options)LG_LAUNCH_OPTIONS_INIT, NULL, &env->err));
    device_finish(&s.device);
    RANK_TRY(env, lg_session_close(session, &env->err));
    state_free(&s);
}

static void k06_memory_that_is_never_filled_fails_the_save_on_all_ranks_within_the_deadline(void **unused)
{
    (void)unused;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    run_all(3, root.store, never_fill, NULL);
    check_saved(root.path, 3, 3);
    root_drop(&root);
}

static void refuse_to_fill(rank_env *env)
{
    lg_session *session;
    lg_session_options so = LG_SESSION_OPTIONS_INIT;
    so.comm = env->comm, so.store = env->store, so.deadline_ms = 20000;
    RANK_TRY(env, lg_session_open("root", &so, &session, &env->err));
    state s;
    state_init(&s, env->world);
    state_fill(&s, 1, env->rank);
    s.device.refuse = env->rank == 1 ? LG_ERR_IO : LG_OK;
    RANK_TRY(env, launch(session, &s, env->world, 1, 0, (lg_launch_options)LG_LAUNCH_OPTIONS_INIT, NULL, &env->err));
    RANK_TRY(env, lg_session_fence(session, 20000, &env->err));
    device_finish(&s.device);
    lg_error told = LG_ERROR_INIT;
    RANK_CHECK(env, lg_session_wait(session, 20000, NULL, &told) == LG_ERR_IO);
    RANK_CHECK(env, told.rank == 1 && strstr(told.message, "the device is on fire") != NULL);
    /* What is compared between the ranks would be read before it is filled. */
    lg_save *save;
    const uint64_t shape[] = {N};
    lg_tensor t = LG_TENSOR_INIT;
    t.name = "everywhere", t.ndim = 1, t.shape = shape, t.data = s.host, t.flags = LG_TENSOR_KEPT;
    RANK_TRY(env, lg_save_begin(session, 2, NULL, &save, &env->err));
    RANK_TRY(env, lg_save_tensor(save, &t, &env->err));
    lg_launch_options o = LG_LAUNCH_OPTIONS_INIT;
    o.fill = fill, o.fill_arg = &s.device;
    lg_error refused = LG_ERROR_INIT;
    RANK_CHECK(env, lg_save_launch(save, &o, NULL, &refused) == LG_ERR_UNSUPPORTED);
    RANK_CHECK(env, strstr(refused.message, "\"everywhere\"") != NULL && strstr(refused.message, "layout") != NULL);
    RANK_CHECK(env, s.device.fills == 1);
    RANK_TRY(env, lg_session_close(session, &env->err));
    state_free(&s);
}

static void refuse_without_a_word(rank_env *env)
{
    lg_session *session;
    lg_session_options so = LG_SESSION_OPTIONS_INIT;
    so.comm = env->comm, so.store = env->store, so.deadline_ms = 20000;
    RANK_TRY(env, lg_session_open("root", &so, &session, &env->err));
    state s;
    state_init(&s, env->world);
    state_fill(&s, 2, env->rank);
    s.device.refuse = env->rank == 1 ? LG_ERR_LIMIT : LG_OK;
    s.device.silent = true;
    RANK_TRY(env, launch(session, &s, env->world, 2, 0, (lg_launch_options)LG_LAUNCH_OPTIONS_INIT, NULL, &env->err));
    device_finish(&s.device);
    lg_error told = LG_ERROR_INIT;
    RANK_CHECK(env, lg_session_wait(session, 20000, NULL, &told) == LG_ERR_LIMIT);
    RANK_CHECK(env, told.rank == 1);
    RANK_CHECK(env, strstr(told.message, "the function that fills the launch's memory failed") != NULL);
    RANK_TRY(env, lg_session_close(session, &env->err));
    state_free(&s);
}

/* ------------------------------------------------- closed before it was checked */

typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool open;
} gate;

static lg_status wait_at_gate(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    (void)f;
    (void)err;
    gate *g = arg;
    if (before && e->op == FAULT_WRITE) {
        pthread_mutex_lock(&g->lock);
        while (!g->open) {
            pthread_cond_wait(&g->changed, &g->lock);
        }
        pthread_mutex_unlock(&g->lock);
    }
    return LG_OK;
}

/* A disk that stands still, less staging memory than there is to copy: at the end
 * of the deadline not all is copied, and nobody will look at the sources again. */
static void k04_a_save_whose_sources_nobody_can_check_any_more_is_not_committed(void **unused)
{
    (void)unused;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    static gate g = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    fault_store *f = fault_store_new(root.store);
    lg_session_options so = LG_SESSION_OPTIONS_INIT;
    so.store = fault_store_handle(f), so.deadline_ms = short_ms(300), so.staging_bytes = UINT64_C(1) << 20;
    lg_session *session = NULL;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg_session_open("root", &so, &session, &err), LG_OK);
    int staged = 0;
    assert_int_equal(lg_session_staged(session, &staged, &err), LG_OK);
    assert_int_equal(staged, 1); /* nothing is under way */
    const uint64_t shape[] = {8 * N};
    float *w = calloc(8 * N, sizeof *w);
    assert_non_null(w);
    lg_tensor t = LG_TENSOR_INIT;
    t.name = "w", t.ndim = 1, t.shape = shape, t.data = w, t.flags = LG_TENSOR_LAZY;
    lg_save *save = NULL;
    assert_int_equal(lg_save_begin(session, 1, NULL, &save, &err), LG_OK);
    assert_int_equal(lg_save_tensor(save, &t, &err), LG_OK);
    lg_launch_options o = LG_LAUNCH_OPTIONS_INIT;
    o.flags = LG_LAUNCH_CHECK_SOURCES;
    fault_store_set_hook(f, wait_at_gate, &g);
    assert_int_equal(lg_save_launch(save, &o, NULL, &err), LG_OK);
    assert_int_equal(lg_session_close(session, &err), LG_ERR_TIMEOUT);
    assert_non_null(strstr(err.message, "closed before the save was durable"));
    pthread_mutex_lock(&g.lock);
    g.open = true;
    pthread_cond_broadcast(&g.changed);
    pthread_mutex_unlock(&g.lock);
    while (lg__background_left > 0) {
        lg__pause(0);
    }
    free(w);
    fault_store_free(f);
    assert_int_equal(newest(root.store), 0);
    root_drop(&root);
}

static void k06_a_device_that_refuses_fails_the_save_on_all_ranks(void **unused)
{
    (void)unused;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    run_all(2, root.store, refuse_to_fill, NULL);
    run_all(2, root.store, refuse_without_a_word, NULL);
    root_drop(&root);
}

/* ------------------------------------------------------------------- skipped */

static lg_status hold_shards(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    (void)f, (void)err;
    const atomic_bool *shut = arg;
    while (before && e->op == FAULT_WRITE && strstr(e->path, "shard-") != NULL && atomic_load(shut)) {
        lg__pause(0);
    }
    return LG_OK;
}

static void a_launch_that_skips_fills_nothing(void **unused)
{
    (void)unused;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    fault_store *f = fault_store_new(root.store);
    atomic_bool shut = true;
    fault_store_set_hook(f, hold_shards, &shut);
    lg_session *session;
    lg_session_options so = LG_SESSION_OPTIONS_INIT;
    so.store = fault_store_handle(f);
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg_session_open("root", &so, &session, &err), LG_OK);
    state s;
    state_init(&s, 1);
    state_fill(&s, 1, 0);
    lg_launch_options o = LG_LAUNCH_OPTIONS_INIT;
    o.flags = LG_LAUNCH_SKIP;
    lg_launch_info info;
    assert_int_equal(launch(session, &s, 1, 1, LG_TENSOR_KEPT, o, &info, &err), LG_OK);
    device_finish(&s.device);
    assert_int_equal(launch(session, &s, 1, 2, LG_TENSOR_KEPT, o, &info, &err), LG_OK);
    assert_int_equal(info.skipped, LG_SKIP_IN_FLIGHT);
    assert_int_equal(s.device.fills, 1);
    atomic_store(&shut, false);
    assert_int_equal(lg_session_wait(session, 20000, NULL, &err), LG_OK);
    assert_int_equal(lg_session_close(session, &err), LG_OK);
    check_saved(root.path, 1, 1);
    state_free(&s);
    fault_store_free(f);
    root_drop(&root);
}

static void waiting_ends_when_it_is_given_up(void **unused)
{
    (void)unused;
    const int64_t never = 0;
    atomic_bool given_up = true;
    lg_error err = LG_ERROR_INIT;
    const lg__ready r = {&never, 1, 60000};
    assert_int_equal(lg__ready_wait(&r, &given_up, &err), LG_ERR_CANCELLED);
    const lg__ready soon = {&never, 1, 20};
    assert_int_equal(lg__ready_wait(&soon, NULL, &err), LG_ERR_TIMEOUT);
    const lg__ready done = {&never, 0, 0};
    assert_int_equal(lg__ready_wait(&done, &given_up, &err), LG_OK);
    assert_int_equal(lg__ready_wait(&(lg__ready){0}, &given_up, &err), LG_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k04_memory_that_is_filled_late_is_not_read_before),
        cmocka_unit_test(k06_memory_that_is_never_filled_fails_the_save_on_all_ranks_within_the_deadline),
        cmocka_unit_test(k06_a_device_that_refuses_fails_the_save_on_all_ranks),
        cmocka_unit_test(k04_a_save_whose_sources_nobody_can_check_any_more_is_not_committed),
        cmocka_unit_test(a_launch_that_skips_fills_nothing),
        cmocka_unit_test(waiting_ends_when_it_is_given_up),
    };
    cmocka_set_test_filter(getenv("LASTGOOD_TEST")); /* a pattern */
    return cmocka_run_group_tests_name("ready", tests, NULL, NULL);
}
