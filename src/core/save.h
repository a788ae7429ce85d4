/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_SAVE_H
#define LG_CORE_SAVE_H

/* What one rank saves: collected by the public lg_save_… calls (save.c),
 * compared between ranks where it is undeclared (replicas.c), planned into
 * files (plan.c, plan_keep.c), written with checksums (write.c) and reported. The order of
 * the commit is commit.c's alone. */

#include "base/buf.h"
#include "core/index.h"
#include "format/manifest.h"
#include "format/names.h"
#include "format/safetensors.h"
#include "format/sums.h"

/* Boxes of one tensor on one rank, each of which is in a file of its own. */
#define LG__MAX_BOXES LG__MAX_FILES

typedef struct lg__plan_box lg__plan_box;
typedef struct lg__stage lg__stage; /* stage.h */

typedef enum lg__placement { LG__PLACE_LAYOUT, LG__PLACE_BOXES, LG__PLACE_UNDECLARED } lg__placement;

typedef struct lg__source_box { /* irregular boxes: memory of each */
    lg__region box;
    const void *data;
    const int64_t *strides; /* bytes; NULL = packed row-major */
} lg__source_box;

typedef struct lg__save_tensor {
    const char *name; /* all pointers: arena of the save, but for data */
    lg_group group;
    lg_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape;
    uint64_t flat_offset;
    uint32_t flags;
    lg__placement placement;
    lg_layout *layout; /* resolved and interned; undeclared tensors get it from lg__replicas_settle */
    const void *data;  /* first element of the local part */
    /* Layout, undeclared: bytes, of the local part; NULL when it is packed
     * row-major (flat and sub-byte parts always are). */
    const int64_t *strides;
    const uint64_t *local_shape; /* layout (but flat), undeclared: of the local part, ndim entries */
    lg__source_box *boxes;       /* irregular: in row-major order of offset, none empty */
    size_t n_boxes;
    const char *alias_of;             /* NULL, or this entry is an alias of that name, which is no alias */
    size_t root;                      /* index of the entry that alias_of names */
    bool stored;                      /* false: alias without bytes of its own */
    bool digested;                    /* digest and part are set */
    uint8_t digest[LG__SHA256_BYTES]; /* of description and contents */
    uint8_t part[LG__SHA256_BYTES];   /* declared replicas: which part it is */
} lg__save_tensor;

typedef struct lg__save_blob { /* per-rank bytes */
    const char *key;
    const void *data;
    size_t bytes;
} lg__save_blob;

typedef struct lg__save_attach {
    const char *name;
    const void *data;
    size_t bytes;
} lg__save_attach;

/* What a save in the background does otherwise than one in the foreground. */
typedef struct lg__save_hooks {
    /* The memory of this box has been read; boxes come in the order of the plan. */
    void (*gathered)(const lg__plan_box *box, void *arg);
    /* The sums file is about to appear. Waits if it must; an error stops it. */
    lg_status (*before_sums)(void *arg, lg_error *err);
    void *arg;
} lg__save_hooks;

struct lg_save {
    lg_session *session;
    lg_error failed; /* the first error of an adding call; status LG_OK: none */
    uint64_t step;
    uint32_t flags;
    lg__arena *arena;
    lg__save_tensor *tensors;
    size_t n_tensors, cap_tensors;
    lg__save_blob *blobs;
    size_t n_blobs, cap_blobs;
    lg__save_attach *attached;
    size_t n_attached, cap_attached;
    json_t *state;        /* object: key → tagged JSON */
    uint32_t rank, world; /* of the session, copied at begin */
    uint64_t block_bytes, buffer_bytes;
    uint64_t header_limit; /* a file's header is cut here: LG__ST_SPLIT_HEADER, less in tests */
    uint32_t unshared;
    bool fills;                  /* of a launch: what is LG_TENSOR_KEPT is filled only once the launch goes */
    const lg__save_hooks *hooks; /* of a save in the background; NULL in others */
    lg__report *report;          /* see lg__save_keep_report */
    /* One object a layout, so that equal pointers are equal layouts. */
    lg_layout **layouts;
    size_t n_layouts, cap_layouts;
    lg__index by_name;   /* tensors */
    lg__index by_layout; /* layouts, by id */
    lg__index by_key;    /* blobs */
    lg__index by_file;   /* attached */
};

/* ---- save.c */

/* What a save needs to know of its session. */
typedef struct lg__save_facts {
    uint32_t rank, world;
    uint64_t block_bytes, buffer_bytes;
} lg__save_facts;

/* Implemented by the session. LG_ERR_STATE when it cannot save (read-only, a
 * save under way, closed). */
lg_status lg__session_save_facts(lg_session *s, lg__save_facts *out, lg_error *err);

/* A save that belongs to no session yet. Freed by lg_save_abort. */
lg_status lg__save_new(const lg__save_facts *facts, uint64_t step, uint32_t flags, lg_save **out, lg_error *err);

lg__tensor_desc lg__save_desc(const lg__save_tensor *t);

/* Replaces *layout, whose reference it takes, by the save's own object of the
 * same id; the save keeps it alive. Refuses ranks beyond the world. *layout is
 * NULL after a failure. */
lg_status lg__save_intern(lg_save *save, lg_layout **layout, lg_error *err);

/* ---- plan.c */

/* A region whose numbers lie elsewhere: a lg__region has room for the most
 * dimensions, and there are many boxes. */
typedef struct lg__extent {
    uint32_t ndim;
    const uint64_t *offset, *size; /* ndim entries */
} lg__extent;

static inline lg__region lg__extent_region(const lg__extent *e)
{
    lg__region r;
    r.ndim = e->ndim;
    for (uint32_t d = 0; d < e->ndim; d++) {
        r.offset[d] = e->offset[d];
        r.size[d] = e->size[d];
    }
    return r;
}

struct lg__plan_box { /* one tensor box in one file */
    const char *key;  /* in the file */
    lg_dtype dtype;
    lg__extent box;             /* global */
    const void *data;           /* base for runs */
    const uint64_t *mem_origin; /* see lg__run_walk; NULL: box.offset */
    const uint64_t *mem_size;   /* NULL: box.size */
    const int64_t *strides;     /* bytes, ndim entries; NULL: packed row-major */
    bool finite_check;
    bool lazy;          /* the memory may be read after lg_save_launch has returned */
    bool kept;          /* and until the save has ended: not the trainer's */
    const char *tensor; /* for messages */
    /* Whose memory it is, for a later save of the same tensors: the save's tensor,
     * or behind those its per-rank bytes; which box of an irregular tensor; and
     * how far behind the beginning of that memory `data` is. */
    size_t source, number;
    uintptr_t behind;
};

typedef struct lg__plan_file {
    char name[LG__NAME_MAX];
    lg_group group;
    uint32_t number;
    lg__buf header;       /* 8 + N bytes */
    lg__st_place members; /* of the header: run, attempt, step, rank */
    uint32_t fixed_crc;   /* of a plan that is kept: of the header without them and without its padding */
    uint64_t data_bytes;
    lg__plan_box *boxes; /* in the file's order, contiguous from 0 */
    size_t n_boxes;
} lg__plan_file;

/* What the report says of one of the save's tensors. */
typedef struct lg__plan_tensor {
    uint64_t fingerprint; /* of a stored one */
    uint64_t tie;         /* of an alias */
    size_t row;           /* of a stored one that this rank describes: rows are in order of names */
} lg__plan_tensor;

typedef struct lg__plan {
    lg__arena *arena;
    lg__plan_file *files;
    size_t n_files;
    uint64_t bytes; /* of all files */
    void **memory;  /* of the boxes */
    size_t n_memory;
    lg__plan_tensor *tensors; /* one for each of the save's, made with the first report; NULL before */
    lg__buf description;      /* of a plan that is kept: see plan_keep.c */
    bool changed;             /* boxes are no longer as planned: not to be kept */
} lg__plan;

/* What goes into each file's metadata and into the report. */
typedef struct lg__save_ids {
    char run_id[LG_RUN_ID_TEXT];
    char attempt[33];
    lg_generation generation;
    const char *domain;
} lg__save_ids;

/* Every tensor's layout is set by now. Checks that headers list exactly the
 * boxes that the layouts give this rank. */
lg_status lg__plan_make(const lg_save *save, const lg__save_ids *ids, lg__plan **out, lg_error *err);
void lg__plan_free(lg__plan *p);

/* The metadata of this save's files. */
typedef struct lg__file_meta {
    char step[24], rank[12];
    lg__st_meta all[4]; /* point into this and into the ids */
} lg__file_meta;
void lg__plan_meta(const lg_save *save, const lg__save_ids *ids, lg__file_meta *out);

/* ---- plan_keep.c: from save to save */

/* As lg__plan_make; but where *kept is of a save of the same tensors (names,
 * dtypes, shapes, layouts, strides, aliases, keys and lengths of per-rank bytes;
 * not where they lie in memory), it becomes this save's plan. *kept is NULL
 * afterwards. */
lg_status lg__plan_get(lg__plan **kept, const lg_save *save, const lg__save_ids *ids, lg__plan **out, lg_error *err);
/* Instead of lg__plan_free, when nothing uses the plan of `save` any more: keeps
 * it for the next save, if it takes no more than LG__PLAN_KEPT_MAX bytes. */
void lg__plan_keep(lg__plan **kept, lg__plan *plan, const lg_save *save);
#define LG__PLAN_KEPT_MAX ((size_t)32 << 20)

/* Where the memory of a piece of `t` begins and how it lies: data, mem_origin,
 * mem_size and strides of `out`, whose box is set. The arrays are the save's or
 * of `arena`. */
lg_status lg__plan_source(const lg__save_tensor *t, const lg__piece *piece, lg__arena *arena, lg__plan_box *out,
                          lg_error *err);
/* Walks the memory of a box in the order of its bytes in the file. */
lg_status lg__plan_runs(const lg__plan_box *box, lg__run_fn fn, void *arg, lg_error *err);

/* ---- replicas.c: tensors that several ranks hold without saying so */

/* Digests of undeclared tensors' contents (and of declared replicas with
 * check_declared), one pass over the memory. */
lg_status lg__replicas_digest(lg_save *save, bool check_declared, lg_error *err);
/* What this rank puts into the first exchange, a few bytes when nothing is
 * undeclared: count and SHA-256 of (name, description, digest) over all. */
lg_status lg__replicas_summary(const lg_save *save, uint8_t out[40], lg_error *err);
/* Full list, for a second exchange, needed only when summaries differ. */
lg_status lg__replicas_list(const lg_save *save, lg__buf *out, lg_error *err);
/* Gives every undeclared tensor its layout. `lists`: all ranks' full lists one
 * behind the other, sizes[r] each; NULL when all summaries were equal (then
 * every rank holds the same). A tensor that differs between ranks becomes
 * per-rank copies if it is a LG_TENSOR_BUFFER on all of them, else
 * LG_ERR_CONFLICT naming it and the ranks; so are different descriptions. */
lg_status lg__replicas_settle(lg_save *save, const void *lists, const size_t *sizes, lg_error *err);

/* ---- save_report.c */

/* What the sum of a layout's fingerprints gets for an alias: the fingerprint
 * of a tensor like the aliased one, called "alias\nname". A stored alias is
 * also a tensor of its own. So ranks that declare other ties have other sums. */
lg_status lg__tie_fingerprint(const lg__tensor_desc *aliased, const char *alias, bool flat, uint64_t *out,
                              lg_error *err);

/* The report of this rank. tables[i] is the digest of file i's table. */
lg_status lg__save_report(const lg_save *save, const lg__save_ids *ids, lg__plan *plan,
                          const uint8_t (*tables)[LG__SHA256_BYTES], lg__report **out, lg_error *err);

/* Takes a report that was written: the coordinator need not read and parse its
 * own again. It lives no longer than the save, whose names it has. */
void lg__save_keep_report(lg_save *save, lg__report *report);

/* ---- write.c */

typedef struct lg__written {
    uint8_t report[LG__SHA256_BYTES];
    uint64_t sums_bytes;
    uint64_t bytes; /* all this rank wrote */
} lg__written;

/* Step 1 of the commit for one rank: creates, writes, closes all files of the
 * plan in `folder`, reading the memory once (gather and CRC32C in one pass),
 * and the sums file under a temporary name, all synced beside each other; then
 * renames the sums file
 * into place (plain create when the store cannot rename files). The caller
 * syncs the folder; in a save in the background (hooks) it is synced before the
 * sums file appears, whose name says that this rank is done. Uses at most
 * save->buffer_bytes of staging. A failed
 * write leaves its files behind for the sweep. */
lg_status lg__save_write(lg_save *save, lg_store *store, const char *folder, lg__plan *plan, const lg__save_ids *ids,
                         lg__written *out, lg_error *err);

/* The same for an image of the files in memory; lg__stage_take gives its parts.
 * Hooks are not called. */
lg_status lg__save_write_stage(lg_save *save, lg_store *store, const char *folder, lg__plan *plan,
                               const lg__save_ids *ids, lg__stage *stage, lg__written *out, lg_error *err);

/* ---- merge.c: on the coordinator */

/* Checks that the reports agree (attempt, step, generation, run, world, each
 * rank's place; members of one rank set; one description a name; aliases;
 * global state by key) and tile every tensor, and builds the manifest's ranks,
 * layouts, tensors and state. m's ids, step, block size are set by the caller.
 * digests[r], sums_bytes[r] as lg__written. The reports are consumed row by
 * row in any order; O(ranks + tensors), but for irregular boxes. */
lg_status lg__merge(const lg__report *const *reports, uint32_t world, const lg__written *written, lg__manifest *m,
                    lg_error *err);

#endif
