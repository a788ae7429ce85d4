/* SPDX-License-Identifier: Apache-2.0 */
#include "show_parts.h"

#include "table.h"
#include "value.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Where one rank's row would stand for thousands, only so many are printed
 * without --all. */
#define ROWS_SHOWN 200

static void section(const char *title) { printf("\n%s\n", title); }

/* ------------------------------------------------------------------ tensors */

static char *layout_name(const lg_tensor_info *t)
{
    if (t->per_rank) {
        return need_strdup("per rank");
    }
    return t->layout == SIZE_MAX ? need_strdup("irregular") : need_format("%zu", t->layout);
}

static json_t *tensor_json(const lg_tensor_info *t)
{
    json_t *o = need(json_object());
    json_put(o, "name", json_text(t->name));
    json_put(o, "group", json_text(lg_group_name(t->group)));
    json_put(o, "dtype", json_text(lg_dtype_name(t->dtype)));
    json_put(o, "shape", json_shape(t->ndim, t->shape));
    json_put(o, "bytes", json_u64(t->bytes));
    json_put(o, "layout", t->layout == SIZE_MAX ? json_null() : json_u64(t->layout));
    json_put(o, "boxes", json_u64(t->n_boxes));
    json_put(o, "alias_of", t->alias_of != NULL ? json_text(t->alias_of) : json_null());
    json_put(o, "per_rank", json_boolean(t->per_rank));
    return o;
}

size_t show_tensors(cli *c, const view *v, const char *pattern)
{
    static const char *const heads[] = {"TENSOR", "DTYPE", "SHAPE", ">SIZE", "GROUP", "LAYOUT", ">BOXES"};
    table *t = table_new(c, 7, heads);
    json_t *all = c->json ? need(json_array()) : NULL;
    size_t n = 0;
    uint64_t bytes = 0;
    for (size_t i = 0; i < v->info.n_tensors; i++) {
        lg_tensor_info one;
        if (lg_checkpoint_tensor(v->k, i, &one, NULL) != LG_OK ||
            (pattern != NULL && fnmatch(pattern, one.name, 0) != 0)) {
            continue;
        }
        n++;
        bytes += one.bytes;
        if (all != NULL) {
            json_push(all, tensor_json(&one));
            continue;
        }
        char *shape = shape_text(one.ndim, one.shape), *layout = layout_name(&one), size[SIZE_TEXT];
        table_cell(t, STYLE_PLAIN, "%s", one.name);
        table_cell(t, STYLE_PLAIN, "%s", lg_dtype_name(one.dtype));
        table_cell(t, STYLE_PLAIN, "%s", shape);
        table_cell(t, STYLE_PLAIN, "%s", size_text(c, one.bytes, size));
        table_cell(t, STYLE_PLAIN, "%s", lg_group_name(one.group));
        table_cell(t, STYLE_PLAIN, "%s", layout);
        table_cell(t, STYLE_PLAIN, "%zu", one.n_boxes);
        if (one.alias_of != NULL) {
            table_note(t, STYLE_DIM, "tied to %s", one.alias_of);
        }
        free(shape);
        free(layout);
    }
    if (all != NULL) {
        json_put(c->document, "tensors", all);
        table_free(t);
    } else if (n > 0) {
        char count[COUNT_TEXT], size[SIZE_TEXT];
        putchar('\n');
        table_print(t, 0);
        printf("%s, %s\n", count_text(n, "tensor", "tensors", count), size_text(c, bytes, size));
    } else {
        table_free(t);
    }
    return n;
}

/* ------------------------------------------------------------------ layouts */

void show_layouts(cli *c, const view *v)
{
    size_t *used = need_calloc(v->info.n_layouts, sizeof *used), irregular = 0;
    for (size_t i = 0; i < v->info.n_tensors; i++) {
        lg_tensor_info t;
        if (lg_checkpoint_tensor(v->k, i, &t, NULL) == LG_OK) {
            if (t.layout < v->info.n_layouts) {
                used[t.layout]++;
            } else {
                irregular++;
            }
        }
    }
    static const char *const heads[] = {">LAYOUT", ">TENSORS", "HOW"};
    table *t = table_new(c, 3, heads);
    json_t *all = c->json ? need(json_array()) : NULL;
    for (size_t i = 0; i < v->info.n_layouts; i++) {
        const char *canonical = lg_checkpoint_layout(v->k, i);
        char *words = layout_words(canonical);
        if (all != NULL) {
            json_t *o = need(json_object());
            json_t *parsed = json_loads(canonical, 0, NULL);
            json_put(o, "index", json_u64(i));
            json_put(o, "tensors", json_u64(used[i]));
            json_put(o, "words", json_text(words));
            json_put(o, "layout", parsed != NULL ? parsed : json_null());
            json_push(all, o);
        } else {
            table_cell(t, STYLE_PLAIN, "%zu", i);
            table_cell(t, STYLE_PLAIN, "%zu", used[i]);
            table_cell(t, STYLE_PLAIN, "%s", words);
            if (cli_has(c, "all")) {
                table_note(t, STYLE_DIM, "%s", canonical);
            }
        }
        free(words);
    }
    if (all != NULL) {
        json_put(c->document, "layouts", all);
        json_put(c->document, "irregular_tensors", json_u64(irregular));
    } else if (table_rows(t) > 0 || irregular > 0) {
        section("layouts:");
        if (irregular > 0) {
            table_cell(t, STYLE_PLAIN, "irregular");
            table_cell(t, STYLE_PLAIN, "%zu", irregular);
            table_cell(t, STYLE_PLAIN, "boxes that follow no rule; give a tensor's name to see them");
        }
        table_print(t, 2);
        t = NULL;
    }
    if (t != NULL) {
        table_free(t);
    }
    free(used);
}

/* -------------------------------------------------------------------- files */

static const char *file_kind(const lg_file_info *f)
{
    return f->is_attached ? "attached" : f->is_sums ? "sums" : lg_group_name(f->group);
}

void show_files(cli *c, const view *v)
{
    static const char *const heads[] = {"FILE", ">SIZE", "KIND", ">RANK", "DOMAIN"};
    table *t = table_new(c, 5, heads);
    json_t *all = c->json ? need(json_array()) : NULL;
    size_t limit = cli_has(c, "all") || all != NULL ? SIZE_MAX : ROWS_SHOWN;
    for (size_t i = 0; i < v->info.n_files; i++) {
        lg_file_info f;
        if (lg_checkpoint_file(v->k, i, &f, NULL) != LG_OK) {
            continue;
        }
        if (all != NULL) {
            json_t *o = need(json_object());
            json_put(o, "name", json_text(f.name));
            json_put(o, "bytes", json_u64(f.bytes));
            json_put(o, "kind", json_text(file_kind(&f)));
            json_put(o, "rank", f.is_attached ? json_null() : json_u64(f.rank));
            json_put(o, "domain", f.is_attached ? json_null() : json_text(f.domain));
            json_push(all, o);
        } else if (i < limit) {
            char size[SIZE_TEXT];
            table_cell(t, STYLE_PLAIN, "%s", f.name);
            table_cell(t, STYLE_PLAIN, "%s", size_text(c, f.bytes, size));
            table_cell(t, STYLE_PLAIN, "%s", file_kind(&f));
            if (f.is_attached) {
                table_cell(t, STYLE_PLAIN, "-");
                table_cell(t, STYLE_PLAIN, "%s", "");
            } else {
                table_cell(t, STYLE_PLAIN, "%" PRIu32, f.rank);
                table_cell(t, STYLE_PLAIN, "%s", f.domain);
            }
        }
    }
    if (all != NULL) {
        json_put(c->document, "files", all);
        table_free(t);
        return;
    }
    section("files:");
    table_print(t, 2);
    if (v->info.n_files > limit) {
        printf("  … and %zu more; --all lists them\n", v->info.n_files - limit);
    }
}

/* -------------------------------------------------------------------- state */

/* Keys of per-rank state inside .state files: docs/format-shards.md. */
#define RANK_STATE_PREFIX "b:"

static void note_key(rank_keys *keys, const char *name, uint64_t bytes)
{
    for (size_t i = 0; i < keys->n; i++) {
        rank_key *k = &keys->all[i];
        if (strcmp(k->name, name) == 0) {
            k->ranks++;
            k->least = bytes < k->least ? bytes : k->least;
            k->most = bytes > k->most ? bytes : k->most;
            return;
        }
    }
    need_room((void **)&keys->all, &keys->cap, keys->n, sizeof *keys->all);
    keys->all[keys->n++] = (rank_key){need_strdup(name), 1, bytes, bytes};
}

static int compare_keys(const void *a, const void *b)
{
    return strcmp(((const rank_key *)a)->name, ((const rank_key *)b)->name);
}

void rank_keys_read(const view *v, uint32_t world, rank_keys *out)
{
    *out = (rank_keys){0};
    for (size_t i = 0; i < v->info.n_files; i++) {
        lg_file_info f;
        if (lg_checkpoint_file(v->k, i, &f, NULL) != LG_OK || f.is_attached || f.is_sums || f.group != LG_GROUP_RAW) {
            continue;
        }
        if (f.rank >= world) {
            break; /* files are in the order of ranks */
        }
        char *path = need_format("%s/%s", v->folder, f.name);
        lg_safetensors *file = NULL;
        size_t prefix = strlen(RANK_STATE_PREFIX);
        if (lg_safetensors_open(path, &file, NULL) == LG_OK) {
            for (size_t k = 0; k < lg_safetensors_count(file); k++) {
                const char *name = NULL;
                uint64_t begin = 0, end = 0;
                lg_safetensors_tensor(file, k, &name, NULL, NULL, NULL, &begin, &end, NULL);
                if (strncmp(name, RANK_STATE_PREFIX, prefix) == 0) {
                    note_key(out, name + prefix, end - begin);
                }
            }
        }
        lg_safetensors_close(file);
        free(path);
    }
    if (out->n > 1) {
        qsort(out->all, out->n, sizeof *out->all, compare_keys);
    }
}

void rank_keys_free(rank_keys *keys)
{
    for (size_t i = 0; i < keys->n; i++) {
        free(keys->all[i].name);
    }
    free(keys->all);
    *keys = (rank_keys){0};
}

#define VALUE_SHOWN 90 /* bytes of a value without --all */

/* In place: {"$int":"5"} becomes 5, {"$float":"inf"} inf. */
static bool untag(char *value, const char *tag)
{
    size_t n = strlen(value), head = strlen(tag);
    if (strncmp(value, tag, head) != 0 || n < head + 2 || strcmp(value + n - 2, "\"}") != 0 ||
        strchr(value + head, '"') != value + n - 2) {
        return false;
    }
    memmove(value, value + head, n - head - 2);
    value[n - head - 2] = '\0';
    return true;
}

char *state_words(const char *json, size_t limit)
{
    char *value = need_strdup(json);
    if (!untag(value, "{\"$int\":\"")) {
        untag(value, "{\"$float\":\"");
    }
    char *end = NULL;
    double number = strtod(value, &end);
    if (*end == '\0' && strpbrk(value, ".e") != NULL) { /* the manifest has all 17 digits */
        char shortest[VALUE_TEXT];
        free(value);
        value = need_strdup(value_text(LG_F64, &number, shortest));
    }
    size_t n = strlen(value);
    if (limit == 0 || n <= limit) {
        return value;
    }
    n = limit;
    while (n > 0 && ((unsigned char)value[n] & 0xC0) == 0x80) {
        n--; /* not inside a character */
    }
    char *cut = need_format("%.*s…", (int)n, value);
    free(value);
    return cut;
}

static int global_state(cli *c, const view *v)
{
    static const char *const heads[] = {NULL, NULL};
    table *t = table_new(c, 2, heads);
    json_t *all = c->json ? need(json_object()) : NULL;
    lg_error err = LG_ERROR_INIT;
    lg_status status = LG_OK;
    for (size_t i = 0; status == LG_OK && i < lg_checkpoint_global_count(v->k); i++) {
        const char *key = lg_checkpoint_global_key(v->k, i), *value = NULL;
        if (key == NULL) {
            need(NULL);
        }
        status = lg_checkpoint_global_json(v->k, key, &value, &err);
        if (status != LG_OK) {
            break;
        }
        if (all != NULL) {
            json_t *parsed = json_loads(value, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
            json_put(all, key, parsed != NULL ? parsed : json_text(value));
            continue;
        }
        char *words = state_words(value, cli_has(c, "all") ? 0 : VALUE_SHOWN);
        table_cell(t, STYLE_PLAIN, "%s", key);
        table_cell(t, STYLE_PLAIN, "%s", words);
        free(words);
    }
    if (all != NULL) {
        json_put(c->document, "state", all);
        table_free(t);
    } else {
        section(table_rows(t) > 0 ? "global state:" : "no global state");
        table_print(t, 2);
    }
    return status == LG_OK ? -1 : report_error(c, &err, NULL);
}

int show_state(cli *c, const view *v)
{
    int exit_status = global_state(c, v);
    rank_keys keys;
    rank_keys_read(v, v->info.world, &keys);
    static const char *const heads[] = {"KEY", ">RANKS", ">SIZE"};
    table *t = table_new(c, 3, heads);
    json_t *all = c->json ? need(json_array()) : NULL;
    for (size_t i = 0; i < keys.n; i++) {
        const rank_key *k = &keys.all[i];
        if (all != NULL) {
            json_t *o = need(json_object());
            json_put(o, "key", json_text(k->name));
            json_put(o, "ranks", json_u64(k->ranks));
            json_put(o, "least_bytes", json_u64(k->least));
            json_put(o, "most_bytes", json_u64(k->most));
            json_push(all, o);
            continue;
        }
        char least[SIZE_TEXT], most[SIZE_TEXT];
        table_cell(t, STYLE_PLAIN, "%s", k->name);
        table_cell(t, STYLE_PLAIN, "%" PRIu32, k->ranks);
        size_text(c, k->least, least);
        size_text(c, k->most, most);
        if (k->least == k->most) {
            table_cell(t, STYLE_PLAIN, "%s", most);
        } else {
            table_cell(t, STYLE_PLAIN, "%s to %s", least, most);
        }
    }
    if (all != NULL) {
        json_put(c->document, "rank_state", all);
        table_free(t);
    } else {
        section(keys.n > 0 ? "state of each rank:" : "no state of single ranks");
        table_print(t, 2);
    }
    rank_keys_free(&keys);
    return exit_status;
}

/* --------------------------------------------------------------- one tensor */

typedef struct box_list {
    lg_stored_box *all;
    size_t n, cap;
} box_list;

static int take_box(const lg_stored_box *box, void *arg)
{
    box_list *l = arg;
    need_room((void **)&l->all, &l->cap, l->n, sizeof *l->all);
    l->all[l->n++] = *box;
    return 0;
}

/* What is known of each rank's files: its domain, and the one file of the
 * group, or how many there are. */
typedef struct rank_files {
    char *domain, *file;
    size_t n;
} rank_files;

static rank_files *files_of_ranks(const view *v, lg_group group)
{
    rank_files *all = need_calloc(v->info.world, sizeof *all);
    for (size_t i = 0; i < v->info.n_files; i++) {
        lg_file_info f;
        if (lg_checkpoint_file(v->k, i, &f, NULL) != LG_OK || f.is_attached || f.rank >= v->info.world) {
            continue;
        }
        rank_files *r = &all[f.rank];
        r->domain = r->domain != NULL ? r->domain : need_strdup(f.domain);
        if (!f.is_sums && f.group == group && r->n++ == 0) {
            r->file = need_strdup(f.name);
        }
    }
    return all;
}

static void files_free(rank_files *all, uint32_t world)
{
    for (uint32_t r = 0; r < world; r++) {
        free(all[r].domain);
        free(all[r].file);
    }
    free(all);
}

static void print_boxes(cli *c, const view *v, const lg_tensor_info *t, const box_list *l, const rank_files *files)
{
    static const char *const heads[] = {">RANK", "DOMAIN", "OFFSET", "SIZE", "FILE"};
    table *rows = table_new(c, 5, heads);
    size_t limit = cli_has(c, "all") ? SIZE_MAX : ROWS_SHOWN;
    for (size_t i = 0; i < l->n && i < limit; i++) {
        const lg_stored_box *b = &l->all[i];
        const rank_files *f = b->rank < v->info.world ? &files[b->rank] : NULL;
        char *offset = shape_text(b->ndim, b->offset), *size = shape_text(b->ndim, b->size);
        table_cell(rows, STYLE_PLAIN, "%" PRIu32, b->rank);
        table_cell(rows, STYLE_PLAIN, "%s", f != NULL && f->domain != NULL ? f->domain : "");
        table_cell(rows, STYLE_PLAIN, "%s", offset);
        table_cell(rows, STYLE_PLAIN, "%s", size);
        if (f != NULL && f->n == 1) {
            table_cell(rows, STYLE_PLAIN, "%s", f->file);
        } else if (f != NULL) {
            table_cell(rows, STYLE_PLAIN, "one of the %zu of this rank", f->n);
        } else {
            table_cell(rows, STYLE_PLAIN, "?");
        }
        free(offset);
        free(size);
    }
    char count[COUNT_TEXT];
    if (l->n == 0) {
        puts("  no elements, so nothing is stored");
        table_free(rows);
        return;
    }
    printf("  stored in %s%s:\n", count_text(l->n, "box", "boxes", count), t->per_rank ? ", one for each rank" : "");
    table_print(rows, 4);
    if (l->n > limit) {
        printf("    … and %zu more; --all lists them\n", l->n - limit);
    }
}

static json_t *boxes_json(const box_list *l)
{
    json_t *all = need(json_array());
    for (size_t i = 0; i < l->n; i++) {
        const lg_stored_box *b = &l->all[i];
        json_t *o = need(json_object());
        json_put(o, "rank", json_u64(b->rank));
        json_put(o, "offset", json_shape(b->ndim, b->offset));
        json_put(o, "size", json_shape(b->ndim, b->size));
        json_push(all, o);
    }
    return all;
}

int show_tensor(cli *c, const view *v, const lg_tensor_info *t)
{
    box_list boxes = {0};
    lg_error err = LG_ERROR_INIT;
    if (lg_checkpoint_boxes(v->k, t->name, NULL, NULL, take_box, &boxes, &err) != LG_OK) {
        free(boxes.all);
        return report_error(c, &err, NULL);
    }
    const char *canonical = t->layout == SIZE_MAX ? NULL : lg_checkpoint_layout(v->k, t->layout);
    char *words = canonical != NULL ? layout_words(canonical) : need_strdup("irregular: the boxes follow no rule");
    if (c->json) {
        json_t *o = tensor_json(t);
        json_put(o, "layout_words", json_text(words));
        json_put(o, "stored", boxes_json(&boxes));
        json_put(c->document, "tensor", o);
    } else {
        char *shape = shape_text(t->ndim, t->shape), size[SIZE_TEXT];
        text_put(stdout, t->name);
        printf("  %s %s  %s  %s\n", lg_dtype_name(t->dtype), shape, size_text(c, t->bytes, size),
               lg_group_name(t->group));
        if (t->alias_of != NULL) {
            fputs("  tied to ", stdout);
            text_put(stdout, t->alias_of);
            putchar('\n');
        }
        if (t->layout != SIZE_MAX) {
            printf("  layout %zu: %s\n", t->layout, words);
        } else {
            printf("  %s\n", words);
        }
        /* docs/format-shards.md: which tensors are in .state files. */
        bool raw = t->per_rank || lg_dtype_bits(t->dtype) < 8 || t->dtype == LG_F8_E8M0;
        rank_files *files = files_of_ranks(v, raw ? LG_GROUP_RAW : t->group);
        print_boxes(c, v, t, &boxes, files);
        files_free(files, v->info.world);
        free(shape);
    }
    free(words);
    free(boxes.all);
    return CLI_YES;
}
