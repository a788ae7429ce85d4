#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What Python adds: the time of `import lastgood`, and the cost of each tensor.

    bench/python_costs.py                 20,000 tensors of 4 KiB, 12 rounds: some minutes
    bench/python_costs.py --quick         to see that it runs
    bench/python_costs.py --only import   or: tensors
    bench/python_costs.py --folder DIR    where checkpoints are written; default /dev/shm, since it is not the disk that counts

By a Python that has lastgood, NumPy and torch; safetensors where it is there.
Imports: in each round a new process for each module, in an order drawn anew, with
everything in the page cache; the time of the import statement alone. Tensors: in
each round every row does the operation once, in an order drawn anew, in one
process. "The library alone" gets the same
descriptions as the package, ready made, by the same single call: what the row of
torch tensors takes beyond it is what Python adds. A ratio is that of the times of
one round; the interval is the 95 % one of the median, by bootstrap. Ratios are of
processor time, which a busy machine changes least.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import lastgood  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from lastgood._columns import Columns  # noqa: E402
from lastgood._core import ffi, lib  # noqa: E402
from lastgood.errors import call  # noqa: E402
from measure import interval, median  # noqa: E402

Sample = dict[str, float]
Rows = dict[str, list[Sample]]

# What is imported, by row; the row's time is that of the last statement.
IMPORTS = {
    "lastgood": "import lastgood",
    "numpy": "import numpy",
    "torch": "import torch",
    "lastgood, after torch": "import torch\nimport lastgood",
    "lastgood.Checkpointer, after torch and lastgood": "import torch, lastgood\nlastgood.Checkpointer",
}


def machine() -> dict[str, Any]:
    """What it ran on."""
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        model = next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), "?")
    with open("/proc/loadavg", encoding="ascii") as f:
        load = f.read().split()[0]
    return {
        "processor": model,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "lastgood": lastgood.__version__,
        "load": float(load),
    }


# -------------------------------------------------------------------- imports


def one_import(code: str) -> Sample:
    """Seconds, processor seconds and modules of the last statement, in a new process."""
    *before, last = code.splitlines()
    program = "\n".join(
        [
            "import sys, time",
            *before,
            "n = len(sys.modules)",
            "cpu, began = time.process_time(), time.perf_counter()",
            last,
            "seconds, cpu = time.perf_counter() - began, time.process_time() - cpu",
            "print(seconds, cpu, len(sys.modules) - n)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, cpu, modules = map(float, done.stdout.split())
    return {"seconds": seconds, "cpu": cpu, "modules": modules}


def imports(rounds: int) -> Rows:
    """All rows, in turns."""
    return in_turns({row: lambda code=code: one_import(code) for row, code in IMPORTS.items()}, rounds)  # type: ignore[misc]


# -------------------------------------------------------------------- tensors


class Tensors:
    """The same state as torch tensors and as NumPy arrays over the same memory, and the rows."""

    def __init__(self, n: int, elements: int, folder: Path) -> None:
        self.folder = folder
        names = [f"model.layers.{i // 10}.block.{i % 10}.weight" for i in range(n)]
        self.torch = {name: torch.full((elements,), float(i % 251)) for i, name in enumerate(names)}
        self.numpy = {name: t.numpy() for name, t in self.torch.items()}
        self.target = {name: torch.zeros(elements) for name in names}
        self.target_numpy = {name: t.numpy() for name, t in self.target.items()}
        self.steps = 0
        self.sessions: dict[str, lastgood.Session] = {}
        # A model and optimizer of as many tensors in all: weight, exp_avg, exp_avg_sq, step.
        self.model = torch.nn.Module()
        for i in range(n // 4):
            self.model.register_parameter(f"p{i:05d}", torch.nn.Parameter(torch.ones(elements)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def session(self, row: str) -> lastgood.Session:
        """One for each row, as a run has: it keeps the plan of the save before, and the last checkpoint."""
        if row not in self.sessions:
            self.sessions[row] = lastgood.Session(self.folder / row.replace(" ", "-"), keep_last=1)
        return self.sessions[row]

    def saver(self, row: str, describe: Callable[[Any], None]) -> Callable[[], Sample]:
        """A row that saves what ``describe`` gives a save."""

        def work() -> Sample:
            session = self.session(row)
            self.steps += 1
            clock = Clock()
            save = session.save(self.steps)
            describe(save)
            described = clock.seconds()
            save.commit()
            return clock.sample(describing=described)

        return work

    def columns(self, tensors: dict[str, torch.Tensor]) -> tuple[Any, Any]:
        """Descriptions ready made, and what owns their memory."""
        columns = Columns()
        for name, t in tensors.items():
            columns.add_packed(name, int(lib.LG_F32), tuple(t.shape), t.data_ptr(), 0)
        struct, keep = columns._struct()
        return struct, (columns, keep)

    def saves(self) -> dict[str, Callable[[], Sample]]:
        """Rows that save."""
        struct, keep = self.columns(self.torch)

        def alone(save: Any, _keep: Any = keep) -> None:
            save.with_pointer(lambda raw: call(lib.lgpy_save_tensors, raw, struct))

        return {
            "the library alone": self.saver("the library alone", alone),
            "torch tensors": self.saver("torch tensors", lambda save: save.tensors(self.torch)),
            "NumPy arrays": self.saver("NumPy arrays", lambda save: save.tensors(self.numpy)),
            "lastgood.save(path, tree)": self.tree,
            "Checkpointer.save(state)": self.checkpointer(),
            **self.others("save"),
        }

    def tree(self) -> Sample:
        """One call, a session of its own."""
        path = self.folder / "tree"
        clock = Clock()
        lastgood.save(path, self.torch)
        found = clock.sample()
        shutil.rmtree(path)
        return found

    def checkpointer(self) -> Callable[[], Sample]:
        """A model and its AdamW, with as many tensors, in the foreground."""
        state = lastgood.State(model=self.model, optim=self.optimizer)
        made = lastgood.Checkpointer(self.folder / "run", background="off", keep=1, signals=(), progress=False)
        made.resume(state)
        self.made = made

        def work() -> Sample:
            self.steps += 1
            clock = Clock()
            made.save(state, step=self.steps)
            return clock.sample()

        return work

    def loads(self) -> dict[str, Callable[[], Sample]]:
        """Rows that load, out of the page cache or from memory, into existing tensors."""
        with lastgood.Session(self.folder / "loaded") as session, session.save(1) as save:
            save.tensors(self.torch)
        checkpoint = lastgood.open(self.folder / "loaded")
        struct, keep = self.columns(self.target)

        def alone(_keep: Any = keep) -> Sample:
            clock = Clock()
            out = ffi.new("lg_load **")
            with checkpoint.pointer as c:
                call(lib.lg_load_begin, c, 0, out)
                load = ffi.gc(out[0], lib.lg_load_free)
                try:
                    call(lib.lgpy_load_tensors, load, struct)
                    call(lib.lg_load_run, load)
                finally:
                    ffi.release(load)
            return clock.sample()

        def into(targets: Any) -> Callable[[], Sample]:
            def work() -> Sample:
                clock = Clock()
                checkpoint.read_into(targets)
                return clock.sample()

            return work

        rows = {
            "the library alone": alone,
            "torch tensors": into(self.target),
            "NumPy arrays": into(self.target_numpy),
            **self.others("load"),
        }
        return {row: self.checked(work) for row, work in rows.items()}

    def checked(self, work: Callable[[], Sample]) -> Callable[[], Sample]:
        """Spoils the targets before and compares some of them after."""

        def go() -> Sample:
            some = random.Random(self.steps).sample(sorted(self.target), min(8, len(self.target)))
            for name in some:
                self.target[name].fill_(-1)
            found = work()
            for name in some:
                if not torch.equal(self.target[name], self.torch[name]):
                    raise ValueError(f"{name} was loaded wrong")
            return found

        return go

    def others(self, what: str) -> dict[str, Callable[[], Sample]]:
        """safetensors, which checks nothing and does not sync, and torch.save."""
        found: dict[str, Callable[[], Sample]] = {}
        file = self.folder / "of-torch"
        torch.save(self.torch, file)

        def torch_save() -> Sample:
            clock = Clock()
            torch.save(self.torch, self.folder / "saved")
            return clock.sample()

        def torch_load() -> Sample:
            clock = Clock()
            for name, t in torch.load(file, weights_only=True).items():
                self.target[name].copy_(t)
            return clock.sample()

        found["torch.save" if what == "save" else "torch.load, copied"] = torch_save if what == "save" else torch_load
        try:
            from safetensors.torch import load_file, save_file
        except ImportError:
            return found
        shards = self.folder / "of.safetensors"
        save_file(self.torch, shards)

        def safetensors_save() -> Sample:
            clock = Clock()
            save_file(self.torch, self.folder / "saved.safetensors")
            return clock.sample()

        def safetensors_load() -> Sample:
            clock = Clock()
            for name, t in load_file(shards).items():
                self.target[name].copy_(t)
            return clock.sample()

        found["safetensors" if what == "save" else "safetensors, copied"] = (
            safetensors_save if what == "save" else safetensors_load
        )
        return found

    def close(self) -> None:
        """Ends all sessions."""
        for session in self.sessions.values():
            session.close()
        if hasattr(self, "made"):
            self.made.close()


class Clock:
    """From its making on."""

    def __init__(self) -> None:
        self._cpu, self._began = time.process_time(), time.perf_counter()

    def seconds(self) -> float:
        """So far."""
        return time.perf_counter() - self._began

    def sample(self, **more: float) -> Sample:
        """Seconds, processor seconds of all threads."""
        return {"seconds": self.seconds(), "cpu": time.process_time() - self._cpu, **more}


def in_turns(rows: dict[str, Callable[[], Sample]], rounds: int) -> Rows:
    """Each row once to warm up, then once a round, in an order drawn anew."""
    found: Rows = {row: [] for row in rows}
    for work in rows.values():
        work()
    draw, order = random.Random(7), list(rows)
    for _ in range(rounds):
        draw.shuffle(order)
        for row in order:
            gc.collect()
            found[row].append(rows[row]())
    return found


# --------------------------------------------------------------------- tables


def ratios(rows: Rows, row: str, base: str, key: str) -> list[float]:
    """Of two rows' times of one round."""
    return [a[key] / b[key] for a, b in zip(rows[row], rows[base], strict=True) if b[key] > 0]


def in_words(values: list[float]) -> str:
    """Median and interval."""
    if not values:
        return "-"
    low, high = interval(values)
    return f"{median(values):.2f} ({low:.2f} to {high:.2f})"


def print_imports(rows: Rows) -> None:
    """The table."""
    width = max(map(len, rows))
    print(f"\n{'import':{width}}  median ms    cpu ms  modules   x numpy, cpu           x torch, cpu")
    for row, samples in rows.items():
        seconds, cpu, modules = (median([s[key] for s in samples]) for key in ("seconds", "cpu", "modules"))
        others = [in_words(ratios(rows, row, base, "cpu")) for base in ("numpy", "torch")]
        print(f"{row:{width}}  {seconds * 1e3:9.1f} {cpu * 1e3:9.1f}  {modules:7.0f}   {others[0]:22} {others[1]}")


def print_tensors(what: str, rows: Rows, n: int) -> None:
    """The table."""
    width = max(map(len, rows))
    base = "the library alone"
    print(f"\n{what:{width}}   median s     cpu s   us/tensor   x library, cpu         us/tensor beyond it, cpu")
    for row, samples in rows.items():
        seconds, cpu = (median([s[key] for s in samples]) for key in ("seconds", "cpu"))
        beyond = [(a["cpu"] - b["cpu"]) / n * 1e6 for a, b in zip(samples, rows[base], strict=True)]
        more = "" if row == base else f"{in_words(ratios(rows, row, base, 'cpu')):22} {in_words(beyond)}"
        print(f"{row:{width}}  {seconds:9.4f} {cpu:9.4f}   {cpu / n * 1e6:9.2f}   {more}")


def main() -> int:
    """By the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="/dev/shm", help="where checkpoints are written; default %(default)s")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tensors", type=int, default=20000)
    parser.add_argument("--elements", type=int, default=1024, help="of each tensor, of 4 bytes")
    parser.add_argument("--only", choices=("import", "tensors"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.tensors, options.elements = 2, 400, 16
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine(), "rounds": options.rounds, "tensors": options.tensors}
    print(", ".join(f"{k} {v}" for k, v in found["machine"].items()), flush=True)
    if options.only in (None, "import"):
        found["import"] = imports(1 if options.quick else options.rounds)
        print_imports(found["import"])
    if options.only in (None, "tensors"):
        with tempfile.TemporaryDirectory(prefix="lastgood-costs-", dir=options.folder) as folder:
            tensors = Tensors(options.tensors, options.elements, Path(folder))
            try:
                for what, rows in (("save", tensors.saves()), ("load", tensors.loads())):
                    found[what] = in_turns(rows, options.rounds)
                    print_tensors(what, found[what], options.tensors)
            finally:
                tensors.close()
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
