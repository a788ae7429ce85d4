/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_FINITE_H
#define LG_CORE_FINITE_H

/* Finds NaN and infinity in memory, by bit patterns. */

#include "core/save.h"

/* Where in `bytes` bytes (whole elements, any alignment) the first element
 * that is not finite begins; `bytes` if there is none. Dtypes without NaN and
 * infinity always are. */
size_t lg__finite_scan(lg_dtype dtype, const void *data, size_t bytes);

/* The bytes of a box from byte `at` on, whole elements: LG_ERR_INVALID that
 * names tensor and element if one is not finite. */
lg_status lg__finite_check(const lg__plan_box *box, const uint8_t *data, uint64_t bytes, uint64_t at, lg_error *err);

#endif
