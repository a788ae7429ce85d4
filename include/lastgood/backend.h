/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LASTGOOD_BACKEND_H
#define LASTGOOD_BACKEND_H

/* For writers of stores (where bytes are kept) and communicators (how ranks
 * talk). Users of the library do not need this header. */

#include <lastgood/lastgood.h>

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------- stores
 *
 * A store is one root: a flat table of functions over relative names with '/'
 * between parts. The core never calls the operating system on its own and never
 * passes a name that is empty, absolute, has an empty, "." or ".." part or a
 * NUL; depth is at most two (step folder, file). All functions may be called
 * from several threads at once; on one file only read, and write, of ranges
 * that do not overlap. All may block.
 *
 * Errors: fill `err` (never NULL) with lg_error_set and return its status.
 * Every slot may return NOMEM, IO, PERMISSION, READ_ONLY, NO_SPACE besides the
 * ones its comment names. NOT_FOUND means that the name is not there, nothing
 * else.
 */

/* What a store can promise. The commit order follows these bits. */
enum {
    /* rename_dir moves a folder with its contents in one atomic step. Without
     * it the manifest's conditional create is the commit. */
    LG_CAP_RENAME_DIR = 1u << 0,
    /* rename_dir fails with EXISTS when the target exists, even if empty.
     * Without it the target must not exist or be an empty folder. */
    LG_CAP_NO_REPLACE = 1u << 1,
    /* sync_dir makes names durable. Without it names are durable at once. */
    LG_CAP_SYNC_DIR = 1u << 2,
    LG_CAP_DIRECT_IO = 1u << 3,
    LG_CAP_RANGE_READ = 1u << 4,
    /* put_new creates all or nothing, and fails with EXISTS for all but one. */
    LG_CAP_CONDITIONAL_CREATE = 1u << 5,
    /* map works. */
    LG_CAP_MAP = 1u << 6
};

typedef struct lg_file lg_file; /* a store's own struct */

typedef enum lg_node_type {
    LG_NODE_FILE = 0,
    LG_NODE_DIR = 1,
    LG_NODE_OTHER = 2 /* symbolic link, device, FIFO, socket: never opened */
} lg_node_type;

typedef struct lg_node {
    const char *name; /* last part only; valid during the call */
    lg_node_type type;
    uint64_t bytes; /* files; 0 if unknown */
} lg_node;

/* ---- Many reads and writes under way at once. Optional: without it the library
 * runs the blocking functions on a few threads of its own. */

typedef enum lg_queue_kind { LG_QUEUE_READ = 0, LG_QUEUE_WRITE = 1, LG_QUEUE_SYNC = 2 } lg_queue_kind;

typedef struct lg_queue_op {
    lg_queue_kind kind;
    lg_file *file; /* stays open until the operation is done */
    void *data;    /* stays until it is done; what is written does not change meanwhile */
    size_t bytes;
    uint64_t offset;
    uint64_t token; /* the caller's; comes back when it is done */
} lg_queue_op;

typedef struct lg_queue_spec {
    uint32_t depth; /* operations under way at most */
    /* Where the data of most operations lies, so that it can be registered with
     * the kernel: aligned to 4096, outlives the queue. May be NULL, 0. */
    void *memory;
    size_t memory_bytes;
} lg_queue_spec;

typedef struct lg_queue lg_queue; /* a store's own struct */

/* How a range of a file is best read. */
typedef enum lg_read_way {
    LG_READ_QUEUED = 0,  /* takes its time: several at once, straight to where the bytes belong */
    LG_READ_AT_ONCE = 1, /* is in memory: a plain read costs no more than a copy */
    LG_READ_ALIGNED = 2  /* as QUEUED, but best from an offset and into memory aligned to 4096 */
} lg_read_way;

#define LG_STORE_OPS_VERSION 1

typedef struct lg_store_ops {
    uint32_t version; /* LG_STORE_OPS_VERSION */
    uint32_t caps;

    /* Makes the root itself if its parent exists; success if it is there. */
    lg_status (*make_root)(void *ctx, lg_error *err);

    /* Makes a folder. EXISTS if the name is taken. Not durable before
     * sync_dir of the parent. */
    lg_status (*make_dir)(void *ctx, const char *path, lg_error *err);

    /* Creates a file that must not exist yet (EXISTS) and opens it for writing.
     * `bytes` is its final length if known, else 0: space may be reserved, so
     * that NO_SPACE comes early. Mode 0666 less the umask. */
    lg_status (*create)(void *ctx, const char *path, uint64_t bytes, lg_file **out, lg_error *err);

    /* Opens for reading; *bytes gets the length. NOT_FOUND; FORMAT if the name
     * is no regular file (never follows links, never blocks on a FIFO). */
    lg_status (*open)(void *ctx, const char *path, lg_file **out, uint64_t *bytes, lg_error *err);

    /* Writes all of `bytes` at `offset`, or fails. */
    lg_status (*write)(lg_file *file, const void *data, size_t bytes, uint64_t offset, lg_error *err);

    /* Reads all of `bytes` at `offset`, or fails: CORRUPT if the file ends
     * before. */
    lg_status (*read)(lg_file *file, void *data, size_t bytes, uint64_t offset, lg_error *err);

    /* Makes contents and length durable. After a failure the contents are
     * unknown for good; never call it again in the hope of success. */
    lg_status (*sync)(lg_file *file, lg_error *err);

    /* Frees `file` whatever the result. */
    lg_status (*close)(lg_file *file, lg_error *err);

    /* Makes the names in a folder durable; "" is the root. Also makes durable
     * the root's own name when path is "" and the store made it. */
    lg_status (*sync_dir)(void *ctx, const char *path, lg_error *err);

    /* Calls fn for each name in a folder ("" is the root), any order, without
     * "." and ".."; stops early when fn returns nonzero. NOT_FOUND. */
    lg_status (*list)(void *ctx, const char *path, int (*fn)(const lg_node *node, void *arg), void *arg, lg_error *err);

    /* Needs LG_CAP_RENAME_DIR. EXISTS if `to` is taken, NOT_FOUND if `from` is
     * gone. After any error that leaves it open whether the rename took place
     * the core looks for itself. */
    lg_status (*rename_dir)(void *ctx, const char *from, const char *to, lg_error *err);

    /* Renames a file within one folder, replacing `to`. */
    lg_status (*rename_file)(void *ctx, const char *from, const char *to, lg_error *err);

    /* Creates `path` with these contents, durable on return, all or nothing.
     * EXISTS if the name is taken. The name is durable after sync_dir. */
    lg_status (*put_new)(void *ctx, const char *path, const void *data, size_t bytes, lg_error *err);

    /* NOT_FOUND is success to the core. */
    lg_status (*remove_file)(void *ctx, const char *path, lg_error *err);
    /* NOT_EMPTY if it has names in it. */
    lg_status (*remove_dir)(void *ctx, const char *path, lg_error *err);

    /* Maps [offset, offset + bytes) for reading, which lies in the file; *base
     * and *mapped are what unmap needs, *data points at `offset`. */
    lg_status (*map)(lg_file *file, uint64_t offset, size_t bytes, const void **data, void **base, size_t *mapped,
                     lg_error *err);
    void (*unmap)(void *ctx, void *base, size_t mapped);

    /* Optional, all four or none. A queue is used by the thread that opened it
     * and by no other, nor by a child process. UNSUPPORTED: not here and now;
     * the library then goes on without. */
    lg_status (*queue_open)(void *ctx, const lg_queue_spec *spec, lg_queue **out, lg_error *err);
    /* Begins one operation; never more than `depth` are under way. After an
     * error it has not begun. Each is what read, write and sync are: all of the
     * bytes or an error; in any order. */
    lg_status (*queue_submit)(lg_queue *queue, const lg_queue_op *op, lg_error *err);
    /* Waits until any operation is done, gives its token and returns its
     * result. Called only when one is under way. */
    lg_status (*queue_wait)(lg_queue *queue, uint64_t *token, lg_error *err);
    /* Nothing is under way any more. */
    void (*queue_close)(lg_queue *queue);

    /* Optional; without it always LG_READ_QUEUED. `file` is open for reading. */
    lg_read_way (*read_way)(lg_file *file, uint64_t offset, size_t bytes);

    /* A name for messages: the path or URI of the root. */
    const char *(*describe)(void *ctx);

    void (*destroy)(void *ctx);
} lg_store_ops;

/* `ops` must outlive the store; on success the store owns `ctx`. */
LG_API lg_status lg_store_create(const lg_store_ops *ops, void *ctx, lg_store **out, lg_error *err);
LG_API void lg_store_free(lg_store *store);

/* A store by URI: "file:PATH", "file://PATH", a plain path, or "mem:NAME" (one
 * root of that name in this process, kept until lg_memory_store_drop). A colon
 * in a path is no scheme unless it is one of these. */
LG_API lg_status lg_store_open(const char *uri, lg_store **out, lg_error *err);
LG_API void lg_memory_store_drop(const char *name);

/* The same store with some capability bits cleared, for file systems that are
 * known to lack them. `inner` stays the caller's and must outlive it. */
LG_API lg_status lg_store_without(lg_store *inner, uint32_t caps, lg_store **out, lg_error *err);

/* What the store promises: LG_CAP_… bits. */
LG_API uint32_t lg_store_caps(const lg_store *store);

/* ------------------------------------------------------------- communicators
 *
 * Every call is collective and carries a deadline; whoever is late or dead is
 * named in the error (status TIMEOUT, `err->rank` and the message). After any
 * error a communicator is broken for good and every call fails with COMM. No
 * function may be called from two threads at once.
 */
#define LG_COMM_OPS_VERSION 1

typedef struct lg_comm_ops {
    uint32_t version; /* LG_COMM_OPS_VERSION */

    lg_status (*barrier)(void *ctx, uint64_t deadline_ms, lg_error *err);

    /* Every rank gives `bytes` bytes (sizes may differ); all get the
     * concatenation by rank: *all is malloc'ed (free with lg_free), sizes[r] is
     * rank r's size (array of comm-size entries given by the caller). */
    lg_status (*all_gather)(void *ctx, const void *data, size_t bytes, void **all, size_t *sizes, uint64_t deadline_ms,
                            lg_error *err);

    /* `root` gives *data, *bytes; the others get a malloc'ed copy there. */
    lg_status (*broadcast)(void *ctx, void **data, size_t *bytes, uint32_t root, uint64_t deadline_ms, lg_error *err);

    /* send[r], send_bytes[r] go to rank r; recv[r] (malloc'ed each, NULL if
     * empty) and recv_bytes[r] come from it. All arrays have comm-size entries
     * and are the caller's. */
    lg_status (*all_to_all)(void *ctx, const void *const *send, const size_t *send_bytes, void **recv,
                            size_t *recv_bytes, uint64_t deadline_ms, lg_error *err);

    void (*destroy)(void *ctx);
} lg_comm_ops;

/* Rank and size are the caller's word; lg_session_open checks that every rank
 * number occurs once. On success the communicator owns `ctx`. */
LG_API lg_status lg_comm_create(const lg_comm_ops *ops, void *ctx, uint32_t rank, uint32_t size, lg_comm **out,
                                lg_error *err);

/* ---------------------------------------------------------- key-value stores
 *
 * Through one, ranks tell each other how a save in the background goes, where
 * a shared folder is slow to show new files (torch.distributed's TCPStore, etcd,
 * Redis). Values are small (at most 4 kB); a key is set once, or once more when
 * that failed. set and get are called from a background thread, remove by the
 * call that all ranks learn the result from: one at a time. A function that does
 * not return holds up its rank; the others name it when their deadline passes.
 */
#define LG_KV_OPS_VERSION 1

typedef struct lg_kv_ops {
    uint32_t version; /* LG_KV_OPS_VERSION */
    lg_status (*set)(void *ctx, const char *key, const void *data, size_t bytes, lg_error *err);
    /* *data is malloc'ed (free with lg_free). NOT_FOUND if the key is not set;
     * does not wait for it. */
    lg_status (*get)(void *ctx, const char *key, void **data, size_t *bytes, lg_error *err);
    /* NULL: keys stay, one a rank and save and one more, some hundred bytes each.
     * A key that is not set is no error. */
    lg_status (*remove)(void *ctx, const char *key, lg_error *err);
} lg_kv_ops;

struct lg_kv {
    const lg_kv_ops *ops;
    void *ctx;
};

/* ------------------------------------------------------------------- helpers */

/* Sets status and message; returns the status. */
LG_API lg_status lg_error_set(lg_error *err, lg_status status, const char *format, ...) LG_PRINTF(3, 4);
/* The same from an errno: maps it to a status and appends its text. */
LG_API lg_status lg_error_set_errno(lg_error *err, int os_errno, const char *format, ...) LG_PRINTF(3, 4);
/* Puts "<text>: " before the message; returns the status. */
LG_API lg_status lg_error_wrap(lg_error *err, const char *format, ...) LG_PRINTF(2, 3);

#ifdef __cplusplus
}
#endif

#endif
