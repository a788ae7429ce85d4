/* SPDX-License-Identifier: Apache-2.0 */

/* A training run saves the same tensors again and again. What a plan is made of
 * is therefore written down, byte for byte, beside the plan: its description.
 * A later save whose description is the same gets the plan back with its own
 * addresses and its own metadata in the headers; any other one is planned anew.
 * So there is nothing to invalidate: what is not the same is not used. */

#include "base/hash.h"
#include "base/mem.h"
#include "core/save.h"

#include <string.h>

/* ------------------------------------------------------------- descriptions
 *
 * Every number that decides how long something is comes before it, so that two
 * descriptions are equal only if their parts are. */

static void tell(lg__buf *b, const void *data, size_t n, size_t bytes)
{
    if (data != NULL && n > 0) {
        lg__buf_add(b, data, n * bytes);
    }
}

static void tell_box(lg__buf *b, const lg__source_box *box)
{
    const uint64_t head[] = {box->box.ndim, box->strides != NULL};
    lg__buf_add(b, head, sizeof head);
    tell(b, box->box.offset, box->box.ndim, sizeof *box->box.offset);
    tell(b, box->box.size, box->box.ndim, sizeof *box->box.size);
    tell(b, box->strides, box->box.ndim, sizeof *box->strides);
}

static void tell_tensor(lg__buf *b, const lg__save_tensor *t)
{
    const size_t name_bytes = strlen(t->name);
    const uint64_t head[] = {
        name_bytes,
        (uint64_t)t->group,
        (uint64_t)t->dtype,
        t->ndim,
        t->flags,
        t->flat_offset,
        (uint64_t)t->placement,
        t->stored,
        t->layout != NULL,
        t->strides != NULL,
        t->local_shape != NULL,
        t->n_boxes,
        t->alias_of != NULL ? t->root : SIZE_MAX,
    };
    lg__buf_add(b, head, sizeof head);
    lg__buf_add(b, t->name, name_bytes);
    tell(b, t->shape, t->ndim, sizeof *t->shape);
    tell(b, t->local_shape, t->ndim, sizeof *t->local_shape);
    tell(b, t->strides, t->ndim, sizeof *t->strides);
    if (t->layout != NULL) {
        lg__buf_add(b, t->layout->id, sizeof t->layout->id);
    }
    for (size_t i = 0; i < t->n_boxes; i++) {
        tell_box(b, &t->boxes[i]);
    }
}

static void tell_head(lg__buf *b, const lg_save *save)
{
    const uint64_t head[] = {save->rank, save->world, save->flags, save->header_limit, save->n_tensors, save->n_blobs};
    lg__buf_add(b, head, sizeof head);
}

static void tell_blob(lg__buf *b, const lg__save_blob *blob)
{
    const uint64_t head[] = {strlen(blob->key), blob->bytes};
    lg__buf_add(b, head, sizeof head);
    lg__buf_add(b, blob->key, strlen(blob->key));
}

/* Item i of a description: the head, each tensor, each of the per-rank bytes. */
static void tell_item(lg__buf *b, const lg_save *save, size_t i)
{
    if (i == 0) {
        tell_head(b, save);
    } else if (i <= save->n_tensors) {
        tell_tensor(b, &save->tensors[i - 1]);
    } else {
        tell_blob(b, &save->blobs[i - 1 - save->n_tensors]);
    }
}

static size_t n_items(const lg_save *save) { return 1 + save->n_tensors + save->n_blobs; }

static bool is_described(const lg_save *save, const lg__buf *description)
{
    lg__buf item;
    lg__buf_init(&item, SIZE_MAX / 2);
    size_t at = 0;
    bool same = true;
    for (size_t i = 0; same && i < n_items(save); i++) {
        item.len = 0;
        tell_item(&item, save, i);
        same = !item.failed && item.len <= description->len - at &&
               memcmp(item.data, description->data + at, item.len) == 0;
        at += item.len;
    }
    lg__buf_free(&item);
    return same && at == description->len;
}

/* ------------------------------------------------------------------ headers */

/* What a header says in every save. */
static uint32_t fixed_crc(const lg__plan_file *f)
{
    const size_t behind = f->members.at + f->members.bytes;
    const char *text = f->header.data;
    const uint32_t crc = lg__crc32c(0, text + 8, f->members.at - 8);
    return lg__crc32c(crc, text + behind, lg__st_text_end(&f->header) - behind);
}

/* Headers that stayed in the trainer's memory between saves, and are not read
 * back from their bytes again, are at least what they were. */
static bool is_intact(const lg__plan *p)
{
    for (size_t i = 0; i < p->n_files; i++) {
        if (fixed_crc(&p->files[i]) != p->files[i].fixed_crc) {
            return false;
        }
    }
    return true;
}

static lg_status renew_headers(lg__plan *p, const lg_save *save, const lg__save_ids *ids, lg_error *err)
{
    lg__file_meta meta;
    lg__plan_meta(save, ids, &meta);
    p->bytes = 0;
    for (size_t i = 0; i < p->n_files; i++) {
        lg__plan_file *f = &p->files[i];
        LG__TRY(lg__st_renew(&f->header, &f->members, meta.all, sizeof meta.all / sizeof *meta.all, LG__ST_DATA_ALIGN,
                             err));
        uint64_t bytes;
        bool over = __builtin_add_overflow(f->data_bytes, f->header.len, &bytes);
        over = over || __builtin_add_overflow(p->bytes, bytes, &p->bytes);
        LG__RETURN_IF(over, err, LG_ERR_LIMIT, "the files of rank %u are longer than 2^64 bytes", save->rank);
    }
    return LG_OK;
}

/* ------------------------------------------------------------------- memory */

/* Everything of a box that points into the save. */
static void bind(lg__plan_box *b, lg_group file_group, const lg_save *save)
{
    if (b->source >= save->n_tensors) {
        const lg__save_blob *blob = &save->blobs[b->source - save->n_tensors];
        b->tensor = blob->key;
        b->data = blob->data;
        return;
    }
    const lg__save_tensor *t = &save->tensors[b->source];
    b->tensor = t->name;
    if (file_group != LG_GROUP_RAW) { /* else with a prefix, in the plan's own memory */
        b->key = t->name;
    }
    if (t->placement == LG__PLACE_BOXES) {
        b->data = t->boxes[b->number].data;
        b->strides = t->boxes[b->number].strides;
        return;
    }
    b->data = (const void *)((uintptr_t)t->data + b->behind);
    b->strides = b->strides != NULL ? t->strides : NULL;
    b->mem_size = b->mem_size != NULL ? t->local_shape : NULL;
}

static void bind_all(lg__plan *p, const lg_save *save)
{
    for (size_t f = 0; f < p->n_files; f++) {
        for (size_t i = 0; i < p->files[f].n_boxes; i++) {
            bind(&p->files[f].boxes[i], p->files[f].group, save);
        }
    }
}

/* ------------------------------------------------------------ get and keep */

lg_status lg__plan_get(lg__plan **kept, const lg_save *save, const lg__save_ids *ids, lg__plan **out, lg_error *err)
{
    lg__plan *p = *kept;
    *kept = NULL;
    if (p == NULL || !is_described(save, &p->description) || !is_intact(p)) {
        lg__plan_free(p);
        return lg__plan_make(save, ids, out, err);
    }
    bind_all(p, save);
    lg_status status = renew_headers(p, save, ids, err);
    if (status != LG_OK) {
        lg__plan_free(p);
        return status;
    }
    *out = p;
    return LG_OK;
}

/* What a plan takes, but for its description: boxes above all. */
static size_t size_of(const lg__plan *p, const lg_save *save)
{
    size_t bytes = save->n_tensors * sizeof *p->tensors;
    for (size_t i = 0; i < p->n_files; i++) {
        const lg__plan_file *f = &p->files[i];
        bytes += f->n_boxes * sizeof *f->boxes + f->header.cap;
        for (size_t k = 0; k < f->n_boxes; k++) {
            bytes += 2 * f->boxes[k].box.ndim * sizeof(uint64_t);
        }
    }
    return bytes;
}

static bool describe(lg__plan *p, const lg_save *save)
{
    const size_t used = size_of(p, save);
    if (used > LG__PLAN_KEPT_MAX) {
        return false;
    }
    lg__buf_init(&p->description, LG__PLAN_KEPT_MAX - used);
    for (size_t i = 0; i < n_items(save); i++) {
        tell_item(&p->description, save, i);
    }
    for (size_t i = 0; i < p->n_files; i++) {
        p->files[i].fixed_crc = fixed_crc(&p->files[i]);
    }
    return !p->description.failed;
}

void lg__plan_keep(lg__plan **kept, lg__plan *plan, const lg_save *save)
{
    if (plan == NULL) {
        return;
    }
    lg__plan_free(*kept);
    *kept = NULL;
    if (plan->changed || (plan->description.data == NULL && !describe(plan, save))) {
        lg__plan_free(plan);
        return;
    }
    *kept = plan;
}
