/* SPDX-License-Identifier: Apache-2.0 */
#include "core/where.h"

#include "base/error.h"
#include "base/mem.h"
#include "core/checkpoint.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What an error is about, unless the store has said it already. */
static void name_it(lg_error *err, const char *where)
{
    const size_t n = strlen(where);
    if (strncmp(err->message, where, n) != 0 || err->message[n] != ':') {
        lg_error_wrap(err, "%s", where);
    }
}

static bool parse_number(const char **p, uint64_t *out)
{
    const char *s = *p;
    uint64_t v = 0;
    if (*s < '0' || *s > '9') {
        return false;
    }
    for (; *s >= '0' && *s <= '9'; s++) {
        uint64_t d = (uint64_t)(*s - '0');
        if (v > (UINT64_MAX - d) / 10) {
            return false;
        }
        v = v * 10 + d;
    }
    *p = s;
    *out = v;
    return true;
}

/* "@500" or "@g3.17" at the end of `where`. */
static bool parse_selector(const char *at, lg__where *out)
{
    const char *p = at + 1;
    if (*p == 'g') {
        p++;
        out->kind = LG__WHERE_GENERATION;
        return parse_number(&p, &out->generation.epoch) && *p++ == '.' && parse_number(&p, &out->generation.serial) &&
               *p == '\0';
    }
    out->kind = LG__WHERE_STEP;
    return parse_number(&p, &out->step) && *p == '\0';
}

static lg_status holds_manifest(const char *path, bool *out, lg_error *err)
{
    lg_store *store;
    *out = false;
    LG__TRY(lg_store_open(path, &store, err));
    lg_status st = lg__store_exists(store, "", LG__MANIFEST, out, err);
    lg_store_free(store);
    return st;
}

static lg_status split_folder(const char *where, lg__where *out, lg_error *err)
{
    size_t n = strlen(where);
    while (n > 1 && where[n - 1] == '/') {
        n--;
    }
    size_t cut = n;
    while (cut > 0 && where[cut - 1] != '/') {
        cut--;
    }
    const char *name = where + cut;
    size_t name_bytes = n - cut;
    const char *colon = cut == 0 ? memchr(name, ':', name_bytes) : NULL;
    if (colon != NULL && strncmp(where, "file:", 5) == 0) {
        cut = 5;
        name = where + 5;
        name_bytes = n - 5;
    }
    LG__RETURN_IF(name_bytes == 0 || name_bytes >= sizeof out->folder || (name_bytes == 1 && name[0] == '.') ||
                      (name_bytes == 2 && name[0] == '.' && name[1] == '.'),
                  err, LG_ERR_INVALID, "%s is a step folder: name it by its own name or as ROOT@STEP", where);
    memcpy(out->folder, name, name_bytes);
    out->folder[name_bytes] = '\0';
    /* "name" alone lies in "."; "/name" in "/"; "file:name" in "file:.". */
    size_t keep = cut > 1 && where[cut - 1] == '/' ? cut - 1 : cut;
    char *root = lg__malloc(keep + 2);
    if (root == NULL) {
        return lg__nomem(err);
    }
    memcpy(root, where, keep);
    root[keep] = '\0';
    if (keep == 0 || root[keep - 1] == ':') {
        memcpy(root + keep, ".", 2);
    }
    out->root = root;
    out->kind = LG__WHERE_FOLDER;
    return LG_OK;
}

/* Does the path end in a name that only a folder inside a root has? Then it is
 * meant as such, even if its manifest is gone. */
static lg__root_kind last_name(const char *where)
{
    size_t n = strlen(where);
    while (n > 1 && where[n - 1] == '/') {
        n--;
    }
    size_t cut = n;
    while (cut > 0 && where[cut - 1] != '/') {
        cut--;
    }
    if (cut == 0 && n >= 5 && strncmp(where, "file:", 5) == 0) {
        cut = 5;
    }
    char name[LG__NAME_MAX];
    if (n - cut >= sizeof name) {
        return LG__ROOT_FOREIGN;
    }
    memcpy(name, where + cut, n - cut);
    name[n - cut] = '\0';
    return lg__root_name_parse(name).kind;
}

lg_status lg__where_parse(const char *where, lg__where *out, lg_error *err)
{
    LG__RETURN_IF(where == NULL || *where == '\0', err, LG_ERR_INVALID, "no root or step folder given");
    *out = (lg__where){0};
    const char *at = strrchr(where, '@');
    lg__where selected = {0};
    bool has_selector = at != NULL && at != where && parse_selector(at, &selected);
    bool manifest = false;
    lg_error why = LG_ERROR_INIT;
    lg_status st = holds_manifest(where, &manifest, &why);
    /* A path that exists is meant as it stands, even with an @ in it. */
    if (st != LG_OK && has_selector) {
        *out = selected;
        out->root = lg__strdup(where);
        if (out->root == NULL) {
            return lg__nomem(err);
        }
        out->root[at - where] = '\0';
        return LG_OK;
    }
    if (st != LG_OK) {
        *err = why;
        name_it(err, where);
        return st;
    }
    lg__root_kind kind = last_name(where);
    LG__RETURN_IF(kind == LG__ROOT_PARTIAL, err, LG_ERR_NOT_FOUND,
                  "%s is an attempt that was not committed, not a checkpoint", where);
    LG__RETURN_IF(kind == LG__ROOT_TRASH, err, LG_ERR_NOT_FOUND,
                  "%s was renamed to be removed: it is no checkpoint any more", where);
    if (manifest || kind == LG__ROOT_STEP) {
        return split_folder(where, out, err);
    }
    out->kind = LG__WHERE_ROOT;
    out->root = lg__strdup(where);
    return out->root != NULL ? LG_OK : lg__nomem(err);
}

void lg__where_free(lg__where *w)
{
    lg__free(w->root);
    w->root = NULL;
}

static bool meant(const lg__where *w, const lg__walk_item *item)
{
    switch (w->kind) {
    case LG__WHERE_FOLDER:
        return strcmp(w->folder, item->name) == 0;
    case LG__WHERE_STEP:
        return item->step == w->step;
    case LG__WHERE_GENERATION:
        return lg_generation_compare(item->generation, w->generation) == 0;
    default:
        return !item->discarded;
    }
}

/* A generation that two folders claim names neither of them. */
static bool claimed_twice(const lg__walk *walk, const lg__walk_item *item)
{
    for (size_t i = 0; i < walk->n; i++) {
        const lg__walk_item *other = &walk->items[i];
        if (other != item && !other->is_rollback && lg_generation_compare(other->generation, item->generation) == 0) {
            return true;
        }
    }
    return false;
}

static lg_status find(lg_store *store, const lg__where *w, lg__walk *walk, lg__walk_item **out, lg_error *err)
{
    size_t damaged = 0;
    lg__walk_item *first = NULL;
    for (size_t i = 0; i < walk->n; i++) {
        lg__walk_item *item = &walk->items[i];
        /* As lg_resume: past these nobody goes on unasked. */
        LG__RETURN_IF(w->kind == LG__WHERE_ROOT && !item->discarded &&
                          (lg__walk_must_ask(item->status) || (item->is_rollback && item->status != LG_OK)),
                      err, item->status, "%s: %s", item->name, item->reason);
        if (item->is_rollback || !meant(w, item)) {
            continue;
        }
        LG__RETURN_IF(w->kind == LG__WHERE_GENERATION && claimed_twice(walk, item), err, LG_ERR_CONFLICT,
                      "%s is not the only checkpoint that claims generation %" PRIu64 ".%" PRIu64
                      ": name one by its step or its folder",
                      item->name, item->generation.epoch, item->generation.serial);
        if (w->kind != LG__WHERE_ROOT) {
            *out = item;
            return LG_OK;
        }
        LG__TRY(lg__walk_check_whole(store, item, err));
        if (item->status == LG_OK) {
            *out = item;
            return LG_OK;
        }
        first = first == NULL ? item : first;
        damaged++;
    }
    switch (w->kind) {
    case LG__WHERE_STEP:
        return lg_error_set(err, LG_ERR_NOT_FOUND, "there is no checkpoint of step %" PRIu64, w->step);
    case LG__WHERE_GENERATION:
        return lg_error_set(err, LG_ERR_NOT_FOUND, "there is no checkpoint of generation %" PRIu64 ".%" PRIu64,
                            w->generation.epoch, w->generation.serial);
    case LG__WHERE_FOLDER:
        return lg_error_set(err, LG_ERR_NOT_FOUND, "there is no step folder %s", w->folder);
    default:
        break;
    }
    if (damaged > 0) {
        return lg_error_set(err, LG_ERR_NO_GOOD, "none of its %zu checkpoints is good; the newest, %s: %s", damaged,
                            first->name, first->reason);
    }
    return lg_error_set(err, LG_ERR_EMPTY, "it holds no checkpoint");
}

/* A step folder that was moved away from its root may have any name, so that
 * the walk of the folder it lies in does not see it. */
static lg_status add_moved(lg_store *store, const lg__where *w, lg__walk *walk, lg_error *err)
{
    for (size_t i = 0; i < walk->n; i++) {
        if (strcmp(walk->items[i].name, w->folder) == 0) {
            return LG_OK;
        }
    }
    char path[2 * LG__NAME_MAX];
    lg__path_join(path, sizeof path, w->folder, LG__MANIFEST);
    if (!lg__grow((void **)&walk->items, &walk->cap, walk->n, sizeof *walk->items)) {
        return lg__nomem(err);
    }
    lg__walk_item *item = &walk->items[walk->n];
    *item = (lg__walk_item){0};
    lg__text_copy(item->name, sizeof item->name, w->folder);
    lg__buf_init(&item->bytes, LG__MANIFEST_MAX);
    lg_status st = lg__store_read_all(store, path, &item->bytes, err);
    if (st == LG_OK) {
        st = lg__manifest_decode(item->bytes.data, item->bytes.len, &item->m, err);
    }
    if (st == LG_OK && item->m->tombstone) {
        st = lg_error_set(err, LG_ERR_NOT_FOUND, "it was left by an attempt that was ended, not by a checkpoint");
    }
    if (st != LG_OK) {
        lg__manifest_free(item->m);
        lg__buf_free(&item->bytes);
        return lg_error_wrap(err, "%s", path);
    }
    item->generation = item->m->generation;
    item->step = item->m->step;
    walk->n++;
    return LG_OK;
}

/* Were some that did not count as good removed meanwhile? Then there may be a
 * newer one by now. */
static bool has_moved(lg_store *store, const lg__walk *walk)
{
    for (size_t i = 0; i < walk->n; i++) {
        const lg__walk_item *item = &walk->items[i];
        if (!item->is_rollback && item->status != LG_OK && lg__folder_gone(store, item->name)) {
            return true;
        }
    }
    return false;
}

lg_status lg__where_find(const char *where, lg_store **store, lg__walk **walk, lg__walk_item **item, lg_error *err)
{
    lg__where w;
    LG__TRY(lg__where_parse(where, &w, err));
    lg_store *s = NULL;
    lg__walk *found = NULL;
    lg_status st = lg_store_open(w.root, &s, err);
    if (st == LG_OK) {
        st = lg__walk_read(s, &found, err);
    }
    if (st == LG_OK && w.kind == LG__WHERE_FOLDER) {
        st = add_moved(s, &w, found, err);
    }
    if (st == LG_OK) {
        st = find(s, &w, found, item, err);
    }
    /* That there is none is never decided by one look alone: a listing may miss what
     * is renamed while it is made, and on stores without folder rename one that is
     * being removed looks like an attempt. */
    for (int i = 1; i < LG__WALK_TRIES && w.kind == LG__WHERE_ROOT && found != NULL &&
                    (has_moved(s, found) || (i == 1 && (st == LG_ERR_EMPTY || st == LG_ERR_NO_GOOD)));
         i++) {
        lg__walk_free(found);
        found = NULL;
        st = lg__walk_read(s, &found, err);
        if (st == LG_OK) {
            st = find(s, &w, found, item, err);
        }
    }
    if (st != LG_OK) {
        lg__walk_free(found);
        lg_store_free(s);
        name_it(err, w.root);
    } else {
        *store = s;
        *walk = found;
    }
    lg__where_free(&w);
    return st;
}

lg_status lg_checkpoint_open(const char *where, lg_checkpoint **out, lg_error *err)
{
    LG__ERR(err);
    lg_store *store;
    lg__walk *walk;
    lg__walk_item *item = NULL;
    LG__TRY(lg__where_find(where, &store, &walk, &item, err));
    lg_status st;
    if (item->m != NULL) {
        st = lg__checkpoint_open_decoded(store, true, item->name, item->m, out, err);
        item->m = st == LG_OK ? NULL : item->m;
    } else {
        /* The folder is there; what is not found is its manifest. */
        st = item->status == LG_ERR_NOT_FOUND ? LG_ERR_NOT_WHOLE : item->status;
        lg_error_set(err, st, "%s: %s", item->name, item->reason);
    }
    lg__walk_free(walk);
    if (st != LG_OK) {
        lg_store_free(store);
        name_it(err, where);
    }
    return st;
}
