# SPDX-License-Identifier: Apache-2.0
# ls -a shows partial, trash, owner and foreign names too
make_root a --steps=100
make_root a --steps=200
mkdir a/.step-000000000300.g1.9.0123456789abcdef.partial a/.trash-2.0123456789abcdef-step-000000000050.g1.1
echo half >a/.step-000000000300.g1.9.0123456789abcdef.partial/shard-00001-model-00001-of-00001.safetensors
echo notes >a/notes.txt
run lastgood ls -a a
run lastgood ls -a a@300
run lastgood ls -a --json a
# An owner's file that a crash left empty, and an attempt that was ended in its place.
mkdir a/step-000000000400.g1.9
sed -n '/^<!-- example: tombstone/,/^```$/p' "${LASTGOOD_SOURCE:-$here/../..}/docs/format.md" | sed '1,2d; $d' >tombstone
sed -i 's/\[3,18\]/[1,9]/' tombstone
checksummed tombstone a/step-000000000400.g1.9/lastgood.json
touch a/.owner-9 "a/$(printf 'del\177')"
run lastgood ls -a a
lastgood ls -a --json a | grep 'del'
run lastgood sweep a
run lastgood sweep --json a | sed -n '/"left"/,$p'
