/* SPDX-License-Identifier: Apache-2.0 */

/* What a store on a file system does when the kernel refuses a call that nearly
 * always works, when rights are missing, and when somebody else was faster. */

#include "base/mem.h"
#include "io/choice.h"
#include "support/posix_root.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define NOBODY 65534

static int setup(void **state)
{
    *state = posix_root_make();
    return 0;
}

static int teardown(void **state)
{
    lg__io_set(LG__IO_AUTO, LG__DIRECT_AUTO);
    if (getuid() == 0) {
        assert_int_equal(seteuid(0), 0);
    }
    return posix_root_drop(*state);
}

/* Rights do not count for root, who is somebody else for some calls. */
static void become_ordinary(void)
{
    if (getuid() == 0) {
        assert_int_equal(seteuid(NOBODY), 0);
    }
}

static void become_owner(void)
{
    if (getuid() == 0) {
        assert_int_equal(seteuid(0), 0);
    }
}

/* In some containers there is no other user. */
static void needs_an_ordinary_user(void)
{
    if (getuid() == 0 && seteuid(NOBODY) != 0) {
        print_message("# skipped, there is no other user here\n");
        skip();
    }
    become_owner();
}

static const char *below(const fixture *x, const char *name)
{
    static char path[600];
    snprintf(path, sizeof path, "%s/%s", x->dir, name);
    return path;
}

/* --------------------------------------------------------------------- roots */

static void root_made_by_another(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_store *s = NULL;
    OK(lg_store_open(below(x, "new"), &s, &err));
    assert_int_equal(mkdir(below(x, "new"), 0755), 0);
    assert_int_equal(mkdir(below(x, "new/theirs"), 0755), 0);
    OK(lg__store_make_root(s, &err));
    OK(lg__store_put_new(s, "theirs/a", "x", 1, &err));
    OK(lg__store_sync_dir(s, "", &err));
    lg_store_free(s);
    assert_int_equal(access(below(x, "new/theirs/a"), F_OK), 0);
}

static void root_cannot_be_made(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_store *s = NULL;
    needs_an_ordinary_user();
    /* its folder became a file meanwhile */
    assert_int_equal(mkdir(below(x, "parent"), 0755), 0);
    OK(lg_store_open(below(x, "parent/new"), &s, &err));
    assert_int_equal(rmdir(below(x, "parent")), 0);
    close(open(below(x, "parent"), O_CREAT | O_WRONLY | O_CLOEXEC, 0666));
    FAILS(LG_ERR_FORMAT, lg__store_make_root(s, &err));
    SAYS("parent/new: make the root: a part of the path is not a folder");
    /* its folder may not be written */
    assert_int_equal(unlink(below(x, "parent")), 0);
    assert_int_equal(mkdir(below(x, "parent"), 0555), 0);
    become_ordinary();
    FAILS(LG_ERR_PERMISSION, lg__store_make_root(s, &err));
    become_owner();
    SAYS("parent/new: make root: ");
    assert_int_equal(err.os_errno, EACCES);
    assert_int_equal(chmod(below(x, "parent"), 0755), 0);
    OK(lg__store_make_root(s, &err)); /* the same handle, once it is put right */
    OK(lg__store_put_new(s, "a", "x", 1, &err));
    lg_store_free(s);
}

static int fail_sync(int fd)
{
    (void)fd;
    errno = EIO;
    return -1;
}

static void root_cannot_be_synced(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg__posix.fsync = fail_sync;
    FAILS(LG_ERR_NOT_DURABLE, lg__store_sync_dir(x->s, "", &err));
    SAYS("sync root: ");
    assert_int_equal(err.os_errno, EIO);
    lg__posix = lg__posix_real;
    OK(lg__store_sync_dir(x->s, "", &err));
}

static unsigned whole_syncs;
static int count_syncfs(int fd)
{
    (void)fd;
    whole_syncs++;
    return 0;
}

/* As in a folder of projects of which one may see only one's own. */
static void parent_cannot_be_read(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_store *s = NULL, *later = NULL;
    needs_an_ordinary_user();
    assert_int_equal(mkdir(below(x, "projects"), 0755), 0);
    assert_int_equal(chmod(below(x, "projects"), 0333), 0);
    become_ordinary();
    OK(lg_store_open(below(x, "projects/mine"), &s, &err));
    OK(lg__store_make_root(s, &err));
    /* the file system as a whole makes the new name durable, and says if it cannot */
    lg__posix.syncfs = fail_sync;
    FAILS(LG_ERR_NOT_DURABLE, lg__store_sync_dir(s, "", &err));
    SAYS("sync the root's parent folder: ");
    whole_syncs = 0;
    lg__posix.syncfs = count_syncfs;
    OK(lg__store_sync_dir(s, "", &err));
    assert_int_equal(whole_syncs, 1);
    OK(lg__store_sync_dir(s, "", &err)); /* once */
    assert_int_equal(whole_syncs, 1);
    /* who made no root need not */
    OK(lg_store_open(below(x, "projects/mine"), &later, &err));
    OK(lg__store_make_root(later, &err));
    OK(lg__store_sync_dir(later, "", &err));
    assert_int_equal(whole_syncs, 1);
    become_owner();
    lg_store_free(s);
    lg_store_free(later);
    assert_int_equal(chmod(below(x, "projects"), 0755), 0);
}

static void no_memory_to_look_at_the_parent(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_store *s = NULL;
    unsigned opened = 0;
    bool failed = true;
    for (size_t n = 0; failed; n++) {
        lg__mem_fail_once(n);
        lg_status st = lg_store_open(below(x, "none-yet"), &s, &err);
        failed = lg__mem_reset();
        if (st != LG_OK) {
            assert_true(failed);
            assert_int_equal(st, LG_ERR_NOMEM);
            continue;
        }
        if (failed) { /* what is not known is not promised, and all else works */
            opened++;
            assert_false(lg__store_can(s, LG_CAP_NO_REPLACE));
            OK(lg__store_make_root(s, &err));
            OK(lg__store_make_dir(s, "a", &err));
            OK(lg__store_rename_dir(s, "a", "b", &err));
            OK(lg__store_remove_dir(s, "b", &err));
            assert_int_equal(rmdir(below(x, "none-yet")), 0);
        }
        lg_store_free(s);
    }
    assert_int_equal(opened, 1);
}

/* --------------------------------------------------------------------- lists */

static int count_it(const lg_node *node, void *arg)
{
    unsigned *seen = arg;
    seen[node->type]++;
    return 0;
}

/* Names can be read, but nothing about them: "r" without "x". */
static void names_without_more(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    unsigned seen[8] = {0};
    needs_an_ordinary_user();
    OK(lg__store_make_dir(x->s, "d", &err));
    assert_int_equal(mkdir(below(x, "root/d/folder"), 0755), 0);
    assert_int_equal(symlink("nowhere", below(x, "root/d/link")), 0);
    DIR *dir = opendir(below(x, "root/d"));
    assert_non_null(dir);
    bool types = true;
    for (const struct dirent *e = readdir(dir); e != NULL; e = readdir(dir)) {
        types = types && e->d_type != DT_UNKNOWN;
    }
    closedir(dir);
    if (types) { /* what is no file has no size to get wrong */
        assert_int_equal(chmod(below(x, "root/d"), 0444), 0);
        become_ordinary();
        OK(lg__store_list(x->s, "d", count_it, seen, &err));
        become_owner();
        assert_int_equal(seen[LG_NODE_DIR], 1);
        assert_int_equal(seen[LG_NODE_OTHER], 1);
        assert_int_equal(seen[LG_NODE_FILE], 0);
        assert_int_equal(chmod(below(x, "root/d"), 0755), 0);
    }
    /* a file whose size is not known does not pass for an empty one */
    OK(lg__store_put_new(x->s, "d/file", "12345", 5, &err));
    assert_int_equal(chmod(below(x, "root/d"), 0444), 0);
    memset(seen, 0, sizeof seen);
    become_ordinary();
    FAILS(LG_ERR_PERMISSION, lg__store_list(x->s, "d", count_it, seen, &err));
    become_owner();
    SAYS("list d: ");
    assert_int_equal(err.os_errno, EACCES);
    assert_int_equal(seen[LG_NODE_DIR] + seen[LG_NODE_OTHER] + seen[LG_NODE_FILE], 0);
    assert_int_equal(chmod(below(x, "root/d"), 0755), 0);
}

/* --------------------------------------------------------------------- files */

static struct {
    lg_file *file;
    unsigned opened;
} race;

/* Opens as other file systems would with O_DIRECT, and is overtaken. */
static int open_slowly(const char *path, int flags)
{
    race.opened++;
    if (race.opened == 1) { /* what another thread may do between two lines */
        assert_int_equal(lg__posix_read_way(race.file, 0, 4 * KIB), LG_READ_ALIGNED);
    }
    return open(path, flags);
}

static void two_open_one_file_directly(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    uint64_t bytes = 0;
    char data[8 * KIB], got[8 * KIB] = {0};
    memset(data, 7, sizeof data);
    OK(lg__store_put_new(x->s, "a", data, sizeof data, &err));
    OK(lg__store_open_file(x->s, "a", &race.file, &bytes, &err));
    lg__io_set(LG__IO_AUTO, LG__DIRECT_ON);
    race.opened = 0;
    lg__posix.open_direct = open_slowly;
    size_t before = open_descriptors();
    assert_int_equal(lg__store_read_way(x->s, race.file, 0, sizeof data), LG_READ_ALIGNED);
    assert_int_equal(race.opened, 2);
    assert_int_equal(open_descriptors(), before + 1); /* of two descriptors one is kept */
    OK(lg__store_read(x->s, race.file, got, sizeof got, 0, &err));
    assert_memory_equal(got, data, sizeof data);
    OK(lg__store_close(x->s, race.file, &err));
}

/* Puts a file of the kernel's memory in the place of an open one: it can refuse
 * what no file system of this machine refuses. */
static void replace(const lg_file *f, uint64_t bytes, int seals)
{
    int fd = memfd_create("lastgood-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    assert_true(dup3(fd, f->fd, O_CLOEXEC) >= 0);
    close(fd);
}

static int open_plainly(const char *path, int flags) { return open(path, flags); }

/* A file that was made as long as announced keeps zeros behind what was written:
 * it must not pass for whole. */
static void cannot_be_cut(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_file *f = NULL;
    lg__io_set(LG__IO_AUTO, LG__DIRECT_ON);
    lg__posix.open_direct = open_plainly;
    OK(lg__store_create(x->s, "a", 8 * KIB, &f, &err));
    assert_true(f->preset);
    replace(f, 8 * KIB, F_SEAL_SHRINK);
    OK(lg__store_write(x->s, f, "0123456789", 10, 0, &err));
    FAILS(LG_ERR_PERMISSION, lg__store_sync(x->s, f, &err));
    SAYS("cut a at 10: ");
    assert_int_equal(err.os_errno, EPERM);
    OK(lg__store_close(x->s, f, &err));
}

static void cannot_be_mapped(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    const uint64_t larger_than_any_address_space = UINT64_C(1) << 60;
    lg_file *f = NULL;
    uint64_t bytes = 0;
    size_t mapped = 77;
    const void *data = NULL;
    void *base = NULL;
    OK(lg__store_put_new(x->s, "a", "x", 1, &err));
    OK(lg__store_open_file(x->s, "a", &f, &bytes, &err));
    replace(f, larger_than_any_address_space, 0);
    lg_status st = lg__store_map(x->s, f, 0, larger_than_any_address_space, &data, &base, &mapped, &err);
    assert_true(st == LG_ERR_NOMEM || (st == LG_ERR_IO && err.os_errno == EINVAL)); /* as valgrind puts it */
    SAYS("map a at 0: ");
    assert_null(data);
    assert_int_equal(mapped, 77);
    OK(lg__store_close(x->s, f, &err));
}

static volatile sig_atomic_t alarms;
static void count_alarm(int number)
{
    (void)number;
    alarms++;
}

static void pauses(void **state)
{
    (void)state;
    struct sigaction count = {.sa_handler = count_alarm}; /* stays: one may still be on its way afterwards */
    assert_int_equal(sigaction(SIGALRM, &count, NULL), 0);
    const struct itimerval each_ms = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    struct timespec from, to;
    alarms = 0;
    assert_int_equal(clock_gettime(CLOCK_MONOTONIC, &from), 0);
    assert_int_equal(setitimer(ITIMER_REAL, &each_ms, NULL), 0);
    lg__posix_real.pause_ms(30);
    assert_int_equal(setitimer(ITIMER_REAL, &never, NULL), 0);
    assert_int_equal(clock_gettime(CLOCK_MONOTONIC, &to), 0);
    assert_true(alarms > 0);
    assert_true((to.tv_sec - from.tv_sec) * 1000000000 + to.tv_nsec - from.tv_nsec >= 30000000);
}

/* ------------------------------------------------------------ an older kernel */

#define CACHESTAT 451

static int know_the_cache(const char *dir)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, CACHESTAT, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
        return 77;
    }
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = 4097 * page;
    char path[300];
    snprintf(path, sizeof path, "%s/a", dir);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    char *data = calloc(1, bytes);
    assert_true(fd >= 0 && data != NULL);
    assert_true(pwrite(fd, data, bytes, 0) == (ssize_t)bytes);
    free(data);
    uint64_t n = 77;
    assert_int_equal(lg__posix_real.cached(fd, 3 * page, 20 * page, &n), 0);
    assert_int_equal(n, 20 * page);
    assert_int_equal(lg__posix_real.cached(fd, page - 1, 2, &n), 0); /* whole pages count */
    assert_int_equal(n, 2 * page);
    n = 77;
    assert_int_equal(lg__posix_real.cached(fd, 0, bytes, &n), ENOTSUP); /* more than it looks at */
    assert_int_equal(n, 77);
    assert_int_equal(fsync(fd), 0);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    assert_int_equal(lg__posix_real.cached(fd, 0, 100 * page, &n), 0);
    assert_true(n <= 100 * page); /* all of it where the file system is memory */
    /* what is not known is read through the cache */
    lg__io_set(LG__IO_THREADS, LG__DIRECT_AUTO);
    atomic_bool refused = false;
    lg_file *f = lg__posix_file_new(fd, false, bytes, "a", &refused);
    assert_non_null(f);
    assert_int_equal(lg__posix_read_way(f, 0, bytes), LG_READ_QUEUED);
    lg_error err = LG_ERROR_INIT;
    OK(lg__posix_close(f, &err));
    return 0;
}

static const char *self;

static void an_older_kernels_cache(void **state)
{
    fixture *x = *state;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        execl(self, self, x->dir, (char *)NULL);
        _exit(99);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) {
        print_message("# skipped, no seccomp here\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), 0);
}

#define TEST(name, test)                  \
    {                                     \
        name, test, setup, teardown, NULL \
    }

int main(int argc, char **argv)
{
    self = argv[0];
    if (argc == 2) {
        return know_the_cache(argv[1]);
    }
    static const struct CMUnitTest tests[] = {
        TEST("a root that another process made meanwhile is used", root_made_by_another),
        TEST("K19 F305: a root that cannot be made says why, and can be made once that is put right",
             root_cannot_be_made),
        TEST("K01: a root that cannot be synced is reported", root_cannot_be_synced),
        TEST("K01 K19: a new root in a folder that cannot be read is made durable all the same", parent_cannot_be_read),
        TEST("without memory to look at its parent a root is opened and promises less",
             no_memory_to_look_at_the_parent),
        TEST("K19 F305: a file whose size may not be known is no empty file", names_without_more),
        TEST("of two that open one file past the page cache one descriptor is kept", two_open_one_file_directly),
        TEST("K01: a file that cannot be cut to what was written is reported", cannot_be_cut),
        TEST("a file that cannot be mapped is reported", cannot_be_mapped),
        TEST("a pause before a new try is not cut short by signals", pauses),
        TEST("K17: what is in the page cache is known before Linux 6.5 too", an_older_kernels_cache),
    };
    return cmocka_run_group_tests_name("posix_refused", tests, NULL, NULL);
}
