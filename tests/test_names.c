/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/error.h"
#include "base/json.h"
#include "format/names.h"

#include <inttypes.h>
#include <string.h>

static void names_are_made_as_the_format_says(void **state)
{
    (void)state;
    char out[LG__NAME_MAX];
    lg__step_folder(500, (lg_generation){3, 17}, out);
    assert_string_equal(out, "step-000000000500.g3.17");
    lg__step_folder(UINT64_MAX, (lg_generation){UINT64_MAX, UINT64_MAX}, out);
    assert_string_equal(out, "step-18446744073709551615.g18446744073709551615.18446744073709551615");
    lg__partial_folder(1000, (lg_generation){3, 18}, "0123456789abcdef", out);
    assert_string_equal(out, ".step-000000001000.g3.18.0123456789abcdef.partial");
    lg__owner_file(3, out);
    assert_string_equal(out, ".owner-3");
    lg__rollback_file((lg_generation){4, 1}, out);
    assert_string_equal(out, "rollback-4.1.json");
    lg__trash_name(5, "00000000000000ff", ".step-000000001000.g3.18.0123456789abcdef.partial", out);
    assert_string_equal(out, ".trash-5.00000000000000ff-step-000000001000.g3.18.0123456789abcdef.partial");
    lg__trash_name(5, "00000000000000ff", "step-000000000500.g3.17", out);
    assert_string_equal(out, ".trash-5.00000000000000ff-step-000000000500.g3.17");
    lg__shard_file(0, LG_GROUP_MODEL, 0, 1, out);
    assert_string_equal(out, "shard-00001-model-00001-of-00001.safetensors");
    lg__shard_file(4095, LG_GROUP_OPTIM, 1, 3, out);
    assert_string_equal(out, "shard-04096-optim-00002-of-00003.safetensors");
    lg__shard_file(123455, LG_GROUP_RAW, 0, 1, out);
    assert_string_equal(out, "shard-123456-raw-00001-of-00001.state");
    lg__shard_file(UINT32_MAX, LG_GROUP_RAW, UINT32_MAX, UINT32_MAX, out);
    assert_string_equal(out, "shard-4294967296-raw-4294967296-of-4294967295.state");
    lg__sums_file(1, out);
    assert_string_equal(out, "rank-00002.sums");
    lg__side_file("pin", 1, out);
    assert_string_equal(out, "lastgood-pin-1.json");
}

static void names_of_each_kind_are_read_back(void **state)
{
    (void)state;
    static const uint64_t numbers[] = {0, 1, 9, 10, 999999999999, 1000000000000, UINT64_MAX - 1, UINT64_MAX};
    enum { N = sizeof numbers / sizeof numbers[0] };
    char name[LG__NAME_MAX];
    for (size_t i = 0; i < N * N * N; i++) {
        uint64_t step = numbers[i % N];
        lg_generation g = {numbers[i / N % N], numbers[i / N / N]};
        lg__step_folder(step, g, name);
        lg__root_name r = lg__root_name_parse(name);
        assert_int_equal(r.kind, LG__ROOT_STEP);
        assert_true(r.step == step && r.generation.epoch == g.epoch && r.generation.serial == g.serial);
        lg__partial_folder(step, g, "fedcba9876543210", name);
        r = lg__root_name_parse(name);
        assert_int_equal(r.kind, LG__ROOT_PARTIAL);
        assert_true(r.step == step && r.generation.epoch == g.epoch && r.generation.serial == g.serial);
        assert_string_equal(r.attempt, "fedcba9876543210");
        lg__owner_file(g.epoch, name);
        r = lg__root_name_parse(name);
        assert_int_equal(r.kind, LG__ROOT_OWNER);
        assert_true(r.generation.epoch == g.epoch);
        lg__rollback_file(g, name);
        r = lg__root_name_parse(name);
        assert_int_equal(r.kind, LG__ROOT_ROLLBACK);
        assert_true(r.generation.epoch == g.epoch && r.generation.serial == g.serial);
        lg__trash_name(g.epoch, "0000000000000000", "anything at all", name);
        r = lg__root_name_parse(name);
        assert_int_equal(r.kind, LG__ROOT_TRASH);
        assert_true(r.generation.epoch == g.epoch && r.generation.serial == 0);
    }
}

static void names_that_others_use_are_foreign(void **state)
{
    (void)state;
    static const char *const foreign[] = {
        "",
        ".",
        "..",
        "latest",
        "last.ckpt",
        "checkpoint-5",
        "checkpoint-10",
        "checkpoint-123",
        "checkpoint_3",
        "checkpoint_old",
        "iter-960000",
        "iter-1080000",
        "iter_0001080000",
        "100000",
        "0900000",
        "handpicked",
        "global_step500",
        "step-500",
        "step_500",
        "lastgood.json",
        "model.safetensors",
    };
    for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++) {
        if (lg__root_name_parse(foreign[i]).kind != LG__ROOT_FOREIGN) {
            fail_msg("taken for ours: %s", foreign[i]);
        }
    }
}

static void a_name_counts_only_if_made_anew_it_is_the_same(void **state)
{
    (void)state;
    static const char *const foreign[] = {
        "step-5.g1.1",
        "step-00000000005.g1.1",
        "step-0000000000005.g1.1",
        "step-+00000000005.g1.1",
        "step- 00000000005.g1.1",
        "step--00000000005.g1.1",
        "step-0x0000000005.g1.1",
        "step-000000000005.g01.1",
        "step-000000000005.g1.01",
        "step-000000000005.g+1.1",
        "step-000000000005.g1.+1",
        "step-000000000005.g1.1 ",
        " step-000000000005.g1.1",
        "step-000000000005.g1.1/",
        "step-000000000005.g1.1\n",
        "step-000000000005.g1.1.tmp",
        "step-000000000005.g1.1.partial",
        "step-000000000005.g1",
        "step-000000000005.g1.",
        "step-000000000005.g.1",
        "step-000000000005.1.1",
        "step-000000000005.G1.1",
        "Step-000000000005.g1.1",
        "step-18446744073709551616.g1.1",
        "step-000000000005.g18446744073709551616.1",
        "step-000000000005.g1.18446744073709551616",
        "step-99999999999999999999999999.g1.1",
        ".step-000000000005.g1.1",
        ".step-000000000005.g1.1.partial",
        ".step-000000000005.g1.1.0123456789abcde.partial",
        ".step-000000000005.g1.1.0123456789abcdef0.partial",
        ".step-000000000005.g1.1.0123456789ABCDEF.partial",
        ".step-000000000005.g1.1.0123456789abcdeg.partial",
        ".step-000000000005.g1.1.0123456789abcdef.partial2",
        ".step-000000000005.g1.1.0123456789abcdef",
        ".step-5.g1.1.0123456789abcdef.partial",
        "step-000000000005.g1.1.0123456789abcdef.partial",
        "..step-000000000005.g1.1.0123456789abcdef.partial",
        "owner-3",
        ".owner-",
        ".owner-03",
        ".owner-+3",
        ".owner-3 ",
        ".owner-3.tmp",
        ".owner--3",
        ".owner-18446744073709551616",
        "rollback-4.json",
        "rollback-4.1",
        "rollback-4.1.json.tmp",
        "rollback-04.1.json",
        "rollback-4.1.2.json",
        ".rollback-4.1.json",
        ".trash-5",
        ".trash-5.00000000000000ff",
        ".trash-5.00000000000000ff-",
        ".trash-5.00000000000000ff-.hidden",
        ".trash-05.00000000000000ff-x",
        ".trash-5.00000000000000FF-x",
        ".trash-5.ff-x",
        ".trash-5.00000000000000ff-a/b",
        "trash-5.00000000000000ff-x",
    };
    for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++) {
        if (lg__root_name_parse(foreign[i]).kind != LG__ROOT_FOREIGN) {
            fail_msg("taken for ours: %s", foreign[i]);
        }
    }
}

static void what_is_thrown_away_is_trash_whatever_its_name(void **state)
{
    (void)state;
    static const char *const names[] = {"x", ".x", "..x", "...", "....x", "a..b", "x.", "my copy@home", "\xff"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char trash[LG__NAME_MAX];
        lg__trash_name(3, "0123456789abcdef", names[i], trash);
        lg__root_name r = lg__root_name_parse(trash);
        if (r.kind != LG__ROOT_TRASH || r.generation.epoch != 3) {
            fail_msg("%s became %s, which is not found again", names[i], trash);
        }
    }
    /* Long ones, of any bytes: cut, never to nothing. */
    static const char *const long_of[] = {"\xa6", "\xff", "\xc3", "\xc3\xa4", "\xf0\x9f\x98\x80", "\xe2\x82", "x"};
    for (size_t i = 0; i < sizeof long_of / sizeof long_of[0]; i++) {
        char name[LG__NAME_MAX] = "", trash[LG__NAME_MAX];
        while (strlen(name) + strlen(long_of[i]) < LG__NAME_MAX) {
            strcat(name, long_of[i]);
        }
        for (size_t from = 0; from < 4; from++) {
            lg__trash_name(3, "0123456789abcdef", name + from, trash);
            assert_int_equal(lg__root_name_parse(trash).kind, LG__ROOT_TRASH);
            assert_true(strlen(trash) >= LG__NAME_MAX - 5);
        }
    }
}

static void trash_names_fit_a_file_system_and_are_cut_at_characters(void **state)
{
    (void)state;
    char longest[400], out[LG__NAME_MAX];
    for (size_t pad = 0; pad < 5; pad++) {
        memset(longest, 'x', sizeof longest);
        for (size_t i = pad; i + 3 < sizeof longest; i += 3) {
            memcpy(longest + i, "€", 3);
        }
        longest[sizeof longest - 1] = '\0';
        lg__trash_name(UINT64_MAX, "0123456789abcdef", longest, out);
        assert_in_range(strlen(out), 253, 255);
        assert_true(lg__utf8_valid(out, strlen(out)));
        assert_int_equal(lg__root_name_parse(out).kind, LG__ROOT_TRASH);
    }
    memset(longest, 'x', 255);
    longest[255] = '\0';
    lg__trash_name(1, "0123456789abcdef", longest, out);
    assert_int_equal(strlen(out), 255);
    assert_int_equal(lg__root_name_parse(out).kind, LG__ROOT_TRASH);
}

static void side_records_are_told_from_other_files(void **state)
{
    (void)state;
    char kind[32] = "untouched";
    uint32_t n = 77;
    assert_true(lg__side_name_parse("lastgood-pin-1.json", kind, &n));
    assert_string_equal(kind, "pin");
    assert_int_equal(n, 1);
    assert_true(lg__side_name_parse("lastgood-abcdefghijklmnopqrstuvwxyzabcde-4294967295.json", kind, &n));
    assert_true(n == UINT32_MAX);
    assert_int_equal(strlen(kind), 31);
    static const char *const others[] = {
        "lastgood.json",
        "lastgood-pin.json",
        "lastgood-pin-.json",
        "lastgood-pin-01.json",
        "lastgood-pin-+1.json",
        "lastgood-pin-4294967296.json",
        "lastgood--1.json",
        "lastgood-Pin-1.json",
        "lastgood-pin-1.json.tmp",
        "lastgood-pin-1.jso",
        "lastgood-p1n-1.json",
        "lastgood-pin-1-2.json",
        "lastgood-a-b-1.json",
        "xlastgood-pin-1.json",
        "lastgood-pin--1.json",
        "lastgood-pin-1 .json",
        "lastgood-",
        "",
        "lastgood-abcdefghijklmnopqrstuvwxyzabcdef-1.json",
    };
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        if (lg__side_name_parse(others[i], kind, &n)) {
            fail_msg("taken for a side record: %s", others[i]);
        }
    }
    assert_true(n == UINT32_MAX); /* untouched by failures */
}

static void attached_files_may_not_take_names_of_the_format(void **state)
{
    (void)state;
    static const char *const good[] = {"config.json",        "tokenizer.json", "README.md", "spiece.model",
                                       "merges.txt",         "préfixe.json",   "a",         "model.bin",
                                       "trainer state.json", "shards.txt",     "failed.txt"};
    static const char *const bad[] = {
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "/etc/passwd",
        "a\nb",
        "a\x7f",
        "a\xff",
        "__metadata__",
        "lastgood.json",
        "LASTGOOD.JSON",
        "lastgood-pin-1.json",
        "lastgood-anything",
        "failed",
        "Failed",
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00001-raw-00001-of-00001.state",
        "rank-00001.sums",
        "RANK-00001.SUMS",
        "model.safetensors",
        "x.SafeTensors",
        "model.safetensors.index.json",
        "x.tmp",
        "x.partial",
        "x.lgenc",
    };
    lg_error err = LG_ERROR_INIT;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        if (lg__attach_name_check(good[i], &err) != LG_OK) {
            fail_msg("refused: %s: %s", good[i], err.message);
        }
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (lg__attach_name_check(bad[i], &err) != LG_ERR_INVALID) {
            fail_msg("accepted: %s", bad[i]);
        }
        assert_true(strlen(err.message) > 0);
    }
    char longest[257];
    memset(longest, 'a', sizeof longest);
    longest[255] = '\0';
    assert_int_equal(lg__attach_name_check(longest, &err), LG_OK);
    longest[255] = 'a';
    longest[256] = '\0';
    assert_int_equal(lg__attach_name_check(longest, &err), LG_ERR_INVALID);
}

int main(void)
{
#define TEST(f) cmocka_unit_test(f)
    const struct CMUnitTest tests[] = {
        TEST(names_are_made_as_the_format_says),
        TEST(names_of_each_kind_are_read_back),
        {"K02: names that other tools use are foreign", names_that_others_use_are_foreign, NULL, NULL, NULL},
        {"K02: a name counts only if made anew it is the same", a_name_counts_only_if_made_anew_it_is_the_same, NULL,
         NULL, NULL},
        TEST(what_is_thrown_away_is_trash_whatever_its_name),
        TEST(trash_names_fit_a_file_system_and_are_cut_at_characters),
        TEST(side_records_are_told_from_other_files),
        TEST(attached_files_may_not_take_names_of_the_format),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
