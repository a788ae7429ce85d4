/* SPDX-License-Identifier: Apache-2.0 */
#include "core/load_window.h"

#include "base/mem.h"
#include "io/crc_copy.h"

#include <string.h>

/* Shorter runs are copied from the buffer: one read of their surroundings is
 * cheaper than several. */
#define DIRECT_BYTES (UINT64_C(256) << 10)

enum {
    BLOCK_UNUSED = 0,
    BLOCK_BUFFERED, /* read into the buffer, copied from there when the window is complete */
    BLOCK_DIRECT,   /* read to where it belongs */
    BLOCK_BOUNCED   /* read into the buffer, and copied to where it belongs as soon as it is checked */
};

static uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

static size_t block_of(const lg__window *w, uint64_t at) { return (size_t)((at - w->begin) / w->block_bytes); }

static uint64_t block_begin(const lg__window *w, size_t block) { return w->begin + block * w->block_bytes; }

static uint64_t block_end(const lg__window *w, size_t block)
{
    return min_u64(block_begin(w, block) + w->block_bytes, w->file->data_bytes);
}

lg_status lg__block_error(lg_checkpoint *c, const lg__shard *s, uint64_t data_start, uint64_t block, uint32_t found,
                          uint32_t expected, const char *tensor, lg_error *err)
{
    uint64_t begin = data_start + block * c->m->block_bytes, end = begin + c->m->block_bytes;
    end = end < s->bytes ? end : s->bytes;
    char name[300];
    return lg_error_set(err, LG_ERR_CORRUPT,
                        "%s/%s: block at %llu..%llu is damaged (crc32c 0x%08x expected 0x%08x), it holds part of "
                        "tensor \"%s\" of rank %u",
                        c->folder, s->name, (unsigned long long)begin, (unsigned long long)end, found, expected,
                        lg__printable(tensor, name, sizeof name), s->rank);
}

/* ------------------------------------------------------------ walking parts */

/* Clips a run to the window; false if nothing is left. */
static bool clip(const lg__window *w, uint64_t box_byte, int64_t mem_byte, uint64_t bytes, uint64_t *begin,
                 uint64_t *end, char **to)
{
    uint64_t at = w->now->entry->begin + box_byte;
    *begin = max_u64(at, w->begin);
    *end = min_u64(at + bytes, w->end);
    if (*begin >= *end) {
        return false;
    }
    *to = w->now->to.data + mem_byte + (*begin - at);
    return true;
}

static lg_status mark_run(uint64_t box_byte, int64_t mem_byte, uint64_t bytes, void *arg, lg_error *err)
{
    (void)err;
    lg__window *w = arg;
    uint64_t begin, end;
    char *to;
    if (!clip(w, box_byte, mem_byte, bytes, &begin, &end, &to)) {
        return LG_OK;
    }
    for (size_t b = block_of(w, begin), last = block_of(w, end - 1); b <= last; b++) {
        bool whole = begin <= block_begin(w, b) && block_end(w, b) <= end;
        if (whole && w->state[b] == BLOCK_UNUSED) {
            w->state[b] = BLOCK_DIRECT;
            w->to[b] = to + (block_begin(w, b) - begin);
        } else {
            w->state[b] = BLOCK_BUFFERED;
        }
    }
    return LG_OK;
}

static lg_status copy_run(uint64_t box_byte, int64_t mem_byte, uint64_t bytes, void *arg, lg_error *err)
{
    (void)err;
    lg__window *w = arg;
    uint64_t begin, end;
    char *to;
    if (!clip(w, box_byte, mem_byte, bytes, &begin, &end, &to)) {
        return LG_OK;
    }
    w->delivered += end - begin;
    for (uint64_t at = begin; at < end;) {
        /* Neighbours of a kind in one copy. */
        size_t b = block_of(w, at);
        uint8_t kind = w->state[b];
        uint64_t stop = block_end(w, b);
        while (stop < end && w->state[b + 1] == kind) {
            stop = block_end(w, ++b);
        }
        stop = min_u64(stop, end);
        if (kind == BLOCK_BUFFERED) {
            lg__copy(to + (at - begin), w->buffer + (at - w->begin), (size_t)(stop - at));
        }
        at = stop;
    }
    return LG_OK;
}

lg_status lg__fetch_runs(const lg__fetch *f, const lg__region *part, lg__run_fn fn, void *arg, lg_error *err)
{
    lg__region box = {.ndim = f->entry->ndim};
    memcpy(box.offset, f->box_offset, box.ndim * sizeof *box.offset);
    memcpy(box.size, f->entry->shape, box.ndim * sizeof *box.size);
    const lg__run_walk walk = {.dtype = f->entry->dtype,
                               .box = &box,
                               .part = part,
                               .mem_origin = f->to.mem_origin,
                               .mem_size = f->to.mem_size,
                               .strides = f->to.strides};
    return lg__region_runs(&walk, fn, arg, err);
}

/* Calls fn for the runs of one fetch that may touch the window. */
static lg_status walk_fetch(lg__window *w, const lg__fetch *f, lg__run_fn fn, lg_error *err)
{
    w->now = f;
    if (f->one_run) {
        return fn(f->begin - f->entry->begin, f->run_to, f->end - f->begin, w, err);
    }
    uint32_t ndim = f->entry->ndim;
    lg__region part = {.ndim = ndim};
    memcpy(part.offset, f->to.offset, ndim * sizeof *part.offset);
    memcpy(part.size, f->to.size, ndim * sizeof *part.size);
    uint64_t bytes = lg_dtype_bits(f->entry->dtype) / 8;
    bool inside = w->begin <= f->begin && f->end <= w->end;
    if (inside || bytes == 0) {
        /* Dtypes below a byte are walked as a whole: a row may end inside a
         * byte, so cutting out some rows would not do. */
        return lg__fetch_runs(f, &part, fn, w, err);
    }
    /* The elements of the box that lie in the window, as boxes. */
    uint64_t first = (max_u64(w->begin, f->begin) - f->entry->begin) / bytes;
    uint64_t last = (min_u64(w->end, f->end) - f->entry->begin + bytes - 1) / bytes;
    lg__region cut[LG__MAX_FLAT_BOXES], common;
    size_t n = lg__region_cut_flat(ndim, f->entry->shape, first, last, cut);
    for (size_t i = 0; i < n; i++) {
        for (uint32_t d = 0; d < ndim; d++) {
            cut[i].offset[d] += f->box_offset[d];
        }
        if (lg__region_intersect(&cut[i], &part, &common)) {
            LG__TRY(lg__fetch_runs(f, &common, fn, w, err));
        }
    }
    return LG_OK;
}

static lg_status walk_all(lg__window *w, lg__run_fn fn, lg_error *err)
{
    for (size_t i = 0; i < w->n_fetches; i++) {
        const lg__fetch *f = &w->fetches[i];
        if (f->begin < w->end && f->end > w->begin) {
            w->delivered = 0;
            LG__TRY(walk_fetch(w, f, fn, err));
            if (w->delivered > 0) { /* other threads may have windows of the same target */
                __atomic_fetch_add(f->done, w->delivered, __ATOMIC_RELAXED);
            }
        }
    }
    return LG_OK;
}

/* ----------------------------------------------------------------- checking */

/* Whose bytes are in a block, for a message. */
static const char *tensor_in(const lg__window *w, size_t block)
{
    for (size_t i = 0; i < w->n_fetches; i++) {
        const lg__fetch *f = &w->fetches[i];
        if (f->begin < block_end(w, block) && f->end > block_begin(w, block)) {
            return f->name;
        }
    }
    return "?";
}

/* Keeps the failure that lies first in the file, so that the message does not
 * depend on which read was done first. */
static void failed(lg__window *w, size_t block, const lg_error *why)
{
    if (w->status == LG_OK || block_begin(w, block) < w->failed_at) {
        w->status = why->status;
        w->err = *why;
        w->failed_at = block_begin(w, block);
    }
}

static char *place_of(const lg__window *w, size_t block)
{
    return w->state[block] == BLOCK_DIRECT ? w->to[block] : w->buffer + (block_begin(w, block) - w->begin);
}

/* Checks blocks [first, end), which were read to `data`. */
static void check_blocks(lg_checkpoint *c, lg__window *w, size_t first, size_t end, const char *data)
{
    const lg__table *table = w->file->table;
    for (size_t b = first; b < end; b++) {
        uint64_t number = block_begin(w, b) / w->block_bytes;
        size_t bytes = (size_t)(block_end(w, b) - block_begin(w, b));
        uint32_t crc = 0;
        if (w->state[b] == BLOCK_BOUNCED && table != NULL) {
            crc = lg__crc32c_copy_away(w->to[b], data, bytes);
        } else if (w->state[b] == BLOCK_BOUNCED) {
            lg__copy_away(w->to[b], data, bytes);
        } else if (table != NULL) {
            crc = lg__crc32c(0, data, bytes);
        }
        if (table != NULL && crc != table->block_crc[number]) {
            lg_error why = LG_ERROR_INIT;
            lg__block_error(c, w->file->shard, w->file->data_start, number, crc, table->block_crc[number],
                            tensor_in(w, b), &why);
            failed(w, b, &why);
            return;
        }
        data += bytes;
    }
}

/* What came of reading blocks [first, end) to `data`. */
static void blocks_read(lg_checkpoint *c, lg__window *w, size_t first, size_t end, const char *data, lg_status status,
                        lg_error *why)
{
    if (status == LG_OK) {
        check_blocks(c, w, first, end, data);
        return;
    }
    char name[300];
    lg_error_wrap(why, "bytes %llu..%llu of %s/%s, of tensor \"%s\" of rank %u",
                  (unsigned long long)(w->file->data_start + block_begin(w, first)),
                  (unsigned long long)(w->file->data_start + block_end(w, end - 1)), c->folder, w->file->shard->name,
                  lg__printable(tensor_in(w, first), name, sizeof name), w->file->shard->rank);
    failed(w, first, why);
}

/* ------------------------------------------------------------------ reading */

/* Which window, and which of its blocks. */
static uint64_t token_of(const lg__reader *r, const lg__window *w, size_t first, size_t end)
{
    return (uint64_t)(w - r->windows) << 60 | (uint64_t)first << 30 | (uint64_t)end;
}

static void reap(lg__reader *r)
{
    uint64_t token = 0;
    lg_error why = LG_ERROR_INIT;
    lg_status status = lg__queue_wait(r->queue, &token, &why);
    lg__window *w = &r->windows[token >> 60];
    w->under_way--;
    const size_t first = (size_t)(token >> 30 & 0x3fffffff), end = (size_t)(token & 0x3fffffff);
    blocks_read(r->c, w, first, end, place_of(w, first), status, &why);
}

/* Where in the piece to read a block, so that neither the kernel's copy to there
 * nor ours from there is slow (lg__copy_is_slow, crc_copy.c). */
static char *piece_for(const lg__reader *r, const lg__window *w, size_t block)
{
    uint64_t at = (uint64_t)((uintptr_t)w->to[block] - 1024) % LG__IO_ALIGN / 64 * 64;
    uint64_t from = w->file->data_start + block_begin(w, block);
    return r->piece.data + (lg__copy_is_slow((uintptr_t)at, (uintptr_t)from) ? (at + 64) % LG__IO_ALIGN : at);
}

/* Reads blocks [first, end), which are of a kind and adjoin in memory. */
static void read_blocks(lg__reader *r, lg__window *w, size_t first, size_t end, bool at_once)
{
    /* What is copied on at once leaves its place to the next piece, which then
     * finds it in the processor's cache. */
    const bool bounced = at_once && w->state[first] == BLOCK_BOUNCED;
    size_t step = (size_t)max_u64(1, (at_once ? LG__PIECE_BYTES : r->read_bytes) / w->block_bytes);
    for (size_t stop; first < end; first = stop) {
        stop = end - first > step ? first + step : end;
        char *place = bounced && w->block_bytes <= LG__PIECE_BYTES ? piece_for(r, w, first) : place_of(w, first);
        const lg_queue_op op = {.kind = LG_QUEUE_READ,
                                .file = w->file->file,
                                .data = place,
                                .bytes = (size_t)(block_end(w, stop - 1) - block_begin(w, first)),
                                .offset = w->file->data_start + block_begin(w, first),
                                .token = token_of(r, w, first, stop)};
        lg_error why = LG_ERROR_INIT;
        lg_status status;
        if (at_once) {
            status = lg__store_read(r->c->store, op.file, op.data, op.bytes, op.offset, &why);
            blocks_read(r->c, w, first, stop, op.data, status, &why);
        } else {
            while (lg__queue_full(r->queue)) {
                reap(r);
            }
            status = lg__queue_submit(r->queue, &op, &why);
            if (status == LG_OK) {
                w->under_way++;
            } else {
                blocks_read(r->c, w, first, stop, op.data, status, &why);
            }
        }
        if (w->status != LG_OK) {
            return;
        }
    }
}

/* How many blocks from `first` on are of its kind and adjoin in memory. */
static size_t same_kind(const lg__window *w, size_t first, size_t n)
{
    size_t end = first + 1;
    while (end < n && w->state[end] == w->state[first] &&
           (w->state[first] != BLOCK_DIRECT || w->to[end] == w->to[end - 1] + w->block_bytes)) {
        end++;
    }
    return end;
}

/* Does the way through a small buffer suit a block better than the straight one
 * to its place? What is in memory always goes through it: the kernel's copy
 * would fetch the destination into the processor's cache and the checksum would
 * be a second pass over it; from the buffer both are one pass (crc_copy.h). */
static bool unsuitable(const lg__window *w, size_t block, lg_read_way way)
{
    const uintptr_t to = (uintptr_t)w->to[block], from = (uintptr_t)(w->file->data_start + block_begin(w, block));
    return way == LG_READ_AT_ONCE || (way == LG_READ_ALIGNED && (to | from) % LG__IO_ALIGN != 0);
}

/* The best way to read what the window needs. */
static lg_read_way way_of(lg__reader *r, const lg__window *w, size_t n)
{
    size_t first = 0, last = n;
    while (first < n && w->state[first] == BLOCK_UNUSED) {
        first++;
    }
    while (last > first && w->state[last - 1] == BLOCK_UNUSED) {
        last--;
    }
    if (first == last) {
        return LG_READ_AT_ONCE;
    }
    return lg__store_read_way(r->c->store, w->file->file, w->file->data_start + block_begin(w, first),
                              (size_t)(block_end(w, last - 1) - block_begin(w, first)));
}

static lg_status need_piece(lg__reader *r, lg_error *err)
{
    if (r->piece.data == NULL) {
        r->piece = lg__buffers_new(LG__PIECE_BYTES + LG__IO_ALIGN);
    }
    return r->piece.data != NULL ? LG_OK : lg__nomem(err);
}

static lg_status need_memory(lg__reader *r, bool queue, lg_error *err)
{
    if (r->memory.data == NULL) {
        r->memory = lg__buffers_new((size_t)(r->n_windows * r->window_bytes));
        if (r->memory.data == NULL) {
            return lg__nomem(err);
        }
        for (uint32_t i = 0; i < r->n_windows; i++) {
            r->windows[i].buffer = r->memory.data + i * r->window_bytes;
        }
    }
    if (queue && r->queue == NULL) {
        const lg_queue_spec spec = {.depth = r->depth, .memory = r->memory.data, .memory_bytes = r->memory.bytes};
        return lg__queue_open(r->c->store, &spec, r->expected, &r->queue, err);
    }
    return LG_OK;
}

static lg_status begin(lg__reader *r, lg__window *w, lg_error *err)
{
    size_t n = block_of(w, w->end - 1) + 1;
    memset(w->state, BLOCK_UNUSED, n);
    LG__TRY(walk_all(w, mark_run, err));
    lg_read_way way = way_of(r, w, n);
    /* Larger blocks take the window's own buffer. */
    const bool in_pieces = way == LG_READ_AT_ONCE && w->block_bytes <= LG__PIECE_BYTES;
    bool windows = way != LG_READ_AT_ONCE, piece = false;
    for (size_t b = 0; b < n;) {
        size_t end = same_kind(w, b, n);
        if (w->state[b] == BLOCK_DIRECT) {
            bool few = block_end(w, end - 1) - block_begin(w, b) < DIRECT_BYTES;
            int state = few ? BLOCK_BUFFERED : unsuitable(w, b, way) ? BLOCK_BOUNCED : BLOCK_DIRECT;
            memset(w->state + b, state, end - b);
        }
        windows = windows || w->state[b] == BLOCK_BUFFERED || (w->state[b] == BLOCK_BOUNCED && !in_pieces);
        piece = piece || (w->state[b] == BLOCK_BOUNCED && in_pieces);
        b = end;
    }
    if (windows) {
        LG__TRY(need_memory(r, way != LG_READ_AT_ONCE, err));
    }
    if (piece) {
        LG__TRY(need_piece(r, err));
    }
    for (size_t b = 0; b < n && w->status == LG_OK;) {
        size_t end = same_kind(w, b, n);
        if (w->state[b] != BLOCK_UNUSED) {
            read_blocks(r, w, b, end, way == LG_READ_AT_ONCE);
        }
        b = end;
    }
    return LG_OK;
}

void lg__window_begin(lg__reader *r, lg__window *w)
{
    w->status = LG_OK;
    w->under_way = 0;
    lg_error why = LG_ERROR_INIT;
    if (begin(r, w, &why) != LG_OK) {
        failed(w, 0, &why);
    }
}

void lg__window_finish(lg__reader *r, lg__window *w)
{
    while (w->under_way > 0) {
        reap(r);
    }
    if (w->status == LG_OK) {
        lg_error why = LG_ERROR_INIT;
        if (walk_all(w, copy_run, &why) != LG_OK) {
            failed(w, 0, &why);
        }
    }
}

/* ------------------------------------------------------------------- reader */

lg_status lg__reader_init(lg__reader *r, lg_error *err)
{
    size_t blocks = (size_t)(r->window_bytes / r->c->m->block_bytes);
    r->state = lg__malloc(r->n_windows * blocks);
    r->to = lg__calloc(r->n_windows * blocks, sizeof *r->to);
    if (r->state == NULL || r->to == NULL) {
        return lg__nomem(err);
    }
    for (uint32_t i = 0; i < r->n_windows; i++) {
        r->windows[i].state = r->state + i * blocks;
        r->windows[i].to = r->to + i * blocks;
        r->windows[i].block_bytes = r->c->m->block_bytes;
    }
    return LG_OK;
}

void lg__reader_free(lg__reader *r)
{
    lg__queue_close(r->queue);
    lg__buffers_free(&r->memory);
    lg__buffers_free(&r->piece);
    lg__free(r->state);
    lg__free(r->to);
}
