/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_IO_URING_H
#define LG_IO_URING_H

/* Linux's io_uring: many reads, writes and syncs of descriptors under way at
 * once, from one thread, with memory that the kernel knows beforehand. A ring
 * lives as long as one save or load, belongs to the thread that made it, and is
 * of no use to a child process. What to do about short and failed transfers is
 * the caller's business. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct lg__uring lg__uring;

typedef enum lg__uring_kind { LG__URING_READ, LG__URING_WRITE, LG__URING_SYNC } lg__uring_kind;

typedef struct lg__uring_op {
    lg__uring_kind kind;
    int fd;
    void *data;
    size_t bytes; /* at most 1 GiB */
    uint64_t offset;
    uint64_t token;
} lg__uring_op;

/* Does this kernel, in this container, have it, with all we need? Tried once. */
bool lg__uring_works(void);

/* All return 0 or an errno. `memory` (aligned to a page, may be NULL) is
 * registered if the kernel lets us. */
int lg__uring_new(uint32_t depth, void *memory, size_t bytes, lg__uring **out);
int lg__uring_begin(lg__uring *r, const lg__uring_op *op); /* at most `depth` at once */
/* Waits for one. *result: bytes moved (0 for a sync), or minus an errno. */
int lg__uring_wait(lg__uring *r, uint64_t *token, int *result);
void lg__uring_free(lg__uring *r); /* waits for what is under way */

/* Tests: what a kernel may do. Not to be changed while a ring is in use. */
typedef struct lg__uring_odds {
    int refuse;                   /* making a ring fails with this errno */
    bool unregistered;            /* memory cannot be registered */
    size_t (*most)(size_t bytes); /* moves so many bytes, not all */
    int (*answer)(int result);    /* changes a result */
} lg__uring_odds;
extern lg__uring_odds lg__uring_odd;

#endif
