/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_RANDOM_SAMPLER_H
#define LG_RANDOM_SAMPLER_H

#include <lastgood/lastgood.h>
#include <stdbool.h>

/* The sample at `position` < `samples` <= LG_SAMPLER_MAX of the shuffled epoch. */
uint64_t lg__sampler_permute(uint64_t seed, uint64_t epoch, uint64_t samples, uint64_t position);

/* Where the sampler is after n more samples: *position < samples. The epoch
 * stops at 2^64 - 1. */
void lg__sampler_move(const lg_sampler *s, uint64_t n, uint64_t *epoch, uint64_t *position);

#endif
