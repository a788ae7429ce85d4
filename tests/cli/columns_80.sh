# SPDX-License-Identifier: Apache-2.0
# help, notes in lists and what verify finds fit into 80 columns
make_root a --steps=100,200
# shellcheck disable=SC2016
wide() { awk -v of="$*" 'length > 80 { print of ": " $0 }' out; }
for command in '' ls show verify rollback pin rm prune sweep get diff help; do
    lastgood help $command >out
    wide help $command
done
flip "$(folder a 200)"/shard-00001-model-00001-of-00001.safetensors 5000
flip "$(folder a 200)"/shard-00002-optim-00001-of-00001.safetensors 4099
rm "$(folder a 100)"/shard-00002-model-*
lastgood verify a >out
wide verify
lastgood ls -a a >out
wide ls
echo done
