# SPDX-License-Identifier: Apache-2.0
"""Small training runs that are killed and resumed, each in processes of its own. A program for test_exact.py:

    python exact_runs.py FOLDER CONFIG...

Imports torch once and forks the processes of each run. Writes FOLDER/CONFIG-RUN-RANK.jsonl, a line a step, and roots
FOLDER/CONFIG-RUN.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lastgood.checkpointer import Checkpointer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import EMA, State, numbers_loader

TOTAL = 12
KILLS = (5, 8)  # killed after this step: at the first start, at the second
EVERY = 2


class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.a = nn.Linear(4, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.b = nn.Linear(16, 4)

    def forward(self, x):
        return self.b(self.drop(torch.relu(self.norm(self.a(x)))))


def features(batch):
    """Of indices, and what the data set drew for each of them."""
    index, noise = batch
    return torch.stack([index / 100, (index % 7).float(), noise.float(), torch.ones(len(index))], 1).float()


class Config:
    """A way to train; state and update."""

    ranks = 1
    accumulate = 1
    workers = 0
    batch = 4  # samples of a micro-batch
    samples = 41
    mesh = None

    def __init__(self, rank):
        torch.manual_seed(7)
        self.rank = rank
        self.loader = numbers_loader(self.samples, self.batch, workers=self.workers)
        self.build()
        # Replicas begin alike, and draw each its own; ranks that share a sample draw the same.
        random.seed(self.stream(rank))
        torch.manual_seed(100 + self.stream(rank))

    def stream(self, rank):
        """Whose random numbers a rank draws."""
        return rank

    def build(self):
        raise NotImplementedError

    def loss(self, model, batch):
        # A draw of Python's generator too.
        return model(features(batch)).square().mean() * (1 + random.random() / 10)

    def train(self, batches):
        total = 0.0
        for batch in batches:
            loss = self.loss(self.model, batch) / self.accumulate
            loss.backward()
            total += loss.item()
        self.update()
        return total

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class Foreach(Config):
    """Dropout, a schedule of two parts, clipping, accumulation, workers, an average, a scaler."""

    accumulate = 4
    workers = 2

    def build(self):
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, foreach=True)
        warm = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=4)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 8)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warm, cosine], [4])
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.state = State(
            model=self.model, optim=self.optimizer, scheduler=self.scheduler, scaler=self.scaler,
            ema=EMA(self.average), loader=self.loader,
        )  # fmt: skip

    def train(self, batches):
        total = 0.0
        for batch in batches:
            loss = self.loss(self.model, batch) / self.accumulate
            self.scaler.scale(loss).backward()
            total += loss.item()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        self.optimizer.zero_grad()
        return total


class Fused(Config):
    """Batch statistics; a data set of several epochs."""

    def build(self):
        self.model = Net(norm=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, fused=True)
        self.state = State(model=self.model, optim=self.optimizer, loader=self.loader)


class Sgd(Config):
    """No state at all in the optimizer; the schedule looks at the loss."""

    accumulate = 2

    def build(self):
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        self.state = State(model=self.model, optim=self.optimizer, scheduler=self.scheduler, loader=self.loader)

    def train(self, batches):
        total = super().train(batches)
        self.scheduler.step(total)
        return total


class Gan(Config):
    def build(self):
        self.model, self.disc = Net(), Net()
        self.optimizers = [
            torch.optim.AdamW(self.model.parameters(), lr=0.02),
            torch.optim.AdamW(self.disc.parameters(), lr=0.05),
        ]
        self.state = State(model=self.model, disc=self.disc, optim=self.optimizers, loader=self.loader)

    def train(self, batches):
        generator, discriminator = self.optimizers
        real = features(batches[0])
        first = self.disc(self.model(torch.randn(4, 4)).detach()).mean() - self.disc(real).mean()
        first.backward()
        discriminator.step()
        discriminator.zero_grad()
        second = -self.disc(self.model(torch.randn(4, 4))).mean()
        second.backward()
        generator.step()
        generator.zero_grad()
        discriminator.zero_grad()
        return first.item() + second.item()


class Ddp(Config):
    ranks = 2
    accumulate = 2
    workers = 1

    def build(self):
        self.model = nn.parallel.DistributedDataParallel(Net(norm=True))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.state = State(model=self.model, optim=self.optimizer, loader=self.loader)


class Fsdp2(Config):
    ranks = 2
    accumulate = 2

    def build(self):
        self.model = Net()
        fully_shard(self.model.a)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, foreach=True)
        self.state = State(model=self.model, optim=self.optimizer, loader=self.loader)


class Mesh2d(Config):
    """Hybrid sharding over two axes of data-parallel ranks."""

    ranks = 4

    def build(self):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        self.model = Net()
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.state = State(model=self.model, optim=self.optimizer, loader=self.loader)


class TensorNet(nn.Module):
    """Dropout where the ranks of a tensor-parallel group have a half each, and where all have the same."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.c(self.drop(self.b(self.drop(torch.relu(self.a(x))))))


def tensor_parallel(model, mesh):
    plan = {"a": ColwiseParallel(), "b": RowwiseParallel(), "c": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh, plan)


class Tp(Config):
    """Two ranks have a half of each layer, and the same samples and random numbers."""

    ranks = 2
    accumulate = 2

    def stream(self, rank):
        return 0

    def build(self):
        self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        self.model = tensor_parallel(TensorNet(), self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, foreach=True)
        self.state = State(model=self.model, optim=self.optimizer, loader=self.loader)

    def update(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        super().update()


class FsdpTp(Config):
    """FSDP2 over one axis, tensor-parallel over the other."""

    ranks = 4

    def stream(self, rank):
        return rank // 2

    def build(self):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        self.model = tensor_parallel(TensorNet(), self.mesh["tp"])
        fully_shard(self.model, mesh=self.mesh["fsdp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.state = State(model=self.model, optim=self.optimizer, loader=self.loader)


class Stage(nn.Module):
    """A part of a pipeline."""

    def __init__(self, **layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        for layer in self.layers.values():
            x = self.drop(torch.relu(layer(x)))
        return x


class Pipeline(Config):
    """A stage on each rank, by torch.distributed.pipelining; two micro-batches in the pipe."""

    ranks = 2

    def build(self):
        self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        torch.manual_seed(7 + self.rank)
        layers = [{"a": nn.Linear(4, 16), "b": nn.Linear(16, 16)}, {"c": nn.Linear(16, 4)}][self.rank]
        self.model = Stage(**layers)
        stage = PipelineStage(self.model, self.rank, 2, torch.device("cpu"))
        self.schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.state = State(model=[self.model], optim=self.optimizer, scheduler=self.scheduler, loader=self.loader)

    def train(self, batches):
        x, losses = features(batches[0]), []
        if self.rank == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=x.sin(), losses=losses)
        self.update()
        self.scheduler.step()
        return sum((loss.item() for loss in losses), 0.0)


CONFIGS = {c.__name__.lower(): c for c in (Foreach, Fused, Sgd, Gan, Ddp, Fsdp2, Mesh2d, Tp, FsdpTp, Pipeline)}


class Resized(Config):
    """Twelve samples a step, whatever the ranks, the micro-batches and the workers; no dropout."""

    samples = 53  # of which each epoch leaves 5 out

    def build(self):
        self.model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
        model = self.model
        if self.parallel == "ddp":
            model = self.model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        elif self.parallel == "fsdp2":
            fully_shard(model[0])
            fully_shard(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.state = State(model=self.model, optim=self.optimizer, loader=self.loader)

    def loss(self, model, batch):
        return model(features(batch)).square().mean()


def resized(parallel, ranks, accumulate, workers):
    batch = 12 // ranks // accumulate
    found = {"parallel": parallel, "ranks": ranks, "accumulate": accumulate, "workers": workers, "batch": batch}
    return type("Resized", (Resized,), found)


# The run that never stops, and then each start of the one that is killed.
LEGS = {
    name: [resized("none", 1, 1, 0), resized(a, 4, 1, 0), resized(b, 2, 3, 2), resized(c, 3, 2, 1)]
    for name, (a, b, c) in {
        "ddp 4-2-3": ("ddp", "ddp", "ddp"),
        "fsdp2 4-2-3": ("fsdp2", "fsdp2", "fsdp2"),
        "mixed 4-2-3": ("fsdp2", "ddp", "fsdp2"),
    }.items()
}


def upcoming():
    """What torch's generator and Python's would give next; they stay where they are."""
    ours, pythons = torch.Generator(), random.Random()
    ours.set_state(torch.get_rng_state())
    pythons.setstate(random.getstate())
    return [torch.rand((), generator=ours).item(), pythons.random()]


def one(config, rank, folder, name, start, kill):
    """A process of a run, from its start to its end or death."""
    torch.set_num_threads(1)
    if config.ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{name}-{start}.store", rank=rank, world_size=config.ranks
        )
    made = config(rank)
    if start > 0:  # what came with the process is not what was
        torch.manual_seed(1000 * start + rank)
    with (
        open(folder / f"{name}-{rank}.jsonl", "a", encoding="utf-8") as log,
        Checkpointer(folder / name, every=EVERY, mesh=made.mesh, timeout=60) as ckpt,
    ):
        run = ckpt.resume(made.state)
        log.write(json.dumps({"start": start, "from": run.step, "notes": run.notes}) + "\n")
        for batches in run.steps(TOTAL, accumulate=config.accumulate):
            loss = made.train(batches)
            made.state.vars["seen"] = made.state.vars.get("seen", 0) + len(batches)
            ckpt.step(made.state)
            line = {"step": ckpt.completed, "loss": loss.hex(), "batches": [b[0].tolist() for b in batches]}
            line["drawn"] = [b[1].tolist() for b in batches]
            # Where the streams are, by what they would give next.
            line["next"] = upcoming()
            log.write(json.dumps(line) + "\n")
            log.flush()
            if ckpt.completed == kill and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def start_of(config, folder, name, start, kill):
    """Starts the processes of a run and waits for their end. As torchrun does, ends all when one has died."""
    pids = []
    for rank in range(config.ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                one(config, rank, folder, name, start, kill)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    codes = []
    end = time.monotonic() + 100
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > end:
                for other in pids:
                    os.kill(other, signal.SIGKILL)
            time.sleep(0.01)
            continue
        pids.remove(pid)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1] != 0:
            for other in pids:
                os.kill(other, signal.SIGKILL)
    expected = -signal.SIGKILL if kill else 0
    if codes[0] != expected:
        sys.exit(f"{name}, start {start}: exit codes {codes}, expected {expected}")


def main():
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        whole, *legs = LEGS.get(name) or [CONFIGS[name]] * (2 + len(KILLS))
        start_of(whole, folder, f"{name}-whole", 0, None)
        for start, (config, kill) in enumerate(zip(legs, [*KILLS, None], strict=True)):
            start_of(config, folder, f"{name}-killed", start, kill)


if __name__ == "__main__":
    main()
