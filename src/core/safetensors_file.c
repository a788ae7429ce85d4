/* SPDX-License-Identifier: Apache-2.0 */
#include "core/checkpoint.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct lg_safetensors {
    lg_store *store; /* of the parent folder */
    lg_file *file;
    lg__st_header *header;
};

/* A store never follows links, since names in it are not the user's. This path
 * is: hubs keep their files as links. */
static lg_status resolve(const char *path, char **real, lg_error *err)
{
    struct stat st;
    char *r = realpath(path, NULL);
    if (r == NULL || stat(r, &st) != 0) {
        lg_status status = errno == ENOENT ? lg_error_set(err, LG_ERR_NOT_FOUND, "there is no such file")
                                           : lg_error_set_errno(err, errno, "open");
        free(r);
        return status;
    }
    lg_status status = LG_OK;
    if (S_ISDIR(st.st_mode)) {
        status = lg_error_set(err, LG_ERR_FORMAT, "is a folder, not a safetensors file");
    } else if (!S_ISREG(st.st_mode)) {
        status = lg_error_set(err, LG_ERR_FORMAT, "is a %s, not a safetensors file",
                              S_ISFIFO(st.st_mode)   ? "FIFO"
                              : S_ISSOCK(st.st_mode) ? "socket"
                                                     : "device");
    } else if (st.st_size == 0) {
        status = lg_error_set(err, LG_ERR_FORMAT, "is empty (0 bytes): not a safetensors file");
    }
    if (status != LG_OK) {
        free(r);
        return status;
    }
    *real = r;
    return LG_OK;
}

static lg_status open_parent(char *real, lg_store **store, const char **name, lg_error *err)
{
    char *slash = strrchr(real, '/'); /* realpath gives an absolute one */
    LG__RETURN_IF(slash == NULL, err, LG_ERR_INTERNAL, "path is not absolute");
    *name = slash + 1;
    lg__buf uri;
    lg__buf_init(&uri, 16384);
    lg__buf_fmt(&uri, "file:%.*s", slash == real ? 1 : (int)(slash - real), real);
    lg_status status = lg__buf_check(&uri, "path", err);
    if (status == LG_OK) {
        status = lg_store_open(uri.data, store, err);
    }
    lg__buf_free(&uri);
    return status;
}

static lg_status read_form(lg_safetensors *f, uint64_t bytes, lg_error *err)
{
    uint8_t first[64];
    size_t first_bytes = bytes < sizeof first ? (size_t)bytes : sizeof first;
    LG__TRY(lg__store_read(f->store, f->file, first, first_bytes, 0, err));
    uint64_t n;
    LG__TRY(lg__st_header_bytes(first, first_bytes, bytes, &n, err));
    char *text = lg__malloc((size_t)n);
    if (text == NULL) {
        return lg__nomem(err);
    }
    lg_status status = lg__store_read(f->store, f->file, text, (size_t)n, 8, err);
    if (status == LG_OK) {
        status = lg__st_parse(text, n, bytes, &f->header, err);
    }
    lg__free(text);
    return status;
}

static lg_status open_at(const char *path, lg_safetensors *f, lg_error *err)
{
    char *real = NULL;
    LG__TRY(resolve(path, &real, err));
    const char *name = NULL;
    uint64_t bytes = 0;
    lg_status status = open_parent(real, &f->store, &name, err);
    if (status == LG_OK) {
        status = lg__store_open_file(f->store, name, &f->file, &bytes, err);
    }
    if (status == LG_OK) {
        status = read_form(f, bytes, err);
    }
    free(real);
    return status;
}

lg_status lg_safetensors_open(const char *path, lg_safetensors **out, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(path == NULL || *path == '\0' || out == NULL, err, LG_ERR_INVALID,
                  "lg_safetensors_open needs a path and a result");
    lg_safetensors *f = lg__calloc(1, sizeof *f);
    if (f == NULL) {
        return lg__nomem(err);
    }
    lg_status status = open_at(path, f, err);
    if (status != LG_OK) {
        lg_safetensors_close(f);
        return lg_error_wrap(err, "%s", path);
    }
    *out = f;
    return LG_OK;
}

void lg_safetensors_close(lg_safetensors *file)
{
    if (file == NULL) {
        return;
    }
    lg_error ignored;
    if (file->file != NULL) {
        lg__store_close(file->store, file->file, &ignored);
    }
    lg__st_free(file->header);
    lg_store_free(file->store);
    lg__free(file);
}

size_t lg_safetensors_count(const lg_safetensors *file) { return file == NULL ? 0 : file->header->n; }

lg_status lg_safetensors_tensor(const lg_safetensors *file, size_t i, const char **name, lg_dtype *dtype,
                                uint32_t *ndim, const uint64_t **shape, uint64_t *begin, uint64_t *end, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(file == NULL, err, LG_ERR_INVALID, "lg_safetensors_tensor needs a file");
    LG__RETURN_IF(i >= file->header->n, err, LG_ERR_INVALID, "tensor %zu of %zu", i, file->header->n);
    const lg__st_tensor *t = &file->header->tensors[i];
#define SET(place, value)       \
    do {                        \
        if ((place) != NULL) {  \
            *(place) = (value); \
        }                       \
    } while (0)
    SET(name, t->name);
    SET(dtype, t->dtype);
    SET(ndim, t->ndim);
    SET(shape, t->shape);
    SET(begin, t->begin);
    SET(end, t->end);
    return LG_OK;
}

size_t lg_safetensors_metadata_count(const lg_safetensors *file) { return file == NULL ? 0 : file->header->n_metadata; }

lg_status lg_safetensors_metadata(const lg_safetensors *file, size_t i, const char **key, const char **value,
                                  lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(file == NULL, err, LG_ERR_INVALID, "lg_safetensors_metadata needs a file");
    LG__RETURN_IF(i >= file->header->n_metadata, err, LG_ERR_INVALID, "entry %zu of %zu", i, file->header->n_metadata);
    SET(key, file->header->metadata[i].key);
    SET(value, file->header->metadata[i].value);
    return LG_OK;
}

lg_status lg_safetensors_read(lg_safetensors *file, size_t i, void *data, size_t bytes, lg_error *err)
{
    LG__ERR(err);
    LG__RETURN_IF(file == NULL, err, LG_ERR_INVALID, "lg_safetensors_read needs a file");
    LG__RETURN_IF(i >= file->header->n, err, LG_ERR_INVALID, "tensor %zu of %zu", i, file->header->n);
    const lg__st_tensor *t = &file->header->tensors[i];
    LG__RETURN_IF(t->end - t->begin != bytes, err, LG_ERR_INVALID, "\"%.200s\" has %llu bytes, not %zu", t->name,
                  (unsigned long long)(t->end - t->begin), bytes);
    if (bytes == 0) {
        return LG_OK;
    }
    LG__RETURN_IF(data == NULL, err, LG_ERR_INVALID, "lg_safetensors_read needs memory");
    return lg__store_read(file->store, file->file, data, bytes, file->header->data_start + t->begin, err);
}
