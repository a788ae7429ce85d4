/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_STORE_POSIX_H
#define LG_STORE_POSIX_H

/* The system calls whose failures matter most, in a table, so that tests can
 * put short, failing and lying ones in their place. Not to be changed while a
 * store is in use by another thread. */

#include <stddef.h>
#include <sys/types.h>

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
} lg__posix_calls;

extern lg__posix_calls lg__posix;
extern const lg__posix_calls lg__posix_real;

#endif
