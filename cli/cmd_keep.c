/* SPDX-License-Identifier: Apache-2.0 */

/* rollback, pin, rm: what is decided about one checkpoint. */

#include "place.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void put_checkpoint(json_t *o, uint64_t step, lg_generation g)
{
    json_put(o, "step", json_u64(step));
    json_put(o, "generation", json_generation(g));
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
    } else if (lg_list(p->root, 0, l, &err) != LG_OK) {
        exit_status = report_error(c, &err, NULL);
    } else {
        *entry = place_entry(p, *l);
        if (*entry == NULL && p->kind != PLACE_ROOT && p->kind != PLACE_FOLDER) {
            char *hint = need_format("'lastgood ls %s' shows what there is", p->root);
            exit_status = report_trouble(c, hint, "%s: there is no such checkpoint", p->where);
            free(hint);
            lg_listing_free(*l);
        }
    }
    if (exit_status >= 0) {
        place_free(p);
    }
    return exit_status;
}

/* "step 500 (3.17)" */
static char *name_of(const place *p, const lg_entry *e)
{
    char g[GENERATION_TEXT];
    return e != NULL ? need_format("step %" PRIu64 " (%s)", e->step, generation_text(e->generation, g))
                     : need_strdup(p->where);
}

/* ----------------------------------------------------------------- rollback */

static void tell_rollback(cli *c, const lg_entry *target, const lg_listing *l, lg_generation made)
{
    char g[GENERATION_TEXT];
    json_t *discarded = NULL;
    text names = {0};
    size_t n = 0;
    if (c->json) {
        json_t *o = need(json_object());
        put_checkpoint(o, target->step, target->generation);
        json_put(c->document, "target", o);
        json_put(c->document, "record", json_generation(made));
        discarded = need(json_array());
        json_put(c->document, "discarded", discarded);
    }
    for (size_t i = 0; i < l->n; i++) {
        const lg_entry *e = &l->entries[i];
        if (e->kind != LG_ENTRY_COMMITTED || lg_generation_compare(e->generation, target->generation) <= 0) {
            continue;
        }
        n++;
        text_add(&names, "%sstep %" PRIu64 " (%s)", names.len > 0 ? ", " : "", e->step,
                 generation_text(e->generation, g));
        if (c->json) {
            json_t *o = need(json_object());
            put_checkpoint(o, e->step, e->generation);
            json_push(discarded, o);
        }
    }
    if (!c->json) {
        printf("the run goes back to step %" PRIu64 " (%s)", target->step, generation_text(target->generation, g));
        printf("; recorded as rollback %s\n", generation_text(made, g));
        if (n > 0) {
            printf("discarded, but still on disk: %s\n", names.data);
        } else {
            puts("nothing newer was there; a session that still runs fails its next save");
        }
    }
    text_free(&names);
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
    char *where = NULL;
    exit_status = place_checkpoint(c, &p, &where);
    lg_error err = LG_ERROR_INIT;
    lg_generation made = {0, 0};
    if (exit_status < 0 && e == NULL) {
        exit_status = report_trouble(c, "move it back into its root under its step name first",
                                     "%s is no step folder of a root", p.where);
    }
    if (exit_status < 0) {
        if (lg_rollback(where, cli_value(c, "reason"), &made, &err) == LG_OK) {
            tell_rollback(c, e, l, made);
            exit_status = CLI_YES;
        } else {
            exit_status = report_error(c, &err, NULL);
        }
    }
    free(where);
    lg_listing_free(l);
    place_free(&p);
    return exit_status;
}

/* ---------------------------------------------------------------------- pin */

int cmd_pin(cli *c)
{
    place p;
    lg_listing *l = NULL;
    const lg_entry *e = NULL;
    int exit_status = find_entry(c, &p, &l, &e);
    if (exit_status >= 0) {
        return exit_status;
    }
    bool pinned = !cli_has(c, "unpin");
    char *where = NULL;
    exit_status = place_checkpoint(c, &p, &where);
    lg_error err = LG_ERROR_INIT;
    if (exit_status < 0 && lg_pin(where, pinned, cli_value(c, "reason"), &err) != LG_OK) {
        exit_status = report_error(c, &err, NULL);
    }
    if (exit_status < 0) {
        exit_status = CLI_YES;
        if (c->json) {
            if (e != NULL) {
                put_checkpoint(c->document, e->step, e->generation);
            }
            json_put(c->document, "pinned", json_boolean(pinned));
        } else {
            char *name = name_of(&p, e);
            printf("%s ", pinned ? "pinned" : "unpinned");
            text_put(stdout, name);
            putchar('\n');
            free(name);
        }
    }
    free(where);
    lg_listing_free(l);
    place_free(&p);
    return exit_status;
}

/* ----------------------------------------------------------------------- rm */

static int remove_one(cli *c, const place *p, const lg_entry *e)
{
    char *name = name_of(p, e), *exact = NULL, g[GENERATION_TEXT], size[SIZE_TEXT];
    bool yes = cli_has(c, "yes");
    /* What was shown is what goes, even if a newer one of the step appears. */
    exact = p->kind == PLACE_STEP && e != NULL ? need_format("%s@g%s", p->root, generation_text(e->generation, g))
                                               : need_strdup(p->path);
    int exit_status = CLI_YES;
    lg_error err = LG_ERROR_INIT;
    if (yes && isatty(STDERR_FILENO)) {
        report_note(c, "verifying another checkpoint before this one goes");
    }
    if (yes && lg_remove(exact, &err) != LG_OK) {
        const char *hint = err.status != LG_ERR_PROTECTED ? NULL
                           : e != NULL && e->pinned       ? "'lastgood pin --unpin' takes the pin away"
                                                          : "'lastgood verify' tells which others are good";
        exit_status = report_error(c, &err, hint);
    } else if (c->json) {
        if (e != NULL) {
            put_checkpoint(c->document, e->step, e->generation);
            json_put(c->document, "bytes", json_u64(e->bytes));
        }
        json_put(c->document, "removed", json_boolean(yes));
    } else {
        printf("%s ", yes ? "removed" : "would remove");
        text_put(stdout, name);
        if (e != NULL) {
            printf(", %s", size_text(c, e->bytes, size));
        }
        putchar('\n');
        if (!yes) {
            if (e != NULL && e->pinned) {
                report_note(c, "it is pinned: rm would refuse");
            }
            report_note(c, "nothing was removed; --yes removes it");
        }
    }
    free(exact);
    free(name);
    return exit_status;
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
        exit_status = remove_one(c, &p, e);
    }
    lg_listing_free(l);
    place_free(&p);
    return exit_status;
}
