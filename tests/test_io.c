/* SPDX-License-Identifier: Apache-2.0 */

/* How bytes get to and from files: each engine, past the page cache and through
 * it, on a real folder, with kernels and disks that misbehave. */

#include "base/mem.h"
#include "base/thread.h"
#include "core/checkpoint.h"
#include "io/buffers.h"
#include "io/choice.h"
#include "io/uring.h"
#include "store/posix.h"
#include "store/queue.h"
#include "support/build.h"
#include "support/check.h"
#include "support/fault_store.h"
#include "support/peak.h"
#include "support/temp_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

typedef struct way {
    lg__io_engine engine;
    lg__io_direct direct;
} way;

static const way ways[] = {{LG__IO_URING, LG__DIRECT_ON},    {LG__IO_URING, LG__DIRECT_OFF},
                           {LG__IO_THREADS, LG__DIRECT_ON},  {LG__IO_THREADS, LG__DIRECT_OFF},
                           {LG__IO_BLOCKING, LG__DIRECT_ON}, {LG__IO_BLOCKING, LG__DIRECT_OFF},
                           {LG__IO_AUTO, LG__DIRECT_AUTO}};
#define N_WAYS (sizeof ways / sizeof *ways)

static const char *way_name(size_t i)
{
    static char name[64];
    static const char *const directs[] = {"auto", "direct", "buffered"};
    snprintf(name, sizeof name, "%s, %s", lg__io_engine_name(ways[i].engine), directs[ways[i].direct]);
    return name;
}

/* false: not on this machine. */
static bool use(size_t i)
{
    lg__io_set(ways[i].engine, ways[i].direct);
    return ways[i].engine != LG__IO_URING || lg__uring_works();
}

typedef struct fixture {
    char dir[256];
    lg_store *s;
    size_t descriptors;
} fixture;

static int setup(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = calloc(1, sizeof *x);
    temp_dir_make(x->dir);
    x->descriptors = open_descriptors();
    OK(lg_store_open(x->dir, &x->s, &err));
    *state = x;
    return 0;
}

static int teardown(void **state)
{
    fixture *x = *state;
    lg__posix = lg__posix_real;
    lg__uring_odd = (lg__uring_odds){0};
    lg__io_set(LG__IO_AUTO, LG__DIRECT_AUTO);
    lg_store_free(x->s);
    assert_int_equal(open_descriptors(), x->descriptors);
    temp_dir_remove(x->dir);
    free(x);
    return 0;
}

/* A store that has refused nothing yet. */
static void fresh_store(fixture *x)
{
    lg_error err = LG_ERROR_INIT;
    lg_store_free(x->s);
    OK(lg_store_open(x->dir, &x->s, &err));
}

static uint8_t *pattern(size_t bytes, uint64_t seed)
{
    uint8_t *p = malloc(bytes + 1);
    assert_non_null(p);
    for (size_t i = 0; i < bytes; i++) {
        p[i] = (uint8_t)((i + seed) * 2654435761u >> 11);
    }
    return p;
}

static void copies(void **state)
{
    (void)state;
    enum { N = 20000 };
    uint8_t *from = aligned_alloc(4096, 5 * 4096), *to = aligned_alloc(4096, 8 * 4096);
    uint8_t *data = pattern(N, 1);
    memcpy(from, data, N);
    static const size_t sizes[] = {0, 1, 15, 16, 63, 64, 65, 127, 2047, 2048, 2049, 4096, 10007, N - 70};
    for (int away = 0; away < 2; away++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            for (size_t shift = 0; shift < 66; shift += 1 + shift / 20) {
                for (size_t back = 0; back < 70; back += 23) {
                    memset(to, 0xee, 8 * 4096);
                    uint8_t *place = to + 4096 + shift;
                    (away ? lg__copy_away : lg__copy)(place, from + back, sizes[i]);
                    assert_memory_equal(place, data + back, sizes[i]);
                    assert_int_equal(place[-1], 0xee);
                    assert_int_equal(place[sizes[i]], 0xee);
                }
            }
        }
    }
    assert_true(lg__copy_is_slow(4096 * 7 + 16, 4096 * 3) && lg__copy_is_slow(63, 0));
    assert_false(lg__copy_is_slow(64, 0) || lg__copy_is_slow(0, 0) || lg__copy_is_slow(0, 1));
    free(data);
    free(from);
    free(to);
}

/* -------------------------------------------------------- through one queue */

#define DEPTH 4
#define PIECE (256 << 10)

static lg_status wait_one(lg__queue *q, lg_error *err)
{
    uint64_t token;
    return lg__queue_wait(q, &token, err);
}

/* Moves `bytes` from or to `data` at `offset` in pieces, with as many under way
 * as go; through the buffers or where the data lies. */
static lg_status move(lg_store *s, lg_file *f, bool write, uint8_t *data, size_t bytes, uint64_t offset, bool buffers,
                      lg_error *err)
{
    uint8_t *memory = aligned_alloc(4096, (size_t)DEPTH * PIECE);
    const lg_queue_spec spec = {.depth = DEPTH, .memory = memory, .memory_bytes = (size_t)DEPTH * PIECE};
    lg__queue *q = NULL;
    lg_status st = lg__queue_open(s, &spec, 64 * MIB, &q, err);
    size_t done = 0, begun = 0, at[DEPTH], n[DEPTH];
    for (uint64_t turn = 0; st == LG_OK && done < bytes; turn++) {
        /* one round: all slots, then all waits */
        uint32_t k = 0;
        for (; k < DEPTH && begun < bytes && st == LG_OK; k++) {
            at[k] = begun;
            n[k] = bytes - begun < PIECE ? bytes - begun : PIECE;
            uint8_t *mine = memory + (size_t)k * PIECE;
            if (write && buffers) {
                memcpy(mine, data + begun, n[k]);
            }
            const lg_queue_op op = {.kind = write ? LG_QUEUE_WRITE : LG_QUEUE_READ,
                                    .file = f,
                                    .data = buffers ? mine : data + begun,
                                    .bytes = n[k],
                                    .offset = offset + begun,
                                    .token = k};
            st = lg__queue_submit(q, &op, err);
            begun += n[k];
        }
        assert_true(st != LG_OK || lg__queue_under_way(q) == k);
        while (lg__queue_under_way(q) > 0) {
            lg_error why = LG_ERROR_INIT;
            uint64_t token = UINT64_MAX;
            lg_status one = lg__queue_wait(q, &token, &why);
            assert_true(token < k);
            if (one != LG_OK && st == LG_OK) {
                st = one;
                *err = why;
            }
            if (one == LG_OK && !write && buffers) {
                memcpy(data + at[token], memory + token * PIECE, n[token]);
            }
            done += n[token];
        }
    }
    if (st == LG_OK && write) {
        const lg_queue_op sync = {.kind = LG_QUEUE_SYNC, .file = f, .token = 77};
        st = lg__queue_submit(q, &sync, err);
        st = st == LG_OK ? wait_one(q, err) : st;
    }
    lg__queue_close(q);
    free(memory);
    return st;
}

static lg_status write_file(lg_store *s, const char *name, uint8_t *data, size_t bytes, uint64_t announced,
                            bool buffers, lg_error *err)
{
    lg_file *f = NULL;
    LG__TRY(lg__store_create(s, name, announced, &f, err));
    lg_status st = move(s, f, true, data, bytes, 0, buffers, err);
    lg_error other = LG_ERROR_INIT;
    lg_status closed = lg__store_close(s, f, &other);
    if (st == LG_OK) {
        *err = other;
    }
    return st == LG_OK ? closed : st;
}

static lg_status read_file(lg_store *s, const char *name, uint8_t *data, size_t bytes, uint64_t offset, bool buffers,
                           lg_error *err)
{
    lg_file *f = NULL;
    uint64_t length = 0;
    LG__TRY(lg__store_open_file(s, name, &f, &length, err));
    lg_status st = move(s, f, false, data, bytes, offset, buffers, err);
    lg_error ignored = LG_ERROR_INIT;
    lg__store_close(s, f, &ignored);
    return st;
}

/* By plain calls. */
static void holds(const fixture *x, const char *name, const uint8_t *want, size_t bytes)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", x->dir, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_size, bytes);
    uint8_t *got = malloc(bytes + 1);
    for (size_t n = 0; n < bytes;) {
        ssize_t r = pread(fd, got + n, bytes - n, (off_t)n);
        assert_true(r > 0);
        n += (size_t)r;
    }
    assert_memory_equal(got, want, bytes);
    free(got);
    close(fd);
}

static void remove_file(fixture *x, const char *name)
{
    lg_error err = LG_ERROR_INIT;
    OK(lg__store_remove_file(x->s, name, &err));
}

static void any_size(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    static const size_t sizes[] = {0, 1, 4095, 4096, 4097, PIECE, PIECE + 1, MIB - 1, 3 * MIB, 5 * MIB + 4099};
    for (size_t w = 0; w < N_WAYS; w++) {
        for (size_t i = 0; use(w) && i < sizeof sizes / sizeof *sizes; i++) {
            for (int buffers = 0; buffers < 2; buffers++) {
                uint8_t *data = pattern(sizes[i], i);
                check_status(write_file(x->s, "a", data, sizes[i], sizes[i], buffers, &err), LG_OK, way_name(w), &err,
                             __FILE__, __LINE__);
                holds(x, "a", data, sizes[i]);
                uint8_t *got = calloc(1, sizes[i] + 1);
                check_status(read_file(x->s, "a", got, sizes[i], 0, buffers, &err), LG_OK, way_name(w), &err, __FILE__,
                             __LINE__);
                assert_memory_equal(got, data, sizes[i]);
                if (sizes[i] > 5000) { /* from an odd place */
                    memset(got, 0, sizes[i]);
                    OK(read_file(x->s, "a", got, sizes[i] - 4321, 4321, buffers, &err));
                    assert_memory_equal(got, data + 4321, sizes[i] - 4321);
                }
                FAILS(LG_ERR_CORRUPT, read_file(x->s, "a", got, sizes[i] + 1, 0, buffers, &err));
                SAYS("read a: the file ends at or before byte");
                free(got);
                free(data);
                remove_file(x, "a");
            }
        }
    }
}

static void length(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    uint8_t *data = pattern(MIB, 3);
    for (size_t w = 0; w < N_WAYS; w++) {
        static const size_t written[] = {0, 3, 4096, 5000, MIB};
        for (size_t i = 0; use(w) && i < sizeof written / sizeof *written; i++) {
            OK(write_file(x->s, "a", data, written[i], 8 * MIB, true, &err));
            holds(x, "a", data, written[i]);
            remove_file(x, "a");
            /* not even synced */
            lg_file *f = NULL;
            OK(lg__store_create(x->s, "a", 8 * MIB, &f, &err));
            OK(lg__store_write(x->s, f, data, written[i], 0, &err));
            OK(lg__store_close(x->s, f, &err));
            holds(x, "a", data, written[i]);
            remove_file(x, "a");
        }
    }
    free(data);
}

/* ------------------------------------------------- what kernels and disks do */

static struct {
    size_t most;
    int os_errno;
    unsigned calls, from, n, pauses; /* fails the calls from the from-th on, n of them */
} odd;

static pthread_mutex_t odd_lock = PTHREAD_MUTEX_INITIALIZER;

static bool must_fail(void)
{
    pthread_mutex_lock(&odd_lock);
    odd.calls++;
    bool yes = odd.n > 0 && odd.calls >= odd.from && odd.calls - odd.from < odd.n;
    pthread_mutex_unlock(&odd_lock);
    return yes;
}

static size_t most(size_t bytes) { return odd.most != 0 && odd.most < bytes ? odd.most : bytes; }
static int answer(int result) { return must_fail() ? -odd.os_errno : result; }
static ssize_t odd_pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    if (must_fail()) {
        errno = odd.os_errno;
        return -1;
    }
    return pwrite(fd, data, most(bytes), offset);
}
static ssize_t odd_pread(int fd, void *data, size_t bytes, off_t offset)
{
    if (must_fail()) {
        errno = odd.os_errno;
        return -1;
    }
    return pread(fd, data, most(bytes), offset);
}
static int odd_fsync(int fd)
{
    if (must_fail()) {
        errno = odd.os_errno;
        return -1;
    }
    return fsync(fd);
}
static void odd_pause(unsigned ms)
{
    (void)ms;
    pthread_mutex_lock(&odd_lock);
    odd.pauses++;
    pthread_mutex_unlock(&odd_lock);
}

static void be_odd(size_t max, int os_errno, unsigned from, unsigned n)
{
    memset(&odd, 0, sizeof odd);
    odd.most = max, odd.os_errno = os_errno, odd.from = from, odd.n = n;
    lg__posix.pwrite = odd_pwrite;
    lg__posix.pread = odd_pread;
    lg__posix.fsync = odd_fsync;
    lg__posix.pause_ms = odd_pause;
    lg__uring_odd.most = most;
    lg__uring_odd.answer = answer;
}

static void short_transfers(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    static const struct {
        size_t most, bytes;
    } cases[] = {{7, 20011}, {4096, 300001}, {8192, MIB}, {100000, MIB + 17}};
    for (size_t w = 0; w < N_WAYS; w++) {
        for (size_t i = 0; use(w) && i < sizeof cases / sizeof *cases; i++) {
            fresh_store(x);
            uint8_t *data = pattern(cases[i].bytes, w), *got = calloc(1, cases[i].bytes);
            be_odd(cases[i].most, 0, 0, 0);
            check_status(write_file(x->s, "a", data, cases[i].bytes, cases[i].bytes, true, &err), LG_OK, way_name(w),
                         &err, __FILE__, __LINE__);
            assert_true(odd.calls >= cases[i].bytes / cases[i].most);
            holds(x, "a", data, cases[i].bytes);
            odd.calls = 0;
            OK(read_file(x->s, "a", got, cases[i].bytes, 0, true, &err));
            assert_true(odd.calls >= cases[i].bytes / cases[i].most);
            assert_memory_equal(got, data, cases[i].bytes);
            free(data);
            free(got);
            remove_file(x, "a");
        }
    }
}

static void errors(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    static const struct {
        int os_errno;
        unsigned n; /* in a row */
        lg_status want;
    } cases[] = {{EIO, 1, LG_OK},
                 {ESTALE, 2, LG_OK},
                 {EAGAIN, 3, LG_OK},
                 {EINTR, 50, LG_OK},
                 {EIO, 1000, LG_ERR_IO},
                 {EAGAIN, 1000, LG_ERR_IO},
                 {ENOSPC, 1000, LG_ERR_NO_SPACE},
                 {EDQUOT, 1000, LG_ERR_NO_SPACE},
                 {EROFS, 1000, LG_ERR_READ_ONLY},
                 {ENODEV, 1000, LG_ERR_IO}};
    const size_t bytes = 2 * MIB + 5;
    uint8_t *data = pattern(bytes, 1), *got = calloc(1, bytes);
    for (size_t w = 0; w < N_WAYS; w++) {
        for (size_t i = 0; use(w) && i < sizeof cases / sizeof *cases; i++) {
            be_odd(0, cases[i].os_errno, 2, cases[i].n);
            check_status(write_file(x->s, "a", data, bytes, bytes, true, &err), cases[i].want, way_name(w), &err,
                         __FILE__, __LINE__);
            if (cases[i].want == LG_OK) {
                assert_int_equal(odd.pauses, cases[i].os_errno == EINTR ? 0 : cases[i].n);
                holds(x, "a", data, bytes);
            } else {
                SAYS("write a at ");
                assert_int_equal(err.os_errno, cases[i].os_errno);
                remove_file(x, "a");
                lg__posix = lg__posix_real;
                lg__uring_odd = (lg__uring_odds){0};
                OK(write_file(x->s, "a", data, bytes, bytes, true, &err));
            }
            be_odd(0, cases[i].os_errno, 3, cases[i].n);
            check_status(read_file(x->s, "a", got, bytes, 0, i % 2 == 0, &err), cases[i].want, way_name(w), &err,
                         __FILE__, __LINE__);
            if (cases[i].want == LG_OK) {
                assert_memory_equal(got, data, bytes);
            } else {
                SAYS("read a at ");
                assert_int_equal(err.os_errno, cases[i].os_errno);
            }
            remove_file(x, "a");
        }
    }
    free(data);
    free(got);
}

static void syncs(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    static const int errors_of_sync[] = {EIO, ENOSPC, EDQUOT, EAGAIN};
    uint8_t data[100] = {1};
    for (size_t w = 0; w < N_WAYS; w++) {
        for (size_t i = 0; use(w) && i < 4; i++) {
            lg_file *f = NULL;
            OK(lg__store_create(x->s, "a", sizeof data, &f, &err));
            be_odd(0, errors_of_sync[i], 2, 1); /* the write, then the sync */
            FAILS(LG_ERR_NOT_DURABLE, move(x->s, f, true, data, sizeof data, 0, true, &err));
            SAYS("sync a");
            assert_int_equal(err.os_errno, errors_of_sync[i]);
            assert_int_equal(odd.calls, 2); /* not tried again … */
            FAILS(LG_ERR_NOT_DURABLE, move(x->s, f, true, data, sizeof data, 0, true, &err));
            assert_int_equal(odd.calls, 3); /* … by whoever asks: only the write */
            OK(lg__store_close(x->s, f, &err));
            remove_file(x, "a");
        }
    }
}

static void full_disk(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    char path[300];
    snprintf(path, sizeof path, "%s/disk", x->dir);
    assert_int_equal(mkdir(path, 0777), 0);
    if (mount("tmpfs", path, "tmpfs", 0, "size=3m") != 0) {
        print_message("# skipped, mount needs privileges: %s\n", strerror(errno));
        skip();
    }
    lg_store *s = NULL;
    lg_status opened = lg_store_open(path, &s, &err);
    assert_int_equal(umount2(path, MNT_DETACH), 0);
    OK(opened);
    uint8_t *data = pattern(8 * MIB, 1);
    for (size_t w = 0; w < N_WAYS; w++) {
        if (use(w)) {
            FAILS(LG_ERR_NO_SPACE, write_file(s, "a", data, 8 * MIB, 0, true, &err)); /* the length was not announced */
            SAYS("write a at ");
            assert_int_equal(err.os_errno, ENOSPC);
            OK(lg__store_remove_file(s, "a", &err));
            FAILS(LG_ERR_NO_SPACE, write_file(s, "a", data, 8 * MIB, 8 * MIB, true, &err));
            OK(write_file(s, "a", data, 2 * MIB, 2 * MIB, true, &err)); /* fits */
            OK(lg__store_remove_file(s, "a", &err));
        }
    }
    free(data);
    lg_store_free(s);
}

/* ------------------------------------------------------------- direct or not */

static struct {
    unsigned opened;
    int refuse;
    bool cached;
} direct;

static int count_direct(const char *path, int flags)
{
    direct.opened++;
    if (direct.refuse != 0) {
        errno = direct.refuse;
        return -1;
    }
    return open(path, flags); /* any file system will do here */
}

static int say_cached(int fd, uint64_t offset, uint64_t bytes, uint64_t *cached_bytes)
{
    (void)fd, (void)offset;
    *cached_bytes = direct.cached ? bytes : 0;
    return 0;
}

static lg_read_way way_to_read(fixture *x, size_t bytes)
{
    lg_error err = LG_ERROR_INIT;
    lg_file *f = NULL;
    uint64_t length_now;
    OK(lg__store_open_file(x->s, "a", &f, &length_now, &err));
    lg_read_way found = lg__store_read_way(x->s, f, 0, bytes);
    OK(lg__store_close(x->s, f, &err));
    return found;
}

static void chooses_direct(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    uint8_t *data = pattern(2 * MIB, 9);
    lg__io_set(LG__IO_AUTO, LG__DIRECT_AUTO);
    lg__posix.open_direct = count_direct;
    lg__posix.cached = say_cached;
    memset(&direct, 0, sizeof direct);
    OK(write_file(x->s, "small", data, 10000, 10000, true, &err));
    assert_int_equal(direct.opened, 0);
    OK(write_file(x->s, "a", data, 2 * MIB, 2 * MIB, true, &err));
    assert_int_equal(direct.opened, 1);
    assert_int_equal(way_to_read(x, MIB), LG_READ_ALIGNED);
    assert_int_equal(direct.opened, 2);
    direct.cached = true;
    assert_int_equal(way_to_read(x, MIB), LG_READ_AT_ONCE);
    lg__io_set(LG__IO_THREADS, LG__DIRECT_AUTO); /* everything through the engine */
    assert_int_equal(way_to_read(x, MIB), LG_READ_QUEUED);
    lg__io_set(LG__IO_AUTO, LG__DIRECT_OFF);
    direct.cached = false;
    assert_int_equal(way_to_read(x, MIB), LG_READ_QUEUED);
    lg__io_set(LG__IO_AUTO, LG__DIRECT_ON);
    direct.cached = true;
    assert_int_equal(way_to_read(x, MIB), LG_READ_ALIGNED);
    free(data);
}

static void refused_direct(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    const size_t bytes = 3 * MIB + 77;
    uint8_t *data = pattern(bytes, 5), *got = calloc(1, bytes);
    for (size_t w = 0; w < N_WAYS; w++) {
        if (!use(w) || ways[w].direct == LG__DIRECT_OFF) {
            continue;
        }
        /* at open */
        fresh_store(x);
        direct.opened = 0, direct.refuse = EINVAL;
        lg__posix.open_direct = count_direct;
        for (int i = 0; i < 2; i++) {
            OK(write_file(x->s, "a", data, bytes, bytes, true, &err));
            holds(x, "a", data, bytes);
            remove_file(x, "a");
        }
        assert_int_equal(direct.opened, 1); /* not tried again in this store */
        /* at the first transfer */
        fresh_store(x);
        direct.opened = 0, direct.refuse = 0;
        be_odd(0, EINVAL, 1, 1);
        OK(write_file(x->s, "a", data, bytes, bytes, true, &err));
        holds(x, "a", data, bytes);
        OK(write_file(x->s, "b", data, bytes, bytes, true, &err));
        assert_int_equal(direct.opened, 1);
        OK(read_file(x->s, "a", got, bytes, 0, true, &err));
        assert_memory_equal(got, data, bytes);
        remove_file(x, "a");
        remove_file(x, "b");
        lg__posix = lg__posix_real;
        lg__uring_odd = (lg__uring_odds){0};
    }
    free(data);
    free(got);
}

static void knows_the_cache(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    uint8_t *data = pattern(4 * MIB, 5);
    lg__io_set(LG__IO_BLOCKING, LG__DIRECT_OFF);
    OK(write_file(x->s, "a", data, 4 * MIB, 4 * MIB, true, &err));
    free(data);
    char path[300];
    snprintf(path, sizeof path, "%s/a", x->dir);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    uint64_t n = 77;
    assert_int_equal(lg__posix_real.cached(fd, MIB, MIB, &n), 0);
    assert_int_equal(n, MIB);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    assert_int_equal(lg__posix_real.cached(fd, MIB, MIB, &n), 0);
    close(fd);
    if (n == MIB) {
        print_message("# the file system keeps everything in memory\n");
        return;
    }
    assert_true(n < MIB / 4);
    lg__io_set(LG__IO_AUTO, LG__DIRECT_AUTO);
    assert_int_not_equal(way_to_read(x, MIB), LG_READ_AT_ONCE);
}

/* ------------------------------------------------------------- which engine */

static const char *engine_for(fixture *x, uint64_t expected)
{
    lg_error err = LG_ERROR_INIT;
    lg__queue *q = NULL;
    const lg_queue_spec spec = {.depth = 4};
    OK(lg__queue_open(x->s, &spec, expected, &q, &err));
    const char *name = lg__queue_engine(q);
    lg__queue_close(q);
    return name;
}

static void falls_back(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    lg__io_set(LG__IO_AUTO, LG__DIRECT_AUTO);
    assert_string_equal(engine_for(x, 1000), "blocking");
    assert_string_equal(engine_for(x, 64 * MIB), lg__uring_works() ? "uring" : "threads");
    lg__uring_odd.refuse = EPERM;
    assert_string_equal(engine_for(x, 64 * MIB), "threads");
    lg__io_set(LG__IO_URING, LG__DIRECT_AUTO);
    lg__queue *q = NULL;
    const lg_queue_spec spec = {.depth = 4};
    FAILS(LG_ERR_INVALID, lg__queue_open(x->s, &spec, 64 * MIB, &q, &err));
    SAYS("io_uring is not to be had here");
    lg__io_set(LG__IO_UNKNOWN, LG__DIRECT_AUTO);
    FAILS(LG_ERR_INVALID, lg__queue_open(x->s, &spec, 64 * MIB, &q, &err));
    SAYS("LASTGOOD_IO is none of auto, uring, threads, blocking");
    lg__io_set(LG__IO_AUTO, LG__DIRECT_UNKNOWN);
    FAILS(LG_ERR_INVALID, lg__queue_open(x->s, &spec, 64 * MIB, &q, &err));
    SAYS("LASTGOOD_DIRECT");
    lg__io_set(LG__IO_THREADS, LG__DIRECT_AUTO);
    assert_string_equal(engine_for(x, 0), "threads");
    /* memory that may not be locked */
    lg__uring_odd = (lg__uring_odds){.unregistered = true};
    lg__io_set(LG__IO_AUTO, LG__DIRECT_AUTO);
    uint8_t *data = pattern(MIB, 4);
    OK(write_file(x->s, "a", data, MIB, MIB, true, &err));
    holds(x, "a", data, MIB);
    free(data);
}

/* In a process of its own that the kernel refuses io_uring, as containers do. */
static int write_in_a_sandbox(const char *dir)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
        return 77;
    }
    lg_error err = LG_ERROR_INIT;
    fixture x = {0};
    snprintf(x.dir, sizeof x.dir, "%s", dir);
    OK(lg_store_open(dir, &x.s, &err));
    lg__io_set(LG__IO_AUTO, LG__DIRECT_AUTO);
    uint8_t *data = pattern(2 * MIB, 8);
    OK(write_file(x.s, "a", data, 2 * MIB, 2 * MIB, true, &err));
    holds(&x, "a", data, 2 * MIB);
    free(data);
    bool right = strcmp(engine_for(&x, 64 * MIB), "threads") == 0;
    lg_store_free(x.s);
    return right ? 0 : 1;
}

/* The program itself, started again: whether io_uring works is found out once a
 * process. */
static const char *self;

static int run_self(const char *what, const char *arg)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        execl(self, self, what, arg, (char *)NULL);
        _exit(99);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void sandbox(void **state)
{
    fixture *x = *state;
    int rc = run_self("sandbox", x->dir);
    if (rc == 77) {
        print_message("# skipped, no seccomp here\n");
        skip();
    }
    assert_int_equal(rc, 0);
}

static void after_fork(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    lg__io_set(LG__IO_URING, LG__DIRECT_AUTO);
    if (!lg__uring_works()) {
        print_message("# skipped, no io_uring here\n");
        skip();
    }
    lg_file *f = NULL;
    OK(lg__store_create(x->s, "a", 0, &f, &err));
    lg__queue *q = NULL;
    const lg_queue_spec spec = {.depth = 4};
    OK(lg__queue_open(x->s, &spec, 64 * MIB, &q, &err));
    uint8_t one[] = {1, 2, 3}, two[] = {9, 9, 9};
    const lg_queue_op op = {.kind = LG_QUEUE_WRITE, .file = f, .data = one, .bytes = 3, .token = 1};
    OK(lg__queue_submit(q, &op, &err));
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        const lg_queue_op other = {.kind = LG_QUEUE_WRITE, .file = f, .data = two, .bytes = 3, .token = 2};
        lg_status st = lg__queue_submit(q, &other, &err);
        lg__queue_close(q);
        _exit(st == LG_OK);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(wait_one(q, &err));
    lg__queue_close(q);
    OK(lg__store_close(x->s, f, &err));
    holds(x, "a", one, 3);
}

/* --------------------------------------------------------- whole checkpoints */

static lg_status save_state(lg_store *s, uint8_t *data, const size_t *bytes, size_t n, uint64_t buffer_bytes,
                            lg_error *err)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = s, o.buffer_bytes = buffer_bytes, o.flags = LG_SESSION_NEW_RUN;
    lg_session *session = NULL;
    LG__TRY(lg_session_open(NULL, &o, &session, err));
    lg_save *save = NULL;
    lg_status st = lg_save_begin(session, 1, NULL, &save, err);
    for (size_t i = 0; i < n && st == LG_OK; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s%zu", i % 3 == 2 ? "optim." : "w", i);
        const uint64_t shape[] = {bytes[i]};
        lg_tensor t = LG_TENSOR_INIT;
        t.name = name, t.dtype = LG_U8, t.ndim = 1, t.shape = shape, t.data = data;
        t.group = i % 3 == 2 ? LG_GROUP_OPTIM : LG_GROUP_MODEL;
        st = lg_save_tensor(save, &t, err);
        data += bytes[i];
    }
    if (st == LG_OK) {
        st = lg_save_commit(save, NULL, err);
    } else {
        lg_save_abort(save);
    }
    lg_error ignored = LG_ERROR_INIT;
    lg_session_close(session, &ignored);
    return st;
}

static int first_folder(const lg_node *node, void *arg)
{
    if (strncmp(node->name, "step-", 5) == 0) {
        snprintf(arg, LG__NAME_MAX, "%s", node->name);
        return 1;
    }
    return 0;
}

static lg_status load_state(lg_store *s, uint8_t *data, const size_t *bytes, size_t n, uint64_t buffer_bytes,
                            lg_error *err)
{
    char folder[LG__NAME_MAX] = "";
    LG__TRY(lg__store_list(s, "", first_folder, folder, err));
    lg_checkpoint *c = NULL;
    LG__TRY(lg__checkpoint_open_in(s, false, folder, NULL, 0, &c, err));
    lg_load *load = NULL;
    lg_status st = lg_load_begin(c, 0, &load, err);
    for (size_t i = 0; i < n && st == LG_OK; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s%zu", i % 3 == 2 ? "optim." : "w", i);
        const uint64_t shape[] = {bytes[i]};
        lg_target t = LG_TARGET_INIT;
        t.name = name, t.dtype = LG_U8, t.ndim = 1, t.shape = shape, t.data = data;
        st = lg_load_tensor(load, &t, err);
        data += bytes[i];
    }
    if (st == LG_OK) {
        load->buffer_bytes = buffer_bytes;
        st = lg_load_run(load, err);
    }
    lg_load_free(load);
    lg_checkpoint_close(c);
    return st;
}

static void checkpoints(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    static const size_t bytes[] = {9 * MIB + 13, 4096, 3 * MIB, 5, 20 * MIB, 7 * MIB + 1, 65536, 65535};
    size_t sum = 0, n = sizeof bytes / sizeof *bytes;
    for (size_t i = 0; i < n; i++) {
        sum += bytes[i];
    }
    uint8_t *data = pattern(sum, 2), *got = malloc(sum);
    static const uint64_t caps[] = {0, 1 << 20, 3 << 20};
    for (size_t w = 0; w < N_WAYS; w++) {
        for (size_t i = 0; use(w) && i < sizeof caps / sizeof *caps; i++) {
            char dir[256];
            temp_dir_make(dir);
            lg_store *s = NULL;
            OK(lg_store_open(dir, &s, &err));
            size_t before = open_descriptors();
            check_status(save_state(s, data, bytes, n, caps[i], &err), LG_OK, way_name(w), &err, __FILE__, __LINE__);
            memset(got, 0, sum);
            check_status(load_state(s, got, bytes, n, caps[i], &err), LG_OK, way_name(w), &err, __FILE__, __LINE__);
            assert_memory_equal(got, data, sum);
            /* cold, as far as the file system has such a thing */
            char folder[LG__NAME_MAX] = "", path[900];
            OK(lg__store_list(s, "", first_folder, folder, &err));
            snprintf(path, sizeof path, "%s/%s/shard-00001-model-00001-of-00001.safetensors", dir, folder);
            int fd = open(path, O_RDONLY | O_CLOEXEC);
            assert_true(fd >= 0);
            assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
            close(fd);
            memset(got, 0, sum);
            OK(load_state(s, got, bytes, n, caps[i], &err));
            assert_memory_equal(got, data, sum);
            assert_int_equal(open_descriptors(), before);
            lg_store_free(s);
            temp_dir_remove(dir);
        }
    }
    (void)x;
    free(data);
    free(got);
}

static void broken_writes(void **state)
{
    fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    static const size_t bytes[] = {6 * MIB, 3 * MIB, 5 * MIB + 9};
    const size_t sum = 14 * MIB + 9;
    uint8_t *data = pattern(sum, 2);
    for (size_t w = 0; w < N_WAYS; w++) {
        bool done = false;
        for (uint64_t nth = 1; use(w) && !done; nth += 3) {
            char dir[256];
            temp_dir_make(dir);
            lg_store *inner = NULL;
            OK(lg_store_open(dir, &inner, &err));
            size_t before = open_descriptors();
            fault_store *f = fault_store_new(inner);
            fault_store_arm(f, (fault_plan){.kinds = FAULT_BIT(FAULT_WRITE) | FAULT_BIT(FAULT_SYNC),
                                            .path = "shard-",
                                            .nth = nth,
                                            .os_errno = EIO});
            lg_status st = save_state(fault_store_handle(f), data, bytes, 3, 1 << 20, &err);
            done = fault_store_fired(f) == 0;
            assert_int_equal(st == LG_OK, done);
            if (!done) {
                SAYS("shard-00001-");
                SAYS("(injected)");
                assert_int_equal(err.os_errno, EIO);
            }
            size_t events;
            const fault_event *log = fault_store_log(f, &events);
            int open_files = 0;
            for (size_t i = 0; i < events; i++) {
                bool opens = log[i].op == FAULT_CREATE || log[i].op == FAULT_OPEN;
                open_files += opens && log[i].status == LG_OK;
                open_files -= log[i].op == FAULT_CLOSE;
                assert_true(log[i].ended);
            }
            assert_int_equal(open_files, 0);
            fault_store_free(f);
            assert_int_equal(open_descriptors(), before);
            lg_store_free(inner);
            temp_dir_remove(dir);
        }
    }
    (void)x;
    free(data);
}

/* ------------------------------------------------------------------- memory */

#define STATE_BYTES (200 * MIB)
#define CAP_BYTES (4 * MIB)
/* Threads' stacks, the manifest, the ring. */
#define FIXED_KIB 1024

static int measure(const char *dir, size_t w)
{
    lg_error err = LG_ERROR_INIT;
    if (!use(w)) {
        return 0;
    }
    if (!reset_peak()) {
        return 77;
    }
    static size_t bytes[50];
    for (size_t i = 0; i < 50; i++) {
        bytes[i] = STATE_BYTES / 50;
    }
    uint8_t *data = malloc(STATE_BYTES);
    memset(data, 3, STATE_BYTES);
    lg_store *s = NULL;
    /* What any first save touches (libraries, the first threads) is no buffer. */
    OK(lg_store_open("mem:first", &s, &err));
    OK(save_state(s, data, bytes, 1, CAP_BYTES, &err));
    OK(load_state(s, data, bytes, 1, CAP_BYTES, &err));
    lg_store_free(s);
    lg_memory_store_drop("first");
    (void)malloc_trim(0);
    OK(lg_store_open(dir, &s, &err));
    reset_peak();
    size_t before = status_kib("VmRSS:");
    OK(save_state(s, data, bytes, 50, CAP_BYTES, &err));
    size_t save = status_kib("VmHWM:") - before;
    memset(data, 0, STATE_BYTES);
    (void)malloc_trim(0);
    reset_peak();
    before = status_kib("VmRSS:");
    OK(load_state(s, data, bytes, 50, CAP_BYTES, &err));
    size_t load = status_kib("VmHWM:") - before;
    lg_store_free(s);
    print_message("# %s: save %zu KiB, load %zu KiB beyond the state\n", way_name(w), save, load);
    bool right = data[0] == 3 && memcmp(data, data + 1, STATE_BYTES - 1) == 0;
    free(data);
    return !right || save > CAP_BYTES / 1024 + FIXED_KIB || load > CAP_BYTES / 1024 + FIXED_KIB;
}

static void budget(void **state)
{
    fixture *x = *state;
    if (!MEASURED) {
        print_message("# skipped, this build keeps what was freed\n");
        skip();
    }
    for (size_t w = 0; w < N_WAYS; w++) {
        char dir[256], number[16];
        temp_dir_make(dir);
        snprintf(number, sizeof number, "%zu", w);
        int rc = run_self(number, dir);
        temp_dir_remove(dir);
        if (rc == 77) {
            print_message("# skipped, the peak cannot be reset\n");
            skip();
        }
        assert_int_equal(rc, 0);
    }
    (void)x;
}

#define TEST(name, test)                  \
    {                                     \
        name, test, setup, teardown, NULL \
    }

/* What cannot be synced, a pipe, says so: the request is a sync, not nothing. */
static void ring_syncs(void **state)
{
    (void)state;
    if (!lg__uring_works()) {
        skip();
    }
    int fds[2], result = 0;
    uint64_t token = 0;
    lg__uring *ring = NULL;
    assert_int_equal(pipe(fds), 0);
    assert_int_equal(lg__uring_new(4, NULL, 0, &ring), 0);
    lg__uring_op op = {.kind = LG__URING_SYNC, .fd = fds[1], .token = 7};
    assert_int_equal(lg__uring_begin(ring, &op), 0);
    assert_int_equal(lg__uring_wait(ring, &token, &result), 0);
    assert_int_equal(token, 7);
    assert_int_equal(result, -EINVAL);
    lg__uring_free(ring);
    close(fds[0]);
    close(fds[1]);
}

int main(int argc, char **argv)
{
    self = argv[0];
    if (argc == 3) {
        return strcmp(argv[1], "sandbox") == 0 ? write_in_a_sandbox(argv[2])
                                               : measure(argv[2], strtoul(argv[1], NULL, 10));
    }
    static const struct CMUnitTest tests[] = {
        TEST("copies are whole at any size and place, and touch nothing else", copies),
        TEST("every engine moves any number of bytes from and to any place", any_size),
        TEST("a file is as long as what was written, whatever was announced", length),
        TEST("K16 F265 F266: short transfers lose nothing, with every engine", short_transfers),
        TEST("K01 F013 F020: errors that pass are survived, others name file, offset and errno", errors),
        TEST("K01: a failed sync is never tried again, with every engine", syncs),
        TEST("K01 F010: a full disk is reported by every engine, and space that is freed is used", full_disk),
        TEST("large files go past the page cache, and what is in it is read from it", chooses_direct),
        TEST("K17 F275 F280: where direct I/O is refused the page cache is used, and nobody is asked again",
             refused_direct),
        TEST("K17: what is in the page cache is known", knows_the_cache),
        TEST("K17 F286: the engine can be chosen, and threads take over where io_uring is refused", falls_back),
        TEST("K01: a sync in the ring is a sync", ring_syncs),
        TEST("in a sandbox that refuses io_uring saving works", sandbox),
        TEST("a child process does not touch the ring of its parent", after_fork),
        TEST("a checkpoint comes back whole with every engine and cap, and no descriptor is left", checkpoints),
        TEST("K01: any write or sync that fails fails the save, and nothing is left running", broken_writes),
        TEST("K07 F110 F112 F281: saving and loading stay within their cap of memory", budget),
    };
    return cmocka_run_group_tests_name("io", tests, NULL, NULL);
}
