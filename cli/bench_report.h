/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_BENCH_REPORT_H
#define LG_CLI_BENCH_REPORT_H

/* What a benchmark tells: a table and some sentences for people, JSON for programs
 * (docs/benchmark-your-machine.md describes it), a picture. */

#include "bench_place.h"
#include "bench_run.h"
#include "text.h"

/* "memcpy, 2 threads": the row's name, for so many threads. */
#define BENCH_NAME_TEXT 64
const char *bench_row_name(const bench_result *r, bench_row row, char out[BENCH_NAME_TEXT]);
/* "1.23 s", "45.6 ms", "678 ms": three digits */
#define BENCH_TIME_TEXT 32
const char *bench_time_text(double seconds, char out[BENCH_TIME_TEXT]);
/* "1.42 GB/s" */
const char *bench_rate_text(double bytes_per_second, char out[BENCH_TIME_TEXT]);
/* "97", and "0.4" where a whole number would say nothing. */
const char *bench_percent_text(double part, char out[BENCH_TIME_TEXT]);

/* What was measured, on what file system, on what machine; free() them. */
char *bench_what_line(const cli *c, const bench_result *r);
char *bench_device_line(const bench_machine *m);
char *bench_machine_line(const bench_machine *m);

void bench_table(const cli *c, const bench_result *r);

/* Sentences; bench_words.c. */
typedef struct bench_words {
    char **notes; /* how far the figures can be trusted */
    size_t n_notes, cap_notes;
    char *summary; /* what is near its limit, what is not, what is not known */
    char **advice; /* what to try */
    size_t n_advice, cap_advice;
} bench_words;
void bench_words_make(const bench_result *r, const bench_machine *m, bench_words *out);
void bench_words_free(bench_words *w);
void bench_words_print(const bench_words *w);

/* Puts the result into an object. */
void bench_json(json_t *into, const bench_result *r, const bench_machine *m, const bench_words *w);

/* The picture as text; free() it. bench_svg.c. */
char *bench_svg(const cli *c, const bench_result *r, const bench_machine *m);

#endif
