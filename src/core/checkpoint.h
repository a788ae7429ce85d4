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
    size_t index;          /* among the rank's files: by group, then number, as in the report */
    lg__st_header *header; /* NULL until read; checked against its digest unless unverified */
    bool header_verified;
    lg__table *table; /* NULL until read; checked against the report */
} lg__shard;

typedef struct lg__rank_files {
    lg__report *report; /* its files only; NULL until read; digest checked against the manifest */
    lg__sums_head sums;
    lg__shard *shards; /* NULL until asked for by lg__checkpoint_rank */
    size_t n_shards;
} lg__rank_files;

/* A converted value of global state, kept so that asking twice costs once. */
typedef struct lg__handed_out {
    struct lg__handed_out *next;
    const char *key;
    bool is_json;
    const char *data;
    size_t bytes;
} lg__handed_out;

struct lg_checkpoint {
    lg_store *store;
    bool owns_store;
    char folder[LG__NAME_MAX]; /* in the store */
    lg__manifest *m;
    bool borrows_manifest;
    lg__rank_files *ranks; /* world entries */
    pthread_mutex_t lock;
    size_t cached_bytes;  /* estimate of headers and tables kept */
    uint64_t *first_file; /* world + 1 entries: how many listed files lie before each rank's; NULL until needed */
    /* strings handed out by lg_checkpoint_global_… */
    lg__arena *handed_out;
    lg__handed_out *values;
    const char **keys; /* of global state, sorted; NULL until needed */
};

/* Opens `folder` of `store` (borrowed unless own). With manifest == NULL reads
 * lastgood.json, else takes these bytes (they came from another rank).
 * A tombstone is LG_ERR_NOT_FOUND. Checks nothing but the manifest. On failure
 * the store stays the caller's even with `own`. */
lg_status lg__checkpoint_open_in(lg_store *store, bool own, const char *folder, const char *manifest,
                                 size_t manifest_bytes, lg_checkpoint **out, lg_error *err);

/* The same with a manifest that was decoded already; it is the checkpoint's from
 * here on unless this fails. */
lg_status lg__checkpoint_open_decoded(lg_store *store, bool own, const char *folder, lg__manifest *m,
                                      lg_checkpoint **out, lg_error *err);

/* Is every file that the manifest lists there with its size? By one listing of
 * the folder. LG_ERR_NOT_WHOLE names the first that is not. */
lg_status lg__checkpoint_check_whole(lg_checkpoint *c, lg_error *err);

/* The files of `rank` (below world): names and sizes, from the manifest alone. */
lg_status lg__checkpoint_rank(lg_checkpoint *c, uint32_t rank, lg__rank_files **out, lg_error *err);

/* These read on first use and keep; with verify, digests are checked. What
 * they give stays valid until lg__checkpoint_forget or close. */
lg_status lg__checkpoint_report(lg_checkpoint *c, uint32_t rank, const lg__report **out, lg_error *err);
lg_status lg__checkpoint_header(lg_checkpoint *c, lg__shard *s, bool verify, const lg__st_header **out, lg_error *err);
lg_status lg__checkpoint_table(lg_checkpoint *c, lg__shard *s, const lg__table **out, lg_error *err);
/* The shard that holds box `number` of `name` on `rank` and its entry in it:
 * file `number` of the group first, then the group's further files. */
lg_status lg__checkpoint_locate(lg_checkpoint *c, uint32_t rank, lg_group file_group, const char *key,
                                const lg__region *box, lg_dtype dtype, uint32_t number, bool verify, lg__shard **shard,
                                const lg__st_tensor **entry, lg_error *err);

/* Frees the headers and tables kept for `rank` when all that are kept pass
 * LG__CACHE_MAX, so that one process can read a checkpoint of thousands of
 * ranks. Not while another thread uses them. */
#define LG__CACHE_MAX ((size_t)64 << 20)
void lg__checkpoint_forget(lg_checkpoint *c, uint32_t rank);

/* The same reads without the cache, for verification: the caller frees. `file`
 * is open on the shard; with table == NULL the header is parsed unverified. */
lg_status lg__read_report(lg_checkpoint *c, uint32_t rank, lg__report **report, lg__sums_head *sums, lg_error *err);
lg_status lg__read_table(lg_checkpoint *c, const lg__report *report, const lg__shard *s, lg__table *out, lg_error *err);
lg_status lg__read_header(lg_checkpoint *c, const lg__shard *s, lg_file *file, const lg__table *table,
                          lg__st_header **out, lg_error *err);

/* Opens a file of the step folder for reading. One that is absent, no regular
 * file, or of another length than `bytes` is LG_ERR_NOT_WHOLE. */
lg_status lg__checkpoint_open_file(lg_checkpoint *c, const char *name, uint64_t bytes, lg_file **out, lg_error *err);

/* Is `entry` of `s` exactly this box? Raw files may leave out offsets of 0. */
bool lg__entry_is_box(const lg__shard *s, const lg__st_tensor *entry, const lg__region *box, lg_dtype dtype);

/* Box `number` of `t` on `rank`, from the manifest. */
lg_status lg__checkpoint_box(lg_checkpoint *c, const lg__manifest_tensor *t, uint32_t rank, uint32_t number,
                             lg__region *out, lg_error *err);
/* The entry that holds the bytes of `t`: itself, or the tensor that an alias
 * without bytes of its own is tied to. */
const lg__manifest_tensor *lg__checkpoint_stored(lg_checkpoint *c, const lg__manifest_tensor *t);
/* The key of `t` in its files; `out` needs LG__KEY_MAX bytes. */
#define LG__KEY_MAX (LG_MAX_NAME + 3)
const char *lg__checkpoint_key(lg_checkpoint *c, const lg__manifest_tensor *t, lg_group *file_group, char *out);
/* The stored boxes that touch `region`, as lg__layout_touch; irregular ones
 * too. per_rank copies: only those of `copy_of`, or all with UINT32_MAX. */
lg_status lg__checkpoint_touch(lg_checkpoint *c, const lg__manifest_tensor *t, const lg__region *region,
                               uint32_t copy_of, lg__touch_fn fn, void *arg, lg_error *err);
/* Whose copy of a tensor that is kept per rank `rank` of `world` gets: its own
 * on the same number of ranks, else the first rank's. world == 0: the first. */
uint32_t lg__checkpoint_copy_of(lg_checkpoint *c, const lg__manifest_tensor *t, uint32_t rank, uint32_t world);

/* LG_ERR_MISSING for a name, with a hint at a similar one. */
lg_status lg__checkpoint_missing(lg_checkpoint *c, const char *name, lg_error *err);
/* offset and extent both NULL: the whole tensor; one alone or a region that
 * does not fit is LG_ERR_INVALID. */
lg_status lg__checkpoint_region(const lg__manifest_tensor *t, const uint64_t *offset, const uint64_t *extent,
                                lg__region *out, lg_error *err);

/* Names that the manifest lists, for comparing with a folder. */
typedef struct lg__listed {
    const char *name;
    uint64_t bytes;
    bool found;
} lg__listed;
/* All of them (ranks' files, sums, attached), sorted by name, from `arena`. */
lg_status lg__checkpoint_listed(lg_checkpoint *c, lg__arena *arena, lg__listed **out, size_t *n, lg_error *err);
lg__listed *lg__listed_find(lg__listed *all, size_t n, const char *name);

/* Keys inside raw files. */
#define LG__RAW_TENSOR_PREFIX "t:"
#define LG__RAW_BYTES_PREFIX "b:"

/* Is the status one that makes resume step back (damage), rather than a
 * mistake of the caller or trouble of the machine? CORRUPT, FORMAT, NOT_WHOLE,
 * COVERAGE, NOT_FOUND of a listed file, IO while reading. */
bool lg__status_is_damage(lg_status status);

/* ---- load.c: what one rank wants, for lg_load and lg_resume. */

typedef struct lg__wanted { /* one target */
    const char *name;
    const lg__manifest_tensor *stored; /* holds the bytes */
    uint64_t bytes;                    /* wanted */
    uint64_t planned;                  /* elements that stored boxes cover */
    uint64_t elements;
    uint64_t done;    /* bytes delivered */
    uint32_t copy_of; /* of a tensor kept per rank: whose copy; UINT32_MAX: by lg__checkpoint_copy_of */
} lg__wanted;

typedef struct lg__part { /* a region of a target, and the memory it goes to */
    size_t wanted;
    const uint64_t *offset, *size; /* global */
    char *data;                    /* of the element at mem_origin */
    const uint64_t *mem_origin, *mem_size;
    const int64_t *strides; /* or NULL: see lg__run_walk */
} lg__part;

struct lg_load {
    lg_checkpoint *c;
    uint32_t flags;
    uint32_t rank, world; /* who loads, for tensors kept per rank; 0, 0: takes the first rank's */
    lg__arena *arena;     /* owns names and arrays */
    lg__wanted *wanted;
    size_t n_wanted, cap_wanted;
    lg__part *parts;
    size_t n_parts, cap_parts;
    char **missing; /* optional targets that are not there; lg__strdup'ed */
    size_t n_missing, cap_missing;
    uint64_t bytes_loaded, tensors_loaded; /* by the last successful run, and the rounds before it */
    uint64_t bytes_before, tensors_before; /* by those rounds */
    uint32_t round;                        /* of a resume */
    bool again;                            /* one more is wanted */
    uint64_t buffer_bytes;                 /* cap of read buffers; 0 = 64 MiB */
};

/* Nothing is planned or delivered yet; everything wanted was, which makes the
 * numbers of what was loaded. Between them come the bytes. */
void lg__load_reset(lg_load *load);
/* What was read is the caller's; the targets of the next round come. */
void lg__load_next(lg_load *load);
lg_status lg__load_check(lg_load *load, lg_error *err);

/* load_plan.c: finds the stored boxes of all parts and reads them, file by
 * file. */
lg_status lg__load_parts(lg_load *load, lg_error *err);

/* ---- load_read.c: reading parts of boxes, block by block, checked */

typedef struct lg__fetch {
    lg__shard *shard;
    const lg__st_tensor *entry;
    const char *name;           /* for messages */
    lg__part to;                /* the part of the box that is wanted, and its memory */
    const uint64_t *box_offset; /* global; its size is entry->shape */
    /* set by lg__fetch_run */
    uint64_t begin, end; /* bytes of the file's data that it spans */
    bool one_run;        /* these bytes go to one range of memory as they are, */
    int64_t run_to;      /* which is so far behind to.data */
    uint64_t *done;      /* grows by the bytes delivered */
} lg__fetch;

/* Reads all fetches (sorts them). Whole blocks are read, each checked before
 * its bytes count as delivered, in ranges of at most `buffer_bytes`. */
lg_status lg__fetch_run(lg_checkpoint *c, lg__fetch *fetches, size_t n, bool verify, uint64_t buffer_bytes,
                        lg_error *err);

/* LG_ERR_CORRUPT for block `block` of a file whose data starts at data_start. */
lg_status lg__block_error(lg_checkpoint *c, const lg__shard *s, uint64_t data_start, uint64_t block, uint32_t found,
                          uint32_t expected, const char *tensor, lg_error *err);

#endif
