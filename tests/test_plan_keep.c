/* SPDX-License-Identifier: Apache-2.0 */

/* K16 F271: a plan that serves the next save of the same tensors is, in every
 * byte and address, what planning anew makes; and what is not the same is
 * planned anew. */

#include "save_kit.h"
#include "support/build.h"
#include "support/environment.h"

#include "base/hash.h"

#include <time.h>

#define MOST 24
#define MEMORY ((size_t)1 << 20)
#define FLAT_LENGTH 100000

static uint8_t memory[MEMORY];

/* ------------------------------------------------------------------- scenes */

enum { ROWS, REPLICATED, THIRDS, FLAT, BOXES, UNDECLARED, N_KINDS };

typedef struct thing {
    char name[32];
    lg_dtype dtype;
    uint32_t ndim;
    uint64_t shape[2];
    int kind;
    bool strided, lazy, optim, tied;
    uint64_t middle; /* of the rows, where boxes meet */
    uint64_t flat_offset;
} thing;

typedef struct scene {
    uint64_t dice, seed;
    uint32_t world, rank;
    uint32_t flags;
    lg_layout *layouts[BOXES];
    thing things[MOST];
    size_t n;
    size_t blob_bytes[3];
    size_t n_blobs;
    size_t names; /* given so far */
} scene;

static uint64_t roll(scene *s, uint64_t n) { return build_random(&s->dice) % n; }

static thing new_thing(scene *s)
{
    static const lg_dtype dtypes[] = {LG_U8, LG_BF16, LG_F32, LG_F64, LG_F8_E8M0};
    thing t = {.dtype = dtypes[roll(s, 5)],
               .ndim = (uint32_t)roll(s, 3),
               .shape = {1 + roll(s, 30), roll(s, 8) == 0 ? 0 : 1 + roll(s, 30)},
               .kind = (int)roll(s, N_KINDS),
               .strided = roll(s, 3) == 0,
               .lazy = roll(s, 2) == 0,
               .optim = roll(s, 3) == 0,
               .tied = roll(s, 6) == 0,
               .flat_offset = roll(s, FLAT_LENGTH / 2)};
    t.middle = roll(s, t.shape[0] + 1);
    static const char *const forms[] = {"t.%zu", "layers.%zu.weight", "with \"quotes\" %zu", "ü %zu"};
    snprintf(t.name, sizeof t.name, forms[roll(s, 4)], s->names++);
    return t;
}

/* What this thing can be in a world like this. */
static int kind_of(const scene *s, const thing *t)
{
    if (t->kind == UNDECLARED && s->world > 1) {
        return REPLICATED;
    }
    if (t->ndim == 0 && (t->kind == ROWS || t->kind == THIRDS || t->kind == BOXES)) {
        return REPLICATED;
    }
    if (t->kind == BOXES && t->ndim == 2 && t->shape[1] == 0) { /* nothing to tile: as undeclared */
        return REPLICATED;
    }
    return t->kind;
}

static const void *somewhere(scene *s) { return memory + roll(s, MEMORY / 2 / 8) * 8; }

static void add_boxes(scene *s, lg_save *save, lg_tensor *t, const thing *x, const int64_t *strides)
{
    uint64_t offsets[2][2] = {{0, 0}, {x->middle, 0}},
             sizes[2][2] = {{x->middle, x->shape[1]}, {x->shape[0] - x->middle, x->shape[1]}};
    lg_box boxes[2];
    for (int i = 0; i < 2; i++) {
        boxes[i] = (lg_box){offsets[i], sizes[i], somewhere(s), x->strided ? strides : NULL};
    }
    t->boxes = boxes, t->n_boxes = 2;
    assert_ok(lg_save_tensor(save, t, err));
}

static lg_save *describe(scene *s)
{
    lg_save *save = kit_save(s->rank, s->world, s->flags);
    save->step = roll(s, 3) == 0 ? roll(s, UINT64_C(1) << 50) : roll(s, 20);
    for (size_t i = 0; i < s->n; i++) {
        const thing *x = &s->things[i];
        const int64_t element = (int64_t)lg_dtype_bits(x->dtype) / 8, strides[] = {element, 512 * element};
        const int kind = kind_of(s, x);
        lg_tensor t = kit_tensor(x->name, x->dtype, x->ndim, x->shape, somewhere(s));
        t.flags = x->lazy ? LG_TENSOR_LAZY : 0;
        t.group = x->optim ? LG_GROUP_OPTIM : LG_GROUP_MODEL;
        if (kind == BOXES) {
            t.data = NULL;
            add_boxes(s, save, &t, x, strides);
        } else {
            t.layout = kind == UNDECLARED ? NULL : s->layouts[kind];
            t.flat_offset = kind == FLAT ? x->flat_offset : 0;
            t.strides = x->strided && kind != FLAT ? strides : NULL;
            assert_ok(lg_save_tensor(save, &t, err));
        }
        if (x->tied) {
            char alias[64];
            snprintf(alias, sizeof alias, "tied.%s", x->name);
            assert_ok(lg_save_alias(save, alias, x->name, err));
        }
    }
    for (size_t i = 0; i < s->n_blobs; i++) {
        char key[32];
        snprintf(key, sizeof key, "rng.%zu", i);
        assert_ok(lg_save_rank_bytes(save, key, memory, s->blob_bytes[i], err));
    }
    if (s->world == 1) {
        assert_ok(kit_settle(&save, 1, false, err));
    }
    return save;
}

/* One thing is otherwise from now on. */
static void change(scene *s)
{
    thing *x = &s->things[roll(s, s->n)], *y = &s->things[roll(s, s->n)];
    const thing fresh = new_thing(s), t = *x;
    switch (roll(s, 14)) {
    case 0:
        memcpy(x->name, fresh.name, sizeof x->name);
        break;
    case 1:
        x->dtype = fresh.dtype;
        break;
    case 2:
        x->shape[0] = fresh.shape[0];
        x->middle = x->shape[0] / 2;
        break;
    case 3:
        x->shape[1] = fresh.shape[1];
        break;
    case 4:
        x->ndim = fresh.ndim;
        break;
    case 5:
        x->kind = fresh.kind;
        break;
    case 6:
        x->strided = !x->strided;
        break;
    case 7:
        x->lazy = !x->lazy;
        break;
    case 8:
        x->optim = !x->optim;
        break;
    case 9:
        x->tied = !x->tied;
        break;
    case 10: /* another order */
        *x = *y;
        *y = t;
        break;
    case 11:
        if (s->n < MOST && roll(s, 2) == 0) {
            s->things[s->n++] = fresh;
        } else if (s->n > 1) {
            *x = s->things[--s->n];
        }
        break;
    case 12:
        s->n_blobs = roll(s, 4);
        s->blob_bytes[roll(s, 3)] = roll(s, 1000);
        break;
    default:
        x->flat_offset = fresh.flat_offset;
        x->middle = roll(s, x->shape[0] + 1);
        s->flags ^= roll(s, 4) == 0 ? LG_SAVE_FINITE : roll(s, 3) == 0 ? LG_SAVE_ALIASES_ONCE : 0;
    }
}

static scene new_scene(uint64_t seed)
{
    scene s = {.dice = seed, .seed = seed};
    s.world = roll(&s, 2) == 0 ? 1 : 2 + (uint32_t)roll(&s, 3);
    s.rank = (uint32_t)roll(&s, s.world);
    const lg_split thirds[] = {{0, LG_NO_AXIS, 3, LG_SPLIT_CEIL}, {0, 0, 0, LG_SPLIT_CEIL}};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &s.world, d.n_splits = 2, d.splits = thirds;
    assert_ok(lg_layout_create(&d, &s.layouts[THIRDS], err));
    s.layouts[ROWS] = kit_rows(s.world, 0);
    s.layouts[REPLICATED] = kit_replicated(s.world, 1);
    s.layouts[FLAT] = kit_flat(s.world, FLAT_LENGTH);
    for (s.n = 0; s.n < 1 + seed % MOST; s.n++) {
        s.things[s.n] = new_thing(&s);
    }
    s.n_blobs = roll(&s, 3);
    return s;
}

static void free_scene(scene *s)
{
    for (int i = 0; i < BOXES; i++) {
        lg_layout_free(s->layouts[i]);
    }
}

/* ------------------------------------------------------------- what is equal */

#define WANT(s, cond)                                                                                   \
    do {                                                                                                \
        if (!(cond)) {                                                                                  \
            fail_msg("LASTGOOD_SEED=%llu LASTGOOD_ROUNDS=1: %s", (unsigned long long)(s)->seed, #cond); \
        }                                                                                               \
    } while (0)

static bool same_numbers(const void *a, const void *b, uint32_t n)
{
    return (a == NULL) == (b == NULL) && (a == NULL || n == 0 || memcmp(a, b, n * sizeof(uint64_t)) == 0);
}

static void check_box(const scene *s, const lg__plan_box *a, const lg__plan_box *b)
{
    const uint32_t n = b->box.ndim;
    WANT(s, strcmp(a->key, b->key) == 0);
    WANT(s, strcmp(a->tensor, b->tensor) == 0);
    WANT(s, a->dtype == b->dtype);
    WANT(s, a->box.ndim == n);
    WANT(s, same_numbers(a->box.offset, b->box.offset, n));
    WANT(s, same_numbers(a->box.size, b->box.size, n));
    WANT(s, a->data == b->data);
    WANT(s, same_numbers(a->mem_origin, b->mem_origin, n));
    WANT(s, same_numbers(a->mem_size, b->mem_size, n));
    WANT(s, same_numbers(a->strides, b->strides, n));
    WANT(s, a->finite_check == b->finite_check);
    WANT(s, a->lazy == b->lazy);
}

static void report_of(const lg_save *save, const lg__save_ids *ids, lg__plan *plan, lg__buf *out)
{
    static const uint8_t tables[256][LG__SHA256_BYTES];
    lg__report *r = NULL;
    lg__buf_init(out, LG__REPORT_MAX);
    assert_true(plan->n_files <= 256);
    assert_ok(lg__save_report(save, ids, plan, tables, &r, err));
    assert_ok(lg__report_encode(r, out, err));
    lg__report_free(r);
}

/* `a` is all that `b`, planned anew, is. */
static void check_plans(const scene *s, const lg_save *save, const lg__save_ids *ids, lg__plan *a, lg__plan *b)
{
    WANT(s, a->n_files == b->n_files);
    WANT(s, a->bytes == b->bytes);
    for (size_t f = 0; f < b->n_files; f++) {
        const lg__plan_file *x = &a->files[f], *y = &b->files[f];
        WANT(s, strcmp(x->name, y->name) == 0);
        WANT(s, x->group == y->group);
        WANT(s, x->number == y->number);
        WANT(s, x->data_bytes == y->data_bytes);
        WANT(s, x->header.len == y->header.len);
        WANT(s, memcmp(x->header.data, y->header.data, y->header.len) == 0);
        WANT(s, x->n_boxes == y->n_boxes);
        for (size_t i = 0; i < y->n_boxes; i++) {
            check_box(s, &x->boxes[i], &y->boxes[i]);
        }
    }
    lg__buf x, y;
    report_of(save, ids, a, &x);
    report_of(save, ids, b, &y);
    WANT(s, x.len == y.len && memcmp(x.data, y.data, y.len) == 0);
    lg__buf_free(&x);
    lg__buf_free(&y);
}

typedef struct tally {
    uint64_t again, anew;
} tally;

/* A run of saves, between which things change, or do not. */
static void one_run(uint64_t seed, tally *total)
{
    scene s = new_scene(seed);
    lg__plan *kept = NULL;
    for (int number = 0; number < 8; number++) {
        const bool same = number > 0 && roll(&s, 2) == 0;
        for (uint64_t n = same || number == 0 ? 0 : 1 + roll(&s, 3); n > 0; n--) {
            change(&s);
        }
        lg__save_ids ids = kit_ids;
        snprintf(ids.attempt, sizeof ids.attempt, "%016llx", (unsigned long long)build_random(&s.dice));
        lg_save *save = describe(&s);
        lg__plan *plan = NULL, *anew = NULL;
        assert_ok(lg__plan_get(&kept, save, &ids, &plan, err));
        WANT(&s, kept == NULL);
        const bool again = plan->description.data != NULL;
        WANT(&s, !same || again);
        *(again ? &total->again : &total->anew) += 1;
        assert_ok(lg__plan_make(save, &ids, &anew, err));
        check_plans(&s, save, &ids, plan, anew);
        lg__plan_free(anew);
        lg__plan_keep(&kept, plan, save);
        WANT(&s, kept == plan);
        lg_save_abort(save); /* a plan that is kept needs nothing of its save */
    }
    lg__plan_free(kept);
    free_scene(&s);
}

static void k16_f271_a_kept_plan_is_what_planning_anew_makes_whatever_changes_between_saves(void **state)
{
    (void)state;
    const uint64_t seed = number_from("LASTGOOD_SEED", 20261130);
    const uint64_t rounds = number_from("LASTGOOD_ROUNDS", in_brief() ? 10 : 400);
    tally total = {0};
    for (uint64_t i = 0; i < rounds; i++) {
        one_run(seed + i, &total);
    }
    print_message("# LASTGOOD_SEED=%llu: %llu plans used again, %llu made anew\n", (unsigned long long)seed,
                  (unsigned long long)total.again, (unsigned long long)total.anew);
    assert_true(total.again >= rounds * 2 && total.anew >= rounds * 2);
}

/* ------------------------------------------------------- twenty thousand tensors */

static lg_save *many(uint32_t n, uint64_t rows)
{
    lg_save *save = kit_save(0, 1, 0);
    lg_layout *whole = kit_replicated(1, 1);
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t shape[] = {i == n / 2 ? rows : 1, 1024};
        char name[64];
        snprintf(name, sizeof name, "%slayers.%u.weight", i % 3 == 0 ? "" : "optim.", i);
        lg_tensor t = kit_tensor(name, LG_F32, 2, shape, memory);
        t.group = i % 3 == 0 ? LG_GROUP_MODEL : LG_GROUP_OPTIM;
        t.layout = whole;
        assert_ok(lg_save_tensor(save, &t, err));
    }
    lg_layout_free(whole);
    return save;
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The least of several, of the processor's time. That the kept plan serves, or is
 * not there, is what is tested. */
static double plan_seconds(lg__plan **kept, const lg_save *save, bool again)
{
    double least = 1e9;
    for (int i = 0; i < 7; i++) {
        lg__plan *plan = NULL, *none = NULL;
        const double began = cpu_seconds();
        assert_ok(lg__plan_get(again ? kept : &none, save, &kit_ids, &plan, err));
        const double took = cpu_seconds() - began;
        least = took < least ? took : least;
        assert_int_equal(plan->description.data != NULL, again);
        lg__plan_keep(kept, plan, save);
    }
    return least;
}

static void k16_f271_the_second_plan_is_the_kept_one_and_one_shape_that_changes_makes_a_new_one(void **state)
{
    (void)state;
    lg_save *save = many(20000, 1), *other = many(20000, 2);
    lg__plan *kept = NULL, *plan = NULL;
    const double first = plan_seconds(&kept, save, false), second = plan_seconds(&kept, save, true);
    print_message("# 20,000 tensors: %.2f ms, again %.2f ms\n", first * 1e3, second * 1e3);
    assert_ok(lg__plan_get(&kept, other, &kit_ids, &plan, err));
    assert_null(plan->description.data);
    lg__plan_free(plan);
    lg_save_abort(save);
    lg_save_abort(other);
}

static void k07_a_plan_of_more_than_32_mib_is_not_kept(void **state)
{
    (void)state;
    lg_save *save = many(100000, 1);
    lg__plan *kept = NULL, *plan = NULL;
    assert_ok(lg__plan_get(&kept, save, &kit_ids, &plan, err));
    lg__plan_keep(&kept, plan, save);
    assert_null(kept);
    lg_save_abort(save);
}

/* ----------------------------------------------------------------- what goes wrong */

static void a_header_that_changed_in_memory_between_saves_is_made_anew(void **state)
{
    (void)state;
    lg_save *save = many(50, 1);
    for (size_t at = 0; at < 64; at++) {
        lg__plan *kept = NULL, *plan = NULL, *anew = NULL;
        assert_ok(lg__plan_get(&kept, save, &kit_ids, &plan, err));
        lg__plan_keep(&kept, plan, save);
        lg__buf *header = &kept->files[at % kept->n_files].header;
        const size_t end = lg__st_text_end(header);
        header->data[8 + at * (end - 8) / 64] ^= 1;
        assert_ok(lg__plan_get(&kept, save, &kit_ids, &plan, err));
        assert_ok(lg__plan_make(save, &kit_ids, &anew, err));
        const scene here = {.seed = at};
        check_plans(&here, save, &kit_ids, plan, anew);
        lg__plan_free(plan);
        lg__plan_free(anew);
    }
    lg_save_abort(save);
}

static void a_plan_whose_boxes_were_moved_is_not_kept(void **state)
{
    (void)state;
    lg_save *save = many(5, 1);
    lg__plan *kept = NULL, *plan = NULL;
    assert_ok(lg__plan_get(&kept, save, &kit_ids, &plan, err));
    plan->changed = true;
    lg__plan_keep(&kept, plan, save);
    assert_null(kept);
    lg_save_abort(save);
}

static void keeping_and_using_again_survive_each_failing_allocation(void **state)
{
    (void)state;
    lg_save *save = many(50, 1);
    save->step = 1;
    size_t n = 0;
    for (lg_status status = LG_ERR_NOMEM; status != LG_OK; n++) {
        assert_true(n < 1000);
        lg__plan *kept = NULL, *plan = NULL;
        assert_ok(lg__plan_make(save, &kit_ids, &plan, err));
        lg__mem_fail_after(n);
        lg__plan_keep(&kept, plan, save);
        save->step = 1000; /* a longer header */
        plan = NULL;
        lg_error err = LG_ERROR_INIT;
        status = lg__plan_get(&kept, save, &kit_ids, &plan, &err);
        lg__mem_fail_after(SIZE_MAX);
        assert_null(kept);
        if (status != LG_OK && status != LG_ERR_NOMEM) {
            fail_msg("allocation %zu: %s: %s", n, lg_status_name(status), err.message);
        }
        lg__plan_free(plan);
        save->step = 1;
    }
    assert_true(n > 5);
    lg_save_abort(save);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k16_f271_a_kept_plan_is_what_planning_anew_makes_whatever_changes_between_saves),
        cmocka_unit_test(k16_f271_the_second_plan_is_the_kept_one_and_one_shape_that_changes_makes_a_new_one),
        cmocka_unit_test(k07_a_plan_of_more_than_32_mib_is_not_kept),
        cmocka_unit_test(a_header_that_changed_in_memory_between_saves_is_made_anew),
        cmocka_unit_test(a_plan_whose_boxes_were_moved_is_not_kept),
        cmocka_unit_test(keeping_and_using_again_survive_each_failing_allocation),
    };
    return cmocka_run_group_tests_name("plan_keep", tests, NULL, NULL);
}
