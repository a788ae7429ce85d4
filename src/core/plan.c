/* SPDX-License-Identifier: Apache-2.0 */
#include "core/save.h"

#include "base/mem.h"
#include "core/checkpoint.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ----------------------------------------------------------- memory of boxes */

lg_status lg__plan_source(const lg__save_tensor *t, const lg__piece *piece, lg__arena *arena, lg__plan_box *out,
                          lg_error *err)
{
    out->mem_origin = NULL;
    out->mem_size = NULL;
    out->strides = NULL;
    const uint64_t bits = lg_dtype_bits(t->dtype);
    if (t->layout->kind == LG__FLAT) {
        /* Memory is a run of the row-major order, and so is each box. */
        uint64_t at = piece->flat_local * bits;
        LG__RETURN_IF(at % 8 != 0, err, LG_ERR_UNSUPPORTED, "tensor \"%s\": a part begins inside a byte", t->name);
        out->data = (const void *)((uintptr_t)t->data + at / 8);
        return LG_OK;
    }
    if (t->strides != NULL) {
        uintptr_t at = (uintptr_t)t->data;
        for (uint32_t d = 0; d < t->ndim; d++) {
            at += (uintptr_t)((int64_t)piece->local[d] * t->strides[d]);
        }
        out->data = (const void *)at;
        out->strides = t->strides;
        return LG_OK;
    }
    out->data = t->data;
    bool whole = true; /* the box is all of the local part */
    for (uint32_t d = 0; d < t->ndim; d++) {
        whole = whole && piece->local[d] == 0 && out->box.size[d] == t->local_shape[d];
    }
    if (whole) {
        return LG_OK;
    }
    /* The local part, counted so that this box is where it is globally. Its
     * intervals are in ascending order, so local positions are never beyond
     * global ones. */
    uint64_t *origin = lg__arena_array(arena, t->ndim, sizeof *origin);
    if (origin == NULL) {
        return lg__nomem(err);
    }
    for (uint32_t d = 0; d < t->ndim; d++) {
        LG__RETURN_IF(piece->local[d] > out->box.offset[d], err, LG_ERR_INTERNAL,
                      "tensor \"%s\": a local position lies beyond its global one", t->name);
        origin[d] = out->box.offset[d] - piece->local[d];
    }
    out->mem_origin = origin;
    out->mem_size = t->local_shape;
    return LG_OK;
}

lg_status lg__plan_runs(const lg__plan_box *box, lg__run_fn fn, void *arg, lg_error *err)
{
    const lg__region region = lg__extent_region(&box->box);
    if (lg__region_empty(&region)) {
        return LG_OK;
    }
    const lg__run_walk walk = {.dtype = box->dtype,
                               .box = &region,
                               .part = &region,
                               .mem_origin = box->mem_origin != NULL ? box->mem_origin : box->box.offset,
                               .mem_size = box->mem_size != NULL ? box->mem_size : box->box.size,
                               .strides = box->strides};
    return lg__region_runs(&walk, fn, arg, err);
}

/* --------------------------------------------------------------- collecting */

typedef struct bucket { /* the boxes of one number of one group */
    lg__plan_box *boxes;
    size_t n, cap;
    size_t first; /* how many are in the first of its files */
} bucket;

typedef struct draft {
    const lg_save *save;
    const lg__save_ids *ids;
    lg__plan *plan;
    bucket *buckets[LG_GROUP_COUNT]; /* by number */
    size_t n_buckets[LG_GROUP_COUNT], cap_buckets[LG_GROUP_COUNT];
    size_t n_boxes;               /* collected */
    size_t cap_files, n_in_files; /* n_in_files: boxes that headers list */
    lg__st_entry *entries;        /* scratch */
    size_t cap_entries;
} draft;

static void draft_free(draft *d)
{
    for (int g = 0; g < LG_GROUP_COUNT; g++) {
        for (size_t b = 0; b < d->n_buckets[g]; b++) {
            lg__free(d->buckets[g][b].boxes); /* of a plan that failed */
        }
        lg__free(d->buckets[g]);
    }
    lg__free(d->entries);
}

static lg_status keep_extent(draft *d, const lg__region *from, lg__extent *out, lg_error *err)
{
    uint64_t *dims = lg__arena_array(d->plan->arena, 2 * (size_t)from->ndim, sizeof *dims);
    if (dims == NULL) {
        return lg__nomem(err);
    }
    memcpy(dims, from->offset, from->ndim * sizeof *dims);
    memcpy(dims + from->ndim, from->size, from->ndim * sizeof *dims);
    *out = (lg__extent){.ndim = from->ndim, .offset = dims, .size = dims + from->ndim};
    return LG_OK;
}

static lg_status add_box(draft *d, lg_group group, size_t number, const lg__plan_box *box, lg_error *err)
{
    while (d->n_buckets[group] <= number) {
        if (!lg__grow((void **)&d->buckets[group], &d->cap_buckets[group], d->n_buckets[group], sizeof(bucket))) {
            return lg__nomem(err);
        }
        d->buckets[group][d->n_buckets[group]++] = (bucket){0};
    }
    bucket *to = &d->buckets[group][number];
    if (!lg__grow((void **)&to->boxes, &to->cap, to->n, sizeof *to->boxes)) {
        return lg__nomem(err);
    }
    to->boxes[to->n++] = *box;
    d->n_boxes++;
    return LG_OK;
}

static const char *prefixed(lg__arena *arena, const char *prefix, const char *name)
{
    size_t n = strlen(prefix), m = strlen(name);
    char *key = lg__arena_alloc(arena, n + m + 1);
    if (key != NULL) {
        memcpy(key, prefix, n);
        memcpy(key + n, name, m);
    }
    return key;
}

static lg_group group_of(const lg__save_tensor *t)
{
    const bool copies = t->placement != LG__PLACE_BOXES && t->layout != NULL && t->layout->kind == LG__COPIES;
    return lg__file_group(t->group, t->dtype, copies);
}

static uintptr_t distance(const void *from, const void *to) { return (uintptr_t)to - (uintptr_t)from; }

static lg_status add_tensor(draft *d, size_t source, lg_error *err)
{
    const lg__save_tensor *t = &d->save->tensors[source];
    const bool irregular = t->placement == LG__PLACE_BOXES;
    LG__RETURN_IF(!irregular && t->layout == NULL, err, LG_ERR_INTERNAL, "tensor \"%s\" has no layout yet", t->name);
    const lg_group group = group_of(t);
    lg__plan_box box = {.key = t->name,
                        .tensor = t->name,
                        .dtype = t->dtype,
                        .source = source,
                        .finite_check = (d->save->flags & LG_SAVE_FINITE) != 0,
                        .lazy = (t->flags & (LG_TENSOR_LAZY | LG_TENSOR_KEPT)) != 0,
                        .kept = (t->flags & LG_TENSOR_KEPT) != 0};
    if (group == LG_GROUP_RAW && (box.key = prefixed(d->plan->arena, LG__RAW_TENSOR_PREFIX, t->name)) == NULL) {
        return lg__nomem(err);
    }
    if (irregular) {
        for (size_t i = 0; i < t->n_boxes; i++) {
            LG__TRY(keep_extent(d, &t->boxes[i].box, &box.box, err));
            box.data = t->boxes[i].data;
            box.strides = t->boxes[i].strides;
            box.number = i;
            LG__TRY(add_box(d, group, i, &box, err));
        }
        return LG_OK;
    }
    const lg__tensor_desc desc = lg__save_desc(t);
    lg__piece *pieces = NULL;
    size_t n = 0;
    LG__TRY(lg__layout_written(t->layout, &desc, d->save->rank, &pieces, &n, err));
    lg_status status = LG_OK;
    for (size_t i = 0; i < n && status == LG_OK; i++) {
        status = keep_extent(d, &pieces[i].box, &box.box, err);
        if (status == LG_OK) {
            status = lg__plan_source(t, &pieces[i], d->plan->arena, &box, err);
        }
        if (status == LG_OK) {
            box.behind = distance(t->data, box.data);
            status = add_box(d, group, i, &box, err);
        }
    }
    lg__free(pieces);
    return status;
}

static lg_status add_blob(draft *d, size_t i, lg_error *err)
{
    const lg__save_blob *blob = &d->save->blobs[i];
    lg__plan_box box = {.key = prefixed(d->plan->arena, LG__RAW_BYTES_PREFIX, blob->key),
                        .tensor = blob->key,
                        .dtype = LG_U8,
                        .source = d->save->n_tensors + i,
                        .lazy = true,
                        .kept = true, /* the save's own copy */
                        .data = blob->data};
    if (box.key == NULL) {
        return lg__nomem(err);
    }
    const lg__region all = {.ndim = 1, .size = {blob->bytes}};
    LG__TRY(keep_extent(d, &all, &box.box, err));
    return add_box(d, LG_GROUP_RAW, 0, &box, err);
}

/* --------------------------------------------------------------------- files */

/* The header must list exactly the boxes, in their order and back to back:
 * read anew from its bytes, as any reader would. */
static lg_status check_header(const lg__plan_file *file, lg_error *err)
{
    const uint64_t bytes = file->header.len + file->data_bytes;
    lg__st_header *h = NULL;
    uint64_t n = 0;
    size_t first = file->header.len < 64 ? file->header.len : 64;
    LG__TRY(lg__st_header_bytes((const uint8_t *)file->header.data, first, bytes, &n, err));
    LG__TRY(lg__st_parse(file->header.data + 8, n, bytes, &h, err));
    bool same = h->n == file->n_boxes && h->data_start == file->header.len && h->file_bytes == bytes;
    uint64_t at = 0;
    for (size_t i = 0; same && i < h->n; i++) {
        const lg__st_tensor *t = &h->tensors[i];
        if (strcmp(t->name, file->boxes[i].key) != 0) { /* empty ones share a place */
            t = lg__st_find(h, file->boxes[i].key);
        }
        const lg__extent *box = &file->boxes[i].box;
        uint64_t box_bytes = 0;
        same = t != NULL && t->dtype == file->boxes[i].dtype && t->ndim == box->ndim && t->has_offsets &&
               lg__shape_bytes(t->dtype, t->ndim, box->size, &box_bytes, err) == LG_OK && t->begin == at &&
               t->end == at + box_bytes;
        for (uint32_t d = 0; same && d < box->ndim; d++) {
            same = t->shape[d] == box->size[d] && t->saved_offsets[d] == box->offset[d];
        }
        at += box_bytes;
    }
    same = same && at == file->data_bytes;
    lg__st_free(h);
    LG__RETURN_IF(!same, err, LG_ERR_INTERNAL, "the header does not list the boxes of the layouts");
    return LG_OK;
}

/* Puts boxes into the order of their entries. */
static lg_status sort_boxes(lg__plan_box *boxes, const lg__st_entry *entries, size_t n, lg_error *err)
{
    lg__plan_box *sorted = lg__malloc(n * sizeof *sorted);
    if (sorted == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0; i < n; i++) {
        sorted[i] = boxes[entries[i].number];
    }
    memcpy(boxes, sorted, n * sizeof *sorted);
    lg__free(sorted);
    return LG_OK;
}

void lg__plan_meta(const lg_save *save, const lg__save_ids *ids, lg__file_meta *out)
{
    snprintf(out->step, sizeof out->step, "%" PRIu64, save->step);
    snprintf(out->rank, sizeof out->rank, "%u", save->rank);
    out->all[0] = (lg__st_meta){"lastgood.run", ids->run_id};
    out->all[1] = (lg__st_meta){"lastgood.attempt", ids->attempt};
    out->all[2] = (lg__st_meta){"lastgood.step", out->step};
    out->all[3] = (lg__st_meta){"lastgood.rank", out->rank};
}

/* One file of boxes [from, from + n) of a bucket, which it sorts. */
static lg_status make_file(draft *d, lg_group group, lg__plan_box *boxes, size_t n, lg_error *err)
{
    lg__plan *p = d->plan;
    if (!lg__grow((void **)&p->files, &d->cap_files, p->n_files, sizeof *p->files)) {
        return lg__nomem(err);
    }
    while (d->cap_entries < n) {
        if (!lg__grow((void **)&d->entries, &d->cap_entries, d->cap_entries, sizeof *d->entries)) {
            return lg__nomem(err);
        }
    }
    for (size_t i = 0; i < n; i++) {
        const lg__plan_box *b = &boxes[i];
        d->entries[i] = (lg__st_entry){.name = b->key,
                                       .dtype = b->dtype,
                                       .ndim = b->box.ndim,
                                       .shape = b->box.size,
                                       .offset = b->box.offset,
                                       .number = i};
    }
    lg__plan_file *file = &p->files[p->n_files];
    *file = (lg__plan_file){.group = group, .n_boxes = n};
    lg__buf_init(&file->header, (size_t)LG__ST_MAX_HEADER + 8);
    p->n_files++; /* from here on lg__plan_free frees the header */

    lg__file_meta meta;
    lg__plan_meta(d->save, d->ids, &meta);
    LG__TRY(lg__st_plan_renewable(d->entries, n, meta.all, sizeof meta.all / sizeof *meta.all, false, LG__ST_DATA_ALIGN,
                                  &file->header, &file->members, &file->data_bytes, err));
    LG__TRY(lg__buf_check(&file->header, "a file's header", err));
    LG__TRY(sort_boxes(boxes, d->entries, n, err));
    file->boxes = boxes;
    LG__TRY(check_header(file, err));
    d->n_in_files += n;
    uint64_t bytes;
    bool over = __builtin_add_overflow(file->data_bytes, file->header.len, &bytes);
    over = over || __builtin_add_overflow(p->bytes, bytes, &p->bytes);
    LG__RETURN_IF(over, err, LG_ERR_LIMIT, "the files of rank %u are longer than 2^64 bytes", d->save->rank);
    return LG_OK;
}

/* How many boxes from `from` on fit one header; at least one. */
static size_t fitting(const bucket *b, size_t from, uint64_t limit)
{
    uint64_t bytes = 0;
    size_t i = from;
    for (; i < b->n && bytes <= limit; i++) {
        bytes += lg__st_entry_most(strlen(b->boxes[i].key), b->boxes[i].box.ndim);
    }
    if (bytes <= limit) {
        return b->n - from;
    }
    bytes = 0;
    for (i = from; i < b->n; i++) {
        bytes += lg__st_entry_bytes(b->boxes[i].key, b->boxes[i].box.ndim);
        if (bytes > limit && i > from) {
            break;
        }
    }
    return i - from;
}

/* Hands the memory of all boxes over to the plan, whose files point into it. */
static lg_status keep_boxes(draft *d, lg_error *err)
{
    size_t n = 0;
    for (int g = 0; g < LG_GROUP_COUNT; g++) {
        n += d->n_buckets[g];
    }
    d->plan->memory = lg__calloc(n, sizeof *d->plan->memory);
    if (d->plan->memory == NULL) {
        return lg__nomem(err);
    }
    for (int g = 0; g < LG_GROUP_COUNT; g++) {
        for (size_t b = 0; b < d->n_buckets[g]; b++) {
            d->plan->memory[d->plan->n_memory++] = d->buckets[g][b].boxes;
            d->buckets[g][b].boxes = NULL;
        }
    }
    return LG_OK;
}

/* The files of one group: number b holds the b-th boxes; what does not fit
 * their headers goes into further files behind them. */
static lg_status make_group(draft *d, lg_group group, lg_error *err)
{
    const size_t first = d->plan->n_files;
    const uint64_t limit = d->save->header_limit;
    for (size_t b = 0; b < d->n_buckets[group]; b++) {
        bucket *from = &d->buckets[group][b];
        if (from->n == 0) {
            continue; /* room that no box of this rank took */
        }
        from->first = fitting(from, 0, limit);
        LG__TRY(make_file(d, group, from->boxes, from->first, err));
    }
    for (size_t b = 0; b < d->n_buckets[group]; b++) {
        bucket *from = &d->buckets[group][b];
        for (size_t i = from->first, n; i < from->n; i += n) {
            n = fitting(from, i, limit);
            LG__TRY(make_file(d, group, from->boxes + i, n, err));
        }
    }
    const size_t count = d->plan->n_files - first;
    LG__RETURN_IF(count > LG__MAX_BOXES, err, LG_ERR_LIMIT, "%zu files of a group on one rank; the most are %d", count,
                  LG__MAX_BOXES);
    for (size_t i = 0; i < count; i++) {
        lg__plan_file *file = &d->plan->files[first + i];
        file->number = (uint32_t)i;
        lg__shard_file(d->save->rank, group, file->number, (uint32_t)count, file->name);
    }
    return LG_OK;
}

/* Room for the first box of every tensor: growing would copy them all. */
static lg_status reserve_first(draft *d, lg_error *err)
{
    size_t n[LG_GROUP_COUNT] = {0};
    for (size_t i = 0; i < d->save->n_tensors; i++) {
        n[group_of(&d->save->tensors[i])] += d->save->tensors[i].stored;
    }
    for (int g = 0; g < LG_GROUP_COUNT; g++) {
        if (n[g] == 0) {
            continue;
        }
        bucket first = {.cap = n[g]};
        first.boxes = n[g] > SIZE_MAX / sizeof *first.boxes ? NULL : lg__malloc(n[g] * sizeof *first.boxes);
        if (first.boxes == NULL || !lg__grow((void **)&d->buckets[g], &d->cap_buckets[g], 0, sizeof(bucket))) {
            lg__free(first.boxes);
            return lg__nomem(err);
        }
        d->buckets[g][0] = first;
        d->n_buckets[g] = 1;
    }
    return LG_OK;
}

static lg_status make(draft *d, lg_error *err)
{
    const lg_save *save = d->save;
    LG__TRY(reserve_first(d, err));
    for (size_t i = 0; i < save->n_tensors; i++) {
        if (save->tensors[i].stored) {
            LG__TRY(add_tensor(d, i, err));
        }
    }
    for (size_t i = 0; i < save->n_blobs; i++) {
        LG__TRY(add_blob(d, i, err));
    }
    for (int g = 0; g < LG_GROUP_COUNT; g++) {
        LG__TRY(make_group(d, (lg_group)g, err));
    }
    LG__RETURN_IF(d->n_in_files != d->n_boxes, err, LG_ERR_INTERNAL, "%zu boxes, but headers list %zu", d->n_boxes,
                  d->n_in_files);
    return keep_boxes(d, err);
}

lg_status lg__plan_make(const lg_save *save, const lg__save_ids *ids, lg__plan **out, lg_error *err)
{
    draft d = {.save = save, .ids = ids, .plan = lg__calloc(1, sizeof(lg__plan))};
    if (d.plan == NULL) {
        return lg__nomem(err);
    }
    d.plan->arena = lg__arena_new();
    lg_status status = d.plan->arena == NULL ? lg__nomem(err) : make(&d, err);
    draft_free(&d);
    if (status != LG_OK) {
        lg__plan_free(d.plan);
        return status;
    }
    *out = d.plan;
    return LG_OK;
}

void lg__plan_free(lg__plan *p)
{
    if (p == NULL) {
        return;
    }
    for (size_t i = 0; i < p->n_files; i++) {
        lg__buf_free(&p->files[i].header);
    }
    for (size_t i = 0; i < p->n_memory; i++) {
        lg__free(p->memory[i]);
    }
    lg__free(p->memory);
    lg__free(p->files);
    lg__buf_free(&p->description);
    lg__arena_free(p->arena);
    lg__free(p);
}
