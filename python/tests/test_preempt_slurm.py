# SPDX-License-Identifier: Apache-2.0
"""Requeueing, and the example's batch script with a false Slurm around it."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import lastgood
import pytest
from frameworks import need
from lastgood.preempt import check_requeue, requeue

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "slurm"

# Runs its command once a task, passes signals on, and ends with the largest exit code, as srun does.
SRUN = """#!{python}
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
tasks = []
def forward(number, frame):
    for task in tasks:
        task.send_signal(number)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, forward)
for i in range(int(os.environ["SLURM_NTASKS"])):
    tasks.append(subprocess.Popen(command, env=dict(os.environ, SLURM_PROCID=str(i), SLURM_LOCALID=str(i))))
sys.exit(max(task.wait() % 256 for task in tasks))
"""
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then echo localhost; exit 0; fi
echo "$*" >> "$SAID"
[ -z "$REFUSE" ] || { echo "$REFUSE" >&2; exit 1; }
"""


def free_job_id():
    """A job's number from which the script makes a port that is free."""
    with socket.socket() as s:
        for job in range(1000, 20000):
            try:
                s.bind(("localhost", 20000 + job))
            except OSError:
                continue
            return str(job)
    raise AssertionError("no free port")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A false Slurm in PATH; the file has what scontrol was told."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(stat.S_IRWXU)
    said = tmp_path / "said"
    said.touch()
    for name, value in {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "SAID": str(said), "REFUSE": "",
        "SLURM_JOB_ID": free_job_id(), "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost",
        "SLURM_SUBMIT_DIR": str(EXAMPLE), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return said


def batch(root, steps):
    """Begins the job, and reads up to its first line."""
    command = ["bash", str(EXAMPLE / "train.sbatch"), str(root), str(steps)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    return job, job.stdout.readline()


def end(job):
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    job.stdout.close()


def test_k20_f313_f314_the_job_saves_at_a_signal_to_its_shell_is_requeued_and_goes_on(slurm, root):
    need("torch")
    root.mkdir()
    job, first = batch(root, 10**9)
    try:
        assert first == "begins at step 0\n"
        job.send_signal(signal.SIGUSR1)  # to the shell only
        rest = job.stdout.read()
        assert job.wait(60) == 0, rest
    finally:
        end(job)
    assert "ends: SIGUSR1 on rank" in rest
    assert "done" not in rest
    assert slurm.read_text() == f"requeue {os.environ['SLURM_JOB_ID']}\n"
    step = lastgood.open(root).step
    assert step > 0
    assert f"step {step}, loss" in rest

    job, first = batch(root, step + 10)  # as Slurm starts it again
    try:
        assert first == f"begins at step {step}\n"
        rest = job.stdout.read()
        assert job.wait(60) == 0, rest
    finally:
        end(job)
    assert rest.endswith("done\n")
    assert lastgood.open(root).step == step + 10
    assert slurm.read_text().count("requeue") == 1  # it is done


def test_rank_0_requeues_the_job_by_scontrol_and_no_other_rank_does(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    check_requeue("scontrol")
    requeue("scontrol", rank=1)
    assert slurm.read_text() == ""
    requeue("scontrol", rank=0)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "1230")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    requeue("scontrol")
    assert slurm.read_text().splitlines() == ["requeue 1234", "requeue 1230_4"]


def test_a_requeue_that_slurm_refuses_is_an_error_with_its_words(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("REFUSE", "Requested operation is presently disabled")
    with pytest.raises(lastgood.StateError, match="scontrol requeue 7 failed with 1: Requested operation is presently"):
        requeue("scontrol")


def test_with_an_exit_code_all_ranks_exit_with_it():
    for rank in (0, 1):
        with pytest.raises(SystemExit) as why:
            requeue(85, rank)
        assert why.value.code == 85
    requeue(None)
    check_requeue(None)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("scontrol", "SLURM_JOB_ID is not set"),
        ("slurm", "neither"),
        (0, "exit code 0, not one of 1 to 255"),
        (True, "neither"),
    ],
)
def test_a_requeue_that_cannot_work_is_refused_at_the_beginning(how, text, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    with pytest.raises(lastgood.InvalidError, match=text):
        check_requeue(how)


def test_without_scontrol_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(lastgood.InvalidError, match="there is no scontrol in PATH"):
        check_requeue("scontrol")


def test_the_batch_script_passes_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck")
    done = subprocess.run(
        ["shellcheck", str(EXAMPLE / "train.sbatch")], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == ""
    assert done.returncode == 0
