/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_LOAD_SHARED_H
#define LG_CORE_LOAD_SHARED_H

/* A load of all ranks of a communicator in which what several of them want is
 * read once: each reads a piece, checked, and they exchange the pieces.
 *
 *   1. All ranks tell each other what they want: a digest of each region. What
 *      two or more want alike is shared by exactly those.
 *   2. A shared region is cut into pieces of 64 KiB or more, at most one a member;
 *      from the list of members every member knows who reads which.
 *   3. Every rank loads its pieces and all that is its own, as lg_load_run does.
 *   4. They agree that all went well. One rank's error is everybody's.
 *   5. The pieces are sent round by round, of so many bytes that all buffers
 *      together keep to load->buffer_bytes, straight out of and into the
 *      targets' memory, with a CRC32C each.
 */

#include "comm/comm.h"
#include "core/checkpoint.h"

typedef enum lg__share {
    LG__SHARE_AUTO, /* regions of 1 MiB or more, unless all ranks find them in memory */
    LG__SHARE_ON,   /* regions of any size */
    LG__SHARE_OFF
} lg__share;

/* Collective. `mine` is what came of describing the load, with `err`; `load` may
 * then be NULL. `share` is the same on all ranks. The result is this rank's; the
 * caller agrees on it with the others. */
lg_status lg__load_shared(lg_load *load, lg_comm *comm, lg__share share, lg_status mine, uint64_t deadline_ms,
                          lg_error *err);

#endif
