/* SPDX-License-Identifier: Apache-2.0 */

/* Odd use and odd company: wrong calls, memory that runs out, a commit that is
 * in place but not durable, other processes that remove checkpoints while one
 * is loaded. */

#include "support/environment.h"
#include "support/fault_store.h"
#include "support/ranks.h"

#include "base/error.h"
#include "base/json.h"
#include "base/mem.h"
#include "comm/comm.h"
#include "core/owner.h"
#include "core/walk.h"

#include <errno.h>
#include <jansson.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/check.h"

/* ------------------------------------------------------------- wrong calls */

static void missing_arguments_are_errors(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    FAILS(LG_ERR_INVALID, lg_session_open("mem:misuse", NULL, NULL, &err));
    assert_int_equal(lg_session_epoch(NULL), 0);
    lg_memory_store_drop("misuse");
}

static void attached_names_that_differ_only_in_case_are_refused_when_added(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    lg_session *s;
    OK(lg_session_open("mem:misuse", NULL, &s, &err));
    lg_save *save;
    OK(lg_save_begin(s, 1, NULL, &save, &err));
    OK(lg_save_attach(save, "Config.json", "1", 1, &err));
    OK(lg_save_attach(save, "config.txt", "1", 1, &err));
    FAILS(LG_ERR_INVALID, lg_save_attach(save, "config.JSON", "2", 1, &err));
    SAYS("config.JSON");
    FAILS(LG_ERR_INVALID, lg_save_commit(save, NULL, &err));
    SAYS("config.JSON");
    lg_session_close(s, NULL);
    lg_memory_store_drop("misuse");
}

/* ------------------------------------------------------------ out of memory */

/* jansson itself ignores a buffer that cannot grow: tokens of every length, so
 * that it would have to at any of their bytes. */
static void want_of_memory_while_parsing_is_never_a_wrong_file(void **state)
{
    (void)state;
    static const char digits[] = "1234567890123456789012345678901234567890123456789012345678901234567890";
    for (size_t length = 1; length < sizeof digits; length++) {
        for (int form = 0; form < 3; form++) {
            static const char *const forms[] = {"[0.%.*s, 1]", "{\"a\":\"%.*s\"}", "{\"k%.*s\":[1,-2.5,true,null]}"};
            char text[160];
            snprintf(text, sizeof text, forms[form], (int)length, digits);
            lg_error err = LG_ERROR_INIT;
            json_t *whole = NULL, *json = NULL;
            OK(lg__json_parse(text, strlen(text), &whole, &err));
            lg_status st = LG_ERR_NOMEM;
            for (size_t n = 0; st != LG_OK; n++) {
                lg__mem_fail_after(n);
                st = lg__json_parse(text, strlen(text), &json, &err);
                lg__mem_fail_after(SIZE_MAX);
                if (st != LG_OK) {
                    check_status(st, LG_ERR_NOMEM, text, &err, __FILE__, __LINE__);
                    assert_null(json);
                }
            }
            assert_true(json_equal(whole, json));
            json_decref(whole);
            json_decref(json);
        }
    }
    /* So long that room for it is asked for beforehand. */
    static char longest[5000];
    memset(longest, 'x', sizeof longest);
    longest[0] = longest[sizeof longest - 1] = '"';
    lg_error err = LG_ERROR_INIT;
    json_t *json = NULL;
    lg__mem_fail_after(0);
    lg_status st = lg__json_parse(longest, sizeof longest, &json, &err);
    lg__mem_fail_after(SIZE_MAX);
    check_status(st, LG_ERR_NOMEM, "a long string", &err, __FILE__, __LINE__);
    assert_null(json);
    OK(lg__json_parse(longest, sizeof longest, &json, &err));
    assert_int_equal(json_string_length(json), sizeof longest - 2);
    json_decref(json);
    FAILS(LG_ERR_FORMAT, lg__json_parse("{\"a\":}", 6, &json, &err));
}

/* The test's own targets are not to fail; what follows them is swept by
 * test_checkpoint. */
static lg_status targets_with_memory(lg_load *load, void *arg, lg_error *err)
{
    lg__mem_fail_after(SIZE_MAX);
    return model_targets(load, arg, err);
}

ON_EVERY_ROOT(resume_does_not_step_back_for_want_of_memory)
{
    run_spec s = {.world = 1};
    static const uint64_t steps[] = {10, 20};
    s.steps = steps, s.n_steps = 2;
    root_run(root, &s);
    lg_status st = LG_ERR_NOMEM;
    for (size_t n = 0; st != LG_OK; n += 7) {
        lg_session *session = open_to_read(root->store);
        lg_error err = LG_ERROR_INIT;
        model m;
        model_init(&m, 0, 1);
        lg_resume_result *r = NULL;
        lg__mem_fail_after(n);
        st = lg_resume(session, NULL, targets_with_memory, &m, &r, &err);
        lg__mem_fail_after(SIZE_MAX);
        if (st != LG_OK) {
            check_status(st, LG_ERR_NOMEM, "lg_resume", &err, __FILE__, __LINE__);
        } else {
            assert_int_equal(r->step, 20);
            assert_int_equal(r->n_skipped, 0);
        }
        lg_resume_result_free(r);
        lg_session_close(session, NULL);
    }
}

/* One rank alone is never out of step with others, so its communicator does
 * not break. */
ON_EVERY_ROOT(a_save_that_ran_out_of_memory_can_be_tried_again)
{
    for (int threads = 0; threads < 2; threads++) {
        lg_error err = LG_ERROR_INIT;
        lg_comm *comm = NULL;
        if (threads) {
            OK(lg_comm_threads_create(1, &comm, &err));
        }
        lg_session_options o = LG_SESSION_OPTIONS_INIT;
        o.store = root->store;
        o.comm = comm;
        o.flags = LG_SESSION_NEW_RUN;
        lg_session *s;
        OK(lg_session_open("root", &o, &s, &err));
        model m;
        model_init(&m, 0, 1);
        size_t failed = 0;
        lg_status st = LG_ERR_NOMEM;
        for (size_t n = 0; st != LG_OK; n++) {
            lg_save *save;
            model_fill(&m, n + 1);
            OK(lg_save_begin(s, n + 1, NULL, &save, &err));
            OK(model_add(save, &m, &err));
            lg__mem_fail_after(n);
            st = lg_save_commit(save, NULL, &err);
            lg__mem_fail_after(SIZE_MAX);
            if (st != LG_OK) {
                failed++;
                check_status(st, LG_ERR_NOMEM, "lg_save_commit", &err, __FILE__, __LINE__);
            }
        }
        assert_true(failed > 100);
        lg_session_close(s, NULL);
        lg_comm_free(comm);
    }
}

static void want_of_memory_does_not_make_a_checkpoint_the_last_one(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    run_spec s = {.world = 2};
    static const uint64_t steps[] = {10, 20, 30};
    s.steps = steps, s.n_steps = 3;
    root_run(&root, &s);
    char where[300];
    snprintf(where, sizeof where, "%s@20", root.path);
    lg_error err = LG_ERROR_INIT;
    lg_status st = LG_ERR_NOMEM;
    size_t n = 0;
    /* Once it is renamed away it is gone, also when its files cannot be listed. */
    for (; st == LG_ERR_NOMEM; n++) {
        lg__mem_fail_after(n);
        st = lg_remove(where, &err);
        lg__mem_fail_after(SIZE_MAX);
        if (st != LG_OK && st != LG_ERR_NOT_FOUND) {
            check_status(st, LG_ERR_NOMEM, "lg_remove", &err, __FILE__, __LINE__);
        }
    }
    assert_true(n > 100);
    root_drop(&root);
}

static void nobody(const char *name, uint64_t bytes, void *arg)
{
    (void)name;
    (void)bytes;
    (void)arg;
}

static lg_status command(int which, const char *root, const char *where, lg_error *err)
{
    lg_listing *list = NULL;
    lg_prune_options o = LG_PRUNE_OPTIONS_INIT;
    o.keep_last = 2;
    lg_status st;
    switch (which) {
    case 0:
        st = lg_list(root, LG_LIST_ALL, &list, err);
        lg_listing_free(list);
        return st;
    case 1:
        return lg_pin(where, 1, "kept", err);
    case 2:
        return lg_prune(root, &o, NULL, NULL, err);
    default:
        return lg_sweep(root, 1, nobody, NULL, err);
    }
}

static void want_of_memory_in_any_command_is_said_and_harms_nothing(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_MEMORY);
    run_spec s = {.world = 2};
    static const uint64_t steps[] = {10, 20, 30};
    s.steps = steps, s.n_steps = 3;
    root_run(&root, &s);
    lg_error err = LG_ERROR_INIT;
    OK(lg__store_make_dir(root.store, ".trash-1.0123456789abcdef-step-000000000005.g1.9", &err));
    OK(lg__store_put_new(root.store, ".trash-1.0123456789abcdef-step-000000000005.g1.9/shard", "x", 1, &err));
    char where[300];
    snprintf(where, sizeof where, "%s@10", root.path);
    for (int which = 0; which < 4; which++) {
        lg_status st = LG_ERR_NOMEM;
        size_t n = 0;
        for (; st == LG_ERR_NOMEM; n++) {
            lg__mem_fail_after(n);
            st = command(which, root.path, where, &err);
            lg__mem_fail_after(SIZE_MAX);
        }
        check_status(st, LG_OK, "a command", &err, __FILE__, __LINE__);
        assert_true(n > 10);
        OK(command(which, root.path, where, &err)); /* and again */
        char folders[3][64];
        assert_int_equal(root_folders(&root, folders, 3), 3);
    }
    lg__walk *w = NULL;
    lg__pin_state pin;
    OK(lg__walk_read(root.store, &w, &err));
    OK(lg__pin_read(root.store, w->items[2].name, w->items[2].m->sha256, &pin, &err));
    assert_true(pin.pinned);
    assert_int_equal(pin.highest, 1); /* one record, whatever failed before */
    lg__walk_free(w);
    root_drop(&root);
}

/* ----------------------------------------------- in place, but not durable */

/* Fails the sync of the root behind the commit itself. */
static lg_status fail_last_sync(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    (void)f;
    int *armed = arg;
    bool commit = (e->op == FAULT_RENAME_DIR && strstr(e->path, ".partial") != NULL) ||
                  (e->op == FAULT_PUT_NEW && strstr(e->path, "lastgood.json") != NULL);
    if (!before && commit && *armed == 1) {
        *armed = 2;
    } else if (before && *armed == 2 && e->op == FAULT_SYNC_DIR && e->path[0] == '\0') {
        *armed = 0;
        return lg_error_set_errno(err, EIO, "sync");
    }
    return LG_OK;
}

ON_EVERY_ROOT(a_save_after_one_that_is_not_durable_is_of_the_same_run_and_is_not_skipped)
{
    for (int resumed = 0; resumed < 2; resumed++) {
        test_root fresh;
        root_make(&fresh, root->kind);
        int armed = 0;
        fault_store *f = fault_store_new(fresh.store);
        fault_store_set_hook(f, fail_last_sync, &armed);
        lg_session_options o = LG_SESSION_OPTIONS_INIT;
        o.store = fault_store_handle(f);
        lg_error err = LG_ERROR_INIT;
        lg_session *s;
        OK(lg_session_open("root", &o, &s, &err));
        model m;
        model_init(&m, 0, 1);
        lg_resume_result *r = NULL;
        if (resumed) {
            FAILS(LG_ERR_EMPTY, lg_resume(s, NULL, model_targets, &m, &r, &err));
        }
        model_fill(&m, 1);
        armed = 1;
        FAILS(LG_ERR_NOT_DURABLE, model_save(s, &m, 1, NULL, &err));
        lg_session_status status;
        OK(lg_session_get_status(s, &status, &err));
        assert_int_equal(status.saves_committed, 0);
        lg_save_options so = LG_SAVE_OPTIONS_INIT;
        so.flags = LG_SAVE_IF_NEW;
        lg_save *save;
        lg_save_info info;
        OK(lg_save_begin(s, 1, &so, &save, &err));
        OK(model_add(save, &m, &err));
        OK(lg_save_commit(save, &info, &err));
        assert_int_equal(info.skipped, 0);
        lg__walk *w;
        OK(lg__walk_read(fresh.store, &w, &err));
        assert_int_equal(w->n, 2);
        assert_string_equal(w->items[0].m->run_id, w->items[1].m->run_id);
        assert_true(w->items[0].m->has_parent);
        assert_int_equal(lg_generation_compare(w->items[0].m->parent, w->items[1].generation), 0);
        lg__walk_free(w);
        lg_session_close(s, NULL);
        fault_store_free(f);
        root_drop(&fresh);
    }
}

/* --------------------------------------------- removed while it is looked at */

typedef struct remover {
    test_root *root;
    uint32_t op; /* act before the n-th of these on a path that contains `path` */
    const char *path;
    uint64_t nth, seen;
    char victim[64];
    bool acted;
} remover;

/* What retention of another session does, at the worst moment. */
static lg_status remove_now(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    (void)f;
    remover *r = arg;
    if (!before || r->acted || e->op != (fault_op)r->op || strstr(e->path, r->path) == NULL || ++r->seen < r->nth) {
        return LG_OK;
    }
    r->acted = true;
    run_spec newer = {.world = 1};
    static const uint64_t steps[] = {20};
    newer.steps = steps, newer.n_steps = 1;
    root_run(r->root, &newer);
    return lg__checkpoint_remove(r->root->store, r->victim, 1000, err);
}

/* Resume of a reader: each operation on the only checkpoint is the moment at
 * which a newer one is committed and this one removed. */
ON_EVERY_ROOT(resume_takes_the_newer_one_when_a_checkpoint_is_removed_underneath)
{
    static const uint32_t ops[] = {FAULT_OPEN, FAULT_LIST, FAULT_READ};
    size_t acted = 0;
    for (size_t k = 0; k < sizeof ops / sizeof *ops; k++) {
        for (uint64_t nth = 1;; nth++) {
            test_root fresh;
            root_make(&fresh, root->kind);
            run_spec s = {.world = 1};
            static const uint64_t steps[] = {10};
            s.steps = steps, s.n_steps = 1;
            root_run(&fresh, &s);
            remover r = {.root = &fresh, .op = ops[k], .path = "", .nth = nth};
            char folders[4][64];
            assert_int_equal(root_folders(&fresh, folders, 4), 1);
            memcpy(r.victim, folders[0], sizeof r.victim);
            fault_store *f = fault_store_new(fresh.store);
            fault_store_set_hook(f, remove_now, &r);
            lg_session *session = open_to_read(fault_store_handle(f));
            lg_error err = LG_ERROR_INIT;
            model m;
            model_init(&m, 0, 1);
            lg_resume_result *result = NULL;
            OK(lg_resume(session, NULL, model_targets, &m, &result, &err));
            if (result->n_skipped > 0) {
                fail_msg("%s %llu: skipped %s", fault_op_name((fault_op)ops[k]), (unsigned long long)nth,
                         result->skipped[0].reason);
            }
            assert_null(model_wrong(&m, result->step));
            assert_true(result->step == 20 || result->step == 10);
            lg_resume_result_free(result);
            lg_session_close(session, NULL);
            fault_store_set_hook(f, NULL, NULL);
            fault_store_free(f);
            root_drop(&fresh);
            acted += r.acted;
            if (!r.acted) {
                break;
            }
        }
    }
    assert_true(acted > 10);
}

/* A session that opens meets an attempt whose folder somebody else removes. */
ON_EVERY_ROOT(an_attempt_that_is_removed_by_another_does_not_keep_a_session_from_opening)
{
    lg_error err = LG_ERROR_INIT;
    FAILS(LG_ERR_NOT_FOUND, lg__store_sync_dir(root->store, "step-000000000005.g1.1", &err));
    lg_status st = lg__attempt_end(root->store, "step-000000000005.g1.1", "00000000000000000000000000000000",
                                   (lg_generation){1, 1}, "0000000000000000", 2, &err);
    assert_true(st == LG_OK || st == LG_ERR_EXISTS); /* what a claim takes as ended */
}

/* ------------------------------------------------------------- late ranks */

#define LATE_WORLD 3
#define LATE_MS short_ms(300)

typedef struct late { /* one case: `victim` stops before its `at`-th exchange */
    uint32_t victim;
    int at;
    bool stopped;
    sem_t others; /* posted by each other rank when it is done */
} late;

typedef struct late_comm {
    lg_comm *inner;
    late *l;
    int count;
} late_comm;

static void maybe_stop(late_comm *c)
{
    if (c->inner->rank == c->l->victim && ++c->count == c->l->at) {
        c->l->stopped = true;
        for (int i = 1; i < LATE_WORLD; i++) {
            sem_wait(&c->l->others);
        }
    }
}

static lg_status late_barrier(void *ctx, uint64_t deadline_ms, lg_error *err)
{
    late_comm *c = ctx;
    maybe_stop(c);
    return c->inner->ops->barrier(c->inner->ctx, deadline_ms, err);
}

static lg_status late_all_gather(void *ctx, const void *data, size_t bytes, void **all, size_t *sizes,
                                 uint64_t deadline_ms, lg_error *err)
{
    late_comm *c = ctx;
    maybe_stop(c);
    return c->inner->ops->all_gather(c->inner->ctx, data, bytes, all, sizes, deadline_ms, err);
}

static lg_status late_broadcast(void *ctx, void **data, size_t *bytes, uint32_t from, uint64_t deadline_ms,
                                lg_error *err)
{
    late_comm *c = ctx;
    maybe_stop(c);
    return c->inner->ops->broadcast(c->inner->ctx, data, bytes, from, deadline_ms, err);
}

static lg_status late_all_to_all(void *ctx, const void *const *send, const size_t *send_bytes, void **recv,
                                 size_t *recv_bytes, uint64_t deadline_ms, lg_error *err)
{
    late_comm *c = ctx;
    maybe_stop(c);
    return c->inner->ops->all_to_all(c->inner->ctx, send, send_bytes, recv, recv_bytes, deadline_ms, err);
}

static const lg_comm_ops late_ops = {
    .version = LG_COMM_OPS_VERSION,
    .barrier = late_barrier,
    .all_gather = late_all_gather,
    .broadcast = late_broadcast,
    .all_to_all = late_all_to_all,
};

static lg_status late_run(lg_comm *comm, lg_store *store, lg_error *err)
{
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = comm;
    o.store = store;
    o.deadline_ms = LATE_MS;
    lg_session *s;
    LG__TRY(lg_session_open("root", &o, &s, err));
    model m;
    model_init(&m, comm->rank, comm->size);
    m.stats_differ = true; /* one exchange more */
    lg_resume_options ro = LG_RESUME_OPTIONS_INIT;
    ro.flags = LG_RESUME_ROUNDS; /* and another one */
    lg_resume_result *r = NULL;
    lg_status st = lg_resume(s, &ro, model_targets, &m, &r, err);
    lg_resume_result_free(r);
    if (st == LG_OK) {
        model_fill(&m, 20);
        st = model_save(s, &m, 20, NULL, err);
    }
    if (st != LG_OK) { /* and nothing waits any more */
        lg_error later = LG_ERROR_INIT;
        if (model_save(s, &m, 30, NULL, &later) != LG_ERR_COMM) {
            st = lg_error_set(err, LG_ERR_INTERNAL, "a save after the failure: %s", later.message);
        }
    }
    lg_session_close(s, NULL);
    return st;
}

/* ------------------------------------- what one rank sends is not what it should be
 *
 * As a rank of another version would, or one that is in another call: its n-th
 * exchange has one byte. */

typedef struct cutter {
    lg_comm *inner;
    uint32_t victim;
    int at, count;
    bool did, flips; /* the first bit is another instead */
} cutter;

static bool cut_now(cutter *c)
{
    const bool now = c->inner->rank == c->victim && ++c->count == c->at;
    c->did = c->did || now;
    return now;
}

static lg_status cut_barrier(void *ctx, uint64_t deadline_ms, lg_error *err)
{
    cutter *c = ctx;
    return c->inner->ops->barrier(c->inner->ctx, deadline_ms, err);
}

static lg_status cut_all_gather(void *ctx, const void *data, size_t bytes, void **all, size_t *sizes,
                                uint64_t deadline_ms, lg_error *err)
{
    cutter *c = ctx;
    const bool now = cut_now(c) && bytes > 1;
    if (!now || !c->flips) {
        return c->inner->ops->all_gather(c->inner->ctx, data, now ? 1 : bytes, all, sizes, deadline_ms, err);
    }
    char *other = malloc(bytes);
    memcpy(other, data, bytes);
    other[0] ^= 1;
    lg_status st = c->inner->ops->all_gather(c->inner->ctx, other, bytes, all, sizes, deadline_ms, err);
    free(other);
    return st;
}

static lg_status cut_broadcast(void *ctx, void **data, size_t *bytes, uint32_t from, uint64_t deadline_ms,
                               lg_error *err)
{
    cutter *c = ctx;
    size_t one = 1;
    const bool now = from == c->victim && cut_now(c) && c->inner->rank == from;
    return c->inner->ops->broadcast(c->inner->ctx, data, now ? &one : bytes, from, deadline_ms, err);
}

static lg_status cut_all_to_all(void *ctx, const void *const *send, const size_t *send_bytes, void **recv,
                                size_t *recv_bytes, uint64_t deadline_ms, lg_error *err)
{
    cutter *c = ctx;
    return c->inner->ops->all_to_all(c->inner->ctx, send, send_bytes, recv, recv_bytes, deadline_ms, err);
}

static const lg_comm_ops cut_ops = {.version = LG_COMM_OPS_VERSION,
                                    .barrier = cut_barrier,
                                    .all_gather = cut_all_gather,
                                    .broadcast = cut_broadcast,
                                    .all_to_all = cut_all_to_all};

typedef struct cut_case {
    uint32_t victim;
    int at;
    bool did, flips;
} cut_case;

static void cut_rank(rank_env *env)
{
    cut_case *c = env->arg;
    cutter k = {.inner = env->comm, .victim = c->victim, .at = c->at, .flips = c->flips};
    lg_comm *comm;
    RANK_TRY(env, lg_comm_create(&cut_ops, &k, env->rank, env->world, &comm, &env->err));
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = comm;
    o.store = env->store;
    o.deadline_ms = LATE_MS;
    lg_session *s = NULL;
    env->status = lg_session_open("root", &o, &s, &env->err);
    model m;
    model_init(&m, comm->rank, comm->size);
    m.stats_differ = true;
    if (env->status == LG_OK) {
        lg_resume_result *r = NULL;
        env->status = lg_resume(s, NULL, model_targets, &m, &r, &env->err);
        lg_resume_result_free(r);
    }
    if (env->status == LG_OK) {
        model_fill(&m, 20);
        env->status = model_save(s, &m, 20, NULL, &env->err);
    }
    lg_session_close(s, NULL);
    lg_comm_free(comm);
    if (env->rank == c->victim) {
        c->did = k.did;
    }
}

static size_t says(const rank_env *env, const char *format, uint32_t victim)
{
    char text[80];
    snprintf(text, sizeof text, format, victim);
    return env->status != LG_OK && strstr(env->err.message, text) != NULL;
}

static void k06_a_rank_that_sends_something_else_is_named_by_all_others(void **state)
{
    (void)state;
    for (uint32_t victim = 0; victim < LATE_WORLD; victim += 2) {
        bool did = true;
        size_t versions = 0, calls = 0, lists = 0, told = 0;
        for (int at = 1; did; at++) {
            test_root root;
            root_make(&root, ROOT_MEMORY);
            run_spec before = {.world = 2};
            static const uint64_t steps[] = {10};
            before.steps = steps, before.n_steps = 1;
            root_run(&root, &before);
            cut_case c = {.victim = victim, .at = at};
            rank_env env[LATE_WORLD];
            run_ranks(LATE_WORLD, root.store, cut_rank, &c, env);
            did = c.did;
            const uint64_t found = newest(root.store);
            bool all = true, none = true;
            for (uint32_t r = 0; r < LATE_WORLD; r++) {
                all = all && env[r].status == LG_OK;
                none = none && env[r].status != LG_OK;
                versions += says(&env[r], "rank %u runs another version of lastgood", victim);
                calls += says(&env[r], "rank %u is in another call than lg_save_commit", victim);
                lists += says(&env[r], "rank %u could not list its tensors", victim);
                told += says(&env[r], "rank %u sent a message of 1 bytes", victim);
                /* what was said to be saved is there */
                if (env[r].status == LG_OK ? found != 20 : found != 10 && found != 20) {
                    fail_msg("victim %u at %d: rank %u: %s, and step %d is the newest", victim, at, r,
                             lg_status_name(env[r].status), (int)found);
                }
            }
            /* Rank 0 has told the others what is committed: it does not ask whether they understood. */
            if (!all && !none && victim != 0) {
                fail_msg("victim %u at %d: rank 0: %s, rank 1: %s", victim, at, lg_status_name(env[0].status),
                         lg_status_name(env[1].status));
            }
            root_drop(&root);
        }
        /* at least one of the others; another one may hear first that somebody left */
        assert_true(versions >= 1);
        assert_true(calls >= 2);
        assert_true(victim == 0 ? told >= 4 : lists >= 1);
    }
}

static void k06_a_rank_of_another_version_is_named_when_the_session_opens(void **state)
{
    (void)state;
    for (uint32_t victim = 0; victim < LATE_WORLD; victim += 2) {
        test_root root;
        root_make(&root, ROOT_MEMORY);
        cut_case c = {.victim = victim, .at = 1, .flips = true};
        rank_env env[LATE_WORLD];
        run_ranks(LATE_WORLD, root.store, cut_rank, &c, env);
        for (uint32_t r = 0; r < LATE_WORLD; r++) {
            assert_int_equal(env[r].status, LG_ERR_CONFLICT);
            assert_true(says(&env[r], "rank %u runs another version of lastgood", victim));
        }
        root_drop(&root);
    }
}

static void late_rank(rank_env *env)
{
    late *l = env->arg;
    late_comm c = {.inner = env->comm, .l = l};
    lg_comm *comm;
    RANK_TRY(env, lg_comm_create(&late_ops, &c, env->rank, env->world, &comm, &env->err));
    env->status = late_run(comm, env->store, &env->err);
    lg_comm_free(comm);
    if (env->rank != l->victim) {
        sem_post(&l->others);
    }
}

static void k06_a_rank_that_stops_in_any_exchange_is_named_by_all_others(void **state)
{
    (void)state;
    for (uint32_t victim = 0; victim < LATE_WORLD; victim += 2) {
        for (int at = 1;; at++) {
            test_root root;
            root_make(&root, ROOT_MEMORY);
            run_spec before = {.world = 2};
            static const uint64_t steps[] = {10};
            before.steps = steps, before.n_steps = 1;
            root_run(&root, &before);
            late l = {.victim = victim, .at = at};
            sem_init(&l.others, 0, 0);
            rank_env env[LATE_WORLD];
            run_ranks(LATE_WORLD, root.store, late_rank, &l, env);
            sem_destroy(&l.others);
            char name[16];
            snprintf(name, sizeof name, "rank %u ", victim);
            for (uint32_t r = 0; r < LATE_WORLD && l.stopped; r++) {
                bool right = r == victim ? env[r].status != LG_OK
                                         : env[r].status == LG_ERR_TIMEOUT && env[r].err.rank == (int)victim &&
                                               strstr(env[r].err.message, name) != NULL;
                if (!right) {
                    fail_msg("rank %u stops at %d: rank %u: %s, rank %d: %s", victim, at, r,
                             lg_status_name(env[r].status), env[r].err.rank, env[r].err.message);
                }
            }
            run_spec after = {.world = 2};
            root_run(&root, &after);
            assert_true(after.resumed_from == 10 || after.resumed_from == 20);
            assert_int_equal(after.skipped, 0);
            root_drop(&root);
            if (!l.stopped) {
                assert_true(at > 8);
                assert_int_equal(after.resumed_from, 20);
                break;
            }
        }
    }
}

/* ------------------------------------------- one rank calls it another way */

static void odd_resume(rank_env *env)
{
    const char *what = env->arg;
    bool odd = env->rank == 1;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.flags = LG_SESSION_READ_ONLY;
    o.deadline_ms = 20000;
    lg_session *s;
    RANK_TRY(env, begin_session(env, o, &s));
    model m;
    model_init(&m, env->rank, env->world);
    lg_resume_options ro = LG_RESUME_OPTIONS_INIT;
    uint64_t step = 10;
    lg_generation g = {1, 1};
    if (strcmp(what, "size") == 0 && odd) {
        ro.size = 1;
    } else if (strcmp(what, "flags") == 0 && odd) {
        ro.flags = LG_RESUME_UNVERIFIED;
    } else if (strcmp(what, "strict") == 0 && odd) {
        ro.flags = LG_RESUME_STRICT;
    } else if (strcmp(what, "step") == 0 && odd) {
        ro.step = &step;
    } else if (strcmp(what, "generation") == 0 && !odd) {
        ro.generation = &g;
    }
    lg_resume_result *r = NULL;
    bool no_place = strcmp(what, "place") == 0 && odd;
    env->status = lg_resume(s, &ro, model_targets, &m, no_place ? NULL : &r, &env->err);
    lg_resume_result_free(r);
    lg_session_close(s, NULL);
}

ON_EVERY_ROOT(k06_a_rank_that_resumes_in_another_way_is_named_and_nobody_waits)
{
    run_spec before = {.world = 3};
    static const uint64_t steps[] = {10, 20};
    before.steps = steps, before.n_steps = 2;
    root_run(root, &before);
    static const char *const cases[] = {"size", "flags", "strict", "step", "generation", "place"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rank_env env[3];
        run_ranks(3, root->store, odd_resume, (void *)(uintptr_t)cases[i], env);
        for (int r = 0; r < 3; r++) {
            lg_status want =
                strcmp(cases[i], "size") == 0 || strcmp(cases[i], "place") == 0 ? LG_ERR_INVALID : LG_ERR_CONFLICT;
            if (env[r].status != want || strstr(env[r].err.message, "rank 1: ") == NULL || env[r].err.rank != 1) {
                fail_msg("%s: rank %d: %s: %s", cases[i], r, lg_status_name(env[r].status), env[r].err.message);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(missing_arguments_are_errors),
        cmocka_unit_test(attached_names_that_differ_only_in_case_are_refused_when_added),
        cmocka_unit_test(want_of_memory_while_parsing_is_never_a_wrong_file),
        cmocka_unit_test(resume_does_not_step_back_for_want_of_memory),
        cmocka_unit_test(a_save_that_ran_out_of_memory_can_be_tried_again),
        cmocka_unit_test(want_of_memory_does_not_make_a_checkpoint_the_last_one),
        cmocka_unit_test(a_save_after_one_that_is_not_durable_is_of_the_same_run_and_is_not_skipped),
        cmocka_unit_test(resume_takes_the_newer_one_when_a_checkpoint_is_removed_underneath),
        cmocka_unit_test(k06_a_rank_that_stops_in_any_exchange_is_named_by_all_others),
        cmocka_unit_test(k06_a_rank_that_sends_something_else_is_named_by_all_others),
        cmocka_unit_test(k06_a_rank_of_another_version_is_named_when_the_session_opens),
        cmocka_unit_test(want_of_memory_in_any_command_is_said_and_harms_nothing),
        cmocka_unit_test(k06_a_rank_that_resumes_in_another_way_is_named_and_nobody_waits),
        cmocka_unit_test(an_attempt_that_is_removed_by_another_does_not_keep_a_session_from_opening),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
