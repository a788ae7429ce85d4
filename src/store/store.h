/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_STORE_STORE_H
#define LG_STORE_STORE_H

/* How the library uses a store: thin wrappers over the function table that
 * check every path (the one place) and put the root's name before errors. The
 * store itself names what it tried and the path within the root. On success
 * `err` is left as it was, so that one may clean up with the error in hand. */

#include "base/buf.h"
#include "base/error.h"

struct lg_store {
    const lg_store_ops *ops;
    void *ctx;
    uint32_t caps;
    bool owns_ctx;
};

static inline bool lg__store_can(const lg_store *s, uint32_t caps) { return (s->caps & caps) == caps; }
const char *lg__store_name(const lg_store *s); /* for messages */

lg_status lg__store_make_root(lg_store *s, lg_error *err);
lg_status lg__store_make_dir(lg_store *s, const char *path, lg_error *err);
lg_status lg__store_create(lg_store *s, const char *path, uint64_t bytes, lg_file **out, lg_error *err);
lg_status lg__store_open_file(lg_store *s, const char *path, lg_file **out, uint64_t *bytes, lg_error *err);
lg_status lg__store_write(lg_store *s, lg_file *f, const void *data, size_t bytes, uint64_t offset, lg_error *err);
lg_status lg__store_read(lg_store *s, lg_file *f, void *data, size_t bytes, uint64_t offset, lg_error *err);
lg_status lg__store_sync(lg_store *s, lg_file *f, lg_error *err);
lg_status lg__store_close(lg_store *s, lg_file *f, lg_error *err);          /* NULL is fine */
lg_status lg__store_sync_dir(lg_store *s, const char *path, lg_error *err); /* success without LG_CAP_SYNC_DIR */
lg_status lg__store_list(lg_store *s, const char *path, int (*fn)(const lg_node *, void *), void *arg, lg_error *err);
lg_status lg__store_rename_dir(lg_store *s, const char *from, const char *to, lg_error *err);
lg_status lg__store_rename_file(lg_store *s, const char *from, const char *to, lg_error *err);
lg_status lg__store_put_new(lg_store *s, const char *path, const void *data, size_t bytes, lg_error *err);
lg_status lg__store_remove_file(lg_store *s, const char *path, lg_error *err); /* NOT_FOUND is success */
lg_status lg__store_remove_dir(lg_store *s, const char *path, lg_error *err);  /* NOT_FOUND is success */
/* UNSUPPORTED without LG_CAP_MAP; see lg_store_ops. */
lg_status lg__store_map(lg_store *s, lg_file *f, uint64_t offset, size_t bytes, const void **data, void **base,
                        size_t *mapped, lg_error *err);
void lg__store_unmap(lg_store *s, void *base, size_t mapped);
lg_read_way lg__store_read_way(lg_store *s, lg_file *f, uint64_t offset, size_t bytes);

/* What every wrapper passes a result through: puts the root's name before an
 * error, and a message where the store gave none. */
lg_status lg__store_result(const lg_store *s, lg_status st, const char *what, lg_error *err);

/* Reads a whole small file into `out` (emptied first); LG_ERR_LIMIT if it is
 * longer than out->max. */
lg_status lg__store_read_all(lg_store *s, const char *path, lg__buf *out, lg_error *err);
/* Is there anything of this name in `folder`? By listing, never by stat.
 * NOT_FOUND if the folder itself is not there. */
lg_status lg__store_exists(lg_store *s, const char *folder, const char *name, bool *out, lg_error *err);

/* "folder/name", or just name when folder is "". false if too long. */
bool lg__path_join(char *out, size_t bytes, const char *folder, const char *name);

/* The stores behind lg_store_open; `path` and `name` are not empty. */
lg_status lg__posix_store_open(const char *path, lg_store **out, lg_error *err);
lg_status lg__memory_store_open(const char *name, lg_store **out, lg_error *err);

#endif
