/* SPDX-License-Identifier: Apache-2.0 */

/* rollback, pin, rm: what is decided about one checkpoint. */

#include "place.h"
#include "progress.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void put_checkpoint(json_t *o, uint64_t step, lg_generation g)
{
    json_put(o, "step", json_u64(step));
    json_put(o, "generation", json_generation(g));
}

/* How many checkpoints may be meant. */
static size_t count_meant(const place *p, const lg_listing *l)
{
    size_t n = 0;
    for (size_t i = 0; i < l->n; i++) {
        n += l->entries[i].kind == LG_ENTRY_COMMITTED && place_holds(p, &l->entries[i]);
    }
    return n;
}

/* Finds the place and its checkpoint's entry; *l is the caller's. The entry is
 * NULL for a step folder that was copied away. -1, or the exit status. */
static int find_entry(cli *c, place *p, lg_listing **l, const lg_entry **entry)
{
    int exit_status = place_find(c, c->args[0], p);
    if (exit_status >= 0) {
        return exit_status;
    }
    lg_error err = LG_ERROR_INIT;
    if (p->kind == PLACE_FILE) {
        exit_status = report_trouble(c, NULL, "%s is a file, not a checkpoint", p->where);
    } else if (p->kind == PLACE_FOLDER && p->elsewhere) {
        /* Looking is harmless; what is changed must be what was named. */
        exit_status = report_as(c, LG_ERR_INVALID, "if that is meant, name it itself",
                                "%s is a link out of its folder, to %s", p->where, p->path);
    } else if (lg_list(p->root, 0, l, &err) != LG_OK) {
        exit_status = report_error(c, &err, NULL);
    } else {
        *entry = place_entry(p, *l);
        if (*entry == NULL && p->kind != PLACE_ROOT && p->kind != PLACE_FOLDER) {
            char *hint = need_format("'lastgood ls %s' shows what there is", p->root);
            exit_status = report_as(c, LG_ERR_NOT_FOUND, hint, "%s: there is no such checkpoint", p->where);
            free(hint);
        } else if (p->kind == PLACE_GENERATION && count_meant(p, *l) > 1) {
            char *hint = need_format("'lastgood ls %s' shows them: name the one that is meant by its step", p->root);
            exit_status =
                report_as(c, LG_ERR_CONFLICT, hint, "%s: several checkpoints claim this generation", p->where);
            free(hint);
        }
        if (exit_status >= 0) {
            lg_listing_free(*l);
        }
    }
    if (exit_status >= 0) {
        place_free(p);
    }
    return exit_status;
}

/* "step 500 (g3.17)" */
static char *name_of(const place *p, const lg_entry *e)
{
    char g[GENERATION_TEXT];
    return e != NULL ? need_format("step %" PRIu64 " (%s)", e->step, generation_text(e->generation, g))
                     : need_strdup(p->where);
}

static void put_folder(cli *c, const place *p, const lg_entry *e)
{
    if (c->json) {
        json_put(c->document, "folder", json_text(e != NULL ? e->name : p->where));
        if (e != NULL) {
            put_checkpoint(c->document, e->step, e->generation);
        }
    }
}

/* ----------------------------------------------------------------- rollback */

/* A list of checkpoints, for a line and for the document. */
typedef struct names {
    text line;
    json_t *array; /* NULL without --json */
} names;

static void add_name(names *n, const lg_entry *e)
{
    char g[GENERATION_TEXT];
    text_add(&n->line, "%sstep %" PRIu64 " (%s)", n->line.len > 0 ? ", " : "", e->step,
             generation_text(e->generation, g));
    if (n->array != NULL) {
        json_t *o = need(json_object());
        put_checkpoint(o, e->step, e->generation);
        json_push(n->array, o);
    }
}

static void tell_line(const char *label, const names *n)
{
    if (n->line.len > 0) {
        printf("%s", label);
        text_wrap(stdout, n->line.data, 2, (unsigned)strlen(label));
        putchar('\n');
    }
}

static bool was_discarded(const lg_listing *before, const char *name)
{
    for (size_t i = 0; i < before->n; i++) {
        if (strcmp(before->entries[i].name, name) == 0) {
            return before->entries[i].discarded != 0;
        }
    }
    return false;
}

static void tell_rollback(cli *c, const lg_entry *target, const lg_listing *before, const char *root,
                          lg_generation made)
{
    char g[GENERATION_TEXT];
    lg_listing *after = NULL;
    lg_error err = LG_ERROR_INIT;
    names gone = {.array = c->json ? need(json_array()) : NULL};
    names back = {.array = c->json ? need(json_array()) : NULL};
    if (lg_list(root, 0, &after, &err) != LG_OK) {
        report_note(c, "it is recorded, but what it changes could not be listed: %s", err.message);
    }
    for (size_t i = 0; after != NULL && i < after->n; i++) {
        const lg_entry *e = &after->entries[i];
        if (e->kind == LG_ENTRY_COMMITTED && e->discarded && !was_discarded(before, e->name)) {
            add_name(&gone, e);
        } else if (e->kind == LG_ENTRY_COMMITTED && !e->discarded && was_discarded(before, e->name)) {
            add_name(&back, e);
        }
    }
    if (c->json) {
        json_t *o = need(json_object());
        put_checkpoint(o, target->step, target->generation);
        json_put(c->document, "target", o);
        json_put(c->document, "record", json_generation(made));
        json_put(c->document, "discarded", gone.array);
        json_put(c->document, "back", back.array);
    } else {
        printf("the run goes back to step %" PRIu64 " (%s)", target->step, generation_text(target->generation, g));
        printf("; recorded as rollback %s\n", generation_text(made, g));
        tell_line("no longer discarded: ", &back);
        tell_line("discarded, but still on disk: ", &gone);
        if (gone.line.len == 0 && back.line.len == 0) {
            puts("nothing newer was there; a session that still runs fails its next save");
        }
    }
    text_free(&gone.line);
    text_free(&back.line);
    lg_listing_free(after);
}

/* Reads every byte of one checkpoint. -1, or the exit status. */
static int verify_first(cli *c, const char *where, const lg_entry *e)
{
    lg_checkpoint *k = NULL;
    lg_error err = LG_ERROR_INIT;
    lg_verify_options o = LG_VERIFY_OPTIONS_INIT;
    o.progress = progress_update;
    lg_status status = lg_checkpoint_open(where, &k, &err);
    if (status == LG_OK) {
        char *what = need_format("verifying step %" PRIu64, e->step);
        progress_begin(c, what);
        free(what);
        status = lg_verify(k, &o, NULL, &err);
        progress_end();
    }
    lg_checkpoint_close(k);
    if (status == LG_OK) {
        return -1;
    }
    char *hint = need_format("'lastgood verify %s' names all that is wrong; roll back to another one", where);
    int exit_status = report_error(c, &err, hint);
    free(hint);
    return exit_status;
}

int cmd_rollback(cli *c)
{
    place p;
    lg_listing *l = NULL;
    const lg_entry *e = NULL;
    int exit_status = find_entry(c, &p, &l, &e);
    if (exit_status >= 0) {
        return exit_status;
    }
    if (p.kind == PLACE_ROOT) {
        char *hint =
            need_format("name the checkpoint to go back to, as %s@STEP; 'lastgood ls %s' lists them", p.where, p.where);
        exit_status = report_trouble(c, hint, "%s is a root, not a checkpoint", p.where);
        free(hint);
    } else if (e == NULL) {
        exit_status = report_trouble(c, "move it back into its root under its step name first",
                                     "%s is no step folder of a root", p.where);
    } else if (!cli_has(c, "no-verify") && e->status == LG_OK) {
        exit_status = verify_first(c, p.path, e);
    }
    lg_error err = LG_ERROR_INIT;
    lg_generation made = {0, 0};
    if (exit_status < 0) {
        if (lg_rollback(p.path, cli_value(c, "reason"), &made, &err) == LG_OK) {
            tell_rollback(c, e, l, p.root, made);
            exit_status = CLI_YES;
        } else {
            exit_status = report_error(c, &err, NULL);
        }
    }
    lg_listing_free(l);
    place_free(&p);
    return exit_status;
}

/* ---------------------------------------------------------------------- pin */

/* The reason to write: a pin that is set again without one keeps the one it has. */
static const char *reason_of(const cli *c, const lg_entry *e)
{
    bool keep = !cli_has(c, "reason") && !cli_has(c, "unpin") && e != NULL && e->pinned;
    return keep ? e->note : cli_value(c, "reason");
}

static void tell_pin(cli *c, const place *p, const lg_entry *e, const char *reason)
{
    bool pinned = !cli_has(c, "unpin");
    if (c->json) {
        json_put(c->document, "pinned", json_boolean(pinned));
        json_put(c->document, "reason", json_text(reason != NULL ? reason : ""));
        return;
    }
    char *name = name_of(p, e);
    text line = {0};
    text_add(&line, "%s %s", pinned ? "pinned" : "unpinned", name);
    if (pinned && reason != NULL && reason[0] != '\0') {
        text_add(&line, ": %s", reason);
    }
    text_put(stdout, line.data);
    putchar('\n');
    text_free(&line);
    free(name);
}

/* Of a root its newest good one, which place_checkpoint names. */
int cmd_pin(cli *c)
{
    place p;
    lg_listing *l = NULL;
    const lg_entry *e = NULL;
    int exit_status = find_entry(c, &p, &l, &e);
    if (exit_status >= 0) {
        return exit_status;
    }
    char *where = NULL;
    const char *reason = reason_of(c, e);
    put_folder(c, &p, e);
    exit_status = place_checkpoint(c, &p, &where);
    lg_error err = LG_ERROR_INIT;
    if (exit_status < 0 && lg_pin(where, !cli_has(c, "unpin"), reason, &err) != LG_OK) {
        exit_status = report_error(c, &err, NULL);
    }
    if (exit_status < 0) {
        exit_status = CLI_YES;
        tell_pin(c, &p, e, reason);
    }
    free(where);
    lg_listing_free(l);
    place_free(&p);
    return exit_status;
}

/* ----------------------------------------------------------------------- rm */

/* What lg_remove (`last`: lg_remove_last) would refuse: without --yes the answer
 * must be the same. */
static lg_status may_go(cli *c, const place *p, const lg_entry *e, const lg_listing *l, bool last, lg_error *err)
{
    err->status = LG_ERR_PROTECTED;
    if (l->unreadable_newer) {
        snprintf(err->message, sizeof err->message,
                 "%s: the root holds a checkpoint of a newer version of lastgood: nothing is removed", p->where);
        return err->status;
    }
    if (e != NULL && e->pinned) {
        snprintf(err->message, sizeof err->message, "%s: %s is pinned%s%s; unpin it first", p->where, e->name,
                 e->note[0] != '\0' ? ": " : "", e->note);
        return err->status;
    }
    if (last) {
        return LG_OK;
    }
    for (size_t i = 0; i < l->n; i++) {
        const lg_entry *other = &l->entries[i];
        if (other == e || other->kind != LG_ENTRY_COMMITTED || other->discarded || other->status != LG_OK) {
            continue;
        }
        lg_checkpoint *k = NULL;
        char *folder = need_format("%s/%s", p->root, other->name), *what = need_format("step %" PRIu64, other->step);
        lg_verify_options o = LG_VERIFY_OPTIONS_INIT;
        o.progress = progress_update;
        progress_begin(c, what);
        bool good = lg_checkpoint_open(folder, &k, NULL) == LG_OK && lg_verify(k, &o, NULL, NULL) == LG_OK;
        progress_end();
        lg_checkpoint_close(k);
        free(folder);
        free(what);
        if (good) {
            return LG_OK;
        }
    }
    snprintf(err->message, sizeof err->message, "%s: %s is the last checkpoint here that may be good; it stays",
             p->where, e != NULL ? e->name : p->where);
    return err->status;
}

static const char *hint_of_refusal(const lg_error *err, const lg_entry *e, const lg_listing *l)
{
    if (err->status != LG_ERR_PROTECTED) {
        return NULL;
    }
    return l->unreadable_newer      ? "remove it with that version"
           : e != NULL && e->pinned ? "'lastgood pin --unpin' takes the pin away"
                                    : "'lastgood verify' tells which others are good; --last removes it all the same";
}

static int remove_one(cli *c, const place *p, const lg_entry *e, const lg_listing *l)
{
    char *exact = NULL, size[SIZE_TEXT];
    bool yes = cli_has(c, "yes"), last = cli_has(c, "last");
    /* What was shown is what goes, even if a newer one of the step appears, or another
     * one claims its generation. */
    exact = p->kind == PLACE_STEP && e != NULL ? need_format("%s/%s", p->root, e->name) : need_strdup(p->path);
    lg_error err = LG_ERROR_INIT;
    put_folder(c, p, e);
    if (isatty(STDERR_FILENO) && !last) {
        report_note(c, "verifying another checkpoint before this one goes");
    }
    lg_status status = !yes   ? may_go(c, p, e, l, last, &err)
                       : last ? lg_remove_last(exact, &err)
                              : lg_remove(exact, &err);
    free(exact);
    if (c->json) {
        if (e != NULL) {
            json_put(c->document, "bytes", json_u64(e->bytes));
        }
        json_put(c->document, "dry_run", json_boolean(!yes));
        json_put(c->document, "removed", json_boolean(yes && status == LG_OK));
    }
    if (status != LG_OK) {
        return report_error(c, &err, hint_of_refusal(&err, e, l));
    }
    if (!c->json) {
        char *name = name_of(p, e);
        printf("%s ", yes ? "removed" : "would remove");
        text_put(stdout, name);
        free(name);
        if (e != NULL) {
            printf(", %s", size_text(c, e->bytes, size));
        }
        putchar('\n');
        if (!yes) {
            report_note(c, "nothing was removed; --yes removes it");
        }
    }
    return CLI_YES;
}

int cmd_rm(cli *c)
{
    place p;
    lg_listing *l = NULL;
    const lg_entry *e = NULL;
    int exit_status = find_entry(c, &p, &l, &e);
    if (exit_status >= 0) {
        return exit_status;
    }
    if (p.kind == PLACE_ROOT) {
        char *hint =
            e != NULL ? need_format("name one, as %s@%" PRIu64 "; 'lastgood prune' removes by a rule", p.where, e->step)
                      : NULL;
        exit_status = report_trouble(c, hint, "%s is a root, not a checkpoint", p.where);
        free(hint);
    } else {
        exit_status = remove_one(c, &p, e, l);
    }
    lg_listing_free(l);
    place_free(&p);
    return exit_status;
}
