#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""lastgood beside the tools that people use today, on the same state, in turns.

    make bench-peers                      all of it: about an hour, 45 GB of disk
    bench/peers.py --folder DIR           the same, by a Python that has the tools
    bench/peers.py --quick                two minutes, small states, to see that it runs
    bench/peers.py --only save,load --tools "lastgood;DCP"
    bench/peers.py --only ranks           four ranks, and two; peers/ranks.py
    bench/peers.py --page results.json    only docs/benchmarks-peers.md, of figures that are there

Each tool has a process of its own, forked from one that holds the state and has
touched it, and warmed up by the same operation. In each round every tool does
the operation once, one after the other, in an order drawn anew. A ratio is that
of the two times of one round. What is measured, and how, is on the page that it
writes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

# Idle threads of torch's pool sleep: where others compute too, they would only take time from each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import ranks  # noqa: E402
import torch  # noqa: E402
from adapters import PEERS, Peer, Skip, Waiter  # noqa: E402
from measure import Meter, forget, remove, sync_tree, timed, touch  # noqa: E402
from report import write_page  # noqa: E402
from state import ONE, ROWS, State, big, big_forms, check, destination, nbytes, small  # noqa: E402

Result = dict[str, Any]


class Worker:
    """What a tool's process does when it is told to."""

    def __init__(self, peer: Peer, state: State, target: State, folder: Path) -> None:
        self.peer = peer
        self.state = state
        self.target = target
        self.folder = folder

    def prepare(self) -> Result:
        """Imports the tool."""
        self.peer.prepare(self.state)
        return {"version": self.peer.version()}

    def save(self, name: str, keep: bool = False) -> Result:
        """Saves until it is durable; removes it unless it is to stay."""
        path = self.folder / name
        self.peer.before(path)
        meter = Meter()
        meter.start()
        self.peer.save(self.state, path)
        returned = meter.lap()
        if not self.peer.durable:
            sync_tree(path)
        found: Result = {**meter.stop(), "returned": returned}
        self.peer.after(path)
        if not keep:
            remove(path)
        return found

    def load(self, name: str, cold: bool) -> Result:
        """Loads into existing tensors, and compares some of them."""
        path = self.folder / name
        # Spoiled, so that what a load leaves out shows.
        names = random.Random(name).sample(sorted(self.target), min(8, len(self.target)))
        for n in names:
            self.target[n].view(torch.uint8).fill_(0xAA)
        gc.collect()
        forget(path) if cold else touch(path)
        _, found = timed(lambda: self.peer.load(path, self.target))
        if self.peer.package not in ("-", "orbax-checkpoint"):
            check(self.state, self.target, names)
        return dict(found)

    def one(self, name: str, rows: bool) -> Result:
        """Reads one tensor of a checkpoint, or rows of it, from disk."""
        path = self.folder / name
        wanted = self.state[ONE][ROWS] if rows else self.state[ONE]
        target = torch.full_like(wanted, -1)
        gc.collect()
        forget(path)
        if rows:
            _, found = timed(lambda: self.peer.load_rows(path, ONE, ROWS, target))
        else:
            _, found = timed(lambda: self.peer.load_one(path, ONE, target))
        if not torch.equal(target, wanted):
            raise ValueError(f"{ONE} was loaded wrong")
        return {**found, "wanted": wanted.numel() * wanted.element_size()}

    def train(self, name: str, threads: int, seconds: float) -> Result:
        """Computes steps of a fixed number of matrix products on so many threads, with a save in between."""
        torch.set_num_threads(threads)
        path = self.folder / name
        a, b, c = (torch.randn(640, 640) for _ in range(3))

        def step(times: list[float]) -> None:
            began = time.perf_counter()
            for _ in range(4):
                torch.mm(a, b, out=c)
            times.append(time.perf_counter() - began)

        def base() -> list[float]:
            times: list[float] = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                step(times)
            return times

        base()  # warm
        self.peer.before(path)
        before = base()
        steps: list[float] = []
        meter = Meter()
        meter.start()
        pending = self.peer.launch(self.state, path)
        stall = meter.lap()
        waiter = Waiter(pending, self.peer, path)
        step(steps)  # forward and backward
        began = time.perf_counter()
        pending.fence()  # the optimizer's update
        stall += time.perf_counter() - began
        while waiter.is_alive():
            step(steps)
        waiter.join()
        if waiter.error is not None:
            raise waiter.error
        took = meter.lap()
        found: Result = dict(meter.stop())
        after = base()
        self.peer.after(path)
        remove(path)
        usual = statistics.median(before + after)
        found |= {"stall": stall, "seconds": took, "lost": took - len(steps) * usual, "step": usual}
        found["slower"] = statistics.median(steps) / usual
        return found

    def close(self) -> Result:
        """Ends the tool."""
        self.peer.close()
        return {}


def serve(kind: type[Peer], state: State, target: State, folder: Path, connection: Connection, quiet: bool) -> None:
    """A tool's process."""
    if quiet:  # what tools have to say
        for fd in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    torch.set_num_threads(os.cpu_count() or 1)
    worker = Worker(kind(), state, target, folder)
    while True:
        try:
            call, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            result = getattr(worker, call)(**arguments)
            # What was freed goes back, so that each operation finds the same.
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            connection.send(("ok", result))
        except Skip as why:
            connection.send(("skip", str(why)))
        except BaseException as why:
            if isinstance(why, (KeyboardInterrupt, SystemExit)):
                raise
            last = traceback.format_exception_only(why)[-1].strip()
            connection.send(("failed", last[:300]))
        if call == "close":
            connection.close()
            os._exit(0)  # not through what the parent has set up


class Tool:
    """A tool's process, seen from the parent."""

    def __init__(self, kind: type[Peer], state: State, target: State, folder: Path, quiet: bool) -> None:
        self.kind = kind
        self.out: str | None = None  # why it takes no part any more
        self.version = "?"
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=serve, args=(kind, state, target, folder, theirs, quiet))
        self._process.start()
        theirs.close()
        found = self.call("prepare", 300)
        if found is not None:
            self.version = found["version"]

    def call(self, what: str, seconds: float, /, **arguments: Any) -> Result | None:
        """What the process found, or None: then ``out`` says why."""
        if self.out is not None:
            return None
        try:
            self._connection.send((what, arguments))
            if not self._connection.poll(seconds):
                self.out = f"took more than {seconds:.0f} s"
                self._process.kill()
                return None
            kind, found = self._connection.recv()
        except (EOFError, OSError):
            self.out = "its process died"
            return None
        if kind == "ok":
            return dict(found)
        self.out = found
        return None

    def end(self) -> None:
        """Ends the process."""
        out, self.out = self.out, None
        with contextlib.suppress(OSError, EOFError):
            self.call("close", 30)
        self.out = out
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Bench:
    """All sections, and what they found."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.rounds = 2 if options.quick else options.rounds
        self.found: dict[str, Any] = {"sections": {}, "skipped": {}, "versions": {}, "machine": machine(folder)}
        self.found |= {"quick": options.quick, "rounds": self.rounds, "states": {}}
        self.running: dict[str, Tool] = {}
        wanted = options.tools.split(";") if options.tools else None
        self.kinds = [k for k in PEERS if (k.name in wanted if wanted else k.quick or not options.quick)]
        if wanted == ["all"]:
            self.kinds = list(PEERS)

    def state(self, name: str) -> tuple[State, State]:
        """A state, and memory to load it into."""
        state = {"big": big, "small": small}[name](self.options.quick)
        target = destination(state)
        self.found["states"][name] = {"tensors": len(state), "bytes": nbytes(state)}
        return state, target

    def section(
        self,
        title: str,
        kinds: list[type[Peer]],
        state: State,
        target: State,
        operations: dict[str, tuple[str, Result]],
        fresh: bool = False,
    ) -> None:
        """Runs operations of tools in turns.

        Args:
            operations: row's key to the worker's call and its arguments.
            fresh: processes of their own, which end with the section: for tools that keep copies of the state.
        """
        began_all = time.monotonic()
        tools = [self.tool(kind, state, target, fresh) for kind in kinds]
        rows: dict[str, dict[str, list[Any]]] = {
            key: {t.kind.name: [None] * self.rounds for t in tools} for key in operations
        }
        stored: dict[str, str] = {}
        takes: dict[str, int] = {}
        for tool in tools:  # the warm-up, which also leaves what is loaded
            began = time.monotonic()
            for key, (call, arguments) in operations.items():
                if call != "save" and call != "train" and tool.kind.form not in stored:
                    name = f"{title}-{tool.kind.__name__}"
                    if tool.call("save", 600, name=name, keep=True) is not None:
                        stored[tool.kind.form] = name
                self.operate(tool, call, arguments, stored, f"warm-{key}")
            took = time.monotonic() - began
            # A slow tool takes part in the first rounds only.
            most = self.options.seconds
            takes[tool.kind.name] = max(3, min(self.rounds, int(most / max(took, 0.01))))
        draw = random.Random(7)
        for number in range(self.rounds):
            order = list(tools)
            draw.shuffle(order)
            for tool in order:
                if tool.out is not None or number >= takes[tool.kind.name]:
                    continue
                for key, (call, arguments) in operations.items():
                    rows[key][tool.kind.name][number] = self.operate(tool, call, arguments, stored, f"{key}-{number}")
        self.say(f"{title}: {self.rounds} rounds in {time.monotonic() - began_all:.0f} s")
        for tool in tools:
            if tool.out is not None:
                self.found["skipped"].setdefault(title, {})[tool.kind.name] = tool.out
                self.say(f"{title}: without {tool.kind.name}: {tool.out}")
            else:
                self.found["versions"][tool.kind.package] = tool.version
            if fresh:
                tool.end()
        for name in stored.values():
            remove(self.folder / name)
        self.found["sections"][title] = rows
        os.sync()

    def tool(self, kind: type[Peer], state: State, target: State, fresh: bool) -> Tool:
        """A tool's process: a new one, or the one that serves all sections of a state."""
        if fresh:
            return Tool(kind, state, target, self.folder, not self.options.verbose)
        if kind.name not in self.running:
            self.running[kind.name] = Tool(kind, state, target, self.folder, not self.options.verbose)
        return self.running[kind.name]

    def end(self) -> None:
        """Ends the processes that serve several sections."""
        for tool in self.running.values():
            tool.end()
        self.running.clear()

    def operate(self, tool: Tool, call: str, arguments: Result, stored: dict[str, str], mark: str) -> Result | None:
        """One operation of one tool."""
        if call in ("save", "train"):
            name = f"{tool.kind.__name__}-{mark}"
        else:
            name = stored.get(tool.kind.form, "")
        found = tool.call(call, 600, name=name, **arguments)
        if found is None and call in ("save", "train"):
            remove(self.folder / name)
        return found

    def say(self, text: str) -> None:
        """Where it is."""
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    def run(self) -> None:
        """All sections that were asked for."""
        usual = ["save", "load", "train", "small", "partial", *([] if self.options.quick else ["ranks"])]
        only = self.options.only.split(",") if self.options.only else usual
        if only == ["ranks"]:
            self.ranks()
            return
        state, target = self.state("big")
        if "save" in only:
            self.section(
                "save",
                [k for k in self.kinds if k.saves and k.__name__ != "Memory"],
                state,
                target,
                {"save": ("save", {})},
            )
        if "load" in only:
            loads = {"cold": ("load", {"cold": True}), "warm": ("load", {"cold": False})}
            self.section("load", [k for k in self.kinds if k.loads], state, target, loads)
        if "partial" in only:
            kinds = [k for k in self.kinds if k.partial]
            self.section("partial one", kinds, state, target, {"one": ("one", {"rows": False})})
            self.section("partial rows", kinds, state, target, {"rows": ("one", {"rows": True})})
        self.end()
        if "train" in only:
            names = ("TorchSave", "Lastgood", "Dcp")
            kinds = [k for k in self.kinds if k.starts or k.__name__ in names]
            seconds = 0.2 if self.options.quick else 1.5
            for threads in (1,) if self.options.quick else (1, 2):
                title = f"train {threads}"
                operations = {"train": ("train", {"threads": threads, "seconds": seconds})}
                self.section(title, kinds, state, target, operations, fresh=True)
        del state, target
        gc.collect()
        if "small" in only:
            state, target = self.state("small")
            both = [k for k in self.kinds if k.suits_small and k.saves and k.loads]
            pair: dict[str, tuple[str, Result]] = {"save": ("save", {}), "cold": ("load", {"cold": True})}
            self.section("small", both, state, target, pair)
            self.end()
            del state, target
            gc.collect()
        if "ranks" in only:
            self.ranks()

    def ranks(self) -> None:
        """Several ranks together."""
        began = time.monotonic()
        folder = self.folder / "ranks"
        folder.mkdir()
        sections, size = ranks.measure(folder, self.rounds, self.options.quick)
        self.found["sections"] |= sections
        for package in ("lastgood", "torch"):
            self.found["versions"].setdefault(package, importlib.metadata.version(package))
        self.found["states"]["ranks"] = {"tensors": len(big_forms(self.options.quick)), "bytes": size}
        self.say(f"ranks: {self.rounds} rounds in {time.monotonic() - began:.0f} s")


def machine(folder: Path) -> dict[str, Any]:
    """In words, without its name."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
        model = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "?")
    with open("/proc/meminfo", encoding="ascii") as f:
        memory = int(f.readline().split()[1]) // 1024
    kind = "?"
    best = -1
    with open("/proc/mounts", encoding="utf-8", errors="replace") as f:
        for line in f:
            _, point, fs = line.split()[:3]
            if str(folder.resolve()).startswith(point) and len(point) > best:
                best, kind = len(point), fs
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_mib": memory,
        "file_system": kind,
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    """By the command line."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    importlib.import_module("torch.distributed.checkpoint")  # once, not in each process
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where checkpoints are written; a folder of its own is made in it")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=120, help="for one tool in one section, about")
    parser.add_argument("--only", help="sections: save,load,partial,train,small,ranks")
    parser.add_argument("--tools", help="names, with semicolons between, or all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show what the tools print")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--page", type=Path, metavar="JSON", help="write the page only, from these figures")
    parser.add_argument("--out", type=Path, help="the page; default docs/benchmarks-peers.md, with --quick the screen")
    options = parser.parse_args()
    page = options.out or (None if options.quick else HERE.parent / "docs" / "benchmarks-peers.md")
    if options.page is not None:
        write_page(
            json.loads(options.page.read_text(encoding="utf-8")),
            options.out or HERE.parent / "docs" / "benchmarks-peers.md",
        )
        return 0
    with tempfile.TemporaryDirectory(prefix="lastgood-peers-", dir=options.folder) as folder:
        bench = Bench(options, Path(folder))
        try:
            bench.run()
        finally:
            bench.found["machine"]["load_after"] = os.getloadavg()[0]
            if options.json is not None:
                options.json.write_text(json.dumps(bench.found, indent=1) + "\n", encoding="utf-8")
    write_page(bench.found, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
