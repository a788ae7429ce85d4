/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_VECTORS_H
#define LG_TESTS_VECTORS_H

/* Files under tests/vectors, and lists of their expected contents. */

#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct vector_file {
    uint8_t *data; /* NUL-terminated behind bytes */
    size_t bytes;
} vector_file;

/* The source tree: from the test runner, or two folders above the program. */
static inline void vectors_path(char out[1024], const char *name)
{
    const char *source = getenv("LASTGOOD_SOURCE");
    char exe[700] = ".";
    if (source == NULL) {
        ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
        exe[n > 0 ? n : 0] = '\0';
        for (int i = 0; i < 3; i++) {
            char *slash = strrchr(exe, '/');
            if (slash != NULL) {
                *slash = '\0';
            }
        }
        source = exe;
    }
    snprintf(out, 1024, "%.700s/tests/vectors/%.300s", source, name);
}

static inline vector_file vectors_read(const char *name)
{
    char path[1024];
    vectors_path(path, name);
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        fprintf(stderr, "# cannot open %s\n", path);
        abort();
    }
    vector_file v = {NULL, 0};
    size_t cap = 4096;
    v.data = malloc(cap + 1);
    for (;;) {
        v.bytes += fread(v.data + v.bytes, 1, cap - v.bytes, f);
        if (v.bytes < cap) {
            break;
        }
        cap *= 2;
        v.data = realloc(v.data, cap + 1);
    }
    v.data[v.bytes] = '\0';
    fclose(f);
    return v;
}

/* Splits a line at tabs in place; returns how many columns there are. */
static inline size_t vectors_columns(char *line, char **columns, size_t max)
{
    size_t n = 0;
    for (char *p = line; p != NULL && n < max;) {
        columns[n++] = p;
        p = strchr(p, '\t');
        if (p != NULL) {
            *p++ = '\0';
        }
    }
    return n;
}

/* Names in a folder of vectors, sorted; the count is returned. */
static inline size_t vectors_list(const char *name, char names[][64], size_t max)
{
    char path[1024];
    vectors_path(path, name);
    DIR *dir = opendir(path);
    size_t n = 0;
    for (struct dirent *e; dir != NULL && n < max && (e = readdir(dir)) != NULL;) {
        if (e->d_name[0] != '.') {
            snprintf(names[n++], 64, "%.63s", e->d_name);
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
    qsort(names, n, 64, (int (*)(const void *, const void *))strcmp);
    return n;
}

#endif
