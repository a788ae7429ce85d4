/* SPDX-License-Identifier: Apache-2.0 */

/* Makes roots for the tests of the command line, through the public API:
 *
 *     make_root ROOT [--ranks=N] [--steps=100,200,…] [--once] [--differ] [--kinds] [--tweak=WHAT]...
 *
 * Each call is a session of N ranks (threads) that resumes, saves the steps and
 * closes. Values follow from the step alone. --once stores aliases once;
 * --differ gives every rank its own "stats"; --kinds adds a tensor of each dtype
 * and of layouts that the others have not. Tweaks change the last step:
 * value, sign, nan, payload (another nan), dtype, shape, missing, extra, state, rank, attached, kinds,
 * more (of all that show cuts: keys, boxes, bytes, a name). */

#include <lastgood/lastgood.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANKS_MAX 64
#define STEPS_MAX 32
#define TWEAKS_MAX 16

static struct {
    const char *root;
    uint32_t ranks;
    uint64_t steps[STEPS_MAX];
    size_t n_steps;
    bool once, differ, kinds;
    const char *tweaks[TWEAKS_MAX];
    size_t n_tweaks;
} plan = {.ranks = 2, .steps = {100, 200, 300}, .n_steps = 3};

typedef struct rank_job {
    uint32_t rank;
    lg_comm *comm;
    pthread_t thread;
    bool failed;
} rank_job;

static bool tweaked(const char *what, uint64_t step)
{
    if (step != plan.steps[plan.n_steps - 1]) {
        return false;
    }
    for (size_t i = 0; i < plan.n_tweaks; i++) {
        if (strcmp(plan.tweaks[i], what) == 0) {
            return true;
        }
    }
    return false;
}

/* ------------------------------------------------------------------- values */

#define ROWS 8
#define COLUMNS 6
#define BIG_ROWS 100
#define BIG_COLUMNS 50

typedef struct values {
    float w[ROWS * COLUMNS], moments[2][ROWS * COLUMNS], big[BIG_ROWS * BIG_COLUMNS], complex_pair[4];
    uint16_t embed[10 * 4], norm[5];
    double stats[3], wide[2];
    int64_t count;
    uint8_t flags[4], f8[4], e8[3], f4[4], mask[16], odd;
    int32_t ids[2][3];
} values;

static void fill(values *v, uint64_t step, uint32_t rank)
{
    memset(v, 0, sizeof *v);
    float s = (float)step / 100;
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        v->w[i] = s + (float)i / 8;
        v->moments[0][i] = -v->w[i];
        v->moments[1][i] = v->w[i] * v->w[i];
    }
    for (int i = 0; i < BIG_ROWS * BIG_COLUMNS; i++) {
        v->big[i] = (float)i;
    }
    for (uint16_t i = 0; i < 40; i++) {
        v->embed[i] = (uint16_t)(0x3F80 + i); /* BF16: 1.0 and up */
    }
    const uint16_t halves[5] = {0x3C00, 0x3800, 0xBC00, 0x0000, 0x7C00}; /* 1, 0.5, -1, 0, inf */
    memcpy(v->norm, halves, sizeof halves);
    for (int i = 0; i < 3; i++) {
        v->stats[i] = 0.1 * (i + 1) + (plan.differ ? rank : 0);
    }
    v->wide[0] = 1e300;
    v->wide[1] = 0.1;
    const float pairs[4] = {1, 2, -0.5f, -3};
    memcpy(v->complex_pair, pairs, sizeof pairs);
    v->count = -(INT64_C(1) << 60);
    const uint8_t flags[4] = {1, 0, 0, 1}, f8[4] = {0x38, 0xB8, 0x7F, 0x00}, e8[3] = {127, 128, 255};
    memcpy(v->flags, flags, 4);
    memcpy(v->f8, f8, 4); /* E4M3: 1, -1, nan, 0 */
    memcpy(v->e8, e8, 3); /* E8M0: 1, 2, nan */
    memcpy(v->f4, "\x10\x32\x54\x76", 4);
    for (uint8_t i = 0; i < 16; i++) {
        v->mask[i] = i;
    }
    v->odd = 7;
    for (int i = 0; i < 6; i++) {
        v->ids[i / 3][i % 3] = i - 2;
    }
    if (tweaked("value", step)) {
        v->w[1] += 0.5f;
        v->w[7] += 2;
    }
    if (tweaked("sign", step)) {
        v->norm[3] = 0x8000;
    }
    if (tweaked("nan", step)) {
        v->norm[0] = 0x7E00;
    }
    if (tweaked("payload", step)) {
        v->norm[0] = 0x7E01;
    }
    if (tweaked("rank", step) && rank == 1) {
        v->odd = 8;
    }
}

/* ------------------------------------------------------------------- saving */

static bool failed(const char *what, const lg_error *err)
{
    fprintf(stderr, "make_root: %s: %s\n", what, err->message);
    return true;
}

#define DO(expr)                        \
    do {                                \
        if ((expr) != LG_OK) {          \
            return !failed(#expr, err); \
        }                               \
    } while (0)

static const uint64_t w_shape[] = {ROWS, COLUMNS}, big_shape[] = {BIG_ROWS, BIG_COLUMNS}, embed_shape[] = {10, 4},
                      small_shape[] = {5}, three[] = {3}, two[] = {2}, four[] = {4}, eight[] = {8},
                      none_shape[] = {0, 3}, mask_shape[] = {4, 4}, ids_shape[] = {2, 3}, one_shape[] = {1};

static lg_layout *layout_of(int kind, lg_error *err)
{
    uint32_t sizes[] = {plan.ranks};
    lg_split rows = {0, 0, 0, LG_SPLIT_CEIL};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1;
    d.mesh_sizes = sizes;
    if (kind == 0) {
        d.n_splits = 1;
        d.splits = &rows;
    } else if (kind == 1) {
        d.flat_length = 2 * ROWS * COLUMNS;
    }
    lg_layout *layout = NULL;
    if (lg_layout_create(&d, &layout, err) != LG_OK) {
        failed("layout", err);
        exit(1);
    }
    return layout;
}

typedef struct adding {
    lg_save *save;
    uint32_t rank;
    lg_error *err;
} adding;

static bool add(const adding *a, const char *name, lg_dtype dtype, lg_group group, uint32_t ndim, const uint64_t *shape,
                const void *data, const lg_layout *layout, uint64_t flat_offset, uint32_t flags)
{
    lg_error *err = a->err;
    lg_tensor t = LG_TENSOR_INIT;
    t.name = name, t.dtype = dtype, t.group = group, t.ndim = ndim, t.shape = shape, t.data = data;
    t.layout = layout, t.flat_offset = flat_offset, t.flags = flags;
    DO(lg_save_tensor(a->save, &t, err));
    return true;
}

/* Four elements of each dtype, the ends of its range among them: "kind.I8", … */
static bool add_kinds(const adding *a, const lg_layout *same, uint64_t step)
{
    static const struct {
        lg_dtype dtype;
        const char *bytes;
    } kinds[] = {
        {LG_I8, "\x80\xff\0\x7f"},
        {LG_U8, "\0\x01\x7f\xff"},
        {LG_I16, "\0\x80\xff\xff\0\0\xff\x7f"},
        {LG_U16, "\0\0\x01\0\xff\x7f\xff\xff"},
        {LG_I32, "\0\0\0\x80\xff\xff\xff\xff\0\0\0\0\xff\xff\xff\x7f"},
        {LG_U32, "\0\0\0\0\x01\0\0\0\xff\xff\xff\x7f\xff\xff\xff\xff"},
        {LG_I64, "\0\0\0\0\0\0\0\x80\xff\xff\xff\xff\xff\xff\xff\xff\0\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f"},
        {LG_U64, "\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f\xff\xff\xff\xff\xff\xff\xff\xff"},
        {LG_BOOL, "\0\x01\x01\x03"}, /* the last is none */
        {LG_C64, "\0\0\x80\x3f\0\0\0\xc0\0\0\0\0\0\0\0\x80\0\0\x80\x7f\0\0\xc0\x7f\0\0\0\0\0\0\x80\xff"},
        {LG_F8_E5M2, "\x3c\xbc\x7c\x7e"},     /* 1, -1, inf, nan */
        {LG_F8_E4M3FNUZ, "\x40\xc0\x80\x7f"}, /* 1, -1, nan, 240 */
        {LG_F8_E5M2FNUZ, "\x40\xc0\x80\x7f"}, /* 1, -1, nan, 57344 */
        {LG_F6_E2M3, "\x01\x02\x03"},
        {LG_F6_E3M2, "\x01\x02\x03"},
    };
    static _Thread_local char kept[sizeof kinds / sizeof kinds[0]][32];
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        char name[32], *bytes = kept[i];
        size_t n = lg_dtype_bits(kinds[i].dtype) * 4 / 8;
        snprintf(name, sizeof name, "kind.%s", lg_dtype_name(kinds[i].dtype));
        memcpy(bytes, kinds[i].bytes, n);
        bytes[n - 1] = (char)(bytes[n - 1] ^ (tweaked("kinds", step) ? 1 : 0));
        if (!add(a, name, kinds[i].dtype, LG_GROUP_MODEL, 1, four, bytes, same, 0, 0)) {
            return false;
        }
    }
    return true;
}

/* The same zeros, cut in pieces that stay on their rank, and over ranks in an
 * order of their own. */
static bool add_layouts(const adding *a)
{
    lg_error *err = a->err;
    static const uint8_t zeros[2 * RANKS_MAX];
    const uint64_t shape[] = {2 * plan.ranks};
    uint32_t order[RANKS_MAX];
    for (uint32_t r = 0; r < plan.ranks; r++) {
        order[r] = plan.ranks - 1 - r;
    }
    lg_split splits[] = {{0, LG_NO_AXIS, 2, LG_SPLIT_EVEN}, {0, 0, 0, LG_SPLIT_CEIL}};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &plan.ranks, d.n_splits = 2, d.splits = splits;
    lg_layout *pieces = NULL, *listed = NULL;
    DO(lg_layout_create(&d, &pieces, err));
    d.n_splits = 1, d.splits = splits + 1, d.ranks = order;
    DO(lg_layout_create(&d, &listed, err));
    bool ok = add(a, "kind.pieces", LG_U8, LG_GROUP_MODEL, 1, shape, zeros, pieces, 0, 0) &&
              add(a, "kind.listed", LG_U8, LG_GROUP_MODEL, 1, shape, zeros, listed, 0, 0);
    lg_layout_free(pieces);
    lg_layout_free(listed);
    return ok;
}

#define PIECES 4 /* of a rank */

/* Elements below a byte that fill 2250 bytes, a box for each of many pieces, and a
 * name that no line holds. */
static bool add_more(const adding *a, const lg_layout *same)
{
    lg_error *err = a->err;
    static uint8_t zeros[12288];
    static const uint64_t packed[] = {3, 1500}, one[] = {12288};
    const uint64_t shape[] = {PIECES * plan.ranks};
    char name[301] = "long.";
    memset(name + 5, 'n', sizeof name - 6);
    lg_split splits[] = {{0, LG_NO_AXIS, PIECES, LG_SPLIT_EVEN}, {0, 0, 0, LG_SPLIT_CEIL}};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &plan.ranks, d.n_splits = 2, d.splits = splits;
    lg_layout *pieces = NULL;
    DO(lg_layout_create(&d, &pieces, err));
    bool ok = add(a, "more.packed", LG_F4, LG_GROUP_MODEL, 2, packed, zeros, same, 0, 0) &&
              add(a, "more.pieces", LG_U8, LG_GROUP_MODEL, 1, shape, zeros, pieces, 0, 0) &&
              add(a, name, LG_U8, LG_GROUP_MODEL, 1, one, zeros, same, 0, 0);
    lg_layout_free(pieces);
    return ok;
}

/* The rank's part of a tensor that lies whole in memory. */
static const char *rows_of(const adding *a, const lg_layout *rows, const void *whole, const uint64_t *shape,
                           size_t element)
{
    uint64_t per = (shape[0] + plan.ranks - 1) / plan.ranks, first = per * a->rank;
    (void)rows;
    first = first < shape[0] ? first : shape[0];
    return (const char *)whole + first * shape[1] * element;
}

static bool add_flat(const adding *a, const lg_layout *flat, const char *name, const float *whole, uint64_t offset)
{
    lg_error *err = a->err;
    uint64_t local[2], start = 0, elements = 0;
    DO(lg_layout_local(flat, a->rank, 2, w_shape, offset, local, &start, &elements, err));
    return add(a, name, LG_F32, LG_GROUP_OPTIM, 2, w_shape, whole + start, flat, offset, 0);
}

/* The left half of the mask on rank 0, the right half on the last rank. */
static bool add_mask(const adding *a, const values *v)
{
    lg_error *err = a->err;
    static const uint64_t left[] = {0, 0}, right[] = {0, 2}, half[] = {4, 2};
    static const int64_t strides[] = {4, 1};
    lg_box boxes[2];
    size_t n = 0;
    if (a->rank == 0) {
        boxes[n++] = (lg_box){left, half, v->mask, strides};
    }
    if (a->rank == plan.ranks - 1) {
        boxes[n++] = (lg_box){right, half, v->mask + 2, strides};
    }
    lg_tensor t = LG_TENSOR_INIT;
    t.name = "mask", t.dtype = LG_U8, t.ndim = 2, t.shape = mask_shape, t.boxes = boxes, t.n_boxes = n;
    if (n > 0) {
        DO(lg_save_tensor(a->save, &t, err));
    }
    return true;
}

static bool add_tensors(const adding *a, const values *v, uint64_t step)
{
    lg_error *err = a->err;
    lg_layout *rows = layout_of(0, err), *flat = layout_of(1, err), *same = layout_of(2, err);
    const lg_group m = LG_GROUP_MODEL;
    bool other_dtype = tweaked("dtype", step), other_shape = tweaked("shape", step);
    bool ok =
        add(a, "w", LG_F32, m, 2, w_shape, rows_of(a, rows, v->w, w_shape, 4), rows, 0, 0) &&
        add(a, "big", LG_F32, m, 2, big_shape, rows_of(a, rows, v->big, big_shape, 4), rows, 0, 0) &&
        add(a, "embed.weight", LG_BF16, m, 2, embed_shape, rows_of(a, rows, v->embed, embed_shape, 2), rows, 0, 0) &&
        add_flat(a, flat, "optim.w.exp_avg", v->moments[0], 0) &&
        add_flat(a, flat, "optim.w.exp_avg_sq", v->moments[1], ROWS * COLUMNS) &&
        add(a, "norm", LG_F16, m, 1, small_shape, v->norm, same, 0, 0) &&
        add(a, "stats", LG_F64, m, 1, three, v->stats, NULL, 0, LG_TENSOR_BUFFER) &&
        add(a, "wide", LG_F64, m, 1, two, v->wide, same, 0, 0) &&
        add(a, "freqs", LG_C64, m, 1, two, v->complex_pair, same, 0, 0) &&
        add(a, "count", LG_I64, m, 0, NULL, &v->count, same, 0, 0) &&
        add(a, "flags", other_dtype ? LG_U8 : LG_BOOL, m, 1, four, v->flags, same, 0, 0) &&
        add(a, "ids", LG_I32, m, other_shape ? 1 : 2, other_shape ? three : ids_shape, v->ids, same, 0, 0) &&
        add(a, "q.f8", LG_F8_E4M3, m, 1, four, v->f8, same, 0, 0) &&
        add(a, "q.scale", LG_F8_E8M0, m, 1, three, v->e8, same, 0, 0) &&
        add(a, "q.f4", LG_F4, m, 1, eight, v->f4, same, 0, 0) &&
        add(a, "none", LG_F32, m, 2, none_shape, NULL, same, 0, 0) &&
        (tweaked("missing", step) || add(a, "odd", LG_U8, m, 1, one_shape, &v->odd, NULL, 0, LG_TENSOR_BUFFER)) &&
        (!tweaked("extra", step) || add(a, "zz.extra", LG_U8, m, 1, one_shape, &v->flags, same, 0, 0)) &&
        /* a control of the C1 block, which is allowed in names */
        add(a,
            "evil\xc2\x9b"
            "31m",
            LG_U8, m, 1, one_shape, &v->flags, same, 0, 0) &&
        (!plan.kinds || (add_kinds(a, same, step) && add_layouts(a))) &&
        (!tweaked("more", step) || add_more(a, same)) && add_mask(a, v);
    lg_layout_free(rows);
    lg_layout_free(flat);
    lg_layout_free(same);
    return ok;
}

static bool add_state(const adding *a, uint64_t step)
{
    lg_error *err = a->err;
    static const char config[] = "{\"model_type\": \"toy\"}\n", other[] = "{\"model_type\": \"toy\", \"a\": 1}\n";
    const char *attached = tweaked("attached", step) ? other : config;
    char rng[64];
    DO(lg_save_alias(a->save, "head.weight", "embed.weight", err));
    DO(lg_save_global_u64(a->save, "step", step, err));
    DO(lg_save_global_u64(a->save, "samples", UINT64_MAX - step, err));
    DO(lg_save_global_f64(a->save, "lr", tweaked("state", step) ? 0.002 : 0.001, err));
    DO(lg_save_global_str(a->save, "note", "tab\there \x1b[31mred", err));
    DO(lg_save_global_json(a->save, "betas", "[0.9, 0.999]", err));
    snprintf(rng, sizeof rng, "rng of rank %u%s", a->rank, tweaked("rank", step) && a->rank == 1 ? ", other" : "");
    DO(lg_save_rank_bytes(a->save, "rng", rng, strlen(rng), err));
    DO(lg_save_attach(a->save, "config.json", attached, strlen(attached), err));
    return true;
}

/* More keys than a line has; rank state of many sizes, that comes behind "rng" in
 * the file but not by name; a second attached file. */
static bool add_more_state(const adding *a)
{
    lg_error *err = a->err;
    static const char loader[RANKS_MAX], words[] = "umlauts: äöüäöüäöüäöüäöüäöüäöüäöüäöüäöüäöüäöüäöüäöüäöü";
    for (unsigned i = 0; i < 5; i++) {
        char key[16];
        snprintf(key, sizeof key, "more.%u", i);
        DO(lg_save_global_str(a->save, key, words, err));
    }
    DO(lg_save_rank_bytes(a->save, "loader", loader, a->rank + 1, err));
    DO(lg_save_attach(a->save, "tokenizer.json", "{}", 2, err));
    return true;
}

static bool save_step(lg_session *s, uint32_t rank, uint64_t step, lg_error *err)
{
    static _Thread_local values v;
    fill(&v, step, rank);
    lg_save_options o = LG_SAVE_OPTIONS_INIT;
    o.flags = plan.once ? LG_SAVE_ALIASES_ONCE : 0;
    lg_save *save = NULL;
    DO(lg_save_begin(s, step, &o, &save, err));
    adding a = {save, rank, err};
    if (!add_tensors(&a, &v, step) || !add_state(&a, step) || (tweaked("more", step) && !add_more_state(&a))) {
        lg_save_abort(save);
        return false;
    }
    DO(lg_save_commit(save, NULL, err));
    return true;
}

static lg_status no_targets(lg_load *load, void *arg, lg_error *err)
{
    (void)load;
    (void)arg;
    (void)err;
    return LG_OK;
}

static bool run(rank_job *j, lg_error *err)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = j->comm;
    o.domain = j->rank % 2 == 0 ? "node-a" : "node-b";
    o.deadline_ms = 60000;
    o.block_bytes = 4096;
    lg_session *s = NULL;
    DO(lg_session_open(plan.root, &o, &s, err));
    lg_resume_result *r = NULL;
    lg_status status = lg_resume(s, NULL, no_targets, NULL, &r, err);
    bool ok = status == LG_OK || status == LG_ERR_EMPTY || !failed("resume", err);
    lg_resume_result_free(r);
    for (size_t i = 0; ok && i < plan.n_steps; i++) {
        ok = save_step(s, j->rank, plan.steps[i], err);
    }
    if (lg_session_close(s, err) != LG_OK && ok) {
        ok = !failed("close", err);
    }
    return ok;
}

static void *rank_main(void *arg)
{
    rank_job *j = arg;
    lg_error err = LG_ERROR_INIT;
    j->failed = !run(j, &err);
    lg_comm_free(j->comm);
    return NULL;
}

/* ---------------------------------------------------------------- arguments */

static void read_steps(const char *list)
{
    plan.n_steps = 0;
    while (*list != '\0' && plan.n_steps < STEPS_MAX) {
        char *end;
        plan.steps[plan.n_steps++] = strtoull(list, &end, 10);
        list = *end == ',' ? end + 1 : end;
        if (*end != ',' && *end != '\0') {
            fprintf(stderr, "make_root: bad list of steps\n");
            exit(2);
        }
    }
}

static void read_arguments(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (strncmp(a, "--ranks=", 8) == 0) {
            plan.ranks = (uint32_t)atoi(a + 8);
        } else if (strncmp(a, "--steps=", 8) == 0) {
            read_steps(a + 8);
        } else if (strcmp(a, "--once") == 0) {
            plan.once = true;
        } else if (strcmp(a, "--differ") == 0) {
            plan.differ = true;
        } else if (strcmp(a, "--kinds") == 0) {
            plan.kinds = true;
        } else if (strncmp(a, "--tweak=", 8) == 0 && plan.n_tweaks < TWEAKS_MAX) {
            plan.tweaks[plan.n_tweaks++] = a + 8;
        } else if (a[0] != '-' && plan.root == NULL) {
            plan.root = a;
        } else {
            fprintf(stderr, "make_root: what is %s?\n", a);
            exit(2);
        }
    }
    if (plan.root == NULL || plan.ranks < 1 || plan.ranks > RANKS_MAX) {
        fprintf(stderr,
                "usage: make_root ROOT [--ranks=N] [--steps=LIST] [--once] [--differ] [--kinds] [--tweak=WHAT]\n");
        exit(2);
    }
}

int main(int argc, char **argv)
{
    read_arguments(argc, argv);
    rank_job jobs[RANKS_MAX];
    lg_comm *comms[RANKS_MAX];
    lg_error err = LG_ERROR_INIT;
    if (lg_comm_threads_create(plan.ranks, comms, &err) != LG_OK) {
        failed("communicator", &err);
        return 1;
    }
    for (uint32_t r = 0; r < plan.ranks; r++) {
        jobs[r] = (rank_job){.rank = r, .comm = comms[r]};
        if (pthread_create(&jobs[r].thread, NULL, rank_main, &jobs[r]) != 0) {
            fprintf(stderr, "make_root: no thread\n");
            exit(1);
        }
    }
    bool bad = false;
    for (uint32_t r = 0; r < plan.ranks; r++) {
        pthread_join(jobs[r].thread, NULL);
        bad = bad || jobs[r].failed;
    }
    return bad;
}
