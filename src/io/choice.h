/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_IO_CHOICE_H
#define LG_IO_CHOICE_H

/* Which engine moves the bytes, and whether past the page cache.
 *
 * src/io/ knows descriptors and memory, not stores: choice.c says what is
 * wanted, uring.c drives io_uring, pool.c runs blocking calls on threads,
 * buffers.c gives the memory. docs/performance.md is the user's page. */

#include <stdbool.h>
#include <stdint.h>

typedef enum lg__io_engine {
    LG__IO_AUTO,     /* io_uring where it works, else threads; small things in the caller's thread */
    LG__IO_URING,    /* an error where it does not work */
    LG__IO_THREADS,  /* a few threads with blocking calls */
    LG__IO_BLOCKING, /* in the caller's thread, one after the other */
    LG__IO_UNKNOWN   /* the environment names none of these */
} lg__io_engine;

typedef enum lg__io_direct {
    LG__DIRECT_AUTO, /* large files, and reading only what is not in the page cache */
    LG__DIRECT_ON,   /* whatever is aligned, of any size, cached or not */
    LG__DIRECT_OFF,
    LG__DIRECT_UNKNOWN
} lg__io_direct;

/* Operations that one queue may have under way. */
#define LG__MAX_DEPTH 64
#define LG__DEPTH_UNKNOWN UINT32_MAX

/* From LASTGOOD_IO, LASTGOOD_DIRECT and LASTGOOD_DEPTH, read once. */
lg__io_engine lg__io_wanted_engine(void);
lg__io_direct lg__io_wanted_direct(void);
/* 0: not set. LG__DEPTH_UNKNOWN: no number from 1 to LG__MAX_DEPTH. */
uint32_t lg__io_wanted_depth(void);

/* Tests: from now on instead. */
void lg__io_set(lg__io_engine engine, lg__io_direct direct);
void lg__io_set_depth(uint32_t depth);

/* What LG__IO_AUTO comes to here: "uring" or "threads". */
const char *lg__io_engine_name(lg__io_engine engine);

#endif
