/* SPDX-License-Identifier: Apache-2.0 */
#include "format/tensor_row.h"

#include "base/error.h"

#include <string.h>

/* Objects and arrays around a row, and around a box. */
#define ROW_DEPTH 2
#define BOX_DEPTH 4

/* ------------------------------------------------------------------- reading */

lg_status lg__rows_begin(const char *key, lg__json_piece text, lg__json_cursor *rows, lg_error *err)
{
    if (text.at == NULL) {
        return lg__at_error(NULL, key, err, LG_ERR_FORMAT, "missing");
    }
    text = lg__json_trimmed(text);
    if (text.n == 0 || text.at[0] != '[') {
        return lg__at_error(NULL, key, err, LG_ERR_FORMAT, "not an array");
    }
    *rows = lg__json_cursor_over(key, text);
    return LG_OK;
}

bool lg__tensor_row_take(lg__json_cursor *rows, lg__tensor_row *out)
{
    const char *p = rows->text + rows->at, *end = rows->text + rows->n;
    lg__json_piece dtype;
    size_t ndim = 0;
    if (!LG__JSON_TAKE(&p, end, "{\"name\":") || !lg__json_take_string(&p, end, &out->name)) {
        return false;
    }
    if (LG__JSON_TAKE(&p, end, ",\"group\":\"model\"")) {
        out->group = LG_GROUP_MODEL;
    } else if (LG__JSON_TAKE(&p, end, ",\"group\":\"optim\"")) {
        out->group = LG_GROUP_OPTIM;
    } else {
        return false;
    }
    if (!LG__JSON_TAKE(&p, end, ",\"dtype\":") || !lg__json_take_string(&p, end, &dtype) ||
        !lg__dtype_of(dtype, &out->dtype) || !LG__JSON_TAKE(&p, end, ",\"shape\":") ||
        !lg__json_take_numbers(&p, end, out->shape, LG_MAX_NDIM, &ndim) || !LG__JSON_TAKE(&p, end, ",\"layout\":") ||
        !lg__json_take_number(&p, end, &out->layout)) {
        return false;
    }
    out->ndim = (uint32_t)ndim;
    out->flat_offset = 0;
    out->has_flat_offset = LG__JSON_TAKE(&p, end, ",\"flat_offset\":");
    if ((out->has_flat_offset && !lg__json_take_number(&p, end, &out->flat_offset)) || !LG__JSON_TAKE(&p, end, "}")) {
        return false;
    }
    rows->at = (size_t)(p - rows->text);
    return true;
}

lg_status lg__tensor_row_parse(lg__json_cursor *rows, const lg__at *at, json_t **object, lg__json_piece *boxes,
                               lg_error *err)
{
    lg__json_piece row;
    LG__TRY(lg__json_skip_value(rows, &row, err));
    row = lg__json_trimmed(row);
    if (row.n == 0 || row.at[0] != '{') {
        json_t *other = NULL;
        if (lg__json_parse_piece(row.at, row.n, 0, ROW_DEPTH, &other, err) != LG_OK) {
            return lg__at_wrap(at, NULL, err);
        }
        json_decref(other);
        return lg__at_error(at, NULL, err, LG_ERR_FORMAT, "not an object");
    }
    if (lg__json_parse_but(row, ROW_DEPTH, "boxes", object, boxes, err) != LG_OK) {
        return lg__at_wrap(at, NULL, err);
    }
    return LG_OK;
}

lg_status lg__tensor_row_keep(const lg__tensor_row *row, lg__arena *arena, const char **name, const uint64_t **shape,
                              lg_error *err)
{
    char *kept = lg__arena_strndup(arena, row->name.at, row->name.n);
    uint64_t *sizes = lg__arena_array(arena, row->ndim, sizeof *sizes);
    if (kept == NULL || sizes == NULL) {
        return lg__nomem(err);
    }
    memcpy(sizes, row->shape, row->ndim * sizeof *sizes);
    *name = kept;
    *shape = sizes;
    return LG_OK;
}

/* --------------------------------------------------------------------- boxes */

lg__json_cursor lg__boxes_begin(lg__json_piece text) { return lg__json_cursor_over("boxes", lg__json_trimmed(text)); }

lg_status lg__boxes_count(lg__json_piece text, const lg__at *at, size_t *n, lg_error *err)
{
    text = lg__json_trimmed(text);
    if (text.n == 0 || text.at[0] != '[') {
        return lg__at_error(at, "boxes", err, LG_ERR_FORMAT, "not an array");
    }
    return lg__json_count_elements("boxes", text, n, err) == LG_OK ? LG_OK : lg__at_wrap(at, "boxes", err);
}

static bool take_extent(const char **p, const char *end, uint32_t ndim, uint64_t *out)
{
    size_t n = 0;
    return lg__json_take_numbers(p, end, out, ndim, &n) && n == ndim;
}

static bool take_box(lg__json_cursor *boxes, uint32_t ndim, uint32_t *rank, lg__region *out)
{
    const char *p = boxes->text + boxes->at, *end = boxes->text + boxes->n;
    uint64_t r = 0;
    if (!LG__JSON_TAKE(&p, end, "{")) {
        return false;
    }
    if (rank != NULL && (!LG__JSON_TAKE(&p, end, "\"rank\":") || !lg__json_take_number(&p, end, &r) || r > UINT32_MAX ||
                         !LG__JSON_TAKE(&p, end, ","))) {
        return false;
    }
    if (!LG__JSON_TAKE(&p, end, "\"offset\":") || !take_extent(&p, end, ndim, out->offset) ||
        !LG__JSON_TAKE(&p, end, ",\"size\":") || !take_extent(&p, end, ndim, out->size) ||
        !LG__JSON_TAKE(&p, end, "}")) {
        return false;
    }
    if (rank != NULL) {
        *rank = (uint32_t)r;
    }
    boxes->at = (size_t)(p - boxes->text);
    return true;
}

static lg_status parse_box(const json_t *object, const lg__at *at, uint32_t ndim, uint32_t *rank, lg__region *out,
                           lg_error *err)
{
    if (!json_is_object(object)) {
        return lg__at_error(at, NULL, err, LG_ERR_FORMAT, "not an object");
    }
    if (rank != NULL) {
        LG__TRY(lg__member_u32(object, at, "rank", UINT32_MAX, rank, err));
    }
    LG__TRY(lg__member_extent(object, at, "offset", ndim, out->offset, err));
    return lg__member_extent(object, at, "size", ndim, out->size, err);
}

lg_status lg__boxes_next(lg__json_cursor *boxes, const lg__at *at, uint32_t ndim, uint32_t *rank, lg__region *out,
                         lg_error *err)
{
    bool more = false;
    if (lg__json_next_element(boxes, &more, err) != LG_OK) {
        return lg__at_wrap(at, NULL, err);
    }
    LG__RETURN_IF(!more, err, LG_ERR_INTERNAL, "fewer boxes than were counted");
    out->ndim = ndim;
    if (take_box(boxes, ndim, rank, out)) {
        return LG_OK;
    }
    lg__json_piece text;
    json_t *object = NULL;
    LG__TRY(lg__json_skip_value(boxes, &text, err));
    if (lg__json_parse_piece(text.at, text.n, 0, BOX_DEPTH, &object, err) != LG_OK) {
        return lg__at_wrap(at, NULL, err);
    }
    lg_status status = parse_box(object, at, ndim, rank, out, err);
    json_decref(object);
    return status;
}

lg_status lg__boxes_end(lg__json_cursor *boxes, const lg__at *at, lg_error *err)
{
    bool more = false;
    if (lg__json_next_element(boxes, &more, err) != LG_OK) {
        return lg__at_wrap(at, "boxes", err);
    }
    LG__RETURN_IF(more, err, LG_ERR_INTERNAL, "more boxes than were counted");
    return LG_OK;
}

/* ------------------------------------------------------------------- writing */

void lg__buf_tensor_row(lg__buf *b, const lg__tensor_desc *t)
{
    lg__buf_str(b, "{\"name\":");
    lg__buf_json_text(b, t->name);
    lg__buf_str(b, ",\"group\":\"");
    lg__buf_str(b, lg_group_name(t->group));
    lg__buf_str(b, "\",\"dtype\":\"");
    lg__buf_str(b, lg_dtype_name(t->dtype));
    lg__buf_str(b, "\",\"shape\":");
    lg__buf_json_u64s(b, t->shape, t->ndim);
}

void lg__buf_tensor_layout(lg__buf *b, size_t layout, const uint64_t *flat_offset)
{
    lg__buf_str(b, ",\"layout\":");
    lg__buf_json_u64(b, layout);
    if (flat_offset != NULL) {
        lg__buf_str(b, ",\"flat_offset\":");
        lg__buf_json_u64(b, *flat_offset);
    }
}

void lg__buf_box(lg__buf *b, bool first, const uint32_t *rank, const lg__region *box)
{
    lg__buf_str(b, first ? "{" : ",{");
    if (rank != NULL) {
        lg__buf_str(b, "\"rank\":");
        lg__buf_json_u64(b, *rank);
        lg__buf_str(b, ",");
    }
    lg__buf_str(b, "\"offset\":");
    lg__buf_json_u64s(b, box->offset, box->ndim);
    lg__buf_str(b, ",\"size\":");
    lg__buf_json_u64s(b, box->size, box->ndim);
    lg__buf_str(b, "}");
}
