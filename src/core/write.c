/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "core/finite.h"
#include "core/gather.h"
#include "core/save.h"
#include "store/store.h"

#include <string.h>

#define STAGING_BYTES ((uint64_t)1 << 20)
#define SCRATCH_BYTES ((uint64_t)4 << 20)
#define STAGING_ALIGN ((size_t)4096)
#define PATH_BYTES (2 * LG__NAME_MAX + 8)
#define SCAN_BYTES ((uint64_t)64 << 10) /* a multiple of every element's size */

/* ------------------------------------------------------------------- stream
 *
 * The data of one file on its way to the store: bytes are gathered into one
 * buffer, digested block by block while they are in the cache, and written
 * when it is full. What is digested is what is written, from the buffer, even
 * if the source should change under our hands. An engine that writes in the
 * background replaces this and nothing else. */
typedef struct stream {
    lg_store *store;
    lg_file *file;
    uint8_t *buffer; /* aligned to STAGING_ALIGN */
    size_t cap, used, digested;
    uint64_t at; /* place in the file of buffer[0] */
    uint64_t block_bytes;
    uint64_t in_block; /* bytes of the current block that are digested */
    lg__table *table;
    uint64_t n_blocks; /* begun */
} stream;

/* Digests what is in the buffer and was not yet. */
static lg_status stream_digest(stream *s, lg_error *err)
{
    while (s->digested < s->used) {
        if (s->in_block == 0) {
            LG__RETURN_IF(s->n_blocks == s->table->n_blocks, err, LG_ERR_INTERNAL, "more data than planned");
            s->table->block_crc[s->n_blocks++] = 0;
        }
        uint64_t n = s->block_bytes - s->in_block;
        n = n < s->used - s->digested ? n : s->used - s->digested;
        uint32_t *crc = &s->table->block_crc[s->n_blocks - 1];
        *crc = lg__crc32c(*crc, s->buffer + s->digested, (size_t)n);
        s->digested += (size_t)n;
        s->in_block = (s->in_block + n) % s->block_bytes;
    }
    return LG_OK;
}

static lg_status stream_flush(stream *s, lg_error *err)
{
    LG__TRY(stream_digest(s, err));
    if (s->used > 0) {
        LG__TRY(lg__store_write(s->store, s->file, s->buffer, s->used, s->at, err));
        s->at += s->used;
        s->used = s->digested = 0;
    }
    return LG_OK;
}

static lg_status stream_append(stream *s, const uint8_t *data, uint64_t bytes, lg_error *err)
{
    while (bytes > 0) {
        uint64_t room = s->cap - s->used;
        uint64_t n = bytes < room ? bytes : room;
        n = n < SCAN_BYTES ? n : SCAN_BYTES;
        memcpy(s->buffer + s->used, data, (size_t)n);
        s->used += (size_t)n;
        data += n;
        bytes -= n;
        if (s->used - s->digested >= SCAN_BYTES) {
            LG__TRY(stream_digest(s, err));
        }
        if (s->used == s->cap) {
            LG__TRY(stream_flush(s, err));
        }
    }
    return LG_OK;
}

/* ------------------------------------------------------------------- boxes */

typedef struct walk {
    stream *stream;
    const lg__plan_box *box;
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
        return stream_append(w->stream, data, bytes, err);
    }
    for (uint64_t i = 0, n; i < bytes; i += n) {
        n = bytes - i < SCAN_BYTES ? bytes - i : SCAN_BYTES;
        size_t bad = lg__finite_scan(w->box->dtype, data + i, (size_t)n);
        if (bad < n) {
            return not_finite(w->box, at + i + bad, err);
        }
        LG__TRY(stream_append(w->stream, data + i, n, err));
    }
    return LG_OK;
}

/* ------------------------------------------------------------------- files */

static lg_status write_data(stream *s, lg__scratch scratch, const lg__plan_file *file, lg_error *err)
{
    LG__TRY(lg__store_write(s->store, s->file, file->header.data, file->header.len, 0, err));
    for (size_t i = 0; i < file->n_boxes; i++) {
        walk w = {.stream = s, .box = &file->boxes[i]};
        LG__TRY(lg__gather(&file->boxes[i], scratch, add_bytes, &w, err));
    }
    LG__TRY(stream_flush(s, err));
    LG__RETURN_IF(s->at != file->header.len + file->data_bytes || s->n_blocks != s->table->n_blocks, err,
                  LG_ERR_INTERNAL, "%llu bytes were written instead of %llu", (unsigned long long)s->at,
                  (unsigned long long)(file->header.len + file->data_bytes));
    return lg__store_sync(s->store, s->file, err);
}

/* What the files of one save share. Buffer and scratch together are at most
 * the save's buffer_bytes. */
typedef struct job {
    uint8_t *buffer, *aligned;
    size_t cap;
    lg__scratch scratch;
    uint8_t (*digests)[LG__SHA256_BYTES];
    lg__buf tables, report, sums;
} job;

/* Writes, syncs and closes one file, and fills its table; block_crc is the
 * caller's to free, whatever the result. */
static lg_status write_file(const lg_save *save, lg_store *store, const char *path, const lg__plan_file *file,
                            const job *j, lg__table *table, lg_error *err)
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
    stream s = {.store = store,
                .buffer = j->aligned,
                .cap = j->cap,
                .at = file->header.len,
                .block_bytes = save->block_bytes,
                .table = table};
    LG__TRY(lg__store_create(store, path, table->file_bytes, &s.file, err));
    lg_status status = write_data(&s, j->scratch, file, err);
    lg_error ignored = LG_ERROR_INIT;
    lg_status closed = lg__store_close(store, s.file, status == LG_OK ? err : &ignored);
    return status != LG_OK ? status : closed;
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

static lg_status job_init(job *j, const lg_save *save, const lg__plan *plan, lg_error *err)
{
    uint64_t cap = save->buffer_bytes / 2 < STAGING_BYTES ? save->buffer_bytes / 2 : STAGING_BYTES;
    cap = cap < STAGING_ALIGN ? STAGING_ALIGN : cap / STAGING_ALIGN * STAGING_ALIGN;
    j->cap = (size_t)cap;
    j->buffer = lg__malloc(j->cap + STAGING_ALIGN);
    uint64_t rest = save->buffer_bytes > cap + STAGING_ALIGN ? save->buffer_bytes - cap - STAGING_ALIGN : 0;
    j->scratch.bytes = (size_t)(rest < SCRATCH_BYTES ? rest : SCRATCH_BYTES);
    j->scratch.data = lg__malloc(j->scratch.bytes);
    j->digests = lg__malloc(plan->n_files * sizeof *j->digests);
    lg__buf_init(&j->tables, SIZE_MAX / 2);
    lg__buf_init(&j->report, LG__REPORT_MAX);
    lg__buf_init(&j->sums, SIZE_MAX / 2);
    if (j->buffer == NULL || j->scratch.data == NULL || j->digests == NULL) {
        return lg__nomem(err);
    }
    j->aligned = j->buffer + (STAGING_ALIGN - (uintptr_t)j->buffer % STAGING_ALIGN) % STAGING_ALIGN;
    return LG_OK;
}

static void job_free(job *j)
{
    lg__free(j->buffer);
    lg__free(j->scratch.data);
    lg__free(j->digests);
    lg__buf_free(&j->tables);
    lg__buf_free(&j->report);
    lg__buf_free(&j->sums);
}

/* Puts the file's name before an error, unless the store did. */
static lg_status name_file(const char *name, lg_error *err)
{
    return strstr(err->message, name) != NULL ? err->status : lg_error_wrap(err, "%s", name);
}

static lg_status add_file(job *j, const lg_save *save, lg_store *store, const char *folder, const lg__plan *plan,
                          size_t i, lg_error *err)
{
    const lg__plan_file *file = &plan->files[i];
    char path[PATH_BYTES];
    LG__RETURN_IF(!lg__path_join(path, sizeof path, folder, file->name), err, LG_ERR_LIMIT,
                  "the folder's name is too long");
    lg__table table;
    lg_status status = write_file(save, store, path, file, j, &table, err);
    if (status == LG_OK) {
        size_t from = j->tables.len;
        lg__table_encode(&table, &j->tables);
        status = lg__buf_check(&j->tables, "the table of checksums", err);
        if (status == LG_OK) {
            status = lg__sha256_of(j->tables.data + from, j->tables.len - from, j->digests[i], err);
        }
    }
    lg__free(table.block_crc);
    return status == LG_OK ? LG_OK : name_file(file->name, err);
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
                                .report_at = LG__SUMS_HEAD_BYTES + j->tables.len,
                                .report_bytes = j->report.len};
    lg__sums_head_encode(&head, &j->sums);
    lg__buf_add(&j->sums, j->tables.data, j->tables.len);
    lg__buf_add(&j->sums, j->report.data, j->report.len);
    LG__TRY(lg__buf_check(&j->sums, "the sums file", err));
    lg__written w = {.sums_bytes = j->sums.len, .bytes = plan->bytes + j->sums.len};
    LG__TRY(lg__sha256_of(j->report.data, j->report.len, w.report, err));
    char name[LG__NAME_MAX];
    lg__sums_file(save->rank, name);
    if (write_sums(store, folder, save->rank, &j->sums, err) != LG_OK) {
        return name_file(name, err);
    }
    *out = w;
    return LG_OK;
}

lg_status lg__save_write(lg_save *save, lg_store *store, const char *folder, const lg__plan *plan,
                         const lg__save_ids *ids, lg__written *out, lg_error *err)
{
    job j = {0};
    lg_status status = job_init(&j, save, plan, err);
    for (size_t i = 0; i < plan->n_files && status == LG_OK; i++) {
        status = add_file(&j, save, store, folder, plan, i, err);
    }
    if (status == LG_OK) {
        status = finish(&j, save, store, folder, plan, ids, out, err);
    }
    job_free(&j);
    return status;
}
