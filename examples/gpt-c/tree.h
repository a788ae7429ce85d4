/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_TREE_H
#define GPT_TREE_H

/* Sums whose bits do not depend on who computes which part.
 *
 * The tree: the sum over leaves [lo, hi) is the sum over [lo, mid) plus the
 * sum over [mid, hi), with mid = lo + the largest power of two below hi - lo;
 * a single leaf is itself. Which additions happen, and in which order their
 * operands stand, follows from the number of leaves alone. A rank that has
 * some consecutive leaves adds up the largest subtrees it has whole; whoever
 * gets all ranks' subtrees does the additions that are left. */

#include <stddef.h>
#include <stdint.h>

typedef struct tree_node {
    uint32_t lo, hi;
} tree_node;

enum { TREE_COVER_MAX = 64 }; /* subtrees that a run of leaves can need */

/* Where [lo, hi) is cut; hi - lo >= 2. */
uint32_t tree_middle(uint32_t lo, uint32_t hi);

/* The largest subtrees inside [from, to) of the tree over `leaves`, in order;
 * returns how many. */
size_t tree_cover(uint32_t leaves, uint32_t from, uint32_t to, tree_node out[TREE_COVER_MAX]);

/* The leaves that rank `rank` of `size` computes: [tree_share(r), tree_share(r + 1)). */
uint32_t tree_share(uint32_t leaves, uint32_t rank, uint32_t size);

double tree_sum(const double *leaves, uint32_t n);

/* An exact sum of squares of floats: a fixed-point number as wide as the range
 * of such squares, in limbs of 32 bits with room for carries. Integer addition
 * is associative, so neither order nor grouping matters; limbs of several
 * ranks are added element by element. Good for 2^30 squares. */
enum { EXACT_LIMBS = 22 };

typedef struct exact_sum {
    int64_t limbs[EXACT_LIMBS];
    int64_t not_finite; /* how many squares were inf or nan */
} exact_sum;

void exact_add_square(exact_sum *sum, float x);
double exact_value(const exact_sum *sum); /* nan if anything was not finite */

#endif
