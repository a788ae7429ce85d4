/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_FAULT_STORE_H
#define LG_TESTS_FAULT_STORE_H

/* A store for tests that wraps another one. It counts and records operations,
 * makes chosen ones fail, and stops at any point for a scene: another session
 * acts in between, or "the process dies here".
 *
 *     lg_store *mem;
 *     lg_store_open("mem:x", &mem, NULL);
 *     fault_store *f = fault_store_new(mem);
 *     fault_store_arm(f, (fault_plan){.kinds = FAULT_BIT(FAULT_SYNC), .nth = 3, .os_errno = EIO});
 *     … hand fault_store_handle(f) to the code under test …
 *     fault_store_free(f);
 *     lg_store_free(mem);
 *
 * A sweep ("fail the n-th operation, for n = 1, 2, … until it succeeds") ends
 * at the first n for which fault_store_fired is 0.
 *
 * Being a helper for tests it aborts when memory is out. Thread-safe, but for
 * fault_store_arm and fault_store_set_hook while operations run. */

#include "store/store.h"

typedef enum fault_op {
    FAULT_MAKE_ROOT,
    FAULT_MAKE_DIR,
    FAULT_CREATE,
    FAULT_OPEN,
    FAULT_WRITE,
    FAULT_READ,
    FAULT_SYNC,
    FAULT_CLOSE,
    FAULT_SYNC_DIR,
    FAULT_LIST,
    FAULT_RENAME_DIR,
    FAULT_RENAME_FILE,
    FAULT_PUT_NEW,
    FAULT_REMOVE_FILE,
    FAULT_REMOVE_DIR,
    FAULT_MAP,
    FAULT_N_OPS
} fault_op;

#define FAULT_BIT(op) (UINT32_C(1) << (op))
#define FAULT_ANY (FAULT_BIT(FAULT_N_OPS) - 1)
/* Those that change what a crash leaves behind. */
#define FAULT_CHANGES                                                                                                 \
    (FAULT_BIT(FAULT_MAKE_ROOT) | FAULT_BIT(FAULT_MAKE_DIR) | FAULT_BIT(FAULT_CREATE) | FAULT_BIT(FAULT_WRITE) |      \
     FAULT_BIT(FAULT_SYNC) | FAULT_BIT(FAULT_SYNC_DIR) | FAULT_BIT(FAULT_RENAME_DIR) | FAULT_BIT(FAULT_RENAME_FILE) | \
     FAULT_BIT(FAULT_PUT_NEW) | FAULT_BIT(FAULT_REMOVE_FILE) | FAULT_BIT(FAULT_REMOVE_DIR))

const char *fault_op_name(fault_op op); /* "make_root", … */

typedef enum fault_how {
    FAULT_INSTEAD = 0, /* the operation does not take place (a close does) */
    FAULT_AFTER,       /* it takes place, and the error is reported all the same */
    FAULT_TORN,        /* of a write only the first half takes place; others as FAULT_INSTEAD */
    FAULT_DIE,         /* as FAULT_INSTEAD, and the store is dead from here on */
    FAULT_DIE_AFTER,   /* it takes place, then the store is dead */
    FAULT_DIE_TORN     /* as FAULT_TORN, and the store is dead from here on */
} fault_how;

typedef struct fault_plan {
    uint32_t kinds;   /* FAULT_BITs; 0 = FAULT_ANY */
    const char *path; /* only operations one of whose paths contains this; NULL = all */
    uint64_t nth;     /* which of them, counted from arming; 0 = 1 = the first */
    uint64_t times;   /* how many in a row from there; 0 = 1, UINT64_MAX = all */
    fault_how how;
    lg_status status; /* LG_OK: from os_errno, else LG_ERR_IO */
    int os_errno;
} fault_plan;

typedef struct fault_event {
    fault_op op;
    char path[520];
    char to[520]; /* of a rename */
    uint64_t offset, bytes;
    lg_status status; /* what the caller got; set when it has ended */
    bool ended;
    bool faulty; /* the plan or a hook made it fail, or the store was dead */
} fault_event;

typedef struct fault_store fault_store;

/* Called before and after each operation, without any lock held; may use the
 * inner store. A status other than LG_OK, with `err` filled, takes the place of
 * the operation (before) or of its result (after). Not called by a dead store. */
typedef lg_status (*fault_hook)(fault_store *f, const fault_event *event, bool before, void *arg, lg_error *err);

fault_store *fault_store_new(lg_store *inner); /* inner stays the caller's */
void fault_store_free(fault_store *f);         /* its handle too */
lg_store *fault_store_handle(fault_store *f);
lg_store *fault_store_inner(fault_store *f);

void fault_store_arm(fault_store *f, fault_plan plan); /* replaces the plan, fired = 0 */
void fault_store_disarm(fault_store *f);
uint64_t fault_store_fired(fault_store *f); /* how often the plan made an operation fail */

void fault_store_set_hook(fault_store *f, fault_hook hook, void *arg); /* NULL: none */

/* From here on every operation fails with LG_ERR_IO and changes nothing, as if
 * the process had been killed. Open files must still be closed. */
void fault_store_kill(fault_store *f);
bool fault_store_dead(fault_store *f);

/* The record, in the order of the operations' starts. The array is valid until
 * the next operation. */
const fault_event *fault_store_log(fault_store *f, size_t *n);
void fault_store_log_clear(fault_store *f);
uint64_t fault_store_count(fault_store *f, uint32_t kinds); /* in the record */
/* Index of the first event at or after `from` of one of these kinds whose path
 * or target contains `path` (NULL: any); SIZE_MAX if there is none. */
size_t fault_store_find(fault_store *f, size_t from, uint32_t kinds, const char *path);
/* To stderr, for a test that failed. */
void fault_store_print(fault_store *f);

#endif
