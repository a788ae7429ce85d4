/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_BENCH_RAW_H
#define LG_CLI_BENCH_RAW_H

/* The limits: the device by plain calls of the operating system, memory by
 * memcpy. Nothing of lastgood moves these bytes. */

#include "bench_rows.h"

#define BENCH_BLOCK ((size_t)1 << 20) /* bytes of one transfer */
#define BENCH_DEPTH 4                 /* transfers under way */

/* Writes `bytes` of `data` into a new file: preallocated, BENCH_DEPTH blocks under
 * way, O_DIRECT where `direct`, synced. `bytes` is a multiple of BENCH_BLOCK, `data`
 * aligned to 4096. */
lg_status bench_raw_write(const char *path, const void *data, uint64_t bytes, bool direct, bench_sample *out,
                          lg_error *err);

/* Reads `bytes` at `offset`, both multiples of 4096, in the same way; from
 * opening the file on. */
lg_status bench_raw_read(const char *path, uint64_t offset, uint64_t bytes, bool direct, bench_sample *out,
                         lg_error *err);

/* Drops the file from the page cache; it has been synced. */
void bench_raw_drop(const char *path);

/* Whether files in the folder can be written past the page cache. */
bool bench_raw_direct(const char *folder);

/* Copies `bytes` between two places that do not overlap, by `threads` threads, a
 * contiguous piece each. */
lg_status bench_copy(void *to, const void *from, size_t bytes, unsigned threads, bench_sample *out, lg_error *err);

/* Drops the files of a folder, and of folders in it, from the page cache.
 * Returns the part of the largest file that is in the cache nevertheless (0 to
 * 1). The files have been synced. */
double bench_cache_drop(const char *folder);
/* Brings them into it. */
lg_status bench_cache_fill(const char *folder, lg_error *err);

#endif
