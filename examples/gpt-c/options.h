/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_OPTIONS_H
#define GPT_OPTIONS_H

/* The command line. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What makes a run this run: kept in every checkpoint, and a run that goes on
 * must give the same. The number of ranks is not among them. */
typedef struct hyper {
    uint64_t layers, heads, width, context;
    uint64_t micro_batches; /* of a step, over all ranks; one window each */
    uint64_t seed;
    uint64_t warmup_steps, decay_steps;
    double dropout, learning_rate, beta1, beta2, epsilon, weight_decay, clip;
} hyper;

typedef struct hyper_field {
    const char *key;    /* in the checkpoint's global state */
    const char *option; /* on the command line */
    bool is_double;     /* else uint64_t */
    size_t offset;      /* in struct hyper */
    double least, most;
} hyper_field;

extern const hyper_field hyper_fields[];
extern const size_t n_hyper_fields;

typedef struct options {
    hyper hyper;
    const char *root, *data, *log, *dump;
    uint64_t steps;
    uint64_t save_every;  /* 0: at the end only */
    uint64_t print_every; /* 0: never */
    uint64_t keep;        /* 0: all */
    bool no_checkpoint, strict, new_run, async;
} options;

typedef enum options_outcome { OPTIONS_RUN, OPTIONS_HELP, OPTIONS_WRONG } options_outcome;

/* Reads the command line; on OPTIONS_WRONG `message` says why. */
options_outcome options_parse(int argc, char **argv, options *out, char *message, size_t message_bytes);

extern const char options_help[];

#endif
