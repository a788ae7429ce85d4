/* SPDX-License-Identifier: Apache-2.0 */
#include "base/json.h"
#include "base/mem.h"
#include "core/gather.h"

#include <stdlib.h>
#include <string.h>

#define GATHER_BYTES ((size_t)64 << 10)
#define SCRATCH_BYTES ((size_t)512 << 10)
#define LIST_MAX ((size_t)1 << 31)
#define RANKS_SHOWN 8

/* ------------------------------------------------------------------ digests
 *
 * SHA-256 of the contents, packed row-major. Strided memory comes in small
 * runs, which are gathered first. */
typedef struct hasher {
    lg__sha256 *sha;
    uint8_t *buffer; /* GATHER_BYTES */
    size_t used;
    lg__scratch scratch;
} hasher;

static lg_status hash_flush(hasher *h, lg_error *err)
{
    bool good = lg__sha256_add(h->sha, h->buffer, h->used);
    h->used = 0;
    return good ? LG_OK : lg__nomem(err);
}

static lg_status hash_bytes(const uint8_t *data, uint64_t bytes, uint64_t at, void *arg, lg_error *err)
{
    (void)at;
    hasher *h = arg;
    if (bytes > GATHER_BYTES - h->used) {
        LG__TRY(hash_flush(h, err));
    }
    if (bytes > GATHER_BYTES) {
        return lg__sha256_add(h->sha, data, (size_t)bytes) ? LG_OK : lg__nomem(err);
    }
    memcpy(h->buffer + h->used, data, (size_t)bytes);
    h->used += (size_t)bytes;
    return LG_OK;
}

/* Appends what ranks must agree on about a tensor. */
static void add_description(lg__buf *b, const lg__save_tensor *t)
{
    lg__buf_u32le(b, (uint32_t)t->group);
    lg__buf_u32le(b, (uint32_t)t->dtype);
    lg__buf_u32le(b, t->ndim);
    for (uint32_t d = 0; d < t->ndim; d++) {
        lg__buf_u64le(b, t->shape[d]);
    }
}

static lg_status hash_boxes(hasher *h, const lg__save_tensor *t, const lg__piece *pieces, size_t n, lg__arena *arena,
                            lg_error *err)
{
    for (size_t i = 0; i < n; i++) {
        const lg__region *r = &pieces[i].box;
        lg__plan_box box = {.key = t->name, .tensor = t->name, .dtype = t->dtype, .box = {r->ndim, r->offset, r->size}};
        LG__TRY(lg__plan_source(t, &pieces[i], arena, &box, err));
        LG__TRY(lg__gather(&box, h->scratch, hash_bytes, h, err));
    }
    return hash_flush(h, err);
}

static lg_status end_digest(hasher *h, uint8_t out[LG__SHA256_BYTES], lg_error *err)
{
    return lg__sha256_end(h->sha, out) ? LG_OK : lg__nomem(err);
}

/* An undeclared tensor: all of it, on this rank. */
static lg_status digest_whole(hasher *h, lg__save_tensor *t, lg_error *err)
{
    lg__buf description;
    lg__buf_init(&description, 4096);
    add_description(&description, t);
    lg_status status = lg__buf_check(&description, "a description", err);
    if (status == LG_OK && !lg__sha256_add(h->sha, description.data, description.len)) {
        status = lg__nomem(err);
    }
    lg__buf_free(&description);
    LG__TRY(status);
    static const uint64_t nowhere[LG_MAX_NDIM];
    lg__plan_box box = {.tensor = t->name,
                        .dtype = t->dtype,
                        .data = t->data,
                        .strides = t->strides,
                        .box = {t->ndim, nowhere, t->shape}};
    LG__TRY(lg__gather(&box, h->scratch, hash_bytes, h, err));
    LG__TRY(hash_flush(h, err));
    LG__TRY(end_digest(h, t->digest, err));
    memset(t->part, 0, sizeof t->part);
    t->digested = true;
    return LG_OK;
}

/* A declared replica: the part that this rank holds, and which part it is. */
static lg_status digest_pieces(hasher *h, lg__save_tensor *t, const lg__piece *pieces, size_t n, lg_error *err)
{
    bool good = lg__sha256_add(h->sha, t->layout->id, sizeof t->layout->id);
    for (size_t i = 0; i < n; i++) {
        good = good && lg__sha256_add(h->sha, pieces[i].box.offset, t->ndim * sizeof(uint64_t)) &&
               lg__sha256_add(h->sha, pieces[i].box.size, t->ndim * sizeof(uint64_t));
    }
    if (!good) {
        return lg__nomem(err);
    }
    LG__TRY(end_digest(h, t->part, err));
    lg__arena *arena = lg__arena_new();
    if (arena == NULL) {
        return lg__nomem(err);
    }
    lg_status status = hash_boxes(h, t, pieces, n, arena, err);
    lg__arena_free(arena);
    LG__TRY(status);
    LG__TRY(end_digest(h, t->digest, err));
    t->digested = true;
    return LG_OK;
}

static lg_status digest_held(hasher *h, lg__save_tensor *t, uint32_t rank, lg_error *err)
{
    lg__tensor_desc desc = lg__save_desc(t);
    desc.name = NULL; /* errors get it from the caller */
    lg__piece *pieces = NULL;
    size_t n = 0;
    LG__TRY(lg__layout_held(t->layout, &desc, rank, &pieces, &n, err));
    lg_status status = digest_pieces(h, t, pieces, n, err);
    lg__free(pieces);
    return status;
}

lg_status lg__replicas_digest(lg_save *save, bool check_declared, lg_error *err)
{
    if (save->world == 1) {
        return LG_OK; /* nobody to differ from */
    }
    hasher h = {.sha = lg__sha256_new(), .buffer = lg__malloc(GATHER_BYTES), .scratch.bytes = SCRATCH_BYTES};
    h.scratch.data = lg__malloc(h.scratch.bytes);
    lg_status status = h.sha == NULL || h.buffer == NULL || h.scratch.data == NULL ? lg__nomem(err) : LG_OK;
    for (size_t i = 0; i < save->n_tensors && status == LG_OK; i++) {
        lg__save_tensor *t = &save->tensors[i];
        t->digested = false;
        if (t->alias_of != NULL) {
            continue; /* the same memory */
        }
        const bool compared = t->placement == LG__PLACE_UNDECLARED ||
                              (check_declared && t->placement == LG__PLACE_LAYOUT && t->layout->holders > 1);
        if (compared && save->fills && (t->flags & LG_TENSOR_KEPT) != 0) {
            status = lg_error_set(err, LG_ERR_UNSUPPORTED,
                                  "the ranks' contents are compared before the launch fills its memory: give it a "
                                  "layout, without check_replicas, or fill it before");
        } else if (t->placement == LG__PLACE_UNDECLARED) {
            status = digest_whole(&h, t, err);
        } else if (check_declared && t->placement == LG__PLACE_LAYOUT && t->layout->holders > 1) {
            status = digest_held(&h, t, save->rank, err);
        }
        if (status != LG_OK) {
            lg_error_wrap(err, "tensor \"%s\"", t->name);
        }
    }
    lg__sha256_free(h.sha);
    lg__free(h.buffer);
    lg__free(h.scratch.data);
    return status;
}

/* --------------------------------------------------------------------- lists
 *
 * One entry a tensor, sorted by name, all integers little-endian:
 *   4 flags  4 bytes of name  4 bytes of root  4 bytes of description
 *   name, root (aliases: of which tensor), description, part (32), digest (32)
 */
enum { ENTRY_DECLARED = 1u << 0, ENTRY_BUFFER = 1u << 1, ENTRY_ALIAS = 1u << 2 };
#define ENTRY_HEAD 16

typedef struct text {
    const char *s;
    uint32_t bytes;
} text;

typedef struct entry {
    uint32_t flags, rank;
    text name, root, description;
    const uint8_t *part, *digest;
} entry;

static bool is_listed(const lg__save_tensor *t) { return t->placement == LG__PLACE_UNDECLARED || t->digested; }

static int by_tensor_name(const void *a, const void *b)
{
    const lg__save_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static lg_status add_entry(lg__buf *out, const lg_save *save, const lg__save_tensor *t, lg_error *err)
{
    const lg__save_tensor *contents = t->alias_of != NULL ? &save->tensors[t->root] : t;
    LG__RETURN_IF(!contents->digested, err, LG_ERR_INTERNAL, "tensor \"%s\" was not digested", t->name);
    uint32_t flags = (t->placement == LG__PLACE_LAYOUT ? ENTRY_DECLARED : 0) |
                     ((t->flags & LG_TENSOR_BUFFER) != 0 ? ENTRY_BUFFER : 0) | (t->alias_of != NULL ? ENTRY_ALIAS : 0);
    const char *root = t->alias_of != NULL ? t->alias_of : "";
    lg__buf_u32le(out, flags);
    lg__buf_u32le(out, (uint32_t)strlen(t->name));
    lg__buf_u32le(out, (uint32_t)strlen(root));
    lg__buf_u32le(out, 12 + 8 * t->ndim);
    lg__buf_str(out, t->name);
    lg__buf_str(out, root);
    add_description(out, t);
    lg__buf_add(out, contents->part, sizeof contents->part);
    lg__buf_add(out, contents->digest, sizeof contents->digest);
    return LG_OK;
}

static lg_status make_list(const lg_save *save, lg__buf *out, uint64_t *n, lg_error *err)
{
    *n = 0;
    if (save->world == 1) {
        return LG_OK;
    }
    const lg__save_tensor **order = lg__malloc(save->n_tensors * sizeof *order);
    if (order == NULL) {
        return lg__nomem(err);
    }
    size_t listed = 0;
    for (size_t i = 0; i < save->n_tensors; i++) {
        if (is_listed(&save->tensors[i])) {
            order[listed++] = &save->tensors[i];
        }
    }
    qsort(order, listed, sizeof *order, by_tensor_name);
    lg_status status = LG_OK;
    for (size_t i = 0; i < listed && status == LG_OK; i++) {
        status = add_entry(out, save, order[i], err);
    }
    lg__free(order);
    *n = listed;
    return status == LG_OK ? lg__buf_check(out, "the list of undeclared tensors", err) : status;
}

lg_status lg__replicas_list(const lg_save *save, lg__buf *out, lg_error *err)
{
    uint64_t n;
    return make_list(save, out, &n, err);
}

lg_status lg__replicas_summary(const lg_save *save, uint8_t out[40], lg_error *err)
{
    lg__buf list;
    lg__buf_init(&list, LIST_MAX);
    uint64_t n = 0;
    uint8_t digest[LG__SHA256_BYTES];
    lg_status status = make_list(save, &list, &n, err);
    if (status == LG_OK) {
        status = lg__sha256_of(list.len > 0 ? list.data : "", list.len, digest, err);
    }
    lg__buf_free(&list);
    LG__TRY(status);
    for (int i = 0; i < 8; i++) {
        out[i] = (uint8_t)(n >> (8 * i));
    }
    memcpy(out + 8, digest, sizeof digest);
    return LG_OK;
}

/* Takes one entry off a list that came from another rank. */
static bool take_entry(const char **at, const char *end, uint32_t rank, entry *out)
{
    if (end - *at < ENTRY_HEAD) {
        return false;
    }
    const char *p = *at;
    entry e = {.flags = lg__get_u32le(p), .rank = rank};
    e.name.bytes = lg__get_u32le(p + 4);
    e.root.bytes = lg__get_u32le(p + 8);
    e.description.bytes = lg__get_u32le(p + 12);
    p += ENTRY_HEAD;
    uint64_t need = (uint64_t)e.name.bytes + e.root.bytes + e.description.bytes + 2 * (uint64_t)LG__SHA256_BYTES;
    if (need > (uint64_t)(end - p) || e.name.bytes == 0 || e.name.bytes > LG_MAX_NAME || e.root.bytes > LG_MAX_NAME ||
        e.description.bytes < 12 || lg__get_u32le(p + e.name.bytes + e.root.bytes + 8) > LG_MAX_NDIM ||
        e.description.bytes != 12 + 8 * lg__get_u32le(p + e.name.bytes + e.root.bytes + 8)) {
        return false;
    }
    e.name.s = p;
    e.root.s = e.name.s + e.name.bytes;
    e.description.s = e.root.s + e.root.bytes;
    e.part = (const uint8_t *)e.description.s + e.description.bytes;
    e.digest = e.part + LG__SHA256_BYTES;
    *at = (const char *)e.digest + LG__SHA256_BYTES;
    *out = e;
    return true;
}

static int compare_text(text a, text b)
{
    uint32_t n = a.bytes < b.bytes ? a.bytes : b.bytes;
    int c = memcmp(a.s, b.s, n);
    return c != 0 ? c : a.bytes < b.bytes ? -1 : a.bytes > b.bytes;
}

static int by_name_and_rank(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    int c = compare_text(x->name, y->name);
    return c != 0 ? c : x->rank < y->rank ? -1 : x->rank > y->rank;
}

static lg_status take_lists(const char *lists, const size_t *sizes, uint32_t world, entry **out, size_t *n,
                            lg_error *err)
{
    entry *entries = NULL;
    size_t count = 0, cap = 0;
    const char *at = lists;
    for (uint32_t r = 0; r < world; r++) {
        const char *end = at + sizes[r];
        while (at < end) {
            if (!lg__grow((void **)&entries, &cap, count, sizeof *entries)) {
                lg__free(entries);
                return lg__nomem(err);
            }
            if (!take_entry(&at, end, r, &entries[count])) {
                lg__free(entries);
                return lg_error_set(err, LG_ERR_COMM, "the list of undeclared tensors of rank %u is garbled", r);
            }
            count++;
        }
    }
    if (count > 1) {
        qsort(entries, count, sizeof *entries, by_name_and_rank);
    }
    *out = entries;
    *n = count;
    return LG_OK;
}

/* ---------------------------------------------------------------- conflicts */

static const char *describe(const entry *e, char *out, size_t bytes)
{
    const char *p = e->description.s;
    const uint32_t ndim = lg__get_u32le(p + 8);
    lg__buf b;
    lg__buf_init(&b, bytes - 1);
    lg__buf_fmt(&b, "%s %s [", lg_group_name((lg_group)lg__get_u32le(p)),
                lg_dtype_name((lg_dtype)lg__get_u32le(p + 4)));
    for (uint32_t d = 0; d < ndim; d++) {
        lg__buf_fmt(&b, "%s%llu", d > 0 ? ", " : "", (unsigned long long)lg__get_u64le(p + 12 + (size_t)8 * d));
    }
    lg__buf_str(&b, "]");
    memcpy(out, b.data != NULL ? b.data : "", b.data != NULL ? b.len + 1 : 1);
    lg__buf_free(&b);
    return out;
}

static const char *name_of(text t, char out[512])
{
    size_t n = t.bytes < 511 ? t.bytes : 511;
    memcpy(out, t.s, n);
    out[n] = '\0';
    return out;
}

/* All ranks of a group must mean the same tensor. */
static lg_status check_same(const entry *group, size_t n, lg_error *err)
{
    const entry *a = &group[0];
    char name[512], x[512], y[512];
    for (size_t i = 1; i < n; i++) {
        const entry *b = &group[i];
        LG__RETURN_IF(b->rank == group[i - 1].rank, err, LG_ERR_COMM, "rank %u lists tensor \"%s\" twice", b->rank,
                      name_of(a->name, name));
        LG__RETURN_IF(compare_text(a->description, b->description) != 0, err, LG_ERR_CONFLICT,
                      "two different tensors are called \"%s\": %s on rank %u, %s on rank %u", name_of(a->name, name),
                      describe(a, x, sizeof x), a->rank, describe(b, y, sizeof y), b->rank);
        LG__RETURN_IF(((a->flags ^ b->flags) & ENTRY_DECLARED) != 0, err, LG_ERR_CONFLICT,
                      "tensor \"%s\" has a layout on only one of ranks %u and %u", name_of(a->name, name), a->rank,
                      b->rank);
        LG__RETURN_IF(compare_text(a->root, b->root) != 0, err, LG_ERR_CONFLICT,
                      "\"%s\" is %s%s%s on rank %u, but %s%s%s on rank %u", name_of(a->name, name),
                      a->root.bytes > 0 ? "an alias of \"" : "a tensor of its own",
                      a->root.bytes > 0 ? name_of(a->root, x) : "", a->root.bytes > 0 ? "\"" : "", a->rank,
                      b->root.bytes > 0 ? "an alias of \"" : "a tensor of its own",
                      b->root.bytes > 0 ? name_of(b->root, y) : "", b->root.bytes > 0 ? "\"" : "", b->rank);
    }
    return LG_OK;
}

/* Do the digests of a group differ? Then says which ranks are unlike the most:
 * *usual is the lowest of the others. */
static bool find_difference(const entry *group, size_t n, uint32_t *usual, uint32_t odd[RANKS_SHOWN], size_t *n_odd)
{
    /* Boyer and Moore's vote finds the majority where there is one; without
     * one, any digest does for the message. */
    const entry *candidate = NULL;
    size_t votes = 0;
    for (size_t i = 0; i < n; i++) {
        if (votes == 0) {
            candidate = &group[i];
            votes = 1;
        } else if (memcmp(candidate->digest, group[i].digest, LG__SHA256_BYTES) == 0) {
            votes++;
        } else {
            votes--;
        }
    }
    size_t same = 0;
    *n_odd = 0;
    for (size_t i = 0; i < n; i++) {
        if (memcmp(candidate->digest, group[i].digest, LG__SHA256_BYTES) == 0) {
            *usual = same++ == 0 ? group[i].rank : *usual;
            continue;
        }
        if (*n_odd < RANKS_SHOWN) {
            odd[*n_odd] = group[i].rank;
        }
        ++*n_odd;
    }
    return *n_odd > 0;
}

static lg_status differ(const entry *e, uint32_t usual, const uint32_t *odd, size_t n_odd, const char *advice,
                        lg_error *err)
{
    char name[512], more[160] = "";
    lg__buf b;
    lg__buf_init(&b, sizeof more - 1);
    for (size_t i = 1; i < n_odd && i < RANKS_SHOWN; i++) {
        lg__buf_fmt(&b, "%s%u", i > 1 ? ", " : " (also ", odd[i]);
    }
    lg__buf_str(&b, n_odd > RANKS_SHOWN ? ", …)" : n_odd > 1 ? ")" : "");
    if (b.data != NULL) {
        memcpy(more, b.data, b.len + 1);
    }
    lg__buf_free(&b);
    uint32_t x = usual < odd[0] ? usual : odd[0], y = usual < odd[0] ? odd[0] : usual;
    lg_error_set(err, LG_ERR_CONFLICT, "tensor \"%s\" differs between ranks %u and %u%s: %s", name_of(e->name, name), x,
                 y, more, advice);
    err->rank = (int)odd[0];
    return LG_ERR_CONFLICT;
}

static int by_part_and_rank(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    int c = memcmp(x->part, y->part, LG__SHA256_BYTES);
    return c != 0 ? c : x->rank < y->rank ? -1 : x->rank > y->rank;
}

/* Holders of the same part. Sorts the group anew. */
static lg_status check_declared_group(entry *group, size_t n, lg_error *err)
{
    qsort(group, n, sizeof *group, by_part_and_rank);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && memcmp(group[i].part, group[end].part, LG__SHA256_BYTES) == 0;) {
            end++;
        }
        uint32_t usual = 0, odd[RANKS_SHOWN];
        size_t n_odd = 0;
        if (find_difference(group + i, end - i, &usual, odd, &n_odd)) {
            return differ(&group[i], usual, odd, n_odd,
                          "its layout says that they hold the same bytes, so training has drifted apart", err);
        }
    }
    return LG_OK;
}

/* -------------------------------------------------------------------- settle */

typedef struct settler {
    lg_save *save;
    uint32_t *holders; /* of the group at hand; world entries */
    uint32_t n_holders;
    uint32_t *last_holders; /* those of `last` */
    uint32_t n_last;
    bool last_copies;
    lg_layout *last; /* the save's */
} settler;

/* The layout of the holders at hand. Neighbours mostly have the same. */
static lg_status holders_layout(settler *s, bool copies, lg_layout **out, lg_error *err)
{
    if (s->last == NULL || s->last_copies != copies || s->n_last != s->n_holders ||
        memcmp(s->holders, s->last_holders, s->n_holders * sizeof *s->holders) != 0) {
        lg_layout *layout = NULL;
        s->last = NULL;
        LG__TRY(lg__layout_of_ranks(s->holders, s->n_holders, copies, &layout, err));
        LG__TRY(lg__save_intern(s->save, &layout, err));
        memcpy(s->last_holders, s->holders, s->n_holders * sizeof *s->holders);
        s->n_last = s->n_holders;
        s->last_copies = copies;
        s->last = layout;
    }
    *out = s->last;
    return LG_OK;
}

static lg_status settle_group(settler *s, entry *group, size_t n, lg_error *err)
{
    LG__TRY(check_same(group, n, err));
    if ((group[0].flags & ENTRY_DECLARED) != 0) {
        return check_declared_group(group, n, err);
    }
    if ((group[0].flags & ENTRY_ALIAS) != 0) {
        return LG_OK; /* after the tensors themselves */
    }
    uint32_t usual = 0, odd[RANKS_SHOWN];
    size_t n_odd = 0;
    bool copies = false;
    if (find_difference(group, n, &usual, odd, &n_odd)) {
        copies = true;
        for (size_t i = 0; i < n; i++) {
            copies = copies && (group[i].flags & ENTRY_BUFFER) != 0;
        }
        if (!copies) {
            return differ(&group[0], usual, odd, n_odd,
                          "ranks that add it without a layout must hold the same bytes; give it a layout if it is cut "
                          "over ranks, or LG_TENSOR_BUFFER if each rank has its own",
                          err);
        }
    }
    size_t at;
    if (!lg__index_find(&s->save->by_name, group[0].name.s, group[0].name.bytes, &at)) {
        return LG_OK;
    }
    s->n_holders = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        s->holders[i] = group[i].rank;
    }
    lg__save_tensor *t = &s->save->tensors[at];
    LG__RETURN_IF(t->placement != LG__PLACE_UNDECLARED, err, LG_ERR_CONFLICT,
                  "tensor \"%s\" has a layout on rank %u, but none on rank %u", t->name, s->save->rank, group[0].rank);
    LG__TRY(holders_layout(s, copies, &t->layout, err));
    s->save->unshared += copies;
    return LG_OK;
}

static size_t group_end(const entry *entries, size_t n, size_t i)
{
    size_t j = i + 1;
    while (j < n && compare_text(entries[i].name, entries[j].name) == 0) {
        j++;
    }
    return j;
}

/* Every rank that has the tensor must have the alias, and no other one. */
static lg_status check_alias_group(const entry *entries, size_t n, const entry *group, size_t n_group, lg_error *err)
{
    char alias[512], root[512];
    entry key = {.name = group[0].root, .rank = group[0].rank};
    const entry *of = bsearch(&key, entries, n, sizeof *entries, by_name_and_rank);
    size_t first = of != NULL ? (size_t)(of - entries) : 0;
    while (of != NULL && first > 0 && compare_text(entries[first - 1].name, of->name) == 0) {
        first--;
    }
    size_t end = of != NULL ? group_end(entries, n, first) : first;
    for (size_t i = 0; i < n_group || first + i < end; i++) {
        bool here = i < n_group, there = first + i < end;
        if (here && there && group[i].rank == entries[first + i].rank) {
            continue;
        }
        bool lacks = there && (!here || entries[first + i].rank < group[i].rank);
        return lg_error_set(err, LG_ERR_CONFLICT, "alias \"%s\" of \"%s\" is declared on rank %u, but not on rank %u",
                            name_of(group[0].name, alias), name_of(group[0].root, root),
                            lacks ? group[0].rank : group[i].rank,
                            lacks ? entries[first + i].rank : entries[first].rank);
    }
    return LG_OK;
}

static lg_status settle_lists(settler *s, entry *entries, size_t n, lg_error *err)
{
    for (size_t i = 0, end; i < n; i = end) {
        end = group_end(entries, n, i);
        LG__TRY(settle_group(s, entries + i, end - i, err));
    }
    for (size_t i = 0, end; i < n; i = end) {
        end = group_end(entries, n, i);
        if ((entries[i].flags & ENTRY_ALIAS) != 0) {
            LG__TRY(check_alias_group(entries, n, entries + i, end - i, err));
        }
    }
    return LG_OK;
}

/* All ranks hold the same. */
static lg_status settle_equal(settler *s, lg_error *err)
{
    s->n_holders = s->save->world;
    for (uint32_t r = 0; r < s->save->world; r++) {
        s->holders[r] = r;
    }
    for (size_t i = 0; i < s->save->n_tensors; i++) {
        lg__save_tensor *t = &s->save->tensors[i];
        if (t->placement == LG__PLACE_UNDECLARED && t->alias_of == NULL) {
            LG__TRY(holders_layout(s, false, &t->layout, err));
        }
    }
    return LG_OK;
}

static lg_status settle(settler *s, const void *lists, const size_t *sizes, lg_error *err)
{
    if (lists == NULL) {
        return settle_equal(s, err);
    }
    entry *entries = NULL;
    size_t n = 0;
    LG__TRY(take_lists(lists, sizes, s->save->world, &entries, &n, err));
    lg_status status = settle_lists(s, entries, n, err);
    lg__free(entries);
    return status;
}

lg_status lg__replicas_settle(lg_save *save, const void *lists, const size_t *sizes, lg_error *err)
{
    settler s = {.save = save,
                 .holders = lg__malloc(save->world * sizeof(uint32_t)),
                 .last_holders = lg__malloc(save->world * sizeof(uint32_t))};
    lg_status status = s.holders == NULL || s.last_holders == NULL ? lg__nomem(err) : settle(&s, lists, sizes, err);
    lg__free(s.holders);
    lg__free(s.last_holders);
    LG__TRY(status);
    for (size_t i = 0; i < save->n_tensors; i++) {
        lg__save_tensor *t = &save->tensors[i];
        if (t->alias_of != NULL && t->placement == LG__PLACE_UNDECLARED) {
            t->layout = save->tensors[t->root].layout;
        }
        LG__RETURN_IF(t->placement == LG__PLACE_UNDECLARED && t->layout == NULL, err, LG_ERR_COMM,
                      "the exchanged lists lack tensor \"%s\" of this rank", t->name);
    }
    return LG_OK;
}
