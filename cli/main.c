/* SPDX-License-Identifier: Apache-2.0 */
#include "nearest.h"
#include "report.h"

#include <errno.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>

/* Names that other programs use for the same thing. */
static const char *const other_names[][2] = {
    {"list", "ls"},         {"dir", "ls"},         {"log", "ls"},        {"info", "show"},    {"inspect", "show"},
    {"cat", "get"},         {"extract", "get"},    {"dump", "get"},      {"export", "get"},   {"check", "verify"},
    {"fsck", "verify"},     {"scrub", "verify"},   {"cmp", "diff"},      {"compare", "diff"}, {"remove", "rm"},
    {"delete", "rm"},       {"del", "rm"},         {"gc", "sweep"},      {"clean", "sweep"},  {"cleanup", "sweep"},
    {"revert", "rollback"}, {"reset", "rollback"}, {"undo", "rollback"}, {"unpin", "pin"},    {"keep", "pin"},
    {"benchmark", "bench"}, {"speed", "bench"},    {"perf", "bench"},
};

static int unknown_command(cli *c, const char *name)
{
    const char *meant = NULL;
    for (size_t i = 0; i < sizeof other_names / sizeof *other_names && meant == NULL; i++) {
        meant = strcmp(other_names[i][0], name) == 0 ? other_names[i][1] : NULL;
    }
    nearest near;
    nearest_begin(&near, name);
    for (const cli_command *m = cli_commands; m->name != NULL; m++) {
        nearest_offer(&near, m->name);
    }
    meant = meant == NULL && near.n > 0 ? near.name[0] : meant;
    char *hint = meant != NULL ? need_format("is '%s' meant? 'lastgood help' lists the commands", meant)
                               : need_strdup("'lastgood help' lists the commands");
    int exit_status = report_trouble(c, hint, "there is no command '%s'", name);
    free(hint);
    return exit_status;
}

int cmd_help(cli *c)
{
    json_decref(c->document); /* help is text */
    c->document = NULL;
    if (c->n_args == 0) {
        cli_print_help(stdout);
        return CLI_YES;
    }
    const cli_command *m = cli_find_command(c->args[0]);
    if (m == NULL) {
        c->command = NULL;
        return unknown_command(c, c->args[0]);
    }
    cli_print_command_help(m, stdout);
    return CLI_YES;
}

/* What could not be written must not look like success. */
static int flush(int exit_status)
{
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "lastgood: standard output: %s\n", strerror(errno));
        return CLI_TROUBLE;
    }
    return exit_status;
}

int main(int argc, char **argv)
{
    setlocale(LC_ALL, "C");
    cli c = {0};
    if (argc < 2) {
        cli_print_help(stderr);
        return CLI_TROUBLE;
    }
    const char *first = argv[1];
    if (strcmp(first, "--help") == 0 || strcmp(first, "-h") == 0) {
        cli_print_help(stdout);
        return flush(CLI_YES);
    }
    if (strcmp(first, "--version") == 0 || strcmp(first, "-V") == 0) {
        cli_print_version();
        return flush(CLI_YES);
    }
    if (first[0] == '-') {
        return report_trouble(&c, "the command comes first: lastgood COMMAND [OPTION]... WHERE", "unknown option %s",
                              first);
    }
    c.command = cli_find_command(first);
    if (c.command == NULL) {
        return unknown_command(&c, first);
    }
    int exit_status = cli_parse(&c, argc - 1, argv + 1);
    if (exit_status < 0) {
        exit_status = c.command->run(&c);
    }
    report_finish(&c);
    return flush(exit_status);
}
