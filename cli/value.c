/* SPDX-License-Identifier: Apache-2.0 */
#include "value.h"

#include "report.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------- floats of few bits */

typedef struct small_float {
    int exponent_bits, mantissa_bits, bias;
    /* IEEE: the highest exponent is inf and nan. FN: only all ones is nan.
     * FNUZ: only "minus zero" is nan. */
    enum { IEEE, FN, FNUZ } kind;
} small_float;

static double decode(const small_float *f, uint32_t bits)
{
    uint32_t mantissa = bits & ((1u << f->mantissa_bits) - 1);
    uint32_t top = (1u << f->exponent_bits) - 1, exponent = bits >> f->mantissa_bits & top;
    bool minus = (bits >> (f->exponent_bits + f->mantissa_bits) & 1) != 0;
    double v;
    if (f->kind == IEEE && exponent == top) {
        v = mantissa == 0 ? INFINITY : NAN;
    } else if (f->kind == FN && exponent == top && mantissa == (1u << f->mantissa_bits) - 1) {
        v = NAN;
    } else if (f->kind == FNUZ && minus && exponent == 0 && mantissa == 0) {
        return NAN;
    } else if (exponent == 0) {
        v = ldexp(mantissa, 1 - f->bias - f->mantissa_bits);
    } else {
        v = ldexp(mantissa + (1u << f->mantissa_bits), (int)exponent - f->bias - f->mantissa_bits);
    }
    return minus ? -v : v;
}

static float bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &wide, sizeof f);
    return f;
}

static uint64_t bits_of(lg_dtype dtype, const void *element)
{
    const uint8_t *p = element;
    uint64_t v = 0;
    for (unsigned i = lg_dtype_bits(dtype) / 8; i-- > 0;) {
        v = v << 8 | p[i];
    }
    return v;
}

static float float_at(const void *element)
{
    uint32_t bits = (uint32_t)bits_of(LG_F32, element);
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

double value_double(lg_dtype dtype, const void *element)
{
    static const small_float f16 = {5, 10, 15, IEEE}, e5m2 = {5, 2, 15, IEEE}, e4m3 = {4, 3, 7, FN},
                             e4m3fnuz = {4, 3, 8, FNUZ}, e5m2fnuz = {5, 2, 16, FNUZ};
    uint64_t bits = bits_of(dtype, element);
    double d;
    switch (dtype) {
    case LG_F64:
        memcpy(&d, &bits, sizeof d);
        return d;
    case LG_F32:
    case LG_C64:
        return (double)float_at(element);
    case LG_BF16:
        return (double)bf16((uint16_t)bits);
    case LG_F16:
        return decode(&f16, (uint32_t)bits);
    case LG_F8_E5M2:
        return decode(&e5m2, (uint32_t)bits);
    case LG_F8_E4M3:
        return decode(&e4m3, (uint32_t)bits);
    case LG_F8_E4M3FNUZ:
        return decode(&e4m3fnuz, (uint32_t)bits);
    case LG_F8_E5M2FNUZ:
        return decode(&e5m2fnuz, (uint32_t)bits);
    case LG_F8_E8M0: /* an exponent alone; no sign, no zero */
        return bits == 0xFF ? (double)NAN : ldexp(1, (int)bits - 127);
    default:
        return 0;
    }
}

/* --------------------------------------------------------------------- text */

static int float_text(double v, bool wide, char *out, size_t bytes)
{
    if (isnan(v)) {
        return snprintf(out, bytes, "nan");
    }
    if (isinf(v)) {
        return snprintf(out, bytes, "%sinf", v < 0 ? "-" : "");
    }
    int n = 0;
    for (int digits = wide ? 15 : 6; digits <= (wide ? 17 : 9); digits++) {
        n = snprintf(out, bytes, "%.*g", digits, v);
        if (wide ? strtod(out, NULL) == v : strtof(out, NULL) == (float)v) {
            break;
        }
    }
    if (strpbrk(out, ".en") == NULL && (size_t)n + 2 < bytes) { /* "1.0": a number with a point */
        memcpy(out + n, ".0", 3);
        n += 2;
    }
    return n;
}

static int64_t signed_of(lg_dtype dtype, uint64_t bits)
{
    switch (dtype) {
    case LG_I8:
        return (int8_t)bits;
    case LG_I16:
        return (int16_t)bits;
    case LG_I32:
        return (int32_t)bits;
    default:
        return (int64_t)bits;
    }
}

static bool is_signed(lg_dtype dtype)
{
    return dtype == LG_I8 || dtype == LG_I16 || dtype == LG_I32 || dtype == LG_I64;
}

static bool is_unsigned(lg_dtype dtype)
{
    return dtype == LG_U8 || dtype == LG_U16 || dtype == LG_U32 || dtype == LG_U64;
}

const char *value_text(lg_dtype dtype, const void *element, char out[VALUE_TEXT])
{
    uint64_t bits = bits_of(dtype, element);
    if (dtype == LG_BOOL) {
        /* Anything but 0 and 1 is no valid boolean, but true to most readers. */
        snprintf(out, VALUE_TEXT, bits > 1 ? "true(%" PRIu64 ")" : bits == 1 ? "true" : "false", bits);
    } else if (is_signed(dtype)) {
        snprintf(out, VALUE_TEXT, "%" PRId64, signed_of(dtype, bits));
    } else if (is_unsigned(dtype)) {
        snprintf(out, VALUE_TEXT, "%" PRIu64, bits);
    } else if (dtype == LG_C64) {
        int n = float_text((double)float_at(element), false, out, VALUE_TEXT / 2);
        double imaginary = (double)float_at((const char *)element + 4);
        if (!signbit(imaginary) || isnan(imaginary)) {
            out[n++] = '+';
        }
        n += float_text(imaginary, false, out + n, VALUE_TEXT / 2 - 3);
        memcpy(out + n, "j", 2);
    } else {
        float_text(value_double(dtype, element), dtype == LG_F64, out, VALUE_TEXT);
    }
    return out;
}

json_t *value_json(lg_dtype dtype, const void *element)
{
    uint64_t bits = bits_of(dtype, element);
    if (dtype == LG_BOOL) {
        return bits > 1 ? json_u64(bits) : json_boolean(bits == 1);
    }
    if (is_signed(dtype)) {
        int64_t v = signed_of(dtype, bits);
        if (v >= -(INT64_C(1) << 53) && v <= INT64_C(1) << 53) {
            return need(json_integer(v));
        }
        char digits[24];
        snprintf(digits, sizeof digits, "%" PRId64, v);
        return json_text(digits);
    }
    if (is_unsigned(dtype)) {
        return json_u64(bits);
    }
    if (dtype == LG_C64) {
        json_t *pair = need(json_array());
        json_push(pair, json_double((double)float_at(element)));
        json_push(pair, json_double((double)float_at((const char *)element + 4)));
        return pair;
    }
    return json_double(value_double(dtype, element));
}

const char *value_npy(lg_dtype dtype, const char **note)
{
    *note = NULL;
    switch (dtype) {
    case LG_BOOL:
        return "|b1";
    case LG_U8:
        return "|u1";
    case LG_I8:
        return "|i1";
    case LG_I16:
        return "<i2";
    case LG_U16:
        return "<u2";
    case LG_F16:
        return "<f2";
    case LG_I32:
        return "<i4";
    case LG_U32:
        return "<u4";
    case LG_F32:
        return "<f4";
    case LG_C64:
        return "<c8";
    case LG_F64:
        return "<f8";
    case LG_I64:
        return "<i8";
    case LG_U64:
        return "<u8";
    case LG_BF16:
        *note = "NumPy has no BF16: written as <u2 with the same bits; "
                "(a.astype('u4') << 16).view('f4') makes numbers of them";
        return "<u2";
    case LG_F4:
    case LG_F6_E2M3:
    case LG_F6_E3M2:
        *note = "NumPy has no elements below 8 bits: written as their packed bytes, |u1, in one dimension";
        return "|u1";
    default:
        *note = "NumPy has no F8: written as |u1 with the same bits";
        return "|u1";
    }
}
