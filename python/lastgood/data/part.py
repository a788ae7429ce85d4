# SPDX-License-Identifier: Apache-2.0
"""The position in the data as a part of a training state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from lastgood.errors import InvalidError, MissingError
from lastgood.parts import Part, Ranks, Restoring, Saving


class Positioned(Protocol):
    """What has a position that goes into a checkpoint."""

    def save(self, to: Saving, key: str) -> None: ...

    def read(self, of: Restoring, key: str) -> Any: ...

    def take(self, found: Any, of: Restoring, key: str) -> None: ...


class PositionPart(Part):
    """Saves and restores a position, and stands for its loader where a trainer's loop asks for one.

    Args:
        key: what it is called in the state.
        loader: what the trainer iterates over: a loader, or a sampler.
        position: saves and restores.
    """

    def __init__(self, key: str, loader: Any, position: Positioned) -> None:
        self.key = key
        self.loader = loader
        self._position = position
        self._found: Any = None

    def save(self, to: Saving) -> None:
        """Adds it to the save."""
        self._position.save(to, self.key)

    def describe(self, of: Restoring) -> None:
        """Reads the position; nothing moves.

        Raises:
            MissingError: in exact mode: the checkpoint has none.
            MismatchError: the data set has another size.
        """
        try:
            self._found = self._position.read(of, self.key)
        except MissingError:
            if of.exact:
                raise
            self._found = None

    def restore(self, of: Restoring) -> None:
        """Goes there, before the first batch is fetched."""
        self.bind(of.ranks)
        if self._found is None:
            of.not_restored.append(self.key)
            of.notes.append(f'"{self.key}": the checkpoint has no position in the data; it stays at {self.position}')
            return
        found, self._found = self._found, None
        self._position.take(found, of, self.key)

    # --------------------------------------------------------------- the loader

    def bind(self, ranks: Ranks) -> None:
        """Says which rank this is."""
        self.loader.bind(ranks)

    def batches(self, accumulate: int = 1) -> Iterator[list[Any]]:
        """As :meth:`lastgood.data.DataLoader.batches`."""
        if not hasattr(self.loader, "batches"):
            raise InvalidError(
                f'"{self.key}" is a sampler, which hands out no batches: iterate over your own loader and give '
                "step(samples=), or use lastgood.data.DataLoader"
            )
        found: Iterator[list[Any]] = self.loader.batches(accumulate)
        return found

    def step_samples(self, accumulate: int = 1) -> int:
        """As :meth:`lastgood.data.DataLoader.step_samples`."""
        return int(self.loader.step_samples(accumulate))

    def used(self, samples: int) -> None:
        """The whole run has used so many more samples."""
        self.loader.used(samples)

    @property
    def last_samples(self) -> int:
        """Samples of all ranks that were handed out and not yet used."""
        if not hasattr(self.loader, "last_samples"):
            raise InvalidError(
                f'"{self.key}" is a sampler, which does not know what is used: give step(samples=), the samples of '
                "all ranks together"
            )
        return int(self.loader.last_samples)

    @property
    def epoch(self) -> int:
        """Current epoch, from 0."""
        return int(self.loader.epoch)

    @property
    def consumed(self) -> int:
        """Samples that the whole run has used in this epoch."""
        return int(self.loader.consumed)

    @property
    def position(self) -> Any:
        """Both."""
        return self.loader.position
