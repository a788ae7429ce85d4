/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/json.h"
#include "format/manifest.h"
#include "format/member.h"
#include "format/names.h"
#include "format/sums.h"
#include "format/tensor_row.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define REPORT_VERSION 1

lg_status lg__report_new(lg__report **out, lg_error *err)
{
    lg__report *r = lg__calloc(1, sizeof *r);
    lg__arena *arena = lg__arena_new();
    if (r == NULL || arena == NULL) {
        lg__free(r);
        lg__arena_free(arena);
        return lg__nomem(err);
    }
    r->arena = arena;
    *out = r;
    return LG_OK;
}

void lg__report_free(lg__report *r)
{
    if (r == NULL) {
        return;
    }
    for (size_t i = 0; i < r->n_layouts; i++) {
        lg__layout_unref(r->layouts[i]);
    }
    json_decref(r->state);
    lg__arena_free(r->arena);
    lg__free(r);
}

/* ------------------------------------------------------------------ writing */

static void put_row(lg__buf *b, size_t i) { lg__buf_str(b, i == 0 ? "\n" : ",\n"); }

static void put_head(const lg__report *r, lg__buf *b)
{
    lg__buf_fmt(b, "{\"lastgood_report\":%d,\"run\":", REPORT_VERSION);
    lg__buf_json_text(b, r->run_id);
    lg__buf_str(b, ",\"attempt\":");
    lg__buf_json_text(b, r->attempt);
    lg__buf_str(b, ",\"generation\":");
    lg__buf_json_generation(b, r->generation);
    lg__buf_str(b, ",\"step\":");
    lg__buf_json_u64(b, r->step);
    lg__buf_fmt(b, ",\"rank\":%" PRIu32 ",\"world\":%" PRIu32 ",\"domain\":", r->rank, r->world);
    lg__buf_json_text(b, r->domain);
}

static void put_files(const lg__report *r, lg__buf *b)
{
    lg__buf_str(b, ",\n\"files\":[");
    for (size_t i = 0; i < r->n_files; i++) {
        const lg__report_file *f = &r->files[i];
        put_row(b, i);
        lg__buf_fmt(b, "{\"group\":\"%s\",\"number\":%" PRIu32 ",\"bytes\":", lg_group_name(f->group), f->number);
        lg__buf_json_u64(b, f->bytes);
        lg__buf_str(b, ",\"header\":");
        lg__buf_json_u64(b, f->header_bytes);
        lg__buf_str(b, ",\"table\":");
        lg__buf_json_hex(b, f->table);
        lg__buf_str(b, "}");
    }
    lg__buf_str(b, "]");
}

static void put_layouts(const lg__report *r, lg__buf *b)
{
    lg__buf_str(b, ",\n\"uses\":[");
    for (size_t i = 0; i < r->n_uses; i++) {
        put_row(b, i);
        lg__buf_str(b, "{\"layout\":");
        lg__buf_json_hex(b, r->uses[i].id);
        lg__buf_str(b, ",\"tensors\":");
        lg__buf_json_u64(b, r->uses[i].tensors);
        lg__buf_str(b, ",\"sum\":");
        lg__buf_json_u64(b, r->uses[i].sum);
        lg__buf_str(b, "}");
    }
    lg__buf_str(b, "],\n\"layouts\":[");
    for (size_t i = 0; i < r->n_layouts; i++) {
        put_row(b, i);
        lg__buf_add(b, r->layouts[i]->text, r->layouts[i]->text_bytes);
    }
    lg__buf_str(b, "]");
}

static void put_place(const lg__report *r, const lg__report_tensor *t, lg__buf *b)
{
    if (t->layout != LG__IRREGULAR) {
        bool flat = r->layouts[t->layout]->kind == LG__FLAT;
        lg__buf_tensor_layout(b, t->layout, flat ? &t->flat_offset : NULL);
        return;
    }
    lg__buf_str(b, ",\"boxes\":[");
    for (size_t i = 0; i < t->n_boxes; i++) {
        lg__buf_box(b, i == 0, NULL, &t->boxes[i]);
    }
    lg__buf_str(b, "]");
}

static lg__tensor_desc desc_of(const lg__report_tensor *t)
{
    return (lg__tensor_desc){t->name, t->group, t->dtype, t->ndim, t->shape, t->flat_offset};
}

static void put_tensors(const lg__report *r, lg__buf *b)
{
    lg__buf_str(b, ",\n\"tensors\":[");
    for (size_t i = 0; i < r->n_tensors; i++) {
        const lg__report_tensor *t = &r->tensors[i];
        put_row(b, i);
        lg__tensor_desc desc = desc_of(t);
        lg__buf_tensor_row(b, &desc);
        put_place(r, t, b);
        lg__buf_str(b, "}");
    }
    lg__buf_str(b, "],\n\"aliases\":[");
    for (size_t i = 0; i < r->n_aliases; i++) {
        put_row(b, i);
        lg__buf_str(b, "{\"alias\":");
        lg__buf_json_text(b, r->aliases[i].alias);
        lg__buf_str(b, ",\"name\":");
        lg__buf_json_text(b, r->aliases[i].name);
        lg__buf_fmt(b, ",\"stored\":%s}", r->aliases[i].stored ? "true" : "false");
    }
    lg__buf_str(b, "]");
}

lg_status lg__report_encode(const lg__report *r, lg__buf *out, lg_error *err)
{
    LG__RETURN_IF(r->domain == NULL, err, LG_ERR_INTERNAL, "report without a failure domain");
    for (size_t i = 0; i < r->n_layouts; i++) {
        LG__RETURN_IF(r->layouts[i]->text == NULL, err, LG_ERR_INTERNAL, "layout %zu is not resolved", i);
    }
    for (size_t i = 0; i < r->n_tensors; i++) {
        LG__RETURN_IF(r->tensors[i].layout != LG__IRREGULAR && r->tensors[i].layout >= r->n_layouts, err,
                      LG_ERR_INTERNAL, "tensor \"%s\" has a layout that the report lacks", r->tensors[i].name);
    }
    size_t start = out->len;
    put_head(r, out);
    put_files(r, out);
    put_layouts(r, out);
    put_tensors(r, out);
    lg__buf_str(out, ",\n\"state\":");
    if (r->state != NULL) {
        LG__TRY(lg__buf_json(out, r->state, false, err));
    } else {
        lg__buf_str(out, "{}");
    }
    lg__buf_str(out, "}\n");
    LG__TRY(lg__buf_check(out, "report", err));
    LG__RETURN_IF(out->len - start > LG__REPORT_MAX, err, LG_ERR_LIMIT, "a report of more than %zu bytes",
                  LG__REPORT_MAX);
    return LG_OK;
}

/* ------------------------------------------------------------------ reading */

/* An array of objects; `*out` gets zeroed room for one element each. */
static lg_status rows_of(const json_t *top, const char *key, lg__arena *arena, size_t element_bytes,
                         const json_t **rows, void **out, size_t *n, lg_error *err)
{
    LG__TRY(lg__member_get(top, NULL, key, JSON_ARRAY, rows, err));
    *n = json_array_size(*rows);
    for (size_t i = 0; i < *n; i++) {
        lg__at at = {NULL, key, i};
        if (!json_is_object(json_array_get(*rows, i)) && strcmp(key, "layouts") != 0) {
            return lg__at_error(&at, NULL, err, LG_ERR_FORMAT, "not an object");
        }
    }
    *out = lg__arena_array(arena, *n, element_bytes);
    return *out == NULL ? lg__nomem(err) : LG_OK;
}

static lg_status copy_name(const json_t *object, const lg__at *at, const char *key, lg__arena *arena, const char **out,
                           lg_error *err)
{
    const char *name = NULL;
    LG__TRY(lg__member_name(object, at, key, &name, err));
    *out = lg__arena_strdup(arena, name);
    return *out == NULL ? lg__nomem(err) : LG_OK;
}

static lg_status read_head(const json_t *top, lg__report *r, lg_error *err)
{
    uint64_t version = 0;
    LG__RETURN_IF(!json_is_object(top) || json_object_get(top, "lastgood_report") == NULL, err, LG_ERR_FORMAT,
                  "not a report of lastgood");
    LG__TRY(lg__member_u64(top, NULL, "lastgood_report", UINT64_MAX, &version, err));
    LG__RETURN_IF(version > REPORT_VERSION, err, LG_ERR_VERSION, "report of version %" PRIu64 "; known is %d", version,
                  REPORT_VERSION);
    LG__RETURN_IF(version == 0, err, LG_ERR_FORMAT, "report of version 0");
    LG__TRY(lg__member_hex(top, NULL, "run", LG_RUN_ID_TEXT - 1, r->run_id, err));
    LG__TRY(lg__member_hex(top, NULL, "attempt", LG__ATTEMPT_HEX, r->attempt, err));
    LG__TRY(lg__member_generation(top, NULL, "generation", &r->generation, err));
    LG__TRY(lg__member_u64(top, NULL, "step", (UINT64_C(1) << 53) - 1, &r->step, err));
    LG__TRY(lg__member_u32(top, NULL, "world", LG__MAX_WORLD, &r->world, err));
    LG__RETURN_IF(r->world == 0, err, LG_ERR_FORMAT, "world: 0 ranks");
    LG__TRY(lg__member_u32(top, NULL, "rank", r->world - 1, &r->rank, err));
    const char *domain = NULL;
    LG__TRY(lg__member_text(top, NULL, "domain", LG__NAME_MAX - 1, &domain, err));
    LG__RETURN_IF(domain[0] == '\0', err, LG_ERR_FORMAT, "domain: empty");
    r->domain = lg__arena_strdup(r->arena, domain);
    return r->domain == NULL ? lg__nomem(err) : LG_OK;
}

static lg_status read_file(const json_t *object, const lg__at *at, const lg__report_file *before, lg__report_file *f,
                           lg_error *err)
{
    const char *group = NULL;
    LG__TRY(lg__member_text(object, at, "group", 16, &group, err));
    int g = 0;
    while (g < LG_GROUP_COUNT && strcmp(group, lg_group_name((lg_group)g)) != 0) {
        g++;
    }
    if (g == LG_GROUP_COUNT) {
        return lg__at_error(at, "group", err, LG_ERR_FORMAT, "unknown group \"%s\"", group);
    }
    f->group = (lg_group)g;
    LG__TRY(lg__member_u32(object, at, "number", UINT32_MAX, &f->number, err));
    bool same_group = before != NULL && before->group == f->group;
    if ((before != NULL && before->group > f->group) || f->number != (same_group ? before->number + 1 : 0)) {
        return lg__at_error(at, "number", err, LG_ERR_FORMAT, "files are not in order of group and number");
    }
    LG__TRY(lg__member_u64(object, at, "bytes", INT64_MAX, &f->bytes, err));
    LG__TRY(lg__member_u64(object, at, "header", INT64_MAX, &f->header_bytes, err));
    if (f->bytes == 0 || f->header_bytes > f->bytes) {
        return lg__at_error(at, "header", err, LG_ERR_FORMAT, "%" PRIu64 " bytes of a file of %" PRIu64,
                            f->header_bytes, f->bytes);
    }
    return lg__member_digest(object, at, "table", f->table, err);
}

static int compare_uses(const void *a, const void *b)
{
    return memcmp((*(const lg__report_use *const *)a)->id, (*(const lg__report_use *const *)b)->id,
                  LG__LAYOUT_ID_BYTES);
}

static int compare_tensors(const void *a, const void *b)
{
    return strcmp((*(const lg__report_tensor *const *)a)->name, (*(const lg__report_tensor *const *)b)->name);
}

/* The index of an element that is there twice, or n. */
static lg_status find_twin(const void *elements, size_t n, size_t element_bytes,
                           int (*compare)(const void *, const void *), size_t *twin, lg_error *err)
{
    *twin = n;
    if (n < 2) {
        return LG_OK;
    }
    const char **sorted = lg__calloc(n, sizeof *sorted);
    if (sorted == NULL) {
        return lg__nomem(err);
    }
    const char *first = elements;
    for (size_t i = 0; i < n; i++) {
        sorted[i] = first + i * element_bytes;
    }
    qsort(sorted, n, sizeof *sorted, compare);
    for (size_t i = 1; i < n && *twin == n; i++) {
        if (compare(&sorted[i - 1], &sorted[i]) == 0) {
            *twin = (size_t)(sorted[i] - first) / element_bytes;
        }
    }
    lg__free(sorted);
    return LG_OK;
}

static lg_status read_uses(const json_t *top, lg__report *r, lg_error *err)
{
    const json_t *rows = NULL;
    void *room = NULL;
    LG__TRY(rows_of(top, "uses", r->arena, sizeof *r->uses, &rows, &room, &r->n_uses, err));
    r->uses = room;
    for (size_t i = 0; i < r->n_uses; i++) {
        const json_t *object = json_array_get(rows, i);
        lg__at at = {NULL, "uses", i};
        LG__TRY(lg__member_digest(object, &at, "layout", r->uses[i].id, err));
        LG__TRY(lg__member_u64(object, &at, "tensors", UINT64_MAX, &r->uses[i].tensors, err));
        LG__TRY(lg__member_u64(object, &at, "sum", UINT64_MAX, &r->uses[i].sum, err));
    }
    size_t twin = 0;
    LG__TRY(find_twin(r->uses, r->n_uses, sizeof *r->uses, compare_uses, &twin, err));
    lg__at at = {NULL, "uses", twin};
    return twin == r->n_uses ? LG_OK : lg__at_error(&at, "layout", err, LG_ERR_FORMAT, "is there twice");
}

static lg_status read_layouts(const json_t *top, lg__report *r, lg_error *err)
{
    const json_t *rows = NULL;
    void *room = NULL;
    size_t n = 0;
    LG__TRY(rows_of(top, "layouts", r->arena, sizeof *r->layouts, &rows, &room, &n, err));
    r->layouts = room;
    for (size_t i = 0; i < n; i++) {
        lg__at at = {NULL, "layouts", i};
        if (lg__layout_parse(json_array_get(rows, i), r->world, &r->layouts[i], err) != LG_OK) {
            return lg__at_wrap(&at, NULL, err);
        }
        r->n_layouts = i + 1;
    }
    return LG_OK;
}

static lg_status read_boxes(lg__json_piece text, const lg__at *at, const lg__report *r, lg__report_tensor *t,
                            lg_error *err)
{
    size_t n = 0;
    LG__TRY(lg__boxes_count(text, at, &n, err));
    /* Each is in a file of its own. */
    if (n > r->n_files) {
        return lg__at_error(at, "boxes", err, LG_ERR_FORMAT, "%zu boxes of \"%s\", but only %zu files for them", n,
                            t->name, r->n_files);
    }
    lg__region *regions = lg__arena_array(r->arena, n, sizeof *regions);
    if (regions == NULL) {
        return lg__nomem(err);
    }
    lg__json_cursor boxes = lg__boxes_begin(text);
    for (size_t i = 0; i < n; i++) {
        lg__at here = {at, "boxes", i};
        LG__TRY(lg__boxes_next(&boxes, &here, t->ndim, NULL, &regions[i], err));
        if (!lg__region_inside(&regions[i], t->ndim, t->shape)) {
            return lg__at_error(&here, NULL, err, LG_ERR_COVERAGE, "box of \"%s\" is not inside the tensor", t->name);
        }
        if (i > 0 && lg__region_compare(&regions[i - 1], &regions[i]) >= 0) {
            return lg__at_error(&here, NULL, err, LG_ERR_FORMAT, "boxes are not in order of offset");
        }
    }
    LG__TRY(lg__boxes_end(&boxes, at, err));
    t->layout = LG__IRREGULAR;
    t->boxes = regions;
    t->n_boxes = n;
    return LG_OK;
}

/* A tensor of layout `index`, everything but its flat offset read. */
static lg_status put_into_layout(const lg__at *at, const lg__report *r, uint64_t index, const uint64_t *flat_offset,
                                 lg__report_tensor *t, lg_error *err)
{
    if (index >= r->n_layouts) {
        return lg__at_error(at, "layout", err, LG_ERR_FORMAT, "%" PRIu64 ", but there are %zu layouts", index,
                            r->n_layouts);
    }
    t->layout = (size_t)index;
    const lg_layout *layout = r->layouts[index];
    if (layout->kind == LG__FLAT) {
        if (flat_offset == NULL) {
            return lg__at_error(at, "flat_offset", err, LG_ERR_FORMAT, "missing");
        }
        t->flat_offset = *flat_offset;
    } else if (flat_offset != NULL) {
        return lg__at_error(at, "flat_offset", err, LG_ERR_FORMAT, "tensor \"%s\" is in no flat buffer", t->name);
    }
    lg__tensor_desc desc = desc_of(t);
    if (lg__layout_check_tensor(layout, &desc, err) != LG_OK) {
        return lg__at_wrap(at, "layout", err);
    }
    return LG_OK;
}

static lg_status read_tensor(const json_t *object, lg__json_piece boxes, const lg__at *at, const lg__report *r,
                             lg__report_tensor *t, lg_error *err)
{
    LG__TRY(copy_name(object, at, "name", r->arena, &t->name, err));
    LG__TRY(lg__member_tensor(object, at, r->arena, &t->group, &t->dtype, &t->ndim, &t->shape, err));
    if ((json_object_get(object, "layout") != NULL) == (boxes.at != NULL)) {
        return lg__at_error(at, "layout", err, LG_ERR_FORMAT, "tensor \"%s\" has %s \"layout\" and \"boxes\"", t->name,
                            boxes.at != NULL ? "both" : "neither");
    }
    if (boxes.at != NULL) {
        return read_boxes(boxes, at, r, t, err);
    }
    uint64_t index = 0, flat_offset = 0;
    LG__TRY(lg__member_u64(object, at, "layout", UINT64_MAX, &index, err));
    bool has_offset = json_object_get(object, "flat_offset") != NULL;
    if (has_offset) {
        LG__TRY(lg__member_u64(object, at, "flat_offset", INT64_MAX, &flat_offset, err));
    }
    return put_into_layout(at, r, index, has_offset ? &flat_offset : NULL, t, err);
}

/* The same for a row in the plain form. */
static lg_status take_tensor(const lg__tensor_row *row, const lg__at *at, const lg__report *r, lg__report_tensor *t,
                             lg_error *err)
{
    if (lg__name_check("tensor", row->name.at, row->name.n, err) != LG_OK) {
        return lg__at_wrap(at, "name", err);
    }
    LG__TRY(lg__tensor_row_keep(row, r->arena, &t->name, &t->shape, err));
    t->group = row->group;
    t->dtype = row->dtype;
    t->ndim = row->ndim;
    uint64_t bytes = 0;
    if (lg__shape_bytes(t->dtype, t->ndim, t->shape, &bytes, err) != LG_OK) {
        return lg__at_wrap(at, "shape", err);
    }
    return put_into_layout(at, r, row->layout, row->has_flat_offset ? &row->flat_offset : NULL, t, err);
}

static lg_status next_tensor(lg__json_cursor *rows, const lg__at *at, const lg__report *r, lg__report_tensor *t,
                             lg_error *err)
{
    lg__tensor_row row;
    if (lg__tensor_row_take(rows, &row)) {
        return take_tensor(&row, at, r, t, err);
    }
    json_t *object = NULL;
    lg__json_piece boxes;
    LG__TRY(lg__tensor_row_parse(rows, at, &object, &boxes, err));
    lg_status status = read_tensor(object, boxes, at, r, t, err);
    json_decref(object);
    return status;
}

static lg_status read_tensors(lg__json_piece text, lg__report *r, lg_error *err)
{
    lg__json_cursor rows;
    LG__TRY(lg__rows_begin("tensors", text, &rows, err));
    const size_t most = lg__rows_most(text.n);
    r->tensors = lg__arena_array(r->arena, most, sizeof *r->tensors);
    if (r->tensors == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0;; i++) {
        bool more = false;
        LG__TRY(lg__json_next_element(&rows, &more, err));
        if (!more) {
            break;
        }
        lg__at at = {NULL, "tensors", i};
        LG__RETURN_IF(i == most, err, LG_ERR_INTERNAL, "more rows than fit their text");
        LG__TRY(next_tensor(&rows, &at, r, &r->tensors[i], err));
        r->n_tensors = i + 1;
    }
    size_t twin = 0;
    LG__TRY(find_twin(r->tensors, r->n_tensors, sizeof *r->tensors, compare_tensors, &twin, err));
    lg__at at = {NULL, "tensors", twin};
    return twin == r->n_tensors
               ? LG_OK
               : lg__at_error(&at, "name", err, LG_ERR_FORMAT, "\"%s\" is there twice", r->tensors[twin].name);
}

/* What every reader needs. */
static lg_status read_common(const json_t *top, lg__report *r, lg_error *err)
{
    LG__TRY(read_head(top, r, err));
    const json_t *rows = NULL;
    void *room = NULL;
    LG__TRY(rows_of(top, "files", r->arena, sizeof *r->files, &rows, &room, &r->n_files, err));
    r->files = room;
    for (size_t i = 0; i < r->n_files; i++) {
        lg__at at = {NULL, "files", i};
        LG__TRY(read_file(json_array_get(rows, i), &at, i > 0 ? &r->files[i - 1] : NULL, &r->files[i], err));
    }
    return LG_OK;
}

static lg_status read_rest(const json_t *top, lg__json_piece tensors, lg__report *r, lg_error *err)
{
    const json_t *rows = NULL;
    void *room = NULL;
    LG__TRY(read_uses(top, r, err));
    LG__TRY(read_layouts(top, r, err));
    LG__TRY(read_tensors(tensors, r, err));
    LG__TRY(rows_of(top, "aliases", r->arena, sizeof *r->aliases, &rows, &room, &r->n_aliases, err));
    r->aliases = room;
    for (size_t i = 0; i < r->n_aliases; i++) {
        const json_t *object = json_array_get(rows, i);
        lg__at at = {NULL, "aliases", i};
        LG__TRY(copy_name(object, &at, "alias", r->arena, &r->aliases[i].alias, err));
        LG__TRY(copy_name(object, &at, "name", r->arena, &r->aliases[i].name, err));
        LG__TRY(lg__member_bool(object, &at, "stored", &r->aliases[i].stored, err));
    }
    const json_t *state = NULL;
    LG__TRY(lg__member_get(top, NULL, "state", JSON_OBJECT, &state, err));
    LG__TRY(lg__state_check(state, NULL, err));
    r->state = json_incref((json_t *)(uintptr_t)state);
    return LG_OK;
}

static lg_status decode(const char *text, size_t bytes, bool all, lg__report **out, lg_error *err)
{
    LG__RETURN_IF(bytes == 0, err, LG_ERR_FORMAT, "empty report");
    LG__RETURN_IF(bytes > LG__REPORT_MAX, err, LG_ERR_FORMAT, "a report of %zu bytes; at most %zu are possible", bytes,
                  LG__REPORT_MAX);
    json_t *top = NULL;
    lg__json_piece tensors;
    LG__TRY(lg__json_parse_but((lg__json_piece){text, bytes}, 0, "tensors", &top, &tensors, err));
    lg__report *r = NULL;
    lg_status st = lg__report_new(&r, err);
    if (st == LG_OK) {
        st = read_common(top, r, err);
    }
    if (st == LG_OK && all) {
        st = read_rest(top, tensors, r, err);
    }
    json_decref(top);
    if (st != LG_OK) {
        lg__report_free(r);
        return st;
    }
    *out = r;
    return LG_OK;
}

lg_status lg__report_decode(const char *text, size_t bytes, lg__report **out, lg_error *err)
{
    return decode(text, bytes, true, out, err);
}

lg_status lg__report_decode_files(const char *text, size_t bytes, lg__report **out, lg_error *err)
{
    return decode(text, bytes, false, out, err);
}
