/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_IO_BUFFERS_H
#define LG_IO_BUFFERS_H

/* Memory that data passes through on its way to and from files. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LG__IO_ALIGN ((size_t)4096)

typedef struct lg__buffers {
    void *base; /* what lg__malloc gave */
    char *data; /* aligned to LG__IO_ALIGN */
    size_t bytes;
} lg__buffers;

/* In large pages where the kernel has some. data is NULL when memory is out. */
lg__buffers lg__buffers_new(size_t bytes);
void lg__buffers_free(lg__buffers *b); /* also when data is NULL */

/* Do two places lie so that x86's string instructions, by which the kernel and
 * the C library move much memory, run at a quarter of their speed: does the
 * destination lie 1 to 63 bytes behind the source, pages left aside? It does
 * whenever a page of a file is copied into a large block of malloc, whose
 * memory begins 16 bytes behind a page. */
static inline bool lg__copy_is_slow(uintptr_t to, uintptr_t from) { return ((to - from) & 4095) - 1 < 63; }

/* memcpy that is not slow there. */
void lg__copy(void *to, const void *from, size_t bytes);

/* The same for what is large and not soon looked at again: does not fetch the
 * destination into the processor's cache, which would cost a third more. */
void lg__copy_away(void *to, const void *from, size_t bytes);

#endif
