# SPDX-License-Identifier: Apache-2.0
"""A rank that the kernel kills for want of memory in the middle of a save."""

import os
import shutil
import time
from pathlib import Path

import lastgood
import pytest
import torch
from lastgood.pytorch import GlooCommunicator
from test_gloo import on_processes

CGROUPS = Path("/sys/fs/cgroup")
ROWS = 24 << 20  # of F32: 96 MiB, a third for each rank
LIMIT = 16 << 20


def make_cgroup():
    """A cgroup of its own with a limit of memory, and the file that counts kills; skips where there is no right to one."""
    name = f"lastgood-test-{os.getpid()}"
    for parent, limit, kills in (
        (CGROUPS / "memory", "memory.limit_in_bytes", "memory.oom_control"),
        (CGROUPS, "memory.max", "memory.events"),
    ):  # version 1, version 2
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(LIMIT))
            (group / "cgroup.procs").read_text()
        except OSError:
            group.rmdir()
            continue
        return group, group / kills
    pytest.skip("no right to make a cgroup that limits memory")


def kills_in(path):
    return sum(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("oom_kill "))


def save_beside_one_that_is_killed(rank, root, group):
    comm = GlooCommunicator(timeout=60)
    layout = lastgood.Layout([3], [lastgood.Split(0)])
    mine = torch.full((ROWS // 3,), float(rank + 1))
    told = None
    with lastgood.Session(root, comm, timeout=20, buffer_bytes=8 << 20) as session:
        assert session.resume() is None
        with session.save(1) as save:
            save.tensor("w", torch.ones(1), shape=(3,), layout=layout)
        if rank == 1:
            (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
        try:
            with session.save(2) as save:
                save.tensor("w", mine, shape=(ROWS,), layout=layout)
        except lastgood.Error as why:
            told = type(why).__name__, why.rank, str(why)
    return told


def test_k01_k06_a_rank_that_is_killed_for_want_of_memory_in_a_save_is_named_and_nothing_is_lost(tmp_path):
    # What is written to a file system in memory counts as the writer's.
    if not os.access("/dev/shm", os.W_OK) or shutil.disk_usage("/dev/shm").free < (256 << 20):
        pytest.skip("no room in /dev/shm")
    group, kills = make_cgroup()
    root = Path(f"/dev/shm/lastgood-oom-{os.getpid()}")
    root.mkdir()
    try:
        found = on_processes(3, tmp_path, save_beside_one_that_is_killed, str(root), str(group), without=(1,))
        assert kills_in(kills) == 1
        assert found[1] is None
        for rank in (0, 2):
            _, culprit, text = found[rank]
            assert culprit == 1 and "rank 1" in text, found
        into = torch.zeros(3)
        with lastgood.Session(root) as session:  # goes on from the step before
            resumed = session.resume({"w": into})
            assert resumed.step == 1 and torch.equal(into, torch.ones(3))
            with session.save(3) as save:
                save.tensors({"w": into})
        assert lastgood.open(root).step == 3
        assert not list(root.glob(".step-*")) and not list(root.glob(".trash-*"))
    finally:
        shutil.rmtree(root, ignore_errors=True)
        for _ in range(100):  # a cgroup lets go of its last process when that is gone
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
