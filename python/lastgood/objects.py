# SPDX-License-Identifier: Apache-2.0
"""What is no module and no optimizer: schedulers, gradient scalers, plain values, objects of the user."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from lastgood import arrays, dtypes, tagged, trees
from lastgood.errors import InvalidError, MismatchError, UnsupportedError, WorldError
from lastgood.parts import Part, Restoring, Saving
from lastgood.tensors import Reader, Writer, lacking

# Of the plain values that a state carries.
VARS = "vars"


class Packed:
    """A value with tensors in it: tensors by name, and the rest as tagged JSON with references to them.

    Args:
        key: in the global state, and first part of the tensors' names.
        value: what :func:`lastgood.tagged.encode` takes, and tensors in dicts, lists and tuples.

    Raises:
        UnsupportedError: something has no form in a checkpoint; the message leads to it. Nothing is pickled.
    """

    def __init__(self, key: str, value: Any) -> None:
        self.key = key
        flat = trees.Flat({key: value})
        self.tensors = flat.tensors
        self.aliases = flat.aliases
        self.text = tagged.encode(flat.skeleton[key], f'state "{key}"')

    def save(self, to: Saving) -> None:
        """Adds it as state of the whole run. Tensors may differ between ranks."""
        to.save.state_text(self.key, self.text)
        self.save_tensors(to)

    def save_tensors(self, to: Saving, *, buffer: bool = True) -> None:
        """Adds the tensors."""
        if not self.tensors:
            return
        torch = dtypes.imported("torch")
        writer = Writer(to)
        others: dict[str, Any] = {}
        for name, t in self.tensors.items():
            if torch is not None and isinstance(t, torch.Tensor):
                writer.add(name, t, buffer=buffer)
            else:
                others[name] = t  # NumPy's
        writer.flush()
        if others:
            to.save.tensors(others, group="optim", buffer=buffer)
        for alias, name in self.aliases.items():
            if name in writer.names or name in others:
                to.save.alias(alias, name)


class Unpacked:
    """What :class:`Packed` has saved, on its way back: tensors are read by the load.

    Args:
        reader: of the checkpoint.
        key: in its global state.
        skeleton: instead of what lies under the key.
        like: the value as it is now, whose tensors tell devices and placements.
        device: of tensors that are not there now; None: host memory.
    """

    def __init__(self, reader: Reader, key: str, skeleton: Any = None, like: Any = None, device: Any = None) -> None:
        self.skeleton = reader.of.checkpoint.state[key] if skeleton is None else skeleton
        self._found: dict[str, Any] = {}
        self._reader = reader
        names = list(references(self.skeleton))
        if names:
            now = {} if like is None else dict(trees.leaves({key: like}))
            for name in names:
                if name not in self._found:
                    self._found[name] = _made(reader, name, now.get(name), device)

    def value(self) -> Any:
        """Once the load is done."""
        self._reader.finish()
        return trees.resolved(self.skeleton, self._found)


def _made(reader: Reader, name: str, like: Any, device: Any) -> Any:
    """A new array of the framework, and at the place, of the one that is there now; else a torch tensor."""
    torch = dtypes.imported("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return reader.new(name, like)
    if like is None:
        return reader.new(name, device=device)
    stored = reader.stored[name]
    array, _ = arrays.allocate(stored.number, stored.shape, "numpy")
    reader.of.load.tensor(name, array)
    return array


def references(skeleton: Any) -> Iterator[str]:
    """Names of the tensors that a decoded value refers to."""
    if type(skeleton) is tagged.Tensor:
        yield skeleton.name
    elif isinstance(skeleton, dict):
        for value in skeleton.values():
            yield from references(value)
    elif isinstance(skeleton, (list, tuple, collections.deque)):
        for value in skeleton:
            yield from references(value)


def has_state(value: Any) -> bool:
    """Whether it is an object that gives and takes its state."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class ObjectPart(Part):
    """An object with ``state_dict()`` and ``load_state_dict()``: a scheduler, a scaler, one of the user's."""

    def __init__(self, key: str, target: Any) -> None:
        self.key = key
        self.target = target
        self._read: Unpacked | None = None

    def save(self, to: Saving) -> None:
        """Adds its state."""
        Packed(self.key, self.target.state_dict()).save(to)

    def describe(self, of: Restoring) -> None:
        """Reads its state."""
        reader = Reader(of)
        self._read = None
        if self.key not in reader.keys:
            lacking(of, [self.key], f"state of the {type(self.target).__name__}")
            return
        now = self.target.state_dict()
        self._read = Unpacked(reader, self.key, like=now)
        if self._read.skeleton == {} and now:
            text = f'"{self.key}": the {type(self.target).__name__} was disabled when it was saved, and is enabled now'
            if of.exact:
                raise MismatchError(f"{text}; disable it, or resume with exact=False")
            of.notes.append(f"{text}: left as it is")
            self._read = None

    def restore(self, of: Restoring) -> None:
        """Gives the state to the object."""
        if self._read is not None:
            self.target.load_state_dict(self._read.value())
        self._read = None


class VarsPart(Part):
    """The plain values of a state."""

    key = VARS

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self._read: Unpacked | None = None

    def save(self, to: Saving) -> None:
        """Adds them."""
        Packed(self.key, dict(self.values)).save(to)

    def describe(self, of: Restoring) -> None:
        """Reads them."""
        reader = Reader(of)
        self._read = None
        if self.key in reader.keys:
            self._read = Unpacked(reader, self.key, like=dict(self.values))
        found = {} if self._read is None else self._read.skeleton
        # A value that is new has its first one from the program.
        of.not_restored.extend([f"{self.key}.{name}" for name in self.values if name not in found])

    def restore(self, of: Restoring) -> None:
        """Puts them into the dict; values that were not saved stay."""
        if self._read is not None:
            self.values.update(self._read.value())
        self._read = None


class PerRank:
    """For what differs between ranks, in :class:`lastgood.State`: ``State(model=model, cache=lastgood.PerRank(cache))``.

    It is saved for each rank, and each gets its own back where there are as many ranks. It cannot be cut anew: another
    number of ranks is an error, or with ``exact=False`` noted, and it stays as it is.

    Args:
        target: an object with ``state_dict`` and ``load_state_dict``, or a dict, which is filled in place.
    """

    def __init__(self, target: Any) -> None:
        if not has_state(target) and not isinstance(target, dict):
            raise InvalidError(
                f"PerRank takes a dict, or an object with state_dict() and load_state_dict(), not {type(target).__name__}"
            )
        self.target = target

    def lastgood_part(self, key: str) -> Part:
        """How it is saved and restored."""
        return PerRankPart(key, self.target)


class PerRankPart(Part):
    """State of one rank."""

    def __init__(self, key: str, target: Any) -> None:
        self.key = key
        self.target = target
        self._read: Unpacked | None = None

    def save(self, to: Saving) -> None:
        """Adds this rank's; tensors under names with the rank in them."""
        value = self.target if isinstance(self.target, dict) else self.target.state_dict()
        packed = Packed(f"{self.key}.rank-{to.ranks.rank}", value)
        packed.save_tensors(to)
        to.save.rank_bytes(self.key, packed.text.encode())
        to.save.state(self.key, {"per_rank": True})

    def describe(self, of: Restoring) -> None:
        """Reads this rank's."""
        reader = Reader(of)
        self._read = None
        if self.key not in reader.keys:
            lacking(of, [self.key], "state of single ranks")
            return
        saved, now = of.checkpoint.world, of.ranks.world
        if saved != now:
            text = (
                f'"{self.key}" is state of single ranks: {saved} saved it, there are {now}, and it cannot be cut anew'
            )
            if of.exact:
                raise WorldError(f"{text}; resume on {saved} ranks, or with exact=False to leave it as it is")
            of.notes.append(f"{text}: left as it is")
            of.not_restored.append(self.key)
            return
        skeleton = of.checkpoint.rank_state(self.key, of.ranks.rank, now)
        like = self.target if isinstance(self.target, dict) else self.target.state_dict()
        self._read = Unpacked(reader, f"{self.key}.rank-{of.ranks.rank}", skeleton, like)

    def restore(self, of: Restoring) -> None:
        """Gives it back."""
        if self._read is None:
            return
        value = self._read.value()
        if isinstance(self.target, dict):
            self.target.clear()
            self.target.update(value)
        else:
            self.target.load_state_dict(value)
        self._read = None


def refuse(key: str, value: Any) -> UnsupportedError:
    """What is told about a value that a state cannot hold."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, list, tuple, dict, set)):
        return UnsupportedError(
            f'"{key}": a plain {type(value).__name__} goes into state.vars[{key!r}], where it can change'
        )
    if kind == "torch._C.Generator":
        return UnsupportedError(
            f'"{key}": generators are given as State(random=lastgood.random.RandomPart(generators={{{key!r}: …}}))'
        )
    return UnsupportedError(
        f'"{key}": {kind} has no state_dict() and load_state_dict(); give it both, or put what it is made of into state.vars'
    )
