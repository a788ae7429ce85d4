/* SPDX-License-Identifier: Apache-2.0 */
#include "core/save.h"

#include "base/json.h"
#include "base/mem.h"
#include "format/tagged.h"

#include <stdlib.h>
#include <string.h>

#define STEP_MAX (UINT64_C(1) << 53)

/* Frees a save in any state of construction. */
static void save_free(lg_save *save)
{
    if (save == NULL) {
        return;
    }
    for (size_t i = 0; i < save->n_layouts; i++) {
        lg__layout_unref(save->layouts[i]);
    }
    json_decref(save->state);
    lg__report_free(save->report);
    lg__index_free(&save->by_name);
    lg__index_free(&save->by_layout);
    lg__index_free(&save->by_key);
    lg__index_free(&save->by_file);
    lg__free(save->layouts);
    lg__free(save->tensors);
    lg__free(save->blobs);
    lg__free(save->attached);
    lg__arena_free(save->arena);
    lg__free(save);
}

lg_status lg__save_new(const lg__save_facts *facts, uint64_t step, uint32_t flags, lg_save **out, lg_error *err)
{
    const uint32_t known = LG_SAVE_IF_NEW | LG_SAVE_FINITE | LG_SAVE_ALIASES_ONCE;
    LG__RETURN_IF((flags & ~known) != 0, err, LG_ERR_INVALID, "unknown save flags 0x%x", flags & ~known);
    LG__RETURN_IF(step >= STEP_MAX, err, LG_ERR_LIMIT, "step %llu is not below 2^53", (unsigned long long)step);
    lg_save *save = lg__calloc(1, sizeof *save);
    if (save == NULL) {
        return lg__nomem(err);
    }
    save->arena = lg__arena_new();
    save->state = json_object();
    if (save->arena == NULL || save->state == NULL) {
        save_free(save);
        return lg__nomem(err);
    }
    save->step = step;
    save->flags = flags;
    save->rank = facts->rank;
    save->world = facts->world;
    save->block_bytes = facts->block_bytes;
    save->buffer_bytes = facts->buffer_bytes;
    save->header_limit = LG__ST_SPLIT_HEADER;
    *out = save;
    return LG_OK;
}

lg_status lg_save_begin(lg_session *session, uint64_t step, const lg_save_options *options, lg_save **out,
                        lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(session == NULL || out == NULL, err, LG_ERR_INVALID, "lg_save_begin needs a session and an output");
    LG__RETURN_IF(options != NULL && options->size != sizeof *options, err, LG_ERR_INVALID,
                  "lg_save_options has size %zu, not %zu: set it up with LG_SAVE_OPTIONS_INIT", options->size,
                  sizeof *options);
    lg__save_facts facts = {0};
    LG__TRY(lg__session_save_facts(session, &facts, err));
    lg_save *save = NULL;
    LG__TRY(lg__save_new(&facts, step, options != NULL ? options->flags : 0, &save, err));
    save->session = session;
    *out = save;
    return LG_OK;
}

void lg_save_abort(lg_save *save) { save_free(save); }

lg__tensor_desc lg__save_desc(const lg__save_tensor *t)
{
    return (lg__tensor_desc){.name = t->name,
                             .group = t->group,
                             .dtype = t->dtype,
                             .ndim = t->ndim,
                             .shape = t->shape,
                             .flat_offset = t->flat_offset};
}

/* ----------------------------------------------------------------- layouts */

/* The highest rank of a layout's set. */
static uint64_t highest_rank(const lg_layout *layout)
{
    uint64_t highest = layout->origin;
    if (layout->ranks != NULL) {
        highest = 0;
        for (uint32_t i = 0; i < layout->n_ranks; i++) {
            highest = layout->ranks[i] > highest ? layout->ranks[i] : highest;
        }
        return highest;
    }
    for (uint32_t a = 0; a < layout->mesh_ndim; a++) {
        highest += (uint64_t)(layout->sizes[a] - 1) * layout->strides[a];
    }
    return highest;
}

lg_status lg__save_intern(lg_save *save, lg_layout **layout, lg_error *err)
{
    lg_layout *l = *layout;
    *layout = NULL;
    size_t at;
    if (lg__index_find(&save->by_layout, l->id, sizeof l->id, &at)) {
        lg__layout_unref(l);
        *layout = save->layouts[at];
        return LG_OK;
    }
    lg_status status = LG_OK;
    if (highest_rank(l) >= save->world) {
        status = lg_error_set(err, LG_ERR_INVALID, "its layout has rank %llu, but there are only %u ranks",
                              (unsigned long long)highest_rank(l), save->world);
    } else if (!lg__grow((void **)&save->layouts, &save->cap_layouts, save->n_layouts, sizeof *save->layouts)) {
        status = lg__nomem(err);
    } else {
        status = lg__index_add(&save->by_layout, l->id, sizeof l->id, save->n_layouts, err);
    }
    if (status != LG_OK) {
        lg__layout_unref(l);
        return status;
    }
    save->layouts[save->n_layouts++] = l;
    *layout = l;
    return LG_OK;
}

/* ----------------------------------------------------------------- tensors */

static const char *shape_text(uint32_t ndim, const uint64_t *shape, char *out, size_t bytes)
{
    lg__buf b;
    lg__buf_init(&b, bytes - 1);
    lg__buf_str(&b, "[");
    for (uint32_t d = 0; d < ndim; d++) {
        lg__buf_fmt(&b, "%s%llu", d > 0 ? ", " : "", (unsigned long long)shape[d]);
    }
    lg__buf_str(&b, "]");
    bool whole = !b.failed && b.data != NULL;
    memcpy(out, whole ? b.data : "[…]", whole ? b.len + 1 : sizeof "[…]");
    lg__buf_free(&b);
    return out;
}

/* The bytes between the first and the last element in memory fit an int64_t,
 * so that no later sum of strides overflows. */
static lg_status check_extent(uint32_t ndim, const uint64_t *size, const int64_t *strides, lg_error *err)
{
    uint64_t extent = 0;
    for (uint32_t d = 0; d < ndim; d++) {
        if (size[d] == 0) {
            return LG_OK;
        }
        uint64_t step = strides[d] < 0 ? 0 - (uint64_t)strides[d] : (uint64_t)strides[d];
        uint64_t along;
        bool over = __builtin_mul_overflow(size[d] - 1, step, &along);
        over = over || __builtin_add_overflow(extent, along, &extent) || extent > INT64_MAX / 2;
        LG__RETURN_IF(over, err, LG_ERR_INVALID, "stride %lld of dimension %u leads out of memory",
                      (long long)strides[d], d);
    }
    return LG_OK;
}

static bool is_packed(lg_dtype dtype, uint32_t ndim, const uint64_t *size, const int64_t *strides)
{
    uint64_t want = lg_dtype_bits(dtype) / 8;
    for (uint32_t d = ndim; d-- > 0;) {
        if (size[d] == 0) {
            return true;
        }
        if (size[d] != 1 && strides[d] != (int64_t)want) {
            return false;
        }
        want *= size[d];
    }
    return true;
}

/* Copies strides unless they say no more than "packed". */
static lg_status copy_strides(lg_save *save, lg_dtype dtype, uint32_t ndim, const uint64_t *size,
                              const int64_t *strides, const int64_t **out, lg_error *err)
{
    *out = NULL;
    if (strides == NULL || ndim == 0) {
        return LG_OK;
    }
    LG__RETURN_IF(lg_dtype_bits(dtype) % 8 != 0, err, LG_ERR_UNSUPPORTED,
                  "%s elements are no whole bytes: memory must be packed and strides NULL", lg_dtype_name(dtype));
    LG__TRY(check_extent(ndim, size, strides, err));
    if (is_packed(dtype, ndim, size, strides)) {
        return LG_OK;
    }
    int64_t *copy = lg__arena_array(save->arena, ndim, sizeof *copy);
    if (copy == NULL) {
        return lg__nomem(err);
    }
    memcpy(copy, strides, ndim * sizeof *copy);
    *out = copy;
    return LG_OK;
}

static lg_status copy_shape(lg_save *save, uint32_t ndim, const uint64_t *shape, const uint64_t **out, lg_error *err)
{
    uint64_t *copy = lg__arena_array(save->arena, ndim, sizeof *copy);
    if (copy == NULL) {
        return lg__nomem(err);
    }
    if (ndim > 0) {
        memcpy(copy, shape, ndim * sizeof *copy);
    }
    *out = copy;
    return LG_OK;
}

static lg_status check_local_shape(const lg_tensor *tensor, uint32_t ndim, const uint64_t *want, lg_error *err)
{
    if (tensor->local_shape == NULL) {
        return LG_OK;
    }
    for (uint32_t d = 0; d < ndim; d++) {
        if (tensor->local_shape[d] != want[d]) {
            char given[256], expected[256], global[256];
            return lg_error_set(err, LG_ERR_INVALID,
                                "the local shape is %s, but this rank's part of the global shape %s is %s",
                                shape_text(ndim, tensor->local_shape, given, sizeof given),
                                shape_text(tensor->ndim, tensor->shape, global, sizeof global),
                                shape_text(ndim, want, expected, sizeof expected));
        }
    }
    return LG_OK;
}

static lg_status place_layout(lg_save *save, const lg_tensor *tensor, lg__save_tensor *t, lg_error *err)
{
    t->placement = LG__PLACE_LAYOUT;
    lg__tensor_desc desc = lg__save_desc(t);
    desc.name = NULL; /* no need of it yet; errors get it from the caller */
    LG__TRY(lg__layout_resolve(tensor->layout, &desc, &t->layout, err));
    LG__TRY(lg__save_intern(save, &t->layout, err));
    uint32_t index;
    LG__RETURN_IF(!lg__layout_index_of(t->layout, save->rank, &index), err, LG_ERR_INVALID,
                  "its layout does not contain rank %u, which adds it", save->rank);
    uint64_t local[LG_MAX_NDIM] = {0}, start = 0, elements = 0;
    LG__TRY(lg__layout_local_part(t->layout, &desc, save->rank, local, &start, &elements, err));
    if (t->layout->kind == LG__FLAT) {
        LG__RETURN_IF(tensor->strides != NULL, err, LG_ERR_INVALID, "a flat part is packed: strides must be NULL");
        LG__TRY(check_local_shape(tensor, 1, &elements, err));
    } else {
        LG__RETURN_IF(tensor->flat_offset != 0, err, LG_ERR_INVALID, "flat_offset is for flat layouts only");
        LG__TRY(check_local_shape(tensor, t->ndim, local, err));
        LG__TRY(copy_shape(save, t->ndim, local, &t->local_shape, err));
        LG__TRY(copy_strides(save, t->dtype, t->ndim, local, tensor->strides, &t->strides, err));
        lg__region whole = lg__region_whole(t->ndim, local);
        elements = lg__region_elements(&whole);
    }
    LG__RETURN_IF(tensor->data == NULL && elements > 0, err, LG_ERR_INVALID, "data is NULL, but rank %u has a part",
                  save->rank);
    t->data = tensor->data;
    return LG_OK;
}

static lg_status place_undeclared(lg_save *save, const lg_tensor *tensor, lg__save_tensor *t, uint64_t bytes,
                                  lg_error *err)
{
    t->placement = LG__PLACE_UNDECLARED;
    LG__RETURN_IF(tensor->flat_offset != 0, err, LG_ERR_INVALID, "flat_offset is for flat layouts only");
    LG__TRY(check_local_shape(tensor, t->ndim, t->shape, err));
    LG__TRY(copy_strides(save, t->dtype, t->ndim, t->shape, tensor->strides, &t->strides, err));
    LG__RETURN_IF(tensor->data == NULL && bytes > 0, err, LG_ERR_INVALID, "data is NULL");
    t->local_shape = t->shape;
    t->data = tensor->data;
    return LG_OK;
}

static int by_offset(const void *a, const void *b)
{
    const lg__source_box *x = a, *y = b;
    return lg__region_compare(&x->box, &y->box);
}

static uint64_t sweep_key(const lg__source_box *b, uint32_t dim) { return b->box.offset[dim]; }

static int by_dim(const void *a, const void *b, void *arg)
{
    const lg__source_box *const *x = a, *const *y = b;
    uint32_t dim = *(const uint32_t *)arg;
    uint64_t i = sweep_key(*x, dim), j = sweep_key(*y, dim);
    return i < j ? -1 : i > j;
}

/* Boxes of one rank must not overlap each other. A sweep along the dimension
 * with the most distinct offsets; what overlaps across ranks shows when the
 * reports are merged. */
static lg_status check_disjoint(const lg__source_box *boxes, size_t n, uint32_t ndim, lg_error *err)
{
    if (n < 2) {
        return LG_OK;
    }
    const lg__source_box **order = lg__malloc(n * sizeof *order);
    if (order == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0; i < n; i++) {
        order[i] = &boxes[i];
    }
    uint32_t best = 0;
    size_t most = 0;
    for (uint32_t d = 0; d < ndim; d++) {
        qsort_r(order, n, sizeof *order, by_dim, &d);
        size_t distinct = 1;
        for (size_t i = 1; i < n; i++) {
            distinct += sweep_key(order[i], d) != sweep_key(order[i - 1], d);
        }
        if (distinct > most) {
            most = distinct, best = d;
        }
    }
    qsort_r(order, n, sizeof *order, by_dim, &best);
    lg_status status = LG_OK;
    for (size_t i = 0; i < n && status == LG_OK; i++) {
        const lg__region *a = &order[i]->box;
        uint64_t end = ndim > 0 ? a->offset[best] + a->size[best] : 1;
        for (size_t j = i + 1; j < n && (ndim == 0 || order[j]->box.offset[best] < end); j++) {
            lg__region both;
            if (lg__region_intersect(a, &order[j]->box, &both)) {
                char x[256], y[256];
                status = lg_error_set(err, LG_ERR_INVALID, "boxes %s and %s overlap", lg__region_text(a, x, sizeof x),
                                      lg__region_text(&order[j]->box, y, sizeof y));
                break;
            }
        }
    }
    lg__free(order);
    return status;
}

static lg_status place_boxes(lg_save *save, const lg_tensor *tensor, lg__save_tensor *t, lg_error *err)
{
    t->placement = LG__PLACE_BOXES;
    LG__RETURN_IF(tensor->data != NULL || tensor->strides != NULL || tensor->local_shape != NULL, err, LG_ERR_INVALID,
                  "with boxes, data, strides and local_shape must be NULL");
    LG__RETURN_IF(tensor->flat_offset != 0, err, LG_ERR_INVALID, "flat_offset is for flat layouts only");
    LG__RETURN_IF(tensor->n_boxes > LG__MAX_BOXES, err, LG_ERR_LIMIT, "%zu boxes on one rank; the most are %d",
                  tensor->n_boxes, LG__MAX_BOXES);
    t->boxes = lg__arena_array(save->arena, tensor->n_boxes, sizeof *t->boxes);
    if (t->boxes == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0; i < tensor->n_boxes; i++) {
        const lg_box *from = &tensor->boxes[i];
        LG__RETURN_IF(t->ndim > 0 && (from->offset == NULL || from->size == NULL), err, LG_ERR_INVALID,
                      "box %zu lacks offset or size", i);
        lg__source_box *box = &t->boxes[t->n_boxes];
        box->box.ndim = t->ndim;
        for (uint32_t d = 0; d < t->ndim; d++) {
            box->box.offset[d] = from->offset[d];
            box->box.size[d] = from->size[d];
        }
        char text[256], shape[256];
        LG__RETURN_IF(!lg__region_inside(&box->box, t->ndim, t->shape), err, LG_ERR_INVALID,
                      "box %s is not inside the shape %s", lg__region_text(&box->box, text, sizeof text),
                      shape_text(t->ndim, t->shape, shape, sizeof shape));
        if (lg__region_empty(&box->box)) {
            continue; /* a rank without a part of this tensor may say so */
        }
        LG__RETURN_IF(from->data == NULL, err, LG_ERR_INVALID, "box %s has no data",
                      lg__region_text(&box->box, text, sizeof text));
        uint64_t bytes;
        LG__TRY(lg__shape_bytes(t->dtype, t->ndim, box->box.size, &bytes, err));
        LG__TRY(copy_strides(save, t->dtype, t->ndim, box->box.size, from->strides, &box->strides, err));
        box->data = from->data;
        t->n_boxes++;
    }
    LG__TRY(check_disjoint(t->boxes, t->n_boxes, t->ndim, err));
    qsort(t->boxes, t->n_boxes, sizeof *t->boxes, by_offset);
    return LG_OK;
}

static lg_status describe(lg_save *save, const lg_tensor *tensor, lg__save_tensor *t, lg_error *err)
{
    LG__RETURN_IF(lg_dtype_bits(tensor->dtype) == 0, err, LG_ERR_INVALID, "unknown dtype %d", (int)tensor->dtype);
    LG__RETURN_IF(tensor->group != LG_GROUP_MODEL && tensor->group != LG_GROUP_OPTIM, err, LG_ERR_INVALID,
                  "group %d is neither LG_GROUP_MODEL nor LG_GROUP_OPTIM", (int)tensor->group);
    LG__RETURN_IF(tensor->ndim > LG_MAX_NDIM, err, LG_ERR_LIMIT, "%u dimensions; the most are %d", tensor->ndim,
                  LG_MAX_NDIM);
    LG__RETURN_IF(tensor->ndim > 0 && tensor->shape == NULL, err, LG_ERR_INVALID, "shape is NULL");
    const uint32_t unknown = tensor->flags & ~(uint32_t)(LG_TENSOR_BUFFER | LG_TENSOR_LAZY | LG_TENSOR_KEPT);
    LG__RETURN_IF(unknown != 0, err, LG_ERR_INVALID, "flags 0x%x are not for saving", unknown);
    LG__RETURN_IF((tensor->flags & LG_TENSOR_BUFFER) != 0 && (tensor->flags & LG_TENSOR_LAZY) != 0, err, LG_ERR_INVALID,
                  "a buffer may change in any forward pass: LG_TENSOR_LAZY is not for it");
    LG__RETURN_IF(tensor->layout != NULL && tensor->boxes != NULL, err, LG_ERR_INVALID,
                  "it has both a layout and boxes");
    LG__RETURN_IF(tensor->boxes == NULL && tensor->n_boxes > 0, err, LG_ERR_INVALID, "n_boxes is %zu, but boxes NULL",
                  tensor->n_boxes);
    uint64_t bytes = 0;
    LG__TRY(lg__shape_bytes(tensor->dtype, tensor->ndim, tensor->shape, &bytes, err));
    t->dtype = tensor->dtype;
    t->group = tensor->group;
    t->ndim = tensor->ndim;
    t->flags = tensor->flags;
    t->flat_offset = tensor->flat_offset;
    t->stored = true;
    LG__TRY(copy_shape(save, tensor->ndim, tensor->shape, &t->shape, err));
    if (tensor->layout != NULL) {
        return place_layout(save, tensor, t, err);
    }
    if (tensor->boxes == NULL) {
        return place_undeclared(save, tensor, t, bytes, err);
    }
    LG__TRY(place_boxes(save, tensor, t, err));
    if (bytes == 0) {
        /* Nothing to tile: boxes cannot say which rank writes it. */
        t->placement = LG__PLACE_UNDECLARED;
        t->local_shape = t->shape;
        t->boxes = NULL;
        t->n_boxes = 0;
    }
    return LG_OK;
}

/* Appends an entry under its name, which must be new. */
static lg_status add_entry(lg_save *save, const lg__save_tensor *t, lg_error *err)
{
    LG__RETURN_IF(save->n_tensors >= UINT32_MAX, err, LG_ERR_LIMIT, "too many tensors");
    if (!lg__grow((void **)&save->tensors, &save->cap_tensors, save->n_tensors, sizeof *save->tensors)) {
        return lg__nomem(err);
    }
    LG__TRY(lg__index_add(&save->by_name, t->name, strlen(t->name), save->n_tensors, err));
    save->tensors[save->n_tensors++] = *t;
    return LG_OK;
}

static lg_status new_name(lg_save *save, const char *name, const char **copy, lg_error *err)
{
    LG__RETURN_IF(name == NULL, err, LG_ERR_INVALID, "a tensor needs a name");
    size_t bytes = strlen(name), at;
    LG__TRY(lg__name_check("tensor", name, bytes, err));
    LG__RETURN_IF(lg__index_find(&save->by_name, name, bytes, &at), err, LG_ERR_INVALID,
                  "tensor \"%s\" was added before", name);
    *copy = lg__arena_strndup(save->arena, name, bytes);
    return *copy == NULL ? lg__nomem(err) : LG_OK;
}

static lg_status add_tensor(lg_save *save, const lg_tensor *tensor, lg_error *err)
{
    LG__RETURN_IF(save == NULL || tensor == NULL, err, LG_ERR_INVALID, "lg_save_tensor needs a save and a tensor");
    LG__RETURN_IF(tensor->size != sizeof *tensor, err, LG_ERR_INVALID,
                  "lg_tensor has size %zu, not %zu: set it up with LG_TENSOR_INIT", tensor->size, sizeof *tensor);
    lg__save_tensor t = {.root = SIZE_MAX};
    LG__TRY(new_name(save, tensor->name, &t.name, err));
    if (describe(save, tensor, &t, err) != LG_OK) {
        return lg_error_wrap(err, "tensor \"%s\"", tensor->name);
    }
    return add_entry(save, &t, err);
}

static lg_status add_alias(lg_save *save, const char *alias, const char *name, lg_error *err)
{
    LG__RETURN_IF(save == NULL || name == NULL, err, LG_ERR_INVALID, "lg_save_alias needs a save and two names");
    size_t at;
    LG__RETURN_IF(!lg__index_find(&save->by_name, name, strlen(name), &at), err, LG_ERR_INVALID,
                  "alias \"%s\" of \"%s\": no tensor of that name was added before", alias != NULL ? alias : "", name);
    if (save->tensors[at].alias_of != NULL) {
        at = save->tensors[at].root;
    }
    lg__save_tensor t = save->tensors[at];
    LG__TRY(new_name(save, alias, &t.name, err));
    t.alias_of = save->tensors[at].name;
    t.root = at;
    t.stored = (save->flags & LG_SAVE_ALIASES_ONCE) == 0;
    return add_entry(save, &t, err);
}

/* ------------------------------------------------------------- global state */

/* Takes the reference to `value`; NULL means that memory was out. */
static lg_status put_state(lg_save *save, const char *key, json_t *value, lg_error *err)
{
    if (value == NULL) {
        return lg__nomem(err);
    }
    const json_t *old = json_object_get(save->state, key);
    if (old != NULL) {
        bool same = json_equal(old, value);
        json_decref(value);
        LG__RETURN_IF(!same, err, LG_ERR_CONFLICT, "global state \"%s\" was given two different values on rank %u", key,
                      save->rank);
        return LG_OK;
    }
    if (json_object_set_new(save->state, key, value) != 0) {
        return lg__nomem(err);
    }
    return LG_OK;
}

static lg_status check_key(const lg_save *save, const char *key, lg_error *err)
{
    LG__RETURN_IF(save == NULL, err, LG_ERR_INVALID, "state needs a save");
    LG__RETURN_IF(key == NULL, err, LG_ERR_INVALID, "state needs a key");
    return lg__name_check("key", key, strlen(key), err);
}

static lg_status add_global_u64(lg_save *save, const char *key, uint64_t value, lg_error *err)
{
    LG__TRY(check_key(save, key, err));
    return put_state(save, key, lg__tagged_u64(value), err);
}

static lg_status add_global_i64(lg_save *save, const char *key, int64_t value, lg_error *err)
{
    LG__TRY(check_key(save, key, err));
    return put_state(save, key, lg__tagged_i64(value), err);
}

static lg_status add_global_f64(lg_save *save, const char *key, double value, lg_error *err)
{
    LG__TRY(check_key(save, key, err));
    return put_state(save, key, lg__tagged_f64(value), err);
}

static lg_status add_global_str(lg_save *save, const char *key, const char *value, lg_error *err)
{
    LG__TRY(check_key(save, key, err));
    LG__RETURN_IF(value == NULL, err, LG_ERR_INVALID, "global state \"%s\": the value is NULL", key);
    LG__RETURN_IF(!lg__utf8_valid(value, strlen(value)), err, LG_ERR_INVALID,
                  "global state \"%s\": the value is no valid UTF-8", key);
    return put_state(save, key, json_string(value), err);
}

static lg_status add_global_bytes(lg_save *save, const char *key, const void *data, size_t bytes, lg_error *err)
{
    LG__TRY(check_key(save, key, err));
    LG__RETURN_IF(data == NULL && bytes > 0, err, LG_ERR_INVALID, "global state \"%s\": data is NULL", key);
    return put_state(save, key, lg__tagged_bytes(data, bytes), err);
}

static lg_status add_global_json(lg_save *save, const char *key, const char *json, lg_error *err)
{
    LG__TRY(check_key(save, key, err));
    LG__RETURN_IF(json == NULL, err, LG_ERR_INVALID, "global state \"%s\": the text is NULL", key);
    json_t *value = NULL;
    if (lg__json_parse(json, strlen(json), &value, err) != LG_OK) {
        return lg_error_wrap(err, "global state \"%s\"", key);
    }
    if (lg__tagged_check(value, err) != LG_OK) {
        json_decref(value);
        return lg_error_wrap(err, "global state \"%s\"", key);
    }
    return put_state(save, key, value, err);
}

/* -------------------------------------------------- bytes of a rank, files */

static lg_status copy_bytes(lg_save *save, const void *data, size_t bytes, const void **out, lg_error *err)
{
    void *copy = lg__arena_alloc(save->arena, bytes);
    if (copy == NULL) {
        return lg__nomem(err);
    }
    if (bytes > 0) {
        memcpy(copy, data, bytes);
    }
    *out = copy;
    return LG_OK;
}

static lg_status add_rank_bytes(lg_save *save, const char *key, const void *data, size_t bytes, lg_error *err)
{
    LG__TRY(check_key(save, key, err));
    LG__RETURN_IF(data == NULL && bytes > 0, err, LG_ERR_INVALID, "state of rank %u, \"%s\": data is NULL", save->rank,
                  key);
    size_t n = strlen(key), at;
    LG__RETURN_IF(lg__index_find(&save->by_key, key, n, &at), err, LG_ERR_INVALID,
                  "state of rank %u, \"%s\", was added before", save->rank, key);
    lg__save_blob blob = {.key = lg__arena_strndup(save->arena, key, n), .bytes = bytes};
    if (blob.key == NULL || !lg__grow((void **)&save->blobs, &save->cap_blobs, save->n_blobs, sizeof *save->blobs)) {
        return lg__nomem(err);
    }
    LG__TRY(copy_bytes(save, data, bytes, &blob.data, err));
    LG__TRY(lg__index_add(&save->by_key, blob.key, n, save->n_blobs, err));
    save->blobs[save->n_blobs++] = blob;
    return LG_OK;
}

static lg_status add_attach(lg_save *save, const char *file_name, const void *data, size_t bytes, lg_error *err)
{
    LG__RETURN_IF(save == NULL || file_name == NULL, err, LG_ERR_INVALID, "lg_save_attach needs a save and a name");
    LG__TRY(lg__attach_name_check(file_name, err));
    LG__RETURN_IF(data == NULL && bytes > 0, err, LG_ERR_INVALID, "attached file \"%s\": data is NULL", file_name);
    size_t n = strlen(file_name), at;
    char *folded = lg__arena_strndup(save->arena, file_name, n); /* two names that differ in case are one */
    if (folded == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0; i < n; i++) {
        folded[i] = (char)(folded[i] >= 'A' && folded[i] <= 'Z' ? folded[i] - 'A' + 'a' : folded[i]);
    }
    LG__RETURN_IF(lg__index_find(&save->by_file, folded, n, &at), err, LG_ERR_INVALID,
                  "attached file \"%s\" was added before", file_name);
    lg__save_attach file = {.name = lg__arena_strndup(save->arena, file_name, n), .bytes = bytes};
    if (file.name == NULL ||
        !lg__grow((void **)&save->attached, &save->cap_attached, save->n_attached, sizeof *save->attached)) {
        return lg__nomem(err);
    }
    if (save->rank == 0) { /* only its files count */
        LG__TRY(copy_bytes(save, data, bytes, &file.data, err));
    }
    LG__TRY(lg__index_add(&save->by_file, folded, n, save->n_attached, err));
    if (save->rank == 0) {
        save->attached[save->n_attached++] = file;
    }
    return LG_OK;
}

/* ------------------------------------------------------------ public adders
 *
 * An error is also kept in the save, so that lg_save_commit brings it to all
 * ranks: one rank that gives up alone would leave the others waiting. */

static lg_status note(lg_save *save, lg_status status, const lg_error *err)
{
    if (status != LG_OK && save != NULL && save->failed.status == LG_OK) {
        save->failed = *err;
        save->failed.status = status;
    }
    return status;
}

lg_status lg_save_tensor(lg_save *save, const lg_tensor *tensor, lg_error *err)
{
    LG__ERR(err);
    return note(save, add_tensor(save, tensor, err), err);
}

lg_status lg_save_alias(lg_save *save, const char *alias, const char *name, lg_error *err)
{
    LG__ERR(err);
    return note(save, add_alias(save, alias, name, err), err);
}

lg_status lg_save_global_u64(lg_save *save, const char *key, uint64_t value, lg_error *err)
{
    LG__ERR(err);
    return note(save, add_global_u64(save, key, value, err), err);
}

lg_status lg_save_global_i64(lg_save *save, const char *key, int64_t value, lg_error *err)
{
    LG__ERR(err);
    return note(save, add_global_i64(save, key, value, err), err);
}

lg_status lg_save_global_f64(lg_save *save, const char *key, double value, lg_error *err)
{
    LG__ERR(err);
    return note(save, add_global_f64(save, key, value, err), err);
}

lg_status lg_save_global_str(lg_save *save, const char *key, const char *value, lg_error *err)
{
    LG__ERR(err);
    return note(save, add_global_str(save, key, value, err), err);
}

lg_status lg_save_global_bytes(lg_save *save, const char *key, const void *data, size_t bytes, lg_error *err)
{
    LG__ERR(err);
    return note(save, add_global_bytes(save, key, data, bytes, err), err);
}

lg_status lg_save_global_json(lg_save *save, const char *key, const char *json, lg_error *err)
{
    LG__ERR(err);
    return note(save, add_global_json(save, key, json, err), err);
}

lg_status lg_save_rank_bytes(lg_save *save, const char *key, const void *data, size_t bytes, lg_error *err)
{
    LG__ERR(err);
    return note(save, add_rank_bytes(save, key, data, bytes, err), err);
}

lg_status lg_save_attach(lg_save *save, const char *file_name, const void *data, size_t bytes, lg_error *err)
{
    LG__ERR(err);
    return note(save, add_attach(save, file_name, data, bytes, err), err);
}

lg_status lg_save_fail(lg_save *save, lg_status status, const char *message, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(save == NULL || message == NULL || message[0] == '\0', err, LG_ERR_INVALID,
                  "lg_save_fail needs a save and a message");
    LG__RETURN_IF(status == LG_OK, err, LG_ERR_INVALID, "lg_save_fail: LG_OK is no failure");
    lg_error why = LG_ERROR_INIT;
    lg_error_set(&why, status, "%s", message);
    note(save, status, &why);
    return LG_OK;
}
