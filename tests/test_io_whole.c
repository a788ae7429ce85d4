/* SPDX-License-Identifier: Apache-2.0 */

/* Whole saves and loads on a real folder: files of odd sizes through kernels that
 * move little at a time, memory that is written without a copy, tensors beyond
 * 4 GiB, and how much memory stays in use. */

#include "base/hash.h"
#include "core/checkpoint.h"
#include "io/buffers.h"
#include "io/choice.h"
#include "io/crc_copy.h"
#include "io/uring.h"
#include "store/posix.h"
#include "support/build.h"
#include "support/check.h"
#include "support/fault_store.h"
#include "support/peak.h"
#include "support/temp_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define TMPFS_MAGIC 0x01021994

static const struct {
    lg__io_engine engine;
    lg__io_direct direct;
} ways[] = {{LG__IO_URING, LG__DIRECT_ON},    {LG__IO_URING, LG__DIRECT_OFF},   {LG__IO_THREADS, LG__DIRECT_ON},
            {LG__IO_THREADS, LG__DIRECT_OFF}, {LG__IO_BLOCKING, LG__DIRECT_ON}, {LG__IO_AUTO, LG__DIRECT_AUTO}};
#define N_WAYS (sizeof ways / sizeof *ways)

static bool use(size_t i)
{
    lg__io_set(ways[i].engine, ways[i].direct);
    return ways[i].engine != LG__IO_URING || lg__uring_works();
}

typedef struct fixture {
    char dir[256];
    size_t descriptors;
} fixture;

static int setup(void **state)
{
    fixture *x = calloc(1, sizeof *x);
    x->descriptors = open_descriptors();
    temp_dir_make(x->dir);
    *state = x;
    return 0;
}

static int teardown(void **state)
{
    fixture *x = *state;
    lg__posix = lg__posix_real;
    lg__uring_odd = (lg__uring_odds){0};
    lg__io_set(LG__IO_AUTO, LG__DIRECT_AUTO);
    lg__io_set_depth(0);
    assert_int_equal(open_descriptors(), x->descriptors);
    temp_dir_remove(x->dir);
    free(x);
    return 0;
}

/* Memory that begins at a page. */
static uint8_t *pages(size_t bytes)
{
    uint8_t *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    assert_non_null(p);
    return p;
}

static void fill(uint8_t *p, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i++) {
        p[i] = (uint8_t)((i + seed) * UINT64_C(0x9e3779b97f4a7c15) >> 29);
    }
}

/* One tensor of bytes as step `step`. */
static lg_status save_bytes(const char *dir, uint64_t step, const uint8_t *data, uint64_t bytes, lg_error *err)
{
    lg_tensor t = LG_TENSOR_INIT;
    t.name = "w", t.dtype = LG_U8, t.ndim = 1, t.shape = &bytes, t.data = data;
    return lg_write(dir, step, &t, 1, err);
}

static lg_status load_bytes(const char *dir, uint64_t all, uint64_t from, uint8_t *data, uint64_t bytes, lg_error *err)
{
    lg_target t = LG_TARGET_INIT;
    t.name = "w", t.dtype = LG_U8, t.ndim = 1, t.shape = &all, t.data = data, t.offset = &from, t.extent = &bytes;
    return lg_read(dir, &t, 1, NULL, err);
}

/* --------------------------------------------------------------------- copies */

static void copy_and_digest(void **state)
{
    (void)state;
    enum { N = 70000 };
    uint8_t *from = pages(N + 8192), *to = pages(N + 3 * 4096);
    fill(from, N + 8192, 1);
    static const size_t sizes[] = {0,    1,    63,   64,    1408,  4223,  4224,   4287,
                                   4288, 4289, 8448, 16384, 65536, 65537, N - 100};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t at = 0; at < 4096; at += at < 70 ? 7 : 613) {
            for (size_t back = 0; back < 100; back += 33) {
                memset(to, 0xee, N + 3 * 4096);
                uint8_t *place = to + 4096 + at;
                assert_int_equal(lg__crc32c_copy_away(place, from + back, sizes[i]),
                                 lg__crc32c(0, from + back, sizes[i]));
                assert_memory_equal(place, from + back, sizes[i]);
                assert_int_equal(place[-1], 0xee);
                assert_int_equal(place[sizes[i]], 0xee);
            }
        }
    }
    assert_int_equal(lg__crc32c_copy_away(to, "123456789", 9), 0xe3069283);
    free(from);
    free(to);
}

/* -------------------------------------------------------------- odd transfers */

static size_t most_bytes;
static size_t at_most(size_t bytes)
{
    static atomic_uint n;
    size_t most = most_bytes < 8 ? 1 + atomic_fetch_add(&n, 1) % 7 : most_bytes;
    return bytes < most ? bytes : most;
}
static ssize_t short_write(int fd, const void *data, size_t bytes, off_t at)
{
    return pwrite(fd, data, at_most(bytes), at);
}
static ssize_t short_read(int fd, void *data, size_t bytes, off_t at) { return pread(fd, data, at_most(bytes), at); }

static void little_at_a_time(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    static const struct {
        size_t most, bytes;
    } cases[] = {{7, 150 * 1000 + 3}, {MIB, 9 * MIB + 5}};
    for (size_t k = 0; k < 2; k++) {
        uint8_t *data = malloc(cases[k].bytes), *got = malloc(cases[k].bytes);
        fill(data, cases[k].bytes, k);
        for (size_t w = 0; w < N_WAYS; w++) {
            if (!use(w)) {
                continue;
            }
            most_bytes = cases[k].most;
            lg__posix.pwrite = short_write;
            lg__posix.pread = short_read;
            lg__uring_odd.most = at_most;
            OK(save_bytes(x->dir, 1, data, cases[k].bytes, &err));
            memset(got, 0, cases[k].bytes);
            OK(load_bytes(x->dir, cases[k].bytes, 0, got, cases[k].bytes, &err));
            assert_memory_equal(got, data, cases[k].bytes);
            lg__posix = lg__posix_real;
            lg__uring_odd = (lg__uring_odds){0};
        }
        free(data);
        free(got);
    }
}

static void beyond_four_gib(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    const size_t bytes = ((size_t)4 << 30) + 1;
    struct statvfs room;
    struct statfs fs;
    assert_int_equal(statvfs(x->dir, &room), 0);
    assert_int_equal(statfs(x->dir, &fs), 0);
    if (fs.f_type == TMPFS_MAGIC || (uint64_t)room.f_bavail * room.f_frsize < UINT64_C(8) << 30) {
        print_message("# skipped, no 8 GiB of disk for it\n");
        skip();
    }
    /* Pages that nobody writes to take no memory. */
    uint8_t *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(data != MAP_FAILED);
    static const uint64_t marks[] = {0, ((uint64_t)2 << 30) - 1, (uint64_t)2 << 30, ((uint64_t)4 << 30) - 4097,
                                     (uint64_t)4 << 30};
    for (size_t i = 0; i < 5; i++) {
        data[marks[i]] = (uint8_t)(i + 1);
    }
    OK(save_bytes(x->dir, 1, data, bytes, &err));
    uint8_t *got = malloc(MIB);
    for (size_t i = 0; i < 5; i++) {
        uint64_t from = marks[i] < 1000 ? 0 : marks[i] - 1000, n = bytes - from < MIB ? bytes - from : MIB;
        OK(load_bytes(x->dir, bytes, from, got, n, &err));
        assert_memory_equal(got, data + from, n);
    }
    lg_checkpoint *c = NULL;
    lg_verify_options o = LG_VERIFY_OPTIONS_INIT;
    lg_verify_result r;
    OK(lg_checkpoint_open(x->dir, &c, &err));
    OK(lg_verify(c, &o, &r, &err));
    assert_true(r.bytes > bytes);
    lg_checkpoint_close(c);
    free(got);
    munmap(data, bytes);
}

/* -------------------------------------------------------------- without a copy */

static const uint8_t *watched;
static size_t watched_bytes;
static atomic_size_t straight;
static bool change;
static ssize_t watch_write(int fd, const void *data, size_t bytes, off_t at)
{
    const uint8_t *p = data;
    if (p >= watched && p < watched + watched_bytes) {
        if (change && atomic_load(&straight) == 0) {
            ((uint8_t *)(uintptr_t)p)[5000] ^= 1;
        }
        atomic_fetch_add(&straight, bytes);
    }
    return pwrite(fd, data, bytes, at);
}

static void straight_from_memory(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    const size_t bytes = 5 * MIB + 12345;
    uint8_t *space = pages(bytes + 3 * 4096), *got = malloc(bytes);
    uint64_t step = 0;
    for (size_t w = 0; w < N_WAYS; w++) {
        if (ways[w].engine == LG__IO_URING || ways[w].engine == LG__IO_AUTO || !use(w)) {
            continue;
        }
        static const size_t behind[] = {0, 64, 512};
        for (size_t i = 0; i < 3; i++) {
            uint8_t *data = space + behind[i];
            fill(data, bytes, i);
            watched = data, watched_bytes = bytes, change = false;
            atomic_store(&straight, 0);
            lg__posix.pwrite = watch_write;
            OK(save_bytes(x->dir, ++step, data, bytes, &err));
            lg__posix = lg__posix_real;
            /* Tensor data begins at a page of its file. */
            assert_int_equal(atomic_load(&straight), behind[i] == 0 ? bytes / 4096 * 4096 : 0);
            memset(got, 0, bytes);
            OK(load_bytes(x->dir, bytes, 0, got, bytes, &err));
            assert_memory_equal(got, data, bytes);
        }
    }
    /* What may not be is found: the memory changes after it was digested. */
    lg__io_set(LG__IO_BLOCKING, LG__DIRECT_AUTO);
    watched = space, change = true;
    atomic_store(&straight, 0);
    lg__posix.pwrite = watch_write;
    OK(save_bytes(x->dir, ++step, space, bytes, &err));
    FAILS(LG_ERR_CORRUPT, load_bytes(x->dir, bytes, 0, got, bytes, &err));
    SAYS("holds part of tensor \"w\"");
    free(space);
    free(got);
}

/* Of several tensors in one file, some of them aligned as the file is. */
static void straight_and_copied(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    enum { N = 9 };
    uint8_t *space[N], *got = malloc(4 * MIB);
    uint64_t shape[N], seed = 3;
    for (size_t w = 0; w < N_WAYS; w++) {
        lg_tensor t[N];
        for (size_t i = 0; i < N; i++) {
            shape[i] = i % 3 == 2 ? 1 + build_random(&seed) % 9000 : 4096 * (1 + build_random(&seed) % 700);
            size_t at = i % 4 == 3 ? 64 : build_random(&seed) % 2 * 1808;
            space[i] = pages((size_t)shape[i] + 3 * 4096);
            fill(space[i] + at, shape[i], i);
            t[i] = (lg_tensor)LG_TENSOR_INIT;
            static const char *const names[N] = {"a", "b", "c", "d", "e", "f", "g", "h", "i"};
            t[i].name = names[i], t[i].dtype = LG_U8, t[i].ndim = 1, t[i].shape = &shape[i], t[i].data = space[i] + at;
        }
        if (use(w)) {
            lg__io_set_depth(w % 2 == 0 ? 0 : 3);
            OK(lg_write(x->dir, w + 1, t, N, &err));
            for (size_t i = 0; i < N; i++) {
                lg_target g = LG_TARGET_INIT;
                g.name = t[i].name, g.dtype = LG_U8, g.ndim = 1, g.shape = &shape[i], g.data = got;
                OK(lg_read(x->dir, &g, 1, NULL, &err));
                assert_memory_equal(got, t[i].data, shape[i]);
            }
        }
        for (size_t i = 0; i < N; i++) {
            free(space[i]);
        }
    }
    free(got);
}

/* ----------------------------------------------------------------------- depth */

static const char *self;

static int run_self(const char *what, const char *dir, const char *depth)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (depth != NULL) {
            setenv("LASTGOOD_DEPTH", depth, 1);
        }
        execl(self, self, what, dir, (char *)NULL);
        _exit(99);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int with_depth(const char *dir)
{
    lg_error err = LG_ERROR_INIT;
    static uint8_t data[6 * MIB + 9], got[sizeof data];
    fill(data, sizeof data, 4);
    lg_status st = save_bytes(dir, 1, data, sizeof data, &err);
    if (st == LG_OK) {
        st = load_bytes(dir, sizeof data, 0, got, sizeof got, &err);
    }
    if (st != LG_OK) {
        return st == LG_ERR_INVALID && strstr(err.message, "LASTGOOD_DEPTH is no number from 1 to 64") != NULL ? 3 : 4;
    }
    return memcmp(data, got, sizeof data) == 0 ? 0 : 5;
}

static void depth(void **state)
{
    fixture *x = *state;
    static const struct {
        const char *value;
        int result;
    } cases[] = {{"", 0},   {"1", 0},  {"2", 0},  {"17", 0},  {"64", 0},  {"0", 3},
                 {"65", 3}, {"-1", 3}, {"8 ", 3}, {"0x8", 3}, {"all", 3}, {"99999999999999999999", 3}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (run_self("depth", x->dir, cases[i].value) != cases[i].result) {
            fail_msg("LASTGOOD_DEPTH=\"%s\"", cases[i].value);
        }
    }
}

/* ---------------------------------------------------------------------- memory */

/* 32 tensors of 8 MiB, one after the other into the same memory. */
static int one_by_one(const char *dir)
{
    enum { N = 32, EACH = 8 << 20 };
    lg_error err = LG_ERROR_INIT;
    static char names[N][16];
    static const uint64_t shape[] = {EACH};
    uint8_t *data = malloc(EACH);
    fill(data, EACH, 1);
    lg_tensor t[N];
    for (size_t i = 0; i < N; i++) {
        snprintf(names[i], sizeof names[i], "w%zu", i);
        t[i] = (lg_tensor)LG_TENSOR_INIT;
        t[i].name = names[i], t[i].dtype = LG_U8, t[i].ndim = 1, t[i].shape = shape, t[i].data = data;
    }
    size_t start = status_kib("VmRSS:");
    if (lg_write(dir, 1, t, N, &err) != LG_OK) {
        return 1;
    }
    size_t save = status_kib("VmHWM:") - start;
    uint8_t *got = malloc(EACH);
    memset(got, 0, EACH);
    lg_checkpoint *c = NULL;
    if (lg_checkpoint_open(dir, &c, &err) != LG_OK) {
        return 2;
    }
    (void)malloc_trim(0);
    int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "5", 1) != 1) {
        return 77;
    }
    close(fd);
    start = status_kib("VmRSS:");
    for (size_t i = 0; i < N; i++) {
        lg_load *l = NULL;
        lg_target g = LG_TARGET_INIT;
        g.name = names[i], g.dtype = LG_U8, g.ndim = 1, g.shape = shape, g.data = got;
        lg_view v;
        if (lg_load_begin(c, 0, &l, &err) != LG_OK || lg_load_tensor(l, &g, &err) != LG_OK ||
            lg_load_run(l, &err) != LG_OK || memcmp(got, data, EACH) != 0 ||
            lg_checkpoint_map(c, names[i], NULL, NULL, 0, &v, &err) != LG_OK || memcmp(v.data, data, EACH) != 0) {
            return 3;
        }
        lg_view_release(&v);
        lg_load_free(l);
    }
    size_t load = status_kib("VmHWM:") - start;
    lg_checkpoint_close(c);
    print_message("# with the default cap: save %zu KiB, load and map %zu KiB beyond the state\n", save, load);
    free(data);
    free(got);
    return save > 64 << 10 || load > 64 << 10 ? 4 : 0;
}

static void memory(void **state)
{
    fixture *x = *state;
    if (!MEASURED) {
        print_message("# skipped, this build keeps what was freed\n");
        skip();
    }
    int rc = run_self("memory", x->dir, NULL);
    if (rc == 77) {
        print_message("# skipped, the peak cannot be reset\n");
        skip();
    }
    assert_int_equal(rc, 0);
}

/* ---------------------------------------------------------------------- mapping */

static void maps_stay(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    const size_t bytes = 2 * MIB;
    uint8_t *one = malloc(bytes), *two = malloc(bytes);
    fill(one, bytes, 1);
    fill(two, bytes, 2);
    OK(save_bytes(x->dir, 1, one, bytes, &err));
    lg_checkpoint *c = NULL;
    lg_view v;
    OK(lg_checkpoint_open(x->dir, &c, &err));
    OK(lg_checkpoint_map(c, "w", NULL, NULL, 0, &v, &err));
    /* The same step again, and then the mapped one is removed. */
    OK(save_bytes(x->dir, 1, two, bytes, &err));
    assert_memory_equal(v.data, one, bytes);
    char where[600];
    lg_checkpoint_info info;
    OK(lg_checkpoint_get_info(c, &info, &err));
    snprintf(where, sizeof where, "%s/%s", x->dir, info.folder);
    struct stat node;
    assert_int_equal(stat(where, &node), 0);
    OK(lg_remove(where, &err));
    assert_memory_equal(v.data, one, bytes);
    lg_view_release(&v);
    lg_checkpoint_close(c);
    OK(load_bytes(x->dir, bytes, 0, one, bytes, &err));
    assert_memory_equal(one, two, bytes);
    free(one);
    free(two);
}

static int first_step(const lg_node *node, void *arg)
{
    if (strncmp(node->name, "step-", 5) != 0) {
        return 0;
    }
    snprintf(arg, LG__NAME_MAX, "%s", node->name);
    return 1;
}

static void cannot_map(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    const uint64_t bytes = MIB;
    uint8_t *data = malloc(bytes), *got = calloc(1, bytes);
    fill(data, bytes, 1);
    OK(save_bytes(x->dir, 1, data, bytes, &err));
    lg_store *inner = NULL;
    OK(lg_store_open(x->dir, &inner, &err));
    fault_store *f = fault_store_new(inner);
    fault_store_arm(f, (fault_plan){.kinds = FAULT_BIT(FAULT_MAP), .times = UINT64_MAX, .os_errno = ENODEV});
    char folder[LG__NAME_MAX] = "";
    OK(lg__store_list(inner, "", first_step, folder, &err));
    lg_checkpoint *c = NULL;
    OK(lg__checkpoint_open_in(fault_store_handle(f), false, folder, NULL, 0, &c, &err));
    lg_view v;
    FAILS(LG_ERR_UNSUPPORTED, lg_checkpoint_map(c, "w", NULL, NULL, 0, &v, &err));
    assert_int_equal(fault_store_fired(f), 1);
    lg_load *l = NULL;
    lg_target t = LG_TARGET_INIT;
    t.name = "w", t.dtype = LG_U8, t.ndim = 1, t.shape = &bytes, t.data = got;
    OK(lg_load_begin(c, 0, &l, &err));
    OK(lg_load_tensor(l, &t, &err));
    OK(lg_load_run(l, &err));
    assert_memory_equal(got, data, bytes);
    lg_load_free(l);
    lg_checkpoint_close(c);
    fault_store_free(f);
    lg_store_free(inner);
    free(data);
    free(got);
}

#define TEST(name, test)                  \
    {                                     \
        name, test, setup, teardown, NULL \
    }

int main(int argc, char **argv)
{
    self = argv[0];
    if (argc == 3) {
        return strcmp(argv[1], "depth") == 0 ? with_depth(argv[2]) : one_by_one(argv[2]);
    }
    static const struct CMUnitTest tests[] = {
        TEST("a copy that digests gives both right at any size and place", copy_and_digest),
        TEST("K16 F265 F266: a kernel that moves 1 to 7 bytes, or 1 MiB, at a time loses nothing", little_at_a_time),
        TEST("K16 F268 F269: a tensor of 4 GiB and a byte comes back", beyond_four_gib),
        TEST("memory that lies like the file is written without a copy, and changing it is found",
             straight_from_memory),
        TEST("tensors that are copied and that are not make one file", straight_and_copied),
        TEST("LASTGOOD_DEPTH from 1 to 64 works, anything else is an error that names it", depth),
        TEST("K07 F109 F110 F112 F113: saving, loading and mapping stay within 64 MiB", memory),
        TEST("K17 F275: where files cannot be mapped a view says so, and loading works", cannot_map),
        TEST("K17 F283 F284 F287: what is mapped stays as it is when the step is saved again or removed", maps_stay),
    };
    return cmocka_run_group_tests_name("whole saves and loads", tests, NULL, NULL);
}
