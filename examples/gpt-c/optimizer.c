/* SPDX-License-Identifier: Apache-2.0 */
#include "optimizer.h"

#include "fatal.h"

#include <stdlib.h>

optimizer *optimizer_create(const optimizer_config *config, const model *m, size_t start, size_t count)
{
    optimizer *o = allocate(1, sizeof *o);
    o->config = *config;
    o->start = start;
    o->count = count;
    o->exp_avg = allocate(count, sizeof *o->exp_avg);
    o->exp_avg_sq = allocate(count, sizeof *o->exp_avg_sq);
    o->decays = allocate(count, sizeof *o->decays);
    for (size_t t = 0; t < m->n_tensors; t++)
        for (size_t i = 0; i < m->tensors[t].count; i++) {
            size_t at = m->tensors[t].offset + i;
            if (at >= start && at - start < count)
                o->decays[at - start] = m->tensors[t].ndim == 2;
        }
    return o;
}

void optimizer_free(optimizer *o)
{
    if (!o)
        return;
    free(o->exp_avg), free(o->exp_avg_sq), free(o->decays), free(o);
}

double optimizer_learning_rate(const optimizer_config *c, uint64_t step)
{
    double lowest = c->learning_rate * 0.1;
    if (step < c->warmup_steps)
        return c->learning_rate * ((double)step / (double)c->warmup_steps);
    if (step >= c->decay_steps)
        return lowest;
    double progress = (double)(step - c->warmup_steps) / (double)(c->decay_steps - c->warmup_steps);
    return lowest + (c->learning_rate - lowest) * 0.5 * (1.0 + num_cos_pi(progress));
}

double optimizer_clip_factor(const optimizer_config *c, double norm)
{
    return c->clip > 0.0 && norm > c->clip ? c->clip / norm : 1.0;
}

void optimizer_update(optimizer *o, float *parameters, const float *gradient, double factor, uint64_t step)
{
    const optimizer_config *c = &o->config;
    double rate = optimizer_learning_rate(c, step);
    float beta1 = (float)c->beta1, beta2 = (float)c->beta2;
    float one_minus_beta1 = (float)(1.0 - c->beta1), one_minus_beta2 = (float)(1.0 - c->beta2);
    float step_size = (float)(rate / (1.0 - num_power(c->beta1, step)));
    float correction = (float)(1.0 / (1.0 - num_power(c->beta2, step)));
    float epsilon = (float)c->epsilon, decay = (float)(1.0 - rate * c->weight_decay), scale = (float)factor;
    float *p = parameters + o->start;
    for (size_t i = 0; i < o->count; i++) {
        float g = gradient[i] * scale;
        float m = beta1 * o->exp_avg[i] + one_minus_beta1 * g;
        float v = beta2 * o->exp_avg_sq[i] + one_minus_beta2 * g * g;
        o->exp_avg[i] = m;
        o->exp_avg_sq[i] = v;
        float kept = o->decays[i] ? p[i] * decay : p[i];
        p[i] = kept - step_size * m / (sqrtf(v * correction) + epsilon);
    }
}
