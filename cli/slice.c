/* SPDX-License-Identifier: Apache-2.0 */
#include "slice.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char how[] = "as in NumPy, without steps: '0:10,3,:', '-1', '...,0'";

/* One end of a range, or an index. false if it is no whole number. */
static bool whole(const char *from, const char *end, int64_t *out)
{
    while (from < end && isspace((unsigned char)*from)) {
        from++;
    }
    char *stop = NULL;
    bool sign = from < end && (*from == '-' || *from == '+');
    if (from + sign >= end || !isdigit((unsigned char)from[sign])) {
        return false;
    }
    errno = 0;
    long long v = strtoll(from, &stop, 10);
    while (stop < end && isspace((unsigned char)*stop)) {
        stop++;
    }
    if (stop != end || errno != 0) {
        return false;
    }
    *out = v;
    return true;
}

/* From the end when negative, then cut to the dimension. */
static uint64_t bound(int64_t v, uint64_t n)
{
    if (v < 0) {
        uint64_t back = (uint64_t)0 - (uint64_t)v;
        return back > n ? 0 : n - back;
    }
    return (uint64_t)v > n ? n : (uint64_t)v;
}

static bool blank(const char *from, const char *end)
{
    while (from < end && isspace((unsigned char)*from)) {
        from++;
    }
    return from == end;
}

/* One item, of dimension d. -1, or the exit status. */
static int item(cli *c, const char *from, const char *end, uint32_t d, uint64_t n, slice *out)
{
    int length = (int)(end - from);
    const char *colon = memchr(from, ':', (size_t)length);
    int64_t v;
    if (colon == NULL) {
        if (!whole(from, end, &v)) {
            return report_trouble(c, how, "slice, dimension %" PRIu32 ": '%.*s' is neither a number nor a range", d,
                                  length, from);
        }
        uint64_t at = v < 0 ? (uint64_t)v + n : (uint64_t)v;
        if (v < 0 ? (uint64_t)0 - (uint64_t)v > n : at >= n) {
            return report_trouble(c, NULL,
                                  "slice, dimension %" PRIu32 ": index %" PRId64 " is outside its %" PRIu64 " elements",
                                  d, v, n);
        }
        out->offset[d] = at;
        out->size[d] = 1;
        return -1;
    }
    const char *second = memchr(colon + 1, ':', (size_t)(end - colon - 1));
    if (second != NULL) {
        return report_trouble(c, how, "slice, dimension %" PRIu32 ": '%.*s' has a step, which is not supported", d,
                              length, from);
    }
    uint64_t first = 0, last = n;
    int64_t a = 0, b = 0;
    bool has_a = !blank(from, colon), has_b = !blank(colon + 1, end);
    if ((has_a && !whole(from, colon, &a)) || (has_b && !whole(colon + 1, end, &b))) {
        return report_trouble(c, how, "slice, dimension %" PRIu32 ": '%.*s' is no range", d, length, from);
    }
    first = has_a ? bound(a, n) : first;
    last = has_b ? bound(b, n) : last;
    out->offset[d] = first;
    out->size[d] = last > first ? last - first : 0;
    out->out_dim[out->out_ndim] = d;
    out->out_shape[out->out_ndim++] = out->size[d];
    return -1;
}

static void whole_dims(slice *out, uint32_t from, uint32_t to, const uint64_t *shape)
{
    for (uint32_t d = from; d < to; d++) {
        out->offset[d] = 0;
        out->size[d] = shape[d];
        out->out_dim[out->out_ndim] = d;
        out->out_shape[out->out_ndim++] = shape[d];
    }
}

/* The items between commas; a comma at the end adds none. */
#define ITEMS_MAX (LG_MAX_NDIM + 2)

typedef struct items {
    const char *from[ITEMS_MAX], *end[ITEMS_MAX];
    uint32_t n, dots; /* dots: which one is "...", UINT32_MAX if none */
} items;

static bool is_dots(const char *from, const char *end)
{
    const char *at = memmem(from, (size_t)(end - from), "...", 3);
    return at != NULL && blank(from, at) && blank(at + 3, end);
}

static int split(cli *c, const char *given, items *all)
{
    const char *from = given, *end = given + strlen(given);
    while (from < end && isspace((unsigned char)*from)) {
        from++;
    }
    while (end > from && isspace((unsigned char)end[-1])) {
        end--;
    }
    if (end - from >= 2 && from[0] == '[' && end[-1] == ']') {
        from++;
        end--;
    }
    *all = (items){.dots = UINT32_MAX};
    while (from < end) {
        const char *comma = memchr(from, ',', (size_t)(end - from));
        const char *stop = comma != NULL ? comma : end;
        if (all->n == ITEMS_MAX) {
            return report_trouble(c, how, "slice: more than %d dimensions", LG_MAX_NDIM);
        }
        if (is_dots(from, stop)) {
            if (all->dots != UINT32_MAX) {
                return report_trouble(c, how, "slice: '...' may stand only once");
            }
            all->dots = all->n;
        }
        all->from[all->n] = from;
        all->end[all->n++] = stop;
        from = comma != NULL ? comma + 1 : end;
    }
    return -1;
}

int slice_parse(cli *c, const char *given, uint32_t ndim, const uint64_t *shape, slice *out)
{
    *out = (slice){.ndim = ndim};
    items all = {.dots = UINT32_MAX};
    int exit_status = given != NULL ? split(c, given, &all) : -1;
    if (exit_status >= 0) {
        return exit_status;
    }
    uint32_t used = all.n - (all.dots != UINT32_MAX);
    if (used > ndim) {
        char *s = shape_text(ndim, shape);
        exit_status =
            report_trouble(c, NULL, "slice: %" PRIu32 " dimensions for a tensor of %" PRIu32 ", %s", used, ndim, s);
        free(s);
        return exit_status;
    }
    uint32_t d = 0;
    for (uint32_t i = 0; i < all.n && exit_status < 0; i++) {
        if (i == all.dots) {
            whole_dims(out, d, d + ndim - used, shape);
            d += ndim - used;
        } else {
            exit_status = item(c, all.from[i], all.end[i], d, shape[d], out);
            d++;
        }
    }
    if (exit_status < 0) {
        whole_dims(out, d, ndim, shape);
    }
    return exit_status;
}
