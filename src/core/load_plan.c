/* SPDX-License-Identifier: Apache-2.0 */
#include "core/checkpoint.h"

#include <stdlib.h>
#include <string.h>

/* Which stored boxes do the wanted parts touch? First all touches are listed,
 * 16 bytes each, from the manifest alone, and sorted by file. Then one rank's
 * files of one group at a time: their headers are read, the boxes found in
 * them, the parts read. So memory is bounded by one rank's headers, however
 * many ranks the checkpoint has. */

typedef struct touch {
    uint32_t part;
    uint32_t rank;
    uint32_t number; /* of the box on its rank */
    uint32_t group;  /* of the file */
} touch;

typedef struct touches {
    touch *all;
    size_t n, cap;
    uint32_t part, group; /* of those being added */
} touches;

static lg_status add_touch(uint32_t rank, const lg__region *box, uint32_t number, void *arg, lg_error *err)
{
    (void)box;
    touches *t = arg;
    if (!lg__grow((void **)&t->all, &t->cap, t->n, sizeof *t->all)) {
        return lg__nomem(err);
    }
    t->all[t->n++] = (touch){t->part, rank, number, t->group};
    return LG_OK;
}

static int compare_touches(const void *a, const void *b)
{
    const touch *x = a, *y = b;
    if (x->rank != y->rank) {
        return x->rank < y->rank ? -1 : 1;
    }
    if (x->group != y->group) {
        return x->group < y->group ? -1 : 1;
    }
    if (x->number != y->number) {
        return x->number < y->number ? -1 : 1;
    }
    return x->part < y->part ? -1 : x->part > y->part;
}

static lg__region part_region(const lg__part *part, uint32_t ndim)
{
    lg__region r = {.ndim = ndim};
    memcpy(r.offset, part->offset, ndim * sizeof *r.offset);
    memcpy(r.size, part->size, ndim * sizeof *r.size);
    return r;
}

static lg_status find_touches(lg_load *load, touches *t, lg_error *err)
{
    LG__RETURN_IF(load->n_parts > UINT32_MAX, err, LG_ERR_LIMIT, "more than 2^32 regions in one load");
    char key[LG__KEY_MAX];
    for (size_t i = 0; i < load->n_parts; i++) {
        const lg__wanted *wanted = &load->wanted[load->parts[i].wanted];
        const lg__manifest_tensor *stored = wanted->stored;
        lg__region region = part_region(&load->parts[i], stored->ndim);
        lg_group group;
        lg__checkpoint_key(load->c, stored, &group, key);
        uint32_t copy_of = wanted->copy_of;
        if (copy_of == UINT32_MAX && lg__manifest_is_copies(load->c->m, stored)) {
            copy_of = lg__checkpoint_copy_of(load->c, stored, load->rank, load->world);
        }
        t->part = (uint32_t)i;
        t->group = group;
        LG__TRY(lg__checkpoint_touch(load->c, stored, &region, copy_of, add_touch, t, err));
    }
    if (t->n > 1) {
        qsort(t->all, t->n, sizeof *t->all, compare_touches);
    }
    return LG_OK;
}

static const uint64_t zeros[LG_MAX_NDIM];

/* The part of one stored box that one wanted part needs. */
static lg_status make_fetch(lg_load *load, lg__arena *arena, const touch *t, bool verify, lg__fetch *out, lg_error *err)
{
    const lg__part *part = &load->parts[t->part];
    lg__wanted *wanted = &load->wanted[part->wanted];
    const lg__manifest_tensor *stored = wanted->stored;
    char key_space[LG__KEY_MAX];
    lg_group group;
    const char *key = lg__checkpoint_key(load->c, stored, &group, key_space);
    lg__region box, common, region = part_region(part, stored->ndim);
    LG__TRY(lg__checkpoint_box(load->c, stored, t->rank, t->number, &box, err));
    LG__RETURN_IF(!lg__region_intersect(&box, &region, &common), err, LG_ERR_INTERNAL,
                  "box %u of rank %u does not touch the wanted region of \"%s\"", t->number, t->rank, stored->name);
    lg__fetch f = {.name = wanted->name, .to = *part, .done = &wanted->done};
    LG__TRY(lg__checkpoint_locate(load->c, t->rank, group, key, &box, stored->dtype, t->number, verify, &f.shard,
                                  &f.entry, err));
    uint64_t *dims = lg__arena_array(arena, 2 * (size_t)stored->ndim + 1, sizeof *dims);
    if (dims == NULL) {
        return lg__nomem(err);
    }
    memcpy(dims, common.offset, stored->ndim * sizeof *dims);
    memcpy(dims + stored->ndim, common.size, stored->ndim * sizeof *dims);
    f.to.offset = dims;
    f.to.size = dims + stored->ndim;
    f.box_offset = f.entry->has_offsets ? f.entry->saved_offsets : zeros;
    wanted->planned += lg__region_elements(&common);
    *out = f;
    return LG_OK;
}

/* All touches of one rank's files of one group. */
static lg_status load_unit(lg_load *load, const touch *t, size_t n, lg_error *err)
{
    bool verify = (load->flags & LG_LOAD_UNVERIFIED) == 0;
    lg__arena *arena = lg__arena_new();
    lg__fetch *fetches = lg__calloc(n, sizeof *fetches);
    lg_status status = arena == NULL || fetches == NULL ? lg__nomem(err) : LG_OK;
    for (size_t i = 0; i < n && status == LG_OK; i++) {
        status = make_fetch(load, arena, &t[i], verify, &fetches[i], err);
    }
    if (status == LG_OK) {
        status = lg__fetch_run(load->c, fetches, n, verify, load->buffer_bytes, err);
    }
    lg__free(fetches);
    lg__arena_free(arena);
    lg__checkpoint_forget(load->c, t->rank);
    return status;
}

static size_t unit_end(const touches *t, size_t begin)
{
    size_t end = begin + 1;
    while (end < t->n && t->all[end].rank == t->all[begin].rank && t->all[end].group == t->all[begin].group) {
        end++;
    }
    return end;
}

static lg_status load_range(lg_load *load, const touches *t, size_t begin, size_t end, lg_error *err)
{
    while (begin < end) {
        size_t next = unit_end(t, begin);
        LG__TRY(load_unit(load, t->all + begin, next - begin, err));
        begin = next;
    }
    return LG_OK;
}

lg_status lg__load_parts(lg_load *load, lg_error *err)
{
    touches t = {0};
    lg_status status = find_touches(load, &t, err);
    /* When all ranks load at once each begins at another place, so that they
     * do not queue for the first rank's files. */
    size_t first = 0;
    if (load->world > 0 && load->rank < load->world) {
        uint64_t rank = (uint64_t)load->rank * load->c->m->world / load->world;
        while (first < t.n && t.all[first].rank < rank) {
            first++;
        }
    }
    if (status == LG_OK) {
        status = load_range(load, &t, first, t.n, err);
    }
    if (status == LG_OK) {
        status = load_range(load, &t, 0, first, err);
    }
    lg__free(t.all);
    return status;
}
