/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_IO_BUFFERS_H
#define LG_IO_BUFFERS_H

/* Memory that data passes through on its way to and from files. */

#include <stddef.h>

#define LG__IO_ALIGN ((size_t)4096)

typedef struct lg__buffers {
    void *base; /* what lg__malloc gave */
    char *data; /* aligned to LG__IO_ALIGN */
    size_t bytes;
} lg__buffers;

/* In large pages where the kernel has some. data is NULL when memory is out. */
lg__buffers lg__buffers_new(size_t bytes);
void lg__buffers_free(lg__buffers *b); /* also when data is NULL */

#endif
