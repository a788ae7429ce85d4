/* SPDX-License-Identifier: Apache-2.0 */
#include "base/hash.h"

#include "base/error.h"
#include "base/mem.h"

#include <errno.h>
#include <isa-l/crc.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

uint32_t lg__crc32c(uint32_t crc, const void *data, size_t bytes)
{
    /* ISA-L takes an int and neither begins nor ends with the inversion. */
    unsigned char *p = (unsigned char *)(uintptr_t)data;
    crc = ~crc;
    while (bytes > 0) {
        int n = bytes > (1 << 30) ? 1 << 30 : (int)bytes;
        crc = crc32_iscsi(p, n, crc);
        p += n;
        bytes -= (size_t)n;
    }
    return ~crc;
}

/* Looking the algorithm up takes longer than digesting 100 bytes, so it is done
 * once. It is OpenSSL's to free, at the program's end. */
static pthread_once_t fetched = PTHREAD_ONCE_INIT;
static const EVP_MD *sha256_md;

static void fetch(void)
{
    sha256_md = EVP_MD_fetch(NULL, "SHA256", NULL);
    sha256_md = sha256_md != NULL ? sha256_md : EVP_sha256();
}

static const EVP_MD *sha256(void)
{
    pthread_once(&fetched, fetch);
    return sha256_md;
}

struct lg__sha256 {
    EVP_MD_CTX *ctx;
};

lg__sha256 *lg__sha256_new(void)
{
    lg__sha256 *h = lg__calloc(1, sizeof *h);
    if (h == NULL) {
        return NULL;
    }
    h->ctx = EVP_MD_CTX_new();
    if (h->ctx == NULL || EVP_DigestInit_ex(h->ctx, sha256(), NULL) != 1) {
        lg__sha256_free(h);
        return NULL;
    }
    return h;
}

bool lg__sha256_add(lg__sha256 *h, const void *data, size_t bytes)
{
    return EVP_DigestUpdate(h->ctx, data, bytes) == 1;
}

bool lg__sha256_end(lg__sha256 *h, uint8_t out[LG__SHA256_BYTES])
{
    return EVP_DigestFinal_ex(h->ctx, out, NULL) == 1 && EVP_DigestInit_ex(h->ctx, NULL, NULL) == 1;
}

void lg__sha256_free(lg__sha256 *h)
{
    if (h != NULL) {
        EVP_MD_CTX_free(h->ctx);
        lg__free(h);
    }
}

lg_status lg__sha256_of(const void *data, size_t bytes, uint8_t out[LG__SHA256_BYTES], lg_error *err)
{
    if (EVP_Digest(data, bytes, out, NULL, sha256(), NULL) != 1) {
        return lg__nomem(err);
    }
    return LG_OK;
}

void lg__hex(const uint8_t *bytes, size_t n, char *out)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[2 * n] = '\0';
}

static int digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool lg__unhex(const char *hex, uint8_t *out, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int high = digit(hex[2 * i]);
        int low = high < 0 ? -1 : digit(hex[2 * i + 1]);
        if (low < 0) {
            return false;
        }
        out[i] = (uint8_t)(high << 4 | low);
    }
    return hex[2 * n] == '\0';
}

lg_status lg__random(void *out, size_t n, lg_error *err)
{
    unsigned char *p = out;
    while (n > 0) {
        ssize_t got = getrandom(p, n, 0);
        if (got < 0) {
            if (errno == EINTR) {
                continue;
            }
            return lg_error_set_errno(err, errno, "getrandom");
        }
        p += got;
        n -= (size_t)got;
    }
    return LG_OK;
}

uint64_t lg__now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

void lg__utc(char out[LG_CREATED_TEXT])
{
    time_t now = time(NULL);
    struct tm tm;
    if (gmtime_r(&now, &tm) == NULL || strftime(out, LG_CREATED_TEXT, "%Y-%m-%dT%H:%M:%SZ", &tm) == 0) {
        memcpy(out, "1970-01-01T00:00:00Z", LG_CREATED_TEXT);
    }
}
