/* SPDX-License-Identifier: Apache-2.0 */
#include "base/json.h"
#include "base/mem.h"
#include "core/save.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

lg_status lg__tie_fingerprint(const lg__tensor_desc *aliased, const char *alias, bool flat, uint64_t *out,
                              lg_error *err)
{
    size_t a = strlen(alias), n = strlen(aliased->name);
    char *both = lg__malloc(a + 1 + n + 1);
    if (both == NULL) {
        return lg__nomem(err);
    }
    memcpy(both, alias, a);
    both[a] = '\n'; /* no name has one in it */
    memcpy(both + a + 1, aliased->name, n + 1);
    lg__tensor_desc tie = *aliased;
    tie.name = both;
    lg_status status = lg__tensor_fingerprint(&tie, flat, out, err);
    lg__free(both);
    return status;
}

/* Arrays in the report's arena are sized by these upper bounds. */
static lg_status reserve(lg__report *r, const lg_save *save, const lg__plan *plan, lg_error *err)
{
    r->files = lg__arena_array(r->arena, plan->n_files, sizeof *r->files);
    r->uses = lg__arena_array(r->arena, save->n_layouts, sizeof *r->uses);
    r->layouts = lg__arena_array(r->arena, save->n_layouts, sizeof(lg_layout *));
    r->tensors = lg__arena_array(r->arena, save->n_tensors, sizeof *r->tensors);
    r->aliases = lg__arena_array(r->arena, save->n_tensors, sizeof *r->aliases);
    bool all = r->files != NULL && r->uses != NULL && r->layouts != NULL && r->tensors != NULL && r->aliases != NULL;
    return all ? LG_OK : lg__nomem(err);
}

static bool reports_layout(const lg_save *save, const lg_layout *layout)
{
    return lg__layout_rank_at(layout, 0) == save->rank;
}

/* Does this rank describe the tensor, rather than only count it? */
static bool is_row(const lg_save *save, const lg__save_tensor *t)
{
    return t->stored && (t->placement == LG__PLACE_BOXES || reports_layout(save, t->layout));
}

/* ------------------------------------------- what stays from save to save */

static int by_name(const void *a, const void *b, void *arg)
{
    const lg_save *save = arg;
    return strcmp(save->tensors[*(const size_t *)a].name, save->tensors[*(const size_t *)b].name);
}

static lg_status fingerprints(const lg_save *save, const lg__save_tensor *t, lg__sha256 *sha, lg__buf *text,
                              lg__plan_tensor *out, lg_error *err)
{
    if (t->placement == LG__PLACE_BOXES) {
        return LG_OK;
    }
    const bool flat = t->layout->kind == LG__FLAT;
    lg__tensor_desc desc = lg__save_desc(t);
    if (t->stored) {
        LG__TRY(lg__tensor_fingerprint_by(sha, text, &desc, flat, &out->fingerprint, err));
    }
    if (t->alias_of != NULL) {
        desc.name = save->tensors[t->root].name;
        LG__TRY(lg__tie_fingerprint(&desc, t->name, flat, &out->tie, err));
    }
    return LG_OK;
}

/* Rows in the order of names save the coordinator from sorting them. */
static lg_status number_rows(const lg_save *save, lg__plan_tensor *all, lg_error *err)
{
    size_t *order = lg__malloc(save->n_tensors * sizeof *order), n = 0;
    if (order == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0; i < save->n_tensors; i++) {
        if (is_row(save, &save->tensors[i])) {
            order[n++] = i;
        }
    }
    if (n > 1) {
        qsort_r(order, n, sizeof *order, by_name, (void *)(uintptr_t)save);
    }
    for (size_t i = 0; i < n; i++) {
        all[order[i]].row = i;
    }
    lg__free(order);
    return LG_OK;
}

static lg_status describe_tensors(const lg_save *save, lg__plan *plan, lg_error *err)
{
    lg__plan_tensor *all = lg__arena_array(plan->arena, save->n_tensors, sizeof *all);
    lg__sha256 *sha = lg__sha256_new();
    lg__buf text;
    lg__buf_init(&text, LG__FINGERPRINT_TEXT_MAX);
    lg_status status = all == NULL || sha == NULL ? lg__nomem(err) : LG_OK;
    for (size_t i = 0; i < save->n_tensors && status == LG_OK; i++) {
        status = fingerprints(save, &save->tensors[i], sha, &text, &all[i], err);
    }
    if (status == LG_OK) {
        status = number_rows(save, all, err);
    }
    if (status == LG_OK) {
        plan->tensors = all;
    }
    lg__sha256_free(sha);
    lg__buf_free(&text);
    return status;
}

/* --------------------------------------------------------------- the report */

/* The layout of the last tensor: most have the same. */
typedef struct last_layout {
    const lg_layout *layout;
    size_t at; /* in the save */
} last_layout;

static lg_status find_layout(const lg_save *save, last_layout *last, const lg__save_tensor *t, lg_error *err)
{
    if (last->layout == NULL || t->layout != last->layout) {
        LG__RETURN_IF(!lg__index_find(&save->by_layout, t->layout->id, sizeof t->layout->id, &last->at), err,
                      LG_ERR_INTERNAL, "the layout of tensor \"%s\" is not interned", t->name);
        last->layout = t->layout;
    }
    return LG_OK;
}

static void add_use(const lg__save_tensor *t, const lg__plan_tensor *known, lg__report_use *use)
{
    if (t->stored) {
        use->tensors++;
        use->sum += known->fingerprint;
    }
    if (t->alias_of != NULL) {
        use->sum += known->tie;
    }
}

/* The row of a stored tensor. */
static lg_status add_tensor(lg__report *r, const lg__save_tensor *t, const lg__plan_tensor *known, size_t layout,
                            lg_error *err)
{
    lg__report_tensor *row = &r->tensors[known->row];
    *row = (lg__report_tensor){.name = t->name,
                               .group = t->group,
                               .dtype = t->dtype,
                               .ndim = t->ndim,
                               .shape = t->shape,
                               .flat_offset = t->flat_offset,
                               .layout = layout,
                               .fingerprint = known->fingerprint};
    if (layout == LG__IRREGULAR) {
        lg__region *boxes = lg__arena_array(r->arena, t->n_boxes, sizeof *boxes);
        if (boxes == NULL) {
            return lg__nomem(err);
        }
        for (size_t i = 0; i < t->n_boxes; i++) {
            boxes[i] = t->boxes[i].box;
        }
        row->boxes = boxes;
        row->n_boxes = t->n_boxes;
    }
    r->n_tensors++;
    return LG_OK;
}

static lg_status fill(const lg_save *save, const lg__plan_tensor *known, lg__report *r, lg_error *err)
{
    /* places[i]: where layout i of the save is in uses and in layouts, plus 1. */
    size_t(*places)[2] = lg__calloc(save->n_layouts, sizeof *places);
    last_layout last = {0};
    lg_status status = places == NULL ? lg__nomem(err) : LG_OK;
    for (size_t i = 0; i < save->n_tensors && status == LG_OK; i++) {
        const lg__save_tensor *t = &save->tensors[i];
        size_t layout = LG__IRREGULAR;
        bool here = true;
        if (t->placement != LG__PLACE_BOXES) {
            status = find_layout(save, &last, t, err);
            if (status != LG_OK) {
                break;
            }
            if (places[last.at][0] == 0) {
                memcpy(r->uses[r->n_uses].id, t->layout->id, sizeof t->layout->id);
                places[last.at][0] = ++r->n_uses;
            }
            add_use(t, &known[i], &r->uses[places[last.at][0] - 1]);
            here = reports_layout(save, t->layout);
            if (here && places[last.at][1] == 0) {
                r->layouts[r->n_layouts] = lg__layout_ref(t->layout);
                places[last.at][1] = ++r->n_layouts;
            }
            layout = here ? places[last.at][1] - 1 : 0;
        }
        if (is_row(save, t)) {
            status = add_tensor(r, t, &known[i], layout, err);
        }
        if (here && t->alias_of != NULL) {
            r->aliases[r->n_aliases++] = (lg__report_alias){.alias = t->name, .name = t->alias_of, .stored = t->stored};
        }
    }
    lg__free(places);
    return status;
}

lg_status lg__save_report(const lg_save *save, const lg__save_ids *ids, lg__plan *plan,
                          const uint8_t (*tables)[LG__SHA256_BYTES], lg__report **out, lg_error *err)
{
    if (plan->tensors == NULL) {
        LG__TRY(describe_tensors(save, plan, err));
    }
    lg__report *r = NULL;
    LG__TRY(lg__report_new(&r, err));
    lg_status status = reserve(r, save, plan, err);
    if (status == LG_OK) {
        snprintf(r->run_id, sizeof r->run_id, "%s", ids->run_id);
        snprintf(r->attempt, sizeof r->attempt, "%s", ids->attempt);
        r->generation = ids->generation;
        r->step = save->step;
        r->rank = save->rank;
        r->world = save->world;
        r->domain = ids->domain != NULL && ids->domain[0] != '\0' ? ids->domain : "unknown";
        json_decref(r->state);
        r->state = json_incref(save->state);
        for (size_t i = 0; i < plan->n_files; i++) {
            const lg__plan_file *f = &plan->files[i];
            lg__report_file *row = &r->files[r->n_files++];
            row->group = f->group;
            row->number = f->number;
            row->header_bytes = f->header.len;
            row->bytes = f->header.len + f->data_bytes;
            memcpy(row->table, tables[i], LG__SHA256_BYTES);
        }
        status = fill(save, plan->tensors, r, err);
    }
    if (status != LG_OK) {
        lg__report_free(r);
        return status;
    }
    *out = r;
    return LG_OK;
}

void lg__save_keep_report(lg_save *save, lg__report *report)
{
    lg__report_free(save->report);
    save->report = NULL;
    if (save->rank == 0) { /* the coordinator */
        save->report = report;
    } else {
        lg__report_free(report);
    }
}
