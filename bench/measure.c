/* SPDX-License-Identifier: Apache-2.0 */
#include "measure.h"

#include <errno.h>
#include <ftw.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

_Noreturn void die(const char *what, const lg_error *err)
{
    fprintf(stderr, "bench: %s: %s\n", what, err != NULL ? err->message : strerror(errno));
    exit(1);
}

took now(void)
{
    struct timespec t, c;
    clock_gettime(CLOCK_MONOTONIC, &t);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &c);
    return (took){(double)t.tv_sec + (double)t.tv_nsec * 1e-9, (double)c.tv_sec + (double)c.tv_nsec * 1e-9};
}

took since(took start)
{
    took end = now();
    return (took){end.seconds - start.seconds, end.cpu - start.cpu};
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double median(const double *values, size_t n)
{
    double sorted[MAX_ROUNDS];
    memcpy(sorted, values, n * sizeof *values);
    qsort(sorted, n, sizeof *sorted, compare);
    return n % 2 == 1 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

void interval(const double *values, size_t n, double *low, double *high)
{
    enum { DRAWS = 2000 };
    static double medians[DRAWS];
    double drawn[MAX_ROUNDS];
    uint64_t seed = 1;
    for (size_t i = 0; i < DRAWS; i++) {
        for (size_t k = 0; k < n; k++) {
            seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
            drawn[k] = values[(seed >> 33) % n];
        }
        medians[i] = median(drawn, n);
    }
    qsort(medians, DRAWS, sizeof *medians, compare);
    *low = medians[DRAWS / 40];
    *high = medians[DRAWS - 1 - DRAWS / 40];
}

void ratio(json_t *out, const char *name, const double *a, const double *b, size_t n, bool print)
{
    double ratios[MAX_ROUNDS], low, high;
    for (size_t i = 0; i < n; i++) {
        ratios[i] = a[i] / b[i];
    }
    interval(ratios, n, &low, &high);
    const double m = median(ratios, n);
    const bool resolved = high - low <= 0.2 * m;
    json_object_set_new(out, name,
                        json_pack("{s:f,s:f,s:f,s:b}", "median", m, "low", low, "high", high, "resolved", resolved));
    if (print) {
        printf("%-26s %8.2f   %.2f to %.2f%s\n", name, m, low, high, resolved ? "" : "  (not resolved)");
    }
}

size_t memory_now(const char *what)
{
    FILE *f = fopen("/proc/self/status", "r");
    char line[256];
    size_t kb = 0;
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, what, strlen(what)) == 0) {
            kb = strtoul(line + strlen(what) + 1, NULL, 10);
        }
    }
    if (f != NULL) {
        fclose(f);
    }
    return kb * 1024;
}

void memory_restart(void)
{
    FILE *f = fopen("/proc/self/clear_refs", "w");
    if (f != NULL) {
        fputs("5", f);
        fclose(f);
    }
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st, (void)type, (void)at;
    return remove(path);
}

void remove_tree(const char *dir) { nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS); }
