/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_PLACE_H
#define LG_CLI_PLACE_H

/* What a WHERE of the command line means. */

#include "report.h"

typedef enum place_kind {
    PLACE_ROOT,       /* a folder that is no step folder */
    PLACE_FOLDER,     /* a step folder */
    PLACE_STEP,       /* ROOT@STEP */
    PLACE_GENERATION, /* ROOT@gE.S */
    PLACE_FILE        /* a regular file */
} place_kind;

/* What is wrong with a checkpoint, in a word or two: "damaged", or why it could
 * not be looked at. LG_OK: "whole". */
const char *status_words(lg_status status);
/* Damage, rather than something else that keeps it from being used? */
bool status_is_damage(lg_status status);

typedef struct place {
    place_kind kind;
    const char *where; /* as given */
    char *path;        /* without "file:"; for the library */
    char *root;        /* NULL for files */
    char *name;        /* FOLDER: the step folder's name */
    bool elsewhere;    /* it was a link that leads into another folder than its own */
    uint64_t step;
    lg_generation generation;
} place;

/* -1, or the exit status after an error message. */
int place_find(cli *c, const char *where, place *out);
void place_free(place *p);

/* Does a listing's entry belong to the place? Roots: all do. */
bool place_holds(const place *p, const lg_entry *entry);

/* The entry of the one checkpoint that the place names, the newest of a step;
 * of a root its newest good one. NULL if the listing has none (a step folder
 * that was copied away from its root). */
const lg_entry *place_entry(const place *p, const lg_listing *l);

/* Does the folder hold names that lastgood gives in a root? */
bool place_is_root(const char *path);

/* For commands that need one checkpoint. *where gets what to give to the
 * library (free() it): for a root its newest good checkpoint, which a note
 * names. -1, or the exit status. */
int place_checkpoint(cli *c, const place *p, char **where);

/* The same, opened. *folder (free() it; may be NULL) gets the path of the step
 * folder. */
int place_open(cli *c, const place *p, lg_checkpoint **out, char **folder);

/* place_find, place_open and place_free in one. */
int place_open_where(cli *c, const char *where, lg_checkpoint **out, char **folder);

/* The checkpoint has no tensor of this name: says so, with the nearest ones,
 * or that it is a key of global state. Returns CLI_NO. */
int place_no_tensor(cli *c, lg_checkpoint *k, const char *where, const char *name);

#endif
