/* SPDX-License-Identifier: Apache-2.0 */

/* The fault store itself: tests that lean on it are worth what it is. */

#include "support/fault_store.h"

#include "store/store.h"
#include "support/check.h"

#include <errno.h>
#include <stdio.h>

typedef struct fixture {
    lg_store *mem, *s;
    fault_store *f;
} fixture;

static void begin(fixture *x)
{
    lg_error err = LG_ERROR_INIT;
    OK(lg_store_open("mem:fault", &x->mem, &err));
    OK(lg__store_make_root(x->mem, &err));
    x->f = fault_store_new(x->mem);
    x->s = fault_store_handle(x->f);
}

static void end(fixture *x)
{
    fault_store_free(x->f);
    lg_store_free(x->mem);
    lg_memory_store_drop("fault");
}

static void fresh(fixture *x)
{
    end(x);
    begin(x);
}

static int setup(void **state)
{
    static fixture x;
    begin(&x);
    *state = &x;
    return 0;
}

static int teardown(void **state)
{
    end(*state);
    return 0;
}

static bool there(lg_store *s, const char *folder, const char *name)
{
    lg_error err = LG_ERROR_INIT;
    bool yes = false;
    lg_status st = lg__store_exists(s, folder, name, &yes, &err);
    return st == LG_OK && yes;
}

/* A small save: what the core does, in little. */
enum { SAVE_OPS = 10 };
static const fault_op save_ops[SAVE_OPS] = {FAULT_MAKE_DIR, FAULT_CREATE,    FAULT_WRITE,       FAULT_WRITE,
                                            FAULT_SYNC,     FAULT_CLOSE,     FAULT_RENAME_FILE, FAULT_PUT_NEW,
                                            FAULT_SYNC_DIR, FAULT_RENAME_DIR};

static lg_status small_save(lg_store *s, lg_error *err)
{
    lg_file *f;
    LG__TRY(lg__store_make_dir(s, "part", err));
    LG__TRY(lg__store_create(s, "part/tmp", 8, &f, err));
    lg_status st = lg__store_write(s, f, "abcd", 4, 0, err);
    if (st == LG_OK) {
        st = lg__store_write(s, f, "efgh", 4, 4, err);
    }
    if (st == LG_OK) {
        st = lg__store_sync(s, f, err);
    }
    lg_error other = LG_ERROR_INIT;
    lg_status closed = lg__store_close(s, f, st == LG_OK ? err : &other);
    LG__TRY(st != LG_OK ? st : closed);
    LG__TRY(lg__store_rename_file(s, "part/tmp", "part/shard", err));
    LG__TRY(lg__store_put_new(s, "part/manifest", "{}", 2, err));
    LG__TRY(lg__store_sync_dir(s, "part", err));
    return lg__store_rename_dir(s, "part", "final", err);
}

static void check_state(lg_store *mem, size_t done)
{
    assert_int_equal(there(mem, "", "part"), done >= 1 && done < 10);
    assert_int_equal(there(mem, "part", "tmp"), done >= 2 && done < 7);
    assert_int_equal(there(mem, "part", "shard"), done >= 7 && done < 10);
    assert_int_equal(there(mem, "part", "manifest"), done >= 8 && done < 10);
    assert_int_equal(there(mem, "", "final"), done >= 10);
}

static void sweep(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    static const struct {
        fault_how how;
        size_t done_more; /* is the failing operation itself done? */
    } ways[] = {{FAULT_INSTEAD, 0}, {FAULT_AFTER, 1}, {FAULT_DIE, 0}, {FAULT_DIE_AFTER, 1}};
    for (size_t w = 0; w < 4; w++) {
        size_t n = 1;
        for (;; n++) {
            fault_store_arm(x->f, (fault_plan){.nth = n, .how = ways[w].how, .os_errno = EDQUOT});
            fault_store_log_clear(x->f);
            lg_status st = small_save(x->s, &err);
            if (fault_store_fired(x->f) == 0) {
                OK(st);
                check_state(x->mem, SAVE_OPS);
                break;
            }
            FAILS(LG_ERR_NO_SPACE, st);
            assert_int_equal(err.os_errno, EDQUOT);
            SAYS(fault_op_name(save_ops[n - 1]));
            SAYS("mem:fault: ");
            check_state(x->mem, n - 1 + ways[w].done_more);
            size_t len;
            const fault_event *log = fault_store_log(x->f, &len);
            assert_int_equal(log[n - 1].op, save_ops[n - 1]);
            assert_true(log[n - 1].faulty && log[n - 1].ended);
            assert_int_equal(log[n - 1].status, LG_ERR_NO_SPACE);
            assert_int_equal(fault_store_dead(x->f), ways[w].how == FAULT_DIE || ways[w].how == FAULT_DIE_AFTER);
            fresh(x);
            assert_true(n < 100);
        }
        assert_int_equal(n, SAVE_OPS + 1);
        fresh(x);
    }
}

static void chosen(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    /* the second write, of these paths only */
    fault_store_arm(x->f, (fault_plan){.kinds = FAULT_BIT(FAULT_WRITE), .path = "tmp", .nth = 2, .os_errno = EIO});
    FAILS(LG_ERR_IO, small_save(x->s, &err));
    SAYS("write part/tmp (injected)");
    size_t n;
    const fault_event *log = fault_store_log(x->f, &n);
    assert_int_equal(log[n - 2].op, FAULT_WRITE);
    assert_int_equal(log[n - 2].offset, 4);
    assert_int_equal(log[n - 2].bytes, 4);
    assert_int_equal(log[n - 1].op, FAULT_CLOSE);
    fresh(x);
    fault_store_arm(x->f, (fault_plan){.path = "nowhere"});
    OK(small_save(x->s, &err));
    assert_int_equal(fault_store_fired(x->f), 0);
    /* a status of its own; twice in a row; the target's name counts too */
    fault_store_arm(x->f, (fault_plan){.kinds = FAULT_BIT(FAULT_RENAME_DIR),
                                       .path = "again",
                                       .times = 2,
                                       .status = LG_ERR_EXISTS,
                                       .how = FAULT_AFTER});
    FAILS(LG_ERR_EXISTS, lg__store_rename_dir(x->s, "final", "again", &err));
    assert_true(there(x->mem, "", "again"));
    FAILS(LG_ERR_EXISTS, lg__store_rename_dir(x->s, "again", "once-more", &err));
    assert_true(there(x->mem, "", "once-more"));
    OK(lg__store_rename_dir(x->s, "once-more", "again", &err));
    fault_store_arm(x->f, (fault_plan){.times = UINT64_MAX});
    for (int i = 0; i < 5; i++) {
        FAILS(LG_ERR_IO, lg__store_sync_dir(x->s, "", &err));
    }
    fault_store_disarm(x->f);
    OK(lg__store_sync_dir(x->s, "", &err));
}

static void torn(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    static const fault_how ways[] = {FAULT_TORN, FAULT_DIE_TORN};
    for (size_t w = 0; w < 2; w++) {
        lg_file *f;
        uint64_t bytes;
        OK(lg__store_create(x->s, "a", 0, &f, &err));
        fault_store_arm(x->f, (fault_plan){.kinds = FAULT_BIT(FAULT_WRITE), .how = ways[w]});
        FAILS(LG_ERR_IO, lg__store_write(x->s, f, "12345678", 8, 0, &err));
        assert_int_equal(fault_store_dead(x->f), w == 1);
        lg__store_close(x->s, f, &err);
        OK(lg__store_open_file(x->mem, "a", &f, &bytes, &err));
        assert_int_equal(bytes, 4);
        OK(lg__store_close(x->mem, f, &err));
        fresh(x);
    }
}

static int nothing(const lg_node *node, void *arg)
{
    (void)node;
    ++*(int *)arg;
    return 0;
}

static void dead(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    lg_file *w, *r, *f = NULL;
    uint64_t bytes;
    char got[4];
    int listed = 0;
    OK(lg__store_make_dir(x->s, "d", &err));
    OK(lg__store_put_new(x->s, "d/a", "1234", 4, &err));
    OK(lg__store_create(x->s, "d/b", 0, &w, &err));
    OK(lg__store_open_file(x->s, "d/a", &r, &bytes, &err));
    fault_store_kill(x->f);
    FAILS(LG_ERR_IO, lg__store_write(x->s, w, "x", 1, 0, &err));
    FAILS(LG_ERR_IO, lg__store_read(x->s, r, got, 4, 0, &err));
    FAILS(LG_ERR_IO, lg__store_sync(x->s, w, &err));
    FAILS(LG_ERR_IO, lg__store_make_root(x->s, &err));
    FAILS(LG_ERR_IO, lg__store_make_dir(x->s, "e", &err));
    FAILS(LG_ERR_IO, lg__store_create(x->s, "d/c", 0, &f, &err));
    FAILS(LG_ERR_IO, lg__store_open_file(x->s, "d/a", &f, &bytes, &err));
    FAILS(LG_ERR_IO, lg__store_put_new(x->s, "d/c", "x", 1, &err));
    FAILS(LG_ERR_IO, lg__store_rename_file(x->s, "d/a", "d/c", &err));
    FAILS(LG_ERR_IO, lg__store_rename_dir(x->s, "d", "e", &err));
    FAILS(LG_ERR_IO, lg__store_remove_file(x->s, "d/a", &err));
    FAILS(LG_ERR_IO, lg__store_remove_dir(x->s, "d", &err));
    FAILS(LG_ERR_IO, lg__store_sync_dir(x->s, "", &err));
    FAILS(LG_ERR_IO, lg__store_list(x->s, "d", nothing, &listed, &err));
    FAILS(LG_ERR_IO, lg__store_close(x->s, w, &err));
    FAILS(LG_ERR_IO, lg__store_close(x->s, r, &err));
    assert_null(f);
    assert_int_equal(listed, 0);
    OK(lg__store_list(x->mem, "d", nothing, &listed, &err)); /* a and the empty b */
    assert_int_equal(listed, 2);
    OK(lg__store_open_file(x->mem, "d/b", &f, &bytes, &err));
    assert_int_equal(bytes, 0);
    OK(lg__store_close(x->mem, f, &err));
}

typedef struct scene {
    int before, after, refuse;
    bool kill;
} scene;

/* Another session takes the partial folder away just before it is renamed. */
static lg_status act(fault_store *f, const fault_event *e, bool before, void *arg, lg_error *err)
{
    scene *sc = arg;
    sc->before += before;
    sc->after += !before;
    assert_int_equal(e->ended, !before);
    if (e->op == FAULT_RENAME_DIR && before) {
        LG__TRY(lg__store_rename_dir(fault_store_inner(f), "part", "trash", err));
    }
    if (e->op == FAULT_SYNC && before && sc->kill) {
        fault_store_kill(f);
    }
    if (e->op == FAULT_LIST && sc->refuse == (before ? 1 : 2)) {
        return lg_error_set(err, LG_ERR_PERMISSION, "the hook says no");
    }
    return LG_OK;
}

static void hooks(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    scene sc = {0};
    fault_store_set_hook(x->f, act, &sc);
    FAILS(LG_ERR_NOT_FOUND, small_save(x->s, &err));
    assert_true(there(x->mem, "trash", "manifest"));
    assert_int_equal(sc.before, SAVE_OPS);
    assert_int_equal(sc.after, SAVE_OPS);
    int listed = 0;
    sc.refuse = 1;
    FAILS(LG_ERR_PERMISSION, lg__store_list(x->s, "", nothing, &listed, &err));
    assert_int_equal(listed, 0);
    sc.refuse = 2;
    FAILS(LG_ERR_PERMISSION, lg__store_list(x->s, "", nothing, &listed, &err));
    SAYS("the hook says no");
    assert_int_equal(listed, 1);
    fresh(x);
    sc = (scene){.kill = true};
    fault_store_set_hook(x->f, act, &sc);
    FAILS(LG_ERR_IO, small_save(x->s, &err));
    check_state(x->mem, 5);
    fault_store_set_hook(x->f, NULL, NULL);
}

static void records(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = *state;
    OK(small_save(x->s, &err));
    size_t n;
    const fault_event *log = fault_store_log(x->f, &n);
    assert_int_equal(n, SAVE_OPS);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(log[i].op, save_ops[i]);
        assert_int_equal(log[i].status, LG_OK);
        assert_false(log[i].faulty);
    }
    assert_string_equal(log[9].path, "part");
    assert_string_equal(log[9].to, "final");
    assert_int_equal(fault_store_count(x->f, FAULT_ANY), SAVE_OPS);
    assert_int_equal(fault_store_count(x->f, FAULT_CHANGES), SAVE_OPS - 1);
    assert_int_equal(fault_store_count(x->f, FAULT_BIT(FAULT_WRITE)), 2);
    assert_int_equal(fault_store_find(x->f, 0, FAULT_BIT(FAULT_WRITE), NULL), 2);
    assert_int_equal(fault_store_find(x->f, 3, FAULT_BIT(FAULT_WRITE), "tmp"), 3);
    assert_int_equal(fault_store_find(x->f, 0, FAULT_ANY, "final"), 9);
    assert_true(fault_store_find(x->f, 4, FAULT_BIT(FAULT_WRITE), NULL) == SIZE_MAX);
    fault_store_log_clear(x->f);
    assert_int_equal(fault_store_count(x->f, FAULT_ANY), 0);
}

#define TEST(name, test)                  \
    {                                     \
        name, test, setup, teardown, NULL \
    }

int main(void)
{
    static const struct CMUnitTest tests[] = {
        TEST("the n-th operation fails, before or after it takes place, until all succeed", sweep),
        TEST("a plan chooses by kind, path and number", chosen),
        TEST("a torn write leaves its first half", torn),
        TEST("a dead store changes nothing more", dead),
        TEST("a hook acts between operations, refuses them and kills", hooks),
        TEST("the record holds every operation in order", records),
    };
    return cmocka_run_group_tests_name("fault store", tests, NULL, NULL);
}
