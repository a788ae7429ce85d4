# SPDX-License-Identifier: Apache-2.0
# K12: get prints every dtype at full precision, and large tensors as a summary
make_root a --steps=100
for name in w norm stats wide freqs count flags ids q.f8 q.scale q.f4 none mask embed.weight head.weight big; do
    run lastgood get a@100 $name
done
run lastgood get --all a@100 big 0:3
run lastgood get --all a@100 big | tail -n 2
run lastgood get --json a@100 ids
run lastgood get --json a@100 none
run lastgood get --json a@100 norm
quietly lastgood get --json a@100 big
run lastgood get a@100 wigde
# Damage in what a summary shows is told, and nothing is printed.
flip "$(folder a 100)"/shard-00001-model-00001-of-00001.safetensors 5000
run lastgood get a@100 big
