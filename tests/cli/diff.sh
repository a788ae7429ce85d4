# SPDX-License-Identifier: Apache-2.0
# diff tells which tensors and state differ, and by how much
make_root a --steps=100,200
make_root b --steps=200 --tweak=value --tweak=sign --tweak=state --tweak=attached
make_root c --steps=200 --tweak=nan --tweak=dtype --tweak=shape --tweak=missing --tweak=extra
make_root d --steps=200 --tweak=rank
run lastgood diff a@200 a@200
run lastgood diff a@100 a@200
run lastgood diff a@200 b@200
run lastgood diff a@200 c@200
run lastgood diff a@200 d@200
run lastgood diff d@200 d@200
run lastgood diff --tensors='q.*' a@200 b@200
run lastgood diff --tensors='w*' a@200 b@200
run lastgood diff --tensors a@200 d@200
run lastgood diff --tensors='zz.nothing' a@200 d@200
run lastgood diff --all --tensors='w' --tolerance=2 a@200 b@200
run lastgood diff --tensors='w' --tolerance=0.5 a@200 b@200
run lastgood diff --tolerance=-1 a@200 b@200
make_root e --steps=200 --tweak=nan
make_root f --steps=200 --tweak=payload
run lastgood diff e@200 f@200
run lastgood diff --tolerance=0 e@200 f@200
run lastgood diff -q a@200 a@200
run lastgood diff -q a@200 b@200
run lastgood diff --json a@200 c@200
run lastgood diff a@200 a@999
flip "$(folder b 200)"/shard-00001-model-00001-of-00001.safetensors 5000
run lastgood diff a@200 b@200
run lastgood diff a@200
run lastgood diff a b c
