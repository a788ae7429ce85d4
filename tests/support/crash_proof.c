/* SPDX-License-Identifier: Apache-2.0 */
#include "crash_proof.h"

#include "ranks.h"

#include "base/hash.h"
#include "core/walk.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* ------------------------------------------------------------- what is promised */

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

void proof_hear(expect *e, const crash_event *mark)
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

uint64_t proof_newest(const expect *e) { return e->n > 0 ? e->chain[e->n - 1] : NONE; }

static bool allowed(const expect *e, uint64_t step)
{
    return step == proof_newest(e) || (step != NONE && among(e->may, e->n_may, step));
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

/* ------------------------------------------------------------- one state */

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

static void count_found(const expect *e, uint64_t newest, counts *c)
{
    c->empty += newest == NONE;
    c->older += newest != NONE && newest == proof_newest(e);
    c->newer += newest != NONE && newest != proof_newest(e);
}

bool proof_check(const expect *e, lg_store *store, uint32_t world, uint32_t then, counts *c, verdict *v)
{
    uint64_t newest = NONE;
    bool good = look(store, e, &newest, c, v) && go_on(store, world, then, newest, c, v);
    count_found(e, newest, c);
    return good;
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
    count_found(e, newest, c);
    return good;
}

/* ------------------------------------------------------------- all of them */

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

static bool prove_here(proof *p);

static bool is_over_time(const proof *p) { return p->until_ms != 0 && lg__now_ms() >= p->until_ms; }

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
        proof again = {.name = "cut again while starting",
                       .disk = s,
                       .caps = p->caps,
                       .other_world = p->other_world,
                       .effort = p->again,
                       .every_moment = p->round > 0,
                       .seed = p->seed ^ tree->hash,
                       .until_ms = p->round > 0 ? p->until_ms : 0,
                       .hurried = true,
                       .n_jobs = 1,
                       .now = p->now,
                       .at = first};
        good = prove_here(&again);
        if (!good) {
            snprintf(v->why, sizeof v->why, "cut again while starting from it");
        }
        p->c.more_points += again.c.points, p->c.more_exhausted += again.c.exhausted, p->c.made += again.c.made;
        p->c.states += again.c.states, p->c.resumes += again.c.resumes, p->c.empty += again.c.empty;
        p->c.older += again.c.older, p->c.newer += again.c.newer;
    }
    crash_store_free(s);
    return good;
}

static int on_tree(const crash_tree *tree, void *arg)
{
    proof *p = arg;
    if ((p->round > 0 || p->hurried) && is_over_time(p)) {
        p->late = true;
        return 1;
    }
    p->c.made++;
    const uint64_t hash = tree->hash ^ hash_of(&p->now);
    /* Each job makes all trees and looks at its own. */
    if (!is_new(&p->all, hash) || (hash * UINT64_C(0x9e3779b97f4a7c15) >> 33) % p->n_jobs != p->job) {
        return 0;
    }
    p->c.states++;
    verdict v = {""};
    bool good = check_state(tree, &p->now, p->caps, p->other_world, p->both || p->c.states % 8 == 0, &p->c, &v);
    if (good && p->again_every != 0 && p->c.states % p->again_every == 0) {
        good = cut_again(p, tree, &v);
    }
    if (good) {
        return 0;
    }
    size_t n;
    const crash_event *events = crash_store_events(p->disk, &n);
    fprintf(stderr, "# %s: after event %zu of %zu (seed %llu): %s\n# allowed: %lld", p->name, p->at, n,
            (unsigned long long)p->seed, v.why, (long long)proof_newest(&p->now));
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
    return next != CRASH_SYNC && next != CRASH_SYNC_DIR && next != CRASH_MARK;
}

enum { UNSEEN, SAMPLED, EXHAUSTED }; /* a moment */

/* From the first event to the last; fills in what became of each moment. */
static void walk_through(proof *p, const crash_effort *effort, uint8_t *moments)
{
    crash_disk *d = crash_disk_new(p->disk);
    for (size_t i = 0; i < p->at; i++) {
        crash_disk_step(d);
    }
    do {
        const bool wanted = p->at >= p->from && moments[p->at] != EXHAUSTED;
        if (wanted && (p->every_moment || p->round > 0 || !is_covered_by_next(p))) {
            moments[p->at] = crash_disk_visit(d, effort, on_tree, p) ? EXHAUSTED : SAMPLED;
        }
        const crash_event *e = p->failed || p->late ? NULL : crash_disk_step(d);
        if (e == NULL) {
            break;
        }
        p->at++;
        if (e->kind == CRASH_MARK) {
            proof_hear(&p->now, e);
        }
    } while (!p->now.broken);
    crash_disk_free(d);
}

static bool is_finished(const proof *p, const uint8_t *moments, size_t n)
{
    for (size_t i = p->from; i <= n; i++) {
        if (moments[i] == SAMPLED) {
            return is_over_time(p);
        }
    }
    return p->round > 0 || p->every_moment || is_over_time(p);
}

#define ROUNDS 9

static bool prove_here(proof *p)
{
    size_t n;
    crash_store_events(p->disk, &n);
    uint8_t *moments = calloc(n + 1, 1);
    if (moments == NULL) {
        abort();
    }
    const expect start = p->now;
    const size_t at = p->at;
    p->random = p->seed | 1;
    do {
        p->now = start;
        p->at = at;
        const crash_effort effort = {
            .all = p->effort.all << 2 * p->round, .samples = p->effort.samples << p->round, .random = &p->random};
        walk_through(p, &effort, moments);
        if (p->now.broken) {
            fprintf(stderr, "# %s: event %zu: a session resumed from a step that was not there\n", p->name, p->at);
            p->failed = true;
        }
    } while (p->until_ms != 0 && !p->hurried && !p->failed && !p->late && !is_finished(p, moments, n) &&
             ++p->round < ROUNDS);
    for (size_t i = 0; i <= n; i++) {
        p->c.points += moments[i] != UNSEEN;
        p->c.exhausted += moments[i] == EXHAUSTED;
    }
    free(moments);
    free(p->all.hash);
    return !p->failed;
}

/* Moments are those that all jobs have seen, or made all trees of: each looks at
 * its share of the trees of a moment. */
static void add_counts(counts *to, const counts *c, size_t n)
{
    counts all = c[0];
    for (size_t i = 1; i < n; i++) {
        all.points = c[i].points < all.points ? c[i].points : all.points;
        all.exhausted = c[i].exhausted < all.exhausted ? c[i].exhausted : all.exhausted;
        all.made = c[i].made < all.made ? c[i].made : all.made;
        all.states += c[i].states, all.resumes += c[i].resumes;
        all.older += c[i].older, all.newer += c[i].newer, all.empty += c[i].empty;
    }
    for (size_t i = 0; i < n; i++) {
        all.points += c[i].more_points, all.exhausted += c[i].more_exhausted;
    }
    to->points += all.points, to->exhausted += all.exhausted, to->made += all.made;
    to->states += all.states, to->resumes += all.resumes;
    to->older += all.older, to->newer += all.newer, to->empty += all.empty;
}

#define JOBS_MAX 64

void prove(proof *p, counts *total)
{
    if (p->n_jobs <= 1) {
        p->n_jobs = 1;
        bool good = prove_here(p);
        add_counts(total, &p->c, 1);
        if (!good) {
            fail_msg("%s", p->name);
        }
        return;
    }
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t children[JOBS_MAX];
    p->n_jobs = p->n_jobs < JOBS_MAX ? p->n_jobs : JOBS_MAX;
    for (uint32_t j = 0; j < p->n_jobs; j++) {
        children[j] = fork();
        assert_true(children[j] >= 0);
        if (children[j] == 0) {
            p->job = j;
            bool fine = prove_here(p) && write(ends[1], &p->c, sizeof p->c) == sizeof p->c;
            _exit(fine ? 0 : 1);
        }
    }
    bool good = true;
    for (uint32_t j = 0; j < p->n_jobs; j++) {
        int status;
        good = waitpid(children[j], &status, 0) == children[j] && WIFEXITED(status) && WEXITSTATUS(status) == 0 && good;
    }
    counts of_job[JOBS_MAX];
    for (uint32_t j = 0; good && j < p->n_jobs; j++) {
        good = read(ends[0], &of_job[j], sizeof of_job[j]) == sizeof of_job[j];
    }
    close(ends[0]);
    close(ends[1]);
    if (!good) {
        fail_msg("%s", p->name);
    }
    add_counts(total, of_job, p->n_jobs);
}
