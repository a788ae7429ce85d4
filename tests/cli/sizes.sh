# SPDX-License-Identifier: Apache-2.0
# ls, show, prune, rm and verify give a checkpoint the same size
make_root a --steps=100,200
lastgood pin a@100 -r 'pins are not counted' >/dev/null
lastgood pin --unpin a@100 >/dev/null
bytes() { "$@" --json a@100 2>/dev/null | sed -nE 's/^ *"(file_)?bytes": ([0-9]+),?$/\2/p' | head -n 1; }
ls=$(bytes lastgood ls)
for command in show verify rm; do
    [ "$(bytes lastgood $command)" = "$ls" ] && echo "$command as ls"
done
[ "$(lastgood prune --keep-last=1 --json a 2>/dev/null | sed -nE 's/^  "bytes": ([0-9]+)$/\1/p')" = "$ls" ] && echo 'prune as ls'
files=$(lastgood show --json a@100 | sed -nE 's/^  "n_files": ([0-9]+),$/\1/p')
[ "$(lastgood verify --json a@100 | sed -nE 's/^ +"files": ([0-9]+),$/\1/p')" = "$files" ] && echo 'and as many files'
[ "$ls" -gt 10000 ] || fail "no size: $ls"
