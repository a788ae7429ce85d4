/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_report.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static bench_verdict verdict(const bench_result *r, bench_row row)
{
    return r->samples.have[row] && bench_rows[row].limit != NO_ROW ? bench_summarise(&r->samples, row).verdict
                                                                   : BENCH_NOT_RESOLVED;
}

static double rate(const bench_result *r, bench_row row)
{
    return r->samples.have[row] ? bench_summarise(&r->samples, row).rate : 0;
}

static void add(char ***list, size_t *n, size_t *cap, char *sentence)
{
    need_room((void **)list, cap, *n, sizeof **list);
    (*list)[(*n)++] = sentence;
}

#define NOTE(w, ...) add(&(w)->notes, &(w)->n_notes, &(w)->cap_notes, need_format(__VA_ARGS__))
#define ADVISE(w, ...) add(&(w)->advice, &(w)->n_advice, &(w)->cap_advice, need_format(__VA_ARGS__))

/* -------------------------------------------------------------------- notes */

static void make_notes(const bench_result *r, const bench_machine *m, bench_words *w)
{
    if (r->plan.rounds < BENCH_RESOLVING_ROUNDS) {
        NOTE(w,
             "With fewer than %d rounds no interval covers 95 %%: the ranges are the least and the greatest value, "
             "and nothing is resolved.",
             BENCH_RESOLVING_ROUNDS);
    }
    if (m->in_memory) {
        NOTE(w, "%s keeps files in memory: there is no device here, and cold is as warm.", m->file_system);
    } else if (!r->direct) {
        NOTE(w, "This file system refuses O_DIRECT: the raw rows went through the page cache, with a sync at the end.");
    }
    if (!m->in_memory && r->cold_left > 0.05) {
        char part[BENCH_TIME_TEXT];
        NOTE(w, "The page cache could not be emptied: up to %s %% of a file was in it before a cold load.",
             bench_percent_text(r->cold_left, part));
    }
    if (m->remote) {
        NOTE(w, "%s is a network file system or the like: cold reads may come from a server's cache.", m->file_system);
    }
}

/* ------------------------------------------------------------------ summary */

static void name_row(const bench_result *r, bench_row row, text *t)
{
    char name[BENCH_NAME_TEXT], limit[BENCH_NAME_TEXT], part[BENCH_TIME_TEXT];
    bench_summary s = bench_summarise(&r->samples, row);
    text_add(t, "%s%s (%s %% of %s)", t->len > 0 ? "; " : "", bench_row_name(r, row, name),
             bench_percent_text(s.ratio.median, part), bench_row_name(r, bench_rows[row].limit, limit));
}

static char *make_summary(const bench_result *r)
{
    static const char *const begins[N_BENCH_VERDICTS] = {"Near its limit: ", "Below it: ", "Not resolved: "};
    text all = {0};
    for (int k = 0; k < N_BENCH_VERDICTS; k++) {
        text t = {0};
        for (bench_row row = 0; row < N_ROWS; row++) {
            if (r->samples.have[row] && bench_rows[row].limit != NO_ROW && (int)verdict(r, row) == k) {
                name_row(r, row, &t);
            }
        }
        if (t.len > 0) {
            text_add(&all, "%s%s%s.", all.len > 0 ? " " : "", begins[k], t.data);
        }
        text_free(&t);
    }
    return all.data != NULL ? all.data : need_strdup("");
}

/* ------------------------------------------------------------------- advice */

static void advise_engine(const bench_result *r, const bench_machine *m, bench_words *w)
{
    if (strcmp(m->direct, "off") == 0 && r->direct) {
        ADVISE(w,
               "LASTGOOD_DIRECT=off sends everything through the page cache; without it the disk is written past it.");
    }
    if (strcmp(m->io, "blocking") == 0) {
        ADVISE(w, "LASTGOOD_IO=blocking moves one block after the other; without it several are under way.");
    } else if (m->uring_errno != 0) {
        ADVISE(w,
               "The kernel or the container refuses io_uring (%s), so threads move the bytes. Where it may be "
               "allowed (a container's seccomp profile, kernel.io_uring_disabled), try that.",
               strerror(m->uring_errno));
    } else if (strcmp(m->io, "auto") == 0) {
        ADVISE(w, "Compare the engines on this device: LASTGOOD_IO=threads lastgood bench.");
    }
}

static void advise_saving(const bench_result *r, const bench_machine *m, bench_words *w)
{
    if (verdict(r, ROW_SAVE) != BENCH_IS_BELOW) {
        return;
    }
    uint64_t each = r->bytes / r->plan.tensors;
    if (each < UINT64_C(256) << 10) {
        ADVISE(w,
               "The tensors are small (%u KiB each): much of a save is descriptions, not data. --tensors with a "
               "smaller number shows what is left for the data.",
               (unsigned)(each >> 10));
    }
    if (rate(r, ROW_VERIFY_1) < 2 * rate(r, ROW_RAW_WRITE) && r->plan.ranks == 1 && m->cpus > 1 &&
        r->samples.have[ROW_VERIFY_1]) {
        ADVISE(w,
               "One processor checks only %.1f times as fast as this device writes. Several ranks share that work: "
               "--ranks=%u.",
               rate(r, ROW_VERIFY_1) / rate(r, ROW_RAW_WRITE), m->cpus < 4 ? m->cpus : 4);
    }
    if (r->plan.buffer_bytes < UINT64_C(16) << 20) {
        ADVISE(w, "Try more or less memory for transfers: --buffer=16MiB, --buffer=256MiB.");
    }
    advise_engine(r, m, w);
}

static void advise_loading(const bench_result *r, const bench_machine *m, bench_words *w)
{
    if (verdict(r, ROW_LOAD_COLD) == BENCH_IS_BELOW) {
        if (w->n_advice == 0) {
            advise_engine(r, m, w);
        }
    } else if (r->samples.have[ROW_LOAD_COLD] && r->samples.n >= BENCH_RESOLVING_ROUNDS &&
               bench_summarise(&r->samples, ROW_LOAD_COLD).ratio.low > 1.1) {
        ADVISE(w, "A cold load is faster than the raw read. It has more bytes under way than 4 MiB, from which this "
                  "device may gain.");
    }
    if (verdict(r, ROW_LOAD_WARM) == BENCH_IS_BELOW) {
        ADVISE(w, "A warm load copies and checks every byte, a memcpy only copies: more processors help.");
    }
}

static void make_advice(const bench_result *r, const bench_machine *m, bench_words *w)
{
    advise_saving(r, m, w);
    advise_loading(r, m, w);
    if (verdict(r, ROW_STALL_EAGER) == BENCH_IS_BELOW) {
        ADVISE(w, "Mark what only the optimizer changes as LG_TENSOR_LAZY: training then waits at the launch only for "
                  "what may change earlier.");
    }
    if (verdict(r, ROW_FENCE) == BENCH_IS_BELOW) {
        ADVISE(w, "A fence right after the launch is the worst case: lazy copies leave the processors to training. One "
                  "that comes later waits less; more lazy_threads at the launch make them faster.");
    }
    bool unknown = false;
    for (bench_row row = 0; row < N_ROWS; row++) {
        unknown |= r->samples.have[row] && bench_rows[row].limit != NO_ROW && verdict(r, row) == BENCH_NOT_RESOLVED;
    }
    if (unknown) {
        ADVISE(w, "For what is not resolved: more rounds (--rounds=%u), and nothing else running on the machine.",
               r->plan.rounds < 10   ? 15
               : r->plan.rounds < 50 ? 2 * r->plan.rounds
                                     : BENCH_MAX_ROUNDS);
    }
}

void bench_words_make(const bench_result *r, const bench_machine *m, bench_words *out)
{
    *out = (bench_words){0};
    make_notes(r, m, out);
    out->summary = make_summary(r);
    make_advice(r, m, out);
}

void bench_words_free(bench_words *w)
{
    for (size_t i = 0; i < w->n_notes; i++) {
        free(w->notes[i]);
    }
    for (size_t i = 0; i < w->n_advice; i++) {
        free(w->advice[i]);
    }
    free(w->notes);
    free(w->advice);
    free(w->summary);
}

static void paragraph(const char *s)
{
    text_wrap(stdout, s, 0, 0);
    putchar('\n');
}

void bench_words_print(const bench_words *w)
{
    for (size_t i = 0; i < w->n_notes; i++) {
        paragraph(w->notes[i]);
    }
    paragraph(w->summary);
    for (size_t i = 0; i < w->n_advice; i++) {
        fputs("- ", stdout);
        text_wrap(stdout, w->advice[i], 2, 2);
        putchar('\n');
    }
}
