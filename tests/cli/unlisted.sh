# SPDX-License-Identifier: Apache-2.0
# K19: a folder that may not be listed, or not be written, is not called empty, or done
make_root a --steps=100,200
make_root a --steps=300
mkdir a/.step-000000000400.g1.9.0123456789abcdef.partial
chmod 755 .. .
if ! ordinary lastgood --version >/dev/null 2>&1; then
    echo 'cannot become an ordinary user who may run lastgood'
    exit 77
fi
chmod -R a+rX a
chmod 311 a
run ordinary lastgood ls a
run ordinary lastgood ls -a --json a
run ordinary lastgood show a
run ordinary lastgood get a w 0,0
run ordinary lastgood diff a a@200
run ordinary lastgood verify a
run ordinary lastgood verify --json a
run ordinary lastgood prune --keep-last=1 --yes a
run ordinary lastgood sweep a
run ordinary lastgood sweep --yes --json a
run ordinary lastgood rm --yes a@100
run ordinary lastgood pin a@100
run ordinary lastgood rollback a@100
# Nothing can be removed or written.
chmod 555 a
run ordinary lastgood rm --yes a@100
run ordinary lastgood rm --json --yes a@100
run ordinary lastgood prune --keep-last=1 --yes a
run ordinary lastgood sweep --yes a
run ordinary lastgood sweep --yes --json a
run ordinary lastgood rollback a@100
chmod 555 "$(folder a 100)"
run ordinary lastgood pin a@100
chmod -R u+w a
run lastgood ls a
