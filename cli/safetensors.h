/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_SAFETENSORS_H
#define LG_CLI_SAFETENSORS_H

/* show and verify for a single safetensors file, of any writer. */

#include "place.h"

int safetensors_show(cli *c, const place *p);
int safetensors_verify(cli *c, const place *p);

/* Opens a file; -1, or the exit status after a message: CLI_NO for a file that
 * is no valid one. */
int safetensors_open(cli *c, const char *path, lg_safetensors **out);

#endif
