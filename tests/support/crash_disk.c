/* SPDX-License-Identifier: Apache-2.0 */
#include "crash_disk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SECTOR ((size_t)512)
#define MAX_CHOICES 1024
#define MAX_ITEMS 1024
#define MAX_NAMES 256
#define N_FATES 7

typedef struct version { /* contents that a file may have after the cut */
    uint8_t *data;
    size_t bytes;
    uint64_t hash;
    const char *how;
} version;

typedef struct name_entry {
    const char *name;
    uint32_t inode;
} name_entry;

typedef struct inode {
    bool is_dir;
    const char *called; /* its last name */
    /* files */
    uint8_t *live, *durable;
    size_t live_bytes, durable_bytes, from; /* from: where the unsynced part begins */
    bool pending;
    version versions[N_FATES];
    size_t n_versions; /* 0: to be made */
    /* folders */
    name_entry entries[MAX_NAMES]; /* durable ones */
    size_t n;
    size_t changes[MAX_NAMES]; /* events not synced */
    size_t n_changes;
} inode;

typedef struct chooser {
    uint32_t value[MAX_CHOICES], limit[MAX_CHOICES];
    size_t n, at;
    enum { EACH, ONE_DIFFERS, RANDOM } mode;
    size_t which; /* ONE_DIFFERS: this choice; SIZE_MAX: none */
    bool rest;    /* … what the others are: kept, or lost */
    uint32_t odds;
    uint64_t *random;
} chooser;

struct crash_disk {
    const crash_event *events;
    size_t n_events, at;
    inode **inodes;
    size_t n, cap;
    chooser choose;
    crash_item items[MAX_ITEMS];
    size_t n_items;
    uint64_t hash;
};

static void *must(void *p)
{
    if (p == NULL) {
        abort();
    }
    return p;
}

static void check(bool good, const char *what)
{
    if (!good) {
        fprintf(stderr, "crash_disk: %s\n", what);
        abort();
    }
}

uint64_t crash_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state * UINT64_C(0x2545f4914f6cdd1d);
}

static uint64_t mix(uint64_t hash, const void *data, size_t bytes)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static uint64_t mix_number(uint64_t hash, uint64_t x)
{
    hash = (hash ^ x) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 29;
}

#define EMPTY_HASH UINT64_C(0xcbf29ce484222325)

/* ------------------------------------------------------------ the disk in time */

static inode *inode_at(crash_disk *d, uint32_t i, bool is_dir)
{
    while (d->n <= i) {
        if (d->n == d->cap) {
            d->cap = d->cap == 0 ? 64 : 2 * d->cap;
            d->inodes = must(realloc(d->inodes, d->cap * sizeof(inode *)));
        }
        d->inodes[d->n++] = must(calloc(1, sizeof(inode)));
        d->inodes[d->n - 1]->is_dir = is_dir;
    }
    return d->inodes[i];
}

static void forget_versions(inode *f)
{
    for (size_t i = 0; i < f->n_versions; i++) {
        free(f->versions[i].data);
    }
    f->n_versions = 0;
}

crash_disk *crash_disk_new(crash_store *s)
{
    crash_disk *d = must(calloc(1, sizeof *d));
    d->events = crash_store_events(s, &d->n_events);
    inode_at(d, CRASH_ROOT, true);
    return d;
}

void crash_disk_free(crash_disk *d)
{
    for (size_t i = 0; d != NULL && i < d->n; i++) {
        forget_versions(d->inodes[i]);
        free(d->inodes[i]->live);
        free(d->inodes[i]->durable);
        free(d->inodes[i]);
    }
    if (d != NULL) {
        free(d->inodes);
        free(d);
    }
}

static void put_name(name_entry *names, size_t *n, const char *name, uint32_t to)
{
    for (size_t i = 0; i < *n; i++) {
        if (strcmp(names[i].name, name) == 0) {
            names[i].inode = to;
            return;
        }
    }
    check(*n < MAX_NAMES, "too many names");
    names[(*n)++] = (name_entry){name, to};
}

static void drop_name(name_entry *names, size_t *n, const char *name, uint32_t what)
{
    for (size_t i = 0; i < *n; i++) {
        if (names[i].inode == what && strcmp(names[i].name, name) == 0) {
            names[i] = names[--*n];
            return;
        }
    }
}

/* What is lost before may be missing here: that is no contradiction. */
static void apply(const crash_event *e, name_entry *names, size_t *n)
{
    switch (e->kind) {
    case CRASH_LINK:
        put_name(names, n, e->name, e->inode);
        break;
    case CRASH_UNLINK:
        drop_name(names, n, e->name, e->inode);
        break;
    default: /* from wherever it is, if an earlier rename was lost */
        for (size_t i = *n; i-- > 0;) {
            if (names[i].inode == e->inode) {
                names[i] = names[--*n];
            }
        }
        put_name(names, n, e->to, e->inode);
    }
}

static void write_live(inode *f, const crash_event *e)
{
    size_t end = (size_t)e->offset + e->bytes;
    f->from = !f->pending || e->offset < f->from ? (size_t)e->offset : f->from;
    if (end > f->live_bytes) {
        f->live = must(realloc(f->live, end));
        if (e->offset > f->live_bytes) {
            memset(f->live + f->live_bytes, 0, (size_t)e->offset - f->live_bytes);
        }
        f->live_bytes = end;
    }
    memcpy(f->live + e->offset, e->data, e->bytes);
    f->pending = true;
    forget_versions(f);
}

static void sync_contents(inode *f)
{
    if (f->live_bytes > 0) {
        f->durable = must(realloc(f->durable, f->live_bytes));
        memcpy(f->durable, f->live, f->live_bytes);
    }
    f->durable_bytes = f->live_bytes;
    f->pending = false;
    forget_versions(f);
}

const crash_event *crash_disk_step(crash_disk *d)
{
    if (d->at == d->n_events) {
        return NULL;
    }
    const crash_event *e = &d->events[d->at];
    inode *dir;
    switch (e->kind) {
    case CRASH_LINK:
        inode_at(d, e->inode, e->is_dir)->called = e->name;
        /* fall through */
    case CRASH_UNLINK:
    case CRASH_RENAME:
        if (e->kind == CRASH_RENAME) {
            d->inodes[e->inode]->called = e->to;
        }
        dir = d->inodes[e->dir];
        check(dir->n_changes < MAX_NAMES, "too many changes without a sync");
        dir->changes[dir->n_changes++] = d->at;
        break;
    case CRASH_WRITE:
        write_live(d->inodes[e->inode], e);
        break;
    case CRASH_SYNC:
        sync_contents(d->inodes[e->inode]);
        break;
    case CRASH_SYNC_DIR:
        dir = d->inodes[e->inode];
        for (size_t i = 0; i < dir->n_changes; i++) {
            apply(&d->events[dir->changes[i]], dir->entries, &dir->n);
        }
        dir->n_changes = 0;
        break;
    case CRASH_MARK:
        break;
    }
    d->at++;
    return e;
}

/* ------------------------------------------------------ what contents may become */

static void add_version(inode *f, uint8_t *data, size_t bytes, const char *how)
{
    uint64_t hash = mix_number(mix(EMPTY_HASH, data, bytes), bytes);
    for (size_t i = 0; i < f->n_versions; i++) {
        if (f->versions[i].hash == hash) {
            free(data);
            return;
        }
    }
    f->versions[f->n_versions++] = (version){data, bytes, hash, how};
}

static uint8_t *copy(const uint8_t *data, size_t bytes, size_t room)
{
    uint8_t *out = must(calloc(1, room + 1));
    if (bytes > 0) {
        memcpy(out, data, bytes < room ? bytes : room);
    }
    return out;
}

/* An older file of this name; NULL if there was none. */
static const inode *older(const crash_disk *d, const inode *f)
{
    const inode *found = NULL;
    for (size_t i = 0; i < d->n && d->inodes[i] != f; i++) {
        const inode *o = d->inodes[i];
        if (!o->is_dir && o->called != NULL && o->live_bytes > 0 && strcmp(o->called, f->called) == 0) {
            found = o;
        }
    }
    return found;
}

static void make_versions(const crash_disk *d, inode *f)
{
    const size_t bytes = f->live_bytes;
    add_version(f, copy(f->live, bytes, bytes), bytes, "");
    if (!f->pending) {
        return;
    }
    size_t middle = f->from + (bytes - f->from) / 2;
    middle = middle / SECTOR * SECTOR > f->from ? middle / SECTOR * SECTOR : middle;
    add_version(f, copy(f->durable, f->durable_bytes, f->durable_bytes), f->durable_bytes, "lost");
    uint8_t *zeros = copy(f->live, bytes, bytes);
    memset(zeros + f->from, 0, bytes - f->from);
    add_version(f, zeros, bytes, "zeros");
    add_version(f, copy(f->live, middle, middle), middle, "cut");
    uint8_t *tail = copy(f->live, bytes, bytes);
    memset(tail + f->from, 0, middle - f->from);
    add_version(f, tail, bytes, "without its first half");
    uint8_t *garbage = copy(f->live, bytes, bytes);
    uint64_t random = 0x1234567;
    for (size_t i = middle; i < bytes && i < middle + SECTOR; i++) {
        garbage[i] = (uint8_t)(crash_random(&random) >> 32);
    }
    add_version(f, garbage, bytes, "a sector of garbage");
    const inode *o = older(d, f);
    if (o != NULL) {
        add_version(f, copy(o->live, o->live_bytes, bytes), bytes, "an older file's contents");
    }
}

/* --------------------------------------------------------------------- choices */

/* 0: kept, 1: lost, more: in between. */
static uint32_t pick(crash_disk *d, uint32_t limit)
{
    chooser *c = &d->choose;
    check(c->at < MAX_CHOICES, "too many choices");
    size_t i = c->at++;
    if (i == c->n) {
        c->limit[i] = limit;
        c->n++;
        switch (c->mode) {
        case EACH:
            c->value[i] = 0;
            break;
        case ONE_DIFFERS:
            c->value[i] = (i == c->which) != c->rest ? 1 : 0;
            break;
        case RANDOM:
            c->value[i] =
                crash_random(c->random) % 16 < c->odds ? 0 : 1 + (uint32_t)(crash_random(c->random) % (limit - 1));
        }
    }
    return c->value[i];
}

/* To the next combination; false: that was the last one. */
static bool advance(chooser *c)
{
    while (c->n > 0 && c->value[c->n - 1] + 1 == c->limit[c->n - 1]) {
        c->n--;
    }
    if (c->n == 0) {
        return false;
    }
    c->value[c->n - 1]++;
    return true;
}

static size_t names_after(crash_disk *d, const inode *dir, name_entry names[MAX_NAMES])
{
    size_t n = dir->n;
    memcpy(names, dir->entries, n * sizeof *names);
    for (size_t i = 0; i < dir->n_changes; i++) {
        if (pick(d, 2) == 0) {
            apply(&d->events[dir->changes[i]], names, &n);
        }
    }
    return n;
}

static void add_item(crash_disk *d, const crash_item *item, uint64_t hash)
{
    check(d->n_items < MAX_ITEMS, "too many files");
    d->items[d->n_items++] = *item;
    hash = mix_number(hash, mix(EMPTY_HASH, item->folder, strlen(item->folder)));
    hash = mix_number(hash, mix(EMPTY_HASH, item->name, strlen(item->name)));
    d->hash += mix_number(hash, item->is_dir); /* in any order */
}

static void build_folder(crash_disk *d, const char *folder, const inode *dir)
{
    name_entry names[MAX_NAMES];
    size_t n = names_after(d, dir, names);
    for (size_t i = 0; i < n; i++) {
        inode *f = d->inodes[names[i].inode];
        crash_item item = {.folder = folder, .name = names[i].name, .is_dir = f->is_dir, .how = ""};
        if (f->is_dir) {
            add_item(d, &item, 0);
            build_folder(d, names[i].name, f);
            continue;
        }
        if (f->n_versions == 0) {
            make_versions(d, f);
        }
        const version *v = &f->versions[f->n_versions > 1 ? pick(d, (uint32_t)f->n_versions) : 0];
        item.data = v->data, item.bytes = v->bytes, item.how = v->how;
        add_item(d, &item, v->hash);
    }
}

static int build(crash_disk *d, int (*fn)(const crash_tree *tree, void *arg), void *arg)
{
    d->choose.at = 0;
    d->n_items = 0;
    d->hash = 0;
    build_folder(d, "", d->inodes[CRASH_ROOT]);
    const crash_tree tree = {d->items, d->n_items, d->hash};
    return fn(&tree, arg);
}

static void limit_of(crash_disk *d, const inode *dir, double *combinations)
{
    uint32_t reach[2 * MAX_NAMES];
    size_t n = 0;
    for (size_t i = 0; i < dir->n; i++) {
        reach[n++] = dir->entries[i].inode;
    }
    for (size_t i = 0; i < dir->n_changes; i++) {
        const crash_event *e = &d->events[dir->changes[i]];
        *combinations *= 2;
        if (e->kind != CRASH_UNLINK) {
            reach[n++] = e->inode;
        }
    }
    for (size_t i = 0; i < n; i++) {
        bool seen = false;
        for (size_t k = 0; k < i; k++) {
            seen = seen || reach[k] == reach[i];
        }
        inode *f = d->inodes[reach[i]];
        if (!seen && f->is_dir) {
            limit_of(d, f, combinations);
        } else if (!seen) {
            if (f->n_versions == 0) {
                make_versions(d, f);
            }
            *combinations *= (double)f->n_versions;
        }
    }
}

bool crash_disk_visit(crash_disk *d, const crash_effort *effort, int (*fn)(const crash_tree *tree, void *arg),
                      void *arg)
{
    chooser *c = &d->choose;
    double combinations = 1;
    limit_of(d, d->inodes[CRASH_ROOT], &combinations);
    *c = (chooser){.mode = EACH};
    if (combinations <= (double)effort->all) {
        do {
            if (build(d, fn, arg) != 0) {
                return false;
            }
        } while (advance(c));
        return true;
    }
    /* All kept, all lost; up to half of them with one choice that differs from
     * all others; the rest at random. */
    size_t which = 0, n = 1;
    bool rest = false;
    for (uint64_t made = 0; made < effort->samples; made++) {
        static const uint32_t odds[] = {8, 14, 2, 12, 4};
        if (made < 2) {
            *c = (chooser){.mode = ONE_DIFFERS, .which = SIZE_MAX, .rest = made == 1};
        } else if (made < effort->samples / 2 && !(rest && which >= n)) {
            rest = rest || which >= n;
            which = which >= n ? 0 : which;
            *c = (chooser){.mode = ONE_DIFFERS, .which = which++, .rest = rest};
        } else {
            *c = (chooser){.mode = RANDOM, .odds = odds[made % 5], .random = effort->random};
        }
        if (build(d, fn, arg) != 0) {
            return false;
        }
        n = c->mode == ONE_DIFFERS ? c->n : n;
    }
    return false;
}

/* ------------------------------------------------------------------------ trees */

crash_store *crash_tree_boot(const crash_tree *tree, uint32_t caps, bool record)
{
    crash_store *s = crash_store_new(caps);
    crash_store_record(s, record);
    for (size_t i = 0; i < tree->n; i++) {
        const crash_item *item = &tree->items[i];
        if (item->is_dir) {
            crash_store_put_dir(s, item->name);
        } else {
            crash_store_put_file(s, item->folder, item->name, item->data, item->bytes);
        }
    }
    return s;
}

void crash_tree_print(const crash_tree *tree)
{
    for (size_t i = 0; i < tree->n; i++) {
        const crash_item *item = &tree->items[i];
        fprintf(stderr, "#   %s%s%s", item->folder, item->folder[0] != '\0' ? "/" : "", item->name);
        fprintf(stderr, item->is_dir ? "/\n" : " (%zu bytes)%s%s\n", item->bytes, item->how[0] != '\0' ? ": " : "",
                item->how);
    }
}
