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
flip "$(folder a 250)"/lastgood.json 300
run lastgood rollback a
run lastgood rollback a@250
run lastgood rollback a@5
run lastgood verify a@200
flip a/rollback-2.1.json 50
run lastgood ls a
run lastgood verify a
