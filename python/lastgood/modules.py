# SPDX-License-Identifier: Apache-2.0
"""Modules of a training state: parameters, buffers, extra state, and averaged copies of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from lastgood import placement
from lastgood.errors import ConflictError, InvalidError, StateError
from lastgood.frozen import FrozenWeights
from lastgood.names import has_extra_state, is_a, join, some, walk
from lastgood.objects import Packed, Unpacked
from lastgood.parts import Part, Restoring, Saving
from lastgood.progress import logger
from lastgood.saving import Group
from lastgood.staging import lent, place_of
from lastgood.tensors import Reader, Replicas, Writer, check_memory, kind_of, lacking

# The module of this key has bare names on disk, which other tools expect.
MODEL = "model"


class Entry(NamedTuple):
    """A tensor of a module under one of its names."""

    name: str
    tensor: Any
    group: Group
    parameter: bool
    ddp: Any  # the DistributedDataParallel around its module, or None
    root: str  # the name of the first entry that is the same memory; else its own


class Collected(NamedTuple):
    """All tensors of the modules as they are now."""

    entries: list[Entry]
    names: dict[int, str]  # of parameters and bare tensors, by id
    extra: list[tuple[str, Any]]  # modules with state beside their tensors, and its key
    unsaved: list[str]  # buffers that are not persistent


class Modules:
    """The modules and bare tensors of a state, by key. What is in them is found anew for each save and load, since
    parallelism, adapters and freezing may change it at any time.
    """

    def __init__(self) -> None:
        self.modules: dict[str, torch.nn.Module] = {}
        self.stages: dict[str, str] = {}  # keys of modules of a list, and the list's
        self.bare: dict[str, torch.Tensor] = {}
        self.replicas = Replicas()
        self._last: Collected | None = None

    def collect(self) -> Collected:
        """Looks at all modules.

        Raises:
            ConflictError: two tensors have one name.
        """
        collecting = _Collecting()
        for key, module in self.modules.items():
            whole = self.stages.get(key, key)
            collecting.module(whole, module, "" if whole == MODEL else whole)
        for key, tensor in self.bare.items():
            collecting.add(key, tensor, "optim", isinstance(tensor, torch.nn.Parameter), None)
            collecting.names.setdefault(id(tensor), key)
        self._last = Collected(collecting.entries, collecting.names, collecting.extra, collecting.unsaved)
        return self._last

    def last(self) -> Collected:
        """What was collected last: the modules' part comes before those that ask for names."""
        return self._last or self.collect()


class _Collecting:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.names: dict[int, str] = {}
        self.extra: list[tuple[str, Any]] = []
        self.unsaved: list[str] = []
        self._by_name: dict[str, Any] = {}
        self._first: dict[Any, str] = {}

    def module(self, key: str, module: torch.nn.Module, prefix: str) -> None:
        group: Group = "model" if key == MODEL else "optim"
        for place in walk(module, prefix):
            _prepare(place.module, place.path or key)
            hidden = place.module._non_persistent_buffers_set
            for name, parameter in place.module._parameters.items():
                if parameter is not None:
                    full = join(place.path, name)
                    self.add(full, parameter, group, True, place.ddp)
                    self.names.setdefault(id(parameter), full)
            for name, buffer in place.module._buffers.items():
                if buffer is None:
                    continue
                full = join(place.path, name)
                if name in hidden:
                    self.unsaved.append(full)
                else:
                    self.add(full, buffer, group, False, place.ddp)
            if has_extra_state(place.module):
                path = place.path if key != MODEL else join(MODEL, place.path)
                self.extra.append((f"{path}._extra_state", place.module))

    def add(self, name: str, tensor: Any, group: Group, parameter: bool, ddp: Any) -> None:
        known = self._by_name.setdefault(name, tensor)
        if known is not tensor:
            raise ConflictError(
                f'"{name}" names two tensors of the state: give stages of a pipeline the names they have in the whole '
                "model, or register modules under keys of their own"
            )
        identity = _identity(tensor)
        root = name if identity is None else self._first.setdefault(identity, name)
        self.entries.append(Entry(name, tensor, group, parameter, ddp, root))


def _identity(t: Any) -> Any:
    """Equal for tensors that are the same elements of the same memory; None for what has none."""
    if t.is_meta or type(t) not in (torch.Tensor, torch.nn.Parameter):
        # Of parts on ranks, and of what is made of others, the object tells: an empty part has no place in memory.
        return None if t.is_meta else id(t)
    if t.numel() == 0 or t.layout is not torch.strided:
        return None
    return (t.data_ptr(), t.dtype, t.shape, t.stride(), t.device)


def _prepare(module: torch.nn.Module, name: str) -> None:
    """Before a module's parameters are looked at: FSDP holds them whole for a while after a forward pass."""
    if is_a(module, "FSDPModule"):
        module.reshard()  # type: ignore[operator]
    elif is_a(module, "FullyShardedDataParallel") and not str(module.sharding_strategy).endswith("NO_SHARD"):
        raise InvalidError(
            f'"{name}" is wrapped in FSDP1, whose flat parameters have no names; use FSDP2 (fully_shard)'
        )


class ModulesPart(Part):
    """Parameters, buffers and extra state of all modules, and bare tensors."""

    key = "modules"

    def __init__(self, modules: Modules, skip_frozen: bool) -> None:
        self.modules = modules
        self.skip_frozen = skip_frozen
        self._frozen = FrozenWeights()
        self._reader: Reader | None = None
        self._extra: list[tuple[Any, Unpacked]] = []

    # ------------------------------------------------------------------- saving

    def save(self, to: Saving) -> None:
        """Adds all tensors; of tied ones the first, and names for the others."""
        found = self.modules.collect()
        replicas = self.modules.replicas
        replicas.begin(to)
        writer = Writer(to, replicas)
        groups = {e.name: e.group for e in found.entries if e.root == e.name}
        frozen: list[Entry] = []
        for e in found.entries:
            if self.skip_frozen and _is_frozen(e):
                if e.name == e.root:
                    check_memory(e.name, e.tensor)
                    frozen.append(e)
            elif e.root != e.name and groups[e.root] == e.group:
                writer.alias(e.name, e.root)
            elif e.parameter:
                whole = replicas.layout(to, e.ddp)
                writer.add(e.name, e.tensor, group=e.group, whole=whole, lazy=to.lazy(e.tensor))
            elif _is_truth(e, to):
                writer.add(e.name, e.tensor, group=e.group, buffer=True)
        writer.flush()
        self._frozen.save(to, [(e.name, e.tensor) for e in frozen])
        for key, module in found.extra:
            Packed(key, module.get_extra_state()).save(to)

    # ------------------------------------------------------------------ loading

    def describe(self, of: Restoring) -> None:
        """Reads into the memory that parameters and buffers have."""
        found = self.modules.collect()
        of.known.update(e.name for e in found.entries)
        of.known.update(key for key, _ in found.extra)
        reader = self._reader = Reader(of)
        tied: dict[str, list[Entry]] = {}
        for e in found.entries:
            check_memory(e.name, e.tensor)
            tied.setdefault(e.root, []).append(e)
        frozen: list[tuple[str, Any]] = []
        missing: list[str] = []
        other_mesh: list[str] = []
        for same in tied.values():
            there = [e for e in same if reader.has(e.name)]
            if not there:
                digested = next((e for e in same if self._frozen.knows(reader, e.name)), None)
                if digested is None:
                    missing.append(same[0].name)
                else:
                    frozen.append((digested.name, digested.tensor))
                continue
            first = there[0]
            if (
                of.checkpoint.world != of.ranks.world
                and first.name in reader.stored
                and reader.stored[first.name].per_rank
            ):
                other_mesh.append(first.name)
            reader.take(first.name, first.tensor, _copy_of(first, reader))
            for other in there[1:]:
                if not _stored_as_tied(reader, first.name, other.name):
                    reader.must_equal(other.name, first.name, other.tensor)
        self._frozen.check(reader, frozen)
        lacking(of, missing, "tensor")
        if other_mesh:
            of.notes.append(
                f"{len(other_mesh)} buffers differed between the {of.checkpoint.world} ranks that saved them; all ranks "
                f"took those of the first: {some(other_mesh)}"
            )
        if found.unsaved:
            of.notes.append(
                f"{len(found.unsaved)} buffers that are not persistent were left as they are, which is not initialised "
                f"after to_empty(): {some(found.unsaved)}"
            )
        if any(_sums_anew(e.ddp, of) for e in found.entries if e.parameter):
            of.notes.append(
                "DistributedDataParallel sums gradients over more than two ranks in another order in the first step after "
                "a start than in later ones, so the last bits may be others than without the interruption; "
                "find_unused_parameters=True keeps one order"
            )
        self._extra = []
        for key, module in found.extra:
            if key in reader.keys:
                self._extra.append((module, Unpacked(reader, key)))
            else:
                lacking(of, [key], "extra state")

    def restore(self, of: Restoring) -> None:
        """Hands extra state to the modules."""
        if self._reader is not None:
            self._reader.finish()
        for module, value in self._extra:
            module.set_extra_state(value.value())
        self._reader, self._extra = None, []


def _is_frozen(e: Entry) -> bool:
    return e.parameter and e.group == "model" and not e.tensor.requires_grad


def _broadcasts(e: Entry) -> bool:
    return e.ddp is not None and bool(e.ddp.broadcast_buffers) and not placement.is_dtensor(e.tensor)


def _sums_anew(ddp: Any, of: Restoring) -> bool:
    """Whether a resume on as many ranks rounds sums of gradients otherwise: after its first step the reducer rebuilds
    its buckets, and a ring adds up each part of a bucket from another rank on. Two ranks' sums have no order.
    """
    if ddp is None or of.checkpoint.world != of.ranks.world or ddp.process_group.size() < 3:
        return False
    return bool(ddp.static_graph) or not ddp.find_unused_parameters


def _is_truth(e: Entry, to: Saving) -> bool:
    """Whether this rank's buffer counts: with DistributedDataParallel the first rank's does, which all others get
    before they use theirs.
    """
    return to.ranks.world == 1 or not _broadcasts(e) or e.ddp.process_group.rank() == 0


def _copy_of(e: Entry, reader: Reader) -> int | None:
    """Whose copy of a buffer is wanted: that of the first rank of the group, where several groups each have one."""
    of = reader.of
    if of.ranks.world == 1 or of.checkpoint.world != of.ranks.world or not _broadcasts(e):
        return None
    stored = reader.stored.get(e.name)
    if stored is None or not stored.per_rank:
        return None
    return torch.distributed.get_global_rank(e.ddp.process_group, 0)


def _stored_as_tied(reader: Reader, one: str, other: str) -> bool:
    a, b = reader.stored.get(one), reader.stored.get(other)
    if a is None or b is None:  # made of other tensors
        return True
    return (a.alias_of or a.name) == (b.alias_of or b.name)


# ------------------------------------------------------------- averaged copies


class EMA:
    """An averaged copy of a model, for :class:`lastgood.State`: ``State(model=model, ema=lastgood.EMA(averaged))``.

    Its tensors are saved beside the optimizer's, under the key and the model's names (``ema.h.0.weight``), and are
    always copied before a save in the background returns, whenever they are updated.

    A checkpoint has the trained weights in the model, and the average beside them. To evaluate with the average use
    :meth:`swapped_in`, during which no save takes place; an average that is in the model in another way is refused
    where memory shows it, and noted by a resume where values do.

    Args:
        source: :class:`torch.optim.swa_utils.AveragedModel`, a module, or a dict of tensors by name.
    """

    def __init__(self, source: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        if not isinstance(source, (torch.nn.Module, Mapping)):
            raise InvalidError(f"an EMA is a module or a dict of tensors, not {type(source).__name__}")
        self.source = source
        self.is_swapped_in = False

    def lastgood_part(self, key: str) -> Part:
        """How it is saved and restored."""
        return EMAPart(key, self)

    @contextlib.contextmanager
    def swapped_in(self, model: torch.nn.Module) -> Iterator[None]:
        """In the block the model has the averages of its parameters and buffers; behind it what it had before. A save
        in the block is refused, and one that is still reading the model is waited for. Takes memory for a copy of the
        model.

        Raises:
            InvalidError: the model has none of the averaged tensors.
            StateError: they are in a model already.
        """
        if self.is_swapped_in:
            raise StateError("the averaged weights are in a model already")
        collecting = _Collecting()
        collecting.module(MODEL, model, "")
        averages = dict(_averages(self.source, ""))
        found = [
            (e.tensor, averages[e.name])
            for e in collecting.entries
            if e.root == e.name and e.name in averages and averages[e.name].shape == e.tensor.shape
        ]
        if not found:
            raise InvalidError("the model has none of the averaged tensors: names or shapes are others")
        trained: list[tuple[Any, Any]] = []
        with lent():
            self.is_swapped_in = True
            try:
                for tensor, average in found:
                    trained.append((tensor, tensor.detach().clone()))
                    tensor.detach().copy_(average)
                yield
            finally:
                for tensor, value in trained:
                    tensor.detach().copy_(value)
                self.is_swapped_in = False


def _averages(source: torch.nn.Module | Mapping[str, torch.Tensor], key: str) -> Iterator[tuple[str, Any]]:
    """The tensors of an averaged copy, with the names they have on disk."""
    if not isinstance(source, torch.nn.Module):
        for name, tensor in source.items():
            if not isinstance(tensor, torch.Tensor):
                raise InvalidError(f'"{key}": {name!r} is {type(tensor).__name__}, not a tensor')
            yield join(key, name), tensor
        return
    collecting = _Collecting()
    collecting.module(key or MODEL, source, key)
    for e in collecting.entries:
        if e.root == e.name:
            yield e.name, e.tensor


class _Pair(NamedTuple):
    """A trained parameter, and its average."""

    name: str
    trained: Any
    average: Any


class EMAPart(Part):
    """The tensors of an averaged copy.

    Attributes:
        modules: of the state, in one of which the trained weights are.
    """

    def __init__(self, key: str, ema: EMA) -> None:
        self.key = key
        self.ema = ema
        self.modules: Modules | None = None
        self._reader: Reader | None = None
        self._places: dict[str, Any] = {}  # of both of a pair, when they were looked at last
        self._differed = False

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        return _averages(self.ema.source, self.key)

    def save(self, to: Saving) -> None:
        """Adds all tensors, to be copied at once.

        Raises:
            StateError: the averages are in the model.
        """
        self._refuse_swapped()
        self._warn_if_equal()
        writer = Writer(to)
        for name, tensor in self._tensors():
            writer.add(name, tensor, buffer=True)
        writer.flush()

    def describe(self, of: Restoring) -> None:
        """Reads into the memory of the copy."""
        self._refuse_swapped()
        reader = self._reader = Reader(of)
        missing = []
        for name, tensor in self._tensors():
            of.known.add(name)
            if reader.has(name):
                reader.take(name, tensor)
            else:
                missing.append(name)
        lacking(of, missing, "tensor of the averaged copy")

    def restore(self, of: Restoring) -> None:
        """What was read is in place."""
        if self._reader is not None:
            self._reader.finish()
        self._reader = None
        equal = self._all_equal()
        self._differed = equal == 0
        if equal and of.checkpoint.step > 0:
            of.notes.append(
                f'"{self.key}": all {equal} averaged weights equal those of the model: right if averaging has not begun; '
                f"else the average was in the model when step {of.checkpoint.step} was saved"
            )

    # ----------------------------------------------------- is it in the model?

    def _pairs(self) -> Iterator[_Pair]:
        if self.modules is None:
            return
        averages = {name.removeprefix(f"{self.key}."): tensor for name, tensor in self._tensors()}
        for e in self.modules.last().entries:
            if e.parameter and e.root == e.name and e.tensor.requires_grad:
                short = e.name if e.group == "model" else e.name.partition(".")[2]
                average = averages.get(short)
                if average is not None and average.shape == e.tensor.shape:
                    yield _Pair(e.name, e.tensor, average)

    def _refuse_swapped(self) -> None:
        """What memory tells: the average's is the parameter's, or each has what the other had."""
        text = f'"{self.key}": the averaged weights are in the model'
        if self.ema.is_swapped_in:
            raise StateError(f"{text}: save and resume outside of EMA.swapped_in()")
        now: dict[str, Any] = {}
        for pair in self._pairs():
            here, there = now[pair.name] = place_of(pair.trained), place_of(pair.average)
            if here is None or there is None:
                continue
            if here == there:
                raise StateError(f'{text}: the average of "{pair.name}" is the parameter itself; copy it (clone)')
            if self._places.get(pair.name) == (there, here):
                raise StateError(
                    f'{text}: "{pair.name}" and its average have changed places; save before they do, or after they have '
                    "changed back"
                )
        self._places = now

    def _warn_if_equal(self) -> None:
        """What values tell, of tensors in host memory: no device is waited for."""
        if any(not pair.trained.is_cpu for pair in self._pairs()):
            return
        equal = self._all_equal()
        if equal and self._differed:
            logger.warning(
                '"%s": all %d averaged weights equal those of the model, and did not before: is the average in the '
                "model? A resume goes on from what is there",
                self.key,
                equal,
            )
        self._differed = equal == 0

    def _all_equal(self) -> int:
        """How many pairs there are, if both of each are equal; 0: they differ, or there are none."""
        count = 0
        for pair in self._pairs():
            trained, average = (_whole(t) for t in pair[1:])
            if kind_of(trained) != "plain" or kind_of(average) != "plain" or trained.shape != average.shape:
                continue
            if not torch.equal(trained.detach().to(average.dtype), average.detach()):
                return 0
            count += trained.numel() > 0
        return count


def _whole(t: Any) -> Any:
    """The part of a DTensor that is here, or all of another tensor."""
    return placement.local(t) if placement.is_dtensor(t) and placement.holds(t) else t
