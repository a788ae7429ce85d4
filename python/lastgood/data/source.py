# SPDX-License-Identifier: Apache-2.0
"""Where a loader's batches come from, and how far the run has got there: the seam between the loader and the kinds of
data sets.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from lastgood.parts import Ranks, Restoring, Saving

Collate = Callable[[list[Any]], Any]


class Position(NamedTuple):
    """How far the whole run has got."""

    epoch: int  # from 0
    consumed: int  # samples used by all ranks in this epoch


class Place(NamedTuple):
    """A rank among those that take different samples."""

    rank: int
    world: int

    @staticmethod
    def of(ranks: Ranks) -> Place:
        """Without the axes along which ranks take the same samples."""
        return Place(ranks.data_rank, ranks.data_world)

    @staticmethod
    def here() -> Place:
        """As torch.distributed has it, all ranks being data-parallel."""
        if dist.is_available() and dist.is_initialized():
            return Place(dist.get_rank(), dist.get_world_size())
        return Place(0, 1)


class Step(NamedTuple):
    """One optimizer step's samples."""

    epoch: int
    start: int  # position in the epoch of its first one
    samples: int  # of all ranks

    def slot(self, number: int, slots: int) -> tuple[int, int]:
        """Which of them one micro-batch of one rank takes: how far from the start, and how many. Micro-batches count
        through all ranks first; the first ones are larger by one where it does not come out even.
        """
        size, more = divmod(self.samples, slots)
        return number * size + min(number, more), size + (number < more)


class Source(abc.ABC):
    """Batches of one data set, and the position in it."""

    @property
    @abc.abstractmethod
    def place(self) -> Place:
        """Which rank's batches."""

    @abc.abstractmethod
    def bind(self, place: Place) -> None:
        """Says so."""

    @property
    @abc.abstractmethod
    def position(self) -> Position:
        """Of what has been used."""

    @property
    @abc.abstractmethod
    def seed(self) -> int:
        """Of the order and of what data sets draw."""

    @abc.abstractmethod
    def begin(self, accumulate: int) -> None:
        """An iteration by steps of so many micro-batches begins at the position."""

    @abc.abstractmethod
    def arguments(self, accumulate: int, until: int | None, collate: Collate) -> dict[str, Any]:
        """What a torch loader needs to make this rank's micro-batches, collated, from the position on until an epoch
        begins.
        """

    @abc.abstractmethod
    def steps(self, accumulate: int, until: int | None) -> Iterator[Step]:
        """The steps that those micro-batches make up."""

    @abc.abstractmethod
    def unwrapped(self, made: Any) -> Any:
        """The trainer's batch of what the torch loader has made; it counts as handed out."""

    @abc.abstractmethod
    def used(self, samples: int) -> None:
        """The whole run has used so many more."""

    @abc.abstractmethod
    def save(self, to: Saving, key: str) -> None:
        """Adds the position to a checkpoint."""

    @abc.abstractmethod
    def read(self, of: Restoring, key: str) -> Any:
        """The position of a checkpoint, for :meth:`take`; nothing moves.

        Raises:
            MissingError, MismatchError: there is none, or one in another data set.
        """

    @abc.abstractmethod
    def take(self, found: Any, of: Restoring, key: str) -> None:
        """Goes there."""
