/* SPDX-License-Identifier: Apache-2.0 */
#include "ranks.h"

#include "base/buf.h"
#include "core/walk.h"
#include "store/store.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* ------------------------------------------------------------------ threads */

typedef struct thread_arg {
    void (*fn)(rank_env *env);
    rank_env *env;
} thread_arg;

static void *thread_main(void *p)
{
    thread_arg *a = p;
    a->fn(a->env);
    /* A rank that gives up counts as gone: the others need not wait. */
    lg_comm_free(a->env->comm);
    a->env->comm = NULL;
    return NULL;
}

void run_ranks(uint32_t world, lg_store *store, void (*fn)(rank_env *env), void *arg, rank_env *env)
{
    lg_comm **comms = calloc(world, sizeof *comms);
    pthread_t *threads = calloc(world, sizeof *threads);
    thread_arg *args = calloc(world, sizeof *args);
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg_comm_threads_create(world, comms, &err), LG_OK);
    for (uint32_t r = 0; r < world; r++) {
        env[r] = (rank_env){.rank = r, .world = world, .comm = comms[r], .store = store, .arg = arg};
        args[r] = (thread_arg){fn, &env[r]};
        assert_int_equal(pthread_create(&threads[r], NULL, thread_main, &args[r]), 0);
    }
    for (uint32_t r = 0; r < world; r++) {
        pthread_join(threads[r], NULL);
    }
    free(comms);
    free(threads);
    free(args);
}

void run_all(uint32_t world, lg_store *store, void (*fn)(rank_env *env), void *arg)
{
    rank_env env[RANKS_MAX];
    assert_true(world <= RANKS_MAX);
    run_ranks(world, store, fn, arg, env);
    for (uint32_t i = 0; i < world; i++) {
        if (env[i].status != LG_OK) {
            fail_msg("rank %u: %s: %s", i, lg_status_name(env[i].status), env[i].err.message);
        }
    }
}

/* -------------------------------------------------------------------- model */

#define ROWS 13
#define COLUMNS 6
#define MOMENT_ELEMENTS (ROWS * COLUMNS)
#define FLAT_LENGTH (2 * MOMENT_ELEMENTS + 11) /* with a gap between and a rest */
#define SECOND_OFFSET (MOMENT_ELEMENTS + 5)

/* NULL, with err filled, when memory is out. */
static lg_layout *make_layout(uint32_t world, int kind, lg_error *err)
{
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    uint32_t sizes[1] = {world};
    lg_split rows = {0, 0, 0, LG_SPLIT_CEIL};
    d.mesh_ndim = 1;
    d.mesh_sizes = sizes;
    if (kind == 0) {
        d.n_splits = 1;
        d.splits = &rows;
    } else if (kind == 1) {
        d.flat_length = FLAT_LENGTH;
        d.flat_axis = 0;
    }
    lg_layout *layout = NULL;
    return lg_layout_create(&d, &layout, err) == LG_OK ? layout : NULL;
}

void model_init(model *m, uint32_t rank, uint32_t world)
{
    *m = (model){.rank = rank, .world = world};
    model_clear(m);
}

void model_clear(model *m)
{
    for (size_t i = 0; i < ROWS * COLUMNS; i++) {
        m->w[i] = m->moments[0][i] = m->moments[1][i] = -1;
    }
    for (size_t i = 0; i < 7; i++) {
        m->b[i] = 0xFFFF;
    }
    for (size_t i = 0; i < 5; i++) {
        m->stats[i] = -1;
    }
    m->count = -1;
    m->step = UINT64_MAX;
    m->blob_bytes = 0;
}

static float w_value(uint64_t step, uint64_t i) { return (float)(step % 1000) * 1000.0f + (float)i; }
static float moment_value(uint64_t step, int which, uint64_t i) { return -w_value(step, i) - (which ? 0.5f : 0.25f); }
static uint16_t b_value(uint64_t step, uint64_t i) { return (uint16_t)(step * 31 + i); }
static double stat_value(const model *m, uint64_t step, uint64_t i)
{
    return (double)step + (double)i / 8 + (m->stats_differ ? m->rank * 1000.0 : 0.0);
}

static void w_range(const model *m, uint64_t *first, uint64_t *elements)
{
    uint64_t chunk = (ROWS + m->world - 1) / m->world;
    uint64_t begin = m->rank * chunk < ROWS ? m->rank * chunk : ROWS;
    uint64_t end = begin + chunk < ROWS ? begin + chunk : ROWS;
    *first = begin * COLUMNS;
    *elements = (end - begin) * COLUMNS;
}

static void moment_range(const model *m, int which, uint64_t *first, uint64_t *elements)
{
    uint64_t chunk = (FLAT_LENGTH + m->world - 1) / m->world;
    uint64_t at = which ? SECOND_OFFSET : 0;
    uint64_t begin = m->rank * chunk, end = begin + chunk;
    begin = begin < at ? at : begin;
    end = end > at + MOMENT_ELEMENTS ? at + MOMENT_ELEMENTS : end;
    *first = begin < end ? begin - at : 0;
    *elements = begin < end ? end - begin : 0;
}

void model_fill(model *m, uint64_t step)
{
    uint64_t first, n;
    w_range(m, &first, &n);
    for (uint64_t i = 0; i < n; i++) {
        m->w[i] = w_value(step, first + i);
    }
    for (int k = 0; k < 2; k++) {
        moment_range(m, k, &first, &n);
        for (uint64_t i = 0; i < n; i++) {
            m->moments[k][i] = moment_value(step, k, first + i);
        }
    }
    for (uint64_t i = 0; i < 7; i++) {
        m->b[i] = b_value(step, i);
    }
    for (uint64_t i = 0; i < 5; i++) {
        m->stats[i] = stat_value(m, step, i);
    }
    m->count = (int64_t)step * 3;
    m->lr = 1.0 / (double)(step + 3);
    m->step = step;
    snprintf(m->blob, sizeof m->blob, "rank %u step %llu", m->rank, (unsigned long long)step);
    m->blob_bytes = strlen(m->blob);
}

const char *model_wrong(const model *m, uint64_t step)
{
    uint64_t first, n;
    w_range(m, &first, &n);
    for (uint64_t i = 0; i < n; i++) {
        if (m->w[i] != w_value(step, first + i)) {
            return "w";
        }
    }
    for (int k = 0; k < 2; k++) {
        moment_range(m, k, &first, &n);
        for (uint64_t i = 0; i < n; i++) {
            if (m->moments[k][i] != moment_value(step, k, first + i)) {
                return k ? "second moment" : "first moment";
            }
        }
    }
    for (uint64_t i = 0; i < 7; i++) {
        if (m->b[i] != b_value(step, i)) {
            return "b";
        }
    }
    for (uint64_t i = 0; i < 5; i++) {
        if (m->stats[i] != stat_value(m, step, i)) {
            return "stats";
        }
    }
    if (m->count != (int64_t)step * 3) {
        return "count";
    }
    if (m->step != step || m->lr != 1.0 / (double)(step + 3)) {
        return "global state";
    }
    return NULL;
}

static const uint64_t w_shape[2] = {ROWS, COLUMNS};
static const uint64_t b_shape[1] = {7};
static const uint64_t stats_shape[1] = {5};
static const uint64_t none_shape[2] = {0, 3};

lg_status model_add(lg_save *save, const model *m, lg_error *err)
{
    lg_layout *rows = make_layout(m->world, 0, err);
    lg_layout *flat = rows != NULL ? make_layout(m->world, 1, err) : NULL;
    lg_layout *copies = flat != NULL ? make_layout(m->world, 2, err) : NULL;
    lg_tensor t[7] = {LG_TENSOR_INIT, LG_TENSOR_INIT, LG_TENSOR_INIT, LG_TENSOR_INIT,
                      LG_TENSOR_INIT, LG_TENSOR_INIT, LG_TENSOR_INIT};
    t[0].name = "w", t[0].ndim = 2, t[0].shape = w_shape, t[0].data = m->w, t[0].layout = rows;
    for (int k = 0; k < 2; k++) {
        lg_tensor *o = &t[1 + k];
        o->name = k ? "optim.state.w.exp_avg_sq" : "optim.state.w.exp_avg";
        o->group = LG_GROUP_OPTIM, o->ndim = 2, o->shape = w_shape, o->data = m->moments[k], o->layout = flat;
        o->flat_offset = k ? SECOND_OFFSET : 0;
    }
    t[3].name = "b", t[3].dtype = LG_BF16, t[3].ndim = 1, t[3].shape = b_shape, t[3].data = m->b, t[3].layout = copies;
    t[4].name = "stats", t[4].dtype = LG_F64, t[4].ndim = 1, t[4].shape = stats_shape, t[4].data = m->stats;
    t[4].flags = LG_TENSOR_BUFFER;
    t[5].name = "count", t[5].dtype = LG_I64, t[5].data = &m->count;
    t[6].name = "none", t[6].ndim = 2, t[6].shape = none_shape, t[6].layout = rows;
    for (size_t i = 0; i < 4; i++) {
        t[i].flags |= m->lazy ? LG_TENSOR_LAZY : 0;
    }
    lg_status st = copies != NULL ? LG_OK : err->status;
    for (size_t i = 0; st == LG_OK && i < 7; i++) {
        st = lg_save_tensor(save, &t[i], err);
    }
    if (st == LG_OK) {
        st = lg_save_alias(save, "tied", "w", err);
    }
    if (st == LG_OK) {
        st = lg_save_global_u64(save, "step", m->step, err);
    }
    if (st == LG_OK) {
        st = lg_save_global_f64(save, "lr", m->lr, err);
    }
    if (st == LG_OK) {
        st = lg_save_rank_bytes(save, "blob", m->blob, m->blob_bytes, err);
    }
    if (st == LG_OK) {
        st = lg_save_attach(save, "config.json", "{}\n", 3, err);
    }
    lg_layout_free(rows);
    lg_layout_free(flat);
    lg_layout_free(copies);
    return st;
}

static lg_status describe(lg_session *s, const model *m, uint64_t step, lg_save **out, lg_error *err)
{
    lg_status st = lg_save_begin(s, step, NULL, out, err);
    if (st != LG_OK) {
        return st;
    }
    st = model_add(*out, m, err);
    if (st != LG_OK) {
        lg_save_abort(*out);
    }
    return st;
}

lg_status model_save(lg_session *s, const model *m, uint64_t step, lg_save_info *info, lg_error *err)
{
    lg_save *save;
    lg_status st = describe(s, m, step, &save, err);
    return st != LG_OK ? st : lg_save_commit(save, info, err);
}

lg_status model_launch(lg_session *s, const model *m, uint64_t step, const lg_launch_options *o, lg_launch_info *info,
                       lg_error *err)
{
    lg_save *save;
    lg_status st = describe(s, m, step, &save, err);
    return st != LG_OK ? st : lg_save_launch(save, o, info, err);
}

lg_status model_load_state(model *m, lg_checkpoint *c, lg_error *err)
{
    lg_status st = lg_checkpoint_global_u64(c, "step", &m->step, err);
    if (st == LG_OK) {
        st = lg_checkpoint_global_f64(c, "lr", &m->lr, err);
    }
    return st;
}

lg_status model_targets(lg_load *load, void *arg, lg_error *err)
{
    model *m = arg;
    lg_layout *rows = make_layout(m->world, 0, err);
    lg_layout *flat = rows != NULL ? make_layout(m->world, 1, err) : NULL;
    lg_target t[7] = {LG_TARGET_INIT, LG_TARGET_INIT, LG_TARGET_INIT, LG_TARGET_INIT,
                      LG_TARGET_INIT, LG_TARGET_INIT, LG_TARGET_INIT};
    t[0].name = "w", t[0].ndim = 2, t[0].shape = w_shape, t[0].data = m->w, t[0].layout = rows;
    for (int k = 0; k < 2; k++) {
        lg_target *o = &t[1 + k];
        o->name = k ? "optim.state.w.exp_avg_sq" : "optim.state.w.exp_avg";
        o->ndim = 2, o->shape = w_shape, o->data = m->moments[k], o->layout = flat;
        o->flat_offset = k ? SECOND_OFFSET : 0;
    }
    t[3].name = "b", t[3].dtype = LG_BF16, t[3].ndim = 1, t[3].shape = b_shape, t[3].data = m->b;
    t[4].name = "stats", t[4].dtype = LG_F64, t[4].ndim = 1, t[4].shape = stats_shape, t[4].data = m->stats;
    t[5].name = "count", t[5].dtype = LG_I64, t[5].data = &m->count;
    t[6].name = "none", t[6].ndim = 2, t[6].shape = none_shape;
    lg_status st = flat != NULL ? LG_OK : err->status;
    for (size_t i = 0; st == LG_OK && i < 7; i++) {
        st = lg_load_tensor(load, &t[i], err);
    }
    lg_layout_free(rows);
    lg_layout_free(flat);
    if (st == LG_OK) {
        st = model_load_state(m, lg_load_checkpoint(load), err);
    }
    return st;
}

/* ----------------------------------------------------------------- sessions */

lg_status begin_session(rank_env *env, lg_session_options o, lg_session **out)
{
    o.comm = env->comm;
    o.store = env->store;
    return lg_session_open("root", &o, out, &env->err);
}

lg_status open_session(rank_env *env, lg_session_options o, lg_session **out)
{
    lg_status st = begin_session(env, o, out);
    if (st != LG_OK) {
        return st;
    }
    model m;
    model_init(&m, env->rank, env->world);
    lg_resume_result *r = NULL;
    st = lg_resume(*out, NULL, model_targets, &m, &r, &env->err);
    lg_resume_result_free(r);
    if (st != LG_OK && st != LG_ERR_EMPTY) {
        lg_session_close(*out, NULL);
    }
    return st == LG_ERR_EMPTY ? LG_OK : st;
}

lg_session *open_to_read(lg_store *store)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = store;
    o.flags = LG_SESSION_READ_ONLY;
    lg_session *s;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg_session_open("root", &o, &s, &err), LG_OK);
    return s;
}

uint64_t newest(lg_store *store)
{
    lg_session *s = open_to_read(store);
    lg_error err = LG_ERROR_INIT;
    model m;
    model_init(&m, 0, 1);
    lg_resume_result *r = NULL;
    lg_status st = lg_resume(s, NULL, model_targets, &m, &r, &err);
    uint64_t step = 0;
    if (st == LG_OK) {
        step = r->step;
        if (model_wrong(&m, step) != NULL) {
            fail_msg("step %llu was loaded wrong: %s", (unsigned long long)step, model_wrong(&m, step));
        }
    } else if (st != LG_ERR_EMPTY) {
        fail_msg("resume: %s", err.message);
    }
    lg_resume_result_free(r);
    lg_session_close(s, NULL);
    return step;
}

lg_session *open_alone(const char *path, lg_error *err)
{
    lg_session *s = NULL;
    if (lg_session_open(path, NULL, &s, err) != LG_OK) {
        return NULL;
    }
    model m;
    model_init(&m, 0, 1);
    lg_resume_result *r = NULL;
    lg_status st = lg_resume(s, NULL, model_targets, &m, &r, err);
    lg_resume_result_free(r);
    return st == LG_OK || st == LG_ERR_EMPTY ? s : NULL;
}

/* -------------------------------------------------------------------- roots */

const char *root_kind_name(int kind)
{
    static const char *const names[] = {"posix", "memory", "posix without rename"};
    return names[kind];
}

static int root_number;

void root_make(test_root *r, int kind)
{
    *r = (test_root){.kind = kind};
    lg_error err = LG_ERROR_INIT;
    if (kind == ROOT_MEMORY) {
        snprintf(r->path, sizeof r->path, "mem:test-%d", root_number++);
    } else {
        /* Memory-backed where there is any: thousands of small roots, each with
         * dozens of syncs. */
        const char *tmp = getenv("TMPDIR");
        tmp = tmp != NULL ? tmp : access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
        snprintf(r->path, sizeof r->path, "%s/lastgood-test-XXXXXX", tmp);
        assert_non_null(mkdtemp(r->path));
    }
    if (lg_store_open(r->path, &r->inner, &err) != LG_OK) {
        fail_msg("%s", err.message);
    }
    r->store = r->inner;
    if (kind == ROOT_NO_RENAME) {
        assert_int_equal(lg_store_without(r->inner, LG_CAP_RENAME_DIR | LG_CAP_NO_REPLACE, &r->store, &err), LG_OK);
    }
}

void root_drop(test_root *r)
{
    if (r->store != r->inner) {
        lg_store_free(r->store);
    }
    lg_store_free(r->inner);
    if (r->kind == ROOT_MEMORY) {
        lg_memory_store_drop(r->path + strlen("mem:"));
    } else {
        char command[512];
        snprintf(command, sizeof command, "rm -rf '%s'", r->path);
        assert_int_equal(system(command), 0);
    }
}

static void run_rank(rank_env *env)
{
    run_spec *spec = env->arg;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.keep_last = spec->keep_last;
    o.keep_every = spec->keep_every;
    o.deadline_ms = 20000;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    lg_resume_result *r = NULL;
    lg_status st = lg_resume(s, NULL, model_targets, &m, &r, &env->err);
    if (st != LG_OK && st != LG_ERR_EMPTY) {
        env->status = st;
        lg_resume_result_free(r);
        lg_session_close(s, NULL);
        return;
    }
    if (st == LG_OK && model_wrong(&m, r->step) != NULL) {
        env->status = lg_error_set(&env->err, LG_ERR_INTERNAL, "wrong values: %s", model_wrong(&m, r->step));
    }
    if (env->rank == 0) {
        spec->resumed_from = st == LG_OK ? r->step : UINT64_MAX;
        spec->skipped = st == LG_OK ? r->n_skipped : 0;
    }
    lg_resume_result_free(r);
    for (size_t i = 0; env->status == LG_OK && i < spec->n_steps; i++) {
        model_fill(&m, spec->steps[i]);
        env->status = model_save(s, &m, spec->steps[i], NULL, &env->err);
    }
    lg_session_close(s, NULL);
}

void root_run(test_root *r, run_spec *spec)
{
    rank_env env[16];
    assert_true(spec->world <= 16);
    run_ranks(spec->world, r->store, run_rank, spec, env);
    for (uint32_t i = 0; i < spec->world; i++) {
        if (env[i].status != LG_OK) {
            fail_msg("rank %u: %s: %s", i, lg_status_name(env[i].status), env[i].err.message);
        }
    }
}

size_t root_folders(test_root *r, char (*names)[64], size_t max)
{
    lg__walk *w;
    lg_error err = LG_ERROR_INIT;
    if (lg__walk_read(r->store, &w, &err) != LG_OK) {
        fail_msg("%s", err.message);
    }
    size_t n = 0;
    for (size_t i = w->n; i-- > 0;) {
        if (!w->items[i].is_rollback) {
            assert_true(n < max);
            snprintf(names[n++], 64, "%.63s", w->items[i].name);
        }
    }
    lg__walk_free(w);
    return n;
}

void root_flip(test_root *r, const char *folder, const char *file, uint64_t offset)
{
    char path[512];
    lg_error err = LG_ERROR_INIT;
    assert_true(lg__path_join(path, sizeof path, folder, file));
    lg__buf b;
    lg__buf_init(&b, (size_t)1 << 30);
    if (lg__store_read_all(r->inner, path, &b, &err) != LG_OK) {
        fail_msg("%s", err.message);
    }
    assert_true(offset < b.len);
    b.data[offset] = (char)(b.data[offset] ^ 0x10);
    assert_int_equal(lg__store_remove_file(r->inner, path, &err), LG_OK);
    lg_file *f;
    assert_int_equal(lg__store_create(r->inner, path, b.len, &f, &err), LG_OK);
    assert_int_equal(lg__store_write(r->inner, f, b.data, b.len, 0, &err), LG_OK);
    assert_int_equal(lg__store_close(r->inner, f, &err), LG_OK);
    lg__buf_free(&b);
}
