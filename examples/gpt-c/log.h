/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_LOG_H
#define GPT_LOG_H

/* The run's log, one line a step, kept in step with the checkpoints: what was
 * logged after the one that a run goes on from is cut off, since those steps
 * are done again. On rank 0 only; a log that is NULL does nothing. */

#include "train.h"

typedef struct run_log run_log;

/* Opens (or makes) `path` and keeps the lines of steps 1 to `step`. */
run_log *log_open(const char *path, uint64_t step);
void log_step(run_log *log, const train *t);
/* Makes the lines durable, so that none is missing from below a checkpoint. */
void log_sync(run_log *log);
void log_close(run_log *log);

#endif
