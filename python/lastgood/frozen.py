# SPDX-License-Identifier: Apache-2.0
"""Weights that do not train and are not written again with every checkpoint: digests say whether those of a resumed
run are the same.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
from typing import TYPE_CHECKING, Any

import torch

from lastgood import dtypes, placement
from lastgood._core import ffi
from lastgood.errors import MismatchError
from lastgood.names import some
from lastgood.tensors import kind_of

if TYPE_CHECKING:
    from lastgood.parts import Saving
    from lastgood.tensors import Reader

_PREFIX = "frozen."
_CHUNK_BYTES = 64 << 20


class FrozenWeights:
    """Digests of tensors, each computed once as long as the tensor is not written to."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, str]] = {}

    def save(self, to: Saving, tensors: list[tuple[str, Any]]) -> None:
        """Adds digests in the place of the tensors. Those of parts of DTensors are state of the rank."""
        digests = self._digests(tensors)
        parts: dict[str, Any] = {}
        for name, t in tensors:
            record: dict[str, Any] = {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
            if kind_of(t) == "dtensor":
                parts[name] = [placement.text_of(t), digests[name]]
            else:
                record["sha256"] = digests[name]
            to.save.state(_PREFIX + name, record)
        if parts:
            to.save.rank_state(_PREFIX + "parts", parts)

    @staticmethod
    def knows(reader: Reader, name: str) -> bool:
        """Whether the checkpoint has a digest in the place of the tensor."""
        return _PREFIX + name in reader.keys

    def check(self, reader: Reader, tensors: list[tuple[str, Any]]) -> None:
        """Compares what is there with what was there.

        Raises:
            MismatchError: names the first that differ.
        """
        if not tensors:
            return
        of, state = reader.of, reader.of.checkpoint.state
        records = {name: state[_PREFIX + name] for name, _ in tensors}
        for name, t in tensors:
            dtype, shape = str(t.dtype).removeprefix("torch."), list(t.shape)
            r = records[name]
            if (r["dtype"], r["shape"]) != (dtype, shape):
                raise MismatchError(f'frozen weights: "{name}" is {dtype} {shape}, and was {r["dtype"]} {r["shape"]}')
        parts: dict[str, Any] = {}
        if any("sha256" not in r for r in records.values()) and of.checkpoint.world == of.ranks.world:
            parts = of.checkpoint.rank_state(_PREFIX + "parts", of.ranks.rank, of.ranks.world)
        wanted: dict[str, str] = {}
        unchecked: list[str] = []
        for name, t in tensors:
            if "sha256" in records[name]:
                if kind_of(t) != "dtensor":
                    wanted[name] = records[name]["sha256"]
                    continue
            elif kind_of(t) == "dtensor" and parts.get(name, [""])[0] == placement.text_of(t):
                wanted[name] = parts[name][1]
                continue
            unchecked.append(name)
        digests = self._digests([(name, t) for name, t in tensors if name in wanted])
        differing = [name for name, digest in wanted.items() if digests[name] != digest]
        if differing:
            raise MismatchError(
                f"{len(differing)} frozen weights are not those that the run was trained with: {some(differing)}; load "
                "the same base weights before the resume"
            )
        if unchecked:
            of.notes.append(
                f"{len(unchecked)} frozen weights lie on other ranks than before, and were not compared: {some(unchecked)}"
            )

    def _digests(self, tensors: list[tuple[str, Any]]) -> dict[str, str]:
        found: dict[str, str] = {}
        todo: list[tuple[str, Any, Any]] = []
        for name, t in tensors:
            parts = _parts(t)
            version = tuple((p.data_ptr(), -1 if p.is_inference() else p._version, p.shape, p.dtype) for p in parts)
            known = self._known.get(name)
            if known is not None and known[0] == version and all(v[1] >= 0 for v in version):
                found[name] = known[1]
            else:
                todo.append((name, parts, version))
        if todo:
            workers = max(1, min(8, len(os.sched_getaffinity(0))))
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:  # hashing lets other threads run
                for (name, _, version), value in zip(todo, pool.map(digest, [p for _, p, _ in todo]), strict=True):
                    found[name] = value
                    self._known[name] = (version, value)
        return found


def _parts(t: Any) -> list[torch.Tensor]:
    """The plain tensors that hold the values on this rank."""
    kind = kind_of(t)
    if kind == "dtensor":
        return _parts(placement.local(t)) if placement.holds(t) else []
    if kind == "wrapper":
        attributes, _ = t.__tensor_flatten__()
        return [p for a in attributes for p in _parts(getattr(t, a))]
    return [t.detach()]


def digest(parts: list[torch.Tensor]) -> str:
    """SHA-256 over dtype, shape and packed little-endian bytes of each."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(f"{dtypes.from_torch().get(part.dtype, -1)} {list(part.shape)}\n".encode())
        packed = part.cpu().resolve_conj().resolve_neg().contiguous()
        size = packed.numel() * packed.element_size()
        if size:
            view = memoryview(ffi.buffer(ffi.cast("char *", packed.data_ptr()), size))
            for at in range(0, size, _CHUNK_BYTES):
                sha.update(view[at : at + _CHUNK_BYTES])
    return sha.hexdigest()
