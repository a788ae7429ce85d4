/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_FUZZ_H
#define LG_FUZZ_H

/* What the fuzz targets have in common. A target is one source with
 *
 *     int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
 *
 * which libFuzzer, AFL++ and driver.c call. It must come to an end for any
 * input, with an answer or a refusal, and stops the program (FUZZ_CHECK) when
 * the answer cannot be right. README.md says how to run them. */

#include <lastgood/lastgood.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* Says what is not true, straight to the descriptor since a target may have
 * silenced the streams, and ends the program. */
#define FUZZ_CHECK(cond, ...)                                               \
    do {                                                                    \
        if (!(cond)) {                                                      \
            dprintf(2, "%s:%d: not true: %s: ", __FILE__, __LINE__, #cond); \
            dprintf(2, __VA_ARGS__);                                        \
            dprintf(2, "\n");                                               \
            abort();                                                        \
        }                                                                   \
    } while (0)

/* The input as numbers; 0 behind its end. */
typedef struct fuzz_input {
    const uint8_t *at;
    size_t left;
} fuzz_input;

static inline uint64_t fuzz_number(fuzz_input *in, size_t bytes)
{
    uint64_t v = 0;
    for (size_t i = 0; i < bytes && in->left > 0; i++, in->left--) {
        v |= (uint64_t)*in->at++ << (8 * i);
    }
    return v;
}

static inline uint8_t fuzz_u8(fuzz_input *in) { return (uint8_t)fuzz_number(in, 1); }
static inline uint16_t fuzz_u16(fuzz_input *in) { return (uint16_t)fuzz_number(in, 2); }
static inline uint32_t fuzz_u32(fuzz_input *in) { return (uint32_t)fuzz_number(in, 4); }
static inline uint64_t fuzz_u64(fuzz_input *in) { return fuzz_number(in, 8); }

/* 0 to n - 1, by one byte where that is enough. */
static inline uint32_t fuzz_below(fuzz_input *in, uint32_t n)
{
    return n <= 256 ? fuzz_u8(in) % n : n <= 65536 ? fuzz_u16(in) % n : fuzz_u32(in) % n;
}

/* The input as a string, which ends at a NUL in it. free() it. */
static inline char *fuzz_string(const uint8_t *data, size_t bytes)
{
    char *s = malloc(bytes + 1);
    FUZZ_CHECK(s != NULL, "out of memory");
    if (bytes > 0) {
        memcpy(s, data, bytes);
    }
    s[bytes] = '\0';
    return s;
}

/* What every refusal owes the caller: its own status, never "a bug in
 * lastgood", and one line of text that a terminal can show. */
void fuzz_refused(lg_status status, const lg_error *err);

#endif
