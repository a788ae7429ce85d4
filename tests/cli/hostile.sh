# SPDX-License-Identifier: Apache-2.0
# K15: links, FIFOs and names in a root are never followed, waited for, or removed with what they lead to
make_root a --steps=100,200
make_root other --steps=7,8
mkdir out
echo untouched >out/canary
newest=$(folder a 200)
file=$newest/rank-00001.sums
mv "$file" out/
mkfifo "$file"
run timeout 60 lastgood ls a
run timeout 60 lastgood verify a@200
rm "$file"
ln -s ../../out/rank-00001.sums "$file"
run lastgood verify a@200
rm "$file"
mv out/rank-00001.sums "$file"
mv "$newest"/lastgood.json out/
mkfifo "$newest"/lastgood.json
run timeout 60 lastgood ls a
run timeout 60 lastgood get a step
rm "$newest"/lastgood.json
mv out/lastgood.json "$newest"/
# A name of ours that is a link: another run's checkpoint is not changed by it.
ln -s "../$(folder other 7)" a/step-000000000300.g9.1
ln -s ../out a/.trash-1.0123456789abcdef-x
run lastgood ls -a a
for command in 'rm --yes' 'pin' 'rollback'; do
    run lastgood $command a/step-000000000300.g9.1
done
run lastgood sweep --yes a
run lastgood ls -a other
# A link within its root may stand for what it leads to.
ln -s "$(basename "$newest")" a/latest
run lastgood pin a/latest
run lastgood pin --unpin a/latest
# What is removed is unlinked, not what it leads to.
mkdir a/.trash-1.0123456789abcdef-y
ln -s ../../out a/.trash-1.0123456789abcdef-y/link
ln -s ../../out/canary "$(folder a 100)"/link
mkfifo "$(folder a 100)"/fifo
run lastgood sweep --yes a
run lastgood rm --yes a@100
run ls out
run cat out/canary
# One file by its name.
mkfifo pipe.safetensors
run timeout 60 lastgood show pipe.safetensors
run timeout 60 lastgood verify pipe.safetensors
run timeout 60 lastgood show /dev/zero
# Names that lead out.
run lastgood get a ../out/canary
run lastgood show a@../out
# A number that leaves no room.
touch a/.owner-18446744073709551615
run lastgood rollback --no-verify a@200
run lastgood verify a
