# SPDX-License-Identifier: Apache-2.0
"""Everything that a training run goes on from, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from lastgood import leftover
from lastgood.errors import ConflictError, InvalidError, UnsupportedError
from lastgood.modules import EMA, EMAPart, Modules, ModulesPart
from lastgood.names import is_a
from lastgood.objects import VARS, ObjectPart, PerRank, VarsPart, has_state, refuse
from lastgood.optim import OptimizersPart
from lastgood.parts import Part, Restoring, Saving

__all__ = ["EMA", "PerRank", "State"]

# Names on disk that are not a user's: plain values, random generators, and what describes tensors.
_RESERVED = frozenset((VARS, "random", "frozen", "made_of", "replicas", "tree"))

# What a checkpoint tells of its run, and nothing restores.
_OF_A_RUN = frozenset(("metrics", "samples"))


class State:
    """What a training run consists of: modules, optimizers, schedulers, and all else that a resumed run needs to go on
    as if it had never stopped.

    ``State(model=model, optim=opt, scheduler=sched, loader=loader)``, with names of your own for more of them::

        State(model=generator, disc=discriminator, optim=[opt_g, opt_d], ema=lastgood.EMA(averaged))

    The tensors of ``model`` have their bare names in a checkpoint, as transformers and PyTorch expect; those of other
    modules begin with their key. A list of modules is the stages of a pipeline that this rank has, whose names are
    merged. What is registered is looked at when it is saved or restored: it may be wrapped, cut, compiled or frozen
    after it was registered.

    Args:
        frozen: what happens to parameters of ``model`` that do not require gradients: ``"save"``: written as all are;
            ``"skip"``: only their digests are (the base of a LoRA run), which a resume compares.
        random: save the random generators of Python, NumPy, torch and its devices; or a
            :class:`lastgood.random.RandomPart`, for generators of your own too.
        registered: modules, optimizers, objects with ``state_dict`` and ``load_state_dict`` (schedulers, scalers), bare
            parameters and tensors, lists and dicts of these, :class:`EMA`, :class:`PerRank`, data loaders of
            ``lastgood.data``, and any object with a method ``lastgood_part(key)`` that gives a
            :class:`lastgood.parts.Part`. None is left out.

    Attributes:
        vars: plain values of the run (numbers, strings, lists, dicts, tensors), saved and restored; set their first
            values before the resume.
        modules: by key; ``"model.0"`` is the first of a list.
        optimizers: in the order in which they were registered.
        loader: what keeps the position in the data, or None.

    Raises:
        UnsupportedError, InvalidError: something cannot be in a state; the message names its key and how to fix it.
    """

    def __init__(
        self, *, frozen: Literal["save", "skip"] = "save", random: bool | Part = True, **registered: Any
    ) -> None:
        if frozen not in ("save", "skip"):
            raise InvalidError(f'frozen is {frozen!r}, not "save" or "skip"')
        self.vars: dict[str, Any] = {}
        self.loader: Any = None
        self._frozen = frozen
        self._random = random
        self._modules = Modules()
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._others: dict[str, Any] = {}  # objects, and what gives its own part
        self._parts: list[Part] | None = None
        self._leftover: leftover.Leftover | None = None  # between describe and restore
        for key, value in registered.items():
            self.add(key, value)

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """Modules by key."""
        return dict(self._modules.modules)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers."""
        return list(self._optimizers.values())

    def __repr__(self) -> str:
        said = [f"{key}: {type(value).__name__}" for key, value in self._modules.modules.items()]
        said += [f"{key}: {list(t.shape)}" for key, t in self._modules.bare.items()]
        said += [f"{key}: {type(value).__name__}" for key, value in (*self._optimizers.items(), *self._others.items())]
        if self.vars:
            said.append(f"vars: {', '.join(self.vars)}")
        return f"<State {'; '.join(said) or 'of nothing'}>"

    # -------------------------------------------------------------- registration

    def add(self, key: str, value: Any) -> None:
        """Registers one more thing under a key, as the constructor's arguments do.

        Raises:
            UnsupportedError: it cannot be in a state.
            ConflictError: the key is taken.
        """
        if not isinstance(key, str) or not key or key in _RESERVED or "." in key:
            raise InvalidError(
                f"{key!r} is no key for a state: it is a word without dots, and none of {sorted(_RESERVED)}"
            )
        if any(k.partition(".")[0] == key for k in self._keys()):
            raise ConflictError(f'"{key}" is in the state already')
        self._parts = None
        self._modules.replicas.forget()
        if isinstance(value, Mapping) and value:
            self._add_many(key, value, stages=False)
        elif isinstance(value, (list, tuple)) and value:
            self._add_many(key, {str(i): v for i, v in enumerate(value)}, stages=True)
        else:
            self._add(key, value)

    def _keys(self) -> list[str]:
        return [*self._modules.modules, *self._modules.bare, *self._optimizers, *self._others]

    def _add_many(self, key: str, values: Mapping[Any, Any], *, stages: bool) -> None:
        for name, value in values.items():
            whole = f"{key}.{name}"
            if not isinstance(name, str) or not name or "." in name:
                raise InvalidError(f'"{key}": {name!r} is no key for a state: it is a word without dots')
            if isinstance(value, (Mapping, list, tuple)) or not _can_register(value):
                raise refuse(key, dict(values) if not stages else list(values.values()))
            self._add(whole, value)
            if stages and whole in self._modules.modules:
                self._modules.stages[whole] = key
                self._modules.replicas.stages = True

    def _add(self, key: str, value: Any) -> None:
        if value is None:
            return
        if hasattr(value, "lastgood_part") or isinstance(value, Part):
            if callable(getattr(value, "batches", None)) or callable(getattr(value, "used", None)):
                self._set_loader(key, value)
            self._others[key] = value
        elif isinstance(value, torch.nn.Module):
            self._modules.modules[key] = value
        elif is_a(value, "ZeroRedundancyOptimizer"):
            raise UnsupportedError(
                f'"{key}": the state of a ZeroRedundancyOptimizer is on one rank each, out of reach; use FSDP2 (fully_shard)'
            )
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizers[key] = value
        elif isinstance(value, torch.Tensor):
            self._modules.bare[key] = value
        elif any(c.__name__ == "StatefulDataLoader" for c in type(value).__mro__):
            self._set_loader(key, value)
            self._others[key] = value
        elif is_a(value, "DataLoader"):
            raise UnsupportedError(
                f'"{key}": a plain torch DataLoader cannot say where it is; use lastgood.data.DataLoader(…), which takes '
                "the same arguments"
            )
        elif has_state(value):
            self._others[key] = value
        else:
            raise refuse(key, value)

    def _set_loader(self, key: str, value: Any) -> None:
        if self.loader is None or key == "loader":
            self.loader = value

    # --------------------------------------------------------------------- parts

    def parts(self) -> list[Part]:
        """What it consists of, in the order in which it is restored: random generators last."""
        if self._parts is None:
            found: list[Part] = []
            if self._modules.modules or self._modules.bare:
                found.append(ModulesPart(self._modules, self._frozen == "skip"))
            if self._optimizers:
                found.append(OptimizersPart(self._optimizers, self._modules))
            for key, value in self._others.items():
                part = self._part(key, value)
                if isinstance(part, EMAPart):
                    part.modules = self._modules
                found.append(part)
            found.append(VarsPart(self.vars))
            if isinstance(self._random, Part):
                found.append(self._random)
            elif self._random:
                from lastgood.random import RandomPart

                found.append(RandomPart())
            self._parts = found
        return self._parts

    @staticmethod
    def _part(key: str, value: Any) -> Part:
        if isinstance(value, Part):
            return value
        if hasattr(value, "lastgood_part"):
            part: Part = value.lastgood_part(key)
            return part
        if any(c.__name__ == "StatefulDataLoader" for c in type(value).__mro__):
            from lastgood.data import stateful_part

            stateful: Part = stateful_part(key, value)
            return stateful
        return ObjectPart(key, value)

    def save(self, to: Saving) -> None:
        """Adds all of it to a save."""
        for part in self.parts():
            part.save(to)

    def describe(self, of: Restoring) -> None:
        """Says what is to be read where, and finds what the checkpoint has beyond that.

        Raises:
            MissingError, MismatchError: the checkpoint is of another state. That one rank of several has no counterpart
                of something is found in :meth:`restore`, where all are asked.
        """
        parts = self.parts()
        for part in parts:
            part.describe(of)
        keys = {key.partition(".")[0] for key in self._others} | {part.key for part in parts}
        own = frozenset(keys - {ModulesPart.key, OptimizersPart.key})
        self._leftover = leftover.look(of, own, _RESERVED | _OF_A_RUN)
        if of.ranks.world == 1:
            leftover.settle(of, self._leftover)

    def restore(self, of: Restoring) -> None:
        """Takes over what was read. *Collective* where there are several ranks: what the checkpoint has and no rank's
        state is an error on all, as for :meth:`describe`.
        """
        found, self._leftover = self._leftover, None
        if found is not None and of.ranks.world > 1:
            leftover.settle(of, found)
        for part in self.parts():
            part.restore(of)


def _can_register(value: Any) -> bool:
    """Whether it is one of the things that lists and dicts in a state are of."""
    return (
        value is None
        or hasattr(value, "lastgood_part")
        or isinstance(value, (Part, torch.nn.Module, torch.optim.Optimizer, torch.Tensor))
        or is_a(value, "DataLoader")
        or has_state(value)
    )
