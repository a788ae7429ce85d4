# SPDX-License-Identifier: Apache-2.0
# what is too long for a screen is cut, and said to be; --all has it whole
make_root a --steps=100 --ranks=64 --tweak=more
run lastgood show a@100
run lastgood show --files a@100 | tail -n 3
lastgood show --files --all a@100 | grep -cE '^ +(shard|rank|config|tokenizer)'
run lastgood show a@100 more.pieces | tail -n 3
lastgood show --all a@100 more.pieces | grep -c '  node-[ab]  '
run lastgood show --state a@100
run lastgood show --state --all a@100 | grep 'more\.'
run lastgood get a@100 more.packed
lastgood get --all a@100 more.packed 2>/dev/null | tr -cd 0 | wc -c
run lastgood get a@100 more.packed -o more.npy
# A name that is cut in a message stands whole behind it.
python3 - "$(folder a 100)" <<'PYTHON'
import json
import pathlib
import sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("shard-*-model-*.safetensors")):
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    for name, what in json.loads(data[8:start]).items():
        if name.startswith("long."):
            data[start + what["data_offsets"][0] + 8192] ^= 1
            path.chmod(0o644)
            path.write_bytes(data)
PYTHON
run lastgood verify a@100 | sed -E 's/n{50,}/n…n/g'
lastgood verify a@100 | tr -d ' \n' | grep -oE 'long\.n+' | awk '{ print length }' | sort -un
