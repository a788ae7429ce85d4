# SPDX-License-Identifier: Apache-2.0
# bench says at once what it cannot do
make_root a --steps=100
: >file
mkdir b there
run lastgood bench nowhere
run lastgood bench file
run lastgood bench a@100
run lastgood bench "$(folder a 100)" 2>&1 | sed 's/ATTEMPT/X/'
run lastgood bench b --size=12
run lastgood bench b --size=2Gi
run lastgood bench b --size=
run lastgood bench b --tensors=1
run lastgood bench b --tensors=50000 --size=32MiB
run lastgood bench b --rounds=0
run lastgood bench b --ranks=65
run lastgood bench b --buffer=1
run lastgood bench b --svg there
run lastgood bench b --json=nowhere/a.json
run lastgood bench --json b.json
# Sixty terabytes are more than there is of something.
lastgood bench b --size=60TiB 2>&1 | grep -cE '^lastgood: bench: .*60.0 TiB need .* (are free|can be had)$'
find b there
run lastgood bench b --json=file/a.json
run lastgood bench b --svg=
# What cannot be written in the end is told, after the table.
lastgood bench b --size=32MiB --rounds=1 --tensors=3 --json=/dev/full --svg=/dev/full 2>&1 >table
echo "exit $?"
grep -c 'OF LIMIT' table
find b
