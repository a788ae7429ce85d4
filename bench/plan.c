/* SPDX-License-Identifier: Apache-2.0 */

/* What planning costs a save of R ranks and T tensors, without the data: the
 * part that grows with the run and that every save waits for.
 *
 *   plan [--ranks N] [--tensors N] [--json]
 *
 * One process plays all ranks. Timed are
 *   plan        one rank: boxes, files, headers (and their check)
 *   report      the same rank: its report, encoded
 *   coordinate  rank 0, with the reports of all ranks in memory: decode and
 *               digest them, check and merge, encode the manifest, write it
 *               durably into a folder under $TMPDIR
 *   seconds     the sum of these three, by the clock
 *   cpu         the same in processor time, for machines that are busy
 * and, since a save does not wait for them one after the other,
 *   again       what the plan of a later save of the same tensors takes
 *   describe    one rank's lg_save_tensor calls
 *   all ranks   the boxes of all ranks, one rank after the other
 * Not in it: data, the start of a save, reading the reports from a file system.
 *
 * The tensors are those of a sharded training run: of ten, four are cut by
 * rows over all ranks, three by a mesh in two dimensions, one is replicated and
 * two lie in a flat buffer. The reports of all ranks but a few are copies of a
 * real one with the rank's own number, sizes and digests; the few are made in
 * full and must be equal in what is copied. */

#include "base/json.h"
#include "base/mem.h"
#include "core/save.h"
#include "store/store.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ALL_RANKS_MAX UINT64_C(20000000) /* boxes of all ranks: tensors × ranks at most */

static const lg__save_ids ids = {.run_id = "0123456789abcdef0123456789abcdef",
                                 .attempt = "00112233445566aa",
                                 .generation = {3, 17},
                                 .domain = "node-0000"};

typedef struct figures {
    double describe, plan, again, report, decode, merge, encode, write;
    double cpu;       /* of plan, report and coordinate */
    double all_ranks; /* < 0: not measured */
    uint64_t manifest_bytes, report_bytes, peak_bytes;
} figures;

static double clock_seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double now(void) { return clock_seconds(CLOCK_MONOTONIC); }
static double cpu(void) { return clock_seconds(CLOCK_PROCESS_CPUTIME_ID); }

static _Noreturn void die(const char *what, const lg_error *err)
{
    fprintf(stderr, "plan: %s: %s\n", what, err != NULL ? err->message : "failed");
    exit(1);
}

#define MUST(call)             \
    do {                       \
        if ((call) != LG_OK) { \
            die(#call, err);   \
        }                      \
    } while (0)

/* No session takes part. */
lg_status lg__session_save_facts(lg_session *s, lg__save_facts *out, lg_error *err)
{
    (void)s;
    (void)out;
    return lg_error_set(err, LG_ERR_STATE, "no session");
}

/* ----------------------------------------------------------------- the model */

typedef struct model {
    uint32_t ranks, tensors;
    lg_layout *rows, *mesh, *replicated, *flat;
    uint64_t flat_elements; /* of one flat tensor */
} model;

static lg_layout *make_layout(const lg_layout_desc *d, lg_error *err)
{
    lg_layout *l = NULL;
    MUST(lg_layout_create(d, &l, err));
    return l;
}

static void make_model(model *m, lg_error *err)
{
    const uint32_t inner = m->ranks % 8 == 0 ? 8 : 1;
    const uint32_t sizes[] = {m->ranks / inner, inner};
    const lg_split splits[] = {{0, 0, 0, LG_SPLIT_CEIL}, {1, 1, 0, LG_SPLIT_CEIL}};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &m->ranks;
    m->replicated = make_layout(&d, err);
    d.n_splits = 1, d.splits = splits;
    m->rows = make_layout(&d, err);
    d.n_splits = 0;
    m->flat_elements = UINT64_C(8192) * 8192;
    d.flat_length = (m->tensors / 10 + 1) * 2 * m->flat_elements;
    m->flat = make_layout(&d, err);
    d.flat_length = 0;
    d.mesh_ndim = 2, d.mesh_sizes = sizes, d.n_splits = 2;
    m->mesh = make_layout(&d, err);
}

static void free_model(model *m)
{
    lg_layout_free(m->rows);
    lg_layout_free(m->mesh);
    lg_layout_free(m->replicated);
    lg_layout_free(m->flat);
}

static lg_save *describe(const model *m, uint32_t rank, lg_error *err)
{
    static const uint64_t rows[] = {28672, 8192}, mesh[] = {8192, 28672}, norm[] = {8192}, flat[] = {8192, 8192};
    static const uint8_t memory[8]; /* never read */
    const lg__save_facts facts = {.rank = rank, .world = m->ranks, .block_bytes = 65536, .buffer_bytes = 64 << 20};
    lg_save *save = NULL;
    MUST(lg__save_new(&facts, 500, 0, &save, err));
    for (uint32_t i = 0; i < m->tensors; i++) {
        char name[96];
        const uint32_t kind = i % 10, layer = i / 10;
        lg_tensor t = LG_TENSOR_INIT;
        snprintf(name, sizeof name, "%smodel.layers.%u.block_%u.weight", kind >= 5 ? "optim.state.exp_avg." : "", layer,
                 kind);
        t.name = name, t.group = kind >= 5 ? LG_GROUP_OPTIM : LG_GROUP_MODEL, t.dtype = kind >= 5 ? LG_F32 : LG_BF16;
        t.ndim = 2, t.data = memory;
        if (kind == 4) {
            t.ndim = 1, t.shape = norm, t.layout = m->replicated;
        } else if (kind >= 8) {
            t.shape = flat, t.layout = m->flat, t.flat_offset = (layer * 2 + kind - 8) * m->flat_elements;
        } else if (kind % 2 == 0) {
            t.shape = rows, t.layout = m->rows;
        } else {
            t.shape = mesh, t.layout = m->mesh;
        }
        MUST(lg_save_tensor(save, &t, err));
    }
    MUST(lg_save_global_u64(save, "samples", 123456789, err));
    MUST(lg_save_global_f64(save, "lr", 3e-4, err));
    MUST(lg_save_rank_bytes(save, "rng", memory, sizeof memory, err));
    return save;
}

static lg__report *make_report(const model *m, uint32_t rank, figures *f, lg__buf *encoded, lg_error *err)
{
    double t0 = now();
    lg_save *save = describe(m, rank, err);
    double t1 = now(), c1 = cpu();
    lg__plan *plan = NULL;
    MUST(lg__plan_make(save, &ids, &plan, err));
    double t2 = now();
    uint8_t(*tables)[LG__SHA256_BYTES] = calloc(plan->n_files, sizeof *tables);
    lg__report *r = NULL;
    MUST(lg__save_report(save, &ids, plan, (const uint8_t(*)[LG__SHA256_BYTES])tables, &r, err));
    MUST(lg__report_encode(r, encoded, err));
    double t3 = now();
    if (f != NULL) {
        f->describe = t1 - t0, f->plan = t2 - t1, f->report = t3 - t2, f->cpu += cpu() - c1;
        lg__plan *kept = NULL;
        lg__plan_keep(&kept, plan, save);
        double t4 = now();
        MUST(lg__plan_get(&kept, save, &ids, &plan, err));
        f->again = now() - t4;
    }
    free(tables);
    lg__report_free(r);
    r = NULL;
    MUST(lg__report_decode(encoded->data, encoded->len, &r, err)); /* needs the save no more */
    lg__plan_free(plan);
    lg_save_abort(save);
    return r;
}

/* ------------------------------------------------------------------ all ranks */

static double plan_all_ranks(const model *m, lg_error *err)
{
    if ((uint64_t)m->ranks * m->tensors > ALL_RANKS_MAX) {
        return -1;
    }
    lg_save *save = describe(m, 0, err);
    double t0 = now();
    uint64_t boxes = 0;
    for (uint32_t r = 0; r < m->ranks; r++) {
        for (size_t i = 0; i < save->n_tensors; i++) {
            lg__tensor_desc desc = lg__save_desc(&save->tensors[i]);
            lg__piece *pieces = NULL;
            size_t n = 0;
            MUST(lg__layout_written(save->tensors[i].layout, &desc, r, &pieces, &n, err));
            boxes += n;
            lg__free(pieces);
        }
    }
    double seconds = now() - t0;
    if (boxes == 0) {
        die("no boxes", NULL);
    }
    lg_save_abort(save);
    return seconds;
}

/* The encoded reports of all ranks, one behind the other. */
static lg__buf make_reports(const model *m, size_t *at, lg_error *err)
{
    lg__buf all, one;
    lg__buf_init(&all, SIZE_MAX / 2);
    lg__buf_init(&one, LG__REPORT_MAX);
    lg__report *sample = NULL;
    for (uint32_t r = 0; r < m->ranks; r++) {
        at[r] = all.len;
        const bool full = sample == NULL || r == m->ranks / 2 || r + 1 == m->ranks;
        if (full) {
            one.len = 0;
            lg__report *real = make_report(m, r, NULL, &one, err);
            lg__buf_add(&all, one.data, one.len);
            if (sample != NULL && (real->n_uses != sample->n_uses || real->n_tensors != 0 ||
                                   memcmp(real->uses, sample->uses, real->n_uses * sizeof *real->uses) != 0)) {
                die("the reports of two ranks are not alike", NULL);
            }
            if (r == 1) {
                sample = real;
            } else {
                lg__report_free(real);
            }
            continue;
        }
        char domain[32];
        snprintf(domain, sizeof domain, "node-%04u", r / 8);
        const uint32_t rank = sample->rank;
        const char *old = sample->domain;
        sample->rank = r, sample->domain = domain;
        for (size_t i = 0; i < sample->n_files; i++) {
            for (size_t k = 0; k < LG__SHA256_BYTES; k++) {
                sample->files[i].table[k] = (uint8_t)((r + 1) * 2654435761u >> (k % 24));
            }
        }
        MUST(lg__report_encode(sample, &all, err));
        sample->rank = rank, sample->domain = old;
    }
    at[m->ranks] = all.len;
    MUST(lg__buf_check(&all, "reports", err));
    lg__report_free(sample);
    lg__buf_free(&one);
    return all;
}

static void coordinate(const model *m, const lg__buf *all, const size_t *at, figures *f, lg_error *err)
{
    char folder[512];
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/lastgood-bench-XXXXXX", tmp != NULL ? tmp : "/tmp");
    if (mkdtemp(folder) == NULL) {
        die(folder, NULL);
    }
    lg_store *store = NULL;
    MUST(lg_store_open(folder, &store, err));
    lg__manifest *manifest = NULL;
    MUST(lg__manifest_new(&manifest, err));
    memcpy(manifest->run_id, ids.run_id, sizeof manifest->run_id);
    memcpy(manifest->attempt, ids.attempt, sizeof manifest->attempt);
    memcpy(manifest->created, "2026-11-29T18:31:57Z", sizeof manifest->created);
    manifest->generation = ids.generation, manifest->step = 500, manifest->block_bytes = 65536;
    lg__report **reports = calloc(m->ranks, sizeof(lg__report *));
    lg__written *written = calloc(m->ranks, sizeof *written);
    if (reports == NULL || written == NULL) {
        die("memory", NULL);
    }

    double t0 = now(), c0 = cpu();
    for (uint32_t r = 0; r < m->ranks; r++) {
        const char *text = all->data + at[r];
        const size_t bytes = at[r + 1] - at[r];
        MUST(lg__report_decode(text, bytes, &reports[r], err));
        MUST(lg__sha256_of(text, bytes, written[r].report, err));
        written[r].sums_bytes = bytes + 65536;
    }
    double t1 = now();
    MUST(lg__merge((const lg__report *const *)reports, m->ranks, written, manifest, err));
    double t2 = now();
    lg__buf bytes;
    lg__buf_init(&bytes, LG__MANIFEST_MAX);
    MUST(lg__manifest_encode(manifest, &bytes, err));
    double t3 = now();
    MUST(lg__store_put_new(store, LG__MANIFEST, bytes.data, bytes.len, err));
    MUST(lg__store_sync_dir(store, "", err));
    double t4 = now();
    f->decode = t1 - t0, f->merge = t2 - t1, f->encode = t3 - t2, f->write = t4 - t3;
    f->cpu += cpu() - c0;
    f->manifest_bytes = bytes.len;
    f->report_bytes = all->len;

    MUST(lg__store_remove_file(store, LG__MANIFEST, err));
    rmdir(folder);
    lg__buf_free(&bytes);
    for (uint32_t r = 0; r < m->ranks; r++) {
        lg__report_free(reports[r]);
    }
    free(reports);
    free(written);
    lg__manifest_free(manifest);
    lg_store_free(store);
}

static uint64_t peak_bytes(void)
{
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    uint64_t kib = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "VmHWM: %" SCNu64, &kib) == 1) {
            break;
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return kib * 1024;
}

static void measure(uint32_t ranks, uint32_t tensors, figures *f)
{
    lg_error error = LG_ERROR_INIT, *err = &error;
    model m = {.ranks = ranks, .tensors = tensors};
    make_model(&m, err);
    lg__buf one;
    lg__buf_init(&one, LG__REPORT_MAX);
    lg__report_free(make_report(&m, 0, f, &one, err)); /* rank 0 has the most to report */
    lg__buf_free(&one);
    size_t *at = calloc((size_t)ranks + 1, sizeof *at);
    if (at == NULL) {
        die("no memory", NULL);
    }
    lg__buf all = make_reports(&m, at, err);
    coordinate(&m, &all, at, f, err);
    lg__buf_free(&all);
    free(at);
    f->peak_bytes = peak_bytes();
    f->all_ranks = plan_all_ranks(&m, err);
    free_model(&m);
}

/* -------------------------------------------------------------------- output */

static double waited_for(const figures *f) { return f->plan + f->report + f->decode + f->merge + f->encode + f->write; }

static void print_json(uint32_t ranks, uint32_t tensors, const figures *f)
{
    printf("{\"ranks\":%u,\"tensors\":%u,\"seconds\":%.6f,\"manifest_bytes\":%" PRIu64 ",\"peak_bytes\":%" PRIu64
           ",\"cpu_seconds\":%.6f"
           ",\"describe_seconds\":%.6f,\"plan_seconds\":%.6f,\"plan_again_seconds\":%.6f,\"report_seconds\":%.6f,"
           "\"decode_seconds\":%.6f"
           ",\"merge_seconds\":%.6f,\"encode_seconds\":%.6f,\"write_seconds\":%.6f,\"report_bytes\":%" PRIu64
           ",\"all_ranks_plan_seconds\":",
           ranks, tensors, waited_for(f), f->manifest_bytes, f->peak_bytes, f->cpu, f->describe, f->plan, f->again,
           f->report, f->decode, f->merge, f->encode, f->write, f->report_bytes);
    if (f->all_ranks < 0) {
        printf("null}\n");
    } else {
        printf("%.6f}\n", f->all_ranks);
    }
}

static void print_head(void)
{
    printf("%6s %8s %8s %8s | %8s %8s %8s %8s %8s %8s | %9s %9s | %8s %9s %10s\n", "ranks", "tensors", "seconds", "cpu",
           "plan", "report", "decode", "merge", "encode", "write", "manifest", "peak", "again", "describe",
           "all ranks");
}

static void print_row(uint32_t ranks, uint32_t tensors, const figures *f)
{
    printf("%6u %8u %8.4f %8.4f | %8.4f %8.4f %8.4f %8.4f %8.4f %8.4f | %6.0f kB %6.0f MB | %8.4f %9.4f ", ranks,
           tensors, waited_for(f), f->cpu, f->plan, f->report, f->decode, f->merge, f->encode, f->write,
           (double)f->manifest_bytes / 1e3, (double)f->peak_bytes / 1e6, f->again, f->describe);
    if (f->all_ranks < 0) {
        printf("%10s\n", "-");
    } else {
        printf("%10.3f\n", f->all_ranks);
    }
}

/* In a process of its own, so that the peak of memory is its own. */
static void run(uint32_t ranks, uint32_t tensors, bool json)
{
    fflush(stdout);
    pid_t child = fork();
    if (child < 0) {
        die("fork", NULL);
    }
    if (child == 0) {
        figures f = {0};
        measure(ranks, tensors, &f);
        if (json) {
            print_json(ranks, tensors, &f);
        } else {
            print_row(ranks, tensors, &f);
        }
        fflush(stdout);
        exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        exit(1);
    }
}

static uint32_t number(const char *text, uint32_t max)
{
    char *end;
    unsigned long v = strtoul(text, &end, 10);
    if (*end != '\0' || v == 0 || v > max) {
        fprintf(stderr, "plan: \"%s\" is no number from 1 to %u\n", text, max);
        exit(2);
    }
    return (uint32_t)v;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"ranks", required_argument, NULL, 'r'},
                                            {"tensors", required_argument, NULL, 't'},
                                            {"json", no_argument, NULL, 'j'},
                                            {NULL, 0, NULL, 0}};
    static const uint32_t all_ranks[] = {16, 64, 256, 1024, 4096, 16384}, all_tensors[] = {200, 2000, 20000};
    uint32_t ranks = 0, tensors = 0;
    bool json = false;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'r') {
            ranks = number(optarg, LG__MAX_WORLD);
        } else if (c == 't') {
            tensors = number(optarg, 1000000);
        } else if (c == 'j') {
            json = true;
        } else {
            fprintf(stderr, "usage: plan [--ranks N] [--tensors N] [--json]\n");
            return 2;
        }
    }
    if (!json) {
        print_head();
    }
    if (ranks != 0 || tensors != 0) {
        run(ranks != 0 ? ranks : 4096, tensors != 0 ? tensors : 2000, json);
        return 0;
    }
    for (size_t t = 0; t < sizeof all_tensors / sizeof *all_tensors; t++) {
        for (size_t r = 0; r < sizeof all_ranks / sizeof *all_ranks; r++) {
            run(all_ranks[r], all_tensors[t], json);
        }
    }
    return 0;
}
