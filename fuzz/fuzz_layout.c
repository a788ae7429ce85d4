/* SPDX-License-Identifier: Apache-2.0 */

/* The text of a layout, in a world of up to 2^16 ranks, and a tensor that it is
 * asked about: {"kind":…} or, before a NUL, what fuzz_geometry does not reach,
 * since there layouts come from lg_layout_create. */

#include "base/error.h"
#include "base/json.h"
#include "base/mem.h"
#include "format/layout.h"
#include "fuzz.h"

#define TOUCHED_MOST 200

static lg_status few(uint32_t rank, const lg__region *box, uint32_t number, void *arg, lg_error *err)
{
    (void)rank;
    (void)box;
    (void)number;
    size_t *n = arg;
    return ++*n < TOUCHED_MOST ? LG_OK : lg_error_set(err, LG_ERR_CANCELLED, "enough");
}

static void with_tensor(const lg_layout *layout, fuzz_input *in)
{
    lg_error err = LG_ERROR_INIT;
    uint64_t shape[4];
    lg__tensor_desc t = {.name = "w", .group = LG_GROUP_MODEL, .dtype = (lg_dtype)fuzz_below(in, LG_DTYPE_COUNT)};
    t.ndim = fuzz_below(in, 5);
    for (uint32_t d = 0; d < t.ndim; d++) {
        shape[d] = fuzz_below(in, 4) > 0 ? fuzz_below(in, 64) : fuzz_u64(in) >> fuzz_below(in, 64);
    }
    t.shape = shape;
    t.flat_offset = fuzz_below(in, 4) > 0 ? fuzz_below(in, 64) : fuzz_u64(in) >> fuzz_below(in, 64);
    lg_status st = lg__layout_check_tensor(layout, &t, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        return;
    }
    uint64_t boxes = 0;
    st = lg__layout_box_count(layout, &t, &boxes, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
    }
    lg__region whole = lg__region_whole(t.ndim, shape);
    size_t touched = 0;
    lg_error touch_err = LG_ERROR_INIT;
    st = lg__layout_touch(layout, &t, &whole, few, &touched, &touch_err);
    if (st != LG_OK) {
        fuzz_refused(st, &touch_err);
    } else if (boxes > 0 && !lg__region_empty(&whole)) {
        FUZZ_CHECK(touched == boxes, "%zu boxes are touched of %llu", touched, (unsigned long long)boxes);
    }
    uint32_t rank = fuzz_u16(in), index = 0;
    lg__piece *p = NULL;
    size_t n = 0;
    lg_error write_err = LG_ERROR_INIT;
    st = lg__layout_written(layout, &t, rank, &p, &n, &write_err);
    if (st != LG_OK) {
        fuzz_refused(st, &write_err);
        return;
    }
    FUZZ_CHECK(n == 0 || lg__layout_index_of(layout, rank, &index), "rank %u writes and is not in it", rank);
    for (size_t i = 0; i < n; i++) {
        FUZZ_CHECK(lg__region_inside(&p[i].box, t.ndim, shape), "a box outside of the tensor");
        FUZZ_CHECK(i == 0 || lg__region_compare(&p[i - 1].box, &p[i].box) < 0, "boxes out of order");
    }
    lg__free(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const uint8_t *nul = bytes > 0 ? memchr(data, '\0', bytes) : NULL;
    size_t text_bytes = nul != NULL ? (size_t)(nul - data) : bytes;
    fuzz_input in = {data + text_bytes, bytes - text_bytes};
    fuzz_u8(&in);
    lg_error err = LG_ERROR_INIT;
    json_t *json = NULL;
    if (lg__json_parse((const char *)data, text_bytes, &json, &err) != LG_OK) {
        return 0;
    }
    lg_layout *layout = NULL, *again = NULL;
    uint32_t world = 1 + (uint32_t)fuzz_u16(&in);
    lg_status st = lg__layout_parse(json, nul != NULL ? world : 65536, &layout, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        FUZZ_CHECK(layout == NULL, "an output in spite of: %s", err.message);
        json_decref(json);
        return 0;
    }
    json_decref(json);
    st = lg__json_parse(layout->text, layout->text_bytes, &json, &err);
    FUZZ_CHECK(st == LG_OK, "its text is no JSON: %s", err.message);
    st = lg__layout_parse(json, 65536, &again, &err);
    FUZZ_CHECK(st == LG_OK && strcmp(again->text, layout->text) == 0 &&
                   memcmp(again->id, layout->id, sizeof layout->id) == 0,
               "its text is another layout: %s", err.message);
    json_decref(json);
    with_tensor(layout, &in);
    lg_layout_free(layout);
    lg_layout_free(again);
    return 0;
}
