/* SPDX-License-Identifier: Apache-2.0 */
#include "chunk.h"
#include "get_text.h"
#include "npy.h"
#include "place.h"
#include "value.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES (UINT64_C(16) << 20)

/* Writes piece by piece, in the order of the file. */
static int write_npy(cli *c, const subject *w, const char *path)
{
    const char *note;
    const char *descr = value_npy(w->t->dtype, &note);
    uint64_t n = elements_of(w->s->out_ndim, w->s->out_shape);
    uint64_t packed[1] = {bytes_of(w->t->dtype, n)};
    bool is_packed = lg_dtype_bits(w->t->dtype) % 8 != 0;
    npy *f = NULL;
    int exit_status = npy_begin(c, path, cli_has(c, "force"), descr, is_packed ? 1 : w->s->out_ndim,
                                is_packed ? packed : w->s->out_shape, &f);
    if (exit_status >= 0) {
        return exit_status;
    }
    chunks k;
    chunks_begin(&k, w->s->ndim, w->s->offset, w->s->size, w->t->dtype, CHUNK_BYTES);
    char *data = k.done ? NULL : need(malloc((size_t)bytes_of(w->t->dtype, chunks_most(&k)) + 1));
    while (exit_status < 0 && chunks_next(&k)) {
        lg_error err = LG_ERROR_INIT;
        if (load_region(w->k, w->t, k.offset, k.size, data, NULL, w->copy_of, &err) != LG_OK) {
            exit_status = report_error(c, &err, NULL);
        } else {
            exit_status = npy_write(f, data, (size_t)bytes_of(w->t->dtype, k.elements));
        }
    }
    free(data);
    if (exit_status >= 0) {
        npy_drop(f);
        return exit_status;
    }
    exit_status = npy_end(f);
    if (exit_status < 0 && note != NULL) {
        report_note(c, "%s", note);
    }
    return exit_status;
}

static int show_values(cli *c, const subject *w)
{
    bool all = cli_has(c, "all");
    if (!c->json) {
        return values_print(c, w, all);
    }
    json_t *data = NULL;
    int exit_status = values_json(c, w, all, &data);
    if (exit_status < 0) {
        json_put(c->document, "complete", json_boolean(data != NULL));
        json_put(c->document, "data", data != NULL ? data : json_null());
        if (data == NULL) {
            report_note(c, "more than %d elements: the document has them only with --all", VALUES_SHOWN);
        }
    }
    return exit_status;
}

/* Which checkpoint was taken. */
static void put_step(cli *c, lg_checkpoint *k, const char *folder)
{
    lg_checkpoint_info info;
    json_put(c->document, "folder", json_text(folder));
    if (lg_checkpoint_get_info(k, &info, NULL) == LG_OK) {
        json_put(c->document, "step", json_u64(info.step));
        json_put(c->document, "generation", json_generation(info.generation));
    }
}

static int get_slice(cli *c, lg_checkpoint *k, const lg_tensor_info *t)
{
    slice s;
    uint64_t rank = UINT32_MAX;
    if (!cli_number(c, "rank", 0, UINT32_MAX - 1, &rank)) {
        return CLI_TROUBLE;
    }
    int exit_status = slice_parse(c, c->n_args > 2 ? c->args[2] : NULL, t->ndim, t->shape, &s);
    if (exit_status >= 0) {
        return exit_status;
    }
    if (rank != UINT32_MAX && !t->per_rank) {
        return report_trouble(c, NULL, "'%s' is the same on all ranks: leave out --rank", t->name);
    }
    subject w = {.k = k, .t = t, .s = &s, .copy_of = (uint32_t)rank};
    if (t->per_rank && rank == UINT32_MAX) {
        report_note(c, "'%s' is kept per rank: this is the first rank's copy; --rank=R takes another", t->name);
    }
    const char *output = cli_value(c, "output");
    if (c->json) {
        json_put(c->document, "tensor", json_text(t->name));
        json_put(c->document, "dtype", json_text(lg_dtype_name(t->dtype)));
        json_put(c->document, "tensor_shape", json_shape(t->ndim, t->shape));
        json_put(c->document, "shape", json_shape(s.out_ndim, s.out_shape));
        if (output != NULL) {
            json_put(c->document, "output", json_text(output));
        }
    }
    return output != NULL ? write_npy(c, &w, output) : show_values(c, &w);
}

int cmd_get(cli *c)
{
    const char *output = cli_value(c, "output");
    if (output != NULL && strcmp(output, "-") == 0 && c->json) {
        return report_trouble(c, NULL, "--output=- and --json both want standard output");
    }
    lg_checkpoint *k = NULL;
    char *folder = NULL;
    int exit_status = place_open_where(c, c->args[0], &k, &folder);
    if (exit_status >= 0) {
        return exit_status;
    }
    if (c->json) {
        put_step(c, k, folder);
    }
    free(folder);
    lg_tensor_info t;
    lg_error err = LG_ERROR_INIT;
    if (lg_checkpoint_find(k, c->args[1], &t, &err) == LG_OK) {
        exit_status = get_slice(c, k, &t);
    } else if (err.status == LG_ERR_MISSING) {
        exit_status = place_no_tensor(c, k, c->args[0], c->args[1]);
    } else {
        exit_status = report_error(c, &err, NULL);
    }
    lg_checkpoint_close(k);
    return exit_status < 0 ? CLI_YES : exit_status;
}
