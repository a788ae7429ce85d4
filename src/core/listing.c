/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/mem.h"
#include "core/owner.h"
#include "core/walk.h"

#include <stdio.h>
#include <string.h>

const char *lg_entry_kind_name(lg_entry_kind kind)
{
    static const char *const names[] = {"committed", "partial", "trash", "tombstone", "owner", "rollback", "foreign"};
    return (unsigned)kind < sizeof names / sizeof *names ? names[kind] : "?";
}

static void set_name(lg_entry *e, const char *name) { lg__text_copy(e->name, sizeof e->name, name); }

static uint64_t listed_bytes(const lg__manifest *m)
{
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < m->world; r++) {
        bytes += m->ranks[r].sums_bytes;
        for (int g = 0; g < LG_GROUP_COUNT; g++) {
            for (uint32_t f = 0; f < m->ranks[r].n_files[g]; f++) {
                bytes += m->ranks[r].file_bytes[g][f];
            }
        }
    }
    for (size_t i = 0; i < m->n_attached; i++) {
        bytes += m->attached[i].bytes;
    }
    return bytes;
}

static lg_status describe_checkpoint(lg_store *store, lg__walk_item *item, lg_entry *e, lg_error *err)
{
    LG__TRY(lg__walk_check_whole(store, item, err));
    e->kind = LG_ENTRY_COMMITTED;
    e->step = item->step;
    e->generation = item->generation;
    e->status = item->status;
    lg__text_copy(e->reason, sizeof e->reason, item->reason);
    e->discarded = item->discarded;
    if (item->m == NULL) {
        return LG_OK;
    }
    const lg__manifest *m = item->m;
    memcpy(e->run_id, m->run_id, sizeof e->run_id);
    memcpy(e->created, m->created, sizeof e->created);
    e->world = m->world;
    e->tensors = m->n_tensors;
    e->bytes = listed_bytes(m);
    lg__pin_state pin;
    LG__TRY(lg__pin_read(store, item->name, m->sha256, &pin, err));
    e->pinned = pin.pinned;
    lg__text_copy(e->note, sizeof e->note, pin.pinned ? pin.reason : "");
    return LG_OK;
}

static void describe_rollback(const lg__walk_item *item, lg_entry *e)
{
    e->kind = LG_ENTRY_ROLLBACK;
    e->generation = item->generation;
    e->status = item->status;
    e->discarded = item->discarded;
    lg__text_copy(e->reason, sizeof e->reason, item->reason);
    if (item->status == LG_OK) {
        e->target = item->rollback.target;
        e->target_step = item->rollback.target_step;
        memcpy(e->run_id, item->rollback.run_id, sizeof e->run_id);
        memcpy(e->created, item->rollback.created, sizeof e->created);
        lg__text_copy(e->note, sizeof e->note, item->rollback.reason);
    }
}

static void describe_other(lg_store *store, const lg__root_item *item, lg_entry *e)
{
    static const lg_entry_kind kinds[] = {
        [LG__ROOT_FOREIGN] = LG_ENTRY_FOREIGN, [LG__ROOT_STEP] = LG_ENTRY_PARTIAL,
        [LG__ROOT_PARTIAL] = LG_ENTRY_PARTIAL, [LG__ROOT_OWNER] = LG_ENTRY_OWNER,
        [LG__ROOT_TRASH] = LG_ENTRY_TRASH,     [LG__ROOT_ROLLBACK] = LG_ENTRY_ROLLBACK,
    };
    e->kind = item->tombstone ? LG_ENTRY_TOMBSTONE : kinds[item->parsed.kind];
    e->step = item->parsed.step;
    e->generation = item->parsed.generation;
    e->bytes = item->bytes;
    if (e->kind == LG_ENTRY_OWNER) {
        lg__owner_who(store, e->generation.epoch, e->note, e->created);
    }
    if (item->type == LG_NODE_DIR && e->kind != LG_ENTRY_FOREIGN) {
        lg_error ignored = LG_ERROR_INIT;
        lg__folder_bytes(store, item->name, &e->bytes, &ignored);
    }
}

static lg_status fill(lg_store *store, lg__walk *w, uint32_t flags, lg_listing *l, lg_error *err)
{
    l->unreadable_newer = w->unreadable_newer;
    l->entries = lg__calloc(w->n + w->n_others, sizeof *l->entries);
    if (l->entries == NULL) {
        return lg__nomem(err);
    }
    bool newest = true;
    for (size_t i = 0; i < w->n; i++) {
        lg_entry *e = &l->entries[l->n];
        set_name(e, w->items[i].name);
        if (w->items[i].is_rollback) {
            describe_rollback(&w->items[i], e);
        } else {
            LG__TRY(describe_checkpoint(store, &w->items[i], e, err));
            e->newest = newest && !e->discarded;
            newest = newest && !e->newest;
        }
        l->n++;
    }
    for (size_t i = 0; (flags & LG_LIST_ALL) != 0 && i < w->n_others; i++) {
        lg_entry *e = &l->entries[l->n++];
        set_name(e, w->others[i].name);
        describe_other(store, &w->others[i], e);
    }
    return LG_OK;
}

lg_status lg_list(const char *root, uint32_t flags, lg_listing **out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(root == NULL || out == NULL, err, LG_ERR_INVALID, "lg_list: no root or no place for the result");
    LG__RETURN_IF((flags & ~(uint32_t)LG_LIST_ALL) != 0, err, LG_ERR_INVALID, "lg_list: unknown flags");
    lg_store *store;
    LG__TRY(lg_store_open(root, &store, err));
    lg__walk *w = NULL;
    lg_listing *l = lg__calloc(1, sizeof *l);
    lg_status st = l == NULL ? lg__nomem(err) : lg__walk_read(store, &w, err);
    if (st == LG_OK) {
        st = fill(store, w, flags, l, err);
    }
    lg__walk_free(w);
    lg_store_free(store);
    if (st != LG_OK) {
        lg_listing_free(l);
        return lg_error_wrap(err, "list %s", root);
    }
    *out = l;
    return LG_OK;
}

void lg_listing_free(lg_listing *listing)
{
    if (listing != NULL) {
        lg__free(listing->entries);
        lg__free(listing);
    }
}
