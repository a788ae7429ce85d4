/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_BASE_THREAD_H
#define LG_BASE_THREAD_H

/* Threads of the library: the program's signals are not for them. */

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* false: none can be had now. */
bool lg__thread_start(pthread_t *out, void *(*run)(void *arg), void *arg);

/* Processors that this process may use. */
uint32_t lg__processors(void);

#endif
