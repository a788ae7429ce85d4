/* SPDX-License-Identifier: Apache-2.0 */
#include "core/checkpoint.h"
#include "core/walk.h"

#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------- names and regions */

/* Is the edit distance of two short names at most `limit`? Two rows of the
 * usual table are enough. */
#define SIMILAR_MAX ((size_t)256)

static size_t edit_distance(const char *a, size_t n, const char *b, size_t m, size_t limit)
{
    size_t row[SIMILAR_MAX + 1];
    for (size_t j = 0; j <= m; j++) {
        row[j] = j;
    }
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = row[0], best = i;
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t d = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < d) {
                d = row[j] + 1;
            }
            if (row[j - 1] + 1 < d) {
                d = row[j - 1] + 1;
            }
            row[j] = d;
            best = d < best ? d : best;
        }
        if (best > limit) {
            return best;
        }
    }
    return row[m];
}

/* How far apart are two names? A prefix too many or too few ("module.",
 * "_orig_mod.") is the usual reason. SIZE_MAX: not similar. */
static size_t dissimilarity(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b);
    const char *longer = n > m ? a : b, *shorter = n > m ? b : a;
    size_t difference = n > m ? n - m : m - n;
    if (difference > 0 && strcmp(longer + difference, shorter) == 0 && longer[difference - 1] == '.') {
        return 0;
    }
    size_t limit = ((n < m ? n : m) + 1) / 3;
    limit = limit > 4 ? 4 : limit;
    if (n > SIMILAR_MAX || m > SIMILAR_MAX || difference > limit) {
        return SIZE_MAX;
    }
    size_t distance = edit_distance(a, n, b, m, limit);
    return distance <= limit ? distance : SIZE_MAX;
}

lg_status lg__checkpoint_missing(lg_checkpoint *c, const char *name, lg_error *err)
{
    const char *similar = NULL;
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < c->m->n_tensors && best > 0; i++) {
        size_t d = dissimilarity(name, c->m->tensors[i].name);
        if (d < best) {
            best = d;
            similar = c->m->tensors[i].name;
        }
    }
    char shown[300], hint[300];
    lg__printable(name, shown, sizeof shown);
    if (similar == NULL) {
        return lg_error_set(err, LG_ERR_MISSING, "step %llu has no tensor \"%s\"", (unsigned long long)c->m->step,
                            shown);
    }
    lg__printable(similar, hint, sizeof hint);
    return lg_error_set(err, LG_ERR_MISSING, "step %llu has no tensor \"%s\"; is \"%s\" meant?",
                        (unsigned long long)c->m->step, shown, hint);
}

lg_status lg__checkpoint_region(const lg__manifest_tensor *t, const uint64_t *offset, const uint64_t *extent,
                                lg__region *out, lg_error *err)
{
    if (offset == NULL && extent == NULL) {
        *out = lg__region_whole(t->ndim, t->shape);
        return LG_OK;
    }
    char shown[300];
    lg__printable(t->name, shown, sizeof shown);
    LG__RETURN_IF(offset == NULL || extent == NULL, err, LG_ERR_INVALID,
                  "\"%s\": give both offset and extent of a region, or neither", shown);
    lg__region r = {.ndim = t->ndim};
    memcpy(r.offset, offset, t->ndim * sizeof *offset);
    memcpy(r.size, extent, t->ndim * sizeof *extent);
    if (!lg__region_inside(&r, t->ndim, t->shape)) {
        char where[256], whole[256];
        lg__region all = lg__region_whole(t->ndim, t->shape);
        return lg_error_set(err, LG_ERR_INVALID, "\"%s\": region %s does not lie in the tensor, %s", shown,
                            lg__region_text(&r, where, sizeof where), lg__region_text(&all, whole, sizeof whole));
    }
    *out = r;
    return LG_OK;
}

/* ------------------------------------------------------------------- files */

/* first_file[r]: how many listed files lie before rank r's; [world]: before
 * the attached ones. */
static lg_status index_files(lg_checkpoint *c, lg_error *err)
{
    if (c->first_file != NULL) {
        return LG_OK;
    }
    const lg__manifest *m = c->m;
    uint64_t *first = lg__calloc((size_t)m->world + 1, sizeof *first);
    if (first == NULL) {
        return lg__nomem(err);
    }
    for (uint32_t r = 0; r < m->world; r++) {
        first[r + 1] = first[r] + 1;
        for (int g = 0; g < LG_GROUP_COUNT; g++) {
            first[r + 1] += m->ranks[r].n_files[g];
        }
    }
    c->first_file = first;
    return LG_OK;
}

lg_status lg_checkpoint_file(lg_checkpoint *c, size_t i, lg_file_info *out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(c == NULL || out == NULL, err, LG_ERR_INVALID, "lg_checkpoint_file needs a checkpoint and a result");
    LG__TRY(index_files(c, err));
    const lg__manifest *m = c->m;
    lg_file_info info = {.rank = UINT32_MAX, .domain = ""};
    if (i >= c->first_file[m->world]) {
        size_t a = i - (size_t)c->first_file[m->world];
        LG__RETURN_IF(a >= m->n_attached, err, LG_ERR_INVALID, "file %zu of %zu", i,
                      (size_t)c->first_file[m->world] + m->n_attached);
        lg__text_copy(info.name, sizeof info.name, m->attached[a].name);
        info.bytes = m->attached[a].bytes;
        info.is_attached = 1;
        *out = info;
        return LG_OK;
    }
    uint32_t low = 0, high = m->world; /* the last rank whose first file is <= i */
    while (high - low > 1) {
        uint32_t mid = low + (high - low) / 2;
        if (c->first_file[mid] <= i) {
            low = mid;
        } else {
            high = mid;
        }
    }
    lg__rank_files *files;
    LG__TRY(lg__checkpoint_rank(c, low, &files, err));
    size_t k = i - (size_t)c->first_file[low];
    info.rank = low;
    info.domain = m->ranks[low].domain != NULL ? m->ranks[low].domain : "";
    if (k < files->n_shards) {
        lg__text_copy(info.name, sizeof info.name, files->shards[k].name);
        info.bytes = files->shards[k].bytes;
        info.group = files->shards[k].group;
    } else {
        lg__sums_file(low, info.name);
        info.bytes = m->ranks[low].sums_bytes;
        info.is_sums = 1;
    }
    *out = info;
    return LG_OK;
}

/* ---- what else lies in the folder */

typedef struct foreign_walk {
    lg__listed *all;
    size_t n;
    int (*fn)(const char *name, void *arg);
    void *arg;
} foreign_walk;

static int visit_foreign(const lg_node *node, void *arg)
{
    foreign_walk *w = arg;
    char kind[32];
    uint32_t n;
    if (strcmp(node->name, LG__MANIFEST) == 0 || lg__side_name_parse(node->name, kind, &n) ||
        lg__listed_find(w->all, w->n, node->name) != NULL) {
        return 0;
    }
    return w->fn(node->name, w->arg);
}

lg_status lg_checkpoint_foreign(lg_checkpoint *c, int (*fn)(const char *name, void *arg), void *arg, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(c == NULL || fn == NULL, err, LG_ERR_INVALID,
                  "lg_checkpoint_foreign needs a checkpoint and a function");
    lg__arena *arena = lg__arena_new();
    if (arena == NULL) {
        return lg__nomem(err);
    }
    foreign_walk w = {.fn = fn, .arg = arg};
    lg_status status = lg__checkpoint_listed(c, arena, &w.all, &w.n, err);
    if (status == LG_OK) {
        status = lg__store_list(c->store, c->folder, visit_foreign, &w, err);
    }
    lg__arena_free(arena);
    return status;
}

lg_status lg_checkpoint_attached(lg_checkpoint *c, const char *file_name, void **data, size_t *bytes, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(c == NULL || file_name == NULL || data == NULL || bytes == NULL, err, LG_ERR_INVALID,
                  "lg_checkpoint_attached needs a checkpoint, a name and places for the result");
    const lg__attached *a = NULL;
    for (size_t i = 0; i < c->m->n_attached && a == NULL; i++) {
        a = strcmp(c->m->attached[i].name, file_name) == 0 ? &c->m->attached[i] : NULL;
    }
    LG__RETURN_IF(a == NULL, err, LG_ERR_MISSING, "step %llu has no attached file \"%.200s\"",
                  (unsigned long long)c->m->step, file_name);
    LG__RETURN_IF(a->bytes > SIZE_MAX - 1, err, LG_ERR_LIMIT, "%s is too long for this machine", a->name);
    lg_file *file = NULL;
    LG__TRY(lg__checkpoint_open_file(c, a->name, a->bytes, &file, err));
    void *copy = lg__malloc((size_t)a->bytes);
    lg_status status = copy == NULL ? lg__nomem(err) : LG_OK;
    if (status == LG_OK && a->bytes > 0) {
        status = lg__store_read(c->store, file, copy, (size_t)a->bytes, 0, err);
    }
    lg_error ignored;
    lg__store_close(c->store, file, &ignored);
    uint8_t digest[LG__SHA256_BYTES];
    if (status == LG_OK) {
        status = lg__sha256_of(copy, (size_t)a->bytes, digest, err);
    }
    if (status == LG_OK && memcmp(digest, a->sha256, sizeof digest) != 0) {
        status = lg_error_set(err, LG_ERR_CORRUPT, "its contents changed since the save (SHA-256 differs)");
    }
    if (status != LG_OK) {
        lg__free(copy);
        return lg_error_wrap(err, "%s/%s", c->folder, a->name);
    }
    *data = copy;
    *bytes = (size_t)a->bytes;
    return LG_OK;
}

/* ----------------------------------------------------------------- the whole */

lg_status lg_checkpoint_get_info(lg_checkpoint *c, lg_checkpoint_info *out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(c == NULL || out == NULL, err, LG_ERR_INVALID,
                  "lg_checkpoint_get_info needs a checkpoint and a result");
    LG__TRY(index_files(c, err));
    const lg__manifest *m = c->m;
    lg_checkpoint_info info = {.step = m->step,
                               .generation = m->generation,
                               .has_parent = m->has_parent,
                               .parent_step = m->parent_step,
                               .parent = m->parent,
                               .parent_verified = m->parent_verified,
                               .world = m->world,
                               .block_bytes = m->block_bytes,
                               .checksum = "crc32c",
                               .n_tensors = m->n_tensors,
                               .n_layouts = m->n_layouts,
                               .n_files = (size_t)c->first_file[m->world] + m->n_attached,
                               .n_attached = m->n_attached};
    if (strlen(c->folder) < sizeof info.folder) {
        memcpy(info.folder, c->folder, strlen(c->folder) + 1);
    }
    memcpy(info.run_id, m->run_id, sizeof info.run_id);
    memcpy(info.attempt, m->attempt, sizeof info.attempt);
    memcpy(info.created, m->created, sizeof info.created);
    lg__hex(m->sha256, sizeof m->sha256, info.manifest_sha256);
    for (size_t i = 0; i < m->n_tensors; i++) {
        const lg__manifest_tensor *t = &m->tensors[i];
        info.n_aliases += t->alias_of != NULL;
        info.aliases_once |= t->alias_of != NULL && !t->stored;
        uint64_t bytes;
        LG__TRY(lg__shape_bytes(t->dtype, t->ndim, t->shape, &bytes, err));
        info.tensor_bytes += t->alias_of == NULL ? bytes : 0;
    }
    for (uint32_t r = 0; r < m->world; r++) {
        info.file_bytes += m->ranks[r].sums_bytes;
        for (int g = 0; g < LG_GROUP_COUNT; g++) {
            for (uint32_t b = 0; b < m->ranks[r].n_files[g]; b++) {
                info.file_bytes += m->ranks[r].file_bytes[g][b];
            }
        }
    }
    for (size_t i = 0; i < m->n_attached; i++) {
        info.file_bytes += m->attached[i].bytes;
    }
    lg__pin_state pin;
    LG__TRY(lg__pin_read(c->store, c->folder, m->sha256, &pin, err));
    info.pinned = pin.pinned;
    *out = info;
    return LG_OK;
}

const char *lg_checkpoint_layout(lg_checkpoint *c, size_t i)
{
    return c == NULL || i >= c->m->n_layouts ? NULL : c->m->layouts[i]->text;
}

/* ------------------------------------------------------------------- tensors */

static lg_status describe(lg_checkpoint *c, const lg__manifest_tensor *t, lg_tensor_info *out, lg_error *err)
{
    lg_tensor_info info = {.name = t->name,
                           .group = t->group,
                           .dtype = t->dtype,
                           .ndim = t->ndim,
                           .shape = t->shape,
                           .layout = t->layout == LG__IRREGULAR ? SIZE_MAX : t->layout,
                           .flat_offset = t->flat_offset,
                           .alias_of = t->alias_of,
                           .per_rank = lg__manifest_is_copies(c->m, t)};
    LG__TRY(lg__shape_bytes(t->dtype, t->ndim, t->shape, &info.bytes, err));
    const lg__manifest_tensor *stored = lg__checkpoint_stored(c, t);
    uint64_t boxes = stored->n_pieces;
    if (stored->layout != LG__IRREGULAR) {
        lg__tensor_desc desc = lg__manifest_desc(stored);
        LG__TRY(lg__layout_box_count(c->m->layouts[stored->layout], &desc, &boxes, err));
    }
    info.n_boxes = (size_t)boxes;
    *out = info;
    return LG_OK;
}

lg_status lg_checkpoint_tensor(lg_checkpoint *c, size_t i, lg_tensor_info *out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(c == NULL || out == NULL, err, LG_ERR_INVALID,
                  "lg_checkpoint_tensor needs a checkpoint and a result");
    LG__RETURN_IF(i >= c->m->n_tensors, err, LG_ERR_INVALID, "tensor %zu of %zu", i, c->m->n_tensors);
    return describe(c, &c->m->tensors[i], out, err);
}

lg_status lg_checkpoint_find(lg_checkpoint *c, const char *name, lg_tensor_info *out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(c == NULL || name == NULL || out == NULL, err, LG_ERR_INVALID,
                  "lg_checkpoint_find needs a checkpoint, a name and a result");
    const lg__manifest_tensor *t = lg__manifest_find(c->m, name);
    return t == NULL ? lg__checkpoint_missing(c, name, err) : describe(c, t, out, err);
}

typedef struct box_walk {
    int (*fn)(const lg_stored_box *box, void *arg);
    void *arg;
    bool stopped;
} box_walk;

static lg_status give_box(uint32_t rank, const lg__region *box, uint32_t number, void *arg, lg_error *err)
{
    (void)number;
    (void)err;
    box_walk *w = arg;
    lg_stored_box b = {.rank = rank, .ndim = box->ndim};
    memcpy(b.offset, box->offset, box->ndim * sizeof *b.offset);
    memcpy(b.size, box->size, box->ndim * sizeof *b.size);
    w->stopped = w->fn(&b, w->arg) != 0;
    return w->stopped ? LG_ERR_CANCELLED : LG_OK;
}

lg_status lg_checkpoint_boxes(lg_checkpoint *c, const char *name, const uint64_t *offset, const uint64_t *extent,
                              int (*fn)(const lg_stored_box *box, void *arg), void *arg, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(c == NULL || name == NULL || fn == NULL, err, LG_ERR_INVALID,
                  "lg_checkpoint_boxes needs a checkpoint, a name and a function");
    const lg__manifest_tensor *t = lg__manifest_find(c->m, name);
    if (t == NULL) {
        return lg__checkpoint_missing(c, name, err);
    }
    lg__region region;
    LG__TRY(lg__checkpoint_region(t, offset, extent, &region, err));
    box_walk w = {.fn = fn, .arg = arg};
    lg_status status = lg__checkpoint_touch(c, lg__checkpoint_stored(c, t), &region, UINT32_MAX, give_box, &w, err);
    if (w.stopped) {
        err->status = LG_OK;
        err->message[0] = '\0';
        return LG_OK;
    }
    return status;
}
