/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_STORE_SNAPSHOT_H
#define LG_STORE_SNAPSHOT_H

/* A folder's names, collected before the first of them is shown to the caller
 * of `list`, so that its callback may create, rename and remove names (some
 * file systems skip entries when a folder shrinks while it is being read) and
 * no lock is held meanwhile. */

#include "store/store.h"

/* Appends one name. */
void lg__snapshot_add(lg__buf *names, const char *name, lg_node_type type, uint64_t bytes);

/* Calls fn for each until it returns nonzero, then frees the buffer. */
lg_status lg__snapshot_visit(lg__buf *names, int (*fn)(const lg_node *node, void *arg), void *arg, lg_error *err);

#endif
