/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/json.h"
#include "base/mem.h"
#include "format/layout.h"
#include "format/layout_parts.h"

#include <inttypes.h>
#include <string.h>

/* ------------------------------------------------------------------- writing */

static void add_list(lg__buf *b, const char *key, const uint32_t *values, uint32_t n)
{
    lg__buf_fmt(b, "\"%s\":[", key);
    for (uint32_t i = 0; i < n; i++) {
        lg__buf_fmt(b, i == 0 ? "%" PRIu32 : ",%" PRIu32, values[i]);
    }
    lg__buf_str(b, "]");
}

static void add_text(lg__buf *b, const lg_layout *l)
{
    static const char *const kinds[] = {[LG__SPLIT] = "split", [LG__FLAT] = "flat", [LG__COPIES] = "copies"};
    lg__buf_fmt(b, "{\"kind\":\"%s\",\"mesh\":{", kinds[l->kind]);
    if (l->ranks == NULL) {
        lg__buf_fmt(b, "\"origin\":%" PRIu32 ",", l->origin);
    }
    add_list(b, "sizes", l->sizes, l->mesh_ndim);
    lg__buf_str(b, ",");
    if (l->ranks == NULL) {
        add_list(b, "strides", l->strides, l->mesh_ndim);
    } else {
        add_list(b, "ranks", l->ranks, l->n_ranks);
    }
    lg__buf_str(b, "}");
    if (l->kind == LG__FLAT) {
        lg__buf_str(b, ",\"length\":");
        lg__buf_json_u64(b, l->flat_length);
        lg__buf_fmt(b, ",\"axis\":%" PRId32, l->flat_axis);
    } else if (l->kind == LG__SPLIT) {
        lg__buf_str(b, ",\"splits\":[");
        for (uint32_t s = 0; s < l->n_splits; s++) {
            const lg_split *split = &l->splits[s];
            lg__buf_fmt(b, "%s{\"dim\":%" PRIu32 ",", s == 0 ? "" : ",", split->dim);
            if (split->axis == LG_NO_AXIS) {
                lg__buf_fmt(b, "\"pieces\":%" PRIu32, split->pieces);
            } else {
                lg__buf_fmt(b, "\"axis\":%" PRId32, split->axis);
            }
            lg__buf_fmt(b, ",\"mode\":\"%s\"}", split->mode == LG_SPLIT_CEIL ? "ceil" : "even");
        }
        lg__buf_str(b, "]");
    }
    if (l->kind != LG__COPIES) {
        lg__buf_fmt(b, ",\"writers\":%" PRIu32, l->writers);
        if (l->kind == LG__SPLIT && l->writers > 1) {
            lg__buf_fmt(b, ",\"writer_dim\":%" PRIu32, l->writer_dim);
        }
    }
    lg__buf_str(b, "}");
}

lg_status lg__layout_seal(lg_layout *layout, lg_error *err)
{
    lg__buf b;
    lg__buf_init(&b, LG__LAYOUT_MAX_TEXT);
    add_text(&b, layout);
    lg_status st = lg__buf_check(&b, "a layout's text", err);
    if (st == LG_OK) {
        st = lg__sha256_of(b.data, b.len, layout->id, err);
    }
    if (st == LG_OK) {
        layout->text_bytes = b.len;
        layout->text = lg__buf_take(&b);
    }
    lg__buf_free(&b);
    return st;
}

/* ------------------------------------------------------------------- parsing */

static lg_status get_u32(const json_t *object, const char *key, uint64_t max, uint32_t *out, lg_error *err)
{
    uint64_t v = 0;
    LG__TRY(lg__json_get_u64(object, key, &v, err));
    LG__RETURN_IF(v > max, err, LG_ERR_FORMAT, "\"%s\" is %" PRIu64 ", at most %" PRIu64 " is possible", key, v, max);
    *out = (uint32_t)v;
    return LG_OK;
}

/* At most `max` small integers. */
static lg_status get_list(const json_t *object, const char *key, size_t max, uint32_t *out, size_t *n, lg_error *err)
{
    const json_t *array = NULL;
    LG__TRY(lg__json_get(object, key, JSON_ARRAY, &array, err));
    size_t count = json_array_size(array);
    LG__RETURN_IF(count > max, err, LG_ERR_FORMAT, "\"%s\" has %zu entries, at most %zu are possible", key, count, max);
    for (size_t i = 0; i < count; i++) {
        uint64_t v = 0;
        LG__TRY(lg__json_u64(json_array_get(array, i), key, &v, err));
        LG__RETURN_IF(v > UINT32_MAX, err, LG_ERR_FORMAT, "\"%s\" has the entry %" PRIu64, key, v);
        out[i] = (uint32_t)v;
    }
    *n = count;
    return LG_OK;
}

typedef struct parsed {
    lg_layout_desc desc;
    lg__layout_kind kind;
    uint32_t sizes[LG_MAX_MESH_NDIM], strides[LG_MAX_MESH_NDIM];
    uint32_t *ranks;
    lg_split splits[LG_MAX_SPLITS];
    uint32_t writer_dim;
} parsed;

static lg_status parse_mesh(parsed *p, const json_t *json, lg_error *err)
{
    const json_t *mesh = NULL;
    LG__TRY(lg__json_get(json, "mesh", JSON_OBJECT, &mesh, err));
    size_t n = 0, n_ranks = 1;
    LG__TRY(get_list(mesh, "sizes", LG_MAX_MESH_NDIM, p->sizes, &n, err));
    p->desc.mesh_ndim = (uint32_t)n;
    p->desc.mesh_sizes = p->sizes;
    const json_t *ranks = json_object_get(mesh, "ranks");
    if (ranks == NULL) {
        LG__TRY(get_u32(mesh, "origin", LG__LAYOUT_MAX_RANKS, &p->desc.mesh_origin, err));
        LG__TRY(get_list(mesh, "strides", LG_MAX_MESH_NDIM, p->strides, &n, err));
        LG__RETURN_IF(n != p->desc.mesh_ndim, err, LG_ERR_FORMAT, "%zu \"strides\" for %" PRIu32 " \"sizes\"", n,
                      p->desc.mesh_ndim);
        p->desc.mesh_strides = p->strides;
        return LG_OK;
    }
    for (uint32_t a = 0; a < p->desc.mesh_ndim; a++) {
        LG__RETURN_IF(p->sizes[a] == 0 || n_ranks * p->sizes[a] > LG__LAYOUT_MAX_RANKS, err, LG_ERR_FORMAT,
                      "a mesh with axis size %" PRIu32, p->sizes[a]);
        n_ranks *= p->sizes[a];
    }
    LG__RETURN_IF(!json_is_array(ranks) || json_array_size(ranks) != n_ranks, err, LG_ERR_FORMAT,
                  "\"ranks\" does not list the %zu ranks of its mesh", n_ranks);
    p->ranks = lg__malloc(n_ranks * sizeof *p->ranks);
    if (p->ranks == NULL) {
        return lg__nomem(err);
    }
    p->desc.ranks = p->ranks;
    return get_list(mesh, "ranks", n_ranks, p->ranks, &n, err);
}

static lg_status parse_split(lg_split *out, const json_t *json, lg_error *err)
{
    LG__RETURN_IF(!json_is_object(json), err, LG_ERR_FORMAT, "a split is no object");
    *out = (lg_split){.axis = LG_NO_AXIS};
    LG__TRY(get_u32(json, "dim", LG_MAX_NDIM - 1, &out->dim, err));
    if (json_object_get(json, "pieces") != NULL) {
        LG__TRY(get_u32(json, "pieces", LG__LAYOUT_MAX_PIECES, &out->pieces, err));
    } else {
        uint32_t axis = 0;
        LG__TRY(get_u32(json, "axis", LG_MAX_MESH_NDIM - 1, &axis, err));
        out->axis = (int32_t)axis;
    }
    const char *mode = NULL;
    LG__TRY(lg__json_get_str(json, "mode", 16, &mode, err));
    LG__RETURN_IF(strcmp(mode, "ceil") != 0 && strcmp(mode, "even") != 0, err, LG_ERR_FORMAT,
                  "a split with an unknown mode");
    out->mode = mode[0] == 'c' ? LG_SPLIT_CEIL : LG_SPLIT_EVEN;
    return LG_OK;
}

static lg_status parse_fields(parsed *p, const json_t *json, lg_error *err)
{
    LG__RETURN_IF(!json_is_object(json), err, LG_ERR_FORMAT, "it is no object");
    const char *kind = NULL;
    LG__TRY(lg__json_get_str(json, "kind", 16, &kind, err));
    LG__TRY(parse_mesh(p, json, err));
    if (strcmp(kind, "copies") == 0) {
        p->kind = LG__COPIES;
        return LG_OK;
    }
    LG__TRY(get_u32(json, "writers", LG__LAYOUT_MAX_RANKS, &p->desc.writers, err));
    LG__RETURN_IF(p->desc.writers == 0, err, LG_ERR_FORMAT, "\"writers\" is 0");
    if (strcmp(kind, "flat") == 0) {
        uint32_t axis = 0;
        p->kind = LG__FLAT;
        LG__TRY(get_u32(json, "axis", LG_MAX_MESH_NDIM - 1, &axis, err));
        p->desc.flat_axis = (int32_t)axis;
        LG__TRY(lg__json_get_u64(json, "length", &p->desc.flat_length, err));
        LG__RETURN_IF(p->desc.flat_length == 0, err, LG_ERR_FORMAT, "\"length\" is 0");
        return LG_OK;
    }
    LG__RETURN_IF(strcmp(kind, "split") != 0, err, LG_ERR_FORMAT, "\"kind\" is none of split, flat and copies");
    p->kind = LG__SPLIT;
    const json_t *splits = NULL;
    LG__TRY(lg__json_get(json, "splits", JSON_ARRAY, &splits, err));
    size_t n = json_array_size(splits);
    LG__RETURN_IF(n > LG_MAX_SPLITS, err, LG_ERR_FORMAT, "%zu splits, at most %d are possible", n, LG_MAX_SPLITS);
    for (size_t i = 0; i < n; i++) {
        LG__TRY(parse_split(&p->splits[i], json_array_get(splits, i), err));
    }
    p->desc.n_splits = (uint32_t)n;
    p->desc.splits = p->splits;
    return p->desc.writers > 1 ? get_u32(json, "writer_dim", LG_MAX_NDIM - 1, &p->writer_dim, err) : LG_OK;
}

static uint32_t highest_rank(const lg_layout *l)
{
    if (l->ranks != NULL) {
        return l->ranks[l->by_rank[l->n_ranks - 1]];
    }
    return lg__layout_rank_at(l, l->n_ranks - 1);
}

/* Compares the text made of what was understood with what was there. */
static lg_status check_canonical(const lg_layout *l, const json_t *json, lg_error *err)
{
    lg__buf b;
    lg__buf_init(&b, 2 * LG__LAYOUT_MAX_TEXT);
    lg_status st = lg__buf_json(&b, json, false, err);
    if (st == LG_OK && (b.len != l->text_bytes || memcmp(b.data, l->text, b.len) != 0)) {
        st = lg_error_set(err, LG_ERR_FORMAT, "its text is not canonical");
    }
    lg__buf_free(&b);
    return st;
}

static lg_status parse(parsed *p, const json_t *json, uint32_t world, lg_layout **out, lg_error *err)
{
    LG__TRY(parse_fields(p, json, err));
    lg_layout *l = NULL;
    lg_status st = lg__layout_make(p->kind, &p->desc, false, &l, err);
    if (st != LG_OK) {
        /* What a caller could not ask for is a malformed file here. */
        return st == LG_ERR_NOMEM ? st : (err->status = LG_ERR_FORMAT);
    }
    l->writer_dim = p->writer_dim;
    uint32_t highest = highest_rank(l);
    if (highest >= world) {
        st = lg_error_set(err, LG_ERR_FORMAT, "it has rank %" PRIu32 " in a world of %" PRIu32, highest, world);
    }
    if (st == LG_OK) {
        st = lg__layout_seal(l, err);
    }
    if (st == LG_OK) {
        st = check_canonical(l, json, err);
    }
    if (st != LG_OK) {
        lg__layout_unref(l);
        return st;
    }
    *out = l;
    return LG_OK;
}

lg_status lg__layout_parse(const json_t *json, uint32_t world, lg_layout **out, lg_error *err)
{
    parsed p = {.desc = LG_LAYOUT_DESC_INIT};
    lg_status st = parse(&p, json, world, out, err);
    lg__free(p.ranks);
    return st == LG_OK ? st : lg_error_wrap(err, "layout");
}

/* --------------------------------------------------------------- fingerprints */

/* SHA-256 of ["model","name","BF16",[2,3]], or with the flat offset behind the
 * shape: compact JSON as everywhere, so that no two tensors share a text. */
lg_status lg__tensor_fingerprint_by(lg__sha256 *sha, lg__buf *scratch, const lg__tensor_desc *t, bool flat,
                                    uint64_t *out, lg_error *err)
{
    lg__buf *b = scratch;
    b->len = 0;
    lg__buf_str(b, "[\"");
    lg__buf_str(b, lg_group_name(t->group));
    lg__buf_str(b, "\",");
    lg__buf_json_str(b, t->name, strlen(t->name));
    lg__buf_str(b, ",\"");
    lg__buf_str(b, lg_dtype_name(t->dtype));
    lg__buf_str(b, "\",[");
    for (uint32_t d = 0; d < t->ndim; d++) {
        lg__buf_str(b, d == 0 ? "" : ",");
        lg__buf_json_u64(b, t->shape[d]);
    }
    lg__buf_str(b, "]");
    if (flat) {
        lg__buf_str(b, ",");
        lg__buf_json_u64(b, t->flat_offset);
    }
    lg__buf_str(b, "]");
    LG__TRY(lg__buf_check(b, "a tensor's fingerprint", err));
    uint8_t digest[LG__SHA256_BYTES];
    if (!lg__sha256_add(sha, b->data, b->len) || !lg__sha256_end(sha, digest)) {
        return lg__nomem(err);
    }
    *out = lg__get_u64le(digest);
    return LG_OK;
}

lg_status lg__tensor_fingerprint(const lg__tensor_desc *t, bool flat, uint64_t *out, lg_error *err)
{
    lg__buf b;
    lg__buf_init(&b, LG__FINGERPRINT_TEXT_MAX);
    lg__sha256 *sha = lg__sha256_new();
    lg_status st = sha == NULL ? lg__nomem(err) : lg__tensor_fingerprint_by(sha, &b, t, flat, out, err);
    lg__sha256_free(sha);
    lg__buf_free(&b);
    return st;
}
