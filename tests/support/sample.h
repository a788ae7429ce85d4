/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_SAMPLE_H
#define LG_TESTS_SAMPLE_H

/* A checkpoint of three ranks with a tensor of every kind that the format
 * knows, built by support/build.h. */

#include "core/checkpoint.h"
#include "support/build.h"

enum { SAMPLE_MEMORY, SAMPLE_POSIX };
#define SAMPLE_WORLD 3
#define SAMPLE_BLOCK 4096
#define SAMPLE_RNG_BYTES 5000
#define SAMPLE_CONFIG "{\"model_type\":\"gpt2\"}"
#define SAMPLE_TENSORS 13

typedef struct sample {
    int kind;
    char dir[256];
    char name[64]; /* of the memory store */
    lg_store *store;
    char folder[LG__NAME_MAX];
    lg_checkpoint *c;
    build_tensor tensors[SAMPLE_TENSORS];
    size_t n_tensors;
    lg_layout *layouts[SAMPLE_TENSORS];
    size_t n_layouts;
    char *rng[SAMPLE_WORLD];
    build_spec spec; /* as it was built; for building another one */
    build_blob blobs[8];
    char *state;
} sample;

sample *sample_make(int kind);
/* Smaller: headers are most of it. For tests that try every byte. */
sample *sample_make_small(int kind);
void sample_free(sample *s);
const build_tensor *sample_tensor(const sample *s, const char *name);

/* A target for the whole of `t`; and one load of `n` targets. */
lg_target sample_target(const build_tensor *t, void *data);
lg_status sample_load(lg_checkpoint *c, const lg_target *targets, size_t n, uint32_t flags, lg_error *err);

/* Loads everything: every tensor whole, every rank's state, attached files.
 * NULL if all is as it was saved. Else what is not; err->status is LG_OK when
 * wrong values were handed out as good ones. */
const char *sample_load_wrong(const sample *s, lg_checkpoint *c, uint32_t flags, lg_error *err);
/* The same, opening it first. */
const char *sample_open_wrong(const sample *s, uint32_t flags, lg_error *err);

#endif
