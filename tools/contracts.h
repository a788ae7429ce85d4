/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TOOLS_CONTRACTS_H
#define LG_TOOLS_CONTRACTS_H

/* What tools/analyze puts in front of each source that sees src/. The analyzers
 * look at one source at a time, and would follow paths that break what a
 * function in another one promises. tools/analyze defines LG__IN_x for x.c: a
 * function is not a macro where it is defined.
 *
 * Expressions, not inline functions: clang's analyzer looks five calls deep,
 * and none of these may be the sixth. */

#include <lastgood/backend.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "format/manifest.h"
#include "format/member.h"

/* A function that describes an error does not return success. */
#define LG__FAILS(call)                 \
    __extension__({                     \
        lg_status lg__failed_ = (call); \
        if (lg__failed_ == LG_OK) {     \
            abort();                    \
        }                               \
        lg__failed_;                    \
    })

/* What is to be found in `*out` is there when the call succeeds. */
#define LG__GIVES(out, call)                         \
    __extension__({                                  \
        lg_status lg__given_ = (call);               \
        if (lg__given_ == LG_OK && *(out) == NULL) { \
            abort();                                 \
        }                                            \
        lg__given_;                                  \
    })

#ifndef LG__IN_error
#define lg_error_set(...) LG__FAILS(lg_error_set(__VA_ARGS__))
#define lg_error_set_errno(...) LG__FAILS(lg_error_set_errno(__VA_ARGS__))
#define lg_error_wrap(...) LG__FAILS(lg_error_wrap(__VA_ARGS__)) /* of an error that is there */
#endif

#ifndef LG__IN_member
#define lg__at_error(...) LG__FAILS(lg__at_error(__VA_ARGS__))
#define lg__at_wrap(...) LG__FAILS(lg__at_wrap(__VA_ARGS__)) /* of an error that is there */
#endif

#ifndef LG__IN_manifest_read
#define lg__manifest_decode(bytes, n, out, err) LG__GIVES(out, lg__manifest_decode(bytes, n, out, err))
#endif

#if defined LG__IN_posix || defined LG__IN_posix_queue
#include "store/posix.h"
#define lg__posix_fail(...) LG__FAILS(lg__posix_fail(__VA_ARGS__))
#define lg__posix_fail_data(...) LG__FAILS(lg__posix_fail_data(__VA_ARGS__))
#define lg__posix_fail_sync(...) LG__FAILS(lg__posix_fail_sync(__VA_ARGS__))
#endif

#if defined LG__IN_mpi || defined LG__IN_mpi_exchange
#include "comm/mpi_wire.h"
#define lg__mpi_no_memory(err) LG__FAILS(lg__mpi_no_memory(err))
#endif

#ifndef LG__IN_mem
#define lg__nomem(err) LG__FAILS(lg__nomem(err))
#ifdef __clang__
/* So that it follows what becomes of the library's memory. gcc 12 loses sight of
 * memory that hangs on other memory, and calls that a leak. */
#define lg__malloc(bytes) malloc(bytes)
#define lg__calloc(n, bytes) calloc((n), (bytes))
#define lg__realloc(p, bytes) realloc((p), (bytes))
#define lg__strdup(s) strdup(s)
#define lg__free(p) free(p)
#endif
/* Its memory is zeroed. */
#define lg__arena_alloc(arena, bytes)                                    \
    __extension__({                                                      \
        size_t lg__bytes_ = (bytes);                                     \
        void *lg__zeroed_ = lg__arena_alloc((arena), lg__bytes_);        \
        lg__zeroed_ != NULL ? memset(lg__zeroed_, 0, lg__bytes_) : NULL; \
    })
#endif

#endif
