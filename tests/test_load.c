/* SPDX-License-Identifier: Apache-2.0 */
#include "core/checkpoint.h"
#include "support/build.h"
#include "support/check.h"
#include "support/fault_store.h"
#include "support/sample.h"
#include "support/temp_dir.h"

#include <stdio.h>
#include <stdlib.h>

/* ----------------------------------------------------------------- values */

static void test_whole(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    for (int kind = SAMPLE_MEMORY; kind <= SAMPLE_POSIX; kind++) {
        size_t descriptors = open_descriptors();
        sample *s = sample_make(kind);
        for (uint32_t flags = 0; flags <= LG_LOAD_UNVERIFIED; flags++) {
            const char *wrong = sample_open_wrong(s, flags, &err);
            if (wrong != NULL) {
                fail_msg("%s: %s", wrong, err.message);
            }
        }
        sample_free(s);
        assert_int_equal(open_descriptors(), descriptors);
    }
}

/* A region into memory with any strides: row-major with gaps, dimensions
 * reversed in order or in direction. */
static void load_region_strided(const sample *s, const build_tensor *t, const lg__region *r, uint64_t *seed)
{
    lg_error err = LG_ERROR_INIT;
    size_t bytes = build_bytes(t->dtype, t->ndim, r->size), element = lg_dtype_bits(t->dtype) / 8;
    char *expected = malloc(bytes + 1);
    build_extract(t->dtype, t->ndim, t->shape, t->data, r, expected);
    int64_t strides[2] = {0, 0};
    uint64_t how = build_random(seed) % 8, gap = how & 4 ? element * 3 : 0;
    uint32_t inner = how & 1 ? 0 : 1, outer = 1 - inner;
    strides[inner] = (int64_t)(element + gap);
    strides[outer] = (int64_t)(r->size[inner] * (element + gap) + gap);
    size_t room = (size_t)(r->size[outer] * (uint64_t)strides[outer] + 64);
    char *memory = malloc(room);
    memset(memory, 0x5a, room);
    char *first = memory;
    if (how & 2) { /* backwards in one dimension */
        first += strides[outer] * (int64_t)(r->size[outer] - 1);
        strides[outer] = -strides[outer];
    }
    lg_target target = sample_target(t, first);
    target.offset = r->offset;
    target.extent = r->size;
    target.strides = strides;
    OK(sample_load(s->c, &target, 1, 0, &err));
    size_t touched = 0;
    for (uint64_t i = 0; i < r->size[0]; i++) {
        for (uint64_t j = 0; j < r->size[1]; j++) {
            char *at = first + (int64_t)i * strides[0] + (int64_t)j * strides[1];
            assert_memory_equal(at, expected + (i * r->size[1] + j) * element, element);
            memset(at, 0x5a, element);
            touched++;
        }
    }
    for (size_t i = 0; i < room; i++) {
        if (memory[i] != 0x5a) {
            fail_msg("%s: byte %zu outside of the region was written", t->name, i);
        }
    }
    assert_int_equal(touched, r->size[0] * r->size[1]);
    free(memory);
    free(expected);
}

static void test_regions(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    uint64_t seed = 4711;
    for (int round = 0; round < 400; round++) {
        const build_tensor *t = &s->tensors[build_random(&seed) % s->n_tensors];
        lg__region r = {.ndim = t->ndim};
        for (uint32_t d = 0; d < t->ndim; d++) {
            r.offset[d] = build_random(&seed) % (t->shape[d] + 1);
            r.size[d] = build_random(&seed) % (t->shape[d] - r.offset[d] + 1);
        }
        if (t->dtype == LG_F4) {
            r.offset[1] &= ~UINT64_C(1);
            r.size[1] &= ~UINT64_C(1);
        }
        size_t bytes = build_bytes(t->dtype, t->ndim, r.size);
        char *expected = malloc(bytes + 1), *got = malloc(bytes + 1);
        build_extract(t->dtype, t->ndim, t->shape, t->data, &r, expected);
        lg_target target = sample_target(t, got);
        target.offset = r.offset;
        target.extent = r.size;
        lg_status st = sample_load(s->c, &target, 1, 0, &err);
        if (st != LG_OK || memcmp(got, expected, bytes) != 0) {
            char where[256];
            fail_msg("seed 4711, round %d: %s %s: %s", round, t->name, lg__region_text(&r, where, sizeof where),
                     st != LG_OK ? err.message : "wrong values");
        }
        if (t->ndim == 2 && t->dtype != LG_F4 && !lg__region_empty(&r)) {
            load_region_strided(s, t, &r, &seed);
        }
        free(expected);
        free(got);
    }
    sample_free(s);
}

/* K12: one table drives every entry point. */
static void test_dtypes(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    static const lg_split rows = {0, 0, 0, LG_SPLIT_CEIL};
    lg_layout *layout = build_layout(3, 0, 1, &rows, 1);
    static char names[LG_DTYPE_COUNT][16];
    static const uint64_t shape[] = {7, 8};
    build_tensor tensors[LG_DTYPE_COUNT] = {0};
    uint64_t seed = 5;
    for (int d = 0; d < LG_DTYPE_COUNT; d++) {
        build_tensor *t = &tensors[d];
        snprintf(names[d], sizeof names[d], "t%d", d);
        t->name = names[d];
        t->dtype = (lg_dtype)d;
        t->ndim = 2;
        memcpy(t->shape, shape, sizeof shape);
        t->layout = layout;
        size_t bytes = build_bytes(t->dtype, 2, shape);
        uint8_t *data = malloc(bytes);
        for (size_t i = 0; i < bytes; i++) {
            data[i] = (uint8_t)build_random(&seed);
        }
        t->data = data;
    }
    lg_store *store;
    OK(lg_store_open("mem:dtypes", &store, &err));
    OK(lg__store_make_root(store, &err));
    char folder[LG__NAME_MAX];
    build_spec spec = {.world = 3,
                       .step = 1,
                       .generation = {1, 1},
                       .block_bytes = 4096,
                       .tensors = tensors,
                       .n_tensors = LG_DTYPE_COUNT};
    build_checkpoint(store, &spec, folder);
    lg_checkpoint *c;
    OK(lg__checkpoint_open_in(store, true, folder, NULL, 0, &c, &err));
    OK(lg_verify(c, NULL, NULL, &err));
    for (int d = 0; d < LG_DTYPE_COUNT; d++) {
        const build_tensor *t = &tensors[d];
        /* whole; across two files; inside one; columns that fill whole bytes */
        static const lg__region regions[] = {
            {2, {0, 0}, {7, 8}}, {2, {2, 0}, {3, 8}}, {2, {4, 0}, {1, 8}}, {2, {1, 4}, {5, 4}}};
        for (size_t i = 0; i < 4; i++) {
            size_t bytes = build_bytes(t->dtype, 2, regions[i].size);
            char *expected = malloc(bytes), *got = malloc(bytes);
            build_extract(t->dtype, 2, shape, t->data, &regions[i], expected);
            lg_target target = sample_target(t, got);
            target.offset = regions[i].offset;
            target.extent = regions[i].size;
            OK(sample_load(c, &target, 1, 0, &err));
            assert_memory_equal(got, expected, bytes);
            if (i == 2) {
                lg_view v;
                OK(lg_checkpoint_map(c, t->name, regions[i].offset, regions[i].size, 0, &v, &err));
                assert_int_equal(v.bytes, bytes);
                assert_memory_equal(v.data, expected, bytes);
                lg_view_release(&v);
            }
            free(expected);
            free(got);
        }
        free((void *)(uintptr_t)t->data);
    }
    /* Half a byte is refused, not rounded. */
    uint64_t odd[] = {0, 1}, one[] = {1, 1};
    char byte = 0;
    lg_target target = sample_target(&tensors[LG_F4], &byte);
    target.offset = odd;
    target.extent = one;
    FAILS(LG_ERR_UNSUPPORTED, sample_load(c, &target, 1, 0, &err));
    lg_checkpoint_close(c);
    lg_layout_free(layout);
    lg_memory_store_drop("dtypes");
}

/* K12: nothing lies at a multiple of anything. */
static void test_blocks_cut_elements(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    build_tensor tensors[2] = {{.name = "a", .dtype = LG_F4, .ndim = 1, .shape = {8190 * 2 + 2}},
                               {.name = "b", .dtype = LG_F6_E2M3, .ndim = 2, .shape = {2730, 12}}};
    uint64_t seed = 9;
    for (size_t i = 0; i < 2; i++) {
        size_t bytes = build_bytes(tensors[i].dtype, tensors[i].ndim, tensors[i].shape);
        char *data = malloc(bytes);
        for (size_t k = 0; k < bytes; k++) {
            data[k] = (char)build_random(&seed);
        }
        tensors[i].data = data;
    }
    lg_store *store;
    OK(lg_store_open("mem:cut", &store, &err));
    OK(lg__store_make_root(store, &err));
    char folder[LG__NAME_MAX];
    build_spec spec = {
        .world = 1, .step = 1, .generation = {1, 1}, .block_bytes = 4096, .tensors = tensors, .n_tensors = 2};
    build_checkpoint(store, &spec, folder);
    lg_checkpoint *c;
    OK(lg__checkpoint_open_in(store, true, folder, NULL, 0, &c, &err));
    for (size_t i = 0; i < 2; i++) {
        size_t bytes = build_bytes(tensors[i].dtype, tensors[i].ndim, tensors[i].shape);
        char *got = malloc(bytes);
        lg_load *load;
        OK(lg_load_begin(c, 0, &load, &err));
        load->buffer_bytes = 4096; /* one block at a time */
        lg_target target = sample_target(&tensors[i], got);
        OK(lg_load_tensor(load, &target, &err));
        OK(lg_load_run(load, &err));
        assert_int_equal(load->bytes_loaded, bytes);
        assert_memory_equal(got, tensors[i].data, bytes);
        lg_load_free(load);
        free(got);
    }
    /* Some columns of each row: most of them lie in other windows. */
    static char columns[2730][3];
    lg_load *load;
    OK(lg_load_begin(c, 0, &load, &err));
    load->buffer_bytes = 4096;
    const uint64_t offset[] = {0, 4}, extent[] = {2730, 4};
    lg_target target = sample_target(&tensors[1], columns);
    target.offset = offset, target.extent = extent;
    OK(lg_load_tensor(load, &target, &err));
    OK(lg_load_run(load, &err));
    for (size_t r = 0; r < 2730; r++) {
        assert_memory_equal(columns[r], (const char *)tensors[1].data + r * 9 + 3, 3);
    }
    lg_load_free(load);
    for (size_t i = 0; i < 2; i++) {
        free((void *)(uintptr_t)tensors[i].data);
    }
    lg_checkpoint_close(c);
    lg_memory_store_drop("cut");
}

/* --------------------------------------------------------------- resharding */

/* The ranges of [0, n) that piece i of p has, by torch's own rules. */
static void chunk(uint64_t n, uint64_t p, uint64_t i, lg_split_mode mode, uint64_t *begin, uint64_t *end)
{
    if (mode == LG_SPLIT_CEIL) {
        uint64_t c = (n + p - 1) / p;
        *begin = i * c < n ? i * c : n;
        *end = *begin + c < n ? *begin + c : n;
    } else {
        *begin = i * (n / p) + (i < n % p ? i : n % p);
        *end = *begin + n / p + (i < n % p);
    }
}

typedef struct mesh_case {
    uint32_t n0, n1;
    lg_split_mode mode0, mode1;
    uint32_t dim0, dim1; /* split by axis 0, by axis 1 (when n1 > 0) */
} mesh_case;

static lg_layout *layout_of(const mesh_case *m, uint32_t writers)
{
    lg_split splits[] = {{m->dim0, 0, 0, m->mode0}, {m->dim1, 1, 0, m->mode1}};
    return build_layout(m->n0, m->n1, m->n1 > 0 ? 2 : 1, splits, writers);
}

/* What rank r of the mesh holds, worked out by hand. */
static lg__region part_of(const mesh_case *m, uint32_t r, const uint64_t shape[2])
{
    uint32_t c[2] = {m->n1 > 0 ? r / m->n1 : r, m->n1 > 0 ? r % m->n1 : 0};
    uint64_t begin[2] = {0, 0}, end[2] = {shape[0], shape[1]};
    uint64_t b, e;
    chunk(end[m->dim0] - begin[m->dim0], m->n0, c[0], m->mode0, &b, &e);
    end[m->dim0] = begin[m->dim0] + e;
    begin[m->dim0] += b;
    if (m->n1 > 0) {
        chunk(end[m->dim1] - begin[m->dim1], m->n1, c[1], m->mode1, &b, &e);
        end[m->dim1] = begin[m->dim1] + e;
        begin[m->dim1] += b;
    }
    return (lg__region){2, {begin[0], begin[1]}, {end[0] - begin[0], end[1] - begin[1]}};
}

static mesh_case random_mesh(uint64_t *seed)
{
    mesh_case m = {.n0 = (uint32_t)(1 + build_random(seed) % 5),
                   .n1 = (uint32_t)(build_random(seed) % 4),
                   .mode0 = (lg_split_mode)(build_random(seed) % 2),
                   .mode1 = (lg_split_mode)(build_random(seed) % 2),
                   .dim0 = (uint32_t)(build_random(seed) % 2),
                   .dim1 = (uint32_t)(build_random(seed) % 2)};
    return m;
}

static void test_reshard(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    const uint64_t first_seed = 20261129;
    uint64_t seed = first_seed;
    for (int round = 0; round < 120; round++) {
        mesh_case from = random_mesh(&seed), to = random_mesh(&seed);
        lg_layout *a = layout_of(&from, 1), *b = layout_of(&to, 0);
        build_tensor t = {.name = "w", .dtype = LG_I32, .ndim = 2, .layout = a};
        t.shape[0] = 1 + build_random(&seed) % 40;
        t.shape[1] = 1 + build_random(&seed) % 40;
        size_t bytes = build_bytes(t.dtype, 2, t.shape);
        int32_t *data = malloc(bytes);
        for (size_t i = 0; i < bytes / 4; i++) {
            data[i] = (int32_t)i + 1;
        }
        t.data = data;
        lg_store *store;
        OK(lg_store_open("mem:reshard", &store, &err));
        OK(lg__store_make_root(store, &err));
        char folder[LG__NAME_MAX];
        build_spec spec = {.world = from.n0 * (from.n1 > 0 ? from.n1 : 1),
                           .step = 1,
                           .generation = {1, 1},
                           .block_bytes = 4096,
                           .tensors = &t,
                           .n_tensors = 1};
        build_checkpoint(store, &spec, folder);
        lg_checkpoint *c;
        OK(lg__checkpoint_open_in(store, true, folder, NULL, 0, &c, &err));
        OK(lg_verify(c, NULL, NULL, &err));
        for (uint32_t r = 0; r < to.n0 * (to.n1 > 0 ? to.n1 : 1); r++) {
            lg__region part = part_of(&to, r, t.shape);
            size_t part_bytes = build_bytes(t.dtype, 2, part.size);
            int32_t *expected = malloc(part_bytes + 1), *got = malloc(part_bytes + 1);
            build_extract(t.dtype, 2, t.shape, data, &part, expected);
            lg_target target = sample_target(&t, got);
            target.layout = b;
            target.rank = r;
            lg_status st = sample_load(c, &target, 1, 0, &err);
            if (st != LG_OK || memcmp(got, expected, part_bytes) != 0) {
                fail_msg("seed %llu, round %d, rank %u: %s", (unsigned long long)first_seed, round, r,
                         st != LG_OK ? err.message : "wrong values");
            }
            free(expected);
            free(got);
        }
        lg_checkpoint_close(c);
        lg_memory_store_drop("reshard");
        lg_layout_free(a);
        lg_layout_free(b);
        free(data);
    }
}

/* A fused matrix of three parts, each cut by rows; saved by 3, loaded by 2;
 * the local part is the thirds' rows one behind the other. */
static void test_reshard_fused(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    const build_tensor *t = sample_tensor(s, "h.qkv");
    static const lg_split fused[] = {{0, LG_NO_AXIS, 3, LG_SPLIT_CEIL}, {0, 0, 0, LG_SPLIT_CEIL}};
    lg_layout *layout = build_layout(2, 0, 2, fused, 0);
    for (uint32_t r = 0; r < 2; r++) {
        uint16_t expected[6][50], got[6][50];
        for (uint64_t third = 0; third < 3; third++) {
            for (uint64_t row = 0; row < 2; row++) {
                const uint16_t *whole = t->data;
                memcpy(expected[third * 2 + row], whole + (third * 4 + r * 2 + row) * 50, 100);
            }
        }
        lg_target target = sample_target(t, got);
        target.layout = layout;
        target.rank = r;
        OK(sample_load(s->c, &target, 1, 0, &err));
        assert_memory_equal(got, expected, sizeof got);
    }
    lg_layout_free(layout);
    sample_free(s);
}

/* A fused matrix of very many parts: each rank has one interval in each. */
static void test_reshard_many_parts(void **state)
{
    (void)state;
    enum { PARTS = 150, RANKS = 2, EACH = 4 };
    lg_error err = LG_ERROR_INIT;
    static float data[PARTS * EACH], got[PARTS * EACH / RANKS];
    for (size_t i = 0; i < PARTS * EACH; i++) {
        data[i] = (float)i;
    }
    build_tensor t = {.name = "w", .dtype = LG_F32, .ndim = 1, .shape = {PARTS * EACH}, .data = data};
    lg_store *store;
    OK(lg_store_open("mem:parts", &store, &err));
    OK(lg__store_make_root(store, &err));
    char folder[LG__NAME_MAX];
    build_spec spec = {.world = 1, .step = 1, .generation = {1, 1}, .block_bytes = 4096, .tensors = &t, .n_tensors = 1};
    build_checkpoint(store, &spec, folder);
    lg_checkpoint *c;
    OK(lg__checkpoint_open_in(store, true, folder, NULL, 0, &c, &err));
    static const lg_split fused[] = {{0, LG_NO_AXIS, PARTS, LG_SPLIT_CEIL}, {0, 0, 0, LG_SPLIT_CEIL}};
    lg_layout *layout = build_layout(RANKS, 0, 2, fused, 0);
    for (uint32_t r = 0; r < RANKS; r++) {
        lg_target target = sample_target(&t, got);
        target.layout = layout;
        target.rank = r;
        OK(sample_load(c, &target, 1, 0, &err));
        for (size_t i = 0; i < PARTS * EACH / RANKS; i++) {
            assert_true(got[i] == data[i / (EACH / RANKS) * EACH + r * (EACH / RANKS) + i % (EACH / RANKS)]);
        }
    }
    lg_layout_free(layout);
    lg_checkpoint_close(c);
    lg_memory_store_drop("parts");
}

/* Nothing is compared then, and what is in the page cache is copied all the same. */
static void test_unverified_large(void **state)
{
    (void)state;
    enum { BYTES = 3 << 20 };
    lg_error err = LG_ERROR_INIT;
    char *data = malloc(BYTES), *got = malloc(BYTES + 1), dir[256];
    uint64_t seed = 3;
    for (size_t i = 0; i < BYTES; i++) {
        data[i] = (char)build_random(&seed);
    }
    build_tensor t = {.name = "w", .dtype = LG_U8, .ndim = 1, .shape = {BYTES}, .data = data};
    temp_dir_make(dir);
    lg_store *store;
    OK(lg_store_open(dir, &store, &err));
    char folder[LG__NAME_MAX];
    build_spec spec = {.world = 1,
                       .step = 1,
                       .generation = {1, 1},
                       .block_bytes = 65536,
                       .tensors = &t,
                       .n_tensors = 1,
                       .raw_copy = true};
    build_checkpoint(store, &spec, folder);
    lg_checkpoint *c;
    OK(lg__checkpoint_open_in(store, true, folder, NULL, 0, &c, &err));
    for (int odd = 0; odd < 2; odd++) { /* memory that is not aligned too */
        memset(got, 0, BYTES + 1);
        lg_target target = sample_target(&t, got + odd);
        OK(sample_load(c, &target, 1, LG_LOAD_UNVERIFIED, &err));
        assert_memory_equal(got + odd, data, BYTES);
    }
    lg_checkpoint_close(c);
    temp_dir_remove(dir);
    free(data);
    free(got);
}

/* A flat buffer of another length on another number of ranks. */
static void test_reshard_flat(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    const char *const names[] = {"opt.m", "emb.w", "irregular"};
    for (size_t k = 0; k < 3; k++) {
        const build_tensor *t = sample_tensor(s, names[k]);
        for (uint32_t world = 1; world < 8; world += 2) {
            lg_layout *layout = build_flat(world, 20000, 0);
            uint64_t elements = t->shape[0] * t->shape[1], part = (20000 + world - 1) / world, seen = 0;
            size_t element = lg_dtype_bits(t->dtype) / 8;
            for (uint32_t r = 0; r < world; r++) {
                /* The tensor lies at 777 in the buffer. */
                uint64_t begin = r * part, end = begin + part < 20000 ? begin + part : 20000;
                begin = begin > 777 ? begin - 777 : 0;
                end = end > 777 ? end - 777 : 0;
                begin = begin < elements ? begin : elements;
                end = end < elements ? end : elements;
                size_t bytes = (size_t)(end - begin) * element;
                char *got = malloc(bytes + 1);
                lg_target target = sample_target(t, got);
                target.layout = layout;
                target.rank = r;
                target.flat_offset = 777;
                OK(sample_load(s->c, &target, 1, 0, &err));
                assert_memory_equal(got, (const char *)t->data + begin * element, bytes);
                seen += end - begin;
                free(got);
            }
            assert_int_equal(seen, elements);
            lg_layout_free(layout);
        }
    }
    sample_free(s);
}

static void test_copies(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    const build_tensor *t = sample_tensor(s, "stat");
    static const struct {
        uint32_t rank, world, copy;
    } cases[] = {{0, 0, 0}, {0, 3, 0}, {1, 3, 1}, {2, 3, 2}, {1, 2, 0}, {3, 4, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double got[5];
        lg_load *load;
        OK(lg_load_begin(s->c, 0, &load, &err));
        load->rank = cases[i].rank;
        load->world = cases[i].world;
        lg_target target = sample_target(t, got);
        OK(lg_load_tensor(load, &target, &err));
        OK(lg_load_run(load, &err));
        assert_memory_equal(got, (const char *)t->data + cases[i].copy * sizeof got, sizeof got);
        lg_load_free(load);
    }
    sample_free(s);
}

/* ------------------------------------------------------------ what is asked */

static void test_refused_targets(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    const build_tensor *t = sample_tensor(s, "emb.w");
    static float data[400 * 33];
    lg_load *load;
    OK(lg_load_begin(s->c, 0, &load, &err));
    lg_target target = sample_target(t, data);
    target.dtype = LG_BF16;
    FAILS(LG_ERR_MISMATCH, lg_load_tensor(load, &target, &err));
    SAYS("BF16 [400, 33]");
    SAYS("F32 [400, 33]");
    SAYS("\"emb.w\"");
    target = sample_target(t, data);
    uint64_t other[] = {33, 400};
    target.shape = other;
    FAILS(LG_ERR_MISMATCH, lg_load_tensor(load, &target, &err));
    target = sample_target(t, data);
    target.ndim = 1;
    FAILS(LG_ERR_MISMATCH, lg_load_tensor(load, &target, &err));
    target.ndim = 33;
    FAILS(LG_ERR_INVALID, lg_load_tensor(load, &target, &err));
    target = sample_target(t, NULL);
    FAILS(LG_ERR_INVALID, lg_load_tensor(load, &target, &err));
    SAYS("no memory");
    target = sample_target(t, data);
    target.size = 8;
    FAILS(LG_ERR_INVALID, lg_load_tensor(load, &target, &err));
    target = sample_target(t, data);
    uint64_t offset[] = {0, UINT64_MAX}, extent[] = {1, 2};
    target.offset = offset;
    target.extent = extent;
    FAILS(LG_ERR_INVALID, lg_load_tensor(load, &target, &err));
    SAYS("emb.w");
    target = sample_target(t, data);
    static const lg_split rows = {0, 0, 0, LG_SPLIT_CEIL};
    lg_layout *layout = build_layout(2, 0, 1, &rows, 0);
    target.layout = layout;
    target.rank = 2;
    FAILS(LG_ERR_INVALID, lg_load_tensor(load, &target, &err));
    SAYS("no part for rank 2");
    target.rank = 0;
    target.offset = offset;
    target.extent = extent;
    FAILS(LG_ERR_INVALID, lg_load_tensor(load, &target, &err));
    target = sample_target(t, data);
    target.name = "module.emb.w";
    FAILS(LG_ERR_MISSING, lg_load_tensor(load, &target, &err));
    SAYS("is \"emb.w\" meant?");
    /* What was refused left nothing behind: the load is as empty as before. */
    OK(lg_load_run(load, &err));
    assert_int_equal(load->tensors_loaded, 0);
    target = sample_target(t, data);
    OK(lg_load_tensor(load, &target, &err));
    OK(lg_load_run(load, &err));
    assert_int_equal(load->tensors_loaded, 1);
    assert_int_equal(load->bytes_loaded, sizeof data);
    lg_load_free(load);
    lg_layout_free(layout);
    FAILS(LG_ERR_INVALID, lg_load_begin(s->c, 8, &load, &err));
    sample_free(s);
}

/* A part of a flat buffer that begins inside a byte has no place in memory. */
static void test_flat_half_bytes(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    const build_tensor *t = sample_tensor(s, "f4"); /* [6, 8] */
    static char data[24];
    lg_load *load;
    OK(lg_load_begin(s->c, 0, &load, &err));
    lg_layout *odd = build_flat(3, 51, 0), *even = build_flat(3, 48, 0);
    lg_target target = sample_target(t, data);
    target.layout = odd; /* 17 elements each */
    target.rank = 1;
    target.flat_offset = 3;
    FAILS(LG_ERR_UNSUPPORTED, lg_load_tensor(load, &target, &err));
    SAYS("\"f4\"");
    target.layout = even;
    target.flat_offset = 0;
    OK(lg_load_tensor(load, &target, &err));
    OK(lg_load_run(load, &err));
    assert_memory_equal(data, (const char *)t->data + 8, 8);
    lg_load_free(load);
    lg_layout_free(odd);
    lg_layout_free(even);
    sample_free(s);
}

static void test_optional_no_memory(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    int64_t kept = 77;
    build_tensor gone = {.name = "gone", .dtype = LG_I64};
    lg_target target = sample_target(&gone, &kept);
    target.flags = LG_TENSOR_OPTIONAL;
    lg_load *load;
    OK(lg_load_begin(s->c, 0, &load, &err));
    lg_status st = LG_ERR_NOMEM;
    size_t n = 0;
    for (; st == LG_ERR_NOMEM; n++) {
        lg__mem_fail_after(n);
        st = lg_load_tensor(load, &target, &err);
        lg__mem_fail_after(SIZE_MAX);
    }
    OK(st);
    assert_true(n > 2);
    assert_int_equal(load->n_missing, 1); /* only of the one that went through */
    lg_load_free(load);
    sample_free(s);
}

static void test_optional(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    lg_load *load;
    OK(lg_load_begin(s->c, 0, &load, &err));
    int64_t kept = 77, count = 0;
    build_tensor gone = {.name = "gone", .dtype = LG_I64};
    lg_target target = sample_target(&gone, &kept);
    target.flags = LG_TENSOR_OPTIONAL;
    OK(lg_load_tensor(load, &target, &err));
    target = sample_target(sample_tensor(s, "count"), &count);
    target.flags = LG_TENSOR_OPTIONAL;
    OK(lg_load_tensor(load, &target, &err));
    OK(lg_load_run(load, &err));
    assert_int_equal(kept, 77);
    assert_memory_equal(&count, sample_tensor(s, "count")->data, sizeof count);
    assert_int_equal(load->n_missing, 1);
    assert_string_equal(load->missing[0], "gone");
    /* Optional means that it may be absent, not that it may be another one. */
    target.dtype = LG_F64;
    FAILS(LG_ERR_MISMATCH, lg_load_tensor(load, &target, &err));
    lg_load_free(load);
    sample_free(s);
}

/* ------------------------------------------------------- how much is read */

typedef struct counted {
    sample *s;
    fault_store *f;
    lg_checkpoint *c;
} counted;

static counted count_reads(sample *s)
{
    lg_error err = LG_ERROR_INIT;
    counted k = {.s = s, .f = fault_store_new(s->store)};
    OK(lg__checkpoint_open_in(fault_store_handle(k.f), false, s->folder, NULL, 0, &k.c, &err));
    return k;
}

static void count_end(counted *k)
{
    lg_checkpoint_close(k->c);
    fault_store_free(k->f);
}

/* Bytes of data (behind the header) read from files whose name contains `file`. */
static uint64_t data_read(const counted *k, const char *file, uint64_t data_start)
{
    size_t n;
    const fault_event *log = fault_store_log(k->f, &n);
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        if (log[i].op == FAULT_READ && strstr(log[i].path, file) != NULL && log[i].offset >= data_start) {
            sum += log[i].bytes;
        }
    }
    return sum;
}

static lg__shard *shard_with(lg_checkpoint *c, uint32_t rank, const char *key, const lg__st_tensor **entry)
{
    lg_error err = LG_ERROR_INIT;
    lg__rank_files *files;
    OK(lg__checkpoint_rank(c, rank, &files, &err));
    for (size_t i = 0; i < files->n_shards; i++) {
        const lg__st_header *h;
        OK(lg__checkpoint_header(c, &files->shards[i], true, &h, &err));
        *entry = lg__st_find(h, key);
        if (*entry != NULL) {
            return &files->shards[i];
        }
    }
    fail_msg("no file holds %s", key);
    return NULL;
}

static void test_partial_reads(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    counted k = count_reads(s);
    const build_tensor *t = sample_tensor(s, "emb.w");
    const lg__st_tensor *entry;
    lg__shard *shard = shard_with(k.c, 1, "emb.w", &entry);
    uint64_t start = shard->header->data_start;
    /* Rows 150..153 of rank 1's 134..267: some hundred bytes. */
    uint64_t offset[] = {150, 0}, extent[] = {4, 33};
    float got[4 * 33];
    lg_target target = sample_target(t, got);
    target.offset = offset;
    target.extent = extent;
    fault_store_log_clear(k.f);
    OK(sample_load(k.c, &target, 1, 0, &err));
    uint64_t begin = entry->begin + 16 * 33 * 4, end = begin + sizeof got;
    uint64_t blocks = (end + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK - begin / SAMPLE_BLOCK;
    assert_int_equal(data_read(&k, "shard-00002-model-00001", start), blocks * SAMPLE_BLOCK);
    assert_int_equal(data_read(&k, "shard-", 4096), blocks * SAMPLE_BLOCK);
    /* The first and the last row: the blocks between them are not read. */
    uint64_t far_offset[] = {267, 0}, near_offset[] = {134, 0}, row[] = {1, 33};
    lg_target two[] = {target, target};
    two[0].offset = far_offset;
    two[0].extent = two[1].extent = row;
    two[1].offset = near_offset;
    fault_store_log_clear(k.f);
    OK(sample_load(k.c, two, 2, 0, &err));
    assert_true(data_read(&k, "shard-", 4096) <= UINT64_C(4) * SAMPLE_BLOCK);
    /* Nothing wanted, nothing read. */
    uint64_t none[] = {0, 33};
    target.extent = none;
    target.data = NULL;
    lg_target nothing[] = {target, sample_target(sample_tensor(s, "empty"), NULL)};
    fault_store_log_clear(k.f);
    OK(sample_load(k.c, nothing, 2, 0, &err));
    assert_int_equal(fault_store_count(k.f, FAULT_ANY), 0);
    count_end(&k);
    sample_free(s);
}

static void test_blocks_once(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    counted k = count_reads(s);
    const build_tensor *t = sample_tensor(s, "emb.w");
    const lg__st_tensor *entry;
    uint64_t start = shard_with(k.c, 1, "emb.w", &entry)->header->data_start;
    /* All of it as 33 columns: every block holds a bit of each. */
    static float columns[33][400];
    lg_target targets[33];
    uint64_t offsets[33][2], extent[] = {400, 1};
    for (uint64_t i = 0; i < 33; i++) {
        offsets[i][0] = 0;
        offsets[i][1] = i;
        targets[i] = sample_target(t, columns[i]);
        targets[i].offset = offsets[i];
        targets[i].extent = extent;
    }
    fault_store_log_clear(k.f);
    OK(sample_load(k.c, targets, 33, 0, &err));
    uint64_t first = entry->begin / SAMPLE_BLOCK, last = (entry->end + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
    uint64_t read = data_read(&k, "shard-00002-model-00001", start);
    assert_true(read <= (last - first) * SAMPLE_BLOCK && read >= entry->end - entry->begin);
    const float *whole = t->data;
    for (size_t i = 0; i < 33; i++) {
        for (size_t j = 0; j < 400; j++) {
            assert_memory_equal(&columns[i][j], &whole[j * 33 + i], 4);
        }
    }
    count_end(&k);
    sample_free(s);
}

/* A tensor of many windows, read with a small buffer, straight into place. */
typedef struct big {
    lg_store *store;
    fault_store *f;
    lg_checkpoint *c;
    build_tensor tensors[2];
    uint32_t *data;
} big;
#define BIG_ROWS 5000
#define BIG_COLUMNS 1100
#define BIG_BYTES ((size_t)BIG_ROWS * BIG_COLUMNS * 4)

static big big_make(void)
{
    lg_error err = LG_ERROR_INIT;
    big b = {.data = malloc(BIG_BYTES)};
    for (uint32_t i = 0; i < BIG_ROWS * BIG_COLUMNS; i++) {
        b.data[i] = i * 2654435761u;
    }
    b.tensors[0] =
        (build_tensor){.name = "w", .dtype = LG_U32, .ndim = 2, .shape = {BIG_ROWS, BIG_COLUMNS}, .data = b.data};
    b.tensors[1] = (build_tensor){.name = "first", .dtype = LG_U64, .ndim = 1, .shape = {3}, .data = b.data};
    OK(lg_store_open("mem:big", &b.store, &err));
    OK(lg__store_make_root(b.store, &err));
    char folder[LG__NAME_MAX];
    build_spec spec = {
        .world = 1, .step = 1, .generation = {1, 1}, .block_bytes = 65536, .tensors = b.tensors, .n_tensors = 2};
    build_checkpoint(b.store, &spec, folder);
    b.f = fault_store_new(b.store);
    OK(lg__checkpoint_open_in(fault_store_handle(b.f), false, folder, NULL, 0, &b.c, &err));
    return b;
}

static void big_free(big *b)
{
    lg_checkpoint_close(b->c);
    fault_store_free(b->f);
    lg_store_free(b->store);
    lg_memory_store_drop("big");
    free(b->data);
}

static void test_large(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    big b = big_make();
    char *got = malloc(BIG_BYTES);
    static const uint64_t buffers[] = {0, 65536, 1 << 20, 3 << 20};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
        memset(got, 0, BIG_BYTES);
        lg_load *load;
        OK(lg_load_begin(b.c, 0, &load, &err));
        load->buffer_bytes = buffers[i];
        lg_target target = sample_target(&b.tensors[0], got);
        OK(lg_load_tensor(load, &target, &err));
        fault_store_log_clear(b.f);
        OK(lg_load_run(load, &err));
        assert_memory_equal(got, b.data, BIG_BYTES);
        lg_load_free(load);
        size_t n, reads = 0;
        const fault_event *log = fault_store_log(b.f, &n);
        uint64_t furthest = 0, sum = 0, ahead = buffers[i] == 0 ? 64 << 20 : buffers[i];
        for (size_t k = 0; k < n; k++) {
            if (log[k].op == FAULT_READ && strstr(log[k].path, "model") != NULL && log[k].offset >= 4096) {
                /* several at once: in order but for what is under way */
                assert_true(log[k].offset + ahead >= furthest);
                assert_true(log[k].bytes <= 1 << 20);
                uint64_t end = log[k].offset + log[k].bytes;
                furthest = end > furthest ? end : furthest;
                sum += log[k].bytes;
                reads++;
            }
        }
        assert_int_equal(sum, furthest - 4096); /* nothing twice */
        if (buffers[i] == 0) {
            assert_true(reads <= BIG_BYTES / (1 << 20) + 8);
        }
    }
    /* Columns, transposed: all blocks, every run one element. */
    uint64_t offset[] = {0, 500}, extent[] = {BIG_ROWS, 3};
    int64_t strides[] = {4, BIG_ROWS * 4};
    lg_target target = sample_target(&b.tensors[0], got);
    target.offset = offset;
    target.extent = extent;
    target.strides = strides;
    OK(sample_load(b.c, &target, 1, 0, &err));
    for (size_t r = 0; r < BIG_ROWS; r++) {
        for (size_t j = 0; j < 3; j++) {
            assert_memory_equal(got + j * BIG_ROWS * 4 + r * 4, &b.data[r * BIG_COLUMNS + 500 + j], 4);
        }
    }
    free(got);
    big_free(&b);
}

static void test_large_damaged(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    big b = big_make();
    const char *file = "shard-00001-model-00001-of-00001.safetensors";
    size_t bytes;
    char *data = build_read(b.store, b.c->folder, file, &bytes);
    const size_t at = 4096 + 100 * 65536 + 77;
    data[at] = (char)(data[at] ^ 1);
    build_write(b.store, b.c->folder, file, data, bytes);
    free(data);
    char *got = malloc(BIG_BYTES);
    lg_target target = sample_target(&b.tensors[0], got);
    FAILS(LG_ERR_CORRUPT, sample_load(b.c, &target, 1, 0, &err));
    char says[200];
    snprintf(says, sizeof says, "%s: block at %d..%d is damaged (crc32c 0x", file, 4096 + 100 * 65536,
             4096 + 101 * 65536);
    SAYS(says);
    SAYS("part of tensor \"w\" of rank 0");
    /* Rows that do not touch the block load. */
    uint64_t offset[] = {0, 0}, extent[] = {1400, BIG_COLUMNS};
    target.offset = offset;
    target.extent = extent;
    OK(sample_load(b.c, &target, 1, 0, &err));
    OK(sample_load(b.c,
                   &(lg_target){.size = sizeof(lg_target),
                                .name = "w",
                                .dtype = LG_U32,
                                .ndim = 2,
                                .shape = b.tensors[0].shape,
                                .data = got},
                   1, LG_LOAD_UNVERIFIED, &err));
    free(got);
    big_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"K11: every kind of tensor loads whole, under every name, from memory and files", test_whole, NULL, NULL,
         NULL},
        {"random regions into memory with any strides equal a naive copy", test_regions, NULL, NULL, NULL},
        {"K12: every dtype loads whole, in regions and as a view", test_dtypes, NULL, NULL, NULL},
        {"K12: blocks may cut elements and bytes of packed dtypes", test_blocks_cut_elements, NULL, NULL, NULL},
        {"K08: random meshes to other random meshes equal a naive copy", test_reshard, NULL, NULL, NULL},
        {"K08: a fused matrix loads as the concatenation of its parts", test_reshard_fused, NULL, NULL, NULL},
        {"K08: a fused matrix of many parts gives each rank its piece of each", test_reshard_many_parts, NULL, NULL,
         NULL},
        {"what is not verified is loaded as it lies", test_unverified_large, NULL, NULL, NULL},
        {"K08: any tensor loads as the range of a flat buffer", test_reshard_flat, NULL, NULL, NULL},
        {"copies that differ go back to their ranks, elsewhere the first one counts", test_copies, NULL, NULL, NULL},
        {"K22: targets of another dtype or shape, without memory or name are refused", test_refused_targets, NULL, NULL,
         NULL},
        {"K12: parts of flat buffers that begin inside a byte are refused", test_flat_half_bytes, NULL, NULL, NULL},
        {"K22: optional targets may be absent and are listed", test_optional, NULL, NULL, NULL},
        {"an absent target that cannot be noted is an ordinary error", test_optional_no_memory, NULL, NULL, NULL},
        {"partial reads touch only the blocks they need", test_partial_reads, NULL, NULL, NULL},
        {"a block that many regions share is read once", test_blocks_once, NULL, NULL, NULL},
        {"K07 K17 F277 F278: a large tensor is read in order, in bounded pieces", test_large, NULL, NULL, NULL},
        {"a damaged block is named, and what does not touch it loads", test_large_damaged, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
