/* SPDX-License-Identifier: Apache-2.0 */
#include "core/writer.h"

#include "base/mem.h"
#include "io/buffers.h"
#include "io/choice.h"
#include "store/queue.h"

#include <string.h>

#define MAX_BUFFERS LG__MAX_DEPTH
#define USUAL_BUFFERS 16 /* more does not make it faster */
#define MAX_FILES 16     /* open at a time: being filled, written, synced */
#define BUFFER_BYTES (UINT64_C(1) << 20)
/* Copied and digested at a time: stays in the processor's cache. */
#define STEP_BYTES (UINT64_C(64) << 10)
/* From the caller's memory, of which at least so much lies right for it. */
#define STRAIGHT_BYTES (UINT64_C(256) << 10)
/* In the place of a buffer's number in a token. */
#define STRAIGHT MAX_BUFFERS        /* a write without a buffer */
#define NO_BUFFER (MAX_BUFFERS + 1) /* a sync */
#define SEND_DEPTH 16               /* of a writer without buffers */

typedef struct out_file {
    lg_file *file; /* NULL: the slot is free */
    const char *name;
    uint32_t under_way; /* writes */
    bool ended, syncing;
} out_file;

struct lg__writer {
    lg_store *store;
    lg__queue *queue;
    lg__buffers memory;
    size_t buffer_bytes;
    uint32_t n_buffers;
    uint32_t spare[MAX_BUFFERS], n_spare;
    out_file files[MAX_FILES];
    /* the file that is being filled */
    out_file *now;
    uint8_t *buffer; /* NULL: none yet */
    uint32_t buffer_number;
    size_t used, digested; /* bytes of the buffer */
    uint64_t at;           /* place in the file of the buffer's first byte */
    uint64_t block_bytes, in_block, n_blocks;
    lg__table *table;
};

lg_status lg__writer_name_error(const char *name, lg_error *err)
{
    return strstr(err->message, name) != NULL ? err->status : lg_error_wrap(err, "%s", name);
}

/* -------------------------------------------------------------- completions */

static uint64_t token_of(const lg__writer *w, const out_file *f, uint32_t buffer)
{
    return (uint64_t)(f - w->files) * (NO_BUFFER + 1) + buffer;
}

static lg_status close_file(lg__writer *w, out_file *f, lg_error *err)
{
    lg_status status = lg__store_close(w->store, f->file, err);
    f->file = NULL;
    return status == LG_OK ? LG_OK : lg__writer_name_error(f->name, err);
}

/* Waits for one operation. */
static lg_status reap(lg__writer *w, lg_error *err)
{
    uint64_t token = 0;
    lg_status status = lg__queue_wait(w->queue, &token, err);
    out_file *f = &w->files[token / (NO_BUFFER + 1)];
    uint32_t buffer = (uint32_t)(token % (NO_BUFFER + 1));
    if (buffer == NO_BUFFER) {
        f->syncing = false;
        return status == LG_OK ? close_file(w, f, err) : lg__writer_name_error(f->name, err);
    }
    if (buffer != STRAIGHT) {
        w->spare[w->n_spare++] = buffer;
    }
    f->under_way--;
    if (status != LG_OK) {
        return lg__writer_name_error(f->name, err);
    }
    if (f->ended && f->under_way == 0) {
        f->syncing = true;
        const lg_queue_op sync = {.kind = LG_QUEUE_SYNC, .file = f->file, .token = token_of(w, f, NO_BUFFER)};
        status = lg__queue_submit(w->queue, &sync, err); /* there is room: a write has just ended */
        f->syncing = status == LG_OK;
        return status == LG_OK ? LG_OK : lg__writer_name_error(f->name, err);
    }
    return LG_OK;
}

static lg_status reap_until_room(lg__writer *w, lg_error *err)
{
    while (lg__queue_full(w->queue)) {
        LG__TRY(reap(w, err));
    }
    return LG_OK;
}

/* ------------------------------------------------------------------ filling */

static lg_status need_buffer(lg__writer *w, lg_error *err)
{
    while (w->n_spare == 0) {
        LG__TRY(reap(w, err));
    }
    w->buffer_number = w->spare[--w->n_spare];
    w->buffer = (uint8_t *)w->memory.data + w->buffer_number * w->buffer_bytes;
    w->used = w->digested = 0;
    return LG_OK;
}

/* Goes on with the digests of the file's blocks. */
static lg_status digest(lg__writer *w, const uint8_t *data, uint64_t bytes, lg_error *err)
{
    for (uint64_t n; bytes > 0; bytes -= n, data += n) {
        if (w->in_block == 0) {
            LG__RETURN_IF(w->n_blocks == w->table->n_blocks, err, LG_ERR_INTERNAL, "more data than planned");
            w->table->block_crc[w->n_blocks++] = 0;
        }
        n = w->block_bytes - w->in_block;
        n = n < bytes ? n : bytes;
        uint32_t *crc = &w->table->block_crc[w->n_blocks - 1];
        *crc = lg__crc32c(*crc, data, (size_t)n);
        w->in_block = (w->in_block + n) % w->block_bytes;
    }
    return LG_OK;
}

/* What is in the buffer and was not digested yet. */
static lg_status digest_buffer(lg__writer *w, lg_error *err)
{
    LG__TRY(digest(w, w->buffer + w->digested, w->used - w->digested, err));
    w->digested = w->used;
    return LG_OK;
}

/* Sends bytes off to the place that the file has come to. */
static lg_status submit(lg__writer *w, const uint8_t *data, size_t bytes, uint32_t buffer, lg_error *err)
{
    LG__TRY(reap_until_room(w, err));
    const lg_queue_op write = {.kind = LG_QUEUE_WRITE,
                               .file = w->now->file,
                               .data = (void *)(uintptr_t)data,
                               .bytes = bytes,
                               .offset = w->at,
                               .token = token_of(w, w->now, buffer)};
    LG__TRY(lg__queue_submit(w->queue, &write, err));
    w->now->under_way++;
    w->at += bytes;
    return LG_OK;
}

static lg_status flush(lg__writer *w, lg_error *err)
{
    LG__TRY(digest_buffer(w, err));
    LG__TRY(submit(w, w->buffer, w->used, w->buffer_number, err));
    w->buffer = NULL;
    return LG_OK;
}

static lg_status add(lg__writer *w, const uint8_t *data, uint64_t bytes, bool is_data, lg_error *err)
{
    while (bytes > 0) {
        if (w->buffer == NULL) {
            LG__TRY(need_buffer(w, err));
        }
        uint64_t n = w->buffer_bytes - w->used;
        n = n < bytes ? n : bytes;
        n = n < STEP_BYTES ? n : STEP_BYTES;
        lg__copy(w->buffer + w->used, data, (size_t)n);
        w->used += (size_t)n;
        data += n;
        bytes -= n;
        if (!is_data) {
            w->digested = w->used; /* the header has a digest of its own */
        } else if (w->used - w->digested >= STEP_BYTES) {
            LG__TRY(digest_buffer(w, err));
        }
        if (w->used == w->buffer_bytes) {
            LG__TRY(flush(w, err));
        }
    }
    return LG_OK;
}

lg_status lg__writer_append(lg__writer *w, const uint8_t *data, uint64_t bytes, lg_error *err)
{
    return add(w, data, bytes, true, err);
}

/* Where memory and file lie alike in their pages, whole pages go as they are,
 * past the page cache too; what is before and behind goes through buffers. */
lg_status lg__writer_append_kept(lg__writer *w, const uint8_t *data, uint64_t bytes, lg_error *err)
{
    const uint64_t at = w->at + (w->buffer != NULL ? w->used : 0);
    const uint64_t before = (LG__IO_ALIGN - at % LG__IO_ALIGN) % LG__IO_ALIGN;
    if (bytes < STRAIGHT_BYTES + LG__IO_ALIGN || ((uintptr_t)data - at) % LG__IO_ALIGN != 0) {
        return add(w, data, bytes, true, err);
    }
    LG__TRY(add(w, data, before, true, err));
    if (w->buffer != NULL) {
        LG__TRY(flush(w, err));
    }
    const uint64_t rest = (bytes - before) % LG__IO_ALIGN, straight = bytes - before - rest;
    for (uint64_t i = 0, n; i < straight; i += n) {
        n = straight - i < BUFFER_BYTES ? straight - i : BUFFER_BYTES;
        LG__TRY(digest(w, data + before + i, n, err));
        LG__TRY(submit(w, data + before + i, (size_t)n, STRAIGHT, err));
    }
    return add(w, data + before + straight, rest, true, err);
}

/* -------------------------------------------------------------------- files */

static lg_status free_slot(lg__writer *w, out_file **out, lg_error *err)
{
    for (;;) {
        for (out_file *f = w->files; f < w->files + MAX_FILES; f++) {
            if (f->file == NULL) {
                *out = f;
                return LG_OK;
            }
        }
        LG__TRY(reap(w, err));
    }
}

lg_status lg__writer_begin(lg__writer *w, const char *path, const char *name, const lg__buf *header,
                           uint64_t block_bytes, lg__table *table, lg_error *err)
{
    out_file *f = NULL;
    LG__TRY(free_slot(w, &f, err));
    *f = (out_file){.name = name};
    if (lg__store_create(w->store, path, table->file_bytes, &f->file, err) != LG_OK) {
        f->file = NULL;
        return lg__writer_name_error(name, err);
    }
    w->now = f;
    w->at = w->in_block = w->n_blocks = 0;
    w->block_bytes = block_bytes;
    w->table = table;
    if (header == NULL) {
        w->n_blocks = table->n_blocks;
        return LG_OK;
    }
    return add(w, (const uint8_t *)header->data, header->len, false, err);
}

lg_status lg__writer_send(lg__writer *w, const void *data, size_t bytes, lg_error *err)
{
    return submit(w, data, bytes, STRAIGHT, err);
}

lg_status lg__writer_end(lg__writer *w, lg_error *err)
{
    out_file *f = w->now;
    if (w->buffer != NULL) {
        LG__TRY(flush(w, err));
    }
    LG__RETURN_IF(w->at != w->table->file_bytes || w->n_blocks != w->table->n_blocks, err, LG_ERR_INTERNAL,
                  "%s: %llu bytes were written instead of %llu", f->name, (unsigned long long)w->at,
                  (unsigned long long)w->table->file_bytes);
    f->ended = true;
    w->now = NULL;
    if (f->under_way > 0) {
        return LG_OK; /* the last one to be done begins the sync */
    }
    LG__TRY(reap_until_room(w, err));
    const lg_queue_op sync = {.kind = LG_QUEUE_SYNC, .file = f->file, .token = token_of(w, f, NO_BUFFER)};
    LG__TRY(lg__queue_submit(w->queue, &sync, err));
    f->syncing = true;
    return LG_OK;
}

lg_status lg__writer_finish(lg__writer *w, lg_error *err)
{
    while (lg__queue_under_way(w->queue) > 0) {
        LG__TRY(reap(w, err));
    }
    return LG_OK;
}

/* -------------------------------------------------------------- life cycle */

lg_status lg__writer_new(lg_store *store, uint64_t memory, uint64_t expected, lg__writer **out, lg_error *err)
{
    lg__writer *w = lg__calloc(1, sizeof *w);
    if (w == NULL) {
        return lg__nomem(err);
    }
    /* Rather four small ones than one large one: they overlap. As many as are
     * asked for are had, small ones if must be. */
    const uint32_t asked = lg__io_wanted_depth();
    const uint64_t depth = asked == 0 || asked > MAX_BUFFERS ? USUAL_BUFFERS : asked, least = asked == 0 ? 4 : depth;
    uint64_t each = memory / least < BUFFER_BYTES ? memory / least / LG__IO_ALIGN * LG__IO_ALIGN : BUFFER_BYTES;
    each = each < LG__IO_ALIGN ? LG__IO_ALIGN : each;
    uint64_t n = memory / each < depth ? memory / each : depth;
    uint64_t needed = expected / each + 1; /* small saves need not all of it */
    n = n < needed ? n : needed;
    w->n_buffers = n == 0 ? 1 : (uint32_t)n;
    w->store = store;
    w->buffer_bytes = (size_t)each;
    w->memory = lg__buffers_new(w->n_buffers * w->buffer_bytes);
    lg_status status = w->memory.data == NULL ? lg__nomem(err) : LG_OK;
    while (w->n_spare < w->n_buffers) {
        w->spare[w->n_spare] = w->n_spare;
        w->n_spare++;
    }
    if (status == LG_OK) {
        const lg_queue_spec spec = {.depth = w->n_buffers, .memory = w->memory.data, .memory_bytes = w->memory.bytes};
        status = lg__queue_open(store, &spec, expected, &w->queue, err);
    }
    if (status != LG_OK) {
        lg__writer_free(w);
        return status;
    }
    *out = w;
    return LG_OK;
}

lg_status lg__writer_new_sending(lg_store *store, void *memory, size_t bytes, lg__writer **out, lg_error *err)
{
    lg__writer *w = lg__calloc(1, sizeof *w);
    if (w == NULL) {
        return lg__nomem(err);
    }
    w->store = store;
    const uint32_t asked = lg__io_wanted_depth();
    const lg_queue_spec spec = {.depth = asked != 0 ? asked : USUAL_BUFFERS, .memory = memory, .memory_bytes = bytes};
    lg_status status = lg__queue_open(store, &spec, bytes, &w->queue, err);
    if (status != LG_OK) {
        lg__writer_free(w);
        return status;
    }
    *out = w;
    return LG_OK;
}

void lg__writer_free(lg__writer *w)
{
    if (w == NULL) {
        return;
    }
    lg__queue_close(w->queue);
    for (out_file *f = w->files; f < w->files + MAX_FILES; f++) {
        lg_error ignored = LG_ERROR_INIT;
        (void)lg__store_close(w->store, f->file, &ignored);
    }
    lg__buffers_free(&w->memory);
    lg__free(w);
}
