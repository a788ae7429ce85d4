# SPDX-License-Identifier: Apache-2.0
"""Several ranks that save a state together and load it on as many ranks, or on another number of them.

The ranks are processes of torch.distributed over gloo, each with the rows that FSDP2 gives it of every tensor. In each
round every tool does the operation once, in an order drawn anew; all ranks begin together, and the slowest of them
counts. Three groups of processes, one after the other: two ranks save what is loaded by four; four ranks save, and load
what four and what two have saved; two ranks load what four have saved.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from adapters import Disk, need
from measure import Meter, files_of, forget, remove, touch
from state import Forms, big_forms

SAVING, LOADING = 4, (4, 2)  # how many ranks
Sample = dict[str, float]
Sections = dict[str, dict[str, dict[str, list[Any]]]]


class Part(NamedTuple):
    """A rank's rows of a tensor."""

    local: torch.Tensor
    shape: tuple[int, ...]  # of the whole tensor


Parts = dict[str, Part]


def make_parts(forms: Forms, rank: int, world: int, noise: torch.Tensor | None) -> Parts:
    """Memory of a rank's rows: with contents that depend on the tensor and on the place in it only, or zeros."""
    found: Parts = {}
    for number, (name, (shape, dtype)) in enumerate(forms.items()):
        rows = shape[0] // world
        local = torch.zeros((rows, *shape[1:]), dtype=dtype)
        if noise is not None:
            fill(local.view(-1), rank * local.numel(), number, noise)
        found[name] = Part(local, shape)
    return found


def fill(flat: torch.Tensor, start: int, number: int, noise: torch.Tensor) -> None:
    """Elements ``start`` and on of tensor ``number``."""
    at = 0
    while at < flat.numel():
        begin = (start + at + 7919 * number) % noise.numel()
        n = min(noise.numel() - begin, flat.numel() - at)
        flat[at : at + n] = noise[begin : begin + n]
        at += n


def check_parts(parts: Parts, names: list[str], rank: int, forms: Forms, noise: torch.Tensor) -> None:
    """Raises if some tensors are not what was saved."""
    order = list(forms)
    for name in names:
        local = parts[name].local
        wanted = torch.empty_like(local)
        fill(wanted.view(-1), rank * local.numel(), order.index(name), noise)
        if not torch.equal(local.view(torch.uint8), wanted.view(torch.uint8)):
            raise ValueError(f"{name} was loaded wrong on rank {rank}")


# ---------------------------------------------------------------------- tools


class RankTool:
    """A tool on one rank; its calls are made by all ranks together. ``path`` is a folder that only this tool uses."""

    name: ClassVar[str]
    durable: ClassVar[bool] = True  # it syncs what it writes

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def before(self, path: Path) -> None:
        """Before a save; not timed."""

    def save(self, parts: Parts, path: Path) -> None:
        """Until the tool says that it is done."""
        raise NotImplementedError

    def after(self) -> None:
        """After a save; not timed."""

    def load(self, path: Path, parts: Parts) -> None:
        """Into existing tensors."""
        raise NotImplementedError


class RankLastgood(RankTool):
    name = "lastgood"

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.lastgood = need("lastgood")
        self.comm = need("lastgood.pytorch").GlooCommunicator()
        self.layout = self.lastgood.Layout([world], [self.lastgood.Split(0)])
        self.session: Any = None

    def before(self, path: Path) -> None:
        self.session = self.lastgood.Session(path, self.comm)

    def save(self, parts: Parts, path: Path) -> None:
        with self.session.save(1) as save:
            for name, p in parts.items():
                group = "optim" if name.startswith("optim.") else "model"
                save.tensor(name, p.local, shape=p.shape, layout=self.layout, group=group)

    def after(self) -> None:
        self.session.close()

    def load(self, path: Path, parts: Parts) -> None:
        def describe(load: Any) -> None:
            for name, p in parts.items():
                load.tensor(name, p.local, shape=p.shape, layout=self.layout)

        with self.lastgood.Session(path, self.comm, read_only=True) as session:
            session.resume(describe)


class RankDcp(RankTool):
    name = "DCP"
    durable = False

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        self.dcp = need("torch.distributed.checkpoint")
        self.tensor = need("torch.distributed.tensor")
        self.mesh = need("torch.distributed.device_mesh").init_device_mesh("cpu", (world,))

    def _state(self, parts: Parts) -> dict[str, Any]:
        rows = [self.tensor.Shard(0)]
        return {n: self.tensor.DTensor.from_local(p.local, self.mesh, rows, run_check=False) for n, p in parts.items()}

    def save(self, parts: Parts, path: Path) -> None:
        self.dcp.save(self._state(parts), checkpoint_id=path)

    def load(self, path: Path, parts: Parts) -> None:
        self.dcp.load(self._state(parts), checkpoint_id=path)


class RankDisk(RankTool):
    """No tool, but what the disk does: each rank moves as many bytes as it has, in a file of its own."""

    name = Disk.name

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.disk = Disk()
        self.disk.prepare({})

    def _file(self, path: Path) -> Path:
        return path / f"{self.rank}-of-{self.world}"

    def before(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def save(self, parts: Parts, path: Path) -> None:
        self.disk.save({n: p.local for n, p in parts.items()}, self._file(path))

    def load(self, path: Path, parts: Parts) -> None:
        self.disk.load(self._file(path), {})


TOOLS: list[type[RankTool]] = [RankLastgood, RankDcp, RankDisk]


# ------------------------------------------------------------------- one rank


class Rank:
    """What one process does, in step with the others."""

    def __init__(self, rank: int, world: int, folder: Path, rounds: int, quick: bool) -> None:
        self.rank = rank
        self.world = world
        self.folder = folder
        self.rounds = rounds
        self.forms = big_forms(quick)
        self.noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
        self.tools = [kind(rank, world) for kind in TOOLS]
        self.draw = random.Random(11)  # the same on every rank

    def alone(self, work: Callable[[], Any]) -> None:
        """Done by the first rank while the others wait."""
        if self.rank == 0:
            work()
        dist.barrier()

    def timed(self, work: Callable[[], Any]) -> Sample:
        """All ranks together: the slowest one's seconds, everybody's processor time, the most memory of one."""
        meter = Meter()
        meter.start()
        dist.barrier()
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        mine = {**meter.stop(), "seconds": seconds}
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, mine)
        return {
            "seconds": max(e["seconds"] for e in every),
            "cpu": sum(e["cpu"] for e in every),
            "memory": max(e["memory"] for e in every),
            "disk": sum(e["disk"] for e in every),
        }

    def sync(self, path: Path) -> None:
        """What a tool that does not sync leaves to its caller: each rank syncs its share of the files."""
        dist.barrier()
        for file in sorted(files_of(path))[self.rank :: self.world]:
            sync_one(file)
        dist.barrier()
        if self.rank == 0:
            sync_one(path)
            sync_one(path.parent)

    def save(self, tool: RankTool, parts: Parts, name: str, keep: bool) -> Sample:
        """Saves until it is durable; removes it unless it is to stay."""
        path = self.folder / name
        self.alone(lambda: None)
        tool.before(path)

        def work() -> None:
            tool.save(parts, path)
            if not tool.durable:
                self.sync(path)

        found = self.timed(work)
        tool.after()
        if not keep:
            self.alone(lambda: remove(path))
        return found

    def load(self, tool: RankTool, parts: Parts, source: int, cold: bool) -> Sample:
        """Loads what ``source`` ranks have saved, and compares some of it."""
        raw = isinstance(tool, RankDisk)
        path = self.folder / kept(tool.name, self.world if raw else source)
        names = self.draw.sample(sorted(parts), min(8, len(parts)))
        for n in names:
            parts[n].local.view(torch.uint8).fill_(0xAA)
        self.alone(lambda: drop(path) if cold else touch(path))
        found = self.timed(lambda: tool.load(path, parts))
        if not raw:
            check_parts(parts, names, self.rank, self.forms, self.noise)
        return found

    def in_turns(self, tools: list[RankTool], operation: Callable[[RankTool, int], Sample]) -> dict[str, list[Any]]:
        """Samples of each tool, one a round; before the first round each tool warms up."""
        rows: dict[str, list[Any]] = {t.name: [] for t in tools}
        for number in range(-1, self.rounds):
            order = list(tools)
            self.draw.shuffle(order)
            for tool in order:
                sample = operation(tool, number)
                if number >= 0:
                    rows[tool.name].append(sample)
        return rows

    def keep(self) -> None:
        """Saves what a later group loads."""
        parts = make_parts(self.forms, self.rank, self.world, self.noise)
        for tool in self.tools:
            self.save(tool, parts, kept(tool.name, self.world), keep=True)

    def run(self, sources: tuple[int, ...], saves: bool) -> Sections:
        """All that is measured on this number of ranks."""
        found: Sections = {}
        if saves:
            parts = make_parts(self.forms, self.rank, self.world, self.noise)
            rows = self.in_turns(self.tools, lambda t, n: self.save(t, parts, f"{t.name}-now", keep=False))
            found[f"ranks {self.world} save"] = {"save": rows}
            del parts
            self.keep()
        target = make_parts(self.forms, self.rank, self.world, None)
        for source in sources:
            cold = self.in_turns(self.tools, lambda t, n, s=source: self.load(t, target, s, True))
            both = [t for t in self.tools if not isinstance(t, RankDisk)]
            warm = self.in_turns(both, lambda t, n, s=source: self.load(t, target, s, False))
            found[f"ranks {source} to {self.world}"] = {"cold": cold, "warm": warm}
        return found


def kept(tool: str, world: int) -> str:
    """The folder of what is loaded."""
    return f"{tool.strip('()').replace(', ', '-')}-of-{world}"


def drop(path: Path) -> None:
    """As :func:`forget`; pages that another rank's processor still holds go at a later try."""
    for tries in range(5):
        try:
            forget(path)
            return
        except OSError:
            if tries == 4:
                raise
            os.sync()


def sync_one(path: Path) -> None:
    """A file or a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ------------------------------------------------------------------ processes


def serve(
    rank: int, world: int, folder: Path, rounds: int, quick: bool, sources: tuple[int, ...], saves: bool, queue: Any
) -> None:
    """A rank's process."""
    try:
        torch.set_num_threads(1)
        gc.freeze()  # what was imported need not be looked through before each operation
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{world}", rank=rank, world_size=world)
        me = Rank(rank, world, folder, rounds, quick)
        found = me.run(sources, saves) if sources else me.keep()
        queue.put((rank, None, found))
    except BaseException:
        queue.put((rank, traceback.format_exc()[-2000:], None))
    queue.close()
    queue.join_thread()
    os._exit(0)  # not through what the parent has set up


def group(
    world: int, folder: Path, rounds: int, quick: bool, sources: tuple[int, ...] = (), saves: bool = False
) -> Any:
    """Runs a group of ranks; what the first one found. A rank that fails ends all."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    (folder / f"store-{world}").unlink(missing_ok=True)
    ranks = [
        context.Process(target=serve, args=(r, world, folder, rounds, quick, sources, saves, queue))
        for r in range(world)
    ]
    for p in ranks:
        p.start()
    try:
        found = None
        for _ in ranks:
            rank, error, result = queue.get(timeout=3600)
            if error is not None:
                raise RuntimeError(f"rank {rank} of {world}: {error}")
            found = result if rank == 0 else found
        for p in ranks:
            p.join(60)
        return found
    finally:
        for p in ranks:
            if p.is_alive():
                p.kill()
            p.join()


def measure(folder: Path, rounds: int, quick: bool) -> tuple[Sections, int]:
    """Every section, and the bytes of the state."""
    first, second = LOADING
    group(second, folder, rounds, quick)
    found: Sections = group(SAVING, folder, rounds, quick, (first, second), saves=True)
    found |= group(second, folder, rounds, quick, (SAVING,))
    for path in folder.iterdir():
        remove(path)
    forms = big_forms(quick)
    return found, sum(torch.Size(s).numel() * d.itemsize for s, d in forms.values())
