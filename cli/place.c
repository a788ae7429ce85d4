/* SPDX-License-Identifier: Apache-2.0 */
#include "place.h"

#include "nearest.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* A path that the library takes as such, whatever it begins with. */
static char *as_path(const char *path)
{
    bool scheme = strncmp(path, "file:", 5) == 0 || strncmp(path, "mem:", 4) == 0;
    return scheme ? need_format("./%s", path) : need_strdup(path);
}

/* The path in "file:PATH" and "file:///PATH" (docs/stores.md). NULL after an
 * error message. */
static char *plain_path(cli *c, const char *where)
{
    if (strncmp(where, "file:", 5) != 0) {
        return need_strdup(where);
    }
    if (strncmp(where, "file://", 7) != 0) {
        return as_path(where + 5);
    }
    const char *from = where + 7;
    from += strncmp(from, "localhost/", 10) == 0 ? 9 : 0;
    if (from[0] != '/') {
        report_trouble(c, "file:PATH is any path, file:///PATH an absolute one", "%s names another host", where);
        return NULL;
    }
    char *out = need_strdup(from), *to = out;
    for (; *from != '\0'; from++) {
        if (from[0] != '%') {
            *to++ = *from;
            continue;
        }
        char digits[3] = {from[1], from[1] != '\0' ? from[2] : '\0', '\0'};
        unsigned long code = strspn(digits, "0123456789abcdefABCDEF") == 2 ? strtoul(digits, NULL, 16) : 0;
        if (code == 0) {
            report_trouble(c, NULL, "%s: %% needs two hex digits, not 00", where);
            free(out);
            return NULL;
        }
        *to++ = (char)code;
        from += 2;
    }
    *to = '\0';
    return out;
}

static bool number(const char **p, uint64_t *out)
{
    char *end = NULL;
    if (**p < '0' || **p > '9') {
        return false;
    }
    errno = 0;
    *out = strtoull(*p, &end, 10);
    *p = end;
    return errno == 0;
}

/* What stands behind the @. */
static bool selector(const char *p, place *out)
{
    if (*p == 'g') {
        p++;
        out->kind = PLACE_GENERATION;
        return number(&p, &out->generation.epoch) && *p++ == '.' && number(&p, &out->generation.serial) && *p == '\0';
    }
    out->kind = PLACE_STEP;
    return number(&p, &out->step) && *p == '\0';
}

/* "step-…", the only visible folders of ours in a root. */
static bool step_name(const char *name)
{
    uint64_t step, epoch, serial;
    int n = 0;
    return sscanf(name, "step-%" SCNu64 ".g%" SCNu64 ".%" SCNu64 "%n", &step, &epoch, &serial, &n) == 3 &&
           name[n] == '\0';
}

static void trim_slashes(char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') {
        path[--n] = '\0';
    }
}

static char *parent_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (slash == NULL) {
        return need_strdup(".");
    }
    return need_format("%.*s", slash == path ? 1 : (int)(slash - path), path);
}

static const char *last_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL || slash[1] == '\0' ? path : slash + 1;
}

/* A link ("latest") stands for what it leads to, and "." for its own name: the
 * library follows no links inside a root, and needs a step folder's name. */
static void resolve(place *p)
{
    struct stat st;
    const char *last = last_of(p->path);
    bool dots = strcmp(last, ".") == 0 || strcmp(last, "..") == 0;
    if (dots || (lstat(p->path, &st) == 0 && S_ISLNK(st.st_mode))) {
        char *real = realpath(p->path, NULL);
        if (real != NULL) {
            char *here = parent_of(p->path), *home = realpath(here, NULL), *there = parent_of(real);
            p->elsewhere = !dots && (home == NULL || strcmp(home, there) != 0);
            free(here);
            free(home);
            free(there);
            free(p->path);
            p->path = real;
        }
    }
}

static bool is_step_folder(const char *path)
{
    char *manifest = need_format("%s/lastgood.json", path);
    struct stat st;
    bool has = lstat(manifest, &st) == 0;
    free(manifest);
    const char *name = last_of(path);
    /* The library says of the hidden ones why they are no checkpoints. */
    return has || step_name(name) || strncmp(name, ".step-", 6) == 0 || strncmp(name, ".trash-", 7) == 0;
}

/* The first part of the path that is not there, and what may be meant. */
static int not_there(cli *c, const char *path)
{
    char *missing = need_strdup(path), *parent;
    struct stat st;
    while (true) {
        parent = parent_of(missing);
        if (strcmp(parent, missing) == 0 || stat(parent, &st) == 0) {
            break;
        }
        free(missing);
        missing = parent;
    }
    nearest near;
    nearest_begin(&near, last_of(missing));
    char *names[4096];
    size_t n = 0;
    DIR *dir = opendir(parent);
    struct dirent *e;
    while (dir != NULL && (e = readdir(dir)) != NULL && n < sizeof names / sizeof *names) {
        if (e->d_name[0] != '.') {
            names[n] = need_strdup(e->d_name);
            nearest_offer(&near, names[n++]);
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
    char *meant = nearest_text(&near), *hint;
    const char *shown = strcmp(parent, ".") == 0 ? "the current folder" : parent;
    if (meant != NULL) {
        hint = need_format("%s has %s", shown, meant);
    } else {
        hint = need_format("%s has nothing named '%s'", shown, last_of(missing));
    }
    int exit_status = report_as(c, LG_ERR_NOT_FOUND, hint, "%s: there is no such file or folder", path);
    while (n > 0) {
        free(names[--n]);
    }
    free(hint);
    free(meant);
    free(missing);
    free(parent);
    return exit_status;
}

int place_find(cli *c, const char *where, place *out)
{
    *out = (place){.where = where, .path = plain_path(c, where)};
    if (out->path == NULL) {
        return CLI_TROUBLE;
    }
    if (out->path[0] == '\0') {
        place_free(out);
        return report_trouble(c, NULL, "an empty name is no place");
    }
    if (strncmp(where, "mem:", 4) == 0) {
        place_free(out);
        return report_trouble(c, NULL, "%s: memory of another process cannot be looked at", where);
    }
    struct stat st;
    int exit_status = -1;
    /* A path that exists is meant as it stands, even with an @ in it. */
    if (stat(out->path, &st) == 0) {
        trim_slashes(out->path);
        resolve(out);
        if (S_ISREG(st.st_mode)) {
            out->kind = PLACE_FILE;
        } else if (!S_ISDIR(st.st_mode)) {
            exit_status = report_trouble(c, NULL, "%s: is neither a folder nor a regular file", where);
        } else if (is_step_folder(out->path)) {
            out->kind = PLACE_FOLDER;
            out->root = parent_of(out->path);
            out->name = need_strdup(last_of(out->path));
        } else {
            out->kind = PLACE_ROOT;
            out->root = need_strdup(out->path);
        }
    } else if (errno != ENOENT && errno != ENOTDIR) {
        lg_status status = errno == EACCES ? LG_ERR_PERMISSION : errno == ENAMETOOLONG ? LG_ERR_INVALID : LG_ERR_IO;
        exit_status = report_as(c, status, NULL, "%s: %s", where, strerror(errno));
    } else {
        char *at = strrchr(out->path, '@');
        struct stat root;
        out->root = at != NULL && at != out->path ? need_format("%.*s", (int)(at - out->path), out->path) : NULL;
        if (out->root == NULL || stat(out->root, &root) != 0) {
            exit_status = not_there(c, out->root != NULL ? out->root : out->path);
        } else if (!S_ISDIR(root.st_mode)) {
            exit_status = report_trouble(c, NULL, "%s: is not a folder", out->root);
        } else if (!selector(at + 1, out)) {
            exit_status = report_trouble(c,
                                         "after @ stands a step, as @500, or a generation, as @g3.17; for the "
                                         "newest good one give the root alone",
                                         "'%s' is no checkpoint of %s", at, out->root);
        } else if (is_step_folder(out->root)) {
            exit_status = report_trouble(c, "leave out what stands behind the @, or give the root",
                                         "%s is a step folder already", out->root);
        }
    }
    if (exit_status >= 0) {
        place_free(out);
    }
    return exit_status;
}

void place_free(place *p)
{
    free(p->path);
    free(p->root);
    free(p->name);
    *p = (place){0};
}

bool place_holds(const place *p, const lg_entry *e)
{
    switch (p->kind) {
    case PLACE_ROOT:
        return true;
    case PLACE_FOLDER:
        return strcmp(p->name, e->name) == 0;
    case PLACE_STEP:
        return e->kind != LG_ENTRY_OWNER && e->kind != LG_ENTRY_ROLLBACK && e->kind != LG_ENTRY_FOREIGN &&
               e->kind != LG_ENTRY_TRASH && e->step == p->step;
    case PLACE_GENERATION:
        return e->kind != LG_ENTRY_OWNER && e->kind != LG_ENTRY_FOREIGN && e->kind != LG_ENTRY_TRASH &&
               lg_generation_compare(e->generation, p->generation) == 0;
    default:
        return false;
    }
}

const lg_entry *place_entry(const place *p, const lg_listing *l)
{
    for (size_t i = 0; i < l->n; i++) {
        const lg_entry *e = &l->entries[i];
        bool usable = p->kind != PLACE_ROOT || (e->status == LG_OK && !e->discarded);
        if (e->kind == LG_ENTRY_COMMITTED && usable && place_holds(p, e)) {
            return e;
        }
    }
    return NULL;
}

bool place_is_root(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *e;
    bool is = false;
    while (dir != NULL && !is && (e = readdir(dir)) != NULL) {
        is = step_name(e->d_name) || strncmp(e->d_name, ".owner-", 7) == 0;
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return is;
}

bool status_is_damage(lg_status status)
{
    switch (status) {
    case LG_ERR_CORRUPT:
    case LG_ERR_FORMAT:
    case LG_ERR_COVERAGE:
    case LG_ERR_NOT_WHOLE:
    case LG_ERR_LIMIT:
    case LG_ERR_MISSING:
    case LG_ERR_MISMATCH:
    case LG_ERR_NOT_FOUND: /* of a file of it */
        return true;
    default:
        return false;
    }
}

const char *status_words(lg_status status)
{
    switch (status) {
    case LG_OK:
        return "whole";
    case LG_ERR_VERSION:
        return "of a newer version";
    case LG_ERR_PERMISSION:
        return "not permitted to read";
    case LG_ERR_CONFLICT:
        return "in conflict";
    default:
        return status_is_damage(status) ? "damaged" : "unreadable";
    }
}

/* Past these nobody goes on unasked, as lg_resume. */
static bool must_ask(lg_status status)
{
    return status == LG_ERR_VERSION || status == LG_ERR_PERMISSION || status == LG_ERR_CONFLICT;
}

/* Nothing that can be passed over without a word: a run would not resume. */
static int cannot_pass(cli *c, const place *p, const lg_entry *e)
{
    char g[GENERATION_TEXT], *what = NULL;
    const char *way = e->kind == LG_ENTRY_ROLLBACK     ? "where it leads is not known: name a checkpoint"
                      : e->status == LG_ERR_VERSION    ? "use the version of lastgood that wrote it, or name another"
                      : e->status == LG_ERR_PERMISSION ? "get the right to read it, or name another"
                                                       : "name the one that is meant";
    char *hint = need_format("%s, as %s@STEP; 'lastgood ls %s' lists them", way, p->where, p->where);
    generation_text(e->generation, g);
    if (e->kind == LG_ENTRY_ROLLBACK) {
        what = need_format("the newest rollback record of %s, %s, is damaged", p->where, g);
    } else {
        what = need_format("the newest checkpoint of %s, step %" PRIu64 " (%s), is %s", p->where, e->step, g,
                           status_words(e->status));
    }
    int exit_status = report_as(c, e->status, hint, "%s: %s", what, e->reason);
    free(what);
    free(hint);
    return exit_status;
}

/* The newest good one of a root, and a note that says so, and what was passed. */
static int newest_good(cli *c, const place *p, char **where)
{
    lg_listing *l = NULL;
    lg_error err = LG_ERROR_INIT;
    if (lg_list(p->root, 0, &l, &err) != LG_OK) {
        return report_error(c, &err, NULL);
    }
    const lg_entry *good = NULL;
    size_t n = 0;
    for (size_t i = 0; i < l->n && good == NULL; i++) {
        const lg_entry *e = &l->entries[i];
        bool lost = e->kind == LG_ENTRY_ROLLBACK && e->status != LG_OK && !e->discarded;
        if ((e->kind != LG_ENTRY_COMMITTED && !lost) || e->discarded) {
            continue;
        }
        n++;
        if (e->status == LG_OK) {
            good = e;
        } else if (lost || must_ask(e->status)) {
            int exit_status = cannot_pass(c, p, e);
            lg_listing_free(l);
            return exit_status;
        } else {
            report_note(c, "passed over step %" PRIu64 " (%s), which is %s: %s", e->step,
                        generation_text(e->generation, (char[GENERATION_TEXT]){0}), status_words(e->status), e->reason);
        }
    }
    int exit_status = -1;
    if (good != NULL) {
        char generation[GENERATION_TEXT];
        generation_text(good->generation, generation);
        report_note(c, "taking step %" PRIu64 " (%s), the newest good checkpoint of %s", good->step, generation,
                    p->where);
        *where = need_format("%s/%s", p->root, good->name);
    } else if (n == 0) {
        err.status = LG_ERR_EMPTY;
        snprintf(err.message, sizeof err.message, "%s holds no checkpoint", p->where);
        exit_status = report_error(c, &err, NULL);
    } else {
        err.status = LG_ERR_NO_GOOD;
        snprintf(err.message, sizeof err.message, "none of the checkpoints in %s is good", p->where);
        exit_status = report_error(c, &err, NULL);
    }
    lg_listing_free(l);
    return exit_status;
}

int place_checkpoint(cli *c, const place *p, char **where)
{
    switch (p->kind) {
    case PLACE_ROOT:
        return newest_good(c, p, where);
    case PLACE_FILE:
        return report_trouble(c, "'lastgood show' and 'lastgood verify' also take a single safetensors file",
                              "%s is a file, not a checkpoint", p->where);
    default:
        *where = need_strdup(p->path);
        return -1;
    }
}

int place_open(cli *c, const place *p, lg_checkpoint **out, char **folder)
{
    char *where = NULL;
    int exit_status = place_checkpoint(c, p, &where);
    if (exit_status >= 0) {
        return exit_status;
    }
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint_info info;
    lg_status status = lg_checkpoint_open(where, out, &err);
    free(where);
    if (status == LG_OK && folder != NULL) {
        status = lg_checkpoint_get_info(*out, &info, &err);
        if (status == LG_OK) {
            const char *name = p->kind == PLACE_FOLDER ? p->name : info.folder;
            *folder = strcmp(p->root, "/") == 0                              ? need_format("/%s", name)
                      : strcmp(p->root, ".") == 0 && p->kind == PLACE_FOLDER ? need_strdup(p->path)
                                                                             : need_format("%s/%s", p->root, name);
        } else {
            lg_checkpoint_close(*out);
        }
    }
    if (status != LG_OK) {
        char *hint = status == LG_ERR_NOT_FOUND ? need_format("'lastgood ls %s' shows what there is", p->root) : NULL;
        exit_status = report_error(c, &err, hint);
        free(hint);
    }
    return exit_status;
}

int place_open_where(cli *c, const char *where, lg_checkpoint **out, char **folder)
{
    place p;
    int exit_status = place_find(c, where, &p);
    if (exit_status < 0) {
        exit_status = place_open(c, &p, out, folder);
        place_free(&p);
    }
    return exit_status;
}

int place_no_tensor(cli *c, lg_checkpoint *k, const char *where, const char *name)
{
    const char *value = NULL;
    if (lg_checkpoint_global_json(k, name, &value, NULL) == LG_OK) {
        char *state = need_format("'%s' is a key of global state: lastgood show --state='%s' %s", name, name, where);
        report_as(c, LG_ERR_MISSING, state, "%s: there is no tensor '%s'", where, name);
        free(state);
        return CLI_NO;
    }
    nearest near;
    nearest_begin(&near, name);
    lg_tensor_info t;
    size_t n = 0;
    for (; lg_checkpoint_tensor(k, n, &t, NULL) == LG_OK; n++) {
        nearest_offer(&near, t.name);
    }
    char *meant = nearest_text(&near);
    char *hint = meant != NULL ? need_format("is %s meant?", meant)
                               : need_format("'lastgood show --tensors %s' lists all %zu", where, n);
    report_as(c, LG_ERR_MISSING, hint, "%s: there is no tensor '%s'", where, name);
    free(hint);
    free(meant);
    return CLI_NO;
}
