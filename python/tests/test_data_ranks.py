# SPDX-License-Identifier: Apache-2.0
"""Positions of ranks that are processes: 2, then 1, then 3 of them."""

import lastgood
import lastgood.data
import torch
import torch.distributed as dist
from lastgood.parts import Restoring, Saving
from lastgood.pytorch import GlooCommunicator
from lastgood.random import RandomPart
from positions import Drawing, as_list, loader, ranks
from test_gloo import on_processes

N, WHOLE, LEGS = 51, 12, ((2, 3), (1, 4), (3, 4))  # so many ranks, so many steps


def leg(root, who, steps, first):
    """Goes on from the root, takes steps and saves; returns what this rank took in each."""
    one = loader(Drawing(N), WHOLE // who.world, who, shuffle=True, seed=9, num_workers=1)
    shards = lastgood.data.DataLoader(lastgood.data.Sharded(range(9), rows_of), 2, collate_fn=as_list)
    shards.bind(who)
    noise = torch.Generator().manual_seed(100 + who.rank)
    parts = [one.lastgood_part("loader"), shards.lastgood_part("shards"), RandomPart({"noise": noise})]
    found = {"steps": [], "rows": [], "notes": []}
    with lastgood.Session(root, who.comm, timeout=60) as session:
        held = []

        def describe(load):
            held[:] = [Restoring(load, who, seed=5)]
            for part in parts:
                part.describe(held[0])

        if session.resume(describe) is not None:
            for part in parts:
                part.restore(held[0])
            found["notes"] = held[0].notes
        found["noise"] = torch.rand((), generator=noise).item()
        rows = shards.batches()
        for (batch,) in one.batches():
            found["steps"].append([i for i, *_ in batch])
            found["rows"] += next(rows)[0]
            one.used(one.last_samples)
            shards.used(shards.last_samples)
            if len(found["steps"]) == steps:
                break
        with session.save(first + steps) as saving:
            for part in parts:
                part.save(Saving(saving, first + steps, who))
    return found


def rows_of(shard):
    return [(shard, i) for i in range(6)]


def legs(rank, root):
    everybody = GlooCommunicator()
    pair = dist.new_group([0, 1])
    comms = [GlooCommunicator(pair) if rank < 2 else None, None, everybody]
    first, found = 0, []
    for comm, (world, steps) in zip(comms, LEGS, strict=True):
        if rank < world:
            found.append(leg(root, ranks(rank, world, comm), steps, first))
        first += steps
        dist.barrier()
    return found


def test_k10_k08_two_processes_then_one_then_three_take_the_samples_of_one_run(root, tmp_path):
    by_rank = on_processes(3, tmp_path, legs, str(root))
    for found in by_rank:
        if isinstance(found, BaseException):
            raise found
    two, one, three = by_rank[0][0], by_rank[0][1], by_rank[0][2]
    taken = [two, by_rank[1][0]], [one], [three, by_rank[1][1], by_rank[2][0]]
    steps = [
        sorted(x for part in parts for x in part) for t in taken for parts in zip(*(f["steps"] for f in t), strict=True)
    ]
    whole = loader(N, WHOLE, shuffle=True, seed=9)
    wanted = []
    for (batch,) in whole.batches():
        wanted.append(sorted(batch))
        whole.used(whole.last_samples)
        if len(wanted) == len(steps):
            break
    assert steps == wanted
    rows = [row for t in taken for f in t for row in f["rows"]]
    assert len(rows) == 2 * (2 * 3 + 4 + 3 * 4)
    assert len(set(rows)) == len(rows)
    assert all(any("derived anew" in n for n in f["notes"]) for f in (one, three))
    noises = [f["noise"] for t in taken for f in t]
    assert len(set(noises)) == len(noises)
