/* SPDX-License-Identifier: Apache-2.0 */
#include "core/checkpoint.h"
#include "format/record.h"
#include "support/build.h"
#include "support/check.h"
#include "support/sample.h"
#include "support/temp_dir.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static int setup(void **state)
{
    *state = sample_make(SAMPLE_MEMORY);
    return 0;
}

static int teardown(void **state)
{
    sample_free(*state);
    return 0;
}

/* -------------------------------------------------------------- opening */

static void test_info(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint_info info;
    OK(lg_checkpoint_get_info(s->c, &info, &err));
    assert_int_equal(info.step, 500);
    assert_int_equal(info.generation.epoch, 3);
    assert_int_equal(info.generation.serial, 17);
    assert_string_equal(info.folder, "step-000000000500.g3.17");
    assert_int_equal(info.world, SAMPLE_WORLD);
    assert_int_equal(info.block_bytes, SAMPLE_BLOCK);
    assert_string_equal(info.checksum, "crc32c");
    assert_int_equal(info.n_aliases, 2);
    assert_int_equal(info.aliases_once, 1);
    assert_int_equal(info.n_attached, 2);
    assert_int_equal(info.pinned, 0);
    assert_int_equal(info.n_tensors, s->n_tensors);
    uint64_t bytes = 0, attached = 0, sums = 0;
    for (size_t i = 0; i < info.n_files; i++) {
        lg_file_info f;
        OK(lg_checkpoint_file(s->c, i, &f, &err));
        size_t size;
        char *data = build_read(s->store, s->folder, f.name, &size);
        assert_int_equal(size, f.bytes);
        free(data);
        bytes += f.bytes;
        attached += (uint64_t)f.is_attached;
        sums += (uint64_t)f.is_sums;
        assert_true(f.is_attached ? f.rank == UINT32_MAX : f.rank < SAMPLE_WORLD);
    }
    assert_int_equal(bytes, info.file_bytes);
    assert_int_equal(attached, 2);
    assert_int_equal(sums, SAMPLE_WORLD);
    lg_file_info f;
    FAILS(LG_ERR_INVALID, lg_checkpoint_file(s->c, info.n_files, &f, &err));
}

static void test_tensors(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    lg_tensor_info a, b;
    for (size_t i = 1; i < s->n_tensors; i++) {
        OK(lg_checkpoint_tensor(s->c, i - 1, &a, &err));
        OK(lg_checkpoint_tensor(s->c, i, &b, &err));
        assert_true(strcmp(a.name, b.name) < 0);
    }
    FAILS(LG_ERR_INVALID, lg_checkpoint_tensor(s->c, s->n_tensors, &a, &err));
    OK(lg_checkpoint_find(s->c, "emb.w", &a, &err));
    assert_int_equal(a.dtype, LG_F32);
    assert_int_equal(a.ndim, 2);
    assert_int_equal(a.bytes, 400 * 33 * 4);
    assert_int_equal(a.n_boxes, 3);
    assert_null(a.alias_of);
    assert_non_null(lg_checkpoint_layout(s->c, a.layout));
    OK(lg_checkpoint_find(s->c, "irregular", &a, &err));
    assert_true(a.layout == SIZE_MAX);
    assert_int_equal(a.n_boxes, 4);
    OK(lg_checkpoint_find(s->c, "stat", &a, &err));
    assert_int_equal(a.per_rank, 1);
    OK(lg_checkpoint_find(s->c, "tied.once", &a, &err));
    assert_string_equal(a.alias_of, "emb.w");
    assert_int_equal(a.n_boxes, 3);
    assert_null(lg_checkpoint_layout(s->c, 999));
}

static void test_missing_hint(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    lg_tensor_info t;
    static const struct {
        const char *name, *hint;
    } cases[] = {{"module.emb.w", "is \"emb.w\" meant?"},
                 {"h.qvk", "is \"h.qkv\" meant?"},
                 {"irregularr", "is \"irregular\" meant?"},
                 {"_orig_mod.h.col", "is \"h.col\" meant?"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        FAILS(LG_ERR_MISSING, lg_checkpoint_find(s->c, cases[i].name, &t, &err));
        SAYS(cases[i].hint);
    }
    FAILS(LG_ERR_MISSING, lg_checkpoint_find(s->c, "something.else.entirely", &t, &err));
    assert_null(strstr(err.message, "meant"));
}

static int count_box(const lg_stored_box *box, void *arg)
{
    (void)box;
    (*(int *)arg)++;
    return 0;
}

static int first_box(const lg_stored_box *box, void *arg)
{
    *(lg_stored_box *)arg = *box;
    return 1;
}

static void test_boxes(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    int n = 0;
    OK(lg_checkpoint_boxes(s->c, "emb.w", NULL, NULL, count_box, &n, &err));
    assert_int_equal(n, 3);
    uint64_t offset[] = {200, 3}, extent[] = {1, 2};
    n = 0;
    OK(lg_checkpoint_boxes(s->c, "emb.w", offset, extent, count_box, &n, &err));
    assert_int_equal(n, 1);
    lg_stored_box box;
    OK(lg_checkpoint_boxes(s->c, "emb.w", offset, extent, first_box, &box, &err));
    assert_int_equal(box.rank, 1);
    assert_int_equal(box.offset[0], 134);
    assert_int_equal(box.size[0], 134);
    n = 0;
    OK(lg_checkpoint_boxes(s->c, "stat", NULL, NULL, count_box, &n, &err));
    assert_int_equal(n, SAMPLE_WORLD);
    extent[0] = 201;
    FAILS(LG_ERR_INVALID, lg_checkpoint_boxes(s->c, "emb.w", offset, extent, count_box, &n, &err));
    SAYS("does not lie in the tensor");
    FAILS(LG_ERR_INVALID, lg_checkpoint_boxes(s->c, "emb.w", offset, NULL, count_box, &n, &err));
    FAILS(LG_ERR_MISSING, lg_checkpoint_boxes(s->c, "no", NULL, NULL, count_box, &n, &err));
}

static int collect(const char *name, void *arg)
{
    strcat(arg, name);
    strcat(arg, ";");
    return 0;
}

static void test_foreign(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    char names[1024] = "";
    OK(lg_checkpoint_foreign(s->c, collect, names, &err));
    assert_string_equal(names, "");
    build_write(s->store, s->folder, "notes.txt", "x", 1);
    OK(lg_checkpoint_foreign(s->c, collect, names, &err));
    assert_string_equal(names, "notes.txt;");
}

static void test_pinned(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    lg__pin_record r = {.n = 1, .pinned = true, .created = "2026-11-29T18:31:57Z"};
    memcpy(r.manifest, s->c->m->sha256, sizeof r.manifest);
    lg__buf text;
    lg__buf_init(&text, LG__RECORD_MAX);
    OK(lg__pin_encode(&r, &text, &err));
    build_write(s->store, s->folder, "lastgood-pin-1.json", text.data, text.len);
    lg_checkpoint_info info;
    OK(lg_checkpoint_get_info(s->c, &info, &err));
    assert_int_equal(info.pinned, 1);
    char names[1024] = "";
    OK(lg_checkpoint_foreign(s->c, collect, names, &err));
    assert_string_equal(names, "");
    lg__buf_free(&text);
}

static void test_attached(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    void *data;
    size_t bytes;
    OK(lg_checkpoint_attached(s->c, "config.json", &data, &bytes, &err));
    assert_int_equal(bytes, strlen(SAMPLE_CONFIG));
    assert_memory_equal(data, SAMPLE_CONFIG, bytes);
    lg_free(data);
    FAILS(LG_ERR_MISSING, lg_checkpoint_attached(s->c, "other.json", &data, &bytes, &err));
    char changed[] = SAMPLE_CONFIG;
    changed[3] ^= 1;
    build_write(s->store, s->folder, "config.json", changed, strlen(changed));
    FAILS(LG_ERR_CORRUPT, lg_checkpoint_attached(s->c, "config.json", &data, &bytes, &err));
    SAYS("config.json");
    build_write(s->store, s->folder, "config.json", changed, 5);
    FAILS(LG_ERR_NOT_WHOLE, lg_checkpoint_attached(s->c, "config.json", &data, &bytes, &err));
}

static void test_tombstone(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    lg__manifest *m;
    OK(lg__manifest_new(&m, &err));
    m->tombstone = true;
    m->superseded_by = 9;
    m->major = LG__FORMAT_MAJOR;
    m->generation = s->c->m->generation;
    memcpy(m->run_id, s->c->m->run_id, sizeof m->run_id);
    memcpy(m->attempt, s->c->m->attempt, sizeof m->attempt);
    lg__buf text;
    lg__buf_init(&text, LG__MANIFEST_MAX);
    OK(lg__manifest_encode(m, &text, &err));
    lg_checkpoint *c = NULL;
    FAILS(LG_ERR_NOT_FOUND, lg__checkpoint_open_in(s->store, false, s->folder, text.data, text.len, &c, &err));
    SAYS("epoch 9");
    assert_null(c);
    lg__buf_free(&text);
    lg__manifest_free(m);
}

static void test_open_cut_manifest(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    size_t bytes;
    char *data = build_read(s->store, s->folder, LG__MANIFEST, &bytes);
    static const size_t cuts[] = {0, 1, 20, 21, 22, 100};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        build_write(s->store, s->folder, LG__MANIFEST, data, cuts[i]);
        lg_checkpoint *c = NULL;
        lg_status st = lg__checkpoint_open_in(s->store, false, s->folder, NULL, 0, &c, &err);
        assert_true(lg__status_is_damage(st));
        SAYS(LG__MANIFEST);
        assert_null(c);
    }
    free(data);
}

/* Every file that the manifest lists: cut, grown, removed, replaced by what is
 * no file. */
static void test_whole(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    OK(lg__checkpoint_check_whole(s->c, &err));
    lg_checkpoint_info info;
    OK(lg_checkpoint_get_info(s->c, &info, &err));
    for (size_t i = 0; i < info.n_files; i++) {
        lg_file_info f;
        OK(lg_checkpoint_file(s->c, i, &f, &err));
        size_t bytes;
        char *data = build_read(s->store, s->folder, f.name, &bytes);
        for (size_t cut = bytes; cut > 0; cut /= 2) {
            build_write(s->store, s->folder, f.name, data, cut - 1);
            FAILS(LG_ERR_NOT_WHOLE, lg__checkpoint_check_whole(s->c, &err));
            SAYS(f.name);
        }
        char *longer = calloc(1, bytes + 1);
        memcpy(longer, data, bytes);
        build_write(s->store, s->folder, f.name, longer, bytes + 1);
        FAILS(LG_ERR_NOT_WHOLE, lg__checkpoint_check_whole(s->c, &err));
        free(longer);
        char path[600];
        lg__path_join(path, sizeof path, s->folder, f.name);
        OK(lg__store_remove_file(s->store, path, &err));
        FAILS(LG_ERR_NOT_WHOLE, lg__checkpoint_check_whole(s->c, &err));
        SAYS(f.name);
        SAYS("not there");
        build_write(s->store, s->folder, f.name, data, bytes);
        free(data);
    }
    OK(lg__checkpoint_check_whole(s->c, &err));
}

static void test_shard_is_fifo(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_POSIX);
    lg_error err = LG_ERROR_INIT;
    char path[1024];
    snprintf(path, sizeof path, "%s/%s/shard-00002-model-00001-of-00002.safetensors", s->dir, s->folder);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    FAILS(LG_ERR_NOT_WHOLE, lg__checkpoint_check_whole(s->c, &err));
    SAYS("shard-00002-model-00001");
    assert_non_null(sample_load_wrong(s, s->c, 0, &err));
    assert_true(lg__status_is_damage(err.status));
    lg_verify_result result;
    assert_true(lg__status_is_damage(lg_verify(s->c, NULL, &result, &err)));
    unlink(path);
    assert_int_equal(symlink("/etc/hostname", path), 0);
    FAILS(LG_ERR_NOT_WHOLE, lg__checkpoint_check_whole(s->c, &err));
    sample_free(s);
}

static void test_damage_kinds(void **state)
{
    (void)state;
    static const lg_status damage[] = {LG_ERR_CORRUPT, LG_ERR_FORMAT, LG_ERR_NOT_WHOLE, LG_ERR_COVERAGE, LG_ERR_IO};
    static const lg_status other[] = {LG_OK,          LG_ERR_NOMEM,   LG_ERR_PERMISSION, LG_ERR_TIMEOUT,
                                      LG_ERR_INVALID, LG_ERR_MISSING, LG_ERR_MISMATCH,   LG_ERR_WORLD};
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        assert_true(lg__status_is_damage(damage[i]));
    }
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) {
        assert_false(lg__status_is_damage(other[i]));
    }
}

/* ---------------------------------------------------------------- state */

static void test_global(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    uint64_t u;
    int64_t i;
    double f;
    const char *text, *again;
    const void *data;
    size_t bytes;
    OK(lg_checkpoint_global_u64(s->c, "samples", &u, &err));
    assert_true(u == UINT64_MAX);
    OK(lg_checkpoint_global_i64(s->c, "delta", &i, &err));
    assert_int_equal(i, -7);
    OK(lg_checkpoint_global_f64(s->c, "zero", &f, &err));
    uint64_t bits;
    memcpy(&bits, &f, sizeof bits);
    assert_true(bits == UINT64_C(1) << 63); /* -0.0 */
    OK(lg_checkpoint_global_str(s->c, "name", &text, &err));
    assert_string_equal(text, "gpt");
    OK(lg_checkpoint_global_bytes(s->c, "blob", &data, &bytes, &err));
    assert_int_equal(bytes, 3);
    assert_memory_equal(data, "\0\1\2", 3);
    const void *same;
    OK(lg_checkpoint_global_bytes(s->c, "blob", &same, &bytes, &err));
    assert_ptr_equal(data, same);
    OK(lg_checkpoint_global_json(s->c, "delta", &text, &err));
    assert_string_equal(text, "-7");
    OK(lg_checkpoint_global_json(s->c, "delta", &again, &err));
    assert_ptr_equal(text, again);
    FAILS(LG_ERR_MISMATCH, lg_checkpoint_global_u64(s->c, "delta", &u, &err));
    SAYS("delta");
    FAILS(LG_ERR_MISMATCH, lg_checkpoint_global_str(s->c, "delta", &text, &err));
    FAILS(LG_ERR_MISMATCH, lg_checkpoint_global_f64(s->c, "name", &f, &err));
    FAILS(LG_ERR_MISMATCH, lg_checkpoint_global_bytes(s->c, "name", &data, &bytes, &err));
    FAILS(LG_ERR_MISSING, lg_checkpoint_global_u64(s->c, "nothing", &u, &err));
    SAYS("nothing");
    assert_int_equal(lg_checkpoint_global_count(s->c), 5);
    static const char *const keys[] = {"blob", "delta", "name", "samples", "zero"};
    for (size_t k = 0; k < 5; k++) {
        assert_string_equal(lg_checkpoint_global_key(s->c, k), keys[k]);
    }
    assert_null(lg_checkpoint_global_key(s->c, 5));
}

static void test_rank_bytes(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    void *data;
    size_t bytes;
    for (uint32_t r = 0; r < SAMPLE_WORLD; r++) {
        OK(lg_checkpoint_rank_bytes(s->c, "rng", r, SAMPLE_WORLD, &data, &bytes, &err));
        assert_int_equal(bytes, SAMPLE_RNG_BYTES);
        assert_memory_equal(data, s->rng[r], bytes);
        lg_free(data);
    }
    OK(lg_checkpoint_rank_bytes(s->c, "none", 1, SAMPLE_WORLD, &data, &bytes, &err));
    assert_int_equal(bytes, 0);
    assert_non_null(data);
    lg_free(data);
    FAILS(LG_ERR_MISSING, lg_checkpoint_rank_bytes(s->c, "loader", 2, SAMPLE_WORLD, &data, &bytes, &err));
    SAYS("rank 2 has no state under key \"loader\"");
    SAYS("rank 0 has");
    FAILS(LG_ERR_MISSING, lg_checkpoint_rank_bytes(s->c, "unknown", 0, SAMPLE_WORLD, &data, &bytes, &err));
    SAYS("rank 0 has no state under key \"unknown\"");
    FAILS(LG_ERR_INVALID, lg_checkpoint_rank_bytes(s->c, "rng", 3, 3, &data, &bytes, &err));
    FAILS(LG_ERR_INVALID, lg_checkpoint_rank_bytes(s->c, "", 0, 3, &data, &bytes, &err));
}

static void test_rank_bytes_world(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    void *data;
    size_t bytes;
    FAILS(LG_ERR_WORLD, lg_checkpoint_rank_bytes(s->c, "rng", 0, 16, &data, &bytes, &err));
    SAYS("saved by 3 ranks");
    SAYS("for 16");
    SAYS("\"loader\", \"none\", \"rng\"");
    OK(lg_checkpoint_rank_bytes(s->c, "rng", 2, 0, &data, &bytes, &err));
    assert_memory_equal(data, s->rng[2], bytes);
    lg_free(data);
    FAILS(LG_ERR_WORLD, lg_checkpoint_rank_bytes(s->c, "rng", 3, 0, &data, &bytes, &err));
    /* Where nothing was saved for each rank, nothing is missing but the key. */
    build_spec spec = s->spec;
    spec.generation.serial = 99;
    spec.n_blobs = 0;
    char folder[LG__NAME_MAX];
    build_checkpoint(s->store, &spec, folder);
    lg_checkpoint *c;
    OK(lg__checkpoint_open_in(s->store, false, folder, NULL, 0, &c, &err));
    FAILS(LG_ERR_MISSING, lg_checkpoint_rank_bytes(c, "rng", 0, 16, &data, &bytes, &err));
    lg_checkpoint_close(c);
}

/* ---------------------------------------------------------------- views */

static void view_equals(sample *s, const char *name, const uint64_t *offset, const uint64_t *extent)
{
    lg_error err = LG_ERROR_INIT;
    const build_tensor *t = sample_tensor(s, name);
    lg__region r = lg__region_whole(t->ndim, t->shape);
    if (offset != NULL) {
        memcpy(r.offset, offset, t->ndim * sizeof *offset);
        memcpy(r.size, extent, t->ndim * sizeof *extent);
    }
    size_t bytes = build_bytes(t->dtype, t->ndim, r.size);
    char *expected = malloc(bytes + 1);
    build_extract(t->dtype, t->ndim, t->shape, t->data, &r, expected);
    for (uint32_t flags = 0; flags <= LG_LOAD_UNVERIFIED; flags++) {
        lg_view v;
        OK(lg_checkpoint_map(s->c, name, offset, extent, flags, &v, &err));
        assert_int_equal(v.bytes, bytes);
        assert_non_null(v.data);
        assert_memory_equal(v.data, expected, bytes);
        lg_view_release(&v);
        lg_view_release(&v);
    }
    free(expected);
}

static void run_views(int kind)
{
    sample *s = sample_make(kind);
    lg_error err = LG_ERROR_INIT;
    uint64_t offset[] = {140, 0}, rows[] = {100, 33}, some[] = {1, 7}, columns[] = {2, 3}, none[] = {0, 33};
    view_equals(s, "emb.w", offset, rows);
    view_equals(s, "emb.w", offset, some);
    view_equals(s, "emb.w", offset, none);
    view_equals(s, "tied.once", offset, rows);
    view_equals(s, "tied.both", offset, rows);
    view_equals(s, "count", NULL, NULL);
    view_equals(s, "empty", NULL, NULL);
    view_equals(s, "stat", NULL, NULL); /* the first rank's */
    uint64_t piece[] = {22};
    uint64_t at[] = {0};
    view_equals(s, "scale", at, piece);
    lg_view v;
    FAILS(LG_ERR_UNSUPPORTED, lg_checkpoint_map(s->c, "emb.w", offset, columns, 0, &v, &err));
    SAYS("not contiguous");
    FAILS(LG_ERR_UNSUPPORTED, lg_checkpoint_map(s->c, "emb.w", NULL, NULL, 0, &v, &err));
    SAYS("3 stored boxes");
    FAILS(LG_ERR_MISSING, lg_checkpoint_map(s->c, "emb", NULL, NULL, 0, &v, &err));
    rows[0] = 300;
    FAILS(LG_ERR_INVALID, lg_checkpoint_map(s->c, "emb.w", offset, rows, 0, &v, &err));
    sample_free(s);
}

static void test_views_memory(void **state)
{
    (void)state;
    run_views(SAMPLE_MEMORY);
}

static void test_views_posix(void **state)
{
    (void)state;
    run_views(SAMPLE_POSIX);
}

static void test_view_damaged(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    uint64_t offset[] = {140, 0}, rows[] = {10, 33};
    const char *file = "shard-00002-model-00001-of-00002.safetensors";
    size_t bytes;
    char *data = build_read(s->store, s->folder, file, &bytes);
    lg__shard *shard;
    const lg__st_tensor *entry;
    lg__region box = {2, {134, 0}, {134, 33}};
    OK(lg__checkpoint_locate(s->c, 1, LG_GROUP_MODEL, "emb.w", &box, LG_F32, 0, true, &shard, &entry, &err));
    size_t at = (size_t)(shard->header->data_start + entry->begin + 6 * 33 * 4 + 5);
    data[at] = (char)(data[at] ^ 0x10);
    build_write(s->store, s->folder, file, data, bytes);
    lg_view v = {0};
    FAILS(LG_ERR_CORRUPT, lg_checkpoint_map(s->c, "emb.w", offset, rows, 0, &v, &err));
    SAYS(file);
    SAYS("\"emb.w\"");
    assert_null(v.data);
    OK(lg_checkpoint_map(s->c, "emb.w", offset, rows, LG_LOAD_UNVERIFIED, &v, &err));
    lg_view_release(&v);
    free(data);
}

static void test_view_no_map(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    lg_store *without;
    OK(lg_store_without(s->store, LG_CAP_MAP, &without, &err));
    lg_checkpoint *c;
    OK(lg__checkpoint_open_in(without, true, s->folder, NULL, 0, &c, &err));
    lg_view v;
    FAILS(LG_ERR_UNSUPPORTED, lg_checkpoint_map(c, "count", NULL, NULL, 0, &v, &err));
    SAYS("load");
    assert_null(sample_load_wrong(s, c, 0, &err));
    lg_checkpoint_close(c);
}

/* ------------------------------------------------- one safetensors file */

static void write_path(const char *dir, const char *name, const void *data, size_t bytes, char path[600])
{
    snprintf(path, 600, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    fclose(f);
}

static void test_file_alone(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    char dir[256], path[600], link[600];
    temp_dir_make(dir);
    lg__buf text;
    lg__buf_init(&text, 1 << 20);
    uint64_t shape[] = {2, 3};
    uint64_t none[] = {3, 0};
    lg__st_entry entries[] = {
        {"a", LG_F32, 2, shape, NULL, 0, 0}, {"b", LG_U8, 2, shape, NULL, 0, 0}, {"c", LG_U8, 2, none, NULL, 0, 0}};
    lg__st_meta meta = {"k", "v"};
    uint64_t data_bytes;
    OK(lg__st_plan(entries, 3, &meta, 1, true, 8, &text, &data_bytes, &err));
    char data[30];
    for (int i = 0; i < 30; i++) {
        data[i] = (char)i;
    }
    lg__buf_add(&text, data, 30);
    write_path(dir, "odd name:1.safetensors", text.data, text.len, path);
    snprintf(link, sizeof link, "%s/link", dir);
    assert_int_equal(symlink(path, link), 0);
    const char *const paths[] = {path, link}; /* hubs keep their files as links */
    for (size_t i = 0; i < 2; i++) {
        lg_safetensors *f;
        OK(lg_safetensors_open(paths[i], &f, &err));
        assert_int_equal(lg_safetensors_count(f), 3);
        const char *name, *key, *value;
        lg_dtype dtype;
        uint32_t ndim;
        const uint64_t *dims;
        uint64_t begin, end;
        OK(lg_safetensors_tensor(f, 0, &name, &dtype, &ndim, &dims, &begin, &end, &err));
        assert_string_equal(name, "a");
        assert_int_equal(dtype, LG_F32);
        assert_int_equal(dims[1], 3);
        assert_int_equal(end - begin, 24);
        char back[24];
        OK(lg_safetensors_read(f, 0, back, sizeof back, &err));
        assert_memory_equal(back, data, 24);
        OK(lg_safetensors_read(f, 1, back, 6, &err));
        assert_memory_equal(back, data + 24, 6);
        FAILS(LG_ERR_INVALID, lg_safetensors_read(f, 1, back, 7, &err));
        OK(lg_safetensors_read(f, 2, NULL, 0, &err)); /* nothing to read */
        FAILS(LG_ERR_INVALID, lg_safetensors_read(f, 2, back, 7, &err));
        FAILS(LG_ERR_INVALID, lg_safetensors_read(f, 3, back, 7, &err));
        assert_int_equal(lg_safetensors_metadata_count(f), 1);
        OK(lg_safetensors_metadata(f, 0, &key, &value, &err));
        assert_string_equal(key, "k");
        assert_string_equal(value, "v");
        FAILS(LG_ERR_INVALID, lg_safetensors_metadata(f, 1, &key, &value, &err));
        OK(lg_safetensors_tensor(f, 1, NULL, NULL, NULL, NULL, NULL, NULL, &err));
        lg_safetensors_close(f);
    }
    lg__buf_free(&text);
    temp_dir_remove(dir);
}

static void test_file_relative(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    char dir[256], path[600], before[1024];
    temp_dir_make(dir);
    static const char minimal[] = "\x02\0\0\0\0\0\0\0{}";
    write_path(dir, "x.safetensors", minimal, 10, path);
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(dir), 0);
    lg_safetensors *f = NULL;
    lg_status st = lg_safetensors_open("x.safetensors", &f, &err);
    assert_int_equal(chdir(before), 0);
    OK(st);
    assert_int_equal(lg_safetensors_count(f), 0);
    lg_safetensors_close(f);
    temp_dir_remove(dir);
}

static void test_file_wrong(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    char dir[256], path[600];
    temp_dir_make(dir);
    lg_safetensors *f = NULL;
    FAILS(LG_ERR_FORMAT, lg_safetensors_open(dir, &f, &err));
    SAYS("is a folder");
    snprintf(path, sizeof path, "%s/fifo", dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    FAILS(LG_ERR_FORMAT, lg_safetensors_open(path, &f, &err));
    SAYS("is a FIFO");
    FAILS(LG_ERR_FORMAT, lg_safetensors_open("/dev/null", &f, &err));
    SAYS("is a device");
    snprintf(path, sizeof path, "%s/nothing", dir);
    FAILS(LG_ERR_NOT_FOUND, lg_safetensors_open(path, &f, &err));
    SAYS("there is no such file");
    write_path(dir, "empty", "", 0, path);
    FAILS(LG_ERR_FORMAT, lg_safetensors_open(path, &f, &err));
    SAYS("is empty");
    static const struct {
        const char *text, *says;
    } others[] = {{"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "LFS"},
                  {"<!DOCTYPE html><html><body>404</body></html>", "HTML"},
                  {"PK\3\4................................", "zip"},
                  {"GGUF................................", "GGUF"}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        write_path(dir, "other", others[i].text, strlen(others[i].text), path);
        FAILS(LG_ERR_FORMAT, lg_safetensors_open(path, &f, &err));
        SAYS(others[i].says);
        SAYS(path);
    }
    assert_null(f);
    temp_dir_remove(dir);
}

/* --------------------------------------------------- memory runs out */

static void test_no_memory(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    bool done = false;
    for (size_t n = 0; !done; n++) {
        assert_true(n < 100000);
        lg_checkpoint *c = NULL;
        lg__mem_fail_after(n);
        lg_status st = lg__checkpoint_open_in(s->store, false, s->folder, NULL, 0, &c, &err);
        const char *wrong = NULL;
        if (st == LG_OK) {
            wrong = sample_load_wrong(s, c, 0, &err);
            st = wrong == NULL ? LG_OK : err.status;
        }
        lg_checkpoint_close(c);
        lg__mem_fail_after(SIZE_MAX);
        if (st != LG_ERR_NOMEM) {
            OK(st);
            done = true;
        }
    }
}

/* What is handed out lives as long as the checkpoint, and is made once. */
static void test_state_no_memory(void **state)
{
    sample *s = *state;
    lg_error err = LG_ERROR_INIT;
    const size_t keys = lg_checkpoint_global_count(s->c);
    assert_true(keys > 0);
    size_t failed = 0;
    bool done = false;
    for (size_t n = 0; !done; n++) {
        lg_checkpoint *c = NULL;
        OK(lg__checkpoint_open_in(s->store, false, s->folder, NULL, 0, &c, &err));
        done = true;
        lg__mem_fail_after(n);
        for (size_t i = 0; i < keys && done; i++) {
            const char *key = lg_checkpoint_global_key(c, i), *text = NULL;
            const void *data = NULL;
            size_t bytes = 0;
            lg_status st = key == NULL ? LG_ERR_NOMEM : lg_checkpoint_global_json(c, key, &text, &err);
            if (st == LG_OK) {
                st = lg_checkpoint_global_bytes(c, key, &data, &bytes, &err);
                st = st == LG_ERR_MISMATCH ? LG_OK : st; /* another kind */
            }
            done = st == LG_OK;
            if (!done) {
                assert_int_equal(st, LG_ERR_NOMEM);
                failed++;
            }
        }
        lg__mem_fail_after(SIZE_MAX);
        assert_non_null(lg_checkpoint_global_key(c, 0)); /* with memory again */
        lg_checkpoint_close(c);
    }
    assert_true(failed > 3);
}

int main(void)
{
#define T(name, f)                     \
    {                                  \
        name, f, setup, teardown, NULL \
    }
    const struct CMUnitTest tests[] = {
        T("info and files of a checkpoint are those that lie in its folder", test_info),
        T("tensors are listed by name with layout and boxes", test_tensors),
        T("K22: a missing name gets a hint at a similar one", test_missing_hint),
        T("stored boxes that touch a region are listed", test_boxes),
        T("a file that nothing lists is foreign", test_foreign),
        T("a pin record shows in the info and is not foreign", test_pinned),
        T("an attached file is checked against its digest", test_attached),
        T("a tombstone is not opened", test_tombstone),
        T("K01: a manifest that is cut anywhere is refused", test_open_cut_manifest),
        T("K01 K14: every listed file that is cut, grown, emptied or gone is found before reading", test_whole),
        T("K15: a FIFO or a link in place of a shard is refused and blocks nothing", test_shard_is_fifo),
        T("what counts as damage", test_damage_kinds),
        T("global state keeps every bit and refuses other kinds", test_global),
        T("state of a rank comes back, and a gap in a key's set is named", test_rank_bytes),
        T("K08: per-rank state of another number of ranks is refused with the list of keys", test_rank_bytes_world),
        T("K11 K12: views show the stored bytes (memory)", test_views_memory),
        T("K11 K12: views show the stored bytes (files)", test_views_posix),
        T("K01: a view of a damaged block is refused", test_view_damaged),
        T("K17: without mapping a view is unsupported and loading works", test_view_no_map),
        T("K13: a single safetensors file is opened by any path, links too", test_file_alone),
        T("a single safetensors file is opened by a relative path", test_file_relative),
        T("K13: what is no safetensors file is named for what it is", test_file_wrong),
        T("every failed allocation while opening and loading is an ordinary error", test_no_memory),
        T("every failed allocation while state is read is an ordinary error", test_state_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
