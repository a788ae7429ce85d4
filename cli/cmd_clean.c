/* SPDX-License-Identifier: Apache-2.0 */

/* prune and sweep: what goes from a root by rule. Both only show what they
 * would do unless --yes is given. */

#include "place.h"
#include "table.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The argument must be a root. */
static int find_root(cli *c, place *p)
{
    int exit_status = place_find(c, c->args[0], p);
    if (exit_status < 0 && p->kind != PLACE_ROOT) {
        char *hint = p->root != NULL ? need_format("its root is %s", p->root) : NULL;
        exit_status = report_trouble(c, hint, "%s is not a root", p->where);
        free(hint);
        place_free(p);
    }
    return exit_status;
}

static void close_dry_run(cli *c, bool yes, uint64_t n)
{
    if (!yes && n > 0) {
        report_note(c, "nothing was removed; --yes removes %s", n == 1 ? "it" : "them");
    }
}

/* -------------------------------------------------------------------- prune */

typedef struct pruning {
    cli *c;
    bool yes;
    table *rows;
    json_t *items;
    uint64_t n, bytes; /* removed, or would be */
} pruning;

static void take_item(const lg_prune_item *i, void *arg)
{
    pruning *p = arg;
    char g[GENERATION_TEXT], size[SIZE_TEXT];
    p->n += i->removed != 0;
    p->bytes += i->removed ? i->bytes : 0;
    if (p->items != NULL) {
        json_t *o = need(json_object());
        json_put(o, "name", json_text(i->name));
        json_put(o, "step", json_u64(i->step));
        json_put(o, "generation", json_generation(i->generation));
        json_put(o, "bytes", json_u64(i->bytes));
        json_put(o, "goes", json_boolean(i->removed));
        json_put(o, "reason", json_text(i->reason));
        json_push(p->items, o);
        return;
    }
    text_style style = i->removed ? STYLE_BAD : STYLE_PLAIN;
    table_cell(p->rows, style, "%s", !i->removed ? "stays" : p->yes ? "removed" : "goes");
    table_cell(p->rows, style, "%" PRIu64, i->step);
    table_cell(p->rows, style, "%s", generation_text(i->generation, g));
    table_cell(p->rows, style, "%s", size_text(p->c, i->bytes, size));
    table_cell(p->rows, style, "%s", i->reason);
}

int cmd_prune(cli *c)
{
    uint64_t last = 0, every = 0;
    if (!cli_number(c, "keep-last", 1, UINT32_MAX, &last) || !cli_number(c, "keep-every", 1, UINT64_MAX, &every)) {
        return CLI_TROUBLE;
    }
    if (last == 0) {
        return report_trouble(c, "for example --keep-last=3", "how many checkpoints stay? --keep-last=N is needed");
    }
    place p;
    int exit_status = find_root(c, &p);
    if (exit_status >= 0) {
        return exit_status;
    }
    static const char *const heads[] = {"", ">STEP", "GENERATION", ">SIZE", "REASON"};
    bool yes = cli_has(c, "yes");
    pruning all = {.c = c, .yes = yes, .rows = table_new(c, 5, heads), .items = c->json ? need(json_array()) : NULL};
    lg_prune_options o = LG_PRUNE_OPTIONS_INIT;
    o.keep_last = (uint32_t)last;
    o.keep_every = every;
    o.dry_run = !yes;
    lg_error err = LG_ERROR_INIT;
    if (yes && isatty(STDERR_FILENO)) {
        report_note(c, "verifying the newest checkpoint that stays");
    }
    lg_status status = lg_prune(p.root, &o, take_item, &all, &err);
    size_t rows = table_rows(all.rows);
    table_print(all.rows, 0);
    exit_status = CLI_YES;
    if (c->json) {
        json_put(c->document, "root", json_text(p.root));
        json_put(c->document, "dry_run", json_boolean(!yes));
        json_put(c->document, "checkpoints", all.items);
        json_put(c->document, "removed", json_u64(yes ? all.n : 0));
        json_put(c->document, "bytes", json_u64(all.bytes));
    } else if (status == LG_OK && rows > 0) {
        char count[COUNT_TEXT], size[SIZE_TEXT];
        if (all.n == 0) {
            puts("nothing to remove");
        } else {
            printf("%s %s, %s\n", yes ? "removed" : "would remove",
                   count_text(all.n, "checkpoint", "checkpoints", count), size_text(c, all.bytes, size));
        }
    } else if (status == LG_OK) {
        err.status = LG_ERR_EMPTY;
        snprintf(err.message, sizeof err.message, "%s holds no checkpoint", p.where);
        exit_status = report_error(c, &err, NULL);
    }
    if (status != LG_OK) {
        exit_status = report_error(c, &err, NULL);
    } else {
        close_dry_run(c, yes, all.n);
    }
    place_free(&p);
    return exit_status;
}

/* -------------------------------------------------------------------- sweep */

typedef struct swept {
    char *name;
    uint64_t bytes;
} swept;

typedef struct sweeping {
    swept *all;
    size_t n, cap;
    uint64_t bytes;
} sweeping;

static void take_name(const char *name, uint64_t bytes, void *arg)
{
    sweeping *s = arg;
    need_room((void **)&s->all, &s->cap, s->n, sizeof *s->all);
    s->all[s->n++] = (swept){need_strdup(name), bytes};
    s->bytes += bytes;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const swept *)a)->name, ((const swept *)b)->name);
}

/* In the order of names, since a folder has none. Empties *s. */
static void tell_names(cli *c, sweeping *s)
{
    static const char *const heads[] = {"NAME", ">SIZE"};
    table *t = table_new(c, 2, heads);
    json_t *items = c->json ? need(json_array()) : NULL;
    if (s->n > 1) {
        qsort(s->all, s->n, sizeof *s->all, compare_names);
    }
    for (size_t i = 0; i < s->n; i++) {
        if (items != NULL) {
            json_t *o = need(json_object());
            json_put(o, "name", json_text(s->all[i].name));
            json_put(o, "bytes", json_u64(s->all[i].bytes));
            json_push(items, o);
        } else {
            char size[SIZE_TEXT];
            table_cell(t, STYLE_PLAIN, "%s", s->all[i].name);
            table_cell(t, STYLE_PLAIN, "%s", size_text(c, s->all[i].bytes, size));
        }
        free(s->all[i].name);
    }
    if (items != NULL) {
        json_put(c->document, "names", items);
    }
    table_print(t, 0);
    free(s->all);
    s->all = NULL;
}

int cmd_sweep(cli *c)
{
    place p;
    int exit_status = find_root(c, &p);
    if (exit_status >= 0) {
        return exit_status;
    }
    bool yes = cli_has(c, "yes");
    sweeping all = {0};
    lg_error err = LG_ERROR_INIT;
    lg_status status = lg_sweep(p.root, !yes, take_name, &all, &err);
    tell_names(c, &all);
    exit_status = status == LG_OK ? CLI_YES : report_error(c, &err, NULL);
    if (c->json) {
        json_put(c->document, "root", json_text(p.root));
        json_put(c->document, "dry_run", json_boolean(!yes));
        json_put(c->document, "removed", json_u64(yes ? all.n : 0));
        json_put(c->document, "bytes", json_u64(all.bytes));
    } else if (status == LG_OK) {
        char count[COUNT_TEXT], size[SIZE_TEXT];
        if (all.n == 0) {
            puts("nothing to sweep");
        } else {
            printf("%s %s, %s\n", yes ? "removed" : "would remove", count_text(all.n, "name", "names", count),
                   size_text(c, all.bytes, size));
        }
        close_dry_run(c, yes, all.n);
    }
    place_free(&p);
    return exit_status;
}
