/* SPDX-License-Identifier: Apache-2.0 */
#include "io/pool.h"

#include "base/mem.h"
#include "base/thread.h"

#include <pthread.h>
#include <stdbool.h>

typedef struct ring { /* of at most `depth` jobs, in order */
    void **jobs;
    uint32_t first, n;
} ring;

struct lg__pool {
    pthread_mutex_t lock;
    pthread_cond_t work, finished;
    uint32_t depth, n_threads, idle;
    bool stop;
    void (*run)(void *job);
    ring waiting, done;
    pthread_t *threads;
};

static void put(const lg__pool *p, ring *r, void *job) { r->jobs[(r->first + r->n++) % p->depth] = job; }

static void *get(const lg__pool *p, ring *r)
{
    void *job = r->jobs[r->first];
    r->first = (r->first + 1) % p->depth;
    r->n--;
    return job;
}

static void *work(void *arg)
{
    lg__pool *p = arg;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (p->waiting.n == 0 && !p->stop) {
            p->idle++;
            pthread_cond_wait(&p->work, &p->lock);
            p->idle--;
        }
        if (p->waiting.n == 0) {
            break;
        }
        void *job = get(p, &p->waiting);
        pthread_mutex_unlock(&p->lock);
        p->run(job);
        pthread_mutex_lock(&p->lock);
        put(p, &p->done, job);
        pthread_cond_signal(&p->finished);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

lg__pool *lg__pool_new(uint32_t depth, void (*run)(void *job))
{
    lg__pool *p = lg__calloc(1, sizeof *p);
    if (p == NULL) {
        return NULL;
    }
    p->depth = depth;
    p->run = run;
    p->waiting.jobs = lg__calloc(depth, sizeof *p->waiting.jobs);
    p->done.jobs = lg__calloc(depth, sizeof *p->done.jobs);
    p->threads = lg__calloc(depth, sizeof *p->threads);
    if (p->waiting.jobs == NULL || p->done.jobs == NULL || p->threads == NULL) {
        lg__free(p->waiting.jobs);
        lg__free(p->done.jobs);
        lg__free(p->threads);
        lg__free(p);
        return NULL;
    }
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->finished, NULL);
    return p;
}

void lg__pool_add(lg__pool *p, void *job)
{
    pthread_mutex_lock(&p->lock);
    put(p, &p->waiting, job);
    if (p->waiting.n > p->idle && p->n_threads < p->depth && lg__thread_start(&p->threads[p->n_threads], work, p)) {
        p->n_threads++;
    }
    pthread_cond_signal(&p->work);
    pthread_mutex_unlock(&p->lock);
}

void *lg__pool_take(lg__pool *p)
{
    pthread_mutex_lock(&p->lock);
    void *job = NULL;
    if (p->n_threads == 0 && p->done.n == 0) {
        job = get(p, &p->waiting);
        pthread_mutex_unlock(&p->lock);
        p->run(job);
        return job;
    }
    while (p->done.n == 0) {
        pthread_cond_wait(&p->finished, &p->lock);
    }
    job = get(p, &p->done);
    pthread_mutex_unlock(&p->lock);
    return job;
}

void lg__pool_free(lg__pool *p)
{
    if (p == NULL) {
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (uint32_t i = 0; i < p->n_threads; i++) {
        pthread_join(p->threads[i], NULL);
    }
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->finished);
    pthread_mutex_destroy(&p->lock);
    lg__free(p->waiting.jobs);
    lg__free(p->done.jobs);
    lg__free(p->threads);
    lg__free(p);
}
