/* SPDX-License-Identifier: Apache-2.0 */

/* `lastgood bench`: what it says of figures, which are made up here, and what it
 * does where a folder or a device refuses something. The program's own functions,
 * without its main(). */

#include "bench_place.h"
#include "bench_ranks.h"
#include "bench_raw.h"
#include "bench_report.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/environment.h"
#include "support/temp_dir.h"

int cmd_help(cli *c) /* main.c has it */
{
    (void)c;
    return CLI_YES;
}

/* What a file system refuses. */
static bool no_direct;
static int no_sync;

int __real_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    mode_t mode = (flags & O_CREAT) != 0 ? va_arg(args, mode_t) : 0;
    va_end(args);
    if (no_direct && (flags & O_DIRECT) != 0) {
        errno = EINVAL;
        return -1;
    }
    return __real_open64(path, flags, mode);
}

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __wrap_fsync(int fd)
{
    errno = no_sync;
    return no_sync != 0 ? -1 : __real_fsync(fd);
}

#define MIB (UINT64_C(1) << 20)

static char folder[256], path[300];
static size_t descriptors;

static int enter(void **state)
{
    (void)state;
    no_direct = false;
    no_sync = 0;
    temp_dir_make(folder);
    snprintf(path, sizeof path, "%s/x", folder);
    descriptors = open_descriptors();
    return 0;
}

static int leave(void **state)
{
    (void)state;
    temp_dir_remove(folder);
    return descriptors_left(descriptors);
}

static void write_file(const char *name, const char *content)
{
    FILE *f = fopen(name, "we");
    assert_non_null(f);
    assert_true(fputs(content, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

/* ------------------------------------------------------------------- figures */

static bench_result result;
static bench_machine machine;

/* The speed of a row in GB/s, the same in all rounds. */
static void speed(bench_row row, double rate)
{
    result.samples.have[row] = true;
    result.samples.bytes[row] = UINT64_C(1) << 30;
    for (size_t i = 0; i < BENCH_MAX_ROUNDS; i++) {
        result.samples.at[row][i] = (bench_sample){(double)(UINT64_C(1) << 30) / (rate * 1e9), 0.1};
    }
}

/* In every other round that of `second`. */
static void uneven(bench_row row, double first, double second)
{
    double seconds[2] = {1.073741824 / first, 1.073741824 / second};
    speed(row, first);
    for (size_t i = 0; i < BENCH_MAX_ROUNDS; i++) {
        result.samples.at[row][i].seconds = seconds[i % 2];
    }
}

static void rounds(unsigned n)
{
    result.plan.rounds = n;
    result.samples.n = n;
}

/* Everything as fast as its limit, on a machine of which nothing need be said. */
static void all_is_well(void)
{
    memset(&result, 0, sizeof result);
    result.plan =
        (bench_plan){.bytes = UINT64_C(1) << 30, .tensors = 257, .ranks = 1, .buffer_bytes = 64 * MIB, .threads = 4};
    result.bytes = UINT64_C(1) << 30;
    result.direct = true;
    machine = (bench_machine){.cpu = "Some CPU",
                              .cpus = 8,
                              .memory_bytes = 64 << 20,
                              .kernel = "Linux 6.1 x86_64",
                              .file_system = "ext4",
                              .device = "/dev/nvme0n1p2",
                              .device_model = "Disk 1",
                              .space = UINT64_C(1) << 40,
                              .io = "auto",
                              .direct = "auto"};
    rounds(7);
    for (bench_row row = 0; row < N_ROWS; row++) {
        speed(row, row == ROW_VERIFY_1 || row == ROW_COPY_1 ? 10 : 1);
    }
}

static void few_rounds(void) { rounds(5); }
static void in_memory(void)
{
    snprintf(machine.file_system, sizeof machine.file_system, "tmpfs");
    machine.in_memory = true;
}
static void buffered(void) { result.direct = false; }
static void cache_stays(void) { result.cold_left = 0.5; }
static void network(void)
{
    snprintf(machine.file_system, sizeof machine.file_system, "nfs4");
    machine.remote = true;
}
static void slow_save(void) { speed(ROW_SAVE, 0.5); }
static void through_the_cache(void)
{
    slow_save();
    machine.direct = "off";
}
static void blocking(void)
{
    slow_save();
    machine.io = "blocking";
}
static void no_uring(void)
{
    slow_save();
    machine.uring_errno = EPERM;
}
static void small_tensors(void)
{
    slow_save();
    result.plan.tensors = 10486;
}
static void slow_check(void)
{
    slow_save();
    speed(ROW_VERIFY_1, 1.5);
}
static void slow_check_on_two(void)
{
    slow_check();
    machine.cpus = 2;
}
static void small_buffer(void)
{
    slow_save();
    result.plan.buffer_bytes = MIB;
}
static void slow_load(void) { speed(ROW_LOAD_COLD, 0.5); }
static void fast_load(void) { speed(ROW_LOAD_COLD, 1.5); }
static void slow_warm_load(void) { speed(ROW_LOAD_WARM, 0.5); }
static void slow_stall(void) { speed(ROW_STALL_EAGER, 0.5); }
static void slow_fence(void) { speed(ROW_FENCE, 0.5); }
static void not_resolved(void) { uneven(ROW_SLICE, 1, 0.5); }
static void not_resolved_in_20(void)
{
    not_resolved();
    rounds(20);
}
static void not_resolved_in_60(void)
{
    not_resolved();
    rounds(60);
}

static char *said(void)
{
    bench_words w;
    text t = {0};
    bench_words_make(&result, &machine, &w);
    for (size_t i = 0; i < w.n_notes; i++) {
        text_add(&t, "%s\n", w.notes[i]);
    }
    text_add(&t, "%s\n", w.summary);
    for (size_t i = 0; i < w.n_advice; i++) {
        text_add(&t, "- %s\n", w.advice[i]);
    }
    bench_words_free(&w);
    return t.data;
}

static void each_note_and_each_advice_has_its_cause_and_is_not_given_without_it(void **state)
{
    (void)state;
    static const struct {
        void (*cause)(void);
        const char *says;
    } cases[] = {
        {few_rounds, "With fewer than 6 rounds no interval covers 95 %"},
        {in_memory, "tmpfs keeps files in memory"},
        {buffered, "This file system refuses O_DIRECT"},
        {cache_stays, "up to 50 % of a file was in it before a cold load"},
        {network, "nfs4 is a network file system"},
        {through_the_cache, "LASTGOOD_DIRECT=off sends everything through the page cache"},
        {blocking, "LASTGOOD_IO=blocking moves one block after the other"},
        {no_uring, "refuses io_uring (Operation not permitted)"},
        {slow_save, "- Compare the engines on this device"},
        {slow_save, "Below it: save, durable (50 % of raw write)."},
        {small_tensors, "The tensors are small (99 KiB each)"},
        {slow_check, "only 1.5 times as fast as this device writes. Several ranks share that work: --ranks=4."},
        {slow_check_on_two, "--ranks=2."},
        {small_buffer, "- Try more or less memory for transfers"},
        {slow_load, "- Compare the engines on this device"},
        {fast_load, "- A cold load is faster than the raw read"},
        {slow_warm_load, "- A warm load copies and checks every byte"},
        {slow_stall, "- Mark what only the optimizer changes as LG_TENSOR_LAZY"},
        {slow_fence, "- A fence right after the launch is the worst case"},
        {not_resolved, "more rounds (--rounds=15)"},
        {not_resolved, "Not resolved: 64 KiB of it, cold (100 % of raw read of 64 KiB)."},
        {not_resolved_in_20, "more rounds (--rounds=40)"},
        {not_resolved_in_60, "more rounds (--rounds=100)"},
    };
    all_is_well();
    char *well = said();
    assert_true(strncmp(well, "Near its limit: save, durable (100 % of raw write); ", 52) == 0);
    assert_null(strstr(well, "\n-"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        all_is_well();
        cases[i].cause();
        char *now = said();
        if (strstr(now, cases[i].says) == NULL) {
            fail_msg("not said: %s\n%s", cases[i].says, now);
        }
        assert_null(strstr(well, cases[i].says));
        free(now);
    }
    free(well);
}

static void a_row_is_near_its_limit_when_its_whole_interval_is_or_it_is_narrow(void **state)
{
    (void)state;
    static const struct {
        double first, second;
        unsigned rounds;
        bench_verdict verdict;
    } cases[] = {
        {0.86, 0.86, 7, BENCH_IS_NEAR},  {0.84, 0.84, 7, BENCH_IS_BELOW},     {0.87, 0.83, 7, BENCH_IS_NEAR},
        {0.83, 0.87, 7, BENCH_IS_BELOW}, {1.00, 0.50, 7, BENCH_NOT_RESOLVED}, {1.00, 1.00, 5, BENCH_NOT_RESOLVED},
        {1.00, 1.00, 6, BENCH_IS_NEAR},  {0.50, 0.20, 7, BENCH_IS_BELOW},     {2.00, 0.90, 7, BENCH_IS_NEAR},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        all_is_well();
        rounds(cases[i].rounds);
        uneven(ROW_SAVE, cases[i].first, cases[i].second);
        assert_int_equal(bench_summarise(&result.samples, ROW_SAVE).verdict, cases[i].verdict);
    }
}

/* ------------------------------------------------------------------- picture */

static size_t times(const char *all, const char *part)
{
    size_t n = 0;
    for (const char *at = all; (at = strstr(at, part)) != NULL; at += strlen(part)) {
        n++;
    }
    return n;
}

static void an_interval_that_goes_on_beyond_the_picture_ends_in_an_arrow(void **state)
{
    (void)state;
    cli c = {0};
    all_is_well();
    char *svg = bench_svg(&c, &result, &machine);
    assert_int_equal(times(svg, "x1=\"621.0\""), 0);
    free(svg);
    uneven(ROW_LOAD_COLD, 1, 2); /* bars end at 125 %, 625 pixels from the left */
    svg = bench_svg(&c, &result, &machine);
    assert_int_equal(times(svg, "<line x1=\"621.0\""), 2);
    assert_int_equal(times(svg, "x2=\"625.0\" y2="),
                     3 + 1); /* the arrow's lines, the interval's, and the grid's last */
    free(svg);
}

static void names_of_a_machine_are_no_markup_in_the_picture(void **state)
{
    (void)state;
    cli c = {0};
    all_is_well();
    snprintf(machine.cpu, sizeof machine.cpu, "%s", "AT&T <b>CPU</b>");
    snprintf(machine.device, sizeof machine.device, "%s", "host:/a&b\033[31m");
    char *svg = bench_svg(&c, &result, &machine);
    assert_non_null(strstr(svg, "AT&amp;T &lt;b>CPU&lt;/b>, 8 processors"));
    assert_non_null(strstr(svg, "ext4 on host:/a&amp;b\\x1b[31m (Disk 1); engine auto, io_uring permitted"));
    assert_null(strstr(svg, "<b>"));
    assert_null(strchr(svg, '\033'));
    free(svg);
}

static void the_device_is_named_as_far_as_it_is_known(void **state)
{
    (void)state;
    static const struct {
        const char *file_system, *device, *model;
        int uring;
        const char *line;
    } cases[] = {
        {"ext4", "/dev/sda1", "ACME 1", 0, "ext4 on /dev/sda1 (ACME 1); engine auto, io_uring permitted"},
        {"tmpfs", "tmpfs", "", 0, "tmpfs; engine auto, io_uring permitted"},
        {"nfs4", "host:/export", "", EPERM, "nfs4 on host:/export; engine auto, io_uring refused"},
        {"", "", "", 0, "an unknown file system; engine auto, io_uring permitted"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        all_is_well();
        snprintf(machine.file_system, sizeof machine.file_system, "%s", cases[i].file_system);
        snprintf(machine.device, sizeof machine.device, "%s", cases[i].device);
        snprintf(machine.device_model, sizeof machine.device_model, "%s", cases[i].model);
        machine.uring_errno = cases[i].uring;
        char *line = bench_device_line(&machine);
        assert_string_equal(line, cases[i].line);
        free(line);
    }
}

/* -------------------------------------------------------- folders and devices */

static void expect_error(lg_status got, lg_status status, const lg_error *err, const char *says)
{
    assert_int_equal(got, status);
    if (strstr(err->message, says) == NULL) {
        fail_msg("%s", err->message);
    }
}

static void the_folder_is_removed_and_nothing_that_took_its_place(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    char inside[320];
    assert_int_equal(bench_folder_remove(path, &err), LG_OK); /* it is gone already */
    write_file(path, "mine");
    expect_error(bench_folder_remove(path, &err), LG_ERR_NOT_FOUND, &err, "/x: remove: Not a directory");
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(unlink(path), 0);
    char other[300];
    snprintf(other, sizeof other, "%s/other", folder);
    snprintf(inside, sizeof inside, "%s/mine", other);
    assert_int_equal(mkdir(other, 0700), 0);
    write_file(inside, "mine");
    assert_int_equal(symlink(other, path), 0);
    assert_true(bench_folder_remove(path, &err) != LG_OK);
    assert_int_equal(access(inside, F_OK), 0);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(inside, sizeof inside, "%s/link", path);
    assert_int_equal(symlink(other, inside), 0);
    assert_int_equal(bench_folder_remove(path, &err), LG_OK);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(count_names(other), 1);
}

static void a_machine_is_not_looked_at_from_where_nothing_is(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    bench_machine m;
    expect_error(bench_machine_look(path, &m, &err), LG_ERR_NOT_FOUND, &err, path);
    assert_int_equal(bench_machine_look(folder, &m, &err), LG_OK);
    assert_true(m.cpus > 0 && m.memory_bytes > 0 && m.memory_usable <= m.memory_bytes && m.file_system[0] != '\0');
}

static void the_device_s_errors_are_passed_on(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    bench_sample took;
    char *data = aligned_alloc(4096, BENCH_BLOCK), below[320];
    assert_non_null(data);
    memset(data, 7, BENCH_BLOCK);
    expect_error(bench_raw_read(path, 0, BENCH_BLOCK, false, &took, &err), LG_ERR_NOT_FOUND, &err, "/x: read: No such");
    snprintf(below, sizeof below, "%s/y", path);
    expect_error(bench_raw_write(below, data, BENCH_BLOCK, false, &took, &err), LG_ERR_NOT_FOUND, &err,
                 "/x/y: No such");
    no_sync = EIO;
    expect_error(bench_raw_write(path, data, BENCH_BLOCK, false, &took, &err), LG_ERR_IO, &err,
                 "/x: write: Input/output");
    no_sync = 0;
    assert_int_equal(bench_raw_write(path, data, BENCH_BLOCK, false, &took, &err), LG_OK);
    assert_int_equal(bench_raw_read(path, 0, BENCH_BLOCK, false, &took, &err), LG_OK);
    /* The file ends before what is asked for. */
    expect_error(bench_raw_read(path, 4096, BENCH_BLOCK, false, &took, &err), LG_ERR_IO, &err,
                 "/x: read: Input/output");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    expect_error(bench_raw_write(path, data, BENCH_BLOCK, false, &took, &err), LG_ERR_IO, &err, "/x: Is a directory");
    assert_int_equal(count_names(folder), 1);
    free(data);
}

static void what_cannot_be_read_is_not_called_cached(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    expect_error(bench_cache_fill(path, &err), LG_ERR_NOT_FOUND, &err, "/x: read: No such");
    assert_true(bench_cache_drop(path) == 0);
    write_file(path, "some bytes");
    assert_int_equal(bench_cache_fill(folder, &err), LG_OK);
    char link[300];
    snprintf(link, sizeof link, "%s/link", folder);
    assert_int_equal(symlink("/etc/passwd", link), 0); /* is not followed */
    assert_true(bench_cache_fill(folder, &err) != LG_OK);
}

/* --------------------------------------------------------------------- state */

/* The first tensor and one of a mebibyte. */
static const bench_plan small = {.bytes = 17 << 20, .tensors = 2, .ranks = 2, .rounds = 1, .threads = 1};

static void a_state_that_cannot_be_made_leaves_nothing(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    bench_state *s = NULL;
    bench_plan large = small;
    large.bytes = UINT64_C(1) << 60; /* more than a process can address */
    const lg_status got = bench_state_open(&large, path, &s, &err);
    expect_error(got, in_brief() ? got : LG_ERR_NOMEM, &err, "memory for the state"); /* valgrind says EINVAL */
    assert_int_not_equal(got, LG_OK);
    assert_null(s);
    assert_int_equal(count_names(folder), 0);
    write_file(path, "a file where the root should be");
    for (uint32_t ranks = 1; ranks <= 3; ranks++) {
        bench_plan plan = small;
        plan.ranks = ranks;
        assert_true(bench_state_open(&plan, path, &s, &err) != LG_OK);
        assert_non_null(strstr(err.message, path));
        assert_null(s);
    }
    assert_int_equal(bench_state_close(NULL, &err), LG_OK);
}

static void what_was_loaded_is_compared_with_what_was_saved(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    bench_state *s = NULL;
    bench_sample took;
    assert_int_equal(bench_state_open(&small, path, &s, &err), LG_OK);
    bench_state_fill(s, 1);
    assert_int_equal(bench_save(s, &took, &err), LG_OK);
    assert_int_equal(bench_load(s, &took, &err), LG_OK);
    assert_int_equal(bench_load_part(s, 5, 3, &took, &err), LG_OK);
    bench_state_fill(s, 2); /* and that is not what was saved */
    expect_error(bench_load(s, &took, &err), LG_ERR_INTERNAL, &err, "/x: byte 0 of the state is not what was saved");
    expect_error(bench_load_part(s, 5, 3, &took, &err), LG_ERR_INTERNAL, &err,
                 "/x: byte 20480 of the state is not what was saved");
    assert_int_equal(bench_state_close(s, &err), LG_OK);
}

static void a_save_that_finds_no_space_fails_on_all_ranks_and_the_next_one_does_not(void **state)
{
    (void)state;
    lg_error err = LG_ERROR_INIT;
    bench_state *s = NULL;
    bench_async_times took;
    bench_sample sample;
    struct rlimit before, less;
    void (*old)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    less = before;
    less.rlim_cur = MIB;
    assert_int_equal(bench_state_open(&small, path, &s, &err), LG_OK);
    for (int how = 0; how < 3; how++) {
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &less), 0);
        lg_status status = how < 2 ? bench_async(s, how == 1, &took, &err) : bench_save(s, &sample, &err);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        assert_int_equal(status, LG_ERR_NO_SPACE);
        status = how < 2 ? bench_async(s, how == 1, &took, &err) : bench_save(s, &sample, &err);
        assert_int_equal(status, LG_OK);
        assert_int_equal(bench_steps_remove(path, &err), LG_OK);
    }
    assert_int_equal(bench_state_close(s, &err), LG_OK);
    signal(SIGXFSZ, old);
}

static void a_file_system_without_o_direct_is_measured_through_the_page_cache(void **state)
{
    (void)state;
    static bench_result r;
    cli c = {.quiet = true};
    lg_error err = LG_ERROR_INIT;
    no_direct = true;
    assert_int_equal(bench_run(&c, &small, folder, &r, &err), LG_OK);
    assert_false(r.direct);
    for (bench_row row = 0; row < N_ROWS; row++) {
        assert_int_equal(r.samples.have[row],
                         row != ROW_COPY_1 && row != ROW_VERIFY_1); /* one thread: they are the same */
    }
    assert_int_equal(r.bytes, 17 << 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_note_and_each_advice_has_its_cause_and_is_not_given_without_it),
        cmocka_unit_test(a_row_is_near_its_limit_when_its_whole_interval_is_or_it_is_narrow),
        cmocka_unit_test(an_interval_that_goes_on_beyond_the_picture_ends_in_an_arrow),
        cmocka_unit_test(names_of_a_machine_are_no_markup_in_the_picture),
        cmocka_unit_test(the_device_is_named_as_far_as_it_is_known),
        cmocka_unit_test_setup_teardown(the_folder_is_removed_and_nothing_that_took_its_place, enter, leave),
        cmocka_unit_test_setup_teardown(a_machine_is_not_looked_at_from_where_nothing_is, enter, leave),
        cmocka_unit_test_setup_teardown(the_device_s_errors_are_passed_on, enter, leave),
        cmocka_unit_test_setup_teardown(what_cannot_be_read_is_not_called_cached, enter, leave),
        cmocka_unit_test_setup_teardown(a_state_that_cannot_be_made_leaves_nothing, enter, leave),
        cmocka_unit_test_setup_teardown(what_was_loaded_is_compared_with_what_was_saved, enter, leave),
        cmocka_unit_test_setup_teardown(a_save_that_finds_no_space_fails_on_all_ranks_and_the_next_one_does_not, enter,
                                        leave),
        cmocka_unit_test_setup_teardown(a_file_system_without_o_direct_is_measured_through_the_page_cache, enter,
                                        leave),
    };
    return cmocka_run_group_tests_name("bench", tests, NULL, NULL);
}
