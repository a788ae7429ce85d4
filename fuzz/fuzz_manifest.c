/* SPDX-License-Identifier: Apache-2.0 */

/* lastgood.json. The text is tried as it is and with the seal that belongs to
 * it, so that inputs are found behind the checksum. What is accepted says the
 * same when it is written and read again. */

#include "base/error.h"
#include "format/manifest.h"
#include "fuzz.h"

#define PREFIX_BYTES 21 /* {"crc32c":"xxxxxxxx", */

static void again(lg__manifest *m)
{
    lg_error err = LG_ERROR_INIT;
    lg__buf one, two;
    lg__buf_init(&one, LG__MANIFEST_MAX);
    lg__buf_init(&two, LG__MANIFEST_MAX);
    lg_status st = lg__manifest_check(m, &err);
    FUZZ_CHECK(m->tombstone || st == LG_OK, "decoded, but: %s", err.message);
    st = lg__manifest_encode(m, &one, &err);
    FUZZ_CHECK(st == LG_OK, "decoded, but not written: %s", err.message);
    lg__manifest *second = NULL;
    st = lg__manifest_decode(one.data, one.len, &second, &err);
    FUZZ_CHECK(st == LG_OK, "what was written is refused: %s", err.message);
    st = lg__manifest_encode(second, &two, &err);
    FUZZ_CHECK(st == LG_OK && one.len == two.len && memcmp(one.data, two.data, one.len) == 0,
               "written twice, it differs");
    FUZZ_CHECK(memcmp(m->sha256, second->sha256, sizeof m->sha256) == 0, "another digest");
    for (size_t i = 0; i < m->n_tensors; i++) {
        FUZZ_CHECK(lg__manifest_find(m, m->tensors[i].name) == &m->tensors[i], "%s is not found", m->tensors[i].name);
    }
    lg__manifest_free(second);
    lg__buf_free(&one);
    lg__buf_free(&two);
}

static void decode(const char *text, size_t bytes)
{
    lg_error err = LG_ERROR_INIT;
    lg__manifest *m = NULL;
    lg_status st = lg__manifest_decode(text, bytes, &m, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        FUZZ_CHECK(m == NULL, "an output in spite of: %s", err.message);
        return;
    }
    again(m);
    lg__manifest_free(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    decode((const char *)data, bytes);
    if (bytes <= PREFIX_BYTES) {
        return 0;
    }
    /* The seal ends in a newline of its own. */
    size_t end = bytes - (data[bytes - 1] == '\n');
    lg_error err = LG_ERROR_INIT;
    lg__buf sealed;
    lg__buf_init(&sealed, LG__MANIFEST_MAX);
    if (end > PREFIX_BYTES && data[end - 1] == '}' &&
        lg__sealed_json((const char *)data + PREFIX_BYTES, end - PREFIX_BYTES, &sealed, &err) == LG_OK) {
        decode(sealed.data, sealed.len);
    }
    lg__buf_free(&sealed);
    return 0;
}
