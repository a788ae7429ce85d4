/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "core/finite.h"
#include "core/gather.h"
#include "core/save.h"
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
} walk;

/* Names the element of a box at byte `at` of it, in the tensor. */
static lg_status not_finite(const lg__plan_box *box, uint64_t at, lg_error *err)
{
    uint64_t i = at / (lg_dtype_bits(box->dtype) / 8);
    uint64_t place[LG_MAX_NDIM] = {0};
    for (uint32_t d = box->box.ndim; d-- > 0;) {
        place[d] = box->box.offset[d] + i % box->box.size[d];
        i /= box->box.size[d];
    }
    lg__buf b;
    lg__buf_init(&b, 1024);
    for (uint32_t d = 0; d < box->box.ndim; d++) {
        lg__buf_fmt(&b, "%s%llu", d > 0 ? ", " : "", (unsigned long long)place[d]);
    }
    lg_error_set(err, LG_ERR_INVALID, "tensor \"%s\" is not finite at [%s]", box->tensor,
                 b.data != NULL && !b.failed ? b.data : "");
    lg__buf_free(&b);
    return LG_ERR_INVALID;
}

static lg_status add_bytes(const uint8_t *data, uint64_t bytes, uint64_t at, void *arg, lg_error *err)
{
    const walk *w = arg;
    if (!w->box->finite_check) {
        /* The caller's memory, which is left alone until the save is done, or a
         * tile in the scratch, which is not. */
        bool tile = (uintptr_t)data - (uintptr_t)w->scratch->data < w->scratch->bytes;
        return (tile ? lg__writer_append : lg__writer_append_kept)(w->writer, data, bytes, err);
    }
    for (uint64_t i = 0, n; i < bytes; i += n) {
        n = bytes - i < SCAN_BYTES ? bytes - i : SCAN_BYTES;
        size_t bad = lg__finite_scan(w->box->dtype, data + i, (size_t)n);
        if (bad < n) {
            return not_finite(w->box, at + i + bad, err);
        }
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
        walk w = {.writer = j->writer, .box = &file->boxes[i], .scratch = &j->scratch};
        LG__TRY(lg__gather(&file->boxes[i], j->scratch, add_bytes, &w, err));
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

/* The sums file appears under its name only when it is durable, since its
 * name says that this rank is done. Where files cannot be renamed (objects) a
 * created file appears whole or not at all. */
static lg_status write_sums(lg_store *store, const char *folder, uint32_t rank, const lg__buf *bytes, lg_error *err)
{
    char name[LG__NAME_MAX], path[PATH_BYTES], temporary[PATH_BYTES];
    lg__sums_file(rank, name);
    LG__RETURN_IF(!lg__path_join(path, sizeof path - sizeof ".tmp", folder, name), err, LG_ERR_LIMIT,
                  "the folder's name is too long");
    size_t n = strlen(path);
    memcpy(temporary, path, n);
    memcpy(temporary + n, ".tmp", sizeof ".tmp");
    LG__TRY(write_small(store, temporary, bytes, err));
    lg_error why = LG_ERROR_INIT;
    lg_status renamed = lg__store_rename_file(store, temporary, path, &why);
    if (renamed != LG_ERR_UNSUPPORTED) {
        if (renamed != LG_OK) {
            *err = why;
        }
        return renamed;
    }
    LG__TRY(write_small(store, path, bytes, err));
    return lg__store_remove_file(store, temporary, err);
}

/* ------------------------------------------------------------------- a rank */

static lg_status job_init(job *j, const lg_save *save, const lg__plan *plan, lg_store *store, lg_error *err)
{
    uint64_t scratch = save->buffer_bytes / 4 < SCRATCH_BYTES ? save->buffer_bytes / 4 : SCRATCH_BYTES;
    uint64_t staging = save->buffer_bytes - scratch < STAGING_BYTES ? save->buffer_bytes - scratch : STAGING_BYTES;
    lg__buf_init(&j->encoded, SIZE_MAX / 2);
    lg__buf_init(&j->report, LG__REPORT_MAX);
    lg__buf_init(&j->sums, SIZE_MAX / 2);
    j->scratch.bytes = (size_t)scratch;
    j->scratch.data = lg__malloc(j->scratch.bytes);
    j->digests = lg__malloc(plan->n_files * sizeof *j->digests);
    if (j->scratch.data == NULL || j->digests == NULL) {
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

static lg_status add_file(job *j, const lg_save *save, const char *folder, const lg__plan *plan, size_t i,
                          lg_error *err)
{
    const lg__plan_file *file = &plan->files[i];
    char path[PATH_BYTES];
    LG__RETURN_IF(!lg__path_join(path, sizeof path, folder, file->name), err, LG_ERR_LIMIT,
                  "the folder's name is too long");
    lg__table table;
    lg_status status = write_file(save, path, file, j, &table, err);
    if (status == LG_OK) { /* digests are known before the bytes are durable */
        size_t from = j->encoded.len;
        lg__table_encode(&table, &j->encoded);
        status = lg__buf_check(&j->encoded, "the table of checksums", err);
        if (status == LG_OK) {
            status = lg__sha256_of(j->encoded.data + from, j->encoded.len - from, j->digests[i], err);
        }
    }
    lg__free(table.block_crc);
    return status;
}

static lg_status finish(job *j, const lg_save *save, lg_store *store, const char *folder, const lg__plan *plan,
                        const lg__save_ids *ids, lg__written *out, lg_error *err)
{
    lg__report *report = NULL;
    LG__TRY(lg__save_report(save, ids, plan, (const uint8_t(*)[LG__SHA256_BYTES])j->digests, &report, err));
    lg_status status = lg__report_encode(report, &j->report, err);
    lg__report_free(report);
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
    LG__TRY(lg__sha256_of(j->report.data, j->report.len, w.report, err));
    char name[LG__NAME_MAX];
    lg__sums_file(save->rank, name);
    if (write_sums(store, folder, save->rank, &j->sums, err) != LG_OK) {
        return lg__writer_name_error(name, err);
    }
    *out = w;
    return LG_OK;
}

lg_status lg__save_write(lg_save *save, lg_store *store, const char *folder, const lg__plan *plan,
                         const lg__save_ids *ids, lg__written *out, lg_error *err)
{
    job j = {0};
    lg_status status = job_init(&j, save, plan, store, err);
    for (size_t i = 0; i < plan->n_files && status == LG_OK; i++) {
        status = add_file(&j, save, folder, plan, i, err);
    }
    if (status == LG_OK) {
        status = lg__writer_finish(j.writer, err);
    }
    if (status == LG_OK) {
        status = finish(&j, save, store, folder, plan, ids, out, err);
    }
    job_free(&j);
    return status;
}
