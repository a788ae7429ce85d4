/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_CRASH_DISK_H
#define LG_TESTS_CRASH_DISK_H

/* What a power cut may leave of what a crash_store wrote down.
 *
 * The model is the weakest that the store's contract allows. Only a sync of a
 * file makes its contents durable, only a sync of a folder the names in it.
 * Of what was not synced,
 *
 *   names      each creation, removal and rename is kept or lost on its own, in
 *              any combination, whatever their order; a rename is kept or lost
 *              as a whole;
 *   contents   of a file are all there, as before, of the right length but
 *              zeros, cut in the middle, without their first half, with a sector
 *              of garbage, or those that an older file of this name had in its
 *              place (a block that was reused and not overwritten).
 *
 * A folder that is moved takes along what is in it, durable or not. */

#include "crash_store.h"

typedef struct crash_item {
    const char *folder; /* "" is the root */
    const char *name;
    bool is_dir;
    const uint8_t *data;
    size_t bytes;
    const char *how; /* "", or what became of unsynced contents */
} crash_item;

/* Folders come before their files. */
typedef struct crash_tree {
    const crash_item *items;
    size_t n;
    uint64_t hash; /* equal trees have equal hashes */
} crash_tree;

typedef struct crash_disk crash_disk;

/* The disk before the first event. The store outlives it and rests meanwhile. */
crash_disk *crash_disk_new(crash_store *s);
void crash_disk_free(crash_disk *d);
/* Lets the next event happen; NULL when there is none. */
const crash_event *crash_disk_step(crash_disk *d);

typedef struct crash_effort {
    uint64_t all;     /* if there are at most so many combinations, each is made */
    uint64_t samples; /* else so many: each choice alone, then random ones */
    uint64_t *random; /* state of the generator, not 0 */
} crash_effort;

/* Calls fn for the trees that a power cut now may leave, some more than once;
 * stops when fn returns nonzero. True: for all of them. */
bool crash_disk_visit(crash_disk *d, const crash_effort *effort, int (*fn)(const crash_tree *tree, void *arg),
                      void *arg);

/* The next start: a store in which this tree lies; `record`: which writes down
 * what happens there, beginning with how the tree was made. */
crash_store *crash_tree_boot(const crash_tree *tree, uint32_t caps, bool record);
void crash_tree_print(const crash_tree *tree); /* to stderr */

uint64_t crash_random(uint64_t *state);

#endif
