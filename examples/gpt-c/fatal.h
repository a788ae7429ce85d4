/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_FATAL_H
#define GPT_FATAL_H

/* How the trainer ends when it cannot go on, and memory that is there or ends
 * it. */

#include <stddef.h>

#if defined(__GNUC__)
#define GPT_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define GPT_PRINTF(fmt, args)
#endif

/* Prints one line to stderr and stops the ranks of the whole job, exit code 1. */
_Noreturn void fatal(const char *format, ...) GPT_PRINTF(1, 2);

/* Zeroed memory for count elements; ends the job when there is none. */
void *allocate(size_t count, size_t element_bytes);

#endif
