/* SPDX-License-Identifier: Apache-2.0 */
#include "dropout.h"

#include <lastgood/lastgood.h>

void dropout_mask(real *mask, size_t count, double p, const model_dropout_key *key, uint32_t layer, dropout_site site)
{
    uint32_t threshold = (uint32_t)(p * 65536.0 + 0.5);
    real kept = (real)(65536.0 / (65536.0 - threshold));
    if (threshold == 0) {
        for (size_t i = 0; i < count; i++)
            mask[i] = 1;
        return;
    }
    uint32_t philox_key[2] = {(uint32_t)key->seed, (uint32_t)(key->seed >> 32)};
    for (size_t i = 0; i < count; i += 8) { /* eight numbers of 16 bits a call */
        uint32_t counter[4] = {(uint32_t)(i / 8), layer * 4 + (uint32_t)site, (uint32_t)key->sample,
                               (uint32_t)key->step};
        uint32_t bits[4];
        lg_philox4x32(counter, philox_key, bits);
        for (size_t j = 0; j < 8 && i + j < count; j++) {
            uint32_t number = bits[j / 2] >> (j % 2 * 16) & 0xffff;
            mask[i + j] = number < threshold ? (real)0 : kept;
        }
    }
}
