/* SPDX-License-Identifier: Apache-2.0 */

/* Many tensors: what is read without the JSON library is read as it would be
 * with it, and time and memory stay in proportion. */

#include "base/error.h"
#include "base/json_pieces.h"
#include "core/index.h"
#include "format/manifest.h"
#include "format/safetensors.h"
#include "format/sums.h"
#include "manifest_sample.h"
#include "support/environment.h"
#include "support/temp_dir.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ------------------------------------------------- plain forms and JSON
 *
 * A space behind the brace makes a row or an entry one that the library must
 * read. Whatever happens to the text, both have one meaning. */

static char *replaced(const char *text, size_t n, const char *from, const char *to, size_t *out_n)
{
    size_t a = strlen(from), b = strlen(to), used = 0;
    char *out = malloc(n * (b > a ? b : a) / a + n + 1);
    assert_non_null(out);
    for (size_t i = 0; i < n;) {
        if (n - i >= a && memcmp(text + i, from, a) == 0) {
            memcpy(out + used, to, b);
            used += b;
            i += a;
        } else {
            out[used++] = text[i++];
        }
    }
    out[used] = '\0';
    *out_n = used;
    return out;
}

static uint64_t next(uint64_t *seed)
{
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *seed >> 33;
}

/* One byte changed, removed or doubled, within [from, to). */
static char *mutated(const char *text, size_t n, size_t from, size_t to, uint64_t *seed, size_t *out_n)
{
    static const char alphabet[] = "0123456789-+.eE\",:[]{}\\ abFmx\xc3\x7f\n";
    char *out = malloc(n + 2);
    assert_non_null(out);
    size_t at = from + (size_t)next(seed) % (to - from), skip = 1, used = at;
    memcpy(out, text, at);
    switch (next(seed) % 4) {
    case 0:
        break; /* removed */
    case 1:
        out[used++] = text[at];
        out[used++] = text[at];
        break;
    case 2:
        skip = 0;
        out[used++] = alphabet[next(seed) % (sizeof alphabet - 1)];
        break;
    default:
        out[used++] = alphabet[next(seed) % (sizeof alphabet - 1)];
    }
    memcpy(out + used, text + at + skip, n - at - skip);
    *out_n = used + n - at - skip;
    return out;
}

static lg_status decode_body(const char *body, size_t n, lg__manifest **out, lg_error *err)
{
    lg__buf sealed;
    lg__buf_init(&sealed, LG__MANIFEST_MAX);
    lg_status st = lg__sealed_json(body, n, &sealed, err);
    if (st == LG_OK) {
        st = lg__manifest_decode(sealed.data, sealed.len, out, err);
    }
    lg__buf_free(&sealed);
    return st;
}

/* The text that a manifest is written as says all of it but its seal. */
static void assert_same_manifest(lg__manifest *a, lg__manifest *b)
{
    lg_error err = LG_ERROR_INIT;
    lg__buf x, y;
    lg__buf_init(&x, LG__MANIFEST_MAX);
    lg__buf_init(&y, LG__MANIFEST_MAX);
    assert_int_equal(lg__manifest_encode(a, &x, &err), LG_OK);
    assert_int_equal(lg__manifest_encode(b, &y, &err), LG_OK);
    assert_int_equal(x.len, y.len);
    assert_memory_equal(x.data, y.data, x.len);
    lg__buf_free(&x);
    lg__buf_free(&y);
}

static void rows_of_a_manifest_mean_the_same_in_any_form(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg__buf b;
    lg__buf_init(&b, LG__MANIFEST_MAX);
    lg__manifest *m = sample();
    assert_int_equal(lg__manifest_encode(m, &b, &err), LG_OK);
    lg__manifest_free(m);
    const char *body = b.data + 21;
    size_t n = b.len - 22; /* without the last newline */
    size_t from = (size_t)(strstr(body, "\"tensors\"") - body), to = (size_t)(strstr(body, "\"state\"") - body);
    uint64_t seed = 20261129;
    int good = 0, bad = 0;
    const int rounds = in_brief() ? 500 : 5000;
    for (int i = 0; i < rounds; i++) {
        size_t plain_n, json_n;
        uint64_t seed_was = seed;
        char *plain = i == 0 ? replaced(body, n, "\n", "\n", &plain_n) : mutated(body, n, from, to, &seed, &plain_n);
        char *rows = replaced(plain, plain_n, "{\"name\":", "{ \"name\":", &json_n);
        char *json = replaced(rows, json_n, "{\"rank\":", "{ \"rank\":", &json_n);
        lg__manifest *x = NULL, *y = NULL;
        lg_error e = LG_ERROR_INIT, f = LG_ERROR_INIT;
        lg_status s = decode_body(plain, plain_n, &x, &e), t = decode_body(json, json_n, &y, &f);
        if (s != t) {
            fail_msg("seed %llu: %s: %s, but %s: %s", (unsigned long long)seed_was, lg_status_name(s), e.message,
                     lg_status_name(t), f.message);
        }
        if (s == LG_OK) {
            assert_same_manifest(x, y);
            good++;
        } else {
            bad++;
        }
        lg__manifest_free(x);
        lg__manifest_free(y);
        free(plain);
        free(rows);
        free(json);
    }
    assert_true(good > rounds / 25 && bad > rounds * 2 / 5);
    lg__buf_free(&b);
}

static lg_status parse_header(const char *text, size_t n, lg__st_header **out, lg_error *err)
{
    return lg__st_parse(text, n, 8 + n + 52, out, err);
}

static void entries_of_a_header_mean_the_same_in_any_form(void **state)
{
    (void)state;
    static const uint64_t shape[] = {3, 4}, offset[] = {10, 0}, one[] = {2};
    lg__st_entry entries[] = {
        {.name = "b.weight", .dtype = LG_F32, .ndim = 2, .shape = shape, .offset = offset},
        {.name = "a \"quoted\" \\ name", .dtype = LG_U8, .ndim = 1, .shape = one},
        {.name = "scalar", .dtype = LG_BF16},
    };
    lg_error err = LG_ERROR_INIT;
    lg__buf b;
    uint64_t bytes = 0;
    lg__buf_init(&b, 1 << 16);
    assert_int_equal(lg__st_plan(entries, 3, NULL, 0, false, 8, &b, &bytes, &err), LG_OK);
    assert_int_equal(bytes, 52);
    const char *text = b.data + 8;
    size_t n = b.len - 8;
    uint64_t seed = 7;
    int good = 0, bad = 0;
    const int rounds = in_brief() ? 2000 : 20000;
    for (int i = 0; i < rounds; i++) {
        size_t plain_n, json_n;
        uint64_t seed_was = seed;
        char *plain = i == 0 ? replaced(text, n, "x", "x", &plain_n) : mutated(text, n, 0, n, &seed, &plain_n);
        char *entry = replaced(plain, plain_n, ":{\"dtype\"", ":{ \"dtype\"", &json_n);
        char *json = replaced(entry, json_n, "{\\\"saved", "{ \\\"saved", &json_n);
        lg__st_header *x = NULL, *y = NULL;
        lg_error e = LG_ERROR_INIT, f = LG_ERROR_INIT;
        lg_status s = parse_header(plain, plain_n, &x, &e), t = parse_header(json, json_n, &y, &f);
        if (s != t) {
            fail_msg("seed %llu: %.*s: %s: %s, but %s: %s", (unsigned long long)seed_was, (int)plain_n, plain,
                     lg_status_name(s), e.message, lg_status_name(t), f.message);
        }
        if (s == LG_OK) {
            assert_int_equal(x->n, y->n);
            for (size_t k = 0; k < x->n; k++) {
                const lg__st_tensor *p = &x->tensors[k], *q = &y->tensors[k];
                assert_string_equal(p->name, q->name);
                assert_int_equal(p->dtype, q->dtype);
                assert_int_equal(p->ndim, q->ndim);
                assert_memory_equal(p->shape, q->shape, p->ndim * sizeof *p->shape);
                assert_int_equal(p->begin, q->begin);
                assert_int_equal(p->end, q->end);
                assert_int_equal(p->has_offsets, q->has_offsets);
                if (p->has_offsets) {
                    assert_memory_equal(p->saved_offsets, q->saved_offsets, p->ndim * sizeof *p->shape);
                }
            }
            good++;
        } else {
            bad++;
        }
        lg__st_free(x);
        lg__st_free(y);
        free(plain);
        free(entry);
        free(json);
    }
    assert_true(good > rounds / 100 && bad > rounds / 10);
    lg__buf_free(&b);
}

/* --------------------------------------------------------------------- bounds */

static size_t status_kib(const char *key)
{
    FILE *f = fopen("/proc/self/status", "r");
    assert_non_null(f);
    char line[256];
    size_t value = 0;
    while (fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, key, strlen(key)) == 0) {
            value = strtoul(line + strlen(key), NULL, 10);
        }
    }
    fclose(f);
    return value;
}

static void forget_peak(void)
{
    FILE *f = fopen("/proc/self/clear_refs", "w");
    assert_non_null(f);
    assert_true(fputs("5", f) >= 0);
    fclose(f);
}

/* A million boxes as they would lie in memory take half a gigabyte. */
static void more_boxes_than_files_are_refused_before_memory_is_taken(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg__buf b, many;
    lg__buf_init(&b, LG__MANIFEST_MAX);
    lg__buf_init(&many, LG__MANIFEST_MAX);
    lg__manifest *m = sample();
    assert_int_equal(lg__manifest_encode(m, &b, &err), LG_OK);
    lg__manifest_free(m);
    const char *body = b.data + 21, *boxes = strstr(body, "\"boxes\":[");
    assert_non_null(boxes);
    boxes += strlen("\"boxes\":[");
    lg__buf_add(&many, body, (size_t)(boxes - body));
    for (int i = 0; i < 1000000; i++) {
        lg__buf_str(&many, "{\"rank\":0,\"offset\":[0,0],\"size\":[1,1]},");
    }
    lg__buf_add(&many, boxes, b.len - 22 - (size_t)(boxes - body));
    lg__buf sealed;
    lg__buf_init(&sealed, LG__MANIFEST_MAX);
    assert_int_equal(lg__sealed_json(many.data, many.len, &sealed, &err), LG_OK);
    forget_peak();
    size_t before = status_kib("VmRSS:");
    assert_int_equal(lg__manifest_decode(sealed.data, sealed.len, &m, &err), LG_ERR_FORMAT);
    assert_non_null(strstr(err.message, "tensors[1].boxes: 10000"));
    assert_non_null(strstr(err.message, "files for them"));
    /* Room for rows is reserved by the length of the text, and touched only where
     * a debugging allocator fills it. */
    assert_true(in_brief() || status_kib("VmHWM:") - before < 192 * 1024);
    lg__buf_free(&b);
    lg__buf_free(&many);
    lg__buf_free(&sealed);
}

/* Peak memory beyond the tensors' own for a save and a load of n of them. */
static size_t save_and_load(size_t n)
{
    lg_error error = LG_ERROR_INIT, *err = &error;
    char root[256];
    temp_dir_make(root);
    const uint64_t shape[] = {4};
    float *data = calloc(n, 4 * sizeof *data), *back = calloc(n, 4 * sizeof *data);
    char(*names)[32] = calloc(n, sizeof *names);
    assert_true(data != NULL && back != NULL && names != NULL);
    for (size_t i = 0; i < 4 * n; i++) {
        data[i] = (float)i;
        back[i] = -1;
    }
    for (size_t i = 0; i < n; i++) {
        snprintf(names[i], sizeof names[i], "layer.%zu.w", i);
    }
    forget_peak();
    size_t before = status_kib("VmRSS:");
    lg_session *session = NULL;
    lg_save *save = NULL;
    assert_int_equal(lg_session_open(root, NULL, &session, err), LG_OK);
    assert_int_equal(lg_save_begin(session, 1, NULL, &save, err), LG_OK);
    for (size_t i = 0; i < n; i++) {
        lg_tensor t = LG_TENSOR_INIT;
        t.name = names[i], t.dtype = LG_F32, t.ndim = 1, t.shape = shape, t.data = data + 4 * i;
        assert_int_equal(lg_save_tensor(save, &t, err), LG_OK);
    }
    assert_int_equal(lg_save_commit(save, NULL, err), LG_OK);
    assert_int_equal(lg_session_close(session, err), LG_OK);
    lg_checkpoint *c = NULL;
    lg_load *load = NULL;
    assert_int_equal(lg_checkpoint_open(root, &c, err), LG_OK);
    assert_int_equal(lg_load_begin(c, 0, &load, err), LG_OK);
    for (size_t i = 0; i < n; i++) {
        lg_target t = LG_TARGET_INIT;
        t.name = names[i], t.dtype = LG_F32, t.ndim = 1, t.shape = shape, t.data = back + 4 * i;
        assert_int_equal(lg_load_tensor(load, &t, err), LG_OK);
    }
    assert_int_equal(lg_load_run(load, err), LG_OK);
    lg_load_free(load);
    lg_checkpoint_close(c);
    assert_memory_equal(data, back, n * 4 * sizeof *data);
    size_t peak = status_kib("VmHWM:") - before;
    free(data);
    free(back);
    free(names);
    temp_dir_remove(root);
    return peak;
}

static void memory_grows_with_the_number_of_tensors_alone(void **state)
{
    (void)state;
    if (in_brief()) {
        print_message("# skipped, valgrind keeps what was freed\n");
        skip();
    }
    size_t few = save_and_load(10000), many = save_and_load(100000);
    print_message("# 10,000 tensors: %zu KiB, 100,000: %zu KiB\n", few, many);
    /* Names, shapes, boxes, headers, report, manifest: some 3 KB each. Four
     * times as much under a sanitizer. */
    assert_true(many < 100000 * 4 * 4);
    assert_true(many < 20 * (few + 16 * 1024));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"K22: rows of a manifest mean the same in any form", rows_of_a_manifest_mean_the_same_in_any_form, NULL, NULL,
         NULL},
        {"K13: entries of a header mean the same in any form", entries_of_a_header_mean_the_same_in_any_form, NULL,
         NULL, NULL},
        {"K15: more boxes than files are refused before memory is taken for them",
         more_boxes_than_files_are_refused_before_memory_is_taken, NULL, NULL, NULL},
        {"K07 F107, K16: a hundred thousand tensors take memory in proportion",
         memory_grows_with_the_number_of_tensors_alone, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("many", tests, NULL, NULL);
}
