# SPDX-License-Identifier: Apache-2.0
"""Starts the example trainer under mpirun, watches it and kills it.

Shared by tools/demo and tools/soak; standard library only.
"""

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("BUILD", SOURCE / "build")).absolute()
TRAINER = Path(os.environ.get("GPT_C", BUILD / "examples" / "gpt-c" / "gpt-c"))
CLI = Path(os.environ.get("LASTGOOD_CLI", BUILD / "cli" / "lastgood"))
MPIRUN = os.environ.get("MPIRUN", "mpirun")
TEXT = SOURCE / "examples" / "gpt-c" / "data" / "persuasion.txt"

POLL_SECONDS = 0.002


running = set()  # jobs that have not been cleaned up; none outlives the script


@atexit.register
def kill_running():
    for job in list(running):
        job.kill()


class JobError(Exception):
    """Something that should not have happened, told in one line or more."""


def need(path, what, hint):
    if not Path(path).is_file():
        raise JobError(f"{what} is not at {path}: build it first (meson setup build && ninja -C build), or set {hint}")


def show(path):
    """A path as a person would type it here."""
    path = Path(path)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def process_state(pid):
    """(state, parent) of a process, or None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[1])


def is_alive(pid):
    state = process_state(pid)
    return state is not None and state[0] not in "ZX"


def descendants(pid):
    children = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            state = process_state(int(name))
            if state:
                children.setdefault(state[1], []).append(int(name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def rank_of(pid):
    """The MPI rank of a process, or None."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    for entry in environment:
        if entry.startswith(b"OMPI_COMM_WORLD_RANK="):
            return int(entry.split(b"=")[1])
    return None


class Job:
    """One mpirun of the trainer. Its output goes to files `name`.out and .err."""

    def __init__(self, ranks, arguments, folder, name):
        self.ranks = ranks
        self.out_path = Path(folder) / f"{name}.out"
        self.err_path = Path(folder) / f"{name}.err"
        # What a killed MPI job leaves behind (session folder, shared memory)
        # goes where it can be removed.
        self.session = tempfile.mkdtemp(prefix="lg-mpi-", dir="/tmp")
        shared = "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else self.session
        self.shared = tempfile.mkdtemp(prefix="lg-mpi-", dir=shared)
        command = [MPIRUN, "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        for key, value in (
            ("orte_tmpdir_base", self.session),
            ("btl_vader_backing_directory", self.shared),
            ("btl_vader_single_copy_mechanism", "none"),
            ("mpi_yield_when_idle", "1"),
            ("btl", "self,vader"),
            ("orte_base_help_aggregate", "0"),
        ):
            command += ["--mca", key, value]
        command.append(str(TRAINER))
        command += [str(a) for a in arguments]
        # Open MPI leaks; in a build with AddressSanitizer that would be the trainer's failure
        environment = {"ASAN_OPTIONS": "detect_leaks=0", **os.environ}
        self.started = time.monotonic()
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            # a session of its own: signals to this script do not reach it and its group can be killed
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, env=environment
            )
        running.add(self)

    def errors(self):
        return self.err_path.read_text(errors="replace")

    def said(self):
        """The trainer's own lines on stderr."""
        return [line[7:] for line in self.errors().splitlines() if line.startswith("gpt-c: ")]

    def finished(self):
        return self.process.poll() is not None

    def wait_for(self, condition, seconds=120):
        """True once condition() holds, False if the job ended before."""
        until = time.monotonic() + seconds
        while not condition():
            if self.finished():
                return bool(condition())
            if time.monotonic() > until:
                self.kill()
                raise JobError(f"nothing happened for {seconds} s; see {show(self.err_path)}")
            time.sleep(POLL_SECONDS)
        return True

    def wait(self, seconds=600):
        """Waits for the end; returns mpirun's exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise JobError(f"not finished after {seconds} s; see {show(self.err_path)}") from None
        self.clean()
        return code

    def finish(self, seconds=600):
        """Waits for a successful end."""
        code = self.wait(seconds)
        if code != 0:
            raise JobError(f"the trainer ended with exit code {code}:\n{self.errors()}")

    def rank_pids(self):
        """{rank: pid} of the ranks that have started."""
        found = {}
        for pid in descendants(self.process.pid):
            rank = rank_of(pid)
            if rank is not None:
                found[rank] = pid
        return found

    def kill(self):
        """SIGKILL to every process of the job at once. False if it had ended."""
        pid = self.process.pid
        if self.finished():
            self.clean()
            return False
        send(pid, signal.SIGSTOP)  # it must not start ranks or react while they are looked up
        victims = descendants(pid)
        for victim in victims:
            send(victim, signal.SIGKILL)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.wait_gone(victims)
        self.clean()
        return True

    def kill_rank(self, rank):
        """SIGKILL to one rank; mpirun ends the others. False if it had ended."""
        pids = self.rank_pids()
        if rank not in pids or self.finished():
            return False
        send(pids[rank], signal.SIGKILL)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            # Open MPI 4.1's mpirun can wait for ever when a rank dies while it connects
            return self.kill()
        self.wait_gone(pids.values())
        self.clean()
        return self.process.returncode != 0

    def ask_to_stop(self, rank=0):
        """SIGTERM to one rank, as a batch system sends before it kills."""
        pids = self.rank_pids()
        if rank in pids:
            send(pids[rank], signal.SIGTERM)

    def wait_gone(self, pids):
        until = time.monotonic() + 30
        while any(is_alive(pid) for pid in pids):
            if time.monotonic() > until:
                raise JobError(f"killed processes are still there: {list(pids)}")
            time.sleep(POLL_SECONDS)

    def clean(self):
        running.discard(self)
        for folder in (self.session, self.shared):
            shutil.rmtree(folder, ignore_errors=True)
