/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_BUILD_H
#define LG_TESTS_BUILD_H

/* Writes a step folder straight from the format code (manifest, safetensors,
 * sums), without the library's write side, so that the read side is tested
 * against something that shares no mistake with it, and so that checkpoints
 * can be made that the write side would never write. Aborts on any error. */

#include "format/manifest.h"
#include "format/names.h"
#include "format/safetensors.h"
#include "store/store.h"

typedef struct build_tensor {
    const char *name;
    lg_group group;
    lg_dtype dtype;
    uint32_t ndim;
    uint64_t shape[4];
    const lg_layout *layout; /* from lg_layout_create; NULL: pieces, or whole on rank 0 */
    bool copies;             /* each rank keeps its own: data has `world` of them */
    uint64_t flat_offset;
    const lg__stored_piece *pieces; /* irregular */
    size_t n_pieces;
    const void *data; /* the whole tensor, packed row-major */
    const char *alias_of;
    bool alias_once; /* no bytes of its own */
} build_tensor;

typedef struct build_blob {
    uint32_t rank;
    const char *key;
    const void *data;
    size_t bytes;
} build_blob;

typedef struct build_attached {
    const char *name, *text;
} build_attached;

typedef struct build_box { /* an entry of a file that is about to be written */
    char key[128];
    const char *tensor; /* NULL: state of a rank */
    lg_dtype dtype;
    lg__region box;
    bool plain; /* no saved offsets */
    char *data;
    size_t bytes;
    uint32_t number;
} build_box;

/* May change, drop (set *n) or add entries (room for two more; data stays the
 * test's). What is written afterwards has right digests everywhere. */
typedef void (*build_edit)(uint32_t rank, lg_group group, uint32_t number, build_box *boxes, size_t *n, void *arg);

typedef struct build_spec {
    uint32_t world;
    uint64_t step;
    lg_generation generation;
    const char *attempt; /* 16 hex digits; NULL: a fixed one */
    uint64_t block_bytes;
    const build_tensor *tensors;
    size_t n_tensors;
    const build_blob *blobs;
    size_t n_blobs;
    const build_attached *attached;
    size_t n_attached;
    const char *state; /* JSON object; NULL: empty */
    uint32_t shift;    /* put every box this many files further than its number: as when headers are full */
    bool raw_copy;     /* every tensor is one box: copied as it is, for large ones */
    build_edit edit;
    void *arg;
} build_spec;

/* `folder` gets the name that belongs to step and generation. */
void build_checkpoint(lg_store *store, const build_spec *spec, char folder[LG__NAME_MAX]);

/* Copies a region out of a whole packed tensor, element by element: what every
 * load is compared with. `out` is packed. */
void build_extract(lg_dtype dtype, uint32_t ndim, const uint64_t *shape, const void *data, const lg__region *r,
                   void *out);
size_t build_bytes(lg_dtype dtype, uint32_t ndim, const uint64_t *shape);

/* A whole file, malloc'ed; and a file replaced, or made. */
char *build_read(lg_store *store, const char *folder, const char *file, size_t *bytes);
void build_write(lg_store *store, const char *folder, const char *file, const void *data, size_t bytes);

/* A layout of a line of ranks 0..n-1, or a mesh n0 × n1. */
lg_layout *build_layout(uint32_t n0, uint32_t n1, uint32_t n_splits, const lg_split *splits, uint32_t writers);
lg_layout *build_flat(uint32_t n, uint64_t length, uint32_t writers);

/* Numbers that are the same on every run. */
uint64_t build_random(uint64_t *state);

#endif
