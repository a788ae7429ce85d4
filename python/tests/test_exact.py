# SPDX-License-Identifier: Apache-2.0
"""A run that is killed twice and resumed in new processes ends with the same bits as one that never stopped, and has
had the same losses from the same batches on the way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lastgood
import pytest
import torch
from exact_runs import CONFIGS, EVERY, KILLS, TOTAL

RUNNER = Path(__file__).resolve().parent / "exact_runs.py"
GROUPS = {
    "one process": ["foreach", "fused", "sgd", "gan"],
    "ddp": ["ddp"],
    "fsdp2": ["fsdp2"],
    "mesh": ["mesh2d"],
}


def lines(folder, name, rank):
    text = (folder / f"{name}-{rank}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def state_of(checkpoint):
    return {key: checkpoint.state[key] for key in checkpoint.state}


@pytest.mark.parametrize("group", GROUPS)
def test_k09_f167_a_killed_and_resumed_run_has_the_bits_of_one_that_never_stopped(group, roots):
    names = GROUPS[group]
    roots.folder.joinpath("runs").mkdir()
    folder = roots.folder / "runs"
    done = subprocess.run(
        [sys.executable, RUNNER, folder, *names], capture_output=True, text=True, check=False, timeout=300,
        env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(RUNNER.parent)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in names:
        compare(folder, name, CONFIGS[name].ranks)


def compare(folder, name, ranks):
    for rank in range(ranks):
        whole = {one["step"]: one for one in lines(folder, f"{name}-whole", rank) if "step" in one}
        killed = lines(folder, f"{name}-killed", rank)
        assert sorted(whole) == list(range(1, TOTAL + 1))
        # Each start goes on from a checkpoint that was there: not from zero, and no committed step is lost.
        starts = [one["from"] for one in killed if "start" in one]
        assert starts[0] == 0
        for at, kill in zip(starts[1:], KILLS, strict=True):
            assert kill - 2 * EVERY < at <= kill, (name, starts)
        assert all(one["notes"] == [] for one in killed if "start" in one), (name, killed)
        seen = set()
        for one in killed:
            if "step" in one:
                assert one == whole[one["step"]], (name, rank)
                seen.add(one["step"])
        assert seen == set(whole)
    a, b = (lastgood.open(f"{folder}/{name}-{run}@{TOTAL}") for run in ("whole", "killed"))
    assert state_of(a) == state_of(b), name
    tensors = b.read(framework="torch")
    assert set(tensors) == set(a)
    for key, t in a.read(framework="torch").items():
        assert t.dtype == tensors[key].dtype
        assert torch.equal(
            t.view(torch.uint8) if t.ndim else t, tensors[key].view(torch.uint8) if t.ndim else tensors[key]
        ), (name, key)
