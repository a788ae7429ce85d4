/* SPDX-License-Identifier: Apache-2.0 */

/* The small sealed files: pins, rollback records, and the owner file, of which
 * only two texts are ever used. With and without the seal that belongs to them. */

#include "base/error.h"
#include "core/owner.h"
#include "format/member.h"
#include "format/record.h"
#include "fuzz.h"
#include "store/store.h"

#define PREFIX_BYTES 21 /* {"crc32c":"xxxxxxxx", */

static void pin(const char *text, size_t bytes)
{
    lg_error err = LG_ERROR_INIT;
    lg__pin_record r, second;
    lg_status st = lg__pin_decode(text, bytes, &r, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        return;
    }
    lg__buf out;
    lg__buf_init(&out, LG__RECORD_MAX);
    st = lg__pin_encode(&r, &out, &err);
    FUZZ_CHECK(st == LG_OK, "decoded, but not written: %s", err.message);
    st = lg__pin_decode(out.data, out.len, &second, &err);
    FUZZ_CHECK(st == LG_OK && second.n == r.n && second.pinned == r.pinned &&
                   memcmp(second.manifest, r.manifest, sizeof r.manifest) == 0 &&
                   strcmp(second.created, r.created) == 0 && strcmp(second.reason, r.reason) == 0,
               "written again, it differs: %s", err.message);
    lg__buf_free(&out);
}

static void rollback(const char *text, size_t bytes)
{
    lg_error err = LG_ERROR_INIT;
    lg__rollback_record r, second;
    lg_status st = lg__rollback_decode(text, bytes, &r, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        return;
    }
    FUZZ_CHECK(lg_generation_compare(r.target, r.generation) < 0, "it leads forward");
    lg__buf out;
    lg__buf_init(&out, LG__RECORD_MAX);
    st = lg__rollback_encode(&r, &out, &err);
    FUZZ_CHECK(st == LG_OK, "decoded, but not written: %s", err.message);
    st = lg__rollback_decode(out.data, out.len, &second, &err);
    FUZZ_CHECK(st == LG_OK && lg_generation_compare(second.generation, r.generation) == 0 &&
                   lg_generation_compare(second.target, r.target) == 0 && second.target_step == r.target_step &&
                   strcmp(second.run_id, r.run_id) == 0 && strcmp(second.reason, r.reason) == 0,
               "written again, it differs: %s", err.message);
    lg__buf_free(&out);
}

/* Only shown to people: whatever the file holds, what comes out is plain. */
static void owner(const char *text, size_t bytes)
{
    static lg_store *store;
    lg_error err = LG_ERROR_INIT;
    if (store == NULL) {
        FUZZ_CHECK(lg_store_open("mem:fuzz-record", &store, &err) == LG_OK && lg__store_make_root(store, &err) == LG_OK,
                   "%s", err.message);
    }
    FUZZ_CHECK(lg__store_remove_file(store, ".owner-1", &err) == LG_OK &&
                   lg__store_put_new(store, ".owner-1", text, bytes, &err) == LG_OK,
               "%s", err.message);
    char who[256], when[LG_CREATED_TEXT];
    lg__owner_who(store, 1, who, when);
    for (const char *p = who; *p != '\0'; p++) {
        FUZZ_CHECK((unsigned char)*p >= 0x20 && *p != 0x7F, "a control byte in the owner's name");
    }
    FUZZ_CHECK(when[0] == '\0' || lg__created_valid(when), "a time that is none: %s", when);
}

static void all(const char *text, size_t bytes)
{
    pin(text, bytes);
    rollback(text, bytes);
    owner(text, bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    all((const char *)data, bytes);
    size_t end = bytes - (bytes > 0 && data[bytes - 1] == '\n');
    lg_error err = LG_ERROR_INIT;
    lg__buf sealed;
    lg__buf_init(&sealed, (size_t)16 << 20);
    if (end > PREFIX_BYTES && data[end - 1] == '}' &&
        lg__sealed_json((const char *)data + PREFIX_BYTES, end - PREFIX_BYTES, &sealed, &err) == LG_OK) {
        all(sealed.data, sealed.len);
    }
    lg__buf_free(&sealed);
    return 0;
}
