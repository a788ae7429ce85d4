# SPDX-License-Identifier: Apache-2.0
# K22: a checkpoint of a newer version is called that, not damaged, and nothing goes beside it
make_root a --steps=100,200,300
newer "$(folder a 300)"/lastgood.json
run lastgood ls a
run lastgood show a
run lastgood show a@300
run lastgood get a w 0,0
run lastgood get a@200 w 0,0
run lastgood verify a
run lastgood verify a@300
run lastgood verify --newest --json a
run lastgood prune a --keep-last=1
run lastgood prune a --keep-last=1 --yes
run lastgood rm a@100
run lastgood rm --yes a@100
run lastgood rm --json a@100
run lastgood sweep --yes a
run lastgood rollback a@300
run lastgood pin a@300
run lastgood ls a@100
# Not even what a crash left.
mkdir a/.step-000000000400.g0.9.0123456789abcdef.partial a/.trash-1.0123456789abcdef-step-000000000050.g1.1
run lastgood sweep --yes a
run lastgood sweep --yes --json a
