/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"

#include <lastgood/backend.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static atomic_size_t countdown = SIZE_MAX;
static atomic_bool only_one, failed;

void lg__mem_fail_after(size_t n)
{
    atomic_store(&only_one, false);
    atomic_store(&failed, false);
    atomic_store(&countdown, n);
}

void lg__mem_fail_once(size_t n)
{
    lg__mem_fail_after(SIZE_MAX);
    atomic_store(&only_one, true);
    atomic_store(&countdown, n);
}

bool lg__mem_reset(void)
{
    atomic_store(&countdown, SIZE_MAX);
    return atomic_load(&failed);
}

bool lg__mem_must_fail(void)
{
    size_t left = atomic_load(&countdown);
    while (left != SIZE_MAX) {
        if (left == 0) {
            if (atomic_load(&only_one) && !atomic_compare_exchange_strong(&countdown, &left, SIZE_MAX)) {
                continue;
            }
            atomic_store(&failed, true);
            return true;
        }
        if (atomic_compare_exchange_weak(&countdown, &left, left - 1)) {
            return false;
        }
    }
    return false;
}

void *lg__malloc(size_t bytes) { return lg__mem_must_fail() ? NULL : malloc(bytes ? bytes : 1); }

void *lg__calloc(size_t n, size_t bytes)
{
    /* Sanitizers end the program at an overflow instead of returning NULL. */
    if (lg__mem_must_fail() || (bytes != 0 && n > SIZE_MAX / bytes)) {
        return NULL;
    }
    return calloc(n ? n : 1, bytes ? bytes : 1);
}

void *lg__realloc(void *p, size_t bytes) { return lg__mem_must_fail() ? NULL : realloc(p, bytes ? bytes : 1); }

void lg__free(void *p) { free(p); }

#define LARGE_PAGE ((size_t)2 << 20)

static size_t in_large_pages(size_t bytes) { return (bytes + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE; }

void *lg__pages_new(size_t bytes)
{
    if (lg__mem_must_fail() || bytes > SIZE_MAX / 2) {
        return NULL;
    }
    /* Large pages need their alignment: the ends are given back. */
    const size_t wanted = in_large_pages(bytes != 0 ? bytes : 1), all = wanted + LARGE_PAGE;
    char *base = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return NULL;
    }
    const size_t before = (LARGE_PAGE - (uintptr_t)base % LARGE_PAGE) % LARGE_PAGE;
    if (before > 0) {
        (void)munmap(base, before);
    }
    if (before < LARGE_PAGE) {
        (void)munmap(base + before + wanted, LARGE_PAGE - before);
    }
    (void)madvise(base + before, wanted, MADV_HUGEPAGE);
    (void)madvise(base + before, wanted, MADV_DONTFORK);
    return base + before;
}

void lg__pages_free(void *p, size_t bytes)
{
    if (p != NULL) {
        (void)munmap(p, in_large_pages(bytes != 0 ? bytes : 1));
    }
}

void lg_free(void *memory) { free(memory); }

void *lg__memdup(const void *p, size_t bytes)
{
    void *copy = lg__malloc(bytes);
    if (copy != NULL && bytes > 0) {
        memcpy(copy, p, bytes);
    }
    return copy;
}

char *lg__strdup(const char *s) { return lg__memdup(s, strlen(s) + 1); }

bool lg__grow(void **array, size_t *cap, size_t used, size_t element_bytes)
{
    if (used < *cap) {
        return true;
    }
    size_t more = *cap < 8 ? 8 : *cap * 2;
    if (more < *cap || more > SIZE_MAX / element_bytes) {
        return false;
    }
    void *p = lg__realloc(*array, more * element_bytes);
    if (p == NULL) {
        return false;
    }
    *array = p;
    *cap = more;
    return true;
}

lg_status lg__nomem(lg_error *err) { return lg_error_set(err, LG_ERR_NOMEM, "out of memory"); }

/* ------------------------------------------------------------------- arena */

/* Chunks grow: many arenas hold little (a report of one rank), some a lot. */
#define FIRST_CHUNK_BYTES ((size_t)2 * 1024)
#define CHUNK_BYTES ((size_t)64 * 1024)
#define ALIGNMENT ((size_t)16)

typedef struct chunk {
    struct chunk *next;
    size_t used, cap;
    _Alignas(16) unsigned char bytes[];
} chunk;

struct lg__arena {
    chunk *head;
};

lg__arena *lg__arena_new(void) { return lg__calloc(1, sizeof(lg__arena)); }

void lg__arena_free(lg__arena *a)
{
    if (a == NULL) {
        return;
    }
    for (chunk *c = a->head; c != NULL;) {
        chunk *next = c->next;
        lg__free(c);
        c = next;
    }
    lg__free(a);
}

void *lg__arena_alloc(lg__arena *a, size_t bytes)
{
    if (bytes > SIZE_MAX - CHUNK_BYTES) {
        return NULL;
    }
    size_t need = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    chunk *c = a->head;
    if (c == NULL || c->cap - c->used < need) {
        size_t usual = c == NULL ? FIRST_CHUNK_BYTES : c->cap < CHUNK_BYTES / 2 ? c->cap * 2 : CHUNK_BYTES;
        size_t cap = need > usual / 4 ? need : usual;
        chunk *fresh = lg__calloc(1, sizeof(chunk) + cap);
        if (fresh == NULL) {
            return NULL;
        }
        fresh->cap = cap;
        /* A large one goes behind the head, whose rest stays usable. */
        if (c != NULL && cap == need) {
            fresh->next = c->next;
            c->next = fresh;
        } else {
            fresh->next = c;
            a->head = fresh;
        }
        c = fresh;
    }
    void *p = c->bytes + c->used;
    c->used += need;
    return p;
}

void *lg__arena_array(lg__arena *a, size_t n, size_t bytes)
{
    if (bytes != 0 && n > SIZE_MAX / bytes) {
        return NULL;
    }
    return lg__arena_alloc(a, n * bytes);
}

char *lg__arena_strndup(lg__arena *a, const char *s, size_t n)
{
    char *copy = lg__arena_alloc(a, n + 1);
    if (copy != NULL && n > 0) {
        memcpy(copy, s, n);
    }
    return copy;
}

char *lg__arena_strdup(lg__arena *a, const char *s) { return lg__arena_strndup(a, s, strlen(s)); }
