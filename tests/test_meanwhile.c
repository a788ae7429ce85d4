/* SPDX-License-Identifier: Apache-2.0 */

/* What others do meanwhile, and what a look at a root does when the next one
 * fails: commands and sessions that find a checkpoint gone, replaced, pinned or
 * claimed between two of their requests. */

#include "support/check.h"
#include "support/scene.h"

#include "core/checkpoint.h"
#include "core/owner.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------- a root that is named "x:root"
 *
 * What takes a root by name gets the store of the running test, where a hook
 * sees each request. It frees the handle, which stays ours. */

#define ROOT "x:root"

static fault_store *current;

lg_status __wrap_lg_store_open(const char *uri, lg_store **out, lg_error *err);
lg_status __real_lg_store_open(const char *uri, lg_store **out, lg_error *err);
void __wrap_lg_store_free(lg_store *store);
void __real_lg_store_free(lg_store *store);

lg_status __wrap_lg_store_open(const char *uri, lg_store **out, lg_error *err)
{
    if (current == NULL || uri == NULL || strcmp(uri, ROOT) != 0) {
        return __real_lg_store_open(uri, out, err);
    }
    *out = fault_store_handle(current);
    return LG_OK;
}

void __wrap_lg_store_free(lg_store *store)
{
    if (current == NULL || store != fault_store_handle(current)) {
        __real_lg_store_free(store);
    }
}

static void watch(const test_root *root) { current = fault_store_new(root->store); }

static void unwatch(void)
{
    fault_store *f = current;
    current = NULL;
    fault_store_free(f);
}

/* ------------------------------------------- removed before the n-th request */

typedef struct remover {
    lg_store *store;
    char victim[LG__NAME_MAX]; /* a folder */
    uint64_t nth, seen;
    bool acted;
} remover;

static lg_status remove_now(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    (void)f;
    remover *r = arg;
    const char *at = strstr(e->path, r->victim);
    if (!before || r->acted || at != e->path || ++r->seen < r->nth) {
        return LG_OK;
    }
    r->acted = true;
    return lg__root_name_parse(r->victim).kind == LG__ROOT_TRASH ? lg__folder_remove(r->store, r->victim, err)
                                                                 : lg__checkpoint_remove(r->store, r->victim, 1, err);
}

/* Steps 10, 20 and 30 of one rank; before the n-th request that has to do with
 * step 10 or 20 another process removes it. */
typedef struct lost {
    test_root root;
    remover r;
} lost;

static void lost_begin(lost *l, int kind, uint64_t step, uint64_t nth)
{
    root_make(&l->root, kind);
    run_spec s = run_of(1, STEPS(10, 20, 30));
    root_run(&l->root, &s);
    char folders[3][64];
    assert_int_equal(root_folders(&l->root, folders, 3), 3);
    l->r = (remover){.store = l->root.store, .nth = nth};
    snprintf(l->r.victim, sizeof l->r.victim, "%s", folders[step / 10 - 1]);
    watch(&l->root);
    fault_store_set_hook(current, remove_now, &l->r);
}

/* false: there was no n-th request. */
static bool lost_end(lost *l)
{
    unwatch();
    root_drop(&l->root);
    return l->r.acted;
}

ON_EVERY_ROOT(a_listing_does_not_call_damaged_what_is_removed_while_it_is_made)
{
    uint64_t nth = 0;
    bool acted = true;
    while (acted) {
        lost l;
        lost_begin(&l, root->kind, 20, ++nth);
        lg_error err = LG_ERROR_INIT;
        lg_listing *list = NULL;
        OK(lg_list(ROOT, LG_LIST_ALL, &list, &err));
        size_t committed = 0;
        for (size_t i = 0; i < list->n; i++) {
            const lg_entry *e = &list->entries[i];
            if (e->kind == LG_ENTRY_COMMITTED) {
                committed++;
                assert_int_equal(e->status, LG_OK);
                assert_int_equal(e->newest, e->step == 30);
            }
        }
        assert_true(committed == 2 || committed == 3);
        lg_listing_free(list);
        acted = lost_end(&l);
    }
    assert_true(nth > 3);
}

static void count_removed(const lg_prune_item *item, void *arg)
{
    (void)item;
    ++*(size_t *)arg;
}

ON_EVERY_ROOT(prune_goes_on_past_what_another_process_removes_first)
{
    for (uint64_t step = 10; step <= 20; step += 10) {
        uint64_t nth = 0;
        bool acted = true;
        while (acted) {
            lost l;
            lost_begin(&l, root->kind, step, ++nth);
            lg_error err = LG_ERROR_INIT;
            lg_prune_options o = LG_PRUNE_OPTIONS_INIT;
            o.keep_last = 1, o.dry_run = 0;
            size_t told = 0;
            OK(lg_prune(ROOT, &o, count_removed, &told, &err));
            assert_true(told == 2 || told == 3);
            char folders[3][64];
            assert_int_equal(root_folders(&l.root, folders, 3), 1);
            assert_int_equal(newest(l.root.store), 30);
            acted = lost_end(&l);
        }
        assert_true(nth > 5);
    }
}

/* Opens, resumes, saves, removes what is old, closes. */
ON_EVERY_ROOT(a_session_goes_on_past_what_another_process_removes_first)
{
    uint64_t nth = 0;
    bool acted = true;
    while (acted) {
        lost l;
        lost_begin(&l, root->kind, 10, ++nth);
        model m;
        lg_session *s = must_resume(fault_store_handle(current), 2, &m);
        assert_null(model_wrong(&m, 30));
        lg_error err = LG_ERROR_INIT;
        OK(save_step(s, &m, 40, &err));
        lg_session_status status;
        OK(lg_session_get_status(s, &status, &err));
        if (status.removal_failures != 0) {
            fail_msg("before request %llu: %s", (unsigned long long)nth, status.last_removal_error);
        }
        OK(lg_session_close(s, &err));
        char folders[4][64];
        assert_int_equal(root_folders(&l.root, folders, 4), 2);
        assert_int_equal(newest(l.root.store), 40);
        acted = lost_end(&l);
    }
    assert_true(nth > 3);
}

static void count_swept(const char *name, uint64_t bytes, void *arg)
{
    (void)name;
    (void)bytes;
    ++*(size_t *)arg;
}

ON_ROOTS_WITH_RENAME(a_sweep_goes_on_past_what_another_one_swept_first)
{
    uint64_t nth = 0;
    bool acted = true;
    while (acted) {
        lost l;
        lost_begin(&l, root->kind, 10, ++nth);
        lg_error err = LG_ERROR_INIT;
        char trash[LG__NAME_MAX];
        lg__trash_name(1, "0123456789abcdef", l.r.victim, trash);
        OK(lg__store_rename_dir(l.root.store, l.r.victim, trash, &err));
        snprintf(l.r.victim, sizeof l.r.victim, "%s", trash);
        size_t swept = 0;
        OK(lg_sweep(ROOT, 0, count_swept, &swept, &err));
        assert_int_equal(count_kind(l.root.store, LG__ROOT_TRASH), 0);
        assert_int_equal(swept, l.r.acted && nth == 1 ? 0 : 1); /* the first request asks for its size */
        acted = lost_end(&l);
    }
    assert_true(nth > 2);
}

/* ------------------------------- a run goes on while its root is read by name */

typedef struct overtaker {
    test_root *root;
    uint64_t nth, seen;
    bool acted;
} overtaker;

/* A newer checkpoint is committed, and retention removes the one that is read. */
static lg_status overtake_now(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    (void)f;
    (void)e;
    (void)err;
    overtaker *o = arg;
    if (before && !o->acted && ++o->seen == o->nth) {
        o->acted = true;
        run_spec s = run_of(1, STEPS(20));
        s.keep_last = 1;
        root_run(o->root, &s);
    }
    return LG_OK;
}

ON_EVERY_ROOT(a_read_takes_the_newer_one_when_retention_removes_what_it_reads)
{
    uint64_t nth = 0;
    bool acted = true;
    size_t newer = 0, older = 0;
    while (acted) {
        test_root fresh;
        root_make(&fresh, root->kind);
        run_spec s = run_of(1, STEPS(10));
        root_run(&fresh, &s);
        overtaker o = {.root = &fresh, .nth = ++nth};
        watch(&fresh);
        fault_store_set_hook(current, overtake_now, &o);
        lg_error err = LG_ERROR_INIT;
        float w[13 * 6] = {0};
        const uint64_t shape[] = {13, 6};
        lg_target t = LG_TARGET_INIT;
        t.name = "w", t.ndim = 2, t.shape = shape, t.data = w;
        uint64_t step = 0;
        const lg_status st = lg_read(ROOT, &t, 1, &step, &err);
        if (st != LG_OK) {
            fail_msg("before request %llu: %s", (unsigned long long)nth, err.message);
        }
        assert_true(step == 10 || step == 20);
        model m;
        model_init(&m, 0, 1);
        model_fill(&m, step);
        assert_memory_equal(w, m.w, sizeof w);
        newer += step == 20;
        older += step == 10;
        acted = o.acted;
        unwatch();
        root_drop(&fresh);
    }
    assert_true(newer > 5);
    assert_true(older > 0);
}

/* A listing shows an empty root; what the second look says decides. */
typedef struct second_look {
    lg_status status;
    int looks;
} second_look;

static lg_status on_look(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    (void)f;
    second_look *l = arg;
    if (e->op == FAULT_LIST && e->path[0] == '\0' && before && ++l->looks == 2) {
        return lg_error_set(err, l->status, "the second look fails");
    }
    return LG_OK;
}

ON_EVERY_ROOT(a_fresh_start_is_not_taken_from_a_root_that_cannot_be_looked_at_again)
{
    run_spec none = run_of(1, NULL, 0);
    root_run(root, &none);
    static const lg_status statuses[] = {LG_ERR_IO, LG_ERR_PERMISSION, LG_ERR_NOMEM};
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) {
        watch(root);
        lg_session *s = open_to_read(fault_store_handle(current));
        second_look look = {.status = statuses[i]};
        fault_store_set_hook(current, on_look, &look);
        lg_error err = LG_ERROR_INIT;
        lg_resume_result *r = NULL;
        model m;
        model_init(&m, 0, 1);
        FAILS(statuses[i], lg_resume(s, NULL, model_targets, &m, &r, &err));
        SAYS("the second look fails");
        assert_null(r);
        lg_session_close(s, NULL);
        unwatch();
    }
}

/* The newest is damaged; the next one is removed while the root is looked at
 * anew, which shows the damaged one once more. */
ON_EVERY_ROOT(a_damaged_checkpoint_is_passed_over_once_however_often_the_root_is_looked_at)
{
    lost l;
    lost_begin(&l, root->kind, 20, 1);
    fault_store_set_hook(current, NULL, NULL);
    char folders[3][64];
    root_folders(&l.root, folders, 3);
    root_flip(&l.root, folders[2], "shard-00001-model-00001-of-00001.safetensors", 900);
    lg_session *s = open_to_read(fault_store_handle(current));
    size_t found = 0;
    lg_error err = LG_ERROR_INIT;
    l.r.nth = 3; /* behind the walk, which opens and reads its manifest */
    fault_store_set_hook(current, remove_now, &l.r);
    lg_resume_result *r = NULL;
    model m;
    model_init(&m, 0, 1);
    OK(lg_resume(s, NULL, model_targets, &m, &r, &err));
    assert_true(l.r.acted);
    assert_int_equal(r->step, 10);
    assert_null(model_wrong(&m, 10));
    for (size_t i = 0; i < r->n_skipped; i++) {
        found += r->skipped[i].step == 30;
    }
    assert_int_equal(found, 1);
    assert_int_equal(r->n_skipped, 1);
    lg_resume_result_free(r);
    lg_session_close(s, NULL);
    lost_end(&l);
}

static void a_root_that_is_not_there_is_no_fresh_start_for_one_who_only_reads(void **state)
{
    (void)state;
    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.flags = LG_SESSION_READ_ONLY;
    lg_session *s = NULL;
    lg_error err = LG_ERROR_INIT;
    OK(lg_session_open("mem:nobody-made-it", &o, &s, &err));
    lg_resume_result *r = NULL;
    FAILS(LG_ERR_NOT_FOUND, lg_resume(s, NULL, NULL, NULL, &r, &err));
    SAYS("resume from mem:nobody-made-it: there is no such root");
    assert_null(r);
    lg_session_close(s, NULL);
}

/* --------------------------------------------- another one was always quicker */

ON_EVERY_ROOT(a_pin_whose_number_others_always_take_gives_up)
{
    run_spec s = run_of(1, STEPS(10));
    root_run(root, &s);
    watch(root);
    fault_store_arm(
        current,
        (fault_plan){.kinds = FAULT_BIT(FAULT_PUT_NEW), .path = "pin", .times = UINT64_MAX, .status = LG_ERR_EXISTS});
    lg_error err = LG_ERROR_INIT;
    FAILS(LG_ERR_CONFLICT, lg_pin(ROOT "@10", 1, "ours", &err));
    SAYS("others pin it at the same time");
    assert_int_equal(fault_store_fired(current), 100);
    fault_store_arm(current, (fault_plan){.kinds = FAULT_BIT(FAULT_PUT_NEW), .path = "pin", .status = LG_ERR_EXISTS});
    OK(lg_pin(ROOT "@10", 1, "ours", &err)); /* once is no matter */
    unwatch();
}

ON_EVERY_ROOT(a_claim_whose_epoch_others_always_take_gives_up)
{
    watch(root);
    fault_store_arm(current, (fault_plan){.kinds = FAULT_BIT(FAULT_PUT_NEW),
                                          .path = ".owner",
                                          .times = UINT64_MAX,
                                          .status = LG_ERR_EXISTS});
    lg_error err = LG_ERROR_INIT;
    assert_null(open_on(fault_store_handle(current), 0, &err));
    assert_int_equal(err.status, LG_ERR_CONFLICT);
    SAYS("1000 sessions claimed the root at the same time");
    fault_store_disarm(current);
    lg_session *s = open_on(fault_store_handle(current), 0, &err);
    assert_non_null(s);
    lg_session_close(s, NULL);
    unwatch();
}

/* ----------------------------------------------------------- prune in trouble */

typedef struct pruned {
    size_t n, removed;
    char told[8][256];
} pruned;

static void note_pruned(const lg_prune_item *item, void *arg)
{
    pruned *p = arg;
    p->removed += item->removed != 0;
    snprintf(p->told[p->n++], sizeof *p->told, "%s", item->reason);
}

ON_EVERY_ROOT(prune_tells_which_checkpoint_it_could_not_remove_and_removes_the_others)
{
    run_spec s = run_of(1, STEPS(10, 20, 30));
    root_run(root, &s);
    char folders[3][64];
    root_folders(root, folders, 3);
    watch(root);
    const fault_op op = root->kind == ROOT_NO_RENAME ? FAULT_REMOVE_FILE : FAULT_RENAME_DIR;
    fault_store_arm(current, (fault_plan){.kinds = FAULT_BIT(op), .path = folders[1], .os_errno = EIO});
    lg_prune_options o = LG_PRUNE_OPTIONS_INIT;
    o.keep_last = 1, o.dry_run = 0;
    pruned p = {0};
    lg_error err = LG_ERROR_INIT;
    FAILS(LG_ERR_IO, lg_prune(ROOT, &o, note_pruned, &p, &err));
    SAYS("prune " ROOT);
    assert_int_equal(p.n, 3);
    assert_int_equal(p.removed, 1);
    assert_non_null(strstr(p.told[1], "not removed: "));
    char left[3][64];
    assert_int_equal(root_folders(root, left, 3), 2);
    assert_string_equal(left[0], folders[1]);
    assert_string_equal(left[1], folders[2]);
    unwatch();
}

/* A file that may not be read is no damaged one. */
ON_EVERY_ROOT(prune_removes_nothing_when_the_newest_cannot_be_judged)
{
    run_spec s = run_of(1, STEPS(10, 20));
    root_run(root, &s);
    watch(root);
    fault_store_arm(current, (fault_plan){.kinds = FAULT_BIT(FAULT_READ) | FAULT_BIT(FAULT_MAP),
                                          .path = "shard-",
                                          .times = UINT64_MAX,
                                          .status = LG_ERR_PERMISSION});
    lg_prune_options o = LG_PRUNE_OPTIONS_INIT;
    o.keep_last = 1, o.dry_run = 0;
    pruned p = {0};
    lg_error err = LG_ERROR_INIT;
    FAILS(LG_ERR_PERMISSION, lg_prune(ROOT, &o, note_pruned, &p, &err));
    assert_int_equal(p.n, 0);
    unwatch();
    char folders[2][64];
    assert_int_equal(root_folders(root, folders, 2), 2);
}

ON_EVERY_ROOT(prune_leaves_rollback_records_where_they_are)
{
    run_spec s = run_of(1, STEPS(10, 20, 30));
    root_run(root, &s);
    watch(root);
    lg_error err = LG_ERROR_INIT;
    OK(lg_rollback(ROOT "@20", "it diverged", NULL, &err));
    s = run_of(1, STEPS(25));
    root_run(root, &s);
    lg_prune_options o = LG_PRUNE_OPTIONS_INIT;
    o.keep_last = 1, o.dry_run = 0;
    pruned p = {0};
    OK(lg_prune(ROOT, &o, note_pruned, &p, &err));
    assert_int_equal(p.n, 4); /* 10, 20, 25, 30: the record is none of them */
    assert_int_equal(p.removed, 3);
    lg__walk *w;
    OK(lg__walk_read(root->store, &w, &err));
    assert_int_equal(w->n, 2);
    assert_int_equal(w->items[0].step, 25);
    assert_true(w->items[1].is_rollback);
    lg__walk_free(w);
    unwatch();
}

/* ---------------------------------------------- what cannot be read by a listing */

ON_EVERY_ROOT(a_listing_that_fails_names_the_root_and_what_it_was_reading)
{
    run_spec s = run_of(1, STEPS(10, 20));
    root_run(root, &s);
    watch(root);
    lg_error err = LG_ERROR_INIT;
    OK(lg_rollback(ROOT "@10", "it diverged", NULL, &err));
    static const char *const files[] = {"lastgood.json", "rollback"};
    for (size_t i = 0; i < 2; i++) {
        fault_store_arm(current,
                        (fault_plan){.kinds = FAULT_BIT(FAULT_OPEN), .path = files[i], .status = LG_ERR_NOMEM});
        lg_listing *list = NULL;
        FAILS(LG_ERR_NOMEM, lg_list(ROOT, 0, &list, &err));
        assert_int_equal(fault_store_fired(current), 1);
        SAYS("list " ROOT);
        SAYS(i == 0 ? "step-0000000000" : "rollback-");
        assert_null(list);
    }
    unwatch();
}

/* -------------------------------------------- a manifest that is not the same */

static lg_checkpoint *open_step(const test_root *root, const char *folder)
{
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint *c = NULL;
    char path[2 * LG__NAME_MAX];
    lg__buf text;
    lg__buf_init(&text, LG__MANIFEST_MAX);
    lg__path_join(path, sizeof path, folder, LG__MANIFEST);
    OK(lg__store_read_all(root->store, path, &text, &err));
    OK(lg__checkpoint_open_in(root->store, false, folder, text.data, text.len, &c, &err));
    lg__buf_free(&text);
    return c;
}

ON_EVERY_ROOT(verify_finds_a_manifest_that_was_removed_or_replaced_since_it_was_opened)
{
    run_spec s = run_of(1, STEPS(10, 20));
    root_run(root, &s);
    char folders[2][64], path[2 * LG__NAME_MAX];
    root_folders(root, folders, 2);
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint *c = open_step(root, folders[0]);
    lg_verify_result result;
    OK(lg_verify(c, NULL, &result, &err));
    lg__path_join(path, sizeof path, folders[0], LG__MANIFEST);
    OK(lg__store_remove_file(root->store, path, &err));
    FAILS(LG_ERR_NOT_WHOLE, lg_verify(c, NULL, &result, &err));
    SAYS(LG__MANIFEST);
    assert_true(result.problems > 0);
    /* That of the other one, which is right in itself. */
    char from[2 * LG__NAME_MAX];
    lg__buf text;
    lg__buf_init(&text, LG__MANIFEST_MAX);
    lg__path_join(from, sizeof from, folders[1], LG__MANIFEST);
    OK(lg__store_read_all(root->store, from, &text, &err));
    OK(lg__store_put_new(root->store, path, text.data, text.len, &err));
    lg__buf_free(&text);
    FAILS(LG_ERR_CORRUPT, lg_verify(c, NULL, &result, &err));
    SAYS("it is another manifest than the one that was opened");
    assert_int_equal(result.problems, 1);
    lg_checkpoint_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_listing_does_not_call_damaged_what_is_removed_while_it_is_made),
        cmocka_unit_test(prune_goes_on_past_what_another_process_removes_first),
        cmocka_unit_test(a_session_goes_on_past_what_another_process_removes_first),
        cmocka_unit_test(a_sweep_goes_on_past_what_another_one_swept_first),
        cmocka_unit_test(a_read_takes_the_newer_one_when_retention_removes_what_it_reads),
        cmocka_unit_test(a_fresh_start_is_not_taken_from_a_root_that_cannot_be_looked_at_again),
        cmocka_unit_test(a_damaged_checkpoint_is_passed_over_once_however_often_the_root_is_looked_at),
        cmocka_unit_test(a_root_that_is_not_there_is_no_fresh_start_for_one_who_only_reads),
        cmocka_unit_test(a_pin_whose_number_others_always_take_gives_up),
        cmocka_unit_test(a_claim_whose_epoch_others_always_take_gives_up),
        cmocka_unit_test(prune_tells_which_checkpoint_it_could_not_remove_and_removes_the_others),
        cmocka_unit_test(prune_removes_nothing_when_the_newest_cannot_be_judged),
        cmocka_unit_test(prune_leaves_rollback_records_where_they_are),
        cmocka_unit_test(a_listing_that_fails_names_the_root_and_what_it_was_reading),
        cmocka_unit_test(verify_finds_a_manifest_that_was_removed_or_replaced_since_it_was_opened),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
