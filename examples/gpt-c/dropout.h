/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_DROPOUT_H
#define GPT_DROPOUT_H

/* Dropout whose random numbers are a function of what is dropped, not of a
 * generator's state: Philox keyed by the run's seed, with (sample, step,
 * layer and site, position) as its counter. There is nothing to save, and any
 * rank draws the same mask for a sample. */

#include "model.h"

typedef enum dropout_site {
    DROPOUT_INPUT = 0,
    DROPOUT_ATTENTION = 1,
    DROPOUT_ATTENTION_OUT = 2,
    DROPOUT_MLP_OUT = 3
} dropout_site;

/* Sets `count` factors: 0 with probability p (to 1/65536), else 1 / (1 - p).
 * p = 0 sets ones; key may be NULL then. */
void dropout_mask(real *mask, size_t count, double p, const model_dropout_key *key, uint32_t layer, dropout_site site);

#endif
