# SPDX-License-Identifier: Apache-2.0
"""A checkpoint and a state that do not name the same things: in exact mode nothing is lost, and nothing starts anew,
without a word.
"""

import copy

import lastgood
import pytest
import torch
from lastgood.checkpointer import Checkpointer
from lastgood.objects import PerRank
from lastgood.state import EMA, State
from test_gloo import on_processes
from torch import nn
from training import indices_loader


class Parts:
    """All kinds of things that a state has, by key."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        self.disc = nn.Linear(3, 1)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.plain = torch.optim.SGD(self.disc.parameters(), lr=0.1)  # has no tensors of state
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optim, 3)
        self.ema = EMA(torch.optim.swa_utils.AveragedModel(self.model))
        self.cache = PerRank({"n": 1, "rows": torch.ones(2)})
        self.gamma = torch.ones(2)

    def all(self):
        return {
            "model": self.model, "disc": self.disc, "optim": [self.optim, self.plain], "scheduler": self.scheduler,
            "ema": self.ema, "cache": self.cache, "gamma": self.gamma, "loader": indices_loader(40, 2),
        }  # fmt: skip

    def train(self):
        (self.model(torch.ones(2, 3)).sum() + self.disc(torch.ones(2, 3)).sum()).backward()
        for opt in (self.optim, self.plain):
            opt.step()
            opt.zero_grad()


@pytest.fixture
def saved(root):
    """A checkpoint of everything."""
    parts = Parts()
    parts.train()
    state = State(**parts.all())
    state.vars["tokens"] = 7
    with Checkpointer(root) as ckpt:
        ckpt.save(state, step=5)
    return root


def state_without(*keys, seed=1):
    parts = Parts(seed)
    named = parts.all()
    for key in keys:
        if key == "optim.1":
            named["optim"] = [parts.optim]
        else:
            del named[key]
    return parts, State(**named)


# What is missing, as the message names it.
LOST = {
    "scheduler": '"scheduler"',
    "ema": '"ema" (5 names)',
    "cache": '"cache"',
    "gamma": '"gamma"',
    "loader": '"loader" (',
    "optim": '"optim" (',
    "optim.1": '"optim.state.disc" (2 names)',
}


@pytest.mark.parametrize("key", LOST)
def test_k09_what_the_state_does_not_register_is_an_error_that_names_it_and_the_way_out(saved, key):
    _, state = state_without(key)
    with Checkpointer(saved) as ckpt, pytest.raises(lastgood.MissingError) as found:
        ckpt.resume(state)
    text = str(found.value)
    assert f"the checkpoint of step 5 has {LOST[key]}" in text
    assert "register it as it was saved" in text
    assert "resume(state, optional=[" in text


@pytest.mark.parametrize("key", LOST)
def test_what_is_optional_may_be_unregistered_and_is_noted(saved, key):
    _, state = state_without(key)
    name = LOST[key].split('"')[1]
    with Checkpointer(saved) as ckpt:
        run = ckpt.resume(state, optional=[name])
    assert run.step == 5
    note = next(n for n in run.notes if "which the state has not" in n)
    assert LOST[key] in note
    assert "nothing restores that" in note
    assert state.vars == {"tokens": 7}


def test_a_state_that_has_everything_is_told_nothing(saved):
    _, state = state_without()
    with Checkpointer(saved) as ckpt:
        run = ckpt.resume(state, optional=["scheduler"])
    assert not any("has not" in n for n in run.notes)
    assert run.not_restored == ()


def test_k09_a_layer_that_is_gone_is_named_with_its_optimizer_state(root):
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))})
    opt = torch.optim.Adam(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    opt.step()
    opt.zero_grad()
    with Checkpointer(root) as ckpt:
        ckpt.save(State(model=model, optim=opt), step=1)
    small = nn.ModuleDict({"body": nn.Linear(2, 2)})

    def state():
        return State(model=small, optim=torch.optim.Adam(small.parameters()))

    with Checkpointer(root) as ckpt:
        with pytest.raises(lastgood.MissingError, match=r'has "head" \(7 names\), "optim\.state\.head"'):
            ckpt.resume(state())
        with pytest.raises(lastgood.MissingError, match=r'"head"'):
            ckpt.resume(state(), optional=["hea", "head.0", "bod"])
        # The layer's name is enough for what the optimizer has of it.
        run = ckpt.resume(state(), optional=["head"])
    assert len([n for n in run.notes if '"head"' in n]) == 1
    assert torch.equal(small["body"].weight, model["body"].weight)


def test_extra_state_of_a_module_that_is_gone_is_named(root):
    class Counts(nn.Linear):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    with Checkpointer(root) as ckpt:
        ckpt.save(State(model=nn.Sequential(Counts(2, 2))), step=1)
    with Checkpointer(root) as ckpt, pytest.raises(lastgood.MissingError, match=r'"model"'):
        ckpt.resume(State(model=nn.Sequential(nn.Linear(2, 2))))


def test_frozen_weights_that_are_gone_are_named(root):
    def state(base):
        model = nn.ModuleDict(
            {"adapter": nn.Linear(2, 2), **({"base": nn.Linear(2, 2).requires_grad_(False)} if base else {})}
        )
        return State(model=model, frozen="skip")

    with Checkpointer(root) as ckpt:
        ckpt.save(state(True), step=1)
    with Checkpointer(root) as ckpt, pytest.raises(lastgood.MissingError, match=r'"base" \(2 names\)'):
        ckpt.resume(state(False))


def test_a_tied_name_that_is_gone_is_no_loss(root):
    class Tied(nn.Module):
        def __init__(self, both):
            super().__init__()
            self.embed = nn.Embedding(3, 2)
            if both:
                self.head = nn.Linear(2, 3, bias=False)
                self.head.weight = self.embed.weight

    with Checkpointer(root) as ckpt:
        ckpt.save(State(model=Tied(True)), step=1)
    with Checkpointer(root) as ckpt:
        assert ckpt.resume(State(model=Tied(False))).notes == ()


# ------------------------------------------------------------- the other way round


def test_k09_what_the_checkpoint_lacks_may_be_optional_by_name(root):
    parts = Parts()
    parts.train()
    with Checkpointer(root) as ckpt:
        ckpt.save(State(model=parts.model, optim=parts.optim, random=False), step=2)
    fresh = Parts(1)
    named = fresh.all()
    before = copy.deepcopy(fresh.disc.state_dict())
    with Checkpointer(root) as ckpt:
        # One after the other is named, until all are.
        optional = []
        for _ in range(len(named) + 2):
            try:
                run = ckpt.resume(State(**named), optional=optional)
                break
            except lastgood.MissingError as why:
                text = str(why)
                assert "resume(state, optional=[" in text, text
                found = text.partition("optional=[")[2].partition("]")[0]
                new = [name.strip('" ') for name in found.split(",")]
                assert not set(new) & set(optional), (new, optional)
                optional += new
        assert run.step == 2
    assert {"loader", "scheduler", "cache"} <= set(run.not_restored)
    assert torch.equal(fresh.model[0].weight, parts.model[0].weight)
    for name, t in before.items():
        assert torch.equal(fresh.disc.state_dict()[name], t)


def test_what_both_have_is_restored_though_it_is_optional(saved):
    """The list may stay in the program: it never starts anything anew that a checkpoint has."""
    parts, state = state_without()
    with Checkpointer(saved) as ckpt:
        run = ckpt.resume(state, optional=["model", "optim", "ema", "scheduler", "random", "loader", "0"])
    assert run.not_restored == ()
    assert parts.optim.state[parts.model[0].weight]["step"] == 1


@pytest.mark.parametrize("wrong", ["ema", [""], [3], [None]])
def test_names_that_are_none_are_refused(saved, wrong):
    with Checkpointer(saved) as ckpt, pytest.raises(lastgood.InvalidError, match=r"optional is .*list of names"):
        ckpt.resume(state_without()[1], optional=wrong)


def test_without_exact_it_is_a_note(saved):
    _, state = state_without("scheduler", "optim.1")
    with Checkpointer(saved, exact=False) as ckpt:
        run = ckpt.resume(state)
    note = next(n for n in run.notes if "which the state has not" in n)
    assert '"scheduler"' in note
    assert '"optim.state.disc"' in note


# ------------------------------------------------------------------ several ranks


def stage(rank, seed):
    torch.manual_seed(seed + rank)
    module = nn.ModuleDict({f"block{rank}": nn.Linear(2, 2)})
    opt = torch.optim.AdamW(module.parameters(), lr=0.1 + rank)
    return module, opt


def pipeline(rank, root):
    """Each rank has a stage; then somebody forgets something."""
    module, opt = stage(rank, 0)
    sum(p.sum() for p in module.parameters()).backward()
    opt.step()
    opt.zero_grad()
    found = {}

    def told(**registered):
        fresh, other = stage(rank, 5)
        registered = {"model": [fresh], "optim": other, **registered}
        optional = registered.pop("optional", ())
        state = State(**{k: v for k, v in registered.items() if v is not None})
        with Checkpointer(root, timeout=60) as ckpt:
            try:
                run = ckpt.resume(state, optional=optional)
            except lastgood.Error as why:
                return f"{type(why).__name__}: {why}"
            return all(
                torch.equal(a, b) for a, b in zip(fresh.parameters(), module.parameters(), strict=True)
            ), run.notes

    with Checkpointer(root, timeout=60) as ckpt:
        counter = torch.optim.lr_scheduler.StepLR(opt, 3) if rank == 0 else None
        state = State(model=[module], optim=opt)
        if counter is not None:
            state.add("scheduler", counter)
        ckpt.save(state, step=3)
    # Ranks that see only their part are not accused, and what one rank has is not missing.
    found["whole"] = told(scheduler=torch.optim.lr_scheduler.StepLR(stage(0, 0)[1], 3) if rank == 0 else None)
    found["no scheduler"] = told()
    found["no optimizer"] = told(optim=None, optional=["scheduler"])
    found["optional"] = told(optional=["scheduler"])
    return found


def test_k06_k08_k09_what_no_rank_registers_is_the_same_error_on_all_and_stages_are_not_accused(root, tmp_path):
    found = on_processes(2, tmp_path, pipeline, str(root))
    assert not any(isinstance(f, BaseException) for f in found), found
    for rank, f in enumerate(found):
        assert f["whole"][0] is True, (rank, f)
        assert not any("has not" in note for note in f["whole"][1]), f
        assert f["optional"][0] is True
        assert any('"scheduler"' in note for note in f["optional"][1])
        assert f["no scheduler"] == found[0]["no scheduler"]
    assert found[0]["no scheduler"].startswith('MissingError: the checkpoint of step 3 has "scheduler", which')
    assert found[0]["no optimizer"] == found[1]["no optimizer"]
    assert '"optim" (' in found[0]["no optimizer"]
