# SPDX-License-Identifier: Apache-2.0
"""The check of a resume before it is needed: save, some steps, load, the same steps again."""

import os
import tempfile

import lastgood
import pytest
import torch
from states import bits
from test_gloo import on_processes
from torch import nn
from training import numbers_loader


class Program:
    """Dropout, batch statistics, a scheduler, an average, data that is drawn by workers."""

    def __init__(self, workers=0, **more):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optim, 2, 0.5)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.loader = numbers_loader(64, 4, workers)
        named = {"model": self.model, "optim": self.optim, "scheduler": self.scheduler, "loader": self.loader,
                 "ema": lastgood.EMA(self.average)}  # fmt: skip
        named.update(more)
        self.state = lastgood.State(**{k: v for k, v in named.items() if v is not None})
        self.state.vars["steps"] = 0
        self.noise = torch.Generator().manual_seed(1)
        self.outside = 0
        self.uses = ()

    def train(self, batches):
        self.outside += 1
        total = 0.0
        for indices, drawn in batches:
            x = drawn.unsqueeze(1).expand(-1, 4) + indices.unsqueeze(1) / 64
            if "noise" in self.uses:
                x = x + torch.rand(x.shape, generator=self.noise)
            if "count" in self.uses:
                x = x * self.outside
            loss = self.model(x).square().mean() / len(batches)
            loss.backward()
            total += loss.item()
        self.optim.step()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        self.optim.zero_grad()
        self.state.vars["steps"] += 1
        return {"loss": total, "lr": self.scheduler.get_last_lr()}

    def everything(self):
        return (
            bits([self.model.state_dict(), self.optim.state_dict(), self.average.state_dict()]),
            dict(self.state.vars),
            self.loader.position,
            self.scheduler.state_dict(),
            bits(torch.get_rng_state()),
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_k09_f152_three_steps_and_the_same_after_a_load_have_the_same_bits(workers):
    program = Program(workers)
    program.train([next(iter(program.loader))])  # as in the middle of a run
    program.loader.used(program.loader.last_samples)
    before = program.everything()
    check = lastgood.check_resume(program.state, program.train, steps=3, accumulate=2)
    assert check == (3, (), None, ())
    assert check.equal
    assert "3 steps and the same ones after a load have the same bits" in str(check)
    # Nothing has happened.
    assert program.everything() == before
    assert [f for f in os.listdir(tempfile.gettempdir()) if f.startswith("lastgood-check-")] == []


@pytest.mark.parametrize("uses", ["noise", "count"])
def test_k09_f152_what_a_step_depends_on_and_the_state_has_not_is_found_at_the_first_step(uses):
    program = Program()
    program.uses = (uses,)
    check = lastgood.check_resume(program.state, program.train)
    assert not check.equal
    assert check.after_loading == ()
    assert check.first_step == 1
    assert {"0.weight", "ema.0.weight", "optim.state.0.weight.exp_avg"} <= set(check.at_end)
    assert "something that the steps depend on is not in the state" in str(check)
    # A generator that is registered is no longer found.
    if uses == "noise":
        program.state = lastgood.State(
            model=program.model, optim=program.optim, scheduler=program.scheduler, loader=program.loader,
            ema=lastgood.EMA(program.average), random=lastgood.random.RandomPart({"noise": program.noise}),
        )  # fmt: skip
        program.state.vars["steps"] = 0
        assert lastgood.check_resume(program.state, program.train).equal


def test_k09_f152_a_scheduler_that_is_not_registered_is_found():
    program = Program(scheduler=None)
    check = lastgood.check_resume(program.state, program.train, steps=3)
    assert check.first_step is not None
    assert any(name.startswith("optim.groups") for name in check.at_end)


class Forgets:
    """Loses something when it is loaded."""

    def __init__(self):
        self.seen = 4.0
        self.cache = torch.arange(3.0)

    def state_dict(self):
        return {"seen": self.seen, "cache": self.cache}

    def load_state_dict(self, state):
        self.seen = state["seen"] + 1
        self.cache = state["cache"] * 2


def test_k09_f149_f167_state_that_changes_when_it_is_loaded_is_named_at_once():
    program = Program(thing=Forgets())
    check = lastgood.check_resume(program.state, program.train, steps=1)
    assert check.after_loading == ("thing", "thing.cache")
    assert check.first_step is None
    assert "right after the load, before any step: thing, thing.cache" in str(check)


def test_without_a_loader_the_steps_find_their_own_data():
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = iter(torch.rand(100, 2))

    def train(batches, source=lambda: torch.ones(2)):
        assert batches == []
        model(source()).sum().backward()
        opt.step()
        opt.zero_grad()

    state = lastgood.State(model=model, optim=opt)
    assert lastgood.check_resume(state, train).equal
    check = lastgood.check_resume(state, lambda b: train(b, lambda: next(data)))
    assert check.first_step is None  # nothing was returned
    assert "weight" in check.at_end


def test_wrong_arguments_are_refused():
    program = Program()
    with pytest.raises(lastgood.InvalidError, match="steps is 0"):
        lastgood.check_resume(program.state, program.train, steps=0)
    with pytest.raises(lastgood.InvalidError, match="no state"):
        lastgood.check_resume(program.model, program.train)


def two(rank, folder):
    program = Program()

    def train(batches):
        for indices, drawn in batches:
            program.model(drawn.unsqueeze(1).expand(-1, 4) + indices.unsqueeze(1)).square().mean().backward()
        for p in program.model.parameters():
            torch.distributed.all_reduce(p.grad)
        program.optim.step()
        program.optim.zero_grad()
        if rank == 1 and program.uses:
            program.outside += 1
        return program.outside

    state = lastgood.State(model=program.model, optim=program.optim, loader=program.loader)
    good = lastgood.check_resume(state, train, folder=folder)
    program.uses = ("count",)
    bad = lastgood.check_resume(state, train, folder=folder)
    return good, bad


def test_k09_f152_on_two_ranks_all_get_the_same_answer(tmp_path):
    (tmp_path / "checks").mkdir()
    found = on_processes(2, tmp_path, two, str(tmp_path / "checks"))
    assert not any(isinstance(f, BaseException) for f in found), found
    assert found[0] == found[1]
    good, bad = found[0]
    assert good.equal
    assert bad == (3, (), 1, ())
    assert os.listdir(tmp_path / "checks") == []
