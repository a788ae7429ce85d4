# SPDX-License-Identifier: Apache-2.0
# slices are NumPy's, and mistakes name the dimension
make_root a --steps=100
for slice in 0 -1 1: :2 -1: 1:2 0:2,1 ...,0 1,... '[0, 1:]' 5:2 -99:99 '1,'; do
    run lastgood get a@100 ids "$slice"
done
run lastgood get a@100 mask 1:3,-2:
run lastgood get a@100 -1 mask
for slice in 2 -3 0,9 0,0,0 ::2 x 1:y ..., '...,...' ',' '1.5' 99999999999999999999; do
    run lastgood get a@100 ids "$slice"
done
run lastgood get a@100 count 0
run lastgood get a@100 q.f4 0:2
run lastgood get a@100 q.f4 0:1
run lastgood get a@100 ids "$(printf '0,%.0s' $(seq 40))0"
