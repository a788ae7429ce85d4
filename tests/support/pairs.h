/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_PAIRS_H
#define LG_TESTS_PAIRS_H

/* A key-value store in this process, whose calls can be made to fail. Aborts when
 * memory is out. */

#include <lastgood/backend.h>
#include <pthread.h>

#define PAIRS_MAX 512

typedef struct pairs {
    pthread_mutex_t lock;
    struct {
        char key[128];
        char *data;
        size_t bytes;
    } pair[PAIRS_MAX];
    size_t n;
    uint64_t calls, sets;
    uint64_t fail_from, fail_to; /* calls with these numbers, from 1, fail; 0: none */
    uint64_t hide;               /* a key is not found before it was asked for so often: a slow store */
    uint64_t asked;
} pairs;

pairs *pairs_new(void);
void pairs_free(pairs *p);
/* For session options; valid as long as p. */
lg_kv pairs_kv(pairs *p);

#endif
