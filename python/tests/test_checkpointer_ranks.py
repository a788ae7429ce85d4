# SPDX-License-Identifier: Apache-2.0
"""Runs of two ranks: what one of them meets, all are told."""

import logging
import os
import signal
import threading

import lastgood
import torch
from lastgood.checkpointer import Checkpointer
from lastgood.pytorch import StoreKeys
from test_gloo import on_processes, stay_until
from torch import nn
from training import State, indices_loader


class Trainer:
    def __init__(self, cls=State, **more):
        torch.manual_seed(1)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.loader = indices_loader(1000, 2)
        self.state = cls(model=self.model, optim=self.optimizer, loader=self.loader, random=False, **more)

    def train(self, batches):
        for b in batches:
            self.model(b.unsqueeze(1).expand(-1, 4) / 100).square().mean().backward()
        for p in self.model.parameters():  # as DDP does
            torch.distributed.all_reduce(p.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


def told(work):
    """What a call raises, as text."""
    try:
        work()
    except lastgood.Error as why:
        return f"{type(why).__name__}: {why}"
    except Exception as why:
        return f"not ours: {type(why).__name__}: {why}"
    return None


class Fails(State):
    """Cannot be restored on rank 1."""

    def restore(self, of):
        super().restore(of)
        of.notes.append(f"a note of {of.ranks.rank}")
        if of.ranks.rank == 1 and self.vars.get("broken"):
            raise RuntimeError("the card is gone")


def errors(rank, root):
    found = {}
    trainer = Trainer(Fails)

    def bad_init():
        if rank == 1:
            error = ValueError("no seed")
            error.held = threading.Lock()  # F101: what cannot be pickled
            raise error

    with Checkpointer(root, every=1, timeout=60) as ckpt:
        assert ckpt.ranks.world == 2
        found["init"] = told(lambda: ckpt.resume(trainer.state, init=bad_init))
        run = ckpt.resume(trainer.state, init=lambda: None)
        seen = []
        for batches in run.steps(3, accumulate=2):
            trainer.train(batches)
            seen += [b.tolist() for b in batches]
            # The ranks' losses differ, and are no conflict.
            ckpt.step(trainer.state, metrics={"loss": float(rank)})
        found["seen"] = seen
        # A gradient on one rank only.
        trainer.train(next(ckpt.batches(1)))
        if rank == 1:
            trainer.model.weight.grad = torch.ones(4, 4)
        found["gradient"] = told(lambda: ckpt.save(trainer.state, step=4))
        trainer.optimizer.zero_grad()
        # The ranks are at different steps.
        found["steps"] = told(lambda: ckpt.save(trainer.state, step=5 + rank))
        trainer.state.vars["broken"] = True
        ckpt.save(trainer.state, step=9)
    with Checkpointer(root, timeout=60) as ckpt:
        found["restore"] = told(lambda: ckpt.resume(trainer.state))
        trainer.state.vars["broken"] = False
        found["notes"] = ckpt.resume(trainer.state, step=3).notes
    return found


def test_k06_f098_what_one_rank_raises_reaches_all(root, tmp_path):
    found = on_processes(2, tmp_path, errors, str(root))
    assert not any(isinstance(f, BaseException) for f in found), found
    a, b = found
    assert a["init"] == "CancelledError: rank 1: init: ValueError: no seed"
    assert b["init"] == "not ours: ValueError: no seed"
    assert "weight with gradients" in a["gradient"]
    assert "weight with gradients" in b["gradient"]
    assert a["steps"].startswith("ConflictError: save step 5: ranks d")
    assert a["steps"].replace("save step 5", "save step 6", 1) == b["steps"]
    assert a["restore"] == "CancelledError: rank 1: restoring the state: RuntimeError: the card is gone"
    assert b["restore"] == "not ours: RuntimeError: the card is gone"
    assert a["notes"] == b["notes"] == ("a note of 0", "rank 1: a note of 1")
    samples = [n for f in found for batch in f["seen"] for n in batch]
    assert sorted(samples) == sorted(lastgood.Sampler(1000).peek(2 * 2 * 2 * 3))
    assert lastgood.open(f"{root}@3").state["metrics"] == {"loss": 0.0}
    assert [e.step for e in lastgood.entries(root)] == [9, 3, 2, 1]


def background_failure(rank, root):
    trainer = Trainer()

    class Keys:
        """Rank 1 cannot tell that it has written."""

        broken = True

        def __init__(self):
            self.keys = StoreKeys()

        def set(self, key, value):
            if self.broken and rank == 1:
                raise OSError("the switch is off")
            self.keys.set(key, value)

        def get(self, key):
            return self.keys.get(key)

    keys = Keys()
    errors = []
    with Checkpointer(root, every=1, timeout=10, kv=keys) as ckpt:
        for batches in ckpt.resume(trainer.state).steps(4):
            trainer.train(batches)
            errors.append(told(lambda: ckpt.step(trainer.state)))
            ckpt.session.drain(30)
            keys.broken = False
    return errors


def test_k04_f065_k06_f100_a_failure_in_the_background_is_raised_on_every_rank(root, tmp_path):
    found = on_processes(2, tmp_path, background_failure, str(root))
    assert not any(isinstance(f, BaseException) for f in found), found
    assert found[0] == found[1]
    assert [e is None for e in found[0]] == [True, False, True, True]
    assert "step 1" in found[0][1]
    assert "rank 1" in found[0][1]
    assert [e.step for e in lastgood.entries(root)] == [4, 3]


class Gate:
    """torch.distributed's store, on which saves in the background wait until it is opened."""

    def __init__(self):
        self.keys = StoreKeys()
        self.open = threading.Event()

    def set(self, key, value):
        assert self.open.wait(60)
        self.keys.set(key, value)

    def get(self, key):
        return self.keys.get(key)


def gated(rank, root):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lastgood").addHandler(handler)
    logging.getLogger("lastgood").setLevel(logging.INFO)
    trainer, gate = Trainer(), Gate()
    trainer.state.vars["tokens"] = 100
    with Checkpointer(root, every=1, when_busy="skip", kv=gate, timeout=60) as ckpt:
        run = ckpt.resume(trainer.state)
        for batches in run.steps(1000):
            trainer.train(batches)
            ckpt.step(trainer.state)
            trainer.state.vars["tokens"] += 1
            if ckpt.completed == 3:
                break
        skipped = ckpt.status().saves_skipped
        with torch.no_grad():
            trainer.model.weight.add_(1)  # read by nobody: the saves of steps 2 and 3 were left out
        trainer.train(next(ckpt.batches(1)))
        early = list(said)
        gate.open.set()
        durable = ckpt.wait().step
    late = said[len(early) :]
    entries = [e.step for e in lastgood.entries(root)]
    gate = Gate()
    try:
        with Checkpointer(root, every=1, kv=gate, timeout=60) as ckpt:
            for batches in ckpt.resume(trainer.state).steps(5):
                trainer.train(batches)
                ckpt.step(trainer.state)
                trainer.train(batches)
                threading.Timer(0.3, gate.open.set).start()
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    return skipped, early, durable, late, entries, [e.step for e in lastgood.entries(root)]


def test_k04_f059_f062_f067_saved_is_said_when_it_is_durable_and_the_end_waits(root, tmp_path):
    found = on_processes(2, tmp_path, gated, str(root))
    assert not any(isinstance(f, BaseException) for f in found), found
    for rank, (skipped, early, durable, late, entries, after) in enumerate(found):
        assert (skipped, durable, entries, after) == (2, 1, [1], [2, 1]), rank
        assert not any("is saved" in text for text in early)
        if rank == 0:
            assert any("saving step 1 in the background" in text for text in early)
            assert any("the save of step 2 is left out" in text for text in early)
            assert any("step 1 is saved" in text for text in late)
    # What went on behind the launch is not in it.
    assert lastgood.open(f"{root}@1").state["vars"] == {"tokens": 100}


def only_rank_0(rank, root, done):
    trainer = Trainer()
    with Checkpointer(root, timeout=3) as ckpt:
        ckpt.resume(trainer.state)
        if rank == 0:
            text = told(lambda: ckpt.save(trainer.state))
            open(f"{done}-0", "x").close()
            return text
        stay_until(done, 0)
    return None


def test_k06_f103_saving_on_one_rank_alone_times_out_and_names_the_others(root, tmp_path):
    text = on_processes(2, tmp_path, only_rank_0, str(root), str(tmp_path / "done"))[0]
    assert text.startswith("TimeoutError")
    assert "rank 1 did not arrive within 3000 ms" in text


def preempted(rank, root):
    trainer = Trainer()
    with Checkpointer(root, timeout=60, grace="20s") as ckpt:
        for batches in ckpt.resume(trainer.state).steps(100_000):
            trainer.train(batches)
            if rank == 1 and ckpt.completed == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            ckpt.step(trainer.state)
        return ckpt.stopping, ckpt.completed, [e.step for e in lastgood.entries(root)]


def test_k20_a_signal_on_one_rank_ends_all_after_the_same_step(root, tmp_path):
    found = on_processes(2, tmp_path, preempted, str(root))
    assert not any(isinstance(f, BaseException) for f in found), found
    assert found[0] == found[1]
    stopping, completed, steps = found[0]
    assert stopping
    assert steps == [completed]
