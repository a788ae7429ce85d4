# SPDX-License-Identifier: Apache-2.0
"""Saving and restoring a State without a Checkpointer, for tests."""

import lastgood
import torch
from lastgood.parts import Axis, Ranks, Restoring, Saving
from lastgood.state import State


def ranks(rank=0, world=1, comm=None, mesh=None, data=("dp",)):
    return Ranks(rank, world, mesh or (Axis("dp", world, rank),), data, comm)


def save(root, state, step=1, *, comm=None, who=None, lazy=None):
    """One checkpoint, in a session that goes on with what is there."""
    with lastgood.Session(root, comm) as session:
        session.resume()
        with session.save(step) as s:
            to = Saving(s, step, who or ranks())
            if lazy is not None:
                to.lazy = lazy
            state.save(to)
    return s.info


def resume(root, state, *, exact=True, comm=None, who=None, optional=()):
    """Restores the newest; returns the Restoring with its notes."""
    held = []
    with lastgood.Session(root, comm) as session:

        def describe(load):
            held.append(Restoring(load, who or ranks(), exact=exact, optional=optional))
            state.describe(held[-1])

        assert session.resume(describe) is not None
        state.restore(held[-1])
    return held[-1]


def plain(**registered):
    """A state without random generators, which have tests of their own."""
    return State(random=False, **registered)


def net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def train(model, optimizers, steps=3, seed=1, after=()):
    """Some steps on data of their own seed; losses as bits."""
    g = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(6, 4, generator=g), torch.randn(6, 2, generator=g)

        def closure(x=x, y=y):
            for o in optimizers:
                o.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = closure()
        for o in optimizers:
            o.step(closure) if isinstance(o, torch.optim.LBFGS) else o.step()
            o.zero_grad()
        for scheduler in after:
            scheduler.step()
        losses.append(loss.item().hex())
    return losses


def bits(state):
    """State dict of a module or optimizer as comparable bytes."""
    if isinstance(state, torch.Tensor):
        t = state.detach().cpu().contiguous()
        return (str(t.dtype), tuple(t.shape), bytes(t.reshape(-1).view(torch.uint8).tolist()))
    if isinstance(state, dict):
        return {k: bits(v) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return [bits(v) for v in state]
    return state
