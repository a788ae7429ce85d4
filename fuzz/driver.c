/* SPDX-License-Identifier: Apache-2.0 */

/* main() for a target where there is no libFuzzer.
 *
 *     fuzz_x              the corpus fuzz/corpus/x, then inputs made from it by
 *                         LASTGOOD_ROUNDS changes, the same ones for the same
 *                         LASTGOOD_SEED; prints TAP
 *     fuzz_x FILE...      these inputs ("-": standard input; a folder: all its
 *                         files), as AFL++ calls it and to look at a finding
 *
 * LASTGOOD_SOURCE names the source tree. What ends the program, or takes more
 * than a minute, is written to crash-x in TMPDIR (or /tmp) before. */

#include "fuzz.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_BYTES ((size_t)1 << 20)
#define SECONDS_MOST 60

typedef struct input {
    uint8_t *data;
    size_t bytes;
} input;

static struct {
    input *all;
    size_t n, cap;
} corpus;

static const char *target; /* "manifest" */
static char crash_path[512];
static const volatile uint8_t *now_data; /* the input that is tried */
static volatile size_t now_bytes;

/* In a sanitizer's runtime, where there is one.
 * NOLINTNEXTLINE(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp): its name */
__attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)(void));

static void keep_input(void)
{
    int fd = open(crash_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd >= 0) {
        ssize_t n = write(fd, (const void *)(uintptr_t)now_data, now_bytes);
        /* NOLINTNEXTLINE(bugprone-signal-handler,cert-sig30-c): the process ends; what is lost is this line */
        dprintf(2, "# the input, %zd bytes, is in %s\n", n, crash_path);
        close(fd);
    }
}

static void died(int signal_number)
{
    if (signal_number == SIGALRM) {
        /* NOLINTNEXTLINE(bugprone-signal-handler,cert-sig30-c): as above */
        dprintf(2, "# %s: no end after %d s\n", target, SECONDS_MOST);
    }
    keep_input();
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void watch(void)
{
    static const int deaths[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM};
    const char *tmp = getenv("TMPDIR");
    snprintf(crash_path, sizeof crash_path, "%.400s/crash-%.60s", tmp != NULL && tmp[0] != '\0' ? tmp : "/tmp", target);
    for (size_t i = 0; i < sizeof deaths / sizeof *deaths; i++) {
        struct sigaction old;
        /* A sanitizer's own handler tells more. */
        if (sigaction(deaths[i], NULL, &old) == 0 && old.sa_handler == SIG_DFL) {
            signal(deaths[i], died);
        }
    }
    if (__sanitizer_set_death_callback != NULL) {
        __sanitizer_set_death_callback(keep_input);
    }
}

/* In memory of exactly its size, so that reading behind it is found. */
static void try_input(const uint8_t *data, size_t bytes)
{
    uint8_t *copy = malloc(bytes > 0 ? bytes : 1);
    FUZZ_CHECK(copy != NULL, "out of memory");
    if (bytes > 0) {
        memcpy(copy, data, bytes);
    }
    now_data = copy;
    now_bytes = bytes;
    alarm(SECONDS_MOST);
    LLVMFuzzerTestOneInput(copy, bytes);
    alarm(0);
    now_bytes = 0;
    free(copy);
}

static void keep(uint8_t *data, size_t bytes)
{
    if (corpus.n == corpus.cap) {
        corpus.cap = corpus.cap > 0 ? 2 * corpus.cap : 64;
        corpus.all = realloc(corpus.all, corpus.cap * sizeof *corpus.all);
        FUZZ_CHECK(corpus.all != NULL, "out of memory");
    }
    corpus.all[corpus.n++] = (input){data, bytes};
}

static bool read_stream(FILE *f)
{
    uint8_t *data = malloc(MOST_BYTES);
    FUZZ_CHECK(data != NULL, "out of memory");
    size_t n = f != NULL ? fread(data, 1, MOST_BYTES, f) : 0;
    if (f == NULL) {
        free(data);
        return false;
    }
    uint8_t *fits = realloc(data, n > 0 ? n : 1);
    FUZZ_CHECK(fits != NULL, "out of memory");
    keep(fits, n);
    return true;
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Files of a folder in the order of their names, so that runs are alike. */
static bool read_folder(const char *path)
{
    DIR *dir = opendir(path);
    char **names = NULL;
    size_t n = 0;
    for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
        if (e->d_name[0] != '.') {
            names = realloc(names, (n + 1) * sizeof *names);
            FUZZ_CHECK(names != NULL, "out of memory");
            names[n++] = strdup(e->d_name);
        }
    }
    if (dir == NULL) {
        return false;
    }
    closedir(dir);
    if (n > 0) {
        qsort(names, n, sizeof *names, by_name);
    }
    for (size_t i = 0; i < n; i++) {
        char file[1400];
        snprintf(file, sizeof file, "%.1000s/%.300s", path, names[i]);
        FILE *f = fopen(file, "rb");
        FUZZ_CHECK(read_stream(f), "cannot read %s", file);
        fclose(f);
        free(names[i]);
    }
    free(names);
    return true;
}

static bool read_path(const char *path)
{
    struct stat st;
    if (strcmp(path, "-") == 0) {
        return read_stream(stdin);
    }
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
        return read_folder(path);
    }
    FILE *f = fopen(path, "rb");
    bool done = read_stream(f);
    if (f != NULL) {
        fclose(f);
    }
    return done;
}

/* ------------------------------------------------------------------ changes */

static uint64_t random_state;

static uint32_t below(size_t n)
{
    uint64_t z = random_state += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)((z ^ z >> 31) % (n > 0 ? n : 1));
}

/* Numbers at whose sides mistakes are made, as bytes and as text. */
static const char *const edges[] = {"0",
                                    "-1",
                                    "2147483648",
                                    "4294967295",
                                    "4294967296",
                                    "9007199254740993",
                                    "9223372036854775807",
                                    "9223372036854775808",
                                    "18446744073709551615",
                                    "18446744073709551616",
                                    "1e3",
                                    "null",
                                    "\"\\u0000\"",
                                    "[[[[[[[[",
                                    "{}",
                                    "\"",
                                    "\\",
                                    "../"};

/* `data` has room for MOST_BYTES. */
static size_t change(uint8_t *data, size_t n)
{
    size_t at = below(n + 1), count = 1 + below(8), from;
    const char *edge;
    const input *other;
    switch (below(9)) {
    case 0:
        if (at < n) {
            data[at] ^= (uint8_t)(1u << below(8));
        }
        return n;
    case 1:
        if (at < n) {
            data[at] = (uint8_t)below(256);
        }
        return n;
    case 2: /* take some out */
        count = count < n - at ? count : n - at;
        memmove(data + at, data + at + count, n - at - count);
        return n - count;
    case 3: /* put some in */
        if (n + count <= MOST_BYTES) {
            memmove(data + at + count, data + at, n - at);
            for (size_t i = 0; i < count; i++) {
                data[at + i] = (uint8_t)below(256);
            }
            n += count;
        }
        return n;
    case 4: /* an edge, over or between what is there */
        edge = edges[below(sizeof edges / sizeof *edges)];
        count = strlen(edge);
        if (n + count > MOST_BYTES) {
            return n;
        }
        from = below(2) == 0 ? at : at + count < n ? at + count : n;
        memmove(data + at + count, data + from, n - from);
        memcpy(data + at, edge, count);
        return n - (from - at) + count;
    case 5: /* eight bytes of one number */
        for (size_t i = 0; i < 8 && at + i < n; i++) {
            data[at + i] = i == 7 && count > 4 ? 0x7F : count % 2 == 0 ? 0xFF : 0;
        }
        return n;
    case 6: /* a piece of it twice */
        from = below(n + 1);
        count = below(64);
        count = count < n - from ? count : n - from;
        if (n + count <= MOST_BYTES) {
            uint8_t piece[64];
            memcpy(piece, data + from, count);
            memmove(data + at + count, data + at, n - at);
            memcpy(data + at, piece, count);
            n += count;
        }
        return n;
    case 7: /* the rest of another one */
        other = &corpus.all[below(corpus.n)];
        from = below(other->bytes + 1);
        count = other->bytes - from;
        if (at + count <= MOST_BYTES && count > 0) {
            memcpy(data + at, other->data + from, count);
            n = at + count;
        }
        return n;
    default:
        return at;
    }
}

static void changed_inputs(size_t rounds)
{
    uint8_t *data = malloc(MOST_BYTES);
    FUZZ_CHECK(data != NULL, "out of memory");
    for (size_t i = 0; i < rounds; i++) {
        const input *one = &corpus.all[below(corpus.n)];
        size_t n = one->bytes;
        if (n > 0) {
            memcpy(data, one->data, n);
        }
        for (uint32_t k = 1 + below(5); k > 0; k--) {
            n = change(data, n);
        }
        try_input(data, n);
    }
    free(data);
}

static unsigned long long setting(const char *name, unsigned long long otherwise)
{
    const char *s = getenv(name);
    return s != NULL && s[0] != '\0' ? strtoull(s, NULL, 10) : otherwise;
}

int main(int argc, char **argv)
{
    const char *slash = strrchr(argv[0], '/');
    target = slash != NULL ? slash + 1 : argv[0];
    target += strncmp(target, "fuzz_", 5) == 0 ? 5 : 0;
    watch();
    FILE *out = stdout; /* a target may put another one in its place */
    for (int i = 1; i < argc; i++) {
        if (!read_path(argv[i])) {
            fprintf(stderr, "%s: cannot read %s\n", target, argv[i]);
            return 2;
        }
    }
    char path[1024];
    const char *source = getenv("LASTGOOD_SOURCE");
    snprintf(path, sizeof path, "%.800s/fuzz/corpus/%.60s", source != NULL ? source : ".", target);
    if (argc == 1 && (!read_folder(path) || corpus.n == 0)) {
        fprintf(stderr, "%s: no corpus in %s; LASTGOOD_SOURCE names the source tree\n", target, path);
        return 2;
    }
    static const uint8_t nothing[1];
    try_input(nothing, 0);
    for (size_t i = 0; i < corpus.n; i++) {
        try_input(corpus.all[i].data, corpus.all[i].bytes);
    }
    if (argc == 1) {
        fprintf(out, "1..2\nok 1 - %s: each of the %zu inputs of the corpus gets a right answer\n", target, corpus.n);
        fflush(out);
        unsigned long long seed = setting("LASTGOOD_SEED", 1), rounds = setting("LASTGOOD_ROUNDS", 3000);
        random_state = seed;
        fprintf(out, "# LASTGOOD_SEED=%llu\n", seed);
        fflush(out);
        changed_inputs((size_t)rounds);
        fprintf(out, "ok 2 - %s: so do inputs changed at random\n# %llu of them\n", target, rounds);
        fflush(out);
    }
    for (size_t i = 0; i < corpus.n; i++) {
        free(corpus.all[i].data);
    }
    free(corpus.all);
    return 0;
}
