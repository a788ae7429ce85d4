/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_raw.h"

#include "text.h"

#include <lastgood/backend.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ------------------------------------------------------------------- device */

typedef struct raw {
    int fd;
    bool write;
    const char *data; /* what is written */
    uint64_t offset, bytes;
    atomic_uint_fast64_t next; /* where the next block begins, from `offset` */
    atomic_int failed;         /* errno */
} raw;

typedef struct lane {
    raw *r;
    char *block; /* what is read goes here */
} lane;

static void move_block(raw *r, char *block, uint64_t at)
{
    size_t want = r->bytes - at < BENCH_BLOCK ? (size_t)(r->bytes - at) : BENCH_BLOCK;
    for (size_t done = 0; done < want;) {
        off_t where = (off_t)(r->offset + at + done);
        ssize_t n = r->write ? pwrite(r->fd, r->data + at + done, want - done, where)
                             : pread(r->fd, block + done, want - done, where);
        if (n <= 0 && !(n < 0 && errno == EINTR)) {
            atomic_store(&r->failed, n < 0 ? errno : EIO);
            return;
        }
        done += n > 0 ? (size_t)n : 0;
    }
}

static void *move_blocks(void *arg)
{
    lane *l = arg;
    for (uint64_t at; (at = atomic_fetch_add(&l->r->next, BENCH_BLOCK)) < l->r->bytes;) {
        if (atomic_load(&l->r->failed) == 0) {
            move_block(l->r, l->block, at);
        }
    }
    return NULL;
}

/* Runs fn for n arguments of `size` bytes each, the last one in this thread.
 * Returns 0 or an errno; whatever was started has ended. */
static int on_threads(void *(*fn)(void *), void *args, size_t size, unsigned n)
{
    pthread_t *threads = need_calloc(n, sizeof *threads);
    unsigned started = 0;
    int error = 0;
    while (started + 1 < n && error == 0) {
        error = pthread_create(&threads[started], NULL, fn, (char *)args + started * size);
        started += error == 0;
    }
    if (error == 0) {
        fn((char *)args + started * size);
    }
    for (unsigned i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
    free(threads);
    return error;
}

static int move_all(raw *r, char *blocks)
{
    lane lanes[BENCH_DEPTH];
    unsigned n = r->bytes > BENCH_BLOCK ? BENCH_DEPTH : 1;
    for (unsigned i = 0; i < n; i++) {
        lanes[i] = (lane){r, blocks != NULL ? blocks + i * BENCH_BLOCK : NULL};
    }
    int error = on_threads(move_blocks, lanes, sizeof *lanes, n);
    return error != 0 ? error : atomic_load(&r->failed);
}

lg_status bench_raw_write(const char *path, const void *data, uint64_t bytes, bool direct, bench_sample *out,
                          lg_error *err)
{
    if (unlink(path) != 0 && errno != ENOENT) {
        return lg_error_set_errno(err, errno, "%s", path);
    }
    bench_sample start = bench_now();
    raw r = {.write = true, .data = data, .bytes = bytes};
    r.fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | (direct ? O_DIRECT : 0), 0600);
    if (r.fd < 0) {
        return lg_error_set_errno(err, errno, "%s", path);
    }
    /* Not posix_fallocate: where it is not supported that writes zeros. */
    int error = fallocate(r.fd, 0, 0, (off_t)bytes) != 0 && errno != EOPNOTSUPP && errno != ENOSYS ? errno : 0;
    error = error != 0 ? error : move_all(&r, NULL);
    if (error == 0 && fsync(r.fd) != 0) {
        error = errno;
    }
    *out = bench_since(start);
    close(r.fd);
    return error == 0 ? LG_OK : lg_error_set_errno(err, error, "%s: write", path);
}

lg_status bench_raw_read(const char *path, uint64_t offset, uint64_t bytes, bool direct, bench_sample *out,
                         lg_error *err)
{
    char *blocks = need(aligned_alloc(4096, BENCH_DEPTH * BENCH_BLOCK));
    memset(blocks, 1, BENCH_DEPTH * BENCH_BLOCK); /* fresh pages are no part of the device */
    bench_sample start = bench_now();
    raw r = {.offset = offset, .bytes = bytes};
    r.fd = open(path, O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
    int error = r.fd < 0 ? errno : move_all(&r, blocks);
    *out = bench_since(start);
    if (r.fd >= 0) {
        close(r.fd);
    }
    free(blocks);
    return error == 0 ? LG_OK : lg_error_set_errno(err, error, "%s: read", path);
}

void bench_raw_drop(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd >= 0) {
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
}

bool bench_raw_direct(const char *folder)
{
    char *path = need_format("%s/probe", folder);
    char *block = need(aligned_alloc(4096, 4096));
    memset(block, 1, 4096);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0600);
    bool works = fd >= 0 && pwrite(fd, block, 4096, 0) == 4096;
    if (fd >= 0) {
        close(fd);
    }
    unlink(path); /* some file systems make the file and then refuse the flag */
    free(block);
    free(path);
    return works;
}

/* ------------------------------------------------------------------- memory */

typedef struct copy_piece {
    char *to;
    const char *from;
    size_t bytes;
} copy_piece;

static void *copy_one(void *arg)
{
    copy_piece *p = arg;
    memcpy(p->to, p->from, p->bytes);
    return NULL;
}

lg_status bench_copy(void *to, const void *from, size_t bytes, unsigned threads, bench_sample *out, lg_error *err)
{
    copy_piece *pieces = need_calloc(threads, sizeof *pieces);
    size_t each = bytes / threads / 4096 * 4096;
    for (unsigned i = 0; i < threads; i++) {
        size_t at = i * each;
        pieces[i] = (copy_piece){(char *)to + at, (const char *)from + at, i + 1 < threads ? each : bytes - at};
    }
    bench_sample start = bench_now();
    int error = on_threads(copy_one, pieces, sizeof *pieces, threads);
    *out = bench_since(start);
    free(pieces);
    return error == 0 ? LG_OK : lg_error_set_errno(err, error, "thread");
}

/* --------------------------------------------------------------- page cache */

typedef struct cache_walk {
    bool fill;
    uint64_t largest;
    double left; /* of the largest */
    int error;
} cache_walk;

/* The part of the file's pages that is in the page cache. */
static double cached_part(int fd, uint64_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), n = ((size_t)bytes + page - 1) / page, in = 0;
    void *map = n > 0 ? mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    unsigned char *pages = malloc(n > 0 ? n : 1);
    if (map != MAP_FAILED && pages != NULL && mincore(map, (size_t)bytes, pages) == 0) {
        for (size_t i = 0; i < n; i++) {
            in += pages[i] & 1;
        }
    }
    if (map != MAP_FAILED) {
        munmap(map, (size_t)bytes);
    }
    free(pages);
    return n > 0 ? (double)in / (double)n : 0;
}

static void read_through(cache_walk *w, int fd)
{
    char *block = need(malloc(BENCH_BLOCK));
    ssize_t n;
    while ((n = read(fd, block, BENCH_BLOCK)) > 0 || (n < 0 && errno == EINTR)) {
    }
    w->error = n < 0 ? errno : w->error;
    free(block);
}

static void visit_file(cache_walk *w, int fd, uint64_t bytes)
{
    if (w->fill) {
        read_through(w, fd);
        return;
    }
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (bytes > w->largest) {
        w->largest = bytes;
        w->left = cached_part(fd, bytes);
    }
}

/* Two levels: the root, and its step folders. */
static void visit(cache_walk *w, int dir, int depth)
{
    DIR *d = fdopendir(dir);
    if (d == NULL) {
        w->error = errno;
        close(dir);
        return;
    }
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            continue;
        }
        int fd = openat(dir, e->d_name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        struct stat st;
        if (fd < 0 || fstat(fd, &st) != 0) {
            w->error = errno;
        } else if (S_ISDIR(st.st_mode) && depth > 0) {
            visit(w, fd, depth - 1);
            continue; /* it has closed fd */
        } else if (S_ISREG(st.st_mode)) {
            visit_file(w, fd, (uint64_t)st.st_size);
        }
        if (fd >= 0) {
            close(fd);
        }
    }
    closedir(d);
}

static void visit_folder(cache_walk *w, const char *folder)
{
    int dir = open(folder, O_RDONLY | O_CLOEXEC | O_DIRECTORY);
    if (dir < 0) {
        w->error = errno;
        return;
    }
    visit(w, dir, 1);
}

double bench_cache_drop(const char *folder)
{
    cache_walk w = {0};
    visit_folder(&w, folder);
    return w.left;
}

lg_status bench_cache_fill(const char *folder, lg_error *err)
{
    cache_walk w = {.fill = true};
    visit_folder(&w, folder);
    return w.error == 0 ? LG_OK : lg_error_set_errno(err, w.error, "%s: read", folder);
}
