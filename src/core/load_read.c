/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "base/thread.h"
#include "core/load_window.h"
#include "io/choice.h"

#include <stdlib.h>
#include <string.h>

/* Reads parts of boxes: sorts them by file and place, cuts the files into
 * windows (load_window.h), and lets a few threads take them in order. Each
 * thread has two windows: while the bytes of one are checked and copied, those
 * of the next are on their way. */

#define DEFAULT_BUFFER_BYTES (UINT64_C(64) << 20)
#define WINDOW_BYTES (UINT64_C(4) << 20)
#define MIN_WINDOW_BYTES (UINT64_C(1) << 20) /* with less memory rather fewer threads */
#define MAX_THREADS 8
#define MIN_WINDOWS 2 /* of a thread, for it to be worth one */
#define MIN_DEPTH 8   /* of small reads more fit into the windows */
#define MAX_DEPTH 16  /* of large blocks fewer do */
/* One read that takes its time: as large as devices like. */
#define READ_BYTES (UINT64_C(1) << 20)

typedef struct job {
    lg_checkpoint *c;
    bool verify;
    uint64_t window_bytes, expected; /* by one thread */
    uint64_t read_bytes;
    uint32_t n_windows, depth;
    pthread_mutex_t lock; /* for all below */
    lg__fetch *fetches;
    size_t n, next;      /* what lies before `next` is in windows that were handed out */
    size_t file_end;     /* of the current file's fetches */
    lg__read_file *file; /* the current one, or NULL */
    uint64_t at;         /* its data before is done */
    uint64_t handed_out; /* windows */
    lg_status status;    /* of the first window that failed, in the order they were handed out */
    uint64_t failed;
    lg_error err;
} job;

static lg_status first_run(uint64_t box_byte, int64_t mem_byte, uint64_t bytes, void *arg, lg_error *err)
{
    (void)err;
    lg__fetch *f = arg;
    f->one_run = f->entry->begin + box_byte == f->begin && bytes == f->end - f->begin;
    f->run_to = mem_byte;
    return f->one_run ? LG_OK : LG_ERR_CANCELLED; /* no need to see the others */
}

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
    lg__region part = {.ndim = f->entry->ndim};
    memcpy(part.offset, f->to.offset, part.ndim * sizeof *part.offset);
    memcpy(part.size, f->to.size, part.ndim * sizeof *part.size);
    f->one_run = false;
    lg_status status = lg__fetch_runs(f, &part, first_run, f, err);
    return status == LG_ERR_CANCELLED ? LG_OK : status;
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

/* ------------------------------------------------ windows, with the lock held */

static void note_failure(job *j, uint64_t number, lg_status status, const lg_error *why)
{
    if (j->status == LG_OK || number < j->failed) {
        j->status = status;
        j->failed = number;
        j->err = *why;
    }
}

static lg_status open_file(job *j, lg__shard *shard, lg__read_file **out, lg_error *err)
{
    const lg__st_header *header;
    const lg__table *table = NULL;
    LG__TRY(lg__checkpoint_header(j->c, shard, j->verify, &header, err));
    if (j->verify) {
        LG__TRY(lg__checkpoint_table(j->c, shard, &table, err));
    }
    uint64_t data_bytes = shard->bytes - header->data_start;
    LG__RETURN_IF(table != NULL && table->n_blocks != lg__block_count(data_bytes, j->c->m->block_bytes), err,
                  LG_ERR_CORRUPT, "%s/%s: its table is for another length", j->c->folder, shard->name);
    lg__read_file *f = lg__calloc(1, sizeof *f);
    if (f == NULL) {
        return lg__nomem(err);
    }
    *f = (lg__read_file){
        .shard = shard, .table = table, .data_start = header->data_start, .data_bytes = data_bytes, .users = 1};
    lg_status status = lg__checkpoint_open_file(j->c, shard->name, shard->bytes, &f->file, err);
    if (status != LG_OK) {
        lg__free(f);
        return status;
    }
    *out = f;
    return LG_OK;
}

static void leave_file(job *j, lg__read_file *f)
{
    if (f != NULL && --f->users == 0) {
        lg_error ignored = LG_ERROR_INIT;
        lg__store_close(j->c->store, f->file, &ignored);
        lg__free(f);
    }
}

/* The next window of the current file; false if none is left in it. */
static bool cut_window(job *j, lg__window *w)
{
    /* What ends before is done for good. */
    while (j->next < j->file_end && j->fetches[j->next].end <= j->at) {
        j->next++;
    }
    if (j->next == j->file_end) {
        return false;
    }
    const uint64_t block = j->c->m->block_bytes;
    const lg__fetch *first = &j->fetches[j->next];
    const uint64_t aligned = first->begin / block * block;
    w->begin = aligned > j->at ? aligned : j->at;
    w->end = w->begin + j->window_bytes;
    w->end = w->end < j->file->data_bytes ? w->end : j->file->data_bytes;
    w->fetches = first;
    uint64_t needed = 0;
    for (w->n_fetches = 0; j->next + w->n_fetches < j->file_end && first[w->n_fetches].begin < w->end; w->n_fetches++) {
        needed = first[w->n_fetches].end > needed ? first[w->n_fetches].end : needed;
    }
    needed = lg__block_count(needed, block) * block;
    w->end = w->end < needed ? w->end : needed;
    w->file = j->file;
    w->number = j->handed_out++;
    j->file->users++;
    j->at = w->end;
    return true;
}

static bool next_window(job *j, lg__window *w)
{
    while (j->status == LG_OK) {
        if (j->file == NULL) {
            if (j->next == j->n) {
                return false;
            }
            lg__shard *shard = j->fetches[j->next].shard;
            lg_error why = LG_ERROR_INIT;
            lg_status status = open_file(j, shard, &j->file, &why);
            if (status != LG_OK) {
                note_failure(j, j->handed_out, status, &why);
                return false;
            }
            j->at = 0;
            j->file_end = j->next;
            while (j->file_end < j->n && j->fetches[j->file_end].shard == shard) {
                j->file_end++;
            }
        }
        if (cut_window(j, w)) {
            return true;
        }
        leave_file(j, j->file);
        j->file = NULL;
    }
    return false;
}

/* ------------------------------------------------------------------ threads */

static bool take(job *j, lg__window *w)
{
    pthread_mutex_lock(&j->lock);
    bool got = next_window(j, w);
    pthread_mutex_unlock(&j->lock);
    return got;
}

static void finish(job *j, lg__reader *r, lg__window *w)
{
    lg__window_finish(r, w);
    pthread_mutex_lock(&j->lock);
    if (w->status != LG_OK) {
        note_failure(j, w->number, w->status, &w->err);
    }
    leave_file(j, w->file);
    pthread_mutex_unlock(&j->lock);
}

static lg_status work(job *j, lg_error *err)
{
    lg__reader r = {.c = j->c,
                    .window_bytes = j->window_bytes,
                    .expected = j->expected,
                    .read_bytes = j->read_bytes,
                    .n_windows = j->n_windows,
                    .depth = j->depth};
    lg_status status = lg__reader_init(&r, err);
    uint32_t oldest = 0, n = 0; /* windows under way */
    for (bool more = status == LG_OK; more || n > 0;) {
        lg__window *w = &r.windows[(oldest + n) % r.n_windows];
        more = more && n < r.n_windows && take(j, w);
        if (more) {
            lg__window_begin(&r, w);
            n++;
        }
        if (n == r.n_windows || (!more && n > 0)) {
            finish(j, &r, &r.windows[oldest]);
            oldest = (oldest + 1) % r.n_windows;
            n--;
        }
    }
    lg__reader_free(&r);
    return status;
}

static void *work_thread(void *arg)
{
    lg_error ignored = LG_ERROR_INIT;
    (void)work(arg, &ignored); /* without memory the others do it */
    return NULL;
}

/* How many threads, and how much memory each, within the cap. At least one
 * block is read at a time, whatever its size. */
static uint32_t share_out(job *j, uint64_t bytes, uint64_t buffer_bytes)
{
    const uint64_t block = j->c->m->block_bytes;
    uint64_t threads = lg__processors() < MAX_THREADS ? lg__processors() : MAX_THREADS;
    uint64_t useful = bytes / WINDOW_BYTES / MIN_WINDOWS, fit = buffer_bytes / MIN_WINDOW_BYTES / MIN_WINDOWS;
    threads = threads < useful ? threads : useful;
    threads = threads < fit ? threads : fit;
    if (threads == 0 || lg__io_wanted_engine() == LG__IO_BLOCKING) {
        threads = 1;
    }
    uint64_t each = buffer_bytes / threads;
    each = each > 2 * LG__PIECE_BYTES ? each - LG__PIECE_BYTES : each;
    j->n_windows = LG__READER_WINDOWS;
    while (j->n_windows > 1 && each / j->n_windows < block) {
        j->n_windows /= 2;
    }
    each /= j->n_windows;
    /* Of a small load a window holds all, with its first and last block whole. */
    const uint64_t all = bytes < WINDOW_BYTES ? lg__block_count(bytes, block) * block + block : WINDOW_BYTES;
    each = each < WINDOW_BYTES ? each : WINDOW_BYTES;
    each = (each < all ? each : all) / block * block;
    j->window_bytes = each > 0 ? each : block;
    j->expected = bytes / threads;
    const uint32_t asked = lg__io_wanted_depth();
    const uint64_t held = j->n_windows * j->window_bytes / READ_BYTES;
    j->depth = asked != 0 ? asked : held < MIN_DEPTH ? MIN_DEPTH : held > MAX_DEPTH ? MAX_DEPTH : (uint32_t)held;
    /* As many reads as may be under way fit into the windows. */
    const uint64_t piece = j->n_windows * j->window_bytes / j->depth / block * block;
    j->read_bytes = asked == 0 || piece > READ_BYTES ? READ_BYTES : piece > 0 ? piece : block;
    return (uint32_t)threads;
}

lg_status lg__fetch_run(lg_checkpoint *c, lg__fetch *fetches, size_t n, bool verify, uint64_t buffer_bytes,
                        lg_error *err)
{
    size_t used = 0; /* parts with bytes in them */
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        bool empty = false;
        for (uint32_t d = 0; d < fetches[i].entry->ndim; d++) {
            empty = empty || fetches[i].to.size[d] == 0;
        }
        if (!empty) {
            LG__TRY(find_span(&fetches[i], err));
            bytes += fetches[i].end - fetches[i].begin;
            fetches[used++] = fetches[i];
        }
    }
    if (used == 0) {
        return LG_OK;
    }
    qsort(fetches, used, sizeof *fetches, compare_fetches);
    job j = {.c = c, .verify = verify, .fetches = fetches, .n = used};
    uint32_t threads = share_out(&j, bytes, buffer_bytes == 0 ? DEFAULT_BUFFER_BYTES : buffer_bytes);
    if (pthread_mutex_init(&j.lock, NULL) != 0) {
        return lg__nomem(err);
    }
    pthread_t others[MAX_THREADS];
    uint32_t started = 0;
    while (started + 1 < threads && lg__thread_start(&others[started], work_thread, &j)) {
        started++;
    }
    lg_status status = work(&j, err);
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(others[i], NULL);
    }
    leave_file(&j, j.file);
    pthread_mutex_destroy(&j.lock);
    if (j.status != LG_OK) {
        *err = j.err;
        return j.status;
    }
    return status;
}
