/* SPDX-License-Identifier: Apache-2.0 */
#include <lastgood/lastgood.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "elements are copied to little-endian files as they lie in memory"
#endif

/* The one table behind every name and width. */
static const struct {
    const char *name;
    unsigned bits;
} dtypes[LG_DTYPE_COUNT] = {
#define ROW(name, bits) [LG_##name] = {#name, bits},
    LG_DTYPE_MAP(ROW)
#undef ROW
};

/* The enum's width is the compiler's choice, so values from outside are compared
 * as unsigned. */
static int known(lg_dtype dtype) { return (unsigned)dtype < (unsigned)LG_DTYPE_COUNT; }

const char *lg_dtype_name(lg_dtype dtype) { return known(dtype) ? dtypes[dtype].name : "?"; }

unsigned lg_dtype_bits(lg_dtype dtype) { return known(dtype) ? dtypes[dtype].bits : 0; }

lg_status lg_dtype_parse(const char *name, lg_dtype *out)
{
    if (name == NULL || out == NULL) {
        return LG_ERR_INVALID;
    }
    for (unsigned i = 0; i < LG_DTYPE_COUNT; i++) {
        if (name[0] == dtypes[i].name[0] && strcmp(name, dtypes[i].name) == 0) {
            *out = (lg_dtype)i;
            return LG_OK;
        }
    }
    return LG_ERR_UNSUPPORTED;
}

const char *lg_group_name(lg_group group)
{
    static const char *const names[LG_GROUP_COUNT] = {"model", "optim", "raw"};
    return (unsigned)group < LG_GROUP_COUNT ? names[group] : "?";
}
