/* SPDX-License-Identifier: Apache-2.0 */

/* Resume: all ranks agree on the newest checkpoint that every one of them can
 * load. The coordinator walks the root and proposes; every rank loads; one
 * rank's damage makes all step back together. */

#include "base/error.h"
#include "base/mem.h"
#include "core/checkpoint.h"
#include "core/load_shared.h"
#include "core/session.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The options, which must be the same on all ranks. */
typedef struct asked_for {
    uint32_t flags;
    uint32_t by; /* BY_STEP, BY_GENERATION: chosen by it */
    uint64_t step;
    lg_generation generation;
} asked_for;

enum { BY_STEP = 1, BY_GENERATION = 2 };

static asked_for asked_of(const lg_resume_options *o)
{
    asked_for a = {.flags = o->flags};
    if (o->step != NULL) {
        a.by |= BY_STEP;
        a.step = *o->step;
    }
    if (o->generation != NULL) {
        a.by |= BY_GENERATION;
        a.generation = *o->generation;
    }
    return a;
}

/* What the coordinator proposes next. The manifest's bytes follow. */
typedef struct proposal {
    uint32_t kind;   /* enum below */
    uint32_t forget; /* what was skipped last was no damage: it had been removed */
    uint32_t status;
    asked_for asked;
    char folder[LG__NAME_MAX];
    char message[LG_ERROR_MESSAGE_MAX];
} proposal;

enum { TRY = 1, NONE_LEFT = 2, FAIL = 3, SKIP = 4 };

typedef struct search { /* coordinator only */
    lg__walk *walk;
    size_t next;
    bool seen_any;
    int walks;   /* how often the root was read */
    bool moved;  /* a checkpoint was removed since: read it again */
    bool forget; /* tell it with the next proposal */
} search;

/* ----------------------------------------------------- skipped checkpoints */

static lg_status add_skipped(lg_resume_result *r, uint64_t step, lg_generation g, const char *folder, lg_status status,
                             const char *reason, lg_error *err)
{
    lg_skipped *more = lg__realloc(r->skipped, (r->n_skipped + 1) * sizeof *more);
    if (more == NULL) {
        return lg__nomem(err);
    }
    r->skipped = more;
    lg_skipped *s = &more[r->n_skipped++];
    *s = (lg_skipped){.step = step, .generation = g, .status = status};
    lg__text_copy(s->folder, sizeof s->folder, folder);
    lg__text_copy(s->reason, sizeof s->reason, reason);
    return LG_OK;
}

void lg_resume_result_free(lg_resume_result *result)
{
    if (result == NULL) {
        return;
    }
    lg_checkpoint_close(result->checkpoint);
    lg__free(result->skipped);
    for (size_t i = 0; i < result->n_missing; i++) {
        lg__free(result->missing[i]);
    }
    lg__free(result->missing);
    lg__free(result);
}

/* ------------------------------------------------- the coordinator's search */

static bool wanted(const lg_resume_options *o, const lg__walk_item *item)
{
    if (o->generation != NULL) {
        return lg_generation_compare(*o->generation, item->generation) == 0;
    }
    return o->step == NULL || *o->step == item->step;
}

static bool already(const lg_resume_result *r, const char *folder)
{
    for (size_t i = 0; i < r->n_skipped; i++) {
        if (strcmp(r->skipped[i].folder, folder) == 0) {
            return true;
        }
    }
    return false;
}

/* Another process removes checkpoints only when there is a newer one. */
static lg_status walk_again(lg_session *s, search *q, lg_error *err)
{
    lg__walk_free(q->walk);
    q->walk = NULL;
    q->moved = false;
    q->seen_any = false;
    q->next = 0;
    q->walks++;
    return lg__walk_read(s->store, &q->walk, err);
}

/* The next item to propose: TRY, SKIP (damaged; message says how), NONE_LEFT
 * or FAIL. */
static lg__walk_item *propose(lg_session *s, search *q, const lg_resume_options *o, const lg_resume_result *r,
                              proposal *p)
{
    bool chosen = o->step != NULL || o->generation != NULL;
    lg_error why = LG_ERROR_INIT;
    *p = (proposal){.kind = NONE_LEFT, .forget = q->forget};
    q->forget = false;
    for (;;) {
        if (q->moved && q->walks < LG__WALK_TRIES && walk_again(s, q, &why) != LG_OK) {
            p->kind = FAIL;
            p->status = (uint32_t)why.status;
            lg__text_copy(p->message, sizeof p->message, why.message);
            return NULL;
        }
        if (q->walk == NULL) {
            return NULL;
        }
        if (q->next >= q->walk->n) {
            /* A listing may miss what is renamed while it is made. A fresh
             * start is never decided by one alone. */
            if (q->seen_any || q->walks > 0) {
                return NULL;
            }
            q->moved = true;
            continue;
        }
        lg__walk_item *item = &q->walk->items[q->next++];
        if (item->is_rollback) {
            if (item->status != LG_OK && !chosen && !item->discarded) {
                p->kind = FAIL;
                p->status = (uint32_t)item->status;
                snprintf(p->message, sizeof p->message,
                         "%.60s cannot be read (%.400s), so it is not known which checkpoints it discarded; roll back "
                         "again with `lastgood rollback`, or choose a step",
                         item->name, item->reason);
                return NULL;
            }
            continue;
        }
        /* What is asked for by step or generation is taken even if a rollback
         * discarded it. */
        if (!wanted(o, item) || (item->discarded && !chosen)) {
            continue;
        }
        q->seen_any = true;
        if (already(r, item->name)) {
            continue;
        }
        if (item->status == LG_OK && lg__walk_check_whole(s->store, item, &why) != LG_OK) {
            p->kind = FAIL;
            p->status = (uint32_t)why.status;
            lg__text_copy(p->message, sizeof p->message, why.message);
            return NULL;
        }
        if (item->status != LG_OK && q->walks < LG__WALK_TRIES && lg__folder_gone(s->store, item->name)) {
            q->moved = true;
            continue;
        }
        lg__text_copy(p->folder, sizeof p->folder, item->name);
        bool fatal = lg__walk_must_ask(item->status);
        p->status = (uint32_t)item->status;
        snprintf(p->message, sizeof p->message, "%s%s%s", fatal ? item->name : "", fatal ? ": " : "", item->reason);
        p->kind = item->status == LG_OK ? TRY : fatal ? FAIL : SKIP;
        return item;
    }
}

static lg_status send_proposal(lg_session *s, proposal *p, lg__walk_item *item, lg__buf *message, lg_error *err)
{
    lg__buf_init(message, SIZE_MAX / 2);
    lg_status mine = LG_OK;
    if (lg__is_coordinator(s)) {
        uint64_t place[3] = {0};
        if (item != NULL) {
            place[0] = item->step;
            place[1] = item->generation.epoch;
            place[2] = item->generation.serial;
        }
        lg__buf_add(message, p, sizeof *p);
        lg__buf_add(message, place, sizeof place);
        if (p->kind == TRY) {
            lg__buf_add(message, item->bytes.data, item->bytes.len);
        }
        mine = lg__buf_check(message, "proposal", err);
    }
    void *data = message->data;
    size_t bytes = message->len;
    lg_status st = lg__session_tell(s, mine, &data, &bytes, err);
    if (st == LG_OK && !lg__is_coordinator(s)) {
        lg__buf_add(message, data, bytes);
        lg_free(data);
        st = lg__buf_check(message, "proposal", err);
    }
    if (st == LG_OK && message->len < sizeof *p + 3 * sizeof(uint64_t)) {
        st = lg_error_set(err, LG_ERR_CONFLICT, "rank 0 runs another version of lastgood");
    }
    if (st != LG_OK) {
        lg__buf_free(message);
        return st;
    }
    memcpy(p, message->data, sizeof *p);
    return LG_OK;
}

/* ------------------------------------------------------ loading on one rank */

typedef struct loaded {
    lg_checkpoint *c;
    lg_load *load;
} loaded;

static void loaded_free(loaded *l)
{
    lg_load_free(l->load);
    lg_checkpoint_close(l->c);
    *l = (loaded){0};
}

/* Whether any rank wants another round. None takes place once a rank has failed:
 * the agreement that follows tells why. */
static lg_status go_on(lg_session *s, bool mine, lg_status st, bool *again, lg_error *err)
{
    enum { NO, YES, FAILED };
    const uint8_t say = st != LG_OK ? FAILED : mine ? YES : NO;
    void *all = NULL;
    *again = s->comm->size == 1 && say == YES;
    if (s->comm->size == 1 || (st != LG_OK && s->comm->broken)) {
        return st;
    }
    lg_error trouble = LG_ERROR_INIT;
    lg_status told = lg__comm_all_gather(s->comm, &say, sizeof say, &all, s->comm->sizes, s->deadline_ms, &trouble);
    if (told != LG_OK) {
        if (st == LG_OK) {
            *err = trouble;
        }
        return st == LG_OK ? told : st;
    }
    bool failed = false;
    const uint8_t *said = all;
    for (uint32_t r = 0; r < s->comm->size; r++) {
        const uint8_t one = s->comm->sizes[r] == 1 ? *said : FAILED;
        said += s->comm->sizes[r];
        failed = failed || one == FAILED;
        *again = *again || one == YES;
    }
    *again = *again && !failed;
    lg_free(all);
    return st;
}

/* What the caller wants, in this round. */
static lg_status describe(lg_load *load, lg_targets_fn targets, void *arg, uint32_t flags, lg_error *err)
{
    load->again = false;
    if (targets == NULL) {
        return LG_OK;
    }
    lg_status st = targets(load, arg, err);
    /* A callback may return a status without a word. */
    if (st != LG_OK && err->status != st) {
        lg_error_set(err, st, "the targets callback returned %s", lg_status_name(st));
    }
    if (st == LG_OK && load->again && (flags & LG_RESUME_ROUNDS) == 0) {
        st = lg_error_set(err, LG_ERR_INVALID, "lg_load_again needs a resume with LG_RESUME_ROUNDS");
    }
    return st;
}

/* Collective; `st` is LG_OK or what this rank has against loading, with `err`.
 * `flags` are rank 0's. */
static lg_status load_here(lg_session *s, lg_status st, const char *folder, const char *manifest, size_t bytes,
                           uint32_t flags, lg_targets_fn targets, void *arg, loaded *out, lg_error *err)
{
    const lg_status before = st;
    if (st == LG_OK) {
        st = lg__checkpoint_open_in(s->store, false, folder, manifest, bytes, &out->c, err);
    }
    if (st == LG_OK) {
        st = lg_load_begin(out->c, (flags & LG_RESUME_UNVERIFIED) != 0 ? LG_LOAD_UNVERIFIED : 0, &out->load, err);
    }
    if (st == LG_OK) {
        out->load->rank = s->comm->rank;
        out->load->world = s->comm->size;
        out->load->buffer_bytes = s->buffer_bytes;
    }
    lg__share share = (flags & LG_RESUME_SHARE) != 0      ? LG__SHARE_ON
                      : (flags & LG_RESUME_NO_SHARE) != 0 ? LG__SHARE_OFF
                                                          : LG__SHARE_AUTO;
    for (bool again = true; again;) {
        const bool ready = st == LG_OK;
        if (ready) {
            st = describe(out->load, targets, arg, flags, err);
        }
        st = lg__load_shared(out->load, s->comm, share, st, s->deadline_ms, err);
        again = false;
        if ((flags & LG_RESUME_ROUNDS) != 0) {
            st = go_on(s, ready && out->load->again, st, &again, err);
        }
        if (again) {
            lg__load_next(out->load);
        }
    }
    if (st != LG_OK && before == LG_OK && strstr(err->message, folder) == NULL) {
        lg_error_wrap(err, "%s", folder);
    }
    return st;
}

static lg_status take_result(loaded *l, bool verified, lg_resume_result *r, lg_error *err)
{
    const lg__manifest *m = l->c->m;
    r->step = m->step;
    r->generation = m->generation;
    lg__text_copy(r->folder, sizeof r->folder, l->c->folder);
    memcpy(r->run_id, m->run_id, sizeof r->run_id);
    r->saved_world = m->world;
    r->verified = verified;
    r->tensors_loaded = l->load->tensors_loaded;
    r->bytes_loaded = l->load->bytes_loaded;
    r->missing = lg__calloc(l->load->n_missing, sizeof *r->missing);
    if (r->missing == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0; i < l->load->n_missing; i++) {
        r->missing[i] = lg__strdup(l->load->missing[i]);
        if (r->missing[i] == NULL) {
            return lg__nomem(err);
        }
        r->n_missing++;
    }
    r->checkpoint = l->c;
    l->c = NULL;
    return LG_OK;
}

static void inherit(lg_session *s, const lg_resume_result *r)
{
    s->settled = true;
    s->has_run = true;
    memcpy(s->run_id, r->run_id, sizeof s->run_id);
    s->has_parent = true;
    s->parent = r->generation;
    s->parent_step = r->step;
    s->parent_verified = r->verified != 0;
}

/* ------------------------------------------------------------- the whole */

/* Ends a resume that found nothing: the same on all ranks. */
static lg_status nothing_found(lg_session *s, const lg_resume_options *o, bool seen_any, const lg_resume_result *r,
                               lg_error *err)
{
    if (o->generation != NULL && !seen_any) {
        return lg_error_set(err, LG_ERR_NOT_FOUND, "the root holds no checkpoint of generation %" PRIu64 ".%" PRIu64,
                            o->generation->epoch, o->generation->serial);
    }
    if (o->step != NULL && !seen_any) {
        return lg_error_set(err, LG_ERR_NOT_FOUND, "the root holds no checkpoint of step %" PRIu64, *o->step);
    }
    if (!seen_any) {
        s->settled = true;
        return lg_error_set(err, LG_ERR_EMPTY, "the root holds no checkpoint: this is a fresh start");
    }
    LG__RETURN_IF(r->n_skipped == 0, err, LG_ERR_NO_GOOD,
                  "every checkpoint was removed by another process while it was looked at; try again");
    return lg_error_set(err, LG_ERR_NO_GOOD, "no good checkpoint among %zu; the newest, %s: %s", r->n_skipped,
                        r->skipped[0].folder, r->skipped[0].reason);
}

/* One round: a proposal and, if it is one to try, loading it on all ranks.
 * *done is set when the resume has ended, well or badly. */
static lg_status one_round(lg_session *s, search *q, const lg_resume_options *o, lg_targets_fn targets, void *arg,
                           lg_resume_result *r, bool *done, lg_error *err)
{
    proposal p = {0};
    lg__walk_item *item = NULL;
    if (lg__is_coordinator(s)) {
        item = propose(s, q, o, r, &p);
        if (p.kind == NONE_LEFT) {
            p.status = q->seen_any;
        }
        p.asked = asked_of(o);
    }
    lg__buf message;
    *done = true;
    LG__TRY(send_proposal(s, &p, item, &message, err));
    uint64_t place[3];
    memcpy(place, message.data + sizeof p, sizeof place);
    lg_generation g = {place[1], place[2]};
    p.message[sizeof p.message - 1] = '\0';
    p.folder[sizeof p.folder - 1] = '\0';
    if (p.forget != 0 && r->n_skipped > 0) {
        r->n_skipped--;
    }
    lg_status st = LG_OK;
    bool only = (p.asked.flags & LG_RESUME_STRICT) != 0 || p.asked.by != 0;
    const asked_for own_asked = asked_of(o);
    if (p.kind == NONE_LEFT) {
        st = nothing_found(s, o, p.status != 0, r, err);
    } else if (p.kind == FAIL) {
        st = lg_error_set(err, (lg_status)p.status, "%s", p.message);
    } else if (p.kind == TRY) {
        size_t head = sizeof p + sizeof place;
        loaded l = {0};
        lg_error own = LG_ERROR_INIT;
        lg_status here = LG_OK;
        if (memcmp(&own_asked, &p.asked, sizeof own_asked) != 0) {
            here = lg_error_set(&own, LG_ERR_CONFLICT, "it resumes with other options than rank 0");
        }
        here = load_here(s, here, p.folder, message.data + head, message.len - head, p.asked.flags, targets, arg, &l,
                         &own);
        bool verified = (o->flags & LG_RESUME_UNVERIFIED) == 0;
        if (here == LG_OK) {
            here = take_result(&l, verified, r, &own);
        }
        *err = own;
        st = lg__comm_agree(s->comm, here, s->deadline_ms, err);
        if (st == LG_OK) {
            inherit(s, r);
        } else {
            lg_checkpoint_close(r->checkpoint);
            r->checkpoint = NULL;
            for (size_t i = 0; i < r->n_missing; i++) {
                lg__free(r->missing[i]);
            }
            lg__free(r->missing);
            r->missing = NULL;
            r->n_missing = 0;
        }
        loaded_free(&l);
        if (st != LG_OK && lg__status_is_damage(st)) {
            p.kind = SKIP;
            p.status = (uint32_t)st;
            lg__text_copy(p.message, sizeof p.message, err->message);
        }
    }
    if (p.kind == SKIP && only) {
        st = lg_error_set(err, LG_ERR_NOT_WHOLE, "%s is damaged: %s", p.folder, p.message);
    } else if (p.kind == SKIP) {
        *done = false;
        st = add_skipped(r, place[0], g, p.folder, (lg_status)p.status, p.message, err);
        if (st == LG_OK && lg__is_coordinator(s)) {
            q->moved = q->walks < LG__WALK_TRIES && lg__folder_gone(s->store, p.folder);
            q->forget = q->moved;
            st = q->moved ? LG_OK : lg__session_add_bad(s, g, err);
        }
        /* Out of memory on one rank only: all hear of it. */
        lg_status agreed = lg__comm_agree(s->comm, st, s->deadline_ms, err);
        *done = agreed != LG_OK;
        st = agreed;
    }
    lg__buf_free(&message);
    return st;
}

lg_status lg_resume(lg_session *session, const lg_resume_options *options, lg_targets_fn targets, void *arg,
                    lg_resume_result **out, lg_error *err)
{
    LG__ERR(err);
    static const lg_resume_options defaults = LG_RESUME_OPTIONS_INIT;
    const lg_resume_options *o = options != NULL ? options : &defaults;
    const uint32_t known =
        LG_RESUME_STRICT | LG_RESUME_UNVERIFIED | LG_RESUME_SHARE | LG_RESUME_NO_SHARE | LG_RESUME_ROUNDS;
    LG__RETURN_IF(session == NULL, err, LG_ERR_INVALID, "lg_resume: no session");
    lg_session *s = session;
    LG__TRY(lg__session_usable(s, "lg_resume", err));
    if (s->job != NULL) { /* launched on all ranks alike, and settled on all */
        LG__TRY(lg_session_wait(s, s->deadline_ms / 2, NULL, err));
    }
    lg_resume_result *r = lg__calloc(1, sizeof *r);
    search q = {0};
    lg_status mine = r == NULL ? lg__nomem(err) : LG_OK;
    if (out == NULL) {
        mine = lg_error_set(err, LG_ERR_INVALID, "no place for the result");
    } else if (o->size != sizeof *o || (o->flags & ~known) != 0) {
        mine = lg_error_set(err, LG_ERR_INVALID,
                            "lg_resume_options is not set up with LG_RESUME_OPTIONS_INIT or has unknown flags");
    } else if ((o->flags & LG_RESUME_SHARE) != 0 && (o->flags & LG_RESUME_NO_SHARE) != 0) {
        mine = lg_error_set(err, LG_ERR_INVALID, "LG_RESUME_SHARE and LG_RESUME_NO_SHARE exclude each other");
    }
    if (mine == LG_OK && lg__is_coordinator(s)) {
        mine = lg__walk_read(s->store, &q.walk, err);
        if (mine == LG_ERR_NOT_FOUND) {
            lg_error_wrap(err, "there is no such root");
        }
    }
    lg_status st = lg__comm_agree(s->comm, mine, s->deadline_ms, err);
    for (bool done = false; st == LG_OK && !done;) {
        st = one_round(s, &q, o, targets, arg, r, &done, err);
    }
    lg__walk_free(q.walk);
    if (st != LG_OK) {
        lg_error_wrap(err, "resume from %s", lg__store_name(s->store));
    }
    if (out != NULL && (st == LG_OK || st == LG_ERR_NO_GOOD)) {
        *out = r;
    } else {
        lg_resume_result_free(r);
    }
    return st;
}
