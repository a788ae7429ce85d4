/* SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"

#include "base/json.h"

void fuzz_refused(lg_status status, const lg_error *err)
{
    size_t n = strlen(err->message);
    FUZZ_CHECK(status != LG_OK && err->status == status, "returned %s, err has %s: %s", lg_status_name(status),
               lg_status_name(err->status), err->message);
    FUZZ_CHECK(status != LG_ERR_INTERNAL && status != LG_ERR_NOMEM, "%s: %s", lg_status_name(status), err->message);
    FUZZ_CHECK(n > 0, "%s without a word", lg_status_name(status));
    FUZZ_CHECK(lg__utf8_valid(err->message, n), "no UTF-8: %s", err->message);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)err->message[i];
        FUZZ_CHECK(c >= 0x20 && c != 0x7F, "control byte 0x%02x in: %s", c, err->message);
    }
}
