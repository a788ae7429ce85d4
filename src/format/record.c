/* SPDX-License-Identifier: Apache-2.0 */
#include "format/record.h"

#include "base/error.h"
#include "base/json.h"
#include "format/member.h"

#include <inttypes.h>
#include <string.h>

#define RECORD_VERSION 1
#define REASON_MAX 255

static void put_head(lg__buf *b, const char *kind)
{
    lg__buf_fmt(b, "\"kind\":\"%s\",\"version\":%d,", kind, RECORD_VERSION);
}

static void put_tail(lg__buf *b, const char *created, const char *reason)
{
    lg__buf_str(b, ",\"created\":");
    lg__buf_json_text(b, created);
    lg__buf_str(b, ",\"reason\":");
    lg__buf_json_text(b, reason);
    lg__buf_str(b, "}");
}

static lg_status seal(lg__buf *body, lg__buf *out, lg_error *err)
{
    lg_status st = lg__buf_check(body, "record", err);
    if (st == LG_OK) {
        st = lg__sealed_json(body->data, body->len, out, err);
    }
    lg__buf_free(body);
    return st;
}

/* Opens the seal and makes sure that this is a record of `kind` that this
 * version understands; json_decref(*out). */
static lg_status open_record(const char *bytes, size_t n, const char *kind, json_t **out, lg_error *err)
{
    LG__RETURN_IF(n > LG__RECORD_MAX, err, LG_ERR_FORMAT, "a %s record of %zu bytes; at most %zu are possible", kind, n,
                  LG__RECORD_MAX);
    json_t *top = NULL;
    LG__TRY(lg__sealed_json_parse(bytes, n, &top, err));
    const char *is = NULL;
    uint64_t version = 0;
    lg_status st = lg__member_text(top, NULL, "kind", 64, &is, err);
    if (st == LG_OK && strcmp(is, kind) != 0) {
        st = lg_error_set(err, LG_ERR_FORMAT, "a record of the kind \"%s\", not \"%s\"", is, kind);
    }
    if (st == LG_OK) {
        st = lg__member_u64(top, NULL, "version", UINT64_MAX, &version, err);
    }
    if (st == LG_OK && version > RECORD_VERSION) {
        st = lg_error_set(err, LG_ERR_VERSION, "a %s record of version %" PRIu64 "; known is %d", kind, version,
                          RECORD_VERSION);
    }
    if (st == LG_OK && version == 0) {
        st = lg_error_set(err, LG_ERR_FORMAT, "a %s record of version 0", kind);
    }
    if (st != LG_OK) {
        json_decref(top);
        return st;
    }
    *out = top;
    return LG_OK;
}

static lg_status read_reason(const json_t *top, char out[REASON_MAX + 1], lg_error *err)
{
    const char *reason = NULL;
    LG__TRY(lg__member_text(top, NULL, "reason", REASON_MAX, &reason, err));
    memcpy(out, reason, strlen(reason) + 1);
    return LG_OK;
}

/* --------------------------------------------------------------------- pins */

lg_status lg__pin_encode(const lg__pin_record *r, lg__buf *out, lg_error *err)
{
    LG__RETURN_IF(r->n == 0, err, LG_ERR_INTERNAL, "pin records are numbered from 1");
    LG__RETURN_IF(!lg__created_valid(r->created), err, LG_ERR_INTERNAL, "pin record without a time");
    LG__TRY(lg__text_check("the reason of a pin", r->reason, REASON_MAX, err));
    lg__buf b;
    lg__buf_init(&b, LG__RECORD_MAX);
    put_head(&b, "pin");
    lg__buf_fmt(&b, "\"n\":%" PRIu32 ",\"pinned\":%s,\"manifest\":", r->n, r->pinned ? "true" : "false");
    lg__buf_json_hex(&b, r->manifest);
    put_tail(&b, r->created, r->reason);
    return seal(&b, out, err);
}

static lg_status read_pin(const json_t *top, lg__pin_record *r, lg_error *err)
{
    LG__TRY(lg__member_u32(top, NULL, "n", UINT32_MAX, &r->n, err));
    LG__RETURN_IF(r->n == 0, err, LG_ERR_FORMAT, "n: pin records are numbered from 1");
    LG__TRY(lg__member_bool(top, NULL, "pinned", &r->pinned, err));
    LG__TRY(lg__member_digest(top, NULL, "manifest", r->manifest, err));
    LG__TRY(lg__member_created(top, NULL, "created", r->created, err));
    return read_reason(top, r->reason, err);
}

lg_status lg__pin_decode(const char *bytes, size_t n, lg__pin_record *out, lg_error *err)
{
    json_t *top = NULL;
    LG__TRY(open_record(bytes, n, "pin", &top, err));
    lg__pin_record r = {0};
    lg_status st = read_pin(top, &r, err);
    json_decref(top);
    LG__TRY(st);
    *out = r;
    return LG_OK;
}

/* ---------------------------------------------------------------- rollbacks */

/* A walk over checkpoints goes on at the target, so that must be older than
 * the record or the walk would not end. */
static bool leads_back(const lg__rollback_record *r) { return lg__generation_order(r->target, r->generation) < 0; }

lg_status lg__rollback_encode(const lg__rollback_record *r, lg__buf *out, lg_error *err)
{
    LG__RETURN_IF(!lg__hex_valid(r->run_id, LG_RUN_ID_TEXT - 1), err, LG_ERR_INTERNAL,
                  "rollback record without a run id");
    LG__RETURN_IF(!leads_back(r), err, LG_ERR_INTERNAL, "rollback to a checkpoint that is not older than its record");
    LG__RETURN_IF(r->target_step >= UINT64_C(1) << 53, err, LG_ERR_INTERNAL,
                  "rollback to a step that is not below 2^53");
    LG__RETURN_IF(!lg__created_valid(r->created), err, LG_ERR_INTERNAL, "rollback record without a time");
    LG__TRY(lg__text_check("the reason of a rollback", r->reason, REASON_MAX, err));
    lg__buf b;
    lg__buf_init(&b, LG__RECORD_MAX);
    put_head(&b, "rollback");
    lg__buf_str(&b, "\"run\":");
    lg__buf_json_text(&b, r->run_id);
    lg__buf_str(&b, ",\"generation\":");
    lg__buf_json_generation(&b, r->generation);
    lg__buf_str(&b, ",\"target\":{\"step\":");
    lg__buf_json_u64(&b, r->target_step);
    lg__buf_str(&b, ",\"generation\":");
    lg__buf_json_generation(&b, r->target);
    lg__buf_str(&b, ",\"manifest\":");
    lg__buf_json_hex(&b, r->target_manifest);
    lg__buf_str(&b, "}");
    put_tail(&b, r->created, r->reason);
    return seal(&b, out, err);
}

static lg_status read_rollback(const json_t *top, lg__rollback_record *r, lg_error *err)
{
    LG__TRY(lg__member_hex(top, NULL, "run", LG_RUN_ID_TEXT - 1, r->run_id, err));
    LG__TRY(lg__member_generation(top, NULL, "generation", &r->generation, err));
    const json_t *target = NULL;
    LG__TRY(lg__member_get(top, NULL, "target", JSON_OBJECT, &target, err));
    lg__at at = {NULL, "target", LG__AT_MEMBER};
    LG__TRY(lg__member_u64(target, &at, "step", (UINT64_C(1) << 53) - 1, &r->target_step, err));
    LG__TRY(lg__member_generation(target, &at, "generation", &r->target, err));
    LG__TRY(lg__member_digest(target, &at, "manifest", r->target_manifest, err));
    if (!leads_back(r)) {
        return lg__at_error(&at, "generation", err, LG_ERR_FORMAT, "not older than the record itself");
    }
    LG__TRY(lg__member_created(top, NULL, "created", r->created, err));
    return read_reason(top, r->reason, err);
}

lg_status lg__rollback_decode(const char *bytes, size_t n, lg__rollback_record *out, lg_error *err)
{
    json_t *top = NULL;
    LG__TRY(open_record(bytes, n, "rollback", &top, err));
    lg__rollback_record r = {0};
    lg_status st = read_rollback(top, &r, err);
    json_decref(top);
    LG__TRY(st);
    *out = r;
    return LG_OK;
}
