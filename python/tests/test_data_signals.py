# SPDX-License-Identifier: Apache-2.0
"""Signals that schedulers and torchrun send to every process of a job reach a loader's workers too."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import lastgood
import pytest
import torch
from lastgood.data import DataLoader


class Numbers:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.tensor(float(i))


_called = []


def remember(worker):
    _called.append(worker)


class Remembering(Numbers):
    """Tells whether the trainer's own function was called."""

    def __getitem__(self, i):
        return torch.tensor(float(len(_called)))


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_k20_workers_load_on_whatever_signals_a_job_gets(how):
    loader = DataLoader(
        Numbers(), 4, num_workers=2, shuffle=False, multiprocessing_context=how, persistent_workers=True
    )
    batches = loader.iterate(1)
    seen = [next(batches), next(batches)]  # both workers have begun
    workers = [w.pid for w in loader._inner._iterator._workers]
    # Another process sends them, as a scheduler does.
    script = "import os, sys\nfor p in sys.argv[2:]: os.kill(int(p), int(sys.argv[1]))"
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        subprocess.run([sys.executable, "-c", script, str(int(number)), *map(str, workers)], check=True)
    seen += list(batches)
    assert torch.equal(torch.cat(seen), torch.arange(64.0))
    for pid in workers:
        os.kill(pid, 0)
    # Their trainer can end them.
    processes = loader._inner._iterator._workers
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's calls it an error
    try:
        for p in processes:
            p.terminate()
        for p in processes:
            p.join(30)
            assert p.exitcode == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGCHLD, before)
    loader._inner = None


def test_the_trainer_s_own_function_is_called_too():
    loader = DataLoader(Remembering(), 4, num_workers=1, worker_init_fn=remember)
    assert next(iter(loader)).tolist() == [1.0] * 4


def test_k20_a_group_that_gets_sigterm_saves_its_last_step_and_ends_with_success(root):
    program = f"""
        import os, sys, lastgood, torch
        model = torch.nn.Linear(1, 1)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = lastgood.data.DataLoader(torch.arange(4000.0).reshape(-1, 1), 2, num_workers=2)
        state = lastgood.State(model=model, optim=optim, loader=loader)
        with lastgood.Checkpointer({str(root)!r}, grace=60) as ckpt:
            for batches in ckpt.resume(state).steps(1_000_000):
                model(batches[0] / 4000).sum().backward()
                optim.step()
                optim.zero_grad()
                ckpt.step(state)
                if ckpt.completed == 3:
                    print("training", flush=True)
        assert ckpt.stopping
        print("done", ckpt.completed)
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert run.stdout.readline() == "training\n"
        os.killpg(run.pid, signal.SIGTERM)
        out, _ = run.communicate(timeout=90)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    assert run.returncode == 0
    assert out.startswith("done ")
    assert lastgood.open(root).step == int(out.split()[1])


def test_workers_end_with_a_trainer_that_is_killed(tmp_path):
    program = """
        import os, signal, lastgood, torch
        loader = lastgood.data.DataLoader(torch.arange(4000.0), 2, num_workers=1, persistent_workers=True)
        batches = iter(loader)
        next(batches)
        print(loader._inner._iterator._workers[0].pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    worker = int(done.stdout)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            with open(f"/proc/{worker}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived its trainer by 30 s")
