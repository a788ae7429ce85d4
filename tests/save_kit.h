/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_SAVE_KIT_H
#define LG_TESTS_SAVE_KIT_H

/* Saves without a session, for the tests of planning, writing and merging. */

#include "base/error.h"
#include "base/json.h"
#include "base/mem.h"
#include "core/save.h"
#include "store/store.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define KIT __attribute__((unused)) static
#define MAX_RANKS 16

#define assert_ok(call)                                                           \
    do {                                                                          \
        lg_error kit_err_ = LG_ERROR_INIT;                                        \
        lg_error *err = &kit_err_;                                                \
        lg_status kit_st_ = (call);                                               \
        if (kit_st_ != LG_OK) {                                                   \
            fail_msg("%s: %s: %s", #call, lg_status_name(kit_st_), err->message); \
        }                                                                         \
    } while (0)

/* The call fails with this status and a message that has `text` in it. */
#define assert_fails(want, text, call)                                                                     \
    do {                                                                                                   \
        lg_error kit_err_ = LG_ERROR_INIT;                                                                 \
        lg_error *err = &kit_err_;                                                                         \
        lg_status kit_st_ = (call);                                                                        \
        if (kit_st_ != (want) || err->status != (want) || strstr(err->message, (text)) == NULL) {          \
            fail_msg("%s: %s: \"%s\"; wanted %s and \"%s\"", #call, lg_status_name(kit_st_), err->message, \
                     lg_status_name(want), (text));                                                        \
        }                                                                                                  \
    } while (0)

/* lg_session is not linked here: saves come from lg__save_new. */
lg_status lg__session_save_facts(lg_session *s, lg__save_facts *out, lg_error *err);
__attribute__((weak)) lg_status lg__session_save_facts(lg_session *s, lg__save_facts *out, lg_error *err)
{
    (void)s;
    (void)out;
    return lg_error_set(err, LG_ERR_STATE, "no session in this test");
}

static const lg__save_ids kit_ids = {.run_id = "0123456789abcdef0123456789abcdef",
                                     .attempt = "00112233445566aa",
                                     .generation = {3, 17},
                                     .domain = "host-a"};

KIT lg_save *kit_save(uint32_t rank, uint32_t world, uint32_t flags)
{
    const lg__save_facts facts = {.rank = rank, .world = world, .block_bytes = 65536, .buffer_bytes = 1 << 20};
    lg_save *save = NULL;
    assert_ok(lg__save_new(&facts, 500, flags, &save, err));
    return save;
}

/* A layout that cuts dimension `dim` over `n` ranks from 0 on. */
KIT lg_layout *kit_rows(uint32_t n, uint32_t dim)
{
    lg_split split = {dim, 0, 0, LG_SPLIT_CEIL};
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &n, d.n_splits = 1, d.splits = &split;
    lg_layout *layout = NULL;
    assert_ok(lg_layout_create(&d, &layout, err));
    return layout;
}

/* A layout of `n` replicas, of which `writers` write (0: by size). */
KIT lg_layout *kit_replicated(uint32_t n, uint32_t writers)
{
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &n, d.writers = writers;
    lg_layout *layout = NULL;
    assert_ok(lg_layout_create(&d, &layout, err));
    return layout;
}

KIT lg_layout *kit_flat(uint32_t n, uint64_t length)
{
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1, d.mesh_sizes = &n, d.flat_length = length;
    lg_layout *layout = NULL;
    assert_ok(lg_layout_create(&d, &layout, err));
    return layout;
}

KIT lg_tensor kit_tensor(const char *name, lg_dtype dtype, uint32_t ndim, const uint64_t *shape, const void *data)
{
    lg_tensor t = LG_TENSOR_INIT;
    t.name = name, t.dtype = dtype, t.ndim = ndim, t.shape = shape, t.data = data;
    return t;
}

/* Lets ranks exchange what they hold undeclared, as the session does; *err says
 * what the first failing rank says. */
KIT lg_status kit_settle(lg_save **saves, uint32_t world, bool check_declared, lg_error *err)
{
    lg__buf lists;
    lg__buf_init(&lists, SIZE_MAX / 2);
    size_t sizes[MAX_RANKS];
    uint8_t summaries[MAX_RANKS][40];
    bool equal = true;
    lg_status status = LG_OK;
    for (uint32_t r = 0; r < world && status == LG_OK; r++) {
        size_t from = lists.len;
        status = lg__replicas_digest(saves[r], check_declared, err);
        if (status == LG_OK) {
            status = lg__replicas_summary(saves[r], summaries[r], err);
        }
        if (status == LG_OK) {
            status = lg__replicas_list(saves[r], &lists, err);
        }
        sizes[r] = lists.len - from;
        equal = equal && status == LG_OK && memcmp(summaries[0], summaries[r], sizeof *summaries) == 0;
    }
    for (uint32_t r = 0; r < world && status == LG_OK; r++) {
        status = lg__replicas_settle(saves[r],
                                     equal                ? NULL
                                     : lists.data != NULL ? lists.data
                                                          : "",
                                     equal ? NULL : sizes, err);
    }
    lg__buf_free(&lists);
    return status;
}

KIT void kit_abort(lg_save **saves, uint32_t world)
{
    for (uint32_t r = 0; r < world; r++) {
        lg_save_abort(saves[r]);
        saves[r] = NULL;
    }
}

/* Bytes of element numbers: element i of a tensor holds i in its dtype's
 * lowest bytes. */
KIT void kit_element(lg_dtype dtype, uint64_t i, uint8_t out[8])
{
    size_t n = lg_dtype_bits(dtype) / 8;
    for (size_t b = 0; b < n; b++) {
        out[b] = (uint8_t)((i + 1) * UINT64_C(0x9e3779b97f4a7c15) >> (8 * b));
    }
}

#endif
