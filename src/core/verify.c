/* SPDX-License-Identifier: Apache-2.0 */
#include "core/verify.h"
#include "base/thread.h"
#include "core/checkpoint.h"
#include "format/record.h"
#include "io/buffers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Reads everything that a checkpoint's manifest lists, and checks it.
 *
 * First, in the caller's thread: the manifest itself, the folder's names and
 * sizes, side records and attached files. Then threads share a list of ranks:
 * who takes a rank reads its report, tables and headers, compares the headers
 * with the boxes that the layouts give the rank, and puts its files on a list
 * of open files, of which all threads take ranges of blocks before anyone
 * takes another rank. So many threads help with one large file, and what is in
 * memory is bounded by the number of threads times what one rank has. */

/* --------------------------------------------------------------- the result */

static bool stopped(const lg__verify *v) { return v->cancelled || v->broken.status != LG_OK; }

bool lg__verify_count(lg__verify *v, uint64_t bytes, uint64_t read)
{
    pthread_mutex_lock(&v->lock);
    v->result.bytes += read;
    v->done += bytes;
    if (v->options.progress != NULL && !v->cancelled && v->options.progress(v->done, v->total, v->options.arg) != 0) {
        v->cancelled = true;
    }
    bool go_on = !stopped(v);
    pthread_mutex_unlock(&v->lock);
    return go_on;
}

void lg__verify_file_seen(lg__verify *v)
{
    pthread_mutex_lock(&v->lock);
    v->result.files++;
    pthread_mutex_unlock(&v->lock);
}

void lg__verify_problem(lg__verify *v, const lg_problem *p)
{
    pthread_mutex_lock(&v->lock);
    if (v->result.problems++ == 0) {
        lg_error_set(&v->first, p->status, "%s", p->message);
    }
    if (v->options.problem != NULL) {
        v->options.problem(p, v->options.arg);
    }
    pthread_mutex_unlock(&v->lock);
}

bool lg__verify_failed(lg__verify *v, const char *file, const char *tensor, uint64_t offset, uint64_t bytes,
                       const lg_error *why)
{
    if (why->status == LG_ERR_NOMEM || why->status == LG_ERR_INTERNAL) {
        pthread_mutex_lock(&v->lock);
        if (v->broken.status == LG_OK) {
            v->broken = *why;
        }
        pthread_mutex_unlock(&v->lock);
        return true;
    }
    lg_problem p = {.status = why->status, .offset = offset, .bytes = bytes};
    lg__text_copy(p.file, sizeof p.file, file);
    lg__text_copy(p.tensor, sizeof p.tensor, tensor);
    lg__text_copy(p.message, sizeof p.message, why->message);
    lg__verify_problem(v, &p);
    return false;
}

/* -------------------------------------------------- what the folder holds */

static void check_manifest(lg__verify *v)
{
    lg_checkpoint *c = v->c;
    char path[2 * LG__NAME_MAX];
    lg__path_join(path, sizeof path, c->folder, LG__MANIFEST);
    lg__buf bytes;
    lg__buf_init(&bytes, LG__MANIFEST_MAX);
    lg_error why = LG_ERROR_INIT;
    lg_status status = lg__store_read_all(c->store, path, &bytes, &why);
    if (status == LG_ERR_NOT_FOUND) {
        why.status = status = LG_ERR_NOT_WHOLE;
    }
    uint8_t digest[LG__SHA256_BYTES];
    if (status == LG_OK) {
        status = lg__sha256_of(bytes.data != NULL ? bytes.data : "", bytes.len, digest, &why);
    }
    if (status == LG_OK && memcmp(digest, c->m->sha256, sizeof digest) != 0) {
        /* Its own checksum says how it is damaged; if that is right, it is
         * another checkpoint's. */
        lg__manifest *m = NULL;
        status = lg__manifest_decode(bytes.data != NULL ? bytes.data : "", bytes.len, &m, &why);
        lg__manifest_free(m);
        if (status == LG_OK) {
            status = lg_error_set(&why, LG_ERR_CORRUPT, "it is another manifest than the one that was opened");
        }
        lg_error_wrap(&why, "%s/" LG__MANIFEST, c->folder);
    }
    if (status != LG_OK) {
        lg__verify_failed(v, LG__MANIFEST, "", 0, bytes.len, &why);
    }
    v->result.files++;
    lg__verify_count(v, bytes.len, bytes.len);
    lg__buf_free(&bytes);
}

static void check_pin(lg__verify *v, const char *name)
{
    char path[2 * LG__NAME_MAX];
    lg__path_join(path, sizeof path, v->c->folder, name);
    lg__buf bytes;
    lg__buf_init(&bytes, LG__RECORD_MAX);
    lg_error why = LG_ERROR_INIT;
    lg__pin_record record;
    lg_status status = lg__store_read_all(v->c->store, path, &bytes, &why);
    if (status == LG_OK) {
        status = lg__pin_decode(bytes.data != NULL ? bytes.data : "", bytes.len, &record, &why);
        if (status != LG_OK) {
            lg_error_wrap(&why, "%s", path);
        }
    }
    if (status != LG_OK) {
        lg__verify_failed(v, name, "", 0, bytes.len, &why);
    }
    v->result.files++;
    lg__verify_count(v, 0, bytes.len);
    lg__buf_free(&bytes);
}

typedef struct folder_walk {
    lg__listed *all;
    size_t n;
    lg__arena *arena;
    const char **names; /* pins, and foreign safetensors files */
    size_t n_names, cap_names;
    bool failed;
} folder_walk;

static bool is_safetensors(const char *name)
{
    size_t length = strlen(name), suffix = strlen(".safetensors");
    return length >= suffix && strcmp(name + length - suffix, ".safetensors") == 0;
}

static bool is_pin(const char *name)
{
    char kind[32];
    uint32_t n;
    return lg__side_name_parse(name, kind, &n) && strcmp(kind, "pin") == 0;
}

static int visit_name(const lg_node *node, void *arg)
{
    folder_walk *w = arg;
    if (lg__listed_find(w->all, w->n, node->name) == NULL && (is_safetensors(node->name) || is_pin(node->name))) {
        char *copy = lg__arena_strdup(w->arena, node->name);
        w->failed = copy == NULL || !lg__grow((void **)&w->names, &w->cap_names, w->n_names, sizeof *w->names);
        if (!w->failed) {
            w->names[w->n_names++] = copy;
        }
    }
    return w->failed;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* What lies there beside the listed files: side records, and safetensors files
 * of others, which torch and transformers would take for one of ours. */
static lg_status check_names(lg__verify *v, folder_walk *w, lg_error *err)
{
    LG__TRY(lg__checkpoint_listed(v->c, w->arena, &w->all, &w->n, err));
    lg_error why = LG_ERROR_INIT;
    lg_status status = lg__store_list(v->c->store, v->c->folder, visit_name, w, &why);
    if (w->failed) {
        return lg__nomem(err);
    }
    if (status != LG_OK) {
        why.status = status == LG_ERR_NOT_FOUND ? LG_ERR_NOT_WHOLE : status;
        lg__verify_failed(v, "", "", 0, 0, &why);
        return LG_OK;
    }
    if (w->n_names > 1) {
        qsort(w->names, w->n_names, sizeof *w->names, compare_names);
    }
    for (size_t i = 0; i < w->n_names; i++) {
        if (is_pin(w->names[i])) {
            check_pin(v, w->names[i]);
        } else {
            lg_error_set(&why, LG_ERR_FORMAT,
                         "%s/%s: does not belong to the checkpoint, and other readers would load it", v->c->folder,
                         w->names[i]);
            lg__verify_failed(v, w->names[i], "", 0, 0, &why);
        }
    }
    return LG_OK;
}

/* SHA-256 of one attached file, in bounded memory. *left: bytes not counted. */
static lg_status check_attached(lg__verify *v, const lg__attached *a, char *buffer, uint64_t *left, lg_error *err)
{
    lg_file *file = NULL;
    LG__TRY(lg__checkpoint_open_file(v->c, a->name, a->bytes, &file, err));
    lg__sha256 *hash = lg__sha256_new();
    lg_status status = hash == NULL ? lg__nomem(err) : LG_OK;
    bool go_on = true;
    while (status == LG_OK && *left > 0 && go_on) {
        size_t n = *left < LG__VERIFY_READ ? (size_t)*left : LG__VERIFY_READ;
        status = lg__store_read(v->c->store, file, buffer, n, a->bytes - *left, err);
        if (status == LG_OK && !lg__sha256_add(hash, buffer, n)) {
            status = lg__nomem(err);
        }
        if (status == LG_OK) {
            *left -= n;
            go_on = lg__verify_count(v, n, n);
        }
    }
    uint8_t digest[LG__SHA256_BYTES];
    if (status == LG_OK && go_on) {
        if (!lg__sha256_end(hash, digest)) {
            status = lg__nomem(err);
        } else if (memcmp(digest, a->sha256, sizeof digest) != 0) {
            status = lg_error_set(err, LG_ERR_CORRUPT, "%s/%s: its contents changed since the save (SHA-256 differs)",
                                  v->c->folder, a->name);
        }
    }
    lg__sha256_free(hash);
    lg_error ignored;
    lg__store_close(v->c->store, file, &ignored);
    return status;
}

static lg_status check_folder(lg__verify *v, lg_error *err)
{
    folder_walk w = {.arena = lg__arena_new()};
    char *buffer = lg__malloc(LG__VERIFY_READ);
    lg_status status = w.arena == NULL || buffer == NULL ? lg__nomem(err) : LG_OK;
    if (status == LG_OK) {
        check_manifest(v);
        status = check_names(v, &w, err);
    }
    for (size_t i = 0; status == LG_OK && i < v->c->m->n_attached && !stopped(v); i++) {
        const lg__attached *a = &v->c->m->attached[i];
        lg_error why = LG_ERROR_INIT;
        uint64_t left = a->bytes;
        if (check_attached(v, a, buffer, &left, &why) != LG_OK) {
            lg__verify_failed(v, a->name, "", 0, a->bytes, &why);
        }
        v->result.files++;
        lg__verify_count(v, left, 0);
    }
    lg__free(w.names);
    lg__arena_free(w.arena);
    lg__free(buffer);
    return status;
}

/* ------------------------------------------------------------------ threads */

static void work(lg__verify *v, char *buffer)
{
    pthread_mutex_lock(&v->lock);
    while (!stopped(v)) {
        lg__verify_file *f = v->open;
        if (f != NULL) {
            uint64_t first = f->next, last = first + f->step;
            last = last < f->table.n_blocks ? last : f->table.n_blocks;
            f->next = last;
            f->users++;
            if (last == f->table.n_blocks) {
                v->open = f->next_open; /* nothing left to take */
            }
            pthread_mutex_unlock(&v->lock);
            lg__verify_blocks(v, f, first, last, buffer);
            pthread_mutex_lock(&v->lock);
            f->users--;
            if (f->users == 0 && f->next == f->table.n_blocks) {
                pthread_mutex_unlock(&v->lock);
                lg__verify_file_free(f);
                pthread_mutex_lock(&v->lock);
            }
        } else if (v->next_rank < v->c->m->world) {
            uint32_t rank = v->next_rank++;
            v->preparing++;
            pthread_mutex_unlock(&v->lock);
            lg__verify_file *files = lg__verify_rank(v, rank);
            pthread_mutex_lock(&v->lock);
            v->preparing--;
            while (files != NULL) {
                lg__verify_file *next = files->next_open;
                files->next_open = v->open;
                v->open = files;
                files = next;
            }
            pthread_cond_broadcast(&v->changed);
        } else if (v->preparing > 0) {
            pthread_cond_wait(&v->changed, &v->lock);
        } else {
            break;
        }
    }
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
}

static void *work_thread(void *arg)
{
    lg__verify *v = arg;
    /* Without memory the others do the work. */
    lg__buffers buffer = lg__buffers_new(LG__VERIFY_READ);
    if (buffer.data != NULL) {
        work(v, buffer.data);
    }
    lg__buffers_free(&buffer);
    return NULL;
}

#define MAX_THREADS 16

static lg_status check_ranks(lg__verify *v, lg_error *err)
{
    uint32_t n = v->options.threads;
    n = n == 0 ? lg__processors() : n;
    n = n > MAX_THREADS ? MAX_THREADS : n;
    lg__buffers buffer = lg__buffers_new(LG__VERIFY_READ);
    if (buffer.data == NULL) {
        return lg__nomem(err);
    }
    pthread_t threads[MAX_THREADS];
    uint32_t started = 0;
    while (started + 1 < n && lg__thread_start(&threads[started], work_thread, v)) {
        started++;
    }
    work(v, buffer.data);
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
    lg__buffers_free(&buffer);
    while (v->open != NULL) { /* left when stopped early */
        lg__verify_file *f = v->open;
        v->open = f->next_open;
        lg__verify_file_free(f);
    }
    return LG_OK;
}

static uint64_t bytes_to_check(const lg__manifest *m)
{
    uint64_t total = 0;
    for (uint32_t r = 0; r < m->world; r++) {
        total += m->ranks[r].sums_bytes;
        for (int g = 0; g < LG_GROUP_COUNT; g++) {
            for (uint32_t b = 0; b < m->ranks[r].n_files[g]; b++) {
                total += m->ranks[r].file_bytes[g][b];
            }
        }
    }
    for (size_t i = 0; i < m->n_attached; i++) {
        total += m->attached[i].bytes;
    }
    return total;
}

static uint64_t manifest_bytes(lg_checkpoint *c)
{
    char path[2 * LG__NAME_MAX];
    lg__path_join(path, sizeof path, c->folder, LG__MANIFEST);
    lg_file *file = NULL;
    uint64_t bytes = 0;
    lg_error ignored;
    if (lg__store_open_file(c->store, path, &file, &bytes, &ignored) != LG_OK) {
        return 0;
    }
    lg__store_close(c->store, file, &ignored);
    return bytes;
}

lg_status lg_verify(lg_checkpoint *c, const lg_verify_options *options, lg_verify_result *result, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(c == NULL, err, LG_ERR_INVALID, "lg_verify needs a checkpoint");
    LG__RETURN_IF(options != NULL && options->size != sizeof *options, err, LG_ERR_INVALID,
                  "lg_verify_options.size is not set: begin with LG_VERIFY_OPTIONS_INIT");
    lg__verify v = {.c = c, .first = LG_ERROR_INIT, .broken = LG_ERROR_INIT};
    if (options != NULL) {
        v.options = *options;
    }
    if (pthread_mutex_init(&v.lock, NULL) != 0) {
        return lg__nomem(err);
    }
    if (pthread_cond_init(&v.changed, NULL) != 0) {
        pthread_mutex_destroy(&v.lock);
        return lg__nomem(err);
    }
    v.total = bytes_to_check(c->m) + manifest_bytes(c);
    lg_status status = check_folder(&v, err);
    if (status == LG_OK) {
        status = check_ranks(&v, err);
    }
    pthread_cond_destroy(&v.changed);
    pthread_mutex_destroy(&v.lock);
    if (result != NULL) {
        *result = v.result;
    }
    LG__TRY(status);
    if (v.broken.status != LG_OK) {
        *err = v.broken;
        return err->status;
    }
    LG__RETURN_IF(v.cancelled, err, LG_ERR_CANCELLED, "verification was stopped by the caller");
    if (v.result.problems > 0) {
        *err = v.first;
        return err->status;
    }
    return LG_OK;
}
