# SPDX-License-Identifier: Apache-2.0
# show NAME tells a tensor's boxes and who holds them
make_root a --steps=100 --ranks=3 --differ
for name in w mask stats head.weight q.f4 optim.w.exp_avg none count; do
    run lastgood show a@100 $name
done
run lastgood show a@100 head.wieght
run lastgood show a@100 module.w.weight
run lastgood show --json a@100 w
