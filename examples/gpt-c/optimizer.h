/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_OPTIMIZER_H
#define GPT_OPTIMIZER_H

/* AdamW (Loshchilov, Hutter: Decoupled weight decay regularization, 2019) on
 * the slice of the flat buffer that a rank owns, a warm-up and cosine
 * schedule, and clipping by the global norm. */

#include "model.h"

typedef struct optimizer_config {
    double learning_rate;
    double beta1, beta2, epsilon;
    double weight_decay; /* on matrices only */
    double clip;         /* largest norm of the gradient; 0 = no clipping */
    uint64_t warmup_steps;
    uint64_t decay_steps; /* from here on a tenth of the learning rate */
} optimizer_config;

typedef struct optimizer {
    optimizer_config config;
    size_t start, count; /* the slice */
    float *exp_avg, *exp_avg_sq;
    uint8_t *decays; /* is the element a matrix's? */
} optimizer;

optimizer *optimizer_create(const optimizer_config *config, const model *m, size_t start, size_t count);
void optimizer_free(optimizer *o);

/* Of step 1, 2, …: a closed form, so the step is all its state. */
double optimizer_learning_rate(const optimizer_config *config, uint64_t step);

/* The factor that brings a gradient of this norm down to the limit. */
double optimizer_clip_factor(const optimizer_config *config, double norm);

/* One update of the slice of `parameters` (the whole buffer); the gradient
 * slice is multiplied by `factor` first. */
void optimizer_update(optimizer *o, float *parameters, const float *gradient, double factor, uint64_t step);

#endif
