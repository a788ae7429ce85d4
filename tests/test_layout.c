/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/json.h"
#include "base/mem.h"
#include "support/layouts.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TEST(name, fn)             \
    {                              \
        name, fn, NULL, NULL, NULL \
    }
#define RANKS(...) \
    (const uint32_t[]) { __VA_ARGS__ }
#define MIB (UINT64_C(1) << 20)

static lg_status parse(const char *text, uint32_t world, lg_layout **out, lg_error *err)
{
    json_t *json = NULL;
    lg_status st = lg__json_parse(text, strlen(text), &json, err);
    if (st == LG_OK) {
        st = lg__layout_parse(json, world, out, err);
        json_decref(json);
    }
    return st;
}

/* "0:[0:2, 0:4] 3:[…]": rank and box, in the order of ranks and numbers. */
static void written_text(const lg_layout *l, const lg__tensor_desc *t, uint32_t world, char *out, size_t bytes)
{
    size_t n = 0;
    out[0] = '\0';
    for (uint32_t rank = 0; rank < world; rank++) {
        lg__piece *p = NULL;
        size_t count = 0;
        lg_error err = LG_ERROR_INIT;
        assert_int_equal(lg__layout_written(l, t, rank, &p, &count, &err), LG_OK);
        for (size_t i = 0; i < count; i++) {
            char box[128];
            n += (size_t)snprintf(out + n, bytes - n, "%s%u:%s", n == 0 ? "" : " ", rank,
                                  lg__region_text(&p[i].box, box, sizeof box));
            assert_true(n < bytes);
        }
        lg__free(p);
    }
}

/* The worked examples of docs/format-layouts.md: text of the layout, tensor, and
 * who writes which box. */
static const struct {
    const char *what;
    uint32_t mesh_ndim;
    uint32_t sizes[3], strides[3];
    bool strided;
    uint32_t origin;
    uint32_t ranks[8]; /* when the last is not 0 */
    uint32_t n_splits;
    lg_split splits[3];
    uint64_t flat_length, flat_offset;
    uint32_t flat_axis, writers;
    lg_dtype dtype;
    uint32_t ndim;
    uint64_t shape[3];
    const char *text, *written;
} examples[] = {
    {.what = "one rank",
     .origin = 5,
     .ndim = 2,
     .shape = {4, 6},
     .text = "{\"kind\":\"split\",\"mesh\":{\"origin\":5,\"sizes\":[],\"strides\":[]},\"splits\":[],\"writers\":1}",
     .written = "5:[0:4, 0:6]"},
    {.what = "F124: rows, shorter last piece",
     .mesh_ndim = 1,
     .sizes = {4},
     .n_splits = 1,
     .splits = {{0, 0, 0, LG_SPLIT_CEIL}},
     .ndim = 2,
     .shape = {7, 3},
     .text = "{\"kind\":\"split\",\"mesh\":{\"origin\":0,\"sizes\":[4],\"strides\":[1]},"
             "\"splits\":[{\"dim\":0,\"axis\":0,\"mode\":\"ceil\"}],\"writers\":1}",
     .written = "0:[0:2, 0:3] 1:[2:4, 0:3] 2:[4:6, 0:3] 3:[6:7, 0:3]"},
    {.what = "ceil leaves the last ranks without a box",
     .mesh_ndim = 1,
     .sizes = {4},
     .n_splits = 1,
     .splits = {{0, 0, 0, LG_SPLIT_CEIL}},
     .ndim = 1,
     .shape = {5},
     .text = "{\"kind\":\"split\",\"mesh\":{\"origin\":0,\"sizes\":[4],\"strides\":[1]},"
             "\"splits\":[{\"dim\":0,\"axis\":0,\"mode\":\"ceil\"}],\"writers\":1}",
     .written = "0:[0:2] 1:[2:4] 2:[4:5]"},
    {.what = "even",
     .mesh_ndim = 1,
     .sizes = {4},
     .n_splits = 1,
     .splits = {{0, 0, 0, LG_SPLIT_EVEN}},
     .ndim = 1,
     .shape = {6},
     .text = "{\"kind\":\"split\",\"mesh\":{\"origin\":0,\"sizes\":[4],\"strides\":[1]},"
             "\"splits\":[{\"dim\":0,\"axis\":0,\"mode\":\"even\"}],\"writers\":1}",
     .written = "0:[0:2] 1:[2:4] 2:[4:5] 3:[5:6]"},
    {.what = "F127: two axes on one dimension, in order",
     .mesh_ndim = 2,
     .sizes = {2, 2},
     .n_splits = 2,
     .splits = {{0, 1, 0, LG_SPLIT_CEIL}, {0, 0, 0, LG_SPLIT_CEIL}},
     .ndim = 1,
     .shape = {8},
     .text = "{\"kind\":\"split\",\"mesh\":{\"origin\":0,\"sizes\":[2,2],\"strides\":[2,1]},"
             "\"splits\":[{\"dim\":0,\"axis\":1,\"mode\":\"ceil\"},{\"dim\":0,\"axis\":0,\"mode\":\"ceil\"}],"
             "\"writers\":1}",
     .written = "0:[0:2] 1:[4:6] 2:[2:4] 3:[6:8]"},
    {.what = "a fused matrix: thirds on every rank, each cut in two",
     .mesh_ndim = 1,
     .sizes = {2},
     .n_splits = 2,
     .splits = {{0, LG_NO_AXIS, 3, LG_SPLIT_EVEN}, {0, 0, 0, LG_SPLIT_CEIL}},
     .ndim = 2,
     .shape = {12, 5},
     .text = "{\"kind\":\"split\",\"mesh\":{\"origin\":0,\"sizes\":[2],\"strides\":[1]},"
             "\"splits\":[{\"dim\":0,\"pieces\":3,\"mode\":\"even\"},{\"dim\":0,\"axis\":0,\"mode\":\"ceil\"}],"
             "\"writers\":1}",
     .written = "0:[0:2, 0:5] 0:[4:6, 0:5] 0:[8:10, 0:5] 1:[2:4, 0:5] 1:[6:8, 0:5] 1:[10:12, 0:5]"},
    {.what = "replicas: one of the holders writes, by name",
     .mesh_ndim = 2,
     .sizes = {2, 2},
     .strides = {1, 2},
     .strided = true,
     .n_splits = 1,
     .splits = {{1, 1, 0, LG_SPLIT_CEIL}},
     .ndim = 2,
     .shape = {4, 6},
     .text = "{\"kind\":\"split\",\"mesh\":{\"origin\":0,\"sizes\":[2,2],\"strides\":[1,2]},"
             "\"splits\":[{\"dim\":1,\"axis\":1,\"mode\":\"ceil\"}],\"writers\":1}",
     /* CRC32C("w") = 0xf72f63b7 is odd: holder 1 */
     .written = "1:[0:4, 0:3] 3:[0:4, 3:6]"},
    {.what = "three writers of four holders",
     .mesh_ndim = 1,
     .sizes = {4},
     .writers = 3,
     .ndim = 2,
     .shape = {4, 7},
     .text = "{\"kind\":\"split\",\"mesh\":{\"origin\":0,\"sizes\":[4],\"strides\":[1]},\"splits\":[],"
             "\"writers\":3,\"writer_dim\":1}",
     /* 0xf72f63b7 mod 4 = 3: writers 0, 1, 2 are holders 3, 0, 1 */
     .written = "0:[0:4, 3:6] 1:[0:4, 6:7] 3:[0:4, 0:3]"},
    {.what = "a list where a spare node stepped in",
     .mesh_ndim = 1,
     .sizes = {4},
     .ranks = {0, 1, 6, 3, 0, 0, 0, 1},
     .n_splits = 1,
     .splits = {{0, 0, 0, LG_SPLIT_CEIL}},
     .ndim = 1,
     .shape = {8},
     .text = "{\"kind\":\"split\",\"mesh\":{\"sizes\":[4],\"ranks\":[0,1,6,3]},"
             "\"splits\":[{\"dim\":0,\"axis\":0,\"mode\":\"ceil\"}],\"writers\":1}",
     .written = "0:[0:2] 1:[2:4] 3:[6:8] 6:[4:6]"},
    {.what = "a regular list becomes origin and strides",
     .mesh_ndim = 2,
     .sizes = {2, 2},
     .ranks = {1, 5, 3, 7, 0, 0, 0, 1},
     .n_splits = 2,
     .splits = {{0, 0, 0, LG_SPLIT_CEIL}, {1, 1, 0, LG_SPLIT_CEIL}},
     .ndim = 2,
     .shape = {2, 2},
     .text = "{\"kind\":\"split\",\"mesh\":{\"origin\":1,\"sizes\":[2,2],\"strides\":[2,4]},"
             "\"splits\":[{\"dim\":0,\"axis\":0,\"mode\":\"ceil\"},{\"dim\":1,\"axis\":1,\"mode\":\"ceil\"}],"
             "\"writers\":1}",
     .written = "1:[0:1, 0:1] 3:[1:2, 0:1] 5:[0:1, 1:2] 7:[1:2, 1:2]"},
    {.what = "strides that do not nest become a list",
     .mesh_ndim = 2,
     .sizes = {3, 2},
     .strides = {2, 3},
     .strided = true,
     .n_splits = 1,
     .splits = {{0, 0, 0, LG_SPLIT_CEIL}},
     .ndim = 1,
     .shape = {0},
     .text = "{\"kind\":\"split\",\"mesh\":{\"sizes\":[3,2],\"ranks\":[0,3,2,5,4,7]},"
             "\"splits\":[{\"dim\":0,\"axis\":0,\"mode\":\"ceil\"}],\"writers\":1}",
     .written = "0:[0:0]"},
    {.what = "flat: a tensor over three parts",
     .mesh_ndim = 1,
     .sizes = {4},
     .flat_length = 30,
     .flat_offset = 6,
     .ndim = 2,
     .shape = {3, 4},
     .text = "{\"kind\":\"flat\",\"mesh\":{\"origin\":0,\"sizes\":[4],\"strides\":[1]},\"length\":30,\"axis\":0,"
             "\"writers\":1}",
     .written = "0:[0:1, 0:2] 1:[0:1, 2:4] 1:[1:2, 0:4] 1:[2:3, 0:2] 2:[2:3, 2:4]"},
    {.what = "flat: a length beyond 2^53",
     .mesh_ndim = 1,
     .sizes = {2},
     .flat_length = (UINT64_C(1) << 53) + 1,
     .flat_offset = (UINT64_C(1) << 52) - 1,
     .ndim = 1,
     .shape = {4},
     .text = "{\"kind\":\"flat\",\"mesh\":{\"origin\":0,\"sizes\":[2],\"strides\":[1]},\"length\":\"9007199254740993\","
             "\"axis\":0,\"writers\":1}",
     .written = "0:[0:2] 1:[2:4]"},
    {.what = "an empty tensor is one empty box",
     .mesh_ndim = 1,
     .sizes = {2},
     .n_splits = 1,
     .splits = {{0, 0, 0, LG_SPLIT_CEIL}},
     .ndim = 2,
     .shape = {4, 0},
     .text = "{\"kind\":\"split\",\"mesh\":{\"origin\":0,\"sizes\":[2],\"strides\":[1]},"
             "\"splits\":[{\"dim\":0,\"axis\":0,\"mode\":\"ceil\"}],\"writers\":1}",
     .written = "0:[0:4, 0:0]"},
    {.what = "F134: a scalar",
     .mesh_ndim = 1,
     .sizes = {2},
     .ndim = 0,
     .text = "{\"kind\":\"split\",\"mesh\":{\"origin\":0,\"sizes\":[2],\"strides\":[1]},\"splits\":[],\"writers\":1}",
     .written = "1:[]"},
    {.what = "F136: 151936 rows over 2",
     .mesh_ndim = 1,
     .sizes = {2},
     .n_splits = 1,
     .splits = {{0, 0, 0, LG_SPLIT_CEIL}},
     .dtype = LG_BF16,
     .ndim = 2,
     .shape = {151936, 896},
     .text = "{\"kind\":\"split\",\"mesh\":{\"origin\":0,\"sizes\":[2],\"strides\":[1]},"
             "\"splits\":[{\"dim\":0,\"axis\":0,\"mode\":\"ceil\"}],\"writers\":1}",
     .written = "0:[0:75968, 0:896] 1:[75968:151936, 0:896]"},
};

static void examples_of_the_format_page_hold(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof examples / sizeof examples[0]; i++) {
        lg_layout_desc d = LG_LAYOUT_DESC_INIT;
        d.mesh_ndim = examples[i].mesh_ndim;
        d.mesh_sizes = examples[i].sizes;
        d.mesh_strides = examples[i].strided ? examples[i].strides : NULL;
        d.mesh_origin = examples[i].origin;
        d.ranks = examples[i].ranks[7] != 0 ? examples[i].ranks : NULL;
        d.n_splits = examples[i].n_splits;
        d.splits = examples[i].splits;
        d.flat_length = examples[i].flat_length;
        d.flat_axis = (int32_t)examples[i].flat_axis;
        d.writers = examples[i].writers;
        lg_layout *l = layout_create(&d);
        lg__tensor_desc t = layout_tensor(examples[i].dtype == LG_BOOL ? LG_F32 : examples[i].dtype, examples[i].ndim,
                                          examples[i].shape);
        t.flat_offset = examples[i].flat_offset;
        lg_layout *r = layout_resolve(l, t);
        if (strcmp(r->text, examples[i].text) != 0) {
            fail_msg("%s: %s", examples[i].what, r->text);
        }
        char all[1024];
        written_text(r, &t, 10, all, sizeof all);
        if (strcmp(all, examples[i].written) != 0) {
            fail_msg("%s: %s", examples[i].what, all);
        }
        lg_layout_free(r);
        lg_layout_free(l);
    }
}

/* Runs under meson, which says where the sources are. */
static void the_format_page_shows_these_examples(void **state)
{
    (void)state;
    const char *source = getenv("LASTGOOD_SOURCE");
    if (source == NULL) {
        skip();
    }
    char path[4096], line[2048];
    snprintf(path, sizeof path, "%s/docs/format-layouts.md", source);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    static char page[1 << 16];
    size_t n = fread(page, 1, sizeof page - 1, f);
    fclose(f);
    page[n] = '\0';
    for (size_t i = 0; i < sizeof examples / sizeof examples[0]; i++) {
        snprintf(line, sizeof line, "\nlayout   %s\n", examples[i].text);
        if (strstr(page, line) == NULL) {
            fail_msg("%s: not in the page:%s", examples[i].what, line);
        }
        snprintf(line, sizeof line, "\nwritten  %s\n", examples[i].written);
        if (strstr(page, line) == NULL) {
            fail_msg("%s: not in the page:%s", examples[i].what, line);
        }
    }
    size_t shown = 0;
    for (const char *p = page; (p = strstr(p, "\nwritten  ")) != NULL; p++) {
        shown++;
    }
    assert_int_equal(shown, sizeof examples / sizeof examples[0]);
    lg__tensor_desc flat = {"optim.exp_avg.w", LG_GROUP_OPTIM, LG_F32, 2, SHAPE(3, 4), 6},
                    plain = layout_tensor(LG_BF16, 2, SHAPE(2, 3));
    uint64_t a = 0, b = 0;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg__tensor_fingerprint(&flat, true, &a, &err), LG_OK);
    assert_int_equal(lg__tensor_fingerprint(&plain, false, &b, &err), LG_OK);
    snprintf(line, sizeof line, "%llu", (unsigned long long)a);
    assert_non_null(strstr(page, line));
    snprintf(line, sizeof line, "%llu", (unsigned long long)b);
    assert_non_null(strstr(page, line));
}

static void writers_are_chosen_by_size(void **state)
{
    (void)state;
    /* 8 holders of each half (mesh 2 x 8), unless said otherwise */
    static const struct {
        uint64_t shape[2];
        lg_dtype dtype;
        uint32_t asked, writers, dim;
    } cases[] = {
        {{8, 8}, LG_F32, 0, 1, 0},
        {{2 * 32 * 1024, 1024}, LG_U8, 0, 1, 0},     /* halves of 32 MiB */
        {{2 * 64 * 1024 - 2, 1024}, LG_U8, 0, 1, 0}, /* a bit less than 64 MiB */
        {{2 * 64 * 1024, 1024}, LG_U8, 0, 2, 0},
        {{2 * 64 * 1024 - 1, 1024}, LG_U8, 0, 1, 0}, /* the nominal part is rounded up, but by no 1024 bytes */
        {{1024, 2 * 96 * 1024}, LG_U8, 0, 3, 1},
        {{1024, 1024 * 1024}, LG_F32, 0, 8, 1}, /* no more than there are holders */
        {{4, 4}, LG_F32, 3, 3, 0},              /* the caller's choice; the first of equal extents */
        {{4, 5}, LG_F32, 8, 8, 1},
        {{4, 0}, LG_F32, 0, 1, 0},
        {{4096, 1024 * 1024}, LG_F4, 0, 1, 0}, /* never inside a byte */
    };
    uint32_t sizes[] = {2, 8};
    lg_split split = {0, 0, 0, LG_SPLIT_CEIL};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        lg_layout_desc d = LG_LAYOUT_DESC_INIT;
        d.mesh_ndim = 2, d.mesh_sizes = sizes, d.n_splits = 1, d.splits = &split, d.writers = cases[i].asked;
        lg_layout *l = layout_create(&d), *r = layout_resolve(l, layout_tensor(cases[i].dtype, 2, cases[i].shape));
        if (r->writers != cases[i].writers || r->writer_dim != cases[i].dim) {
            fail_msg("case %zu: %u writers of dimension %u", i, r->writers, r->writer_dim);
        }
        lg_layout_free(r);
        lg_layout_free(l);
    }
}

static void resolving_again_gives_the_same_layout(void **state)
{
    (void)state;
    uint32_t sizes[] = {4};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = sizes;
    lg_layout *l = layout_create(&d);
    lg_layout *small = layout_resolve(l, layout_tensor(LG_F32, 1, SHAPE(8))),
              *same = layout_resolve(l, layout_tensor(LG_U8, 2, SHAPE(3, 9)));
    lg_layout *large = layout_resolve(l, layout_tensor(LG_U8, 1, SHAPE(70 * MIB)));
    assert_ptr_equal(small, same);
    assert_ptr_not_equal(small, large);
    assert_memory_not_equal(small->id, large->id, LG__LAYOUT_ID_BYTES);
    lg_layout *again = layout_resolve(large, layout_tensor(LG_U8, 1, SHAPE(3)));
    assert_ptr_equal(again, large); /* what is resolved stays */
    lg_layout_free(l);
    assert_int_equal(large->writers, 2); /* and outlives where it came from */
    lg_layout_free(small);
    lg_layout_free(same);
    lg_layout_free(large);
    lg_layout_free(again);
    lg_layout_free(NULL);
}

static void wrong_descriptions_are_refused(void **state)
{
    (void)state;
    uint32_t two[] = {2, 2}, zero[] = {2, 0}, many[] = {1000, 1001}, same[] = {1, 1}, wide[] = {1, 999999};
    uint32_t overlapping[] = {1, 2}, three[] = {3, 2};
    lg_split ok = {0, 0, 0, LG_SPLIT_CEIL}, no_pieces = {0, LG_NO_AXIS, 0, LG_SPLIT_CEIL},
             far_dim = {LG_MAX_NDIM, 0, 0, LG_SPLIT_CEIL}, far_axis = {0, 2, 0, LG_SPLIT_CEIL},
             odd_axis = {0, -2, 0, LG_SPLIT_CEIL}, odd_mode = {0, 0, 0, (lg_split_mode)7};
    lg_split twice[] = {ok, {1, 0, 0, LG_SPLIT_CEIL}};
    lg_split pieces[] = {{0, LG_NO_AXIS, 256, LG_SPLIT_CEIL}, {1, LG_NO_AXIS, 257, LG_SPLIT_CEIL}};
    lg_split halves[9];
    for (size_t i = 0; i < 9; i++) {
        halves[i] = (lg_split){0, LG_NO_AXIS, 2, LG_SPLIT_CEIL};
    }
    struct {
        const char *what;
        lg_layout_desc d;
        lg_status status;
    } cases[] = {
        {"size", {.size = 3}, LG_ERR_INVALID},
        {"axes", {.mesh_ndim = 9, .mesh_sizes = two}, LG_ERR_LIMIT},
        {"no sizes", {.mesh_ndim = 1}, LG_ERR_INVALID},
        {"size 0", {.mesh_ndim = 2, .mesh_sizes = zero}, LG_ERR_INVALID},
        {"too many ranks", {.mesh_ndim = 2, .mesh_sizes = many}, LG_ERR_LIMIT},
        {"rank too high", {.mesh_origin = 1000000}, LG_ERR_LIMIT},
        {"rank too high by strides", {.mesh_ndim = 2, .mesh_sizes = two, .mesh_strides = wide}, LG_ERR_LIMIT},
        {"equal strides", {.mesh_ndim = 2, .mesh_sizes = two, .mesh_strides = same}, LG_ERR_INVALID},
        {"strides that meet", {.mesh_ndim = 2, .mesh_sizes = three, .mesh_strides = overlapping}, LG_ERR_INVALID},
        {"stride 0", {.mesh_ndim = 1, .mesh_sizes = two, .mesh_strides = RANKS(0)}, LG_ERR_INVALID},
        {"rank twice", {.mesh_ndim = 2, .mesh_sizes = two, .ranks = RANKS(4, 2, 7, 2)}, LG_ERR_INVALID},
        {"listed rank too high", {.mesh_ndim = 1, .mesh_sizes = two, .ranks = RANKS(4, 1000000)}, LG_ERR_LIMIT},
        {"splits", {.mesh_ndim = 1, .mesh_sizes = two, .n_splits = LG_MAX_SPLITS + 1, .splits = &ok}, LG_ERR_LIMIT},
        {"no splits", {.mesh_ndim = 1, .mesh_sizes = two, .n_splits = 1}, LG_ERR_INVALID},
        {"no pieces", {.n_splits = 1, .splits = &no_pieces}, LG_ERR_INVALID},
        {"dimension", {.mesh_ndim = 1, .mesh_sizes = two, .n_splits = 1, .splits = &far_dim}, LG_ERR_INVALID},
        {"axis", {.mesh_ndim = 2, .mesh_sizes = two, .n_splits = 1, .splits = &far_axis}, LG_ERR_INVALID},
        {"negative axis", {.mesh_ndim = 2, .mesh_sizes = two, .n_splits = 1, .splits = &odd_axis}, LG_ERR_INVALID},
        {"mode", {.mesh_ndim = 2, .mesh_sizes = two, .n_splits = 1, .splits = &odd_mode}, LG_ERR_INVALID},
        {"axis twice", {.mesh_ndim = 2, .mesh_sizes = two, .n_splits = 2, .splits = twice}, LG_ERR_INVALID},
        {"pieces", {.n_splits = 2, .splits = pieces}, LG_ERR_LIMIT},
        {"constants", {.n_splits = 9, .splits = halves}, LG_ERR_LIMIT},
        {"flat and splits",
         {.mesh_ndim = 1, .mesh_sizes = two, .flat_length = 8, .n_splits = 1, .splits = &ok},
         LG_ERR_INVALID},
        {"flat axis", {.mesh_ndim = 1, .mesh_sizes = two, .flat_length = 8, .flat_axis = 1}, LG_ERR_INVALID},
        {"no flat axis",
         {.mesh_ndim = 1, .mesh_sizes = two, .flat_length = 8, .flat_axis = LG_NO_AXIS},
         LG_ERR_INVALID},
        {"flat length", {.mesh_ndim = 1, .mesh_sizes = two, .flat_length = UINT64_C(1) << 63}, LG_ERR_LIMIT},
        {"writers", {.mesh_ndim = 2, .mesh_sizes = two, .n_splits = 1, .splits = &ok, .writers = 3}, LG_ERR_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (cases[i].d.size == 0) {
            cases[i].d.size = sizeof(lg_layout_desc);
        }
        lg_layout *l = NULL;
        lg_error err = LG_ERROR_INIT;
        lg_status st = lg_layout_create(&cases[i].d, &l, &err);
        if (st != cases[i].status || l != NULL || err.message[0] == '\0') {
            fail_msg("%s: status %d: %s", cases[i].what, (int)st, err.message);
        }
        assert_int_equal(lg_layout_create(&cases[i].d, &l, NULL), st);
    }
    assert_int_equal(lg_layout_create(NULL, NULL, NULL), LG_ERR_INVALID);
}

static void only_canonical_text_is_parsed(void **state)
{
    (void)state;
#define MESH "\"mesh\":{\"origin\":0,\"sizes\":[4],\"strides\":[1]}"
    static const struct {
        const char *text, *message; /* NULL: good */
    } cases[] = {
        {"{\"kind\":\"copies\"," MESH "}", NULL},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[],\"writers\":1}", NULL},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[],\"writers\":4,\"writer_dim\":31}", NULL},
        {"{\"kind\":\"split\",\"mesh\":{\"sizes\":[2],\"ranks\":[0,1]},\"splits\":[],\"writers\":1}", NULL},
        {"{\"kind\":\"split\",\"mesh\":{\"origin\":0,\"sizes\":[1,4],\"strides\":[9,1]},\"splits\":[],\"writers\":1}",
         NULL},
        {"{\"kind\":\"flat\"," MESH ",\"length\":7,\"axis\":0,\"writers\":1}", NULL},
        {"[]", "layout: it is no object"},
        {"{\"kind\":\"other\"," MESH ",\"splits\":[],\"writers\":1}", "\"kind\" is none of"},
        {"{" MESH ",\"splits\":[],\"writers\":1}", "\"kind\" is missing"},
        {"{\"kind\":\"split\",\"splits\":[],\"writers\":1}", "\"mesh\" is missing"},
        {"{\"kind\":\"split\"," MESH ",\"writers\":1}", "\"splits\" is missing"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[]}", "\"writers\" is missing"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[],\"writers\":0}", "\"writers\" is 0"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[],\"writers\":5,\"writer_dim\":0}", "5 writers, but only 4 holders"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[],\"writers\":2}", "\"writer_dim\" is missing"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[],\"writers\":2,\"writer_dim\":32}", "\"writer_dim\" is 32"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[],\"writers\":1,\"writer_dim\":0}", "not canonical"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[],\"writers\":\"1\"}", "not canonical"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[],\"writers\":1.0}", "no non-negative integer"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[],\"writers\":1,\"new\":1}", "not canonical"},
        {"{\"kind\":\"split\",\"splits\":[]," MESH ",\"writers\":1}", "not canonical"},
        {"{\"kind\":\"copies\"," MESH ",\"writers\":1}", "not canonical"},
        {"{\"kind\":\"split\"," MESH
         ",\"splits\":[{\"dim\":0,\"axis\":0,\"mode\":\"ceil\",\"pieces\":4}],\"writers\":1}",
         "not canonical"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[{\"axis\":0,\"dim\":0,\"mode\":\"ceil\"}],\"writers\":1}",
         "not canonical"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[{\"dim\":0,\"axis\":1,\"mode\":\"ceil\"}],\"writers\":1}",
         "is by mesh axis 1 of 1"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[{\"dim\":0,\"axis\":0,\"mode\":\"odd\"}],\"writers\":1}",
         "unknown mode"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[{\"dim\":32,\"axis\":0,\"mode\":\"ceil\"}],\"writers\":1}",
         "\"dim\" is 32"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[{\"dim\":0,\"pieces\":0,\"mode\":\"ceil\"}],\"writers\":1}",
         "makes no pieces"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[{\"dim\":0,\"pieces\":65537,\"mode\":\"ceil\"}],\"writers\":1}",
         "\"pieces\" is 65537"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[7],\"writers\":1}", "a split is no object"},
        {"{\"kind\":\"split\"," MESH ",\"splits\":[{\"dim\":0,\"axis\":0,\"mode\":\"ceil\"},{\"dim\":1,\"axis\":0,"
         "\"mode\":\"ceil\"}],\"writers\":1}",
         "used by two splits"},
        {"{\"kind\":\"flat\"," MESH ",\"length\":7,\"axis\":1,\"writers\":1}", "flat_axis is 1"},
        {"{\"kind\":\"flat\"," MESH ",\"length\":0,\"axis\":0,\"writers\":1}", "\"length\" is 0"},
        {"{\"kind\":\"flat\"," MESH ",\"length\":-7,\"axis\":0,\"writers\":1}", "\"length\" is negative"},
        {"{\"kind\":\"flat\"," MESH ",\"length\":9007199254740993,\"axis\":0,\"writers\":1}", "not canonical"},
        {"{\"kind\":\"flat\"," MESH ",\"length\":\"18446744073709551615\",\"axis\":0,\"writers\":1}", "2^63"},
        {"{\"kind\":\"copies\",\"mesh\":{\"origin\":0,\"sizes\":[9],\"strides\":[1]}}", "rank 8 in a world of 8"},
        {"{\"kind\":\"copies\",\"mesh\":{\"origin\":8,\"sizes\":[],\"strides\":[]}}", "rank 8 in a world of 8"},
        {"{\"kind\":\"copies\",\"mesh\":{\"sizes\":[2],\"ranks\":[8,1]}}", "rank 8 in a world of 8"},
        {"{\"kind\":\"copies\",\"mesh\":{\"sizes\":[3],\"ranks\":[5,1,5]}}", "rank 5 is twice"},
        {"{\"kind\":\"copies\",\"mesh\":{\"sizes\":[3],\"ranks\":[5,1]}}", "does not list the 3 ranks"},
        {"{\"kind\":\"copies\",\"mesh\":{\"sizes\":[1],\"ranks\":[4294967296]}}", "has the entry 4294967296"},
        {"{\"kind\":\"copies\",\"mesh\":{\"sizes\":[1000000,1000000],\"ranks\":[5,1]}}", "axis size 1000000"},
        {"{\"kind\":\"copies\",\"mesh\":{\"origin\":0,\"sizes\":[1000000,1000000],\"strides\":[1,1]}}",
         "more than 1000000 ranks"},
        {"{\"kind\":\"copies\",\"mesh\":{\"origin\":0,\"sizes\":[2,2],\"strides\":[1,1]}}", "do not nest"},
        {"{\"kind\":\"copies\",\"mesh\":{\"origin\":0,\"sizes\":[3,2],\"strides\":[2,3]}}", "do not nest"},
        {"{\"kind\":\"copies\",\"mesh\":{\"origin\":0,\"sizes\":[2,2],\"strides\":[4294967295,1]}}", "not below"},
        {"{\"kind\":\"copies\",\"mesh\":{\"origin\":0,\"sizes\":[2,2],\"strides\":[1]}}",
         "1 \"strides\" for 2 \"sizes\""},
        {"{\"kind\":\"copies\",\"mesh\":{\"origin\":0,\"sizes\":[0],\"strides\":[1]}}", "size 0"},
        {"{\"kind\":\"copies\",\"mesh\":{\"origin\":0,\"sizes\":[1,1,1,1,1,1,1,1,1],\"strides\":[1]}}",
         "has 9 entries"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        lg_layout *l = NULL;
        lg_error err = LG_ERROR_INIT;
        lg_status st = parse(cases[i].text, 8, &l, &err);
        bool good = cases[i].message == NULL ? st == LG_OK && strcmp(l->text, cases[i].text) == 0
                                             : st == LG_ERR_FORMAT && strstr(err.message, cases[i].message) != NULL;
        if (!good) {
            fail_msg("%s: status %d: %s", cases[i].text, (int)st, err.message);
        }
        if (l != NULL) {
            uint8_t id[LG__LAYOUT_ID_BYTES];
            assert_int_equal(lg__sha256_of(cases[i].text, strlen(cases[i].text), id, &err), LG_OK);
            assert_memory_equal(id, l->id, sizeof id);
        }
        lg_layout_free(l);
    }
}

static void rank_lists_become_meshes_where_they_can(void **state)
{
    (void)state;
    static const struct {
        uint32_t n, ranks[5];
        const char *mesh;
    } cases[] = {
        {1, {7}, "{\"origin\":7,\"sizes\":[],\"strides\":[]}"},
        {2, {3, 9}, "{\"origin\":3,\"sizes\":[2],\"strides\":[6]}"},
        {4, {1, 3, 5, 7}, "{\"origin\":1,\"sizes\":[4],\"strides\":[2]}"},
        {4, {1, 3, 5, 8}, "{\"sizes\":[4],\"ranks\":[1,3,5,8]}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int copies = 0; copies < 2; copies++) {
            lg_layout *l = NULL;
            lg_error err = LG_ERROR_INIT;
            assert_int_equal(lg__layout_of_ranks(cases[i].ranks, cases[i].n, copies, &l, &err), LG_OK);
            char text[256];
            snprintf(text, sizeof text,
                     copies ? "{\"kind\":\"copies\",\"mesh\":%s}"
                            : "{\"kind\":\"split\",\"mesh\":%s,\"splits\":[],\"writers\":1}",
                     cases[i].mesh);
            assert_string_equal(l->text, text);
            lg__tensor_desc t = layout_tensor(LG_F32, 1, SHAPE(3));
            uint64_t boxes = 0;
            assert_int_equal(lg__layout_box_count(l, &t, &boxes, &err), LG_OK);
            assert_int_equal(boxes, copies ? cases[i].n : 1);
            for (uint32_t r = 0, at = 0; r < 10; r++) {
                uint32_t index = 99;
                bool in = at < cases[i].n && cases[i].ranks[at] == r;
                assert_int_equal(lg__layout_index_of(l, r, &index), in);
                if (in) {
                    assert_int_equal(index, at);
                    assert_int_equal(lg__layout_rank_at(l, at), r);
                    at++;
                }
                lg__piece *p = NULL;
                size_t n = 9;
                assert_int_equal(lg__layout_held(l, &t, r, &p, &n, &err), LG_OK);
                assert_int_equal(n, in);
                lg__free(p);
            }
            lg_layout_free(l);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST("K08: the examples of docs/format-layouts.md hold, text and boxes", examples_of_the_format_page_hold),
        TEST("docs/format-layouts.md shows exactly these examples", the_format_page_shows_these_examples),
        TEST("writers are chosen so that each writes at least 32 MiB", writers_are_chosen_by_size),
        TEST("resolving again gives the same layout", resolving_again_gives_the_same_layout),
        TEST("K08: wrong descriptions of layouts are refused", wrong_descriptions_are_refused),
        TEST("K13: only canonical text is parsed", only_canonical_text_is_parsed),
        TEST("a list of ranks becomes a mesh where it can", rank_lists_become_meshes_where_they_can),
    };
    return cmocka_run_group_tests_name("layout", tests, NULL, NULL);
}
