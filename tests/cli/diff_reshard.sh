# SPDX-License-Identifier: Apache-2.0
# K08: equal contents are equal however they are sharded
make_root one --steps=100 --ranks=1
make_root four --steps=100 --ranks=4 --once
make_root five --steps=100 --ranks=5
run lastgood diff one four
run lastgood diff four@100 five@100
run lastgood diff --json four@100 five@100
make_root differ3 --steps=100 --ranks=3 --differ
make_root differ4 --steps=100 --ranks=4 --differ
run lastgood diff --tensors=stats differ3@100 differ4@100
run lastgood diff --tensors=stats differ3@100 one@100
run lastgood diff --tensors=stats differ3@100 differ3@100
