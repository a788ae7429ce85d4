/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_MANIFEST_SAMPLE_H
#define LG_TESTS_MANIFEST_SAMPLE_H

/* A manifest with one of everything, which is also the golden one of 1.0, and
 * a tombstone. */

#include "base/error.h"
#include "format/manifest.h"
#include "support/layouts.h"
#include "support/oops.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static inline uint64_t *u64s(lg__manifest *m, size_t n, const uint64_t *v)
{
    uint64_t *copy = lg__arena_array(m->arena, n, sizeof *copy);
    assert_non_null(copy);
    if (n > 0) {
        memcpy(copy, v, n * sizeof *v);
    }
    return copy;
}
#define U64S(m, ...) u64s((m), sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t), (uint64_t[]){__VA_ARGS__})

static inline void fill_digest(uint8_t out[LG__SHA256_BYTES], unsigned seed)
{
    for (unsigned i = 0; i < LG__SHA256_BYTES; i++) {
        out[i] = (uint8_t)(seed * 31 + i * 7);
    }
}

static inline lg_layout *layout_of(bool copies, uint32_t n)
{
    lg_layout *layout = NULL;
    uint32_t *ranks = malloc(n * sizeof *ranks);
    assert_non_null(ranks);
    for (uint32_t i = 0; i < n; i++) {
        ranks[i] = i;
    }
    CHECK(lg__layout_of_ranks(ranks, n, copies, &layout, oops));
    free(ranks);
    return layout;
}

static inline lg__stored_piece piece(uint32_t rank, uint32_t number, uint64_t o0, uint64_t o1, uint64_t s0, uint64_t s1)
{
    return (lg__stored_piece){rank, number, {2, {o0, o1}, {s0, s1}}};
}

/* One of everything, on four ranks. */
static inline lg__manifest *sample(void)
{
    lg__manifest *m = NULL;
    CHECK(lg__manifest_new(&m, oops));
    strcpy(m->run_id, "00112233445566778899aabbccddeeff");
    strcpy(m->attempt, "0123456789abcdef");
    strcpy(m->created, "2026-11-29T18:31:57Z");
    m->generation = (lg_generation){3, 17};
    m->step = 500;
    m->has_parent = true;
    m->parent = (lg_generation){2, (UINT64_C(1) << 53) + 1};
    m->parent_step = 400;
    m->parent_verified = true;
    m->world = 4;
    m->block_bytes = 65536;

    m->ranks = lg__arena_array(m->arena, 4, sizeof *m->ranks);
    assert_non_null(m->ranks);
    static const char *const domains[] = {"host-a", "host-a", "host-b", "host \"c\" ü"};
    for (uint32_t r = 0; r < 4; r++) {
        lg__rank_row *row = &m->ranks[r];
        row->n_files[LG_GROUP_MODEL] = 2;
        row->file_bytes[LG_GROUP_MODEL] = U64S(m, 8192 + r, 4097);
        row->n_files[LG_GROUP_OPTIM] = r == 3 ? 0 : 1;
        row->file_bytes[LG_GROUP_OPTIM] = U64S(m, 5000 + r);
        row->n_files[LG_GROUP_RAW] = r < 2 ? 1 : 0;
        row->file_bytes[LG_GROUP_RAW] = U64S(m, (UINT64_C(1) << 53) + 2);
        row->sums_bytes = 2000 + r;
        fill_digest(row->report, r);
        row->domain = domains[r];
    }
    static const lg__attached attached[] = {{"tokenizer.json", 0, {1}}, {"config.json", 612, {2}}};
    m->attached = lg__arena_array(m->arena, 2, sizeof *m->attached);
    assert_non_null(m->attached);
    memcpy(m->attached, attached, sizeof attached);
    m->n_attached = 2;

    m->layouts = lg__arena_array(m->arena, 4, sizeof *m->layouts);
    assert_non_null(m->layouts);
    m->layouts[m->n_layouts++] = rows_layout(4, 10);
    m->layouts[m->n_layouts++] = layout_of(false, 4);
    m->layouts[m->n_layouts++] = flat_layout(4, 40);
    m->layouts[m->n_layouts++] = layout_of(true, 2);

    const lg__stored_piece pieces[] = {piece(0, 0, 0, 0, 2, 4), piece(2, 0, 2, 0, 1, 4), piece(2, 1, 3, 0, 1, 4)};
    lg__stored_piece *copy = lg__arena_array(m->arena, 3, sizeof *copy);
    assert_non_null(copy);
    memcpy(copy, pieces, sizeof pieces);
    const lg__manifest_tensor tensors[] = {
        {"emb.weight", LG_GROUP_MODEL, LG_BF16, 2, U64S(m, 10, 6), 0, 0, NULL, 0, NULL, true},
        {"experts.w1", LG_GROUP_MODEL, LG_F32, 2, U64S(m, 4, 4), 0, LG__IRREGULAR, copy, 3, NULL, true},
        {"lm_head.weight", LG_GROUP_MODEL, LG_BF16, 2, U64S(m, 10, 6), 0, 0, NULL, 0, "emb.weight", true},
        {"norm \"1\"", LG_GROUP_MODEL, LG_F32, 0, U64S(m, 1), 0, 1, NULL, 0, NULL, true},
        {"nothing", LG_GROUP_MODEL, LG_F64, 2, U64S(m, 0, 3), 0, 1, NULL, 0, NULL, true},
        {"optim.m", LG_GROUP_OPTIM, LG_F32, 2, U64S(m, 5, 4), 0, 2, NULL, 0, NULL, true},
        {"optim.v", LG_GROUP_OPTIM, LG_F32, 1, U64S(m, 20), 20, 2, NULL, 0, NULL, true},
        {"running.mean", LG_GROUP_MODEL, LG_F32, 1, U64S(m, 4), 0, 3, NULL, 0, NULL, true},
        {"tied.experts", LG_GROUP_MODEL, LG_F32, 2, U64S(m, 4, 4), 0, LG__IRREGULAR, NULL, 0, "experts.w1", false},
        {"tied.m", LG_GROUP_OPTIM, LG_F32, 2, U64S(m, 5, 4), 0, LG__IRREGULAR, NULL, 0, "optim.m", false},
    };
    m->n_tensors = sizeof tensors / sizeof *tensors;
    m->tensors = lg__arena_array(m->arena, m->n_tensors, sizeof *m->tensors);
    assert_non_null(m->tensors);
    memcpy(m->tensors, tensors, sizeof tensors);
    m->state = json_loads("{\"lr\":{\"$float\":\"-0.0\"},\"samples\":{\"$int\":\"18446744073709551615\"},"
                          "\"note\":\"naïve\",\"schedule\":[1,2.5,null,true]}",
                          0, NULL);
    assert_non_null(m->state);
    return m;
}

static inline lg__manifest *tombstone(void)
{
    lg__manifest *m = NULL;
    CHECK(lg__manifest_new(&m, oops));
    strcpy(m->run_id, "00112233445566778899aabbccddeeff");
    strcpy(m->attempt, "0123456789abcdef");
    m->generation = (lg_generation){3, 18};
    m->tombstone = true;
    m->superseded_by = 4;
    return m;
}

#endif
