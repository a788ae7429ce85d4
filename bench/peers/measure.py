# SPDX-License-Identifier: Apache-2.0
"""Time, processor time, memory and bytes from disk of one operation, and what
several of them say together."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)


def sync_tree(path: Path) -> None:
    """What a peer that does not sync leaves to its caller: every file and folder of a checkpoint, and the folder that
    it lies in."""
    folders = [path.parent]
    files = [path] if path.is_file() else []
    if path.is_dir():
        for at, _, names in os.walk(path):
            folders.append(Path(at))
            files += [Path(at) / n for n in names]
    for each in (*files, *reversed(folders)):
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def files_of(path: Path) -> list[Path]:
    """All files of a checkpoint."""
    return [path] if path.is_file() else [Path(at) / n for at, _, names in os.walk(path) for n in names]


def forget(path: Path) -> None:
    """Drops a checkpoint's files, which are synced, from the page cache; raises if they are still there."""
    left = total = 0
    for file in files_of(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(fd).st_size
            if size:
                left += _resident(fd, size)
                total += -(-size // mmap.PAGESIZE)
        finally:
            os.close(fd)
    if left > total // 100:
        raise OSError(f"{left} of {total} pages of {path} are still in the page cache; is it on a disk (not on tmpfs)?")


def _resident(fd: int, size: int) -> int:
    """Pages of a file that are in the page cache."""
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as m:
        view = np.frombuffer(m, dtype=np.uint8)
        address = view.__array_interface__["data"][0]
        failed = _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found)
        del view
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(np.frombuffer(found, np.uint8) & 1)


def touch(path: Path) -> None:
    """Reads a checkpoint's files once, into the page cache."""
    for file in files_of(path):
        with open(file, "rb", buffering=0) as f:
            while f.read(4 << 20):
                pass


def remove(path: Path) -> None:
    """Removes a checkpoint."""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def _status(pid: str, key: str) -> int:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as f:
            return next((int(line.split()[1]) * 1024 for line in f if line.startswith(key)), 0)
    except OSError:
        return 0


def children() -> list[str]:
    """Processes below this one."""
    found: list[str] = []
    parents = [str(os.getpid())]
    while parents:
        pid = parents.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as f:
                    below = f.read().split()
                found += below
                parents += below
        except OSError:
            continue
    return found


def _cpu_of(pid: str) -> float:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as f:
            fields = f.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def cpu() -> float:
    """Processor seconds of this process and of those below it that live."""
    return time.process_time() + sum(_cpu_of(pid) for pid in children())


def disk_bytes() -> int:
    """What this process had read from disk."""
    with open("/proc/self/io", encoding="ascii") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("read_bytes"))


class Meter:
    """Measures what happens between :meth:`start` and :meth:`stop`."""

    def start(self) -> None:
        """Begins; the peak of memory counts from here."""
        gc.collect()
        with open("/proc/self/clear_refs", "w", encoding="ascii") as f:
            f.write("5")
        self._memory = _status("self", "VmRSS")
        self._below = {pid: _status(pid, "VmRSS") for pid in children()}
        self._disk = disk_bytes()
        self._cpu = cpu()
        self._began = time.perf_counter()

    def lap(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._began

    def stop(self) -> dict[str, float]:
        """Seconds, processor seconds, bytes of memory beyond what there was, bytes from disk."""
        seconds = self.lap()
        used = cpu() - self._cpu
        below = sum(_status(pid, "VmHWM") - self._below.get(pid, 0) for pid in children())
        return {
            "seconds": seconds,
            "cpu": used,
            "memory": max(0, _status("self", "VmHWM") - self._memory) + max(0, below),
            "disk": disk_bytes() - self._disk,
        }


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Calls a function and measures it."""
    meter = Meter()
    meter.start()
    result = work()
    return result, meter.stop()


# ----------------------------------------------------------------- statistics


def median(values: list[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def spread(values: list[float]) -> tuple[float, float]:
    """First and third quartile; the least and the largest of fewer than four."""
    if len(values) < 4:
        return min(values), max(values)
    q = statistics.quantiles(values, n=4, method="inclusive")
    return q[0], q[2]


def interval(values: list[float], seed: int = 1) -> tuple[float, float]:
    """The 95 % interval of the median, by bootstrap."""
    if len(values) < 3:
        return min(values), max(values)
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[49], medians[1949]
