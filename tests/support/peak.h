/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_PEAK_H
#define LG_TESTS_PEAK_H

/* How much memory this process had at most. */

#include "environment.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MEASURED false /* sanitizers keep what was freed */
#else
#define MEASURED (!in_brief()) /* so does valgrind */
#endif

/* "VmRSS:", "VmHWM:" of this process. */
static inline size_t status_kib(const char *key)
{
    char line[256];
    size_t kib = 0;
    FILE *f = fopen("/proc/self/status", "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, key, strlen(key)) == 0) {
            kib = strtoul(line + strlen(key) + 1, NULL, 10);
        }
    }
    if (f != NULL) {
        fclose(f);
    }
    return kib;
}

/* Starts a measurement; false if the kernel does not let us. */
static inline bool reset_peak(void)
{
    int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
    bool ok = fd >= 0 && write(fd, "5", 1) == 1;
    if (fd >= 0) {
        close(fd);
    }
    return ok;
}

#endif
