# SPDX-License-Identifier: Apache-2.0
# with --json every error is in the document, with its status
make_root a --steps=100,200
mkdir empty
lastgood pin a@100 -r 'in use'
error() {
    "$@" --json >out 2>/dev/null
    status=$?
    python3 -c 'import json; print(json.load(open("out"))["error"]["status"])' | sed "s|^|exit $status, |; s|\$|: $*|"
}
error lastgood ls empty
error lastgood ls gone
error lastgood ls a@300
error lastgood show a@300
error lastgood show a 'nothing.*'
error lastgood get a nothing
error lastgood get a samples
error lastgood get a w 99
error lastgood verify a@5
error lastgood verify a --threads=0
error lastgood verify a --frobnicate
error lastgood diff a
error lastgood rollback a
error lastgood rm a@100
error lastgood rm --yes a@100
error lastgood rm a
error lastgood prune a
error lastgood sweep a@100
error lastgood pin gone@5
run lastgood rm --yes --json a@100
run lastgood pin --json a@100
error lastgood pin a@200 -r "$(printf 'a\177b')"
