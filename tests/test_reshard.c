/* SPDX-License-Identifier: Apache-2.0 */

/* The whole library against a naive model: random tensors under random layouts
 * are saved by N ranks and loaded by M ranks under other layouts, into strided
 * memory and by random regions, and every byte is compared.
 *
 * The model knows nothing of the library's geometry: it applies splits to plain
 * lists of indices and gathers element by element. LASTGOOD_SEED chooses the
 * seed, LASTGOOD_ROUNDS how many saves are made. */

#include "support/environment.h"
#include "support/ranks.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MAX_DIMS 4
#define MAX_ELEMENTS 4096
#define TENSORS 24
#define MAX_WORLD 8
#define MAX_BOXES 12

/* ------------------------------------------------------------ random numbers */

static lg_rng rng;

static uint64_t below(uint64_t n) { return n == 0 ? 0 : lg_rng_u64(&rng) % n; }
static bool chance(unsigned percent) { return below(100) < percent; }

/* ---------------------------------------------------------- the naive model */

typedef enum place { PLACE_SPLIT, PLACE_FLAT, PLACE_BOXES, PLACE_UNDECLARED } place;

typedef struct how { /* how a tensor is laid out over a world */
    place place;
    uint32_t axes, sizes[3], strides[3], origin, ranks[MAX_WORLD], n_ranks;
    bool explicit_ranks;
    uint32_t n_splits;
    lg_split splits[6];
    uint64_t flat_length, flat_offset;
    int32_t flat_axis;
    uint32_t writers;
    size_t n_boxes;
    uint64_t box_offset[MAX_BOXES][MAX_DIMS], box_size[MAX_BOXES][MAX_DIMS];
    uint32_t box_rank[MAX_BOXES];
    lg_layout *layout;
} how;

typedef struct subject {
    char name[64];
    lg_dtype dtype;
    uint32_t ndim;
    uint64_t shape[MAX_DIMS]; /* as the library sees it */
    uint64_t cells[MAX_DIMS]; /* the same in addressable cells: the last dimension of sub-byte dtypes in bytes */
    size_t cell_bytes;
    size_t n_cells;
    unsigned char *bytes; /* packed row-major */
    how saved;
} subject;

static uint64_t product(const uint64_t *v, uint32_t n)
{
    uint64_t p = 1;
    for (uint32_t i = 0; i < n; i++) {
        p *= v[i];
    }
    return p;
}

static uint32_t rank_at(const how *h, uint32_t index)
{
    if (h->explicit_ranks) {
        return h->ranks[index];
    }
    uint32_t rank = h->origin, rest = index;
    for (uint32_t a = h->axes; a-- > 0;) {
        rank += rest % h->sizes[a] * h->strides[a];
        rest /= h->sizes[a];
    }
    return rank;
}

static bool index_of(const how *h, uint32_t rank, uint32_t *index)
{
    for (uint32_t i = 0; i < h->n_ranks; i++) {
        if (rank_at(h, i) == rank) {
            *index = i;
            return true;
        }
    }
    return false;
}

static uint32_t coordinate(const how *h, uint32_t index, uint32_t axis)
{
    for (uint32_t a = h->axes; a-- > 0;) {
        if (a == axis) {
            return index % h->sizes[a];
        }
        index /= h->sizes[a];
    }
    return 0;
}

/* One dimension's indices on one rank, in order, as a list of intervals whose
 * members are written out. */
typedef struct indices {
    uint64_t at[MAX_ELEMENTS];
    size_t interval_end[256];
    size_t n_intervals;
    size_t n;
} indices;

static void piece_of(uint64_t n, uint32_t pieces, uint32_t i, lg_split_mode mode, uint64_t *begin, uint64_t *end)
{
    uint64_t from = 0;
    for (uint32_t k = 0;; k++) {
        uint64_t size;
        if (mode == LG_SPLIT_CEIL) {
            uint64_t chunk = n / pieces + (n % pieces != 0);
            size = from + chunk <= n ? chunk : n - from;
        } else {
            size = n / pieces + (k < n % pieces);
        }
        if (k == i) {
            *begin = from;
            *end = from + size;
            return;
        }
        from += size;
    }
}

static void refine(indices *x, uint32_t pieces, int32_t only, lg_split_mode mode)
{
    static _Thread_local indices y;
    y.n = y.n_intervals = 0;
    size_t from = 0;
    for (size_t v = 0; v < x->n_intervals; v++) {
        uint64_t n = x->interval_end[v] - from;
        for (uint32_t p = 0; p < pieces; p++) {
            if (only >= 0 && p != (uint32_t)only) {
                continue;
            }
            uint64_t begin, end;
            piece_of(n, pieces, p, mode, &begin, &end);
            for (uint64_t i = begin; i < end; i++) {
                y.at[y.n++] = x->at[from + i];
            }
            if (end > begin) {
                y.interval_end[y.n_intervals++] = y.n;
            }
        }
        from = x->interval_end[v];
    }
    *x = y;
}

/* The part of `rank`: shape and cells, gathered from the whole. NULL if it has
 * none in this layout. cells in units of cell_bytes. */
static unsigned char *part_of(const subject *s, const how *h, uint32_t rank, uint64_t *local)
{
    static _Thread_local indices dims[MAX_DIMS];
    uint32_t index;
    if (!index_of(h, rank, &index)) {
        return NULL;
    }
    for (uint32_t d = 0; d < s->ndim; d++) {
        dims[d].n = s->cells[d];
        for (uint64_t i = 0; i < s->cells[d]; i++) {
            dims[d].at[i] = i;
        }
        dims[d].interval_end[0] = dims[d].n;
        dims[d].n_intervals = dims[d].n > 0;
    }
    for (uint32_t k = 0; k < h->n_splits; k++) {
        const lg_split *split = &h->splits[k];
        if (split->axis == LG_NO_AXIS) {
            refine(&dims[split->dim], split->pieces, -1, split->mode);
        } else {
            refine(&dims[split->dim], h->sizes[split->axis], (int32_t)coordinate(h, index, (uint32_t)split->axis),
                   split->mode);
        }
    }
    size_t n = 1;
    for (uint32_t d = 0; d < s->ndim; d++) {
        local[d] = dims[d].n;
        n *= dims[d].n;
    }
    unsigned char *out = malloc(n * s->cell_bytes + 1);
    uint64_t at[MAX_DIMS] = {0};
    for (size_t i = 0; i < n; i++) {
        uint64_t position = 0;
        for (uint32_t d = 0; d < s->ndim; d++) {
            position = position * s->cells[d] + dims[d].at[at[d]];
        }
        memcpy(out + i * s->cell_bytes, s->bytes + position * s->cell_bytes, s->cell_bytes);
        for (uint32_t d = s->ndim; d-- > 0;) {
            if (++at[d] < local[d]) {
                break;
            }
            at[d] = 0;
        }
    }
    return out;
}

/* The rank's range of a flat layout within the tensor. */
static bool flat_part(const subject *s, const how *h, uint32_t rank, uint64_t *begin, uint64_t *end)
{
    uint32_t index;
    if (!index_of(h, rank, &index)) {
        return false;
    }
    uint32_t c = coordinate(h, index, (uint32_t)h->flat_axis);
    uint64_t from, to;
    piece_of(h->flat_length, h->sizes[h->flat_axis], c, LG_SPLIT_CEIL, &from, &to);
    uint64_t first = h->flat_offset, last = h->flat_offset + s->n_cells;
    from = from < first ? first : from;
    to = to > last ? last : to;
    *begin = from < to ? from - first : 0;
    *end = from < to ? to - first : 0;
    return true;
}

/* ----------------------------------------------------------- random subjects */

static void random_mesh(how *h, uint32_t world)
{
    uint32_t left = 1 + (uint32_t)below(world);
    h->axes = 1 + (uint32_t)below(3);
    h->n_ranks = 1;
    for (uint32_t a = 0; a < h->axes; a++) {
        h->sizes[a] = 1 + (uint32_t)below(a + 1 == h->axes ? left : left < 3 ? left : 3);
        left /= h->sizes[a];
        h->n_ranks *= h->sizes[a];
    }
    uint32_t stride = 1;
    if (chance(50)) { /* row-major */
        for (uint32_t a = h->axes; a-- > 0;) {
            h->strides[a] = stride;
            stride *= h->sizes[a];
        }
    } else { /* column-major */
        for (uint32_t a = 0; a < h->axes; a++) {
            h->strides[a] = stride;
            stride *= h->sizes[a];
        }
    }
    h->origin = (uint32_t)below(world - h->n_ranks + 1);
    h->explicit_ranks = chance(25);
    if (h->explicit_ranks) {
        uint32_t all[MAX_WORLD];
        for (uint32_t i = 0; i < world; i++) {
            all[i] = i;
        }
        for (uint32_t i = world; i > 1; i--) {
            uint32_t k = (uint32_t)below(i), t = all[i - 1];
            all[i - 1] = all[k];
            all[k] = t;
        }
        memcpy(h->ranks, all, sizeof h->ranks);
    }
}

static bool sub_byte(lg_dtype t) { return lg_dtype_bits(t) % 8 != 0; }

static void make_layout(how *h)
{
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = h->axes;
    d.mesh_sizes = h->sizes;
    d.mesh_strides = h->strides;
    d.mesh_origin = h->origin;
    d.ranks = h->explicit_ranks ? h->ranks : NULL;
    d.n_splits = h->n_splits;
    d.splits = h->splits;
    d.flat_length = h->place == PLACE_FLAT ? h->flat_length : 0;
    d.flat_axis = h->flat_axis;
    d.writers = h->writers;
    lg_error err = LG_ERROR_INIT;
    if (lg_layout_create(&d, &h->layout, &err) != LG_OK) {
        fail_msg("layout: %s", err.message);
    }
}

static void random_split(const subject *s, how *h, uint32_t world)
{
    h->place = PLACE_SPLIT;
    random_mesh(h, world);
    uint32_t dims = sub_byte(s->dtype) && s->ndim > 0 ? s->ndim - 1 : s->ndim;
    uint32_t holders = 1;
    for (uint32_t a = 0; a < h->axes; a++) {
        if (dims == 0 || chance(25)) {
            holders *= h->sizes[a];
            continue;
        }
        uint32_t dim = (uint32_t)below(dims);
        lg_split_mode mode = chance(50) ? LG_SPLIT_CEIL : LG_SPLIT_EVEN;
        if (chance(20)) {
            h->splits[h->n_splits++] = (lg_split){dim, LG_NO_AXIS, 1 + (uint32_t)below(3), mode};
        }
        h->splits[h->n_splits++] = (lg_split){dim, (int32_t)a, 0, mode};
    }
    h->writers = chance(50) ? 0 : 1 + (uint32_t)below(holders);
    make_layout(h);
}

static void random_flat(const subject *s, how *h, uint32_t world)
{
    h->place = PLACE_FLAT;
    random_mesh(h, world);
    h->flat_axis = (int32_t)below(h->axes);
    h->flat_offset = below(20);
    h->flat_length = h->flat_offset + s->n_cells + below(20) + 1;
    uint32_t holders = h->n_ranks / h->sizes[h->flat_axis];
    h->writers = chance(50) ? 0 : 1 + (uint32_t)below(holders);
    make_layout(h);
}

/* Boxes that follow no rule: the tensor is cut in two again and again. */
static void random_boxes(const subject *s, how *h, uint32_t world)
{
    h->place = PLACE_BOXES;
    h->n_boxes = 1;
    for (uint32_t d = 0; d < s->ndim; d++) {
        h->box_offset[0][d] = 0;
        h->box_size[0][d] = s->shape[d];
    }
    uint32_t dims = sub_byte(s->dtype) && s->ndim > 0 ? s->ndim - 1 : s->ndim;
    while (dims > 0 && h->n_boxes < MAX_BOXES && chance(85)) {
        size_t b = below(h->n_boxes);
        uint32_t d = (uint32_t)below(dims);
        if (h->box_size[b][d] < 2) {
            continue;
        }
        size_t c = h->n_boxes++;
        uint64_t cut = 1 + below(h->box_size[b][d] - 1);
        memcpy(h->box_offset[c], h->box_offset[b], sizeof h->box_offset[c]);
        memcpy(h->box_size[c], h->box_size[b], sizeof h->box_size[c]);
        h->box_offset[c][d] += cut;
        h->box_size[c][d] -= cut;
        h->box_size[b][d] = cut;
    }
    for (size_t b = 0; b < h->n_boxes; b++) {
        h->box_rank[b] = (uint32_t)below(world);
    }
}

static void random_how(const subject *s, how *h, uint32_t world, bool for_saving)
{
    *h = (how){0};
    unsigned kind = (unsigned)below(100);
    if (for_saving && kind < 15) {
        h->place = PLACE_UNDECLARED;
    } else if (for_saving && kind < 35 && s->n_cells > 0 && !sub_byte(s->dtype)) {
        random_boxes(s, h, world);
    } else if (kind < 60 && !sub_byte(s->dtype)) {
        random_flat(s, h, world);
    } else {
        random_split(s, h, world);
    }
}

static void how_free(how *h)
{
    lg_layout_free(h->layout);
    h->layout = NULL;
}

static void random_subject(subject *s, size_t number, uint32_t world)
{
    *s = (subject){0};
    snprintf(s->name, sizeof s->name, chance(10) ? "größe/%zu.\"w\"" : "layer.%zu.weight", number);
    s->dtype = (lg_dtype)below(LG_DTYPE_COUNT);
    s->ndim = (uint32_t)below(MAX_DIMS + 1);
    for (uint32_t d = 0; d < s->ndim; d++) {
        s->shape[d] = chance(4) ? 0 : chance(15) ? 1 : 1 + below(9);
    }
    unsigned bits = lg_dtype_bits(s->dtype);
    if (bits % 8 != 0) { /* whole bytes in the last dimension */
        s->ndim = s->ndim == 0 ? 1 : s->ndim;
        s->shape[s->ndim - 1] = 4 * (1 + below(4));
    }
    memcpy(s->cells, s->shape, sizeof s->cells);
    s->cell_bytes = bits / 8;
    if (bits % 8 != 0) {
        s->cells[s->ndim - 1] = s->shape[s->ndim - 1] * bits / 8;
        s->cell_bytes = 1;
    }
    s->n_cells = product(s->cells, s->ndim);
    assert_true(s->n_cells <= MAX_ELEMENTS * 4);
    s->bytes = malloc(s->n_cells * s->cell_bytes + 1);
    for (size_t i = 0; i < s->n_cells * s->cell_bytes; i++) {
        s->bytes[i] = (unsigned char)lg_rng_u32(&rng);
    }
    random_how(s, &s->saved, world, true);
}

/* ------------------------------------------------------------------- saving */

typedef struct scene {
    subject *subjects;
    size_t n;
    uint64_t step;
    /* loading */
    uint32_t world;
    how (*wanted)[MAX_WORLD]; /* one for each subject; same on all ranks: index 0 */
    unsigned char *scrambled[MAX_WORLD][TENSORS];
} scene;

typedef struct keep { /* memory that must live until the commit */
    void *block[4 * TENSORS + TENSORS * MAX_BOXES];
    size_t n;
} keep;

static void *hold(keep *k, void *p)
{
    k->block[k->n++] = p;
    return p;
}

static void keep_free(keep *k)
{
    for (size_t i = 0; i < k->n; i++) {
        free(k->block[i]);
    }
}

static lg_status add_subject(lg_save *save, const subject *s, uint32_t rank, keep *mem, lg_error *err)
{
    const how *h = &s->saved;
    lg_tensor t = LG_TENSOR_INIT;
    t.name = s->name, t.dtype = s->dtype, t.ndim = s->ndim, t.shape = s->shape;
    t.group = s->name[0] == 'l' ? LG_GROUP_MODEL : LG_GROUP_OPTIM;
    t.layout = h->layout;
    t.flat_offset = h->place == PLACE_FLAT ? h->flat_offset : 0;
    uint32_t index;
    if ((h->place == PLACE_SPLIT || h->place == PLACE_FLAT) && !index_of(h, rank, &index)) {
        return LG_OK; /* this rank knows nothing of it */
    }
    if (h->place == PLACE_UNDECLARED) {
        t.data = s->bytes;
        return lg_save_tensor(save, &t, err);
    }
    if (h->place == PLACE_SPLIT) {
        uint64_t local[MAX_DIMS];
        t.data = hold(mem, part_of(s, h, rank, local));
        return lg_save_tensor(save, &t, err);
    }
    if (h->place == PLACE_FLAT) {
        uint64_t begin, end;
        flat_part(s, h, rank, &begin, &end);
        unsigned char *p = hold(mem, malloc((end - begin) * s->cell_bytes + 1));
        memcpy(p, s->bytes + begin * s->cell_bytes, (end - begin) * s->cell_bytes);
        t.data = p;
        return lg_save_tensor(save, &t, err);
    }
    /* boxes: straight out of the whole tensor, strided */
    lg_box boxes[MAX_BOXES];
    static _Thread_local int64_t strides[MAX_DIMS];
    int64_t stride = (int64_t)s->cell_bytes;
    for (uint32_t d = s->ndim; d-- > 0;) {
        strides[d] = sub_byte(s->dtype) && d + 1 == s->ndim ? 1 : stride;
        stride *= (int64_t)s->cells[d];
    }
    size_t n = 0;
    for (size_t b = 0; b < h->n_boxes; b++) {
        if (h->box_rank[b] != rank) {
            continue;
        }
        int64_t at = 0;
        for (uint32_t d = 0; d < s->ndim; d++) {
            at += (int64_t)h->box_offset[b][d] * strides[d];
        }
        boxes[n++] = (lg_box){h->box_offset[b], h->box_size[b], s->bytes + at, strides};
    }
    if (n == 0) {
        return LG_OK;
    }
    t.boxes = boxes;
    t.n_boxes = n;
    return lg_save_tensor(save, &t, err);
}

static void save_scene(rank_env *env)
{
    scene *sc = env->arg;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.block_bytes = 4096;
    o.deadline_ms = 60000;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    lg_save *save;
    RANK_TRY(env, lg_save_begin(s, sc->step, NULL, &save, &env->err));
    keep mem = {0};
    for (size_t i = 0; i < sc->n; i++) {
        RANK_TRY(env, add_subject(save, &sc->subjects[i], env->rank, &mem, &env->err));
    }
    env->status = lg_save_commit(save, NULL, &env->err);
    keep_free(&mem);
    lg_session_close(s, NULL);
}

/* ------------------------------------------------------------------ loading */

/* Loads into memory whose dimensions are permuted and padded, and compares. */
static const char *load_strided(lg_checkpoint *c, const subject *s, const uint64_t *offset, const uint64_t *extent,
                                lg_error *err)
{
    size_t cells = product(extent, s->ndim);
    int64_t strides[MAX_DIMS] = {0};
    int64_t size = (int64_t)s->cell_bytes;
    bool sub = sub_byte(s->dtype);
    uint64_t cell_extent[MAX_DIMS], cell_offset[MAX_DIMS];
    for (uint32_t d = 0; d < s->ndim; d++) {
        bool packed = sub && d + 1 == s->ndim;
        cell_extent[d] = packed ? s->cells[d] : extent[d];
        cell_offset[d] = packed ? 0 : offset[d];
    }
    cells = product(cell_extent, s->ndim);
    uint32_t order[MAX_DIMS] = {0};
    for (uint32_t d = 0; d < s->ndim; d++) {
        order[d] = s->ndim - 1 - d;
    }
    if (!sub && s->ndim > 1 && chance(50)) {
        uint32_t k = (uint32_t)below(s->ndim), t = order[0];
        order[0] = order[k];
        order[k] = t;
    }
    for (uint32_t i = 0; i < s->ndim; i++) {
        strides[order[i]] = size;
        size *= (int64_t)cell_extent[order[i]] + (sub || chance(70) ? 0 : 1);
    }
    unsigned char *memory = malloc((size_t)size + 1), *base = memory;
    for (uint32_t d = 0; d < s->ndim; d++) {
        if (!sub && cell_extent[d] > 0 && cells > 0 && chance(20)) { /* backwards */
            base += strides[d] * (int64_t)(cell_extent[d] - 1);
            strides[d] = -strides[d];
        }
    }
    lg_target t = LG_TARGET_INIT;
    t.name = s->name, t.dtype = s->dtype, t.ndim = s->ndim, t.shape = s->shape;
    t.offset = offset, t.extent = extent, t.data = base, t.strides = strides;
    lg_load *load;
    const char *wrong = NULL;
    if (lg_load_begin(c, 0, &load, err) != LG_OK) {
        free(memory);
        return err->message;
    }
    if (lg_load_tensor(load, &t, err) != LG_OK || lg_load_run(load, err) != LG_OK) {
        wrong = err->message;
    }
    uint64_t at[MAX_DIMS] = {0};
    for (size_t i = 0; wrong == NULL && i < cells; i++) {
        uint64_t position = 0;
        int64_t where = 0;
        for (uint32_t d = 0; d < s->ndim; d++) {
            position = position * s->cells[d] + cell_offset[d] + at[d];
            where += strides[d] * (int64_t)at[d];
        }
        if (memcmp(base + where, s->bytes + position * s->cell_bytes, s->cell_bytes) != 0) {
            wrong = "a region has other bytes than were saved";
        }
        for (uint32_t d = s->ndim; d-- > 0;) {
            if (++at[d] < cell_extent[d]) {
                break;
            }
            at[d] = 0;
        }
    }
    lg_load_free(load);
    free(memory);
    return wrong;
}

static const char *load_part(lg_load *load, const subject *s, const how *h, uint32_t rank, unsigned char **got,
                             unsigned char **want, size_t *bytes, lg_error *err)
{
    lg_target t = LG_TARGET_INIT;
    t.name = s->name, t.dtype = s->dtype, t.ndim = s->ndim, t.shape = s->shape;
    t.layout = h->layout, t.rank = rank;
    t.flat_offset = h->place == PLACE_FLAT ? h->flat_offset : 0;
    if (h->place == PLACE_FLAT) {
        uint64_t begin, end;
        flat_part(s, h, rank, &begin, &end);
        *bytes = (end - begin) * s->cell_bytes;
        *want = malloc(*bytes + 1);
        memcpy(*want, s->bytes + begin * s->cell_bytes, *bytes);
    } else {
        uint64_t local[MAX_DIMS];
        *want = part_of(s, h, rank, local);
        *bytes = product(local, s->ndim) * s->cell_bytes;
    }
    *got = malloc(*bytes + 1);
    memset(*got, 0xA5, *bytes);
    t.data = *got;
    return lg_load_tensor(load, &t, err) == LG_OK ? NULL : err->message;
}

static uint64_t parts_checked, regions_checked;

/* For a failure's message. */
static void describe(const subject *s, const how *h, const char *what)
{
    static const char *const places[] = {"split", "flat", "boxes", "undeclared"};
    print_message("# %s %s %s [", what, s->name, lg_dtype_name(s->dtype));
    for (uint32_t d = 0; d < s->ndim; d++) {
        print_message("%" PRIu64 " ", s->shape[d]);
    }
    print_message("] %s mesh", places[h->place]);
    for (uint32_t a = 0; a < h->axes; a++) {
        print_message(" %u*%u", h->sizes[a], h->strides[a]);
    }
    print_message("+%u%s writers %u", h->origin, h->explicit_ranks ? " list" : "", h->writers);
    for (uint32_t k = 0; k < h->n_splits; k++) {
        print_message(" (dim %u axis %d pieces %u mode %d)", h->splits[k].dim, h->splits[k].axis, h->splits[k].pieces,
                      (int)h->splits[k].mode);
    }
    print_message(" flat %" PRIu64 "/%" PRIu64 " axis %d boxes %zu\n", h->flat_offset, h->flat_length, h->flat_axis,
                  h->n_boxes);
}

static const char *load_scene(lg_checkpoint *c, const scene *sc, uint32_t world, lg_error *err)
{
    static how wanted[TENSORS];
    for (size_t i = 0; i < sc->n; i++) {
        random_how(&sc->subjects[i], &wanted[i], world, false);
    }
    const char *wrong = NULL;
    for (uint32_t rank = 0; rank < world && wrong == NULL; rank++) {
        unsigned char *got[TENSORS] = {0}, *want[TENSORS] = {0};
        size_t bytes[TENSORS] = {0};
        lg_load *load;
        if (lg_load_begin(c, 0, &load, err) != LG_OK) {
            return err->message;
        }
        for (size_t i = 0; i < sc->n && wrong == NULL; i++) {
            uint32_t index;
            if (index_of(&wanted[i], rank, &index)) {
                wrong = load_part(load, &sc->subjects[i], &wanted[i], rank, &got[i], &want[i], &bytes[i], err);
            }
        }
        if (wrong == NULL && lg_load_run(load, err) != LG_OK) {
            wrong = err->message;
        }
        for (size_t i = 0; i < sc->n; i++) {
            if (wrong == NULL && got[i] != NULL) {
                parts_checked++;
                if (memcmp(got[i], want[i], bytes[i]) != 0) {
                    snprintf(err->message, sizeof err->message, "%s on rank %u has other bytes than were saved",
                             sc->subjects[i].name, rank);
                    wrong = err->message;
                    describe(&sc->subjects[i], &sc->subjects[i].saved, "saved");
                    describe(&sc->subjects[i], &wanted[i], "wanted");
                }
            }
            free(got[i]);
            free(want[i]);
        }
        lg_load_free(load);
    }
    for (size_t i = 0; i < sc->n && wrong == NULL; i++) {
        const subject *s = &sc->subjects[i];
        uint64_t offset[MAX_DIMS], extent[MAX_DIMS];
        for (uint32_t d = 0; d < s->ndim; d++) {
            offset[d] = below(s->shape[d] + 1);
            extent[d] = below(s->shape[d] - offset[d] + 1);
            if (sub_byte(s->dtype) && d + 1 == s->ndim) {
                offset[d] = 0;
                extent[d] = s->shape[d];
            }
        }
        regions_checked++;
        wrong = load_strided(c, s, offset, extent, err);
    }
    for (size_t i = 0; i < sc->n; i++) {
        how_free(&wanted[i]);
    }
    return wrong;
}

/* --------------------------------------------------------------------- tests */

static void k08_k12_random_layouts_saved_by_n_ranks_load_on_m_ranks_bit_for_bit(void **state)
{
    (void)state;
    uint64_t seed = number_from("LASTGOOD_SEED", 20261129);
    uint64_t rounds = number_from("LASTGOOD_ROUNDS", in_brief() ? 10 : 250);
    uint64_t tensors = 0;
    for (uint64_t round = 0; round < rounds; round++) {
        rng = (lg_rng){.seed = seed, .stream = round};
        uint32_t world = 1 + (uint32_t)below(MAX_WORLD);
        subject subjects[TENSORS];
        scene sc = {.subjects = subjects, .n = TENSORS, .step = round};
        for (size_t i = 0; i < TENSORS; i++) {
            random_subject(&subjects[i], i, world);
        }
        tensors += TENSORS;
        test_root root;
        root_make(&root, round % 10 == 0 ? ROOT_POSIX : ROOT_MEMORY);
        rank_env env[MAX_WORLD];
        run_ranks(world, root.store, save_scene, &sc, env);
        for (uint32_t r = 0; r < world; r++) {
            if (env[r].status != LG_OK && env[r].status != LG_ERR_COMM && env[r].status != LG_ERR_TIMEOUT) {
                fail_msg("seed %" PRIu64 " round %" PRIu64 ": save on rank %u: %s", seed, round, r, env[r].err.message);
            }
        }
        for (uint32_t r = 0; r < world; r++) {
            assert_int_equal(env[r].status, LG_OK);
        }
        lg_error err = LG_ERROR_INIT;
        lg_checkpoint *c;
        if (lg_checkpoint_open(root.path, &c, &err) != LG_OK) {
            fail_msg("seed %" PRIu64 " round %" PRIu64 ": %s", seed, round, err.message);
        }
        lg_verify_result verified;
        if (lg_verify(c, NULL, &verified, &err) != LG_OK) {
            fail_msg("seed %" PRIu64 " round %" PRIu64 ": verify: %s", seed, round, err.message);
        }
        for (int i = 0; i < 3; i++) {
            uint32_t m = 1 + (uint32_t)below(MAX_WORLD);
            const char *wrong = load_scene(c, &sc, m, &err);
            if (wrong != NULL) {
                fail_msg("seed %" PRIu64 " round %" PRIu64 ": %u ranks to %u: %s", seed, round, world, m, wrong);
            }
        }
        lg_checkpoint_close(c);
        root_drop(&root);
        for (size_t i = 0; i < TENSORS; i++) {
            how_free(&subjects[i].saved);
            free(subjects[i].bytes);
        }
    }
    print_message("# seed %" PRIu64 ": %" PRIu64 " tensors saved, %" PRIu64 " parts and %" PRIu64 " regions compared\n",
                  seed, tensors, parts_checked, regions_checked);
    assert_true(parts_checked > 50 * rounds && regions_checked == 3 * tensors);
}

/* ------------------------------------------------ holes, overlaps, wrong totals */

typedef struct bad_boxes {
    const char *what;
    const char *says;
    uint64_t offset[2][2], size[2][2];
} bad_boxes;

static void save_bad_boxes(rank_env *env)
{
    const bad_boxes *b = env->arg;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    lg_save *save;
    RANK_TRY(env, lg_save_begin(s, 1, NULL, &save, &env->err));
    static const float data[64] = {0};
    static const uint64_t shape[2] = {8, 4};
    lg_box box = {b->offset[env->rank], b->size[env->rank], data, NULL};
    lg_tensor t = LG_TENSOR_INIT;
    t.name = "bad.weight", t.ndim = 2, t.shape = shape, t.boxes = &box, t.n_boxes = 1;
    RANK_TRY(env, lg_save_tensor(save, &t, &env->err));
    env->status = lg_save_commit(save, NULL, &env->err);
    lg_session_close(s, NULL);
}

static void k08_holes_overlaps_and_wrong_totals_are_refused_by_name(void **state)
{
    (void)state;
    static const bad_boxes cases[] = {
        {"hole between", "bad.weight", {{0, 0}, {5, 0}}, {{4, 4}, {3, 4}}},
        {"hole at the end", "bad.weight", {{0, 0}, {4, 0}}, {{4, 4}, {3, 4}}},
        {"overlap", "bad.weight", {{0, 0}, {3, 0}}, {{4, 4}, {5, 4}}},
        {"twice", "bad.weight", {{0, 0}, {0, 0}}, {{8, 4}, {8, 4}}},
        {"overlap and hole with the right total", "bad.weight", {{0, 0}, {2, 0}}, {{4, 4}, {4, 4}}},
        {"columns missing", "bad.weight", {{0, 0}, {4, 0}}, {{4, 4}, {4, 3}}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_root root;
        root_make(&root, ROOT_MEMORY);
        rank_env env[2];
        run_ranks(2, root.store, save_bad_boxes, (void *)(uintptr_t)&cases[i], env);
        print_message("#   %s: %s\n", cases[i].what, env[0].err.message);
        for (int r = 0; r < 2; r++) {
            assert_int_equal(env[r].status, LG_ERR_COVERAGE);
            assert_non_null(strstr(env[r].err.message, cases[i].says));
        }
        char folders[2][64];
        assert_int_equal(root_folders(&root, folders, 2), 0);
        root_drop(&root);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k08_k12_random_layouts_saved_by_n_ranks_load_on_m_ranks_bit_for_bit),
        cmocka_unit_test(k08_holes_overlaps_and_wrong_totals_are_refused_by_name),
    };
    return cmocka_run_group_tests_name("reshard", tests, NULL, NULL);
}
