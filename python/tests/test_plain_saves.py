# SPDX-License-Identifier: Apache-2.0
"""Roots of plain saves, and roots of training runs: one call does not end a run. And what a first attempt leaves."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import lastgood
import numpy as np
import pytest
import torch
from lastgood.checkpointer import Checkpointer
from lastgood.state import State
from test_checkpointer import Trainer
from torch import nn


def wait_until(done):
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end


def committed(root):
    return [e.step for e in lastgood.entries(root) if e.kind == "committed"]


def test_a_plain_save_into_the_root_of_a_run_is_refused_and_the_run_goes_on(root):
    trainer = Trainer()
    with Checkpointer(root, every=1) as ckpt:
        # Already before its first checkpoint.
        with pytest.raises(
            lastgood.ProtectedError, match=r"belongs to a training run \(owner epoch 1, by .*take_over=True"
        ):
            lastgood.save(root, {"a": np.ones(3)})
        trainer.run(ckpt, 2)
        ckpt.wait()
        before = sorted(os.listdir(root))
        with pytest.raises(lastgood.ProtectedError):
            lastgood.save(root, {"a": np.ones(3)}, step=9)
        assert sorted(os.listdir(root)) == before
        trainer.run(ckpt, 4)
    assert committed(root) == [4, 3, 2, 1]
    # Nor when it has ended: it would not resume from what is its newest then.
    with pytest.raises(lastgood.ProtectedError):
        lastgood.save(root, {"a": np.ones(3)})


def test_who_says_so_takes_a_run_over(root):
    trainer = Trainer()
    with Checkpointer(root, every=1) as ckpt:
        trainer.run(ckpt, 1)
        ckpt.wait()
        lastgood.save(root, {"a": np.ones(3)}, step=9, take_over=True)
        with pytest.raises(lastgood.SupersededError):
            ckpt.save(trainer.state, step=2)
    lastgood.save(root, {"a": np.zeros(3)}, step=10)  # from now on it is one of plain saves
    assert committed(root) == [10, 9, 1]


def test_plain_saves_follow_each_other_and_a_run_may_take_their_root(root):
    for step in (1, 2):
        lastgood.save(root, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, step=step)
    lastgood.rollback(f"{root}@1", "test")  # claims, and changes nothing of that
    lastgood.save(root, {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, step=3)
    with Checkpointer(root) as ckpt:
        assert ckpt.resume(State(model=nn.Linear(2, 2), random=False)).step == 3
    with pytest.raises(lastgood.ProtectedError):
        lastgood.save(root, {"a": np.ones(3)})


def test_a_copied_root_without_owners_may_be_saved_into(root):
    lastgood.save(root, {"a": np.ones(3)}, step=1)
    for name in os.listdir(root):
        if name.startswith(".owner"):
            os.remove(root / name)
    lastgood.save(root, {"a": np.ones(3)}, step=2)
    assert committed(root) == [2, 1]


# ----------------------------------------------------------- the first attempt


def test_k01_f008_a_run_killed_in_its_first_save_starts_anew_and_its_next_save_takes_the_rest_away(root):
    code = f"""
        import os, threading, signal, lastgood, torch
        def kill():
            while not any(n.endswith(".partial") for n in os.listdir({str(root)!r})):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        state = lastgood.State(model=torch.nn.Linear(2000, 2000), random=False)
        with lastgood.Checkpointer({str(root)!r}) as ckpt:
            ckpt.resume(state)
            threading.Thread(target=kill, daemon=True).start()
            for step in range(1, 100):
                ckpt.save(state, step=step)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    kinds = [e.kind for e in lastgood.entries(root, all=True)]
    if "committed" in kinds:
        pytest.skip("the kill came too late")
    assert "partial" in kinds
    calls = []
    model = nn.Linear(4, 4)
    state = State(model=model, random=False)
    with Checkpointer(root) as ckpt:
        run = ckpt.resume(state, init=lambda: calls.append(1))
        assert not run.resumed
        assert calls == [1]
        assert "holds no checkpoint: the run starts at step 0" in str(run)
        ckpt.save(state, step=1)
    assert {e.kind for e in lastgood.entries(root, all=True)} == {"committed", "owner"}
    with Checkpointer(root) as ckpt:
        assert ckpt.resume(state).step == 1


class Torn:
    """A run whose parameters are written too early, behind each launch."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(64, 64)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = State(model=self.model, optim=self.optim, random=False)

    def train(self):
        self.model(torch.ones(2, 64)).sum().backward()
        self.optim.step()
        self.optim.zero_grad()

    def write(self):
        with torch.no_grad():
            self.model.weight.add_(1)


@pytest.mark.parametrize("wait_for_commit", [False, True])
def test_k04_a_torn_first_checkpoint_leaves_a_root_that_starts_anew(wait_for_commit, root):
    t = Torn()
    with Checkpointer(root) as ckpt:
        ckpt.resume(t.state)
        t.train()
        ckpt.step(t.state)
        ckpt.save(t.state)
        if wait_for_commit:
            wait_until(lambda: committed(root))
        t.write()
        with pytest.raises(lastgood.ConflictError, match=r"weight changed after a save was launched.*ckpt\.fence\(\)"):
            t.train()
        assert committed(root) == []
        t.optim.zero_grad()
        ckpt.save(t.state, step=2)
    assert committed(root) == [2]


@pytest.mark.parametrize("wait_for_commit", [False, True])
def test_k03_k04_nothing_older_is_removed_for_a_checkpoint_that_may_be_torn(wait_for_commit, root):
    t = Torn()
    with Checkpointer(root, keep=1) as ckpt:
        ckpt.resume(t.state)
        t.train()
        ckpt.step(t.state)
        ckpt.save(t.state)
        ckpt.wait()
        t.train()
        ckpt.step(t.state)
        ckpt.save(t.state)
        wait_until(lambda: not wait_for_commit or 2 in committed(root))
        t.write()
        with pytest.raises(lastgood.ConflictError):
            t.train()
        assert committed(root) == [1]
        t.optim.zero_grad()
        ckpt.step(t.state)
        ckpt.save(t.state)
    assert committed(root) == [3]  # and the rule holds again at the end


def test_the_last_checkpoint_is_removed_only_by_who_says_so(root):
    lastgood.save(root, {"a": np.ones(3)}, step=1)
    with pytest.raises(lastgood.ProtectedError):
        lastgood.remove(f"{root}@1")
    lastgood.pin(f"{root}@1")
    with pytest.raises(lastgood.ProtectedError, match="pinned"):
        lastgood.remove(f"{root}@1", last=True)
    lastgood.unpin(f"{root}@1")
    lastgood.remove(f"{root}@1", last=True)
    assert committed(root) == []
