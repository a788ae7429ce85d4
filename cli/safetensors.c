/* SPDX-License-Identifier: Apache-2.0 */
#include "safetensors.h"

#include "table.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Trouble of the machine rather than of the file? */
static bool of_the_machine(lg_status status)
{
    return status == LG_ERR_NOT_FOUND || status == LG_ERR_PERMISSION || status == LG_ERR_IO || status == LG_ERR_NOMEM;
}

int safetensors_open(cli *c, const char *path, lg_safetensors **out)
{
    lg_error err = LG_ERROR_INIT;
    if (lg_safetensors_open(path, out, &err) == LG_OK) {
        return -1;
    }
    report_error(c, &err, "");
    return of_the_machine(err.status) ? CLI_TROUBLE : CLI_NO;
}

/* Does the file lie in a step folder? Then its bytes have checksums there. */
static char *step_folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash == NULL ? need_strdup(".") : need_format("%.*s", (int)(slash - path), path);
    char *manifest = need_format("%s/lastgood.json", folder);
    struct stat st;
    bool has = stat(manifest, &st) == 0;
    free(manifest);
    if (!has) {
        free(folder);
        return NULL;
    }
    return folder;
}

static uint64_t file_bytes(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 ? (uint64_t)st.st_size : 0;
}

typedef struct one_tensor {
    const char *name;
    lg_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape;
    uint64_t begin, end;
} one_tensor;

static one_tensor tensor(const lg_safetensors *f, size_t i)
{
    one_tensor t = {0};
    lg_safetensors_tensor(f, i, &t.name, &t.dtype, &t.ndim, &t.shape, &t.begin, &t.end, NULL);
    return t;
}

int safetensors_verify(cli *c, const place *p)
{
    lg_safetensors *f = NULL;
    int exit_status = safetensors_open(c, p->path, &f);
    if (c->json) {
        json_put(c->document, "file", json_text(p->where));
        json_put(c->document, "result", json_text(exit_status < 0 ? "good" : exit_status == 1 ? "damaged" : "trouble"));
    }
    if (exit_status >= 0) {
        return exit_status;
    }
    uint64_t bytes = file_bytes(p->path);
    size_t n = lg_safetensors_count(f);
    lg_safetensors_close(f);
    if (c->json) {
        json_put(c->document, "tensors", json_u64(n));
        json_put(c->document, "bytes", json_u64(bytes));
        json_put(c->document, "contents_checked", json_false());
    } else if (!c->quiet) {
        char size[SIZE_TEXT], count[COUNT_TEXT];
        text_put(stdout, p->where);
        printf(": %sits form is good%s: %s, %s\n", style_begin(c, STYLE_GOOD), style_end(c, STYLE_GOOD),
               count_text(n, "tensor", "tensors", count), size_text(c, bytes, size));
    }
    char *folder = step_folder_of(p->path);
    if (folder != NULL) {
        report_note(c, "its contents are checked by 'lastgood verify %s'", folder);
    } else {
        report_note(c, "a safetensors file has no checksums: its contents cannot be checked");
    }
    free(folder);
    return CLI_YES;
}

static void show_document(cli *c, const place *p, const lg_safetensors *f, const char *pattern)
{
    json_put(c->document, "file", json_text(p->where));
    json_put(c->document, "bytes", json_u64(file_bytes(p->path)));
    json_t *metadata = need(json_object());
    for (size_t i = 0; i < lg_safetensors_metadata_count(f); i++) {
        const char *key = NULL, *value = NULL;
        lg_safetensors_metadata(f, i, &key, &value, NULL);
        json_put(metadata, key, json_text(value));
    }
    json_put(c->document, "metadata", metadata);
    json_t *tensors = need(json_array());
    for (size_t i = 0; i < lg_safetensors_count(f); i++) {
        one_tensor t = tensor(f, i);
        if (pattern != NULL && fnmatch(pattern, t.name, 0) != 0) {
            continue;
        }
        json_t *o = need(json_object());
        json_put(o, "name", json_text(t.name));
        json_put(o, "dtype", json_text(lg_dtype_name(t.dtype)));
        json_put(o, "shape", json_shape(t.ndim, t.shape));
        json_put(o, "bytes", json_u64(t.end - t.begin));
        json_put(o, "begin", json_u64(t.begin));
        json_put(o, "end", json_u64(t.end));
        json_push(tensors, o);
    }
    json_put(c->document, "tensors", tensors);
}

#define VALUE_SHOWN 80 /* columns of a metadata value without --all */

static void print_metadata(const cli *c, const lg_safetensors *f)
{
    static const char *const heads[] = {NULL, NULL};
    table *t = table_new(c, 2, heads);
    for (size_t i = 0; i < lg_safetensors_metadata_count(f); i++) {
        const char *key = NULL, *value = NULL;
        lg_safetensors_metadata(f, i, &key, &value, NULL);
        bool cut = strlen(value) > VALUE_SHOWN && !cli_has(c, "all");
        table_cell(t, STYLE_PLAIN, "%s", key);
        /* A cut inside a character shows as an escaped byte. */
        table_cell(t, STYLE_PLAIN, "%.*s%s", cut ? VALUE_SHOWN : (int)strlen(value), value, cut ? "…" : "");
    }
    if (table_rows(t) > 0) {
        puts("\nmetadata:");
    }
    table_print(t, 2);
}

int safetensors_show(cli *c, const place *p)
{
    const char *pattern = c->n_args > 1 ? c->args[1] : cli_value(c, "tensors");
    lg_safetensors *f = NULL;
    int exit_status = safetensors_open(c, p->path, &f);
    if (exit_status >= 0) {
        return exit_status;
    }
    size_t n = lg_safetensors_count(f), shown = 0;
    uint64_t data = 0;
    static const char *const heads[] = {"TENSOR", "DTYPE", "SHAPE", ">SIZE"};
    table *t = table_new(c, 4, heads);
    for (size_t i = 0; i < n; i++) {
        one_tensor one = tensor(f, i);
        data += one.end - one.begin;
        if (pattern != NULL && fnmatch(pattern, one.name, 0) != 0) {
            continue;
        }
        char *shape = shape_text(one.ndim, one.shape), size[SIZE_TEXT];
        table_cell(t, STYLE_PLAIN, "%s", one.name);
        table_cell(t, STYLE_PLAIN, "%s", lg_dtype_name(one.dtype));
        table_cell(t, STYLE_PLAIN, "%s", shape);
        table_cell(t, STYLE_PLAIN, "%s", size_text(c, one.end - one.begin, size));
        free(shape);
        shown++;
    }
    if (c->json) {
        show_document(c, p, f, pattern);
        table_free(t);
    } else {
        char size[SIZE_TEXT], of[SIZE_TEXT], count[COUNT_TEXT];
        text_put(stdout, p->where);
        printf(": safetensors, %s, %s of data in a file of %s\n", count_text(n, "tensor", "tensors", count),
               size_text(c, data, size), size_text(c, file_bytes(p->path), of));
        if (pattern == NULL) {
            print_metadata(c, f);
        }
        if (shown > 0) {
            putchar('\n');
        }
        table_print(t, 0);
    }
    if (pattern != NULL && shown == 0) {
        exit_status = report_as(c, LG_ERR_MISSING, NULL, "%s: no tensor matches '%s'", p->where, pattern);
    } else {
        exit_status = CLI_YES;
    }
    lg_safetensors_close(f);
    return exit_status;
}
