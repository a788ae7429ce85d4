#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Saving and resuming as a user does it: by starting the trainer. Prints TAP.

usage: test_resume.py TOOLS_FOLDER TRAINER
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, sys.argv[1])
os.environ["GPT_C"] = sys.argv[2]
import mpijob  # noqa: E402

STEPS = 24
SMALL = ["--data", mpijob.TEXT, "--layers", 2, "--width", 24, "--context", 20, "--print-every", 0]


class Bench:
    """A folder with one root, and the starts made on it."""

    def __init__(self, folder, name):
        self.folder = Path(folder) / name
        self.folder.mkdir()
        self.root = self.folder / "root"
        self.dump, self.log = self.folder / "dump", self.folder / "log"
        self.starts = 0

    def start(self, ranks, *arguments, steps=STEPS):
        self.starts += 1
        base = [*SMALL, "--root", self.root, "--steps", steps, "--save-every", 4]
        base += ["--dump", self.dump, "--log", self.log]
        return mpijob.Job(ranks, [*base, *arguments], self.folder, f"start-{self.starts}")

    def run(self, ranks, *arguments, steps=STEPS):
        """(exit code, what it said)"""
        job = self.start(ranks, *arguments, steps=steps)
        return job.wait(120), job.said()

    def checkpoints(self):
        folders = [e for e in self.root.glob("step-*") if (e / "lastgood.json").is_file()]
        return sorted(folders, key=lambda e: [int(n) for n in e.name.split(".g")[1].split(".")])

    def damage(self, folder):
        shard = max(folder.glob("shard-*.safetensors"), key=lambda p: p.stat().st_size)
        data = bytearray(shard.read_bytes())
        at = len(data) * 2 // 3
        data[at] = (data[at] + 1) % 256  # another value each time, so that damage twice is no repair
        shard.write_bytes(data)

    def result(self):
        return self.dump.read_bytes(), self.log.read_bytes()


def some(lines, *parts):
    return any(all(part in line for part in parts) for line in lines)


def resumes_on_other_ranks(folder, expected):
    b = Bench(folder, "ranks")
    b.run(4, steps=10)
    code, said = b.run(2, steps=17)
    yield code == 0 and some(said, "resumed step 10", "saved by 4 ranks", "on 2 ranks"), "it says what it resumed"
    code, said = b.run(3)
    yield b.result() == expected, "4, then 2, then 3 ranks end with the bits of one run on 2"
    before = b.checkpoints()
    code, said = b.run(2)
    yield (
        code == 0 and b.checkpoints() == before and b.result() == expected,
        "K20: a start at the last step saves nothing again, and succeeds",
    )


def stops_when_asked(folder, expected):
    b = Bench(folder, "asked")
    job = b.start(2, "--save-every", 0, steps=1000000)
    job.wait_for(lambda: b.log.exists() and b.log.read_bytes().count(b"\n") >= 3)
    job.ask_to_stop(rank=1)
    code = job.wait(120)
    step = b.log.read_bytes().count(b"\n")
    yield code == 0 and some(job.said(), f"stopped by a signal after step {step}, saved"), "K20: SIGTERM saves and ends"
    yield some(job.said(), f"committed step {step}") and len(b.checkpoints()) == 1, "K20: all ranks agree on the step"
    b.run(2, steps=max(step, STEPS))
    yield step > STEPS or b.result() == expected, "what SIGTERM saved goes on to the same bits"


def saves_in_the_background(folder, expected):
    b = Bench(folder, "background")
    code, said = b.run(3, "--async", "--save-every", 1)
    yield code == 0 and b.result() == expected, "K04: saving every step in the background changes no bit"
    launched = [i for i, line in enumerate(said) if line.startswith("launched")]
    committed = [i for i, line in enumerate(said) if line.startswith("committed")]
    yield len(launched) == STEPS and len(committed) == STEPS, "K04 F062: each is said to be launched, then committed"
    yield all(a < b for a, b in zip(launched, committed)), "K04 F062: never the other way round"
    b = Bench(folder, "background-on")
    b.run(4, "--async", steps=10)
    code, said = b.run(2, "--async", steps=17)
    yield code == 0 and some(said, "resumed step 10"), "what was saved at the end of a run in the background is there"
    b.run(2)
    yield b.result() == expected, "runs that save in the background and in the foreground go on to the same bits"
    b = Bench(folder, "background-asked")
    job = b.start(2, "--async", "--save-every", 1000, steps=1000000)
    job.wait_for(lambda: b.log.exists() and b.log.read_bytes().count(b"\n") >= 3)
    job.ask_to_stop(rank=1)
    code = job.wait(120)
    step = b.log.read_bytes().count(b"\n")
    yield (
        code == 0 and some(job.said(), f"committed step {step}") and len(b.checkpoints()) == 1,
        "K20: SIGTERM with --async ends after the last save is durable",
    )


def refuses_another_model(folder, _expected):
    b = Bench(folder, "other")
    b.run(2, steps=4)
    text = b.folder / "text"
    text.write_bytes(mpijob.TEXT.read_bytes()[:-1] + b"?")
    for option, value in (
        ("--layers", 3),
        ("--width", 32),
        ("--micro-batches", 16),
        ("--seed", 2),
        ("--lr", 0.002),
        ("--dropout", 0),
        ("--data", text),
    ):
        code, said = b.run(2, option, value)
        refused = code == 1 and some(said, "error", option)
        yield refused, f"K10: another {option} than the checkpoint's is refused by name"
    yield [f.name[:17] for f in b.checkpoints()] == ["step-000000000004"], "refused starts change nothing"


def falls_back(folder, expected):
    b = Bench(folder, "damaged")
    b.run(2, "--keep", 0, steps=12)
    b.damage(b.checkpoints()[-1])
    code, said = b.run(2, "--strict")
    yield code == 1 and some(said, "error", "shard-"), "--strict refuses a damaged newest checkpoint"
    code, said = b.run(4, "--keep", 0)
    told = some(said, "skipped step 12", "shard-")
    yield code == 0 and told, "K01: a damaged checkpoint is passed over, with the reason"
    yield some(said, "resumed step 8"), "K01: the one before it is resumed"
    yield b.result() == expected, "a run that fell back ends with the same bits"

    for folder in b.checkpoints():
        b.damage(folder)
    before = b.checkpoints()
    code, said = b.run(2)
    yield code == 1 and some(said, "LG_ERR_NO_GOOD"), "a root with damaged checkpoints only is an error, not a new run"
    skipped = [line for line in said if line.startswith("skipped")]
    yield len(skipped) == len(before), "each of them is told with its reason"
    code, said = b.run(2, "--new-run")
    yield code == 0 and b.result() == expected and len(b.checkpoints()) > 0, "--new-run starts over there when asked"


def main():
    failed = number = 0
    with tempfile.TemporaryDirectory(prefix="lastgood-resume-") as folder:
        whole = Bench(folder, "whole")
        code, said = whole.run(2)
        expected = whole.result()
        tests = [(code == 0 and some(said, "a new run"), "an empty root is a new run")]
        groups = (resumes_on_other_ranks, stops_when_asked, saves_in_the_background, refuses_another_model, falls_back)
        for group in groups:
            for test in group(folder, expected):
                tests.append(test)
        for passed, name in tests:
            number += 1
            failed += not passed
            print(f"{'ok' if passed else 'not ok'} {number} - {name}")
        if failed:
            for path in sorted(Path(folder).glob("*/*.err")):
                print(f"# {path.parent.name}/{path.name}")
                for line in path.read_text(errors="replace").splitlines():
                    print(f"#   {line}")
    print(f"1..{number}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
