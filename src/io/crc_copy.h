/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_IO_CRC_COPY_H
#define LG_IO_CRC_COPY_H

#include <stddef.h>
#include <stdint.h>

/* lg__copy_away and the CRC32C of the bytes, in one pass where both do not lie
 * alike in their pages: the digest is computed while the stores wait for memory,
 * so it costs next to nothing. Returns lg__crc32c(0, from, bytes). */
uint32_t lg__crc32c_copy_away(void *to, const void *from, size_t bytes);

#endif
