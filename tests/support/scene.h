/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_SCENE_H
#define LG_TESTS_SCENE_H

/* What scenes of the protocol are made of: sessions of one rank on a store, and
 * looks at what is in the root. For programs that include cmocka.h before. */

#include "fault_store.h"
#include "ranks.h"

#include "core/walk.h"

static inline run_spec run_of(uint32_t world, const uint64_t *steps, size_t n)
{
    return (run_spec){.world = world, .steps = steps, .n_steps = n};
}

/* What one process alone finds: the step, UINT64_MAX for an empty root. */
static inline uint64_t resume_finds(test_root *root)
{
    run_spec s = run_of(1, NULL, 0);
    root_run(root, &s);
    return s.resumed_from;
}

/* A session of one rank on `store`; NULL with err filled if it cannot open. */
static inline lg_session *open_on(lg_store *store, uint32_t keep_last, lg_error *err)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = store;
    o.keep_last = keep_last;
    lg_session *s = NULL;
    return lg_session_open("root", &o, &s, err) == LG_OK ? s : NULL;
}

static inline lg_session *must_resume(lg_store *store, uint32_t keep_last, model *m)
{
    lg_error err = LG_ERROR_INIT;
    lg_session *s = open_on(store, keep_last, &err);
    if (s == NULL) {
        fail_msg("%s", err.message);
    }
    model_init(m, 0, 1);
    lg_resume_result *r = NULL;
    lg_status st = lg_resume(s, NULL, model_targets, m, &r, &err);
    if (st != LG_OK && st != LG_ERR_EMPTY) {
        fail_msg("%s", err.message);
    }
    lg_resume_result_free(r);
    return s;
}

/* Such a session on a store that can be made to fail. */
typedef struct faulty {
    fault_store *f;
    lg_session *s;
    model m;
} faulty;

static inline void faulty_begin(faulty *x, const test_root *root, uint32_t keep_last)
{
    x->f = fault_store_new(root->store);
    x->s = must_resume(fault_store_handle(x->f), keep_last, &x->m);
}

static inline void faulty_end(faulty *x)
{
    lg_session_close(x->s, NULL);
    fault_store_free(x->f);
}

static inline lg_status save_step(lg_session *s, model *m, uint64_t step, lg_error *err)
{
    model_fill(m, step);
    return model_save(s, m, step, NULL, err);
}

static inline size_t count_kind(lg_store *store, lg__root_kind kind)
{
    lg__walk *w;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg__walk_read(store, &w, &err), LG_OK);
    size_t n = 0;
    for (size_t i = 0; i < w->n_others; i++) {
        n += w->others[i].parsed.kind == kind;
    }
    lg__walk_free(w);
    return n;
}

#endif
