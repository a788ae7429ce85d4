/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_NPY_H
#define LG_CLI_NPY_H

/* Writing NumPy's .npy format, version 1.0, into a file that appears under its
 * name only when it is complete. */

#include "report.h"

typedef struct npy npy;

/* path "-": standard output. -1, or the exit status after a message; a file
 * that exists is refused unless `force`. */
int npy_begin(cli *c, const char *path, bool force, const char *descr, uint32_t ndim, const uint64_t *shape, npy **out);
int npy_write(npy *f, const void *data, size_t bytes);
int npy_end(npy *f);   /* syncs and renames; frees whatever the result */
void npy_drop(npy *f); /* removes what was written, and frees */

#endif
