/* SPDX-License-Identifier: Apache-2.0 */
#include "train.h"

#include "fatal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

double clock_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

train *train_create(const options *o, MPI_Comm comm)
{
    train *t = allocate(1, sizeof *t);
    const hyper *h = &t->options.hyper;
    t->options = *o;
    model_config shape = {.layers = (uint32_t)h->layers,
                          .heads = (uint32_t)h->heads,
                          .width = (uint32_t)h->width,
                          .context = (uint32_t)h->context,
                          .dropout = h->dropout};
    optimizer_config rule = {.learning_rate = h->learning_rate,
                             .beta1 = h->beta1,
                             .beta2 = h->beta2,
                             .epsilon = h->epsilon,
                             .weight_decay = h->weight_decay,
                             .clip = h->clip,
                             .warmup_steps = h->warmup_steps,
                             .decay_steps = h->decay_steps};
    t->data = data_load(o->data, shape.context, comm);
    t->model = model_create(&shape);
    t->reducer = reducer_create(comm, (uint32_t)h->micro_batches, t->model->n_parameters);
    t->optimizer = optimizer_create(&rule, t->model, t->reducer->slice_start, t->reducer->slice_count);
    t->gradient = allocate(t->reducer->slice_count, sizeof *t->gradient);
    t->losses = allocate(t->reducer->end_leaf - t->reducer->first_leaf, sizeof *t->losses);
    lg_error err = LG_ERROR_INIT;
    if (lg_sampler_init(&t->sampler, t->data->samples, h->seed, 0, &err) != LG_OK)
        fatal("%s", err.message);
    t->best_loss = (double)INFINITY;
    return t;
}

void train_free(train *t)
{
    if (!t)
        return;
    data_free(t->data);
    model_free(t->model);
    reducer_free(t->reducer);
    optimizer_free(t->optimizer);
    free(t->gradient), free(t->losses), free(t);
}

void train_start(train *t) { model_initialize(t->model, t->options.hyper.seed); }

static void micro_batch(uint32_t leaf, float *gradient, void *arg)
{
    train *t = arg;
    model_dropout_key key = {
        .seed = t->options.hyper.seed, .step = t->step + 1, .sample = t->step * t->options.hyper.micro_batches + leaf};
    const uint8_t *window = data_sample(t->data, lg_sampler_peek(&t->sampler, leaf));
    t->losses[leaf - t->reducer->first_leaf] = model_loss(t->model, window, &key, gradient);
}

void train_step(train *t, int *stop)
{
    reducer *r = t->reducer;
    double started = clock_now(), count = (double)r->leaves;
    reduce_own(r, micro_batch, t);
    double computed = clock_now();

    t->loss = reduce_losses(r, t->losses) / count;
    reduce_gradients(r, t->gradient);
    exact_sum squares = {{0}, 0};
    for (size_t i = 0; i < r->slice_count; i++)
        exact_add_square(&squares, t->gradient[i]);
    reduce_exact(r, &squares, stop);
    t->norm = sqrt(exact_value(&squares)) / count;
    if (!isfinite(t->norm) || !isfinite(t->loss))
        fatal("step %llu: the loss is %g and the gradient's norm %g: nothing of this step is kept",
              (unsigned long long)t->step + 1, t->loss, t->norm);

    if (t->before_update)
        t->before_update(t->before_update_arg);
    t->step++;
    t->learning_rate = optimizer_learning_rate(&t->optimizer->config, t->step);
    double factor = optimizer_clip_factor(&t->optimizer->config, t->norm) / count;
    optimizer_update(t->optimizer, t->model->parameters, t->gradient, factor, t->step);
    reduce_share(r, t->model->parameters);
    model_parameters_changed(t->model);

    lg_sampler_advance(&t->sampler, r->leaves);
    t->tokens += (uint64_t)r->leaves * t->model->config.context;
    t->loss_average = t->step == 1 ? t->loss : 0.98 * t->loss_average + 0.02 * t->loss;
    t->best_loss = t->loss < t->best_loss ? t->loss : t->best_loss;
    t->clock.steps++;
    t->clock.compute_seconds += computed - started;
    t->clock.exchange_seconds += clock_now() - computed;
}

static void write_all(FILE *f, const void *bytes, size_t n, const char *path)
{
    if (fwrite(bytes, 1, n, f) != n)
        fatal("--dump %s: %s", path, strerror(errno));
}

static void append_file(FILE *f, const char *from, const char *path)
{
    FILE *log = fopen(from, "rb");
    if (!log)
        fatal("--log %s: %s", from, strerror(errno));
    char buffer[65536];
    size_t n;
    while ((n = fread(buffer, 1, sizeof buffer, log)) > 0)
        write_all(f, buffer, n, path);
    if (ferror(log))
        fatal("--log %s: %s", from, strerror(errno));
    fclose(log);
}

void train_dump(train *t, const char *path, const char *log)
{
    reducer *r = t->reducer;
    size_t n = t->model->n_parameters;
    float *whole[2] = {NULL, NULL};
    const float *slices[2] = {t->optimizer->exp_avg, t->optimizer->exp_avg_sq};
    for (int i = 0; i < 2; i++) {
        whole[i] = r->rank == 0 ? allocate(n, sizeof **whole) : NULL;
        reduce_collect(r, slices[i], whole[i]);
    }
    if (r->rank == 0) {
        FILE *f = fopen(path, "wb");
        if (!f)
            fatal("--dump %s: %s", path, strerror(errno));
        fprintf(f,
                "gpt-c state: step %llu, tokens %llu, epoch %llu, consumed %llu, average %a, best %a, %zu parameters\n",
                (unsigned long long)t->step, (unsigned long long)t->tokens, (unsigned long long)t->sampler.epoch,
                (unsigned long long)t->sampler.consumed, t->loss_average, t->best_loss, n);
        write_all(f, t->model->parameters, n * sizeof(float), path);
        write_all(f, whole[0], n * sizeof(float), path);
        write_all(f, whole[1], n * sizeof(float), path);
        if (log)
            append_file(f, log, path);
        if (fclose(f) != 0)
            fatal("--dump %s: %s", path, strerror(errno));
    }
    free(whole[0]), free(whole[1]);
}
