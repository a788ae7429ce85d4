/* SPDX-License-Identifier: Apache-2.0 */

/* Where a user points: the URI of a root, ROOT@STEP, ROOT@gE.S, a folder. In
 * an empty folder and on memory stores; absolute paths are left out, since what
 * they find is the machine's. */

#include "base/error.h"
#include "base/json.h"
#include "core/where.h"
#include "fuzz.h"
#include "store/store.h"

#include <unistd.h>

static void enter(void)
{
    static bool there;
    if (!there) {
        char folder[] = "/tmp/lastgood-fuzz-XXXXXX";
        FUZZ_CHECK(mkdtemp(folder) != NULL && chdir(folder) == 0 && rmdir(folder) == 0, "no folder to be in");
        there = true;
    }
}

/* A message shows what the caller gave as it is. */
static void refused(const char *s, lg_status st, const lg_error *err)
{
    bool plain = lg__utf8_valid(s, strlen(s));
    for (const char *p = s; *p != '\0'; p++) {
        plain = plain && (unsigned char)*p >= 0x20 && *p != 0x7F;
    }
    if (plain) {
        fuzz_refused(st, err);
    }
    FUZZ_CHECK(err->status == st && err->message[0] != '\0' && st != LG_ERR_INTERNAL, "%s: %s", lg_status_name(st),
               err->message);
}

static void check_where(const char *s)
{
    lg_error err = LG_ERROR_INIT;
    lg__where w = {0};
    lg_status st = lg__where_parse(s, &w, &err);
    if (st != LG_OK) {
        refused(s, st, &err);
        return;
    }
    FUZZ_CHECK(w.root != NULL && strlen(w.root) <= strlen(s) + 1, "the root of %s is %s", s, w.root);
    const char *at = strrchr(s, '@');
    char text[64];
    if (w.kind == LG__WHERE_STEP) {
        unsigned long long step = strtoull(at + 1, NULL, 10);
        FUZZ_CHECK(step == w.step && strncmp(s, w.root, strlen(w.root)) == 0, "%s is step %llu of %s", s,
                   (unsigned long long)w.step, w.root);
    } else if (w.kind == LG__WHERE_GENERATION) {
        snprintf(text, sizeof text, "%llu.%llu", (unsigned long long)w.generation.epoch,
                 (unsigned long long)w.generation.serial);
        FUZZ_CHECK(strncmp(at, "@g", 2) == 0, "%s is generation %s", s, text);
    }
    lg__where_free(&w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    enter();
    char *s = fuzz_string(data, bytes);
    const char *path = strncmp(s, "file:", 5) == 0 ? s + 5 : s;
    /* NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult): fuzz_string ends it */
    if (path[0] != '/' && strstr(path, "..") == NULL && strchr(path, '%') == NULL) {
        lg_error err = LG_ERROR_INIT;
        lg_store *store = NULL;
        lg_status st = lg_store_open(s, &store, &err);
        if (st != LG_OK) {
            refused(s, st, &err);
            FUZZ_CHECK(store == NULL, "a store in spite of: %s", err.message);
        }
        lg_store_free(store);
        check_where(s);
        lg_checkpoint *c = NULL;
        lg_error none = LG_ERROR_INIT;
        st = lg_checkpoint_open(s, &c, &none);
        FUZZ_CHECK(st != LG_OK, "a checkpoint in an empty folder: %s", s);
        refused(s, st, &none);
        if (strncmp(s, "mem:", 4) == 0) {
            lg_memory_store_drop(s + 4);
        }
        /* NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult): likewise */
    } else if (strncmp(s, "file://", 7) == 0 && s[7] != '/' && strncmp(s + 7, "localhost/", 10) != 0) {
        lg_error err = LG_ERROR_INIT;
        lg_store *store = NULL;
        lg_status st = lg_store_open(s, &store, &err);
        FUZZ_CHECK(st == LG_ERR_INVALID, "another host is taken: %s", s);
        refused(s, st, &err);
    }
    free(s);
    return 0;
}
