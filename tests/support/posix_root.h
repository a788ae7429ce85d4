/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_POSIX_ROOT_H
#define LG_TESTS_POSIX_ROOT_H

/* A store on a new folder, for tests of what only file systems have. */

#include "store/posix.h"
#include "store/store.h"
#include "support/check.h"
#include "support/temp_dir.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

typedef struct fixture {
    char dir[256], root[300];
    lg_store *s;
    size_t descriptors;
    mode_t umask;
} fixture;

static inline fixture *posix_root_make(void)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = calloc(1, sizeof *x);
    assert_non_null(x);
    x->umask = umask(022);
    x->descriptors = open_descriptors();
    temp_dir_make(x->dir);
    snprintf(x->root, sizeof x->root, "%s/root", x->dir);
    OK(lg_store_open(x->root, &x->s, &err));
    OK(lg__store_make_root(x->s, &err));
    return x;
}

/* -1 if a descriptor is left. */
static inline int posix_root_drop(fixture *x)
{
    lg__posix = lg__posix_real;
    umask(x->umask);
    lg_store_free(x->s);
    temp_dir_remove(x->dir);
    int result = descriptors_left(x->descriptors);
    free(x);
    return result;
}

#endif
