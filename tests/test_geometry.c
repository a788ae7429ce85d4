/* SPDX-License-Identifier: Apache-2.0 */

/* Random tensors and layouts against a model that is written from
 * docs/format-layouts.md and thinks in single elements: who holds, who writes,
 * in which box. It shares no arithmetic with the library. */

#include "base/error.h"
#include "base/json.h"
#include "base/mem.h"
#include "format/layout.h"
#include "support/environment.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TEST(name, fn)             \
    {                              \
        name, fn, NULL, NULL, NULL \
    }

/* ----------------------------------------------------------------- randomness */

static uint64_t seed_of_run, seed_of_case, random_state;

static void random_begin(uint64_t number)
{
    seed_of_case = number;
    random_state = seed_of_run + number * UINT64_C(0x9E3779B97F4A7C15);
}

static uint64_t random_u64(void) /* splitmix64 */
{
    uint64_t z = random_state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

static uint32_t below(uint32_t n) { return (uint32_t)(random_u64() % n); }
static bool one_in(uint32_t n) { return below(n) == 0; }

/* ---------------------------------------------------------------------- model */

enum { MAX_RANKS = 64, MAX_ELEMENTS = 20000, MAX_BOXES = 40000, DIMS = 4, AXES = 4 };

typedef struct stored {
    uint32_t rank, number;
    lg__region at;
} stored;

typedef struct scene {
    char name[32];
    lg_dtype dtype;
    uint32_t ndim;
    uint64_t shape[DIMS];
    uint64_t elements;
    uint32_t mesh_ndim, sizes[AXES], strides[AXES], origin, ranks[MAX_RANKS], n_ranks;
    bool strided, listed, copies;
    uint32_t n_splits;
    lg_split splits[6];
    uint64_t flat_length, flat_offset;
    uint32_t flat_axis;
    uint32_t writers; /* asked for */

    lg__tensor_desc desc;
    lg_layout *layout, *resolved;
    uint32_t w, writer_dim; /* from the resolved layout */
    stored *boxes;          /* of the model, by index of the rank and number */
    size_t n_boxes;
} scene;

#define CHECK(s, cond)                      \
    do {                                    \
        if (!(cond)) {                      \
            fail_scene(s, #cond, __LINE__); \
        }                                   \
    } while (0)

static void fail_scene(const scene *s, const char *what, int line)
{
    char text[2048];
    lg__region whole = lg__region_whole(s->ndim, s->shape);
    lg__region_text(&whole, text, sizeof text);
    fail_msg("line %d: %s\n  LASTGOOD_SEED=%llu case %llu: %s %s %s, flat offset %llu, world %u, %s", line, what,
             (unsigned long long)seed_of_run, (unsigned long long)seed_of_case, s->name, lg_dtype_name(s->dtype), text,
             (unsigned long long)s->flat_offset, s->n_ranks,
             s->resolved != NULL ? s->resolved->text : "(not resolved)");
}

/* Coordinates by counting up, no division. */
static void model_coordinates(const scene *s, uint32_t index, uint32_t *c)
{
    memset(c, 0, AXES * sizeof *c);
    while (index-- > 0) {
        for (uint32_t a = s->mesh_ndim; a-- > 0;) {
            if (++c[a] < s->sizes[a]) {
                break;
            }
            c[a] = 0;
        }
    }
}

static uint32_t model_rank(const scene *s, uint32_t index)
{
    if (s->listed) {
        return s->ranks[index];
    }
    uint32_t c[AXES], rank = s->origin;
    model_coordinates(s, index, c);
    for (uint32_t a = 0; a < s->mesh_ndim; a++) {
        rank += c[a] * s->strides[a];
    }
    return rank;
}

/* Which of p pieces element x of n is in: torch.chunk deals out ceil(n/p) each,
 * torch.tensor_split one more to the first n mod p. */
static uint32_t model_piece(uint64_t n, uint32_t p, lg_split_mode mode, uint64_t x, uint64_t *in_piece, uint64_t *size)
{
    uint64_t begin = 0;
    for (uint32_t i = 0; i < p; i++) {
        uint64_t len = mode == LG_SPLIT_CEIL ? (n + p - 1) / p : n / p + (i < n % p ? 1 : 0);
        if (len > n - begin) {
            len = n - begin;
        }
        if (x < begin + len) {
            *in_piece = x - begin;
            *size = len;
            return i;
        }
        begin += len;
    }
    fail_msg("an element in no piece");
    return 0;
}

static uint32_t model_crc32c(const char *s)
{
    uint32_t crc = UINT32_MAX;
    for (; *s != '\0'; s++) {
        crc ^= (unsigned char)*s;
        for (int i = 0; i < 8; i++) {
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
        }
    }
    return ~crc;
}

static bool axis_used(const scene *s, uint32_t a)
{
    if (s->flat_length > 0) {
        return a == s->flat_axis;
    }
    for (uint32_t i = 0; i < s->n_splits; i++) {
        if (s->splits[i].axis == (int32_t)a) {
            return true;
        }
    }
    return false;
}

/* What decides about element x of dimension d: which interval it is in (a
 * number that ascends with the offset) and whether the rank at c has it. */
typedef struct verdict {
    bool held, written;
    uint64_t interval; /* same number: same stored interval */
    uint64_t held_interval;
} verdict;

static verdict model_dimension(const scene *s, const uint32_t *c, uint32_t writer, bool is_writer, uint32_t d,
                               uint64_t x)
{
    verdict v = {true, is_writer, 0, 0};
    uint64_t n = s->shape[d];
    for (uint32_t i = 0; i < s->n_splits; i++) {
        const lg_split *split = &s->splits[i];
        if (split->dim == d) {
            uint32_t p = split->axis == LG_NO_AXIS ? split->pieces : s->sizes[split->axis];
            uint32_t k = model_piece(n, p, split->mode, x, &x, &n);
            v.held_interval = v.held_interval * 64 + k;
            v.held &= split->axis == LG_NO_AXIS || c[split->axis] == k;
        }
    }
    v.interval = v.held_interval * 64;
    v.written &= v.held;
    if (s->flat_length == 0 && s->w > 1 && s->writer_dim == d) {
        uint32_t k = model_piece(n, s->w, LG_SPLIT_CEIL, x, &x, &n);
        v.interval += k;
        v.written &= k == writer;
    }
    return v;
}

/* Writer number of the rank at index, or none. */
static bool model_writer(const scene *s, uint32_t index, uint32_t *writer)
{
    /* holders in row-major order of the replica axes: those with our
     * coordinates on the other axes, as they come */
    uint32_t mine[AXES], c[AXES], holders[MAX_RANKS], n = 0;
    model_coordinates(s, index, mine);
    for (uint32_t i = 0; i < s->n_ranks; i++) {
        model_coordinates(s, i, c);
        bool same = true;
        for (uint32_t a = 0; a < s->mesh_ndim; a++) {
            same &= !axis_used(s, a) || c[a] == mine[a];
        }
        if (same) {
            holders[n++] = i;
        }
    }
    for (uint32_t i = 0; i < s->w; i++) {
        if (holders[(model_crc32c(s->name) % n + (uint32_t)((double)i * n / s->w + 1e-9)) % n] == index) {
            *writer = i;
            return true;
        }
    }
    return false;
}

static void add_box(scene *s, uint32_t rank, uint32_t number, const lg__region *at)
{
    assert_true(s->n_boxes < MAX_BOXES);
    s->boxes[s->n_boxes++] = (stored){rank, number, *at};
}

/* The largest block that begins at element x of a range that ends at `end`:
 * whole indices of the outermost dimension that x is a beginning of. */
static uint64_t model_flat_box(const scene *s, uint64_t x, uint64_t end, lg__region *out)
{
    uint64_t index[DIMS], rest = x;
    for (uint32_t d = s->ndim; d-- > 0;) {
        index[d] = rest % s->shape[d];
        rest /= s->shape[d];
    }
    for (uint32_t d = 0; d < s->ndim; d++) {
        uint64_t row = 1;
        for (uint32_t i = d + 1; i < s->ndim; i++) {
            row *= s->shape[i];
        }
        if (x % row == 0 && end - x >= row) {
            uint64_t rows = (end - x) / row, room = s->shape[d] - index[d];
            rows = rows < room ? rows : room;
            *out = (lg__region){.ndim = s->ndim};
            for (uint32_t i = 0; i < s->ndim; i++) {
                out->offset[i] = i <= d ? index[i] : 0;
                out->size[i] = i < d ? 1 : i == d ? rows : s->shape[i];
            }
            return rows * row;
        }
    }
    *out = (lg__region){.ndim = 0};
    return 1;
}

static uint64_t model_flat_range(const scene *s, const uint32_t *c, uint64_t *end)
{
    uint64_t begin = UINT64_MAX;
    *end = 0;
    for (uint64_t x = 0; x < s->elements; x++) {
        uint64_t in, size;
        if (model_piece(s->flat_length, s->sizes[s->flat_axis], LG_SPLIT_CEIL, s->flat_offset + x, &in, &size) ==
            c[s->flat_axis]) {
            begin = begin == UINT64_MAX ? x : begin;
            *end = x + 1;
        }
    }
    return begin == UINT64_MAX ? 0 : begin;
}

/* Runs of elements of one dimension with the same interval number. */
typedef struct span {
    uint64_t begin, size, local;
} span;

static size_t model_spans(const scene *s, const uint32_t *c, uint32_t writer, bool is_writer, bool held, uint32_t d,
                          span *out, uint64_t *local_size)
{
    size_t n = 0;
    uint64_t last = 0, local = 0;
    bool open = false;
    for (uint64_t x = 0; x < s->shape[d]; x++) {
        verdict v = model_dimension(s, c, writer, is_writer, d, x);
        bool take = held ? v.held : v.written;
        uint64_t number = held ? v.held_interval : v.interval;
        if (take && open && number == last) {
            out[n - 1].size++;
        } else if (take) {
            out[n++] = (span){x, 1, local};
        }
        open = take;
        last = number;
        local += v.held;
    }
    *local_size = local;
    return n;
}

typedef struct model_list {
    lg__region at[MAX_ELEMENTS];
    uint64_t local[MAX_ELEMENTS][DIMS];
    uint64_t flat_local[MAX_ELEMENTS];
    size_t n;
    uint64_t local_shape[DIMS];
    uint64_t start, elements;
} model_list;

/* The boxes of the rank at `index`; held: before sharing out. */
static void model_boxes(const scene *s, uint32_t index, bool held, model_list *out)
{
    uint32_t c[AXES], writer = 0;
    model_coordinates(s, index, c);
    out->n = 0;
    if (s->copies || s->elements == 0) {
        if (s->copies || index == 0) {
            out->at[0] = lg__region_whole(s->ndim, s->shape);
            memset(out->local[0], 0, sizeof out->local[0]);
            out->flat_local[0] = 0;
            out->n = 1;
        }
    }
    if (s->copies) {
        memcpy(out->local_shape, s->shape, sizeof s->shape);
        out->start = 0;
        out->elements = s->elements;
        return;
    }
    bool is_writer = held || model_writer(s, index, &writer);
    if (s->flat_length > 0) {
        uint64_t end, begin = model_flat_range(s, c, &end);
        out->start = begin;
        out->elements = end - begin;
        for (uint64_t x = begin; s->elements > 0 && x < end;) {
            uint64_t in = 0, size = end - begin;
            uint32_t k = held ? 0 : model_piece(end - begin, s->w, LG_SPLIT_CEIL, x - begin, &in, &size);
            uint64_t piece_end = x - in + size;
            if (!is_writer || (!held && k != writer)) {
                x = piece_end;
                continue;
            }
            while (x < piece_end) {
                uint64_t len = model_flat_box(s, x, piece_end, &out->at[out->n]);
                out->flat_local[out->n++] = x - begin;
                x += len;
            }
        }
        return;
    }
    static span spans[DIMS][MAX_ELEMENTS];
    size_t count[DIMS], at[DIMS] = {0}, product = 1;
    out->start = 0;
    out->elements = 1;
    for (uint32_t d = 0; d < s->ndim; d++) {
        count[d] = model_spans(s, c, writer, is_writer, held, d, spans[d], &out->local_shape[d]);
        product *= count[d];
        out->elements *= out->local_shape[d];
    }
    if (s->elements == 0 || !is_writer) {
        return;
    }
    for (size_t i = 0; i < product; i++) {
        lg__region *r = &out->at[out->n];
        *r = (lg__region){.ndim = s->ndim};
        for (uint32_t d = 0; d < s->ndim; d++) {
            r->offset[d] = spans[d][at[d]].begin;
            r->size[d] = spans[d][at[d]].size;
            out->local[out->n][d] = spans[d][at[d]].local;
        }
        out->n++;
        for (uint32_t d = s->ndim; d-- > 0;) {
            if (++at[d] < count[d]) {
                break;
            }
            at[d] = 0;
        }
    }
}

/* No box may begin or end inside a byte: in the innermost dimension that it
 * does not span, offset, size and row are whole bytes. */
static bool model_whole_bytes(const scene *s, const lg__region *r)
{
    uint64_t unit = lg_dtype_bits(s->dtype);
    for (uint32_t d = s->ndim; d-- > 0;) {
        if (r->size[d] != s->shape[d]) {
            return r->offset[d] * unit % 8 == 0 && r->size[d] * unit % 8 == 0 && s->shape[d] * unit % 8 == 0;
        }
        unit *= s->shape[d];
    }
    return unit % 8 == 0;
}

/* --------------------------------------------------------------------- scenes */

static void random_mesh(scene *s)
{
    s->mesh_ndim = below(AXES + 1);
    s->n_ranks = 1;
    for (uint32_t a = 0; a < s->mesh_ndim; a++) {
        s->sizes[a] = one_in(5) ? 1 : 1 + below(5);
        if (s->n_ranks * s->sizes[a] > MAX_RANKS) {
            s->sizes[a] = 1;
        }
        s->n_ranks *= s->sizes[a];
    }
    s->origin = below(3) * 7;
    s->listed = one_in(3);
    s->strided = !s->listed && one_in(2);
    /* Strides that nest, in a random order of the axes, perhaps with gaps. */
    uint32_t order[AXES], step = 1 + below(2);
    for (uint32_t a = 0; a < s->mesh_ndim; a++) {
        uint32_t k = s->strided ? below(a + 1) : a;
        order[a] = k < a ? order[k] : a;
        order[k] = a;
    }
    if (!s->strided) {
        step = 1;
    }
    for (uint32_t a = s->mesh_ndim; a-- > 0;) {
        s->strides[order[a]] = step;
        step *= s->sizes[order[a]];
        step += s->strided ? below(3) : 0;
    }
    if (s->listed) {
        bool shuffled = one_in(2);
        for (uint32_t i = 0; i < s->n_ranks; i++) {
            uint32_t k = shuffled ? below(i + 1) : i;
            s->ranks[i] = s->ranks[k];
            s->ranks[k] = 3 * i + 2;
        }
        if (shuffled && one_in(2)) { /* strides that meet, where they stay distinct */
            s->ranks[s->n_ranks - 1] += 1;
        }
    }
}

static void random_shape(scene *s)
{
    for (;;) {
        s->ndim = below(DIMS + 1);
        s->elements = 1;
        for (uint32_t d = 0; d < s->ndim; d++) {
            s->shape[d] = one_in(25) ? 0 : one_in(6) ? 1 : 1 + below(s->ndim > 2 ? 9 : 40);
            s->shape[d] *= s->dtype <= LG_F6_E3M2 && one_in(3) ? 4 : 1;
            s->elements *= s->shape[d];
        }
        if (s->elements <= MAX_ELEMENTS / 4) {
            return;
        }
    }
}

static void random_splits(scene *s)
{
    uint32_t used = 0, pieces = 1;
    s->n_splits = s->ndim == 0 ? 0 : below(6);
    for (uint32_t i = 0; i < s->n_splits; i++) {
        lg_split *split = &s->splits[i];
        *split = (lg_split){below(s->ndim), LG_NO_AXIS, 1 + below(4), one_in(2) ? LG_SPLIT_EVEN : LG_SPLIT_CEIL};
        if (s->mesh_ndim > 0 && !one_in(4)) {
            uint32_t a = below(s->mesh_ndim);
            if (!(used >> a & 1)) {
                used |= 1u << a;
                split->axis = (int32_t)a;
                continue;
            }
        }
        if (pieces * split->pieces > 16) {
            split->pieces = 1;
        }
        pieces *= split->pieces;
    }
}

static void make_layout(scene *s)
{
    lg_error err = LG_ERROR_INIT;
    if (s->copies) {
        uint32_t sorted[MAX_RANKS];
        for (uint32_t i = 0; i < s->n_ranks; i++) { /* ascending */
            uint32_t k = i, rank = model_rank(s, i);
            for (; k > 0 && sorted[k - 1] > rank; k--) {
                sorted[k] = sorted[k - 1];
            }
            sorted[k] = rank;
        }
        memcpy(s->ranks, sorted, sizeof sorted);
        s->listed = true;
        s->mesh_ndim = 1;
        s->sizes[0] = s->n_ranks;
        CHECK(s, lg__layout_of_ranks(sorted, s->n_ranks, true, &s->layout, &err) == LG_OK);
        return;
    }
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = s->mesh_ndim;
    d.mesh_sizes = s->sizes;
    d.mesh_strides = s->strided ? s->strides : NULL;
    d.mesh_origin = s->origin;
    d.ranks = s->listed ? s->ranks : NULL;
    d.n_splits = s->n_splits;
    d.splits = s->splits;
    d.flat_length = s->flat_length;
    d.flat_axis = (int32_t)s->flat_axis;
    d.writers = s->writers;
    if (lg_layout_create(&d, &s->layout, &err) != LG_OK) {
        fail_scene(s, err.message, __LINE__);
    }
}

static void random_scene(scene *s)
{
    static stored boxes[MAX_BOXES];
    *s = (scene){.boxes = boxes};
    static const lg_dtype dtypes[] = {LG_F32, LG_BF16, LG_U8, LG_C64, LG_F4, LG_F6_E2M3, LG_F6_E3M2};
    s->dtype = dtypes[one_in(2) ? 0 : below(7)];
    snprintf(s->name, sizeof s->name, "layer.%u", below(1000));
    random_mesh(s);
    random_shape(s);
    if (s->mesh_ndim > 0 && one_in(4)) {
        s->flat_axis = below(s->mesh_ndim);
        s->flat_offset = one_in(2) ? 0 : below(300);
        s->flat_length = s->flat_offset + s->elements + (one_in(2) ? 0 : below(300));
        s->flat_length += s->flat_length == 0;
    } else if (one_in(12)) {
        s->copies = true;
    } else {
        random_splits(s);
    }
    uint32_t holders = 1;
    for (uint32_t a = 0; a < s->mesh_ndim; a++) {
        holders *= axis_used(s, a) ? 1 : s->sizes[a];
    }
    s->writers = one_in(3) ? 0 : 1 + below(holders);
}

/* Resolves, and lays out the model's boxes. False: cuts inside a byte (or a
 * tensor that fills no bytes), which the library must have refused too. */
static bool settle(scene *s)
{
    static model_list list;
    s->desc = (lg__tensor_desc){s->name, LG_GROUP_OPTIM, s->dtype, s->ndim, s->shape, s->flat_offset};
    make_layout(s);
    lg_error err = LG_ERROR_INIT;
    lg_status st = lg__layout_resolve(s->layout, &s->desc, &s->resolved, &err);
    s->w = st == LG_OK ? s->resolved->writers : 1;
    s->writer_dim = st == LG_OK ? s->resolved->writer_dim : 0;
    if (st == LG_OK && !s->copies) {
        bool sub_byte = lg_dtype_bits(s->dtype) % 8 != 0;
        CHECK(s, s->w == (s->writers == 0 || s->ndim == 0 || sub_byte ? 1 : s->writers));
        for (uint32_t d = 0; d < s->ndim && s->w > 1 && s->flat_length == 0; d++) {
            CHECK(s, s->shape[d] <= s->shape[s->writer_dim] - (d < s->writer_dim));
        }
    }
    bool whole_bytes = s->elements * lg_dtype_bits(s->dtype) % 8 == 0;
    for (uint32_t i = 0; i < s->n_ranks; i++) {
        model_boxes(s, i, false, &list);
        for (size_t b = 0; b < list.n; b++) {
            add_box(s, model_rank(s, i), (uint32_t)b, &list.at[b]);
            whole_bytes &= s->elements == 0 || model_whole_bytes(s, &list.at[b]);
        }
    }
    if (!whole_bytes) {
        CHECK(s, st == LG_ERR_INVALID && lg__layout_check_tensor(s->layout, &s->desc, &err) == LG_ERR_INVALID);
        return false;
    }
    if (st != LG_OK) {
        fail_scene(s, err.message, __LINE__);
    }
    CHECK(s, lg__layout_check_tensor(s->resolved, &s->desc, &err) == LG_OK);
    return true;
}

static void end_scene(scene *s)
{
    lg_layout_free(s->layout);
    lg_layout_free(s->resolved);
}

/* --------------------------------------------------------------------- checks */

static void check_rank_set(const scene *s)
{
    uint32_t highest = 0;
    for (uint32_t i = 0; i < s->n_ranks; i++) {
        uint32_t rank = model_rank(s, i), index = 9999;
        CHECK(s, lg__layout_rank_at(s->resolved, i) == rank);
        CHECK(s, lg__layout_index_of(s->resolved, rank, &index) && index == i);
        highest = rank > highest ? rank : highest;
    }
    for (uint32_t rank = 0; rank <= highest + 2; rank++) {
        bool in = false;
        for (uint32_t i = 0; i < s->n_ranks; i++) {
            in |= model_rank(s, i) == rank;
        }
        uint32_t index;
        CHECK(s, lg__layout_index_of(s->resolved, rank, &index) == in);
    }
    /* Text and back, in a world that just holds it and in one that does not. */
    lg_error err = LG_ERROR_INIT;
    json_t *json = NULL;
    lg_layout *again = NULL;
    CHECK(s, lg__json_parse(s->resolved->text, s->resolved->text_bytes, &json, &err) == LG_OK);
    CHECK(s, lg__layout_parse(json, highest, &again, &err) == LG_ERR_FORMAT && again == NULL);
    CHECK(s, lg__layout_parse(json, highest + 1, &again, &err) == LG_OK);
    CHECK(s, strcmp(again->text, s->resolved->text) == 0);
    CHECK(s, memcmp(again->id, s->resolved->id, sizeof again->id) == 0);
    CHECK(s, again->holders == s->resolved->holders && again->n_ranks == s->n_ranks);
    json_decref(json);
    lg_layout_free(again);
}

static bool same_region(const lg__region *a, const lg__region *b)
{
    return a->ndim == b->ndim && memcmp(a->offset, b->offset, a->ndim * sizeof a->offset[0]) == 0 &&
           memcmp(a->size, b->size, a->ndim * sizeof a->size[0]) == 0;
}

static void check_pieces(const scene *s)
{
    static model_list list;
    lg_error err = LG_ERROR_INIT;
    for (uint32_t i = 0; i < s->n_ranks; i++) {
        uint32_t rank = model_rank(s, i);
        for (int held = 0; held < 2; held++) {
            lg__piece *p = NULL;
            size_t n = 9999;
            model_boxes(s, i, held, &list);
            /* what is held does not depend on writers */
            lg_status st = held ? lg__layout_held(one_in(2) ? s->layout : s->resolved, &s->desc, rank, &p, &n, &err)
                                : lg__layout_written(s->resolved, &s->desc, rank, &p, &n, &err);
            CHECK(s, st == LG_OK);
            CHECK(s, n == list.n);
            for (size_t b = 0; b < n; b++) {
                CHECK(s, same_region(&p[b].box, &list.at[b]));
                CHECK(s, b == 0 || lg__region_compare(&p[b - 1].box, &p[b].box) < 0);
                if (s->flat_length > 0) {
                    CHECK(s, p[b].flat_local == list.flat_local[b]);
                }
                for (uint32_t d = 0; d < s->ndim && s->flat_length == 0; d++) {
                    CHECK(s, p[b].local[d] == list.local[b][d]);
                }
            }
            lg__free(p);
        }
        uint64_t local[DIMS] = {0}, start = 99999, elements = 99999;
        CHECK(s, lg__layout_local_part(s->resolved, &s->desc, rank, local, &start, &elements, &err) == LG_OK);
        CHECK(s, elements == list.elements);
        if (s->flat_length > 0) {
            CHECK(s, elements == 0 || start == list.start);
        } else {
            CHECK(s, start == 0 && memcmp(local, list.local_shape, s->ndim * sizeof local[0]) == 0);
        }
        uint64_t again = 0;
        CHECK(s,
              lg_layout_local(s->layout, rank, s->ndim, s->shape, s->flat_offset, NULL, NULL, &again, NULL) == LG_OK);
        CHECK(s, again == elements);
    }
    lg__piece *p = NULL;
    size_t n = 9999;
    CHECK(s, lg__layout_written(s->resolved, &s->desc, 999999, &p, &n, &err) == LG_OK && n == 0 && p == NULL);
}

/* Each element in exactly one box (copies: in one of each rank). */
static void check_every_element(const scene *s)
{
    static uint8_t times[MAX_ELEMENTS];
    memset(times, 0, sizeof times);
    for (size_t i = 0; i < s->n_boxes; i++) {
        const lg__region *r = &s->boxes[i].at;
        CHECK(s, lg__region_inside(r, s->ndim, s->shape));
        CHECK(s, s->elements == 0 || !lg__region_empty(r));
        uint64_t n = lg__region_elements(r);
        for (uint64_t e = 0; e < n; e++) {
            uint64_t rest = e, at = 0, step = 1;
            for (uint32_t d = s->ndim; d-- > 0;) {
                at += (r->offset[d] + rest % r->size[d]) * step;
                rest /= r->size[d];
                step *= s->shape[d];
            }
            times[at]++;
        }
    }
    for (uint64_t e = 0; e < s->elements; e++) {
        CHECK(s, times[e] == (s->copies ? s->n_ranks : 1));
    }
    uint64_t count = 0;
    lg_error err = LG_ERROR_INIT;
    CHECK(s, lg__layout_box_count(s->resolved, &s->desc, &count, &err) == LG_OK && count == s->n_boxes);
}

typedef struct touched {
    const scene *s;
    uint8_t seen[MAX_BOXES];
    size_t n;
} touched;

static lg_status note_touched(uint32_t rank, const lg__region *at, uint32_t number, void *arg, lg_error *err)
{
    (void)err;
    touched *t = arg;
    for (size_t i = 0; i < t->s->n_boxes; i++) {
        const stored *b = &t->s->boxes[i];
        if (b->rank == rank && b->number == number) {
            CHECK(t->s, same_region(&b->at, at));
            CHECK(t->s, t->seen[i] == 0);
            t->seen[i] = 1;
            t->n++;
            return LG_OK;
        }
    }
    fail_scene(t->s, "a box that nobody writes is touched", __LINE__);
    return LG_OK;
}

static void check_touch(const scene *s)
{
    static touched t;
    for (int round = 0; round < 4; round++) {
        lg__region r = lg__region_whole(s->ndim, s->shape);
        for (uint32_t d = 0; d < s->ndim && round > 0; d++) {
            if (!one_in(4)) {
                r.offset[d] = below((uint32_t)s->shape[d] + 1);
                r.size[d] = below((uint32_t)(s->shape[d] - r.offset[d]) + 1);
                r.size[d] = r.size[d] == 0 && r.offset[d] < s->shape[d] && !one_in(8) ? 1 : r.size[d];
            }
        }
        memset(t.seen, 0, s->n_boxes);
        t.s = s;
        t.n = 0;
        lg_error err = LG_ERROR_INIT;
        CHECK(s, lg__layout_touch(s->resolved, &s->desc, &r, note_touched, &t, &err) == LG_OK);
        for (size_t i = 0; i < s->n_boxes; i++) {
            lg__region common;
            CHECK(s, t.seen[i] == lg__region_intersect(&r, &s->boxes[i].at, &common));
        }
    }
}

static void check_tiling(const scene *s)
{
    static lg__region boxes[MAX_BOXES + 1];
    static uint32_t ranks[MAX_BOXES + 1];
    size_t n = s->copies ? 1 : s->n_boxes;
    for (size_t i = 0; i < n; i++) {
        boxes[i] = s->boxes[i].at;
        ranks[i] = s->boxes[i].rank;
    }
    for (size_t i = 0; i < n; i++) { /* the order means nothing */
        size_t k = below((uint32_t)(i + 1));
        lg__region swap = boxes[i];
        boxes[i] = boxes[k];
        boxes[k] = swap;
    }
    lg_error err = LG_ERROR_INIT;
#define TILES(count) lg__region_check_tiling(s->name, s->ndim, s->shape, boxes, ranks, count, &err)
    if (TILES(n) != LG_OK) {
        fail_scene(s, err.message, __LINE__);
    }
    size_t victim = below((uint32_t)n);
    lg__region was = boxes[victim];

    boxes[victim] = boxes[n - 1]; /* drop one */
    CHECK(s, TILES(n - 1) == LG_ERR_COVERAGE);
    boxes[victim] = was;
    boxes[n] = was; /* one twice */
    ranks[n] = ranks[victim];
    CHECK(s, TILES(n + 1) == LG_ERR_COVERAGE);
    for (uint32_t d = 0; d < s->ndim; d++) {
        for (int what = 0; what < 5; what++) {
            lg__region *b = &boxes[victim];
            *b = was;
            switch (what) {
            case 0:
                b->offset[d]++;
                break;
            case 1:
                b->offset[d]--;
                break;
            case 2:
                b->size[d]++;
                break;
            case 3:
                b->size[d]--;
                break;
            case 4:
                b->size[d] = was.size[d] == 0 ? 1 : 0;
                break;
            }
            CHECK(s, TILES(n) == LG_ERR_COVERAGE);
        }
    }
    boxes[victim] = was;
    boxes[n] = (lg__region){.ndim = s->ndim}; /* an empty one more */
    CHECK(s, TILES(n + 1) == LG_ERR_COVERAGE);
    CHECK(s, TILES(n) == LG_OK);
#undef TILES
}

static void layouts_do_what_the_model_says(void **state)
{
    (void)state;
    const uint64_t cases = in_brief() ? 300 : 3000;
    size_t split = 0, flat = 0, copies = 0, shared = 0, refused = 0, empty = 0, sub_byte = 0;
    for (uint64_t i = 0; i < cases; i++) {
        scene s;
        random_begin(i);
        random_scene(&s);
        if (settle(&s)) {
            check_rank_set(&s);
            check_pieces(&s);
            check_every_element(&s);
            check_touch(&s);
            check_tiling(&s);
            split += s.n_splits > 1;
            flat += s.flat_length > 0;
            copies += s.copies;
            shared += s.w > 1;
            empty += s.elements == 0;
            sub_byte += lg_dtype_bits(s.dtype) < 8 && s.n_boxes > 1;
        } else {
            refused++;
        }
        end_scene(&s);
    }
    /* The dice reach everything, whatever the seed. */
    assert_true(split > cases / 5 && flat > cases / 10 && copies > cases / 50 && shared > cases / 20);
    assert_true(refused > cases / 50 && empty > cases / 50 && sub_byte > cases / 100);
}

/* One tensor under given splits, all checks. */
static void check_fixed(scene *s)
{
    static stored boxes[MAX_BOXES];
    s->boxes = boxes;
    strcpy(s->name, "w");
    s->dtype = LG_F32;
    s->elements = 1;
    for (uint32_t d = 0; d < s->ndim; d++) {
        s->elements *= s->shape[d];
    }
    s->n_ranks = 1;
    uint32_t step = 1;
    for (uint32_t a = s->mesh_ndim; a-- > 0;) {
        s->n_ranks *= s->sizes[a];
        s->strides[a] = step;
        step *= s->sizes[a];
    }
    assert_true(settle(s));
    check_rank_set(s);
    check_pieces(s);
    check_every_element(s);
    check_touch(s);
    check_tiling(s);
    end_scene(s);
}

static void known_bad_shapes_are_cut_right(void **state)
{
    (void)state;
    random_begin(0);
    scene f124 = {.ndim = 2, .shape = {7, 3}, .mesh_ndim = 1, .sizes = {4}, .n_splits = 1};
    check_fixed(&f124);
    scene f125 = {.ndim = 2, .shape = {8, 128}, .mesh_ndim = 1, .sizes = {32}, .n_splits = 1};
    check_fixed(&f125);
    f125 = (scene){.ndim = 2, .shape = {8, 128}, .mesh_ndim = 1, .sizes = {32}, .n_splits = 1, .splits = {{1}}};
    check_fixed(&f125);
    scene f127 = {.ndim = 1, .shape = {11}, .mesh_ndim = 2, .sizes = {2, 2}, .n_splits = 2, .splits = {{0, 0}, {0, 1}}};
    check_fixed(&f127);
    f127 =
        (scene){.ndim = 1, .shape = {11}, .mesh_ndim = 2, .sizes = {2, 2}, .n_splits = 2, .splits = {{0, 1}, {0, 0}}};
    check_fixed(&f127);
    scene f130 = {.ndim = 2, .shape = {7, 143}, .mesh_ndim = 1, .sizes = {16}, .flat_length = 1001};
    check_fixed(&f130);
}

static void nested_uneven_splits_are_cut_right(void **state)
{
    (void)state;
    random_begin(1);
    for (uint64_t n = 1; n <= 17; n++) {
        for (uint32_t p = 1; p <= 5; p++) {
            for (uint32_t q = 1; q <= 5; q++) {
                for (uint32_t modes = 0; modes < 4; modes++) {
                    scene s = {.ndim = 1,
                               .shape = {n},
                               .mesh_ndim = 2,
                               .sizes = {p, q},
                               .n_splits = 2,
                               .splits = {{0, 0, 0, modes & 1}, {0, 1, 0, modes >> 1}}};
                    check_fixed(&s);
                }
            }
        }
    }
}

/* F131: more ranks than elements. The model is too slow for 768 ranks. */
static void more_ranks_than_elements(void **state)
{
    (void)state;
    for (int flat = 0; flat < 2; flat++) {
        uint32_t sizes[] = {768};
        lg_split even = {0, 0, 0, LG_SPLIT_EVEN};
        lg_layout_desc d = LG_LAYOUT_DESC_INIT;
        d.mesh_ndim = 1, d.mesh_sizes = sizes;
        d.n_splits = flat ? 0 : 1, d.splits = &even, d.flat_length = flat ? 100 : 0;
        lg_layout *l = NULL, *r = NULL;
        lg_error err = LG_ERROR_INIT;
        uint64_t shape[] = {100};
        lg__tensor_desc t = {"w", LG_GROUP_MODEL, LG_F32, 1, shape, 0};
        assert_int_equal(lg_layout_create(&d, &l, &err), LG_OK);
        assert_int_equal(lg__layout_resolve(l, &t, &r, &err), LG_OK);
        for (uint32_t rank = 0; rank < 768; rank++) {
            lg__piece *p = NULL;
            size_t n = 9;
            assert_int_equal(lg__layout_written(r, &t, rank, &p, &n, &err), LG_OK);
            assert_int_equal(n, rank < 100);
            if (n > 0) {
                assert_int_equal(p->box.offset[0], rank);
                assert_int_equal(p->box.size[0], 1);
            }
            lg__free(p);
        }
        lg_layout_free(l);
        lg_layout_free(r);
    }
}

/* ----------------------------------------------------------------------- runs */

typedef struct run_walk {
    uint64_t box_bits[MAX_ELEMENTS];
    int64_t mem_bits[MAX_ELEMENTS];
    size_t n, at;
    uint64_t bits;
    bool any;
    uint64_t last_box;
    int64_t last_mem;
} run_walk;

/* Takes the next run's worth of elements off the model's list. */
static lg_status match_run(uint64_t box_byte, int64_t mem_byte, uint64_t bytes, void *arg, lg_error *err)
{
    (void)err;
    run_walk *w = arg;
    if (w->any && w->last_box == box_byte && w->last_mem == mem_byte) {
        fail_msg("seed %llu case %llu: two runs that are one", (unsigned long long)seed_of_run,
                 (unsigned long long)seed_of_case);
    }
    w->any = true;
    w->last_box = box_byte + bytes;
    w->last_mem = mem_byte + (int64_t)bytes;
    for (uint64_t bit = 0; bit < bytes * 8; bit += w->bits, w->at++) {
        if (w->at == w->n || w->box_bits[w->at] != box_byte * 8 + bit ||
            w->mem_bits[w->at] != mem_byte * 8 + (int64_t)bit) {
            fail_msg("seed %llu case %llu: element %zu is copied from elsewhere", (unsigned long long)seed_of_run,
                     (unsigned long long)seed_of_case, w->at);
        }
    }
    return LG_OK;
}

static void runs_copy_what_the_model_copies(void **state)
{
    (void)state;
    static run_walk w;
    static const lg_dtype dtypes[] = {LG_U8, LG_F16, LG_F32, LG_C64, LG_F4, LG_F6_E2M3};
    size_t sub_byte = 0, refused = 0, strided = 0;
    const uint64_t cases = in_brief() ? 600 : 6000;
    for (uint64_t i = 0; i < cases; i++) {
        random_begin(1000000 + i);
        lg_dtype dtype = dtypes[below(6)];
        bool small = lg_dtype_bits(dtype) < 8;
        uint32_t ndim = below(DIMS + 1);
        lg__region box = {.ndim = ndim}, part = {.ndim = ndim};
        uint64_t origin[DIMS], extent[DIMS];
        int64_t strides[DIMS];
        bool packed = one_in(3);
        int64_t step = small ? 1 : (int64_t)lg_dtype_bits(dtype) / 8;
        for (uint32_t d = ndim; d-- > 0;) {
            uint32_t scale = small && d + 1 == ndim && !one_in(4) ? 4 : 1;
            box.offset[d] = below(5) * scale;
            box.size[d] = (1 + below(5)) * scale;
            uint64_t from = one_in(2) ? 0 : below((uint32_t)box.size[d] / scale) * scale;
            part.offset[d] = box.offset[d] + from;
            part.size[d] = one_in(2) ? box.size[d] - from : below((uint32_t)(box.size[d] - from) / scale + 1) * scale;
            origin[d] = part.offset[d] - (one_in(2) ? 0 : below((uint32_t)part.offset[d] / scale + 1) * scale);
            extent[d] = part.offset[d] + part.size[d] - origin[d] + (one_in(2) ? 0 : below(3) * scale);
            strides[d] = step;
            step *= small && d + 1 == ndim ? (int64_t)(extent[d] * lg_dtype_bits(dtype) / 8) : (int64_t)extent[d];
            if (!(small && d + 1 == ndim)) {
                strides[d] = one_in(6) ? 0 : one_in(4) ? -strides[d] : one_in(4) ? (int64_t)below(50) : strides[d];
            }
        }
        /* The model: one element after the other. */
        uint64_t bits = lg_dtype_bits(dtype), count = lg__region_elements(&part);
        w = (run_walk){.bits = bits};
        for (uint64_t e = 0; e < count; e++) {
            uint64_t rest = e, at_box = 0, box_step = 1;
            int64_t at_mem = 0, mem_step = (int64_t)bits;
            for (uint32_t d = ndim; d-- > 0;) {
                uint64_t x = part.offset[d] + rest % part.size[d];
                rest /= part.size[d];
                at_box += (x - box.offset[d]) * box_step;
                box_step *= box.size[d];
                int64_t stride = packed || (small && d + 1 == ndim) ? mem_step : strides[d] * 8;
                at_mem += (int64_t)(x - origin[d]) * stride;
                mem_step *= (int64_t)extent[d];
            }
            w.box_bits[w.n] = at_box * bits;
            w.mem_bits[w.n++] = at_mem;
        }
        /* Whether every longest run is whole bytes. */
        bool whole = true;
        for (size_t e = 0; e < w.n; e++) {
            bool joined = e > 0 && w.box_bits[e] == w.box_bits[e - 1] + bits &&
                          w.mem_bits[e] == w.mem_bits[e - 1] + (int64_t)bits;
            whole &= joined || (w.box_bits[e] % 8 == 0 && w.mem_bits[e] % 8 == 0 &&
                                (e == 0 || (w.box_bits[e - 1] + bits) % 8 == 0));
        }
        whole &= w.n == 0 || (w.box_bits[w.n - 1] + bits) % 8 == 0;
        lg__run_walk walk = {dtype, &box, &part, origin, extent, packed ? NULL : strides};
        lg_error err = LG_ERROR_INIT;
        lg_status st = lg__region_runs(&walk, match_run, &w, &err);
        if (st != (whole ? LG_OK : LG_ERR_UNSUPPORTED) || (whole && w.at != w.n)) {
            fail_msg("seed %llu case %llu: status %d after %zu of %zu elements: %s", (unsigned long long)seed_of_run,
                     (unsigned long long)seed_of_case, (int)st, w.at, w.n, err.message);
        }
        sub_byte += small && whole && w.n > 0;
        refused += !whole;
        strided += !packed;
    }
    assert_true(sub_byte > cases / 20 && refused > cases / 60 && strided > cases / 6);
}

static void flat_cuts_follow_the_model(void **state)
{
    (void)state;
    const uint64_t cases = in_brief() ? 2000 : 20000;
    for (uint64_t i = 0; i < cases; i++) {
        scene s = {.n_ranks = 1};
        random_begin(2000000 + i);
        random_shape(&s);
        uint32_t begin = below((uint32_t)s.elements + 1), end = begin + below((uint32_t)s.elements - begin + 1);
        lg__region boxes[LG__MAX_FLAT_BOXES], want;
        size_t n = lg__region_cut_flat(s.ndim, s.shape, begin, end, boxes), b = 0;
        CHECK(&s, n <= (s.ndim == 0 ? 1 : 2 * s.ndim - 1));
        for (uint64_t x = begin; x < end; b++) {
            x += model_flat_box(&s, x, end, &want);
            CHECK(&s, b < n && same_region(&boxes[b], &want));
        }
        CHECK(&s, b == n);
    }
}

int main(void)
{
    seed_of_run = number_from("LASTGOOD_SEED", 20250101);
    printf("# LASTGOOD_SEED=%llu\n", (unsigned long long)seed_of_run);
    const struct CMUnitTest tests[] = {
        TEST("K08: every element is written exactly once, found again, and the tiling proof agrees",
             layouts_do_what_the_model_says),
        TEST("K08: shapes that others cut wrong (F124, F125, F127, F130)", known_bad_shapes_are_cut_right),
        TEST("K08: nested uneven splits (F128)", nested_uneven_splits_are_cut_right),
        TEST("K08: more ranks than elements (F131)", more_ranks_than_elements),
        TEST("K12: runs copy every element from its place, with any strides and sub-byte dtypes",
             runs_copy_what_the_model_copies),
        TEST("K08: flat cuts follow the rule", flat_cuts_follow_the_model),
    };
    return cmocka_run_group_tests_name("geometry", tests, NULL, NULL);
}
