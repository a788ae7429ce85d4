/* SPDX-License-Identifier: Apache-2.0 */
#include "fault_store.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fault_store {
    lg_store_ops ops;
    lg_store *inner, *handle;
    pthread_mutex_t lock;
    fault_plan plan;
    bool armed, dead;
    uint64_t seen, fired; /* operations that the plan is about; those it hit */
    fault_hook hook;
    void *hook_arg;
    fault_event *log;
    size_t n, cap;
};

struct lg_file {
    fault_store *f;
    lg_file *inner;
    char path[520];
};

const char *fault_op_name(fault_op op)
{
    static const char *const names[FAULT_N_OPS] = {
        "make_root", "make_dir", "create",     "open",        "write",   "read",        "sync",       "close",
        "sync_dir",  "list",     "rename_dir", "rename_file", "put_new", "remove_file", "remove_dir", "map"};
    return op < FAULT_N_OPS ? names[op] : "?";
}

static void *must(void *p)
{
    if (p == NULL) {
        abort();
    }
    return p;
}

/* ------------------------------------------------------------ one operation */

typedef struct call {
    fault_store *f;
    fault_event event;
    size_t index; /* in the log */
    bool dead, hit;
    fault_plan plan; /* if hit */
    bool run;        /* is the inner operation to be called? */
    lg_status st;    /* the result when it is not */
} call;

static bool concerns(const fault_plan *p, const fault_event *e)
{
    return (p->kinds & FAULT_BIT(e->op)) != 0 &&
           (p->path == NULL || strstr(e->path, p->path) != NULL || strstr(e->to, p->path) != NULL);
}

/* With f->lock held. */
static bool plan_hits(fault_store *f, const fault_event *e)
{
    if (!f->armed || !concerns(&f->plan, e)) {
        return false;
    }
    f->seen++;
    if (f->seen < f->plan.nth || f->seen - f->plan.nth >= f->plan.times) {
        return false;
    }
    f->fired++;
    return true;
}

static lg_status report(const call *c, lg_error *err)
{
    const fault_plan *p = &c->plan;
    if (p->os_errno != 0) {
        lg_status st =
            lg_error_set_errno(err, p->os_errno, "%s %s (injected)", fault_op_name(c->event.op), c->event.path);
        return err->status = p->status != LG_OK ? p->status : st;
    }
    return lg_error_set(err, p->status != LG_OK ? p->status : LG_ERR_IO, "%s %s: injected error",
                        fault_op_name(c->event.op), c->event.path);
}

static lg_status report_dead(const call *c, lg_error *err)
{
    return lg_error_set(err, LG_ERR_IO, "%s %s: the process is dead (injected)", fault_op_name(c->event.op),
                        c->event.path);
}

/* Starts an operation: records it and decides what becomes of it. */
static call begin(fault_store *f, fault_op op, const char *path, const char *to, uint64_t offset, uint64_t bytes,
                  lg_error *err)
{
    call c = {.f = f, .run = true};
    c.event.op = op;
    c.event.offset = offset;
    c.event.bytes = bytes;
    snprintf(c.event.path, sizeof c.event.path, "%s", path);
    snprintf(c.event.to, sizeof c.event.to, "%s", to);

    pthread_mutex_lock(&f->lock);
    if (f->n == f->cap) {
        f->cap = f->cap == 0 ? 64 : f->cap * 2;
        f->log = must(realloc(f->log, f->cap * sizeof *f->log));
    }
    c.index = f->n++;
    f->log[c.index] = c.event;
    c.dead = f->dead;
    c.hit = !c.dead && plan_hits(f, &c.event);
    if (c.hit) {
        c.plan = f->plan;
        c.run = c.plan.how == FAULT_AFTER || c.plan.how == FAULT_DIE_AFTER;
        f->dead = c.plan.how == FAULT_DIE || c.plan.how == FAULT_DIE_AFTER || c.plan.how == FAULT_DIE_TORN;
    }
    pthread_mutex_unlock(&f->lock);

    if (c.dead) {
        c.run = false;
        c.st = report_dead(&c, err);
        return c;
    }
    if (f->hook != NULL) {
        c.st = f->hook(f, &c.event, true, f->hook_arg, err);
        if (c.st != LG_OK) {
            c.run = false;
            return c;
        }
        if (!c.hit && fault_store_dead(f)) { /* the hook killed it */
            c.run = false;
            c.dead = true;
            c.st = report_dead(&c, err);
            return c;
        }
    }
    if (!c.run) {
        c.st = report(&c, err);
    }
    return c;
}

/* Ends it with the inner operation's result (or c->st if that was not run). */
static lg_status end(call *c, lg_status st, lg_error *err)
{
    fault_store *f = c->f;
    bool faulty = !c->run;
    if (c->run && c->hit) {
        st = report(c, err);
        faulty = true;
    }
    c->event.status = st;
    c->event.ended = true;
    if (f->hook != NULL && !c->dead) {
        lg_error why = LG_ERROR_INIT;
        lg_status instead = f->hook(f, &c->event, false, f->hook_arg, &why);
        if (instead != LG_OK) {
            *err = why;
            st = instead;
            faulty = true;
        }
    }
    pthread_mutex_lock(&f->lock);
    if (c->index < f->n) { /* else cleared meanwhile */
        f->log[c->index].status = st;
        f->log[c->index].ended = true;
        f->log[c->index].faulty = faulty;
    }
    pthread_mutex_unlock(&f->lock);
    return st;
}

/* An operation that has a result but no output. */
#define PASS(f, op, path, to, offset, bytes, err, expr)       \
    do {                                                      \
        call c_ = begin(f, op, path, to, offset, bytes, err); \
        return end(&c_, c_.run ? (expr) : c_.st, err);        \
    } while (0)

static lg_status f_make_root(void *ctx, lg_error *err)
{
    fault_store *f = ctx;
    PASS(f, FAULT_MAKE_ROOT, "", "", 0, 0, err, f->inner->ops->make_root(f->inner->ctx, err));
}

static lg_status f_make_dir(void *ctx, const char *path, lg_error *err)
{
    fault_store *f = ctx;
    PASS(f, FAULT_MAKE_DIR, path, "", 0, 0, err, f->inner->ops->make_dir(f->inner->ctx, path, err));
}

/* An open or create that took place but is reported as failed leaves no file
 * with the caller. */
static lg_status end_open(call *c, lg_status st, lg_file *file, lg_file **out, lg_error *err)
{
    bool opened = c->run && st == LG_OK;
    st = end(c, st, err);
    if (st == LG_OK) {
        lg_file *mine = must(calloc(1, sizeof *mine));
        mine->f = c->f;
        mine->inner = file;
        snprintf(mine->path, sizeof mine->path, "%s", c->event.path);
        *out = mine;
    } else if (opened) {
        lg_error ignored = LG_ERROR_INIT;
        c->f->inner->ops->close(file, &ignored);
    }
    return st;
}

static lg_status f_create(void *ctx, const char *path, uint64_t bytes, lg_file **out, lg_error *err)
{
    fault_store *f = ctx;
    lg_file *file = NULL;
    call c = begin(f, FAULT_CREATE, path, "", 0, bytes, err);
    lg_status st = c.run ? f->inner->ops->create(f->inner->ctx, path, bytes, &file, err) : c.st;
    return end_open(&c, st, file, out, err);
}

static lg_status f_open(void *ctx, const char *path, lg_file **out, uint64_t *bytes, lg_error *err)
{
    fault_store *f = ctx;
    lg_file *file = NULL;
    uint64_t length = 0;
    call c = begin(f, FAULT_OPEN, path, "", 0, 0, err);
    lg_status st = c.run ? f->inner->ops->open(f->inner->ctx, path, &file, &length, err) : c.st;
    st = end_open(&c, st, file, out, err);
    if (st == LG_OK) {
        *bytes = length;
    }
    return st;
}

static lg_status f_write(lg_file *file, const void *data, size_t bytes, uint64_t offset, lg_error *err)
{
    fault_store *f = file->f;
    call c = begin(f, FAULT_WRITE, file->path, "", offset, bytes, err);
    lg_status st = c.st;
    if (c.run) {
        st = f->inner->ops->write(file->inner, data, bytes, offset, err);
    } else if (c.hit && (c.plan.how == FAULT_TORN || c.plan.how == FAULT_DIE_TORN)) {
        lg_error ignored = LG_ERROR_INIT;
        f->inner->ops->write(file->inner, data, bytes / 2, offset, &ignored);
    }
    return end(&c, st, err);
}

static lg_status f_read(lg_file *file, void *data, size_t bytes, uint64_t offset, lg_error *err)
{
    fault_store *f = file->f;
    PASS(f, FAULT_READ, file->path, "", offset, bytes, err, f->inner->ops->read(file->inner, data, bytes, offset, err));
}

static lg_status f_sync(lg_file *file, lg_error *err)
{
    fault_store *f = file->f;
    PASS(f, FAULT_SYNC, file->path, "", 0, 0, err, f->inner->ops->sync(file->inner, err));
}

static lg_status f_close(lg_file *file, lg_error *err)
{
    fault_store *f = file->f;
    call c = begin(f, FAULT_CLOSE, file->path, "", 0, 0, err);
    /* The memory goes whatever the result, as the contract says. */
    lg_error why = LG_ERROR_INIT;
    lg_status st = f->inner->ops->close(file->inner, &why);
    if (c.run && st != LG_OK) {
        *err = why;
    }
    st = end(&c, c.run ? st : c.st, err);
    free(file);
    return st;
}

static lg_status f_sync_dir(void *ctx, const char *path, lg_error *err)
{
    fault_store *f = ctx;
    PASS(f, FAULT_SYNC_DIR, path, "", 0, 0, err, f->inner->ops->sync_dir(f->inner->ctx, path, err));
}

static lg_status f_list(void *ctx, const char *path, int (*fn)(const lg_node *node, void *arg), void *arg,
                        lg_error *err)
{
    fault_store *f = ctx;
    PASS(f, FAULT_LIST, path, "", 0, 0, err, f->inner->ops->list(f->inner->ctx, path, fn, arg, err));
}

static lg_status f_rename_dir(void *ctx, const char *from, const char *to, lg_error *err)
{
    fault_store *f = ctx;
    PASS(f, FAULT_RENAME_DIR, from, to, 0, 0, err, f->inner->ops->rename_dir(f->inner->ctx, from, to, err));
}

static lg_status f_rename_file(void *ctx, const char *from, const char *to, lg_error *err)
{
    fault_store *f = ctx;
    PASS(f, FAULT_RENAME_FILE, from, to, 0, 0, err, f->inner->ops->rename_file(f->inner->ctx, from, to, err));
}

static lg_status f_put_new(void *ctx, const char *path, const void *data, size_t bytes, lg_error *err)
{
    fault_store *f = ctx;
    PASS(f, FAULT_PUT_NEW, path, "", 0, bytes, err, f->inner->ops->put_new(f->inner->ctx, path, data, bytes, err));
}

static lg_status f_remove_file(void *ctx, const char *path, lg_error *err)
{
    fault_store *f = ctx;
    PASS(f, FAULT_REMOVE_FILE, path, "", 0, 0, err, f->inner->ops->remove_file(f->inner->ctx, path, err));
}

static lg_status f_remove_dir(void *ctx, const char *path, lg_error *err)
{
    fault_store *f = ctx;
    PASS(f, FAULT_REMOVE_DIR, path, "", 0, 0, err, f->inner->ops->remove_dir(f->inner->ctx, path, err));
}

static lg_status f_map(lg_file *file, uint64_t offset, size_t bytes, const void **data, void **base, size_t *mapped,
                       lg_error *err)
{
    fault_store *f = file->f;
    const void *got = NULL;
    void *got_base = NULL;
    size_t got_mapped = 0;
    call c = begin(f, FAULT_MAP, file->path, "", offset, bytes, err);
    lg_status st = c.run ? f->inner->ops->map(file->inner, offset, bytes, &got, &got_base, &got_mapped, err) : c.st;
    bool is_mapped = c.run && st == LG_OK;
    st = end(&c, st, err);
    if (st == LG_OK) {
        *data = got;
        *base = got_base;
        *mapped = got_mapped;
    } else if (is_mapped && got_base != NULL) {
        f->inner->ops->unmap(f->inner->ctx, got_base, got_mapped);
    }
    return st;
}

static void f_unmap(void *ctx, void *base, size_t mapped)
{
    fault_store *f = ctx;
    f->inner->ops->unmap(f->inner->ctx, base, mapped);
}

static const char *f_describe(void *ctx) { return lg__store_name(((fault_store *)ctx)->inner); }

/* --------------------------------------------------------------- the helper */

fault_store *fault_store_new(lg_store *inner)
{
    fault_store *f = must(calloc(1, sizeof *f));
    f->inner = inner;
    pthread_mutex_init(&f->lock, NULL);
    f->ops = (lg_store_ops){
        .version = LG_STORE_OPS_VERSION,
        .caps = lg_store_caps(inner),
        .make_root = f_make_root,
        .make_dir = f_make_dir,
        .create = f_create,
        .open = f_open,
        .write = f_write,
        .read = f_read,
        .sync = f_sync,
        .close = f_close,
        .sync_dir = f_sync_dir,
        .list = f_list,
        .rename_dir = f_rename_dir,
        .rename_file = f_rename_file,
        .put_new = f_put_new,
        .remove_file = f_remove_file,
        .remove_dir = f_remove_dir,
        .map = f_map,
        .unmap = f_unmap,
        .describe = f_describe,
    };
    if (lg_store_create(&f->ops, f, &f->handle, NULL) != LG_OK) {
        abort();
    }
    return f;
}

void fault_store_free(fault_store *f)
{
    if (f == NULL) {
        return;
    }
    lg_store_free(f->handle);
    pthread_mutex_destroy(&f->lock);
    free(f->log);
    free(f);
}

lg_store *fault_store_handle(fault_store *f) { return f->handle; }
lg_store *fault_store_inner(fault_store *f) { return f->inner; }

void fault_store_arm(fault_store *f, fault_plan plan)
{
    plan.kinds = plan.kinds == 0 ? FAULT_ANY : plan.kinds;
    plan.nth = plan.nth == 0 ? 1 : plan.nth;
    plan.times = plan.times == 0 ? 1 : plan.times;
    pthread_mutex_lock(&f->lock);
    f->plan = plan;
    f->armed = true;
    f->seen = f->fired = 0;
    pthread_mutex_unlock(&f->lock);
}

void fault_store_disarm(fault_store *f)
{
    pthread_mutex_lock(&f->lock);
    f->armed = false;
    pthread_mutex_unlock(&f->lock);
}

uint64_t fault_store_fired(fault_store *f)
{
    pthread_mutex_lock(&f->lock);
    uint64_t fired = f->fired;
    pthread_mutex_unlock(&f->lock);
    return fired;
}

void fault_store_set_hook(fault_store *f, fault_hook hook, void *arg)
{
    f->hook = hook;
    f->hook_arg = arg;
}

void fault_store_kill(fault_store *f)
{
    pthread_mutex_lock(&f->lock);
    f->dead = true;
    pthread_mutex_unlock(&f->lock);
}

bool fault_store_dead(fault_store *f)
{
    pthread_mutex_lock(&f->lock);
    bool dead = f->dead;
    pthread_mutex_unlock(&f->lock);
    return dead;
}

const fault_event *fault_store_log(fault_store *f, size_t *n)
{
    pthread_mutex_lock(&f->lock);
    *n = f->n;
    pthread_mutex_unlock(&f->lock);
    return f->log;
}

void fault_store_log_clear(fault_store *f)
{
    pthread_mutex_lock(&f->lock);
    f->n = 0;
    pthread_mutex_unlock(&f->lock);
}

uint64_t fault_store_count(fault_store *f, uint32_t kinds)
{
    uint64_t count = 0;
    pthread_mutex_lock(&f->lock);
    for (size_t i = 0; i < f->n; i++) {
        count += (kinds & FAULT_BIT(f->log[i].op)) != 0;
    }
    pthread_mutex_unlock(&f->lock);
    return count;
}

size_t fault_store_find(fault_store *f, size_t from, uint32_t kinds, const char *path)
{
    size_t found = SIZE_MAX;
    fault_plan like = {.kinds = kinds, .path = path};
    pthread_mutex_lock(&f->lock);
    for (size_t i = from; i < f->n && found == SIZE_MAX; i++) {
        found = concerns(&like, &f->log[i]) ? i : SIZE_MAX;
    }
    pthread_mutex_unlock(&f->lock);
    return found;
}

void fault_store_print(fault_store *f)
{
    pthread_mutex_lock(&f->lock);
    for (size_t i = 0; i < f->n; i++) {
        const fault_event *e = &f->log[i];
        fprintf(stderr, "# %4zu %-11s %s%s%s", i, fault_op_name(e->op), e->path, e->to[0] ? " -> " : "", e->to);
        if (e->op == FAULT_WRITE || e->op == FAULT_READ || e->op == FAULT_CREATE || e->op == FAULT_PUT_NEW) {
            fprintf(stderr, " [%llu, +%llu)", (unsigned long long)e->offset, (unsigned long long)e->bytes);
        }
        fprintf(stderr, ": %s%s\n", e->ended ? lg_status_name(e->status) : "not ended", e->faulty ? " (injected)" : "");
    }
    pthread_mutex_unlock(&f->lock);
}
