/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_FINITE_H
#define LG_CORE_FINITE_H

/* Finds NaN and infinity in memory, by bit patterns. */

#include <lastgood/lastgood.h>

/* Where in `bytes` bytes (whole elements, any alignment) the first element
 * that is not finite begins; `bytes` if there is none. Dtypes without NaN and
 * infinity always are. */
size_t lg__finite_scan(lg_dtype dtype, const void *data, size_t bytes);

#endif
