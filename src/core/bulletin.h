/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_BULLETIN_H
#define LG_CORE_BULLETIN_H

/* How the ranks of a save in the background learn of each other without
 * collectives: by files in the folder that is being written (a sums file under
 * its name: this rank is done; rank-00001.failed: it failed; the final folder:
 * committed; failed: given up), or by keys of a store that the caller gave.
 *
 *     lastgood/<attempt>/rank-<r>    rank r, from 0, to the coordinator
 *     lastgood/<attempt>/result      the coordinator to all */

#include "core/commit.h"

typedef struct lg__bulletin {
    lg_store *store;
    lg_kv *kv; /* NULL: files */
    const lg__attempt *attempt;
    uint64_t epoch;
    uint32_t rank, world;
} lg__bulletin;

/* This rank has written its part, or failed with *cause. */
lg_status lg__bulletin_post(const lg__bulletin *b, lg_status mine, const lg__written *written, const lg_error *cause,
                            lg_error *err);

/* On the coordinator: waits for all others; fills written[r] of all ranks but
 * its own. The first rank's failure, worded for everybody, or LG_ERR_TIMEOUT
 * that names who is late. */
lg_status lg__bulletin_collect(const lg__bulletin *b, uint64_t deadline_ms, lg__written *written, lg_error *err);

/* The coordinator tells the result: LG_OK committed, else *cause. With files
 * only the cause needs telling; false: that could not be written. */
bool lg__bulletin_announce(const lg__bulletin *b, lg_status result, const lg_error *cause);

/* For so long a folder must be gone before one of the others takes that for its
 * end: network file systems show a renamed one late. A wrong guess is put right
 * by the next exchange. Tests of many takeovers shorten it, before any thread. */
extern uint64_t lg__bulletin_vanished_ms;

/* On the others: waits for the result. */
lg_status lg__bulletin_watch(const lg__bulletin *b, uint64_t deadline_ms, lg_error *err);

/* Every rank knows the result: this rank's keys go. */
void lg__bulletin_clear(const lg__bulletin *b);

#endif
