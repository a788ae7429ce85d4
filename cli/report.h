/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CLI_REPORT_H
#define LG_CLI_REPORT_H

/* Errors, hints and notes on standard error, and the JSON document. */

#include "text.h"

/* "lastgood: verify: …", and "  hint: …" when hint is not NULL; with --json the
 * document gets them too. Returns CLI_TROUBLE. */
int report_trouble(cli *c, const char *hint, const char *format, ...) LG_PRINTF(3, 4);
/* The same with a status for the document; report_trouble is LG_ERR_INVALID.
 * Returns report_exit(status). */
int report_as(cli *c, lg_status status, const char *hint, const char *format, ...) LG_PRINTF(4, 5);
/* The same for an error of the library; returns CLI_NO for damage, refusals
 * and empty roots, CLI_TROUBLE for all else. hint NULL: one by status;
 * "": none. */
int report_error(cli *c, const lg_error *err, const char *hint);
/* The exit status that belongs to a status. */
int report_exit(lg_status status);
/* "lastgood: verify: …" without being an error. */
void report_note(cli *c, const char *format, ...) LG_PRINTF(2, 3);

/* ---- JSON. Integers beyond 2^53 are decimal strings, since many readers
 * round them; text that is no UTF-8 is escaped as for a terminal. */
json_t *json_u64(uint64_t v);
json_t *json_text(const char *s);
json_t *json_generation(lg_generation g); /* [epoch, serial] */
json_t *json_shape(uint32_t ndim, const uint64_t *shape);
json_t *json_double(double v);                                 /* "inf", "-inf", "nan" as strings */
void json_put(json_t *object, const char *key, json_t *value); /* steals value */
void json_push(json_t *array, json_t *value);                  /* steals value */
/* Prints the document if there is one. */
void report_finish(cli *c);

#endif
