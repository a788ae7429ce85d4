/* SPDX-License-Identifier: Apache-2.0 */
#include "core/stage.h"

#include "base/hash.h"
#include "base/mem.h"
#include "base/thread.h"
#include "core/finite.h"
#include "core/gather.h"
#include "io/buffers.h"

#include <stdatomic.h>
#include <string.h>

#define UNIT_BYTES (UINT64_C(1) << 20)
#define TILE_BYTES ((size_t)1 << 20) /* scratch of a thread, for transposed memory */
#define MAX_THREADS 16

typedef struct unit {
    uint32_t file;
    size_t first_box;  /* the first box that has bytes in it */
    uint64_t from, to; /* bytes of the file's data */
    bool eager, lazy;  /* has such parts */
} unit;

typedef struct image { /* of a file */
    const lg__plan_file *plan;
    uint8_t *memory;       /* of the header's first byte */
    uint64_t *at;          /* where each box begins in the data */
    size_t unit, unit_end; /* its units; the next one to be taken */
    lg__table table;
} image;

struct lg__stage {
    const lg__plan *plan;
    uint64_t block_bytes;
    void *memory;
    size_t bytes;
    image *images;
    unit *units;
    size_t n_units;
    uint64_t lazy_bytes, eager_bytes;
    lg__arena *arena;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t threads[MAX_THREADS];
    uint32_t n_threads;
    atomic_size_t next; /* unit to be looked at by the next free thread */
    atomic_bool failed;
    lg_status status; /* under the lock, like all below */
    lg_error error;
    uint32_t copying; /* threads that may still read the trainer's memory */
    lg__ready ready;  /* set before there are any */
    void (*staged)(void *arg);
    void *staged_arg;
};

static uint64_t rounded(uint64_t bytes) { return (bytes + LG__IO_ALIGN - 1) / LG__IO_ALIGN * LG__IO_ALIGN; }

uint64_t lg__stage_bytes(const lg__plan *plan)
{
    uint64_t all = 0;
    for (size_t i = 0; i < plan->n_files; i++) {
        uint64_t bytes;
        bool over = __builtin_add_overflow(plan->files[i].header.len, plan->files[i].data_bytes, &bytes);
        over = over || bytes > UINT64_MAX - LG__IO_ALIGN || __builtin_add_overflow(all, rounded(bytes), &all);
        if (over) {
            return UINT64_MAX;
        }
    }
    return all;
}

/* ------------------------------------------------------------------ copying */

typedef struct part { /* of a box: its bytes [from, to) go to `out` */
    const lg__plan_box *box;
    uint64_t base; /* of the region at hand: its first byte in the box */
    uint64_t from, to;
    uint8_t *out;
} part;

static lg_status copy_run(const uint8_t *data, uint64_t bytes, uint64_t at, void *arg, lg_error *err)
{
    const part *p = arg;
    if (p->box->finite_check) {
        LG__TRY(lg__finite_check(p->box, data, bytes, at, err));
    }
    uint64_t begin = p->base + at, end = begin + bytes; /* in the whole box */
    if (end <= p->from || begin >= p->to) {
        return LG_OK;
    }
    const uint64_t skip = begin < p->from ? p->from - begin : 0;
    end = end < p->to ? end : p->to;
    lg__copy_away(p->out + (begin + skip - p->from), data + skip, (size_t)(end - begin - skip));
    return LG_OK;
}

/* Whole elements that cover bytes [from, to) of a box, as regions of it. */
static size_t cut(const lg__plan_box *box, uint64_t from, uint64_t to, lg__region out[LG__MAX_FLAT_BOXES],
                  uint64_t *first)
{
    const uint64_t bits = lg_dtype_bits(box->dtype);
    if (bits % 8 != 0) { /* rare: the box as a whole, clipped */
        out[0] = lg__extent_region(&box->box);
        *first = 0;
        return 1;
    }
    const uint64_t element = bits / 8, begin = from / element, end = (to + element - 1) / element;
    *first = begin * element;
    size_t n = lg__region_cut_flat(box->box.ndim, box->box.size, begin, end, out);
    for (size_t i = 0; i < n; i++) {
        for (uint32_t d = 0; d < box->box.ndim; d++) {
            out[i].offset[d] += box->box.offset[d];
        }
    }
    return n;
}

static lg_status copy_part(const lg__plan_box *box, uint64_t from, uint64_t to, uint8_t *out, lg__scratch scratch,
                           lg_error *err)
{
    lg__region regions[LG__MAX_FLAT_BOXES];
    lg__plan_box sub = *box;
    part p = {.box = &sub, .from = from, .to = to, .out = out};
    size_t n = cut(box, from, to, regions, &p.base);
    for (size_t i = 0; i < n; i++) {
        sub.box = (lg__extent){regions[i].ndim, regions[i].offset, regions[i].size};
        if (box->strides != NULL) {
            uintptr_t at = (uintptr_t)box->data;
            for (uint32_t d = 0; d < box->box.ndim; d++) {
                at += (uintptr_t)((int64_t)(sub.box.offset[d] - box->box.offset[d]) * box->strides[d]);
            }
            sub.data = (const void *)at;
        } else if (box->mem_origin == NULL) {
            sub.mem_origin = box->box.offset;
            sub.mem_size = box->box.size;
        }
        LG__TRY(lg__gather(&sub, scratch, copy_run, &p, err));
        uint64_t bytes = 0;
        LG__TRY(lg__shape_bytes(box->dtype, sub.box.ndim, sub.box.size, &bytes, err));
        p.base += bytes;
    }
    return LG_OK;
}

static uint64_t box_bytes(const image *m, size_t i)
{
    return (i + 1 < m->plan->n_boxes ? m->at[i + 1] : m->plan->data_bytes) - m->at[i];
}

/* Of a unit's boxes those that are lazy, or those that are not. */
static lg_status copy_boxes(lg__stage *s, const unit *u, bool lazy, lg__scratch scratch, lg_error *err)
{
    const image *m = &s->images[u->file];
    uint8_t *data = m->memory + m->plan->header.len;
    for (size_t i = u->first_box; i < m->plan->n_boxes && m->at[i] < u->to; i++) {
        const uint64_t begin = m->at[i], end = begin + box_bytes(m, i);
        const uint64_t a = begin > u->from ? begin : u->from, b = end < u->to ? end : u->to;
        if (m->plan->boxes[i].lazy == lazy && a < b) {
            LG__TRY(copy_part(&m->plan->boxes[i], a - begin, b - begin, data + a, scratch, err));
        }
    }
    return LG_OK;
}

static void digest(const lg__stage *s, const unit *u)
{
    const image *m = &s->images[u->file];
    const uint8_t *data = m->memory + m->plan->header.len;
    for (uint64_t at = u->from; at < u->to; at += s->block_bytes) {
        const uint64_t bytes = u->to - at < s->block_bytes ? u->to - at : s->block_bytes;
        m->table.block_crc[at / s->block_bytes] = lg__crc32c(0, data + at, (size_t)bytes);
    }
}

static void fail(lg__stage *s, lg_status status, const lg_error *err)
{
    pthread_mutex_lock(&s->lock);
    if (s->status == LG_OK) {
        s->status = status;
        s->error = *err;
    }
    atomic_store(&s->failed, true);
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static bool scratch_new(lg__scratch *out)
{
    out->bytes = TILE_BYTES;
    out->data = lg__malloc(TILE_BYTES);
    return out->data != NULL;
}

/* Takes unit after unit until none is left. */
static void copy_units(lg__stage *s, bool lazy)
{
    lg_error err = LG_ERROR_INIT;
    lg__scratch scratch;
    lg_status status = scratch_new(&scratch) ? LG_OK : lg__nomem(&err);
    while (status == LG_OK && !atomic_load(&s->failed)) {
        size_t i = atomic_fetch_add(&s->next, 1);
        if (i >= s->n_units) {
            break;
        }
        const unit *u = &s->units[i];
        if (lazy ? u->lazy : u->eager) {
            status = copy_boxes(s, u, lazy, scratch, &err);
        }
    }
    if (status != LG_OK) {
        fail(s, status, &err);
    }
    lg__free(scratch.data);
}

/* ------------------------------------------------------------ before return */

static void *copy_eager(void *arg)
{
    copy_units(arg, false);
    return NULL;
}

static uint32_t start(lg__stage *s, uint32_t n, void *(*run)(void *))
{
    n = n < MAX_THREADS ? n : MAX_THREADS;
    while (s->n_threads < n && lg__thread_start(&s->threads[s->n_threads], run, s)) {
        s->n_threads++;
    }
    return s->n_threads;
}

static void join(lg__stage *s)
{
    while (s->n_threads > 0) {
        pthread_join(s->threads[--s->n_threads], NULL);
    }
}

lg_status lg__stage_copy_eager(lg__stage *s, uint32_t threads, lg_error *err)
{
    if (s->eager_bytes > 0) {
        const uint64_t useful = s->eager_bytes / UNIT_BYTES;
        atomic_store(&s->next, 0);
        start(s, useful < threads ? (uint32_t)useful : threads - 1, copy_eager);
        copy_eager(s);
        join(s);
    }
    if (s->status != LG_OK) {
        *err = s->error;
    }
    return s->status;
}

/* ------------------------------------------------------------ in background */

static void one_less_copies(lg__stage *s)
{
    pthread_mutex_lock(&s->lock);
    bool none = --s->copying == 0;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    if (none && s->staged != NULL) {
        s->staged(s->staged_arg);
    }
}

static void *copy_lazy(void *arg)
{
    lg__stage *s = arg;
    lg_error err = LG_ERROR_INIT;
    lg_status status = lg__ready_wait(&s->ready, &s->failed, &err);
    if (status != LG_OK) {
        fail(s, status, &err);
    }
    copy_units(s, true);
    one_less_copies(s);
    return NULL;
}

void lg__stage_start_lazy(lg__stage *s, uint32_t threads, lg__ready ready, void (*staged)(void *arg), void *arg)
{
    s->ready = ready;
    s->staged = staged;
    s->staged_arg = arg;
    s->copying = 1; /* this thread, until all are started */
    atomic_store(&s->next, 0);
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    uint32_t started = 0;
    for (uint32_t i = 0; i < threads && s->lazy_bytes > 0; i++) {
        pthread_mutex_lock(&s->lock);
        s->copying++;
        pthread_mutex_unlock(&s->lock);
        if (!lg__thread_start(&s->threads[s->n_threads], copy_lazy, s)) {
            pthread_mutex_lock(&s->lock);
            s->copying--;
            pthread_mutex_unlock(&s->lock);
            break;
        }
        s->n_threads++;
        started++;
    }
    if (started == 0 && s->lazy_bytes > 0) { /* no thread is to be had: here and now */
        pthread_mutex_lock(&s->lock);
        s->copying++;
        pthread_mutex_unlock(&s->lock);
        copy_lazy(s);
    }
    one_less_copies(s);
}

lg_status lg__stage_take(lg__stage *s, size_t file, const void **data, size_t *bytes, bool *last, lg_error *err)
{
    image *m = &s->images[file];
    const uint64_t header = m->plan->header.len;
    lg_status status = LG_OK;
    if (m->unit == m->unit_end) { /* no data */
        *data = m->memory;
        *bytes = (size_t)header;
        *last = true;
        return LG_OK;
    }
    /* Digests come after all copies: the trainer waits for those only. */
    pthread_mutex_lock(&s->lock);
    while (s->copying > 0 && s->status == LG_OK) {
        pthread_cond_wait(&s->changed, &s->lock);
    }
    if (s->status != LG_OK) {
        *err = s->error;
        status = s->status;
    }
    pthread_mutex_unlock(&s->lock);
    LG__TRY(status);
    const unit *u = &s->units[m->unit];
    digest(s, u);
    const bool first = u->from == 0;
    *data = first ? m->memory : m->memory + header + u->from;
    *bytes = (size_t)(u->to - u->from + (first ? header : 0));
    *last = ++m->unit == m->unit_end;
    return LG_OK;
}

lg__table lg__stage_table(const lg__stage *s, size_t file) { return s->images[file].table; }

void *lg__stage_memory(const lg__stage *s, size_t *bytes)
{
    *bytes = s->bytes;
    return s->memory;
}

uint64_t lg__stage_lazy_bytes(const lg__stage *s) { return s->lazy_bytes; }
uint64_t lg__stage_eager_bytes(const lg__stage *s) { return s->eager_bytes; }

/* --------------------------------------------------------------- life cycle */

static uint64_t unit_bytes(const lg__stage *s) { return s->block_bytes > UNIT_BYTES ? s->block_bytes : UNIT_BYTES; }

static lg_status lay_out(lg__stage *s, size_t file, uint8_t *memory, lg_error *err)
{
    image *m = &s->images[file];
    const lg__plan_file *f = &s->plan->files[file];
    *m = (image){.plan = f,
                 .memory = memory,
                 .at = lg__arena_array(s->arena, f->n_boxes, sizeof *m->at),
                 .unit = s->n_units,
                 .table = {.file_bytes = f->header.len + f->data_bytes,
                           .header_bytes = f->header.len,
                           .header_crc = lg__crc32c(0, f->header.data, f->header.len),
                           .n_blocks = lg__block_count(f->data_bytes, s->block_bytes)}};
    m->table.block_crc = lg__arena_array(s->arena, (size_t)m->table.n_blocks, sizeof *m->table.block_crc);
    if (m->at == NULL || m->table.block_crc == NULL) {
        return lg__nomem(err);
    }
    memcpy(memory, f->header.data, f->header.len);
    uint64_t at = 0;
    for (size_t i = 0; i < f->n_boxes; i++) {
        uint64_t bytes = 0;
        LG__TRY(lg__shape_bytes(f->boxes[i].dtype, f->boxes[i].box.ndim, f->boxes[i].box.size, &bytes, err));
        m->at[i] = at;
        at += bytes;
        *(f->boxes[i].lazy ? &s->lazy_bytes : &s->eager_bytes) += bytes;
    }
    LG__RETURN_IF(at != f->data_bytes, err, LG_ERR_INTERNAL, "%s: boxes have %llu bytes, the file %llu", f->name,
                  (unsigned long long)at, (unsigned long long)f->data_bytes);
    size_t box = 0;
    for (uint64_t from = 0; from < f->data_bytes; from += unit_bytes(s)) {
        unit *u = &s->units[s->n_units++];
        const uint64_t left = f->data_bytes - from;
        *u = (unit){.file = (uint32_t)file, .from = from, .to = from + (left < unit_bytes(s) ? left : unit_bytes(s))};
        while (box + 1 < f->n_boxes && m->at[box + 1] <= from) {
            box++;
        }
        u->first_box = box;
        for (size_t i = box; i < f->n_boxes && m->at[i] < u->to; i++) {
            *(f->boxes[i].lazy ? &u->lazy : &u->eager) |= box_bytes(m, i) > 0;
        }
    }
    m->unit_end = s->n_units;
    return LG_OK;
}

static lg_status build(lg__stage *s, lg_error *err)
{
    s->arena = lg__arena_new();
    s->images = lg__calloc(s->plan->n_files, sizeof *s->images);
    uint64_t units = 0;
    for (size_t i = 0; i < s->plan->n_files; i++) {
        units += s->plan->files[i].data_bytes / unit_bytes(s) + 1;
    }
    s->units = units > SIZE_MAX ? NULL : lg__calloc((size_t)units, sizeof *s->units);
    if (s->arena == NULL || s->images == NULL || s->units == NULL) {
        return lg__nomem(err);
    }
    uint8_t *at = s->memory;
    for (size_t i = 0; i < s->plan->n_files; i++) {
        LG__TRY(lay_out(s, i, at, err));
        at += rounded(s->images[i].table.file_bytes);
    }
    LG__RETURN_IF((size_t)(at - (uint8_t *)s->memory) > s->bytes, err, LG_ERR_INTERNAL,
                  "the image is larger than planned");
    return LG_OK;
}

lg_status lg__stage_new(const lg__plan *plan, uint64_t block_bytes, void *memory, size_t bytes, lg__stage **out,
                        lg_error *err)
{
    lg__stage *s = lg__calloc(1, sizeof *s);
    if (s == NULL) {
        return lg__nomem(err);
    }
    s->plan = plan;
    s->block_bytes = block_bytes;
    s->memory = memory;
    s->bytes = bytes;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    lg_status status = build(s, err);
    if (status != LG_OK) {
        lg__stage_free(s);
        return status;
    }
    *out = s;
    return LG_OK;
}

void lg__stage_free(lg__stage *s)
{
    if (s == NULL) {
        return;
    }
    if (s->n_threads > 0) { /* the writer gave up before they were done */
        atomic_store(&s->failed, true);
        join(s);
    }
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    lg__arena_free(s->arena);
    lg__free(s->images);
    lg__free(s->units);
    lg__free(s);
}
