/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_RETENTION_H
#define LG_CORE_RETENTION_H

#include "core/session.h"

/* What a retention rule does with each checkpoint of a walk. */
typedef enum lg__fate { LG__STAYS, LG__GOES } lg__fate;

typedef struct lg__verdict {
    lg__fate fate;
    char why[128];
} lg__verdict;

/* Judges every item of a walk whose statuses are settled (manifest and
 * whole-check): the last `keep_last` good ones (0: all), every `keep_every`-th
 * step, pinned ones and the newest good one stay. Discarded and damaged ones
 * count for nothing and go only when `keep_last` good ones are newer than what
 * discarded them (or than themselves). verdicts[i] is for w->items[i]. */
lg_status lg__retention_judge(lg_store *store, const lg__walk *w, uint32_t keep_last, uint64_t keep_every,
                              lg__verdict *verdicts, lg_error *err);

/* After a commit of this session, on the coordinator: removes what the rule
 * says. Trouble goes to the session's status, never to the trainer. */
void lg__retention_run(lg_session *s, lg_generation committed);

#endif
