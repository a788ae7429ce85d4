/* SPDX-License-Identifier: Apache-2.0 */
#include "save_kit.h"

enum { WORLD = 4 };

static const uint64_t shape_23[] = {2, 3}, shape_32[] = {3, 2};
static float values[WORLD][6];

static void same_values(void)
{
    for (int r = 0; r < WORLD; r++) {
        for (int i = 0; i < 6; i++) {
            values[r][i] = (float)i;
        }
    }
}

static void begin(lg_save **saves)
{
    same_values();
    for (uint32_t r = 0; r < WORLD; r++) {
        saves[r] = kit_save(r, WORLD, 0);
    }
}

static void add(lg_save *save, const char *name, uint32_t flags, const void *data)
{
    lg_tensor t = kit_tensor(name, LG_F32, 2, shape_23, data);
    t.flags = flags;
    assert_ok(lg_save_tensor(save, &t, err));
}

/* Boxes of tensor i that all ranks write. */
static size_t boxes_written(lg_save **saves, size_t i)
{
    size_t all = 0;
    for (uint32_t r = 0; r < WORLD; r++) {
        const lg__save_tensor *t = &saves[r]->tensors[i];
        lg__tensor_desc desc = lg__save_desc(t);
        lg__piece *pieces = NULL;
        size_t n = 0;
        assert_ok(lg__layout_written(t->layout, &desc, r, &pieces, &n, err));
        lg__free(pieces);
        all += n;
    }
    return all;
}

static void equal_tensors_are_written_once(void **state)
{
    (void)state;
    lg_save *saves[WORLD];
    begin(saves);
    for (uint32_t r = 0; r < WORLD; r++) {
        /* another order on each rank */
        add(saves[r], r % 2 == 0 ? "a" : "b", 0, values[r]);
        add(saves[r], r % 2 == 0 ? "b" : "a", LG_TENSOR_BUFFER, values[r]);
    }
    assert_ok(kit_settle(saves, WORLD, false, err));
    for (size_t i = 0; i < 2; i++) {
        for (uint32_t r = 0; r < WORLD; r++) {
            const lg_layout *l = saves[r]->tensors[i].layout;
            assert_int_equal(l->kind, LG__SPLIT);
            assert_int_equal(l->n_ranks, WORLD);
            assert_memory_equal(l->id, saves[0]->tensors[0].layout->id, sizeof l->id);
        }
        assert_int_equal(saves[i]->unshared, 0);
    }
    kit_abort(saves, WORLD);
}

static void equal_summaries_need_no_lists(void **state)
{
    (void)state;
    lg_save *saves[WORLD];
    begin(saves);
    uint8_t summaries[WORLD][40];
    for (uint32_t r = 0; r < WORLD; r++) {
        add(saves[r], r % 2 == 0 ? "a" : "b", 0, values[r]);
        add(saves[r], r % 2 == 0 ? "b" : "a", 0, values[r]);
        assert_ok(lg_save_alias(saves[r], "c", "a", err));
        if (r == 3) {
            values[r][5] = 9;
        }
        assert_ok(lg__replicas_digest(saves[r], false, err));
        assert_ok(lg__replicas_summary(saves[r], summaries[r], err));
    }
    assert_memory_equal(summaries[0], summaries[1], sizeof summaries[0]);
    assert_memory_equal(summaries[0], summaries[2], sizeof summaries[0]);
    assert_memory_not_equal(summaries[0], summaries[3], sizeof summaries[0]);
    for (uint32_t r = 0; r < 3; r++) {
        assert_ok(lg__replicas_settle(saves[r], NULL, NULL, err));
        assert_int_equal(saves[r]->tensors[0].layout->n_ranks, WORLD);
        assert_ptr_equal(saves[r]->tensors[0].layout, saves[r]->tensors[1].layout);
        assert_ptr_equal(saves[r]->tensors[0].layout, saves[r]->tensors[2].layout);
    }
    kit_abort(saves, WORLD);
}

static void a_tensor_of_some_ranks_is_written_by_one_of_them(void **state)
{
    (void)state;
    lg_save *saves[WORLD];
    begin(saves);
    add(saves[1], "stage1", 0, values[1]);
    add(saves[2], "stage2", 0, values[2]);
    add(saves[3], "stage2", 0, values[3]);
    assert_ok(kit_settle(saves, WORLD, false, err));
    assert_int_equal(saves[1]->tensors[0].layout->n_ranks, 1);
    assert_int_equal(lg__layout_rank_at(saves[1]->tensors[0].layout, 0), 1);
    assert_int_equal(saves[3]->tensors[0].layout->n_ranks, 2);
    assert_int_equal(lg__layout_rank_at(saves[3]->tensors[0].layout, 1), 3);
    kit_abort(saves, WORLD);
}

static void a_buffer_that_differs_is_kept_by_each_rank(void **state)
{
    (void)state;
    lg_save *saves[WORLD];
    begin(saves);
    values[2][4] = 1e9f;
    for (uint32_t r = 0; r < WORLD; r++) {
        add(saves[r], "bn.mean", LG_TENSOR_BUFFER, values[r]);
        assert_ok(lg_save_alias(saves[r], "tied", "bn.mean", err));
    }
    assert_ok(kit_settle(saves, WORLD, false, err));
    for (uint32_t r = 0; r < WORLD; r++) {
        assert_int_equal(saves[r]->tensors[0].layout->kind, LG__COPIES);
        assert_ptr_equal(saves[r]->tensors[0].layout, saves[r]->tensors[1].layout);
        assert_int_equal(saves[r]->unshared, 1);
    }
    assert_int_equal(boxes_written(saves, 0), WORLD);
    kit_abort(saves, WORLD);
}

static void a_negative_zero_is_a_difference(void **state)
{
    (void)state;
    lg_save *saves[WORLD];
    begin(saves);
    values[1][0] = -0.0f;
    for (uint32_t r = 0; r < WORLD; r++) {
        add(saves[r], "w", 0, values[r]);
    }
    assert_fails(LG_ERR_CONFLICT, "tensor \"w\" differs between ranks 0 and 1:", kit_settle(saves, WORLD, false, err));
    kit_abort(saves, WORLD);
}

static void a_parameter_that_differs_is_an_error_on_every_rank(void **state)
{
    (void)state;
    lg_save *saves[WORLD];
    begin(saves);
    values[3][5] = 7;
    size_t sizes[WORLD];
    lg__buf lists;
    lg__buf_init(&lists, 1 << 20);
    for (uint32_t r = 0; r < WORLD; r++) {
        add(saves[r], "w", r == 0 ? 0 : LG_TENSOR_BUFFER, values[r]); /* a buffer, but not on all of them */
        size_t from = lists.len;
        assert_ok(lg__replicas_digest(saves[r], false, err));
        assert_ok(lg__replicas_list(saves[r], &lists, err));
        sizes[r] = lists.len - from;
    }
    for (uint32_t r = 0; r < WORLD; r++) {
        assert_fails(LG_ERR_CONFLICT, "tensor \"w\" differs between ranks 0 and 3: ",
                     lg__replicas_settle(saves[r], lists.data, sizes, err));
    }
    lg__buf_free(&lists);
    kit_abort(saves, WORLD);
}

static void two_odd_ranks_are_both_named(void **state)
{
    (void)state;
    lg_save *saves[WORLD];
    begin(saves);
    values[1][0] = 5;
    values[3][0] = 6;
    for (uint32_t r = 0; r < WORLD; r++) {
        add(saves[r], "w", 0, values[r]);
    }
    assert_fails(LG_ERR_CONFLICT,
                 "tensor \"w\" differs between ranks 0 and 1 (also 3): ", kit_settle(saves, WORLD, false, err));
    kit_abort(saves, WORLD);
}

static void memory_layout_makes_no_difference(void **state)
{
    (void)state;
    lg_save *saves[WORLD];
    begin(saves);
    const float transposed[] = {0, 3, 1, 4, 2, 5};
    const int64_t strides[] = {4, 8};
    for (uint32_t r = 0; r < WORLD; r++) {
        if (r == 2) {
            lg_tensor t = kit_tensor("w", LG_F32, 2, shape_23, transposed);
            t.strides = strides;
            assert_ok(lg_save_tensor(saves[r], &t, err));
        } else {
            add(saves[r], "w", 0, values[r]);
        }
    }
    assert_ok(kit_settle(saves, WORLD, false, err));
    kit_abort(saves, WORLD);
}

static void two_tensors_of_one_name_are_an_error(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        lg_dtype dtype;
        lg_group group;
        const uint64_t *shape;
    } cases[] = {
        {"model F32 [2, 3] on rank 0, model F32 [3, 2] on rank 1", LG_F32, LG_GROUP_MODEL, shape_32},
        {"model F32 [2, 3] on rank 0, model I32 [2, 3] on rank 1", LG_I32, LG_GROUP_MODEL, shape_23},
        {"model F32 [2, 3] on rank 0, optim F32 [2, 3] on rank 1", LG_F32, LG_GROUP_OPTIM, shape_23},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lg_save *saves[WORLD];
        begin(saves);
        add(saves[0], "w", LG_TENSOR_BUFFER, values[0]);
        lg_tensor t = kit_tensor("w", cases[i].dtype, 2, cases[i].shape, values[1]);
        t.group = cases[i].group, t.flags = LG_TENSOR_BUFFER;
        assert_ok(lg_save_tensor(saves[1], &t, err));
        assert_fails(LG_ERR_CONFLICT, cases[i].text, kit_settle(saves, WORLD, false, err));
        kit_abort(saves, WORLD);
    }
}

static void aliases_must_be_declared_alike(void **state)
{
    (void)state;
    lg_save *saves[WORLD];
    begin(saves);
    for (uint32_t r = 0; r < WORLD; r++) {
        add(saves[r], "a", 0, values[r]);
        if (r != 2) {
            assert_ok(lg_save_alias(saves[r], "b", "a", err));
        }
    }
    assert_fails(LG_ERR_CONFLICT, "alias \"b\" of \"a\" is declared on rank 0, but not on rank 2",
                 kit_settle(saves, WORLD, false, err));
    add(saves[2], "b", 0, values[2]);
    assert_fails(LG_ERR_CONFLICT, "\"b\" is an alias of \"a\" on rank 0, but a tensor of its own on rank 2",
                 kit_settle(saves, WORLD, false, err));
    kit_abort(saves, WORLD);
    begin(saves);
    for (uint32_t r = 0; r < WORLD; r++) {
        add(saves[r], "a", 0, values[r]);
        if (r != 0) {
            assert_ok(lg_save_alias(saves[r], "b", "a", err));
        }
    }
    assert_fails(LG_ERR_CONFLICT, "alias \"b\" of \"a\" is declared on rank 1, but not on rank 0",
                 kit_settle(saves, WORLD, false, err));
    kit_abort(saves, WORLD);
}

static void one_rank_alone_is_not_digested(void **state)
{
    (void)state;
    lg_save *save = kit_save(0, 1, 0);
    same_values();
    add(save, "w", 0, values[0]);
    assert_ok(lg_save_alias(save, "v", "w", err));
    assert_ok(lg__replicas_digest(save, true, err));
    assert_false(save->tensors[0].digested);
    uint8_t summary[40];
    lg__buf list;
    lg__buf_init(&list, 1 << 20);
    assert_ok(lg__replicas_summary(save, summary, err));
    assert_ok(lg__replicas_list(save, &list, err));
    assert_int_equal(list.len, 0);
    assert_ok(lg__replicas_settle(save, NULL, NULL, err));
    assert_int_equal(save->tensors[0].layout->n_ranks, 1);
    assert_ptr_equal(save->tensors[1].layout, save->tensors[0].layout);
    lg__buf_free(&list);
    lg_save_abort(save);
}

static void nothing_undeclared_means_nothing_to_exchange(void **state)
{
    (void)state;
    lg_save *saves[WORLD];
    begin(saves);
    lg_layout *rows = kit_rows(WORLD, 0);
    lg__buf list;
    lg__buf_init(&list, 1 << 20);
    for (uint32_t r = 0; r < WORLD; r++) {
        lg_tensor t = kit_tensor("w", LG_F32, 2, shape_23, values[r]);
        t.layout = rows;
        assert_ok(lg_save_tensor(saves[r], &t, err));
        assert_ok(lg__replicas_digest(saves[r], true, err)); /* no replicas either */
        assert_ok(lg__replicas_list(saves[r], &list, err));
    }
    assert_int_equal(list.len, 0);
    assert_ok(kit_settle(saves, WORLD, true, err));
    lg__buf_free(&list);
    kit_abort(saves, WORLD);
    lg_layout_free(rows);
}

/* ------------------------------------------------------------ declared replicas */

/* Rows over axis 0, replicas along axis 1 of a 2 by 2 mesh: ranks 0 and 1 hold
 * the first row, ranks 2 and 3 the second. */
static lg_layout *rows_of_replicas(void)
{
    const uint32_t sizes[] = {2, 2};
    const lg_split split = {0, 0, 0, LG_SPLIT_CEIL};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 2, d.mesh_sizes = sizes, d.n_splits = 1, d.splits = &split;
    lg_layout *layout = NULL;
    assert_ok(lg_layout_create(&d, &layout, err));
    return layout;
}

static void declared_replicas_are_compared_when_asked(void **state)
{
    (void)state;
    static const struct {
        int spoiled; /* rank whose part drifts, -1 for none */
        bool check;
        const char *text; /* NULL: success */
    } cases[] = {{-1, true, NULL},
                 {3, false, NULL},
                 {3, true, "tensor \"w\" differs between ranks 2 and 3: its layout says that they hold the same"},
                 {0, true, "tensor \"w\" differs between ranks 0 and 1: its layout says that they hold the same"}};
    lg_layout *layout = rows_of_replicas();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lg_save *saves[WORLD];
        begin(saves);
        for (uint32_t r = 0; r < WORLD; r++) {
            values[r][0] = (float)(r / 2); /* rows differ, as they may */
            if (cases[i].spoiled == (int)r) {
                values[r][2] += 1;
            }
            lg_tensor t = kit_tensor("w", LG_F32, 2, shape_23, values[r]);
            t.layout = layout;
            assert_ok(lg_save_tensor(saves[r], &t, err));
            add(saves[r], "u", 0, values[0]);
        }
        if (cases[i].text == NULL) {
            assert_ok(kit_settle(saves, WORLD, cases[i].check, err));
        } else {
            assert_fails(LG_ERR_CONFLICT, cases[i].text, kit_settle(saves, WORLD, cases[i].check, err));
        }
        kit_abort(saves, WORLD);
    }
    lg_layout_free(layout);
}

static void flat_replicas_are_compared_too(void **state)
{
    (void)state;
    const uint32_t sizes[] = {2, 2};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 2, d.mesh_sizes = sizes, d.flat_length = 8, d.flat_axis = 0;
    lg_layout *layout = NULL;
    assert_ok(lg_layout_create(&d, &layout, err));
    for (int spoiled = 0; spoiled < 2; spoiled++) {
        lg_save *saves[WORLD];
        begin(saves);
        values[3][0] += (float)spoiled;
        for (uint32_t r = 0; r < WORLD; r++) {
            lg_tensor t = kit_tensor("w", LG_F32, 2, shape_23, values[r]);
            t.layout = layout, t.flat_offset = 1;
            assert_ok(lg_save_tensor(saves[r], &t, err));
        }
        if (spoiled) {
            assert_fails(LG_ERR_CONFLICT, "between ranks 2 and 3", kit_settle(saves, WORLD, true, err));
        } else {
            assert_ok(kit_settle(saves, WORLD, true, err));
        }
        kit_abort(saves, WORLD);
    }
    lg_layout_free(layout);
}

static void a_layout_on_some_ranks_only_is_an_error(void **state)
{
    (void)state;
    lg_layout *layout = kit_replicated(WORLD, 0);
    for (int check = 0; check < 2; check++) {
        lg_save *saves[WORLD];
        begin(saves);
        for (uint32_t r = 0; r < WORLD; r++) {
            lg_tensor t = kit_tensor("w", LG_F32, 2, shape_23, values[r]);
            t.layout = r == 1 ? NULL : layout;
            assert_ok(lg_save_tensor(saves[r], &t, err));
        }
        assert_fails(LG_ERR_CONFLICT, "tensor \"w\" has a layout", kit_settle(saves, WORLD, check, err));
        kit_abort(saves, WORLD);
    }
    lg_layout_free(layout);
}

/* ------------------------------------------------------------------- bad lists */

static void garbled_lists_are_refused(void **state)
{
    (void)state;
    lg_save *saves[WORLD];
    begin(saves);
    lg__buf lists;
    lg__buf_init(&lists, 1 << 20);
    size_t sizes[WORLD] = {0};
    add(saves[0], "w", 0, values[0]);
    assert_ok(lg__replicas_digest(saves[0], false, err));
    assert_ok(lg__replicas_list(saves[0], &lists, err));
    for (size_t n = 0; n < lists.len; n++) {
        char *cut = malloc(n + 1); /* so that reading on is seen */
        memcpy(cut, lists.data, n);
        sizes[0] = n;
        lg_error err = LG_ERROR_INIT;
        assert_int_equal(lg__replicas_settle(saves[0], cut, sizes, &err), LG_ERR_COMM);
        free(cut);
    }
    for (size_t i = 0; i < 16; i++) { /* lengths */
        char *spoiled = malloc(lists.len);
        memcpy(spoiled, lists.data, lists.len);
        spoiled[i] = (char)(spoiled[i] ^ 0x80);
        sizes[0] = lists.len;
        lg_error err = LG_ERROR_INIT;
        (void)lg__replicas_settle(saves[0], spoiled, sizes, &err);
        free(spoiled);
    }
    lg__buf_free(&lists);
    kit_abort(saves, WORLD);
}

static lg_status settle_two(lg_error *err)
{
    static const lg__save_facts facts[] = {{0, 2, 4096, 1 << 20}, {1, 2, 4096, 1 << 20}};
    lg_save *saves[2] = {NULL, NULL};
    lg_status status = LG_OK;
    for (int r = 0; r < 2 && status == LG_OK; r++) {
        status = lg__save_new(&facts[r], 1, 0, &saves[r], err);
        lg_tensor t = kit_tensor("w", LG_F32, 2, shape_23, values[r]);
        t.flags = LG_TENSOR_BUFFER;
        status = status == LG_OK ? lg_save_tensor(saves[r], &t, err) : status;
        status = status == LG_OK ? lg_save_alias(saves[r], "v", "w", err) : status;
    }
    status = status == LG_OK ? kit_settle(saves, 2, true, err) : status;
    lg_save_abort(saves[0]);
    lg_save_abort(saves[1]);
    return status;
}

static void settling_survives_each_failing_allocation(void **state)
{
    (void)state;
    same_values();
    values[1][3] = 99;
    size_t n = 0;
    for (lg_status status = LG_ERR_NOMEM; status != LG_OK; n++) {
        assert_true(n < 10000);
        lg_error err = LG_ERROR_INIT;
        lg__mem_fail_after(n);
        status = settle_two(&err);
        lg__mem_fail_after(SIZE_MAX);
        if (status != LG_OK && status != LG_ERR_NOMEM) {
            fail_msg("allocation %zu: %s: %s", n, lg_status_name(status), err.message);
        }
    }
    assert_true(n > 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_tensors_are_written_once),
        cmocka_unit_test(equal_summaries_need_no_lists),
        cmocka_unit_test(a_tensor_of_some_ranks_is_written_by_one_of_them),
        cmocka_unit_test(a_buffer_that_differs_is_kept_by_each_rank),
        cmocka_unit_test(a_negative_zero_is_a_difference),
        cmocka_unit_test(a_parameter_that_differs_is_an_error_on_every_rank),
        cmocka_unit_test(two_odd_ranks_are_both_named),
        cmocka_unit_test(memory_layout_makes_no_difference),
        cmocka_unit_test(two_tensors_of_one_name_are_an_error),
        cmocka_unit_test(aliases_must_be_declared_alike),
        cmocka_unit_test(one_rank_alone_is_not_digested),
        cmocka_unit_test(nothing_undeclared_means_nothing_to_exchange),
        cmocka_unit_test(declared_replicas_are_compared_when_asked),
        cmocka_unit_test(flat_replicas_are_compared_too),
        cmocka_unit_test(a_layout_on_some_ranks_only_is_an_error),
        cmocka_unit_test(garbled_lists_are_refused),
        cmocka_unit_test(settling_survives_each_failing_allocation),
    };
    return cmocka_run_group_tests_name("replicas", tests, NULL, NULL);
}
