/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_CHECKPOINT_H
#define LG_CORE_CHECKPOINT_H

/* An open checkpoint: its manifest, and headers, reports and tables of ranks'
 * files, read when first needed. The whole read side stands on it: load.c,
 * verify.c, view.c. Headers and tables are cached under a lock, so that loads
 * and verification may use several threads inside one call. */

#include "format/manifest.h"
#include "format/names.h"
#include "format/safetensors.h"
#include "format/sums.h"
#include "store/store.h"

#include <pthread.h>

typedef struct lg__shard { /* one file of one rank */
    char name[LG__NAME_MAX];
    uint32_t rank, number;
    lg_group group;
    uint64_t bytes;        /* from the manifest */
    lg__st_header *header; /* NULL until read; checked against its digest unless unverified */
    lg__table *table;      /* NULL until read; checked against the report */
} lg__shard;

typedef struct lg__rank_files {
    lg__report *report; /* NULL until read; digest checked against the manifest */
    lg__sums_head sums;
    lg__shard *shards;
    size_t n_shards;
} lg__rank_files;

struct lg_checkpoint {
    lg_store *store;
    bool owns_store;
    char folder[LG__NAME_MAX]; /* in the store */
    lg__manifest *m;
    lg__rank_files *ranks; /* world entries */
    pthread_mutex_t lock;
    /* strings handed out by lg_checkpoint_global_… */
    lg__arena *handed_out;
};

/* Opens `folder` of `store` (borrowed unless own). With manifest == NULL reads
 * lastgood.json, else takes these bytes (they came from another rank).
 * A tombstone is LG_ERR_NOT_FOUND. Checks nothing but the manifest. */
lg_status lg__checkpoint_open_in(lg_store *store, bool own, const char *folder, const char *manifest,
                                 size_t manifest_bytes, lg_checkpoint **out, lg_error *err);

/* Is every file that the manifest lists there with its size? By one listing of
 * the folder. LG_ERR_NOT_WHOLE names the first that is not. */
lg_status lg__checkpoint_check_whole(lg_checkpoint *c, lg_error *err);

/* These read on first use and keep; with verify, digests are checked. */
lg_status lg__checkpoint_report(lg_checkpoint *c, uint32_t rank, const lg__report **out, lg_error *err);
lg_status lg__checkpoint_header(lg_checkpoint *c, lg__shard *s, bool verify, const lg__st_header **out, lg_error *err);
lg_status lg__checkpoint_table(lg_checkpoint *c, lg__shard *s, const lg__table **out, lg_error *err);
/* The shard that holds box `number` of `name` on `rank` and its entry in it:
 * file `number` of the group first, then the group's further files. */
lg_status lg__checkpoint_locate(lg_checkpoint *c, uint32_t rank, lg_group file_group, const char *key,
                                const lg__region *box, lg_dtype dtype, uint32_t number, bool verify, lg__shard **shard,
                                const lg__st_tensor **entry, lg_error *err);

/* Keys inside raw files. */
#define LG__RAW_TENSOR_PREFIX "t:"
#define LG__RAW_BYTES_PREFIX "b:"

/* Is the status one that makes resume step back (damage), rather than a
 * mistake of the caller or trouble of the machine? CORRUPT, FORMAT, NOT_WHOLE,
 * COVERAGE, NOT_FOUND of a listed file, IO while reading. */
bool lg__status_is_damage(lg_status status);

/* load.c: what one rank wants, for lg_load and lg_resume. */
struct lg_load {
    lg_checkpoint *c;
    uint32_t flags;
    struct lg__wanted *wanted;
    size_t n_wanted, cap_wanted;
    char **missing; /* optional targets that are not there */
    size_t n_missing, cap_missing;
    uint64_t bytes_loaded, tensors_loaded;
    /* where the calls for verification and read buffers get their memory cap */
    uint64_t buffer_bytes;
};

#endif
