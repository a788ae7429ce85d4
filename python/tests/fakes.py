# SPDX-License-Identifier: Apache-2.0
"""A training state and a loader, as small as they can be, with the interface of the real ones."""

import lastgood
import torch
from lastgood import arrays


class State:
    """Modules, optimizers, objects with state_dict, torch's generator, a loader."""

    def __init__(self, *, optim=(), loader=None, random=True, **objects):
        self.optimizers = list(optim) if isinstance(optim, (list, tuple)) else [optim]
        self.loader = loader
        self.random = random
        self.modules = {k: v for k, v in objects.items() if isinstance(v, torch.nn.Module)}
        self.eager = {k: v.module for k, v in objects.items() if isinstance(v, EMA)}
        self.objects = {
            k: v for k, v in objects.items() if hasattr(v, "state_dict") and not isinstance(v, torch.nn.Module)
        }
        self.vars = {}

    def parts(self):
        return []

    def named(self):
        for key, module in self.modules.items():
            dot = "" if key == "model" else f"{key}."
            for name, p in module.named_parameters():
                yield dot + name, p, True
            for name, b in module.named_buffers():
                yield dot + name, b, False
        for key, module in self.eager.items():
            for name, t in module.state_dict().items():
                yield f"{key}.{name}", t, None

    def optimizer_tensors(self):
        for n, optimizer in enumerate(self.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for i, p in enumerate(parameters):
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield f"optim.{n}.{i}.{key}", value

    def save(self, to):
        for name, t, parameter in self.named():
            group = "model" if parameter is not None else "optim"
            to.save.tensor(name, t, group=group, lazy=bool(parameter) and to.lazy(t), buffer=parameter is False)
        for name, t in self.optimizer_tensors():
            to.save.tensor(name, t, group="optim", lazy=to.lazy(t))
        groups = [
            [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in self.optimizers
        ]
        to.save.state("groups", groups)
        for key, value in self.objects.items():
            to.save.state(key, value.state_dict())
        to.save.state("vars", self.vars)
        if self.random:
            to.save.rank_state("random", torch.get_rng_state().numpy().tobytes())
        if self.loader is not None:
            self.loader.sampler.save(to.save, "loader")

    def describe(self, of):
        for name, t, _ in self.named():
            of.load.tensor(name, t.detach())
        for n, optimizer in enumerate(self.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for i, p in enumerate(parameters):
                for name in of.checkpoint:
                    if name.startswith(f"optim.{n}.{i}."):
                        stored = of.checkpoint[name]
                        made, _ = arrays.allocate(stored.number, stored.shape, "torch")
                        optimizer.state[p][name.split(".", 3)[3]] = made
                        of.load.tensor(name, made)

    def restore(self, of):
        state = of.checkpoint.state
        for optimizer, groups in zip(self.optimizers, state["groups"], strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(saved)
        for key, value in self.objects.items():
            value.load_state_dict(state[key])
        self.vars = state["vars"]
        if self.loader is not None:
            self.loader.sampler.load(of.checkpoint, "loader")
        if self.random:
            data = of.checkpoint.rank_state("random", of.ranks.rank, of.ranks.world)
            torch.set_rng_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))


class EMA:
    def __init__(self, module):
        self.module = module


class Loader:
    """Batches of indices of a data set."""

    def __init__(self, samples, batch_size, seed=0):
        self.sampler = lastgood.Sampler(samples, seed)
        self.batch_size = batch_size
        self.ranks = None
        self.last_samples = 0

    def bind(self, ranks):
        self.ranks = ranks

    def step_samples(self, accumulate=1):
        return self.batch_size * self.ranks.data_world * accumulate

    def batches(self, accumulate):
        micro = self.batch_size
        world, rank = self.ranks.data_world, self.ranks.data_rank
        while True:
            taken = self.sampler.peek(micro * world * accumulate)
            self.last_samples = len(taken)
            mine = taken[rank::world]
            yield [torch.tensor(mine[i : i + micro]) for i in range(0, len(mine), micro)]

    def used(self, n):
        self.sampler.advance(n)
        self.last_samples = 0
