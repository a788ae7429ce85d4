# SPDX-License-Identifier: Apache-2.0
"""Which tensors a save may still be copying while training goes on, and the fence before they change.

Lazy are only tensors of which it was *seen* that nothing but an optimizer's update writes them: parameters of the
optimizers of the state, and the tensors of their own state, where each of these optimizers has fired its pre-step hook
in the step that has just ended. Its next update will then fire it again, and the hook waits for the copy. All else is
copied before a save returns: buffers, averages, random generators, frozen parameters, and whatever belongs to an
optimizer that takes another way (compiled, captured in a graph, stepped by a library of its own).
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lastgood.errors import ConflictError

Tell = Callable[[list[torch.Tensor]], None]

# All of this process.
_live: weakref.WeakSet[Fences] = weakref.WeakSet()


class Fences:
    """Waits for a save's lazy copies in front of the first update by any optimizer of the process, and before state is
    loaded into modules and optimizers.

    Args:
        wait: returns when all lazy tensors are copied.
        torn: called instead with the lazy tensors that were written too early; raises, once none is read any more.
    """

    def __init__(self, wait: Callable[[], None], torn: Tell) -> None:
        self._wait = wait
        self._torn = torn
        self._pid = os.getpid()
        self._fired: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # in the step under way
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # in the one before
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._restored: list[tuple[torch.Tensor, int]] = []
        self._overwritten: Tell | None = None
        self.pending = False
        _live.add(self)
        # The hook is the process's, and must keep nothing alive.
        weak = weakref.ref(self)

        def before_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            # What is being compiled will run without its hooks: it counts as not seen.
            if torch.compiler.is_compiling():
                return
            fences = weak()
            if fences is not None:
                fences._before_update(optimizer)

        self._before_loading = _BeforeLoading(weak)
        self._handles: list[Any] = [register_optimizer_step_pre_hook(before_update)]
        self._finalizer = weakref.finalize(self, _remove, self._handles)
        self._finalizer.atexit = False

    def watch(self, modules: Mapping[str, Any], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Fences in front of ``load_state_dict`` of these too. Those that are known already are passed over."""
        found: list[Any] = []
        for module in modules.values():
            found += [m for m in wrapped(module) if m not in self._watched]
        found += [o for o in optimizers if o not in self._watched]
        for each in found:
            self._handles.append(each.register_load_state_dict_pre_hook(self._before_loading))
            self._watched.add(each)

    def step_done(self) -> None:
        """A step of the training loop has ended: what fired its hook in it counts as seen.

        Raises:
            ConflictError: a lazy tensor was written, and nothing waited.
        """
        if self.pending and _changed(self._versions):
            self.fence()
        self._seen, self._fired = self._fired, weakref.WeakSet()

    def chooser(self, optimizers: Iterable[torch.optim.Optimizer]) -> Chooser:
        """For one save: which tensors may be lazy."""
        sure: list[torch.Tensor] = []
        unsure: list[torch.Tensor] = []
        for optimizer in optimizers:
            (sure if optimizer in self._seen else unsure).extend(_tensors(optimizer))
        return Chooser(sure, unsure)

    def launched(self, tensors: list[torch.Tensor]) -> None:
        """A save that may still be reading these is about to be launched."""
        self._versions = _versions(tensors)
        self.pending = True

    def restored(self, tensors: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor], overwritten: Tell) -> None:
        """A resume has read these.

        Args:
            buffers: of these a forward pass may change some.
            overwritten: called at the next update, before it, if others were written in the meantime.
        """
        places = {p for b in buffers for p in _place(b)}
        self._restored = _versions(t for t in tensors if not any(p in places for p in _place(t)))
        self._overwritten = overwritten

    def forget(self) -> None:
        """The launch reads none of them: it was left out."""
        self._versions = []

    def fence(self) -> None:
        """Waits until nothing of the last save is read any more.

        Raises:
            ConflictError: a lazy tensor was written before the fence.
            TimeoutError: the tensors are still being read.
        """
        changed = _changed(self._versions)
        if changed:
            self._end()
            self._torn(changed)
        try:
            self._wait()
        except ConflictError:
            self._end()
            raise
        self._end()

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        """In the block tensors may be written that are at its end as they were."""
        self.before_change()
        same = {id(t) for t, version in self._restored if t._version == version}
        try:
            yield
        finally:
            self._restored = [(t, t._version if id(t) in same else version) for t, version in self._restored]

    def close(self) -> None:
        """Removes the hooks."""
        _live.discard(self)
        self._finalizer()
        self._end()

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        if os.getpid() == self._pid:
            if not _capturing():
                self._fired.add(optimizer)
            if self._overwritten is not None:
                changed, tell = _changed(self._restored), self._overwritten
                self._restored, self._overwritten = [], None
                if changed:
                    tell(changed)
            self.before_change()

    def before_change(self) -> None:
        """The fence, if there is anything to wait for in this process."""
        if self.pending and os.getpid() == self._pid:
            self.fence()

    def _end(self) -> None:
        self.pending = False
        self._versions = []


def before_change() -> None:
    """:meth:`Fences.before_change` of all runs of this process."""
    for fences in list(_live):
        fences.before_change()


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """:meth:`Fences.lend` of all runs of this process."""
    with contextlib.ExitStack() as stack:
        for fences in list(_live):
            stack.enter_context(fences.lend())
        yield


class _BeforeLoading:
    """A hook that modules hold. Copied or pickled with its module it does nothing."""

    def __init__(self, fences: Callable[[], Fences | None] = lambda: None) -> None:
        self._fences = fences

    def __call__(self, *_: Any) -> None:
        fences = self._fences()
        if fences is not None:
            fences.before_change()

    def __reduce__(self) -> tuple[type[_BeforeLoading], tuple[()]]:
        return _BeforeLoading, ()


class Chooser:
    """Says of a tensor whether it may be lazy, and remembers those of which it said yes.

    Args:
        sure: tensors that may be, unless they are in the other list too.
        unsure: tensors that may not.
    """

    def __init__(self, sure: list[torch.Tensor], unsure: list[torch.Tensor]) -> None:
        self._sure = sure
        self._unsure = unsure
        self._ids = {id(t) for t in sure} - {id(t) for t in unsure}
        self._not = {id(t) for t in unsure}
        self._places: set[tuple[int, int]] | None = None
        self.chosen: list[torch.Tensor] = []

    def __call__(self, tensor: Any) -> bool:
        """Whether it may be lazy."""
        if id(tensor) in self._not or not isinstance(tensor, torch.Tensor):
            return False
        if id(tensor) in self._ids or self._by_place(tensor):
            self.chosen.append(tensor)
            return True
        return False

    def _by_place(self, tensor: torch.Tensor) -> bool:
        """Of a view of the whole: a detached tensor, a shard."""
        if self._places is None:
            self._places = {p for t in self._sure for p in _place(t)} - {p for t in self._unsure for p in _place(t)}
        return any(place in self._places for place in _place(tensor))


def _capturing() -> bool:
    """Whether what runs now is captured in a graph, which will be replayed without hooks."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def wrapped(module: Any) -> Iterator[torch.nn.Module]:
    """A module and what its wrappers hold: any of them may be the one that is loaded into."""
    while isinstance(module, torch.nn.Module):
        yield module
        module = getattr(module, "_orig_mod", None) or getattr(module, "module", None)


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """What an optimizer's update writes: parameters that it trains, and the tensors of their state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield parameter
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    yield value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that is here; any other as it is."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local if isinstance(local, torch.Tensor) else tensor


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Tensors, and how often each was written."""
    return [(t, t._version) for t in map(_local, tensors) if not t.is_inference()]


def _changed(versions: list[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    return [t for t, version in versions if t._version != version]


def place_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Address and length, bytes, of the part that is here; None where there is none, or no memory."""
    place = next(_place(tensor), None)
    return place if place is not None and place[1] else None


def _place(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Address and length, bytes. None of a tensor without memory."""
    local = _local(tensor)
    with contextlib.suppress(RuntimeError, NotImplementedError):
        if local.data_ptr() != 0:
            yield local.data_ptr(), local.nbytes


def name_of(tensor: torch.Tensor, modules: Mapping[str, Any], optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """What a tensor is called, for messages."""
    names: dict[Any, str] = dict(parameter_names(modules))
    for parameter, name in names.items():
        if _same(parameter, tensor):
            return name
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, torch.Tensor) and _same(value, tensor):
                    return f"optim.state.{names.get(parameter, 'a parameter')}.{key}"
    return f"a tensor of shape {list(tensor.shape)}"


def _same(whole: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor is another one, or a view of all of it that this rank has."""
    return whole is tensor or _local(whole) is tensor or any(p in _place(whole) for p in _place(tensor))


def parameter_names(modules: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Each parameter with its name as on disk, but for what wrappers put in front."""
    for key, module in modules.items():
        if isinstance(module, torch.nn.Module):
            for name, parameter in module.named_parameters():
                yield parameter, name if key == "model" else f"{key}.{name}"


def with_gradients(modules: Mapping[str, Any], optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """Names of parameters that have a gradient."""
    names = dict(parameter_names(modules))
    found = [name for parameter, name in names.items() if parameter.grad is not None]
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            found += [
                f"a parameter of shape {list(p.shape)} of optimizer {number}"
                for p in group["params"]
                if p.grad is not None and p not in names
            ]
    return found
