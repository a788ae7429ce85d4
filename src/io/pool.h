/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_IO_POOL_H
#define LG_IO_POOL_H

/* A few threads that run jobs which block. Jobs are the owner's memory; one
 * thread adds them and takes them back. */

#include <stdint.h>

typedef struct lg__pool lg__pool;

/* At most `depth` jobs are in the pool at a time, and as many threads run; they
 * start when they are needed. Where no thread can be started jobs run in
 * lg__pool_take. NULL when memory is out. */
lg__pool *lg__pool_new(uint32_t depth, void (*run)(void *job));
void lg__pool_add(lg__pool *p, void *job);
/* Waits for any job to be done. One must be in the pool. */
void *lg__pool_take(lg__pool *p);
/* Ends the threads. No job is in the pool any more. */
void lg__pool_free(lg__pool *p);

#endif
