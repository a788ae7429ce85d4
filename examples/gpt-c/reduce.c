/* SPDX-License-Identifier: Apache-2.0 */
#include "reduce.h"

#include "fatal.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

static size_t slice_start(const reducer *r, int rank)
{
    size_t piece = (r->elements + (size_t)r->size - 1) / (size_t)r->size, start = piece * (size_t)rank;
    return start < r->elements ? start : r->elements;
}

static size_t slice_count(const reducer *r, int rank) { return slice_start(r, rank + 1) - slice_start(r, rank); }

static size_t nodes_of(const reducer *r, int rank) { return r->nodes_before[rank + 1] - r->nodes_before[rank]; }

static uint32_t depth_of(uint32_t leaves)
{
    uint32_t depth = 0;
    while (leaves > 1) {
        leaves = (leaves + 1) / 2;
        depth++;
    }
    return depth;
}

reducer *reducer_create(MPI_Comm comm, uint32_t leaves, size_t elements)
{
    reducer *r = allocate(1, sizeof *r);
    r->comm = comm;
    MPI_Comm_rank(comm, &r->rank);
    MPI_Comm_size(comm, &r->size);
    r->leaves = leaves;
    r->elements = elements;
    size_t size = (size_t)r->size;
    r->nodes = allocate(leaves, sizeof *r->nodes); /* disjoint subtrees: never more than leaves */
    r->nodes_before = allocate(size + 1, sizeof *r->nodes_before);
    for (uint32_t rank = 0; rank < size; rank++) {
        tree_node cover[TREE_COVER_MAX];
        uint32_t from = tree_share(leaves, rank, (uint32_t)size), to = tree_share(leaves, rank + 1, (uint32_t)size);
        size_t n = tree_cover(leaves, from, to, cover), before = r->nodes_before[rank];
        memcpy(r->nodes + before, cover, n * sizeof *cover);
        r->nodes_before[rank + 1] = before + n;
    }
    r->first_leaf = tree_share(leaves, (uint32_t)r->rank, (uint32_t)size);
    r->end_leaf = tree_share(leaves, (uint32_t)r->rank + 1, (uint32_t)size);
    r->slice_start = slice_start(r, r->rank);
    r->slice_count = slice_count(r, r->rank);

    size_t mine = nodes_of(r, r->rank), all = r->nodes_before[size];
    if (mine * elements > INT_MAX || all * (r->slice_count + 1) > INT_MAX)
        fatal("a model of %zu parameters is too large for one exchange of this example", elements);
    r->sums = allocate(mine * elements, sizeof(float));
    r->stack = allocate(depth_of(leaves) * elements, sizeof(float));
    r->sent = allocate(mine * elements, sizeof(float));
    r->received = allocate(all * r->slice_count, sizeof(float));
    r->counts = allocate(4 * size, sizeof(int));
    r->slices = allocate(2 * size, sizeof(int));
    int *send = r->counts, *send_at = send + size, *receive = send_at + size, *receive_at = receive + size;
    for (int rank = 0; rank < r->size; rank++) {
        send[rank] = (int)(mine * slice_count(r, rank));
        send_at[rank] = (int)(mine * slice_start(r, rank));
        receive[rank] = (int)(nodes_of(r, rank) * r->slice_count);
        receive_at[rank] = (int)(r->nodes_before[rank] * r->slice_count);
        r->slices[rank] = (int)slice_count(r, rank);
        r->slices[r->size + rank] = (int)slice_start(r, rank);
    }
    return r;
}

void reducer_free(reducer *r)
{
    if (!r)
        return;
    free(r->nodes), free(r->nodes_before), free(r->sums), free(r->stack), free(r->sent), free(r->received);
    free(r->counts), free(r->slices), free(r);
}

static void add_into(float *restrict sum, const float *restrict other, size_t count)
{
    for (size_t i = 0; i < count; i++)
        sum[i] += other[i];
}

static void sum_subtree(reducer *r, uint32_t lo, uint32_t hi, float *sum, float *stack, reducer_leaf_fn leaf, void *arg)
{
    if (hi - lo == 1) {
        leaf(lo, sum, arg);
        return;
    }
    uint32_t middle = tree_middle(lo, hi);
    sum_subtree(r, lo, middle, sum, stack, leaf, arg);
    sum_subtree(r, middle, hi, stack, stack + r->elements, leaf, arg);
    add_into(sum, stack, r->elements);
}

void reduce_own(reducer *r, reducer_leaf_fn leaf, void *arg)
{
    const tree_node *own = r->nodes + r->nodes_before[r->rank];
    for (size_t i = 0; i < nodes_of(r, r->rank); i++)
        sum_subtree(r, own[i].lo, own[i].hi, r->sums + i * r->elements, r->stack, leaf, arg);
}

/* Adds up what the ranks sent; the sum replaces the leftmost operand. */
static float *join(reducer *r, uint32_t lo, uint32_t hi)
{
    for (size_t i = 0; i < r->nodes_before[r->size]; i++)
        if (r->nodes[i].lo == lo && r->nodes[i].hi == hi)
            return r->received + i * r->slice_count;
    uint32_t middle = tree_middle(lo, hi);
    float *left = join(r, lo, middle);
    add_into(left, join(r, middle, hi), r->slice_count);
    return left;
}

void reduce_gradients(reducer *r, float *slice)
{
    size_t size = (size_t)r->size, mine = nodes_of(r, r->rank);
    float *to = r->sent;
    for (int rank = 0; rank < r->size; rank++)
        for (size_t i = 0; i < mine; i++) {
            memcpy(to, r->sums + i * r->elements + slice_start(r, rank), slice_count(r, rank) * sizeof(float));
            to += slice_count(r, rank);
        }
    const int *send = r->counts, *send_at = send + size, *receive = send_at + size, *receive_at = receive + size;
    MPI_Alltoallv(r->sent, send, send_at, MPI_FLOAT, r->received, receive, receive_at, MPI_FLOAT, r->comm);
    memcpy(slice, join(r, 0, r->leaves), r->slice_count * sizeof(float));
}

double reduce_losses(reducer *r, const double *own)
{
    double *all = allocate(r->leaves, sizeof *all);
    int *counts = allocate(2 * (size_t)r->size, sizeof *counts);
    for (uint32_t rank = 0; rank < (uint32_t)r->size; rank++) {
        uint32_t from = tree_share(r->leaves, rank, (uint32_t)r->size);
        counts[rank] = (int)(tree_share(r->leaves, rank + 1, (uint32_t)r->size) - from);
        counts[(uint32_t)r->size + rank] = (int)from;
    }
    MPI_Allgatherv(own, (int)(r->end_leaf - r->first_leaf), MPI_DOUBLE, all, counts, counts + r->size, MPI_DOUBLE,
                   r->comm);
    double sum = tree_sum(all, r->leaves);
    free(counts);
    free(all);
    return sum;
}

void reduce_exact(reducer *r, exact_sum *sum, int *flag)
{
    int64_t values[EXACT_LIMBS + 2];
    memcpy(values, sum->limbs, sizeof sum->limbs);
    values[EXACT_LIMBS] = sum->not_finite;
    values[EXACT_LIMBS + 1] = *flag != 0;
    MPI_Allreduce(MPI_IN_PLACE, values, EXACT_LIMBS + 2, MPI_INT64_T, MPI_SUM, r->comm);
    memcpy(sum->limbs, values, sizeof sum->limbs);
    sum->not_finite = values[EXACT_LIMBS];
    *flag = values[EXACT_LIMBS + 1] != 0;
}

void reduce_share(reducer *r, float *buffer)
{
    MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, buffer, r->slices, r->slices + r->size, MPI_FLOAT, r->comm);
}

void reduce_collect(reducer *r, const float *slice, float *buffer)
{
    MPI_Gatherv(slice, (int)r->slice_count, MPI_FLOAT, buffer, r->slices, r->slices + r->size, MPI_FLOAT, 0, r->comm);
}
