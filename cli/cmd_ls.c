/* SPDX-License-Identifier: Apache-2.0 */
#include "place.h"
#include "table.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* "newest, pinned", "damaged, discarded", … */
static char *state_of(const lg_entry *e)
{
    text t = {0};
    text_add(&t, "%s", e->status == LG_OK ? "good" : e->status == LG_ERR_VERSION ? "unreadable" : "damaged");
    if (e->newest) {
        text_add(&t, ", newest");
    }
    if (e->discarded) {
        text_add(&t, ", discarded");
    }
    if (e->pinned) {
        text_add(&t, ", pinned");
    }
    return t.data;
}

static void row_of_checkpoint(const cli *c, table *t, const lg_entry *e)
{
    text_style style = e->status != LG_OK ? STYLE_BAD : e->discarded ? STYLE_DIM : e->newest ? STYLE_GOOD : STYLE_PLAIN;
    char small[SIZE_TEXT];
    bool known = e->created[0] != '\0';
    table_cell(t, style, "%" PRIu64, e->step);
    table_cell(t, style, "%s", generation_text(e->generation, small));
    table_cell(t, style, "%s", created_text(e->created, small));
    if (known) {
        table_cell(t, style, "%" PRIu32, e->world);
        table_cell(t, style, "%" PRIu64, e->tensors);
        table_cell(t, style, "%s", size_text(c, e->bytes, small));
    } else {
        for (int i = 0; i < 3; i++) {
            table_cell(t, style, "-");
        }
    }
    char *state = state_of(e);
    table_cell(t, style, "%s", state);
    free(state);
    if (e->status != LG_OK) {
        table_note(t, STYLE_BAD, "%s", e->reason);
    }
    if (e->pinned && e->note[0] != '\0') {
        table_note(t, STYLE_NOTE, "pinned: %s", e->note);
    }
}

static void row_of_rollback(table *t, const lg_entry *e)
{
    char small[GENERATION_TEXT];
    text_style style = e->status != LG_OK ? STYLE_BAD : e->discarded ? STYLE_DIM : STYLE_NOTE;
    table_cell(t, style, "-");
    table_cell(t, style, "%s", generation_text(e->generation, small));
    table_cell(t, style, "%s", created_text(e->created, small));
    for (int i = 0; i < 3; i++) {
        table_cell(t, style, "%s", "");
    }
    if (e->status != LG_OK) {
        table_cell(t, style, "damaged rollback record");
        table_note(t, STYLE_BAD, "%s", e->reason);
        return;
    }
    table_cell(t, style, "rollback to step %" PRIu64 " (%s)%s", e->target_step, generation_text(e->target, small),
               e->discarded ? ", itself undone" : "");
    if (e->note[0] != '\0') {
        table_note(t, STYLE_NOTE, "reason: %s", e->note);
    }
}

static bool in_the_list(const lg_entry *e) { return e->kind == LG_ENTRY_COMMITTED || e->kind == LG_ENTRY_ROLLBACK; }

static const char *what_it_is(const lg_entry *e)
{
    switch (e->kind) {
    case LG_ENTRY_PARTIAL:
        return "partial: being written, or left by a crash";
    case LG_ENTRY_TRASH:
        return "trash: being removed";
    case LG_ENTRY_TOMBSTONE:
        return "tombstone: an attempt that was ended";
    case LG_ENTRY_OWNER:
        return "owner: a session claimed this epoch";
    default:
        return "foreign: none of lastgood's names";
    }
}

static int by_kind_and_name(const void *a, const void *b)
{
    const lg_entry *x = *(const lg_entry *const *)a, *y = *(const lg_entry *const *)b;
    return x->kind != y->kind ? (x->kind < y->kind ? -1 : 1) : strcmp(x->name, y->name);
}

static void print_others(const cli *c, const place *p, const lg_listing *l)
{
    static const char *const heads[] = {"NAME", ">SIZE", "WHAT"};
    table *t = table_new(c, 3, heads);
    const lg_entry **others = need_calloc(l->n, sizeof *others);
    size_t n = 0;
    for (size_t i = 0; i < l->n; i++) {
        if (!in_the_list(&l->entries[i]) && place_holds(p, &l->entries[i])) {
            others[n++] = &l->entries[i];
        }
    }
    qsort(others, n, sizeof *others, by_kind_and_name); /* a folder has no order */
    for (size_t i = 0; i < n; i++) {
        char size[SIZE_TEXT];
        table_cell(t, STYLE_PLAIN, "%s", others[i]->name);
        table_cell(t, STYLE_PLAIN, "%s", others[i]->kind == LG_ENTRY_OWNER ? "" : size_text(c, others[i]->bytes, size));
        table_cell(t, STYLE_PLAIN, "%s", what_it_is(others[i]));
    }
    free(others);
    puts(table_rows(t) > 0 ? "\nalso here:" : "\nnothing else is here");
    table_print(t, 2);
}

static void print_list(const cli *c, const place *p, const lg_listing *l)
{
    static const char *const heads[] = {">STEP", "GENERATION", "CREATED (UTC)", ">RANKS", ">TENSORS", ">SIZE", "STATE"};
    table *t = table_new(c, 7, heads);
    uint64_t bytes = 0, n = 0;
    for (size_t i = 0; i < l->n; i++) {
        const lg_entry *e = &l->entries[i];
        if (!in_the_list(e) || !place_holds(p, e)) {
            continue;
        }
        if (e->kind == LG_ENTRY_ROLLBACK) {
            row_of_rollback(t, e);
        } else {
            row_of_checkpoint(c, t, e);
            bytes += e->bytes;
            n++;
        }
    }
    table_print(t, 0);
    if (n > 1) {
        char count[COUNT_TEXT], size[SIZE_TEXT];
        printf("%s, %s\n", count_text(n, "checkpoint", "checkpoints", count), size_text(c, bytes, size));
    }
}

static json_t *entry_json(const lg_entry *e)
{
    json_t *o = need(json_object());
    json_put(o, "kind", json_text(lg_entry_kind_name(e->kind)));
    json_put(o, "name", json_text(e->name));
    if (e->kind == LG_ENTRY_FOREIGN) {
        json_put(o, "bytes", json_u64(e->bytes));
        return o;
    }
    json_put(o, "generation", json_generation(e->generation));
    if (e->kind == LG_ENTRY_OWNER || e->kind == LG_ENTRY_TRASH) {
        json_put(o, "bytes", json_u64(e->bytes));
        return o;
    }
    if (e->kind == LG_ENTRY_ROLLBACK) {
        json_t *target = need(json_object());
        json_put(target, "step", json_u64(e->target_step));
        json_put(target, "generation", json_generation(e->target));
        json_put(o, "target", target);
    } else {
        json_put(o, "step", json_u64(e->step));
        json_put(o, "bytes", json_u64(e->bytes));
    }
    if (!in_the_list(e)) {
        return o;
    }
    json_put(o, "good", json_boolean(e->status == LG_OK));
    json_put(o, "status", json_text(lg_status_name(e->status)));
    json_put(o, "reason", json_text(e->reason));
    json_put(o, "discarded", json_boolean(e->discarded));
    json_put(o, "note", json_text(e->note));
    json_put(o, "run", json_text(e->run_id));
    json_put(o, "created", json_text(e->created));
    if (e->kind == LG_ENTRY_COMMITTED) {
        json_put(o, "newest", json_boolean(e->newest));
        json_put(o, "pinned", json_boolean(e->pinned));
        json_put(o, "world", json_u64(e->world));
        json_put(o, "tensors", json_u64(e->tensors));
    }
    return o;
}

static void fill_document(cli *c, const place *p, const lg_listing *l)
{
    json_put(c->document, "root", json_text(p->root));
    json_put(c->document, "unreadable_newer", json_boolean(l->unreadable_newer));
    json_t *all = need(json_array());
    const lg_entry **order = need_calloc(l->n, sizeof *order);
    size_t n = 0, others;
    for (size_t i = 0; i < l->n; i++) {
        if (in_the_list(&l->entries[i]) && place_holds(p, &l->entries[i])) {
            order[n++] = &l->entries[i];
        }
    }
    others = n;
    for (size_t i = 0; i < l->n; i++) {
        if (!in_the_list(&l->entries[i]) && place_holds(p, &l->entries[i])) {
            order[n++] = &l->entries[i];
        }
    }
    qsort(order + others, n - others, sizeof *order, by_kind_and_name);
    for (size_t i = 0; i < n; i++) {
        json_push(all, entry_json(order[i]));
    }
    free(order);
    json_put(c->document, "entries", all);
}

static int nothing(cli *c, const place *p)
{
    char *hint = NULL;
    if (p->kind != PLACE_ROOT) {
        hint = need_format("'lastgood ls %s' lists all checkpoints", p->root);
    } else if (!cli_has(c, "all")) {
        hint = need_format("'lastgood ls -a %s' shows what else lies there", p->where);
    }
    report_trouble(c, hint, "%s: there is no checkpoint", p->where);
    free(hint);
    return CLI_NO;
}

int cmd_ls(cli *c)
{
    place p;
    int exit_status = place_find(c, c->n_args > 0 ? c->args[0] : ".", &p);
    if (exit_status >= 0) {
        return exit_status;
    }
    lg_listing *l = NULL;
    lg_error err = LG_ERROR_INIT;
    bool all = cli_has(c, "all");
    if (p.kind == PLACE_FILE) {
        exit_status = report_trouble(c, "'lastgood show' tells what a safetensors file holds",
                                     "%s is a file, not a root", p.where);
    } else if (lg_list(p.root, all ? LG_LIST_ALL : 0, &l, &err) != LG_OK) {
        exit_status = report_error(c, &err, NULL);
    } else {
        size_t n = 0;
        for (size_t i = 0; i < l->n; i++) {
            n += l->entries[i].kind == LG_ENTRY_COMMITTED && place_holds(&p, &l->entries[i]);
        }
        if (c->json) {
            fill_document(c, &p, l);
        } else {
            print_list(c, &p, l);
            if (all) {
                print_others(c, &p, l);
            }
        }
        exit_status = n > 0 ? CLI_YES : nothing(c, &p);
        if (l->unreadable_newer) {
            report_note(c, "a newer version of lastgood wrote here: while that is so, nothing is removed");
        }
    }
    lg_listing_free(l);
    place_free(&p);
    return exit_status;
}
