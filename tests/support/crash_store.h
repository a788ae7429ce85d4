/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_CRASH_STORE_H
#define LG_TESTS_CRASH_STORE_H

/* A store in memory that writes down every operation that changes something,
 * with its data, whichever rank or session made it. crash_disk.h tells from the
 * record what a power cut at any moment may leave; each such tree can be booted
 * into a new store, and opened.
 *
 *     crash_store *s = crash_store_new(CRASH_CAPS);
 *     … run sessions on crash_store_handle(s), or on "crash:NAME" …
 *     crash_store_mark(s, MY_MARK, 17, 0);   // what the scene knows, in the record
 *     … crash_disk_new(s) …
 *     crash_store_free(s);
 *
 * Faults are those of a fault_store on top. Being a helper for tests it aborts
 * when memory is out. Thread-safe; the record is the order in which operations
 * took place. */

#include "store/store.h"

/* What it can do; less some bits for file systems that cannot. */
#define CRASH_CAPS \
    (LG_CAP_RENAME_DIR | LG_CAP_NO_REPLACE | LG_CAP_SYNC_DIR | LG_CAP_RANGE_READ | LG_CAP_CONDITIONAL_CREATE)

typedef enum crash_kind {
    CRASH_LINK,   /* `name` in folder `dir` is `inode` from here on */
    CRASH_UNLINK, /* it is no longer */
    CRASH_RENAME, /* `name` becomes `to` in the same folder, in one step */
    CRASH_WRITE,
    CRASH_SYNC,     /* of a file's contents and length */
    CRASH_SYNC_DIR, /* of a folder's names */
    CRASH_MARK      /* nothing happened to the disk; the scene says something */
} crash_kind;

#define CRASH_ROOT 0u /* the root's inode */

typedef struct crash_event {
    crash_kind kind;
    uint32_t dir, inode;
    bool is_dir; /* LINK: the inode is a folder */
    char *name, *to;
    uint64_t offset;
    uint8_t *data;
    size_t bytes;
    uint32_t mark; /* MARK: the scene's own words */
    uint64_t value, by;
} crash_event;

typedef struct crash_store crash_store;

crash_store *crash_store_new(uint32_t caps);
void crash_store_free(crash_store *s);
lg_store *crash_store_handle(crash_store *s);
/* Another handle on the same store, for who frees the one it was given. */
lg_store *crash_store_another(crash_store *s);
uint32_t crash_store_caps(const crash_store *s);

/* Off: nothing is written down from here on. */
void crash_store_record(crash_store *s, bool on);
void crash_store_mark(crash_store *s, uint32_t mark, uint64_t value, uint64_t by);
/* Valid until the next operation. */
const crash_event *crash_store_events(crash_store *s, size_t *n);

/* To stderr: events [from, to). */
void crash_events_print(const crash_event *events, size_t from, size_t to);

/* For trees that are built by hand: a folder, a file with these contents; both
 * as durable as if they had always been there. `folder` "" is the root. */
void crash_store_put_dir(crash_store *s, const char *name);
void crash_store_put_file(crash_store *s, const char *folder, const char *name, const void *data, size_t bytes);

#endif
