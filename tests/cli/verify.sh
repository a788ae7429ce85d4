# SPDX-License-Identifier: Apache-2.0
# K01: verify names file, tensor and range of every damaged byte
make_root a --steps=10,20,30,40,50,60
run lastgood verify a
flip "$(folder a 60)"/shard-00001-model-00001-of-00001.safetensors 5000
flip "$(folder a 60)"/shard-00002-optim-00001-of-00001.safetensors 4099
flip "$(folder a 60)"/shard-00001-raw-00001-of-00001.state 20
flip "$(folder a 60)"/config.json 3
rm "$(folder a 50)"/shard-00002-model-*
truncate -s 4200 "$(folder a 50)"/shard-00002-optim-*
flip "$(folder a 40)"/lastgood.json 200
rm "$(folder a 30)"/lastgood.json
flip "$(folder a 20)"/rank-00002.sums 1300
run lastgood verify a
run lastgood verify --newest a
run lastgood verify a@10
run lastgood verify a@40
run lastgood verify a@g1.3
run lastgood verify "$(folder a 30)"
run lastgood verify --quiet a@60
run lastgood verify --quiet a@10
run lastgood verify --json a@60
run lastgood verify --json a@40
run lastgood verify a@70
run lastgood verify gone
run lastgood verify --threads=0 a
run lastgood verify --threads=3 a@10
