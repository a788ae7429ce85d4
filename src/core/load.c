/* SPDX-License-Identifier: Apache-2.0 */
#include "core/checkpoint.h"

#include <stdlib.h>
#include <string.h>

lg_status lg_load_begin(lg_checkpoint *checkpoint, uint32_t flags, lg_load **out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(checkpoint == NULL || out == NULL, err, LG_ERR_INVALID,
                  "lg_load_begin needs a checkpoint and a result");
    LG__RETURN_IF((flags & ~(uint32_t)LG_LOAD_UNVERIFIED) != 0, err, LG_ERR_INVALID, "unknown load flags 0x%x", flags);
    lg_load *load = lg__calloc(1, sizeof *load);
    lg__arena *arena = lg__arena_new();
    if (load == NULL || arena == NULL) {
        lg__free(load);
        lg__arena_free(arena);
        return lg__nomem(err);
    }
    load->c = checkpoint;
    load->flags = flags;
    load->arena = arena;
    *out = load;
    return LG_OK;
}

lg_checkpoint *lg_load_checkpoint(lg_load *load) { return load == NULL ? NULL : load->c; }

void lg_load_again(lg_load *load)
{
    if (load != NULL) {
        load->again = true;
    }
}

uint32_t lg_load_round(const lg_load *load) { return load == NULL ? 0 : load->round; }

void lg_load_free(lg_load *load)
{
    if (load == NULL) {
        return;
    }
    for (size_t i = 0; i < load->n_missing; i++) {
        lg__free(load->missing[i]);
    }
    lg__free(load->missing);
    lg__free(load->parts);
    lg__free(load->wanted);
    lg__arena_free(load->arena);
    lg__free(load);
}

/* ------------------------------------------------------------------ targets */

static lg_status note_missing(lg_load *load, const char *name, lg_error *err)
{
    char *copy = lg__strdup(name);
    if (copy == NULL ||
        !lg__grow((void **)&load->missing, &load->cap_missing, load->n_missing, sizeof *load->missing)) {
        lg__free(copy);
        return lg__nomem(err);
    }
    load->missing[load->n_missing++] = copy;
    return LG_OK;
}

/* "F32 [2, 3]" */
static const char *form_text(lg_dtype dtype, uint32_t ndim, const uint64_t *shape, lg__buf *b)
{
    lg__buf_fmt(b, "%s [", lg_dtype_name(dtype));
    for (uint32_t d = 0; d < ndim; d++) {
        lg__buf_fmt(b, "%s%llu", d > 0 ? ", " : "", (unsigned long long)shape[d]);
    }
    lg__buf_str(b, "]");
    return b->data != NULL ? b->data : "?";
}

static lg_status check_form(const lg_target *target, const lg__manifest_tensor *t, lg_error *err)
{
    bool same = target->dtype == t->dtype && target->ndim == t->ndim;
    for (uint32_t d = 0; same && d < t->ndim; d++) {
        same = target->shape[d] == t->shape[d];
    }
    if (same) {
        return LG_OK;
    }
    lg__buf wanted, stored;
    lg__buf_init(&wanted, 1024);
    lg__buf_init(&stored, 1024);
    lg_error_set(err, LG_ERR_MISMATCH, "the target is %s, the checkpoint has %s",
                 form_text(target->dtype, target->ndim, target->shape, &wanted),
                 form_text(t->dtype, t->ndim, t->shape, &stored));
    lg__buf_free(&wanted);
    lg__buf_free(&stored);
    return LG_ERR_MISMATCH;
}

/* Zero-length arrays stay valid pointers. */
static const uint64_t *keep_dims(lg_load *load, const uint64_t *dims, uint32_t ndim)
{
    uint64_t *copy = lg__arena_array(load->arena, (size_t)ndim + 1, sizeof *copy);
    if (copy != NULL && ndim > 0) {
        memcpy(copy, dims, ndim * sizeof *copy);
    }
    return copy;
}

static lg_status add_part(lg_load *load, size_t wanted, const lg__region *region, char *data,
                          const uint64_t *mem_origin, const uint64_t *mem_size, const int64_t *strides, lg_error *err)
{
    if (lg__region_empty(region)) {
        return LG_OK;
    }
    LG__RETURN_IF(data == NULL, err, LG_ERR_INVALID, "the target has no memory");
    if (!lg__grow((void **)&load->parts, &load->cap_parts, load->n_parts, sizeof *load->parts)) {
        return lg__nomem(err);
    }
    lg__part part = {.wanted = wanted,
                     .offset = keep_dims(load, region->offset, region->ndim),
                     .size = keep_dims(load, region->size, region->ndim),
                     .data = data,
                     .mem_origin = keep_dims(load, mem_origin, region->ndim),
                     .mem_size = keep_dims(load, mem_size, region->ndim),
                     .strides = strides};
    if (part.offset == NULL || part.size == NULL || part.mem_origin == NULL || part.mem_size == NULL) {
        return lg__nomem(err);
    }
    load->parts[load->n_parts++] = part;
    load->wanted[wanted].elements += lg__region_elements(region);
    return LG_OK;
}

/* The part that a layout gives a rank, laid out as for saving. */
static lg_status add_layout(lg_load *load, size_t wanted, const lg_target *target, const lg__manifest_tensor *t,
                            const int64_t *strides, lg_error *err)
{
    const lg_layout *layout = target->layout;
    uint32_t index;
    LG__RETURN_IF(target->offset != NULL || target->extent != NULL, err, LG_ERR_INVALID,
                  "give a region or a layout, not both");
    LG__RETURN_IF(!lg__layout_index_of(layout, target->rank, &index), err, LG_ERR_INVALID,
                  "the layout has no part for rank %u", target->rank);
    lg__tensor_desc desc = lg__manifest_desc(t);
    desc.flat_offset = target->flat_offset;
    bool flat = layout->kind == LG__FLAT;
    LG__RETURN_IF(flat && strides != NULL, err, LG_ERR_INVALID, "flat targets are packed: strides must be NULL");
    uint64_t local_shape[LG_MAX_NDIM] = {0}, start, elements;
    LG__TRY(lg__layout_local_part(layout, &desc, target->rank, local_shape, &start, &elements, err));
    lg__piece *pieces = NULL;
    size_t n = 0;
    LG__TRY(lg__layout_held(layout, &desc, target->rank, &pieces, &n, err));
    lg_status status = LG_OK;
    unsigned bits = lg_dtype_bits(t->dtype);
    for (size_t i = 0; i < n && status == LG_OK; i++) {
        const lg__piece *p = &pieces[i];
        if (flat) {
            uint64_t at_bits = p->flat_local * bits;
            if (at_bits % 8 != 0) {
                status = lg_error_set(err, LG_ERR_UNSUPPORTED, "the layout cuts inside a byte");
                break;
            }
            char *data = target->data == NULL ? NULL : (char *)target->data + at_bits / 8;
            status = add_part(load, wanted, &p->box, data, p->box.offset, p->box.size, NULL, err);
        } else {
            /* Intervals are concatenated in order, so a piece never lies
             * further back in local memory than globally. */
            uint64_t origin[LG_MAX_NDIM];
            for (uint32_t d = 0; d < t->ndim; d++) {
                origin[d] = p->box.offset[d] - p->local[d];
            }
            status = add_part(load, wanted, &p->box, target->data, origin, local_shape, strides, err);
        }
    }
    lg__free(pieces);
    return status;
}

static lg_status add_target(lg_load *load, const lg_target *target, const lg__manifest_tensor *t, lg_error *err)
{
    LG__TRY(check_form(target, t, err));
    if (!lg__grow((void **)&load->wanted, &load->cap_wanted, load->n_wanted, sizeof *load->wanted)) {
        return lg__nomem(err);
    }
    size_t w = load->n_wanted;
    load->wanted[w] = (lg__wanted){.name = t->name, .stored = lg__checkpoint_stored(load->c, t), .copy_of = UINT32_MAX};
    const lg__manifest_tensor *stored = load->wanted[w].stored;
    if ((target->flags & LG_TENSOR_COPY_OF_RANK) != 0 && lg__manifest_is_copies(load->c->m, stored)) {
        uint32_t index;
        LG__RETURN_IF(!lg__layout_index_of(load->c->m->layouts[stored->layout], target->rank, &index), err,
                      LG_ERR_MISSING, "rank %u kept no copy of it", target->rank);
        load->wanted[w].copy_of = target->rank;
    }
    const int64_t *strides = NULL;
    if (target->strides != NULL && t->ndim > 0) {
        int64_t *copy = lg__arena_array(load->arena, t->ndim, sizeof *copy);
        if (copy == NULL) {
            return lg__nomem(err);
        }
        memcpy(copy, target->strides, t->ndim * sizeof *copy);
        strides = copy;
    }
    if (target->layout != NULL) {
        LG__TRY(add_layout(load, w, target, t, strides, err));
    } else {
        lg__region region;
        LG__TRY(lg__checkpoint_region(t, target->offset, target->extent, &region, err));
        LG__TRY(add_part(load, w, &region, target->data, region.offset, region.size, strides, err));
    }
    unsigned bits = lg_dtype_bits(t->dtype);
    lg__wanted *wanted = &load->wanted[w];
    /* The tensor's bytes fit 63 bits, so no part of it overflows here. */
    uint64_t rest_bits = wanted->elements % 8 * bits;
    LG__RETURN_IF(rest_bits % 8 != 0, err, LG_ERR_UNSUPPORTED, "the region of %llu elements does not fill whole bytes",
                  (unsigned long long)wanted->elements);
    wanted->bytes = wanted->elements / 8 * bits + rest_bits / 8;
    load->n_wanted++;
    return LG_OK;
}

lg_status lg_load_tensor(lg_load *load, const lg_target *target, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(load == NULL || target == NULL, err, LG_ERR_INVALID, "lg_load_tensor needs a load and a target");
    LG__RETURN_IF(target->size != sizeof *target, err, LG_ERR_INVALID,
                  "lg_target.size is %zu, not %zu: begin with LG_TARGET_INIT", target->size, sizeof *target);
    LG__RETURN_IF(target->name == NULL, err, LG_ERR_INVALID, "a target has no name");
    char shown[300]; /* for messages */
    LG__RETURN_IF(target->ndim > LG_MAX_NDIM || (target->ndim > 0 && target->shape == NULL), err, LG_ERR_INVALID,
                  "\"%s\": a target needs its shape, of at most %d dimensions",
                  lg__printable(target->name, shown, sizeof shown), LG_MAX_NDIM);
    LG__RETURN_IF((target->flags & ~(uint32_t)(LG_TENSOR_OPTIONAL | LG_TENSOR_BUFFER | LG_TENSOR_COPY_OF_RANK)) != 0,
                  err, LG_ERR_INVALID, "\"%s\": unknown target flags 0x%x",
                  lg__printable(target->name, shown, sizeof shown), target->flags);
    const lg__manifest_tensor *t = lg__manifest_find(load->c->m, target->name);
    if (t == NULL) {
        return target->flags & LG_TENSOR_OPTIONAL ? note_missing(load, target->name, err)
                                                  : lg__checkpoint_missing(load->c, target->name, err);
    }
    /* Whose part it is, where that matters. */
    lg_target own = *target;
    bool by_rank = target->layout != NULL || (target->flags & LG_TENSOR_COPY_OF_RANK) != 0;
    if (by_rank && target->rank == LG_RANK_SELF) {
        LG__RETURN_IF(load->world == 0, err, LG_ERR_INVALID,
                      "\"%s\": a target with a layout must say whose part it is (lg_target.rank): this load belongs to "
                      "no session",
                      lg__printable(target->name, shown, sizeof shown));
        own.rank = load->rank;
    }
    size_t n_parts = load->n_parts;
    lg_status status = add_target(load, &own, t, err);
    if (status != LG_OK) {
        load->n_parts = n_parts;
        return lg_error_wrap(err, "\"%s\"", lg__printable(target->name, shown, sizeof shown));
    }
    return LG_OK;
}

/* --------------------------------------------------------------------- run */

void lg__load_reset(lg_load *load)
{
    for (size_t i = 0; i < load->n_wanted; i++) {
        load->wanted[i].planned = 0;
        load->wanted[i].done = 0;
    }
}

lg_status lg__load_check(lg_load *load, lg_error *err)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < load->n_wanted; i++) {
        const lg__wanted *w = &load->wanted[i];
        char shown[300];
        LG__RETURN_IF(w->planned != w->elements || w->done != w->bytes, err, LG_ERR_COVERAGE,
                      "%s: \"%s\": stored boxes gave %llu of %llu elements and %llu of %llu bytes", load->c->folder,
                      lg__printable(w->name, shown, sizeof shown), (unsigned long long)w->planned,
                      (unsigned long long)w->elements, (unsigned long long)w->done, (unsigned long long)w->bytes);
        bytes += w->bytes;
    }
    load->bytes_loaded = load->bytes_before + bytes;
    load->tensors_loaded = load->tensors_before + load->n_wanted;
    return LG_OK;
}

void lg__load_next(lg_load *load)
{
    load->bytes_before = load->bytes_loaded;
    load->tensors_before = load->tensors_loaded;
    load->n_parts = load->n_wanted = 0;
    load->round++;
}

lg_status lg_load_run(lg_load *load, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(load == NULL, err, LG_ERR_INVALID, "lg_load_run needs a load");
    lg__load_reset(load);
    LG__TRY(lg__load_parts(load, err));
    return lg__load_check(load, err);
}
