# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a PyTorch program, kills them, and reads what they said.

Each rank is a process of its own, with the environment that torchrun gives. All come from a server that has imported
torch, so that a start takes a fraction of a second and kills hit the program rather than its imports. TorchrunJob has
them started by torchrun itself, which takes some seconds for each start.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "pytorch"
GRACE = 3.0  # seconds from SIGTERM to SIGKILL, when another rank has died


class JobError(Exception):
    """What should not have happened."""


def context():
    """The server from which ranks are forked; the same at each call."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["torch", "torch.distributed.fsdp", "lastgood.checkpointer", "lastgood.data"])
    return found


def run_rank(script, arguments, environment, log):
    """The life of one rank."""
    os.setsid()  # with the workers of its loader it can be killed as a group
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)  # as under torchrun
    multiprocessing.set_start_method("fork", force=True)  # as in a program of its own, not the server's
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


class Job:
    """One start of a program of examples/pytorch on some ranks; they write to one log."""

    def __init__(self, program, arguments, world, log):
        self.log = Path(log)
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        self.started = time.monotonic()
        self.ranks = []
        self.killed = False
        for rank in range(world):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            environment = {name: str(value) for name, value in environment.items()}
            what = (str(EXAMPLES / program), [str(a) for a in arguments], environment, str(self.log))
            process = context().Process(target=run_rank, args=what)
            process.start()
            self.ranks.append(process)

    def said(self):
        """The lines of all ranks."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []

    def living(self):
        """Those that have not ended."""
        return [p for p in self.ranks if p.is_alive()]

    def wait_for(self, what, timeout=120.0):
        """Waits until it holds or a rank has ended."""
        end = time.monotonic() + timeout
        while not what() and len(self.living()) == len(self.ranks):
            if time.monotonic() > end:
                self.kill()
                raise JobError(f"nothing came for {timeout:.0f} s; {self.log} ends:\n" + "\n".join(self.said()[-20:]))
            time.sleep(0.002)

    def kill(self, rank=None):
        """SIGKILL to one rank, or to all. Where it was one, the others get SIGTERM and then SIGKILL, as from torchrun.

        Returns:
            Whether a rank was killed that had not ended by itself.
        """
        for process in self.ranks if rank is None else [self.ranks[rank]]:
            signal_group(process, signal.SIGKILL)
        if rank is not None:
            self.ranks[rank].join()
            for process in self.living():
                signal_group(process, signal.SIGTERM)
            self.join(GRACE)
            for process in self.living():
                signal_group(process, signal.SIGKILL)
        self.join(60.0)
        self.killed = any(p.exitcode == -signal.SIGKILL for p in self.ranks)
        return self.killed

    def join(self, timeout):
        """Waits until all have ended, or the time is up."""
        end = time.monotonic() + timeout
        for process in self.ranks:
            process.join(max(end - time.monotonic(), 0.0))

    def finish(self, timeout=120.0):
        """Waits for the end of a job that is not killed, and returns what it said."""
        self.join(timeout)
        codes = [p.exitcode for p in self.ranks]
        if any(codes) or self.living():
            self.kill()
            raise JobError(
                f"exit codes {codes} (None: still running); {self.log} ends:\n" + "\n".join(self.said()[-30:])
            )
        return self.said()


def signal_group(process, number):
    """To a rank and its children. A rank that has only just been started has no group of its own yet."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        if process.is_alive():
            os.kill(process.pid, number)


class TorchrunJob(Job):
    """One start by torchrun."""

    def __init__(self, program, arguments, world, log):
        self.log = Path(log)
        self.world = world
        self.killed = False
        self.started = time.monotonic()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
        command += [f"--nproc-per-node={world}", str(EXAMPLES / program), *(str(a) for a in arguments)]
        with open(self.log, "ab") as out:
            self.agent = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def workers(self):
        """Process numbers of the ranks that run, by rank."""
        found = {}
        try:
            children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text(encoding="ascii")
            for pid in children.split():
                for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if item.startswith(b"RANK="):
                        found[int(item[5:])] = int(pid)
        except OSError:
            pass  # it has just ended
        return found

    def wait_for(self, what, timeout=120.0):
        end = time.monotonic() + timeout
        while not what() and self.agent.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise JobError(f"nothing came for {timeout:.0f} s; {self.log} ends:\n" + "\n".join(self.said()[-20:]))
            time.sleep(0.002)

    def kill(self, rank=None):
        """SIGKILL to one rank, which torchrun then finds and ends the others; or to torchrun and all ranks."""
        if self.agent.poll() is not None:
            return False
        workers = self.workers()
        victims = [*workers.values(), self.agent.pid] if rank is None else [workers[rank]] if rank in workers else []
        if not victims:  # it has not started its ranks yet
            victims = [self.agent.pid]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.join(90.0)
        self.killed = self.agent.poll() != 0
        # Ranks that were started just now, and what a rank has left: each is a session of its own.
        for pid in {*workers.values(), *self.strays()}:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.gone()
        return self.killed

    def strays(self):
        """Ranks of this job that run although torchrun has ended."""
        mark, found = str(self.log.parent / "root").encode(), []
        for folder in Path("/proc").iterdir():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            except OSError:
                continue
            if mark in words:
                found.append(int(folder.name))
        return found

    def gone(self):
        """Waits until no rank is left that could still write."""
        end = time.monotonic() + 60
        while self.strays():
            if time.monotonic() > end:
                raise JobError(f"ranks of {self.log} do not end")
            time.sleep(0.01)

    def living(self):
        return [self.agent] if self.agent.poll() is None else []

    def join(self, timeout):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.agent.wait(timeout)

    def finish(self, timeout=240.0):
        self.join(timeout)
        code = self.agent.poll()
        if code != 0:
            self.kill()
            raise JobError(f"exit code {code} (None: still running); {self.log} ends:\n" + "\n".join(self.said()[-30:]))
        return self.said()
