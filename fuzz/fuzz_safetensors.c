/* SPDX-License-Identifier: Apache-2.0 */

/* A whole safetensors file. What is accepted covers its data exactly, and is
 * accepted again, with the same tensors, when it is written anew. */

#include "base/error.h"
#include "format/safetensors.h"
#include "fuzz.h"

static void check(const lg__st_header *h, size_t bytes)
{
    uint64_t at = 0;
    FUZZ_CHECK(h->file_bytes == bytes && h->data_start >= 8 && h->data_start <= bytes, "data at %llu of %zu",
               (unsigned long long)h->data_start, bytes);
    for (size_t i = 0; i < h->n; i++) {
        const lg__st_tensor *t = &h->tensors[i];
        lg_error err = LG_ERROR_INIT;
        uint64_t size = 0;
        FUZZ_CHECK(lg__shape_bytes(t->dtype, t->ndim, t->shape, &size, &err) == LG_OK, "%s: %s", t->name, err.message);
        FUZZ_CHECK(t->begin == at && t->end == at + size, "%s: [%llu, %llu) at %llu", t->name,
                   (unsigned long long)t->begin, (unsigned long long)t->end, (unsigned long long)at);
        at = t->end;
        FUZZ_CHECK(memchr(t->name, '\0', t->name_bytes) != NULL || lg__st_find(h, t->name) == t, "%s is not found",
                   t->name);
        for (uint32_t d = 0; d < t->ndim && t->has_offsets; d++) {
            FUZZ_CHECK(t->saved_offsets != NULL && t->saved_offsets[d] <= INT64_MAX, "%s: offset", t->name);
        }
    }
    FUZZ_CHECK(h->data_start + at == bytes, "%llu bytes of data in a file of %zu", (unsigned long long)at, bytes);
}

/* Names and metadata that the writer would not take are its own affair. */
static void check_written_anew(const lg__st_header *h)
{
    lg__st_entry *entries = calloc(h->n + 1, sizeof *entries);
    FUZZ_CHECK(entries != NULL, "out of memory");
    for (size_t i = 0; i < h->n; i++) {
        const lg__st_tensor *t = &h->tensors[i];
        entries[i] = (lg__st_entry){.name = t->name,
                                    .dtype = t->dtype,
                                    .ndim = t->ndim,
                                    .shape = t->shape,
                                    .offset = t->has_offsets ? t->saved_offsets : NULL};
    }
    lg_error err = LG_ERROR_INIT;
    lg__buf out;
    lg__buf_init(&out, (size_t)LG__ST_MAX_HEADER);
    uint64_t data_bytes = 0;
    bool plain = h->n % 2 == 0;
    lg_status st = lg__st_plan(entries, h->n, NULL, 0, plain, plain ? 8 : LG__ST_DATA_ALIGN, &out, &data_bytes, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
    } else {
        lg__st_header *again = NULL;
        st = lg__st_parse(out.data + 8, out.len - 8, out.len + data_bytes, &again, &err);
        FUZZ_CHECK(st == LG_OK, "what was written is refused: %s", err.message);
        FUZZ_CHECK(again->n == h->n, "%zu tensors became %zu", h->n, again->n);
        for (size_t i = 0; i < h->n; i++) {
            const lg__st_tensor *t = lg__st_find(again, h->tensors[i].name);
            FUZZ_CHECK(t != NULL && t->dtype == h->tensors[i].dtype && t->ndim == h->tensors[i].ndim &&
                           (t->ndim == 0 || memcmp(t->shape, h->tensors[i].shape, t->ndim * sizeof *t->shape) == 0),
                       "%s changed", h->tensors[i].name);
        }
        lg__st_free(again);
    }
    lg__buf_free(&out);
    free(entries);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    lg_error err = LG_ERROR_INIT;
    uint64_t n = 0;
    lg_status st = lg__st_header_bytes(data, bytes < 64 ? bytes : 64, bytes, &n, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        return 0;
    }
    FUZZ_CHECK(n <= bytes - 8, "a header of %llu in %zu bytes", (unsigned long long)n, bytes);
    lg__st_header *h = NULL;
    st = lg__st_parse((const char *)data + 8, n, bytes, &h, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        FUZZ_CHECK(h == NULL, "an output in spite of: %s", err.message);
        return 0;
    }
    check(h, bytes);
    check_written_anew(h);
    lg__st_free(h);
    return 0;
}
