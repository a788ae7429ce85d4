/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "core/merge.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define RANKS_SHOWN 8

typedef struct use {
    size_t layout; /* in the manifest */
    uint32_t rank;
    uint64_t tensors, sum;
} use;

static int by_layout_and_rank(const void *a, const void *b)
{
    const use *x = a, *y = b;
    if (x->layout != y->layout) {
        return x->layout < y->layout ? -1 : 1;
    }
    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

static bool same_use(const use *a, const use *b) { return a->tensors == b->tensors && a->sum == b->sum; }

/* "rank 3", "ranks 1, 2 and 5", "ranks 1, 2, … (900 in all)". */
static void ranks_text(lg__buf *b, const uint32_t *ranks, size_t n)
{
    lg__buf_str(b, n == 1 ? "rank " : "ranks ");
    for (size_t i = 0; i < n && i < RANKS_SHOWN; i++) {
        const char *before = i == 0 ? "" : i + 1 == n ? " and " : ", ";
        lg__buf_fmt(b, "%s%" PRIu32, before, ranks[i]);
    }
    if (n > RANKS_SHOWN) {
        lg__buf_fmt(b, ", … (%zu in all)", n);
    }
}

/* ------------------------------------------------------- layouts nobody knows
 *
 * Only the first rank of a layout reports its text. If that rank has no tensor
 * of the layout, the others name an id that nobody explains. */
static lg_status unknown_layout(const lg__report *const *reports, uint32_t world, const lg__report_use *u,
                                lg_error *err)
{
    uint32_t *with = lg__malloc(world * sizeof *with), *without = lg__malloc(world * sizeof *without);
    if (with == NULL || without == NULL) {
        lg__free(with);
        lg__free(without);
        return lg__nomem(err);
    }
    size_t n_with = 0, n_without = 0;
    for (uint32_t r = 0; r < world; r++) {
        bool has = false;
        for (size_t i = 0; i < reports[r]->n_uses && !has; i++) {
            has = memcmp(reports[r]->uses[i].id, u->id, sizeof u->id) == 0;
        }
        if (has) {
            with[n_with++] = r;
        } else {
            without[n_without++] = r;
        }
    }
    lg__buf b;
    lg__buf_init(&b, LG_ERROR_MESSAGE_MAX / 2);
    ranks_text(&b, with, n_with);
    lg__buf_fmt(&b, " saved %" PRIu64 " tensor%s under a layout of which its first rank saved none", u->tensors,
                u->tensors == 1 ? "" : "s");
    if (n_without > 0 && n_without <= RANKS_SHOWN) {
        lg__buf_str(&b, "; without them ");
        ranks_text(&b, without, n_without);
    }
    lg_error_set(err, LG_ERR_CONFLICT, "%s", b.data != NULL ? b.data : "");
    err->rank = n_without > 0 ? (int)without[0] : (int)with[0];
    lg__buf_free(&b);
    lg__free(with);
    lg__free(without);
    return LG_ERR_CONFLICT;
}

/* --------------------------------------------------------------- who is odd */

/* What one tensor of the manifest adds to its layout. */
static lg_status add_expected(const lg__manifest *m, const lg__manifest_tensor *t, use *to, lg_error *err)
{
    const bool flat = m->layouts[t->layout]->kind == LG__FLAT;
    lg__tensor_desc desc = lg__manifest_desc(t);
    uint64_t print = t->fingerprint;
    if (t->stored) {
        if (print == 0) {
            LG__TRY(lg__tensor_fingerprint(&desc, flat, &print, err));
        }
        to->tensors++;
        to->sum += print;
    }
    if (t->alias_of != NULL) {
        desc.name = t->alias_of;
        LG__TRY(lg__tie_fingerprint(&desc, t->name, flat, &print, err));
        to->sum += print;
    }
    return LG_OK;
}

/* Explains, if it is that simple, why `first` (the layout's first rank, whose
 * tensors are known by name) and `other` have other tensors: one that only the
 * first has, or one of another dtype or group. */
static lg_status explain(const lg__manifest *m, size_t layout, const use *first, const use *other, lg__buf *b,
                         lg_error *err)
{
    const uint64_t delta = first->sum - other->sum;
    const bool flat = m->layouts[layout]->kind == LG__FLAT;
    for (size_t i = 0; i < m->n_tensors; i++) {
        const lg__manifest_tensor *t = &m->tensors[i];
        if (t->layout != layout) {
            continue;
        }
        use alone = {0};
        LG__TRY(add_expected(m, t, &alone, err));
        if (other->tensors + alone.tensors == first->tensors && delta == alone.sum) {
            lg__buf_fmt(b, "; rank %" PRIu32 " has no %s \"%s\"", other->rank, t->alias_of != NULL ? "alias" : "tensor",
                        t->name);
            return LG_OK;
        }
        if (other->tensors != first->tensors || t->alias_of != NULL) {
            continue;
        }
        for (int v = 0; v < LG_DTYPE_COUNT * 2; v++) {
            lg__tensor_desc desc = lg__manifest_desc(t);
            desc.dtype = (lg_dtype)(v / 2);
            desc.group = v % 2 == 0 ? LG_GROUP_MODEL : LG_GROUP_OPTIM;
            uint64_t print;
            LG__TRY(lg__tensor_fingerprint(&desc, flat, &print, err));
            if (alone.sum - print == delta) {
                lg__buf_fmt(b, "; tensor \"%s\" is %s %s on rank %" PRIu32 ", %s %s on rank %" PRIu32, t->name,
                            lg_group_name(desc.group), lg_dtype_name(desc.dtype), other->rank, lg_group_name(t->group),
                            lg_dtype_name(t->dtype), first->rank);
                return LG_OK;
            }
        }
    }
    return LG_OK;
}

/* uses: one for each member, in the order of ranks. */
static lg_status blame(const lg__manifest *m, size_t layout, const use *uses, size_t n, lg_error *err)
{
    const uint32_t first_rank = lg__layout_rank_at(m->layouts[layout], 0);
    size_t usual = 0, most = 0, first = 0;
    for (size_t i = 0; i < n; i++) {
        if (uses[i].rank == first_rank) {
            first = i;
        }
    }
    for (size_t i = 0; i < n; i++) { /* few different ones, so this ends soon */
        bool seen = false;
        for (size_t j = 0; j < i && !seen; j++) {
            seen = same_use(&uses[i], &uses[j]);
        }
        size_t count = 0;
        for (size_t j = i; j < n && !seen; j++) {
            count += same_use(&uses[i], &uses[j]);
        }
        if (count > most || (count == most && same_use(&uses[i], &uses[first]))) {
            most = count, usual = i;
        }
    }
    uint32_t *odd = lg__malloc(n * sizeof *odd);
    if (odd == NULL) {
        return lg__nomem(err);
    }
    size_t n_odd = 0, first_odd = n;
    for (size_t i = 0; i < n; i++) {
        if (!same_use(&uses[i], &uses[usual])) {
            first_odd = first_odd == n ? i : first_odd;
            odd[n_odd++] = uses[i].rank;
        }
    }
    lg__buf b;
    lg__buf_init(&b, LG_ERROR_MESSAGE_MAX / 2);
    const use *o = &uses[first_odd], *u = &uses[usual];
    lg__buf_fmt(&b, "rank %" PRIu32 " saved %" PRIu64 " tensor%s under a layout of %zu ranks, ", o->rank, o->tensors,
                o->tensors == 1 ? "" : "s", n);
    if (o->tensors != u->tensors) {
        lg__buf_fmt(&b, "rank %" PRIu32 " saved %" PRIu64, u->rank, u->tensors);
    } else {
        lg__buf_fmt(&b, "as rank %" PRIu32 " did, but not the same ones", u->rank);
    }
    lg_status status = explain(m, layout, &uses[first], same_use(o, &uses[first]) ? u : o, &b, err);
    if (n_odd > 1) {
        lg__buf_str(&b, "; apart from most are ");
        ranks_text(&b, odd, n_odd);
    }
    if (status == LG_OK) {
        status = lg_error_set(err, LG_ERR_CONFLICT, "%s", b.data != NULL ? b.data : "");
        err->rank = (int)o->rank;
    }
    lg__buf_free(&b);
    lg__free(odd);
    return status;
}

/* Puts a row of zeros in the place of each member that has none. */
static lg_status check_with_absent(const lg__manifest *m, size_t layout, const use *uses, size_t n, lg_error *err)
{
    const lg_layout *l = m->layouts[layout];
    use *all = lg__malloc(l->n_ranks * sizeof *all);
    if (all == NULL) {
        return lg__nomem(err);
    }
    for (uint32_t i = 0; i < l->n_ranks; i++) {
        all[i] = (use){.layout = layout, .rank = lg__layout_rank_at(l, i)};
        use *have = bsearch(&all[i], uses, n, sizeof *uses, by_layout_and_rank);
        if (have != NULL) {
            all[i] = *have;
        }
    }
    qsort(all, l->n_ranks, sizeof *all, by_layout_and_rank);
    lg_status status = blame(m, layout, all, l->n_ranks, err);
    lg__free(all);
    return status;
}

static lg_status check_layout(const lg__manifest *m, size_t layout, const use *expected, const use *uses, size_t n,
                              lg_error *err)
{
    const lg_layout *l = m->layouts[layout];
    bool same = n == l->n_ranks;
    for (size_t i = 0; i < n; i++) {
        uint32_t index;
        LG__RETURN_IF(!lg__layout_index_of(l, uses[i].rank, &index), err, LG_ERR_CONFLICT,
                      "rank %" PRIu32 " saved %" PRIu64 " tensors under a layout that it is not in", uses[i].rank,
                      uses[i].tensors);
        LG__RETURN_IF(i > 0 && uses[i].rank == uses[i - 1].rank, err, LG_ERR_CONFLICT,
                      "rank %" PRIu32 " reports its use of a layout twice", uses[i].rank);
        LG__RETURN_IF(uses[i].rank == lg__layout_rank_at(l, 0) && !same_use(&uses[i], expected), err, LG_ERR_CONFLICT,
                      "rank %" PRIu32 ": its report contradicts itself: %" PRIu64 " tensors of a layout, %" PRIu64
                      " of them described",
                      uses[i].rank, uses[i].tensors, expected->tensors);
        same = same && same_use(&uses[i], expected);
    }
    return same ? LG_OK : check_with_absent(m, layout, uses, n, err);
}

lg_status lg__merge_check_uses(const lg__report *const *reports, uint32_t world, const lg__manifest *m,
                               const lg__index *by_layout, lg_error *err)
{
    size_t n = 0;
    for (uint32_t r = 0; r < world; r++) {
        n += reports[r]->n_uses;
    }
    use *uses = lg__malloc(n * sizeof *uses), *expected = lg__calloc(m->n_layouts, sizeof *expected);
    lg_status status = uses == NULL || expected == NULL ? lg__nomem(err) : LG_OK;
    for (size_t i = 0; i < m->n_tensors && status == LG_OK; i++) {
        if (m->tensors[i].layout != LG__IRREGULAR) {
            status = add_expected(m, &m->tensors[i], &expected[m->tensors[i].layout], err);
        }
    }
    size_t at = 0;
    for (uint32_t r = 0; r < world && status == LG_OK; r++) {
        for (size_t i = 0; i < reports[r]->n_uses && status == LG_OK; i++, at++) {
            const lg__report_use *u = &reports[r]->uses[i];
            uses[at] = (use){.rank = r, .tensors = u->tensors, .sum = u->sum};
            if (!lg__index_find(by_layout, u->id, sizeof u->id, &uses[at].layout)) {
                status = unknown_layout(reports, world, u, err);
            }
        }
    }
    if (status == LG_OK) {
        qsort(uses, n, sizeof *uses, by_layout_and_rank);
    }
    at = 0;
    for (size_t l = 0; l < m->n_layouts && status == LG_OK; l++) {
        size_t end = at;
        while (end < n && uses[end].layout == l) {
            end++;
        }
        status = check_layout(m, l, &expected[l], uses + at, end - at, err);
        at = end;
    }
    lg__free(uses);
    lg__free(expected);
    return status;
}
