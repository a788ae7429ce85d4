/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LASTGOOD_LASTGOOD_H
#define LASTGOOD_LASTGOOD_H

/* lastgood: training checkpoints in shards, and runs that resume from the last
 * good one.
 *
 * A *root* is a directory (or, for tests and threads, memory) that holds the
 * checkpoints of one run. A *checkpoint* is one step folder in it: ordinary
 * safetensors files, one set for each rank, and a manifest that says which
 * file holds what. A checkpoint exists once it is *committed*: durable, whole,
 * and visible under its final name, all at once.
 *
 * Three levels, each enough on its own:
 *
 *   simple    one process writes tensors and reads them back;
 *   session   a training run: open, resume, train, save, close, on any number
 *             of ranks;
 *   advanced  saving in the background (background.h), how a tensor is cut over
 *             ranks (layout.h), regions, listing, verifying, retention,
 *             rollback, views without copying (checkpoint.h), random numbers
 *             and the position in the data (sampler.h). They are included
 *             at the end.
 *
 * Rules that hold everywhere:
 *
 *  - Every function that may fail returns an lg_status and takes, last, an
 *    lg_error that it fills on failure; NULL is allowed. Outputs are set on
 *    success only. The library never prints, exits or aborts.
 *  - Strings are UTF-8 and NUL-terminated. Sizes are bytes, shapes and offsets
 *    are elements, strides are bytes, times are milliseconds.
 *  - Handles are not thread-safe; different handles may be used by different
 *    threads. Functions marked *collective* are called by all ranks of the
 *    session's communicator in the same order; all ranks get the same result.
 *  - xxx_close(NULL) and xxx_free(NULL) do nothing.
 *  - Option structs start with their own size; set them up with the LG_…_INIT
 *    macro so that fields added later get their default.
 */

#include <lastgood/status.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LG_VERSION_MAJOR 0
#define LG_VERSION_MINOR 1
#define LG_VERSION_PATCH 0

/* "0.1.0"; static storage. */
LG_API const char *lg_version(void);

#define LG_MAX_NDIM 32     /* dimensions of a tensor */
#define LG_MAX_NAME 4096   /* bytes of a tensor's or key's name */
#define LG_MAX_MESH_NDIM 8 /* axes of a mesh */
#define LG_MAX_SPLITS 16   /* splits of a layout */

/* ================================================================== simple */

/* Which family of shard files a tensor goes to. The model's tensors keep their
 * bare names so that PyTorch and transformers read the step folder as it is;
 * all others (optimizer, averages) go to LG_GROUP_OPTIM. LG_GROUP_RAW is only
 * reported, never asked for: per-rank state and dtypes that PyTorch's reader
 * does not know. */
typedef enum lg_group { LG_GROUP_MODEL = 0, LG_GROUP_OPTIM = 1, LG_GROUP_RAW = 2, LG_GROUP_COUNT = 3 } lg_group;

LG_API const char *lg_group_name(lg_group group); /* "model", "optim", "raw" */

typedef struct lg_layout lg_layout; /* how a tensor is cut over ranks; layout.h */

/* One box of a tensor, for tensors whose boxes follow no rule. */
typedef struct lg_box {
    const uint64_t *offset; /* elements, ndim entries */
    const uint64_t *size;   /* elements, ndim entries */
    const void *data;       /* first element of the box on this rank */
    const int64_t *strides; /* bytes, ndim entries; NULL = packed row-major */
} lg_box;

enum {
    /* May differ between ranks that hold it (running statistics, averages):
     * when it does, every rank's own copy is kept. Without this flag a
     * difference between ranks is an error that names tensor and ranks. */
    LG_TENSOR_BUFFER = 1u << 0,
    /* lg_load_tensor: leave the destination alone when the checkpoint lacks
     * the tensor; the load's report lists it. */
    LG_TENSOR_OPTIONAL = 1u << 1,
    /* lg_load_tensor: of a tensor that is kept per rank, take the copy of the
     * target's `rank`; without this flag the first rank's is taken, or at
     * resume on the same number of ranks one's own. No effect on others. */
    LG_TENSOR_COPY_OF_RANK = 1u << 2,
    /* lg_save_launch: the memory changes only between lg_session_fence and the
     * next launch (parameters and optimizer state, which only the optimizer's
     * update changes), so it may be copied after the launch has returned. Never
     * for what may change earlier: batch statistics, averages, anything that a
     * forward pass writes. */
    LG_TENSOR_LAZY = 1u << 3,
    /* lg_save_launch: the memory stays as it is until the save has ended
     * (lg_session_wait, or the next launch that is not skipped), such as host
     * memory that a device's was copied into. If nothing else is lazy, the fence
     * does not wait for it, and it is written from where it lies, without a copy
     * of the whole. */
    LG_TENSOR_KEPT = 1u << 4
};

/* A tensor to save: what it is globally, and the part this rank holds.
 *
 * The part is, by `layout` and `boxes`:
 *   both NULL        the whole tensor, on every rank that adds it. The ranks'
 *                    contents are compared by SHA-256; one rank writes.
 *   layout (splits)  the rank's part under the layout. Where a layout leaves a
 *                    rank several intervals of a dimension, the local tensor
 *                    is their concatenation in order.
 *   layout (flat)    the rank's range of the flat buffer that falls into this
 *                    tensor: `data` points to the first such element, packed,
 *                    one-dimensional; `strides` is NULL.
 *   boxes            `n_boxes` boxes that follow no rule; `data`, `strides`
 *                    and `local_shape` are NULL.
 *
 * Memory stays the caller's and must not change until lg_save_commit returns,
 * or lg_save_launch, or for LG_TENSOR_LAZY lg_session_fence, or for
 * LG_TENSOR_KEPT until the save has ended.
 * Names: UTF-8 without control characters, not empty, not "__metadata__". */
typedef struct lg_tensor {
    size_t size; /* sizeof(lg_tensor); LG_TENSOR_INIT sets it */
    const char *name;
    lg_dtype dtype;
    lg_group group;
    uint32_t ndim;
    const uint64_t *shape;       /* global, elements, ndim entries */
    const void *data;            /* this rank's part */
    const int64_t *strides;      /* bytes, ndim entries; NULL = packed row-major */
    const uint64_t *local_shape; /* checked against the layout when not NULL */
    const lg_layout *layout;
    uint64_t flat_offset; /* flat layouts: where the tensor starts, elements */
    const lg_box *boxes;
    size_t n_boxes;
    uint32_t flags;
} lg_tensor;

#define LG_TENSOR_INIT                                                                                  \
    {                                                                                                   \
        sizeof(lg_tensor), NULL, LG_F32, LG_GROUP_MODEL, 0, NULL, NULL, NULL, NULL, NULL, 0, NULL, 0, 0 \
    }

/* In lg_resume: the rank that loads. Elsewhere there is none, and a target with
 * a layout must name one. */
#define LG_RANK_SELF UINT32_MAX

/* A tensor, or a region of one, to be loaded into memory of the caller.
 *
 * `offset`/`extent` choose the region (both NULL: all of it). With a `layout`
 * instead, the region is the part that the layout gives `rank`; the
 * destination is laid out as for saving. The dtype must be the stored one:
 * nothing is ever converted silently. */
typedef struct lg_target {
    size_t size; /* sizeof(lg_target); LG_TARGET_INIT sets it */
    const char *name;
    lg_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape;  /* expected global shape */
    const uint64_t *offset; /* elements, or NULL */
    const uint64_t *extent; /* elements, or NULL */
    const lg_layout *layout;
    uint32_t rank; /* with layout: whose part; with LG_TENSOR_COPY_OF_RANK: whose copy */
    uint64_t flat_offset;
    void *data;
    const int64_t *strides; /* bytes; NULL = packed row-major */
    uint32_t flags;         /* LG_TENSOR_OPTIONAL, LG_TENSOR_COPY_OF_RANK */
} lg_target;

#define LG_TARGET_INIT                                                                             \
    {                                                                                              \
        sizeof(lg_target), NULL, LG_F32, 0, NULL, NULL, NULL, NULL, LG_RANK_SELF, 0, NULL, NULL, 0 \
    }

/* Writes one checkpoint from one process: opens `root`, saves `n` tensors
 * (whole ones) as `step`, commits, closes. `root` is a path or a URI ("file:…",
 * "mem:…"); it is made if its parent exists. A root that already holds
 * checkpoints gets another one; that of a training run (the last session there was
 * opened without LG_SESSION_PLAIN) is LG_ERR_PROTECTED.
 *
 *     float w[2][3] = {{0, 1, 2}, {3, 4, 5}};
 *     uint64_t shape[] = {2, 3};
 *     lg_tensor t = LG_TENSOR_INIT;
 *     t.name = "w", t.ndim = 2, t.shape = shape, t.data = w;
 *     lg_error err = LG_ERROR_INIT;
 *     if (lg_write("runs/a", 500, &t, 1, &err) != LG_OK) puts(err.message);
 */
LG_API lg_status lg_write(const char *root, uint64_t step, const lg_tensor *tensors, size_t n, lg_error *err);

/* Reads `n` tensors or regions from `where` (a root: the newest good
 * checkpoint, by its manifest and the sizes of its files; a step folder; or
 * ROOT@STEP) and verifies every byte it uses: damage found there is an error, no
 * older checkpoint is taken (lg_resume does that). `step`, when not NULL, gets
 * the step that was read.
 *
 *     float row[3];
 *     uint64_t off[] = {1, 0}, ext[] = {1, 3};
 *     lg_target t = LG_TARGET_INIT;
 *     t.name = "w", t.ndim = 2, t.shape = shape, t.offset = off, t.extent = ext;
 *     t.data = row;
 *     lg_read("runs/a", &t, 1, NULL, &err);
 */
LG_API lg_status lg_read(const char *where, const lg_target *targets, size_t n, uint64_t *step, lg_error *err);

/* ================================================================= session */

/* A training run in ten lines:
 *
 *     lg_comm *comm;
 *     lg_mpi_comm_create(MPI_COMM_WORLD, &comm, &err);         // lastgood/mpi.h
 *     lg_session_options o = LG_SESSION_OPTIONS_INIT;
 *     o.comm = comm, o.keep_last = 3;
 *     lg_session *s;
 *     lg_session_open("runs/a", &o, &s, &err);
 *     lg_resume_result *r;
 *     lg_status st = lg_resume(s, NULL, my_targets, my_model, &r, &err);
 *     if (st == LG_ERR_EMPTY) init_weights(my_model);          // a new run
 *     else if (st != LG_OK) fail(err.message);                 // never start over
 *     for (step = …; step < total; ) {
 *         train(++step);
 *         if (step % 500 == 0) {
 *             lg_save *save;
 *             lg_save_begin(s, step, NULL, &save, &err);
 *             for each tensor: lg_save_tensor(save, &t, &err);
 *             lg_save_global_u64(save, "samples", consumed, &err);
 *             lg_save_commit(save, &info, &err);               // collective
 *         }
 *     }
 *     lg_session_close(s, &err);
 */

typedef struct lg_comm lg_comm;   /* ranks that save and load together */
typedef struct lg_store lg_store; /* where the bytes are; backend.h */
typedef struct lg_session lg_session;
typedef struct lg_save lg_save;
typedef struct lg_load lg_load;
typedef struct lg_checkpoint lg_checkpoint;
typedef struct lg_kv lg_kv; /* a key-value store that ranks share; backend.h */

/* Owner epoch and serial; a later one is newer, whatever the steps say. */
typedef struct lg_generation {
    uint64_t epoch;
    uint64_t serial;
} lg_generation;

/* -1, 0, 1 as a is older than, the same as, or newer than b. */
LG_API int lg_generation_compare(lg_generation a, lg_generation b);

#define LG_RUN_ID_TEXT 33  /* 32 hex digits and NUL */
#define LG_DIGEST_TEXT 65  /* SHA-256 in hex and NUL */
#define LG_CREATED_TEXT 21 /* "2026-11-29T18:31:57Z" and NUL */

enum {
    /* Save into a root with checkpoints that this session did not resume from:
     * a new run with a new run id. Refused without this flag. */
    LG_SESSION_NEW_RUN = 1u << 0,
    /* Read only: claims nothing, writes nothing, cannot save. */
    LG_SESSION_READ_ONLY = 1u << 1,
    /* For one save by itself, as lg_write makes: opening is LG_ERR_PROTECTED where
     * the root was last claimed without this flag, by a training run, which would
     * lose it. */
    LG_SESSION_PLAIN = 1u << 2,
    LG_SESSION_TAKE_OVER = 1u << 3 /* with LG_SESSION_PLAIN: even there */
};

typedef struct lg_session_options {
    size_t size;     /* LG_SESSION_OPTIONS_INIT sets it */
    lg_comm *comm;   /* NULL: this process alone. Stays the caller's. */
    lg_store *store; /* NULL: by URI. Stays the caller's. */
    uint32_t flags;
    uint64_t deadline_ms;    /* longest wait for other ranks; 0 = 600000 */
    uint32_t keep_last;      /* retention: the last N; 0 = keep all */
    uint64_t keep_every;     /* and every K-th step; 0 = none */
    uint32_t check_replicas; /* compare declared replicas at every K-th save; 0 = never */
    uint64_t block_bytes;    /* checksum block: power of two in [4096, 64 MiB]; 0 = 65536 */
    uint64_t buffer_bytes;   /* cap of staging memory a process; 0 = 64 MiB, at least 1 MiB */
    const char *domain;      /* failure domain of this rank; NULL = host name */
    /* lg_save_launch: cap of the copy of this rank's part that a save in the
     * background needs; 0 = one copy. Where the part does not fit, it is copied
     * in windows as the files are written. */
    uint64_t staging_bytes;
    /* How ranks learn of each other's background saves; NULL: through files in
     * the folder that is being written. Stays the caller's. */
    lg_kv *kv;
} lg_session_options;

#define LG_SESSION_OPTIONS_INIT                                                    \
    {                                                                              \
        sizeof(lg_session_options), NULL, NULL, 0, 0, 0, 0, 0, 0, 0, NULL, 0, NULL \
    }

/* Collective. Opens `root` for a run. Unless read-only: makes the folder when
 * its parent exists, claims an owner epoch (an earlier session that still runs
 * fails its next save as LG_ERR_SUPERSEDED) and ends attempts that earlier
 * owners left unfinished. */
LG_API lg_status lg_session_open(const char *root, const lg_session_options *options, lg_session **out, lg_error *err);

/* Frees a session; every rank closes its own. Waits for a save in the background
 * (at most the session's deadline) and returns its error if no call has told it
 * yet. LG_ERR_TIMEOUT names what may be lost; it then still runs, so that a store
 * or key-value store of the caller must stay. The handle is gone whatever the
 * result. In a child of fork it does nothing. */
LG_API lg_status lg_session_close(lg_session *session, lg_error *err);

LG_API uint64_t lg_session_epoch(const lg_session *session); /* 0 if read-only */

/* How far a save in the background is, on this rank. Only LG_PHASE_COMMITTED
 * means that it is durable. */
typedef enum lg_save_phase {
    LG_PHASE_NONE = 0,      /* none was launched */
    LG_PHASE_STAGING = 1,   /* the trainer's memory is being copied */
    LG_PHASE_WRITING = 2,   /* staged: the memory is the trainer's again */
    LG_PHASE_WAITING = 3,   /* written: waits for other ranks, or for the coordinator */
    LG_PHASE_COMMITTED = 4, /* durable on all ranks */
    LG_PHASE_FAILED = 5
} lg_save_phase;

LG_API const char *lg_save_phase_name(lg_save_phase phase); /* "none", "staging", … */

/* What a session has done, for logs and status pages. */
typedef struct lg_session_status {
    uint64_t saves_committed;
    uint64_t saves_failed;
    uint64_t removed;          /* checkpoints removed by retention */
    uint64_t removal_failures; /* removals that failed and will be tried again */
    char last_removal_error[512];
    lg_generation last_committed; /* {0,0} before the first */
    uint64_t saves_skipped;       /* launches that found one under way and skipped */
    uint32_t skips_in_a_row;      /* since the last launch that went */
    lg_save_phase phase;          /* of this rank's newest save in the background */
    uint64_t phase_step;          /* its step */
    uint64_t staging_bytes;       /* memory kept for copies now */
} lg_session_status;

/* May be called while a save runs in the background; LG_ERR_STATE in a child of
 * fork. */
LG_API lg_status lg_session_get_status(const lg_session *session, lg_session_status *out, lg_error *err);

/* ------------------------------------------------------------------- saving */

enum {
    /* Success without a new checkpoint when this session's newest committed or
     * resumed checkpoint has this step already. */
    LG_SAVE_IF_NEW = 1u << 0,
    /* Refuse NaN and infinity in F32, F64, F16, BF16 tensors: the save fails
     * and the last finite checkpoint stays. */
    LG_SAVE_FINITE = 1u << 1,
    /* Store tied aliases once; transformers cannot open such a folder. */
    LG_SAVE_ALIASES_ONCE = 1u << 2
};

typedef struct lg_save_options {
    size_t size; /* LG_SAVE_OPTIONS_INIT sets it */
    uint32_t flags;
} lg_save_options;

#define LG_SAVE_OPTIONS_INIT       \
    {                              \
        sizeof(lg_save_options), 0 \
    }

/* Starts to describe a save; nothing is written yet. `step` counts completed
 * optimizer steps, below 2^53. Free with lg_save_commit or lg_save_abort. */
LG_API lg_status lg_save_begin(lg_session *session, uint64_t step, const lg_save_options *options, lg_save **out,
                               lg_error *err);

/* Adds a tensor; the description is copied, the data is not. A name may be
 * added once a rank.
 *
 * After an error of this or any other adding call, call lg_save_commit all the
 * same: it fails on all ranks alike with that error. A rank that gives up alone
 * leaves the others waiting for it until the deadline. */
LG_API lg_status lg_save_tensor(lg_save *save, const lg_tensor *tensor, lg_error *err);

/* Declares `alias` to be the same tensor as `name`, added before. Both names
 * load; by default the bytes are written under both. Ties are declared, never
 * guessed from addresses. */
LG_API lg_status lg_save_alias(lg_save *save, const char *alias, const char *name, lg_error *err);

/* Global state: small values of the whole run. The manifest keeps the union
 * over ranks by key; a key with two different values is an error that names
 * key and ranks. Doubles keep their bits (inf, nan and -0.0 too), integers all
 * 64. `json` is one value of tagged JSON (docs/format.md). */
LG_API lg_status lg_save_global_u64(lg_save *save, const char *key, uint64_t value, lg_error *err);
LG_API lg_status lg_save_global_i64(lg_save *save, const char *key, int64_t value, lg_error *err);
LG_API lg_status lg_save_global_f64(lg_save *save, const char *key, double value, lg_error *err);
LG_API lg_status lg_save_global_str(lg_save *save, const char *key, const char *value, lg_error *err);
LG_API lg_status lg_save_global_bytes(lg_save *save, const char *key, const void *data, size_t bytes, lg_error *err);
LG_API lg_status lg_save_global_json(lg_save *save, const char *key, const char *json, lg_error *err);

/* State of this rank alone (its random generator, its loader): opaque bytes,
 * copied. Every rank of a key's set must be there to load it again. */
LG_API lg_status lg_save_rank_bytes(lg_save *save, const char *key, const void *data, size_t bytes, lg_error *err);

/* A file to lie in the step folder as it is (config.json, tokenizer.json).
 * May be called on all ranks; rank 0's counts. The bytes are copied. The name
 * is a plain file name that collides with no name of the format. */
LG_API lg_status lg_save_attach(lg_save *save, const char *file_name, const void *data, size_t bytes, lg_error *err);

/* Makes the save fail: lg_save_commit then brings `status` and `message` to all
 * ranks, unless an adding call failed before. For a rank that cannot describe
 * its state for a reason of its own. */
LG_API lg_status lg_save_fail(lg_save *save, lg_status status, const char *message, lg_error *err);

typedef struct lg_save_info {
    uint64_t step;
    lg_generation generation;
    char folder[72];
    uint64_t bytes_written; /* by this rank */
    uint64_t bytes_total;   /* by all ranks */
    int skipped;            /* LG_SAVE_IF_NEW found it committed */
    uint32_t unshared;      /* tensors kept per rank because the ranks differ */
    double seconds;
} lg_save_info;

/* Collective. Writes, commits, and returns once the checkpoint is durable on
 * all ranks; frees `save` whatever the result. On failure the previous
 * checkpoint is untouched and every rank gets the first rank's error; the same
 * save can be described and tried again. `info` may be NULL. */
LG_API lg_status lg_save_commit(lg_save *save, lg_save_info *info, lg_error *err);

/* Frees a save that was not committed. Not collective. */
LG_API void lg_save_abort(lg_save *save);

/* Saving while training goes on: lg_save_launch, in <lastgood/background.h>. */

/* ------------------------------------------------------------------ resuming */

/* Called on every rank for each checkpoint that resume tries, newest first, to
 * say what is wanted: lg_load_tensor and lg_load_… on `load`. It may look at
 * lg_load_checkpoint(load). Any status but LG_OK ends the resume with it. */
typedef lg_status (*lg_targets_fn)(lg_load *load, void *arg, lg_error *err);

enum {
    LG_RESUME_STRICT = 1u << 0,     /* only the newest; damaged is an error */
    LG_RESUME_UNVERIFIED = 1u << 1, /* do not check digests; recorded in the next save */
    /* What several ranks load alike (a region of one tensor) is read once: each
     * reads a piece, and they exchange the pieces over the communicator, within
     * buffer_bytes. Without these flags that is done for regions of 1 MiB or
     * more, unless every rank finds them in its page cache. */
    LG_RESUME_SHARE = 1u << 2,    /* for regions of any size, cached or not */
    LG_RESUME_NO_SHARE = 1u << 3, /* never: each rank reads all it wants */
    LG_RESUME_ROUNDS = 1u << 4    /* `targets` may call lg_load_again; equal on all ranks */
};

typedef struct lg_resume_options {
    size_t size; /* LG_RESUME_OPTIONS_INIT sets it */
    uint32_t flags;
    const uint64_t *step;            /* resume from this step, or NULL */
    const lg_generation *generation; /* resume from this generation, or NULL */
} lg_resume_options;

#define LG_RESUME_OPTIONS_INIT                   \
    {                                            \
        sizeof(lg_resume_options), 0, NULL, NULL \
    }

typedef struct lg_skipped {
    uint64_t step;
    lg_generation generation;
    char folder[72];
    lg_status status;
    char reason[512];
} lg_skipped;

typedef struct lg_resume_result {
    uint64_t step;
    lg_generation generation;
    char folder[72];
    char run_id[LG_RUN_ID_TEXT];
    uint32_t saved_world; /* ranks that saved it */
    int verified;
    uint64_t tensors_loaded; /* by this rank */
    uint64_t bytes_loaded;   /* by this rank, wanted bytes */
    size_t n_skipped;
    lg_skipped *skipped; /* newest first */
    size_t n_missing;    /* LG_TENSOR_OPTIONAL targets the checkpoint lacks */
    char **missing;
    lg_checkpoint *checkpoint; /* open, for reading state; freed with the result */
} lg_resume_result;

/* Collective. Finds the newest good checkpoint, loads into the targets that
 * `targets` names and verifies; when any rank finds damage, all ranks step
 * back together to the next older one. After failure the contents of targets
 * are undefined.
 *
 *   LG_OK            loaded; the session inherits the run id and goes on.
 *   LG_ERR_EMPTY     no checkpoint was ever committed here: a fresh start.
 *   LG_ERR_NO_GOOD   there are checkpoints, none is good: *out is set too and
 *                    its `skipped` says why each was passed over.
 *
 * Missing tensors, other dtypes or shapes are no damage: they end the resume
 * with LG_ERR_MISSING or LG_ERR_MISMATCH. */
LG_API lg_status lg_resume(lg_session *session, const lg_resume_options *options, lg_targets_fn targets, void *arg,
                           lg_resume_result **out, lg_error *err);

LG_API void lg_resume_result_free(lg_resume_result *result);

/* ------------------------------------------------------------------- loading */

enum { LG_LOAD_UNVERIFIED = 1u << 0 };

/* One load from an open checkpoint: describe targets, then run. Not
 * collective. Free with lg_load_free. */
LG_API lg_status lg_load_begin(lg_checkpoint *checkpoint, uint32_t flags, lg_load **out, lg_error *err);
LG_API lg_checkpoint *lg_load_checkpoint(lg_load *load);

/* For states that are read through memory which does not hold all of them, of a
 * device for example. Called by the targets function of a resume with
 * LG_RESUME_ROUNDS: what it has described is read and verified, and the function
 * is called again, to take what was read and to describe the next part, into the
 * same memory if it likes. Ranks may differ in how many rounds they need; each is
 * an exchange between them. lg_load_round counts from 0, for each checkpoint that
 * is tried anew. */
LG_API void lg_load_again(lg_load *load);
LG_API uint32_t lg_load_round(const lg_load *load);
LG_API lg_status lg_load_tensor(lg_load *load, const lg_target *target, lg_error *err);
LG_API lg_status lg_load_run(lg_load *load, lg_error *err);
LG_API void lg_load_free(lg_load *load);

/* Global state of a checkpoint. Wrong kind: LG_ERR_MISMATCH; no such key:
 * LG_ERR_MISSING. Strings and bytes belong to the checkpoint. */
LG_API lg_status lg_checkpoint_global_u64(lg_checkpoint *c, const char *key, uint64_t *out, lg_error *err);
LG_API lg_status lg_checkpoint_global_i64(lg_checkpoint *c, const char *key, int64_t *out, lg_error *err);
LG_API lg_status lg_checkpoint_global_f64(lg_checkpoint *c, const char *key, double *out, lg_error *err);
LG_API lg_status lg_checkpoint_global_str(lg_checkpoint *c, const char *key, const char **out, lg_error *err);
LG_API lg_status lg_checkpoint_global_bytes(lg_checkpoint *c, const char *key, const void **data, size_t *bytes,
                                            lg_error *err);
LG_API lg_status lg_checkpoint_global_json(lg_checkpoint *c, const char *key, const char **out, lg_error *err);
LG_API size_t lg_checkpoint_global_count(lg_checkpoint *c);
LG_API const char *lg_checkpoint_global_key(lg_checkpoint *c, size_t i);

/* State that rank `rank` saved under `key`; verified. `world` is the number of
 * ranks that read it now: another one than saved it is LG_ERR_WORLD, since such
 * state cannot be cut anew (0 = take it regardless). *data is malloc'ed; free
 * it with lg_free. */
LG_API lg_status lg_checkpoint_rank_bytes(lg_checkpoint *c, const char *key, uint32_t rank, uint32_t world, void **data,
                                          size_t *bytes, lg_error *err);
LG_API void lg_free(void *memory);

/* ------------------------------------------------------------- communicators */

/* This process alone. */
LG_API lg_status lg_comm_single_create(lg_comm **out, lg_error *err);

/* `n` ranks that are threads of this process: out[i] is for thread i. */
LG_API lg_status lg_comm_threads_create(uint32_t n, lg_comm **out, lg_error *err);

/* MPI: lastgood/mpi.h (library lastgood-mpi). Own functions: lastgood/backend.h. */

LG_API uint32_t lg_comm_rank(const lg_comm *comm);
LG_API uint32_t lg_comm_size(const lg_comm *comm);
LG_API void lg_comm_free(lg_comm *comm);

#ifdef __cplusplus
}
#endif

/* ================================================================ advanced */

#include <lastgood/background.h>
#include <lastgood/checkpoint.h>
#include <lastgood/layout.h>
#include <lastgood/sampler.h>

#endif
