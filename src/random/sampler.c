/* SPDX-License-Identifier: Apache-2.0 */
#include "random/sampler.h"

#include "base/error.h"

#include <inttypes.h>

/* A permutation of [0, samples) as a keyed function, so that any place of an
 * epoch is found in constant time and memory:
 *
 * An alternating Feistel network permutes [0, 2^bits), the smallest power of
 * two that holds all samples; what falls beyond the last sample goes through it
 * again until it does not (cycle walking, fewer than two passes on average).
 * Since the network is a permutation, so is the walk, for every seed, epoch and
 * number of samples.
 *
 *   Luby, Rackoff: How to construct pseudorandom permutations from pseudorandom
 *   functions. SIAM J. Comput. 17(2), 1988.
 *   Black, Rogaway: Ciphers with arbitrary finite domains. CT-RSA 2002
 *   (cycle walking: section 4; generalised Feistel: section 5).
 *
 * The mapping is part of what a checkpoint means. It never changes: the tests
 * hold values of it. */

/* Ten rounds are what format-preserving encryption uses on large domains. On
 * tiny ones each round mixes little: with 12 rounds the 720 orders of 6 samples
 * are visibly unlike, with 24 no longer. */
#define ROUNDS 12
#define ROUNDS_SMALL 24
#define SMALL_BITS 12

/* Keeps the sampler's random bits apart from those that a trainer draws by
 * lg_philox4x32 or lg_rng with the same seed. */
#define KEY_TAG UINT64_C(0x6c672d73616d706c) /* "lg-sampl" */

static uint32_t bits_for(uint64_t samples)
{
    uint32_t bits = 0;
    while ((UINT64_C(1) << bits) < samples) {
        bits++;
    }
    return bits;
}

uint64_t lg__sampler_permute(uint64_t seed, uint64_t epoch, uint64_t samples, uint64_t position)
{
    const uint32_t bits = bits_for(samples);
    const uint32_t low_bits = bits - bits / 2; /* at most 24 each */
    const uint32_t low_mask = (UINT32_C(1) << low_bits) - 1;
    const uint32_t high_mask = (UINT32_C(1) << (bits / 2)) - 1;
    const uint32_t rounds = bits <= SMALL_BITS ? ROUNDS_SMALL : ROUNDS;
    const uint64_t k = seed ^ KEY_TAG;
    const uint32_t key[2] = {(uint32_t)k, (uint32_t)(k >> 32)};
    uint64_t x = position;
    do {
        uint32_t high = (uint32_t)(x >> low_bits), low = (uint32_t)x & low_mask;
        for (uint32_t i = 0; i < rounds; i++) {
            bool even = i % 2 == 0;
            const uint32_t counter[4] = {even ? high : low, i, (uint32_t)epoch, (uint32_t)(epoch >> 32)};
            uint32_t out[4];
            lg_philox4x32(counter, key, out);
            if (even) {
                low ^= out[0] & low_mask;
            } else {
                high ^= out[0] & high_mask;
            }
        }
        x = (uint64_t)high << low_bits | low;
    } while (x >= samples);
    return x;
}

lg_status lg_sampler_init(lg_sampler *s, uint64_t samples, uint64_t seed, uint32_t flags, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(s == NULL, err, LG_ERR_INVALID, "lg_sampler_init: s must be given");
    LG__RETURN_IF(samples == 0 || samples > LG_SAMPLER_MAX, err, LG_ERR_INVALID,
                  "lg_sampler_init: %" PRIu64 " samples; it takes 1 to 2^48", samples);
    LG__RETURN_IF((flags & ~(uint32_t)LG_SAMPLER_SEQUENTIAL) != 0, err, LG_ERR_INVALID,
                  "lg_sampler_init: unknown flags 0x%" PRIx32, flags);
    *s = (lg_sampler){.samples = samples, .seed = seed, .flags = flags};
    return LG_OK;
}

uint64_t lg_sampler_at(const lg_sampler *s, uint64_t epoch, uint64_t position)
{
    if (position >= s->samples || s->samples > LG_SAMPLER_MAX) {
        return UINT64_MAX;
    }
    if ((s->flags & LG_SAMPLER_SEQUENTIAL) != 0) {
        return position;
    }
    return lg__sampler_permute(s->seed, epoch, s->samples, position);
}

void lg__sampler_move(const lg_sampler *s, uint64_t n, uint64_t *epoch, uint64_t *position)
{
    uint64_t samples = s->samples;
    if (samples == 0 || samples > LG_SAMPLER_MAX) { /* never initialised */
        *epoch = s->epoch;
        *position = s->consumed;
        return;
    }
    uint64_t at = s->consumed % samples + n % samples; /* below 2^49 */
    uint64_t epochs = s->consumed / samples;           /* 0 unless set by hand */
    if (__builtin_add_overflow(epochs, n / samples, &epochs) || __builtin_add_overflow(epochs, at / samples, &epochs) ||
        __builtin_add_overflow(s->epoch, epochs, &epochs)) {
        epochs = UINT64_MAX;
    }
    *epoch = epochs;
    *position = at % samples;
}

uint64_t lg_sampler_peek(const lg_sampler *s, uint64_t ahead)
{
    uint64_t epoch, position;
    lg__sampler_move(s, ahead, &epoch, &position);
    return lg_sampler_at(s, epoch, position);
}

void lg_sampler_advance(lg_sampler *s, uint64_t n) { lg__sampler_move(s, n, &s->epoch, &s->consumed); }
