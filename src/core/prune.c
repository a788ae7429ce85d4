/* SPDX-License-Identifier: Apache-2.0 */

/* Removal by hand: lg_prune and lg_remove. Neither claims the root, so a
 * session that runs goes on: what they remove is always older than a good
 * checkpoint that was just verified in full. */

#include "base/error.h"
#include "base/mem.h"
#include "core/checkpoint.h"
#include "core/owner.h"
#include "core/retention.h"
#include "core/where.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static lg_status verify_item(lg_store *store, const lg__walk_item *item, lg_error *err)
{
    lg_checkpoint *c;
    LG__TRY(lg__checkpoint_open_in(store, false, item->name, item->bytes.data, item->bytes.len, &c, err));
    lg_verify_result result;
    lg_status st = lg_verify(c, NULL, &result, err);
    lg_checkpoint_close(c);
    return st == LG_OK ? LG_OK : lg_error_wrap(err, "%s", item->name);
}

/* Walk, sizes, and the newest good one verified byte by byte; one that fails
 * counts as damaged and the next is tried. */
static lg_status survey_once(lg_store *store, bool *moved, lg__walk **out, lg_error *err)
{
    lg__walk *w;
    LG__TRY(lg__walk_read(store, &w, err));
    lg_status st = LG_OK;
    bool have_good = false;
    *moved = false;
    for (size_t i = 0; st == LG_OK && i < w->n; i++) {
        lg__walk_item *item = &w->items[i];
        st = lg__walk_check_whole(store, item, err);
        if (st != LG_OK || have_good || item->is_rollback || item->discarded || item->status != LG_OK) {
            continue;
        }
        lg_error why = LG_ERROR_INIT;
        lg_status checked = verify_item(store, item, &why);
        if (checked == LG_OK) {
            have_good = true;
        } else if (lg__status_is_damage(checked)) {
            item->status = checked;
            lg__text_copy(item->reason, sizeof item->reason, why.message);
        } else {
            *err = why;
            st = checked;
        }
    }
    for (size_t i = 0; st == LG_OK && i < w->n; i++) {
        const lg__walk_item *item = &w->items[i];
        *moved = *moved || (!item->is_rollback && item->status != LG_OK && lg__folder_gone(store, item->name));
    }
    if (st == LG_OK && !have_good) {
        st = lg_error_set(err, LG_ERR_NO_GOOD, "no checkpoint can be verified, so nothing is removed");
    }
    if (st != LG_OK) {
        lg__walk_free(w);
        return st;
    }
    *out = w;
    return LG_OK;
}

/* Again when checkpoints went meanwhile: which one is the newest may have
 * changed. */
static lg_status survey(lg_store *store, lg__walk **out, lg_error *err)
{
    bool moved = false;
    lg__walk *w = NULL;
    lg_status st = survey_once(store, &moved, &w, err);
    for (int i = 1; i < LG__WALK_TRIES && moved; i++) {
        lg__walk_free(w);
        w = NULL;
        st = survey_once(store, &moved, &w, err);
    }
    if (st == LG_OK) {
        *out = w;
    }
    return st;
}

static lg_status apply(lg_store *store, const lg__walk *w, const lg__verdict *verdicts, bool dry_run,
                       void (*fn)(const lg_prune_item *item, void *arg), void *arg, lg_error *err)
{
    lg_status first = LG_OK;
    lg_error trouble = LG_ERROR_INIT;
    for (size_t i = 0; i < w->n; i++) {
        const lg__walk_item *item = &w->items[i];
        if (item->is_rollback) {
            continue;
        }
        lg_prune_item p = {.step = item->step, .generation = item->generation};
        lg__text_copy(p.name, sizeof p.name, item->name);
        lg__text_copy(p.reason, sizeof p.reason, verdicts[i].why);
        lg_error one = LG_ERROR_INIT;
        lg_status st = lg__folder_bytes(store, item->name, &p.bytes, &one);
        if (st == LG_ERR_NOT_FOUND) {
            continue; /* somebody else removed it */
        }
        if (st == LG_OK && verdicts[i].fate == LG__GOES) {
            st = dry_run ? LG_OK : lg__checkpoint_remove(store, item->name, w->highest_epoch, &one);
            p.removed = st == LG_OK;
        }
        if (st != LG_OK) {
            snprintf(p.reason, sizeof p.reason, "not removed: %.200s", one.message);
            if (first == LG_OK) {
                first = st;
                trouble = one;
            }
        }
        if (fn != NULL) {
            fn(&p, arg);
        }
    }
    if (first != LG_OK) {
        *err = trouble;
    }
    return first;
}

lg_status lg_prune(const char *root, const lg_prune_options *options, void (*fn)(const lg_prune_item *item, void *arg),
                   void *arg, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(root == NULL || options == NULL || options->size != sizeof *options, err, LG_ERR_INVALID,
                  "lg_prune: no root, or options not set up with LG_PRUNE_OPTIONS_INIT");
    LG__RETURN_IF(options->keep_last == 0, err, LG_ERR_INVALID,
                  "prune needs to know how many of the last checkpoints stay: keep_last is 0");
    lg_store *store;
    LG__TRY(lg_store_open(root, &store, err));
    lg__walk *w = NULL;
    lg_status st = survey(store, &w, err);
    lg__verdict *verdicts = NULL;
    if (st == LG_OK && (verdicts = lg__calloc(w->n, sizeof *verdicts)) == NULL) {
        st = lg__nomem(err);
    }
    if (st == LG_OK) {
        st = lg__retention_judge(store, w, options->keep_last, options->keep_every, verdicts, err);
    }
    if (st == LG_OK) {
        st = apply(store, w, verdicts, options->dry_run != 0, fn, arg, err);
    }
    lg__free(verdicts);
    lg__walk_free(w);
    lg_store_free(store);
    return st == LG_OK ? LG_OK : lg_error_wrap(err, "prune %s", root);
}

/* May this one go? There must be another good one, newer or older, verified; but
 * not for the `last` one. */
static lg_status may_remove(lg_store *store, lg__walk *w, const lg__walk_item *item, bool last, lg_error *err)
{
    LG__RETURN_IF(w->unreadable_newer, err, LG_ERR_PROTECTED,
                  "the root holds a checkpoint of a newer version of lastgood: nothing is removed");
    lg__pin_state pin;
    LG__TRY(lg__pin_read(store, item->name, item->m != NULL ? item->m->sha256 : NULL, &pin, err));
    LG__RETURN_IF(pin.pinned, err, LG_ERR_PROTECTED, "%s is pinned%s%s; unpin it first", item->name,
                  pin.reason[0] != '\0' ? ": " : "", pin.reason);
    if (last) {
        return LG_OK;
    }
    for (size_t i = 0; i < w->n; i++) {
        lg__walk_item *other = &w->items[i];
        if (other == item || other->is_rollback || other->discarded || other->status != LG_OK) {
            continue;
        }
        lg_error why = LG_ERROR_INIT;
        lg_status st = verify_item(store, other, &why);
        if (st == LG_OK) {
            return LG_OK;
        }
        if (!lg__status_is_damage(st)) { /* no word on whether it is good */
            *err = why;
            return st;
        }
    }
    return lg_error_set(err, LG_ERR_PROTECTED, "%s is the last checkpoint here that may be good; it stays", item->name);
}

static lg_status remove_one(const char *where, bool last, lg_error *err)
{
    lg_store *store;
    lg__walk *walk;
    lg__walk_item *item = NULL;
    lg__where w;
    LG__TRY(lg__where_parse(where, &w, err));
    bool is_root = w.kind == LG__WHERE_ROOT;
    lg__where_free(&w);
    LG__RETURN_IF(is_root, err, LG_ERR_INVALID, "%s is a root; name the checkpoint to remove, as %s@STEP", where,
                  where);
    LG__TRY(lg__where_find(where, &store, &walk, &item, err));
    lg_status st = may_remove(store, walk, item, last, err);
    if (st == LG_OK) {
        st = lg__checkpoint_remove(store, item->name, walk->highest_epoch, err);
    }
    lg__walk_free(walk);
    lg_store_free(store);
    return st == LG_OK ? LG_OK : lg_error_wrap(err, "remove %s", where);
}

lg_status lg_remove(const char *where, lg_error *err)
{
    LG__ERR(err);
    return remove_one(where, false, err);
}

lg_status lg_remove_last(const char *where, lg_error *err)
{
    LG__ERR(err);
    return remove_one(where, true, err);
}
