# SPDX-License-Identifier: Apache-2.0
# bench measures in a folder of its own, writes what is documented, and leaves nothing
checks=${LASTGOOD_SOURCE:-$here/../..}/tests/cli/bench_check.py
make_root a --steps=100,200
state_of() { find "$1" -type f -exec sha256sum {} + | sort; find "$1" | sort; }
state_of a >before

# Names only: the figures are some machine's.
lastgood bench a --size=32MiB --rounds=1 --tensors=5 --json=one.json --svg one.svg >table 2>errors || fail "exit $?"
cat errors
state_of a >after
cmp before after && echo 'the root is as it was'
python3 "$checks" one.json one.svg
sed -n '/OF LIMIT/,/^$/p' table | sed -E 's/[0-9]+ threads?/n threads/; s/^ *//; s/  +.*  /: /; s/: [0-9.]+$//' | sed '1d; $d' |
    grep -vE '^(async|stall|fence)' | sort -u
grep -c 'With fewer than 6 rounds' table

# With enough rounds, as ranks, and as the only thing on standard output.
mkdir b
lastgood bench b --json --size=40MB --rounds=6 --ranks=3 --tensors=9 --buffer=2MiB >many.json 2>errors || fail "exit $?"
cat errors
python3 "$checks" many.json
python3 -c 'import json; d = json.load(open("many.json")); print(d["ranks"], d["tensors"], d["engine"]["buffer_bytes"])'
find b
