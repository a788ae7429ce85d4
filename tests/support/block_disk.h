/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_BLOCK_DISK_H
#define LG_TESTS_BLOCK_DISK_H

/* A disk that writes down what is done to it. A process of its own serves, by
 * the kernel's FUSE protocol (no library: ten requests), a folder with two files:
 * `disk`, over which a loop device is laid, and `marks`, to which a scene writes
 * what it knows. Each write, each range made zero, each flush (the loop device
 * turns it into an fsync) and each mark is one entry of the log, in the order in
 * which the disk answered. A write is answered before the next request is taken.
 * A write that is under way while a flush is asked for may be logged before it and
 * then counts as flushed, which a real disk need not grant.
 *
 * For root only. A failure is told by a message for the caller to show or to skip
 * with; what was set up is undone. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef enum block_kind { BLOCK_WRITE, BLOCK_ZERO, BLOCK_FLUSH, BLOCK_MARK } block_kind;

typedef struct block_mark {
    uint32_t mark;
    uint32_t unused;
    uint64_t value, by;
} block_mark;

typedef struct block_entry {
    block_kind kind;
    uint64_t offset, bytes;
    const uint8_t *data; /* WRITE: into the log's mapping */
    block_mark mark;
} block_entry;

typedef struct block_disk {
    char folder[256]; /* where it is mounted */
    int disk_fd, log_fd;
    pid_t server;
} block_disk;

typedef struct block_log {
    block_entry *entries;
    size_t n;
    void *map;
    size_t map_bytes;
} block_log;

/* Serves the contents of `disk_fd` (kept open by the caller until the stop), at
 * the folder, which exists. */
bool block_disk_start(block_disk *d, const char *folder, int disk_fd, char why[256]);
/* When no loop device uses it any more: ends the server and reads the log. */
bool block_disk_stop(block_disk *d, block_log *log, char why[256]);
void block_log_free(block_log *log);

/* A loop device over a file, with sectors of this size; it goes when the last
 * descriptor and mount do. Returns a descriptor; `path` gets its name. -1: not. */
int loop_attach(int file_fd, uint32_t sector_bytes, char path[64], char why[256]);

#endif
