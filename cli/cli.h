/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_CLI_H
#define LG_CLI_CLI_H

/* The command line program `lastgood`. It uses the public header only.
 *
 *   main.c       finds the command
 *   options.c    reads its options (getopt_long), prints its help
 *   commands.c   what commands and options there are, and their texts
 *   cmd_….c      the commands
 *   place.c      what WHERE means: a root, a step folder, ROOT@STEP, a file
 *   report.c     errors, hints, notes, the JSON document
 *   text.c       sizes, escaping, colours; table.c: aligned columns
 *   nearest.c    what may have been meant
 *   bench_….c    what `lastgood bench` is made of; bench_rows.h begins
 *   slice.c, chunk.c, value.c, npy.c    parts of tensors, and their values
 *
 * Results go to standard output, all else to standard error. With --json
 * standard output is exactly one JSON document. */

#include <lastgood/lastgood.h>

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

/* Exit statuses. Each one is explained in docs/cli.md, which a test checks. */
enum {
    CLI_YES = 0,    /* done; good; equal */
    CLI_NO = 1,     /* the answer is no: damaged, different, nothing found, refused */
    CLI_TROUBLE = 2 /* usage, no such path, permission, input/output */
};

/* One option of a command. `arg` NULL: takes none; "[X]": may take one, attached
 * ("-tX", "--tensors=X"); else it needs one. `letter` 0: only the long form. */
typedef struct cli_option {
    char letter;
    const char *name;
    const char *arg;
    const char *help;
} cli_option;

typedef struct cli cli;

typedef struct cli_command {
    const char *name;
    const char *args;           /* after the options, for the usage line */
    int min_args, max_args;     /* max -1: any number */
    const char *summary;        /* one line */
    const char *about;          /* paragraphs */
    const cli_option *options;  /* ended by a NULL name */
    const char *const *example; /* ended by NULL */
    int (*run)(cli *c);
} cli_command;

extern const cli_command cli_commands[]; /* ended by a NULL name */
extern const cli_option cli_common_options[];

#define CLI_MAX_OPTIONS 32

struct cli {
    const cli_command *command; /* NULL before it is known */
    /* options as given, by name */
    const char *given[CLI_MAX_OPTIONS];
    const char *values[CLI_MAX_OPTIONS];
    size_t n_given;
    char **args;
    int n_args;
    bool json, bytes, color, quiet;
    json_t *document; /* what --json prints at the end; an object */
};

/* ---- options.c */

/* Reads options and arguments of c->command. -1: go on; else the exit status. */
int cli_parse(cli *c, int argc, char **argv);
bool cli_has(const cli *c, const char *option);
const char *cli_value(const cli *c, const char *option); /* NULL if not given or without value */
/* A whole number. false after an error message. Leaves *out when not given. */
bool cli_number(cli *c, const char *option, uint64_t min, uint64_t max, uint64_t *out);
void cli_print_help(FILE *to);
void cli_print_version(void);
void cli_print_command_help(const cli_command *command, FILE *to);
const cli_command *cli_find_command(const char *name);

/* ---- the commands; each returns the exit status */
int cmd_ls(cli *c);
int cmd_show(cli *c);
int cmd_verify(cli *c);
int cmd_rollback(cli *c);
int cmd_pin(cli *c);
int cmd_rm(cli *c);
int cmd_prune(cli *c);
int cmd_sweep(cli *c);
int cmd_get(cli *c);
int cmd_diff(cli *c);
int cmd_bench(cli *c);
int cmd_help(cli *c);

#endif
