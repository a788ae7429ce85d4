/* SPDX-License-Identifier: Apache-2.0 */
#include "io/buffers.h"

#include "base/mem.h"

#include <string.h>
#include <sys/mman.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

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

#ifdef __SSE2__
void lg__copy_away(void *to, const void *from, size_t bytes)
{
    char *out = to;
    const char *in = from;
    size_t head = (size_t)(-(uintptr_t)to % sizeof(__m128i));
    head = head < bytes ? head : bytes;
    memcpy(out, in, head);
    out += head, in += head, bytes -= head;
    for (; bytes >= 64; bytes -= 64, out += 64, in += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(const void *)in);
        __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(in + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(in + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(const void *)(in + 48));
        _mm_stream_si128((__m128i *)(void *)out, a);
        _mm_stream_si128((__m128i *)(void *)(out + 16), b);
        _mm_stream_si128((__m128i *)(void *)(out + 32), c);
        _mm_stream_si128((__m128i *)(void *)(out + 48), d);
    }
    _mm_sfence(); /* other threads see it when they see what comes next */
    memcpy(out, in, bytes);
}
#else
void lg__copy_away(void *to, const void *from, size_t bytes) { lg__copy(to, from, bytes); }
#endif
