#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the same few steps on several numbers of ranks, without checkpoints,
and compares all state and all losses byte by byte. Prints TAP.

usage: test_ranks.py TOOLS_FOLDER TRAINER
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, sys.argv[1])
os.environ["GPT_C"] = sys.argv[2]
import mpijob  # noqa: E402

RANKS = (1, 2, 3, 4, 5)
SMALL = ["--no-checkpoint", "--data", mpijob.TEXT, "--layers", 2, "--width", 24, "--context", 20, "--print-every", 0]


def trained(folder, name, ranks, *arguments):
    folder = Path(folder)
    dump, log = folder / f"{name}.dump", folder / f"{name}.log"
    mpijob.Job(ranks, [*SMALL, *arguments, "--dump", dump, "--log", log], folder, name).finish(120)
    return dump.read_bytes(), log.read_text()


def main():
    tests = []
    with tempfile.TemporaryDirectory(prefix="lastgood-ranks-") as folder:
        # six micro-batches: no power of two, and less than one for each of some ranks
        base = ["--steps", 5, "--micro-batches", 6]
        expected = trained(folder, "one", 1, *base)
        for ranks in RANKS[1:]:
            same = trained(folder, f"ranks-{ranks}", ranks, *base) == expected
            tests.append((same, f"{ranks} ranks train to the same bits as one"))
        # the comparison must be able to fail
        for what, value in (("seed", 2), ("dropout", 0.2), ("micro-batches", 7)):
            other = trained(folder, what, 2, *base, f"--{what}", value)
            tests.append((other[0] != expected[0], f"another --{what} trains to other bits"))
        _, log = trained(folder, "long", 2, "--steps", 60, "--lr", 0.01)
        losses = [float(line.split()[3]) for line in log.splitlines()]
        fell = losses[0] > 5.3 and sum(losses[-5:]) / 5 < 3.3
        tests.append((fell, f"the loss falls from {losses[0]:.2f} to below 3.3 in 60 steps ({losses[-1]:.2f})"))
    print(f"1..{len(tests)}")
    for number, (passed, name) in enumerate(tests, 1):
        print(f"{'ok' if passed else 'not ok'} {number} - {name}")
    return 0 if all(passed for passed, _ in tests) else 1


if __name__ == "__main__":
    sys.exit(main())
