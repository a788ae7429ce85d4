/* SPDX-License-Identifier: Apache-2.0 */

/* The simple level, and every way to say where a checkpoint is. */

#include <lastgood/backend.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char folder[256];

static int enter(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/lastgood-simple-XXXXXX");
    return mkdtemp(folder) != NULL && chdir(folder) == 0 ? 0 : -1;
}

static int leave(void **state)
{
    (void)state;
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return chdir("/") == 0 && system(command) == 0 ? 0 : -1;
}

#define OK(expr)                                    \
    do {                                            \
        if ((expr) != LG_OK) {                      \
            fail_msg("%s: %s", #expr, err.message); \
        }                                           \
    } while (0)

static const uint64_t shape[2] = {2, 3};

static void write_step(const char *root, uint64_t step)
{
    float w[2][3];
    for (int i = 0; i < 6; i++) {
        w[i / 3][i % 3] = (float)step + (float)i;
    }
    lg_tensor t = LG_TENSOR_INIT;
    t.name = "w", t.ndim = 2, t.shape = shape, t.data = w;
    lg_error err = LG_ERROR_INIT;
    OK(lg_write(root, step, &t, 1, &err));
}

static void expect(const char *where, uint64_t step)
{
    float row[3] = {0};
    uint64_t offset[2] = {1, 0}, extent[2] = {1, 3}, got = 0;
    lg_target t = LG_TARGET_INIT;
    t.name = "w", t.ndim = 2, t.shape = shape, t.offset = offset, t.extent = extent, t.data = row;
    lg_error err = LG_ERROR_INIT;
    OK(lg_read(where, &t, 1, &got, &err));
    assert_int_equal(got, step);
    for (int i = 0; i < 3; i++) {
        assert_true(row[i] == (float)step + 3 + (float)i);
    }
}

static void every_way_to_name_a_checkpoint_works(void **state)
{
    (void)state;
    write_step("runs", 10);
    write_step("runs", 20);
    expect("runs", 20);
    expect("runs/", 20);
    expect("./runs", 20);
    expect("file:runs", 20);
    expect("runs@10", 10);
    expect("runs@g1.1", 10);
    expect("runs/@20", 20);
    expect("runs/step-000000000010.g1.1", 10);
    expect("runs/step-000000000010.g1.1/", 10);
    char where[600];
    snprintf(where, sizeof where, "%s/runs@10", folder);
    expect(where, 10);
    snprintf(where, sizeof where, "file://%s/runs", folder);
    expect(where, 20);
    assert_int_equal(chdir("runs"), 0);
    expect(".", 20);
    expect(".@10", 10);
    expect("step-000000000020.g2.1", 20);
    assert_int_equal(chdir(".."), 0);
    /* a step folder may be moved and renamed */
    assert_int_equal(rename("runs/step-000000000010.g1.1", "my copy@home"), 0);
    expect("my copy@home", 10);
    expect("runs", 20);
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg_rollback("my copy@home", "", NULL, &err), LG_ERR_INVALID); /* whose? */
    assert_non_null(strstr(err.message, "a name that no root looks at"));
    write_step("a@7", 70); /* a folder whose name looks like a selection */
    expect("a@7", 70);
    expect("a@7@70", 70);
    write_step("a[1]b", 1);
    expect("a[1]b", 1);
    write_step("a:b", 2);
    expect("a:b", 2);
    write_step("mem:here", 5);
    expect("mem:here", 5);
    expect("mem:here@5", 5);
    lg_memory_store_drop("here");
}

static void what_is_not_there_is_said_in_a_sentence(void **state)
{
    (void)state;
    static const struct {
        const char *where;
        lg_status status;
        const char *says;
    } cases[] = {
        {"", LG_ERR_INVALID, "no root"},          {"nowhere", LG_ERR_NOT_FOUND, "nowhere"},
        {"runs@99", LG_ERR_NOT_FOUND, "step 99"}, {"runs@g9.9", LG_ERR_NOT_FOUND, "generation 9.9"},
        {"empty", LG_ERR_EMPTY, "no checkpoint"}, {"file.txt", LG_ERR_FORMAT, "file.txt"},
    };
    write_step("runs", 20);
    assert_int_equal(system("mkdir empty; touch file.txt"), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float x[6];
        lg_target t = LG_TARGET_INIT;
        t.name = "w", t.ndim = 2, t.shape = shape, t.data = x;
        lg_error err = LG_ERROR_INIT;
        lg_status st = lg_read(cases[i].where, &t, 1, NULL, &err);
        print_message("#   %s: %s\n", cases[i].where, err.message);
        assert_int_equal(st, cases[i].status);
        assert_non_null(strstr(err.message, cases[i].says));
    }
}

static void k19_k22_what_a_person_must_look_at_is_never_passed_over(void **state)
{
    (void)state;
    write_step("runs", 1);
    write_step("runs", 2);
    lg_error err = LG_ERROR_INIT;
    /* the newest is of another kind than a folder we may read */
    assert_int_equal(system("mv runs/step-000000000002.g2.1/lastgood.json keep && "
                            "cp keep runs/step-000000000002.g2.1/lastgood.json"),
                     0);
    expect("runs", 2);
    if (geteuid() != 0) {
        assert_int_equal(system("chmod 000 runs/step-000000000002.g2.1/lastgood.json"), 0);
        float x[6];
        lg_target t = LG_TARGET_INIT;
        t.name = "w", t.ndim = 2, t.shape = shape, t.data = x;
        assert_int_equal(lg_read("runs", &t, 1, NULL, &err), LG_ERR_PERMISSION);
        expect("runs@1", 1);
    }
    float x[6];
    lg_target t = LG_TARGET_INIT;
    uint32_t one = 1;
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &one;
    lg_layout *layout;
    OK(lg_layout_create(&d, &layout, &err));
    t.name = "w", t.ndim = 2, t.shape = shape, t.data = x, t.layout = layout;
    assert_int_equal(lg_read("runs", &t, 1, NULL, &err), LG_ERR_INVALID); /* whose part? */
    assert_non_null(strstr(err.message, "\"w\": a target with a layout must say whose part it is"));
    t.rank = 0;
    OK(lg_read("runs", &t, 1, NULL, &err));
    lg_layout_free(layout);
}

static void k22_missing_tensors_other_dtypes_and_other_shapes_are_told_apart(void **state)
{
    (void)state;
    write_step("runs", 1);
    float x[6];
    static const uint64_t other[2] = {3, 2};
    lg_error err = LG_ERROR_INIT;
    lg_target t = LG_TARGET_INIT;
    t.name = "v", t.ndim = 2, t.shape = shape, t.data = x;
    assert_int_equal(lg_read("runs", &t, 1, NULL, &err), LG_ERR_MISSING);
    assert_non_null(strstr(err.message, "\"v\""));
    t.name = "w", t.dtype = LG_I32;
    assert_int_equal(lg_read("runs", &t, 1, NULL, &err), LG_ERR_MISMATCH);
    assert_non_null(strstr(err.message, "I32"));
    assert_non_null(strstr(err.message, "F32"));
    t.dtype = LG_F32, t.shape = other;
    assert_int_equal(lg_read("runs", &t, 1, NULL, &err), LG_ERR_MISMATCH);
    t.shape = shape, t.ndim = 1;
    assert_int_equal(lg_read("runs", &t, 1, NULL, &err), LG_ERR_MISMATCH);
}

static void k11_k12_k13_bad_tensors_are_refused_before_anything_is_written(void **state)
{
    (void)state;
    static const uint64_t big[2] = {UINT64_C(1) << 63, 2}, four[1] = {4}, two[1] = {2};
    static const float x[8] = {0};
    static const struct {
        const char *what, *name;
        lg_dtype dtype;
        uint32_t ndim;
        const uint64_t *shape, *local;
        const void *data;
        lg_group group;
    } cases[] = {
        {"reserved name", "__metadata__", LG_F32, 1, four, NULL, x, LG_GROUP_MODEL},
        {"NUL-free control byte", "a\x01b", LG_F32, 1, four, NULL, x, LG_GROUP_MODEL},
        {"empty name", "", LG_F32, 1, four, NULL, x, LG_GROUP_MODEL},
        {"not UTF-8", "a\xff", LG_F32, 1, four, NULL, x, LG_GROUP_MODEL},
        {"no name", NULL, LG_F32, 1, four, NULL, x, LG_GROUP_MODEL},
        {"no dtype", "a", (lg_dtype)99, 1, four, NULL, x, LG_GROUP_MODEL},
        {"overflow", "a", LG_F32, 2, big, NULL, x, LG_GROUP_MODEL},
        {"no shape", "a", LG_F32, 1, NULL, NULL, x, LG_GROUP_MODEL},
        {"no data", "a", LG_F32, 1, four, NULL, NULL, LG_GROUP_MODEL},
        {"too many dimensions", "a", LG_F32, 33, four, NULL, x, LG_GROUP_MODEL},
        {"local shape differs", "a", LG_F32, 1, four, two, x, LG_GROUP_MODEL},
        {"group", "a", LG_F32, 1, four, NULL, x, LG_GROUP_RAW},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lg_tensor t = LG_TENSOR_INIT;
        t.name = cases[i].name, t.dtype = cases[i].dtype, t.ndim = cases[i].ndim, t.shape = cases[i].shape;
        t.local_shape = cases[i].local, t.data = cases[i].data, t.group = cases[i].group;
        lg_error err = LG_ERROR_INIT;
        lg_status st = lg_write("bad", 1, &t, 1, &err);
        print_message("#   %s: %s\n", cases[i].what, err.message);
        assert_true(st == LG_ERR_INVALID || st == LG_ERR_LIMIT);
        lg_listing *l;
        assert_int_equal(lg_list("bad", 0, &l, &err), LG_OK);
        assert_int_equal(l->n, 0);
        lg_listing_free(l);
    }
    lg_tensor twice[2] = {LG_TENSOR_INIT, LG_TENSOR_INIT};
    for (int i = 0; i < 2; i++) {
        twice[i].name = "same", twice[i].ndim = 1, twice[i].shape = four, twice[i].data = x;
    }
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg_write("bad", 1, twice, 2, &err), LG_ERR_INVALID);
    assert_non_null(strstr(err.message, "\"same\""));
}

/* Names of tensors that would be paths, or too long for one. */
static void k19_f310_names_of_tensors_name_no_files(void **state)
{
    (void)state;
    static char longest[LG_MAX_NAME + 1];
    memset(longest, 'n', LG_MAX_NAME);
    const char *const names[] = {"a/b", "..",  "../../a",           "/a",   ".", "a\\b", "C:\\x",
                                 "con", "a b", "\xc3\xa4/\xc3\xb6", longest};
    enum { N = sizeof names / sizeof *names };
    lg_tensor t[N];
    uint8_t x[N];
    static const uint64_t one[1] = {1};
    for (size_t i = 0; i < N; i++) {
        x[i] = (uint8_t)(i + 1);
        t[i] = (lg_tensor)LG_TENSOR_INIT;
        t[i].name = names[i], t[i].dtype = LG_U8, t[i].ndim = 1, t[i].shape = one, t[i].data = &x[i];
    }
    lg_error err = LG_ERROR_INIT;
    OK(lg_write("runs", 1, t, N, &err));
    /* One rank with tensors of one group makes these files, whatever the names are, and no others. */
    assert_int_equal(system("test \"$(find . -type f ! -name '.owner-*' | LC_ALL=C sort | tr '\\n' ' ')\" = "
                            "\"./runs/step-000000000001.g1.1/lastgood.json "
                            "./runs/step-000000000001.g1.1/rank-00001.sums "
                            "./runs/step-000000000001.g1.1/shard-00001-model-00001-of-00001.safetensors \""),
                     0);
    for (size_t i = 0; i < N; i++) {
        uint8_t got = 0;
        lg_target target = LG_TARGET_INIT;
        target.name = names[i], target.dtype = LG_U8, target.ndim = 1, target.shape = one, target.data = &got;
        OK(lg_read("runs", &target, 1, NULL, &err));
        assert_int_equal(got, i + 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_way_to_name_a_checkpoint_works, enter, leave),
        cmocka_unit_test_setup_teardown(what_is_not_there_is_said_in_a_sentence, enter, leave),
        cmocka_unit_test_setup_teardown(k19_k22_what_a_person_must_look_at_is_never_passed_over, enter, leave),
        cmocka_unit_test_setup_teardown(k22_missing_tensors_other_dtypes_and_other_shapes_are_told_apart, enter, leave),
        cmocka_unit_test_setup_teardown(k19_f310_names_of_tensors_name_no_files, enter, leave),
        cmocka_unit_test_setup_teardown(k11_k12_k13_bad_tensors_are_refused_before_anything_is_written, enter, leave),
    };
    return cmocka_run_group_tests_name("simple", tests, NULL, NULL);
}
