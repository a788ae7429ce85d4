/* SPDX-License-Identifier: Apache-2.0 */

/* Saving and loading against what the disk and the memory can do.
 *
 *   io [--mib N] [--tensors N] [--small] [--pairs N] [--dir DIR] [--json] [--partial]
 *      [--offset N] [--ranks N]
 *
 * One process, one state (N MiB in equal F32 tensors, default 512 in 64; with
 * --small 20,000 tensors of 4 KiB). In each round, one after the other:
 *   raw write   the same number of bytes into one new, preallocated file with
 *               O_DIRECT, 1 MiB blocks, 4 under way, then fsync
 *   save        lg_save_begin to lg_save_commit: durable, digested, committed
 *   raw read    that file, O_DIRECT, 1 MiB blocks, 4 under way
 *   cold load   lg_load of everything, every block verified; the files were
 *               dropped from the page cache before (and all of it, as root)
 *   memcpy      the bytes, between memory that was touched before
 *   mapped copy mmap of the checkpoint's files and one memcpy of each, nothing
 *               checked, as safetensors loads
 *   warm load   as cold load, with the files in the page cache
 * The order of save and raw write, of load and raw read, and of the last two
 * changes from round to round. A ratio is a round's raw time over its own time; its interval
 * is the 95 % one of the median, by bootstrap over the rounds. Where it is wider
 * than a fifth of the median the table says so.
 *
 * With --partial instead: one tensor, and 16 rows of one, out of the state, and
 * how many bytes came from the disk for it. With --ranks N: N ranks resume into
 * the whole state, each reading all of it or all sharing. */

#include "base/json.h"
#include "base/thread.h"
#include "io/choice.h"
#include "measure.h"

#include <lastgood/backend.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define RAW_DEPTH 4

enum { RAW_WRITE, SAVE, RAW_READ, COLD, COPY, MAPPED, WARM, N_KINDS };
static const char *const kinds[N_KINDS] = {"raw write", "save",        "raw read", "cold load",
                                           "memcpy",    "mapped copy", "warm load"};

typedef struct state {
    size_t n, each, bytes; /* tensors, bytes of one, of all */
    char *data, *other;    /* what is saved, what is loaded into */
    char (*names)[48];
} state;

/* ---------------------------------------------------------------------- raw */

typedef struct raw {
    int fd;
    bool write;
    size_t bytes;       /* a multiple of MIB */
    atomic_size_t next; /* block */
    atomic_bool failed;
} raw;

static void *raw_work(void *arg)
{
    raw *r = arg;
    char *block = aligned_alloc(4096, MIB);
    memset(block, 1, MIB);
    for (size_t at; (at = atomic_fetch_add(&r->next, MIB)) < r->bytes;) {
        ssize_t n = r->write ? pwrite(r->fd, block, MIB, (off_t)at) : pread(r->fd, block, MIB, (off_t)at);
        if (n != (ssize_t)MIB) {
            atomic_store(&r->failed, true);
        }
    }
    free(block);
    return NULL;
}

static took raw_run(const char *path, size_t bytes, bool write)
{
    raw r = {.write = write, .bytes = (bytes + MIB - 1) / MIB * MIB};
    if (write) {
        unlink(path);
    }
    int flags = write ? O_WRONLY | O_CREAT | O_EXCL : O_RDONLY;
    took start = now();
    r.fd = open(path, flags | O_DIRECT | O_CLOEXEC, 0600);
    if (r.fd < 0 || (write && posix_fallocate(r.fd, 0, (off_t)r.bytes) != 0)) {
        die(path, NULL);
    }
    pthread_t threads[RAW_DEPTH];
    for (int i = 0; i < RAW_DEPTH; i++) {
        if (!lg__thread_start(&threads[i], raw_work, &r)) {
            die("thread", NULL);
        }
    }
    for (int i = 0; i < RAW_DEPTH; i++) {
        pthread_join(threads[i], NULL);
    }
    if (atomic_load(&r.failed) || (write && fsync(r.fd) != 0)) {
        die(path, NULL);
    }
    close(r.fd);
    return since(start);
}

/* ----------------------------------------------------------------- lastgood */

static took save(const state *st, lg_session *session, uint64_t step)
{
    lg_error error = LG_ERROR_INIT, *err = &error;
    lg_save *s = NULL;
    const uint64_t shape[] = {st->each / 4096, 1024};
    took start = now();
    MUST(lg_save_begin(session, step, NULL, &s, err));
    for (size_t i = 0; i < st->n; i++) {
        lg_tensor t = LG_TENSOR_INIT;
        t.name = st->names[i], t.dtype = LG_F32, t.ndim = 2, t.shape = shape, t.data = st->data + i * st->each;
        t.group = i % 3 == 0 ? LG_GROUP_MODEL : LG_GROUP_OPTIM;
        MUST(lg_save_tensor(s, &t, err));
    }
    MUST(lg_save_commit(s, NULL, err));
    return since(start);
}

static took load(const state *st, const char *where)
{
    lg_error error = LG_ERROR_INIT, *err = &error;
    lg_checkpoint *c = NULL;
    lg_load *l = NULL;
    const uint64_t shape[] = {st->each / 4096, 1024};
    took start = now();
    MUST(lg_checkpoint_open(where, &c, err));
    MUST(lg_load_begin(c, 0, &l, err));
    for (size_t i = 0; i < st->n; i++) {
        lg_target t = LG_TARGET_INIT;
        t.name = st->names[i], t.dtype = LG_F32, t.ndim = 2, t.shape = shape, t.data = st->other + i * st->each;
        MUST(lg_load_tensor(l, &t, err));
    }
    MUST(lg_load_run(l, err));
    took t = since(start);
    lg_load_free(l);
    lg_checkpoint_close(c);
    if (memcmp(st->data, st->other, st->bytes) != 0) {
        die("what was loaded is not what was saved", &(lg_error){.message = "wrong"});
    }
    return t;
}

/* -------------------------------------------------------------------- cache */

static void in_folders(const char *dir, void (*fn)(const char *path), int depth)
{
    DIR *d = opendir(dir);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        char path[5000];
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        if (e->d_name[0] != '.' && depth > 0) {
            in_folders(path, fn, depth - 1);
        }
        fn(path);
    }
    if (d != NULL) {
        closedir(d);
    }
}

static void drop(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd >= 0) {
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
}

static void warm(const char *path)
{
    static char block[1 << 20];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    while (fd >= 0 && read(fd, block, sizeof block) > 0) {
    }
    if (fd >= 0) {
        close(fd);
    }
}

static void drop_all(const char *dir)
{
    in_folders(dir, drop, 2);
    int fd = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (write(fd, "1", 1) != 1) {
            errno = 0; /* only root may */
        }
        close(fd);
    }
}

/* What a loader does that maps its files and checks nothing. */
static char *mapped_to;
static size_t mapped_left;
static void copy_mapped(const char *path)
{
    if (strstr(path, ".safetensors") == NULL) {
        return;
    }
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 || fstat(fd, &info) != 0) {
        die(path, NULL);
    }
    size_t bytes = (size_t)info.st_size;
    char *from = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    uint64_t header;
    if (from == MAP_FAILED) {
        die(path, NULL);
    }
    memcpy(&header, from, sizeof header);
    size_t n = bytes - 8 - (size_t)header;
    n = n < mapped_left ? n : mapped_left;
    memcpy(mapped_to, from + 8 + header, n);
    mapped_to += n;
    mapped_left -= n;
    munmap(from, bytes);
    close(fd);
}

static took mapped(const state *st, const char *root)
{
    mapped_to = st->other;
    mapped_left = st->bytes;
    took start = now();
    in_folders(root, copy_mapped, 2);
    took t = since(start);
    if (mapped_left != 0) {
        die("the files are shorter than the state", NULL);
    }
    return t;
}

/* ------------------------------------------------------------------- report */

static void report(const state *st, double (*seconds)[MAX_ROUNDS], double (*cpu)[MAX_ROUNDS], size_t n, bool as_json)
{
    static const int pairs[][2] = {{SAVE, RAW_WRITE}, {COLD, RAW_READ}, {WARM, MAPPED}, {WARM, COPY}};
    double gb = (double)st->bytes / 1e9;
    const char *engine = lg__io_engine_name(lg__io_wanted_engine());
    json_t *out = json_pack("{s:I,s:I,s:I,s:s,s:{},s:{},s:{}}", "bytes", (json_int_t)st->bytes, "tensors",
                            (json_int_t)st->n, "rounds", (json_int_t)n, "engine", engine, "seconds", "cpu", "ratios");
    if (!as_json) {
        printf("%zu tensors, %.1f MB, %zu rounds, engine %s\n\n", st->n, gb * 1000, n, engine);
        printf("%-12s %10s %10s %10s\n", "", "median s", "GB/s", "cpu s");
    }
    for (int k = 0; k < N_KINDS; k++) {
        double m = median(seconds[k], n);
        json_object_set_new(json_object_get(out, "seconds"), kinds[k], json_real(m));
        json_object_set_new(json_object_get(out, "cpu"), kinds[k], json_real(median(cpu[k], n)));
        if (!as_json) {
            printf("%-12s %10.4f %10.2f %10.4f\n", kinds[k], m, gb / m, median(cpu[k], n));
        }
    }
    if (!as_json) {
        printf("\n%-24s %8s   %s\n", "ratio of speeds", "median", "95 % interval");
    }
    for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++) {
        char name[64];
        snprintf(name, sizeof name, "%s / %s", kinds[pairs[p][0]], kinds[pairs[p][1]]);
        ratio(json_object_get(out, "ratios"), name, seconds[pairs[p][1]], seconds[pairs[p][0]], n, !as_json);
    }
    if (as_json) {
        json_dumpf(out, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
        putchar('\n');
    }
    json_decref(out);
}

/* --------------------------------------------------------------------- main */

/* Retention would be part of a save, but not of its way to the disk. */
static void remove_checkpoints(const char *root)
{
    DIR *d = opendir(root);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        if (strncmp(e->d_name, "step-", 5) == 0) {
            char path[4400];
            snprintf(path, sizeof path, "%s/%s", root, e->d_name);
            remove_tree(path);
        }
    }
    if (d != NULL) {
        closedir(d);
    }
}

static size_t behind = 64; /* a page: where the state begins; as PyTorch's memory */

static char *touched(size_t bytes, size_t at)
{
    char *p = aligned_alloc(4096, bytes + 4096);
    if (p == NULL) {
        die("memory", NULL);
    }
    p += at;
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t v = i * UINT64_C(0x9e3779b97f4a7c15);
        memcpy(p + i, &v, 8);
    }
    return p;
}

/* ------------------------------------------------------------------ partial */

/* Bytes that this process made the kernel fetch from storage. */
static uint64_t fetched(void)
{
    char text[1024] = "";
    int fd = open("/proc/self/io", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, text, sizeof text - 1) <= 0) {
        die("/proc/self/io", NULL);
    }
    close(fd);
    const char *at = strstr(text, "\nread_bytes: ");
    return at != NULL ? strtoull(at + strlen("\nread_bytes: "), NULL, 10) : 0;
}

/* `rows` rows of 4 KiB of tensor `i`, from row `first` on. */
static double load_rows(const state *st, lg_checkpoint *c, size_t i, uint64_t first, uint64_t rows)
{
    lg_error error = LG_ERROR_INIT, *err = &error;
    lg_load *l = NULL;
    const uint64_t shape[] = {st->each / 4096, 1024}, offset[] = {first, 0}, extent[] = {rows, 1024};
    lg_target t = LG_TARGET_INIT;
    t.name = st->names[i], t.dtype = LG_F32, t.ndim = 2, t.shape = shape, t.data = st->other;
    t.offset = offset, t.extent = extent;
    took start = now();
    MUST(lg_load_begin(c, 0, &l, err));
    MUST(lg_load_tensor(l, &t, err));
    MUST(lg_load_run(l, err));
    double s = since(start).seconds;
    lg_load_free(l);
    if (memcmp(st->other, st->data + i * st->each + first * 4096, rows * 4096) != 0) {
        die("what was loaded is not what was saved", &(lg_error){.message = "wrong"});
    }
    return s;
}

/* One tensor, and 16 rows of one, out of all: bytes from the disk and time. */
static void partial(const state *st, const char *root, const char *dir, size_t rounds)
{
    lg_error error = LG_ERROR_INIT, *err = &error;
    const uint64_t all = st->each / 4096, few = 16;
    printf("%zu tensors of %zu KiB, %.1f MB; median of %zu\n\n", st->n, st->each / 1024, (double)st->bytes / 1e6,
           rounds);
    printf("%-22s %10s %14s %12s\n", "", "wanted KiB", "from disk KiB", "ms");
    static double ms[6][MAX_ROUNDS], kib[6][MAX_ROUNDS];
    for (size_t i = 0; i < rounds; i++) {
        for (int rows = 0; rows < 2; rows++) {
            lg_checkpoint *c = NULL;
            const uint64_t n = rows ? few : all, first = rows ? 33 + i : 0;
            const size_t which = (i * 7 + (size_t)rows) % st->n;
            drop_all(dir);
            uint64_t before = fetched();
            took start = now();
            MUST(lg_checkpoint_open(root, &c, err));
            ms[rows][i] = since(start).seconds * 1e3;
            kib[rows][i] = (double)(fetched() - before) / 1024;
            before = fetched();
            ms[2 + rows][i] = load_rows(st, c, which, first, n) * 1e3;
            kib[2 + rows][i] = (double)(fetched() - before) / 1024;
            in_folders(root, warm, 2);
            load_rows(st, c, which, first, n);
            before = fetched();
            ms[4 + rows][i] = load_rows(st, c, which, first, n) * 1e3;
            kib[4 + rows][i] = (double)(fetched() - before) / 1024;
            lg_checkpoint_close(c);
        }
    }
    static const char *const names[] = {"open, cold",   "", "tensor, cold", "16 rows, cold", "tensor, warm",
                                        "16 rows, warm"};
    for (int k = 0; k < 6; k++) {
        uint64_t wanted = k < 2 ? 0 : k % 2 == 0 ? all * 4 : few * 4;
        if (k != 1) {
            printf("%-22s %10" PRIu64 " %14.0f %12.3f\n", names[k], wanted, median(kib[k], rounds),
                   median(ms[k], rounds));
        }
    }
}

/* ------------------------------------------------------------- several ranks */

typedef struct loader { /* one rank, a thread */
    const state *st;
    const char *root;
    lg_comm *comm;
    uint32_t flags;
    char *to;
} loader;

static lg_status want_all(lg_load *l, void *arg, lg_error *err)
{
    const loader *x = arg;
    const uint64_t shape[] = {x->st->each / 4096, 1024};
    for (size_t i = 0; i < x->st->n; i++) {
        lg_target t = LG_TARGET_INIT;
        t.name = x->st->names[i], t.dtype = LG_F32, t.ndim = 2, t.shape = shape, t.data = x->to + i * x->st->each;
        lg_status s = lg_load_tensor(l, &t, err);
        if (s != LG_OK) {
            return s;
        }
    }
    return LG_OK;
}

static void *load_all(void *arg)
{
    loader *x = arg;
    lg_error error = LG_ERROR_INIT, *err = &error;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = x->comm, o.flags = LG_SESSION_READ_ONLY;
    lg_session *s = NULL;
    lg_resume_options ro = LG_RESUME_OPTIONS_INIT;
    ro.flags = x->flags;
    lg_resume_result *r = NULL;
    MUST(lg_session_open(x->root, &o, &s, err));
    MUST(lg_resume(s, &ro, want_all, x, &r, err));
    lg_resume_result_free(r);
    MUST(lg_session_close(s, err));
    return NULL;
}

/* All ranks resume into all of the state: each reads all of it, or a part. */
static void several(const state *st, const char *root, const char *dir, uint32_t ranks, size_t rounds)
{
    static const char *const names[] = {"each reads all, cold", "shared, cold", "each reads all, warm", "shared, warm"};
    static double seconds[4][MAX_ROUNDS], cpu[4][MAX_ROUNDS], mb[4][MAX_ROUNDS];
    loader *x = calloc(ranks, sizeof *x);
    pthread_t *threads = calloc(ranks, sizeof *threads);
    lg_comm **comms = calloc(ranks, sizeof(lg_comm *));
    lg_error error = LG_ERROR_INIT, *err = &error;
    for (uint32_t r = 0; r < ranks; r++) {
        x[r] = (loader){.st = st, .root = root, .to = touched(st->bytes, 1024)};
    }
    for (size_t i = 0; i < rounds * 4; i++) {
        const size_t k = i % 4;
        MUST(lg_comm_threads_create(ranks, comms, err));
        if (k < 2) {
            drop_all(dir);
        } else {
            in_folders(root, warm, 2);
        }
        uint64_t before = fetched();
        took start = now();
        for (uint32_t r = 0; r < ranks; r++) {
            x[r].comm = comms[r];
            x[r].flags = k % 2 == 1 ? LG_RESUME_SHARE : LG_RESUME_NO_SHARE;
            if (!lg__thread_start(&threads[r], load_all, &x[r])) {
                die("thread", NULL);
            }
        }
        for (uint32_t r = 0; r < ranks; r++) {
            pthread_join(threads[r], NULL);
        }
        took t = since(start);
        seconds[k][i / 4] = t.seconds, cpu[k][i / 4] = t.cpu, mb[k][i / 4] = (double)(fetched() - before) / 1e6;
        for (uint32_t r = 0; r < ranks; r++) {
            lg_comm_free(comms[r]);
            if (memcmp(x[r].to, st->data, st->bytes) != 0) {
                die("what was loaded is not what was saved", &(lg_error){.message = "wrong"});
            }
            memset(x[r].to, 0, st->bytes);
        }
    }
    printf("%u ranks (threads), each loads %.1f MB; median of %zu\n\n", ranks, (double)st->bytes / 1e6, rounds);
    printf("%-22s %10s %10s %14s\n", "", "s", "cpu s", "MB from disk");
    for (int k = 0; k < 4; k++) {
        printf("%-22s %10.3f %10.3f %14.0f\n", names[k], median(seconds[k], rounds), median(cpu[k], rounds),
               median(mb[k], rounds));
    }
    for (uint32_t r = 0; r < ranks; r++) {
        free(x[r].to - 1024);
    }
    free(x);
    free(threads);
    free(comms);
}

int main(int argc, char **argv)
{
    size_t mib = 512, n_tensors = 64, rounds = 10;
    uint32_t ranks = 0;
    bool small = false, as_json = false, only_partial = false;
    const char *base = getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp";
    static const struct option options[] = {
        {"mib", 1, NULL, 'm'},     {"tensors", 1, NULL, 't'}, {"small", 0, NULL, 's'},  {"pairs", 1, NULL, 'p'},
        {"dir", 1, NULL, 'd'},     {"json", 0, NULL, 'j'},    {"offset", 1, NULL, 'o'}, {"ranks", 1, NULL, 'r'},
        {"partial", 0, NULL, 'P'}, {NULL, 0, NULL, 0}};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (c) {
        case 'm':
            mib = strtoul(optarg, NULL, 10);
            break;
        case 't':
            n_tensors = strtoul(optarg, NULL, 10);
            break;
        case 's':
            small = true;
            break;
        case 'p':
            rounds = strtoul(optarg, NULL, 10);
            break;
        case 'd':
            base = optarg;
            break;
        case 'o':
            behind = strtoul(optarg, NULL, 10) % 4096;
            break;
        case 'r':
            ranks = (uint32_t)strtoul(optarg, NULL, 10);
            break;
        case 'P':
            only_partial = true;
            break;
        case 'j':
            as_json = true;
            break;
        default:
            return 2;
        }
    }
    state st = {.n = small ? 20000 : n_tensors};
    st.each = small ? 4096 : st.n == 0 ? 0 : mib * MIB / st.n / 4096 * 4096;
    st.bytes = st.n * st.each;
    if (st.bytes == 0 || rounds == 0 || rounds > MAX_ROUNDS) {
        fprintf(stderr, "io: nothing to do\n");
        return 2;
    }
    st.data = touched(st.bytes, behind);
    /* Memory and file do not lie alike in their pages, as is the case for most
     * tensors: so neither memcpy nor the kernel's copy meets its slow case. */
    st.other = touched(st.bytes, 1024);
    st.names = calloc(st.n, sizeof *st.names);
    for (size_t i = 0; i < st.n; i++) {
        snprintf(st.names[i], sizeof *st.names, "%slayers.%zu.weight", i % 3 == 0 ? "" : "optim.", i);
    }
    char dir[4000], root[4100], file[4100];
    snprintf(dir, sizeof dir, "%s/lastgood-io-XXXXXX", base);
    if (mkdtemp(dir) == NULL) {
        die(dir, NULL);
    }
    snprintf(root, sizeof root, "%s/root", dir);
    snprintf(file, sizeof file, "%s/raw", dir);
    lg_error error = LG_ERROR_INIT, *err = &error;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    lg_session *session = NULL;
    MUST(lg_session_open(root, &o, &session, err));
    static double seconds[N_KINDS][MAX_ROUNDS], cpu[N_KINDS][MAX_ROUNDS];
    if (only_partial) {
        save(&st, session, 1);
        partial(&st, root, dir, rounds);
    } else if (ranks > 0) {
        save(&st, session, 1);
        several(&st, root, dir, ranks, rounds);
        only_partial = true;
    }
    for (size_t i = 0; i <= rounds && !only_partial; i++) { /* the first one only warms up */
        took s[N_KINDS];
        remove_checkpoints(root);
        bool swap = i % 2 == 1;
        s[swap ? SAVE : RAW_WRITE] = swap ? save(&st, session, i) : raw_run(file, st.bytes, true);
        s[swap ? RAW_WRITE : SAVE] = swap ? raw_run(file, st.bytes, true) : save(&st, session, i);
        drop_all(dir);
        s[swap ? COLD : RAW_READ] = swap ? load(&st, root) : raw_run(file, st.bytes, false);
        drop_all(dir);
        s[swap ? RAW_READ : COLD] = swap ? raw_run(file, st.bytes, false) : load(&st, root);
        in_folders(root, warm, 2);
        took start = now();
        memcpy(st.other, st.data, st.bytes);
        s[COPY] = since(start);
        s[swap ? WARM : MAPPED] = swap ? load(&st, root) : mapped(&st, root);
        s[swap ? MAPPED : WARM] = swap ? mapped(&st, root) : load(&st, root);
        for (int k = 0; i > 0 && k < N_KINDS; k++) {
            seconds[k][i - 1] = s[k].seconds;
            cpu[k][i - 1] = s[k].cpu;
        }
    }
    MUST(lg_session_close(session, err));
    if (!only_partial) {
        report(&st, seconds, cpu, rounds, as_json);
    }
    unlink(file);
    remove_tree(dir);
    free(st.data - behind);
    free(st.other - 1024);
    free(st.names);
    return 0;
}
