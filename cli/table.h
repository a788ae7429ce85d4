/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_TABLE_H
#define LG_CLI_TABLE_H

/* Rows of aligned columns. What goes into cells and notes is escaped, so that
 * names out of files may be given as they are. */

#include "text.h"

typedef struct table table;

/* `heads`: n titles; one that begins with ">" is aligned to the right, and
 * the ">" is not shown. heads[0] == NULL: no title line. */
table *table_new(const cli *c, size_t n, const char *const *heads);
/* The next cell; a row ends after n cells. */
void table_cell(table *t, text_style style, const char *format, ...) LG_PRINTF(3, 4);
/* A line under the row that was ended last. */
void table_note(table *t, text_style style, const char *format, ...) LG_PRINTF(3, 4);
size_t table_rows(const table *t);
/* Prints with `indent` spaces before each line, nothing without rows; frees. */
void table_print(table *t, unsigned indent);
void table_free(table *t);

#endif
