/* SPDX-License-Identifier: Apache-2.0 */
#include "base/thread.h"

#include "base/hash.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <time.h>
#include <unistd.h>

bool lg__thread_start(pthread_t *out, void *(*run)(void *arg), void *arg)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(out, NULL, run, arg) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

static _Atomic uint64_t forks;
static void count_fork(void) { forks++; }
static void watch_forks(void) { (void)pthread_atfork(NULL, NULL, count_fork); }

uint64_t lg__forks(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    return forks;
}

void lg__cond_init(pthread_cond_t *c)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(c, &attr);
    pthread_condattr_destroy(&attr);
}

bool lg__cond_wait_until(pthread_cond_t *c, pthread_mutex_t *lock, uint64_t until)
{
    const struct timespec t = {.tv_sec = (time_t)(until / 1000), .tv_nsec = (long)(until % 1000) * 1000000};
    return pthread_cond_timedwait(c, lock, &t) != ETIMEDOUT;
}

uint64_t lg__deadline(uint64_t ms)
{
    const uint64_t now = lg__now_ms();
    return ms > UINT64_MAX - now ? UINT64_MAX : now + ms;
}

void lg__pause(uint64_t waited_ms)
{
    const uint64_t ms = waited_ms < 10 ? 1 : waited_ms < 1000 ? waited_ms / 10 : 100;
    const struct timespec t = {.tv_nsec = (long)ms * 1000000};
    (void)clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

uint32_t lg__processors(void)
{
    cpu_set_t set;
    long n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : (uint32_t)n;
}
