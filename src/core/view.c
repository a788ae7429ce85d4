/* SPDX-License-Identifier: Apache-2.0 */
#include "core/checkpoint.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct view_priv {
    lg_store *store;
    void *base;
    size_t mapped;
} view_priv;

typedef struct one_box {
    size_t n;
    uint32_t rank, number;
    lg__region box;
} one_box;

static lg_status note_box(uint32_t rank, const lg__region *box, uint32_t number, void *arg, lg_error *err)
{
    (void)err;
    one_box *b = arg;
    if (b->n++ == 0) {
        b->rank = rank;
        b->number = number;
        b->box = *box;
    }
    return LG_OK;
}

typedef struct one_run {
    size_t n;
    uint64_t at, bytes;
} one_run;

static lg_status note_run(uint64_t box_byte, int64_t mem_byte, uint64_t bytes, void *arg, lg_error *err)
{
    (void)mem_byte;
    one_run *r = arg;
    if (r->n > 0 && r->at + r->bytes == box_byte) {
        r->bytes += bytes;
        return LG_OK;
    }
    LG__RETURN_IF(r->n++ > 0, err, LG_ERR_UNSUPPORTED, "the region is not contiguous in its stored box");
    r->at = box_byte;
    r->bytes = bytes;
    return LG_OK;
}

static lg_status check_blocks(lg_checkpoint *c, const lg__shard *s, const lg__table *table, const char *name,
                              const char *data, uint64_t begin, uint64_t bytes, lg_error *err)
{
    uint64_t block = c->m->block_bytes;
    for (uint64_t at = 0; at < bytes; at += block) {
        size_t n = (size_t)(bytes - at < block ? bytes - at : block);
        uint32_t crc = lg__crc32c(0, data + at, n);
        uint64_t number = (begin + at) / block;
        if (crc != table->block_crc[number]) {
            return lg__block_error(c, s, table->header_bytes, number, crc, table->block_crc[number], name, err);
        }
    }
    return LG_OK;
}

/* Maps bytes [begin, begin + bytes) of a file's data, with the blocks around
 * them, which are checked as they lie in the map. */
static lg_status map_bytes(lg_checkpoint *c, lg__shard *s, const char *name, bool verify, uint64_t begin,
                           uint64_t bytes, lg_view *out, lg_error *err)
{
    const lg__st_header *header;
    const lg__table *table = NULL;
    LG__TRY(lg__checkpoint_header(c, s, verify, &header, err));
    if (verify) {
        LG__TRY(lg__checkpoint_table(c, s, &table, err));
    }
    uint64_t block = c->m->block_bytes, data_bytes = s->bytes - header->data_start;
    uint64_t first = begin / block * block, last = lg__block_count(begin + bytes, block) * block;
    last = last < data_bytes ? last : data_bytes;
    LG__RETURN_IF(last - first > SIZE_MAX, err, LG_ERR_UNSUPPORTED, "the region is too long to be mapped here");
    view_priv *priv = lg__calloc(1, sizeof *priv);
    if (priv == NULL) {
        return lg__nomem(err);
    }
    lg_file *file = NULL;
    const void *data = NULL;
    lg_status status = lg__checkpoint_open_file(c, s->name, s->bytes, &file, err);
    if (status == LG_OK) {
        status = lg__store_map(c->store, file, header->data_start + first, (size_t)(last - first), &data, &priv->base,
                               &priv->mapped, err);
        lg_error ignored;
        lg__store_close(c->store, file, &ignored);
        if (status == LG_ERR_IO && err->os_errno == ENODEV) {
            /* Some file systems cannot map; the caller may load instead. */
            status = err->status = LG_ERR_UNSUPPORTED;
        }
    }
    if (status == LG_OK && verify) {
        status = check_blocks(c, s, table, name, data, first, last - first, err);
        if (status != LG_OK) {
            lg__store_unmap(c->store, priv->base, priv->mapped);
        }
    }
    if (status != LG_OK) {
        lg__free(priv);
        return status;
    }
    priv->store = c->store;
    *out = (lg_view){.data = (const char *)data + (begin - first), .bytes = bytes, .priv = priv};
    return LG_OK;
}

static lg_status map_region(lg_checkpoint *c, const lg__manifest_tensor *t, const lg__region *region, bool verify,
                            lg_view *out, lg_error *err)
{
    const lg__manifest_tensor *stored = lg__checkpoint_stored(c, t);
    uint32_t copy_of = lg__manifest_is_copies(c->m, stored) ? lg__checkpoint_copy_of(c, stored, 0, 0) : UINT32_MAX;
    one_box found = {0};
    LG__TRY(lg__checkpoint_touch(c, stored, region, copy_of, note_box, &found, err));
    LG__RETURN_IF(found.n == 0, err, LG_ERR_COVERAGE, "no stored box holds it");
    LG__RETURN_IF(found.n > 1, err, LG_ERR_UNSUPPORTED, "the region lies in %zu stored boxes", found.n);
    one_run run = {0};
    lg__run_walk walk = {.dtype = stored->dtype,
                         .box = &found.box,
                         .part = region,
                         .mem_origin = region->offset,
                         .mem_size = region->size};
    LG__TRY(lg__region_runs(&walk, note_run, &run, err));
    char key_space[LG__KEY_MAX];
    lg_group group;
    const char *key = lg__checkpoint_key(c, stored, &group, key_space);
    lg__shard *shard;
    const lg__st_tensor *entry;
    LG__TRY(lg__checkpoint_locate(c, found.rank, group, key, &found.box, stored->dtype, found.number, verify, &shard,
                                  &entry, err));
    return map_bytes(c, shard, t->name, verify, entry->begin + run.at, run.bytes, out, err);
}

lg_status lg_checkpoint_map(lg_checkpoint *c, const char *name, const uint64_t *offset, const uint64_t *extent,
                            uint32_t flags, lg_view *out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(c == NULL || name == NULL || out == NULL, err, LG_ERR_INVALID,
                  "lg_checkpoint_map needs a checkpoint, a name and a result");
    LG__RETURN_IF((flags & ~(uint32_t)LG_LOAD_UNVERIFIED) != 0, err, LG_ERR_INVALID, "unknown map flags 0x%x", flags);
    const lg__manifest_tensor *t = lg__manifest_find(c->m, name);
    if (t == NULL) {
        return lg__checkpoint_missing(c, name, err);
    }
    lg__region region;
    LG__TRY(lg__checkpoint_region(t, offset, extent, &region, err));
    if (lg__region_empty(&region)) {
        static const uint64_t nothing;
        *out = (lg_view){.data = &nothing};
        return LG_OK;
    }
    LG__RETURN_IF(!lg__store_can(c->store, LG_CAP_MAP), err, LG_ERR_UNSUPPORTED,
                  "%s cannot map files; load \"%.200s\" instead", lg__store_name(c->store), name);
    lg_status status = map_region(c, t, &region, (flags & LG_LOAD_UNVERIFIED) == 0, out, err);
    char shown[300];
    return status == LG_OK ? LG_OK : lg_error_wrap(err, "view of \"%s\"", lg__printable(name, shown, sizeof shown));
}

void lg_view_release(lg_view *view)
{
    if (view == NULL || view->priv == NULL) {
        return;
    }
    view_priv *priv = view->priv;
    lg__store_unmap(priv->store, priv->base, priv->mapped);
    lg__free(priv);
    *view = (lg_view){0};
}
