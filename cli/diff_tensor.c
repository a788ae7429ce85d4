/* SPDX-License-Identifier: Apache-2.0 */
#include "chunk.h"
#include "diff.h"
#include "value.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES (UINT64_C(8) << 20)

const char *difference_name(difference d)
{
    static const char *const names[] = {"equal", "different", "form", "only_a", "only_b"};
    return names[d];
}

/* ----------------------------------------------------------- one piece each */

typedef struct comparison {
    tensor_diff *d;
    double tolerance; /* < 0: none */
    const chunks *k;
} comparison;

/* Where element i of the piece lies in the tensor. */
static void place_of(const chunks *k, uint64_t i, uint64_t *at)
{
    for (uint32_t d = k->ndim; d-- > 0;) {
        at[d] = k->offset[d] + i % k->size[d];
        i /= k->size[d];
    }
}

/* Two numbers whose bits differ. */
static void unequal(comparison *c, uint64_t i, double distance, bool nan_a, bool nan_b)
{
    tensor_diff *d = c->d;
    if (nan_a || nan_b) {
        if (nan_a != nan_b) {
            d->nan++;
            d->differing++;
        } else {
            d->differing += c->tolerance < 0;
        }
        return;
    }
    d->differing += !(distance <= c->tolerance);
    if (!d->has_largest || distance > d->largest) {
        d->has_largest = true;
        d->largest = distance;
        place_of(c->k, i, d->at);
    }
}

static void compare_f64(comparison *c, const void *a, const void *b, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        double x, y;
        memcpy(&x, (const char *)a + 8 * i, 8);
        memcpy(&y, (const char *)b + 8 * i, 8);
        /* Bits are compared. NOLINTNEXTLINE(bugprone-suspicious-memory-comparison,cert-exp42-c,cert-flp37-c) */
        if (memcmp(&x, &y, 8) != 0) {
            unequal(c, i, fabs(x - y), isnan(x), isnan(y));
        }
    }
}

static void compare_f32(comparison *c, const void *a, const void *b, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float x, y;
        memcpy(&x, (const char *)a + 4 * i, 4);
        memcpy(&y, (const char *)b + 4 * i, 4);
        /* Bits are compared. NOLINTNEXTLINE(bugprone-suspicious-memory-comparison,cert-exp42-c,cert-flp37-c) */
        if (memcmp(&x, &y, 4) != 0) {
            unequal(c, i, fabs((double)x - (double)y), isnan(x), isnan(y));
        }
    }
}

static void compare_half(comparison *c, lg_dtype dtype, const void *a, const void *b, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        const char *p = (const char *)a + 2 * i, *q = (const char *)b + 2 * i;
        if (memcmp(p, q, 2) != 0) {
            double x = value_double(dtype, p), y = value_double(dtype, q);
            unequal(c, i, fabs(x - y), isnan(x), isnan(y));
        }
    }
}

static void compare_c64(comparison *c, const void *a, const void *b, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float x[2], y[2];
        memcpy(x, (const char *)a + 8 * i, 8);
        memcpy(y, (const char *)b + 8 * i, 8);
        /* Bits are compared. NOLINTNEXTLINE(bugprone-suspicious-memory-comparison,cert-exp42-c,cert-flp37-c) */
        if (memcmp(x, y, 8) != 0) {
            double real = (double)x[0] - (double)y[0], imaginary = (double)x[1] - (double)y[1];
            unequal(c, i, hypot(real, imaginary), isnan(x[0]) || isnan(x[1]), isnan(y[0]) || isnan(y[1]));
        }
    }
}

static void compare_bits(comparison *c, size_t bytes, const void *a, const void *b, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        c->d->differing += memcmp((const char *)a + bytes * i, (const char *)b + bytes * i, bytes) != 0;
    }
}

static void compare_piece(comparison *c, lg_dtype dtype, const void *a, const void *b)
{
    uint64_t n = c->k->elements, bytes = bytes_of(dtype, n);
    c->d->elements += c->d->packed ? bytes : n;
    if (memcmp(a, b, (size_t)bytes) == 0) {
        return;
    }
    c->d->bit_exact = false;
    switch (dtype) {
    case LG_F64:
        compare_f64(c, a, b, n);
        break;
    case LG_F32:
        compare_f32(c, a, b, n);
        break;
    case LG_F16:
    case LG_BF16:
        compare_half(c, dtype, a, b, n);
        break;
    case LG_C64:
        compare_c64(c, a, b, n);
        break;
    default:
        compare_bits(c, c->d->packed ? 1 : lg_dtype_bits(dtype) / 8, a, b, c->d->packed ? bytes : n);
    }
}

/* ------------------------------------------------------------------ copies */

/* The ranks whose copies are compared; UINT32_MAX for a tensor that is the
 * same on all. */
typedef struct holders {
    uint32_t *rank;
    size_t n, cap;
} holders;

static int take_holder(const lg_stored_box *box, void *arg)
{
    holders *h = arg;
    need_room((void **)&h->rank, &h->cap, h->n, sizeof *h->rank);
    h->rank[h->n++] = box->rank;
    return 0;
}

static lg_status find_holders(const view *v, const lg_tensor_info *t, holders *h, lg_error *err)
{
    *h = (holders){0};
    if (!t->per_rank) {
        need_room((void **)&h->rank, &h->cap, 0, sizeof *h->rank);
        h->rank[h->n++] = UINT32_MAX;
        return LG_OK;
    }
    return lg_checkpoint_boxes(v->k, t->name, NULL, NULL, take_holder, h, err);
}

static lg_status compare_copies(const view *a, const view *b, const lg_tensor_info *ta, const lg_tensor_info *tb,
                                uint32_t copy_a, uint32_t copy_b, double tolerance, void (*progress)(uint64_t bytes),
                                tensor_diff *out, lg_error *err)
{
    static const uint64_t zeros[LG_MAX_NDIM] = {0};
    chunks k;
    chunks_begin(&k, ta->ndim, zeros, ta->shape, ta->dtype, CHUNK_BYTES);
    if (k.done) {
        return LG_OK;
    }
    size_t most = (size_t)bytes_of(ta->dtype, chunks_most(&k));
    char *x = need(malloc(most + 1)), *y = need(malloc(most + 1));
    comparison c = {.d = out, .tolerance = tolerance, .k = &k};
    lg_status status = LG_OK;
    while (status == LG_OK && chunks_next(&k)) {
        status = load_region(a->k, ta, k.offset, k.size, x, NULL, copy_a, err);
        if (status == LG_OK) {
            status = load_region(b->k, tb, k.offset, k.size, y, NULL, copy_b, err);
        }
        if (status == LG_OK) {
            compare_piece(&c, ta->dtype, x, y);
            progress(bytes_of(ta->dtype, k.elements));
        }
    }
    free(x);
    free(y);
    return status;
}

static bool same_form(const lg_tensor_info *a, const lg_tensor_info *b)
{
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(a->shape, b->shape, a->ndim * sizeof *a->shape) == 0);
}

lg_status diff_tensors(const view *a, const view *b, const lg_tensor_info *ta, const lg_tensor_info *tb,
                       double tolerance, void (*progress)(uint64_t bytes), tensor_diff *out, lg_error *err)
{
    *out = (tensor_diff){.what = DIFF_EQUAL, .bit_exact = true, .packed = lg_dtype_bits(ta->dtype) % 8 != 0};
    if (!same_form(ta, tb)) {
        out->what = DIFF_FORM;
        out->bit_exact = false;
        return LG_OK;
    }
    holders ha = {0}, hb = {0};
    lg_status status = find_holders(a, ta, &ha, err);
    if (status == LG_OK) {
        status = find_holders(b, tb, &hb, err);
    }
    /* Copies of the same ranks are pairs; one tensor is compared with every
     * copy of the other side; for other sets of ranks the first ones stand. */
    bool pairs = ha.n == hb.n && (ha.n == 0 || memcmp(ha.rank, hb.rank, ha.n * sizeof *ha.rank) == 0);
    size_t n = ha.n > hb.n ? ha.n : hb.n;
    if (!pairs && ta->per_rank && tb->per_rank) {
        n = n > 0 ? 1 : 0;
        out->first_copies = true;
    }
    out->copies = ta->per_rank || tb->per_rank ? n : 0;
    for (size_t i = 0; status == LG_OK && i < n; i++) {
        status = compare_copies(a, b, ta, tb, ha.rank[i < ha.n ? i : 0], hb.rank[i < hb.n ? i : 0], tolerance, progress,
                                out, err);
    }
    free(ha.rank);
    free(hb.rank);
    if (status == LG_OK && out->differing > 0) {
        out->what = DIFF_VALUES;
    }
    return status;
}
