/* SPDX-License-Identifier: Apache-2.0 */
#include "store/posix.h"

#include "base/mem.h"
#include "io/choice.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Linux moves at most 2 GiB - 4 KiB a call; whole GiB keep offsets aligned. */
#define BYTES_PER_CALL ((size_t)1 << 30)
/* Files from here on go past the page cache: what the cache saves smaller ones
 * is worth more than the copy. */
#define LARGE_BYTES (UINT64_C(1) << 20)
#define DIRECT_ALIGN ((size_t)4096)

/* ------------------------------------------------------------- system calls */

static void pause_ms(unsigned ms)
{
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {
    }
}

static int open_direct(const char *path, int flags) { return open(path, flags | O_DIRECT); }

/* How much of a range is in the page cache, by mapping it: before Linux 6.5. */
static int resident(int fd, uint64_t offset, uint64_t bytes, uint64_t *cached_bytes)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), start = offset - offset % page;
    const size_t n = (size_t)(offset + bytes - start), pages = (size_t)((n + page - 1) / page);
    unsigned char seen[4096];
    void *p = pages <= sizeof seen ? mmap(NULL, n, PROT_READ, MAP_SHARED, fd, (off_t)start) : MAP_FAILED;
    if (p == MAP_FAILED) {
        return ENOTSUP;
    }
    int e = mincore(p, n, seen) == 0 ? 0 : errno;
    munmap(p, n);
    *cached_bytes = 0;
    for (size_t i = 0; i < pages && e == 0; i++) {
        *cached_bytes += (seen[i] & 1) * page;
    }
    return e;
}

static int cached(int fd, uint64_t offset, uint64_t bytes, uint64_t *cached_bytes)
{
#if defined(__x86_64__) || defined(__aarch64__)
    enum { CACHESTAT = 451 };
    struct {
        uint64_t offset, bytes;
    } range = {offset, bytes};
    struct {
        uint64_t cache, dirty, writeback, evicted, recently_evicted;
    } pages = {0};
    if (syscall(CACHESTAT, fd, &range, &pages, 0) == 0) {
        *cached_bytes = pages.cache * (uint64_t)sysconf(_SC_PAGESIZE);
        return 0;
    }
#endif
    return resident(fd, offset, bytes, cached_bytes);
}

#define REAL_CALLS                                                                                                 \
    {                                                                                                              \
        pwrite, pread, fsync, syncfs, fallocate, close, linkat, renameat, renameat2, pause_ms, open_direct, cached \
    }

lg__posix_calls lg__posix = REAL_CALLS;
const lg__posix_calls lg__posix_real = REAL_CALLS;

/* ------------------------------------------------------------------- errors */

const char *lg__posix_shown(const char *path, char buf[LG__SHOWN_BYTES])
{
    return path[0] == '\0' ? "root" : lg__printable(path, buf, LG__SHOWN_BYTES);
}

lg_status lg__posix_fail(lg_error *err, int os_errno, const char *verb, const char *path)
{
    char buf[LG__SHOWN_BYTES];
    lg_status st = lg_error_set_errno(err, os_errno, "%s %s", verb, lg__posix_shown(path, buf));
    /* A file system's time-out is no deadline of ours. */
    return err->status = st == LG_ERR_TIMEOUT ? LG_ERR_IO : st;
}

lg_status lg__posix_fail_data(lg_error *err, int os_errno, const char *verb, const char *path, uint64_t offset)
{
    char buf[LG__SHOWN_BYTES];
    lg_status st = lg_error_set_errno(err, os_errno, "%s %s at %llu", verb, lg__posix_shown(path, buf),
                                      (unsigned long long)offset);
    switch (st) {
    case LG_ERR_NOMEM:
    case LG_ERR_NO_SPACE:
    case LG_ERR_PERMISSION:
    case LG_ERR_READ_ONLY:
        return st;
    default:
        return err->status = LG_ERR_IO;
    }
}

lg_status lg__posix_fail_sync(lg_error *err, int os_errno, const char *path)
{
    lg__posix_fail(err, os_errno, "sync", path);
    return err->status = LG_ERR_NOT_DURABLE;
}

/* ------------------------------------------------------------- life of a file */

lg_file *lg__posix_file_new(int fd, bool writable, uint64_t bytes, const char *path, atomic_bool *no_direct)
{
    size_t n = strlen(path) + 1;
    lg_file *f = lg__calloc(1, sizeof *f + n);
    if (f != NULL) {
        f->fd = fd;
        f->writable = writable;
        f->bytes = bytes;
        f->no_direct = no_direct;
        atomic_store(&f->direct_fd, no_direct == NULL ? LG__DIRECT_NONE : LG__DIRECT_UNTRIED);
        memcpy(f->path, path, n);
    }
    return f;
}

/* Blocks of the page cache and of the device must not be shared between what
 * goes past the cache and the tail that goes through it. */
static size_t direct_align(void)
{
    static atomic_size_t known;
    size_t align = atomic_load(&known);
    if (align == 0) {
        long page = sysconf(_SC_PAGESIZE);
        align = page > (long)DIRECT_ALIGN ? (size_t)page : DIRECT_ALIGN;
        atomic_store(&known, align);
    }
    return align;
}

/* A second descriptor of the same open file, of whatever name it has now. */
static int direct_of(lg_file *f)
{
    int fd = atomic_load(&f->direct_fd);
    if (fd != LG__DIRECT_UNTRIED) {
        return fd;
    }
    fd = LG__DIRECT_NONE;
    if (!atomic_load(f->no_direct)) {
        char path[40];
        snprintf(path, sizeof path, "/proc/self/fd/%d", f->fd);
        fd = lg__posix.open_direct(path, (f->writable ? O_WRONLY : O_RDONLY) | O_CLOEXEC);
        if (fd < 0) {
            fd = LG__DIRECT_NONE;
            if (errno == EINVAL) {
                atomic_store(f->no_direct, true);
            }
        }
    }
    int before = LG__DIRECT_UNTRIED;
    if (!atomic_compare_exchange_strong(&f->direct_fd, &before, fd)) {
        if (fd >= 0) {
            close(fd); /* another thread was faster */
        }
        return before;
    }
    return fd;
}

static bool may_go_direct(lg_file *f)
{
    lg__io_direct wanted = lg__io_wanted_direct();
    bool large = wanted == LG__DIRECT_ON || (wanted == LG__DIRECT_AUTO && f->bytes >= LARGE_BYTES);
    return large && f->no_direct != NULL && !atomic_load(f->no_direct) && direct_of(f) >= 0;
}

int lg__posix_file_reserve(lg_file *f)
{
    if (f->bytes == 0 || f->bytes > INT64_MAX) {
        return 0;
    }
    int rc;
    do {
        /* Without changing the length. A full disk shows now, and not after
         * most of the data. */
        rc = lg__posix.fallocate(f->fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)f->bytes);
    } while (rc != 0 && errno == EINTR);
    if (rc != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG || errno == EIO)) {
        return errno;
    }
    f->reserved = f->bytes;
    /* File systems let direct writes run side by side only within the length.
     * It is set right by the sync, should less be written. */
    f->preset = may_go_direct(f) && ftruncate(f->fd, (off_t)f->bytes) == 0;
    return 0;
}

static lg_status trim(lg_file *f, lg_error *err)
{
    uint64_t end = atomic_load(&f->end);
    if (!f->writable || f->reserved <= end) {
        return LG_OK;
    }
    if (ftruncate(f->fd, (off_t)end) == 0) {
        f->reserved = end; /* what was reserved too much is given back */
        f->preset = false;
    } else if (f->preset) {
        return lg__posix_fail_data(err, errno, "cut", f->path, end);
    }
    return LG_OK;
}

lg_status lg__posix_close(lg_file *f, lg_error *err)
{
    lg_status st = LG_OK;
    lg_error ignored = LG_ERROR_INIT;
    if (f->preset) {
        (void)trim(f, &ignored);
    }
    int direct = atomic_load(&f->direct_fd);
    if (direct >= 0) {
        close(direct); /* what it wrote, it has reported */
    }
    /* Linux frees the descriptor in any case. What EINTR leaves open, a sync
     * before has settled. */
    if (lg__posix.close(f->fd) != 0 && (errno != EINTR || (f->writable && atomic_load(&f->unsynced)))) {
        st = lg__posix_fail_data(err, errno, "close", f->path, atomic_load(&f->end));
    }
    lg__free(f);
    return st;
}

/* ---------------------------------------------------------------- transfers */

static lg_status check_range(const lg_file *f, bool write, uint64_t bytes, uint64_t offset, lg_error *err)
{
    char buf[LG__SHOWN_BYTES];
    const char *verb = write ? "write" : "read";
    LG__RETURN_IF(f->writable != write, err, LG_ERR_INVALID, "%s %s: the file is open for %s only", verb,
                  lg__posix_shown(f->path, buf), write ? "reading" : "writing");
    LG__RETURN_IF(offset > INT64_MAX || bytes > INT64_MAX - offset, err, LG_ERR_INVALID,
                  "%s %s: offset %llu is out of range", verb, lg__posix_shown(f->path, buf),
                  (unsigned long long)offset);
    return LG_OK;
}

static bool in_cache(const lg_file *f, uint64_t offset, uint64_t bytes)
{
    uint64_t n = 0;
    if (lg__io_wanted_direct() == LG__DIRECT_ON) {
        return false;
    }
    /* A few holes are read along by the cache; not known: the cache is right. */
    return lg__posix.cached(f->fd, offset, bytes, &n) != 0 || n >= bytes - bytes / 8;
}

lg_read_way lg__posix_read_way(lg_file *f, uint64_t offset, size_t bytes)
{
    if (bytes == 0 || in_cache(f, offset, bytes)) {
        return lg__io_wanted_engine() == LG__IO_AUTO ? LG_READ_AT_ONCE : LG_READ_QUEUED;
    }
    return may_go_direct(f) ? LG_READ_ALIGNED : LG_READ_QUEUED;
}

lg_status lg__transfer_begin(lg__transfer *t, lg_file *f, bool write, void *data, size_t bytes, uint64_t offset,
                             lg_error *err)
{
    LG__TRY(check_range(f, write, bytes, offset, err));
    const size_t align = direct_align();
    *t = (lg__transfer){.file = f, .write = write, .data = data, .bytes = bytes, .offset = offset};
    if (bytes >= align && offset % align == 0 && (uintptr_t)data % align == 0) {
        t->direct = write ? f->preset && may_go_direct(f) : may_go_direct(f) && !in_cache(f, offset, bytes);
    }
    if (write) {
        atomic_store(&f->unsynced, true);
    }
    return LG_OK;
}

bool lg__transfer_next(const lg__transfer *t, lg__call *call)
{
    size_t left = t->bytes - t->done;
    if (left == 0) {
        return false;
    }
    left = left < BYTES_PER_CALL ? left : BYTES_PER_CALL;
    *call = (lg__call){.fd = t->file->fd, .data = t->data + t->done, .bytes = left, .offset = t->offset + t->done};
    const size_t align = direct_align();
    if (t->direct && left >= align && t->done % align == 0) {
        call->fd = atomic_load(&t->file->direct_fd);
        call->bytes = left / align * align;
    }
    return true;
}

/* Shared file systems return these for a moment while a server restarts. A few
 * more tries of the same bytes at the same place do no harm. Syncs are never
 * tried again: see docs/stores.md. */
static bool try_again(int os_errno, unsigned *tries)
{
    static const unsigned wait_ms[] = {20, 80, 320};
    if ((os_errno != EIO && os_errno != EAGAIN && os_errno != ESTALE) || *tries >= sizeof wait_ms / sizeof wait_ms[0]) {
        return false;
    }
    lg__posix.pause_ms(wait_ms[(*tries)++]);
    return true;
}

static void wrote(lg_file *f, uint64_t end)
{
    uint64_t before = atomic_load(&f->end);
    while (end > before && !atomic_compare_exchange_weak(&f->end, &before, end)) {
    }
}

lg_status lg__transfer_result(lg__transfer *t, ssize_t result, lg_error *err)
{
    lg_file *f = t->file;
    if (result > 0) {
        t->done += (size_t)result;
        if (t->write) {
            wrote(f, t->offset + t->done);
        }
        return LG_OK;
    }
    if (result == 0 && !t->write) {
        char buf[LG__SHOWN_BYTES];
        return lg_error_set(err, LG_ERR_CORRUPT,
                            "read %s: the file ends at or before byte %llu, wanted %zu bytes at %llu",
                            lg__posix_shown(f->path, buf), (unsigned long long)(t->offset + t->done), t->bytes,
                            (unsigned long long)t->offset);
    }
    int e = result == 0 ? EIO : (int)-result;
    if (e == EINTR) {
        return LG_OK;
    }
    if (t->direct && (e == EINVAL || e == ENOTBLK || e == EOPNOTSUPP)) {
        /* The descriptor could be had, but this file system or device does not
         * take our blocks: the rest, and all later files, through the cache. */
        atomic_store(f->no_direct, true);
        t->direct = false;
        return LG_OK;
    }
    return try_again(e, &t->tries)
               ? LG_OK
               : lg__posix_fail_data(err, e, t->write ? "write" : "read", f->path, t->offset + t->done);
}

lg_status lg__posix_write(lg_file *f, const void *data, size_t bytes, uint64_t offset, lg_error *err)
{
    lg__transfer t;
    lg__call c;
    LG__TRY(lg__transfer_begin(&t, f, true, (void *)(uintptr_t)data, bytes, offset, err));
    while (lg__transfer_next(&t, &c)) {
        ssize_t n = lg__posix.pwrite(c.fd, c.data, c.bytes, (off_t)c.offset);
        LG__TRY(lg__transfer_result(&t, n < 0 ? -errno : n, err));
    }
    return LG_OK;
}

lg_status lg__posix_read(lg_file *f, void *data, size_t bytes, uint64_t offset, lg_error *err)
{
    lg__transfer t;
    lg__call c;
    LG__TRY(lg__transfer_begin(&t, f, false, data, bytes, offset, err));
    while (lg__transfer_next(&t, &c)) {
        ssize_t n = lg__posix.pread(c.fd, c.data, c.bytes, (off_t)c.offset);
        LG__TRY(lg__transfer_result(&t, n < 0 ? -errno : n, err));
    }
    return LG_OK;
}

/* --------------------------------------------------------------------- sync */

lg_status lg__sync_begin(lg_file *f, lg_error *err)
{
    /* The kernel reports a failed write-back once and then forgets it. */
    if (atomic_load(&f->sync_failed)) {
        char buf[LG__SHOWN_BYTES];
        return lg_error_set(err, LG_ERR_NOT_DURABLE, "sync %s: it failed before", lg__posix_shown(f->path, buf));
    }
    LG__TRY(trim(f, err));
    atomic_store(&f->unsynced, false);
    return LG_OK;
}

lg_status lg__sync_end(lg_file *f, int os_errno, lg_error *err)
{
    if (os_errno == 0) {
        return LG_OK;
    }
    atomic_store(&f->sync_failed, true);
    return lg__posix_fail_sync(err, os_errno, f->path);
}

lg_status lg__posix_sync(lg_file *f, lg_error *err)
{
    LG__TRY(lg__sync_begin(f, err));
    int rc;
    do {
        rc = lg__posix.fsync(f->fd);
    } while (rc != 0 && errno == EINTR);
    return lg__sync_end(f, rc == 0 ? 0 : errno, err);
}

/* ---------------------------------------------------------------------- map */

lg_status lg__posix_map(lg_file *f, uint64_t offset, size_t bytes, const void **data, void **base, size_t *mapped,
                        lg_error *err)
{
    char buf[LG__SHOWN_BYTES];
    LG__TRY(check_range(f, false, bytes, offset, err));
    struct stat st;
    if (fstat(f->fd, &st) != 0) {
        return lg__posix_fail_data(err, errno, "map", f->path, offset);
    }
    /* Touching a page behind the end is a SIGBUS. */
    LG__RETURN_IF(offset + bytes > (uint64_t)st.st_size, err, LG_ERR_CORRUPT,
                  "map %s: the file ends at byte %lld, wanted %zu bytes at %llu", lg__posix_shown(f->path, buf),
                  (long long)st.st_size, bytes, (unsigned long long)offset);
    if (bytes == 0) {
        *data = "";
        *base = NULL;
        *mapped = 0;
        return LG_OK;
    }
    uint64_t start = offset - offset % (uint64_t)sysconf(_SC_PAGESIZE);
    size_t lead = (size_t)(offset - start);
    LG__RETURN_IF(bytes > SIZE_MAX - lead, err, LG_ERR_NOMEM, "map %s: %zu bytes", lg__posix_shown(f->path, buf),
                  bytes);
    void *p = mmap(NULL, bytes + lead, PROT_READ, MAP_SHARED, f->fd, (off_t)start);
    if (p == MAP_FAILED) {
        return lg__posix_fail_data(err, errno, "map", f->path, offset);
    }
    *data = (const char *)p + lead;
    *base = p;
    *mapped = bytes + lead;
    return LG_OK;
}

void lg__posix_unmap(void *ctx, void *base, size_t mapped)
{
    (void)ctx;
    if (base != NULL) {
        munmap(base, mapped);
    }
}
