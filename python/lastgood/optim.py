# SPDX-License-Identifier: Apache-2.0
"""State of optimizers by the names of their parameters.

The names are those of ``torch.distributed.checkpoint.state_dict``: ``optim.state.<parameter>.exp_avg``. Unlike there,
nothing is ever stepped, no gradient or hook is touched, and the names resolve over all modules of a state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lastgood import dtypes, tagged
from lastgood.errors import ConflictError, FormatError, InvalidError, UnsupportedError
from lastgood.layout import Layout
from lastgood.modules import Modules
from lastgood.names import some
from lastgood.objects import Packed, Unpacked, references
from lastgood.parts import Part, Restoring, Saving
from lastgood.tensors import Reader, Writer, kind_of, lacking, same_bytes, shape_of

# First part of all names; a parameter of several optimizers has the optimizer's key there.
OPTIM = "optim"
_NOT_OPTIONS = ("params", "param_names")
# State that is one number, whatever the parameter's shape, and which of it torch keeps in host memory.
_NUMBERS = ("step", "mu_product", "eta", "mu")
_ON_HOST = ("step", "mu_product")
# Options that choose the kernel: those of the checkpoint win, which may surprise.
_KERNELS = ("foreach", "fused", "capturable", "differentiable")


class Member(NamedTuple):
    """A parameter of an optimizer."""

    prefix: str
    name: str
    parameter: Any

    @property
    def base(self) -> str:
        """What the names of its state begin with."""
        return f"{self.prefix}.state.{self.name}"


class Row(NamedTuple):
    """Options of a group of parameters, as they are stored."""

    key: str
    names: list[str]
    options: dict[str, Any]  # with references in the place of tensors


class OptimizersPart(Part):
    """All optimizers of a state.

    Args:
        optimizers: by key.
        modules: of the state, which give the names.
    """

    key = OPTIM

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], modules: Modules) -> None:
        self.optimizers = dict(optimizers)
        self.modules = modules
        self._names_text: dict[str, str] = {}
        self._reader: Reader | None = None
        self._states: list[_State] = []
        self._groups: list[_Group] = []

    # -------------------------------------------------------------------- names

    def _members(self) -> list[list[list[Member]]]:
        """Parameters of each group of each optimizer."""
        names = self.modules.last().names
        uses: dict[int, int] = {}
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    uses[id(p)] = uses.get(id(p), 0) + 1
        found = []
        for key, optimizer in self.optimizers.items():
            groups = []
            for i, group in enumerate(optimizer.param_groups):
                members = []
                for j, p in enumerate(group["params"]):
                    name = names.get(id(p))
                    if name is None:
                        raise InvalidError(
                            f'"{key}": parameter {j} of group {i}, of shape {list(p.shape)}, is in no module of the '
                            "state; register the module that it is in, or itself: State(…, name=parameter)"
                        )
                    members.append(Member(OPTIM if uses[id(p)] == 1 else key, name, p))
                groups.append(members)
            found.append(groups)
        return found

    # ------------------------------------------------------------------- saving

    def save(self, to: Saving) -> None:
        """Adds the state of all parameters that have one, and all options."""
        writer = Writer(to, self.modules.replicas)
        declared = self._whole(to)
        for (key, optimizer), groups in zip(self.optimizers.items(), self._members(), strict=True):
            for i, (group, members) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
                for m in members:
                    state = optimizer.state.get(m.parameter)
                    if state:
                        _save_state(to, writer, m, state, declared)
                self._save_options(to, f'"{key}", group {i}', group, members)
        writer.flush()

    def _whole(self, to: Saving) -> Layout | None:
        """How plain state is declared: as plain parameters are, of which each has an equal one on all ranks."""
        around = {id(e.ddp): e.ddp for e in self.modules.last().entries if e.parameter}
        return self.modules.replicas.layout(to, next(iter(around.values())) if len(around) == 1 else None)

    def _save_options(self, to: Saving, where: str, group: dict[str, Any], members: list[Member]) -> None:
        options = {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
        for prefix in dict.fromkeys(m.prefix for m in members):
            names = [m.name for m in members if m.prefix == prefix]
            digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()[:16]
            key = f"{prefix}.groups.{digest}"
            if key not in self._names_text:
                self._names_text[key] = tagged.encode(names)
            try:
                packed = Packed(key, options)
            except UnsupportedError as why:
                raise UnsupportedError(f"optimizer {where}: {why}") from None
            to.save.state_text(key, f'{{"names": {self._names_text[key]}, "options": {packed.text}}}')
            packed.save_tensors(to, buffer=False)

    # ------------------------------------------------------------------ loading

    def describe(self, of: Restoring) -> None:
        """Reads into state that is there, and into new tensors for state that is not."""
        reader = self._reader = Reader(of)
        members = self._members()
        stored = _Stored(reader, members)
        self._states, self._groups = [], []
        unknown: list[str] = []
        of.known.update(m.base for groups in members for group in groups for m in group)
        for (key, optimizer), groups in zip(self.optimizers.items(), members, strict=True):
            for i, (group, of_group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
                options = _Group(f'"{key}", group {i}', group)
                for m in of_group:
                    row = stored.rows.get((m.prefix, m.name))
                    if row is None:
                        (of.not_restored if of.may_lack(m.base) else unknown).append(m.name)
                        continue
                    options.add(m.name, row)
                    self._states.append(_State(reader, stored, optimizer, m, row.options))
                options.describe(reader)
                self._groups.append(options)
        lacking(of, unknown, "optimizer state of")

    def restore(self, of: Restoring) -> None:
        """Puts state and options into the optimizers: first all is there, then all is applied."""
        if self._reader is None:
            return
        self._reader.finish()
        for group in self._groups:
            group.check()
        for state in self._states:
            state.apply()
        for group in self._groups:
            group.apply(of)
        self._reader, self._states, self._groups = None, [], []


def _save_state(to: Saving, writer: Writer, m: Member, state: Mapping[Any, Any], whole: Layout | None) -> None:
    base, others = m.base, {}
    lazy = to.lazy
    for k, v in state.items():
        if not isinstance(k, str) or not k:
            raise UnsupportedError(f'"{base}": its state has the key {k!r}; keys are names')
        if isinstance(v, torch.Tensor):
            writer.add(f"{base}.{k}", v, whole=whole, lazy=lazy(v))
        else:
            others[k] = v
    if others:
        packed = Packed(base, others)
        to.save.state_text(base, packed.text)
        packed.save_tensors(to, buffer=False)


class _Stored:
    """Of the checkpoint: options by parameter, and names of state by parameter."""

    def __init__(self, reader: Reader, members: list[list[list[Member]]]) -> None:
        state = reader.of.checkpoint.state
        mine = {(m.prefix, m.name) for groups in members for group in groups for m in group}
        prefixes = {prefix for prefix, _ in mine}
        self.rows: dict[tuple[str, str], Row] = {}
        for key in sorted(reader.keys):
            prefix, found, _ = key.partition(".groups.")
            if not found or prefix not in prefixes:
                continue
            value = state[key]
            if not isinstance(value, dict) or not {"names", "options"} <= value.keys():
                raise FormatError(f'state "{key}" holds no options of an optimizer')
            row = Row(key, value["names"], value["options"])
            for name in row.names:
                self.rows[prefix, name] = row
        self.tensors: dict[tuple[str, str], list[str]] = {}
        for name in (*reader.stored, *reader.made_of):
            found_member = _member_of(name, mine, prefixes)
            if found_member is not None:
                prefix, parameter, rest = found_member
                self.tensors.setdefault((prefix, parameter), []).append(rest)


def _member_of(name: str, mine: set[tuple[str, str]], prefixes: set[str]) -> tuple[str, str, str] | None:
    """Prefix, parameter and key of the name of a state tensor."""
    for prefix in prefixes:
        start = f"{prefix}.state."
        if not name.startswith(start):
            continue
        rest = name[len(start) :]
        at = rest.rfind(".")
        while at > 0:
            if (prefix, rest[:at]) in mine:
                return prefix, rest[:at], rest[at + 1 :]
            at = rest.rfind(".", 0, at)
    return None


class _State:
    """State of one parameter on its way back."""

    def __init__(
        self, reader: Reader, stored: _Stored, optimizer: torch.optim.Optimizer, m: Member, options: dict[str, Any]
    ) -> None:
        self.optimizer = optimizer
        self.member = m
        self.tensors: dict[str, Any] = {}
        self.others: Unpacked | None = None
        now: Mapping[str, Any] = optimizer.state.get(m.parameter) or {}
        inside: set[str] = set()
        if m.base in reader.keys:
            like = {k: v for k, v in now.items() if not isinstance(v, torch.Tensor)}
            self.others = Unpacked(reader, m.base, like=like, device=m.parameter.device)
            inside = {name[len(m.base) + 1 :] for name in references(self.others.skeleton)}
        keys = dict.fromkeys(stored.tensors.get((m.prefix, m.name), ()))
        made_of = [k for k in keys if reader.is_made_of(f"{m.base}.{k}")]
        for key in keys:
            if key in inside or any(key.startswith(f"{k}.") for k in made_of):
                continue
            name, there = f"{m.base}.{key}", now.get(key)
            if isinstance(there, torch.Tensor) and _fits(reader, name, there):
                reader.take(name, there)
                self.tensors[key] = there
            else:
                self.tensors[key] = _new_state(reader, name, key, m.parameter, options)

    def apply(self) -> None:
        """Puts it into the optimizer; without any, the parameter is without."""
        found = dict(self.tensors)
        if self.others is not None:
            found.update(self.others.value())
        if found:
            state = self.optimizer.state[self.member.parameter]
            state.clear()
            state.update(found)
        else:
            self.optimizer.state.pop(self.member.parameter, None)


def _fits(reader: Reader, name: str, there: Any) -> bool:
    """Whether what is stored can be read into the tensor that is there."""
    if name not in reader.stored:
        return True  # made of others: they are compared on their own
    stored = reader.stored[name]
    return not there.is_meta and (stored.number, stored.shape) == (
        dtypes.from_torch().get(there.dtype),
        shape_of(there),
    )


def _new_state(reader: Reader, name: str, key: str, parameter: Any, options: dict[str, Any]) -> Any:
    """A new state tensor: of the parameter's shape, at its place; else on its device, single numbers whole on every
    rank, and where torch's optimizers keep them.
    """
    stored = reader.stored.get(name)
    if stored is None or stored.shape or (not parameter.shape and key not in _NUMBERS):
        # State of a parameter that is made of other tensors is plain.
        return reader.new(name, parameter, parameter.device if kind_of(parameter) == "wrapper" else None)
    on_host = key in _ON_HOST and not options.get("capturable") and not options.get("fused")
    return reader.new(name, device="cpu" if on_host else parameter.device)


class _Group:
    """Options of one group of an optimizer on their way back."""

    def __init__(self, where: str, group: dict[str, Any]) -> None:
        self.where = where
        self.group = group
        self._rows: dict[str, tuple[Row, list[str]]] = {}
        self._read: dict[str, Unpacked] = {}
        self._options: dict[str, Any] = {}

    def add(self, name: str, row: Row) -> None:
        """A parameter of the group, and where its options are."""
        self._rows.setdefault(row.key, (row, []))[1].append(name)

    def describe(self, reader: Reader) -> None:
        """Compares what can be compared before the load, and reads the tensors among the options."""
        rows = list(self._rows.values())
        for row, names in rows[1:]:
            first, first_names = rows[0]
            for option in dict.fromkeys((*first.options, *row.options)):
                a, b = first.options.get(option), row.options.get(option)
                if _has_tensors(a) and _has_tensors(b):
                    continue  # once they are read
                if option not in first.options or option not in row.options or tagged.encode(a) != tagged.encode(b):
                    raise self._conflict(option, a, first_names, b, names)
        for key, (row, _) in self._rows.items():
            self._read[key] = Unpacked(reader, key, row.options, {k: v for k, v in self.group.items() if k != "params"})

    def _conflict(self, option: str, a: Any, a_names: list[str], b: Any, b_names: list[str]) -> ConflictError:
        return ConflictError(
            f"optimizer {self.where}: option {option!r} is {a!r} in the checkpoint for {some(a_names, 3)}, and {b!r} for "
            f"{some(b_names, 3)}; put parameters into one group that were trained with the same options"
        )

    def check(self) -> None:
        """Once all is read: options of all members as values, the same ones."""
        found: list[tuple[dict[str, Any], list[str]]] = [
            (self._read[key].value(), names) for key, (_, names) in self._rows.items()
        ]
        for options, names in found[1:]:
            for option, value in options.items():
                if not _same(found[0][0].get(option), value):
                    raise self._conflict(option, found[0][0].get(option), found[0][1], value, names)
        self._options = found[0][0] if found else {}

    def apply(self, of: Restoring) -> None:
        """Changes the group's dict in place, for schedulers hold it; tensors keep their memory."""
        for option, value in self._options.items():
            now = self.group.get(option)
            if option in _KERNELS and option in self.group and bool(now) != bool(value):
                of.notes.append(f"optimizer {self.where}: {option} is {value!r} again, as it was saved, not {now!r}")
            if isinstance(now, torch.Tensor) and isinstance(value, (torch.Tensor, int, float)):
                with torch.no_grad():
                    if not isinstance(value, torch.Tensor):
                        now.fill_(value)
                        continue
                    if now.shape == value.shape and now.dtype == value.dtype:
                        now.copy_(value)
                        continue
            self.group[option] = value
        new = [k for k in self.group if k not in self._options and k not in _NOT_OPTIONS] if self._options else []
        if new:
            of.notes.append(f"optimizer {self.where}: the checkpoint has no {', '.join(new)}; left as they are")


def _has_tensors(value: Any) -> bool:
    return next(references(value), None) is not None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bytes(a, b)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    try:
        return tagged.encode(a) == tagged.encode(b)
    except UnsupportedError:
        return bool(a == b)
