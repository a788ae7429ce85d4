/* SPDX-License-Identifier: Apache-2.0 */

/* bench: a child works, in a folder of its own, and this process waits for it and
 * removes the folder, however the child has ended: done, failed, out of memory,
 * killed, interrupted. */

#include "bench_place.h"
#include "bench_report.h"
#include "bench_run.h"
#include "place.h"
#include "progress.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

#define SIZE_LEAST (32 * MIB)
#define SIZE_MOST (UINT64_C(1) << 46)
#define SIZE_USUAL (2 * GIB)
#define SIZE_QUICK (256 * MIB)
#define ROUNDS_USUAL 7
#define TENSORS_USUAL 257 /* one of 16 MiB, 256 equal ones */
#define TENSORS_MOST 100000
#define RANKS_MOST 64
#define THREADS_MOST 8 /* as many as a load uses */

/* ------------------------------------------------------------------ options */

/* "2GiB", "1.5 GB", "512M", "1048576": powers of two, but for kB, MB, GB, TB. */
static bool parse_size(const char *s, uint64_t *out)
{
    static const struct {
        const char *unit;
        double bytes;
    } units[] = {{"", 1},         {"B", 1},      {"K", 0x1p10},   {"KiB", 0x1p10}, {"M", 0x1p20},
                 {"MiB", 0x1p20}, {"G", 0x1p30}, {"GiB", 0x1p30}, {"T", 0x1p40},   {"TiB", 0x1p40},
                 {"kB", 1e3},     {"MB", 1e6},   {"GB", 1e9},     {"TB", 1e12}};
    size_t digits = strspn(s, "0123456789.");
    char *end = NULL;
    double v = digits > 0 ? strtod(s, &end) : 0;
    if (digits == 0 || end != s + digits) {
        return false;
    }
    end += strspn(end, " ");
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (strcmp(end, units[i].unit) == 0 && v * units[i].bytes < 0x1p62) {
            *out = (uint64_t)(v * units[i].bytes);
            return true;
        }
    }
    return false;
}

/* false after an error message; leaves *out when the option was not given. */
static bool read_size(cli *c, const char *option, uint64_t least, uint64_t most, uint64_t *out)
{
    const char *given = cli_value(c, option);
    char low[SIZE_TEXT], high[SIZE_TEXT];
    uint64_t v;
    if (given == NULL) {
        return true;
    }
    if (!parse_size(given, &v) || v < least || v > most) {
        report_trouble(c, "write it as 512MiB or 2GiB", "--%s takes a size from %s to %s, not '%s'", option,
                       size_text(&(cli){0}, least, low), size_text(&(cli){0}, most, high), given);
        return false;
    }
    *out = v;
    return true;
}

typedef struct wishes {
    bench_plan plan; /* bytes, tensors 0: not asked for */
    bool quick;
    const char *json, *svg; /* files, or NULL */
} wishes;

static bool read_wishes(cli *c, wishes *w)
{
    *w = (wishes){.quick = cli_has(c, "quick"), .json = cli_value(c, "json"), .svg = cli_value(c, "svg")};
    uint64_t tensors = 0, ranks = 1, rounds = w->quick ? BENCH_RESOLVING_ROUNDS : ROUNDS_USUAL;
    if (!read_size(c, "size", SIZE_LEAST, SIZE_MOST, &w->plan.bytes) ||
        !read_size(c, "buffer", MIB, SIZE_MOST, &w->plan.buffer_bytes) ||
        !cli_number(c, "tensors", 2, TENSORS_MOST, &tensors) ||
        !cli_number(c, "rounds", 1, BENCH_MAX_ROUNDS, &rounds) || !cli_number(c, "ranks", 1, RANKS_MOST, &ranks)) {
        return false;
    }
    w->plan.tensors = (size_t)tensors;
    w->plan.ranks = (uint32_t)ranks;
    w->plan.rounds = (unsigned)rounds;
    return true;
}

/* --------------------------------------------------------------------- room */

/* The state, a copy of it for saving in the background, and the files in the page
 * cache; buffers. Where files are memory, those too. */
static uint64_t memory_for(uint64_t bytes, const bench_plan *plan, const bench_machine *m)
{
    return (m->in_memory ? 5 : 3) * bytes + plan->ranks * (plan->buffer_bytes > 0 ? plan->buffer_bytes : 64 * MIB) +
           192 * MIB;
}

/* The raw file and one checkpoint. */
static uint64_t space_for(uint64_t bytes) { return 2 * bytes + bytes / 16 + 64 * MIB; }

static bool fits(uint64_t bytes, const bench_plan *plan, const bench_machine *m)
{
    return memory_for(bytes, plan, m) <= m->memory_usable && space_for(bytes) <= m->space;
}

/* The largest size that fits, in whole steps of 32 MiB; 0 if none does. */
static uint64_t largest_that_fits(const bench_plan *plan, const bench_machine *m)
{
    uint64_t low = 0, high = SIZE_MOST / SIZE_LEAST;
    while (low < high) {
        uint64_t middle = (low + high + 1) / 2;
        if (fits(middle * SIZE_LEAST, plan, m)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low * SIZE_LEAST;
}

static int refuse(cli *c, const char *path, uint64_t bytes, const bench_plan *plan, const bench_machine *m)
{
    char size[SIZE_TEXT], want[SIZE_TEXT], have[SIZE_TEXT], less[SIZE_TEXT];
    uint64_t most = largest_that_fits(plan, m);
    char *hint = most >= SIZE_LEAST ? need_format("--size=%" PRIu64 "MiB fits", most / MIB)
                                    : need_format("the smallest size is %s", size_text(c, SIZE_LEAST, less));
    bool space = space_for(bytes) > m->space;
    int exit_status =
        space ? report_as(c, LG_ERR_NO_SPACE, hint, "%s: %s need %s of space, and %s are free", path,
                          size_text(c, bytes, size), size_text(c, space_for(bytes), want), size_text(c, m->space, have))
              : report_as(c, LG_ERR_NOMEM, hint,
                          "%s need %s of memory (the state, a copy, the page cache), and %s can be had",
                          size_text(c, bytes, size), size_text(c, memory_for(bytes, plan, m), want),
                          size_text(c, m->memory_usable, have));
    free(hint);
    return exit_status;
}

/* -1, or the exit status. */
static int choose_size(cli *c, const char *path, const wishes *w, const bench_machine *m, bench_plan *plan)
{
    *plan = w->plan;
    plan->threads = m->cpus < THREADS_MOST ? m->cpus : THREADS_MOST;
    uint64_t usual = w->quick ? SIZE_QUICK : SIZE_USUAL;
    if (plan->bytes == 0) {
        plan->bytes = fits(usual, plan, m) ? usual : largest_that_fits(plan, m) * 3 / 4 / SIZE_LEAST * SIZE_LEAST;
        plan->bytes = plan->bytes > SIZE_LEAST ? plan->bytes : SIZE_LEAST;
    }
    if (!fits(plan->bytes, plan, m)) {
        return refuse(c, path, plan->bytes, plan, m);
    }
    if (w->plan.bytes == 0 && plan->bytes < usual) {
        char have[SIZE_TEXT], wanted[SIZE_TEXT];
        report_note(c, "measuring %s instead of %s, since %s is short", size_text(c, plan->bytes, have),
                    size_text(c, usual, wanted), space_for(usual) > m->space ? "space" : "memory");
    }
    uint64_t rows = (plan->bytes - BENCH_TENSOR_BYTES) / BENCH_ROW_BYTES;
    if (plan->tensors == 0) {
        plan->tensors = TENSORS_USUAL;
    } else if (plan->tensors - 1 > rows) {
        char size[SIZE_TEXT];
        return report_trouble(c, "each tensor has at least 4 KiB", "%zu tensors are too many for %s", plan->tensors,
                              size_text(c, plan->bytes, size));
    }
    return -1;
}

/* -------------------------------------------------------------------- files */

/* Whether the file can be written later: minutes of measuring are not thrown away. */
static bool can_write(cli *c, const char *path)
{
    struct stat st;
    int error = 0;
    if (stat(path, &st) == 0) {
        error = S_ISDIR(st.st_mode) ? EISDIR : access(path, W_OK) != 0 ? errno : 0;
    } else if (errno == ENOENT) {
        const char *slash = strrchr(path, '/');
        char *folder = slash == NULL ? need_strdup(".") : need_format("%.*s", (int)(slash - path + 1), path);
        error = path[0] == '\0' ? ENOENT : access(folder, W_OK | X_OK) != 0 ? errno : 0;
        free(folder);
    } else {
        error = errno;
    }
    if (error != 0) {
        report_trouble(c, NULL, "%s: %s", path, strerror(error));
    }
    return error == 0;
}

/* Replaces the file. */
static bool write_file(cli *c, const char *path, const char *contents)
{
    FILE *f = fopen(path, "we");
    bool good = f != NULL && fputs(contents, f) >= 0;
    good = f != NULL && fclose(f) == 0 && good;
    if (!good) {
        report_trouble(c, NULL, "%s: %s", path, strerror(errno));
    }
    return good;
}

static bool write_json(cli *c, const char *path, const json_t *document)
{
    char *all = need(json_dumps(document, JSON_INDENT(2) | JSON_ENSURE_ASCII | JSON_REAL_PRECISION(17)));
    char *with_newline = need_format("%s\n", all);
    bool good = write_file(c, path, with_newline);
    free(with_newline);
    free(all);
    return good;
}

/* -------------------------------------------------------------------- child */

static void print_result(const cli *c, const bench_result *r, const bench_machine *m, const bench_words *w)
{
    char *lines[] = {bench_what_line(c, r), bench_device_line(m), bench_machine_line(m)};
    for (size_t i = 0; i < 3; i++) {
        text_put(stdout, lines[i]);
        putchar('\n');
        free(lines[i]);
    }
    putchar('\n');
    bench_table(c, r);
    putchar('\n');
    bench_words_print(w);
}

static int tell(cli *c, const wishes *w, const bench_result *r, const bench_machine *m)
{
    bench_words words;
    bench_words_make(r, m, &words);
    int exit_status = CLI_YES;
    if (!c->json) {
        print_result(c, r, m, &words);
    }
    if (c->json || w->json != NULL) {
        json_t *document = c->json ? json_incref(c->document) : need(json_object());
        if (!c->json) {
            json_put(document, "command", json_text("bench"));
        }
        bench_json(document, r, m, &words);
        if (w->json != NULL && !write_json(c, w->json, document)) {
            exit_status = CLI_TROUBLE;
        }
        json_decref(document);
    }
    if (w->svg != NULL) {
        char *svg = bench_svg(c, r, m);
        exit_status = write_file(c, w->svg, svg) ? exit_status : CLI_TROUBLE;
        free(svg);
    }
    bench_words_free(&words);
    return exit_status;
}

static int work(cli *c, const wishes *w, const bench_plan *plan, const bench_machine *m, const char *folder)
{
    bench_result *result = need_calloc(1, sizeof *result);
    lg_error err = LG_ERROR_INIT;
    int exit_status = bench_run(c, plan, folder, result, &err) == LG_OK
                          ? tell(c, w, result, m)
                          : report_error(c, &err, err.status == LG_ERR_NO_SPACE ? "--size takes less" : "");
    free(result);
    return exit_status;
}

/* ------------------------------------------------------------------- parent */

/* The signals that end a program from outside, but for those that it was started to
 * ignore (nohup), and SIGCHLD. */
static void signals_to_wait_for(sigset_t *set)
{
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    sigemptyset(set);
    sigaddset(set, SIGCHLD);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        struct sigaction now;
        if (sigaction(ends[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN) {
            sigaddset(set, ends[i]);
        }
    }
}

/* Waits for the child, passing signals on. Returns its wait status. */
static int attend(pid_t child, const sigset_t *set)
{
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
        int sig = sigwaitinfo(set, NULL);
        if (sig > 0 && sig != SIGCHLD) {
            kill(child, sig);
        }
    }
    return status;
}

/* The program ends as its child did. */
static int end_as(cli *c, int status, bool removed, const sigset_t *before)
{
    if (WIFEXITED(status)) {
        return WEXITSTATUS(status);
    }
    static const int usual[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE};
    int sig = WTERMSIG(status);
    if (isatty(STDERR_FILENO)) {
        fputs("\r\033[K", stderr); /* where the child drew its bar */
    }
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++) {
        if (sig == usual[i]) {
            signal(sig, SIG_DFL);
            raise(sig);
            sigprocmask(SIG_SETMASK, before, NULL);
        }
    }
    return report_as(c, LG_ERR_CANCELLED, sig == SIGKILL ? "was memory short? --size takes less" : NULL,
                     "ended by signal %d (%s)%s", sig, strsignal(sig),
                     removed ? "; what it had written is removed" : "");
}

static int run_in_child(cli *c, const char *path, const wishes *w, const bench_plan *plan, const bench_machine *m)
{
    sigset_t set, before;
    signal(SIGCHLD, SIG_DFL); /* inherited as ignored it would hide how the child ends */
    signals_to_wait_for(&set);
    sigprocmask(SIG_BLOCK, &set, &before); /* from before there is anything to remove */
    lg_error err = LG_ERROR_INIT;
    char *folder = NULL;
    if (bench_folder_make(path, &folder, &err) != LG_OK) {
        sigprocmask(SIG_SETMASK, &before, NULL);
        return report_error(c, &err, "");
    }
    fflush(stdout);
    fflush(stderr);
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0}); /* it would be as large as the state */
        sigprocmask(SIG_SETMASK, &before, NULL);
        if (getppid() != parent) {
            raise(SIGTERM);
        }
        int exit_status = work(c, w, plan, m, folder);
        free(folder);
        return exit_status;
    }
    int fork_error = errno, status = child < 0 ? 0 : attend(child, &set);
    lg_status removed = bench_folder_remove(folder, &err);
    free(folder);
    if (child > 0 && WIFEXITED(status)) { /* the child has printed it */
        json_decref(c->document);
        c->document = NULL;
    }
    if (removed != LG_OK) {
        report_error(c, &err, "remove the folder by hand");
    }
    int exit_status = child < 0 ? report_trouble(c, NULL, "fork: %s", strerror(fork_error))
                                : end_as(c, status, removed == LG_OK, &before);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return removed != LG_OK && exit_status == CLI_YES ? CLI_TROUBLE : exit_status;
}

/* -1, or the exit status. *path is a folder. */
static int find_folder(cli *c, place *p)
{
    const char *where = c->n_args > 0 ? c->args[0] : ".";
    struct stat st;
    if (c->json && stat(where, &st) != 0 && errno == ENOENT) { /* --json FILE */
        return report_trouble(c, "PATH is an existing folder; a file for the JSON is given as --json=FILE",
                              "%s: there is no such folder", where);
    }
    int exit_status = place_find(c, where, p);
    if (exit_status < 0 && p->kind != PLACE_ROOT) {
        exit_status = report_trouble(c, "give a folder on the device to be measured", "%s is %s", where,
                                     p->kind == PLACE_FILE ? "a file" : "a checkpoint");
        place_free(p);
    }
    return exit_status;
}

int cmd_bench(cli *c)
{
    wishes w;
    place p;
    if (!read_wishes(c, &w) || (w.json != NULL && !can_write(c, w.json)) || (w.svg != NULL && !can_write(c, w.svg))) {
        return CLI_TROUBLE;
    }
    int exit_status = find_folder(c, &p);
    if (exit_status >= 0) {
        return exit_status;
    }
    char name[256];
    size_t left = bench_folder_leftovers(p.path, name);
    if (left > 0) {
        report_note(c,
                    "%s/%s is there: another benchmark runs, or one was killed with all its processes; then remove it",
                    p.where, name);
    }
    bench_machine m;
    bench_plan plan;
    lg_error err = LG_ERROR_INIT;
    if (bench_machine_look(p.path, &m, &err) != LG_OK) {
        exit_status = report_error(c, &err, "");
    } else {
        exit_status = choose_size(c, p.where, &w, &m, &plan);
    }
    if (exit_status < 0) {
        exit_status = run_in_child(c, p.path, &w, &plan, &m);
    }
    place_free(&p);
    return exit_status;
}
