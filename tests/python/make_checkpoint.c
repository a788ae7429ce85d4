/* SPDX-License-Identifier: Apache-2.0 */

/* Writes one checkpoint of everything that other tools should read, with the
 * public interface only: four ranks (threads), every way of cutting a tensor,
 * every dtype. Byte b of a tensor's row-major contents is a hash of the
 * tensor's name and b (see value), so that a reader in any language knows what
 * to expect.
 *
 *     make_checkpoint ROOT
 *
 * Prints the step folder's name, then one line a tensor: name, dtype, group,
 * the name that its values come from (aliases), shape; with tabs between. */

#include <lastgood/lastgood.h>

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANKS 4
#define STEP 12

typedef enum cut {
    UNDECLARED, /* whole on every rank, no layout */
    ONE_RANK,   /* whole on rank 2 alone, as on a pipeline stage */
    REPLICAS,   /* whole on every rank, declared; two of them write */
    ROWS,
    ROWS_EVEN,
    COLUMNS,
    GRID,   /* 2 × 2: rows over one mesh axis, columns over the other */
    NESTED, /* rows over both mesh axes, the second one first */
    FUSED,  /* three thirds of the rows, each cut over the ranks: three boxes a rank */
    FLAT,   /* a range of a flat buffer */
    BOXES   /* boxes that follow no rule, two a rank */
} cut;

typedef struct sample {
    const char *name;
    lg_dtype dtype;
    lg_group group;
    cut cut;
    uint32_t ndim;
    uint64_t shape[4];
} sample;

#define MODEL LG_GROUP_MODEL
#define OPTIM LG_GROUP_OPTIM

static const sample samples[] = {
    /* every dtype; the last four are for no reader but lastgood's */
    {"t.bool", LG_BOOL, MODEL, GRID, 2, {5, 6}},
    {"t.u8", LG_U8, MODEL, GRID, 2, {5, 6}},
    {"t.i8", LG_I8, MODEL, GRID, 2, {5, 6}},
    {"t.f8_e5m2", LG_F8_E5M2, MODEL, GRID, 2, {5, 6}},
    {"t.f8_e4m3", LG_F8_E4M3, MODEL, GRID, 2, {5, 6}},
    {"t.f8_e4m3fnuz", LG_F8_E4M3FNUZ, MODEL, GRID, 2, {5, 6}},
    {"t.f8_e5m2fnuz", LG_F8_E5M2FNUZ, MODEL, GRID, 2, {5, 6}},
    {"t.i16", LG_I16, MODEL, GRID, 2, {5, 6}},
    {"t.u16", LG_U16, MODEL, GRID, 2, {5, 6}},
    {"t.f16", LG_F16, MODEL, GRID, 2, {5, 6}},
    {"t.bf16", LG_BF16, MODEL, GRID, 2, {5, 6}},
    {"t.i32", LG_I32, MODEL, GRID, 2, {5, 6}},
    {"t.u32", LG_U32, MODEL, GRID, 2, {5, 6}},
    {"t.f32", LG_F32, MODEL, GRID, 2, {5, 6}},
    {"t.c64", LG_C64, MODEL, GRID, 2, {5, 6}},
    {"t.f64", LG_F64, MODEL, GRID, 2, {5, 6}},
    {"t.i64", LG_I64, MODEL, GRID, 2, {5, 6}},
    {"t.u64", LG_U64, MODEL, GRID, 2, {5, 6}},
    {"x.f8_e8m0", LG_F8_E8M0, MODEL, ROWS, 2, {8, 3}},
    {"x.f4", LG_F4, MODEL, ROWS, 2, {8, 6}},
    {"x.f6_e2m3", LG_F6_E2M3, MODEL, ROWS, 2, {8, 4}},
    {"x.f6_e3m2", LG_F6_E3M2, MODEL, ROWS, 2, {8, 4}},
    /* every cut, with sizes that do not divide */
    {"rows.w", LG_F32, MODEL, ROWS, 2, {7, 5}},
    {"rows.few", LG_BF16, MODEL, ROWS, 2, {2, 9}}, /* two ranks have none */
    {"rows.even", LG_BF16, MODEL, ROWS_EVEN, 3, {6, 3, 2}},
    {"columns.w", LG_F16, MODEL, COLUMNS, 2, {3, 10}},
    {"grid.w", LG_F32, MODEL, GRID, 2, {11, 13}},
    {"grid.4d", LG_F64, MODEL, GRID, 4, {3, 5, 2, 3}},
    {"nested.w", LG_I32, MODEL, NESTED, 2, {9, 4}},
    {"attn.qkv", LG_BF16, MODEL, FUSED, 2, {24, 4}},
    {"norm.w", LG_F32, MODEL, REPLICAS, 1, {37}},
    {"buffer", LG_F64, MODEL, UNDECLARED, 1, {5}},
    {"stage.w", LG_F16, MODEL, ONE_RANK, 2, {3, 3}},
    {"experts", LG_F32, MODEL, BOXES, 2, {10, 6}},
    {"optim.m.a", LG_F32, OPTIM, FLAT, 2, {7, 5}},
    {"optim.m.b", LG_F32, OPTIM, FLAT, 3, {3, 4, 5}},
    {"optim.m.c", LG_F32, OPTIM, FLAT, 1, {1}},
    {"optim.m.d", LG_F32, OPTIM, FLAT, 2, {40, 3}},
    /* odd shapes and names */
    {"s.step", LG_I64, OPTIM, REPLICAS, 0, {0}},
    {"s.flag", LG_BOOL, MODEL, UNDECLARED, 0, {0}},
    {"empty.0", LG_F32, MODEL, UNDECLARED, 1, {0}},
    {"empty.3x0", LG_BF16, MODEL, ROWS, 2, {3, 0}},
    {"na\xc3\xafve \"x\"\\y/\xe5\xb1\x82", LG_F32, MODEL, ROWS, 2, {4, 2}},
};
enum { SAMPLES = sizeof samples / sizeof samples[0] };

static const struct {
    const char *alias, *name;
} aliases[] = {{"lm_head.weight", "rows.w"}, {"tied.norm", "norm.w"}};

static uint64_t flat_length(size_t before)
{
    uint64_t total = 0;
    for (size_t i = 0; i < before; i++) {
        if (samples[i].cut == FLAT) {
            uint64_t n = 1;
            for (uint32_t d = 0; d < samples[i].ndim; d++) {
                n *= samples[i].shape[d];
            }
            total += n;
        }
    }
    return total;
}

static uint64_t elements(const sample *s)
{
    uint64_t n = 1;
    for (uint32_t d = 0; d < s->ndim; d++) {
        n *= s->shape[d];
    }
    return n;
}

static uint64_t bytes_of(const sample *s) { return elements(s) * lg_dtype_bits(s->dtype) / 8; }

static uint8_t value(const char *name, lg_dtype dtype, uint64_t b)
{
    uint64_t x = UINT64_C(14695981039346656037); /* FNV-1a of the name */
    for (const char *p = name; *p != '\0'; p++) {
        x = (x ^ (uint8_t)*p) * UINT64_C(1099511628211);
    }
    x += (b + 1) * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
    return (uint8_t)(dtype == LG_BOOL ? x >> 56 & 1 : x >> 56);
}

static uint8_t *whole(const sample *s)
{
    uint64_t bytes = bytes_of(s);
    uint8_t *data = malloc(bytes + 1);
    for (uint64_t b = 0; data != NULL && b < bytes; b++) {
        data[b] = value(s->name, s->dtype, b);
    }
    return data;
}

/* ---------------------------------------------------------------- one rank */

typedef struct rank_job {
    const char *root;
    lg_comm *comm;
    lg_save_info info;
    lg_error err;
    lg_status status;
    uint8_t *data[SAMPLES]; /* whole tensors: parts are strided windows into them */
    uint8_t *packed[SAMPLES];
    lg_layout *layouts[SAMPLES];
} rank_job;

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
/* Where piece i of `pieces` begins, as torch.chunk cuts. */
static uint64_t begin_ceil(uint64_t n, uint64_t pieces, uint64_t i) { return least((n + pieces - 1) / pieces * i, n); }
static uint64_t begin_even(uint64_t n, uint64_t pieces, uint64_t i) { return n / pieces * i + least(n % pieces, i); }

static lg_status make_layout(const sample *s, lg_layout **out, lg_error *err)
{
    static const uint32_t line[] = {RANKS}, square[] = {2, 2};
    lg_split splits[2] = {{0, 0, 0, LG_SPLIT_CEIL}, {0, 0, 0, LG_SPLIT_CEIL}};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = line, d.n_splits = 1, d.splits = splits;
    switch (s->cut) {
    case REPLICAS:
        d.n_splits = 0, d.writers = s->ndim == 0 ? 1 : 2;
        break;
    case ROWS_EVEN:
        splits[0].mode = LG_SPLIT_EVEN;
        break;
    case COLUMNS:
        splits[0].dim = 1;
        break;
    case GRID:
        d.mesh_ndim = 2, d.mesh_sizes = square, d.n_splits = 2;
        splits[1].dim = 1, splits[1].axis = 1;
        break;
    case NESTED:
        d.mesh_ndim = 2, d.mesh_sizes = square, d.n_splits = 2;
        splits[0].axis = 1;
        break;
    case FUSED:
        d.n_splits = 2;
        splits[0].axis = LG_NO_AXIS, splits[0].pieces = 3, splits[0].mode = LG_SPLIT_EVEN;
        break;
    case FLAT:
        d.n_splits = 0, d.flat_length = flat_length(SAMPLES);
        break;
    default:
        break;
    }
    return lg_layout_create(&d, out, err);
}

/* Finds where this rank's part begins in the whole tensor, in elements. */
static void part_offset(const sample *s, uint32_t rank, uint64_t offset[4])
{
    memset(offset, 0, 4 * sizeof *offset);
    uint64_t n = s->shape[0], half;
    switch (s->cut) {
    case ROWS:
        offset[0] = begin_ceil(n, RANKS, rank);
        break;
    case ROWS_EVEN:
        offset[0] = begin_even(n, RANKS, rank);
        break;
    case COLUMNS:
        offset[1] = begin_ceil(s->shape[1], RANKS, rank);
        break;
    case GRID:
        offset[0] = begin_ceil(n, 2, rank / 2);
        offset[1] = begin_ceil(s->shape[1], 2, rank % 2);
        break;
    case NESTED: /* halves by rank % 2, each cut by rank / 2 */
        offset[0] = begin_ceil(n, 2, rank % 2);
        half = begin_ceil(n, 2, rank % 2 + 1) - offset[0];
        offset[0] += begin_ceil(half, 2, rank / 2);
        break;
    default:
        break;
    }
}

static lg_status add_boxes(rank_job *j, uint32_t rank, lg_tensor *t, lg_save *save)
{
    /* Rank r: columns 0 to 3 of some rows, and columns 4 and 5 of others. */
    static const uint64_t left[] = {0, 1, 4, 9, 10}, right[] = {0, 3, 5, 6, 10};
    uint32_t other = RANKS - 1 - rank;
    uint64_t offsets[2][2] = {{left[rank], 0}, {right[other], 4}};
    uint64_t sizes[2][2] = {{left[rank + 1] - left[rank], 4}, {right[other + 1] - right[other], 2}};
    int64_t strides[] = {24, 4};
    lg_box boxes[2];
    for (int i = 0; i < 2; i++) {
        boxes[i].offset = offsets[i], boxes[i].size = sizes[i], boxes[i].strides = strides;
        boxes[i].data = (const uint8_t *)t->data + (offsets[i][0] * 6 + offsets[i][1]) * 4;
    }
    t->data = NULL, t->boxes = boxes, t->n_boxes = 2;
    return lg_save_tensor(save, t, &j->err);
}

static lg_status add_sample(rank_job *j, size_t i, lg_save *save)
{
    const sample *s = &samples[i];
    uint32_t rank = lg_comm_rank(j->comm);
    uint64_t element = lg_dtype_bits(s->dtype) / 8, offset[4], local[4], start, n;
    int64_t strides[4];
    if (s->cut == ONE_RANK && rank != 2) {
        return LG_OK;
    }
    j->data[i] = whole(s);
    if (j->data[i] == NULL) {
        return LG_ERR_NOMEM;
    }
    lg_tensor t = LG_TENSOR_INIT;
    t.name = s->name, t.dtype = s->dtype, t.group = s->group, t.ndim = s->ndim, t.shape = s->shape;
    t.data = j->data[i];
    if (s->cut == BOXES) {
        return add_boxes(j, rank, &t, save);
    }
    if (s->cut == UNDECLARED || s->cut == ONE_RANK) {
        return lg_save_tensor(save, &t, &j->err);
    }
    lg_status status = make_layout(s, &j->layouts[i], &j->err);
    if (status != LG_OK) {
        return status;
    }
    t.layout = j->layouts[i];
    t.flat_offset = s->cut == FLAT ? flat_length(i) : 0;
    status = lg_layout_local(t.layout, rank, s->ndim, s->shape, t.flat_offset, s->cut == FLAT ? NULL : local, &start,
                             &n, &j->err);
    if (status != LG_OK) {
        return status;
    }
    if (s->cut == FLAT) {
        t.data = j->data[i] + start * element;
    } else if (s->cut == FUSED) { /* the local tensor is its intervals one after the other */
        uint64_t row = s->shape[1] * element, rows = s->shape[0] / 3 / RANKS;
        j->packed[i] = malloc(3 * rows * row);
        for (uint64_t k = 0; j->packed[i] != NULL && k < 3; k++) {
            memcpy(j->packed[i] + k * rows * row, j->data[i] + (k * s->shape[0] / 3 + rank * rows) * row, rows * row);
        }
        t.data = j->packed[i], t.local_shape = local;
    } else if (element > 0) {
        part_offset(s, rank, offset);
        uint64_t stride = element, at = 0;
        for (uint32_t d = s->ndim; d-- > 0; stride *= s->shape[d]) {
            strides[d] = (int64_t)stride;
            at += offset[d] * stride;
        }
        t.data = j->data[i] + at, t.strides = strides, t.local_shape = local;
    } else { /* less than a byte an element: whole rows */
        t.data = j->data[i] + rank * bytes_of(s) / RANKS;
    }
    return lg_save_tensor(save, &t, &j->err);
}

#define TRY(expr)            \
    do {                     \
        status = (expr);     \
        if (status != LG_OK) \
            goto done;       \
    } while (0)

static lg_status add_state(rank_job *j, lg_save *save)
{
    static const char config[] = "{\"model_type\": \"none\"}\n";
    char blob[32];
    lg_error *err = &j->err;
    lg_status status;
    for (size_t i = 0; i < sizeof aliases / sizeof aliases[0]; i++) {
        TRY(lg_save_alias(save, aliases[i].alias, aliases[i].name, err));
    }
    TRY(lg_save_global_u64(save, "samples", UINT64_C(9007199254740993), err));
    TRY(lg_save_global_f64(save, "lr", 1e-3, err));
    TRY(lg_save_global_str(save, "schedule", "cosine", err));
    int n = snprintf(blob, sizeof blob, "state of rank %" PRIu32, lg_comm_rank(j->comm));
    TRY(lg_save_rank_bytes(save, "loader", blob, (size_t)n, err));
    TRY(lg_save_attach(save, "config.json", config, sizeof config - 1, err));
done:
    return status;
}

static void *run_rank(void *arg)
{
    rank_job *j = arg;
    lg_session *session = NULL;
    lg_save *save = NULL;
    lg_status status;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = j->comm, o.deadline_ms = 60000, o.block_bytes = 4096;
    TRY(lg_session_open(j->root, &o, &session, &j->err));
    TRY(lg_save_begin(session, STEP, NULL, &save, &j->err));
    for (size_t i = 0; i < SAMPLES; i++) {
        TRY(add_sample(j, i, save));
    }
    TRY(add_state(j, save));
    status = lg_save_commit(save, &j->info, &j->err);
    save = NULL;
done:
    lg_save_abort(save);
    if (session != NULL) {
        lg_error ignored = LG_ERROR_INIT;
        lg_session_close(session, status == LG_OK ? &j->err : &ignored);
    }
    for (size_t i = 0; i < SAMPLES; i++) {
        lg_layout_free(j->layouts[i]);
        free(j->data[i]);
        free(j->packed[i]);
    }
    j->status = status;
    return NULL;
}

static void print_tensor(const char *name, const sample *s)
{
    /* The group as stored: dtypes that PyTorch does not know lie in raw files. */
    printf("%s\t%s\t%s\t%s\t", name, lg_dtype_name(s->dtype), s->name[0] == 'x' ? "raw" : lg_group_name(s->group),
           s->name);
    for (uint32_t d = 0; d < s->ndim; d++) {
        printf("%s%" PRIu64, d > 0 ? "," : "", s->shape[d]);
    }
    printf("\n");
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: make_checkpoint ROOT\n");
        return 2;
    }
    static rank_job jobs[RANKS];
    lg_comm *comms[RANKS] = {NULL};
    pthread_t threads[RANKS];
    lg_error err = LG_ERROR_INIT;
    if (lg_comm_threads_create(RANKS, comms, &err) != LG_OK) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    for (size_t r = 0; r < RANKS; r++) {
        jobs[r].root = argv[1], jobs[r].comm = comms[r];
        if (pthread_create(&threads[r], NULL, run_rank, &jobs[r]) != 0) {
            fprintf(stderr, "no thread for rank %zu\n", r);
            return 1;
        }
    }
    int failed = 0;
    for (size_t r = 0; r < RANKS; r++) {
        pthread_join(threads[r], NULL);
        if (jobs[r].status != LG_OK) {
            fprintf(stderr, "rank %zu: %s: %s\n", r, lg_status_name(jobs[r].status), jobs[r].err.message);
            failed = 1;
        }
    }
    for (size_t r = 0; r < RANKS; r++) {
        lg_comm_free(comms[r]);
    }
    if (failed) {
        return 1;
    }
    printf("%s\n", jobs[0].info.folder);
    for (size_t i = 0; i < SAMPLES; i++) {
        print_tensor(samples[i].name, &samples[i]);
        for (size_t k = 0; k < sizeof aliases / sizeof aliases[0]; k++) {
            if (strcmp(aliases[k].name, samples[i].name) == 0) {
                print_tensor(aliases[k].alias, &samples[i]);
            }
        }
    }
    return 0;
}
