/* SPDX-License-Identifier: Apache-2.0 */
#include "core/gather.h"

#include <string.h>

#define COLUMNS 16 /* of a tile, which are read together */
#define ROWS_MAX 64
#define ROWS_MIN 4 /* with fewer, tiles do not pay */

/* -------------------------------------------------------------------- runs */

typedef struct direct {
    const lg__plan_box *box;
    lg__gather_fn fn;
    void *arg;
} direct;

static lg_status on_run(uint64_t box_byte, int64_t mem_byte, uint64_t bytes, void *arg, lg_error *err)
{
    const direct *d = arg;
    const uint8_t *from = (const uint8_t *)((uintptr_t)d->box->data + (uintptr_t)mem_byte);
    return d->fn(from, bytes, box_byte, d->arg, err);
}

/* ------------------------------------------------------------------- tiles
 *
 * Let k be the dimension that is fastest in memory. For fixed indices before
 * it, `rows` indices of k and all indices behind it are a tile: contiguous in
 * the box, `width` elements a row. */
typedef struct tiling {
    const lg__plan_box *box;
    size_t element;
    uint32_t k, last;
    uint64_t rows, width;
} tiling;

static bool choose_tiling(const lg__plan_box *box, size_t scratch_bytes, tiling *out)
{
    const uint32_t ndim = box->box.ndim;
    const uint64_t *size = box->box.size;
    if (box->strides == NULL || ndim < 2 || lg_dtype_bits(box->dtype) % 8 != 0) {
        return false;
    }
    tiling t = {.box = box, .element = lg_dtype_bits(box->dtype) / 8, .width = 1};
    for (t.last = ndim - 1; t.last > 0 && size[t.last] == 1;) {
        t.last--;
    }
    int64_t least = INT64_MAX;
    for (uint32_t d = 0; d <= t.last; d++) {
        int64_t step = box->strides[d] < 0 ? -box->strides[d] : box->strides[d];
        if (size[d] > 1 && step > 0 && step < least) {
            least = step, t.k = d;
        }
    }
    int64_t along = box->strides[t.last] < 0 ? -box->strides[t.last] : box->strides[t.last];
    if (least >= along) {
        return false; /* the box's own order is the best */
    }
    for (uint32_t d = t.k + 1; d <= t.last; d++) {
        if (__builtin_mul_overflow(t.width, size[d], &t.width)) {
            return false;
        }
    }
    t.rows = t.width > scratch_bytes / t.element ? 0 : scratch_bytes / t.element / t.width;
    t.rows = t.rows < ROWS_MAX ? t.rows : ROWS_MAX;
    t.rows = t.rows < size[t.k] ? t.rows : size[t.k];
    *out = t;
    return t.rows >= ROWS_MIN;
}

#define MOVE(bytes)                                                                                     \
    for (uint64_t m_ = 0; m_ < rows; m_++) {                                                            \
        for (uint64_t i_ = 0; i_ < columns; i_++) {                                                     \
            memcpy(to + (m_ * t->width + i_) * (bytes),                                                 \
                   (const uint8_t *)(from + m_ * (uintptr_t)row_step + i_ * (uintptr_t)step), (bytes)); \
        }                                                                                               \
    }

/* `rows` by `columns` elements. */
static void move(const tiling *t, uint8_t *to, uintptr_t from, uint64_t rows, uint64_t columns)
{
    const int64_t row_step = t->box->strides[t->k], step = t->box->strides[t->last];
    switch (t->element) {
    case 1:
        MOVE(1)
        break;
    case 2:
        MOVE(2)
        break;
    case 4:
        MOVE(4)
        break;
    default:
        MOVE(8)
    }
}

static void fill_tile(const tiling *t, uint8_t *scratch, uintptr_t from, uint64_t rows)
{
    const uint64_t *size = t->box->box.size;
    const int64_t *strides = t->box->strides;
    uint64_t index[LG_MAX_NDIM] = {0};
    for (uint64_t line = 0; line < t->width; line += size[t->last]) {
        for (uint64_t i = 0; i < size[t->last]; i += COLUMNS) {
            uint64_t columns = size[t->last] - i < COLUMNS ? size[t->last] - i : COLUMNS;
            move(t, scratch + (line + i) * t->element, from + i * (uintptr_t)strides[t->last], rows, columns);
        }
        for (uint32_t d = t->last; d-- > t->k + 1;) { /* the next line of a row */
            from += (uintptr_t)strides[d];
            if (++index[d] < size[d]) {
                break;
            }
            from -= size[d] * (uintptr_t)strides[d];
            index[d] = 0;
        }
    }
}

static lg_status gather_tiles(const tiling *t, uint8_t *scratch, lg__gather_fn fn, void *arg, lg_error *err)
{
    const uint64_t *size = t->box->box.size;
    const int64_t *strides = t->box->strides;
    uint64_t index[LG_MAX_NDIM] = {0}, at = 0;
    uintptr_t from = (uintptr_t)t->box->data;
    for (;;) {
        for (uint64_t row = 0, n; row < size[t->k]; row += n) {
            n = size[t->k] - row < t->rows ? size[t->k] - row : t->rows;
            fill_tile(t, scratch, from + row * (uintptr_t)strides[t->k], n);
            const uint64_t bytes = n * t->width * t->element;
            LG__TRY(fn(scratch, bytes, at, arg, err));
            at += bytes;
        }
        uint32_t d = t->k;
        while (d-- > 0) {
            from += (uintptr_t)strides[d];
            if (++index[d] < size[d]) {
                break;
            }
            from -= size[d] * (uintptr_t)strides[d];
            index[d] = 0;
        }
        if (d == UINT32_MAX) {
            return LG_OK;
        }
    }
}

lg_status lg__gather(const lg__plan_box *box, lg__scratch scratch, lg__gather_fn fn, void *arg, lg_error *err)
{
    for (uint32_t d = 0; d < box->box.ndim; d++) {
        if (box->box.size[d] == 0) {
            return LG_OK;
        }
    }
    tiling t;
    if (choose_tiling(box, scratch.bytes, &t)) {
        return gather_tiles(&t, scratch.data, fn, arg, err);
    }
    direct d = {box, fn, arg};
    return lg__plan_runs(box, on_run, &d, err);
}
