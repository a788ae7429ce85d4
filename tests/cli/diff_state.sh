# SPDX-License-Identifier: Apache-2.0
# diff tells state and files that one side lacks, and damage of them is no difference
make_root a --steps=200
make_root b --steps=200 --tweak=more
run lastgood diff a@200 b@200
run lastgood diff b@200 a@200 | sed -n '/^STATE/,$p'
run lastgood diff --json b@200 a@200 | sed -n '/"rank_state"/,$p'
run lastgood diff b@200 b@200
last() { echo $(($(wc -c <"$1") - 1)); }
state=$(folder b 200)/shard-00002-raw-00001-of-00001.state
for file in "$(folder b 200)/tokenizer.json" "$(folder b 200)/config.json" "$state"; do
    flip "$file" "$(last "$file")"
    run lastgood diff a@200 b@200
    run lastgood diff -q b@200 a@200
    flip "$file" "$(last "$file")"
done
run lastgood diff -q b@200 b@200
