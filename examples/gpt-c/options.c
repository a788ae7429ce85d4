/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT_FIELD(key, option, field, least, most)            \
    {                                                           \
        key, option, false, offsetof(hyper, field), least, most \
    }
#define NUMBER_FIELD(key, option, field, least, most)          \
    {                                                          \
        key, option, true, offsetof(hyper, field), least, most \
    }

const hyper_field hyper_fields[] = {
    COUNT_FIELD("model.layers", "layers", layers, 1, 100),
    COUNT_FIELD("model.heads", "heads", heads, 1, 100),
    COUNT_FIELD("model.width", "width", width, 1, 4096),
    COUNT_FIELD("model.context", "context", context, 1, 4096),
    NUMBER_FIELD("model.dropout", "dropout", dropout, 0, 0.9),
    COUNT_FIELD("batch.micro_batches", "micro-batches", micro_batches, 1, 65536),
    COUNT_FIELD("seed", "seed", seed, 0, 18446744073709551615.0),
    NUMBER_FIELD("schedule.learning_rate", "lr", learning_rate, 0, 10),
    COUNT_FIELD("schedule.warmup_steps", "warmup", warmup_steps, 0, 4294967295.0),
    COUNT_FIELD("schedule.decay_steps", "decay-steps", decay_steps, 1, 4294967295.0),
    NUMBER_FIELD("adamw.beta1", "beta1", beta1, 0, 0.99999),
    NUMBER_FIELD("adamw.beta2", "beta2", beta2, 0, 0.99999),
    NUMBER_FIELD("adamw.epsilon", "epsilon", epsilon, 1e-30, 1),
    NUMBER_FIELD("adamw.weight_decay", "weight-decay", weight_decay, 0, 10),
    NUMBER_FIELD("clip", "clip", clip, 0, 1e30),
};
const size_t n_hyper_fields = sizeof hyper_fields / sizeof hyper_fields[0];

const char options_help[] = "usage: mpirun -n RANKS gpt-c --root DIR --steps N [options]\n"
                            "\n"
                            "Trains a small GPT-2 on the bytes of a text, saves checkpoints under DIR with\n"
                            "lastgood, and goes on from the last good one when started again, on the same\n"
                            "or another number of ranks: the result has the same bits.\n"
                            "\n"
                            "run\n"
                            "  --root DIR           where the checkpoints are; if it holds any, the run goes on\n"
                            "  --steps N            train until step N (default 100)\n"
                            "  --data FILE          text to train on (default examples/gpt-c/data/persuasion.txt)\n"
                            "  --save-every N       save every N steps (default 50; 0: only at the end);\n"
                            "                       SIGTERM and SIGUSR1 finish the step, save and exit with 0\n"
                            "  --async              save in the background while training goes on\n"
                            "  --keep N             keep the last N checkpoints (default 3; 0: all)\n"
                            "  --strict             stop if the newest checkpoint is damaged, do not fall back\n"
                            "  --new-run            start at step 0 though DIR holds another run's checkpoints\n"
                            "  --no-checkpoint      neither load nor save (DIR is not needed)\n"
                            "  --log FILE           one line a step: step, loss, its bits, learning rate, norm\n"
                            "  --dump FILE          at the end: all state as bytes, to compare runs\n"
                            "  --print-every N      one line on stdout every N steps (default 10; 0: none)\n"
                            "  --help               this text\n"
                            "\n"
                            "model (a run that goes on must give the same)\n"
                            "  --layers N (4)  --heads N (4)  --width N (64)  --context N (64)  --dropout P (0.1)\n"
                            "\n"
                            "training (likewise)\n"
                            "  --micro-batches N    windows of the text in a step, over all ranks (default 8)\n"
                            "  --seed N             of weights, dropout and the order of the data (default 1)\n"
                            "  --lr X (0.001)  --warmup STEPS (20)  --decay-steps N (1000: then a tenth of lr)\n"
                            "  --beta1 X (0.9)  --beta2 X (0.95)  --epsilon X (1e-8)  --weight-decay X (0.1)\n"
                            "  --clip X (1; 0: none)\n";

enum {
    OPTION_ROOT = 256,
    OPTION_STEPS,
    OPTION_DATA,
    OPTION_SAVE_EVERY,
    OPTION_ASYNC,
    OPTION_KEEP,
    OPTION_STRICT,
    OPTION_NEW_RUN,
    OPTION_NO_CHECKPOINT,
    OPTION_LOG,
    OPTION_DUMP,
    OPTION_PRINT_EVERY,
    OPTION_HELP,
    OPTION_HYPER = 512 /* and the field's index */
};

static const struct option plain_options[] = {
    {"root", required_argument, NULL, OPTION_ROOT},
    {"steps", required_argument, NULL, OPTION_STEPS},
    {"data", required_argument, NULL, OPTION_DATA},
    {"save-every", required_argument, NULL, OPTION_SAVE_EVERY},
    {"async", no_argument, NULL, OPTION_ASYNC},
    {"keep", required_argument, NULL, OPTION_KEEP},
    {"strict", no_argument, NULL, OPTION_STRICT},
    {"new-run", no_argument, NULL, OPTION_NEW_RUN},
    {"no-checkpoint", no_argument, NULL, OPTION_NO_CHECKPOINT},
    {"log", required_argument, NULL, OPTION_LOG},
    {"dump", required_argument, NULL, OPTION_DUMP},
    {"print-every", required_argument, NULL, OPTION_PRINT_EVERY},
    {"help", no_argument, NULL, OPTION_HELP},
};
enum { N_PLAIN = sizeof plain_options / sizeof plain_options[0] };

static bool parse_count(const char *text, double least, double most, uint64_t *out)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || end == text || *end || text[0] == '-' || text[0] == '+' || (double)value < least ||
        (double)value > most)
        return false;
    *out = value;
    return true;
}

static bool parse_number(const char *text, double least, double most, double *out)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= least && value <= most))
        return false;
    *out = value;
    return true;
}

static void defaults(options *o)
{
    memset(o, 0, sizeof *o);
    o->data = "examples/gpt-c/data/persuasion.txt";
    o->steps = 100, o->save_every = 50, o->print_every = 10, o->keep = 3;
    hyper *h = &o->hyper;
    h->layers = 4, h->heads = 4, h->width = 64, h->context = 64, h->dropout = 0.1;
    h->micro_batches = 8, h->seed = 1;
    h->learning_rate = 0.001, h->warmup_steps = 20, h->decay_steps = 1000;
    h->beta1 = 0.9, h->beta2 = 0.95, h->epsilon = 1e-8, h->weight_decay = 0.1, h->clip = 1;
}

static bool set(options *o, int option, const char *value)
{
    const double many = 4294967295.0; /* steps are 32 bits of a dropout counter */
    if (option >= OPTION_HYPER) {
        const hyper_field *f = &hyper_fields[option - OPTION_HYPER];
        char *field = (char *)&o->hyper + f->offset;
        return f->is_double ? parse_number(value, f->least, f->most, (double *)(void *)field)
                            : parse_count(value, f->least, f->most, (uint64_t *)(void *)field);
    }
    switch (option) {
    case OPTION_ROOT:
        o->root = value;
        return value[0] != 0;
    case OPTION_STEPS:
        return parse_count(value, 1, many, &o->steps);
    case OPTION_DATA:
        o->data = value;
        return value[0] != 0;
    case OPTION_SAVE_EVERY:
        return parse_count(value, 0, many, &o->save_every);
    case OPTION_ASYNC:
        o->async = true;
        return true;
    case OPTION_KEEP:
        return parse_count(value, 0, many, &o->keep);
    case OPTION_STRICT:
        o->strict = true;
        return true;
    case OPTION_NEW_RUN:
        o->new_run = true;
        return true;
    case OPTION_NO_CHECKPOINT:
        o->no_checkpoint = true;
        return true;
    case OPTION_LOG:
        o->log = value;
        return value[0] != 0;
    case OPTION_DUMP:
        o->dump = value;
        return value[0] != 0;
    case OPTION_PRINT_EVERY:
        return parse_count(value, 0, many, &o->print_every);
    default:
        return false;
    }
}

static const char *contradiction(const options *o)
{
    if (!o->no_checkpoint && !o->root)
        return "--root DIR is missing (or --no-checkpoint)";
    if (o->no_checkpoint && o->root)
        return "--root and --no-checkpoint contradict each other";
    if (o->strict && o->new_run)
        return "--strict and --new-run contradict each other: a new run loads nothing";
    if (o->hyper.width % o->hyper.heads)
        return "--width must be a multiple of --heads";
    if (o->hyper.decay_steps <= o->hyper.warmup_steps)
        return "--decay-steps must be larger than --warmup";
    return NULL;
}

options_outcome options_parse(int argc, char **argv, options *out, char *message, size_t message_bytes)
{
    struct option table[N_PLAIN + 32] = {{0}};
    memcpy(table, plain_options, sizeof plain_options);
    for (size_t i = 0; i < n_hyper_fields; i++)
        table[N_PLAIN + i] = (struct option){hyper_fields[i].option, required_argument, NULL, OPTION_HYPER + (int)i};

    defaults(out);
    opterr = 0;
    int option, index = 0;
    while ((option = getopt_long(argc, argv, ":h", table, &index)) != -1) {
        if (option == OPTION_HELP || option == 'h')
            return OPTIONS_HELP;
        if (option == '?' || option == ':') {
            snprintf(message, message_bytes, "%s: %s", argv[optind - 1],
                     option == ':' ? "needs a value" : "no such option (see --help)");
            return OPTIONS_WRONG;
        }
        if (!set(out, option, optarg)) {
            snprintf(message, message_bytes, "--%s: '%s' is not allowed here", table[index].name, optarg);
            if (option >= OPTION_HYPER) {
                const hyper_field *f = &hyper_fields[option - OPTION_HYPER];
                snprintf(message, message_bytes, "--%s: '%s' is not %s from %.10g to %.10g", f->option, optarg,
                         f->is_double ? "a number" : "a whole number", f->least, f->most);
            }
            return OPTIONS_WRONG;
        }
    }
    if (optind < argc) {
        snprintf(message, message_bytes, "%s: unexpected argument", argv[optind]);
        return OPTIONS_WRONG;
    }
    const char *wrong = contradiction(out);
    if (wrong) {
        snprintf(message, message_bytes, "%s", wrong);
        return OPTIONS_WRONG;
    }
    return OPTIONS_RUN;
}
