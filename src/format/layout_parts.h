/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_FORMAT_LAYOUT_PARTS_H
#define LG_FORMAT_LAYOUT_PARTS_H

/* Shared by the layout_*.c files only: pieces of an interval, coordinates in
 * the mesh, and the making of layouts. */

#include "format/layout.h"

#define LG__LAYOUT_MAX_RANKS 1000000
/* Product of all constant pieces: how many boxes of one tensor a rank may have. */
#define LG__LAYOUT_MAX_PIECES 65536
/* Constant splits of more than one piece: counting what comes before a box
 * doubles its work with each. */
#define LG__LAYOUT_MAX_CONSTANTS 8
#define LG__LAYOUT_MAX_TEXT ((size_t)16 << 20)

typedef struct lg__range {
    uint64_t begin, size;
} lg__range;

/* Piece i of n elements over p pieces, from the interval's start; empty ones
 * have size 0. */
static inline lg__range lg__piece_of(uint64_t n, uint64_t p, lg_split_mode mode, uint64_t i)
{
    if (mode == LG_SPLIT_CEIL) {
        uint64_t c = n / p + (n % p != 0);
        /* i * c may pass 2^64 only for pieces behind the end. */
        uint64_t begin;
        if (c == 0 || __builtin_mul_overflow(i, c, &begin) || begin >= n) {
            return (lg__range){n, 0};
        }
        return (lg__range){begin, n - begin < c ? n - begin : c};
    }
    uint64_t q = n / p, r = n % p;
    return (lg__range){i * q + (i < r ? i : r), q + (i < r)};
}

/* How many of the pieces are not empty; they come first. */
static inline uint64_t lg__pieces_filled(uint64_t n, uint64_t p, lg_split_mode mode)
{
    if (n == 0) {
        return 0;
    }
    if (mode == LG_SPLIT_CEIL) {
        uint64_t c = n / p + (n % p != 0);
        return n / c + (n % c != 0);
    }
    return n < p ? n : p;
}

/* Which piece holds element x < n. */
static inline uint64_t lg__piece_at(uint64_t n, uint64_t p, lg_split_mode mode, uint64_t x)
{
    if (mode == LG_SPLIT_CEIL) {
        return x / (n / p + (n % p != 0)); /* NOLINT(clang-analyzer-core.DivideZero): n > x */
    }
    uint64_t q = n / p, r = n % p, longer = r * (q + 1);
    return x < longer ? x / (q + 1) : r + (x - longer) / q;
}

/* One split of a dimension, as the walks see it. */
#define LG__BY_CONSTANT (-1)
#define LG__BY_WRITER (-2)
typedef struct lg__level {
    uint32_t pieces;
    lg_split_mode mode;
    int32_t by; /* mesh axis, LG__BY_CONSTANT or LG__BY_WRITER */
} lg__level;
#define LG__MAX_LEVELS (LG_MAX_SPLITS + 1)

/* The splits of dimension `dim` in order; with `writers` also the cut between
 * writers, which comes last. */
uint32_t lg__layout_levels(const lg_layout *layout, uint32_t dim, bool writers, lg__level out[LG__MAX_LEVELS]);

/* Bit a: axis a is a replica axis. */
uint32_t lg__layout_replica_axes(const lg_layout *layout);
void lg__layout_coordinates(const lg_layout *layout, uint32_t index, uint32_t c[LG_MAX_MESH_NDIM]);
/* Row-major index steps of the axes. */
void lg__layout_index_steps(const lg_layout *layout, uint32_t step[LG_MAX_MESH_NDIM]);
/* Writer i of a tensor is this holder, and its share of the row-major index. */
uint32_t lg__layout_writer_index(const lg_layout *layout, uint32_t name_crc, uint32_t i);
/* Which writer the rank at coordinates c is; false: none. */
bool lg__layout_writer_of(const lg_layout *layout, const char *name, const uint32_t c[LG_MAX_MESH_NDIM], uint32_t *i);

/* Dimensions exist, sizes do not overflow, the flat range fits: what the walks
 * need to be safe. *elements of the tensor. */
lg_status lg__layout_check_shape(const lg_layout *layout, const lg__tensor_desc *t, uint64_t *elements, lg_error *err);

/* Checks a description and makes the layout of it. normal: a list of ranks
 * that steps regularly becomes origin and strides. references is 1, no text. */
lg_status lg__layout_make(lg__layout_kind kind, const lg_layout_desc *d, bool normal, lg_layout **out, lg_error *err);
/* Sets text and id of a layout whose writers are chosen. */
lg_status lg__layout_seal(lg_layout *layout, lg_error *err);

#endif
