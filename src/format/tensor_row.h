/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_FORMAT_TENSOR_ROW_H
#define LG_FORMAT_TENSOR_ROW_H

/* The rows of tensors in manifest and report: by far the most of either, so
 * they are cut out of the text, and those in the form that lastgood writes are
 * read without a JSON library. Any other row goes through it. */

#include "base/json_pieces.h"
#include "format/layout.h"
#include "format/member.h"

/* {"name":"…","group":"model","dtype":"F32","shape":[1024],"layout":0}, with
 * "flat_offset" behind it where the layout is flat. */
typedef struct lg__tensor_row {
    lg__json_piece name; /* in the text */
    lg_group group;
    lg_dtype dtype;
    uint32_t ndim;
    uint64_t shape[LG_MAX_NDIM];
    uint64_t layout;
    bool has_flat_offset;
    uint64_t flat_offset;
} lg__tensor_row;

/* The rows of a member that lg__json_parse_but left as text: LG_ERR_FORMAT when
 * it is missing or no array. */
lg_status lg__rows_begin(const char *key, lg__json_piece text, lg__json_cursor *rows, lg_error *err);
/* More rows than this a text of `bytes` bytes does not hold. */
static inline size_t lg__rows_most(size_t bytes) { return bytes / 48 + 1; }

/* Reads the row where the cursor is, and moves behind it; false, with nothing
 * moved, for one of another form. Values are those of the text: only that they
 * are numbers and known words was checked. */
bool lg__tensor_row_take(lg__json_cursor *rows, lg__tensor_row *out);
/* The row as JSON, its "boxes" apart. `at` is its place. */
lg_status lg__tensor_row_parse(lg__json_cursor *rows, const lg__at *at, json_t **object, lg__json_piece *boxes,
                               lg_error *err);

/* Copies name and shape into the arena. */
lg_status lg__tensor_row_keep(const lg__tensor_row *row, lg__arena *arena, const char **name, const uint64_t **shape,
                              lg_error *err);

/* Boxes, {"rank":3,"offset":[0,4],"size":[4,4]}, or with rank == NULL without a
 * rank. How many there are: */
lg_status lg__boxes_count(lg__json_piece text, const lg__at *at, size_t *n, lg_error *err);
lg__json_cursor lg__boxes_begin(lg__json_piece text);
/* The next one; `at` is its place. */
lg_status lg__boxes_next(lg__json_cursor *boxes, const lg__at *at, uint32_t ndim, uint32_t *rank, lg__region *out,
                         lg_error *err);
/* Behind the last one the text must end. */
lg_status lg__boxes_end(lg__json_cursor *boxes, const lg__at *at, lg_error *err);

/* ---- writing: the row up to its place, "{"name":…,"shape":[…]" */
void lg__buf_tensor_row(lg__buf *b, const lg__tensor_desc *t);
void lg__buf_tensor_layout(lg__buf *b, size_t layout, const uint64_t *flat_offset);
/* [first] {"rank":…,"offset":[…],"size":[…]} */
void lg__buf_box(lg__buf *b, bool first, const uint32_t *rank, const lg__region *box);

#endif
