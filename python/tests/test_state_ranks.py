# SPDX-License-Identifier: Apache-2.0
"""Training states of several processes: DistributedDataParallel, FSDP2, meshes, and on to other numbers of ranks."""

import os

import lastgood
import pytest
import torch
import torch.distributed as dist
from lastgood.modules import EMA
from lastgood.objects import PerRank
from lastgood.parts import Axis
from lastgood.pytorch import GlooCommunicator
from lastgood.state import State
from states import bits, plain, ranks, resume, save
from test_gloo import on_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard


class Net(nn.Module):
    """Odd sizes, a buffer, a tie."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.down = nn.Linear(10, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.down(torch.relu(self.norm(self.up(self.embed(x))))))


def step(model, opt, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(7, (5,), generator=g)
    loss = nn.functional.cross_entropy(model(x), x)
    loss.backward()
    opt.step()
    opt.zero_grad()


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def contents(model, opt):
    """All of it, gathered, by name."""
    names = {id(p): n for n, p in model.named_parameters()}
    found = {n: bits(whole(t)) for n, t in model.state_dict().items()}
    for p, state in opt.state.items():
        found |= {f"optim.state.{names[id(p)]}.{k}": bits(whole(v)) for k, v in state.items()}
    return found


def without(prefix, found):
    return {n.replace(prefix, ""): v for n, v in found.items()}


def who(comm, mesh=None, data=("dp",)):
    return ranks(comm.rank, comm.size, comm, mesh, data)


# ------------------------------------------------------------------- two processes


def ddp(comm, root):
    """Buffers of rank 0 count; writing is shared; a parameter that differs is named."""
    model = nn.parallel.DistributedDataParallel(Net())
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    cache = PerRank({"rank": comm.rank, "rows": torch.full((comm.rank + 1,), comm.rank)})
    state = plain(model=model, optim=opt, cache=cache, ema=EMA({"w": torch.full((2,), comm.rank)}))
    for i in range(2):
        step(model, opt, 10 * comm.rank + i)
    means = all_of(comm, model.module.norm.running_mean)
    assert not torch.equal(means[0], means[1])
    save(root, state, 1, comm=comm, who=who(comm))
    wanted = without("module.", contents(model, opt))
    fresh = nn.parallel.DistributedDataParallel(Net(comm.rank))
    other = torch.optim.AdamW(fresh.parameters())
    mine = {"rank": None}
    copy = torch.zeros(2, dtype=torch.int64)
    restored = plain(model=fresh, optim=other, cache=PerRank(mine), ema=EMA({"w": copy}))
    resume(root, restored, comm=comm, who=who(comm))
    found = without("module.", contents(fresh, other))
    first = all_of(comm, wanted)[0]
    assert found == first
    assert (mine["rank"], mine["rows"].tolist()) == (comm.rank, [comm.rank] * (comm.rank + 1))
    assert copy.tolist() == [comm.rank] * 2  # differs: each has its own
    # Plain parameters outside of DistributedDataParallel are compared.
    alone = nn.Linear(2, 2)
    with torch.no_grad():
        alone.weight.fill_(comm.rank)
        alone.bias.zero_()
    try:
        save(root, plain(model=alone), 2, comm=comm, who=who(comm))
    except lastgood.ConflictError as why:
        return first, str(why)
    return first, None


def all_of(comm, value):
    found = [None] * comm.size
    dist.all_gather_object(found, value)
    return found


def fsdp(comm, root):
    """Uneven parts, saved and restored in place."""

    def build(seed):
        model = Net(seed)
        mesh = init_device_mesh("cpu", (comm.size,))
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, opt = build(0)
    for i in range(2):
        step(model, opt, i)
    with torch.no_grad():
        model(torch.arange(5))  # after this FSDP holds the root's parameters whole for a while
    info = save(root, plain(model=model, optim=opt), 1, comm=comm, who=who(comm))
    wanted = contents(model, opt)
    fresh, other = build(5)
    tensors = {n: p.to_local().data_ptr() for n, p in fresh.named_parameters()}
    resume(root, plain(model=fresh, optim=other), comm=comm, who=who(comm))
    assert contents(fresh, other) == wanted
    assert fresh.head.weight is fresh.embed.weight
    assert tensors == {n: p.to_local().data_ptr() for n, p in fresh.named_parameters()}
    placements = {type(s["exp_avg"]).__name__ for s in other.state.values()}
    assert placements == {"DTensor"}
    step(model, opt, 7)
    step(fresh, other, 7)
    assert contents(fresh, other) == contents(model, opt)
    return wanted, info.bytes_written


def quantised(fill, placed=None):
    """A module with a tensor that is made of two others, or with this rank's part of one."""
    from torch.testing._internal.two_tensor import TwoTensor

    t = TwoTensor(torch.full((2, 3), fill), torch.full((2, 3), fill + 1))
    m = nn.Module()
    m.q = nn.Parameter(t if placed is None else DTensor.from_local(t, *placed, run_check=False), requires_grad=False)
    m.w = nn.Parameter(torch.ones(2))
    return m


def odd(comm, root):
    """Parts that are made of other tensors, and frozen weights in parts."""
    mesh = init_device_mesh("cpu", (comm.size,))
    placed = (mesh, [Shard(0)])
    save(root, plain(model=quantised(float(comm.rank), placed)), 1, comm=comm, who=who(comm))
    fresh = quantised(9.0, placed)
    resume(root, plain(model=fresh), comm=comm, who=who(comm))
    part = fresh.q.to_local()
    assert (part.a.unique().tolist(), part.b.unique().tolist()) == ([comm.rank], [comm.rank + 1])
    with pytest.raises(
        lastgood.UnsupportedError, match=r'"q" is made of parts of its own.*cannot be cut anew: it was placed'
    ):
        resume(root, plain(model=quantised(9.0, (mesh, [Shard(1)]))), comm=comm, who=who(comm))

    def base(seed):
        model = Net(seed)
        model.embed.weight.requires_grad_(False)
        fully_shard(model, mesh=mesh)
        return State(random=False, model=model, frozen="skip")

    frozen = root + "-frozen"
    save(frozen, base(0), 1, comm=comm, who=who(comm))
    resume(frozen, base(0), comm=comm, who=who(comm))
    with pytest.raises(lastgood.MismatchError, match=r'1 frozen weights are not those.*"embed.weight"'):
        resume(frozen, base(1), comm=comm, who=who(comm))


def stages(comm, root):
    """Each process has a stage of a pipeline, and its optimizer."""
    torch.manual_seed(comm.rank)
    stage = nn.ModuleDict({str(comm.rank): nn.Linear(2, 2)})
    opt = torch.optim.AdamW(stage.parameters(), lr=0.1 + comm.rank)
    sum(p.sum() for p in stage.parameters()).backward()
    opt.step()
    for i in (1, 2):
        save(root, plain(model=[stage], optim=opt), i, comm=comm, who=who(comm))
    return contents(stage, opt)


def alike(comm, root):
    """Plain parameters that all processes hold alike are compared by the first save, and shared out from then on."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    state = plain(model=model)
    for i in (1, 2):
        save(root, state, i, comm=comm, who=who(comm))
        assert state._modules.replicas.equal == (i == 2)
    fresh = nn.Linear(3, 3)
    resume(root, plain(model=fresh), comm=comm, who=who(comm))
    assert bits(fresh.state_dict()) == bits(model.state_dict())


def two(rank, folder):
    comm = GlooCommunicator()
    alike(comm, os.path.join(folder, "alike"))
    parts = all_of(comm, stages(comm, os.path.join(folder, "stages")))
    whole = nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})
    opt = torch.optim.AdamW([{"params": whole[n].parameters()} for n in "01"])
    resume(os.path.join(folder, "stages"), plain(model=whole, optim=opt), comm=comm, who=who(comm))
    assert contents(whole, opt) == parts[0] | parts[1]
    assert [g["lr"] for g in opt.param_groups] == [0.1, 1.1]
    odd(comm, os.path.join(folder, "odd"))
    return ddp(comm, os.path.join(folder, "ddp")), fsdp(comm, os.path.join(folder, "fsdp"))


def on_one(root):
    model = Net(9)
    opt = torch.optim.AdamW(model.parameters())
    resume(root, plain(model=model, optim=opt), optional=("cache", "ema"))
    return contents(model, opt)


def test_k08_two_processes_save_and_one_goes_on_with_all_of_it(tmp_path):
    """F122, F124, F133, F134, F140"""
    found = on_processes(2, tmp_path, two, str(tmp_path))
    for f in found:
        assert not isinstance(f, BaseException), f
    for (_, conflict), (_, written) in found:
        assert '"weight"' in conflict
        assert written > 0
    (first, _), (wanted, _) = found[0]
    assert on_one(tmp_path / "ddp") == first
    assert on_one(tmp_path / "fsdp") == wanted
    with pytest.raises(
        lastgood.UnsupportedError, match=r'"q" \(.*TwoTensor\) was saved in parts, and is held whole now'
    ):
        resume(tmp_path / "odd", plain(model=quantised(0.0)))
    assert "embed.weight" not in lastgood.open(tmp_path / "odd-frozen")
    of = resume(tmp_path / "odd-frozen", State(random=False, model=Net(), frozen="skip"))
    assert any("1 frozen weights lie on other ranks" in note for note in of.notes)


# ------------------------------------------------------------------ four processes


def meshes(rank, folder):
    """Replicas of shards (HSDP), and FSDP over tensor parallelism with strided shards."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    comm = GlooCommunicator()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for kind in ("hsdp", "tp"):

        def build(seed, kind=kind):
            model = Net(seed)
            if kind == "hsdp":
                fully_shard(model, mesh=mesh)
            else:
                parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                fully_shard(model, mesh=mesh["dp"])
            return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)  # of several meshes

        axes = (Axis("dp", 2, rank // 2), Axis("tp", 2, rank % 2))
        data = ("dp", "tp") if kind == "hsdp" else ("dp",)
        model, opt = build(0)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        opt.zero_grad()
        root = os.path.join(folder, kind)
        save(root, plain(model=model, optim=opt), 1, comm=comm, who=who(comm, axes, data))
        found[kind] = contents(model, opt)
        fresh, other = build(3)
        resume(root, plain(model=fresh, optim=other), comm=comm, who=who(comm, axes, data))
        assert contents(fresh, other) == found[kind]
        placed = {str(p.placements) for p in fresh.parameters()}
        assert kind != "tp" or any("_S" in p or "Strided" in p for p in placed), placed
    # What slices of the mesh are to hold alike, and do not.
    other = Net(rank % 2)
    fully_shard(other, mesh=mesh["dp"])
    with pytest.raises(lastgood.ConflictError, match=r"replicas\..*on ranks 0 and 1"):
        save(os.path.join(folder, "torn"), plain(model=other), 1, comm=comm, who=who(comm, axes, ("dp",)))
    return found


def test_k08_meshes_of_two_axes_come_back_on_themselves_and_on_one_process(tmp_path):
    """F127, F128, F136"""
    found = on_processes(4, tmp_path, meshes, str(tmp_path))
    for f in found:
        assert not isinstance(f, BaseException), f
    for kind in ("hsdp", "tp"):
        got = on_one(tmp_path / kind)
        assert got == found[0][kind]
        assert all(f[kind] == got for f in found)
