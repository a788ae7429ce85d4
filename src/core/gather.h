/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_GATHER_H
#define LG_CORE_GATHER_H

/* The bytes of a box, packed row-major as in its file, out of memory that may
 * lie otherwise. */

#include "core/save.h"

/* Where tiles of transposed memory are put together. Belongs to the caller. */
typedef struct lg__scratch {
    uint8_t *data;
    size_t bytes;
} lg__scratch;

/* Gets the next `bytes` bytes of the box, which begin at byte `at` of it; whole
 * elements; `data` holds only during the call. */
typedef lg_status (*lg__gather_fn)(const uint8_t *data, uint64_t bytes, uint64_t at, void *arg, lg_error *err);

/* Calls fn for all bytes of the box in order. Runs that lie contiguous in
 * memory are handed on where they are. Where neighbours in the box are far
 * apart in memory (transposed, channels last), tiles go through the scratch,
 * so that each cache line is fetched once and not once an element. */
lg_status lg__gather(const lg__plan_box *box, lg__scratch scratch, lg__gather_fn fn, void *arg, lg_error *err);

#endif
