// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <iostream>
#include <lastgood/backend.h>
#include <lastgood/lastgood.h>

int main(int argc, char **argv)
{
    std::array<double, 4> w{{0.5, -1, 1e300, 3}}, back{{0, 0, 0, 0}};
    const uint64_t shape[] = {4};
    lg_error err = LG_ERROR_INIT;
    lg_tensor t = LG_TENSOR_INIT;
    t.name = "w", t.dtype = LG_F64, t.ndim = 1, t.shape = shape, t.data = w.data();
    lg_target r = LG_TARGET_INIT;
    r.name = "w", r.dtype = LG_F64, r.ndim = 1, r.shape = shape, r.data = back.data();
    if (argc != 2 || lg_write(argv[1], 7, &t, 1, &err) != LG_OK || lg_read(argv[1], &r, 1, nullptr, &err) != LG_OK) {
        std::cout << err.message << "\n";
        return 1;
    }
    return back == w ? 0 : 2;
}
