/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_BASE_THREAD_H
#define LG_BASE_THREAD_H

/* Threads of the library: the program's signals are not for them. */

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* false: none can be had now. */
bool lg__thread_start(pthread_t *out, void *(*run)(void *arg), void *arg);

/* How often this process is a child of fork: one more in each child. What must
 * not be used by children remembers it. */
uint64_t lg__forks(void);

/* Condition variables that wait by a clock that never jumps. */
void lg__cond_init(pthread_cond_t *c);
/* Waits until signalled, or `until` (lg__now_ms); false when it has passed. */
bool lg__cond_wait_until(pthread_cond_t *c, pthread_mutex_t *lock, uint64_t until);

/* The moment `ms` from now, by lg__now_ms; never before now. */
uint64_t lg__deadline(uint64_t ms);

/* Between two looks at something that cannot be waited for: a millisecond at
 * first, later a tenth of the time waited, a tenth of a second at most. */
void lg__pause(uint64_t waited_ms);

/* Processors that this process may use. */
uint32_t lg__processors(void);

#endif
