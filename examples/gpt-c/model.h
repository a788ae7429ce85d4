/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_MODEL_H
#define GPT_MODEL_H

/* A GPT-2 on bytes: token and position embeddings, pre-norm blocks of causal
 * attention and a GELU MLP, a final norm, and an output head tied to the token
 * embedding. Parameters have GPT-2's names and shapes (its linear layers store
 * [in, out]), so that others' tools know what they read.
 *
 * All parameters lie in one flat buffer in the order of the tensor table; a
 * gradient is a buffer of the same form. One sequence's gradient is computed
 * at a time, by one thread, and depends on nothing but the parameters, the
 * sequence and the dropout key. */

#include "numeric.h"

#include <stddef.h>
#include <stdint.h>

enum { MODEL_VOCABULARY = 256, MODEL_NAME_MAX = 64 };

typedef struct model_config {
    uint32_t layers;
    uint32_t heads;
    uint32_t width;   /* a multiple of heads */
    uint32_t context; /* tokens of a sequence */
    double dropout;   /* 0 <= p < 1 */
} model_config;

typedef struct model_tensor {
    char name[MODEL_NAME_MAX];
    uint32_t ndim;
    uint64_t shape[2];
    size_t offset; /* in the flat buffer, elements */
    size_t count;
} model_tensor;

typedef struct model_block { /* indices into the tensor table */
    size_t norm1_weight, norm1_bias, qkv_weight, qkv_bias, out_weight, out_bias;
    size_t norm2_weight, norm2_bias, up_weight, up_bias, down_weight, down_bias;
} model_block;

typedef struct model {
    model_config config;
    model_tensor *tensors;
    size_t n_tensors;
    size_t n_parameters;
    size_t token_embedding, position_embedding, norm_weight, norm_bias;
    model_block *blocks;
    real *parameters;
    real *transposed; /* of the matrices, at the same offsets */
    struct model_workspace *workspace;
} model;

/* Which random numbers dropout uses: a function of run, step and sample, not
 * of the rank that happens to compute it. */
typedef struct model_dropout_key {
    uint64_t seed;
    uint64_t step;
    uint64_t sample; /* position in the run's sequence of samples */
} model_dropout_key;

model *model_create(const model_config *config);
void model_free(model *m);

/* GPT-2's initialisation from a seed. */
void model_initialize(model *m, uint64_t seed);

/* To be called whenever the parameters have changed. */
void model_parameters_changed(model *m);

/* Mean cross-entropy in nats over the context, predicting tokens[1..context]
 * from tokens[0..context-1]; `gradient` (n_parameters elements) is set to its
 * gradient unless NULL. `key` NULL: no dropout. */
double model_loss(model *m, const uint8_t *tokens, const model_dropout_key *key, real *gradient);

/* The logits of every position (context x vocabulary) without dropout; they
 * belong to the model until its next call. */
const real *model_predict(model *m, const uint8_t *tokens);

#endif
