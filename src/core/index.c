/* SPDX-License-Identifier: Apache-2.0 */
#include "core/index.h"

#include "base/mem.h"

#include <string.h>

struct lg__index_slot {
    const void *key; /* NULL: free */
    size_t bytes;
    size_t value;
    uint64_t hash;
};

static uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * UINT64_C(0x9e3779b97f4a7c15);
    return h ^ (h >> 32);
}

/* Eight bytes at a time; high bits are mixed into the low ones, which choose the
 * slot. */
static uint64_t hash_of(const void *key, size_t bytes)
{
    const unsigned char *p = key;
    uint64_t h = bytes, v;
    for (; bytes >= sizeof v; p += sizeof v, bytes -= sizeof v) {
        memcpy(&v, p, sizeof v);
        h = mix(h, v);
    }
    v = 0;
    memcpy(&v, p, bytes);
    return mix(h, v);
}

/* The slot of the key, or the free one where it would go. */
static struct lg__index_slot *probe(struct lg__index_slot *slots, size_t cap, const void *key, size_t bytes,
                                    uint64_t hash)
{
    for (size_t i = (size_t)hash & (cap - 1);; i = (i + 1) & (cap - 1)) {
        struct lg__index_slot *s = &slots[i];
        if (s->key == NULL || (s->hash == hash && s->bytes == bytes && memcmp(s->key, key, bytes) == 0)) {
            return s;
        }
    }
}

void lg__index_free(lg__index *ix)
{
    lg__free(ix->slots);
    *ix = (lg__index){0};
}

bool lg__index_find(const lg__index *ix, const void *key, size_t bytes, size_t *value)
{
    if (ix->cap == 0) {
        return false;
    }
    const struct lg__index_slot *s = probe(ix->slots, ix->cap, key, bytes, hash_of(key, bytes));
    if (s->key == NULL) {
        return false;
    }
    *value = s->value;
    return true;
}

static bool enlarge(lg__index *ix)
{
    size_t cap = ix->cap == 0 ? 64 : ix->cap * 2;
    struct lg__index_slot *slots = cap < ix->cap ? NULL : lg__calloc(cap, sizeof *slots);
    if (slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < ix->cap; i++) {
        const struct lg__index_slot *s = &ix->slots[i];
        if (s->key != NULL) {
            *probe(slots, cap, s->key, s->bytes, s->hash) = *s;
        }
    }
    lg__free(ix->slots);
    ix->slots = slots;
    ix->cap = cap;
    return true;
}

lg_status lg__index_add(lg__index *ix, const void *key, size_t bytes, size_t value, lg_error *err)
{
    /* At most three quarters full, so that probing stays short and ends. */
    if (ix->n >= ix->cap / 4 * 3 && !enlarge(ix)) {
        return lg__nomem(err);
    }
    uint64_t hash = hash_of(key, bytes);
    struct lg__index_slot *s = probe(ix->slots, ix->cap, key, bytes, hash);
    if (s->key != NULL) {
        return lg_error_set(err, LG_ERR_INTERNAL, "a key is in the index twice");
    }
    *s = (struct lg__index_slot){.key = key, .bytes = bytes, .value = value, .hash = hash};
    ix->n++;
    return LG_OK;
}
