# SPDX-License-Identifier: Apache-2.0
"""Signals to processes of torch.distributed, and to the processes that load their data."""

import os
import signal
import time

import lastgood
import torch
import torch.distributed as dist
from lastgood.parts import Ranks
from lastgood.preempt import Agreement, ignore_signals
from lastgood.pytorch import GlooCommunicator
from test_gloo import on_processes


def train(rank, root, grace, act):
    """Trains until it is told to stop; act(rank, step) is called before each step. Returns what came of it."""
    comm = GlooCommunicator()
    ranks = Ranks(rank, dist.get_world_size(), (), (), comm)
    w = torch.zeros(8, dtype=torch.float64)
    with lastgood.Session(root, comm, timeout=20) as session, Agreement(ranks, grace=grace, timeout=20) as agreement:
        with session.save(0) as save:
            save.tensors({"w": w})
        told = None
        for step in range(1, 100000):
            act(rank, step)
            if told is None and agreement.status().signals:
                told = time.monotonic()
            try:
                gradient = torch.full((8,), float(step), dtype=torch.float64)
                dist.all_reduce(gradient)
            except RuntimeError:  # a peer is gone: as in a trainer that goes on to its next look at the agreement
                time.sleep(0.05)
                gradient = torch.zeros_like(w)
            w += gradient
            decision = agreement.poll(step)
            if decision.save:
                with session.save(step, if_new=True) as save:
                    save.tensors({"w": w})
                agreement.saved(save.info.seconds)
            if decision.stop:
                return step, tuple(decision), 0.0 if told is None else time.monotonic() - told
    return None


def one_is_told(rank, step):
    if rank == 1 and step == 20:
        os.kill(os.getpid(), signal.SIGTERM)


def all_are_told_but_at_different_steps(rank, step):
    if step == 20 + 7 * rank:
        os.kill(os.getpid(), signal.SIGUSR1)


def both_ways(rank, root):
    return [
        train(rank, f"{root}-{act.__name__}", 20.0, act) for act in (one_is_told, all_are_told_but_at_different_steps)
    ]


def test_k20_a_signal_to_one_process_or_to_all_at_different_steps_saves_one_last_step(root, tmp_path):
    found = on_processes(3, tmp_path, both_ways, str(root))
    assert found[0][0][:2] == found[1][0][:2] == found[2][0][:2], found
    assert found[0][1][:2] == found[1][1][:2] == found[2][1][:2], found
    for i, act in enumerate((one_is_told, all_are_told_but_at_different_steps)):
        step, (save, stop, reason), _ = found[0][i]
        assert (save, stop) == (True, True)
        assert reason.startswith(("SIGTERM on rank 1", "SIGUSR1 on rank"))
        checkpoint = lastgood.open(f"{root}-{act.__name__}")
        assert checkpoint.step == step
        w = lastgood.load(f"{root}-{act.__name__}", framework="torch")["w"]
        assert torch.equal(w, torch.full((8,), 3.0 * step * (step + 1) / 2, dtype=torch.float64))


def one_dies_and_the_group_is_ended(rank, step):
    if step == 10:
        os.kill(os.getpid(), signal.SIGKILL if rank == 1 else signal.SIGTERM)  # as torchrun does


def dying(rank, root):
    return train(rank, root, 3.0, one_dies_and_the_group_is_ended)


def test_k06_k20_when_a_peer_died_the_others_end_within_the_grace_time_and_the_checkpoint_before_stays(root, tmp_path):
    found = on_processes(3, tmp_path, dying, str(root), without=(1,))
    for rank in (0, 2):
        assert not isinstance(found[rank], Exception), found
        _, (save, stop, reason), took = found[rank]
        assert (save, stop) == (False, True)
        assert "not saved: " in reason
        assert took < 3.0
    assert lastgood.open(root).step == 0
    assert [e.step for e in lastgood.entries(root) if e.kind == "committed"] == [0]


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.tensor(float(i))


def test_k20_workers_that_ignore_signals_load_on_until_the_last_step():
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    with Agreement(Ranks(0, 1, (), (), None), grace=20.0) as agreement:
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=4, num_workers=2, worker_init_fn=ignore_signals, multiprocessing_context="fork"
        )
        batches = iter(loader)
        seen = [next(batches), next(batches)]  # both workers have begun
        workers = [w.pid for w in batches._workers]
        for number in (signal.SIGTERM, signal.SIGUSR1):  # as torchrun and Slurm send them: to all there are
            for pid in workers:
                os.kill(pid, number)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert agreement.poll(1).stop
        seen += list(batches)
        assert torch.equal(torch.cat(seen), torch.arange(64.0))
        assert agreement.status().signals == ("SIGUSR1",)
        del batches
    assert {n: signal.getsignal(n) for n in before} == before
