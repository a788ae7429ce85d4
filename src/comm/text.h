/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_COMM_TEXT_H
#define LG_COMM_TEXT_H

/* Words that the communicators' messages share. Inline, since the MPI library
 * sees only the core's public symbols. */

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef enum lg__comm_op {
    LG__COMM_BARRIER = 1,
    LG__COMM_ALL_GATHER = 2,
    LG__COMM_BROADCAST = 3,
    LG__COMM_ALL_TO_ALL = 4
} lg__comm_op;

#define LG__COMM_CALL_TEXT 96

/* "all-gather #17"; `root` counts for broadcasts only. */
static inline const char *lg__comm_call_text(lg__comm_op op, uint32_t root, uint64_t seq, char out[LG__COMM_CALL_TEXT])
{
    switch (op) {
    case LG__COMM_BARRIER:
        snprintf(out, LG__COMM_CALL_TEXT, "barrier #%" PRIu64, seq);
        break;
    case LG__COMM_ALL_GATHER:
        snprintf(out, LG__COMM_CALL_TEXT, "all-gather #%" PRIu64, seq);
        break;
    case LG__COMM_BROADCAST:
        snprintf(out, LG__COMM_CALL_TEXT, "broadcast #%" PRIu64 " from rank %" PRIu32, seq, root);
        break;
    case LG__COMM_ALL_TO_ALL:
        snprintf(out, LG__COMM_CALL_TEXT, "all-to-all #%" PRIu64, seq);
        break;
    default:
        snprintf(out, LG__COMM_CALL_TEXT, "unknown call #%" PRIu64, seq);
        break;
    }
    return out;
}

#define LG__COMM_RANKS_TEXT 320
#define LG__COMM_RANKS_SHOWN 16

/* "rank 2, 5" of those r < size with listed(arg, r); at most 16 numbers, then
 * "and 4080 more". *first gets the lowest, -1 if there is none. */
static inline const char *lg__comm_ranks_text(uint32_t size, bool (*listed)(const void *arg, uint32_t r),
                                              const void *arg, char out[LG__COMM_RANKS_TEXT], int *first)
{
    size_t n = 0;
    uint32_t found = 0;
    *first = -1;
    out[0] = '\0';
    for (uint32_t r = 0; r < size; r++) {
        if (!listed(arg, r)) {
            continue;
        }
        if (found == 0) {
            *first = (int)r;
        }
        if (found < LG__COMM_RANKS_SHOWN) {
            n += (size_t)snprintf(out + n, LG__COMM_RANKS_TEXT - n, "%s%" PRIu32, found == 0 ? "rank " : ", ", r);
        }
        found++;
    }
    if (found > LG__COMM_RANKS_SHOWN) {
        snprintf(out + n, LG__COMM_RANKS_TEXT - n, " and %" PRIu32 " more", found - LG__COMM_RANKS_SHOWN);
    }
    return out;
}

#endif
