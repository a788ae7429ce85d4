/* SPDX-License-Identifier: Apache-2.0 */
#include "format/record.h"

#include "base/error.h"
#include "base/hash.h"
#include "format/manifest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static lg__pin_record a_pin(void)
{
    lg__pin_record r = {.n = 3, .pinned = true, .created = "2026-11-29T18:31:57Z", .reason = "paper \"figure 4\" – ü"};
    for (unsigned i = 0; i < sizeof r.manifest; i++) {
        r.manifest[i] = (uint8_t)(i * 7 + 1);
    }
    return r;
}

static lg__rollback_record a_rollback(void)
{
    lg__rollback_record r = {.run_id = "0123456789abcdef0123456789abcdef",
                             .generation = {4, 1},
                             .target = {3, UINT64_C(1) << 60},
                             .target_step = 400,
                             .created = "2026-11-29T18:31:57Z",
                             .reason = "loss spike at 612"};
    for (unsigned i = 0; i < sizeof r.target_manifest; i++) {
        r.target_manifest[i] = (uint8_t)(i * 5 + 2);
    }
    return r;
}

/* Two kinds of record under one pair of functions, for tests that hold for both. */
static lg_status encode(int kind, lg__buf *out, lg_error *err)
{
    lg__pin_record p = a_pin();
    lg__rollback_record r = a_rollback();
    return kind == 0 ? lg__pin_encode(&p, out, err) : lg__rollback_encode(&r, out, err);
}

static lg_status decode(int kind, const char *bytes, size_t n, lg_error *err)
{
    lg__pin_record p;
    lg__rollback_record r;
    /* An exact copy on the heap, so that a read behind the end is seen. */
    char *copy = malloc(n > 0 ? n : 1);
    assert_non_null(copy);
    memcpy(copy, bytes, n);
    lg_status st = kind == 0 ? lg__pin_decode(copy, n, &p, err) : lg__rollback_decode(copy, n, &r, err);
    free(copy);
    return st;
}

static void a_pin_record_comes_back_as_it_was(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg__buf b;
    lg__buf_init(&b, LG__RECORD_MAX);
    lg__pin_record r = a_pin(), back = {0};
    assert_int_equal(lg__pin_encode(&r, &b, &err), LG_OK);
    assert_int_equal(lg__pin_decode(b.data, b.len, &back, &err), LG_OK);
    assert_int_equal(back.n, r.n);
    assert_int_equal(back.pinned, r.pinned);
    assert_memory_equal(back.manifest, r.manifest, sizeof r.manifest);
    assert_string_equal(back.created, r.created);
    assert_string_equal(back.reason, r.reason);
    r.pinned = false;
    lg__buf_free(&b);
    assert_int_equal(lg__pin_encode(&r, &b, &err), LG_OK);
    assert_int_equal(lg__pin_decode(b.data, b.len, &back, &err), LG_OK);
    assert_false(back.pinned);
    lg__buf_free(&b);
}

static void a_rollback_record_comes_back_as_it_was(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg__buf b;
    lg__buf_init(&b, LG__RECORD_MAX);
    lg__rollback_record r = a_rollback(), back = {0};
    assert_int_equal(lg__rollback_encode(&r, &b, &err), LG_OK);
    assert_int_equal(lg__rollback_decode(b.data, b.len, &back, &err), LG_OK);
    assert_string_equal(back.run_id, r.run_id);
    assert_memory_equal(&back.generation, &r.generation, sizeof r.generation);
    assert_memory_equal(&back.target, &r.target, sizeof r.target);
    assert_int_equal(back.target_step, r.target_step);
    assert_memory_equal(back.target_manifest, r.target_manifest, sizeof r.target_manifest);
    assert_string_equal(back.created, r.created);
    assert_string_equal(back.reason, r.reason);
    lg__buf_free(&b);
}

static void records_of_version_1_are_these_bytes(void **state)
{
    (void)state;
    static const char *const golden[] = {
        "{\"crc32c\":\"b306e277\",\"kind\":\"pin\",\"version\":1,\"n\":3,\"pinned\":true,"
        "\"manifest\":\"01080f161d242b323940474e555c636a71787f868d949ba2a9b0b7bec5ccd3da\","
        "\"created\":\"2026-11-29T18:31:57Z\",\"reason\":\"paper \\\"figure 4\\\" – ü\"}\n",
        "{\"crc32c\":\"147d2749\",\"kind\":\"rollback\",\"version\":1,"
        "\"run\":\"0123456789abcdef0123456789abcdef\",\"generation\":[4,1],\"target\":{\"step\":400,"
        "\"generation\":[3,\"1152921504606846976\"],"
        "\"manifest\":\"02070c11161b20252a2f34393e43484d52575c61666b70757a7f84898e93989d\"},"
        "\"created\":\"2026-11-29T18:31:57Z\",\"reason\":\"loss spike at 612\"}\n"};
    for (int kind = 0; kind < 2; kind++) {
        lg_error err = LG_ERROR_INIT;
        lg__buf b;
        lg__buf_init(&b, LG__RECORD_MAX);
        assert_int_equal(encode(kind, &b, &err), LG_OK);
        assert_string_equal(b.data, golden[kind]);
        lg__buf_free(&b);
    }
}

static void every_flipped_bit_of_a_record_is_found(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        lg_error err = LG_ERROR_INIT;
        lg__buf b;
        lg__buf_init(&b, LG__RECORD_MAX);
        assert_int_equal(encode(kind, &b, &err), LG_OK);
        for (size_t i = 0; i < b.len; i++) {
            for (int bit = 0; bit < 8; bit++) {
                b.data[i] = (char)(b.data[i] ^ (1 << bit));
                lg_status st = decode(kind, b.data, b.len, &err);
                if (st != LG_ERR_CORRUPT && st != LG_ERR_FORMAT) {
                    fail_msg("kind %d: byte %zu, bit %d: %s", kind, i, bit, lg_status_name(st));
                }
                b.data[i] = (char)(b.data[i] ^ (1 << bit));
            }
        }
        assert_int_equal(decode(kind, b.data, b.len, &err), LG_OK);
        lg__buf_free(&b);
    }
}

static void every_cut_record_is_refused_and_says_how_long_it_is(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        lg_error err = LG_ERROR_INIT;
        lg__buf b;
        lg__buf_init(&b, LG__RECORD_MAX);
        assert_int_equal(encode(kind, &b, &err), LG_OK);
        for (size_t n = 0; n < b.len; n++) {
            assert_int_equal(decode(kind, b.data, n, &err), LG_ERR_CORRUPT);
            char size[64];
            snprintf(size, sizeof size, "%zu bytes are there", n);
            assert_non_null(strstr(err.message, size));
        }
        lg__buf_free(&b);
    }
}

static void bytes_behind_a_record_are_refused(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        lg_error err = LG_ERROR_INIT;
        lg__buf b;
        lg__buf_init(&b, LG__RECORD_MAX);
        assert_int_equal(encode(kind, &b, &err), LG_OK);
        lg__buf_str(&b, "}}");
        assert_int_equal(decode(kind, b.data, b.len, &err), LG_ERR_CORRUPT);
        lg__buf_free(&b);
    }
}

/* Seals `body` and decodes it as a record. */
static lg_status decode_body(int kind, const char *body, lg_error *err)
{
    lg__buf b;
    lg__buf_init(&b, LG__RECORD_MAX);
    assert_int_equal(lg__sealed_json(body, strlen(body), &b, err), LG_OK);
    lg_status st = decode(kind, b.data, b.len, err);
    lg__buf_free(&b);
    return st;
}

#define DIGEST "\"0000000000000000000000000000000000000000000000000000000000000000\""
#define RUN "\"run\":\"0123456789abcdef0123456789abcdef\","
#define TIME "\"created\":\"2026-11-29T18:31:57Z\""
#define TARGET "\"target\":{\"step\":4,\"generation\":[3,9],\"manifest\":" DIGEST "}"

static void a_malformed_record_is_refused_by_the_member_that_is_wrong(void **state)
{
    (void)state;
    static const struct {
        int kind;
        const char *body;
        lg_status status;
        const char *says;
    } cases[] = {
        {0, "\"kind\":\"pin\",\"version\":1,\"n\":1,\"pinned\":true,\"manifest\":" DIGEST "," TIME ",\"reason\":\"\"}",
         LG_OK, NULL},
        {0,
         "\"kind\":\"pin\",\"version\":1,\"n\":1,\"pinned\":true,\"manifest\":" DIGEST "," TIME
         ",\"reason\":\"\",\"later\":{}}",
         LG_OK, NULL},
        {0, "\"version\":1}", LG_ERR_FORMAT, "kind: missing"},
        {0, "\"kind\":\"metric\",\"version\":1}", LG_ERR_FORMAT, "metric"},
        {0, "\"kind\":\"rollback\",\"version\":1}", LG_ERR_FORMAT, "rollback"},
        {1, "\"kind\":\"pin\",\"version\":1}", LG_ERR_FORMAT, "pin"},
        {0, "\"kind\":\"pin\",\"version\":2}", LG_ERR_VERSION, "version 2"},
        {1, "\"kind\":\"rollback\",\"version\":\"18446744073709551615\"}", LG_ERR_VERSION, "18446744073709551615"},
        {0, "\"kind\":\"pin\",\"version\":0}", LG_ERR_FORMAT, "version 0"},
        {0, "\"kind\":\"pin\"}", LG_ERR_FORMAT, "version: missing"},
        {0, "\"kind\":\"pin\",\"version\":1.0}", LG_ERR_FORMAT, "version:"},
        {0, "\"kind\":\"pin\",\"version\":1,\"n\":0}", LG_ERR_FORMAT, "n:"},
        {0, "\"kind\":\"pin\",\"version\":1,\"n\":4294967296}", LG_ERR_FORMAT, "n:"},
        {0, "\"kind\":\"pin\",\"version\":1,\"n\":1,\"pinned\":1}", LG_ERR_FORMAT, "pinned: not a boolean"},
        {0, "\"kind\":\"pin\",\"version\":1,\"n\":1,\"pinned\":null}", LG_ERR_FORMAT, "pinned:"},
        {0, "\"kind\":\"pin\",\"version\":1,\"n\":1,\"pinned\":true,\"manifest\":\"00\"}", LG_ERR_FORMAT, "manifest:"},
        {0,
         "\"kind\":\"pin\",\"version\":1,\"n\":1,\"pinned\":true,\"manifest\":" DIGEST
         ",\"created\":\"yesterday\",\"reason\":\"\"}",
         LG_ERR_FORMAT, "created:"},
        {0, "\"kind\":\"pin\",\"version\":1,\"n\":1,\"pinned\":true,\"manifest\":" DIGEST "," TIME "}", LG_ERR_FORMAT,
         "reason: missing"},
        {0,
         "\"kind\":\"pin\",\"version\":1,\"n\":1,\"pinned\":true,\"manifest\":" DIGEST "," TIME
         ",\"reason\":\"a\\u0000b\"}",
         LG_ERR_FORMAT, "reason:"},
        {0,
         "\"kind\":\"pin\",\"version\":1,\"n\":1,\"pinned\":true,\"manifest\":" DIGEST "," TIME
         ",\"reason\":\"a\\nb\"}",
         LG_ERR_FORMAT, "control byte 0x0a"},
        {0, "\"kind\":\"pin\",\"kind\":\"pin\",\"version\":1}", LG_ERR_FORMAT, "duplicate"},
        {1, "\"kind\":\"rollback\",\"version\":1," RUN "\"generation\":[4,1]," TARGET "," TIME ",\"reason\":\"x\"}",
         LG_OK, NULL},
        {1, "\"kind\":\"rollback\",\"version\":1," RUN "\"generation\":[3,9]," TARGET "," TIME ",\"reason\":\"x\"}",
         LG_ERR_FORMAT, "target.generation: not older"},
        {1, "\"kind\":\"rollback\",\"version\":1," RUN "\"generation\":[2,9]," TARGET "," TIME ",\"reason\":\"x\"}",
         LG_ERR_FORMAT, "target.generation: not older"},
        {1, "\"kind\":\"rollback\",\"version\":1," RUN "\"generation\":[4]," TARGET "," TIME ",\"reason\":\"x\"}",
         LG_ERR_FORMAT, "generation: 1 numbers"},
        {1, "\"kind\":\"rollback\",\"version\":1," RUN "\"generation\":[4,-1]," TARGET "," TIME ",\"reason\":\"x\"}",
         LG_ERR_FORMAT, "generation[1]:"},
        {1, "\"kind\":\"rollback\",\"version\":1," RUN "\"generation\":[4,1],\"target\":4}", LG_ERR_FORMAT, "target:"},
        {1, "\"kind\":\"rollback\",\"version\":1,\"run\":\"0123456789ABCDEF0123456789abcdef\"}", LG_ERR_FORMAT, "run:"},
        {1,
         "\"kind\":\"rollback\",\"version\":1," RUN
         "\"generation\":[4,1],\"target\":{\"step\":9007199254740992,\"generation\":[3,9],\"manifest\":" DIGEST "}}",
         LG_ERR_FORMAT, "target.step:"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lg_error err = LG_ERROR_INIT;
        lg_status st = decode_body(cases[i].kind, cases[i].body, &err);
        if (st != cases[i].status || (cases[i].says != NULL && strstr(err.message, cases[i].says) == NULL)) {
            fail_msg("case %zu (%s): %s: %s", i, cases[i].body, lg_status_name(st), err.message);
        }
    }
}

static void a_reason_is_refused_when_too_long_or_not_plain_text(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg__buf b;
    lg__buf_init(&b, LG__RECORD_MAX);
    lg__pin_record p = a_pin();
    lg__rollback_record r = a_rollback();
    memset(p.reason, 'x', sizeof p.reason);
    memset(r.reason, 'x', sizeof r.reason);
    assert_int_equal(lg__pin_encode(&p, &b, &err), LG_ERR_LIMIT);
    assert_int_equal(lg__rollback_encode(&r, &b, &err), LG_ERR_LIMIT);
    p.reason[255] = '\0';
    assert_int_equal(lg__pin_encode(&p, &b, &err), LG_OK);
    lg__pin_record back;
    assert_int_equal(lg__pin_decode(b.data, b.len, &back, &err), LG_OK);
    assert_string_equal(back.reason, p.reason);
    strcpy(p.reason, "two\nlines");
    assert_int_equal(lg__pin_encode(&p, &b, &err), LG_ERR_INVALID);
    strcpy(p.reason, "esc \x1b[31m");
    assert_int_equal(lg__pin_encode(&p, &b, &err), LG_ERR_INVALID);
    strcpy(r.reason, "latin \xfc");
    assert_int_equal(lg__rollback_encode(&r, &b, &err), LG_ERR_INVALID);
    lg__buf_free(&b);
}

static void a_rollback_that_does_not_lead_back_is_not_written(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg__buf b;
    lg__buf_init(&b, LG__RECORD_MAX);
    lg__rollback_record r = a_rollback();
    r.target = r.generation;
    assert_int_equal(lg__rollback_encode(&r, &b, &err), LG_ERR_INTERNAL);
    assert_int_equal(b.len, 0);
    lg__buf_free(&b);
}

static void failing_memory_leaks_nothing(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        bool done = false;
        size_t n = 0;
        for (; !done; n++) {
            lg_error err = LG_ERROR_INIT;
            lg__buf b;
            lg__buf_init(&b, LG__RECORD_MAX);
            lg__mem_fail_after(n);
            lg_status st = encode(kind, &b, &err);
            if (st == LG_OK) {
                st = decode(kind, b.data, b.len, &err);
            }
            lg__mem_fail_after(SIZE_MAX);
            assert_true(st == LG_OK || st == LG_ERR_NOMEM);
            done = st == LG_OK;
            lg__buf_free(&b);
        }
        assert_true(n > 1);
    }
}

static void sealing_refuses_what_is_no_object(void **state)
{
    (void)state;
    static const struct {
        const char *file;
        lg_status status;
        const char *says;
    } cases[] = {
        {"", LG_ERR_CORRUPT, "0 bytes are there"},
        {"{\"crc32c\":\"", LG_ERR_CORRUPT, "11 bytes are there"},
        {"{", LG_ERR_CORRUPT, "1 bytes are there"},
        {"[]", LG_ERR_FORMAT, "not a file of lastgood"},
        {"<!DOCTYPE html><html></html>", LG_ERR_FORMAT, "<!DOCTYPE"},
        {"{\"weight_map\":{\"a\":\"b.safetensors\"}}", LG_ERR_FORMAT, "not a file of lastgood"},
        {"\x80\x04\x95 a pickle with enough bytes", LG_ERR_FORMAT, "byte 0x80"},
        {"{ \"crc32c\":\"00000000\",\"a\":1}", LG_ERR_FORMAT, "not a file of lastgood"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lg_error err = LG_ERROR_INIT;
        json_t *json = NULL;
        lg_status st = lg__sealed_json_parse(cases[i].file, strlen(cases[i].file), &json, &err);
        if (st != cases[i].status || strstr(err.message, cases[i].says) == NULL) {
            fail_msg("case %zu (%s): %s: %s", i, cases[i].file, lg_status_name(st), err.message);
        }
        assert_null(json);
    }
    lg_error err = LG_ERROR_INIT;
    json_t *json = NULL;
    static const char zeros[64];
    assert_int_equal(lg__sealed_json_parse(zeros, sizeof zeros, &json, &err), LG_ERR_CORRUPT);
    assert_non_null(strstr(err.message, "all 64 bytes are zero"));
    lg__buf b;
    lg__buf_init(&b, 1024);
    assert_int_equal(lg__sealed_json("\"a\":1", 5, &b, &err), LG_ERR_INTERNAL);
    lg__buf_free(&b);
}

/* With a right checksum, only the form of the end can be wrong. */
static void a_sealed_file_ends_in_a_brace_and_at_most_one_newline(void **state)
{
    (void)state;
    static const struct {
        const char *rest;
        lg_status status;
    } cases[] = {{"\"a\":1}", LG_OK},
                 {"\"a\":1}\n", LG_OK},
                 {"\"a\":1}\n\n", LG_ERR_FORMAT},
                 {"\"a\":1} \n", LG_ERR_FORMAT},
                 {"\"a\":1} ", LG_ERR_FORMAT},
                 {"\"a\":1}}}", LG_ERR_FORMAT},
                 {"\"a\":1}{}", LG_ERR_FORMAT},
                 {"\"a\":1}\nx}", LG_ERR_FORMAT},
                 {"}", LG_ERR_FORMAT},
                 {"\n", LG_ERR_FORMAT},
                 {"", LG_ERR_FORMAT},
                 {"\"crc32c\":\"00000000\"}", LG_ERR_FORMAT}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char file[256];
        size_t n = strlen(cases[i].rest);
        snprintf(file, sizeof file, "{\"crc32c\":\"%08x\",%s", lg__crc32c(0, cases[i].rest, n), cases[i].rest);
        lg_error err = LG_ERROR_INIT;
        json_t *json = NULL;
        lg_status st = lg__sealed_json_parse(file, strlen(file), &json, &err);
        if (st != cases[i].status) {
            fail_msg("case %zu (%s): %s: %s", i, file, lg_status_name(st), err.message);
        }
        json_decref(json);
    }
}

#define TEST(name, function)             \
    {                                    \
        name, function, NULL, NULL, NULL \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST("a pin record comes back as it was", a_pin_record_comes_back_as_it_was),
        TEST("a rollback record comes back as it was", a_rollback_record_comes_back_as_it_was),
        TEST("K22: records of version 1 are these bytes", records_of_version_1_are_these_bytes),
        TEST("K01: every flipped bit of a record is found", every_flipped_bit_of_a_record_is_found),
        TEST("K01: every cut record is refused and says how long it is",
             every_cut_record_is_refused_and_says_how_long_it_is),
        TEST("K05: bytes behind a record are refused", bytes_behind_a_record_are_refused),
        TEST("K22: a malformed record is refused by the member that is wrong",
             a_malformed_record_is_refused_by_the_member_that_is_wrong),
        TEST("K15: a reason is refused when it is too long or not plain text",
             a_reason_is_refused_when_too_long_or_not_plain_text),
        TEST("K02: a rollback that does not lead back is not written",
             a_rollback_that_does_not_lead_back_is_not_written),
        TEST("failing memory leaks nothing", failing_memory_leaks_nothing),
        TEST("K15: what is no sealed file is refused and named", sealing_refuses_what_is_no_object),
        TEST("K05: a sealed file ends in a brace and at most one newline",
             a_sealed_file_ends_in_a_brace_and_at_most_one_newline),
    };
    return cmocka_run_group_tests_name("record", tests, NULL, NULL);
}
