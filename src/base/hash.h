/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_BASE_HASH_H
#define LG_BASE_HASH_H

/* CRC32C (RFC 3720, appendix B.4; from ISA-L) and SHA-256 (from OpenSSL). */

#include <lastgood/lastgood.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The usual CRC32C: lg__crc32c(0, "123456789", 9) is 0xe3069283; the value of
 * one part goes in as `crc` of the next. */
uint32_t lg__crc32c(uint32_t crc, const void *data, size_t bytes);

#define LG__SHA256_BYTES 32
typedef struct lg__sha256 lg__sha256;
lg__sha256 *lg__sha256_new(void); /* NULL when memory is out */
bool lg__sha256_add(lg__sha256 *h, const void *data, size_t bytes);
bool lg__sha256_end(lg__sha256 *h, uint8_t out[LG__SHA256_BYTES]); /* ready for the next */
void lg__sha256_free(lg__sha256 *h);
lg_status lg__sha256_of(const void *data, size_t bytes, uint8_t out[LG__SHA256_BYTES], lg_error *err);

void lg__hex(const uint8_t *bytes, size_t n, char *out); /* 2n digits and NUL */
bool lg__unhex(const char *hex, uint8_t *out, size_t n); /* exactly 2n lower-case digits */

/* n random bytes from the kernel. */
lg_status lg__random(void *out, size_t n, lg_error *err);

/* Milliseconds of a clock that never jumps. */
uint64_t lg__now_ms(void);
/* "2026-11-29T18:31:57Z" of the wall clock; informative only, never compared. */
void lg__utc(char out[LG_CREATED_TEXT]);

#endif
