/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPT_DATA_H
#define GPT_DATA_H

/* The text, cut into windows: sample i is the bytes [i*context, (i+1)*context]. */

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

typedef struct data {
    uint8_t *bytes;
    size_t size;
    uint32_t context;
    uint64_t samples;
    uint64_t fingerprint; /* FNV-1a of the bytes: is it the same text? */
} data;

/* Collective: rank 0 reads the file. */
data *data_load(const char *path, uint32_t context, MPI_Comm comm);
void data_free(data *d);

/* context + 1 bytes. */
const uint8_t *data_sample(const data *d, uint64_t index);

#endif
