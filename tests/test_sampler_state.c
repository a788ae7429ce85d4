/* SPDX-License-Identifier: Apache-2.0 */

/* Position in the data over save and load. The checkpoint here is a table of
 * keys; that real checkpoints keep global integers is tested with them. */

#include <lastgood/backend.h>

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

typedef struct table {
    size_t n;
    struct {
        char key[LG_MAX_NAME + 1];
        uint64_t value;
    } rows[16];
} table;

lg_status lg_save_global_u64(lg_save *save, const char *key, uint64_t value, lg_error *err)
{
    table *t = (table *)(void *)save;
    for (size_t i = 0; i < t->n; i++) {
        if (strcmp(t->rows[i].key, key) == 0) {
            return lg_error_set(err, LG_ERR_CONFLICT, "%s twice", key);
        }
    }
    assert_true(t->n < 16);
    snprintf(t->rows[t->n].key, sizeof t->rows[0].key, "%s", key);
    t->rows[t->n++].value = value;
    return LG_OK;
}

lg_status lg_checkpoint_global_u64(lg_checkpoint *c, const char *key, uint64_t *out, lg_error *err)
{
    table *t = (table *)(void *)c;
    for (size_t i = 0; i < t->n; i++) {
        if (strcmp(t->rows[i].key, key) == 0) {
            *out = t->rows[i].value;
            return LG_OK;
        }
    }
    return lg_error_set(err, LG_ERR_MISSING, "no global value %s", key);
}

static table disk;

static lg_status save(const lg_sampler *s, lg_error *err)
{
    disk.n = 0;
    return lg_sampler_save(s, (lg_save *)(void *)&disk, "data", err);
}

static lg_status load(lg_sampler *s, lg_error *err)
{
    return lg_sampler_load(s, (lg_checkpoint *)(void *)&disk, "data", err);
}

/* A new process: nothing but the size of the data set is known. */
static lg_sampler resume(uint64_t samples)
{
    lg_sampler s;
    lg_error err;
    assert_int_equal(lg_sampler_init(&s, samples, 0, 0, &err), LG_OK);
    assert_int_equal(load(&s, &err), LG_OK);
    return s;
}

static lg_sampler start(uint64_t samples)
{
    lg_sampler s;
    assert_int_equal(lg_sampler_init(&s, samples, 31, 0, NULL), LG_OK);
    return s;
}

static uint64_t *row(const char *key)
{
    for (size_t i = 0; i < disk.n; i++) {
        if (strcmp(disk.rows[i].key, key) == 0) {
            return &disk.rows[i].value;
        }
    }
    fail_msg("no row %s", key);
    return NULL;
}

static bool equal(const lg_sampler *a, const lg_sampler *b)
{
    return a->samples == b->samples && a->seed == b->seed && a->epoch == b->epoch && a->consumed == b->consumed &&
           a->flags == b->flags;
}

static void all_positions_survive(void **state)
{
    (void)state;
    for (uint64_t n = 1; n <= 5; n++) {
        for (uint64_t used = 0; used <= 3 * n; used++) {
            for (uint64_t workers = 0; workers <= 3; workers++) { /* each looks ahead */
                lg_sampler s = start(n);
                lg_sampler_advance(&s, used);
                for (uint64_t w = 0; w < workers; w++) {
                    lg_sampler_peek(&s, w);
                }
                assert_int_equal(save(&s, NULL), LG_OK);
                lg_sampler again = resume(n);
                assert_true(equal(&s, &again));
                assert_int_equal(again.epoch * n + again.consumed, used);
                for (uint64_t i = 0; i < 2 * n; i++) {
                    assert_int_equal(lg_sampler_peek(&s, i), lg_sampler_peek(&again, i));
                }
            }
        }
    }
}

static void position_is_absolute(void **state)
{
    (void)state;
    lg_sampler s = start(1000);
    lg_sampler_advance(&s, 30);
    save(&s, NULL);
    s = resume(1000);
    lg_sampler_advance(&s, 10);
    save(&s, NULL);
    s = resume(1000);
    assert_int_equal(s.epoch, 0);
    assert_int_equal(s.consumed, 40);
}

static void prefetched_samples_are_not_counted(void **state)
{
    (void)state;
    lg_sampler s = start(100), whole = s;
    for (uint64_t i = 0; i < 4; i++) {
        lg_sampler_peek(&s, i); /* fetched 4 */
    }
    lg_sampler_advance(&s, 3); /* used 3 */
    save(&s, NULL);
    s = resume(100);
    assert_int_equal(lg_sampler_peek(&s, 0), lg_sampler_at(&whole, 0, 3));
}

static void a_new_object_goes_on(void **state)
{
    (void)state;
    lg_sampler s = start(100), whole = s;
    lg_sampler_advance(&s, 5);
    save(&s, NULL);
    s = resume(100);
    assert_int_equal(lg_sampler_peek(&s, 0), lg_sampler_at(&whole, 0, 5));
}

static void a_skip_applies_once(void **state)
{
    (void)state;
    lg_sampler s = start(10);
    lg_sampler_advance(&s, 4);
    save(&s, NULL);
    s = resume(10);
    const uint64_t lengths[] = {6, 10, 10};
    for (uint64_t e = 0; e < 3; e++) {
        uint64_t length = 0;
        while (s.epoch == e) {
            lg_sampler_advance(&s, 1);
            length++;
        }
        assert_int_equal(length, lengths[e]);
    }
}

static void the_place_in_an_epoch_survives(void **state)
{
    (void)state;
    /* batches of 8 of an epoch of 800; killed in the first and in a later one */
    for (uint64_t epoch = 0; epoch < 3; epoch++) {
        for (uint64_t batches = 20; batches <= 40; batches += 20) {
            lg_sampler s = start(800), whole = s;
            lg_sampler_advance(&s, epoch * 800 + batches * 8);
            save(&s, NULL);
            s = resume(800);
            assert_int_equal(s.epoch, epoch);
            assert_int_equal(s.consumed / 8 + 1, batches + 1);
            assert_int_equal(lg_sampler_peek(&s, 0), lg_sampler_at(&whole, epoch, batches * 8));
        }
    }
}

static void the_unit_is_a_sample(void **state)
{
    (void)state;
    lg_sampler s = start(1000);
    for (int step = 0; step < 10; step++) { /* accumulation 4, micro-batch 2 */
        lg_sampler_advance(&s, 4 * 2);
    }
    save(&s, NULL);
    assert_int_equal(*row("data.consumed"), 80);
    /* At batch 4, 2 or 16 the next sample is the same, and so is the end. */
    lg_sampler want = s;
    const uint64_t batches[] = {1, 2, 4, 16, 40};
    for (size_t i = 0; i < 5; i++) {
        lg_sampler t = resume(1000);
        uint64_t steps = 0;
        assert_int_equal(lg_sampler_peek(&t, 0), lg_sampler_peek(&want, 0));
        while (t.epoch == 0) {
            lg_sampler_advance(&t, batches[i]);
            steps++;
        }
        assert_int_equal(steps, (920 + batches[i] - 1) / batches[i]);
    }
}

static void an_epochs_end_is_the_next_ones_start(void **state)
{
    (void)state;
    lg_sampler s = start(9);
    s.consumed = 9; /* by hand: "batch = n" */
    assert_int_equal(save(&s, NULL), LG_OK);
    assert_int_equal(*row("data.epoch"), 1);
    assert_int_equal(*row("data.consumed"), 0);
    /* A file that says so is refused. */
    *row("data.consumed") = 9;
    lg_error err;
    lg_sampler before = s;
    assert_int_equal(load(&s, &err), LG_ERR_FORMAT);
    assert_string_equal(err.message, "data.consumed is 9, which is no position in an epoch of 9 samples");
    assert_true(equal(&s, &before));
}

static void all_is_restored_from_the_checkpoint(void **state)
{
    (void)state;
    lg_sampler s;
    assert_int_equal(lg_sampler_init(&s, LG_SAMPLER_MAX, UINT64_MAX, LG_SAMPLER_SEQUENTIAL, NULL), LG_OK);
    s.epoch = UINT64_MAX;
    s.consumed = LG_SAMPLER_MAX - 1;
    assert_int_equal(save(&s, NULL), LG_OK);
    assert_int_equal(disk.n, 5);
    lg_sampler again = resume(LG_SAMPLER_MAX); /* another seed, no flags */
    assert_true(equal(&s, &again));
}

static void another_data_set_is_refused(void **state)
{
    (void)state;
    lg_sampler s = start(10), other = start(11);
    save(&s, NULL);
    lg_error err;
    assert_int_equal(load(&other, &err), LG_ERR_MISMATCH);
    assert_string_equal(err.message, "data: the data set had 10 samples when saved and has 11 now");
    lg_sampler untouched = start(11);
    assert_true(equal(&other, &untouched));
}

static void missing_and_unknown_parts_are_refused(void **state)
{
    (void)state;
    const char *parts[] = {"samples", "seed", "epoch", "consumed", "flags"};
    lg_error err;
    for (size_t i = 0; i < 5; i++) {
        lg_sampler s = start(10), before = s;
        lg_sampler_advance(&s, 3);
        save(&s, NULL);
        char key[32];
        snprintf(key, sizeof key, "data.%s", parts[i]);
        char *name = disk.rows[(size_t)((char *)row(key) - (char *)disk.rows) / sizeof disk.rows[0]].key;
        name[0] = 'x';
        lg_sampler t = before;
        assert_int_equal(load(&t, &err), LG_ERR_MISSING);
        assert_non_null(strstr(err.message, key));
        assert_true(equal(&t, &before));
    }
    lg_sampler s = start(10);
    save(&s, NULL);
    *row("data.flags") = 4;
    assert_int_equal(load(&s, &err), LG_ERR_VERSION);
    assert_non_null(strstr(err.message, "data.flags is 0x4"));
}

static void wrong_arguments_are_refused(void **state)
{
    (void)state;
    lg_sampler never = {0}, s = start(3);
    lg_error err;
    lg_save *to = (lg_save *)(void *)&disk;
    lg_checkpoint *from = (lg_checkpoint *)(void *)&disk;
    disk.n = 0;
    assert_int_equal(lg_sampler_save(&never, to, "data", &err), LG_ERR_INVALID);
    assert_int_equal(lg_sampler_load(&never, from, "data", &err), LG_ERR_INVALID);
    assert_int_equal(lg_sampler_save(NULL, to, "data", NULL), LG_ERR_INVALID);
    assert_int_equal(lg_sampler_save(&s, NULL, "data", NULL), LG_ERR_INVALID);
    assert_int_equal(lg_sampler_load(&s, NULL, "data", NULL), LG_ERR_INVALID);
    assert_int_equal(lg_sampler_save(&s, to, "", &err), LG_ERR_INVALID);
    assert_int_equal(lg_sampler_save(&s, to, NULL, &err), LG_ERR_INVALID);
    char key[LG_MAX_NAME + 1];
    memset(key, 'k', sizeof key - 1);
    key[sizeof key - 1] = '\0';
    assert_int_equal(lg_sampler_save(&s, to, key, &err), LG_ERR_INVALID);
    assert_int_equal(disk.n, 0);
    key[LG_MAX_NAME - 16] = '\0';
    assert_int_equal(lg_sampler_save(&s, to, key, &err), LG_OK);
    assert_int_equal(lg_sampler_load(&s, from, key, &err), LG_OK);
}

#define NAMED(text, fn)                   \
    {                                     \
        .name = (text), .test_func = (fn) \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        NAMED("K10 F169: state(load(s)) == s at every position, start and end included", all_positions_survive),
        NAMED("K10 F170: the position is absolute over a second resume", position_is_absolute),
        NAMED("K10 F173: what was fetched but not used comes again", prefetched_samples_are_not_counted),
        NAMED("K10 F175: a new object goes on at the next sample", a_new_object_goes_on),
        NAMED("K10 F178: a skip applies to its epoch only", a_skip_applies_once),
        NAMED("K10 F181, F182: the place in an epoch survives", the_place_in_an_epoch_survives),
        NAMED("K10 F184, F185, F188: the unit is a sample, whatever the batch", the_unit_is_a_sample),
        NAMED("K10 F187: an epoch's end is saved as the start of the next", an_epochs_end_is_the_next_ones_start),
        NAMED("seed, flags and position come from the checkpoint, in all their bits",
              all_is_restored_from_the_checkpoint),
        NAMED("K10: a data set of another size is refused with both numbers", another_data_set_is_refused),
        NAMED("K10 F191: missing and unknown parts are refused by name", missing_and_unknown_parts_are_refused),
        NAMED("wrong arguments are refused", wrong_arguments_are_refused),
    };
    return cmocka_run_group_tests_name("sampler_state", tests, NULL, NULL);
}
