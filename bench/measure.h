/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_BENCH_MEASURE_H
#define LG_BENCH_MEASURE_H

/* Times, medians and intervals for the programs in this folder. */

#include <jansson.h>
#include <lastgood/lastgood.h>
#include <stdbool.h>
#include <stddef.h>

#define MAX_ROUNDS 1000

_Noreturn void die(const char *what, const lg_error *err); /* err NULL: errno */

#define MUST(call)              \
    do {                        \
        if ((call) != LG_OK) {  \
            die(#call, &error); \
        }                       \
    } while (0)

typedef struct took {
    double seconds, cpu; /* by the clock; of processors */
} took;
took now(void);
took since(took start);

double median(const double *values, size_t n);
/* 95 % interval of the median, by bootstrap. */
void interval(const double *values, size_t n, double *low, double *high);
/* Of a[i] / b[i] over n rounds: into `out` under `name`, and a line if `print`. Not
 * resolved: the interval is wider than a fifth of the median. */
void ratio(json_t *out, const char *name, const double *a, const double *b, size_t n, bool print);

/* "VmHWM" or "VmRSS" of this process, bytes; and starting VmHWM anew. */
size_t memory_now(const char *what);
void memory_restart(void);

/* Drops a root's checkpoints' files, and the root itself. */
void remove_tree(const char *dir);

#endif
