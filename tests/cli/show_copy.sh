# SPDX-License-Identifier: Apache-2.0
# a step folder that was copied elsewhere, under any name, shows and verifies
make_root a --steps=100
mkdir elsewhere
cp -r "$(folder a 100)" elsewhere/kept
cp -r "$(folder a 100)" elsewhere/with@100
ln -s "$PWD/$(folder a 100)" latest
run lastgood verify elsewhere/kept
run lastgood verify elsewhere/with@100
run lastgood verify elsewhere/kept/
run lastgood verify latest
run lastgood verify "file:$PWD/elsewhere/kept"
run lastgood verify "file://$PWD/elsewhere/with%40100"
run lastgood verify file://elsewhere/kept
run lastgood verify "file://$PWD/elsewhere/with%4"
cp -r elsewhere/kept mem:kept
run lastgood verify mem:kept
run lastgood verify file:mem:kept
run lastgood get elsewhere/kept ids
run lastgood diff elsewhere/kept a@100
(cd elsewhere/kept && run lastgood verify . && run lastgood show . w)
run lastgood ls elsewhere
run lastgood rollback elsewhere/kept
(cd a && run lastgood show "$(basename "$(folder . 100)")" | head -n 3)
# Its manifest is damaged, and no root knows it.
flip elsewhere/kept/lastgood.json 200
run lastgood verify elsewhere/kept
run lastgood verify --json elsewhere/kept | grep -e result -e status
