/* SPDX-License-Identifier: Apache-2.0 */

/* Step folders in which files of several steps, ranks or copies lie together: by
 * a copy that was made while a step was replaced, by hand, or by a tool that
 * restores some of the files. The values of two steps are never mixed, and what is
 * refused is named; a whole older step is resumed instead. */

#include "support/ranks.h"

#include "core/walk.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/scene.h"

#define WORLD 3

static void shell(const test_root *root, const char *script)
{
    char command[4096];
    snprintf(command, sizeof command, "cd '%s' && old=$(ls -d step-*11.*) && new=$(ls -d step-*12.*) && { %s; }",
             root->path, script);
    if (system(command) != 0) {
        fail_msg("failed: %s", command);
    }
}

static void two_steps(test_root *root)
{
    root_make(root, ROOT_POSIX);
    run_spec s = run_of(WORLD, STEPS(11, 12));
    root_run(root, &s);
}

/* The step that is resumed by `world` ranks, all values checked against it, and why
 * the newer one was passed over. */
static uint64_t resumed(test_root *root, uint32_t world, size_t *skipped)
{
    run_spec s = run_of(world, NULL, 0);
    root_run(root, &s);
    *skipped = s.skipped;
    return s.resumed_from;
}

/* A torn snapshot: of each rank, all files of one step or all of the other. */
static void k01_k14_a_folder_with_ranks_of_two_steps_is_passed_over(void **state)
{
    (void)state;
    size_t folders = 0;
    for (uint32_t mask = 1; mask < 1u << (WORLD + 1); mask++) {
        const bool manifest = mask >> WORLD & 1;
        if (mask == (1u << (WORLD + 1)) - 1) {
            continue; /* a copy of the older step */
        }
        test_root root;
        two_steps(&root);
        for (uint32_t r = 0; r < WORLD; r++) {
            char script[300];
            snprintf(script, sizeof script, "cp \"$old\"/shard-%05u-* \"$old\"/rank-%05u.sums \"$new\"/", r + 1, r + 1);
            if (mask >> r & 1) {
                shell(&root, script);
            }
        }
        if (manifest) {
            shell(&root, "cp \"$old\"/lastgood.json \"$new\"/");
        }
        size_t skipped;
        for (uint32_t world = 1; world <= WORLD; world += 2) {
            uint64_t found = resumed(&root, world, &skipped);
            if (found != 11 || (skipped != 1 && !manifest)) {
                fail_msg("with files of the older step (ranks by bits 0x%x%s), step %llu is resumed, %zu passed over",
                         mask & ((1u << WORLD) - 1), manifest ? ", its manifest" : "", (unsigned long long)found,
                         skipped);
            }
        }
        folders++;
        root_drop(&root);
    }
    print_message("# %zu folders\n", folders);
}

/* One more of a file, under any name that could be ours. */
static void k14_a_file_that_is_there_twice_changes_nothing_or_is_refused(void **state)
{
    (void)state;
    static const char *const copies[] = {
        "cp \"$new\"/shard-00001-model-00001-of-00001.safetensors "
        "\"$new\"/shard-00004-model-00001-of-00001.safetensors",
        "cp \"$new\"/shard-00001-model-00001-of-00001.safetensors "
        "\"$new\"/shard-00001-model-00002-of-00002.safetensors",
        "cp \"$new\"/shard-00002-model-00001-of-00001.safetensors \"$new\"/model.safetensors",
        "cp \"$old\"/shard-00002-model-00001-of-00001.safetensors "
        "\"$new\"/shard-00002-model-00001-of-00001.safetensors.1",
        "cp \"$new\"/rank-00001.sums \"$new\"/rank-00004.sums",
        "cp \"$old\"/rank-00001.sums \"$new\"/rank-00001.sums.tmp",
        "cp \"$new\"/lastgood.json \"$new\"/lastgood-pin-1.json",
        "cp \"$old\"/lastgood.json \"$new\"/lastgood-pin-1.json",
        "cp \"$old\"/lastgood.json \"$new\"/lastgood.json.bak",
        "cp -r \"$old\" \"$new\"/",
        "cp -r \"$new\" \"$new\".copy",
        "cp -r \"$old\" latest",
        "cp -r \"$new\" .step-000000000012.g1.2.0123456789abcdef.partial",
        "cp -r \"$old\" step-000000000099.g9.9",
        "cp -r \"$new\" step-000000000099.g9.9",
        "cp -r \"$old\" step-000000000012.g1.3",
        "cp -r \"$old\" .trash-1.0123456789abcdef-step-000000000011.g1.1",
    };
    for (size_t i = 0; i < sizeof copies / sizeof *copies; i++) {
        test_root root;
        two_steps(&root);
        shell(&root, copies[i]);
        size_t skipped;
        uint64_t found = resumed(&root, 2, &skipped);
        if (found != 12 || skipped != 0) {
            fail_msg("%s: step %llu is resumed, %zu passed over", copies[i], (unsigned long long)found, skipped);
        }
        run_spec next = run_of(2, STEPS(13));
        root_run(&root, &next);
        assert_int_equal(next.resumed_from, 12);
        assert_int_equal(resumed(&root, 1, &skipped), 13);
        root_drop(&root);
    }
    print_message("# %zu folders\n", sizeof copies / sizeof *copies);
}

/* Any file that the newest step needs, gone or damaged in any way: the older step,
 * and the reason names the file. */
static void k01_k02_any_file_damaged_in_any_way_makes_the_older_step_the_newest(void **state)
{
    (void)state;
    static const struct {
        const char *how, *script;
    } ways[] = {
        {"removed", "rm \"$f\""},
        {"under another name", "mv \"$f\" \"$f\".1"}, /* as many files as before */
        {"emptied", ": > \"$f\""},
        {"cut by a byte", "truncate -s -1 \"$f\""},
        {"cut in half", "truncate -s $(($(stat -c %s \"$f\") / 2)) \"$f\""},
        {"grown", "printf x >> \"$f\""},
        {"zeros", "n=$(stat -c %s \"$f\"); : > \"$f\"; truncate -s $n \"$f\""},
        {"its last sector zeros",
         "n=$(stat -c %s \"$f\"); truncate -s $((n > 512 ? n - 512 : 0)) \"$f\"; truncate -s $n \"$f\""},
        {"a folder", "rm \"$f\"; mkdir \"$f\""},
        {"a FIFO", "rm \"$f\"; mkfifo \"$f\""},
        {"a link to where it was moved", "mv \"$f\" away; ln -s ../away \"$f\""},
    };
    size_t folders = 0;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        test_root all;
        two_steps(&all);
        char list[4096] = "";
        char command[400];
        snprintf(command, sizeof command, "cd '%s' && ls step-*12.*/ | grep -v config.json", all.path);
        FILE *p = popen(command, "r");
        assert_non_null(p);
        size_t n = fread(list, 1, sizeof list - 1, p);
        list[n] = '\0';
        assert_int_equal(pclose(p), 0);
        root_drop(&all);
        for (char *rest = list, *file; (file = strtok_r(rest, "\n", &rest)) != NULL;) {
            test_root root;
            two_steps(&root);
            char script[600];
            snprintf(script, sizeof script, "f=\"$new\"/%s; %s", file, ways[i].script);
            shell(&root, script);
            lg_error err = LG_ERROR_INIT;
            lg_session *s = open_on(root.store, 0, &err);
            assert_non_null(s);
            model m;
            model_init(&m, 0, 1);
            lg_resume_result *r = NULL;
            if (lg_resume(s, NULL, model_targets, &m, &r, &err) != LG_OK) {
                fail_msg("%s %s: %s", file, ways[i].how, err.message);
            }
            const bool gone = strcmp(file, "lastgood.json") == 0 && i < 2; /* it counts as an attempt */
            const char *why = r->n_skipped > 0 ? r->skipped[0].reason : "";
            /* The state of other ranks is not read here. */
            const bool unread = strstr(file, "-raw-") != NULL && r->step == 12 && model_wrong(&m, 12) == NULL;
            const bool refused = r->step == 11 && model_wrong(&m, 11) == NULL && (gone || strstr(why, file) != NULL);
            if (!unread && !refused) {
                fail_msg("%s %s: step %llu is resumed; %s", file, ways[i].how, (unsigned long long)r->step, why);
            }
            lg_resume_result_free(r);
            lg_session_close(s, NULL);
            folders++;
            root_drop(&root);
        }
    }
    print_message("# %zu folders\n", folders);
    assert_true(folders >= 100);
}

/* A power cut may leave names without contents. Nothing points to the newest, so
 * no pointer must be right. */
static void k01_f005_of_three_steps_the_first_is_resumed_when_the_others_are_files_of_no_bytes(void **state)
{
    (void)state;
    test_root root;
    root_make(&root, ROOT_POSIX);
    run_spec s = run_of(WORLD, STEPS(10, 11, 12));
    root_run(&root, &s);
    shell(&root, "for f in \"$old\"/shard-* \"$new\"/shard-*; do : > \"$f\"; done");
    size_t skipped;
    assert_int_equal(resumed(&root, 2, &skipped), 10);
    assert_int_equal(skipped, 2);
    shell(&root, "for f in \"$old\"/* \"$new\"/*; do : > \"$f\"; done");
    assert_int_equal(resumed(&root, WORLD, &skipped), 10);
    assert_int_equal(skipped, 2);
    root_drop(&root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(k01_k14_a_folder_with_ranks_of_two_steps_is_passed_over),
        cmocka_unit_test(k14_a_file_that_is_there_twice_changes_nothing_or_is_refused),
        cmocka_unit_test(k01_k02_any_file_damaged_in_any_way_makes_the_older_step_the_newest),
        cmocka_unit_test(k01_f005_of_three_steps_the_first_is_resumed_when_the_others_are_files_of_no_bytes),
    };
    return cmocka_run_group_tests_name("mixtures", tests, NULL, NULL);
}
