/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_GET_TEXT_H
#define LG_CLI_GET_TEXT_H

/* Values of a tensor or slice as text, in nested brackets as NumPy prints
 * them, or as nested JSON arrays. */

#include "slice.h"

/* More elements than this are summarised unless --all is given. */
#define VALUES_SHOWN 1000

/* One tensor or slice that is to be shown. */
typedef struct subject {
    lg_checkpoint *k;
    const lg_tensor_info *t;
    const slice *s;
    uint32_t copy_of; /* UINT32_MAX: the first rank's */
} subject;

/* Both: -1, or the exit status after a message. */
int values_print(cli *c, const subject *what, bool all);
/* *out NULL: too many elements for a document without --all. */
int values_json(cli *c, const subject *what, bool all, json_t **out);

#endif
