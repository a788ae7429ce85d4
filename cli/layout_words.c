/* SPDX-License-Identifier: Apache-2.0 */

/* Layouts in words. What the members mean: docs/format-layouts.md. */

#include "show_parts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define RANKS_SHOWN 16

static uint64_t whole(const json_t *v)
{
    return json_is_string(v) ? strtoull(json_string_value(v), NULL, 10) : (uint64_t)json_integer_value(v);
}

static uint64_t product(const json_t *sizes)
{
    uint64_t n = 1;
    size_t i;
    json_t *s;
    json_array_foreach(sizes, i, s) { n *= whole(s); }
    return n;
}

/* The rank at row-major index i of the mesh. */
static uint64_t rank_at(const json_t *mesh, uint64_t i)
{
    const json_t *list = json_object_get(mesh, "ranks"), *sizes = json_object_get(mesh, "sizes");
    if (list != NULL) {
        return whole(json_array_get(list, i));
    }
    const json_t *strides = json_object_get(mesh, "strides");
    uint64_t rank = whole(json_object_get(mesh, "origin"));
    for (size_t a = json_array_size(sizes); a-- > 0;) {
        uint64_t size = whole(json_array_get(sizes, a));
        rank += i % size * whole(json_array_get(strides, a));
        i /= size;
    }
    return rank;
}

static void add_ranks(text *t, const json_t *mesh)
{
    uint64_t n = product(json_object_get(mesh, "sizes"));
    uint64_t first = rank_at(mesh, 0);
    bool in_order = true;
    for (uint64_t i = 1; i < n && in_order; i++) {
        in_order = rank_at(mesh, i) == first + i;
    }
    if (n == 1) {
        text_add(t, "rank %" PRIu64, first);
    } else if (in_order) {
        text_add(t, "ranks %" PRIu64 " to %" PRIu64, first, first + n - 1);
    } else {
        text_add(t, "ranks");
        for (uint64_t i = 0; i < n && i < RANKS_SHOWN; i++) {
            text_add(t, "%s %" PRIu64, i > 0 ? "," : "", rank_at(mesh, i));
        }
        if (n > RANKS_SHOWN) {
            text_add(t, ", … (%" PRIu64 ")", n);
        }
    }
}

static void add_replicas(text *t, const json_t *layout, uint64_t holders)
{
    uint64_t writers = whole(json_object_get(layout, "writers"));
    if (holders > 1) {
        text_add(t, "; %" PRIu64 " ranks hold each part, %" PRIu64 " of them write%s", holders, writers,
                 writers == 1 ? "s" : "");
    }
}

static void split_words(text *t, const json_t *layout)
{
    const json_t *mesh = json_object_get(layout, "mesh"), *sizes = json_object_get(mesh, "sizes");
    uint64_t holders = product(sizes);
    size_t i;
    json_t *split;
    json_array_foreach(json_object_get(layout, "splits"), i, split)
    {
        const json_t *axis = json_object_get(split, "axis");
        uint64_t dim = whole(json_object_get(split, "dim"));
        const char *mode = json_string_value(json_object_get(split, "mode"));
        text_add(t, "%sdimension %" PRIu64, i > 0 ? ", then " : "", dim);
        if (axis != NULL) {
            uint64_t pieces = whole(json_array_get(sizes, whole(axis)));
            text_add(t, " over %" PRIu64 " rank%s", pieces, pieces == 1 ? "" : "s");
            holders = pieces > 0 ? holders / pieces : holders;
        } else {
            text_add(t, " in %" PRIu64 " pieces on the same rank", whole(json_object_get(split, "pieces")));
        }
        text_add(t, " (%s)", mode != NULL ? mode : "?");
    }
    if (i == 0) {
        text_add(t, "whole");
    }
    text_add(t, "; ");
    add_ranks(t, mesh);
    add_replicas(t, layout, holders);
}

char *layout_words(const char *canonical)
{
    text t = {0};
    json_t *layout = json_loads(canonical, 0, NULL);
    const char *kind = json_string_value(json_object_get(layout, "kind"));
    const json_t *mesh = json_object_get(layout, "mesh"), *sizes = json_object_get(mesh, "sizes");
    if (kind != NULL && strcmp(kind, "split") == 0) {
        split_words(&t, layout);
    } else if (kind != NULL && strcmp(kind, "flat") == 0) {
        uint64_t parts = whole(json_array_get(sizes, whole(json_object_get(layout, "axis"))));
        text_add(&t, "flat buffer of %" PRIu64 " elements over %" PRIu64 " rank%s; ",
                 whole(json_object_get(layout, "length")), parts, parts == 1 ? "" : "s");
        add_ranks(&t, mesh);
        add_replicas(&t, layout, parts > 0 ? product(sizes) / parts : 1);
    } else if (kind != NULL && strcmp(kind, "copies") == 0) {
        text_add(&t, "each rank keeps its own copy; ");
        add_ranks(&t, mesh);
    } else {
        text_add(&t, "of a kind that this version does not know");
    }
    json_decref(layout);
    return t.data;
}
