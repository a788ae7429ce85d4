# SPDX-License-Identifier: Apache-2.0
# columns are aligned, also behind names with characters of several bytes
make_root a --steps=1,200000

# starts FILE WORD...: in how many different columns these words begin or end
starts() {
    out=$1
    shift
    python3 - "$out" "$@" <<'PYTHON'
import sys
lines = open(sys.argv[1], encoding="utf-8").read().splitlines()
for word in sys.argv[2:]:
    at = {line.index(word) for line in lines if word in line}
    print(f"{word}: {len(at)} column(s)")
PYTHON
}
lastgood ls a >out
starts out '1.' good
lastgood show -t a@1 >out
starts out F32 model '  ['
echo x >"a/é"
echo x >a/e
lastgood ls -a a >out
starts out foreign
# Nothing is padded at the end of a line.
grep -c ' $' out || true
