/* SPDX-License-Identifier: Apache-2.0 */

/* The simple level: one process, whole tensors, one call. */

#include "base/error.h"
#include "core/checkpoint.h"
#include "core/session.h"

#include <string.h>

/* A program that writes now and then goes on with the run that the root holds;
 * there is no state to resume. */
static lg_status adopt_run(lg_session *s, lg_error *err)
{
    lg__walk *w;
    LG__TRY(lg__walk_read(s->store, &w, err));
    for (size_t i = 0; i < w->n && !s->has_run; i++) {
        if (w->items[i].m != NULL && !w->items[i].discarded) {
            s->has_run = true;
            memcpy(s->run_id, w->items[i].m->run_id, sizeof s->run_id);
        }
    }
    s->settled = true;
    lg__walk_free(w);
    return LG_OK;
}

lg_status lg_write(const char *root, uint64_t step, const lg_tensor *tensors, size_t n, lg_error *err)
{
    LG__ERR(err);
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.flags = LG_SESSION_PLAIN;
    LG__TRY(lg_session_open(root, &o, &s, err));
    lg_save *save = NULL;
    lg_status st = adopt_run(s, err);
    if (st == LG_OK) {
        st = lg_save_begin(s, step, NULL, &save, err);
    }
    for (size_t i = 0; st == LG_OK && i < n; i++) {
        st = lg_save_tensor(save, &tensors[i], err);
    }
    if (st == LG_OK) {
        st = lg_save_commit(save, NULL, err);
    } else {
        lg_save_abort(save);
    }
    lg_error ignored = LG_ERROR_INIT;
    lg_session_close(s, &ignored);
    return st;
}

/* *gone: it failed because the checkpoint was removed underneath. */
static lg_status read_once(const char *where, const lg_target *targets, size_t n, uint64_t *step, bool *gone,
                           lg_error *err)
{
    *gone = false;
    lg_checkpoint *c;
    LG__TRY(lg_checkpoint_open(where, &c, err));
    lg_load *load = NULL;
    lg_status st = lg_load_begin(c, 0, &load, err);
    for (size_t i = 0; st == LG_OK && i < n; i++) {
        st = lg_load_tensor(load, &targets[i], err);
    }
    if (st == LG_OK) {
        st = lg_load_run(load, err);
    }
    if (st == LG_OK && step != NULL) {
        *step = c->m->step;
    }
    *gone = lg__status_is_damage(st) && lg__folder_gone(c->store, c->folder);
    lg_load_free(load);
    lg_checkpoint_close(c);
    return st;
}

lg_status lg_read(const char *where, const lg_target *targets, size_t n, uint64_t *step, lg_error *err)
{
    LG__ERR(err);
    bool gone;
    lg_status st = read_once(where, targets, n, step, &gone, err);
    for (int i = 1; i < LG__WALK_TRIES && gone; i++) { /* retention of a run that goes on: there is a newer one */
        st = read_once(where, targets, n, step, &gone, err);
    }
    return st == LG_OK ? LG_OK : lg_error_wrap(err, "read %s", where);
}
