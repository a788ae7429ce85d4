# SPDX-License-Identifier: Apache-2.0
# K12: every dtype is printed, written and compared, the ends of its range too
make_root a --steps=100 --kinds
make_root b --steps=100 --kinds --tweak=kinds
for dtype in I8 U8 I16 U16 I32 U32 I64 U64 BOOL C64 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F6_E2M3 F6_E3M2; do
    run lastgood get a@100 kind.$dtype
    quietly lastgood get --json a@100 kind.$dtype | grep -A 99 '"data"\|"values"'
    run lastgood get a@100 kind.$dtype -o $dtype.npy
    head -c 128 $dtype.npy | tr -d '\n' | LC_ALL=C sed 's/[^ -~]/./g'
    echo
    tail -c +129 $dtype.npy | od -An -tx1
done
run lastgood diff --tensors='kind.*' a@100 b@100
run lastgood diff --tensors='kind.*' --tolerance=1 a@100 b@100
