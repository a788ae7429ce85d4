/* SPDX-License-Identifier: Apache-2.0 */
#include "core/merge.h"
#include "base/json.h"
#include "base/mem.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct named { /* a row of a report */
    const lg__report_tensor *t;
    const lg__report *r;
} named;

typedef struct tied {
    const lg__report_alias *a;
    uint32_t rank;
} tied;

typedef struct merge {
    const lg__report *const *reports;
    uint32_t world;
    const lg__written *written;
    lg__manifest *m;
    lg__index by_layout; /* id → index in m->layouts */
    named *rows;         /* all tensor rows, sorted by name, then rank */
    size_t n_rows;
    tied *ties; /* all alias rows, sorted by alias, then rank */
    size_t n_ties;
    const lg_layout *last_layout; /* of the tensor before: most have the same */
    size_t last_at;
} merge;

/* ------------------------------------------------------------ whose reports */

static void differing(lg__buf *b, const char *what, const char *got, const char *want)
{
    if (strcmp(got, want) != 0) {
        lg__buf_fmt(b, "%s%s %s instead of %s", b->len > 0 ? ", " : "", what, got, want);
    }
}

static void differing_u64(lg__buf *b, const char *what, uint64_t got, uint64_t want)
{
    char x[24], y[24];
    snprintf(x, sizeof x, "%" PRIu64, got);
    snprintf(y, sizeof y, "%" PRIu64, want);
    differing(b, what, x, y);
}

static lg_status check_origin(const merge *g, uint32_t rank, lg_error *err)
{
    const lg__report *r = g->reports[rank];
    const lg__manifest *m = g->m;
    lg__buf b;
    lg__buf_init(&b, LG_ERROR_MESSAGE_MAX / 2);
    char got[48], want[48];
    snprintf(got, sizeof got, "%" PRIu64 ".%" PRIu64, r->generation.epoch, r->generation.serial);
    snprintf(want, sizeof want, "%" PRIu64 ".%" PRIu64, m->generation.epoch, m->generation.serial);
    differing_u64(&b, "step", r->step, m->step);
    differing(&b, "generation", got, want);
    differing(&b, "attempt", r->attempt, m->attempt);
    differing(&b, "run", r->run_id, m->run_id);
    differing_u64(&b, "world size", r->world, g->world);
    differing_u64(&b, "rank", r->rank, rank);
    lg_status status = LG_OK;
    if (b.failed || b.len > 0) {
        status = lg_error_set(err, LG_ERR_CONFLICT, "rank %" PRIu32 ": its report is from another attempt: %s", rank,
                              b.data != NULL ? b.data : "");
        err->rank = (int)rank;
    }
    lg__buf_free(&b);
    return status;
}

static lg_status add_rank(merge *g, uint32_t rank, lg_error *err)
{
    const lg__report *r = g->reports[rank];
    lg__rank_row *row = &g->m->ranks[rank];
    uint64_t *bytes = lg__arena_array(g->m->arena, r->n_files, sizeof *bytes);
    row->domain = lg__arena_strdup(g->m->arena, r->domain != NULL ? r->domain : "");
    if (bytes == NULL || row->domain == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0; i < r->n_files; i++) {
        const lg__report_file *f = &r->files[i];
        bool follows = (unsigned)f->group < LG_GROUP_COUNT && f->number == row->n_files[f->group] &&
                       (i == 0 || r->files[i - 1].group <= f->group);
        LG__RETURN_IF(!follows, err, LG_ERR_CONFLICT,
                      "rank %" PRIu32 ": its files of group %s are not numbered in order", rank,
                      lg_group_name(f->group));
        if (f->number == 0) {
            row->file_bytes[f->group] = bytes + i;
        }
        bytes[i] = f->bytes;
        row->n_files[f->group]++;
    }
    row->sums_bytes = g->written[rank].sums_bytes;
    memcpy(row->report, g->written[rank].report, sizeof row->report);
    return LG_OK;
}

/* --------------------------------------------------------------- collecting */

static lg_status add_layouts(merge *g, uint32_t rank, lg_error *err)
{
    const lg__report *r = g->reports[rank];
    lg__manifest *m = g->m;
    for (size_t i = 0; i < r->n_layouts; i++) {
        const lg_layout *l = r->layouts[i];
        uint32_t first = lg__layout_rank_at(l, 0);
        LG__RETURN_IF(first != rank, err, LG_ERR_CONFLICT,
                      "rank %" PRIu32 ": it reports a layout whose first rank is %" PRIu32, rank, first);
        size_t at;
        LG__RETURN_IF(lg__index_find(&g->by_layout, l->id, sizeof l->id, &at), err, LG_ERR_CONFLICT,
                      "rank %" PRIu32 ": it reports a layout twice", rank);
        LG__TRY(lg__index_add(&g->by_layout, l->id, sizeof l->id, m->n_layouts, err));
        m->layouts[m->n_layouts++] = lg__layout_ref(l);
    }
    return LG_OK;
}

static int by_tensor(const void *a, const void *b)
{
    const named *x = a, *y = b;
    int c = strcmp(x->t->name, y->t->name);
    return c != 0 ? c : x->r->rank < y->r->rank ? -1 : x->r->rank > y->r->rank;
}

static int by_alias(const void *a, const void *b)
{
    const tied *x = a, *y = b;
    int c = strcmp(x->a->alias, y->a->alias);
    return c != 0 ? c : x->rank < y->rank ? -1 : x->rank > y->rank;
}

/* Ranks name their tensors in order, so the rows of one rank alone are. */
static bool in_order(const merge *g)
{
    size_t i = 1;
    while (i < g->n_rows && by_tensor(&g->rows[i - 1], &g->rows[i]) < 0) {
        i++;
    }
    return i >= g->n_rows;
}

static lg_status collect(merge *g, lg_error *err)
{
    size_t layouts = 0;
    for (uint32_t r = 0; r < g->world; r++) {
        layouts += g->reports[r]->n_layouts;
        g->n_rows += g->reports[r]->n_tensors;
        g->n_ties += g->reports[r]->n_aliases;
    }
    g->m->layouts = lg__arena_array(g->m->arena, layouts, sizeof(lg_layout *));
    g->rows = lg__malloc(g->n_rows * sizeof *g->rows);
    g->ties = lg__malloc(g->n_ties * sizeof *g->ties);
    if (g->m->layouts == NULL || g->rows == NULL || g->ties == NULL) {
        return lg__nomem(err);
    }
    named *row = g->rows;
    tied *tie = g->ties;
    for (uint32_t r = 0; r < g->world; r++) {
        const lg__report *report = g->reports[r];
        for (size_t i = 0; i < report->n_tensors; i++) {
            const lg__report_tensor *t = &report->tensors[i];
            LG__RETURN_IF(t->layout != LG__IRREGULAR && t->layout >= report->n_layouts, err, LG_ERR_CONFLICT,
                          "rank %" PRIu32 ": tensor \"%s\" has a layout that its report lacks", r, t->name);
            *row++ = (named){t, report};
        }
        for (size_t i = 0; i < report->n_aliases; i++) {
            *tie++ = (tied){&report->aliases[i], r};
        }
        LG__TRY(add_layouts(g, r, err));
    }
    if (!in_order(g)) {
        qsort(g->rows, g->n_rows, sizeof *g->rows, by_tensor);
    }
    qsort(g->ties, g->n_ties, sizeof *g->ties, by_alias);
    return LG_OK;
}

/* The rows called `name`: *n of them, or NULL. */
static const named *find_rows(const merge *g, const char *name, size_t *n)
{
    size_t lo = 0, hi = g->n_rows;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference): collect() has set all of them */
        if (strcmp(g->rows[mid].t->name, name) < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    for (*n = 0; lo + *n < g->n_rows && strcmp(g->rows[lo + *n].t->name, name) == 0;) {
        ++*n;
    }
    return *n > 0 ? &g->rows[lo] : NULL;
}

/* ------------------------------------------------- one description for a name */

static void shape_text(lg__buf *b, uint32_t ndim, const uint64_t *shape)
{
    lg__buf_str(b, "[");
    for (uint32_t d = 0; d < ndim; d++) {
        lg__buf_fmt(b, "%s%" PRIu64, d > 0 ? ", " : "", shape[d]);
    }
    lg__buf_str(b, "]");
}

static const lg_layout *layout_of(const named *row)
{
    return row->t->layout == LG__IRREGULAR ? NULL : row->r->layouts[row->t->layout];
}

/* Same tensor, or says what is different. `place`: and in the same place. */
static lg_status check_same(const named *a, const named *b, bool place, lg_error *err)
{
    const lg__report_tensor *x = a->t, *y = b->t;
    bool same_shape = x->ndim == y->ndim;
    for (uint32_t d = 0; same_shape && d < x->ndim; d++) {
        same_shape = x->shape[d] == y->shape[d];
    }
    const lg_layout *k = layout_of(a), *l = layout_of(b);
    bool same_place = (k == NULL) == (l == NULL) && (k == NULL || memcmp(k->id, l->id, sizeof k->id) == 0) &&
                      x->flat_offset == y->flat_offset;
    if (x->group == y->group && x->dtype == y->dtype && same_shape && (same_place || !place)) {
        return LG_OK;
    }
    lg__buf b1;
    lg__buf_init(&b1, LG_ERROR_MESSAGE_MAX / 2);
    if (x->group != y->group) {
        lg__buf_fmt(&b1, "group %s and %s", lg_group_name(x->group), lg_group_name(y->group));
    }
    if (x->dtype != y->dtype) {
        lg__buf_fmt(&b1, "%sdtype %s and %s", b1.len > 0 ? ", " : "", lg_dtype_name(x->dtype), lg_dtype_name(y->dtype));
    }
    if (!same_shape) {
        lg__buf_fmt(&b1, "%sshape ", b1.len > 0 ? ", " : "");
        shape_text(&b1, x->ndim, x->shape);
        lg__buf_str(&b1, " and ");
        shape_text(&b1, y->ndim, y->shape);
    }
    if (!same_place && place) {
        lg__buf_fmt(&b1, "%sanother layout", b1.len > 0 ? ", " : "");
    }
    lg_status status;
    if (a->r->rank == b->r->rank) {
        status = lg_error_set(err, LG_ERR_CONFLICT, "rank %" PRIu32 ": \"%s\" and \"%s\" differ: %s", a->r->rank,
                              x->name, y->name, b1.data != NULL ? b1.data : "");
    } else {
        status = lg_error_set(err, LG_ERR_CONFLICT,
                              "two different tensors are called \"%s\", on ranks %" PRIu32 " and %" PRIu32 ": %s",
                              x->name, a->r->rank, b->r->rank, b1.data != NULL ? b1.data : "");
    }
    err->rank = (int)b->r->rank;
    lg__buf_free(&b1);
    return status;
}

/* Boxes of all ranks, which must tile the tensor. */
static lg_status gather_pieces(merge *g, const named *group, size_t n, lg__manifest_tensor *out, lg_error *err)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += group[i].t->n_boxes;
    }
    lg__stored_piece *pieces = lg__arena_array(g->m->arena, count, sizeof *pieces);
    lg__region *boxes = lg__malloc(count * sizeof *boxes);
    uint32_t *ranks = lg__malloc(count * sizeof *ranks);
    if (pieces == NULL || boxes == NULL || ranks == NULL) {
        lg__free(boxes);
        lg__free(ranks);
        return lg__nomem(err);
    }
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        for (size_t b = 0; b < group[i].t->n_boxes; b++, at++) {
            boxes[at] = group[i].t->boxes[b];
            ranks[at] = group[i].r->rank;
            pieces[at] = (lg__stored_piece){.rank = ranks[at], .number = (uint32_t)b, .box = boxes[at]};
        }
    }
    lg_status status = lg__region_check_tiling(out->name, out->ndim, out->shape, boxes, ranks, count, err);
    lg__free(boxes);
    lg__free(ranks);
    out->pieces = pieces;
    out->n_pieces = count;
    return status;
}

static lg_status add_tensor(merge *g, const named *group, size_t n, lg__manifest_tensor *out, lg_error *err)
{
    const lg__report_tensor *t = group[0].t;
    for (size_t i = 1; i < n; i++) {
        LG__TRY(check_same(&group[0], &group[i], true, err));
        LG__RETURN_IF(t->layout != LG__IRREGULAR || group[i].r->rank == group[i - 1].r->rank, err, LG_ERR_CONFLICT,
                      "tensor \"%s\" is reported twice by rank %" PRIu32, t->name, group[i].r->rank);
    }
    uint64_t *shape = lg__arena_array(g->m->arena, t->ndim, sizeof *shape);
    *out = (lg__manifest_tensor){.name = lg__arena_strdup(g->m->arena, t->name),
                                 .group = t->group,
                                 .dtype = t->dtype,
                                 .ndim = t->ndim,
                                 .shape = shape,
                                 .flat_offset = t->flat_offset,
                                 .layout = LG__IRREGULAR,
                                 .stored = true,
                                 .fingerprint = t->fingerprint};
    if (shape == NULL || out->name == NULL) {
        return lg__nomem(err);
    }
    if (t->ndim > 0) {
        memcpy(shape, t->shape, t->ndim * sizeof *shape);
    }
    if (t->layout == LG__IRREGULAR) {
        return gather_pieces(g, group, n, out, err);
    }
    const lg_layout *layout = layout_of(&group[0]);
    if (layout == g->last_layout) {
        out->layout = g->last_at;
        return LG_OK;
    }
    if (!lg__index_find(&g->by_layout, layout->id, sizeof layout->id, &out->layout)) {
        return lg_error_set(err, LG_ERR_INTERNAL, "the layout of tensor \"%s\" was not collected", t->name);
    }
    g->last_layout = layout;
    g->last_at = out->layout;
    return LG_OK;
}

static lg_status add_tensors(merge *g, lg_error *err)
{
    lg__manifest *m = g->m;
    m->tensors = lg__arena_array(m->arena, g->n_rows + g->n_ties, sizeof *m->tensors);
    if (m->tensors == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0, end; i < g->n_rows; i = end) {
        for (end = i + 1; end < g->n_rows && strcmp(g->rows[i].t->name, g->rows[end].t->name) == 0;) {
            end++;
        }
        /* NOLINTNEXTLINE(clang-analyzer-unix.Malloc): lg__merge frees rows and ties */
        LG__TRY(add_tensor(g, &g->rows[i], end - i, &m->tensors[m->n_tensors], err));
        m->n_tensors++;
    }
    return LG_OK;
}

/* ------------------------------------------------------------------ aliases */

static bool is_alias(const merge *g, const char *name)
{
    size_t lo = 0, hi = g->n_ties;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (strcmp(g->ties[mid].a->alias, name) < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo < g->n_ties && strcmp(g->ties[lo].a->alias, name) == 0;
}

static lg_status check_tie(const merge *g, const tied *tie, lg_error *err)
{
    const lg__report_alias *a = tie->a;
    size_t n_named, n_alias;
    LG__RETURN_IF(is_alias(g, a->name), err, LG_ERR_CONFLICT,
                  "alias \"%s\" on rank %" PRIu32 ": \"%s\" is an alias too", a->alias, tie->rank, a->name);
    const named *of = find_rows(g, a->name, &n_named), *stored = find_rows(g, a->alias, &n_alias);
    LG__RETURN_IF(of == NULL, err, LG_ERR_CONFLICT, "alias \"%s\" on rank %" PRIu32 ": there is no tensor \"%s\"",
                  a->alias, tie->rank, a->name);
    LG__RETURN_IF(a->stored && stored == NULL, err, LG_ERR_CONFLICT,
                  "alias \"%s\" on rank %" PRIu32 " is said to be stored, but no rank has it", a->alias, tie->rank);
    LG__RETURN_IF(!a->stored && stored != NULL, err, LG_ERR_CONFLICT,
                  "\"%s\" is an alias of \"%s\" on rank %" PRIu32 ", but a tensor of its own on rank %" PRIu32,
                  a->alias, a->name, tie->rank, stored->r->rank);
    return stored != NULL ? check_same(of, stored, false, err) : LG_OK;
}

static lg__manifest_tensor *find_made(const lg__manifest *m, size_t n, const char *name)
{
    size_t lo = 0, hi = n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = strcmp(m->tensors[mid].name, name);
        if (c == 0) {
            return &m->tensors[mid];
        }
        if (c < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return NULL;
}

static int by_name(const void *a, const void *b)
{
    const lg__manifest_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static lg_status add_aliases(merge *g, lg_error *err)
{
    lg__manifest *m = g->m;
    const size_t n = m->n_tensors;
    for (size_t i = 0; i < g->n_ties; i++) {
        const tied *tie = &g->ties[i];
        if (i > 0 && strcmp(tie[-1].a->alias, tie->a->alias) == 0) {
            LG__RETURN_IF(strcmp(tie[-1].a->name, tie->a->name) != 0, err, LG_ERR_CONFLICT,
                          "\"%s\" is an alias of \"%s\" on rank %" PRIu32 ", but of \"%s\" on rank %" PRIu32,
                          tie->a->alias, tie[-1].a->name, tie[-1].rank, tie->a->name, tie->rank);
            LG__RETURN_IF(tie[-1].a->stored != tie->a->stored, err, LG_ERR_CONFLICT,
                          "alias \"%s\" is stored by only one of ranks %" PRIu32 " and %" PRIu32, tie->a->alias,
                          tie[-1].rank, tie->rank);
            continue;
        }
        LG__TRY(check_tie(g, tie, err));
        lg__manifest_tensor *of = find_made(m, n, tie->a->name);
        lg__manifest_tensor *own = tie->a->stored ? find_made(m, n, tie->a->alias) : NULL;
        LG__RETURN_IF(of == NULL || (tie->a->stored && own == NULL), err, LG_ERR_INTERNAL,
                      "alias \"%s\" or its tensor \"%s\" was not merged", tie->a->alias, tie->a->name);
        if (own != NULL) {
            own->alias_of = of->name;
            continue;
        }
        lg__manifest_tensor *out = &m->tensors[m->n_tensors];
        *out = *of;
        out->name = lg__arena_strdup(m->arena, tie->a->alias);
        out->alias_of = of->name;
        out->stored = false;
        if (out->name == NULL) {
            return lg__nomem(err);
        }
        m->n_tensors++;
    }
    if (m->n_tensors > n) { /* they are in order but for those */
        qsort(m->tensors, m->n_tensors, sizeof *m->tensors, by_name);
    }
    return LG_OK;
}

/* -------------------------------------------------------------------- state */

/* The rank that first gave `key`. */
static uint32_t first_with(const merge *g, const char *key)
{
    uint32_t r = 0;
    while (r + 1 < g->world && json_object_get(g->reports[r]->state, key) == NULL) {
        r++;
    }
    return r;
}

static lg_status merge_state(merge *g, lg_error *err)
{
    if (g->m->state == NULL && (g->m->state = json_object()) == NULL) {
        return lg__nomem(err);
    }
    for (uint32_t r = 0; r < g->world; r++) {
        const char *key;
        json_t *value;
        json_object_foreach(g->reports[r]->state, key, value)
        {
            const json_t *old = json_object_get(g->m->state, key);
            if (old == NULL) {
                if (json_object_set(g->m->state, key, value) != 0) {
                    return lg__nomem(err);
                }
            } else if (!json_equal(old, value)) {
                lg_error_set(err, LG_ERR_CONFLICT,
                             "global state \"%s\" has two different values, on ranks %" PRIu32 " and %" PRIu32, key,
                             first_with(g, key), r);
                err->rank = (int)r;
                return LG_ERR_CONFLICT;
            }
        }
    }
    return LG_OK;
}

/* --------------------------------------------------------------------- merge */

static lg_status merge_all(merge *g, lg_error *err)
{
    g->m->ranks = lg__arena_array(g->m->arena, g->world, sizeof *g->m->ranks);
    if (g->m->ranks == NULL) {
        return lg__nomem(err);
    }
    for (uint32_t r = 0; r < g->world; r++) {
        LG__TRY(check_origin(g, r, err));
    }
    g->m->world = g->world;
    for (uint32_t r = 0; r < g->world; r++) {
        LG__TRY(add_rank(g, r, err));
    }
    LG__TRY(collect(g, err));
    LG__TRY(add_tensors(g, err));
    LG__TRY(add_aliases(g, err));
    LG__TRY(lg__merge_check_uses(g->reports, g->world, g->m, &g->by_layout, err));
    return merge_state(g, err);
}

lg_status lg__merge(const lg__report *const *reports, uint32_t world, const lg__written *written, lg__manifest *m,
                    lg_error *err)
{
    merge g = {.reports = reports, .world = world, .written = written, .m = m};
    lg_status status = merge_all(&g, err);
    lg__index_free(&g.by_layout);
    lg__free(g.rows);
    lg__free(g.ties);
    return status;
}
