/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_place.h"

#include "text.h"

#include <lastgood/backend.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <unistd.h>

/* ------------------------------------------------------------------- folder */

lg_status bench_folder_make(const char *path, char **out, lg_error *err)
{
    char *folder = need_format("%s/" BENCH_FOLDER_PREFIX "XXXXXX", path);
    if (mkdtemp(folder) == NULL) {
        lg_status status = lg_error_set_errno(err, errno, "%s: make a folder", path);
        free(folder);
        return status;
    }
    *out = folder;
    return LG_OK;
}

/* Removes what is in a folder, whose descriptor it closes; `prefix` limits it to
 * names that begin so. Returns 0 or the first errno. */
static int remove_contents(int dir, const char *prefix)
{
    DIR *d = fdopendir(dir);
    if (d == NULL) {
        int error = errno;
        close(dir);
        return error;
    }
    int error = 0;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 ||
            strncmp(e->d_name, prefix, strlen(prefix)) != 0) {
            continue;
        }
        if (unlinkat(dir, e->d_name, 0) == 0 || errno == ENOENT) {
            continue;
        }
        int refused = errno;
        int inner = openat(dir, e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        int failed = inner >= 0 ? remove_contents(inner, "") : errno == ENOTDIR ? refused : errno;
        if (failed == 0 && unlinkat(dir, e->d_name, AT_REMOVEDIR) != 0 && errno != ENOENT) {
            failed = errno;
        }
        error = error != 0 ? error : failed;
    }
    closedir(d);
    return error;
}

lg_status bench_folder_remove(const char *folder, lg_error *err)
{
    int error = 0;
    for (int tries = 0; tries < 100; tries++) {
        int dir = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (dir < 0) {
            return errno == ENOENT ? LG_OK : lg_error_set_errno(err, errno, "%s: remove", folder);
        }
        error = remove_contents(dir, "");
        if (rmdir(folder) == 0) {
            return LG_OK;
        }
        error = error != 0 ? error : errno;
        if (error != ENOTEMPTY && error != EEXIST) {
            break;
        }
    }
    return lg_error_set_errno(err, error, "%s: remove", folder);
}

lg_status bench_steps_remove(const char *root, lg_error *err)
{
    int dir = open(root, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int error = dir < 0 ? errno : remove_contents(dir, "step-");
    return error == 0 ? LG_OK : lg_error_set_errno(err, error, "%s: remove", root);
}

size_t bench_folder_leftovers(const char *path, char name[256])
{
    size_t n = 0;
    DIR *d = opendir(path);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        if (strncmp(e->d_name, BENCH_FOLDER_PREFIX, strlen(BENCH_FOLDER_PREFIX)) == 0) {
            snprintf(name, 256, "%s", e->d_name);
            n++;
        }
    }
    if (d != NULL) {
        closedir(d);
    }
    return n;
}

/* ------------------------------------------------------------------- memory */

/* Calls fn for each line of a file, without its newline; nothing if it cannot be read. */
static void each_line(const char *path, void (*fn)(char *line, void *arg), void *arg)
{
    FILE *f = fopen(path, "re");
    char *line = NULL;
    size_t cap = 0;
    while (f != NULL && getline(&line, &cap, f) > 0) {
        line[strcspn(line, "\n")] = '\0';
        fn(line, arg);
    }
    free(line);
    if (f != NULL) {
        fclose(f);
    }
}

/* A file that holds one number; UINT64_MAX for "max" and where there is none. */
static uint64_t number_in(const char *path)
{
    unsigned long long v = 0;
    FILE *f = fopen(path, "re");
    bool read = f != NULL && fscanf(f, "%llu", &v) == 1;
    if (f != NULL) {
        fclose(f);
    }
    return read ? v : UINT64_MAX;
}

typedef struct memory_look {
    uint64_t total, available; /* of the machine */
    uint64_t cached;           /* of a control group: goes when memory is asked for */
    uint64_t room;             /* what control groups leave */
} memory_look;

static void take_meminfo(char *line, void *arg)
{
    memory_look *m = arg;
    uint64_t kib;
    if (sscanf(line, "MemTotal: %" SCNu64, &kib) == 1) {
        m->total = kib * 1024;
    } else if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1) {
        m->available = kib * 1024;
    }
}

static void take_group_cache(char *line, void *arg)
{
    memory_look *m = arg;
    uint64_t bytes;
    if (sscanf(line, "inactive_file %" SCNu64, &bytes) == 1 || sscanf(line, "active_file %" SCNu64, &bytes) == 1) {
        m->cached += bytes;
    }
}

/* One control group, of version 2 ("memory.max", "memory.current") or 1. */
static void look_at_group(memory_look *m, const char *folder, const char *limit_name, const char *used_name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, limit_name);
    uint64_t limit = number_in(path);
    snprintf(path, sizeof path, "%s/%s", folder, used_name);
    uint64_t used = number_in(path);
    if (limit == UINT64_MAX || used == UINT64_MAX) {
        return;
    }
    m->cached = 0;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    each_line(path, take_group_cache, m);
    used -= m->cached < used ? m->cached : used;
    uint64_t room = limit > used ? limit - used : 0;
    m->room = room < m->room ? room : m->room;
}

/* A line of /proc/self/cgroup: "0::/a/b" or "4:memory:/a/b". Every group on the
 * way to the top has its limit. */
static void take_group(char *line, void *arg)
{
    char *controllers = strchr(line, ':');
    char *path = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
    if (path == NULL) {
        return;
    }
    *path++ = '\0';
    bool v2 = controllers[1] == '\0';
    if (!v2 && strstr(controllers, "memory") == NULL) {
        return;
    }
    char *folder = need_format("/sys/fs/cgroup%s%s", v2 ? "" : "/memory", path);
    size_t top = strlen(v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    for (size_t n = strlen(folder); n >= top;) {
        folder[n] = '\0';
        look_at_group(arg, folder, v2 ? "memory.max" : "memory.limit_in_bytes",
                      v2 ? "memory.current" : "memory.usage_in_bytes");
        while (n > 0 && folder[--n] != '/') {
        }
    }
    free(folder);
}

static void look_at_memory(bench_machine *out)
{
    memory_look m = {.room = UINT64_MAX};
    each_line("/proc/meminfo", take_meminfo, &m);
    each_line("/proc/self/cgroup", take_group, &m);
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < m.room) {
        m.room = limit.rlim_cur;
    }
    out->memory_bytes = m.total;
    out->memory_usable = m.available < m.room ? m.available : m.room;
}

/* ------------------------------------------------------------------- device */

typedef struct mount_look {
    const char *path;
    size_t longest;
    bench_machine *out;
} mount_look;

/* "\040" is a space. */
static void unescape(char *s)
{
    char *to = s;
    for (char *p = s; *p != '\0'; to++) {
        unsigned code;
        if (*p == '\\' && sscanf(p + 1, "%3o", &code) == 1) {
            *to = (char)code;
            p += 4;
        } else {
            *to = *p++;
        }
    }
    *to = '\0';
}

static bool lies_under(const char *path, const char *folder)
{
    size_t n = strlen(folder);
    return strcmp(folder, "/") == 0 || (strncmp(path, folder, n) == 0 && (path[n] == '\0' || path[n] == '/'));
}

/* A line of /proc/self/mountinfo (proc_pid_mountinfo(5)); of mounts at one place
 * the last is on top. */
static void take_mount(char *line, void *arg)
{
    mount_look *m = arg;
    char *save = NULL, *point = NULL, *word = strtok_r(line, " ", &save);
    for (int i = 0; word != NULL && strcmp(word, "-") != 0; i++) {
        point = i == 4 ? word : point;
        word = strtok_r(NULL, " ", &save);
    }
    char *type = word != NULL ? strtok_r(NULL, " ", &save) : NULL;
    char *source = type != NULL ? strtok_r(NULL, " ", &save) : NULL;
    if (point == NULL || source == NULL) {
        return;
    }
    unescape(point);
    unescape(source);
    if (lies_under(m->path, point) && strlen(point) >= m->longest) {
        m->longest = strlen(point);
        snprintf(m->out->file_system, sizeof m->out->file_system, "%s", type);
        snprintf(m->out->device, sizeof m->out->device, "%s", source);
    }
}

static void trim_into(char *to, size_t cap, const char *from)
{
    from += strspn(from, " \t:");
    size_t n = strlen(from);
    while (n > 0 && (from[n - 1] == ' ' || from[n - 1] == '\n' || from[n - 1] == '\t')) {
        n--;
    }
    snprintf(to, cap, "%.*s", (int)n, from);
}

typedef struct text_slot {
    char *to;
    size_t cap;
} text_slot;

static void take_first_line(char *line, void *arg)
{
    text_slot *slot = arg;
    if (slot->to[0] == '\0') {
        trim_into(slot->to, slot->cap, line);
    }
}

/* Model and kind of a block device; a partition's are its disk's. */
static void look_at_device(bench_machine *out)
{
    struct stat st;
    if (stat(out->device, &st) != 0 || !S_ISBLK(st.st_mode)) {
        return;
    }
    char folder[64], real[PATH_MAX], file[PATH_MAX + 32];
    snprintf(folder, sizeof folder, "/sys/dev/block/%u:%u", major(st.st_rdev), minor(st.st_rdev));
    if (realpath(folder, real) == NULL) {
        return;
    }
    snprintf(file, sizeof file, "%s/partition", real);
    if (access(file, F_OK) == 0) {
        *strrchr(real, '/') = '\0';
    }
    snprintf(file, sizeof file, "%s/device/model", real);
    each_line(file, take_first_line, &(text_slot){out->device_model, sizeof out->device_model});
    snprintf(file, sizeof file, "%s/queue/rotational", real);
    out->rotational = number_in(file) == 1;
}

static void take_cpu(char *line, void *arg)
{
    bench_machine *out = arg;
    char *colon = strchr(line, ':');
    if (out->cpu[0] == '\0' && colon != NULL && strncmp(line, "model name", 10) == 0) {
        trim_into(out->cpu, sizeof out->cpu, colon);
    }
}

/* Whether the kernel and the container permit a ring at all: an empty request is
 * refused as invalid where they do. */
static int try_uring(void)
{
#ifdef SYS_io_uring_setup
    long fd = syscall(SYS_io_uring_setup, 0, NULL);
    if (fd >= 0) {
        close((int)fd);
        return 0;
    }
    return errno == EFAULT || errno == EINVAL ? 0 : errno;
#else
    return ENOSYS;
#endif
}

static const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && value[0] != '\0' ? value : "auto";
}

static bool one_of(const char *word, const char *const *words)
{
    while (*words != NULL && strcmp(*words, word) != 0) {
        words++;
    }
    return *words != NULL;
}

lg_status bench_machine_look(const char *path, bench_machine *out, lg_error *err)
{
    static const char *const memory[] = {"tmpfs", "ramfs", "devtmpfs", NULL};
    static const char *const remote[] = {"nfs",  "nfs4",   "cifs", "smb3", "9p",         "ceph",
                                         "gpfs", "lustre", "afs",  "fuse", "fuse.sshfs", NULL};
    *out = (bench_machine){.io = variable("LASTGOOD_IO"), .direct = variable("LASTGOOD_DIRECT")};
    char real[PATH_MAX];
    struct statvfs space;
    if (realpath(path, real) == NULL || statvfs(path, &space) != 0) {
        return lg_error_set_errno(err, errno, "%s", path);
    }
    out->space = (uint64_t)space.f_bavail * space.f_frsize;
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    out->cpus = n > 0 ? (unsigned)n : 1;
    struct utsname name;
    if (uname(&name) == 0) {
        snprintf(out->kernel, sizeof out->kernel, "%.40s %.80s %.30s", name.sysname, name.release, name.machine);
    }
    each_line("/proc/cpuinfo", take_cpu, out);
    each_line("/proc/self/mountinfo", take_mount, &(mount_look){real, 0, out});
    out->in_memory = one_of(out->file_system, memory);
    out->remote = one_of(out->file_system, remote);
    look_at_device(out);
    look_at_memory(out);
    out->uring_errno = try_uring();
    return LG_OK;
}
