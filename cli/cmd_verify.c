/* SPDX-License-Identifier: Apache-2.0 */
#include "place.h"
#include "progress.h"
#include "safetensors.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct problems {
    lg_problem *all;
    size_t n, cap;
} problems;

static void take_problem(const lg_problem *problem, void *arg)
{
    problems *p = arg;
    need_room((void **)&p->all, &p->cap, p->n, sizeof *p->all);
    p->all[p->n++] = *problem;
}

/* Threads find them in any order. */
static int compare_problems(const void *a, const void *b)
{
    const lg_problem *x = a, *y = b;
    int order = strcmp(x->file, y->file);
    if (order != 0) {
        return order;
    }
    return x->offset != y->offset ? (x->offset < y->offset ? -1 : 1) : strcmp(x->message, y->message);
}

/* What is looked at, for lines and document. */
typedef struct subject {
    const char *folder;
    const char *path; /* of the folder; NULL: not known */
    bool has_step;
    uint64_t step;
    lg_generation generation;
} subject;

static void print_subject(const subject *s)
{
    if (s->has_step) {
        char generation[GENERATION_TEXT];
        printf("step %" PRIu64 " (%s)", s->step, generation_text(s->generation, generation));
    } else {
        text_put(stdout, s->folder);
    }
}

/* Messages begin with "folder/file: ", which was said already. */
static const char *without_file(const lg_problem *p)
{
    const char *at = p->file[0] != '\0' ? strstr(p->message, p->file) : NULL;
    size_t n = strlen(p->file);
    return at != NULL && (at == p->message || at[-1] == '/') && strncmp(at + n, ": ", 2) == 0 ? at + n + 2 : p->message;
}

/* File, range and tensor once each, whether the message has them or not. */
static void print_problem(const lg_problem *p)
{
    fputs("  ", stdout);
    text_put(stdout, p->file[0] != '\0' ? p->file : "(the folder)");
    fputs("\n    ", stdout);
    text t = {0};
    const char *message = without_file(p);
    char *range = need_format("%" PRIu64 "..%" PRIu64, p->offset, p->offset + p->bytes);
    if (p->bytes > 0 && strstr(message, range) == NULL) {
        text_add(&t, "bytes %s: ", range);
    }
    text_add(&t, "%s", message);
    if (p->tensor[0] != '\0' && strstr(message, p->tensor) == NULL) {
        text_add(&t, "; tensor \"%s\"", p->tensor);
    }
    text_wrap(stdout, t.data, 4, 4);
    putchar('\n');
    text_free(&t);
    free(range);
}

static json_t *problem_json(const lg_problem *p)
{
    json_t *o = need(json_object());
    json_put(o, "status", json_text(lg_status_name(p->status)));
    json_put(o, "file", json_text(p->file));
    json_put(o, "tensor", json_text(p->tensor));
    json_put(o, "offset", json_u64(p->offset));
    json_put(o, "bytes", json_u64(p->bytes));
    json_put(o, "message", json_text(p->message));
    return o;
}

/* Manifest and pins are read too, but sizes are everywhere those of the files
 * that the manifest lists. */
static lg_verify_result listed_only(const subject *s, lg_verify_result r)
{
    DIR *dir = s->path != NULL ? opendir(s->path) : NULL;
    struct dirent *e;
    while (dir != NULL && (e = readdir(dir)) != NULL) {
        struct stat st;
        bool own = strcmp(e->d_name, "lastgood.json") == 0 || strncmp(e->d_name, "lastgood-pin-", 13) == 0;
        if (own && fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0) {
            r.files -= r.files > 0;
            r.bytes -= (uint64_t)st.st_size < r.bytes ? (uint64_t)st.st_size : r.bytes;
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return r;
}

/* Why it could not be verified, where all problems say the same. */
static const char *trouble_words(const problems *p)
{
    for (size_t i = 1; i < p->n; i++) {
        if (p->all[i].status != p->all[0].status) {
            return "could not be verified";
        }
    }
    return p->n == 0                               ? "could not be verified"
           : p->all[0].status == LG_ERR_VERSION    ? "of a newer version, not verified"
           : p->all[0].status == LG_ERR_PERMISSION ? "may not be read, not verified"
                                                   : "could not be verified";
}

static const char *result_name(int exit_status)
{
    return exit_status == CLI_YES ? "good" : exit_status == CLI_NO ? "damaged" : "trouble";
}

static bool all_conflicts(const problems *p)
{
    for (size_t i = 0; i < p->n; i++) {
        if (p->all[i].status != LG_ERR_CONFLICT) {
            return false;
        }
    }
    return p->n > 0;
}

static void tell(cli *c, const subject *s, const problems *p, const lg_verify_result *read, int exit_status)
{
    lg_verify_result listed = listed_only(s, *read), *r = &listed;
    if (c->json) {
        json_t *o = need(json_object());
        json_put(o, "folder", json_text(s->folder));
        if (s->has_step) {
            json_put(o, "step", json_u64(s->step));
            json_put(o, "generation", json_generation(s->generation));
        }
        json_put(o, "result", json_text(result_name(exit_status)));
        json_put(o, "files", json_u64(r->files));
        json_put(o, "bytes", json_u64(r->bytes));
        json_t *all = need(json_array());
        for (size_t i = 0; i < p->n; i++) {
            json_push(all, problem_json(&p->all[i]));
        }
        json_put(o, "problems", all);
        json_push(json_object_get(c->document, "checkpoints"), o);
        return;
    }
    if (c->quiet) {
        return;
    }
    char files[COUNT_TEXT], size[SIZE_TEXT], count[COUNT_TEXT];
    text_style style = exit_status == CLI_YES ? STYLE_GOOD : STYLE_BAD;
    print_subject(s);
    const char *words = exit_status == CLI_TROUBLE ? trouble_words(p)
                        : all_conflicts(p)         ? status_words(LG_ERR_CONFLICT)
                                                   : result_name(exit_status);
    printf(": %s%s%s", style_begin(c, style), words, style_end(c, style));
    if (p->n > 0) {
        printf(", %s", count_text(p->n, "problem", "problems", count));
    }
    if (r->files > 0) {
        printf(", %s in %s read", size_text(c, r->bytes, size), count_text(r->files, "file", "files", files));
    }
    putchar('\n');
    for (size_t i = 0; i < p->n; i++) {
        print_problem(&p->all[i]);
    }
}

/* Damage counts more than what could not be looked at. */
static int worse(int a, int b)
{
    static const int rank[] = {[CLI_YES] = 0, [CLI_NO] = 2, [CLI_TROUBLE] = 1};
    return rank[a] >= rank[b] ? a : b;
}

/* Is it the file that is wrong, or does the machine refuse to show it? */
static int exit_of_problem(const lg_problem *p)
{
    return status_is_damage(p->status) || p->status == LG_ERR_CONFLICT ? CLI_NO : CLI_TROUBLE;
}

/* A checkpoint that cannot even be opened: its manifest is the problem. */
static int tell_manifest(cli *c, const subject *s, lg_status status, const char *message)
{
    lg_problem one = {.status = status, .file = "lastgood.json"};
    snprintf(one.message, sizeof one.message, "%.*s", (int)sizeof one.message - 1, message);
    problems p = {.all = &one, .n = 1};
    lg_verify_result r = {0};
    int exit_status = exit_of_problem(&one);
    tell(c, s, &p, &r, exit_status);
    return exit_status;
}

/* `conflict`: with which other it is at odds, though both may be whole; NULL: none. */
static int verify_open(cli *c, lg_checkpoint *k, const subject *s, const char *conflict)
{
    uint64_t threads = 0;
    cli_number(c, "threads", 1, 16, &threads);
    problems p = {0};
    if (conflict != NULL) {
        lg_problem one = {.status = LG_ERR_CONFLICT};
        snprintf(one.file, sizeof one.file, "lastgood.json");
        snprintf(one.message, sizeof one.message, "%s", conflict);
        take_problem(&one, &p);
    }
    lg_verify_options o = LG_VERIFY_OPTIONS_INIT;
    o.threads = (uint32_t)threads;
    o.progress = progress_update;
    o.problem = take_problem;
    o.arg = &p;
    char *what = need_format("step %" PRIu64, s->step);
    progress_begin(c, what);
    free(what);
    lg_verify_result r = {0};
    lg_error err = LG_ERROR_INIT;
    lg_status status = lg_verify(k, &o, &r, &err);
    progress_end();
    int exit_status = CLI_YES;
    if (p.n > 1) {
        qsort(p.all, p.n, sizeof *p.all, compare_problems);
    }
    for (size_t i = 0; i < p.n; i++) {
        exit_status = worse(exit_status, exit_of_problem(&p.all[i]));
    }
    if (status != LG_OK && p.n == (conflict != NULL)) {
        report_error(c, &err, NULL);
        exit_status = CLI_TROUBLE;
    }
    tell(c, s, &p, &r, exit_status);
    free(p.all);
    return exit_status;
}

/* One entry of a root. */
static int verify_entry(cli *c, const place *p, const lg_entry *e)
{
    subject s = {
        .folder = e->name, .has_step = e->kind == LG_ENTRY_COMMITTED, .step = e->step, .generation = e->generation};
    if (e->kind == LG_ENTRY_ROLLBACK) {
        if (e->status == LG_OK) {
            return CLI_YES;
        }
        lg_problem one = {.status = e->status};
        snprintf(one.file, sizeof one.file, "%s", e->name);
        snprintf(one.message, sizeof one.message, "%s", e->reason);
        problems all = {.all = &one, .n = 1};
        lg_verify_result r = {0};
        tell(c, &s, &all, &r, exit_of_problem(&one));
        return exit_of_problem(&one);
    }
    char *where = need_format("%s/%s", p->root, e->name);
    s.path = where;
    lg_checkpoint *k = NULL;
    lg_error err = LG_ERROR_INIT;
    int exit_status;
    if (lg_checkpoint_open(where, &k, &err) != LG_OK) {
        exit_status = tell_manifest(c, &s, err.status, e->reason[0] != '\0' ? e->reason : err.message);
    } else {
        exit_status = verify_open(c, k, &s, e->status == LG_ERR_CONFLICT ? e->reason : NULL);
    }
    lg_checkpoint_close(k);
    free(where);
    return exit_status;
}

static int verify_root(cli *c, const place *p)
{
    lg_listing *l = NULL;
    lg_error err = LG_ERROR_INIT;
    if (lg_list(p->root, 0, &l, &err) != LG_OK) {
        return report_error(c, &err, NULL);
    }
    int exit_status = CLI_YES;
    size_t n = 0, damaged = 0, conflicts = 0, unknown = 0;
    for (size_t i = 0; i < l->n; i++) {
        const lg_entry *e = &l->entries[i];
        if (cli_has(c, "newest") && !e->newest) {
            continue;
        }
        n += e->kind == LG_ENTRY_COMMITTED;
        int one = verify_entry(c, p, e);
        const bool conflict = e->status == LG_ERR_CONFLICT;
        damaged += one == CLI_NO && !conflict;
        conflicts += one == CLI_NO && conflict;
        unknown += one == CLI_TROUBLE;
        exit_status = worse(exit_status, one);
    }
    lg_listing_free(l);
    if (n == 0) {
        err.status = LG_ERR_EMPTY;
        snprintf(err.message, sizeof err.message, "%s holds no checkpoint", p->where);
        return report_error(c, &err, NULL);
    }
    if (n > 1 && !c->json && !c->quiet) {
        char count[COUNT_TEXT];
        count_text(n, "checkpoint", "checkpoints", count);
        if (damaged + conflicts + unknown == 0) {
            printf("%s: %sall good%s\n", count, style_begin(c, STYLE_GOOD), style_end(c, STYLE_GOOD));
        } else {
            printf("%s: %s", count, style_begin(c, STYLE_BAD));
            if (damaged > 0) {
                printf("%zu damaged%s", damaged, conflicts + unknown > 0 ? ", " : "");
            }
            if (conflicts > 0) {
                printf("%zu in conflict%s", conflicts, unknown > 0 ? ", " : "");
            }
            if (unknown > 0) {
                printf("%zu could not be verified", unknown);
            }
            printf("%s\n", style_end(c, STYLE_BAD));
        }
    }
    return exit_status;
}

/* The entry of a named checkpoint that cannot be opened, if it has one. */
static int verify_unreadable(cli *c, const place *p, lg_error *why)
{
    subject s = {.folder = p->name != NULL ? p->name : p->path};
    lg_listing *l = NULL;
    lg_error err = LG_ERROR_INIT;
    const lg_entry *e = NULL;
    if (lg_list(p->root, 0, &l, &err) == LG_OK) {
        e = place_entry(p, l);
    }
    int exit_status;
    if (e != NULL) {
        exit_status = verify_entry(c, p, e);
    } else if (report_exit(why->status) == CLI_NO) {
        exit_status = tell_manifest(c, &s, why->status, why->message);
    } else {
        char *hint =
            why->status == LG_ERR_NOT_FOUND ? need_format("'lastgood ls %s' shows what there is", p->root) : NULL;
        exit_status = report_error(c, why, hint);
        free(hint);
    }
    lg_listing_free(l);
    return exit_status;
}

static int verify_one(cli *c, const place *p)
{
    lg_checkpoint *k = NULL;
    lg_error err = LG_ERROR_INIT;
    lg_checkpoint_info info;
    if (lg_checkpoint_open(p->path, &k, &err) != LG_OK) {
        return verify_unreadable(c, p, &err);
    }
    int exit_status;
    if (lg_checkpoint_get_info(k, &info, &err) != LG_OK) {
        exit_status = report_error(c, &err, NULL);
    } else {
        const char *folder = p->name != NULL ? p->name : info.folder;
        char *path = p->kind == PLACE_FOLDER ? need_strdup(p->path) : need_format("%s/%s", p->root, folder);
        subject s = {
            .folder = folder, .path = path, .has_step = true, .step = info.step, .generation = info.generation};
        exit_status = verify_open(c, k, &s, NULL); /* who names one knows which one */
        free(path);
    }
    lg_checkpoint_close(k);
    return exit_status;
}

int cmd_verify(cli *c)
{
    uint64_t threads = 0;
    place p;
    if (!cli_number(c, "threads", 1, 16, &threads)) {
        return CLI_TROUBLE;
    }
    int exit_status = place_find(c, c->args[0], &p);
    if (exit_status >= 0) {
        return exit_status;
    }
    if (p.kind == PLACE_FILE) {
        exit_status = safetensors_verify(c, &p);
    } else {
        if (c->json) {
            json_put(c->document, "root", json_text(p.root));
            json_put(c->document, "checkpoints", need(json_array()));
        }
        exit_status = p.kind == PLACE_ROOT ? verify_root(c, &p) : verify_one(c, &p);
        if (c->json) {
            json_put(c->document, "result", json_text(result_name(exit_status)));
        }
    }
    place_free(&p);
    return exit_status;
}
