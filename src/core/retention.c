/* SPDX-License-Identifier: Apache-2.0 */
#include "core/retention.h"

#include "base/error.h"
#include "base/mem.h"
#include "core/owner.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static void say(lg__verdict *v, lg__fate fate, const char *why)
{
    v->fate = fate;
    lg__text_copy(v->why, sizeof v->why, why);
}

static bool is_good(const lg__walk_item *item)
{
    return !item->is_rollback && !item->discarded && item->status == LG_OK;
}

/* The newest record on the path of the walk that passes over item i: the
 * nearest one before it that is not itself discarded. */
static lg_generation discarded_by(const lg__walk *w, size_t i)
{
    for (size_t k = i; k-- > 0;) {
        if (w->items[k].is_rollback && !w->items[k].discarded && w->items[k].status == LG_OK) {
            return w->items[k].generation;
        }
    }
    return w->items[i].generation;
}

static uint32_t good_above(const lg__walk *w, lg_generation g)
{
    uint32_t n = 0;
    for (size_t i = 0; i < w->n; i++) {
        n += is_good(&w->items[i]) && lg_generation_compare(w->items[i].generation, g) > 0;
    }
    return n;
}

lg_status lg__retention_judge(lg_store *store, const lg__walk *w, uint32_t keep_last, uint64_t keep_every,
                              lg__verdict *verdicts, lg_error *err)
{
    uint32_t good = 0;
    for (size_t i = 0; i < w->n; i++) {
        const lg__walk_item *item = &w->items[i];
        lg__verdict *v = &verdicts[i];
        say(v, LG__STAYS, "");
        if (item->is_rollback) {
            say(v, LG__STAYS, "rollback record");
            continue;
        }
        if (w->unreadable_newer) {
            say(v, LG__STAYS, "the root holds a checkpoint of a newer version: nothing is removed");
            good += is_good(item);
            continue;
        }
        lg__pin_state pin = {0};
        LG__TRY(lg__pin_read(store, item->name, item->m != NULL ? item->m->sha256 : NULL, &pin, err));
        if (is_good(item)) {
            good++;
            if (pin.pinned) {
                say(v, LG__STAYS, "pinned");
            } else if (good == 1) {
                say(v, LG__STAYS, "the last good one");
            } else if (keep_last == 0 || good <= keep_last) {
                snprintf(v->why, sizeof v->why, keep_last == 0 ? "all are kept" : "one of the last %" PRIu32,
                         keep_last);
            } else if (keep_every != 0 && item->step % keep_every == 0) {
                snprintf(v->why, sizeof v->why, "step is a multiple of %" PRIu64, keep_every);
            } else {
                snprintf(v->why, sizeof v->why, "older than the last %" PRIu32, keep_last);
                v->fate = LG__GOES;
            }
            continue;
        }
        const char *what = item->discarded                   ? "discarded by a rollback"
                           : lg__walk_must_ask(item->status) ? lg_status_text(item->status)
                                                             : "damaged";
        lg_generation above = item->discarded ? discarded_by(w, i) : item->generation;
        bool goes =
            !pin.pinned && keep_last != 0 && !lg__walk_must_ask(item->status) && good_above(w, above) >= keep_last;
        snprintf(v->why, sizeof v->why, "%s%s", what,
                 pin.pinned ? ", pinned"
                 : goes     ? ""
                            : ", kept until enough good ones are newer");
        v->fate = goes ? LG__GOES : LG__STAYS;
    }
    return LG_OK;
}

/* This may be the background's thread. */
static void complain(lg_session *s, const lg_error *err, uint64_t failures)
{
    pthread_mutex_lock(&s->lock);
    s->status.removal_failures += failures;
    lg__text_copy(s->status.last_removal_error, sizeof s->status.last_removal_error, err->message);
    pthread_mutex_unlock(&s->lock);
}

static lg_status run(lg_session *s, lg_generation committed, lg_error *err)
{
    /* A stale owner removes nothing: a newer session may stand on what looks
     * old from here. */
    LG__TRY(lg__owner_check(s->store, s->epoch, err));
    lg__walk *w;
    LG__TRY(lg__walk_read(s->store, &w, err));
    lg__verdict *verdicts = lg__calloc(w->n, sizeof *verdicts);
    lg_status st = verdicts == NULL ? lg__nomem(err) : LG_OK;
    const lg__walk_item *newest = NULL;
    for (size_t i = 0; st == LG_OK && i < w->n; i++) {
        lg__walk_item *item = &w->items[i];
        st = lg__walk_check_whole(s->store, item, err);
        if (item->status == LG_OK && lg__session_is_bad(s, item->generation)) {
            item->status = LG_ERR_NOT_WHOLE; /* found damaged when it was loaded */
        }
        newest = newest == NULL && is_good(item) ? item : newest;
    }
    /* Only what this session committed itself may vouch for the rest. */
    if (st == LG_OK && (newest == NULL || lg_generation_compare(newest->generation, committed) != 0)) {
        st = lg_error_set(err, LG_ERR_STATE,
                          "the checkpoint just committed is not the newest good one in the root: nothing is removed");
    }
    if (st == LG_OK) {
        st = lg__retention_judge(s->store, w, s->keep_last, s->keep_every, verdicts, err);
    }
    lg_error trouble = LG_ERROR_INIT;
    for (size_t i = 0; st == LG_OK && i < w->n; i++) {
        if (verdicts[i].fate == LG__GOES) {
            lg_error one = LG_ERROR_INIT;
            bool removed = lg__checkpoint_remove(s->store, w->items[i].name, s->epoch, &one) == LG_OK;
            pthread_mutex_lock(&s->lock);
            s->status.removed += removed;
            s->status.removal_failures += !removed;
            pthread_mutex_unlock(&s->lock);
            trouble = removed ? trouble : one;
        }
    }
    if (st == LG_OK && trouble.status != LG_OK) {
        complain(s, &trouble, 0);
    }
    lg__free(verdicts);
    lg__walk_free(w);
    return st;
}

void lg__retention_run(lg_session *s, lg_generation committed)
{
    if (s->keep_last == 0 || s->not_durable) {
        return;
    }
    lg_error err = LG_ERROR_INIT;
    if (run(s, committed, &err) != LG_OK) {
        complain(s, &err, 1);
    }
}
