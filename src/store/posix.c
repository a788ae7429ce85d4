/* SPDX-License-Identifier: Apache-2.0 */

/* A root in a folder of a file system.
 *
 * The root's folder is opened once; everything below is reached from it with
 * the *at() calls, each part with O_NOFOLLOW, so that no name in a checkpoint
 * and no symbolic link put there leads out of it, and so that the store goes on
 * in the same folder when the root is moved. docs/stores.md has the details. */

#include "store/posix.h"

#include "base/hash.h"
#include "base/mem.h"
#include "store/snapshot.h"
#include "store/store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define SNAPSHOT_MAX_BYTES ((size_t)1 << 30)

/* ------------------------------------------------------------------- errors */

static const char *kind_of(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFREG:
        return "a file";
    case S_IFDIR:
        return "a folder";
    case S_IFLNK:
        return "a symbolic link";
    case S_IFIFO:
        return "a FIFO";
    case S_IFSOCK:
        return "a socket";
    default:
        return "a device";
    }
}

static lg_status fail_kind(lg_error *err, const char *verb, const char *path, mode_t mode, const char *wanted)
{
    char buf[LG__SHOWN_BYTES];
    return lg_error_set(err, LG_ERR_FORMAT, "%s %s: it is %s, not %s", verb, lg__posix_shown(path, buf), kind_of(mode),
                        wanted);
}

/* For an error that may come from a node of the wrong type (a link gives ELOOP
 * or ENOTDIR, a socket ENXIO): says what the node is, if it is that. */
static lg_status fail_node(lg_error *err, int os_errno, const char *verb, const char *path, int fd, const char *leaf,
                           mode_t wanted)
{
    struct stat st;
    bool by_type = os_errno == ELOOP || os_errno == ENOTDIR || os_errno == EISDIR || os_errno == ENXIO ||
                   os_errno == ENODEV || os_errno == EPERM;
    if (by_type && fstatat(fd, leaf, &st, AT_SYMLINK_NOFOLLOW) == 0 && (st.st_mode & S_IFMT) != wanted) {
        return fail_kind(err, verb, path, st.st_mode, wanted == S_IFDIR ? "a folder" : "a regular file");
    }
    return lg__posix_fail(err, os_errno, verb, path);
}

/* --------------------------------------------------------------------- root */

typedef struct posix_store {
    lg_store_ops ops; /* own copy: capabilities differ by file system */
    pthread_mutex_t lock;
    atomic_int root_fd;    /* -1 while the root was not there yet */
    int base_fd;           /* what a relative path is relative to */
    atomic_bool no_direct; /* writing or reading past the page cache was refused */
    bool made_root;        /* under lock; by this store */
    bool sync_parent;      /* under lock; the root's own name may not be durable */
    char path[];
} posix_store;

/* What the file system of an open folder promises about renameat2. Not every
 * one passes RENAME_NOREPLACE on; NFS, 9p, Ceph, Lustre and many FUSE ones
 * answer EINVAL. The list is of those known to honour it; on others it is
 * tried too, but not promised. The call on a name that is not there tells a
 * kernel or sandbox without it from one that has it, and changes nothing. */
static bool can_no_replace(int fd)
{
    static const unsigned long long known[] = {
        0xEF53,     /* ext4 */
        0x58465342, /* xfs */
        0x9123683E, /* btrfs */
        0x01021994, /* tmpfs */
        0xF2F52010, /* f2fs */
        0x794C7630, /* overlayfs */
    };
    struct statfs fs;
    if (fstatfs(fd, &fs) != 0) {
        return false;
    }
    bool listed = false;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        listed = listed || ((unsigned long long)fs.f_type & 0xFFFFFFFFu) == known[i];
    }
    static const char absent[] = ".lastgood-absent";
    return listed && lg__posix.renameat2(fd, absent, fd, ".lastgood-absent-2", RENAME_NOREPLACE) != 0 &&
           errno == ENOENT;
}

static lg_status root_missing(const posix_store *s, lg_error *err)
{
    const char *colon = strstr(s->path, "://");
    return colon == NULL ? lg_error_set(err, LG_ERR_NOT_FOUND, "no such folder")
                         : lg_error_set(err, LG_ERR_NOT_FOUND,
                                        "no such folder (\"%.*s://\" is no scheme known here; it was taken for a path)",
                                        (int)(colon - s->path), s->path);
}

/* With s->lock held. */
static lg_status open_root(posix_store *s, lg_error *err)
{
    int fd = openat(s->base_fd, s->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        atomic_store(&s->root_fd, fd);
        return LG_OK;
    }
    int e = errno;
    struct stat st;
    if (e == ENOTDIR) {
        if (fstatat(s->base_fd, s->path, &st, 0) == 0) {
            return lg_error_set(err, LG_ERR_FORMAT, "it is %s, not a folder", kind_of(st.st_mode));
        }
        return lg_error_set(err, LG_ERR_FORMAT, "a part of the path is not a folder");
    }
    if (e == ENOENT) {
        return root_missing(s, err);
    }
    return lg__posix_fail(err, e, "open", "");
}

static lg_status root(posix_store *s, int *fd, lg_error *err)
{
    *fd = atomic_load(&s->root_fd);
    if (*fd >= 0) {
        return LG_OK;
    }
    pthread_mutex_lock(&s->lock);
    lg_status st = atomic_load(&s->root_fd) >= 0 ? LG_OK : open_root(s, err);
    pthread_mutex_unlock(&s->lock);
    *fd = atomic_load(&s->root_fd);
    return st;
}

static lg_status posix_make_root(void *ctx, lg_error *err)
{
    posix_store *s = ctx;
    lg_status st = LG_OK;
    pthread_mutex_lock(&s->lock);
    if (atomic_load(&s->root_fd) < 0) {
        if (mkdirat(s->base_fd, s->path, 0777) == 0) {
            s->made_root = true;
            st = open_root(s, err);
        } else if (errno == EEXIST) {
            st = open_root(s, err);
        } else if (errno == ENOENT) {
            st = root_missing(s, err);
            lg_error_wrap(err, "make the root in a folder that is not there");
        } else if (errno == ENOTDIR) {
            st = lg_error_set(err, LG_ERR_FORMAT, "make the root: a part of the path is not a folder");
        } else {
            st = lg__posix_fail(err, errno, "make", "");
        }
    }
    /* Another process may have made it a moment ago and not synced its name. */
    s->sync_parent = s->sync_parent || st == LG_OK;
    pthread_mutex_unlock(&s->lock);
    return st;
}

/* -------------------------------------------------------------------- paths */

/* Where a path leads: an open folder and a name in it. */
typedef struct place {
    int fd;
    bool own;
    const char *leaf;
} place;

static void leave(place *at)
{
    if (at->own) {
        int e = errno;
        close(at->fd);
        errno = e;
    }
}

/* Opens a folder directly in the root. */
static lg_status open_folder(posix_store *s, const char *name, const char *verb, const char *path, int *out,
                             lg_error *err)
{
    int top;
    LG__TRY(root(s, &top, err));
    int fd;
    do {
        /* "." is the root itself, opened anew since a folder's descriptor has
         * one reading position, and since opening is what makes network file
         * systems look again. */
        fd = openat(top, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) {
        return fail_node(err, errno, verb, path, top, name, S_IFDIR);
    }
    *out = fd;
    return LG_OK;
}

static lg_status go(posix_store *s, const char *path, const char *verb, place *out, lg_error *err)
{
    const char *slash = strchr(path, '/');
    if (slash == NULL) {
        *out = (place){.leaf = path};
        return root(s, &out->fd, err);
    }
    char folder[256];
    size_t n = (size_t)(slash - path);
    LG__RETURN_IF(n >= sizeof folder, err, LG_ERR_INVALID, "%s: a name of %zu bytes is too long", verb, n);
    memcpy(folder, path, n);
    folder[n] = '\0';
    *out = (place){.own = true, .leaf = slash + 1};
    return open_folder(s, folder, verb, path, &out->fd, err);
}

static lg_status posix_make_dir(void *ctx, const char *path, lg_error *err)
{
    place at;
    LG__TRY(go(ctx, path, "make folder", &at, err));
    lg_status st = mkdirat(at.fd, at.leaf, 0777) == 0 ? LG_OK : lg__posix_fail(err, errno, "make folder", path);
    leave(&at);
    return st;
}

/* -------------------------------------------------------------------- files */

static int create_exclusive(const place *at)
{
    int fd;
    do {
        fd = openat(at->fd, at->leaf, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

static lg_status posix_create(void *ctx, const char *path, uint64_t bytes, lg_file **out, lg_error *err)
{
    place at;
    LG__TRY(go(ctx, path, "create", &at, err));
    lg_status st = LG_OK;
    lg_file *f = lg__posix_file_new(-1, true, bytes, path, &((posix_store *)ctx)->no_direct);
    if (f == NULL) {
        st = lg__nomem(err);
    } else if ((f->fd = create_exclusive(&at)) < 0) {
        st = lg__posix_fail(err, errno, "create", path);
    } else {
        int e = lg__posix_file_reserve(f);
        if (e != 0) {
            st = lg__posix_fail_data(err, e, "reserve space for", path, bytes);
            unlinkat(at.fd, at.leaf, 0);
            close(f->fd);
        }
    }
    leave(&at);
    if (st != LG_OK) {
        lg__free(f);
        return st;
    }
    atomic_store(&f->unsynced, true);
    *out = f;
    return LG_OK;
}

static lg_status posix_open(void *ctx, const char *path, lg_file **out, uint64_t *bytes, lg_error *err)
{
    place at;
    LG__TRY(go(ctx, path, "open", &at, err));
    int fd;
    do {
        /* O_NONBLOCK, or a FIFO put here would stop us for ever. */
        fd = openat(at.fd, at.leaf, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC);
    } while (fd < 0 && errno == EINTR);
    struct stat node = {0};
    lg_status st = LG_OK;
    if (fd < 0) {
        st = fail_node(err, errno, "open", path, at.fd, at.leaf, S_IFREG);
    } else if (fstat(fd, &node) != 0) { /* NOLINT(bugprone-branch-clone): steps in an order */
        st = lg__posix_fail(err, errno, "open", path);
    } else if (!S_ISREG(node.st_mode)) {
        st = fail_kind(err, "open", path, node.st_mode, "a regular file");
    } else if (fcntl(fd, F_SETFL, 0) != 0) { /* some file systems heed O_NONBLOCK on files */
        st = lg__posix_fail(err, errno, "open", path);
    }
    leave(&at);
    lg_file *f = NULL;
    if (st == LG_OK) {
        f = lg__posix_file_new(fd, false, (uint64_t)node.st_size, path, &((posix_store *)ctx)->no_direct);
    }
    if (st == LG_OK && f == NULL) {
        st = lg__nomem(err);
    }
    if (st != LG_OK) {
        if (fd >= 0) {
            close(fd);
        }
        return st;
    }
    *bytes = (uint64_t)node.st_size;
    *out = f;
    return LG_OK;
}

/* ------------------------------------------------------------ durable names */

/* Returns 0 or an errno. File systems that cannot sync a folder (EINVAL) can
 * sync as a whole. */
static int sync_folder(int fd)
{
    int rc;
    do {
        rc = lg__posix.fsync(fd);
    } while (rc != 0 && errno == EINTR);
    if (rc != 0 && (errno == EINVAL || errno == EOPNOTSUPP || errno == ENOSYS || errno == EBADF)) {
        rc = lg__posix.syncfs(fd);
    }
    return rc == 0 ? 0 : errno;
}

/* With s->lock held; returns 0 or an errno. */
static int sync_parent(const posix_store *s, int top)
{
    int fd = openat(top, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        /* A parent that may be passed through but not read. */
        return s->made_root && lg__posix.syncfs(top) != 0 ? errno : 0;
    }
    struct stat above, here;
    int e = 0;
    bool known = fstat(fd, &above) == 0 && fstat(top, &here) == 0;
    if (s->made_root || !known || above.st_dev == here.st_dev) { /* else a mount point, there for long */
        e = sync_folder(fd);
    }
    close(fd);
    return e;
}

static lg_status posix_sync_dir(void *ctx, const char *path, lg_error *err)
{
    posix_store *s = ctx;
    int fd;
    if (path[0] != '\0') {
        place at;
        LG__TRY(go(s, path, "sync", &at, err));
        do {
            fd = openat(at.fd, at.leaf, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        } while (fd < 0 && errno == EINTR);
        lg_status st = fd < 0 ? fail_node(err, errno, "sync", path, at.fd, at.leaf, S_IFDIR) : LG_OK;
        leave(&at);
        LG__TRY(st);
        int e = sync_folder(fd);
        close(fd);
        return e == 0 ? LG_OK : lg__posix_fail_sync(err, e, path);
    }
    LG__TRY(root(s, &fd, err));
    int e = sync_folder(fd);
    if (e != 0) {
        return lg__posix_fail_sync(err, e, path);
    }
    pthread_mutex_lock(&s->lock);
    if (s->sync_parent) {
        e = sync_parent(s, fd);
        s->sync_parent = e != 0;
    }
    pthread_mutex_unlock(&s->lock);
    return e == 0 ? LG_OK : lg__posix_fail_sync(err, e, "the root's parent folder");
}

/* --------------------------------------------------------------------- list */

static lg_node_type type_of(unsigned char d_type)
{
    return d_type == DT_REG ? LG_NODE_FILE : d_type == DT_DIR ? LG_NODE_DIR : LG_NODE_OTHER;
}

/* Adds one name; 0 or an errno. */
static int collect(int fd, const struct dirent *d, lg__buf *names)
{
    struct stat st;
    if (fstatat(fd, d->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0) {
        bool file = S_ISREG(st.st_mode);
        lg__snapshot_add(names, d->d_name,
                         file                  ? LG_NODE_FILE
                         : S_ISDIR(st.st_mode) ? LG_NODE_DIR
                                               : LG_NODE_OTHER,
                         file ? (uint64_t)st.st_size : 0);
        return 0;
    }
    if (errno == ENOENT) {
        return 0; /* gone meanwhile */
    }
    /* A file whose size cannot be had must not pass for an empty one; a broken
     * mount point in the root is nothing to us. */
    if (d->d_type == DT_UNKNOWN || d->d_type == DT_REG) {
        return errno;
    }
    lg__snapshot_add(names, d->d_name, type_of(d->d_type), 0);
    return 0;
}

static lg_status posix_list(void *ctx, const char *path, int (*fn)(const lg_node *node, void *arg), void *arg,
                            lg_error *err)
{
    int fd = -1;
    LG__TRY(open_folder(ctx, path[0] == '\0' ? "." : path, "list", path, &fd, err));
    DIR *dir = fdopendir(fd);
    if (dir == NULL) {
        int e = errno;
        close(fd);
        return lg__posix_fail(err, e, "list", path);
    }
    lg__buf names;
    lg__buf_init(&names, SNAPSHOT_MAX_BYTES);
    int e = 0;
    while (e == 0) {
        errno = 0;
        const struct dirent *d = readdir(dir);
        if (d == NULL) {
            e = errno;
            break;
        }
        if (strcmp(d->d_name, ".") != 0 && strcmp(d->d_name, "..") != 0) {
            e = collect(dirfd(dir), d, &names);
        }
    }
    closedir(dir);
    if (e != 0) {
        lg__buf_free(&names);
        return lg__posix_fail(err, e, "list", path);
    }
    return lg__snapshot_visit(&names, fn, arg, err);
}

/* ------------------------------------------------------------------- rename */

/* A server may have renamed and then lost its answer; a repeated request then
 * fails. `node` is what `from` was. */
static bool took_place(const place *from, const place *to, const struct stat *node)
{
    int e = errno;
    struct stat now, old;
    bool yes = fstatat(to->fd, to->leaf, &now, AT_SYMLINK_NOFOLLOW) == 0 && now.st_dev == node->st_dev &&
               now.st_ino == node->st_ino && fstatat(from->fd, from->leaf, &old, AT_SYMLINK_NOFOLLOW) != 0 &&
               errno == ENOENT;
    errno = e;
    return yes;
}

static bool flags_unknown(int os_errno) { return os_errno == EINVAL || os_errno == ENOSYS || os_errno == EOPNOTSUPP; }

/* Renames a folder; 0 or -1 with errno. */
static int rename_no_replace(const place *a, const place *b)
{
    int rc = lg__posix.renameat2(a->fd, a->leaf, b->fd, b->leaf, RENAME_NOREPLACE);
    if (rc == 0 || !flags_unknown(errno)) {
        return rc;
    }
    /* The plain call replaces no folder that has names in it. That it would
     * replace an empty one, made between these two calls, is what the missing
     * LG_CAP_NO_REPLACE says. */
    struct stat there;
    if (fstatat(b->fd, b->leaf, &there, AT_SYMLINK_NOFOLLOW) == 0) {
        errno = EEXIST;
        return -1;
    }
    return lg__posix.renameat(a->fd, a->leaf, b->fd, b->leaf);
}

static lg_status fail_rename(lg_error *err, int os_errno, const char *from, const char *to)
{
    char a[LG__SHOWN_BYTES], b[LG__SHOWN_BYTES];
    lg_status st =
        lg_error_set_errno(err, os_errno, "rename %s to %s", lg__posix_shown(from, a), lg__posix_shown(to, b));
    return err->status = st == LG_ERR_TIMEOUT ? LG_ERR_IO : st;
}

static lg_status rename_node(void *ctx, const char *from, const char *to, mode_t type, lg_error *err)
{
    place a, b;
    LG__TRY(go(ctx, from, "rename", &a, err));
    lg_status st = go(ctx, to, "rename", &b, err);
    if (st != LG_OK) {
        leave(&a);
        return st;
    }
    struct stat node;
    if (fstatat(a.fd, a.leaf, &node, AT_SYMLINK_NOFOLLOW) != 0) {
        st = fail_rename(err, errno, from, to);
    } else if ((node.st_mode & S_IFMT) != type) {
        st = fail_kind(err, "rename", from, node.st_mode, type == S_IFDIR ? "a folder" : "a regular file");
    } else {
        int rc = type == S_IFDIR ? rename_no_replace(&a, &b) : lg__posix.renameat(a.fd, a.leaf, b.fd, b.leaf);
        if (rc != 0 && !took_place(&a, &b, &node)) {
            int e = errno;
            st = fail_rename(err, e, from, to);
            if (type == S_IFDIR && (e == ENOTEMPTY || e == ENOTDIR)) {
                st = err->status = LG_ERR_EXISTS;
            } else if (type == S_IFREG && e == EISDIR) {
                st = err->status = LG_ERR_FORMAT;
            }
        }
    }
    leave(&a);
    leave(&b);
    return st;
}

static lg_status posix_rename_dir(void *ctx, const char *from, const char *to, lg_error *err)
{
    return rename_node(ctx, from, to, S_IFDIR, err);
}

static lg_status posix_rename_file(void *ctx, const char *from, const char *to, lg_error *err)
{
    return rename_node(ctx, from, to, S_IFREG, err);
}

/* ------------------------------------------------------- conditional create */

/* After linkat reported an error: did it take place all the same? The name
 * decides; where it cannot be looked up (a cached absence), the link count. */
static bool linked_all_the_same(const place *at, int fd)
{
    struct stat ours, there;
    if (fstat(fd, &ours) != 0) {
        return false;
    }
    if (fstatat(at->fd, at->leaf, &there, AT_SYMLINK_NOFOLLOW) == 0) {
        return ours.st_dev == there.st_dev && ours.st_ino == there.st_ino;
    }
    return ours.st_nlink == 2;
}

/* Gives the finished file `temporary` its final name; 0 or an errno. */
static int publish(const place *at, const place *temporary, int fd)
{
    if (lg__posix.linkat(temporary->fd, temporary->leaf, at->fd, at->leaf, 0) == 0) {
        return 0;
    }
    int e = errno;
    if (linked_all_the_same(at, fd)) {
        return 0;
    }
    if (e != EPERM && e != EOPNOTSUPP && e != ENOSYS && e != EMLINK) {
        return e;
    }
    /* No hard links here (exFAT, some FUSE). */
    if (lg__posix.renameat2(temporary->fd, temporary->leaf, at->fd, at->leaf, RENAME_NOREPLACE) == 0) {
        return 0;
    }
    e = errno;
    if (linked_all_the_same(at, fd)) {
        return 0;
    }
    return flags_unknown(e) ? EOPNOTSUPP : e;
}

static lg_status posix_put_new(void *ctx, const char *path, const void *data, size_t bytes, lg_error *err)
{
    uint8_t random[8];
    char name[32] = ".tmp-";
    LG__TRY(lg__random(random, sizeof random, err));
    lg__hex(random, sizeof random, name + strlen(name));
    place at;
    LG__TRY(go(ctx, path, "create", &at, err));
    place temporary = {.fd = at.fd, .leaf = name};
    lg_status st = LG_OK;
    lg_file *f = lg__posix_file_new(-1, true, 0, path, NULL);
    if (f == NULL || (f->fd = create_exclusive(&temporary)) < 0) {
        st = f == NULL ? lg__nomem(err) : lg__posix_fail(err, errno, "create", path);
        lg__free(f);
        leave(&at);
        return st;
    }
    st = lg__posix_write(f, data, bytes, 0, err);
    if (st == LG_OK) {
        st = lg__posix_sync(f, err);
    }
    int e = st == LG_OK ? publish(&at, &temporary, f->fd) : 0;
    if (e != 0) {
        st = lg__posix_fail(err, e, "create", path);
    }
    unlinkat(temporary.fd, temporary.leaf, 0); /* gone already if it was renamed */
    close(f->fd);                              /* synced before: nothing left to fail */
    lg__free(f);
    leave(&at);
    return st;
}

/* ------------------------------------------------------------------- remove */

static lg_status posix_remove_file(void *ctx, const char *path, lg_error *err)
{
    place at;
    LG__TRY(go(ctx, path, "remove", &at, err));
    lg_status st = LG_OK;
    if (unlinkat(at.fd, at.leaf, 0) != 0) {
        int e = errno;
        struct stat node;
        bool folder = (e == EISDIR || e == EPERM) && fstatat(at.fd, at.leaf, &node, AT_SYMLINK_NOFOLLOW) == 0 &&
                      S_ISDIR(node.st_mode);
        st = folder ? fail_kind(err, "remove", path, S_IFDIR, "a file") : lg__posix_fail(err, e, "remove", path);
    }
    leave(&at);
    return st;
}

static lg_status posix_remove_dir(void *ctx, const char *path, lg_error *err)
{
    place at;
    LG__TRY(go(ctx, path, "remove folder", &at, err));
    lg_status st = LG_OK;
    if (unlinkat(at.fd, at.leaf, AT_REMOVEDIR) != 0) {
        int e = errno == EEXIST ? ENOTEMPTY : errno;
        st = fail_node(err, e, "remove folder", path, at.fd, at.leaf, S_IFDIR);
    }
    leave(&at);
    return st;
}

/* --------------------------------------------------------------- life cycle */

static const char *posix_describe(void *ctx) { return ((posix_store *)ctx)->path; }

static void posix_destroy(void *ctx)
{
    posix_store *s = ctx;
    int fd = atomic_load(&s->root_fd);
    if (fd >= 0) {
        close(fd);
    }
    if (s->base_fd >= 0) {
        close(s->base_fd);
    }
    pthread_mutex_destroy(&s->lock);
    lg__free(s);
}

/* The folder that holds the root, or would; for what its file system can do. */
static bool parent_can_no_replace(const posix_store *s)
{
    char *path = lg__strdup(s->path);
    if (path == NULL) {
        return false;
    }
    size_t n = strlen(path);
    while (n > 0 && path[n - 1] == '/') {
        n--;
    }
    while (n > 0 && path[n - 1] != '/') {
        n--;
    }
    path[n] = '\0';
    int fd = openat(s->base_fd, n > 0 ? path : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    lg__free(path);
    bool can = fd >= 0 && can_no_replace(fd);
    if (fd >= 0) {
        close(fd);
    }
    return can;
}

static const lg_store_ops table = {
    .version = LG_STORE_OPS_VERSION,
    .caps = LG_CAP_RENAME_DIR | LG_CAP_SYNC_DIR | LG_CAP_DIRECT_IO | LG_CAP_RANGE_READ | LG_CAP_CONDITIONAL_CREATE |
            LG_CAP_MAP,
    .make_root = posix_make_root,
    .make_dir = posix_make_dir,
    .create = posix_create,
    .open = posix_open,
    .write = lg__posix_write,
    .read = lg__posix_read,
    .sync = lg__posix_sync,
    .close = lg__posix_close,
    .sync_dir = posix_sync_dir,
    .list = posix_list,
    .rename_dir = posix_rename_dir,
    .rename_file = posix_rename_file,
    .put_new = posix_put_new,
    .remove_file = posix_remove_file,
    .remove_dir = posix_remove_dir,
    .map = lg__posix_map,
    .unmap = lg__posix_unmap,
    .queue_open = lg__posix_queue_open,
    .queue_submit = lg__posix_queue_submit,
    .queue_wait = lg__posix_queue_wait,
    .queue_close = lg__posix_queue_close,
    .read_way = lg__posix_read_way,
    .describe = posix_describe,
    .destroy = posix_destroy,
};

lg_status lg__posix_store_open(const char *path, lg_store **out, lg_error *err)
{
    size_t n = strlen(path) + 1;
    posix_store *s = lg__calloc(1, sizeof *s + n);
    if (s == NULL) {
        return lg__nomem(err);
    }
    s->ops = table;
    memcpy(s->path, path, n);
    atomic_store(&s->root_fd, -1);
    pthread_mutex_init(&s->lock, NULL);
    /* Kept, so that a relative path means the same folder after a chdir. */
    s->base_fd = open(path[0] == '/' ? "/" : ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    lg_status st = s->base_fd >= 0 ? LG_OK : lg__posix_fail(err, errno, "open the folder that holds", path);
    bool no_replace = false;
    if (st == LG_OK) {
        lg_error why = LG_ERROR_INIT;
        st = open_root(s, &why);
        if (st == LG_OK) {
            no_replace = can_no_replace(atomic_load(&s->root_fd));
        } else if (st == LG_ERR_NOT_FOUND) { /* make_root may come */
            no_replace = parent_can_no_replace(s);
            st = LG_OK;
        } else {
            *err = why;
            lg_error_wrap(err, "%s", path);
        }
    }
    if (no_replace) {
        s->ops.caps |= LG_CAP_NO_REPLACE;
    }
    if (st == LG_OK) {
        st = lg_store_create(&s->ops, s, out, err);
    }
    if (st != LG_OK) {
        posix_destroy(s);
    }
    return st;
}
