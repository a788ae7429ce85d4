/* SPDX-License-Identifier: Apache-2.0 */
#include "temp_dir.h"

#include <dirent.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
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
