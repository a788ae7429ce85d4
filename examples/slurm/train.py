# SPDX-License-Identifier: Apache-2.0
"""A training program that saves and ends when it is asked to, and goes on where it was when it is started again.

    train.py ROOT STEPS

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torch.distributed wants them. Ends with 85 when it was asked to stop
before the last step, and has saved.
"""

import os
import sys

import lastgood
import torch
import torch.distributed as dist
from lastgood.parts import Ranks
from lastgood.preempt import Agreement, ignore_signals, requeue
from lastgood.pytorch import GlooCommunicator

REQUEUE = 85  # as in train.sbatch
EVERY = 1000  # steps between saves


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on data that follow from the step alone; gradients are averaged over the ranks."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    x = torch.randn(16, 32, generator=generator)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    return loss.item()


def main() -> None:
    """Trains."""
    root, steps = sys.argv[1], int(sys.argv[2])
    grace = float(os.environ.get("GRACE", "180"))  # as in --signal of train.sbatch
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    comm = GlooCommunicator()
    torch.manual_seed(1)
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = Ranks(rank, world, (), (), comm)
    with lastgood.Session(root, comm, keep_last=3) as session, Agreement(ranks, grace=grace) as agreement:
        resumed = session.resume(model.state_dict())
        first = 0 if resumed is None else resumed.step
        if rank == 0:
            print(f"begins at step {first}", flush=True)
        asked = False
        for step in range(first + 1, steps + 1):
            loss = train_step(model, optimizer, step)
            decision = agreement.poll(step)
            asked = decision.stop
            if decision.save or step % EVERY == 0 or step == steps:
                with session.save(step, if_new=True) as save:
                    save.tensors(model.state_dict())
                agreement.saved(save.info.seconds)
            if rank == 0 and (step % EVERY == 0 or asked):
                print(f"step {step}, loss {loss:.4f}" + (f", ends: {decision.reason}" if asked else ""), flush=True)
            if asked:
                ignore_signals()  # this process ends by itself; another signal must not give it another exit code
                break
    dist.destroy_process_group()
    if asked and step < steps:
        requeue(REQUEUE, rank)
    if rank == 0:
        print("done", flush=True)


if __name__ == "__main__":
    main()
