/* SPDX-License-Identifier: Apache-2.0 */
#include "io/choice.h"

#include "io/uring.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static atomic_int engine, direct;
static atomic_uint_least32_t depth;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int find(const char *variable, const char *const *names, int n)
{
    const char *value = getenv(variable);
    int i = 0;
    if (value != NULL && value[0] != '\0') {
        while (i < n && strcmp(value, names[i]) != 0) {
            i++;
        }
    }
    return i;
}

static uint32_t read_depth(const char *value)
{
    if (value == NULL || value[0] == '\0') {
        return 0;
    }
    uint32_t n = 0;
    for (const char *c = value; *c != '\0'; c++) {
        if (*c < '0' || *c > '9' || n > LG__MAX_DEPTH) {
            return LG__DEPTH_UNKNOWN;
        }
        n = 10 * n + (uint32_t)(*c - '0');
    }
    return n >= 1 && n <= LG__MAX_DEPTH ? n : LG__DEPTH_UNKNOWN;
}

static void read_environment(void)
{
    static const char *const engines[] = {"auto", "uring", "threads", "blocking"};
    static const char *const directs[] = {"auto", "on", "off"};
    atomic_store(&engine, find("LASTGOOD_IO", engines, 4));
    atomic_store(&direct, find("LASTGOOD_DIRECT", directs, 3));
    atomic_store(&depth, read_depth(getenv("LASTGOOD_DEPTH")));
}

uint32_t lg__io_wanted_depth(void)
{
    pthread_once(&once, read_environment);
    return atomic_load(&depth);
}

void lg__io_set_depth(uint32_t d)
{
    pthread_once(&once, read_environment);
    atomic_store(&depth, d);
}

lg__io_engine lg__io_wanted_engine(void)
{
    pthread_once(&once, read_environment);
    return (lg__io_engine)atomic_load(&engine);
}

lg__io_direct lg__io_wanted_direct(void)
{
    pthread_once(&once, read_environment);
    return (lg__io_direct)atomic_load(&direct);
}

void lg__io_set(lg__io_engine e, lg__io_direct d)
{
    pthread_once(&once, read_environment);
    atomic_store(&engine, (int)e);
    atomic_store(&direct, (int)d);
}

const char *lg__io_engine_name(lg__io_engine e)
{
    switch (e) {
    case LG__IO_AUTO:
        return lg__uring_works() ? "uring" : "threads";
    case LG__IO_URING:
        return "uring";
    case LG__IO_THREADS:
        return "threads";
    case LG__IO_BLOCKING:
        return "blocking";
    default:
        return "?";
    }
}
