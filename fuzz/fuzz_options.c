/* SPDX-License-Identifier: Apache-2.0 */

/* The words of a command line: the first byte chooses the command, then come
 * its words, each ended by a NUL. They are parsed and their numbers, slices and
 * places are read; no command is run. */

#include "fuzz.h"

#include "cli.h"
#include "place.h"
#include "slice.h"

#include <inttypes.h>
#include <unistd.h>

#define MOST_WORDS 64

/* The program ends after one command line and frees little.
 * NOLINTNEXTLINE(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp): its name */
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void) { return 1; }

int cmd_help(cli *c) /* main.c has it */
{
    (void)c;
    return CLI_YES;
}

static void enter(void)
{
    static bool there;
    if (!there) {
        char folder[] = "/tmp/lastgood-fuzz-XXXXXX";
        FUZZ_CHECK(mkdtemp(folder) != NULL && chdir(folder) == 0 && rmdir(folder) == 0, "no folder to be in");
        stdout = fopen("/dev/null", "w");
        stderr = fopen("/dev/null", "w");
        FUZZ_CHECK(stdout != NULL && stderr != NULL, "no /dev/null");
        there = true;
    }
}

static void check_numbers(cli *c)
{
    static const struct {
        const char *option;
        uint64_t min, max;
    } all[] = {{"threads", 1, 1024}, {"keep-last", 1, UINT32_MAX}, {"keep-every", 1, UINT64_MAX}, {"rank", 0, 999999}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        uint64_t v = 0;
        const char *given = cli_value(c, all[i].option);
        if (given != NULL && cli_number(c, all[i].option, all[i].min, all[i].max, &v)) {
            FUZZ_CHECK(v >= all[i].min && v <= all[i].max, "--%s=%s is %" PRIu64, all[i].option, given, v);
            FUZZ_CHECK(strtoull(given, NULL, 10) == v, "--%s=%s is %" PRIu64, all[i].option, given, v);
        }
    }
}

static void check_slice(cli *c, const char *given)
{
    static const uint64_t shape[] = {7, 0, 5, UINT64_C(1) << 40};
    slice s;
    for (uint32_t ndim = 0; ndim <= 4; ndim++) {
        if (slice_parse(c, given, ndim, shape, &s) >= 0) {
            continue;
        }
        FUZZ_CHECK(s.ndim == ndim && s.out_ndim <= ndim, "%s: %u dimensions", given, s.out_ndim);
        for (uint32_t d = 0; d < ndim; d++) {
            FUZZ_CHECK(s.offset[d] <= shape[d] && s.size[d] <= shape[d] - s.offset[d], "%s: dimension %u is outside",
                       given, d);
        }
        for (uint32_t d = 0; d < s.out_ndim; d++) {
            FUZZ_CHECK(s.out_dim[d] < ndim && s.out_shape[d] == s.size[s.out_dim[d]], "%s: result", given);
        }
    }
}

static void check_place(cli *c, const char *where)
{
    place p = {0};
    if (where[0] == '/' || strstr(where, "..") != NULL || strncmp(where, "file:", 5) == 0) {
        return; /* what is there is the machine's */
    }
    if (place_find(c, where, &p) < 0) {
        FUZZ_CHECK(p.path != NULL && (p.kind == PLACE_FILE || p.root != NULL), "%s", where);
        place_free(&p);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    enter();
    if (bytes == 0) {
        return 0;
    }
    size_t n_commands = 0;
    while (cli_commands[n_commands].name != NULL) {
        n_commands++;
    }
    FUZZ_CHECK(n_commands > 0, "there is no command");
    cli c = {.command = &cli_commands[data[0] % n_commands]};
    char *all = fuzz_string(data + 1, bytes - 1);
    char *words[MOST_WORDS + 2] = {(char *)(uintptr_t)c.command->name};
    int n = 1;
    for (size_t at = 0; at < bytes - 1 && n < MOST_WORDS; at += strlen(all + at) + 1) {
        words[n++] = all + at;
    }
    /* The program parses once; getopt remembers where it was. */
    char *none[] = {words[0], NULL};
    optind = 0;
    FUZZ_CHECK(getopt(1, none, "") == -1, "getopt does not begin anew");
    if (cli_parse(&c, n, words) < 0) {
        FUZZ_CHECK(c.n_args >= c.command->min_args && (c.command->max_args < 0 || c.n_args <= c.command->max_args),
                   "%s takes %d arguments", c.command->name, c.n_args);
        FUZZ_CHECK(c.n_given <= CLI_MAX_OPTIONS, "%zu options", c.n_given);
        check_numbers(&c);
        for (int i = 0; i < c.n_args; i++) {
            check_slice(&c, c.args[i]);
            check_place(&c, c.args[i]);
        }
    }
    json_decref(c.document);
    free(all);
    return 0;
}
