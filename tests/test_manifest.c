/* SPDX-License-Identifier: Apache-2.0 */
#include "format/manifest.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "format/tagged.h"
#include "json_edit.h"
#include "manifest_sample.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* The bytes of a manifest, which is freed. */
static lg__buf bytes_of(lg__manifest *m)
{
    lg__buf b;
    lg__buf_init(&b, LG__MANIFEST_MAX);
    CHECK(lg__manifest_encode(m, &b, oops));
    lg__manifest_free(m);
    return b;
}

/* Decodes an exact copy on the heap, so that a read behind the end is seen. */
static lg_status decode(const char *bytes, size_t n, lg__manifest **out, lg_error *err)
{
    char *copy = malloc(n > 0 ? n : 1);
    assert_non_null(copy);
    memcpy(copy, bytes, n);
    lg_status st = lg__manifest_decode(copy, n, out, err);
    free(copy);
    return st;
}

static void assert_same_tensor(const lg__manifest *a, const lg__manifest_tensor *x, const lg__manifest *b,
                               const lg__manifest_tensor *y)
{
    assert_string_equal(x->name, y->name);
    assert_int_equal(x->group, y->group);
    assert_int_equal(x->dtype, y->dtype);
    assert_int_equal(x->ndim, y->ndim);
    assert_memory_equal(x->shape, y->shape, x->ndim * sizeof *x->shape);
    assert_int_equal(x->stored, y->stored);
    assert_int_equal(x->alias_of != NULL, y->alias_of != NULL);
    if (x->alias_of != NULL) {
        assert_string_equal(x->alias_of, y->alias_of);
    }
    /* An alias without bytes of its own lies where the other one lies. */
    x = x->stored ? x : lg__manifest_find(a, x->alias_of);
    assert_int_equal(x->flat_offset, y->flat_offset);
    assert_int_equal(x->layout, y->layout);
    assert_int_equal(x->n_pieces, y->n_pieces);
    for (size_t i = 0; i < x->n_pieces; i++) {
        assert_int_equal(x->pieces[i].rank, y->pieces[i].rank);
        assert_int_equal(x->pieces[i].number, y->pieces[i].number);
        assert_int_equal(lg__region_compare(&x->pieces[i].box, &y->pieces[i].box), 0);
        assert_memory_equal(x->pieces[i].box.size, y->pieces[i].box.size, x->ndim * sizeof *x->shape);
    }
    (void)b;
}

static void assert_same(const lg__manifest *a, const lg__manifest *b)
{
    assert_string_equal(a->run_id, b->run_id);
    assert_string_equal(a->attempt, b->attempt);
    assert_memory_equal(&a->generation, &b->generation, sizeof a->generation);
    assert_int_equal(a->step, b->step);
    assert_int_equal(a->has_parent, b->has_parent);
    assert_memory_equal(&a->parent, &b->parent, sizeof a->parent);
    assert_int_equal(a->parent_step, b->parent_step);
    assert_int_equal(a->parent_verified, b->parent_verified);
    assert_string_equal(a->created, b->created);
    assert_int_equal(a->world, b->world);
    assert_int_equal(a->block_bytes, b->block_bytes);
    for (uint32_t r = 0; r < a->world; r++) {
        const lg__rank_row *x = &a->ranks[r], *y = &b->ranks[r];
        for (int g = 0; g < LG_GROUP_COUNT; g++) {
            assert_int_equal(x->n_files[g], y->n_files[g]);
            for (uint32_t i = 0; i < x->n_files[g]; i++) {
                assert_int_equal(x->file_bytes[g][i], y->file_bytes[g][i]);
            }
        }
        assert_int_equal(x->sums_bytes, y->sums_bytes);
        assert_memory_equal(x->report, y->report, sizeof x->report);
        assert_string_equal(x->domain, y->domain);
    }
    assert_int_equal(a->n_attached, b->n_attached);
    for (size_t i = 0; i < a->n_attached; i++) {
        assert_string_equal(a->attached[i].name, b->attached[i].name);
        assert_int_equal(a->attached[i].bytes, b->attached[i].bytes);
        assert_memory_equal(a->attached[i].sha256, b->attached[i].sha256, LG__SHA256_BYTES);
    }
    assert_int_equal(a->n_layouts, b->n_layouts);
    for (size_t i = 0; i < a->n_layouts; i++) {
        assert_string_equal(a->layouts[i]->text, b->layouts[i]->text);
        assert_memory_equal(a->layouts[i]->id, b->layouts[i]->id, LG__LAYOUT_ID_BYTES);
    }
    assert_int_equal(a->n_tensors, b->n_tensors);
    for (size_t i = 0; i < a->n_tensors; i++) {
        assert_same_tensor(a, &a->tensors[i], b, &b->tensors[i]);
    }
    assert_true(json_equal(a->state, b->state));
}

/* -------------------------------------------------------------------- tests */

static void a_manifest_comes_back_as_it_was(void **state)
{
    (void)state;
    lg__manifest *m = sample(), *back = NULL;
    lg__buf b;
    lg__buf_init(&b, LG__MANIFEST_MAX);
    lg__buf_str(&b, "before");
    CHECK(lg__manifest_encode(m, &b, oops));
    CHECK(lg__manifest_decode(b.data + 6, b.len - 6, &back, oops));
    assert_same(m, back);
    uint8_t digest[LG__SHA256_BYTES];
    CHECK(lg__sha256_of(b.data + 6, b.len - 6, digest, oops));
    assert_memory_equal(digest, m->sha256, sizeof digest);
    assert_memory_equal(digest, back->sha256, sizeof digest);

    /* What was read is written as the same bytes. */
    lg__buf again;
    lg__buf_init(&again, LG__MANIFEST_MAX);
    CHECK(lg__manifest_encode(back, &again, oops));
    assert_string_equal(again.data, b.data + 6);

    assert_string_equal(lg__manifest_find(back, "optim.v")->name, "optim.v");
    assert_null(lg__manifest_find(back, "optim"));
    assert_null(lg__manifest_find(back, "zzz"));
    assert_true(lg__manifest_is_copies(back, lg__manifest_find(back, "running.mean")));
    assert_false(lg__manifest_is_copies(back, lg__manifest_find(back, "experts.w1")));
    assert_false(lg__manifest_is_copies(back, lg__manifest_find(back, "emb.weight")));
    lg__tensor_desc d = lg__manifest_desc(lg__manifest_find(back, "optim.v"));
    assert_int_equal(d.flat_offset, 20);
    assert_int_equal(d.group, LG_GROUP_OPTIM);
    lg__buf_free(&again);
    lg__buf_free(&b);
    lg__manifest_free(m);
    lg__manifest_free(back);
    lg__manifest_free(NULL);
}

static void a_first_checkpoint_has_no_parent_and_may_be_empty(void **state)
{
    (void)state;
    lg__manifest *m = sample(), *back = NULL;
    m->has_parent = false;
    m->n_tensors = 0;
    m->n_attached = 0;
    json_object_clear(m->state);
    lg__buf b = bytes_of(m);
    CHECK(lg__manifest_decode(b.data, b.len, &back, oops));
    assert_false(back->has_parent);
    assert_int_equal(back->n_tensors, 0);
    assert_null(lg__manifest_find(back, "x"));
    lg__manifest_free(back);
    lg__buf_free(&b);
}

static void a_manifest_without_state_has_an_empty_one(void **state)
{
    (void)state;
    lg__manifest *m = sample(), *back = NULL;
    json_decref(m->state);
    m->state = NULL;
    lg__buf b = bytes_of(m);
    CHECK(lg__manifest_decode(b.data, b.len, &back, oops));
    assert_true(json_is_object(back->state));
    assert_int_equal(json_object_size(back->state), 0);
    lg__manifest_free(back);
    lg__buf_free(&b);
}

static void a_tombstone_comes_back_as_it_was(void **state)
{
    (void)state;
    lg__manifest *back = NULL;
    lg__buf b = bytes_of(tombstone());
    CHECK(lg__manifest_decode(b.data, b.len, &back, oops));
    assert_true(back->tombstone);
    assert_int_equal(back->superseded_by, 4);
    assert_int_equal(back->generation.serial, 18);
    assert_string_equal(back->attempt, "0123456789abcdef");
    lg__manifest_free(back);
    lg__buf_free(&b);
}

static void rows_are_on_lines_of_their_own_and_the_file_ends_with_a_newline(void **state)
{
    (void)state;
    lg__buf b = bytes_of(sample());
    size_t lines = 0, rows = 4 + 2 + 4 + 10;
    for (size_t i = 0; i < b.len; i++) {
        lines += b.data[i] == '\n';
    }
    assert_int_equal(lines, rows + 11);
    assert_int_equal(b.data[b.len - 1], '\n');
    assert_non_null(strstr(b.data, "\n{\"name\":\"optim.v\",\"group\":\"optim\",\"dtype\":\"F32\",\"shape\":[20],"
                                   "\"layout\":2,\"flat_offset\":20},\n"));
    lg__buf_free(&b);
}

static void every_flipped_bit_is_found(void **state)
{
    (void)state;
    lg__buf files[] = {bytes_of(sample()), bytes_of(tombstone())};
    for (size_t k = 0; k < 2; k++) {
        lg__buf *b = &files[k];
        for (size_t i = 0; i < b->len; i++) {
            for (int bit = 0; bit < 8; bit++) {
                lg_error err = LG_ERROR_INIT;
                lg__manifest *m = NULL;
                b->data[i] = (char)(b->data[i] ^ (1 << bit));
                lg_status st = lg__manifest_decode(b->data, b->len, &m, &err);
                b->data[i] = (char)(b->data[i] ^ (1 << bit));
                if (m != NULL || st != (i < 11 ? LG_ERR_FORMAT : LG_ERR_CORRUPT)) {
                    fail_msg("byte %zu, bit %d: %s: %s", i, bit, lg_status_name(st), err.message);
                }
            }
        }
        lg__buf_free(b);
    }
}

static void every_cut_length_is_refused_and_told(void **state)
{
    (void)state;
    lg__buf b = bytes_of(sample());
    for (size_t n = 0; n < b.len; n++) {
        lg_error err = LG_ERROR_INIT;
        lg__manifest *m = NULL;
        char size[64];
        snprintf(size, sizeof size, "%zu bytes are there", n);
        if (decode(b.data, n, &m, &err) != LG_ERR_CORRUPT || strstr(err.message, size) == NULL) {
            fail_msg("cut to %zu: %s: %s", n, lg_status_name(err.status), err.message);
        }
    }
    lg__buf_free(&b);
}

static void two_bytes_behind_the_end_are_refused(void **state)
{
    (void)state;
    static const char *const tails[] = {"}}", "\n\n", "\n", " ", "\n}"};
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++) {
        lg_error err = LG_ERROR_INIT;
        lg__manifest *m = NULL;
        lg__buf b = bytes_of(sample());
        lg__buf_str(&b, tails[i]);
        assert_int_equal(decode(b.data, b.len, &m, &err), LG_ERR_CORRUPT);
        lg__buf_free(&b);
    }
}

/* The sample with one member changed, under a right checksum. */
static lg_status decode_edited(lg__manifest *made, const char *path, const char *value, lg_error *err)
{
    lg__buf b = bytes_of(made), body, sealed;
    json_t *top = NULL;
    CHECK(lg__json_parse(b.data, b.len, &top, oops));
    assert_int_equal(json_object_del(top, "crc32c"), 0);
    if (path != NULL && !json_edit(top, path, value)) {
        fail_msg("the sample has no place %s", path);
    }
    lg__buf_init(&body, LG__MANIFEST_MAX);
    lg__buf_init(&sealed, LG__MANIFEST_MAX);
    CHECK(lg__buf_json(&body, top, false, oops));
    CHECK(lg__sealed_json(body.data + 1, body.len - 1, &sealed, oops));
    lg__manifest *m = NULL;
    lg_status st = decode(sealed.data, sealed.len, &m, err);
    assert_int_equal(st == LG_OK, m != NULL);
    lg__manifest_free(m);
    json_decref(top);
    lg__buf_free(&b);
    lg__buf_free(&body);
    lg__buf_free(&sealed);
    return st;
}

#define F LG_ERR_FORMAT
#define DIGEST "\"0000000000000000000000000000000000000000000000000000000000000000\""
#define TENSOR(members) "+{\"name\":\"zz\",\"group\":\"model\",\"dtype\":\"F32\"," members "}"

static const struct {
    const char *path, *value; /* value NULL: removed */
    lg_status status;
    const char *says;
} malformed[] = {
    {"extra", "{\"of\":\"a later minor version\"}", LG_OK, NULL},
    {"ranks.0.extra", "1", LG_OK, NULL},
    {"tensors.0.extra", "[]", LG_OK, NULL},
    {"version", "[1,7]", LG_OK, NULL},
    {"version", "[1,9223372036854775807]", LG_OK, NULL},
    {"step", "\"9007199254740991\"", LG_OK, NULL},
    {"tensors.0.stored", "true", LG_OK, NULL},
    /* head */
    {"format", NULL, F, "format: missing"},
    {"format", "\"firstgood\"", F, "firstgood"},
    {"format", "1", F, "format: not a string"},
    {"version", NULL, F, "version: missing"},
    {"version", "[2,0]", LG_ERR_VERSION, "2.0"},
    {"version", "[4294967297,0]", LG_ERR_VERSION, "4294967297.0"},
    {"version", "[99999999999,0]", LG_ERR_VERSION, "99999999999"},
    {"version", "[0,9]", F, "version:"},
    {"version", "[1]", F, "version:"},
    {"version", "[1,0,0]", F, "version:"},
    {"version", "[1,-1]", F, "version:"},
    {"version", "[1.0,0]", F, "version:"},
    {"version", "\"1.0\"", F, "version: not an array"},
    {"requires", NULL, F, "requires: missing"},
    {"requires", "[\"encryption\"]", LG_ERR_VERSION, "encryption"},
    {"requires", "[1]", F, "requires[0]"},
    {"requires", "{}", F, "requires: not an array"},
    {"run", NULL, F, "run: missing"},
    {"run", "\"00112233445566778899AABBCCDDEEFF\"", F, "run: not 32"},
    {"run", "\"00112233445566778899aabbccddeef\"", F, "run: not 32"},
    {"run", "\"00112233445566778899aabbccddeeff0\"", F, "run: not 32"},
    {"run", "\"00112233445566778899aabbccddee\\u0000f\"", F, "run: not 32"},
    {"attempt", "\"\"", F, "attempt: not 16"},
    {"attempt", "16", F, "attempt: not a string"},
    {"generation", "[3]", F, "generation: 1 numbers"},
    {"generation", "[0,1]", F, "generation: owner epochs"},
    {"generation", "[3,1.5]", F, "generation[1]"},
    {"generation", "[3,\"18446744073709551616\"]", F, "generation[1]"},
    {"generation", "[3,\"017\"]", F, "generation[1]"},
    {"tombstone", "{\"superseded_by\":4}", F, "both a tombstone and a checkpoint"},
    {"tombstone", "null", F, "tombstone"},
    /* scalars */
    {"step", NULL, F, "step: missing"},
    {"step", "-1", F, "step:"},
    {"step", "9007199254740992", F, "step: not below 2^53"},
    {"step", "null", F, "step:"},
    {"parent", NULL, F, "parent: missing"},
    {"parent", "7", F, "parent: not an object"},
    {"parent.generation", NULL, F, "parent.generation: missing"},
    {"parent.step", "9007199254740992", F, "parent:"},
    {"parent.verified", "1", F, "parent.verified: not a boolean"},
    {"created", "\"2026-11-29 18:31:57\"", F, "created:"},
    {"created", "\"2026-11-29T18:31:57Zx\"", F, "created:"},
    {"created", NULL, F, "created: missing"},
    {"world", "0", F, "world"},
    {"world", "1000001", F, "world"},
    {"world", "4294967300", F, "world"},
    {"world", "3", F, "ranks: 4 rows for a world of 3"},
    {"world", "5", F, "ranks: 4 rows for a world of 5"},
    {"checksum", "\"md5\"", F, "checksum:"},
    {"checksum", NULL, F, "checksum: missing"},
    {"block_bytes", "65537", F, "block_bytes:"},
    {"block_bytes", "2048", F, "block_bytes:"},
    {"block_bytes", "0", F, "block_bytes:"},
    {"block_bytes", "134217728", F, "block_bytes:"},
    /* ranks */
    {"ranks", NULL, F, "ranks: missing"},
    {"ranks.3", NULL, F, "ranks: 3 rows"},
    {"ranks.1", "[]", F, "ranks[1]: not an object"},
    {"ranks.1.model.0", "0", F, "ranks[1].model[0]"},
    {"ranks.1.model.1", "-5", F, "ranks[1].model[1]"},
    {"ranks.1.model.1", "\"9223372036854775808\"", F, "ranks[1].model[1]"},
    {"ranks.1.model.1", "\"9223372036854775000\"", F, "2^63"},
    {"ranks.2.optim", "5", F, "ranks[2].optim: not an array"},
    {"ranks.2.raw", "null", F, "ranks[2].raw"},
    {"ranks.2.sums", NULL, F, "ranks[2].sums: missing"},
    {"ranks.2.sums", "47", F, "ranks[2].sums"},
    {"ranks.0.report", NULL, F, "ranks[0].report: missing"},
    {"ranks.0.report", "\"00\"", F, "ranks[0].report: not 64"},
    {"ranks.0.domain", NULL, F, "ranks[0].domain: missing"},
    {"ranks.0.domain", "\"\"", F, "ranks[0].domain"},
    {"ranks.2.domain", "\"a\\tb\"", F, "ranks[2].domain"},
    {"ranks.2.domain", "\"a\\u0000b\"", F, "ranks[2].domain"},
    /* attached */
    {"attached", NULL, F, "attached: missing"},
    {"attached.0", "3", F, "attached[0]"},
    {"attached.0.name", "\"config.json\"", F, "attached: \"config.json\" is there twice"},
    {"attached.0.name", "\"Config.JSON\"", F, "is there twice"},
    {"attached.0.name", "\"../../etc/passwd\"", F, "attached[0].name"},
    {"attached.0.name", "\"/etc/passwd\"", F, "attached[0].name"},
    {"attached.0.name", "\"lastgood.json\"", F, "attached[0].name"},
    {"attached.0.name", "\"x.safetensors\"", F, "attached[0].name"},
    {"attached.0.name", "\"..\"", F, "attached[0].name"},
    {"attached.0.name", "\"\"", F, "attached[0].name"},
    {"attached.0.name", "\"a\\u0000b\"", F, "attached[0].name"},
    {"attached.0.bytes", NULL, F, "attached[0].bytes: missing"},
    {"attached.0.sha256", "\"zz\"", F, "attached[0].sha256"},
    /* layouts */
    {"layouts", NULL, F, "layouts: missing"},
    {"layouts.1", "7", F, "layouts[1]"},
    {"layouts.1", "{}", F, "layouts[1]"},
    {"layouts", "[]", F, "tensors[0].layout: 0, but there are 0 layouts"},
    /* tensors */
    {"tensors", NULL, F, "tensors: missing"},
    {"tensors.2", "null", F, "tensors[2]: not an object"},
    {"tensors.2.name", NULL, F, "tensors[2].name: missing"},
    {"tensors.4.name", "\"\"", F, "tensors[4].name"},
    {"tensors.4.name", "\"a\\u0000hidden\"", F, "tensors[4].name"},
    {"tensors.4.name", "\"a\\nb\"", F, "tensors[4].name"},
    {"tensors.4.name", "\"__metadata__\"", F, "tensors[4].name"},
    {"tensors.4.name", "\"emb.weight\"", F, "\"emb.weight\" is there twice"},
    {"tensors.4.group", "\"raw\"", F, "tensors[4].group"},
    {"tensors.4.group", NULL, F, "tensors[4].group: missing"},
    {"tensors.4.dtype", "\"F128\"", F, "tensors[4].dtype: unknown dtype \"F128\""},
    {"tensors.4.dtype", "\"F128\"", F, "nothing"},
    {"tensors.4.dtype", "\"f64\"", F, "tensors[4].dtype"},
    {"tensors.4.shape", NULL, F, "tensors[4].shape: missing"},
    {"tensors.4.shape", "[-1]", F, "tensors[4].shape[0]"},
    {"tensors.4.shape", "[1.0]", F, "tensors[4].shape[0]"},
    {"tensors.4.shape", "[4294967296,4294967296]", F, "tensors[4].shape"},
    {"tensors.4.shape", "[1152921504606846976,1]", F, "tensors[4].shape"},
    {"tensors.4.shape", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", F, "33 dimensions"},
    {"tensors.4.layout", "4", F, "tensors[4].layout: 4, but there are 4 layouts"},
    {"tensors.4.layout", "-1", F, "tensors[4].layout"},
    {"tensors.4.layout", NULL, F, "neither \"layout\" and \"boxes\""},
    {"tensors.4.boxes", "[]", F, "both \"layout\" and \"boxes\""},
    {"tensors.3.layout", "0", F, "tensors[3].layout"}, /* no dimension to cut */
    {"tensors.4.flat_offset", "0", F, "tensors[4].flat_offset"},
    {"tensors.6.flat_offset", NULL, F, "tensors[6].flat_offset: missing"},
    {"tensors.6.flat_offset", "21", F, "tensors[6].layout"},
    {"tensors.6.flat_offset", "\"9223372036854775807\"", F, "tensors[6]"},
    {"tensors.4.stored", "false", F, "tensors[4].stored"},
    {"tensors", TENSOR("\"shape\":[1],\"stored\":false"), F, "tensors[10].stored"},
    /* irregular boxes */
    {"tensors.1.boxes", "{}", F, "tensors[1].boxes: not an array"},
    {"tensors.1.boxes", "[]", LG_ERR_COVERAGE, "experts.w1"},
    {"tensors.1.boxes.1", "[]", F, "tensors[1].boxes[1]: not an object"},
    {"tensors.1.boxes.1", NULL, LG_ERR_COVERAGE, "tensors[1].boxes"},
    {"tensors.1.boxes.1.rank", "4", F, "tensors[1].boxes[1].rank"},
    {"tensors.1.boxes.1.rank", "4294967298", F, "tensors[1].boxes[1].rank"},
    {"tensors.1.boxes.1.rank", NULL, F, "tensors[1].boxes[1].rank: missing"},
    {"tensors.1.boxes.0.rank", "3", F, "not in order of rank and offset"},
    {"tensors.1.boxes.2.offset", "[1,0]", F, "not in order of rank and offset"},
    {"tensors.1.boxes.2.offset", "[3]", F, "tensors[1].boxes[2].offset: 1 numbers"},
    {"tensors.1.boxes.2.size", "[1,4,1]", F, "tensors[1].boxes[2].size: 3 numbers"},
    {"tensors.1.boxes.2.size", "[1,3]", LG_ERR_COVERAGE, "experts.w1"},
    {"tensors.1.boxes.2.size", "[2,4]", LG_ERR_COVERAGE, "experts.w1"},
    {"tensors.1.boxes.2.size", "[0,4]", LG_ERR_COVERAGE, "experts.w1"},
    {"tensors.1.boxes.1.size", "[2,4]", LG_ERR_COVERAGE, "experts.w1"},
    {"tensors.1.boxes.2.size", "[\"9223372036854775807\",4]", LG_ERR_COVERAGE, "experts.w1"},
    {"ranks.2.model", "[8194]", F, "rank 2 has no file for its box 2"},
    {"ranks.0.model", NULL, F, "rank 0 has no file for its box 1"},
    /* aliases */
    {"tensors.2.alias_of", "\"gone\"", F, "\"gone\", which is not in this checkpoint"},
    {"tensors.2.alias_of", "\"lm_head.weight\"", F, "the alias itself"},
    {"tensors.2.alias_of", "\"tied.m\"", F, "is an alias too"},
    {"tensors.2.alias_of", "\"optim.m\"", F, "another group, dtype or shape"},
    {"tensors.2.shape", "[11,6]", F, "another group, dtype or shape"},
    {"tensors.2.dtype", "\"F16\"", F, "another group, dtype or shape"},
    {"tensors.2.group", "\"optim\"", F, "another group, dtype or shape"},
    {"tensors.2.alias_of", "null", F, "tensors[2].alias_of"},
    {"tensors.2.stored", "false", F, "not stored, yet says where"},
    {"tensors.9.stored", "true", F, "neither"},
    {"tensors.9.stored", "0", F, "tensors[9].stored: not a boolean"},
    /* state */
    {"state", NULL, F, "state: missing"},
    {"state", "[]", F, "state: not an object"},
    {"state.lr", "{\"$nonsense\":1}", F, "state.lr"},
    {"state.lr", "{\"$float\":\"fast\"}", F, "state.lr"},
    {"state.a\nb", "1", F, "state"},
};

static void a_malformed_manifest_is_refused_by_the_member_that_is_wrong(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(decode_edited(sample(), NULL, NULL, &err), LG_OK);
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++) {
        const char *value = malformed[i].value;
        lg_status st = decode_edited(sample(), malformed[i].path, value, &err);
        if (st != malformed[i].status ||
            (malformed[i].says != NULL && strstr(err.message, malformed[i].says) == NULL)) {
            fail_msg("case %zu, %s = %s: %s: %s", i, malformed[i].path, value != NULL ? value : "(removed)",
                     lg_status_name(st), err.message);
        }
    }
}

static void a_malformed_tombstone_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *path, *value;
        lg_status status;
    } cases[] = {{"extra", "1", LG_OK},
                 {"tombstone.superseded_by", "\"18446744073709551615\"", LG_OK},
                 {"tombstone.superseded_by", "3", LG_OK}, /* its own owner gave up */
                 {"tombstone.superseded_by", "2", F},
                 {"tombstone.superseded_by", NULL, F},
                 {"tombstone", "true", F},
                 {"attempt", NULL, F},
                 {"ranks", "[]", F},
                 {"version", "[2,0]", LG_ERR_VERSION},
                 {"requires", "[\"x\"]", LG_ERR_VERSION}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lg_error err = LG_ERROR_INIT;
        lg_status st = decode_edited(tombstone(), cases[i].path, cases[i].value, &err);
        if (st != cases[i].status) {
            fail_msg("case %zu, %s: %s: %s", i, cases[i].path, lg_status_name(st), err.message);
        }
    }
}

/* What a reader keeps for a file is much more than the two bytes that name it. */
static void more_files_of_a_rank_than_a_writer_makes_are_refused(void **state)
{
    (void)state;
    for (size_t more = 0; more < 2; more++) {
        lg__buf list;
        lg__buf_init(&list, LG__MANIFEST_MAX);
        for (size_t i = 0; i < LG__MAX_FILES + more; i++) {
            lg__buf_str(&list, i == 0 ? "[1" : ",1");
        }
        lg__buf_str(&list, "]");
        lg_error err = LG_ERROR_INIT;
        lg_status st = decode_edited(sample(), "ranks.1.optim", list.data, &err);
        assert_int_equal(st, more == 0 ? LG_OK : LG_ERR_FORMAT);
        assert_true(more == 0 || strstr(err.message, "ranks[1].optim: 100000 files") != NULL);
        lg__buf_free(&list);
    }
}

/* The checksum comes first: damage is never taken for a newer version. */
static void a_newer_version_is_told_only_when_the_checksum_is_right(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg__manifest *m = NULL;
    lg__buf b = bytes_of(sample());
    char *version = strstr(b.data, "[1,0]");
    assert_non_null(version);
    version[1] = '2';
    assert_int_equal(decode(b.data, b.len, &m, &err), LG_ERR_CORRUPT);
    lg__buf_free(&b);
}

static void other_json_is_not_taken_for_a_manifest(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg__manifest *m = NULL;
    lg__buf b;
    lg__buf_init(&b, 1024);
    static const char index[] = "{\"metadata\":{},\"weight_map\":{}}";
    assert_int_equal(decode(index, sizeof index - 1, &m, &err), F);
    assert_non_null(strstr(err.message, "not a file of lastgood"));
    static const char record[] = "\"kind\":\"pin\",\"version\":1}";
    CHECK(lg__sealed_json(record, sizeof record - 1, &b, oops));
    assert_int_equal(decode(b.data, b.len, &m, &err), F);
    assert_non_null(strstr(err.message, "kind \"pin\", no manifest"));
    lg__buf_free(&b);
}

static void deeper_state_than_a_reader_takes_is_not_written(void **state)
{
    (void)state;
    for (int depth = 50; depth < 75; depth++) {
        lg__manifest *m = sample(), *back = NULL;
        json_t *v = json_integer(1);
        for (int i = 0; i < depth; i++) {
            json_t *outer = json_array();
            json_array_append_new(outer, v);
            v = outer;
        }
        json_object_set_new(m->state, "deep", v);
        lg_error err = LG_ERROR_INIT;
        lg__buf b;
        lg__buf_init(&b, LG__MANIFEST_MAX);
        lg_status st = lg__manifest_encode(m, &b, &err);
        if (st == LG_OK) {
            CHECK(lg__manifest_decode(b.data, b.len, &back, oops));
        } else {
            assert_int_equal(st, LG_ERR_INVALID);
            assert_true(depth >= LG__TAGGED_MAX_DEPTH);
            assert_non_null(strstr(err.message, "state.deep"));
            assert_int_equal(b.len, 0);
        }
        assert_true(depth < 74 || st != LG_OK);
        lg__manifest_free(m);
        lg__manifest_free(back);
        lg__buf_free(&b);
    }
}

/* Whatever encode accepts can be read again. */
static void what_could_not_be_read_is_not_written(void **state)
{
    (void)state;
    for (int k = 0; k < 19; k++) {
        lg__manifest *m = sample();
        lg__stored_piece *pieces = (lg__stored_piece *)(uintptr_t)m->tensors[1].pieces;
        switch (k) {
        case 0:
            m->step = UINT64_C(1) << 53;
            break;
        case 1:
            m->created[0] = '\0';
            break;
        case 2:
            m->block_bytes = 1000;
            break;
        case 3:
            m->tensors[4].name = m->tensors[3].name;
            break;
        case 4:
            m->tensors[0].layout = 4;
            break;
        case 5:
            m->attached[0].name = "rank-00001.sums";
            break;
        case 6:
            m->ranks[2].domain = NULL;
            break;
        case 7:
            m->tensors[2].alias_of = "nobody";
            break;
        case 8:
            m->run_id[31] = '\0';
            break;
        case 9:
            m->attempt[0] = 'A';
            break;
        case 10:
            m->world = 0;
            break;
        case 11:
            m->ranks[2].domain = "two\nlines";
            break;
        case 12:
            pieces[1].box.ndim = 1;
            break;
        case 13:
            pieces[0].rank = 4;
            break;
        case 14:
            m->tensors[0].name = "";
            break;
        case 15:
            m->tensors[0].group = LG_GROUP_RAW;
            break;
        case 16:
            m->tensors[0].dtype = LG_F4;
            m->tensors[0].ndim = 0;
            break;
        case 17:
            m->tensors[3].name = "zz";
            break;
        case 18:
            m->generation.epoch = 0;
            break;
        }
        lg_error err = LG_ERROR_INIT;
        lg__buf b;
        lg__buf_init(&b, LG__MANIFEST_MAX);
        if (lg__manifest_encode(m, &b, &err) != LG_ERR_INVALID) {
            fail_msg("case %d: %s: %s", k, lg_status_name(err.status), err.message);
        }
        assert_int_equal(b.len, 0);
        lg__buf_free(&b);
        lg__manifest_free(m);
    }
}

static void tensors_out_of_order_are_sorted_by_the_reader(void **state)
{
    (void)state;
    lg__buf b = bytes_of(sample()), body, sealed;
    json_t *top = NULL;
    CHECK(lg__json_parse(b.data, b.len, &top, oops));
    json_object_del(top, "crc32c");
    json_t *tensors = json_object_get(top, "tensors");
    json_t *first = json_incref(json_array_get(tensors, 0));
    json_array_remove(tensors, 0);
    json_array_append_new(tensors, first);
    lg__buf_init(&body, LG__MANIFEST_MAX);
    lg__buf_init(&sealed, LG__MANIFEST_MAX);
    CHECK(lg__buf_json(&body, top, false, oops));
    CHECK(lg__sealed_json(body.data + 1, body.len - 1, &sealed, oops));
    lg__manifest *m = NULL, *want = sample();
    CHECK(lg__manifest_decode(sealed.data, sealed.len, &m, oops));
    assert_same(want, m);
    lg__manifest_free(m);
    lg__manifest_free(want);
    json_decref(top);
    lg__buf_free(&b);
    lg__buf_free(&body);
    lg__buf_free(&sealed);
}

static char *read_golden(size_t *bytes)
{
    const char *source = getenv("LASTGOOD_SOURCE");
    char path[4096];
    snprintf(path, sizeof path, "%s/tests/golden/manifest-1.0.json", source != NULL ? source : ".");
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        fail_msg("cannot open %s; run in the source folder or set LASTGOOD_SOURCE", path);
    }
    char *data = malloc(1 << 20);
    assert_non_null(data);
    *bytes = fread(data, 1, 1 << 20, f);
    fclose(f);
    return data;
}

static void the_golden_manifest_of_1_0_is_read_for_ever(void **state)
{
    (void)state;
    size_t n = 0;
    char *golden = read_golden(&n);
    lg__manifest *m = NULL, *want = sample();
    CHECK(lg__manifest_decode(golden, n, &m, oops));
    assert_int_equal(m->major, 1);
    assert_int_equal(m->minor, 0);
    assert_same(want, m);
    lg__manifest_free(m);
    lg__manifest_free(want);
    free(golden);
}

static void this_version_writes_the_golden_bytes(void **state)
{
    (void)state;
    size_t n = 0;
    char *golden = read_golden(&n);
    lg__buf b = bytes_of(sample());
    assert_int_equal(n, b.len);
    assert_memory_equal(golden, b.data, n);
    lg__buf_free(&b);
    free(golden);
}

static void failing_memory_leaks_nothing(void **state)
{
    (void)state;
    lg__manifest *m = sample();
    bool done = false;
    size_t n = 0;
    for (; !done; n++) {
        lg_error err = LG_ERROR_INIT;
        lg__buf b;
        lg__manifest *back = NULL;
        lg__buf_init(&b, LG__MANIFEST_MAX);
        lg__mem_fail_after(n);
        lg_status st = lg__manifest_encode(m, &b, &err);
        if (st == LG_OK) {
            st = lg__manifest_decode(b.data, b.len, &back, &err);
        }
        lg__mem_fail_after(SIZE_MAX);
        if (st != LG_OK && st != LG_ERR_NOMEM) {
            fail_msg("allocation %zu fails: %s: %s", n, lg_status_name(st), err.message);
        }
        assert_int_equal(st == LG_OK, back != NULL);
        done = st == LG_OK;
        lg__manifest_free(back);
        lg__buf_free(&b);
    }
    assert_true(n > 20);
    lg__manifest_free(m);
}

static void four_thousand_ranks_and_two_thousand_tensors_fit_four_megabytes(void **state)
{
    (void)state;
    enum { WORLD = 4096, TENSORS = 2000, LAYOUTS = 6 };
    lg__manifest *m = sample(), *back = NULL;
    m->world = WORLD;
    m->ranks = lg__arena_array(m->arena, WORLD, sizeof *m->ranks);
    assert_non_null(m->ranks);
    for (uint32_t r = 0; r < WORLD; r++) {
        lg__rank_row *row = &m->ranks[r];
        for (int g = 0; g < LG_GROUP_COUNT; g++) {
            row->n_files[g] = 1;
            row->file_bytes[g] = U64S(m, (UINT64_C(1) << 36) + r);
        }
        row->sums_bytes = 1 << 24;
        fill_digest(row->report, r);
        if (r % 8 == 0) {
            char domain[64];
            snprintf(domain, sizeof domain, "gpu-node-%04u.rack-%02u.example", r / 8, r / 256);
            row->domain = lg__arena_strdup(m->arena, domain);
        } else {
            row->domain = m->ranks[r - 1].domain;
        }
    }
    for (size_t i = 0; i < m->n_layouts; i++) {
        lg__layout_unref(m->layouts[i]);
    }
    m->layouts = lg__arena_array(m->arena, LAYOUTS, sizeof *m->layouts);
    assert_non_null(m->layouts);
    m->n_layouts = 0;
    m->layouts[m->n_layouts++] = rows_layout(WORLD, 1 << 20);
    m->layouts[m->n_layouts++] = layout_of(false, WORLD);
    m->layouts[m->n_layouts++] = rows_layout(8, 1 << 20);
    m->layouts[m->n_layouts++] = rows_layout(64, 1 << 20);
    m->layouts[m->n_layouts++] = rows_layout(512, 1 << 20);
    m->layouts[m->n_layouts++] = layout_of(true, 512);
    m->n_tensors = TENSORS;
    m->tensors = lg__arena_array(m->arena, TENSORS, sizeof *m->tensors);
    assert_non_null(m->tensors);
    for (size_t i = 0; i < TENSORS; i++) {
        char name[128];
        snprintf(name, sizeof name, "optim.exp_avg.model.layers.%05zu.self_attn.q_proj.weight", i);
        m->tensors[i] = (lg__manifest_tensor){.name = lg__arena_strdup(m->arena, name),
                                              .group = i % 2 ? LG_GROUP_MODEL : LG_GROUP_OPTIM,
                                              .dtype = LG_BF16,
                                              .ndim = 2,
                                              .shape = U64S(m, 1 << 20, 16384),
                                              .layout = i % LAYOUTS,
                                              .stored = true};
    }
    uint64_t t0 = lg__now_ms();
    lg__buf b;
    lg__buf_init(&b, LG__MANIFEST_MAX);
    CHECK(lg__manifest_encode(m, &b, oops));
    uint64_t t1 = lg__now_ms();
    CHECK(lg__manifest_decode(b.data, b.len, &back, oops));
    uint64_t t2 = lg__now_ms();
    print_message("# %d ranks, %d tensors: %zu bytes, encode %d ms, decode %d ms\n", WORLD, TENSORS, b.len,
                  (int)(t1 - t0), (int)(t2 - t1));
    assert_true(b.len < 4000000);
    assert_same(m, back);
    lg__manifest_free(m);
    lg__manifest_free(back);
    lg__buf_free(&b);
}

#define TEST(name, function)             \
    {                                    \
        name, function, NULL, NULL, NULL \
    }

int main(int argc, char **argv)
{
    /* How tests/golden/manifest-1.0.json was made. */
    if (argc == 2 && strcmp(argv[1], "--print-sample") == 0) {
        lg__buf b = bytes_of(sample());
        fwrite(b.data, 1, b.len, stdout);
        lg__buf_free(&b);
        return 0;
    }
    const struct CMUnitTest tests[] = {
        TEST("a manifest comes back as it was", a_manifest_comes_back_as_it_was),
        TEST("a first checkpoint has no parent and may be empty", a_first_checkpoint_has_no_parent_and_may_be_empty),
        TEST("a manifest without state has an empty one", a_manifest_without_state_has_an_empty_one),
        TEST("a tombstone comes back as it was", a_tombstone_comes_back_as_it_was),
        TEST("rows are on lines of their own and the file ends with a newline",
             rows_are_on_lines_of_their_own_and_the_file_ends_with_a_newline),
        TEST("K01: every flipped bit is found", every_flipped_bit_is_found),
        TEST("K01: every cut length is refused and told", every_cut_length_is_refused_and_told),
        TEST("K05: two bytes behind the end are refused", two_bytes_behind_the_end_are_refused),
        TEST("K14, K15, K22: a malformed manifest is refused by the member that is wrong",
             a_malformed_manifest_is_refused_by_the_member_that_is_wrong),
        TEST("K02: a malformed tombstone is refused", a_malformed_tombstone_is_refused),
        TEST("K22: a newer version is told only when the checksum is right",
             a_newer_version_is_told_only_when_the_checksum_is_right),
        TEST("K15: more files of a rank than a writer makes are refused",
             more_files_of_a_rank_than_a_writer_makes_are_refused),
        TEST("K14: other JSON is not taken for a manifest", other_json_is_not_taken_for_a_manifest),
        TEST("K15: deeper state than a reader takes is not written", deeper_state_than_a_reader_takes_is_not_written),
        TEST("K01: what could not be read is not written", what_could_not_be_read_is_not_written),
        TEST("tensors out of order are sorted by the reader", tensors_out_of_order_are_sorted_by_the_reader),
        TEST("K22: the golden manifest of 1.0 is read for ever", the_golden_manifest_of_1_0_is_read_for_ever),
        TEST("K22: this version writes the golden bytes", this_version_writes_the_golden_bytes),
        TEST("failing memory leaks nothing", failing_memory_leaks_nothing),
        TEST("K16: 4,096 ranks and 2,000 tensors fit four megabytes",
             four_thousand_ranks_and_two_thousand_tensors_fit_four_megabytes),
    };
    return cmocka_run_group_tests_name("manifest", tests, NULL, NULL);
}
