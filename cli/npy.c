/* SPDX-License-Identifier: Apache-2.0 */
#include "npy.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct npy {
    cli *c;
    char *path, *temporary; /* temporary NULL: standard output */
    int fd;
    bool force;
};

/* A name for the handler, which may call unlink but not much else. */
static char unfinished[4200];

static void on_signal(int number)
{
    if (unfinished[0] != '\0') {
        unlink(unfinished);
    }
    signal(number, SIG_DFL);
    raise(number);
}

static int trouble(npy *f, const char *what)
{
    return report_as(f->c, LG_ERR_IO, NULL, "%s: %s: %s", f->path, what, strerror(errno));
}

static int write_all(npy *f, const void *data, size_t bytes)
{
    const char *p = data;
    while (bytes > 0) {
        ssize_t n = write(f->fd, p, bytes < (size_t)1 << 30 ? bytes : (size_t)1 << 30);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return trouble(f, "write");
        }
        p += n;
        bytes -= (size_t)n;
    }
    return -1;
}

/* Magic, version, length, and a Python dictionary padded so that the data
 * begins at a multiple of 64 (numpy/lib/format.py). */
static int write_head(npy *f, const char *descr, uint32_t ndim, const uint64_t *shape)
{
    text t = {0};
    text_add(&t, "{'descr': '%s', 'fortran_order': False, 'shape': (", descr);
    for (uint32_t d = 0; d < ndim; d++) {
        text_add(&t, "%" PRIu64 "%s", shape[d], d + 1 < ndim ? ", " : ndim == 1 ? "," : "");
    }
    text_add(&t, "), }");
    size_t rest = (10 + t.len + 1) % 64;
    text_add(&t, "%*s\n", rest > 0 ? (int)(64 - rest) : 0, "");
    uint8_t magic[10] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (uint8_t)(t.len & 0xFF), (uint8_t)(t.len >> 8)};
    int exit_status = write_all(f, magic, sizeof magic);
    if (exit_status < 0) {
        exit_status = write_all(f, t.data, t.len);
    }
    text_free(&t);
    return exit_status;
}

static int exists_already(npy *f)
{
    return report_as(f->c, LG_ERR_EXISTS, "--force replaces it", "%s exists already", f->path);
}

static int open_temporary(npy *f)
{
    struct stat st;
    if (lstat(f->path, &st) == 0) {
        if (S_ISDIR(st.st_mode)) {
            return report_trouble(f->c, NULL, "%s is a folder", f->path);
        }
        if (!f->force) {
            return exists_already(f);
        }
    }
    f->temporary = need_format("%s.XXXXXX.tmp", f->path);
    f->fd = mkstemps(f->temporary, 4);
    if (f->fd < 0) {
        free(f->temporary);
        f->temporary = NULL;
        return trouble(f, "create");
    }
    mode_t mask = umask(0);
    umask(mask);
    fchmod(f->fd, 0666 & ~mask);
    if (strlen(f->temporary) < sizeof unfinished) {
        memcpy(unfinished, f->temporary, strlen(f->temporary) + 1);
        signal(SIGINT, on_signal);
        signal(SIGTERM, on_signal);
        signal(SIGHUP, on_signal);
    }
    return -1;
}

int npy_begin(cli *c, const char *path, bool force, const char *descr, uint32_t ndim, const uint64_t *shape, npy **out)
{
    npy *f = need_calloc(1, sizeof *f);
    f->c = c;
    f->path = need_strdup(path);
    f->force = force;
    f->fd = STDOUT_FILENO;
    int exit_status = -1;
    if (strcmp(path, "-") != 0) {
        exit_status = open_temporary(f);
    } else if (isatty(STDOUT_FILENO)) {
        exit_status =
            report_trouble(c, "give a file name, or pipe it into a program", "a .npy file is not for a terminal");
    }
    if (exit_status < 0) {
        fflush(stdout);
        exit_status = write_head(f, descr, ndim, shape);
    }
    if (exit_status >= 0) {
        npy_drop(f);
        return exit_status;
    }
    *out = f;
    return -1;
}

int npy_write(npy *f, const void *data, size_t bytes) { return write_all(f, data, bytes); }

/* Renaming without replacing, and linking, refuse what came meanwhile; not every
 * file system has one of them. */
static bool renamed(npy *f, bool *linked)
{
    struct stat st;
    *linked = false;
    if (!f->force) {
        if (renameat2(AT_FDCWD, f->temporary, AT_FDCWD, f->path, RENAME_NOREPLACE) == 0) {
            return true;
        }
        *linked = errno != EEXIST && link(f->temporary, f->path) == 0;
        if (*linked || errno == EEXIST) {
            return *linked;
        }
        if (lstat(f->path, &st) == 0) {
            errno = EEXIST;
            return false;
        }
    }
    return rename(f->temporary, f->path) == 0;
}

static int appear(npy *f)
{
    bool linked;
    if (!renamed(f, &linked)) {
        return errno == EEXIST ? exists_already(f) : trouble(f, "rename");
    }
    if (linked) {
        return -1; /* the other name goes with npy_drop */
    }
    free(f->temporary);
    f->temporary = NULL;
    unfinished[0] = '\0';
    return -1;
}

int npy_end(npy *f)
{
    int exit_status = -1;
    if (f->temporary != NULL) {
        if (fsync(f->fd) != 0) {
            exit_status = trouble(f, "sync");
        } else {
            exit_status = appear(f);
        }
    }
    npy_drop(f);
    return exit_status;
}

void npy_drop(npy *f)
{
    if (f->fd != STDOUT_FILENO && f->fd >= 0) {
        close(f->fd);
    }
    if (f->temporary != NULL) {
        unlink(f->temporary);
        unfinished[0] = '\0';
    }
    free(f->temporary);
    free(f->path);
    free(f);
}
