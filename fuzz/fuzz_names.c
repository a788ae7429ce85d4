/* SPDX-License-Identifier: Apache-2.0 */

/* A name in a root or a step folder, and a path given to a store: a name is
 * ours only if making it anew gives the same bytes, and no valid path leads
 * out. */

#include "base/error.h"
#include "base/json.h"
#include "format/names.h"
#include "fuzz.h"

static void root_name(const char *s)
{
    lg__root_name r = lg__root_name_parse(s);
    char again[LG__NAME_MAX] = "";
    switch (r.kind) {
    case LG__ROOT_STEP:
        lg__step_folder(r.step, r.generation, again);
        break;
    case LG__ROOT_PARTIAL:
        lg__partial_folder(r.step, r.generation, r.attempt, again);
        break;
    case LG__ROOT_OWNER:
        lg__owner_file(r.generation.epoch, again);
        break;
    case LG__ROOT_ROLLBACK:
        lg__rollback_file(r.generation, again);
        break;
    default: /* trash keeps its token to itself */
        FUZZ_CHECK(r.kind != LG__ROOT_TRASH || strncmp(s, ".trash-", 7) == 0, "%s is trash", s);
        return;
    }
    FUZZ_CHECK(strcmp(again, s) == 0, "%s is taken for %s", s, again);
    FUZZ_CHECK(lg__path_valid(s), "a name of ours is no valid path: %s", s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char *s = fuzz_string(data, bytes);
    root_name(s);
    char trash[LG__NAME_MAX];
    lg__trash_name(bytes, "0123456789abcdef", s, trash);
    FUZZ_CHECK(strlen(trash) < LG__NAME_MAX, "too long");
    FUZZ_CHECK(s[0] == '\0' || strcmp(s, ".") == 0 || strchr(s, '/') != NULL ||
                   lg__root_name_parse(trash).kind == LG__ROOT_TRASH,
               "what was thrown away is not found: %s", trash);
    char kind[32], side[LG__NAME_MAX];
    uint32_t n;
    if (lg__side_name_parse(s, kind, &n)) {
        lg__side_file(kind, n, side);
        FUZZ_CHECK(strcmp(side, s) == 0, "%s is taken for %s", s, side);
    }
    lg_error err = LG_ERROR_INIT;
    lg_status st = lg__attach_name_check(s, &err);
    if (st == LG_OK) {
        FUZZ_CHECK(lg__path_valid(s) && strchr(s, '/') == NULL && s[0] != '.', "attached: %s", s);
        FUZZ_CHECK(!lg__side_name_parse(s, kind, &n), "attached like one of ours: %s", s);
    } else {
        fuzz_refused(st, &err);
    }
    if (lg__path_valid(s)) {
        size_t parts = 0;
        for (const char *p = s; p != NULL; p = strchr(p, '/') != NULL ? strchr(p, '/') + 1 : NULL) {
            size_t part = strcspn(p, "/");
            FUZZ_CHECK(part > 0 && part <= 255 && !(part == 1 && p[0] == '.') &&
                           !(part == 2 && p[0] == '.' && p[1] == '.'),
                       "a path that may lead out: %s", s);
            parts++;
        }
        FUZZ_CHECK(parts <= 2, "%zu parts: %s", parts, s);
    }
    free(s);
    return 0;
}
