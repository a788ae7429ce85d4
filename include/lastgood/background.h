/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LASTGOOD_BACKGROUND_H
#define LASTGOOD_BACKGROUND_H

/* Saving in the background, a part of lastgood.h, which includes this.
 *
 *     lg_launch_info info;
 *     lg_save_launch(save, NULL, &info, &err);         // instead of lg_save_commit
 *     forward(); backward();                           // reads the parameters
 *     lg_session_fence(s, 60000, &err);                // before they change
 *     optimizer_step();
 *     …
 *     lg_session_wait(s, 600000, &save_info, &err);    // at the end, or never:
 *     lg_session_close(s, &err);                       // closing waits too
 *
 * One save is in flight at a time. The background does no collectives and never
 * touches the communicator. What goes wrong there is told by the next
 * collective call of the session (launch, commit, wait, resume), by the same
 * error on every rank: that call has then done nothing else and can be made
 * again. The checkpoint before stays as it is. A program that ends without closing
 * its session waits for the save, at most the session's deadline; one that is
 * killed, or calls _exit, loses it. docs/async.md says which tensors may be lazy. */

#include <lastgood/lastgood.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    /* When the save before is still in flight on any rank: skip this one, on
     * all ranks. Without it the launch waits, at most half of the session's
     * deadline. Equal on all ranks. */
    LG_LAUNCH_SKIP = 1u << 0,
    /* Debug: digests what is lazy at the launch and again at the fence. If
     * something was changed in between, the fence names it with
     * LG_ERR_CONFLICT, and the save fails. Costs two passes over the memory. */
    LG_LAUNCH_CHECK_SOURCES = 1u << 1
};

typedef struct lg_launch_options {
    size_t size; /* LG_LAUNCH_OPTIONS_INIT sets it */
    uint32_t flags;
    uint32_t copy_threads; /* that copy before the launch returns; 0 = one a processor, at most 8 */
    uint32_t lazy_threads; /* that copy in the background; 0 = 1 */
    uint32_t max_skips;    /* LG_LAUNCH_SKIP: after so many in a row it waits; 0 = 10 */
    /* Memory that something else fills, a device for example: what is
     * LG_TENSOR_KEPT is not read before *ready, which is written after it, is
     * `ready_value` or more. If it is not within half of the session's deadline,
     * the save fails. NULL: all is filled. The number stays until the save has
     * ended. What is filled cannot be compared between ranks: it needs a layout. */
    const int64_t *ready;
    int64_t ready_value;
    /* NULL, or called once, in this thread, when it is certain that this launch goes
     * and the save before has ended: starts to fill. Its error fails the save and is
     * told by the next collective call. Uses no function of the session. */
    lg_status (*fill)(void *arg, lg_error *err);
    void *fill_arg;
} lg_launch_options;

#define LG_LAUNCH_OPTIONS_INIT                                     \
    {                                                              \
        sizeof(lg_launch_options), 0, 0, 0, 0, NULL, 0, NULL, NULL \
    }

typedef enum lg_skip_reason {
    LG_SKIP_NONE = 0,
    LG_SKIP_COMMITTED = 1, /* LG_SAVE_IF_NEW: this step is there already */
    LG_SKIP_IN_FLIGHT = 2  /* LG_LAUNCH_SKIP */
} lg_skip_reason;

typedef struct lg_launch_info {
    uint64_t step;
    lg_generation generation;
    char folder[72];        /* its name once it is committed */
    lg_skip_reason skipped; /* why nothing was launched */
    uint64_t bytes_staged;  /* of this rank: not lazy, so copied before the launch returned */
    uint64_t bytes_lazy;    /* of this rank: copied until the fence opens */
    int windowed;           /* the part did not fit the staging memory: copied as it is written */
    double seconds;         /* the launch took, with its waiting */
} lg_launch_info;

/* Collective. Starts the save that `save` describes and returns when all that
 * is not LG_TENSOR_LAZY has been copied; frees `save` whatever the result.
 * `options` and `info` may be NULL. On failure nothing is in flight, and every
 * rank gets the same error; it may be that of the save before. */
LG_API lg_status lg_save_launch(lg_save *save, const lg_launch_options *options, lg_launch_info *info, lg_error *err);

/* *staged: has everything been copied that the last launch wanted? Not
 * collective, does not wait. */
LG_API lg_status lg_session_staged(lg_session *session, int *staged, lg_error *err);

/* Waits until everything is copied: the trainer may then change what it
 * launched as LG_TENSOR_LAZY. Not collective. LG_ERR_TIMEOUT after
 * `deadline_ms`: the memory is still being read. A failed save holds nothing
 * any more and is told by the next collective call, not here. */
LG_API lg_status lg_session_fence(lg_session *session, uint64_t deadline_ms, lg_error *err);

/* Says, instead of the fence or before it, that lazy memory was changed too early
 * on this rank: what the save has may be torn. Not collective, does not wait.
 * *refused: the save fails, with this status and message, which the next
 * collective call tells on every rank. Otherwise it was too late: it may be
 * committed, and the checkpoint should be removed (lg_remove_last); on the
 * coordinator nothing older is removed for it in the meantime. */
LG_API lg_status lg_session_refuse(lg_session *session, lg_status status, const char *message, int *refused,
                                   lg_error *err);

/* Collective. Waits until the save in flight is durable on all ranks, or has
 * failed: every rank gets the same result. `info` (may be NULL) is that of the
 * newest save of the session that was launched and committed, all zero if there
 * is none. LG_ERR_TIMEOUT after `deadline_ms` (0 = the session's) names the
 * ranks and what they are at; the save stays in flight. Ranks that do not call it
 * are named after the session's deadline more. */
LG_API lg_status lg_session_wait(lg_session *session, uint64_t deadline_ms, lg_save_info *info, lg_error *err);

#ifdef __cplusplus
}
#endif

#endif
