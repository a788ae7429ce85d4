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
from exact_runs import CONFIGS, EVERY, KILLS, LEGS, TOTAL

RUNNER = Path(__file__).resolve().parent / "exact_runs.py"
GROUPS = {
    "one process": ["foreach", "fused", "sgd", "gan"],
    "ddp": ["ddp"],
    "fsdp2": ["fsdp2"],
    "mesh": ["mesh2d"],
    "tensor parallel": ["tp"],
    "fsdp2 and tensor parallel": ["fsdptp"],
    "pipeline": ["pipeline"],
}


def lines(folder, name, rank):
    text = (folder / f"{name}-{rank}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def state_of(checkpoint):
    return {key: checkpoint.state[key] for key in checkpoint.state}


def run(folder, names):
    """Runs them, and ends with this test whatever happens."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, RUNNER, folder, *names], capture_output=True, text=True, check=False, timeout=300,
        env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(RUNNER.parent)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("group", GROUPS)
def test_k09_f167_a_killed_and_resumed_run_has_the_bits_of_one_that_never_stopped(group, roots):
    folder = roots.folder / "runs"
    run(folder, GROUPS[group])
    for name in GROUPS[group]:
        compare(folder, name, CONFIGS[name].ranks)
        streams(folder, name)


def streams(folder, name):
    """Ranks that share samples have drawn the same numbers, and the others have not."""
    config = CONFIGS[name]
    stream = [config.stream(config, rank) for rank in range(config.ranks)]
    for which in ("whole", "killed"):
        steps = [
            [one for one in lines(folder, f"{name}-{which}", rank) if "step" in one] for rank in range(config.ranks)
        ]
        for rank in range(1, config.ranks):
            for mine, other in zip(steps[rank], steps[0], strict=False):
                if mine["step"] != other["step"]:
                    break
                assert (mine["next"] == other["next"]) == (stream[rank] == stream[0]), (name, which, mine["step"])
                if stream[rank] == stream[0]:
                    assert mine == other, (name, which)


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
        notes = [note for one in killed if "start" in one for note in one["notes"]]
        assert notes == [], name
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


@pytest.mark.parametrize("name", LEGS)
def test_k08_k10_each_step_has_the_samples_of_one_process_on_4_then_2_then_3_ranks(name, roots):
    """With other micro-batches and workers each time; what a data set draws for a sample is the same too."""
    folder = roots.folder / "runs"
    run(folder, [name])
    whole = {one["step"]: one for one in lines(folder, f"{name}-whole", 0) if "step" in one}
    assert sorted(whole) == list(range(1, TOTAL + 1))
    legs = []  # by start: by rank: lines
    for rank in range(4):
        for one in lines(folder, f"{name}-killed", rank):
            if "start" in one:
                legs += [{} for _ in range(one["start"] + 1 - len(legs))]
                legs[one["start"]][rank] = []
                start = one
                assert rank == 0 or start["from"] == legs[start["start"]]["from"]
                legs[start["start"]]["from"] = start["from"]
            else:
                legs[start["start"]][rank].append(one)
    assert [len(leg) - 1 for leg in legs] == [config.ranks for config in LEGS[name][1:]]
    seen = []
    for leg in legs:
        at = leg.pop("from")
        # A rank may be killed between a step and its line.
        for steps in zip(*leg.values(), strict=False):
            at += 1
            assert {one["step"] for one in steps} == {at}
            assert samples(steps) == samples([whole[at]]), (name, at)
            loss = sum(float.fromhex(one["loss"]) for one in steps) / len(steps)
            assert loss == pytest.approx(float.fromhex(whole[at]["loss"]), rel=1e-4), (name, at)
            seen.append(at)
    assert set(seen) == set(whole)
    a, b = (lastgood.open(f"{folder}/{name}-{which}@{TOTAL}") for which in ("whole", "killed"))
    theirs = b.read(framework="torch")
    for key, t in a.read(framework="torch").items():
        if not key.startswith("random"):
            torch.testing.assert_close(theirs[key], t, rtol=1e-3, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")


def samples(steps):
    """Of all micro-batches of all ranks: index, and what was drawn for it."""
    batches = [pair for one in steps for pair in zip(one["batches"], one["drawn"], strict=True)]
    return sorted(pair for batch in batches for pair in zip(*batch, strict=True))
