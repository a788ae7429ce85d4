/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_BENCH_PLACE_H
#define LG_CLI_BENCH_PLACE_H

/* Where a benchmark works, what room there is, and what machine it is. */

#include "cli.h"

/* Its own folder: "PATH/.lastgood-bench-XXXXXX". Nothing else in PATH is touched. */
#define BENCH_FOLDER_PREFIX ".lastgood-bench-"

/* Makes the folder; *out is malloc'ed. */
lg_status bench_folder_make(const char *path, char **out, lg_error *err);

/* Removes the folder with all that is in it. Follows no link, and goes on while a
 * process that was just killed may still have put something there. */
lg_status bench_folder_remove(const char *folder, lg_error *err);

/* Removes the step folders in a root of the benchmark's own. */
lg_status bench_steps_remove(const char *root, lg_error *err);

/* Folders that earlier benchmarks left (they were killed together with what
 * cleans up after them): how many, and the name of one. */
size_t bench_folder_leftovers(const char *path, char name[256]);

typedef struct bench_machine {
    char cpu[128];           /* "" where it is not known; so are the others */
    unsigned cpus;           /* that this process may use */
    uint64_t memory_bytes;   /* of the machine */
    uint64_t memory_usable;  /* now, for this process; counts its control groups */
    char kernel[160];        /* "Linux 6.18.44 x86_64" */
    char file_system[64];    /* "ext4" */
    char device[256];        /* "/dev/nvme0n1p2", "host:/export" */
    char device_model[128];  /* "Samsung SSD 990 PRO" */
    bool rotational;         /* a disk that turns */
    bool in_memory;          /* tmpfs, ramfs: there is no device */
    bool remote;             /* NFS and its like: reads may come from a server's cache */
    uint64_t space;          /* free bytes for this user */
    const char *io, *direct; /* LASTGOOD_IO, LASTGOOD_DIRECT; "auto" */
    int uring_errno;         /* 0: the kernel permits io_uring; else why not */
} bench_machine;

lg_status bench_machine_look(const char *path, bench_machine *out, lg_error *err);

#endif
