/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LASTGOOD_STATUS_H
#define LASTGOOD_STATUS_H

/* What every function answers with, and the dtypes of tensors. Part of
 * lastgood.h. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define LG_API __attribute__((visibility("default")))
#define LG_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define LG_API
#define LG_PRINTF(fmt, args)
#endif

/* ------------------------------------------------------------------ errors */

/* Every status, as X(NAME, number, text). Numbers never change; gaps leave
 * room within a kind. docs/errors.md explains each one. */
#define LG_STATUS_MAP(X)                                           \
    X(LG_OK, 0, "success")                                         \
    /* the caller */                                               \
    X(LG_ERR_INVALID, 1, "invalid argument")                       \
    X(LG_ERR_STATE, 2, "call not allowed now")                     \
    X(LG_ERR_NOMEM, 3, "out of memory")                            \
    X(LG_ERR_UNSUPPORTED, 4, "not supported")                      \
    X(LG_ERR_CONFLICT, 5, "ranks or calls contradict each other")  \
    X(LG_ERR_LIMIT, 6, "a documented limit is exceeded")           \
    X(LG_ERR_CANCELLED, 7, "stopped by the caller")                \
    /* the store */                                                \
    X(LG_ERR_NOT_FOUND, 20, "not found")                           \
    X(LG_ERR_EXISTS, 21, "exists already")                         \
    X(LG_ERR_IO, 22, "input/output error")                         \
    X(LG_ERR_NO_SPACE, 23, "no space left")                        \
    X(LG_ERR_PERMISSION, 24, "permission denied")                  \
    X(LG_ERR_READ_ONLY, 25, "read-only")                           \
    X(LG_ERR_NOT_DURABLE, 26, "not known to be durable")           \
    X(LG_ERR_NOT_EMPTY, 27, "folder not empty")                    \
    /* what is on disk */                                          \
    X(LG_ERR_CORRUPT, 40, "damaged data")                          \
    X(LG_ERR_FORMAT, 41, "not a valid file of this kind")          \
    X(LG_ERR_VERSION, 42, "written by a newer version")            \
    X(LG_ERR_MISSING, 43, "missing from the checkpoint")           \
    X(LG_ERR_MISMATCH, 44, "dtype or shape differs")               \
    X(LG_ERR_COVERAGE, 45, "boxes leave a hole or overlap")        \
    X(LG_ERR_WORLD, 46, "state of another number of ranks")        \
    /* the run */                                                  \
    X(LG_ERR_EMPTY, 60, "the root holds no checkpoint")            \
    X(LG_ERR_NO_GOOD, 61, "the root holds no good checkpoint")     \
    X(LG_ERR_SUPERSEDED, 62, "another session took the root over") \
    X(LG_ERR_OTHER_RUN, 63, "the root belongs to another run")     \
    X(LG_ERR_NOT_WHOLE, 64, "the checkpoint is damaged")           \
    X(LG_ERR_PROTECTED, 65, "protected from removal")              \
    /* between ranks */                                            \
    X(LG_ERR_COMM, 80, "communicator failed")                      \
    X(LG_ERR_TIMEOUT, 81, "deadline passed")                       \
    X(LG_ERR_PEER, 82, "another rank failed")                      \
    X(LG_ERR_INTERNAL, 99, "bug in lastgood")

typedef enum lg_status {
#define LG_STATUS_ENUM(name, number, text) name = (number),
    LG_STATUS_MAP(LG_STATUS_ENUM)
#undef LG_STATUS_ENUM
} lg_status;

/* "LG_ERR_NO_SPACE" and "no space left"; static storage; for numbers that are
 * no status "LG_ERR_?" and "unknown status". */
LG_API const char *lg_status_name(lg_status status);
LG_API const char *lg_status_text(lg_status status);

#define LG_ERROR_MESSAGE_MAX 2048

/* What went wrong. The message is one line that leads from the outside in:
 * "save step 500: rank 2: shard-00003-model-00001-of-00001.safetensors: write
 * at 1048576: no space left on device". */
typedef struct lg_error {
    lg_status status;
    int os_errno; /* 0 where the operating system had no part in it */
    int rank;     /* the rank where it happened first, -1 if unknown or single */
    char message[LG_ERROR_MESSAGE_MAX];
} lg_error;

#define LG_ERROR_INIT       \
    {                       \
        LG_OK, 0, -1, { 0 } \
    }

/* ------------------------------------------------------------------ dtypes */

/* The safetensors dtypes in that format's own order, as X(NAME, bits). */
#define LG_DTYPE_MAP(X) \
    X(BOOL, 8)          \
    X(F4, 4)            \
    X(F6_E2M3, 6)       \
    X(F6_E3M2, 6)       \
    X(U8, 8)            \
    X(I8, 8)            \
    X(F8_E5M2, 8)       \
    X(F8_E4M3, 8)       \
    X(F8_E8M0, 8)       \
    X(F8_E4M3FNUZ, 8)   \
    X(F8_E5M2FNUZ, 8)   \
    X(I16, 16)          \
    X(U16, 16)          \
    X(F16, 16)          \
    X(BF16, 16)         \
    X(I32, 32)          \
    X(U32, 32)          \
    X(F32, 32)          \
    X(C64, 64)          \
    X(F64, 64)          \
    X(I64, 64)          \
    X(U64, 64)

typedef enum lg_dtype {
#define LG_DTYPE_ENUM(name, bits) LG_##name,
    LG_DTYPE_MAP(LG_DTYPE_ENUM)
#undef LG_DTYPE_ENUM
        LG_DTYPE_COUNT
} lg_dtype;

LG_API const char *lg_dtype_name(lg_dtype dtype); /* "BF16"; "?" if invalid */
LG_API unsigned lg_dtype_bits(lg_dtype dtype);    /* 0 if invalid */
LG_API lg_status lg_dtype_parse(const char *name, lg_dtype *out);

#ifdef __cplusplus
}
#endif

#endif
