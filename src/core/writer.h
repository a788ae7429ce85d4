/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_WRITER_H
#define LG_CORE_WRITER_H

/* The files of one rank on their way to the store. Bytes are copied into one of
 * a few buffers, digested block by block while they are in the processor's
 * cache, and handed to the store's queue when the buffer is full; the next one
 * fills meanwhile. What is digested is what is written, from the buffer, even
 * if the source should change under our hands (but see lg__writer_append_kept).
 * When all buffers are under way
 * the producer waits: memory is bounded by what was given at the start.
 *
 * A file is synced as soon as its last byte is written, beside the writing of
 * the next ones, and closed. After any error only lg__writer_free may be
 * called. */

#include "format/sums.h"
#include "store/store.h"

typedef struct lg__writer lg__writer;

/* At most `memory` bytes of buffers (at least one of 4096). `expected`: bytes
 * that all files come to. */
lg_status lg__writer_new(lg_store *store, uint64_t memory, uint64_t expected, lg__writer **out, lg_error *err);
/* Leaves nothing running and no file open. NULL is fine. */
void lg__writer_free(lg__writer *w);

/* Creates the next file and puts its header in front. `name` is for messages
 * and stays until the end; block_crc of `table` is filled by append. */
lg_status lg__writer_begin(lg__writer *w, const char *path, const char *name, const lg__buf *header,
                           uint64_t block_bytes, lg__table *table, lg_error *err);
/* header NULL: it comes by lg__writer_send. */
lg_status lg__writer_append(lg__writer *w, const uint8_t *data, uint64_t bytes, lg_error *err);
/* The same for memory that stays as it is until lg__writer_finish or _free: where
 * it lies like the file in its pages, and is long, it is written from where it
 * is, without a copy. Should it change meanwhile, its digest does not fit what
 * was written, which every load finds. */
lg_status lg__writer_append_kept(lg__writer *w, const uint8_t *data, uint64_t bytes, lg_error *err);
/* All of the file's data has come: as many bytes and blocks as the table says. */
lg_status lg__writer_end(lg__writer *w, lg_error *err);

/* A writer of what lies in `memory` already, which outlives it: instead of
 * appending, parts of it are sent as they are. block_crc of a table is the
 * caller's then. */
lg_status lg__writer_new_sending(lg_store *store, void *memory, size_t bytes, lg__writer **out, lg_error *err);
/* The next bytes of the file; they do not change until the writer is finished. */
lg_status lg__writer_send(lg__writer *w, const void *data, size_t bytes, lg_error *err);

/* Waits until all files are durable and closed. */
lg_status lg__writer_finish(lg__writer *w, lg_error *err);

/* Puts the file's name before an error, unless the store did. */
lg_status lg__writer_name_error(const char *name, lg_error *err);

#endif
