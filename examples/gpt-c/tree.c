/* SPDX-License-Identifier: Apache-2.0 */
#include "tree.h"

#include <math.h>
#include <string.h>

uint32_t tree_middle(uint32_t lo, uint32_t hi)
{
    uint32_t half = 1;
    while (half < (hi - lo + 1) / 2)
        half *= 2;
    return lo + half;
}

static size_t cover(uint32_t lo, uint32_t hi, uint32_t from, uint32_t to, tree_node *out, size_t n)
{
    if (hi <= from || to <= lo)
        return n;
    if (from <= lo && hi <= to) {
        out[n++] = (tree_node){lo, hi};
        return n;
    }
    uint32_t middle = tree_middle(lo, hi);
    n = cover(lo, middle, from, to, out, n);
    return cover(middle, hi, from, to, out, n);
}

size_t tree_cover(uint32_t leaves, uint32_t from, uint32_t to, tree_node out[TREE_COVER_MAX])
{
    return from < to ? cover(0, leaves, from, to, out, 0) : 0;
}

uint32_t tree_share(uint32_t leaves, uint32_t rank, uint32_t size)
{
    return (uint32_t)((uint64_t)leaves * rank / size);
}

double tree_sum(const double *leaves, uint32_t n)
{
    if (n == 1)
        return leaves[0];
    uint32_t middle = tree_middle(0, n);
    return tree_sum(leaves, middle) + tree_sum(leaves + middle, n - middle);
}

/* Bit 0 of the first limb stands for 2^EXACT_LOWEST. The smallest square is
 * 2^-298, as a double with 53 bits of mantissa 2^-350 times an integer; the
 * largest is below 2^256. */
enum { EXACT_LOWEST = -352 };

void exact_add_square(exact_sum *sum, float x)
{
    double square = (double)x * (double)x; /* exact: 24 + 24 bits */
    if (square == 0.0)
        return;
    if (!isfinite(square)) {
        sum->not_finite++;
        return;
    }
    uint64_t bits;
    memcpy(&bits, &square, sizeof bits);
    int exponent = (int)(bits >> 52 & 0x7ff) - 1075; /* of the integer mantissa's unit */
    uint64_t mantissa = (bits & UINT64_C(0xfffffffffffff)) | UINT64_C(1) << 52;
    unsigned position = (unsigned)(exponent - EXACT_LOWEST), limb = position / 32, shift = position % 32;
    uint64_t low = (mantissa & 0xffffffff) << shift, high = (mantissa >> 32) << shift;
    sum->limbs[limb] += (int64_t)(low & 0xffffffff);
    sum->limbs[limb + 1] += (int64_t)((low >> 32) + (high & 0xffffffff));
    sum->limbs[limb + 2] += (int64_t)(high >> 32);
}

double exact_value(const exact_sum *sum)
{
    if (sum->not_finite)
        return (double)NAN;
    int64_t limbs[EXACT_LIMBS], carry = 0;
    for (int i = 0; i < EXACT_LIMBS; i++) {
        int64_t value = sum->limbs[i] + carry;
        limbs[i] = value & 0xffffffff;
        carry = value >> 32;
    }
    double value = (double)carry;
    for (int i = EXACT_LIMBS; i-- > 0;)
        value = value * 4294967296.0 + (double)limbs[i];
    return ldexp(value, EXACT_LOWEST);
}
