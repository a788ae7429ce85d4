/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_REDUCE_H
#define GPT_REDUCE_H

/* What the ranks exchange in a step. Gradients are summed over the step's
 * micro-batches in the fixed tree of tree.h, and the parts of the sum go to
 * the ranks that own them (ZeRO-1): rank r owns elements [r*p, (r+1)*p) of the
 * flat buffer, p = ceil(elements / ranks), which is also how a flat layout of
 * lastgood cuts it. Every number of ranks gives the same bits. */

#include "tree.h"

#include <mpi.h>

typedef struct reducer {
    MPI_Comm comm;
    int rank, size;
    uint32_t leaves;                 /* micro-batches of a step, over all ranks */
    uint32_t first_leaf, end_leaf;   /* those of this rank */
    size_t elements;                 /* of a gradient */
    size_t slice_start, slice_count; /* what this rank owns */
    tree_node *nodes;                /* all ranks' subtrees, by rank */
    size_t *nodes_before;            /* of rank r: from nodes_before[r] to [r + 1] */
    float *sums;                     /* this rank's subtrees, one gradient each */
    float *stack;                    /* what their sums need beside them */
    float *sent, *received;
    int *counts; /* 4 x size: of MPI_Alltoallv */
    int *slices; /* 2 x size: counts and offsets of all slices */
} reducer;

reducer *reducer_create(MPI_Comm comm, uint32_t leaves, size_t elements);
void reducer_free(reducer *r);

/* Sets a gradient to that of one micro-batch. */
typedef void (*reducer_leaf_fn)(uint32_t leaf, float *gradient, void *arg);

/* Calls `leaf` for this rank's micro-batches in order: sums of subtrees, kept
 * for reduce_gradients. */
void reduce_own(reducer *r, reducer_leaf_fn leaf, void *arg);
/* Collective. slice (slice_count elements) = the sum over all micro-batches. */
void reduce_gradients(reducer *r, float *slice);
/* Collective. From one number for each of this rank's micro-batches to the
 * tree's sum over all. */
double reduce_losses(reducer *r, const double *own);
/* Collective. Adds up all ranks' sums; `flag` becomes nonzero if any rank's is. */
void reduce_exact(reducer *r, exact_sum *sum, int *flag);
/* Collective. Every rank gives its slice of `buffer` and gets the others'. */
void reduce_share(reducer *r, float *buffer);
/* Collective. Rank 0 gets the whole buffer of which each has a slice. */
void reduce_collect(reducer *r, const float *slice, float *buffer);

#endif
