/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/hash.h"
#include "container.h"

#include <inttypes.h>
#include <string.h>

/* --------------------------------------------------------------------- dtypes */

static void every_dtype_goes_through_one_table(void **state)
{
    (void)state;
    static const struct {
        lg_dtype dtype;
        const char *name;
        unsigned bits;
    } table[] = {
        {LG_BOOL, "BOOL", 8},
        {LG_F4, "F4", 4},
        {LG_F6_E2M3, "F6_E2M3", 6},
        {LG_F6_E3M2, "F6_E3M2", 6},
        {LG_U8, "U8", 8},
        {LG_I8, "I8", 8},
        {LG_F8_E5M2, "F8_E5M2", 8},
        {LG_F8_E4M3, "F8_E4M3", 8},
        {LG_F8_E8M0, "F8_E8M0", 8},
        {LG_F8_E4M3FNUZ, "F8_E4M3FNUZ", 8},
        {LG_F8_E5M2FNUZ, "F8_E5M2FNUZ", 8},
        {LG_I16, "I16", 16},
        {LG_U16, "U16", 16},
        {LG_F16, "F16", 16},
        {LG_BF16, "BF16", 16},
        {LG_I32, "I32", 32},
        {LG_U32, "U32", 32},
        {LG_F32, "F32", 32},
        {LG_C64, "C64", 64},
        {LG_F64, "F64", 64},
        {LG_I64, "I64", 64},
        {LG_U64, "U64", 64},
    };
    assert_int_equal(sizeof table / sizeof table[0], LG_DTYPE_COUNT);
    for (size_t i = 0; i < LG_DTYPE_COUNT; i++) {
        lg_dtype found = LG_DTYPE_COUNT;
        assert_int_equal(table[i].dtype, i); /* the format's own order */
        assert_string_equal(lg_dtype_name(table[i].dtype), table[i].name);
        assert_int_equal(lg_dtype_bits(table[i].dtype), table[i].bits);
        assert_int_equal(lg_dtype_parse(table[i].name, &found), LG_OK);
        assert_int_equal(found, table[i].dtype);
        /* Counts that fill whole bytes are accepted with exactly those bytes,
         * all others refused, by reader and writer. */
        for (uint64_t n = 0; n <= 17; n++) {
            char header[200], longer[200];
            uint64_t bits = n * table[i].bits, data = 0;
            int bytes = (int)((bits + 7) / 8);
            static const char form[] = "{\"x\":{\"dtype\":\"%s\",\"shape\":[%d],\"data_offsets\":[0,%d]}}";
            snprintf(header, sizeof header, form, table[i].name, (int)n, bytes);
            snprintf(longer, sizeof longer, form, table[i].name, (int)n, bytes + 1);
            lg__st_entry entry = {.name = "x", .dtype = table[i].dtype, .ndim = 1, .shape = &n};
            lg_error err = LG_ERROR_INIT;
            lg__buf b;
            lg__buf_init(&b, 10000);
            lg_status written = lg__st_plan(&entry, 1, NULL, 0, true, 8, &b, &data, &err);
            lg__buf_free(&b);
            if (bits % 8 == 0) {
                lg__st_free(accept(header, bits / 8));
                assert_int_equal(written, LG_OK);
                assert_int_equal(data, bits / 8);
                refuse(header, bits / 8 + 1, LG_ERR_FORMAT, "follow the last tensor");
                refuse(longer, bits / 8 + 1, LG_ERR_FORMAT, "call for");
            } else {
                refuse(header, (bits + 7) / 8, LG_ERR_FORMAT, "do not fill whole bytes");
                assert_int_equal(written, LG_ERR_INVALID);
            }
        }
    }
    lg_dtype untouched = LG_F32;
    static const char *const unknown[] = {"", "f32", "F32 ", "F128", "C128", "F8_FUTURE", "FLOAT", "F3"};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        assert_int_equal(lg_dtype_parse(unknown[i], &untouched), LG_ERR_UNSUPPORTED);
    }
    assert_int_equal(lg_dtype_parse(NULL, &untouched), LG_ERR_INVALID);
    assert_int_equal(untouched, LG_F32);
    assert_string_equal(lg_dtype_name(LG_DTYPE_COUNT), "?");
    assert_string_equal(lg_dtype_name((lg_dtype)-1), "?");
    assert_int_equal(lg_dtype_bits((lg_dtype)1000), 0);
    assert_string_equal(lg_group_name(LG_GROUP_MODEL), "model");
    assert_string_equal(lg_group_name(LG_GROUP_OPTIM), "optim");
    assert_string_equal(lg_group_name(LG_GROUP_RAW), "raw");
    assert_string_equal(lg_group_name(LG_GROUP_COUNT), "?");
}

static void an_unknown_dtype_is_named_with_its_tensor(void **state)
{
    (void)state;
    refuse("{\"layer.w\":{\"dtype\":\"F8_FUTURE\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2, LG_ERR_UNSUPPORTED,
           "tensor \"layer.w\": unknown dtype \"F8_FUTURE\"");
    refuse("{\"w\":{\"dtype\":\"f32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, LG_ERR_UNSUPPORTED, "\"f32\"");
}

static void empty_tensors_are_independent_and_legal_at_any_boundary(void **state)
{
    (void)state;
    lg__st_header *h = accept("{\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},"
                              "\"b\":{\"dtype\":\"F32\",\"shape\":[2,0],\"data_offsets\":[0,0]},"
                              "\"c\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                              "\"d\":{\"dtype\":\"U8\",\"shape\":[9223372036854775807,0],\"data_offsets\":[4,4]}}",
                              4);
    assert_int_equal(h->n, 4);
    assert_string_equal(h->tensors[0].name, "a");
    assert_string_equal(h->tensors[1].name, "b");
    assert_string_equal(h->tensors[2].name, "c");
    assert_string_equal(h->tensors[3].name, "d");
    lg__st_free(h);
    refuse("{\"c\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
           "\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[2,2]}}",
           4, LG_ERR_FORMAT, "inside of tensor \"c\"");
}

/* -------------------------------------------------- verdicts of the reference */

static void describe(const lg__st_header *h, char *out, size_t bytes)
{
    lg__buf b;
    lg__buf_init(&b, 10000);
    lg__buf_str(&b, "[");
    for (size_t i = 0; i < h->n; i++) {
        const lg__st_tensor *t = &h->tensors[h->by_name[i]];
        char name[200];
        size_t k = 0;
        for (const char *p = t->name; *p != '\0'; p++) {
            k += (size_t)snprintf(name + k, sizeof name - k, *p == '\n' ? "\\n" : "%c", *p);
        }
        name[k] = '\0';
        lg__buf_fmt(&b, "%s\"%s:%s:[", i ? ", " : "", name, lg_dtype_name(t->dtype));
        for (uint32_t d = 0; d < t->ndim; d++) {
            lg__buf_fmt(&b, "%s%" PRIu64, d ? ", " : "", t->shape[d]);
        }
        lg__buf_fmt(&b, "]:%" PRIu64 "\"", t->end - t->begin);
    }
    lg__buf_str(&b, "] meta=");
    if (!h->has_metadata) {
        lg__buf_str(&b, "None");
    } else {
        lg__buf_str(&b, "Some({");
        for (size_t i = 0; i < h->n_metadata; i++) {
            lg__buf_fmt(&b, "%s\"%s\": \"", i ? ", " : "", h->metadata[i].key);
            for (size_t k = 0; k < h->metadata[i].value_bytes; k++) {
                char c = h->metadata[i].value[k];
                if (c == '\0') {
                    lg__buf_str(&b, "\\0");
                } else if (c == '"' || c == '\\') {
                    lg__buf_fmt(&b, "\\%c", c);
                } else {
                    lg__buf_add(&b, &c, 1);
                }
            }
            lg__buf_str(&b, "\"");
        }
        lg__buf_str(&b, "})");
    }
    snprintf(out, bytes, "%s", b.data);
    lg__buf_free(&b);
}

/* Where we are stricter than the reference on purpose, and what we say then. */
static const struct {
    const char *vector, *words;
} stricter[] = {
    {"02_dup_name_same", "tensor \"a\" is there twice"},
    {"13_array_info", "tensor \"a\": "},
    {"14_dtype_map", "tensor \"a\": dtype is not a string"},
};

static void verdicts_are_the_references_but_for_the_documented_few(void **state)
{
    (void)state;
    vector_file tsv = vectors_read("safetensors-parse.expected.tsv");
    size_t cases = 0, differ = 0;
    for (char *save = NULL, *line = strtok_r((char *)tsv.data, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        char *column[4], path[200];
        if (line[0] == '#') {
            continue;
        }
        assert_true(vectors_columns(line, column, 4) >= 3);
        snprintf(path, sizeof path, "safetensors-parse/%s", column[0]);
        vector_file v = vectors_read(path);
        lg_error err = LG_ERROR_INIT;
        lg__st_header *h = NULL;
        lg_status status = open_bytes(v.data, v.bytes, &h, &err);
        const char *words = NULL;
        for (size_t i = 0; i < sizeof stricter / sizeof stricter[0]; i++) {
            if (strcmp(stricter[i].vector, column[0]) == 0) {
                words = stricter[i].words;
            }
        }
        bool want = strcmp(column[1], "OK") == 0;
        if (words != NULL) {
            assert_true(want);
            if (status == LG_OK || strstr(err.message, words) == NULL) {
                fail_msg("%s: %s", column[0], err.message);
            }
            differ++;
        } else if ((status == LG_OK) != want) {
            fail_msg("%s: %s", column[0], want ? err.message : "accepted");
        } else if (want) {
            char text[1000];
            describe(h, text, sizeof text);
            assert_string_equal(text, column[2]);
        } else {
            /* A sentence that says something. */
            assert_true(strlen(err.message) > 15);
            assert_true(lg__utf8_valid(err.message, strlen(err.message)));
        }
        lg__st_free(h);
        free(v.data);
        cases++;
    }
    free(tsv.data);
    assert_int_equal(cases, 55);
    assert_int_equal(differ, sizeof stricter / sizeof stricter[0]);
}

static void headers_beyond_the_vectors_are_judged_as_the_reference_does(void **state)
{
    (void)state;
#define INFO "{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"
    static const char *const good[] = {
        "{\"a\":" INFO "}",
        " \t\r\n{ \"a\" : " INFO " } \n",
        "{\"a\":{\"data_offsets\":[0,8],\"shape\":[2],\"dtype\":\"F32\"}}",
        "{\"a\":{\"d\\u0074ype\":\"F\\u00332\",\"shape\":[ 2 ],\"data_offsets\":[0 , 8]}}",
        "{\"__metadata__\":null,\"a\":" INFO "}",
        "{\"a\":" INFO ",\"__metadata__\":{\"\":\"\",\"k\":\"v\"}}",
        "{\"a\":{\"dtype\":\"F32\",\"x\":{\"y\":[1,-2,null,\"}\"]},\"shape\":[2],\"data_offsets\":[0,8],\"z\":1e5}}",
        "{\"a/../b\":" INFO "}",
        "{\"a\\u001b[2J\":" INFO "}",
        "{\"__metadata_\":" INFO "}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,2,1],\"data_offsets\":[0,8]}}",
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        lg__st_header *h = accept(good[i], 8);
        assert_int_equal(h->n, 1);
        assert_int_equal(h->tensors[0].dtype, LG_F32);
        assert_int_equal(h->data_start, 8 + strlen(good[i]));
        assert_false(h->tensors[0].has_offsets);
        lg__st_free(h);
    }
    static const struct {
        const char *header, *words;
    } bad[] = {
        {"[]", "an object"},
        {"{\"a\":" INFO "", "it ends"},
        {"{\"a\":" INFO "}}", "follow"},
        {"{\"a\":" INFO ",}", "a key"},
        {"{,\"a\":" INFO "}", "a key"},
        {"{\"a\" " INFO "}", "\":\""},
        {"{\"a\":" INFO " \"b\":" INFO "}", "invalid JSON"},
        {"{\"a\":" INFO ",\"b\"}", "\":\""},
        {"{\"a\":" INFO ",\"b\":}", "tensor \"b\""},
        {"{\"a\":" INFO ",\"b", "it ends"},
        {"{\"a\":" INFO ",\"b\\", "it ends"},
        {"{\"a\":" INFO ",\"b\\\"", "it ends"},
        {"{\"a\":[" INFO "}}", "tensor \"a\""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8}]}", "tensor \"a\""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,],\"data_offsets\":[0,8]}}", "tensor \"a\": shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":nul}}", "tensor \"a\""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1 2}}", "tensor \"a\""},
        {"{\"a\":{\"dtype\":\"F32\" 1,\"shape\":[2],\"data_offsets\":[0,8]}}", "tensor \"a\""},
        {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
         "\"dtype\" is given twice"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"sh\\u0061pe\":[2],\"data_offsets\":[0,8]}}",
         "\"shape\" is given twice"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", "\"data_offsets\" is missing"},
        {"{\"a\":{\"dtype\":null,\"shape\":[2],\"data_offsets\":[0,8]}}", "dtype is not a string"},
        {"{\"a\":{\"dtype\":\"F32\\u0000\",\"shape\":[2],\"data_offsets\":[0,8]}}", "NUL"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":null,\"data_offsets\":[0,8]}}", "shape is not an array"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":{\"0\":2},\"data_offsets\":[0,8]}}", "shape is not an array"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", "shape is not an array"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1e3],\"data_offsets\":[0,8]}}", "shape[0] is not an integer"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.0],\"data_offsets\":[0,8]}}", "shape[0] is not an integer"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,-1],\"data_offsets\":[0,8]}}", "shape[1] is negative"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[[2]],\"data_offsets\":[0,8]}}", "shape[0] is not an integer"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[02],\"data_offsets\":[0,8]}}", "tensor \"a\": shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-0,8]}}", "minus"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", "1 numbers instead of 2"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", "belong to no tensor"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,18446744073709551616]}}", "data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[16,32],\"data_offsets\":[0,8]}}", "8 bytes of data but"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", "more elements"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387905,2],\"data_offsets\":[0,8]}}", "more elements"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[9223372036854775810,2],\"data_offsets\":[0,16]}}", "shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", "bits"},
        {"{\"__metadata__\":[],\"a\":" INFO "}", "__metadata__"},
        {"{\"__metadata__\":\"x\",\"a\":" INFO "}", "__metadata__"},
        {"{\"__metadata__\":{\"k\":1},\"a\":" INFO "}", "__metadata__: \"k\": the value is not a string"},
        {"{\"__metadata__\":{\"k\":\"v\"}x,\"a\":" INFO "}", "at byte 25"},
        {"{\"__metadata__\":{},\"a\":" INFO ",\"__met\\u0061data__\":{}}", "\"__metadata__\" is there twice"},
        {"{\"__metadata__\":null,\"a\":" INFO ",\"__metadata__\":{}}", "\"__metadata__\" is there twice"},
        {"{\"a\":" INFO ",\"\\ud800\":" INFO "}", "invalid JSON"},
        {"{\"a\xff\":" INFO "}", "invalid JSON"},
        {"{\"a\":" INFO "}\x01", "follow"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        refuse(bad[i].header, 8, LG_ERR_FORMAT, bad[i].words);
    }
    /* NUL padding is no padding, nor may one hide behind a number. */
    lg_error err = LG_ERROR_INIT;
    lg__st_header *h = NULL;
    size_t bytes;
    static const struct {
        const char *header;
        size_t bytes, data;
    } with_nul[] = {{"{}\0\0\0\0\0\0", 8, 0},
                    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2\0],\"data_offsets\":[0,2]}}", 53, 2},
                    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2\0]}}", 53, 2},
                    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2],\"x\":1\0}}", 59, 2}};
    for (size_t i = 0; i < sizeof with_nul / sizeof with_nul[0]; i++) {
        uint8_t *file = make_file(with_nul[i].header, with_nul[i].bytes, with_nul[i].data, &bytes);
        assert_int_equal(file[7 + with_nul[i].bytes], i == 0 ? 0 : '}');
        assert_int_equal(open_bytes(file, bytes, &h, &err), LG_ERR_FORMAT);
        free(file);
    }
}

static void a_duplicate_key_is_named(void **state)
{
    (void)state;
    refuse("{\"w\":" INFO ",\"b\":" INFO ",\"w\":" INFO "}", 8, LG_ERR_FORMAT, "tensor \"w\" is there twice");
    refuse("{\"w\\n\":" INFO ",\"w\\u000a\":" INFO "}", 8, LG_ERR_FORMAT, "tensor \"w\\x0a\" is there twice");
    refuse("{\"__metadata__\":{\"k\":\"1\",\"j\":\"2\",\"\\u006b\":\"3\"},\"a\":" INFO "}", 8, LG_ERR_FORMAT,
           "__metadata__: \"k\" is there twice");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":{\"y\":1,\"y\":2}}}", 8, LG_ERR_FORMAT,
           "tensor \"a\": invalid JSON at byte");
}

static void a_nul_in_a_name_is_refused(void **state)
{
    (void)state;
    refuse("{\"a\\u0000hidden\":" INFO "}", 8, LG_ERR_FORMAT, "NUL byte in it, after \"a\"");
    refuse("{\"__metadata__\":{\"k\\u0000\":\"v\"},\"a\":" INFO "}", 8, LG_ERR_FORMAT, "NUL byte");
}

static void limits_of_our_own_are_named(void **state)
{
    (void)state;
    lg__buf b;
    lg__buf_init(&b, 1 << 20);
    for (int ndim = 32; ndim <= 33; ndim++) {
        b.len = 0;
        lg__buf_str(&b, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1");
        for (int d = 1; d < ndim; d++) {
            lg__buf_str(&b, ",1");
        }
        lg__buf_str(&b, "],\"data_offsets\":[0,1]}}");
        if (ndim <= LG_MAX_NDIM) {
            lg__st_free(accept(b.data, 1));
        } else {
            refuse(b.data, 1, LG_ERR_LIMIT, "shape has 33 numbers; up to 32");
        }
    }
    b.len = 0;
    lg__buf_str(&b, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":\"");
    lg__buf_fill(&b, 'x', 70000);
    lg__buf_str(&b, "\"}}");
    refuse(b.data, 1, LG_ERR_LIMIT, "tensor \"a\": its entry takes");
    b.len = 0;
    lg__buf_str(&b, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":");
    lg__buf_fill(&b, '[', 30000);
    lg__buf_fill(&b, ']', 30000);
    lg__buf_str(&b, "}}");
    refuse(b.data, 1, LG_ERR_FORMAT, "tensor \"a\": invalid JSON: nested");
    lg__buf_free(&b);
}

/* ------------------------------------------------------- cut and foreign files */

static void a_cut_file_says_what_it_has_and_needs(void **state)
{
    (void)state;
    vector_file v = vectors_read("safetensors-golden/one_f32.safetensors");
    assert_int_equal(v.bytes, 104); /* N = 88, 8 bytes of data */
    static const struct {
        size_t keep;
        const char *words;
    } cuts[] = {
        {0, "the file is empty"},        {1, "have 1 bytes, need 8"},       {7, "have 7 bytes, need 8"},
        {8, "have 8 bytes, need 96"},    {9, "have 9 bytes, need 96"},      {95, "have 95 bytes, need 96"},
        {96, "have 96 bytes, need 104"}, {103, "have 103 bytes, need 104"},
    };
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        lg_error err = LG_ERROR_INIT;
        lg__st_header *h = NULL;
        assert_int_equal(open_bytes(v.data, cuts[i].keep, &h, &err), LG_ERR_CORRUPT);
        if (strstr(err.message, cuts[i].words) == NULL) {
            fail_msg("cut at %zu: %s", cuts[i].keep, err.message);
        }
    }
    for (size_t keep = 0; keep < v.bytes; keep++) {
        lg_error err = LG_ERROR_INIT;
        lg__st_header *h = NULL;
        assert_int_equal(open_bytes(v.data, keep, &h, &err), LG_ERR_CORRUPT);
    }
    free(v.data);
}

static void one_byte_too_many_is_refused(void **state)
{
    (void)state;
    refuse("{\"a\":" INFO "}", 9, LG_ERR_FORMAT, "1 bytes follow the last tensor");
    refuse("{}", 1, LG_ERR_FORMAT, "1 bytes follow");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,15]}}", 15, LG_ERR_FORMAT, "15 bytes of data");
}

/* Two good files, one behind the other. */
static void joined_files_are_refused_with_the_guess(void **state)
{
    (void)state;
    refuse("{\"a\":" INFO "}", 8 + 8 + sizeof("{\"a\":" INFO "}") - 1 + 8, LG_ERR_FORMAT, "(were files joined?)");
}

static void files_of_another_kind_are_told_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t n;
        const char *words;
    } files[] = {
        {"version https://git-lfs.github.com/spec/v1\noid sha256:0", 55, "Git LFS pointer"},
        {"PK\003\004\0\0\010\010\0\0\0\0\0\0", 14, "zip archive"},
        {"PK\003\004\0\0\0\0\0\0\0\0\0\0", 14, "zip archive"},
        {"<!DOCTYPE html><html><body>404", 30, "HTML"},
        {"  <html lang=\"en\">", 18, "HTML"},
        {"<?xml version=\"1.0\"?><Error>", 28, "XML"},
        {"GGUF\003\0\0\0\0\0\0\0", 12, "GGUF"},
        {"\x1f\x8b\010\0\0\0\0\0\0\003abc", 13, "gzip"},
        {"\x80\002}q\0(X\001\0\0\0a", 12, "pickle"},
        {"\x80\003}q\0(X\001\0\0\0a", 12, "pickle"},
        {"\x80\004\x95\020\0\0\0\0\0\0\0}", 12, "pickle"},
        {"\x80\005\x95\020\0\0\0\0\0\0\0}", 12, "pickle"},
        {"\x80\002.", 3, "pickle"},
        {"{\"weight_map\":{}}", 17, "JSON text"},
        {"{}", 2, "JSON text"},
        {"\n[1, 2, 3, 4]", 13, "JSON text"},
        {"\x89HDF\r\n\x1a\n\0\0\0\0", 12, "HDF5"},
        {"\x93NUMPY\001\0v\0{'descr'", 17, "NumPy"},
    };
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        /* Short, and as long as a real one, where the first 8 bytes may by
         * chance give a length that fits. */
        for (int large = 0; large < 2; large++) {
            lg_error err = LG_ERROR_INIT;
            uint64_t n = 99;
            uint64_t bytes = large ? UINT64_C(1) << 40 : files[i].n;
            if (lg__st_header_bytes((const uint8_t *)files[i].bytes, files[i].n, bytes, &n, &err) != LG_ERR_FORMAT ||
                strstr(err.message, files[i].words) == NULL) {
                fail_msg("%s: %s", files[i].words, err.message);
            }
            assert_int_equal(n, 99);
        }
    }
    static const uint8_t zeros[64];
    static const uint8_t noise[] = "\xde\xad\xbe\xef\xde\xad\xbe\xef\xde\xad\xbe\xef";
    lg_error err = LG_ERROR_INIT;
    uint64_t n = 99;
    assert_int_equal(lg__st_header_bytes(zeros, sizeof zeros, 4096, &n, &err), LG_ERR_CORRUPT);
    assert_non_null(strstr(err.message, "begins with zeros"));
    assert_int_equal(lg__st_header_bytes(noise, 12, 4096, &n, &err), LG_ERR_FORMAT);
    assert_non_null(strstr(err.message, "not safetensors, or damaged"));
}

static void a_real_file_whose_length_looks_like_magic_still_opens(void **state)
{
    (void)state;
    /* N = 0x1f8b bytes: the first two bytes are those of no compressed file,
     * since byte 8 is "{". */
    static char header[0x8b1f + 1];
    memset(header, ' ', sizeof header - 1);
    memcpy(header, "{}", 2);
    lg__st_free(accept(header, 0));
}

static void a_header_over_the_cap_is_refused_before_it_is_read(void **state)
{
    (void)state;
    uint8_t first[64] = {0};
    memset(first + 8, '{', 56);
    static const struct {
        uint64_t length;
        lg_status status;
    } cases[] = {
        {100000000, LG_OK}, {100000001, LG_ERR_FORMAT}, {UINT64_MAX, LG_ERR_FORMAT}, {UINT64_MAX - 7, LG_ERR_FORMAT}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        lg_error err = LG_ERROR_INIT;
        uint64_t n = 0;
        for (int k = 0; k < 8; k++) {
            first[k] = (uint8_t)(cases[i].length >> (8 * k));
        }
        assert_int_equal(lg__st_header_bytes(first, 64, UINT64_C(1) << 50, &n, &err), cases[i].status);
        assert_true(n == (cases[i].status == LG_OK ? cases[i].length : 0));
    }
    lg_error err = LG_ERROR_INIT;
    lg__st_header *h = NULL;
    assert_int_equal(lg__st_parse("{}", 100000001, UINT64_C(1) << 50, &h, &err), LG_ERR_FORMAT);
    assert_int_equal(lg__st_parse("{}", 2, 9, &h, &err), LG_ERR_FORMAT);
    assert_int_equal(lg__st_parse("{}", 0, 0, &h, &err), LG_ERR_FORMAT);
}

/* --------------------------------------------------------------- sharding info */

#define TWO                                                                 \
    "\"b\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[8,12]},\"w\":" \
    "{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]}}"

static void sharding_info_must_fit_the_tensors(void **state)
{
    (void)state;
    static const struct {
        const char *info; /* escaped once */
        const char *words;
    } bad[] = {
        {"{}", "does not list tensor \\\"w\\\""},
        {"{\\\"w\\\":{\\\"saved_offsets\\\":[0,0]}}", "does not list tensor \"b\""},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]}}", "does not list tensor \"w\""},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]},\\\"w\\\":{\\\"saved_offsets\\\":[0]}}",
         "tensor \"w\": 1 saved_offsets"},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[0]},\\\"w\\\":{\\\"saved_offsets\\\":[0,0]}}",
         "tensor \"b\": 1 saved_offsets"},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]},\\\"w\\\":{\\\"saved_offsets\\\":[0,0,0]}}", "tensor \"w\": 3 saved"},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]},\\\"w\\\":{\\\"saved_offsets\\\":[0,-1]}}",
         "tensor \"w\": saved_offsets[1]"},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]},\\\"w\\\":{\\\"saved_offsets\\\":[0,-0]}}", "minus"},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]},\\\"w\\\":{\\\"saved_offsets\\\":[0,1.0]}}", "not an integer"},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]},\\\"w\\\":{\\\"saved_offsets\\\":[0,9223372036854775806]}}",
         "beyond 2^63"},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]},\\\"w\\\":{}}", "\"saved_offsets\" is missing"},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]},\\\"w\\\":[0,0]}", "tensor \"w\""},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]},\\\"w\\\":{\\\"saved_offsets\\\":{}}}", "not an array"},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]},\\\"w\\\":{\\\"saved_offsets\\\":[0,0]},\\\"w\\\":{\\\"saved_"
         "offsets\\\":[0,1]}}",
         "tensor \"w\": it is there twice"},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[],\\\"saved_offsets\\\":[]},\\\"w\\\":{\\\"saved_offsets\\\":[0,0]}}",
         "twice"},
        {"[]", "DCP_SHARDING_INFO"},
        {"null", "DCP_SHARDING_INFO"},
        {" ", "DCP_SHARDING_INFO"},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]},\\\"w\\\":{\\\"saved_offsets\\\":[0,0]}}x", "follow"},
        {"{\\\"b\\\":{\\\"saved_offsets\\\":[]},\\\"w\\\":{\\\"saved_offsets\\\":[0,0]},\\\"other\\\":[1,}", "DCP"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char header[1000];
        snprintf(header, sizeof header, "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"%s\"}," TWO, bad[i].info);
        refuse(header, 12, LG_ERR_FORMAT, i == 0 ? "does not list tensor \"w\"" : bad[i].words);
    }
}

static void sharding_info_gives_the_saved_offsets(void **state)
{
    (void)state;
    lg__st_header *h = accept("{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"w\\\": {\\\"x\\\": [-1.5], "
                              "\\\"saved_offsets\\\": [7, 0]}, \\\"b\\\": {\\\"saved_offsets\\\": []}, "
                              "\\\"other\\\": {\\\"saved_offsets\\\": [3]}, \\\"a\\\\u0000\\\": 1}\"}," TWO,
                              12);
    const lg__st_tensor *w = lg__st_find(h, "w"), *b = lg__st_find(h, "b");
    assert_true(w->has_offsets && b->has_offsets);
    assert_int_equal(w->saved_offsets[0], 7);
    assert_int_equal(w->saved_offsets[1], 0);
    assert_null(lg__st_find(h, "other"));
    assert_null(lg__st_find(h, ""));
    lg__st_free(h);
    /* Absent or empty: whole tensors. */
    h = accept("{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"\",\"format\":\"pt\"}," TWO, 12);
    assert_false(lg__st_find(h, "w")->has_offsets);
    lg__st_free(h);
    h = accept("{" TWO, 12);
    assert_false(lg__st_find(h, "w")->has_offsets);
    assert_false(h->has_metadata);
    lg__st_free(h);
}

/* Copies a packed box into a packed whole tensor. */
static void place_box(uint8_t *whole, const uint8_t *box, uint32_t ndim, const uint64_t *shape, const uint64_t *offset,
                      const uint64_t *size, size_t element)
{
    size_t count = 1;
    for (uint32_t d = 0; d < ndim; d++) {
        count *= (size_t)size[d];
    }
    for (size_t i = 0; i < count; i++) {
        size_t rest = i, at = 0, stride = 1;
        for (uint32_t d = ndim; d-- > 0;) {
            at += (size_t)(offset[d] + rest % size[d]) * stride;
            rest /= (size_t)size[d];
            stride *= (size_t)shape[d];
        }
        memcpy(whole + at * element, box + i * element, element);
    }
}

/* Checks that the files of a folder hold the tensors of a list, chunk by chunk
 * and byte by byte. */
static void check_folder(const char *folder, size_t want)
{
    char name[200];
    snprintf(name, sizeof name, "%s.expected.tsv", folder);
    vector_file tsv = vectors_read(name);
    size_t tensors = 0;
    for (char *save = NULL, *line = strtok_r((char *)tsv.data, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        char *column[8];
        lg_error err = LG_ERROR_INIT;
        if (line[0] == '#') {
            continue;
        }
        assert_int_equal(vectors_columns(line, column, 8), 8);
        json_t *shape_json = NULL, *chunks = NULL;
        assert_int_equal(lg__json_parse(column[3], strlen(column[3]), &shape_json, &err), LG_OK);
        assert_int_equal(lg__json_parse(column[7], strlen(column[7]), &chunks, &err), LG_OK);
        uint64_t shape[LG_MAX_NDIM];
        uint32_t ndim = (uint32_t)json_array_size(shape_json);
        size_t elements = 1, bytes = (size_t)strtoull(column[4], NULL, 10);
        for (uint32_t d = 0; d < ndim; d++) {
            shape[d] = (uint64_t)json_integer_value(json_array_get(shape_json, d));
            elements *= (size_t)shape[d];
        }
        uint8_t *whole = calloc(1, bytes + 1);
        for (size_t i = 0; i < json_array_size(chunks); i++) {
            const json_t *chunk = json_array_get(chunks, i);
            snprintf(name, sizeof name, "%s/%s", folder, json_string_value(json_object_get(chunk, "file")));
            vector_file v = vectors_read(name);
            lg__st_header *h = NULL;
            if (open_bytes(v.data, v.bytes, &h, &err) != LG_OK) {
                fail_msg("%s: %s", name, err.message);
            }
            const lg__st_tensor *t = lg__st_find(h, column[0]);
            assert_non_null(t);
            assert_true(t->has_offsets);
            assert_int_equal(t->ndim, ndim);
            for (uint32_t d = 0; d < ndim; d++) {
                assert_int_equal(t->saved_offsets[d],
                                 json_integer_value(json_array_get(json_object_get(chunk, "offsets"), d)));
                assert_int_equal(t->shape[d], json_integer_value(json_array_get(json_object_get(chunk, "sizes"), d)));
            }
            if (elements > 0) {
                place_box(whole, v.data + h->data_start + t->begin, ndim, shape, t->saved_offsets, t->shape,
                          bytes / elements);
            }
            lg__st_free(h);
            free(v.data);
        }
        uint8_t digest[LG__SHA256_BYTES];
        char hex[LG_DIGEST_TEXT];
        assert_int_equal(lg__sha256_of(whole, bytes, digest, &err), LG_OK);
        lg__hex(digest, sizeof digest, hex);
        assert_string_equal(hex, column[5]);
        free(whole);
        json_decref(shape_json);
        json_decref(chunks);
        tensors++;
    }
    free(tsv.data);
    assert_int_equal(tensors, want);
}

static void folders_of_pytorch_and_by_its_rules_are_read_chunk_by_chunk(void **state)
{
    (void)state;
    check_folder("hf-dist-torch2.13", 10);
    check_folder("layout-c", 27);
    for (int i = 0; i < 2; i++) {
        static const char *const files[] = {"dual-chunked/shard-00001-model-00001-of-00001.safetensors",
                                            "dual-chunked/shard-00002-model-00001-of-00001.safetensors"};
        lg_error err = LG_ERROR_INIT;
        lg__st_header *h = NULL;
        vector_file v = vectors_read(files[i]);
        assert_int_equal(open_bytes(v.data, v.bytes, &h, &err), LG_OK);
        const lg__st_tensor *w = lg__st_find(h, "model.w");
        assert_int_equal(w->saved_offsets[0], 2 * i);
        float first;
        memcpy(&first, v.data + h->data_start + w->begin, sizeof first);
        assert_true(first == (float)(4 * i));
        lg__st_free(h);
        free(v.data);
    }
}

/* What one file of a faulty folder shows by itself; the rest is for whoever
 * sees all files of a folder. */
static void hazards_that_one_file_shows_are_found(void **state)
{
    (void)state;
    static const struct {
        const char *folder, *file, *words; /* NULL words: fine by itself */
    } expected[] = {
        {"foreign_file", NULL, ""},
        {"info_lacks_a_key", "shard-00001-model-00001-of-00001.safetensors", "does not list tensor \"b\""},
        {"offsets_too_short", NULL, "tensor \"w\": 1 saved_offsets for a shape of 2 dimensions"},
        {"truncated", "shard-00002-model-00001-of-00001.safetensors", "have 191 bytes, need 192"},
    };
    char folders[32][64], files[16][64];
    size_t n_folders = vectors_list("layout-c-hazards", folders, 32), refused = 0;
    assert_int_equal(n_folders, 15);
    bool hit[4] = {false};
    for (size_t i = 0; i < n_folders; i++) {
        char path[300];
        snprintf(path, sizeof path, "layout-c-hazards/%s", folders[i]);
        size_t n_files = vectors_list(path, files, 16);
        assert_true(n_files >= 1);
        for (size_t k = 0; k < n_files; k++) {
            snprintf(path, sizeof path, "layout-c-hazards/%s/%s", folders[i], files[k]);
            vector_file v = vectors_read(path);
            lg_error err = LG_ERROR_INIT;
            lg__st_header *h = NULL;
            lg_status status = open_bytes(v.data, v.bytes, &h, &err);
            lg__st_free(h);
            free(v.data);
            if (status == LG_OK) {
                continue;
            }
            bool known = false;
            for (size_t e = 0; e < 4; e++) {
                if (strcmp(expected[e].folder, folders[i]) == 0 &&
                    (expected[e].file == NULL || strcmp(expected[e].file, files[k]) == 0)) {
                    known = hit[e] = strstr(err.message, expected[e].words) != NULL;
                }
            }
            if (!known) {
                fail_msg("%s: %s", path, err.message);
            }
            refused++;
        }
    }
    for (size_t e = 0; e < 4; e++) {
        if (!hit[e]) {
            fail_msg("not found: %s", expected[e].folder);
        }
    }
    assert_true(refused >= 4);
}

/* ------------------------------------------------------------------ robustness */

static void running_out_of_memory_anywhere_leaves_nothing_behind(void **state)
{
    (void)state;
    vector_file v = vectors_read("layout-c/shard-00001-model-00001-of-00001.safetensors");
    uint64_t n = lg__get_u64le(v.data);
    size_t failures = 0;
    for (size_t i = 0;; i++) {
        lg_error err = LG_ERROR_INIT;
        lg__st_header *h = NULL;
        lg__mem_fail_after(i);
        lg_status status = lg__st_parse((const char *)v.data + 8, n, v.bytes, &h, &err);
        lg__mem_fail_after(SIZE_MAX);
        if (status == LG_OK) {
            lg__st_free(h);
            break;
        }
        assert_int_equal(status, LG_ERR_NOMEM);
        assert_null(h);
        failures++;
    }
    assert_true(failures > 2);
    free(v.data);
}

/* Damaged headers either give an error or a header that holds together; never a
 * fault. Deterministic. */
static void damaged_headers_never_break_the_reader(void **state)
{
    (void)state;
    char files[64][64];
    static const char *const folders[] = {"layout-c", "safetensors-parse", "safetensors-golden"};
    uint32_t random = 20261129;
    size_t opened = 0, refused = 0;
    for (size_t f = 0; f < 3; f++) {
        size_t n_files = vectors_list(folders[f], files, 64);
        for (size_t k = 0; k < n_files; k++) {
            char path[200];
            snprintf(path, sizeof path, "%s/%s", folders[f], files[k]);
            vector_file v = vectors_read(path);
            if (v.bytes < 16) {
                free(v.data);
                continue;
            }
            uint8_t *copy = malloc(v.bytes);
            for (int turn = 0; turn < 150; turn++) {
                static const char likely[] = "{}[]\",:\\0-9eun \n\x00\xff";
                memcpy(copy, v.data, v.bytes);
                for (int edits = 1 + turn % 3; edits > 0; edits--) {
                    random = random * 1664525u + 1013904223u;
                    size_t at = 8 + (random >> 8) % (v.bytes < 1400 ? v.bytes - 8 : 1400);
                    random = random * 1664525u + 1013904223u;
                    uint8_t edit = (uint8_t)(random >> 24);
                    copy[at] = turn % 2 ? (uint8_t)likely[edit % (sizeof likely - 1)] : edit;
                }
                lg_error err = LG_ERROR_INIT;
                lg__st_header *h = NULL;
                if (open_bytes(copy, v.bytes, &h, &err) != LG_OK) {
                    assert_true(err.message[0] != '\0');
                    refused++;
                    continue;
                }
                uint64_t at = 0;
                for (size_t i = 0; i < h->n; i++) {
                    assert_true(h->tensors[i].begin == at);
                    assert_ptr_equal(lg__st_find(h, h->tensors[i].name), &h->tensors[i]);
                    at = h->tensors[i].end;
                }
                assert_true(h->data_start + at == v.bytes);
                lg__st_free(h);
                opened++;
            }
            free(copy);
            free(v.data);
        }
    }
    assert_true(opened > 100);
    assert_true(refused > 1000);
}

static void a_large_hostile_header_does_not_take_many_times_its_size(void **state)
{
    (void)state;
    /* Three megabytes of what costs a JSON library most: small objects and
     * arrays, as one unknown member. A tree of it would take some 200 MB. */
    lg__buf b;
    lg__buf_init(&b, 1 << 24);
    lg__buf_str(&b, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":[");
    for (int i = 0; i < 1000000; i++) {
        lg__buf_str(&b, i ? ",{}" : "{}");
    }
    lg__buf_str(&b, "]}}");
    refuse(b.data, 1, LG_ERR_LIMIT, "its entry takes");
    /* The same behind a string, where only a string may be. */
    b.len = 0;
    lg__buf_str(&b, "{\"__metadata__\":{\"k\":[");
    for (int i = 0; i < 1000000; i++) {
        lg__buf_str(&b, i ? ",{}" : "{}");
    }
    lg__buf_str(&b, "]}}");
    refuse(b.data, 0, LG_ERR_FORMAT, "the value is not a string");
    lg__buf_free(&b);
}

int main(void)
{
#define TEST(f) cmocka_unit_test(f)
#define NAMED(name, f)            \
    {                             \
        name, f, NULL, NULL, NULL \
    }
    const struct CMUnitTest tests[] = {
        NAMED("K12: every dtype goes through one table, odd counts of sub-byte ones too",
              every_dtype_goes_through_one_table),
        NAMED("K12: an unknown dtype is named with its tensor", an_unknown_dtype_is_named_with_its_tensor),
        NAMED("K12: empty tensors are independent and legal at any boundary",
              empty_tensors_are_independent_and_legal_at_any_boundary),
        NAMED("K13: verdicts are the reference's but for the documented few",
              verdicts_are_the_references_but_for_the_documented_few),
        NAMED("K13: headers beyond the vectors are judged as the reference does",
              headers_beyond_the_vectors_are_judged_as_the_reference_does),
        NAMED("K13: a duplicate key is refused and named", a_duplicate_key_is_named),
        NAMED("K15: a NUL in a name is refused", a_nul_in_a_name_is_refused),
        TEST(limits_of_our_own_are_named),
        NAMED("K13: a cut file says what it has and needs", a_cut_file_says_what_it_has_and_needs),
        NAMED("K13: one byte too many is refused", one_byte_too_many_is_refused),
        NAMED("K14 F256: joined files are refused with the guess", joined_files_are_refused_with_the_guess),
        NAMED("K13: files of another kind are told by name", files_of_another_kind_are_told_by_name),
        TEST(a_real_file_whose_length_looks_like_magic_still_opens),
        NAMED("K13: a header over the cap is refused before it is read",
              a_header_over_the_cap_is_refused_before_it_is_read),
        NAMED("K14: sharding info must list every tensor with as many offsets as dimensions",
              sharding_info_must_fit_the_tensors),
        TEST(sharding_info_gives_the_saved_offsets),
        NAMED("K14: folders of PyTorch and by its rules are read chunk by chunk",
              folders_of_pytorch_and_by_its_rules_are_read_chunk_by_chunk),
        NAMED("K14: hazards that one file shows are found", hazards_that_one_file_shows_are_found),
        TEST(running_out_of_memory_anywhere_leaves_nothing_behind),
        NAMED("K13: damaged headers never break the reader", damaged_headers_never_break_the_reader),
        NAMED("K15: a large hostile header does not take many times its size",
              a_large_hostile_header_does_not_take_many_times_its_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
