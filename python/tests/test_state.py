# SPDX-License-Identifier: Apache-2.0
"""What a training state is made of, on one process: names, ties, wrappers, subclasses, frozen weights, objects."""

import copy
import sys
import types

import lastgood
import pytest
import torch
from lastgood.modules import EMA
from lastgood.objects import PerRank
from lastgood.parts import Part, Saving
from lastgood.state import State
from states import bits, net, plain, ranks, resume, save, train
from torch import nn


def names(root):
    return list(lastgood.open(root))


# ----------------------------------------------------------------- names on disk


def test_the_model_has_bare_names_and_other_modules_begin_with_their_key(root):
    state = plain(model=net(), disc=nn.Linear(3, 1), temperature=nn.Parameter(torch.ones(())))
    save(root, state)
    checkpoint = lastgood.open(root)
    groups = {name: t.group for name, t in checkpoint.items()}
    assert {n for n, g in groups.items() if g == "model"} == set(net().state_dict())
    assert {n for n, g in groups.items() if g == "optim"} == {"disc.weight", "disc.bias", "temperature"}


def test_buffers_that_are_not_persistent_are_not_saved_and_listed_when_restored(root):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(3), persistent=False)
            self.register_buffer("count", torch.zeros(2))

    save(root, plain(model=Rotary()))
    assert names(root) == ["count"]
    other = Rotary()
    other.inv_freq.fill_(7)
    notes = resume(root, plain(model=other)).notes
    assert any("not persistent" in n and '"inv_freq"' in n for n in notes)
    assert other.inv_freq.tolist() == [7] * 3


def test_wrappers_leave_no_trace_in_names(root):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)  # called as wrappers call theirs, and no wrapper
            self.block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    bare = Outer()
    wanted = set(bare.state_dict())
    assert "module.weight" in wanted
    bare.block[1] = checkpoint_wrapper(bare.block[1])
    bare.block = torch.compile(bare.block)
    wrapped = nn.DataParallel(torch.compile(bare)) if not torch.cuda.is_available() else torch.compile(bare)
    opt = torch.optim.AdamW(wrapped.parameters())
    sum(p.sum() for p in wrapped.parameters()).backward()
    opt.step()
    save(root, plain(model=wrapped, optim=opt))
    checkpoint = lastgood.open(root)
    assert {n for n, t in checkpoint.items() if t.group == "model"} == wanted
    assert {
        n.removeprefix("optim.state.").rpartition(".")[0] for n, t in checkpoint.items() if t.group == "optim"
    } == wanted
    fresh = Outer()
    other = torch.optim.AdamW(fresh.parameters())
    resume(root, plain(model=fresh, optim=other))
    assert bits(list(fresh.state_dict().values())) == bits([p.detach() for p in bare.parameters()])
    assert len(other.state) == 6


def test_stages_of_a_pipeline_are_merged_by_name(root):
    class Stage(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.layers = nn.ModuleDict({str(n): nn.Linear(2, 2)})

    stages = [Stage(0), Stage(1)]
    save(root, plain(model=stages))
    assert set(names(root)) == {f"layers.{i}.{n}" for i in (0, 1) for n in ("weight", "bias")}
    assert list(plain(model=stages).modules) == ["model.0", "model.1"]
    with pytest.raises(lastgood.ConflictError, match=r'"weight" names two tensors.*stages of a pipeline'):
        save(root, plain(model=[nn.Linear(2, 2), nn.Linear(2, 2)]), 2)


# ----------------------------------------------------------------------- ties


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("nothing", torch.zeros(0))


def test_k11_tied_weights_are_stored_as_tied_and_stay_tied(root):
    """F194, F199: both names load, the bytes are those of one tensor, and one storage is filled."""
    model = Tied()
    opt = torch.optim.AdamW(model.parameters())
    save(root, plain(model=model, optim=opt))
    checkpoint = lastgood.open(root)
    assert checkpoint["head.weight"].alias_of == "embed.weight"
    assert torch.equal(checkpoint["head.weight"].torch(), model.embed.weight.detach())
    other = Tied()
    weight = other.embed.weight
    resume(root, plain(model=other, optim=torch.optim.AdamW(other.parameters())))
    assert other.embed.weight is weight and other.head.weight is weight
    assert torch.equal(weight.detach(), model.embed.weight.detach())


def test_k11_empty_tensors_are_never_tied(root):
    """F196, F197"""
    save(root, plain(model=Tied()))
    checkpoint = lastgood.open(root)
    assert [checkpoint[n].alias_of for n in ("none", "nothing")] == [None, None]


def test_k11_a_tie_is_found_by_memory_and_only_where_the_view_is_the_same(root):
    base = torch.arange(6.0)
    module = nn.Module()
    module.register_buffer("a", base)
    module.register_buffer("b", base[:])
    module.register_buffer("c", base[:3])
    module.register_buffer("d", base.view(2, 3))
    save(root, plain(model=module))
    checkpoint = lastgood.open(root)
    assert [checkpoint[n].alias_of for n in "abcd"] == [None, "a", None, None]


def test_k11_a_tied_model_reads_what_was_stored_under_one_name_only_or_twice_alike(root, roots):
    weight = torch.randn(5, 3)
    empty = {"none": torch.zeros(0), "nothing": torch.zeros(0)}
    lastgood.save(root, {"head.weight": weight, **empty})
    model = Tied()
    resume(root, plain(model=model))
    assert torch.equal(model.embed.weight.detach(), weight)
    twice, torn = roots.new(), roots.new()
    lastgood.save(twice, {"head.weight": weight, "embed.weight": weight.clone(), **empty})
    resume(twice, plain(model=model))
    lastgood.save(torn, {"head.weight": weight, "embed.weight": weight + 1, **empty})
    with pytest.raises(lastgood.MismatchError, match=r'"head.weight" and "embed.weight" are one tensor here'):
        resume(torn, plain(model=model))


def test_k11_a_weight_that_two_modules_share_is_one_in_memory_and_in_the_optimizer(root):
    shared = nn.Parameter(torch.randn(3, 3))
    g, d = nn.Linear(3, 3), nn.Linear(3, 3)
    g.weight = d.weight = shared
    save(root, plain(model=g, disc=d, optim=torch.optim.SGD([*g.parameters(), d.bias])))
    checkpoint = lastgood.open(root)
    assert checkpoint["disc.weight"].group == "optim"  # other tools open the group "model"
    saved = shared.detach().clone()
    with torch.no_grad():
        shared.zero_()
    resume(root, plain(model=g, disc=d, optim=torch.optim.SGD([*g.parameters(), d.bias])))
    assert g.weight is d.weight
    assert torch.equal(shared.detach(), saved)


# --------------------------------------------------------- tensors of all kinds


@pytest.mark.parametrize("where", ["save", "resume"])
def test_k11_tensors_without_values_are_refused_by_name(where, root):
    """F200"""
    from torch._subclasses.fake_tensor import FakeTensorMode

    freed = nn.Linear(2, 2)
    freed.weight.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = nn.Linear(2, 2)
    cases = {
        r'"0.weight" is on the meta device.*to_empty': nn.Sequential(nn.Linear(2, 2, device="meta")),
        r'"weight" has no memory now': freed,
        r'"weight" is a FakeTensor': fake,
        r'"weight" is not initialised: run one forward pass': nn.LazyLinear(2),
    }
    save(root, plain(model=nn.Linear(2, 2)))
    for step, (message, module) in enumerate(cases.items(), 2):
        with pytest.raises(lastgood.InvalidError, match=message):
            save(root, plain(model=module), step) if where == "save" else resume(root, plain(model=module))
    assert lastgood.open(root).step == 1


def test_k12_expanded_and_strided_tensors_come_back_into_their_own_memory(root):
    """F214"""

    def module(fill):
        m = nn.Module()
        m.weight = nn.Parameter(torch.full((4, 3), fill).t())
        m.register_buffer("wide", torch.full((3, 1), fill).expand(3, 5))
        m.register_buffer("last", torch.full((2, 3, 4, 4), fill).to(memory_format=torch.channels_last))
        return m

    saved = module(0.0)
    with torch.no_grad():
        saved.weight.copy_(torch.randn(3, 4))
        saved.wide[:, :1] = torch.randn(3, 1)
        saved.last.normal_()
    save(root, plain(model=saved))
    fresh = module(9.0)
    memory = {n: (t.data_ptr(), t.stride()) for n, t in fresh.state_dict().items()}
    resume(root, plain(model=fresh))
    assert bits(fresh.state_dict()) == bits(saved.state_dict())
    assert memory == {n: (t.data_ptr(), t.stride()) for n, t in fresh.state_dict().items()}


def test_k12_an_expanded_tensor_does_not_take_values_that_it_cannot_hold(root):
    lastgood.save(root, {"wide": torch.arange(6.0).reshape(2, 3)})
    m = nn.Module()
    m.register_buffer("wide", torch.zeros(2, 1).expand(2, 3))
    with pytest.raises(lastgood.MismatchError, match=r'"wide" is expanded from fewer elements'):
        resume(root, plain(model=m))


def test_k09_values_and_dtypes_are_not_changed(root):
    """F151, F166: small moments and fp32 masters keep their bits; another dtype is an error."""
    model = nn.Linear(2, 2).bfloat16()
    master = {"w": torch.full((2, 2), 1 + 2.0**-20)}
    save(root, plain(model=model, master=master, moment=torch.full((2,), 1e-30)))
    fresh, moment = {"w": torch.zeros(2, 2)}, torch.zeros(2)
    resume(root, plain(model=nn.Linear(2, 2).bfloat16(), master=fresh, moment=moment))
    assert fresh["w"][0, 0].item() == 1 + 2.0**-20
    assert moment[0].item() == torch.tensor(1e-30).item()
    with pytest.raises(lastgood.MismatchError, match='"weight"'):
        resume(root, plain(model=nn.Linear(2, 2), master=fresh, moment=moment))


def two_tensor(fill):
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.full((2, 3), fill), torch.full((2, 3), fill + 1))


def test_subclasses_of_other_tensors_are_saved_as_those_and_checked(root):
    m = nn.Module()
    m.q = nn.Parameter(two_tensor(1.0), requires_grad=False)
    save(root, plain(model=m))
    assert set(names(root)) == {"q.a", "q.b"}
    fresh = nn.Module()
    fresh.q = nn.Parameter(two_tensor(5.0), requires_grad=False)
    resume(root, plain(model=fresh))
    assert (fresh.q.a.unique().tolist(), fresh.q.b.unique().tolist()) == ([1.0], [2.0])
    bare = nn.Module()
    bare.q = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(lastgood.MismatchError, match=r'"q" was saved as .*TwoTensor'):
        resume(root, plain(model=bare))
    save(root, plain(model=bare), 2)
    with pytest.raises(lastgood.MismatchError, match=r'"q" was saved as a plain tensor'):
        resume(root, plain(model=fresh))


def test_extra_state_of_modules_is_kept_and_never_pickled(root):
    class Counting(nn.Linear):
        seen = None

        def get_extra_state(self):
            return self.seen

        def set_extra_state(self, state):
            self.seen = state

    model = nn.Sequential(Counting(2, 2), Counting(2, 2))
    model[0].seen, model[1].seen = {"n": (1, 2), "amax": torch.arange(3.0)}, 7
    save(root, plain(model=model))
    fresh = nn.Sequential(Counting(2, 2), Counting(2, 2))
    resume(root, plain(model=fresh))
    assert bits(fresh[0].seen) == bits(model[0].seen)
    assert (type(fresh[0].seen["n"]), fresh[1].seen) == (tuple, 7)
    model[1].seen = object()
    with pytest.raises(lastgood.UnsupportedError, match=r'"model.1._extra_state".*builtins.object has no form'):
        save(root, plain(model=model), 2)


# ---------------------------------------------------------- missing and unused


def test_what_the_checkpoint_lacks_is_an_error_in_exact_mode_and_told_otherwise(root):
    save(root, plain(model=nn.Sequential(nn.Linear(2, 2)), more=nn.Linear(2, 2)))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = model[1].weight.detach().clone()
    with pytest.raises(lastgood.MissingError, match=r'step 1 has no tensor "1.weight", "1.bias"'):
        resume(root, plain(model=model))
    of = resume(root, plain(model=model), exact=False)
    assert of.not_restored == ["1.weight", "1.bias"]
    assert of.notes == ['the checkpoint of step 1 has "more" (2 names), which the state has not: nothing restores that']
    assert torch.equal(model[1].weight.detach(), before)


def test_an_object_of_the_checkpoint_that_is_not_registered_is_an_error_in_exact_mode_and_told_otherwise(root):
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
    save(root, plain(model=model, optim=opt, scheduler=scheduler))
    assert resume(root, plain(model=model, optim=opt, scheduler=scheduler)).notes == []
    with pytest.raises(lastgood.MissingError, match=r'step 1 has "scheduler", which the state has not: register it'):
        resume(root, plain(model=model, optim=opt))
    for how in ({"exact": False}, {"optional": ("scheduler", "optim")}):
        of = resume(root, plain(model=model, optim=opt), **how)
        assert of.notes == ['the checkpoint of step 1 has "scheduler", which the state has not: nothing restores that']
        of = resume(root, plain(model=model), **how)
        assert of.notes == [
            'the checkpoint of step 1 has "optim" (2 names), "scheduler", which the state has not: nothing restores that'
        ]


def test_a_class_in_place_of_its_object_is_refused():
    with pytest.raises(lastgood.UnsupportedError, match='"model"'):
        plain(model=nn.Linear)


def test_k08_a_failed_load_changes_nothing_on_storage(root):
    """F121"""
    model = net()
    save(root, plain(model=model))
    digest = lastgood.open(root).manifest_sha256
    with pytest.raises(lastgood.MismatchError):
        resume(root, plain(model=nn.Sequential(nn.Linear(4, 9), *list(net())[1:])))
    fresh = net(1)
    resume(root, plain(model=fresh))
    assert bits(fresh.state_dict()) == bits(model.state_dict())
    assert lastgood.open(root).manifest_sha256 == digest


# ------------------------------------------------------------- frozen weights


def lora(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    return model


def test_frozen_weights_are_not_written_and_compared_by_digest(root):
    base = lora()
    state = State(random=False, model=base, frozen="skip")
    save(root, state)
    assert set(names(root)) == {"1.weight", "1.bias"}
    fresh = lora()
    nn.init.zeros_(fresh[1].weight)
    resume(root, State(random=False, model=fresh, frozen="skip"))
    assert bits(fresh.state_dict()) == bits(base.state_dict())
    other = lora(1)
    with pytest.raises(lastgood.MismatchError, match=r'2 frozen weights are not those.*"0.weight", "0.bias"'):
        resume(root, State(random=False, model=other, frozen="skip"))
    # The digest is computed again after a change, and not before.
    with torch.no_grad():
        base[0].bias.add_(1)
    save(root, state, 2)
    with pytest.raises(lastgood.MismatchError, match=r'1 frozen weights.*"0.bias"'):
        resume(root, State(random=False, model=fresh, frozen="skip"))


def test_what_was_frozen_may_train_now_and_what_was_saved_is_loaded(root):
    save(root, State(random=False, model=lora(), frozen="skip"))
    model = lora().requires_grad_(True)
    resume(root, State(random=False, model=model))  # "skip" is about saving
    nn.init.zeros_(model[0].weight)
    with pytest.raises(lastgood.MismatchError, match=r'1 frozen weights are not those.*"0.weight"'):
        resume(root, State(random=False, model=model))
    save(root, State(random=False, model=lora()), 2)
    other = lora(1)
    resume(root, State(random=False, model=other, frozen="skip"))
    assert bits(other.state_dict()) == bits(lora().state_dict())


# --------------------------------------------------------------------- objects


class Thing:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_objects_keep_values_and_tensors_in_any_nesting(root):
    value = {"n": 3, "t": (torch.arange(3), {"x": [torch.ones(2), None]}), 5: float("inf"), "set": {1, 2}}
    shared = torch.zeros(4)
    value["shared"] = [shared, shared]
    save(root, plain(thing=Thing(value)))
    fresh = Thing({})
    resume(root, plain(thing=fresh))
    assert bits(fresh.state) == bits(value)
    assert type(fresh.state["t"]) is tuple
    assert lastgood.open(root)["thing.t.0"].group == "optim"


def test_what_has_no_form_is_refused_by_the_path_to_it(root):
    with pytest.raises(
        lastgood.UnsupportedError, match=r'"thing"\[\'a\'\]\[1\]\[\'f\'\]: builtins.function has no form.*save what'
    ):
        save(root, plain(thing=Thing({"a": [0, {"f": lambda: 0}]})))
    for value, message in (
        (3, r"state.vars\['x'\]"),
        ({"a": 1}, r"state.vars\['x'\]"),
        (object(), r"has no state_dict\(\) and load_state_dict\(\)"),
        (torch.Generator(), "RandomPart"),
        (torch.utils.data.DataLoader([1]), r"use lastgood.data.DataLoader"),
    ):
        with pytest.raises(lastgood.UnsupportedError, match=message):
            plain(x=value)
    for key in ("vars", "a.b"):
        with pytest.raises(lastgood.InvalidError, match="no key for a state"):
            plain(**{key: net()})


def test_k09_a_scaler_is_restored_and_may_not_be_lost(root):
    """F148"""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 17})
    save(root, plain(model=net(), scaler=scaler))
    fresh = torch.amp.GradScaler("cpu")
    resume(root, plain(model=net(), scaler=fresh))
    assert fresh.state_dict() == scaler.state_dict()
    assert (fresh.get_scale(), fresh.state_dict()["_growth_tracker"]) == (256.0, 17)
    save(root, plain(model=net()), 2)
    with pytest.raises(lastgood.MissingError, match=r'no state of the GradScaler "scaler"'):
        resume(root, plain(model=net(), scaler=fresh))
    assert resume(root, plain(model=net(), scaler=fresh), exact=False).not_restored == ["scaler"]
    save(root, plain(model=net(), scaler=torch.amp.GradScaler("cpu", enabled=False)), 3)
    with pytest.raises(lastgood.MismatchError, match="was disabled when it was saved"):
        resume(root, plain(model=net(), scaler=fresh))


def test_plain_values_come_back_and_new_ones_keep_their_first(root):
    state = plain(model=net())
    state.vars.update(best=float("inf"), tokens=2**60, seen={"a": (1, 2)}, mean=torch.ones(2))
    save(root, state)
    fresh = plain(model=net())
    fresh.vars.update(best=0.0, new="x")
    of = resume(root, fresh)
    assert bits(fresh.vars) == bits({**state.vars, "new": "x"})
    assert of.not_restored == ["vars.new"]


def test_an_averaged_copy_is_saved_beside_the_optimizer_under_the_names_of_the_model(root):
    model = net()
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    train(model, [opt])
    averaged.update_parameters(model)
    asked = []

    def lazy(t):
        asked.append(id(t))
        return True

    save(root, plain(model=model, ema=EMA(averaged)), lazy=lazy)
    assert not {id(p) for p in averaged.parameters()} & set(asked)  # an average may change at any time
    checkpoint = lastgood.open(root)
    assert {n for n in checkpoint if n.startswith("ema.")} == {f"ema.{n}" for n in (*model.state_dict(), "n_averaged")}
    assert checkpoint["ema.0.weight"].group == "optim"
    fresh = torch.optim.swa_utils.AveragedModel(net(3))
    weights = {"ema_" + str(i): torch.zeros(2) for i in range(2)}
    resume(root, plain(model=net(), ema=EMA(fresh)))
    assert bits(fresh.state_dict()) == bits(averaged.state_dict())
    save(root, plain(model=model, avg=EMA({k: v + 1 for k, v in weights.items()})), 2)
    resume(root, plain(model=net(), avg=EMA(weights)))
    assert weights["ema_1"].tolist() == [1, 1]


def test_k08_state_of_single_ranks_goes_back_to_as_many_ranks_only(root):
    """F122"""
    save(root, plain(model=net(), cache=PerRank({"rows": torch.arange(3), "n": 5})))
    held = {"n": 0}
    resume(root, plain(model=net(), cache=PerRank(held)))
    assert bits(held) == bits({"rows": torch.arange(3), "n": 5})
    thing = Thing({"n": 1})
    two = ranks(0, 2)
    with pytest.raises(lastgood.WorldError, match=r'"cache" is state of single ranks: 1 saved it, there are 2'):
        resume(root, plain(model=net(), cache=PerRank(thing)), who=two)
    of = resume(root, plain(model=net(), cache=PerRank(thing)), who=two, exact=False)
    assert (of.not_restored, thing.state) == (["cache"], {"n": 1})


# --------------------------------------------------------------------- the whole


class Recorder(Part):
    def __init__(self, key, log):
        self.key = key
        self.log = log

    def save(self, to):
        self.log.append(("save", self.key))
        to.save.state(self.key, self.key)

    def describe(self, of):
        assert of.checkpoint.state[self.key] == self.key
        self.log.append(("describe", self.key))

    def restore(self, of):
        self.log.append(("restore", self.key))


class Loader:
    def __init__(self, log):
        self.log = log

    def used(self, n):
        pass

    def lastgood_part(self, key):
        return Recorder(key, self.log)


def test_k09_random_generators_are_restored_last(root, monkeypatch):
    """F142, F149: nothing that is restored later can draw from them."""
    log = []
    stub = types.ModuleType("lastgood.random")
    stub.RandomPart = lambda: Recorder("random", log)
    monkeypatch.setitem(sys.modules, "lastgood.random", stub)
    loader = Loader(log)
    state = State(loader=loader, model=net(), other=Thing(1))
    assert state.loader is loader
    assert [p.key for p in state.parts()] == ["modules", "loader", "other", "vars", "random"]
    assert state.parts() is state.parts()
    save(root, state)
    resume(root, state)
    assert log == [(what, key) for what in ("save", "describe", "restore") for key in ("loader", "random")]
    state.add("late", Thing(2))
    assert [p.key for p in state.parts()][-3:] == ["late", "vars", "random"]
    with pytest.raises(lastgood.ConflictError, match='"late" is in the state already'):
        state.add("late", Thing(2))


def test_a_stateful_data_loader_is_given_to_the_data_package(monkeypatch):
    class StatefulDataLoader(torch.utils.data.DataLoader):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    data = types.ModuleType("lastgood.data")
    data.stateful_part = lambda key, loader: Recorder(f"{key} of {type(loader).__name__}", [])
    monkeypatch.setitem(sys.modules, "lastgood.data", data)
    state = plain(loader=StatefulDataLoader([1]))
    assert [p.key for p in state.parts()] == ["loader of StatefulDataLoader", "vars"]
    assert isinstance(state.loader, StatefulDataLoader)


def test_a_state_says_what_it_is_made_of():
    state = plain(model=net(), optim=[torch.optim.SGD(net().parameters())], scaler=None, t=torch.zeros(2))
    state.vars["best"] = 1
    assert repr(state) == "<State model: Sequential; t: [2]; optim.0: SGD; vars: best>"


def test_restoring_fills_storage_in_place_before_and_after_compile(root):
    model = net()
    save(root, plain(model=model))
    for compiled in (False, True):
        fresh = net(5)
        tensors = {n: t.data_ptr() for n, t in fresh.state_dict().items()}
        resume(root, plain(model=torch.compile(fresh) if compiled else fresh))
        assert bits(fresh.state_dict()) == bits(model.state_dict())
        assert tensors == {n: t.data_ptr() for n, t in fresh.state_dict().items()}
        assert all(p.requires_grad and p.grad is None for p in fresh.parameters())


def test_k04_only_parameters_and_optimizer_state_may_be_copied_late(root):
    """Whatever else is in the state is copied before a save in the background returns."""
    model, averaged = net(), net()
    opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    train(model, [opt])
    late = {id(p) for p in model.parameters()} | {id(t) for s in opt.state.values() for t in s.values()}
    asked = []

    def lazy(t):
        asked.append(t)
        return True

    thing = Thing({"t": torch.zeros(3)})
    state = plain(model=model, optim=opt, ema=EMA(averaged), thing=thing, bare=torch.zeros(2))
    state.vars["mean"] = torch.zeros(2)
    with lastgood.Session(root) as session:
        with session.launch(1) as s:
            state.save(Saving(s, 1, ranks(), lazy))
        assert {id(t) for t in asked} == late
        sizes = {id(t): t.numel() * t.element_size() for t in asked}
        assert s.launched.bytes_lazy == sum(sizes.values())
        session.fence()
        session.wait()


def test_saving_changes_nothing_of_the_state(root):
    model = net()
    opt = torch.optim.AdamW(model.parameters())
    train(model, [opt])
    sum(p.sum() for p in model.parameters()).backward()
    before = copy.deepcopy(
        (bits(model.state_dict()), bits(opt.state_dict()), bits([p.grad for p in model.parameters()]))
    )
    versions = [p._version for p in model.parameters()]
    save(root, plain(model=model, optim=opt))
    assert before == (bits(model.state_dict()), bits(opt.state_dict()), bits([p.grad for p in model.parameters()]))
    assert versions == [p._version for p in model.parameters()]
