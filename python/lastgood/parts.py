# SPDX-License-Identifier: Apache-2.0
"""The seam between a training state and those who know how to save and restore one kind of thing in it.

A :class:`Part` is one of them: modules, an optimizer, a scheduler, random generators, a loader. A state asks each part
in turn; none knows of another.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lastgood.checkpoint import Checkpoint
    from lastgood.comm import Communicator
    from lastgood.load import Load
    from lastgood.saving import Save


class Axis(NamedTuple):
    """One axis of the mesh of ranks."""

    name: str  # "dp", "tp", "pp"; whatever the trainer calls it
    size: int
    coordinate: int  # this rank's


class Ranks(NamedTuple):
    """Who saves or restores.

    Without a mesh all ranks are data-parallel: one axis, ``dp``.
    """

    rank: int
    world: int
    mesh: tuple[Axis, ...]
    data: tuple[str, ...]  # names of the axes along which ranks take different samples
    comm: Communicator | None  # None: one process

    @property
    def data_rank(self) -> int:
        """The rank's place among those that take different samples, row-major over the data axes."""
        found = 0
        for axis in self.mesh:
            if axis.name in self.data:
                found = found * axis.size + axis.coordinate
        return found

    @property
    def data_world(self) -> int:
        """How many take different samples."""
        found = 1
        for axis in self.mesh:
            if axis.name in self.data:
                found *= axis.size
        return found


@dataclass
class Saving:
    """What a part is given to save itself.

    Attributes:
        save: takes tensors and values.
        step: completed optimizer steps.
        ranks: who saves.
        lazy: whether only an optimizer's update changes this tensor, so that it may be copied until the fence.
    """

    save: Save
    step: int
    ranks: Ranks
    lazy: Callable[[Any], bool] = lambda tensor: False


@dataclass
class Restoring:
    """What a part is given to restore itself.

    Attributes:
        load: takes targets, the memory to read into, of the checkpoint that is tried.
        ranks: who restores.
        exact: what cannot be restored exactly on the same mesh is an error.
        optional: names, and all below them, that the checkpoint or the state may lack even so; equal on all ranks.
        timeout: the longest wait for other ranks, seconds.
        seed: of streams that are derived, where they cannot be restored: from the checkpoint's run and generation.
        notes: sentences for people, of what was derived, left as it was, or given up.
        not_restored: names of what the checkpoint lacks.
        known: names in the checkpoint, and all below them, of which this rank has the counterpart, whether or not it
            reads them. Tensors that are read, and values under the key of a part, need not be told.
    """

    load: Load
    ranks: Ranks
    exact: bool = True
    seed: int = 0
    optional: tuple[str, ...] = ()
    timeout: float = 600.0
    notes: list[str] = field(default_factory=list)
    not_restored: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def may_lack(self, name: str) -> bool:
        """Whether a name, or what it is below of, is optional. Of optimizer state the parameter's name counts too."""
        _, _, parameter = name.partition(".state.")
        return any(f"{n}.".startswith(f"{o}.") for o in self.optional for n in (name, parameter) if n)

    @property
    def checkpoint(self) -> Checkpoint:
        """The one that is tried."""
        return self.load.checkpoint


class Part(abc.ABC):
    """One thing in a training state.

    Attributes:
        key: what it is called in the state; its names on disk begin with it.
    """

    key: str

    @abc.abstractmethod
    def save(self, to: Saving) -> None:
        """Adds all of it to the save. Memory may be read until the save is committed, or launched."""

    @abc.abstractmethod
    def describe(self, of: Restoring) -> None:
        """Says what is to be read where (``of.load``). Called for each checkpoint that is tried; nothing but the
        memory of targets may change here.

        Raises:
            MissingError, MismatchError: the checkpoint is of another state.
        """

    @abc.abstractmethod
    def restore(self, of: Restoring) -> None:
        """Takes over what was read and verified. Called once, in the order of the parts; random generators come
        last.
        """
