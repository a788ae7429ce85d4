/* SPDX-License-Identifier: Apache-2.0 */
#include "core/checkpoint.h"

#include <stdlib.h>
#include <string.h>

bool lg__status_is_damage(lg_status status)
{
    switch (status) {
    case LG_ERR_CORRUPT:
    case LG_ERR_FORMAT:
    case LG_ERR_NOT_WHOLE:
    case LG_ERR_COVERAGE:
    case LG_ERR_NOT_FOUND:
    case LG_ERR_IO:
        return true;
    default:
        return false;
    }
}

/* ---------------------------------------------------------- open and close */

static lg_status read_manifest(lg_store *store, const char *folder, lg__buf *bytes, lg_error *err)
{
    char path[2 * LG__NAME_MAX];
    LG__RETURN_IF(!lg__path_join(path, sizeof path, folder, LG__MANIFEST), err, LG_ERR_INVALID,
                  "folder name \"%s\" is too long", folder);
    return lg__store_read_all(store, path, bytes, err);
}

lg_status lg__checkpoint_open_decoded(lg_store *store, bool own, const char *folder, lg__manifest *m,
                                      lg_checkpoint **out, lg_error *err)
{
    LG__RETURN_IF(strlen(folder) >= LG__NAME_MAX, err, LG_ERR_INVALID, "folder name \"%.64s…\" is too long", folder);
    LG__RETURN_IF(m->tombstone, err, LG_ERR_NOT_FOUND,
                  "\"%s\" is no checkpoint: the attempt was ended by the session of epoch %llu", folder,
                  (unsigned long long)m->superseded_by);
    lg_checkpoint *c = lg__calloc(1, sizeof *c);
    if (c == NULL) {
        return lg__nomem(err);
    }
    c->ranks = lg__calloc(m->world, sizeof *c->ranks);
    c->handed_out = lg__arena_new();
    if (c->ranks == NULL || c->handed_out == NULL || pthread_mutex_init(&c->lock, NULL) != 0) {
        lg__free(c->ranks);
        lg__arena_free(c->handed_out);
        lg__free(c);
        return lg__nomem(err);
    }
    c->store = store;
    c->owns_store = own;
    memcpy(c->folder, folder, strlen(folder) + 1);
    c->m = m;
    *out = c;
    return LG_OK;
}

lg_status lg__checkpoint_open_in(lg_store *store, bool own, const char *folder, const char *manifest,
                                 size_t manifest_bytes, lg_checkpoint **out, lg_error *err)
{
    LG__RETURN_IF(strlen(folder) >= LG__NAME_MAX, err, LG_ERR_INVALID, "folder name \"%.64s…\" is too long", folder);
    lg__buf bytes;
    lg__buf_init(&bytes, LG__MANIFEST_MAX);
    lg_status status = LG_OK;
    if (manifest == NULL) {
        status = read_manifest(store, folder, &bytes, err);
        manifest = bytes.data;
        manifest_bytes = bytes.len;
    }
    lg__manifest *m = NULL;
    if (status == LG_OK) {
        status = lg__manifest_decode(manifest != NULL ? manifest : "", manifest_bytes, &m, err);
        if (status != LG_OK) {
            lg_error_wrap(err, "%s%s" LG__MANIFEST, folder, *folder != '\0' ? "/" : "");
        }
    }
    lg__buf_free(&bytes);
    if (status == LG_OK) {
        status = lg__checkpoint_open_decoded(store, own, folder, m, out, err);
    }
    if (status != LG_OK) {
        lg__manifest_free(m);
    }
    return status;
}

static size_t header_cost(const lg__st_header *h)
{
    return h == NULL ? 0 : (size_t)h->data_start + h->n * (sizeof(lg__st_tensor) + 96);
}

static size_t table_cost(const lg__table *t) { return t == NULL ? 0 : (size_t)t->n_blocks * sizeof *t->block_crc; }

static void table_free(lg__table *t)
{
    if (t != NULL) {
        lg__free(t->block_crc);
        lg__free(t);
    }
}

static void shard_drop(lg_checkpoint *c, lg__shard *s)
{
    size_t cost = header_cost(s->header) + table_cost(s->table);
    c->cached_bytes -= cost < c->cached_bytes ? cost : c->cached_bytes;
    lg__st_free(s->header);
    table_free(s->table);
    s->header = NULL;
    s->header_verified = false;
    s->table = NULL;
}

void lg_checkpoint_close(lg_checkpoint *c)
{
    if (c == NULL) {
        return;
    }
    for (uint32_t r = 0; r < c->m->world; r++) {
        lg__rank_files *files = &c->ranks[r];
        for (size_t i = 0; i < files->n_shards; i++) {
            shard_drop(c, &files->shards[i]);
        }
        lg__free(files->shards);
        lg__report_free(files->report);
    }
    lg__free(c->ranks);
    lg__free(c->first_file);
    lg__free(c->keys);
    lg__arena_free(c->handed_out);
    pthread_mutex_destroy(&c->lock);
    if (!c->borrows_manifest) {
        lg__manifest_free(c->m);
    }
    if (c->owns_store) {
        lg_store_free(c->store);
    }
    lg__free(c);
}

void lg__checkpoint_forget(lg_checkpoint *c, uint32_t rank)
{
    if (c->cached_bytes <= LG__CACHE_MAX) {
        return;
    }
    lg__rank_files *files = &c->ranks[rank];
    for (size_t i = 0; i < files->n_shards; i++) {
        shard_drop(c, &files->shards[i]);
    }
    lg__report_free(files->report);
    files->report = NULL;
}

/* ------------------------------------------------------------ files by name */

lg_status lg__checkpoint_rank(lg_checkpoint *c, uint32_t rank, lg__rank_files **out, lg_error *err)
{
    LG__RETURN_IF(rank >= c->m->world, err, LG_ERR_INTERNAL, "rank %u of a checkpoint of %u", rank, c->m->world);
    lg__rank_files *files = &c->ranks[rank];
    const lg__rank_row *row = &c->m->ranks[rank];
    lg_status status = LG_OK;
    pthread_mutex_lock(&c->lock);
    if (files->shards == NULL) {
        size_t n = 0;
        for (int g = 0; g < LG_GROUP_COUNT; g++) {
            n += row->n_files[g];
        }
        lg__shard *shards = lg__calloc(n, sizeof *shards);
        if (shards == NULL) {
            status = lg__nomem(err);
        } else {
            size_t i = 0;
            for (int g = 0; g < LG_GROUP_COUNT; g++) {
                for (uint32_t b = 0; b < row->n_files[g]; b++, i++) {
                    lg__shard_file(rank, (lg_group)g, b, row->n_files[g], shards[i].name);
                    shards[i].rank = rank;
                    shards[i].number = b;
                    shards[i].group = (lg_group)g;
                    shards[i].bytes = row->file_bytes[g][b];
                    shards[i].index = i;
                }
            }
            files->shards = shards;
            files->n_shards = n;
        }
    }
    pthread_mutex_unlock(&c->lock);
    if (status == LG_OK) {
        *out = files;
    }
    return status;
}

static lg_status listed_add(lg__arena *arena, lg__listed *to, const char *name, uint64_t bytes, lg_error *err)
{
    to->name = lg__arena_strdup(arena, name);
    to->bytes = bytes;
    return to->name != NULL ? LG_OK : lg__nomem(err);
}

static int listed_compare(const void *a, const void *b)
{
    return strcmp(((const lg__listed *)a)->name, ((const lg__listed *)b)->name);
}

lg_status lg__checkpoint_listed(lg_checkpoint *c, lg__arena *arena, lg__listed **out, size_t *n, lg_error *err)
{
    const lg__manifest *m = c->m;
    size_t count = m->n_attached + m->world;
    for (uint32_t r = 0; r < m->world; r++) {
        for (int g = 0; g < LG_GROUP_COUNT; g++) {
            count += m->ranks[r].n_files[g];
        }
    }
    lg__listed *all = lg__arena_array(arena, count, sizeof *all);
    if (all == NULL) {
        return lg__nomem(err);
    }
    size_t k = 0;
    char name[LG__NAME_MAX];
    for (uint32_t r = 0; r < m->world; r++) {
        for (int g = 0; g < LG_GROUP_COUNT; g++) {
            for (uint32_t b = 0; b < m->ranks[r].n_files[g]; b++) {
                lg__shard_file(r, (lg_group)g, b, m->ranks[r].n_files[g], name);
                LG__TRY(listed_add(arena, &all[k++], name, m->ranks[r].file_bytes[g][b], err));
            }
        }
        lg__sums_file(r, name);
        LG__TRY(listed_add(arena, &all[k++], name, m->ranks[r].sums_bytes, err));
    }
    for (size_t i = 0; i < m->n_attached; i++) {
        LG__TRY(listed_add(arena, &all[k++], m->attached[i].name, m->attached[i].bytes, err));
    }
    qsort(all, count, sizeof *all, listed_compare);
    *out = all;
    *n = count;
    return LG_OK;
}

lg__listed *lg__listed_find(lg__listed *all, size_t n, const char *name)
{
    lg__listed key = {.name = name};
    return bsearch(&key, all, n, sizeof *all, listed_compare);
}

typedef struct whole_walk {
    lg__listed *all;
    size_t n;
} whole_walk;

/* Marks what is there with its size. Stores may not know sizes (0) while
 * listing; those are opened afterwards. */
static int mark_found(const lg_node *node, void *arg)
{
    whole_walk *w = arg;
    lg__listed *entry = node->type == LG_NODE_FILE ? lg__listed_find(w->all, w->n, node->name) : NULL;
    if (entry != NULL && node->bytes == entry->bytes) {
        entry->found = true;
    }
    return 0;
}

lg_status lg__checkpoint_check_whole(lg_checkpoint *c, lg_error *err)
{
    lg__arena *arena = lg__arena_new();
    if (arena == NULL) {
        return lg__nomem(err);
    }
    whole_walk w = {0};
    lg_status status = lg__checkpoint_listed(c, arena, &w.all, &w.n, err);
    if (status == LG_OK) {
        status = lg__store_list(c->store, c->folder, mark_found, &w, err);
        if (status == LG_ERR_NOT_FOUND) {
            status = lg_error_set(err, LG_ERR_NOT_WHOLE, "the step folder %s is gone", c->folder);
        }
    }
    for (size_t i = 0; status == LG_OK && i < w.n; i++) {
        if (!w.all[i].found) {
            lg_file *file = NULL;
            status = lg__checkpoint_open_file(c, w.all[i].name, w.all[i].bytes, &file, err);
            if (status == LG_OK) {
                status = lg__store_close(c->store, file, err);
            }
        }
    }
    lg__arena_free(arena);
    return status;
}

lg_status lg__checkpoint_open_file(lg_checkpoint *c, const char *name, uint64_t bytes, lg_file **out, lg_error *err)
{
    char path[2 * LG__NAME_MAX];
    LG__RETURN_IF(!lg__path_join(path, sizeof path, c->folder, name), err, LG_ERR_INVALID,
                  "file name \"%s\" is too long", name);
    lg_file *file = NULL;
    uint64_t found = 0;
    lg_status status = lg__store_open_file(c->store, path, &file, &found, err);
    if (status == LG_ERR_NOT_FOUND) {
        return lg_error_set(err, LG_ERR_NOT_WHOLE, "%s: the manifest lists it, but it is not there", path);
    }
    if (status == LG_ERR_FORMAT) {
        err->status = LG_ERR_NOT_WHOLE;
        return err->status;
    }
    LG__TRY(status);
    if (found != bytes) {
        lg_error ignored;
        lg__store_close(c->store, file, &ignored);
        return lg_error_set(err, LG_ERR_NOT_WHOLE, "%s: has %llu bytes, the manifest says %llu", path,
                            (unsigned long long)found, (unsigned long long)bytes);
    }
    *out = file;
    return LG_OK;
}

/* Puts "folder/name: " before a message. */
static lg_status in_file(lg_checkpoint *c, const char *name, lg_error *err)
{
    return lg_error_wrap(err, "%s%s%s", c->folder, *c->folder != '\0' ? "/" : "", name);
}

static void close_quietly(lg_checkpoint *c, lg_file *file)
{
    lg_error ignored;
    lg__store_close(c->store, file, &ignored);
}

/* ------------------------------------------------------ reports and tables */

/* The report's digest is right by now: this finds a report that belongs to
 * another attempt or rank, or a manifest that is at odds with it. */
static lg_status check_report(lg_checkpoint *c, uint32_t rank, const lg__report *r, const lg__sums_head *sums,
                              lg_error *err)
{
    const lg__manifest *m = c->m;
    const lg__rank_row *row = &m->ranks[rank];
    LG__RETURN_IF(r->rank != rank || r->world != m->world, err, LG_ERR_CORRUPT,
                  "report of rank %u of %u where that of rank %u of %u should be", r->rank, r->world, rank, m->world);
    LG__RETURN_IF(strcmp(r->attempt, m->attempt) != 0 || r->step != m->step ||
                      lg_generation_compare(r->generation, m->generation) != 0 || strcmp(r->run_id, m->run_id) != 0,
                  err, LG_ERR_CORRUPT, "report of attempt %s, step %llu, in a checkpoint of attempt %s, step %llu",
                  r->attempt, (unsigned long long)r->step, m->attempt, (unsigned long long)m->step);
    LG__RETURN_IF(sums->block_bytes != m->block_bytes, err, LG_ERR_CORRUPT,
                  "blocks of %u bytes, the manifest says %llu", sums->block_bytes, (unsigned long long)m->block_bytes);
    size_t i = 0;
    uint64_t tables = LG__SUMS_HEAD_BYTES;
    for (int g = 0; g < LG_GROUP_COUNT; g++) {
        for (uint32_t b = 0; b < row->n_files[g]; b++, i++) {
            const lg__report_file *f = i < r->n_files ? &r->files[i] : NULL;
            LG__RETURN_IF(f == NULL || f->group != (lg_group)g || f->number != b || f->bytes != row->file_bytes[g][b],
                          err, LG_ERR_CORRUPT, "report and manifest differ about %s file %u",
                          lg_group_name((lg_group)g), b + 1);
            LG__RETURN_IF(f->header_bytes > f->bytes, err, LG_ERR_CORRUPT, "the header of %s file %u ends behind it",
                          lg_group_name((lg_group)g), b + 1);
            uint64_t table = lg__table_bytes(f->bytes - f->header_bytes, m->block_bytes);
            LG__RETURN_IF(table > row->sums_bytes - tables, err, LG_ERR_CORRUPT, "its tables do not fit into the file");
            tables += table;
        }
    }
    LG__RETURN_IF(i != r->n_files || sums->n_tables != i || tables != sums->report_at, err, LG_ERR_CORRUPT,
                  "it does not hold one table for each of the rank's %zu files", i);
    return LG_OK;
}

/* files_only: see lg__report_decode_files. */
static lg_status report_from(lg_checkpoint *c, lg_file *file, uint32_t rank, bool files_only, lg__report **report,
                             lg__sums_head *sums, lg_error *err)
{
    const lg__rank_row *row = &c->m->ranks[rank];
    uint8_t head[LG__SUMS_HEAD_BYTES];
    LG__RETURN_IF(row->sums_bytes < sizeof head, err, LG_ERR_CORRUPT, "%llu bytes are too few for a sums file",
                  (unsigned long long)row->sums_bytes);
    LG__TRY(lg__store_read(c->store, file, head, sizeof head, 0, err));
    LG__TRY(lg__sums_head_decode(head, sizeof head, row->sums_bytes, sums, err));
    LG__RETURN_IF(sums->report_bytes > LG__REPORT_MAX || sums->report_at > row->sums_bytes ||
                      sums->report_bytes > row->sums_bytes - sums->report_at,
                  err, LG_ERR_CORRUPT, "the report ends behind the file");
    char *text = lg__malloc((size_t)sums->report_bytes);
    if (text == NULL) {
        return lg__nomem(err);
    }
    uint8_t digest[LG__SHA256_BYTES];
    lg_status status = lg__store_read(c->store, file, text, (size_t)sums->report_bytes, sums->report_at, err);
    if (status == LG_OK) {
        status = lg__sha256_of(text, (size_t)sums->report_bytes, digest, err);
    }
    if (status == LG_OK && memcmp(digest, row->report, sizeof digest) != 0) {
        status = lg_error_set(err, LG_ERR_CORRUPT,
                              "the report of rank %u is not the one that was committed (its SHA-256 differs)", rank);
    }
    lg__report *r = NULL;
    if (status == LG_OK) {
        status = files_only ? lg__report_decode_files(text, (size_t)sums->report_bytes, &r, err)
                            : lg__report_decode(text, (size_t)sums->report_bytes, &r, err);
    }
    lg__free(text);
    if (r == NULL) {
        return status;
    }
    status = check_report(c, rank, r, sums, err);
    if (status == LG_OK) {
        *report = r;
    } else {
        lg__report_free(r);
    }
    return status;
}

static lg_status read_report(lg_checkpoint *c, uint32_t rank, bool files_only, lg__report **report, lg__sums_head *sums,
                             lg_error *err)
{
    char name[LG__NAME_MAX];
    lg__sums_file(rank, name);
    lg_file *file = NULL;
    LG__TRY(lg__checkpoint_open_file(c, name, c->m->ranks[rank].sums_bytes, &file, err));
    lg_status status = report_from(c, file, rank, files_only, report, sums, err);
    close_quietly(c, file);
    return status == LG_OK ? LG_OK : in_file(c, name, err);
}

lg_status lg__read_report(lg_checkpoint *c, uint32_t rank, lg__report **report, lg__sums_head *sums, lg_error *err)
{
    return read_report(c, rank, false, report, sums, err);
}

lg_status lg__checkpoint_report(lg_checkpoint *c, uint32_t rank, const lg__report **out, lg_error *err)
{
    lg__rank_files *files;
    LG__TRY(lg__checkpoint_rank(c, rank, &files, err));
    pthread_mutex_lock(&c->lock);
    const lg__report *kept = files->report;
    pthread_mutex_unlock(&c->lock);
    if (kept == NULL) {
        lg__report *r = NULL;
        lg__sums_head sums;
        LG__TRY(read_report(c, rank, true, &r, &sums, err));
        pthread_mutex_lock(&c->lock);
        if (files->report == NULL) {
            files->sums = sums;
            files->report = r;
            r = NULL;
        }
        kept = files->report;
        pthread_mutex_unlock(&c->lock);
        lg__report_free(r);
    }
    *out = kept;
    return LG_OK;
}

static lg_status table_from(lg_checkpoint *c, lg_file *file, const lg__report *report, const lg__shard *s,
                            lg__table *out, lg_error *err)
{
    const lg__report_file *f = &report->files[s->index];
    uint64_t at = LG__SUMS_HEAD_BYTES;
    for (size_t i = 0; i < s->index; i++) {
        at += lg__table_bytes(report->files[i].bytes - report->files[i].header_bytes, c->m->block_bytes);
    }
    size_t bytes = (size_t)lg__table_bytes(f->bytes - f->header_bytes, c->m->block_bytes);
    char *data = lg__malloc(bytes);
    if (data == NULL) {
        return lg__nomem(err);
    }
    uint8_t digest[LG__SHA256_BYTES];
    lg_status status = lg__store_read(c->store, file, data, bytes, at, err);
    if (status == LG_OK) {
        status = lg__sha256_of(data, bytes, digest, err);
    }
    if (status == LG_OK && memcmp(digest, f->table, sizeof digest) != 0) {
        status = lg_error_set(err, LG_ERR_CORRUPT, "table at %llu..%llu, of %s, is damaged (its SHA-256 differs)",
                              (unsigned long long)at, (unsigned long long)(at + bytes), s->name);
    }
    lg__table t = {0};
    if (status == LG_OK) {
        status = lg__table_decode(data, bytes, c->m->block_bytes, &t, err);
    }
    lg__free(data);
    LG__TRY(status);
    if (t.file_bytes != s->bytes || t.header_bytes != f->header_bytes) {
        lg__free(t.block_crc);
        return lg_error_set(err, LG_ERR_CORRUPT, "table and report differ about the lengths of %s", s->name);
    }
    *out = t;
    return LG_OK;
}

lg_status lg__read_table(lg_checkpoint *c, const lg__report *report, const lg__shard *s, lg__table *out, lg_error *err)
{
    char name[LG__NAME_MAX];
    lg__sums_file(s->rank, name);
    lg_file *file = NULL;
    LG__TRY(lg__checkpoint_open_file(c, name, c->m->ranks[s->rank].sums_bytes, &file, err));
    lg_status status = table_from(c, file, report, s, out, err);
    close_quietly(c, file);
    return status == LG_OK ? LG_OK : in_file(c, name, err);
}

lg_status lg__checkpoint_table(lg_checkpoint *c, lg__shard *s, const lg__table **out, lg_error *err)
{
    pthread_mutex_lock(&c->lock);
    const lg__table *kept = s->table;
    pthread_mutex_unlock(&c->lock);
    if (kept == NULL) {
        const lg__report *report;
        LG__TRY(lg__checkpoint_report(c, s->rank, &report, err));
        lg__table *t = lg__calloc(1, sizeof *t);
        if (t == NULL) {
            return lg__nomem(err);
        }
        lg_status status = lg__read_table(c, report, s, t, err);
        if (status != LG_OK) {
            lg__free(t);
            return status;
        }
        pthread_mutex_lock(&c->lock);
        if (s->table == NULL) {
            s->table = t;
            c->cached_bytes += table_cost(t);
            t = NULL;
        }
        kept = s->table;
        pthread_mutex_unlock(&c->lock);
        table_free(t);
    }
    *out = kept;
    return LG_OK;
}

/* ------------------------------------------------------------------ headers */

static lg_status header_length(lg_checkpoint *c, const lg__shard *s, lg_file *file, uint64_t *n, lg_error *err)
{
    uint8_t first[64];
    size_t first_bytes = s->bytes < sizeof first ? (size_t)s->bytes : sizeof first;
    LG__TRY(lg__store_read(c->store, file, first, first_bytes, 0, err));
    return lg__st_header_bytes(first, first_bytes, s->bytes, n, err);
}

static lg_status header_from(lg_checkpoint *c, const lg__shard *s, lg_file *file, const lg__table *table,
                             lg__st_header **out, lg_error *err)
{
    uint64_t length; /* all of the header: 8 + N */
    if (table != NULL) {
        length = table->header_bytes;
        LG__RETURN_IF(length < 8 || length > s->bytes || length - 8 > LG__ST_MAX_HEADER, err, LG_ERR_CORRUPT,
                      "the header cannot be %llu bytes long", (unsigned long long)length);
    } else {
        LG__TRY(header_length(c, s, file, &length, err));
        length += 8;
    }
    char *text = lg__malloc((size_t)length);
    if (text == NULL) {
        return lg__nomem(err);
    }
    lg_status status = lg__store_read(c->store, file, text, (size_t)length, 0, err);
    if (status == LG_OK && table != NULL) {
        uint32_t crc = lg__crc32c(0, text, (size_t)length);
        if (crc != table->header_crc) {
            status = lg_error_set(err, LG_ERR_CORRUPT,
                                  "header at 0..%llu is damaged (crc32c 0x%08x expected 0x%08x), file of rank %u",
                                  (unsigned long long)length, crc, table->header_crc, s->rank);
        }
    }
    uint64_t n = 0;
    if (status == LG_OK) {
        status = lg__st_header_bytes((const uint8_t *)text, length < 64 ? (size_t)length : 64, s->bytes, &n, err);
    }
    if (status == LG_OK && n + 8 != length) {
        status = lg_error_set(err, LG_ERR_CORRUPT, "the header is %llu bytes long, its table says %llu",
                              (unsigned long long)(n + 8), (unsigned long long)length);
    }
    if (status == LG_OK) {
        status = lg__st_parse(text + 8, n, s->bytes, out, err);
    }
    lg__free(text);
    return status;
}

lg_status lg__read_header(lg_checkpoint *c, const lg__shard *s, lg_file *file, const lg__table *table,
                          lg__st_header **out, lg_error *err)
{
    lg_status status = header_from(c, s, file, table, out, err);
    return status == LG_OK ? LG_OK : in_file(c, s->name, err);
}

lg_status lg__checkpoint_header(lg_checkpoint *c, lg__shard *s, bool verify, const lg__st_header **out, lg_error *err)
{
    pthread_mutex_lock(&c->lock);
    const lg__st_header *kept = !verify || s->header_verified ? s->header : NULL;
    pthread_mutex_unlock(&c->lock);
    if (kept == NULL) {
        const lg__table *table = NULL;
        if (verify) {
            LG__TRY(lg__checkpoint_table(c, s, &table, err));
        }
        lg_file *file = NULL;
        LG__TRY(lg__checkpoint_open_file(c, s->name, s->bytes, &file, err));
        lg__st_header *h = NULL;
        lg_status status = lg__read_header(c, s, file, table, &h, err);
        close_quietly(c, file);
        LG__TRY(status);
        pthread_mutex_lock(&c->lock);
        if (s->header == NULL || (verify && !s->header_verified)) {
            /* An unverified one that is replaced here was used by an earlier
             * call only: one call reads in one way. */
            lg__st_header *old = s->header;
            c->cached_bytes += header_cost(h) - header_cost(old);
            s->header = h;
            s->header_verified = verify;
            h = old;
        }
        kept = s->header;
        pthread_mutex_unlock(&c->lock);
        lg__st_free(h);
    }
    *out = kept;
    return LG_OK;
}

/* ------------------------------------------------------------ boxes in files */

bool lg__entry_is_box(const lg__shard *s, const lg__st_tensor *entry, const lg__region *box, lg_dtype dtype)
{
    if (entry->dtype != dtype || entry->ndim != box->ndim || (!entry->has_offsets && s->group != LG_GROUP_RAW)) {
        return false;
    }
    for (uint32_t d = 0; d < box->ndim; d++) {
        uint64_t offset = entry->has_offsets ? entry->saved_offsets[d] : 0;
        if (entry->shape[d] != box->size[d] || offset != box->offset[d]) {
            return false;
        }
    }
    return true;
}

lg_status lg__checkpoint_locate(lg_checkpoint *c, uint32_t rank, lg_group file_group, const char *key,
                                const lg__region *box, lg_dtype dtype, uint32_t number, bool verify, lg__shard **shard,
                                const lg__st_tensor **entry, lg_error *err)
{
    lg__rank_files *files;
    LG__TRY(lg__checkpoint_rank(c, rank, &files, err));
    lg__shard *differs = NULL;
    for (size_t i = 0; i < files->n_shards; i++) {
        lg__shard *s = &files->shards[i];
        if (s->group != file_group || s->number < number) {
            continue;
        }
        const lg__st_header *header;
        LG__TRY(lg__checkpoint_header(c, s, verify, &header, err));
        const lg__st_tensor *e = lg__st_find(header, key);
        if (e != NULL && lg__entry_is_box(s, e, box, dtype)) {
            *shard = s;
            *entry = e;
            return LG_OK;
        }
        if (e != NULL && differs == NULL) {
            differs = s;
        }
    }
    char where[256], name[300];
    lg__region_text(box, where, sizeof where);
    lg__printable(key, name, sizeof name);
    if (differs != NULL) {
        return lg_error_set(err, LG_ERR_CORRUPT,
                            "%s/%s: \"%s\" there is not the %s box %s that the manifest gives rank %u", c->folder,
                            differs->name, name, lg_dtype_name(dtype), where, rank);
    }
    return lg_error_set(err, LG_ERR_COVERAGE, "%s: no %s file of rank %u holds box %s of \"%s\"", c->folder,
                        lg_group_name(file_group), rank, where, name);
}

const lg__manifest_tensor *lg__checkpoint_stored(lg_checkpoint *c, const lg__manifest_tensor *t)
{
    if (t->alias_of == NULL || t->stored) {
        return t;
    }
    return lg__manifest_find(c->m, t->alias_of);
}

const char *lg__checkpoint_key(lg_checkpoint *c, const lg__manifest_tensor *t, lg_group *file_group, char *out)
{
    *file_group = lg__file_group(t->group, t->dtype, lg__manifest_is_copies(c->m, t));
    if (*file_group != LG_GROUP_RAW) {
        return t->name;
    }
    size_t n = strlen(t->name), prefix = strlen(LG__RAW_TENSOR_PREFIX);
    n = n <= LG_MAX_NAME ? n : LG_MAX_NAME; /* the manifest refuses longer ones */
    memcpy(out, LG__RAW_TENSOR_PREFIX, prefix);
    memcpy(out + prefix, t->name, n);
    out[prefix + n] = '\0';
    return out;
}

lg_status lg__checkpoint_box(lg_checkpoint *c, const lg__manifest_tensor *t, uint32_t rank, uint32_t number,
                             lg__region *out, lg_error *err)
{
    if (t->layout == LG__IRREGULAR) {
        size_t low = 0, high = t->n_pieces; /* sorted by (rank, number) */
        while (low < high) {
            size_t mid = low + (high - low) / 2;
            const lg__stored_piece *p = &t->pieces[mid];
            if (p->rank < rank || (p->rank == rank && p->number < number)) {
                low = mid + 1;
            } else {
                high = mid;
            }
        }
        LG__RETURN_IF(low == t->n_pieces || t->pieces[low].rank != rank || t->pieces[low].number != number, err,
                      LG_ERR_INTERNAL, "rank %u has no box %u of \"%s\"", rank, number, t->name);
        *out = t->pieces[low].box;
        return LG_OK;
    }
    lg__tensor_desc desc = lg__manifest_desc(t);
    lg__piece *pieces = NULL;
    size_t n = 0;
    LG__TRY(lg__layout_written(c->m->layouts[t->layout], &desc, rank, &pieces, &n, err));
    if (number < n) {
        *out = pieces[number].box;
    }
    lg__free(pieces);
    LG__RETURN_IF(number >= n, err, LG_ERR_INTERNAL, "rank %u has no box %u of \"%s\"", rank, number, t->name);
    return LG_OK;
}

uint32_t lg__checkpoint_copy_of(lg_checkpoint *c, const lg__manifest_tensor *t, uint32_t rank, uint32_t world)
{
    const lg_layout *layout = c->m->layouts[t->layout];
    uint32_t index;
    if (world != 0 && world == c->m->world && lg__layout_index_of(layout, rank, &index)) {
        return rank;
    }
    return lg__layout_rank_at(layout, 0);
}

lg_status lg__checkpoint_touch(lg_checkpoint *c, const lg__manifest_tensor *t, const lg__region *region,
                               uint32_t copy_of, lg__touch_fn fn, void *arg, lg_error *err)
{
    lg__tensor_desc desc = lg__manifest_desc(t);
    if (t->layout == LG__IRREGULAR) {
        lg__region common;
        for (size_t i = 0; i < t->n_pieces; i++) {
            const lg__stored_piece *p = &t->pieces[i];
            if (lg__region_intersect(&p->box, region, &common)) {
                LG__TRY(fn(p->rank, &p->box, p->number, arg, err));
            }
        }
        return LG_OK;
    }
    const lg_layout *layout = c->m->layouts[t->layout];
    if (copy_of != UINT32_MAX && lg__manifest_is_copies(c->m, t)) {
        /* One copy is one whole box, so asking it alone is O(1). */
        lg__region whole = lg__region_whole(t->ndim, t->shape), common;
        return lg__region_intersect(&whole, region, &common) ? fn(copy_of, &whole, 0, arg, err) : LG_OK;
    }
    return lg__layout_touch(layout, &desc, region, fn, arg, err);
}
