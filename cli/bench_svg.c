/* SPDX-License-Identifier: Apache-2.0 */

/* The picture: for each limit a grey bar of full length, and under it what is held
 * against it, with its interval. Colours turn with the reader's light or dark
 * setting; the background is the picture's own, so that they fit it anywhere. */

#include "bench_report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WIDTH 880
#define BAR_X 175      /* where bars begin */
#define BAR_FULL 360.0 /* pixels of 100 % */
#define BAR_MOST 1.25  /* longer ones are cut, with an arrow */
#define BAR_HEIGHT 16
#define ROW_HEIGHT 24
#define GROUP_GAP 14
#define HEAD_HEIGHT 100
#define FOOT_HEIGHT 58
#define TEXT_X (BAR_X + BAR_FULL * BAR_MOST + 16)

static const char style[] =
    "text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#24292f}"
    ".back{fill:#ffffff}.title{font-size:17px;font-weight:600}.small{font-size:11.5px;fill:#57606a}"
    ".limit{fill:#b6bec8}.bar{fill:#2f7fd1}.unsure{fill:#a9c9ee}"
    ".line{stroke:#1f2328;stroke-width:1}.grid{stroke:#d0d7de;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.back{fill:#0d1117}.small{fill:#9198a1}"
    ".limit{fill:#555d68}.bar{fill:#4c9bea}.unsure{fill:#2b5078}"
    ".line{stroke:#f0f6fc}.grid{stroke:#30363d}}";

/* Text of an element. */
static void put_text(text *t, double x, double y, const char *class, const char *anchor, const char *s)
{
    char *safe = text_escape(s);
    text_add(t, "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\" text-anchor=\"%s\">", x, y, class, anchor);
    for (const char *p = safe; *p != '\0'; p++) {
        if (*p == '&') {
            text_add(t, "&amp;");
        } else if (*p == '<') {
            text_add(t, "&lt;");
        } else {
            text_add(t, "%c", *p);
        }
    }
    text_add(t, "</text>\n");
    free(safe);
}

static void put_line(text *t, double x1, double y1, double x2, double y2, const char *class)
{
    text_add(t, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"%s\"/>\n", x1, y1, x2, y2, class);
}

static double bar_end(double part) { return BAR_X + BAR_FULL * fmin(part, BAR_MOST); }

static void put_interval(text *t, bench_estimate e, double y)
{
    double middle = y + BAR_HEIGHT / 2.0, low = bar_end(e.low), high = bar_end(e.high);
    put_line(t, low, middle, high, middle, "line");
    put_line(t, low, middle - 4, low, middle + 4, "line");
    if (e.high <= BAR_MOST) {
        put_line(t, high, middle - 4, high, middle + 4, "line");
    } else { /* goes on */
        put_line(t, high - 4, middle - 4, high, middle, "line");
        put_line(t, high - 4, middle + 4, high, middle, "line");
    }
}

static bool is_small(bench_row row)
{
    return row == ROW_RAW_TENSOR || row == ROW_RAW_SLICE || row == ROW_TENSOR || row == ROW_SLICE;
}

/* Speed of what moves the whole state, time of the rest. */
static void put_row(text *t, const bench_result *r, bench_row row, bool is_limit, double y)
{
    char name[BENCH_NAME_TEXT], figure[BENCH_TIME_TEXT], a[BENCH_TIME_TEXT], b[BENCH_TIME_TEXT], c[BENCH_TIME_TEXT];
    bench_summary s = bench_summarise(&r->samples, row);
    double part = is_limit ? 1 : s.ratio.median, base = y + BAR_HEIGHT - 4;
    put_text(t, BAR_X - 10, base, is_limit ? "small" : "name", "end", bench_row_name(r, row, name));
    text_add(t, "<rect x=\"%d\" y=\"%.1f\" width=\"%.1f\" height=\"%d\" rx=\"2\" class=\"%s\"/>\n", BAR_X, y,
             bar_end(part) - BAR_X, BAR_HEIGHT,
             is_limit                          ? "limit"
             : s.verdict != BENCH_NOT_RESOLVED ? "bar"
                                               : "unsure");
    if (is_small(row) || row == ROW_STALL_EAGER || row == ROW_FENCE) {
        bench_time_text(s.seconds.median, figure);
    } else {
        bench_rate_text(s.rate, figure);
    }
    if (is_limit) {
        put_text(t, TEXT_X, base, "small", "start", figure);
        return;
    }
    put_interval(t, s.ratio, y);
    char *all = need_format("%s, %s %% (%s to %s)", figure, bench_percent_text(s.ratio.median, a),
                            bench_percent_text(s.ratio.low, b), bench_percent_text(s.ratio.high, c));
    put_text(t, TEXT_X, base, "figure", "start", all);
    free(all);
}

/* A limit and all that is held against it; of what has neither, the time. Returns
 * where the next one begins. */
static double put_group(text *t, const bench_result *r, bench_row limit, double y)
{
    bool any = false;
    for (bench_row row = 0; row < N_ROWS; row++) {
        if (r->samples.have[row] && bench_rows[row].limit == limit) {
            if (!any) {
                put_row(t, r, limit, true, y);
                y += ROW_HEIGHT;
                any = true;
            }
            put_row(t, r, row, false, y);
            y += ROW_HEIGHT;
        }
    }
    if (!any && bench_rows[limit].limit == NO_ROW) {
        char name[BENCH_NAME_TEXT], figure[BENCH_TIME_TEXT];
        double base = y + BAR_HEIGHT - 4;
        put_text(t, BAR_X - 10, base, "name", "end", bench_row_name(r, limit, name));
        put_text(t, TEXT_X, base, "figure", "start",
                 bench_time_text(bench_summarise(&r->samples, limit).seconds.median, figure));
        y += ROW_HEIGHT;
        any = true;
    }
    return any ? y + GROUP_GAP : y;
}

static void put_axis(text *t, double top, double bottom)
{
    for (int percent = 0; percent <= 125; percent += 25) {
        double x = BAR_X + BAR_FULL * percent / 100;
        char label[16];
        snprintf(label, sizeof label, percent == 0 ? "0" : "%d %%", percent);
        put_line(t, x, top, x, bottom, "grid");
        put_text(t, x, top - 6, "small", "middle", label);
    }
}

char *bench_svg(const cli *c, const bench_result *r, const bench_machine *m)
{
    text body = {0}, all = {0};
    double top = HEAD_HEIGHT, y = top + 8;
    for (bench_row row = 0; row < N_ROWS; row++) {
        if (r->samples.have[row]) {
            y = put_group(&body, r, row, y);
        }
    }
    double bottom = y - GROUP_GAP + 2, height = bottom + FOOT_HEIGHT;
    text_add(&all,
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%.0f\" viewBox=\"0 0 %d %.0f\" "
             "role=\"img\" aria-label=\"lastgood bench: speeds as parts of their limits\">\n<style>%s</style>\n"
             "<rect width=\"100%%\" height=\"100%%\" rx=\"6\" class=\"back\"/>\n",
             WIDTH, height, WIDTH, height, style);
    char *what = bench_what_line(c, r), *device = bench_device_line(m), *machine = bench_machine_line(m);
    put_text(&all, 20, 30, "title", "start", what);
    put_text(&all, 20, 50, "small", "start", device);
    put_text(&all, 20, 66, "small", "start", machine);
    put_axis(&all, top, bottom);
    text_add(&all, "%s", text_str(&body));
    put_text(
        &all, 20, bottom + 22, "small", "start",
        "Length: speed as a part of the limit's, the grey bar above, measured in the same round. Figures: medians, "
        "and the ratio's 95 % interval.");
    put_text(&all, 20, bottom + 40, "small", "start",
             "Pale: too few rounds, or too wide an interval, to tell whether it is near its limit (85 %).");
    text_add(&all, "</svg>\n");
    free(what);
    free(device);
    free(machine);
    text_free(&body);
    return all.data;
}
