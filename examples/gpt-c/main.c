/* SPDX-License-Identifier: Apache-2.0 */
/* gpt-c: trains a small GPT-2 with MPI and lastgood. See README.md. */

#include "checkpoint.h"
#include "fatal.h"
#include "log.h"
#include "options.h"
#include "train.h"

#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

static volatile sig_atomic_t stop_asked;

static void ask_to_stop(int number) { stop_asked = number; }

/* SIGTERM is what schedulers send before they kill; SIGUSR1 is what mpirun
 * passes on to the ranks, and what some schedulers can be told to send. */
static void catch_signals(void)
{
    struct sigaction action = {0};
    action.sa_handler = ask_to_stop;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
}

/* Trains to the last step, or until some rank is asked to stop. */
static bool run(train *t, checkpoint *c, run_log *log)
{
    const options *o = &t->options;
    bool speaks = t->reducer->rank == 0;
    while (t->step < o->steps) {
        int stop = stop_asked;
        train_step(t, &stop);
        log_step(log, t);
        bool last = t->step == o->steps || stop;
        if (speaks && o->print_every && (t->step % o->print_every == 0 || last)) {
            printf("step %5llu  loss %.4f  average %.4f  lr %.6f  norm %.3f\n", (unsigned long long)t->step, t->loss,
                   t->loss_average, t->learning_rate, t->norm);
            fflush(stdout);
        }
        if (c && (last || (o->save_every && t->step % o->save_every == 0))) {
            log_sync(log);
            checkpoint_save(c, last);
        } else if (c) {
            checkpoint_report(c);
        }
        if (stop && t->step < o->steps)
            return false;
    }
    return true;
}

static void print_clock(const train *t)
{
    const rank_clock *k = &t->clock;
    double seconds = k->compute_seconds + k->exchange_seconds + k->save_seconds;
    if (k->steps)
        printf("rank 0: %llu steps on %d rank%s in %.1f s: %.1f ms a step, of which %.0f%% computing, %.0f%% "
               "exchanging, %.0f%% saving\n",
               (unsigned long long)k->steps, t->reducer->size, t->reducer->size == 1 ? "" : "s", seconds,
               1e3 * seconds / (double)k->steps, 100 * k->compute_seconds / seconds,
               100 * k->exchange_seconds / seconds, 100 * k->save_seconds / seconds);
}

int main(int argc, char **argv)
{
    options o;
    char message[256];
    options_outcome outcome = options_parse(argc, argv, &o, message, sizeof message);
    if (outcome == OPTIONS_HELP) {
        fputs(options_help, stdout);
        return 0;
    }

    catch_signals();
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (outcome == OPTIONS_WRONG) { /* every rank knows; one says so */
        if (rank == 0)
            fprintf(stderr, "gpt-c: %s\n", message);
        MPI_Finalize();
        return 2;
    }

    train *t = train_create(&o, MPI_COMM_WORLD);
    if (rank == 0)
        fprintf(stderr, "gpt-c: %zu parameters, %d rank%s, %u micro-batches of %u bytes a step\n",
                t->model->n_parameters, t->reducer->size, t->reducer->size == 1 ? "" : "s", t->reducer->leaves,
                t->model->config.context);
    checkpoint *c = o.no_checkpoint ? NULL : checkpoint_open(t);
    if (!c || !checkpoint_resume(c))
        train_start(t);
    if (t->step >= o.steps && rank == 0)
        fprintf(stderr, "gpt-c: nothing to do: the run is at step %llu, --steps is %llu\n", (unsigned long long)t->step,
                (unsigned long long)o.steps);

    run_log *log = rank == 0 && o.log ? log_open(o.log, t->step) : NULL;
    bool finished = run(t, c, log);
    log_close(log);
    checkpoint_close(c);
    if (finished && o.dump)
        train_dump(t, o.dump, o.log);
    if (rank == 0) {
        if (!finished)
            fprintf(stderr, "gpt-c: stopped by a signal after step %llu%s; start it again to go on\n",
                    (unsigned long long)t->step, c ? ", saved" : ", not saved (--no-checkpoint)");
        else
            print_clock(t);
    }
    train_free(t);
    MPI_Finalize();
    return 0;
}
