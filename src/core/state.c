/* SPDX-License-Identifier: Apache-2.0 */
#include "base/json.h"
#include "core/checkpoint.h"
#include "format/tagged.h"

#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------ global state */

static lg_status global_value(lg_checkpoint *c, const char *key, const json_t **out, lg_error *err)
{
    LG__RETURN_IF(c == NULL || key == NULL, err, LG_ERR_INVALID, "global state: give a checkpoint and a key");
    *out = json_object_get(c->m->state, key);
    char shown[300];
    LG__RETURN_IF(*out == NULL, err, LG_ERR_MISSING, "step %llu has no global state \"%s\"",
                  (unsigned long long)c->m->step, lg__printable(key, shown, sizeof shown));
    return LG_OK;
}

static lg_status in_key(const char *key, lg_status status, lg_error *err)
{
    char shown[300];
    return status == LG_OK ? LG_OK : lg_error_wrap(err, "global state \"%s\"", lg__printable(key, shown, sizeof shown));
}

lg_status lg_checkpoint_global_u64(lg_checkpoint *c, const char *key, uint64_t *out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(out == NULL, err, LG_ERR_INVALID, "global state: give a place for the value");
    const json_t *v = NULL;
    LG__TRY(global_value(c, key, &v, err));
    return in_key(key, lg__tagged_get_u64(v, out, err), err);
}

lg_status lg_checkpoint_global_i64(lg_checkpoint *c, const char *key, int64_t *out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(out == NULL, err, LG_ERR_INVALID, "global state: give a place for the value");
    const json_t *v = NULL;
    LG__TRY(global_value(c, key, &v, err));
    return in_key(key, lg__tagged_get_i64(v, out, err), err);
}

lg_status lg_checkpoint_global_f64(lg_checkpoint *c, const char *key, double *out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(out == NULL, err, LG_ERR_INVALID, "global state: give a place for the value");
    const json_t *v = NULL;
    LG__TRY(global_value(c, key, &v, err));
    return in_key(key, lg__tagged_get_f64(v, out, err), err);
}

lg_status lg_checkpoint_global_str(lg_checkpoint *c, const char *key, const char **out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(out == NULL, err, LG_ERR_INVALID, "global state: give a place for the value");
    const json_t *v = NULL;
    LG__TRY(global_value(c, key, &v, err));
    LG__RETURN_IF(!json_is_string(v), err, LG_ERR_MISMATCH, "global state \"%.200s\" is no string", key);
    LG__RETURN_IF(json_string_length(v) != strlen(json_string_value(v)), err, LG_ERR_MISMATCH,
                  "global state \"%.200s\" has a NUL in it; read it as JSON", key);
    *out = json_string_value(v);
    return LG_OK;
}

static const lg__handed_out *find_value(const lg_checkpoint *c, const char *key, bool is_json)
{
    for (const lg__handed_out *h = c->values; h != NULL; h = h->next) {
        if (h->is_json == is_json && strcmp(h->key, key) == 0) {
            return h;
        }
    }
    return NULL;
}

static const lg__handed_out *keep_value(lg_checkpoint *c, const char *key, bool is_json, const void *data, size_t bytes,
                                        lg_error *err)
{
    lg__handed_out *h = lg__arena_alloc(c->handed_out, sizeof *h);
    if (h != NULL) {
        h->key = lg__arena_strdup(c->handed_out, key);
        h->data = lg__arena_strndup(c->handed_out, data != NULL ? data : "", bytes);
        h->is_json = is_json;
        h->bytes = bytes;
    }
    if (h == NULL || h->key == NULL || h->data == NULL) {
        lg__nomem(err);
        return NULL;
    }
    h->next = c->values;
    c->values = h;
    return h;
}

lg_status lg_checkpoint_global_bytes(lg_checkpoint *c, const char *key, const void **data, size_t *bytes, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(data == NULL || bytes == NULL, err, LG_ERR_INVALID, "global state: give places for bytes and length");
    const json_t *v = NULL;
    LG__TRY(global_value(c, key, &v, err));
    const lg__handed_out *kept = find_value(c, key, false);
    if (kept == NULL) {
        void *copy;
        size_t n;
        LG__TRY(in_key(key, lg__tagged_get_bytes(v, &copy, &n, err), err));
        kept = keep_value(c, key, false, copy, n, err);
        lg__free(copy);
    }
    if (kept == NULL) {
        return err->status;
    }
    *data = kept->data;
    *bytes = kept->bytes;
    return LG_OK;
}

lg_status lg_checkpoint_global_json(lg_checkpoint *c, const char *key, const char **out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(out == NULL, err, LG_ERR_INVALID, "global state: give a place for the value");
    const json_t *v = NULL;
    LG__TRY(global_value(c, key, &v, err));
    const lg__handed_out *kept = find_value(c, key, true);
    if (kept == NULL) {
        lg__buf text;
        lg__buf_init(&text, LG__MANIFEST_MAX);
        lg_status status = lg__buf_json(&text, v, false, err);
        if (status == LG_OK) {
            status = lg__buf_check(&text, "global state", err);
        }
        if (status == LG_OK) {
            kept = keep_value(c, key, true, text.data, text.len, err);
        }
        lg__buf_free(&text);
    }
    if (kept == NULL) {
        return err->status;
    }
    *out = kept->data;
    return LG_OK;
}

size_t lg_checkpoint_global_count(lg_checkpoint *c) { return c == NULL ? 0 : json_object_size(c->m->state); }

static int compare_keys(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

const char *lg_checkpoint_global_key(lg_checkpoint *c, size_t i)
{
    size_t n = lg_checkpoint_global_count(c);
    if (i >= n) {
        return NULL;
    }
    if (c->keys == NULL) {
        const char **keys = lg__malloc(n * sizeof *keys);
        if (keys == NULL) {
            return NULL;
        }
        size_t k = 0;
        const char *key;
        json_t *value;
        json_object_foreach(c->m->state, key, value) { keys[k++] = key; }
        qsort(keys, n, sizeof *keys, compare_keys);
        c->keys = keys;
    }
    return c->keys[i];
}

/* ---------------------------------------------------------- state of a rank */

static lg_status find_blob(lg_checkpoint *c, uint32_t rank, const char *key, lg__shard **shard,
                           const lg__st_tensor **entry, lg_error *err)
{
    lg__rank_files *files;
    LG__TRY(lg__checkpoint_rank(c, rank, &files, err));
    *entry = NULL;
    for (size_t i = 0; i < files->n_shards && *entry == NULL; i++) {
        if (files->shards[i].group == LG_GROUP_RAW) {
            const lg__st_header *header;
            LG__TRY(lg__checkpoint_header(c, &files->shards[i], true, &header, err));
            *shard = &files->shards[i];
            *entry = lg__st_find(header, key);
        }
    }
    return LG_OK;
}

/* The keys of all per-rank state of one rank, for a message. */
static lg_status list_blobs(lg_checkpoint *c, uint32_t rank, lg__buf *out, lg_error *err)
{
    lg__rank_files *files;
    LG__TRY(lg__checkpoint_rank(c, rank, &files, err));
    size_t prefix = strlen(LG__RAW_BYTES_PREFIX);
    for (size_t i = 0; i < files->n_shards; i++) {
        if (files->shards[i].group != LG_GROUP_RAW) {
            continue;
        }
        const lg__st_header *header;
        LG__TRY(lg__checkpoint_header(c, &files->shards[i], true, &header, err));
        for (size_t k = 0; k < header->n; k++) {
            const char *name = header->tensors[header->by_name[k]].name;
            if (strncmp(name, LG__RAW_BYTES_PREFIX, prefix) == 0) {
                lg__buf_fmt(out, "%s\"%s\"", out->len > 0 ? ", " : "", name + prefix);
            }
        }
    }
    return LG_OK;
}

/* Says whether another rank has the key: a set with a gap is another mistake
 * than a key that was never saved. Looks at a few ranks only, since every
 * rank of a large job may come here at once. */
#define LOOK_AT_RANKS 16

static lg_status no_blob(lg_checkpoint *c, const char *key, const char *name, uint32_t rank, lg_error *err)
{
    char shown[300];
    lg__printable(key, shown, sizeof shown);
    for (uint32_t r = 0, looked = 0; r < c->m->world && looked < LOOK_AT_RANKS; r++) {
        if (r == rank) {
            continue;
        }
        looked++;
        lg__shard *shard;
        const lg__st_tensor *entry;
        lg_error why;
        if (find_blob(c, r, name, &shard, &entry, &why) == LG_OK && entry != NULL) {
            return lg_error_set(err, LG_ERR_MISSING, "rank %u has no state under key \"%s\" in step %llu, rank %u has",
                                rank, shown, (unsigned long long)c->m->step, r);
        }
    }
    return lg_error_set(err, LG_ERR_MISSING, "rank %u has no state under key \"%s\" in step %llu", rank, shown,
                        (unsigned long long)c->m->step);
}

static lg_status other_world(lg_checkpoint *c, const char *key, const char *name, uint32_t rank, uint32_t world,
                             lg_error *err)
{
    lg__buf keys;
    lg__buf_init(&keys, 1400);
    lg_error why = LG_ERROR_INIT;
    uint32_t of = rank < c->m->world ? rank : 0;
    if (list_blobs(c, of, &keys, &why) == LG_OK && keys.len == 0) {
        lg__buf_free(&keys);
        return no_blob(c, key, name, of, err);
    }
    char shown[300], all[1400];
    lg_error_set(err, LG_ERR_WORLD,
                 "state \"%s\" was saved by %u ranks and cannot be cut anew for %u; such per-rank state is: %s%s",
                 lg__printable(key, shown, sizeof shown), c->m->world, world,
                 keys.len > 0 ? lg__printable(keys.data, all, sizeof all) : "(not readable)", keys.failed ? ", …" : "");
    lg__buf_free(&keys);
    return LG_ERR_WORLD;
}

lg_status lg_checkpoint_rank_bytes(lg_checkpoint *c, const char *key, uint32_t rank, uint32_t world, void **data,
                                   size_t *bytes, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(c == NULL || key == NULL || data == NULL || bytes == NULL, err, LG_ERR_INVALID,
                  "lg_checkpoint_rank_bytes needs a checkpoint, a key and places for the result");
    LG__TRY(lg__name_check("key", key, strlen(key), err));
    LG__RETURN_IF(world != 0 && rank >= world, err, LG_ERR_INVALID, "rank %u of %u", rank, world);
    char name[LG__KEY_MAX];
    memcpy(name, LG__RAW_BYTES_PREFIX, strlen(LG__RAW_BYTES_PREFIX));
    memcpy(name + strlen(LG__RAW_BYTES_PREFIX), key, strlen(key) + 1);
    if ((world != 0 && world != c->m->world) || rank >= c->m->world) {
        return other_world(c, key, name, rank, world != 0 ? world : rank + 1, err);
    }
    lg__shard *shard = NULL;
    const lg__st_tensor *entry = NULL;
    LG__TRY(find_blob(c, rank, name, &shard, &entry, err));
    if (entry == NULL) {
        return no_blob(c, key, name, rank, err);
    }
    LG__RETURN_IF(entry->dtype != LG_U8 || entry->ndim != 1, err, LG_ERR_FORMAT,
                  "%s/%s: state \"%.200s\" is not a row of bytes", c->folder, shard->name, key);
    uint64_t n = entry->end - entry->begin; /* lies in the file */
    LG__RETURN_IF(n > SIZE_MAX - 1, err, LG_ERR_LIMIT, "state \"%.200s\" is too long for this machine", key);
    char *copy = lg__malloc((size_t)n);
    if (copy == NULL) {
        return lg__nomem(err);
    }
    uint64_t zero = 0, done = 0;
    lg__fetch fetch = {
        .shard = shard,
        .entry = entry,
        .name = name,
        .to = {.offset = &zero, .size = entry->shape, .data = copy, .mem_origin = &zero, .mem_size = entry->shape},
        .box_offset = &zero,
        .done = &done};
    lg_status status = lg__fetch_run(c, &fetch, 1, true, 0, err);
    if (status == LG_OK && done != n) {
        status = lg_error_set(err, LG_ERR_COVERAGE, "state \"%.200s\": %llu of %llu bytes were read", key,
                              (unsigned long long)done, (unsigned long long)n);
    }
    if (status != LG_OK) {
        lg__free(copy);
        return status;
    }
    *data = copy;
    *bytes = (size_t)n;
    return LG_OK;
}
