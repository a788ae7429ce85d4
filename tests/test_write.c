/* SPDX-License-Identifier: Apache-2.0 */
#include "core/checkpoint.h"
#include "core/finite.h"
#include "core/gather.h"
#include "save_kit.h"
#include "support/environment.h"

#include <ftw.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define FOLDER "step"

/* ------------------------------------------------------------ places to write */

typedef struct place {
    char uri[512];
    char path[512]; /* posix: what to remove */
    lg_store *store;
} place;

static int unlink_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

static void open_place(place *p, bool posix)
{
    static int number;
    *p = (place){0};
    if (posix) {
        const char *tmp = getenv("TMPDIR");
        snprintf(p->path, sizeof p->path, "%s/lastgood-write-XXXXXX", tmp != NULL ? tmp : "/tmp");
        assert_non_null(mkdtemp(p->path));
        snprintf(p->uri, sizeof p->uri, "%s", p->path);
    } else {
        snprintf(p->uri, sizeof p->uri, "mem:test-write-%d", number++);
    }
    assert_ok(lg_store_open(p->uri, &p->store, err));
    assert_ok(lg__store_make_root(p->store, err));
    assert_ok(lg__store_make_dir(p->store, FOLDER, err));
}

static void close_place(place *p)
{
    lg_store_free(p->store);
    if (p->path[0] != '\0') {
        nftw(p->path, unlink_one, 8, FTW_DEPTH | FTW_PHYS);
    } else {
        lg_memory_store_drop(p->uri + 4);
    }
}

static void read_file(lg_store *store, const char *name, lg__buf *out)
{
    char path[512];
    assert_true(lg__path_join(path, sizeof path, FOLDER, name));
    lg__buf_init(out, (size_t)1 << 30);
    assert_ok(lg__store_read_all(store, path, out, err));
}

static int count_name(const lg_node *node, void *arg)
{
    (void)node;
    ++*(int *)arg;
    return 0;
}

static int n_files(lg_store *store)
{
    int n = 0;
    assert_ok(lg__store_list(store, FOLDER, count_name, &n, err));
    return n;
}

/* ----------------------------------------------------------- writing, checking */

static lg__written write_rank(lg_save *save, lg_store *store, lg__plan **plan)
{
    lg__written w = {0};
    assert_ok(lg__plan_make(save, &kit_ids, plan, err));
    assert_ok(lg__save_write(save, store, FOLDER, *plan, &kit_ids, &w, err));
    return w;
}

/* Checks the sums file against the files, block by block, and the report
 * against the tables. */
static void check_sums(const lg_save *save, lg_store *store, const lg__plan *plan, const lg__written *w)
{
    char name[LG__NAME_MAX];
    lg__sums_file(save->rank, name);
    lg__buf sums;
    read_file(store, name, &sums);
    assert_int_equal(sums.len, w->sums_bytes);
    lg__sums_head head;
    assert_ok(lg__sums_head_decode(sums.data, sums.len, sums.len, &head, err));
    assert_int_equal(head.block_bytes, save->block_bytes);
    assert_int_equal(head.n_tables, plan->n_files);
    uint8_t digest[LG__SHA256_BYTES];
    assert_ok(lg__sha256_of(sums.data + head.report_at, head.report_bytes, digest, err));
    assert_memory_equal(digest, w->report, sizeof digest);
    lg__report *report = NULL;
    assert_ok(lg__report_decode(sums.data + head.report_at, head.report_bytes, &report, err));
    assert_int_equal(report->rank, save->rank);
    assert_int_equal(report->step, save->step);
    assert_string_equal(report->attempt, kit_ids.attempt);
    assert_string_equal(report->domain, kit_ids.domain);
    assert_int_equal(report->n_files, plan->n_files);
    size_t at = LG__SUMS_HEAD_BYTES;
    uint64_t all = sums.len;
    for (size_t i = 0; i < plan->n_files; i++) {
        const lg__plan_file *f = &plan->files[i];
        lg__buf bytes;
        read_file(store, f->name, &bytes);
        assert_int_equal(bytes.len, f->header.len + f->data_bytes);
        assert_memory_equal(bytes.data, f->header.data, f->header.len);
        size_t table_bytes = (size_t)lg__table_bytes(f->data_bytes, head.block_bytes);
        lg__table table;
        assert_ok(lg__table_decode(sums.data + at, table_bytes, head.block_bytes, &table, err));
        assert_ok(lg__sha256_of(sums.data + at, table_bytes, digest, err));
        assert_memory_equal(digest, report->files[i].table, sizeof digest);
        assert_int_equal(report->files[i].bytes, bytes.len);
        assert_int_equal(table.file_bytes, bytes.len);
        assert_int_equal(table.header_bytes, f->header.len);
        assert_int_equal(table.header_crc, lg__crc32c(0, bytes.data, f->header.len));
        for (uint64_t b = 0; b < table.n_blocks; b++) {
            size_t from = f->header.len + (size_t)(b * head.block_bytes);
            size_t n = bytes.len - from < head.block_bytes ? bytes.len - from : head.block_bytes;
            assert_int_equal(table.block_crc[b], lg__crc32c(0, bytes.data + from, n));
        }
        lg__free(table.block_crc);
        at += table_bytes;
        all += bytes.len;
        lg__buf_free(&bytes);
    }
    assert_int_equal(at, head.report_at);
    assert_int_equal(w->bytes, all);
    lg__report_free(report);
    lg__buf_free(&sums);
}

/* A whole tensor, put together from the files of all ranks. */
typedef struct image {
    const char *key;
    lg_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape;
    uint8_t *bytes;
    uint8_t *seen; /* one flag a byte */
} image;

static lg_status copy_run(uint64_t box_byte, int64_t mem_byte, uint64_t bytes, void *arg, lg_error *err)
{
    (void)err;
    void **both = arg;
    image *im = both[0];
    const uint8_t *from = both[1];
    memcpy(im->bytes + mem_byte, from + box_byte, (size_t)bytes);
    for (uint64_t i = 0; i < bytes; i++) {
        im->seen[mem_byte + (int64_t)i]++;
    }
    return LG_OK;
}

static void add_files(image *im, lg_store *store, const lg__plan *plan)
{
    for (size_t i = 0; i < plan->n_files; i++) {
        lg__buf bytes;
        read_file(store, plan->files[i].name, &bytes);
        uint64_t n = lg__get_u64le(bytes.data);
        lg__st_header *h = NULL;
        assert_ok(lg__st_parse(bytes.data + 8, n, bytes.len, &h, err));
        const lg__st_tensor *t = lg__st_find(h, im->key);
        if (t != NULL && t->end > t->begin) {
            lg__region box = {.ndim = t->ndim};
            for (uint32_t d = 0; d < t->ndim; d++) {
                box.offset[d] = t->saved_offsets[d];
                box.size[d] = t->shape[d];
            }
            const uint64_t origin[LG_MAX_NDIM] = {0};
            const lg__run_walk walk = {
                .dtype = im->dtype, .box = &box, .part = &box, .mem_origin = origin, .mem_size = im->shape};
            void *both[] = {im, bytes.data + h->data_start + t->begin};
            assert_true(lg__region_inside(&box, im->ndim, im->shape));
            assert_ok(lg__region_runs(&walk, copy_run, both, err));
        }
        lg__st_free(h);
        lg__buf_free(&bytes);
    }
}

static image new_image(const char *key, lg_dtype dtype, uint32_t ndim, const uint64_t *shape, uint64_t *bytes)
{
    assert_ok(lg__shape_bytes(dtype, ndim, shape, bytes, err));
    image im = {.key = key, .dtype = dtype, .ndim = ndim, .shape = shape};
    im.bytes = calloc(*bytes > 0 ? *bytes : 1, 1);
    im.seen = calloc(*bytes > 0 ? *bytes : 1, 1);
    return im;
}

static void check_image(const image *im, const uint8_t *want, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++) {
        if (im->seen[i] != 1 || im->bytes[i] != want[i]) {
            fail_msg("tensor \"%s\": byte %llu of %llu was written %d times and is 0x%02x instead of 0x%02x", im->key,
                     (unsigned long long)i, (unsigned long long)bytes, im->seen[i], im->bytes[i], want[i]);
        }
    }
}

static void free_image(image *im)
{
    free(im->bytes);
    free(im->seen);
}

/* -------------------------------------------------------- memory of any layout */

typedef struct strided_case {
    const char *name;
    uint32_t ndim;
    uint64_t shape[4];
    int order[4];     /* dimensions from the slowest to the fastest in memory */
    int reversed[4];  /* runs backwards */
    uint64_t skip[4]; /* elements left out behind each one, in the fastest dimension */
} strided_case;

static const strided_case strided_cases[] = {
    {"packed", 2, {5, 7}, {0, 1}, {0}, {0}},
    {"K12 F214: transposed", 2, {3, 4}, {1, 0}, {0}, {0}},
    {"K12 F214: channels last", 4, {2, 3, 5, 4}, {0, 2, 3, 1}, {0}, {0}},
    {"reversed rows", 2, {5, 7}, {0, 1}, {1, 0}, {0}},
    {"all reversed", 3, {3, 4, 5}, {0, 1, 2}, {1, 1, 1}, {0}},
    {"every third element", 2, {6, 5}, {0, 1}, {0}, {0, 2}},
    {"every second, transposed, reversed", 3, {4, 3, 5}, {2, 0, 1}, {0, 1, 0}, {0, 1}},
    {"transposed, large enough for tiles", 2, {70, 37}, {1, 0}, {0}, {0}},
    {"channels last, large enough for tiles", 4, {2, 9, 5, 20}, {0, 2, 3, 1}, {0}, {0}},
    {"reversed tiles", 3, {9, 7, 33}, {2, 0, 1}, {1, 0, 1}, {0, 1}},
    {"one element", 1, {1}, {0}, {1}, {0}},
    {"scalar", 0, {0}, {0}, {0}, {0}},
};

/* Memory for a case, and its strides; *first is where element 0 lies. */
static uint8_t *lay_out(const strided_case *c, lg_dtype dtype, int64_t strides[4], uint8_t **first, uint8_t **packed)
{
    const size_t e = lg_dtype_bits(dtype) / 8;
    int64_t step = (int64_t)e, start = 0;
    for (uint32_t i = c->ndim; i-- > 0;) {
        int d = c->order[i];
        step *= (int64_t)(i + 1 == c->ndim ? c->skip[d] + 1 : 1);
        strides[d] = c->reversed[d] ? -step : step;
        start += c->reversed[d] ? step * (int64_t)(c->shape[d] - 1) : 0;
        step *= (int64_t)c->shape[d];
    }
    uint64_t n = 1;
    for (uint32_t d = 0; d < c->ndim; d++) {
        n *= c->shape[d];
    }
    uint8_t *memory = malloc((size_t)step);
    memset(memory, 0xEE, (size_t)step);
    *packed = malloc((size_t)n * e);
    *first = memory + start;
    for (uint64_t i = 0; i < n; i++) {
        int64_t at = 0;
        uint64_t rest = i;
        for (uint32_t d = c->ndim; d-- > 0;) {
            at += (int64_t)(rest % c->shape[d]) * strides[d];
            rest /= c->shape[d];
        }
        uint8_t value[8];
        kit_element(dtype, i, value);
        memcpy(*first + at, value, e);
        memcpy(*packed + i * e, value, e);
    }
    return memory;
}

static void memory_of_any_strides_is_packed_while_writing(void **state)
{
    (void)state;
    static const lg_dtype dtypes[] = {LG_U8, LG_BF16, LG_F32, LG_F64};
    for (int posix = 0; posix < 2; posix++) {
        for (size_t i = 0; i < sizeof strided_cases / sizeof *strided_cases; i++) {
            for (size_t k = 0; k < sizeof dtypes / sizeof *dtypes; k++) {
                const strided_case *c = &strided_cases[i];
                int64_t strides[4] = {0};
                uint8_t *first, *packed, *memory = lay_out(c, dtypes[k], strides, &first, &packed);
                place p;
                open_place(&p, posix);
                lg_layout *rows = kit_replicated(1, 0);
                lg_save *save = kit_save(0, 1, 0);
                lg_tensor t = kit_tensor(c->name, dtypes[k], c->ndim, c->shape, first);
                t.strides = strides, t.layout = rows;
                assert_ok(lg_save_tensor(save, &t, err));
                lg__plan *plan = NULL;
                lg__written w = write_rank(save, p.store, &plan);
                check_sums(save, p.store, plan, &w);
                uint64_t bytes;
                image im = new_image(c->name, dtypes[k], c->ndim, c->shape, &bytes);
                add_files(&im, p.store, plan);
                check_image(&im, packed, bytes);
                free_image(&im);
                lg__plan_free(plan);
                lg_save_abort(save);
                lg_layout_free(rows);
                close_place(&p);
                free(memory);
                free(packed);
            }
        }
    }
}

typedef struct gathered {
    uint8_t *bytes;
    uint64_t at;
    bool in_order;
} gathered;

static lg_status keep_bytes(const uint8_t *data, uint64_t bytes, uint64_t at, void *arg, lg_error *err)
{
    (void)err;
    gathered *g = arg;
    g->in_order = g->in_order && at == g->at;
    memcpy(g->bytes + g->at, data, (size_t)bytes);
    g->at += bytes;
    return LG_OK;
}

static uint32_t below(lg_rng *rng, uint32_t n) { return lg_rng_u32(rng) % n; }

static void gathering_equals_the_naive_walk_for_random_memory(void **state)
{
    (void)state;
    static const lg_dtype dtypes[] = {LG_U8, LG_F16, LG_F32, LG_C64};
    uint8_t scratch[3000]; /* small, so that tiles have few rows and often do not fit */
    for (uint64_t seed = 1; seed <= 3000; seed++) {
        lg_rng rng = {.seed = seed};
        strided_case c = {.ndim = 1 + below(&rng, 4)};
        for (uint32_t d = 0; d < c.ndim; d++) {
            c.shape[d] = 1 + below(&rng, c.ndim < 3 ? 60 : 11);
            c.order[d] = (int)d;
            c.reversed[d] = below(&rng, 4) == 0;
            c.skip[d] = below(&rng, 4) == 0;
        }
        for (uint32_t d = c.ndim; d-- > 1;) {
            uint32_t other = below(&rng, d + 1);
            int swap = c.order[d];
            c.order[d] = c.order[other], c.order[other] = swap;
        }
        const lg_dtype dtype = dtypes[below(&rng, 4)];
        int64_t strides[4] = {0};
        uint8_t *first, *packed, *memory = lay_out(&c, dtype, strides, &first, &packed);
        lg__region where = lg__region_whole(c.ndim, c.shape);
        for (uint32_t d = 0; d < c.ndim; d++) {
            where.offset[d] = 5; /* where it is globally makes no difference */
        }
        const lg__plan_box box = {
            .dtype = dtype, .data = first, .strides = strides, .box = {where.ndim, where.offset, where.size}};
        const uint64_t bytes = lg__region_elements(&where) * lg_dtype_bits(dtype) / 8;
        gathered g = {.bytes = malloc(bytes), .in_order = true};
        const lg__scratch s = {scratch, below(&rng, 4) == 0 ? 100 : sizeof scratch};
        assert_ok(lg__gather(&box, s, keep_bytes, &g, err));
        if (!g.in_order || g.at != bytes || memcmp(g.bytes, packed, bytes) != 0) {
            fail_msg("seed %llu", (unsigned long long)seed);
        }
        free(g.bytes);
        free(memory);
        free(packed);
    }
}

static void a_stride_of_zero_repeats_an_element(void **state)
{
    (void)state;
    const uint64_t shape[] = {3, 4};
    const int64_t strides[] = {0, 4};
    const float row[] = {1, 2, 3, 4}, all[] = {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4};
    place p;
    open_place(&p, false);
    lg_save *save = kit_save(0, 1, 0);
    lg_tensor t = kit_tensor("w", LG_F32, 2, shape, row);
    t.strides = strides;
    assert_ok(lg_save_tensor(save, &t, err));
    assert_ok(kit_settle(&save, 1, false, err));
    lg__plan *plan = NULL;
    write_rank(save, p.store, &plan);
    uint64_t bytes;
    image im = new_image("w", LG_F32, 2, shape, &bytes);
    add_files(&im, p.store, plan);
    check_image(&im, (const uint8_t *)all, bytes);
    free_image(&im);
    lg__plan_free(plan);
    lg_save_abort(save);
    close_place(&p);
}

/* --------------------------------------------------- layouts, against the whole */

typedef struct layout_case {
    const char *name;
    uint32_t world, ndim;
    uint64_t shape[3];
    uint32_t mesh_ndim, sizes[3], n_splits;
    lg_split splits[3];
    uint64_t flat_length, flat_offset;
    int32_t flat_axis;
    uint32_t writers;
    lg_dtype dtype;
} layout_case;

static const layout_case layout_cases[] = {
    {"rows", 4, 2, {10, 3}, 1, {4}, 1, {{0, 0, 0, LG_SPLIT_CEIL}}, .dtype = LG_F32},
    {"K08 F125: more ranks than rows", 8, 2, {3, 5}, 1, {8}, 1, {{0, 0, 0, LG_SPLIT_CEIL}}, .dtype = LG_BF16},
    {"columns, even", 4, 2, {3, 10}, 1, {4}, 1, {{1, 0, 0, LG_SPLIT_EVEN}}, .dtype = LG_I64},
    {"K08 F127: two axes on one dimension",
     4,
     2,
     {11, 2},
     2,
     {2, 2},
     2,
     {{0, 1, 0, LG_SPLIT_CEIL}, {0, 0, 0, LG_SPLIT_CEIL}},
     .dtype = LG_F32},
    {"grid", 6, 3, {5, 7, 3}, 2, {2, 3}, 2, {{0, 0, 0, LG_SPLIT_CEIL}, {1, 1, 0, LG_SPLIT_EVEN}}, .dtype = LG_F32},
    {"fused thirds",
     2,
     2,
     {12, 5},
     1,
     {2},
     2,
     {{0, LG_NO_AXIS, 3, LG_SPLIT_CEIL}, {0, 0, 0, LG_SPLIT_CEIL}},
     .dtype = LG_BF16},
    {"replicas, all of which write", 4, 2, {9, 4}, 1, {4}, 0, {{0}}, .writers = 4, .dtype = LG_F32},
    {"rows of replicas", 4, 2, {9, 4}, 2, {2, 2}, 1, {{0, 0, 0, LG_SPLIT_CEIL}}, .writers = 2, .dtype = LG_U8},
    {"flat", 4, 3, {3, 5, 7}, 1, {4}, 0, {{0}}, .flat_length = 130, .flat_offset = 13, .dtype = LG_F32},
    {"flat with writers",
     4,
     2,
     {6, 9},
     2,
     {2, 2},
     0,
     {{0}},
     .flat_length = 60,
     .flat_offset = 4,
     .writers = 2,
     .dtype = LG_F64},
    {"half bytes, fused",
     2,
     2,
     {4, 16},
     1,
     {2},
     2,
     {{1, LG_NO_AXIS, 2, LG_SPLIT_CEIL}, {1, 0, 0, LG_SPLIT_CEIL}},
     .dtype = LG_F4},
    {"six bits", 2, 2, {8, 3}, 1, {2}, 1, {{0, 0, 0, LG_SPLIT_CEIL}}, .dtype = LG_F6_E2M3},
};

static lg_layout *case_layout(const layout_case *c)
{
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = c->mesh_ndim, d.mesh_sizes = c->sizes, d.n_splits = c->n_splits, d.splits = c->splits;
    d.flat_length = c->flat_length, d.flat_axis = c->flat_axis, d.writers = c->writers;
    lg_layout *layout = NULL;
    assert_ok(lg_layout_create(&d, &layout, err));
    return layout;
}

typedef struct fill {
    uint8_t *local;
    const uint8_t *whole;
} fill;

static lg_status fill_run(uint64_t box_byte, int64_t mem_byte, uint64_t bytes, void *arg, lg_error *err)
{
    (void)err;
    fill *f = arg;
    memcpy(f->local + box_byte, f->whole + mem_byte, (size_t)bytes);
    return LG_OK;
}

static uint64_t bytes_of(lg_dtype dtype, uint64_t elements) { return elements * lg_dtype_bits(dtype) / 8; }

/* What a rank holds in memory: its held pieces, put where the layout says. */
static uint8_t *local_memory(const layout_case *c, const lg_layout *layout, const lg__tensor_desc *desc, uint32_t rank,
                             const uint8_t *whole)
{
    lg__piece *pieces = NULL;
    size_t n = 0;
    uint64_t local_shape[LG_MAX_NDIM] = {0}, start = 0, elements = 0;
    lg_layout *l = NULL;
    assert_ok(lg__layout_resolve(layout, desc, &l, err));
    assert_ok(lg__layout_held(l, desc, rank, &pieces, &n, err));
    assert_ok(lg__layout_local_part(l, desc, rank, local_shape, &start, &elements, err));
    uint8_t *local = calloc(bytes_of(c->dtype, elements) + 1, 1);
    for (size_t i = 0; i < n; i++) {
        const uint64_t origin[LG_MAX_NDIM] = {0};
        /* box side: the local tensor, shifted to where the piece is */
        lg__region frame = pieces[i].box;
        uint8_t *at = local;
        if (l->kind == LG__FLAT) {
            at += bytes_of(c->dtype, pieces[i].flat_local);
        } else {
            for (uint32_t d = 0; d < desc->ndim; d++) {
                frame.offset[d] = pieces[i].box.offset[d] - pieces[i].local[d];
                frame.size[d] = local_shape[d];
            }
        }
        const lg__run_walk walk = {
            .dtype = c->dtype, .box = &frame, .part = &pieces[i].box, .mem_origin = origin, .mem_size = desc->shape};
        fill f = {at, whole};
        assert_ok(lg__region_runs(&walk, fill_run, &f, err));
    }
    lg__free(pieces);
    lg__layout_unref(l);
    return local;
}

static void the_files_of_all_ranks_tile_the_tensor(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof layout_cases / sizeof *layout_cases; i++) {
        const layout_case *c = &layout_cases[i];
        lg_layout *layout = case_layout(c);
        const lg__tensor_desc desc = {
            .name = c->name, .dtype = c->dtype, .ndim = c->ndim, .shape = c->shape, .flat_offset = c->flat_offset};
        const bool raw = lg__file_group(LG_GROUP_MODEL, c->dtype, false) == LG_GROUP_RAW;
        char key[128];
        snprintf(key, sizeof key, "%s%s", raw ? LG__RAW_TENSOR_PREFIX : "", c->name);
        uint64_t bytes;
        image im = new_image(key, c->dtype, c->ndim, c->shape, &bytes);
        uint8_t *whole = malloc(bytes);
        for (uint64_t b = 0; b < bytes; b++) {
            whole[b] = (uint8_t)(b * 37 + 11 + b / 251);
        }
        place p;
        open_place(&p, i % 2 == 1);
        for (uint32_t r = 0; r < c->world; r++) {
            uint8_t *local = local_memory(c, layout, &desc, r, whole);
            lg_save *save = kit_save(r, c->world, 0);
            lg_tensor t = kit_tensor(c->name, c->dtype, c->ndim, c->shape, local);
            t.layout = layout, t.flat_offset = c->flat_offset;
            assert_ok(lg_save_tensor(save, &t, err));
            lg__plan *plan = NULL;
            lg__written w = write_rank(save, p.store, &plan);
            check_sums(save, p.store, plan, &w);
            add_files(&im, p.store, plan);
            lg__plan_free(plan);
            lg_save_abort(save);
            free(local);
        }
        check_image(&im, whole, bytes);
        close_place(&p);
        free_image(&im);
        free(whole);
        lg_layout_free(layout);
    }
}

/* ------------------------------------------------------- sizes, blocks, buffers */

static void data_is_digested_block_by_block_across_buffers(void **state)
{
    (void)state;
    static const struct {
        uint64_t block, buffer, bytes;
    } cases[] = {{4096, 1 << 20, 0},
                 {4096, 1 << 20, 1},
                 {4096, 1 << 20, 4096},
                 {4096, 8192, 3 * 4096 + 5},
                 {65536, 1 << 20, (1 << 20) + 65537},
                 {1 << 20, 1 << 20, (3 << 20) + 12345},
                 {4 << 20, 1 << 20, (9 << 20) + 1}};
    uint8_t *data = malloc(16 << 20);
    for (size_t i = 0; i < (16 << 20); i++) {
        data[i] = (uint8_t)(i * 2654435761u >> 13);
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        place p;
        open_place(&p, i % 2 == 0);
        lg_save *save = kit_save(0, 1, 0);
        save->block_bytes = cases[i].block, save->buffer_bytes = cases[i].buffer;
        const uint64_t shape[] = {cases[i].bytes};
        lg_tensor t = kit_tensor("w", LG_U8, 1, shape, data);
        assert_ok(lg_save_tensor(save, &t, err));
        assert_ok(lg_save_rank_bytes(save, "state", data, 12345, err));
        assert_ok(kit_settle(&save, 1, false, err));
        lg__plan *plan = NULL;
        lg__written w = write_rank(save, p.store, &plan);
        check_sums(save, p.store, plan, &w);
        uint64_t bytes;
        image im = new_image("w", LG_U8, 1, shape, &bytes);
        add_files(&im, p.store, plan);
        check_image(&im, data, bytes);
        free_image(&im);
        lg__plan_free(plan);
        lg_save_abort(save);
        close_place(&p);
    }
    free(data);
}

static void zero_size_tensors_and_scalars_are_written(void **state)
{
    (void)state;
    /* K12 F211, F212 */
    static const uint64_t shapes[][2] = {{0, 0}, {2, 0}, {0, 3}};
    const double one = 1;
    place p;
    open_place(&p, true);
    lg_save *save = kit_save(0, 1, 0);
    static const char *const names[] = {"a", "b", "c"};
    for (size_t i = 0; i < 3; i++) {
        lg_tensor t = kit_tensor(names[i], LG_F32, 2, shapes[i], NULL);
        assert_ok(lg_save_tensor(save, &t, err));
    }
    lg_tensor t = kit_tensor("scalar", LG_F64, 0, NULL, &one);
    assert_ok(lg_save_tensor(save, &t, err));
    assert_ok(kit_settle(&save, 1, false, err));
    lg__plan *plan = NULL;
    lg__written w = write_rank(save, p.store, &plan);
    check_sums(save, p.store, plan, &w);
    lg__buf bytes;
    read_file(p.store, plan->files[0].name, &bytes);
    lg__st_header *h = NULL;
    assert_ok(lg__st_parse(bytes.data + 8, lg__get_u64le(bytes.data), bytes.len, &h, err));
    assert_int_equal(h->n, 4);
    for (size_t i = 0; i < 3; i++) {
        const lg__st_tensor *s = lg__st_find(h, names[i]);
        assert_non_null(s);
        assert_memory_equal(s->shape, shapes[i], sizeof shapes[i]);
    }
    assert_memory_equal(bytes.data + h->data_start, &one, sizeof one);
    lg__st_free(h);
    lg__buf_free(&bytes);
    lg__plan_free(plan);
    lg_save_abort(save);
    close_place(&p);
}

static long peak_kib(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_maxrss;
}

/* In a process of its own, whose peak is its own. */
static int write_large(void)
{
    enum { MIB = 64 };
    place p;
    open_place(&p, true);
    const size_t bytes = (size_t)MIB << 20;
    uint8_t *data = malloc(bytes);
    memset(data, 7, bytes);
    const uint64_t shape[] = {8 * MIB, (uint64_t)1 << 17};
    const int64_t strides[] = {1, 8 * MIB}; /* transposed: cannot be written as it lies */
    lg_save *save = kit_save(0, 1, 0);
    lg_layout *one = kit_replicated(1, 0);
    lg_tensor t = kit_tensor("w", LG_U8, 2, shape, data);
    t.layout = one;
    assert_ok(lg_save_tensor(save, &t, err));
    const uint64_t half[] = {8 * MIB, (uint64_t)1 << 14};
    t.name = "v", t.shape = half, t.strides = strides;
    assert_ok(lg_save_tensor(save, &t, err));
    const long before = peak_kib();
    lg__plan *plan = NULL;
    write_rank(save, p.store, &plan);
    const long grown = peak_kib() - before;
    lg__plan_free(plan);
    lg_save_abort(save);
    lg_layout_free(one);
    free(data);
    close_place(&p);
#ifdef __SANITIZE_THREAD__
    const long most = 16 * 1024; /* it keeps much about each thread */
#else
    const long most = in_brief() ? 16 * 1024 : 8 * 1024; /* so does valgrind */
#endif
    if (grown > most) {
        print_error("peak memory grew by %ld KiB\n", grown);
    }
    return grown > most;
}

static void staging_does_not_grow_with_the_tensor(void **state)
{
    (void)state;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        _exit(write_large());
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* ---------------------------------------------------------------- finite values */

static void bits_that_are_not_finite_are_found(void **state)
{
    (void)state;
    static const struct {
        lg_dtype dtype;
        uint64_t good[3], bad[3];
    } cases[] = {
        {LG_F64,
         {0, 0x7fefffffffffffff, 0x8000000000000000},
         {0x7ff0000000000000, 0xfff0000000000000, 0x7ff8000000000001}},
        {LG_F32, {0, 0x7f7fffff, 0x80000001}, {0x7f800000, 0xff800000, 0xffc00000}},
        {LG_F16, {0, 0x7bff, 0x8000}, {0x7c00, 0xfc00, 0x7e01}},
        {LG_BF16, {0, 0x7f7f, 0x8000}, {0x7f80, 0xff80, 0x7fc1}},
        {LG_F8_E5M2, {0, 0x7b, 0x80}, {0x7c, 0xfc, 0x7f}},
        {LG_F8_E4M3, {0, 0x7e, 0x80}, {0x7f, 0xff, 0x7f}},
        {LG_F8_E8M0, {0, 0x7f, 0xfe}, {0xff, 0xff, 0xff}},
        {LG_F8_E4M3FNUZ, {0, 0x7f, 0xff}, {0x80, 0x80, 0x80}},
        {LG_F8_E5M2FNUZ, {0, 0x7f, 0xff}, {0x80, 0x80, 0x80}},
    };
    uint8_t bytes[8 * 67 + 1];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t e = lg_dtype_bits(cases[i].dtype) / 8;
        for (size_t k = 0; k < 3; k++) {
            for (size_t at = 0; at < 67; at += 11) {
                memset(bytes, 0, sizeof bytes);
                for (size_t j = 0; j < 67; j++) {
                    memcpy(bytes + 1 + j * e, &cases[i].good[j % 3], e);
                }
                assert_int_equal(lg__finite_scan(cases[i].dtype, bytes + 1, 67 * e), 67 * e);
                memcpy(bytes + 1 + at * e, &cases[i].bad[k], e);
                assert_int_equal(lg__finite_scan(cases[i].dtype, bytes + 1, 67 * e), at * e);
            }
        }
    }
    memset(bytes, 0xff, sizeof bytes);
    assert_int_equal(lg__finite_scan(LG_I64, bytes, 64), 64);
    assert_int_equal(lg__finite_scan(LG_F4, bytes, 64), 64);
    const float pair[] = {1, 2, 3, __builtin_inff()};
    assert_int_equal(lg__finite_scan(LG_C64, pair, sizeof pair), 8);
}

static void a_value_that_is_not_finite_is_refused_with_its_place(void **state)
{
    (void)state;
    /* a transposed part of a tensor cut by columns: rank 1 has columns 4 to 7 */
    float local[4][300];
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 300; j++) {
            local[i][j] = (float)(i * j);
        }
    }
    local[2][123] = __builtin_nanf("");
    const uint64_t shape[] = {300, 8};
    const int64_t strides[] = {4, 1200};
    lg_layout *columns = kit_rows(2, 1);
    for (int checked = 0; checked < 2; checked++) {
        place p;
        open_place(&p, false);
        lg_save *save = kit_save(1, 2, checked ? LG_SAVE_FINITE : 0);
        lg_tensor t = kit_tensor("w", LG_F32, 2, shape, local);
        t.layout = columns, t.strides = strides;
        assert_ok(lg_save_tensor(save, &t, err));
        lg__plan *plan = NULL;
        lg__written w;
        assert_ok(lg__plan_make(save, &kit_ids, &plan, err));
        if (checked) {
            assert_fails(LG_ERR_INVALID, "tensor \"w\" is not finite at [123, 6]",
                         lg__save_write(save, p.store, FOLDER, plan, &kit_ids, &w, err));
        } else {
            assert_ok(lg__save_write(save, p.store, FOLDER, plan, &kit_ids, &w, err));
        }
        lg__plan_free(plan);
        lg_save_abort(save);
        close_place(&p);
    }
    lg_layout_free(columns);
}

/* -------------------------------------------------------------------- failures
 *
 * A store that notes what it is asked, and fails from the n-th request on. */
typedef struct faulty {
    lg_store *inner;
    size_t left; /* requests before the first failure */
    int open;
    lg__buf log; /* one line a request */
    bool no_rename;
} faulty;

struct lg_file {
    faulty *f;
    lg_file *inner;
    char path[256];
};

static lg_status step(faulty *f, const char *what, const char *path, lg_error *err)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* writes may come from several threads */
    pthread_mutex_lock(&lock);
    lg__buf_fmt(&f->log, "%s %s\n", what, path);
    const bool burns = f->left == 0;
    f->left -= f->left != SIZE_MAX && !burns;
    pthread_mutex_unlock(&lock);
    return burns ? lg_error_set(err, LG_ERR_IO, "%s: %s: the disk is on fire", path, what) : LG_OK;
}

static lg_status f_root(void *ctx, lg_error *err) { return step(ctx, "make_root", "", err); }
static lg_status f_make_dir(void *ctx, const char *path, lg_error *err) { return step(ctx, "make_dir", path, err); }
static lg_status f_create(void *ctx, const char *path, uint64_t bytes, lg_file **out, lg_error *err)
{
    faulty *f = ctx;
    LG__TRY(step(f, "create", path, err));
    lg_file *inner = NULL;
    LG__TRY(lg__store_create(f->inner, path, bytes, &inner, err));
    *out = calloc(1, sizeof **out);
    **out = (lg_file){.f = f, .inner = inner};
    snprintf((*out)->path, sizeof(*out)->path, "%s", path);
    f->open++;
    return LG_OK;
}
static lg_status f_open(void *ctx, const char *path, lg_file **out, uint64_t *bytes, lg_error *err)
{
    (void)out;
    (void)bytes;
    return step(ctx, "open", path, err);
}
static lg_status f_write(lg_file *file, const void *data, size_t bytes, uint64_t offset, lg_error *err)
{
    LG__TRY(step(file->f, "write", file->path, err));
    return lg__store_write(file->f->inner, file->inner, data, bytes, offset, err);
}
static lg_status f_read(lg_file *file, void *data, size_t bytes, uint64_t offset, lg_error *err)
{
    (void)data;
    (void)bytes;
    (void)offset;
    return step(file->f, "read", file->path, err);
}
static lg_status f_sync(lg_file *file, lg_error *err)
{
    LG__TRY(step(file->f, "sync", file->path, err));
    return lg__store_sync(file->f->inner, file->inner, err);
}
static lg_status f_close(lg_file *file, lg_error *err)
{
    lg_status status = step(file->f, "close", file->path, err);
    lg_error other = LG_ERROR_INIT;
    lg_status inner = lg__store_close(file->f->inner, file->inner, &other);
    file->f->open--;
    free(file);
    return status != LG_OK ? status : inner;
}
static lg_status f_list(void *ctx, const char *path, int (*fn)(const lg_node *, void *), void *arg, lg_error *err)
{
    (void)fn;
    (void)arg;
    return step(ctx, "list", path, err);
}
static lg_status f_rename(void *ctx, const char *from, const char *to, lg_error *err)
{
    faulty *f = ctx;
    LG__TRY(step(f, "rename_file", from, err));
    if (f->no_rename) {
        return lg_error_set(err, LG_ERR_UNSUPPORTED, "objects cannot be renamed");
    }
    return lg__store_rename_file(f->inner, from, to, err);
}
static lg_status f_remove(void *ctx, const char *path, lg_error *err)
{
    faulty *f = ctx;
    LG__TRY(step(f, "remove", path, err));
    return lg__store_remove_file(f->inner, path, err);
}
static const char *f_describe(void *ctx)
{
    (void)ctx;
    return "faulty";
}

static const lg_store_ops faulty_ops = {.version = LG_STORE_OPS_VERSION,
                                        .make_root = f_root,
                                        .make_dir = f_make_dir,
                                        .create = f_create,
                                        .open = f_open,
                                        .write = f_write,
                                        .read = f_read,
                                        .sync = f_sync,
                                        .close = f_close,
                                        .list = f_list,
                                        .rename_file = f_rename,
                                        .remove_file = f_remove,
                                        .remove_dir = f_remove,
                                        .describe = f_describe};

static float some_data[4096];

/* Two tensors in two groups, and bytes: three files. */
static lg_save *three_files(void)
{
    const uint64_t shape[] = {64, 64};
    lg_save *save = kit_save(0, 1, 0);
    save->buffer_bytes = 8192; /* several writes a file */
    lg_tensor t = kit_tensor("w", LG_F32, 2, shape, some_data);
    assert_ok(lg_save_tensor(save, &t, err));
    t.name = "optim.m", t.group = LG_GROUP_OPTIM;
    assert_ok(lg_save_tensor(save, &t, err));
    assert_ok(lg_save_alias(save, "v", "w", err));
    assert_ok(lg_save_rank_bytes(save, "rng", "abc", 3, err));
    assert_ok(kit_settle(&save, 1, false, err));
    return save;
}

static void each_failing_request_to_the_store_fails_the_save(void **state)
{
    (void)state;
    lg_save *save = three_files();
    lg__plan *plan = NULL;
    assert_ok(lg__plan_make(save, &kit_ids, &plan, err));
    size_t n = 0;
    for (bool done = false; !done; n++) {
        assert_true(n < 1000);
        place p;
        open_place(&p, false);
        faulty f = {.inner = p.store, .left = n};
        lg__buf_init(&f.log, 1 << 20);
        lg_store *store = NULL;
        assert_ok(lg_store_create(&faulty_ops, &f, &store, err));
        lg_error err = LG_ERROR_INIT;
        lg__written w = {.bytes = 77};
        lg_status status = lg__save_write(save, store, FOLDER, plan, &kit_ids, &w, &err);
        assert_int_equal(f.open, 0);
        lg_file *sums = NULL;
        uint64_t bytes;
        lg_error ignored = LG_ERROR_INIT;
        lg_status there = lg__store_open_file(p.store, FOLDER "/rank-00001.sums", &sums, &bytes, &ignored);
        if (there == LG_OK) {
            (void)lg__store_close(p.store, sums, &ignored);
        }
        if (status == LG_OK) {
            assert_int_equal(there, LG_OK);
            done = true;
        } else {
            assert_int_equal(status, LG_ERR_IO);
            assert_int_equal(w.bytes, 77); /* no output of a failure */
            assert_int_equal(there, LG_ERR_NOT_FOUND);
            assert_non_null(strstr(err.message, "on fire"));
            bool named = strstr(err.message, "shard-00001-") != NULL || strstr(err.message, "rank-00001.sums") != NULL;
            assert_true(named);
        }
        lg__buf_free(&f.log);
        lg_store_free(store);
        close_place(&p);
    }
    assert_true(n > 20);
    lg__plan_free(plan);
    lg_save_abort(save);
}

static void everything_is_synced_before_the_sums_file_gets_its_name(void **state)
{
    (void)state;
    for (int no_rename = 0; no_rename < 2; no_rename++) {
        lg_save *save = three_files();
        lg__plan *plan = NULL;
        place p;
        open_place(&p, false);
        faulty f = {.inner = p.store, .left = SIZE_MAX, .no_rename = no_rename};
        lg__buf_init(&f.log, 1 << 20);
        lg_store *store = NULL;
        assert_ok(lg_store_create(&faulty_ops, &f, &store, err));
        write_rank(save, store, &plan);
        const char *last =
            strstr(f.log.data, no_rename ? "create step/rank-00001.sums\n" : "rename_file step/rank-00001.sums.tmp\n");
        assert_non_null(last);
        for (size_t i = 0; i <= plan->n_files; i++) {
            char sync[300], wrote[300];
            const char *name = i < plan->n_files ? plan->files[i].name : "rank-00001.sums.tmp";
            snprintf(sync, sizeof sync, "sync step/%s\n", name);
            snprintf(wrote, sizeof wrote, "write step/%s\n", name);
            const char *synced = strstr(f.log.data, sync);
            assert_non_null(synced);
            assert_true(synced < last);
            for (const char *w = f.log.data; (w = strstr(w, wrote)) != NULL; w++) {
                assert_true(w < synced);
            }
        }
        assert_int_equal(n_files(p.store), 4); /* and no temporary name */
        lg__buf_free(&f.log);
        lg_store_free(store);
        lg__plan_free(plan);
        lg_save_abort(save);
        close_place(&p);
    }
}

static void a_file_that_exists_is_never_written_over(void **state)
{
    (void)state;
    lg_save *save = three_files();
    place p;
    open_place(&p, true);
    lg__plan *plan = NULL;
    write_rank(save, p.store, &plan);
    lg__written w;
    assert_fails(LG_ERR_EXISTS, "shard-00001-model-00001-of-00001.safetensors",
                 lg__save_write(save, p.store, FOLDER, plan, &kit_ids, &w, err));
    lg__plan_free(plan);
    lg_save_abort(save);
    close_place(&p);
}

static void writing_survives_each_failing_allocation(void **state)
{
    (void)state;
    lg_save *save = three_files();
    lg__plan *plan = NULL;
    assert_ok(lg__plan_make(save, &kit_ids, &plan, err));
    size_t n = 0;
    for (lg_status status = LG_ERR_NOMEM; status != LG_OK; n++) {
        assert_true(n < 10000);
        place p;
        open_place(&p, true); /* the memory store allocates what it keeps */
        lg__written w;
        lg_error err = LG_ERROR_INIT;
        lg__mem_fail_after(n);
        status = lg__save_write(save, p.store, FOLDER, plan, &kit_ids, &w, &err);
        lg__mem_fail_after(SIZE_MAX);
        if (status != LG_OK && status != LG_ERR_NOMEM) {
            fail_msg("allocation %zu: %s: %s", n, lg_status_name(status), err.message);
        }
        close_place(&p);
    }
    assert_true(n > 10);
    lg__plan_free(plan);
    lg_save_abort(save);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"K07 F110, F112: staging does not grow with the tensor", staging_does_not_grow_with_the_tensor, NULL, NULL,
         NULL},
        {"K12 F214: memory of any strides is packed while writing", memory_of_any_strides_is_packed_while_writing, NULL,
         NULL, NULL},
        {"K12 F214: gathering equals the naive walk for random memory",
         gathering_equals_the_naive_walk_for_random_memory, NULL, NULL, NULL},
        cmocka_unit_test(a_stride_of_zero_repeats_an_element),
        {"K08: the files of all ranks tile the tensor", the_files_of_all_ranks_tile_the_tensor, NULL, NULL, NULL},
        cmocka_unit_test(data_is_digested_block_by_block_across_buffers),
        {"K12 F211, F212: zero-size tensors and scalars are written", zero_size_tensors_and_scalars_are_written, NULL,
         NULL, NULL},
        cmocka_unit_test(bits_that_are_not_finite_are_found),
        cmocka_unit_test(a_value_that_is_not_finite_is_refused_with_its_place),
        cmocka_unit_test(each_failing_request_to_the_store_fails_the_save),
        cmocka_unit_test(everything_is_synced_before_the_sums_file_gets_its_name),
        {"K05 F083: a file that exists is never written over", a_file_that_exists_is_never_written_over, NULL, NULL,
         NULL},
        cmocka_unit_test(writing_survives_each_failing_allocation),
    };
    return cmocka_run_group_tests_name("write", tests, NULL, NULL);
}
