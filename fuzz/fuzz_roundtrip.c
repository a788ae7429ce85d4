/* SPDX-License-Identifier: Apache-2.0 */

/* A state out of bytes: tensors of any dtype, shape, stride and cut, ties,
 * global values, bytes of the rank, attached files. It is saved, verified and
 * loaded again, whole and by regions, and must be the same; a description that
 * is refused must leave no checkpoint. */

#include "base/error.h"
#include "base/json.h"
#include "format/region.h"
#include "format/tagged.h"
#include "fuzz.h"
#include "store/store.h"

#include <inttypes.h>

enum { TENSORS = 6, DIMS = 3, VALUES = 4 };
#define ROOT "mem:fuzz-roundtrip"

typedef struct tensor {
    char name[40];
    lg_dtype dtype;
    lg_group group;
    uint32_t ndim;
    uint64_t shape[DIMS];
    uint64_t bytes;
    char *packed; /* what it holds, row-major */
    char *memory; /* what is given to the library: perhaps in another order */
    int64_t strides[DIMS];
    bool strided;
    lg_layout *layout;
    bool tied; /* also saved under the name "NAME.tie" */
} tensor;

typedef struct value {
    char key[32];
    int kind;
    uint64_t bits;
    char text[64];
    size_t bytes;
} value;

typedef struct state {
    tensor t[TENSORS];
    size_t n;
    value v[VALUES];
    size_t n_values;
    char blob[300];
    size_t blob_bytes;
    bool has_blob;
} state;

static uint64_t mix(uint64_t *s)
{
    uint64_t z = (*s += UINT64_C(0x9e3779b97f4a7c15)); /* splitmix64 */
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static void *must(void *p)
{
    FUZZ_CHECK(p != NULL, "out of memory");
    return p;
}

/* Position of the element at `index` (row-major) in bytes, for strides. */
static int64_t place_of(const tensor *t, uint64_t index)
{
    int64_t at = 0;
    for (uint32_t d = t->ndim; d-- > 0;) {
        at += (int64_t)(index % t->shape[d]) * t->strides[d];
        index /= t->shape[d];
    }
    return at;
}

static void make_tensor(fuzz_input *in, tensor *t, size_t number)
{
    static const char *const words[] = {"w", "a/b", "..", "layer.0", "\"", "\\", "é", " ", "shard-00001", "%s"};
    lg_error err = LG_ERROR_INIT;
    snprintf(t->name, sizeof t->name, "%s%zu", words[fuzz_below(in, 10)], number);
    t->dtype = (lg_dtype)fuzz_below(in, LG_DTYPE_COUNT);
    t->group = fuzz_below(in, 2) ? LG_GROUP_OPTIM : LG_GROUP_MODEL;
    t->ndim = fuzz_below(in, DIMS + 1);
    for (uint32_t d = 0; d < t->ndim; d++) {
        t->shape[d] = fuzz_below(in, 8) > 0 ? fuzz_below(in, 20) : fuzz_below(in, 80);
    }
    unsigned bits = lg_dtype_bits(t->dtype);
    if (bits % 8 != 0 && t->ndim > 0) {
        t->shape[t->ndim - 1] = t->shape[t->ndim - 1] / 4 * 4; /* whole bytes */
    } else if (bits % 8 != 0) {
        t->dtype = LG_U8;
        bits = 8;
    }
    FUZZ_CHECK(lg__shape_bytes(t->dtype, t->ndim, t->shape, &t->bytes, &err) == LG_OK, "%s", err.message);
    t->packed = must(malloc(t->bytes + 1));
    uint64_t seed = fuzz_u16(in);
    for (uint64_t i = 0; i < t->bytes; i++) {
        t->packed[i] = (char)mix(&seed);
    }
    t->strided = bits % 8 == 0 && t->ndim > 0 && fuzz_below(in, 3) == 0;
    t->memory = must(malloc(t->bytes + 1));
    memcpy(t->memory, t->packed, t->bytes);
    if (t->strided) { /* the first dimension runs fastest */
        int64_t step = bits / 8;
        uint64_t elements = t->bytes / (bits / 8);
        for (uint32_t d = 0; d < t->ndim; d++) {
            t->strides[d] = step;
            step *= (int64_t)t->shape[d];
        }
        for (uint64_t i = 0; i < elements; i++) {
            memcpy(t->memory + place_of(t, i), t->packed + i * (bits / 8), bits / 8);
        }
    }
    if (t->ndim > 0 && fuzz_below(in, 3) == 0) { /* several boxes on the one rank */
        lg_split cut = {.dim = fuzz_below(in, t->ndim),
                        .axis = LG_NO_AXIS,
                        .pieces = 1 + fuzz_below(in, 4),
                        .mode = fuzz_below(in, 2) ? LG_SPLIT_EVEN : LG_SPLIT_CEIL};
        lg_layout_desc d = LG_LAYOUT_DESC_INIT;
        d.n_splits = 1, d.splits = &cut;
        if (lg_layout_create(&d, &t->layout, &err) != LG_OK) {
            t->layout = NULL;
        }
    }
    t->tied = fuzz_below(in, 6) == 0;
}

static void make_value(fuzz_input *in, value *v, size_t number)
{
    snprintf(v->key, sizeof v->key, "key.%zu", number);
    v->kind = (int)fuzz_below(in, 5);
    v->bits = fuzz_u64(in);
    v->bytes = fuzz_below(in, sizeof v->text);
    for (size_t i = 0; i < v->bytes; i++) {
        v->text[i] = (char)fuzz_u8(in);
    }
    v->text[v->bytes] = '\0';
    lg_error err = LG_ERROR_INIT;
    json_t *json = NULL;
    bool good = v->kind == 4 && lg__json_parse(v->text, strlen(v->text), &json, &err) == LG_OK &&
                lg__tagged_check(json, &err) == LG_OK;
    json_decref(json);
    if (v->kind == 4 && !good && fuzz_below(in, 8) > 0) {
        v->kind = 0; /* or nearly every state would be refused */
    }
}

static double double_of(uint64_t bits)
{
    double d;
    memcpy(&d, &bits, sizeof d);
    return d;
}

static lg_status add_value(lg_save *save, const value *v, lg_error *err)
{
    switch (v->kind) {
    case 0:
        return lg_save_global_u64(save, v->key, v->bits, err);
    case 1:
        return lg_save_global_i64(save, v->key, (int64_t)v->bits, err);
    case 2:
        return lg_save_global_f64(save, v->key, double_of(v->bits), err);
    case 3:
        return lg_save_global_bytes(save, v->key, v->text, v->bytes, err);
    default:
        return lg_save_global_json(save, v->key, v->text, err);
    }
}

static void check_value(lg_checkpoint *c, const value *v)
{
    lg_error err = LG_ERROR_INIT;
    uint64_t u = 0, bits;
    int64_t i = 0;
    double f = 0;
    const void *data = NULL;
    size_t bytes = 0;
    const char *json = NULL;
    switch (v->kind) {
    case 0:
        FUZZ_CHECK(lg_checkpoint_global_u64(c, v->key, &u, &err) == LG_OK && u == v->bits, "%s", err.message);
        break;
    case 1:
        FUZZ_CHECK(lg_checkpoint_global_i64(c, v->key, &i, &err) == LG_OK && i == (int64_t)v->bits, "%s", err.message);
        break;
    case 2:
        FUZZ_CHECK(lg_checkpoint_global_f64(c, v->key, &f, &err) == LG_OK, "%s", err.message);
        memcpy(&bits, &f, sizeof bits);
        FUZZ_CHECK(bits == v->bits, "%016" PRIx64 " became %016" PRIx64, v->bits, bits);
        break;
    case 3:
        FUZZ_CHECK(lg_checkpoint_global_bytes(c, v->key, &data, &bytes, &err) == LG_OK && bytes == v->bytes &&
                       (bytes == 0 || memcmp(data, v->text, bytes) == 0),
                   "%s", err.message);
        break;
    default:
        FUZZ_CHECK(lg_checkpoint_global_json(c, v->key, &json, &err) == LG_OK && json != NULL, "%s", err.message);
    }
}

static lg_status describe(lg_save *save, const state *s, lg_error *err)
{
    lg_status st = LG_OK;
    for (size_t i = 0; i < s->n && st == LG_OK; i++) {
        const tensor *t = &s->t[i];
        lg_tensor d = LG_TENSOR_INIT;
        d.name = t->name, d.dtype = t->dtype, d.group = t->group, d.ndim = t->ndim, d.shape = t->shape;
        d.data = t->memory, d.strides = t->strided ? t->strides : NULL, d.layout = t->layout;
        st = lg_save_tensor(save, &d, err);
        if (st == LG_OK && t->tied) {
            char tie[64];
            snprintf(tie, sizeof tie, "%s.tie", t->name);
            st = lg_save_alias(save, tie, t->name, err);
        }
    }
    for (size_t i = 0; i < s->n_values && st == LG_OK; i++) {
        st = add_value(save, &s->v[i], err);
    }
    if (st == LG_OK && s->has_blob) {
        st = lg_save_rank_bytes(save, "blob", s->blob, s->blob_bytes, err);
    }
    if (st == LG_OK) {
        st = lg_save_attach(save, "notes.bin", s->blob, s->blob_bytes, err);
    }
    return st;
}

static void load_region(lg_checkpoint *c, const tensor *t, const char *name, fuzz_input *in)
{
    lg_error err = LG_ERROR_INIT;
    uint64_t offset[DIMS] = {0}, extent[DIMS] = {0}, elements = 1;
    unsigned bits = lg_dtype_bits(t->dtype);
    bool whole = bits % 8 != 0 || t->ndim == 0 || fuzz_below(in, 2) == 0;
    for (uint32_t d = 0; d < t->ndim; d++) {
        offset[d] = whole ? 0 : fuzz_below(in, (uint32_t)t->shape[d] + 1);
        extent[d] = whole ? t->shape[d] : fuzz_below(in, (uint32_t)(t->shape[d] - offset[d]) + 1);
        elements *= extent[d];
    }
    size_t bytes = whole ? t->bytes : elements * (bits / 8);
    char *got = must(malloc(bytes + 1));
    memset(got, 0x5A, bytes + 1);
    lg_target target = LG_TARGET_INIT;
    target.name = name, target.dtype = t->dtype, target.ndim = t->ndim, target.shape = t->shape, target.data = got;
    target.offset = whole ? NULL : offset;
    target.extent = whole ? NULL : extent;
    lg_load *load = NULL;
    FUZZ_CHECK(lg_load_begin(c, 0, &load, &err) == LG_OK && lg_load_tensor(load, &target, &err) == LG_OK &&
                   lg_load_run(load, &err) == LG_OK,
               "%s: %s", name, err.message);
    lg_load_free(load);
    if (whole) {
        FUZZ_CHECK(bytes == 0 || memcmp(got, t->packed, bytes) == 0, "%s came back wrong", name);
    } else {
        for (uint64_t i = 0; i < elements; i++) {
            uint64_t rest = i, at = 0, step = 1;
            for (uint32_t d = t->ndim; d-- > 0;) {
                at += (offset[d] + rest % extent[d]) * step;
                rest /= extent[d];
                step *= t->shape[d];
            }
            FUZZ_CHECK(memcmp(got + i * (bits / 8), t->packed + at * (bits / 8), bits / 8) == 0,
                       "element %llu of a region of %s came back wrong", (unsigned long long)i, name);
        }
    }
    FUZZ_CHECK(got[bytes] == 0x5A, "%s was written behind its end", name);
    free(got);
}

static void check_loaded(const state *s, fuzz_input *in)
{
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint *c = NULL;
    lg_verify_options o = LG_VERIFY_OPTIONS_INIT;
    lg_verify_result result;
    o.threads = 1;
    FUZZ_CHECK(lg_checkpoint_open(ROOT, &c, &err) == LG_OK, "%s", err.message);
    FUZZ_CHECK(lg_verify(c, &o, &result, &err) == LG_OK && result.problems == 0, "%s", err.message);
    for (size_t i = 0; i < s->n; i++) {
        load_region(c, &s->t[i], s->t[i].name, in);
        if (s->t[i].tied) {
            char tie[64];
            snprintf(tie, sizeof tie, "%s.tie", s->t[i].name);
            load_region(c, &s->t[i], tie, in);
        }
    }
    for (size_t i = 0; i < s->n_values; i++) {
        check_value(c, &s->v[i]);
    }
    void *data = NULL;
    size_t bytes = 0;
    if (s->has_blob) {
        FUZZ_CHECK(lg_checkpoint_rank_bytes(c, "blob", 0, 1, &data, &bytes, &err) == LG_OK && bytes == s->blob_bytes &&
                       (bytes == 0 || memcmp(data, s->blob, bytes) == 0),
                   "bytes of the rank: %s", err.message);
        lg_free(data);
    }
    FUZZ_CHECK(lg_checkpoint_attached(c, "notes.bin", &data, &bytes, &err) == LG_OK && bytes == s->blob_bytes &&
                   (bytes == 0 || memcmp(data, s->blob, bytes) == 0),
               "attached file: %s", err.message);
    lg_free(data);
    lg_checkpoint_close(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    fuzz_input in = {data, bytes};
    lg_error err = LG_ERROR_INIT;
    state *s = must(calloc(1, sizeof *s));
    s->n = fuzz_below(&in, TENSORS + 1);
    for (size_t i = 0; i < s->n; i++) {
        make_tensor(&in, &s->t[i], i);
    }
    s->n_values = fuzz_below(&in, VALUES + 1);
    for (size_t i = 0; i < s->n_values; i++) {
        make_value(&in, &s->v[i], i);
    }
    s->has_blob = fuzz_below(&in, 2) == 1;
    s->blob_bytes = fuzz_below(&in, sizeof s->blob);
    for (size_t i = 0; i < s->blob_bytes; i++) {
        s->blob[i] = (char)(i * 7);
    }
    lg_session *session = NULL;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    lg_save_options how = LG_SAVE_OPTIONS_INIT;
    o.block_bytes = UINT64_C(4096) << fuzz_below(&in, 5);
    o.domain = "host";
    how.flags = fuzz_below(&in, 2) ? LG_SAVE_ALIASES_ONCE : 0;
    FUZZ_CHECK(lg_session_open(ROOT, &o, &session, &err) == LG_OK, "%s", err.message);
    lg_save *save = NULL;
    FUZZ_CHECK(lg_save_begin(session, 500, &how, &save, &err) == LG_OK, "%s", err.message);
    lg_status described = describe(save, s, &err);
    if (described != LG_OK) {
        fuzz_refused(described, &err);
    }
    lg_status st = lg_save_commit(save, NULL, &err);
    FUZZ_CHECK((st == LG_OK) == (described == LG_OK), "described: %s, committed: %s: %s", lg_status_name(described),
               lg_status_name(st), err.message);
    lg_session_close(session, NULL);
    if (st == LG_OK) {
        check_loaded(s, &in);
    } else {
        fuzz_refused(st, &err);
        lg_checkpoint *c = NULL;
        FUZZ_CHECK(lg_checkpoint_open(ROOT, &c, NULL) == LG_ERR_EMPTY, "a refused save left a checkpoint");
    }
    lg_memory_store_drop(&ROOT[4]);
    for (size_t i = 0; i < s->n; i++) {
        free(s->t[i].packed);
        free(s->t[i].memory);
        lg_layout_free(s->t[i].layout);
    }
    free(s);
    return 0;
}
