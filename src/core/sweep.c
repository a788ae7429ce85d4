/* SPDX-License-Identifier: Apache-2.0 */
#include "core/sweep.h"

#include "base/error.h"
#include "core/owner.h"

#include <string.h>

static bool all_newer_than(const lg__walk *w, lg_generation tombstone)
{
    size_t committed = 0;
    for (size_t i = 0; i < w->n; i++) {
        if (w->items[i].is_rollback) {
            continue;
        }
        committed++;
        if (lg_generation_compare(w->items[i].generation, tombstone) <= 0) {
            return false;
        }
    }
    return committed > 0;
}

/* Trash may go at once whoever made it: its commit or removal is decided. */
static bool may_go(const lg_store *store, const lg__walk *w, const lg__root_item *item, uint64_t epoch)
{
    switch (item->parsed.kind) {
    case LG__ROOT_TRASH:
        return item->parsed.generation.epoch <= epoch;
    case LG__ROOT_PARTIAL:
        return item->parsed.generation.epoch < epoch;
    case LG__ROOT_STEP:
        return item->tombstone && item->parsed.generation.epoch < epoch && !lg__store_can(store, LG_CAP_RENAME_DIR) &&
               all_newer_than(w, item->parsed.generation);
    default:
        return false;
    }
}

static lg_status remove_one(lg_store *store, const lg__root_item *item, uint64_t epoch, lg_error *err)
{
    bool partial = item->parsed.kind == LG__ROOT_PARTIAL;
    if (partial && lg__store_can(store, LG_CAP_RENAME_DIR)) {
        lg_status st =
            lg__attempt_end(store, item->name, "", item->parsed.generation, item->parsed.attempt, epoch, err);
        return st == LG_ERR_EXISTS ? LG_OK : st;
    }
    if (item->parsed.kind == LG__ROOT_STEP) {
        return lg__checkpoint_remove(store, item->name, epoch, err);
    }
    return lg__folder_remove(store, item->name, err);
}

/* Who renamed a checkpoint to trash may have died before that was durable: else
 * a cut of the power could bring the old name back, with what is left in it. */
static lg_status settle_trash(lg_store *store, const lg__walk *w, lg_error *err)
{
    for (size_t i = 0; i < w->n_others; i++) {
        if (w->others[i].parsed.kind == LG__ROOT_TRASH) {
            return lg__store_sync_dir(store, "", err);
        }
    }
    return LG_OK;
}

lg_status lg__sweep_root(lg_store *store, uint64_t epoch, bool dry_run,
                         void (*fn)(const char *name, uint64_t bytes, void *arg), void *arg, lg_error *err)
{
    lg__walk *w;
    LG__TRY(lg__walk_read(store, &w, err));
    lg_status first = LG_OK;
    lg_error trouble = LG_ERROR_INIT;
    if (w->unreadable_newer) {
        first = lg_error_set(&trouble, LG_ERR_VERSION,
                             "the root holds a checkpoint of a newer version of lastgood: nothing is removed");
    }
    if (first == LG_OK && !dry_run) {
        first = settle_trash(store, w, &trouble);
    }
    const bool go = first == LG_OK;
    for (size_t i = 0; go && i < w->n_others; i++) {
        const lg__root_item *item = &w->others[i];
        if (!may_go(store, w, item, epoch)) {
            continue;
        }
        uint64_t bytes = 0;
        lg_error one = LG_ERROR_INIT;
        lg_status st = lg__folder_bytes(store, item->name, &bytes, &one);
        if (st == LG_ERR_NOT_FOUND) {
            continue; /* another one swept it */
        }
        if (st == LG_OK && !dry_run) {
            st = remove_one(store, item, epoch, &one);
        }
        if (st == LG_OK && fn != NULL) {
            fn(item->name, bytes, arg);
        }
        if (st != LG_OK && first == LG_OK) {
            first = st;
            trouble = one;
        }
    }
    lg__walk_free(w);
    if (first != LG_OK) {
        *err = trouble;
    }
    return first;
}

lg_status lg_sweep(const char *root, int dry_run, void (*fn)(const char *name, uint64_t bytes, void *arg), void *arg,
                   lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(root == NULL, err, LG_ERR_INVALID, "lg_sweep: no root given");
    lg_store *store;
    LG__TRY(lg_store_open(root, &store, err));
    uint64_t highest = 0;
    lg_status st = lg__root_highest_owner(store, &highest, err);
    if (st == LG_OK) {
        st = lg__sweep_root(store, highest, dry_run != 0, fn, arg, err);
    }
    lg_store_free(store);
    return st == LG_OK ? LG_OK : lg_error_wrap(err, "sweep %s", root);
}
