/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_BASE_ERROR_H
#define LG_BASE_ERROR_H

/* Errors inside the library. `err` is never NULL here: public functions put
 * one in its place with LG__ERR. A message leads from the outside in; callers
 * that know more wrap it (lg_error_wrap) on the way out. */

#include <lastgood/backend.h>

/* First line of a public function: a place for the error when the caller gave
 * none. */
#define LG__ERR(err)         \
    lg_error lg__err_local_; \
    (err) = lg__error_begin((err), &lg__err_local_)

lg_error *lg__error_begin(lg_error *err, lg_error *local); /* also clears it */

/* Returns from the function when `expr` is no success. */
#define LG__TRY(expr)               \
    do {                            \
        lg_status lg__st_ = (expr); \
        if (lg__st_ != LG_OK) {     \
            return lg__st_;         \
        }                           \
    } while (0)

#define LG__RETURN_IF(cond, err, status, ...)                  \
    do {                                                       \
        if (cond) {                                            \
            return lg_error_set((err), (status), __VA_ARGS__); \
        }                                                      \
    } while (0)

/* Copies text into a message buffer with control bytes, and bytes that are no
 * UTF-8, shown as \xNN, cut at a character's edge with "…" when too long. For
 * names out of files. out_bytes is 4 or more. */
const char *lg__printable(const char *s, char *out, size_t out_bytes);

/* Copies text into a fixed field, cut at a character's edge if it is too long. */
void lg__text_copy(char *out, size_t out_bytes, const char *text);

/* Error texts travel between ranks as plain bytes. */
typedef struct lg__wire_error {
    uint32_t status;
    int32_t os_errno;
    int32_t rank;
    char message[LG_ERROR_MESSAGE_MAX];
} lg__wire_error;

#endif
