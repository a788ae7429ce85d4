/* SPDX-License-Identifier: Apache-2.0 */
#include "store/store.h"

#include "base/json.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* --------------------------------------------------------------- life cycle */

static bool table_complete(const lg_store_ops *o)
{
    return o->make_root && o->make_dir && o->create && o->open && o->write && o->read && o->sync && o->close &&
           o->list && o->rename_file && o->remove_file && o->remove_dir && o->describe &&
           (o->rename_dir || !(o->caps & LG_CAP_RENAME_DIR)) && (o->sync_dir || !(o->caps & LG_CAP_SYNC_DIR)) &&
           (o->put_new || !(o->caps & LG_CAP_CONDITIONAL_CREATE)) &&
           ((o->map && o->unmap) || !(o->caps & LG_CAP_MAP)) &&
           (!o->queue_open || (o->queue_submit && o->queue_wait && o->queue_close));
}

lg_status lg_store_create(const lg_store_ops *ops, void *ctx, lg_store **out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(ops == NULL || out == NULL, err, LG_ERR_INVALID, "lg_store_create: ops and out must not be NULL");
    LG__RETURN_IF(ops->version != LG_STORE_OPS_VERSION, err, LG_ERR_INVALID,
                  "lg_store_create: function table version %u, this library has %u", ops->version,
                  (unsigned)LG_STORE_OPS_VERSION);
    LG__RETURN_IF(!table_complete(ops), err, LG_ERR_INVALID,
                  "lg_store_create: a function that the capabilities promise is missing");
    lg_store *s = lg__calloc(1, sizeof *s);
    if (s == NULL) {
        return lg__nomem(err);
    }
    s->ops = ops;
    s->ctx = ctx;
    s->caps = ops->caps;
    s->owns_ctx = true;
    *out = s;
    return LG_OK;
}

void lg_store_free(lg_store *store)
{
    if (store == NULL) {
        return;
    }
    if (store->owns_ctx && store->ops->destroy != NULL) {
        store->ops->destroy(store->ctx);
    }
    lg__free(store);
}

uint32_t lg_store_caps(const lg_store *store) { return store == NULL ? 0 : store->caps; }

const char *lg__store_name(const lg_store *s) { return s->ops->describe(s->ctx); }

/* ------------------------------------------------------------------- errors */

/* Every result passes through here. A store of somebody else's that returned a
 * status without filling `err` still gets a message. */
lg_status lg__store_result(const lg_store *s, lg_status st, const char *what, lg_error *err)
{
    if (st == LG_OK) {
        return LG_OK;
    }
    if (err->status != st) {
        lg_error_set(err, st, "%s: %s", what, lg_status_text(st));
    }
    lg_error_wrap(err, "%s", lg__store_name(s));
    return st;
}

static lg_status check_path(const lg_store *s, const char *path, lg_error *err)
{
    if (path == NULL || !lg__path_valid(path)) {
        char shown[256];
        return lg_error_set(err, LG_ERR_INVALID, "%s: \"%s\" is no valid name in a root", lg__store_name(s),
                            lg__printable(path == NULL ? "" : path, shown, sizeof shown));
    }
    return LG_OK;
}

static lg_status check_folder(const lg_store *s, const char *path, lg_error *err)
{
    return path != NULL && path[0] == '\0' ? LG_OK : check_path(s, path, err);
}

static lg_status lacks(const lg_store *s, const char *what, lg_error *err)
{
    return lg_error_set(err, LG_ERR_UNSUPPORTED, "%s: this store cannot %s", lg__store_name(s), what);
}

/* ----------------------------------------------------------------- wrappers */

lg_status lg__store_make_root(lg_store *s, lg_error *err)
{
    return lg__store_result(s, s->ops->make_root(s->ctx, err), "make the root", err);
}

lg_status lg__store_make_dir(lg_store *s, const char *path, lg_error *err)
{
    LG__TRY(check_path(s, path, err));
    return lg__store_result(s, s->ops->make_dir(s->ctx, path, err), "make a folder", err);
}

lg_status lg__store_create(lg_store *s, const char *path, uint64_t bytes, lg_file **out, lg_error *err)
{
    LG__TRY(check_path(s, path, err));
    return lg__store_result(s, s->ops->create(s->ctx, path, bytes, out, err), "create", err);
}

lg_status lg__store_open_file(lg_store *s, const char *path, lg_file **out, uint64_t *bytes, lg_error *err)
{
    LG__TRY(check_path(s, path, err));
    return lg__store_result(s, s->ops->open(s->ctx, path, out, bytes, err), "open", err);
}

lg_status lg__store_write(lg_store *s, lg_file *f, const void *data, size_t bytes, uint64_t offset, lg_error *err)
{
    return lg__store_result(s, s->ops->write(f, data, bytes, offset, err), "write", err);
}

lg_status lg__store_read(lg_store *s, lg_file *f, void *data, size_t bytes, uint64_t offset, lg_error *err)
{
    return lg__store_result(s, s->ops->read(f, data, bytes, offset, err), "read", err);
}

lg_status lg__store_sync(lg_store *s, lg_file *f, lg_error *err)
{
    return lg__store_result(s, s->ops->sync(f, err), "sync", err);
}

lg_status lg__store_close(lg_store *s, lg_file *f, lg_error *err)
{
    return f == NULL ? LG_OK : lg__store_result(s, s->ops->close(f, err), "close", err);
}

lg_status lg__store_sync_dir(lg_store *s, const char *path, lg_error *err)
{
    LG__TRY(check_folder(s, path, err));
    if (!lg__store_can(s, LG_CAP_SYNC_DIR)) {
        return LG_OK;
    }
    return lg__store_result(s, s->ops->sync_dir(s->ctx, path, err), "sync a folder", err);
}

lg_status lg__store_list(lg_store *s, const char *path, int (*fn)(const lg_node *, void *), void *arg, lg_error *err)
{
    LG__TRY(check_folder(s, path, err));
    return lg__store_result(s, s->ops->list(s->ctx, path, fn, arg, err), "list", err);
}

lg_status lg__store_rename_dir(lg_store *s, const char *from, const char *to, lg_error *err)
{
    LG__TRY(check_path(s, from, err));
    LG__TRY(check_path(s, to, err));
    if (!lg__store_can(s, LG_CAP_RENAME_DIR)) {
        return lacks(s, "rename folders", err);
    }
    return lg__store_result(s, s->ops->rename_dir(s->ctx, from, to, err), "rename a folder", err);
}

lg_status lg__store_rename_file(lg_store *s, const char *from, const char *to, lg_error *err)
{
    LG__TRY(check_path(s, from, err));
    LG__TRY(check_path(s, to, err));
    const char *a = strchr(from, '/'), *b = strchr(to, '/');
    size_t folder = a == NULL ? 0 : (size_t)(a - from);
    if ((a == NULL) != (b == NULL) || (a != NULL && (folder != (size_t)(b - to) || memcmp(from, to, folder) != 0))) {
        return lg_error_set(err, LG_ERR_INVALID, "%s: rename %s to %s: not in the same folder", lg__store_name(s), from,
                            to);
    }
    return lg__store_result(s, s->ops->rename_file(s->ctx, from, to, err), "rename a file", err);
}

lg_status lg__store_put_new(lg_store *s, const char *path, const void *data, size_t bytes, lg_error *err)
{
    LG__TRY(check_path(s, path, err));
    if (!lg__store_can(s, LG_CAP_CONDITIONAL_CREATE)) {
        return lacks(s, "create files all or nothing", err);
    }
    return lg__store_result(s, s->ops->put_new(s->ctx, path, data, bytes, err), "put a new file", err);
}

static lg_status removed(const lg_store *s, lg_status st, const lg_error *why, lg_error *err)
{
    if (st == LG_OK || st == LG_ERR_NOT_FOUND) {
        return LG_OK;
    }
    *err = *why;
    return lg__store_result(s, st, "remove", err);
}

lg_status lg__store_remove_file(lg_store *s, const char *path, lg_error *err)
{
    LG__TRY(check_path(s, path, err));
    lg_error why = LG_ERROR_INIT;
    lg_status st = s->ops->remove_file(s->ctx, path, &why);
    return removed(s, st, &why, err);
}

lg_status lg__store_remove_dir(lg_store *s, const char *path, lg_error *err)
{
    LG__TRY(check_path(s, path, err));
    lg_error why = LG_ERROR_INIT;
    lg_status st = s->ops->remove_dir(s->ctx, path, &why);
    return removed(s, st, &why, err);
}

lg_status lg__store_map(lg_store *s, lg_file *f, uint64_t offset, size_t bytes, const void **data, void **base,
                        size_t *mapped, lg_error *err)
{
    if (!lg__store_can(s, LG_CAP_MAP)) {
        return lacks(s, "map files", err);
    }
    return lg__store_result(s, s->ops->map(f, offset, bytes, data, base, mapped, err), "map", err);
}

lg_read_way lg__store_read_way(lg_store *s, lg_file *f, uint64_t offset, size_t bytes)
{
    return s->ops->read_way != NULL ? s->ops->read_way(f, offset, bytes) : LG_READ_QUEUED;
}

void lg__store_unmap(lg_store *s, void *base, size_t mapped)
{
    if (base != NULL) {
        s->ops->unmap(s->ctx, base, mapped);
    }
}

/* ------------------------------------------------------------------ helpers */

lg_status lg__store_read_all(lg_store *s, const char *path, lg__buf *out, lg_error *err)
{
    lg_file *f = NULL;
    uint64_t bytes = 0;
    LG__TRY(lg__store_open_file(s, path, &f, &bytes, err));
    out->len = 0;
    out->failed = false;
    lg_status st = LG_OK;
    if (bytes > out->max) {
        st = lg_error_set(err, LG_ERR_LIMIT, "%s: %s has %llu bytes, more than the limit of %zu", lg__store_name(s),
                          path, (unsigned long long)bytes, out->max);
    } else {
        lg__buf_fill(out, 0, (size_t)bytes);
        st = lg__buf_check(out, path, err);
    }
    if (st == LG_OK && bytes > 0) {
        st = lg__store_read(s, f, out->data, (size_t)bytes, 0, err);
    }
    if (st != LG_OK) {
        out->len = 0;
        lg_error ignored = LG_ERROR_INIT;
        lg__store_close(s, f, &ignored);
        return st;
    }
    return lg__store_close(s, f, err);
}

typedef struct search {
    const char *name;
    bool found;
} search;

static int is_it(const lg_node *node, void *arg)
{
    search *look = arg;
    look->found = strcmp(node->name, look->name) == 0;
    return look->found;
}

lg_status lg__store_exists(lg_store *s, const char *folder, const char *name, bool *out, lg_error *err)
{
    search look = {name, false};
    LG__TRY(lg__store_list(s, folder, is_it, &look, err));
    *out = look.found;
    return LG_OK;
}

bool lg__path_join(char *out, size_t bytes, const char *folder, const char *name)
{
    int n = snprintf(out, bytes, "%s%s%s", folder, folder[0] == '\0' ? "" : "/", name);
    return n >= 0 && (size_t)n < bytes;
}
