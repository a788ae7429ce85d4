/* SPDX-License-Identifier: Apache-2.0 */
#include "core/checkpoint.h"
#include "save_kit.h"

static lg__plan *make_plan(const lg_save *save)
{
    lg__plan *plan = NULL;
    assert_ok(lg__plan_make(save, &kit_ids, &plan, err));
    return plan;
}

static const lg__plan_file *file_named(const lg__plan *plan, const char *name)
{
    for (size_t i = 0; i < plan->n_files; i++) {
        if (strcmp(plan->files[i].name, name) == 0) {
            return &plan->files[i];
        }
    }
    fail_msg("no file %s", name);
    return NULL;
}

static lg__st_header *parse(const lg__plan_file *f)
{
    lg__st_header *h = NULL;
    assert_ok(lg__st_parse(f->header.data + 8, f->header.len - 8, f->header.len + f->data_bytes, &h, err));
    return h;
}

static void names_and_order_follow_the_groups(void **state)
{
    (void)state;
    static const float zero[64];
    const uint64_t shape[] = {4, 2}, packed[] = {4};
    lg_layout *rows = kit_rows(2, 0);
    lg_save *save = kit_save(1, 2, 0);
    lg_tensor t = kit_tensor("optim.b", LG_F32, 2, shape, zero);
    t.group = LG_GROUP_OPTIM, t.layout = rows;
    assert_ok(lg_save_tensor(save, &t, err));
    t.name = "w", t.group = LG_GROUP_MODEL;
    assert_ok(lg_save_tensor(save, &t, err));
    t.name = "half", t.dtype = LG_BF16;
    assert_ok(lg_save_tensor(save, &t, err));
    t.name = "aa", t.dtype = LG_F32;
    assert_ok(lg_save_tensor(save, &t, err));
    t = kit_tensor("scale", LG_F8_E8M0, 1, packed, zero);
    t.layout = rows;
    assert_ok(lg_save_tensor(save, &t, err));
    assert_ok(lg_save_rank_bytes(save, "rng", "abc", 3, err));
    assert_ok(lg_save_rank_bytes(save, "none", NULL, 0, err));

    lg__plan *plan = make_plan(save);
    assert_int_equal(plan->n_files, 3);
    static const struct {
        const char *name;
        lg_group group;
        const char *keys[3];
    } want[] = {
        {"shard-00002-model-00001-of-00001.safetensors", LG_GROUP_MODEL, {"aa", "w", "half"}},
        {"shard-00002-optim-00001-of-00001.safetensors", LG_GROUP_OPTIM, {"optim.b"}},
        {"shard-00002-raw-00001-of-00001.state", LG_GROUP_RAW, {"t:scale", "b:none", "b:rng"}},
    };
    uint64_t bytes = 0;
    for (size_t i = 0; i < 3; i++) {
        const lg__plan_file *f = &plan->files[i];
        assert_string_equal(f->name, want[i].name);
        assert_int_equal(f->group, want[i].group);
        assert_int_equal(f->number, 0);
        assert_int_equal(f->header.len % LG__ST_DATA_ALIGN, 0);
        size_t n = 0;
        while (n < 3 && want[i].keys[n] != NULL) {
            n++;
        }
        assert_int_equal(f->n_boxes, n);
        for (size_t k = 0; k < n; k++) {
            assert_string_equal(f->boxes[k].key, want[i].keys[k]);
        }
        bytes += f->header.len + f->data_bytes;
    }
    assert_int_equal(plan->bytes, bytes);
    lg__plan_free(plan);
    lg_save_abort(save);
    lg_layout_free(rows);
}

static void headers_say_run_attempt_step_and_rank(void **state)
{
    (void)state;
    static const float zero[64];
    const uint64_t shape[] = {5, 3};
    lg_layout *rows = kit_rows(2, 0);
    lg_save *save = kit_save(1, 2, 0);
    lg_tensor t = kit_tensor("w \"quoted\" ü", LG_F32, 2, shape, zero);
    t.layout = rows;
    assert_ok(lg_save_tensor(save, &t, err));
    lg__plan *plan = make_plan(save);
    const lg__plan_file *f = file_named(plan, "shard-00002-model-00001-of-00001.safetensors");
    lg__st_header *h = parse(f);
    const lg__st_tensor *w = lg__st_find(h, "w \"quoted\" ü");
    assert_non_null(w);
    assert_true(w->has_offsets);
    assert_int_equal(w->saved_offsets[0], 3);
    assert_int_equal(w->saved_offsets[1], 0);
    assert_int_equal(w->shape[0], 2);
    assert_int_equal(w->shape[1], 3);
    static const char *const want[][2] = {{"format", "pt"},
                                          {"DCP_VERSION", "1.0"},
                                          {"lastgood.run", "0123456789abcdef0123456789abcdef"},
                                          {"lastgood.attempt", "00112233445566aa"},
                                          {"lastgood.step", "500"},
                                          {"lastgood.rank", "1"}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        bool found = false;
        for (size_t k = 0; k < h->n_metadata; k++) {
            if (strcmp(h->metadata[k].key, want[i][0]) == 0) {
                assert_string_equal(h->metadata[k].value, want[i][1]);
                found = true;
            }
        }
        assert_true(found);
    }
    /* ours come behind those that PyTorch reads */
    assert_true(strstr(f->header.data + 8, "DCP_SHARDING_INFO") < strstr(f->header.data + 8, "lastgood.run"));
    lg__st_free(h);
    lg__plan_free(plan);
    lg_save_abort(save);
    lg_layout_free(rows);
}

static void the_bth_box_of_a_tensor_is_in_file_b(void **state)
{
    (void)state;
    /* a fused matrix: three thirds, each cut over two ranks */
    static float local[6][2];
    const uint64_t fused[] = {12, 2}, plain[] = {4, 2};
    const lg_split splits[] = {{0, LG_NO_AXIS, 3, LG_SPLIT_CEIL}, {0, 0, 0, LG_SPLIT_CEIL}};
    uint32_t ranks = 2;
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &ranks, d.n_splits = 2, d.splits = splits;
    lg_layout *qkv = NULL, *rows = kit_rows(2, 0);
    assert_ok(lg_layout_create(&d, &qkv, err));
    lg_save *save = kit_save(1, 2, 0);
    lg_tensor t = kit_tensor("qkv", LG_F32, 2, fused, local);
    t.layout = qkv;
    assert_ok(lg_save_tensor(save, &t, err));
    t = kit_tensor("w", LG_F32, 2, plain, local);
    t.layout = rows;
    assert_ok(lg_save_tensor(save, &t, err));
    lg__plan *plan = make_plan(save);
    assert_int_equal(plan->n_files, 3);
    for (uint32_t b = 0; b < 3; b++) {
        const lg__plan_file *f = &plan->files[b];
        char name[64];
        snprintf(name, sizeof name, "shard-00002-model-%05u-of-00003.safetensors", b + 1);
        assert_string_equal(f->name, name);
        assert_int_equal(f->number, b);
        assert_int_equal(f->n_boxes, b == 0 ? 2 : 1);
        assert_string_equal(f->boxes[0].key, "qkv");
        assert_int_equal(f->boxes[0].box.offset[0], 4 * b + 2);
        assert_int_equal(f->boxes[0].box.size[0], 2);
    }
    lg__plan_free(plan);
    lg_save_abort(save);
    lg_layout_free(qkv);
    lg_layout_free(rows);
}

static void irregular_boxes_are_numbered_by_their_place_not_by_their_turn(void **state)
{
    (void)state;
    static const float data[8];
    const uint64_t shape[] = {4, 4}, low[] = {0, 2}, high[] = {3, 0}, none[] = {1, 1}, two[] = {2, 2}, row[] = {1, 4},
                   empty[] = {0, 3};
    const lg_box boxes[] = {{high, row, data, NULL}, {none, empty, NULL, NULL}, {low, two, data, NULL}};
    lg_save *save = kit_save(0, 3, 0);
    lg_tensor t = kit_tensor("w", LG_F32, 2, shape, NULL);
    t.boxes = boxes, t.n_boxes = 3;
    assert_ok(lg_save_tensor(save, &t, err));
    lg__plan *plan = make_plan(save);
    assert_int_equal(plan->n_files, 2);
    assert_int_equal(plan->files[0].boxes[0].box.offset[0], 0);
    assert_int_equal(plan->files[0].boxes[0].box.offset[1], 2);
    assert_int_equal(plan->files[1].boxes[0].box.offset[0], 3);
    lg__plan_free(plan);
    lg_save_abort(save);
}

static void a_rank_without_a_part_has_no_file(void **state)
{
    (void)state;
    const uint64_t shape[] = {2, 3};
    lg_layout *rows = kit_rows(4, 0);
    lg_save *save = kit_save(3, 4, 0);
    lg_tensor t = kit_tensor("w", LG_F32, 2, shape, NULL);
    t.layout = rows;
    assert_ok(lg_save_tensor(save, &t, err));
    lg__plan *plan = make_plan(save);
    assert_int_equal(plan->n_files, 0);
    assert_int_equal(plan->bytes, 0);
    lg__plan_free(plan);
    lg_save_abort(save);
    lg_layout_free(rows);
}

static void headers_that_grow_too_long_spill_into_further_files(void **state)
{
    (void)state;
    static float local[6][2];
    const uint64_t fused[] = {12, 2};
    const lg_split splits[] = {{0, LG_NO_AXIS, 3, LG_SPLIT_CEIL}, {0, 0, 0, LG_SPLIT_CEIL}};
    uint32_t ranks = 2;
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &ranks, d.n_splits = 2, d.splits = splits;
    lg_layout *qkv = NULL;
    assert_ok(lg_layout_create(&d, &qkv, err));
    lg_save *save = kit_save(0, 2, 0);
    const uint64_t entry = lg__st_entry_bytes("layer.0.qkv", 2);
    save->header_limit = 4 * entry; /* four tensors a file */
    char name[32];
    for (int i = 0; i < 10; i++) {
        snprintf(name, sizeof name, "layer.%d.qkv", i);
        lg_tensor t = kit_tensor(name, LG_F32, 2, fused, local);
        t.layout = qkv;
        assert_ok(lg_save_tensor(save, &t, err));
    }
    lg__plan *plan = make_plan(save);
    /* 3 regular files of 4, then for each two more: of 4 and of 2 */
    assert_int_equal(plan->n_files, 9);
    size_t seen = 0;
    for (size_t i = 0; i < plan->n_files; i++) {
        const lg__plan_file *f = &plan->files[i];
        char want[64];
        snprintf(want, sizeof want, "shard-00001-model-%05zu-of-00009.safetensors", i + 1);
        assert_string_equal(f->name, want);
        assert_int_equal(f->number, i);
        uint64_t number = f->boxes[0].box.offset[0] / 4; /* which box of its tensor */
        for (size_t k = 0; k < f->n_boxes; k++) {
            assert_int_equal(f->boxes[k].box.offset[0] / 4, number); /* one box of a tensor in one file */
        }
        if (i < 3) {
            assert_int_equal(number, i);
            assert_int_equal(f->n_boxes, 4);
        }
        seen += f->n_boxes;
    }
    assert_int_equal(seen, 30);
    lg__plan_free(plan);

    save->header_limit = 1; /* less than any entry: still one a file */
    plan = make_plan(save);
    assert_int_equal(plan->n_files, 30);
    lg__plan_free(plan);
    lg_save_abort(save);
    lg_layout_free(qkv);
}

/* --------------------------------------------------------------- descriptions */

typedef struct refusal {
    const char *what;
    void (*spoil)(lg_tensor *t);
    lg_status status;
    const char *text;
} refusal;

static const uint64_t shape_44[] = {4, 4}, shape_0[] = {0}, shape_22[] = {2, 2},
                      shape_huge[] = {UINT64_C(1) << 32, UINT64_C(1) << 32};
static const int64_t strides_wild[] = {INT64_MAX / 2, INT64_MAX / 2}, strides_fine[] = {4, 16};
static const float data_44[16];
static const uint64_t at_00[] = {0, 0}, at_33[] = {3, 3}, at_11[] = {1, 1};
static const lg_box box_out[] = {{at_33, shape_22, data_44, NULL}};
static const lg_box box_no_data[] = {{at_00, shape_22, NULL, NULL}};
static const lg_box box_overlap[] = {{at_00, shape_22, data_44, NULL}, {at_11, shape_22, data_44, NULL}};
static const lg_layout *rows_4;

static void spoil_size(lg_tensor *t) { t->size -= 8; }
static void spoil_name(lg_tensor *t) { t->name = ""; }
static void spoil_null_name(lg_tensor *t) { t->name = NULL; }
static void spoil_metadata_name(lg_tensor *t) { t->name = "__metadata__"; }
static void spoil_duplicate(lg_tensor *t) { t->name = "first"; }
static void spoil_dtype(lg_tensor *t) { t->dtype = LG_DTYPE_COUNT; }
static void spoil_group(lg_tensor *t) { t->group = LG_GROUP_RAW; }
static void spoil_ndim(lg_tensor *t) { t->ndim = LG_MAX_NDIM + 1; }
static void spoil_shape(lg_tensor *t) { t->shape = shape_huge; }
static void spoil_no_shape(lg_tensor *t) { t->shape = NULL; }
static void spoil_data(lg_tensor *t) { t->data = NULL; }
static void spoil_flags(lg_tensor *t) { t->flags = LG_TENSOR_OPTIONAL; }
static void spoil_local_shape(lg_tensor *t) { t->local_shape = shape_0, t->ndim = 1; }
static void spoil_local_shape_rows(lg_tensor *t) { t->layout = rows_4, t->local_shape = shape_44; }
static void spoil_strides(lg_tensor *t) { t->strides = strides_wild; }
static void spoil_flat_offset(lg_tensor *t) { t->flat_offset = 1; }
static void spoil_sub_byte(lg_tensor *t) { t->dtype = LG_F4, t->strides = strides_fine; }
static void spoil_both(lg_tensor *t) { t->layout = rows_4, t->boxes = box_out; }
static void spoil_box(lg_tensor *t) { t->data = NULL, t->boxes = box_out, t->n_boxes = 1; }
static void spoil_box_and_data(lg_tensor *t) { t->boxes = box_out, t->n_boxes = 1; }
static void spoil_box_data(lg_tensor *t) { t->data = NULL, t->boxes = box_no_data, t->n_boxes = 1; }
static void spoil_overlap(lg_tensor *t) { t->data = NULL, t->boxes = box_overlap, t->n_boxes = 2; }
static void spoil_n_boxes(lg_tensor *t) { t->n_boxes = 2; }

static const refusal refusals[] = {
    {"struct of another size", spoil_size, LG_ERR_INVALID, "LG_TENSOR_INIT"},
    {"empty name", spoil_name, LG_ERR_INVALID, "not empty"},
    {"no name", spoil_null_name, LG_ERR_INVALID, "name"},
    {"reserved name", spoil_metadata_name, LG_ERR_INVALID, "__metadata__"},
    {"name twice", spoil_duplicate, LG_ERR_INVALID, "\"first\" was added before"},
    {"dtype", spoil_dtype, LG_ERR_INVALID, "\"w\": unknown dtype"},
    {"group", spoil_group, LG_ERR_INVALID, "\"w\": group 2"},
    {"dimensions", spoil_ndim, LG_ERR_LIMIT, "\"w\": 33 dimensions"},
    {"shape that overflows", spoil_shape, LG_ERR_LIMIT, "\"w\""},
    {"no shape", spoil_no_shape, LG_ERR_INVALID, "\"w\": shape is NULL"},
    {"no data", spoil_data, LG_ERR_INVALID, "\"w\": data is NULL"},
    {"flag of loading", spoil_flags, LG_ERR_INVALID, "\"w\": flags 0x2"},
    {"K11 F200: shape 0 of a whole tensor", spoil_local_shape, LG_ERR_INVALID,
     "the local shape is [0], but this rank's part of the global shape [4] is [4]"},
    {"K11 F200: local shape against a layout", spoil_local_shape_rows, LG_ERR_INVALID,
     "the local shape is [4, 4], but this rank's part of the global shape [4, 4] is [1, 4]"},
    {"strides that lead astray", spoil_strides, LG_ERR_INVALID, "\"w\": stride"},
    {"flat offset without a flat layout", spoil_flat_offset, LG_ERR_INVALID, "\"w\": flat_offset"},
    {"strides of half bytes", spoil_sub_byte, LG_ERR_UNSUPPORTED, "\"w\": F4"},
    {"layout and boxes", spoil_both, LG_ERR_INVALID, "both a layout and boxes"},
    {"box outside", spoil_box, LG_ERR_INVALID, "box [3:5, 3:5] is not inside the shape [4, 4]"},
    {"box and data", spoil_box_and_data, LG_ERR_INVALID, "with boxes"},
    {"box without data", spoil_box_data, LG_ERR_INVALID, "box [0:2, 0:2] has no data"},
    {"boxes that overlap", spoil_overlap, LG_ERR_INVALID, "boxes [0:2, 0:2] and [1:3, 1:3] overlap"},
    {"count without boxes", spoil_n_boxes, LG_ERR_INVALID, "n_boxes is 2"},
};

static void a_wrong_description_is_refused_at_once_and_changes_nothing(void **state)
{
    (void)state;
    lg_layout *rows = kit_rows(4, 0);
    rows_4 = rows;
    lg_save *save = kit_save(0, 4, 0);
    lg_tensor first = kit_tensor("first", LG_F32, 2, shape_44, data_44);
    assert_ok(lg_save_tensor(save, &first, err));
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        lg_tensor t = kit_tensor("w", LG_F32, 2, shape_44, data_44);
        refusals[i].spoil(&t);
        lg_error err = LG_ERROR_INIT;
        lg_status status = lg_save_tensor(save, &t, &err);
        if (status != refusals[i].status || strstr(err.message, refusals[i].text) == NULL) {
            fail_msg("%s: %s: %s", refusals[i].what, lg_status_name(status), err.message);
        }
        assert_int_equal(save->n_tensors, 1);
    }
    lg_tensor good = kit_tensor("w", LG_F32, 2, shape_44, data_44);
    assert_ok(lg_save_tensor(save, &good, err));
    lg_save_abort(save);
    lg_layout_free(rows);
}

static void a_layout_must_contain_the_rank_and_fit_the_world_and_the_tensor(void **state)
{
    (void)state;
    lg_layout *two = kit_rows(2, 0), *nine = kit_rows(9, 0), *deep = kit_rows(4, 3);
    lg_save *save = kit_save(3, 4, 0);
    lg_tensor t = kit_tensor("w", LG_F32, 2, shape_44, data_44);
    t.layout = two;
    assert_fails(LG_ERR_INVALID, "tensor \"w\": its layout does not contain rank 3", lg_save_tensor(save, &t, err));
    t.layout = nine;
    assert_fails(LG_ERR_INVALID, "rank 8, but there are only 4 ranks", lg_save_tensor(save, &t, err));
    t.layout = deep;
    assert_fails(LG_ERR_INVALID, "tensor \"w\"", lg_save_tensor(save, &t, err));
    lg_save_abort(save);
    lg_layout_free(two);
    lg_layout_free(nine);
    lg_layout_free(deep);
}

static void a_flat_part_is_packed_and_inside_its_buffer(void **state)
{
    (void)state;
    lg_layout *flat = kit_flat(2, 20);
    lg_save *save = kit_save(0, 2, 0);
    const int64_t strides[] = {16, 4};
    const uint64_t eight = 8, ten = 10;
    lg_tensor t = kit_tensor("w", LG_F32, 2, shape_44, data_44);
    t.layout = flat, t.flat_offset = 5;
    assert_fails(LG_ERR_INVALID, "\"w\"", lg_save_tensor(save, &t, err));
    t.flat_offset = 2, t.strides = strides;
    assert_fails(LG_ERR_INVALID, "packed", lg_save_tensor(save, &t, err));
    t.strides = NULL, t.local_shape = &ten;
    assert_fails(LG_ERR_INVALID, "the local shape is [10]", lg_save_tensor(save, &t, err));
    t.local_shape = &eight;
    assert_ok(lg_save_tensor(save, &t, err));
    lg_save_abort(save);
    lg_layout_free(flat);
}

static void the_description_is_copied(void **state)
{
    (void)state;
    uint64_t shape[] = {2, 2};
    int64_t strides[] = {4, 8};
    char name[] = "w";
    lg_layout *rows = kit_rows(1, 0);
    lg_save *save = kit_save(0, 1, 0);
    lg_tensor t = kit_tensor(name, LG_F32, 2, shape, data_44);
    t.strides = strides, t.layout = rows;
    assert_ok(lg_save_tensor(save, &t, err));
    lg_layout_free(rows);
    name[0] = 'x', shape[0] = 9, strides[0] = 99;
    lg__plan *plan = make_plan(save);
    assert_string_equal(plan->files[0].boxes[0].key, "w");
    assert_int_equal(plan->files[0].boxes[0].box.size[0], 2);
    assert_int_equal(plan->files[0].boxes[0].strides[0], 4);
    lg__plan_free(plan);
    lg_save_abort(save);
}

/* -------------------------------------------------------------------- aliases */

static void an_alias_is_stored_under_both_names_or_once(void **state)
{
    (void)state;
    for (int once = 0; once < 2; once++) {
        lg_layout *rows = kit_rows(1, 0);
        lg_save *save = kit_save(0, 1, once ? LG_SAVE_ALIASES_ONCE : 0);
        lg_tensor t = kit_tensor("embed", LG_F32, 2, shape_44, data_44);
        t.layout = rows;
        assert_ok(lg_save_tensor(save, &t, err));
        assert_ok(lg_save_alias(save, "head", "embed", err));
        assert_ok(lg_save_alias(save, "third", "head", err));
        assert_string_equal(save->tensors[2].alias_of, "embed"); /* not an alias of an alias */
        lg__plan *plan = make_plan(save);
        assert_int_equal(plan->n_files, 1);
        assert_int_equal(plan->files[0].n_boxes, once ? 1 : 3);
        if (!once) {
            assert_string_equal(plan->files[0].boxes[1].key, "head");
            assert_ptr_equal(plan->files[0].boxes[1].data, data_44);
        }
        lg__plan_free(plan);
        lg_save_abort(save);
        lg_layout_free(rows);
    }
}

static void aliases_need_a_known_name_and_a_new_one(void **state)
{
    (void)state;
    lg_save *save = kit_save(0, 1, 0);
    lg_tensor t = kit_tensor("a", LG_F32, 2, shape_44, data_44);
    assert_ok(lg_save_tensor(save, &t, err));
    assert_fails(LG_ERR_INVALID, "alias \"b\" of \"c\": no tensor", lg_save_alias(save, "b", "c", err));
    assert_fails(LG_ERR_INVALID, "\"a\" was added before", lg_save_alias(save, "a", "a", err));
    assert_fails(LG_ERR_INVALID, "not empty", lg_save_alias(save, "", "a", err));
    assert_ok(lg_save_alias(save, "b", "a", err));
    t.name = "b";
    assert_fails(LG_ERR_INVALID, "\"b\" was added before", lg_save_tensor(save, &t, err));
    lg_save_abort(save);
}

/* Its boxes cannot say which rank is to write it. */
static void a_tensor_without_elements_is_saved_whatever_boxes_it_has(void **state)
{
    (void)state;
    static const uint64_t shape[] = {0, 4}, offset[] = {0, 1}, size[] = {0, 3};
    const lg_box box = {offset, size, NULL, NULL};
    lg_save *saves[2];
    for (uint32_t r = 0; r < 2; r++) {
        saves[r] = kit_save(r, 2, 0);
        lg_tensor t = kit_tensor("e", LG_F32, 2, shape, NULL);
        t.boxes = &box, t.n_boxes = 1;
        assert_ok(lg_save_tensor(saves[r], &t, err));
    }
    assert_ok(kit_settle(saves, 2, false, err));
    size_t files = 0;
    for (uint32_t r = 0; r < 2; r++) {
        lg__plan *plan = make_plan(saves[r]);
        files += plan->n_files;
        if (plan->n_files > 0) {
            lg__st_header *h = parse(&plan->files[0]);
            assert_int_equal(h->n, 1);
            assert_string_equal(h->tensors[0].name, "e");
            assert_int_equal(h->tensors[0].end - h->tensors[0].begin, 0);
            lg__st_free(h);
        }
        lg__plan_free(plan);
    }
    assert_int_equal(files, 1); /* one rank has it */
    kit_abort(saves, 2);
}

static void empty_tensors_and_equal_addresses_are_never_tied(void **state)
{
    (void)state;
    /* F196, F197: no data at all, and the same address twice */
    lg_save *save = kit_save(0, 1, 0);
    lg_tensor t = kit_tensor("a", LG_F32, 1, shape_0, NULL);
    assert_ok(lg_save_tensor(save, &t, err));
    t.name = "b";
    assert_ok(lg_save_tensor(save, &t, err));
    t = kit_tensor("c", LG_F32, 2, shape_44, data_44);
    assert_ok(lg_save_tensor(save, &t, err));
    t.name = "d";
    assert_ok(lg_save_tensor(save, &t, err));
    lg_save *saves[] = {save};
    assert_ok(kit_settle(saves, 1, false, err));
    lg__plan *plan = make_plan(save);
    assert_int_equal(plan->files[0].n_boxes, 4);
    for (size_t i = 0; i < 4; i++) {
        assert_null(save->tensors[i].alias_of);
    }
    lg__plan_free(plan);
    lg_save_abort(save);
}

/* ---------------------------------------------------------------------- state */

static void a_key_keeps_one_value(void **state)
{
    (void)state;
    lg_save *save = kit_save(2, 4, 0);
    assert_ok(lg_save_global_u64(save, "n", UINT64_MAX, err));
    assert_ok(lg_save_global_u64(save, "n", UINT64_MAX, err));
    assert_fails(LG_ERR_CONFLICT, "\"n\" was given two different values on rank 2",
                 lg_save_global_u64(save, "n", UINT64_MAX - 1, err));
    assert_ok(lg_save_global_f64(save, "zero", -0.0, err));
    assert_fails(LG_ERR_CONFLICT, "\"zero\"", lg_save_global_f64(save, "zero", 0.0, err));
    assert_ok(lg_save_global_i64(save, "i", INT64_MIN, err));
    assert_ok(lg_save_global_bytes(save, "b", "\0\1", 2, err));
    assert_ok(lg_save_global_bytes(save, "none", NULL, 0, err));
    assert_ok(lg_save_global_str(save, "s", "text", err));
    assert_ok(lg_save_global_json(save, "j", "{\"lr\": [0.5, 1]}", err));
    assert_fails(LG_ERR_FORMAT, "\"k\"", lg_save_global_json(save, "k", "{", err));
    assert_fails(LG_ERR_FORMAT, "global state \"k\": ", lg_save_global_json(save, "k", "{\"$what\": 1}", err));
    assert_fails(LG_ERR_FORMAT, "global state \"k\": ", lg_save_global_json(save, "k", "[9007199254740993]", err));
    assert_fails(LG_ERR_INVALID, "UTF-8", lg_save_global_str(save, "s2", "\xff", err));
    assert_fails(LG_ERR_INVALID, "key", lg_save_global_str(save, "", "x", err));
    assert_fails(LG_ERR_INVALID, "\"k\"", lg_save_global_str(save, "k", NULL, err));
    assert_int_equal(json_object_size(save->state), 7);
    lg_save_abort(save);
}

static void bytes_of_a_rank_and_attached_files_are_copied_and_unique(void **state)
{
    (void)state;
    char bytes[] = "abc";
    for (uint32_t rank = 0; rank < 2; rank++) {
        lg_save *save = kit_save(rank, 2, 0);
        assert_ok(lg_save_rank_bytes(save, "rng", bytes, 3, err));
        assert_fails(LG_ERR_INVALID, "\"rng\", was added before", lg_save_rank_bytes(save, "rng", bytes, 3, err));
        assert_ok(lg_save_attach(save, "config.json", bytes, 3, err));
        assert_fails(LG_ERR_INVALID, "\"config.json\" was added before",
                     lg_save_attach(save, "config.json", bytes, 3, err));
        lg_error err = LG_ERROR_INIT;
        assert_int_not_equal(lg_save_attach(save, LG__MANIFEST, bytes, 3, &err), LG_OK);
        assert_int_not_equal(lg_save_attach(save, "../x", bytes, 3, &err), LG_OK);
        assert_int_not_equal(lg_save_attach(save, "rank-00001.sums", bytes, 3, &err), LG_OK);
        assert_int_equal(save->n_attached, rank == 0 ? 1 : 0);
        bytes[0] = 'x';
        assert_memory_equal(save->blobs[0].data, "abc", 3);
        if (rank == 0) {
            assert_memory_equal(save->attached[0].data, "abc", 3);
        }
        bytes[0] = 'a';
        lg_save_abort(save);
    }
}

static void steps_and_flags_are_checked(void **state)
{
    (void)state;
    const lg__save_facts facts = {.rank = 0, .world = 1, .block_bytes = 4096, .buffer_bytes = 1 << 20};
    lg_save *save = NULL;
    assert_fails(LG_ERR_LIMIT, "2^53", lg__save_new(&facts, UINT64_C(1) << 53, 0, &save, err));
    assert_fails(LG_ERR_INVALID, "flags", lg__save_new(&facts, 1, 1u << 9, &save, err));
    assert_null(save);
    assert_fails(LG_ERR_INVALID, "session", lg_save_begin(NULL, 1, NULL, &save, err));
    lg_save_abort(NULL);
}

/* ---------------------------------------------------------------------- scale */

static void twenty_thousand_tensors_share_a_layout_and_a_file(void **state)
{
    (void)state;
    enum { N = 20000 };
    lg_layout *rows = kit_rows(4, 0);
    lg_save *save = kit_save(0, 4, 0);
    char name[64];
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "model.layers.%d.mlp.down_proj.weight", i);
        lg_tensor t = kit_tensor(name, LG_BF16, 2, shape_44, data_44);
        t.layout = rows;
        assert_ok(lg_save_tensor(save, &t, err));
    }
    snprintf(name, sizeof name, "model.layers.%d.mlp.down_proj.weight", N / 2);
    lg_tensor t = kit_tensor(name, LG_BF16, 2, shape_44, data_44);
    assert_fails(LG_ERR_INVALID, "was added before", lg_save_tensor(save, &t, err));
    assert_int_equal(save->n_layouts, 1); /* one object for all */
    lg__plan *plan = make_plan(save);
    assert_int_equal(plan->n_files, 1);
    assert_int_equal(plan->files[0].n_boxes, N);
    lg__plan_free(plan);
    lg_save_abort(save);
    lg_layout_free(rows);
}

/* ------------------------------------------------------------ failing memory */

static lg_status describe_and_plan(lg_layout *rows, lg_error *err)
{
    static const lg__save_facts facts = {.rank = 0, .world = 2, .block_bytes = 4096, .buffer_bytes = 1 << 20};
    lg_save *save = NULL;
    lg__plan *plan = NULL;
    LG__TRY(lg__save_new(&facts, 1, 0, &save, err));
    lg_tensor t = kit_tensor("w", LG_F32, 2, shape_44, data_44);
    t.layout = rows;
    lg_status status = lg_save_tensor(save, &t, err);
    if (status == LG_OK) {
        lg_box boxes[] = {{at_11, shape_22, data_44, strides_fine}};
        t = kit_tensor("x", LG_F32, 2, shape_44, NULL);
        t.boxes = boxes, t.n_boxes = 1;
        status = lg_save_tensor(save, &t, err);
    }
    status = status == LG_OK ? lg_save_alias(save, "v", "w", err) : status;
    status = status == LG_OK ? lg_save_rank_bytes(save, "rng", "abc", 3, err) : status;
    status = status == LG_OK ? lg_save_attach(save, "config.json", "{}", 2, err) : status;
    status = status == LG_OK ? lg__plan_make(save, &kit_ids, &plan, err) : status;
    lg__plan_free(plan);
    lg_save_abort(save);
    return status;
}

static void describing_and_planning_survive_each_failing_allocation(void **state)
{
    (void)state;
    lg_layout *rows = kit_rows(2, 0);
    size_t n = 0;
    for (lg_status status = LG_ERR_NOMEM; status != LG_OK; n++) {
        assert_true(n < 10000);
        lg_error err = LG_ERROR_INIT;
        lg__mem_fail_after(n);
        status = describe_and_plan(rows, &err);
        lg__mem_fail_after(SIZE_MAX);
        if (status != LG_OK && status != LG_ERR_NOMEM) {
            fail_msg("allocation %zu: %s: %s", n, lg_status_name(status), err.message);
        }
    }
    assert_true(n > 20);
    lg_layout_free(rows);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_order_follow_the_groups),
        cmocka_unit_test(headers_say_run_attempt_step_and_rank),
        cmocka_unit_test(the_bth_box_of_a_tensor_is_in_file_b),
        cmocka_unit_test(irregular_boxes_are_numbered_by_their_place_not_by_their_turn),
        cmocka_unit_test(a_rank_without_a_part_has_no_file),
        {"K13 F220: headers that grow too long spill into further files",
         headers_that_grow_too_long_spill_into_further_files, NULL, NULL, NULL},
        {"K11 F200: a wrong description is refused at once and changes nothing",
         a_wrong_description_is_refused_at_once_and_changes_nothing, NULL, NULL, NULL},
        cmocka_unit_test(a_layout_must_contain_the_rank_and_fit_the_world_and_the_tensor),
        cmocka_unit_test(a_flat_part_is_packed_and_inside_its_buffer),
        cmocka_unit_test(the_description_is_copied),
        {"K11 F194: an alias is stored under both names or once", an_alias_is_stored_under_both_names_or_once, NULL,
         NULL, NULL},
        cmocka_unit_test(aliases_need_a_known_name_and_a_new_one),
        {"K11 F196, F197: empty tensors and equal addresses are never tied",
         empty_tensors_and_equal_addresses_are_never_tied, NULL, NULL, NULL},
        cmocka_unit_test(a_tensor_without_elements_is_saved_whatever_boxes_it_has),
        cmocka_unit_test(a_key_keeps_one_value),
        cmocka_unit_test(bytes_of_a_rank_and_attached_files_are_copied_and_unique),
        cmocka_unit_test(steps_and_flags_are_checked),
        {"K16: twenty thousand tensors share a layout and a file", twenty_thousand_tensors_share_a_layout_and_a_file,
         NULL, NULL, NULL},
        cmocka_unit_test(describing_and_planning_survive_each_failing_allocation),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
