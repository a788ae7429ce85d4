/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_TEMP_DIR_H
#define LG_TESTS_TEMP_DIR_H

#include <stddef.h>

/* Makes a folder under $TMPDIR (or /tmp), readable by all; aborts if it cannot. */
void temp_dir_make(char out[256]);
/* Removes it with everything in it; follows no link. */
void temp_dir_remove(const char *path);

/* How many descriptors this process has open. */
size_t open_descriptors(void);

#endif
