/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TESTS_ENVIRONMENT_H
#define LG_TESTS_ENVIRONMENT_H

/* What the environment says of how much a test is to do. */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline uint64_t number_from(const char *name, uint64_t otherwise)
{
    const char *words = getenv(name);
    return words != NULL && *words != '\0' ? strtoull(words, NULL, 0) : otherwise;
}

static inline bool in_form(const char *form)
{
    const char *how = getenv("LASTGOOD_PROVE");
    return how != NULL && strcmp(how, form) == 0;
}

/* `make prove`: all of what else is sampled. */
static inline bool in_full(void) { return in_form("full"); }

/* `make valgrind`, where each round takes some thirty times as long: few rounds,
 * which still go everywhere. */
static inline bool in_brief(void) { return in_form("brief"); }

/* Ends a child of fork. What the parent's threads had in their hands is no leak
 * of the child: valgrind does not look for leaks where another program begins. */
static inline void leave_child(int status)
{
    if (in_brief()) {
        char words[32];
        snprintf(words, sizeof words, "exit %d", status);
        execl("/bin/sh", "sh", "-c", words, (char *)NULL);
    }
    _exit(status);
}

/* A deadline that is to pass, or nearly: what comes in time comes later there. */
static inline uint64_t short_ms(uint64_t ms) { return in_brief() ? 20 * ms : ms; }

#endif
