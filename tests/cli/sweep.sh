# SPDX-License-Identifier: Apache-2.0
# sweep shows, then removes what earlier owners left, and nothing else
make_root a --steps=100
make_root a --steps=200
for name in .step-000000000300.g1.9.0123456789abcdef.partial .trash-1.0123456789abcdef-step-000000000050.g1.1 \
    .step-000000000400.g2.9.0123456789abcdef.partial; do
    mkdir a/$name
    echo half >a/$name/shard-00001-model-00001-of-00001.safetensors
done
echo notes >a/notes.txt
run lastgood sweep a
run lastgood sweep --json a
run lastgood sweep --yes a
run lastgood sweep --yes a
run lastgood ls -a a
run lastgood verify a
run lastgood verify a/.step-000000000400.g2.9.0123456789abcdef.partial
run lastgood sweep a@200
