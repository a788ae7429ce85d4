/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "base/hash.h"
#include "base/mem.h"
#include "core/owner.h"
#include "core/where.h"

#include <string.h>

/* The claim comes first: from then on a session that still runs fails its next
 * save, and nothing can be committed that the record would not pass over. */
static lg_status record(lg_store *store, const lg__walk_item *target, const char *reason, lg_generation *out,
                        lg_error *err)
{
    uint64_t epoch;
    LG__TRY(lg__owner_claim(store, "lastgood rollback", LG__OWNER_AS_BEFORE, &epoch, err));
    LG__TRY(lg__owner_end_attempts(store, epoch, err));
    lg__rollback_record r = {.generation = {epoch, 1}, .target = target->generation, .target_step = target->step};
    memcpy(r.run_id, target->m->run_id, sizeof r.run_id);
    memcpy(r.target_manifest, target->m->sha256, sizeof r.target_manifest);
    lg__utc(r.created);
    lg__text_copy(r.reason, sizeof r.reason, reason);
    lg__buf text;
    lg__buf_init(&text, LG__RECORD_MAX);
    lg_status st = lg__rollback_encode(&r, &text, err);
    if (st == LG_OK) {
        char name[LG__NAME_MAX];
        lg__rollback_file(r.generation, name);
        st = lg__store_put_new(store, name, text.data, text.len, err);
    }
    if (st == LG_OK) {
        st = lg__store_sync_dir(store, "", err);
    }
    lg__buf_free(&text);
    if (st == LG_OK) {
        *out = r.generation;
    }
    return st;
}

lg_status lg_rollback(const char *where, const char *reason, lg_generation *out, lg_error *err)
{
    LG__ERR(err);
    lg_store *store;
    lg__walk *walk;
    lg__walk_item *item = NULL;
    LG__RETURN_IF(reason != NULL && strlen(reason) >= sizeof((lg__rollback_record *)0)->reason, err, LG_ERR_LIMIT,
                  "the reason is longer than %zu bytes", sizeof((lg__rollback_record *)0)->reason - 1);
    LG__TRY(lg__where_find(where, &store, &walk, &item, err));
    lg_status st = lg__walk_check_whole(store, item, err);
    if (st == LG_OK && item->status != LG_OK) {
        st = lg_error_set(err, item->status, "%s is not good: %s; roll back to another one", item->name, item->reason);
    }
    if (st == LG_OK && lg__root_name_parse(item->name).kind != LG__ROOT_STEP) {
        st = lg_error_set(err, LG_ERR_INVALID, "%s has a name that no root looks at; rename it to its step name first",
                          item->name);
    }
    lg_generation made = {0, 0};
    if (st == LG_OK) {
        st = record(store, item, reason != NULL ? reason : "", &made, err);
    }
    lg__walk_free(walk);
    lg_store_free(store);
    if (st != LG_OK) {
        return lg_error_wrap(err, "roll back to %s", where);
    }
    if (out != NULL) {
        *out = made;
    }
    return LG_OK;
}
