/* SPDX-License-Identifier: Apache-2.0 */

/* `lastgood get -o`: the file appears when it is complete, replaces none, and
 * nothing else is left, whatever happens meanwhile and whatever the file system
 * can do. The program's own functions, without its main(). */

#include "npy.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/temp_dir.h"

int cmd_help(cli *c) /* main.c has it */
{
    (void)c;
    return CLI_YES;
}

/* What a file system refuses: 0, nothing. */
static int no_noreplace, no_link, no_rename, no_sync;

int __real_renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags);
int __wrap_renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags);
int __wrap_renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags)
{
    errno = no_noreplace;
    return no_noreplace != 0 ? -1 : __real_renameat2(from_fd, from, to_fd, to, flags);
}

int __real_link(const char *from, const char *to);
int __wrap_link(const char *from, const char *to);
int __wrap_link(const char *from, const char *to)
{
    errno = no_link;
    return no_link != 0 ? -1 : __real_link(from, to);
}

int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to)
{
    errno = no_rename;
    return no_rename != 0 ? -1 : __real_rename(from, to);
}

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __wrap_fsync(int fd)
{
    errno = no_sync;
    return no_sync != 0 ? -1 : __real_fsync(fd);
}

static char folder[256], path[300];

static int enter(void **state)
{
    (void)state;
    no_noreplace = no_link = no_rename = no_sync = 0;
    temp_dir_make(folder);
    snprintf(path, sizeof path, "%s/x.npy", folder);
    return 0;
}

static int leave(void **state)
{
    (void)state;
    temp_dir_remove(folder);
    return 0;
}

static void write_file(const char *content)
{
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    assert_true(fputs(content, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static size_t read_file(char out[512])
{
    FILE *f = fopen(path, "re");
    if (f == NULL) {
        return 0;
    }
    size_t n = fread(out, 1, 511, f);
    out[n] = '\0';
    fclose(f);
    return n;
}

/* Names in the folder. */
static int count(void)
{
    char command[600];
    snprintf(command, sizeof command, "exit $(ls -A '%s' | wc -l)", folder);
    return WEXITSTATUS(system(command));
}

static const uint64_t shape[1] = {3};

static npy *begin(cli *c, bool force)
{
    npy *f = NULL;
    assert_int_equal(npy_begin(c, path, force, "|u1", 1, shape, &f), -1);
    assert_int_equal(npy_write(f, "abc", 3), -1);
    return f;
}

static void expect_array(void)
{
    char data[512] = "";
    assert_int_equal(read_file(data), 128 + 3);
    assert_memory_equal(data, "\x93NUMPY\1\0", 8);
    assert_string_equal(data + 128, "abc");
}

static const struct {
    const char *name;
    int no_noreplace, no_link;
} kinds[] = {
    {"all it may need", 0, 0}, {"no renaming without replacing", EINVAL, 0}, {"neither that nor links", EINVAL, EPERM}};

static void on_kind(size_t i)
{
    print_message("#   %s\n", kinds[i].name);
    no_noreplace = kinds[i].no_noreplace;
    no_link = kinds[i].no_link;
}

static void a_file_appears_when_it_is_complete(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        on_kind(i);
        cli c = {0};
        char data[512];
        npy *f = begin(&c, false);
        assert_int_equal(read_file(data), 0);
        assert_int_equal(npy_end(f), -1);
        expect_array();
        assert_int_equal(count(), 1);
        assert_int_equal(unlink(path), 0);
    }
}

static void a_file_that_appears_meanwhile_stays_as_it_is(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        on_kind(i);
        cli c = {0};
        char data[512];
        npy *f = begin(&c, false);
        write_file("mine");
        assert_int_equal(npy_end(f), report_exit(LG_ERR_EXISTS));
        read_file(data);
        assert_string_equal(data, "mine");
        assert_int_equal(count(), 1);
        f = begin(&c, true);
        assert_int_equal(npy_end(f), -1);
        expect_array();
        assert_int_equal(count(), 1);
        assert_int_equal(npy_begin(&c, path, false, "|u1", 1, shape, &f),
                         report_exit(LG_ERR_EXISTS)); /* from the start */
        assert_int_equal(count(), 1);
        assert_int_equal(unlink(path), 0);
    }
}

static void what_fails_at_the_end_leaves_nothing(void **state)
{
    (void)state;
    static const struct {
        int sync, rename;
    } faults[] = {{EIO, 0}, {ENOSPC, 0}, {0, EROFS}};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        for (int force = 0; force < 2; force++) {
            no_noreplace = EINVAL, no_link = EPERM;
            no_sync = faults[i].sync, no_rename = faults[i].rename;
            cli c = {0};
            npy *f = begin(&c, force != 0);
            assert_int_equal(npy_end(f), CLI_TROUBLE);
            assert_int_equal(count(), 0);
        }
    }
}

static void a_signal_leaves_nothing(void **state)
{
    (void)state;
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            cli c = {0};
            npy *f = NULL;
            if (npy_begin(&c, path, false, "|u1", 1, shape, &f) == -1 && count() == 1) {
                raise(signals[i]);
            }
            _exit(1);
        }
        int status = 0;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == signals[i]);
        assert_int_equal(count(), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_file_appears_when_it_is_complete, enter, leave),
        cmocka_unit_test_setup_teardown(a_file_that_appears_meanwhile_stays_as_it_is, enter, leave),
        cmocka_unit_test_setup_teardown(what_fails_at_the_end_leaves_nothing, enter, leave),
        cmocka_unit_test_setup_teardown(a_signal_leaves_nothing, enter, leave),
    };
    return cmocka_run_group_tests_name("npy", tests, NULL, NULL);
}
