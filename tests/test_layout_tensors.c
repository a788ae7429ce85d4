/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/json.h"
#include "base/mem.h"
#include "support/layouts.h"

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

static void tensors_that_do_not_fit_are_named(void **state)
{
    (void)state;
    uint32_t sizes[] = {4};
    lg_split rows = {1, 0, 0, LG_SPLIT_CEIL}, thirds[] = {{0, LG_NO_AXIS, 3, LG_SPLIT_EVEN}, {1, 0, 0, LG_SPLIT_CEIL}};
    struct {
        const char *what;
        const lg_split *splits;
        uint32_t n_splits;
        uint64_t flat_length, flat_offset;
        lg_dtype dtype;
        uint32_t ndim;
        uint64_t shape[3];
        lg_status status;
        const char *message;
    } cases[] = {
        {"dimension",
         &rows,
         1,
         0,
         0,
         LG_F32,
         1,
         {8},
         LG_ERR_INVALID,
         "tensor \"w\": the layout cuts dimension 1, the tensor has 1"},
        {"overflow",
         &rows,
         1,
         0,
         0,
         LG_F32,
         2,
         {UINT64_C(1) << 40, UINT64_C(1) << 40},
         LG_ERR_LIMIT,
         "tensor \"w\": shape overflows"},
        {"flat end",
         NULL,
         0,
         30,
         20,
         LG_F32,
         2,
         {3, 4},
         LG_ERR_INVALID,
         "tensor \"w\": 12 elements from 20 do not fit the flat buffer of 30 elements"},
        {"flat start", NULL, 0, 30, 31, LG_F32, 1, {0}, LG_ERR_INVALID, "do not fit the flat buffer"},
        {"flat far", NULL, 0, 30, UINT64_MAX, LG_F32, 1, {2}, LG_ERR_INVALID, "do not fit the flat buffer"},
        {"flat edge", NULL, 0, 30, 30, LG_F32, 1, {0}, LG_OK, ""},
        {"K12: part of a byte",
         &rows,
         1,
         0,
         0,
         LG_F4,
         2,
         {2, 3},
         LG_ERR_INVALID,
         "tensor \"w\": the layout would cut inside a byte of dtype F4 in dimension 1"},
        {"K12: ceil pieces of 2", &rows, 1, 0, 0, LG_F4, 2, {3, 8}, LG_OK, ""},
        {"K12: ceil pieces of 3", &rows, 1, 0, 0, LG_F4, 2, {2, 12}, LG_ERR_INVALID, "inside a byte"},
        {"K12: six bits by fours", &rows, 1, 0, 0, LG_F6_E3M2, 2, {3, 16}, LG_OK, ""},
        {"K12: six bits by twos", &rows, 1, 0, 0, LG_F6_E3M2, 2, {3, 8}, LG_ERR_INVALID, "inside a byte"},
        {"K12: whole inner dimension", &rows, 1, 0, 0, LG_F4, 3, {3, 5, 2}, LG_OK, ""},
        {"K12: odd rows of an outer cut", thirds, 1, 0, 0, LG_F4, 2, {6, 3}, LG_OK, ""},
        {"K12: odd rows of an odd outer cut", thirds, 1, 0, 0, LG_F4, 2, {4, 3}, LG_ERR_INVALID, "in dimension 0"},
        {"K12: flat at bytes", NULL, 0, 24, 0, LG_F4, 2, {4, 4}, LG_OK, ""},
        {"K12: flat inside bytes",
         NULL,
         0,
         24,
         1,
         LG_F4,
         2,
         {4, 4},
         LG_ERR_INVALID,
         "the flat layout would cut inside a byte of dtype F4"},
        {"K12: flat in rows of half bytes",
         NULL,
         0,
         16,
         0,
         LG_F4,
         2,
         {4, 3},
         LG_ERR_INVALID,
         "the flat layout would cut inside a byte of dtype F4"},
        {"K12: not whole bytes at all",
         &rows,
         1,
         0,
         0,
         LG_F4,
         2,
         {3, 3},
         LG_ERR_INVALID,
         "fill no whole number of bytes"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        lg_layout_desc d = LG_LAYOUT_DESC_INIT;
        d.mesh_ndim = 1, d.mesh_sizes = sizes, d.splits = cases[i].splits, d.n_splits = cases[i].n_splits;
        d.flat_length = cases[i].flat_length;
        lg_layout *l = layout_create(&d), *r = NULL;
        lg__tensor_desc t = layout_tensor(cases[i].dtype, cases[i].ndim, cases[i].shape);
        t.flat_offset = cases[i].flat_offset;
        lg_error err = LG_ERROR_INIT;
        lg_status st = lg__layout_resolve(l, &t, &r, &err);
        if (st != cases[i].status || strstr(err.message, cases[i].message) == NULL) {
            fail_msg("%s: status %d: %s", cases[i].what, (int)st, err.message);
        }
        assert_int_equal(lg__layout_check_tensor(l, &t, &err), st);
        lg_layout_free(r);
        lg_layout_free(l);
    }
}

static void the_local_part_is_told(void **state)
{
    (void)state;
    uint32_t sizes[] = {2};
    lg_split fused[] = {{0, LG_NO_AXIS, 3, LG_SPLIT_EVEN}, {0, 0, 0, LG_SPLIT_CEIL}};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = sizes, d.n_splits = 2, d.splits = fused;
    lg_layout *l = layout_create(&d);
    lg_error err = LG_ERROR_INIT;
    uint64_t local[2] = {0}, start = 9, elements = 0;
    assert_int_equal(lg_layout_local(l, 1, 2, SHAPE(9, 5), 0, local, &start, &elements, &err), LG_OK);
    assert_int_equal(local[0], 3); /* each third of 3 rows leaves rank 1 its last row */
    assert_int_equal(local[1], 5);
    assert_int_equal(start, UINT64_MAX); /* two boxes have no single place */
    assert_int_equal(elements, 15);
    uint64_t offset[2] = {7, 7};
    assert_int_equal(lg_layout_offset(l, 1, 2, SHAPE(9, 5), offset, &err), LG_ERR_UNSUPPORTED);
    lg_split rows = {0, 0, 0, LG_SPLIT_CEIL};
    d.n_splits = 1, d.splits = &rows;
    lg_layout *plain = layout_create(&d);
    assert_int_equal(lg_layout_offset(plain, 1, 2, SHAPE(9, 5), offset, &err), LG_OK);
    assert_int_equal(offset[0], 5);
    assert_int_equal(offset[1], 0);
    assert_int_equal(lg_layout_offset(plain, 2, 2, SHAPE(9, 5), offset, &err), LG_ERR_INVALID);
    lg_layout_free(plain);
    assert_int_equal(lg_layout_local(l, 0, 2, SHAPE(9, 5), 0, local, NULL, NULL, NULL), LG_OK);
    assert_int_equal(local[0], 6);
    assert_int_equal(lg_layout_local(l, 2, 2, SHAPE(9, 5), 0, local, NULL, NULL, &err), LG_ERR_INVALID);
    assert_string_equal(err.message, "rank 2 is not in the layout's rank set");
    assert_int_equal(lg_layout_local(l, 0, 0, NULL, 0, local, NULL, NULL, &err), LG_ERR_INVALID);
    assert_int_equal(lg_layout_local(NULL, 0, 2, SHAPE(9, 5), 0, local, NULL, NULL, &err), LG_ERR_INVALID);
    lg_layout_free(l);

    lg_layout *copies = NULL;
    assert_int_equal(lg__layout_of_ranks((const uint32_t[]){0, 1}, 2, true, &copies, &err), LG_OK);
    assert_int_equal(lg_layout_local(copies, 1, 2, SHAPE(9, 5), 0, local, NULL, &elements, &err), LG_OK);
    assert_int_equal(local[0], 9);
    assert_int_equal(elements, 45);
    /* a scalar needs no shape, and no place for one */
    assert_int_equal(lg_layout_local(copies, 1, 0, NULL, 0, NULL, NULL, &elements, &err), LG_OK);
    assert_int_equal(elements, 1);
    assert_int_equal(lg_layout_offset(copies, 1, 0, NULL, NULL, &err), LG_OK);
    lg_layout_free(copies);

    lg_layout_desc f = LG_LAYOUT_DESC_INIT;
    f.mesh_ndim = 1, f.mesh_sizes = sizes, f.flat_length = 20;
    l = layout_create(&f);
    assert_int_equal(lg_layout_local(l, 1, 2, SHAPE(3, 4), 5, NULL, &start, &elements, &err), LG_OK);
    assert_int_equal(start, 5);
    assert_int_equal(elements, 7);
    lg_layout_free(l);
}

static lg_status count_touched(uint32_t rank, const lg__region *box, uint32_t number, void *arg, lg_error *err)
{
    (void)rank;
    (void)box;
    (void)number;
    size_t *n = arg;
    return ++*n > 8 ? lg_error_set(err, LG_ERR_CANCELLED, "more boxes than touch the region") : LG_OK;
}

static void touching_costs_what_is_touched(void **state)
{
    (void)state;
    /* K16: a million ranks and constant pieces by the ten thousand; one element
     * is wanted. Enumerating boxes or ranks would take minutes. */
    uint32_t sizes[] = {1000, 1000};
    lg_split splits[] = {{0, LG_NO_AXIS, 65536, LG_SPLIT_EVEN}, {0, 0, 0, LG_SPLIT_CEIL}, {1, 1, 0, LG_SPLIT_EVEN}};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 2, d.mesh_sizes = sizes, d.n_splits = 3, d.splits = splits;
    lg_layout *l = layout_create(&d);
    lg__tensor_desc t = layout_tensor(LG_U8, 2, SHAPE(UINT64_C(1) << 40, UINT64_C(1) << 20));
    lg_layout *r = layout_resolve(l, t);
    lg_error err = LG_ERROR_INIT;
    for (uint64_t i = 0; i < 1000; i++) {
        lg__region region = {.ndim = 2, .offset = {i << 30, i * 1000}, .size = {1, 1}};
        size_t n = 0;
        assert_int_equal(lg__layout_touch(r, &t, &region, count_touched, &n, &err), LG_OK);
        assert_int_equal(n, 1);
    }
    uint64_t boxes = 0;
    assert_int_equal(lg__layout_box_count(r, &t, &boxes, &err), LG_OK);
    assert_int_equal(boxes, UINT64_C(65536) * 1000 * 1000);
    lg_layout_free(r);
    lg_layout_free(l);

    /* flat: a column of a matrix with 2^40 rows in a million pieces */
    lg_layout_desc f = LG_LAYOUT_DESC_INIT;
    f.mesh_ndim = 2, f.mesh_sizes = sizes, f.flat_length = UINT64_C(1) << 60, f.flat_axis = 1;
    l = layout_create(&f);
    r = layout_resolve(l, t);
    lg__region column = {.ndim = 2, .offset = {5, 77}, .size = {UINT64_C(1) << 20, 1}};
    size_t n = 0;
    assert_int_equal(lg__layout_touch(r, &t, &column, count_touched, &n, &err), LG_OK);
    assert_in_range(n, 1, 6);
    assert_int_equal(r->writers, 1000);
    lg__region outside = {.ndim = 2, .offset = {0, 77}, .size = {1, UINT64_C(1) << 20}};
    assert_int_equal(lg__layout_touch(r, &t, &outside, count_touched, &n, &err), LG_ERR_INVALID);
    lg_layout_free(r);
    lg_layout_free(l);
}

static void fingerprints_tell_tensors_apart(void **state)
{
    (void)state;
    lg__tensor_desc a = layout_tensor(LG_BF16, 2, SHAPE(2, 3));
    uint64_t seen[16];
    size_t n = 0;
    lg_error err = LG_ERROR_INIT;
    lg__tensor_desc all[8] = {a, a, a, a, a, a, a, a};
    all[1].group = LG_GROUP_OPTIM;
    all[2].name = "w\"";
    all[3].dtype = LG_F16;
    all[4].shape = SHAPE(3, 2);
    all[5].ndim = 1;
    all[6].flat_offset = 6;
    all[7].shape = SHAPE(UINT64_C(1) << 60, 3);
    for (size_t i = 0; i < 8; i++) {
        for (int flat = 0; flat < 2; flat++) {
            if (i == 6 && !flat) { /* no flat offset outside of flat layouts */
                uint64_t same = 0;
                assert_int_equal(lg__tensor_fingerprint(&all[i], false, &same, &err), LG_OK);
                assert_int_equal(same, seen[0]);
                continue;
            }
            assert_int_equal(lg__tensor_fingerprint(&all[i], flat, &seen[n], &err), LG_OK);
            for (size_t k = 0; k < n; k++) {
                assert_int_not_equal(seen[k], seen[n]);
            }
            n++;
        }
    }
    /* first 8 bytes, little-endian, of the SHA-256 of this very text */
    const char *text = "[\"model\",\"w\",\"BF16\",[2,3]]", *with = "[\"model\",\"w\",\"BF16\",[2,3],0]";
    uint8_t digest[LG__SHA256_BYTES];
    assert_int_equal(lg__sha256_of(text, strlen(text), digest, &err), LG_OK);
    assert_int_equal(lg__get_u64le(digest), seen[0]);
    assert_int_equal(lg__sha256_of(with, strlen(with), digest, &err), LG_OK);
    assert_int_equal(lg__get_u64le(digest), seen[1]);
}

static void raw_files_hold_what_torch_cannot_read(void **state)
{
    (void)state;
    for (int dtype = 0; dtype < LG_DTYPE_COUNT; dtype++) {
        bool raw = dtype == LG_F4 || dtype == LG_F6_E2M3 || dtype == LG_F6_E3M2 || dtype == LG_F8_E8M0;
        assert_int_equal(lg__file_group(LG_GROUP_MODEL, (lg_dtype)dtype, false), raw ? LG_GROUP_RAW : LG_GROUP_MODEL);
        assert_int_equal(lg__file_group(LG_GROUP_OPTIM, (lg_dtype)dtype, false), raw ? LG_GROUP_RAW : LG_GROUP_OPTIM);
        assert_int_equal(lg__file_group(LG_GROUP_OPTIM, (lg_dtype)dtype, true), LG_GROUP_RAW);
    }
}

/* Everything that allocates, once. */
static lg_status use_it_all(lg_error *err)
{
    uint32_t sizes[] = {2, 2}, ranks[] = {3, 1, 2, 9};
    lg_split splits[] = {{0, LG_NO_AXIS, 40, LG_SPLIT_EVEN}, {0, 0, 0, LG_SPLIT_CEIL}};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 2, d.mesh_sizes = sizes, d.ranks = ranks, d.n_splits = 2, d.splits = splits, d.writers = 2;
    lg_layout *l = NULL, *r = NULL, *p = NULL, *o = NULL;
    lg__piece *pieces = NULL;
    size_t n = 0;
    lg__tensor_desc t = layout_tensor(LG_F32, 2, SHAPE(200, 3));
    lg__region whole = lg__region_whole(2, t.shape);
    whole.size[0] = 2;
    uint64_t v = 0;
    json_t *json = NULL;
    lg_status st = lg_layout_create(&d, &l, err);
    st = st != LG_OK ? st : lg__layout_resolve(l, &t, &r, err);
    st = st != LG_OK ? st : lg__layout_written(r, &t, 3, &pieces, &n, err);
    st = st != LG_OK ? st : lg__layout_touch(r, &t, &whole, count_touched, (size_t[]){0}, err);
    st = st != LG_OK ? st : lg__layout_local_part(r, &t, 3, NULL, NULL, &v, err);
    st = st != LG_OK ? st : lg__layout_of_ranks(ranks + 1, 3, true, &o, err);
    st = st != LG_OK ? st : lg__tensor_fingerprint(&t, false, &v, err);
    st = st != LG_OK ? st : lg__json_parse(r->text, r->text_bytes, &json, err);
    st = st != LG_OK ? st : lg__layout_parse(json, 10, &p, err);
    json_decref(json);
    lg__free(pieces);
    lg_layout_free(l);
    lg_layout_free(r);
    lg_layout_free(p);
    lg_layout_free(o);
    return st;
}

static void every_missing_allocation_is_an_error(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    size_t n = 0;
    for (;; n++) {
        lg__mem_fail_after(n);
        lg_status st = use_it_all(&err);
        lg__mem_fail_after(SIZE_MAX);
        if (st == LG_OK) {
            break;
        }
        if (st != LG_ERR_NOMEM) {
            fail_msg("allocation %zu: status %d: %s", n, (int)st, err.message);
        }
    }
    assert_true(n > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST("K12: tensors that do not fit a layout are named, cuts inside bytes too",
             tensors_that_do_not_fit_are_named),
        TEST("K08: the local part of a rank is told", the_local_part_is_told),
        TEST("K16: touching costs what is touched", touching_costs_what_is_touched),
        TEST("fingerprints tell tensors apart", fingerprints_tell_tensors_apart),
        TEST("K12: raw files hold what torch cannot read", raw_files_hold_what_torch_cannot_read),
        TEST("every missing allocation is an error and nothing leaks", every_missing_allocation_is_an_error),
    };
    return cmocka_run_group_tests_name("layout_tensors", tests, NULL, NULL);
}
