/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_VERIFY_H
#define LG_CORE_VERIFY_H

/* Shared by the verify*.c files only: verify.c has the folder and the threads,
 * verify_rank.c what is checked of one rank's files. */

#include "core/checkpoint.h"

/* Bytes that one thread reads at a time, into memory aligned for direct I/O. */
#define LG__VERIFY_READ ((size_t)1 << 20)

/* A file of a rank whose blocks are being checked, by several threads. */
typedef struct lg__verify_file {
    struct lg__verify_file *next_open;
    lg__shard shard;
    lg__table table;
    lg__st_header *header; /* NULL if it is damaged: then problems name no tensor */
    uint64_t step;         /* blocks that a thread takes at a time */
    uint64_t next;         /* first block that nobody took */
    uint32_t users;        /* threads that are at it */
} lg__verify_file;

typedef struct lg__verify {
    lg_checkpoint *c;
    lg_verify_options options;
    uint64_t total;
    pthread_mutex_t lock; /* for all below, and around callbacks */
    pthread_cond_t changed;
    lg_verify_result result;
    uint64_t done;
    bool cancelled;
    lg_error first;  /* problem */
    lg_error broken; /* what stops it: memory is out */
    uint32_t next_rank, preparing;
    lg__verify_file *open;
} lg__verify;

/* Counts bytes as done, `read` of them as read, and tells the caller; false if
 * all shall stop. */
bool lg__verify_count(lg__verify *v, uint64_t bytes, uint64_t read);
void lg__verify_file_seen(lg__verify *v);
void lg__verify_problem(lg__verify *v, const lg_problem *p);
/* Reports an error as a problem; true if it is none of the checkpoint's (no
 * memory) and ends everything. */
bool lg__verify_failed(lg__verify *v, const char *file, const char *tensor, uint64_t offset, uint64_t bytes,
                       const lg_error *why);

/* Checks a rank's report, tables and headers. Returns its files, whose blocks
 * are still to be checked, as a list. */
lg__verify_file *lg__verify_rank(lg__verify *v, uint32_t rank);
/* Checks blocks [first, last). buffer: LG__VERIFY_READ bytes. */
void lg__verify_blocks(lg__verify *v, const lg__verify_file *f, uint64_t first, uint64_t last, char *buffer);
void lg__verify_file_free(lg__verify_file *f);

#endif
