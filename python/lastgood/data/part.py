# SPDX-License-Identifier: Apache-2.0
"""The position in the data as a part of a training state."""

from __future__ import annotations

from typing import Any, Protocol

from lastgood.errors import MissingError
from lastgood.parts import Part, Restoring, Saving
from lastgood.tensors import go_on_without


class Positioned(Protocol):
    """What has a position that goes into a checkpoint."""

    def save(self, to: Saving, key: str) -> None:
        """Adds it to a checkpoint."""

    def read(self, of: Restoring, key: str) -> Any:
        """That of a checkpoint, for :meth:`take`; nothing moves."""

    def take(self, found: Any, of: Restoring, key: str) -> None:
        """Goes there."""


class PositionPart(Part):
    """Saves and restores a position.

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
        except MissingError as why:
            if of.exact and not of.may_lack(self.key):
                raise MissingError(
                    f'the checkpoint of step {of.checkpoint.step} has no position of "{self.key}" in the data '
                    f"({why}); {go_on_without([self.key])}"
                ) from None
            self._found = None

    def restore(self, of: Restoring) -> None:
        """Goes there, before the first batch is fetched."""
        self.loader.bind(of.ranks)
        if self._found is None:
            of.not_restored.append(self.key)
            of.notes.append(
                f'"{self.key}": the checkpoint has no position in the data; it stays at {self.loader.position}'
            )
            return
        found, self._found = self._found, None
        self._position.take(found, of, self.key)
