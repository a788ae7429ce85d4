#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what docs/gpu.md claims, on a machine with a CUDA device; some minutes at most.

    gpu.py [--root FOLDER] [--gib SIZE] [--seconds LIMIT]

Prints a table in Markdown, one row a claim, with what was measured. Exit code 1: a claim is wrong. 77: no device here.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import lastgood
import torch

NO_DEVICE = 77


class Clock:
    """How much of the time is used."""

    def __init__(self, limit: float) -> None:
        self.end = time.monotonic() + limit

    def over(self, part: float = 0.0) -> bool:
        return time.monotonic() + part > self.end


class Model:
    """Parameters and moments of about so many bytes in all, an update that changes every one, a buffer."""

    def __init__(self, nbytes: int) -> None:
        each = 16 << 20  # elements
        n = max(1, nbytes // (3 * 4 * each))
        self.parameters = [torch.zeros(each, device="cuda") for _ in range(n)]
        self.moments = [[torch.zeros(each, device="cuda") for _ in range(n)] for _ in range(2)]
        self.mean = torch.zeros(1 << 20, device="cuda")
        self.a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self.b = torch.empty_like(self.a)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"w.{i}": t for i, t in enumerate(self.parameters)}
        for k, moments in enumerate(self.moments):
            found.update({f"m{k}.{i}": t for i, t in enumerate(moments)})
        return found

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in [*self.tensors().values(), self.mean])

    def forward_backward(self, step: int, products: int) -> None:
        """Some milliseconds of work; writes the buffer, reads the parameters."""
        self.mean.fill_(step)
        for _ in range(products):
            torch.mm(self.a, self.a, out=self.b)

    def update(self, step: int) -> None:
        for i, t in enumerate(self.tensors().values()):
            t.fill_(step + i / 1024)


def seconds_of(work) -> float:
    """How long it takes, for the host."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def launch(session: lastgood.Session, model: Model, step: int) -> lastgood.LaunchInfo:
    """As a trainer does."""
    with session.launch(step) as save:
        save.tensors(model.tensors(), lazy=True)
        save.tensors({"mean": model.mean}, buffer=True)
    return save.launched


def wrong(root: Path, model: Model, step: int) -> list[str]:
    """Names of what a checkpoint has otherwise than it was at its launch."""
    stored = lastgood.load(f"{root}@{step}", framework="torch")
    found = [n for i, n in enumerate(model.tensors()) if not bool((stored[n] == step + i / 1024).all())]
    return found if bool((stored["mean"] == step).all()) else [*found, "mean"]


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="a folder on the disk to be used; else a temporary one")
    parser.add_argument("--gib", type=float, default=4.0, help="bytes of the state, in GiB (4)")
    parser.add_argument("--seconds", type=float, default=240.0, help="at most (240)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured", file=sys.stderr)
        return NO_DEVICE
    folder = Path(tempfile.mkdtemp(prefix="lastgood-gpu-", dir=options.root))
    try:
        return measure(folder, int(options.gib * 2**30), Clock(options.seconds))
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, nbytes: int, clock: Clock) -> int:
    """All claims, one after the other."""
    rows: list[tuple[str, str, bool | None]] = []
    model = Model(nbytes)
    size = model.nbytes()
    gb = size / 1e9
    model.forward_backward(0, 4)
    model.update(0)
    torch.cuda.synchronize()
    products = 1
    while True:  # a step that takes about as long as the copies
        took = seconds_of(lambda n=products: (model.forward_backward(0, n), torch.cuda.synchronize()))
        if took > max(0.05, size / 20e9) or products > 1 << 14:
            break
        products *= 2
    pageable = seconds_of(lambda: [t.cpu() for t in model.tensors().values()])
    with lastgood.Session(folder / "run", keep_last=2) as session:
        first = seconds_of(lambda: launch(session, model, 1))
        rows.append(
            (f"the first launch allocates and pins {session.staging.bytes_held / 1e9:.2f} GB", f"{first:.2f} s", None)
        )
        session.wait()
        held = session.staging.bytes_held

        # What the copies take on their own.
        began = time.perf_counter()
        launch(session, model, 2)
        while not session.staging.done:
            time.sleep(0.0005)
        copies = time.perf_counter() - began
        session.wait()
        text = f"{gb / copies:.1f} GB/s ({copies * 1e3:.0f} ms), .cpu() {gb / pageable:.1f} GB/s"
        rows.append(("copies to pinned memory are quicker than to pageable memory", text, copies < pageable))

        def train(step: int, save: bool) -> float:
            began = time.perf_counter()
            model.forward_backward(step, products)
            session.fence()
            model.update(step)
            if save:
                launch(session, model, step)
            torch.cuda.synchronize()
            return time.perf_counter() - began

        plain, saving, launches = [], [], []
        step = 10
        for _ in range(8):
            if clock.over(30):
                break
            plain.append(train(step, False))
            model.forward_backward(step, products)
            session.fence()
            model.update(step)
            launches.append(seconds_of(lambda n=step: launch(session, model, n)))
            saving.append(train(step + 1, False))  # the step beside the copies
            session.wait()
            step += 2
        stall = statistics.median(launches)
        rows.append(
            (
                "a launch does not wait for the device",
                f"{stall * 1e3:.1f} ms, copies {copies * 1e3:.0f} ms",
                stall < copies / 2,
            )
        )
        more = statistics.median(saving) / statistics.median(plain) - 1
        rows.append(
            ("the step beside the copies", f"{more * 100:+.1f} % of {statistics.median(plain) * 1e3:.0f} ms", None)
        )

        # Bits, with updates right behind the fence.
        bad: list[str] = []
        checked = 0
        while checked < 10 and not clock.over(40):
            model.forward_backward(step, 1)
            session.fence()
            model.update(step)
            launch(session, model, step)
            model.forward_backward(step + 1000, 1)
            session.fence()
            model.update(step + 1000)
            session.wait()
            bad += wrong(folder / "run", model, step)
            checked += 1
            step += 1
        rows.append(
            (
                "what is saved is what was there at the launch",
                f"{checked} saves, {len(bad)} tensors wrong",
                checked > 0 and not bad,
            )
        )
        rows.append(
            (
                "pinned memory is allocated once",
                f"{session.staging.bytes_held / 1e9:.2f} GB after all saves",
                session.staging.bytes_held == held,
            )
        )

        # A graph that is recorded and replayed while a save is under way.
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(1 << 20, device="cuda")
        launch(session, model, step)
        with torch.cuda.graph(graph):
            x.add_(1)
        for _ in range(100):
            graph.replay()
        session.fence()
        session.wait()
        ok = bool((x == 100).all())
        rows.append(("a graph is recorded and replayed during a save", "100 replays", ok))
        refused = False
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                launch(session, model, step + 1)
        except lastgood.StateError:
            refused = True
        except RuntimeError:  # the recording itself, once the launch was refused
            refused = True
        rows.append(("a launch within a recording is refused", str(refused).lower(), refused))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, lastgood {lastgood.__version__}, state {gb:.2f} GB\n"
    )
    print("| claim | measured | holds |\n| --- | --- | --- |")
    for claim, text, holds in rows:
        print(f"| {claim} | {text} | {'' if holds is None else 'yes' if holds else '**no**'} |")
    return 1 if any(holds is False for _, _, holds in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
