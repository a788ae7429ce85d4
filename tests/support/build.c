/* SPDX-License-Identifier: Apache-2.0 */
#include "support/build.h"

#include "base/json.h"
#include "core/checkpoint.h"
#include "format/names.h"
#include "format/sums.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DIE(...)                      \
    do {                              \
        fprintf(stderr, __VA_ARGS__); \
        fputc('\n', stderr);          \
        abort();                      \
    } while (0)

#define MUST(expr)                                    \
    do {                                              \
        if ((expr) != LG_OK) {                        \
            DIE("build: %s: %s", #expr, err.message); \
        }                                             \
    } while (0)

static void *need(void *p)
{
    if (p == NULL) {
        DIE("build: out of memory");
    }
    return p;
}

uint64_t build_random(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15)); /* splitmix64 */
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* --------------------------------------------------------------------- naive */

static uint64_t elements_of(uint32_t ndim, const uint64_t *shape)
{
    uint64_t n = 1;
    for (uint32_t d = 0; d < ndim; d++) {
        n *= shape[d];
    }
    return n;
}

size_t build_bytes(lg_dtype dtype, uint32_t ndim, const uint64_t *shape)
{
    return (size_t)(elements_of(ndim, shape) * lg_dtype_bits(dtype) / 8);
}

void build_extract(lg_dtype dtype, uint32_t ndim, const uint64_t *shape, const void *data, const lg__region *r,
                   void *out)
{
    uint64_t n = elements_of(ndim, r->size), bits = lg_dtype_bits(dtype);
    const uint8_t *from = data;
    uint8_t *to = out;
    memset(out, 0, (size_t)(n * bits / 8));
    for (uint64_t i = 0; i < n; i++) {
        uint64_t rest = i, at = 0, step = 1;
        for (uint32_t d = ndim; d-- > 0;) {
            at += (rest % r->size[d] + r->offset[d]) * step;
            rest /= r->size[d];
            step *= shape[d];
        }
        for (uint64_t b = 0; b < bits; b++) {
            uint64_t s = at * bits + b, t = i * bits + b;
            if (from[s / 8] >> (s % 8) & 1) {
                to[t / 8] = (uint8_t)(to[t / 8] | 1u << (t % 8));
            }
        }
    }
}

/* --------------------------------------------------------------------- files */

static void path_of(char path[2 * LG__NAME_MAX], const char *folder, const char *file)
{
    if (!lg__path_join(path, 2 * LG__NAME_MAX, folder, file)) {
        DIE("build: path too long");
    }
}

char *build_read(lg_store *store, const char *folder, const char *file, size_t *bytes)
{
    lg_error err = LG_ERROR_INIT;
    char path[2 * LG__NAME_MAX];
    path_of(path, folder, file);
    lg__buf b;
    lg__buf_init(&b, (size_t)1 << 30);
    MUST(lg__store_read_all(store, path, &b, &err));
    *bytes = b.len;
    return b.data != NULL ? lg__buf_take(&b) : need(malloc(1));
}

void build_write(lg_store *store, const char *folder, const char *file, const void *data, size_t bytes)
{
    lg_error err = LG_ERROR_INIT;
    char path[2 * LG__NAME_MAX];
    path_of(path, folder, file);
    MUST(lg__store_remove_file(store, path, &err));
    lg_file *f = NULL;
    MUST(lg__store_create(store, path, bytes, &f, &err));
    if (bytes > 0) {
        MUST(lg__store_write(store, f, data, bytes, 0, &err));
    }
    MUST(lg__store_close(store, f, &err));
}

lg_layout *build_layout(uint32_t n0, uint32_t n1, uint32_t n_splits, const lg_split *splits, uint32_t writers)
{
    lg_error err = LG_ERROR_INIT;
    uint32_t sizes[2] = {n0, n1};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = n1 > 0 ? 2 : 1;
    d.mesh_sizes = sizes;
    d.n_splits = n_splits;
    d.splits = splits;
    d.writers = writers;
    lg_layout *layout = NULL;
    MUST(lg_layout_create(&d, &layout, &err));
    return layout;
}

lg_layout *build_flat(uint32_t n, uint64_t length, uint32_t writers)
{
    lg_error err = LG_ERROR_INIT;
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1;
    d.mesh_sizes = &n;
    d.flat_length = length;
    d.writers = writers;
    lg_layout *layout = NULL;
    MUST(lg_layout_create(&d, &layout, &err));
    return layout;
}

/* ----------------------------------------------------------------- one rank */

typedef struct builder {
    const build_spec *spec;
    lg_store *store;
    const char *folder;
    lg__manifest *m;
} builder;

typedef struct box_list {
    build_box *all;
    size_t n;
} box_list;

static build_box *add_box(box_list *list)
{
    list->all = need(realloc(list->all, (list->n + 3) * sizeof *list->all)); /* room for two more */
    build_box *b = &list->all[list->n++];
    memset(b, 0, sizeof *b);
    return b;
}

static void add_tensor_boxes(const builder *b, uint32_t rank, const build_tensor *t, const lg__manifest_tensor *mt,
                             box_list lists[LG_GROUP_COUNT])
{
    lg_error err = LG_ERROR_INIT;
    if (t->alias_of != NULL && t->alias_once) {
        return;
    }
    lg__tensor_desc desc = lg__manifest_desc(mt);
    lg__piece *pieces = NULL;
    size_t n = 0;
    if (mt->layout != LG__IRREGULAR) {
        MUST(lg__layout_written(b->m->layouts[mt->layout], &desc, rank, &pieces, &n, &err));
    } else {
        pieces = need(lg__calloc(mt->n_pieces, sizeof *pieces));
        for (size_t i = 0; i < mt->n_pieces; i++) {
            if (mt->pieces[i].rank == rank) {
                pieces[n++].box = mt->pieces[i].box;
            }
        }
    }
    lg_group group = lg__file_group(t->group, t->dtype, t->copies);
    for (size_t i = 0; i < n; i++) {
        build_box *box = add_box(&lists[group]);
        snprintf(box->key, sizeof box->key, "%s%s", group == LG_GROUP_RAW ? LG__RAW_TENSOR_PREFIX : "", t->name);
        box->tensor = t->name;
        box->dtype = t->dtype;
        box->box = pieces[i].box;
        box->number = (uint32_t)i + b->spec->shift;
        box->bytes = build_bytes(t->dtype, t->ndim, pieces[i].box.size);
        box->data = need(malloc(box->bytes + 1));
        const char *whole = t->data;
        if (t->copies) {
            whole += rank * build_bytes(t->dtype, t->ndim, t->shape);
        }
        if (b->spec->raw_copy) {
            memcpy(box->data, whole, box->bytes);
        } else {
            build_extract(t->dtype, t->ndim, t->shape, whole, &pieces[i].box, box->data);
        }
    }
    lg__free(pieces);
}

/* What every table and report needs to know of a file. */
typedef struct built_file {
    lg_group group;
    uint32_t number;
    uint64_t bytes, header_bytes;
} built_file;

static int by_number(const void *a, const void *b)
{
    const build_box *x = a, *y = b;
    return x->number < y->number ? -1 : x->number > y->number;
}

static void write_shard(const builder *b, uint32_t rank, lg_group group, uint32_t number, uint32_t count,
                        build_box *boxes, size_t n, lg__buf *tables, built_file *out)
{
    lg_error err = LG_ERROR_INIT;
    if (b->spec->edit != NULL) {
        b->spec->edit(rank, group, number, boxes, &n, b->spec->arg);
    }
    lg__st_entry *entries = need(calloc(n + 1, sizeof *entries));
    for (size_t i = 0; i < n; i++) {
        entries[i] = (lg__st_entry){
            boxes[i].key, boxes[i].dtype, boxes[i].box.ndim, boxes[i].box.size, boxes[i].box.offset, 0, 0};
    }
    lg__buf file;
    lg__buf_init(&file, (size_t)1 << 30);
    uint64_t data_bytes = 0;
    lg__st_meta meta = {"lastgood.step", "1"};
    bool plain = n > 0 && boxes[0].plain;
    MUST(lg__st_plan(entries, n, &meta, 1, plain, LG__ST_DATA_ALIGN, &file, &data_bytes, &err));
    out->group = group;
    out->number = number;
    out->header_bytes = file.len;
    for (size_t i = 0; i < n; i++) {
        const build_box *box = NULL;
        for (size_t k = 0; k < n; k++) {
            box = strcmp(boxes[k].key, entries[i].name) == 0 ? &boxes[k] : box;
        }
        lg__buf_add(&file, box->data, box->bytes);
    }
    MUST(lg__buf_check(&file, "file", &err));
    out->bytes = file.len;
    char name[LG__NAME_MAX];
    lg__shard_file(rank, group, number, count, name);
    build_write(b->store, b->folder, name, file.data, file.len);

    lg__table table = {.file_bytes = file.len, .header_bytes = out->header_bytes};
    table.header_crc = lg__crc32c(0, file.data, (size_t)out->header_bytes);
    uint64_t block = b->spec->block_bytes, data = file.len - out->header_bytes;
    table.n_blocks = lg__block_count(data, block);
    table.block_crc = need(calloc(table.n_blocks + 1, sizeof *table.block_crc));
    for (uint64_t i = 0; i < table.n_blocks; i++) {
        uint64_t size = data - i * block < block ? data - i * block : block;
        table.block_crc[i] = lg__crc32c(0, file.data + out->header_bytes + i * block, (size_t)size);
    }
    lg__table_encode(&table, tables);
    free(table.block_crc);
    free(entries);
    lg__buf_free(&file);
}

static void write_sums(const builder *b, uint32_t rank, const lg__buf *tables, const built_file *files, size_t n,
                       lg__rank_row *row)
{
    lg_error err = LG_ERROR_INIT;
    lg__report *r = NULL;
    MUST(lg__report_new(&r, &err));
    memcpy(r->run_id, b->m->run_id, sizeof r->run_id);
    memcpy(r->attempt, b->m->attempt, sizeof r->attempt);
    r->generation = b->m->generation;
    r->step = b->m->step;
    r->rank = rank;
    r->world = b->m->world;
    r->domain = "here";
    r->files = lg__arena_array(r->arena, n, sizeof *r->files);
    r->n_files = n;
    const char *at = tables->data;
    for (size_t i = 0; i < n; i++) {
        r->files[i].group = files[i].group;
        r->files[i].number = files[i].number;
        r->files[i].bytes = files[i].bytes;
        r->files[i].header_bytes = files[i].header_bytes;
        size_t bytes = (size_t)lg__table_bytes(files[i].bytes - files[i].header_bytes, b->spec->block_bytes);
        MUST(lg__sha256_of(at, bytes, r->files[i].table, &err));
        at += bytes;
    }
    if (r->state == NULL) {
        r->state = need(json_object());
    }
    lg__buf text, sums;
    lg__buf_init(&text, LG__REPORT_MAX);
    lg__buf_init(&sums, LG__REPORT_MAX);
    MUST(lg__report_encode(r, &text, &err));
    lg__sums_head head = {(uint32_t)b->spec->block_bytes, (uint32_t)n, LG__SUMS_HEAD_BYTES + tables->len, text.len};
    lg__sums_head_encode(&head, &sums);
    lg__buf_add(&sums, tables->data != NULL ? tables->data : "", tables->len);
    lg__buf_add(&sums, text.data, text.len);
    MUST(lg__buf_check(&sums, "sums", &err));
    char name[LG__NAME_MAX];
    lg__sums_file(rank, name);
    build_write(b->store, b->folder, name, sums.data, sums.len);
    row->sums_bytes = sums.len;
    row->domain = "here";
    MUST(lg__sha256_of(text.data, text.len, row->report, &err));
    lg__buf_free(&sums);
    lg__buf_free(&text);
    lg__report_free(r);
}

static void write_rank(const builder *b, uint32_t rank)
{
    const build_spec *spec = b->spec;
    box_list lists[LG_GROUP_COUNT] = {0};
    for (size_t i = 0; i < spec->n_tensors; i++) {
        add_tensor_boxes(b, rank, &spec->tensors[i], lg__manifest_find(b->m, spec->tensors[i].name), lists);
    }
    for (size_t i = 0; i < spec->n_blobs; i++) {
        if (spec->blobs[i].rank == rank) {
            build_box *box = add_box(&lists[LG_GROUP_RAW]);
            snprintf(box->key, sizeof box->key, LG__RAW_BYTES_PREFIX "%s", spec->blobs[i].key);
            box->dtype = LG_U8;
            box->box.ndim = 1;
            box->box.size[0] = spec->blobs[i].bytes;
            box->bytes = spec->blobs[i].bytes;
            box->data = need(malloc(box->bytes + 1));
            memcpy(box->data, spec->blobs[i].data, box->bytes);
        }
    }
    lg__buf tables;
    lg__buf_init(&tables, (size_t)1 << 30);
    built_file *files = NULL;
    size_t n_files = 0;
    lg__rank_row *row = &b->m->ranks[rank];
    for (int g = 0; g < LG_GROUP_COUNT; g++) {
        box_list *list = &lists[g];
        if (list->n == 0) {
            continue;
        }
        qsort(list->all, list->n, sizeof *list->all, by_number);
        /* Shifted boxes leave the first files to be filled by something. */
        uint32_t count = list->all[list->n - 1].number + 1, used = 0;
        uint64_t *sizes = need(lg__arena_array(b->m->arena, count, sizeof *sizes));
        for (size_t i = 0; i < list->n;) {
            size_t end = i;
            while (end < list->n && list->all[end].number == list->all[i].number) {
                end++;
            }
            used++;
            i = end;
        }
        if (used != count && spec->shift == 0) {
            DIE("build: rank %u has no box for some file", rank);
        }
        files = need(realloc(files, (n_files + count) * sizeof *files));
        size_t i = 0;
        for (uint32_t number = 0; number < count; number++) {
            size_t end = i;
            while (end < list->n && list->all[end].number == number) {
                end++;
            }
            build_box filler[3] = {{.key = "b:filler", .dtype = LG_U8, .data = (char *)"x", .bytes = 1}};
            filler[0].box.ndim = 1;
            filler[0].box.size[0] = 1;
            build_box *boxes = end > i ? list->all + i : filler;
            /* The edit may add entries behind these: give it room of its own. */
            size_t n = end > i ? end - i : 1;
            build_box *own = need(calloc(n + 3, sizeof *own));
            memcpy(own, boxes, n * sizeof *own);
            write_shard(b, rank, (lg_group)g, number, count, own, n, &tables, &files[n_files]);
            free(own);
            sizes[number] = files[n_files].bytes;
            n_files++;
            i = end;
        }
        row->n_files[g] = count;
        row->file_bytes[g] = sizes;
    }
    write_sums(b, rank, &tables, files, n_files, row);
    for (int g = 0; g < LG_GROUP_COUNT; g++) {
        for (size_t i = 0; i < lists[g].n; i++) {
            free(lists[g].all[i].data);
        }
        free(lists[g].all);
    }
    free(files);
    lg__buf_free(&tables);
}

/* ------------------------------------------------------------- the manifest */

static size_t add_layout(lg__manifest *m, lg_layout *layout)
{
    for (size_t i = 0; i < m->n_layouts; i++) {
        if (memcmp(m->layouts[i]->id, layout->id, sizeof layout->id) == 0) {
            lg__layout_unref(layout);
            return i;
        }
    }
    m->layouts[m->n_layouts] = layout;
    return m->n_layouts++;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const lg__manifest_tensor *)a)->name, ((const lg__manifest_tensor *)b)->name);
}

static void describe_tensor(builder *b, const build_tensor *t, lg__manifest_tensor *out)
{
    lg_error err = LG_ERROR_INIT;
    lg__manifest *m = b->m;
    uint64_t *shape = need(lg__arena_array(m->arena, t->ndim + 1, sizeof *shape));
    memcpy(shape, t->shape, t->ndim * sizeof *shape);
    out->name = need(lg__arena_strdup(m->arena, t->name));
    out->group = t->group;
    out->dtype = t->dtype;
    out->ndim = t->ndim;
    out->shape = shape;
    out->flat_offset = t->flat_offset;
    out->alias_of = t->alias_of == NULL ? NULL : need(lg__arena_strdup(m->arena, t->alias_of));
    out->stored = t->alias_of == NULL || !t->alias_once;
    if (t->pieces != NULL) {
        lg__stored_piece *pieces = need(lg__arena_array(m->arena, t->n_pieces, sizeof *pieces));
        memcpy(pieces, t->pieces, t->n_pieces * sizeof *pieces);
        out->layout = LG__IRREGULAR;
        out->pieces = pieces;
        out->n_pieces = t->n_pieces;
        return;
    }
    lg_layout *resolved = NULL;
    if (t->layout == NULL) {
        uint32_t *ranks = need(calloc(b->spec->world, sizeof *ranks));
        for (uint32_t r = 0; r < b->spec->world; r++) {
            ranks[r] = r;
        }
        MUST(lg__layout_of_ranks(ranks, t->copies ? b->spec->world : 1, t->copies, &resolved, &err));
        free(ranks);
    } else {
        lg__tensor_desc desc = {t->name, t->group, t->dtype, t->ndim, shape, t->flat_offset};
        MUST(lg__layout_resolve(t->layout, &desc, &resolved, &err));
    }
    out->layout = add_layout(m, resolved);
}

void build_checkpoint(lg_store *store, const build_spec *spec, char folder[LG__NAME_MAX])
{
    lg_error err = LG_ERROR_INIT;
    lg__step_folder(spec->step, spec->generation, folder);
    MUST(lg__store_make_dir(store, folder, &err));
    builder b = {.spec = spec, .store = store, .folder = folder};
    MUST(lg__manifest_new(&b.m, &err));
    lg__manifest *m = b.m;
    m->major = LG__FORMAT_MAJOR;
    m->minor = LG__FORMAT_MINOR;
    memcpy(m->run_id, "00112233445566778899aabbccddeeff", 33);
    m->generation = spec->generation;
    memcpy(m->attempt, spec->attempt != NULL ? spec->attempt : "0123456789abcdef", LG__ATTEMPT_HEX + 1);
    m->step = spec->step;
    memcpy(m->created, "2026-11-29T18:31:57Z", sizeof m->created);
    m->world = spec->world;
    m->block_bytes = spec->block_bytes;
    m->ranks = need(lg__arena_array(m->arena, spec->world, sizeof *m->ranks));
    m->layouts = need(lg__arena_array(m->arena, spec->n_tensors + 1, sizeof(lg_layout *)));
    m->tensors = need(lg__arena_array(m->arena, spec->n_tensors + 1, sizeof *m->tensors));
    for (size_t i = 0; i < spec->n_tensors; i++) {
        describe_tensor(&b, &spec->tensors[i], &m->tensors[m->n_tensors++]);
    }
    qsort(m->tensors, m->n_tensors, sizeof *m->tensors, by_name);
    for (uint32_t r = 0; r < spec->world; r++) {
        write_rank(&b, r);
    }
    m->attached = need(lg__arena_array(m->arena, spec->n_attached + 1, sizeof *m->attached));
    for (size_t i = 0; i < spec->n_attached; i++) {
        const char *text = spec->attached[i].text;
        build_write(store, folder, spec->attached[i].name, text, strlen(text));
        m->attached[i].name = spec->attached[i].name;
        m->attached[i].bytes = strlen(text);
        MUST(lg__sha256_of(text, strlen(text), m->attached[i].sha256, &err));
        m->n_attached++;
    }
    if (m->state != NULL) {
        json_decref(m->state);
    }
    const char *state = spec->state != NULL ? spec->state : "{}";
    MUST(lg__json_parse(state, strlen(state), &m->state, &err));
    lg__buf text;
    lg__buf_init(&text, LG__MANIFEST_MAX);
    MUST(lg__manifest_encode(m, &text, &err));
    build_write(store, folder, LG__MANIFEST, text.data, text.len);
    lg__buf_free(&text);
    lg__manifest_free(m);
}
