/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/mem.h"
#include "format/layout.h"
#include "format/layout_parts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Splits of different dimensions never meet: a mesh axis is used once. So a
 * rank's boxes are the product of its intervals of each dimension, and where
 * stored boxes touch a region is found dimension by dimension as well. */

/* ------------------------------------------------ the intervals of one rank */

typedef struct interval {
    uint64_t begin, size;
    uint64_t local; /* in the rank's local tensor */
} interval;

#define FEW 32
typedef struct intervals {
    interval few[FEW];
    interval *all; /* few, or memory of its own */
    size_t n, cap;
} intervals;

static bool add_interval(intervals *list, interval v)
{
    if (list->n == list->cap) {
        interval *more = lg__malloc(2 * list->cap * sizeof *more);
        if (more == NULL) {
            return false;
        }
        memcpy(more, list->all, list->n * sizeof *more);
        if (list->all != list->few) {
            lg__free(list->all);
        }
        list->all = more;
        list->cap *= 2;
    }
    list->all[list->n++] = v;
    return true;
}

static void free_intervals(intervals *list)
{
    if (list->all != list->few) {
        lg__free(list->all);
    }
}

typedef struct interval_walk {
    intervals *list;
    const uint32_t *c; /* the rank's coordinates */
    uint32_t writer;   /* which writer it is */
    uint64_t local;    /* elements of the dimension held so far */
} interval_walk;

static bool walk_intervals(interval_walk *w, const lg__level *l, uint32_t n_levels, uint64_t begin, uint64_t size)
{
    if (size == 0) {
        return true;
    }
    if (n_levels == 0 || l->by == LG__BY_WRITER) {
        lg__range mine = {0, size};
        if (n_levels > 0) {
            mine = lg__piece_of(size, l->pieces, l->mode, w->writer);
        }
        uint64_t local = w->local + mine.begin;
        w->local += size;
        return mine.size == 0 || add_interval(w->list, (interval){begin + mine.begin, mine.size, local});
    }
    if (l->by != LG__BY_CONSTANT) {
        lg__range mine = lg__piece_of(size, l->pieces, l->mode, w->c[l->by]);
        return walk_intervals(w, l + 1, n_levels - 1, begin + mine.begin, mine.size);
    }
    uint64_t filled = lg__pieces_filled(size, l->pieces, l->mode);
    for (uint64_t i = 0; i < filled; i++) {
        lg__range one = lg__piece_of(size, l->pieces, l->mode, i);
        if (!walk_intervals(w, l + 1, n_levels - 1, begin + one.begin, one.size)) {
            return false;
        }
    }
    return true;
}

/* The intervals of all dimensions, one dimension after the other; those of
 * dimension d begin at first[d]. *local_size[d] is how much is held of it. */
static bool rank_intervals(const lg_layout *layout, const lg__tensor_desc *t, const uint32_t *c, bool writers,
                           uint32_t writer, intervals *list, size_t first[LG_MAX_NDIM + 1],
                           uint64_t local_size[LG_MAX_NDIM])
{
    list->all = list->few;
    list->n = 0;
    list->cap = FEW;
    for (uint32_t d = 0; d < t->ndim; d++) {
        lg__level levels[LG__MAX_LEVELS];
        uint32_t n = lg__layout_levels(layout, d, writers, levels);
        interval_walk w = {.list = list, .c = c, .writer = writer};
        first[d] = list->n;
        if (!walk_intervals(&w, levels, n, 0, t->shape[d])) {
            return false;
        }
        local_size[d] = w.local;
    }
    first[t->ndim] = list->n;
    return true;
}

/* -------------------------------------------------------- the boxes of a rank */

static lg_status one_piece(const lg__tensor_desc *t, lg__piece **out, size_t *n, lg_error *err)
{
    lg__piece *p = lg__calloc(1, sizeof *p);
    if (p == NULL) {
        return lg__nomem(err);
    }
    p->box = lg__region_whole(t->ndim, t->shape);
    *out = p;
    *n = 1;
    return LG_OK;
}

static lg_status no_piece(lg__piece **out, size_t *n)
{
    *out = NULL;
    *n = 0;
    return LG_OK;
}

static lg_status split_pieces(const lg_layout *layout, const lg__tensor_desc *t, const uint32_t *c, bool writers,
                              uint32_t writer, lg__piece **out, size_t *n, lg_error *err)
{
    intervals list;
    size_t first[LG_MAX_NDIM + 1], index[LG_MAX_NDIM];
    uint64_t local_size[LG_MAX_NDIM];
    if (!rank_intervals(layout, t, c, writers, writer, &list, first, local_size)) {
        free_intervals(&list);
        return lg__nomem(err);
    }
    /* At most LG__LAYOUT_MAX_PIECES, the product of all constant splits. */
    size_t count = 1;
    for (uint32_t d = 0; d < t->ndim; d++) {
        count *= first[d + 1] - first[d];
        index[d] = first[d];
    }
    lg__piece *pieces = count == 0 ? NULL : lg__calloc(count, sizeof *pieces);
    if (count > 0 && pieces == NULL) {
        free_intervals(&list);
        return lg__nomem(err);
    }
    for (size_t i = 0; i < count; i++) {
        lg__piece *p = &pieces[i];
        p->box.ndim = t->ndim;
        for (uint32_t d = 0; d < t->ndim; d++) {
            const interval *v = &list.all[index[d]];
            p->box.offset[d] = v->begin;
            p->box.size[d] = v->size;
            p->local[d] = v->local;
        }
        for (uint32_t d = t->ndim; d-- > 0;) {
            if (++index[d] < first[d + 1]) {
                break;
            }
            index[d] = first[d];
        }
    }
    free_intervals(&list);
    *out = pieces;
    *n = count;
    return LG_OK;
}

/* The elements of the tensor, row-major, that part p of the buffer holds. */
static lg__range flat_range(const lg_layout *layout, const lg__tensor_desc *t, uint64_t elements, uint64_t p)
{
    lg__range part = lg__piece_of(layout->flat_length, layout->sizes[layout->flat_axis], LG_SPLIT_CEIL, p);
    uint64_t begin = part.begin, end = part.begin + part.size;
    uint64_t low = begin > t->flat_offset ? begin - t->flat_offset : 0;
    uint64_t high = end > t->flat_offset ? end - t->flat_offset : 0;
    high = high < elements ? high : elements;
    return low < high ? (lg__range){low, high - low} : (lg__range){low < elements ? low : elements, 0};
}

static lg_status flat_pieces(const lg__tensor_desc *t, lg__range held, lg__range mine, lg__piece **out, size_t *n,
                             lg_error *err)
{
    lg__region boxes[LG__MAX_FLAT_BOXES];
    size_t count = lg__region_cut_flat(t->ndim, t->shape, mine.begin, mine.begin + mine.size, boxes);
    if (count == 0) {
        return no_piece(out, n);
    }
    lg__piece *pieces = lg__calloc(count, sizeof *pieces);
    if (pieces == NULL) {
        return lg__nomem(err);
    }
    uint64_t at = mine.begin - held.begin;
    for (size_t i = 0; i < count; i++) {
        pieces[i].box = boxes[i];
        pieces[i].flat_local = at;
        at += lg__region_elements(&boxes[i]);
    }
    *out = pieces;
    *n = count;
    return LG_OK;
}

static lg_status rank_pieces(const lg_layout *layout, const lg__tensor_desc *t, uint32_t rank, bool writers,
                             lg__piece **out, size_t *n, lg_error *err)
{
    uint64_t elements = 0;
    LG__TRY(lg__layout_check_shape(layout, t, &elements, err));
    uint32_t index;
    if (!lg__layout_index_of(layout, rank, &index)) {
        return no_piece(out, n);
    }
    if (layout->kind == LG__COPIES || (elements == 0 && index == 0)) {
        return one_piece(t, out, n, err);
    }
    if (elements == 0) {
        return no_piece(out, n);
    }
    uint32_t c[LG_MAX_MESH_NDIM], writer = 0;
    lg__layout_coordinates(layout, index, c);
    if (writers) {
        LG__RETURN_IF(layout->text == NULL, err, LG_ERR_INTERNAL, "boxes of a layout that is not resolved");
        if (!lg__layout_writer_of(layout, t->name, c, &writer)) {
            return no_piece(out, n);
        }
    }
    if (layout->kind == LG__SPLIT) {
        return split_pieces(layout, t, c, writers, writer, out, n, err);
    }
    lg__range held = flat_range(layout, t, elements, c[layout->flat_axis]), mine = held;
    if (writers) {
        mine = lg__piece_of(held.size, layout->writers, LG_SPLIT_CEIL, writer);
        mine.begin += held.begin;
    }
    return flat_pieces(t, held, mine, out, n, err);
}

lg_status lg__layout_written(const lg_layout *layout, const lg__tensor_desc *t, uint32_t rank, lg__piece **out,
                             size_t *n, lg_error *err)
{
    return rank_pieces(layout, t, rank, true, out, n, err);
}

lg_status lg__layout_held(const lg_layout *layout, const lg__tensor_desc *t, uint32_t rank, lg__piece **out, size_t *n,
                          lg_error *err)
{
    return rank_pieces(layout, t, rank, false, out, n, err);
}

lg_status lg__layout_local_part(const lg_layout *layout, const lg__tensor_desc *t, uint32_t rank, uint64_t *local_shape,
                                uint64_t *start, uint64_t *elements, lg_error *err)
{
    uint64_t all = 0;
    LG__TRY(lg__layout_check_shape(layout, t, &all, err));
    uint32_t index;
    LG__RETURN_IF(!lg__layout_index_of(layout, rank, &index), err, LG_ERR_INVALID,
                  "rank %" PRIu32 " is not in the layout's rank set", rank);
    lg__range range = {0, all};
    uint64_t local_size[LG_MAX_NDIM];
    uint32_t c[LG_MAX_MESH_NDIM];
    lg__layout_coordinates(layout, index, c);
    if (layout->kind == LG__FLAT) {
        range = flat_range(layout, t, all, c[layout->flat_axis]);
    } else if (layout->kind == LG__COPIES) {
        if (t->ndim > 0) { /* the shape of a scalar may be NULL */
            memcpy(local_size, t->shape, t->ndim * sizeof *local_size);
        }
    } else {
        intervals list;
        size_t first[LG_MAX_NDIM + 1];
        bool good = rank_intervals(layout, t, c, false, 0, &list, first, local_size);
        free_intervals(&list);
        if (!good) {
            return lg__nomem(err);
        }
        range.size = 1;
        for (uint32_t d = 0; d < t->ndim; d++) {
            range.size *= local_size[d];
        }
    }
    if (layout->kind != LG__FLAT && local_shape != NULL && t->ndim > 0) {
        memcpy(local_shape, local_size, t->ndim * sizeof *local_size);
    }
    if (start != NULL) {
        *start = range.begin;
    }
    if (elements != NULL) {
        *elements = range.size;
    }
    return LG_OK;
}

lg_status lg_layout_local(const lg_layout *layout, uint32_t rank, uint32_t ndim, const uint64_t *shape,
                          uint64_t flat_offset, uint64_t *local_shape, uint64_t *start, uint64_t *elements,
                          lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(layout == NULL || (shape == NULL && ndim > 0), err, LG_ERR_INVALID,
                  "lg_layout_local needs a layout and a shape");
    lg__tensor_desc t = {.dtype = LG_U8, .ndim = ndim, .shape = shape, .flat_offset = flat_offset};
    LG__TRY(lg__layout_local_part(layout, &t, rank, local_shape, start, elements, err));
    if (start != NULL && layout->kind != LG__FLAT) {
        *start = UINT64_MAX;
    }
    return LG_OK;
}

lg_status lg_layout_offset(const lg_layout *layout, uint32_t rank, uint32_t ndim, const uint64_t *shape,
                           uint64_t *offset, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(layout == NULL || ((shape == NULL || offset == NULL) && ndim > 0), err, LG_ERR_INVALID,
                  "lg_layout_offset needs a layout, a shape and a place for the offset");
    LG__RETURN_IF(layout->kind == LG__FLAT, err, LG_ERR_UNSUPPORTED,
                  "a range of a flat buffer has no offset in each dimension; lg_layout_local gives its start");
    lg__tensor_desc t = {.dtype = LG_U8, .ndim = ndim, .shape = shape};
    uint64_t local[LG_MAX_NDIM], start, elements;
    LG__TRY(lg__layout_local_part(layout, &t, rank, local, &start, &elements, err));
    lg__piece *pieces = NULL;
    size_t n = 0;
    LG__TRY(lg__layout_held(layout, &t, rank, &pieces, &n, err));
    for (uint32_t d = 0; n <= 1 && d < ndim; d++) {
        offset[d] = n == 1 ? pieces[0].box.offset[d] : 0; /* an empty part is nowhere */
    }
    lg__free(pieces);
    LG__RETURN_IF(n > 1, err, LG_ERR_UNSUPPORTED, "the part of rank %u is %zu boxes", rank, n);
    return LG_OK;
}

/* ------------------------------------------------------------------- counting */

/* Intervals that are not empty, of n elements under these levels; k gives the
 * piece of every level that is not constant, or is NULL: all ranks together.
 * Only two sizes of pieces occur, so nothing is enumerated. */
static uint64_t count_intervals(const lg__level *l, uint32_t n_levels, const uint64_t *k, uint64_t n)
{
    if (n == 0 || n_levels == 0) {
        return n != 0;
    }
    if (k != NULL && l->by != LG__BY_CONSTANT) {
        return count_intervals(l + 1, n_levels - 1, k + 1, lg__piece_of(n, l->pieces, l->mode, *k).size);
    }
    const uint64_t *below = k == NULL ? NULL : k + 1;
    uint64_t longer, many, shorter, few;
    if (l->mode == LG_SPLIT_CEIL) {
        longer = n / l->pieces + (n % l->pieces != 0);
        many = n / longer;
        shorter = n % longer;
        few = shorter != 0;
    } else {
        shorter = n / l->pieces;
        longer = shorter + 1;
        many = n % l->pieces;
        few = l->pieces - many;
    }
    uint64_t count = many == 0 ? 0 : many * count_intervals(l + 1, n_levels - 1, below, longer);
    return count + (few == 0 ? 0 : few * count_intervals(l + 1, n_levels - 1, below, shorter));
}

/* How many intervals of the same rank come before the one with pieces k. */
static uint64_t intervals_before(const lg__level *l, uint32_t n_levels, const uint64_t *k, uint64_t n)
{
    uint64_t before = 0;
    for (uint32_t i = 0; i < n_levels; i++) {
        if (l[i].by == LG__BY_CONSTANT && k[i] > 0) {
            /* All full-sized ones (ceil), or longer ones and then shorter ones. */
            uint64_t longer = l[i].mode == LG_SPLIT_CEIL ? k[i] : n % l[i].pieces;
            longer = longer < k[i] ? longer : k[i];
            uint64_t size = lg__piece_of(n, l[i].pieces, l[i].mode, 0).size;
            if (longer > 0) {
                before += longer * count_intervals(l + i + 1, n_levels - i - 1, k + i + 1, size);
            }
            if (k[i] > longer) {
                size = n / l[i].pieces;
                before += (k[i] - longer) * count_intervals(l + i + 1, n_levels - i - 1, k + i + 1, size);
            }
        }
        n = lg__piece_of(n, l[i].pieces, l[i].mode, k[i]).size;
    }
    return before;
}

/* Parts of the flat buffer that hold some of the tensor: from *first on. */
static uint64_t flat_first_part(const lg_layout *layout, uint64_t position)
{
    return lg__piece_at(layout->flat_length, layout->sizes[layout->flat_axis], LG_SPLIT_CEIL, position);
}

lg_status lg__layout_box_count(const lg_layout *layout, const lg__tensor_desc *t, uint64_t *out, lg_error *err)
{
    uint64_t elements = 0;
    LG__TRY(lg__layout_check_shape(layout, t, &elements, err));
    LG__RETURN_IF(layout->text == NULL, err, LG_ERR_INTERNAL, "boxes of a layout that is not resolved");
    if (layout->kind == LG__COPIES || elements == 0) {
        *out = layout->kind == LG__COPIES ? layout->n_ranks : 1;
        return LG_OK;
    }
    uint64_t count = 1;
    if (layout->kind == LG__SPLIT) {
        for (uint32_t d = 0; d < t->ndim; d++) {
            lg__level levels[LG__MAX_LEVELS];
            uint32_t n = lg__layout_levels(layout, d, true, levels);
            count *= count_intervals(levels, n, NULL, t->shape[d]);
        }
        *out = count;
        return LG_OK;
    }
    count = 0;
    uint64_t done = 0;
    for (uint64_t p = flat_first_part(layout, t->flat_offset); done < elements; p++) {
        lg__range held = flat_range(layout, t, elements, p);
        uint64_t filled = lg__pieces_filled(held.size, layout->writers, LG_SPLIT_CEIL);
        for (uint64_t i = 0; i < filled; i++) {
            lg__region boxes[LG__MAX_FLAT_BOXES];
            lg__range mine = lg__piece_of(held.size, layout->writers, LG_SPLIT_CEIL, i);
            count += lg__region_cut_flat(t->ndim, t->shape, held.begin + mine.begin,
                                         held.begin + mine.begin + mine.size, boxes);
        }
        done = held.begin + held.size;
    }
    *out = count;
    return LG_OK;
}

/* --------------------------------------------------------- what touches a region */

/* A stored interval of one dimension. */
typedef struct leaf {
    uint64_t begin, size;
    uint32_t mesh;          /* its axes' share of the rank's row-major index */
    uint32_t writer;        /* when this is the dimension that writers cut */
    uint32_t number, count; /* which of its rank's intervals of the dimension, of how many */
} leaf;

typedef struct leaves {
    leaf *all;
    size_t n, cap;
} leaves;

typedef struct leaf_walk {
    leaves *list;
    const lg__level *levels;
    uint32_t n_levels;
    bool constant;        /* some level leaves several pieces on a rank */
    const uint32_t *step; /* row-major index steps of the axes */
    uint64_t extent, low, high;
    uint64_t k[LG__MAX_LEVELS];
} leaf_walk;

static bool add_leaf(leaf_walk *w, uint64_t begin, uint64_t size)
{
    leaves *list = w->list;
    if (!lg__grow((void **)&list->all, &list->cap, list->n, sizeof *list->all)) {
        return false;
    }
    leaf v = {.begin = begin, .size = size, .count = 1};
    for (uint32_t i = 0; i < w->n_levels; i++) {
        if (w->levels[i].by >= 0) {
            v.mesh += (uint32_t)w->k[i] * w->step[w->levels[i].by];
        } else if (w->levels[i].by == LG__BY_WRITER) {
            v.writer = (uint32_t)w->k[i];
        }
    }
    if (w->constant) {
        v.number = (uint32_t)intervals_before(w->levels, w->n_levels, w->k, w->extent);
        v.count = (uint32_t)count_intervals(w->levels, w->n_levels, w->k, w->extent);
    }
    list->all[list->n++] = v;
    return true;
}

/* The intervals below levels[i] of [begin, begin + size) that touch [low, high). */
static bool walk_leaves(leaf_walk *w, uint32_t i, uint64_t begin, uint64_t size)
{
    if (i == w->n_levels) {
        return add_leaf(w, begin, size);
    }
    const lg__level *l = &w->levels[i];
    uint64_t low = w->low > begin ? w->low - begin : 0;
    uint64_t high = w->high - begin < size ? w->high - begin : size;
    uint64_t last = lg__piece_at(size, l->pieces, l->mode, high - 1);
    for (uint64_t k = lg__piece_at(size, l->pieces, l->mode, low); k <= last; k++) {
        lg__range one = lg__piece_of(size, l->pieces, l->mode, k);
        w->k[i] = k;
        if (!walk_leaves(w, i + 1, begin + one.begin, one.size)) {
            return false;
        }
    }
    return true;
}

typedef struct touch_walk {
    const lg_layout *layout;
    uint32_t ndim;
    uint32_t name_crc;
    uint32_t only_writer; /* its share of the row-major index, when there is one */
    const leaf *all;
    size_t first[LG_MAX_NDIM + 1];
    lg__region box;
    lg__touch_fn fn;
    void *arg;
} touch_walk;

static uint32_t writer_rank(const touch_walk *w, uint32_t mesh, uint32_t writer)
{
    const lg_layout *layout = w->layout;
    mesh += layout->writers == 1 ? w->only_writer : lg__layout_writer_index(layout, w->name_crc, writer);
    return lg__layout_rank_at(layout, mesh);
}

static lg_status touch_product(touch_walk *w, uint32_t d, uint32_t mesh, uint32_t writer, uint32_t number,
                               lg_error *err)
{
    if (d == w->ndim) {
        return w->fn(writer_rank(w, mesh, writer), &w->box, number, w->arg, err);
    }
    for (size_t i = w->first[d]; i < w->first[d + 1]; i++) {
        const leaf *v = &w->all[i];
        w->box.offset[d] = v->begin;
        w->box.size[d] = v->size;
        LG__TRY(touch_product(w, d + 1, mesh + v->mesh, writer + v->writer, number * v->count + v->number, err));
    }
    return LG_OK;
}

static lg_status touch_split(touch_walk *w, const lg__tensor_desc *t, const lg__region *region, lg_error *err)
{
    leaves list = {0};
    uint32_t step[LG_MAX_MESH_NDIM];
    lg__layout_index_steps(w->layout, step);
    bool good = true;
    for (uint32_t d = 0; d < t->ndim && good; d++) {
        lg__level levels[LG__MAX_LEVELS];
        uint32_t n = lg__layout_levels(w->layout, d, true, levels);
        leaf_walk walk = {.list = &list, .levels = levels, .n_levels = n, .step = step, .extent = t->shape[d]};
        walk.low = region->offset[d];
        walk.high = region->offset[d] + region->size[d];
        for (uint32_t i = 0; i < n; i++) {
            walk.constant |= levels[i].by == LG__BY_CONSTANT && levels[i].pieces > 1;
        }
        w->first[d] = list.n;
        good = walk_leaves(&walk, 0, 0, t->shape[d]);
    }
    w->first[t->ndim] = list.n;
    w->all = list.all;
    lg_status st = good ? touch_product(w, 0, 0, 0, 0, err) : lg__nomem(err);
    lg__free(list.all);
    return st;
}

/* The first element of `region`, row-major, that is not before element *at. */
static bool next_element(const lg__tensor_desc *t, const lg__region *region, uint64_t *at)
{
    uint64_t q[LG_MAX_NDIM], rest = *at;
    for (uint32_t d = t->ndim; d-- > 0;) {
        q[d] = rest % t->shape[d];
        rest /= t->shape[d];
    }
    if (rest != 0) {
        return false;
    }
    uint32_t d = 0;
    while (d < t->ndim && q[d] >= region->offset[d] && q[d] - region->offset[d] < region->size[d]) {
        d++;
    }
    if (d == t->ndim) {
        return true;
    }
    if (q[d] < region->offset[d]) {
        q[d] = region->offset[d];
    } else { /* past the end of dimension d: on to the next index further out */
        for (;;) {
            if (d == 0) {
                return false;
            }
            d--;
            if (q[d] + 1 - region->offset[d] < region->size[d]) {
                q[d]++;
                break;
            }
        }
    }
    for (d++; d < t->ndim; d++) {
        q[d] = region->offset[d];
    }
    uint64_t sum = 0;
    for (d = 0; d < t->ndim; d++) {
        sum = sum * t->shape[d] + q[d];
    }
    *at = sum;
    return true;
}

/* From one element of the region to the piece that holds it, and on to the
 * region's next element behind that piece. */
static lg_status touch_flat(touch_walk *w, const lg__tensor_desc *t, uint64_t elements, const lg__region *region,
                            lg_error *err)
{
    const lg_layout *layout = w->layout;
    uint32_t step[LG_MAX_MESH_NDIM];
    lg__layout_index_steps(layout, step);
    uint64_t at = 0;
    while (at < elements && next_element(t, region, &at)) {
        uint64_t p = flat_first_part(layout, t->flat_offset + at);
        lg__range held = flat_range(layout, t, elements, p);
        uint64_t i = lg__piece_at(held.size, layout->writers, LG_SPLIT_CEIL, at - held.begin);
        lg__range mine = lg__piece_of(held.size, layout->writers, LG_SPLIT_CEIL, i);
        uint64_t begin = held.begin + mine.begin;
        lg__region boxes[LG__MAX_FLAT_BOXES], common;
        size_t n = lg__region_cut_flat(t->ndim, t->shape, begin, begin + mine.size, boxes);
        uint32_t rank = writer_rank(w, (uint32_t)p * step[layout->flat_axis], (uint32_t)i);
        for (size_t b = 0; b < n; b++) {
            if (lg__region_intersect(&boxes[b], region, &common)) {
                LG__TRY(w->fn(rank, &boxes[b], (uint32_t)b, w->arg, err));
            }
        }
        at = begin + mine.size;
    }
    return LG_OK;
}

lg_status lg__layout_touch(const lg_layout *layout, const lg__tensor_desc *t, const lg__region *region, lg__touch_fn fn,
                           void *arg, lg_error *err)
{
    uint64_t elements = 0;
    LG__TRY(lg__layout_check_shape(layout, t, &elements, err));
    LG__RETURN_IF(layout->text == NULL, err, LG_ERR_INTERNAL, "boxes of a layout that is not resolved");
    LG__RETURN_IF(!lg__region_inside(region, t->ndim, t->shape), err, LG_ERR_INVALID, "a region outside of its tensor");
    if (lg__region_empty(region)) {
        return LG_OK;
    }
    touch_walk w = {.layout = layout, .ndim = t->ndim, .fn = fn, .arg = arg, .box = {.ndim = t->ndim}};
    if (layout->kind == LG__COPIES) {
        w.box = lg__region_whole(t->ndim, t->shape);
        for (uint32_t i = 0; i < layout->n_ranks; i++) {
            LG__TRY(fn(lg__layout_rank_at(layout, i), &w.box, 0, arg, err));
        }
        return LG_OK;
    }
    if (layout->holders > 1) {
        w.name_crc = lg__crc32c(0, t->name, strlen(t->name));
        w.only_writer = lg__layout_writer_index(layout, w.name_crc, 0);
    }
    return layout->kind == LG__SPLIT ? touch_split(&w, t, region, err) : touch_flat(&w, t, elements, region, err);
}

/* --------------------------------------------------------- groups, fingerprints */

lg_group lg__file_group(lg_group group, lg_dtype dtype, bool copies)
{
    switch (dtype) {
    case LG_F4:
    case LG_F6_E2M3:
    case LG_F6_E3M2:
    case LG_F8_E8M0:
        return LG_GROUP_RAW;
    default:
        return copies ? LG_GROUP_RAW : group;
    }
}
