/* SPDX-License-Identifier: Apache-2.0 */
#include "format/manifest.h"

#include "base/error.h"
#include "base/json.h"
#include "format/member.h"
#include "format/names.h"
#include "format/sums.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

lg_status lg__manifest_new(lg__manifest **out, lg_error *err)
{
    lg__manifest *m = lg__calloc(1, sizeof *m);
    lg__arena *arena = lg__arena_new();
    if (m == NULL || arena == NULL) {
        lg__free(m);
        lg__arena_free(arena);
        return lg__nomem(err);
    }
    m->arena = arena;
    m->major = LG__FORMAT_MAJOR;
    m->minor = LG__FORMAT_MINOR;
    *out = m;
    return LG_OK;
}

void lg__manifest_free(lg__manifest *m)
{
    if (m == NULL) {
        return;
    }
    for (size_t i = 0; i < m->n_layouts; i++) {
        lg__layout_unref(m->layouts[i]);
    }
    json_decref(m->state);
    lg__arena_free(m->arena);
    lg__free(m);
}

static int compare_to_name(const void *name, const void *tensor)
{
    return strcmp(name, ((const lg__manifest_tensor *)tensor)->name);
}

const lg__manifest_tensor *lg__manifest_find(const lg__manifest *m, const char *name)
{
    return m->n_tensors == 0 ? NULL : bsearch(name, m->tensors, m->n_tensors, sizeof *m->tensors, compare_to_name);
}

lg__tensor_desc lg__manifest_desc(const lg__manifest_tensor *t)
{
    return (lg__tensor_desc){.name = t->name,
                             .group = t->group,
                             .dtype = t->dtype,
                             .ndim = t->ndim,
                             .shape = t->shape,
                             .flat_offset = t->flat_offset};
}

bool lg__manifest_is_copies(const lg__manifest *m, const lg__manifest_tensor *t)
{
    return t->layout != LG__IRREGULAR && m->layouts[t->layout]->kind == LG__COPIES;
}

/* -------------------------------------------------------------------- checks */

static lg_status check_ids(const lg__manifest *m, lg_error *err)
{
    if (!lg__hex_valid(m->run_id, LG_RUN_ID_TEXT - 1)) {
        return lg__at_error(NULL, "run", err, LG_ERR_FORMAT, "not %d lower-case hex digits", LG_RUN_ID_TEXT - 1);
    }
    if (!lg__hex_valid(m->attempt, LG__ATTEMPT_HEX)) {
        return lg__at_error(NULL, "attempt", err, LG_ERR_FORMAT, "not %d lower-case hex digits", LG__ATTEMPT_HEX);
    }
    if (m->generation.epoch == 0) {
        return lg__at_error(NULL, "generation", err, LG_ERR_FORMAT, "owner epochs begin with 1");
    }
    if (m->tombstone && m->superseded_by < m->generation.epoch) {
        return lg__at_error(NULL, "tombstone", err, LG_ERR_FORMAT, "superseded by an older owner than its own");
    }
    return LG_OK;
}

static lg_status check_scalars(const lg__manifest *m, lg_error *err)
{
    if (m->step >= UINT64_C(1) << 53) {
        return lg__at_error(NULL, "step", err, LG_ERR_FORMAT, "not below 2^53");
    }
    if (m->has_parent && m->parent_step >= UINT64_C(1) << 53) {
        return lg__at_error(NULL, "parent", err, LG_ERR_FORMAT, "its step is not below 2^53");
    }
    if (!lg__created_valid(m->created)) {
        return lg__at_error(NULL, "created", err, LG_ERR_FORMAT, "no time like 2026-11-29T18:31:57Z");
    }
    if (m->world == 0 || m->world > LG__MAX_WORLD) {
        return lg__at_error(NULL, "world", err, LG_ERR_FORMAT, "%u is not in [1, %d]", m->world, LG__MAX_WORLD);
    }
    if (!lg__block_bytes_valid(m->block_bytes)) {
        return lg__at_error(NULL, "block_bytes", err, LG_ERR_FORMAT, "not a power of two in [4096, 64 MiB]");
    }
    return LG_OK;
}

/* All lengths together stay below 2^63, so that sums over files need no care. */
static lg_status add_length(uint64_t bytes, uint64_t *total, const lg__at *at, const char *key, lg_error *err)
{
    if (bytes > INT64_MAX - *total) {
        return lg__at_error(at, key, err, LG_ERR_FORMAT, "all files together would have 2^63 bytes or more");
    }
    *total += bytes;
    return LG_OK;
}

static lg_status check_ranks(const lg__manifest *m, uint64_t *total, lg_error *err)
{
    for (uint32_t r = 0; r < m->world; r++) {
        const lg__rank_row *row = &m->ranks[r];
        lg__at at = {NULL, "ranks", r};
        for (int g = 0; g < LG_GROUP_COUNT; g++) {
            const char *group = lg_group_name((lg_group)g);
            if (row->n_files[g] > LG__MAX_FILES) {
                return lg__at_error(&at, group, err, LG_ERR_FORMAT, "%" PRIu32 " files; the most are %d",
                                    row->n_files[g], LG__MAX_FILES);
            }
            for (uint32_t i = 0; i < row->n_files[g]; i++) {
                lg__at file = {&at, group, i};
                if (row->file_bytes[g][i] == 0) {
                    return lg__at_error(&file, NULL, err, LG_ERR_FORMAT, "a shard file cannot be empty");
                }
                LG__TRY(add_length(row->file_bytes[g][i], total, &file, NULL, err));
            }
        }
        if (row->sums_bytes < LG__SUMS_HEAD_BYTES) {
            return lg__at_error(&at, "sums", err, LG_ERR_FORMAT, "no sums file is that short");
        }
        LG__TRY(add_length(row->sums_bytes, total, &at, "sums", err));
        /* Rows of one host share the text, so look at it once. */
        if (r > 0 && row->domain == m->ranks[r - 1].domain) {
            continue;
        }
        if (row->domain == NULL || row->domain[0] == '\0') {
            return lg__at_error(&at, "domain", err, LG_ERR_FORMAT, "missing");
        }
        if (lg__text_check("domain", row->domain, LG__NAME_MAX - 1, err) != LG_OK) {
            return lg__at_wrap(&at, "domain", err);
        }
    }
    return LG_OK;
}

/* Letters' case does not count: a copy on a file system that ignores it must
 * not lose a file. */
static int compare_files(const void *a, const void *b) { return strcasecmp(*(char *const *)a, *(char *const *)b); }

static lg_status check_attached(const lg__manifest *m, uint64_t *total, lg_error *err)
{
    if (m->n_attached == 0) {
        return LG_OK;
    }
    const char **names = lg__calloc(m->n_attached, sizeof *names);
    if (names == NULL) {
        return lg__nomem(err);
    }
    lg_status st = LG_OK;
    for (size_t i = 0; st == LG_OK && i < m->n_attached; i++) {
        lg__at at = {NULL, "attached", i};
        names[i] = m->attached[i].name;
        if (lg__attach_name_check(names[i], err) != LG_OK) {
            st = lg__at_wrap(&at, "name", err);
        } else {
            st = add_length(m->attached[i].bytes, total, &at, "bytes", err);
        }
    }
    if (st == LG_OK) {
        qsort(names, m->n_attached, sizeof *names, compare_files);
        for (size_t i = 1; st == LG_OK && i < m->n_attached; i++) {
            if (strcasecmp(names[i - 1], names[i]) == 0) {
                st = lg__at_error(NULL, "attached", err, LG_ERR_FORMAT, "\"%s\" is there twice", names[i]);
            }
        }
    }
    lg__free(names);
    return st;
}

static lg_status check_pieces(const lg__manifest *m, const lg__manifest_tensor *t, const lg__at *at, lg_error *err)
{
    lg_group group = lg__file_group(t->group, t->dtype, false);
    for (size_t i = 0; i < t->n_pieces; i++) {
        const lg__stored_piece *p = &t->pieces[i], *before = i > 0 ? &t->pieces[i - 1] : NULL;
        lg__at here = {at, "boxes", i};
        if (p->rank >= m->world) {
            return lg__at_error(&here, "rank", err, LG_ERR_FORMAT, "%u, but there are %u ranks", p->rank, m->world);
        }
        if (p->box.ndim != t->ndim) {
            return lg__at_error(&here, NULL, err, LG_ERR_FORMAT, "%u dimensions instead of %u", p->box.ndim, t->ndim);
        }
        bool same_rank = before != NULL && before->rank == p->rank;
        if ((before != NULL && p->rank < before->rank) ||
            (same_rank && lg__region_compare(&before->box, &p->box) >= 0)) {
            return lg__at_error(&here, NULL, err, LG_ERR_FORMAT, "boxes are not in order of rank and offset");
        }
        if (p->number != (same_rank ? before->number + 1 : 0)) {
            return lg__at_error(&here, NULL, err, LG_ERR_INTERNAL, "numbered %u", p->number);
        }
        if (p->number >= m->ranks[p->rank].n_files[group]) {
            return lg__at_error(&here, NULL, err, LG_ERR_FORMAT, "rank %u has no file for its box %u", p->rank,
                                p->number + 1);
        }
    }
    return LG_OK;
}

static lg_status check_tiling(const lg__manifest_tensor *t, const lg__at *at, lg_error *err)
{
    lg__region *boxes = lg__calloc(t->n_pieces, sizeof *boxes);
    uint32_t *ranks = lg__calloc(t->n_pieces, sizeof *ranks);
    lg_status st;
    if (boxes == NULL || ranks == NULL) {
        st = lg__nomem(err);
    } else {
        for (size_t i = 0; i < t->n_pieces; i++) {
            boxes[i] = t->pieces[i].box;
            ranks[i] = t->pieces[i].rank;
        }
        st = lg__region_check_tiling(t->name, t->ndim, t->shape, boxes, ranks, t->n_pieces, err);
    }
    lg__free(boxes);
    lg__free(ranks);
    return st == LG_OK ? st : lg__at_wrap(at, "boxes", err);
}

static lg_status check_alias(const lg__manifest *m, const lg__manifest_tensor *t, const lg__at *at, lg_error *err)
{
    const lg__manifest_tensor *of = lg__manifest_find(m, t->alias_of);
    const char *wrong = NULL;
    if (of == NULL) {
        wrong = "is not in this checkpoint";
    } else if (of == t) {
        wrong = "is the alias itself";
    } else if (of->alias_of != NULL) {
        wrong = "is an alias too";
    } else if (of->group != t->group || of->dtype != t->dtype || of->ndim != t->ndim ||
               (t->ndim > 0 && memcmp(of->shape, t->shape, t->ndim * sizeof *t->shape) != 0)) {
        wrong = "has another group, dtype or shape";
    }
    if (wrong != NULL) {
        return lg__at_error(at, "alias_of", err, LG_ERR_FORMAT, "\"%s\" is tied to \"%s\", which %s", t->name,
                            t->alias_of, wrong);
    }
    return LG_OK;
}

static lg_status check_tensor(const lg__manifest *m, size_t i, lg_error *err)
{
    const lg__manifest_tensor *t = &m->tensors[i];
    lg__at at = {NULL, "tensors", i};
    if (lg__name_check("tensor", t->name, strlen(t->name), err) != LG_OK) {
        return lg__at_wrap(&at, "name", err);
    }
    int order = i > 0 ? strcmp(m->tensors[i - 1].name, t->name) : -1;
    if (order >= 0) {
        return lg__at_error(&at, "name", err, LG_ERR_FORMAT,
                            order == 0 ? "\"%s\" is there twice" : "\"%s\" is out of order", t->name);
    }
    if (t->group != LG_GROUP_MODEL && t->group != LG_GROUP_OPTIM) {
        return lg__at_error(&at, "group", err, LG_ERR_FORMAT, "tensor \"%s\" is of no group for tensors", t->name);
    }
    uint64_t bytes = 0;
    if (lg__shape_bytes(t->dtype, t->ndim, t->shape, &bytes, err) != LG_OK) {
        lg_error_wrap(err, "tensor \"%s\"", t->name);
        return lg__at_wrap(&at, "shape", err);
    }
    if (t->alias_of != NULL) {
        LG__TRY(check_alias(m, t, &at, err));
        if (!t->stored) {
            return LG_OK; /* lies where the other lies */
        }
    } else if (!t->stored) {
        return lg__at_error(&at, "stored", err, LG_ERR_FORMAT, "tensor \"%s\" is no alias, so it must be stored",
                            t->name);
    }
    if (t->layout == LG__IRREGULAR) {
        LG__TRY(check_pieces(m, t, &at, err));
        return check_tiling(t, &at, err);
    }
    if (t->layout >= m->n_layouts) {
        return lg__at_error(&at, "layout", err, LG_ERR_FORMAT, "%zu, but there are %zu layouts", t->layout,
                            m->n_layouts);
    }
    lg__tensor_desc desc = lg__manifest_desc(t);
    if (lg__layout_check_tensor(m->layouts[t->layout], &desc, err) != LG_OK) {
        return lg__at_wrap(&at, "layout", err);
    }
    return LG_OK;
}

lg_status lg__manifest_check(const lg__manifest *m, lg_error *err)
{
    LG__TRY(check_ids(m, err));
    if (m->tombstone) {
        return LG_OK;
    }
    uint64_t total = 0;
    LG__TRY(check_scalars(m, err));
    LG__TRY(check_ranks(m, &total, err));
    LG__TRY(check_attached(m, &total, err));
    for (size_t i = 0; i < m->n_tensors; i++) {
        LG__TRY(check_tensor(m, i, err));
    }
    return lg__state_check(m->state, NULL, err);
}
