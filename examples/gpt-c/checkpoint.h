/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_CHECKPOINT_H
#define GPT_CHECKPOINT_H

/* All that the trainer has to do with lastgood. Every function is collective;
 * any error ends the job with its message. */

#include "train.h"

typedef struct checkpoint checkpoint;

checkpoint *checkpoint_open(train *t);

/* Brings the run to where its last good checkpoint was; false if the root
 * never held one. Says on stderr what was loaded, what was passed over and
 * why. */
bool checkpoint_resume(checkpoint *c);

/* Saves the run as it is, unless its newest checkpoint is of this step. With
 * --async it is only launched: the state is copied and written while the run
 * goes on; `last` waits for it all the same. */
void checkpoint_save(checkpoint *c, bool last);

/* Says on stderr when a save in the background has become durable. Not
 * collective, does not wait. */
void checkpoint_report(checkpoint *c);

void checkpoint_close(checkpoint *c);

#endif
