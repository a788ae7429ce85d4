/* SPDX-License-Identifier: Apache-2.0 */
#include "nearest.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define LONGEST ((size_t)512)
#define FAR SIZE_MAX

/* Edit distance in which two neighbours that changed places count once
 * (optimal string alignment), upper and lower case being the same. */
static size_t distance(const char *a, size_t n, const char *b, size_t m)
{
    size_t rows[3][LONGEST + 1];
    size_t *before = rows[0], *last = rows[1], *now = rows[2];
    for (size_t j = 0; j <= m; j++) {
        last[j] = j;
    }
    for (size_t i = 1; i <= n; i++) {
        now[0] = i;
        for (size_t j = 1; j <= m; j++) {
            int x = tolower((unsigned char)a[i - 1]), y = tolower((unsigned char)b[j - 1]);
            size_t d = last[j - 1] + (x != y);
            d = last[j] + 1 < d ? last[j] + 1 : d;
            d = now[j - 1] + 1 < d ? now[j - 1] + 1 : d;
            if (i > 1 && j > 1 && x == tolower((unsigned char)b[j - 2]) && y == tolower((unsigned char)a[i - 2])) {
                d = before[j - 2] + 1 < d ? before[j - 2] + 1 : d;
            }
            now[j] = d;
        }
        size_t *free_row = before;
        before = last;
        last = now;
        now = free_row;
    }
    return last[m];
}

/* How far apart: a name that contains the other one counts as near, since a
 * prefix ("module.") too many or too few is the usual mistake. */
static size_t far_apart(const char *wanted, const char *name)
{
    size_t n = strlen(wanted), m = strlen(name);
    if (n == 0 || m == 0 || n > LONGEST || m > LONGEST) {
        return FAR;
    }
    if (n >= 3 && m >= 3 && (strcasestr(name, wanted) != NULL || strcasestr(wanted, name) != NULL)) {
        return n > m ? 1 + (n - m) / 16 : 1 + (m - n) / 16;
    }
    size_t limit = (n > m ? n : m) / 3;
    limit = limit < 1 ? 1 : limit > 8 ? 8 : limit;
    if ((n > m ? n - m : m - n) > limit) {
        return FAR;
    }
    size_t d = distance(wanted, n, name, m);
    return d <= limit ? d : FAR;
}

void nearest_begin(nearest *s, const char *wanted) { *s = (nearest){.wanted = wanted}; }

/* Those as near as each other go by name: folders list theirs in any order. */
static bool nearer(size_t d, const char *name, size_t other_d, const char *other)
{
    return d != other_d ? d < other_d : strcmp(name, other) < 0;
}

void nearest_offer(nearest *s, const char *name)
{
    size_t d = far_apart(s->wanted, name);
    if (d == FAR || (s->n == NEAREST_MAX && !nearer(d, name, s->distance[s->n - 1], s->name[s->n - 1]))) {
        return;
    }
    size_t at = s->n < NEAREST_MAX ? s->n++ : NEAREST_MAX - 1;
    for (; at > 0 && nearer(d, name, s->distance[at - 1], s->name[at - 1]); at--) {
        s->name[at] = s->name[at - 1];
        s->distance[at] = s->distance[at - 1];
    }
    s->name[at] = name;
    s->distance[at] = d;
}

char *nearest_text(const nearest *s)
{
    text t = {0};
    for (size_t i = 0; i < s->n; i++) {
        text_add(&t, "%s'%s'", i == 0 ? "" : i + 1 == s->n ? " or " : ", ", s->name[i]);
    }
    return t.data;
}
