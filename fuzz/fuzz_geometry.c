/* SPDX-License-Identifier: Apache-2.0 */

/* Tensors and layouts out of bytes, against a count of every element: each is
 * written once, held as often as there are holders, found again by regions, and
 * the proof that boxes tile a tensor agrees. Then runs between a packed box and
 * strided memory, and cuts of flat ranges. One input in eight has numbers of
 * any size instead: those must be refused, or answered within bounds. */

#include "base/error.h"
#include "base/mem.h"
#include "format/layout.h"
#include "fuzz.h"

enum { ELEMENTS = 2048, RANKS = 48, BOXES = 4096, DIMS = 4 };

typedef struct scene {
    lg__tensor_desc t;
    uint64_t shape[DIMS];
    uint64_t elements;
    lg_layout *layout; /* resolved */
    uint32_t n_ranks;
    lg__region boxes[BOXES];
    uint32_t ranks[BOXES], numbers[BOXES];
    size_t n;
} scene;

/* Position of the i-th element of a box in a packed tensor. */
static uint64_t position(const lg__region *box, uint64_t i, const uint64_t *shape)
{
    uint64_t at = 0, step = 1;
    for (uint32_t d = box->ndim; d-- > 0;) {
        at += (box->offset[d] + i % box->size[d]) * step;
        i /= box->size[d];
        step *= shape[d];
    }
    return at;
}

static uint64_t volume(const lg__region *box)
{
    uint64_t n = 1;
    for (uint32_t d = 0; d < box->ndim; d++) {
        n *= box->size[d];
    }
    return n;
}

static void count(const scene *s, const lg__region *box, uint8_t *times)
{
    FUZZ_CHECK(lg__region_inside(box, s->t.ndim, s->shape), "a box outside of the tensor");
    for (uint64_t i = 0, n = volume(box); i < n; i++) {
        times[position(box, i, s->shape)]++;
    }
}

static lg_layout *make_layout(fuzz_input *in, const scene *s, bool wild)
{
    uint32_t sizes[4], strides[4], ranks[RANKS], n_ranks = 1;
    lg_split splits[4];
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = fuzz_below(in, 4);
    d.mesh_sizes = sizes;
    for (uint32_t a = 0; a < d.mesh_ndim; a++) {
        sizes[a] = wild ? fuzz_u32(in) >> fuzz_below(in, 32) : 1 + fuzz_below(in, 4);
        if (!wild && n_ranks * sizes[a] > RANKS) {
            sizes[a] = 1;
        }
        n_ranks = wild ? 0 : n_ranks * sizes[a];
    }
    uint8_t how = fuzz_u8(in);
    if (how % 4 == 1) { /* a permutation with gaps */
        for (uint32_t i = 0; i < n_ranks; i++) {
            ranks[i] = 2 * i + 1;
        }
        for (uint32_t i = n_ranks; i-- > 1;) {
            uint32_t k = fuzz_below(in, i + 1), swap = ranks[i];
            ranks[i] = ranks[k];
            ranks[k] = swap;
        }
        d.ranks = n_ranks > 0 ? ranks : NULL;
    } else if (how % 4 == 2) { /* axes the other way round */
        uint32_t step = 1;
        for (uint32_t a = 0; a < d.mesh_ndim; a++) {
            strides[a] = wild ? fuzz_u32(in) : step;
            step *= sizes[a];
        }
        d.mesh_strides = strides;
        d.mesh_origin = wild ? fuzz_u32(in) : fuzz_below(in, 5);
    }
    if (how & 0x10 && d.mesh_ndim > 0) {
        d.flat_length = wild ? fuzz_u64(in) : s->t.flat_offset + s->elements + fuzz_below(in, 9);
        d.flat_axis = (int32_t)fuzz_below(in, d.mesh_ndim);
    } else {
        d.n_splits = fuzz_below(in, 5);
        d.splits = splits;
        for (uint32_t i = 0; i < d.n_splits; i++) {
            bool by_axis = d.mesh_ndim > 0 && fuzz_below(in, 3) > 0;
            splits[i] = (lg_split){.dim = fuzz_below(in, wild            ? 40
                                                         : s->t.ndim > 0 ? s->t.ndim
                                                                         : 1),
                                   .axis = by_axis ? (int32_t)fuzz_below(in, d.mesh_ndim) : LG_NO_AXIS,
                                   .pieces = wild ? fuzz_u32(in) : 1 + fuzz_below(in, 5),
                                   .mode = fuzz_below(in, 2) ? LG_SPLIT_EVEN : LG_SPLIT_CEIL};
        }
    }
    d.writers = fuzz_below(in, 5);
    lg_error err = LG_ERROR_INIT;
    lg_layout *layout = NULL, *resolved = NULL;
    lg_status st = lg_layout_create(&d, &layout, &err);
    if (st == LG_OK) {
        st = lg__layout_resolve(layout, &s->t, &resolved, &err);
    }
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        FUZZ_CHECK(resolved == NULL, "an output in spite of: %s", err.message);
    }
    lg_layout_free(layout);
    return resolved;
}

static void check_pieces(scene *s)
{
    static uint8_t written[ELEMENTS], held[ELEMENTS];
    memset(written, 0, sizeof written);
    memset(held, 0, sizeof held);
    lg_error err = LG_ERROR_INIT;
    s->n = 0;
    for (uint32_t i = 0; i < s->n_ranks; i++) {
        uint32_t rank = lg__layout_rank_at(s->layout, i), index = UINT32_MAX;
        FUZZ_CHECK(lg__layout_index_of(s->layout, rank, &index) && index == i, "rank %u has index %u, not %u", rank,
                   index, i);
        lg__piece *p = NULL;
        size_t n = 0;
        FUZZ_CHECK(lg__layout_written(s->layout, &s->t, rank, &p, &n, &err) == LG_OK, "%s", err.message);
        for (size_t b = 0; b < n; b++) {
            FUZZ_CHECK(s->elements == 0 || !lg__region_empty(&p[b].box), "an empty box");
            FUZZ_CHECK(b == 0 || lg__region_compare(&p[b - 1].box, &p[b].box) < 0, "boxes out of order");
            count(s, &p[b].box, written);
            FUZZ_CHECK(s->n < BOXES, "more boxes than elements");
            s->boxes[s->n] = p[b].box;
            s->ranks[s->n] = rank;
            s->numbers[s->n++] = (uint32_t)b;
        }
        lg__free(p);
        uint64_t sum = 0, start, elements = 0, local[DIMS];
        FUZZ_CHECK(lg__layout_held(s->layout, &s->t, rank, &p, &n, &err) == LG_OK, "%s", err.message);
        for (size_t b = 0; b < n; b++) {
            count(s, &p[b].box, held);
            sum += volume(&p[b].box);
        }
        lg__free(p);
        FUZZ_CHECK(lg__layout_local_part(s->layout, &s->t, rank, local, &start, &elements, &err) == LG_OK, "%s",
                   err.message);
        FUZZ_CHECK(elements == sum, "rank %u holds %llu elements, its boxes %llu", rank, (unsigned long long)elements,
                   (unsigned long long)sum);
    }
    for (uint64_t e = 0; e < s->elements; e++) {
        FUZZ_CHECK(written[e] == 1, "element %llu is written %u times: %s", (unsigned long long)e, written[e],
                   s->layout->text);
        FUZZ_CHECK(held[e] == s->layout->holders, "element %llu is held %u times, not %u: %s", (unsigned long long)e,
                   held[e], s->layout->holders, s->layout->text);
    }
    uint64_t boxes = 0;
    FUZZ_CHECK(lg__layout_box_count(s->layout, &s->t, &boxes, &err) == LG_OK && boxes == s->n,
               "%llu boxes are counted, %zu written", (unsigned long long)boxes, s->n);
}

static lg__region some_region(fuzz_input *in, uint32_t ndim, const uint64_t *shape)
{
    lg__region r = lg__region_whole(ndim, shape);
    for (uint32_t d = 0; d < ndim; d++) {
        r.offset[d] = fuzz_below(in, (uint32_t)shape[d] + 1);
        r.size[d] = fuzz_below(in, (uint32_t)(shape[d] - r.offset[d]) + 1);
    }
    return r;
}

typedef struct touched {
    const scene *s;
    bool seen[BOXES];
} touched;

static lg_status touch(uint32_t rank, const lg__region *box, uint32_t number, void *arg, lg_error *err)
{
    (void)err;
    touched *t = arg;
    for (size_t i = 0; i < t->s->n; i++) {
        if (t->s->ranks[i] == rank && t->s->numbers[i] == number) {
            FUZZ_CHECK(!t->seen[i] && lg__region_compare(box, &t->s->boxes[i]) == 0 &&
                           volume(box) == volume(&t->s->boxes[i]),
                       "box %u of rank %u is touched twice or is another", number, rank);
            t->seen[i] = true;
            return LG_OK;
        }
    }
    FUZZ_CHECK(false, "box %u of rank %u is touched and written by nobody", number, rank);
    return LG_OK;
}

static void check_touch(const scene *s, fuzz_input *in)
{
    static touched t;
    lg__region r = some_region(in, s->t.ndim, s->shape), common;
    lg_error err = LG_ERROR_INIT;
    memset(t.seen, 0, sizeof t.seen);
    t.s = s;
    FUZZ_CHECK(lg__layout_touch(s->layout, &s->t, &r, touch, &t, &err) == LG_OK, "%s", err.message);
    for (size_t i = 0; i < s->n; i++) {
        FUZZ_CHECK(t.seen[i] == lg__region_intersect(&r, &s->boxes[i], &common), "box %zu: %s", i, s->layout->text);
    }
}

/* Boxes that tile are accepted, in any order; with one of them gone, there
 * twice, or moved, they are refused. */
static void check_tiling(scene *s, fuzz_input *in)
{
    lg_error err = LG_ERROR_INIT;
    if (s->n == 0) {
        return;
    }
    for (size_t i = s->n; i-- > 1;) {
        size_t k = fuzz_below(in, (uint32_t)i + 1);
        lg__region box = s->boxes[i];
        uint32_t rank = s->ranks[i];
        s->boxes[i] = s->boxes[k];
        s->ranks[i] = s->ranks[k];
        s->boxes[k] = box;
        s->ranks[k] = rank;
    }
    lg_status st = lg__region_check_tiling("w", s->t.ndim, s->shape, s->boxes, s->ranks, s->n, &err);
    FUZZ_CHECK(st == LG_OK, "%s", err.message);
    size_t i = fuzz_below(in, (uint32_t)s->n), n = s->n;
    uint8_t how = fuzz_u8(in);
    lg__region *box = &s->boxes[i];
    if (how % 3 == 0 || s->t.ndim == 0) {
        *box = s->boxes[--n];
    } else if (how % 3 == 1 && n < BOXES) {
        s->ranks[n] = s->ranks[i];
        s->boxes[n++] = *box;
    } else {
        box->offset[how / 3 % s->t.ndim] += 1 + how % 2;
    }
    st = lg__region_check_tiling("w", s->t.ndim, s->shape, s->boxes, s->ranks, n, &err);
    FUZZ_CHECK(st == LG_ERR_COVERAGE, "%zu of %zu boxes, one of them changed, are taken for a tiling", n, s->n);
    fuzz_refused(st, &err);
}

typedef struct runs {
    const uint16_t *box;
    char *memory;
    uint64_t last;
} runs;

static lg_status run(uint64_t box_byte, int64_t mem_byte, uint64_t bytes, void *arg, lg_error *err)
{
    (void)err;
    runs *r = arg;
    FUZZ_CHECK(bytes > 0 && box_byte >= r->last, "runs out of order");
    memcpy(r->memory + mem_byte, (const char *)r->box + box_byte, bytes);
    r->last = box_byte + bytes;
    return LG_OK;
}

/* A part of a box goes to memory whose dimensions lie in any order, with gaps,
 * some backwards. */
static void check_runs(fuzz_input *in)
{
    uint32_t ndim = fuzz_below(in, DIMS + 1);
    lg__region box = {.ndim = ndim}, part = {.ndim = ndim};
    uint64_t origin[DIMS], size[DIMS];
    int64_t strides[DIMS], first = 0, bytes = 2;
    for (uint32_t d = 0; d < ndim; d++) {
        box.offset[d] = fuzz_below(in, 5);
        box.size[d] = 1 + fuzz_below(in, 5);
        part.offset[d] = box.offset[d] + fuzz_below(in, (uint32_t)box.size[d]);
        part.size[d] = 1 + fuzz_below(in, (uint32_t)(box.offset[d] + box.size[d] - part.offset[d]));
        origin[d] = part.offset[d];
        size[d] = part.size[d];
    }
    for (uint32_t d = ndim; d-- > 0;) {
        bool backwards = fuzz_below(in, 4) == 0;
        strides[d] = backwards ? -bytes : bytes;
        first += backwards ? bytes * (int64_t)(size[d] - 1) : 0;
        bytes = bytes * (int64_t)size[d] + 2 * (int64_t)fuzz_below(in, 3);
    }
    static uint16_t packed[625 * 2];
    for (uint16_t i = 0; i < 625; i++) {
        packed[i] = (uint16_t)(i + 1);
    }
    char *memory = calloc(1, (size_t)bytes + 2);
    FUZZ_CHECK(memory != NULL, "out of memory");
    runs r = {packed, memory + first, 0};
    lg__run_walk walk = {LG_I16, &box, &part, origin, size, fuzz_below(in, 4) > 0 ? strides : NULL};
    if (walk.strides == NULL) {
        r.memory = memory; /* packed; there is room for it */
    }
    lg_error err = LG_ERROR_INIT;
    lg_status st = lg__region_runs(&walk, run, &r, &err);
    FUZZ_CHECK(st == LG_OK, "%s", err.message);
    lg__region within = part; /* where the part lies in the box */
    for (uint32_t d = 0; d < ndim; d++) {
        within.offset[d] -= box.offset[d];
    }
    uint64_t n = volume(&part);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t rest = i;
        int64_t at = 0;
        for (uint32_t d = ndim; d-- > 0;) {
            at += (int64_t)(rest % size[d]) * strides[d];
            rest /= size[d];
        }
        uint16_t got, want = packed[position(&within, i, box.size)];
        memcpy(&got, walk.strides != NULL ? memory + first + at : memory + 2 * i, 2);
        FUZZ_CHECK(got == want, "element %llu of %llu is %u, not %u", (unsigned long long)i, (unsigned long long)n, got,
                   want);
    }
    free(memory);
}

static void check_flat(const scene *s, fuzz_input *in)
{
    if (s->elements == 0) {
        return;
    }
    uint64_t begin = fuzz_below(in, (uint32_t)s->elements + 1);
    uint64_t end = begin + fuzz_below(in, (uint32_t)(s->elements - begin) + 1), at = begin;
    lg__region boxes[LG__MAX_FLAT_BOXES];
    size_t n = lg__region_cut_flat(s->t.ndim, s->shape, begin, end, boxes);
    FUZZ_CHECK(n <= 2 * (size_t)(s->t.ndim > 0 ? s->t.ndim : 1), "%zu boxes", n);
    for (size_t b = 0; b < n; b++) {
        for (uint64_t i = 0, all = volume(&boxes[b]); i < all; i++, at++) {
            FUZZ_CHECK(position(&boxes[b], i, s->shape) == at, "box %zu leaves the order", b);
        }
    }
    FUZZ_CHECK(at == end, "[%llu, %llu) is cut up to %llu", (unsigned long long)begin, (unsigned long long)end,
               (unsigned long long)at);
}

static lg_status few(uint32_t rank, const lg__region *box, uint32_t number, void *arg, lg_error *err)
{
    (void)rank;
    (void)box;
    (void)number;
    return ++*(size_t *)arg < 200 ? LG_OK : lg_error_set(err, LG_ERR_CANCELLED, "enough");
}

/* Numbers of any size: nothing but that it ends, within its bounds. */
static void check_wild(scene *s, fuzz_input *in)
{
    lg_error err = LG_ERROR_INIT;
    size_t n = 0;
    uint64_t boxes, start, elements, local[DIMS];
    lg__region whole = lg__region_whole(s->t.ndim, s->shape);
    lg__layout_box_count(s->layout, &s->t, &boxes, &err);
    lg__layout_touch(s->layout, &s->t, &whole, few, &n, &err);
    for (int i = 0; i < 3; i++) {
        uint32_t rank = fuzz_u32(in) >> fuzz_below(in, 32), index;
        if (!lg__layout_index_of(s->layout, rank, &index)) {
            continue;
        }
        FUZZ_CHECK(lg__layout_rank_at(s->layout, index) == rank, "rank %u has index %u", rank, index);
        lg__piece *p = NULL;
        lg_status st = lg__layout_written(s->layout, &s->t, rank, &p, &n, &err);
        if (st != LG_OK) {
            continue;
        }
        for (size_t b = 0; b < n; b++) {
            FUZZ_CHECK(lg__region_inside(&p[b].box, s->t.ndim, s->shape), "a box outside of the tensor");
        }
        lg__free(p);
        st = lg__layout_local_part(s->layout, &s->t, rank, local, &start, &elements, &err);
        FUZZ_CHECK(st == LG_OK && elements <= s->elements, "%s", err.message);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static scene s;
    fuzz_input in = {data, bytes};
    bool wild = fuzz_below(&in, 8) == 7;
    s.t = (lg__tensor_desc){.name = "w", .group = LG_GROUP_MODEL, .shape = s.shape};
    s.t.dtype = (lg_dtype)fuzz_below(&in, LG_DTYPE_COUNT);
    s.t.ndim = fuzz_below(&in, DIMS + 1);
    s.elements = 1;
    for (uint32_t d = 0; d < s.t.ndim; d++) {
        s.shape[d] = wild ? fuzz_u64(&in) >> fuzz_below(&in, 64) : fuzz_below(&in, 12);
        if (!wild && s.elements * s.shape[d] > ELEMENTS) {
            s.shape[d] = 1;
        }
        s.elements *= wild ? 1 : s.shape[d];
    }
    s.t.flat_offset = wild ? fuzz_u64(&in) : fuzz_below(&in, 7);
    lg_error err = LG_ERROR_INIT;
    if (wild && lg__shape_elements(s.t.ndim, s.shape, &s.elements, &err) != LG_OK) {
        s.elements = UINT64_MAX;
    }
    s.layout = make_layout(&in, &s, wild);
    if (s.layout != NULL && wild) {
        check_wild(&s, &in);
    } else if (s.layout != NULL) {
        s.n_ranks = 0;
        for (uint32_t rank = 0; rank < 4 * RANKS + 8; rank++) {
            uint32_t index;
            s.n_ranks += lg__layout_index_of(s.layout, rank, &index);
        }
        check_pieces(&s);
        check_touch(&s, &in);
        check_tiling(&s, &in);
    }
    lg_layout_free(s.layout);
    if (!wild) {
        check_flat(&s, &in);
        check_runs(&in);
    }
    return 0;
}
