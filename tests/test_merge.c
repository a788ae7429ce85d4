/* SPDX-License-Identifier: Apache-2.0 */
#include "save_kit.h"

enum { WORLD = 4 };

static const uint64_t shape_86[] = {8, 6}, shape_68[] = {6, 8}, shape_44[] = {4, 4}, shape_0[] = {0, 3};
static float some[64];
static lg_layout *rows, *columns, *replicated, *middle;

/* How one rank describes its save. */
typedef void (*describe_fn)(lg_save *save, uint32_t rank);
/* What is changed in the reports then. */
typedef void (*spoil_fn)(lg__report **reports);

static void add(lg_save *save, const char *name, lg_dtype dtype, const uint64_t *shape, const lg_layout *layout)
{
    lg_tensor t = kit_tensor(name, dtype, 2, shape, some);
    t.layout = layout;
    assert_ok(lg_save_tensor(save, &t, err));
}

static void add_box(lg_save *save, const char *name, uint64_t row, uint64_t n)
{
    const uint64_t offset[] = {row, 0}, size[] = {n, 4};
    const lg_box box = {offset, size, some, NULL};
    lg_tensor t = kit_tensor(name, LG_F32, 2, shape_44, NULL);
    t.boxes = &box, t.n_boxes = 1;
    assert_ok(lg_save_tensor(save, &t, err));
}

/* Everything that is fine: rows, columns, replicas, irregular boxes, a tensor
 * of two ranks, an empty one, aliases, state. */
static void describe_good(lg_save *save, uint32_t rank)
{
    add(save, "rows", LG_F32, shape_86, rows);
    add(save, "embed", LG_BF16, shape_86, rows);
    assert_ok(lg_save_alias(save, "head", "embed", err));
    add(save, "columns", LG_F32, shape_86, columns);
    add(save, "norm", LG_F32, shape_44, replicated);
    add(save, "empty", LG_F32, shape_0, rows);
    if (rank == 1 || rank == 2) {
        add(save, "stage", LG_F32, shape_44, middle);
    }
    add_box(save, "odd", rank, 1);
    assert_ok(lg_save_alias(save, "odder", "odd", err));
    assert_ok(lg_save_global_u64(save, "samples", 12345, err));
    char key[16];
    snprintf(key, sizeof key, "only %u", rank);
    assert_ok(lg_save_global_u64(save, key, rank, err));
    if (rank > 0) {
        assert_ok(lg_save_rank_bytes(save, "rng", "abc", 3, err));
    }
}

/* A report as the coordinator gets it: encoded by its rank and decoded. */
static lg_status make_report(lg_save *save, lg__report **out, lg_error *err)
{
    static const uint8_t tables[64][LG__SHA256_BYTES];
    lg__plan *plan = NULL;
    lg__report *mine = NULL;
    lg__buf bytes;
    lg__buf_init(&bytes, LG__REPORT_MAX);
    lg_status status = lg__plan_make(save, &kit_ids, &plan, err);
    if (status == LG_OK) {
        status = lg__save_report(save, &kit_ids, plan, tables, &mine, err);
    }
    if (status == LG_OK) {
        status = lg__report_encode(mine, &bytes, err);
    }
    if (status == LG_OK) {
        status = lg__report_decode(bytes.data, bytes.len, out, err);
    }
    lg__report_free(mine);
    lg__plan_free(plan);
    lg__buf_free(&bytes);
    return status;
}

static void make_reports(lg__report **reports, uint32_t flags, describe_fn describe)
{
    lg_save *saves[WORLD];
    for (uint32_t r = 0; r < WORLD; r++) {
        saves[r] = kit_save(r, WORLD, flags);
        describe(saves[r], r);
    }
    assert_ok(kit_settle(saves, WORLD, false, err));
    for (uint32_t r = 0; r < WORLD; r++) {
        assert_ok(make_report(saves[r], &reports[r], err));
    }
    kit_abort(saves, WORLD);
}

static void free_reports(lg__report **reports)
{
    for (uint32_t r = 0; r < WORLD; r++) {
        lg__report_free(reports[r]);
    }
}

static lg_status new_manifest(lg__manifest **out, lg_error *err)
{
    lg__manifest *m = NULL;
    LG__TRY(lg__manifest_new(&m, err));
    snprintf(m->run_id, sizeof m->run_id, "%s", kit_ids.run_id);
    snprintf(m->attempt, sizeof m->attempt, "%s", kit_ids.attempt);
    snprintf(m->created, sizeof m->created, "2026-11-29T18:31:57Z");
    m->generation = kit_ids.generation;
    m->step = 500;
    m->block_bytes = 65536;
    *out = m;
    return LG_OK;
}

static lg_status merge(lg__report **reports, lg__manifest **out, lg_error *err)
{
    lg__written written[WORLD] = {0};
    for (uint32_t r = 0; r < WORLD; r++) {
        written[r].sums_bytes = 1000 + r;
        memset(written[r].report, (int)r + 1, sizeof written[r].report);
    }
    lg__manifest *m = NULL;
    LG__TRY(new_manifest(&m, err));
    lg_status status = lg__merge((const lg__report *const *)reports, WORLD, written, m, err);
    if (status != LG_OK) {
        lg__manifest_free(m);
        return status;
    }
    *out = m;
    return LG_OK;
}

static const lg__manifest_tensor *find(const lg__manifest *m, const char *name)
{
    const lg__manifest_tensor *t = lg__manifest_find(m, name);
    if (t == NULL) {
        fail_msg("the manifest lacks \"%s\"", name);
    }
    return t;
}

static void agreeing_reports_make_a_manifest(void **state)
{
    (void)state;
    for (int once = 0; once < 2; once++) {
        lg__report *reports[WORLD];
        make_reports(reports, once ? LG_SAVE_ALIASES_ONCE : 0, describe_good);
        lg__manifest *made = NULL, *m = NULL;
        assert_ok(merge(reports, &made, err));
        free_reports(reports); /* the manifest must not need them */
        lg__buf bytes;
        lg__buf_init(&bytes, LG__MANIFEST_MAX);
        assert_ok(lg__manifest_encode(made, &bytes, err));
        lg__manifest_free(made);
        assert_ok(lg__manifest_decode(bytes.data, bytes.len, &m, err));
        assert_int_equal(m->world, WORLD);
        assert_int_equal(m->n_layouts, 4);
        assert_int_equal(m->n_tensors, 9);
        for (size_t i = 1; i < m->n_tensors; i++) {
            assert_true(strcmp(m->tensors[i - 1].name, m->tensors[i].name) < 0);
        }
        assert_string_equal(find(m, "head")->alias_of, "embed");
        assert_int_equal(find(m, "head")->stored, !once);
        assert_string_equal(find(m, "odder")->alias_of, "odd");
        assert_null(find(m, "embed")->alias_of);
        assert_int_equal(find(m, "odd")->n_pieces, 4);
        for (uint32_t i = 0; i < 4; i++) {
            assert_int_equal(find(m, "odd")->pieces[i].rank, i);
            assert_int_equal(find(m, "odd")->pieces[i].box.offset[0], i);
        }
        assert_int_equal(lg__layout_rank_at(m->layouts[find(m, "stage")->layout], 0), 1);
        assert_int_equal(json_object_size(m->state), 1 + WORLD);
        assert_int_equal(m->ranks[2].sums_bytes, 1002);
        assert_int_equal(m->ranks[2].report[0], 3);
        assert_int_equal(m->ranks[0].n_files[LG_GROUP_RAW], 0);
        assert_int_equal(m->ranks[2].n_files[LG_GROUP_RAW], 1);
        assert_true(m->ranks[2].file_bytes[LG_GROUP_RAW][0] > 4096);
        assert_string_equal(m->ranks[3].domain, "host-a");
        lg__manifest_free(m);
        lg__buf_free(&bytes);
    }
}

/* --------------------------------------------------------------- contradictions */

static void describe_rows(lg_save *save, uint32_t rank)
{
    (void)rank;
    add(save, "a", LG_F32, shape_86, rows);
    add(save, "b", LG_F32, shape_86, rows);
    add(save, "c", LG_F32, shape_86, columns);
}

static void describe_two_forms(lg_save *save, uint32_t rank)
{
    describe_rows(save, rank);
    add(save, "d", LG_BF16, shape_68, rows);
}

static void rank_2_lacks_one(lg_save *save, uint32_t rank)
{
    add(save, "a", LG_F32, shape_86, rows);
    if (rank != 2) {
        add(save, "b", LG_F32, shape_86, rows);
    }
}

static void rank_0_lacks_one(lg_save *save, uint32_t rank)
{
    add(save, "a", LG_F32, shape_86, rows);
    if (rank != 0) {
        add(save, "b", LG_F32, shape_86, rows);
    }
}

static void rank_0_lacks_a_layout(lg_save *save, uint32_t rank)
{
    add(save, "a", LG_F32, shape_86, rows);
    if (rank != 0) {
        add(save, "b", LG_F32, shape_86, columns);
    }
}

static void rank_1_lacks_all(lg_save *save, uint32_t rank)
{
    if (rank != 1) {
        add(save, "a", LG_F32, shape_86, rows);
        add(save, "b", LG_F32, shape_86, rows);
    }
}

static void ranks_1_and_2_lack_two(lg_save *save, uint32_t rank)
{
    add(save, "a", LG_F32, shape_86, rows);
    if (rank == 0 || rank == 3) {
        add(save, "b", LG_F32, shape_86, rows);
        add(save, "c", LG_F32, shape_86, rows);
    }
}

static void rank_3_has_another_dtype(lg_save *save, uint32_t rank)
{
    add(save, "a", LG_F32, shape_86, rows);
    add(save, "b", rank == 3 ? LG_BF16 : LG_F32, shape_86, rows);
}

static void rank_0_has_another_dtype(lg_save *save, uint32_t rank)
{
    add(save, "a", LG_F32, shape_86, rows);
    add(save, "b", rank == 0 ? LG_BF16 : LG_F32, shape_86, rows);
}

static void rank_2_has_another_shape(lg_save *save, uint32_t rank)
{
    add(save, "a", LG_F32, shape_86, rows);
    add(save, "b", LG_F32, rank == 2 ? shape_68 : shape_86, rows);
}

/* Experts, pipeline stages: the same name, another tensor. */
static void two_stages_with_one_name(lg_save *save, uint32_t rank)
{
    static const uint32_t size = 2;
    const lg_split split = {0, 0, 0, LG_SPLIT_CEIL};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &size, d.mesh_origin = rank / 2 * 2, d.n_splits = 1, d.splits = &split;
    lg_layout *stage = NULL;
    assert_ok(lg_layout_create(&d, &stage, err));
    add(save, "w", LG_F32, rank < 2 ? shape_86 : shape_68, stage);
    lg_layout_free(stage);
}

static void two_layouts_for_one_name(lg_save *save, uint32_t rank)
{
    static const uint32_t size = 2;
    const lg_split split = {0, 0, 0, LG_SPLIT_CEIL};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &size, d.mesh_origin = rank / 2 * 2, d.n_splits = 1, d.splits = &split;
    lg_layout *stage = NULL;
    assert_ok(lg_layout_create(&d, &stage, err));
    add(save, "w", LG_F32, shape_86, stage);
    lg_layout_free(stage);
}

/* Two that have nothing but the name in common. */
static void weights_and_moments_with_one_name(lg_save *save, uint32_t rank)
{
    static const uint32_t size = 2;
    const lg_split split = {0, 0, 0, LG_SPLIT_CEIL};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &size, d.mesh_origin = rank / 2 * 2, d.n_splits = 1, d.splits = &split;
    lg_layout *stage = NULL;
    assert_ok(lg_layout_create(&d, &stage, err));
    lg_tensor t = kit_tensor("w", rank < 2 ? LG_BF16 : LG_F32, 2, rank < 2 ? shape_86 : shape_68, some);
    t.group = rank < 2 ? LG_GROUP_MODEL : LG_GROUP_OPTIM;
    t.layout = stage;
    assert_ok(lg_save_tensor(save, &t, err));
    lg_layout_free(stage);
}

static void a_box_and_a_layout(lg_save *save, uint32_t rank)
{
    if (rank == 2) {
        add_box(save, "w", 0, 4);
    } else if (rank == 1) {
        static const uint32_t one = 1;
        lg_layout_desc d = LG_LAYOUT_DESC_INIT;
        d.mesh_ndim = 1, d.mesh_sizes = &one, d.mesh_origin = 1;
        lg_layout *alone = NULL;
        assert_ok(lg_layout_create(&d, &alone, err));
        add(save, "w", LG_F32, shape_44, alone);
        lg_layout_free(alone);
    }
}

static void the_same_box_twice(lg_save *save, uint32_t rank) { add_box(save, "odd", rank == 3 ? 1 : rank, 1); }
static void boxes_with_a_hole(lg_save *save, uint32_t rank)
{
    if (rank != 2) {
        add_box(save, "odd", rank, 1);
    }
}

static void state_differs(lg_save *save, uint32_t rank)
{
    describe_rows(save, rank);
    assert_ok(lg_save_global_u64(save, "same", 1, err));
    if (rank >= 1) {
        assert_ok(lg_save_global_f64(save, "lr", rank == 3 ? 0.5 : 0.25, err));
    }
}

static void rank_1_lacks_the_alias(lg_save *save, uint32_t rank)
{
    describe_rows(save, rank);
    if (rank != 1) {
        assert_ok(lg_save_alias(save, "tied", "a", err));
    }
}

static void rank_0_lacks_the_alias(lg_save *save, uint32_t rank)
{
    describe_rows(save, rank);
    if (rank != 0) {
        assert_ok(lg_save_alias(save, "tied", "a", err));
    }
}

static void rank_2_ties_to_another(lg_save *save, uint32_t rank)
{
    describe_rows(save, rank);
    assert_ok(lg_save_alias(save, "tied", rank == 2 ? "b" : "a", err));
}

static void rank_2_stores_the_alias_as_a_tensor(lg_save *save, uint32_t rank)
{
    describe_rows(save, rank);
    if (rank == 2) {
        add(save, "tied", LG_F32, shape_86, rows);
    } else {
        assert_ok(lg_save_alias(save, "tied", "a", err));
    }
}

static void irregular_ties_differ(lg_save *save, uint32_t rank)
{
    add_box(save, "odd", rank, 1);
    add_box(save, "even", rank, 1);
    assert_ok(lg_save_alias(save, "tied", rank == 3 ? "even" : "odd", err));
}

static void irregular_tie_is_missing(lg_save *save, uint32_t rank)
{
    add_box(save, "odd", rank, 1);
    if (rank != 1) {
        assert_ok(lg_save_alias(save, "tied", "odd", err));
    }
}

static void other_step(lg__report **reports) { reports[2]->step = 61; }
static void other_attempt(lg__report **reports) { reports[1]->attempt[0] = 'f', reports[1]->generation.serial = 16; }
static void other_run(lg__report **reports) { reports[0]->run_id[3] = 'f'; }
static void other_world(lg__report **reports) { reports[3]->world = 8; }
static void swapped(lg__report **reports)
{
    lg__report *r = reports[1];
    reports[1] = reports[2];
    reports[2] = r;
}
static void file_missing(lg__report **reports) { reports[1]->files[0].number = 1; }
static void too_many_tensors(lg__report **reports) { reports[0]->n_tensors--; }
static void alias_of_nothing(lg__report **reports)
{
    static lg__report_alias row = {"x", "nothing", false};
    reports[0]->aliases = &row;
    reports[0]->n_aliases = 1;
}
static void alias_not_stored(lg__report **reports)
{
    static lg__report_alias row = {"x", "a", true};
    reports[0]->aliases = &row;
    reports[0]->n_aliases = 1;
}
static void alias_of_another_form(lg__report **reports)
{
    static lg__report_alias row = {"d", "a", true};
    reports[0]->aliases = &row;
    reports[0]->n_aliases = 1;
}
static void alias_of_alias(lg__report **reports)
{
    static lg__report_alias row[] = {{"x", "a", false}, {"y", "x", false}};
    reports[0]->aliases = row;
    reports[0]->n_aliases = 2;
}
static void use_twice(lg__report **reports)
{
    memcpy(reports[1]->uses[1].id, reports[1]->uses[0].id, sizeof reports[1]->uses[0].id);
}
static void layout_of_another(lg__report **reports)
{
    lg__report *a = reports[0], *b = reports[1];
    b->layouts = lg__arena_array(b->arena, 1, sizeof(lg_layout *));
    b->layouts[0] = lg__layout_ref(a->layouts[0]);
    b->n_layouts = 1;
}

typedef struct contradiction {
    const char *name;
    describe_fn describe;
    spoil_fn spoil;
    uint32_t flags;
    int rank; /* err.rank, or -2 for any */
    lg_status status;
    const char *text;
} contradiction;

static const contradiction contradictions[] = {
    {"K04 F070: one shard of another step", describe_rows, other_step, 0, 2, LG_ERR_CONFLICT,
     "rank 2: its report is from another attempt: step 61 instead of 500"},
    {"another attempt", describe_rows, other_attempt, 0, 1, LG_ERR_CONFLICT,
     "rank 1: its report is from another attempt: generation 3.16 instead of 3.17, attempt f0112233445566aa instead of "
     "00112233445566aa"},
    {"another run", describe_rows, other_run, 0, 0, LG_ERR_CONFLICT, "run 012f456789abcdef0123456789abcdef instead of"},
    {"another world", describe_rows, other_world, 0, 3, LG_ERR_CONFLICT, "world size 8 instead of 4"},
    {"K05 F088: another rank's report", describe_rows, swapped, 0, 1, LG_ERR_CONFLICT,
     "rank 1: its report is from another attempt: rank 2 instead of 1"},
    {"files out of order", describe_rows, file_missing, 0, -2, LG_ERR_CONFLICT,
     "rank 1: its files of group model are not numbered in order"},
    {"a rank lacks a tensor", rank_2_lacks_one, NULL, 0, 2, LG_ERR_CONFLICT,
     "rank 2 saved 1 tensor under a layout of 4 ranks, rank 0 saved 2; rank 2 has no tensor \"b\""},
    {"the first rank lacks a tensor", rank_0_lacks_one, NULL, 0, 0, LG_ERR_CONFLICT,
     "rank 0 saved 1 tensor under a layout of 4 ranks, rank 1 saved 2"},
    {"the first rank lacks all of a layout", rank_0_lacks_a_layout, NULL, 0, 0, LG_ERR_CONFLICT,
     "ranks 1, 2 and 3 saved 1 tensor under a layout of which its first rank saved none; without them rank 0"},
    {"a rank has nothing", rank_1_lacks_all, NULL, 0, 1, LG_ERR_CONFLICT,
     "rank 1 saved 0 tensors under a layout of 4 ranks, rank 0 saved 2"},
    {"half of the ranks lack some", ranks_1_and_2_lack_two, NULL, 0, 1, LG_ERR_CONFLICT,
     "rank 1 saved 1 tensor under a layout of 4 ranks, rank 0 saved 3; apart from most are ranks 1 and 2"},
    {"another dtype", rank_3_has_another_dtype, NULL, 0, 3, LG_ERR_CONFLICT,
     "rank 3 saved 2 tensors under a layout of 4 ranks, as rank 0 did, but not the same ones; tensor \"b\" is model "
     "BF16 on rank 3, model F32 on rank 0"},
    {"another dtype on the first rank", rank_0_has_another_dtype, NULL, 0, 0, LG_ERR_CONFLICT,
     "tensor \"b\" is model F32 on rank 1, model BF16 on rank 0"},
    {"another shape", rank_2_has_another_shape, NULL, 0, 2, LG_ERR_CONFLICT,
     "rank 2 saved 2 tensors under a layout of 4 ranks, as rank 0 did, but not the same ones"},
    {"two tensors of one name", two_stages_with_one_name, NULL, 0, 2, LG_ERR_CONFLICT,
     "two different tensors are called \"w\", on ranks 0 and 2: shape [8, 6] and [6, 8], another layout"},
    {"weights and moments of one name", weights_and_moments_with_one_name, NULL, 0, 2, LG_ERR_CONFLICT,
     "two different tensors are called \"w\", on ranks 0 and 2: group model and optim, dtype BF16 and F32, shape [8, "
     "6] "
     "and [6, 8], another layout"},
    {"two layouts of one name", two_layouts_for_one_name, NULL, 0, 2, LG_ERR_CONFLICT,
     "two different tensors are called \"w\", on ranks 0 and 2: another layout"},
    {"a layout and a box", a_box_and_a_layout, NULL, 0, 2, LG_ERR_CONFLICT,
     "two different tensors are called \"w\", on ranks 1 and 2: another layout"},
    {"K08: two ranks claim one box", the_same_box_twice, NULL, 0, -2, LG_ERR_COVERAGE, "\"odd\""},
    {"K08 F133: a hole", boxes_with_a_hole, NULL, 0, -2, LG_ERR_COVERAGE, "\"odd\""},
    {"state differs", state_differs, NULL, 0, 3, LG_ERR_CONFLICT,
     "global state \"lr\" has two different values, on ranks 1 and 3"},
    {"an alias is missing", rank_1_lacks_the_alias, NULL, 0, 1, LG_ERR_CONFLICT, "rank 1 has no alias \"tied\""},
    {"an alias stored once is missing", rank_1_lacks_the_alias, NULL, LG_SAVE_ALIASES_ONCE, 1, LG_ERR_CONFLICT,
     "rank 1 has no alias \"tied\""},
    {"the first rank lacks an alias", rank_0_lacks_the_alias, NULL, LG_SAVE_ALIASES_ONCE, 0, LG_ERR_CONFLICT,
     "rank 0 saved 2 tensors under a layout of 4 ranks, as rank 1 did, but not the same ones"},
    {"another tie", rank_2_ties_to_another, NULL, 0, 2, LG_ERR_CONFLICT, "rank 2 saved 3 tensors under a layout"},
    {"an alias that is a tensor elsewhere", rank_2_stores_the_alias_as_a_tensor, NULL, 0, 2, LG_ERR_CONFLICT,
     "rank 2 saved 3 tensors under a layout"},
    {"an alias that is a tensor elsewhere, stored once", rank_2_stores_the_alias_as_a_tensor, NULL,
     LG_SAVE_ALIASES_ONCE, 2, LG_ERR_CONFLICT, "rank 2 saved 3 tensors under a layout"},
    {"irregular ties differ", irregular_ties_differ, NULL, LG_SAVE_ALIASES_ONCE, -2, LG_ERR_CONFLICT,
     "\"tied\" is an alias of \"odd\" on rank 2, but of \"even\" on rank 3"},
    {"an irregular alias is missing", irregular_tie_is_missing, NULL, 0, -2, LG_ERR_COVERAGE, "\"tied\""},
    {"alias of nothing", describe_rows, alias_of_nothing, 0, -2, LG_ERR_CONFLICT,
     "alias \"x\" on rank 0: there is no tensor \"nothing\""},
    {"alias without its bytes", describe_rows, alias_not_stored, 0, -2, LG_ERR_CONFLICT,
     "alias \"x\" on rank 0 is said to be stored, but no rank has it"},
    {"alias of a tensor of another form", describe_two_forms, alias_of_another_form, 0, 0, LG_ERR_CONFLICT,
     "rank 0: \"a\" and \"d\" differ: dtype F32 and BF16, shape [8, 6] and [6, 8]"},
    {"alias of an alias", describe_rows, alias_of_alias, 0, -2, LG_ERR_CONFLICT,
     "alias \"y\" on rank 0: \"x\" is an alias too"},
    {"a report that lists less than it counts", describe_rows, too_many_tensors, 0, -2, LG_ERR_CONFLICT,
     "rank 0: its report contradicts itself"},
    {"a layout used twice", describe_rows, use_twice, 0, -2, LG_ERR_CONFLICT,
     "rank 1 reports its use of a layout twice"},
    {"a layout of another rank", describe_rows, layout_of_another, 0, -2, LG_ERR_CONFLICT,
     "rank 1: it reports a layout whose first rank is 0"},
};

static void contradictions_are_found_and_the_culprit_is_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof contradictions / sizeof *contradictions; i++) {
        const contradiction *c = &contradictions[i];
        lg__report *reports[WORLD];
        make_reports(reports, c->flags, c->describe);
        lg__report *kept[WORLD];
        memcpy(kept, reports, sizeof kept);
        if (c->spoil != NULL) {
            c->spoil(reports);
        }
        lg_error err = LG_ERROR_INIT;
        lg__manifest *m = NULL;
        lg_status status = merge(reports, &m, &err);
        if (status != c->status || strstr(err.message, c->text) == NULL || (c->rank != -2 && err.rank != c->rank)) {
            fail_msg("%s: %s (rank %d): %s", c->name, lg_status_name(status), err.rank, err.message);
        }
        free_reports(kept);
    }
}

/* Only three ranks of four report what the coordinator of a layout says; the
 * sums are of 64 bits, so that a lost tensor cannot hide behind another. */
static void a_tensor_lost_and_another_gained_is_found(void **state)
{
    (void)state;
    lg__report *reports[WORLD];
    make_reports(reports, 0, describe_rows);
    for (uint32_t r = 0; r < WORLD; r++) {
        for (size_t i = 0; i < reports[r]->n_uses; i++) {
            reports[r]->uses[i].sum += r == 3; /* the same count */
        }
    }
    lg__manifest *m = NULL;
    assert_fails(LG_ERR_CONFLICT, "rank 3 saved 2 tensors under a layout of 4 ranks, as rank 0 did",
                 merge(reports, &m, err));
    free_reports(reports);
}

static void saying_what_contradicts_survives_each_failing_allocation(void **state)
{
    (void)state;
    lg__report *reports[WORLD];
    make_reports(reports, 0, rank_0_lacks_a_layout);
    lg_status status = LG_ERR_NOMEM;
    for (size_t n = 0; status == LG_ERR_NOMEM; n++) {
        lg_error err = LG_ERROR_INIT;
        lg__manifest *m = NULL;
        lg__mem_fail_after(n);
        status = merge(reports, &m, &err);
        lg__mem_fail_after(SIZE_MAX);
        assert_null(m);
        assert_true(n < 10000);
    }
    assert_int_equal(status, LG_ERR_CONFLICT);
    free_reports(reports);
}

static void merging_survives_each_failing_allocation(void **state)
{
    (void)state;
    lg__report *reports[WORLD];
    make_reports(reports, 0, describe_good);
    size_t n = 0;
    for (lg_status status = LG_ERR_NOMEM; status != LG_OK; n++) {
        assert_true(n < 10000);
        lg_error err = LG_ERROR_INIT;
        lg__manifest *m = NULL;
        lg__mem_fail_after(n);
        status = merge(reports, &m, &err);
        lg__mem_fail_after(SIZE_MAX);
        if (status != LG_OK && status != LG_ERR_NOMEM) {
            fail_msg("allocation %zu: %s: %s", n, lg_status_name(status), err.message);
        }
        lg__manifest_free(m);
    }
    assert_true(n > 10);
    free_reports(reports);
    /* and blame, when something is wrong */
    make_reports(reports, 0, rank_2_lacks_one);
    for (size_t k = 0, failed = 0; failed == 0; k++) {
        lg_error err = LG_ERROR_INIT;
        lg__manifest *m = NULL;
        lg__mem_fail_after(k);
        lg_status status = merge(reports, &m, &err);
        lg__mem_fail_after(SIZE_MAX);
        assert_true(status == LG_ERR_NOMEM || status == LG_ERR_CONFLICT);
        failed = status == LG_ERR_CONFLICT;
        assert_true(k < 10000);
    }
    free_reports(reports);
}

static void reporting_survives_each_failing_allocation(void **state)
{
    (void)state;
    lg_save *save = kit_save(1, WORLD, 0);
    describe_good(save, 1);
    size_t n = 0;
    for (lg_status status = LG_ERR_NOMEM; status != LG_OK; n++) {
        assert_true(n < 10000);
        lg_error err = LG_ERROR_INIT;
        lg__report *r = NULL;
        lg__mem_fail_after(n);
        status = make_report(save, &r, &err);
        lg__mem_fail_after(SIZE_MAX);
        if (status != LG_OK && status != LG_ERR_NOMEM) {
            fail_msg("allocation %zu: %s: %s", n, lg_status_name(status), err.message);
        }
        lg__report_free(r);
    }
    lg_save_abort(save);
}

/* Thousands of tensors and ranks: nothing quadratic, and a lost one is named. */
static void a_large_world_is_merged_and_a_lost_tensor_named(void **state)
{
    (void)state;
    enum { RANKS = 512, TENSORS = 400 };
    static const uint64_t shape[] = {4096, 8};
    lg_layout *wide = kit_rows(RANKS, 0);
    lg__report **reports = calloc(RANKS, sizeof *reports);
    lg__written *written = calloc(RANKS, sizeof *written);
    for (uint32_t r = 0; r < RANKS; r++) {
        lg_save *save = kit_save(r, RANKS, 0);
        for (int i = 0; i < TENSORS; i++) {
            char name[32];
            snprintf(name, sizeof name, "layers.%d.weight", i);
            if (r != 300 || i != 123) {
                add(save, name, LG_F32, shape, wide);
            }
        }
        assert_ok(make_report(save, &reports[r], err));
        lg_save_abort(save);
        written[r].sums_bytes = 100;
    }
    lg__manifest *m = NULL;
    assert_ok(new_manifest(&m, err));
    assert_fails(LG_ERR_CONFLICT,
                 "rank 300 saved 399 tensors under a layout of 512 ranks, rank 0 saved 400; rank 300 has no tensor "
                 "\"layers.123.weight\"",
                 lg__merge((const lg__report *const *)reports, RANKS, written, m, err));
    lg__manifest_free(m);
    for (uint32_t r = 0; r < RANKS; r++) {
        lg__report_free(reports[r]);
    }
    free(reports);
    free(written);
    lg_layout_free(wide);
}

/* Of many ranks a few are named. */
static void many_ranks_that_saved_what_their_first_did_not_are_counted(void **state)
{
    (void)state;
    static const uint64_t shape[] = {16, 8};
    lg_layout *wide = kit_rows(MAX_RANKS, 0);
    lg__report *reports[MAX_RANKS];
    lg__written written[MAX_RANKS] = {0};
    for (uint32_t r = 0; r < MAX_RANKS; r++) {
        lg_save *save = kit_save(r, MAX_RANKS, 0);
        if (r > 0) {
            add(save, "w", LG_F32, shape, wide);
        }
        assert_ok(make_report(save, &reports[r], err));
        lg_save_abort(save);
        written[r].sums_bytes = 100;
    }
    lg__manifest *m = NULL;
    assert_ok(new_manifest(&m, err));
    assert_fails(LG_ERR_CONFLICT,
                 "ranks 1, 2, 3, 4, 5, 6, 7, 8, … (15 in all) saved 1 tensor under a layout of which its first rank "
                 "saved none; without them rank 0",
                 lg__merge((const lg__report *const *)reports, MAX_RANKS, written, m, err));
    lg__manifest_free(m);
    for (uint32_t r = 0; r < MAX_RANKS; r++) {
        lg__report_free(reports[r]);
    }
    lg_layout_free(wide);
}

static int set_up(void **state)
{
    (void)state;
    rows = kit_rows(WORLD, 0);
    columns = kit_rows(WORLD, 1);
    replicated = kit_replicated(WORLD, 0);
    const uint32_t two = 2;
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &two, d.mesh_origin = 1;
    assert_ok(lg_layout_create(&d, &middle, err));
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    lg_layout_free(rows);
    lg_layout_free(columns);
    lg_layout_free(replicated);
    lg_layout_free(middle);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(agreeing_reports_make_a_manifest),
        {"K04 F070, K05 F088, K08 F133: contradictions are found and the culprit is named",
         contradictions_are_found_and_the_culprit_is_named, NULL, NULL, NULL},
        cmocka_unit_test(a_tensor_lost_and_another_gained_is_found),
        cmocka_unit_test(saying_what_contradicts_survives_each_failing_allocation),
        cmocka_unit_test(merging_survives_each_failing_allocation),
        cmocka_unit_test(reporting_survives_each_failing_allocation),
        cmocka_unit_test(a_large_world_is_merged_and_a_lost_tensor_named),
        cmocka_unit_test(many_ranks_that_saved_what_their_first_did_not_are_counted),
    };
    return cmocka_run_group_tests_name("merge", tests, set_up, tear_down);
}
