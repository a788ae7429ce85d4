# SPDX-License-Identifier: Apache-2.0
# K03: nothing is removed without --yes, never what is pinned or the last good one
make_root a --steps=100,200,300,400
run lastgood prune a
run lastgood prune a --keep-last=0
run lastgood prune a --keep-last=2
run lastgood ls a
run lastgood pin a@100 -r 'for the paper'
run lastgood prune a --keep-last=1 --keep-every=200 --yes
run lastgood rm a@100
run lastgood rm --yes a@100
run lastgood pin --unpin a@100
run lastgood rm --yes a@100
run lastgood rm --yes a
run lastgood rm --yes a@5
# Only reading every byte tells that the other one is damaged.
flip "$(folder a 200)"/shard-00001-model-00001-of-00001.safetensors 5000
run lastgood rm a@400
run lastgood rm --yes a@400
run lastgood rm --last a@400
run lastgood prune --json --keep-last=1 a
run lastgood rm --json --yes a@200
run lastgood ls a
run lastgood prune a@400 --keep-last=1
# A manifest that cannot be read does not keep a checkpoint from going.
make_root a --steps=500,600
flip "$(folder a 500)"/lastgood.json 300
rm "$(folder a 400)"/lastgood.json
run lastgood rm --yes a@500
run lastgood rm --yes "$(folder a 400)"
run lastgood ls a
