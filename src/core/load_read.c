/* SPDX-License-Identifier: Apache-2.0 */
#include "core/checkpoint.h"

#include <stdlib.h>
#include <string.h>

/* Reads parts of boxes. The data of a file is walked in *windows*, ranges of
 * whole blocks of at most 8 MiB. For each window all parts that touch it are
 * walked twice: first to mark the blocks they need, then, when these are read
 * and checked, to copy the bytes to where they belong. A block that one run
 * covers whole, and that nothing else needs, is read straight into its
 * destination and checked there. So every block is read once, no block is read
 * that nothing needs, and memory is bounded by one window, whatever the shape
 * of the parts. Windows do not depend on each other. */

#define DEFAULT_BUFFER_BYTES (UINT64_C(64) << 20)
#define WINDOW_BYTES (UINT64_C(8) << 20)
/* One read: large enough for the disk, small enough that the checksum finds
 * the bytes in the processor's cache. */
#define READ_BYTES (UINT64_C(1) << 20)
/* Shorter runs are copied from the buffer: one read of their surroundings is
 * cheaper than several. */
#define DIRECT_BYTES (UINT64_C(256) << 10)

enum { BLOCK_UNUSED = 0, BLOCK_BUFFERED, BLOCK_DIRECT };

typedef struct window {
    lg_checkpoint *c;
    lg__shard *shard;
    lg_file *file;
    const lg__table *table; /* NULL: unverified */
    uint64_t data_start, data_bytes, block_bytes;
    uint64_t begin, end; /* of the file's data; begin is a multiple of block_bytes */
    uint64_t max_bytes;
    char *memory;   /* of the buffer */
    char *buffer;   /* aligned, max_bytes; NULL until needed */
    uint8_t *state; /* one a block */
    char **to;      /* BLOCK_DIRECT: destination of its first byte */
    const lg__fetch *fetches;
    size_t n_fetches;
    const lg__fetch *now; /* being walked */
    bool copies;          /* the second walk has something to copy */
} window;

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

static size_t block_of(const window *w, uint64_t at) { return (size_t)((at - w->begin) / w->block_bytes); }

static uint64_t block_begin(const window *w, size_t block) { return w->begin + block * w->block_bytes; }

static uint64_t block_end(const window *w, size_t block)
{
    uint64_t end = block_begin(w, block) + w->block_bytes;
    return end < w->data_bytes ? end : w->data_bytes;
}

static uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Clips a run to the window; false if nothing is left. */
static bool clip(const window *w, uint64_t box_byte, int64_t mem_byte, uint64_t bytes, uint64_t *begin, uint64_t *end,
                 char **to)
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
    window *w = arg;
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
    window *w = arg;
    uint64_t begin, end;
    char *to;
    if (!clip(w, box_byte, mem_byte, bytes, &begin, &end, &to)) {
        return LG_OK;
    }
    *w->now->done += end - begin;
    for (uint64_t at = begin; at < end;) {
        size_t b = block_of(w, at);
        uint64_t stop = min_u64(block_end(w, b), end);
        if (w->state[b] == BLOCK_BUFFERED) {
            memcpy(to + (at - begin), w->buffer + (at - w->begin), (size_t)(stop - at));
        }
        at = stop;
    }
    return LG_OK;
}

static lg_status walk_region(window *w, const lg__region *box, const lg__region *part, lg__run_fn fn, lg_error *err)
{
    const lg__part *to = &w->now->to;
    lg__run_walk walk = {.dtype = w->now->entry->dtype,
                         .box = box,
                         .part = part,
                         .mem_origin = to->mem_origin,
                         .mem_size = to->mem_size,
                         .strides = to->strides};
    return lg__region_runs(&walk, fn, w, err);
}

/* Calls fn for the runs of one fetch that may touch the window. */
static lg_status walk_fetch(window *w, const lg__fetch *f, lg__run_fn fn, lg_error *err)
{
    uint32_t ndim = f->entry->ndim;
    lg__region box = {.ndim = ndim}, part = {.ndim = ndim};
    memcpy(box.offset, f->box_offset, ndim * sizeof *box.offset);
    memcpy(box.size, f->entry->shape, ndim * sizeof *box.size);
    memcpy(part.offset, f->to.offset, ndim * sizeof *part.offset);
    memcpy(part.size, f->to.size, ndim * sizeof *part.size);
    w->now = f;
    uint64_t bytes = lg_dtype_bits(f->entry->dtype) / 8;
    bool inside = w->begin <= f->begin && f->end <= w->end;
    if (inside || bytes == 0) {
        /* Dtypes below a byte are walked as a whole: a row may end inside a
         * byte, so cutting out some rows would not do. */
        return walk_region(w, &box, &part, fn, err);
    }
    /* The elements of the box that lie in the window, as boxes. */
    uint64_t first = (max_u64(w->begin, f->begin) - f->entry->begin) / bytes;
    uint64_t last = (min_u64(w->end, f->end) - f->entry->begin + bytes - 1) / bytes;
    lg__region cut[LG__MAX_FLAT_BOXES], common;
    size_t n = lg__region_cut_flat(ndim, box.size, first, last, cut);
    for (size_t i = 0; i < n; i++) {
        for (uint32_t d = 0; d < ndim; d++) {
            cut[i].offset[d] += box.offset[d];
        }
        if (lg__region_intersect(&cut[i], &part, &common)) {
            LG__TRY(walk_region(w, &box, &common, fn, err));
        }
    }
    return LG_OK;
}

static lg_status walk_all(window *w, lg__run_fn fn, lg_error *err)
{
    for (size_t i = 0; i < w->n_fetches; i++) {
        const lg__fetch *f = &w->fetches[i];
        if (f->begin < w->end && f->end > w->begin) {
            LG__TRY(walk_fetch(w, f, fn, err));
        }
    }
    return LG_OK;
}

/* ------------------------------------------------------------------ reading */

/* Whose bytes are in a block, for a message. */
static const char *tensor_in(const window *w, size_t block)
{
    for (size_t i = 0; i < w->n_fetches; i++) {
        const lg__fetch *f = &w->fetches[i];
        if (f->begin < block_end(w, block) && f->end > block_begin(w, block)) {
            return f->name;
        }
    }
    return "?";
}

/* Reads blocks [first, last) to `to` and checks them. */
static lg_status read_blocks(window *w, size_t first, size_t last, char *to, lg_error *err)
{
    size_t step = (size_t)max_u64(1, READ_BYTES / w->block_bytes);
    while (first < last) {
        size_t end = last - first > step ? first + step : last;
        uint64_t at = block_begin(w, first);
        size_t bytes = (size_t)(block_end(w, end - 1) - at);
        if (lg__store_read(w->c->store, w->file, to, bytes, w->data_start + at, err) != LG_OK) {
            char name[300];
            return lg_error_wrap(err, "bytes %llu..%llu of %s/%s, of tensor \"%s\" of rank %u",
                                 (unsigned long long)(w->data_start + at),
                                 (unsigned long long)(w->data_start + at + bytes), w->c->folder, w->shard->name,
                                 lg__printable(tensor_in(w, first), name, sizeof name), w->shard->rank);
        }
        for (size_t b = first; b < end && w->table != NULL; b++) {
            uint64_t number = block_begin(w, b) / w->block_bytes;
            uint32_t crc = lg__crc32c(0, to + (block_begin(w, b) - at), (size_t)(block_end(w, b) - block_begin(w, b)));
            if (crc != w->table->block_crc[number]) {
                return lg__block_error(w->c, w->shard, w->data_start, number, crc, w->table->block_crc[number],
                                       tensor_in(w, b), err);
            }
        }
        to += bytes;
        first = end;
    }
    return LG_OK;
}

static lg_status need_buffer(window *w, lg_error *err)
{
    if (w->buffer == NULL) {
        const size_t align = 4096;
        w->memory = lg__malloc((size_t)w->max_bytes + align);
        if (w->memory == NULL) {
            return lg__nomem(err);
        }
        w->buffer = w->memory + (align - (uintptr_t)w->memory % align) % align;
    }
    return LG_OK;
}

/* How many blocks from `first` on are of its kind and adjoin in memory. */
static size_t same_kind(const window *w, size_t first, size_t n)
{
    size_t end = first + 1;
    while (end < n && w->state[end] == w->state[first] &&
           (w->state[first] != BLOCK_DIRECT || w->to[end] == w->to[end - 1] + w->block_bytes)) {
        end++;
    }
    return end;
}

static lg_status read_window(window *w, lg_error *err)
{
    size_t n = block_of(w, w->end - 1) + 1;
    memset(w->state, BLOCK_UNUSED, n);
    LG__TRY(walk_all(w, mark_run, err));
    w->copies = false;
    for (size_t b = 0; b < n;) {
        size_t end = same_kind(w, b, n);
        if (w->state[b] == BLOCK_DIRECT && block_end(w, end - 1) - block_begin(w, b) < DIRECT_BYTES) {
            memset(w->state + b, BLOCK_BUFFERED, end - b);
        }
        w->copies = w->copies || w->state[b] == BLOCK_BUFFERED;
        b = end;
    }
    if (w->copies) {
        LG__TRY(need_buffer(w, err));
    }
    for (size_t b = 0; b < n;) {
        size_t end = same_kind(w, b, n);
        if (w->state[b] != BLOCK_UNUSED) {
            char *to = w->state[b] == BLOCK_DIRECT ? w->to[b] : w->buffer + (block_begin(w, b) - w->begin);
            LG__TRY(read_blocks(w, b, end, to, err));
        }
        b = end;
    }
    return walk_all(w, copy_run, err);
}

/* -------------------------------------------------------------------- files */

/* The bytes of the file's data from the first to the last one of a part. */
static lg_status find_span(lg__fetch *f, lg_error *err)
{
    uint64_t first = 0, last = 0; /* element numbers in the box */
    for (uint32_t d = 0; d < f->entry->ndim; d++) {
        uint64_t at = f->to.offset[d] - f->box_offset[d];
        first = first * f->entry->shape[d] + at;
        last = last * f->entry->shape[d] + at + f->to.size[d] - 1;
    }
    unsigned bits = lg_dtype_bits(f->entry->dtype);
    f->begin = f->entry->begin + first / 8 * bits + first % 8 * bits / 8;
    f->end = f->entry->begin + (last + 1) / 8 * bits + ((last + 1) % 8 * bits + 7) / 8;
    LG__RETURN_IF(f->end > f->entry->end, err, LG_ERR_INTERNAL, "a part of \"%s\" ends behind its box", f->name);
    return LG_OK;
}

static int compare_fetches(const void *a, const void *b)
{
    const lg__fetch *x = a, *y = b;
    if (x->shard != y->shard) {
        if (x->shard->rank != y->shard->rank) {
            return x->shard->rank < y->shard->rank ? -1 : 1;
        }
        return x->shard->index < y->shard->index ? -1 : 1;
    }
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* All fetches of one file, sorted by their begin. */
static lg_status read_file(window *w, lg__fetch *fetches, size_t n, lg_error *err)
{
    uint64_t block = w->block_bytes, at = 0;
    for (;;) {
        /* What ends before the window is done for good. */
        while (n > 0 && fetches->end <= at) {
            fetches++, n--;
        }
        if (n == 0) {
            return LG_OK;
        }
        w->begin = max_u64(at, fetches->begin / block * block);
        w->end = min_u64(w->begin + w->max_bytes, w->data_bytes);
        w->fetches = fetches;
        uint64_t needed = 0;
        for (w->n_fetches = 0; w->n_fetches < n && fetches[w->n_fetches].begin < w->end; w->n_fetches++) {
            needed = max_u64(needed, fetches[w->n_fetches].end);
        }
        w->end = min_u64(w->end, lg__block_count(needed, block) * block);
        LG__TRY(read_window(w, err));
        at = w->end;
    }
}

static lg_status open_and_read(window *w, lg__fetch *fetches, size_t n, bool verify, lg_error *err)
{
    w->shard = fetches[0].shard;
    w->table = NULL;
    const lg__st_header *header;
    LG__TRY(lg__checkpoint_header(w->c, w->shard, verify, &header, err));
    if (verify) {
        LG__TRY(lg__checkpoint_table(w->c, w->shard, &w->table, err));
    }
    w->data_start = header->data_start;
    w->data_bytes = w->shard->bytes - header->data_start;
    LG__RETURN_IF(verify && w->table->n_blocks != lg__block_count(w->data_bytes, w->block_bytes), err, LG_ERR_CORRUPT,
                  "%s/%s: its table is for another length", w->c->folder, w->shard->name);
    LG__TRY(lg__checkpoint_open_file(w->c, w->shard->name, w->shard->bytes, &w->file, err));
    lg_status status = read_file(w, fetches, n, err);
    lg_error ignored;
    lg__store_close(w->c->store, w->file, &ignored);
    return status;
}

lg_status lg__fetch_run(lg_checkpoint *c, lg__fetch *fetches, size_t n, bool verify, uint64_t buffer_bytes,
                        lg_error *err)
{
    size_t used = 0; /* parts with bytes in them */
    for (size_t i = 0; i < n; i++) {
        bool empty = false;
        for (uint32_t d = 0; d < fetches[i].entry->ndim; d++) {
            empty = empty || fetches[i].to.size[d] == 0;
        }
        if (!empty) {
            LG__TRY(find_span(&fetches[i], err));
            fetches[used++] = fetches[i];
        }
    }
    if (used == 0) {
        return LG_OK;
    }
    qsort(fetches, used, sizeof *fetches, compare_fetches);
    window w = {.c = c, .block_bytes = c->m->block_bytes};
    buffer_bytes = buffer_bytes == 0 ? DEFAULT_BUFFER_BYTES : buffer_bytes;
    w.max_bytes = min_u64(buffer_bytes, WINDOW_BYTES) / w.block_bytes * w.block_bytes;
    w.max_bytes = max_u64(w.max_bytes, w.block_bytes);
    size_t blocks = (size_t)(w.max_bytes / w.block_bytes);
    w.state = lg__malloc(blocks);
    w.to = lg__calloc(blocks, sizeof *w.to);
    lg_status status = w.state == NULL || w.to == NULL ? lg__nomem(err) : LG_OK;
    for (size_t i = 0; i < used && status == LG_OK;) {
        size_t end = i + 1;
        while (end < used && fetches[end].shard == fetches[i].shard) {
            end++;
        }
        status = open_and_read(&w, fetches + i, end - i, verify, err);
        i = end;
    }
    lg__free(w.memory);
    lg__free(w.state);
    lg__free(w.to);
    return status;
}
