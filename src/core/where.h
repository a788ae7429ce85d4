/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_WHERE_H
#define LG_CORE_WHERE_H

/* Where the user points: a root, a step folder, ROOT@STEP, ROOT@gEPOCH.SERIAL. */

#include "core/walk.h"

typedef struct lg__where {
    char *root; /* URI or path of the root; lg__free */
    enum { LG__WHERE_ROOT, LG__WHERE_FOLDER, LG__WHERE_STEP, LG__WHERE_GENERATION } kind;
    char folder[LG__NAME_MAX]; /* FOLDER */
    uint64_t step;
    lg_generation generation;
} lg__where;

/* Looks at the store only to tell a root from a step folder. */
lg_status lg__where_parse(const char *where, lg__where *out, lg_error *err);
void lg__where_free(lg__where *w);

/* Opens the root's store and finds the item that is meant: the newest good one
 * (manifest and sizes) of a root, the newest generation of a step. For a root
 * without any: LG_ERR_EMPTY or LG_ERR_NO_GOOD. One that is named may have a
 * manifest that cannot be read: its m is NULL then. *walk and *item belong
 * together; *store and *walk are the caller's. */
lg_status lg__where_find(const char *where, lg_store **store, lg__walk **walk, lg__walk_item **item, lg_error *err);

#endif
