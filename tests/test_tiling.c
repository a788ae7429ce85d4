/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/mem.h"
#include "format/region.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TEST(name, fn)             \
    {                              \
        name, fn, NULL, NULL, NULL \
    }

typedef struct tiling_case {
    const char *what;
    uint32_t ndim;
    uint64_t shape[3];
    size_t n;
    struct {
        uint64_t offset[3], size[3];
    } boxes[6];
    const char *message; /* NULL: they tile */
} tiling_case;

static const tiling_case cases[] = {
    {"one box", 2, {4, 6}, 1, {{{0, 0}, {4, 6}}}, NULL},
    {"rows", 2, {4, 6}, 2, {{{2, 0}, {2, 6}}, {{0, 0}, {2, 6}}}, NULL},
    {"a pinwheel, which no straight cut takes apart",
     2,
     {3, 3},
     5,
     {{{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 0}, {2, 1}}, {{1, 1}, {1, 1}}},
     NULL},
    {"scalar", 0, {0}, 1, {{{0}, {0}}}, NULL},
    {"empty tensor", 2, {4, 0}, 1, {{{0, 0}, {4, 0}}}, NULL},
    {"no box at all", 2, {4, 6}, 0, {{{0}, {0}}}, "tensor \"w\" [0:4, 0:6]: no box holds the element at [0:1, 0:1]"},
    {"no box of a scalar", 0, {0}, 0, {{{0}, {0}}}, "tensor \"w\" []: no box holds the element at []"},
    {"two boxes of a scalar",
     0,
     {0},
     2,
     {{{0}, {0}}, {{0}, {0}}},
     "tensor \"w\": rank 10's box [] and rank 11's box [] overlap at []"},
    {"no box of an empty tensor", 1, {0}, 0, {{{0}, {0}}}, "tensor \"w\" is empty and has 0 boxes instead of one"},
    {"two boxes of an empty tensor",
     1,
     {0},
     2,
     {{{0}, {0}}, {{0}, {0}}},
     "tensor \"w\" is empty and has 2 boxes instead of one"},
    {"part of an empty tensor",
     2,
     {4, 0},
     1,
     {{{0, 0}, {3, 0}}},
     "tensor \"w\": rank 10's box [0:3, 0:0] is not the whole of the empty tensor [0:4, 0:0]"},
    {"hole",
     2,
     {4, 6},
     2,
     {{{0, 0}, {2, 6}}, {{3, 0}, {1, 6}}},
     "tensor \"w\" [0:4, 0:6]: no box holds the element at [2:3, 0:1]"},
    {"hole at the end", 1, {8}, 1, {{{0}, {7}}}, "tensor \"w\" [0:8]: no box holds the element at [7:8]"},
    {"overlap",
     2,
     {4, 6},
     2,
     {{{0, 0}, {3, 6}}, {{2, 0}, {2, 6}}},
     "tensor \"w\": rank 10's box [0:3, 0:6] and rank 11's box [2:4, 0:6] overlap at [2:3, 0:6]"},
    {"the same box twice",
     1,
     {4},
     3,
     {{{0}, {2}}, {{2}, {2}}, {{0}, {2}}},
     "tensor \"w\": rank 10's box [0:2] and rank 12's box [0:2] overlap at [0:2]"},
    {"overlap and hole of the same size",
     1,
     {6},
     3,
     {{{0}, {2}}, {{1}, {2}}, {{4}, {2}}},
     "tensor \"w\": rank 10's box [0:2] and rank 11's box [1:3] overlap at [1:2]"},
    {"outside", 1, {6}, 1, {{{0}, {7}}}, "tensor \"w\": rank 10's box [0:7] lies outside of [0:6]"},
    {"far outside",
     1,
     {6},
     1,
     {{{UINT64_MAX}, {2}}},
     "tensor \"w\": rank 10's box [18446744073709551615:1] lies outside of [0:6]"},
    {"empty box",
     1,
     {6},
     2,
     {{{0}, {6}}, {{3}, {0}}},
     "tensor \"w\": rank 11's box [3:3] is empty, which none may be in [0:6]"},
    {"sizes that add up although the places are wrong",
     2,
     {2, 2},
     2,
     {{{0, 0}, {1, 2}}, {{0, 1}, {2, 1}}},
     "tensor \"w\": rank 10's box [0:1, 0:2] and rank 11's box [0:2, 1:2] overlap at [0:1, 1:2]"},
};

static void tilings_are_told_from_others(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const tiling_case *c = &cases[i];
        lg__region boxes[6];
        uint32_t ranks[6];
        for (size_t b = 0; b < c->n; b++) {
            boxes[b] = (lg__region){.ndim = c->ndim};
            memcpy(boxes[b].offset, c->boxes[b].offset, c->ndim * sizeof(uint64_t));
            memcpy(boxes[b].size, c->boxes[b].size, c->ndim * sizeof(uint64_t));
            ranks[b] = 10 + (uint32_t)b;
        }
        lg_error err = LG_ERROR_INIT;
        lg_status st = lg__region_check_tiling("w", c->ndim, c->shape, boxes, ranks, c->n, &err);
        if (st != (c->message == NULL ? LG_OK : LG_ERR_COVERAGE) ||
            (c->message != NULL && strcmp(err.message, c->message) != 0)) {
            fail_msg("%s: status %d: %s", c->what, (int)st, err.message);
        }
        assert_int_equal(lg__region_check_tiling("w", c->ndim, c->shape, boxes, NULL, c->n, &err), st);
    }
}

/* A cube of side 2, cut in half in its first `cut_dims` dimensions. */
static size_t cut_cube(uint32_t ndim, uint32_t cut_dims, lg__region *boxes)
{
    size_t n = (size_t)1 << cut_dims;
    for (size_t i = 0; i < n; i++) {
        boxes[i] = (lg__region){.ndim = ndim};
        for (uint32_t d = 0; d < ndim; d++) {
            boxes[i].offset[d] = d < cut_dims ? i >> d & 1 : 0;
            boxes[i].size[d] = d < cut_dims ? 1 : 2;
        }
    }
    return n;
}

static void many_cut_dimensions_are_checked_too(void **state)
{
    (void)state;
    /* Boxes of 2^k corners each; from k = 11 on too many to look for a hole. */
    for (uint32_t k = 8; k <= 12; k += 2) {
        lg__region *boxes = malloc(sizeof *boxes << k);
        uint64_t shape[LG_MAX_NDIM];
        for (uint32_t d = 0; d < LG_MAX_NDIM; d++) {
            shape[d] = 2;
        }
        size_t n = cut_cube(20, k, boxes);
        lg_error err = LG_ERROR_INIT;
        assert_int_equal(lg__region_check_tiling("w", 20, shape, boxes, NULL, n, &err), LG_OK);
        assert_int_equal(lg__region_check_tiling("w", 20, shape, boxes, NULL, n - 1, &err), LG_ERR_COVERAGE);
        assert_non_null(
            strstr(err.message, k == 12 ? "its boxes hold 1048320 of 1048576" : "no box holds the element"));
        lg__region last = boxes[n - 1];
        boxes[n - 1] = boxes[5];
        assert_int_equal(lg__region_check_tiling("w", 20, shape, boxes, NULL, n, &err), LG_ERR_COVERAGE);
        assert_non_null(strstr(err.message, "overlap"));
        boxes[n - 1] = last;
        boxes[3].size[0] = 2;
        boxes[3].offset[0] = 0;
        assert_int_equal(lg__region_check_tiling("w", 20, shape, boxes, NULL, n, &err), LG_ERR_COVERAGE);
        free(boxes);
    }
}

static void thousands_of_boxes_are_checked(void **state)
{
    (void)state;
    /* K16: 256 x 256 boxes of a tensor of 2^62 elements */
    enum { SIDE = 256 };
    uint64_t shape[2] = {UINT64_C(1) << 31, UINT64_C(1) << 31}, step = shape[0] / SIDE;
    lg__region *boxes = calloc(SIDE * SIDE, sizeof *boxes);
    for (size_t i = 0; i < SIDE * SIDE; i++) {
        /* in an order that has nothing to do with the places */
        size_t at = i * 40503 % (SIDE * SIDE);
        boxes[at] = (lg__region){.ndim = 2, .offset = {i / SIDE * step, i % SIDE * step}, .size = {step, step}};
    }
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg__region_check_tiling("w", 2, shape, boxes, NULL, SIDE * SIDE, &err), LG_OK);
    boxes[4711].size[1]--;
    assert_int_equal(lg__region_check_tiling("w", 2, shape, boxes, NULL, SIDE * SIDE, &err), LG_ERR_COVERAGE);
    assert_non_null(strstr(err.message, "no box holds"));
    boxes[4711].size[1] += 2;
    assert_int_equal(lg__region_check_tiling("w", 2, shape, boxes, NULL, SIDE * SIDE, &err), LG_ERR_COVERAGE);
    free(boxes);
}

static void missing_memory_is_an_error(void **state)
{
    (void)state;
    lg__region half[2] = {{.ndim = 1, .size = {2}}, {.ndim = 1, .offset = {2}, .size = {2}}};
    uint64_t shape[1] = {4};
    lg_error err = LG_ERROR_INIT;
    lg__mem_fail_after(0);
    lg_status st = lg__region_check_tiling("w", 1, shape, half, NULL, 2, &err);
    lg__mem_fail_after(SIZE_MAX);
    assert_int_equal(st, LG_ERR_NOMEM);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST("K08: boxes tile a tensor exactly, or the place and both boxes are named", tilings_are_told_from_others),
        TEST("many cut dimensions are checked, by corners and by pairs", many_cut_dimensions_are_checked_too),
        TEST("K16: tens of thousands of boxes of a huge tensor are checked", thousands_of_boxes_are_checked),
        TEST("missing memory is an error", missing_memory_is_an_error),
    };
    return cmocka_run_group_tests_name("tiling", tests, NULL, NULL);
}
