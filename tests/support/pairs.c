/* SPDX-License-Identifier: Apache-2.0 */
#include "pairs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *must(void *p)
{
    if (p == NULL) {
        abort();
    }
    return p;
}

static size_t find(const pairs *p, const char *key)
{
    size_t i = 0;
    while (i < p->n && strcmp(p->pair[i].key, key) != 0) {
        i++;
    }
    return i;
}

static lg_status begin(pairs *p, lg_error *err)
{
    pthread_mutex_lock(&p->lock);
    p->calls++;
    if (p->fail_from != 0 && p->calls >= p->fail_from && p->calls <= p->fail_to) {
        return lg_error_set(err, LG_ERR_COMM, "the store is down");
    }
    return LG_OK;
}

static lg_status end(pairs *p, lg_status st)
{
    pthread_mutex_unlock(&p->lock);
    return st;
}

static lg_status set(void *ctx, const char *key, const void *data, size_t bytes, lg_error *err)
{
    pairs *p = ctx;
    lg_status st = begin(p, err);
    size_t i = find(p, key);
    if (st == LG_OK && i == PAIRS_MAX) {
        st = lg_error_set(err, LG_ERR_NO_SPACE, "full");
    }
    if (st == LG_OK) {
        free(i < p->n ? p->pair[i].data : NULL);
        p->n += i == p->n;
        p->sets++;
        snprintf(p->pair[i].key, sizeof p->pair[i].key, "%s", key);
        p->pair[i].data = memcpy(must(malloc(bytes + 1)), data, bytes);
        p->pair[i].bytes = bytes;
    }
    return end(p, st);
}

static lg_status get(void *ctx, const char *key, void **data, size_t *bytes, lg_error *err)
{
    pairs *p = ctx;
    lg_status st = begin(p, err);
    size_t i = find(p, key);
    if (st == LG_OK && (i == p->n || p->asked++ % (p->hide + 1) != p->hide)) {
        st = lg_error_set(err, LG_ERR_NOT_FOUND, "no such key");
    }
    if (st == LG_OK) {
        *data = memcpy(must(malloc(p->pair[i].bytes + 1)), p->pair[i].data, p->pair[i].bytes);
        *bytes = p->pair[i].bytes;
    }
    return end(p, st);
}

static lg_status drop(void *ctx, const char *key, lg_error *err)
{
    pairs *p = ctx;
    lg_status st = begin(p, err);
    size_t i = find(p, key);
    if (st == LG_OK && i < p->n) {
        free(p->pair[i].data);
        p->pair[i] = p->pair[--p->n];
    }
    return end(p, st);
}

pairs *pairs_new(void)
{
    pairs *p = must(calloc(1, sizeof *p));
    pthread_mutex_init(&p->lock, NULL);
    return p;
}

void pairs_free(pairs *p)
{
    for (size_t i = 0; i < p->n; i++) {
        free(p->pair[i].data);
    }
    pthread_mutex_destroy(&p->lock);
    free(p);
}

lg_kv pairs_kv(pairs *p)
{
    static const lg_kv_ops ops = {LG_KV_OPS_VERSION, set, get, drop};
    return (lg_kv){&ops, p};
}
