/* SPDX-License-Identifier: Apache-2.0 */
#include "diff.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { KIND_STATE, KIND_RANK_STATE, KIND_ATTACHED };
static const char *const kinds[] = {"state", "rank_state", "attached"};

/* Takes a and b. */
static void add(state_diffs *d, int kind, const char *key, difference what, char *a, char *b)
{
    if (what == DIFF_EQUAL) {
        d->equal[kind]++;
        free(a);
        free(b);
        return;
    }
    need_room((void **)&d->all, &d->cap, d->n, sizeof *d->all);
    d->all[d->n++] = (state_diff){kinds[kind], need_strdup(key), what, a, b};
}

void diff_states_free(state_diffs *d)
{
    for (size_t i = 0; i < d->n; i++) {
        free(d->all[i].key);
        free(d->all[i].a);
        free(d->all[i].b);
    }
    free(d->all);
    *d = (state_diffs){0};
}

/* ------------------------------------------------------------- global state */

static bool same_value(const char *a, const char *b)
{
    if (strcmp(a, b) == 0) {
        return true;
    }
    /* The order of an object's members says nothing. */
    json_t *x = json_loads(a, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    json_t *y = json_loads(b, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    bool same = x != NULL && y != NULL && json_equal(x, y);
    json_decref(x);
    json_decref(y);
    return same;
}

static lg_status value_of(const view *v, const char *key, const char **out, lg_error *err)
{
    lg_status status = lg_checkpoint_global_json(v->k, key, out, err);
    if (status == LG_ERR_MISSING) {
        *out = NULL;
        return LG_OK;
    }
    return status;
}

static lg_status compare_key(const view *a, const view *b, const char *key, state_diffs *d, lg_error *err)
{
    const char *x, *y;
    lg_status status = value_of(a, key, &x, err);
    if (status == LG_OK) {
        status = value_of(b, key, &y, err);
    }
    if (status == LG_OK) {
        difference what = x == NULL          ? DIFF_ONLY_B
                          : y == NULL        ? DIFF_ONLY_A
                          : same_value(x, y) ? DIFF_EQUAL
                                             : DIFF_VALUES;
        add(d, KIND_STATE, key, what, x != NULL ? need_strdup(x) : NULL, y != NULL ? need_strdup(y) : NULL);
    }
    return status;
}

static lg_status global_state(const view *a, const view *b, state_diffs *d, lg_error *err)
{
    size_t n = lg_checkpoint_global_count(a->k), m = lg_checkpoint_global_count(b->k), i = 0, k = 0;
    lg_status status = LG_OK;
    while (status == LG_OK && (i < n || k < m)) { /* both are sorted */
        const char *x = i < n ? need((void *)(uintptr_t)lg_checkpoint_global_key(a->k, i)) : NULL;
        const char *y = k < m ? need((void *)(uintptr_t)lg_checkpoint_global_key(b->k, k)) : NULL;
        int order = x == NULL ? 1 : y == NULL ? -1 : strcmp(x, y);
        status = compare_key(a, b, order <= 0 ? x : y, d, err);
        i += order <= 0;
        k += order >= 0;
    }
    return status;
}

/* ----------------------------------------------------------- per-rank state */

static lg_status rank_bytes(const view *v, const char *key, uint32_t rank, void **data, size_t *bytes, lg_error *err)
{
    lg_status status = lg_checkpoint_rank_bytes(v->k, key, rank, 0, data, bytes, err);
    if (status == LG_ERR_MISSING) {
        *data = NULL;
        return LG_OK;
    }
    return status;
}

/* One key on all ranks: which ranks differ. */
static lg_status compare_rank_key(const view *a, const view *b, const char *key, state_diffs *d, lg_error *err)
{
    uint32_t differing = 0, first = 0, in_a = 0, in_b = 0;
    for (uint32_t r = 0; r < a->info.world; r++) {
        void *x = NULL, *y = NULL;
        size_t n = 0, m = 0;
        lg_status status = rank_bytes(a, key, r, &x, &n, err);
        if (status == LG_OK) {
            status = rank_bytes(b, key, r, &y, &m, err);
        }
        bool same = x == NULL || y == NULL ? x == y : n == m && memcmp(x, y, n) == 0;
        in_a += x != NULL;
        in_b += y != NULL;
        lg_free(x);
        lg_free(y);
        if (status != LG_OK) {
            return status;
        }
        if (!same && differing++ == 0) {
            first = r;
        }
    }
    difference what = differing == 0 ? DIFF_EQUAL : in_b == 0 ? DIFF_ONLY_A : in_a == 0 ? DIFF_ONLY_B : DIFF_VALUES;
    char *where = NULL;
    if (what == DIFF_VALUES) {
        where = need_format("on %" PRIu32 " of %" PRIu32 " ranks, the first is rank %" PRIu32, differing, a->info.world,
                            first);
    }
    add(d, KIND_RANK_STATE, key, what, where, NULL);
    return LG_OK;
}

static lg_status rank_state(const view *a, const view *b, state_diffs *d, lg_error *err)
{
    rank_keys x, y;
    rank_keys_read(a, a->info.world, &x);
    rank_keys_read(b, b->info.world, &y);
    lg_status status = LG_OK;
    if (a->info.world != b->info.world) {
        d->ranks_differ = x.n > 0 || y.n > 0;
    } else {
        size_t i = 0, k = 0;
        while (status == LG_OK && (i < x.n || k < y.n)) {
            int order = i == x.n ? 1 : k == y.n ? -1 : strcmp(x.all[i].name, y.all[k].name);
            status = compare_rank_key(a, b, order <= 0 ? x.all[i].name : y.all[k].name, d, err);
            i += order <= 0;
            k += order >= 0;
        }
    }
    rank_keys_free(&x);
    rank_keys_free(&y);
    return status;
}

/* ------------------------------------------------------------ attached files */

static lg_status attached(const view *v, const char *name, void **data, size_t *bytes, lg_error *err)
{
    lg_status status = lg_checkpoint_attached(v->k, name, data, bytes, err);
    if (status == LG_ERR_MISSING) {
        *data = NULL;
        return LG_OK;
    }
    return status;
}

static lg_status compare_attached(const view *a, const view *b, const char *name, state_diffs *d, lg_error *err)
{
    void *x = NULL, *y = NULL;
    size_t n = 0, m = 0;
    lg_status status = attached(a, name, &x, &n, err);
    if (status == LG_OK) {
        status = attached(b, name, &y, &m, err);
    }
    if (status == LG_OK) {
        difference what = x == NULL                        ? DIFF_ONLY_B
                          : y == NULL                      ? DIFF_ONLY_A
                          : n == m && memcmp(x, y, n) == 0 ? DIFF_EQUAL
                                                           : DIFF_VALUES;
        add(d, KIND_ATTACHED, name, what, x != NULL ? need_format("%zu bytes", n) : NULL,
            y != NULL ? need_format("%zu bytes", m) : NULL);
    }
    lg_free(x);
    lg_free(y);
    return status;
}

static bool has_attached(const view *v, const char *name)
{
    lg_file_info f;
    for (size_t i = v->info.n_files - v->info.n_attached; i < v->info.n_files; i++) {
        if (lg_checkpoint_file(v->k, i, &f, NULL) == LG_OK && f.is_attached && strcmp(f.name, name) == 0) {
            return true;
        }
    }
    return false;
}

static lg_status attached_files(const view *a, const view *b, state_diffs *d, lg_error *err)
{
    lg_status status = LG_OK;
    lg_file_info f;
    for (size_t i = a->info.n_files - a->info.n_attached; status == LG_OK && i < a->info.n_files; i++) {
        status = lg_checkpoint_file(a->k, i, &f, err);
        if (status == LG_OK) {
            status = compare_attached(a, b, f.name, d, err);
        }
    }
    for (size_t i = b->info.n_files - b->info.n_attached; status == LG_OK && i < b->info.n_files; i++) {
        status = lg_checkpoint_file(b->k, i, &f, err);
        if (status == LG_OK && !has_attached(a, f.name)) {
            status = compare_attached(a, b, f.name, d, err);
        }
    }
    return status;
}

lg_status diff_states(const view *a, const view *b, state_diffs *out, lg_error *err)
{
    *out = (state_diffs){0};
    lg_status status = global_state(a, b, out, err);
    if (status == LG_OK) {
        status = rank_state(a, b, out, err);
    }
    if (status == LG_OK) {
        status = attached_files(a, b, out, err);
    }
    if (status != LG_OK) {
        diff_states_free(out);
    }
    return status;
}
