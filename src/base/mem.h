/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_BASE_MEM_H
#define LG_BASE_MEM_H

/* All memory of the library comes from here, so that tests can make the n-th
 * allocation fail. */

#include <lastgood/lastgood.h>
#include <stdbool.h>
#include <stddef.h>

/* NULL only when memory is out; a size of 0 gives a unique pointer. */
void *lg__malloc(size_t bytes);
void *lg__calloc(size_t n, size_t bytes); /* NULL on overflow too */
void *lg__realloc(void *p, size_t bytes); /* p stays valid on failure */
void lg__free(void *p);
char *lg__strdup(const char *s);
void *lg__memdup(const void *p, size_t bytes);

/* Whole pages, zeroed, in large ones where the kernel has some, and not
 * inherited by children of fork: for memory that other threads or devices are
 * at while the program forks. NULL when memory is out; freed by lg__pages_free
 * with the same `bytes` (NULL is fine). */
void *lg__pages_new(size_t bytes);
void lg__pages_free(void *p, size_t bytes);

/* Makes room for one more element in an array of *cap elements: doubles it.
 * Returns false when memory is out; *array and *cap are unchanged then. */
bool lg__grow(void **array, size_t *cap, size_t used, size_t element_bytes);

/* Tests: the allocation after `n` more ones fails, and all later ones until
 * the hook is reset with n = SIZE_MAX. */
void lg__mem_fail_after(size_t n);
/* The same, but only that one fails. */
void lg__mem_fail_once(size_t n);
/* Resets the hook; true: it made an allocation fail. */
bool lg__mem_reset(void);
/* Counts one allocation of somebody else's allocator; true: it is to fail. */
bool lg__mem_must_fail(void);

/* A bump allocator: everything is freed at once. For parsed files, whose many
 * small strings and arrays live and die together. */
typedef struct lg__arena lg__arena;
lg__arena *lg__arena_new(void); /* NULL when memory is out */
void lg__arena_free(lg__arena *a);
void *lg__arena_alloc(lg__arena *a, size_t bytes);           /* zeroed, aligned to 16; NULL when out */
void *lg__arena_array(lg__arena *a, size_t n, size_t bytes); /* NULL on overflow too */
char *lg__arena_strndup(lg__arena *a, const char *s, size_t n);
char *lg__arena_strdup(lg__arena *a, const char *s);

lg_status lg__nomem(lg_error *err); /* sets and returns LG_ERR_NOMEM */

#endif
