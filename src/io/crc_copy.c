/* SPDX-License-Identifier: Apache-2.0 */
#include "io/crc_copy.h"

#include "base/hash.h"
#include "io/buffers.h"

#ifdef __x86_64__

#include <nmmintrin.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <wmmintrin.h>

/* The crc32 instruction takes three cycles and can begin every cycle, so three
 * parts of the data go side by side; their remainders are put together by a
 * carry-less multiplication with x^n modulo the polynomial, as in Gopal and
 * others, Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction
 * (Intel, 2011). */
#define LINE ((size_t)64) /* of the cache; stores past it go in whole ones */
/* Neither it nor its double is near a page, so that loads of one part do not look
 * to the processor, which compares 12 bits, like stores to another one. */
#define PART (22 * LINE)

static bool able;
static uint32_t over_one, over_two; /* multipliers that move a remainder on by so many parts */

/* x^n modulo the polynomial, bits reversed. */
static uint32_t power(uint64_t n)
{
    uint32_t r = UINT32_C(1) << 31;
    for (; n > 0; n--) {
        r = (r >> 1) ^ ((r & 1) != 0 ? UINT32_C(0x82f63b78) : 0);
    }
    return r;
}

static void prepare(void)
{
    able = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
    /* 32 bits less for the crc32 that takes the product, one for the reversal. */
    over_one = power(8 * PART - 33);
    over_two = power(16 * PART - 33);
}

__attribute__((target("sse4.2,pclmul"))) static inline uint64_t move_on(uint64_t crc, uint32_t by)
{
    __m128i p = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc), _mm_cvtsi64_si128((long long)by), 0);
    return (uint64_t)_mm_cvtsi128_si64(p);
}

__attribute__((target("sse4.2,pclmul"))) static inline uint64_t line(char *to, const char *from, uint64_t crc)
{
    for (size_t i = 0; i < LINE; i += sizeof(__m128i)) {
        __m128i two = _mm_loadu_si128((const __m128i *)(const void *)(from + i));
        _mm_stream_si128((__m128i *)(void *)(to + i), two);
        uint64_t words[2];
        memcpy(words, from + i, sizeof words);
        crc = _mm_crc32_u64(_mm_crc32_u64(crc, words[0]), words[1]);
    }
    return crc;
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t copy_threes(char *to, const char *from, size_t bytes,
                                                                     uint32_t crc)
{
    crc = ~crc;
    for (; bytes > 0; bytes -= 3 * PART, to += 3 * PART, from += 3 * PART) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t i = 0; i < PART; i += LINE) {
            a = line(to + i, from + i, a);
            b = line(to + PART + i, from + PART + i, b);
            c = line(to + 2 * PART + i, from + 2 * PART + i, c);
        }
        crc = (uint32_t)(_mm_crc32_u64(0, move_on(a, over_two) ^ move_on(b, over_one)) ^ c);
    }
    _mm_sfence(); /* other threads see it when they see what comes next */
    return ~crc;
}

uint32_t lg__crc32c_copy_away(void *to, const void *from, size_t bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare);
    if (!able || bytes < 3 * PART + LINE || (((uintptr_t)to - (uintptr_t)from) & 4095) < LINE) {
        lg__copy_away(to, from, bytes);
        return lg__crc32c(0, from, bytes);
    }
    char *out = to;
    const char *in = from;
    size_t head = (size_t)(-(uintptr_t)to % LINE), middle = (bytes - head) / (3 * PART) * (3 * PART),
           tail = bytes - head - middle;
    memcpy(out, in, head);
    uint32_t crc = copy_threes(out + head, in + head, middle, lg__crc32c(0, in, head));
    lg__copy_away(out + head + middle, in + head + middle, tail);
    return lg__crc32c(crc, in + head + middle, tail);
}

#else

uint32_t lg__crc32c_copy_away(void *to, const void *from, size_t bytes)
{
    lg__copy_away(to, from, bytes);
    return lg__crc32c(0, from, bytes);
}

#endif
