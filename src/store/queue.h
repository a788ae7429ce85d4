/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_STORE_QUEUE_H
#define LG_STORE_QUEUE_H

/* Reads, writes and syncs of a store's files, several under way at once: by
 * the store's own queue where it has one that works here, else on a few threads
 * that call its blocking functions, else in the caller's thread. Which one it
 * is makes no difference but to the speed. For one thread only. */

#include "store/store.h"

typedef struct lg__queue lg__queue;

/* `expected`: about how many bytes are going to be moved; small amounts are
 * not worth a ring or threads. spec->memory must outlive the queue. */
lg_status lg__queue_open(lg_store *s, const lg_queue_spec *spec, uint64_t expected, lg__queue **out, lg_error *err);

/* Waits for what is under way and drops its results. NULL is fine. */
void lg__queue_close(lg__queue *q);

uint32_t lg__queue_under_way(const lg__queue *q);
bool lg__queue_full(const lg__queue *q); /* `depth` are under way: wait first */

/* After an error the operation has not begun. */
lg_status lg__queue_submit(lg__queue *q, const lg_queue_op *op, lg_error *err);

/* Waits for any operation and returns its result. At least one is under way. */
lg_status lg__queue_wait(lg__queue *q, uint64_t *token, lg_error *err);

/* "uring", "threads", "blocking"; the first for any queue of the store's own. */
const char *lg__queue_engine(const lg__queue *q);

#endif
