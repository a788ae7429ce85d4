/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/json.h"
#include "format/manifest.h"
#include "format/tensor_row.h"

#include <inttypes.h>
#include <string.h>

static void put_key(lg__buf *b, const char *key) { lg__buf_fmt(b, "\"%s\":", key); }

static void put_u64(lg__buf *b, const char *key, uint64_t v)
{
    put_key(b, key);
    lg__buf_json_u64(b, v);
}

static void put_text(lg__buf *b, const char *key, const char *text)
{
    put_key(b, key);
    lg__buf_json_text(b, text);
}

static void put_generation(lg__buf *b, const char *key, lg_generation g)
{
    put_key(b, key);
    lg__buf_json_generation(b, g);
}

/* The separator of rows, each on its own line. */
static void put_row(lg__buf *b, size_t i) { lg__buf_str(b, i == 0 ? "\n" : ",\n"); }

static void put_head(const lg__manifest *m, lg__buf *b)
{
    lg__buf_fmt(b, "\"format\":\"lastgood\",\"version\":[%d,%d],\"requires\":[],", LG__FORMAT_MAJOR, LG__FORMAT_MINOR);
    put_text(b, "run", m->run_id);
    lg__buf_str(b, ",");
    put_generation(b, "generation", m->generation);
    lg__buf_str(b, ",");
    put_text(b, "attempt", m->attempt);
    lg__buf_str(b, ",\n");
}

static void put_scalars(const lg__manifest *m, lg__buf *b)
{
    put_u64(b, "step", m->step);
    lg__buf_str(b, ",\"parent\":");
    if (m->has_parent) {
        lg__buf_str(b, "{");
        put_u64(b, "step", m->parent_step);
        lg__buf_str(b, ",");
        put_generation(b, "generation", m->parent);
        lg__buf_fmt(b, ",\"verified\":%s}", m->parent_verified ? "true" : "false");
    } else {
        lg__buf_str(b, "null");
    }
    lg__buf_str(b, ",");
    put_text(b, "created", m->created);
    lg__buf_str(b, ",");
    put_u64(b, "world", m->world);
    lg__buf_str(b, ",\"checksum\":\"crc32c\",");
    put_u64(b, "block_bytes", m->block_bytes);
    lg__buf_str(b, ",\n");
}

static void put_ranks(const lg__manifest *m, lg__buf *b)
{
    lg__buf_str(b, "\"ranks\":[");
    for (uint32_t r = 0; r < m->world; r++) {
        const lg__rank_row *row = &m->ranks[r];
        put_row(b, r);
        lg__buf_str(b, "{");
        for (int g = 0; g < LG_GROUP_COUNT; g++) {
            if (row->n_files[g] > 0) {
                put_key(b, lg_group_name((lg_group)g));
                lg__buf_json_u64s(b, row->file_bytes[g], row->n_files[g]);
                lg__buf_str(b, ",");
            }
        }
        put_u64(b, "sums", row->sums_bytes);
        lg__buf_str(b, ",\"report\":");
        lg__buf_json_hex(b, row->report);
        if (r == 0 || strcmp(row->domain, m->ranks[r - 1].domain) != 0) {
            lg__buf_str(b, ",");
            put_text(b, "domain", row->domain);
        }
        lg__buf_str(b, "}");
    }
    lg__buf_str(b, "\n],\n");
}

static void put_attached(const lg__manifest *m, lg__buf *b)
{
    lg__buf_str(b, "\"attached\":[");
    for (size_t i = 0; i < m->n_attached; i++) {
        put_row(b, i);
        lg__buf_str(b, "{");
        put_text(b, "name", m->attached[i].name);
        lg__buf_str(b, ",");
        put_u64(b, "bytes", m->attached[i].bytes);
        lg__buf_str(b, ",\"sha256\":");
        lg__buf_json_hex(b, m->attached[i].sha256);
        lg__buf_str(b, "}");
    }
    lg__buf_str(b, m->n_attached > 0 ? "\n],\n" : "],\n");
}

static void put_layouts(const lg__manifest *m, lg__buf *b)
{
    lg__buf_str(b, "\"layouts\":[");
    for (size_t i = 0; i < m->n_layouts; i++) {
        put_row(b, i);
        lg__buf_add(b, m->layouts[i]->text, m->layouts[i]->text_bytes);
    }
    lg__buf_str(b, m->n_layouts > 0 ? "\n],\n" : "],\n");
}

static void put_boxes(const lg__manifest_tensor *t, lg__buf *b)
{
    lg__buf_str(b, ",\"boxes\":[");
    for (size_t i = 0; i < t->n_pieces; i++) {
        lg__buf_box(b, i == 0, &t->pieces[i].rank, &t->pieces[i].box);
    }
    lg__buf_str(b, "]");
}

static void put_tensors(const lg__manifest *m, lg__buf *b)
{
    lg__buf_str(b, "\"tensors\":[");
    for (size_t i = 0; i < m->n_tensors; i++) {
        const lg__manifest_tensor *t = &m->tensors[i];
        put_row(b, i);
        lg__tensor_desc desc = lg__manifest_desc(t);
        lg__buf_tensor_row(b, &desc);
        if (!t->stored) {
            /* where its bytes lie is said once, by the tensor it is tied to */
        } else if (t->layout == LG__IRREGULAR) {
            put_boxes(t, b);
        } else {
            bool flat = m->layouts[t->layout]->kind == LG__FLAT;
            lg__buf_tensor_layout(b, t->layout, flat ? &t->flat_offset : NULL);
        }
        if (t->alias_of != NULL) {
            lg__buf_str(b, ",");
            put_text(b, "alias_of", t->alias_of);
            lg__buf_str(b, t->stored ? "" : ",\"stored\":false");
        }
        lg__buf_str(b, "}");
    }
    lg__buf_str(b, m->n_tensors > 0 ? "\n],\n" : "],\n");
}

static lg_status put_all(const lg__manifest *m, lg__buf *b, lg_error *err)
{
    put_head(m, b);
    if (m->tombstone) {
        lg__buf_str(b, "\"tombstone\":{");
        put_u64(b, "superseded_by", m->superseded_by);
        lg__buf_str(b, "}}");
    } else {
        put_scalars(m, b);
        put_ranks(m, b);
        put_attached(m, b);
        put_layouts(m, b);
        put_tensors(m, b);
        lg__buf_str(b, "\"state\":");
        if (m->state != NULL) {
            LG__TRY(lg__buf_json(b, m->state, false, err));
        } else {
            lg__buf_str(b, "{}");
        }
        lg__buf_str(b, "}");
    }
    return lg__buf_check(b, "manifest", err);
}

lg_status lg__manifest_encode(lg__manifest *m, lg__buf *out, lg_error *err)
{
    if (lg__manifest_check(m, err) != LG_OK) {
        /* It is not the file that is wrong here. */
        err->status = err->status == LG_ERR_FORMAT ? LG_ERR_INVALID : err->status;
        return lg_error_wrap(err, "manifest to be written");
    }
    for (size_t i = 0; i < m->n_layouts; i++) {
        LG__RETURN_IF(m->layouts[i]->text == NULL, err, LG_ERR_INTERNAL, "layout %zu is not resolved", i);
    }
    LG__TRY(lg__buf_check(out, "manifest", err));
    size_t start = out->len;
    uint8_t digest[LG__SHA256_BYTES];
    lg__sealed_json_begin(out);
    lg_status st = put_all(m, out, err);
    if (st == LG_OK) {
        st = lg__sealed_json_end(out, start, err);
    }
    if (st == LG_OK && out->len - start > LG__MANIFEST_MAX) {
        st = lg_error_set(err, LG_ERR_LIMIT, "manifest would be longer than %zu bytes", LG__MANIFEST_MAX);
    }
    if (st == LG_OK) {
        st = lg__sha256_of(out->data + start, out->len - start, digest, err);
    }
    if (st != LG_OK) {
        out->len = start;
        if (out->data != NULL) {
            out->data[start] = '\0';
        }
        out->failed = out->too_long = false;
        return st;
    }
    memcpy(m->sha256, digest, sizeof digest);
    return LG_OK;
}
