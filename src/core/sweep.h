/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_SWEEP_H
#define LG_CORE_SWEEP_H

#include "core/walk.h"

/* Removes what crashes left behind, of epochs below `epoch`: trash, partial
 * folders, and tombstones that are older than every committed checkpoint.
 * `fn` (may be NULL) gets each name. Nothing at all while the root holds a
 * manifest of a newer version. Goes on after trouble with one name and returns
 * the first trouble. */
lg_status lg__sweep_root(lg_store *store, uint64_t epoch, bool dry_run,
                         void (*fn)(const char *name, uint64_t bytes, void *arg), void *arg, lg_error *err);

#endif
