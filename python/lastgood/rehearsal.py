# SPDX-License-Identifier: Apache-2.0
"""Does a resume of this program go on exactly? Tried out in it: save, take some steps, load, take them again, compare."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lastgood import arrays, tagged
from lastgood._core import lib
from lastgood.checkpoint import Checkpoint, Generation, StoredTensor
from lastgood.checkpointer import Checkpointer
from lastgood.durations import seconds_of
from lastgood.errors import InvalidError
from lastgood.frozen import digest
from lastgood.load import Load
from lastgood.ranks import communicator
from lastgood.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from lastgood.comm import Communicator
    from lastgood.run import Run
    from lastgood.state import State

# One optimizer step.
Train = Callable[[list[Any]], Any]

# How many names a report shows.
_SHOWN = 8


class ResumeCheck(NamedTuple):
    """What :func:`check_resume` has found; the same on all ranks. ``str(check)`` is a report."""

    steps: int  # that were taken twice
    after_loading: tuple[str, ...]  # names of the state that differ as soon as it is loaded again
    first_step: int | None  # the first, from 1 on, of which `train` returned something else the second time
    at_end: tuple[str, ...]  # names of the state that differ after the last step

    @property
    def equal(self) -> bool:
        """Whether nothing differs, bit for bit."""
        return not self.after_loading and self.first_step is None and not self.at_end

    def __str__(self) -> str:
        if self.equal:
            return f"resume check: {self.steps} steps and the same ones after a load have the same bits"
        lines = [f"resume check: {self.steps} steps and the same ones after a load differ"]
        if self.after_loading:
            lines.append(f"right after the load, before any step: {_some(self.after_loading)}")
        if self.first_step is not None:
            lines.append(f"what step {self.first_step} returned")
        if self.at_end:
            lines.append(f"after the last step: {_some(self.at_end)}")
        if not self.after_loading:
            lines.append("something that the steps depend on is not in the state, or they are not deterministic")
        return "\n  ".join(lines)


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def check_resume(
    state: State,
    train: Train,
    *,
    steps: int = 3,
    accumulate: int = 1,
    folder: str | os.PathLike[str] | None = None,
    comm: Communicator | None = None,
    mesh: Any = None,
    timeout: float | str = 600.0,
) -> ResumeCheck:
    """Tries out whether a run that resumes goes on exactly, before it has to: saves the state, takes ``steps`` steps,
    loads, takes them again, and compares bit for bit what ``train`` returned and what the state has become. Then the
    state is what it was before. *Collective.* ::

        def train(batches):
            loss = sum(loss_of(model(x)) for x in batches)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            return loss

        print(lastgood.check_resume(state, train))

    Call it where ``ckpt.resume`` stands otherwise, or after that and before ``run.steps``. It finds what a step depends
    on and no checkpoint keeps: a generator, a counter, a scheduler that is not in the state; and state that changes
    when it is loaded. What only a new process would lose (a value that is made while a module is imported) it does not
    find; docs/when-a-resume-differs.md has a test that does.

    Args:
        state: of the run. Gradients are an error.
        train: one optimizer step on micro-batches of the state's loader (an empty list where there is none), with all
            that the loop body does but ``ckpt.step``. What it returns is compared: a loss, or numbers and tensors in
            lists and dicts; None: nothing.
        steps: how many.
        accumulate: micro-batches of a step.
        folder: for its checkpoints, four times the state, on a disk that all ranks see; they are removed at the end.
            None: that for temporary files, of one machine.
        comm, mesh, timeout: as for :class:`lastgood.Checkpointer`.

    Raises:
        Error: a save or a load failed; the state is then undefined.
    """
    if steps < 1:
        raise InvalidError(f"steps is {steps}, not 1 or more")
    with _Rehearsal(folder, comm, mesh, seconds_of("timeout", timeout)) as rehearsal:
        return rehearsal.run(state, train, steps, accumulate)


class _Rehearsal:
    """A checkpointer over a root of its own, which is removed at the end."""

    def __init__(self, folder: Any, comm: Communicator | None, mesh: Any, timeout: float) -> None:
        with contextlib.ExitStack() as ends:
            comm = communicator(comm, timeout, ends)
            root = ""
            if comm is None or comm.rank == 0:
                root = ends.enter_context(tempfile.TemporaryDirectory(prefix="lastgood-check-", dir=folder))
            if comm is not None:
                root = comm.broadcast(root.encode(), 0, timeout).decode()
            self.ckpt = ends.enter_context(
                Checkpointer(
                    os.path.join(root, "run"),
                    comm=comm,
                    mesh=mesh,
                    background="off",
                    signals=(),
                    progress=False,
                    timeout=timeout,
                )
            )
            self._comm, self._timeout = comm, timeout
            self._ends = ends.pop_all()

    def __enter__(self) -> _Rehearsal:
        return self

    def __exit__(self, *why: Any) -> None:
        with self._ends:
            if why[0] is None and self._comm is not None:  # nobody reads any more
                self._comm.barrier(self._timeout)

    def run(self, state: State, train: Train, steps: int, accumulate: int) -> ResumeCheck:
        """See :func:`check_resume`."""
        ckpt = self.ckpt
        run = ckpt.resume(state)  # of nothing: as if this were not here
        begin = self._saved(state, 0)
        first = self._steps(run, state, train, steps, accumulate)
        end = self._saved(state, steps)
        run = ckpt.resume(state, generation=begin)
        again = self._saved(state, 0)
        second = self._steps(run, state, train, steps, accumulate)
        last = self._saved(state, steps)
        ckpt.resume(state, generation=begin)

        def compare() -> dict[str, Any]:
            return {
                "step": next((i + 1 for i in range(steps) if first[i] != second[i]), None),
                "loaded": list(self._differences(begin, again)),
                "end": list(self._differences(end, last)),
            }

        told = ckpt.together("comparing", compare)
        return ResumeCheck(
            steps,
            tuple(sorted({name for t in told for name in t["loaded"]})),
            min((t["step"] for t in told if t["step"] is not None), default=None),
            tuple(sorted({name for t in told for name in t["end"]})),
        )

    def _saved(self, state: State, step: int) -> Generation:
        with self.ckpt.session.save(step) as save:
            self.ckpt.describe(save, state)
        assert save.info is not None
        return save.info.generation

    def _steps(self, run: Run, state: State, train: Train, steps: int, accumulate: int) -> list[str]:
        """What each step returned, as a digest."""
        found = []
        for batches in run.steps(steps, accumulate):
            found.append(_digest(train(batches)))
            self.ckpt.count(state)
        return found

    def _differences(self, one: Generation, other: Generation) -> Iterator[str]:
        """Names of what differs; of each, one rank is asked."""
        ranks = self.ckpt.ranks
        with Checkpoint(f"{self.ckpt.root}@g{one}") as a, Checkpoint(f"{self.ckpt.root}@g{other}") as b:
            for i, name in enumerate(sorted({*a, *b})):
                if i % ranks.world == ranks.rank and _tensor(a, name) != _tensor(b, name):
                    yield name
            if ranks.rank == 0:
                yield from _different_values(a.state, b.state)
                yield from _different_raw(self.ckpt.root, a, b)


def _tensor(checkpoint: Checkpoint, name: str) -> Any:
    """Form and bytes of a tensor, of each rank's copy if they differ; None: it is not there."""
    if name not in checkpoint:
        return None
    stored = checkpoint[name]
    copies: list[int | None] = [*range(checkpoint.world)] if stored.per_rank else [None]
    return stored.number, stored.shape, [_bytes(checkpoint, stored, rank) for rank in copies]


def _bytes(checkpoint: Checkpoint, stored: StoredTensor, rank: int | None) -> bytes:
    raw, memory = arrays.allocate_raw(stored.number, stored.shape)
    load = Load(checkpoint)
    flags, whose = (0, 0) if rank is None else (int(lib.LG_TENSOR_COPY_OF_RANK), rank)
    load.add(stored.name, memory, flags=flags, rank=whose)
    load.run()
    return hashlib.sha256(raw.data).digest()


def _different_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*a, *b}):
        if key not in a or key not in b or tagged.encode(a[key]) != tagged.encode(b[key]):
            yield key


def _different_raw(root: str, a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """State of single ranks."""
    files = [{(f.rank, f.name): f for f in c.files() if f.group == "raw"} for c in (a, b)]
    for rank, name in sorted({*files[0], *files[1]}, key=str):
        contents: list[dict[str, bytes]] = []
        for checkpoint, there in zip((a, b), files, strict=True):
            if (rank, name) not in there:
                contents.append({})
                continue
            with SafetensorsFile(os.path.join(root, checkpoint.folder, name)) as file:
                contents.append({key: _raw(file[key]) for key in file})
        for key in sorted({*contents[0], *contents[1]}):
            if contents[0].get(key) != contents[1].get(key):
                yield f"{key} of rank {rank}"


def _raw(stored: Any) -> bytes:
    raw, memory = arrays.allocate_raw(stored.number, stored.shape)
    stored.read_packed(memory)
    return hashlib.sha256(raw.data).digest()


def _digest(value: Any) -> str:
    """Of numbers and tensors in any nesting, by their bits."""
    sha = hashlib.sha256()
    _add(sha, value)
    return sha.hexdigest()


def _add(sha: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        sha.update(digest([whole.detach()]).encode())
    elif isinstance(value, float):
        sha.update(value.hex().encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            sha.update(f"{key!r}:".encode())
            _add(sha, item)
    elif isinstance(value, (list, tuple)):
        sha.update(f"[{len(value)}".encode())
        for item in value:
            _add(sha, item)
    else:
        sha.update(repr(value).encode())
