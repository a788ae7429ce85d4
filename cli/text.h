/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_TEXT_H
#define LG_CLI_TEXT_H

/* Text for people: sizes, shapes, escaping, colours; and memory that is there
 * or ends the program. */

#include "cli.h"

void *need(void *memory); /* exits with CLI_TROUBLE when out of memory */
void *need_calloc(size_t n, size_t size);
char *need_strdup(const char *s);
char *need_format(const char *format, ...) LG_PRINTF(1, 2);
/* Makes room for one more element; *cap grows by half. */
void need_room(void **array, size_t *cap, size_t n, size_t size);

/* Text that grows. Begin with {0}; data is NULL while it is empty. */
typedef struct text {
    char *data;
    size_t len, cap;
} text;
void text_add(text *t, const char *format, ...) LG_PRINTF(2, 3);
void text_free(text *t);
const char *text_str(const text *t); /* never NULL */

/* Copies `s` so that no control byte, no broken UTF-8 and no character that
 * turns the direction of text reaches a terminal: they become \xNN, byte by
 * byte. Free with free(). */
char *text_escape(const char *s);
void text_put(FILE *to, const char *s); /* escaped */

/* "1.5 GiB"; with --bytes "1.5 GiB (1610612736)". */
#define SIZE_TEXT 48
const char *size_text(const cli *c, uint64_t bytes, char out[SIZE_TEXT]);
/* "[2, 3]"; free() it. */
char *shape_text(uint32_t ndim, const uint64_t *shape);
/* "1 file", "3 files" */
#define COUNT_TEXT 64
const char *count_text(uint64_t n, const char *one, const char *many, char out[COUNT_TEXT]);
#define GENERATION_TEXT 48
const char *generation_text(lg_generation g, char out[GENERATION_TEXT]); /* "g3.17", as behind an @ */
/* "2026-11-29 18:31:57" from the manifest's form; "" stays "-". */
const char *created_text(const char *created, char out[32]);

typedef enum text_style { STYLE_PLAIN, STYLE_BOLD, STYLE_DIM, STYLE_GOOD, STYLE_BAD, STYLE_NOTE } text_style;
const char *style_begin(const cli *c, text_style s);
const char *style_end(const cli *c, text_style s);

/* How many columns a UTF-8 text takes: one for each character. */
size_t text_columns(const char *s);

/* Prints `s` escaped, its words in lines of at most TEXT_COLUMNS columns (a word
 * may be longer). Further lines begin with `indent` spaces; `at` is the column
 * where the first one stands already. No newline at the end. */
#define TEXT_COLUMNS 80
void text_wrap(FILE *to, const char *s, unsigned indent, unsigned at);

#endif
