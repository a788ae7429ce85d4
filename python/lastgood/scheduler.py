# SPDX-License-Identifier: Apache-2.0
"""Asking for a job to be started again once its last state is saved."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Literal

from lastgood.errors import InvalidError, StateError

# "scontrol": Slurm is asked by rank 0. A number: all ranks exit with it, and what has started them starts them again.
Requeue = Literal["scontrol"] | int | None

_TIMEOUT_S = 60


def slurm_job() -> str | None:
    """The name by which Slurm requeues this process's job, and no other task of its array; None outside of Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return os.environ.get("SLURM_JOB_ID") or None


def check_requeue(how: Requeue) -> None:
    """Finds at the beginning of a run what would otherwise be found at its end.

    Raises:
        InvalidError: no such way, or not within a job of Slurm, or there is no scontrol.
    """
    if how is None:
        return
    if isinstance(how, int) and not isinstance(how, bool):
        if not 1 <= how <= 255:
            raise InvalidError(f"requeue is the exit code {how}, not one of 1 to 255")
        return
    if how != "scontrol":
        raise InvalidError(f'requeue is {how!r}, neither "scontrol" nor an exit code')
    if slurm_job() is None:
        raise InvalidError('requeue="scontrol", but SLURM_JOB_ID is not set: this is no job of Slurm')
    if shutil.which("scontrol") is None:
        raise InvalidError(
            'requeue="scontrol", but there is no scontrol in PATH; give an exit code (docs/preemption.md)'
        )


def requeue(how: Requeue, rank: int = 0) -> None:
    """Asks for this job to be started again. Call it on every rank when the last save is committed.

    Args:
        how: ``"scontrol"``: rank 0 runs ``scontrol requeue`` for this job, which then ends it; an exit code: every rank
            raises ``SystemExit`` with it; None: nothing.
        rank: this process's number.

    Raises:
        StateError: scontrol failed; with what it said.
    """
    check_requeue(how)
    if how is None:
        return
    if how != "scontrol":
        raise SystemExit(how)
    if rank != 0:
        return
    job = slurm_job()
    assert job is not None
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as why:
        raise StateError(f"{' '.join(command)}: {why}") from why
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise StateError(f"{' '.join(command)} failed with {done.returncode}: {said}")
