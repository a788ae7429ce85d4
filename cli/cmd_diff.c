/* SPDX-License-Identifier: Apache-2.0 */
#include "diff.h"
#include "progress.h"
#include "table.h"

#include <errno.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct totals {
    uint64_t equal, different, only_a, only_b;
    bool first_copies;
} totals;

static struct {
    uint64_t done, total;
} work;

static void on_bytes(uint64_t bytes)
{
    work.done += bytes;
    progress_update(work.done, work.total, NULL);
}

/* ---------------------------------------------------------------- one tensor */

static char *number_text(double v)
{
    if (isinf(v)) {
        return need_strdup("inf");
    }
    return need_format("%.6g", v);
}

static void row(const cli *c, table *t, const lg_tensor_info *a, const lg_tensor_info *b, const tensor_diff *d)
{
    const lg_tensor_info *one = a != NULL ? a : b;
    char *shape = shape_text(one->ndim, one->shape);
    text_style style = d->what == DIFF_EQUAL ? STYLE_GOOD : STYLE_BAD;
    (void)c;
    table_cell(t, STYLE_PLAIN, "%s", one->name);
    table_cell(t, STYLE_PLAIN, "%s", lg_dtype_name(one->dtype));
    table_cell(t, STYLE_PLAIN, "%s", shape);
    free(shape);
    if (d->what == DIFF_EQUAL) {
        table_cell(t, style, d->bit_exact ? "equal" : "within tolerance");
        table_cell(t, STYLE_PLAIN, "%s", "");
    } else if (d->what == DIFF_VALUES) {
        table_cell(t, style, "%" PRIu64 " of %" PRIu64 "%s", d->differing, d->elements, d->packed ? " bytes" : "");
        if (d->has_largest) {
            char *largest = number_text(d->largest), *at = shape_text(one->ndim, d->at);
            table_cell(t, STYLE_PLAIN, "%s%s%s", largest, one->ndim > 0 ? " at " : "", one->ndim > 0 ? at : "");
            free(largest);
            free(at);
        } else {
            table_cell(t, STYLE_PLAIN, "%s", "");
        }
        if (d->nan > 0) {
            table_note(t, STYLE_NOTE, "%" PRIu64 " nan on one side only", d->nan);
        }
        if (d->has_largest && d->largest == 0 && d->nan == 0) {
            table_note(t, STYLE_NOTE, "only in the sign of zeros");
        }
    } else if (d->what == DIFF_FORM) {
        char *other = shape_text(b->ndim, b->shape);
        table_cell(t, style, "%s", a->dtype != b->dtype ? "other dtype" : "other shape");
        table_cell(t, STYLE_PLAIN, "%s", "");
        table_note(t, STYLE_NOTE, "B has %s %s", lg_dtype_name(b->dtype), other);
        free(other);
    } else {
        table_cell(t, style, d->what == DIFF_ONLY_A ? "only in A" : "only in B");
        table_cell(t, STYLE_PLAIN, "%s", "");
    }
    if (d->what == DIFF_VALUES && d->copies > 1) {
        table_note(t, STYLE_NOTE, "kept per rank: %zu copies were compared", d->copies);
    }
    if (d->first_copies) {
        table_note(t, STYLE_NOTE, "kept per rank, by other ranks: only the first copies were compared");
    }
}

static json_t *row_json(const lg_tensor_info *a, const lg_tensor_info *b, const tensor_diff *d)
{
    const lg_tensor_info *one = a != NULL ? a : b;
    json_t *o = need(json_object());
    json_put(o, "name", json_text(one->name));
    json_put(o, "result", json_text(difference_name(d->what)));
    json_put(o, "dtype", json_text(lg_dtype_name(one->dtype)));
    json_put(o, "shape", json_shape(one->ndim, one->shape));
    if (d->what == DIFF_FORM) {
        json_put(o, "dtype_b", json_text(lg_dtype_name(b->dtype)));
        json_put(o, "shape_b", json_shape(b->ndim, b->shape));
    }
    if (d->what == DIFF_EQUAL || d->what == DIFF_VALUES) {
        json_put(o, "bit_exact", json_boolean(d->bit_exact));
        json_put(o, "elements", json_u64(d->elements));
        json_put(o, "differing", json_u64(d->differing));
        json_put(o, "copies", json_u64(d->copies));
        json_put(o, "nan_on_one_side", json_u64(d->nan));
        json_put(o, "max_abs", d->has_largest ? json_double(d->largest) : json_null());
        json_put(o, "at", d->has_largest ? json_shape(one->ndim, d->at) : json_null());
    }
    return o;
}

/* ---------------------------------------------------------------- all of them */

typedef struct cursor {
    size_t i;
    bool has;
    lg_tensor_info t;
} cursor;

/* The next tensor whose name matches. */
static void advance(const view *v, const char *pattern, cursor *at)
{
    at->has = false;
    while (!at->has && at->i < v->info.n_tensors) {
        at->has = lg_checkpoint_tensor(v->k, at->i++, &at->t, NULL) == LG_OK &&
                  (pattern == NULL || fnmatch(pattern, at->t.name, 0) == 0);
    }
}

static uint64_t bytes_to_compare(const view *v, const char *pattern)
{
    uint64_t bytes = 0;
    cursor at = {0};
    for (advance(v, pattern, &at); at.has; advance(v, pattern, &at)) {
        bytes += at.t.bytes * (at.t.per_rank ? at.t.n_boxes : 1);
    }
    return bytes;
}

static void count(totals *n, const tensor_diff *d)
{
    n->equal += d->what == DIFF_EQUAL;
    n->different += d->what == DIFF_VALUES || d->what == DIFF_FORM;
    n->only_a += d->what == DIFF_ONLY_A;
    n->only_b += d->what == DIFF_ONLY_B;
    n->first_copies |= d->first_copies;
}

static int compare_all(cli *c, const view *a, const view *b, double tolerance, table *t, json_t *all, totals *n)
{
    const char *pattern = cli_value(c, "tensors");
    cursor x = {0}, y = {0};
    work.done = 0;
    work.total = bytes_to_compare(a, pattern);
    progress_begin(c, "comparing");
    advance(a, pattern, &x);
    advance(b, pattern, &y);
    int exit_status = CLI_YES;
    while (exit_status == CLI_YES && (x.has || y.has)) { /* both are sorted */
        int order = !x.has ? 1 : !y.has ? -1 : strcmp(x.t.name, y.t.name);
        tensor_diff d = {.what = order < 0 ? DIFF_ONLY_A : DIFF_ONLY_B};
        lg_error err = LG_ERROR_INIT;
        if (order == 0 && diff_tensors(a, b, &x.t, &y.t, tolerance, on_bytes, &d, &err) != LG_OK) {
            report_error(c, &err, NULL);
            exit_status = CLI_TROUBLE;
            break;
        }
        count(n, &d);
        if (d.what != DIFF_EQUAL || d.first_copies || cli_has(c, "all")) {
            const lg_tensor_info *ta = order <= 0 ? &x.t : NULL, *tb = order >= 0 ? &y.t : NULL;
            if (all != NULL) {
                json_push(all, row_json(ta, tb, &d));
            } else {
                row(c, t, ta, tb, &d);
            }
        }
        if (order <= 0) {
            advance(a, pattern, &x);
        }
        if (order >= 0) {
            advance(b, pattern, &y);
        }
    }
    progress_end();
    return exit_status;
}

/* -------------------------------------------------------------------- state */

#define VALUE_SHOWN 60

static void print_states(const cli *c, const state_diffs *d)
{
    static const char *const heads[] = {"STATE", "KIND", "A", "B"};
    static const char *const words[][2] = {{"state", "global"}, {"rank_state", "per rank"}, {"attached", "attached"}};
    table *t = table_new(c, 4, heads);
    for (size_t i = 0; i < d->n; i++) {
        const state_diff *s = &d->all[i];
        const char *kind = s->kind;
        for (size_t k = 0; k < 3; k++) {
            kind = strcmp(words[k][0], kind) == 0 ? words[k][1] : kind;
        }
        char *a = state_words(s->a != NULL             ? s->a
                              : s->what == DIFF_ONLY_B ? "-"
                              : s->what == DIFF_ONLY_A ? "has it"
                                                       : "",
                              VALUE_SHOWN);
        char *b = state_words(s->b != NULL             ? s->b
                              : s->what == DIFF_ONLY_A ? "-"
                              : s->what == DIFF_ONLY_B ? "has it"
                                                       : "",
                              VALUE_SHOWN);
        table_cell(t, STYLE_PLAIN, "%s", s->key);
        table_cell(t, STYLE_PLAIN, "%s", kind);
        table_cell(t, STYLE_BAD, "%s", a);
        table_cell(t, STYLE_BAD, "%s", b);
        free(a);
        free(b);
    }
    table_print(t, 0);
}

static json_t *states_json(const state_diffs *d, const char *kind)
{
    json_t *all = need(json_array());
    for (size_t i = 0; i < d->n; i++) {
        const state_diff *s = &d->all[i];
        if (strcmp(s->kind, kind) != 0) {
            continue;
        }
        json_t *o = need(json_object());
        json_put(o, "key", json_text(s->key));
        json_put(o, "result", json_text(difference_name(s->what)));
        json_put(o, "a", s->a != NULL ? json_text(s->a) : json_null());
        json_put(o, "b", s->b != NULL ? json_text(s->b) : json_null());
        json_push(all, o);
    }
    return all;
}

/* ------------------------------------------------------------------- result */

static void print_sides(const view *a, const view *b)
{
    const view *sides[] = {a, b};
    for (int i = 0; i < 2; i++) {
        char g[GENERATION_TEXT];
        printf("%c  step %" PRIu64 " (%s)  ", 'A' + i, sides[i]->info.step,
               generation_text(sides[i]->info.generation, g));
        text_put(stdout, sides[i]->folder);
        putchar('\n');
    }
}

static void print_totals(const cli *c, const totals *n, const state_diffs *d, bool with_state, bool equal,
                         bool tolerant)
{
    char s[COUNT_TEXT];
    printf("%s%s%s: %s equal%s", style_begin(c, equal ? STYLE_GOOD : STYLE_BAD), equal ? "equal" : "different",
           style_end(c, equal ? STYLE_GOOD : STYLE_BAD), count_text(n->equal, "tensor", "tensors", s),
           tolerant ? " within the tolerance" : " bit for bit");
    if (n->different > 0) {
        printf(", %" PRIu64 " different", n->different);
    }
    if (n->only_a > 0) {
        printf(", %" PRIu64 " only in A", n->only_a);
    }
    if (n->only_b > 0) {
        printf(", %" PRIu64 " only in B", n->only_b);
    }
    if (with_state) {
        printf("; state and attached files: %zu equal", d->equal[0] + d->equal[1] + d->equal[2]);
        if (d->n > 0) {
            printf(", %zu different", d->n);
        }
    }
    putchar('\n');
}

static void put_side(json_t *document, const char *key, const view *v)
{
    json_t *o = need(json_object());
    json_put(o, "folder", json_text(v->folder));
    json_put(o, "step", json_u64(v->info.step));
    json_put(o, "generation", json_generation(v->info.generation));
    json_put(document, key, o);
}

static void fill_document(cli *c, const view *a, const view *b, const totals *n, const state_diffs *d, json_t *all,
                          bool equal)
{
    json_t *o = c->document;
    put_side(o, "a", a);
    put_side(o, "b", b);
    json_put(o, "equal", json_boolean(equal));
    json_t *counts = need(json_object());
    json_put(counts, "equal", json_u64(n->equal));
    json_put(counts, "different", json_u64(n->different));
    json_put(counts, "only_a", json_u64(n->only_a));
    json_put(counts, "only_b", json_u64(n->only_b));
    json_put(o, "tensor_counts", counts);
    json_put(o, "tensors", all);
    json_put(o, "state", states_json(d, "state"));
    json_put(o, "rank_state", states_json(d, "rank_state"));
    json_put(o, "rank_state_compared", json_boolean(!d->ranks_differ));
    json_put(o, "attached", states_json(d, "attached"));
}

static int compare(cli *c, const view *a, const view *b, double tolerance)
{
    static const char *const heads[] = {"TENSOR", "DTYPE", "SHAPE", "DIFFERING", "LARGEST |A-B|"};
    table *t = table_new(c, 5, heads);
    json_t *all = c->json ? need(json_array()) : NULL;
    totals n = {0};
    state_diffs d = {0};
    lg_error err = LG_ERROR_INIT;
    bool with_state = !cli_has(c, "tensors");
    int exit_status = compare_all(c, a, b, tolerance, t, all, &n);
    if (exit_status == CLI_YES && with_state && diff_states(a, b, &d, &err) != LG_OK) {
        report_error(c, &err, NULL);
        exit_status = CLI_TROUBLE;
    }
    if (exit_status == CLI_YES && !with_state && n.equal + n.different + n.only_a + n.only_b == 0) {
        exit_status = report_trouble(c, NULL, "no tensor of either matches '%s'",
                                     cli_value(c, "tensors") != NULL ? cli_value(c, "tensors") : "*");
    }
    if (exit_status != CLI_YES) {
        json_decref(all);
        table_free(t);
        diff_states_free(&d);
        return exit_status;
    }
    bool equal = n.different + n.only_a + n.only_b + d.n == 0;
    if (c->json) {
        fill_document(c, a, b, &n, &d, all, equal);
        table_free(t);
    } else if (c->quiet) {
        table_free(t);
    } else {
        print_sides(a, b);
        table_print(t, 0);
        print_states(c, &d);
        print_totals(c, &n, &d, with_state, equal, tolerance >= 0);
    }
    if (d.ranks_differ) {
        report_note(c, "saved by %" PRIu32 " and %" PRIu32 " ranks: per-rank state was not compared", a->info.world,
                    b->info.world);
    }
    diff_states_free(&d);
    return equal ? CLI_YES : CLI_NO;
}

static int open_side(cli *c, const char *where, view *v, char **folder)
{
    v->where = where;
    int exit_status = place_open_where(c, where, &v->k, folder);
    if (exit_status >= 0) {
        return CLI_TROUBLE; /* damaged is no difference */
    }
    v->folder = *folder;
    lg_error err = LG_ERROR_INIT;
    if (lg_checkpoint_get_info(v->k, &v->info, &err) != LG_OK) {
        report_error(c, &err, NULL);
        return CLI_TROUBLE;
    }
    return -1;
}

int cmd_diff(cli *c)
{
    double tolerance = -1;
    const char *given = cli_value(c, "tolerance");
    if (given != NULL) {
        char *end = NULL;
        tolerance = strtod(given, &end);
        if (end == given || *end != '\0' || !(tolerance >= 0) || isinf(tolerance)) {
            return report_trouble(c, NULL, "--tolerance takes a number from 0 on, not '%s'", given);
        }
    }
    view a = {0}, b = {0};
    char *folder_a = NULL, *folder_b = NULL;
    int exit_status = open_side(c, c->args[0], &a, &folder_a);
    if (exit_status < 0) {
        exit_status = open_side(c, c->args[1], &b, &folder_b);
    }
    if (exit_status < 0) {
        exit_status = compare(c, &a, &b, tolerance);
    }
    lg_checkpoint_close(a.k);
    lg_checkpoint_close(b.k);
    free(folder_a);
    free(folder_b);
    return exit_status;
}
