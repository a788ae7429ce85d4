/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LASTGOOD_CHECKPOINT_H
#define LASTGOOD_CHECKPOINT_H

/* Checkpoints that are there, a part of lastgood.h, which includes this: list
 * and open them, look into them, verify, keep, remove, roll back; and one
 * safetensors file alone. */

#include <lastgood/lastgood.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --------------------------------------------------------- opening and listing */

typedef enum lg_entry_kind {
    LG_ENTRY_COMMITTED = 0, /* a checkpoint, or what should be one: see status */
    LG_ENTRY_PARTIAL = 1,   /* being written, or left by a dead session */
    LG_ENTRY_TRASH = 2,     /* being removed */
    LG_ENTRY_TOMBSTONE = 3, /* an attempt that was ended */
    LG_ENTRY_OWNER = 4,
    LG_ENTRY_ROLLBACK = 5,
    LG_ENTRY_FOREIGN = 6
} lg_entry_kind;

LG_API const char *lg_entry_kind_name(lg_entry_kind kind); /* "committed", … */

/* One name in a root. Fields that do not apply are zero. */
typedef struct lg_entry {
    lg_entry_kind kind;
    char name[256];
    uint64_t step;
    lg_generation generation;
    lg_status status; /* committed: LG_OK if manifest and file sizes are right */
    char reason[512]; /* why status is not LG_OK */
    int discarded;    /* passed over by a rollback */
    int pinned;
    int newest; /* the one that resume tries first */
    char run_id[LG_RUN_ID_TEXT];
    char created[LG_CREATED_TEXT]; /* UTC; informative only */
    uint32_t world;
    uint64_t tensors;
    uint64_t bytes;       /* of all files the manifest lists */
    lg_generation target; /* rollback: where it leads; the same for step */
    uint64_t target_step;
    char note[256]; /* rollback: its reason; pinned: why; owner: who claimed */
} lg_entry;

typedef struct lg_listing {
    size_t n;
    lg_entry *entries;    /* checkpoints and rollbacks newest first, then the rest */
    int unreadable_newer; /* a manifest of a newer version is there: nothing is removed */
} lg_listing;

enum { LG_LIST_ALL = 1u << 0 /* partial, trash, owners and foreign names too */ };

/* What a root holds, without opening it for writing. */
LG_API lg_status lg_list(const char *root, uint32_t flags, lg_listing **out, lg_error *err);
LG_API void lg_listing_free(lg_listing *listing);

/* Opens a checkpoint for reading. `where`: a root (its newest good one), a step
 * folder, ROOT@STEP (the newest generation of it), or ROOT@gEPOCH.SERIAL. */
LG_API lg_status lg_checkpoint_open(const char *where, lg_checkpoint **out, lg_error *err);
LG_API void lg_checkpoint_close(lg_checkpoint *c);

typedef struct lg_checkpoint_info {
    uint64_t step;
    lg_generation generation;
    char folder[72]; /* name of the step folder where it is known, else "" */
    char run_id[LG_RUN_ID_TEXT];
    char attempt[33];
    char manifest_sha256[LG_DIGEST_TEXT];
    int has_parent;
    uint64_t parent_step;
    lg_generation parent;
    int parent_verified; /* 0: that checkpoint was loaded without checks */
    uint32_t world;
    char created[LG_CREATED_TEXT];
    uint64_t block_bytes;
    const char *checksum; /* "crc32c" */
    size_t n_tensors, n_layouts, n_files, n_attached, n_aliases;
    uint64_t tensor_bytes, file_bytes;
    int aliases_once;
    int pinned;
} lg_checkpoint_info;

LG_API lg_status lg_checkpoint_get_info(lg_checkpoint *c, lg_checkpoint_info *out, lg_error *err);

typedef struct lg_tensor_info {
    const char *name; /* belongs to the checkpoint, like all pointers here */
    lg_group group;
    lg_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape;
    uint64_t bytes;
    size_t layout;  /* index; SIZE_MAX for irregular boxes */
    size_t n_boxes; /* how many boxes the tensor is stored in */
    uint64_t flat_offset;
    const char *alias_of; /* NULL, or the tensor it is tied to */
    int per_rank;         /* the ranks' copies differ; each is kept */
} lg_tensor_info;

/* Tensors are sorted by name, byte by byte; aliases are among them. */
LG_API lg_status lg_checkpoint_tensor(lg_checkpoint *c, size_t i, lg_tensor_info *out, lg_error *err);
LG_API lg_status lg_checkpoint_find(lg_checkpoint *c, const char *name, lg_tensor_info *out, lg_error *err);

/* Canonical text of layout `i`; belongs to the checkpoint. */
LG_API const char *lg_checkpoint_layout(lg_checkpoint *c, size_t i);

typedef struct lg_file_info {
    char name[256];
    uint64_t bytes;
    uint32_t rank;  /* UINT32_MAX for attached files */
    lg_group group; /* meaningless for sums and attached files */
    int is_sums, is_attached;
    const char *domain; /* failure domain of the rank */
} lg_file_info;

LG_API lg_status lg_checkpoint_file(lg_checkpoint *c, size_t i, lg_file_info *out, lg_error *err);

/* Names of files in the step folder that neither manifest nor side record
 * lists, one call each; stops when fn returns nonzero. */
LG_API lg_status lg_checkpoint_foreign(lg_checkpoint *c, int (*fn)(const char *name, void *arg), void *arg,
                                       lg_error *err);

/* A box as stored. */
typedef struct lg_stored_box {
    uint32_t rank;
    uint32_t ndim;
    uint64_t offset[LG_MAX_NDIM];
    uint64_t size[LG_MAX_NDIM];
} lg_stored_box;

/* The stored boxes that touch a region (offset and extent NULL: the whole
 * tensor), in O(boxes touched). Stops when fn returns nonzero. */
LG_API lg_status lg_checkpoint_boxes(lg_checkpoint *c, const char *name, const uint64_t *offset, const uint64_t *extent,
                                     int (*fn)(const lg_stored_box *box, void *arg), void *arg, lg_error *err);

/* A read-only view of a region that lies contiguous in one stored box, mapped
 * from the file, not copied. Its blocks are verified once unless `flags` has
 * LG_LOAD_UNVERIFIED. LG_ERR_UNSUPPORTED when the region is not contiguous in
 * one box; load it then. */
typedef struct lg_view {
    const void *data;
    uint64_t bytes;
    void *priv;
} lg_view;
LG_API lg_status lg_checkpoint_map(lg_checkpoint *c, const char *name, const uint64_t *offset, const uint64_t *extent,
                                   uint32_t flags, lg_view *out, lg_error *err);
LG_API void lg_view_release(lg_view *view);

/* Copies an attached file; verified against its digest. Free with lg_free. */
LG_API lg_status lg_checkpoint_attached(lg_checkpoint *c, const char *file_name, void **data, size_t *bytes,
                                        lg_error *err);

/* -------------------------------------------------------------------- verify */

typedef struct lg_problem {
    lg_status status;
    char file[256];
    char tensor[512]; /* "" where no tensor is concerned */
    uint64_t offset;  /* first bad byte range in the file */
    uint64_t bytes;
    char message[1024];
} lg_problem;

typedef struct lg_verify_options {
    size_t size;      /* LG_VERIFY_OPTIONS_INIT sets it */
    uint32_t threads; /* 0 = one a core, at most 16 */
    /* Called from one thread at a time; nonzero stops (LG_ERR_CANCELLED). */
    int (*progress)(uint64_t done, uint64_t total, void *arg);
    void (*problem)(const lg_problem *problem, void *arg);
    void *arg;
} lg_verify_options;

#define LG_VERIFY_OPTIONS_INIT                         \
    {                                                  \
        sizeof(lg_verify_options), 0, NULL, NULL, NULL \
    }

typedef struct lg_verify_result {
    uint64_t files, bytes, problems;
} lg_verify_result;

/* Reads every byte of a checkpoint (or of one safetensors file, whose form is
 * checked) and checks it: manifest, sizes, reports, tables, headers against
 * layouts, every block. LG_OK, or the first problem's status; all problems go
 * to `problem`. `result` is set in both cases. */
LG_API lg_status lg_verify(lg_checkpoint *c, const lg_verify_options *options, lg_verify_result *result, lg_error *err);

/* -------------------------------------------------- keep, remove, roll back */

/* Pins (or, with pinned = 0, unpins) a checkpoint against retention and prune.
 * `reason` may be NULL. */
LG_API lg_status lg_pin(const char *where, int pinned, const char *reason, lg_error *err);

typedef struct lg_prune_options {
    size_t size; /* LG_PRUNE_OPTIONS_INIT sets it */
    uint32_t keep_last;
    uint64_t keep_every;
    int dry_run;
} lg_prune_options;

#define LG_PRUNE_OPTIONS_INIT             \
    {                                     \
        sizeof(lg_prune_options), 0, 0, 1 \
    }

typedef struct lg_prune_item {
    char name[256];
    uint64_t step;
    lg_generation generation;
    uint64_t bytes;
    int removed;      /* removed, or would be */
    char reason[256]; /* why it stays or goes */
} lg_prune_item;

/* Applies a retention rule by hand: verifies the newest checkpoint that stays
 * in full before anything is removed. Claims nothing, so that a session that
 * runs goes on. With dry_run it verifies too, and only says what it would do. keep_last of 0 is
 * LG_ERR_INVALID. `fn` may be NULL; it gets every checkpoint, newest first. */
LG_API lg_status lg_prune(const char *root, const lg_prune_options *options,
                          void (*fn)(const lg_prune_item *item, void *arg), void *arg, lg_error *err);

/* Removes one checkpoint, by the same rules: never the last good one, never a
 * pinned one. */
LG_API lg_status lg_remove(const char *where, lg_error *err);

/* The same for the last one as well: of a checkpoint whose contents are known to
 * be wrong, however whole its files are. What is left may be an empty root, in
 * which a run starts anew. Not a pinned one. */
LG_API lg_status lg_remove_last(const char *where, lg_error *err);

/* Removes what crashes left: trash, partial folders and tombstones of epochs
 * below the highest owner. `fn` gets each name. */
LG_API lg_status lg_sweep(const char *root, int dry_run, void (*fn)(const char *name, uint64_t bytes, void *arg),
                          void *arg, lg_error *err);

/* Records that the run goes back to the checkpoint `where`: later ones are
 * discarded, even if committed later by a session that is still running (its
 * next save fails as LG_ERR_SUPERSEDED). Deletes nothing itself; the retention of
 * the run that goes on removes discarded ones once it has enough newer ones, so
 * pin what may be wanted back. Checks the target's sizes, not its bytes
 * (lg_verify does). `reason` is kept in the record. `out` (may be NULL) gets the record's generation. */
LG_API lg_status lg_rollback(const char *where, const char *reason, lg_generation *out, lg_error *err);

/* ------------------------------------------------- one safetensors file alone */

typedef struct lg_safetensors lg_safetensors;

/* Opens and checks the form of one safetensors file, of any writer. Names what
 * the file is when it is something else (zip, GGUF, Git-LFS pointer, HTML). */
LG_API lg_status lg_safetensors_open(const char *path, lg_safetensors **out, lg_error *err);
LG_API void lg_safetensors_close(lg_safetensors *file);
LG_API size_t lg_safetensors_count(const lg_safetensors *file);
/* Sorted by offset. `begin`,`end`: bytes from the start of the data. */
LG_API lg_status lg_safetensors_tensor(const lg_safetensors *file, size_t i, const char **name, lg_dtype *dtype,
                                       uint32_t *ndim, const uint64_t **shape, uint64_t *begin, uint64_t *end,
                                       lg_error *err);
LG_API size_t lg_safetensors_metadata_count(const lg_safetensors *file);
LG_API lg_status lg_safetensors_metadata(const lg_safetensors *file, size_t i, const char **key, const char **value,
                                         lg_error *err);
LG_API lg_status lg_safetensors_read(lg_safetensors *file, size_t i, void *data, size_t bytes, lg_error *err);

#ifdef __cplusplus
}
#endif

#endif
