/* SPDX-License-Identifier: Apache-2.0 */

/* The commit: the one place that knows its order (docs/format-crashes.md).
 *
 *   open    one all-gather: errors, step, checksums of undeclared replicas;
 *           all ranks decide alike. The coordinator makes the folder and tells
 *           run, generation and attempt.
 *   1       every rank writes its files, then its sums file, all synced
 *   2       the coordinator collects the reports and merges them
 *   3       manifest written and synced, folder synced
 *   4       epoch checked
 *   5       folder renamed without replacing (or manifest created
 *           conditionally), root synced
 *   6       all ranks learn the result
 *   7       retention
 */

#include "base/error.h"
#include "base/hash.h"
#include "base/mem.h"
#include "core/background.h"
#include "core/owner.h"
#include "core/retention.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef lg__attempt attempt;
typedef lg__commit_scratch scratch;

/* ------------------------------------------------------------- exchanges */

typedef struct opening {
    char magic[8];
    uint32_t status;
    int32_t os_errno;
    uint64_t step;
    uint64_t saves;
    uint32_t flags;
    uint32_t purpose;
    uint32_t message_bytes;
    uint8_t summary[40];
    /* the save in the background before: a lg__last */
    uint32_t last_state, last_status;
    int32_t last_errno, last_rank;
    uint64_t last_step, last_bytes;
    uint8_t last_own, last_in_place;
    uint32_t last_message_bytes;
} opening;

#define OPENING_MAGIC "LGSAVE2"

lg_status lg__commit_scratch_new(uint32_t world, scratch *out, lg_error *err)
{
    *out =
        (scratch){.sizes = lg__calloc(world, sizeof *out->sizes), .written = lg__calloc(world, sizeof *out->written)};
    return out->sizes == NULL || out->written == NULL ? lg__nomem(err) : LG_OK;
}

void lg__commit_scratch_free(scratch *to)
{
    lg__free(to->sizes);
    lg__free(to->written);
}

/* What rank `rank` says of itself in an exchange, as every rank words it. */
static lg_status first_trouble(uint32_t rank, uint32_t status, int32_t os_errno, const char *message, size_t bytes,
                               uint32_t world, lg_error *err)
{
    if (status == LG_OK) {
        return LG_OK;
    }
    if (world == 1) {
        lg_error_set(err, (lg_status)status, "%.*s", (int)bytes, message);
    } else {
        lg_error_set(err, (lg_status)status, "rank %" PRIu32 ": %.*s", rank, (int)bytes, message);
        err->rank = (int)rank;
    }
    err->os_errno = os_errno;
    return (lg_status)status;
}

static const char *const calls[] = {"another call", "lg_save_commit", "lg_save_launch", "lg_save_launch",
                                    "lg_session_wait"};

/* What all ranks together know of the save before. The same on all of them. */
typedef struct verdict {
    lg__last_state state;
    bool in_place;
    bool own; /* the cause is of the rank whose part failed */
    uint64_t step, bytes;
    lg_status status;
    lg_error err;
} verdict;

/* The coordinator knows best; whose own part failed knows the cause. */
static void weigh(verdict *v, uint32_t rank, uint32_t world, const opening *o, const char *message)
{
    const bool failed = o->last_state == LG__LAST_FAILED;
    if (rank == 0) {
        *v = (verdict){.state = (lg__last_state)o->last_state,
                       .step = o->last_step,
                       .bytes = o->last_bytes,
                       .in_place = o->last_in_place != 0};
    }
    v->state = o->last_state == LG__LAST_IN_FLIGHT ? LG__LAST_IN_FLIGHT : v->state;
    if (failed && (v->status == LG_OK || (o->last_own != 0 && !v->own))) {
        v->own = o->last_own != 0;
        v->status = (lg_status)o->last_status;
        lg_error_set(&v->err, v->status, "%.*s", (int)o->last_message_bytes, message);
        v->err.os_errno = o->last_errno;
        v->err.rank = o->last_rank;
        if (v->own && world > 1 && v->err.rank < 0) {
            lg_error_wrap(&v->err, "rank %" PRIu32, rank);
            v->err.rank = (int)rank;
        }
    }
}

static void fill_opening(const lg_session *s, lg__purpose purpose, const lg__last *last, opening *o)
{
    *o = (opening){.saves = s->saves,
                   .purpose = (uint32_t)purpose,
                   .last_state = (uint32_t)last->state,
                   .last_status = (uint32_t)last->err.status,
                   .last_errno = last->err.os_errno,
                   .last_rank = last->err.rank,
                   .last_step = last->step,
                   .last_bytes = last->bytes_total,
                   .last_own = last->own,
                   .last_in_place = last->in_place,
                   .last_message_bytes = (uint32_t)strlen(last->err.message)};
    memcpy(o->magic, OPENING_MAGIC, sizeof OPENING_MAGIC);
}

/* Is what rank `rank` sent whole, and what rank 0 is about? `mine`: the call here. */
static lg_status check_opening(uint32_t rank, const opening *o, size_t bytes, const opening *first, lg__purpose mine,
                               lg_error *err)
{
    const char *call = calls[rank > 0 ? first->purpose : (uint32_t)mine];
    const bool whole = bytes >= sizeof *o && memcmp(o->magic, OPENING_MAGIC, sizeof OPENING_MAGIC) == 0 &&
                       (uint64_t)o->message_bytes + o->last_message_bytes == bytes - sizeof *o;
    if (!whole || o->purpose == 0 || o->purpose > LG__TO_WAIT) {
        lg_error_set(err, LG_ERR_CONFLICT, "rank %" PRIu32 " is in another call than %s", rank, call);
    } else if (o->purpose != first->purpose) {
        lg_error_set(err, LG_ERR_CONFLICT, "ranks do not call the same: rank 0 is in %s, rank %" PRIu32 " in %s%s",
                     call, rank, calls[o->purpose],
                     o->purpose + first->purpose == LG__TO_LAUNCH + LG__TO_LAUNCH_OR_SKIP
                         ? "; one of them with LG_LAUNCH_SKIP or another max_skips"
                         : "");
    } else {
        return LG_OK;
    }
    err->rank = (int)rank;
    return LG_ERR_CONFLICT;
}

/* One all-gather; the result is the same on all ranks. *same: the summaries of
 * undeclared replicas are equal everywhere. `save` is NULL when there is none. */
static lg_status open_exchange(lg_session *s, lg_save *save, lg__purpose purpose, uint64_t later_ms, lg_status mine,
                               size_t *sizes, bool *same, verdict *v, lg_error *err)
{
    opening o;
    const lg__last last = lg__background_last(s->job);
    fill_opening(s, purpose, &last, &o);
    if (save != NULL) {
        o.step = save->step;
        o.flags = save->flags;
    }
    if (mine == LG_OK && save != NULL) {
        mine = lg__replicas_summary(save, o.summary, err);
    }
    o.status = (uint32_t)mine;
    o.os_errno = mine == LG_OK ? 0 : err->os_errno;
    o.message_bytes = mine == LG_OK ? 0 : (uint32_t)strlen(err->message);
    char text[sizeof o + 2 * LG_ERROR_MESSAGE_MAX];
    memcpy(text, &o, sizeof o);
    memcpy(text + sizeof o, err->message, o.message_bytes);
    memcpy(text + sizeof o + o.message_bytes, last.err.message, o.last_message_bytes);
    void *all = NULL;
    const uint64_t deadline_ms = later_ms > UINT64_MAX - s->deadline_ms ? UINT64_MAX : s->deadline_ms + later_ms;
    lg_status st = lg__comm_all_gather(s->comm, text, sizeof o + o.message_bytes + o.last_message_bytes, &all, sizes,
                                       deadline_ms, err);
    if (st != LG_OK) {
        return lg_error_wrap(err, "waiting for all ranks to call %s", calls[purpose]);
    }
    *same = true;
    opening first = o;
    const char *p = all;
    for (uint32_t r = 0; r < s->comm->size; p += sizes[r++]) {
        opening their = {0};
        memcpy(&their, p, sizes[r] < sizeof their ? sizes[r] : sizeof their);
        first = r == 0 ? their : first;
        lg_error_set(err, LG_OK, "%s", "");
        st = check_opening(r, &their, sizes[r], &first, (lg__purpose)o.purpose, err);
        if (st != LG_OK) {
            break;
        }
        weigh(v, r, s->comm->size, &their, p + sizeof their + their.message_bytes);
        *same = *same && memcmp(their.summary, first.summary, sizeof first.summary) == 0;
    }
    p = all;
    for (uint32_t r = 0; st == LG_OK && r < s->comm->size; p += sizes[r++]) {
        opening their;
        memcpy(&their, p, sizeof their);
        if (their.status != LG_OK) {
            st = first_trouble(r, their.status, their.os_errno, p + sizeof their, their.message_bytes, s->comm->size,
                               err);
        } else if (their.step != first.step || their.saves != first.saves || their.flags != first.flags) {
            st = lg_error_set(err, LG_ERR_CONFLICT,
                              "ranks do not save the same: rank 0 saves step %" PRIu64 " (save number %" PRIu64
                              ", flags 0x%x), rank %" PRIu32 " step %" PRIu64 " (save number %" PRIu64 ", flags 0x%x)",
                              first.step, first.saves, first.flags, r, their.step, their.saves, their.flags);
            err->rank = (int)r;
        }
    }
    lg_free(all);
    if (st == LG_ERR_TIMEOUT && v->state == LG__LAST_IN_FLIGHT && v->status != LG_OK) {
        /* One rank has failed and the coordinator, who cannot know yet, still waits for it. */
        char late[LG_ERROR_MESSAGE_MAX];
        lg__text_copy(late, sizeof late, err->message);
        lg_error_set(err, st, "%s; meanwhile %s (%s)", late, v->err.message, lg_status_name(v->status));
        err->rank = v->err.rank;
    }
    return st;
}

/* Another session has taken over: every later save fails. */
static void note_superseded(lg_session *s, lg_status st, const lg_error *err)
{
    if (st == LG_ERR_SUPERSEDED && s->broken == LG_OK) {
        s->broken = st;
        lg__text_copy(s->broken_message, sizeof s->broken_message, err->message);
    }
}

void lg__commit_failed(lg_session *s, uint64_t step, lg_status st, lg_error *err)
{
    s->status.saves_failed++;
    lg_error_wrap(err, "save step %" PRIu64, step);
    note_superseded(s, st, err);
}

/* Settles the save before, whose fate all ranks know now. Its failure is the
 * result, once. */
static lg_status settle_last(lg_session *s, const verdict *v, lg_error *err)
{
    if (v->state != LG__LAST_COMMITTED && v->state != LG__LAST_FAILED) {
        return LG_OK;
    }
    lg__background_settle(s, v->state == LG__LAST_COMMITTED, v->in_place, v->bytes);
    if (v->state == LG__LAST_COMMITTED) {
        return LG_OK;
    }
    *err = v->err;
    err->status = v->status;
    lg_error_wrap(err, "save step %" PRIu64 " in the background", v->step);
    note_superseded(s, v->status, err);
    return v->status;
}

/* Gives undeclared tensors their layouts; a second all-gather only when ranks
 * differ or declared replicas are compared. */
static lg_status settle_replicas(lg_save *save, bool same, bool check_declared, size_t *sizes, lg_error *err)
{
    lg_session *s = save->session;
    if (same && !check_declared) {
        return lg__replicas_settle(save, NULL, NULL, err);
    }
    lg__buf mine;
    lg__buf_init(&mine, SIZE_MAX / 2);
    lg_error local = LG_ERROR_INIT;
    /* One byte, shorter than any entry, says that this rank could not make one; a rank that declares all of its tensors
     * has an empty one. */
    static const char failed[1] = {0};
    bool made = lg__replicas_list(save, &mine, &local) == LG_OK;
    const void *data = made ? (mine.len > 0 ? mine.data : failed) : failed;
    void *all = NULL;
    lg_status st =
        lg__comm_all_gather(s->comm, data, made ? mine.len : sizeof failed, &all, sizes, s->deadline_ms, err);
    lg__buf_free(&mine);
    for (uint32_t r = 0; st == LG_OK && r < s->comm->size; r++) {
        if (sizes[r] == sizeof failed) {
            st = lg_error_set(err, LG_ERR_PEER, "rank %" PRIu32 " could not list its tensors%s%s", r,
                              local.message[0] != '\0' ? ": " : "", local.message);
        }
    }
    if (st == LG_OK) {
        st = lg__replicas_settle(save, all, sizes, err);
    }
    lg_free(all);
    return st;
}

/* ------------------------------------------------- the coordinator begins */

static lg_status new_hex(size_t bytes, char *out, lg_error *err)
{
    uint8_t random[16];
    LG__TRY(lg__random(random, bytes, err));
    lg__hex(random, bytes, out);
    return LG_OK;
}

/* May this session save here, and as which run? */
static lg_status settle_run(lg_session *s, char run_id[LG_RUN_ID_TEXT], lg_error *err)
{
    if (s->has_run) {
        memcpy(run_id, s->run_id, LG_RUN_ID_TEXT);
        return LG_OK;
    }
    if (!s->settled && (s->flags & LG_SESSION_NEW_RUN) == 0) {
        lg__walk *w;
        LG__TRY(lg__walk_read(s->store, &w, err));
        const lg__walk_item *there = NULL;
        for (size_t i = 0; i < w->n && there == NULL; i++) {
            there = w->items[i].is_rollback ? NULL : &w->items[i];
        }
        lg_status st = LG_OK;
        if (there != NULL) {
            st = lg_error_set(
                err, LG_ERR_OTHER_RUN,
                "the root holds checkpoints of a run that this session did not resume (%s); resume "
                "first, use another root, or say that this is a new run (LG_SESSION_NEW_RUN, new_run=True)",
                there->name);
        }
        lg__walk_free(w);
        LG__TRY(st);
    }
    return new_hex(16, run_id, err);
}

static bool committed_before(const lg_session *s, const lg_save *save, lg_generation *g)
{
    if (!s->has_parent || s->parent_step != save->step || s->not_durable) {
        return false;
    }
    *g = s->parent;
    return true;
}

/* Makes the folder that all ranks write to. */
static lg_status begin_attempt(lg_save *save, bool sync_root, attempt *a, lg_error *err)
{
    lg_session *s = save->session;
    *a = (attempt){0};
    if ((save->flags & LG_SAVE_IF_NEW) != 0 && committed_before(s, save, &a->generation)) {
        a->skip = LG_SKIP_COMMITTED;
        lg__step_folder(save->step, a->generation, a->final);
        return LG_OK;
    }
    LG__TRY(lg__owner_check(s->store, s->epoch, err));
    LG__TRY(settle_run(s, a->run_id, err));
    LG__TRY(new_hex(LG__ATTEMPT_HEX / 2, a->token, err));
    a->generation = (lg_generation){s->epoch, ++s->serial};
    lg__step_folder(save->step, a->generation, a->final);
    if (lg__store_can(s->store, LG_CAP_RENAME_DIR)) {
        lg__partial_folder(save->step, a->generation, a->token, a->folder);
    } else {
        memcpy(a->folder, a->final, sizeof a->folder);
    }
    LG__TRY(lg__store_make_dir(s->store, a->folder, err));
    return sync_root ? lg__store_sync_dir(s->store, "", err) : LG_OK;
}

static lg_status tell_attempt(lg_session *s, lg_status mine, attempt *a, lg_error *err)
{
    void *data = a;
    size_t bytes = sizeof *a;
    LG__TRY(lg__session_tell(s, mine, &data, &bytes, err));
    if (data != a) {
        if (bytes == sizeof *a) {
            memcpy(a, data, sizeof *a);
        }
        lg_free(data);
        LG__RETURN_IF(bytes != sizeof *a, err, LG_ERR_CONFLICT, "rank 0 runs another version of lastgood");
    }
    return LG_OK;
}

/* --------------------------------------------------- step 1: on every rank */

lg_status lg__commit_attached(lg_save *save, const attempt *a, uint64_t *bytes, lg_error *err)
{
    lg_store *store = save->session->store;
    for (size_t i = 0; i < save->n_attached; i++) {
        const lg__save_attach *file = &save->attached[i];
        char path[2 * LG__NAME_MAX];
        lg__path_join(path, sizeof path, a->folder, file->name);
        lg_file *f;
        LG__TRY(lg__store_create(store, path, file->bytes, &f, err));
        lg_status st = file->bytes > 0 ? lg__store_write(store, f, file->data, file->bytes, 0, err) : LG_OK;
        if (st == LG_OK) {
            st = lg__store_sync(store, f, err);
        }
        lg_error ignored = LG_ERROR_INIT;
        lg_status closed = lg__store_close(store, f, st == LG_OK ? err : &ignored);
        LG__TRY(st != LG_OK ? st : closed);
        *bytes += file->bytes;
    }
    return LG_OK;
}

lg_status lg__commit_vanished(lg_status st, const attempt *a, lg_error *err)
{
    return st != LG_ERR_NOT_FOUND
               ? st
               : lg_error_set(err, LG_ERR_SUPERSEDED,
                              "the folder %s vanished while it was written: another session took the root over",
                              a->folder);
}

/* By a later owner, or by the coordinator because another rank has failed. */
static bool is_ended(const lg_session *s, const attempt *a)
{
    lg_error look = LG_ERROR_INIT;
    bool there = false;
    if (lg__owner_check(s->store, s->epoch, &look) == LG_ERR_SUPERSEDED ||
        (lg__store_exists(s->store, "", a->folder, &there, &look) == LG_OK && !there)) {
        return true;
    }
    return lg__store_exists(s->store, a->folder, LG__MANIFEST, &there, &look) == LG_OK && there; /* a tombstone */
}

lg_status lg__commit_unwritten(const lg_session *s, lg_status st, const attempt *a, lg_error *err)
{
    return st == LG_ERR_NOT_FOUND && is_ended(s, a) ? lg__commit_vanished(st, a, err) : st;
}

static lg_status write_mine(lg_save *save, const attempt *a, const lg__save_ids *ids, lg__written *out, lg_error *err)
{
    lg_session *s = save->session;
    lg__plan *plan = NULL;
    LG__TRY(lg__plan_get(&s->plan, save, ids, &plan, err));
    lg_status st = lg__save_write(save, s->store, a->folder, plan, ids, out, err);
    lg__plan_keep(&s->plan, plan, save);
    if (st == LG_OK) {
        /* The coordinator syncs the folder in any case: behind the manifest, or before it. */
        st = lg__is_coordinator(s) ? lg__commit_attached(save, a, &out->bytes, err)
                                   : lg__store_sync_dir(s->store, a->folder, err);
    }
    return lg__commit_unwritten(s, st, a, err);
}

typedef struct outcome {
    uint32_t status;
    int32_t os_errno;
    uint32_t message_bytes;
    uint32_t unused;
    lg__written written;
} outcome;

/* All ranks say how their writing went; the result is the same everywhere.
 * to->written[r] is filled for all ranks. */
static lg_status gather_outcomes(lg_session *s, lg_status mine, const lg__written *my_written, scratch *to,
                                 lg_error *err)
{
    outcome o = {.status = (uint32_t)mine, .os_errno = mine == LG_OK ? 0 : err->os_errno};
    o.message_bytes = mine == LG_OK ? 0 : (uint32_t)strlen(err->message);
    o.written = *my_written;
    char text[sizeof o + LG_ERROR_MESSAGE_MAX];
    memcpy(text, &o, sizeof o);
    memcpy(text + sizeof o, err->message, o.message_bytes);
    void *all = NULL;
    lg_status st = lg__comm_all_gather(s->comm, text, sizeof o + o.message_bytes, &all, to->sizes, s->deadline_ms, err);
    if (st != LG_OK) {
        return lg_error_wrap(err, "waiting for all ranks to write their files");
    }
    const char *p = all;
    for (uint32_t r = 0; st == LG_OK && r < s->comm->size; p += to->sizes[r++]) {
        outcome their;
        if (to->sizes[r] < sizeof their) {
            st = lg_error_set(err, LG_ERR_CONFLICT, "rank %" PRIu32 " is in another call than lg_save_commit", r);
            break;
        }
        memcpy(&their, p, sizeof their);
        to->written[r] = their.written;
        st = first_trouble(r, their.status, their.os_errno, p + sizeof their, to->sizes[r] - sizeof their,
                           s->comm->size, err);
    }
    lg_free(all);
    return st;
}

/* --------------------------------------- steps 2 to 5: on the coordinator */

/* The text of a report that must be the one that `rank` wrote. */
static lg_status read_report_text(lg_store *store, lg_file *f, const char *name, uint32_t rank, const lg__written *w,
                                  lg__report **out, lg_error *err)
{
    uint8_t head_bytes[LG__SUMS_HEAD_BYTES], digest[LG__SHA256_BYTES];
    lg__sums_head head;
    LG__TRY(lg__store_read(store, f, head_bytes, sizeof head_bytes, 0, err));
    LG__TRY(lg__sums_head_decode(head_bytes, sizeof head_bytes, w->sums_bytes, &head, err));
    char *text = lg__malloc(head.report_bytes);
    if (text == NULL) {
        return lg__nomem(err);
    }
    lg_status st = lg__store_read(store, f, text, head.report_bytes, head.report_at, err);
    if (st == LG_OK) {
        st = lg__sha256_of(text, head.report_bytes, digest, err);
    }
    if (st == LG_OK && memcmp(digest, w->report, sizeof digest) != 0) {
        st = lg_error_set(err, LG_ERR_CORRUPT, "%s is not what rank %" PRIu32 " wrote: it holds another report", name,
                          rank);
    }
    if (st == LG_OK) {
        st = lg__report_decode(text, head.report_bytes, out, err);
    }
    lg__free(text);
    return st;
}

/* The report that is on the disk. `own`: what this process has just written and
 * synced, or NULL; it is taken where its file is in place, and not read again,
 * which would prove no more than what the page cache holds. */
static lg_status read_report(lg_store *store, const char *folder, uint32_t rank, const lg__written *w, lg__report **own,
                             lg__report **out, lg_error *err)
{
    char name[LG__NAME_MAX], path[2 * LG__NAME_MAX];
    lg__sums_file(rank, name);
    lg__path_join(path, sizeof path, folder, name);
    lg_file *f;
    uint64_t bytes;
    LG__TRY(lg__store_open_file(store, path, &f, &bytes, err));
    lg_status st = LG_OK;
    if (bytes != w->sums_bytes || bytes < LG__SUMS_HEAD_BYTES) {
        st = lg_error_set(err, LG_ERR_CORRUPT, "%s has %" PRIu64 " bytes, rank %" PRIu32 " wrote %" PRIu64, name, bytes,
                          rank, w->sums_bytes);
    } else if (own != NULL && *own != NULL) {
        *out = *own;
        *own = NULL;
    } else {
        st = read_report_text(store, f, name, rank, w, out, err);
    }
    lg_error ignored = LG_ERROR_INIT;
    lg__store_close(store, f, &ignored);
    return st == LG_OK ? LG_OK : lg_error_wrap(err, "report of rank %" PRIu32, rank);
}

static lg_status describe_attached(const lg_save *save, lg__manifest *m, lg_error *err)
{
    m->attached = lg__arena_array(m->arena, save->n_attached, sizeof *m->attached);
    if (m->attached == NULL) {
        return lg__nomem(err);
    }
    m->n_attached = save->n_attached;
    for (size_t i = 0; i < save->n_attached; i++) {
        m->attached[i].name = lg__arena_strdup(m->arena, save->attached[i].name);
        m->attached[i].bytes = save->attached[i].bytes;
        if (m->attached[i].name == NULL) {
            return lg__nomem(err);
        }
        LG__TRY(lg__sha256_of(save->attached[i].data, save->attached[i].bytes, m->attached[i].sha256, err));
    }
    return LG_OK;
}

static lg_status make_manifest(lg_save *save, const attempt *a, const lg__written *written, lg__buf *out, lg_error *err)
{
    lg_session *s = save->session;
    uint32_t world = s->world;
    lg__report **reports = lg__calloc(world, sizeof *reports);
    lg__manifest *m = NULL;
    lg_status st = reports == NULL ? lg__nomem(err) : lg__manifest_new(&m, err);
    for (uint32_t r = 0; st == LG_OK && r < world; r++) {
        lg__report **own = r == save->rank ? &save->report : NULL;
        st = read_report(s->store, a->folder, r, &written[r], own, &reports[r], err);
    }
    if (st == LG_OK) {
        m->major = LG__FORMAT_MAJOR;
        m->minor = LG__FORMAT_MINOR;
        memcpy(m->run_id, a->run_id, sizeof m->run_id);
        lg__text_copy(m->attempt, sizeof m->attempt, a->token);
        m->generation = a->generation;
        m->step = save->step;
        m->has_parent = s->has_parent;
        m->parent = s->parent;
        m->parent_step = s->parent_step;
        m->parent_verified = s->parent_verified;
        lg__utc(m->created);
        m->world = world;
        m->block_bytes = s->block_bytes;
        st = describe_attached(save, m, err);
    }
    if (st == LG_OK) {
        st = lg__merge((const lg__report *const *)reports, world, written, m, err);
    }
    if (st == LG_OK) {
        st = lg__manifest_encode(m, out, err);
    }
    for (uint32_t r = 0; reports != NULL && r < world; r++) {
        lg__report_free(reports[r]);
    }
    lg__free(reports);
    lg__manifest_free(m);
    return st;
}

bool lg__commit_is_ours(lg_store *store, const char *folder, const char *token, bool *other)
{
    char path[2 * LG__NAME_MAX];
    lg__path_join(path, sizeof path, folder, LG__MANIFEST);
    lg__buf text;
    lg__buf_init(&text, LG__MANIFEST_MAX);
    lg__manifest *m = NULL;
    lg_error ignored = LG_ERROR_INIT;
    bool ours = false;
    *other = false;
    if (lg__store_read_all(store, path, &text, &ignored) == LG_OK) {
        *other = true;
        if (lg__manifest_decode(text.data, text.len, &m, &ignored) == LG_OK) {
            ours = !m->tombstone && strcmp(m->attempt, token) == 0;
            *other = !ours;
        }
    }
    lg__manifest_free(m);
    lg__buf_free(&text);
    return ours;
}

static lg_status write_manifest_file(lg_store *store, const char *folder, const lg__buf *text, lg_error *err)
{
    char path[2 * LG__NAME_MAX];
    lg__path_join(path, sizeof path, folder, LG__MANIFEST);
    lg_file *f;
    LG__TRY(lg__store_create(store, path, text->len, &f, err));
    lg_status st = lg__store_write(store, f, text->data, text->len, 0, err);
    if (st == LG_OK) {
        st = lg__store_sync(store, f, err);
    }
    lg_error ignored = LG_ERROR_INIT;
    lg_status closed = lg__store_close(store, f, st == LG_OK ? err : &ignored);
    return st != LG_OK ? st : closed;
}

static lg_status superseded(lg_error *err)
{
    return lg_error_set(err, LG_ERR_SUPERSEDED, "another session took the root over and ended this save");
}

/* What is not where it was left is a later owner's doing if there is one, who
 * claims first; else an answer of the store like any other. */
static lg_status superseded_or(lg_status st, lg_session *s, lg_error *err)
{
    lg_error look = LG_ERROR_INIT;
    return lg__owner_check(s->store, s->epoch, &look) == LG_ERR_SUPERSEDED ? superseded(err) : st;
}

/* Commit by renaming the folder. Sets *committed once the rename is known to
 * have taken place, whatever comes after. */
static lg_status commit_by_rename(lg_session *s, const attempt *a, const lg__buf *text, bool *committed, lg_error *err)
{
    LG__TRY(write_manifest_file(s->store, a->folder, text, err)); /* 3 */
    LG__TRY(lg__store_sync_dir(s->store, a->folder, err));
    LG__TRY(lg__owner_check(s->store, s->epoch, err));                       /* 4 */
    lg_status st = lg__store_rename_dir(s->store, a->folder, a->final, err); /* 5 */
    if (st != LG_OK) {
        /* A repeated request may report the failure of the second one. */
        bool other;
        if (!lg__commit_is_ours(s->store, a->final, a->token, &other)) {
            return st;
        }
    }
    *committed = true;
    return lg__store_sync_dir(s->store, "", err);
}

/* Commit by creating the manifest conditionally. */
static lg_status commit_by_create(lg_session *s, const attempt *a, const lg__buf *text, bool *committed, lg_error *err)
{
    char path[2 * LG__NAME_MAX];
    lg__path_join(path, sizeof path, a->folder, LG__MANIFEST);
    LG__TRY(lg__store_sync_dir(s->store, a->folder, err));
    LG__TRY(lg__owner_check(s->store, s->epoch, err));                            /* 4 */
    lg_status st = lg__store_put_new(s->store, path, text->data, text->len, err); /* 3 and 5 */
    if (st != LG_OK) {
        bool other;
        if (!lg__commit_is_ours(s->store, a->folder, a->token, &other)) {
            return other ? superseded(err) : st;
        }
    }
    *committed = true;
    LG__TRY(lg__store_sync_dir(s->store, a->folder, err));
    return lg__store_sync_dir(s->store, "", err);
}

lg_status lg__commit_coordinate(lg_save *save, const attempt *a, const lg__written *written, bool *committed,
                                lg_error *err)
{
    lg_session *s = save->session;
    lg__buf text;
    lg__buf_init(&text, LG__MANIFEST_MAX);
    lg_status st = make_manifest(save, a, written, &text, err); /* 2 */
    if (st == LG_OK) {
        st = lg__store_can(s->store, LG_CAP_RENAME_DIR) ? commit_by_rename(s, a, &text, committed, err)
                                                        : commit_by_create(s, a, &text, committed, err);
    }
    lg__buf_free(&text);
    if (!*committed && (st == LG_ERR_NOT_FOUND || st == LG_ERR_EXISTS)) {
        st = superseded_or(st, s, err);
    }
    if (*committed) {
        s->not_durable = st != LG_OK;
        if (st != LG_OK) {
            lg_error_wrap(err, "%s is in place but not known to be durable", a->final);
            err->status = st = LG_ERR_NOT_DURABLE;
        }
    }
    return st;
}

/* Leaves the cause beside what was written, then makes sure that nothing can
 * commit it any more and frees the space. */
static void give_up(lg_session *s, const attempt *a, const lg_error *cause)
{
    char path[2 * LG__NAME_MAX];
    lg_error ignored = LG_ERROR_INIT;
    lg__path_join(path, sizeof path, a->folder, LG__FAILED);
    lg__store_put_new(s->store, path, cause->message, strlen(cause->message), &ignored);
    lg__attempt_end(s->store, a->folder, a->run_id, a->generation, a->token, s->epoch, &ignored);
}

/* ------------------------------------------------------------- the whole */

void lg__commit_remember(lg_session *s, uint64_t step, const attempt *a)
{
    s->has_run = true;
    memcpy(s->run_id, a->run_id, sizeof s->run_id);
    s->settled = true;
    s->has_parent = true;
    s->parent = a->generation;
    s->parent_step = step;
    s->parent_verified = true;
}

void lg__commit_ids(const lg_session *s, const attempt *a, lg__save_ids *out)
{
    *out = (lg__save_ids){.generation = a->generation, .domain = s->domain};
    memcpy(out->run_id, a->run_id, sizeof out->run_id);
    lg__text_copy(out->attempt, sizeof out->attempt, a->token);
}

lg_status lg__commit_open(lg_save *save, lg__purpose purpose, bool sync_root, scratch *to, lg_status mine, attempt *a,
                          lg_status *local, lg_error *local_err, lg_error *err)
{
    lg_session *s = save->session;
    uint64_t number = s->saves++;
    bool check_declared = s->check_replicas != 0 && number % s->check_replicas == 0 && s->comm->size > 1;
    if (mine == LG_OK && save->failed.status != LG_OK) {
        mine = save->failed.status;
        *err = save->failed;
    }
    if (mine == LG_OK && s->broken != LG_OK) {
        mine = lg_error_set(err, s->broken, "%s", s->broken_message);
    }
    if (mine == LG_OK && s->comm->size > 1) {
        mine = lg__replicas_digest(save, check_declared, err);
    }
    bool same = true;
    verdict v = {0};
    *a = (attempt){0};
    LG__TRY(open_exchange(s, save, purpose, 0, mine, to->sizes, &same, &v, err));
    if (v.state == LG__LAST_IN_FLIGHT) {
        LG__RETURN_IF(purpose != LG__TO_LAUNCH_OR_SKIP, err, LG_ERR_INTERNAL, "a save is in flight");
        a->skip = LG_SKIP_IN_FLIGHT;
        *local = LG_OK;
        return LG_OK;
    }
    lg_status before = settle_last(s, &v, err);
    to->earlier = before != LG_OK;
    LG__TRY(before);

    /* A contradiction is the same on all ranks, and rank 0 tells it; trouble of
     * one rank alone travels with the outcomes. */
    mine = settle_replicas(save, same, check_declared, to->sizes, err);
    if (mine != LG_OK && s->comm->broken) {
        return mine; /* nobody can be told any more */
    }
    *local_err = *err;
    if (lg__is_coordinator(s) && mine == LG_OK) {
        mine = begin_attempt(save, sync_root, a, err);
        *local_err = *err;
    }
    lg_status told = tell_attempt(s, mine, a, err);
    if (told != LG_OK) {
        if (lg__is_coordinator(s) && mine == LG_OK && a->skip == 0) {
            give_up(s, a, err);
        }
        return told;
    }
    *local = mine;
    return LG_OK;
}

lg_status lg__commit_settle(lg_session *s, uint64_t later_ms, lg_status mine, lg_error *err)
{
    bool same;
    verdict v = {0};
    size_t *sizes = lg__calloc(s->comm->size, sizeof *sizes);
    LG__RETURN_IF(sizes == NULL, err, LG_ERR_NOMEM, "out of memory");
    lg_status st = open_exchange(s, NULL, LG__TO_WAIT, later_ms, mine, sizes, &same, &v, err);
    lg__free(sizes);
    return st != LG_OK ? st : settle_last(s, &v, err);
}

/* ------------------------------------------------------------- the whole */

static lg_status run(lg_save *save, scratch *to, lg_status mine, lg_save_info *info, lg_error *err)
{
    lg_session *s = save->session;
    attempt a;
    lg_error own = LG_ERROR_INIT;
    if (mine == LG_OK) { /* a save in the background ends first */
        mine = lg__background_wait(s->job, s->deadline_ms / 2, err);
    }
    LG__TRY(lg__commit_open(save, LG__TO_COMMIT, true, to, mine, &a, &mine, &own, err));
    info->generation = a.generation;
    lg__text_copy(info->folder, sizeof info->folder, a.final);
    if (a.skip != 0) {
        info->skipped = 1;
        return LG_OK;
    }

    lg__save_ids ids;
    lg__commit_ids(s, &a, &ids);
    lg__written my_written = {0};
    if (mine != LG_OK) {
        *err = own;
    } else {
        mine = write_mine(save, &a, &ids, &my_written, err); /* 1 */
    }
    lg_status st = gather_outcomes(s, mine, &my_written, to, err);
    bool committed = false;
    uint64_t bytes_total = 0;
    if (st == LG_OK) {
        for (uint32_t r = 0; r < s->comm->size; r++) {
            bytes_total += to->written[r].bytes;
        }
        mine = lg__is_coordinator(s) ? lg__commit_coordinate(save, &a, to->written, &committed, err) : LG_OK; /* 2-5 */
        void *data = &bytes_total;
        size_t bytes = sizeof bytes_total;
        st = lg__session_tell(s, mine, &data, &bytes, err); /* 6 */
        if (data != &bytes_total) {
            lg_free(data);
        }
        if (committed) {
            lg__commit_remember(s, save->step, &a);
        }
        if (committed && mine == LG_OK && st != LG_OK) {
            lg_error_wrap(err, "%s is committed, but not all ranks could be told", a.final);
        }
    }
    if (lg__is_coordinator(s) && st != LG_OK && !committed) {
        give_up(s, &a, err);
    }
    LG__TRY(st);
    info->bytes_written = my_written.bytes;
    info->bytes_total = bytes_total;
    info->unshared = save->unshared;
    lg__commit_remember(s, save->step, &a);
    s->status.last_committed = a.generation;
    s->status.saves_committed++;
    if (lg__is_coordinator(s)) {
        lg__retention_run(s, a.generation); /* 7 */
    }
    return LG_OK;
}

lg_status lg_save_commit(lg_save *save, lg_save_info *info, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(save == NULL, err, LG_ERR_INVALID, "lg_save_commit: no save given");
    lg_session *s = save->session;
    lg_save_info result = {.step = save->step};
    uint64_t began = lg__now_ms();
    lg_status st = lg__session_usable(s, "lg_save_commit", err);
    if (st != LG_OK) {
        lg_save_abort(save);
        return st;
    }
    scratch to;
    st = lg__commit_scratch_new(s->comm->size, &to, err);
    if (st == LG_OK || to.sizes != NULL) {
        st = run(save, &to, st, &result, err);
    }
    lg__commit_scratch_free(&to);
    result.seconds = (double)(lg__now_ms() - began) / 1000;
    if (st != LG_OK && !to.earlier) {
        lg__commit_failed(s, save->step, st, err);
    } else if (st == LG_OK && info != NULL) {
        *info = result;
    }
    lg_save_abort(save);
    return st;
}
