/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/hash.h"
#include "base/mem.h"
#include "core/where.h"

#include <string.h>

#define PIN_TRIES 100

static lg_status write_record(lg_store *store, const char *folder, lg__pin_record *r, lg_error *err)
{
    char name[LG__NAME_MAX], path[2 * LG__NAME_MAX];
    lg__side_file("pin", r->n, name);
    lg__path_join(path, sizeof path, folder, name);
    lg__buf text;
    lg__buf_init(&text, LG__RECORD_MAX);
    lg_status st = lg__pin_encode(r, &text, err);
    if (st == LG_OK) {
        st = lg__store_put_new(store, path, text.data, text.len, err);
    }
    lg__buf_free(&text);
    return st;
}

static lg_status pin(lg_store *store, const lg__walk_item *item, bool pinned, const char *reason, lg_error *err)
{
    LG__RETURN_IF(item->status != LG_OK, err, item->status, "%s: %s", item->name, item->reason);
    lg__pin_record r = {.pinned = pinned};
    memcpy(r.manifest, item->m->sha256, sizeof r.manifest);
    lg__text_copy(r.reason, sizeof r.reason, reason);
    lg__utc(r.created);
    for (int i = 0; i < PIN_TRIES; i++) {
        lg__pin_state now;
        LG__TRY(lg__pin_read(store, item->name, item->m->sha256, &now, err));
        if (now.pinned == pinned && i == 0 && strcmp(now.reason, r.reason) == 0) {
            return LG_OK; /* it is so already */
        }
        r.n = now.highest + 1;
        lg_status st = write_record(store, item->name, &r, err);
        if (st == LG_OK) {
            return lg__store_sync_dir(store, item->name, err);
        }
        if (st != LG_ERR_EXISTS) {
            return st;
        }
    }
    return lg_error_set(err, LG_ERR_CONFLICT, "%s: others pin it at the same time", item->name);
}

lg_status lg_pin(const char *where, int pinned, const char *reason, lg_error *err)
{
    LG__ERR(err);
    lg_store *store;
    lg__walk *walk;
    lg__walk_item *item = NULL;
    LG__RETURN_IF(reason != NULL && strlen(reason) >= sizeof((lg__pin_record *)0)->reason, err, LG_ERR_LIMIT,
                  "the reason is longer than %zu bytes", sizeof((lg__pin_record *)0)->reason - 1);
    LG__TRY(lg__where_find(where, &store, &walk, &item, err));
    lg_status st = pin(store, item, pinned != 0, reason != NULL ? reason : "", err);
    lg__walk_free(walk);
    lg_store_free(store);
    return st == LG_OK ? LG_OK : lg_error_wrap(err, "%s %s", pinned ? "pin" : "unpin", where);
}
