/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/mem.h"
#include "format/region.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define TEST(name, fn)             \
    {                              \
        name, fn, NULL, NULL, NULL \
    }
#define SHAPE(...) \
    (const uint64_t[]) { __VA_ARGS__ }

static lg__region region(uint32_t ndim, const uint64_t *offset, const uint64_t *size)
{
    lg__region r = {.ndim = ndim};
    for (uint32_t d = 0; d < ndim; d++) {
        r.offset[d] = offset[d];
        r.size[d] = size[d];
    }
    return r;
}

static void elements_are_checked_for_overflow(void **state)
{
    (void)state;
    static const struct {
        uint32_t ndim;
        uint64_t shape[4];
        lg_status status;
        uint64_t elements;
    } cases[] = {
        {0, {0}, LG_OK, 1},
        {1, {0}, LG_OK, 0},
        {2, {3, 5}, LG_OK, 15},
        {1, {INT64_MAX}, LG_OK, INT64_MAX},
        {1, {UINT64_C(1) << 63}, LG_ERR_LIMIT, 0},
        {2, {UINT64_C(1) << 32, UINT64_C(1) << 32}, LG_ERR_LIMIT, 0},
        {2, {UINT64_C(1) << 32, UINT64_C(1) << 30}, LG_OK, UINT64_C(1) << 62},
        /* an extent of 0 excuses nothing, wherever it is */
        {3, {0, UINT64_C(1) << 32, UINT64_C(1) << 32}, LG_ERR_LIMIT, 0},
        {3, {UINT64_C(1) << 32, UINT64_C(1) << 32, 0}, LG_ERR_LIMIT, 0},
        {4, {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX}, LG_ERR_LIMIT, 0},
        {3, {2, 0, 7}, LG_OK, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        lg_error err = LG_ERROR_INIT;
        uint64_t n = 77;
        lg_status st = lg__shape_elements(cases[i].ndim, cases[i].shape, &n, &err);
        assert_int_equal(st, cases[i].status);
        assert_int_equal(n, st == LG_OK ? cases[i].elements : 77);
    }
    lg_error err = LG_ERROR_INIT;
    uint64_t many[LG_MAX_NDIM + 1] = {0}, n = 77;
    assert_int_equal(lg__shape_elements(LG_MAX_NDIM + 1, many, &n, &err), LG_ERR_LIMIT);
}

static void bytes_follow_the_dtype(void **state)
{
    (void)state;
    static const struct {
        lg_dtype dtype;
        uint32_t ndim;
        uint64_t shape[3];
        lg_status status;
        uint64_t bytes;
    } cases[] = {
        {LG_F32, 2, {3, 5}, LG_OK, 60},
        {LG_C64, 0, {0}, LG_OK, 8},
        {LG_BOOL, 1, {7}, LG_OK, 7},
        {LG_F4, 2, {2, 8}, LG_OK, 8},
        {LG_F4, 1, {3}, LG_ERR_INVALID, 0},
        {LG_F4, 0, {0}, LG_ERR_INVALID, 0},
        {LG_F4, 1, {0}, LG_OK, 0},
        {LG_F6_E2M3, 1, {4}, LG_OK, 3},
        {LG_F6_E3M2, 1, {6}, LG_ERR_INVALID, 0},
        {LG_F64, 1, {UINT64_C(1) << 60}, LG_ERR_LIMIT, 0},
        {LG_F64, 1, {(UINT64_C(1) << 60) - 1}, LG_OK, (UINT64_C(1) << 63) - 8},
        {LG_F4, 1, {UINT64_C(1) << 61}, LG_ERR_LIMIT, 0},
        {LG_DTYPE_COUNT, 1, {4}, LG_ERR_INVALID, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        lg_error err = LG_ERROR_INIT;
        uint64_t n = 77;
        lg_status st = lg__shape_bytes(cases[i].dtype, cases[i].ndim, cases[i].shape, &n, &err);
        assert_int_equal(st, cases[i].status);
        assert_int_equal(n, st == LG_OK ? cases[i].bytes : 77);
    }
}

static void boxes_are_compared(void **state)
{
    (void)state;
    lg__region whole = lg__region_whole(2, SHAPE(4, 6));
    lg__region a = region(2, SHAPE(0, 2), SHAPE(2, 4)), b = region(2, SHAPE(1, 0), SHAPE(3, 3)), out = {0};
    assert_true(lg__region_intersect(&a, &b, &out));
    lg__region both = region(2, SHAPE(1, 2), SHAPE(1, 1));
    assert_memory_equal(&out, &both, sizeof both);
    assert_int_equal(lg__region_elements(&a), 8);
    lg__region beside = region(2, SHAPE(2, 2), SHAPE(2, 4));
    assert_false(lg__region_intersect(&a, &beside, &out));
    assert_memory_equal(&out, &both, sizeof both); /* untouched */
    lg__region empty = region(2, SHAPE(1, 3), SHAPE(0, 1));
    assert_true(lg__region_empty(&empty));
    assert_false(lg__region_intersect(&a, &empty, &out));
    assert_false(lg__region_empty(&a));
    lg__region scalar = {.ndim = 0};
    assert_false(lg__region_empty(&scalar));
    assert_int_equal(lg__region_elements(&scalar), 1);
    assert_true(lg__region_intersect(&scalar, &scalar, &out));
    assert_false(lg__region_intersect(&scalar, &a, &out));

    assert_true(lg__region_inside(&whole, 2, SHAPE(4, 6)));
    assert_true(lg__region_inside(&empty, 2, SHAPE(4, 6)));
    assert_false(lg__region_inside(&whole, 2, SHAPE(4, 5)));
    assert_false(lg__region_inside(&whole, 1, SHAPE(4)));
    lg__region wraps = region(1, SHAPE(UINT64_MAX), SHAPE(2)), far = region(1, SHAPE(1), SHAPE(UINT64_MAX));
    assert_false(lg__region_inside(&wraps, 1, SHAPE(4)));
    assert_false(lg__region_inside(&far, 1, SHAPE(4)));

    assert_true(lg__region_compare(&a, &b) < 0);
    assert_true(lg__region_compare(&b, &a) > 0);
    assert_int_equal(lg__region_compare(&a, &a), 0);
    lg__region later = region(2, SHAPE(0, 3), SHAPE(1, 1));
    assert_true(lg__region_compare(&a, &later) < 0);
}

static void texts_are_cut_when_too_long(void **state)
{
    (void)state;
    lg__region a = region(2, SHAPE(0, 2), SHAPE(4, 4)), scalar = {.ndim = 0};
    char out[64];
    assert_string_equal(lg__region_text(&a, out, sizeof out), "[0:4, 2:6]");
    assert_string_equal(lg__region_text(&scalar, out, sizeof out), "[]");
    assert_string_equal(lg__region_text(&a, out, 11), "[0:4, 2:6]");
    assert_string_equal(lg__region_text(&a, out, 10), "[0:4…]");
    for (size_t bytes = 1; bytes < 12; bytes++) {
        memset(out, 'x', sizeof out);
        lg__region_text(&a, out, bytes);
        assert_true(strlen(out) < bytes);
        assert_int_equal(out[bytes], 'x');
    }
    out[0] = 'x';
    assert_ptr_equal(lg__region_text(&a, out, 0), out);
    assert_int_equal(out[0], 'x');
    lg__region large = {.ndim = LG_MAX_NDIM};
    for (uint32_t d = 0; d < LG_MAX_NDIM; d++) {
        large.offset[d] = UINT64_MAX / 2;
        large.size[d] = UINT64_MAX / 2;
    }
    lg__region_text(&large, out, sizeof out);
    assert_true(strlen(out) < sizeof out);
    assert_non_null(strstr(out, "…]"));
}

/* -------------------------------------------------------------------- runs */

typedef struct run {
    uint64_t box;
    int64_t mem;
    uint64_t bytes;
} run;

typedef struct run_list {
    run all[64];
    size_t n, stop_at;
} run_list;

static lg_status collect(uint64_t box, int64_t mem, uint64_t bytes, void *arg, lg_error *err)
{
    run_list *list = arg;
    assert_true(list->n < 64);
    list->all[list->n++] = (run){box, mem, bytes};
    return list->n == list->stop_at ? lg_error_set(err, LG_ERR_CANCELLED, "enough") : LG_OK;
}

typedef struct run_case {
    const char *what;
    lg_dtype dtype;
    uint32_t ndim;
    uint64_t box_offset[3], box_size[3], part_offset[3], part_size[3];
    uint64_t mem_origin[3], mem_size[3];
    int64_t strides[3];
    bool strided;
    lg_status status;
    size_t n;
    run runs[8];
} run_case;

static const run_case run_cases[] = {
    {"whole into whole is one run",
     LG_F32,
     2,
     {2, 0},
     {3, 4},
     {2, 0},
     {3, 4},
     {2, 0},
     {3, 4},
     {0},
     false,
     LG_OK,
     1,
     {{0, 0, 48}}},
    {"rows of a wider memory",
     LG_F32,
     2,
     {0, 0},
     {2, 3},
     {0, 0},
     {2, 3},
     {0, 0},
     {2, 5},
     {0},
     false,
     LG_OK,
     2,
     {{0, 0, 12}, {12, 20, 12}}},
    {"a part inside both",
     LG_U8,
     2,
     {1, 1},
     {4, 4},
     {2, 2},
     {2, 2},
     {0, 0},
     {5, 10},
     {0},
     false,
     LG_OK,
     2,
     {{5, 22, 2}, {9, 32, 2}}},
    {"full rows of both merge over the outer dimension",
     LG_U8,
     3,
     {0, 0, 0},
     {2, 2, 3},
     {1, 0, 0},
     {1, 2, 3},
     {0, 0, 0},
     {4, 2, 3},
     {0},
     false,
     LG_OK,
     1,
     {{6, 6, 6}}},
    {"negative stride",
     LG_U16,
     1,
     {0},
     {3},
     {0},
     {3},
     {0},
     {3},
     {-2},
     true,
     LG_OK,
     3,
     {{0, 0, 2}, {2, -2, 2}, {4, -4, 2}}},
    {"zero stride", LG_U16, 1, {0}, {2}, {0}, {2}, {0}, {0}, {0}, true, LG_OK, 2, {{0, 0, 2}, {2, 0, 2}}},
    {"transposed memory",
     LG_U8,
     2,
     {0, 0},
     {2, 2},
     {0, 0},
     {2, 2},
     {0, 0},
     {0},
     {1, 2},
     true,
     LG_OK,
     4,
     {{0, 0, 1}, {1, 2, 1}, {2, 1, 1}, {3, 3, 1}}},
    {"runs that touch by accident become one",
     LG_U8,
     2,
     {0, 0},
     {2, 2},
     {0, 0},
     {2, 2},
     {0, 0},
     {0},
     {6, 5},
     true,
     LG_OK,
     3,
     {{0, 0, 1}, {1, 5, 2}, {3, 11, 1}}},
    {"a dimension of one element needs no stride",
     LG_U8,
     2,
     {0, 0},
     {1, 3},
     {0, 0},
     {1, 3},
     {0, 0},
     {0},
     {999, 1},
     true,
     LG_OK,
     1,
     {{0, 0, 3}}},
    {"scalar", LG_F64, 0, {0}, {0}, {0}, {0}, {0}, {0}, {0}, false, LG_OK, 1, {{0, 0, 8}}},
    {"empty part", LG_F64, 2, {0, 0}, {2, 2}, {1, 1}, {0, 1}, {0, 0}, {2, 2}, {0}, false, LG_OK, 0, {{0}}},
    {"K12: four-bit rows",
     LG_F4,
     2,
     {0, 0},
     {2, 4},
     {0, 2},
     {2, 2},
     {0, 0},
     {2, 8},
     {0},
     false,
     LG_OK,
     2,
     {{1, 1, 1}, {3, 5, 1}}},
    {"K12: six-bit row", LG_F6_E2M3, 1, {4}, {8}, {8}, {4}, {0}, {16}, {0}, false, LG_OK, 1, {{3, 6, 3}}},
    {"K12: a run that ends inside a byte is refused",
     LG_F4,
     1,
     {0},
     {4},
     {0},
     {3},
     {0},
     {4},
     {0},
     false,
     LG_ERR_UNSUPPORTED,
     0,
     {{0}}},
    {"K12: a run that begins inside a byte is refused",
     LG_F4,
     1,
     {0},
     {4},
     {1},
     {2},
     {0},
     {4},
     {0},
     false,
     LG_ERR_UNSUPPORTED,
     0,
     {{0}}},
    {"K12: memory that begins inside a byte is refused",
     LG_F4,
     1,
     {0},
     {4},
     {0},
     {4},
     {0},
     {0},
     {2},
     true,
     LG_ERR_UNSUPPORTED,
     0,
     {{0}}},
    {"K12: strided four-bit rows",
     LG_F4,
     2,
     {0, 0},
     {2, 2},
     {0, 0},
     {2, 2},
     {0, 0},
     {0},
     {-7, 1},
     true,
     LG_OK,
     2,
     {{0, 0, 1}, {1, -7, 1}}},
    {"a part outside of its box", LG_U8, 1, {2}, {2}, {1}, {2}, {0}, {9}, {0}, false, LG_ERR_INTERNAL, 0, {{0}}},
    {"a part longer than its box", LG_U8, 1, {2}, {2}, {2}, {3}, {0}, {9}, {0}, false, LG_ERR_INTERNAL, 0, {{0}}},
    {"strides that reach too far down together",
     LG_U8,
     2,
     {0},
     {2, 2},
     {0},
     {2, 2},
     {0},
     {0},
     {INT64_MIN / 2 - 1, INT64_MIN / 2 - 1},
     true,
     LG_ERR_LIMIT,
     0,
     {{0}}},
    {"strides that reach too far up together",
     LG_U8,
     2,
     {0},
     {2, 2},
     {0},
     {2, 2},
     {0},
     {0},
     {INT64_MAX / 2, INT64_MAX / 2 + 1},
     true,
     LG_ERR_LIMIT,
     0,
     {{0}}},
    {"strides that just fit",
     LG_U8,
     1,
     {0},
     {2},
     {0},
     {2},
     {0},
     {0},
     {INT64_MIN},
     true,
     LG_OK,
     2,
     {{0, 0, 1}, {1, INT64_MIN, 1}}},
    {"strides beyond the address space",
     LG_U8,
     1,
     {0},
     {4},
     {0},
     {4},
     {0},
     {0},
     {INT64_MAX / 2},
     true,
     LG_ERR_LIMIT,
     0,
     {{0}}},
};

static void runs_are_as_long_as_both_sides_allow(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof run_cases / sizeof run_cases[0]; i++) {
        const run_case *c = &run_cases[i];
        lg__region box = region(c->ndim, c->box_offset, c->box_size);
        lg__region part = region(c->ndim, c->part_offset, c->part_size);
        lg__run_walk walk = {c->dtype, &box, &part, c->mem_origin, c->mem_size, c->strided ? c->strides : NULL};
        run_list list = {.n = 0};
        lg_error err = LG_ERROR_INIT;
        lg_status st = lg__region_runs(&walk, collect, &list, &err);
        if (st != c->status || list.n != c->n || memcmp(list.all, c->runs, c->n * sizeof(run)) != 0) {
            fail_msg("%s: status %d, %zu runs, first %llu %lld %llu: %s", c->what, (int)st, list.n,
                     (unsigned long long)list.all[0].box, (long long)list.all[0].mem,
                     (unsigned long long)list.all[0].bytes, err.message);
        }
    }
}

static void a_run_function_can_stop_the_walk(void **state)
{
    (void)state;
    lg__region box = lg__region_whole(2, SHAPE(4, 2));
    lg__run_walk walk = {LG_U8, &box, &box, SHAPE(0, 0), SHAPE(4, 3), NULL};
    run_list list = {.stop_at = 2};
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg__region_runs(&walk, collect, &list, &err), LG_ERR_CANCELLED);
    assert_int_equal(list.n, 2);
    assert_string_equal(err.message, "enough");
}

static void huge_boxes_are_walked_by_arithmetic_alone(void **state)
{
    (void)state;
    /* K16: 2^40 rows, of which two are wanted, far behind 4 GiB */
    lg__region box = lg__region_whole(2, SHAPE(UINT64_C(1) << 40, 1024)), part = box;
    part.offset[0] = (UINT64_C(1) << 40) - 2;
    part.size[0] = 2;
    lg__run_walk walk = {LG_F32, &box, &part, part.offset, part.size, NULL};
    run_list list = {.n = 0};
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg__region_runs(&walk, collect, &list, &err), LG_OK);
    assert_int_equal(list.n, 1);
    assert_int_equal(list.all[0].box, ((UINT64_C(1) << 40) - 2) * 4096);
    assert_int_equal(list.all[0].mem, 0);
    assert_int_equal(list.all[0].bytes, 8192);
}

/* ---------------------------------------------------------------- flat cuts */

static void flat_ranges_are_cut_by_the_rule(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        uint32_t ndim;
        uint64_t shape[4], begin, end;
        const char *boxes;
    } cases[] = {
        {"everything is one box", 2, {4, 6}, 0, 24, "[0:4, 0:6]"},
        {"head, rows, tail", 2, {4, 6}, 4, 20, "[0:1, 4:6] [1:3, 0:6] [3:4, 0:2]"},
        {"inside one row", 2, {4, 6}, 7, 10, "[1:2, 1:4]"},
        {"one whole row", 2, {4, 6}, 6, 12, "[1:2, 0:6]"},
        {"head and tail without rows between", 2, {4, 6}, 5, 7, "[0:1, 5:6] [1:2, 0:1]"},
        {"rows and tail", 2, {4, 6}, 0, 8, "[0:1, 0:6] [1:2, 0:2]"},
        {"head and rows", 2, {4, 6}, 3, 12, "[0:1, 3:6] [1:2, 0:6]"},
        {"three dimensions", 3, {2, 3, 4}, 2, 22, "[0:1, 0:1, 2:4] [0:1, 1:3, 0:4] [1:2, 0:2, 0:4] [1:2, 2:3, 0:2]"},
        {"the most boxes",
         3,
         {4, 3, 3},
         5,
         31,
         "[0:1, 1:2, 2:3] [0:1, 2:3, 0:3] [1:3, 0:3, 0:3] [3:4, 0:1, 0:3] [3:4, 1:2, 0:1]"},
        {"dimensions of one", 4, {1, 1, 4, 1}, 1, 3, "[0:1, 0:1, 1:3, 0:1]"},
        {"one dimension", 1, {9}, 2, 5, "[2:5]"},
        {"scalar", 0, {0}, 0, 1, "[]"},
        {"empty range", 2, {4, 6}, 5, 5, ""},
        {"empty tensor", 2, {4, 0}, 0, 0, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        lg__region boxes[LG__MAX_FLAT_BOXES];
        size_t n = lg__region_cut_flat(cases[i].ndim, cases[i].shape, cases[i].begin, cases[i].end, boxes);
        char all[512] = "", one[64];
        for (size_t b = 0; b < n; b++) {
            strcat(all, b == 0 ? "" : " ");
            strcat(all, lg__region_text(&boxes[b], one, sizeof one));
        }
        if (strcmp(all, cases[i].boxes) != 0) {
            fail_msg("%s: %s", cases[i].what, all);
        }
    }
}

static void the_deepest_cut_fits_its_array(void **state)
{
    (void)state;
    uint64_t shape[LG_MAX_NDIM], elements = 1;
    for (uint32_t d = 0; d < LG_MAX_NDIM; d++) {
        shape[d] = d == 0 ? 4 : d < 20 ? 3 : 2;
        elements *= shape[d];
    }
    lg__region boxes[LG__MAX_FLAT_BOXES];
    size_t n = lg__region_cut_flat(LG_MAX_NDIM, shape, 1, elements - 1, boxes);
    assert_int_equal(n, 2 * LG_MAX_NDIM - 1);
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        assert_true(lg__region_inside(&boxes[i], LG_MAX_NDIM, shape));
        assert_true(i == 0 || lg__region_compare(&boxes[i - 1], &boxes[i]) < 0);
        sum += lg__region_elements(&boxes[i]);
    }
    assert_int_equal(sum, elements - 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST("K13: element counts are checked for overflow, also beside an extent of 0",
             elements_are_checked_for_overflow),
        TEST("K12: bytes follow the dtype, sub-byte ones must fill bytes", bytes_follow_the_dtype),
        TEST("boxes are intersected, ordered and kept inside without overflow", boxes_are_compared),
        TEST("a box's text is cut when it is too long", texts_are_cut_when_too_long),
        TEST("K12: runs are as long as both sides allow, whatever the strides", runs_are_as_long_as_both_sides_allow),
        TEST("a run function can stop the walk", a_run_function_can_stop_the_walk),
        TEST("K16: positions behind 4 GiB are walked by arithmetic alone", huge_boxes_are_walked_by_arithmetic_alone),
        TEST("a flat range is cut into head, whole rows and tail", flat_ranges_are_cut_by_the_rule),
        TEST("K08: a cut of 32 dimensions makes 63 boxes", the_deepest_cut_fits_its_array),
    };
    return cmocka_run_group_tests_name("region", tests, NULL, NULL);
}
