/* SPDX-License-Identifier: Apache-2.0 */
#include <lastgood/lastgood.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    float w[2][3] = {{0, 1, 2}, {3, 4, 5}}, row[3] = {0};
    uint64_t shape[] = {2, 3}, offset[] = {1, 0}, extent[] = {1, 3}, step = 0;
    lg_error err = LG_ERROR_INIT;
    lg_tensor t = LG_TENSOR_INIT;
    t.name = "w", t.ndim = 2, t.shape = shape, t.data = w;
    lg_target r = LG_TARGET_INIT;
    r.name = "w", r.ndim = 2, r.shape = shape, r.offset = offset, r.extent = extent, r.data = row;
    if (argc != 2 || lg_write(argv[1], 500, &t, 1, &err) != LG_OK || lg_read(argv[1], &r, 1, &step, &err) != LG_OK) {
        printf("%s\n", err.message);
        return 1;
    }
    return step == 500 && memcmp(row, w[1], sizeof row) == 0 ? 0 : 2;
}
