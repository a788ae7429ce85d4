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

/* Saves the run as it is, unless its newest checkpoint is of this step. */
void checkpoint_save(checkpoint *c);

void checkpoint_close(checkpoint *c);

#endif
