/* SPDX-License-Identifier: Apache-2.0 */
/* The model's own code, built with doubles (GPT_DOUBLE), against finite
 * differences of its loss. */
#include "dropout.h"
#include "model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static const model_config small = {.layers = 2, .heads = 2, .width = 12, .context = 7, .dropout = 0.1};
static const uint8_t tokens[] = {116, 104, 101, 32, 116, 32, 104, 101};
static const model_dropout_key key = {.seed = 7, .step = 3, .sample = 19};

/* Larger weights than at the start of a run, so that no part of the gradient
 * is too small to be seen. */
static model *made(void)
{
    model *m = model_create(&small);
    model_initialize(m, 1);
    for (size_t i = 0; i < m->n_parameters; i++)
        m->parameters[i] = m->parameters[i] * 8 + 0.05 * ((double)((i * 2654435761u >> 7) % 17) - 8) / 8;
    model_parameters_changed(m);
    return m;
}

static double loss_with(model *m, size_t index, double change, const model_dropout_key *k)
{
    double before = m->parameters[index];
    m->parameters[index] = before + change;
    model_parameters_changed(m);
    double loss = model_loss(m, tokens, k, NULL);
    m->parameters[index] = before;
    return loss;
}

static void check_all(const model_dropout_key *k)
{
    model *m = made();
    double *gradient = test_calloc(m->n_parameters, sizeof *gradient);
    model_loss(m, tokens, k, gradient);
    for (size_t t = 0; t < m->n_tensors; t++) {
        const model_tensor *tensor = &m->tensors[t];
        size_t step = tensor->count > 400 ? 7 : 1;
        double largest = 0;
        for (size_t j = 0; j < tensor->count; j += step) {
            size_t i = tensor->offset + j;
            double h = 1e-5; /* four points: the error is of order h^4 */
            double near = loss_with(m, i, h, k) - loss_with(m, i, -h, k);
            double far = loss_with(m, i, 2 * h, k) - loss_with(m, i, -2 * h, k);
            double expected = (8 * near - far) / (12 * h);
            if (fabs(gradient[i] - expected) > 1e-8 + 1e-6 * fabs(expected))
                fail_msg("%s element %zu: gradient %.12g, finite difference %.12g", tensor->name, j, gradient[i],
                         expected);
            largest = fmax(largest, fabs(expected));
        }
        if (largest < 1e-4)
            fail_msg("%s: no gradient large enough to test", tensor->name);
    }
    test_free(gradient);
    model_free(m);
}

static void gradient_without_dropout(void **state)
{
    (void)state;
    check_all(NULL);
}

static void gradient_with_dropout(void **state)
{
    (void)state;
    check_all(&key);
}

static void mask_depends_on_its_key_alone(void **state)
{
    (void)state;
    enum { N = 4001 };
    static double a[N], b[N];
    size_t dropped = 0;
    dropout_mask(a, N, 0.1, &key, 1, DROPOUT_MLP_OUT);
    dropout_mask(b, N - 6, 0.1, &key, 1, DROPOUT_MLP_OUT);
    for (size_t i = 0; i < N; i++) {
        dropped += a[i] == 0;
        assert_true(i >= N - 6 || a[i] == b[i]);
        assert_true(a[i] == 0 || fabs(a[i] - 1 / 0.9) < 1e-4);
    }
    assert_in_range(dropped, 330, 470); /* 400 and 3.7 standard deviations */

    model_dropout_key keys[] = {key, key, key};
    keys[0].seed++, keys[1].step++, keys[2].sample++;
    for (int k = 0; k < 5; k++) {
        size_t same = 0;
        dropout_mask(b, N, 0.1, k < 3 ? &keys[k] : &key, k == 3 ? 0 : 1, k == 4 ? DROPOUT_INPUT : DROPOUT_MLP_OUT);
        for (size_t i = 0; i < N; i++)
            same += a[i] == 0 && b[i] == 0;
        assert_in_range(same, 15, 70); /* about a hundredth: independent */
    }
}

static void later_tokens_do_not_matter(void **state)
{
    (void)state;
    enum { CHANGED = 4, N = 7 * MODEL_VOCABULARY };
    model *m = made();
    double *before = test_malloc(N * sizeof *before);
    memcpy(before, model_predict(m, tokens), N * sizeof *before);
    uint8_t other[sizeof tokens];
    memcpy(other, tokens, sizeof other);
    other[CHANGED] = 'x';
    const double *after = model_predict(m, other);
    for (size_t row = 0; row < 7; row++) {
        /* Bits are compared. NOLINTNEXTLINE(bugprone-suspicious-memory-comparison,cert-exp42-c,cert-flp37-c) */
        bool same = memcmp(before + row * MODEL_VOCABULARY, after + row * MODEL_VOCABULARY,
                           MODEL_VOCABULARY * sizeof *before) == 0;
        assert_int_equal(same, row < CHANGED);
    }
    test_free(before);
    model_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"the gradient equals finite differences, without dropout", gradient_without_dropout, NULL, NULL, NULL},
        {"the gradient equals finite differences, with dropout", gradient_with_dropout, NULL, NULL, NULL},
        {"a dropout mask depends on seed, step, sample, layer and site alone", mask_depends_on_its_key_alone, NULL,
         NULL, NULL},
        {"a later token does not change an earlier prediction", later_tokens_do_not_matter, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
