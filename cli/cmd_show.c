/* SPDX-License-Identifier: Apache-2.0 */
#include "safetensors.h"
#include "show_parts.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ------------------------------------------------- what the summary counts */

#define DOMAINS_SHOWN 8

typedef struct counts {
    uint64_t bytes[LG_GROUP_COUNT], sums, attached; /* of files */
    size_t files;
    size_t wrong; /* missing, or of another length */
    char *first_wrong;
    const char *domains[DOMAINS_SHOWN];
    size_t n_domains;
    size_t per_rank; /* tensors */
    char *attached_names;
} counts;

static void check_file(const view *v, const lg_file_info *f, counts *n)
{
    char *path = need_format("%s/%s", v->folder, f->name);
    struct stat st;
    bool there = lstat(path, &st) == 0 && S_ISREG(st.st_mode);
    free(path);
    if (there && (uint64_t)st.st_size == f->bytes) {
        return;
    }
    if (n->wrong++ > 0) {
        return;
    }
    n->first_wrong =
        there ? need_format("%s has %" PRIu64 " bytes, not %" PRIu64, f->name, (uint64_t)st.st_size, f->bytes)
              : need_format("%s is missing", f->name);
}

static void count_domain(const lg_file_info *f, counts *n)
{
    for (size_t i = 0; i < n->n_domains && i < DOMAINS_SHOWN; i++) {
        if (strcmp(n->domains[i], f->domain) == 0) {
            return;
        }
    }
    if (n->n_domains < DOMAINS_SHOWN) {
        n->domains[n->n_domains] = f->domain;
    }
    n->n_domains++; /* beyond what is shown one may be counted again; only "more" is said then */
}

static void count(const view *v, counts *n)
{
    *n = (counts){0};
    text names = {0};
    for (size_t i = 0; i < v->info.n_files; i++) {
        lg_file_info f;
        if (lg_checkpoint_file(v->k, i, &f, NULL) != LG_OK) {
            continue;
        }
        n->files++;
        check_file(v, &f, n);
        if (f.is_attached) {
            n->attached += f.bytes;
            text_add(&names, "%s%s", names.len > 0 ? ", " : "", f.name);
        } else if (f.is_sums) {
            n->sums += f.bytes;
            count_domain(&f, n);
        } else {
            n->bytes[f.group] += f.bytes;
        }
    }
    n->attached_names = names.data;
    for (size_t i = 0; i < v->info.n_tensors; i++) {
        lg_tensor_info t;
        n->per_rank += lg_checkpoint_tensor(v->k, i, &t, NULL) == LG_OK && t.per_rank;
    }
}

static void counts_free(counts *n)
{
    free(n->first_wrong);
    free(n->attached_names);
}

typedef struct foreign {
    char **names;
    size_t n, cap, safetensors;
} foreign;

static int take_foreign(const char *name, void *arg)
{
    foreign *f = arg;
    size_t length = strlen(name);
    need_room((void **)&f->names, &f->cap, f->n, sizeof *f->names);
    f->names[f->n++] = need_strdup(name);
    f->safetensors += length >= 12 && strcmp(name + length - 12, ".safetensors") == 0;
    return 0;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static lg_status read_foreign(const view *v, foreign *f, lg_error *err)
{
    *f = (foreign){0};
    lg_status status = lg_checkpoint_foreign(v->k, take_foreign, f, err);
    if (f->n > 1) {
        qsort(f->names, f->n, sizeof *f->names, compare_names);
    }
    return status;
}

static void foreign_free(foreign *f)
{
    for (size_t i = 0; i < f->n; i++) {
        free(f->names[i]);
    }
    free(f->names);
}

/* ------------------------------------------------------------------ the lines */

static void label(const char *name) { printf("  %-12s", name); }

static void line(const char *name, const char *format, ...) LG_PRINTF(2, 3);
static void line(const char *name, const char *format, ...)
{
    char *s = NULL;
    va_list args;
    va_start(args, format);
    if (vasprintf(&s, format, args) < 0) {
        s = NULL;
    }
    va_end(args);
    label(name);
    text_put(stdout, need(s));
    putchar('\n');
    free(s);
}

/* The entry of the root's listing, if it has one: only it knows what is newest
 * and what a rollback discarded. */
static bool find_entry(const view *v, lg_entry *out)
{
    char *root = need_strdup(v->folder), *slash = strrchr(root, '/');
    if (slash == NULL) {
        memcpy(root, ".", 2); /* a folder's name is longer */
    } else {
        slash[slash == root] = '\0';
    }
    lg_listing *l = NULL;
    bool found = false;
    if (lg_list(root, 0, &l, NULL) == LG_OK) {
        const char *name = strrchr(v->folder, '/');
        name = name == NULL ? v->folder : name + 1;
        for (size_t i = 0; i < l->n && !found; i++) {
            found = l->entries[i].kind == LG_ENTRY_COMMITTED && strcmp(l->entries[i].name, name) == 0;
            if (found) {
                *out = l->entries[i];
            }
        }
        lg_listing_free(l);
    }
    free(root);
    return found;
}

static void state_line(const cli *c, const counts *n, const lg_entry *e, bool pinned)
{
    label("state");
    text_style style = n->wrong > 0 ? STYLE_BAD : STYLE_GOOD;
    printf("%s%s%s", style_begin(c, style), n->wrong > 0 ? "damaged" : "whole", style_end(c, style));
    fputs(n->wrong > 0 ? ": " : ", contents not checked", stdout);
    if (n->wrong > 0) {
        text_put(stdout, n->first_wrong);
        if (n->wrong > 1) {
            printf(", and %zu more", n->wrong - 1);
        }
    }
    if (e != NULL && e->newest) {
        fputs(n->wrong > 0 ? "; tried first" : "; newest", stdout);
    }
    if (e != NULL && e->discarded) {
        fputs("; discarded by a rollback", stdout);
    }
    if (pinned) {
        fputs("; pinned", stdout);
        if (e != NULL && e->note[0] != '\0') {
            fputs(": ", stdout);
            text_put(stdout, e->note);
        }
    }
    putchar('\n');
}

static void size_lines(const cli *c, const view *v, const counts *n)
{
    char a[SIZE_TEXT], b[SIZE_TEXT], count_of[COUNT_TEXT];
    line("size", "%s in %s; tensors %s", size_text(c, v->info.file_bytes, a),
         count_text(n->files, "file", "files", count_of), size_text(c, v->info.tensor_bytes, b));
    const struct {
        const char *name;
        uint64_t bytes;
    } parts[] = {{"model", n->bytes[LG_GROUP_MODEL]},
                 {"optim", n->bytes[LG_GROUP_OPTIM]},
                 {"raw", n->bytes[LG_GROUP_RAW]},
                 {"sums", n->sums},
                 {"attached", n->attached}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (parts[i].bytes > 0) {
            printf("    %-10s%s\n", parts[i].name, size_text(c, parts[i].bytes, a));
        }
    }
}

static void saved_by(const view *v, const counts *n)
{
    text t = {0};
    for (size_t i = 0; i < n->n_domains && i < DOMAINS_SHOWN; i++) {
        text_add(&t, "%s%s", i > 0 ? ", " : "", n->domains[i]);
    }
    char ranks[COUNT_TEXT];
    line("saved by", "%s on %s%s", count_text(v->info.world, "rank", "ranks", ranks), text_str(&t),
         n->n_domains > DOMAINS_SHOWN ? " and more" : "");
    text_free(&t);
}

static void tensor_lines(const view *v, const counts *n)
{
    text t = {0};
    text_add(&t, "%zu", v->info.n_tensors);
    if (v->info.n_aliases > 0) {
        text_add(&t, ", %zu of them tied to another%s", v->info.n_aliases,
                 v->info.aliases_once ? " and stored once: transformers cannot open this folder" : "");
    }
    line("tensors", "%s", t.data);
    text_free(&t);
    if (n->per_rank > 0) {
        line("per rank", "%zu tensor%s differ%s between ranks: each rank's copy is kept", n->per_rank,
             n->per_rank == 1 ? "" : "s", n->per_rank == 1 ? "s" : "");
    }
}

#define KEYS_SHOWN 8

static void state_lines(const view *v)
{
    text t = {0};
    size_t keys = lg_checkpoint_global_count(v->k);
    for (size_t i = 0; i < keys; i++) {
        const char *key = lg_checkpoint_global_key(v->k, i);
        if (i == KEYS_SHOWN) {
            text_add(&t, ", … (%zu)", keys);
            break;
        }
        text_add(&t, "%s%s", i > 0 ? ", " : "", key != NULL ? key : "?");
    }
    line("global", "%s", keys > 0 ? t.data : "no state");
    text_free(&t);
    rank_keys ranks;
    rank_keys_read(v, 1, &ranks);
    for (size_t i = 0; i < ranks.n; i++) {
        text_add(&t, "%s%s", i > 0 ? ", " : "", ranks.all[i].name);
    }
    if (ranks.n > 0) {
        line("rank 0 has", "%s", t.data);
    }
    text_free(&t);
    rank_keys_free(&ranks);
}

static void foreign_lines(cli *c, const view *v)
{
    foreign f;
    lg_error err = LG_ERROR_INIT;
    if (read_foreign(v, &f, &err) != LG_OK) {
        report_note(c, "what else lies in the folder could not be listed: %s", err.message);
    }
    text names = {0};
    for (size_t i = 0; i < f.n; i++) {
        text_add(&names, "%s%s", i > 0 ? ", " : "", f.names[i]);
    }
    if (f.n > 0) {
        line("foreign", "%s (not of this checkpoint, not verified)", names.data);
    }
    if (f.safetensors > 0) {
        line("", "PyTorch and transformers would take the .safetensors among them for a part of it: move it away");
    }
    text_free(&names);
    foreign_free(&f);
}

static void parent_line(const view *v)
{
    char g[GENERATION_TEXT];
    if (!v->info.has_parent) {
        line("parent", "none: the first of its run");
    } else {
        line("parent", "step %" PRIu64 " (%s)%s", v->info.parent_step, generation_text(v->info.parent, g),
             v->info.parent_verified ? "" : ", which was loaded without checks");
    }
}

static int print_summary(cli *c, const view *v)
{
    counts n;
    count(v, &n);
    lg_entry e = {0};
    bool listed = find_entry(v, &e);
    char g[GENERATION_TEXT], when[32], size[SIZE_TEXT];
    printf("%sstep %" PRIu64 ", generation %s%s\n", style_begin(c, STYLE_BOLD), v->info.step,
           generation_text(v->info.generation, g), style_end(c, STYLE_BOLD));
    line("folder", "%s", v->folder);
    state_line(c, &n, listed ? &e : NULL, v->info.pinned != 0);
    line("created", "%s UTC", created_text(v->info.created, when));
    line("run", "%s", v->info.run_id);
    line("attempt", "%s", v->info.attempt);
    parent_line(v);
    saved_by(v, &n);
    size_lines(c, v, &n);
    tensor_lines(v, &n);
    line("layouts", "%zu", v->info.n_layouts);
    if (n.attached_names != NULL) {
        line("attached", "%s", n.attached_names);
    }
    state_lines(v);
    foreign_lines(c, v);
    line("checksums", "%s, in blocks of %s", v->info.checksum, size_text(c, v->info.block_bytes, size));
    line("manifest", "%s", v->info.manifest_sha256);
    int exit_status = n.wrong > 0 ? CLI_NO : CLI_YES;
    if (n.wrong > 0) {
        report_note(c, "'lastgood verify %s' lists all that is damaged", v->where);
    }
    counts_free(&n);
    return exit_status;
}

/* --------------------------------------------------------------------- JSON */

static int fill_summary(cli *c, const view *v)
{
    counts n;
    count(v, &n);
    lg_entry e = {0};
    bool listed = find_entry(v, &e);
    json_t *o = c->document;
    const lg_checkpoint_info *i = &v->info;
    json_put(o, "good", json_boolean(n.wrong == 0));
    if (n.wrong > 0) {
        json_put(o, "reason", json_text(n.first_wrong));
    }
    json_put(o, "newest", listed ? json_boolean(e.newest) : json_null());
    json_put(o, "discarded", listed ? json_boolean(e.discarded) : json_null());
    json_put(o, "pinned", json_boolean(i->pinned));
    json_put(o, "created", json_text(i->created));
    json_put(o, "run", json_text(i->run_id));
    json_put(o, "attempt", json_text(i->attempt));
    json_t *parent = json_null();
    if (i->has_parent) {
        parent = need(json_object());
        json_put(parent, "step", json_u64(i->parent_step));
        json_put(parent, "generation", json_generation(i->parent));
        json_put(parent, "verified", json_boolean(i->parent_verified));
    }
    json_put(o, "parent", parent);
    json_put(o, "world", json_u64(i->world));
    json_put(o, "n_files", json_u64(n.files));
    json_put(o, "file_bytes", json_u64(i->file_bytes));
    json_put(o, "tensor_bytes", json_u64(i->tensor_bytes));
    json_t *groups = need(json_object());
    for (int g = 0; g < LG_GROUP_COUNT; g++) {
        json_put(groups, lg_group_name((lg_group)g), json_u64(n.bytes[g]));
    }
    json_put(groups, "sums", json_u64(n.sums));
    json_put(groups, "attached", json_u64(n.attached));
    json_put(o, "group_bytes", groups);
    json_put(o, "n_tensors", json_u64(i->n_tensors));
    json_put(o, "n_aliases", json_u64(i->n_aliases));
    json_put(o, "aliases_once", json_boolean(i->aliases_once));
    json_put(o, "n_per_rank", json_u64(n.per_rank));
    json_put(o, "n_layouts", json_u64(i->n_layouts));
    json_put(o, "checksum", json_text(i->checksum));
    json_put(o, "block_bytes", json_u64(i->block_bytes));
    json_put(o, "manifest_sha256", json_text(i->manifest_sha256));
    json_t *others = need(json_array());
    foreign f;
    read_foreign(v, &f, NULL);
    for (size_t k = 0; k < f.n; k++) {
        json_push(others, json_text(f.names[k]));
    }
    foreign_free(&f);
    json_put(o, "foreign", others);
    int exit_status = n.wrong > 0 ? CLI_NO : CLI_YES;
    counts_free(&n);
    return exit_status;
}

/* -------------------------------------------------------------- the command */

static int show_matches(cli *c, const view *v, const char *pattern)
{
    if (show_tensors(c, v, pattern) > 0 || pattern == NULL) {
        return CLI_YES;
    }
    return report_as(c, LG_ERR_MISSING, "quote the pattern, so that the shell leaves it alone",
                     "%s: no tensor matches '%s'", v->where, pattern);
}

static int show_name(cli *c, const view *v, const char *name)
{
    lg_tensor_info t;
    lg_error err = LG_ERROR_INIT;
    if (lg_checkpoint_find(v->k, name, &t, &err) == LG_OK) {
        return show_tensor(c, v, &t);
    }
    if (err.status != LG_ERR_MISSING) {
        return report_error(c, &err, NULL);
    }
    return strpbrk(name, "*?[") != NULL ? show_matches(c, v, name) : place_no_tensor(c, v->k, v->where, name);
}

static int show(cli *c, const view *v)
{
    if (c->json) {
        json_put(c->document, "folder", json_text(v->folder));
        json_put(c->document, "step", json_u64(v->info.step));
        json_put(c->document, "generation", json_generation(v->info.generation));
    }
    if (cli_value(c, "state") != NULL) {
        return show_state_value(c, v, cli_value(c, "state"));
    }
    bool tensors = cli_has(c, "tensors"), layouts = cli_has(c, "layouts"), files = cli_has(c, "files"),
         state = cli_has(c, "state");
    if (c->n_args > 1) {
        if (tensors) {
            return cli_value(c, "tensors") == NULL ? show_matches(c, v, c->args[1])
                                                   : report_trouble(c, NULL, "give one pattern, not two");
        }
        return show_name(c, v, c->args[1]);
    }
    int exit_status = CLI_YES;
    if (c->json) {
        exit_status = fill_summary(c, v);
    } else if (!tensors && !layouts && !files && !state) {
        exit_status = print_summary(c, v);
    } else {
        char g[GENERATION_TEXT];
        printf("%sstep %" PRIu64 ", generation %s%s\n", style_begin(c, STYLE_BOLD), v->info.step,
               generation_text(v->info.generation, g), style_end(c, STYLE_BOLD));
    }
    if (tensors) {
        int matches = show_matches(c, v, cli_value(c, "tensors"));
        exit_status = matches > exit_status ? matches : exit_status;
    }
    if (layouts) {
        show_layouts(c, v);
    }
    if (files) {
        show_files(c, v);
    }
    if (state) {
        int trouble = show_state(c, v);
        exit_status = trouble >= 0 ? trouble : exit_status;
    }
    return exit_status;
}

/* "show -t 'x*' ROOT": the pattern stands where WHERE should. */
static int pattern_apart(cli *c)
{
    struct stat st;
    bool apart = cli_has(c, "tensors") && cli_value(c, "tensors") == NULL && c->n_args == 2 &&
                 strpbrk(c->args[0], "*?[") != NULL && stat(c->args[0], &st) != 0;
    return apart ? report_trouble(c, "write -tPATTERN or --tensors=PATTERN", "the pattern '%s' stands apart from -t",
                                  c->args[0])
                 : -1;
}

int cmd_show(cli *c)
{
    place p;
    int exit_status = pattern_apart(c);
    exit_status = exit_status >= 0 ? exit_status : place_find(c, c->args[0], &p);
    if (exit_status >= 0) {
        return exit_status;
    }
    char *folder = NULL;
    view v = {.where = p.where};
    lg_error err = LG_ERROR_INIT;
    if (p.kind == PLACE_FILE) {
        exit_status = safetensors_show(c, &p);
    } else {
        exit_status = place_open(c, &p, &v.k, &folder);
        if (exit_status < 0) {
            v.folder = folder;
            exit_status =
                lg_checkpoint_get_info(v.k, &v.info, &err) == LG_OK ? show(c, &v) : report_error(c, &err, NULL);
        }
    }
    lg_checkpoint_close(v.k);
    free(folder);
    place_free(&p);
    return exit_status;
}
