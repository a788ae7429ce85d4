# SPDX-License-Identifier: Apache-2.0
# show tells layouts of pieces that stay on a rank, and of ranks in an order of their own
make_root a --steps=100 --ranks=3 --kinds
make_root b --steps=100 --ranks=16 --kinds
run lastgood show a@100 kind.pieces
run lastgood show a@100 kind.listed
run lastgood show b@100 kind.listed
