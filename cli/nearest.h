/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_NEAREST_H
#define LG_CLI_NEAREST_H

/* What may have been meant by a name that does not exist. */

#include "text.h"

/* Keeps the best few of the names it is offered. Names stay the caller's. */
#define NEAREST_MAX 3
typedef struct nearest {
    const char *wanted;
    const char *name[NEAREST_MAX];
    size_t distance[NEAREST_MAX];
    size_t n;
} nearest;

void nearest_begin(nearest *s, const char *wanted);
void nearest_offer(nearest *s, const char *name);
/* "'a', 'b' or 'c'"; NULL when nothing is near. free() it. */
char *nearest_text(const nearest *s);

#endif
