/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_LOAD_WINDOW_H
#define LG_CORE_LOAD_WINDOW_H

/* Shared by the load_*.c files: load_read.c hands out windows and runs the
 * threads, load_window.c reads one window, checks it and puts the bytes where
 * they belong.
 *
 * A *window* is a range of whole blocks of one file's data, of a few MiB. All
 * parts that touch it are walked twice: first to mark the blocks they need,
 * then, when these are read and checked, to copy the bytes. A block that one
 * run covers whole, and that nothing else needs, is read straight into its
 * destination and checked there, unless another way is faster or the only one
 * (page cache, alignment): then it is copied there while it is checked. So every block is read once, no block
 * is read that nothing needs, and memory is bounded, whatever the shape of the
 * parts. Windows do not depend on each other. */

#include "core/checkpoint.h"
#include "io/buffers.h"
#include "store/queue.h"

typedef struct lg__read_file { /* open, while windows of it are being read */
    lg__shard *shard;
    lg_file *file;
    const lg__table *table; /* NULL: unverified */
    uint64_t data_start, data_bytes;
    uint32_t users; /* under the lock of load_read.c */
} lg__read_file;

typedef struct lg__window {
    uint64_t number; /* in the order they are handed out */
    lg__read_file *file;
    uint64_t block_bytes;
    uint64_t begin, end; /* of the file's data; begin is a multiple of block_bytes */
    const lg__fetch *fetches;
    size_t n_fetches;
    char *buffer;         /* aligned, as large as a window may be */
    uint8_t *state;       /* one a block */
    char **to;            /* one a block: where its first byte belongs, of those read in place */
    const lg__fetch *now; /* being walked */
    uint64_t delivered;   /* by the walk of `now` */
    uint32_t under_way;   /* reads */
    lg_status status;     /* the first failure by place in the file */
    uint64_t failed_at;
    lg_error err;
} lg__window;

/* One read out of the page cache: the checksum finds it in the processor's. */
#define LG__PIECE_BYTES (UINT64_C(256) << 10)

/* One thread's reading: its queue and the windows it has under way. */
#define LG__READER_WINDOWS 4
typedef struct lg__reader {
    lg_checkpoint *c;
    uint64_t window_bytes, expected, read_bytes;
    uint32_t n_windows, depth;
    lg__queue *queue;   /* NULL until something is worth it */
    lg__buffers memory; /* of all windows; none until needed */
    lg__buffers piece;  /* LG__PIECE_BYTES and a page; none until needed */
    lg__window windows[LG__READER_WINDOWS];
    uint8_t *state;
    char **to;
} lg__reader;

lg_status lg__reader_init(lg__reader *r, lg_error *err);
void lg__reader_free(lg__reader *r); /* waits for what is under way */

/* Calls fn for the runs of `part`, which lies in the box of `f`. */
lg_status lg__fetch_runs(const lg__fetch *f, const lg__region *part, lg__run_fn fn, void *arg, lg_error *err);

/* Marks what window `w` of the reader (its file, range and fetches are set)
 * needs, and begins to read it. Errors are in the window. */
void lg__window_begin(lg__reader *r, lg__window *w);
/* Waits for its reads and copies. Its result is in the window. */
void lg__window_finish(lg__reader *r, lg__window *w);

#endif
