/* SPDX-License-Identifier: Apache-2.0 */
#include "support/block_disk.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fuse.h>
#include <linux/loop.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define DISK_NODE 2
#define MARKS_NODE 3
#define WRITE_MAX (128u * 1024)
#define REQUEST_MAX (WRITE_MAX + 4096)

/* As it lies in the log; a write's bytes follow. */
typedef struct record {
    uint32_t kind, unused;
    uint64_t offset, bytes;
    block_mark mark;
} record;

typedef struct server {
    int fuse_fd, disk_fd, log_fd;
    uint64_t disk_bytes;
} server;

static bool put(int fd, const void *data, size_t bytes)
{
    for (const char *p = data; bytes > 0;) {
        ssize_t n = write(fd, p, bytes);
        if (n <= 0) {
            return false;
        }
        p += n;
        bytes -= (size_t)n;
    }
    return true;
}

static int add(server *s, const record *r, const void *data)
{
    return put(s->log_fd, r, sizeof *r) && (data == NULL || put(s->log_fd, data, r->bytes)) ? 0 : -EIO;
}

static void answer(server *s, uint64_t unique, int error, const void *data, size_t bytes)
{
    static char out[sizeof(struct fuse_out_header) + WRITE_MAX];
    struct fuse_out_header h = {.len = (uint32_t)(sizeof h + bytes), .error = error, .unique = unique};
    memcpy(out, &h, sizeof h);
    if (bytes > 0) {
        memcpy(out + sizeof h, data, bytes);
    }
    if (write(s->fuse_fd, out, sizeof h + bytes) < 0 && errno != ENOENT) { /* ENOENT: it was interrupted */
        _exit(3);
    }
}

static struct fuse_attr attr_of(const server *s, uint64_t node)
{
    struct fuse_attr a = {.ino = node, .nlink = 1, .mode = S_IFREG | 0600, .blksize = 4096};
    if (node == FUSE_ROOT_ID) {
        a.mode = S_IFDIR | 0700;
    }
    a.size = node == DISK_NODE ? s->disk_bytes : 0;
    a.blocks = a.size / 512;
    return a;
}

static void look_up(server *s, uint64_t unique, const char *name)
{
    struct fuse_entry_out e = {.entry_valid = 3600, .attr_valid = 3600};
    e.nodeid = strcmp(name, "disk") == 0 ? DISK_NODE : strcmp(name, "marks") == 0 ? MARKS_NODE : 0;
    e.attr = attr_of(s, e.nodeid);
    answer(s, unique, e.nodeid == 0 ? -ENOENT : 0, &e, e.nodeid == 0 ? 0 : sizeof e);
}

static void read_disk(server *s, uint64_t unique, const struct fuse_read_in *in)
{
    static char data[WRITE_MAX];
    ssize_t n = in->size > sizeof data ? -1 : pread(s->disk_fd, data, in->size, (off_t)in->offset);
    answer(s, unique, n < 0 ? -EIO : 0, data, n < 0 ? 0 : (size_t)n);
}

static void write_file(server *s, uint64_t unique, uint64_t node, const struct fuse_write_in *in)
{
    const char *data = (const char *)(in + 1);
    int error = 0;
    if (node == MARKS_NODE) {
        record r = {.kind = BLOCK_MARK};
        if (in->size == sizeof r.mark) {
            memcpy(&r.mark, data, sizeof r.mark);
            error = add(s, &r, NULL);
        } else {
            error = -EINVAL;
        }
    } else {
        record r = {.kind = BLOCK_WRITE, .offset = in->offset, .bytes = in->size};
        bool done = in->offset + in->size <= s->disk_bytes &&
                    pwrite(s->disk_fd, data, in->size, (off_t)in->offset) == (ssize_t)in->size;
        error = done ? add(s, &r, data) : -EIO;
    }
    struct fuse_write_out out = {.size = in->size};
    answer(s, unique, error, &out, error != 0 ? 0 : sizeof out);
}

static void make_zero(server *s, uint64_t unique, const struct fuse_fallocate_in *in)
{
    if ((in->mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE)) == 0) {
        answer(s, unique, -EOPNOTSUPP, NULL, 0);
        return;
    }
    record r = {.kind = BLOCK_ZERO, .offset = in->offset, .bytes = in->length};
    int error =
        fallocate(s->disk_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)in->offset, (off_t)in->length) == 0
            ? add(s, &r, NULL)
            : -EIO;
    answer(s, unique, error, NULL, 0);
}

static void init(server *s, uint64_t unique, const struct fuse_init_in *in)
{
    struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION,
                                .minor = FUSE_KERNEL_MINOR_VERSION,
                                .max_readahead = in->max_readahead,
                                .flags = FUSE_BIG_WRITES | FUSE_ASYNC_READ,
                                .max_background = 16,
                                .congestion_threshold = 12,
                                .max_write = WRITE_MAX,
                                .time_gran = 1};
    if (in->minor < out.minor) {
        out.minor = in->minor;
    }
    answer(s, unique, 0, &out, sizeof out);
}

static void serve_one(server *s, const struct fuse_in_header *h)
{
    const void *in = h + 1;
    struct fuse_attr_out attr = {.attr_valid = 3600, .attr = attr_of(s, h->nodeid)};
    struct fuse_open_out opened = {.fh = h->nodeid, .open_flags = FOPEN_KEEP_CACHE};
    struct fuse_statfs_out fs = {.st = {.bsize = 4096, .frsize = 4096, .namelen = 255}};
    record flush = {.kind = BLOCK_FLUSH};
    switch (h->opcode) {
    case FUSE_INIT:
        init(s, h->unique, in);
        break;
    case FUSE_LOOKUP:
        look_up(s, h->unique, in);
        break;
    case FUSE_GETATTR:
    case FUSE_SETATTR:
        answer(s, h->unique, 0, &attr, sizeof attr);
        break;
    case FUSE_OPEN:
        if (h->nodeid == MARKS_NODE) {
            opened.open_flags = FOPEN_DIRECT_IO;
        }
        answer(s, h->unique, 0, &opened, sizeof opened);
        break;
    case FUSE_READ:
        read_disk(s, h->unique, in);
        break;
    case FUSE_WRITE:
        write_file(s, h->unique, h->nodeid, in);
        break;
    case FUSE_FSYNC:
        answer(s, h->unique, h->nodeid == DISK_NODE ? add(s, &flush, NULL) : 0, NULL, 0);
        break;
    case FUSE_FALLOCATE:
        make_zero(s, h->unique, in);
        break;
    case FUSE_STATFS:
        answer(s, h->unique, 0, &fs, sizeof fs);
        break;
    case FUSE_FLUSH:
    case FUSE_RELEASE:
    case FUSE_DESTROY:
        answer(s, h->unique, 0, NULL, 0);
        break;
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT:
        break; /* has no answer */
    default:
        answer(s, h->unique, -ENOSYS, NULL, 0);
    }
}

static void serve(server *s)
{
    static union {
        struct fuse_in_header h;
        char bytes[REQUEST_MAX];
    } request;
    for (;;) {
        ssize_t n = read(s->fuse_fd, &request, sizeof request);
        if (n < 0 && (errno == EINTR || errno == ENOENT || errno == EAGAIN)) {
            continue;
        }
        if (n < (ssize_t)sizeof request.h) {
            _exit(n < 0 && errno == ENODEV ? 0 : 2); /* ENODEV: unmounted */
        }
        serve_one(s, &request.h);
    }
}

bool block_disk_start(block_disk *d, const char *folder, int disk_fd, char why[256])
{
    struct stat st;
    char options[100];
    int fuse_fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    snprintf(options, sizeof options, "fd=%d,rootmode=40700,user_id=0,group_id=0", fuse_fd);
    snprintf(d->folder, sizeof d->folder, "%s", folder);
    d->disk_fd = disk_fd;
    d->log_fd = memfd_create("lastgood-block-log", MFD_CLOEXEC);
    if (fuse_fd < 0 || d->log_fd < 0 || fstat(disk_fd, &st) != 0 ||
        mount("lastgood-disk", folder, "fuse", MS_NOSUID | MS_NODEV, options) != 0) {
        snprintf(why, 256, "no FUSE: %s", strerror(errno));
        goto fail;
    }
    const pid_t parent = getpid();
    d->server = fork();
    if (d->server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) {
            _exit(1);
        }
        server s = {.fuse_fd = fuse_fd, .disk_fd = disk_fd, .log_fd = d->log_fd, .disk_bytes = (uint64_t)st.st_size};
        serve(&s);
    }
    if (d->server < 0) {
        snprintf(why, 256, "fork: %s", strerror(errno));
        umount2(folder, MNT_DETACH);
        goto fail;
    }
    close(fuse_fd);
    return true;
fail:
    if (fuse_fd >= 0) {
        close(fuse_fd);
    }
    if (d->log_fd >= 0) {
        close(d->log_fd);
    }
    return false;
}

static bool parse(block_log *log)
{
    size_t cap = 0;
    for (size_t at = 0; at + sizeof(record) <= log->map_bytes;) {
        record r;
        memcpy(&r, (char *)log->map + at, sizeof r);
        at += sizeof r;
        if (log->n == cap) {
            cap = cap == 0 ? 1024 : 2 * cap;
            block_entry *more = realloc(log->entries, cap * sizeof *more);
            if (more == NULL) {
                return false;
            }
            log->entries = more;
        }
        block_entry *e = &log->entries[log->n++];
        *e = (block_entry){.kind = (block_kind)r.kind, .offset = r.offset, .bytes = r.bytes, .mark = r.mark};
        if (e->kind == BLOCK_WRITE) {
            e->data = (uint8_t *)log->map + at;
            at += r.bytes;
        }
    }
    return true;
}

bool block_disk_stop(block_disk *d, block_log *log, char why[256])
{
    *log = (block_log){0};
    bool good = true;
    int status;
    /* The loop device lets go of its file a little after its last user. */
    for (int i = 0; umount(d->folder) != 0; i++) {
        if (errno != EBUSY || i == 200) {
            snprintf(why, 256, "unmount of the disk's folder: %s", strerror(errno));
            good = false;
            kill(d->server, SIGKILL);
            umount2(d->folder, MNT_DETACH);
            break;
        }
        usleep(10000);
    }
    if (waitpid(d->server, &status, 0) != d->server || (good && status != 0)) {
        snprintf(why, 256, "the disk's server ended with status %d", status);
        good = false;
    }
    struct stat st;
    if (good && fstat(d->log_fd, &st) == 0 && st.st_size > 0) {
        log->map_bytes = (size_t)st.st_size;
        log->map = mmap(NULL, log->map_bytes, PROT_READ, MAP_SHARED, d->log_fd, 0);
        good = log->map != MAP_FAILED && parse(log);
        if (!good) {
            snprintf(why, 256, "the log cannot be read");
        }
    }
    close(d->log_fd);
    return good;
}

void block_log_free(block_log *log)
{
    free(log->entries);
    if (log->map != NULL && log->map != MAP_FAILED) {
        munmap(log->map, log->map_bytes);
    }
    *log = (block_log){0};
}

int loop_attach(int file_fd, uint32_t sector_bytes, char path[64], char why[256])
{
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    /* Somebody else may take the free one first. */
    for (int i = 0; control >= 0 && i < 100; i++) {
        int n = ioctl(control, LOOP_CTL_GET_FREE);
        snprintf(path, 64, "/dev/loop%d", n);
        int fd = n < 0 ? -1 : open(path, O_RDWR | O_CLOEXEC);
        struct loop_config c = {
            .fd = (uint32_t)file_fd, .block_size = sector_bytes, .info = {.lo_flags = LO_FLAGS_AUTOCLEAR}};
        if (fd >= 0 && ioctl(fd, LOOP_CONFIGURE, &c) == 0) {
            close(control);
            return fd;
        }
        int e = errno;
        if (fd >= 0) {
            close(fd);
        }
        errno = e;
        if (e != EBUSY) {
            break;
        }
    }
    snprintf(why, 256, "no loop device: %s", strerror(errno));
    if (control >= 0) {
        close(control);
    }
    return -1;
}
