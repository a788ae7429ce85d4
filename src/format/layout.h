/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_FORMAT_LAYOUT_H
#define LG_FORMAT_LAYOUT_H

/* Layouts: who holds which part of a tensor, and who writes it.
 *
 * Three kinds on disk: `split` (mesh and ordered splits; none = replicated),
 * `flat` (ceil pieces of a one-dimensional buffer) and `copies` (each rank of
 * the set keeps its own whole tensor, because they differ). A layout on disk
 * is *resolved*: number of writers and, for split, the dimension that writers
 * cut are written down. What a caller creates may leave the writers open
 * (writers = 0); lg__layout_resolve chooses them for one tensor.
 *
 * Everything here is a pure function of the layout and the tensor's global
 * description, so that all ranks compute the same without talking. */

#include "base/buf.h"
#include "base/hash.h"
#include "format/region.h"

#include <jansson.h>

#define LG__LAYOUT_ID_BYTES LG__SHA256_BYTES
#define LG__WRITER_MIN_BYTES (UINT64_C(32) << 20)

typedef enum lg__layout_kind { LG__SPLIT, LG__FLAT, LG__COPIES } lg__layout_kind;

struct lg_layout {
    lg__layout_kind kind;
    /* rank set */
    uint32_t mesh_ndim; /* 0: one rank (origin or ranks[0]) */
    uint32_t sizes[LG_MAX_MESH_NDIM];
    uint32_t strides[LG_MAX_MESH_NDIM];
    uint32_t origin;
    uint32_t *ranks; /* NULL, or n_ranks entries in row-major order of the mesh */
    uint32_t n_ranks;
    /* split */
    uint32_t n_splits;
    lg_split splits[LG_MAX_SPLITS];
    /* flat */
    uint64_t flat_length;
    int32_t flat_axis;
    /* replicas: the axes used by no split */
    uint32_t holders;    /* R: product of the replica axes' sizes */
    uint32_t writers;    /* w; while text is NULL what the caller asked for, 0 = any */
    uint32_t writer_dim; /* split, writers > 1: the dimension that is cut */
    /* resolved layouts only, else NULL */
    char *text; /* canonical JSON, NUL-terminated */
    size_t text_bytes;
    uint8_t id[LG__LAYOUT_ID_BYTES]; /* SHA-256 of text */
    /* derived, for looking up */
    uint32_t *by_rank;                    /* with ranks: row-major indices in order of the ranks */
    uint32_t by_stride[LG_MAX_MESH_NDIM]; /* without: axes by descending stride */
    /* What follows changes while several threads use the layout, atomically, and
     * is never copied. */
    uint32_t references;
    lg_layout *variants; /* not resolved: what lg__layout_resolve made of it; they go with it */
    lg_layout *next_variant;
};

/* What is global about a tensor. */
typedef struct lg__tensor_desc {
    const char *name;
    lg_group group; /* MODEL or OPTIM */
    lg_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape;
    uint64_t flat_offset;
} lg__tensor_desc;

/* The layout of a tensor that the ranks of `ranks` (ascending, n of them) each
 * hold whole: one writer, or (copies) every one of them. Resolved. Uses a mesh
 * with origin and stride when the ranks form one, else the list. */
lg_status lg__layout_of_ranks(const uint32_t *ranks, uint32_t n, bool copies, lg_layout **out, lg_error *err);

/* `layout` with writers and writer_dim chosen for this tensor and text and id
 * filled; checks that the tensor fits the layout (dimensions exist, flat range
 * inside the buffer, no sub-byte cut inside a byte). Releases are the caller's. */
lg_status lg__layout_resolve(const lg_layout *layout, const lg__tensor_desc *t, lg_layout **out, lg_error *err);

/* From and to canonical text. Parsing refuses text that is not canonical,
 * meshes with a rank twice or beyond `world`, axes used twice, and sizes that
 * overflow. */
lg_status lg__layout_parse(const json_t *json, uint32_t world, lg_layout **out, lg_error *err);

lg_layout *lg__layout_ref(const lg_layout *layout);
void lg__layout_unref(lg_layout *layout);

/* The same check as lg__layout_resolve makes, for a resolved layout and a
 * tensor out of a file. */
lg_status lg__layout_check_tensor(const lg_layout *layout, const lg__tensor_desc *t, lg_error *err);

uint32_t lg__layout_rank_at(const lg_layout *layout, uint32_t i); /* i-th of the set, row-major */
bool lg__layout_index_of(const lg_layout *layout, uint32_t rank, uint32_t *i);

/* A box that a rank writes (or, for `held`, holds). */
typedef struct lg__piece {
    lg__region box;              /* global */
    uint64_t local[LG_MAX_NDIM]; /* split, copies: where it lies in the rank's local tensor */
    uint64_t flat_local;         /* flat: first element, counted from the rank's first element */
} lg__piece;

/* The boxes that `rank` writes, in row-major order of offset: the b-th of them
 * is in file b of the group. *n may be 0 (nothing to write, or not in the
 * set). *out is lg__malloc'ed. A wholly empty tensor is written as one empty
 * box of the full shape by the first rank of the set (copies: by each). */
lg_status lg__layout_written(const lg_layout *layout, const lg__tensor_desc *t, uint32_t rank, lg__piece **out,
                             size_t *n, lg_error *err);
/* The boxes that `rank` holds (before sharing out between holders), for loading
 * its part; the same as written when there is one holder. */
lg_status lg__layout_held(const lg_layout *layout, const lg__tensor_desc *t, uint32_t rank, lg__piece **out, size_t *n,
                          lg_error *err);

/* Local shape of the part that `rank` holds (split, copies), or for flat the
 * number of elements and first element (row-major in the tensor). */
lg_status lg__layout_local_part(const lg_layout *layout, const lg__tensor_desc *t, uint32_t rank, uint64_t *local_shape,
                                uint64_t *start, uint64_t *elements, lg_error *err);

/* The stored boxes that touch `region`: for each, the rank, the box and its
 * number b on that rank. O(boxes touched + splits). copies: the boxes of
 * every rank. A nonzero return stops and is returned. */
typedef lg_status (*lg__touch_fn)(uint32_t rank, const lg__region *box, uint32_t number, void *arg, lg_error *err);
lg_status lg__layout_touch(const lg_layout *layout, const lg__tensor_desc *t, const lg__region *region, lg__touch_fn fn,
                           void *arg, lg_error *err);

/* How many boxes a tensor is stored in, all ranks together. */
lg_status lg__layout_box_count(const lg_layout *layout, const lg__tensor_desc *t, uint64_t *out, lg_error *err);

/* First 8 bytes, little-endian, of SHA-256(group, name, dtype, shape[, flat
 * offset]) as docs/format.md spells it: what reports sum mod 2^64. */
lg_status lg__tensor_fingerprint(const lg__tensor_desc *t, bool flat, uint64_t *out, lg_error *err);
#define LG__FINGERPRINT_TEXT_MAX (8 * LG_MAX_NAME)
/* The same for one of many: with a digest and a buffer that are used again. */
lg_status lg__tensor_fingerprint_by(lg__sha256 *sha, lg__buf *scratch, const lg__tensor_desc *t, bool flat,
                                    uint64_t *out, lg_error *err);

/* Which family of files holds a tensor: raw for dtypes that PyTorch's reader
 * does not know and for per-rank copies, else its own group. */
lg_group lg__file_group(lg_group group, lg_dtype dtype, bool copies);

#endif
