/* SPDX-License-Identifier: Apache-2.0 */

/* Many transfers at once where the machine gives less than it should: no thread,
 * no ring, a ring that fails, an older kernel, a child process. */

#include "base/thread.h"
#include "io/buffers.h"
#include "io/choice.h"
#include "io/uring.h"
#include "store/posix.h"
#include "store/queue.h"
#include "support/check.h"
#include "support/temp_dir.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define LARGE (64 * MIB) /* enough for any engine to be worth it */
#define N ((size_t)4)    /* transfers under way */

/* Linked with --wrap=lg__thread_start: so many more threads can be had. */
static _Atomic int threads_left = INT32_MAX;
bool __real_lg__thread_start(pthread_t *out, void *(*run)(void *arg), void *arg);
bool __wrap_lg__thread_start(pthread_t *out, void *(*run)(void *arg), void *arg);
bool __wrap_lg__thread_start(pthread_t *out, void *(*run)(void *arg), void *arg)
{
    return atomic_fetch_sub(&threads_left, 1) > 0 && __real_lg__thread_start(out, run, arg);
}

typedef struct fixture {
    char dir[256];
    lg_store *s;
    lg_file *files[N];
    uint8_t *data[N];
    size_t descriptors;
} fixture;

static struct {
    bool before_6_1;  /* a ring's newer flags are not known */
    int no_ring;      /* an errno */
    bool takes_none;  /* requests stay in the ring … */
    int broken;       /* … and waiting for them fails: an errno */
    unsigned refused; /* flags */
} kernel;

static int setup(void **state)
{
    lg_error err = LG_ERROR_INIT;
    fixture *x = calloc(1, sizeof *x);
    assert_non_null(x);
    temp_dir_make(x->dir);
    x->descriptors = open_descriptors();
    OK(lg_store_open(x->dir, &x->s, &err));
    for (size_t i = 0; i < N; i++) {
        char name[] = {(char)('a' + i), '\0'};
        OK(lg__store_create(x->s, name, 0, &x->files[i], &err));
        x->data[i] = malloc(MIB);
        assert_non_null(x->data[i]);
        memset(x->data[i], (int)i + 1, MIB);
    }
    *state = x;
    return 0;
}

static int teardown(void **state)
{
    fixture *x = *state;
    lg_error ignored = LG_ERROR_INIT;
    atomic_store(&threads_left, INT32_MAX);
    memset(&kernel, 0, sizeof kernel);
    lg__uring_odd = (lg__uring_odds){0};
    lg__io_set(LG__IO_AUTO, LG__DIRECT_AUTO);
    for (size_t i = 0; i < N; i++) {
        (void)lg__store_close(x->s, x->files[i], &ignored);
        free(x->data[i]);
    }
    lg_store_free(x->s);
    temp_dir_remove(x->dir);
    int result = descriptors_left(x->descriptors);
    free(x);
    return result;
}

static lg_queue_op op_of(const fixture *x, lg_queue_kind kind, size_t i, size_t bytes)
{
    return (lg_queue_op){.kind = kind, .file = x->files[i], .data = x->data[i], .bytes = bytes, .token = 100 + i};
}

static lg__queue *queue_of(const fixture *x, lg__io_engine engine)
{
    lg_error err = LG_ERROR_INIT;
    lg__queue *q = NULL;
    const lg_queue_spec spec = {.depth = N};
    lg__io_set(engine, LG__DIRECT_OFF);
    OK(lg__queue_open(x->s, &spec, LARGE, &q, &err));
    return q;
}

/* Writes all files through the queue, whichever order they end in, and looks at
 * what is in them. */
static void moves_all(const fixture *x, lg__queue *q)
{
    lg_error err = LG_ERROR_INIT;
    bool ended[N] = {false};
    for (size_t i = 0; i < N; i++) {
        const lg_queue_op op = op_of(x, LG_QUEUE_WRITE, i, MIB);
        OK(lg__queue_submit(q, &op, &err));
    }
    assert_true(lg__queue_full(q));
    for (size_t i = 0; i < N; i++) {
        uint64_t token = 0;
        OK(lg__queue_wait(q, &token, &err));
        assert_true(token >= 100 && token < 100 + N && !ended[token - 100]);
        ended[token - 100] = true;
    }
    uint8_t *got = malloc(MIB);
    for (size_t i = 0; i < N; i++) {
        char name[] = {(char)('a' + i), '\0'};
        lg_file *f = NULL;
        uint64_t bytes = 0;
        OK(lg__store_open_file(x->s, name, &f, &bytes, &err));
        assert_int_equal(bytes, MIB);
        OK(lg__store_read(x->s, f, got, MIB, 0, &err));
        assert_memory_equal(got, x->data[i], MIB);
        OK(lg__store_close(x->s, f, &err));
    }
    free(got);
}

/* ------------------------------------------------------------------- threads */

static void no_threads(void **state)
{
    const fixture *x = *state;
    for (int some = 0; some <= 2; some++) { /* none, one, two of the four */
        atomic_store(&threads_left, some);
        lg__queue *q = queue_of(x, LG__IO_THREADS);
        assert_string_equal(lg__queue_engine(q), "threads");
        moves_all(x, q);
        lg__queue_close(q);
    }
}

/* -------------------------------------------------------------- all engines */

static void nothing_to_move(void **state)
{
    const fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    static const lg__io_engine engines[] = {LG__IO_BLOCKING, LG__IO_THREADS, LG__IO_URING};
    for (size_t e = 0; e < (lg__uring_works() ? 3 : 2); e++) {
        lg__queue *q = queue_of(x, engines[e]);
        const lg_queue_op op = op_of(x, LG_QUEUE_WRITE, 2, 0);
        uint64_t token = 0;
        OK(lg__queue_submit(q, &op, &err));
        OK(lg__queue_wait(q, &token, &err));
        assert_int_equal(token, 102);
        FAILS(LG_ERR_INTERNAL, lg__queue_wait(q, &token, &err));
        lg__queue_close(q);
    }
}

static void buffers_beyond_all_memory(void **state)
{
    (void)state;
    lg__buffers b = lg__buffers_new(SIZE_MAX - 1);
    assert_null(b.data);
    lg__buffers_free(&b);
}

/* ----------------------------------------------------------- the environment */

static const char *self;

/* In a process of its own, since the environment is read once: is the engine
 * `want`, or, for "!text", does the refusal say so? */
static int check_environment(const char *dir, const char *want)
{
    lg_error err = LG_ERROR_INIT;
    lg_store *s = NULL;
    lg__queue *q = NULL;
    const lg_queue_spec spec = {.depth = N};
    OK(lg_store_open(dir, &s, &err));
    if (want[0] == '!') {
        FAILS(LG_ERR_INVALID, lg__queue_open(s, &spec, LARGE, &q, &err));
        SAYS(want + 1);
    } else {
        OK(lg__queue_open(s, &spec, LARGE, &q, &err));
        assert_string_equal(lg__queue_engine(q), want);
        assert_string_equal(lg__io_engine_name(lg__io_wanted_engine()), want);
        lg__queue_close(q);
    }
    lg_store_free(s);
    return 0;
}

static void environment(void **state)
{
    const fixture *x = *state;
    const char *best = lg__uring_works() ? "uring" : "threads";
    const struct {
        const char *variable, *value, *want;
    } cases[] = {{"LASTGOOD_IO", "", best},
                 {"LASTGOOD_IO", "auto", best},
                 {"LASTGOOD_IO", "threads", "threads"},
                 {"LASTGOOD_IO", "blocking", "blocking"},
                 {"LASTGOOD_IO", "uring", lg__uring_works() ? "uring" : "!io_uring"},
                 {"LASTGOOD_IO", "Threads", "!LASTGOOD_IO is none of auto, uring, threads, blocking"},
                 {"LASTGOOD_DIRECT", "off", best},
                 {"LASTGOOD_DIRECT", "yes", "!LASTGOOD_DIRECT is none of auto, on, off"},
                 {"LASTGOOD_DEPTH", "7", best},
                 {"LASTGOOD_DEPTH", "-1", "!LASTGOOD_DEPTH is no number from 1 to "}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            unsetenv("LASTGOOD_IO");
            unsetenv("LASTGOOD_DIRECT");
            unsetenv("LASTGOOD_DEPTH");
            setenv(cases[i].variable, cases[i].value, 1);
            execl(self, self, x->dir, cases[i].want, (char *)NULL);
            _exit(99);
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            print_error("%s=%s\n", cases[i].variable, cases[i].value);
            fail();
        }
    }
    assert_string_equal(lg__io_engine_name(LG__IO_UNKNOWN), "?");
}

/* --------------------------------------------------------------------- rings */

#ifdef LG__HAVE_URING

#include <liburing.h>

int __real_io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags);
int __wrap_io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags);
int __wrap_io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags)
{
    if (kernel.no_ring != 0) {
        return -kernel.no_ring;
    }
    if (kernel.before_6_1 && flags != 0) {
        kernel.refused |= flags;
        return -EINVAL;
    }
    return __real_io_uring_queue_init(entries, ring, flags);
}

int __real_io_uring_submit(struct io_uring *ring);
int __wrap_io_uring_submit(struct io_uring *ring);
int __wrap_io_uring_submit(struct io_uring *ring) { return kernel.takes_none ? -EAGAIN : __real_io_uring_submit(ring); }

int __real_io_uring_submit_and_wait(struct io_uring *ring, unsigned n);
int __wrap_io_uring_submit_and_wait(struct io_uring *ring, unsigned n);
int __wrap_io_uring_submit_and_wait(struct io_uring *ring, unsigned n)
{
    return kernel.broken != 0 ? -kernel.broken : __real_io_uring_submit_and_wait(ring, n);
}

static void needs_a_ring(void)
{
    if (!lg__uring_works()) {
        print_message("# skipped, no io_uring here\n");
        skip();
    }
}

static void older_ring(void **state)
{
    const fixture *x = *state;
    needs_a_ring();
    kernel.before_6_1 = true;
    lg__queue *q = queue_of(x, LG__IO_URING);
    assert_string_equal(lg__queue_engine(q), "uring");
    assert_true(kernel.refused != 0);
    moves_all(x, q);
    lg__queue_close(q);
}

static void no_ring(void **state)
{
    const fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    lg__queue *q = NULL;
    lg__uring *ring = NULL;
    const lg_queue_spec spec = {.depth = N};
    /* the last: before Linux 5.12, where little memory may be locked */
    static const int reasons[] = {EMFILE, ENFILE, EPERM, ENOSYS, ENOMEM};
    needs_a_ring();
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) {
        const int says = reasons[i] == ENOMEM ? EAGAIN : reasons[i];
        kernel.no_ring = reasons[i];
        assert_int_equal(lg__uring_new(N, NULL, 0, &ring), says);
        assert_null(ring);
        q = queue_of(x, LG__IO_AUTO);
        assert_string_equal(lg__queue_engine(q), "threads");
        moves_all(x, q);
        lg__queue_close(q);
        /* who wants nothing else is told */
        q = NULL;
        lg__io_set(LG__IO_URING, LG__DIRECT_OFF);
        FAILS(LG_ERR_INVALID, lg__queue_open(x->s, &spec, LARGE, &q, &err));
        SAYS(": io_uring: ");
        assert_int_equal(err.os_errno, says);
        assert_null(q);
    }
    kernel.no_ring = 0;
    lg__uring_odd.refuse = EPERM;
    assert_int_equal(lg__uring_new(N, NULL, 0, &ring), EPERM);
}

static void ring_that_fails(void **state)
{
    const fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    lg_queue *q = NULL;
    uint64_t token = 0;
    const lg_queue_spec spec = {.depth = N};
    needs_a_ring();
    OK(lg__posix_queue_open(NULL, &spec, &q, &err));
    kernel.takes_none = true;
    kernel.broken = EIO;
    const lg_queue_op ops[] = {op_of(x, LG_QUEUE_WRITE, 0, MIB), op_of(x, LG_QUEUE_SYNC, 1, 0)};
    OK(lg__posix_queue_submit(q, &ops[0], &err));
    OK(lg__posix_queue_submit(q, &ops[1], &err));
    /* each of them fails, by name */
    FAILS(LG_ERR_IO, lg__posix_queue_wait(q, &token, &err));
    assert_int_equal(token, 100);
    SAYS("io_uring for a at 0: ");
    assert_int_equal(err.os_errno, EIO);
    FAILS(LG_ERR_NOT_DURABLE, lg__posix_queue_wait(q, &token, &err));
    assert_int_equal(token, 101);
    SAYS("sync b: ");
    FAILS(LG_ERR_INTERNAL, lg__posix_queue_wait(q, &token, &err));
    SAYS("nothing is under way");
    lg__posix_queue_close(q);
    memset(&kernel, 0, sizeof kernel);
    /* what became of the sync is not known: no other makes it good */
    FAILS(LG_ERR_NOT_DURABLE, lg__store_sync(x->s, x->files[1], &err));
    SAYS("it failed before");
    OK(lg__store_sync(x->s, x->files[0], &err));
}

static void more_than_a_ring_holds(void **state)
{
    (void)state;
    lg__uring *ring = NULL;
    const lg__uring_op op = {.kind = LG__URING_READ, .fd = -1};
    needs_a_ring();
    assert_int_equal(lg__uring_new(1, NULL, 0, &ring), 0);
    kernel.takes_none = true;
    assert_int_equal(lg__uring_begin(ring, &op), 0);
    assert_int_equal(lg__uring_begin(ring, &op), EBUSY);
    uint64_t token;
    int result = 0;
    assert_int_equal(lg__uring_wait(ring, &token, &result), 0); /* goes with the wait */
    assert_int_equal(result, -EBADF);
    lg__uring_free(ring);
    lg__uring_free(NULL);
}

/* 0: all was refused, with the names of the files. */
static int use_the_parents_ring(const fixture *x, lg__queue *q)
{
    lg_error err = LG_ERROR_INIT;
    uint64_t token = 0;
    const lg_queue_op op = op_of(x, LG_QUEUE_WRITE, 1, MIB);
    bool right = lg__queue_submit(q, &op, &err) == LG_ERR_IO && strstr(err.message, "io_uring for b at 0") != NULL &&
                 err.os_errno == ECHILD;
    right = right && lg__queue_wait(q, &token, &err) == LG_ERR_IO && token == 100 &&
            strstr(err.message, "io_uring for a at 0") != NULL && err.os_errno == ECHILD;
    lg__queue_close(q);
    return right ? 0 : 1;
}

static void child_process(void **state)
{
    const fixture *x = *state;
    lg_error err = LG_ERROR_INIT;
    uint64_t token = 0;
    needs_a_ring();
    lg__queue *q = queue_of(x, LG__IO_URING);
    const lg_queue_op op = op_of(x, LG_QUEUE_WRITE, 0, MIB);
    OK(lg__queue_submit(q, &op, &err));
    fflush(NULL); /* before the child, which counts what it reached when it ends, ends with what is in the buffers */
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        exit(use_the_parents_ring(x, q));
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(lg__queue_wait(q, &token, &err));
    assert_int_equal(token, 100);
    moves_all(x, q);
    lg__queue_close(q);
}

#endif

#define TEST(name, test)                  \
    {                                     \
        name, test, setup, teardown, NULL \
    }

int main(int argc, char **argv)
{
    self = argv[0];
    if (argc == 3) {
        return check_environment(argv[1], argv[2]);
    }
    static const struct CMUnitTest tests[] = {
        TEST("K17: with too few threads, or none, everything is moved all the same", no_threads),
        TEST("a transfer of nothing ends at once, with every engine", nothing_to_move),
        TEST("K16: buffers beyond all memory are not to be had", buffers_beyond_all_memory),
        TEST("K17: the environment chooses the engine, and a word that is none is refused", environment),
#ifdef LG__HAVE_URING
        TEST("K17: a kernel before 6.1 has rings too", older_ring),
        TEST("K17: where no ring can be made threads take over", no_ring),
        TEST("K01: a ring that fails fails what is under way in it, and a sync for good", ring_that_fails),
        TEST("K16: more than a ring holds is refused", more_than_a_ring_holds),
        TEST("a child process is refused its parent's ring, by the names of its files", child_process),
#endif
    };
    return cmocka_run_group_tests_name("queue", tests, NULL, NULL);
}
