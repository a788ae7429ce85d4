/* SPDX-License-Identifier: Apache-2.0 */
#include "core/checkpoint.h"
#include "support/build.h"
#include "support/check.h"
#include "support/fault_store.h"
#include "support/ranks.h"
#include "support/sample.h"
#include "support/temp_dir.h"

#include <stdio.h>
#include <stdlib.h>

#define MAX_PROBLEMS 64

typedef struct sightings {
    lg_problem problems[MAX_PROBLEMS];
    size_t n;
    uint64_t done, total, calls;
    uint64_t stop_after; /* calls of progress; 0 = never */
    bool went_back;
} sightings;

static void note_problem(const lg_problem *p, void *arg)
{
    sightings *s = arg;
    if (s->n < MAX_PROBLEMS) {
        s->problems[s->n] = *p;
    }
    s->n++;
}

static int note_progress(uint64_t done, uint64_t total, void *arg)
{
    sightings *s = arg;
    s->went_back |= done < s->done || done > total;
    s->done = done;
    s->total = total;
    s->calls++;
    return s->stop_after != 0 && s->calls >= s->stop_after;
}

static lg_status verify(lg_checkpoint *c, uint32_t threads, sightings *s, lg_verify_result *result, lg_error *err)
{
    uint64_t stop_after = s->stop_after;
    memset(s, 0, sizeof *s);
    s->stop_after = stop_after;
    lg_verify_options o = LG_VERIFY_OPTIONS_INIT;
    o.threads = threads;
    o.progress = note_progress;
    o.problem = note_problem;
    o.arg = s;
    return lg_verify(c, &o, result, err);
}

static const lg_problem *problem_in(const sightings *s, const char *file)
{
    for (size_t i = 0; i < s->n && i < MAX_PROBLEMS; i++) {
        if (strcmp(s->problems[i].file, file) == 0) {
            return &s->problems[i];
        }
    }
    fail_msg("no problem in %s is reported", file);
    return NULL;
}

static void flip(sample *s, const char *file, size_t at)
{
    size_t bytes;
    char *data = build_read(s->store, s->folder, file, &bytes);
    assert_true(at < bytes);
    data[at] = (char)(data[at] ^ 0x20);
    build_write(s->store, s->folder, file, data, bytes);
    free(data);
}

static const char *file_of(sample *s, uint32_t rank, lg_group group)
{
    lg_error err = LG_ERROR_INIT;
    lg__rank_files *files;
    OK(lg__checkpoint_rank(s->c, rank, &files, &err));
    for (size_t i = 0; i < files->n_shards; i++) {
        if (files->shards[i].group == group) {
            return files->shards[i].name;
        }
    }
    fail_msg("rank %u has no such file", rank);
    return NULL;
}

static void test_good(void **state)
{
    (void)state;
    for (int kind = SAMPLE_MEMORY; kind <= SAMPLE_POSIX; kind++) {
        lg_error err = LG_ERROR_INIT;
        size_t descriptors = open_descriptors();
        sample *s = sample_make(kind);
        lg_checkpoint_info info;
        OK(lg_checkpoint_get_info(s->c, &info, &err));
        static const uint32_t threads[] = {0, 1, 4, 100};
        for (size_t i = 0; i < 4; i++) {
            sightings seen = {0};
            lg_verify_result result;
            OK(verify(s->c, threads[i], &seen, &result, &err));
            assert_int_equal(seen.n, 0);
            assert_int_equal(result.problems, 0);
            assert_int_equal(result.files, info.n_files + 1);
            size_t manifest;
            free(build_read(s->store, s->folder, LG__MANIFEST, &manifest));
            assert_int_equal(result.bytes, info.file_bytes + manifest);
            assert_int_equal(seen.done, seen.total);
            assert_int_equal(seen.total, result.bytes);
            assert_false(seen.went_back);
        }
        OK(lg_verify(s->c, NULL, NULL, NULL));
        sample_free(s);
        assert_int_equal(open_descriptors(), descriptors);
    }
}

static void test_every_flip(void **state)
{
    (void)state;
    sample *s = sample_make_small(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint_info info;
    OK(lg_checkpoint_get_info(s->c, &info, &err));
    size_t spaces = 0;
    for (size_t i = 0; i <= info.n_files; i++) {
        lg_file_info f = {.name = LG__MANIFEST};
        if (i < info.n_files) {
            OK(lg_checkpoint_file(s->c, i, &f, &err));
        }
        size_t bytes;
        char *data = build_read(s->store, s->folder, f.name, &bytes);
        for (size_t at = 0; at < bytes; at++) {
            if (at > 0 && data[at] == ' ' && data[at - 1] == ' ' && spaces++ % 97 != 0) {
                continue;
            }
            char old = data[at];
            data[at] = (char)(old ^ (1 << (at % 8)));
            build_write(s->store, s->folder, f.name, data, bytes);
            sightings seen = {0};
            lg_verify_result result;
            lg_status st = verify(s->c, 1, &seen, &result, &err);
            if (st == LG_OK || result.problems == 0 || seen.n == 0 || strcmp(seen.problems[0].file, f.name) != 0) {
                fail_msg("byte %zu of %s flipped: %s", at, f.name, st == LG_OK ? "not found" : err.message);
            }
            assert_int_equal(st, seen.problems[0].status);
            assert_true(lg__status_is_damage(st));
            assert_int_equal(seen.done, seen.total);
            data[at] = old;
        }
        build_write(s->store, s->folder, f.name, data, bytes);
        free(data);
    }
    OK(lg_verify(s->c, NULL, NULL, &err));
    sample_free(s);
}

static void test_block_names_tensors(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    const char *file = file_of(s, 1, LG_GROUP_MODEL);
    lg__shard *shard;
    const lg__st_tensor *entry;
    lg__region box = {2, {134, 0}, {134, 33}};
    OK(lg__checkpoint_locate(s->c, 1, LG_GROUP_MODEL, "emb.w", &box, LG_F32, 0, true, &shard, &entry, &err));
    uint64_t start = shard->header->data_start;
    size_t inner = (size_t)(start + (entry->begin / SAMPLE_BLOCK + 1) * SAMPLE_BLOCK);
    flip(s, file, inner + 5);
    sightings seen = {0};
    lg_verify_result result;
    FAILS(LG_ERR_CORRUPT, verify(s->c, 1, &seen, &result, &err));
    assert_int_equal(seen.n, 1);
    assert_int_equal(result.problems, 1);
    assert_string_equal(seen.problems[0].file, file);
    assert_string_equal(seen.problems[0].tensor, "emb.w");
    assert_int_equal(seen.problems[0].offset, inner);
    assert_int_equal(seen.problems[0].bytes, SAMPLE_BLOCK);
    assert_non_null(strstr(seen.problems[0].message, "block at"));
    assert_non_null(strstr(seen.problems[0].message, "\"emb.w\""));
    assert_non_null(strstr(seen.problems[0].message, "rank 1"));
    /* The next block too: one problem of two blocks. */
    flip(s, file, inner + SAMPLE_BLOCK);
    FAILS(LG_ERR_CORRUPT, verify(s->c, 1, &seen, &result, &err));
    assert_int_equal(seen.n, 1);
    assert_int_equal(seen.problems[0].bytes, 2 * SAMPLE_BLOCK);
    assert_non_null(strstr(seen.problems[0].message, "2 blocks"));
    /* A block in which several tensors lie names them. */
    flip(s, file, inner + 5);
    flip(s, file, inner + SAMPLE_BLOCK);
    flip(s, file, (size_t)(start + entry->end - 1));
    FAILS(LG_ERR_CORRUPT, verify(s->c, 1, &seen, &result, &err));
    size_t named = 0;
    for (size_t i = 0; i < s->n_tensors; i++) {
        char quoted[80];
        snprintf(quoted, sizeof quoted, "\"%s\"", s->tensors[i].name);
        named += strstr(seen.problems[0].message, quoted) != NULL;
    }
    assert_true(named >= 2);
    sample_free(s);
}

/* Of several in one file, only those that lie in the damaged block. */
static void test_later_tensors(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    enum { BLOCKS = 2, TENSORS = 5 };
    char *data = calloc(BLOCKS, SAMPLE_BLOCK);
    build_tensor t[TENSORS];
    static const char *const names[TENSORS] = {"a", "b", "c", "d", "e"};
    for (size_t i = 0; i < TENSORS; i++) {
        t[i] =
            (build_tensor){.name = names[i], .dtype = LG_U8, .ndim = 1, .shape = {BLOCKS * SAMPLE_BLOCK}, .data = data};
    }
    sample s = {.kind = SAMPLE_MEMORY};
    OK(lg_store_open("mem:later", &s.store, &err));
    OK(lg__store_make_root(s.store, &err));
    build_spec spec = {
        .world = 1, .step = 1, .generation = {1, 1}, .block_bytes = SAMPLE_BLOCK, .tensors = t, .n_tensors = TENSORS};
    build_checkpoint(s.store, &spec, s.folder);
    lg_checkpoint *c;
    OK(lg__checkpoint_open_in(s.store, false, s.folder, NULL, 0, &c, &err));
    const char *file = "shard-00001-model-00001-of-00001.safetensors";
    size_t bytes = 0;
    free(build_read(s.store, s.folder, file, &bytes));
    const size_t start = bytes - (size_t)TENSORS * BLOCKS * SAMPLE_BLOCK;
    for (size_t i = 0; i < TENSORS; i++) {
        const size_t at = start + (i * BLOCKS + 1) * SAMPLE_BLOCK + 7;
        flip(&s, file, at);
        sightings seen = {0};
        lg_verify_result result;
        FAILS(LG_ERR_CORRUPT, verify(c, 1, &seen, &result, &err));
        assert_int_equal(seen.n, 1);
        assert_string_equal(seen.problems[0].tensor, names[i]);
        flip(&s, file, at);
    }
    lg_checkpoint_close(c);
    lg_store_free(s.store);
    lg_memory_store_drop("later");
    free(data);
}

static void test_all_problems(void **state)
{
    (void)state;
    static const uint32_t threads[] = {1, 2, 8};
    for (size_t i = 0; i < 3; i++) {
        sample *s = sample_make(SAMPLE_MEMORY);
        lg_error err = LG_ERROR_INIT;
        char path[600];
        flip(s, file_of(s, 0, LG_GROUP_MODEL), 5000);
        flip(s, file_of(s, 2, LG_GROUP_RAW), 300); /* header */
        flip(s, "rank-00002.sums", 60);
        flip(s, "config.json", 1);
        flip(s, LG__MANIFEST, 500);
        lg__path_join(path, sizeof path, s->folder, file_of(s, 0, LG_GROUP_OPTIM));
        OK(lg__store_remove_file(s->store, path, &err));
        build_write(s->store, s->folder, "model-00001-of-00001.safetensors", "x", 1);
        build_write(s->store, s->folder, "README", "x", 1);
        build_write(s->store, s->folder, "lastgood-pin-1.json", "{}", 2);
        sightings seen = {0};
        lg_verify_result result;
        lg_status st = verify(s->c, threads[i], &seen, &result, &err);
        assert_true(lg__status_is_damage(st));
        assert_int_equal(st, seen.problems[0].status);
        assert_string_equal(err.message, seen.problems[0].message);
        assert_int_equal(result.problems, seen.n);
        assert_int_equal(problem_in(&seen, file_of(s, 0, LG_GROUP_MODEL))->status, LG_ERR_CORRUPT);
        assert_int_equal(problem_in(&seen, file_of(s, 2, LG_GROUP_RAW))->status, LG_ERR_CORRUPT);
        assert_int_equal(problem_in(&seen, "rank-00002.sums")->status, LG_ERR_CORRUPT);
        assert_int_equal(problem_in(&seen, "config.json")->status, LG_ERR_CORRUPT);
        assert_int_equal(problem_in(&seen, LG__MANIFEST)->status, LG_ERR_CORRUPT);
        assert_int_equal(problem_in(&seen, file_of(s, 0, LG_GROUP_OPTIM))->status, LG_ERR_NOT_WHOLE);
        assert_int_equal(problem_in(&seen, "model-00001-of-00001.safetensors")->status, LG_ERR_FORMAT);
        assert_true(lg__status_is_damage(problem_in(&seen, "lastgood-pin-1.json")->status));
        assert_int_equal(seen.n, 8);
        assert_int_equal(seen.done, seen.total);
        sample_free(s);
    }
}

/* A rank whose sums file is gone cannot be checked; the others are. */
static void test_sums_gone(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_POSIX);
    lg_error err = LG_ERROR_INIT;
    char path[600];
    lg__path_join(path, sizeof path, s->folder, "rank-00001.sums");
    OK(lg__store_remove_file(s->store, path, &err));
    flip(s, file_of(s, 2, LG_GROUP_MODEL), 5000);
    sightings seen = {0};
    lg_verify_result result;
    FAILS(LG_ERR_NOT_WHOLE, verify(s->c, 1, &seen, &result, &err));
    assert_int_equal(seen.n, 2);
    problem_in(&seen, "rank-00001.sums");
    problem_in(&seen, file_of(s, 2, LG_GROUP_MODEL));
    assert_int_equal(seen.done, seen.total);
    sample_free(s);
}

static void test_unreadable(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    fault_store *f = fault_store_new(s->store);
    lg_checkpoint *c;
    OK(lg__checkpoint_open_in(fault_store_handle(f), false, s->folder, NULL, 0, &c, &err));
    const char *file = file_of(s, 1, LG_GROUP_OPTIM);
    fault_store_arm(f, (fault_plan){.kinds = FAULT_BIT(FAULT_READ), .path = file, .times = UINT64_MAX, .os_errno = 5});
    sightings seen = {0};
    lg_verify_result result;
    FAILS(LG_ERR_IO, verify(c, 1, &seen, &result, &err));
    for (size_t i = 0; i < seen.n; i++) {
        assert_string_equal(seen.problems[i].file, file);
    }
    lg_checkpoint_close(c);
    fault_store_free(f);
    sample_free(s);
}

static void test_cancel(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    for (uint64_t after = 1; after < 12; after += 2) {
        sightings seen = {.stop_after = after};
        lg_verify_result result;
        FAILS(LG_ERR_CANCELLED, verify(s->c, (uint32_t)(after % 3), &seen, &result, &err));
        assert_int_equal(seen.calls, after);
    }
    sample_free(s);
}

/* ------------------------------------------------- headers against layouts */

typedef enum edit_kind { DROP, DROP_ALL, ADD, MOVE, RENAME, ADD_STATE, ADD_RAW } edit_kind;

static void edit(uint32_t rank, lg_group group, uint32_t number, build_box *boxes, size_t *n, void *arg)
{
    edit_kind kind = *(edit_kind *)arg;
    bool raw = kind == ADD_STATE || kind == ADD_RAW;
    if (rank != 1 || number != 0 || group != (raw ? LG_GROUP_RAW : LG_GROUP_MODEL)) {
        return;
    }
    static char byte[4];
    build_box more = {.dtype = LG_U8, .data = byte, .bytes = 4, .box = {1, {0}, {4}}};
    switch (kind) {
    case DROP:
        boxes[0] = boxes[--*n];
        break;
    case DROP_ALL:
        *n = 0;
        break;
    case MOVE:
        boxes[0].box.offset[0]++;
        break;
    case RENAME:
        strcpy(boxes[0].key, "extra");
        break;
    case ADD:
    case ADD_STATE:
    case ADD_RAW:
        strcpy(more.key, kind == ADD ? "extra" : kind == ADD_STATE ? "b:extra" : "t:extra");
        boxes[(*n)++] = more;
        break;
    }
}

static void test_box_set(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    static const struct {
        edit_kind kind;
        size_t problems;
        const char *says;
    } cases[] = {{DROP, 1, "lacks box"},    {ADD, 1, "holds \"extra\""}, {MOVE, 2, "lacks box"},
                 {RENAME, 2, "lacks box"},  {ADD_STATE, 0, ""},          {ADD_RAW, 1, "holds \"extra\""},
                 {DROP_ALL, 0, "lacks box"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        edit_kind kind = cases[i].kind;
        build_spec spec = s->spec;
        spec.generation.serial = 100 + i;
        spec.edit = edit;
        spec.arg = &kind;
        char folder[LG__NAME_MAX];
        build_checkpoint(s->store, &spec, folder);
        lg_checkpoint *c;
        OK(lg__checkpoint_open_in(s->store, false, folder, NULL, 0, &c, &err));
        sightings seen = {0};
        lg_verify_result result;
        lg_status st = verify(c, 2, &seen, &result, &err);
        if (kind == DROP_ALL) { /* each tensor of it, and the file itself */
            assert_true(seen.n > 2);
            assert_non_null(strstr(seen.problems[seen.n - 1].message, "holds no tensor"));
        } else {
            assert_int_equal(seen.n, cases[i].problems);
            assert_int_equal(st == LG_OK, cases[i].problems == 0);
        }
        if (seen.n > 0) {
            SAYS(cases[i].says);
            SAYS("rank 1");
            assert_true(lg__status_is_damage(st));
            assert_non_null(strstr(seen.problems[0].file, "shard-00002"));
        }
        lg_checkpoint_close(c);
    }
    sample_free(s);
}

/* ------------------------------------------------ what the library wrote */

static void test_saved(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    static const uint64_t steps[] = {5};
    static const uint32_t worlds[] = {1, 3, 4};
    for (int kind = 0; kind < ROOT_KINDS; kind++) {
        for (size_t i = 0; i < 3; i++) {
            test_root root;
            root_make(&root, kind);
            run_spec spec = {.world = worlds[i], .steps = steps, .n_steps = 1};
            root_run(&root, &spec);
            char names[4][64];
            assert_int_equal(root_folders(&root, names, 4), 1);
            lg_checkpoint *c;
            OK(lg__checkpoint_open_in(root.store, false, names[0], NULL, 0, &c, &err));
            OK(lg__checkpoint_check_whole(c, &err));
            OK(lg_verify(c, NULL, NULL, &err));
            lg_checkpoint_close(c);
            root_drop(&root);
        }
    }
}

/* -------------------------------------------------------------------- large */

static void test_large(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    const size_t n = (size_t)70 << 20; /* two ranges for two threads */
    build_tensor t = {.name = "w", .dtype = LG_U8, .ndim = 1, .shape = {n}};
    char *data = calloc(1, n);
    t.data = data;
    lg_store *store;
    OK(lg_store_open("mem:large", &store, &err));
    OK(lg__store_make_root(store, &err));
    char folder[LG__NAME_MAX];
    static const uint64_t blocks[] = {65536, UINT64_C(4) << 20};
    for (size_t i = 0; i < 2; i++) {
        /* build_extract copies bit by bit: too slow for this size, so the one
         * rank's file is the tensor as it is. */
        build_spec spec = {.world = 1,
                           .step = 1,
                           .generation = {1, 1 + i},
                           .block_bytes = blocks[i],
                           .tensors = &t,
                           .n_tensors = 1,
                           .raw_copy = true};
        build_checkpoint(store, &spec, folder);
        lg_checkpoint *c;
        OK(lg__checkpoint_open_in(store, false, folder, NULL, 0, &c, &err));
        sightings seen = {0};
        lg_verify_result result;
        OK(verify(c, 4, &seen, &result, &err));
        assert_false(seen.went_back);
        assert_int_equal(seen.done, seen.total);
        sample s = {.store = store};
        memcpy(s.folder, folder, sizeof folder);
        const char *file = "shard-00001-model-00001-of-00001.safetensors";
        static const size_t at[] = {4096, (size_t)60 << 20, ((size_t)70 << 20) + 4095};
        for (size_t k = 0; k < 3; k++) {
            flip(&s, file, at[k]);
        }
        FAILS(LG_ERR_CORRUPT, verify(c, 4, &seen, &result, &err));
        assert_int_equal(seen.n, 3);
        for (size_t k = 0; k < 3; k++) {
            uint64_t block = 4096 + (at[k] - 4096) / blocks[i] * blocks[i];
            bool found = false;
            for (size_t p = 0; p < 3; p++) {
                found |= seen.problems[p].offset == block;
            }
            assert_true(found);
        }
        lg_checkpoint_close(c);
    }
    free(data);
    lg_store_free(store);
    lg_memory_store_drop("large");
}

static void test_no_memory(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    for (size_t n = 0;; n++) {
        assert_true(n < 100000);
        lg__mem_fail_after(n);
        lg_status st =
            lg_verify(s->c, &(lg_verify_options){.size = sizeof(lg_verify_options), .threads = 1}, NULL, &err);
        lg__mem_fail_after(SIZE_MAX);
        if (st == LG_OK) {
            break;
        }
        if (st != LG_ERR_NOMEM) {
            fail_msg("allocation %zu: %s", n, err.message);
        }
    }
    sample_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"a good checkpoint has no problems, and every byte is counted", test_good, NULL, NULL, NULL},
        {"K01 K13: verification finds a flip of any byte of any file", test_every_flip, NULL, NULL, NULL},
        {"a damaged block names the tensors in it", test_block_names_tensors, NULL, NULL, NULL},
        {"a damaged block names no tensor before it", test_later_tensors, NULL, NULL, NULL},
        {"K14: all problems are reported, by one thread or many", test_all_problems, NULL, NULL, NULL},
        {"K14: without one rank's sums the others are still verified", test_sums_gone, NULL, NULL, NULL},
        {"a file that cannot be read is a problem of that file", test_unreadable, NULL, NULL, NULL},
        {"progress can stop it", test_cancel, NULL, NULL, NULL},
        {"K14: headers hold exactly the boxes that the layouts give", test_box_set, NULL, NULL, NULL},
        {"K14: what the library saved has no problems", test_saved, NULL, NULL, NULL},
        {"a large file is shared between threads", test_large, NULL, NULL, NULL},
        {"every failed allocation ends it with an ordinary error", test_no_memory, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
