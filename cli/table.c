/* SPDX-License-Identifier: Apache-2.0 */
#include "table.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

typedef struct cell {
    char *text;
    text_style style;
    size_t columns;
} cell_text;

typedef struct note {
    size_t row; /* it stands under this one */
    cell_text cell;
} note;

struct table {
    const cli *c;
    size_t n;
    const char *const *heads;
    cell_text *cells;
    size_t used, cap;
    note *notes;
    size_t n_notes, cap_notes;
};

table *table_new(const cli *c, size_t n, const char *const *heads)
{
    table *t = need_calloc(1, sizeof *t);
    t->c = c;
    t->n = n;
    t->heads = heads;
    return t;
}

static cell_text make(text_style style, const char *format, va_list args)
{
    char *raw = NULL;
    if (vasprintf(&raw, format, args) < 0) {
        raw = NULL;
    }
    cell_text made = {.text = text_escape(need(raw)), .style = style};
    made.columns = text_columns(made.text);
    free(raw);
    return made;
}

void table_cell(table *t, text_style style, const char *format, ...)
{
    need_room((void **)&t->cells, &t->cap, t->used, sizeof *t->cells);
    va_list args;
    va_start(args, format);
    t->cells[t->used++] = make(style, format, args);
    va_end(args);
}

void table_note(table *t, text_style style, const char *format, ...)
{
    need_room((void **)&t->notes, &t->cap_notes, t->n_notes, sizeof *t->notes);
    va_list args;
    va_start(args, format);
    t->notes[t->n_notes++] = (note){.row = t->used / t->n, .cell = make(style, format, args)};
    va_end(args);
}

size_t table_rows(const table *t) { return t->used / t->n; }

static bool to_the_right(const table *t, size_t i) { return t->heads[0] != NULL && t->heads[i][0] == '>'; }

static const char *title(const table *t, size_t i) { return t->heads[i] + (t->heads[i][0] == '>' ? 1 : 0); }

static void print_cell(const table *t, size_t i, const cell_text *cell, size_t width, bool last)
{
    size_t gap = width - cell->columns;
    if (i > 0) {
        fputs("  ", stdout);
    }
    if (to_the_right(t, i)) {
        printf("%*s", (int)gap, "");
    }
    printf("%s%s%s", style_begin(t->c, cell->style), cell->text, style_end(t->c, cell->style));
    if (!to_the_right(t, i) && !last) {
        printf("%*s", (int)gap, "");
    }
}

/* The last column of a row that has text: nothing is padded behind it. */
static size_t last_used(const table *t, const cell_text *row)
{
    size_t last = t->n - 1;
    while (last > 0 && row[last].columns == 0) {
        last--;
    }
    return last;
}

static void print_row(const table *t, const cell_text *row, const size_t *width, unsigned indent)
{
    printf("%*s", (int)indent, "");
    size_t last = last_used(t, row);
    for (size_t i = 0; i <= last; i++) {
        print_cell(t, i, &row[i], width[i], i == last);
    }
    putchar('\n');
}

void table_free(table *t)
{
    for (size_t i = 0; i < t->used; i++) {
        free(t->cells[i].text);
    }
    for (size_t i = 0; i < t->n_notes; i++) {
        free(t->notes[i].cell.text);
    }
    free(t->cells);
    free(t->notes);
    free(t);
}

void table_print(table *t, unsigned indent)
{
    size_t rows = table_rows(t), n = 0;
    size_t *width = need_calloc(t->n, sizeof *width);
    cell_text *head = need_calloc(t->n, sizeof *head);
    for (size_t i = 0; i < t->n; i++) {
        if (t->heads[0] != NULL) {
            head[i] =
                (cell_text){.text = (char *)title(t, i), .style = STYLE_BOLD, .columns = text_columns(title(t, i))};
            width[i] = head[i].columns;
        }
        for (size_t r = 0; r < rows; r++) {
            const cell_text *cell = &t->cells[r * t->n + i];
            width[i] = cell->columns > width[i] ? cell->columns : width[i];
        }
    }
    if (t->heads[0] != NULL && rows > 0) {
        print_row(t, head, width, indent);
    }
    for (size_t r = 0; r < rows; r++) {
        print_row(t, &t->cells[r * t->n], width, indent);
        for (; n < t->n_notes && t->notes[n].row == r + 1; n++) {
            const cell_text *cell = &t->notes[n].cell;
            printf("%*s%s", (int)indent + 6, "", style_begin(t->c, cell->style));
            text_wrap(stdout, cell->text, indent + 6, indent + 6);
            printf("%s\n", style_end(t->c, cell->style));
        }
    }
    free(head);
    free(width);
    table_free(t);
}
