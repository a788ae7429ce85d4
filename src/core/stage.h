/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_CORE_STAGE_H
#define LG_CORE_STAGE_H

/* The files of one rank as they will be on disk, in memory: where a save in the
 * background keeps what it took from the trainer. Written from there as they
 * are, so that nothing is copied twice.
 *
 * The image is cut into *units* of whole checksum blocks, about a MiB each, and
 * these are what threads take and the writer gets in order. What must be copied
 * before the launch returns is copied by several threads, into whichever units
 * it belongs; what is lazy follows in the background. Digests come when all is
 * copied, so that the trainer has its memory back as soon as can be. */

#include "core/ready.h"
#include "core/save.h"

/* Memory that the image of a plan takes. UINT64_MAX when it overflows. */
uint64_t lg__stage_bytes(const lg__plan *plan);

/* `memory`: lg__stage_bytes bytes, aligned to 4096, kept until the end. `plan`
 * outlives the stage. Headers are copied here. */
lg_status lg__stage_new(const lg__plan *plan, uint64_t block_bytes, void *memory, size_t bytes, lg__stage **out,
                        lg_error *err);
/* Waits for its threads. NULL is fine. */
void lg__stage_free(lg__stage *s);

/* Bytes of boxes that are lazy, and of those that are not. */
uint64_t lg__stage_lazy_bytes(const lg__stage *s);
uint64_t lg__stage_eager_bytes(const lg__stage *s);

/* Copies what is not lazy: this thread and up to threads - 1 others. */
lg_status lg__stage_copy_eager(lg__stage *s, uint32_t threads, lg_error *err);

/* Lets `threads` copy what is lazy, in the order of the files, once it is ready.
 * `staged` is called once, by one of them or by this thread, when no memory of the
 * trainer is going to be read any more, also after a failure. */
void lg__stage_start_lazy(lg__stage *s, uint32_t threads, lg__ready ready, void (*staged)(void *arg), void *arg);

/* The next part of a file, complete and digested: waits for it. Files and parts
 * come in order: call until *last for each file. The first error of any copying
 * thread is returned here. */
lg_status lg__stage_take(lg__stage *s, size_t file, const void **data, size_t *bytes, bool *last, lg_error *err);

/* Checksums of the file's blocks; complete when its last part was taken. The
 * array is the stage's. */
lg__table lg__stage_table(const lg__stage *s, size_t file);

void *lg__stage_memory(const lg__stage *s, size_t *bytes);

#endif
