/* SPDX-License-Identifier: Apache-2.0 */

/* K04 F056, K12: the image of a rank's files that a save in the background takes
 * is, byte for byte and digest for digest, what a save in the foreground writes
 * for the same plan, whatever the tensors, blocks and threads; and it holds what
 * was in memory when it was copied. */

#include "core/stage.h"
#include "save_kit.h"
#include "support/build.h"
#include "support/environment.h"

#include "base/hash.h"
#include "base/thread.h"

#include <pthread.h>
#include <stdatomic.h>

#define FOLDER "step"
#define SOURCES_MAX 40
#define LARGEST ((uint64_t)3 << 20)

static uint64_t now; /* the seed of the round */

typedef struct source {
    uint8_t *memory;
    size_t bytes;
    bool lazy;
} source;

typedef struct scene {
    uint64_t dice;
    lg_save *save;
    lg_layout *layouts[8];
    size_t n_layouts;
    source sources[SOURCES_MAX];
    size_t n_sources;
    uint32_t world, rank;
} scene;

static uint64_t roll(scene *s, uint64_t n) { return build_random(&s->dice) % n; }

/* A size from 0 to `most`: often small, sometimes large. */
static uint64_t roll_size(scene *s, uint64_t most)
{
    const uint64_t kind = roll(s, 8);
    const uint64_t limit = kind == 0 ? 1 : kind < 5 ? 300 : kind < 7 ? 100000 : LARGEST;
    return roll(s, (limit < most ? limit : most) + 1);
}

static uint8_t *new_memory(scene *s, size_t bytes, bool lazy)
{
    source *m = &s->sources[s->n_sources++];
    *m = (source){.memory = malloc(bytes + 1), .bytes = bytes, .lazy = lazy};
    assert_non_null(m->memory);
    for (size_t i = 0; i < bytes; i += 8) {
        const uint64_t x = build_random(&s->dice);
        memcpy(m->memory + i, &x, bytes - i < 8 ? bytes - i : 8);
    }
    return m->memory;
}

/* Memory for a part of this shape: packed, or with the dimensions in another
 * order, gaps and backward ones. */
static const void *place(scene *s, lg_dtype dtype, uint32_t ndim, const uint64_t *size, bool lazy,
                         int64_t strides[LG_MAX_NDIM], const int64_t **out)
{
    uint64_t elements = 1;
    for (uint32_t d = 0; d < ndim; d++) {
        elements *= size[d];
    }
    const uint64_t bits = lg_dtype_bits(dtype);
    *out = NULL;
    if (bits % 8 != 0 || elements == 0 || ndim == 0 || roll(s, 3) == 0) {
        return new_memory(s, (size_t)((elements * bits + 7) / 8), lazy);
    }
    uint32_t order[LG_MAX_NDIM];
    for (uint32_t d = 0; d < ndim; d++) {
        order[d] = d;
    }
    for (uint32_t d = ndim; d > 1; d--) { /* any order */
        const uint32_t k = (uint32_t)roll(s, d), t = order[d - 1];
        order[d - 1] = order[k];
        order[k] = t;
    }
    uint64_t step = bits / 8;
    int64_t first = 0;
    for (uint32_t i = ndim; i-- > 0;) {
        const uint32_t d = order[i];
        const bool backward = roll(s, 8) == 0;
        strides[d] = backward ? -(int64_t)step : (int64_t)step;
        first += backward ? (int64_t)(step * (size[d] - 1)) : 0;
        step *= size[d] + (elements < 20000 ? roll(s, 3) : 0);
    }
    *out = strides;
    return new_memory(s, (size_t)step, lazy) + first;
}

static const lg_dtype dtypes[] = {LG_BOOL, LG_F4,  LG_F6_E2M3, LG_U8,  LG_F8_E4M3, LG_F8_E8M0, LG_I16,
                                  LG_BF16, LG_F16, LG_F32,     LG_C64, LG_F64,     LG_I64,     LG_F6_E3M2};

static void add_layout(scene *s, lg_layout *layout) { s->layouts[s->n_layouts++] = layout; }

static void add_tensor(scene *s, size_t number)
{
    char name[32];
    snprintf(name, sizeof name, "t.%zu", number);
    const lg_dtype dtype = dtypes[roll(s, sizeof dtypes / sizeof *dtypes)];
    const uint64_t bits = lg_dtype_bits(dtype), grain = bits % 8 == 0 ? 1 : bits == 4 ? 2 : 4;
    const uint32_t ndim = bits % 8 != 0 ? 1 + (uint32_t)roll(s, 3) : (uint32_t)roll(s, 5);
    uint64_t shape[LG_MAX_NDIM] = {0}, left = LARGEST * 8 / bits, elements = 1;
    for (uint32_t d = 0; d < ndim; d++) {
        const bool last = d + 1 == ndim;
        shape[d] = last ? roll_size(s, left) / grain * grain : 1 + roll(s, left < 40 ? left + 1 : 40);
        left = shape[d] == 0 ? left : left / shape[d];
        left = left < grain ? grain : left;
        elements *= shape[d];
    }
    const bool lazy = roll(s, 2) == 0;
    lg_tensor t = kit_tensor(name, dtype, ndim, shape, NULL);
    t.flags = lazy ? LG_TENSOR_LAZY : 0;
    t.group = roll(s, 3) == 0 ? LG_GROUP_OPTIM : LG_GROUP_MODEL;
    int64_t strides[LG_MAX_NDIM];
    uint64_t local[LG_MAX_NDIM], start, count;
    const uint64_t kind = roll(s, 5);
    if (kind == 0 && ndim > (grain > 1 ? 1 : 0)) { /* cut by the first dimension, never inside a byte */
        t.layout = s->layouts[0];
    } else if (kind == 1) { /* a replica, written by one rank or a piece by each */
        t.layout = s->layouts[grain > 1 ? 1 : 1 + roll(s, 2)];
    } else if (kind == 2 && bits % 8 == 0 && elements > 0) { /* a range of a flat buffer */
        add_layout(s, kit_flat(s->world, elements + 5));
        t.layout = s->layouts[s->n_layouts - 1];
        t.flat_offset = 3;
        assert_ok(lg_layout_local(t.layout, s->rank, ndim, shape, 3, local, &start, &count, err));
        t.data = new_memory(s, (size_t)(count * bits / 8), lazy);
        assert_ok(lg_save_tensor(s->save, &t, err));
        return;
    }
    if (kind == 3 && grain == 1 && ndim > 0 && shape[0] > 1 && elements > 0) { /* boxes that follow no rule */
        const uint64_t middle = 1 + roll(s, shape[0] - 1);
        uint64_t offsets[2][LG_MAX_NDIM] = {{0}, {middle}}, sizes[2][LG_MAX_NDIM];
        int64_t of_box[2][LG_MAX_NDIM];
        lg_box boxes[2];
        for (int i = 0; i < 2; i++) {
            memcpy(sizes[i], shape, sizeof sizes[i]);
            sizes[i][0] = i == 0 ? middle : shape[0] - middle;
            boxes[i] = (lg_box){.offset = offsets[i], .size = sizes[i]};
            boxes[i].data = place(s, dtype, ndim, sizes[i], lazy, of_box[i], &boxes[i].strides);
        }
        t.boxes = boxes, t.n_boxes = 2;
        assert_ok(lg_save_tensor(s->save, &t, err));
        return;
    }
    const uint64_t *size = shape;
    if (t.layout != NULL) {
        assert_ok(lg_layout_local(t.layout, s->rank, ndim, shape, 0, local, &start, &count, err));
        size = local;
    }
    t.data = place(s, dtype, ndim, size, lazy, strides, &t.strides);
    lg_error why = LG_ERROR_INIT;
    if (lg_save_tensor(s->save, &t, &why) != LG_OK) {
        fail_msg("LASTGOOD_SEED=%llu: %s", (unsigned long long)now, why.message);
    }
}

static lg_save *new_save(scene *s, uint64_t block_bytes)
{
    const lg__save_facts facts = {
        .rank = s->rank, .world = s->world, .block_bytes = block_bytes, .buffer_bytes = (uint64_t)8 << 20};
    lg_save *save = NULL;
    assert_ok(lg__save_new(&facts, 500, 0, &save, err));
    return save;
}

static void scene_free(scene *s)
{
    lg_save_abort(s->save);
    for (size_t i = 0; i < s->n_layouts; i++) {
        lg_layout_free(s->layouts[i]);
    }
    for (size_t i = 0; i < s->n_sources; i++) {
        free(s->sources[i].memory);
    }
}

static void scribble(scene *s, bool lazy)
{
    for (size_t i = 0; i < s->n_sources; i++) {
        if (s->sources[i].lazy == lazy) {
            memset(s->sources[i].memory, 0xee, s->sources[i].bytes);
        }
    }
}

static lg_store *new_store(const char *uri)
{
    lg_store *store;
    assert_ok(lg_store_open(uri, &store, err));
    assert_ok(lg__store_make_root(store, err));
    assert_ok(lg__store_make_dir(store, FOLDER, err));
    return store;
}

typedef struct pair {
    lg_store *a, *b;
    uint64_t files, bytes;
} pair;

static int compare_file(const lg_node *node, void *arg)
{
    pair *p = arg;
    size_t n, m;
    char *a = build_read(p->a, FOLDER, node->name, &n), *b = build_read(p->b, FOLDER, node->name, &m);
    if (n != m || memcmp(a, b, n) != 0) {
        size_t at = 0;
        while (at < n && at < m && a[at] == b[at]) {
            at++;
        }
        fail_msg("LASTGOOD_SEED=%llu LASTGOOD_ROUNDS=1: %s differs at byte %zu of %zu and %zu", (unsigned long long)now,
                 node->name, at, n, m);
    }
    free(a);
    free(b);
    p->files++;
    p->bytes += n;
    return 0;
}

static int count_file(const lg_node *node, void *arg)
{
    (void)node;
    ++*(uint64_t *)arg;
    return 0;
}

typedef struct signal_ {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t calls;
} signal_;

static void on_staged(void *arg)
{
    signal_ *g = arg;
    pthread_mutex_lock(&g->lock);
    g->calls++;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static void one_round(uint64_t seed, pair *total)
{
    static const uint64_t blocks[] = {4096, 8192, 65536, 262144, 1 << 20, 2 << 20, UINT64_C(64) << 20};
    scene s = {.dice = seed, .world = 1};
    s.world = 1 + (uint32_t)roll(&s, 4);
    s.rank = (uint32_t)roll(&s, s.world);
    add_layout(&s, kit_rows(s.world, 0));
    add_layout(&s, kit_replicated(s.world, 1));
    add_layout(&s, kit_replicated(s.world, s.world));
    const uint64_t block = blocks[roll(&s, sizeof blocks / sizeof *blocks)];
    s.save = new_save(&s, block);
    const size_t n = roll(&s, 12);
    for (size_t i = 0; i < n && s.n_layouts < 8; i++) {
        add_tensor(&s, i);
    }
    const size_t state_bytes = roll(&s, 3) == 0 ? 1 + roll(&s, 5000) : 0;
    if (state_bytes > 0) {
        const uint8_t *state = new_memory(&s, state_bytes, false);
        assert_ok(lg_save_rank_bytes(s.save, "state", state, state_bytes, err));
    }
    lg_save *alone[1] = {s.save};
    assert_ok(kit_settle(alone, 1, false, err)); /* what is undeclared, as if all held the same */
    char plain_uri[64], staged_uri[64];
    snprintf(plain_uri, sizeof plain_uri, "mem:stage-plain");
    snprintf(staged_uri, sizeof staged_uri, "mem:stage-staged");
    lg_store *plain = new_store(plain_uri), *staged = new_store(staged_uri);
    lg__plan *plan = NULL;
    assert_ok(lg__plan_make(s.save, &kit_ids, &plan, err));
    lg__written want = {0}, got = {0};
    assert_ok(lg__save_write(s.save, plain, FOLDER, plan, &kit_ids, &want, err));

    const uint64_t bytes = lg__stage_bytes(plan);
    void *memory = lg__pages_new((size_t)bytes);
    assert_non_null(memory);
    memset(memory, 0x55, (size_t)bytes); /* of an earlier save */
    lg__stage *stage = NULL;
    assert_ok(lg__stage_new(plan, block, memory, (size_t)bytes, &stage, err));
    assert_ok(lg__stage_copy_eager(stage, 1 + (uint32_t)roll(&s, 16), err));
    scribble(&s, false);
    signal_ g = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0};
    lg__stage_start_lazy(stage, 1 + (uint32_t)roll(&s, 16), (lg__ready){0}, on_staged, &g);
    if (roll(&s, 2) == 0) { /* the trainer changes all before the writer has begun */
        pthread_mutex_lock(&g.lock);
        while (g.calls == 0) {
            pthread_cond_wait(&g.changed, &g.lock);
        }
        pthread_mutex_unlock(&g.lock);
        scribble(&s, true);
    }
    assert_ok(lg__save_write_stage(s.save, staged, FOLDER, plan, &kit_ids, stage, &got, err));
    lg__stage_free(stage);
    assert_int_equal(g.calls, 1);
    assert_memory_equal(&got, &want, sizeof got);
    pair p = {.a = plain, .b = staged};
    assert_ok(lg__store_list(plain, FOLDER, compare_file, &p, err));
    uint64_t files = 0;
    assert_ok(lg__store_list(staged, FOLDER, count_file, &files, err));
    assert_int_equal(files, p.files);
    total->files += p.files;
    total->bytes += p.bytes;

    lg__pages_free(memory, (size_t)bytes);
    lg__plan_free(plan);
    scene_free(&s);
    lg_store_free(plain);
    lg_store_free(staged);
    lg_memory_store_drop(plain_uri + 4);
    lg_memory_store_drop(staged_uri + 4);
}

static void k04_f056_k12_the_image_is_what_a_save_in_the_foreground_writes(void **state)
{
    (void)state;
    const uint64_t seed = number_from("LASTGOOD_SEED", 20261129);
    const uint64_t rounds = number_from("LASTGOOD_ROUNDS", in_brief() ? 10 : 400);
    pair total = {0};
    for (uint64_t i = 0; i < rounds; i++) {
        now = seed + i;
        one_round(now, &total);
    }
    print_message("# LASTGOOD_SEED=%llu: %llu files, %llu MB compared\n", (unsigned long long)seed,
                  (unsigned long long)total.files, (unsigned long long)(total.bytes / 1000000));
    assert_true(total.files > rounds && total.bytes > rounds * 10000);
}

/* --------------------------------------------------------- not finite, no memory */

static void a_lazy_tensor_that_is_not_finite_fails_the_stage_by_name_and_lets_go_of_memory(void **state)
{
    (void)state;
    for (int lazy = 0; lazy < 2; lazy++) {
        const lg__save_facts facts = {.rank = 0, .world = 1, .block_bytes = 4096, .buffer_bytes = 1 << 20};
        lg_save *save = NULL;
        assert_ok(lg__save_new(&facts, 500, LG_SAVE_FINITE, &save, err));
        const uint64_t shape[] = {3, 500000};
        float *data = calloc(1500000, sizeof *data);
        assert_non_null(data);
        const uint32_t inf = 0x7f800000;
        memcpy(&data[1200003], &inf, sizeof inf);
        lg_tensor t = kit_tensor("w", LG_F32, 2, shape, data);
        t.flags = lazy ? LG_TENSOR_LAZY : 0;
        lg_layout *rows = kit_rows(1, 0);
        t.layout = rows;
        assert_ok(lg_save_tensor(save, &t, err));
        lg__plan *plan = NULL;
        assert_ok(lg__plan_make(save, &kit_ids, &plan, err));
        const uint64_t bytes = lg__stage_bytes(plan);
        void *memory = lg__pages_new((size_t)bytes);
        lg__stage *stage = NULL;
        assert_ok(lg__stage_new(plan, 4096, memory, (size_t)bytes, &stage, err));
        signal_ g = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0};
        if (lazy) {
            assert_ok(lg__stage_copy_eager(stage, 4, err));
            lg__stage_start_lazy(stage, 4, (lg__ready){0}, on_staged, &g);
            lg_store *store = new_store("mem:stage-inf");
            lg__written w;
            assert_fails(LG_ERR_INVALID, "tensor \"w\" is not finite at [2, 200003]",
                         lg__save_write_stage(save, store, FOLDER, plan, &kit_ids, stage, &w, err));
            lg_store_free(store);
            lg_memory_store_drop("stage-inf");
        } else {
            assert_fails(LG_ERR_INVALID, "tensor \"w\" is not finite at [2, 200003]",
                         lg__stage_copy_eager(stage, 4, err));
        }
        lg__stage_free(stage);
        assert_int_equal(g.calls, lazy);
        lg__pages_free(memory, (size_t)bytes);
        lg__plan_free(plan);
        lg_save_abort(save);
        lg_layout_free(rows);
        free(data);
    }
}

static void k06_an_allocation_that_fails_while_staging_fails_it_and_hangs_nothing(void **state)
{
    (void)state;
    scene s = {.dice = 7, .world = 1};
    s.save = new_save(&s, 4096);
    add_layout(&s, kit_rows(1, 0));
    for (int i = 0; i < 4; i++) {
        const uint64_t shape[] = {600000};
        char name[8];
        snprintf(name, sizeof name, "t%d", i);
        lg_tensor t = kit_tensor(name, LG_U8, 1, shape, new_memory(&s, 600000, i % 2 == 0));
        t.flags = i % 2 == 0 ? LG_TENSOR_LAZY : 0;
        t.layout = s.layouts[0];
        assert_ok(lg_save_tensor(s.save, &t, err));
    }
    lg__plan *plan = NULL;
    assert_ok(lg__plan_make(s.save, &kit_ids, &plan, err));
    const uint64_t bytes = lg__stage_bytes(plan);
    void *memory = lg__pages_new((size_t)bytes);
    uint32_t failed = 0;
    for (size_t n = 0;; n++) {
        lg_store *store = new_store("mem:stage-nomem");
        signal_ g = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0};
        lg__stage *stage = NULL;
        lg_error err = LG_ERROR_INIT;
        lg__written w;
        lg__mem_fail_after(n);
        lg_status st = lg__stage_new(plan, 4096, memory, (size_t)bytes, &stage, &err);
        if (st == LG_OK) {
            st = lg__stage_copy_eager(stage, 3, &err);
        }
        if (st == LG_OK) {
            lg__stage_start_lazy(stage, 3, (lg__ready){0}, on_staged, &g);
            st = lg__save_write_stage(s.save, store, FOLDER, plan, &kit_ids, stage, &w, &err);
        }
        lg__stage_free(stage);
        lg__mem_fail_after(SIZE_MAX);
        assert_true(g.calls <= 1);
        lg_store_free(store);
        lg_memory_store_drop("stage-nomem");
        if (st == LG_OK) {
            break;
        }
        failed++;
        assert_int_equal(st, LG_ERR_NOMEM);
    }
    print_message("# %u allocations failed\n", failed);
    assert_true(failed > 10);
    lg__pages_free(memory, (size_t)bytes);
    lg__plan_free(plan);
    scene_free(&s);
}

/* Such a plan cannot be made of memory that exists: the sum is checked all the same. */
static void the_size_of_an_image_that_overflows_is_the_largest_there_is(void **state)
{
    (void)state;
    static const uint64_t sizes[][2] = {{UINT64_MAX, 1}, {UINT64_MAX - 100, 0}, {UINT64_MAX / 2, UINT64_MAX / 2 + 2}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        lg__plan_file files[2] = {{.data_bytes = sizes[i][0]}, {.data_bytes = sizes[i][1]}};
        files[0].header.len = 64;
        const lg__plan plan = {.files = files, .n_files = 2};
        assert_true(lg__stage_bytes(&plan) == UINT64_MAX);
    }
    lg__plan_file small = {.data_bytes = 1000};
    small.header.len = 64;
    const lg__plan plan = {.files = &small, .n_files = 1};
    assert_true(lg__stage_bytes(&plan) >= 1064 && lg__stage_bytes(&plan) < 20000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k04_f056_k12_the_image_is_what_a_save_in_the_foreground_writes),
        cmocka_unit_test(a_lazy_tensor_that_is_not_finite_fails_the_stage_by_name_and_lets_go_of_memory),
        cmocka_unit_test(k06_an_allocation_that_fails_while_staging_fails_it_and_hangs_nothing),
        cmocka_unit_test(the_size_of_an_image_that_overflows_is_the_largest_there_is),
    };
    return cmocka_run_group_tests_name("stage", tests, NULL, NULL);
}
