/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_DIFF_H
#define LG_CLI_DIFF_H

/* Comparing two checkpoints: tensors (diff_tensor.c), state and attached files
 * (diff_state.c). Equal means: the same bits, however they are sharded. */

#include "show_parts.h"

typedef enum difference {
    DIFF_EQUAL,
    DIFF_VALUES,
    DIFF_FORM, /* dtype or shape */
    DIFF_ONLY_A,
    DIFF_ONLY_B
} difference;

const char *difference_name(difference d); /* "equal", "different", … */

typedef struct tensor_diff {
    difference what;
    uint64_t elements;  /* compared; of all copies where ranks keep their own */
    uint64_t differing; /* bits differ, and the values by more than the tolerance */
    bool bit_exact;
    bool has_largest; /* some numbers differ; the next two say how much and where */
    double largest;   /* |a - b| */
    uint64_t at[LG_MAX_NDIM];
    uint64_t nan;      /* elements that are nan on one side only */
    bool packed;       /* elements are bytes: the dtype has fewer bits */
    size_t copies;     /* pairs of ranks' copies that were compared; 0: it is the same on all ranks */
    bool first_copies; /* other copies exist, and could not be compared */
} tensor_diff;

/* `progress` gets the bytes of each piece. tolerance < 0: none. */
lg_status diff_tensors(const view *a, const view *b, const lg_tensor_info *ta, const lg_tensor_info *tb,
                       double tolerance, void (*progress)(uint64_t bytes), tensor_diff *out, lg_error *err);

/* A difference in state or attached files. */
typedef struct state_diff {
    const char *kind; /* "state", "rank_state", "attached" */
    char *key;
    difference what;
    char *a, *b; /* what each has, in short; NULL: nothing to show */
} state_diff;

typedef struct state_diffs {
    state_diff *all; /* without equal ones */
    size_t n, cap;
    size_t equal[3];   /* state, rank state, attached: how many were equal */
    bool ranks_differ; /* another number of ranks: per-rank state was not compared */
} state_diffs;

lg_status diff_states(const view *a, const view *b, state_diffs *out, lg_error *err);
void diff_states_free(state_diffs *d);

#endif
