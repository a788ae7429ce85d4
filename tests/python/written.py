# SPDX-License-Identifier: Apache-2.0
"""What make_checkpoint writes, worked out anew: values, and places by the
manifest with the reader that docs/format-layouts.md prints."""

import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
# A program started by a test must not hang it.
SECONDS = 300

BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8}
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32}
BITS |= {"F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}


class Tensor(NamedTuple):
    name: str
    dtype: str
    group: str
    source: str
    shape: tuple

    def bytes(self):
        """The whole tensor, row-major, as numbers from 0 to 255."""
        count = int(np.prod(self.shape, dtype=np.int64)) * BITS[self.dtype] // 8
        x = 14695981039346656037
        for byte in self.source.encode():
            x = (x ^ byte) * 1099511628211 % 2**64
        with np.errstate(over="ignore"):
            b = np.uint64(x) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            b = (b ^ (b >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        b = (b >> np.uint64(56)).astype(np.uint8)
        return b & np.uint8(1) if self.dtype == "BOOL" else b

    def box(self, offset, size):
        """The bytes of a box of it, row-major."""
        width = BITS[self.dtype]
        shape = self.shape
        if width % 8:  # packed along the last dimension
            assert offset[-1] == 0 and size[-1] == shape[-1]
            shape, size = (*shape[:-1], shape[-1] * width // 8), (*size[:-1], size[-1] * width // 8)
            width = 8
        elements = self.bytes().reshape(*shape, width // 8)
        return elements[tuple(slice(o, o + s) for o, s in zip(offset, size))].tobytes()


class Checkpoint:
    """A step folder and what should be in it."""

    def __init__(self, folder, tensors):
        self.folder = folder
        self.tensors = {t.name: t for t in tensors}
        self.manifest = json.loads((folder / "lastgood.json").read_text(encoding="utf-8"))

    def for_torch(self):
        return {name: t for name, t in self.tensors.items() if t.group != "raw"}

    def files(self):
        """For each shard file: its tensors' names and the offset and size of
        the box in it, as the manifest says."""
        layouts = reader()
        found = {}
        ranks = self.manifest["ranks"]
        for entry in self.manifest["tensors"]:
            name, shape = entry["name"], entry["shape"]
            if entry.get("stored") is False:
                continue
            if "boxes" in entry:
                placed = numbered(entry["boxes"])
            else:
                layout = self.manifest["layouts"][entry["layout"]]
                placed = layouts["boxes"](layout, name, shape, int(entry.get("flat_offset", 0)))
            group = self.tensors[name].group
            for rank, number, offset, size in placed:
                count = len(ranks[rank][group])
                # A raw file holds all boxes of its own tensors under a prefix.
                extension, key = ("state", f"t:{name}") if group == "raw" else ("safetensors", name)
                file = f"shard-{rank + 1:05}-{group}-{number + 1:05}-of-{count:05}.{extension}"
                found.setdefault(file, {})[key] = (self.tensors[name], tuple(offset), tuple(size))
        return found


def numbered(boxes):
    last, number = None, 0
    for box in boxes:
        number = number + 1 if box["rank"] == last else 0
        last = box["rank"]
        yield last, number, box["offset"], box["size"]


def reader():
    """The Python reader that is printed in the documents."""
    page = (ROOT / "docs/format-layouts.md").read_text(encoding="utf-8")
    code = re.search(r"## 13\. A reader in Python.*?```python\n(.*?)```", page, re.S)[1]
    names = {}
    exec(compile(code, "docs/format-layouts.md", "exec"), names)  # noqa: S102
    return names


def make(build, root):
    command = [str(build / "tests" / "make_checkpoint"), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    folder, *lines = done.stdout.splitlines()
    tensors = []
    for line in lines:
        name, dtype, group, source, shape = line.split("\t")
        tensors.append(Tensor(name, dtype, group, source, tuple(int(n) for n in shape.split(",") if n)))
    return Checkpoint(root / folder, tensors)
