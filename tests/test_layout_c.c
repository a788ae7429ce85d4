/* SPDX-License-Identifier: Apache-2.0 */

/* Folders of safetensors shards of other writers, without a manifest: what the
 * headers together say must put every tensor together from its boxes, and each
 * kind of faulty folder must be told from a good one. The folders and what is
 * in them are under tests/vectors. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/hash.h"
#include "container.h"
#include "vectors.h"

#include <inttypes.h>
#include <string.h>

enum { MAX_FILES = 8, MAX_BOXES = 64 };

/* A folder, all its shards open. */
typedef struct folder {
    size_t n;
    char names[MAX_FILES][64];
    vector_file bytes[MAX_FILES];
    lg__st_header *headers[MAX_FILES];
} folder;

static void folder_close(folder *f)
{
    for (size_t i = 0; i < f->n; i++) {
        lg__st_free(f->headers[i]);
        free(f->bytes[i].data);
    }
    memset(f, 0, sizeof *f);
}

/* Opens every file: in such a folder each *.safetensors counts. */
static lg_status folder_open(const char *name, folder *f, lg_error *err)
{
    memset(f, 0, sizeof *f);
    f->n = vectors_list(name, f->names, MAX_FILES);
    assert_in_range(f->n, 1, MAX_FILES - 1);
    for (size_t i = 0; i < f->n; i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", name, f->names[i]);
        f->bytes[i] = vectors_read(path);
        lg_status status = open_bytes(f->bytes[i].data, f->bytes[i].bytes, &f->headers[i], err);
        if (status != LG_OK) {
            return lg_error_wrap(err, "%s", f->names[i]);
        }
    }
    return LG_OK;
}

/* A tensor as all files together tell of it. */
typedef struct assembled {
    lg_dtype dtype;
    uint32_t ndim;
    uint64_t shape[LG_MAX_NDIM];
    size_t n, found; /* without and with the empty ones that are left out */
    lg__region boxes[MAX_BOXES];
    uint32_t files[MAX_BOXES];
    const uint8_t *data[MAX_BOXES];
} assembled;

/* Empty boxes of a tensor that has elements hold nothing and are left out, but
 * not before they were seen not to stand in another box's place: readers that
 * look boxes up by their offset would find the wrong one. */
static lg_status leave_out_empty(const char *name, assembled *a, lg_error *err)
{
    size_t kept = 0;
    a->found = a->n;
    bool empty_tensor = false;
    for (uint32_t d = 0; d < a->ndim; d++) {
        empty_tensor = empty_tensor || a->shape[d] == 0;
    }
    for (size_t i = 0; i < a->n; i++) {
        for (size_t k = 0; k < i; k++) {
            if (lg__region_compare(&a->boxes[i], &a->boxes[k]) == 0) {
                return lg_error_set(err, LG_ERR_COVERAGE, "tensor \"%s\": two boxes begin at the same place", name);
            }
        }
    }
    for (size_t i = 0; i < a->n; i++) {
        if (!lg__region_empty(&a->boxes[i]) || empty_tensor) {
            a->boxes[kept] = a->boxes[i], a->files[kept] = a->files[i], a->data[kept] = a->data[i];
            kept++;
        }
    }
    a->n = kept;
    return LG_OK;
}

/* Gathers the boxes of `name` and proves that they tile it. `shape` is the one
 * that is wanted; the files alone would hide that the last ones are gone. */
static lg_status assemble(const folder *f, const char *name, uint32_t ndim, const uint64_t *shape, assembled *a,
                          lg_error *err)
{
    memset(a, 0, sizeof *a);
    a->ndim = ndim;
    for (size_t i = 0; i < f->n; i++) {
        const lg__st_tensor *t = lg__st_find(f->headers[i], name);
        if (t == NULL) {
            continue;
        }
        if (t->ndim != ndim || (a->n > 0 && t->dtype != a->dtype)) {
            return lg_error_set(err, LG_ERR_MISMATCH, "tensor \"%s\": files disagree about dtype or dimensions", name);
        }
        assert_true(a->n < MAX_BOXES);
        lg__region *box = &a->boxes[a->n];
        a->dtype = t->dtype;
        box->ndim = ndim;
        for (uint32_t d = 0; d < ndim; d++) {
            box->offset[d] = t->has_offsets ? t->saved_offsets[d] : 0;
            box->size[d] = t->shape[d];
            uint64_t end = box->offset[d] + box->size[d];
            a->shape[d] = end > a->shape[d] ? end : a->shape[d];
        }
        a->files[a->n] = (uint32_t)i;
        a->data[a->n] = f->bytes[i].data + f->headers[i]->data_start + t->begin;
        a->n++;
    }
    if (a->n == 0) {
        return lg_error_set(err, LG_ERR_MISSING, "tensor \"%s\": in no file", name);
    }
    for (uint32_t d = 0; d < ndim; d++) {
        if (a->shape[d] != shape[d]) {
            return lg_error_set(err, LG_ERR_MISMATCH, "tensor \"%s\": the boxes end at %" PRIu64 ", not %" PRIu64, name,
                                a->shape[d], shape[d]);
        }
    }
    lg_status status = leave_out_empty(name, a, err);
    return status != LG_OK ? status : lg__region_check_tiling(name, ndim, shape, a->boxes, a->files, a->n, err);
}

typedef struct copy {
    uint8_t *to;
    const uint8_t *from;
} copy;

static lg_status copy_run(uint64_t box_byte, int64_t mem_byte, uint64_t bytes, void *arg, lg_error *err)
{
    (void)err;
    copy *c = arg;
    memcpy(c->to + mem_byte, c->from + box_byte, bytes);
    return LG_OK;
}

/* SHA-256 of the whole tensor, put together box by box. */
static void digest(const assembled *a, char hex[LG_DIGEST_TEXT])
{
    static const uint64_t origin[LG_MAX_NDIM] = {0};
    lg_error err = LG_ERROR_INIT;
    uint64_t bytes = 0;
    assert_int_equal(lg__shape_bytes(a->dtype, a->ndim, a->shape, &bytes, &err), LG_OK);
    uint8_t *whole = malloc(bytes + 1), sum[LG__SHA256_BYTES];
    assert_non_null(whole);
    for (size_t i = 0; i < a->n; i++) {
        lg__run_walk walk = {a->dtype, &a->boxes[i], &a->boxes[i], origin, a->shape, NULL};
        copy c = {whole, a->data[i]};
        if (!lg__region_empty(&a->boxes[i])) {
            assert_int_equal(lg__region_runs(&walk, copy_run, &c, &err), LG_OK);
        }
    }
    assert_int_equal(lg__sha256_of(whole, bytes, sum, &err), LG_OK);
    lg__hex(sum, sizeof sum, hex);
    free(whole);
}

static uint32_t parse_shape(const char *text, uint64_t shape[LG_MAX_NDIM])
{
    uint32_t ndim = 0;
    assert_true(*text == '[');
    for (text++; *text != ']'; text += *text == ',') {
        char *end;
        shape[ndim++] = strtoull(text, &end, 10);
        assert_true(end != text);
        text = end;
    }
    return ndim;
}

static const char *torch_name(lg_dtype dtype)
{
    static const struct {
        lg_dtype dtype;
        const char *name;
    } table[] = {
        {LG_BOOL, "bool"},
        {LG_U8, "uint8"},
        {LG_I8, "int8"},
        {LG_F8_E5M2, "float8_e5m2"},
        {LG_F8_E4M3, "float8_e4m3fn"},
        {LG_F8_E4M3FNUZ, "float8_e4m3fnuz"},
        {LG_F8_E5M2FNUZ, "float8_e5m2fnuz"},
        {LG_I16, "int16"},
        {LG_U16, "uint16"},
        {LG_F16, "float16"},
        {LG_BF16, "bfloat16"},
        {LG_I32, "int32"},
        {LG_U32, "uint32"},
        {LG_F32, "float32"},
        {LG_C64, "complex64"},
        {LG_F64, "float64"},
        {LG_I64, "int64"},
        {LG_U64, "uint64"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (table[i].dtype == dtype) {
            return table[i].name;
        }
    }
    return "?";
}

static void check_folder(const char *name, size_t want)
{
    char path[256];
    snprintf(path, sizeof path, "%s.expected.tsv", name);
    vector_file tsv = vectors_read(path);
    folder f;
    lg_error err = LG_ERROR_INIT;
    if (folder_open(name, &f, &err) != LG_OK) {
        fail_msg("%s: %s", name, err.message);
    }
    size_t tensors = 0, boxes = 0;
    for (char *save = NULL, *line = strtok_r((char *)tsv.data, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        char *column[8], hex[LG_DIGEST_TEXT];
        uint64_t shape[LG_MAX_NDIM];
        assembled a;
        if (line[0] == '#') {
            continue;
        }
        assert_int_equal(vectors_columns(line, column, 8), 8);
        uint32_t ndim = parse_shape(column[3], shape);
        if (assemble(&f, column[0], ndim, shape, &a, &err) != LG_OK) {
            fail_msg("%s: %s", name, err.message);
        }
        assert_string_equal(torch_name(a.dtype), column[2]);
        digest(&a, hex);
        if (strcmp(hex, column[5]) != 0) {
            fail_msg("%s: tensor \"%s\": sha256 %s, not %s", name, column[0], hex, column[5]);
        }
        tensors++;
        boxes += a.found;
    }
    assert_int_equal(tensors, want);
    /* Nothing else is in the files. */
    size_t entries = 0;
    for (size_t i = 0; i < f.n; i++) {
        entries += f.headers[i]->n;
    }
    assert_int_equal(entries, boxes);
    folder_close(&f);
    free(tsv.data);
}

static void tensors_are_put_together_from_the_shards_of_another_writer(void **state)
{
    (void)state;
    check_folder("layout-c", 27);
    check_folder("hf-dist-torch2.13", 10);
}

static void every_faulty_folder_is_told_from_a_good_one(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        lg_status status;
        const char *words;
    } why[] = {
        {"duplicate_box", LG_ERR_COVERAGE, "two boxes begin at the same place"},
        {"empty_chunk_at_origin", LG_ERR_COVERAGE, "two boxes begin at the same place"},
        {"foreign_file", LG_ERR_CORRUPT, "notes.safetensors"},
        {"hole_first", LG_ERR_COVERAGE, "no box"},
        {"hole_last", LG_ERR_MISMATCH, "the boxes end at 2, not 4"},
        {"info_absent_in_two_files", LG_ERR_MISMATCH, "the boxes end at 2, not 4"},
        {"info_lacks_a_key", LG_ERR_FORMAT, "\"b\""},
        {"ndim_differs", LG_ERR_MISMATCH, "disagree"},
        {"offsets_too_short", LG_ERR_FORMAT, "saved_offsets"},
        {"overlap", LG_ERR_COVERAGE, "overlap"},
        {"truncated", LG_ERR_CORRUPT, "have 191 bytes, need 192"},
    };
    static const uint64_t shape[] = {4, 2};
    static const float values[] = {0, 1, 2, 3, 4, 5, 6, 7};
    uint8_t sum[LG__SHA256_BYTES];
    char wanted[LG_DIGEST_TEXT], hex[LG_DIGEST_TEXT];
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg__sha256_of(values, sizeof values, sum, &err), LG_OK);
    lg__hex(sum, sizeof sum, wanted);
    vector_file tsv = vectors_read("layout-c-hazards.expected.tsv");
    size_t accepted = 0, refused = 0;
    for (char *save = NULL, *line = strtok_r((char *)tsv.data, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        char *column[4], path[256];
        folder f;
        assembled a;
        if (line[0] == '#') {
            continue;
        }
        assert_true(vectors_columns(line, column, 4) >= 3);
        snprintf(path, sizeof path, "layout-c-hazards/%s", column[0]);
        lg_status status = folder_open(path, &f, &err);
        /* e8m0_stored_as_u8 has only z. */
        const bool only_z = status == LG_OK && lg__st_find(f.headers[0], "w") == NULL;
        static const uint64_t four[] = {4};
        if (status == LG_OK) {
            status = assemble(&f, only_z ? "z" : "w", only_z ? 1 : 2, only_z ? four : shape, &a, &err);
        }
        if (strcmp(column[2], "accept") == 0) {
            if (status != LG_OK) {
                fail_msg("%s: %s", column[0], err.message);
            }
            digest(&a, hex);
            if (!only_z) {
                assert_string_equal(hex, wanted);
            }
            accepted++;
        } else {
            assert_string_equal(column[2], "reject");
            size_t i = 0;
            while (i < sizeof why / sizeof why[0] && strcmp(why[i].name, column[0]) != 0) {
                i++;
            }
            assert_true(i < sizeof why / sizeof why[0]);
            if (status != why[i].status || strstr(err.message, why[i].words) == NULL) {
                fail_msg("%s: %s: %s", column[0], lg_status_name(status), status == LG_OK ? "accepted" : err.message);
            }
            refused++;
        }
        folder_close(&f);
    }
    free(tsv.data);
    assert_int_equal(accepted, 4);
    assert_int_equal(refused, sizeof why / sizeof why[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"tensors are put together from the shards of another writer, equal to the byte",
         tensors_are_put_together_from_the_shards_of_another_writer, NULL, NULL, NULL},
        {"K14: every faulty folder of shards is told from a good one", every_faulty_folder_is_told_from_a_good_one,
         NULL, NULL, NULL},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
