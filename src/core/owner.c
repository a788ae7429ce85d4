/* SPDX-License-Identifier: Apache-2.0 */
#include "core/owner.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/mem.h"
#include "core/sweep.h"
#include "format/member.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define CLAIM_TRIES 1000

static lg_status owner_text(const char *domain, bool plain, uint64_t epoch, lg__buf *out, lg_error *err)
{
    char now[LG_CREATED_TEXT];
    lg__utc(now);
    lg__buf body;
    lg__buf_init(&body, LG__RECORD_MAX);
    lg__buf_fmt(&body, "\"kind\":\"owner\",\"version\":1,\"epoch\":");
    lg__buf_json_u64(&body, epoch);
    lg__buf_fmt(&body, ",\"domain\":");
    lg__buf_json_str(&body, domain, strlen(domain));
    lg__buf_fmt(&body, ",\"created\":\"%s\"%s}", now, plain ? ",\"plain\":true" : "");
    lg_status st = lg__buf_check(&body, "owner record", err);
    if (st == LG_OK) {
        st = lg__sealed_json(body.data, body.len, out, err);
    }
    lg__buf_free(&body);
    return st;
}

void lg__owner_who(lg_store *store, uint64_t epoch, char domain[256], char created[LG_CREATED_TEXT])
{
    char name[LG__NAME_MAX];
    lg__owner_file(epoch, name);
    lg__buf text;
    lg__buf_init(&text, LG__RECORD_MAX);
    json_t *record = NULL;
    lg_error ignored = LG_ERROR_INIT;
    const char *who = "", *when = "";
    if (lg__store_read_all(store, name, &text, &ignored) == LG_OK &&
        lg__sealed_json_parse(text.data, text.len, &record, &ignored) == LG_OK) {
        lg__json_get_str(record, "domain", 255, &who, &ignored);
        lg__json_get_str(record, "created", LG_CREATED_TEXT - 1, &when, &ignored);
        when = lg__created_valid(when) ? when : ""; /* it is shown: no text of somebody's own */
    }
    if (domain != NULL) {
        lg__printable(who, domain, 256);
    }
    if (created != NULL) {
        lg__text_copy(created, LG_CREATED_TEXT, when);
    }
    json_decref(record);
    lg__buf_free(&text);
}

/* Whether an owner claimed the root for one save by itself. One that cannot be
 * read is taken for a run. */
static bool is_plain(lg_store *store, uint64_t epoch)
{
    char name[LG__NAME_MAX];
    lg__owner_file(epoch, name);
    lg__buf text;
    lg__buf_init(&text, LG__RECORD_MAX);
    json_t *record = NULL;
    lg_error ignored = LG_ERROR_INIT;
    const bool plain = lg__store_read_all(store, name, &text, &ignored) == LG_OK &&
                       lg__sealed_json_parse(text.data, text.len, &record, &ignored) == LG_OK &&
                       json_is_true(json_object_get(record, "plain"));
    json_decref(record);
    lg__buf_free(&text);
    return plain;
}

/* *plain: whether the one that follows the owner there is, if there is one, is plain. */
static lg_status settle_kind(lg_store *store, lg__owner_kind kind, bool *plain, lg_error *err)
{
    uint64_t before = 0;
    *plain = kind != LG__OWNER_RUN;
    if (kind == LG__OWNER_RUN || kind == LG__OWNER_PLAIN_ANYWAY) {
        return LG_OK;
    }
    LG__TRY(lg__root_highest_owner(store, &before, err));
    if (before == 0 || is_plain(store, before)) {
        return LG_OK;
    }
    *plain = false;
    if (kind == LG__OWNER_AS_BEFORE) {
        return LG_OK;
    }
    char who[256], when[LG_CREATED_TEXT];
    lg__owner_who(store, before, who, when);
    return lg_error_set(err, LG_ERR_PROTECTED,
                        "the root belongs to a training run (owner epoch %" PRIu64 "%s%s%s%s), whose next save would "
                        "fail: save into another root, or say that this one is to be taken over "
                        "(LG_SESSION_TAKE_OVER, take_over=True)",
                        before, who[0] != '\0' ? ", by " : "", who, when[0] != '\0' ? " at " : "", when);
}

lg_status lg__owner_claim(lg_store *store, const char *domain, lg__owner_kind kind, uint64_t *epoch, lg_error *err)
{
    lg__walk *w;
    LG__TRY(lg__walk_read(store, &w, err));
    uint64_t highest = w->highest_epoch;
    char name[LG__NAME_MAX], shown[LG__NAME_MAX];
    lg__text_copy(name, sizeof name, w->highest_name);
    lg__walk_free(w);
    /* Behind the walk: whoever claims later takes the number that this one would,
     * and is then looked at. */
    bool made_room = false, plain;
    LG__TRY(settle_kind(store, kind, &plain, err));
    for (int i = 0; i < CLAIM_TRIES; i++) {
        LG__RETURN_IF(highest >= UINT64_C(1) << 53, err, LG_ERR_LIMIT,
                      "claim the root: owner epoch %" PRIu64
                      " leaves none above it; no session counts so far: is %s a name that somebody made up? Move it "
                      "away",
                      highest, lg__printable(name, shown, sizeof shown));
        uint64_t mine = highest + 1;
        lg__owner_file(mine, name);
        lg__buf text;
        lg__buf_init(&text, LG__RECORD_MAX);
        lg_status st = owner_text(domain, plain, mine, &text, err);
        if (st == LG_OK) {
            st = lg__store_put_new(store, name, text.data, text.len, err);
        }
        lg__buf_free(&text);
        if (st == LG_OK) {
            st = lg__store_sync_dir(store, "", err);
            if (st == LG_OK) {
                *epoch = mine;
            }
            return st;
        }
        if (st == LG_ERR_NO_SPACE && !made_room) {
            made_room = true;
            lg_error trouble = LG_ERROR_INIT;
            if (lg__owner_end_attempts(store, mine, &trouble) == LG_OK &&
                lg__sweep_root(store, mine, false, NULL, NULL, &trouble) == LG_OK) {
                continue;
            }
        }
        if (st != LG_ERR_EXISTS) {
            return lg_error_wrap(err, "claim the root");
        }
        LG__TRY(settle_kind(store, kind, &plain, err));
        highest = mine;
    }
    return lg_error_set(err, LG_ERR_CONFLICT, "%d sessions claimed the root at the same time", CLAIM_TRIES);
}

lg_status lg__owner_check(lg_store *store, uint64_t epoch, lg_error *err)
{
    uint64_t highest;
    LG__TRY(lg__root_highest_owner(store, &highest, err));
    if (highest <= epoch) {
        return LG_OK;
    }
    char who[256], when[LG_CREATED_TEXT];
    lg__owner_who(store, highest, who, when);
    return lg_error_set(err, LG_ERR_SUPERSEDED,
                        "another session took this root over (owner epoch %" PRIu64 "%s%s%s%s; this one has %" PRIu64
                        ")",
                        highest, who[0] != '\0' ? ", by " : "", who, when[0] != '\0' ? " at " : "", when, epoch);
}

/* ------------------------------------------------------------- removal */

typedef struct names {
    char (*name)[LG__NAME_MAX];
    lg_node_type *type;
    size_t n, cap, cap_type;
    uint64_t bytes;
    bool failed;
} names;

static int take(const lg_node *node, void *arg)
{
    names *all = arg;
    all->bytes += node->bytes;
    if (!lg__grow((void **)&all->name, &all->cap, all->n, sizeof *all->name) ||
        !lg__grow((void **)&all->type, &all->cap_type, all->n, sizeof *all->type)) {
        all->failed = true;
        return 1;
    }
    all->type[all->n] = node->type;
    snprintf(all->name[all->n++], LG__NAME_MAX, "%s", node->name);
    return 0;
}

static void names_free(names *all)
{
    lg__free(all->name);
    lg__free(all->type);
}

static lg_status list_names(lg_store *store, const char *folder, names *out, lg_error *err)
{
    *out = (names){0};
    lg_status st = lg__store_list(store, folder, take, out, err);
    if (st == LG_OK && out->failed) {
        st = lg__nomem(err);
    }
    if (st != LG_OK) {
        names_free(out);
        *out = (names){0};
    }
    return st;
}

/* Removes the files of a folder, but for two (NULL: none). */
static lg_status empty_folder_but(lg_store *store, const char *folder, const char *keep, const char *keep_too,
                                  lg_error *err)
{
    names all;
    lg_status st = list_names(store, folder, &all, err);
    if (st == LG_ERR_NOT_FOUND) {
        return LG_OK;
    }
    for (size_t i = 0; st == LG_OK && i < all.n; i++) {
        if ((keep != NULL && strcmp(all.name[i], keep) == 0) ||
            (keep_too != NULL && strcmp(all.name[i], keep_too) == 0)) {
            continue;
        }
        char path[2 * LG__NAME_MAX];
        if (all.type[i] == LG_NODE_DIR || !lg__path_join(path, sizeof path, folder, all.name[i])) {
            st = lg_error_set(err, LG_ERR_NOT_EMPTY, "%s holds \"%.200s\", which is none of lastgood's files", folder,
                              all.name[i]);
            break;
        }
        st = lg__store_remove_file(store, path, err);
    }
    names_free(&all);
    return st;
}

static lg_status empty_folder(lg_store *store, const char *folder, const char *keep, lg_error *err)
{
    return empty_folder_but(store, folder, keep, NULL, err);
}

lg_status lg__folder_remove(lg_store *store, const char *folder, lg_error *err)
{
    LG__TRY(empty_folder(store, folder, NULL, err));
    return lg__store_remove_dir(store, folder, err);
}

lg_status lg__folder_bytes(lg_store *store, const char *folder, uint64_t *out, lg_error *err)
{
    names all;
    LG__TRY(list_names(store, folder, &all, err));
    *out = all.bytes;
    names_free(&all);
    return LG_OK;
}

static lg_status fresh_trash(const char *folder, uint64_t epoch, char trash[LG__NAME_MAX], lg_error *err)
{
    uint8_t random[8];
    char token[2 * sizeof random + 1];
    LG__TRY(lg__random(random, sizeof random, err));
    lg__hex(random, sizeof random, token);
    lg__trash_name(epoch, token, folder, trash);
    return LG_OK;
}

/* Renames a folder and makes that durable. NOT_FOUND if it is gone. */
static lg_status to_trash(lg_store *store, const char *folder, const char trash[LG__NAME_MAX], lg_error *err)
{
    lg_status st = lg__store_rename_dir(store, folder, trash, err);
    if (st != LG_OK) {
        /* It may have happened all the same: a repeated request reports the
         * failure of the second one. */
        bool there = false, gone = false;
        lg_error look = LG_ERROR_INIT;
        if (lg__store_exists(store, "", trash, &there, &look) != LG_OK ||
            lg__store_exists(store, "", folder, &gone, &look) != LG_OK || !there || gone) {
            return st;
        }
    }
    return lg__store_sync_dir(store, "", err);
}

lg_status lg__checkpoint_remove(lg_store *store, const char *folder, uint64_t epoch, lg_error *err)
{
    if (lg__store_can(store, LG_CAP_RENAME_DIR)) {
        char trash[LG__NAME_MAX];
        LG__TRY(fresh_trash(folder, epoch, trash, err));
        lg_status st = to_trash(store, folder, trash, err);
        if (st == LG_ERR_NOT_FOUND) {
            return LG_OK; /* somebody else removed it */
        }
        LG__TRY(st);
        return lg__folder_remove(store, trash, err);
    }
    char path[2 * LG__NAME_MAX];
    lg__path_join(path, sizeof path, folder, LG__MANIFEST);
    LG__TRY(lg__store_remove_file(store, path, err));
    lg_status st = lg__store_sync_dir(store, folder, err);
    if (st != LG_ERR_NOT_FOUND) { /* else somebody else removed it */
        LG__TRY(st);
        LG__TRY(lg__folder_remove(store, folder, err));
    }
    return lg__store_sync_dir(store, "", err);
}

/* ------------------------------------------------------ ending attempts */

static lg_status put_tombstone(lg_store *store, const char *folder, const char *run_id, lg_generation g,
                               const char *attempt, uint64_t epoch, lg_error *err)
{
    lg__manifest *m;
    LG__TRY(lg__manifest_new(&m, err));
    m->tombstone = true;
    m->superseded_by = epoch;
    m->generation = g;
    lg__text_copy(m->run_id, sizeof m->run_id, run_id);
    lg__text_copy(m->attempt, sizeof m->attempt, attempt);
    lg__buf text;
    lg__buf_init(&text, LG__RECORD_MAX);
    lg_status st = lg__manifest_encode(m, &text, err);
    if (st == LG_OK) {
        char path[2 * LG__NAME_MAX];
        lg__path_join(path, sizeof path, folder, LG__MANIFEST);
        st = lg__store_put_new(store, path, text.data, text.len, err);
        if (st != LG_OK) {
            /* Ours from a request that was repeated or whose answer was lost, or
             * theirs? */
            lg__buf there;
            lg__buf_init(&there, LG__MANIFEST_MAX);
            lg_error look = LG_ERROR_INIT;
            lg__manifest *seen = NULL;
            if (lg__store_read_all(store, path, &there, &look) == LG_OK &&
                lg__manifest_decode(there.data, there.len, &seen, &look) == LG_OK && seen->tombstone) {
                st = LG_OK;
            }
            lg__manifest_free(seen);
            lg__buf_free(&there);
        }
        if (st == LG_OK) {
            st = lg__store_sync_dir(store, folder, err);
        }
    }
    lg__buf_free(&text);
    lg__manifest_free(m);
    return st;
}

static lg_status end_by_rename(lg_store *store, const char *folder, const char trash[LG__NAME_MAX], const char *keep,
                               lg_error *err)
{
    lg_status st = to_trash(store, folder, trash, err);
    if (st == LG_ERR_NOT_FOUND) {
        return lg_error_set(err, LG_ERR_EXISTS, "%s is gone: it was committed or ended", folder);
    }
    LG__TRY(st);
    /* It cannot commit any more; its bytes are the sweep's if this fails. */
    lg_error ignored = LG_ERROR_INIT;
    if (keep != NULL) {
        empty_folder(store, trash, keep, &ignored);
    } else {
        lg__folder_remove(store, trash, &ignored);
    }
    return LG_OK;
}

void lg__attempt_trash(const lg_store *store, const char *folder, const char *attempt, uint64_t epoch,
                       char out[LG__NAME_MAX])
{
    if (lg__store_can(store, LG_CAP_RENAME_DIR)) {
        lg__trash_name(epoch, attempt, folder, out);
    } else {
        lg__text_copy(out, LG__NAME_MAX, folder);
    }
}

void lg__attempt_forget(lg_store *store, const char *folder, const char *attempt, uint64_t epoch)
{
    char where[LG__NAME_MAX], path[2 * LG__NAME_MAX];
    lg_error ignored = LG_ERROR_INIT;
    lg__attempt_trash(store, folder, attempt, epoch, where);
    if (lg__store_can(store, LG_CAP_RENAME_DIR)) {
        lg__folder_remove(store, where, &ignored);
    } else if (lg__path_join(path, sizeof path, where, LG__FAILED)) {
        lg__store_remove_file(store, path, &ignored);
    }
}

static lg_status end_by_tombstone(lg_store *store, const char *folder, const char *run_id, lg_generation g,
                                  const char *attempt, uint64_t epoch, const char *keep, lg_error *err)
{
    lg_status st = put_tombstone(store, folder, run_id, g, attempt, epoch, err);
    if (st == LG_ERR_NOT_FOUND) {
        return LG_OK; /* somebody else removed the folder: nothing can be committed in it */
    }
    LG__TRY(st);
    lg_error ignored = LG_ERROR_INIT;
    empty_folder_but(store, folder, LG__MANIFEST, keep, &ignored);
    return LG_OK;
}

lg_status lg__attempt_end(lg_store *store, const char *folder, const char *run_id, lg_generation g, const char *attempt,
                          uint64_t epoch, lg_error *err)
{
    if (lg__store_can(store, LG_CAP_RENAME_DIR)) {
        char trash[LG__NAME_MAX];
        LG__TRY(fresh_trash(folder, epoch, trash, err));
        return end_by_rename(store, folder, trash, NULL, err);
    }
    return end_by_tombstone(store, folder, run_id, g, attempt, epoch, NULL, err);
}

lg_status lg__attempt_fail(lg_store *store, const char *folder, const char *run_id, lg_generation g,
                           const char *attempt, uint64_t epoch, lg_error *err)
{
    if (lg__store_can(store, LG_CAP_RENAME_DIR)) {
        char trash[LG__NAME_MAX];
        lg__attempt_trash(store, folder, attempt, epoch, trash);
        return end_by_rename(store, folder, trash, LG__FAILED, err);
    }
    return end_by_tombstone(store, folder, run_id, g, attempt, epoch, LG__FAILED, err);
}

#define NO_RUN "00000000000000000000000000000000"
#define NO_ATTEMPT "0000000000000000"

lg_status lg__owner_end_attempts(lg_store *store, uint64_t epoch, lg_error *err)
{
    lg__walk *w;
    LG__TRY(lg__walk_read(store, &w, err));
    lg_status st = LG_OK;
    for (size_t i = 0; st == LG_OK && i < w->n_others; i++) {
        const lg__root_item *item = &w->others[i];
        bool attempt = (item->parsed.kind == LG__ROOT_PARTIAL && lg__store_can(store, LG_CAP_RENAME_DIR)) ||
                       (item->parsed.kind == LG__ROOT_STEP && !item->tombstone);
        if (!attempt || item->parsed.generation.epoch >= epoch) {
            continue;
        }
        const char *token = item->parsed.attempt[0] != '\0' ? item->parsed.attempt : NO_ATTEMPT;
        st = lg__attempt_end(store, item->name, NO_RUN, item->parsed.generation, token, epoch, err);
        if (st == LG_ERR_EXISTS) {
            st = LG_OK; /* it won: committed */
        }
    }
    lg__walk_free(w);
    LG__TRY(st);
    /* What is committed now was perhaps not made durable by an owner that died
     * right after its rename: do that before anything relies on it. */
    LG__TRY(lg__walk_read(store, &w, err));
    for (size_t i = 0; st == LG_OK && i < w->n; i++) {
        if (!w->items[i].is_rollback) {
            st = lg__store_sync_dir(store, w->items[i].name, err);
            if (st == LG_ERR_NOT_FOUND) {
                st = LG_OK;
            }
        }
    }
    lg__walk_free(w);
    LG__TRY(st);
    return lg__store_sync_dir(store, "", err);
}
