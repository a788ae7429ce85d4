/* SPDX-License-Identifier: Apache-2.0 */
#include "io/uring.h"

#include <errno.h>

lg__uring_odds lg__uring_odd;

#ifdef LG__HAVE_URING

#include "base/mem.h"

#include <liburing.h>
#include <pthread.h>
#include <unistd.h>

struct lg__uring {
    struct io_uring ring;
    pid_t pid;
    uint32_t under_way;
    bool registered;
    char *memory;
    size_t bytes;
};

static int init_ring(uint32_t depth, struct io_uring *ring)
{
    if (lg__uring_odd.refuse != 0) {
        return lg__uring_odd.refuse;
    }
    int rc = -EINVAL;
#ifdef IORING_SETUP_DEFER_TASKRUN
    rc = io_uring_queue_init(depth, ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
#endif
    if (rc == -EINVAL) { /* before Linux 6.1 */
        rc = io_uring_queue_init(depth, ring, 0);
    }
    /* Before Linux 5.12 rings count as memory that is locked, of which a user may
     * have little: there may be none of that left, and enough of any other. */
    return rc == -ENOMEM ? EAGAIN : -rc;
}

static bool probe(void)
{
    struct io_uring ring;
    if (init_ring(4, &ring) != 0) {
        return false;
    }
    struct io_uring_probe *p = io_uring_get_probe_ring(&ring);
    static const int needed[] = {IORING_OP_READ,        IORING_OP_WRITE, IORING_OP_READ_FIXED,
                                 IORING_OP_WRITE_FIXED, IORING_OP_FSYNC, IORING_OP_NOP};
    bool all = p != NULL;
    for (size_t i = 0; all && i < sizeof needed / sizeof needed[0]; i++) {
        all = io_uring_opcode_supported(p, needed[i]);
    }
    io_uring_free_probe(p);
    /* Some sandboxes let a ring be made and refuse to run it. */
    struct io_uring_sqe *sqe = all ? io_uring_get_sqe(&ring) : NULL;
    if (sqe != NULL) {
        io_uring_prep_nop(sqe);
        struct io_uring_cqe *cqe;
        all = io_uring_submit_and_wait(&ring, 1) == 1 && io_uring_peek_cqe(&ring, &cqe) == 0 && cqe->res == 0;
    }
    io_uring_queue_exit(&ring);
    return all;
}

static bool works;
static void try_it(void) { works = probe(); }

bool lg__uring_works(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, try_it);
    return works && lg__uring_odd.refuse == 0;
}

int lg__uring_new(uint32_t depth, void *memory, size_t bytes, lg__uring **out)
{
    lg__uring *r = lg__calloc(1, sizeof *r);
    if (r == NULL) {
        return ENOMEM;
    }
    int e = init_ring(depth, &r->ring);
    if (e != 0) {
        lg__free(r);
        return e;
    }
    (void)io_uring_ring_dontfork(&r->ring);
    r->pid = getpid();
    r->memory = memory;
    r->bytes = bytes;
    /* May fail where little memory may be locked: then the kernel looks the
     * pages up for each transfer. */
    const struct iovec all = {memory, bytes};
    r->registered = bytes > 0 && !lg__uring_odd.unregistered && io_uring_register_buffers(&r->ring, &all, 1) == 0;
    *out = r;
    return 0;
}

static bool in_memory(const lg__uring *r, const lg__uring_op *op)
{
    uintptr_t from = (uintptr_t)op->data, start = (uintptr_t)r->memory;
    return r->registered && from >= start && from - start <= r->bytes && op->bytes <= r->bytes - (from - start);
}

int lg__uring_begin(lg__uring *r, const lg__uring_op *op)
{
    if (r->pid != getpid()) {
        return ECHILD;
    }
    struct io_uring_sqe *sqe = io_uring_get_sqe(&r->ring);
    if (sqe == NULL) {
        return EBUSY;
    }
    unsigned n = (unsigned)(lg__uring_odd.most != NULL ? lg__uring_odd.most(op->bytes) : op->bytes);
    switch (op->kind) {
    case LG__URING_READ:
        if (in_memory(r, op)) {
            io_uring_prep_read_fixed(sqe, op->fd, op->data, n, op->offset, 0);
        } else {
            io_uring_prep_read(sqe, op->fd, op->data, n, op->offset);
        }
        break;
    case LG__URING_WRITE:
        if (in_memory(r, op)) {
            io_uring_prep_write_fixed(sqe, op->fd, op->data, n, op->offset, 0);
        } else {
            io_uring_prep_write(sqe, op->fd, op->data, n, op->offset);
        }
        break;
    default:
        io_uring_prep_fsync(sqe, op->fd, 0);
    }
    io_uring_sqe_set_data64(sqe, op->token);
    /* What the kernel does not take now stays in the ring and goes with the
     * wait, which then also says what is wrong. */
    (void)io_uring_submit(&r->ring);
    r->under_way++;
    return 0;
}

int lg__uring_wait(lg__uring *r, uint64_t *token, int *result)
{
    if (r->pid != getpid()) {
        return ECHILD;
    }
    struct io_uring_cqe *cqe = NULL;
    int rc = io_uring_peek_cqe(&r->ring, &cqe);
    while (rc == -EAGAIN || rc == -EINTR) {
        rc = io_uring_submit_and_wait(&r->ring, 1); /* also hands on what did not go at once */
        if (rc >= 0 || rc == -EINTR || rc == -EAGAIN || rc == -EBUSY) {
            rc = io_uring_peek_cqe(&r->ring, &cqe);
        }
    }
    if (rc != 0) {
        return -rc;
    }
    *token = io_uring_cqe_get_data64(cqe);
    *result = lg__uring_odd.answer != NULL ? lg__uring_odd.answer(cqe->res) : cqe->res;
    io_uring_cqe_seen(&r->ring, cqe);
    r->under_way--;
    return 0;
}

void lg__uring_free(lg__uring *r)
{
    if (r == NULL) {
        return;
    }
    if (r->pid == getpid()) {
        uint64_t token;
        int result;
        while (r->under_way > 0 && lg__uring_wait(r, &token, &result) == 0) {
        }
        io_uring_queue_exit(&r->ring);
    }
    lg__free(r);
}

#else

bool lg__uring_works(void) { return false; }
int lg__uring_new(uint32_t depth, void *memory, size_t bytes, lg__uring **out)
{
    (void)depth, (void)memory, (void)bytes, (void)out;
    return ENOSYS;
}
int lg__uring_begin(lg__uring *r, const lg__uring_op *op)
{
    (void)r, (void)op;
    return ENOSYS;
}
int lg__uring_wait(lg__uring *r, uint64_t *token, int *result)
{
    (void)r, (void)token, (void)result;
    return ENOSYS;
}
void lg__uring_free(lg__uring *r) { (void)r; }

#endif
