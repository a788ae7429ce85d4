/* SPDX-License-Identifier: Apache-2.0 */

/* The time of day jumps: set by hand, by a service that found the network, or by
 * a virtual machine that was asleep. What is newest, what may be removed and how
 * long is waited depend on none of it.
 *
 * Linked with --wrap=time, clock_gettime and gettimeofday: the library's clocks are
 * the system's, and the time of day is off by `skew`. */

#include "support/environment.h"
#include "support/fault_store.h"
#include "support/ranks.h"

#include "base/hash.h"
#include "base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

#include <cmocka.h>

#include "support/scene.h"

#define YEARS(n) ((int64_t)(n)*365 * 24 * 3600)

static _Atomic int64_t skew; /* seconds */
static _Atomic uint64_t jumps;
static _Atomic uint64_t asked; /* for the time of day, by other than time() */

time_t __real_time(time_t *out);
time_t __wrap_time(time_t *out);
time_t __wrap_time(time_t *out)
{
    time_t now = __real_time(NULL) + (time_t)skew;
    if (out != NULL) {
        *out = now;
    }
    return now;
}

int __real_clock_gettime(clockid_t clock, struct timespec *out);
int __wrap_clock_gettime(clockid_t clock, struct timespec *out);
int __wrap_clock_gettime(clockid_t clock, struct timespec *out)
{
    int rc = __real_clock_gettime(clock, out);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) {
        asked++;
        out->tv_sec += (time_t)skew;
    }
    return rc;
}

int __real_gettimeofday(struct timeval *out, void *zone);
int __wrap_gettimeofday(struct timeval *out, void *zone);
int __wrap_gettimeofday(struct timeval *out, void *zone)
{
    int rc = __real_gettimeofday(out, zone);
    asked++;
    out->tv_sec += (time_t)skew;
    return rc;
}

/* Up to ten years to either side, a different way at each operation. */
static lg_status jump(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)f, (void)event, (void)before, (void)arg, (void)err;
    static const int64_t to[] = {0, 3600, -3600, 7200, -YEARS(10), YEARS(10), -1, YEARS(1), -YEARS(3)};
    const uint64_t n = atomic_fetch_add(&jumps, 1);
    skew = to[n * 7 % (sizeof to / sizeof *to)];
    return LG_OK;
}

static void saves_of_a_run(rank_env *env)
{
    const uint64_t *first = env->arg;
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.keep_last = 2;
    o.deadline_ms = 20000;
    RANK_TRY(env, open_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    for (uint64_t i = 0; i < 4; i++) {
        model_fill(&m, *first + i);
        if (i % 2 == 0) {
            RANK_TRY(env, model_save(s, &m, *first + i, NULL, &env->err));
        } else {
            RANK_TRY(env, model_launch(s, &m, *first + i, NULL, NULL, &env->err));
            RANK_TRY(env, lg_session_wait(s, 20000, NULL, &env->err));
        }
    }
    RANK_TRY(env, lg_session_close(s, &env->err));
}

/* The years that step folders say they were made in. */
static size_t years_of(test_root *root, char (*years)[5], size_t max)
{
    lg__walk *w;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg__walk_read(root->store, &w, &err), LG_OK);
    size_t n = 0;
    for (size_t i = 0; i < w->n && n < max; i++) {
        if (w->items[i].m != NULL) {
            snprintf(years[n++], 5, "%.4s", w->items[i].m->created);
        }
    }
    lg__walk_free(w);
    return n;
}

ON_EVERY_ROOT(k02_k03_a_clock_that_jumps_by_years_at_every_operation_changes_no_choice)
{
    fault_store *f = fault_store_new(root->store);
    fault_store_set_hook(f, jump, NULL);
    const uint64_t rounds = number_from("LASTGOOD_ROUNDS", in_full() ? 100 : 10);
    uint64_t other_years = 0;
    for (uint64_t i = 0; i < rounds; i++) {
        uint64_t first = 1 + 4 * i;
        run_all(1 + (uint32_t)(i % 3), fault_store_handle(f), saves_of_a_run, &first);
        assert_int_equal(newest(fault_store_handle(f)), first + 3);
        char folders[8][64], names[2][32];
        size_t n = root_folders(root, folders, 8);
        assert_int_equal(n, 2);
        for (uint64_t k = 0; k < 2; k++) {
            snprintf(names[k], sizeof names[k], "step-%012llu.", (unsigned long long)(first + 2 + k));
            assert_non_null(strstr(folders[k], names[k]));
        }
        char years[2][5];
        other_years += years_of(root, years, 2) == 2 && strcmp(years[0], years[1]) != 0;
    }
    fault_store_free(f);
    skew = 0;
    assert_true(other_years > 0); /* so it did jump for the library */
    print_message("# %llu saves, %llu jumps\n", (unsigned long long)(4 * rounds), (unsigned long long)jumps);
}

/* ------------------------------------------------------------------ deadlines */

static void wait_for_one_that_is_absent(rank_env *env)
{
    lg_session *s;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.deadline_ms = 500;
    RANK_TRY(env, open_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    model_fill(&m, 1);
    if (env->rank == 1) {
        const uint64_t until = lg__deadline(700);
        for (uint64_t n = 0; lg__now_ms() < until; n++) { /* it comes late, and the clock jumps meanwhile */
            skew = n % 2 == 0 ? YEARS(10) : -YEARS(10);
            lg__pause(50);
        }
        skew = 0;
        lg_session_close(s, NULL);
        return;
    }
    const uint64_t began = lg__now_ms();
    lg_status st = model_save(s, &m, 1, NULL, &env->err);
    const uint64_t waited = lg__now_ms() - began;
    lg_session_close(s, NULL);
    RANK_CHECK(env, st == LG_ERR_TIMEOUT || st == LG_ERR_COMM);
    RANK_CHECK(env, waited >= 400);
    RANK_CHECK(env, waited < 10000);
}

static void k06_deadlines_do_not_follow_the_time_of_day(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    run_all(3, root.store, wait_for_one_that_is_absent, NULL);
    root_drop(&root);
}

/* A write that takes its time, in the background. */
static lg_status slowly(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)f, (void)arg, (void)err;
    if (before && event->op == FAULT_WRITE && strstr(event->path, "shard") != NULL) {
        lg__pause(3000); /* 100 ms */
    }
    return LG_OK;
}

static void k06_waiting_for_the_background_does_not_follow_the_time_of_day(void **state)
{
    (void)state;
    static const int64_t to[] = {YEARS(10), -YEARS(10)};
    for (size_t i = 0; i < 2; i++) {
        test_root root;
        root_make(&root, ROOT_MEMORY);
        fault_store *f = fault_store_new(root.store);
        fault_store_set_hook(f, slowly, NULL);
        model m;
        lg_error err = LG_ERROR_INIT;
        lg_session *s = must_resume(fault_store_handle(f), 0, &m);
        model_fill(&m, 1);
        assert_int_equal(model_launch(s, &m, 1, NULL, NULL, &err), LG_OK);
        skew = to[i];
        if (lg_session_wait(s, 60000, NULL, &err) != LG_OK) {
            fail_msg("%s", err.message);
        }
        skew = 0;
        assert_int_equal(lg_session_close(s, &err), LG_OK);
        fault_store_free(f);
        assert_int_equal(newest(root.store), 1);
        root_drop(&root);
    }
}

/* A time that the format has no room for is not written: it is only a note. */
static void k02_a_year_of_five_digits_keeps_nobody_from_saving(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    skew = YEARS(60000);
    run_spec s = run_of(2, STEPS(10));
    root_run(&root, &s);
    skew = 0;
    lg__walk *w = NULL;
    lg_error err = LG_ERROR_INIT;
    assert_int_equal(lg__walk_read(root.store, &w, &err), LG_OK);
    assert_int_equal(w->n, 1);
    assert_string_equal(w->items[0].m->created, "1970-01-01T00:00:00Z");
    lg__walk_free(w);
    assert_int_equal(newest(root.store), 10);
    root_drop(&root);
}

/* What it is asked for is a note in a file, to the second. */
static void nothing_else_asks_for_the_time_of_day(void **state)
{
    (void)state;
    assert_int_equal(asked, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k02_k03_a_clock_that_jumps_by_years_at_every_operation_changes_no_choice),
        cmocka_unit_test(k06_deadlines_do_not_follow_the_time_of_day),
        cmocka_unit_test(k06_waiting_for_the_background_does_not_follow_the_time_of_day),
        cmocka_unit_test(k02_a_year_of_five_digits_keeps_nobody_from_saving),
        cmocka_unit_test(nothing_else_asks_for_the_time_of_day),
    };
    return cmocka_run_group_tests_name("clock", tests, NULL, NULL);
}
