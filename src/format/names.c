/* SPDX-License-Identifier: Apache-2.0 */
#include "format/names.h"

#include "base/error.h"
#include "base/json.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* ------------------------------------------------------------------- making */

void lg__step_folder(uint64_t step, lg_generation g, char out[LG__NAME_MAX])
{
    snprintf(out, LG__NAME_MAX, "step-%012" PRIu64 ".g%" PRIu64 ".%" PRIu64, step, g.epoch, g.serial);
}

void lg__partial_folder(uint64_t step, lg_generation g, const char *attempt, char out[LG__NAME_MAX])
{
    snprintf(out, LG__NAME_MAX, ".step-%012" PRIu64 ".g%" PRIu64 ".%" PRIu64 ".%.*s.partial", step, g.epoch, g.serial,
             LG__ATTEMPT_HEX, attempt);
}

void lg__owner_file(uint64_t epoch, char out[LG__NAME_MAX]) { snprintf(out, LG__NAME_MAX, ".owner-%" PRIu64, epoch); }

void lg__rollback_file(lg_generation g, char out[LG__NAME_MAX])
{
    snprintf(out, LG__NAME_MAX, "rollback-%" PRIu64 ".%" PRIu64 ".json", g.epoch, g.serial);
}

void lg__trash_name(uint64_t epoch, const char *token, const char *name, char out[LG__NAME_MAX])
{
    /* All of them: read anew, the rest must give the same name. */
    name += strspn(name, ".");
    name = name[0] != '\0' ? name : "folder";
    int n = snprintf(out, LG__NAME_MAX, ".trash-%" PRIu64 ".%.*s-%s", epoch, LG__ATTEMPT_HEX, token, name);
    if (n >= LG__NAME_MAX) {
        /* No half character at the end: some file systems refuse such names. What
         * is no UTF-8 may end anywhere. */
        size_t end = LG__NAME_MAX - 1, start = end;
        for (int i = 0; i < 3 && ((unsigned char)out[start - 1] & 0xC0) == 0x80; i++) {
            start--;
        }
        bool lead = ((unsigned char)out[start - 1] & 0xC0) == 0xC0;
        if (lead && !lg__utf8_valid(out + start - 1, end - start + 1)) {
            out[start - 1] = '\0';
        }
    }
}

void lg__shard_file(uint32_t rank, lg_group group, uint32_t number, uint32_t count, char out[LG__NAME_MAX])
{
    snprintf(out, LG__NAME_MAX, "shard-%05" PRIu64 "-%s-%05" PRIu64 "-of-%05" PRIu32 ".%s", (uint64_t)rank + 1,
             lg_group_name(group), (uint64_t)number + 1, count, group == LG_GROUP_RAW ? "state" : "safetensors");
}

void lg__rank_failed_file(uint32_t rank, char out[LG__NAME_MAX])
{
    snprintf(out, LG__NAME_MAX, "rank-%05" PRIu64 ".failed", (uint64_t)rank + 1);
}

void lg__sums_file(uint32_t rank, char out[LG__NAME_MAX])
{
    snprintf(out, LG__NAME_MAX, "rank-%05" PRIu64 ".sums", (uint64_t)rank + 1);
}

void lg__side_file(const char *kind, uint32_t n, char out[LG__NAME_MAX])
{
    snprintf(out, LG__NAME_MAX, "lastgood-%.31s-%" PRIu32 ".json", kind, n);
}

/* ------------------------------------------------------------------ reading
 *
 * Readers only pick the parts out of a name; whether the name is ours is
 * decided by making it anew and comparing bytes. */

static bool take_text(const char **s, const char *text)
{
    size_t n = strlen(text);
    if (strncmp(*s, text, n) != 0) {
        return false;
    }
    *s += n;
    return true;
}

static bool take_u64(const char **s, uint64_t *out)
{
    const char *p = *s;
    uint64_t v = 0;
    for (; *p >= '0' && *p <= '9'; p++) {
        uint64_t digit = (uint64_t)(*p - '0');
        if (v > UINT64_MAX / 10 || v * 10 > UINT64_MAX - digit) {
            return false;
        }
        v = v * 10 + digit;
    }
    bool some = p != *s;
    *s = p;
    *out = v;
    return some;
}

static bool take_hex(const char **s, char out[LG__ATTEMPT_HEX + 1])
{
    size_t n = strspn(*s, "0123456789abcdef");
    if (n != LG__ATTEMPT_HEX) {
        return false;
    }
    memcpy(out, *s, n);
    out[n] = '\0';
    *s += n;
    return true;
}

static bool take_step(const char **s, lg__root_name *r)
{
    return take_text(s, "step-") && take_u64(s, &r->step) && take_text(s, ".g") && take_u64(s, &r->generation.epoch) &&
           take_text(s, ".") && take_u64(s, &r->generation.serial);
}

static bool parse_partial(const char *name, lg__root_name *r, char again[LG__NAME_MAX])
{
    const char *s = name + 1;
    r->kind = LG__ROOT_PARTIAL;
    if (!take_step(&s, r) || !take_text(&s, ".") || !take_hex(&s, r->attempt)) {
        return false;
    }
    lg__partial_folder(r->step, r->generation, r->attempt, again);
    return true;
}

static bool parse_step(const char *name, lg__root_name *r, char again[LG__NAME_MAX])
{
    const char *s = name;
    r->kind = LG__ROOT_STEP;
    if (!take_step(&s, r)) {
        return false;
    }
    lg__step_folder(r->step, r->generation, again);
    return true;
}

static bool parse_owner(const char *name, lg__root_name *r, char again[LG__NAME_MAX])
{
    const char *s = name;
    r->kind = LG__ROOT_OWNER;
    if (!take_text(&s, ".owner-") || !take_u64(&s, &r->generation.epoch)) {
        return false;
    }
    lg__owner_file(r->generation.epoch, again);
    return true;
}

static bool parse_rollback(const char *name, lg__root_name *r, char again[LG__NAME_MAX])
{
    const char *s = name;
    r->kind = LG__ROOT_ROLLBACK;
    if (!take_text(&s, "rollback-") || !take_u64(&s, &r->generation.epoch) || !take_text(&s, ".") ||
        !take_u64(&s, &r->generation.serial)) {
        return false;
    }
    lg__rollback_file(r->generation, again);
    return true;
}

static bool parse_trash(const char *name, lg__root_name *r, char again[LG__NAME_MAX])
{
    char token[LG__ATTEMPT_HEX + 1];
    const char *s = name;
    r->kind = LG__ROOT_TRASH;
    if (!take_text(&s, ".trash-") || !take_u64(&s, &r->generation.epoch) || !take_text(&s, ".") ||
        !take_hex(&s, token) || !take_text(&s, "-") || s[0] == '\0') {
        return false;
    }
    lg__trash_name(r->generation.epoch, token, s, again);
    return true;
}

lg__root_name lg__root_name_parse(const char *name)
{
    static bool (*const readers[])(const char *, lg__root_name *, char *) = {parse_step, parse_owner, parse_rollback,
                                                                             parse_trash};
    char again[LG__NAME_MAX];
    if (strchr(name, '/') != NULL) {
        return (lg__root_name){.kind = LG__ROOT_FOREIGN};
    }
    if (name[0] == '.') {
        lg__root_name r = {0};
        if (parse_partial(name, &r, again) && strcmp(name, again) == 0) {
            return r;
        }
    }
    for (size_t i = 0; i < sizeof readers / sizeof readers[0]; i++) {
        lg__root_name r = {0};
        if (readers[i](name, &r, again) && strcmp(name, again) == 0) {
            return r;
        }
    }
    return (lg__root_name){.kind = LG__ROOT_FOREIGN};
}

bool lg__side_name_parse(const char *name, char kind[32], uint32_t *n)
{
    const char *s = name;
    if (!take_text(&s, "lastgood-")) {
        return false;
    }
    size_t length = strspn(s, "abcdefghijklmnopqrstuvwxyz");
    if (length == 0 || length > 31) {
        return false;
    }
    char found[32];
    memcpy(found, s, length);
    found[length] = '\0';
    s += length;
    uint64_t number = 0;
    if (!take_text(&s, "-") || !take_u64(&s, &number) || number > UINT32_MAX) {
        return false;
    }
    char again[LG__NAME_MAX];
    lg__side_file(found, (uint32_t)number, again);
    if (strcmp(name, again) != 0) {
        return false;
    }
    memcpy(kind, found, length + 1);
    *n = (uint32_t)number;
    return true;
}

/* -------------------------------------------------------------- attached files */

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), k = strlen(end);
    return n >= k && strcasecmp(name + n - k, end) == 0;
}

static bool begins_with(const char *name, const char *begin) { return strncasecmp(name, begin, strlen(begin)) == 0; }

/* Letters' case is ignored throughout: a copy on a file system that ignores it
 * must not lose a file. */
lg_status lg__attach_name_check(const char *name, lg_error *err)
{
    size_t n = strlen(name);
    LG__TRY(lg__name_check("attached file", name, n, err));
    LG__RETURN_IF(n > 255, err, LG_ERR_INVALID, "an attached file's name is %zu bytes long; 255 are allowed", n);
    LG__RETURN_IF(strchr(name, '/') != NULL, err, LG_ERR_INVALID,
                  "attached file \"%s\": give a plain file name, without \"/\"", name);
    LG__RETURN_IF(name[0] == '.', err, LG_ERR_INVALID, "attached file \"%s\": a name must not begin with a dot", name);
    LG__RETURN_IF(begins_with(name, "lastgood") || begins_with(name, "shard-") || begins_with(name, "rank-") ||
                      strcasecmp(name, LG__FAILED) == 0,
                  err, LG_ERR_INVALID, "attached file \"%s\": lastgood keeps names of this form for itself", name);
    LG__RETURN_IF(ends_with(name, ".safetensors"), err, LG_ERR_INVALID,
                  "attached file \"%s\": PyTorch's reader would take it for a part of the checkpoint; "
                  "save its tensors instead",
                  name);
    LG__RETURN_IF(ends_with(name, ".safetensors.index.json"), err, LG_ERR_INVALID,
                  "attached file \"%s\": an index of whole tensors would hide the shards from transformers", name);
    LG__RETURN_IF(ends_with(name, ".tmp") || ends_with(name, ".partial") || ends_with(name, ".lgenc"), err,
                  LG_ERR_INVALID, "attached file \"%s\": this ending is kept for files being written or encrypted",
                  name);
    return LG_OK;
}
