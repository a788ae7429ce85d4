/* SPDX-License-Identifier: Apache-2.0 */
#include "core/walk.h"

#include "base/error.h"
#include "base/mem.h"
#include "core/checkpoint.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int lg_generation_compare(lg_generation a, lg_generation b)
{
    if (a.epoch != b.epoch) {
        return a.epoch < b.epoch ? -1 : 1;
    }
    return (a.serial > b.serial) - (a.serial < b.serial);
}

/* ------------------------------------------------------------- the names */

typedef struct scan {
    lg__root_item *items;
    size_t n, cap;
    bool failed;
} scan;

static int take_name(const lg_node *node, void *arg)
{
    scan *s = arg;
    if (!lg__grow((void **)&s->items, &s->cap, s->n, sizeof *s->items)) {
        s->failed = true;
        return 1;
    }
    lg__root_item *item = &s->items[s->n++];
    *item = (lg__root_item){.type = node->type, .bytes = node->bytes};
    lg__text_copy(item->name, sizeof item->name, node->name);
    item->parsed = lg__root_name_parse(node->name);
    lg__root_kind kind = item->parsed.kind;
    bool is_dir = kind == LG__ROOT_STEP || kind == LG__ROOT_PARTIAL || kind == LG__ROOT_TRASH;
    bool is_file = kind == LG__ROOT_OWNER || kind == LG__ROOT_ROLLBACK;
    if ((is_dir && node->type != LG_NODE_DIR) || (is_file && node->type != LG_NODE_FILE)) {
        item->parsed = (lg__root_name){.kind = LG__ROOT_FOREIGN};
    }
    return 0;
}

static lg_status scan_root(lg_store *store, scan *out, lg_error *err)
{
    *out = (scan){0};
    lg_status st = lg__store_list(store, "", take_name, out, err);
    if (st == LG_OK && out->failed) {
        st = lg__nomem(err);
    }
    if (st != LG_OK) {
        lg__free(out->items);
        *out = (scan){0};
    }
    return st;
}

lg_status lg__root_highest_owner(lg_store *store, uint64_t *out, lg_error *err)
{
    scan s;
    LG__TRY(scan_root(store, &s, err));
    uint64_t highest = 0;
    for (size_t i = 0; i < s.n; i++) {
        const lg__root_name *p = &s.items[i].parsed;
        if (p->kind == LG__ROOT_OWNER && p->generation.epoch > highest) {
            highest = p->generation.epoch;
        }
    }
    lg__free(s.items);
    *out = highest;
    return LG_OK;
}

/* ------------------------------------------------------------ one item */

static void set_reason(lg__walk_item *item, lg_status status, const char *reason)
{
    item->status = status;
    lg__text_copy(item->reason, sizeof item->reason, reason);
}

/* Trouble that says something about the item itself, not about the machine
 * that looks at it. */
static bool about_the_file(lg_status st)
{
    switch (st) {
    case LG_ERR_CORRUPT:
    case LG_ERR_FORMAT:
    case LG_ERR_VERSION:
    case LG_ERR_NOT_FOUND:
    case LG_ERR_LIMIT:
    case LG_ERR_COVERAGE:
    case LG_ERR_IO:
    case LG_ERR_INVALID:
    case LG_ERR_MISMATCH:
    case LG_ERR_PERMISSION: /* others can be looked at all the same */
        return true;
    default:
        return false;
    }
}

static lg_status read_manifest(lg_store *store, lg__walk_item *item, lg_error *err)
{
    char path[2 * LG__NAME_MAX];
    lg__path_join(path, sizeof path, item->name, LG__MANIFEST);
    lg__buf_init(&item->bytes, LG__MANIFEST_MAX);
    lg_status st = lg__store_read_all(store, path, &item->bytes, err);
    if (st == LG_OK) {
        st = lg__manifest_decode(item->bytes.data, item->bytes.len, &item->m, err);
        if (st != LG_OK) {
            lg_error_wrap(err, "%s", LG__MANIFEST);
        }
    } else if (st == LG_ERR_NOT_FOUND) {
        lg_error_set(err, st, "%s is missing", LG__MANIFEST);
    }
    if (st == LG_OK) {
        item->generation = item->m->generation;
        item->step = item->m->tombstone ? item->step : item->m->step;
        return LG_OK;
    }
    if (!about_the_file(st)) {
        return lg_error_wrap(err, "%s", item->name);
    }
    set_reason(item, st, err->message);
    return LG_OK;
}

static lg_status read_rollback(lg_store *store, lg__walk_item *item, lg_error *err)
{
    lg__buf text;
    lg__buf_init(&text, LG__RECORD_MAX);
    lg_status st = lg__store_read_all(store, item->name, &text, err);
    if (st == LG_OK) {
        st = lg__rollback_decode(text.data, text.len, &item->rollback, err);
    }
    if (st == LG_OK && lg_generation_compare(item->rollback.generation, item->generation) != 0) {
        st = lg_error_set(err, LG_ERR_FORMAT, "it is the record of another generation (%" PRIu64 ".%" PRIu64 ")",
                          item->rollback.generation.epoch, item->rollback.generation.serial);
    }
    if (st == LG_OK && lg_generation_compare(item->rollback.target, item->generation) >= 0) {
        st = lg_error_set(err, LG_ERR_FORMAT, "it leads forward, to a later generation");
    }
    lg__buf_free(&text);
    if (st != LG_OK && !about_the_file(st)) {
        return lg_error_wrap(err, "%s", item->name);
    }
    if (st != LG_OK) {
        set_reason(item, st, err->message);
    }
    return LG_OK;
}

/* ------------------------------------------------------------ the walk */

static int newest_first(const void *a, const void *b)
{
    const lg__walk_item *x = a, *y = b;
    int order = lg_generation_compare(y->generation, x->generation);
    return order != 0 ? order : strcmp(x->name, y->name);
}

static void item_free(lg__walk_item *item)
{
    lg__buf_free(&item->bytes);
    lg__manifest_free(item->m);
}

void lg__walk_free(lg__walk *w)
{
    if (w == NULL) {
        return;
    }
    for (size_t i = 0; i < w->n; i++) {
        item_free(&w->items[i]);
    }
    lg__free(w->items);
    lg__free(w->others);
    lg__free(w);
}

/* Two manifests of one generation: a copy of the folder is harmless (one of
 * them is dropped); different attempts are a contradiction that a person must
 * solve. */
static void settle_twins(lg__walk *w)
{
    size_t kept = 0;
    for (size_t i = 0; i < w->n; i++) {
        lg__walk_item *item = &w->items[i];
        lg__walk_item *before = kept > 0 ? &w->items[kept - 1] : NULL;
        bool twin = before != NULL && !item->is_rollback && !before->is_rollback && item->m != NULL &&
                    before->m != NULL && lg_generation_compare(item->generation, before->generation) == 0;
        if (twin && strcmp(item->m->attempt, before->m->attempt) == 0 &&
            memcmp(item->m->sha256, before->m->sha256, LG__SHA256_BYTES) == 0) {
            item_free(item);
            continue;
        }
        if (twin) {
            char text[LG__REASON_MAX];
            snprintf(text, sizeof text,
                     "two checkpoints claim generation %" PRIu64 ".%" PRIu64
                     " but are different attempts: %.120s (%s) and %.120s (%s); move one of them away",
                     item->generation.epoch, item->generation.serial, before->name, before->m->attempt, item->name,
                     item->m->attempt);
            set_reason(item, LG_ERR_CONFLICT, text);
            set_reason(before, LG_ERR_CONFLICT, text);
        }
        if (kept != i) {
            w->items[kept] = *item;
        }
        kept++;
    }
    w->n = kept;
}

/* At a record the walk goes on at its target; what lies between is discarded,
 * records included. */
static void follow_records(lg__walk *w)
{
    size_t i = 0;
    while (i < w->n) {
        lg__walk_item *item = &w->items[i++];
        if (!item->is_rollback || item->status != LG_OK) {
            continue;
        }
        while (i < w->n && lg_generation_compare(w->items[i].generation, item->rollback.target) > 0) {
            w->items[i++].discarded = true;
        }
    }
}

static lg_status add_other(lg__walk *w, const lg__root_item *item, bool tombstone, lg_error *err)
{
    if (!lg__grow((void **)&w->others, &w->cap_others, w->n_others, sizeof *w->others)) {
        return lg__nomem(err);
    }
    w->others[w->n_others] = *item;
    w->others[w->n_others++].tombstone = tombstone;
    return LG_OK;
}

static void note_epoch(lg__walk *w, uint64_t epoch, const char *name)
{
    if (epoch > w->highest_epoch) {
        w->highest_epoch = epoch;
        lg__text_copy(w->highest_name, sizeof w->highest_name, name);
    }
}

static lg_status add_item(lg__walk *w, lg_store *store, const lg__root_item *name, bool *moved, lg_error *err)
{
    if (!lg__grow((void **)&w->items, &w->cap, w->n, sizeof *w->items)) {
        return lg__nomem(err);
    }
    lg__walk_item *item = &w->items[w->n];
    *item = (lg__walk_item){.generation = name->parsed.generation, .step = name->parsed.step};
    lg__text_copy(item->name, sizeof item->name, name->name);
    item->is_rollback = name->parsed.kind == LG__ROOT_ROLLBACK;
    lg_status st = item->is_rollback ? read_rollback(store, item, err) : read_manifest(store, item, err);
    if (st != LG_OK) {
        item_free(item);
        return st;
    }
    bool can_rename = lg__store_can(store, LG_CAP_RENAME_DIR);
    *moved = *moved || (item->status == LG_ERR_NOT_FOUND && can_rename && lg__folder_gone(store, item->name));
    bool unfinished = item->status == LG_ERR_NOT_FOUND && !can_rename;
    bool tombstone = item->m != NULL && item->m->tombstone;
    note_epoch(w, item->generation.epoch, item->name);
    if (unfinished || tombstone) {
        item_free(item);
        return add_other(w, name, tombstone, err);
    }
    w->unreadable_newer = w->unreadable_newer || item->status == LG_ERR_VERSION;
    w->n++;
    return LG_OK;
}

/* *moved: a checkpoint was removed between its listing and its reading. */
static lg_status walk_once(lg_store *store, bool *moved, lg__walk **out, lg_error *err)
{
    scan s;
    *moved = false;
    LG__TRY(scan_root(store, &s, err));
    lg__walk *w = lg__calloc(1, sizeof *w);
    lg_status st = w == NULL ? lg__nomem(err) : LG_OK;
    for (size_t i = 0; st == LG_OK && i < s.n; i++) {
        const lg__root_item *item = &s.items[i];
        const lg__root_name *p = &item->parsed;
        if (p->kind != LG__ROOT_FOREIGN) {
            note_epoch(w, p->generation.epoch, item->name);
        }
        if (p->kind == LG__ROOT_OWNER && p->generation.epoch > w->highest_owner) {
            w->highest_owner = p->generation.epoch;
        }
        bool counts = p->kind == LG__ROOT_STEP || p->kind == LG__ROOT_ROLLBACK;
        st = counts ? add_item(w, store, item, moved, err) : add_other(w, item, false, err);
    }
    lg__free(s.items);
    if (st != LG_OK) {
        lg__walk_free(w);
        return st;
    }
    if (w->n > 1) {
        qsort(w->items, w->n, sizeof *w->items, newest_first);
    }
    settle_twins(w);
    follow_records(w);
    *out = w;
    return LG_OK;
}

lg_status lg__walk_read(lg_store *store, lg__walk **out, lg_error *err)
{
    lg__walk *w = NULL;
    bool moved;
    LG__TRY(walk_once(store, &moved, &w, err));
    /* Again, since what took its place may have been listed or not. */
    for (int i = 1; i < LG__WALK_TRIES && moved; i++) {
        lg__walk_free(w);
        LG__TRY(walk_once(store, &moved, &w, err));
    }
    *out = w;
    return LG_OK;
}

bool lg__folder_gone(lg_store *store, const char *folder)
{
    bool there = false;
    lg_error look = LG_ERROR_INIT;
    bool can_rename = lg__store_can(store, LG_CAP_RENAME_DIR);
    lg_status st = can_rename ? lg__store_exists(store, "", folder, &there, &look)
                              : lg__store_exists(store, folder, LG__MANIFEST, &there, &look);
    return st == LG_OK ? !there : st == LG_ERR_NOT_FOUND;
}

lg_status lg__walk_check_whole(lg_store *store, lg__walk_item *item, lg_error *err)
{
    if (item->status != LG_OK || item->is_rollback) {
        return LG_OK;
    }
    lg_checkpoint *c = NULL;
    lg_status st = lg__checkpoint_open_decoded(store, false, item->name, item->m, &c, err);
    if (st == LG_OK) {
        st = lg__checkpoint_check_whole(c, err);
        c->borrows_manifest = true; /* it stays the item's */
        lg_checkpoint_close(c);
    }
    if (st != LG_OK && (lg__status_is_damage(st) || about_the_file(st))) {
        set_reason(item, st, err->message);
        return LG_OK;
    }
    return st;
}

/* ---------------------------------------------------------------- pins */

typedef struct pin_scan {
    uint32_t *n;
    size_t used, cap;
    bool failed;
} pin_scan;

static int take_pin(const lg_node *node, void *arg)
{
    pin_scan *s = arg;
    char kind[32];
    uint32_t n;
    if (node->type != LG_NODE_FILE || !lg__side_name_parse(node->name, kind, &n) || strcmp(kind, "pin") != 0) {
        return 0;
    }
    if (!lg__grow((void **)&s->n, &s->cap, s->used, sizeof *s->n)) {
        s->failed = true;
        return 1;
    }
    s->n[s->used++] = n;
    return 0;
}

lg_status lg__pin_read(lg_store *store, const char *folder, const uint8_t *manifest, lg__pin_state *out, lg_error *err)
{
    pin_scan s = {0};
    lg_status st = lg__store_list(store, folder, take_pin, &s, err);
    if (st == LG_ERR_NOT_FOUND) {
        st = LG_OK;
    }
    if (st == LG_OK && s.failed) {
        st = lg__nomem(err);
    }
    lg__pin_state state = {0};
    uint32_t decided = 0;
    for (size_t i = 0; st == LG_OK && i < s.used; i++) {
        char name[LG__NAME_MAX], path[2 * LG__NAME_MAX];
        lg__side_file("pin", s.n[i], name);
        lg__path_join(path, sizeof path, folder, name);
        lg__buf text;
        lg__buf_init(&text, LG__RECORD_MAX);
        lg__pin_record r;
        lg_error why = LG_ERROR_INIT;
        lg_status got = lg__store_read_all(store, path, &text, &why);
        if (got == LG_OK) {
            got = lg__pin_decode(text.data, text.len, &r, &why);
        }
        lg__buf_free(&text);
        state.highest = s.n[i] > state.highest ? s.n[i] : state.highest;
        if (got == LG_OK && manifest != NULL && memcmp(r.manifest, manifest, LG__SHA256_BYTES) != 0) {
            continue; /* of another checkpoint: copied here */
        }
        if (s.n[i] < decided) {
            continue;
        }
        decided = s.n[i];
        if (got == LG_OK) {
            state.pinned = r.pinned;
            lg__text_copy(state.reason, sizeof state.reason, r.reason);
        } else {
            state.pinned = true;
            snprintf(state.reason, sizeof state.reason, "%.100s cannot be read: %.120s", name, why.message);
        }
    }
    lg__free(s.n);
    if (st == LG_OK) {
        *out = state;
    }
    return st;
}
