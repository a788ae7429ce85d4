/* SPDX-License-Identifier: Apache-2.0 */

/* Saves in the background, as the trainer sees them: launch, staged, fence,
 * wait. What then happens is background.c's. */

#include "base/error.h"
#include "base/hash.h"
#include "base/mem.h"
#include "core/background.h"

#include <inttypes.h>
#include <string.h>

#define DEFAULT_MAX_SKIPS 10

const char *lg_save_phase_name(lg_save_phase phase)
{
    static const char *const names[] = {"none", "staging", "writing", "waiting for other ranks", "committed", "failed"};
    return (size_t)phase < sizeof names / sizeof names[0] ? names[phase] : "?";
}

static lg_status check_options(const lg_launch_options *o, lg_error *err)
{
    const uint32_t known = LG_LAUNCH_SKIP | LG_LAUNCH_CHECK_SOURCES;
    LG__RETURN_IF(o->size != sizeof *o, err, LG_ERR_INVALID,
                  "lg_launch_options has size %zu, not %zu: set it up with LG_LAUNCH_OPTIONS_INIT", o->size, sizeof *o);
    LG__RETURN_IF((o->flags & ~known) != 0, err, LG_ERR_INVALID, "unknown launch flags 0x%x", o->flags & ~known);
    return LG_OK;
}

static lg__purpose purpose_of(const lg_session *s, const lg_launch_options *o)
{
    const uint32_t most = o->max_skips != 0 ? o->max_skips : DEFAULT_MAX_SKIPS;
    return (o->flags & LG_LAUNCH_SKIP) != 0 && s->skips_in_a_row < most ? LG__TO_LAUNCH_OR_SKIP : LG__TO_LAUNCH;
}

/* *earlier: the error is that of the save before. */
static lg_status launch(lg_save **save, const lg_launch_options *o, lg_launch_info *info, bool *earlier, lg_error *err)
{
    static const lg_launch_options defaults = LG_LAUNCH_OPTIONS_INIT;
    lg_session *s = (*save)->session;
    lg_status mine = o != NULL ? check_options(o, err) : LG_OK;
    o = o != NULL && mine == LG_OK ? o : &defaults;
    lg__commit_scratch to;
    lg_status ready = lg__commit_scratch_new(s->comm->size, &to, mine == LG_OK ? err : &(lg_error)LG_ERROR_INIT);
    if (to.sizes == NULL) { /* not even for the exchange that would tell it */
        lg__commit_scratch_free(&to);
        return lg__nomem(err);
    }
    mine = mine == LG_OK ? ready : mine;
    lg__background *job = NULL;
    if (mine == LG_OK) {
        mine = lg__background_new(s, *save, &job, err);
    }
    (*save)->fills = o->fill != NULL || o->ready != NULL;
    const lg__purpose purpose = purpose_of(s, o);
    if (mine == LG_OK && purpose == LG__TO_LAUNCH) {
        mine = lg__background_wait(s->job, s->deadline_ms / 2, err);
    }
    lg__attempt a;
    lg_error local_err = LG_ERROR_INIT;
    lg_status local = LG_OK;
    lg_status st = lg__commit_open(*save, purpose, false, &to, mine, &a, &local, &local_err, err);
    *earlier = to.earlier;
    lg__commit_scratch_free(&to);
    if (job != NULL) {
        *save = NULL; /* the job's */
    }
    if (st != LG_OK || a.skip != 0) {
        lg__background_free(job);
        LG__TRY(st);
        info->skipped = (lg_skip_reason)a.skip;
        info->generation = a.generation;
        lg__text_copy(info->folder, sizeof info->folder, a.final);
        if (a.skip == LG_SKIP_IN_FLIGHT) {
            pthread_mutex_lock(&s->lock);
            s->status.saves_skipped++;
            s->skips_in_a_row++;
            pthread_mutex_unlock(&s->lock);
        }
        return LG_OK;
    }
    s->skips_in_a_row = 0;
    info->generation = a.generation;
    lg__text_copy(info->folder, sizeof info->folder, a.final);
    if (local == LG_OK && o->fill != NULL) {
        local = o->fill(o->fill_arg, &local_err);
        if (local != LG_OK && local_err.status == LG_OK) {
            lg_error_set(&local_err, local, "the function that fills the launch's memory failed");
        }
    }
    lg__background_start(job, &a, o, local, &local_err, info);
    return LG_OK;
}

lg_status lg_save_launch(lg_save *save, const lg_launch_options *options, lg_launch_info *info, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(save == NULL, err, LG_ERR_INVALID, "lg_save_launch: no save given");
    lg_session *s = save->session;
    const uint64_t began = lg__now_ms(), step = save->step;
    lg_launch_info result = {.step = step};
    lg_status st = lg__session_usable(s, "lg_save_launch", err);
    if (st == LG_OK) {
        bool earlier = false;
        st = launch(&save, options, &result, &earlier, err);
        if (st != LG_OK && !earlier) {
            lg__commit_failed(s, step, st, err);
        }
    }
    lg_save_abort(save);
    result.seconds = (double)(lg__now_ms() - began) / 1000;
    if (st == LG_OK && info != NULL) {
        *info = result;
    }
    return st;
}

lg_status lg_session_staged(lg_session *session, int *staged, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(session == NULL || staged == NULL, err, LG_ERR_INVALID, "lg_session_staged: NULL");
    LG__TRY(lg__session_usable(session, "lg_session_staged", err));
    *staged = lg__background_staged(session->job);
    return LG_OK;
}

lg_status lg_session_fence(lg_session *session, uint64_t deadline_ms, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(session == NULL, err, LG_ERR_INVALID, "lg_session_fence: no session");
    LG__TRY(lg__session_usable(session, "lg_session_fence", err));
    return lg__background_fence(session->job, deadline_ms != 0 ? deadline_ms : session->deadline_ms, err);
}

lg_status lg_session_refuse(lg_session *session, lg_status status, const char *message, int *refused, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(session == NULL || status == LG_OK || message == NULL || refused == NULL, err, LG_ERR_INVALID,
                  "lg_session_refuse needs a session, an error, a message and a place for the result");
    LG__TRY(lg__session_usable(session, "lg_session_refuse", err));
    *refused = lg__background_refuse(session->job, status, message);
    return LG_OK;
}

lg_status lg_session_wait(lg_session *session, uint64_t deadline_ms, lg_save_info *info, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(session == NULL, err, LG_ERR_INVALID, "lg_session_wait: no session");
    LG__TRY(lg__session_usable(session, "lg_session_wait", err));
    const uint64_t wait_ms = deadline_ms != 0 ? deadline_ms : session->deadline_ms;
    lg_status st = lg__background_wait(session->job, wait_ms, err);
    st = lg__commit_settle(session, wait_ms, st, err);
    if (st == LG_OK && info != NULL) {
        *info = session->last_launched;
    }
    return st;
}
