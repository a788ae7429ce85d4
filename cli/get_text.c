/* SPDX-License-Identifier: Apache-2.0 */
#include "get_text.h"

#include "chunk.h"
#include "value.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define LINE_COLUMNS 100
#define CHUNK_BYTES (UINT64_C(8) << 20)

/* ------------------------------------------------------------ the brackets */

/* Takes elements in row-major order. `cut[d]`: where dimension d leaves
 * elements out; UINT64_MAX: nowhere. */
typedef struct printer {
    uint32_t ndim;
    uint64_t shape[LG_MAX_NDIM], cut[LG_MAX_NDIM], index[LG_MAX_NDIM];
    size_t column;
    bool begun;
} printer;

static void put(printer *p, const char *s)
{
    fputs(s, stdout);
    p->column += strlen(s);
}

static void new_line(printer *p, uint32_t indent)
{
    printf("\n%*s", (int)indent, "");
    p->column = indent;
}

/* What stands between the last element and the next: `open` dimensions begin
 * anew, and the one before them moves on. */
static void between(printer *p, uint32_t open, size_t room)
{
    uint32_t d = p->ndim - 1 - open;
    bool left_out = p->index[d] == p->cut[d];
    if (open == 0) {
        put(p, ",");
        if (left_out) {
            put(p, " …,");
        }
        if (p->column + 1 + room > LINE_COLUMNS) {
            new_line(p, p->ndim);
        } else {
            put(p, " ");
        }
        return;
    }
    put(p, ",");
    for (uint32_t i = 0; i < open; i++) {
        if (i == 0 || i + 1 == open) {
            new_line(p, i + 1 == open ? d + 1 : 0);
        }
    }
    if (left_out) {
        put(p, "…,");
        new_line(p, d + 1);
    }
}

static void print_element(printer *p, const char *value)
{
    uint32_t open = 0; /* dimensions whose brackets open here */
    while (open < p->ndim && p->index[p->ndim - 1 - open] == 0) {
        open++;
    }
    if (p->begun && p->ndim > 0) {
        between(p, open, strlen(value));
    }
    p->begun = true;
    for (uint32_t i = 0; i < open; i++) {
        put(p, "[");
    }
    put(p, value);
    for (uint32_t d = p->ndim; d-- > 0;) {
        if (++p->index[d] < p->shape[d]) {
            return;
        }
        p->index[d] = 0;
        put(p, "]");
    }
}

static void print_elements(printer *p, lg_dtype dtype, const char *data, uint64_t n)
{
    unsigned bytes = lg_dtype_bits(dtype) / 8;
    char value[VALUE_TEXT];
    for (uint64_t i = 0; i < n; i++) {
        print_element(p, value_text(dtype, data + i * bytes, value));
    }
}

/* --------------------------------------------------------- what is read */

/* Everything, piece by piece, in order. */
static int walk(cli *c, const subject *w, bool (*fn)(const char *data, uint64_t elements, uint64_t bytes, void *arg),
                void *arg)
{
    chunks k;
    chunks_begin(&k, w->s->ndim, w->s->offset, w->s->size, w->t->dtype, CHUNK_BYTES);
    if (k.done) {
        return -1;
    }
    char *data = need(malloc((size_t)bytes_of(w->t->dtype, chunks_most(&k)) + 1));
    int exit_status = -1;
    bool go_on = true;
    while (exit_status < 0 && go_on && chunks_next(&k)) {
        lg_error err = LG_ERROR_INIT;
        if (load_region(w->k, w->t, k.offset, k.size, data, NULL, w->copy_of, &err) != LG_OK) {
            exit_status = report_error(c, &err, NULL);
        } else {
            go_on = fn(data, k.elements, bytes_of(w->t->dtype, k.elements), arg);
        }
    }
    free(data);
    return exit_status;
}

/* The edges that a summary shows: for each dimension of the result one range,
 * or the first and the last few. */
typedef struct edges {
    uint64_t shown[LG_MAX_NDIM]; /* of each dimension of the tensor */
    uint64_t first[LG_MAX_NDIM]; /* how many of them stand before the gap; = shown: no gap */
    uint64_t elements;
} edges;

static void cut_edges(const slice *s, uint64_t before, uint64_t behind, edges *e)
{
    e->elements = 1;
    for (uint32_t d = 0; d < s->ndim; d++) {
        bool gap = s->size[d] > before + behind;
        e->shown[d] = gap ? before + behind : s->size[d];
        e->first[d] = gap ? before : e->shown[d];
        e->elements = e->elements > UINT64_MAX / e->shown[d] ? UINT64_MAX : e->elements * e->shown[d];
    }
}

/* Fewer at each edge until it is little enough: a tensor of many dimensions
 * has many corners. */
static void choose_edges(const slice *s, edges *e)
{
    static const uint64_t tries[][2] = {{3, 3}, {1, 1}, {1, 0}};
    for (size_t i = 0; i < sizeof tries / sizeof *tries; i++) {
        cut_edges(s, tries[i][0], tries[i][1], e);
        if (e->elements <= VALUES_SHOWN) {
            return;
        }
    }
}

/* Loads each corner to its place in the compact array. */
static lg_status load_edges(const subject *w, const edges *e, char *data, lg_error *err)
{
    const slice *s = w->s;
    int64_t strides[LG_MAX_NDIM];
    int64_t step = lg_dtype_bits(w->t->dtype) / 8;
    for (uint32_t d = s->ndim; d-- > 0;) {
        strides[d] = step;
        step *= (int64_t)e->shown[d];
    }
    bool behind[LG_MAX_NDIM] = {false};
    while (true) {
        uint64_t offset[LG_MAX_NDIM], size[LG_MAX_NDIM];
        char *to = data;
        for (uint32_t d = 0; d < s->ndim; d++) {
            uint64_t rest = e->shown[d] - e->first[d];
            offset[d] = s->offset[d] + (behind[d] ? s->size[d] - rest : 0);
            size[d] = behind[d] ? rest : e->first[d];
            to += behind[d] ? (int64_t)e->first[d] * strides[d] : 0;
        }
        lg_status status = load_region(w->k, w->t, offset, size, to, strides, w->copy_of, err);
        if (status != LG_OK) {
            return status;
        }
        uint32_t d = s->ndim;
        while (d > 0 && (behind[d - 1] || e->first[d - 1] == e->shown[d - 1])) {
            behind[--d] = false;
        }
        if (d == 0) {
            return LG_OK;
        }
        behind[d - 1] = true;
    }
}

/* -------------------------------------------------------------------- print */

static printer printer_of(const slice *s)
{
    printer p = {.ndim = s->out_ndim};
    for (uint32_t d = 0; d < p.ndim; d++) {
        p.shape[d] = s->out_shape[d];
        p.cut[d] = UINT64_MAX;
    }
    return p;
}

static int print_summary(cli *c, const subject *w)
{
    edges e;
    choose_edges(w->s, &e);
    printer p = printer_of(w->s);
    uint64_t of = elements_of(w->s->out_ndim, w->s->out_shape);
    for (uint32_t i = 0; i < p.ndim; i++) {
        uint32_t d = w->s->out_dim[i];
        p.shape[i] = e.shown[d];
        p.cut[i] = e.first[d] < e.shown[d] ? e.first[d] : UINT64_MAX;
    }
    char *data = need(malloc((size_t)bytes_of(w->t->dtype, e.elements) + 1));
    lg_error err = LG_ERROR_INIT;
    int exit_status = -1;
    if (load_edges(w, &e, data, &err) != LG_OK) {
        exit_status = report_error(c, &err, NULL);
    } else {
        print_elements(&p, w->t->dtype, data, e.elements);
        putchar('\n');
        report_note(c, "%" PRIu64 " of %" PRIu64 " elements shown; --all prints all", e.elements, of);
    }
    free(data);
    return exit_status;
}

typedef struct print_walk {
    printer p;
    lg_dtype dtype;
} print_walk;

static bool print_piece(const char *data, uint64_t elements, uint64_t bytes, void *arg)
{
    (void)bytes;
    print_walk *w = arg;
    print_elements(&w->p, w->dtype, data, elements);
    return true;
}

/* Elements below a byte: the bytes that they are packed into. */
typedef struct packed_walk {
    printer p;
    uint64_t left;
} packed_walk;

static bool print_packed(const char *data, uint64_t elements, uint64_t bytes, void *arg)
{
    (void)elements;
    packed_walk *w = arg;
    uint64_t n = bytes < w->left ? bytes : w->left;
    print_elements(&w->p, LG_U8, data, n);
    w->left -= n;
    return w->left > 0;
}

static int print_bytes(cli *c, const subject *w, uint64_t elements, bool all)
{
    uint64_t bytes = bytes_of(w->t->dtype, elements);
    bool cut = !all && bytes > VALUES_SHOWN;
    packed_walk walk_bytes = {.left = cut ? 64 : bytes};
    walk_bytes.p = (printer){.ndim = 1, .shape = {walk_bytes.left}, .cut = {UINT64_MAX}};
    int exit_status = walk(c, w, print_packed, &walk_bytes);
    if (exit_status < 0) {
        putchar('\n');
        report_note(c, "%s has %u bits: these are its packed bytes", lg_dtype_name(w->t->dtype),
                    lg_dtype_bits(w->t->dtype));
        if (cut) {
            report_note(c, "the first 64 of %" PRIu64 " bytes shown; --all prints all", bytes);
        }
    }
    return exit_status;
}

int values_print(cli *c, const subject *w, bool all)
{
    uint64_t n = elements_of(w->s->out_ndim, w->s->out_shape);
    if (n == 0) {
        puts("[]");
        return -1;
    }
    if (lg_dtype_bits(w->t->dtype) % 8 != 0) {
        return print_bytes(c, w, n, all);
    }
    if (n > VALUES_SHOWN && !all) {
        return print_summary(c, w);
    }
    print_walk p = {.p = printer_of(w->s), .dtype = w->t->dtype};
    int exit_status = walk(c, w, print_piece, &p);
    if (p.p.begun) {
        putchar('\n');
    }
    return exit_status;
}

/* --------------------------------------------------------------------- JSON */

typedef struct json_walk {
    json_t *flat;
    lg_dtype dtype;
} json_walk;

static bool json_piece(const char *data, uint64_t elements, uint64_t bytes, void *arg)
{
    json_walk *w = arg;
    unsigned bits = lg_dtype_bits(w->dtype);
    bool packed = bits % 8 != 0;
    for (uint64_t i = 0; i < (packed ? bytes : elements); i++) {
        json_push(w->flat, packed ? value_json(LG_U8, data + i) : value_json(w->dtype, data + i * (bits / 8)));
    }
    return true;
}

/* The next elements of the flat array, nested as the shape says. */
static json_t *nest(json_t *flat, size_t *at, const uint64_t *shape, uint32_t ndim)
{
    if (ndim == 0) {
        return json_incref(json_array_get(flat, (*at)++));
    }
    json_t *a = need(json_array());
    for (uint64_t i = 0; i < shape[0]; i++) {
        json_push(a, nest(flat, at, shape + 1, ndim - 1));
    }
    return a;
}

int values_json(cli *c, const subject *w, bool all, json_t **out)
{
    *out = NULL;
    uint64_t n = elements_of(w->s->out_ndim, w->s->out_shape);
    if (n > VALUES_SHOWN && !all) {
        return -1;
    }
    json_walk j = {.flat = need(json_array()), .dtype = w->t->dtype};
    int exit_status = n > 0 ? walk(c, w, json_piece, &j) : -1;
    if (exit_status < 0) {
        size_t at = 0;
        bool packed = lg_dtype_bits(w->t->dtype) % 8 != 0;
        *out = packed || n == 0 ? json_incref(j.flat) : nest(j.flat, &at, w->s->out_shape, w->s->out_ndim);
    }
    json_decref(j.flat);
    return exit_status;
}
