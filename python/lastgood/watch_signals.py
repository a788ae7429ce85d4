# SPDX-License-Identifier: Apache-2.0
"""Which process gets which signal, and how long it lives after SIGTERM: ``python -m lastgood.preempt --watch``."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TextIO

_WATCHED = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGCONT", "SIGXCPU", "SIGINT")
_ABOUT = """\
What lastgood does with signals while an Agreement (or a Checkpointer) is open:
  SIGTERM, SIGUSR1   all ranks save the same last step and end; what handled them before is called too
  SIGINT             stays Python's KeyboardInterrupt
  all others         are left alone
To see which process gets which signal, put --watch in the place of the training program:
  srun python -m lastgood.preempt --watch
"""


def watch(seconds: float | None = None, out: TextIO | None = None) -> int:
    """Prints each signal that this process gets, with its sender, and every second after SIGTERM that it is still
    there, so that the last line shows the grace time. Ends at SIGINT.

    Args:
        seconds: ends after so many; None: never.
        out: where to; None: standard output.
    """
    to = out if out is not None else sys.stdout
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
    who = f"{socket.gethostname()} pid {os.getpid()}" + (f" rank {rank}" if rank else "")

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {who}: {text}", file=to, flush=True)

    watched = {getattr(signal, name) for name in _WATCHED}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    began = time.monotonic()
    term: float | None = None
    try:
        say(f"watching, child of {os.getppid()} ({_name_of(os.getppid())})")
        while seconds is None or time.monotonic() - began < seconds:
            left = 1.0 if seconds is None else min(1.0, max(0.0, began + seconds - time.monotonic()))
            got = signal.sigtimedwait(watched, left)
            if got is None:
                if term is not None:
                    say(f"still here {time.monotonic() - term:.0f} s after SIGTERM")
                continue
            sender = f"process {got.si_pid} ({_name_of(got.si_pid)})" if got.si_pid else "the kernel"
            say(f"{signal.Signals(got.si_signo).name} from {sender}")
            if got.si_signo == signal.SIGINT:
                break
            if got.si_signo == signal.SIGTERM and term is None:
                term = time.monotonic()
        say("end")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


def _name_of(pid: int) -> str:
    """Of a process on this machine that is still there and that this one may look at."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lastgood.preempt", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--watch", action="store_true", help="print every signal that this process gets")
    parser.add_argument("--seconds", type=float, help="end after so many seconds; else at SIGINT or SIGKILL")
    parsed = parser.parse_args(arguments)
    if not parsed.watch:
        parser.print_help()
        return 0
    return watch(parsed.seconds)
