/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_STORE_POSIX_H
#define LG_STORE_POSIX_H

/* Shared by the posix*.c files and their tests: posix.c has the root, its
 * folders and names, posix_file.c the files' contents, posix_queue.c many
 * transfers at once. */

#include "base/error.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

/* The system calls whose failures matter most, in a table, so that tests can
 * put short, failing and lying ones in their place. Not to be changed while a
 * store is in use by another thread. */
typedef struct lg__posix_calls {
    ssize_t (*pwrite)(int fd, const void *data, size_t bytes, off_t offset);
    ssize_t (*pread)(int fd, void *data, size_t bytes, off_t offset);
    int (*fsync)(int fd);
    int (*syncfs)(int fd);
    int (*fallocate)(int fd, int mode, off_t offset, off_t bytes);
    int (*close)(int fd);
    int (*linkat)(int from_fd, const char *from, int to_fd, const char *to, int flags);
    int (*renameat)(int from_fd, const char *from, int to_fd, const char *to);
    int (*renameat2)(int from_fd, const char *from, int to_fd, const char *to, unsigned flags);
    void (*pause_ms)(unsigned ms);
    int (*open_direct)(const char *path, int flags);
    int (*cached)(int fd, uint64_t offset, uint64_t bytes, uint64_t *cached_bytes); /* 0 or an errno */
} lg__posix_calls;

extern lg__posix_calls lg__posix;
extern const lg__posix_calls lg__posix_real;

/* ------------------------------------------------------------------- errors */

/* Texts for messages; names in a root may come from a hostile file. */
#define LG__SHOWN_BYTES 600
const char *lg__posix_shown(const char *path, char buf[LG__SHOWN_BYTES]);

/* "<verb> <path>: <text of os_errno>" */
lg_status lg__posix_fail(lg_error *err, int os_errno, const char *verb, const char *path);
/* The same for an open file, where a name or argument cannot be at fault. */
lg_status lg__posix_fail_data(lg_error *err, int os_errno, const char *verb, const char *path, uint64_t offset);
lg_status lg__posix_fail_sync(lg_error *err, int os_errno, const char *path);

/* -------------------------------------------------------------------- files */

struct lg_file {
    int fd;
    bool writable;
    bool preset;            /* made as long as `reserved` before it was written */
    atomic_int direct_fd;   /* past the page cache; LG__DIRECT_UNTRIED, LG__DIRECT_NONE */
    atomic_bool *no_direct; /* the store's: was refused somewhere in it; NULL: never try */
    uint64_t bytes;         /* reading: the length when it was opened; writing: the one announced, or 0 */
    atomic_bool sync_failed;
    atomic_bool unsynced;
    atomic_uint_least64_t end; /* highest byte written */
    uint64_t reserved;
    char path[];
};

#define LG__DIRECT_UNTRIED (-2)
#define LG__DIRECT_NONE (-1)

lg_file *lg__posix_file_new(int fd, bool writable, uint64_t bytes, const char *path, atomic_bool *no_direct);
/* Reserves the announced length, and gets ready to write it past the page
 * cache if it is large. Returns an errno. */
int lg__posix_file_reserve(lg_file *f);

lg_status lg__posix_write(lg_file *f, const void *data, size_t bytes, uint64_t offset, lg_error *err);
lg_status lg__posix_read(lg_file *f, void *data, size_t bytes, uint64_t offset, lg_error *err);
lg_status lg__posix_sync(lg_file *f, lg_error *err);
lg_status lg__posix_close(lg_file *f, lg_error *err);
lg_status lg__posix_map(lg_file *f, uint64_t offset, size_t bytes, const void **data, void **base, size_t *mapped,
                        lg_error *err);
void lg__posix_unmap(void *ctx, void *base, size_t mapped);
lg_read_way lg__posix_read_way(lg_file *f, uint64_t offset, size_t bytes);

/* ---------------------------------------------------------------- transfers
 *
 * What a read or write comes to, call by call, whoever makes the calls: whole
 * blocks past the page cache where that is possible, a tail through it, short
 * ones continued, errors that may pass tried again.
 *
 *     begin; while (next) { result of the call }
 */
typedef struct lg__transfer {
    lg_file *file;
    bool write, direct;
    char *data;
    size_t bytes, done;
    uint64_t offset;
    unsigned tries;
} lg__transfer;

typedef struct lg__call { /* pread or pwrite */
    int fd;
    char *data;
    size_t bytes;
    uint64_t offset;
} lg__call;

lg_status lg__transfer_begin(lg__transfer *t, lg_file *f, bool write, void *data, size_t bytes, uint64_t offset,
                             lg_error *err);
bool lg__transfer_next(const lg__transfer *t, lg__call *call); /* false: done */
/* What the call gave: bytes moved, or minus an errno. May pause. */
lg_status lg__transfer_result(lg__transfer *t, ssize_t result, lg_error *err);

/* A sync is these two around fsync; os_errno is what that gave, or 0. */
lg_status lg__sync_begin(lg_file *f, lg_error *err);
lg_status lg__sync_end(lg_file *f, int os_errno, lg_error *err);

/* ------------------------------------------------------------------- queues */

lg_status lg__posix_queue_open(void *ctx, const lg_queue_spec *spec, lg_queue **out, lg_error *err);
lg_status lg__posix_queue_submit(lg_queue *q, const lg_queue_op *op, lg_error *err);
lg_status lg__posix_queue_wait(lg_queue *q, uint64_t *token, lg_error *err);
void lg__posix_queue_close(lg_queue *q);

#endif
