# SPDX-License-Identifier: Apache-2.0
# what is passed over, pinned, nothing to do, and spaces in slices are told as they are
make_root a --steps=100,200,300
make_root b --steps=300 --tweak=state --tweak=attached --tweak=rank
run lastgood prune --keep-last=5 a
run lastgood prune --keep-last=5 --yes --json a
run lastgood pin a@200 -r 'for the paper'
run lastgood show a@200
run lastgood rollback a@100
run lastgood ls --json a
run lastgood show a@300
run lastgood diff --json a@300 b@300
for slice in ' 0 , 1 ' '[ 1 ]' '0 : 1 , :' 1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1; do
    run lastgood get a@100 ids "$slice"
done
run lastgood bench a@100
run lastgood bench . --size=1KiB
run lastgood bench . --size=32MiB --tensors=100000
run lastgood bench . --size=32MiB --tensors=x
run lastgood rm "$(folder a 300)/lastgood.json"
run lastgood ls a/../b
