/* SPDX-License-Identifier: Apache-2.0 */

/* Takeovers: a session claims the root while another one is at any point of a
 * save, of the end of attempts, or of retention; processes that were stopped and
 * wake up; two runs that both believe that the root is theirs. The later owner's
 * checkpoints are never lost, and the earlier one is told. */

#include "support/environment.h"
#include "support/fault_store.h"
#include "support/ranks.h"

#include "core/walk.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/scene.h"

/* ---------------------------------------------------- takeover in the middle */

typedef struct takeover {
    test_root *root;
    uint32_t kinds;
    const char *path;
    bool before;
    bool done;
    uint64_t resumed_from;
} takeover;

static lg_status take_over(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    takeover *t = arg;
    (void)f;
    (void)err;
    bool here = (FAULT_BIT(event->op) & t->kinds) != 0 && before == t->before &&
                (t->path == NULL || strstr(event->path, t->path) != NULL || strstr(event->to, t->path) != NULL);
    if (here && !t->done) {
        t->done = true;
        run_spec s = run_of(1, STEPS(1000));
        root_run(t->root, &s);
        t->resumed_from = s.resumed_from;
    }
    return LG_OK;
}

/* The old owner sleeps at some operation of its commit; a new session takes
 * over, resumes and commits; the old one wakes up. Whatever happens to its
 * save, the new one's stays the newest. */
ON_EVERY_ROOT(k05_a_zombie_owner_that_wakes_up_at_any_point_of_its_commit_does_no_harm)
{
    static const struct {
        const char *when;
        uint32_t kinds;
        const char *path;
        bool before;
    } points[] = {
        {"before the folder is made", FAULT_BIT(FAULT_MAKE_DIR), NULL, true},
        {"after the folder is made", FAULT_BIT(FAULT_MAKE_DIR), NULL, false},
        {"while a shard is written", FAULT_BIT(FAULT_WRITE), "shard-00001-model", true},
        {"before the sums file is synced", FAULT_BIT(FAULT_SYNC), "sums", true},
        {"after the sums file is in place", FAULT_BIT(FAULT_RENAME_FILE), "sums", false},
        {"before the manifest is written", FAULT_BIT(FAULT_CREATE) | FAULT_BIT(FAULT_PUT_NEW), "lastgood.json", true},
        {"before the final rename", FAULT_BIT(FAULT_RENAME_DIR), "step-000000000020", true},
        {"after the final rename", FAULT_BIT(FAULT_RENAME_DIR) | FAULT_BIT(FAULT_PUT_NEW), "step-000000000020", false},
    };
    size_t refused = 0;
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        test_root fresh;
        root_make(&fresh, root->kind);
        fault_store *f = fault_store_new(fresh.store);
        model m;
        lg_error err = LG_ERROR_INIT;
        lg_session *s = must_resume(fault_store_handle(f), 2, &m);
        assert_int_equal(save_step(s, &m, 10, &err), LG_OK);
        takeover t = {&fresh, points[i].kinds, points[i].path, points[i].before, false, 0};
        fault_store_set_hook(f, take_over, &t);
        lg_status st = save_step(s, &m, 20, &err);
        fault_store_set_hook(f, NULL, NULL);
        if (!t.done) { /* this store does not make that operation */
            assert_int_equal(root->kind, ROOT_NO_RENAME);
        } else {
            print_message("#   %s: %s\n", points[i].when, st == LG_OK ? "committed" : err.message);
            if (st == LG_OK) {
                assert_int_equal(t.resumed_from, 20); /* it had won before the takeover */
            } else {
                assert_int_equal(st, LG_ERR_SUPERSEDED);
                assert_int_equal(t.resumed_from, points[i].before || st != LG_OK ? 10 : 20);
                refused++;
            }
            assert_int_equal(save_step(s, &m, 30, &err), LG_ERR_SUPERSEDED);
            assert_int_equal(resume_finds(&fresh), 1000);
            assert_int_equal(count_kind(fresh.store, LG__ROOT_PARTIAL), 0);
        }
        lg_session_close(s, NULL);
        fault_store_free(f);
        root_drop(&fresh);
    }
    assert_true(refused >= 4);
}

/* The new session is in the middle of taking over (it has listed, not yet
 * ended the attempt) when the old one's rename lands. */
static lg_status finish_old_save(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)err;
    struct {
        fault_store *old;
        bool done;
        char from[300], to[300];
    } *late = arg;
    (void)f;
    bool here = before && (event->op == FAULT_RENAME_DIR || event->op == FAULT_PUT_NEW) &&
                strstr(event->path, "step-000000000020") != NULL;
    if (here && !late->done) {
        late->done = true;
        lg_error e = LG_ERROR_INIT;
        lg__store_rename_dir(fault_store_inner(late->old), late->from, late->to, &e);
    }
    return LG_OK;
}

ON_ROOTS_WITH_RENAME(takeover_while_a_rename_is_under_way)
{
    lg_error err = LG_ERROR_INIT;
    faulty first;
    faulty_begin(&first, root, 0);
    assert_int_equal(save_step(first.s, &first.m, 10, &err), LG_OK);
    /* The old session's rename request is on the wire when it dies. */
    fault_store_arm(first.f, (fault_plan){.kinds = FAULT_BIT(FAULT_RENAME_DIR), .how = FAULT_DIE});
    assert_int_not_equal(save_step(first.s, &first.m, 20, &err), LG_OK);
    size_t n;
    const fault_event *log = fault_store_log(first.f, &n);
    size_t at = fault_store_find(first.f, 0, FAULT_BIT(FAULT_RENAME_DIR), "partial");
    for (size_t i = at; i < n; i++) {
        at = log[i].op == FAULT_RENAME_DIR && strncmp(log[i].to, "step-000000000020", 17) == 0 ? i : at;
    }
    struct {
        fault_store *old;
        bool done;
        char from[300], to[300];
    } late = {.old = first.f};
    snprintf(late.from, sizeof late.from, "%.299s", log[at].path);
    snprintf(late.to, sizeof late.to, "%.299s", log[at].to);
    fault_store *g = fault_store_new(root->store);
    fault_store_set_hook(g, finish_old_save, &late);
    model m;
    lg_session *s = must_resume(fault_store_handle(g), 0, &m);
    assert_true(late.done);
    assert_int_equal(m.step, 20); /* the rename won: it is committed, and whole */
    assert_null(model_wrong(&m, 20));
    assert_int_equal(save_step(s, &m, 30, &err), LG_OK);
    faulty_end(&first);
    lg_session_close(s, NULL);
    fault_store_free(g);
    assert_int_equal(resume_finds(root), 30);
}

static void a_superseded_session_is_told_by_whom_and_when(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    model m;
    lg_error err = LG_ERROR_INIT;
    lg_session *s = must_resume(root.store, 0, &m);
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.store = root.store;
    o.domain = "node-17";
    lg_session *other;
    assert_int_equal(lg_session_open("root", &o, &other, &err), LG_OK);
    assert_int_equal(save_step(s, &m, 1, &err), LG_ERR_SUPERSEDED);
    assert_non_null(strstr(err.message, "owner epoch 2, by node-17 at 2"));
    lg_session_close(s, NULL);
    lg_session_close(other, NULL);
    root_drop(&root);
}

/* ------------------------------------------- what comes in between, elsewhere */

typedef struct between {
    test_root *root;
    uint32_t kinds;
    const char *path; /* of the operation, or where it leads */
    bool before, done;
    void (*what)(struct between *b);
    lg_session *other; /* what it left open */
} between;

static lg_status come_between(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)f, (void)err;
    between *b = arg;
    if (!b->done && before == b->before && (FAULT_BIT(event->op) & b->kinds) != 0 &&
        (strstr(event->path, b->path) != NULL || strstr(event->to, b->path) != NULL)) {
        b->done = true;
        b->what(b);
    }
    return LG_OK;
}

/* The last request of a commit, by the kind of root. */
static uint32_t commits(const test_root *root)
{
    return FAULT_BIT(root->kind == ROOT_NO_RENAME ? FAULT_PUT_NEW : FAULT_RENAME_DIR);
}

/* A save of `step` that stops half-way, as if the process had died. */
static void die_in_a_save(lg_store *store, uint64_t step)
{
    fault_store *f = fault_store_new(store);
    model m;
    lg_error err = LG_ERROR_INIT;
    lg_session *s = must_resume(fault_store_handle(f), 0, &m);
    fault_store_arm(f, (fault_plan){.kinds = FAULT_BIT(FAULT_RENAME_FILE), .path = "sums", .how = FAULT_DIE});
    assert_int_not_equal(save_step(s, &m, step, &err), LG_OK);
    lg_session_close(s, NULL);
    fault_store_free(f);
}

static bool is_attempt_there(test_root *root)
{
    lg__walk *w;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg__walk_read(root->store, &w, &err), LG_OK);
    bool there = false;
    for (size_t i = 0; i < w->n_others; i++) {
        there = there || strncmp(w->others[i].name, ".step-000000000050", 18) == 0;
    }
    lg__walk_free(w);
    return there;
}

static void claim_and_die_in_a_save(between *b) { die_in_a_save(b->root->store, 50); }

/* Between its claim and the end of earlier attempts another session claims and
 * begins to save: that attempt is of a later epoch, and none of its business. */
ON_ROOTS_WITH_RENAME(k05_a_new_owner_ends_no_attempt_of_an_owner_after_it)
{
    run_spec first = run_of(1, STEPS(10));
    root_run(root, &first);
    fault_store *f = fault_store_new(root->store);
    between b = {.root = root,
                 .kinds = FAULT_BIT(FAULT_PUT_NEW),
                 .path = ".owner-2",
                 .before = false,
                 .what = claim_and_die_in_a_save};
    fault_store_set_hook(f, come_between, &b);
    model m;
    lg_error err = LG_ERROR_INIT;
    lg_session *s = must_resume(fault_store_handle(f), 0, &m);
    assert_true(b.done);
    assert_true(is_attempt_there(root));
    assert_int_equal(save_step(s, &m, 20, &err), LG_ERR_SUPERSEDED);
    assert_true(is_attempt_there(root));
    lg_session_close(s, NULL);
    fault_store_free(f);
    run_spec last = run_of(1, STEPS(60));
    root_run(root, &last); /* who comes after it ends it */
    assert_int_equal(last.resumed_from, 10);
    assert_int_equal(count_kind(root->store, LG__ROOT_PARTIAL), 0);
}

/* The request that ends an attempt takes place, and its answer says that it did
 * not: a repeated request over a network. */
ON_EVERY_ROOT(k05_the_end_of_an_attempt_that_took_place_and_reports_failure_has_taken_place)
{
    static const int answers[] = {ENOENT, EIO, EEXIST, ESTALE};
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        test_root fresh;
        root_make(&fresh, root->kind);
        run_spec first = run_of(1, STEPS(10));
        root_run(&fresh, &first);
        die_in_a_save(fresh.store, 20);
        fault_store *f = fault_store_new(fresh.store);
        fault_store_arm(
            f, (fault_plan){
                   .kinds = commits(&fresh), .path = "step-000000000020", .how = FAULT_AFTER, .os_errno = answers[i]});
        lg_error err = LG_ERROR_INIT;
        lg_session *s = open_on(fault_store_handle(f), 0, &err);
        if (s == NULL) {
            fail_msg("errno %d: %s", answers[i], err.message);
        }
        assert_int_equal(fault_store_fired(f), 1);
        lg_session_close(s, NULL);
        fault_store_free(f);
        run_spec again = run_of(2, STEPS(30));
        root_run(&fresh, &again);
        assert_int_equal(again.resumed_from, 10);
        root_drop(&fresh);
    }
}

static void roll_back_to_10(between *b)
{
    lg_error err = LG_ERROR_INIT;
    char where[300];
    snprintf(where, sizeof where, "%s@10", b->root->path);
    if (lg_rollback(where, "a test", NULL, &err) != LG_OK) {
        fail_msg("%s", err.message);
    }
}

/* The session has passed its last check and is about to rename. */
ON_ROOTS_WITH_RENAME(k05_a_save_that_a_rollback_overtakes_is_not_told_that_it_is_saved)
{
    lg_error err = LG_ERROR_INIT;
    faulty x;
    faulty_begin(&x, root, 0);
    assert_int_equal(save_step(x.s, &x.m, 10, &err), LG_OK);
    assert_int_equal(save_step(x.s, &x.m, 20, &err), LG_OK);
    between b = {.root = root,
                 .kinds = FAULT_BIT(FAULT_RENAME_DIR),
                 .path = "step-000000000030",
                 .before = true,
                 .what = roll_back_to_10};
    fault_store_set_hook(x.f, come_between, &b);
    assert_int_equal(save_step(x.s, &x.m, 30, &err), LG_ERR_SUPERSEDED);
    assert_true(b.done);
    faulty_end(&x);
    assert_int_equal(resume_finds(root), 10);
}

/* A person resumes from a chosen, older step. */
static void take_over_at_10(between *b)
{
    lg_error err = LG_ERROR_INIT;
    b->other = open_on(b->root->store, 0, &err);
    model m;
    model_init(&m, 0, 1);
    lg_resume_options o = LG_RESUME_OPTIONS_INIT;
    const uint64_t step = 10;
    o.step = &step;
    lg_resume_result *r = NULL;
    if (b->other == NULL || lg_resume(b->other, &o, model_targets, &m, &r, &err) != LG_OK) {
        fail_msg("%s", err.message);
    }
    lg_resume_result_free(r);
}

/* What looks old to an earlier owner is what the later one stands on. */
ON_EVERY_ROOT(k03_k05_retention_of_an_owner_that_was_superseded_removes_nothing)
{
    run_spec first = run_of(1, STEPS(10, 20));
    root_run(root, &first);
    lg_error err = LG_ERROR_INIT;
    faulty x;
    faulty_begin(&x, root, 1);
    between b = {
        .root = root, .kinds = commits(root), .path = "step-000000000030", .before = false, .what = take_over_at_10};
    fault_store_set_hook(x.f, come_between, &b);
    assert_int_equal(save_step(x.s, &x.m, 30, &err), LG_OK); /* it had won before */
    assert_true(b.done);
    char folders[8][64];
    assert_int_equal(root_folders(root, folders, 8), 3);
    assert_int_equal(save_step(x.s, &x.m, 40, &err), LG_ERR_SUPERSEDED);
    faulty_end(&x);
    if (save_step(b.other, &x.m, 15, &err) != LG_OK) {
        fail_msg("%s", err.message);
    }
    lg_session_close(b.other, NULL);
    assert_int_equal(resume_finds(root), 15);
}

static void lose_a_shard_of_40(between *b)
{
    char folders[8][64], path[200];
    size_t n = root_folders(b->root, folders, 8);
    snprintf(path, sizeof path, "%s/shard-00001-model-00001-of-00001.safetensors", folders[n - 1]);
    lg_error err = LG_ERROR_INIT;
    if (strstr(folders[n - 1], "step-000000000040") == NULL ||
        lg__store_remove_file(b->root->inner, path, &err) != LG_OK) {
        fail_msg("%s: %s", path, err.message);
    }
}

/* Only a whole checkpoint of its own vouches for what is removed. */
ON_EVERY_ROOT(k03_what_was_damaged_since_its_commit_lets_retention_remove_nothing)
{
    run_spec first = run_of(1, STEPS(10, 20, 30));
    root_run(root, &first);
    lg_error err = LG_ERROR_INIT;
    faulty x;
    faulty_begin(&x, root, 1);
    between b = {
        .root = root, .kinds = commits(root), .path = "step-000000000040", .before = false, .what = lose_a_shard_of_40};
    fault_store_set_hook(x.f, come_between, &b);
    assert_int_equal(save_step(x.s, &x.m, 40, &err), LG_OK);
    assert_true(b.done);
    char folders[8][64];
    assert_int_equal(root_folders(root, folders, 8), 4);
    faulty_end(&x);
    assert_int_equal(resume_finds(root), 30);
}

/* ------------------------------------------------------------ real processes */

/* SIGSTOP for longer than a takeover takes, then SIGCONT: a real zombie. */
static void k05_a_process_stopped_during_its_save_is_superseded_when_it_wakes(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    run_spec s = run_of(1, STEPS(1));
    root_run(&root, &s);
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        lg_error err = LG_ERROR_INIT;
        lg_store *store;
        if (lg_store_open(root.path, &store, &err) != LG_OK) {
            _exit(9);
        }
        fault_store *f = fault_store_new(store);
        model m;
        model_init(&m, 0, 1);
        lg_session *session = open_on(fault_store_handle(f), 0, &err);
        lg_resume_result *r;
        if (session == NULL || lg_resume(session, NULL, model_targets, &m, &r, &err) != LG_OK) {
            _exit(8);
        }
        model_fill(&m, 2);
        lg_save *save;
        if (lg_save_begin(session, 2, NULL, &save, &err) != LG_OK || model_add(save, &m, &err) != LG_OK) {
            _exit(7);
        }
        if (write(ready[1], "x", 1) != 1) {
            _exit(6);
        }
        raise(SIGSTOP);
        lg_status st = lg_save_commit(save, NULL, &err);
        lg_resume_result_free(r);
        lg_session_close(session, NULL);
        fault_store_free(f);
        lg_store_free(store);
        _exit(st == LG_ERR_SUPERSEDED ? 0 : 5);
    }
    char c;
    assert_int_equal(read(ready[0], &c, 1), 1);
    int status;
    assert_int_equal(waitpid(child, &status, WUNTRACED), child);
    assert_true(WIFSTOPPED(status));
    run_spec again = run_of(2, STEPS(5));
    root_run(&root, &again);
    assert_int_equal(again.resumed_from, 1);
    kill(child, SIGCONT);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(resume_finds(&root), 5);
    close(ready[0]);
    close(ready[1]);
    root_drop(&root);
}

/* --------------------------------------------------- two runs on one root */

enum { RESUMED_FROM = 1, COMMITTED, WAS_TOLD };

typedef struct word {
    int what;
    uint32_t run;
    uint64_t session; /* of this run */
    lg_generation generation;
    uint64_t step;
} word;

/* Opens, resumes and saves until it is told that the root was taken; then again.
 * It saves even or odd steps. Every commit and every takeover goes to the pipe. */
static int run_against_another(const char *path, uint32_t run, uint64_t sessions, int to)
{
    for (uint64_t n = 0; n < sessions; n++) {
        lg_error err = LG_ERROR_INIT;
        lg_session *s = NULL;
        lg_status st = lg_session_open(path, NULL, &s, &err);
        model m;
        model_init(&m, 0, 1);
        lg_resume_result *r = NULL;
        st = st == LG_OK ? lg_resume(s, NULL, model_targets, &m, &r, &err) : st;
        if (st == LG_OK && (model_wrong(&m, r->step) != NULL || r->n_skipped > 0)) {
            st = lg_error_set(&err, LG_ERR_INTERNAL, "resumed wrong values, or passed over one");
        }
        word w = {.what = RESUMED_FROM, .run = run, .session = n};
        if (st == LG_OK) {
            w.generation = r->generation;
            w.step = r->step;
            st = write(to, &w, sizeof w) == sizeof w ? LG_OK : LG_ERR_IO;
        }
        lg_resume_result_free(r);
        uint64_t step = (w.step / 2 + 1) * 2 + run;
        for (int i = 0; st == LG_OK && i < 4; i++, step += 2) {
            lg_save_info info;
            model_fill(&m, step);
            st = model_save(s, &m, step, &info, &err);
            if (st == LG_OK) {
                w = (word){COMMITTED, run, n, info.generation, step};
                st = write(to, &w, sizeof w) == sizeof w ? LG_OK : LG_ERR_IO;
            }
        }
        if (st == LG_ERR_SUPERSEDED) {
            w = (word){WAS_TOLD, run, n, {0, 0}, step};
            st = write(to, &w, sizeof w) == sizeof w ? LG_OK : LG_ERR_IO;
        }
        lg_session_close(s, NULL);
        if (st != LG_OK) {
            fprintf(stderr, "# run %u, session %llu: %s: %s\n", run, (unsigned long long)n, lg_status_name(st),
                    err.message);
            return 1;
        }
    }
    return 0;
}

static bool is_before(lg_generation a, lg_generation b) { return lg_generation_compare(a, b) < 0; }

static void k05_of_two_runs_on_one_root_one_wins_each_commit_and_the_other_is_told(void **state)
{
    (void)state;
    const uint64_t sessions = number_from("LASTGOOD_ROUNDS", in_full() ? 400 : in_brief() ? 10 : 40);
    test_root root;
    root_make(&root, ROOT_POSIX);
    run_spec first = run_of(1, STEPS(1));
    root_run(&root, &first);
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t runs[2];
    for (uint32_t r = 0; r < 2; r++) {
        runs[r] = fork();
        assert_true(runs[r] >= 0);
        if (runs[r] == 0) {
            close(ends[0]);
            _exit(run_against_another(root.path, r, sessions, ends[1]));
        }
    }
    close(ends[1]);
    size_t n = 0, cap = 16 * sessions;
    word *words = calloc(cap, sizeof *words);
    assert_non_null(words);
    while (read(ends[0], &words[n], sizeof *words) == sizeof *words) {
        assert_true(++n < cap);
    }
    close(ends[0]);
    for (int r = 0; r < 2; r++) {
        int status;
        assert_int_equal(waitpid(runs[r], &status, 0), runs[r]);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    size_t committed = 0, told = 0;
    for (size_t i = 0; i < n; i++) {
        const word *w = &words[i];
        committed += w->what == COMMITTED;
        told += w->what == WAS_TOLD;
        for (size_t k = 0; w->what == COMMITTED && k < n; k++) {
            const word *o = &words[k];
            /* no generation is won twice */
            if (o->what == COMMITTED && k != i && lg_generation_compare(w->generation, o->generation) == 0) {
                fail_msg("generation %llu.%llu was committed by both", (unsigned long long)w->generation.epoch,
                         (unsigned long long)w->generation.serial);
            }
        }
    }
    /* A session goes on from the newest of all that earlier owners ever
     * committed: none of it is lost, whenever they were told. */
    for (size_t i = 0; i < n; i++) {
        const word *w = &words[i];
        lg_generation from = {0, 0};
        for (size_t k = 0; w->what == COMMITTED && k < n; k++) {
            from = words[k].what == RESUMED_FROM && words[k].run == w->run && words[k].session == w->session
                       ? words[k].generation
                       : from;
        }
        for (size_t k = 0; w->what == COMMITTED && k < n; k++) {
            const word *o = &words[k];
            if (o->what == COMMITTED && o->generation.epoch < w->generation.epoch && is_before(from, o->generation)) {
                fail_msg("epoch %llu went on from %llu.%llu, although %llu.%llu was committed",
                         (unsigned long long)w->generation.epoch, (unsigned long long)from.epoch,
                         (unsigned long long)from.serial, (unsigned long long)o->generation.epoch,
                         (unsigned long long)o->generation.serial);
            }
        }
    }
    /* What is there is what was reported, and all of it is whole. */
    lg_listing *l;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg_list(root.path, 0, &l, &err), LG_OK);
    assert_int_equal(l->n, committed + 1);
    for (size_t i = 0; i < l->n; i++) {
        assert_int_equal(l->entries[i].kind, LG_ENTRY_COMMITTED);
        assert_int_equal(l->entries[i].status, LG_OK);
    }
    print_message("# %zu commits, %zu times told\n", committed, told);
    /* How often one gets through is up to the scheduler; whoever claims last is
     * disturbed by nobody. */
    assert_true(committed >= 4 && told > 0);
    lg_listing_free(l);
    free(words);
    run_spec last = run_of(2, STEPS(1000000));
    root_run(&root, &last);
    assert_int_equal(count_kind(root.store, LG__ROOT_PARTIAL), 0);
    assert_int_equal(count_kind(root.store, LG__ROOT_TRASH), 0);
    root_drop(&root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k05_a_zombie_owner_that_wakes_up_at_any_point_of_its_commit_does_no_harm),
        cmocka_unit_test(takeover_while_a_rename_is_under_way),
        cmocka_unit_test(a_superseded_session_is_told_by_whom_and_when),
        cmocka_unit_test(k05_a_new_owner_ends_no_attempt_of_an_owner_after_it),
        cmocka_unit_test(k05_the_end_of_an_attempt_that_took_place_and_reports_failure_has_taken_place),
        cmocka_unit_test(k05_a_save_that_a_rollback_overtakes_is_not_told_that_it_is_saved),
        cmocka_unit_test(k03_k05_retention_of_an_owner_that_was_superseded_removes_nothing),
        cmocka_unit_test(k03_what_was_damaged_since_its_commit_lets_retention_remove_nothing),
        cmocka_unit_test(k05_a_process_stopped_during_its_save_is_superseded_when_it_wakes),
        cmocka_unit_test(k05_of_two_runs_on_one_root_one_wins_each_commit_and_the_other_is_told),
    };
    return cmocka_run_group_tests_name("takeover", tests, NULL, NULL);
}
