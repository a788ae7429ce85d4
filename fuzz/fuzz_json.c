/* SPDX-License-Identifier: Apache-2.0 */

/* JSON text: the strict parser; the same object cut into members, one of which
 * stays text, must get the same verdict; values that are tagged JSON keep
 * themselves through text, and their getters never hand out something else. */

#include "base/error.h"
#include "base/json_pieces.h"
#include "base/mem.h"
#include "format/tagged.h"
#include "fuzz.h"

/* What can be asked of one value. */
static void ask(const json_t *v)
{
    lg_error err = LG_ERROR_INIT;
    uint64_t u, u2;
    int64_t i, i2;
    double f, f2;
    lg_status st = lg__tagged_get_u64(v, &u, &err);
    if (st == LG_OK) {
        json_t *again = lg__tagged_u64(u);
        FUZZ_CHECK(lg__tagged_get_u64(again, &u2, &err) == LG_OK && u2 == u, "%llu changed", (unsigned long long)u);
        json_decref(again);
    } else {
        fuzz_refused(st, &err);
    }
    st = lg__tagged_get_i64(v, &i, &err);
    if (st == LG_OK) {
        json_t *again = lg__tagged_i64(i);
        FUZZ_CHECK(lg__tagged_get_i64(again, &i2, &err) == LG_OK && i2 == i, "%lld changed", (long long)i);
        json_decref(again);
    }
    st = lg__tagged_get_f64(v, &f, &err);
    if (st == LG_OK) {
        json_t *again = lg__tagged_f64(f);
        /* Bits are compared. NOLINTNEXTLINE(bugprone-suspicious-memory-comparison,cert-exp42-c,cert-flp37-c) */
        FUZZ_CHECK(lg__tagged_get_f64(again, &f2, &err) == LG_OK && memcmp(&f, &f2, sizeof f) == 0, "%a changed", f);
        json_decref(again);
    }
    void *data = NULL, *data2 = NULL;
    size_t bytes = 0, bytes2 = 0;
    st = lg__tagged_get_bytes(v, &data, &bytes, &err);
    if (st == LG_OK) {
        json_t *again = lg__tagged_bytes(data, bytes);
        FUZZ_CHECK(json_equal(again, v), "%zu bytes have two texts", bytes);
        FUZZ_CHECK(lg__tagged_get_bytes(again, &data2, &bytes2, &err) == LG_OK && bytes2 == bytes &&
                       (bytes == 0 || memcmp(data, data2, bytes) == 0),
                   "%zu bytes changed", bytes);
        lg__free(data);
        lg__free(data2);
        json_decref(again);
    }
}

static void tagged(const json_t *v)
{
    lg_error err = LG_ERROR_INIT;
    lg_status st = lg__tagged_check(v, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        return;
    }
    ask(v);
    lg__buf text;
    lg__buf_init(&text, SIZE_MAX / 2);
    json_t *again = NULL;
    st = lg__buf_json(&text, v, false, &err);
    FUZZ_CHECK(st == LG_OK, "not written: %s", err.message);
    st = lg__json_parse(text.data, text.len, &again, &err);
    FUZZ_CHECK(st == LG_OK, "what was written is refused: %s", err.message);
    st = lg__tagged_check(again, &err);
    FUZZ_CHECK(st == LG_OK, "what was written is no tagged JSON: %s", err.message);
    FUZZ_CHECK(json_equal(v, again), "it changed: %.*s", (int)(text.len < 400 ? text.len : 400), text.data);
    json_decref(again);
    lg__buf_free(&text);
}

/* Is the object, cut into pieces, what it is as a whole? */
static void cut(const char *text, size_t bytes, lg_status whole, const json_t *v)
{
    lg_error err = LG_ERROR_INIT;
    json_t *rest = NULL, *apart = NULL;
    lg__json_piece piece = {NULL, 0};
    lg_status st = lg__json_parse_but((lg__json_piece){text, bytes}, 0, "tensors", &rest, &piece, &err);
    if (st == LG_OK && piece.at != NULL) {
        FUZZ_CHECK(piece.at >= text && piece.n <= bytes - (size_t)(piece.at - text), "a piece outside of the text");
        st = lg__json_parse_piece(piece.at, piece.n, (size_t)(piece.at - text), 1, &apart, &err);
    }
    if (whole != LG_OK || !json_is_object(v)) {
        FUZZ_CHECK(st != LG_OK, "the pieces of what is no JSON object are accepted");
        fuzz_refused(st, &err);
    } else {
        FUZZ_CHECK(st == LG_OK, "the pieces of an object are refused: %s", err.message);
        if (apart != NULL) {
            json_object_set(rest, "tensors", apart);
        }
        FUZZ_CHECK(json_equal(rest, v), "the pieces are another object");
    }
    json_decref(rest);
    json_decref(apart);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    lg_error err = LG_ERROR_INIT;
    json_t *v = NULL;
    lg_status st = lg__json_parse((const char *)data, bytes, &v, &err);
    if (st != LG_OK) {
        fuzz_refused(st, &err);
        FUZZ_CHECK(v == NULL, "an output in spite of: %s", err.message);
    } else {
        tagged(v);
    }
    cut((const char *)data, bytes, st, v);
    json_decref(v);
    return 0;
}
