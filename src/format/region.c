/* SPDX-License-Identifier: Apache-2.0 */
#include "format/region.h"

#include "base/error.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------------ shapes */

lg_status lg__shape_elements(uint32_t ndim, const uint64_t *shape, uint64_t *out, lg_error *err)
{
    LG__RETURN_IF(ndim > LG_MAX_NDIM, err, LG_ERR_LIMIT, "%" PRIu32 " dimensions, at most %d are possible", ndim,
                  LG_MAX_NDIM);
    /* The extents that are not 0 must fit even if another one is 0: strides
     * are their products. */
    uint64_t elements = 1;
    bool empty = false;
    for (uint32_t d = 0; d < ndim; d++) {
        if (shape[d] == 0) {
            empty = true;
        } else if (__builtin_mul_overflow(elements, shape[d], &elements) || elements > INT64_MAX) {
            return lg_error_set(err, LG_ERR_LIMIT, "shape overflows 2^63 elements at dimension %" PRIu32, d);
        }
    }
    *out = empty ? 0 : elements;
    return LG_OK;
}

lg_status lg__shape_bytes(lg_dtype dtype, uint32_t ndim, const uint64_t *shape, uint64_t *out, lg_error *err)
{
    uint64_t bits = lg_dtype_bits(dtype), elements = 0;
    LG__RETURN_IF(bits == 0, err, LG_ERR_INVALID, "%d is no dtype", (int)dtype);
    LG__TRY(lg__shape_elements(ndim, shape, &elements, err));
    /* Sub-byte dtypes are counted in bits all through. */
    uint64_t unit = bits % 8 == 0 ? bits / 8 : bits, units;
    LG__RETURN_IF(__builtin_mul_overflow(elements, unit, &units) || units > INT64_MAX, err, LG_ERR_LIMIT,
                  "%" PRIu64 " elements of %s overflow 2^63 %s", elements, lg_dtype_name(dtype),
                  bits % 8 == 0 ? "bytes" : "bits");
    if (bits % 8 != 0) {
        LG__RETURN_IF(units % 8 != 0, err, LG_ERR_INVALID,
                      "%" PRIu64 " elements of %s (%" PRIu64 " bits each) fill no whole number of bytes", elements,
                      lg_dtype_name(dtype), bits);
        units /= 8;
    }
    *out = units;
    return LG_OK;
}

/* ----------------------------------------------------------------- regions */

lg__region lg__region_whole(uint32_t ndim, const uint64_t *shape)
{
    lg__region r = {.ndim = ndim};
    for (uint32_t d = 0; d < ndim; d++) {
        r.size[d] = shape[d];
    }
    return r;
}

bool lg__region_empty(const lg__region *r)
{
    for (uint32_t d = 0; d < r->ndim; d++) {
        if (r->size[d] == 0) {
            return true;
        }
    }
    return false;
}

uint64_t lg__region_elements(const lg__region *r)
{
    uint64_t n = 1;
    for (uint32_t d = 0; d < r->ndim; d++) {
        n *= r->size[d];
    }
    return n;
}

bool lg__region_inside(const lg__region *r, uint32_t ndim, const uint64_t *shape)
{
    if (r->ndim != ndim) {
        return false;
    }
    for (uint32_t d = 0; d < ndim; d++) {
        if (r->offset[d] > shape[d] || r->size[d] > shape[d] - r->offset[d]) {
            return false;
        }
    }
    return true;
}

bool lg__region_intersect(const lg__region *a, const lg__region *b, lg__region *out)
{
    if (a->ndim != b->ndim) {
        return false;
    }
    lg__region both = {.ndim = a->ndim};
    for (uint32_t d = 0; d < a->ndim; d++) {
        uint64_t begin = a->offset[d] > b->offset[d] ? a->offset[d] : b->offset[d];
        uint64_t a_end = a->offset[d] + a->size[d], b_end = b->offset[d] + b->size[d];
        uint64_t end = a_end < b_end ? a_end : b_end;
        if (begin >= end) {
            return false;
        }
        both.offset[d] = begin;
        both.size[d] = end - begin;
    }
    *out = both;
    return true;
}

int lg__region_compare(const lg__region *a, const lg__region *b)
{
    uint32_t ndim = a->ndim < b->ndim ? a->ndim : b->ndim;
    for (uint32_t d = 0; d < ndim; d++) {
        if (a->offset[d] != b->offset[d]) {
            return a->offset[d] < b->offset[d] ? -1 : 1;
        }
    }
    return a->ndim == b->ndim ? 0 : a->ndim < b->ndim ? -1 : 1;
}

const char *lg__region_text(const lg__region *r, char *out, size_t bytes)
{
    static const char cut[] = "…]";
    if (bytes == 0) {
        return out;
    }
    char part[64] = "[]";
    size_t n = 0;
    for (uint32_t d = 0; d < r->ndim || d == 0; d++) {
        bool last = d + 1 >= r->ndim;
        if (r->ndim > 0) {
            snprintf(part, sizeof part, "%s%" PRIu64 ":%" PRIu64 "%s", d == 0 ? "[" : ", ", r->offset[d],
                     r->offset[d] + r->size[d], last ? "]" : "");
        }
        size_t add = strlen(part);
        if (n + add + (last ? 1 : sizeof cut) > bytes) {
            if (n + sizeof cut <= bytes) {
                memcpy(out + n, cut, sizeof cut);
                return out;
            }
            break;
        }
        memcpy(out + n, part, add);
        n += add;
    }
    out[n] = '\0';
    return out;
}

/* -------------------------------------------------------------------- runs */

typedef struct axis {
    uint64_t size;
    uint64_t box; /* steps in units: bytes, or bits for sub-byte dtypes */
    int64_t mem;
} axis;

typedef struct run_state {
    lg__run_fn fn;
    void *arg;
    uint64_t per_byte; /* units in a byte: 1 or 8 */
    lg_dtype dtype;
    uint64_t box, length; /* the run that still may grow; length 0: none */
    int64_t mem;
} run_state;

static lg_status flush(const run_state *s, lg_error *err)
{
    if (s->length == 0) {
        return LG_OK;
    }
    if (s->per_byte == 1) {
        return s->fn(s->box, s->mem, s->length, s->arg, err);
    }
    LG__RETURN_IF(s->box % 8 != 0 || s->length % 8 != 0 || s->mem % 8 != 0, err, LG_ERR_UNSUPPORTED,
                  "a run of %s elements would cut inside a byte", lg_dtype_name(s->dtype));
    return s->fn(s->box / 8, s->mem / 8, s->length / 8, s->arg, err);
}

static lg_status add_run(run_state *s, uint64_t box, int64_t mem, uint64_t length, lg_error *err)
{
    if (s->length != 0 && s->box + s->length == box && s->mem + (int64_t)s->length == mem) {
        s->length += length;
        return LG_OK;
    }
    LG__TRY(flush(s, err));
    s->box = box;
    s->mem = mem;
    s->length = length;
    return LG_OK;
}

/* Memory steps in units. */
static lg_status memory_steps(const lg__run_walk *w, uint64_t unit, uint64_t per_byte, int64_t step[LG_MAX_NDIM],
                              lg_error *err)
{
    uint32_t ndim = w->box->ndim;
    int64_t packed = (int64_t)unit;
    for (uint32_t i = ndim; i-- > 0;) {
        if (w->strides == NULL) {
            step[i] = packed;
            uint64_t extent = w->mem_size[i] == 0 ? 1 : w->mem_size[i];
            LG__RETURN_IF(__builtin_mul_overflow(packed, extent, &packed), err, LG_ERR_LIMIT,
                          "memory of that shape overflows 2^63 bytes");
        } else if (per_byte == 8 && i + 1 == ndim) {
            /* Half a byte is no byte stride: 0 and 1 both mean packed. */
            LG__RETURN_IF(w->part->size[i] > 1 && w->strides[i] != 0 && w->strides[i] != 1, err, LG_ERR_UNSUPPORTED,
                          "%s memory must be packed in its last dimension, its stride is %" PRId64,
                          lg_dtype_name(w->dtype), w->strides[i]);
            step[i] = packed;
        } else {
            LG__RETURN_IF(__builtin_mul_overflow(w->strides[i], (int64_t)per_byte, &step[i]), err, LG_ERR_LIMIT,
                          "stride %" PRId64 " is too large", w->strides[i]);
        }
    }
    return LG_OK;
}

lg_status lg__region_runs(const lg__run_walk *walk, lg__run_fn fn, void *arg, lg_error *err)
{
    const lg__region *box = walk->box, *part = walk->part;
    uint64_t bits = lg_dtype_bits(walk->dtype);
    LG__RETURN_IF(bits == 0, err, LG_ERR_INVALID, "%d is no dtype", (int)walk->dtype);
    uint32_t ndim = box->ndim;
    LG__RETURN_IF(ndim > LG_MAX_NDIM || part->ndim != ndim, err, LG_ERR_INTERNAL, "runs of a part outside its box");
    uint64_t per_byte = bits % 8 == 0 ? 1 : 8, unit = bits % 8 == 0 ? bits / 8 : bits;
    int64_t mem_step[LG_MAX_NDIM] = {0};
    LG__TRY(memory_steps(walk, unit, per_byte, mem_step, err));

    /* Dimensions that can be walked as one become one; those of one element
     * only shift the start. */
    axis axes[LG_MAX_NDIM];
    uint32_t n = 0;
    uint64_t box_step = unit, box_at = 0;
    __int128 mem_at = 0, lowest = 0, highest = 0;
    bool empty = false;
    for (uint32_t d = ndim; d-- > 0;) {
        uint64_t size = part->size[d], end;
        LG__RETURN_IF(part->offset[d] < box->offset[d] || __builtin_add_overflow(part->offset[d], size, &end) ||
                          part->offset[d] - box->offset[d] > box->size[d] ||
                          size > box->size[d] - (part->offset[d] - box->offset[d]),
                      err, LG_ERR_INTERNAL, "runs of a part outside its box");
        if (size == 0) {
            empty = true;
            continue;
        }
        box_at += box_step * (part->offset[d] - box->offset[d]);
        /* Each term fits 64 bits, so that sums of them fit 128. */
        int64_t from, start, reach;
        LG__RETURN_IF(__builtin_sub_overflow(part->offset[d], walk->mem_origin[d], &from) ||
                          __builtin_mul_overflow(from, mem_step[d], &start) ||
                          __builtin_mul_overflow(size - 1, mem_step[d], &reach),
                      err, LG_ERR_LIMIT, "positions in memory overflow 2^63 bytes");
        mem_at += start;
        lowest += reach < 0 ? reach : 0;
        highest += reach > 0 ? reach : 0;
        if (size > 1) {
            axis *inner = n == 0 ? NULL : &axes[n - 1];
            if (inner != NULL && box_step == inner->box * inner->size &&
                (__int128)mem_step[d] == (__int128)inner->mem * (__int128)inner->size) {
                inner->size *= size;
            } else {
                axes[n++] = (axis){size, box_step, mem_step[d]};
            }
        }
        LG__RETURN_IF(__builtin_mul_overflow(box_step, box->size[d], &box_step) || box_step > INT64_MAX, err,
                      LG_ERR_LIMIT, "a box overflows 2^63 bytes");
    }
    if (empty) {
        return LG_OK;
    }
    LG__RETURN_IF(mem_at + lowest < INT64_MIN || mem_at + highest > INT64_MAX - (int64_t)unit, err, LG_ERR_LIMIT,
                  "positions in memory overflow 2^63 bytes");

    /* axes[0] is the innermost: one run if it is packed on both sides. */
    uint32_t first = 0;
    uint64_t length = unit;
    if (n > 0 && axes[0].box == unit && axes[0].mem == (int64_t)unit) {
        length = unit * axes[0].size;
        first = 1;
    }
    run_state s = {.fn = fn, .arg = arg, .per_byte = per_byte, .dtype = walk->dtype};
    uint64_t index[LG_MAX_NDIM] = {0};
    int64_t at = (int64_t)mem_at;
    for (;;) {
        LG__TRY(add_run(&s, box_at, at, length, err));
        uint32_t i = first;
        while (i < n && index[i] + 1 == axes[i].size) {
            box_at -= axes[i].box * index[i];
            at -= axes[i].mem * (int64_t)index[i];
            index[i] = 0;
            i++;
        }
        if (i == n) {
            return flush(&s, err);
        }
        index[i]++;
        box_at += axes[i].box;
        at += axes[i].mem;
    }
}

/* --------------------------------------------------------------- flat cuts */

typedef struct cutter {
    uint32_t ndim;
    const uint64_t *shape;
    uint64_t row[LG_MAX_NDIM]; /* elements behind one index of dimension d */
    uint64_t prefix[LG_MAX_NDIM];
    lg__region *out;
    size_t n;
} cutter;

/* The box of indices [begin, end) of dimension d, whole behind it. */
static void cut_box(cutter *c, uint32_t d, uint64_t begin, uint64_t end)
{
    lg__region *r = &c->out[c->n++];
    *r = (lg__region){.ndim = c->ndim};
    for (uint32_t i = 0; i < c->ndim; i++) {
        r->offset[i] = i < d ? c->prefix[i] : i == d ? begin : 0;
        r->size[i] = i < d ? 1 : i == d ? end - begin : c->shape[i];
    }
}

/* [begin, end) counts elements from the start of dimension d under c->prefix. */
static void cut(cutter *c, uint32_t d, uint64_t begin, uint64_t end)
{
    uint64_t row = c->row[d];
    uint64_t first = begin / row, first_whole = first + (begin % row != 0), end_whole = end / row;
    if (first_whole > end_whole) { /* inside one index */
        c->prefix[d] = first;
        cut(c, d + 1, begin % row, end - first * row);
        return;
    }
    if (first < first_whole) {
        c->prefix[d] = first;
        cut(c, d + 1, begin % row, row);
    }
    if (first_whole < end_whole) {
        cut_box(c, d, first_whole, end_whole);
    }
    if (end % row != 0) {
        c->prefix[d] = end_whole;
        cut(c, d + 1, 0, end % row);
    }
}

size_t lg__region_cut_flat(uint32_t ndim, const uint64_t *shape, uint64_t begin, uint64_t end,
                           lg__region out[LG__MAX_FLAT_BOXES])
{
    if (begin >= end) {
        return 0;
    }
    if (ndim == 0) {
        out[0] = (lg__region){.ndim = 0};
        return 1;
    }
    cutter c = {.ndim = ndim, .shape = shape, .out = out};
    uint64_t row = 1;
    for (uint32_t d = ndim; d-- > 0;) {
        c.row[d] = row;
        row *= shape[d];
    }
    cut(&c, 0, begin, end);
    return c.n;
}
