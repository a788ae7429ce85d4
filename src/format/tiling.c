/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/mem.h"
#include "format/region.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* More dimensions or corners than this go to the pairwise sweep. */
#define MAX_CORNER_DIMS 16
#define MAX_CORNERS ((size_t)1 << 22)
/* The sweep gives up rather than run for hours over a hostile file. */
#define MAX_PAIRS (UINT64_C(1) << 31)

typedef struct tiling {
    const char *name;
    uint32_t ndim;
    const uint64_t *shape;
    const lg__region *boxes;
    const uint32_t *ranks;
    size_t n;
    uint32_t dims[LG_MAX_NDIM]; /* in which some box does not span the tensor */
    uint32_t k;
} tiling;

#define NAME_TEXT 200
#define BOX_TEXT 160

/* "rank 3's box [0:2, 4:8]". */
static const char *box_text(const tiling *t, size_t i, char *out, size_t bytes)
{
    char where[BOX_TEXT];
    lg__region_text(&t->boxes[i], where, sizeof where);
    if (t->ranks != NULL) {
        snprintf(out, bytes, "rank %" PRIu32 "'s box %s", t->ranks[i], where);
    } else {
        snprintf(out, bytes, "box %s (number %zu)", where, i);
    }
    return out;
}

static lg_status fail_box(const tiling *t, size_t i, const char *what, lg_error *err)
{
    char name[NAME_TEXT], box[BOX_TEXT + 64], shape[BOX_TEXT];
    lg__region whole = lg__region_whole(t->ndim, t->shape);
    return lg_error_set(err, LG_ERR_COVERAGE, "tensor \"%s\": %s %s %s", lg__printable(t->name, name, sizeof name),
                        box_text(t, i, box, sizeof box), what, lg__region_text(&whole, shape, sizeof shape));
}

static lg_status fail_overlap(const tiling *t, size_t a, size_t b, lg_error *err)
{
    char name[NAME_TEXT], one[BOX_TEXT + 64], two[BOX_TEXT + 64], both[BOX_TEXT];
    lg__region common;
    if (!lg__region_intersect(&t->boxes[a], &t->boxes[b], &common)) {
        return lg_error_set(err, LG_ERR_INTERNAL, "boxes that do not overlap were reported to");
    }
    return lg_error_set(err, LG_ERR_COVERAGE, "tensor \"%s\": %s and %s overlap at %s",
                        lg__printable(t->name, name, sizeof name), box_text(t, a, one, sizeof one),
                        box_text(t, b, two, sizeof two), lg__region_text(&common, both, sizeof both));
}

static bool covers(const lg__region *box, uint32_t ndim, const uint64_t *at)
{
    for (uint32_t d = 0; d < ndim; d++) {
        if (at[d] < box->offset[d] || at[d] - box->offset[d] >= box->size[d]) {
            return false;
        }
    }
    return true;
}

/* The cell `at` is covered not once: says by which boxes, or by none. */
static lg_status fail_cell(const tiling *t, const uint64_t *at, lg_error *err)
{
    size_t first = SIZE_MAX;
    for (size_t i = 0; i < t->n; i++) {
        if (covers(&t->boxes[i], t->ndim, at)) {
            if (first != SIZE_MAX) {
                return fail_overlap(t, first, i, err);
            }
            first = i;
        }
    }
    LG__RETURN_IF(first != SIZE_MAX, err, LG_ERR_INTERNAL, "a cell that is covered once was reported as not");
    char name[NAME_TEXT], where[BOX_TEXT], text[BOX_TEXT];
    lg__region cell = {.ndim = t->ndim}, whole = lg__region_whole(t->ndim, t->shape);
    for (uint32_t d = 0; d < t->ndim; d++) {
        cell.offset[d] = at[d];
        cell.size[d] = 1;
    }
    return lg_error_set(err, LG_ERR_COVERAGE, "tensor \"%s\" %s: no box holds the element at %s",
                        lg__printable(t->name, name, sizeof name), lg__region_text(&whole, text, sizeof text),
                        lg__region_text(&cell, where, sizeof where));
}

/* A corner is box << k | mask; bit j of mask chooses the upper end in the j-th
 * of the dimensions. The tensor itself is box number n. */
static uint64_t corner_at(const tiling *t, uint64_t corner, uint32_t j)
{
    uint32_t d = t->dims[j];
    uint64_t box = corner >> t->k;
    bool upper = corner >> j & 1;
    if (box == t->n) {
        return upper ? t->shape[d] : 0;
    }
    const lg__region *r = &t->boxes[box];
    return r->offset[d] + (upper ? r->size[d] : 0);
}

static int compare_corners(const void *a, const void *b, void *arg)
{
    const tiling *t = arg;
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    for (uint32_t j = 0; j < t->k; j++) {
        uint64_t p = corner_at(t, x, j), q = corner_at(t, y, j);
        if (p != q) {
            return p < q ? -1 : 1;
        }
    }
    return 0;
}

/* +1 for boxes at corners with an even number of upper ends; the tensor counts
 * the other way round. */
static int corner_sign(const tiling *t, uint64_t corner)
{
    int odd = __builtin_parityll(corner & ((UINT64_C(1) << t->k) - 1));
    if (corner >> t->k == t->n) {
        odd ^= 1;
    }
    return odd ? -1 : 1;
}

/* How often a cell is covered, less one, is the sum of the signs of all
 * corners at or below it in every dimension. Such corners come no later in
 * lexicographic order; so the first place whose signs do not cancel is a cell
 * that is covered not once (beyond the tensor's edge that sum is always 0). */
static lg_status check_corners(const tiling *t, lg_error *err)
{
    size_t count = (t->n + 1) << t->k;
    uint64_t *corners = lg__malloc(count * sizeof *corners);
    if (corners == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0; i < count; i++) {
        corners[i] = i;
    }
    tiling arg = *t;
    qsort_r(corners, count, sizeof *corners, compare_corners, &arg);
    lg_status st = LG_OK;
    for (size_t i = 0; i < count && st == LG_OK;) {
        int64_t sum = 0;
        size_t j = i;
        for (; j < count && compare_corners(&corners[i], &corners[j], &arg) == 0; j++) {
            sum += corner_sign(t, corners[j]);
        }
        if (sum != 0) {
            uint64_t at[LG_MAX_NDIM] = {0};
            for (uint32_t d = 0; d < t->k; d++) {
                at[t->dims[d]] = corner_at(t, corners[i], d);
            }
            st = fail_cell(t, at, err);
        }
        i = j;
    }
    lg__free(corners);
    return st;
}

static bool overlap(const tiling *t, const lg__region *a, const lg__region *b)
{
    for (uint32_t j = 0; j < t->k; j++) {
        uint32_t d = t->dims[j];
        if (a->offset[d] >= b->offset[d] + b->size[d] || b->offset[d] >= a->offset[d] + a->size[d]) {
            return false;
        }
    }
    return true;
}

typedef struct sweep_order {
    const tiling *t;
    uint32_t dim;
} sweep_order;

static int compare_begins(const void *a, const void *b, void *arg)
{
    const sweep_order *o = arg;
    size_t i = *(const size_t *)a, j = *(const size_t *)b;
    uint64_t x = o->t->boxes[i].offset[o->dim], y = o->t->boxes[j].offset[o->dim];
    return x != y ? (x < y ? -1 : 1) : i < j ? -1 : i > j;
}

/* Boxes inside the tensor that are pairwise disjoint and have its volume tile
 * it. Pairs are looked at in order of one dimension, the one with the smallest
 * boxes for its extent. */
static lg_status check_pairs(const tiling *t, lg_error *err)
{
    sweep_order order = {.t = t, .dim = t->dims[0]};
    double least = 2.0 * (double)t->n;
    for (uint32_t j = 0; j < t->k; j++) {
        uint32_t d = t->dims[j];
        double share = 0;
        for (size_t i = 0; i < t->n; i++) {
            share += (double)t->boxes[i].size[d] / (double)t->shape[d];
        }
        if (share < least) {
            least = share;
            order.dim = d;
        }
    }
    size_t *sorted = lg__malloc(t->n * sizeof *sorted);
    if (sorted == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0; i < t->n; i++) {
        sorted[i] = i;
    }
    qsort_r(sorted, t->n, sizeof *sorted, compare_begins, &order);
    uint64_t pairs = 0;
    lg_status st = LG_OK;
    for (size_t i = 0; i < t->n && st == LG_OK; i++) {
        const lg__region *a = &t->boxes[sorted[i]];
        uint64_t end = a->offset[order.dim] + a->size[order.dim];
        for (size_t j = i + 1; j < t->n && t->boxes[sorted[j]].offset[order.dim] < end; j++) {
            if (overlap(t, a, &t->boxes[sorted[j]])) {
                st = fail_overlap(t, sorted[i], sorted[j], err);
                break;
            }
            if (++pairs > MAX_PAIRS) {
                char name[NAME_TEXT];
                st = lg_error_set(err, LG_ERR_LIMIT,
                                  "tensor \"%s\": %zu boxes in %" PRIu32 " cut dimensions are too many to check",
                                  lg__printable(t->name, name, sizeof name), t->n, t->k);
                break;
            }
        }
    }
    lg__free(sorted);
    return st;
}

lg_status lg__region_check_tiling(const char *name, uint32_t ndim, const uint64_t *shape, const lg__region *boxes,
                                  const uint32_t *ranks, size_t n, lg_error *err)
{
    uint64_t elements = 0;
    LG__TRY(lg__shape_elements(ndim, shape, &elements, err));
    tiling t = {.name = name, .ndim = ndim, .shape = shape, .boxes = boxes, .ranks = ranks, .n = n};
    unsigned __int128 volume = 0;
    bool cut[LG_MAX_NDIM] = {false};
    for (size_t i = 0; i < n; i++) {
        if (!lg__region_inside(&boxes[i], ndim, shape)) {
            return fail_box(&t, i, "lies outside of", err);
        }
        if (elements != 0 && lg__region_empty(&boxes[i])) {
            return fail_box(&t, i, "is empty, which none may be in", err);
        }
        volume += elements == 0 ? 0 : lg__region_elements(&boxes[i]);
        for (uint32_t d = 0; d < ndim; d++) {
            cut[d] |= boxes[i].size[d] != shape[d];
        }
    }
    for (uint32_t d = 0; d < ndim; d++) {
        if (cut[d]) {
            t.dims[t.k++] = d;
        }
    }
    char shown[NAME_TEXT];
    if (elements == 0) {
        for (size_t i = 0; i < n && t.k > 0; i++) {
            lg__region whole = lg__region_whole(ndim, shape);
            if (memcmp(boxes[i].size, whole.size, ndim * sizeof whole.size[0]) != 0) {
                return fail_box(&t, i, "is not the whole of the empty tensor", err);
            }
        }
        LG__RETURN_IF(n != 1, err, LG_ERR_COVERAGE, "tensor \"%s\" is empty and has %zu boxes instead of one",
                      lg__printable(name, shown, sizeof shown), n);
        return LG_OK;
    }
    bool corners_fit = t.k <= MAX_CORNER_DIMS && n < MAX_CORNERS >> t.k;
    if (corners_fit && n >> t.k >= 16) {
        return check_corners(&t, err);
    }
    /* Few boxes of many corners: comparing them pair by pair is faster, but
     * does not say where a hole is. */
    LG__TRY(check_pairs(&t, err));
    if (volume == elements) {
        return LG_OK;
    }
    if (corners_fit) {
        return check_corners(&t, err);
    }
    return lg_error_set(err, LG_ERR_COVERAGE, "tensor \"%s\": its boxes hold %" PRIu64 " of %" PRIu64 " elements",
                        lg__printable(name, shown, sizeof shown), (uint64_t)volume, elements);
}
