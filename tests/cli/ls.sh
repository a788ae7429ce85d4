# SPDX-License-Identifier: Apache-2.0
# ls lists newest first, with pins, rollbacks and what is damaged
mkdir runs
make_root runs/a --steps=100,200,300
run lastgood ls runs/a
run lastgood pin runs/a@100 --reason='for the report'
rm "$(folder runs/a 300)"/shard-00002-model-*
run lastgood ls runs/a
run lastgood rollback runs/a@200 --reason='loss spiked'
run lastgood ls runs/a
run lastgood ls runs/a@100
run lastgood ls "$(folder runs/a 200)"
run lastgood ls runs/a@g1.3
run lastgood ls runs/a@400
cd runs/a && run lastgood ls
