/* SPDX-License-Identifier: Apache-2.0 */

/* Parts of the program `lastgood` by themselves: what its commands cannot be
 * brought to in small, or only where memory is out. Its own functions, without its
 * main(). */

#include "chunk.h"
#include "progress.h"
#include "report.h"
#include "show_parts.h"
#include "table.h"
#include "text.h"
#include "value.h"

#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>

#include <cmocka.h>

int cmd_help(cli *c) /* main.c has it */
{
    (void)c;
    return CLI_YES;
}

static bool no_memory;

int __real_vasprintf(char **out, const char *format, va_list args) LG_PRINTF(2, 0);
int __wrap_vasprintf(char **out, const char *format, va_list args) LG_PRINTF(2, 0);
int __wrap_vasprintf(char **out, const char *format, va_list args)
{
    return no_memory ? -1 : __real_vasprintf(out, format, args); /* *out is undefined then */
}

/* ---------------------------------------------------------------- out of memory */

static cli c;

static void formats(void) { free(need_format("%d", 1)); }
static void reports_trouble(void) { report_trouble(&c, NULL, "%d", 1); }
static void reports_a_status(void) { report_as(&c, LG_ERR_IO, NULL, "%d", 1); }
static void notes(void) { report_note(&c, "%d", 1); }
static void fills_a_table(void)
{
    static const char *const heads[] = {"A"};
    table *t = table_new(&c, 1, heads);
    table_cell(t, STYLE_PLAIN, "%d", 1);
    table_free(t);
}
static void has_none(void) { need(NULL); }
static void writes_what_the_locale_lacks(void)
{
    text t = {0};
    text_add(&t, "%lc", (wint_t)0x20AC); /* the only way to fail for a format that writes nowhere */
    text_free(&t);
}

/* In a child of its own: its exit status, and what it printed. */
static int in_child(void (*fn)(void), char said[512])
{
    int both[2], status = 0;
    assert_int_equal(pipe(both), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(both[1], STDOUT_FILENO);
        dup2(both[1], STDERR_FILENO);
        close(both[0]);
        close(both[1]);
        no_memory = true;
        fn();
        exit(99);
    }
    close(both[1]);
    size_t n = 0;
    for (ssize_t got; n < 511 && (got = read(both[0], said + n, 511 - n)) > 0;) {
        n += (size_t)got;
    }
    said[n] = '\0';
    close(both[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void without_memory_the_program_says_so_and_ends_with_trouble(void **state)
{
    (void)state;
    static void (*const cases[])(void) = {
        formats, reports_trouble, reports_a_status, notes, fills_a_table, has_none, writes_what_the_locale_lacks};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char said[512];
        assert_int_equal(in_child(cases[i], said), CLI_TROUBLE);
        /* Whatever stood before on the line, that is what is said. */
        assert_non_null(strstr(said, "lastgood: out of memory\n"));
    }
}

/* --------------------------------------------------------------------- pieces */

static uint64_t drawn = 1;

static uint64_t draw(uint64_t below)
{
    drawn = drawn * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (drawn >> 33) % below;
}

/* Where an element of the region stands, counted in row-major order. */
static uint64_t index_of(uint32_t ndim, const uint64_t *first, const uint64_t *total, const uint64_t *at)
{
    uint64_t i = 0;
    for (uint32_t d = 0; d < ndim; d++) {
        i = i * total[d] + (at[d] - first[d]);
    }
    return i;
}

static void check_pieces(uint32_t ndim, const uint64_t *first, const uint64_t *total, lg_dtype dtype,
                         uint64_t max_bytes)
{
    chunks k;
    uint64_t next = 0, all = elements_of(ndim, total), pieces = 0, whole = 0;
    unsigned bits = lg_dtype_bits(dtype);
    chunks_begin(&k, ndim, first, total, dtype, max_bytes);
    while (chunks_next(&k)) {
        uint64_t last[LG_MAX_NDIM];
        for (uint32_t d = 0; d < ndim; d++) {
            assert_in_range(k.offset[d], first[d], first[d] + total[d]);
            assert_true(k.size[d] > 0);
            last[d] = k.offset[d] + k.size[d] - 1;
        }
        /* It begins where the one before has ended, and leaves nothing out. */
        assert_int_equal(index_of(ndim, first, total, k.offset), next);
        assert_int_equal(k.elements, elements_of(ndim, k.size));
        next += k.elements;
        assert_int_equal(index_of(ndim, first, total, last), next - 1);
        assert_true(k.elements <= chunks_most(&k));
        if (bits % 8 == 0) {
            assert_true(bytes_of(dtype, k.elements) <= max_bytes || k.elements == 1);
        } else if (next < all) {
            assert_int_equal(k.elements * bits % 8, 0); /* or the next one would begin inside a byte */
        }
        whole += bytes_of(dtype, k.elements);
        pieces++;
    }
    assert_int_equal(next, all);
    assert_int_equal(whole, bytes_of(dtype, all));
    assert_true(pieces > 0 || all == 0);
    assert_false(chunks_next(&k));
}

static void pieces_of_a_region_follow_one_another_and_fill_whole_bytes(void **state)
{
    (void)state;
    static const lg_dtype dtypes[] = {LG_U8, LG_F16, LG_F32, LG_C64, LG_F4, LG_F6_E2M3};
    for (int i = 0; i < 5000; i++) {
        uint64_t first[LG_MAX_NDIM], total[LG_MAX_NDIM];
        uint32_t ndim = (uint32_t)draw(5);
        lg_dtype dtype = dtypes[draw(6)];
        for (uint32_t d = 0; d < ndim; d++) {
            first[d] = draw(10);
            total[d] = draw(20) == 0 ? 0 : 1 + draw(9);
        }
        check_pieces(ndim, first, total, dtype, 8 + draw(200));
    }
}

/* ---------------------------------------------------------------------- words */

static void a_layout_is_told_in_words_even_one_of_a_later_version(void **state)
{
    (void)state;
    static const struct {
        const char *canonical, *words;
    } cases[] = {
        {"{\"kind\":\"split\",\"mesh\":{\"sizes\":[1],\"origin\":3,\"strides\":[1]},\"splits\":[],\"writers\":1}",
         "whole; rank 3"},
        {"{\"kind\":\"split\",\"mesh\":{\"sizes\":[4],\"origin\":2,\"strides\":[1]},\"splits\":[],\"writers\":1}",
         "whole; ranks 2 to 5; 4 ranks hold each part, 1 of them writes"},
        {"{\"kind\":\"copies\",\"mesh\":{\"sizes\":[18],\"origin\":0,\"strides\":[2]}}",
         "each rank keeps its own copy; ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, … (18)"},
        {"{\"kind\":\"spiral\"}", "of a kind that this version does not know"},
        {"{}", "of a kind that this version does not know"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *words = layout_words(cases[i].canonical);
        assert_string_equal(words, cases[i].words);
        free(words);
    }
}

static void a_value_of_state_is_cut_between_characters(void **state)
{
    (void)state;
    static const struct {
        const char *json;
        size_t limit;
        const char *words;
    } cases[] = {
        {"\"abcdef\"", 0, "\"abcdef\""},
        {"\"abcdef\"", 8, "\"abcdef\""},
        {"\"abcdef\"", 4, "\"abc…"},
        {"\"aäöü\"", 3, "\"a…"},
        {"\"aäöü\"", 4, "\"aä…"},
        {"\"aäöü\"", 5, "\"aä…"},
        {"{\"$int\":\"12345\"}", 3, "123…"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *words = state_words(cases[i].json, cases[i].limit);
        assert_string_equal(words, cases[i].words);
        free(words);
    }
}

static void with_bytes_sizes_have_their_bytes(void **state)
{
    (void)state;
    cli exact = {.bytes = true}, plain = {0};
    static const struct {
        uint64_t bytes;
        const char *plain, *exact;
    } cases[] = {
        {0, "0 B", "0 B"},
        {1023, "1023 B", "1023 B"},
        {1536, "1.5 KiB", "1.5 KiB (1536)"},
        {1048575, "1.0 MiB", "1.0 MiB (1048575)"},
        {UINT64_MAX, "16.0 EiB", "16.0 EiB (18446744073709551615)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char out[SIZE_TEXT];
        assert_string_equal(size_text(&plain, cases[i].bytes, out), cases[i].plain);
        assert_string_equal(size_text(&exact, cases[i].bytes, out), cases[i].exact);
    }
}

static void a_status_is_an_answer_or_trouble(void **state)
{
    (void)state;
    assert_int_equal(report_exit(LG_OK), CLI_YES);
    assert_int_equal(report_exit(LG_ERR_CORRUPT), CLI_NO);
    assert_int_equal(report_exit(LG_ERR_EMPTY), CLI_NO);
    assert_int_equal(report_exit(LG_ERR_PROTECTED), CLI_NO);
    assert_int_equal(report_exit(LG_ERR_IO), CLI_TROUBLE);
    assert_int_equal(report_exit(LG_ERR_PERMISSION), CLI_TROUBLE);
    assert_int_equal(report_exit(LG_ERR_NOT_FOUND), CLI_TROUBLE);
}

/* --------------------------------------------------------------------- the bar */

/* A terminal whose other end is *outer. */
static int terminal(int *outer)
{
    *outer = posix_openpt(O_RDWR | O_NOCTTY);
    assert_true(*outer >= 0);
    assert_int_equal(grantpt(*outer), 0);
    assert_int_equal(unlockpt(*outer), 0);
    int inner = open(ptsname(*outer), O_RDWR | O_NOCTTY);
    assert_true(inner >= 0);
    return inner;
}

static void work_of_many_days_is_told_in_hours(void **state)
{
    (void)state;
    int outer, inner = terminal(&outer), before = dup(STDERR_FILENO);
    cli plain = {0};
    setenv("TERM", "xterm", 1);
    fflush(NULL);
    dup2(inner, STDERR_FILENO);
    progress_begin(&plain, "step 100");
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do { /* until some time has passed: no speed is known in none */
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec == start.tv_sec && now.tv_nsec == start.tv_nsec);
    progress_update(1, UINT64_MAX, NULL);
    progress_end();
    dup2(before, STDERR_FILENO);
    close(before);
    close(inner);
    char shown[4096];
    size_t length = 0;
    ssize_t n;
    while ((n = read(outer, shown + length, sizeof shown - 1 - length)) > 0) { /* it arrives in pieces */
        length += (size_t)n;
    }
    close(outer);
    shown[length] = '\0';
    assert_non_null(strstr(shown, "step 100 [...."));
    assert_non_null(strstr(shown, "0%  1 B of 16.0 EiB"));
    assert_non_null(strstr(shown, "99:59:59 left"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_memory_the_program_says_so_and_ends_with_trouble),
        cmocka_unit_test(pieces_of_a_region_follow_one_another_and_fill_whole_bytes),
        cmocka_unit_test(a_layout_is_told_in_words_even_one_of_a_later_version),
        cmocka_unit_test(a_value_of_state_is_cut_between_characters),
        cmocka_unit_test(with_bytes_sizes_have_their_bytes),
        cmocka_unit_test(a_status_is_an_answer_or_trouble),
        cmocka_unit_test(work_of_many_days_is_told_in_hours),
    };
    return cmocka_run_group_tests_name("program", tests, NULL, NULL);
}
