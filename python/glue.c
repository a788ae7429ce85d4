/* SPDX-License-Identifier: Apache-2.0 */
#include "glue.h"

#include <lastgood/backend.h>

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

/* Where the next tensor's entries begin. */
typedef struct cursor {
    const char *name;
    size_t dim;
} cursor;

static void step(cursor *at, uint32_t ndim)
{
    at->name += strlen(at->name) + 1;
    at->dim += ndim;
}

lg_status lgpy_save_tensors(lg_save *save, const lgpy_columns *columns, lg_error *err)
{
    cursor at = {columns->names, 0};
    for (size_t i = 0; i < columns->n; i++) {
        uint32_t form = columns->forms[i];
        lg_tensor t = LG_TENSOR_INIT;
        t.name = at.name;
        t.dtype = (lg_dtype)columns->dtypes[i];
        t.group = (lg_group)columns->groups[i];
        t.ndim = columns->ndims[i];
        t.shape = columns->dims + at.dim;
        t.data = (const void *)(uintptr_t)columns->data[i];
        t.flags = columns->flags[i];
        if (form & LGPY_STRIDED) {
            t.strides = columns->strides + at.dim;
        }
        if (form & LGPY_LOCAL) {
            t.local_shape = columns->local_dims + at.dim;
        }
        if (columns->layouts != NULL) {
            t.layout = (const lg_layout *)(uintptr_t)columns->layouts[i];
            t.flat_offset = columns->flat_offsets[i];
        }
        lg_status status = lg_save_tensor(save, &t, err);
        if (status != LG_OK) {
            return status;
        }
        step(&at, t.ndim);
    }
    return LG_OK;
}

lg_status lgpy_load_tensors(lg_load *load, const lgpy_columns *columns, lg_error *err)
{
    cursor at = {columns->names, 0};
    for (size_t i = 0; i < columns->n; i++) {
        uint32_t form = columns->forms[i];
        lg_target t = LG_TARGET_INIT;
        t.name = at.name;
        t.dtype = (lg_dtype)columns->dtypes[i];
        t.ndim = columns->ndims[i];
        t.shape = columns->dims + at.dim;
        t.data = (void *)(uintptr_t)columns->data[i];
        t.flags = columns->flags[i];
        t.rank = columns->ranks[i];
        if (form & LGPY_STRIDED) {
            t.strides = columns->strides + at.dim;
        }
        if (form & LGPY_REGION) {
            t.offset = columns->offsets + at.dim;
            t.extent = columns->extents + at.dim;
        }
        if (columns->layouts != NULL) {
            t.layout = (const lg_layout *)(uintptr_t)columns->layouts[i];
            t.flat_offset = columns->flat_offsets[i];
        }
        lg_status status = lg_load_tensor(load, &t, err);
        if (status != LG_OK) {
            return status;
        }
        step(&at, t.ndim);
    }
    return LG_OK;
}

lg_status lgpy_tensor_infos(lg_checkpoint *c, lg_tensor_info *out, size_t n, lg_error *err)
{
    for (size_t i = 0; i < n; i++) {
        lg_status status = lg_checkpoint_tensor(c, i, &out[i], err);
        if (status != LG_OK) {
            return status;
        }
    }
    return LG_OK;
}

void lgpy_sampler_peek(const lg_sampler *s, uint64_t n, uint64_t *out)
{
    for (uint64_t i = 0; i < n; i++) {
        out[i] = lg_sampler_peek(s, i);
    }
}

static volatile pid_t trainer_pid;

static void on_term(int number, siginfo_t *info, void *context)
{
    (void)context;
    if (info->si_pid == trainer_pid) {
        signal(number, SIG_DFL);
        kill(getpid(), number); /* ends the process once this function returns */
    }
}

static void on_usr1(int number) { (void)number; }

lg_status lgpy_outlive_signals(int64_t trainer, lg_error *err)
{
    trainer_pid = (pid_t)trainer;
    struct sigaction term = {.sa_flags = SA_SIGINFO | SA_RESTART}, usr1 = {.sa_flags = SA_RESTART};
    term.sa_sigaction = on_term;
    usr1.sa_handler = on_usr1;
    sigemptyset(&term.sa_mask);
    sigemptyset(&usr1.sa_mask);
    if (sigaction(SIGTERM, &term, NULL) != 0 || sigaction(SIGUSR1, &usr1, NULL) != 0) {
        return lg_error_set_errno(err, errno, "sigaction");
    }
    return LG_OK;
}
