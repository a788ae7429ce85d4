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
 *     LASTGOOD_PROVE=full test_crash   more ranks, every operation of a sweep, more
 *                                      trees: for LASTGOOD_PROVE_MINUTES (15)
 *
 * JOBS processes share the work; LASTGOOD_SEED chooses what is sampled where
 * there are too many combinations. */

#include "support/crash_proof.h"
#include "support/environment.h"
#include "support/fault_store.h"

#include "base/hash.h"
#include "core/bulletin.h"

#include <errno.h>
#include <fnmatch.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static bool full;
static uint32_t jobs = 1;
static uint64_t seed = 2027;

/* ------------------------------------------------------- time of the full form */

/* Scenes get of the time that is left what their weight is of those to come. */
static struct {
    uint64_t end_ms;
    double weights;
    bool counting; /* the tests are called to learn their weights */
} budget;

static uint64_t share_of_time(uint64_t end_ms, double part)
{
    const uint64_t now = lg__now_ms();
    return now + (end_ms > now ? (uint64_t)((double)(end_ms - now) * part) : 0);
}

/* When a scene of this weight is to end. */
static uint64_t scene_end(double weight)
{
    const uint64_t end = share_of_time(budget.end_ms, weight / budget.weights);
    budget.weights -= weight;
    return end;
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

/* Runs a scene; false if it has no n-th operation. The record is the caller's. */
static bool play_scene(scene *s, uint64_t n)
{
    s->n = n;
    s->missed = false;
    s->from = 0;
    s->disk = crash_store_new(scene_caps(s));
    s->store = crash_store_handle(s->disk);
    current = s;
    s->run(s);
    return !s->missed;
}

static void drop_record(scene *s)
{
    crash_store_free(s->disk);
    current = NULL;
}

/* Runs a scene and proves its record; false if it has no n-th operation. */
static bool run_scene(scene *s, uint64_t n, crash_effort effort, uint64_t until_ms, counts *total)
{
    bool there = play_scene(s, n);
    if (there) {
        char name[200];
        snprintf(name, sizeof name, "%s, %u ranks%s, operation %llu", s->name, s->world,
                 s->no_rename ? ", without folder rename" : "", (unsigned long long)n);
        proof p = {.name = name,
                   .disk = s->disk,
                   .caps = scene_caps(s),
                   .other_world = s->world == 2 ? 3 : 2,
                   .effort = effort,
                   .again = {.all = full ? 8 : 2, .samples = full ? 4 : 2},
                   .again_every = n == 0 ? 150 : 0,
                   .both = full,
                   .seed = seed,
                   .until_ms = until_ms,
                   .n_jobs = jobs,
                   .from = s->from,
                   .now = {.keep_last = s->keep_last}};
        prove(&p, total);
    }
    drop_record(s);
    return there;
}

static void tell(const scene *s, const counts *c, uint64_t records, uint64_t began_ms)
{
    print_message("# %s, %u ranks%s: %llu records, %llu moments (%llu exhausted, %llu sampled), %llu trees made, "
                  "%llu different states, %llu resumes: %llu older, %llu newer, %llu empty; %.1f s\n",
                  s->name, s->world, s->no_rename ? ", without folder rename" : "", (unsigned long long)records,
                  (unsigned long long)c->points, (unsigned long long)c->exhausted,
                  (unsigned long long)(c->points - c->exhausted), (unsigned long long)c->made,
                  (unsigned long long)c->states, (unsigned long long)c->resumes, (unsigned long long)c->older,
                  (unsigned long long)c->newer, (unsigned long long)c->empty, (double)(lg__now_ms() - began_ms) / 1000);
}

/* That a scene has looked at enough. Not asked of sources that lack something on
 * purpose: only wrong states count as noticing that. */
static bool enough(bool is)
{
    const char *how = getenv("LASTGOOD_PROVE");
    return is || (how != NULL && strcmp(how, "mutant") == 0);
}

/* One record. Those of few ranks get more time: they can be exhausted. */
static void prove_scene(scene s, uint32_t world, bool no_rename)
{
    const double weight = world <= 2 ? 2 : 1;
    if (budget.counting) {
        budget.weights += weight;
        return;
    }
    s.world = world;
    s.no_rename = no_rename;
    counts c = {0};
    const uint64_t began = lg__now_ms();
    run_scene(&s, 0, (crash_effort){.all = 32, .samples = 6}, full ? scene_end(weight) : 0, &c);
    tell(&s, &c, 1, began);
    assert_true(enough(c.states > 100 && c.older > 20 && c.newer > 0));
}

static uint64_t operations_of(scene s)
{
    uint64_t n = 1;
    while (play_scene(&s, n)) {
        drop_record(&s);
        n++;
    }
    drop_record(&s);
    return n - 1;
}

/* A record for each n-th operation at which it may happen. In the short form
 * only from the last files of the first save on, with gaps of `stride`. */
static void prove_sweep(scene s, uint32_t world, bool no_rename, uint64_t first, uint64_t last, uint64_t stride)
{
    const double weight = 4;
    if (budget.counting) {
        budget.weights += weight;
        return;
    }
    s.world = world;
    s.no_rename = no_rename;
    counts c = {0};
    uint64_t records = 0, until = 0;
    const uint64_t began = lg__now_ms(), end = full ? scene_end(weight) : 0;
    if (full) {
        first = 1, stride = 1;
        last = operations_of(s);
    }
    for (uint64_t n = first; n <= last; n += stride, records++) {
        until = full ? share_of_time(end, 1 / (double)(last - n + 1)) : 0;
        if (!run_scene(&s, n, (crash_effort){.all = 2, .samples = 2}, until, &c)) {
            break; /* ranks are threads: once more it may be fewer */
        }
    }
    tell(&s, &c, records, began);
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
    uint64_t at;       /* operations until then */
    bool instead;      /* of a lie: the operation does not take place */
    atomic_bool ready; /* the session that is to be disturbed has resumed */
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

/* A session dies while its last rename is on its way; it takes place at the n-th
 * request of the next session. */
typedef struct late_rename {
    scene *s;
    uint64_t at;
    char from[520], to[520];
    bool done;
} late_rename;

static lg_status arrive(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)f, (void)event, (void)err;
    late_rename *late = arg;
    if (before && late->at > 0 && --late->at == 0) {
        late->done = true;
        from_here(late->s);
        lg_error ignored = LG_ERROR_INIT;
        (void)lg__store_rename_dir(late->s->store, late->from, late->to, &ignored); /* the attempt may be ended */
    }
    return LG_OK;
}

static void renamed_late(scene *s)
{
    actor first = {.disk = s->disk, .session = 1, .steps = {10}, .n_steps = 1};
    must_act(&first, s->world, s->store);
    fault_store *f = fault_store_new(s->store);
    fault_store_arm(f, (fault_plan){.kinds = FAULT_BIT(FAULT_RENAME_DIR), .how = FAULT_DIE, .os_errno = EIO});
    actor second = {.disk = s->disk, .session = 2, .steps = {20}, .n_steps = 1, .may_fail = true, .dies = true};
    lg_error err = LG_ERROR_INIT;
    (void)act(&second, s->world, fault_store_handle(f), &err);
    size_t n;
    const fault_event *log = fault_store_log(f, &n);
    late_rename late = {.s = s, .at = s->n};
    for (size_t i = 0; i < n && late.from[0] == '\0'; i++) { /* a dead process tries others behind it */
        if (log[i].op == FAULT_RENAME_DIR) {
            memcpy(late.from, log[i].path, sizeof late.from);
            memcpy(late.to, log[i].to, sizeof late.to);
        }
    }
    assert_int_equal(strncmp(late.to, "step-000000000020", 17), 0);
    fault_store_free(f);
    f = fault_store_new(s->store);
    fault_store_set_hook(f, arrive, &late);
    actor third = {.disk = s->disk, .session = 3, .steps = {30}, .n_steps = 1};
    must_act(&third, s->world, fault_store_handle(f));
    fault_store_free(f);
    s->missed = !late.done;
}

static void k05_a_power_cut_at_any_moment_of_a_takeover_at_any_moment_loses_nothing(void **state)
{
    (void)state;
    scene late = {.name = "a rename that arrives during the takeover", .run = renamed_late};
    prove_sweep(late, 1, false, 1, 30, 1);
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
        prove_sweep(sweep, 1, no_rename, 1, 45, 4);
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
        fail_msg("operation %llu: both saves fail, the last one: %s", (unsigned long long)s->n,
                 second.last_error.message);
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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k01_k14_a_power_cut_at_any_moment_of_saves_loses_nothing_that_was_committed),
        cmocka_unit_test(k04_a_power_cut_at_any_moment_of_background_saves_loses_nothing_that_was_committed),
        cmocka_unit_test(k05_a_power_cut_at_any_moment_of_a_takeover_at_any_moment_loses_nothing),
        cmocka_unit_test(a_power_cut_at_any_moment_of_a_rollback_leaves_it_done_or_not),
        cmocka_unit_test(k01_k03_a_power_cut_after_a_kill_at_any_operation_loses_nothing),
        cmocka_unit_test(k01_a_power_cut_after_an_operation_that_failed_or_lied_loses_nothing),
    };
    setvbuf(stdout, NULL, _IOLBF, 0); /* it takes its time */
    lg__bulletin_vanished_ms = 50;    /* this store shows renames at once, and each takeover waits it out */
    full = in_full();
    jobs = full ? (uint32_t)number_from("JOBS", 1) : 1;
    seed = number_from("LASTGOOD_SEED", seed) | 1;
    const uint64_t minutes = number_from("LASTGOOD_PROVE_MINUTES", 15);
    print_message("# seed %llu\n", (unsigned long long)seed);
    if (full) {
        print_message("# in full, %llu minutes by %u processes\n", (unsigned long long)minutes, jobs);
        budget.counting = true;
        for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
            if (argc < 2 || fnmatch(argv[1], tests[i].name, 0) == 0) {
                tests[i].test_func(NULL);
            }
        }
        budget.counting = false;
        budget.end_ms = lg__now_ms() + minutes * 60000;
    }
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    return cmocka_run_group_tests_name("crash", tests, NULL, NULL);
}
