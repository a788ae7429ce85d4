# SPDX-License-Identifier: Apache-2.0
# show --json is one document, with integers beyond 2^53 as strings
make_root a --steps=100
quietly lastgood show --json a
quietly lastgood show --json --tensors='q.*' --layouts --files --state a@100
quietly lastgood show --json a@7
# What is damaged, and what does not belong to it.
truncate -s 10 "$(folder a 100)"/shard-00002-model-*
echo x >"$(folder a 100)"/notes.txt
quietly lastgood show --json a@100 | grep -A 3 -e '"good"' -e '"reason"' -e '"foreign"'
