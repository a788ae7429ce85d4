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
run lastgood show -t'q.f?' a@100
run lastgood show -tw a@100
run lastgood show -t 'q.f?' a@100
run lastgood diff -t 'q.*' a@100 a@100
run lastgood show --state=samples a@100
for key in note lr betas; do
    run lastgood show --state=$key a@100
done
run lastgood show --state=nothing a@100
run lastgood show --json --state=samples a@100
run lastgood get a@100 samples
