/* SPDX-License-Identifier: Apache-2.0 */
#include "core/background.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/mem.h"
#include "base/thread.h"
#include "core/bulletin.h"
#include "core/gather.h"
#include "core/owner.h"
#include "core/retention.h"
#include "core/stage.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MAX_COPY_THREADS 8
#define SOURCES_SCRATCH ((size_t)1 << 20)

struct lg__background {
    lg_session *s; /* what it reads of it does not change while this is in flight */
    lg_save *save;
    lg__plan *plan;
    lg__stage *stage; /* NULL: the files are written straight from the sources */
    lg__attempt a;
    lg__save_ids ids;
    lg__save_hooks hooks;
    lg__ready ready; /* of what is lazy */
    uint64_t began;
    uint64_t deadline_ms; /* the session's */
    pthread_t thread;
    bool has_thread;
    bool inline_work;  /* no thread was to be had: the launch does the work itself */
    lg_error begin;    /* trouble of this rank before the work began */
    uint32_t *sources; /* LG_LAUNCH_CHECK_SOURCES: of each lazy box; NULL: not asked for */
    size_t n_sources;
    lg__background *next; /* of those that the program's end waits for */

    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under the lock */
    lg_save_phase phase;
    size_t to_gather, to_gather_eager; /* boxes that are still read from memory that the trainer wants back */
    bool staged, checked, done, failed, own, in_place;
    bool lazy;       /* something is, so that the trainer may yet say that it was changed */
    bool fenced;     /* it has not */
    bool refused;    /* it has */
    bool past_check; /* too late for that: what this rank wrote may be committed */
    bool retains;    /* committed, and nothing older was removed for it yet */
    bool abandoned;  /* the session was closed before: the thread frees all */
    lg_error err;
    lg_save_info info;
};

_Atomic uint32_t lg__background_left;

static lg_status check_sources(lg__background *job, lg_error *err);

/* ------------------------------------------------- what the program's end does
 *
 * A program that returns from main without closing its session loses nothing
 * that it launched. */

static pthread_mutex_t running_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t running_changed; /* a save is over, or struck off */
static lg__background *running;

static void before_fork(void) { pthread_mutex_lock(&running_lock); }
static void after_fork(void) { pthread_mutex_unlock(&running_lock); }

/* The parent's saves are not the child's, and their threads are not here. */
static void in_child(void)
{
    running = NULL;
    lg__cond_init(&running_changed);
    pthread_mutex_unlock(&running_lock);
}

/* Those that a closed session left behind are freed by their own threads, so
 * none is touched without the lock. */
static bool find_running(lg__background **unchecked)
{
    bool any = false;
    *unchecked = NULL;
    for (lg__background *job = running; job != NULL; job = job->next) {
        pthread_mutex_lock(&job->lock);
        any = any || !job->done;
        if (job->staged && !job->checked && !job->abandoned) {
            *unchecked = job;
        }
        pthread_mutex_unlock(&job->lock);
    }
    return any;
}

static void finish_all(void)
{
    pthread_mutex_lock(&running_lock);
    uint64_t longest = 0;
    for (lg__background *job = running; job != NULL; job = job->next) {
        longest = job->deadline_ms > longest ? job->deadline_ms : longest;
    }
    const uint64_t until = lg__deadline(longest);
    lg__background *unchecked;
    while (find_running(&unchecked) && lg__now_ms() < until) {
        if (unchecked != NULL) { /* nobody fences any more; nor settles, so it stays */
            lg_error ignored = LG_ERROR_INIT;
            pthread_mutex_unlock(&running_lock);
            (void)check_sources(unchecked, &ignored);
            pthread_mutex_lock(&running_lock);
            continue;
        }
        (void)lg__cond_wait_until(&running_changed, &running_lock, until);
    }
    pthread_mutex_unlock(&running_lock);
}

static void prepare_for_exit_and_fork(void)
{
    lg__cond_init(&running_changed);
    (void)pthread_atfork(before_fork, after_fork, in_child);
    (void)atexit(finish_all);
}

static void enlist(lg__background *job)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare_for_exit_and_fork);
    pthread_mutex_lock(&running_lock);
    job->next = running;
    running = job;
    pthread_mutex_unlock(&running_lock);
}

static void wake_exit(void)
{
    pthread_mutex_lock(&running_lock);
    pthread_cond_broadcast(&running_changed);
    pthread_mutex_unlock(&running_lock);
}

static void strike_off(lg__background *job)
{
    pthread_mutex_lock(&running_lock);
    for (lg__background **at = &running; *at != NULL; at = &(*at)->next) {
        if (*at == job) {
            *at = job->next;
            pthread_cond_broadcast(&running_changed);
            break;
        }
    }
    pthread_mutex_unlock(&running_lock);
}

/* ------------------------------------------------------------------- states */

typedef struct result { /* beside status and error */
    bool own, in_place;
    uint64_t bytes_written, bytes_total;
} result;

static void enter(lg__background *job, lg_save_phase phase)
{
    pthread_mutex_lock(&job->lock);
    job->phase = phase;
    pthread_cond_broadcast(&job->changed);
    pthread_mutex_unlock(&job->lock);
}

static void on_staged(void *arg)
{
    lg__background *job = arg;
    pthread_mutex_lock(&job->lock);
    job->staged = true;
    if (job->phase == LG_PHASE_STAGING) {
        job->phase = LG_PHASE_WRITING;
    }
    pthread_cond_broadcast(&job->changed);
    pthread_mutex_unlock(&job->lock);
    wake_exit();
}

static void on_gathered(const lg__plan_box *box, void *arg)
{
    lg__background *job = arg;
    if (box->kept) {
        return;
    }
    pthread_mutex_lock(&job->lock);
    job->to_gather--;
    job->to_gather_eager -= box->lazy ? 0 : 1;
    bool all = job->to_gather == 0;
    pthread_cond_broadcast(&job->changed);
    pthread_mutex_unlock(&job->lock);
    if (all) {
        on_staged(job);
    }
}

/* Nothing of it runs any more, and no memory of the trainer is needed. */
static void over(lg__background *job, const result *r, lg_status status, const lg_error *err)
{
    pthread_mutex_lock(&job->lock);
    job->staged = job->checked = job->done = true;
    job->own = r->own;
    job->in_place = r->in_place;
    job->info.bytes_written = r->bytes_written;
    job->info.bytes_total = r->bytes_total;
    job->failed = status != LG_OK;
    job->phase = job->failed ? LG_PHASE_FAILED : LG_PHASE_COMMITTED;
    if (job->failed) {
        job->err = *err;
        job->err.status = status;
    } else {
        job->err = (lg_error)LG_ERROR_INIT; /* refused, but too late */
    }
    job->to_gather = job->to_gather_eager = 0;
    job->info.seconds = (double)(lg__now_ms() - job->began) / 1000;
    bool abandoned = job->abandoned;
    pthread_cond_broadcast(&job->changed);
    pthread_mutex_unlock(&job->lock);
    wake_exit();
    if (abandoned) { /* nobody else knows of it any more */
        lg_session *s = job->s;
        s->job = NULL;
        lg__background_free(job);
        lg__session_free(s);
        atomic_fetch_sub(&lg__background_left, 1);
    }
}

/* ------------------------------------------------------- checking the sources */

static lg_status digest_run(const uint8_t *data, uint64_t bytes, uint64_t at, void *arg, lg_error *err)
{
    (void)at, (void)err;
    uint32_t *crc = arg;
    for (uint64_t i = 0, n; i < bytes; i += n) {
        n = bytes - i < (UINT64_C(1) << 30) ? bytes - i : UINT64_C(1) << 30;
        *crc = lg__crc32c(*crc, data + i, (size_t)n);
    }
    return LG_OK;
}

/* Digests every lazy box that the trainer will change anew, in the order of the
 * plan; compares if they were digested before. */
static lg_status digest_sources(const lg__background *job, bool compare, lg_error *err)
{
    lg__scratch scratch = {.bytes = SOURCES_SCRATCH, .data = lg__malloc(SOURCES_SCRATCH)};
    lg_status st = scratch.data == NULL ? lg__nomem(err) : LG_OK;
    size_t k = 0;
    for (size_t f = 0; f < job->plan->n_files; f++) {
        const lg__plan_file *file = &job->plan->files[f];
        for (size_t i = 0; i < file->n_boxes && st == LG_OK; i++, k++) {
            uint32_t crc = 0;
            if (!file->boxes[i].lazy || file->boxes[i].kept) {
                continue;
            }
            st = lg__gather(&file->boxes[i], scratch, digest_run, &crc, err);
            if (st == LG_OK && compare && crc != job->sources[k]) {
                st = lg_error_set(err, LG_ERR_CONFLICT,
                                  "tensor \"%s\" was changed between lg_save_launch and lg_session_fence, though it "
                                  "was launched as LG_TENSOR_LAZY",
                                  file->boxes[i].tensor);
            } else if (!compare) {
                job->sources[k] = crc;
            }
        }
    }
    lg__free(scratch.data);
    return st;
}

/* By whoever waits first after everything was copied. */
static lg_status check_sources(lg__background *job, lg_error *err)
{
    pthread_mutex_lock(&job->lock);
    bool wanted = job->sources != NULL && !job->checked && job->staged;
    pthread_mutex_unlock(&job->lock);
    if (!wanted) {
        return LG_OK;
    }
    lg_status st = digest_sources(job, true, err);
    pthread_mutex_lock(&job->lock);
    job->checked = true;
    if (st != LG_OK) {
        job->err = *err;
    }
    pthread_cond_broadcast(&job->changed);
    pthread_mutex_unlock(&job->lock);
    return st;
}

/* Nothing is committed before the check. */
static lg_status await_check(lg__background *job, lg_error *err)
{
    lg_status st = LG_OK;
    if (job->inline_work) { /* nobody else could; all is read, so this waits for a moment at most */
        LG__TRY(lg__background_fence(job, UINT64_MAX, err));
    }
    pthread_mutex_lock(&job->lock);
    while (!job->checked) {
        pthread_cond_wait(&job->changed, &job->lock);
    }
    if (job->err.status != LG_OK) {
        *err = job->err;
        st = err->status;
    }
    job->past_check = true;
    pthread_mutex_unlock(&job->lock);
    return st;
}

/* --------------------------------------------------------------- the work */

static lg_status write_part(lg__background *job, lg__written *out, lg_error *err)
{
    lg_session *s = job->s;
    if (job->stage == NULL) { /* else the threads that copy wait */
        LG__TRY(lg__ready_wait(&job->ready, NULL, err));
    }
    lg_status st =
        job->stage != NULL
            ? lg__save_write_stage(job->save, s->store, job->a.folder, job->plan, &job->ids, job->stage, out, err)
            : lg__save_write(job->save, s->store, job->a.folder, job->plan, &job->ids, out, err);
    if (st == LG_OK && lg__is_coordinator(s)) {
        st = lg__commit_attached(job->save, &job->a, &out->bytes, err);
    }
    return lg__commit_unwritten(s, st, &job->a, err);
}

/* The coordinator's part after its own files. */
static lg_status lead(lg__background *job, const lg__bulletin *b, const lg__written *mine, result *r, bool *committed,
                      lg_error *err)
{
    lg_session *s = job->s;
    lg__written *written = lg__calloc(b->world, sizeof *written);
    if (written == NULL) {
        return lg__nomem(err);
    }
    written[b->rank] = *mine;
    /* The name of the folder, which the beginning left to this thread. */
    lg_status st = lg__store_sync_dir(s->store, "", err);
    if (st == LG_OK) {
        st = lg__bulletin_collect(b, s->deadline_ms, written, err);
    }
    for (uint32_t k = 0; k < b->world; k++) {
        r->bytes_total += written[k].bytes;
    }
    if (st == LG_OK) {
        st = lg__commit_coordinate(job->save, &job->a, written, committed, err);
    }
    lg__free(written);
    return st;
}

/* Where the disk is too full to say so: what this rank wrote goes. Only before
 * anything could be committed. */
static void make_room(const lg__background *job)
{
    lg_error ignored = LG_ERROR_INIT;
    for (size_t i = 0; job->plan != NULL && i < job->plan->n_files; i++) {
        char path[2 * LG__NAME_MAX];
        if (lg__path_join(path, sizeof path, job->a.folder, job->plan->files[i].name)) {
            (void)lg__store_remove_file(job->s->store, path, &ignored);
        }
    }
}

static lg_status lead_to_the_end(lg__background *job, const lg__bulletin *b, lg_status st, const lg__written *mine,
                                 result *r, lg_error *err)
{
    lg_session *s = job->s;
    bool committed = false;
    if (st == LG_OK) {
        st = lead(job, b, mine, r, &committed, err);
    }
    r->in_place = committed && st != LG_OK;
    if (!lg__bulletin_announce(b, committed ? LG_OK : st, err) && r->own) {
        make_room(job);
        (void)lg__bulletin_announce(b, st, err);
    }
    if (!committed) {
        lg_error ignored = LG_ERROR_INIT;
        lg__attempt_fail(s->store, job->a.folder, job->a.run_id, job->a.generation, job->a.token, s->epoch, &ignored);
    } else if (st == LG_OK) {
        /* Before the fence the trainer may still say that this one is torn: then the one before is needed. */
        pthread_mutex_lock(&job->lock);
        job->retains = job->lazy && !job->fenced;
        const bool now = !job->retains && !job->refused;
        pthread_mutex_unlock(&job->lock);
        if (now) {
            lg__retention_run(s, job->a.generation);
        }
    }
    return st;
}

static lg_status follow(lg__background *job, const lg__bulletin *b, lg_status st, const lg__written *mine, result *r,
                        lg_error *err)
{
    if (st == LG_ERR_SUPERSEDED) { /* the folder is gone: why, is not this rank's to say */
        r->own = false;
        if (b->kv != NULL) {
            lg_error ignored = LG_ERROR_INIT;
            (void)lg__bulletin_post(b, st, mine, err, &ignored);
        }
        enter(job, LG_PHASE_WAITING);
        return lg__bulletin_watch(b, job->s->deadline_ms, err);
    }
    if (st != LG_OK) {
        lg_error ignored = LG_ERROR_INIT;
        if (lg__bulletin_post(b, st, mine, err, &ignored) != LG_OK) {
            make_room(job);
            (void)lg__bulletin_post(b, st, mine, err, &ignored); /* else the coordinator's deadline tells */
        }
        return st;
    }
    st = lg__bulletin_post(b, LG_OK, mine, err, err);
    r->own = st != LG_OK;
    enter(job, LG_PHASE_WAITING);
    return st != LG_OK ? st : lg__bulletin_watch(b, job->s->deadline_ms, err);
}

static lg__bulletin bulletin_of(const lg__background *job)
{
    const lg_session *s = job->s;
    return (lg__bulletin){
        .store = s->store, .kv = s->kv, .attempt = &job->a, .epoch = s->epoch, .rank = s->rank, .world = s->world};
}

static void *work(void *arg)
{
    lg__background *job = arg;
    lg_session *s = job->s;
    const lg__bulletin b = bulletin_of(job);
    lg_error err = job->begin;
    lg__written written = {0};
    lg_status st = err.status == LG_OK ? write_part(job, &written, &err) : err.status;
    lg__stage_free(job->stage);
    job->stage = NULL;
    result r = {.own = st != LG_OK, .bytes_written = written.bytes};
    if (lg__is_coordinator(s)) {
        if (st == LG_OK) {
            enter(job, LG_PHASE_WAITING);
        }
        st = lead_to_the_end(job, &b, st, &written, &r, &err);
    } else {
        st = follow(job, &b, st, &written, &r, &err);
    }
    over(job, &r, st, &err);
    return NULL;
}

/* ----------------------------------------------------------------- starting */

static lg_status digest_before(lg__background *job, lg_error *err)
{
    size_t n = 0;
    for (size_t f = 0; f < job->plan->n_files; f++) {
        n += job->plan->files[f].n_boxes;
    }
    job->sources = lg__calloc(n, sizeof *job->sources);
    job->n_sources = n;
    return job->sources == NULL ? lg__nomem(err) : digest_sources(job, false, err);
}

static void release(lg_session *s)
{
    lg__pages_free(s->pages, s->pages_bytes);
    s->pages = NULL;
    s->pages_bytes = 0;
}

/* Memory for copies: kept by the session from one save to the next. */
static char *reserve(lg_session *s, uint64_t bytes)
{
    if (bytes > SIZE_MAX / 2) {
        return NULL;
    }
    if (s->pages == NULL || s->pages_bytes < bytes) {
        release(s);
        s->pages = lg__pages_new((size_t)bytes);
        s->pages_bytes = s->pages == NULL ? 0 : (size_t)bytes;
    }
    return s->pages;
}

typedef struct packer {
    uint8_t *to;
} packer;

static lg_status pack_run(const uint8_t *data, uint64_t bytes, uint64_t at, void *arg, lg_error *err)
{
    (void)err;
    memcpy(((packer *)arg)->to + at, data, (size_t)bytes);
    return LG_OK;
}

/* Where files are written without an image of them: copies aside what is not
 * lazy, the last boxes first, at most `most` bytes; the boxes then are read from
 * there. The launch waits until the rest has been written. */
static lg_status put_aside(lg__background *job, uint64_t most, lg_launch_info *info, lg_error *err)
{
    uint64_t bytes = 0, left = 0;
    for (size_t f = 0; f < job->plan->n_files; f++) {
        for (size_t i = 0; i < job->plan->files[f].n_boxes; i++) {
            lg__plan_box *box = &job->plan->files[f].boxes[i];
            LG__TRY(lg__shape_bytes(box->dtype, box->box.ndim, box->box.size, &bytes, err));
            box->kept = box->kept || bytes == 0;
            box->lazy = box->lazy || bytes == 0;
            *(box->lazy ? &info->bytes_lazy : &info->bytes_staged) += bytes;
            job->to_gather += box->kept ? 0 : 1;
            job->to_gather_eager += box->lazy ? 0 : 1;
        }
    }
    left = info->bytes_staged < most ? info->bytes_staged : most;
    job->plan->changed = left > 0;
    lg_session *s = job->s;
    if (s->pages_bytes > left) { /* of a launch that fitted: the cap is for all of it */
        release(s);
    }
    uint8_t *to = left > 0 ? (uint8_t *)reserve(s, left) : NULL;
    lg__scratch scratch = {.bytes = SOURCES_SCRATCH, .data = lg__malloc(SOURCES_SCRATCH)};
    lg_status st = scratch.data == NULL ? lg__nomem(err) : LG_OK;
    for (size_t f = job->plan->n_files; to != NULL && f-- > 0;) {
        for (size_t i = job->plan->files[f].n_boxes; st == LG_OK && i-- > 0;) {
            lg__plan_box *box = &job->plan->files[f].boxes[i];
            st = lg__shape_bytes(box->dtype, box->box.ndim, box->box.size, &bytes, err);
            if (st != LG_OK || box->lazy || bytes > left) {
                continue;
            }
            packer p = {to};
            st = lg__gather(box, scratch, pack_run, &p, err);
            box->data = to;
            box->strides = NULL;
            box->mem_origin = box->mem_size = NULL;
            box->lazy = box->kept = true;
            job->to_gather--;
            job->to_gather_eager--;
            to += bytes;
            left -= bytes;
        }
    }
    lg__free(scratch.data);
    return st;
}

static uint32_t copy_threads(const lg_launch_options *o)
{
    uint32_t n = o->copy_threads != 0 ? o->copy_threads : lg__processors();
    return n < MAX_COPY_THREADS || o->copy_threads != 0 ? n : MAX_COPY_THREADS;
}

/* Whether the caller keeps tensors until the end, and changes nothing else that is
 * lazy: then an image of the files would be a second copy for nothing. */
static bool keeps_all_that_is_lazy(const lg__background *job)
{
    bool kept = false;
    for (size_t i = 0; i < job->save->n_tensors; i++) {
        kept = kept || (job->save->tensors[i].flags & LG_TENSOR_KEPT) != 0;
    }
    for (size_t f = 0; f < job->plan->n_files; f++) {
        for (size_t i = 0; i < job->plan->files[f].n_boxes; i++) {
            const lg__plan_box *box = &job->plan->files[f].boxes[i];
            kept = kept && (box->kept || !box->lazy);
        }
    }
    return kept;
}

static lg_status stage_all(lg__background *job, const lg_launch_options *o, lg_launch_info *info, lg_error *err)
{
    lg_session *s = job->s;
    const uint64_t bytes = lg__stage_bytes(job->plan);
    const uint64_t cap = s->staging_bytes;
    const bool kept = keeps_all_that_is_lazy(job);
    char *memory = !kept && (cap == 0 || bytes <= cap) ? reserve(s, bytes) : NULL;
    if (memory != NULL) {
        LG__TRY(lg__stage_new(job->plan, job->save->block_bytes, memory, (size_t)bytes, &job->stage, err));
        info->bytes_staged = lg__stage_eager_bytes(job->stage);
        info->bytes_lazy = lg__stage_lazy_bytes(job->stage);
        return lg__stage_copy_eager(job->stage, copy_threads(o), err);
    }
    if (kept && cap == 0) {
        LG__TRY(put_aside(job, UINT64_MAX, info, err));
        info->windowed = job->to_gather_eager > 0; /* there was no memory */
        return LG_OK;
    }
    /* A cap, or no memory for a copy: it is written in windows. */
    const uint64_t least = UINT64_C(1) << 20;
    const uint64_t have = cap != 0 ? cap : s->buffer_bytes;
    LG__TRY(put_aside(job, have / 2, info, err));
    info->windowed = !kept || job->to_gather_eager > 0;
    const uint64_t rest = have - (s->pages_bytes < have ? s->pages_bytes : have);
    job->save->buffer_bytes = rest < least ? least : rest;
    return LG_OK;
}

static lg_status prepare(lg__background *job, const lg_launch_options *o, lg_launch_info *info, lg_error *err)
{
    job->ready = (lg__ready){.at = o->ready, .value = o->ready_value, .deadline_ms = job->s->deadline_ms / 2};
    LG__TRY(lg__plan_get(&job->s->plan, job->save, &job->ids, &job->plan, err));
    LG__TRY(stage_all(job, o, info, err));
    if ((o->flags & LG_LAUNCH_CHECK_SOURCES) != 0) { /* of what is left in place */
        LG__TRY(digest_before(job, err));
        job->checked = false;
    }
    return LG_OK;
}

static lg_status before_sums(void *arg, lg_error *err) { return await_check(arg, err); }

/* What the background left to the foreground. The session's. */
static void retain(lg_session *s, const lg__background *job)
{
    if (job->retains && !job->refused) {
        lg__retention_run(s, job->a.generation);
    }
}

lg_status lg__background_new(lg_session *s, lg_save *save, lg__background **out, lg_error *err)
{
    lg__background *job = lg__calloc(1, sizeof *job);
    if (job == NULL) {
        return lg__nomem(err);
    }
    *job = (lg__background){.s = s,
                            .save = save,
                            .deadline_ms = s->deadline_ms,
                            .phase = LG_PHASE_STAGING,
                            .checked = true,
                            .begin = LG_ERROR_INIT,
                            .err = LG_ERROR_INIT};
    pthread_mutex_init(&job->lock, NULL);
    lg__cond_init(&job->changed);
    job->hooks = (lg__save_hooks){.gathered = on_gathered, .before_sums = before_sums, .arg = job};
    *out = job;
    return LG_OK;
}

void lg__background_start(lg__background *job, const lg__attempt *a, const lg_launch_options *o, lg_status mine,
                          const lg_error *cause, lg_launch_info *info)
{
    lg_session *s = job->s;
    lg_save *save = job->save;
    job->a = *a;
    job->began = lg__now_ms();
    job->info = (lg_save_info){.step = save->step, .generation = a->generation, .unshared = save->unshared};
    lg__text_copy(job->info.folder, sizeof job->info.folder, a->final);
    lg__commit_ids(s, &job->a, &job->ids);
    save->hooks = &job->hooks;
    lg_error err = mine != LG_OK ? *cause : (lg_error)LG_ERROR_INIT;
    mine = mine != LG_OK ? mine : prepare(job, o, info, &err);
    if (mine != LG_OK) {
        job->begin = err;
        job->begin.status = mine;
        job->checked = true;
    }
    job->lazy = info->bytes_lazy > 0;
    s->job = job;
    const bool stream = mine == LG_OK && job->stage == NULL;
    if (mine != LG_OK || (stream && job->to_gather == 0)) {
        on_staged(job);
    }
    enlist(job);
    if (mine == LG_OK && job->stage != NULL) {
        lg__stage_start_lazy(job->stage, o->lazy_threads != 0 ? o->lazy_threads : 1, job->ready, on_staged, job);
    }
    job->has_thread = lg__thread_start(&job->thread, work, job);
    if (!job->has_thread) {
        job->inline_work = true;
        work(job);
        return; /* all is over */
    }
    pthread_mutex_lock(&job->lock);
    while (stream && job->to_gather_eager > 0) {
        pthread_cond_wait(&job->changed, &job->lock);
    }
    pthread_mutex_unlock(&job->lock);
}

/* ------------------------------------------------------------------ waiting */

lg__last lg__background_last(lg__background *job)
{
    lg__last last = {0};
    if (job == NULL) {
        return last;
    }
    pthread_mutex_lock(&job->lock);
    last.state = !job->done ? LG__LAST_IN_FLIGHT : job->failed ? LG__LAST_FAILED : LG__LAST_COMMITTED;
    last.own = job->own;
    last.in_place = job->in_place;
    last.step = job->info.step;
    last.bytes_total = job->info.bytes_total;
    if (job->done) {
        last.err = job->err;
    }
    pthread_mutex_unlock(&job->lock);
    return last;
}

lg_status lg__background_wait(lg__background *job, uint64_t deadline_ms, lg_error *err)
{
    if (job == NULL) {
        return LG_OK;
    }
    const uint64_t until = lg__deadline(deadline_ms);
    lg_error ignored = LG_ERROR_INIT;
    (void)lg__background_fence(job, deadline_ms, &ignored); /* for its check */
    pthread_mutex_lock(&job->lock);
    while (!job->done && lg__now_ms() < until) {
        (void)lg__cond_wait_until(&job->changed, &job->lock, until);
    }
    lg_status st = LG_OK;
    if (!job->done) {
        st = lg_error_set(err, LG_ERR_TIMEOUT, "the save of step %" PRIu64 " is still %s after %" PRIu64 " ms (%s)",
                          job->info.step, lg_save_phase_name(job->phase), deadline_ms, job->a.folder);
        err->rank = (int)job->s->rank;
    }
    pthread_mutex_unlock(&job->lock);
    return st;
}

lg_status lg__background_fence(lg__background *job, uint64_t deadline_ms, lg_error *err)
{
    if (job == NULL) {
        return LG_OK;
    }
    const uint64_t until = lg__deadline(deadline_ms);
    pthread_mutex_lock(&job->lock);
    while (!job->staged && lg__now_ms() < until) {
        (void)lg__cond_wait_until(&job->changed, &job->lock, until);
    }
    bool staged = job->staged;
    job->fenced = job->fenced || staged;
    pthread_mutex_unlock(&job->lock);
    LG__RETURN_IF(!staged, err, LG_ERR_TIMEOUT,
                  "the save of step %" PRIu64 " still reads the trainer's memory after %" PRIu64
                  " ms: tensors must not be changed yet",
                  job->info.step, deadline_ms);
    return check_sources(job, err);
}

bool lg__background_refuse(lg__background *job, lg_status status, const char *message)
{
    if (job == NULL) {
        return false;
    }
    pthread_mutex_lock(&job->lock);
    const bool in_time = !job->done && !job->past_check;
    job->refused = true;
    if (in_time) {
        lg_error_set(&job->err, status, "%s", message);
        job->checked = true;
        pthread_cond_broadcast(&job->changed);
    }
    pthread_mutex_unlock(&job->lock);
    return in_time;
}

bool lg__background_staged(lg__background *job)
{
    if (job == NULL) {
        return true;
    }
    pthread_mutex_lock(&job->lock);
    bool staged = job->staged;
    pthread_mutex_unlock(&job->lock);
    return staged;
}

void lg__background_phase(lg__background *job, lg_save_phase *phase, uint64_t *step)
{
    pthread_mutex_lock(&job->lock);
    *phase = job->phase;
    *step = job->info.step;
    pthread_mutex_unlock(&job->lock);
}

/* ----------------------------------------------------------------- settling */

void lg__background_free(lg__background *job)
{
    if (job == NULL) {
        return;
    }
    strike_off(job);
    if (job->has_thread) {
        pthread_join(job->thread, NULL);
    }
    lg__stage_free(job->stage);
    lg__plan_keep(&job->s->plan, job->plan, job->save);
    lg_save_abort(job->save);
    lg__free(job->sources);
    pthread_cond_destroy(&job->changed);
    pthread_mutex_destroy(&job->lock);
    lg__free(job);
}

void lg__background_settle(lg_session *s, bool committed, bool in_place, uint64_t bytes_total)
{
    lg__background *job = s->job;
    const lg__bulletin b = bulletin_of(job);
    lg__bulletin_clear(&b);
    s->job = NULL;
    if (committed || in_place) {
        lg__commit_remember(s, job->info.step, &job->a);
    }
    pthread_mutex_lock(&s->lock);
    s->last_phase = committed ? LG_PHASE_COMMITTED : LG_PHASE_FAILED;
    s->last_step = job->info.step;
    if (committed) {
        s->status.last_committed = job->a.generation;
        s->status.saves_committed++;
    } else {
        s->status.saves_failed++;
    }
    pthread_mutex_unlock(&s->lock);
    if (committed) {
        s->last_launched = job->info;
        s->last_launched.bytes_total = bytes_total;
        retain(s, job);
    } else if (lg__is_coordinator(s) && !in_place) {
        lg__attempt_forget(s->store, job->a.folder, job->a.token, s->epoch);
    }
    lg__background_free(job);
}

lg_status lg__background_close(lg_session *s, bool *left, lg_error *err)
{
    lg__background *job = s->job;
    if (job == NULL) {
        return LG_OK;
    }
    if (lg__background_wait(job, s->deadline_ms, err) != LG_OK) {
        pthread_mutex_lock(&job->lock);
        const bool runs = !job->done;
        if (runs) {
            if (!job->checked) { /* nobody will */
                lg_error_set(&job->err, LG_ERR_STATE, "closed before the sources could be checked");
                job->checked = true;
                pthread_cond_broadcast(&job->changed);
            }
            job->abandoned = true;
            atomic_fetch_add(&lg__background_left, 1);
            job->has_thread = false;
            pthread_detach(job->thread);
        }
        pthread_mutex_unlock(&job->lock);
        if (runs) {
            *left = true;
            lg_error_wrap(err, "closed before the save was durable, so it may be lost");
            return LG_ERR_TIMEOUT;
        }
    }
    lg_status st = LG_OK;
    if (job->failed) {
        *err = job->err;
        st = job->err.status;
        lg_error_wrap(err, "save step %" PRIu64 " in the background", job->info.step);
    }
    if (job->failed && s->world == 1 && !job->in_place) { /* else the cause stays for ranks that still look */
        lg__attempt_forget(s->store, job->a.folder, job->a.token, s->epoch);
    }
    if (!job->failed) {
        retain(s, job);
    }
    s->job = NULL;
    lg__background_free(job);
    return st;
}
