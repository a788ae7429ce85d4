# SPDX-License-Identifier: Apache-2.0
# of a tensor that is kept per rank get takes any rank's copy
make_root a --steps=100 --ranks=3 --differ
run lastgood get a@100 stats
run lastgood get a@100 stats --rank=0
run lastgood get a@100 stats --rank=2 1
run lastgood get a@100 stats --rank=3
run lastgood get a@100 w --rank=1
run lastgood get a@100 stats --rank=x
