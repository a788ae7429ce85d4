# SPDX-License-Identifier: Apache-2.0
# get -o writes .npy files that appear complete or not at all, and replaces none
umask 022
make_root a --steps=100
head_of() { head -c 128 "$1" | tr -d '\n' | LC_ALL=C sed 's/[^ -~]/./g'; echo; }
for name in w norm stats freqs count flags ids q.f8 q.f4 none embed.weight; do
    run lastgood get a@100 $name -o $name.npy
    head_of $name.npy
    tail -c +129 $name.npy | od -An -tx1 | head -n 4
done
# The shape and order of a slice that spans two ranks' boxes.
run lastgood get a@100 big 49:51,-2: -o part.npy
head_of part.npy
tail -c +129 part.npy | od -An -tf4
run lastgood get a@100 ids -o ids.npy
cp ids.npy before
run lastgood get a@100 ids 0 -o ids.npy --force
head_of ids.npy
run lastgood get a@100 ids -o no/such/ids.npy
run lastgood get a@100 ids -o .
lastgood get a@100 ids -o - | cmp - before && echo 'the same on standard output'
run lastgood get --json a@100 ids -o -
run lastgood get --json a@100 ids -o json.npy
flip "$(folder a 100)"/shard-00001-model-00001-of-00001.safetensors 12000
run lastgood get a@100 big -o big.npy
ls
ls -l w.npy | cut -c1-10
