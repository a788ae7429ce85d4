/* SPDX-License-Identifier: Apache-2.0 */
#include "core/bulletin.h"

#include "base/hash.h"
#include "base/mem.h"
#include "base/thread.h"
#include "core/owner.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEY_BYTES 64
#define NOTE_MAX (LG_ERROR_MESSAGE_MAX + 256)
#define LATE_SHOWN 8
#define HEAD_BYTES 1024

uint64_t lg__bulletin_vanished_ms = 1000;

/* -------------------------------------------------------------------- notes
 *
 * What a rank or the coordinator says, in a file or under a key: a line of
 * numbers, then a message. */

typedef struct note {
    lg_status status;
    int os_errno, rank;
    lg__written written;
    char message[LG_ERROR_MESSAGE_MAX];
} note;

static size_t write_note(lg_status status, const lg__written *w, const lg_error *cause, char out[NOTE_MAX])
{
    char digest[LG_DIGEST_TEXT];
    lg__hex(w->report, sizeof w->report, digest);
    int n = snprintf(out, NOTE_MAX, "lastgood 1 %d %d %d %s %" PRIu64 " %" PRIu64 "\n%s", (int)status,
                     status == LG_OK ? 0 : cause->os_errno, status == LG_OK ? -1 : cause->rank, digest, w->sums_bytes,
                     w->bytes, status == LG_OK ? "" : cause->message);
    return n < 0 ? 0 : n < NOTE_MAX ? (size_t)n : NOTE_MAX - 1;
}

/* false: it is none, or not whole. */
static bool read_note(const char *text, size_t bytes, note *out)
{
    char copy[NOTE_MAX], digest[LG_DIGEST_TEXT];
    if (text == NULL || bytes == 0 || bytes >= sizeof copy) {
        return false;
    }
    memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    int status, message = 0;
    note n = {0};
    if (sscanf(copy, "lastgood 1 %d %d %d %64s %" SCNu64 " %" SCNu64 "%n", &status, &n.os_errno, &n.rank, digest,
               &n.written.sums_bytes, &n.written.bytes, &message) != 6 ||
        copy[message] != '\n' || !lg__unhex(digest, n.written.report, sizeof n.written.report) ||
        strcmp(lg_status_name((lg_status)status), "LG_ERR_?") == 0) {
        return false;
    }
    n.status = (lg_status)status;
    lg__printable(copy + message + 1, n.message, sizeof n.message);
    *out = n;
    return true;
}

static lg_status tell(const note *n, lg_error *err)
{
    lg_error_set(err, n->status, "%s", n->message);
    err->os_errno = n->os_errno;
    err->rank = n->rank;
    return n->status;
}

/* The failure of rank `rank`, as all ranks word it. */
static lg_status blame(uint32_t rank, uint32_t world, const note *n, lg_error *err)
{
    tell(n, err);
    if (world > 1 && n->rank < 0) {
        lg_error_wrap(err, "rank %" PRIu32, rank);
        err->rank = (int)rank;
    }
    return n->status;
}

/* A note in a file; false: not there, or not whole yet. */
static bool read_file(lg_store *store, const char *folder, const char *name, note *out)
{
    char path[2 * LG__NAME_MAX];
    lg__buf text;
    lg__buf_init(&text, NOTE_MAX);
    lg_error ignored = LG_ERROR_INIT;
    bool found = lg__path_join(path, sizeof path, folder, name) &&
                 lg__store_read_all(store, path, &text, &ignored) == LG_OK && read_note(text.data, text.len, out);
    lg__buf_free(&text);
    return found;
}

static lg_status put_file(const lg__bulletin *b, const char *name, lg_status status, const lg_error *cause,
                          lg_error *err)
{
    static const lg__written nothing;
    char path[2 * LG__NAME_MAX], text[NOTE_MAX];
    lg__path_join(path, sizeof path, b->attempt->folder, name);
    return lg__store_put_new(b->store, path, text, write_note(status, &nothing, cause, text), err);
}

/* --------------------------------------------------------------------- keys */

static void rank_key(const lg__bulletin *b, uint32_t rank, char out[KEY_BYTES])
{
    snprintf(out, KEY_BYTES, "lastgood/%s/rank-%" PRIu32, b->attempt->token, rank);
}

static void result_key(const lg__bulletin *b, char out[KEY_BYTES])
{
    snprintf(out, KEY_BYTES, "lastgood/%s/result", b->attempt->token);
}

static lg_status put_key(const lg__bulletin *b, const char *key, lg_status status, const lg__written *w,
                         const lg_error *cause, lg_error *err)
{
    char text[NOTE_MAX];
    lg_status st = b->kv->ops->set(b->kv->ctx, key, text, write_note(status, w, cause, text), err);
    return st == LG_OK ? LG_OK : lg_error_wrap(err, "key-value store: set %s", key);
}

/* NOT_FOUND: not set yet. */
static lg_status get_key(const lg__bulletin *b, const char *key, note *out, lg_error *err)
{
    void *data = NULL;
    size_t bytes = 0;
    lg_status st = b->kv->ops->get(b->kv->ctx, key, &data, &bytes, err);
    if (st != LG_OK) {
        return st == LG_ERR_NOT_FOUND ? st : lg_error_wrap(err, "key-value store: get %s", key);
    }
    if (!read_note(data, bytes, out)) {
        st = lg_error_set(err, LG_ERR_COMM, "key-value store: the value of %s is garbled", key);
    }
    lg_free(data);
    return st;
}

/* --------------------------------------------------------------------- post */

lg_status lg__bulletin_post(const lg__bulletin *b, lg_status mine, const lg__written *written, const lg_error *cause,
                            lg_error *err)
{
    if (b->kv != NULL) {
        char key[KEY_BYTES];
        rank_key(b, b->rank, key);
        return put_key(b, key, mine, written, cause, err);
    }
    if (mine == LG_OK) {
        return LG_OK; /* the sums file says so */
    }
    char name[LG__NAME_MAX];
    lg__rank_failed_file(b->rank, name);
    return put_file(b, name, mine, cause, err);
}

/* ------------------------------------------------------------------ collect */

/* What a sums file says of itself. */
static lg_status look_at_sums(lg_store *store, const char *folder, uint32_t rank, lg__written *out, lg_error *err)
{
    char name[LG__NAME_MAX], path[2 * LG__NAME_MAX];
    lg__sums_file(rank, name);
    lg__path_join(path, sizeof path, folder, name);
    lg_file *f;
    lg__written w = {0};
    LG__TRY(lg__store_open_file(store, path, &f, &w.sums_bytes, err));
    uint8_t bytes[LG__SUMS_HEAD_BYTES];
    lg__sums_head head;
    lg_status st = LG_OK;
    if (w.sums_bytes < sizeof bytes) {
        st = lg_error_set(err, LG_ERR_CORRUPT, "%s has only %" PRIu64 " bytes", name, w.sums_bytes);
    }
    if (st == LG_OK) {
        st = lg__store_read(store, f, bytes, sizeof bytes, 0, err);
    }
    if (st == LG_OK) {
        st = lg__sums_head_decode(bytes, sizeof bytes, w.sums_bytes, &head, err);
    }
    uint64_t at = sizeof bytes;
    w.bytes = w.sums_bytes;
    for (uint32_t i = 0; st == LG_OK && i < head.n_tables; i++) {
        uint8_t table[LG__TABLE_HEAD_BYTES];
        st = lg__store_read(store, f, table, sizeof table, at, err);
        if (st == LG_OK) {
            const uint64_t file = lg__get_u64le(table), header = lg__get_u64le(table + 8);
            w.bytes += file;
            at += lg__table_bytes(file > header ? file - header : 0, head.block_bytes);
        }
    }
    char *text = NULL;
    if (st == LG_OK && (text = lg__malloc(head.report_bytes)) == NULL) {
        st = lg__nomem(err);
    }
    if (st == LG_OK) {
        st = lg__store_read(store, f, text, head.report_bytes, head.report_at, err);
    }
    if (st == LG_OK) {
        st = lg__sha256_of(text, head.report_bytes, w.report, err);
    }
    lg__free(text);
    lg_error ignored = LG_ERROR_INIT;
    lg__store_close(store, f, &ignored);
    if (st == LG_OK) {
        *out = w;
    }
    return st;
}

typedef struct seen {
    const lg__bulletin *b;
    uint8_t *done;   /* of each rank */
    uint32_t failed; /* the lowest rank that left a cause; UINT32_MAX: none */
    bool ended;      /* a manifest is there, which can only be a tombstone */
} seen;

static int look_at_name(const lg_node *node, void *arg)
{
    seen *s = arg;
    s->ended = s->ended || strcmp(node->name, LG__MANIFEST) == 0;
    uint64_t number = 0;
    int end = 0;
    char again[LG__NAME_MAX];
    if (sscanf(node->name, "rank-%" SCNu64 "%n", &number, &end) != 1 || number == 0 || number > s->b->world) {
        return 0;
    }
    const uint32_t rank = (uint32_t)(number - 1);
    lg__sums_file(rank, again);
    if (strcmp(node->name, again) == 0) {
        s->done[rank] = 1;
    }
    lg__rank_failed_file(rank, again);
    if (strcmp(node->name, again) == 0 && rank < s->failed) {
        s->failed = rank;
    }
    return 0;
}

/* One look at all; *all: every rank is done. */
static lg_status look_by_files(const lg__bulletin *b, seen *s, bool *all, lg_error *err)
{
    s->failed = UINT32_MAX;
    lg_status st = lg__store_list(b->store, b->attempt->folder, look_at_name, s, err);
    st = st == LG_OK && s->ended ? LG_ERR_NOT_FOUND : st;
    LG__TRY(lg__commit_vanished(st, b->attempt, err));
    note n;
    char name[LG__NAME_MAX];
    if (s->failed != UINT32_MAX) {
        lg__rank_failed_file(s->failed, name);
        if (read_file(b->store, b->attempt->folder, name, &n) && n.status != LG_OK) {
            return blame(s->failed, b->world, &n, err);
        }
    }
    *all = true;
    for (uint32_t r = 0; r < b->world; r++) {
        *all = *all && (s->done[r] != 0 || r == b->rank);
    }
    return LG_OK;
}

static lg_status look_by_keys(const lg__bulletin *b, seen *s, lg__written *written, bool *all, lg_error *err)
{
    *all = true;
    for (uint32_t r = 0; r < b->world; r++) {
        if (r == b->rank || s->done[r] != 0) {
            continue;
        }
        char key[KEY_BYTES];
        note n;
        rank_key(b, r, key);
        lg_error why = LG_ERROR_INIT;
        lg_status st = get_key(b, key, &n, &why);
        if (st == LG_ERR_NOT_FOUND) {
            *all = false;
            continue;
        }
        if (st != LG_OK) {
            *err = why;
            return st;
        }
        if (n.status != LG_OK) {
            return blame(r, b->world, &n, err);
        }
        written[r] = n.written;
        s->done[r] = 1;
    }
    return LG_OK;
}

static lg_status late(const lg__bulletin *b, const seen *s, uint64_t deadline_ms, lg_error *err)
{
    char who[160];
    size_t at = 0;
    uint32_t n = 0, first = 0;
    for (uint32_t r = 0; r < b->world; r++) {
        if (r == b->rank || s->done[r] != 0) {
            continue;
        }
        first = n == 0 ? r : first;
        if (n++ < LATE_SHOWN) {
            int more = snprintf(who + at, sizeof who - at, "%s%" PRIu32, n > 1 ? ", " : "", r);
            at += more > 0 ? (size_t)more : 0;
        }
    }
    lg_error_set(err, LG_ERR_TIMEOUT, "%s %s%s had not written %s part%s %" PRIu64 " ms after rank %" PRIu32,
                 n > 1 ? "ranks" : "rank", who, n > LATE_SHOWN ? ", …" : "", n > 1 ? "their" : "its", n > 1 ? "s" : "",
                 deadline_ms, b->rank);
    err->rank = (int)first;
    return LG_ERR_TIMEOUT;
}

/* With keys, the folder may show a file later than the key. A file that is not
 * there may also mean that another session has ended the attempt. */
static lg_status take_written(const lg__bulletin *b, seen *s, uint32_t rank, uint64_t until, lg__written *out,
                              lg_error *err)
{
    const uint64_t began = lg__now_ms();
    for (;;) {
        lg_error why = LG_ERROR_INIT;
        lg__written w;
        lg_status st = look_at_sums(b->store, b->attempt->folder, rank, &w, &why);
        if (st == LG_OK) {
            if (b->kv == NULL) {
                *out = w;
            } else {
                out->bytes = w.bytes;
            }
            return LG_OK;
        }
        bool all;
        if (st == LG_ERR_NOT_FOUND) {
            LG__TRY(look_by_files(b, s, &all, err));
        }
        if (st != LG_ERR_NOT_FOUND || lg__now_ms() >= until) {
            *err = why;
            return lg_error_wrap(err, "report of rank %" PRIu32, rank);
        }
        lg__pause(lg__now_ms() - began);
    }
}

static lg_status collect(const lg__bulletin *b, uint64_t deadline_ms, seen *s, lg__written *written, lg_error *err)
{
    const uint64_t began = lg__now_ms(), until = lg__deadline(deadline_ms);
    for (bool all = false;;) {
        LG__TRY(b->kv != NULL ? look_by_keys(b, s, written, &all, err) : look_by_files(b, s, &all, err));
        if (all) {
            break;
        }
        const uint64_t now = lg__now_ms();
        if (now >= until) {
            return late(b, s, deadline_ms, err);
        }
        lg__pause(now - began);
    }
    for (uint32_t r = 0; r < b->world; r++) {
        if (r != b->rank) {
            LG__TRY(take_written(b, s, r, until, &written[r], err));
        }
    }
    return LG_OK;
}

lg_status lg__bulletin_collect(const lg__bulletin *b, uint64_t deadline_ms, lg__written *written, lg_error *err)
{
    if (b->world == 1) {
        return LG_OK;
    }
    seen s = {.b = b, .done = lg__calloc(b->world, 1)};
    lg_status st = s.done == NULL ? lg__nomem(err) : collect(b, deadline_ms, &s, written, err);
    lg__free(s.done);
    return st;
}

/* ------------------------------------------------------------------- result */

bool lg__bulletin_announce(const lg__bulletin *b, lg_status result, const lg_error *cause)
{
    lg_error ignored = LG_ERROR_INIT;
    if (b->kv != NULL && b->world > 1) {
        static const lg__written nothing;
        char key[KEY_BYTES];
        result_key(b, key);
        (void)put_key(b, key, result, &nothing, cause, &ignored);
    }
    return result == LG_OK || put_file(b, LG__FAILED, result, cause, &ignored) == LG_OK;
}

void lg__bulletin_clear(const lg__bulletin *b)
{
    if (b->kv == NULL || b->kv->ops->remove == NULL || b->world == 1) {
        return;
    }
    char key[KEY_BYTES];
    lg_error ignored = LG_ERROR_INIT;
    rank_key(b, b->rank, key);
    (void)b->kv->ops->remove(b->kv->ctx, key, &ignored);
    if (b->rank == 0) {
        result_key(b, key);
        (void)b->kv->ops->remove(b->kv->ctx, key, &ignored);
    }
}

/* As lg__commit_is_ours, but every rank asks: of a large manifest, which is no
 * tombstone, only the beginning is read, where the attempt is. */
static bool is_ours(const lg__bulletin *b, bool *other)
{
    char path[2 * LG__NAME_MAX], head[HEAD_BYTES + 1], attempt[2 * LG__ATTEMPT_HEX];
    lg__path_join(path, sizeof path, b->attempt->final, LG__MANIFEST);
    lg_error ignored = LG_ERROR_INIT;
    lg_file *f;
    uint64_t bytes = 0;
    *other = false;
    if (lg__store_open_file(b->store, path, &f, &bytes, &ignored) != LG_OK) {
        return false;
    }
    const bool large = bytes > HEAD_BYTES;
    const bool read = large && lg__store_read(b->store, f, head, HEAD_BYTES, 0, &ignored) == LG_OK;
    lg__store_close(b->store, f, &ignored);
    if (!large) {
        return lg__commit_is_ours(b->store, b->attempt->final, b->attempt->token, other);
    }
    head[read ? HEAD_BYTES : 0] = '\0';
    snprintf(attempt, sizeof attempt, "\"attempt\":\"%s\"", b->attempt->token);
    const bool ours = strstr(head, attempt) != NULL;
    *other = read && !ours;
    return ours;
}

/* *known: *err and the result are the answer. */
static lg_status look_for_result(const lg__bulletin *b, bool *known, bool *gone, lg_error *err)
{
    *known = true;
    if (b->kv != NULL) {
        char key[KEY_BYTES];
        note n;
        result_key(b, key);
        lg_error why = LG_ERROR_INIT;
        lg_status st = get_key(b, key, &n, &why);
        if (st == LG_OK) {
            return n.status == LG_OK ? LG_OK : tell(&n, err);
        }
        if (st != LG_ERR_NOT_FOUND) {
            *err = why;
            return st;
        }
    }
    bool other, there = false;
    if (is_ours(b, &other)) {
        return LG_OK;
    }
    note n;
    char trash[LG__NAME_MAX];
    lg__attempt_trash(b->store, b->attempt->folder, b->attempt->token, b->epoch, trash);
    if ((read_file(b->store, b->attempt->folder, LG__FAILED, &n) || read_file(b->store, trash, LG__FAILED, &n)) &&
        n.status != LG_OK) {
        return tell(&n, err);
    }
    lg_error ignored = LG_ERROR_INIT;
    *gone = other || (lg__store_exists(b->store, "", b->attempt->folder, &there, &ignored) == LG_OK && !there);
    *known = false;
    return LG_OK;
}

lg_status lg__bulletin_watch(const lg__bulletin *b, uint64_t deadline_ms, lg_error *err)
{
    const uint64_t began = lg__now_ms();
    uint64_t gone_since = 0;
    for (;;) {
        bool known, gone = false;
        lg_status st = look_for_result(b, &known, &gone, err);
        if (known) {
            return st;
        }
        const uint64_t now = lg__now_ms();
        gone_since = !gone ? 0 : gone_since == 0 ? now : gone_since;
        if (gone && now - gone_since >= lg__bulletin_vanished_ms) {
            return lg__commit_vanished(LG_ERR_NOT_FOUND, b->attempt, err);
        }
        if (now - began >= deadline_ms) {
            return gone ? lg__commit_vanished(LG_ERR_NOT_FOUND, b->attempt, err)
                        : lg_error_set(err, LG_ERR_TIMEOUT,
                                       "rank 0 has neither committed nor given up %" PRIu64 " ms after rank %" PRIu32
                                       " wrote its part",
                                       deadline_ms, b->rank);
        }
        lg__pause(now - began);
    }
}
