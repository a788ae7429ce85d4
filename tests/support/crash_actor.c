/* SPDX-License-Identifier: Apache-2.0 */
#include "crash_proof.h"

#include "ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

static void say(const actor *a, uint32_t mark, uint64_t value)
{
    if (a->disk != NULL) {
        crash_store_mark(a->disk, mark, value, a->session);
    }
    if (a->tell != NULL) {
        a->tell(mark, value, a->session);
    }
}

static lg_status save_one(lg_session *s, const actor *a, const model *m, uint64_t step, bool last, lg_error *err)
{
    if (a->how == COMMIT) {
        return model_save(s, m, step, NULL, err);
    }
    lg_status st = model_launch(s, m, step, NULL, NULL, err);
    return st == LG_OK && (last || a->how == LAUNCH_AND_WAIT) ? lg_session_wait(s, 0, NULL, err) : st;
}

/* Will this step never be there? */
static bool is_over(lg_status st)
{
    return st != LG_ERR_NOT_DURABLE && st != LG_ERR_TIMEOUT && st != LG_ERR_COMM && st != LG_ERR_PEER;
}

static void play(rank_env *env)
{
    actor *a = env->arg;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.keep_last = a->keep_last;
    o.deadline_ms = 20000;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    lg_resume_result *r = NULL;
    lg_status st = lg_resume(s, NULL, model_targets, &m, &r, &env->err);
    const char *wrong = st == LG_OK ? model_wrong(&m, r->step) : NULL;
    if (wrong != NULL) {
        st = lg_error_set(&env->err, LG_ERR_INTERNAL, "step %llu was loaded wrong: %s", (unsigned long long)r->step,
                          wrong);
    }
    const uint64_t from = st == LG_OK ? r->step : NONE;
    if (env->rank == 0) {
        a->resumed_from = from;
        a->skipped = r != NULL ? r->n_skipped : 0;
    }
    lg_resume_result_free(r);
    if (st != LG_OK && st != LG_ERR_EMPTY) {
        env->status = st;
        lg_session_close(s, NULL);
        return;
    }
    say(a, RESUMED, from);
    if (a->ready != NULL && env->rank == 0) {
        *a->ready = true; /* the others wait for rank 0 before they change anything */
    }
    for (size_t i = 0; i < a->n_steps; i++) {
        const uint64_t step = a->steps[i];
        const bool last = i + 1 == a->n_steps;
        model_fill(&m, step);
        say(a, BEGUN, step);
        st = save_one(s, a, &m, step, last, &env->err);
        if (st == LG_OK && (last || a->how != LAUNCH_ON)) {
            say(a, DONE, step);
            if (env->rank == 0) {
                a->saved[i] = true;
            }
        } else if (st != LG_OK && env->rank == 0 && !a->dies && is_over(st)) {
            say(a, FAILED, step);
        }
        if (st != LG_OK && env->rank == 0) {
            a->last_error = env->err;
        }
        if (st != LG_OK && !a->may_fail) {
            env->status = st;
            break;
        }
    }
    lg_session_close(s, NULL);
}

lg_status act(actor *a, uint32_t world, lg_store *store, lg_error *err)
{
    rank_env env[WORLD_MAX];
    if (world == 1) {
        env[0] = (rank_env){.world = 1, .store = store, .arg = a};
        play(&env[0]);
    } else {
        run_ranks(world, store, play, a, env);
    }
    for (uint32_t r = 0; r < world; r++) {
        if (env[r].status != LG_OK) {
            *err = env[r].err;
            return env[r].status;
        }
    }
    return LG_OK;
}

void must_act(actor *a, uint32_t world, lg_store *store)
{
    lg_error err = LG_ERROR_INIT;
    lg_status st = act(a, world, store, &err);
    if (st != LG_OK) {
        fail_msg("session %llu: %s: %s", (unsigned long long)a->session, lg_status_name(st), err.message);
    }
}
