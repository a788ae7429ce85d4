/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LASTGOOD_SAMPLER_H
#define LASTGOOD_SAMPLER_H

/* Random numbers and the position in the data, a part of lastgood.h, which
 * includes this. */

#include <lastgood/lastgood.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy
 * as 1, 2, 3; SC'11): 128 random bits from a 128-bit counter and a 64-bit key.
 * No state but what the caller keeps: key by seed, counter by (sample, layer,
 * position) makes streams that do not depend on ranks. */
LG_API void lg_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* A stream over it, for those who want one. */
typedef struct lg_rng {
    uint64_t seed;
    uint64_t stream;
    uint64_t position; /* in 32-bit words */
} lg_rng;
LG_API uint32_t lg_rng_u32(lg_rng *rng);
LG_API uint64_t lg_rng_u64(lg_rng *rng);
LG_API double lg_rng_f64(lg_rng *rng); /* [0, 1), 53 bits */

/* The elastic sampler: which sample comes when, as a function of seed and
 * epoch alone. A seeded permutation of [0, samples), computed on the fly in
 * constant memory; any number of ranks, micro-batches and workers see the same
 * global sequence. State: (seed, epoch, consumed). */
#define LG_SAMPLER_MAX (UINT64_C(1) << 48)

typedef struct lg_sampler {
    uint64_t samples; /* size of the data set, 1 to 2^48 */
    uint64_t seed;
    uint64_t epoch;
    uint64_t consumed; /* samples used by the whole run in this epoch */
    uint32_t flags;
} lg_sampler;

enum { LG_SAMPLER_SEQUENTIAL = 1u << 0 /* no shuffling */ };

LG_API lg_status lg_sampler_init(lg_sampler *s, uint64_t samples, uint64_t seed, uint32_t flags, lg_error *err);
/* The sample at `position` of epoch `epoch`, without moving; UINT64_MAX for a
 * position from `samples` on. */
LG_API uint64_t lg_sampler_at(const lg_sampler *s, uint64_t epoch, uint64_t position);
/* The sample `ahead` places from now, over epoch ends; nothing moves. */
LG_API uint64_t lg_sampler_peek(const lg_sampler *s, uint64_t ahead);
/* n samples were consumed by the whole run. */
LG_API void lg_sampler_advance(lg_sampler *s, uint64_t n);
/* Writes to and reads from a checkpoint's global state under
 * "<key>.seed|epoch|consumed|samples|flags". A data set of another size is
 * LG_ERR_MISMATCH. */
LG_API lg_status lg_sampler_save(const lg_sampler *s, lg_save *save, const char *key, lg_error *err);
LG_API lg_status lg_sampler_load(lg_sampler *s, lg_checkpoint *c, const char *key, lg_error *err);

#ifdef __cplusplus
}
#endif

#endif
