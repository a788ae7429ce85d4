/* SPDX-License-Identifier: Apache-2.0 */
#include "data.h"

#include "fatal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint8_t *read_file(const char *path, size_t *size)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        fatal("--data %s: %s", path, strerror(errno));
    size_t capacity = 1 << 20, n = 0;
    uint8_t *bytes = allocate(capacity, 1);
    for (;;) {
        n += fread(bytes + n, 1, capacity - n, f);
        if (n < capacity)
            break;
        if (capacity >= 1u << 30)
            fatal("--data %s: larger than 1 GiB", path);
        capacity *= 2;
        bytes = realloc(bytes, capacity);
        if (!bytes)
            fatal("--data %s: out of memory", path);
    }
    if (ferror(f))
        fatal("--data %s: %s", path, strerror(errno));
    fclose(f);
    *size = n;
    return bytes;
}

data *data_load(const char *path, uint32_t context, MPI_Comm comm)
{
    data *d = allocate(1, sizeof *d);
    int rank;
    MPI_Comm_rank(comm, &rank);
    if (rank == 0)
        d->bytes = read_file(path, &d->size);
    uint64_t size = d->size;
    MPI_Bcast(&size, 1, MPI_UINT64_T, 0, comm);
    d->size = (size_t)size;
    if (rank != 0)
        d->bytes = allocate(d->size, 1);
    MPI_Bcast(d->bytes, (int)d->size, MPI_BYTE, 0, comm);
    if (d->size < (size_t)context + 1)
        fatal("--data %s: %zu bytes are less than one window of %u", path, d->size, context + 1);
    d->context = context;
    d->samples = (d->size - 1) / context;
    d->fingerprint = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < d->size; i++)
        d->fingerprint = (d->fingerprint ^ d->bytes[i]) * UINT64_C(0x100000001b3);
    return d;
}

void data_free(data *d)
{
    if (!d)
        return;
    free(d->bytes), free(d);
}

const uint8_t *data_sample(const data *d, uint64_t index) { return d->bytes + index * d->context; }
