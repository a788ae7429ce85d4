# SPDX-License-Identifier: Apache-2.0
"""Loaders that keep a position of their own, of each rank: torchdata's StatefulDataLoader, and others with
``state_dict``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from lastgood import tagged
from lastgood._core import ffi
from lastgood.dtypes import imported
from lastgood.errors import InvalidError, MissingError, WorldError
from lastgood.parts import Part, Ranks, Restoring, Saving
from lastgood.tensors import go_on_without

__all__ = ["StatefulPart", "stateful_part"]


def stateful_part(key: str, loader: Any) -> StatefulPart:
    """The state of a ``torchdata.stateful_dataloader.StatefulDataLoader``, or of another loader with ``state_dict``
    and ``load_state_dict``, as a part of a training state. It belongs to its rank: it is restored on the same number
    of ranks, and refused on another.

    Args:
        key: what it is called in the state.
        loader: yields the batches of this rank, of one epoch in each pass.
    """
    return StatefulPart(key, loader)


class StatefulPart(Part):
    """What :func:`stateful_part` returns."""

    def __init__(self, key: str, loader: Any) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(loader, method, None)):
                raise InvalidError(f'"{key}": {type(loader).__qualname__} has no {method}')
        self.key = key
        self.loader = loader
        self._epoch = 0
        self._handed = 0
        self._found: dict[str, Any] | None = None

    def save(self, to: Saving) -> None:
        """Adds this rank's state, as values and bytes."""
        arrays: list[Any] = []
        value = _packed(self.loader.state_dict(), arrays)
        to.save.state(f"{self.key}.data_ranks", to.ranks.data_world)
        to.save.rank_state(f"{self.key}.state", {"epoch": self._epoch, "state": value, "arrays": arrays})

    def describe(self, of: Restoring) -> None:
        """Reads this rank's state; nothing moves.

        Raises:
            WorldError: it was saved on another number of ranks.
            MissingError: in exact mode: the checkpoint has none.
        """
        self._found = None
        try:
            saved = of.checkpoint.state[f"{self.key}.data_ranks"]
            if (saved, of.checkpoint.world) != (of.ranks.data_world, of.ranks.world):
                raise WorldError(
                    f'"{self.key}": a {type(self.loader).__name__} keeps a position of each rank, which cannot be cut '
                    f"anew: it was saved by {saved} data-parallel ranks of {of.checkpoint.world}, and these are "
                    f"{of.ranks.data_world} of {of.ranks.world}. Resume on as many as before, or take "
                    "lastgood.data.DataLoader, whose position is that of the whole run"
                )
            self._found = of.checkpoint.rank_state(f"{self.key}.state", of.ranks.rank, of.ranks.world)
        except MissingError as why:
            if of.exact and not of.may_lack(self.key):
                raise MissingError(
                    f'the checkpoint of step {of.checkpoint.step} has no position of "{self.key}" in the data '
                    f"({why}); {go_on_without([self.key])}"
                ) from None

    def restore(self, of: Restoring) -> None:
        """Gives the loader its state, before it is iterated over."""
        if self._found is None:
            of.not_restored.append(self.key)
            of.notes.append(f'"{self.key}": the checkpoint has no position in the data; it stays as it is')
            return
        found, self._found = self._found, None
        self._epoch = found["epoch"]
        self.loader.load_state_dict(_unpacked(found["state"], found["arrays"]))

    # --------------------------------------------------------------- the loader

    def bind(self, ranks: Ranks) -> None:
        """The loader knows its rank itself."""

    def batches(self, accumulate: int = 1) -> Iterator[list[Any]]:
        """Of each optimizer step its micro-batches, over the ends of epochs."""
        step: list[Any] = []
        idle = 0
        while idle < 2:  # the first pass may be what a restored state left of an epoch: nothing
            idle += 1
            for batch in self.loader:
                idle = 0
                step.append(batch)
                if len(step) == accumulate:
                    self._handed += accumulate
                    yield step
                    step = []
            self._epoch += 1
        raise InvalidError(f'"{self.key}": the loader yields no batches')

    def used(self, samples: int) -> None:
        """What was handed out is used; the loader itself counts it."""
        self._handed = 0

    @property
    def last_samples(self) -> int:
        """Batches, not samples, that were handed out and are not used yet: what is in them only the loader knows."""
        return self._handed

    @property
    def epoch(self) -> int:
        """Passes of :meth:`batches` that have ended."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """0: the loader counts in its own way."""
        return 0


def _packed(value: Any, arrays: list[Any]) -> Any:
    """The same with references in place of tensors and arrays, whose dtypes, shapes and bytes are added to a list."""
    if isinstance(value, dict):
        made = copy.copy(value)
        for k, v in value.items():
            made[k] = _packed(v, arrays)
        return made
    if type(value) in (list, tuple):
        return type(value)(_packed(v, arrays) for v in value)
    numpy, torch = imported("numpy"), imported("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        data = bytes(ffi.buffer(ffi.cast("char *", host.data_ptr()), host.nbytes)) if host.numel() else b""
        arrays.append(("torch", host.dtype, list(host.shape), data))
    elif numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        host = numpy.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
        arrays.append(("numpy", host.dtype.str, list(value.shape), host.tobytes()))
    else:
        return value
    return tagged.Tensor(str(len(arrays) - 1))


def _unpacked(value: Any, arrays: list[Any]) -> Any:
    if isinstance(value, dict):
        for k, v in value.items():
            value[k] = _unpacked(v, arrays)
        return value
    if type(value) in (list, tuple):
        return type(value)(_unpacked(v, arrays) for v in value)
    if not isinstance(value, tagged.Tensor):
        return value
    kind, dtype, shape, data = arrays[int(value.name)]
    if kind == "torch":
        import torch

        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    import numpy as np

    return np.frombuffer(data, dtype=dtype).reshape(shape).copy() if data else np.empty(shape, dtype=dtype)
