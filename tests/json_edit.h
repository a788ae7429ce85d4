/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_JSON_EDIT_H
#define LG_TESTS_JSON_EDIT_H

/* Changes one member of a parsed JSON file, for tables of malformed files. */

#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Sets the member at `path` ("tensors.3.shape") to the JSON text `value`; NULL
 * removes it, and "+TEXT" appends to the array there. False if there is no such
 * place, so that a test cannot miss its aim. */
static inline bool json_edit(json_t *top, const char *path, const char *value)
{
    char copy[256];
    size_t n = strlen(path);
    if (n >= sizeof copy) {
        return false;
    }
    memcpy(copy, path, n + 1);
    json_t *at = top;
    char *key = copy, *dot;
    while ((dot = strchr(key, '.')) != NULL) {
        *dot = '\0';
        at = json_is_array(at) ? json_array_get(at, (size_t)atol(key)) : json_object_get(at, key);
        key = dot + 1;
    }
    json_t *old = json_is_array(at) ? json_array_get(at, (size_t)atol(key)) : json_object_get(at, key);
    if (value == NULL) {
        return old != NULL &&
               (json_is_array(at) ? json_array_remove(at, (size_t)atol(key)) : json_object_del(at, key)) == 0;
    }
    bool append = value[0] == '+';
    json_t *fresh = json_loads(value + append, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    if (fresh == NULL || at == NULL) {
        json_decref(fresh);
        return false;
    }
    if (append) {
        return json_array_append_new(old, fresh) == 0;
    }
    return (json_is_array(at) ? json_array_set_new(at, (size_t)atol(key), fresh)
                              : json_object_set_new(at, key, fresh)) == 0;
}

#endif
