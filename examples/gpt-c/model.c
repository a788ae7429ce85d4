/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include "dropout.h"
#include "fatal.h"
#include "matrix.h"

#include <lastgood/lastgood.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const real NORM_EPSILON = (real)1e-5;

/* What the backward pass needs of one block's forward pass. T: context, C:
 * width, H: heads. */
typedef struct block_state {
    real *norm1_hat, *norm1_scale, *norm1;          /* T*C, T, T*C */
    real *qkv;                                      /* T*3C */
    real *attention, *attention_mask, *attention_p; /* H*T*T: softmax, dropout factors, their product */
    real *mixed;                                    /* T*C */
    real *out_mask;                                 /* T*C */
    real *norm2_hat, *norm2_scale, *norm2;          /* T*C, T, T*C */
    real *up, *gelu;                                /* T*4C */
    real *down_mask;                                /* T*C */
} block_state;

typedef struct model_workspace {
    block_state *blocks;
    real *x;          /* T*C: the residual stream */
    real *input_mask; /* T*C */
    real *norm_hat, *norm_scale, *norm;
    real *logits;                         /* T*V, later their gradient */
    real *dx, *d_wide, *d_narrow, *d_qkv; /* T*C, T*4C, T*C, T*3C */
    real *d_attention;                    /* T*T */
    real *turned;                         /* scratch for transposed matrices: T*max(4C, V, T) */
} model_workspace;

/* -------------------------------------------------------------------- table */

static size_t add_tensor(model *m, const char *name, uint64_t rows, uint64_t cols)
{
    model_tensor *t = &m->tensors[m->n_tensors];
    snprintf(t->name, sizeof t->name, "%s", name);
    t->ndim = cols ? 2 : 1;
    t->shape[0] = rows;
    t->shape[1] = cols;
    t->offset = m->n_parameters;
    t->count = (size_t)(rows * (cols ? cols : 1));
    m->n_parameters += t->count;
    return m->n_tensors++;
}

static size_t add_block_tensor(model *m, uint32_t layer, const char *part, uint64_t rows, uint64_t cols)
{
    char name[MODEL_NAME_MAX];
    snprintf(name, sizeof name, "transformer.h.%u.%s", layer, part);
    return add_tensor(m, name, rows, cols);
}

static void add_tensors(model *m)
{
    const model_config *c = &m->config;
    uint64_t width = c->width;
    m->tensors = allocate(4 + 12 * (size_t)c->layers, sizeof *m->tensors);
    m->blocks = allocate(c->layers, sizeof *m->blocks);
    m->token_embedding = add_tensor(m, "transformer.wte.weight", MODEL_VOCABULARY, width);
    m->position_embedding = add_tensor(m, "transformer.wpe.weight", c->context, width);
    for (uint32_t l = 0; l < c->layers; l++) {
        model_block *b = &m->blocks[l];
        b->norm1_weight = add_block_tensor(m, l, "ln_1.weight", width, 0);
        b->norm1_bias = add_block_tensor(m, l, "ln_1.bias", width, 0);
        b->qkv_weight = add_block_tensor(m, l, "attn.c_attn.weight", width, 3 * width);
        b->qkv_bias = add_block_tensor(m, l, "attn.c_attn.bias", 3 * width, 0);
        b->out_weight = add_block_tensor(m, l, "attn.c_proj.weight", width, width);
        b->out_bias = add_block_tensor(m, l, "attn.c_proj.bias", width, 0);
        b->norm2_weight = add_block_tensor(m, l, "ln_2.weight", width, 0);
        b->norm2_bias = add_block_tensor(m, l, "ln_2.bias", width, 0);
        b->up_weight = add_block_tensor(m, l, "mlp.c_fc.weight", width, 4 * width);
        b->up_bias = add_block_tensor(m, l, "mlp.c_fc.bias", 4 * width, 0);
        b->down_weight = add_block_tensor(m, l, "mlp.c_proj.weight", 4 * width, width);
        b->down_bias = add_block_tensor(m, l, "mlp.c_proj.bias", width, 0);
    }
    m->norm_weight = add_tensor(m, "transformer.ln_f.weight", width, 0);
    m->norm_bias = add_tensor(m, "transformer.ln_f.bias", width, 0);
}

static real *reals(size_t count) { return allocate(count, sizeof(real)); }

static model_workspace *workspace_create(const model_config *c)
{
    size_t t = c->context, w = c->width, h = c->heads;
    model_workspace *s = allocate(1, sizeof *s);
    s->blocks = allocate(c->layers, sizeof *s->blocks);
    for (uint32_t l = 0; l < c->layers; l++) {
        block_state *b = &s->blocks[l];
        b->norm1_hat = reals(t * w), b->norm1_scale = reals(t), b->norm1 = reals(t * w);
        b->qkv = reals(t * 3 * w);
        b->attention = reals(h * t * t), b->attention_mask = reals(h * t * t), b->attention_p = reals(h * t * t);
        b->mixed = reals(t * w), b->out_mask = reals(t * w);
        b->norm2_hat = reals(t * w), b->norm2_scale = reals(t), b->norm2 = reals(t * w);
        b->up = reals(t * 4 * w), b->gelu = reals(t * 4 * w);
        b->down_mask = reals(t * w);
    }
    s->x = reals(t * w), s->input_mask = reals(t * w);
    s->norm_hat = reals(t * w), s->norm_scale = reals(t), s->norm = reals(t * w);
    s->logits = reals(t * MODEL_VOCABULARY);
    s->dx = reals(t * w), s->d_wide = reals(t * 4 * w), s->d_narrow = reals(t * w), s->d_qkv = reals(t * 3 * w);
    s->d_attention = reals(t * t);
    size_t widest = 4 * w > MODEL_VOCABULARY ? 4 * w : MODEL_VOCABULARY;
    s->turned = reals(t * (widest > t ? widest : t));
    return s;
}

static void workspace_free(model_workspace *s, uint32_t layers)
{
    if (!s)
        return;
    for (uint32_t l = 0; l < layers; l++) {
        block_state *b = &s->blocks[l];
        free(b->norm1_hat), free(b->norm1_scale), free(b->norm1), free(b->qkv);
        free(b->attention), free(b->attention_mask), free(b->attention_p), free(b->mixed), free(b->out_mask);
        free(b->norm2_hat), free(b->norm2_scale), free(b->norm2), free(b->up), free(b->gelu), free(b->down_mask);
    }
    free(s->blocks), free(s->x), free(s->input_mask), free(s->norm_hat), free(s->norm_scale), free(s->norm);
    free(s->logits), free(s->dx), free(s->d_wide), free(s->d_narrow), free(s->d_qkv), free(s->d_attention);
    free(s->turned), free(s);
}

model *model_create(const model_config *config)
{
    model *m = allocate(1, sizeof *m);
    m->config = *config;
    add_tensors(m);
    m->parameters = reals(m->n_parameters);
    m->transposed = reals(m->n_parameters);
    m->workspace = workspace_create(config);
    return m;
}

void model_free(model *m)
{
    if (!m)
        return;
    workspace_free(m->workspace, m->config.layers);
    free(m->tensors), free(m->blocks), free(m->parameters), free(m->transposed), free(m);
}

/* Mean 0, variance 1: the sum of twelve uniform numbers less six, which needs
 * no function whose bits depend on the machine. */
static double normal(uint64_t seed, uint32_t tensor, uint32_t element)
{
    double sum = -6.0;
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t counter[4] = {element, i, tensor, UINT32_C(0x696e6974)}; /* apart from dropout's by the last word */
        uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, bits[4];
        lg_philox4x32(counter, key, bits);
        for (int j = 0; j < 4; j++)
            sum += (bits[j] + 0.5) / 4294967296.0;
    }
    return sum;
}

void model_initialize(model *m, uint64_t seed)
{
    /* GPT-2: 0.02 everywhere; what adds to the residual stream is scaled down
     * by the root of the number of such additions */
    double residual = 0.02 / sqrt(2.0 * m->config.layers);
    for (size_t i = 0; i < m->n_tensors; i++) {
        const model_tensor *t = &m->tensors[i];
        real *p = m->parameters + t->offset;
        if (t->ndim == 2) {
            double deviation = strstr(t->name, "c_proj") ? residual : 0.02;
            for (size_t j = 0; j < t->count; j++)
                p[j] = (real)(deviation * normal(seed, (uint32_t)i, (uint32_t)j));
        } else {
            bool is_scale = strstr(t->name, "ln_") && strstr(t->name, ".weight");
            for (size_t j = 0; j < t->count; j++)
                p[j] = is_scale ? (real)1 : (real)0;
        }
    }
    model_parameters_changed(m);
}

void model_parameters_changed(model *m)
{
    for (size_t i = 0; i < m->n_tensors; i++) {
        const model_tensor *t = &m->tensors[i];
        if (t->ndim == 2)
            matrix_transpose(m->transposed + t->offset, m->parameters + t->offset, (size_t)t->shape[1],
                             (size_t)t->shape[0], (size_t)t->shape[1]);
    }
}

/* ------------------------------------------------------------------- layers */

static const real *parameter(const model *m, size_t tensor) { return m->parameters + m->tensors[tensor].offset; }
static const real *transposed(const model *m, size_t tensor) { return m->transposed + m->tensors[tensor].offset; }

static void norm_forward(real *out, real *hat, real *scale, const real *x, const real *weight, const real *bias,
                         size_t rows, size_t width)
{
    for (size_t i = 0; i < rows; i++) {
        const real *row = x + i * width;
        real mean = 0, variance = 0;
        for (size_t j = 0; j < width; j++)
            mean += row[j];
        mean /= (real)width;
        for (size_t j = 0; j < width; j++) {
            real d = row[j] - mean;
            variance += d * d;
        }
        real s = (real)1 / (real)sqrt(variance / (real)width + NORM_EPSILON);
        scale[i] = s;
        for (size_t j = 0; j < width; j++) {
            real h = (row[j] - mean) * s;
            hat[i * width + j] = h;
            out[i * width + j] = h * weight[j] + bias[j];
        }
    }
}

/* dx += the norm's input gradient; d_weight and d_bias are set. */
static void norm_backward(real *dx, real *d_weight, real *d_bias, const real *d_out, const real *hat, const real *scale,
                          const real *weight, size_t rows, size_t width)
{
    memset(d_weight, 0, width * sizeof *d_weight);
    memset(d_bias, 0, width * sizeof *d_bias);
    for (size_t i = 0; i < rows; i++) {
        const real *d = d_out + i * width, *h = hat + i * width;
        real mean = 0, mean_hat = 0;
        for (size_t j = 0; j < width; j++) {
            real g = d[j] * weight[j];
            mean += g;
            mean_hat += g * h[j];
            d_weight[j] += d[j] * h[j];
            d_bias[j] += d[j];
        }
        mean /= (real)width;
        mean_hat /= (real)width;
        for (size_t j = 0; j < width; j++)
            dx[i * width + j] += (d[j] * weight[j] - mean - h[j] * mean_hat) * scale[i];
    }
}

/* out = x W + b */
static void linear_forward(const model *m, real *out, const real *x, size_t weight, size_t bias, size_t rows)
{
    const model_tensor *w = &m->tensors[weight];
    size_t in = (size_t)w->shape[0], cols = (size_t)w->shape[1];
    const real *b = parameter(m, bias);
    matrix_multiply(out, cols, x, in, parameter(m, weight), cols, rows, in, cols);
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < cols; j++)
            out[i * cols + j] += b[j];
}

/* Sets dx, and weight's and bias' place in the gradient. */
static void linear_backward(const model *m, real *dx, real *gradient, const real *d_out, const real *x, size_t weight,
                            size_t bias, size_t rows)
{
    const model_tensor *w = &m->tensors[weight];
    size_t in = (size_t)w->shape[0], cols = (size_t)w->shape[1];
    real *turned = m->workspace->turned;
    matrix_multiply(dx, in, d_out, cols, transposed(m, weight), in, rows, cols, in);
    matrix_transpose(turned, x, in, rows, in);
    matrix_multiply(gradient + w->offset, cols, turned, rows, d_out, cols, in, rows, cols);
    real *db = gradient + m->tensors[bias].offset;
    memset(db, 0, cols * sizeof *db);
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < cols; j++)
            db[j] += d_out[i * cols + j];
}

static void multiply_into(real *x, const real *factor, size_t count)
{
    for (size_t i = 0; i < count; i++)
        x[i] *= factor[i];
}

/* GELU in the tanh form that GPT-2 uses ("gelu_new"). */
static const real GELU_A = (real)0.7978845608028654, GELU_B = (real)0.044715;

static void gelu_forward(real *out, const real *x, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        real v = x[i];
        out[i] = (real)0.5 * v * ((real)1 + num_tanh(GELU_A * (v + GELU_B * v * v * v)));
    }
}

static void gelu_backward(real *d, const real *x, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        real v = x[i];
        real t = num_tanh(GELU_A * (v + GELU_B * v * v * v));
        real inner = GELU_A * ((real)1 + (real)3 * GELU_B * v * v);
        d[i] *= (real)0.5 * ((real)1 + t) + (real)0.5 * v * ((real)1 - t * t) * inner;
    }
}

/* Softmax over the first i + 1 elements of row i; the others become 0. */
static void causal_softmax(real *scores, size_t rows, real factor)
{
    for (size_t i = 0; i < rows; i++) {
        real *row = scores + i * rows;
        real largest = row[0], sum = 0;
        for (size_t j = 1; j <= i; j++)
            largest = row[j] > largest ? row[j] : largest;
        for (size_t j = 0; j <= i; j++)
            row[j] = num_exp((row[j] - largest) * factor);
        for (size_t j = 0; j <= i; j++)
            sum += row[j];
        real inverse = (real)1 / sum;
        for (size_t j = 0; j <= i; j++)
            row[j] *= inverse;
        for (size_t j = i + 1; j < rows; j++)
            row[j] = 0;
    }
}

static void attention_forward(const model *m, block_state *b)
{
    size_t t = m->config.context, w = m->config.width, d = w / m->config.heads;
    real factor = (real)1 / (real)sqrt((double)d);
    for (uint32_t h = 0; h < m->config.heads; h++) {
        const real *q = b->qkv + h * d, *k = q + w, *v = k + w;
        real *p = b->attention + h * t * t, *dropped = b->attention_p + h * t * t;
        matrix_transpose(m->workspace->turned, k, 3 * w, t, d);
        matrix_multiply(p, t, q, 3 * w, m->workspace->turned, t, t, d, t);
        causal_softmax(p, t, factor);
        const real *mask = b->attention_mask + h * t * t;
        for (size_t i = 0; i < t * t; i++)
            dropped[i] = p[i] * mask[i];
        matrix_multiply(b->mixed + h * d, w, dropped, t, v, 3 * w, t, t, d);
    }
}

/* From the gradient of b->mixed to that of b->qkv. */
static void attention_backward(const model *m, const block_state *b, const real *d_mixed, real *d_qkv)
{
    size_t t = m->config.context, w = m->config.width, d = w / m->config.heads;
    real factor = (real)1 / (real)sqrt((double)d);
    real *turned = m->workspace->turned, *ds = m->workspace->d_attention;
    for (uint32_t h = 0; h < m->config.heads; h++) {
        const real *q = b->qkv + h * d, *k = q + w, *v = k + w, *dm = d_mixed + h * d;
        real *dq = d_qkv + h * d, *dk = dq + w, *dv = dk + w;
        const real *p = b->attention + h * t * t, *mask = b->attention_mask + h * t * t;

        matrix_transpose(turned, v, 3 * w, t, d);
        matrix_multiply(ds, t, dm, w, turned, t, t, d, t);
        matrix_transpose(turned, b->attention_p + h * t * t, t, t, t);
        matrix_multiply(dv, 3 * w, turned, t, dm, w, t, t, d);

        for (size_t i = 0; i < t; i++) { /* through dropout and softmax, row by row */
            real *row = ds + i * t;
            const real *pi = p + i * t, *mi = mask + i * t;
            real sum = 0;
            for (size_t j = 0; j <= i; j++) {
                row[j] *= mi[j];
                sum += row[j] * pi[j];
            }
            for (size_t j = 0; j <= i; j++)
                row[j] = (row[j] - sum) * pi[j] * factor;
            for (size_t j = i + 1; j < t; j++)
                row[j] = 0;
        }
        matrix_multiply(dq, 3 * w, ds, t, k, 3 * w, t, t, d);
        matrix_transpose(turned, ds, t, t, t);
        matrix_multiply(dk, 3 * w, turned, t, q, 3 * w, t, t, d);
    }
}

/* -------------------------------------------------------------------- whole */

static void draw_masks(const model *m, const model_dropout_key *key)
{
    model_workspace *s = m->workspace;
    double p = key ? m->config.dropout : 0.0;
    size_t t = m->config.context, w = m->config.width, h = m->config.heads;
    dropout_mask(s->input_mask, t * w, p, key, 0, DROPOUT_INPUT);
    for (uint32_t l = 0; l < m->config.layers; l++) {
        block_state *b = &s->blocks[l];
        dropout_mask(b->attention_mask, h * t * t, p, key, l, DROPOUT_ATTENTION);
        dropout_mask(b->out_mask, t * w, p, key, l, DROPOUT_ATTENTION_OUT);
        dropout_mask(b->down_mask, t * w, p, key, l, DROPOUT_MLP_OUT);
    }
}

static void forward(const model *m, const uint8_t *tokens)
{
    model_workspace *s = m->workspace;
    size_t t = m->config.context, w = m->config.width;
    const real *wte = parameter(m, m->token_embedding), *wpe = parameter(m, m->position_embedding);
    for (size_t i = 0; i < t; i++)
        for (size_t j = 0; j < w; j++)
            s->x[i * w + j] = (wte[tokens[i] * w + j] + wpe[i * w + j]) * s->input_mask[i * w + j];

    for (uint32_t l = 0; l < m->config.layers; l++) {
        const model_block *n = &m->blocks[l];
        block_state *b = &s->blocks[l];
        norm_forward(b->norm1, b->norm1_hat, b->norm1_scale, s->x, parameter(m, n->norm1_weight),
                     parameter(m, n->norm1_bias), t, w);
        linear_forward(m, b->qkv, b->norm1, n->qkv_weight, n->qkv_bias, t);
        attention_forward(m, b);
        linear_forward(m, s->d_narrow, b->mixed, n->out_weight, n->out_bias, t);
        for (size_t i = 0; i < t * w; i++)
            s->x[i] += s->d_narrow[i] * b->out_mask[i];

        norm_forward(b->norm2, b->norm2_hat, b->norm2_scale, s->x, parameter(m, n->norm2_weight),
                     parameter(m, n->norm2_bias), t, w);
        linear_forward(m, b->up, b->norm2, n->up_weight, n->up_bias, t);
        gelu_forward(b->gelu, b->up, t * 4 * w);
        linear_forward(m, s->d_narrow, b->gelu, n->down_weight, n->down_bias, t);
        for (size_t i = 0; i < t * w; i++)
            s->x[i] += s->d_narrow[i] * b->down_mask[i];
    }
    norm_forward(s->norm, s->norm_hat, s->norm_scale, s->x, parameter(m, m->norm_weight), parameter(m, m->norm_bias), t,
                 w);
    matrix_multiply(s->logits, MODEL_VOCABULARY, s->norm, w, transposed(m, m->token_embedding), MODEL_VOCABULARY, t, w,
                    MODEL_VOCABULARY);
}

/* The mean loss; logits become their gradient. */
static double cross_entropy(real *logits, const uint8_t *targets, size_t rows)
{
    double loss = 0;
    for (size_t i = 0; i < rows; i++) {
        real *row = logits + i * MODEL_VOCABULARY;
        real largest = row[0];
        for (size_t j = 1; j < MODEL_VOCABULARY; j++)
            largest = row[j] > largest ? row[j] : largest;
        double target = (double)row[targets[i]] - (double)largest, sum = 0;
        for (size_t j = 0; j < MODEL_VOCABULARY; j++)
            row[j] = num_exp(row[j] - largest);
        for (size_t j = 0; j < MODEL_VOCABULARY; j++)
            sum += (double)row[j];
        loss += num_log(sum) - target;
        real factor = (real)(1.0 / (sum * (double)rows));
        for (size_t j = 0; j < MODEL_VOCABULARY; j++)
            row[j] *= factor;
        row[targets[i]] -= (real)(1.0 / (double)rows);
    }
    return loss / (double)rows;
}

static void backward(const model *m, const uint8_t *tokens, real *gradient)
{
    model_workspace *s = m->workspace;
    size_t t = m->config.context, w = m->config.width;
    real *d_wte = gradient + m->tensors[m->token_embedding].offset;
    real *d_wpe = gradient + m->tensors[m->position_embedding].offset;

    /* the head, whose weight is the token embedding */
    matrix_multiply(s->d_narrow, w, s->logits, MODEL_VOCABULARY, parameter(m, m->token_embedding), w, t,
                    MODEL_VOCABULARY, w);
    matrix_transpose(s->turned, s->logits, MODEL_VOCABULARY, t, MODEL_VOCABULARY);
    matrix_multiply(d_wte, w, s->turned, t, s->norm, w, MODEL_VOCABULARY, t, w);

    memset(s->dx, 0, t * w * sizeof *s->dx);
    norm_backward(s->dx, gradient + m->tensors[m->norm_weight].offset, gradient + m->tensors[m->norm_bias].offset,
                  s->d_narrow, s->norm_hat, s->norm_scale, parameter(m, m->norm_weight), t, w);

    for (uint32_t l = m->config.layers; l-- > 0;) {
        const model_block *n = &m->blocks[l];
        const block_state *b = &s->blocks[l];
        for (size_t i = 0; i < t * w; i++)
            s->d_narrow[i] = s->dx[i] * b->down_mask[i];
        linear_backward(m, s->d_wide, gradient, s->d_narrow, b->gelu, n->down_weight, n->down_bias, t);
        gelu_backward(s->d_wide, b->up, t * 4 * w);
        linear_backward(m, s->d_narrow, gradient, s->d_wide, b->norm2, n->up_weight, n->up_bias, t);
        norm_backward(s->dx, gradient + m->tensors[n->norm2_weight].offset, gradient + m->tensors[n->norm2_bias].offset,
                      s->d_narrow, b->norm2_hat, b->norm2_scale, parameter(m, n->norm2_weight), t, w);

        real *d_mixed = s->d_wide; /* T*C of it */
        for (size_t i = 0; i < t * w; i++)
            s->d_narrow[i] = s->dx[i] * b->out_mask[i];
        linear_backward(m, d_mixed, gradient, s->d_narrow, b->mixed, n->out_weight, n->out_bias, t);
        attention_backward(m, b, d_mixed, s->d_qkv);
        linear_backward(m, s->d_narrow, gradient, s->d_qkv, b->norm1, n->qkv_weight, n->qkv_bias, t);
        norm_backward(s->dx, gradient + m->tensors[n->norm1_weight].offset, gradient + m->tensors[n->norm1_bias].offset,
                      s->d_narrow, b->norm1_hat, b->norm1_scale, parameter(m, n->norm1_weight), t, w);
    }

    multiply_into(s->dx, s->input_mask, t * w);
    memcpy(d_wpe, s->dx, t * w * sizeof *d_wpe);
    for (size_t i = 0; i < t; i++)
        for (size_t j = 0; j < w; j++)
            d_wte[tokens[i] * w + j] += s->dx[i * w + j];
}

const real *model_predict(model *m, const uint8_t *tokens)
{
    draw_masks(m, NULL);
    forward(m, tokens);
    return m->workspace->logits;
}

double model_loss(model *m, const uint8_t *tokens, const model_dropout_key *key, real *gradient)
{
    draw_masks(m, key);
    forward(m, tokens);
    double loss = cross_entropy(m->workspace->logits, tokens + 1, m->config.context);
    if (gradient)
        backward(m, tokens, gradient);
    return loss;
}
