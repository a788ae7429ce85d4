# SPDX-License-Identifier: Apache-2.0
# rollback discards what is newer, deletes nothing, and can be undone
make_root a --steps=100,200,300
run lastgood rollback a@100 --reason 'loss spiked at 150'
run lastgood ls a
run lastgood rollback a@300
run lastgood ls a
run lastgood rollback --json a@200
make_root a --steps=250
run lastgood ls a
# What a rollback undoes and what it passes over are told.
run lastgood rollback a@300
run lastgood rollback a@250
flip "$(folder a 300)"/shard-00001-model-00001-of-00001.safetensors 5000
run lastgood rollback a@300
run lastgood rollback --no-verify a@300
run lastgood rollback a@200
flip "$(folder a 250)"/lastgood.json 300
run lastgood rollback a
run lastgood rollback a@250
run lastgood rollback a@5
run lastgood verify a@200
flip a/rollback-2.1.json 50
run lastgood ls a
run lastgood verify a
# A root that was rolled back is taken at what it goes back to.
make_root b --steps=100,200,300
quietly lastgood rollback b@200
run lastgood get b w 0,0
run lastgood show b | head -n 3
run lastgood pin b
