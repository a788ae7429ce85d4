/* SPDX-License-Identifier: Apache-2.0 */
#include "format/sums.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "format/manifest.h"
#include "json_edit.h"
#include "support/layouts.h"
#include "support/oops.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* --------------------------------------------------------------- head, tables */

static lg_status decode_head(const char *bytes, size_t n, uint64_t file_bytes, lg__sums_head *out, lg_error *err)
{
    char *copy = malloc(n > 0 ? n : 1);
    assert_non_null(copy);
    memcpy(copy, bytes, n);
    lg_status st = lg__sums_head_decode(copy, n, file_bytes, out, err);
    free(copy);
    return st;
}

static lg__buf head_bytes(lg__sums_head h)
{
    lg__buf b;
    lg__buf_init(&b, 1 << 20);
    lg__sums_head_encode(&h, &b);
    assert_false(b.failed);
    return b;
}

static void a_head_is_48_bytes_and_comes_back_as_it_was(void **state)
{
    (void)state;
    const lg__sums_head h = {65536, 3, 48 + 3 * 24 + 4 * 7, 1234};
    lg__buf b = head_bytes(h);
    static const unsigned char golden[LG__SUMS_HEAD_BYTES] = {
        'L', 'G', 'S', 'U', 'M', 'S', '1', '\n', 1, 0, 0, 0, 1,    0, 0, 0, 0, 0, 1, 0,
        3,   0,   0,   0,   148, 0,   0,   0,    0, 0, 0, 0, 0xd2, 4, 0, 0, 0, 0, 0, 0};
    assert_int_equal(b.len, LG__SUMS_HEAD_BYTES);
    assert_memory_equal(b.data, golden, 40);
    assert_int_equal(lg__get_u32le(b.data + 40), lg__crc32c(0, golden, 40));
    assert_int_equal(lg__get_u32le(b.data + 44), 0);
    lg__sums_head back;
    CHECK(lg__sums_head_decode(b.data, b.len, 148 + 1234, &back, oops));
    assert_int_equal(back.block_bytes, h.block_bytes);
    assert_int_equal(back.n_tables, h.n_tables);
    assert_int_equal(back.report_at, h.report_at);
    assert_int_equal(back.report_bytes, h.report_bytes);
    lg__buf_free(&b);
}

static void every_flipped_bit_of_a_head_is_found(void **state)
{
    (void)state;
    lg__buf b = head_bytes((lg__sums_head){65536, 3, 148, 1234});
    for (size_t i = 0; i < b.len; i++) {
        for (int bit = 0; bit < 8; bit++) {
            lg_error err = LG_ERROR_INIT;
            lg__sums_head h;
            b.data[i] = (char)(b.data[i] ^ (1 << bit));
            lg_status st = lg__sums_head_decode(b.data, b.len, 148 + 1234, &h, &err);
            b.data[i] = (char)(b.data[i] ^ (1 << bit));
            if (st != (i < 8 ? LG_ERR_FORMAT : LG_ERR_CORRUPT)) {
                fail_msg("byte %zu, bit %d: %s: %s", i, bit, lg_status_name(st), err.message);
            }
        }
    }
    lg__buf_free(&b);
}

static void a_cut_sums_file_is_refused_and_told(void **state)
{
    (void)state;
    lg__buf b = head_bytes((lg__sums_head){65536, 3, 148, 1234});
    for (uint64_t n = 0; n < 148 + 1240; n++) {
        lg_error err = LG_ERROR_INIT;
        lg__sums_head h;
        lg_status st = decode_head(b.data, n < b.len ? (size_t)n : b.len, n, &h, &err);
        char size[64];
        snprintf(size, sizeof size, "%d bytes are there", (int)n);
        if (n == 148 + 1234) {
            assert_int_equal(st, LG_OK);
        } else if (st != LG_ERR_CORRUPT || strstr(err.message, size) == NULL) {
            fail_msg("cut to %d: %s: %s", (int)n, lg_status_name(st), err.message);
        }
    }
    lg__buf_free(&b);
}

/* Writes little-endian `v` at `at` and seals the head again. */
static void patch(char *head, size_t at, uint64_t v, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        head[at + i] = (char)(v >> (8 * i));
    }
    uint32_t crc = lg__crc32c(0, head, 40);
    for (size_t i = 0; i < 4; i++) {
        head[40 + i] = (char)(crc >> (8 * i));
    }
}

static void a_malformed_head_is_refused(void **state)
{
    (void)state;
    static const struct {
        size_t at, bytes;
        uint64_t value;
        uint64_t file_bytes;
        lg_status status;
    } cases[] = {
        {8, 4, 1, 1382, LG_OK},
        {8, 4, 2, 1382, LG_ERR_VERSION},
        {8, 4, UINT32_MAX, 1382, LG_ERR_VERSION},
        {8, 4, 0, 1382, LG_ERR_FORMAT},
        {12, 4, 2, 1382, LG_ERR_VERSION},
        {16, 4, 0, 1382, LG_ERR_FORMAT},
        {16, 4, 2048, 1382, LG_ERR_FORMAT},
        {16, 4, 65537, 1382, LG_ERR_FORMAT},
        {16, 4, 1u << 27, 1382, LG_ERR_FORMAT},
        {16, 4, 1u << 26, 1382, LG_OK},
        {16, 4, 4096, 1382, LG_OK},
        {20, 4, 5, 1382, LG_ERR_FORMAT}, /* more tables than there is room for */
        {20, 4, UINT32_MAX, 1382, LG_ERR_FORMAT},
        {20, 4, 0, 1382, LG_ERR_FORMAT}, /* room for tables that are not there */
        {24, 8, 0, 1382, LG_ERR_FORMAT},
        {24, 8, 119, 1382, LG_ERR_FORMAT},
        {24, 8, 149, 1383, LG_ERR_FORMAT}, /* tables end on a multiple of 4 */
        {24, 8, 152, 1382, LG_ERR_CORRUPT},
        {24, 8, UINT64_MAX - 1235, 1382, LG_ERR_CORRUPT},
        {32, 8, 1235, 1382, LG_ERR_CORRUPT},
        {32, 8, UINT64_MAX, 1382, LG_ERR_FORMAT},
        {32, 8, (UINT64_C(256) << 20) + 1, (UINT64_C(256) << 20) + 149, LG_ERR_FORMAT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lg_error err = LG_ERROR_INIT;
        lg__sums_head h;
        lg__buf b = head_bytes((lg__sums_head){65536, 3, 148, 1234});
        patch(b.data, cases[i].at, cases[i].value, cases[i].bytes);
        lg_status st = decode_head(b.data, b.len, cases[i].file_bytes, &h, &err);
        if (st != cases[i].status) {
            fail_msg("case %zu: %s: %s", i, lg_status_name(st), err.message);
        }
        lg__buf_free(&b);
    }
}

static void tables_come_back_as_they_were(void **state)
{
    (void)state;
    static const struct {
        uint64_t header, data, blocks;
    } cases[] = {{4096, 0, 0},    {4096, 1, 1},      {4096, 4095, 1}, {4096, 4096, 1},
                 {4096, 4097, 2}, {8192, 40960, 10}, {100, 100, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t crc[10] = {0xdeadbeef, 1, 2, 3, 4, 5, 6, 7, 8, 0x80000000};
        lg__table t = {cases[i].header + cases[i].data, cases[i].header, 0x01020304, cases[i].blocks, crc}, back;
        lg__buf b;
        lg__buf_init(&b, 1 << 20);
        lg__table_encode(&t, &b);
        assert_int_equal(lg__block_count(cases[i].data, 4096), cases[i].blocks);
        assert_int_equal(b.len, lg__table_bytes(cases[i].data, 4096));
        assert_int_equal(lg__get_u64le(b.data), t.file_bytes);
        assert_int_equal(lg__get_u64le(b.data + 8), t.header_bytes);
        assert_memory_equal(b.data + 16, "\4\3\2\1\0\0\0\0", 8);
        CHECK(lg__table_decode(b.data, b.len, 4096, &back, oops));
        assert_int_equal(back.file_bytes, t.file_bytes);
        assert_int_equal(back.header_bytes, t.header_bytes);
        assert_int_equal(back.header_crc, t.header_crc);
        assert_int_equal(back.n_blocks, t.n_blocks);
        assert_memory_equal(back.block_crc, crc, (size_t)t.n_blocks * 4);
        lg__free(back.block_crc);

        lg_error err = LG_ERROR_INIT;
        for (size_t n = 0; n < b.len; n++) {
            char *copy = malloc(n > 0 ? n : 1);
            assert_non_null(copy);
            memcpy(copy, b.data, n);
            assert_int_equal(lg__table_decode(copy, n, 4096, &back, &err), LG_ERR_FORMAT);
            free(copy);
        }
        lg__buf_fill(&b, '\0', 4);
        assert_int_equal(lg__table_decode(b.data, b.len, 4096, &back, &err), LG_ERR_FORMAT);
        b.data[20] = 1;
        assert_int_equal(lg__table_decode(b.data, b.len - 4, 4096, &back, &err), LG_ERR_FORMAT);
        lg__buf_free(&b);
    }
}

static void a_table_cannot_claim_more_blocks_than_it_has(void **state)
{
    (void)state;
    static const struct {
        uint64_t file, header;
    } cases[] = {{UINT64_MAX, 0}, {UINT64_MAX, UINT64_MAX - 1}, {1, 2}, {0, UINT64_MAX}, {UINT64_C(1) << 63, 4096}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lg_error err = LG_ERROR_INIT;
        lg__table t = {cases[i].file, cases[i].header, 0, 0, NULL}, back;
        lg__buf b;
        lg__buf_init(&b, 1024);
        lg__table_encode(&t, &b);
        assert_int_equal(lg__table_decode(b.data, b.len, 4096, &back, &err), LG_ERR_FORMAT);
        lg__buf_free(&b);
    }
}

/* -------------------------------------------------------------------- reports */

static const uint64_t *u64s(lg__report *r, size_t n, const uint64_t *v)
{
    uint64_t *copy = lg__arena_array(r->arena, n, sizeof *copy);
    assert_non_null(copy);
    memcpy(copy, v, n * sizeof *v);
    return copy;
}
#define U64S(r, ...) u64s((r), sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t), (uint64_t[]){__VA_ARGS__})

/* What rank 1 of 4 might say, with one of everything. */
static lg__report *sample(void)
{
    lg__report *r = NULL;
    CHECK(lg__report_new(&r, oops));
    strcpy(r->run_id, "00112233445566778899aabbccddeeff");
    strcpy(r->attempt, "0123456789abcdef");
    r->generation = (lg_generation){3, 17};
    r->step = 500;
    r->rank = 1;
    r->world = 4;
    r->domain = "host-a";

    static const lg__report_file files[] = {{LG_GROUP_MODEL, 0, 8192, 4096, {1}},
                                            {LG_GROUP_MODEL, 1, 4096, 4096, {2}},
                                            {LG_GROUP_RAW, 0, (UINT64_C(1) << 60), 4096, {3}}};
    r->files = lg__arena_array(r->arena, 3, sizeof *files);
    assert_non_null(r->files);
    memcpy(r->files, files, sizeof files);
    r->n_files = 3;

    r->layouts = lg__arena_array(r->arena, 2, sizeof *r->layouts);
    assert_non_null(r->layouts);
    const uint32_t ranks[] = {1, 3};
    CHECK(lg__layout_of_ranks(ranks, 2, false, &r->layouts[0], oops));
    r->n_layouts = 1;
    r->layouts[1] = flat_layout(4, 40);
    r->n_layouts = 2;

    r->uses = lg__arena_array(r->arena, 2, sizeof *r->uses);
    assert_non_null(r->uses);
    r->n_uses = 2;
    memcpy(r->uses[0].id, r->layouts[0]->id, LG__LAYOUT_ID_BYTES);
    memcpy(r->uses[1].id, r->layouts[1]->id, LG__LAYOUT_ID_BYTES);
    r->uses[0].tensors = 2, r->uses[0].sum = UINT64_MAX;
    r->uses[1].tensors = 1, r->uses[1].sum = 7;

    lg__region *boxes = lg__arena_array(r->arena, 2, sizeof *boxes);
    assert_non_null(boxes);
    boxes[0] = (lg__region){2, {0, 2}, {1, 2}};
    boxes[1] = (lg__region){2, {3, 0}, {1, 4}};
    const lg__report_tensor tensors[] = {
        {"w", LG_GROUP_MODEL, LG_BF16, 2, U64S(r, 10, 6), 0, 0, NULL, 0},
        {"experts", LG_GROUP_MODEL, LG_F32, 2, U64S(r, 4, 4), 0, LG__IRREGULAR, boxes, 2},
        {"optim.m", LG_GROUP_OPTIM, LG_F32, 2, U64S(r, 5, 4), 20, 1, NULL, 0},
    };
    r->tensors = lg__arena_array(r->arena, 3, sizeof *r->tensors);
    assert_non_null(r->tensors);
    memcpy(r->tensors, tensors, sizeof tensors);
    r->n_tensors = 3;

    static const lg__report_alias aliases[] = {{"head", "w", true}, {"tied", "w", false}};
    r->aliases = lg__arena_array(r->arena, 2, sizeof *r->aliases);
    assert_non_null(r->aliases);
    memcpy(r->aliases, aliases, sizeof aliases);
    r->n_aliases = 2;
    r->state = json_loads("{\"lr\":0.1,\"n\":{\"$int\":\"18446744073709551615\"}}", 0, NULL);
    assert_non_null(r->state);
    return r;
}

static lg__buf bytes_of(lg__report *r)
{
    lg__buf b;
    lg__buf_init(&b, LG__REPORT_MAX);
    CHECK(lg__report_encode(r, &b, oops));
    lg__report_free(r);
    return b;
}

static lg_status decode(const char *bytes, size_t n, lg__report **out, lg_error *err)
{
    char *copy = malloc(n > 0 ? n : 1);
    assert_non_null(copy);
    memcpy(copy, bytes, n);
    lg_status st = lg__report_decode(copy, n, out, err);
    free(copy);
    return st;
}

static void a_report_comes_back_as_it_was(void **state)
{
    (void)state;
    lg__report *r = sample(), *back = NULL;
    lg__buf b, again;
    lg__buf_init(&b, LG__REPORT_MAX);
    lg__buf_init(&again, LG__REPORT_MAX);
    CHECK(lg__report_encode(r, &b, oops));
    CHECK(lg__report_decode(b.data, b.len, &back, oops));
    assert_string_equal(back->run_id, r->run_id);
    assert_string_equal(back->attempt, r->attempt);
    assert_memory_equal(&back->generation, &r->generation, sizeof r->generation);
    assert_int_equal(back->step, r->step);
    assert_int_equal(back->rank, 1);
    assert_int_equal(back->world, 4);
    assert_string_equal(back->domain, r->domain);
    assert_int_equal(back->n_files, 3);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(back->files[i].group, r->files[i].group);
        assert_int_equal(back->files[i].number, r->files[i].number);
        assert_int_equal(back->files[i].bytes, r->files[i].bytes);
        assert_int_equal(back->files[i].header_bytes, r->files[i].header_bytes);
        assert_memory_equal(back->files[i].table, r->files[i].table, LG__SHA256_BYTES);
    }
    assert_int_equal(back->n_uses, 2);
    for (size_t i = 0; i < 2; i++) {
        assert_memory_equal(back->uses[i].id, r->uses[i].id, LG__LAYOUT_ID_BYTES);
        assert_int_equal(back->uses[i].tensors, r->uses[i].tensors);
        assert_true(back->uses[i].sum == r->uses[i].sum);
    }
    assert_int_equal(back->n_layouts, 2);
    assert_string_equal(back->layouts[0]->text, r->layouts[0]->text);
    assert_string_equal(back->layouts[1]->text, r->layouts[1]->text);
    assert_int_equal(back->n_tensors, 3);
    for (size_t i = 0; i < 3; i++) {
        const lg__report_tensor *x = &r->tensors[i], *y = &back->tensors[i];
        assert_string_equal(x->name, y->name);
        assert_int_equal(x->group, y->group);
        assert_int_equal(x->dtype, y->dtype);
        assert_int_equal(x->ndim, y->ndim);
        assert_memory_equal(x->shape, y->shape, x->ndim * sizeof *x->shape);
        assert_int_equal(x->flat_offset, y->flat_offset);
        assert_int_equal(x->layout, y->layout);
        assert_int_equal(x->n_boxes, y->n_boxes);
    }
    assert_int_equal(back->tensors[1].boxes[1].offset[0], 3);
    assert_int_equal(back->tensors[1].boxes[0].size[1], 2);
    assert_int_equal(back->n_aliases, 2);
    assert_string_equal(back->aliases[1].alias, "tied");
    assert_string_equal(back->aliases[1].name, "w");
    assert_true(back->aliases[0].stored);
    assert_false(back->aliases[1].stored);
    assert_true(json_equal(back->state, r->state));
    CHECK(lg__report_encode(back, &again, oops));
    assert_string_equal(again.data, b.data);
    lg__report_free(r);
    lg__report_free(back);
    lg__report_free(NULL);
    lg__buf_free(&b);
    lg__buf_free(&again);
}

static void a_report_without_tensors_is_small(void **state)
{
    (void)state;
    lg__report *r = NULL, *back = NULL;
    CHECK(lg__report_new(&r, oops));
    strcpy(r->run_id, "00112233445566778899aabbccddeeff");
    strcpy(r->attempt, "0123456789abcdef");
    r->world = 4096;
    r->rank = 4095;
    r->domain = "host-b";
    lg__buf b = bytes_of(r);
    assert_true(b.len < 300);
    CHECK(lg__report_decode(b.data, b.len, &back, oops));
    assert_int_equal(back->n_files, 0);
    assert_int_equal(json_object_size(back->state), 0);
    lg__report_free(back);
    lg__buf_free(&b);
}

#define F LG_ERR_FORMAT

static void a_malformed_report_is_refused_by_the_member_that_is_wrong(void **state)
{
    (void)state;
    static const struct {
        const char *path, *value;
        lg_status status;
        const char *says;
    } cases[] = {
        {"later", "1", LG_OK, NULL},
        {"tensors.0.later", "1", LG_OK, NULL},
        {"lastgood_report", NULL, F, "not a report of lastgood"},
        {"lastgood_report", "2", LG_ERR_VERSION, "version 2"},
        {"lastgood_report", "0", F, "version 0"},
        {"lastgood_report", "\"x\"", F, "lastgood_report"},
        {"run", "\"\"", F, "run: not 32"},
        {"attempt", "\"0123456789ABCDEF\"", F, "attempt: not 16"},
        {"generation", "3", F, "generation: not an array"},
        {"step", "9007199254740992", F, "step:"},
        {"step", NULL, F, "step: missing"},
        {"world", "0", F, "world:"},
        {"world", "1000001", F, "world:"},
        {"rank", "4", F, "rank: 4 is more than 3"},
        {"rank", "-1", F, "rank:"},
        {"domain", "\"\"", F, "domain:"},
        {"domain", "\"a\\nb\"", F, "domain:"},
        {"domain", NULL, F, "domain: missing"},
        {"files", NULL, F, "files: missing"},
        {"files.0", "1", F, "files[0]: not an object"},
        {"files.0.group", "\"junk\"", F, "files[0].group"},
        {"files.0.number", "1", F, "files[0].number: files are not in order"},
        {"files.1.number", "0", F, "files[1].number"},
        {"files.2.number", "2", F, "files[2].number"},
        {"files.2.group", "\"model\"", F, "files[2].number"},
        {"files.0.group", "\"raw\"", F, "files[1].number"},
        {"files.0.bytes", "0", F, "files[0]"},
        {"files.0.bytes", "\"9223372036854775808\"", F, "files[0].bytes"},
        {"files.0.header", "8193", F, "files[0].header"},
        {"files.0.table", "\"\"", F, "files[0].table"},
        {"uses.0.layout", "\"0\"", F, "uses[0].layout"},
        {"uses.0.sum", "-1", F, "uses[0].sum"},
        {"uses.0.sum", "\"18446744073709551616\"", F, "uses[0].sum"},
        {"uses.0.tensors", NULL, F, "uses[0].tensors: missing"},
        {"layouts", "{}", F, "layouts: not an array"},
        {"layouts.0", "null", F, "layouts[0]"},
        {"world", "3", F, "layouts[0]"}, /* its ranks would be beyond the world */
        {"tensors.0.name", "\"optim.m\"", F, "\"optim.m\" is there twice"},
        {"tensors.0.name", "\"a\\u0000b\"", F, "tensors[0].name"},
        {"tensors.0.group", "\"raw\"", F, "tensors[0].group"},
        {"tensors.0.dtype", "\"I3\"", F, "tensors[0].dtype: unknown dtype \"I3\""},
        {"tensors.0.shape", "[4294967296,4294967296]", F, "tensors[0].shape"},
        {"tensors.0.layout", "2", F, "tensors[0].layout: 2, but there are 2 layouts"},
        {"tensors.0.layout", NULL, F, "neither"},
        {"tensors.0.boxes", "[]", F, "both"},
        {"tensors.0.flat_offset", "0", F, "tensors[0].flat_offset"},
        {"tensors.2.flat_offset", NULL, F, "tensors[2].flat_offset: missing"},
        {"tensors.2.flat_offset", "21", F, "tensors[2].layout"},
        {"tensors.0.name", "\"\"", F, "tensors[0].name"},
        {"tensors.0.name", "\"__metadata__\"", F, "tensors[0].name"},
        {"tensors.1.boxes",
         "[{\"offset\":[0,0],\"size\":[1,1]},{\"offset\":[1,0],\"size\":[1,1]},{\"offset\":[2,0],\"size\":[1,1]},"
         "{\"offset\":[3,0],\"size\":[1,1]}]",
         F, "4 boxes of \"experts\", but only 3 files for them"},
        {"tensors.1.boxes.0", "[]", F, "tensors[1].boxes[0]"},
        {"tensors.1.boxes.0.size", "[1,3]", LG_ERR_COVERAGE, "tensors[1].boxes[0]"},
        {"tensors.1.boxes.0.offset", "[\"9223372036854775807\",2]", LG_ERR_COVERAGE, "tensors[1].boxes[0]"},
        {"tensors.1.boxes.0.offset", "[3,0]", F, "not in order of offset"},
        {"tensors.1.boxes.0.offset", "[0]", F, "tensors[1].boxes[0].offset"},
        {"aliases.0.alias", "\"\"", F, "aliases[0].alias"},
        {"aliases.0.stored", NULL, F, "aliases[0].stored: missing"},
        {"aliases.1", "[]", F, "aliases[1]: not an object"},
        {"state", "3", F, "state: not an object"},
        {"state.lr", "{\"$what\":1}", F, "state.lr"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lg_error err = LG_ERROR_INIT;
        lg__buf b = bytes_of(sample()), edited;
        json_t *top = NULL;
        CHECK(lg__json_parse(b.data, b.len, &top, oops));
        if (!json_edit(top, cases[i].path, cases[i].value)) {
            fail_msg("the sample has no place %s", cases[i].path);
        }
        lg__buf_init(&edited, LG__REPORT_MAX);
        CHECK(lg__buf_json(&edited, top, false, oops));
        lg__report *r = NULL;
        lg_status st = decode(edited.data, edited.len, &r, &err);
        if (st != cases[i].status || (cases[i].says != NULL && strstr(err.message, cases[i].says) == NULL)) {
            fail_msg("case %zu, %s: %s: %s", i, cases[i].path, lg_status_name(st), err.message);
        }
        assert_int_equal(st == LG_OK, r != NULL);
        lg__report_free(r);
        json_decref(top);
        lg__buf_free(&b);
        lg__buf_free(&edited);
    }
}

static void a_report_with_a_layout_used_twice_is_refused(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg__report *r = sample(), *back = NULL;
    memcpy(r->uses[1].id, r->uses[0].id, LG__LAYOUT_ID_BYTES);
    lg__buf b = bytes_of(r);
    assert_int_equal(decode(b.data, b.len, &back, &err), F);
    assert_non_null(strstr(err.message, "uses[1].layout: is there twice"));
    lg__buf_free(&b);
}

static void a_cut_report_is_refused(void **state)
{
    (void)state;
    lg__buf b = bytes_of(sample());
    /* The last byte is a newline, without which the value is whole. */
    for (size_t n = 0; n < b.len - 1; n++) {
        lg_error err = LG_ERROR_INIT;
        lg__report *r = NULL;
        assert_int_equal(decode(b.data, n, &r, &err), F);
    }
    lg_error err = LG_ERROR_INIT;
    lg__report *r = NULL;
    lg__buf_str(&b, "{}");
    assert_int_equal(decode(b.data, b.len, &r, &err), F);
    lg__buf_free(&b);
}

static void failing_memory_leaks_nothing(void **state)
{
    (void)state;
    lg__report *r = sample();
    uint32_t crc[] = {1, 2};
    bool done = false;
    size_t n = 0;
    for (; !done; n++) {
        lg_error err = LG_ERROR_INIT;
        lg__buf b, table;
        lg__report *back = NULL;
        lg__table t = {8192 + 1000, 4096, 9, 2, crc}, t2 = {0};
        lg__sums_head h = {4096, 1, 48 + 32, 100};
        lg__buf_init(&b, LG__REPORT_MAX);
        lg__buf_init(&table, LG__REPORT_MAX);
        lg__mem_fail_after(n);
        lg__sums_head_encode(&h, &table);
        lg__table_encode(&t, &table);
        lg_status st = lg__buf_check(&table, "sums", &err);
        if (st == LG_OK) {
            st = lg__table_decode(table.data + LG__SUMS_HEAD_BYTES, table.len - LG__SUMS_HEAD_BYTES, 4096, &t2, &err);
        }
        if (st == LG_OK) {
            st = lg__report_encode(r, &b, &err);
        }
        if (st == LG_OK) {
            st = lg__report_decode(b.data, b.len, &back, &err);
        }
        lg__mem_fail_after(SIZE_MAX);
        if (st != LG_OK && st != LG_ERR_NOMEM) {
            fail_msg("allocation %zu fails: %s: %s", n, lg_status_name(st), err.message);
        }
        done = st == LG_OK;
        assert_int_equal(done, back != NULL);
        lg__free(t2.block_crc);
        lg__report_free(back);
        lg__buf_free(&b);
        lg__buf_free(&table);
    }
    assert_true(n > 5);
    lg__report_free(r);
}

static void four_thousand_reports_are_read_in_one_go(void **state)
{
    (void)state;
    enum { TENSORS = 2000, RANKS = 4096 };
    lg__report *r = sample();
    r->tensors = lg__arena_array(r->arena, TENSORS, sizeof *r->tensors);
    assert_non_null(r->tensors);
    r->n_tensors = TENSORS;
    for (size_t i = 0; i < TENSORS; i++) {
        char name[128];
        snprintf(name, sizeof name, "model.layers.%05zu.self_attn.q_proj.weight", TENSORS - i);
        r->tensors[i] = (lg__report_tensor){.name = lg__arena_strdup(r->arena, name),
                                            .group = LG_GROUP_MODEL,
                                            .dtype = LG_BF16,
                                            .ndim = 2,
                                            .shape = U64S(r, 1 << 16, 16384),
                                            .layout = 0};
    }
    lg__report *small = sample();
    small->n_tensors = 0;
    for (size_t i = 0; i < small->n_layouts; i++) {
        lg__layout_unref(small->layouts[i]);
    }
    small->n_layouts = 0;
    lg__buf first = bytes_of(r), other = bytes_of(small);
    uint64_t t0 = lg__now_ms();
    for (int i = 0; i < RANKS; i++) {
        const lg__buf *b = i == 0 ? &first : &other;
        lg__report *back = NULL;
        CHECK(lg__report_decode(b->data, b->len, &back, oops));
        assert_int_equal(back->n_tensors, i == 0 ? TENSORS : 0);
        lg__report_free(back);
    }
    print_message("# %d reports (%zu bytes, then %zu each) in %d ms\n", RANKS, first.len, other.len,
                  (int)(lg__now_ms() - t0));
    lg__buf_free(&first);
    lg__buf_free(&other);
}

#define TEST(name, function)             \
    {                                    \
        name, function, NULL, NULL, NULL \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST("K22: a head is 48 bytes and comes back as it was", a_head_is_48_bytes_and_comes_back_as_it_was),
        TEST("K01: every flipped bit of a head is found", every_flipped_bit_of_a_head_is_found),
        TEST("K01: a cut sums file is refused and told", a_cut_sums_file_is_refused_and_told),
        TEST("K15: a malformed head is refused", a_malformed_head_is_refused),
        TEST("tables come back as they were", tables_come_back_as_they_were),
        TEST("K15: a table cannot claim more blocks than it has", a_table_cannot_claim_more_blocks_than_it_has),
        TEST("a report comes back as it was", a_report_comes_back_as_it_was),
        TEST("a report without tensors is small", a_report_without_tensors_is_small),
        TEST("K14, K15, K22: a malformed report is refused by the member that is wrong",
             a_malformed_report_is_refused_by_the_member_that_is_wrong),
        TEST("a report with a layout used twice is refused", a_report_with_a_layout_used_twice_is_refused),
        TEST("K01: a cut report is refused", a_cut_report_is_refused),
        TEST("failing memory leaks nothing", failing_memory_leaks_nothing),
        TEST("K16: 4,096 reports are read in one go", four_thousand_reports_are_read_in_one_go),
    };
    return cmocka_run_group_tests_name("sums", tests, NULL, NULL);
}
