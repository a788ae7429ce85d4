/* SPDX-License-Identifier: Apache-2.0 */
#include "log.h"

#include "fatal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct run_log {
    FILE *file;
    const char *path;
};

run_log *log_open(const char *path, uint64_t step)
{
    run_log *log = allocate(1, sizeof *log);
    log->path = path;
    log->file = fopen(path, "a+b");
    if (!log->file)
        fatal("--log %s: %s", path, strerror(errno));
    rewind(log->file);

    char line[512];
    long kept = 0;
    uint64_t next = 1;
    while (next <= step && fgets(line, sizeof line, log->file)) {
        unsigned long long n;
        if (!strchr(line, '\n') || sscanf(line, "step %llu loss", &n) != 1 || n != next)
            break;
        kept = ftell(log->file);
        next++;
    }
    if (ferror(log->file) || ftruncate(fileno(log->file), kept) != 0)
        fatal("--log %s: %s", path, strerror(errno));
    if (next <= step)
        fprintf(stderr, "gpt-c: %s has no lines for steps %llu to %llu\n", path, (unsigned long long)next,
                (unsigned long long)step);
    fseek(log->file, 0, SEEK_END);
    return log;
}

void log_step(run_log *log, const train *t)
{
    if (!log)
        return;
    uint64_t bits;
    memcpy(&bits, &t->loss, sizeof bits);
    fprintf(log->file, "step %llu loss %.17g %016llx lr %.17g norm %.17g\n", (unsigned long long)t->step, t->loss,
            (unsigned long long)bits, t->learning_rate, t->norm);
    if (fflush(log->file) != 0)
        fatal("--log %s: %s", log->path, strerror(errno));
}

void log_sync(run_log *log)
{
    if (log && fsync(fileno(log->file)) != 0 && errno != EINVAL) /* a pipe or terminal has nothing to sync */
        fatal("--log %s: %s", log->path, strerror(errno));
}

void log_close(run_log *log)
{
    if (!log)
        return;
    if (fclose(log->file) != 0)
        fatal("--log %s: %s", log->path, strerror(errno));
    free(log);
}
