/* SPDX-License-Identifier: Apache-2.0 */

/* Damage of every kind to the files of a small checkpoint: what loads is right,
 * or it is refused.
 *
 *     LASTGOOD_PROVE=full test_load_damage   every byte flipped and every length cut,
 *                                            where else padding and lengths are sampled */

#include "base/hash.h"
#include "core/checkpoint.h"
#include "format/sums.h"
#include "support/build.h"
#include "support/check.h"
#include "support/environment.h"
#include "support/fault_store.h"
#include "support/sample.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char *const sample_files[] = {
    "lastgood.json",
    "rank-00001.sums",
    "rank-00002.sums",
    "rank-00003.sums",
    "shard-00001-model-00001-of-00001.safetensors",
    "shard-00002-model-00001-of-00001.safetensors",
    "shard-00003-model-00001-of-00001.safetensors",
    "shard-00001-optim-00001-of-00001.safetensors",
    "shard-00001-raw-00001-of-00001.state",
    "shard-00002-raw-00001-of-00001.state",
    "shard-00003-raw-00001-of-00001.state",
    "config.json",
};
#define N_FILES (sizeof sample_files / sizeof *sample_files)

static uint64_t refused; /* damaged files */

static void tell_refused(uint64_t before)
{
    print_message("# %llu damaged files refused\n", (unsigned long long)(refused - before));
}

static void must_refuse(const sample *s, const char *what, const char *file)
{
    refused++;
    lg_error err = LG_ERROR_INIT;
    const char *wrong = sample_open_wrong(s, 0, &err);
    if (wrong == NULL) {
        fail_msg("%s %s: loaded as if nothing had happened", file, what);
    }
    if (err.status == LG_OK) {
        fail_msg("%s %s: wrong values of %s were handed out", file, what, wrong);
    }
    if (!lg__status_is_damage(err.status)) {
        fail_msg("%s %s: %s is no damage: %s", file, what, lg_status_name(err.status), err.message);
    }
    if (strstr(err.message, file) == NULL) {
        fail_msg("%s %s: the message does not name the file: %s", file, what, err.message);
    }
}

static void test_flip_every_byte(void **state)
{
    (void)state;
    const bool full = in_full();
    const uint64_t before = refused;
    sample *s = sample_make_small(SAMPLE_MEMORY);
    size_t spaces = 0;
    for (size_t i = 0; i < N_FILES; i++) {
        size_t bytes;
        char *data = build_read(s->store, s->folder, sample_files[i], &bytes);
        for (size_t at = 0; at < bytes; at++) {
            /* Headers are padded to 4096: one in 61 of those spaces will do. */
            if (!full && at > 0 && data[at] == ' ' && data[at - 1] == ' ' && spaces++ % 61 != 0) {
                continue;
            }
            char old = data[at];
            data[at] = (char)(old ^ (1 << (at % 8)));
            build_write(s->store, s->folder, sample_files[i], data, bytes);
            char what[64];
            snprintf(what, sizeof what, "with byte %zu flipped", at);
            must_refuse(s, what, sample_files[i]);
            data[at] = old;
        }
        build_write(s->store, s->folder, sample_files[i], data, bytes);
        free(data);
    }
    lg_error err = LG_ERROR_INIT;
    assert_null(sample_open_wrong(s, 0, &err));
    sample_free(s);
    tell_refused(before);
}

/* In full at each length, the last included. */
static void cut_everywhere(const sample *s, const char *file, const char *data, size_t bytes)
{
    const size_t stride = in_full() ? 1 : 1 + bytes / 20;
    for (size_t length = 0; length < bytes; length += stride) {
        build_write(s->store, s->folder, file, data, length);
        char what[64];
        snprintf(what, sizeof what, "cut to %zu of %zu bytes", length, bytes);
        must_refuse(s, what, file);
    }
    build_write(s->store, s->folder, file, data, bytes - 1);
    must_refuse(s, "cut by one byte", file);
}

static void test_damaged_files(void **state)
{
    (void)state;
    const uint64_t before = refused;
    for (int kind = SAMPLE_MEMORY; kind <= SAMPLE_POSIX; kind++) {
        sample *s = sample_make_small(kind);
        lg_error err = LG_ERROR_INIT;
        for (size_t i = 0; i < N_FILES; i++) {
            size_t bytes;
            char *data = build_read(s->store, s->folder, sample_files[i], &bytes);
            cut_everywhere(s, sample_files[i], data, bytes);
            char *other = calloc(1, bytes + 1);
            build_write(s->store, s->folder, sample_files[i], other, bytes);
            must_refuse(s, "full of zeros", sample_files[i]);
            memcpy(other, data, bytes);
            build_write(s->store, s->folder, sample_files[i], other, bytes + 1);
            must_refuse(s, "with a byte more", sample_files[i]);
            memset(other + bytes / 2, 0, bytes - bytes / 2);
            build_write(s->store, s->folder, sample_files[i], other, bytes);
            must_refuse(s, "with its second half zeroed", sample_files[i]);
            free(other);
            char path[600];
            lg__path_join(path, sizeof path, s->folder, sample_files[i]);
            OK(lg__store_remove_file(s->store, path, &err));
            const char *wrong = sample_open_wrong(s, 0, &err);
            assert_non_null(wrong);
            assert_true(lg__status_is_damage(err.status));
            if (i > 0) {
                assert_int_equal(err.status, LG_ERR_NOT_WHOLE);
                SAYS(sample_files[i]);
            }
            build_write(s->store, s->folder, sample_files[i], data, bytes);
            free(data);
        }
        assert_null(sample_open_wrong(s, 0, &err));
        sample_free(s);
    }
    tell_refused(before);
}

/* Files of equal length that changed places, within a checkpoint and between
 * two steps: all their own checksums are right. */
static void test_swapped_files(void **state)
{
    (void)state;
    sample *s = sample_make_small(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    build_spec later = s->spec;
    later.step = 600;
    later.generation.serial = 18;
    later.attempt = "fedcba9876543210";
    char folder[LG__NAME_MAX];
    build_checkpoint(s->store, &later, folder);
    size_t swaps = 0, same = 0;
    for (size_t i = 0; i < N_FILES; i++) {
        size_t bytes, other_bytes;
        char *data = build_read(s->store, s->folder, sample_files[i], &bytes);
        for (size_t k = 0; k < N_FILES; k++) {
            for (int step = 0; step < 2; step++) {
                if (step == 0 && k == i) {
                    continue;
                }
                char *other = build_read(s->store, step == 0 ? s->folder : folder, sample_files[k], &other_bytes);
                bool equal = other_bytes == bytes && memcmp(other, data, bytes) == 0;
                if (!equal) {
                    build_write(s->store, s->folder, sample_files[i], other, other_bytes);
                    const char *wrong = sample_open_wrong(s, 0, &err);
                    /* Another step's manifest says that it is another step's:
                     * the files it lists here have other digests. */
                    assert_non_null(wrong);
                    assert_true(lg__status_is_damage(err.status));
                    swaps += other_bytes == bytes;
                    build_write(s->store, s->folder, sample_files[i], data, bytes);
                } else {
                    same++;
                }
                free(other);
            }
        }
        free(data);
    }
    assert_true(swaps >= 12); /* of equal length: sums files of other ranks and of the other step */
    assert_true(same > 0);
    assert_null(sample_open_wrong(s, 0, &err));
    sample_free(s);
}

/* Data and a checksum table that fit each other, under a report of another
 * attempt: what remains of a copy that was made while a step was replaced. */
static void test_table_of_another_attempt(void **state)
{
    (void)state;
    static const char shard[] = "shard-00001-model-00001-of-00001.safetensors", sums[] = "rank-00001.sums";
    sample *s = sample_make_small(SAMPLE_MEMORY);
    size_t bytes, sums_bytes;
    char *data = build_read(s->store, s->folder, shard, &bytes);
    char *table = build_read(s->store, s->folder, sums, &sums_bytes);
    const size_t at = LG__SUMS_HEAD_BYTES; /* the first table is that of the first file */
    assert_int_equal(lg__get_u64le(table + at), bytes);
    size_t header = (size_t)lg__get_u64le(table + at + 8), crc_at = at + LG__TABLE_HEAD_BYTES;
    size_t block = bytes - header < SAMPLE_BLOCK ? bytes - header : SAMPLE_BLOCK;
    assert_int_equal(lg__get_u32le(table + crc_at), lg__crc32c(0, data + header, block));
    data[header + 1] ^= 4;
    uint32_t crc = lg__crc32c(0, data + header, block);
    for (int i = 0; i < 4; i++) {
        table[crc_at + (size_t)i] = (char)(crc >> (8 * i));
    }
    build_write(s->store, s->folder, shard, data, bytes);
    build_write(s->store, s->folder, sums, table, sums_bytes);
    must_refuse(s, "and its table, both of another attempt,", shard);
    free(data);
    free(table);
    sample_free(s);
}

/* Every read fails once, in every way; the error arrives and nothing leaks. */
static void test_read_errors(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    fault_store *f = fault_store_new(s->store);
    static const struct {
        int os_errno;
        lg_status status;
    } faults[] = {{EIO, LG_ERR_IO}, {EACCES, LG_ERR_PERMISSION}, {ENOMEM, LG_ERR_NOMEM}};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        for (uint64_t nth = 1;; nth++) {
            fault_store_arm(f, (fault_plan){.kinds = FAULT_BIT(FAULT_READ) | FAULT_BIT(FAULT_OPEN),
                                            .nth = nth,
                                            .os_errno = faults[i].os_errno});
            lg_checkpoint *c = NULL;
            lg_status st = lg__checkpoint_open_in(fault_store_handle(f), false, s->folder, NULL, 0, &c, &err);
            const char *wrong = st == LG_OK ? sample_load_wrong(s, c, 0, &err) : "open";
            lg_checkpoint_close(c);
            if (fault_store_fired(f) == 0) {
                assert_null(wrong);
                assert_true(nth > 20);
                break;
            }
            assert_non_null(wrong);
            assert_int_equal(err.status, faults[i].status);
        }
    }
    fault_store_free(f);
    sample_free(s);
}

/* K17 F274: the file shrinks after it was opened. */
typedef struct shrink {
    const char *path;
    bool done;
} shrink;

static lg_status shrink_before_data(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err)
{
    (void)f;
    (void)err;
    shrink *s = arg;
    if (before && event->op == FAULT_READ && event->offset >= 4096 &&
        strstr(event->path, "shard-00002-model") != NULL) {
        assert_int_equal(truncate(s->path, 4096 + 100), 0);
        s->done = true;
    }
    return LG_OK;
}

static void test_shrinks_while_open(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_POSIX);
    lg_error err = LG_ERROR_INIT;
    fault_store *f = fault_store_new(s->store);
    lg_checkpoint *c;
    OK(lg__checkpoint_open_in(fault_store_handle(f), false, s->folder, NULL, 0, &c, &err));
    char path[1024];
    snprintf(path, sizeof path, "%s/%s/shard-00002-model-00001-of-00002.safetensors", s->dir, s->folder);
    shrink arg = {.path = path};
    fault_store_set_hook(f, shrink_before_data, &arg);
    float *got = malloc(400 * 33 * 4);
    lg_target target = sample_target(sample_tensor(s, "emb.w"), got);
    FAILS(LG_ERR_CORRUPT, sample_load(c, &target, 1, 0, &err));
    assert_true(arg.done);
    SAYS("shard-00002-model-00001-of-00002.safetensors");
    SAYS("\"emb.w\"");
    FAILS(LG_ERR_NOT_WHOLE, sample_load(c, &target, 1, 0, &err));
    free(got);
    lg_checkpoint_close(c);
    fault_store_free(f);
    sample_free(s);
}

/* K08 F121: after a failed load the same checkpoint loads as ever. */
static void test_failed_load_changes_nothing(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    fault_store *f = fault_store_new(s->store);
    lg_checkpoint *c;
    OK(lg__checkpoint_open_in(fault_store_handle(f), false, s->folder, NULL, 0, &c, &err));
    fault_store_log_clear(f);
    fault_store_arm(f, (fault_plan){.kinds = FAULT_BIT(FAULT_READ), .path = "shard-00002", .os_errno = EIO});
    assert_non_null(sample_load_wrong(s, c, 0, &err));
    assert_int_equal(err.status, LG_ERR_IO);
    assert_null(sample_load_wrong(s, c, 0, &err));
    assert_int_equal(fault_store_count(f, FAULT_CHANGES), 0);
    lg_checkpoint_close(c);
    fault_store_free(f);
    sample_free(s);
}

/* ------------------------------------------------- headers against layouts */

typedef enum wrong_header { DROP, MOVE, RESHAPE, RETYPE, RENAME, NO_OFFSETS } wrong_header;

static void spoil(uint32_t rank, lg_group group, uint32_t number, build_box *boxes, size_t *n, void *arg)
{
    (void)number;
    if (rank != 1 || group != LG_GROUP_MODEL) {
        return;
    }
    for (size_t i = 0; i < *n; i++) {
        if (strcmp(boxes[i].key, "emb.w") != 0) {
            continue;
        }
        switch (*(wrong_header *)arg) {
        case DROP:
            boxes[i] = boxes[--*n];
            break;
        case MOVE:
            boxes[i].box.offset[0]++;
            break;
        case RESHAPE:
            boxes[i].box.size[0] = boxes[i].box.size[1];
            boxes[i].box.size[1] = boxes[i].bytes / 4 / boxes[i].box.size[0];
            break;
        case RETYPE:
            boxes[i].dtype = LG_I32;
            break;
        case RENAME:
            strcpy(boxes[i].key, "emb.v");
            break;
        case NO_OFFSETS:
            boxes[0].plain = true;
            break;
        }
        return;
    }
}

static void test_headers(void **state)
{
    (void)state;
    sample *s = sample_make_small(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    static const struct {
        wrong_header how;
        lg_status status;
    } cases[] = {{DROP, LG_ERR_COVERAGE},  {MOVE, LG_ERR_CORRUPT},    {RESHAPE, LG_ERR_CORRUPT},
                 {RETYPE, LG_ERR_CORRUPT}, {RENAME, LG_ERR_COVERAGE}, {NO_OFFSETS, LG_ERR_CORRUPT}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        wrong_header how = cases[i].how;
        build_spec spec = s->spec;
        spec.generation.serial = 100 + i;
        spec.edit = spoil;
        spec.arg = &how;
        char folder[LG__NAME_MAX];
        build_checkpoint(s->store, &spec, folder);
        lg_checkpoint *c;
        OK(lg__checkpoint_open_in(s->store, false, folder, NULL, 0, &c, &err));
        float got[60];
        lg_target target = sample_target(sample_tensor(s, "emb.w"), got);
        for (uint32_t flags = 0; flags <= LG_LOAD_UNVERIFIED; flags++) {
            FAILS(cases[i].status, sample_load(c, &target, 1, flags, &err));
            SAYS("emb.w");
            SAYS("rank 1");
        }
        lg_checkpoint_close(c);
    }
    sample_free(s);
}

/* Where a header would have grown too long, boxes lie in further files. */
static void test_further_files(void **state)
{
    (void)state;
    sample *s = sample_make(SAMPLE_MEMORY);
    lg_error err = LG_ERROR_INIT;
    build_spec spec = s->spec;
    spec.generation.serial = 200;
    spec.shift = 2;
    spec.n_blobs = 0;
    char folder[LG__NAME_MAX];
    build_checkpoint(s->store, &spec, folder);
    sample copy = *s;
    copy.spec.n_blobs = 0;
    memcpy(copy.folder, folder, sizeof copy.folder);
    const char *wrong = sample_open_wrong(&copy, 0, &err);
    if (wrong != NULL) {
        fail_msg("%s: %s", wrong, err.message);
    }
    sample_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"K01 K13: a flip of any byte of any file is refused", test_flip_every_byte, NULL, NULL, NULL},
        {"K01 K14: cut, zeroed, grown and removed files are refused", test_damaged_files, NULL, NULL, NULL},
        {"K01 K14: files that changed places are refused", test_swapped_files, NULL, NULL, NULL},
        {"K01 K14: data and a table that fit each other, but not the report, are refused",
         test_table_of_another_attempt, NULL, NULL, NULL},
        {"every failing read arrives as its own error", test_read_errors, NULL, NULL, NULL},
        {"K17 F274: a file that shrinks while open is an ordinary error", test_shrinks_while_open, NULL, NULL, NULL},
        {"K08: a failed load changes nothing", test_failed_load_changes_nothing, NULL, NULL, NULL},
        {"K14: a header at odds with the layouts is refused", test_headers, NULL, NULL, NULL},
        {"boxes are found in further files of their group", test_further_files, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
