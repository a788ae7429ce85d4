/* SPDX-License-Identifier: Apache-2.0 */
#include "core/verify.h"

#include <stdlib.h>
#include <string.h>

#define RANGE_BYTES (UINT64_C(64) << 20) /* that one thread takes at a time */

/* ------------------------------------------------------------------- blocks */

static const char *shown_name(const char *key, char *out, size_t bytes)
{
    size_t prefix = strlen(LG__RAW_TENSOR_PREFIX);
    return lg__printable(strncmp(key, LG__RAW_TENSOR_PREFIX, prefix) == 0 ? key + prefix : key, out, bytes);
}

/* "tensor "a"", "tensors "a", "b" and 3 more": what bytes [begin, end) of the
 * data hold. `first` gets the first one's name. */
#define NAMES_SHOWN 3

static void name_tensors(const lg__verify_file *f, uint64_t begin, uint64_t end, char first[512], lg__buf *text)
{
    const lg__st_header *h = f->header;
    if (h == NULL) {
        lg__buf_str(text, "tensors that are not known, since its header is damaged too");
        return;
    }
    size_t low = 0, high = h->n; /* the first tensor that ends behind begin */
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (h->tensors[mid].end <= begin) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    char name[200];
    size_t n = 0, more = 0;
    for (size_t i = low; i < h->n && h->tensors[i].begin < end; i++) {
        if (h->tensors[i].begin == h->tensors[i].end) {
            continue;
        }
        if (n == NAMES_SHOWN) {
            more++;
            continue;
        }
        shown_name(h->tensors[i].name, name, sizeof name);
        if (n == 0) {
            shown_name(h->tensors[i].name, first, 512);
        }
        lg__buf_fmt(text, "%s\"%s\"", n == 0 ? "" : ", ", name);
        n++;
    }
    if (more > 0) {
        lg__buf_fmt(text, " and %zu more", more);
    }
}

typedef struct bad_run { /* adjoining bad blocks */
    uint64_t first, n;
    uint32_t found, expected; /* of the first */
} bad_run;

static void report_bad(lg__verify *v, const lg__verify_file *f, bad_run *bad)
{
    if (bad->n == 0) {
        return;
    }
    uint64_t block = v->c->m->block_bytes, start = f->table.header_bytes;
    uint64_t begin = bad->first * block, end = (bad->first + bad->n) * block;
    end = end < f->table.file_bytes - start ? end : f->table.file_bytes - start;
    char first[512] = "";
    lg__buf names;
    lg__buf_init(&names, 900);
    name_tensors(f, begin, end, first, &names);
    lg_error why = LG_ERROR_INIT;
    if (bad->n == 1) {
        lg_error_set(&why, LG_ERR_CORRUPT,
                     "%s/%s: block at %llu..%llu is damaged (crc32c 0x%08x expected 0x%08x), it holds part of tensor "
                     "%s of rank %u",
                     v->c->folder, f->shard.name, (unsigned long long)(start + begin),
                     (unsigned long long)(start + end), bad->found, bad->expected, names.data != NULL ? names.data : "",
                     f->shard.rank);
    } else {
        lg_error_set(&why, LG_ERR_CORRUPT,
                     "%s/%s: %llu blocks at %llu..%llu are damaged, they hold parts of tensor %s of rank %u",
                     v->c->folder, f->shard.name, (unsigned long long)bad->n, (unsigned long long)(start + begin),
                     (unsigned long long)(start + end), names.data != NULL ? names.data : "", f->shard.rank);
    }
    lg__buf_free(&names);
    lg__verify_failed(v, f->shard.name, first, start + begin, end - begin, &why);
    bad->n = 0;
}

static void block_done(lg__verify *v, const lg__verify_file *f, uint64_t block, uint32_t crc, bad_run *bad)
{
    if (crc == f->table.block_crc[block]) {
        report_bad(v, f, bad);
        return;
    }
    if (bad->n++ == 0) {
        bad->first = block;
        bad->found = crc;
        bad->expected = f->table.block_crc[block];
    }
}

/* Bytes that cannot be read. */
static void report_unread(lg__verify *v, const lg__verify_file *f, uint64_t begin, uint64_t end, const lg_error *why)
{
    char first[512] = "";
    lg__buf names;
    lg__buf_init(&names, 900);
    name_tensors(f, begin, end, first, &names);
    lg__buf_free(&names);
    lg__verify_failed(v, f->shard.name, first, f->table.header_bytes + begin, end - begin, why);
    lg__verify_count(v, end - begin, 0);
}

void lg__verify_blocks(lg__verify *v, const lg__verify_file *f, uint64_t first, uint64_t last, char *buffer)
{
    uint64_t block = v->c->m->block_bytes, start = f->table.header_bytes, data = f->table.file_bytes - start;
    uint64_t at = first * block, end = last < f->table.n_blocks ? last * block : data;
    lg_error why = LG_ERROR_INIT;
    lg_file *file = NULL;
    if (lg__checkpoint_open_file(v->c, f->shard.name, f->shard.bytes, &file, &why) != LG_OK) {
        report_unread(v, f, at, end, &why);
        return;
    }
    bad_run bad = {0};
    uint32_t crc = 0;
    bool go_on = true;
    while (at < end && go_on) {
        size_t n = end - at < LG__VERIFY_READ ? (size_t)(end - at) : LG__VERIFY_READ;
        if (lg__store_read(v->c->store, file, buffer, n, start + at, &why) != LG_OK) {
            report_unread(v, f, at, end, &why);
            break;
        }
        for (size_t p = 0; p < n;) {
            uint64_t number = (at + p) / block, stop = (number + 1) * block;
            stop = stop < data ? stop : data;
            size_t take = stop - (at + p) < n - p ? (size_t)(stop - (at + p)) : n - p;
            crc = lg__crc32c(crc, buffer + p, take);
            p += take;
            if (at + p == stop) {
                block_done(v, f, number, crc, &bad);
                crc = 0;
            }
        }
        at += n;
        go_on = lg__verify_count(v, n, n);
    }
    report_bad(v, f, &bad);
    lg__store_close(v->c->store, file, &why);
}

/* ------------------------------------------- headers against the layouts */

typedef struct rank_headers {
    lg__verify *v;
    uint32_t rank;
    lg__verify_file **files; /* of the rank, in order; NULL: not readable */
    uint8_t **used;          /* of each file: which entries a box was found for */
    const lg__shard *shards;
    size_t n;
    bool unreadable[LG_GROUP_COUNT]; /* a header of the group is not known */
    bool readable[LG_GROUP_COUNT];   /* one is */
    size_t first[LG_GROUP_COUNT];    /* of the group's files; they lie together, in order of their number */
} rank_headers;

static lg_status expect_box(rank_headers *r, const lg__manifest_tensor *t, const lg__region *box, uint32_t number)
{
    char key_space[LG__KEY_MAX];
    lg_group group;
    const char *key = lg__checkpoint_key(r->v->c, t, &group, key_space);
    /* A rank may have as many files as a tensor has boxes: begin where it
     * belongs. */
    for (size_t i = r->first[group] + number; r->readable[group] && i < r->n && r->shards[i].group == group; i++) {
        const lg__shard *s = &r->shards[i];
        if (r->files[i] == NULL || r->files[i]->header == NULL) {
            continue;
        }
        const lg__st_header *h = r->files[i]->header;
        const lg__st_tensor *e = lg__st_find(h, key);
        if (e != NULL && lg__entry_is_box(s, e, box, t->dtype)) {
            r->used[i][e - h->tensors] = 1;
            return LG_OK;
        }
    }
    if (r->unreadable[group]) {
        return LG_OK; /* it may be there: that file is reported */
    }
    char where[256], name[300];
    lg_error why = LG_ERROR_INIT;
    const char *file = "";
    for (size_t i = 0; i < r->n && *file == '\0'; i++) {
        file = r->shards[i].group == group && r->shards[i].number >= number ? r->shards[i].name : "";
    }
    lg__printable(t->name, name, sizeof name);
    lg_error_set(&why, LG_ERR_COVERAGE, "%s/%s: lacks box %s (%s) of tensor \"%s\", which the manifest gives rank %u",
                 r->v->c->folder, *file != '\0' ? file : lg_group_name(group),
                 lg__region_text(box, where, sizeof where), lg_dtype_name(t->dtype), name, r->rank);
    return lg__verify_failed(r->v, file, name, 0, 0, &why) ? LG_ERR_NOMEM : LG_OK;
}

static lg_status expect_tensor(rank_headers *r, const lg__manifest_tensor *t, lg_error *err)
{
    if (t->layout == LG__IRREGULAR) {
        size_t low = 0, high = t->n_pieces; /* sorted by rank */
        while (low < high) {
            size_t mid = low + (high - low) / 2;
            if (t->pieces[mid].rank < r->rank) {
                low = mid + 1;
            } else {
                high = mid;
            }
        }
        for (; low < t->n_pieces && t->pieces[low].rank == r->rank; low++) {
            LG__TRY(expect_box(r, t, &t->pieces[low].box, t->pieces[low].number));
        }
        return LG_OK;
    }
    lg__tensor_desc desc = lg__manifest_desc(t);
    lg__piece *pieces = NULL;
    size_t n = 0;
    LG__TRY(lg__layout_written(r->v->c->m->layouts[t->layout], &desc, r->rank, &pieces, &n, err));
    lg_status status = LG_OK;
    for (size_t i = 0; i < n && status == LG_OK; i++) {
        status = expect_box(r, t, &pieces[i].box, (uint32_t)i);
    }
    lg__free(pieces);
    return status;
}

static bool is_state(const lg__shard *s, const lg__st_tensor *e)
{
    return s->group == LG_GROUP_RAW && strncmp(e->name, LG__RAW_BYTES_PREFIX, strlen(LG__RAW_BYTES_PREFIX)) == 0 &&
           e->dtype == LG_U8 && e->ndim == 1;
}

static void report_others(rank_headers *r)
{
    for (size_t i = 0; i < r->n; i++) {
        const lg__st_header *h = r->files[i] == NULL ? NULL : r->files[i]->header;
        const lg__shard *s = &r->shards[i];
        lg_error why = LG_ERROR_INIT;
        if (h != NULL && h->n == 0) {
            lg_error_set(&why, LG_ERR_FORMAT, "%s/%s: holds no tensor", r->v->c->folder, s->name);
            lg__verify_failed(r->v, s->name, "", 0, 0, &why);
        }
        for (size_t k = 0; h != NULL && k < h->n; k++) {
            const lg__st_tensor *e = &h->tensors[k];
            if (r->used[i][k] || is_state(s, e)) {
                continue;
            }
            char name[300];
            shown_name(e->name, name, sizeof name);
            lg_error_set(&why, LG_ERR_CORRUPT, "%s/%s: holds \"%s\" in a form that the manifest does not give rank %u",
                         r->v->c->folder, s->name, name, r->rank);
            lg__verify_failed(r->v, s->name, name, h->data_start + e->begin, e->end - e->begin, &why);
        }
    }
}

/* Exactly the boxes that the layouts give the rank: none missing, none more. */
static void check_boxes(rank_headers *r)
{
    const lg__manifest *m = r->v->c->m;
    lg_error why = LG_ERROR_INIT;
    lg_status status = LG_OK;
    for (size_t i = r->n; i-- > 0;) {
        r->first[r->shards[i].group] = i;
    }
    r->used = lg__calloc(r->n, sizeof *r->used);
    for (size_t i = 0; i < r->n && r->used != NULL && status == LG_OK; i++) {
        const lg__st_header *h = r->files[i] == NULL ? NULL : r->files[i]->header;
        r->unreadable[r->shards[i].group] |= h == NULL;
        r->readable[r->shards[i].group] |= h != NULL;
        if (h != NULL) {
            r->used[i] = lg__calloc(h->n, 1);
            status = r->used[i] == NULL ? lg__nomem(&why) : LG_OK;
        }
    }
    if (r->used == NULL) {
        status = lg__nomem(&why);
    }
    for (size_t i = 0; i < m->n_tensors && status == LG_OK; i++) {
        const lg__manifest_tensor *t = &m->tensors[i];
        if (t->alias_of == NULL || t->stored) {
            status = expect_tensor(r, t, &why);
        }
    }
    if (status == LG_OK) {
        report_others(r);
    } else if (why.status != LG_OK) {
        lg__verify_failed(r->v, "", "", 0, 0, &why);
    }
    for (size_t i = 0; i < r->n && r->used != NULL; i++) {
        lg__free(r->used[i]);
    }
    lg__free(r->used);
}

/* -------------------------------------------------------------------- files */

void lg__verify_file_free(lg__verify_file *f)
{
    if (f == NULL) {
        return;
    }
    lg__st_free(f->header);
    lg__free(f->table.block_crc);
    lg__free(f);
}

/* Opens a file and reads its table and header. Without a report its header is
 * read all the same, unchecked, so that what it should hold is known. NULL if
 * it is not there. */
static lg__verify_file *open_one(lg__verify *v, const lg__shard *s, const lg__report *report)
{
    lg_error why = LG_ERROR_INIT;
    lg_file *file = NULL;
    if (lg__checkpoint_open_file(v->c, s->name, s->bytes, &file, &why) != LG_OK) {
        lg__verify_failed(v, s->name, "", 0, s->bytes, &why);
        lg__verify_count(v, s->bytes, 0);
        return NULL;
    }
    lg__verify_file *f = lg__calloc(1, sizeof *f);
    if (f == NULL) {
        lg__nomem(&why);
        lg__verify_failed(v, s->name, "", 0, 0, &why);
        lg__store_close(v->c->store, file, &why);
        return NULL;
    }
    memcpy(f->shard.name, s->name, sizeof f->shard.name);
    f->shard.rank = s->rank;
    f->shard.number = s->number;
    f->shard.group = s->group;
    f->shard.bytes = s->bytes;
    f->shard.index = s->index;
    f->step = RANGE_BYTES / v->c->m->block_bytes;
    f->step = f->step == 0 ? 1 : f->step;
    if (report != NULL && lg__read_table(v->c, report, s, &f->table, &why) != LG_OK) {
        char name[LG__NAME_MAX];
        lg__sums_file(s->rank, name);
        lg__verify_failed(v, name, "", 0, 0, &why);
    }
    bool checked = f->table.block_crc != NULL;
    if (lg__read_header(v->c, s, file, checked ? &f->table : NULL, &f->header, &why) != LG_OK) {
        lg__verify_failed(v, s->name, "", 0, f->table.header_bytes, &why);
    }
    lg__store_close(v->c->store, file, &why);
    uint64_t data = checked ? s->bytes - f->table.header_bytes : 0; /* counted block by block */
    lg__verify_count(v, s->bytes - data, checked ? f->table.header_bytes : 0);
    return f;
}

lg__verify_file *lg__verify_rank(lg__verify *v, uint32_t rank)
{
    lg_error why = LG_ERROR_INIT;
    lg__rank_files *files = NULL;
    char name[LG__NAME_MAX];
    lg__sums_file(rank, name);
    if (lg__checkpoint_rank(v->c, rank, &files, &why) != LG_OK) {
        lg__verify_failed(v, name, "", 0, 0, &why);
        return NULL;
    }
    lg__report *report = NULL;
    lg__sums_head sums = {0};
    uint64_t sums_bytes = v->c->m->ranks[rank].sums_bytes;
    lg_status status = lg__read_report(v->c, rank, &report, &sums, &why);
    if (status != LG_OK) {
        lg__verify_failed(v, name, "", 0, sums_bytes, &why);
    }
    lg__verify_file_seen(v);
    lg__verify_count(v, sums_bytes, status == LG_OK ? sums_bytes : 0);
    rank_headers r = {.v = v, .rank = rank, .shards = files->shards, .n = files->n_shards};
    r.files = lg__calloc(r.n, sizeof *r.files);
    if (r.files == NULL) {
        lg__nomem(&why);
        lg__verify_failed(v, name, "", 0, 0, &why);
        lg__report_free(report);
        return NULL;
    }
    for (size_t i = 0; i < r.n; i++) {
        r.files[i] = open_one(v, &files->shards[i], report);
        lg__verify_file_seen(v);
    }
    lg__report_free(report);
    check_boxes(&r);
    lg__verify_file *list = NULL;
    for (size_t i = r.n; i-- > 0;) {
        lg__verify_file *f = r.files[i];
        if (f != NULL && f->table.n_blocks > 0) {
            f->next_open = list;
            list = f;
        } else {
            lg__verify_file_free(f);
        }
    }
    lg__free(r.files);
    return list;
}
