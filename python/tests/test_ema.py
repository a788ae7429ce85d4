# SPDX-License-Identifier: Apache-2.0
"""A checkpoint has the trained weights in the model, never the average (F160)."""

import logging

import lastgood
import pytest
import torch
from lastgood.checkpointer import Checkpointer
from lastgood.state import EMA, State
from states import bits
from torch import nn


class Averaging:
    """A model, its optimizer, an average of it."""

    def __init__(self, seed=0, as_dict=False, **options):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=average)
        source = dict(self.average.module.named_parameters()) if as_dict else self.average
        self.ema = EMA(source)
        self.state = State(model=self.model, optim=self.optim, ema=self.ema, **options)

    def train(self, steps=1):
        for _ in range(steps):
            self.model(torch.randn(4, 3)).square().mean().backward()
            self.optim.step()
            self.optim.zero_grad()
            self.average.update_parameters(self.model)

    def weights(self):
        return bits(self.model.state_dict()), bits(self.average.state_dict())


@pytest.mark.parametrize("as_dict", [False, True])
def test_the_average_is_in_the_model_in_the_block_and_the_trained_weights_behind_it(as_dict):
    a = Averaging(as_dict=as_dict)
    a.train(3)
    before = a.weights()
    tensors = [p.data_ptr() for p in a.model.parameters()]
    with torch.inference_mode():  # as an evaluation may be
        pass
    with torch.no_grad(), a.ema.swapped_in(a.model):
        assert not torch.is_grad_enabled()
        for p, mean in zip(a.model.parameters(), a.average.module.parameters(), strict=True):
            assert torch.equal(p, mean)
        assert a.weights()[1] == before[1]
    assert a.weights() == before
    assert [p.data_ptr() for p in a.model.parameters()] == tensors
    with pytest.raises(ZeroDivisionError), a.ema.swapped_in(a.model):
        raise ZeroDivisionError
    assert a.weights() == before


def test_an_average_of_another_model_and_one_that_is_in_already_are_refused():
    a = Averaging()
    with (
        pytest.raises(lastgood.InvalidError, match="none of the averaged tensors"),
        a.ema.swapped_in(nn.Conv1d(1, 1, 1)),
    ):
        pass
    with (
        a.ema.swapped_in(a.model),
        pytest.raises(lastgood.StateError, match="in a model already"),
        a.ema.swapped_in(a.model),
    ):
        pass


@pytest.mark.parametrize("background", ["lazy", "off"])
def test_k09_f160_a_save_while_the_average_is_swapped_in_is_refused_and_the_next_one_goes(background, root):
    a = Averaging()
    with Checkpointer(root, background=background) as ckpt:
        ckpt.resume(a.state)
        ckpt.save(a.state, step=1)
        a.train(2)
        with a.ema.swapped_in(a.model):
            with pytest.raises(lastgood.StateError, match=r'"ema": the averaged weights are in the model'):
                ckpt.save(a.state, step=2)
            with pytest.raises(lastgood.StateError, match=r"outside of EMA\.swapped_in"):
                ckpt.resume(a.state)
        ckpt.save(a.state, step=2)
    fresh = Averaging(1)
    with Checkpointer(root) as ckpt:
        run = ckpt.resume(fresh.state)
    assert fresh.weights() == a.weights()
    assert run.notes == ()


def test_k04_swapping_waits_for_a_save_that_reads_the_model_and_is_no_change_behind_a_resume(root, caplog):
    a = Averaging()
    with Checkpointer(root, every=1, check_sources=True) as ckpt:
        ckpt.resume(a.state)
        for _ in range(3):
            a.train()
            ckpt.step(a.state)  # copies the parameters later
            saved = bits(a.model.state_dict())
            with a.ema.swapped_in(a.model):
                a.model.eval()(torch.randn(2, 3))
                a.model.train()
    assert bits(dict(lastgood.open(f"{root}@3").read(framework="torch")))["0.weight"] == saved["0.weight"]
    fresh = Averaging(1)
    with Checkpointer(root) as ckpt, caplog.at_level(logging.WARNING, "lastgood"):
        ckpt.resume(fresh.state)
        with fresh.ema.swapped_in(fresh.model):
            pass
        fresh.train()
    assert not any("between the resume" in r.getMessage() for r in caplog.records)


def exchange_memory(a):
    """As some trainers do: what the parameters had goes to the average."""
    for p, mean in zip(a.model.parameters(), a.average.module.parameters(), strict=True):
        p.data, mean.data = mean.data, p.data


def test_k09_f160_parameters_and_averages_that_changed_places_are_refused_until_they_change_back(root):
    a = Averaging()
    a.train(2)
    with Checkpointer(root) as ckpt:
        ckpt.resume(a.state)
        ckpt.save(a.state, step=1)
        a.train()
        exchange_memory(a)
        with pytest.raises(lastgood.StateError, match=r'"0\.weight" and its average have changed places'):
            ckpt.save(a.state, step=2)
        exchange_memory(a)
        ckpt.save(a.state, step=2)
    assert [e.step for e in lastgood.entries(root)] == [2, 1]


def test_k09_f160_an_average_that_is_the_parameter_itself_is_refused(root):
    a = Averaging()
    state = State(model=a.model, ema=EMA({n: p.detach() for n, p in a.model.named_parameters()}))
    with (
        Checkpointer(root) as ckpt,
        pytest.raises(lastgood.StateError, match=r'average of "0\.weight" is the parameter'),
    ):
        ckpt.save(state, step=1)


def test_k09_f160_an_average_that_was_copied_into_the_model_is_told_when_saved_and_when_resumed(root, caplog):
    a = Averaging()
    a.train(3)
    with Checkpointer(root) as ckpt, caplog.at_level(logging.WARNING, "lastgood"):
        ckpt.resume(a.state)
        ckpt.save(a.state, step=3)
        ckpt.fence()
        assert not any("averaged" in r.getMessage() for r in caplog.records)
        with torch.no_grad():
            for p, mean in zip(a.model.parameters(), a.average.module.parameters(), strict=True):
                p.copy_(mean)
        ckpt.save(a.state, step=4)
        said = [r.getMessage() for r in caplog.records if "averaged weights equal those of the model" in r.getMessage()]
        assert len(said) == 1
        assert said[0].startswith('"ema": all 6 averaged weights')
        ckpt.wait()
        notes = ckpt.resume(Averaging(1).state).notes
        assert [n for n in notes if "the average was in the model when step 4 was saved" in n] == list(notes)
        assert ckpt.resume(Averaging(1).state, step=3).notes == ()


def test_an_average_that_has_not_begun_is_no_reason_for_a_word_at_the_save(root, caplog):
    a = Averaging()
    with Checkpointer(root) as ckpt, caplog.at_level(logging.WARNING, "lastgood"):
        ckpt.resume(a.state)
        ckpt.save(a.state, step=0)
        ckpt.wait()
        assert ckpt.resume(a.state).notes == ()
    assert not any("averaged" in r.getMessage() for r in caplog.records)
