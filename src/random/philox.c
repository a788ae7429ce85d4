/* SPDX-License-Identifier: Apache-2.0 */
#include <lastgood/lastgood.h>

/* Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
 * SC'11, section 3.3 and table 2: Philox 4x32 with 10 rounds. */
#define ROUNDS 10
#define MULTIPLIER_0 UINT32_C(0xD2511F53)
#define MULTIPLIER_1 UINT32_C(0xCD9E8D57)
#define WEYL_0 UINT32_C(0x9E3779B9) /* golden ratio */
#define WEYL_1 UINT32_C(0xBB67AE85) /* sqrt(3) - 1 */

void lg_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t p0 = (uint64_t)MULTIPLIER_0 * c0;
        uint64_t p1 = (uint64_t)MULTIPLIER_1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += WEYL_0;
        k1 += WEYL_1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Word w of the stream is word w % 4 of block w / 4. */
uint32_t lg_rng_u32(lg_rng *rng)
{
    uint64_t block = rng->position / 4;
    const uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)rng->stream,
                                 (uint32_t)(rng->stream >> 32)};
    const uint32_t key[2] = {(uint32_t)rng->seed, (uint32_t)(rng->seed >> 32)};
    uint32_t out[4];
    lg_philox4x32(counter, key, out);
    return out[rng->position++ % 4];
}

uint64_t lg_rng_u64(lg_rng *rng)
{
    uint64_t low = lg_rng_u32(rng);
    return low | (uint64_t)lg_rng_u32(rng) << 32;
}

double lg_rng_f64(lg_rng *rng) { return (double)(lg_rng_u64(rng) >> 11) * 0x1p-53; }
