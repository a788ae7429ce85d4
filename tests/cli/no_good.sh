# SPDX-License-Identifier: Apache-2.0
# where nothing can be taken, and where something is one too many, a sentence says so
make_root a --steps=100,200
for step in 100 200; do truncate -s 10 "$(folder a $step)"/shard-00001-model-*; done
run lastgood get a w 0,0
run lastgood show a
run lastgood get --json a w 0,0
# Two runs have a checkpoint of one generation, and one was copied to the other.
make_root b --steps=100
make_root c --steps=300
cp -r "$(folder b 100)" c/
run lastgood ls c
run lastgood get c w 0,0
run lastgood get c@300 w 0,0
run lastgood verify c
# Where a rollback leads is not known.
make_root d --steps=100,200
quietly lastgood rollback d@200
quietly lastgood rollback d@100
flip d/rollback-3.1.json 50
run lastgood get d w 0,0
run lastgood get d@200 w 0,0
# One too many, or one too few.
run lastgood get d@200 w -o
run lastgood get d@200 w "$(printf '0,%.0s' $(seq 32))0"
# shellcheck disable=SC2046
run lastgood ls $(printf ' --bytes%.0s' $(seq 33)) d | tail -n +2
run lastgood ls "$(printf 'x%.0s' $(seq 5000))" | sed 's/x\{20,\}/x…/g'
lastgood get d@200 w 0,0 -o - 2>&1 >/dev/full
echo "exit $?"
