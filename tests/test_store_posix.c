/* SPDX-License-Identifier: Apache-2.0 */

/* What only a store on a file system has: links and devices, modes, short and
 * failing system calls, full disks. */

#include "support/posix_root.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

static int setup(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = posix_root_make();
    OK(lg__store_make_dir(x->s, "d", &err));
    *state = x;
    return 0;
}

static int teardown(void **state) { return posix_root_drop(*state); }

/* A path below the root, for the test's own system calls. */
static const char *at(const fixture *x, const char *name)
{
    static char path[600];
    snprintf(path, sizeof path, "%s/%s", x->root, name);
    return path;
}

static lg_status write_file(lg_store *s, const char *path, const void *data, size_t bytes, uint64_t reserve,
                            lg_error *err)
{
    lg_file *f;
    LG__TRY(lg__store_create(s, path, reserve, &f, err));
    lg_status st = lg__store_write(s, f, data, bytes, 0, err);
    if (st == LG_OK) {
        st = lg__store_sync(s, f, err);
    }
    lg_error other = LG_ERROR_INIT;
    lg_status closed = lg__store_close(s, f, st == LG_OK ? err : &other);
    return st == LG_OK ? closed : st;
}

static void holds(lg_store *s, const char *path, const void *want, size_t bytes)
{
    lg_error err = LG_ERROR_INIT;
    lg__buf b;
    lg__buf_init(&b, 64 << 20);
    OK(lg__store_read_all(s, path, &b, &err));
    assert_int_equal(b.len, bytes);
    if (bytes > 0) {
        assert_memory_equal(b.data, want, bytes);
    }
    lg__buf_free(&b);
}

/* ------------------------------------------------------ what is in the place */

static int note_type(const lg_node *node, void *arg)
{
    if (strcmp(node->name, "it") == 0) {
        *(lg_node_type *)arg = node->type;
    }
    return 0;
}

static void odd_nodes(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    OK(lg__store_put_new(x->s, "d/real", "secret", 6, &err));
    static const char *const kinds[] = {"a FIFO", "a symbolic link", "a broken symbolic link", "a socket", "a device"};
    for (size_t i = 0; i < 5; i++) {
        const char *path = at(x, "d/it"); /* valid until the next at() */
        switch (i) {
        case 0:
            assert_int_equal(mkfifo(path, 0666), 0);
            break;
        case 1:
            assert_int_equal(symlink("real", path), 0);
            break;
        case 2:
            assert_int_equal(symlink("none", path), 0);
            break;
        case 3:
            make_socket(path);
            break;
        default:
            if (mknod(path, S_IFCHR | 0666, makedev(1, 3)) != 0) {
                print_message("# a device in place of a file: skipped, mknod needs privileges\n");
                continue;
            }
        }
        lg_file *f = NULL;
        uint64_t bytes;
        FAILS(LG_ERR_FORMAT, lg__store_open_file(x->s, "d/it", &f, &bytes, &err));
        SAYS("open d/it: it is a");
        SAYS(strrchr(kinds[i], ' '));
        FAILS(LG_ERR_EXISTS, lg__store_create(x->s, "d/it", 0, &f, &err));
        FAILS(LG_ERR_EXISTS, lg__store_put_new(x->s, "d/it", "x", 1, &err));
        FAILS(LG_ERR_FORMAT, lg__store_rename_file(x->s, "d/it", "d/other", &err));
        FAILS(LG_ERR_FORMAT, lg__store_remove_dir(x->s, "d/it", &err));
        assert_null(f);
        lg_node_type type = LG_NODE_FILE;
        OK(lg__store_list(x->s, "d", note_type, &type, &err));
        assert_int_equal(type, LG_NODE_OTHER);
        OK(lg__store_remove_file(x->s, "d/it", &err)); /* the link, not what it leads to */
        struct stat gone;
        assert_int_not_equal(lstat(at(x, "d/it"), &gone), 0);
    }
    holds(x->s, "d/real", "secret", 6);
}

static void linked_folder(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    char outside[300];
    snprintf(outside, sizeof outside, "%s/outside", x->dir);
    assert_int_equal(mkdir(outside, 0777), 0);
    assert_int_equal(symlink(outside, at(x, "step")), 0);
    lg_file *f = NULL;
    uint64_t bytes;
    FAILS(LG_ERR_FORMAT, lg__store_create(x->s, "step/a", 0, &f, &err));
    SAYS("it is a symbolic link, not a folder");
    FAILS(LG_ERR_FORMAT, lg__store_open_file(x->s, "step/a", &f, &bytes, &err));
    FAILS(LG_ERR_FORMAT, lg__store_put_new(x->s, "step/a", "x", 1, &err));
    FAILS(LG_ERR_FORMAT, lg__store_make_dir(x->s, "step/a", &err));
    FAILS(LG_ERR_FORMAT, lg__store_list(x->s, "step", note_type, NULL, &err));
    FAILS(LG_ERR_FORMAT, lg__store_sync_dir(x->s, "step", &err));
    FAILS(LG_ERR_FORMAT, lg__store_remove_dir(x->s, "step", &err));
    FAILS(LG_ERR_FORMAT, lg__store_rename_dir(x->s, "step", "step-2", &err));
    FAILS(LG_ERR_EXISTS, lg__store_rename_dir(x->s, "d", "step", &err));
    FAILS(LG_ERR_FORMAT, lg__store_remove_file(x->s, "step/a", &err));
    assert_null(f);
    assert_int_equal(count_names(outside), 0);
}

static void roots(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    char path[300], moved[300], cwd[1024];
    lg_store *s = NULL;
    /* a file is no root; neither is what lies below one */
    snprintf(path, sizeof path, "%s/file", x->dir);
    close(open(path, O_CREAT | O_WRONLY, 0666));
    FAILS(LG_ERR_FORMAT, lg_store_open(path, &s, &err));
    SAYS("file: it is a file, not a folder");
    strcat(path, "/below");
    FAILS(LG_ERR_FORMAT, lg_store_open(path, &s, &err));
    assert_null(s);
    /* only the last part is made */
    snprintf(path, sizeof path, "%s/none/root", x->dir);
    OK(lg_store_open(path, &s, &err));
    FAILS(LG_ERR_NOT_FOUND, lg__store_make_root(s, &err));
    SAYS("none/root");
    lg_store_free(s);
    /* the root may be a link: that is the user's own */
    snprintf(path, sizeof path, "%s/link", x->dir);
    assert_int_equal(symlink("root", path), 0);
    OK(lg_store_open(path, &s, &err));
    OK(lg__store_make_root(s, &err));
    OK(lg__store_put_new(s, "d/a", "x", 1, &err));
    OK(lg__store_sync_dir(s, "", &err));
    holds(x->s, "d/a", "x", 1);
    lg_store_free(s);
    /* a handle stays with its folder when that is moved */
    snprintf(moved, sizeof moved, "%s/moved", x->dir);
    assert_int_equal(rename(x->root, moved), 0);
    OK(lg__store_put_new(x->s, "d/b", "y", 1, &err));
    snprintf(path, sizeof path, "%s/moved/d/b", x->dir);
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(rename(moved, x->root), 0);
    /* a relative root means the same after a chdir, also one made later */
    assert_non_null(getcwd(cwd, sizeof cwd));
    assert_int_equal(chdir(x->dir), 0);
    OK(lg_store_open("later", &s, &err));
    assert_int_equal(chdir("/"), 0);
    OK(lg__store_make_root(s, &err));
    OK(lg__store_put_new(s, "a", "z", 1, &err));
    lg_store_free(s);
    assert_int_equal(chdir(cwd), 0);
    snprintf(path, sizeof path, "%s/later/a", x->dir);
    assert_int_equal(access(path, F_OK), 0);
    /* one that was removed while open is not found */
    snprintf(path, sizeof path, "%s/gone", x->dir);
    OK(lg_store_open(path, &s, &err));
    OK(lg__store_make_root(s, &err));
    assert_int_equal(rmdir(path), 0);
    FAILS(LG_ERR_NOT_FOUND, lg__store_make_dir(s, "a", &err));
    lg_store_free(s);
}

static void modes(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    static const mode_t masks[] = {022, 027, 002, 077};
    for (size_t i = 0; i < 4; i++) {
        umask(masks[i]);
        OK(write_file(x->s, "d/a", "x", 1, 0, &err));
        OK(lg__store_put_new(x->s, "d/b", "x", 1, &err));
        OK(lg__store_make_dir(x->s, "e", &err));
        struct stat st;
        assert_int_equal(stat(at(x, "d/a"), &st), 0);
        assert_int_equal(st.st_mode & 07777, 0666 & ~masks[i]);
        assert_int_equal(stat(at(x, "d/b"), &st), 0);
        assert_int_equal(st.st_mode & 07777, 0666 & ~masks[i]);
        assert_int_equal(stat(at(x, "e"), &st), 0);
        assert_int_equal(st.st_mode & 07777, 0777 & ~masks[i]);
        OK(lg__store_remove_file(x->s, "d/a", &err));
        OK(lg__store_remove_file(x->s, "d/b", &err));
        OK(lg__store_remove_dir(x->s, "e", &err));
    }
}

static void permission(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    OK(lg__store_put_new(x->s, "d/a", "x", 1, &err));
    assert_int_equal(chmod(at(x, "d/a"), 0), 0);
    assert_int_equal(chmod(at(x, "d"), 0555), 0);
    bool privileged = geteuid() == 0;
    if (privileged && seteuid(65534) != 0) { /* who may read everything learns nothing here */
        skip();
    }
    lg_file *f = NULL;
    uint64_t bytes;
    lg_error denied = LG_ERROR_INIT, absent = LG_ERROR_INIT, create = LG_ERROR_INIT, put = LG_ERROR_INIT;
    lg__store_open_file(x->s, "d/a", &f, &bytes, &denied);
    lg__store_open_file(x->s, "d/b", &f, &bytes, &absent);
    lg__store_create(x->s, "d/c", 0, &f, &create);
    lg__store_put_new(x->s, "d/c", "x", 1, &put);
    if (privileged) {
        assert_int_equal(seteuid(0), 0);
    }
    assert_int_equal(chmod(at(x, "d"), 0755), 0);
    assert_null(f);
    assert_int_equal(denied.status, LG_ERR_PERMISSION);
    assert_int_equal(denied.os_errno, EACCES);
    assert_non_null(strstr(denied.message, "open d/a"));
    assert_int_equal(absent.status, LG_ERR_NOT_FOUND);
    assert_int_equal(create.status, LG_ERR_PERMISSION);
    assert_int_equal(put.status, LG_ERR_PERMISSION);
}

/* ------------------------------------------------- short and failing calls */

static struct {
    size_t cap; /* most bytes a call moves; grows and shrinks between 1 and it */
    unsigned calls;
    unsigned fail_from, fail_n; /* calls, counted from 1 */
    int os_errno;               /* 0: returns 0 */
    unsigned pauses, pause_sum;
} io;

static bool must_fail(void)
{
    io.calls++;
    return io.fail_n > 0 && io.calls >= io.fail_from && io.calls - io.fail_from < io.fail_n;
}

static size_t at_most(size_t bytes)
{
    size_t n = io.cap == 0 ? bytes : 1 + io.calls % io.cap;
    return n < bytes ? n : bytes;
}

static ssize_t odd_pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    if (must_fail()) {
        errno = io.os_errno;
        return io.os_errno == 0 ? 0 : -1;
    }
    return pwrite(fd, data, at_most(bytes), offset);
}

static ssize_t odd_pread(int fd, void *data, size_t bytes, off_t offset)
{
    if (must_fail()) {
        errno = io.os_errno;
        return -1;
    }
    return pread(fd, data, at_most(bytes), offset);
}

static int odd_fsync(int fd)
{
    (void)fd;
    if (must_fail()) {
        errno = io.os_errno;
        return -1;
    }
    return 0;
}

static void odd_pause(unsigned ms)
{
    io.pauses++;
    io.pause_sum += ms;
}

static void odd_calls(size_t cap, unsigned from, unsigned n, int os_errno)
{
    memset(&io, 0, sizeof io);
    io.cap = cap;
    io.fail_from = from;
    io.fail_n = n;
    io.os_errno = os_errno;
    lg__posix.pwrite = odd_pwrite;
    lg__posix.pread = odd_pread;
    lg__posix.pause_ms = odd_pause;
}

static unsigned char *pattern(size_t bytes)
{
    unsigned char *p = malloc(bytes);
    assert_non_null(p);
    for (size_t i = 0; i < bytes; i++) {
        p[i] = (unsigned char)(i * 31 + i / 253);
    }
    return p;
}

static void short_calls(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    enum { N = 100003 };
    unsigned char *want = pattern(N);
    for (size_t cap = 1; cap <= 7; cap += 3) {
        odd_calls(cap, 0, 0, 0);
        OK(write_file(x->s, "d/a", want, N, N, &err));
        assert_true(io.calls >= N / cap);
        OK(lg__store_put_new(x->s, "d/b", want, N, &err));
        lg__posix = lg__posix_real; /* what is there, in one piece */
        holds(x->s, "d/a", want, N);
        holds(x->s, "d/b", want, N);
        odd_calls(cap, 0, 0, 0);
        holds(x->s, "d/a", want, N);
        lg_file *f;
        uint64_t bytes;
        unsigned char got[100];
        OK(lg__store_open_file(x->s, "d/a", &f, &bytes, &err));
        OK(lg__store_read(x->s, f, got, 100, N - 100, &err));
        assert_memory_equal(got, want + N - 100, 100);
        FAILS(LG_ERR_CORRUPT, lg__store_read(x->s, f, got, 100, N - 99, &err));
        OK(lg__store_close(x->s, f, &err));
        OK(lg__store_remove_file(x->s, "d/a", &err));
        OK(lg__store_remove_file(x->s, "d/b", &err));
    }
    free(want);
}

static void transient_errors(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    enum { N = 3000 };
    unsigned char *want = pattern(N), got[N];
    static const struct {
        int os_errno;
        unsigned n; /* failures in a row, from the third call on */
        lg_status want;
        unsigned pauses;
    } cases[] = {
        {EIO, 1, LG_OK, 1},
        {ESTALE, 2, LG_OK, 2},
        {EAGAIN, 3, LG_OK, 3},
        {EIO, 4, LG_ERR_IO, 3},
        {EAGAIN, 1000, LG_ERR_IO, 3},
        {EINTR, 1000, LG_OK, 0},
        {ENOSPC, 1, LG_ERR_NO_SPACE, 0},
        {EDQUOT, 1, LG_ERR_NO_SPACE, 0},
        {EFBIG, 1, LG_ERR_NO_SPACE, 0},
        {EROFS, 1, LG_ERR_READ_ONLY, 0},
        {EINVAL, 1, LG_ERR_IO, 0},
        {ETIMEDOUT, 1, LG_ERR_IO, 0},
        {ENOENT, 1, LG_ERR_IO, 0},
        {0, 1000, LG_ERR_IO, 3}, /* a call that returns 0 for ever */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *what = strerror(cases[i].os_errno);
        odd_calls(1000, 3, cases[i].n, cases[i].os_errno);
        check_status(write_file(x->s, "d/a", want, N, 0, &err), cases[i].want, what, &err, __FILE__, __LINE__);
        assert_int_equal(io.pauses, cases[i].pauses);
        assert_true(io.pause_sum < 1000);
        if (cases[i].want == LG_OK) {
            lg__posix = lg__posix_real;
            holds(x->s, "d/a", want, N);
            odd_calls(1000, 3, cases[i].n, cases[i].os_errno);
            lg_file *f;
            uint64_t bytes;
            OK(lg__store_open_file(x->s, "d/a", &f, &bytes, &err));
            OK(lg__store_read(x->s, f, got, N, 0, &err));
            assert_memory_equal(got, want, N);
            assert_int_equal(io.pauses, cases[i].pauses);
            OK(lg__store_close(x->s, f, &err));
        } else {
            SAYS("write d/a at 5"); /* 1 + 1 % 1000 + 1 + 2 % 1000 bytes came before */
            assert_int_equal(err.os_errno, cases[i].os_errno == 0 ? EIO : cases[i].os_errno);
        }
        OK(lg__store_remove_file(x->s, "d/a", &err));
    }
    /* nor is put_new's name there when its contents could not be written */
    odd_calls(0, 1, 1, ENOSPC);
    FAILS(LG_ERR_NO_SPACE, lg__store_put_new(x->s, "d/a", want, N, &err));
    assert_int_equal(count_names(at(x, "d")), 0);
    free(want);
}

static void failed_syncs(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_file *f;
    static const int errors[] = {EIO, ENOSPC, EDQUOT, EAGAIN, ESTALE};
    for (size_t i = 0; i < 5; i++) {
        OK(lg__store_create(x->s, "d/a", 0, &f, &err));
        OK(lg__store_write(x->s, f, "x", 1, 0, &err));
        odd_calls(0, 1, 1, errors[i]);
        lg__posix.fsync = odd_fsync;
        FAILS(LG_ERR_NOT_DURABLE, lg__store_sync(x->s, f, &err));
        assert_int_equal(err.os_errno, errors[i]);
        SAYS("sync d/a");
        assert_int_equal(io.calls, 1); /* not tried again … */
        FAILS(LG_ERR_NOT_DURABLE, lg__store_sync(x->s, f, &err));
        assert_int_equal(io.calls, 1); /* … by whoever asks */
        lg__posix = lg__posix_real;
        FAILS(LG_ERR_NOT_DURABLE, lg__store_sync(x->s, f, &err));
        OK(lg__store_close(x->s, f, &err));
        OK(lg__store_remove_file(x->s, "d/a", &err));

        odd_calls(0, 1, 1, errors[i]);
        lg__posix.fsync = odd_fsync;
        lg__posix.pwrite = pwrite;
        FAILS(LG_ERR_NOT_DURABLE, lg__store_put_new(x->s, "d/b", "x", 1, &err));
        assert_int_equal(err.os_errno, errors[i]);
        assert_int_equal(io.calls, 1);
        assert_int_equal(count_names(at(x, "d")), 0);

        odd_calls(0, 1, 1, errors[i] == EDQUOT ? EIO : errors[i]);
        lg__posix.fsync = odd_fsync;
        FAILS(LG_ERR_NOT_DURABLE, lg__store_sync_dir(x->s, "d", &err));
        assert_int_equal(io.calls, 1);
        lg__posix = lg__posix_real;
    }
    /* an interrupted one has not failed */
    odd_calls(0, 1, 5, EINTR);
    lg__posix.fsync = odd_fsync;
    OK(lg__store_sync_dir(x->s, "d", &err));
    assert_int_equal(io.calls, 6);
}

static int syncfs_calls;
static int count_syncfs(int fd)
{
    (void)fd;
    syncfs_calls++;
    return 0;
}

static int fail_syncfs(int fd)
{
    (void)fd;
    errno = EIO;
    return -1;
}

static void folders_that_cannot_be_synced(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    odd_calls(0, 1, 1000, EINVAL);
    lg__posix.fsync = odd_fsync;
    lg__posix.syncfs = count_syncfs;
    syncfs_calls = 0;
    OK(lg__store_sync_dir(x->s, "d", &err));
    assert_int_equal(syncfs_calls, 1);
    lg__posix.syncfs = fail_syncfs;
    FAILS(LG_ERR_NOT_DURABLE, lg__store_sync_dir(x->s, "d", &err));
    /* a file is another matter */
    lg_file *f;
    OK(lg__store_create(x->s, "d/a", 0, &f, &err));
    lg__posix.syncfs = count_syncfs;
    FAILS(LG_ERR_NOT_DURABLE, lg__store_sync(x->s, f, &err));
    OK(lg__store_close(x->s, f, &err));
}

static struct {
    int n;
    ino_t inodes[8];
} synced;

static int note_fsync(int fd)
{
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    assert_true(synced.n < 8);
    synced.inodes[synced.n++] = st.st_ino;
    return 0;
}

static void syncing_the_root(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    struct stat root, parent;
    assert_int_equal(stat(x->root, &root), 0);
    assert_int_equal(stat(x->dir, &parent), 0);
    synced.n = 0;
    lg__posix.fsync = note_fsync;
    OK(lg__store_sync_dir(x->s, "", &err));
    assert_int_equal(synced.n, 2);
    assert_int_equal(synced.inodes[0], root.st_ino);
    assert_int_equal(synced.inodes[1], parent.st_ino);
    OK(lg__store_sync_dir(x->s, "", &err)); /* the root's own name once */
    assert_int_equal(synced.n, 3);
    lg_store *reader;
    OK(lg_store_open(x->root, &reader, &err)); /* who made nothing syncs no parent */
    OK(lg__store_sync_dir(reader, "", &err));
    assert_int_equal(synced.n, 4);
    assert_int_equal(synced.inodes[3], root.st_ino);
    lg_store_free(reader);
}

static struct {
    int os_errno;
    int mode;
    off_t bytes;
    unsigned calls;
} reserved;

static int odd_fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    (void)fd, (void)offset;
    reserved.calls++;
    reserved.mode = mode;
    reserved.bytes = bytes;
    errno = reserved.os_errno;
    return reserved.os_errno == 0 ? 0 : -1;
}

static void reserving(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_file *f = NULL;
    lg__posix.fallocate = odd_fallocate;
    static const struct {
        int os_errno;
        lg_status want;
    } cases[] = {{0, LG_OK},      {EOPNOTSUPP, LG_OK},       {ENOSYS, LG_OK},           {EINVAL, LG_OK},
                 {EPERM, LG_OK},  {ENOSPC, LG_ERR_NO_SPACE}, {EDQUOT, LG_ERR_NO_SPACE}, {EFBIG, LG_ERR_NO_SPACE},
                 {EIO, LG_ERR_IO}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        reserved.os_errno = cases[i].os_errno;
        check_status(write_file(x->s, "d/a", "xyz", 3, 12345, &err), cases[i].want, strerror(cases[i].os_errno), &err,
                     __FILE__, __LINE__);
        assert_int_equal(reserved.bytes, 12345);
        assert_int_equal(reserved.mode, FALLOC_FL_KEEP_SIZE);
        if (cases[i].want == LG_OK) {
            holds(x->s, "d/a", "xyz", 3);
            OK(lg__store_remove_file(x->s, "d/a", &err));
        } else {
            SAYS("reserve space for d/a");
            assert_int_equal(count_names(at(x, "d")), 0);
        }
    }
    reserved.calls = 0;
    OK(write_file(x->s, "d/a", "xyz", 3, 0, &err));
    assert_int_equal(reserved.calls, 0);
    /* what was reserved too much is given back */
    lg__posix.fallocate = lg__posix_real.fallocate;
    struct stat st;
    OK(write_file(x->s, "d/b", "xyz", 3, 8 << 20, &err));
    assert_int_equal(stat(at(x, "d/b"), &st), 0);
    assert_int_equal(st.st_size, 3);
    assert_true(st.st_blocks * 512 < 1 << 20);
    assert_null(f);
}

static int fail_close(int fd)
{
    close(fd);
    errno = io.os_errno;
    return -1;
}

static void closing(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_file *f;
    static const struct {
        int os_errno;
        bool sync;
        lg_status want;
    } cases[] = {{EIO, true, LG_ERR_IO},
                 {ENOSPC, false, LG_ERR_NO_SPACE},
                 {EDQUOT, false, LG_ERR_NO_SPACE},
                 {EINTR, false, LG_ERR_IO},
                 {EINTR, true, LG_OK}};
    for (size_t i = 0; i < 5; i++) {
        OK(lg__store_create(x->s, "d/a", 0, &f, &err));
        OK(lg__store_write(x->s, f, "x", 1, 0, &err));
        if (cases[i].sync) {
            OK(lg__store_sync(x->s, f, &err));
        }
        io.os_errno = cases[i].os_errno;
        lg__posix.close = fail_close;
        check_status(lg__store_close(x->s, f, &err), cases[i].want, "close", &err, __FILE__, __LINE__);
        lg__posix = lg__posix_real;
        OK(lg__store_remove_file(x->s, "d/a", &err));
    }
}

/* ----------------------------------------------------- lying servers, old kernels */

static struct {
    int os_errno;
    bool does_it;
    unsigned calls;
} lie;

static int odd_linkat(int a, const char *from, int b, const char *to, int flags)
{
    lie.calls++;
    if (lie.does_it && linkat(a, from, b, to, flags) != 0) {
        return -1;
    }
    errno = lie.os_errno;
    return -1;
}

static int no_linkat(int a, const char *from, int b, const char *to, int flags)
{
    (void)a;
    (void)from;
    (void)b;
    (void)to;
    (void)flags;
    errno = EPERM;
    return -1;
}

static int odd_renameat2(int a, const char *from, int b, const char *to, unsigned flags)
{
    lie.calls++;
    if (lie.does_it && renameat2(a, from, b, to, flags) != 0) {
        return -1;
    }
    errno = lie.os_errno;
    return -1;
}

static int odd_renameat(int a, const char *from, int b, const char *to)
{
    lie.calls++;
    if (lie.does_it && renameat(a, from, b, to) != 0) {
        return -1;
    }
    errno = lie.os_errno;
    return -1;
}

static void lost_answers(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    static const int errors[] = {EEXIST, EIO, ENOENT, ETIMEDOUT};
    for (size_t i = 0; i < 4; i++) {
        /* the request was carried out, its repetition failed */
        lie.os_errno = errors[i];
        lie.does_it = true;
        lg__posix.linkat = odd_linkat;
        lg__posix.renameat2 = odd_renameat2;
        lg__posix.renameat = odd_renameat;
        OK(lg__store_put_new(x->s, "d/a", "x", 1, &err));
        assert_int_equal(count_names(at(x, "d")), 1);
        FAILS(LG_ERR_EXISTS, lg__store_put_new(x->s, "d/a", "y", 1, &err));
        OK(lg__store_rename_file(x->s, "d/a", "d/b", &err));
        holds(x->s, "d/b", "x", 1);
        OK(lg__store_rename_dir(x->s, "d", "e", &err));
        holds(x->s, "e/b", "x", 1);
        /* it was not */
        lie.does_it = false;
        assert_int_not_equal(lg__store_put_new(x->s, "e/a", "x", 1, &err), LG_OK);
        assert_int_equal(err.os_errno, errors[i]);
        assert_int_not_equal(lg__store_rename_file(x->s, "e/b", "e/c", &err), LG_OK);
        assert_int_not_equal(lg__store_rename_dir(x->s, "e", "d", &err), LG_OK);
        assert_int_equal(err.os_errno, errors[i]);
        assert_int_equal(count_names(at(x, "e")), 1);
        lg__posix = lg__posix_real;
        OK(lg__store_remove_file(x->s, "e/b", &err));
        OK(lg__store_rename_dir(x->s, "e", "d", &err));
    }
}

static void no_hard_links(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    static const int errors[] = {EPERM, EOPNOTSUPP, ENOSYS};
    for (size_t i = 0; i < 3; i++) {
        lie.os_errno = errors[i];
        lie.does_it = false;
        lg__posix.linkat = odd_linkat;
        OK(lg__store_put_new(x->s, "d/a", "x", 1, &err));
        FAILS(LG_ERR_EXISTS, lg__store_put_new(x->s, "d/a", "y", 1, &err));
        holds(x->s, "d/a", "x", 1);
        assert_int_equal(count_names(at(x, "d")), 1);
        OK(lg__store_remove_file(x->s, "d/a", &err));
    }
    /* the rename in its place was carried out, its repetition failed */
    static const int lost[] = {EEXIST, EIO, ENOENT};
    for (size_t i = 0; i < 3; i++) {
        lie.os_errno = lost[i];
        lie.does_it = true;
        lg__posix.linkat = no_linkat;
        lg__posix.renameat2 = odd_renameat2;
        OK(lg__store_put_new(x->s, "d/a", "x", 1, &err));
        holds(x->s, "d/a", "x", 1);
        assert_int_equal(count_names(at(x, "d")), 1);
        lie.does_it = false;
        assert_int_not_equal(lg__store_put_new(x->s, "d/b", "y", 1, &err), LG_OK);
        assert_int_equal(err.os_errno, lost[i]);
        assert_int_equal(count_names(at(x, "d")), 1);
        lg__posix = lg__posix_real;
        OK(lg__store_remove_file(x->s, "d/a", &err));
    }
    lg__posix.linkat = no_linkat;
    /* neither way: said, not done in a way that could overwrite */
    lie.os_errno = ENOSYS;
    lg__posix.renameat2 = odd_renameat2;
    FAILS(LG_ERR_UNSUPPORTED, lg__store_put_new(x->s, "d/a", "x", 1, &err));
    assert_int_equal(count_names(at(x, "d")), 0);
}

static void no_replace_unknown(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    OK(lg__store_make_dir(x->s, "full", &err));
    OK(lg__store_put_new(x->s, "full/a", "x", 1, &err));
    OK(lg__store_make_dir(x->s, "empty", &err));
    static const int errors[] = {EINVAL, ENOSYS, EOPNOTSUPP};
    for (size_t i = 0; i < 3; i++) {
        lie.os_errno = errors[i];
        lie.does_it = false;
        lg__posix.renameat2 = odd_renameat2;
        lg_store *s;
        OK(lg_store_open(x->root, &s, &err));
        assert_int_equal(lg_store_caps(s) & (LG_CAP_NO_REPLACE | LG_CAP_RENAME_DIR), LG_CAP_RENAME_DIR);
        FAILS(LG_ERR_EXISTS, lg__store_rename_dir(s, "full", "empty", &err));
        FAILS(LG_ERR_EXISTS, lg__store_rename_dir(s, "empty", "full", &err));
        OK(lg__store_rename_dir(s, "full", "new", &err));
        OK(lg__store_rename_dir(s, "new", "full", &err));
        lg_store_free(s);
    }
    holds(x->s, "full/a", "x", 1);
}

/* Makes the target full between the look and the plain rename. */
static fixture *meddled;
static int meddling_renameat(int a, const char *from, int b, const char *to)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", meddled->root, to);
    assert_int_equal(mkdir(path, 0777), 0);
    strcat(path, "/theirs");
    close(open(path, O_CREAT | O_WRONLY, 0666));
    return renameat(a, from, b, to);
}

static void plain_rename_race(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = meddled = *state;
    OK(lg__store_put_new(x->s, "d/mine", "x", 1, &err));
    lie.os_errno = EINVAL;
    lie.does_it = false;
    lg__posix.renameat2 = odd_renameat2;
    lg__posix.renameat = meddling_renameat;
    FAILS(LG_ERR_EXISTS, lg__store_rename_dir(x->s, "d", "final", &err));
    assert_int_equal(access(at(x, "final/theirs"), F_OK), 0);
    assert_int_equal(access(at(x, "d/mine"), F_OK), 0);
}

/* -------------------------------------------------------- processes, disks */

static void processes_race(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    enum { N = 4, BYTES = 50000 };
    int gate[2];
    pid_t pids[N];
    assert_int_equal(pipe(gate), 0);
    for (int i = 0; i < N; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            lg_store *s;
            char c, *mine = malloc(BYTES);
            memset(mine, 'A' + i, BYTES);
            close(gate[1]);
            if (lg_store_open(x->root, &s, NULL) != LG_OK || read(gate[0], &c, 1) != 0) {
                _exit(2);
            }
            lg_status put = lg__store_put_new(s, "d/a", mine, BYTES, &err);
            _exit(put == LG_OK ? 0 : put == LG_ERR_EXISTS ? 1 : 2);
        }
    }
    close(gate[0]);
    close(gate[1]); /* they start */
    int winner = -1;
    for (int i = 0; i < N; i++) {
        int status;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) < 2);
        if (WEXITSTATUS(status) == 0) {
            assert_int_equal(winner, -1);
            winner = i;
        }
    }
    assert_int_not_equal(winner, -1);
    char *want = malloc(BYTES);
    memset(want, 'A' + winner, BYTES);
    holds(x->s, "d/a", want, BYTES);
    free(want);
    assert_int_equal(count_names(at(x, "d")), 1);
}

/* A store on a small file system of its own, gone with the last descriptor; NULL
 * where mounting is not allowed. */
static lg_store *on_tmpfs(fixture *x, const char *options, unsigned long flags)
{
    lg_error err = LG_ERROR_INIT;
    char path[300];
    lg_store *s;
    snprintf(path, sizeof path, "%s/disk", x->dir);
    assert_true(mkdir(path, 0777) == 0 || errno == EEXIST);
    if (mount("tmpfs", path, "tmpfs", flags, options) != 0) {
        print_message("# skipped, mount needs privileges: %s\n", strerror(errno));
        return NULL;
    }
    lg_status st = lg_store_open(path, &s, &err);
    assert_int_equal(umount2(path, MNT_DETACH), 0);
    OK(st);
    return s;
}

static void full_disk(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_store *s = on_tmpfs(x, "size=1m", 0);
    if (s == NULL) {
        skip();
    }
    enum { N = 2 << 20 };
    unsigned char *big = pattern(N);
    lg_file *f = NULL;
    /* known beforehand: at create, and nothing stays */
    FAILS(LG_ERR_NO_SPACE, lg__store_create(s, "a", N, &f, &err));
    assert_int_equal(err.os_errno, ENOSPC);
    assert_null(f);
    /* not known: at write */
    OK(lg__store_create(s, "a", 0, &f, &err));
    FAILS(LG_ERR_NO_SPACE, lg__store_write(s, f, big, N, 0, &err));
    assert_int_equal(err.os_errno, ENOSPC);
    SAYS("disk: write a at ");
    OK(lg__store_close(s, f, &err));
    FAILS(LG_ERR_NO_SPACE, lg__store_put_new(s, "b", big, N / 2, &err));
    bool there = true;
    OK(lg__store_exists(s, "", "b", &there, &err));
    assert_false(there);
    /* space is freed: the same again succeeds */
    OK(lg__store_remove_file(s, "a", &err));
    OK(lg__store_put_new(s, "b", big, N / 4, &err));
    holds(s, "b", big, N / 4);
    free(big);
    lg_store_free(s);
}

static void read_only_disk(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_store *s = on_tmpfs(x, "size=1m", MS_RDONLY);
    if (s == NULL) {
        skip();
    }
    lg_file *f = NULL;
    OK(lg__store_make_root(s, &err));
    FAILS(LG_ERR_READ_ONLY, lg__store_create(s, "a", 0, &f, &err));
    FAILS(LG_ERR_READ_ONLY, lg__store_make_dir(s, "a", &err));
    FAILS(LG_ERR_READ_ONLY, lg__store_put_new(s, "a", "x", 1, &err));
    lg_store_free(s);
}

static void beyond_four_gib(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_file *f;
    uint64_t bytes;
    const uint64_t far = UINT64_C(1) << 32;
    OK(lg__store_create(x->s, "d/a", 0, &f, &err));
    lg_status st = lg__store_write(x->s, f, "<>", 2, far - 1, &err);
    if (st == LG_ERR_NO_SPACE && err.os_errno == EFBIG) {
        OK(lg__store_close(x->s, f, &err));
        print_message("# skipped, no sparse file of 4 GiB here\n");
        skip();
    }
    OK(st);
    OK(lg__store_write(x->s, f, "start", 5, 0, &err));
    OK(lg__store_close(x->s, f, &err));
    OK(lg__store_open_file(x->s, "d/a", &f, &bytes, &err));
    assert_true(bytes == far + 1);
    char got[5];
    OK(lg__store_read(x->s, f, got, 2, far - 1, &err));
    assert_memory_equal(got, "<>", 2);
    OK(lg__store_read(x->s, f, got, 5, 0, &err));
    assert_memory_equal(got, "start", 5);
    FAILS(LG_ERR_CORRUPT, lg__store_read(x->s, f, got, 2, far, &err));
    const void *data;
    void *base;
    size_t mapped;
    OK(lg__store_map(x->s, f, far - 1, 2, &data, &base, &mapped, &err));
    assert_memory_equal(data, "<>", 2);
    lg__store_unmap(x->s, base, mapped);
    OK(lg__store_close(x->s, f, &err));
    struct stat node;
    assert_int_equal(stat(at(x, "d/a"), &node), 0);
    assert_true(node.st_blocks * 512 < 1 << 20);
}

/* ---------------------------------------------------------------- one place */

static bool is_name(char c) { return c == '_' || (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z'); }

static void blank_comments(char *s)
{
    for (char *p = s; (p = strstr(p, "/*")) != NULL;) {
        char *end = strstr(p + 2, "*/");
        memset(p, ' ', end == NULL ? strlen(p) : (size_t)(end + 2 - p));
    }
}

static int direct_calls(const char *path)
{
    static const char *const calls[] = {"open",     "openat", "fopen",  "creat",   "opendir", "mkdir", "rename",
                                        "unlink",   "rmdir",  "remove", "mkstemp", "tmpfile", "link",  "symlink",
                                        "truncate", "pread",  "pwrite", "fsync",   "mmap"};
    static char text[1 << 20];
    int found = 0;
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    blank_comments(text);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        size_t n = strlen(calls[i]);
        for (const char *p = text; (p = strstr(p, calls[i])) != NULL; p += n) {
            bool member = p > text && (p[-1] == '.' || p[-1] == '>');
            size_t line = strcspn(p, ";");
            bool memory = memmem(p, line, "MAP_ANONYMOUS", strlen("MAP_ANONYMOUS")) != NULL; /* of no file */
            if (p[n] == '(' && !member && !memory && (p == text || !is_name(p[-1]))) {
                print_error("%s calls %s\n", path, calls[i]);
                found++;
            }
        }
    }
    return found;
}

static int search_sources(const char *dir, int *files)
{
    int found = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        char path[1024];
        size_t n = strlen(e->d_name);
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        if (e->d_type == DT_DIR && e->d_name[0] != '.') {
            found += search_sources(path, files);
        } else if (n > 2 && strcmp(e->d_name + n - 2, ".c") == 0 && strncmp(e->d_name, "posix", 5) != 0) {
            found += direct_calls(path);
            ++*files;
        }
    }
    closedir(d);
    return found;
}

static void one_place(void **state)
{
    (void)state;
    const char *source = getenv("LASTGOOD_SOURCE");
    char path[1024];
    int files = 0;
    if (source == NULL) {
        print_message("# skipped, LASTGOOD_SOURCE is not set\n");
        skip();
    }
    snprintf(path, sizeof path, "%s/src", source);
    assert_int_equal(search_sources(path, &files), 0);
    assert_true(files > 5);
}

#define TEST(name, test)                  \
    {                                     \
        name, test, setup, teardown, NULL \
    }

int main(void)
{
    static const struct CMUnitTest tests[] = {
        TEST("K15 F260: a FIFO, link, socket or device in place of a file is refused at once", odd_nodes),
        TEST("K15 F259: a symbolic link in place of a folder leads nowhere", linked_folder),
        TEST("a root is a folder, made if its parent is there, and stays the same folder", roots),
        TEST("K19 F304: files are 0666 and folders 0777 less the umask", modes),
        TEST("K19 F305: permission denied is told apart from not found", permission),
        TEST("K16 F265 F266: calls that move 1 to 7 bytes lose nothing", short_calls),
        TEST("K01 F013 F020: a transient error is survived, a lasting one names file, offset and errno",
             transient_errors),
        TEST("K01: a failed sync is never turned into success", failed_syncs),
        TEST("a folder that cannot be synced is synced with its file system", folders_that_cannot_be_synced),
        TEST("syncing the root makes the root's own name durable", syncing_the_root),
        TEST("space is reserved where that works, and the length stays what was written", reserving),
        TEST("errors of close are reported", closing),
        TEST("a rename or link whose answer was lost counts if it took place", lost_answers),
        TEST("without hard links put_new renames without replacing, or says it cannot", no_hard_links),
        TEST("without no-replace the capability is not claimed and folders are still renamed", no_replace_unknown),
        TEST("without no-replace a folder with names in it is never replaced", plain_rename_race),
        TEST("K05 F083: of four processes one wins, and its contents are whole", processes_race),
        TEST("K01 F010: a full disk is reported early, and the same works once there is space", full_disk),
        TEST("a read-only file system is told apart", read_only_disk),
        TEST("K16 F269: offsets beyond 4 GiB are kept", beyond_four_gib),
        TEST("K15 F259: no other part of the library opens, renames or removes files", one_place),
    };
    return cmocka_run_group_tests_name("store on a file system", tests, NULL, NULL);
}
