/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_MERGE_H
#define LG_CORE_MERGE_H

/* Between merge.c and merge_uses.c. */

#include "core/save.h"

/* Checks that every member of each layout's rank set took part with the same
 * tensors: as many, with the same sum of fingerprints. m's layouts and tensors
 * are complete; by_layout finds a layout's place in m by its id. */
lg_status lg__merge_check_uses(const lg__report *const *reports, uint32_t world, const lg__manifest *m,
                               const lg__index *by_layout, lg_error *err);

#endif
