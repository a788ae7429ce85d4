/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_NUMERIC_H
#define GPT_NUMERIC_H

/* Elementary functions from additions, multiplications and divisions alone.
 *
 * libm's exp or cos may pick another variant on another CPU or in another
 * version; these give the same bits wherever float and double are IEEE 754 and
 * the compiler neither fuses nor reorders (-ffp-contract=off, no fast-math). */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The model's number. The gradient test builds the same code in double, where
 * finite differences are accurate. */
#ifdef GPT_DOUBLE
typedef double real;
#else
typedef float real;
#endif

/* e^x within 2 ulp for |x| <= 87, saturating beyond. Range reduction by ln 2,
 * then the polynomial of Cephes' expf. Branchless, so that loops vectorise. */
static inline float num_expf(float x)
{
    x = x > 87.0f ? 87.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shifter = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float shifted = x * 1.44269504088896341f + shifter;
    float n = shifted - shifter;
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (int32_t)((uint32_t)(bits - 0x4b400000 + 127) << 23); /* 2^n */
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

static inline real num_exp(real x)
{
#ifdef GPT_DOUBLE
    return exp(x);
#else
    return num_expf(x);
#endif
}

static inline real num_tanh(real x) { return (real)1 - (real)2 / (num_exp(x + x) + (real)1); }

/* Natural logarithm of a positive, finite, normal number; about 1 ulp. */
double num_log(double x);

/* cos(pi x) for 0 <= x <= 1. */
double num_cos_pi(double x);

/* base^exponent by repeated squaring. */
double num_power(double base, uint64_t exponent);

#endif
