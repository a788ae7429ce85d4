# SPDX-License-Identifier: Apache-2.0
# show --json is one document, with integers beyond 2^53 as strings
make_root a --steps=100
quietly lastgood show --json a
quietly lastgood show --json --tensors='q.*' --layouts --files --state a@100
quietly lastgood show --json a@7
