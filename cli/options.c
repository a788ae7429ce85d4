/* SPDX-License-Identifier: Apache-2.0 */
#include "nearest.h"
#include "report.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LETTERS 1000 /* getopt's values are 1000 + number of the option */

typedef struct option_list {
    const cli_option *all[CLI_MAX_OPTIONS];
    size_t n;
    struct option lng[CLI_MAX_OPTIONS + 1];
    char letters[3 * CLI_MAX_OPTIONS + 2]; /* no_argument, required_argument and optional_argument are 0, 1, 2 */
} option_list;

static bool optional_argument_of(const cli_option *o) { return o->arg != NULL && o->arg[0] == '['; }

static void add_options(option_list *l, const cli_option *options)
{
    for (; options->name != NULL && l->n < CLI_MAX_OPTIONS; options++) {
        int kind = options->arg == NULL            ? no_argument
                   : optional_argument_of(options) ? optional_argument
                                                   : required_argument;
        l->lng[l->n] = (struct option){.name = options->name, .has_arg = kind, .val = LETTERS + (int)l->n};
        if (options->letter != 0) {
            size_t at = strlen(l->letters);
            l->letters[at++] = options->letter;
            for (int colons = kind; colons > 0; colons--) { /* "t::": a value only attached */
                l->letters[at++] = ':';
            }
            l->letters[at] = '\0';
        }
        l->all[l->n++] = options;
    }
}

static const cli_option *of_letter(const option_list *l, int letter)
{
    for (size_t i = 0; i < l->n; i++) {
        if (l->all[i]->letter == letter) {
            return l->all[i];
        }
    }
    return NULL;
}

/* A slice may begin with a minus sign ("-1", "-3:"), and no option begins with
 * a digit: such words move behind a "--", where getopt leaves them alone. */
static char **keep_slices(const cli *c, int argc, char **argv)
{
    char **out = need_calloc((size_t)argc + 2, sizeof *out);
    int n = 0, late = 0, end = argc;
    char **behind = need_calloc((size_t)argc + 1, sizeof *behind);
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--") == 0) {
            end = i;
            break;
        }
        bool slice = strcmp(c->command->name, "get") == 0 && argv[i][0] == '-' && isdigit((unsigned char)argv[i][1]);
        if (slice) {
            behind[late++] = argv[i];
        } else {
            out[n++] = argv[i];
        }
    }
    if (late > 0 || end < argc) {
        out[n++] = end < argc ? argv[end] : (char *)(uintptr_t) "--"; /* getopt does not write to words */
    }
    for (int i = 0; i < late; i++) {
        out[n++] = behind[i];
    }
    for (int i = end + 1; i < argc; i++) {
        out[n++] = argv[i];
    }
    free(behind);
    return out;
}

static int unknown_option(cli *c, const option_list *l, const char *word)
{
    nearest near;
    char *name = need_strdup(word);
    name[strcspn(name, "=")] = '\0';
    nearest_begin(&near, name[0] == '-' && name[1] == '-' ? name + 2 : name + 1);
    for (size_t i = 0; i < l->n; i++) {
        nearest_offer(&near, l->all[i]->name);
    }
    char *hint =
        near.n > 0 ? need_format("is --%s meant? 'lastgood help %s' lists all options", near.name[0], c->command->name)
                   : need_format("'lastgood help %s' lists the options", c->command->name);
    int exit_status = report_trouble(c, hint, "unknown option %s", name);
    free(hint);
    free(name);
    return exit_status;
}

static int check_args(cli *c)
{
    const cli_command *m = c->command;
    bool many = m->max_args >= 0 && c->n_args > m->max_args;
    if (!many && c->n_args >= m->min_args) {
        return -1;
    }
    bool apart = many && cli_has(c, "tensors") && cli_value(c, "tensors") == NULL;
    char *hint = apart ? need_strdup("a pattern is attached: -tPATTERN or --tensors=PATTERN")
                       : need_format("usage: lastgood %s [OPTION]... %s", m->name, m->args);
    int exit_status;
    if (many) {
        exit_status = report_trouble(c, hint, "unexpected argument %s", c->args[m->max_args]);
    } else {
        exit_status =
            report_trouble(c, hint, "%s", c->n_args == 0 ? "an argument is missing" : "another argument is missing");
    }
    free(hint);
    return exit_status;
}

static int set_common(cli *c)
{
    /* bench's --json=FILE writes a file, and the table stays. */
    c->json = cli_has(c, "json") && cli_value(c, "json") == NULL;
    c->bytes = cli_has(c, "bytes");
    c->quiet = cli_has(c, "quiet");
    if (c->json) {
        c->document = need(json_object());
        json_put(c->document, "command", json_text(c->command->name));
    }
    const char *when = cli_value(c, "color"), *no_color = getenv("NO_COLOR"), *term = getenv("TERM");
    if (when != NULL && strcmp(when, "always") != 0 && strcmp(when, "never") != 0 && strcmp(when, "auto") != 0) {
        return report_trouble(c, NULL, "--color is always, never or auto, not '%s'", when);
    }
    if (when != NULL && strcmp(when, "auto") != 0) {
        c->color = strcmp(when, "always") == 0;
    } else {
        c->color = isatty(STDOUT_FILENO) && (no_color == NULL || no_color[0] == '\0') &&
                   (term == NULL || strcmp(term, "dumb") != 0);
    }
    return -1;
}

static int read_options(cli *c, const option_list *l, int argc, char **argv)
{
    opterr = 0;
    optind = 1;
    int got;
    while (true) {
        int at = optind < argc ? optind : argc - 1;
        got = getopt_long(argc, argv, l->letters, l->lng, NULL);
        if (got == -1) {
            break;
        }
        const cli_option *o = got >= LETTERS ? l->all[got - LETTERS] : of_letter(l, got);
        if (got == ':') {
            o = optopt >= LETTERS ? l->all[optopt - LETTERS] : of_letter(l, optopt);
            return report_trouble(c, o != NULL ? o->help : NULL, "option --%s needs %s", o != NULL ? o->name : "?",
                                  o != NULL ? o->arg : "a value");
        }
        if (got == '?' && optopt >= LETTERS) {
            return report_trouble(c, NULL, "option --%s takes no value", l->all[optopt - LETTERS]->name);
        }
        if (o == NULL) {
            char letter[3] = {'-', (char)optopt, '\0'};
            bool is_long = argv[optind - 1][0] == '-' && argv[optind - 1][1] == '-' && optopt == 0;
            return unknown_option(c, l, optopt != 0 && !is_long ? letter : is_long ? argv[optind - 1] : argv[at]);
        }
        if (c->n_given == CLI_MAX_OPTIONS) {
            return report_trouble(c, NULL, "too many options");
        }
        c->given[c->n_given] = o->name;
        c->values[c->n_given++] = optarg;
    }
    c->args = argv + optind;
    c->n_args = argc - optind;
    return -1;
}

int cli_parse(cli *c, int argc, char **argv)
{
    option_list l = {.letters = ":"};
    add_options(&l, c->command->options);
    add_options(&l, cli_common_options);
    static char **words; /* c->args points into it for as long as the program runs */
    words = keep_slices(c, argc, argv);
    int n = 0;
    while (words[n] != NULL) {
        n++;
    }
    /* An option may be wrong; whether JSON is wanted must be known before. */
    for (int i = 1; i < n && strcmp(words[i], "--") != 0; i++) {
        if (strcmp(words[i], "--json") == 0) {
            c->json = true;
        }
    }
    if (c->json) {
        c->document = need(json_object());
        json_put(c->document, "command", json_text(c->command->name));
    }
    int done = read_options(c, &l, n, words);
    if (c->document != NULL && done < 0) {
        json_decref(c->document);
        c->document = NULL;
    }
    if (done < 0 && (cli_has(c, "help") || cli_has(c, "version"))) {
        if (cli_has(c, "help")) {
            cli_print_command_help(c->command, stdout);
        } else {
            cli_print_version();
        }
        c->json = false;
        return CLI_YES;
    }
    if (done < 0) {
        done = set_common(c);
    }
    return done < 0 ? check_args(c) : done;
}

bool cli_has(const cli *c, const char *option)
{
    for (size_t i = 0; i < c->n_given; i++) {
        if (strcmp(c->given[i], option) == 0) {
            return true;
        }
    }
    return false;
}

/* The last one given counts. */
const char *cli_value(const cli *c, const char *option)
{
    for (size_t i = c->n_given; i-- > 0;) {
        if (strcmp(c->given[i], option) == 0) {
            return c->values[i];
        }
    }
    return NULL;
}

bool cli_number(cli *c, const char *option, uint64_t min, uint64_t max, uint64_t *out)
{
    const char *given = cli_value(c, option);
    if (given == NULL) {
        return true;
    }
    char *end = NULL;
    errno = 0;
    unsigned long long v = isdigit((unsigned char)given[0]) ? strtoull(given, &end, 10) : 0;
    if (end == NULL || *end != '\0' || errno != 0 || v < min || v > max) {
        report_trouble(c, NULL, "--%s takes a whole number from %" PRIu64 " to %" PRIu64 ", not '%s'", option, min, max,
                       given);
        return false;
    }
    *out = v;
    return true;
}

/* --------------------------------------------------------------------- help */

const cli_command *cli_find_command(const char *name)
{
    for (const cli_command *m = cli_commands; m->name != NULL; m++) {
        if (strcmp(m->name, name) == 0) {
            return m;
        }
    }
    return NULL;
}

#define HELP_COLUMN 26

static void print_options(const cli_option *options, FILE *to)
{
    for (; options->name != NULL; options++) {
        char left[64], letter[8] = "    ";
        if (options->letter != 0) {
            snprintf(letter, sizeof letter, "-%c, ", options->letter);
        }
        const char *arg = options->arg;
        if (arg == NULL) {
            snprintf(left, sizeof left, "  %s--%s", letter, options->name);
        } else if (arg[0] == '[') {
            snprintf(left, sizeof left, "  %s--%s[=%s", letter, options->name, arg + 1);
        } else {
            snprintf(left, sizeof left, "  %s--%s=%s", letter, options->name, arg);
        }
        bool fits = strlen(left) < HELP_COLUMN;
        fprintf(to, "%s%*s", left, fits ? HELP_COLUMN - (int)strlen(left) : 1, "");
        if (!fits) {
            fprintf(to, "\n%*s", HELP_COLUMN, "");
        }
        text_wrap(to, options->help, HELP_COLUMN, HELP_COLUMN);
        fputc('\n', to);
    }
}

void cli_print_version(void) { printf("lastgood %s\n", lg_version()); }

/* Paragraphs are ended by empty lines; other line ends are spaces. */
static void print_paragraphs(const char *about, FILE *to)
{
    while (*about != '\0') {
        const char *end = strstr(about, "\n\n");
        size_t n = end != NULL ? (size_t)(end - about) : strlen(about);
        char *paragraph = need_format("%.*s", (int)n, about);
        for (char *p = paragraph; *p != '\0'; p++) {
            *p = *p == '\n' ? ' ' : *p;
        }
        text_wrap(to, paragraph, 0, 0);
        fputs("\n\n", to);
        free(paragraph);
        about += end != NULL ? n + 2 : n;
    }
}

void cli_print_command_help(const cli_command *m, FILE *to)
{
    fprintf(to, "usage: lastgood %s [OPTION]...%s%s\n\n", m->name, m->args[0] != '\0' ? " " : "", m->args);
    print_paragraphs(m->about, to);
    if (m->options->name != NULL) {
        fputs("options:\n", to);
        print_options(m->options, to);
        fputc('\n', to);
    }
    fputs("common options:\n", to);
    print_options(cli_common_options, to);
    fputs("\nexamples:\n", to);
    for (const char *const *e = m->example; *e != NULL; e++) {
        fprintf(to, "  %s\n", *e);
    }
}

void cli_print_help(FILE *to)
{
    fputs("usage: lastgood COMMAND [OPTION]... WHERE ...\n\n"
          "Looks at, checks, compares and keeps in order the checkpoints of training runs.\n\n"
          "commands:\n",
          to);
    for (const cli_command *m = cli_commands; m->name != NULL; m++) {
        fprintf(to, "  %-10s%s\n", m->name, m->summary);
    }
    fputs("\nWHERE is one of\n"
          "  ROOT             the folder of a run; where one checkpoint is needed, its\n"
          "                   newest good one\n"
          "  ROOT@STEP        the newest checkpoint of that step, as runs/a@500\n"
          "  ROOT@gE.S        the checkpoint of that generation, as runs/a@g3.17\n"
          "  FOLDER           a step folder, in its root or copied elsewhere\n"
          "  FILE             a single safetensors file (show, verify)\n\n"
          "common options:\n",
          to);
    print_options(cli_common_options, to);
    fputs("\nexit status:\n"
          "  0  done; good; equal\n"
          "  1  the answer is no: damaged, different, nothing found, refused\n"
          "  2  usage, no such path, permission, input or output trouble\n\n"
          "'lastgood help COMMAND' tells more, with examples.\n",
          to);
}
