/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"
#include "random/sampler.h"

#include <inttypes.h>
#include <string.h>

/* Room for a part's name behind the key. */
#define PART_MAX 16

typedef struct key_text {
    char text[LG_MAX_NAME + 1];
} key_text;

static lg_status part_key(const char *key, const char *part, key_text *out, lg_error *err)
{
    LG__RETURN_IF(key == NULL || key[0] == '\0', err, LG_ERR_INVALID, "sampler: the key must be given");
    size_t n = strlen(key), m = strlen(part);
    LG__RETURN_IF(n > LG_MAX_NAME - PART_MAX, err, LG_ERR_INVALID,
                  "sampler: a key of %zu bytes, at most %d leave room for the names of its parts", n,
                  LG_MAX_NAME - PART_MAX);
    memcpy(out->text, key, n);
    out->text[n] = '.';
    memcpy(out->text + n + 1, part, m + 1);
    return LG_OK;
}

static lg_status check_usable(const lg_sampler *s, const char *call, lg_error *err)
{
    LG__RETURN_IF(s == NULL, err, LG_ERR_INVALID, "%s: s must be given", call);
    LG__RETURN_IF(s->samples == 0 || s->samples > LG_SAMPLER_MAX, err, LG_ERR_INVALID,
                  "%s: %" PRIu64 " samples; lg_sampler_init sets 1 to 2^48", call, s->samples);
    return LG_OK;
}

lg_status lg_sampler_save(const lg_sampler *s, lg_save *save, const char *key, lg_error *err)
{
    LG__ERR(err);
    LG__TRY(check_usable(s, "lg_sampler_save", err));
    LG__RETURN_IF(save == NULL, err, LG_ERR_INVALID, "lg_sampler_save: save must be given");
    /* The end of an epoch is the start of the next, however it was set. */
    uint64_t epoch, consumed;
    lg__sampler_move(s, 0, &epoch, &consumed);
    const struct {
        const char *part;
        uint64_t value;
    } parts[] = {
        {"samples", s->samples}, {"seed", s->seed}, {"epoch", epoch}, {"consumed", consumed}, {"flags", s->flags},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        key_text k;
        LG__TRY(part_key(key, parts[i].part, &k, err));
        LG__TRY(lg_save_global_u64(save, k.text, parts[i].value, err));
    }
    return LG_OK;
}

static lg_status load_part(lg_checkpoint *c, const char *key, const char *part, uint64_t *out, lg_error *err)
{
    key_text k;
    LG__TRY(part_key(key, part, &k, err));
    return lg_checkpoint_global_u64(c, k.text, out, err);
}

lg_status lg_sampler_load(lg_sampler *s, lg_checkpoint *c, const char *key, lg_error *err)
{
    LG__ERR(err);
    LG__TRY(check_usable(s, "lg_sampler_load", err));
    LG__RETURN_IF(c == NULL, err, LG_ERR_INVALID, "lg_sampler_load: the checkpoint must be given");
    lg_sampler got = {0};
    uint64_t flags;
    LG__TRY(load_part(c, key, "samples", &got.samples, err));
    LG__TRY(load_part(c, key, "seed", &got.seed, err));
    LG__TRY(load_part(c, key, "epoch", &got.epoch, err));
    LG__TRY(load_part(c, key, "consumed", &got.consumed, err));
    LG__TRY(load_part(c, key, "flags", &flags, err));
    LG__RETURN_IF(got.samples != s->samples, err, LG_ERR_MISMATCH,
                  "%s: the data set had %" PRIu64 " samples when saved and has %" PRIu64 " now", key, got.samples,
                  s->samples);
    LG__RETURN_IF(got.consumed >= got.samples, err, LG_ERR_FORMAT,
                  "%s.consumed is %" PRIu64 ", which is no position in an epoch of %" PRIu64 " samples", key,
                  got.consumed, got.samples);
    LG__RETURN_IF((flags & ~(uint64_t)LG_SAMPLER_SEQUENTIAL) != 0, err, LG_ERR_VERSION,
                  "%s.flags is 0x%" PRIx64 ", of which this version knows 0x%x", key, flags, LG_SAMPLER_SEQUENTIAL);
    got.flags = (uint32_t)flags;
    *s = got;
    return LG_OK;
}
