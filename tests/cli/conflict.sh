# SPDX-License-Identifier: Apache-2.0
# of two checkpoints that claim one generation the one that is named is meant, and goes
make_root b --steps=100
make_root c --steps=300,400
cp -r "$(folder b 100)" c/
run lastgood ls c
run lastgood get c@g1.1 w 0,0
run lastgood verify c@g1.1
run lastgood pin c@g1.1
run lastgood rollback c@g1.1
run lastgood rm c@g1.1
run lastgood rm --yes c@g1.1
run lastgood get c@300 w 0,0
run lastgood rm c@300
run lastgood rm --yes c@300
run lastgood ls c
run lastgood get c@g1.1 w 0,0
# The newest good one is taken, and not the damaged one of its generation.
make_root e --steps=300
cp -r "$(folder b 100)" e/
flip "$(folder e 100)"/lastgood.json 200
run lastgood get e w 0,0
run lastgood rm --yes e@100
run ls e
