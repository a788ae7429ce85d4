/* SPDX-License-Identifier: Apache-2.0 */

/* Power cuts below ext4, xfs and btrfs: sessions run on a file system whose disk
 * writes down each write and flush (support/block_disk.h). Then the disk is made
 * again as a cut may leave it, at each flush and each word of a caller with nothing
 * of what was not flushed, and at random ones with some of it, in part torn
 * between sectors; it is mounted, so that the file system repairs itself, and
 * started from. What must hold is what test_crash wants (support/crash_proof.h).
 *
 *     test_blocks                       within a minute
 *     test_blocks '*xfs*'               this file system only
 *     LASTGOOD_PROVE=full test_blocks   within ten minutes; or LASTGOOD_BLOCKS_SECONDS
 *
 * For root, with FUSE and loop devices; elsewhere it skips. LASTGOOD_SEED chooses
 * what is sampled. */

#include "io/choice.h"
#include "io/uring.h"
#include "store/posix.h"
#include "support/block_disk.h"
#include "support/crash_proof.h"
#include "support/fault_store.h"
#include "support/temp_dir.h"

#include "base/hash.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/klog.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static bool full;
static uint64_t seed = 2027;
static uint64_t budget_ms = 36000; /* of all replays */
static char base[256], at[300], disk_at[300];
static int marks_fd = -1;

typedef struct filesystem {
    const char *name, *make;
    uint64_t bytes;
} filesystem;

/* A sector is what a cut does not tear. All three take 4 KiB to be written as a
 * whole: ext4 and btrfs their superblock, which is outside of what they could
 * repair; xfs its blocks of metadata, whose changes it does not put into one again
 * that has, by its first bytes, got them. */
enum { SECTOR = 4096 };

static const filesystem ext4 = {
    "ext4", "mkfs.ext4 -q -F -b 4096 -N 1024 -E lazy_itable_init=0,lazy_journal_init=0 -J size=4", UINT64_C(64) << 20};
static const filesystem xfs = {"xfs", "mkfs.xfs -q -f -s size=4096 -d agcount=2", UINT64_C(300) << 20};
static const filesystem btrfs = {"btrfs", "mkfs.btrfs -q -f -m single -d single", UINT64_C(160) << 20};

/* -------------------------------------------------------------------- scenes */

typedef struct scene {
    const char *name;
    void (*run)(const struct scene *s, lg_store *store, const char *uri);
    uint32_t world, keep_last;
    int how;
    bool no_rename;
    uint64_t nth;         /* the change at which something comes in between */
    int (*fsync)(int fd); /* in the place of fsync; NULL: the real one */
    lg__io_engine engine; /* what moves the data, and whether past the page cache */
    lg__io_direct direct;
} scene;

static void tell(uint32_t mark, uint64_t value, uint64_t session)
{
    block_mark m = {.mark = mark, .value = value, .by = session};
    if (write(marks_fd, &m, sizeof m) != sizeof m) {
        abort();
    }
}

static void scene_act(actor *a, uint32_t world, lg_store *store)
{
    lg_error err = LG_ERROR_INIT;
    lg_status st = act(a, world, store, &err);
    if (st != LG_OK && !a->may_fail) {
        fprintf(stderr, "# session %llu: %s: %s\n", (unsigned long long)a->session, lg_status_name(st), err.message);
        _exit(1);
    }
}

static void first_save(const scene *s, lg_store *store)
{
    actor first = {.tell = tell, .session = 1, .steps = {10}, .n_steps = 1, .keep_last = s->keep_last};
    scene_act(&first, s->world, store);
}

static void saves(const scene *s, lg_store *store, const char *uri)
{
    (void)uri;
    first_save(s, store);
    actor second = {
        .tell = tell, .session = 2, .steps = {20, 30, 40}, .n_steps = 3, .keep_last = s->keep_last, .how = s->how};
    scene_act(&second, s->world, store);
}

typedef struct intruder {
    const scene *s;
    lg_store *store;
    atomic_bool ready;
    atomic_uint_least64_t seen;
} intruder;

static lg_status take_over(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)f;
    intruder *i = arg;
    if (!before || !i->ready || (FAULT_BIT(event->op) & FAULT_CHANGES) == 0 || ++i->seen != i->s->nth) {
        return LG_OK;
    }
    actor other = {.tell = tell, .session = 3, .steps = {1000, 1010}, .n_steps = 2, .keep_last = i->s->keep_last};
    return act(&other, 1, i->store, err);
}

static void taken_over(const scene *s, lg_store *store, const char *uri)
{
    (void)uri;
    first_save(s, store);
    intruder i = {.s = s, .store = store};
    fault_store *f = fault_store_new(store);
    fault_store_set_hook(f, take_over, &i);
    actor old = {.tell = tell,
                 .session = 2,
                 .steps = {20, 30},
                 .n_steps = 2,
                 .keep_last = s->keep_last,
                 .how = s->how,
                 .may_fail = true,
                 .ready = &i.ready};
    scene_act(&old, s->world, fault_store_handle(f));
    fault_store_free(f);
    if (i.seen < s->nth) {
        fprintf(stderr, "# there was no change number %llu\n", (unsigned long long)s->nth);
        _exit(1);
    }
}

static void killed(const scene *s, lg_store *store, const char *uri)
{
    (void)uri;
    first_save(s, store);
    fault_store *f = fault_store_new(store);
    fault_store_arm(f, (fault_plan){.kinds = FAULT_CHANGES, .nth = s->nth, .how = FAULT_DIE_TORN, .os_errno = EIO});
    actor second = {.tell = tell, .session = 2, .steps = {20}, .n_steps = 1, .keep_last = s->keep_last, .how = s->how};
    second.may_fail = second.dies = true;
    scene_act(&second, s->world, fault_store_handle(f));
    fault_store_free(f);
    actor third = {.tell = tell, .session = 3, .steps = {30, 40}, .n_steps = 2, .keep_last = s->keep_last};
    scene_act(&third, s->world, store);
}

static void rolled_back(const scene *s, lg_store *store, const char *uri)
{
    lg_error err = LG_ERROR_INIT;
    char where[400];
    actor first = {.tell = tell, .session = 1, .steps = {10, 20}, .n_steps = 2};
    scene_act(&first, s->world, store);
    snprintf(where, sizeof where, "%s@10", uri);
    tell(ROLLBACK_BEGUN, 10, 2);
    if (lg_rollback(where, "a test", NULL, &err) != LG_OK) {
        fprintf(stderr, "# rollback: %s\n", err.message);
        _exit(1);
    }
    tell(ROLLBACK_DONE, 10, 2);
    actor second = {.tell = tell, .session = 3, .steps = {15, 25}, .n_steps = 2};
    scene_act(&second, s->world, store);
}

/* ------------------------------------------------------------------- recording */

static lg_store *open_root(bool no_rename, lg_store **inner, char uri[400])
{
    lg_error err = LG_ERROR_INIT;
    lg_store *store;
    snprintf(uri, 400, "file:%s/root", at);
    lg_status st = lg_store_open(uri, inner, &err);
    store = *inner;
    if (st == LG_OK && no_rename) {
        st = lg_store_without(*inner, LG_CAP_RENAME_DIR | LG_CAP_NO_REPLACE, &store, &err);
    }
    if (st != LG_OK) {
        fprintf(stderr, "# %s: %s\n", uri, err.message);
        return NULL;
    }
    return store;
}

static void run_scene(const scene *s)
{
    char uri[400];
    lg_store *inner, *store = open_root(s->no_rename, &inner, uri);
    if (store == NULL) {
        _exit(1);
    }
    if (s->engine != LG__IO_AUTO) {
        lg__io_set(s->engine, s->direct);
    }
    if (s->fsync != NULL) {
        lg__io_set(LG__IO_BLOCKING, LG__DIRECT_AUTO);
        lg__posix.fsync = s->fsync;
    }
    s->run(s, store, uri);
    if (store != inner) {
        lg_store_free(store);
    }
    lg_store_free(inner);
    _exit(0);
}

static int new_image(const filesystem *fs, const char *name, bool make)
{
    char path[400], command[1500];
    snprintf(path, sizeof path, "%s/%s", base, name);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)fs->bytes), 0);
    if (make) {
        snprintf(command, sizeof command, "{ %s %s && fallocate -d %s; } >/dev/null 2>%s/mkfs.log", fs->make, path,
                 path, base);
        if (system(command) != 0) {
            snprintf(command, sizeof command, "cat %s/mkfs.log >&2", base);
            (void)!system(command);
            fail_msg("mkfs.%s failed", fs->name);
        }
    }
    return fd;
}

/* The data of `from` are those of `to`, holes included. */
static void copy_image(int from, int to, uint64_t bytes)
{
    assert_int_equal(fallocate(to, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)bytes), 0);
    for (off_t data = lseek(from, 0, SEEK_DATA); data >= 0;) {
        off_t end = lseek(from, data, SEEK_HOLE), in = data, out = data;
        while (in < end) {
            ssize_t n = copy_file_range(from, &in, to, &out, (size_t)(end - in), 0);
            assert_true(n > 0);
        }
        data = lseek(from, end, SEEK_DATA);
    }
}

/* Unmounts; a next state must not be judged by what is still mounted. */
static void let_go(const filesystem *fs)
{
    for (int i = 0; umount(at) != 0; i++) {
        if (errno != EBUSY || i == 1000) {
            fail_msg("%s cannot be unmounted: %s", fs->name, strerror(errno));
        }
        usleep(10000);
    }
}

static block_log record_scene(const filesystem *fs, const scene *s, int base_fd)
{
    char why[256] = "", loop[64], marks[400], path[400];
    block_disk d;
    block_log log;
    int disk = new_image(fs, "recorded", false);
    copy_image(base_fd, disk, fs->bytes);
    if (!block_disk_start(&d, disk_at, disk, why)) {
        fail_msg("%s", why);
    }
    snprintf(path, sizeof path, "%s/disk", disk_at);
    int file = open(path, O_RDWR | O_CLOEXEC);
    assert_true(file >= 0);
    int fd = loop_attach(file, SECTOR, loop, why);
    close(file);
    if (fd < 0 || mount(loop, at, fs->name, MS_NOATIME, NULL) != 0) {
        fail_msg("%s: mount: %s %s", fs->name, strerror(errno), why);
    }
    snprintf(marks, sizeof marks, "%s/marks", disk_at);
    marks_fd = open(marks, O_WRONLY | O_CLOEXEC);
    assert_true(marks_fd >= 0);
    snprintf(path, sizeof path, "%s/root", at);
    assert_int_equal(mkdir(path, 0755), 0);
    int top = open(at, O_RDONLY | O_CLOEXEC); /* root's name is not what is tested */
    assert_int_equal(fsync(top), 0);
    close(top);
    tell(RESUMED, NONE, 0); /* from here on a cut is looked at */
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        run_scene(s);
    }
    int status = -1;
    waitpid(child, &status, 0);
    close(marks_fd);
    let_go(fs);
    close(fd);
    bool good = block_disk_stop(&d, &log, why);
    close(disk);
    if (!good || status != 0) {
        fail_msg("%s: %s ended with %d: %s", fs->name, s->name, status, why);
    }
    return log;
}

/* ------------------------------------------------------------------- replaying */

typedef struct replay {
    const filesystem *fs;
    const scene *s;
    const block_log *log;
    int durable, work, loop_fd; /* images; the loop device over `work` */
    char loop[64];
    uint64_t random;
    size_t pending[65536];
    size_t n_pending;
    uint64_t flushes, points, partial, torn; /* partial: states with some of what was not flushed */
    counts c;
    char why[1024]; /* "": all was right */
} replay;

static bool put_range(int fd, const block_entry *e, uint64_t from, uint64_t bytes)
{
    if (e->kind == BLOCK_ZERO) {
        return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(e->offset + from), (off_t)bytes) == 0;
    }
    return pwrite(fd, e->data + from, bytes, (off_t)(e->offset + from)) == (ssize_t)bytes;
}

/* All of it, or random ones of its sectors. */
static void put_entry(replay *r, int fd, const block_entry *e, bool tear)
{
    const uint64_t unit = tear ? SECTOR : e->bytes;
    for (uint64_t from = 0; from < e->bytes; from += unit) {
        uint64_t bytes = e->bytes - from < unit ? e->bytes - from : unit;
        if (!tear || crash_random(&r->random) % 2 == 0) {
            assert_true(put_range(fd, e, from, bytes));
        }
    }
}

static void started(replay *r, const expect *e)
{
    char uri[400];
    lg_store *inner, *store = open_root(r->s->no_rename, &inner, uri);
    if (store == NULL) {
        snprintf(r->why, sizeof r->why, "the root cannot be opened");
        return;
    }
    verdict v = {""};
    const uint32_t other = r->s->world == 2 ? 3 : 2;
    const bool alone = r->points % 2 == 0;
    if (!proof_check(e, store, alone ? 1 : other, alone ? other : 1, &r->c, &v)) {
        snprintf(r->why, sizeof r->why, "%s", v.why);
    }
    if (store != inner) {
        lg_store_free(store);
    }
    lg_store_free(inner);
}

/* The last that the kernel said: why it does not mount. */
static void print_kernel(void)
{
    enum { READ_ALL = 3, LINES = 12 };
    static char said[1 << 16];
    const int got = klogctl(READ_ALL, said, sizeof said - 1);
    if (got <= 0) {
        return;
    }
    said[got] = '\0';
    const char *from = said + got;
    for (int lines = 0; from > said && (from[-1] != '\n' || lines++ <= LINES); from--) {
    }
    for (const char *line = from, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        print_message("# kernel: %.*s\n", (int)(end - line), line);
    }
}

/* Makes one state, with the share `odds` of 256 of the first `n` of what is
 * pending, and starts from it. */
static void visit(replay *r, const expect *e, size_t entry, size_t n, uint32_t odds)
{
    copy_image(r->durable, r->work, r->fs->bytes);
    for (size_t i = 0; i < n && odds > 0; i++) {
        if (crash_random(&r->random) % 256 < odds) {
            bool tear = crash_random(&r->random) % 4 == 0;
            r->torn += tear;
            put_entry(r, r->work, &r->log->entries[r->pending[i]], tear);
        }
    }
    r->points++;
    r->partial += odds > 0;
    assert_int_equal(ioctl(r->loop_fd, BLKFLSBUF), 0); /* what it knows of the state before */
    if (mount(r->loop, at, r->fs->name, MS_NOATIME, NULL) != 0) {
        snprintf(r->why, sizeof r->why, "%s does not mount: %s", r->fs->name, strerror(errno));
        print_kernel();
    } else {
        started(r, e);
        let_go(r->fs);
    }
    if (r->why[0] != '\0') {
        size_t used = strlen(r->why);
        snprintf(r->why + used, sizeof r->why - used,
                 " (%s, %s, seed %llu, entry %zu of %zu, %zu not flushed, odds %u)", r->fs->name, r->s->name,
                 (unsigned long long)seed, entry, r->log->n, n, odds);
    }
}

/* Once through the log. Round 0 looks at each `stride`-th flush and mark with
 * nothing pending, later ones at random moments with something. */
static void go_through(replay *r, int base_fd, uint64_t round, uint64_t stride, uint64_t until_ms)
{
    copy_image(base_fd, r->durable, r->fs->bytes);
    expect e = {.keep_last = r->s->keep_last};
    bool begun = false;
    uint64_t nth = 0;
    r->n_pending = 0;
    for (size_t i = 0; i < r->log->n && r->why[0] == '\0' && lg__now_ms() < until_ms; i++) {
        const block_entry *entry = &r->log->entries[i];
        const bool flush = entry->kind == BLOCK_FLUSH;
        if (entry->kind == BLOCK_WRITE || entry->kind == BLOCK_ZERO) {
            assert_true(r->n_pending < sizeof r->pending / sizeof *r->pending);
            r->pending[r->n_pending++] = i;
            continue;
        }
        if (begun && round > 0 && r->n_pending > 0 && crash_random(&r->random) % 8 == 0) {
            const size_t n = 1 + crash_random(&r->random) % r->n_pending;
            visit(r, &e, i, n, 32 + (uint32_t)(crash_random(&r->random) % 8) * 32);
        }
        if (flush) {
            for (size_t k = 0; k < r->n_pending; k++) {
                put_entry(r, r->durable, &r->log->entries[r->pending[k]], false);
            }
            r->n_pending = 0;
        } else {
            begun = true;
            proof_hear(&e, &(crash_event){.kind = CRASH_MARK,
                                          .mark = entry->mark.mark,
                                          .value = entry->mark.value,
                                          .by = entry->mark.by});
            if (e.broken) {
                snprintf(r->why, sizeof r->why, "entry %zu: a session resumed from a step that was not there", i);
            }
        }
        if (begun && round == 0 && r->why[0] == '\0') {
            r->flushes += flush;
            if (nth++ % stride == 0 || (!flush && entry->mark.mark == DONE)) {
                visit(r, &e, i, 0, 0);
            }
        }
    }
}

/* Records the scene on a new file system and replays it for so long; what is
 * wrong, or "". The first round comes to its end. */
static void prove_scene(const filesystem *fs, const scene *s, uint64_t ms, char why[1024])
{
    char reason[256];
    const uint64_t began = lg__now_ms();
    int base_fd = new_image(fs, "base", true);
    block_log log = record_scene(fs, s, base_fd);
    static replay r;
    r = (replay){.fs = fs, .s = s, .log = &log, .random = seed | 1};
    r.durable = new_image(fs, "durable", false);
    r.work = new_image(fs, "work", false);
    r.loop_fd = loop_attach(r.work, SECTOR, r.loop, reason);
    if (r.loop_fd < 0) {
        fail_msg("%s", reason);
    }
    go_through(&r, base_fd, 0, full ? 1 : 12, UINT64_MAX);
    uint64_t rounds = 1;
    for (; r.why[0] == '\0' && lg__now_ms() - began < ms; rounds++) {
        go_through(&r, base_fd, rounds, 1, began + ms);
    }
    close(r.loop_fd);
    close(r.work), close(r.durable), close(base_fd);
    print_message("# %s, %s: %zu entries, %llu flushes, %llu states (%llu with unflushed writes, %llu writes torn), "
                  "%llu resumes: %llu older, %llu newer, %llu empty; %llu rounds, %llu s\n",
                  fs->name, s->name, log.n, (unsigned long long)r.flushes, (unsigned long long)r.points,
                  (unsigned long long)r.partial, (unsigned long long)r.torn, (unsigned long long)r.c.resumes,
                  (unsigned long long)r.c.older, (unsigned long long)r.c.newer, (unsigned long long)r.c.empty,
                  (unsigned long long)rounds, (unsigned long long)(lg__now_ms() - began) / 1000);
    block_log_free(&log);
    memcpy(why, r.why, sizeof r.why);
}

static const scene scenes[] = {
    {.name = "saves of one rank, the last one kept", .run = saves, .world = 1, .keep_last = 1},
    {.name = "background saves of 2 ranks, one after the other", .run = saves, .world = 2, .how = LAUNCH_ON},
    {.name = "takeover, the last two kept", .run = taken_over, .world = 1, .keep_last = 2, .nth = 18},
    {.name = "saves of 3 ranks without folder rename, the last one kept",
     .run = saves,
     .world = 3,
     .keep_last = 1,
     .no_rename = true},
    {.name = "killed in a background save, resumed",
     .run = killed,
     .world = 1,
     .keep_last = 1,
     .nth = 26,
     .how = LAUNCH_AND_WAIT},
    {.name = "rollback", .run = rolled_back, .world = 2},
    /* In full only. What is this small would use no engine. */
    {.name = "background saves of 2 ranks through io_uring past the page cache",
     .run = saves,
     .world = 2,
     .how = LAUNCH_ON,
     .engine = LG__IO_URING,
     .direct = LG__DIRECT_ON},
    {.name = "background saves of 2 ranks through io_uring",
     .run = saves,
     .world = 2,
     .how = LAUNCH_ON,
     .engine = LG__IO_URING,
     .direct = LG__DIRECT_OFF},
    {.name = "background saves of 2 ranks by threads past the page cache",
     .run = saves,
     .world = 2,
     .how = LAUNCH_ON,
     .engine = LG__IO_THREADS,
     .direct = LG__DIRECT_ON},
};

static void skip_unless_possible(const filesystem *fs)
{
    char command[100];
    snprintf(command, sizeof command, "command -v mkfs.%s >/dev/null", fs->name);
    if (system(command) != 0) {
        print_message("# skipped: there is no mkfs.%s\n", fs->name);
        skip();
    }
    snprintf(command, sizeof command, "grep -qw %s /proc/filesystems || modprobe -q %s", fs->name, fs->name);
    if (system(command) != 0) {
        print_message("# skipped: this kernel has no %s\n", fs->name);
        skip();
    }
}

static void loses_nothing_on(const filesystem *fs)
{
    skip_unless_possible(fs);
    const size_t n = full ? sizeof scenes / sizeof *scenes : 2;
    for (size_t i = 0; i < n; i++) {
        /* the short form: another pair on each file system */
        const size_t which = full ? i : (2 * (size_t)(fs == &xfs ? 1 : fs == &btrfs ? 2 : 0) + i);
        char why[1024];
        if (scenes[which].engine == LG__IO_URING && !lg__uring_works()) {
            print_message("# %s, left out: %s: io_uring does not work here\n", fs->name, scenes[which].name);
            continue;
        }
        prove_scene(fs, &scenes[which], budget_ms / 3 / n, why);
        if (why[0] != '\0') {
            fail_msg("%s", why);
        }
    }
}

static void k01_k02_k14_a_power_cut_below_ext4_loses_nothing_that_was_committed(void **state)
{
    (void)state;
    loses_nothing_on(&ext4);
}

static void k01_k02_k14_a_power_cut_below_xfs_loses_nothing_that_was_committed(void **state)
{
    (void)state;
    loses_nothing_on(&xfs);
}

static void k01_k02_k14_a_power_cut_below_btrfs_loses_nothing_that_was_committed(void **state)
{
    (void)state;
    loses_nothing_on(&btrfs);
}

/* --------------------------------------------------------- is it able to fail? */

static bool is_at(int fd, const char *end)
{
    char link[64], path[600];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = '\0';
    return n >= (ssize_t)strlen(end) && strcmp(path + n - strlen(end), end) == 0;
}

static int no_manifest_sync(int fd) { return is_at(fd, "/lastgood.json") ? 0 : fsync(fd); }
static int no_root_sync(int fd) { return is_at(fd, "/root") ? 0 : fsync(fd); }

static void a_sync_that_is_left_out_is_noticed_on(const filesystem *fs)
{
    skip_unless_possible(fs);
    const scene manifest = {
        .name = "(no sync of the manifest)", .run = saves, .world = 1, .keep_last = 1, .fsync = no_manifest_sync};
    const scene root = {
        .name = "(no sync of the root)", .run = saves, .world = 1, .keep_last = 1, .fsync = no_root_sync};
    char why[1024];
    prove_scene(fs, &manifest, 60000, why);
    print_message("# noticed: %s\n", why);
    assert_non_null(strstr(why, "lastgood.json"));
    prove_scene(fs, &root, 60000, why);
    print_message("# noticed: %s\n", why);
    assert_non_null(strstr(why, "checkpoint"));
}

static void a_sync_that_is_left_out_is_noticed_on_ext4(void **state)
{
    (void)state;
    a_sync_that_is_left_out_is_noticed_on(&ext4);
}

static void a_sync_that_is_left_out_is_noticed_on_xfs(void **state)
{
    (void)state;
    a_sync_that_is_left_out_is_noticed_on(&xfs);
}

static void a_sync_that_is_left_out_is_noticed_on_btrfs(void **state)
{
    (void)state;
    a_sync_that_is_left_out_is_noticed_on(&btrfs);
}

/* Mounts of this process are seen by it and its children alone, and go with it. */
static const char *why_not(void)
{
    if (geteuid() != 0) {
        return "only root can mount file systems";
    }
    int fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (fuse < 0) {
        return "/dev/fuse cannot be opened";
    }
    close(fuse);
    /* Containers show the devices and refuse to use them. */
    static char why[256];
    char path[64];
    int file = memfd_create("image", MFD_CLOEXEC);
    int loop = file >= 0 && ftruncate(file, 1 << 20) == 0 ? loop_attach(file, 512, path, why) : -1;
    close(file);
    if (loop < 0) {
        return why[0] != '\0' ? why : "no file in memory can be made";
    }
    close(loop);
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
        return "there are no mount namespaces";
    }
    return NULL;
}

int main(int argc, char **argv)
{
    const char *how = getenv("LASTGOOD_PROVE"), *seed_env = getenv("LASTGOOD_SEED");
    const char *seconds = getenv("LASTGOOD_BLOCKS_SECONDS");
    setvbuf(stdout, NULL, _IOLBF, 0);
    full = how != NULL && strcmp(how, "full") == 0;
    seed = seed_env != NULL ? strtoull(seed_env, NULL, 0) | 1 : 2027;
    budget_ms = seconds != NULL ? strtoull(seconds, NULL, 10) * 1000 : full ? 520000 : budget_ms;
    print_message("# seed %llu%s\n", (unsigned long long)seed, full ? ", in full" : "");
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    const char *cannot = why_not();
    if (cannot != NULL) {
        print_message("1..0 # SKIP %s\n", cannot);
        return 77;
    }
    if (getenv("TMPDIR") == NULL && access("/dev/shm", W_OK) == 0) {
        setenv("TMPDIR", "/dev/shm", 1); /* images that are made again for each state */
    }
    temp_dir_make(base);
    snprintf(at, sizeof at, "%s/mnt", base);
    snprintf(disk_at, sizeof disk_at, "%s/fuse", base);
    if (mkdir(at, 0700) != 0 || mkdir(disk_at, 0700) != 0) {
        perror(base);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k01_k02_k14_a_power_cut_below_ext4_loses_nothing_that_was_committed),
        cmocka_unit_test(k01_k02_k14_a_power_cut_below_xfs_loses_nothing_that_was_committed),
        cmocka_unit_test(k01_k02_k14_a_power_cut_below_btrfs_loses_nothing_that_was_committed),
        cmocka_unit_test(a_sync_that_is_left_out_is_noticed_on_ext4),
        cmocka_unit_test(a_sync_that_is_left_out_is_noticed_on_xfs),
        cmocka_unit_test(a_sync_that_is_left_out_is_noticed_on_btrfs),
    };
    int failed = cmocka_run_group_tests_name("blocks", tests, NULL, NULL);
    umount2(at, MNT_DETACH);
    umount2(disk_at, MNT_DETACH);
    temp_dir_remove(base);
    return failed;
}
