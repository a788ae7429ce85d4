/* SPDX-License-Identifier: Apache-2.0 */
#include "cli.h"

/* All commands and options, once: the parser, the help and, through a test,
 * docs/cli.md follow from these tables. */

#define END                 \
    {                       \
        0, NULL, NULL, NULL \
    }

const cli_option cli_common_options[] = {
    {'b', "bytes", NULL, "exact numbers of bytes beside the rounded ones"},
    {0, "json", NULL, "one JSON document on standard output"},
    {0, "color", "WHEN", "always, never or auto (a terminal, and NO_COLOR is not set)"},
    {'h', "help", NULL, "this text"},
    {0, "version", NULL, "the version of lastgood"},
    END};

static const cli_option ls_options[] = {
    {'a', "all", NULL, "also what is being written or removed, owners and foreign names"}, END};
static const char *const ls_examples[] = {"lastgood ls runs/a", "lastgood ls -a --bytes runs/a", NULL};

static const cli_option show_options[] = {
    {'t', "tensors", "[PATTERN]", "the tensors, or those whose names match (*, ?, [...]): -tPATTERN"},
    {'l', "layouts", NULL, "how tensors are cut over ranks"},
    {'f', "files", NULL, "every file, with its size and rank"},
    {'s', "state", "[KEY]", "global state with its values, and the keys of per-rank state; with KEY only that value"},
    {'a', "all", NULL, "long values and lists in full"},
    END};
static const char *const show_examples[] = {"lastgood show runs/a", "lastgood show runs/a@500 --tensors='layers.0.*'",
                                            "lastgood show runs/a@500 layers.0.mlp.weight",
                                            "lastgood show model.safetensors", NULL};

static const cli_option verify_options[] = {
    {'n', "newest", NULL, "of a root only the checkpoint that a run would resume from first"},
    {'j', "threads", "N", "how many threads read (default: one a core, at most 16)"},
    {'q', "quiet", NULL, "print nothing but errors; the exit status tells"},
    END};
static const char *const verify_examples[] = {"lastgood verify runs/a@500", "lastgood verify runs/a",
                                              "lastgood verify --quiet model.safetensors && echo good", NULL};

static const cli_option rollback_options[] = {{'r', "reason", "TEXT", "kept in the record and shown by ls"},
                                              {0, "no-verify", NULL, "do not read and check the bytes of WHERE before"},
                                              END};
static const char *const rollback_examples[] = {"lastgood rollback runs/a@400 --reason='loss spiked at 430'", NULL};

static const cli_option pin_options[] = {
    {'u', "unpin", NULL, "take the pin away"}, {'r', "reason", "TEXT", "kept with the pin and shown by ls"}, END};
static const char *const pin_examples[] = {"lastgood pin runs/a@500 --reason='used in the report'",
                                           "lastgood pin --unpin runs/a@500", NULL};

static const cli_option rm_options[] = {{0, "last", NULL, "even the last one that may be good"},
                                        {'y', "yes", NULL, "remove it; without this option it is only shown"},
                                        END};
static const char *const rm_examples[] = {"lastgood rm runs/a@500", "lastgood rm --yes runs/a@500", NULL};

static const cli_option prune_options[] = {
    {'k', "keep-last", "N", "how many of the newest good ones stay; needed, at least 1"},
    {'e', "keep-every", "K", "those whose step is a multiple of K stay too"},
    {'y', "yes", NULL, "remove them; without this option they are only shown"},
    END};
static const char *const prune_examples[] = {"lastgood prune runs/a --keep-last=3",
                                             "lastgood prune runs/a --keep-last=3 --keep-every=1000 --yes", NULL};

static const cli_option sweep_options[] = {{'y', "yes", NULL, "remove it; without this option it is only shown"}, END};
static const char *const sweep_examples[] = {"lastgood sweep runs/a", "lastgood sweep --yes runs/a", NULL};

static const cli_option get_options[] = {{'o', "output", "FILE", "write a NumPy file (.npy); - is standard output"},
                                         {0, "force", NULL, "replace FILE when it exists"},
                                         {0, "rank", "R", "of a tensor kept per rank, the copy of rank R"},
                                         {'a', "all", NULL, "print all values, not a summary"},
                                         END};
static const char *const get_examples[] = {"lastgood get runs/a@500 head.weight",
                                           "lastgood get runs/a@500 head.weight 0:10,3 -o row.npy",
                                           "lastgood get runs/a@500 embed.weight -1", NULL};

static const cli_option diff_options[] = {
    {'t', "tensors", "[PATTERN]", "only the tensors, or only those whose names match (*, ?, [...]): -tPATTERN"},
    {0, "tolerance", "X", "floating-point elements at most X apart count as equal"},
    {'a', "all", NULL, "list the equal tensors too"},
    {'q', "quiet", NULL, "print nothing but errors; the exit status tells"},
    END};
static const char *const diff_examples[] = {"lastgood diff runs/a@500 runs/b@500",
                                            "lastgood diff --tensors='layers.*' runs/a@400 runs/a@500", NULL};

static const cli_option bench_options[] = {
    {'s', "size", "SIZE", "of the state, as 512MiB or 2GiB (default: 2 GiB, less where memory or space is short)"},
    {'t', "tensors", "N", "how many tensors the state has (default: 257)"},
    {'r', "rounds", "N", "rounds that count (default: 7; below 6 nothing is resolved)"},
    {'n', "ranks", "N", "save and load by N ranks, which are threads (default: 1)"},
    {0, "buffer", "SIZE", "memory that a save uses for transfers (default: the library's, 64 MiB)"},
    {'q', "quick", NULL, "256 MiB and 6 rounds, unless --size or --rounds say otherwise"},
    {0, "json", "[FILE]", "with =FILE: write the JSON document there, and print the table all the same"},
    {0, "svg", "FILE", "draw a picture"},
    END};
static const char *const bench_examples[] = {"lastgood bench --quick",
                                             "lastgood bench /mnt/nvme --json=nvme.json --svg nvme.svg",
                                             "LASTGOOD_IO=threads lastgood bench --size=8GiB --ranks=4 runs/a", NULL};

static const cli_option no_options[] = {END};
static const char *const help_examples[] = {"lastgood help verify", NULL};

const cli_command cli_commands[] = {
    {"ls", "[WHERE]", 0, 1, "list the checkpoints of a root",
     "Lists what a root holds, newest first: checkpoints with their state (newest, pinned,\n"
     "damaged, discarded by a rollback, and why), and the rollbacks. Sizes and manifests are\n"
     "checked, contents are not: that is what 'verify' does. WHERE is the current folder by\n"
     "default; ROOT@STEP or a step folder lists only those checkpoints.\n\n"
     "Exit status 1 when no checkpoint is whole.",
     ls_options, ls_examples, cmd_ls},
    {"show", "WHERE [NAME]", 1, 2, "show what a checkpoint or a safetensors file holds",
     "Without options a summary: step, generation, run, parent, sizes, tensors, state. With\n"
     "options those parts. With NAME one tensor: its boxes and the ranks that hold them; a NAME\n"
     "with *, ? or [ lists the tensors that match.\n\n"
     "Exit status 1 when the checkpoint is damaged as far as its manifest and the sizes of its\n"
     "files tell, or when nothing matches.",
     show_options, show_examples, cmd_show},
    {"verify", "WHERE", 1, 1, "read and check every byte",
     "Reads all files, in parallel, and checks manifest, sizes, reports, headers and every\n"
     "block against its checksum. Each problem is printed with its file, tensor and range of\n"
     "bytes. Of a root every checkpoint is verified. Of a single safetensors file the form is\n"
     "checked; such a file has no checksums.\n\n"
     "Exit status 0 when all is good, 1 when something is damaged, 2 when it could not be told\n"
     "(no such path, permission, a newer version).",
     verify_options, verify_examples, cmd_verify},
    {"rollback", "WHERE", 1, 1, "make the run go on from an older checkpoint",
     "Records that the run goes back to WHERE, which must name one checkpoint and is verified\n"
     "first. Newer checkpoints are discarded: they stay on disk but are no longer resumed from.\n"
     "A session that still runs fails its next save, so that it cannot bring them back. A\n"
     "rollback to one of the discarded checkpoints undoes it.\n\n"
     "The rollback itself deletes nothing. But when the run has gone on, its retention removes\n"
     "discarded checkpoints once keep_last good ones are newer: pin those that you may want\n"
     "back.",
     rollback_options, rollback_examples, cmd_rollback},
    {"pin", "WHERE", 1, 1, "protect a checkpoint from removal",
     "A pinned checkpoint is kept by retention, prune and rm until it is unpinned. Pinned again\n"
     "without --reason it keeps the reason it has.",
     pin_options, pin_examples, cmd_pin},
    {"rm", "WHERE", 1, 1, "remove one checkpoint",
     "Removes the checkpoint WHERE, which must name one. Refused, with exit status 1, when it is\n"
     "pinned, or when no other checkpoint of the root can be verified in full: without --yes\n"
     "the answer is the same. --last is for one whose contents are known to be wrong.",
     rm_options, rm_examples, cmd_rm},
    {"prune", "ROOT", 1, 1, "remove old checkpoints by a rule",
     "Keeps the last N good checkpoints, those of every K-th step, and pinned ones; damaged\n"
     "and discarded ones do not count and go once N good ones are newer. Before anything is\n"
     "removed or shown the newest one that stays is verified in full. A session that runs goes\n"
     "on.\n\n"
     "Exit status 1 when nothing may be removed: no checkpoint can be verified, or a newer\n"
     "version of lastgood wrote one.",
     prune_options, prune_examples, cmd_prune},
    {"sweep", "ROOT", 1, 1, "remove what crashes left behind",
     "Removes folders of attempts that were never committed and what was being removed when a\n"
     "process died. Checkpoints are not touched. Each session that opens a root for writing\n"
     "becomes its owner; attempts of the last owner stay, since it may still run, and are\n"
     "listed: the next session that opens the root removes them.",
     sweep_options, sweep_examples, cmd_sweep},
    {"get", "WHERE NAME [SLICE]", 2, 3, "print a tensor or write it to a .npy file",
     "Prints the tensor NAME, or a part of it, or writes it to a NumPy file. Only the blocks\n"
     "that are needed are read, and each is checked. SLICE is as in NumPy, without steps:\n"
     "'0:10,3,:', '-1', '...,0'; a number drops its dimension.\n\n"
     "dtypes that NumPy lacks are written as whole numbers of the same bits: BF16 as <u2, F8 as\n"
     "|u1, F4 and F6 as their packed bytes.",
     get_options, get_examples, cmd_get},
    {"diff", "A B", 2, 2, "compare two checkpoints",
     "Compares tensors (F64, F32, F16, BF16 and C64 element by element, others bit by bit),\n"
     "global state, per-rank state and attached files, whatever the sharding. Tensors are equal\n"
     "when all their bits are. Memory stays bounded.\n\n"
     "Exit status 0 when they are equal, 1 when they differ, 2 when that could not be told.",
     diff_options, diff_examples, cmd_diff},
    {"bench", "[PATH]", 0, 1, "measure saving and loading on this machine",
     "Saves and loads a state in a folder of its own under PATH (the current folder by\n"
     "default), and in the same minutes does with the device and with memory what limits\n"
     "them: plain direct writes and reads, memcpy. Every figure is a median; every ratio is of\n"
     "figures of one round, with its 95 % interval.\n\n"
     "Checkpoints in PATH are not touched. What it writes, at most a little more than twice the\n"
     "size at a time, is removed at the end, also when it is interrupted. It needs about three\n"
     "times the size of memory, and refuses to begin where that or the space is not there.\n\n"
     "LASTGOOD_IO and LASTGOOD_DIRECT choose the engine as for any program.",
     bench_options, bench_examples, cmd_bench},
    {"help", "[COMMAND]", 0, 1, "explain a command", "Prints what 'lastgood COMMAND --help' prints.", no_options,
     help_examples, cmd_help},
    {NULL, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL},
};
