/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "comm/comm.h"

static lg_status single_barrier(void *ctx, uint64_t deadline_ms, lg_error *err)
{
    (void)ctx, (void)deadline_ms, (void)err;
    return LG_OK;
}

static lg_status single_all_gather(void *ctx, const void *data, size_t bytes, void **all, size_t *sizes,
                                   uint64_t deadline_ms, lg_error *err)
{
    (void)ctx, (void)deadline_ms;
    void *copy = lg__memdup(data, bytes);
    if (copy == NULL) {
        return lg__nomem(err);
    }
    *all = copy;
    sizes[0] = bytes;
    return LG_OK;
}

static lg_status single_broadcast(void *ctx, void **data, size_t *bytes, uint32_t root, uint64_t deadline_ms,
                                  lg_error *err)
{
    (void)ctx, (void)data, (void)bytes, (void)root, (void)deadline_ms, (void)err;
    return LG_OK;
}

static lg_status single_all_to_all(void *ctx, const void *const *send, const size_t *send_bytes, void **recv,
                                   size_t *recv_bytes, uint64_t deadline_ms, lg_error *err)
{
    (void)ctx, (void)deadline_ms;
    void *copy = NULL;
    if (send_bytes[0] > 0) {
        copy = lg__memdup(send[0], send_bytes[0]);
        if (copy == NULL) {
            return lg__nomem(err);
        }
    }
    recv[0] = copy;
    recv_bytes[0] = send_bytes[0];
    return LG_OK;
}

static const lg_comm_ops single_ops = {
    .version = LG_COMM_OPS_VERSION,
    .barrier = single_barrier,
    .all_gather = single_all_gather,
    .broadcast = single_broadcast,
    .all_to_all = single_all_to_all,
};

lg_status lg_comm_single_create(lg_comm **out, lg_error *err)
{
    return lg_comm_create(&single_ops, NULL, 0, 1, out, err);
}
