/* SPDX-License-Identifier: Apache-2.0 */

/* Roots in this process's memory: for tests, and for ranks that are threads.
 * They behave as a folder does, down to a file that is being written while its
 * folder is renamed, or read after it was removed.
 *
 * Locks: `registry_lock` for the list of roots and their reference counts, one
 * lock a root for its names, one a file for its contents; taken in this order,
 * and never two of a kind. */

#include "base/mem.h"
#include "store/snapshot.h"
#include "store/store.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#define SNAPSHOT_MAX_BYTES ((size_t)1 << 30)

/* -------------------------------------------------------------------- nodes */

/* Contents. Counted apart from the file, since a mapping stays where it is when
 * the file grows into a larger block. */
typedef struct block {
    atomic_size_t refs;
    size_t cap;
    unsigned char bytes[];
} block;

typedef struct entry {
    char *name;
    struct node *node;
} entry;

typedef struct node {
    atomic_size_t refs; /* its entry, and each open file */
    bool is_dir;
    /* folders, under the root's lock: sorted by name */
    entry *entries;
    size_t n, cap;
    /* files, under `lock` */
    pthread_rwlock_t lock;
    block *contents; /* NULL while empty */
    size_t size;
} node;

static void block_unref(block *b)
{
    if (b != NULL && atomic_fetch_sub(&b->refs, 1) == 1) {
        lg__free(b);
    }
}

static block *block_new(size_t cap)
{
    if (cap > SIZE_MAX - sizeof(block)) {
        return NULL;
    }
    block *b = lg__malloc(sizeof(block) + cap);
    if (b != NULL) {
        atomic_init(&b->refs, 1);
        b->cap = cap;
    }
    return b;
}

static node *node_new(bool is_dir)
{
    node *n = lg__calloc(1, sizeof *n);
    if (n != NULL) {
        atomic_init(&n->refs, 1);
        n->is_dir = is_dir;
        pthread_rwlock_init(&n->lock, NULL);
    }
    return n;
}

static void node_unref(node *n)
{
    if (n == NULL || atomic_fetch_sub(&n->refs, 1) != 1) {
        return;
    }
    for (size_t i = 0; i < n->n; i++) {
        lg__free(n->entries[i].name);
        node_unref(n->entries[i].node);
    }
    lg__free(n->entries);
    block_unref(n->contents);
    pthread_rwlock_destroy(&n->lock);
    lg__free(n);
}

/* The place of `name` among the entries; *found says if it is there. */
static size_t look_up(const node *dir, const char *name, bool *found)
{
    size_t low = 0, high = dir->n;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        int c = strcmp(dir->entries[mid].name, name);
        if (c == 0) {
            *found = true;
            return mid;
        }
        if (c < 0) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    *found = false;
    return low;
}

static node *child(const node *dir, const char *name)
{
    bool found;
    size_t i = look_up(dir, name, &found);
    return found ? dir->entries[i].node : NULL;
}

/* Takes over the caller's reference on success; the name must be free. */
static bool insert(node *dir, const char *name, node *what)
{
    bool found;
    size_t i = look_up(dir, name, &found);
    void *array = dir->entries;
    char *copy = lg__strdup(name);
    if (copy == NULL || !lg__grow(&array, &dir->cap, dir->n, sizeof(entry))) {
        lg__free(copy);
        return false;
    }
    dir->entries = array;
    memmove(dir->entries + i + 1, dir->entries + i, (dir->n - i) * sizeof(entry));
    dir->entries[i] = (entry){copy, what};
    dir->n++;
    return true;
}

/* Takes the entry out and returns its node with its reference. */
static node *take(node *dir, const char *name)
{
    bool found;
    size_t i = look_up(dir, name, &found);
    node *n = dir->entries[i].node;
    lg__free(dir->entries[i].name);
    dir->n--;
    memmove(dir->entries + i, dir->entries + i + 1, (dir->n - i) * sizeof(entry));
    return n;
}

/* ----------------------------------------------------------------- registry */

typedef struct memory_root {
    struct memory_root *next; /* in the registry */
    size_t refs;              /* stores; under registry_lock */
    bool listed;              /* in the registry; under registry_lock */
    pthread_mutex_t lock;     /* names, all folders */
    node *top;                /* NULL before make_root */
    char name[];
} memory_root;

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static memory_root *registry;

static void root_free(memory_root *r)
{
    node_unref(r->top);
    pthread_mutex_destroy(&r->lock);
    lg__free(r);
}

/* With registry_lock held. */
static void unlist(memory_root *r)
{
    for (memory_root **p = &registry; *p != NULL; p = &(*p)->next) {
        if (*p == r) {
            *p = r->next;
            r->listed = false;
            return;
        }
    }
}

static memory_root *root_acquire(const char *name)
{
    size_t n = strlen(name) + 1;
    pthread_mutex_lock(&registry_lock);
    memory_root *r = registry;
    while (r != NULL && strcmp(r->name, name) != 0) {
        r = r->next;
    }
    if (r == NULL && (r = lg__calloc(1, sizeof *r + n)) != NULL) {
        memcpy(r->name, name, n);
        pthread_mutex_init(&r->lock, NULL);
        r->listed = true;
        r->next = registry;
        registry = r;
    }
    if (r != NULL) {
        r->refs++;
    }
    pthread_mutex_unlock(&registry_lock);
    return r;
}

static void root_release(memory_root *r)
{
    pthread_mutex_lock(&registry_lock);
    r->refs--;
    if (r->refs == 0 && r->top == NULL && r->listed) {
        unlist(r); /* only looked for, never made */
    }
    bool gone = r->refs == 0 && !r->listed;
    pthread_mutex_unlock(&registry_lock);
    if (gone) {
        root_free(r);
    }
}

void lg_memory_store_drop(const char *name)
{
    if (name == NULL) {
        return;
    }
    pthread_mutex_lock(&registry_lock);
    memory_root *r = registry;
    while (r != NULL && strcmp(r->name, name) != 0) {
        r = r->next;
    }
    bool gone = false;
    if (r != NULL) {
        unlist(r);
        gone = r->refs == 0;
    }
    pthread_mutex_unlock(&registry_lock);
    if (gone) {
        root_free(r);
    }
}

/* -------------------------------------------------------------------- paths */

typedef struct memory_store {
    memory_root *root;
    char uri[]; /* "mem:NAME" */
} memory_store;

#define SHOWN_BYTES 600

static lg_status fail(lg_error *err, lg_status status, const char *verb, const char *path, const char *why)
{
    char buf[SHOWN_BYTES];
    return lg_error_set(err, status, "%s %s: %s", verb, path[0] == '\0' ? "root" : lg__printable(path, buf, sizeof buf),
                        why);
}

static lg_status fail_nomem(lg_error *err, const char *verb, const char *path)
{
    return fail(err, LG_ERR_NOMEM, verb, path, "out of memory");
}

/* With the root's lock held: the folder of `path`, and the last part of it. */
static lg_status go(memory_root *r, const char *path, const char *verb, node **dir, const char **leaf, lg_error *err)
{
    LG__RETURN_IF(r->top == NULL, err, LG_ERR_NOT_FOUND, "no such root");
    const char *slash = strchr(path, '/');
    if (slash == NULL) {
        *dir = r->top;
        *leaf = path;
        return LG_OK;
    }
    char folder[256];
    size_t n = (size_t)(slash - path);
    LG__RETURN_IF(n >= sizeof folder, err, LG_ERR_INVALID, "%s: a name of %zu bytes is too long", verb, n);
    memcpy(folder, path, n);
    folder[n] = '\0';
    node *d = child(r->top, folder);
    if (d == NULL) {
        return fail(err, LG_ERR_NOT_FOUND, verb, path, "no such folder");
    }
    if (!d->is_dir) {
        return fail(err, LG_ERR_FORMAT, verb, path, "the folder is a file");
    }
    *dir = d;
    *leaf = slash + 1;
    return LG_OK;
}

/* The same for a name that must be there, as a folder or as a file. */
static lg_status find(memory_root *r, const char *path, const char *verb, bool want_dir, node **dir, const char **leaf,
                      node **out, lg_error *err)
{
    LG__TRY(go(r, path, verb, dir, leaf, err));
    node *n = child(*dir, *leaf);
    if (n == NULL) {
        return fail(err, LG_ERR_NOT_FOUND, verb, path, "no such name");
    }
    if (n->is_dir != want_dir) {
        return fail(err, LG_ERR_FORMAT, verb, path,
                    want_dir ? "it is a file, not a folder" : "it is a folder, not a regular file");
    }
    *out = n;
    return LG_OK;
}

static memory_root *lock_root(void *ctx)
{
    memory_root *r = ((memory_store *)ctx)->root;
    pthread_mutex_lock(&r->lock);
    return r;
}

static lg_status unlock_root(memory_root *r, lg_status st)
{
    pthread_mutex_unlock(&r->lock);
    return st;
}

/* Gives a new node its name, or frees it. */
static lg_status add(memory_root *r, const char *path, const char *verb, node *n, lg_error *err)
{
    node *dir;
    const char *leaf;
    lg_status st = go(r, path, verb, &dir, &leaf, err);
    if (st == LG_OK && child(dir, leaf) != NULL) {
        st = fail(err, LG_ERR_EXISTS, verb, path, "the name is taken");
    }
    if (st == LG_OK && !insert(dir, leaf, n)) {
        st = fail_nomem(err, verb, path);
    }
    if (st != LG_OK) {
        node_unref(n);
    }
    return st;
}

static lg_status memory_make_root(void *ctx, lg_error *err)
{
    memory_root *r = lock_root(ctx);
    if (r->top == NULL) {
        r->top = node_new(true);
    }
    return unlock_root(r, r->top != NULL ? LG_OK : fail_nomem(err, "make", ""));
}

static lg_status memory_make_dir(void *ctx, const char *path, lg_error *err)
{
    node *n = node_new(true);
    if (n == NULL) {
        return fail_nomem(err, "make folder", path);
    }
    memory_root *r = lock_root(ctx);
    return unlock_root(r, add(r, path, "make folder", n, err));
}

/* -------------------------------------------------------------------- files */

struct lg_file {
    node *node;
    bool writable;
    char path[];
};

/* Takes over one reference of `n`. */
static lg_file *new_file(node *n, bool writable, const char *path)
{
    size_t bytes = strlen(path) + 1;
    lg_file *f = lg__calloc(1, sizeof *f + bytes);
    if (f != NULL) {
        f->node = n;
        f->writable = writable;
        memcpy(f->path, path, bytes);
    }
    return f;
}

/* With the file's lock held for writing, or before anybody else knows it. */
static bool make_room(node *n, size_t need)
{
    size_t cap = n->contents == NULL ? 0 : n->contents->cap;
    if (n->contents != NULL && need <= cap) {
        return true;
    }
    if (cap > 0) {
        cap = cap > SIZE_MAX / 2 || cap * 2 < need ? need : cap * 2;
    } else {
        cap = need;
    }
    block *b = block_new(cap);
    if (b == NULL) {
        return false;
    }
    if (n->contents != NULL) {
        memcpy(b->bytes, n->contents->bytes, n->size);
    }
    block_unref(n->contents);
    n->contents = b;
    return true;
}

static lg_status memory_create(void *ctx, const char *path, uint64_t bytes, lg_file **out, lg_error *err)
{
    node *n = node_new(false);
    lg_file *f = n == NULL ? NULL : new_file(n, true, path);
    if (f == NULL || bytes > SIZE_MAX || (bytes > 0 && !make_room(n, (size_t)bytes))) {
        node_unref(n);
        lg__free(f);
        return fail_nomem(err, "create", path);
    }
    memory_root *r = lock_root(ctx);
    atomic_fetch_add(&n->refs, 1); /* the entry's, which add takes over or frees */
    lg_status st = unlock_root(r, add(r, path, "create", n, err));
    if (st != LG_OK) {
        node_unref(n);
        lg__free(f);
        return st;
    }
    *out = f;
    return LG_OK;
}

static lg_status memory_open(void *ctx, const char *path, lg_file **out, uint64_t *bytes, lg_error *err)
{
    node *dir, *n = NULL;
    const char *leaf;
    memory_root *r = lock_root(ctx);
    lg_status st = find(r, path, "open", false, &dir, &leaf, &n, err);
    if (st == LG_OK) {
        atomic_fetch_add(&n->refs, 1);
    }
    unlock_root(r, st);
    LG__TRY(st);
    lg_file *f = new_file(n, false, path);
    if (f == NULL) {
        node_unref(n);
        return fail_nomem(err, "open", path);
    }
    pthread_rwlock_rdlock(&n->lock);
    *bytes = n->size;
    pthread_rwlock_unlock(&n->lock);
    *out = f;
    return LG_OK;
}

static lg_status check_range(const lg_file *f, bool write, size_t bytes, uint64_t offset, lg_error *err)
{
    const char *verb = write ? "write" : "read";
    if (f->writable != write) {
        return fail(err, LG_ERR_INVALID, verb, f->path,
                    write ? "the file is open for reading only" : "the file is open for writing only");
    }
    if (offset > INT64_MAX || bytes > INT64_MAX - offset) {
        return fail(err, LG_ERR_INVALID, verb, f->path, "offset out of range");
    }
    return LG_OK;
}

static lg_status memory_write(lg_file *f, const void *data, size_t bytes, uint64_t offset, lg_error *err)
{
    LG__TRY(check_range(f, true, bytes, offset, err));
    if (bytes == 0) {
        return LG_OK;
    }
    node *n = f->node;
    size_t start = (size_t)offset, end = start + bytes;
    pthread_rwlock_wrlock(&n->lock);
    bool room = make_room(n, end);
    if (room) {
        if (start > n->size) {
            memset(n->contents->bytes + n->size, 0, start - n->size);
        }
        memcpy(n->contents->bytes + start, data, bytes);
        n->size = end > n->size ? end : n->size;
    }
    pthread_rwlock_unlock(&n->lock);
    return room ? LG_OK : fail_nomem(err, "write", f->path);
}

static lg_status fail_short(lg_error *err, const char *verb, const lg_file *f, size_t size, size_t bytes,
                            uint64_t offset)
{
    char buf[SHOWN_BYTES];
    return lg_error_set(err, LG_ERR_CORRUPT, "%s %s: the file ends at byte %zu, wanted %zu bytes at %llu", verb,
                        lg__printable(f->path, buf, sizeof buf), size, bytes, (unsigned long long)offset);
}

static lg_status memory_read(lg_file *f, void *data, size_t bytes, uint64_t offset, lg_error *err)
{
    LG__TRY(check_range(f, false, bytes, offset, err));
    if (bytes == 0) {
        return LG_OK;
    }
    node *n = f->node;
    pthread_rwlock_rdlock(&n->lock);
    size_t size = n->size;
    bool whole = offset + bytes <= size;
    if (whole) {
        memcpy(data, n->contents->bytes + offset, bytes);
    }
    pthread_rwlock_unlock(&n->lock);
    return whole ? LG_OK : fail_short(err, "read", f, size, bytes, offset);
}

static lg_status memory_sync(lg_file *f, lg_error *err)
{
    (void)f;
    (void)err;
    return LG_OK;
}

static lg_status memory_close(lg_file *f, lg_error *err)
{
    (void)err;
    node_unref(f->node);
    lg__free(f);
    return LG_OK;
}

static lg_status memory_map(lg_file *f, uint64_t offset, size_t bytes, const void **data, void **base, size_t *mapped,
                            lg_error *err)
{
    LG__TRY(check_range(f, false, bytes, offset, err));
    node *n = f->node;
    pthread_rwlock_rdlock(&n->lock);
    size_t size = n->size;
    bool whole = offset + bytes <= size;
    block *b = whole && bytes > 0 ? n->contents : NULL;
    if (b != NULL) {
        atomic_fetch_add(&b->refs, 1);
    }
    pthread_rwlock_unlock(&n->lock);
    if (!whole) {
        return fail_short(err, "map", f, size, bytes, offset);
    }
    *data = b == NULL ? (const void *)"" : b->bytes + offset;
    *base = b;
    *mapped = bytes;
    return LG_OK;
}

static void memory_unmap(void *ctx, void *base, size_t mapped)
{
    (void)ctx;
    (void)mapped;
    block_unref(base);
}

/* -------------------------------------------------------------------- names */

/* With the root's lock held: a folder by path, "" is the root. */
static lg_status find_dir(memory_root *r, const char *path, const char *verb, node **out, lg_error *err)
{
    if (path[0] != '\0') {
        node *dir;
        const char *leaf;
        return find(r, path, verb, true, &dir, &leaf, out, err);
    }
    LG__RETURN_IF(r->top == NULL, err, LG_ERR_NOT_FOUND, "no such root");
    *out = r->top;
    return LG_OK;
}

static lg_status memory_sync_dir(void *ctx, const char *path, lg_error *err)
{
    node *dir;
    memory_root *r = lock_root(ctx);
    return unlock_root(r, find_dir(r, path, "sync", &dir, err));
}

static lg_status memory_list(void *ctx, const char *path, int (*fn)(const lg_node *node, void *arg), void *arg,
                             lg_error *err)
{
    node *dir;
    lg__buf names;
    lg__buf_init(&names, SNAPSHOT_MAX_BYTES);
    memory_root *r = lock_root(ctx);
    lg_status st = find_dir(r, path, "list", &dir, err);
    for (size_t i = 0; st == LG_OK && i < dir->n; i++) {
        node *n = dir->entries[i].node;
        pthread_rwlock_rdlock(&n->lock);
        size_t size = n->size;
        pthread_rwlock_unlock(&n->lock);
        lg__snapshot_add(&names, dir->entries[i].name, n->is_dir ? LG_NODE_DIR : LG_NODE_FILE, size);
    }
    unlock_root(r, st);
    LG__TRY(st);
    return lg__snapshot_visit(&names, fn, arg, err);
}

static lg_status rename_dir(memory_root *r, const char *from, const char *to, lg_error *err)
{
    node *a, *b, *n;
    const char *a_leaf, *b_leaf;
    LG__TRY(find(r, from, "rename", true, &a, &a_leaf, &n, err));
    LG__TRY(go(r, to, "rename", &b, &b_leaf, err));
    if (child(b, b_leaf) != NULL) {
        return fail(err, LG_ERR_EXISTS, "rename to", to, "the name is taken");
    }
    if (b == n) {
        return fail(err, LG_ERR_INVALID, "rename to", to, "a folder cannot go into itself");
    }
    if (!insert(b, b_leaf, n)) {
        return fail_nomem(err, "rename", from);
    }
    take(a, a_leaf);
    return LG_OK;
}

static lg_status memory_rename_dir(void *ctx, const char *from, const char *to, lg_error *err)
{
    memory_root *r = lock_root(ctx);
    return unlock_root(r, rename_dir(r, from, to, err));
}

static lg_status rename_file(memory_root *r, const char *from, const char *to, node **replaced, lg_error *err)
{
    node *dir, *n;
    const char *a_leaf, *b_leaf;
    LG__TRY(find(r, from, "rename", false, &dir, &a_leaf, &n, err));
    LG__TRY(go(r, to, "rename", &dir, &b_leaf, err));
    bool found;
    size_t i = look_up(dir, b_leaf, &found);
    if (found) {
        node *old = dir->entries[i].node;
        if (old->is_dir) {
            return fail(err, LG_ERR_FORMAT, "rename to", to, "it is a folder, not a regular file");
        }
        if (old != n) {
            dir->entries[i].node = n;
            take(dir, a_leaf);
            *replaced = old;
        }
        return LG_OK;
    }
    if (!insert(dir, b_leaf, n)) {
        return fail_nomem(err, "rename", from);
    }
    take(dir, a_leaf);
    return LG_OK;
}

static lg_status memory_rename_file(void *ctx, const char *from, const char *to, lg_error *err)
{
    node *replaced = NULL;
    memory_root *r = lock_root(ctx);
    lg_status st = unlock_root(r, rename_file(r, from, to, &replaced, err));
    node_unref(replaced);
    return st;
}

static lg_status memory_put_new(void *ctx, const char *path, const void *data, size_t bytes, lg_error *err)
{
    node *n = node_new(false);
    if (n == NULL || (bytes > 0 && !make_room(n, bytes))) {
        node_unref(n);
        return fail_nomem(err, "create", path);
    }
    if (bytes > 0) {
        memcpy(n->contents->bytes, data, bytes);
    }
    n->size = bytes;
    memory_root *r = lock_root(ctx);
    return unlock_root(r, add(r, path, "create", n, err));
}

static lg_status remove_node(void *ctx, const char *path, bool is_dir, lg_error *err)
{
    node *dir, *n = NULL;
    const char *leaf;
    memory_root *r = lock_root(ctx);
    lg_status st = find(r, path, is_dir ? "remove folder" : "remove", is_dir, &dir, &leaf, &n, err);
    if (st == LG_OK && n->n > 0) {
        st = fail(err, LG_ERR_NOT_EMPTY, "remove folder", path, "it has names in it");
    }
    if (st == LG_OK) {
        take(dir, leaf);
    }
    unlock_root(r, st);
    if (st == LG_OK) {
        node_unref(n);
    }
    return st;
}

static lg_status memory_remove_file(void *ctx, const char *path, lg_error *err)
{
    return remove_node(ctx, path, false, err);
}

static lg_status memory_remove_dir(void *ctx, const char *path, lg_error *err)
{
    return remove_node(ctx, path, true, err);
}

/* --------------------------------------------------------------- life cycle */

static const char *memory_describe(void *ctx) { return ((memory_store *)ctx)->uri; }

static void memory_destroy(void *ctx)
{
    root_release(((memory_store *)ctx)->root);
    lg__free(ctx);
}

static const lg_store_ops table = {
    .version = LG_STORE_OPS_VERSION,
    .caps = LG_CAP_RENAME_DIR | LG_CAP_NO_REPLACE | LG_CAP_SYNC_DIR | LG_CAP_RANGE_READ | LG_CAP_CONDITIONAL_CREATE |
            LG_CAP_MAP,
    .make_root = memory_make_root,
    .make_dir = memory_make_dir,
    .create = memory_create,
    .open = memory_open,
    .write = memory_write,
    .read = memory_read,
    .sync = memory_sync,
    .close = memory_close,
    .sync_dir = memory_sync_dir,
    .list = memory_list,
    .rename_dir = memory_rename_dir,
    .rename_file = memory_rename_file,
    .put_new = memory_put_new,
    .remove_file = memory_remove_file,
    .remove_dir = memory_remove_dir,
    .map = memory_map,
    .unmap = memory_unmap,
    .describe = memory_describe,
    .destroy = memory_destroy,
};

lg_status lg__memory_store_open(const char *name, lg_store **out, lg_error *err)
{
    static const char scheme[] = "mem:";
    size_t n = strlen(name) + 1;
    memory_store *s = lg__calloc(1, sizeof *s + sizeof scheme - 1 + n);
    if (s == NULL) {
        return lg__nomem(err);
    }
    memcpy(s->uri, scheme, sizeof scheme - 1);
    memcpy(s->uri + sizeof scheme - 1, name, n);
    s->root = root_acquire(name);
    if (s->root == NULL) {
        lg__free(s);
        return lg__nomem(err);
    }
    lg_status st = lg_store_create(&table, s, out, err);
    if (st != LG_OK) {
        memory_destroy(s);
    }
    return st;
}
