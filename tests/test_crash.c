/* SPDX-License-Identifier: Apache-2.0 */

/* What a power cut may leave at any moment of the protocol, made and opened:
 * sessions run on a store that writes down every change; after each of them all
 * trees that a cut may leave there (support/crash_disk.h; equal ones once) are
 * started from, by one rank and by several. What is resumed must be the last
 * step whose commit had returned, or one that was being committed, with all its
 * values; nothing is passed over, no other kept checkpoint is lost, the next
 * save works and is found by the one after it.
 *
 *     test_crash                       within a minute
 *     test_crash '*rollback*'          these scenes only
 *     LASTGOOD_PROVE=full test_crash   within half an hour
 *
 * JOBS processes share the work; LASTGOOD_SEED chooses what is sampled where
 * there are too many combinations. */

#include "support/crash_disk.h"
#include "support/fault_store.h"
#include "support/ranks.h"

#include "core/walk.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define NONE UINT64_MAX
#define MAX_STEPS 32
#define WORLD_MAX 4

static bool full;
static uint32_t jobs = 1;
static uint64_t seed = 2026;

/* ------------------------------------------------------------- what is promised */

enum {
    BEGUN = 1,      /* a step: its save was called */
    DONE,           /* … and returned */
    FAILED,         /* … and returned an error that says it will never be there */
    RESUMED,        /* from a step; NONE: a fresh start */
    ROLLBACK_BEGUN, /* to a step */
    ROLLBACK_DONE
};

typedef struct expect {
    uint64_t chain[MAX_STEPS]; /* committed, the newest last */
    size_t n;
    uint64_t may[MAX_STEPS]; /* may have been committed */
    size_t n_may;
    uint64_t begun[MAX_STEPS], done[MAX_STEPS];
    size_t n_begun, n_done;
    uint64_t session, resumed; /* the newest that resumed, and its mark */
    uint32_t keep_last;
    bool broken; /* a live session resumed from what was not there */
} expect;

static bool among(const uint64_t *all, size_t n, uint64_t step)
{
    for (size_t i = 0; i < n; i++) {
        if (all[i] == step) {
            return true;
        }
    }
    return false;
}

static void take_out(uint64_t *all, size_t *n, uint64_t step)
{
    for (size_t i = *n; i-- > 0;) {
        if (all[i] == step) {
            memmove(all + i, all + i + 1, (--*n - i) * sizeof *all);
        }
    }
}

static void newest_is(expect *e, uint64_t step)
{
    while (e->n > 0 && e->chain[e->n - 1] != step) {
        e->n--;
    }
    if (e->n == 0 && step != NONE) {
        e->chain[e->n++] = step;
    }
    e->n_may = 0;
}

static void hear(expect *e, const crash_event *mark)
{
    uint64_t step = mark->value;
    if (mark->by < e->session) {
        return; /* of a session that another one has taken over from */
    }
    switch (mark->mark) {
    case BEGUN: /* any rank's first word counts */
        if (!among(e->begun, e->n_begun, step)) {
            e->begun[e->n_begun++] = step;
            e->may[e->n_may++] = step;
        }
        break;
    case DONE:
        if (!among(e->done, e->n_done, step)) {
            e->done[e->n_done++] = step;
            e->chain[e->n++] = step;
            e->n_may = 0;
        }
        break;
    case FAILED:
        take_out(e->may, &e->n_may, step);
        break;
    case RESUMED:
        if (e->session == mark->by) {
            break;
        }
        e->session = mark->by;
        e->broken =
            e->broken ||
            !(step == NONE ? e->n == 0 : (e->n > 0 && e->chain[e->n - 1] == step) || among(e->may, e->n_may, step));
        if (step != NONE && among(e->may, e->n_may, step) && !among(e->chain, e->n, step)) {
            e->chain[e->n++] = step;
        }
        newest_is(e, step);
        break;
    case ROLLBACK_BEGUN:
        e->may[e->n_may++] = step;
        break;
    default:
        e->session = mark->by;
        newest_is(e, step);
    }
}

static uint64_t newest_of(const expect *e) { return e->n > 0 ? e->chain[e->n - 1] : NONE; }

static bool allowed(const expect *e, uint64_t step)
{
    return step == newest_of(e) || (step != NONE && among(e->may, e->n_may, step));
}

/* The first of the chain that no retention may have removed; e->n: none. */
static size_t first_kept(const expect *e)
{
    size_t keep = e->keep_last == 0 ? e->n : e->keep_last;
    keep -= e->keep_last != 0 && e->n_may > 0 ? 1 : 0;
    return e->n > keep ? e->n - keep : 0;
}

static uint64_t hash_of(const expect *e)
{
    uint64_t h = e->n * 31 + e->n_may + e->session * 1000003;
    for (size_t i = 0; i < e->n; i++) {
        h = (h ^ e->chain[i]) * UINT64_C(0x9e3779b97f4a7c15);
    }
    for (size_t i = 0; i < e->n_may; i++) {
        h = (h ^ ~e->may[i]) * UINT64_C(0x9e3779b97f4a7c15);
    }
    return h;
}

/* ----------------------------------------------------------------- who acts */

typedef struct actor {
    crash_store *disk; /* for marks; NULL: none */
    uint64_t session;
    uint64_t steps[4];
    size_t n_steps;
    uint32_t keep_last;
    enum { COMMIT, LAUNCH_AND_WAIT, LAUNCH_ON } how;
    bool may_fail;
    bool dies;   /* what it says of its own failures is not heard */
    bool *ready; /* set before its first save; may be NULL */
    /* out */
    uint64_t resumed_from;
    size_t skipped;
    bool saved[4];
} actor;

static void say(const actor *a, uint32_t mark, uint64_t value)
{
    if (a->disk != NULL) {
        crash_store_mark(a->disk, mark, value, a->session);
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
    o.comm = env->comm;
    o.store = env->store;
    o.keep_last = a->keep_last;
    o.deadline_ms = 20000;
    lg_session *s;
    RANK_TRY(env, lg_session_open("crash", &o, &s, &env->err));
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
            a->saved[i] = env->rank == 0 ? true : a->saved[i];
        } else if (st != LG_OK && env->rank == 0 && !a->dies && is_over(st)) {
            say(a, FAILED, step);
        }
        if (st != LG_OK && !a->may_fail) {
            env->status = st;
            break;
        }
    }
    lg_session_close(s, NULL);
}

/* A whole session of `world` ranks. LG_OK, or the first error. */
static lg_status act(actor *a, uint32_t world, lg_store *store, lg_error *err)
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

static void must_act(actor *a, uint32_t world, lg_store *store)
{
    lg_error err = LG_ERROR_INIT;
    lg_status st = act(a, world, store, &err);
    if (st != LG_OK) {
        fail_msg("session %llu: %s: %s", (unsigned long long)a->session, lg_status_name(st), err.message);
    }
}

/* ------------------------------------------------------------- one state */

typedef struct counts {
    uint64_t points, sampled; /* moments; those where not all combinations were made */
    uint64_t made, states;    /* trees; different ones (with what is promised there) */
    uint64_t resumes;
    uint64_t older, newer, empty; /* what they found */
} counts;

typedef struct verdict {
    char why[LG_ERROR_MESSAGE_MAX + 200];
} verdict;

#define DENY(v, ...)                                     \
    do {                                                 \
        snprintf((v)->why, sizeof(v)->why, __VA_ARGS__); \
        return false;                                    \
    } while (0)

static bool look_for(lg_session *s, const uint64_t *step, uint64_t *found, verdict *v)
{
    model m;
    model_init(&m, 0, 1);
    lg_resume_options o = LG_RESUME_OPTIONS_INIT;
    o.step = step;
    lg_resume_result *r = NULL;
    lg_error err = LG_ERROR_INIT;
    lg_status st = lg_resume(s, &o, model_targets, &m, &r, &err);
    *found = st == LG_OK ? r->step : NONE;
    bool passed_over = r != NULL && r->n_skipped > 0;
    const char *wrong = st == LG_OK ? model_wrong(&m, r->step) : NULL;
    if (passed_over) {
        snprintf(v->why, sizeof v->why, "%s was passed over: %s", r->skipped[0].folder, r->skipped[0].reason);
    }
    lg_resume_result_free(r);
    if (passed_over) {
        return false;
    }
    if (st != LG_OK && st != LG_ERR_EMPTY) {
        DENY(v, "%s: %s", lg_status_name(st), err.message);
    }
    if (wrong != NULL) {
        DENY(v, "step %llu was loaded wrong: %s", (unsigned long long)*found, wrong);
    }
    return true;
}

/* What is in the root, without touching it. */
static bool look(lg_store *store, const expect *e, uint64_t *newest, counts *c, verdict *v)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = store;
    o.flags = LG_SESSION_READ_ONLY;
    lg_session *s;
    lg_error err = LG_ERROR_INIT;
    if (lg_session_open("crash", &o, &s, &err) != LG_OK) {
        DENY(v, "read only: %s", err.message);
    }
    bool good = look_for(s, NULL, newest, v);
    c->resumes++;
    for (size_t i = first_kept(e); good && i < e->n; i++) {
        uint64_t found;
        good = look_for(s, &e->chain[i], &found, v);
        c->resumes++;
    }
    lg_session_close(s, NULL);
    if (good && !allowed(e, *newest)) {
        DENY(v, "step %lld is the newest", (long long)*newest);
    }
    /* A cut leaves no committed folder damaged, whether wanted or not. */
    lg__walk *w = NULL;
    if (good && lg__walk_read(store, &w, &err) != LG_OK) {
        DENY(v, "walk: %s", err.message);
    }
    for (size_t i = 0; good && i < w->n; i++) {
        good = lg__walk_check_whole(store, &w->items[i], &err) == LG_OK && w->items[i].status == LG_OK;
        if (!good) {
            snprintf(v->why, sizeof v->why, "%s: %s", w->items[i].name, w->items[i].reason);
        }
    }
    lg__walk_free(w);
    return good;
}

static bool no_rubbish(lg_store *store, verdict *v)
{
    lg__walk *w;
    lg_error err = LG_ERROR_INIT;
    if (lg__walk_read(store, &w, &err) != LG_OK) {
        DENY(v, "walk: %s", err.message);
    }
    const char *left = NULL;
    for (size_t i = 0; i < w->n_others && left == NULL; i++) {
        lg__root_kind kind = w->others[i].parsed.kind;
        left = kind == LG__ROOT_PARTIAL || kind == LG__ROOT_TRASH ? w->others[i].name : NULL;
    }
    if (left != NULL) {
        snprintf(v->why, sizeof v->why, "%s is left", left);
    }
    lg__walk_free(w);
    return left == NULL;
}

/* The next session resumes from `newest` and saves; the one after, of another
 * number of ranks, resumes from that. */
static bool go_on(lg_store *store, uint32_t world, uint32_t then, uint64_t newest, counts *c, verdict *v)
{
    lg_error err = LG_ERROR_INIT;
    actor next = {.session = 1000, .steps = {9001}, .n_steps = 1};
    lg_status st = act(&next, world, store, &err);
    if (st != LG_OK) {
        DENY(v, "the next session, of %u ranks: %s: %s", world, lg_status_name(st), err.message);
    }
    if (next.resumed_from != newest || next.skipped != 0) {
        DENY(v, "%u ranks resume from %lld, not from %lld", world, (long long)next.resumed_from, (long long)newest);
    }
    actor after = {.session = 1001, .steps = {9002}, .n_steps = 1};
    st = act(&after, then, store, &err);
    if (st != LG_OK) {
        DENY(v, "the session after the next, of %u ranks: %s: %s", then, lg_status_name(st), err.message);
    }
    c->resumes += 2;
    if (after.resumed_from != 9001 || after.skipped != 0) {
        DENY(v, "after a save of step 9001 %lld is resumed", (long long)after.resumed_from);
    }
    return no_rubbish(store, v);
}

static bool check_state(const crash_tree *tree, const expect *e, uint32_t caps, uint32_t other, bool both, counts *c,
                        verdict *v)
{
    uint64_t newest = NONE;
    crash_store *s = crash_tree_boot(tree, caps, false);
    bool good = look(crash_store_handle(s), e, &newest, c, v) &&
                go_on(crash_store_handle(s), 1, both ? 1 : other, newest, c, v);
    crash_store_free(s);
    if (good && both) {
        s = crash_tree_boot(tree, caps, false);
        good = go_on(crash_store_handle(s), other, 1, newest, c, v);
        crash_store_free(s);
    }
    c->empty += newest == NONE;
    c->older += newest != NONE && newest == newest_of(e);
    c->newer += newest != NONE && newest != newest_of(e);
    return good;
}

/* ------------------------------------------------------------- all of them */

typedef struct seen {
    uint64_t *hash;
    size_t n, cap;
} seen;

static bool is_new(seen *all, uint64_t hash)
{
    hash = hash == 0 ? 1 : hash;
    if (2 * (all->n + 1) > all->cap) {
        seen more = {calloc(all->cap == 0 ? 1024 : 2 * all->cap, sizeof(uint64_t)), 0,
                     all->cap == 0 ? 1024 : 2 * all->cap};
        if (more.hash == NULL) {
            abort();
        }
        for (size_t i = 0; i < all->cap; i++) {
            if (all->hash[i] != 0) {
                is_new(&more, all->hash[i]);
            }
        }
        free(all->hash);
        *all = more;
    }
    size_t i = hash % all->cap;
    for (; all->hash[i] != 0; i = (i + 1) % all->cap) {
        if (all->hash[i] == hash) {
            return false;
        }
    }
    all->hash[i] = hash;
    all->n++;
    return true;
}

typedef struct proof {
    const char *name;
    crash_store *disk;
    uint32_t caps, other_world;
    crash_effort effort;
    uint64_t again_every; /* start from each so-many-th state once more, and cut that; 0: from none */
    bool both;            /* from each state by one rank and by several; else by turns */
    uint32_t job, n_jobs;
    expect now;
    size_t at, from; /* events; no tree is looked at before `from` */
    seen all;
    counts c;
    bool failed;
} proof;

static bool prove_here(proof *p);

/* A session starts from a state, and the power is cut once more. */
static bool cut_again(proof *p, const crash_tree *tree, verdict *v)
{
    crash_store *s = crash_tree_boot(tree, p->caps, true);
    size_t first;
    crash_store_events(s, &first);
    lg_error err = LG_ERROR_INIT;
    actor next = {
        .disk = s, .session = p->now.session + 100, .steps = {8001}, .n_steps = 1, .keep_last = p->now.keep_last};
    lg_status st = act(&next, p->all.n % 2 == 0 ? 1 : p->other_world, crash_store_handle(s), &err);
    bool good = st == LG_OK;
    if (!good) {
        snprintf(v->why, sizeof v->why, "the next session: %s: %s", lg_status_name(st), err.message);
    } else {
        uint64_t random = crash_random(p->effort.random) | 1;
        proof again = {.name = "cut again while starting",
                       .disk = s,
                       .caps = p->caps,
                       .other_world = p->other_world,
                       .effort = {.all = full ? 8 : 2, .samples = full ? 4 : 2, .random = &random},
                       .n_jobs = 1,
                       .now = p->now,
                       .at = first};
        good = prove_here(&again);
        if (!good) {
            snprintf(v->why, sizeof v->why, "cut again while starting from it");
        }
        p->c.points += again.c.points, p->c.sampled += again.c.sampled, p->c.made += again.c.made;
        p->c.states += again.c.states, p->c.resumes += again.c.resumes, p->c.empty += again.c.empty;
        p->c.older += again.c.older, p->c.newer += again.c.newer;
    }
    crash_store_free(s);
    return good;
}

static int on_tree(const crash_tree *tree, void *arg)
{
    proof *p = arg;
    p->c.made++;
    if (!is_new(&p->all, tree->hash ^ hash_of(&p->now)) || p->all.n % p->n_jobs != p->job) {
        return 0;
    }
    p->c.states++;
    verdict v = {""};
    const uint64_t nth = p->all.n / p->n_jobs;
    const bool both = p->both || nth % 8 == 0;
    bool good = check_state(tree, &p->now, p->caps, p->other_world, both, &p->c, &v);
    if (good && p->again_every != 0 && nth % p->again_every == 0) {
        good = cut_again(p, tree, &v);
    }
    if (good) {
        return 0;
    }
    size_t n;
    const crash_event *events = crash_store_events(p->disk, &n);
    fprintf(stderr, "# %s: after event %zu of %zu (seed %llu): %s\n# allowed: %lld", p->name, p->at, n,
            (unsigned long long)seed, v.why, (long long)newest_of(&p->now));
    for (size_t i = 0; i < p->now.n_may; i++) {
        fprintf(stderr, " or %llu", (unsigned long long)p->now.may[i]);
    }
    fprintf(stderr, "\n# events:\n");
    crash_events_print(events, p->at > 16 ? p->at - 16 : 0, p->at);
    fprintf(stderr, "# tree:\n");
    crash_tree_print(tree);
    p->failed = true;
    return 1;
}

/* A cut before a change may leave what a cut after it may: the change is lost.
 * So all is seen right before what ends a choice, or changes the promise. */
static bool is_covered_by_next(const proof *p)
{
    size_t n;
    const crash_event *events = crash_store_events(p->disk, &n);
    const crash_kind next = p->at < n ? events[p->at].kind : CRASH_MARK;
    return !full && next != CRASH_SYNC && next != CRASH_SYNC_DIR && next != CRASH_MARK;
}

static bool prove_here(proof *p)
{
    crash_disk *d = crash_disk_new(p->disk);
    for (size_t i = 0; i < p->at; i++) {
        crash_disk_step(d);
    }
    do {
        if (p->at >= p->from && !is_covered_by_next(p)) {
            p->c.points++;
            p->c.sampled += !crash_disk_visit(d, &p->effort, on_tree, p);
        }
        const crash_event *e = p->failed ? NULL : crash_disk_step(d);
        if (e == NULL) {
            break;
        }
        p->at++;
        if (e->kind == CRASH_MARK) {
            hear(&p->now, e);
        }
    } while (!p->now.broken);
    crash_disk_free(d);
    free(p->all.hash);
    if (p->now.broken) {
        fprintf(stderr, "# %s: event %zu: a session resumed from a step that was not there\n", p->name, p->at);
        p->failed = true;
    }
    return !p->failed;
}

static void add_counts(counts *to, const counts *c, bool first)
{
    to->points += first ? c->points : 0;
    to->sampled += first ? c->sampled : 0;
    to->made += first ? c->made : 0;
    to->states += c->states, to->resumes += c->resumes;
    to->older += c->older, to->newer += c->newer, to->empty += c->empty;
}

/* In as many processes as wanted; fails the test if one finds something. */
static void prove(proof *p, counts *total)
{
    if (jobs == 1) {
        p->n_jobs = 1;
        bool good = prove_here(p);
        add_counts(total, &p->c, true);
        if (!good) {
            fail_msg("%s", p->name);
        }
        return;
    }
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    bool good = true;
    for (uint32_t j = 0; j < jobs; j++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            p->job = j;
            p->n_jobs = jobs;
            good = prove_here(p) && write(ends[1], &p->c, sizeof p->c) == sizeof p->c;
            _exit(good ? 0 : 1);
        }
    }
    for (uint32_t j = 0; j < jobs; j++) {
        int status;
        assert_true(wait(&status) > 0);
        good = good && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    for (uint32_t j = 0; good && j < jobs; j++) {
        counts c;
        good = read(ends[0], &c, sizeof c) == sizeof c;
        add_counts(total, &c, j == 0);
    }
    close(ends[0]);
    close(ends[1]);
    if (!good) {
        fail_msg("%s", p->name);
    }
}

/* ------------------------------------------------------------------ the scenes */

typedef struct scene {
    const char *name;
    uint32_t world;
    bool no_rename;
    uint32_t keep_last;
    void (*run)(struct scene *s);
    int how; /* the scene's own */
    /* while it runs */
    uint64_t n;  /* sweeps: the operation at which it happens */
    bool missed; /* there is no n-th one */
    size_t from; /* what came before this event is shown by another scene */
    crash_store *disk;
    lg_store *store;
} scene;

static scene *current; /* whose disk "crash:x" is */

/* The linker lets the library call this for lg_store_open. */
lg_status __wrap_lg_store_open(const char *uri, lg_store **out, lg_error *err);
lg_status __real_lg_store_open(const char *uri, lg_store **out, lg_error *err);
lg_status __wrap_lg_store_open(const char *uri, lg_store **out, lg_error *err)
{
    if (uri == NULL || strncmp(uri, "crash:", 6) != 0) {
        return __real_lg_store_open(uri, out, err);
    }
    if (strcmp(uri, "crash:x") != 0) {
        return lg_error_set(err, LG_ERR_NOT_FOUND, "%s is not there", uri);
    }
    *out = crash_store_another(current->disk);
    return LG_OK;
}

static uint32_t scene_caps(const scene *s)
{
    return s->no_rename ? CRASH_CAPS & ~(LG_CAP_RENAME_DIR | LG_CAP_NO_REPLACE) : CRASH_CAPS;
}

/* Runs a scene and proves its record; false if it has no n-th operation. */
static bool run_scene(scene *s, uint64_t n, crash_effort effort, counts *total)
{
    s->n = n;
    s->missed = false;
    s->from = 0;
    s->disk = crash_store_new(scene_caps(s));
    s->store = crash_store_handle(s->disk);
    current = s;
    s->run(s);
    bool there = !s->missed;
    if (there) {
        char name[200];
        snprintf(name, sizeof name, "%s, %u ranks%s, operation %llu", s->name, s->world,
                 s->no_rename ? ", without folder rename" : "", (unsigned long long)n);
        uint64_t random = seed;
        effort.random = &random;
        proof p = {.name = name,
                   .disk = s->disk,
                   .caps = scene_caps(s),
                   .other_world = s->world == 2 ? 3 : 2,
                   .effort = effort,
                   .again_every = n == 0 ? (full ? 50 : 150) : 0,
                   .both = full,
                   .from = s->from,
                   .now = {.keep_last = s->keep_last}};
        prove(&p, total);
    }
    crash_store_free(s->disk);
    current = NULL;
    return there;
}

static void tell(const scene *s, const counts *c, uint64_t records)
{
    print_message("# %s, %u ranks%s: %llu records, %llu moments (%llu sampled), %llu trees made, %llu different "
                  "states, %llu resumes: %llu older, %llu newer, %llu empty\n",
                  s->name, s->world, s->no_rename ? ", without folder rename" : "", (unsigned long long)records,
                  (unsigned long long)c->points, (unsigned long long)c->sampled, (unsigned long long)c->made,
                  (unsigned long long)c->states, (unsigned long long)c->resumes, (unsigned long long)c->older,
                  (unsigned long long)c->newer, (unsigned long long)c->empty);
}

/* That a scene has looked at enough. Not asked of sources that lack something on
 * purpose: only wrong states count as noticing that. */
static bool enough(bool is)
{
    const char *how = getenv("LASTGOOD_PROVE");
    return is || (how != NULL && strcmp(how, "mutant") == 0);
}

/* One record. */
static void prove_scene(scene s, uint32_t world, bool no_rename)
{
    s.world = world;
    s.no_rename = no_rename;
    counts c = {0};
    crash_effort effort = {.all = !full ? 32 : world == 1 ? 4096 : 64, .samples = !full ? 6 : world == 1 ? 64 : 12};
    run_scene(&s, 0, effort, &c);
    tell(&s, &c, 1);
    assert_true(enough(c.states > 100 && c.older > 20 && c.newer > 0));
}

/* A record for each n-th operation at which it may happen. In the short form
 * only from the last files of the first save on, with gaps of `stride`. */
static void prove_sweep(scene s, uint32_t world, bool no_rename, uint64_t first, uint64_t last, uint64_t stride)
{
    s.world = world;
    s.no_rename = no_rename;
    counts c = {0};
    uint64_t records = 0;
    crash_effort effort = {.all = full ? 8 : 2, .samples = full ? 4 : 2};
    for (uint64_t n = full ? 1 : first; (full || n <= last) && run_scene(&s, n, effort, &c); n += full ? 1 : stride) {
        records++;
    }
    tell(&s, &c, records);
    assert_true(enough(full ? records > 15 : records > (last - first) / stride / 2));
}

static void from_here(scene *s) { crash_store_events(s->disk, &s->from); }

/* ---- saves, with and without retention */

static void save_twice(scene *s)
{
    actor first = {.disk = s->disk, .session = 1, .steps = {10}, .n_steps = 1, .keep_last = s->keep_last};
    must_act(&first, s->world, s->store);
    actor second = {.disk = s->disk, .session = 2, .steps = {20, 30, 40}, .n_steps = 3, .keep_last = s->keep_last};
    must_act(&second, s->world, s->store);
    assert_int_equal(second.resumed_from, 10);
}

static void k01_k14_a_power_cut_at_any_moment_of_saves_loses_nothing_that_was_committed(void **state)
{
    (void)state;
    scene all = {.name = "saves", .run = save_twice};
    scene one = {.name = "saves, the last one kept", .run = save_twice, .keep_last = 1};
    scene two = {.name = "saves, the last two kept", .run = save_twice, .keep_last = 2};
    for (int no_rename = 0; no_rename < 2; no_rename++) {
        prove_scene(all, 1, no_rename);
        prove_scene(one, 1, no_rename);
        prove_scene(two, 2, no_rename);
        if (full) {
            prove_scene(one, 3, no_rename);
            prove_scene(one, 4, no_rename);
        }
    }
}

/* ---- saves in the background */

static void launches(scene *s)
{
    actor first = {.disk = s->disk, .session = 1, .steps = {10}, .n_steps = 1, .keep_last = s->keep_last};
    must_act(&first, s->world, s->store);
    actor second = {
        .disk = s->disk, .session = 2, .steps = {20, 30, 40}, .n_steps = 3, .keep_last = s->keep_last, .how = s->how};
    must_act(&second, s->world, s->store);
}

static void k04_a_power_cut_at_any_moment_of_background_saves_loses_nothing_that_was_committed(void **state)
{
    (void)state;
    scene wait = {.name = "background saves", .run = launches, .keep_last = 1, .how = LAUNCH_AND_WAIT};
    scene on = {.name = "background saves, one after the other", .run = launches, .how = LAUNCH_ON};
    for (int no_rename = 0; no_rename < 2; no_rename++) {
        prove_scene(wait, 1, no_rename);
        prove_scene(on, 2, no_rename);
        if (full) {
            prove_scene(on, 1, no_rename);
            prove_scene(wait, 2, no_rename);
            prove_scene(wait, 3, no_rename);
            prove_scene(on, 4, no_rename);
        }
    }
}

/* ---- another session takes over at the n-th operation of a save */

typedef struct intruder {
    scene *s;
    uint64_t at;  /* operations until then */
    bool instead; /* of a lie: the operation does not take place */
    bool ready;   /* the session that is to be disturbed has resumed */
    bool done;
    uint64_t resumed_from;
    pthread_mutex_t lock;
} intruder;

static bool is_now(intruder *i, const fault_event *event, bool before)
{
    if (!before || !i->ready || (FAULT_BIT(event->op) & FAULT_CHANGES) == 0) {
        return false;
    }
    pthread_mutex_lock(&i->lock);
    bool now = i->at > 0 && --i->at == 0;
    pthread_mutex_unlock(&i->lock);
    return now;
}

static lg_status take_over(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)f;
    intruder *i = arg;
    if (!is_now(i, event, before)) {
        return LG_OK;
    }
    from_here(i->s);
    actor other = {.disk = i->s->disk, .session = 3, .steps = {1000, 1010}, .n_steps = 2, .keep_last = i->s->keep_last};
    lg_status st = act(&other, 1, i->s->store, err);
    i->resumed_from = other.resumed_from;
    i->done = true;
    return st;
}

/* Saves 10, then 20 and 30, with something coming in between. */
static void save_with(scene *s, intruder *i, fault_hook hook)
{
    actor first = {.disk = s->disk, .session = 1, .steps = {10}, .n_steps = 1, .keep_last = s->keep_last};
    must_act(&first, s->world, s->store);
    *i = (intruder){.s = s, .at = s->n};
    pthread_mutex_init(&i->lock, NULL);
    fault_store *f = fault_store_new(s->store);
    fault_store_set_hook(f, hook, i);
    actor old = {.disk = s->disk,
                 .session = 2,
                 .steps = {20, 30},
                 .n_steps = 2,
                 .keep_last = s->keep_last,
                 .how = s->how,
                 .may_fail = true,
                 .ready = &i->ready};
    lg_error err = LG_ERROR_INIT;
    lg_status st = act(&old, s->world, fault_store_handle(f), &err);
    fault_store_free(f);
    pthread_mutex_destroy(&i->lock);
    s->missed = !i->done;
    if (i->done && st != LG_OK && st != LG_ERR_SUPERSEDED) {
        fail_msg("%s: %s", lg_status_name(st), err.message);
    }
}

static void taken_over(scene *s)
{
    intruder i;
    save_with(s, &i, take_over);
}

static void k05_a_power_cut_at_any_moment_of_a_takeover_at_any_moment_loses_nothing(void **state)
{
    (void)state;
    scene commit = {.name = "takeover", .run = taken_over, .keep_last = 2};
    scene launch = {.name = "takeover of a background save", .run = taken_over, .how = LAUNCH_AND_WAIT};
    for (int no_rename = 0; no_rename < 2; no_rename++) {
        prove_sweep(commit, 1, no_rename, 1, 36, 3);
        prove_sweep(launch, 2, no_rename, 20, 44, 5);
        if (full) {
            prove_sweep(commit, 3, no_rename, 0, 0, 1);
        }
    }
}

/* ---- rollback */

static void roll_back_to(scene *s, const char *where, uint64_t target, uint64_t session)
{
    lg_error err = LG_ERROR_INIT;
    crash_store_mark(s->disk, ROLLBACK_BEGUN, target, session);
    if (lg_rollback(where, "a test", NULL, &err) != LG_OK) {
        fail_msg("rollback: %s", err.message);
    }
    crash_store_mark(s->disk, ROLLBACK_DONE, target, session);
}

static void rolled_back(scene *s)
{
    actor first = {.disk = s->disk, .session = 1, .steps = {10, 20, 30}, .n_steps = 3};
    must_act(&first, s->world, s->store);
    roll_back_to(s, "crash:x@10", 10, 2);
    actor second = {.disk = s->disk, .session = 3, .steps = {15, 25}, .n_steps = 2};
    must_act(&second, s->world, s->store);
    assert_int_equal(second.resumed_from, 10);
    roll_back_to(s, "crash:x@15", 15, 4);
    actor third = {.disk = s->disk, .session = 5, .steps = {16}, .n_steps = 1};
    must_act(&third, s->world, s->store);
    assert_int_equal(third.resumed_from, 15);
}

static lg_status roll_back_now(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)f, (void)err;
    intruder *i = arg;
    if (is_now(i, event, before)) {
        i->done = true;
        from_here(i->s);
        roll_back_to(i->s, "crash:x@10", 10, 3);
    }
    return LG_OK;
}

static void rolled_back_while_saving(scene *s)
{
    intruder i;
    save_with(s, &i, roll_back_now);
}

static void a_power_cut_at_any_moment_of_a_rollback_leaves_it_done_or_not(void **state)
{
    (void)state;
    scene plain = {.name = "rollback", .run = rolled_back};
    scene racing = {.name = "rollback during a save", .run = rolled_back_while_saving};
    for (int no_rename = 0; no_rename < 2; no_rename++) {
        prove_scene(plain, full ? 2 : 1, no_rename);
        prove_sweep(racing, 1, no_rename, 16, 32, 3);
    }
}

/* ---- a process dies at the n-th operation, the power fails later */

static void die(scene *s, uint32_t world, actor *a, uint64_t n, fault_how how, bool *died)
{
    fault_store *f = fault_store_new(s->store);
    fault_store_arm(f, (fault_plan){.kinds = FAULT_CHANGES, .nth = n, .how = how, .os_errno = EIO});
    a->may_fail = a->dies = true;
    lg_error err = LG_ERROR_INIT;
    act(a, world, fault_store_handle(f), &err);
    *died = fault_store_fired(f) > 0;
    fault_store_free(f);
}

static void killed(scene *s)
{
    bool died;
    actor first = {.disk = s->disk, .session = 1, .steps = {10}, .n_steps = 1, .keep_last = s->keep_last};
    must_act(&first, s->world, s->store);
    actor second = {.disk = s->disk, .session = 2, .steps = {20}, .n_steps = 1, .keep_last = s->keep_last};
    second.how = s->how;
    die(s, s->world, &second, s->n, FAULT_DIE_TORN, &died);
    s->missed = !died;
    if (died) {
        from_here(s);
        actor third = {.disk = s->disk, .session = 3, .steps = {30}, .n_steps = 1, .keep_last = s->keep_last};
        must_act(&third, s->world, s->store);
    }
}

/* One session dies in its save, the next while it ends that attempt; then a
 * person sweeps. */
static void swept(scene *s)
{
    bool died;
    actor first = {.disk = s->disk, .session = 1, .steps = {10, 15}, .n_steps = 2, .keep_last = 1};
    must_act(&first, s->world, s->store);
    actor second = {.disk = s->disk, .session = 2, .steps = {20}, .n_steps = 1, .keep_last = 1};
    die(s, s->world, &second, 16, FAULT_DIE_AFTER, &died);
    assert_true(died);
    actor third = {.disk = s->disk, .session = 3, .keep_last = 1, .steps = {25}, .n_steps = 1};
    die(s, 1, &third, s->n, FAULT_DIE_AFTER, &died);
    s->missed = !died;
    from_here(s);
    lg_error err = LG_ERROR_INIT;
    if (lg_sweep("crash:x", 0, NULL, NULL, &err) != LG_OK) {
        fail_msg("sweep: %s", err.message);
    }
    actor fourth = {.disk = s->disk, .session = 4, .steps = {30}, .n_steps = 1, .keep_last = 1};
    must_act(&fourth, s->world, s->store);
    assert_true(lg_sweep("crash:x", 0, NULL, NULL, &err) == LG_OK);
}

static void k01_k03_a_power_cut_after_a_kill_at_any_operation_loses_nothing(void **state)
{
    (void)state;
    scene commit = {.name = "killed, resumed", .run = killed, .keep_last = 1};
    scene launch = {.name = "killed in a background save, resumed", .run = killed, .how = LAUNCH_AND_WAIT};
    scene sweep = {.name = "killed twice, swept", .run = swept, .keep_last = 1};
    for (int no_rename = 0; no_rename < 2; no_rename++) {
        prove_sweep(commit, 1, no_rename, 22, 40, 1);
        prove_sweep(sweep, 1, no_rename, 1, 30, 5);
        if (full) {
            prove_sweep(launch, 1, no_rename, 0, 0, 1);
            prove_sweep(commit, 2, no_rename, 0, 0, 1);
        }
    }
}

/* ---- operations that fail, and some that succeed and report an error */

/* What a repeated request of a network file system says when the first one
 * took place but its answer was lost. */
static int second_answer(fault_op op)
{
    switch (op) {
    case FAULT_MAKE_DIR:
    case FAULT_CREATE:
    case FAULT_PUT_NEW:
        return EEXIST;
    case FAULT_RENAME_DIR:
    case FAULT_RENAME_FILE:
    case FAULT_REMOVE_FILE:
    case FAULT_REMOVE_DIR:
        return ENOENT;
    default:
        return EIO;
    }
}

/* The n-th change fails, or takes place and is reported as failed. */
static lg_status lie(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)f;
    intruder *i = arg;
    if (before != i->instead || (!before && event->status != LG_OK) || (FAULT_BIT(event->op) & FAULT_CHANGES) == 0) {
        return LG_OK;
    }
    pthread_mutex_lock(&i->lock);
    bool now = i->at > 0 && --i->at == 0;
    pthread_mutex_unlock(&i->lock);
    if (!now) {
        return LG_OK;
    }
    i->done = true;
    from_here(i->s);
    return lg_error_set_errno(err, before ? ENOSPC : second_answer(event->op), "%s %s (injected)",
                              fault_op_name(event->op), event->path);
}

static void save_with_trouble(scene *s, bool instead)
{
    intruder i = {.s = s, .at = s->n, .instead = instead};
    pthread_mutex_init(&i.lock, NULL);
    actor first = {.disk = s->disk, .session = 1, .steps = {10}, .n_steps = 1, .keep_last = s->keep_last};
    must_act(&first, s->world, s->store);
    fault_store *f = fault_store_new(s->store);
    fault_store_set_hook(f, lie, &i);
    actor second = {.disk = s->disk, .session = 2, .steps = {20, 30}, .n_steps = 2, .keep_last = s->keep_last};
    second.may_fail = true;
    second.how = s->how;
    lg_error err = LG_ERROR_INIT;
    lg_status st = act(&second, s->world, fault_store_handle(f), &err);
    fault_store_free(f);
    pthread_mutex_destroy(&i.lock);
    s->missed = !i.done;
    if (i.done && st == LG_OK && !second.saved[0] && !second.saved[1]) {
        fail_msg("operation %llu: both saves fail: %s", (unsigned long long)s->n, err.message);
    }
}

static void lied_to(scene *s) { save_with_trouble(s, false); }
static void failing(scene *s) { save_with_trouble(s, true); }

static void k01_a_power_cut_after_an_operation_that_failed_or_lied_loses_nothing(void **state)
{
    (void)state;
    scene lies = {.name = "an operation succeeds and reports an error", .run = lied_to, .keep_last = 1};
    scene fails = {.name = "an operation fails", .run = failing, .keep_last = 1};
    scene behind = {.name = "an operation of a background save fails", .run = failing, .how = LAUNCH_AND_WAIT};
    for (int no_rename = 0; no_rename < 2; no_rename++) {
        prove_sweep(lies, 1, no_rename, 1, 40, 2);
        prove_sweep(fails, 1, no_rename, 18, 40, 3);
        if (full) {
            prove_sweep(behind, 1, no_rename, 0, 0, 1);
            prove_sweep(lies, 2, no_rename, 0, 0, 1);
        }
    }
}

int main(int argc, char **argv)
{
    const char *prove_env = getenv("LASTGOOD_PROVE"), *jobs_env = getenv("JOBS"), *seed_env = getenv("LASTGOOD_SEED");
    setvbuf(stdout, NULL, _IOLBF, 0); /* it takes its time */
    full = prove_env != NULL && strcmp(prove_env, "full") == 0;
    jobs = full && jobs_env != NULL && atoi(jobs_env) > 0 ? (uint32_t)atoi(jobs_env) : 1;
    seed = seed_env != NULL ? strtoull(seed_env, NULL, 0) | 1 : 2027;
    print_message("# seed %llu%s\n", (unsigned long long)seed, full ? ", in full" : "");
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k01_k14_a_power_cut_at_any_moment_of_saves_loses_nothing_that_was_committed),
        cmocka_unit_test(k04_a_power_cut_at_any_moment_of_background_saves_loses_nothing_that_was_committed),
        cmocka_unit_test(k05_a_power_cut_at_any_moment_of_a_takeover_at_any_moment_loses_nothing),
        cmocka_unit_test(a_power_cut_at_any_moment_of_a_rollback_leaves_it_done_or_not),
        cmocka_unit_test(k01_k03_a_power_cut_after_a_kill_at_any_operation_loses_nothing),
        cmocka_unit_test(k01_a_power_cut_after_an_operation_that_failed_or_lied_loses_nothing),
    };
    return cmocka_run_group_tests_name("crash", tests, NULL, NULL);
}
