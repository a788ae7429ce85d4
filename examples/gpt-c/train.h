/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_TRAIN_H
#define GPT_TRAIN_H

/* The state of a training run on one rank, and one step of it. */

#include "data.h"
#include "model.h"
#include "optimizer.h"
#include "options.h"
#include "reduce.h"

#include <lastgood/lastgood.h>

/* Where this rank's time went; a rank's own, of no use to another. */
typedef struct rank_clock {
    uint64_t steps;
    double compute_seconds, exchange_seconds, save_seconds;
} rank_clock;

typedef struct train {
    options options;
    model *model;         /* parameters: the same on all ranks */
    optimizer *optimizer; /* moments: this rank's slice */
    reducer *reducer;
    data *data;
    float *gradient; /* the slice of the step's gradient */
    double *losses;  /* of this rank's micro-batches */

    /* what the run has come to: in every checkpoint */
    uint64_t step; /* completed */
    uint64_t tokens;
    lg_sampler sampler;
    double loss_average; /* decaying, 50 steps or so */
    double best_loss;    /* of a step; inf before the first */
    rank_clock clock;

    /* Called in every step when parameters and moments are about to change, with
     * before_update_arg; NULL: nothing. */
    void (*before_update)(void *arg);
    void *before_update_arg;

    /* of the last step */
    double loss, norm, learning_rate;
} train;

/* Collective, like all of these. A run at step 0 (weights are not set yet). */
train *train_create(const options *o, MPI_Comm comm);
void train_free(train *t);

/* Weights of a new run. */
void train_start(train *t);

/* One optimizer step. `stop` is this rank's wish to end the run; it becomes
 * true on all ranks when any has it. */
void train_step(train *t, int *stop);

/* Rank 0 writes step, counters, parameters and both moments as raw bytes, then
 * the log, to `path`: equal files, equal runs. */
void train_dump(train *t, const char *path, const char *log);

double clock_now(void); /* seconds */

#endif
