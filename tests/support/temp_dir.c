/* SPDX-License-Identifier: Apache-2.0 */
#include "temp_dir.h"

#include "check.h"

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

void temp_dir_make(char out[256])
{
    const char *top = getenv("TMPDIR");
    int n = snprintf(out, 256, "%s/lastgood-test-XXXXXX", top != NULL && top[0] != '\0' ? top : "/tmp");
    if (n < 0 || n >= 256 || mkdtemp(out) == NULL || chmod(out, 0755) != 0) {
        perror("temp_dir_make");
        abort();
    }
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

void temp_dir_remove(const char *path) { nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

size_t open_descriptors(void)
{
    size_t n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d != NULL && readdir(d) != NULL) {
        n++;
    }
    if (d != NULL) {
        closedir(d);
    }
    return n;
}

int descriptors_left(size_t before)
{
    size_t left = open_descriptors();
    if (left != before) {
        print_error("%zu descriptors before, %zu after\n", before, left);
    }
    return left == before ? 0 : -1;
}

size_t count_names(const char *path)
{
    size_t n = 0;
    DIR *d = opendir(path);
    assert_non_null(d);
    while (readdir(d) != NULL) {
        n++;
    }
    closedir(d);
    return n - 2;
}

/* Through the folder's descriptor: a socket's path has room for 108 bytes only. */
void make_socket(const char *path)
{
    char folder[1024];
    snprintf(folder, sizeof folder, "%s", path);
    char *slash = strrchr(folder, '/');
    assert_non_null(slash);
    *slash = '\0';
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int at = open(folder, O_PATH | O_DIRECTORY), fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_true(at >= 0 && fd >= 0);
    assert_true((size_t)snprintf(a.sun_path, sizeof a.sun_path, "/proc/self/fd/%d/%.80s", at, slash + 1) <
                sizeof a.sun_path);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    close(fd);
    close(at);
}
