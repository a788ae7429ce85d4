# SPDX-License-Identifier: Apache-2.0
"""Optimizers, schedulers: names, exact continuation, regrouping."""

import functools
import subprocess
import sys

import lastgood
import pytest
import torch
from counting import calls
from lastgood.parts import Saving
from states import bits, net, plain, ranks, resume, save, train
from torch import nn, optim
from torch.optim import lr_scheduler

OPTIMIZERS = {
    "adamw": optim.AdamW,
    "adamw foreach": functools.partial(optim.AdamW, foreach=True),
    "adamw fused": functools.partial(optim.AdamW, fused=True),
    "adamw amsgrad": functools.partial(optim.AdamW, amsgrad=True),
    "adamw tensor lr": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2)),
    "adam": optim.Adam,
    "sgd": functools.partial(optim.SGD, lr=0.1),
    "sgd momentum": functools.partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "asgd": optim.ASGD,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rmsprop": functools.partial(optim.RMSprop, momentum=0.9, centered=True),
    "rprop": optim.Rprop,
    "adafactor": optim.Adafactor,
    "lbfgs": functools.partial(optim.LBFGS, history_size=3, max_iter=4),
}


def state_of(opt):
    """Its state by position, and its options."""
    saved = opt.state_dict()
    return bits(saved["state"]), [{k: bits(v) for k, v in g.items()} for g in saved["param_groups"]]


def sorted_state(opt):
    state, groups = state_of(opt)
    return {i: dict(sorted(s.items())) for i, s in state.items()}, [dict(sorted(g.items())) for g in groups]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_k09_a_resumed_optimizer_goes_on_with_the_same_bits(kind, root):
    """F151, F167: state and options equal what they were, and so do the steps after."""
    model = net()
    opt = OPTIMIZERS[kind](model.parameters())
    opt.param_groups[0]["weight_decay" if "weight_decay" in opt.param_groups[0] else "mine"] = 0.01
    train(model, [opt])
    save(root, plain(model=model, optim=opt))
    fresh = net(7)
    other = OPTIMIZERS[kind](fresh.parameters())
    group = other.param_groups[0]
    resume(root, plain(model=fresh, optim=other))
    assert other.param_groups[0] is group
    assert sorted_state(other) == sorted_state(opt)
    assert train(fresh, [other], seed=2) == train(model, [opt], seed=2)
    assert bits(fresh.state_dict()) == bits(model.state_dict())


@pytest.mark.parametrize("kind", ["adamw", "sgd momentum", "lbfgs"])
def test_state_that_is_there_keeps_its_memory(kind, root):
    model = net()
    opt = OPTIMIZERS[kind](model.parameters())
    train(model, [opt])
    save(root, plain(model=model, optim=opt))
    wanted = sorted_state(opt)
    memory = {id(p): {k: v.data_ptr() for k, v in s.items() if torch.is_tensor(v)} for p, s in opt.state.items()}
    train(model, [opt], seed=3)
    resume(root, plain(model=model, optim=opt))
    assert sorted_state(opt) == wanted
    if kind != "lbfgs":  # which makes new tensors at each step
        assert memory == {id(p): {k: v.data_ptr() for k, v in s.items()} for p, s in opt.state.items()}


def test_names_are_those_of_torchs_distributed_checkpoint(root):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = torch.compile(net())
    opt = optim.AdamW(model.parameters(), amsgrad=True)
    train(model._orig_mod, [opt])
    theirs = get_optimizer_state_dict(model, opt, options=StateDictOptions(flatten_optimizer_state_dict=True))
    save(root, plain(model=model, optim=opt))
    checkpoint = lastgood.open(root)
    wanted = {f"optim.{n}": t for n, t in theirs.items() if n.startswith("state.")}
    assert {n for n in checkpoint if n.startswith("optim.")} == set(wanted)
    assert all(torch.equal(checkpoint[n].torch(), t) for n, t in wanted.items())


def test_nothing_is_stepped_and_no_gradient_or_hook_is_touched(root):
    model = net()
    opt = optim.AdamW(model.parameters())
    calls = []
    opt.register_step_pre_hook(lambda *a: calls.append("pre"))
    opt.register_state_dict_pre_hook(lambda *a: calls.append("state_dict"))
    opt.register_load_state_dict_pre_hook(lambda *a: calls.append("load"))
    sum(p.sum() for p in model.parameters()).backward()
    grads = [p.grad for p in model.parameters()]
    save(root, plain(model=model, optim=opt))
    resume(root, plain(model=model, optim=opt))
    assert calls == []
    assert opt.state == {}
    assert all(a is p.grad for a, p in zip(grads, model.parameters(), strict=True))


def test_parameters_that_had_no_state_have_none_again(root):
    model = net()
    opt = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model[3].requires_grad_(False)
    train(model, [opt])
    assert len(opt.state) == 4
    save(root, plain(model=model, optim=opt))
    fresh = net()
    other = optim.SGD(fresh.parameters(), 0.1, momentum=0.9)
    train(fresh, [other])
    assert len(other.state) == 6
    resume(root, plain(model=fresh, optim=other))
    assert {id(p) for p in other.state} == {id(p) for p in list(fresh.parameters())[:4]}


def test_k09_moments_follow_names_and_not_positions(root):
    """F163, F164, F139: the definition order has changed."""

    class Pair(nn.Module):
        def __init__(self, order):
            super().__init__()
            for name in order:
                setattr(self, name, nn.Linear(3, 3, bias=False))

    model = Pair("ab")
    opt = optim.AdamW(model.parameters(), lr=0.1)
    (model.a.weight.sum() + 2 * model.b.weight.sum()).backward()
    opt.step()
    save(root, plain(model=model, optim=opt))
    fresh = Pair("ba")
    other = optim.AdamW(fresh.parameters(), lr=0.1)
    resume(root, plain(model=fresh, optim=other))
    for name in "ab":
        mine, theirs = (o.state[getattr(m, name).weight]["exp_avg"] for m, o in ((fresh, other), (model, opt)))
        assert torch.equal(mine, theirs)
    assert not torch.equal(opt.state[model.a.weight]["exp_avg"], opt.state[model.b.weight]["exp_avg"])


def test_k08_single_numbers_and_moments_are_told_apart(root):
    """F134: a scalar step stays one, whatever the shape of the parameter."""
    scalar = nn.Parameter(torch.tensor(2.0))
    one = nn.Parameter(torch.ones(1))
    opt = optim.AdamW([scalar, one])
    (scalar + one).sum().backward()
    opt.step()
    save(root, plain(scalar=scalar, one=one, optim=opt))
    assert [lastgood.open(root)[f"optim.state.{n}.step"].shape for n in ("scalar", "one")] == [(), ()]
    other = optim.AdamW([scalar, one])
    resume(root, plain(scalar=scalar, one=one, optim=other))
    assert sorted_state(other) == sorted_state(opt)


# ---------------------------------------------------------------- several of them


def test_several_optimizers_share_the_names_and_a_shared_parameter_names_its_own(root):
    def build(seed):
        torch.manual_seed(seed)
        g, d, both = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.randn(2))
        opts = [
            optim.AdamW([*g.parameters(), both], lr=0.1),
            optim.SGD([*d.parameters(), both], lr=0.2, momentum=0.9),
        ]
        return g, d, both, opts

    g, d, both, opts = build(0)
    for o in opts:
        (sum(p.square().sum() for p in (*g.parameters(), *d.parameters(), both))).backward()
        o.step()
    save(root, plain(model=g, disc=d, both=both, optim=opts))
    found = {n for n in lastgood.open(root) if ".state." in n}
    assert {"optim.state.weight.exp_avg", "optim.state.disc.weight.momentum_buffer"} <= found
    assert {"optim.0.state.both.exp_avg", "optim.1.state.both.momentum_buffer"} <= found
    g2, d2, both2, opts2 = build(1)
    opts2[0].param_groups[0]["lr"] = opts2[1].param_groups[0]["lr"] = 5.0
    resume(root, plain(model=g2, disc=d2, both=both2, optim=opts2))
    assert [sorted_state(o) for o in opts2] == [sorted_state(o) for o in opts]
    assert plain(model=g, disc=d, both=both, opt_g=opts[0], opt_d=opts[1]).optimizers == opts


def test_an_optimizer_for_each_parameter_as_for_steps_in_the_backward_pass(root):
    def build(seed):
        model = net(seed)
        return model, {n.replace(".", "_"): optim.Adam([p], lr=0.01) for n, p in model.named_parameters()}

    def step(p):
        opts[names[p]].step()
        opts[names[p]].zero_grad()

    model, opts = build(0)
    names = {p: n.replace(".", "_") for n, p in model.named_parameters()}
    for p in names:
        p.register_post_accumulate_grad_hook(step)
    train(model, [])
    assert all(o.state for o in opts.values())
    save(root, plain(model=model, optim=opts))
    fresh, others = build(1)
    resume(root, plain(model=fresh, optim=others))
    assert [sorted_state(o) for o in others.values()] == [sorted_state(o) for o in opts.values()]


def test_a_parameter_that_is_in_no_module_of_the_state_is_an_error(root):
    stray = nn.Parameter(torch.zeros(3, 5))
    with pytest.raises(
        lastgood.InvalidError, match=r'"optim": parameter 4 of group 0, of shape \[3, 5\].*State\(…, name='
    ):
        m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        save(root, plain(model=m, optim=optim.SGD([*m.parameters(), stray])))


# ------------------------------------------------------------------------ options


def test_k09_all_options_are_those_that_were_saved(root):
    """F154: not the constructor's, `initial_lr` among them."""
    model = net()
    opt = optim.AdamW(model.parameters(), lr=0.3, weight_decay=0.1, betas=(0.8, 0.7))
    opt.param_groups[0]["initial_lr"] = 0.5
    save(root, plain(model=model, optim=opt))
    other = optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.2)
    resume(root, plain(model=model, optim=other))
    found = {k: other.param_groups[0][k] for k in ("lr", "weight_decay", "betas", "initial_lr")}
    assert found == {"lr": 0.3, "weight_decay": 0.1, "betas": (0.8, 0.7), "initial_lr": 0.5}


def test_options_follow_parameters_into_other_groups_and_a_conflict_is_an_error(root):
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    bare = {"a": a, "b": b, "c": c}
    opt = optim.AdamW([{"params": [a, b], "lr": 0.1}, {"params": [c], "lr": 0.2, "name": "c"}])
    save(root, plain(**bare, optim=opt))
    split = optim.AdamW([{"params": [c]}, {"params": [b]}, {"params": [a]}])
    resume(root, plain(**bare, optim=split))
    assert [g["lr"] for g in split.param_groups] == [0.2, 0.1, 0.1]
    assert split.param_groups[0]["name"] == "c"
    mixed = optim.AdamW([a, c])
    with pytest.raises(
        lastgood.ConflictError,
        match=r"\"optim\", group 0: option 'lr' is 0.1 in the checkpoint for \"a\", and 0.2 for \"c\"",
    ):
        resume(root, plain(**bare, optim=mixed))
    joined = optim.AdamW([b, a])
    with pytest.raises(lastgood.MissingError, match=r'has "optim\.state\.c"'):
        resume(root, plain(**bare, optim=joined))
    resume(root, plain(**bare, optim=joined), optional=("optim.state.c",))
    assert joined.param_groups[0]["lr"] == 0.1


def test_a_learning_rate_that_is_a_tensor_keeps_its_memory(root):
    model = net()
    lr = torch.tensor(0.25)
    save(root, plain(model=model, optim=optim.AdamW(model.parameters(), lr=lr)))
    now = torch.tensor(1.0)
    other = optim.AdamW(model.parameters(), lr=now)
    resume(root, plain(model=model, optim=other))
    assert other.param_groups[0]["lr"] is now
    assert now.item() == 0.25
    plain_lr = optim.AdamW(model.parameters(), lr=1.0)
    resume(root, plain(model=model, optim=plain_lr))
    assert torch.is_tensor(plain_lr.param_groups[0]["lr"])
    save(root, plain(model=model, optim=optim.AdamW(model.parameters(), lr=0.5)), 2)
    resume(root, plain(model=model, optim=other))
    assert other.param_groups[0]["lr"] is now
    assert now.item() == 0.5


def test_parameters_that_are_new_to_the_optimizer_are_told(root):
    model = net()
    save(root, plain(model=model, optim=optim.SGD(list(model.parameters())[:2], 0.1)))
    other = optim.SGD(model.parameters(), 0.2)
    with pytest.raises(lastgood.MissingError, match=r'no optimizer state of "1.weight"'):
        resume(root, plain(model=model, optim=other))
    assert len(resume(root, plain(model=model, optim=other), exact=False).not_restored) == 4
    assert other.param_groups[0]["lr"] == 0.1


def test_an_option_without_a_form_is_refused_with_its_place(root):
    model = net()
    opt = optim.SGD(model.parameters(), 0.1)
    opt.param_groups[0]["f"] = len
    with pytest.raises(lastgood.UnsupportedError, match=r"optimizer \"optim\", group 0: .*\['f'\]"):
        save(root, plain(model=model, optim=opt))


# --------------------------------------------------------------------- schedulers

CLOSED = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 3),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.3, 4),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=9),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 9)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.3, 4), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 4),
    "warm-up around restarts": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=7), lr_scheduler.CosineAnnealingWarmRestarts(o, 2)],
        [7],
    ),
}


@pytest.mark.parametrize("kind", CLOSED)
def test_k09_every_scheduler_goes_on_with_the_same_rates(kind, root):
    """F155, F157, F158"""

    def build():
        model = net()
        opt = optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return model, opt, CLOSED[kind](opt)

    def rates(opt, scheduler, n):
        found = []
        for _ in range(n):
            opt.step()
            scheduler.step()
            found.append([(g["lr"], g.get("momentum")) for g in opt.param_groups])
        return found

    model, opt, scheduler = build()
    rates(opt, scheduler, 5)
    save(root, plain(model=model, optim=opt, scheduler=scheduler))
    fresh, other, again = build()
    resume(root, plain(model=fresh, optim=other, scheduler=again))
    assert bits(again.state_dict()) == bits(scheduler.state_dict())
    assert type(again.state_dict().get("milestones")) is type(scheduler.state_dict().get("milestones"))
    assert rates(other, again, 8) == rates(opt, scheduler, 8)


def test_every_scheduler_of_torch_is_tested():
    with open(__file__, encoding="utf-8") as f:
        tested = f.read()
    assert [n for n in lr_scheduler.__all__ if f"lr_scheduler.{n}(" not in tested and n != "LRScheduler"] == []


def test_k09_a_plateau_scheduler_keeps_its_best_and_its_infinities(root):
    model = net()
    opt = optim.SGD(model.parameters(), 0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, patience=1)
    state = plain(model=model, optim=opt, scheduler=scheduler)
    save(root, state)
    other = optim.SGD(model.parameters(), 0.1)
    again = lr_scheduler.ReduceLROnPlateau(other, patience=1)
    again.step(5.0)
    resume(root, plain(model=model, optim=other, scheduler=again))
    assert again.best == float("inf")
    for s in (scheduler, again):
        for loss in (1.0, 2.0, 3.0, 4.0):
            s.step(loss)
    assert bits(again.state_dict()) == bits(scheduler.state_dict())
    assert other.param_groups[0]["lr"] == opt.param_groups[0]["lr"] < 0.1


def test_a_scheduler_of_a_tensor_rate_keeps_that_a_tensor(root):
    model = net()

    def build():
        opt = optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
        return opt, lr_scheduler.ExponentialLR(opt, 0.5)

    opt, scheduler = build()
    opt.step()
    scheduler.step()
    save(root, plain(model=model, optim=opt, scheduler=scheduler))
    other, again = build()
    resume(root, plain(model=model, optim=other, scheduler=again))
    for o, s in ((opt, scheduler), (other, again)):
        o.step()
        s.step()
        assert torch.is_tensor(o.param_groups[0]["lr"])
        assert o.param_groups[0]["lr"].item() == pytest.approx(0.025)


# -------------------------------------------------------------------------- cost


def test_describing_a_thousand_tensors_of_a_state_costs_a_few_times_what_describing_plain_ones_does(root):
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(125)])
    opt = optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    opt.step()
    state = plain(model=model, optim=opt)
    with lastgood.Session(root) as session:

        def described():
            saving = session.save(1)
            state.save(Saving(saving, 1, ranks()))
            return saving

        def described_plainly():
            saving = session.save(1)
            saving.tensors(tensors)
            return saving

        tensors = {f"t.{i}": torch.zeros(8) for i in range(1000)}
        of_state = calls(lambda: described().abort())
        of_tensors = calls(lambda: described_plainly().abort())
        assert of_state < 5 * of_tensors, (of_state, of_tensors)
        described().commit()
    assert len(lastgood.open(root)) == 1000


def test_importing_the_package_imports_no_torch():
    code = "import lastgood, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
