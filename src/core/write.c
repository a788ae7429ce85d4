/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "core/finite.h"
#include "core/gather.h"
#include "core/save.h"
#include "core/stage.h"
#include "core/writer.h"
#include "io/choice.h"
#include "store/store.h"

#include <string.h>

#define SCRATCH_BYTES ((uint64_t)4 << 20)
#define STAGING_BYTES ((uint64_t)LG__MAX_DEPTH << 20) /* the writer takes what it needs of it */
#define PATH_BYTES (2 * LG__NAME_MAX + 8)
#define SCAN_BYTES ((uint64_t)64 << 10) /* a multiple of every element's size */

/* ------------------------------------------------------------------- boxes */

typedef struct walk {
    lg__writer *writer;
    const lg__plan_box *box;
    const lg__scratch *scratch;
    bool kept; /* the memory is left alone until the save is done */
} walk;

static lg_status add_bytes(const uint8_t *data, uint64_t bytes, uint64_t at, void *arg, lg_error *err)
{
    const walk *w = arg;
    if (!w->box->finite_check) {
        /* A tile in the scratch is not left alone, whatever holds for the rest. */
        bool tile = (uintptr_t)data - (uintptr_t)w->scratch->data < w->scratch->bytes;
        return (tile || !w->kept ? lg__writer_append : lg__writer_append_kept)(w->writer, data, bytes, err);
    }
    for (uint64_t i = 0, n; i < bytes; i += n) {
        n = bytes - i < SCAN_BYTES ? bytes - i : SCAN_BYTES;
        LG__TRY(lg__finite_check(w->box, data + i, n, at + i, err));
        LG__TRY(lg__writer_append(w->writer, data + i, n, err));
    }
    return LG_OK;
}

/* ------------------------------------------------------------------- files */

/* What the files of one save share. Writer and scratch together are at most
 * the save's buffer_bytes. */
typedef struct job {
    lg__writer *writer;
    lg__scratch scratch;
    uint8_t (*digests)[LG__SHA256_BYTES];
    lg__buf encoded, report, sums;
} job;

/* Sends one file on its way, and fills its table. */
static lg_status write_file(const lg_save *save, const char *path, const lg__plan_file *file, const job *j,
                            lg__table *table, lg_error *err)
{
    *table = (lg__table){.file_bytes = file->header.len + file->data_bytes,
                         .header_bytes = file->header.len,
                         .header_crc = lg__crc32c(0, file->header.data, file->header.len),
                         .n_blocks = lg__block_count(file->data_bytes, save->block_bytes)};
    LG__RETURN_IF(table->n_blocks > SIZE_MAX / sizeof(uint32_t), err, LG_ERR_LIMIT, "too many blocks");
    table->block_crc = lg__malloc((size_t)table->n_blocks * sizeof(uint32_t));
    if (table->block_crc == NULL) {
        return lg__nomem(err);
    }
    LG__TRY(lg__writer_begin(j->writer, path, file->name, &file->header, save->block_bytes, table, err));
    for (size_t i = 0; i < file->n_boxes; i++) {
        walk w = {.writer = j->writer,
                  .box = &file->boxes[i],
                  .scratch = &j->scratch,
                  .kept = save->hooks == NULL || file->boxes[i].kept};
        LG__TRY(lg__gather(&file->boxes[i], j->scratch, add_bytes, &w, err));
        if (save->hooks != NULL && save->hooks->gathered != NULL) {
            save->hooks->gathered(&file->boxes[i], save->hooks->arg);
        }
    }
    return lg__writer_end(j->writer, err);
}

static lg_status write_small(lg_store *store, const char *path, const lg__buf *bytes, lg_error *err)
{
    lg_file *file = NULL;
    LG__TRY(lg__store_create(store, path, bytes->len, &file, err));
    lg_status status = lg__store_write(store, file, bytes->data, bytes->len, 0, err);
    if (status == LG_OK) {
        status = lg__store_sync(store, file, err);
    }
    lg_error ignored = LG_ERROR_INIT;
    lg_status closed = lg__store_close(store, file, status == LG_OK ? err : &ignored);
    return status != LG_OK ? status : closed;
}

typedef struct sums_paths {
    char name[LG__NAME_MAX], path[PATH_BYTES], temporary[PATH_BYTES];
} sums_paths;

static lg_status name_sums(const char *folder, uint32_t rank, sums_paths *out, lg_error *err)
{
    lg__sums_file(rank, out->name);
    LG__RETURN_IF(!lg__path_join(out->path, sizeof out->path - sizeof ".tmp", folder, out->name), err, LG_ERR_LIMIT,
                  "the folder's name is too long");
    size_t n = strlen(out->path);
    memcpy(out->temporary, out->path, n);
    memcpy(out->temporary + n, ".tmp", sizeof ".tmp");
    return LG_OK;
}

/* The sums file appears under its name only when it is durable, since its
 * name says that this rank is done. Where files cannot be renamed (objects) a
 * created file appears whole or not at all. */
static lg_status place_sums(lg_store *store, const char *folder, const sums_paths *p, const lg__buf *bytes,
                            bool sync_names, lg_error *err)
{
    if (sync_names) {
        LG__TRY(lg__store_sync_dir(store, folder, err));
    }
    lg_error why = LG_ERROR_INIT;
    lg_status renamed = lg__store_rename_file(store, p->temporary, p->path, &why);
    if (renamed != LG_ERR_UNSUPPORTED) {
        if (renamed != LG_OK) {
            *err = why;
        }
        return renamed;
    }
    LG__TRY(write_small(store, p->path, bytes, err));
    return lg__store_remove_file(store, p->temporary, err);
}

/* ------------------------------------------------------------------- a rank */

static lg_status job_init(job *j, const lg__plan *plan, lg_error *err)
{
    lg__buf_init(&j->encoded, SIZE_MAX / 2);
    lg__buf_init(&j->report, LG__REPORT_MAX);
    lg__buf_init(&j->sums, SIZE_MAX / 2);
    j->digests = lg__malloc(plan->n_files * sizeof *j->digests);
    return j->digests == NULL ? lg__nomem(err) : LG_OK;
}

static lg_status job_take_memory(job *j, const lg_save *save, const lg__plan *plan, lg_store *store, lg_error *err)
{
    uint64_t scratch = save->buffer_bytes / 4 < SCRATCH_BYTES ? save->buffer_bytes / 4 : SCRATCH_BYTES;
    uint64_t staging = save->buffer_bytes - scratch < STAGING_BYTES ? save->buffer_bytes - scratch : STAGING_BYTES;
    j->scratch.bytes = (size_t)scratch;
    j->scratch.data = lg__malloc(j->scratch.bytes);
    if (j->scratch.data == NULL) {
        return lg__nomem(err);
    }
    return lg__writer_new(store, staging, plan->bytes, &j->writer, err);
}

static void job_free(job *j)
{
    lg__writer_free(j->writer);
    lg__free(j->scratch.data);
    lg__free(j->digests);
    lg__buf_free(&j->encoded);
    lg__buf_free(&j->report);
    lg__buf_free(&j->sums);
}

static lg_status path_of(const char *folder, const lg__plan_file *file, char path[PATH_BYTES], lg_error *err)
{
    LG__RETURN_IF(!lg__path_join(path, PATH_BYTES, folder, file->name), err, LG_ERR_LIMIT,
                  "the folder's name is too long");
    return LG_OK;
}

/* The table of file i, known before the bytes are durable. */
static lg_status add_table(job *j, size_t i, const lg__table *table, lg_error *err)
{
    size_t from = j->encoded.len;
    lg__table_encode(table, &j->encoded);
    LG__TRY(lg__buf_check(&j->encoded, "the table of checksums", err));
    return lg__sha256_of(j->encoded.data + from, j->encoded.len - from, j->digests[i], err);
}

static lg_status add_file(job *j, const lg_save *save, const char *folder, const lg__plan *plan, size_t i,
                          lg_error *err)
{
    char path[PATH_BYTES];
    LG__TRY(path_of(folder, &plan->files[i], path, err));
    lg__table table;
    lg_status status = write_file(save, path, &plan->files[i], j, &table, err);
    if (status == LG_OK) {
        status = add_table(j, i, &table, err);
    }
    lg__free(table.block_crc);
    return status;
}

/* The same for a file that lies in a stage. */
static lg_status add_staged(job *j, const lg_save *save, const char *folder, const lg__plan *plan, size_t i,
                            lg__stage *stage, lg_error *err)
{
    char path[PATH_BYTES];
    LG__TRY(path_of(folder, &plan->files[i], path, err));
    lg__table table = lg__stage_table(stage, i);
    LG__TRY(lg__writer_begin(j->writer, path, plan->files[i].name, NULL, save->block_bytes, &table, err));
    for (bool last = false; !last;) {
        const void *data;
        size_t bytes;
        LG__TRY(lg__stage_take(stage, i, &data, &bytes, &last, err));
        LG__TRY(lg__writer_send(j->writer, data, bytes, err));
    }
    LG__TRY(lg__writer_end(j->writer, err));
    return add_table(j, i, &table, err);
}

/* Sends the sums file on its way under its temporary name, behind the last
 * shard: all of them become durable beside each other. */
static lg_status send_sums(job *j, const lg_save *save, const sums_paths *paths, bool staged, lg_error *err)
{
    lg__table table = {.file_bytes = j->sums.len}; /* no blocks: its parts carry digests of their own */
    LG__TRY(lg__writer_begin(j->writer, paths->temporary, paths->name, staged ? NULL : &j->sums, save->block_bytes,
                             &table, err));
    if (staged) {
        LG__TRY(lg__writer_send(j->writer, j->sums.data, j->sums.len, err));
    }
    return lg__writer_end(j->writer, err);
}

static lg_status finish(job *j, lg_save *save, lg_store *store, const char *folder, lg__plan *plan,
                        const lg__save_ids *ids, bool staged, lg__written *out, lg_error *err)
{
    lg__report *report = NULL;
    LG__TRY(lg__save_report(save, ids, plan, (const uint8_t(*)[LG__SHA256_BYTES])j->digests, &report, err));
    lg_status status = lg__report_encode(report, &j->report, err);
    lg__save_keep_report(save, report);
    LG__TRY(status);
    LG__TRY(lg__buf_check(&j->report, "the report", err));
    const lg__sums_head head = {.block_bytes = (uint32_t)save->block_bytes,
                                .n_tables = (uint32_t)plan->n_files,
                                .report_at = LG__SUMS_HEAD_BYTES + j->encoded.len,
                                .report_bytes = j->report.len};
    lg__sums_head_encode(&head, &j->sums);
    lg__buf_add(&j->sums, j->encoded.data, j->encoded.len);
    lg__buf_add(&j->sums, j->report.data, j->report.len);
    LG__TRY(lg__buf_check(&j->sums, "the sums file", err));
    lg__written w = {.sums_bytes = j->sums.len, .bytes = plan->bytes + j->sums.len};
    sums_paths paths;
    LG__TRY(name_sums(folder, save->rank, &paths, err));
    LG__TRY(send_sums(j, save, &paths, staged, err));
    /* What comes before this is done while data is on its way. */
    LG__TRY(lg__sha256_of(j->report.data, j->report.len, w.report, err));
    LG__TRY(lg__writer_finish(j->writer, err));
    if (save->hooks != NULL && save->hooks->before_sums != NULL) {
        LG__TRY(save->hooks->before_sums(save->hooks->arg, err));
    }
    if (place_sums(store, folder, &paths, &j->sums, save->hooks != NULL, err) != LG_OK) {
        return lg__writer_name_error(paths.name, err);
    }
    *out = w;
    return LG_OK;
}

lg_status lg__save_write(lg_save *save, lg_store *store, const char *folder, lg__plan *plan, const lg__save_ids *ids,
                         lg__written *out, lg_error *err)
{
    job j = {0};
    lg_status status = job_init(&j, plan, err);
    if (status == LG_OK) {
        status = job_take_memory(&j, save, plan, store, err);
    }
    for (size_t i = 0; i < plan->n_files && status == LG_OK; i++) {
        status = add_file(&j, save, folder, plan, i, err);
    }
    if (status == LG_OK) {
        status = finish(&j, save, store, folder, plan, ids, false, out, err);
    }
    job_free(&j);
    return status;
}

lg_status lg__save_write_stage(lg_save *save, lg_store *store, const char *folder, lg__plan *plan,
                               const lg__save_ids *ids, lg__stage *stage, lg__written *out, lg_error *err)
{
    job j = {0};
    lg_status status = job_init(&j, plan, err);
    if (status == LG_OK) {
        size_t bytes;
        void *memory = lg__stage_memory(stage, &bytes);
        status = lg__writer_new_sending(store, memory, bytes, &j.writer, err);
    }
    for (size_t i = 0; i < plan->n_files && status == LG_OK; i++) {
        status = add_staged(&j, save, folder, plan, i, stage, err);
    }
    if (status == LG_OK) {
        status = finish(&j, save, store, folder, plan, ids, true, out, err);
    }
    job_free(&j);
    return status;
}
