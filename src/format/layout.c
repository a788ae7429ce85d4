/* SPDX-License-Identifier: Apache-2.0 */
#include "format/layout.h"

#include "base/error.h"
#include "base/mem.h"
#include "format/layout_parts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define NAME_TEXT 200

/* ---------------------------------------------------------------- rank sets */

uint32_t lg__layout_rank_at(const lg_layout *layout, uint32_t i)
{
    if (layout->ranks != NULL) {
        return layout->ranks[i];
    }
    uint32_t rank = layout->origin;
    for (uint32_t a = layout->mesh_ndim; a-- > 0;) {
        rank += i % layout->sizes[a] * layout->strides[a];
        i /= layout->sizes[a];
    }
    return rank;
}

bool lg__layout_index_of(const lg_layout *layout, uint32_t rank, uint32_t *i)
{
    if (layout->ranks != NULL) {
        uint32_t low = 0, high = layout->n_ranks;
        while (low < high) {
            uint32_t middle = low + (high - low) / 2;
            if (layout->ranks[layout->by_rank[middle]] < rank) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        if (low == layout->n_ranks || layout->ranks[layout->by_rank[low]] != rank) {
            return false;
        }
        *i = layout->by_rank[low];
        return true;
    }
    if (rank < layout->origin) {
        return false;
    }
    /* Strides nest: what is left below one is less than it. */
    uint32_t c[LG_MAX_MESH_NDIM], left = rank - layout->origin;
    for (uint32_t k = 0; k < layout->mesh_ndim; k++) {
        uint32_t a = layout->by_stride[k];
        c[a] = layout->sizes[a] == 1 ? 0 : left / layout->strides[a];
        if (c[a] >= layout->sizes[a]) {
            return false;
        }
        left -= c[a] * layout->strides[a];
    }
    if (left != 0) {
        return false;
    }
    uint32_t index = 0;
    for (uint32_t a = 0; a < layout->mesh_ndim; a++) {
        index = index * layout->sizes[a] + c[a];
    }
    *i = index;
    return true;
}

void lg__layout_coordinates(const lg_layout *layout, uint32_t index, uint32_t c[LG_MAX_MESH_NDIM])
{
    for (uint32_t a = layout->mesh_ndim; a-- > 0;) {
        c[a] = index % layout->sizes[a];
        index /= layout->sizes[a];
    }
}

void lg__layout_index_steps(const lg_layout *layout, uint32_t step[LG_MAX_MESH_NDIM])
{
    uint32_t n = 1;
    for (uint32_t a = layout->mesh_ndim; a-- > 0;) {
        step[a] = n;
        n *= layout->sizes[a];
    }
}

/* Axes by descending stride, those of size 1 last. True when each step is
 * longer than all shorter ones together reach, which makes all ranks distinct
 * and lets index_of find coordinates by division. */
static bool order_strides(uint32_t ndim, const uint32_t *sizes, const uint32_t *strides,
                          uint32_t by_stride[LG_MAX_MESH_NDIM])
{
    for (uint32_t a = 0; a < ndim; a++) {
        uint32_t k = a;
        for (; k > 0; k--) {
            uint32_t b = by_stride[k - 1];
            bool before = sizes[b] == 1 ? sizes[a] != 1 : sizes[a] != 1 && strides[a] > strides[b];
            if (!before) {
                break;
            }
            by_stride[k] = b;
        }
        by_stride[k] = a;
    }
    uint64_t reach = 0;
    for (uint32_t k = ndim; k-- > 0;) {
        uint32_t a = by_stride[k];
        if (sizes[a] > 1) {
            if (strides[a] <= reach) {
                return false;
            }
            reach += (uint64_t)(sizes[a] - 1) * strides[a];
        }
    }
    return true;
}

static int compare_ranks(const void *a, const void *b, void *arg)
{
    const uint32_t *ranks = arg;
    uint32_t x = ranks[*(const uint32_t *)a], y = ranks[*(const uint32_t *)b];
    return x < y ? -1 : x > y;
}

/* Sorts a list of ranks and finds one that is there twice. */
static lg_status sort_ranks(lg_layout *l, lg_error *err)
{
    l->by_rank = lg__malloc(l->n_ranks * sizeof *l->by_rank);
    if (l->by_rank == NULL) {
        return lg__nomem(err);
    }
    for (uint32_t i = 0; i < l->n_ranks; i++) {
        l->by_rank[i] = i;
    }
    qsort_r(l->by_rank, l->n_ranks, sizeof *l->by_rank, compare_ranks, l->ranks);
    for (uint32_t i = 1; i < l->n_ranks; i++) {
        uint32_t rank = l->ranks[l->by_rank[i]];
        LG__RETURN_IF(rank == l->ranks[l->by_rank[i - 1]], err, LG_ERR_INVALID,
                      "rank %" PRIu32 " is twice in a layout's mesh", rank);
    }
    return LG_OK;
}

/* Origin and strides in place of a list that steps regularly. */
static void regular_ranks(lg_layout *l)
{
    uint32_t strides[LG_MAX_MESH_NDIM], step[LG_MAX_MESH_NDIM], by_stride[LG_MAX_MESH_NDIM];
    lg__layout_index_steps(l, step);
    for (uint32_t a = 0; a < l->mesh_ndim; a++) {
        strides[a] = 1;
        if (l->sizes[a] > 1) {
            if (l->ranks[step[a]] <= l->ranks[0]) {
                return;
            }
            strides[a] = l->ranks[step[a]] - l->ranks[0];
        }
    }
    if (!order_strides(l->mesh_ndim, l->sizes, strides, by_stride)) {
        return;
    }
    for (uint32_t i = 1; i < l->n_ranks; i++) {
        uint32_t c[LG_MAX_MESH_NDIM];
        uint64_t rank = l->ranks[0];
        lg__layout_coordinates(l, i, c);
        for (uint32_t a = 0; a < l->mesh_ndim; a++) {
            rank += (uint64_t)c[a] * strides[a];
        }
        if (rank != l->ranks[i]) {
            return;
        }
    }
    l->origin = l->ranks[0];
    memcpy(l->strides, strides, sizeof strides);
    memcpy(l->by_stride, by_stride, sizeof by_stride);
    lg__free(l->ranks);
    lg__free(l->by_rank);
    l->ranks = l->by_rank = NULL;
}

/* -------------------------------------------------------------------- making */

static lg_status check_mesh(const lg_layout_desc *d, uint32_t *n_ranks, lg_error *err)
{
    LG__RETURN_IF(d->mesh_ndim > LG_MAX_MESH_NDIM, err, LG_ERR_LIMIT,
                  "a mesh of %" PRIu32 " axes, at most %d are possible", d->mesh_ndim, LG_MAX_MESH_NDIM);
    LG__RETURN_IF(d->mesh_ndim > 0 && d->mesh_sizes == NULL, err, LG_ERR_INVALID, "a mesh needs mesh_sizes");
    uint64_t n = 1;
    for (uint32_t a = 0; a < d->mesh_ndim; a++) {
        LG__RETURN_IF(d->mesh_sizes[a] == 0, err, LG_ERR_INVALID, "mesh axis %" PRIu32 " has size 0", a);
        n *= d->mesh_sizes[a];
        LG__RETURN_IF(n > LG__LAYOUT_MAX_RANKS, err, LG_ERR_LIMIT, "a mesh of more than %d ranks",
                      LG__LAYOUT_MAX_RANKS);
    }
    *n_ranks = (uint32_t)n;
    return LG_OK;
}

static lg_status set_list(lg_layout *l, const uint32_t *ranks, bool normal, lg_error *err)
{
    for (uint32_t i = 0; i < l->n_ranks; i++) {
        LG__RETURN_IF(ranks[i] >= LG__LAYOUT_MAX_RANKS, err, LG_ERR_LIMIT,
                      "rank %" PRIu32 " of a layout's mesh is not below %d", ranks[i], LG__LAYOUT_MAX_RANKS);
    }
    l->ranks = lg__memdup(ranks, l->n_ranks * sizeof *ranks);
    if (l->ranks == NULL) {
        return lg__nomem(err);
    }
    LG__TRY(sort_ranks(l, err));
    if (normal) {
        regular_ranks(l);
    }
    return LG_OK;
}

static lg_status set_mesh(lg_layout *l, const lg_layout_desc *d, bool normal, lg_error *err)
{
    LG__TRY(check_mesh(d, &l->n_ranks, err));
    l->mesh_ndim = d->mesh_ndim;
    if (d->mesh_ndim > 0) {
        memcpy(l->sizes, d->mesh_sizes, d->mesh_ndim * sizeof *l->sizes);
    }
    if (d->ranks != NULL) {
        return set_list(l, d->ranks, normal, err);
    }
    l->origin = d->mesh_origin;
    uint32_t row_major[LG_MAX_MESH_NDIM];
    lg__layout_index_steps(l, row_major);
    uint64_t last = l->origin;
    for (uint32_t a = 0; a < l->mesh_ndim; a++) {
        l->strides[a] = d->mesh_strides != NULL ? d->mesh_strides[a] : row_major[a];
        if (l->sizes[a] == 1 && normal) {
            l->strides[a] = 1; /* it has no meaning; one text for one layout */
        }
        last += (uint64_t)(l->sizes[a] - 1) * l->strides[a];
    }
    LG__RETURN_IF(last >= LG__LAYOUT_MAX_RANKS, err, LG_ERR_LIMIT,
                  "rank %" PRIu64 " of a layout's mesh is not below %d", last, LG__LAYOUT_MAX_RANKS);
    if (order_strides(l->mesh_ndim, l->sizes, l->strides, l->by_stride)) {
        return LG_OK;
    }
    LG__RETURN_IF(!normal, err, LG_ERR_INVALID, "a mesh whose strides do not nest");
    uint32_t *ranks = lg__malloc(l->n_ranks * sizeof *ranks);
    if (ranks == NULL) {
        return lg__nomem(err);
    }
    for (uint32_t i = 0; i < l->n_ranks; i++) {
        ranks[i] = lg__layout_rank_at(l, i);
    }
    memset(l->strides, 0, sizeof l->strides);
    l->origin = 0;
    l->ranks = ranks;
    return sort_ranks(l, err);
}

static lg_status set_splits(lg_layout *l, const lg_layout_desc *d, lg_error *err)
{
    LG__RETURN_IF(d->n_splits > LG_MAX_SPLITS, err, LG_ERR_LIMIT, "%" PRIu32 " splits, at most %d are possible",
                  d->n_splits, LG_MAX_SPLITS);
    LG__RETURN_IF(d->n_splits > 0 && d->splits == NULL, err, LG_ERR_INVALID, "n_splits without splits");
    uint32_t used = 0, constants = 0;
    uint64_t pieces = 1;
    for (uint32_t s = 0; s < d->n_splits; s++) {
        lg_split split = d->splits[s];
        LG__RETURN_IF(split.dim >= LG_MAX_NDIM, err, LG_ERR_INVALID, "split %" PRIu32 " cuts dimension %" PRIu32, s,
                      split.dim);
        LG__RETURN_IF(split.mode != LG_SPLIT_CEIL && split.mode != LG_SPLIT_EVEN, err, LG_ERR_INVALID,
                      "split %" PRIu32 " has an unknown mode", s);
        if (split.axis == LG_NO_AXIS) {
            LG__RETURN_IF(split.pieces == 0, err, LG_ERR_INVALID, "split %" PRIu32 " makes no pieces", s);
            pieces *= split.pieces;
            LG__RETURN_IF(pieces > LG__LAYOUT_MAX_PIECES, err, LG_ERR_LIMIT,
                          "splits that leave more than %d pieces on a rank", LG__LAYOUT_MAX_PIECES);
            constants += split.pieces > 1;
            LG__RETURN_IF(constants > LG__LAYOUT_MAX_CONSTANTS, err, LG_ERR_LIMIT, "more than %d splits by a constant",
                          LG__LAYOUT_MAX_CONSTANTS);
        } else {
            LG__RETURN_IF(split.axis < 0 || (uint32_t)split.axis >= l->mesh_ndim, err, LG_ERR_INVALID,
                          "split %" PRIu32 " is by mesh axis %" PRId32 " of %" PRIu32, s, split.axis, l->mesh_ndim);
            LG__RETURN_IF(used >> split.axis & 1, err, LG_ERR_INVALID, "mesh axis %" PRId32 " is used by two splits",
                          split.axis);
            used |= 1u << split.axis;
            split.pieces = l->sizes[split.axis];
        }
        l->splits[l->n_splits++] = split;
    }
    return LG_OK;
}

static lg_status set_flat(lg_layout *l, const lg_layout_desc *d, lg_error *err)
{
    LG__RETURN_IF(d->n_splits > 0, err, LG_ERR_INVALID, "a flat layout has no splits");
    LG__RETURN_IF(d->flat_length > INT64_MAX, err, LG_ERR_LIMIT, "a flat buffer of 2^63 elements or more");
    LG__RETURN_IF(d->flat_axis < 0 || (uint32_t)d->flat_axis >= l->mesh_ndim, err, LG_ERR_INVALID,
                  "flat_axis is %" PRId32 ", the mesh has %" PRIu32 " axes", d->flat_axis, l->mesh_ndim);
    l->flat_length = d->flat_length;
    l->flat_axis = d->flat_axis;
    return LG_OK;
}

static lg_status fill(lg_layout *l, const lg_layout_desc *d, bool normal, lg_error *err)
{
    LG__TRY(set_mesh(l, d, normal, err));
    if (l->kind == LG__COPIES) {
        l->holders = l->n_ranks;
        l->writers = 1;
        return LG_OK;
    }
    LG__TRY(l->kind == LG__FLAT ? set_flat(l, d, err) : set_splits(l, d, err));
    l->holders = 1;
    for (uint32_t a = 0, replica = lg__layout_replica_axes(l); a < l->mesh_ndim; a++) {
        if (replica >> a & 1) {
            l->holders *= l->sizes[a];
        }
    }
    LG__RETURN_IF(d->writers > l->holders, err, LG_ERR_INVALID, "%" PRIu32 " writers, but only %" PRIu32 " holder%s",
                  d->writers, l->holders, l->holders == 1 ? "" : "s");
    l->writers = d->writers;
    return LG_OK;
}

lg_status lg__layout_make(lg__layout_kind kind, const lg_layout_desc *d, bool normal, lg_layout **out, lg_error *err)
{
    lg_layout *l = lg__calloc(1, sizeof *l);
    if (l == NULL) {
        return lg__nomem(err);
    }
    l->kind = kind;
    l->references = 1;
    lg_status st = fill(l, d, normal, err);
    if (st != LG_OK) {
        lg__layout_unref(l);
        return st;
    }
    *out = l;
    return LG_OK;
}

lg_status lg_layout_create(const lg_layout_desc *desc, lg_layout **out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(desc == NULL || out == NULL, err, LG_ERR_INVALID, "lg_layout_create needs a description and a place");
    LG__RETURN_IF(desc->size != sizeof *desc, err, LG_ERR_INVALID,
                  "lg_layout_desc was not set up with LG_LAYOUT_DESC_INIT");
    return lg__layout_make(desc->flat_length > 0 ? LG__FLAT : LG__SPLIT, desc, true, out, err);
}

void lg_layout_free(lg_layout *layout) { lg__layout_unref(layout); }

lg_status lg__layout_of_ranks(const uint32_t *ranks, uint32_t n, bool copies, lg_layout **out, lg_error *err)
{
    LG__RETURN_IF(n == 0, err, LG_ERR_INTERNAL, "a layout of no ranks");
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    uint32_t size = n;
    d.mesh_ndim = n > 1;
    d.mesh_sizes = &size;
    d.ranks = ranks;
    d.writers = 1;
    lg_layout *l = NULL;
    LG__TRY(lg__layout_make(copies ? LG__COPIES : LG__SPLIT, &d, true, &l, err));
    lg_status st = lg__layout_seal(l, err);
    if (st != LG_OK) {
        lg__layout_unref(l);
        return st;
    }
    *out = l;
    return LG_OK;
}

lg_layout *lg__layout_ref(const lg_layout *layout)
{
    /* Ranks that are threads may share a layout; everything else in it is read
     * only, or added to without a lock (variants). */
    lg_layout *l = (lg_layout *)(uintptr_t)layout;
    __atomic_add_fetch(&l->references, 1, __ATOMIC_RELAXED);
    return l;
}

void lg__layout_unref(lg_layout *layout)
{
    if (layout == NULL || __atomic_sub_fetch(&layout->references, 1, __ATOMIC_ACQ_REL) != 0) {
        return;
    }
    for (lg_layout *v = layout->variants; v != NULL;) {
        lg_layout *next = v->next_variant;
        lg__layout_unref(v);
        v = next;
    }
    lg__free(layout->ranks);
    lg__free(layout->by_rank);
    lg__free(layout->text);
    lg__free(layout);
}

/* --------------------------------------------------------- writers and levels */

uint32_t lg__layout_replica_axes(const lg_layout *layout)
{
    uint32_t axes = (1u << layout->mesh_ndim) - 1;
    if (layout->kind == LG__FLAT) {
        return axes & ~(1u << layout->flat_axis);
    }
    for (uint32_t s = 0; s < layout->n_splits; s++) {
        if (layout->splits[s].axis != LG_NO_AXIS) {
            axes &= ~(1u << layout->splits[s].axis);
        }
    }
    return axes;
}

uint32_t lg__layout_levels(const lg_layout *layout, uint32_t dim, bool writers, lg__level out[LG__MAX_LEVELS])
{
    uint32_t n = 0;
    for (uint32_t s = 0; s < layout->n_splits; s++) {
        const lg_split *split = &layout->splits[s];
        if (split->dim == dim) {
            out[n++] =
                (lg__level){split->pieces, split->mode, split->axis == LG_NO_AXIS ? LG__BY_CONSTANT : split->axis};
        }
    }
    if (writers && layout->kind == LG__SPLIT && layout->writers > 1 && layout->writer_dim == dim) {
        out[n++] = (lg__level){layout->writers, LG_SPLIT_CEIL, LG__BY_WRITER};
    }
    return n;
}

uint32_t lg__layout_writer_index(const lg_layout *layout, uint32_t name_crc, uint32_t i)
{
    uint64_t holders = layout->holders;
    uint32_t holder = (uint32_t)((name_crc + i * holders / layout->writers) % holders);
    uint32_t replica = lg__layout_replica_axes(layout), step = 1, index = 0;
    for (uint32_t a = layout->mesh_ndim; a-- > 0;) {
        if (replica >> a & 1) {
            index += holder % layout->sizes[a] * step;
            holder /= layout->sizes[a];
        }
        step *= layout->sizes[a];
    }
    return index;
}

bool lg__layout_writer_of(const lg_layout *layout, const char *name, const uint32_t c[LG_MAX_MESH_NDIM], uint32_t *i)
{
    if (layout->holders == 1) {
        *i = 0;
        return true;
    }
    uint64_t holders = layout->holders, writers = layout->writers, holder = 0;
    for (uint32_t a = 0, replica = lg__layout_replica_axes(layout); a < layout->mesh_ndim; a++) {
        if (replica >> a & 1) {
            holder = holder * layout->sizes[a] + c[a];
        }
    }
    uint64_t first = lg__crc32c(0, name, strlen(name)) % holders;
    uint64_t behind = (holder + holders - first) % holders;
    /* The one i with floor(i * holders / writers) == behind, if there is one. */
    uint64_t candidate = (behind * writers + holders - 1) / holders;
    if (candidate >= writers || candidate * holders / writers != behind) {
        return false;
    }
    *i = (uint32_t)candidate;
    return true;
}

/* ------------------------------------------------------- tensors and layouts */

static lg_status wrap_name(const lg__tensor_desc *t, lg_error *err)
{
    if (t->name == NULL) {
        return err->status;
    }
    char name[NAME_TEXT];
    return lg_error_wrap(err, "tensor \"%s\"", lg__printable(t->name, name, sizeof name));
}

static lg_status check_shape(const lg_layout *layout, const lg__tensor_desc *t, uint64_t *elements, lg_error *err)
{
    LG__TRY(lg__shape_elements(t->ndim, t->shape, elements, err));
    for (uint32_t s = 0; s < layout->n_splits; s++) {
        LG__RETURN_IF(layout->splits[s].dim >= t->ndim, err, LG_ERR_INVALID,
                      "the layout cuts dimension %" PRIu32 ", the tensor has %" PRIu32, layout->splits[s].dim, t->ndim);
    }
    if (layout->kind == LG__FLAT) {
        LG__RETURN_IF(t->flat_offset > layout->flat_length || *elements > layout->flat_length - t->flat_offset, err,
                      LG_ERR_INVALID,
                      "%" PRIu64 " elements from %" PRIu64 " do not fit the flat buffer of %" PRIu64 " elements",
                      *elements, t->flat_offset, layout->flat_length);
    } else if (layout->kind == LG__SPLIT && layout->text != NULL && layout->writers > 1) {
        LG__RETURN_IF(layout->writer_dim >= t->ndim, err, LG_ERR_INVALID,
                      "the layout's writers cut dimension %" PRIu32 ", the tensor has %" PRIu32, layout->writer_dim,
                      t->ndim);
    }
    return LG_OK;
}

lg_status lg__layout_check_shape(const lg_layout *layout, const lg__tensor_desc *t, uint64_t *elements, lg_error *err)
{
    return check_shape(layout, t, elements, err) == LG_OK ? LG_OK : wrap_name(t, err);
}

/* Whether all cuts of n elements, and where there is one n itself, are multiples
 * of `grain`. */
static bool cuts_fit(const lg__level *l, uint32_t n_levels, uint64_t n, uint64_t grain)
{
    if (n_levels == 0 || n == 0) {
        return true;
    }
    if (lg__pieces_filled(n, l->pieces, l->mode) == 1) {
        return cuts_fit(l + 1, n_levels - 1, n, grain);
    }
    /* A piece is as long as the first or as the last that is not empty. */
    uint64_t first = lg__piece_of(n, l->pieces, l->mode, 0).size;
    uint64_t last = lg__piece_of(n, l->pieces, l->mode, lg__pieces_filled(n, l->pieces, l->mode) - 1).size;
    if (first % grain != 0 || last % grain != 0) {
        return false;
    }
    return cuts_fit(l + 1, n_levels - 1, first, grain) && (first == last || cuts_fit(l + 1, n_levels - 1, last, grain));
}

/* Whether cutting the row-major elements of a tensor at x leaves bytes whole
 * in all boxes: where x lies inside a row, that row must be whole bytes too. */
static bool flat_cut_fits(const lg__tensor_desc *t, uint64_t bits, uint64_t x)
{
    uint64_t inner = bits;
    for (uint32_t d = t->ndim; d-- > 0;) {
        uint64_t row = inner * t->shape[d];
        if (x % t->shape[d] != 0) {
            return x % t->shape[d] * inner % 8 == 0 && (d == 0 || row % 8 == 0);
        }
        x /= t->shape[d];
        inner = row;
    }
    return true;
}

static bool flat_cuts_fit(const lg_layout *layout, const lg__tensor_desc *t, uint64_t bits, uint64_t elements)
{
    uint64_t parts = layout->sizes[layout->flat_axis], end = t->flat_offset + elements;
    uint64_t p = lg__piece_at(layout->flat_length, parts, LG_SPLIT_CEIL, t->flat_offset);
    for (; p < parts; p++) {
        lg__range part = lg__piece_of(layout->flat_length, parts, LG_SPLIT_CEIL, p);
        if (part.size == 0 || part.begin >= end) {
            break;
        }
        uint64_t from = part.begin > t->flat_offset ? part.begin - t->flat_offset : 0;
        uint64_t to = part.begin + part.size < end ? part.begin + part.size - t->flat_offset : elements;
        uint64_t writers = layout->text != NULL ? layout->writers : 1;
        uint64_t filled = lg__pieces_filled(to - from, writers, LG_SPLIT_CEIL);
        for (uint64_t i = 0; i < filled; i++) {
            if (!flat_cut_fits(t, bits, from + lg__piece_of(to - from, writers, LG_SPLIT_CEIL, i).begin)) {
                return false;
            }
        }
    }
    return true;
}

/* Sub-byte dtypes: no box may begin or end inside a byte. */
static lg_status check_bytes(const lg_layout *layout, const lg__tensor_desc *t, uint64_t elements, lg_error *err)
{
    uint64_t bits = lg_dtype_bits(t->dtype), unit = bits;
    if (bits % 8 == 0 || elements == 0 || layout->kind == LG__COPIES) {
        return LG_OK;
    }
    if (layout->kind == LG__FLAT) {
        LG__RETURN_IF(!flat_cuts_fit(layout, t, bits, elements), err, LG_ERR_INVALID,
                      "the flat layout would cut inside a byte of dtype %s", lg_dtype_name(t->dtype));
        return LG_OK;
    }
    /* The innermost dimension that is really cut is so in all boxes alike;
     * those inside of it are whole, and runs end at its cuts. */
    for (uint32_t d = t->ndim; d-- > 0;) {
        lg__level levels[LG__MAX_LEVELS];
        uint32_t n = lg__layout_levels(layout, d, layout->text != NULL, levels);
        bool cut = false;
        for (uint32_t i = 0; i < n; i++) {
            cut |= t->shape[d] > 1 && levels[i].pieces > 1;
        }
        if (cut) {
            uint64_t grain = 8 / ((unit & -unit) < 8 ? unit & -unit : 8);
            LG__RETURN_IF(!cuts_fit(levels, n, t->shape[d], grain), err, LG_ERR_INVALID,
                          "the layout would cut inside a byte of dtype %s in dimension %" PRIu32,
                          lg_dtype_name(t->dtype), d);
            return LG_OK;
        }
        unit *= t->shape[d];
    }
    return LG_OK;
}

static lg_status check_tensor(const lg_layout *layout, const lg__tensor_desc *t, lg_error *err)
{
    uint64_t bytes = 0, elements = 0;
    LG__TRY(lg__shape_bytes(t->dtype, t->ndim, t->shape, &bytes, err));
    LG__TRY(check_shape(layout, t, &elements, err));
    return check_bytes(layout, t, elements, err);
}

lg_status lg__layout_check_tensor(const lg_layout *layout, const lg__tensor_desc *t, lg_error *err)
{
    return check_tensor(layout, t, err) == LG_OK ? LG_OK : wrap_name(t, err);
}

/* ------------------------------------------------------------------ resolving */

static uint32_t choose_writers(const lg_layout *layout, const lg__tensor_desc *t, uint64_t bytes)
{
    if (t->ndim == 0 || lg_dtype_bits(t->dtype) % 8 != 0) {
        return 1;
    }
    if (layout->writers != 0) {
        return layout->writers;
    }
    uint64_t parts = layout->n_ranks / layout->holders;
    uint64_t writers = (bytes / parts + (bytes % parts != 0)) / LG__WRITER_MIN_BYTES;
    return writers < 1 ? 1 : writers > layout->holders ? layout->holders : (uint32_t)writers;
}

static lg_status make_variant(const lg_layout *layout, uint32_t writers, uint32_t dim, lg_layout **out, lg_error *err)
{
    lg_layout *v = lg__calloc(1, sizeof *v);
    if (v == NULL) {
        return lg__nomem(err);
    }
    memcpy(v, layout, offsetof(lg_layout, references));
    v->writers = writers;
    v->writer_dim = dim;
    v->references = 1;
    v->ranks = v->by_rank = NULL;
    lg_status st = LG_OK;
    if (layout->ranks != NULL) {
        v->ranks = lg__memdup(layout->ranks, v->n_ranks * sizeof *v->ranks);
        v->by_rank = lg__memdup(layout->by_rank, v->n_ranks * sizeof *v->by_rank);
        st = v->ranks == NULL || v->by_rank == NULL ? lg__nomem(err) : LG_OK;
    }
    if (st == LG_OK) {
        st = lg__layout_seal(v, err);
    }
    if (st != LG_OK) {
        lg__layout_unref(v);
        return st;
    }
    *out = v;
    return LG_OK;
}

static lg_status resolve(const lg_layout *layout, const lg__tensor_desc *t, lg_layout **out, lg_error *err)
{
    LG__TRY(check_tensor(layout, t, err));
    if (layout->text != NULL) {
        *out = lg__layout_ref(layout);
        return LG_OK;
    }
    uint64_t bytes = 0;
    LG__TRY(lg__shape_bytes(t->dtype, t->ndim, t->shape, &bytes, err));
    uint32_t writers = choose_writers(layout, t, bytes), dim = 0;
    for (uint32_t d = 1; layout->kind == LG__SPLIT && writers > 1 && d < t->ndim; d++) {
        dim = t->shape[d] > t->shape[dim] ? d : dim;
    }
    /* Thousands of tensors share few variants: make each only once. */
    lg_layout **list = &((lg_layout *)(uintptr_t)layout)->variants;
    lg_layout *head = __atomic_load_n(list, __ATOMIC_ACQUIRE);
    lg_layout *v = head;
    while (v != NULL && (v->writers != writers || v->writer_dim != dim)) {
        v = v->next_variant;
    }
    if (v == NULL) {
        LG__TRY(make_variant(layout, writers, dim, &v, err));
        v->next_variant = head;
        while (!__atomic_compare_exchange_n(list, &v->next_variant, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            /* Another thread was first; twice the same one does no harm. */
        }
    }
    *out = lg__layout_ref(v);
    return LG_OK;
}

lg_status lg__layout_resolve(const lg_layout *layout, const lg__tensor_desc *t, lg_layout **out, lg_error *err)
{
    return resolve(layout, t, out, err) == LG_OK ? LG_OK : wrap_name(t, err);
}
