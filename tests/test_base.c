/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/mem.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------------------------- buffer */

static void a_buffer_holds_its_maximum_and_not_a_byte_more(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg__buf b;
    lg__buf_init(&b, 10);
    lg__buf_str(&b, "12345");
    lg__buf_str(&b, "67890");
    assert_int_equal(lg__buf_check(&b, "text", &err), LG_OK);
    assert_string_equal(b.data, "1234567890");
    lg__buf_add(&b, "x", 1);
    assert_int_equal(lg__buf_check(&b, "the text", &err), LG_ERR_LIMIT);
    assert_string_equal(err.message, "the text would be longer than 10 bytes");
    assert_int_equal(b.len, 10);
    lg__buf_add(&b, "", 0);
    lg__buf_fill(&b, 'x', 0);
    assert_int_equal(b.len, 10);
    assert_true(b.failed);
    lg__buf_free(&b);
    assert_false(b.failed);
}

static void one_append_beyond_the_maximum_is_a_limit_not_missing_memory(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg__buf b;
    lg__buf_init(&b, 100);
    lg__buf_fill(&b, 'x', 200);
    assert_int_equal(lg__buf_check(&b, "text", &err), LG_ERR_LIMIT);
    lg__buf_free(&b);
    lg__buf_init(&b, 100);
    lg__buf_add(&b, "x", SIZE_MAX);
    assert_int_equal(lg__buf_check(&b, "text", &err), LG_ERR_LIMIT);
    lg__buf_free(&b);
}

static void a_buffer_says_when_memory_is_out_and_stays_whole(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg__buf b;
    lg__buf_init(&b, 1 << 20);
    lg__buf_fill(&b, 'a', 300);
    lg__mem_fail_after(0);
    lg__buf_fill(&b, 'b', 5000);
    lg__mem_fail_after(SIZE_MAX);
    assert_int_equal(lg__buf_check(&b, "text", &err), LG_ERR_NOMEM);
    assert_int_equal(b.len, 300);
    lg__buf_fill(&b, 'c', 1);
    assert_int_equal(b.len, 300);
    lg__buf_free(&b);
}

static void buffer_pieces_are_little_endian_and_formatted(void **state)
{
    (void)state;
    lg__buf b;
    lg__buf_init(&b, 100);
    lg__buf_u32le(&b, 0x01020304);
    lg__buf_u64le(&b, UINT64_C(0x1112131415161718));
    lg__buf_fmt(&b, "%s-%d", "n", 7);
    static const unsigned char want[] = {4, 3, 2, 1, 0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, 'n', '-', '7'};
    assert_int_equal(b.len, sizeof want);
    assert_memory_equal(b.data, want, sizeof want);
    assert_int_equal(lg__get_u32le(b.data), 0x01020304);
    assert_true(lg__get_u64le(b.data + 4) == UINT64_C(0x1112131415161718));
    char *taken = lg__buf_take(&b);
    assert_null(b.data);
    assert_int_equal(b.max, 100);
    lg__free(taken);
}

/* --------------------------------------------------------------------- memory */

static void arena_memory_is_zeroed_aligned_and_checked_for_overflow(void **state)
{
    (void)state;
    lg__arena *a = lg__arena_new();
    assert_non_null(a);
    static const size_t sizes[] = {1, 15, 16, 17, 70000, 3, 0, 20000, 65536, 65537, 5};
    unsigned char *pieces[sizeof sizes / sizeof sizes[0]];
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        pieces[i] = lg__arena_alloc(a, sizes[i]);
        assert_non_null(pieces[i]);
        assert_int_equal((uintptr_t)pieces[i] % 16, 0);
        for (size_t k = 0; k < sizes[i]; k++) {
            assert_int_equal(pieces[i][k], 0);
        }
        memset(pieces[i], (int)i + 1, sizes[i]);
    }
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (size_t k = 0; k < sizes[i]; k++) {
            assert_int_equal(pieces[i][k], i + 1);
        }
    }
    assert_null(lg__arena_alloc(a, SIZE_MAX));
    assert_null(lg__arena_array(a, SIZE_MAX / 2, 3));
    assert_non_null(lg__arena_array(a, SIZE_MAX, 0));
    assert_string_equal(lg__arena_strndup(a, "abcdef", 3), "abc");
    assert_string_equal(lg__arena_strdup(a, ""), "");
    lg__mem_fail_after(0);
    assert_null(lg__arena_alloc(a, 100000));
    assert_null(lg__arena_new());
    lg__mem_fail_after(SIZE_MAX);
    assert_non_null(lg__arena_alloc(a, 100000));
    lg__arena_free(a);
    lg__arena_free(NULL);
}

static void arrays_grow_by_doubling_and_keep_their_contents_on_failure(void **state)
{
    (void)state;
    uint32_t *array = NULL;
    size_t cap = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        assert_true(lg__grow((void **)&array, &cap, i, sizeof *array));
        array[i] = i;
    }
    size_t full = cap;
    lg__mem_fail_after(0);
    assert_false(lg__grow((void **)&array, &cap, full, sizeof *array));
    lg__mem_fail_after(SIZE_MAX);
    assert_int_equal(cap, full);
    assert_int_equal(array[999], 999);
    cap = SIZE_MAX / 2;
    assert_false(lg__grow((void **)&array, &cap, SIZE_MAX / 2, sizeof *array));
    lg__free(array);
}

static void the_failing_heap_counts_down_and_is_reset(void **state)
{
    (void)state;
    lg__mem_fail_after(2);
    void *one = lg__malloc(1), *two = lg__calloc(1, 1), *three = lg__malloc(1), *four = lg__malloc(1);
    lg__mem_fail_after(SIZE_MAX);
    assert_non_null(one);
    assert_non_null(two);
    assert_null(three);
    assert_null(four);
    void *five = lg__malloc(0);
    assert_non_null(five);
    lg__free(one);
    lg__free(two);
    lg__free(five);
    assert_null(lg__calloc(SIZE_MAX / 2, 3));
    assert_null(lg__pages_new(SIZE_MAX / 4)); /* no address space has room for that */
    assert_null(lg__pages_new(SIZE_MAX));
}

/* --------------------------------------------------------------------- hashes */

static void crc32c_gives_the_known_answers_of_rfc_3720(void **state)
{
    (void)state;
    unsigned char bytes[32];
    assert_int_equal(lg__crc32c(0, "", 0), 0);
    assert_int_equal(lg__crc32c(0, "123456789", 9), 0xe3069283);
    memset(bytes, 0, sizeof bytes);
    assert_int_equal(lg__crc32c(0, bytes, sizeof bytes), 0x8a9136aa);
    memset(bytes, 0xff, sizeof bytes);
    assert_int_equal(lg__crc32c(0, bytes, sizeof bytes), 0x62a8ab43);
    for (unsigned i = 0; i < sizeof bytes; i++) {
        bytes[i] = (unsigned char)i;
    }
    assert_int_equal(lg__crc32c(0, bytes, sizeof bytes), 0x46dd794e);
    for (unsigned i = 0; i < sizeof bytes; i++) {
        bytes[i] = (unsigned char)(31 - i);
    }
    assert_int_equal(lg__crc32c(0, bytes, sizeof bytes), 0x113fdb5c);
}

static void crc32c_of_parts_is_crc32c_of_the_whole(void **state)
{
    (void)state;
    enum { N = 5000 };
    static unsigned char bytes[N + 8];
    uint32_t random = 12345;
    for (size_t i = 0; i < sizeof bytes; i++) {
        random = random * 1664525u + 1013904223u;
        bytes[i] = (unsigned char)(random >> 24);
    }
    for (size_t start = 0; start < 8; start++) {
        uint32_t whole = lg__crc32c(0, bytes + start, N);
        for (size_t cut = 0; cut <= N; cut += 37) {
            uint32_t parts = lg__crc32c(lg__crc32c(0, bytes + start, cut), bytes + start + cut, N - cut);
            assert_int_equal(parts, whole);
        }
    }
}

static void sha256_gives_the_known_answers_of_fips_180(void **state)
{
    (void)state;
    static const struct {
        const char *text, *hex;
    } known[] = {{"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
                 {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
                 {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                  "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"}};
    lg_error err = LG_ERROR_INIT;
    lg__sha256 *h = lg__sha256_new();
    assert_non_null(h);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        uint8_t digest[LG__SHA256_BYTES], streamed[LG__SHA256_BYTES];
        char hex[LG_DIGEST_TEXT];
        assert_int_equal(lg__sha256_of(known[i].text, strlen(known[i].text), digest, &err), LG_OK);
        lg__hex(digest, sizeof digest, hex);
        assert_string_equal(hex, known[i].hex);
        for (const char *p = known[i].text; *p != '\0'; p++) {
            assert_true(lg__sha256_add(h, p, 1));
        }
        assert_true(lg__sha256_end(h, streamed));
        assert_memory_equal(streamed, digest, sizeof digest);
    }
    lg__sha256_free(h);
    lg__sha256_free(NULL);
}

static void hex_is_read_in_lower_case_and_exact_length_only(void **state)
{
    (void)state;
    uint8_t out[2] = {9, 9};
    char text[5];
    assert_true(lg__unhex("00ff", out, 2));
    assert_int_equal(out[0], 0);
    assert_int_equal(out[1], 255);
    lg__hex(out, 2, text);
    assert_string_equal(text, "00ff");
    static const char *const bad[] = {"", "0", "00f", "00ff0", "00FF", "00fg", "0x00", " 0ff", "00f\n"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_false(lg__unhex(bad[i], out, 2));
    }
    assert_true(lg__unhex("", out, 0));
}

static void random_bytes_differ_and_time_does_not_run_backwards(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    uint8_t a[16] = {0}, b[16] = {0};
    assert_int_equal(lg__random(a, sizeof a, &err), LG_OK);
    assert_int_equal(lg__random(b, sizeof b, &err), LG_OK);
    assert_memory_not_equal(a, b, sizeof a);
    uint64_t before = lg__now_ms();
    assert_true(lg__now_ms() >= before);
    char utc[LG_CREATED_TEXT];
    lg__utc(utc);
    assert_int_equal(strlen(utc), LG_CREATED_TEXT - 1);
    assert_int_equal(utc[10], 'T');
    assert_int_equal(utc[19], 'Z');
}

/* ----------------------------------------------------------------------- JSON */

static lg_status parse(const char *text, size_t bytes, lg_error *err)
{
    json_t *value = NULL;
    lg_status status = lg__json_parse(text, bytes, &value, err);
    json_decref(value);
    return status;
}

static void json_that_is_not_strict_is_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",
        " ",
        "{",
        "{\"a\":1,}",
        "[1,]",
        "[1 2]",
        "{a:1}",
        "{'a':1}",
        "{\"a\":1,\"a\":2}",
        "{\"b\":{\"a\":1,\"\\u0061\":1}}",
        "01",
        "+1",
        "1.",
        ".5",
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "[1]]",
        "{} {}",
        "{}x",
        "// c\n{}",
        "\"\x01\"",
        "\"\\x41\"",
        "\"\\ud800\"",
        "\"\\udc00x\"",
        "\"\xff\"",
        "\"\xc0\x80\"",
        "\"\xed\xa0\x80\"",
        "\"\xf4\x90\x80\x80\"",
        "\xef\xbb\xbf{}",
        "{\"a\\u0000b\":1}",
        "18446744073709551616",
        "tru",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        lg_error err = LG_ERROR_INIT;
        if (parse(bad[i], strlen(bad[i]), &err) != LG_ERR_FORMAT) {
            fail_msg("accepted: %s", bad[i]);
        }
        assert_memory_equal(err.message, "invalid JSON", 12);
    }
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(parse("{}\0", 3, &err), LG_ERR_FORMAT);
    assert_int_equal(parse("[2\0]", 4, &err), LG_ERR_FORMAT);
    assert_int_equal(parse("[true\0]", 7, &err), LG_ERR_FORMAT);
    assert_int_equal(parse("[1.5\0,2]", 8, &err), LG_ERR_FORMAT);
    assert_int_equal(parse("\"a\0b\"", 5, &err), LG_ERR_FORMAT);
    assert_int_equal(parse("2\0", 2, &err), LG_ERR_FORMAT);
}

static void messages_about_json_are_valid_utf8_whatever_the_text_was(void **state)
{
    (void)state;
    static const char *const bad[] = {"\"\xc3\"", "\"\xc3\xa9\xc3\"", "[\xc3]", "\"ab\xe2\x82", "\xff"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        lg_error err = LG_ERROR_INIT;
        assert_int_equal(parse(bad[i], strlen(bad[i]), &err), LG_ERR_FORMAT);
        assert_true(lg__utf8_valid(err.message, strlen(err.message)));
    }
}

static void strict_json_of_every_kind_is_read(void **state)
{
    (void)state;
    static const char *const good[] = {"null",
                                       "true",
                                       " 1 ",
                                       "-1",
                                       "1.5",
                                       "\"x\"",
                                       "[]",
                                       "{}",
                                       "\t{\n}\r",
                                       "1e30",
                                       "-0.0",
                                       "\"\\ud83d\\ude00\"",
                                       "9223372036854775807",
                                       "\"a\\u0000b\"",
                                       "{\"a\":[{\"a\":1},{\"a\":2}]}"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        lg_error err = LG_ERROR_INIT;
        if (parse(good[i], strlen(good[i]), &err) != LG_OK) {
            fail_msg("refused: %s: %s", good[i], err.message);
        }
    }
}

static void json_nested_deeper_than_64_is_refused_before_recursion(void **state)
{
    (void)state;
    static char text[2000002];
    lg_error err = LG_ERROR_INIT;
    for (size_t depth = 63; depth <= 66; depth++) {
        memset(text, '[', depth);
        memset(text + depth, ']', depth);
        assert_int_equal(parse(text, 2 * depth, &err), depth <= LG__JSON_MAX_DEPTH ? LG_OK : LG_ERR_FORMAT);
    }
    memset(text, '[', sizeof text);
    assert_int_equal(parse(text, sizeof text, &err), LG_ERR_FORMAT);
    assert_non_null(strstr(err.message, "nested"));
    /* Brackets in strings do not count, escaped quotes do not end them. */
    size_t n = 0;
    text[n++] = '"';
    for (int i = 0; i < 100; i++) {
        memcpy(text + n, "[\\\"", 3);
        n += 3;
    }
    text[n++] = '"';
    assert_int_equal(parse(text, n, &err), LG_OK);
}

static void json_members_are_asked_for_by_type_and_missing_ones_named(void **state)
{
    (void)state;
    static const char text[] = "{\"n\":7,\"big\":\"18446744073709551615\",\"neg\":-1,\"s\":\"text\",\"z\":null,"
                               "\"b\":true,\"nul\":\"a\\u0000b\",\"lead\":\"07\",\"over\":\"18446744073709551616\"}";
    lg_error err = LG_ERROR_INIT;
    json_t *o = NULL;
    uint64_t v = 1;
    const char *s = NULL;
    const json_t *member = NULL;
    assert_int_equal(lg__json_parse(text, sizeof text - 1, &o, &err), LG_OK);
    assert_int_equal(lg__json_get_u64(o, "n", &v, &err), LG_OK);
    assert_int_equal(v, 7);
    assert_int_equal(lg__json_get_u64(o, "big", &v, &err), LG_OK);
    assert_true(v == UINT64_MAX);
    static const char *const bad[] = {"neg", "s", "z", "b", "nul", "lead", "over", "absent"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(lg__json_get_u64(o, bad[i], &v, &err), LG_ERR_FORMAT);
        assert_non_null(strstr(err.message, bad[i]));
    }
    assert_true(v == UINT64_MAX);
    assert_int_equal(lg__json_get_str(o, "s", 4, &s, &err), LG_OK);
    assert_string_equal(s, "text");
    assert_int_equal(lg__json_get_str(o, "s", 3, &s, &err), LG_ERR_LIMIT);
    assert_int_equal(lg__json_get_str(o, "nul", 30, &s, &err), LG_ERR_FORMAT);
    assert_int_equal(lg__json_get_str(o, "n", 30, &s, &err), LG_ERR_FORMAT);
    assert_int_equal(lg__json_get(o, "z", JSON_STRING, &member, &err), LG_ERR_FORMAT);
    static const struct {
        json_type type;
        const char *says;
    } kinds[] = {{JSON_OBJECT, "\"s\" is not an object"},   {JSON_ARRAY, "\"s\" is not an array"},
                 {JSON_INTEGER, "\"s\" is not an integer"}, {JSON_REAL, "\"s\" is not a number"},
                 {JSON_TRUE, "\"s\" is not a boolean"},     {JSON_NULL, "\"s\" is not null"}};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        assert_int_equal(lg__json_get(o, "s", kinds[i].type, &member, &err), LG_ERR_FORMAT);
        assert_string_equal(err.message, kinds[i].says);
    }
    assert_int_equal(lg__json_optional(o, "z", JSON_STRING, &member, &err), LG_OK);
    assert_null(member);
    assert_int_equal(lg__json_get(o, "b", JSON_FALSE, &member, &err), LG_OK);
    assert_true(json_is_true(member));
    json_decref(o);
}

static void json_text_is_escaped_as_the_safetensors_writer_does(void **state)
{
    (void)state;
    lg__buf b;
    lg__buf_init(&b, 1000);
    static const char raw[] = "\"\\\b\t\n\f\r\x01\x1f\x7f/é\0z";
    lg__buf_json_str(&b, raw, sizeof raw - 1);
    assert_string_equal(b.data, "\"\\\"\\\\\\b\\t\\n\\f\\r\\u0001\\u001f\x7f/é\\u0000z\"");
    lg__buf_free(&b);
    lg__buf_json_u64(&b, UINT64_C(1) << 53);
    lg__buf_str(&b, " ");
    lg__buf_json_u64(&b, (UINT64_C(1) << 53) + 1);
    assert_string_equal(b.data, "9007199254740992 \"9007199254740993\"");
    lg__buf_free(&b);
}

static void utf8_is_checked_to_the_last_bit(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        bool good;
    } cases[] = {
        {"", true},
        {"plain", true},
        {"\xc2\x80", true},
        {"\xdf\xbf", true},
        {"\xe0\xa0\x80", true},
        {"\xed\x9f\xbf", true},
        {"\xee\x80\x80", true},
        {"\xef\xbf\xbf", true},
        {"\xf0\x90\x80\x80", true},
        {"\xf4\x8f\xbf\xbf", true},
        {"\x80", false},
        {"\xbf", false},
        {"\xc0\x80", false},
        {"\xc1\xbf", false},
        {"\xe0\x80\x80", false},
        {"\xe0\x9f\xbf", false},
        {"\xed\xa0\x80", false},
        {"\xed\xbf\xbf", false},
        {"\xf0\x80\x80\x80", false},
        {"\xf0\x8f\xbf\xbf", false},
        {"\xf4\x90\x80\x80", false},
        {"\xf8\x88\x80\x80\x80", false},
        {"\xff", false},
        {"\xc2", false},
        {"\xe2\x82", false},
        {"\xf0\x9f\x98", false},
        {"\xc2x", false},
        {"a\xe2\x82z", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (lg__utf8_valid(cases[i].bytes, strlen(cases[i].bytes)) != cases[i].good) {
            fail_msg("case %zu", i);
        }
    }
}

/* ---------------------------------------------------------------------- names */

static void control_bytes_in_tensor_names_are_refused(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg__name_check("tensor", "a.b é \"x\"\\", 11, &err), LG_OK);
    assert_int_equal(lg__name_check("tensor", "", 0, &err), LG_ERR_INVALID);
    assert_int_equal(lg__name_check("tensor", "a\0hidden", 8, &err), LG_ERR_INVALID);
    assert_non_null(strstr(err.message, "0x00"));
    assert_int_equal(lg__name_check("key", "a\nb", 3, &err), LG_ERR_INVALID);
    assert_string_equal(err.message, "key name \"a\\x0ab\" has the control byte 0x0a in it");
    assert_int_equal(lg__name_check("tensor", "a\x7f", 2, &err), LG_ERR_INVALID);
    assert_int_equal(lg__name_check("tensor", "a\xff", 2, &err), LG_ERR_INVALID);
    assert_int_equal(lg__name_check("tensor", "__metadata__", 12, &err), LG_ERR_INVALID);
    assert_int_equal(lg__name_check("tensor", "__metadata__x", 13, &err), LG_OK);
    static char longest[LG_MAX_NAME + 2];
    memset(longest, 'n', sizeof longest - 1);
    assert_int_equal(lg__name_check("tensor", longest, LG_MAX_NAME, &err), LG_OK);
    assert_int_equal(lg__name_check("tensor", longest, LG_MAX_NAME + 1, &err), LG_ERR_LIMIT);
    for (size_t i = 1; i + 3 < sizeof longest; i += 3) {
        memcpy(longest + i, "€", 3);
    }
    assert_int_equal(lg__name_check("tensor", longest, sizeof longest - 1, &err), LG_ERR_LIMIT);
    assert_true(lg__utf8_valid(err.message, strlen(err.message)));
}

static void paths_that_could_leave_the_root_are_refused(void **state)
{
    (void)state;
    static const char *const good[] = {"a", ".owner-3", "step/file", "a..b", "...", "a/..."};
    static const char *const bad[] = {"", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "./a", "a/.", "a/b/c"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        assert_true(lg__path_valid(good[i]));
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (lg__path_valid(bad[i])) {
            fail_msg("accepted: %s", bad[i]);
        }
    }
    char longest[257];
    memset(longest, 'a', sizeof longest);
    longest[255] = '\0';
    assert_true(lg__path_valid(longest));
    longest[255] = 'a';
    longest[256] = '\0';
    assert_false(lg__path_valid(longest));
}

/* --------------------------------------------------------------------- errors */

static void names_from_files_are_shown_without_control_bytes_and_cut_at_characters(void **state)
{
    (void)state;
    char out[24];
    assert_string_equal(lg__printable("plain", out, sizeof out), "plain");
    assert_string_equal(lg__printable("a\x1b[2J\n", out, 12), "a\\x1b[2J…");
    assert_string_equal(lg__printable("é\x7f", out, sizeof out), "é\\x7f");
    assert_string_equal(lg__printable("a\xff\xc3(\xe2\x82", out, 24), "a\\xff\\xc3(\\xe2\\x82");
    for (size_t pad = 0; pad < 6; pad++) {
        char text[64] = "";
        memset(text, 'x', pad);
        for (int i = 0; i < 8; i++) {
            strcat(text, "€");
        }
        for (size_t bytes = 4; bytes <= 16; bytes++) {
            lg__printable(text, out, bytes);
            assert_true(strlen(out) < bytes);
            assert_true(lg__utf8_valid(out, strlen(out)));
            assert_string_equal(out + strlen(out) - 3, "…");
        }
    }
}

static void a_text_that_is_cut_keeps_whole_characters(void **state)
{
    (void)state;
    char out[8];
    for (size_t pad = 0; pad < 4; pad++) {
        char text[32] = "";
        memset(text, 'x', pad);
        strcat(text, "€€€€");
        lg__text_copy(out, sizeof out, text);
        assert_int_equal(strlen(out), pad + (7 - pad) / 3 * 3);
        assert_true(lg__utf8_valid(out, strlen(out)));
        assert_memory_equal(out, text, strlen(out));
    }
    lg__text_copy(out, sizeof out, "1234567");
    assert_string_equal(out, "1234567");
    lg__text_copy(out, sizeof out, "12345678");
    assert_string_equal(out, "1234567");
    lg__text_copy(out, 1, "x");
    assert_string_equal(out, "");
    /* What is no UTF-8 is not lost by it. */
    lg__text_copy(out, sizeof out, "\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80");
    assert_int_equal(strlen(out), 4);
}

static void overlong_error_messages_are_cut_at_a_characters_edge(void **state)
{
    (void)state;
    for (size_t pad = 0; pad < 4; pad++) {
        char text[3 * LG_ERROR_MESSAGE_MAX] = "";
        memset(text, 'x', pad);
        for (size_t i = pad; i + 4 < sizeof text; i += 3) {
            memcpy(text + i, "€", 3);
        }
        lg_error err = LG_ERROR_INIT;
        assert_int_equal(lg_error_set(&err, LG_ERR_IO, "%s", text), LG_ERR_IO);
        assert_true(strlen(err.message) < LG_ERROR_MESSAGE_MAX);
        assert_true(strlen(err.message) > LG_ERROR_MESSAGE_MAX - 10);
        assert_true(lg__utf8_valid(err.message, strlen(err.message)));
        assert_string_equal(err.message + strlen(err.message) - 3, "…");
        assert_int_equal(lg_error_wrap(&err, "outer %zu", pad), LG_ERR_IO);
        assert_memory_equal(err.message, "outer ", 6);
        assert_true(lg__utf8_valid(err.message, strlen(err.message)));
        assert_true(strlen(err.message) < LG_ERROR_MESSAGE_MAX);
    }
}

static void errors_lead_from_the_outside_in_and_keep_their_cause(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg_error_set_errno(&err, ENOSPC, "write at %d", 1048576), LG_ERR_NO_SPACE);
    err.rank = 2;
    assert_int_equal(lg_error_wrap(&err, "rank %d", 2), LG_ERR_NO_SPACE);
    assert_int_equal(lg_error_wrap(&err, "save step %d", 500), LG_ERR_NO_SPACE);
    assert_string_equal(err.message, "save step 500: rank 2: write at 1048576: No space left on device");
    assert_int_equal(err.os_errno, ENOSPC);
    assert_int_equal(err.rank, 2);
    assert_int_equal(lg_error_set(NULL, LG_ERR_STATE, "nobody listens"), LG_ERR_STATE);
    assert_int_equal(lg_error_wrap(NULL, "nobody listens"), LG_ERR_INTERNAL);
    static const struct {
        int os_errno;
        lg_status status;
    } map[] = {{ENOENT, LG_ERR_NOT_FOUND}, {EEXIST, LG_ERR_EXISTS},   {ENOTEMPTY, LG_ERR_NOT_EMPTY},
               {EDQUOT, LG_ERR_NO_SPACE},  {EROFS, LG_ERR_READ_ONLY}, {EACCES, LG_ERR_PERMISSION},
               {EIO, LG_ERR_IO},           {ENOMEM, LG_ERR_NOMEM},    {EOPNOTSUPP, LG_ERR_UNSUPPORTED},
               {ETIMEDOUT, LG_ERR_TIMEOUT}};
    for (size_t i = 0; i < sizeof map / sizeof map[0]; i++) {
        assert_int_equal(lg_error_set_errno(&err, map[i].os_errno, "x"), map[i].status);
    }
}

static void every_status_has_a_name_and_a_text(void **state)
{
    (void)state;
    assert_string_equal(lg_status_name(LG_ERR_NO_SPACE), "LG_ERR_NO_SPACE");
    assert_string_equal(lg_status_text(LG_ERR_NO_SPACE), "no space left");
    assert_string_equal(lg_status_name((lg_status)1000), "LG_ERR_?");
    assert_string_equal(lg_status_text((lg_status)1000), "unknown status");
    assert_string_equal(lg_version(), "0.1.0");
}

int main(void)
{
#define TEST(f) cmocka_unit_test(f)
    const struct CMUnitTest tests[] = {
        TEST(a_buffer_holds_its_maximum_and_not_a_byte_more),
        TEST(one_append_beyond_the_maximum_is_a_limit_not_missing_memory),
        TEST(a_buffer_says_when_memory_is_out_and_stays_whole),
        TEST(buffer_pieces_are_little_endian_and_formatted),
        TEST(arena_memory_is_zeroed_aligned_and_checked_for_overflow),
        TEST(arrays_grow_by_doubling_and_keep_their_contents_on_failure),
        TEST(the_failing_heap_counts_down_and_is_reset),
        TEST(crc32c_gives_the_known_answers_of_rfc_3720),
        TEST(crc32c_of_parts_is_crc32c_of_the_whole),
        TEST(sha256_gives_the_known_answers_of_fips_180),
        TEST(hex_is_read_in_lower_case_and_exact_length_only),
        TEST(random_bytes_differ_and_time_does_not_run_backwards),
        {"K13: JSON that is not strict is refused, duplicate keys too", json_that_is_not_strict_is_refused, NULL, NULL,
         NULL},
        TEST(messages_about_json_are_valid_utf8_whatever_the_text_was),
        TEST(strict_json_of_every_kind_is_read),
        {"K15: JSON nested deeper than 64 is refused before recursion",
         json_nested_deeper_than_64_is_refused_before_recursion, NULL, NULL, NULL},
        TEST(json_members_are_asked_for_by_type_and_missing_ones_named),
        TEST(json_text_is_escaped_as_the_safetensors_writer_does),
        TEST(utf8_is_checked_to_the_last_bit),
        {"K15: control bytes in tensor names are refused, __metadata__ too", control_bytes_in_tensor_names_are_refused,
         NULL, NULL, NULL},
        {"K15: paths that could leave the root are refused", paths_that_could_leave_the_root_are_refused, NULL, NULL,
         NULL},
        TEST(names_from_files_are_shown_without_control_bytes_and_cut_at_characters),
        TEST(a_text_that_is_cut_keeps_whole_characters),
        TEST(overlong_error_messages_are_cut_at_a_characters_edge),
        TEST(errors_lead_from_the_outside_in_and_keep_their_cause),
        TEST(every_status_has_a_name_and_a_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
