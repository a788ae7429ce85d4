# SPDX-License-Identifier: Apache-2.0
# what docs/operations.md tells to do at night works
make_root a --steps=100,200
run_of() { lastgood show --json "$1" 2>/dev/null | sed -n 's/ *"run": //p'; }

# A file that is put back makes its checkpoint whole again.
shard=$(ls "$(folder a 200)"/shard-00002-model-*)
mkdir backup
mv "$shard" backup/
quietly lastgood verify --newest a
cp backup/* "$shard"
run lastgood verify --newest a
# The file of another step is not taken for it, though it has the same size.
cp "$(folder a 100)/${shard##*/}" "$shard"
quietly lastgood verify --quiet --newest a
cp backup/* "$shard"

# A checkpoint that was renamed by hand is foreign, and counts again when it has its name back.
folder=$(folder a 200)
mv "$folder" "$folder.bak"
run lastgood ls -a a
mv "$folder.bak" "$folder"
run lastgood ls a@200

# Brought into a new root it is resumed from, and the run keeps its id.
cp -r "$folder" kept
mkdir new
cp -r kept new/incoming
run lastgood ls new
run lastgood verify new/incoming
mv new/incoming "new/${folder##*/}"
make_root new --steps=300 --ranks=3
run lastgood ls new
[ "$(run_of a)" = "$(run_of new)" ] && echo 'the same run'

# After a rollback a step that is reached again means the new one.
run lastgood rollback a@100
make_root a --steps=200
run lastgood ls a@200
run lastgood ls --json a@g1.2 | grep -e discarded
run lastgood verify a@200
