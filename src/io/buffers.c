/* SPDX-License-Identifier: Apache-2.0 */
#include "io/buffers.h"

#include "base/mem.h"

#include <string.h>
#include <sys/mman.h>

#define LARGE_PAGE ((size_t)2 << 20)

lg__buffers lg__buffers_new(size_t bytes)
{
    lg__buffers b = {.bytes = bytes};
    if (bytes > SIZE_MAX - LG__IO_ALIGN) {
        return b;
    }
    b.base = lg__malloc(bytes + LG__IO_ALIGN);
    if (b.base != NULL) {
        b.data = (char *)b.base + (LG__IO_ALIGN - (uintptr_t)b.base % LG__IO_ALIGN) % LG__IO_ALIGN;
        if (bytes >= 2 * LARGE_PAGE) {
            /* Fewer faults, and fewer pages to pin for each direct transfer. */
            (void)madvise(b.data, bytes / LG__IO_ALIGN * LG__IO_ALIGN, MADV_HUGEPAGE);
        }
    }
    return b;
}

void lg__buffers_free(lg__buffers *b)
{
    lg__free(b->base);
    *b = (lg__buffers){0};
}

#define STRING_BYTES ((size_t)2048) /* the C library moves fewer without string instructions */

void lg__copy(void *to, const void *from, size_t bytes)
{
    if (!lg__copy_is_slow((uintptr_t)to, (uintptr_t)from)) {
        memcpy(to, from, bytes);
        return;
    }
    char *out = to;
    const char *in = from;
    for (size_t n; bytes > 0; bytes -= n, out += n, in += n) {
        n = bytes < STRING_BYTES ? bytes : STRING_BYTES;
        memcpy(out, in, n);
    }
}
