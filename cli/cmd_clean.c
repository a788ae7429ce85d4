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

/* Refused because of a newer version, or for want of a good one: the answer
 * is no, not trouble. */
static int refused_or_trouble(cli *c, const lg_error *err)
{
    int exit_status = report_error(c, err, NULL);
    return err->status == LG_ERR_VERSION ? CLI_NO : exit_status;
}

typedef struct pruning {
    cli *c;
    const lg_listing *l; /* for sizes as ls has them */
    bool yes;
    table *rows;
    json_t *items;
    uint64_t n, bytes; /* removed, or would be */
} pruning;

/* Of the files that the manifest lists, as everywhere; of a folder without one
 * all that lies in it. */
static uint64_t bytes_of(const pruning *p, const lg_prune_item *item)
{
    for (size_t i = 0; i < p->l->n; i++) {
        const lg_entry *e = &p->l->entries[i];
        if (e->kind == LG_ENTRY_COMMITTED && e->bytes > 0 && strcmp(e->name, item->name) == 0) {
            return e->bytes;
        }
    }
    return item->bytes;
}

static void take_item(const lg_prune_item *i, void *arg)
{
    pruning *p = arg;
    char g[GENERATION_TEXT], size[SIZE_TEXT];
    uint64_t bytes = bytes_of(p, i);
    const char *reason = strcmp(i->reason, "older than the last 1") == 0 ? "older than the newest" : i->reason;
    p->n += i->removed != 0;
    p->bytes += i->removed ? bytes : 0;
    if (p->items != NULL) {
        json_t *o = need(json_object());
        json_put(o, "name", json_text(i->name));
        json_put(o, "step", json_u64(i->step));
        json_put(o, "generation", json_generation(i->generation));
        json_put(o, "bytes", json_u64(bytes));
        json_put(o, "goes", json_boolean(i->removed));
        json_put(o, "reason", json_text(reason));
        json_push(p->items, o);
        return;
    }
    text_style style = i->removed ? STYLE_BAD : STYLE_PLAIN;
    table_cell(p->rows, style, "%s", !i->removed ? "stays" : p->yes ? "removed" : "goes");
    table_cell(p->rows, style, "%" PRIu64, i->step);
    table_cell(p->rows, style, "%s", generation_text(i->generation, g));
    table_cell(p->rows, style, "%s", size_text(p->c, bytes, size));
    table_cell(p->rows, style, "%s", reason);
}

static bool has_checkpoint(const lg_listing *l)
{
    for (size_t i = 0; i < l->n; i++) {
        if (l->entries[i].kind == LG_ENTRY_COMMITTED) {
            return true;
        }
    }
    return false;
}

static void tell_pruning(cli *c, const place *p, const pruning *all)
{
    if (c->json) {
        json_put(c->document, "root", json_text(p->root));
        json_put(c->document, "dry_run", json_boolean(!all->yes));
        json_put(c->document, "checkpoints", all->items);
        json_put(c->document, "removed", json_u64(all->yes ? all->n : 0));
        json_put(c->document, "bytes", json_u64(all->bytes));
    } else if (all->n > 0) {
        char count[COUNT_TEXT], size[SIZE_TEXT];
        printf("%s %s, %s\n", all->yes ? "removed" : "would remove",
               count_text(all->n, "checkpoint", "checkpoints", count), size_text(c, all->bytes, size));
    }
}

static int prune_root(cli *c, const place *p, const lg_prune_options *o, const lg_listing *l)
{
    static const char *const heads[] = {"", ">STEP", "GENERATION", ">SIZE", "REASON"};
    pruning all = {.c = c, .l = l, .yes = !o->dry_run, .rows = table_new(c, 5, heads)};
    all.items = c->json ? need(json_array()) : NULL;
    if (isatty(STDERR_FILENO)) {
        report_note(c, "verifying the newest checkpoint that stays");
    }
    lg_error err = LG_ERROR_INIT;
    lg_status status = lg_prune(p->root, o, take_item, &all, &err);
    table_print(all.rows, 0);
    tell_pruning(c, p, &all);
    if (status != LG_OK) {
        return refused_or_trouble(c, &err);
    }
    if (l->unreadable_newer) {
        report_as(c, LG_ERR_VERSION, "use the version of lastgood that wrote it, or a later one",
                  "%s: a newer version of lastgood wrote here: nothing is removed", p->where);
        return CLI_NO;
    }
    if (all.n == 0 && !c->json) {
        puts("nothing to remove");
    }
    close_dry_run(c, all.yes, all.n);
    return CLI_YES;
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
    lg_prune_options o = LG_PRUNE_OPTIONS_INIT;
    o.keep_last = (uint32_t)last;
    o.keep_every = every;
    o.dry_run = !cli_has(c, "yes");
    lg_listing *l = NULL;
    lg_error err = LG_ERROR_INIT;
    if (lg_list(p.root, 0, &l, &err) != LG_OK) {
        exit_status = report_error(c, &err, NULL);
    } else if (!has_checkpoint(l)) {
        exit_status = report_as(c, LG_ERR_EMPTY, "'lastgood ls -a' shows what else lies there",
                                "%s holds no checkpoint", p.where);
    } else {
        exit_status = prune_root(c, &p, &o, l);
    }
    lg_listing_free(l);
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

static bool is_swept(const sweeping *s, const char *name)
{
    for (size_t i = 0; i < s->n; i++) {
        if (strcmp(s->all[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

static uint64_t last_owner(const lg_listing *l)
{
    uint64_t last = 0;
    for (size_t i = 0; i < l->n; i++) {
        bool higher = l->entries[i].kind == LG_ENTRY_OWNER && l->entries[i].generation.epoch > last;
        last = higher ? l->entries[i].generation.epoch : last;
    }
    return last;
}

static const char *why_left(const lg_listing *l, const lg_entry *e, uint64_t last)
{
    if (l->unreadable_newer) {
        return "a newer version of lastgood wrote here: nothing goes";
    }
    if (e->generation.epoch >= last) {
        return "belongs to the last session; the next one that opens the root removes it";
    }
    return e->kind == LG_ENTRY_TOMBSTONE ? "needed until every checkpoint is newer" : "could not be removed";
}

static int compare_left(const void *a, const void *b)
{
    return strcmp((*(const lg_entry *const *)a)->name, (*(const lg_entry *const *)b)->name);
}

/* What of the same kinds stays, and why. */
static void tell_left(cli *c, const sweeping *s, const char *root)
{
    lg_listing *l = NULL;
    if (lg_list(root, LG_LIST_ALL, &l, NULL) != LG_OK) {
        return;
    }
    const lg_entry **left = need_calloc(l->n, sizeof *left);
    size_t n = 0;
    for (size_t i = 0; i < l->n; i++) {
        const lg_entry *e = &l->entries[i];
        bool kind = e->kind == LG_ENTRY_PARTIAL || e->kind == LG_ENTRY_TRASH || e->kind == LG_ENTRY_TOMBSTONE;
        if (kind && !is_swept(s, e->name)) {
            left[n++] = e;
        }
    }
    qsort(left, n, sizeof *left, compare_left);
    static const char *const heads[] = {NULL, NULL};
    table *t = table_new(c, 2, heads);
    json_t *items = need(json_array());
    for (size_t i = 0; i < n; i++) {
        char size[SIZE_TEXT];
        const char *why = why_left(l, left[i], last_owner(l));
        json_t *o = need(json_object());
        json_put(o, "name", json_text(left[i]->name));
        json_put(o, "bytes", json_u64(left[i]->bytes));
        json_put(o, "reason", json_text(why));
        json_push(items, o);
        table_cell(t, STYLE_PLAIN, "%s", left[i]->name);
        table_cell(t, STYLE_PLAIN, "%s", size_text(c, left[i]->bytes, size));
        table_note(t, STYLE_NOTE, "%s", why);
    }
    if (c->json) {
        json_put(c->document, "left", items);
        table_free(t);
    } else {
        json_decref(items);
        if (n > 0) {
            puts("stays:");
        }
        table_print(t, 2);
    }
    free(left);
    lg_listing_free(l);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const swept *)a)->name, ((const swept *)b)->name);
}

/* In the order of names, since a folder has none. */
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
    }
    if (items != NULL) {
        json_put(c->document, "names", items);
    }
    table_print(t, 0);
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
    exit_status = status == LG_OK ? CLI_YES : refused_or_trouble(c, &err);
    if (c->json) {
        json_put(c->document, "root", json_text(p.root));
        json_put(c->document, "dry_run", json_boolean(!yes));
        json_put(c->document, "removed", json_u64(yes ? all.n : 0));
        json_put(c->document, "bytes", json_u64(all.bytes));
        tell_left(c, &all, p.root);
    } else if (status == LG_OK) {
        char count[COUNT_TEXT], size[SIZE_TEXT];
        if (all.n == 0) {
            puts("nothing to sweep");
        } else {
            printf("%s %s, %s\n", yes ? "removed" : "would remove", count_text(all.n, "name", "names", count),
                   size_text(c, all.bytes, size));
        }
        tell_left(c, &all, p.root);
        close_dry_run(c, yes, all.n);
    }
    for (size_t i = 0; i < all.n; i++) {
        free(all.all[i].name);
    }
    free(all.all);
    place_free(&p);
    return exit_status;
}
