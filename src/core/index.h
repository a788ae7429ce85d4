/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_INDEX_H
#define LG_CORE_INDEX_H

/* A hash table from byte strings to numbers: names of a save's tensors to their
 * places. It keeps pointers to the keys, whose memory must outlive it. All
 * zeros is an empty one. */

#include "base/error.h"

#include <stdbool.h>

typedef struct lg__index {
    struct lg__index_slot *slots;
    size_t n, cap; /* cap: a power of two, or 0 */
} lg__index;

void lg__index_free(lg__index *ix);
bool lg__index_find(const lg__index *ix, const void *key, size_t bytes, size_t *value);
/* The key must not be in it yet. */
lg_status lg__index_add(lg__index *ix, const void *key, size_t bytes, size_t value, lg_error *err);

#endif
