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
/* For the end of a test: 0 if it is as many as `before`, else -1 and a line
 * that says so. */
int descriptors_left(size_t before);

/* How many names a folder holds; fails the test if it cannot be read. */
size_t count_names(const char *path);
/* Makes a socket where a name is free, however long the path is. */
void make_socket(const char *path);

#endif
