/* SPDX-License-Identifier: Apache-2.0 */

/* A small checkpoint of three ranks whose files are changed: bytes flipped, set
 * or zeroed, files cut, grown, swapped, removed. It is refused, or what comes
 * out is what was saved. With an odd first byte the checksums that can be made
 * anew without being the writer (of manifest and sums head) are right again and
 * digests are not asked for, so that what lies behind them is reached; then
 * only crashes count, since any values may have been written. */

#include "base/error.h"
#include "base/hash.h"
#include "format/sums.h"
#include "fuzz.h"
#include "support/sample.h"

enum { FILES = 32, EDITS = 8 };

typedef struct file {
    char name[LG__NAME_MAX];
    char *data; /* as written */
    size_t bytes;
    char *now; /* NULL: removed */
    size_t now_bytes;
    bool touched;
} file;

static sample *made;
static file files[FILES];
static size_t n_files;

static int take(const lg_node *node, void *arg)
{
    (void)arg;
    FUZZ_CHECK(n_files < FILES, "more than %d files", FILES);
    snprintf(files[n_files++].name, LG__NAME_MAX, "%s", node->name);
    return 0;
}

static int by_name(const void *a, const void *b) { return strcmp(((const file *)a)->name, ((const file *)b)->name); }

static void make(void)
{
    lg_error err = LG_ERROR_INIT;
    made = sample_make_small(SAMPLE_MEMORY);
    FUZZ_CHECK(lg__store_list(made->store, made->folder, take, NULL, &err) == LG_OK, "%s", err.message);
    qsort(files, n_files, sizeof *files, by_name);
    for (size_t i = 0; i < n_files; i++) {
        files[i].data = build_read(made->store, made->folder, files[i].name, &files[i].bytes);
    }
}

static void become(file *f, char *data, size_t bytes)
{
    free(f->now);
    f->now = data;
    f->now_bytes = bytes;
    f->touched = true;
}

static char *copy_of(const char *data, size_t bytes, size_t room)
{
    char *copy = calloc(1, room + 1);
    FUZZ_CHECK(copy != NULL, "out of memory");
    memcpy(copy, data, bytes < room ? bytes : room);
    return copy;
}

static void edit(fuzz_input *in)
{
    file *f = &files[fuzz_below(in, (uint32_t)n_files)];
    uint8_t how = fuzz_u8(in);
    if (!f->touched) {
        become(f, copy_of(f->data, f->bytes, f->bytes), f->bytes);
    }
    size_t n = f->now_bytes, at = n > 0 && f->now != NULL ? fuzz_below(in, (uint32_t)n) : 0;
    file *other = &files[fuzz_below(in, (uint32_t)n_files)];
    switch (how % 8) {
    case 0:
    case 1:
    case 2: /* a byte, or a few */
        for (size_t i = 0; i <= how / 64u && at + i < n && f->now != NULL; i++) {
            f->now[at + i] = (char)(how & 8 ? f->now[at + i] ^ (1 << (how >> 4 & 7)) : fuzz_u8(in));
        }
        break;
    case 3:
        become(f, copy_of(f->now != NULL ? f->now : "", at, at), at);
        break;
    case 4: /* as long as before, behind a place zeros */
        if (f->now != NULL) {
            memset(f->now + at, 0, n - at);
        }
        break;
    case 5:
        become(f, copy_of(f->now != NULL ? f->now : "", f->now != NULL ? n : 0, n + how / 8u), n + how / 8u);
        break;
    case 6:
        become(f, copy_of(other->data, other->bytes, other->bytes), other->bytes);
        break;
    default:
        become(f, NULL, 0);
    }
}

/* The checksums that whoever writes the folder can make anew. */
static void reseal(file *f)
{
    if (f->now == NULL) {
        return;
    }
    if (strcmp(f->name, LG__MANIFEST) == 0 && f->now_bytes > 21) {
        char digits[9];
        snprintf(digits, sizeof digits, "%08x", lg__crc32c(0, f->now + 21, f->now_bytes - 21));
        memcpy(f->now, "{\"crc32c\":\"", 11);
        memcpy(f->now + 11, digits, 8);
        memcpy(f->now + 19, "\",", 2);
    } else if (strstr(f->name, ".sums") != NULL && f->now_bytes >= LG__SUMS_HEAD_BYTES) {
        uint32_t crc = lg__crc32c(0, f->now, 40);
        for (int i = 0; i < 4; i++) {
            f->now[40 + i] = (char)(crc >> (8 * i));
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (made == NULL) {
        make();
    }
    fuzz_input in = {data, bytes};
    lg_error err = LG_ERROR_INIT;
    bool intent = fuzz_u8(&in) % 2 == 1;
    for (int i = 0; i < EDITS && in.left > 0; i++) {
        edit(&in);
    }
    for (size_t i = 0; i < n_files; i++) {
        file *f = &files[i];
        if (f->touched && intent) {
            reseal(f);
        }
        if (f->touched && f->now != NULL) {
            build_write(made->store, made->folder, f->name, f->now, f->now_bytes);
        } else if (f->touched) {
            char path[2 * LG__NAME_MAX + 2];
            FUZZ_CHECK(lg__path_join(path, sizeof path, made->folder, f->name) &&
                           lg__store_remove_file(made->store, path, &err) == LG_OK,
                       "%s", err.message);
        }
    }
    const char *wrong = sample_open_wrong(made, intent ? LG_LOAD_UNVERIFIED : 0, &err);
    if (wrong != NULL && err.status != LG_OK) {
        fuzz_refused(err.status, &err);
    }
    FUZZ_CHECK(wrong == NULL || intent || err.status != LG_OK, "%s was handed out wrong", wrong);
    for (size_t i = 0; i < n_files; i++) {
        file *f = &files[i];
        if (f->touched) {
            build_write(made->store, made->folder, f->name, f->data, f->bytes);
            free(f->now);
            f->now = NULL;
            f->touched = false;
        }
    }
    return 0;
}
