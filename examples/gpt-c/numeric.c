/* SPDX-License-Identifier: Apache-2.0 */
#include "numeric.h"

double num_log(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 52 & 0x7ff) - 1023;
    bits = (bits & UINT64_C(0xfffffffffffff)) | UINT64_C(1023) << 52;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent++;
    }
    /* ln m = 2 artanh((m - 1) / (m + 1)), |s| <= 0.172 */
    double s = (m - 1.0) / (m + 1.0), s2 = s * s, sum = 0.0;
    for (int k = 25; k >= 1; k -= 2)
        sum = sum * s2 + 1.0 / k;
    return 2.0 * s * sum + exponent * 0.693147180559945309417;
}

double num_cos_pi(double x)
{
    /* cos(pi x) = sin(pi (1/2 - x)); Taylor series on [-pi/2, pi/2] */
    double z = 3.14159265358979323846 * (0.5 - x), z2 = z * z, sum = 1.0;
    for (int k = 25; k >= 3; k -= 2)
        sum = 1.0 - sum * z2 / (k * (k - 1));
    return z * sum;
}

double num_power(double base, uint64_t exponent)
{
    double result = 1.0;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1)
            result *= base;
        base *= base;
    }
    return result;
}
