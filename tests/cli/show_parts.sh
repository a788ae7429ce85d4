# SPDX-License-Identifier: Apache-2.0
# show lists tensors, layouts, files and state, all or by pattern
make_root a --steps=100 --ranks=3 --differ
run lastgood show -t a@100
run lastgood show --tensors='optim.*' a@100
run lastgood show a@100 'q.*'
run lastgood show a@100 --tensors 'q.f?'
run lastgood show a@100 'zz*'
run lastgood show -lfs a@100
run lastgood show --layouts --all a@100
