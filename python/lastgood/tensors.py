# SPDX-License-Identifier: Apache-2.0
"""How the tensors of a training state are handed to a save and to a load: plain ones, DTensors, and subclasses that
are made of other tensors.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from lastgood import dtypes, placement, tagged
from lastgood.errors import InvalidError, MismatchError, MissingError, UnsupportedError
from lastgood.layout import Layout
from lastgood.names import some
from lastgood.saving import Group, Item

if TYPE_CHECKING:
    from lastgood.checkpoint import StoredTensor
    from lastgood.parts import Restoring, Saving

Kind = Literal["plain", "dtensor", "wrapper", "fake"]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_kinds: dict[type, Kind] = dict.fromkeys(_PLAIN, "plain")

# Of a tensor that is made of others: what it is, under this key and its name.
_MADE_OF = "made_of."
# Elements of a part that are compared between slices of a mesh.
_SAMPLE = 256


def kind_of(t: Any) -> Kind:
    """How a tensor keeps its values. Decided once a type."""
    found = _kinds.get(type(t))
    if found is None:
        found = _kinds[type(t)] = _decide(t)
    return found


def _decide(t: Any) -> Kind:
    if placement.is_dtensor(t):
        return "dtensor"
    if type(t).__name__ == "FakeTensor":
        return "fake"
    if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and hasattr(t, "__tensor_flatten__"):
        return "wrapper"
    return "plain"


def check_memory(name: str, t: Any) -> None:
    """Refuses a tensor without values.

    Raises:
        InvalidError: it is on the meta device, fake, not initialised yet, or its storage was freed.
    """
    if type(t) not in _PLAIN and torch.nn.parameter.is_lazy(t):
        raise InvalidError(f'"{name}" is not initialised: run one forward pass, which tells a lazy module its shapes')
    kind = kind_of(t)
    if kind == "fake":
        raise InvalidError(f'"{name}" is a FakeTensor, which has no values: use the real model')
    if t.is_meta:
        raise InvalidError(
            f'"{name}" is on the meta device and has no memory: call model.to_empty(device=…) and give it values first'
        )
    if kind == "plain" and t.layout is torch.strided and t.untyped_storage().nbytes() == 0 and t.numel() > 0:
        raise InvalidError(
            f'"{name}" has no memory now: its storage was freed, as FSDP1 does between uses; use FSDP2 (fully_shard)'
        )


def shape_of(t: Any) -> tuple[int, ...]:
    """The global shape in elements, as it is stored."""
    shape = tuple(t.shape)
    if shape and dtypes.from_torch().get(t.dtype) == dtypes.F4:  # two elements in one of torch's
        return (*shape[:-1], 2 * shape[-1])
    return shape


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN too."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    one, other = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, other)


def _inner(t: Any) -> tuple[dict[str, torch.Tensor], str]:
    """What a tensor is made of, and the rest of what it is as text."""
    attributes, context = t.__tensor_flatten__()
    try:
        text = tagged.encode(context)
    except UnsupportedError:
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(context))
    return {a: getattr(t, a) for a in attributes}, text


def _class_of(t: Any) -> str:
    return f"{type(t).__module__}.{type(t).__qualname__}"


# -------------------------------------------------------------------- replicas


class Replicas:
    """Which layout plain tensors get that all ranks are to hold alike, as parameters and optimizer state.

    They are declared replicated, so that the ranks share out the writing, once the ranks have been seen to hold equal
    ones: under DistributedDataParallel, which compares and keeps them equal, or by the first save, in which all are
    compared. They are never declared where a rank may hold others: in pipeline stages, or where the mesh has axes
    along which ranks take the same samples, for then a plain tensor under one name may be cut by hand.
    """

    def __init__(self) -> None:
        self.stages = False  # a list of modules is registered
        self._seen: Any = None  # the save before
        self.equal = False

    def forget(self) -> None:
        """Something else is in the state: compare again."""
        self._seen, self.equal = None, False

    def begin(self, to: Saving) -> None:
        """Before the tensors of a save."""
        before = self._seen
        if before is not None and before is not to.save:
            went = (before.info is not None and not before.info.skipped) or (
                before.launched is not None and before.launched.skipped is None
            )
            self.equal = self.equal or went
        self._seen = to.save

    def layout(self, to: Saving, ddp: Any = None) -> Layout | None:
        """The layout; None: compared by this save, or there is one rank only."""
        ranks = to.ranks
        if ranks.world == 1 or self.stages or any(a.size > 1 and a.name not in ranks.data for a in ranks.mesh):
            return None
        if ddp is None and not self.equal:
            return None
        if ddp is not None and ddp.process_group.size() != ranks.world:
            return None
        return _all_ranks(ranks.world)


_whole: dict[int, Layout] = {}


def _all_ranks(world: int) -> Layout:
    if world not in _whole:
        _whole[world] = Layout([world])
    return _whole[world]


# ---------------------------------------------------------------------- saving


class Writer:
    """Collects the tensors of a part, and hands them over in one call a group.

    Args:
        replicas: until they are known to be equal, parts of DTensors that slices of a mesh hold alike are compared by
            their first elements.
    """

    def __init__(self, to: Saving, replicas: Replicas | None = None) -> None:
        self.to = to
        self._compare = replicas is not None and not replicas.equal
        self._samples: dict[str, Any] = {}
        self._items: dict[Group, list[Item]] = {"model": [], "optim": []}
        self._aliases: list[tuple[str, str]] = []
        self.names: set[str] = set()

    def add(
        self,
        name: str,
        t: Any,
        *,
        group: Group = "optim",
        whole: Layout | None = None,
        buffer: bool = False,
        lazy: bool = False,
    ) -> None:
        """One tensor.

        Args:
            whole: of a plain tensor that all ranks hold alike.
            buffer: may differ between ranks, and is kept per rank then.
            lazy: only an optimizer's update changes it.
        """
        kind = kind_of(t)
        if kind != "dtensor" and (type(t) not in _PLAIN or t.is_meta or not t.untyped_storage().nbytes()):
            check_memory(name, t)
        if kind == "plain":
            self.names.add(name)
            shape = None if whole is None else shape_of(t)
            self._items[group].append(Item(name, t, shape, whole, buffer and whole is None, lazy))
        elif kind == "wrapper":
            self._made_of(name, t, group, whole, buffer)
        elif placement.holds(t):
            layout, slices = placement.placed(name, t)
            part = placement.local(t)
            if slices and self._compare:
                self._sample(slices, name, part)
            if kind_of(part) == "plain":
                if part.is_meta or not part.untyped_storage().nbytes():
                    check_memory(name, part)
                self.names.add(name)
                self._items[group].append(Item(name, part, shape_of(t), layout, False, lazy))
            else:
                self._parts_made_of(name, t, part, group)

    def _sample(self, slices: str, name: str, part: Any) -> None:
        if kind_of(part) == "plain":
            first = part.detach().reshape(-1)[:_SAMPLE].cpu().contiguous().view(torch.uint8).tolist()
            sha = self._samples.setdefault(slices, hashlib.sha256())
            sha.update(f"{name}\n".encode() + bytes(first))

    def _made_of(self, name: str, t: Any, group: Group, whole: Layout | None, buffer: bool) -> None:
        inner, context = _inner(t)
        record = {"class": _class_of(t), "of": list(inner), "context": context}
        self.to.save.state(_MADE_OF + name, record)
        self.names.add(name)
        # Never lazy: an update may put other tensors into their places.
        for attribute, tensor in inner.items():
            self.add(f"{name}.{attribute}", tensor, group=group, whole=whole, buffer=buffer)

    def _parts_made_of(self, name: str, t: Any, part: Any, group: Group) -> None:
        """A DTensor's part that is made of others: they follow no rule, so that only the same ranks get them back."""
        inner, context = _inner(part)
        self.to.save.state(_MADE_OF + name, {"class": _class_of(part), "sharded": True})
        record = {"of": list(inner), "context": context, "placed": placement.text_of(t)}
        self.to.save.rank_state(_MADE_OF + name, record)
        self.names.add(name)
        for attribute, tensor in inner.items():
            self.add(_of_rank(f"{name}.{attribute}", self.to.ranks.rank), tensor, group=group)

    def alias(self, alias: str, name: str) -> None:
        """Another name of a tensor. Nothing where this rank does not write that one."""
        if name in self.names:
            self._aliases.append((alias, name))

    def flush(self) -> None:
        """Hands all over."""
        for group, items in self._items.items():
            if items:
                self.to.save.items(items, group=group)
        for alias, name in self._aliases:
            self.to.save.alias(alias, name)
        for slices, sha in self._samples.items():
            # A key with two values is an error, which names the ranks.
            self.to.save.state(f"replicas.{min(self.names)}.{slices}", sha.hexdigest())
        self._samples = {}
        self._items = {"model": [], "optim": []}
        self._aliases = []


def _of_rank(name: str, rank: int) -> str:
    return f"{name}.rank-{rank}"


# --------------------------------------------------------------------- loading


class Reader:
    """Describes where the tensors of a part are read to.

    Attributes:
        stored: all tensors of the checkpoint by name.
        keys: of its global state.
    """

    def __init__(self, of: Restoring) -> None:
        self.of = of
        self.stored: Mapping[str, StoredTensor] = dict(of.checkpoint)
        self.keys = frozenset(of.checkpoint.state)
        self._after: list[Callable[[], None]] = []

    @property
    def made_of(self) -> list[str]:
        """Names of what was saved as made of other tensors."""
        return [key.removeprefix(_MADE_OF) for key in self.keys if key.startswith(_MADE_OF)]

    def is_made_of(self, name: str) -> bool:
        """Whether it was saved as made of other tensors."""
        return _MADE_OF + name in self.keys

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name, or what it was made of."""
        return name in self.stored or self.is_made_of(name)

    def take(self, name: str, t: Any, copy_of_rank: int | None = None) -> None:
        """Reads into a tensor's own memory.

        Args:
            copy_of_rank: whose copy, where the checkpoint keeps one per rank.
        """
        check_memory(name, t)
        kind = kind_of(t)
        if kind == "dtensor":
            if placement.holds(t):
                self._take_part(name, t)
            return
        if kind == "wrapper":
            self._take_made_of(name, t)
            return
        if self.is_made_of(name):
            raise MismatchError(
                f'"{name}" was saved as {self.of.checkpoint.state[_MADE_OF + name]["class"]}, and is {_class_of(t)} now'
            )
        if 0 in t.stride() and any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True)):
            read = torch.empty(t.shape, dtype=t.dtype)
            self.of.load.tensor(name, read, copy_of_rank=copy_of_rank)
            self._after.append(lambda: _fill_expanded(name, t, read))
            return
        self.of.load.tensor(name, t, copy_of_rank=copy_of_rank)

    def _take_part(self, name: str, t: Any) -> None:
        part = placement.local(t)
        if kind_of(part) == "plain" and not self.is_made_of(name):
            check_memory(name, part)
            self.of.load.tensor(name, part, shape=shape_of(t), layout=placement.layout_of(name, t))
            return
        record = self._record(name, part, sharded=True)
        ranks, checkpoint = self.of.ranks, self.of.checkpoint
        again = f'"{name}" is made of parts of its own on each rank ({record["class"]}), which cannot be cut anew: '
        if checkpoint.world != ranks.world:
            raise UnsupportedError(f"{again}it was saved by {checkpoint.world} ranks, there are {ranks.world}")
        own = checkpoint.rank_state(_MADE_OF + name, ranks.rank, ranks.world)
        placed = placement.text_of(t)
        if own["placed"] != placed:
            raise UnsupportedError(f"{again}it was placed as {own['placed']}, and is as {placed} now")
        inner, context = _inner(part)
        self._check_context(name, own, inner, context)
        for attribute, tensor in inner.items():
            self.take(_of_rank(f"{name}.{attribute}", ranks.rank), tensor)

    def _take_made_of(self, name: str, t: Any) -> None:
        record = self._record(name, t, sharded=False)
        inner, context = _inner(t)
        self._check_context(name, record, inner, context)
        for attribute, tensor in inner.items():
            self.take(f"{name}.{attribute}", tensor)

    def _record(self, name: str, t: Any, sharded: bool) -> Any:
        key = _MADE_OF + name
        if key not in self.keys:
            raise MismatchError(f'"{name}" was saved as a plain tensor, and is {_class_of(t)} now')
        record = self.of.checkpoint.state[key]
        if record["class"] != _class_of(t):
            raise MismatchError(f'"{name}" was saved as {record["class"]}, and is {_class_of(t)} now')
        if bool(record.get("sharded")) != sharded:
            raise UnsupportedError(
                f'"{name}" ({record["class"]}) was saved {"in parts" if not sharded else "whole"}, and is held '
                f"{'in parts' if sharded else 'whole'} now; what is made of other tensors cannot be cut anew"
            )
        return record

    @staticmethod
    def _check_context(name: str, record: Any, inner: dict[str, Any], context: str) -> None:
        if record["of"] != list(inner) or record["context"] != context:
            raise MismatchError(
                f'"{name}" was saved as made of {record["of"]}, {record["context"]}, and is of {list(inner)}, {context} now'
            )

    def new(self, name: str, like: Any = None, device: Any = None) -> Any:
        """A new tensor for a stored one, and where it is read to.

        Args:
            like: a tensor; one of the same global shape and placement is made, or whole on its ranks and device.
            device: instead of that of ``like``; a plain tensor is made.

        Raises:
            UnsupportedError: torch here has no such dtype, or it was made of other tensors.
        """
        if self.is_made_of(name):
            record = self.of.checkpoint.state[_MADE_OF + name]
            raise UnsupportedError(
                f'"{name}" was saved as {record["class"]}, which cannot be made anew: let it exist before the resume '
                "(one optimizer step does)"
            )
        stored = self.stored[name]
        dtype = dtypes.torch_dtypes().get(stored.number)
        if dtype is None or stored.number == dtypes.F4:
            raise UnsupportedError(f'"{name}": a new tensor of {stored.dtype} cannot be made by this torch')
        with torch.no_grad():
            if like is None or device is not None:
                made = torch.empty(stored.shape, dtype=dtype, device=device)
            elif kind_of(like) in ("plain", "dtensor") and shape_of(like) == stored.shape:
                made = torch.empty_like(like, dtype=dtype, requires_grad=False)
            else:
                made = torch.empty(stored.shape, dtype=dtype, device=like.device)
                if kind_of(like) == "dtensor":
                    made = placement.replicated(like, made)
        self.take(name, made)
        return made

    def must_equal(self, name: str, other: str, t: Any) -> None:
        """After the load: a stored tensor has to have the same values as ``t``, which ``other`` was read into."""
        part = t
        if kind_of(t) == "dtensor":
            if not placement.holds(t):
                return
            part = placement.local(t)
            read = torch.empty(part.shape, dtype=part.dtype)
            self.of.load.tensor(name, read, shape=shape_of(t), layout=placement.layout_of(name, t))
        else:
            read = torch.empty(t.shape, dtype=t.dtype)
            self.of.load.tensor(name, read)

        def check() -> None:
            if not same_bytes(read, part):
                raise MismatchError(f'"{name}" and "{other}" are one tensor here, and differ in the checkpoint')

        self._after.append(check)

    def finish(self) -> None:
        """What is left to be done once all is read."""
        with torch.no_grad():
            for work in self._after:
                work()
        self._after = []


def _fill_expanded(name: str, t: torch.Tensor, read: torch.Tensor) -> None:
    """Into a tensor whose elements share memory, if that can hold what was read."""
    target, source = t.detach(), read
    for dim, (stride, size) in enumerate(zip(t.stride(), t.shape, strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    if not same_bytes(source.expand(read.shape), read):
        raise MismatchError(f'"{name}" is expanded from fewer elements here, and those differ in the checkpoint')
    target.copy_(source)


def lacking(of: Restoring, names: Iterable[str], what: str) -> None:
    """Tells of things of the state that the checkpoint has not.

    Raises:
        MissingError: in exact mode, for what is not optional.
    """
    found = list(names)
    required = [name for name in found if not of.may_lack(name)]
    if of.exact and required:
        raise MissingError(
            f"the checkpoint of step {of.checkpoint.step} has no {what} {some(required)}; {go_on_without(required)}"
        )
    of.not_restored.extend(found)


def go_on_without(names: list[str]) -> str:
    """How to resume though one side lacks something, for messages.

    Args:
        names: what would be optional.
    """
    shown = ", ".join(f'"{name}"' for name in names[:5]) + (", …" if len(names) > 5 else "")
    return f"to go on without: resume(state, optional=[{shown}]), or Checkpointer(exact=False) for whatever is lacking"
