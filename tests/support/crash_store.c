/* SPDX-License-Identifier: Apache-2.0 */
#include "crash_store.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct entry {
    char *name;
    uint32_t inode;
} entry;

typedef struct node {
    bool is_dir;
    uint8_t *data; /* files */
    size_t size, cap;
    entry *entries; /* folders */
    size_t n, cap_entries;
} node;

struct crash_store {
    lg_store_ops ops;
    lg_store *handle;
    pthread_mutex_t lock;
    node **nodes; /* by inode; none is freed before the store is */
    size_t n_nodes, cap_nodes;
    bool record;
    crash_event *events;
    size_t n, cap;
    uint64_t temporaries;
};

struct lg_file {
    crash_store *s;
    uint32_t inode;
    bool writable;
    char path[]; /* for messages */
};

static void *must(void *p)
{
    if (p == NULL) {
        abort();
    }
    return p;
}

static void grow(void *array, size_t *cap, size_t n, size_t each)
{
    if (n == *cap) {
        *cap = *cap == 0 ? 16 : *cap * 2;
        void **p = array;
        *p = must(realloc(*p, *cap * each));
    }
}

/* --------------------------------------------------- the record, under the lock */

static crash_event *note(crash_store *s, crash_kind kind)
{
    static _Thread_local crash_event unheard;
    if (!s->record) {
        unheard = (crash_event){0};
        return &unheard;
    }
    grow(&s->events, &s->cap, s->n, sizeof *s->events);
    s->events[s->n] = (crash_event){.kind = kind};
    return &s->events[s->n++];
}

static char *copy_of(const crash_store *s, const char *text) { return s->record ? must(strdup(text)) : NULL; }

static uint32_t node_new(crash_store *s, bool is_dir)
{
    grow(&s->nodes, &s->cap_nodes, s->n_nodes, sizeof(node *));
    node *n = must(calloc(1, sizeof *n));
    n->is_dir = is_dir;
    s->nodes[s->n_nodes] = n;
    return (uint32_t)s->n_nodes++;
}

static entry *look_up(const crash_store *s, uint32_t dir, const char *name)
{
    const node *d = s->nodes[dir];
    for (size_t i = 0; i < d->n; i++) {
        if (strcmp(d->entries[i].name, name) == 0) {
            return &d->entries[i];
        }
    }
    return NULL;
}

static void link_node(crash_store *s, uint32_t dir, const char *name, uint32_t inode)
{
    node *d = s->nodes[dir];
    grow(&d->entries, &d->cap_entries, d->n, sizeof *d->entries);
    d->entries[d->n++] = (entry){must(strdup(name)), inode};
    crash_event *e = note(s, CRASH_LINK);
    e->dir = dir, e->inode = inode, e->is_dir = s->nodes[inode]->is_dir, e->name = copy_of(s, name);
}

static void take_out(node *d, entry *e)
{
    free(e->name);
    *e = d->entries[--d->n];
}

static void unlink_node(crash_store *s, uint32_t dir, const char *name)
{
    entry *there = look_up(s, dir, name);
    crash_event *e = note(s, CRASH_UNLINK);
    e->dir = dir, e->inode = there->inode, e->name = copy_of(s, name);
    take_out(s->nodes[dir], there);
}

static void rename_node(crash_store *s, uint32_t dir, const char *from, const char *to)
{
    uint32_t inode = look_up(s, dir, from)->inode;
    entry *old = look_up(s, dir, to);
    if (old != NULL) {
        take_out(s->nodes[dir], old);
    }
    entry *there = look_up(s, dir, from);
    free(there->name);
    there->name = must(strdup(to));
    crash_event *e = note(s, CRASH_RENAME);
    e->dir = dir, e->inode = inode, e->name = copy_of(s, from), e->to = copy_of(s, to);
}

static void write_node(crash_store *s, uint32_t inode, const void *data, size_t bytes, uint64_t offset)
{
    if (bytes == 0) {
        return;
    }
    node *f = s->nodes[inode];
    size_t end = (size_t)offset + bytes;
    if (end > f->cap) {
        f->cap = end < 2 * f->cap ? 2 * f->cap : end;
        f->data = must(realloc(f->data, f->cap));
    }
    if (offset > f->size) {
        memset(f->data + f->size, 0, (size_t)offset - f->size);
    }
    memcpy(f->data + offset, data, bytes);
    f->size = end > f->size ? end : f->size;
    crash_event *e = note(s, CRASH_WRITE);
    e->inode = inode, e->offset = offset, e->bytes = bytes;
    if (s->record) {
        e->data = memcpy(must(malloc(bytes)), data, bytes);
    }
}

static void sync_node(crash_store *s, uint32_t inode)
{
    crash_event *e = note(s, s->nodes[inode]->is_dir ? CRASH_SYNC_DIR : CRASH_SYNC);
    e->dir = e->inode = inode;
}

/* ------------------------------------------------------------------- the store */

static lg_status fail(lg_error *err, lg_status st, const char *verb, const char *path)
{
    return lg_error_set(err, st, "%s %s: %s", verb, path[0] == '\0' ? "the root" : path, lg_status_text(st));
}

static crash_store *locked(void *ctx)
{
    crash_store *s = ctx;
    pthread_mutex_lock(&s->lock);
    return s;
}

static lg_status unlock(crash_store *s, lg_status st)
{
    pthread_mutex_unlock(&s->lock);
    return st;
}

/* The folder of a path, and its last part. */
static lg_status find_dir(const crash_store *s, const char *path, uint32_t *dir, const char **leaf)
{
    const char *slash = strchr(path, '/');
    *dir = CRASH_ROOT;
    *leaf = path;
    if (slash != NULL) {
        char folder[256];
        snprintf(folder, sizeof folder, "%.*s", (int)(slash - path), path);
        const entry *e = look_up(s, CRASH_ROOT, folder);
        if (e == NULL) {
            return LG_ERR_NOT_FOUND;
        }
        if (!s->nodes[e->inode]->is_dir) {
            return LG_ERR_FORMAT;
        }
        *dir = e->inode;
        *leaf = slash + 1;
    }
    return LG_OK;
}

/* What is there under that name. */
static lg_status find(const crash_store *s, const char *path, bool want_dir, uint32_t *dir, const char **leaf,
                      uint32_t *inode)
{
    lg_status st = find_dir(s, path, dir, leaf);
    const entry *e = st == LG_OK ? look_up(s, *dir, *leaf) : NULL;
    if (st == LG_OK && e == NULL) {
        st = LG_ERR_NOT_FOUND;
    }
    if (st == LG_OK && s->nodes[e->inode]->is_dir != want_dir) {
        st = LG_ERR_FORMAT;
    }
    if (st == LG_OK) {
        *inode = e->inode;
    }
    return st;
}

static lg_status find_free(const crash_store *s, const char *path, uint32_t *dir, const char **leaf)
{
    lg_status st = find_dir(s, path, dir, leaf);
    return st == LG_OK && look_up(s, *dir, *leaf) != NULL ? LG_ERR_EXISTS : st;
}

static lg_status c_make_root(void *ctx, lg_error *err)
{
    (void)ctx, (void)err;
    return LG_OK; /* it is there from the beginning */
}

static lg_status c_make_dir(void *ctx, const char *path, lg_error *err)
{
    crash_store *s = locked(ctx);
    uint32_t dir;
    const char *leaf;
    lg_status st = find_free(s, path, &dir, &leaf);
    if (st == LG_OK) {
        link_node(s, dir, leaf, node_new(s, true));
    }
    return unlock(s, st) == LG_OK ? LG_OK : fail(err, st, "make folder", path);
}

static lg_file *file_new(crash_store *s, uint32_t inode, bool writable, const char *path)
{
    lg_file *f = must(calloc(1, sizeof *f + strlen(path) + 1));
    *f = (lg_file){.s = s, .inode = inode, .writable = writable};
    strcpy(f->path, path);
    return f;
}

static lg_status c_create(void *ctx, const char *path, uint64_t bytes, lg_file **out, lg_error *err)
{
    (void)bytes;
    crash_store *s = locked(ctx);
    uint32_t dir;
    const char *leaf;
    lg_status st = find_free(s, path, &dir, &leaf);
    if (st == LG_OK) {
        uint32_t inode = node_new(s, false);
        link_node(s, dir, leaf, inode);
        *out = file_new(s, inode, true, path);
    }
    return unlock(s, st) == LG_OK ? LG_OK : fail(err, st, "create", path);
}

static lg_status c_open(void *ctx, const char *path, lg_file **out, uint64_t *bytes, lg_error *err)
{
    crash_store *s = locked(ctx);
    uint32_t dir, inode;
    const char *leaf;
    lg_status st = find(s, path, false, &dir, &leaf, &inode);
    if (st == LG_OK) {
        *out = file_new(s, inode, false, path);
        *bytes = s->nodes[inode]->size;
    }
    return unlock(s, st) == LG_OK ? LG_OK : fail(err, st, "open", path);
}

static lg_status c_write(lg_file *f, const void *data, size_t bytes, uint64_t offset, lg_error *err)
{
    if (!f->writable) {
        return fail(err, LG_ERR_INVALID, "write", f->path);
    }
    crash_store *s = locked(f->s);
    write_node(s, f->inode, data, bytes, offset);
    return unlock(s, LG_OK);
}

static lg_status c_read(lg_file *f, void *data, size_t bytes, uint64_t offset, lg_error *err)
{
    crash_store *s = locked(f->s);
    const node *n = s->nodes[f->inode];
    bool whole = offset <= n->size && bytes <= n->size - offset;
    if (whole && bytes > 0) {
        memcpy(data, n->data + offset, bytes);
    }
    return unlock(s, LG_OK) == LG_OK && whole ? LG_OK : fail(err, LG_ERR_CORRUPT, "read", f->path);
}

static lg_status c_sync(lg_file *f, lg_error *err)
{
    (void)err;
    crash_store *s = locked(f->s);
    sync_node(s, f->inode);
    return unlock(s, LG_OK);
}

static lg_status c_close(lg_file *f, lg_error *err)
{
    (void)err;
    free(f);
    return LG_OK;
}

static lg_status dir_of(const crash_store *s, const char *path, uint32_t *out)
{
    uint32_t parent;
    const char *leaf;
    *out = CRASH_ROOT;
    return path[0] == '\0' ? LG_OK : find(s, path, true, &parent, &leaf, out);
}

static lg_status c_sync_dir(void *ctx, const char *path, lg_error *err)
{
    crash_store *s = locked(ctx);
    uint32_t dir;
    lg_status st = dir_of(s, path, &dir);
    if (st == LG_OK) {
        sync_node(s, dir);
    }
    return unlock(s, st) == LG_OK ? LG_OK : fail(err, st, "sync", path);
}

static lg_status c_list(void *ctx, const char *path, int (*fn)(const lg_node *node, void *arg), void *arg,
                        lg_error *err)
{
    crash_store *s = locked(ctx);
    uint32_t dir;
    lg_status st = dir_of(s, path, &dir);
    lg_node *all = NULL;
    size_t n = 0;
    if (st == LG_OK) {
        const node *d = s->nodes[dir];
        n = d->n;
        all = must(calloc(n + 1, sizeof *all));
        for (size_t i = 0; i < n; i++) {
            const node *c = s->nodes[d->entries[i].inode];
            all[i] = (lg_node){.name = must(strdup(d->entries[i].name)),
                               .type = c->is_dir ? LG_NODE_DIR : LG_NODE_FILE,
                               .bytes = c->size};
        }
    }
    unlock(s, st);
    bool stop = false;
    for (size_t i = 0; i < n; i++) {
        stop = stop || fn(&all[i], arg) != 0;
        free((char *)(uintptr_t)all[i].name);
    }
    free(all);
    return st == LG_OK ? LG_OK : fail(err, st, "list", path);
}

static lg_status rename_any(void *ctx, const char *from, const char *to, bool is_dir, lg_error *err)
{
    crash_store *s = locked(ctx);
    uint32_t dir, to_dir, inode;
    const char *leaf, *to_leaf;
    lg_status st = find(s, from, is_dir, &dir, &leaf, &inode);
    if (st == LG_OK) {
        st = is_dir ? find_free(s, to, &to_dir, &to_leaf) : find_dir(s, to, &to_dir, &to_leaf);
    }
    if (st == LG_OK && dir != to_dir) {
        st = LG_ERR_INVALID;
    }
    if (st == LG_OK) {
        rename_node(s, dir, leaf, to_leaf);
    }
    return unlock(s, st) == LG_OK ? LG_OK : fail(err, st, "rename", from);
}

static lg_status c_rename_dir(void *ctx, const char *from, const char *to, lg_error *err)
{
    return rename_any(ctx, from, to, true, err);
}

static lg_status c_rename_file(void *ctx, const char *from, const char *to, lg_error *err)
{
    return rename_any(ctx, from, to, false, err);
}

/* As the POSIX store does: a temporary file beside, synced, then linked. */
static lg_status c_put_new(void *ctx, const char *path, const void *data, size_t bytes, lg_error *err)
{
    crash_store *s = locked(ctx);
    uint32_t dir;
    const char *leaf;
    lg_status st = find_free(s, path, &dir, &leaf);
    if (st == LG_OK) {
        char temporary[64];
        do { /* one of before the cut may lie there */
            snprintf(temporary, sizeof temporary, ".tmp-%016llx", (unsigned long long)++s->temporaries);
        } while (look_up(s, dir, temporary) != NULL);
        uint32_t inode = node_new(s, false);
        link_node(s, dir, temporary, inode);
        write_node(s, inode, data, bytes, 0);
        sync_node(s, inode);
        link_node(s, dir, leaf, inode);
        unlink_node(s, dir, temporary);
    }
    return unlock(s, st) == LG_OK ? LG_OK : fail(err, st, "create", path);
}

static lg_status remove_any(void *ctx, const char *path, bool is_dir, lg_error *err)
{
    crash_store *s = locked(ctx);
    uint32_t dir, inode;
    const char *leaf;
    lg_status st = find(s, path, is_dir, &dir, &leaf, &inode);
    if (st == LG_OK && s->nodes[inode]->n > 0) {
        st = LG_ERR_NOT_EMPTY;
    }
    if (st == LG_OK) {
        unlink_node(s, dir, leaf);
    }
    return unlock(s, st) == LG_OK ? LG_OK : fail(err, st, "remove", path);
}

static lg_status c_remove_file(void *ctx, const char *path, lg_error *err) { return remove_any(ctx, path, false, err); }

static lg_status c_remove_dir(void *ctx, const char *path, lg_error *err) { return remove_any(ctx, path, true, err); }

static const char *c_describe(void *ctx)
{
    (void)ctx;
    return "crash store";
}

/* ------------------------------------------------------------------ life cycle */

crash_store *crash_store_new(uint32_t caps)
{
    crash_store *s = must(calloc(1, sizeof *s));
    pthread_mutex_init(&s->lock, NULL);
    s->ops = (lg_store_ops){
        .version = LG_STORE_OPS_VERSION,
        .caps = caps,
        .make_root = c_make_root,
        .make_dir = c_make_dir,
        .create = c_create,
        .open = c_open,
        .write = c_write,
        .read = c_read,
        .sync = c_sync,
        .close = c_close,
        .sync_dir = c_sync_dir,
        .list = c_list,
        .rename_dir = c_rename_dir,
        .rename_file = c_rename_file,
        .put_new = c_put_new,
        .remove_file = c_remove_file,
        .remove_dir = c_remove_dir,
        .describe = c_describe,
    };
    s->record = true;
    node_new(s, true); /* CRASH_ROOT */
    s->handle = crash_store_another(s);
    return s;
}

lg_store *crash_store_another(crash_store *s)
{
    lg_store *handle = NULL;
    if (lg_store_create(&s->ops, s, &handle, NULL) != LG_OK) {
        abort();
    }
    return handle;
}

void crash_store_free(crash_store *s)
{
    if (s == NULL) {
        return;
    }
    lg_store_free(s->handle);
    for (size_t i = 0; i < s->n_nodes; i++) {
        node *n = s->nodes[i];
        for (size_t k = 0; k < n->n; k++) {
            free(n->entries[k].name);
        }
        free(n->entries);
        free(n->data);
        free(n);
    }
    for (size_t i = 0; i < s->n; i++) {
        free(s->events[i].name);
        free(s->events[i].to);
        free(s->events[i].data);
    }
    free(s->nodes);
    free(s->events);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

lg_store *crash_store_handle(crash_store *s) { return s->handle; }
uint32_t crash_store_caps(const crash_store *s) { return s->ops.caps; }

void crash_store_record(crash_store *s, bool on)
{
    locked(s)->record = on;
    unlock(s, LG_OK);
}

void crash_store_mark(crash_store *s, uint32_t mark, uint64_t value, uint64_t by)
{
    locked(s);
    crash_event *e = note(s, CRASH_MARK);
    e->mark = mark, e->value = value, e->by = by;
    unlock(s, LG_OK);
}

const crash_event *crash_store_events(crash_store *s, size_t *n)
{
    locked(s);
    *n = s->n;
    unlock(s, LG_OK);
    return s->events;
}

void crash_store_put_dir(crash_store *s, const char *name)
{
    locked(s);
    uint32_t inode = node_new(s, true);
    link_node(s, CRASH_ROOT, name, inode);
    sync_node(s, inode);
    sync_node(s, CRASH_ROOT);
    unlock(s, LG_OK);
}

void crash_store_put_file(crash_store *s, const char *folder, const char *name, const void *data, size_t bytes)
{
    locked(s);
    uint32_t dir = folder[0] == '\0' ? CRASH_ROOT : look_up(s, CRASH_ROOT, folder)->inode;
    uint32_t inode = node_new(s, false);
    link_node(s, dir, name, inode);
    write_node(s, inode, data, bytes, 0);
    sync_node(s, inode);
    sync_node(s, dir);
    unlock(s, LG_OK);
}

void crash_events_print(const crash_event *events, size_t from, size_t to)
{
    static const char *const names[] = {"link", "unlink", "rename", "write", "sync", "sync folder", "mark"};
    for (size_t i = from; i < to; i++) {
        const crash_event *e = &events[i];
        fprintf(stderr, "#   %4zu %s", i, names[e->kind]);
        if (e->kind == CRASH_MARK) {
            fprintf(stderr, " %u: %llu by %llu\n", e->mark, (unsigned long long)e->value, (unsigned long long)e->by);
        } else {
            fprintf(stderr, " #%u/%s%s%s (#%u)", e->dir, e->name != NULL ? e->name : "", e->to != NULL ? " -> " : "",
                    e->to != NULL ? e->to : "", e->inode);
            fprintf(stderr, e->kind == CRASH_WRITE ? " %zu bytes\n" : "\n", e->bytes);
        }
    }
}
