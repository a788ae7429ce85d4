# SPDX-License-Identifier: Apache-2.0
"""Training goes on while a save is in the background: every checkpoint is what the state was at its step, bit for bit."""

import copy
import os
import pickle

import lastgood
import pytest
import torch
from lastgood import staging
from lastgood.checkpointer import Checkpointer
from torch import nn
from training import EMA, State

STEPS = 4
WIDE = 400  # some hundred kB a layer, so that copies are under way when the next step begins


def seeded():
    torch.manual_seed(0)


class Scene:
    """A model and its way to train. ``tensors`` is all that a checkpoint must have, by name."""

    def __init__(self):
        seeded()
        self.model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE))
        self.optimizers = self.optimizer()
        self.state = State(model=self.model, optim=self.optimizers, **self.others())

    def optimizer(self):
        return [torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)]

    def others(self):
        return {}

    def backward(self):
        self.model(torch.randn(4, WIDE)).square().mean().backward()

    def train(self):
        self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Foreach(Scene):
    pass


class Fused(Scene):
    def optimizer(self):
        return [torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)]


class Sgd(Scene):
    def optimizer(self):
        return [torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)]


class Clipped(Scene):
    def train(self):
        self.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()


class BatchNorm(Scene):
    """Running statistics change in the forward pass, right after the launch."""

    def __init__(self):
        super().__init__()
        self.model.append(nn.BatchNorm1d(WIDE))
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-2)]
        self.state = State(model=self.model, optim=self.optimizers)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDE, WIDE))

    def forward(self, x):
        self.seen += 1
        return x


class BufferInForward(Scene):
    def __init__(self):
        super().__init__()
        self.model.append(Counter())


class Target(Scene):
    """A copy of the model that follows it, written by nobody's optimizer, here even before the update."""

    def others(self):
        self.target = copy.deepcopy(self.model)
        return {"target": self.target}

    def train(self):
        with torch.no_grad():
            for t, p in zip(self.target.parameters(), self.model.parameters(), strict=True):
                t.lerp_(p, 0.1)
        super().train()


class Average(Scene):
    def others(self):
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        return {"ema": EMA(self.average)}

    def train(self):
        self.average.update_parameters(self.model)
        super().train()


class Gan(Scene):
    """The first optimizer's step is the fence for both, since it is the first that writes."""

    def __init__(self):
        seeded()
        self.model = nn.Sequential(nn.Linear(8, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE))
        self.disc = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 1))
        self.optimizers = [
            torch.optim.AdamW(self.model.parameters(), lr=1e-3),
            torch.optim.AdamW(self.disc.parameters(), lr=1e-3),
        ]
        self.state = State(model=self.model, disc=self.disc, optim=self.optimizers)

    def train(self):
        generator, discriminator = self.optimizers
        fake = self.model(torch.randn(4, 8))
        (self.disc(fake.detach()) - self.disc(torch.randn(4, WIDE))).mean().backward()
        discriminator.step()
        discriminator.zero_grad()
        (-self.disc(self.model(torch.randn(4, 8)))).mean().backward()
        generator.step()
        generator.zero_grad()
        discriminator.zero_grad()


class InBackward(Scene):
    """An optimizer for each parameter, which steps when its gradient is there."""

    def optimizer(self):
        made = {p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in self.model.parameters()}

        def step(p):
            made[p].step()
            made[p].zero_grad()

        for p in made:
            p.register_post_accumulate_grad_hook(step)
        return list(made.values())

    def train(self):
        self.backward()


class Lbfgs(Scene):
    """Writes parameters many times within one step."""

    def optimizer(self):
        return [torch.optim.LBFGS(self.model.parameters(), lr=1e-2, max_iter=2)]

    def train(self):
        def closure():
            self.optimizers[0].zero_grad()
            loss = self.model(torch.ones(2, WIDE)).square().mean()
            loss.backward()
            return loss

        self.optimizers[0].step(closure)
        self.optimizers[0].zero_grad()


class SkippedSteps(Scene):
    """As a gradient scaler does: no update in every other step."""

    count = 0

    def train(self):
        self.count += 1
        self.backward()
        if self.count % 2:
            self.optimizers[0].step()
        self.optimizers[0].zero_grad()


class Frozen(Scene):
    """Parameters that no gradient reaches, and somebody writes."""

    def __init__(self):
        super().__init__()
        self.model[0].requires_grad_(False)

    def train(self):
        with torch.no_grad():
            self.model[0].weight.mul_(0.5)
        super().train()


class Stranger(Scene):
    """An optimizer that the state does not know writes first."""

    def __init__(self):
        super().__init__()
        self.stranger = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def train(self):
        self.backward()
        self.stranger.step()
        super().train()


class Loads(Scene):
    """Weights are loaded into the model between two steps."""

    def train(self):
        weights = {n: t + 1 for n, t in self.model.state_dict().items()}
        self.model.load_state_dict(weights)
        super().train()


class LoadsOptimizer(Scene):
    def train(self):
        saved = self.optimizers[0].state_dict()
        for values in saved["state"].values():
            values["exp_avg"] = values["exp_avg"] + 1
        self.optimizers[0].load_state_dict(saved)
        super().train()


SCENES = [
    Foreach, Fused, Sgd, Clipped, BatchNorm, BufferInForward, Target, Average, Gan, InBackward, Lbfgs, SkippedSteps,
    Frozen, Stranger, Loads, LoadsOptimizer,
]  # fmt: skip


def snapshot(scene):
    """A copy of all tensors, made at once, by where they are in the state."""
    found = {}
    modules = {"model": scene.model, "disc": getattr(scene, "disc", None), "target": getattr(scene, "target", None)}
    for key, module in modules.items():
        if module is not None:
            dot = "" if key == "model" else f"{key}."
            found |= {dot + n: t.detach().clone() for n, t in module.state_dict().items()}
    return found


def moments(scene):
    """All tensors of the optimizers' state, in an order of their own."""
    found = []
    for optimizer in scene.optimizers:
        for values in optimizer.state.values():
            found += [v.detach().clone() for v in values.values() if isinstance(v, torch.Tensor)]
    return found


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.fixture
def saves(monkeypatch):
    """Every save that is launched."""
    made = []
    launch = lastgood.Session.launch

    def record(self, *args, **kwargs):
        made.append(launch(self, *args, **kwargs))
        return made[-1]

    monkeypatch.setattr(lastgood.Session, "launch", record)
    return made


@pytest.mark.parametrize("check", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda s: s.__name__)
def test_k04_f056_every_checkpoint_is_the_state_at_its_step(scene, check, root, saves):
    """``check``: the library finds every lazy tensor that is written before its fence, however quick the copy was."""
    s = scene()
    wanted = {}
    with Checkpointer(root, every=1, check_sources=check) as ckpt:
        ckpt.resume(s.state)
        for step in range(1, STEPS + 1):
            s.train()
            wanted[step] = snapshot(s), moments(s)
            ckpt.step(s.state)
    lazy = [save.launched.bytes_lazy for save in saves]
    assert max(lazy) > WIDE * WIDE * 4, "nothing was lazy: the test shows nothing"
    for step, (tensors, state) in wanted.items():
        stored = lastgood.load(f"{root}@{step}", framework="torch")
        for name, t in tensors.items():
            assert same(stored[name], t), (step, name)
        # Whatever its moments are called, each of them is there.
        left = [t for name, t in stored.items() if name.startswith("optim.") and isinstance(t, torch.Tensor)]
        for t in state:
            found = next((i for i, other in enumerate(left) if same(t, other)), None)
            assert found is not None, (step, list(t.shape))
            left.pop(found)


def names_of_lazy(scene, ckpt):
    chooser = ckpt._fences.chooser(scene.state.optimizers)
    found = {n for n, t in scene.model.state_dict(keep_vars=True).items() if chooser(t)}
    states = [v for o in scene.optimizers for s in o.state.values() for v in s.values() if torch.is_tensor(v)]
    return found, [chooser(t) for t in states]


def test_nothing_is_lazy_before_its_optimizer_was_seen_to_step(root):
    s = Foreach()
    with Checkpointer(root) as ckpt:
        ckpt.resume(s.state)
        assert names_of_lazy(s, ckpt) == (set(), [])
        s.train()
        assert names_of_lazy(s, ckpt)[0] == set(), "the step is not over"
        ckpt.step(s.state)
        names, states = names_of_lazy(s, ckpt)
        assert names == {n for n, _ in s.model.named_parameters()}
        assert all(states)
        assert len(states) == 3 * len(names)
        ckpt.step(s.state)
        assert names_of_lazy(s, ckpt)[0] == set(), "the last step went without the hook"


def test_buffers_and_frozen_parameters_are_never_lazy(root):
    for scene in (BatchNorm, Frozen):
        s = scene()
        with Checkpointer(root) as ckpt:
            ckpt.resume(s.state)
            s.train()
            ckpt.step(s.state)
            names, _ = names_of_lazy(s, ckpt)
        assert names
        assert not any(n.startswith(("2.running", "2.num")) for n in names)
        for name in names:
            assert s.model.get_parameter(name).requires_grad
        os.rename(root, f"{root}-{scene.__name__}")


def test_a_parameter_of_two_optimizers_is_lazy_only_if_both_were_seen(root):
    s = Foreach()
    late = torch.optim.SGD([s.model[0].weight], lr=0.1)
    s.state = State(model=s.model, optim=[*s.optimizers, late])
    with Checkpointer(root) as ckpt:
        ckpt.resume(s.state)
        s.train()
        ckpt.step(s.state)
        names, _ = names_of_lazy(s, ckpt)
        assert names == {"0.bias", "2.weight", "2.bias"}


def test_views_and_shards_of_a_parameter_count_as_it(root):
    s = Foreach()
    with Checkpointer(root) as ckpt:
        ckpt.resume(s.state)
        s.train()
        ckpt.step(s.state)
        chooser = ckpt._fences.chooser(s.state.optimizers)
        weight = s.model[0].weight
        assert chooser(weight.detach())
        assert not chooser(weight.detach()[1:])
        assert not chooser(weight.detach().clone())
        assert not chooser(torch.empty(0))
        assert not chooser("no tensor")


def test_eager_copies_all_before_a_step_returns(root, saves):
    s = Foreach()
    with Checkpointer(root, every=1, background="eager") as ckpt:
        ckpt.resume(s.state)
        for _ in range(3):
            s.train()
            ckpt.step(s.state)
    # What is left is the library's own, of values of this rank.
    assert max(save.launched.bytes_lazy for save in saves) < WIDE * WIDE


def write(s):
    with torch.no_grad():
        s.model[2].weight.add_(1)


def test_k04_a_parameter_that_is_written_before_the_fence_is_an_error_that_names_it(root):
    s = Foreach()
    named = pytest.raises(lastgood.ConflictError, match=r"2\.weight.*ckpt\.fence\(\)")
    with named, Checkpointer(root, every=1) as ckpt:
        ckpt.resume(s.state)
        for _ in range(2):
            s.train()
            ckpt.step(s.state)
        write(s)
        s.train()
    # And its checkpoint, which may have been torn, is not resumed from.
    assert [e.step for e in lastgood.entries(root) if e.kind == "committed"] == [1]


def write_unseen(s):
    s.model[2].weight.data.add_(1)


@pytest.mark.parametrize(("write", "says"), [(write, r"2\.weight changed"), (write_unseen, r'"2\.weight" was changed')])
def test_k04_checked_sources_fail_the_save_of_such_a_parameter(write, says, root):
    s = Foreach()
    named = pytest.raises(lastgood.ConflictError, match=says)
    with named, Checkpointer(root, every=1, check_sources=True) as ckpt:
        ckpt.resume(s.state)
        for _ in range(2):
            s.train()
            ckpt.step(s.state)
        write(s)
        s.train()
    assert [e.step for e in lastgood.entries(root) if e.kind == "committed"] == [1]


def test_a_fence_of_one_s_own_allows_writing(root):
    s = Foreach()
    with Checkpointer(root, every=1, check_sources=True) as ckpt:
        ckpt.resume(s.state)
        for _ in range(4):
            s.train()
            ckpt.step(s.state)
            ckpt.fence()
            write(s)
    assert lastgood.open(root).step == 4


def test_hooks_go_with_the_checkpointer_and_keep_nothing_alive(root):
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    s = Foreach()
    with Checkpointer(root) as ckpt:
        ckpt.resume(s.state)
        assert len(hooks) == before + 1
        assert len(s.model._load_state_dict_pre_hooks) == 1
    assert len(hooks) == before
    assert len(s.model._load_state_dict_pre_hooks) == 0
    fences = staging.Fences(lambda: None, lambda tensors: None)
    assert len(hooks) == before + 1
    del fences
    assert len(hooks) == before


def test_a_model_under_a_checkpointer_can_be_copied_and_pickled(root):
    s = Foreach()
    with Checkpointer(root) as ckpt:
        ckpt.resume(s.state)
        again = pickle.loads(pickle.dumps(s.model))
        assert same(again[0].weight, s.model[0].weight)
        copied = copy.deepcopy(s.model)
        copied.load_state_dict(s.model.state_dict())


def test_a_compiled_step_counts_as_not_seen(monkeypatch):
    """What is traced runs later without its hooks."""
    s = Foreach()
    fences = staging.Fences(lambda: None, lambda tensors: None)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    s.train()
    fences.step_done()
    assert not fences.chooser(s.optimizers)(s.model[0].weight)
    fences.close()


def test_gradients_and_names_are_found_in_all_modules_and_bare_optimizers():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    bare = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*a.parameters(), bare], lr=0.1)
    modules = {"model": a, "disc": b}
    assert staging.with_gradients(modules, [optimizer]) == []
    a.weight.grad, b.bias.grad, bare.grad = torch.ones(2, 2), torch.ones(2), torch.ones(3)
    found = staging.with_gradients(modules, [optimizer])
    assert found == ["weight", "disc.bias", "a parameter of shape [3] of optimizer 0"]
    assert staging.name_of(b.bias, modules, [optimizer]) == "disc.bias"
    optimizer.state[a.weight]["m"] = moment = torch.ones(2, 2)
    assert staging.name_of(moment, modules, [optimizer]) == "optim.state.weight.m"
    assert staging.name_of(torch.ones(5), modules, [optimizer]) == "a tensor of shape [5]"
