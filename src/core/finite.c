/* SPDX-License-Identifier: Apache-2.0 */
#include "core/finite.h"

#include "base/buf.h"

#include <string.h>

/* Not finite: all bits of the exponent are set. The first pass has no branch,
 * so that compilers make vectors of it. */
#define SCAN(type, mask)                                  \
    do {                                                  \
        const size_t n_ = bytes / sizeof(type);           \
        unsigned bad_ = 0;                                \
        for (size_t i_ = 0; i_ < n_; i_++) {              \
            type x_;                                      \
            memcpy(&x_, p + i_ * sizeof x_, sizeof x_);   \
            bad_ |= (x_ & (type)(mask)) == (type)(mask);  \
        }                                                 \
        for (size_t i_ = 0; bad_ != 0 && i_ < n_; i_++) { \
            type x_;                                      \
            memcpy(&x_, p + i_ * sizeof x_, sizeof x_);   \
            if ((x_ & (type)(mask)) == (type)(mask)) {    \
                return i_ * sizeof x_;                    \
            }                                             \
        }                                                 \
        return bytes;                                     \
    } while (0)

static size_t find_byte(const unsigned char *p, size_t bytes, int byte)
{
    const unsigned char *hit = memchr(p, byte, bytes);
    return hit != NULL ? (size_t)(hit - p) : bytes;
}

size_t lg__finite_scan(lg_dtype dtype, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    switch (dtype) {
    case LG_F64:
        SCAN(uint64_t, UINT64_C(0x7ff0000000000000));
    case LG_F32:
        SCAN(uint32_t, 0x7f800000u);
    case LG_C64: {
        /* pairs of F32: report the pair */
        size_t at = lg__finite_scan(LG_F32, data, bytes);
        return at < bytes ? at / 8 * 8 : bytes;
    }
    case LG_F16:
        SCAN(uint16_t, 0x7c00u);
    case LG_BF16:
        SCAN(uint16_t, 0x7f80u);
    case LG_F8_E5M2:
        SCAN(uint8_t, 0x7cu);
    case LG_F8_E4M3: /* NaN only, with all bits but the sign */
        SCAN(uint8_t, 0x7fu);
    case LG_F8_E8M0:
        return find_byte(p, bytes, 0xff);
    case LG_F8_E4M3FNUZ:
    case LG_F8_E5M2FNUZ: /* minus zero is NaN */
        return find_byte(p, bytes, 0x80);
    default:
        return bytes;
    }
}

/* Names the element of a box at byte `at` of it, in the tensor. */
static lg_status not_finite(const lg__plan_box *box, uint64_t at, lg_error *err)
{
    uint64_t i = at / (lg_dtype_bits(box->dtype) / 8);
    uint64_t place[LG_MAX_NDIM] = {0};
    for (uint32_t d = box->box.ndim; d-- > 0;) {
        place[d] = box->box.offset[d] + i % box->box.size[d];
        i /= box->box.size[d];
    }
    lg__buf b;
    lg__buf_init(&b, 1024);
    for (uint32_t d = 0; d < box->box.ndim; d++) {
        lg__buf_fmt(&b, "%s%llu", d > 0 ? ", " : "", (unsigned long long)place[d]);
    }
    lg_error_set(err, LG_ERR_INVALID, "tensor \"%s\" is not finite at [%s]", box->tensor,
                 b.data != NULL && !b.failed ? b.data : "");
    lg__buf_free(&b);
    return LG_ERR_INVALID;
}

lg_status lg__finite_check(const lg__plan_box *box, const uint8_t *data, uint64_t bytes, uint64_t at, lg_error *err)
{
    size_t bad = lg__finite_scan(box->dtype, data, (size_t)bytes);
    return bad < bytes ? not_finite(box, at + bad, err) : LG_OK;
}
