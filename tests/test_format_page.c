/* SPDX-License-Identifier: Apache-2.0 */

/* The examples in docs/format.md are real, and belong together. */

#include "base/error.h"
#include "format/manifest.h"
#include "format/record.h"
#include "format/sums.h"
#include "support/oops.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static char page[1 << 18];

static int read_page(void **state)
{
    (void)state;
    const char *source = getenv("LASTGOOD_SOURCE");
    char path[4096];
    snprintf(path, sizeof path, "%s/docs/format.md", source != NULL ? source : ".");
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        print_error("cannot open %s; run in the source folder or set LASTGOOD_SOURCE\n", path);
        return -1;
    }
    size_t n = fread(page, 1, sizeof page - 1, f);
    fclose(f);
    page[n] = '\0';
    return n < sizeof page - 1 ? 0 : -1;
}

/* The block behind "<!-- example: NAME -->", with its last newline. */
static const char *example(const char *name, size_t *bytes)
{
    char mark[64];
    snprintf(mark, sizeof mark, "<!-- example: %s -->\n```", name);
    const char *at = strstr(page, mark);
    if (at == NULL) {
        fail_msg("docs/format.md has no example \"%s\"", name);
    }
    at = strchr(at + strlen(mark), '\n') + 1;
    const char *end = strstr(at, "\n```\n");
    assert_non_null(end);
    *bytes = (size_t)(end + 1 - at);
    return at;
}

static lg__manifest *manifest(void)
{
    size_t n = 0;
    const char *text = example("lastgood.json", &n);
    lg__manifest *m = NULL;
    CHECK(lg__manifest_decode(text, n, &m, oops));
    return m;
}

static void the_manifest_is_whole_and_these_are_the_bytes_we_write(void **state)
{
    (void)state;
    size_t n = 0;
    const char *text = example("lastgood.json", &n);
    lg__manifest *m = manifest();
    assert_int_equal(m->step, 500);
    assert_int_equal(m->world, 2);
    lg__buf b;
    lg__buf_init(&b, LG__MANIFEST_MAX);
    CHECK(lg__manifest_encode(m, &b, oops));
    assert_int_equal(b.len, n);
    assert_memory_equal(b.data, text, n);
    lg__buf_free(&b);
    lg__manifest_free(m);
}

static void the_tombstone_is_one(void **state)
{
    (void)state;
    size_t n = 0;
    const char *text = example("tombstone", &n);
    lg__manifest *m = NULL;
    CHECK(lg__manifest_decode(text, n, &m, oops));
    assert_true(m->tombstone);
    lg__manifest_free(m);
}

static void the_records_belong_to_the_manifest(void **state)
{
    (void)state;
    size_t n = 0;
    lg__manifest *m = manifest();
    lg__pin_record pin;
    const char *text = example("pin", &n);
    CHECK(lg__pin_decode(text, n, &pin, oops));
    assert_memory_equal(pin.manifest, m->sha256, sizeof pin.manifest);
    lg__rollback_record back;
    text = example("rollback", &n);
    CHECK(lg__rollback_decode(text, n, &back, oops));
    assert_memory_equal(back.target_manifest, m->sha256, sizeof back.target_manifest);
    assert_memory_equal(&back.target, &m->generation, sizeof back.target);
    lg__manifest_free(m);
}

/* The bytes of lines "  24  6c 00 …  what they are". */
static size_t bytes_of_dump(const char *text, size_t n, uint8_t *out, size_t max)
{
    size_t count = 0;
    for (const char *line = text; line < text + n; line = strchr(line, '\n') + 1) {
        assert_int_equal((size_t)strtoul(line, NULL, 10), count);
        for (int i = 0; i < 16 && line[6 + 3 * i] != ' '; i++) {
            assert_true(count < max);
            out[count++] = (uint8_t)strtoul(line + 6 + 3 * i, NULL, 16);
        }
    }
    return count;
}

static void the_report_and_the_tables_are_the_ones_that_the_manifest_vouches_for(void **state)
{
    (void)state;
    size_t n = 0, dump_bytes = 0;
    lg__manifest *m = manifest();
    const char *text = example("report", &n), *dump = example("sums", &dump_bytes);
    uint8_t digest[LG__SHA256_BYTES], sums[256];
    CHECK(lg__sha256_of(text, n, digest, oops));
    assert_memory_equal(digest, m->ranks[0].report, sizeof digest);
    lg__report *r = NULL;
    CHECK(lg__report_decode(text, n, &r, oops));
    assert_string_equal(r->attempt, m->attempt);

    size_t bytes = bytes_of_dump(dump, dump_bytes, sums, sizeof sums);
    lg__sums_head head;
    CHECK(lg__sums_head_decode(sums, bytes, m->ranks[0].sums_bytes, &head, oops));
    assert_int_equal(head.report_at + 8, bytes);
    assert_int_equal(head.report_bytes, n);
    assert_int_equal(head.n_tables, r->n_files);
    assert_int_equal(head.block_bytes, m->block_bytes);
    assert_memory_equal(sums + head.report_at, text, 8);
    size_t at = LG__SUMS_HEAD_BYTES;
    for (size_t i = 0; i < r->n_files; i++) {
        const lg__report_file *f = &r->files[i];
        size_t table_bytes = (size_t)lg__table_bytes(f->bytes - f->header_bytes, head.block_bytes);
        lg__table t;
        CHECK(lg__table_decode(sums + at, table_bytes, head.block_bytes, &t, oops));
        assert_int_equal(t.file_bytes, m->ranks[0].file_bytes[f->group][f->number]);
        lg__free(t.block_crc);
        CHECK(lg__sha256_of(sums + at, table_bytes, digest, oops));
        assert_memory_equal(digest, f->table, sizeof digest);
        at += table_bytes;
    }
    assert_int_equal(at, head.report_at);
    lg__report_free(r);
    lg__manifest_free(m);
}

static void the_fingerprints_add_up_to_what_the_report_says(void **state)
{
    (void)state;
    static const uint64_t weight[] = {3, 4}, embed[] = {2048};
    const struct {
        const char *text;
        lg__tensor_desc desc;
        bool flat;
    } cases[] = {{"[\"model\",\"weight\",\"F32\",[3,4]]", {"weight", LG_GROUP_MODEL, LG_F32, 2, weight, 0}, false},
                 {"[\"model\",\"head.weight\\nweight\",\"F32\",[3,4]]",
                  {"head.weight\nweight", LG_GROUP_MODEL, LG_F32, 2, weight, 0},
                  false},
                 {"[\"optim\",\"optim.m.embed\",\"F32\",[2048],0]",
                  {"optim.m.embed", LG_GROUP_OPTIM, LG_F32, 1, embed, 0},
                  true}};
    uint64_t v[3];
    for (size_t i = 0; i < 3; i++) {
        const char *at = strstr(page, cases[i].text);
        assert_non_null(at);
        at = strstr(at, "fingerprint ");
        assert_non_null(at);
        CHECK(lg__tensor_fingerprint(&cases[i].desc, cases[i].flat, &v[i], oops));
        assert_true(strtoull(at + strlen("fingerprint "), NULL, 10) == v[i]);
    }
    size_t n = 0;
    lg__report *r = NULL;
    const char *text = example("report", &n);
    CHECK(lg__report_decode(text, n, &r, oops));
    assert_true(r->uses[0].sum == v[0] + v[1]);
    assert_memory_equal(r->uses[0].id, r->layouts[0]->id, LG__LAYOUT_ID_BYTES);
    lg__report_free(r);
}

#define TEST(name, function)             \
    {                                    \
        name, function, NULL, NULL, NULL \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST("the manifest in docs/format.md is whole, and these are the bytes we write",
             the_manifest_is_whole_and_these_are_the_bytes_we_write),
        TEST("the tombstone in docs/format.md is one", the_tombstone_is_one),
        TEST("the records in docs/format.md belong to its manifest", the_records_belong_to_the_manifest),
        TEST("the report and tables in docs/format.md are the ones that its manifest vouches for",
             the_report_and_the_tables_are_the_ones_that_the_manifest_vouches_for),
        TEST("the fingerprints in docs/format.md add up to what its report says",
             the_fingerprints_add_up_to_what_the_report_says),
    };
    return cmocka_run_group_tests_name("format_page", tests, read_page, NULL);
}
