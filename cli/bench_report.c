/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_report.h"

#include "report.h"
#include "table.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SCHEMA 1 /* of the JSON */

/* -------------------------------------------------------------- small texts */

const char *bench_row_name(const bench_result *r, bench_row row, char out[BENCH_NAME_TEXT])
{
    static const char many[] = "n threads";
    const char *name = bench_rows[row].name;
    const char *at = strstr(name, many);
    if (at == NULL) {
        snprintf(out, BENCH_NAME_TEXT, "%s", name);
    } else {
        char count[COUNT_TEXT];
        snprintf(out, BENCH_NAME_TEXT, "%.*s%s%s", (int)(at - name), name,
                 count_text(r->plan.threads, "thread", "threads", count), at + strlen(many));
    }
    return out;
}

const char *bench_time_text(double seconds, char out[BENCH_TIME_TEXT])
{
    bool whole = seconds >= 0.9995;
    double v = whole ? seconds : seconds * 1e3;
    snprintf(out, BENCH_TIME_TEXT, "%.*f %s", v >= 99.95 ? 0 : v >= 9.995 ? 1 : 2, v, whole ? "s" : "ms");
    return out;
}

const char *bench_rate_text(double bytes_per_second, char out[BENCH_TIME_TEXT])
{
    if (bytes_per_second >= 1e8) {
        snprintf(out, BENCH_TIME_TEXT, "%.2f GB/s", bytes_per_second / 1e9);
    } else {
        snprintf(out, BENCH_TIME_TEXT, "%.1f MB/s", bytes_per_second / 1e6);
    }
    return out;
}

const char *bench_percent_text(double part, char out[BENCH_TIME_TEXT])
{
    snprintf(out, BENCH_TIME_TEXT, part < 0.0095 ? "%.1f" : "%.0f", part * 100);
    return out;
}

char *bench_what_line(const cli *c, const bench_result *r)
{
    char size[SIZE_TEXT], tensors[COUNT_TEXT], ranks[COUNT_TEXT], rounds[COUNT_TEXT];
    return need_format("lastgood %s: %s in %s, %s, %s", lg_version(), size_text(c, r->bytes, size),
                       count_text(r->plan.tensors, "tensor", "tensors", tensors),
                       count_text(r->plan.ranks, "rank", "ranks", ranks),
                       count_text(r->plan.rounds, "round", "rounds", rounds));
}

char *bench_device_line(const bench_machine *m)
{
    text t = {0};
    text_add(&t, "%s", m->file_system[0] != '\0' ? m->file_system : "an unknown file system");
    if (m->device[0] != '\0' && strcmp(m->device, m->file_system) != 0) {
        text_add(&t, " on %s", m->device);
    }
    if (m->device_model[0] != '\0') {
        text_add(&t, " (%s)", m->device_model);
    }
    text_add(&t, "; engine %s, io_uring %s", m->io, m->uring_errno == 0 ? "permitted" : "refused");
    return t.data;
}

char *bench_machine_line(const bench_machine *m)
{
    static const cli plain = {0};
    char size[SIZE_TEXT], cpus[COUNT_TEXT];
    return need_format("%s%s%s, %s of memory; %s", m->cpu, m->cpu[0] != '\0' ? ", " : "",
                       count_text(m->cpus, "processor", "processors", cpus), size_text(&plain, m->memory_bytes, size),
                       m->kernel);
}

/* -------------------------------------------------------------------- table */

static void add_row(table *t, const bench_result *r, bench_row row)
{
    static const text_style styles[N_BENCH_VERDICTS] = {STYLE_GOOD, STYLE_PLAIN, STYLE_DIM};
    char name[BENCH_NAME_TEXT], a[BENCH_TIME_TEXT], b[BENCH_TIME_TEXT], c[BENCH_TIME_TEXT];
    bench_summary s = bench_summarise(&r->samples, row);
    table_cell(t, STYLE_PLAIN, "%s%s", s.has_ratio ? "  " : "", bench_row_name(r, row, name));
    table_cell(t, STYLE_PLAIN, "%s", bench_time_text(s.seconds.median, a));
    table_cell(t, STYLE_PLAIN, "%s", isnan(s.cpu) ? "" : bench_time_text(s.cpu, a));
    if (row == ROW_STALL_LAZY) { /* moves nothing */
        table_cell(t, STYLE_PLAIN, "%s", "");
    } else {
        table_cell(t, STYLE_PLAIN, s.rate < 1e8 ? "%.3f" : "%.2f", s.rate / 1e9);
    }
    if (s.has_ratio) {
        table_cell(t, STYLE_PLAIN, "%s %% (%s to %s)", bench_percent_text(s.ratio.median, a),
                   bench_percent_text(s.ratio.low, b), bench_percent_text(s.ratio.high, c));
        table_cell(t, styles[s.verdict], "%s", bench_verdict_name(s.verdict));
    } else {
        table_cell(t, STYLE_PLAIN, "%s", "");
        table_cell(t, STYLE_PLAIN, "%s", "");
    }
}

/* Each limit, and under it what is held against it. */
void bench_table(const cli *c, const bench_result *r)
{
    static const char *const heads[] = {"", ">TIME", ">CPU", ">GB/s", ">OF LIMIT", ""};
    table *t = table_new(c, 6, heads);
    for (bench_row limit = 0; limit < N_ROWS; limit++) {
        if (!r->samples.have[limit] || bench_rows[limit].limit != NO_ROW) {
            continue;
        }
        add_row(t, r, limit);
        for (bench_row row = 0; row < N_ROWS; row++) {
            if (r->samples.have[row] && bench_rows[row].limit == limit) {
                add_row(t, r, row);
            }
        }
    }
    table_print(t, 0);
}

/* --------------------------------------------------------------------- JSON */

static json_t *estimate_json(bench_estimate e)
{
    json_t *o = need(json_object());
    json_put(o, "median", json_double(e.median));
    json_put(o, "low", json_double(e.low));
    json_put(o, "high", json_double(e.high));
    return o;
}

static json_t *row_json(const bench_result *r, bench_row row)
{
    char name[BENCH_NAME_TEXT];
    bench_summary s = bench_summarise(&r->samples, row);
    json_t *o = need(json_object()), *each = need(json_array());
    json_put(o, "id", json_text(bench_rows[row].id));
    json_put(o, "name", json_text(bench_row_name(r, row, name)));
    json_put(o, "bytes", json_u64(r->samples.bytes[row]));
    json_put(o, "seconds", estimate_json(s.seconds));
    json_put(o, "cpu_seconds", isnan(s.cpu) ? need(json_null()) : json_double(s.cpu));
    json_put(o, "bytes_per_second", json_double(s.rate));
    for (size_t i = 0; i < r->samples.n; i++) {
        json_push(each, json_double(r->samples.at[row][i].seconds));
    }
    json_put(o, "rounds", each);
    if (s.has_ratio) {
        json_t *ratio = estimate_json(s.ratio);
        json_put(ratio, "verdict", json_text(bench_verdict_name(s.verdict)));
        json_put(o, "limit", json_text(bench_rows[bench_rows[row].limit].id));
        json_put(o, "ratio", ratio);
    } else {
        json_put(o, "limit", need(json_null()));
        json_put(o, "ratio", need(json_null()));
    }
    return o;
}

static json_t *machine_json(const bench_machine *m)
{
    json_t *o = need(json_object());
    json_put(o, "cpu", json_text(m->cpu));
    json_put(o, "cpus", json_u64(m->cpus));
    json_put(o, "memory_bytes", json_u64(m->memory_bytes));
    json_put(o, "kernel", json_text(m->kernel));
    json_put(o, "file_system", json_text(m->file_system));
    json_put(o, "device", json_text(m->device));
    json_put(o, "device_model", json_text(m->device_model));
    json_put(o, "rotational", json_boolean(m->rotational));
    return o;
}

static json_t *engine_json(const bench_machine *m, const bench_result *r)
{
    json_t *o = need(json_object());
    json_put(o, "io", json_text(m->io));
    json_put(o, "direct", json_text(m->direct));
    json_put(o, "io_uring", json_boolean(m->uring_errno == 0));
    json_put(o, "raw_direct", json_boolean(r->direct));
    json_put(o, "buffer_bytes", json_u64(r->plan.buffer_bytes));
    return o;
}

static json_t *strings_json(char *const *strings, size_t n)
{
    json_t *a = need(json_array());
    for (size_t i = 0; i < n; i++) {
        json_push(a, json_text(strings[i]));
    }
    return a;
}

void bench_json(json_t *into, const bench_result *r, const bench_machine *m, const bench_words *w)
{
    char created[32] = "";
    time_t now = time(NULL);
    struct tm utc;
    if (gmtime_r(&now, &utc) != NULL) {
        strftime(created, sizeof created, "%Y-%m-%dT%H:%M:%SZ", &utc);
    }
    json_put(into, "schema", json_u64(SCHEMA));
    json_put(into, "version", json_text(lg_version()));
    json_put(into, "created", json_text(created));
    json_put(into, "machine", machine_json(m));
    json_put(into, "engine", engine_json(m, r));
    json_put(into, "bytes", json_u64(r->bytes));
    json_put(into, "tensors", json_u64(r->plan.tensors));
    json_put(into, "ranks", json_u64(r->plan.ranks));
    json_put(into, "rounds", json_u64(r->plan.rounds));
    json_put(into, "threads", json_u64(r->plan.threads));
    json_t *rows = need(json_array());
    for (bench_row row = 0; row < N_ROWS; row++) {
        if (r->samples.have[row]) {
            json_push(rows, row_json(r, row));
        }
    }
    json_put(into, "rows", rows);
    json_put(into, "notes", strings_json(w->notes, w->n_notes));
    json_put(into, "summary", json_text(w->summary));
    json_put(into, "advice", strings_json(w->advice, w->n_advice));
}
