# SPDX-License-Identifier: Apache-2.0
# show summarises a checkpoint and says what others could not open
make_root a --steps=100
make_root a --steps=200 --once --differ
run lastgood show a@100
run lastgood show a
cp "$(folder a 100)/config.json" "$(folder a 100)/extra.safetensors"
echo x >"$(folder a 100)/notes.txt"
run lastgood show a@100
rm "$(folder a 200)"/rank-00002.sums
truncate -s 5000 "$(folder a 200)"/shard-00001-model-*
run lastgood show a@200
