/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_PROGRESS_H
#define LG_CLI_PROGRESS_H

/* A bar on standard error, drawn only when that is a terminal, at most ten
 * times a second, and gone when the work has ended. */

#include "cli.h"

void progress_begin(const cli *c, const char *what);
/* The shape of lg_verify_options.progress; always 0. */
int progress_update(uint64_t done, uint64_t total, void *arg);
/* Begins step `done` (from 0) of `total`, with its own name; the bar counts steps. */
void progress_step(const char *what, unsigned done, unsigned total);
void progress_clear(void); /* before other lines; it comes back */
void progress_end(void);

#endif
