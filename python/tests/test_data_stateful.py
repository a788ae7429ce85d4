# SPDX-License-Identifier: Apache-2.0
"""Loaders that keep a position of their own."""

import collections

import lastgood
import lastgood.data
import numpy as np
import pytest
import torch
from positions import ranks, resume, save, save_on_ranks


class Own:
    """A loader like torchdata's: counts the batches it yields, and has a generator."""

    def __init__(self, n=10, begin=0):
        self.n, self.at, self.generator = n, begin, torch.Generator().manual_seed(1)
        self.extra = {}

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "generator": self.generator.get_state(), **self.extra}

    def load_state_dict(self, state):
        self.at = state.pop("at")
        self.generator.set_state(state.pop("generator"))
        self.extra = state


def part(loader):
    return lastgood.data.stateful_part("loader", loader)


def test_its_state_goes_on_bit_for_bit(root):
    one = Own()
    one.extra = {
        "tensors": [torch.arange(4).to(torch.bfloat16), torch.tensor(5), torch.empty(0, 3), torch.tensor([True])],
        "strided": torch.arange(6).reshape(2, 3).T,
        "arrays": {"a": np.arange(3, dtype=">i4"), "b": np.zeros((2, 0))},
        "nested": (1, [None, {"x": float("inf")}], collections.OrderedDict(y=torch.ones(1))),
        3: collections.defaultdict(int, z=1),
    }
    state = one.state_dict()
    torch.rand(3, generator=one.generator)
    one.at = 4
    save(root, loader=part(one))
    assert one.extra["nested"][2]["y"].tolist() == [1.0]  # what is saved is not changed
    two = Own()
    resume(root, loader=part(two))
    assert (two.at, torch.equal(two.generator.get_state(), one.generator.get_state())) == (4, True)
    for a, b in zip(two.extra["tensors"], state["tensors"], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert torch.equal(two.extra["strided"], state["strided"])
    assert two.extra["arrays"]["a"].tolist() == [0, 1, 2]
    assert two.extra["arrays"]["b"].shape == (2, 0)
    assert two.extra["nested"][:2] == (1, [None, {"x": float("inf")}])
    assert type(two.extra["nested"][2]) is collections.OrderedDict
    assert two.extra[3].default_factory is int


def test_what_has_no_form_is_refused_by_its_path(root):
    one = Own()
    one.extra = {"sampler": {"opener": object()}}
    with pytest.raises(lastgood.UnsupportedError, match=r"loader\.state.*\['sampler'\]\['opener'\]"):
        save(root, loader=part(one))


def per_rank(who):
    return {"loader": part(Own(begin=who.rank))}


def test_each_rank_gets_its_own_state(root):
    save_on_ranks(root, 3, per_rank)
    for rank in range(3):
        one = Own()
        resume(root, ranks(rank, 3), loader=part(one))
        assert one.at == rank


@pytest.mark.parametrize("world", [1, 3])
def test_k10_f190_k08_f122_another_number_of_ranks_is_refused_with_the_way_out(world, root):
    save_on_ranks(root, 2, per_rank)
    one = Own()
    with pytest.raises(lastgood.WorldError, match=rf"saved by 2 .* these are {world} .*lastgood.data.DataLoader"):
        resume(root, ranks(0, world), loader=part(one))
    assert one.at == 0


def test_a_checkpoint_without_it_is_an_error_unless_it_need_not_be_exact(root):
    save(root)
    with pytest.raises(lastgood.MissingError):
        resume(root, loader=part(Own()))
    assert resume(root, exact=False, loader=part(Own())).not_restored == ["loader"]


def test_steps_cross_epochs_and_an_empty_loader_is_an_error():
    one = part(Own(3))
    steps = one.batches(2)
    assert [next(steps) for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]
    assert (one.epoch, one.last_samples) == (1, 6)
    one.used(6)
    assert one.last_samples == 0
    with pytest.raises(lastgood.InvalidError, match="yields no batches"):
        next(part(Own(0)).batches())
    with pytest.raises(lastgood.InvalidError, match="no state_dict"):
        part([1, 2])


def test_torchdata(root):
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def make():
        return part(
            stateful_dataloader.StatefulDataLoader(
                list(range(24)), 3, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(3)
            )
        )

    def take(steps, n):
        return [next(steps)[0].tolist() for _ in range(n)]

    one = make()
    steps = one.batches()
    take(steps, 3)
    save(root, loader=one)
    wanted = take(steps, 5)
    two = make()
    resume(root, loader=two)
    assert take(two.batches(), 5) == wanted
