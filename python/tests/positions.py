# SPDX-License-Identifier: Apache-2.0
"""What tests of positions and random streams share: ranks that are descriptions, and checkpoints of single parts."""

import random
import threading

import lastgood
import numpy as np
import torch
from lastgood.parts import Axis, Ranks, Restoring, Saving


def ranks(rank=0, world=1, comm=None):
    """All of them data-parallel."""
    return Ranks(rank, world, (Axis("dp", world, rank),), ("dp",), comm)


def on_mesh(rank, sizes, data, comm=None):
    """A rank of a mesh, row-major; sizes by name, and the names of those that take different samples."""
    axes, left = [], rank
    for name, size in reversed(sizes.items()):
        axes.append(Axis(name, size, left % size))
        left //= size
    world = int(np.prod(list(sizes.values())))
    return Ranks(rank, world, tuple(reversed(axes)), tuple(data), comm)


def parts_of(objects):
    return [o.lastgood_part(key) if hasattr(o, "lastgood_part") else o for key, o in objects.items()]


class Spoiled:
    """A save that leaves keys of single ranks out, or changes their bytes."""

    def __init__(self, save, drop=(), change=None):
        self._save, self._drop, self._change = save, drop, change or {}

    def __getattr__(self, name):
        return getattr(self._save, name)

    def rank_bytes(self, key, data):
        if key not in self._drop:
            self._save.rank_bytes(key, self._change[key](data) if key in self._change else data)

    def state(self, key, value):
        if key not in self._drop:
            self._save.state(key, value)


def save(root, step=1, who=None, spoil=None, **objects):
    """One checkpoint of parts, in a root of its own or one that is resumed from."""
    who = who or ranks()
    with lastgood.Session(root, who.comm, timeout=60) as session:
        session.resume()
        with session.save(step) as saving:
            to = Saving(spoil(saving) if spoil else saving, step, who)
            for part in parts_of(objects):
                part.save(to)


def save_on_ranks(root, n, make, step=1, mesh=None, spoil=None):
    """The same on n ranks that are threads; make(who) returns what is saved."""
    errors = []

    def one(comm):
        try:
            who = on_mesh(comm.rank, *mesh, comm) if mesh else ranks(comm.rank, n, comm)
            save(root, step, who, spoil, **make(who))
        except BaseException as why:
            errors.append(why)

    threads = [threading.Thread(target=one, args=(c,)) for c in lastgood.ThreadCommunicator.create(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    if errors:
        raise errors[0]


def resume(root, who=None, exact=True, seed=0, **objects):
    """From the newest checkpoint, as any rank of any mesh; returns what was given to the parts, with its notes."""
    with lastgood.open(root) as checkpoint:
        of = Restoring(lastgood.Load(checkpoint), who or ranks(), exact, seed)
        parts = parts_of(objects)
        for part in parts:
            part.describe(of)
        of.load.run()
        for part in parts:
            part.restore(of)
        return of


class Drawing(torch.utils.data.Dataset):
    """Samples that know their number, and draw from all three global generators."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return i, random.random(), float(np.random.rand()), torch.rand(()).item()


class Numbers(torch.utils.data.Dataset):
    """Samples that are their number."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert 0 <= i < self.n
        return i


def as_list(batch):
    return batch


def loader(data, batch_size=1, who=None, **options):
    data = Numbers(data) if isinstance(data, int) else data
    made = lastgood.data.DataLoader(data, batch_size, collate_fn=options.pop("collate_fn", as_list), **options)
    if who:
        made.bind(who)
    return made


def train(source, steps, accumulate=1):
    """What each step of a loader used."""
    found = []
    if steps:
        for batches in source.batches(accumulate):
            found.append(batches)
            source.used(source.last_samples)
            if len(found) == steps:
                break
    return found


def flat(nested):
    return [x for part in nested for x in (flat(part) if isinstance(part, list) else [part])]


def global_steps(n, world, steps, accumulate=1, **options):
    """The samples of each step, of all ranks together, sorted."""
    found = [train(loader(n, who=ranks(r, world), **options), steps, accumulate) for r in range(world)]
    return [sorted(flat([taken[s] for taken in found])) for s in range(steps)]
