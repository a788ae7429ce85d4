/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/error.h"
#include "base/json.h"
#include "base/mem.h"
#include "format/tagged.h"
#include "vectors.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static json_t *parse(const char *text)
{
    lg_error err = LG_ERROR_INIT;
    json_t *v = NULL;
    if (lg__json_parse(text, strlen(text), &v, &err) != LG_OK) {
        fail_msg("%s: %s", text, err.message);
    }
    return v;
}

/* Writes a value as text and reads it again. Takes the reference. */
static json_t *through_text(json_t *v)
{
    lg_error err = LG_ERROR_INIT;
    lg__buf b;
    assert_non_null(v);
    lg__buf_init(&b, SIZE_MAX / 2);
    assert_int_equal(lg__buf_json(&b, v, false, &err), LG_OK);
    json_decref(v);
    v = parse(b.data);
    lg__buf_free(&b);
    if (lg__tagged_check(v, &err) != LG_OK) {
        fail_msg("what we write is refused: %s", err.message);
    }
    return v;
}

static uint64_t bits_of(double d)
{
    uint64_t bits;
    memcpy(&bits, &d, sizeof bits);
    return bits;
}

static double double_of(uint64_t bits)
{
    double d;
    memcpy(&d, &bits, sizeof d);
    return d;
}

/* -------------------------------------------------------------------- numbers */

static void check_double(uint64_t bits, const char *want)
{
    lg_error err = LG_ERROR_INIT;
    double out = 0;
    json_t *v = lg__tagged_f64(double_of(bits));
    assert_non_null(v);
    if (want != NULL) {
        lg__buf b;
        lg__buf_init(&b, 1000);
        assert_int_equal(lg__buf_json(&b, v, false, &err), LG_OK);
        assert_string_equal(b.data, want);
        lg__buf_free(&b);
    }
    v = through_text(v);
    assert_int_equal(lg__tagged_get_f64(v, &out, &err), LG_OK);
    if (bits_of(out) != bits) {
        fail_msg("bits %016llx came back as %016llx", (unsigned long long)bits, (unsigned long long)bits_of(out));
    }
    json_decref(v);
}

static void doubles_keep_every_bit(void **state)
{
    (void)state;
    static const struct {
        uint64_t bits;
        const char *text;
    } cases[] = {
        {0, "0.0"},
        {UINT64_C(0x8000000000000000), "{\"$float\":\"-0.0\"}"},
        {UINT64_C(0x7ff0000000000000), "{\"$float\":\"inf\"}"},
        {UINT64_C(0xfff0000000000000), "{\"$float\":\"-inf\"}"},
        {UINT64_C(0x7ff8000000000000), "{\"$float\":\"nan\"}"},
        {UINT64_C(0xfff8000000000000), "{\"$float\":\"0xfff8000000000000\"}"},
        {UINT64_C(0x7ff8000000000001), "{\"$float\":\"0x7ff8000000000001\"}"},
        {UINT64_C(0x7ff0000000000001), "{\"$float\":\"0x7ff0000000000001\"}"},
        {UINT64_C(0xffffffffffffffff), "{\"$float\":\"0xffffffffffffffff\"}"},
        {UINT64_C(0x3ff0000000000000), "1.0"},
        {1, NULL},                            /* smallest subnormal */
        {UINT64_C(0x000fffffffffffff), NULL}, /* largest subnormal */
        {UINT64_C(0x0010000000000000), NULL}, /* smallest normal */
        {UINT64_C(0x7fefffffffffffff), NULL}, /* largest */
        {UINT64_C(0xffefffffffffffff), NULL},
        {UINT64_C(0x4340000000000000), NULL}, /* 2^53 */
        {UINT64_C(0x4340000000000001), NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check_double(cases[i].bits, cases[i].text);
    }
    check_double(bits_of(1e308), NULL);
    check_double(bits_of(-1e308), NULL);
    check_double(bits_of(0.1), NULL);
    check_double(bits_of(1e22), NULL);
    uint64_t random = 42;
    for (int i = 0; i < 20000; i++) {
        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        check_double(random ^ random >> 29, NULL);
    }
}

static void integers_keep_all_64_bits(void **state)
{
    (void)state;
    static const int64_t edge = INT64_C(1) << 53;
    const int64_t values[] = {
        0,        1,          -1,        edge - 1,      edge,      edge + 1,      -edge,           -edge - 1,
        edge * 2, 1234567890, INT64_MAX, INT64_MAX - 1, INT64_MIN, INT64_MIN + 1, INT64_C(1) << 62};
    lg_error err = LG_ERROR_INIT;
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        int64_t back = 7;
        uint64_t unsigned_back = 7;
        json_t *v = through_text(lg__tagged_i64(values[i]));
        assert_int_equal(json_is_integer(v), values[i] <= edge && values[i] >= -edge);
        assert_int_equal(lg__tagged_get_i64(v, &back, &err), LG_OK);
        assert_true(back == values[i]);
        assert_int_equal(lg__tagged_get_u64(v, &unsigned_back, &err), values[i] < 0 ? LG_ERR_MISMATCH : LG_OK);
        assert_true(unsigned_back == (values[i] < 0 ? 7 : (uint64_t)values[i]));
        json_decref(v);
    }
    const uint64_t large[] = {0, (uint64_t)edge, (uint64_t)edge + 1, UINT64_MAX, UINT64_MAX - 1, UINT64_C(1) << 63};
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        int64_t signed_back = 7;
        uint64_t back = 7;
        json_t *v = through_text(lg__tagged_u64(large[i]));
        assert_int_equal(lg__tagged_get_u64(v, &back, &err), LG_OK);
        assert_true(back == large[i]);
        assert_int_equal(lg__tagged_get_i64(v, &signed_back, &err), large[i] > INT64_MAX ? LG_ERR_MISMATCH : LG_OK);
        json_decref(v);
    }
    json_t *v = lg__tagged_u64((uint64_t)edge + 1);
    assert_string_equal(json_string_value(json_object_get(v, "$int")), "9007199254740993");
    json_decref(v);
}

static void kinds_of_values_are_kept_apart(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool integer, real, bytes;
    } cases[] = {
        {"1", true, false, false},
        {"1.0", false, true, false},
        {"1e3", false, true, false},
        {"\"1\"", false, false, false},
        {"true", false, false, false},
        {"null", false, false, false},
        {"[1]", false, false, false},
        {"{}", false, false, false},
        {"{\"$int\":\"9007199254740993\"}", true, false, false},
        {"{\"$int\":\"5\"}", false, false, false},
        {"{\"$int\":\"99999999999999999999\"}", false, false, false},
        {"{\"$float\":\"inf\"}", false, true, false},
        {"{\"$float\":\"Inf\"}", false, false, false},
        {"{\"$float\":\"9007199254740993\"}", false, false, false},
        {"{\"$bytes\":\"AAAA\"}", false, false, true},
        {"{\"$bytes\":\"AAA\"}", false, false, false},
        {"\"AAAA\"", false, false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        lg_error err = LG_ERROR_INIT;
        json_t *v = parse(cases[i].text);
        int64_t integer;
        double real;
        void *data = NULL;
        size_t bytes;
        assert_int_equal(lg__tagged_get_i64(v, &integer, &err), cases[i].integer ? LG_OK : LG_ERR_MISMATCH);
        assert_int_equal(lg__tagged_get_f64(v, &real, &err), cases[i].real ? LG_OK : LG_ERR_MISMATCH);
        assert_int_equal(lg__tagged_get_bytes(v, &data, &bytes, &err), cases[i].bytes ? LG_OK : LG_ERR_MISMATCH);
        lg__free(data);
        json_decref(v);
    }
}

/* ---------------------------------------------------------------------- bytes */

static void byte_strings_of_every_length_come_back(void **state)
{
    (void)state;
    enum { MOST = 400 };
    unsigned char data[MOST];
    for (size_t i = 0; i < MOST; i++) {
        data[i] = (unsigned char)(i * 37 + 11);
    }
    lg_error err = LG_ERROR_INIT;
    for (size_t n = 0; n <= MOST; n++) {
        void *back = NULL;
        size_t bytes = 99;
        json_t *v = through_text(lg__tagged_bytes(data, n));
        assert_int_equal(lg__tagged_get_bytes(v, &back, &bytes, &err), LG_OK);
        assert_int_equal(bytes, n);
        if (n > 0) {
            assert_memory_equal(back, data, n);
        }
        lg__free(back);
        json_decref(v);
    }
    json_t *v = lg__tagged_bytes("any carnal pleas", 16); /* RFC 4648 */
    assert_string_equal(json_string_value(json_object_get(v, "$bytes")), "YW55IGNhcm5hbCBwbGVhcw==");
    json_decref(v);
}

static void values_are_null_when_memory_is_out(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    void *back = NULL;
    size_t bytes = 5;
    json_t *v = lg__tagged_bytes("abc", 3);
    lg__mem_fail_after(0);
    json_t *none = lg__tagged_bytes("abc", 3);
    lg_status status = lg__tagged_get_bytes(v, &back, &bytes, &err);
    lg__mem_fail_after(SIZE_MAX);
    assert_null(none);
    assert_int_equal(status, LG_ERR_NOMEM);
    assert_null(back);
    assert_int_equal(bytes, 5);
    assert_null(lg__tagged_bytes("abc", SIZE_MAX));
    json_decref(v);
    v = NULL;
    size_t tries = 0;
    for (; v == NULL; tries++) {
        lg__mem_fail_after(tries);
        v = lg__tagged_bytes("abc", 3);
        lg__mem_fail_after(SIZE_MAX);
    }
    assert_true(tries > 3); /* text, string, object, member */
    json_decref(v);
    /* Every allocation of a check fails once, and none leaks. */
    v = parse("{\"$set\":[1,{\"$tuple\":[2,3]},\"x\"]}");
    size_t n = 0;
    for (;; n++) {
        lg__mem_fail_after(n);
        status = lg__tagged_check(v, &err);
        lg__mem_fail_after(SIZE_MAX);
        if (status == LG_OK) {
            break;
        }
        assert_int_equal(status, LG_ERR_NOMEM);
    }
    assert_in_range(n, 2, 20);
    json_decref(v);
}

/* --------------------------------------------------------------------- checks */

static void each_tag_is_accepted_in_its_form(void **state)
{
    (void)state;
    static const char *const good[] = {
        "null",
        "true",
        "[]",
        "{}",
        "\"text\"",
        "\"a\\u0000b\"",
        "\"$not a key\"",
        "9007199254740992",
        "-9007199254740992",
        "0.1",
        "1e308",
        "-5e-324",
        "{\"a\":[1,2.5,{\"b\":null}],\"\":0,\"a$\":1}",
        "{\"$int\":\"9007199254740993\"}",
        "{\"$int\":\"-9007199254740993\"}",
        "{\"$int\":\"123456789012345678901234567890123456789012345678901234567890\"}",
        "{\"$float\":\"inf\"}",
        "{\"$float\":\"-inf\"}",
        "{\"$float\":\"nan\"}",
        "{\"$float\":\"-0.0\"}",
        "{\"$float\":\"0x7ff8000000000001\"}",
        "{\"$float\":\"0xfff0000000000001\"}",
        "{\"$bytes\":\"\"}",
        "{\"$bytes\":\"AA==\"}",
        "{\"$bytes\":\"AAA=\"}",
        "{\"$bytes\":\"+/+/\"}",
        "{\"$tuple\":[]}",
        "{\"$tuple\":[1,[2],{\"$tuple\":[]}]}",
        "{\"$set\":[]}",
        "{\"$set\":[1,\"1\",1.0,true,null,{\"$tuple\":[1,2]},{\"$frozenset\":[1]}]}",
        "{\"$frozenset\":[{\"$bytes\":\"AA==\"}]}",
        "{\"$dict\":[]}",
        "{\"$dict\":[[1,\"a\"],[\"$x\",\"b\"],[{\"$tuple\":[0,1]},[1]],[null,{}]]}",
        "{\"$ordered\":[[\"b\",1],[\"a\",2]]}",
        "{\"$counter\":[[\"a\",1],[\"b\",-2],[3,{\"$int\":\"9007199254740993\"}],[4,1.5],[5,{\"$float\":\"inf\"}]]}",
        "{\"$defaultdict\":{\"factory\":\"list\",\"items\":[[1,[2]]]}}",
        "{\"$defaultdict\":{\"items\":[],\"factory\":null}}",
        "{\"$deque\":{\"maxlen\":null,\"items\":[1,2]}}",
        "{\"$deque\":{\"maxlen\":2,\"items\":[1,[2]]}}",
        "{\"$deque\":{\"maxlen\":0,\"items\":[]}}",
        "{\"$complex\":[1.0,-2.5]}",
        "{\"$complex\":[{\"$float\":\"nan\"},{\"$float\":\"-0.0\"}]}",
        "{\"$numpy\":{\"dtype\":\"<f4\",\"hex\":\"cdcccc3d\"}}",
        "{\"$numpy\":{\"dtype\":\"<i8\",\"hex\":\"0000000000000040\"}}",
        "{\"$numpy\":{\"dtype\":\"|b1\",\"hex\":\"01\"}}",
        "{\"$numpy\":{\"dtype\":\"<c16\",\"hex\":\"00000000000000000000000000000000\"}}",
        "{\"$dtype\":\"torch.float8_e4m3fn\"}",
        "{\"$device\":\"cpu\"}",
        "{\"$device\":\"cuda:0\"}",
        "{\"$device\":\"cuda:15\"}",
        "{\"$tensor\":\"optim.state.0.exp_avg\"}",
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        lg_error err = LG_ERROR_INIT;
        json_t *v = parse(good[i]);
        if (lg__tagged_check(v, &err) != LG_OK) {
            fail_msg("refused: %s: %s", good[i], err.message);
        }
        json_decref(through_text(v));
    }
}

/* The lines of the fenced block in the specification. */
static void the_examples_of_the_specification_are_valid(void **state)
{
    (void)state;
    vector_file page = vectors_read("../../docs/format-shards.md");
    char *block = strstr((char *)page.data, "```json\n");
    assert_non_null(block);
    block += strlen("```json\n");
    *strstr(block, "```") = '\0';
    static const char *const tags[] = {"$int",     "$float",   "$bytes",  "$tuple",   "$set",   "$frozenset",
                                       "$dict",    "$ordered", "$deque",  "$counter", "$numpy", "$defaultdict",
                                       "$complex", "$dtype",   "$device", "$tensor"};
    for (size_t i = 0; i < sizeof tags / sizeof tags[0]; i++) {
        char quoted[32];
        snprintf(quoted, sizeof quoted, "{\"%s\": ", tags[i]);
        if (strstr(block, quoted) == NULL) {
            fail_msg("no example of %s", tags[i]);
        }
    }
    size_t examples = 0;
    for (char *save = NULL, *line = strtok_r(block, "\n", &save); line != NULL; line = strtok_r(NULL, "\n", &save)) {
        lg_error err = LG_ERROR_INIT;
        json_t *v = parse(line);
        if (lg__tagged_check(v, &err) != LG_OK) {
            fail_msg("%s: %s", line, err.message);
        }
        json_decref(v);
        examples++;
    }
    assert_true(examples >= 25);
    free(page.data);
}

static void what_breaks_the_rules_is_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "9007199254740993",
        "-9007199254740993",
        "9223372036854775807",
        "-0.0",
        "[1,[2,-0.0]]",
        "{\"$unknown\":1}",
        "{\"$\":1}",
        "{\"$Int\":\"9007199254740993\"}",
        "{\"$a\":1,\"b\":2}",
        "{\"b\":1,\"$a\":2}",
        "{\"$int\":\"9007199254740993\",\"$float\":\"inf\"}",
        "{\"a\":{\"b\":[{\"$unknown\":1}]}}",
        /* integers */
        "{\"$int\":9007199254740993}",
        "{\"$int\":5}",
        "{\"$int\":\"5\"}",
        "{\"$int\":\"9007199254740992\"}",
        "{\"$int\":\"-9007199254740992\"}",
        "{\"$int\":\"09007199254740993\"}",
        "{\"$int\":\"+9007199254740993\"}",
        "{\"$int\":\"--9007199254740993\"}",
        "{\"$int\":\"9007199254740993 \"}",
        "{\"$int\":\"90071992547409930.0\"}",
        "{\"$int\":\"9007199254740993e1\"}",
        "{\"$int\":\"0x20000000000001\"}",
        "{\"$int\":\"9007199254740993\\u0000\"}",
        "{\"$int\":\"\"}",
        "{\"$int\":\"-\"}",
        "{\"$int\":null}",
        "{\"$int\":[\"9007199254740993\"]}",
        /* floats */
        "{\"$float\":\"1.0\"}",
        "{\"$float\":\"Infinity\"}",
        "{\"$float\":\"+inf\"}",
        "{\"$float\":\"NaN\"}",
        "{\"$float\":\"-nan\"}",
        "{\"$float\":\"-0\"}",
        "{\"$float\":\"0.0\"}",
        "{\"$float\":\"0x7ff8000000000000\"}",
        "{\"$float\":\"0x7FF8000000000001\"}",
        "{\"$float\":\"0x7ff800000000001\"}",
        "{\"$float\":\"0x7ff80000000000010\"}",
        "{\"$float\":\"0x7ff0000000000000\"}",
        "{\"$float\":\"0x3ff0000000000000\"}",
        "{\"$float\":\"0x8000000000000000\"}",
        "{\"$float\":\"inf\\u0000\"}",
        "{\"$float\":1.5}",
        /* bytes */
        "{\"$bytes\":\"A\"}",
        "{\"$bytes\":\"AA\"}",
        "{\"$bytes\":\"AAA\"}",
        "{\"$bytes\":\"AB==\"}",
        "{\"$bytes\":\"AAB=\"}",
        "{\"$bytes\":\"A===\"}",
        "{\"$bytes\":\"====\"}",
        "{\"$bytes\":\"AA==AAAA\"}",
        "{\"$bytes\":\"AA=A\"}",
        "{\"$bytes\":\" AAAA\"}",
        "{\"$bytes\":\"AAAA\\n\"}",
        "{\"$bytes\":\"AA-_\"}",
        "{\"$bytes\":\"AAA\\u0000\"}",
        "{\"$bytes\":[0]}",
        /* collections */
        "{\"$tuple\":{}}",
        "{\"$tuple\":[9007199254740993]}",
        "{\"$set\":1}",
        "{\"$set\":[1,1]}",
        "{\"$set\":[\"a\",1,\"a\"]}",
        "{\"$set\":[[1]]}",
        "{\"$set\":[{\"a\":1}]}",
        "{\"$set\":[{\"$set\":[1]}]}",
        "{\"$set\":[{\"$tuple\":[[1]]}]}",
        "{\"$frozenset\":[{\"$tuple\":[1]},{\"$tuple\":[1]}]}",
        "{\"$frozenset\":[{\"$tensor\":\"w\"}]}",
        "{\"$dict\":{\"a\":1}}",
        "{\"$dict\":[[1]]}",
        "{\"$dict\":[[1,2,3]]}",
        "{\"$dict\":[1,2]}",
        "{\"$dict\":[[1,2],[1,3]]}",
        "{\"$dict\":[[[1],2]]}",
        "{\"$dict\":[[1,{\"$unknown\":1}]]}",
        "{\"$ordered\":[[\"a\",1],[\"a\",2]]}",
        "{\"$counter\":[[\"a\",\"1\"]]}",
        "{\"$counter\":[[\"a\",true]]}",
        "{\"$counter\":[[\"a\",{\"$int\":\"5\"}]]}",
        "{\"$defaultdict\":[]}",
        "{\"$defaultdict\":{\"factory\":\"int\"}}",
        "{\"$defaultdict\":{\"items\":[]}}",
        "{\"$defaultdict\":{\"factory\":\"os.system\",\"items\":[]}}",
        "{\"$defaultdict\":{\"factory\":\"int\\u0000\",\"items\":[]}}",
        "{\"$defaultdict\":{\"factory\":1,\"items\":[]}}",
        "{\"$defaultdict\":{\"factory\":\"int\",\"items\":{}}}",
        "{\"$defaultdict\":{\"factory\":\"int\",\"items\":[],\"x\":1}}",
        "{\"$deque\":[1]}",
        "{\"$deque\":{\"items\":[]}}",
        "{\"$deque\":{\"maxlen\":-1,\"items\":[]}}",
        "{\"$deque\":{\"maxlen\":1.0,\"items\":[]}}",
        "{\"$deque\":{\"maxlen\":1,\"items\":[1,2]}}",
        "{\"$deque\":{\"maxlen\":9007199254740993,\"items\":[]}}",
        /* scalars */
        "{\"$complex\":[1.0]}",
        "{\"$complex\":[1,2]}",
        "{\"$complex\":[1.0,2.0,3.0]}",
        "{\"$complex\":[1.0,\"2.0\"]}",
        "{\"$complex\":[1.0,-0.0]}",
        "{\"$complex\":[1.0,{\"$float\":\"x\"}]}",
        "{\"$numpy\":{\"dtype\":\"<f4\"}}",
        "{\"$numpy\":{\"dtype\":\"<f4\",\"hex\":\"cdcccc\"}}",
        "{\"$numpy\":{\"dtype\":\"<f4\",\"hex\":\"CDCCCC3D\"}}",
        "{\"$numpy\":{\"dtype\":\"<f4\",\"hex\":\"cdcccc3d00\"}}",
        "{\"$numpy\":{\"dtype\":\">f4\",\"hex\":\"cdcccc3d\"}}",
        "{\"$numpy\":{\"dtype\":\"f4\",\"hex\":\"cdcccc3d\"}}",
        "{\"$numpy\":{\"dtype\":\"<O8\",\"hex\":\"0000000000000000\"}}",
        "{\"$numpy\":{\"dtype\":\"<f16\",\"hex\":\"00000000000000000000000000000000\"}}",
        "{\"$numpy\":{\"dtype\":\"|b1\",\"hex\":\"02\"}}",
        "{\"$numpy\":{\"dtype\":\"<f4\",\"hex\":\"cdcccc3d\",\"x\":1}}",
        "{\"$numpy\":\"cdcccc3d\"}",
        "{\"$dtype\":\"float32\"}",
        "{\"$dtype\":\"torch.\"}",
        "{\"$dtype\":\"torch.float32;\"}",
        "{\"$dtype\":\"torch.nn.Module\"}",
        "{\"$dtype\":\"torch.Float\"}",
        "{\"$dtype\":\"torch.load('x')\"}",
        "{\"$device\":\"\"}",
        "{\"$device\":\":0\"}",
        "{\"$device\":\"cuda:\"}",
        "{\"$device\":\"cuda:00\"}",
        "{\"$device\":\"cuda:-1\"}",
        "{\"$device\":\"cuda:0:1\"}",
        "{\"$device\":\"CUDA\"}",
        "{\"$tensor\":\"\"}",
        "{\"$tensor\":\"a\\u0000b\"}",
        "{\"$tensor\":\"a\\nb\"}",
        "{\"$tensor\":\"__metadata__\"}",
        "{\"$tensor\":1}",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        lg_error err = LG_ERROR_INIT;
        json_t *v = parse(bad[i]);
        if (lg__tagged_check(v, &err) != LG_ERR_FORMAT || err.status != LG_ERR_FORMAT) {
            fail_msg("accepted: %s", bad[i]);
        }
        assert_true(strlen(err.message) > 0);
        json_decref(v);
    }
}

static void an_error_leads_to_the_value(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    json_t *v = parse("{\"groups\":[{\"lr\":1.0},{\"betas\":{\"$tuple\":[0.9,{\"$decimal\":\"0.99\"}]}}]}");
    assert_int_equal(lg__tagged_check(v, &err), LG_ERR_FORMAT);
    assert_string_equal(err.message, "\"groups\": [1]: \"betas\": $tuple: [1]: $decimal: unknown tag");
    json_decref(v);
}

static void nesting_is_bounded_below_that_of_a_manifest(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    for (int depth = LG__TAGGED_MAX_DEPTH - 1; depth <= LG__TAGGED_MAX_DEPTH + 1; depth++) {
        json_t *v = json_integer(1);
        for (int i = 0; i < depth; i++) {
            json_t *outer = json_array();
            json_array_append_new(outer, v);
            v = outer;
        }
        assert_int_equal(lg__tagged_check(v, &err), depth <= LG__TAGGED_MAX_DEPTH ? LG_OK : LG_ERR_FORMAT);
        json_decref(v);
    }
    /* A value made in memory is no deeper for having been made there. */
    json_t *v = json_array();
    for (int i = 0; i < 1500; i++) {
        json_t *outer = json_object();
        json_object_set_new(outer, i % 2 ? "$tuple" : "$set", v);
        v = json_array();
        json_array_append_new(v, outer);
    }
    assert_int_equal(lg__tagged_check(v, &err), LG_ERR_FORMAT);
    assert_true(strlen(err.message) > 0);
    json_decref(v);
}

static void large_sets_and_dicts_are_checked_for_duplicates_fast(void **state)
{
    (void)state;
    enum { N = 50000 };
    lg_error err = LG_ERROR_INIT;
    json_t *list = json_array();
    for (int i = 0; i < N; i++) {
        json_array_append_new(list, json_pack("[ii]", i, i));
    }
    json_t *v = json_pack("{so}", "$dict", list);
    assert_int_equal(lg__tagged_check(v, &err), LG_OK);
    json_array_append_new(list, json_pack("[is]", 31337, "again"));
    assert_int_equal(lg__tagged_check(v, &err), LG_ERR_FORMAT);
    assert_string_equal(err.message, "$dict: 31337 is there twice");
    json_decref(v);
}

int main(void)
{
#define TEST(f) cmocka_unit_test(f)
#define NAMED(name, f)            \
    {                             \
        name, f, NULL, NULL, NULL \
    }
    const struct CMUnitTest tests[] = {
        NAMED("K22: inf, nan, -0.0, 1e308 and every other double keep every bit", doubles_keep_every_bit),
        NAMED("K22: 2^53+1 and all other 64-bit integers come back", integers_keep_all_64_bits),
        TEST(kinds_of_values_are_kept_apart),
        TEST(byte_strings_of_every_length_come_back),
        TEST(values_are_null_when_memory_is_out),
        NAMED("K22: each tag is accepted in its form, NumPy scalars too", each_tag_is_accepted_in_its_form),
        TEST(the_examples_of_the_specification_are_valid),
        NAMED("K22: what breaks the rules of tagged JSON is refused", what_breaks_the_rules_is_refused),
        TEST(an_error_leads_to_the_value),
        NAMED("K15: nesting is bounded below that of a manifest", nesting_is_bounded_below_that_of_a_manifest),
        TEST(large_sets_and_dicts_are_checked_for_duplicates_fast),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
