/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_SHOW_PARTS_H
#define LG_CLI_SHOW_PARTS_H

/* The parts that `show` prints. Each fills the document with --json. */

#include "place.h"

typedef struct view {
    lg_checkpoint *k;
    const char *where;  /* as given */
    const char *folder; /* path of the step folder */
    lg_checkpoint_info info;
} view;

/* Those that match; pattern NULL: all. Returns how many. */
size_t show_tensors(cli *c, const view *v, const char *pattern);
/* One tensor: its boxes and who holds them. Returns an exit status. */
int show_tensor(cli *c, const view *v, const lg_tensor_info *t);
void show_layouts(cli *c, const view *v);
void show_files(cli *c, const view *v);
int show_state(cli *c, const view *v);

/* A value of global state for people: its JSON, with the tags of numbers that
 * JSON lacks taken off (docs/format-shards.md); at most `limit` bytes, 0 = all.
 * free() it. */
char *state_words(const char *json, size_t limit);

/* What a layout's canonical text means, in words; free() it. */
char *layout_words(const char *canonical);

/* Keys of per-rank state. Their names are free()d by rank_keys_free. */
typedef struct rank_key {
    char *name;
    uint32_t ranks; /* that have it */
    uint64_t least, most;
} rank_key;
typedef struct rank_keys {
    rank_key *all;
    size_t n, cap;
} rank_keys;
/* Of the first `world` ranks. Files that cannot be read are passed over. */
void rank_keys_read(const view *v, uint32_t world, rank_keys *out);
void rank_keys_free(rank_keys *keys);

#endif
