/* SPDX-License-Identifier: Apache-2.0 */

/* Resume of several ranks that want the same: each byte is read about once, and
 * comes to all of them, whatever they want and wherever they want it. */

#include "base/error.h"
#include "comm/comm.h"
#include "core/checkpoint.h"
#include "support/build.h"
#include "support/check.h"
#include "support/fault_store.h"
#include "support/ranks.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORLD 4
#define TENSORS 8
#define MIB ((size_t)1 << 20)

/* ---------------------------------------------------------------- the state */

typedef struct tensor {
    char name[32];
    lg_dtype dtype;
    uint32_t ndim;
    uint64_t shape[3];
    size_t bytes, elements;
    lg_layout *layout; /* rows over all ranks that save; NULL: whole on each */
    uint8_t *data[2];  /* of step 1 and 2 */
} tensor;

typedef struct state {
    tensor t[TENSORS];
    size_t bytes;
} state;

static void state_make(state *s, uint64_t seed)
{
    static const lg_dtype dtypes[] = {LG_F32, LG_U8, LG_BF16, LG_F64};
    *s = (state){0};
    lg_split rows = {0, 0, 0, LG_SPLIT_CEIL};
    for (size_t i = 0; i < TENSORS; i++) {
        tensor *t = &s->t[i];
        snprintf(t->name, sizeof t->name, "layers.%zu.weight", i);
        t->dtype = dtypes[i % 4];
        t->ndim = i < 2 || i == 3 ? 2 : (uint32_t)(build_random(&seed) % 4);
        t->elements = 1;
        for (uint32_t d = 0; d < t->ndim; d++) {
            /* two of several MiB, with a rest in each cut */
            t->shape[d] = i < 2 ? (d == 0 ? 1031 : 1500) : 1 + build_random(&seed) % 60;
            /* one of fewer pieces than there may be ranks */
            t->shape[d] = i == 3 ? (d == 0 ? 150 : 192) : t->shape[d];
            t->elements *= t->shape[d];
        }
        t->bytes = t->elements * lg_dtype_bits(t->dtype) / 8;
        t->layout = t->ndim > 0 ? build_layout(WORLD, 1, 1, &rows, 0) : NULL;
        for (int k = 0; k < 2; k++) {
            t->data[k] = malloc(t->bytes);
            uint64_t x = i * 2 + (uint64_t)k;
            for (size_t b = 0; b < t->bytes; b++) {
                t->data[k][b] = (uint8_t)((b + x * 977) * UINT64_C(0x9e3779b97f4a7c15) >> 40);
            }
        }
        s->bytes += t->bytes;
    }
}

static void state_free(state *s)
{
    for (size_t i = 0; i < TENSORS; i++) {
        lg_layout_free(s->t[i].layout);
        free(s->t[i].data[0]);
        free(s->t[i].data[1]);
    }
}

static lg_status save_step(lg_session *session, const state *s, int k, uint32_t rank, lg_error *err)
{
    lg_save *save = NULL;
    LG__TRY(lg_save_begin(session, (uint64_t)k + 1, NULL, &save, err));
    for (size_t i = 0; i < TENSORS; i++) {
        const tensor *t = &s->t[i];
        lg_tensor x = LG_TENSOR_INIT;
        x.name = t->name, x.dtype = t->dtype, x.ndim = t->ndim, x.shape = t->shape, x.layout = t->layout;
        x.data = t->data[k];
        if (t->layout != NULL) {
            uint64_t local[3], offset[3] = {0};
            LG__TRY(lg_layout_local(t->layout, rank, t->ndim, t->shape, 0, local, NULL, NULL, err));
            LG__TRY(lg_layout_offset(t->layout, rank, t->ndim, t->shape, offset, err));
            x.data = t->data[k] + offset[0] * (t->bytes / t->shape[0]);
        }
        (void)lg_save_tensor(save, &x, err);
    }
    return lg_save_commit(save, NULL, err);
}

static void save_both(rank_env *env)
{
    const state *s = env->arg;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = env->comm, o.store = env->store;
    lg_session *session = NULL;
    RANK_TRY(env, lg_session_open("", &o, &session, &env->err));
    for (int k = 0; k < 2 && env->status == LG_OK; k++) {
        env->status = save_step(session, s, k, env->rank, &env->err);
    }
    lg_session_close(session, &env->err);
}

/* ------------------------------------------------------------------- targets */

enum { ALL_WHOLE, LARGE_WHOLE, MIXED };

typedef struct plan {
    const state *s;
    int what;
    uint64_t seed;
    uint32_t flags;
    uint64_t buffer_bytes, deadline_ms;
    uint32_t refuses;      /* this rank's callback fails; UINT32_MAX: none */
    int loaded[WORLD + 1]; /* the step that came, 1 or 2 */
    uint64_t bytes[WORLD + 1];
    lg_comm *(*wrap)(lg_comm *inner, void *arg);
    void *wrap_arg;
} plan;

typedef struct goal { /* a region, in memory that may be turned round */
    bool wanted, turned;
    lg__region r;
    int64_t strides[3];
    uint8_t *data;
    size_t bytes;
} goal;

typedef struct goals {
    rank_env *env;
    const plan *p;
    goal g[TENSORS][2]; /* the second one: the same again elsewhere */
} goals;

/* What a rank wants of a tensor: whole, its rows, a region that every second
 * rank wants, or nothing. */
static void choose(const plan *p, uint32_t rank, size_t i, goal *g)
{
    const tensor *t = &p->s->t[i];
    uint64_t seed = p->seed * 1000 + i, kind = p->what != MIXED ? 0 : build_random(&seed) % 4;
    *g = (goal){.wanted = p->what != LARGE_WHOLE || i < 2, .r = lg__region_whole(t->ndim, t->shape)};
    if (kind == 1 && t->ndim > 0) {
        uint64_t n = (t->shape[0] + WORLD - 1) / WORLD, at = rank % WORLD * n;
        g->r.offset[0] = at < t->shape[0] ? at : t->shape[0];
        g->r.size[0] = t->shape[0] - g->r.offset[0] < n ? t->shape[0] - g->r.offset[0] : n;
    } else if (kind == 2 && t->ndim > 0) {
        seed += rank % 2 * 77;
        for (uint32_t d = 0; d < t->ndim; d++) {
            g->r.offset[d] = build_random(&seed) % t->shape[d];
            g->r.size[d] = 1 + build_random(&seed) % (t->shape[d] - g->r.offset[d]);
        }
    } else if (kind == 3) {
        g->wanted = rank % 3 != 1;
    }
    seed = p->seed * 31 + rank + i;
    g->turned = p->what == MIXED && t->ndim == 2 && build_random(&seed) % 2 == 0;
    size_t width = lg_dtype_bits(t->dtype) / 8;
    g->bytes = (size_t)lg__region_elements(&g->r) * width;
    g->strides[0] = (int64_t)width, g->strides[1] = (int64_t)(width * (size_t)g->r.size[0]);
    g->data = calloc(1, g->bytes + 1);
}

static lg_status set_targets(lg_load *load, void *arg, lg_error *err)
{
    goals *x = arg;
    LG__RETURN_IF(x->p->refuses == x->env->rank, err, LG_ERR_INVALID, "no target for me");
    for (size_t i = 0; i < TENSORS; i++) {
        for (int k = 0; k < 2; k++) {
            goal *g = &x->g[i][k];
            const tensor *t = &x->p->s->t[i];
            if (g->wanted) {
                lg_target target = LG_TARGET_INIT;
                target.name = t->name, target.dtype = t->dtype, target.ndim = t->ndim, target.shape = t->shape;
                target.offset = g->r.offset, target.extent = g->r.size, target.data = g->data;
                target.strides = g->turned ? g->strides : NULL;
                LG__TRY(lg_load_tensor(load, &target, err));
            }
        }
    }
    return LG_OK;
}

static bool goal_right(const tensor *t, const goal *g, int step)
{
    if (g->bytes == t->bytes && !g->turned) {
        return memcmp(g->data, t->data[step - 1], t->bytes) == 0;
    }
    uint8_t *want = malloc(g->bytes + 1);
    build_extract(t->dtype, t->ndim, t->shape, t->data[step - 1], &g->r, want);
    bool right = true;
    size_t width = lg_dtype_bits(t->dtype) / 8;
    if (!g->turned) {
        right = memcmp(want, g->data, g->bytes) == 0;
    } else {
        for (size_t i = 0; right && i < g->r.size[0]; i++) {
            for (size_t k = 0; right && k < g->r.size[1]; k++) {
                right =
                    memcmp(want + (i * g->r.size[1] + k) * width, g->data + (k * g->r.size[0] + i) * width, width) == 0;
            }
        }
    }
    free(want);
    return right;
}

static void resume(rank_env *env)
{
    plan *p = env->arg;
    goals x = {.env = env, .p = p};
    lg_comm *comm = p->wrap != NULL ? p->wrap(env->comm, p->wrap_arg) : env->comm;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = comm, o.store = env->store, o.buffer_bytes = env->rank % 2 == 1 ? 0 : p->buffer_bytes,
    o.deadline_ms = p->deadline_ms;
    o.flags = LG_SESSION_READ_ONLY;
    lg_session *session = NULL;
    env->status = lg_session_open("", &o, &session, &env->err);
    if (env->status == LG_OK) {
        for (size_t i = 0; i < TENSORS; i++) {
            choose(p, env->rank, i, &x.g[i][0]);
            choose(p, env->rank, i, &x.g[i][1]);
            x.g[i][1].wanted = x.g[i][1].wanted && i == 2;
        }
        lg_resume_options ro = LG_RESUME_OPTIONS_INIT;
        ro.flags = p->flags;
        lg_resume_result *r = NULL;
        env->status = lg_resume(session, &ro, set_targets, &x, &r, &env->err);
        if (env->status == LG_OK) {
            p->loaded[env->rank] = (int)r->step;
            p->bytes[env->rank] = r->bytes_loaded;
        }
        for (size_t i = 0; i < TENSORS; i++) {
            for (int k = 0; k < 2; k++) {
                goal *g = &x.g[i][k];
                if (env->status == LG_OK && g->wanted && !goal_right(&p->s->t[i], g, (int)r->step)) {
                    env->status = lg_error_set(&env->err, LG_ERR_INTERNAL, "seed %llu: rank %u has the wrong \"%s\"",
                                               (unsigned long long)p->seed, env->rank, p->s->t[i].name);
                }
                free(g->data);
            }
        }
        lg_resume_result_free(r);
    }
    lg_error ignored = LG_ERROR_INIT;
    lg_session_close(session, &ignored);
    if (p->wrap != NULL) {
        lg_comm_free(comm);
    }
}

/* ------------------------------------------------------------------ fixture */

typedef struct fixture {
    test_root root;
    state s;
    fault_store *f;
} fixture;

static int setup(void **arg)
{
    fixture *x = calloc(1, sizeof *x);
    root_make(&x->root, ROOT_MEMORY);
    state_make(&x->s, 5);
    rank_env env[WORLD];
    run_ranks(WORLD, x->root.store, save_both, &x->s, env);
    for (int r = 0; r < WORLD; r++) {
        check_status(env[r].status, LG_OK, "save", &env[r].err, __FILE__, __LINE__);
    }
    x->f = fault_store_new(x->root.store);
    *arg = x;
    return 0;
}

static int teardown(void **arg)
{
    fixture *x = *arg;
    fault_store_free(x->f);
    state_free(&x->s);
    root_drop(&x->root);
    free(x);
    return 0;
}

static plan new_plan(const fixture *x, uint32_t flags)
{
    return (plan){.s = &x->s, .flags = flags, .refuses = UINT32_MAX, .seed = 1};
}

/* All ranks end with `want`, and say the same. */
static void run_plan(fixture *x, plan *p, uint32_t world, lg_status want, rank_env *env)
{
    fault_store_log_clear(x->f);
    run_ranks(world, fault_store_handle(x->f), resume, p, env);
    for (uint32_t r = 0; r < world; r++) {
        check_status(env[r].status, want, "resume", &env[r].err, __FILE__, __LINE__);
        assert_string_equal(env[r].err.message, env[0].err.message);
    }
}

static uint64_t bytes_read(fixture *x, const char *of)
{
    size_t n;
    uint64_t sum = 0;
    const fault_event *e = fault_store_log(x->f, &n);
    for (size_t i = 0; i < n; i++) {
        sum += e[i].op == FAULT_READ && strstr(e[i].path, of) != NULL ? e[i].bytes : 0;
    }
    return sum;
}

/* ---------------------------------------------------------------------- tests */

static void read_once(void **arg)
{
    fixture *x = *arg;
    static const struct {
        uint32_t flags;
        double least, most;
        const char *name;
    } cases[] = {{LG_RESUME_NO_SHARE, WORLD * 0.99, WORLD * 1.2, "no sharing"},
                 {LG_RESUME_SHARE, 0.99, 1.15, "sharing"},
                 {0, 0.99, 1.4, "by itself, large ones"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        plan p = new_plan(x, cases[i].flags);
        rank_env env[WORLD];
        run_plan(x, &p, WORLD, LG_OK, env);
        double times = (double)bytes_read(x, "shard-") / (double)x->s.bytes;
        print_message("# %s: %d ranks read %.3f times the state\n", cases[i].name, WORLD, times);
        assert_true(times >= cases[i].least && times <= cases[i].most);
        for (uint32_t r = 0; r < WORLD; r++) {
            assert_int_equal(p.loaded[r], 2);
            assert_int_equal(p.bytes[r], x->s.bytes + x->s.t[2].bytes);
        }
        assert_true(bytes_read(x, "lastgood.json") > 0);
    }
}

static void heads_once(void **arg)
{
    fixture *x = *arg;
    plan p = new_plan(x, LG_RESUME_SHARE);
    p.what = LARGE_WHOLE;
    rank_env env[WORLD];
    run_plan(x, &p, WORLD, LG_OK, env);
    size_t n, headers = 0, sums = 0;
    const fault_event *e = fault_store_log(x->f, &n);
    for (size_t i = 0; i < n; i++) {
        bool first = e[i].op == FAULT_READ && e[i].offset == 0;
        headers += first && strstr(e[i].path, "shard-") != NULL;
        sums += first && strstr(e[i].path, ".sums") != NULL;
    }
    assert_int_equal(headers, WORLD);
    assert_int_equal(sums, WORLD);
}

static void anything(void **arg)
{
    fixture *x = *arg;
    static const uint64_t caps[] = {0, MIB, 3 * MIB};
    for (uint64_t seed = 1; seed <= 24; seed++) {
        plan p = new_plan(x, LG_RESUME_SHARE);
        p.what = MIXED, p.seed = seed, p.buffer_bytes = caps[seed % 3];
        rank_env env[WORLD + 1];
        run_plan(x, &p, 2 + (uint32_t)(seed % WORLD), LG_OK, env);
    }
}

static void damage(void **arg)
{
    fixture *x = *arg;
    char folders[4][64];
    assert_int_equal(root_folders(&x->root, folders, 4), 2);
    /* In the largest tensor of rank 3: one rank alone reads it. */
    root_flip(&x->root, folders[1], "shard-00004-model-00001-of-00001.safetensors", MIB + 77);
    plan p = new_plan(x, LG_RESUME_SHARE);
    rank_env env[WORLD];
    run_plan(x, &p, WORLD, LG_OK, env);
    for (uint32_t r = 0; r < WORLD; r++) {
        assert_int_equal(p.loaded[r], 1);
    }
    p.flags |= LG_RESUME_STRICT;
    run_plan(x, &p, WORLD, LG_ERR_NOT_WHOLE, env);
    assert_non_null(strstr(env[0].err.message, "is damaged"));
}

/* Sharing was not asked for: large tensors are shared all the same. */
static void damage_of_sums(void **arg)
{
    fixture *x = *arg;
    char folders[4][64];
    assert_int_equal(root_folders(&x->root, folders, 4), 2);
    root_flip(&x->root, folders[1], "rank-00001.sums", 20);
    plan p = new_plan(x, 0);
    rank_env env[WORLD];
    run_plan(x, &p, WORLD, LG_OK, env);
    for (uint32_t r = 0; r < WORLD; r++) {
        assert_int_equal(p.loaded[r], 1);
    }
}

static void one_fails(void **arg)
{
    fixture *x = *arg;
    rank_env env[WORLD];
    plan p = new_plan(x, LG_RESUME_SHARE | LG_RESUME_STRICT);
    p.refuses = 2;
    run_plan(x, &p, WORLD, LG_ERR_INVALID, env);
    assert_non_null(strstr(env[0].err.message, "rank 2: "));
    p.refuses = UINT32_MAX;
    bool done = false;
    uint64_t nth = 1;
    for (; !done; nth += 1 + nth / 4) {
        fault_store_arm(x->f,
                        (fault_plan){.kinds = FAULT_BIT(FAULT_READ), .path = "shard-", .nth = nth, .os_errno = EIO});
        run_ranks(WORLD, fault_store_handle(x->f), resume, &p, env);
        done = fault_store_fired(x->f) == 0;
        for (uint32_t r = 0; r < WORLD; r++) {
            assert_int_equal(env[r].status, done ? LG_OK : LG_ERR_NOT_WHOLE);
            assert_string_equal(env[r].err.message, env[0].err.message);
        }
    }
    assert_true(nth > 8);
}

/* A communicator whose all-to-all goes wrong on one rank. */
typedef struct trouble {
    uint32_t rank, at; /* at its at-th call */
    bool lies;         /* a byte arrives changed, else the call never comes */
    atomic_uint calls;
} trouble;

typedef struct bad_comm {
    lg_comm *inner;
    trouble *t;
} bad_comm;

static lg_status bad_barrier(void *ctx, uint64_t ms, lg_error *err)
{
    return lg__comm_barrier(((bad_comm *)ctx)->inner, ms, err);
}
static lg_status bad_gather(void *ctx, const void *data, size_t bytes, void **all, size_t *sizes, uint64_t ms,
                            lg_error *err)
{
    return lg__comm_all_gather(((bad_comm *)ctx)->inner, data, bytes, all, sizes, ms, err);
}
static lg_status bad_broadcast(void *ctx, void **data, size_t *bytes, uint32_t root, uint64_t ms, lg_error *err)
{
    return lg__comm_broadcast(((bad_comm *)ctx)->inner, data, bytes, root, ms, err);
}
static lg_status bad_all_to_all(void *ctx, const void *const *send, const size_t *send_bytes, void **recv,
                                size_t *recv_bytes, uint64_t ms, lg_error *err)
{
    bad_comm *b = ctx;
    bool now = lg_comm_rank(b->inner) == b->t->rank && atomic_fetch_add(&b->t->calls, 1) + 1 == b->t->at;
    if (now && !b->t->lies) {
        return lg_error_set(err, LG_ERR_COMM, "the cable is out");
    }
    lg_status st = lg__comm_all_to_all(b->inner, send, send_bytes, recv, recv_bytes, ms, err);
    for (uint32_t r = 0; st == LG_OK && now && r < lg_comm_size(b->inner); r++) {
        if (recv_bytes[r] > 9) {
            ((char *)recv[r])[9] ^= 1;
            break;
        }
    }
    return st;
}
static void bad_destroy(void *ctx) { free(ctx); }

static lg_comm *make_bad(lg_comm *inner, void *arg)
{
    static const lg_comm_ops ops = {LG_COMM_OPS_VERSION, bad_barrier,    bad_gather,
                                    bad_broadcast,       bad_all_to_all, bad_destroy};
    bad_comm *b = calloc(1, sizeof *b);
    *b = (bad_comm){inner, arg};
    lg_comm *out = NULL;
    lg_error err = LG_ERROR_INIT;
    OK(lg_comm_create(&ops, b, lg_comm_rank(inner), lg_comm_size(inner), &out, &err));
    return out;
}

static void dies_in_the_middle(void **arg)
{
    fixture *x = *arg;
    rank_env env[WORLD];
    for (uint32_t at = 1; at <= 2; at++) {
        trouble t = {.rank = 1, .at = at};
        plan p = new_plan(x, LG_RESUME_SHARE | LG_RESUME_STRICT);
        p.buffer_bytes = MIB, p.deadline_ms = 700, p.wrap = make_bad, p.wrap_arg = &t;
        run_ranks(WORLD, x->root.store, resume, &p, env);
        for (uint32_t r = 0; r < WORLD; r++) {
            /* late, or known to be gone */
            assert_true(env[r].status == LG_ERR_COMM || env[r].status == LG_ERR_TIMEOUT);
            if (r != 1) {
                assert_non_null(strstr(env[r].err.message, "rank 1"));
            }
        }
    }
}

static void wrong_bytes(void **arg)
{
    fixture *x = *arg;
    rank_env env[WORLD];
    trouble t = {.rank = 2, .at = 2, .lies = true};
    plan p = new_plan(x, LG_RESUME_SHARE);
    p.buffer_bytes = MIB, p.wrap = make_bad, p.wrap_arg = &t;
    run_plan(x, &p, WORLD, LG_ERR_COMM, env);
    assert_non_null(strstr(env[0].err.message, "rank 2: "));
    assert_non_null(strstr(env[0].err.message, "did not arrive as it was"));
    assert_true(atomic_load(&t.calls) > 2);
}

static void refuses_both(void **arg)
{
    fixture *x = *arg;
    rank_env env[WORLD];
    plan p = new_plan(x, LG_RESUME_SHARE | LG_RESUME_NO_SHARE);
    run_plan(x, &p, WORLD, LG_ERR_INVALID, env);
}

#define TEST(name, test)                  \
    {                                     \
        name, test, setup, teardown, NULL \
    }

int main(void)
{
    static const struct CMUnitTest tests[] = {
        TEST("what all ranks want is read about once by all of them together", read_once),
        TEST("on as many ranks as saved each reads its own file, and each header is read once", heads_once),
        TEST("any mixture of wants, strides and caps comes right to every rank", anything),
        TEST("K06: damage that one rank finds in its piece makes all step back", damage),
        TEST("K06: a damaged sums file makes all step back", damage_of_sums),
        TEST("K06 F098: one rank's error is every rank's, at any read", one_fails),
        TEST("K06: a rank that is lost between two rounds is named within the deadline", dies_in_the_middle),
        TEST("bytes that are changed on their way between ranks are found", wrong_bytes),
        TEST("sharing cannot be asked for and forbidden at once", refuses_both),
    };
    return cmocka_run_group_tests_name("load_shared", tests, NULL, NULL);
}
