/* SPDX-License-Identifier: Apache-2.0 */
#include "support/sample.h"

#include "format/tagged.h"
#include "support/temp_dir.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void die(const char *what, const lg_error *err)
{
    fprintf(stderr, "sample: %s: %s\n", what, err != NULL ? err->message : "");
    abort();
}

static char *random_bytes(size_t n, uint64_t *seed)
{
    char *data = malloc(n + 1);
    if (data == NULL) {
        die("out of memory", NULL);
    }
    for (size_t i = 0; i < n; i++) {
        data[i] = (char)build_random(seed);
    }
    return data;
}

static build_tensor *add(sample *s, const char *name, lg_group group, lg_dtype dtype, uint32_t ndim, uint64_t n0,
                         uint64_t n1, uint64_t *seed)
{
    build_tensor *t = &s->tensors[s->n_tensors++];
    t->name = name;
    t->group = group;
    t->dtype = dtype;
    t->ndim = ndim;
    t->shape[0] = n0;
    t->shape[1] = n1;
    t->data = random_bytes(SAMPLE_WORLD * build_bytes(dtype, ndim, t->shape), seed);
    return t;
}

static lg_layout *keep(sample *s, lg_layout *layout) { return s->layouts[s->n_layouts++] = layout; }

static void add_alias(sample *s, const char *name, bool once)
{
    build_tensor *t = &s->tensors[s->n_tensors++];
    *t = s->tensors[0];
    t->name = name;
    t->alias_of = s->tensors[0].name;
    t->alias_once = once;
}

static const lg__stored_piece irregular[] = {
    {0, 0, {2, {0, 0}, {3, 4}}}, {1, 0, {2, {3, 0}, {7, 2}}}, {1, 1, {2, {3, 2}, {3, 2}}}, {2, 0, {2, {6, 2}, {4, 2}}}};

static const build_attached attached[] = {{"config.json", SAMPLE_CONFIG}, {"notes.md", ""}};

static void make_state(sample *s)
{
    json_t *state = json_object();
    json_object_set_new(state, "samples", lg__tagged_u64(UINT64_MAX));
    json_object_set_new(state, "delta", lg__tagged_i64(-7));
    json_object_set_new(state, "zero", lg__tagged_f64(-0.0));
    json_object_set_new(state, "name", json_string("gpt"));
    json_object_set_new(state, "blob", lg__tagged_bytes("\0\1\2", 3));
    s->state = json_dumps(state, JSON_COMPACT);
    json_decref(state);
}

static void open_store(sample *s)
{
    lg_error err = LG_ERROR_INIT;
    static int n;
    char uri[300];
    if (s->kind == SAMPLE_POSIX) {
        temp_dir_make(s->dir);
        snprintf(uri, sizeof uri, "file:%s", s->dir);
    } else {
        snprintf(s->name, sizeof s->name, "sample-%d", n++);
        snprintf(uri, sizeof uri, "mem:%s", s->name);
    }
    if (lg_store_open(uri, &s->store, &err) != LG_OK || lg__store_make_root(s->store, &err) != LG_OK) {
        die("store", &err);
    }
}

static sample *make(int kind, bool small)
{
    sample *s = calloc(1, sizeof *s);
    if (s == NULL) {
        die("out of memory", NULL);
    }
    uint64_t seed = 17;
    s->kind = kind;
    static const lg_split rows = {0, 0, 0, LG_SPLIT_CEIL}, columns = {1, 0, 0, LG_SPLIT_EVEN};
    static const lg_split fused[] = {{0, LG_NO_AXIS, 2, LG_SPLIT_CEIL}, {0, 0, 0, LG_SPLIT_CEIL}};
    lg_layout *by_rows = keep(s, build_layout(SAMPLE_WORLD, 0, 1, &rows, 1));
    add(s, "emb.w", LG_GROUP_MODEL, LG_F32, 2, small ? 20 : 400, small ? 3 : 33, &seed)->layout = by_rows;
    if (!small) {
        add(s, "h.qkv", LG_GROUP_MODEL, LG_BF16, 2, 12, 50, &seed)->layout =
            keep(s, build_layout(SAMPLE_WORLD, 0, 2, fused, 1));
        add(s, "h.col", LG_GROUP_MODEL, LG_F16, 2, 9, 31, &seed)->layout =
            keep(s, build_layout(SAMPLE_WORLD, 0, 1, &columns, 1));
        build_tensor *flat = add(s, "opt.m", LG_GROUP_OPTIM, LG_F32, 2, 40, 33, &seed);
        flat->layout = keep(s, build_flat(SAMPLE_WORLD, 2000, 1));
        flat->flat_offset = 100;
        build_tensor *t = add(s, "irregular", LG_GROUP_OPTIM, LG_F64, 2, 10, 4, &seed);
        t->pieces = irregular;
        t->n_pieces = sizeof irregular / sizeof *irregular;
        add(s, "rep", LG_GROUP_MODEL, LG_U8, 1, 5000, 0, &seed)->layout =
            keep(s, build_layout(SAMPLE_WORLD, 0, 0, NULL, 2));
        add(s, "f4", LG_GROUP_MODEL, LG_F4, 2, 6, 8, &seed)->layout = by_rows;
        add_alias(s, "tied.both", false);
    }
    add(s, "count", LG_GROUP_OPTIM, LG_I64, 0, 0, 0, &seed);
    add(s, "empty", LG_GROUP_MODEL, LG_F32, 2, 0, 3, &seed);
    add(s, "scale", LG_GROUP_MODEL, LG_F8_E8M0, 1, 64, 0, &seed)->layout = by_rows;
    add(s, "stat", LG_GROUP_OPTIM, LG_F64, 1, 5, 0, &seed)->copies = true;
    add_alias(s, "tied.once", true);
    size_t rng_bytes = small ? 20 : SAMPLE_RNG_BYTES, n = 0;
    for (uint32_t r = 0; r < SAMPLE_WORLD; r++) {
        s->rng[r] = random_bytes(SAMPLE_RNG_BYTES, &seed);
        s->blobs[n++] = (build_blob){r, "rng", s->rng[r], rng_bytes};
        if (!small) {
            s->blobs[n++] = (build_blob){r, "none", "", 0};
        }
    }
    if (!small) {
        s->blobs[n++] = (build_blob){0, "loader", "abc", 3};
        s->blobs[n++] = (build_blob){1, "loader", "defg", 4};
    }
    make_state(s);
    open_store(s);
    s->spec = (build_spec){.world = SAMPLE_WORLD,
                           .step = 500,
                           .generation = {3, 17},
                           .block_bytes = SAMPLE_BLOCK,
                           .tensors = s->tensors,
                           .n_tensors = s->n_tensors,
                           .blobs = s->blobs,
                           .n_blobs = n,
                           .attached = attached,
                           .n_attached = 2,
                           .state = s->state};
    build_checkpoint(s->store, &s->spec, s->folder);
    lg_error err = LG_ERROR_INIT;
    if (lg__checkpoint_open_in(s->store, false, s->folder, NULL, 0, &s->c, &err) != LG_OK) {
        die("open", &err);
    }
    return s;
}

sample *sample_make(int kind) { return make(kind, false); }

sample *sample_make_small(int kind) { return make(kind, true); }

void sample_free(sample *s)
{
    lg_checkpoint_close(s->c);
    lg_store_free(s->store);
    if (s->kind == SAMPLE_POSIX) {
        temp_dir_remove(s->dir);
    } else {
        lg_memory_store_drop(s->name);
    }
    for (size_t i = 0; i < s->n_tensors; i++) {
        if (s->tensors[i].alias_of == NULL) {
            free((void *)(uintptr_t)s->tensors[i].data);
        }
    }
    for (size_t i = 0; i < s->n_layouts; i++) {
        lg_layout_free(s->layouts[i]);
    }
    for (uint32_t r = 0; r < SAMPLE_WORLD; r++) {
        free(s->rng[r]);
    }
    free(s->state);
    free(s);
}

const build_tensor *sample_tensor(const sample *s, const char *name)
{
    for (size_t i = 0; i < s->n_tensors; i++) {
        if (strcmp(s->tensors[i].name, name) == 0) {
            return &s->tensors[i];
        }
    }
    die(name, NULL);
    return NULL;
}

lg_target sample_target(const build_tensor *t, void *data)
{
    lg_target target = LG_TARGET_INIT;
    target.name = t->name;
    target.dtype = t->dtype;
    target.ndim = t->ndim;
    target.shape = t->shape;
    target.data = data;
    return target;
}

lg_status sample_load(lg_checkpoint *c, const lg_target *targets, size_t n, uint32_t flags, lg_error *err)
{
    lg_load *load = NULL;
    lg_status st = lg_load_begin(c, flags, &load, err);
    for (size_t i = 0; i < n && st == LG_OK; i++) {
        st = lg_load_tensor(load, &targets[i], err);
    }
    if (st == LG_OK) {
        st = lg_load_run(load, err);
    }
    lg_load_free(load);
    return st;
}

static const char *state_wrong(const sample *s, lg_checkpoint *c, lg_error *err)
{
    void *data;
    size_t bytes;
    for (size_t i = 0; i < s->spec.n_blobs; i++) {
        const build_blob *b = &s->spec.blobs[i];
        if (lg_checkpoint_rank_bytes(c, b->key, b->rank, SAMPLE_WORLD, &data, &bytes, err) != LG_OK) {
            return "rank bytes";
        }
        bool same = bytes == b->bytes && memcmp(data, b->data, bytes) == 0;
        lg_free(data);
        if (!same) {
            return b->key;
        }
    }
    for (size_t i = 0; i < s->spec.n_attached; i++) {
        if (lg_checkpoint_attached(c, attached[i].name, &data, &bytes, err) != LG_OK) {
            return "attached";
        }
        bool same = bytes == strlen(attached[i].text) && memcmp(data, attached[i].text, bytes) == 0;
        lg_free(data);
        if (!same) {
            return attached[i].name;
        }
    }
    uint64_t samples;
    if (lg_checkpoint_global_u64(c, "samples", &samples, err) != LG_OK) {
        return "global state";
    }
    return samples == UINT64_MAX ? NULL : "samples";
}

const char *sample_load_wrong(const sample *s, lg_checkpoint *c, uint32_t flags, lg_error *err)
{
    char *loaded[SAMPLE_TENSORS] = {NULL};
    lg_target targets[SAMPLE_TENSORS];
    for (size_t i = 0; i < s->n_tensors; i++) {
        const build_tensor *t = &s->tensors[i];
        loaded[i] = calloc(1, build_bytes(t->dtype, t->ndim, t->shape) + 1);
        targets[i] = sample_target(t, loaded[i]);
    }
    lg_status status = sample_load(c, targets, s->n_tensors, flags, err);
    const char *wrong = status == LG_OK ? NULL : "load";
    for (size_t i = 0; i < s->n_tensors; i++) {
        const build_tensor *t = &s->tensors[i];
        if (status == LG_OK && memcmp(loaded[i], t->data, build_bytes(t->dtype, t->ndim, t->shape)) != 0) {
            wrong = t->name;
        }
        free(loaded[i]);
    }
    return wrong != NULL ? wrong : state_wrong(s, c, err);
}

const char *sample_open_wrong(const sample *s, uint32_t flags, lg_error *err)
{
    lg_checkpoint *c = NULL;
    if (lg__checkpoint_open_in(s->store, false, s->folder, NULL, 0, &c, err) != LG_OK) {
        return "open";
    }
    const char *wrong = sample_load_wrong(s, c, flags, err);
    lg_checkpoint_close(c);
    return wrong;
}
