/* SPDX-License-Identifier: Apache-2.0 */
#include "progress.h"

#include "text.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define EVERY_SECONDS 0.1

/* One program, one bar. */
static struct {
    bool on, shown, steps;
    char what[80];
    double began, drawn;
} bar;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static unsigned columns(void)
{
    struct winsize w;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 0 ? w.ws_col : 80;
}

void progress_begin(const cli *c, const char *what)
{
    const char *term = getenv("TERM");
    bar.on = !c->quiet && isatty(STDERR_FILENO) && (term == NULL || strcmp(term, "dumb") != 0);
    bar.shown = bar.steps = false;
    snprintf(bar.what, sizeof bar.what, "%s", what);
    bar.began = now();
    bar.drawn = 0;
}

/* "2:05", "1:02:05" */
static void time_text(double seconds, char out[32])
{
    unsigned long s = seconds < 360000 ? (unsigned long)(seconds + 0.5) : 359999;
    if (s >= 3600) {
        snprintf(out, 32, "%lu:%02lu:%02lu", s / 3600, s / 60 % 60, s % 60);
    } else {
        snprintf(out, 32, "%lu:%02lu", s / 60, s % 60);
    }
}

static void draw(uint64_t done, uint64_t total, double seconds)
{
    static const cli plain = {0};
    char have[SIZE_TEXT], all[SIZE_TEXT], left[32] = "-", line[400];
    double part = total > 0 ? (double)done / (double)total : 1;
    part = part > 1 ? 1 : part;
    double rate = seconds > 0 ? (double)done / seconds : 0;
    if (rate > 0 && part < 1) {
        time_text((double)(total - done) / rate, left);
    }
    int n;
    if (bar.steps) {
        n = snprintf(line, sizeof line, " %3.0f%%  %s left", part * 100, left);
    } else {
        n = snprintf(line, sizeof line, " %3.0f%%  %s of %s  %.0f MB/s  %s left", part * 100,
                     size_text(&plain, done, have), size_text(&plain, total, all), rate / 1e6, left);
    }
    int room = (int)columns() - 1 - n - (int)text_columns(bar.what) - 4;
    fprintf(stderr, "\r\033[K%s ", bar.what);
    if (room >= 10) {
        room = room > 40 ? 40 : room;
        int full = (int)(part * room);
        fputc('[', stderr);
        for (int i = 0; i < room; i++) {
            fputc(i < full ? '#' : '.', stderr);
        }
        fputc(']', stderr);
    }
    fputs(line, stderr);
    fflush(stderr);
    bar.shown = true;
}

int progress_update(uint64_t done, uint64_t total, void *arg)
{
    (void)arg;
    if (bar.on) {
        double t = now();
        if (t - bar.drawn >= EVERY_SECONDS) {
            bar.drawn = t;
            draw(done, total, t - bar.began);
        }
    }
    return 0;
}

void progress_step(const char *what, unsigned done, unsigned total)
{
    if (bar.on) {
        bar.steps = true;
        snprintf(bar.what, sizeof bar.what, "%s", what);
        draw(done, total, now() - bar.began);
    }
}

void progress_clear(void)
{
    if (bar.shown) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
        bar.shown = false;
    }
}

void progress_end(void)
{
    progress_clear();
    bar.on = false;
}
