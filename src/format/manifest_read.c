/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/json.h"
#include "format/manifest.h"
#include "format/member.h"
#include "format/names.h"
#include "format/tensor_row.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* What this version can do that a manifest may require. None yet. */
static bool feature_known(const char *name)
{
    (void)name;
    return false;
}

static lg_status read_version(const json_t *top, lg__manifest *m, lg_error *err)
{
    const json_t *value = json_object_get(top, "format");
    const char *kind = json_string_value(json_object_get(top, "kind"));
    char shown[64];
    LG__RETURN_IF(value == NULL && kind != NULL, err, LG_ERR_FORMAT, "this is a record of the kind \"%s\", no manifest",
                  lg__printable(kind, shown, sizeof shown));
    const char *format = NULL;
    LG__TRY(lg__member_text(top, NULL, "format", 64, &format, err));
    LG__RETURN_IF(strcmp(format, "lastgood") != 0, err, LG_ERR_FORMAT, "format: \"%s\" is not \"lastgood\"", format);

    const json_t *version = NULL;
    LG__TRY(lg__member_get(top, NULL, "version", JSON_ARRAY, &version, err));
    const json_int_t major = json_integer_value(json_array_get(version, 0));
    const json_int_t minor = json_integer_value(json_array_get(version, 1));
    LG__RETURN_IF(json_array_size(version) != 2 || !json_is_integer(json_array_get(version, 0)) ||
                      !json_is_integer(json_array_get(version, 1)) || major < 1 || minor < 0,
                  err, LG_ERR_FORMAT, "version: not two integers, of which the first is at least 1");
    LG__RETURN_IF(major > LG__FORMAT_MAJOR, err, LG_ERR_VERSION,
                  "format version %" JSON_INTEGER_FORMAT ".%" JSON_INTEGER_FORMAT
                  "; this version of lastgood reads %d.x",
                  major, minor, LG__FORMAT_MAJOR);
    m->major = (uint32_t)major;
    m->minor = minor > UINT32_MAX ? UINT32_MAX : (uint32_t)minor;

    const json_t *requires = NULL;
    LG__TRY(lg__member_get(top, NULL, "requires", JSON_ARRAY, &requires, err));
    for (size_t i = 0; i < json_array_size(requires); i++) {
        lg__at at = {NULL, "requires", i};
        const char *feature = json_string_value(json_array_get(requires, i));
        if (feature == NULL) {
            return lg__at_error(&at, NULL, err, LG_ERR_FORMAT, "not a string");
        }
        if (!feature_known(feature)) {
            return lg__at_error(&at, NULL, err, LG_ERR_VERSION, "needs the feature \"%s\", which this version lacks",
                                lg__printable(feature, shown, sizeof shown));
        }
    }
    return LG_OK;
}

static lg_status read_ids(const json_t *top, lg__manifest *m, lg_error *err)
{
    LG__TRY(lg__member_hex(top, NULL, "run", LG_RUN_ID_TEXT - 1, m->run_id, err));
    LG__TRY(lg__member_generation(top, NULL, "generation", &m->generation, err));
    return lg__member_hex(top, NULL, "attempt", LG__ATTEMPT_HEX, m->attempt, err);
}

static lg_status read_tombstone(const json_t *top, const json_t *tombstone, lg__manifest *m, lg_error *err)
{
    static const char *const others[] = {"step", "ranks", "layouts", "state"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        LG__RETURN_IF(json_object_get(top, others[i]) != NULL, err, LG_ERR_FORMAT,
                      "both a tombstone and a checkpoint: it has \"tombstone\" and \"%s\"", others[i]);
    }
    lg__at at = {NULL, "tombstone", LG__AT_MEMBER};
    m->tombstone = true;
    return lg__member_u64(tombstone, &at, "superseded_by", UINT64_MAX, &m->superseded_by, err);
}

static lg_status read_scalars(const json_t *top, lg__manifest *m, lg_error *err)
{
    LG__TRY(lg__member_u64(top, NULL, "step", UINT64_MAX, &m->step, err));
    const json_t *parent = json_object_get(top, "parent");
    if (!json_is_null(parent)) {
        LG__TRY(lg__member_get(top, NULL, "parent", JSON_OBJECT, &parent, err));
        lg__at at = {NULL, "parent", LG__AT_MEMBER};
        LG__TRY(lg__member_u64(parent, &at, "step", UINT64_MAX, &m->parent_step, err));
        LG__TRY(lg__member_generation(parent, &at, "generation", &m->parent, err));
        LG__TRY(lg__member_bool(parent, &at, "verified", &m->parent_verified, err));
        m->has_parent = true;
    }
    LG__TRY(lg__member_created(top, NULL, "created", m->created, err));
    LG__TRY(lg__member_u32(top, NULL, "world", UINT32_MAX, &m->world, err));
    const char *checksum = NULL;
    LG__TRY(lg__member_text(top, NULL, "checksum", 64, &checksum, err));
    LG__RETURN_IF(strcmp(checksum, "crc32c") != 0, err, LG_ERR_FORMAT, "checksum: unknown algorithm \"%s\"", checksum);
    return lg__member_u64(top, NULL, "block_bytes", UINT64_MAX, &m->block_bytes, err);
}

static lg_status read_row(const json_t *object, const lg__at *at, lg__arena *arena, lg__rank_row *row, lg_error *err)
{
    if (!json_is_object(object)) {
        return lg__at_error(at, NULL, err, LG_ERR_FORMAT, "not an object");
    }
    for (int g = 0; g < LG_GROUP_COUNT; g++) {
        const char *group = lg_group_name((lg_group)g);
        const json_t *files = NULL;
        LG__TRY(lg__member_optional(object, at, group, JSON_ARRAY, &files, err));
        if (files == NULL) {
            continue;
        }
        uint32_t n = (uint32_t)json_array_size(files);
        uint64_t *bytes = lg__arena_array(arena, n, sizeof *bytes);
        if (bytes == NULL) {
            return lg__nomem(err);
        }
        LG__TRY(lg__member_extent(object, at, group, n, bytes, err));
        row->n_files[g] = n;
        row->file_bytes[g] = bytes;
    }
    LG__TRY(lg__member_u64(object, at, "sums", INT64_MAX, &row->sums_bytes, err));
    return lg__member_digest(object, at, "report", row->report, err);
}

static lg_status read_ranks(const json_t *top, lg__manifest *m, lg_error *err)
{
    const json_t *rows = NULL;
    LG__TRY(lg__member_get(top, NULL, "ranks", JSON_ARRAY, &rows, err));
    if (m->world == 0 || m->world > LG__MAX_WORLD || json_array_size(rows) != m->world) {
        return lg__at_error(NULL, "ranks", err, LG_ERR_FORMAT, "%zu rows for a world of %u ranks",
                            json_array_size(rows), m->world);
    }
    m->ranks = lg__arena_array(m->arena, m->world, sizeof *m->ranks);
    if (m->ranks == NULL) {
        return lg__nomem(err);
    }
    const char *domain = NULL;
    for (uint32_t r = 0; r < m->world; r++) {
        const json_t *object = json_array_get(rows, r);
        lg__at at = {NULL, "ranks", r};
        LG__TRY(read_row(object, &at, m->arena, &m->ranks[r], err));
        if (json_object_get(object, "domain") != NULL) {
            const char *text = NULL;
            LG__TRY(lg__member_text(object, &at, "domain", LG__NAME_MAX - 1, &text, err));
            domain = lg__arena_strdup(m->arena, text);
            if (domain == NULL) {
                return lg__nomem(err);
            }
        }
        m->ranks[r].domain = domain;
    }
    return LG_OK;
}

static lg_status read_attached(const json_t *top, lg__manifest *m, lg_error *err)
{
    const json_t *rows = NULL;
    LG__TRY(lg__member_get(top, NULL, "attached", JSON_ARRAY, &rows, err));
    size_t n = json_array_size(rows);
    m->attached = lg__arena_array(m->arena, n, sizeof *m->attached);
    if (m->attached == NULL) {
        return lg__nomem(err);
    }
    m->n_attached = n;
    for (size_t i = 0; i < n; i++) {
        const json_t *object = json_array_get(rows, i);
        lg__at at = {NULL, "attached", i};
        if (!json_is_object(object)) {
            return lg__at_error(&at, NULL, err, LG_ERR_FORMAT, "not an object");
        }
        const char *name = NULL;
        LG__TRY(lg__member_text(object, &at, "name", LG__NAME_MAX - 1, &name, err));
        LG__TRY(lg__member_u64(object, &at, "bytes", INT64_MAX, &m->attached[i].bytes, err));
        LG__TRY(lg__member_digest(object, &at, "sha256", m->attached[i].sha256, err));
        m->attached[i].name = lg__arena_strdup(m->arena, name);
        if (m->attached[i].name == NULL) {
            return lg__nomem(err);
        }
    }
    return LG_OK;
}

static lg_status read_layouts(const json_t *top, lg__manifest *m, lg_error *err)
{
    const json_t *rows = NULL;
    LG__TRY(lg__member_get(top, NULL, "layouts", JSON_ARRAY, &rows, err));
    size_t n = json_array_size(rows);
    m->layouts = lg__arena_array(m->arena, n, sizeof *m->layouts);
    if (m->layouts == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0; i < n; i++) {
        lg__at at = {NULL, "layouts", i};
        if (lg__layout_parse(json_array_get(rows, i), m->world, &m->layouts[i], err) != LG_OK) {
            return lg__at_wrap(&at, NULL, err);
        }
        m->n_layouts = i + 1;
    }
    return LG_OK;
}

/* How many boxes of one tensor all files of its group hold: one each. */
static size_t most_boxes(const lg__manifest *m, lg_group group)
{
    size_t n = 0;
    for (uint32_t r = 0; r < m->world; r++) {
        n += m->ranks[r].n_files[group];
    }
    return n;
}

static lg_status read_boxes(lg__json_piece text, const lg__at *at, const lg__manifest *m, lg__manifest_tensor *t,
                            lg_error *err)
{
    size_t n = 0;
    LG__TRY(lg__boxes_count(text, at, &n, err));
    size_t most = most_boxes(m, lg__file_group(t->group, t->dtype, false));
    if (n > most) {
        return lg__at_error(at, "boxes", err, LG_ERR_FORMAT, "%zu boxes of \"%s\", but only %zu files for them", n,
                            t->name, most);
    }
    lg__stored_piece *pieces = lg__arena_array(m->arena, n, sizeof *pieces);
    if (pieces == NULL) {
        return lg__nomem(err);
    }
    lg__json_cursor boxes = lg__boxes_begin(text);
    for (size_t i = 0; i < n; i++) {
        lg__stored_piece *p = &pieces[i];
        lg__at here = {at, "boxes", i};
        LG__TRY(lg__boxes_next(&boxes, &here, t->ndim, &p->rank, &p->box, err));
        p->number = i > 0 && p[-1].rank == p->rank ? p[-1].number + 1 : 0;
    }
    LG__TRY(lg__boxes_end(&boxes, at, err));
    t->layout = LG__IRREGULAR;
    t->pieces = pieces;
    t->n_pieces = n;
    return LG_OK;
}

static lg_status no_layout(const lg__at *at, uint64_t index, const lg__manifest *m, lg_error *err)
{
    return lg__at_error(at, "layout", err, LG_ERR_FORMAT, "%" PRIu64 ", but there are %zu layouts", index,
                        m->n_layouts);
}

static lg_status not_flat(const lg__at *at, const lg__manifest_tensor *t, lg_error *err)
{
    return lg__at_error(at, "flat_offset", err, LG_ERR_FORMAT, "tensor \"%s\" is in no flat buffer", t->name);
}

/* "layout" and "flat_offset", or "boxes", or neither for an alias without
 * bytes of its own. */
static lg_status read_place(const json_t *object, lg__json_piece boxes, const lg__at *at, const lg__manifest *m,
                            lg__manifest_tensor *t, lg_error *err)
{
    const json_t *layout = json_object_get(object, "layout");
    const json_t *flat_offset = json_object_get(object, "flat_offset");
    if (!t->stored) {
        if (layout != NULL || boxes.at != NULL || flat_offset != NULL) {
            return lg__at_error(at, "stored", err, LG_ERR_FORMAT, "tensor \"%s\" is not stored, yet says where",
                                t->name);
        }
        t->layout = LG__IRREGULAR;
        return LG_OK;
    }
    if ((layout != NULL) == (boxes.at != NULL)) {
        return lg__at_error(at, "layout", err, LG_ERR_FORMAT, "tensor \"%s\" has %s \"layout\" and \"boxes\"", t->name,
                            boxes.at != NULL ? "both" : "neither");
    }
    bool flat = false;
    if (boxes.at != NULL) {
        LG__TRY(read_boxes(boxes, at, m, t, err));
    } else {
        uint64_t index = 0;
        LG__TRY(lg__member_u64(object, at, "layout", UINT64_MAX, &index, err));
        if (index >= m->n_layouts) {
            return no_layout(at, index, m, err);
        }
        t->layout = (size_t)index;
        flat = m->layouts[index]->kind == LG__FLAT;
    }
    if (flat) {
        return lg__member_u64(object, at, "flat_offset", INT64_MAX, &t->flat_offset, err);
    }
    if (flat_offset != NULL) {
        return not_flat(at, t, err);
    }
    return LG_OK;
}

static lg_status read_tensor(const json_t *object, lg__json_piece boxes, const lg__at *at, const lg__manifest *m,
                             lg__manifest_tensor *t, lg_error *err)
{
    const char *name = NULL, *alias_of = NULL;
    LG__TRY(lg__member_name(object, at, "name", &name, err));
    t->name = lg__arena_strdup(m->arena, name);
    if (t->name == NULL) {
        return lg__nomem(err);
    }
    if (lg__member_tensor(object, at, m->arena, &t->group, &t->dtype, &t->ndim, &t->shape, err) != LG_OK) {
        return err->status == LG_ERR_NOMEM ? err->status : lg_error_wrap(err, "tensor \"%s\"", name);
    }
    t->stored = true;
    if (json_object_get(object, "stored") != NULL) {
        LG__TRY(lg__member_bool(object, at, "stored", &t->stored, err));
    }
    if (json_object_get(object, "alias_of") != NULL) {
        LG__TRY(lg__member_name(object, at, "alias_of", &alias_of, err));
        t->alias_of = lg__arena_strdup(m->arena, alias_of);
        if (t->alias_of == NULL) {
            return lg__nomem(err);
        }
    }
    return read_place(object, boxes, at, m, t, err);
}

/* The same for a row in the plain form; lg__manifest_check looks at the rest. */
static lg_status take_tensor(const lg__tensor_row *row, const lg__at *at, const lg__manifest *m, lg__manifest_tensor *t,
                             lg_error *err)
{
    if (lg__name_check("tensor", row->name.at, row->name.n, err) != LG_OK) {
        return lg__at_wrap(at, "name", err);
    }
    LG__TRY(lg__tensor_row_keep(row, m->arena, &t->name, &t->shape, err));
    t->group = row->group;
    t->dtype = row->dtype;
    t->ndim = row->ndim;
    t->stored = true;
    if (row->layout >= m->n_layouts) {
        return no_layout(at, row->layout, m, err);
    }
    t->layout = (size_t)row->layout;
    bool flat = m->layouts[t->layout]->kind == LG__FLAT;
    if (flat && !row->has_flat_offset) {
        return lg__at_error(at, "flat_offset", err, LG_ERR_FORMAT, "missing");
    }
    if (!flat && row->has_flat_offset) {
        return not_flat(at, t, err);
    }
    t->flat_offset = row->flat_offset;
    return LG_OK;
}

static lg_status next_tensor(lg__json_cursor *rows, const lg__at *at, const lg__manifest *m, lg__manifest_tensor *t,
                             lg_error *err)
{
    lg__tensor_row row;
    if (lg__tensor_row_take(rows, &row)) {
        return take_tensor(&row, at, m, t, err);
    }
    json_t *object = NULL;
    lg__json_piece boxes;
    LG__TRY(lg__tensor_row_parse(rows, at, &object, &boxes, err));
    lg_status status = read_tensor(object, boxes, at, m, t, err);
    json_decref(object);
    return status;
}

static int compare_tensors(const void *a, const void *b)
{
    return strcmp(((const lg__manifest_tensor *)a)->name, ((const lg__manifest_tensor *)b)->name);
}

static lg_status read_tensors(lg__json_piece text, lg__manifest *m, lg_error *err)
{
    lg__json_cursor rows;
    LG__TRY(lg__rows_begin("tensors", text, &rows, err));
    const size_t most = lg__rows_most(text.n);
    m->tensors = lg__arena_array(m->arena, most, sizeof *m->tensors);
    if (m->tensors == NULL) {
        return lg__nomem(err);
    }
    bool sorted = true;
    for (size_t i = 0;; i++) {
        bool more = false;
        LG__TRY(lg__json_next_element(&rows, &more, err));
        if (!more) {
            break;
        }
        lg__at at = {NULL, "tensors", i};
        LG__RETURN_IF(i == most, err, LG_ERR_INTERNAL, "more rows than fit their text");
        LG__TRY(next_tensor(&rows, &at, m, &m->tensors[i], err));
        sorted = sorted && (i == 0 || strcmp(m->tensors[i - 1].name, m->tensors[i].name) < 0);
        m->n_tensors = i + 1;
    }
    if (!sorted) {
        qsort(m->tensors, m->n_tensors, sizeof *m->tensors, compare_tensors);
    }
    return LG_OK;
}

/* An alias without bytes of its own lies where the tensor lies that it is tied
 * to; checked before. */
static void place_aliases(lg__manifest *m)
{
    for (size_t i = 0; i < m->n_tensors; i++) {
        lg__manifest_tensor *t = &m->tensors[i];
        if (!t->stored) {
            const lg__manifest_tensor *of = lg__manifest_find(m, t->alias_of);
            t->layout = of->layout;
            t->flat_offset = of->flat_offset;
            t->pieces = of->pieces;
            t->n_pieces = of->n_pieces;
        }
    }
}

static lg_status read_all(const json_t *top, lg__json_piece tensors, lg__manifest *m, lg_error *err)
{
    LG__TRY(read_version(top, m, err));
    LG__TRY(read_ids(top, m, err));
    const json_t *tombstone = NULL;
    LG__TRY(lg__member_optional(top, NULL, "tombstone", JSON_OBJECT, &tombstone, err));
    if (tombstone != NULL) {
        LG__RETURN_IF(tensors.at != NULL, err, LG_ERR_FORMAT,
                      "both a tombstone and a checkpoint: it has \"tombstone\" and \"tensors\"");
        LG__TRY(read_tombstone(top, tombstone, m, err));
        return lg__manifest_check(m, err);
    }
    LG__TRY(read_scalars(top, m, err));
    LG__TRY(read_ranks(top, m, err));
    LG__TRY(read_attached(top, m, err));
    LG__TRY(read_layouts(top, m, err));
    LG__TRY(read_tensors(tensors, m, err));
    const json_t *state = NULL;
    LG__TRY(lg__member_get(top, NULL, "state", JSON_OBJECT, &state, err));
    m->state = json_incref((json_t *)(uintptr_t)state);
    LG__TRY(lg__manifest_check(m, err));
    place_aliases(m);
    return LG_OK;
}

lg_status lg__manifest_decode(const char *bytes, size_t n, lg__manifest **out, lg_error *err)
{
    LG__RETURN_IF(n > LG__MANIFEST_MAX, err, LG_ERR_FORMAT, "a manifest of %zu bytes; at most %zu are possible", n,
                  LG__MANIFEST_MAX);
    json_t *top = NULL;
    lg__json_piece text, tensors;
    LG__TRY(lg__sealed_json_text(bytes, n, &text, err));
    LG__TRY(lg__json_parse_but(text, 0, "tensors", &top, &tensors, err));
    lg__manifest *m = NULL;
    lg_status st = lg__manifest_new(&m, err);
    if (st == LG_OK) {
        st = read_all(top, tensors, m, err);
    }
    if (st == LG_OK) {
        st = lg__sha256_of(bytes, n, m->sha256, err);
    }
    json_decref(top);
    if (st != LG_OK) {
        lg__manifest_free(m);
        return st;
    }
    *out = m;
    return LG_OK;
}
