# SPDX-License-Identifier: Apache-2.0
"""Ranks of torch.distributed."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lastgood.comm import Communicator
from lastgood.errors import CommunicatorError, ConflictError, InvalidError, TimeoutError, UnsupportedError

# How long a wait may take before Python looks for signals.
_SLICE = datetime.timedelta(milliseconds=200)
# After an error of another kind than a timeout: how long others may take to
# arrive before they count as gone.
_GRACE = 1.0
# Sizes that differ much are not padded to the largest.
_PAD_BYTES = 64 << 20
# What torch's documentation does not have, and a group of one's own is made of. None has an underscore.
_STORE = ("ProcessGroup.get_group_store",)
_GLOO = (
    *_STORE,
    "BroadcastOptions",
    "PrefixStore",
    *(f"ProcessGroupGloo.{name}" for name in ("allgather", "alltoall_base", "barrier", "broadcast")),
)
# How many groups of the same ranks this process has made.
_made: dict[tuple[int, ...], int] = {}


class GlooCommunicator(Communicator):
    """The ranks of torch.distributed, over a gloo group of its own, so that nothing mixes with the trainer's
    collectives. *Collective* over the group.

    Args:
        group: whose ranks save and load together; None: all. It may be one of any backend, of NCCL for example. Each of
            its ranks makes its communicators of it in the same order.
        timeout: seconds; no wait of a session may be longer.

    Every call notes in the group's key-value store that this rank has arrived, so that the late ones can be named.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 3600.0) -> None:
        if not dist.is_initialized():
            raise InvalidError("torch.distributed is not initialised; one process alone needs no communicator")
        _check_torch(_GLOO)
        world: Any = dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(world if group is None else group))
        if dist.get_rank() not in ranks:
            raise InvalidError("this process is not in the group")
        super().__init__(ranks.index(dist.get_rank()), len(ranks))
        # Not dist.new_group: it names a group by how many this process has, which ranks need not agree on, and takes a
        # name again after the group has ended, whose keys in the store then lead to where nobody is.
        _made[ranks] = _made.get(ranks, 0) + 1
        name = hashlib.sha256(f"{ranks}".encode()).hexdigest()[:32]
        self._store: Any = dist.PrefixStore(  # type: ignore[attr-defined]
            f"lastgood/group-{name}-{_made[ranks]}", world.get_group_store()
        )
        self._calls = 0
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", self._store),  # type: ignore[attr-defined]
            self.rank,
            self.size,
            timeout=datetime.timedelta(seconds=timeout),
        )

    def close(self) -> None:
        """Frees the group, if nothing is left under way in it. Sessions that use it must be closed before."""
        self._group = None

    # ------------------------------------------------------------------ waiting

    def _arrive(self, call: str) -> None:
        self._calls += 1
        try:
            self._store.set(str(self.rank), f"{self._calls} {call}")
        except Exception as why:
            raise CommunicatorError(f"{call} #{self._calls}: the key-value store does not answer: {why}") from why

    def _absent(self, call: str) -> list[int]:
        """Ranks that have not come to this call yet; raises if one has come to another."""
        late = []
        for rank in range(self.size):
            key = str(rank)
            number, _, other = (
                self._store.get(key).decode().partition(" ") if self._store.check([key]) else ("0", "", "")
            )
            if int(number) < self._calls:
                late.append(rank)
            elif int(number) == self._calls and other != call:
                text = f"rank {rank} called {other} #{number}, but rank {self.rank} called {call} #{number}"
                raise ConflictError(text, rank=rank)
        return late

    def _failed(self, call: str, timeout: float, why: Exception | None) -> Exception:
        """Why a call came to no end: who is late or gone."""
        where = f"(rank {self.rank} waited in {call} #{self._calls})"
        try:
            late = self._absent(call)
            if why is not None:
                end = time.monotonic() + _GRACE
                while late and time.monotonic() < end:
                    time.sleep(0.05)
                    late = self._absent(call)
        except ConflictError as conflict:
            return conflict
        except Exception as store:  # of whatever the store is made of
            return CommunicatorError(f"{why or 'timed out'} {where}, and the key-value store does not answer: {store}")
        names = ", ".join(map(str, late))
        if why is None and late:
            return TimeoutError(f"rank {names} did not arrive within {timeout * 1000:.0f} ms {where}", rank=late[0])
        if why is None:
            return TimeoutError(f"all ranks arrived, but not all data within {timeout * 1000:.0f} ms {where}")
        if late:
            return CommunicatorError(f"rank {names} left or failed {where}: {why}", rank=late[0])
        return CommunicatorError(f"{call} failed {where}: {why}")

    def _run(self, call: str, timeout: float, begin: Callable[[], Any], *, first: bool = True) -> None:
        """Begins one of gloo's operations and waits for it, in slices in which Python can be interrupted."""
        if self._group is None:
            raise CommunicatorError(f"{call}: the communicator is closed")
        if first:
            self._arrive(call)
        end = time.monotonic() + timeout
        try:
            work = begin()
        except RuntimeError as why:
            raise self._failed(call, timeout, why) from why
        while True:
            late = time.monotonic() > end
            over = work.is_completed()  # before the wait, whose own end says nothing then: it may come in between
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as why:
                if over:
                    raise self._failed(call, timeout, why) from why
                if late:
                    _leave(self._group)
                    raise self._failed(call, timeout, None) from why
            except BaseException:
                _leave(self._group)
                raise

    # -------------------------------------------------------------- collectives

    def barrier(self, timeout: float) -> None:
        """Returns once all ranks have called it."""
        self._run("barrier", timeout, lambda: self._group.barrier())  # noqa: PLW0108  (it may be closed)

    def all_gather(self, data: bytes, timeout: float) -> Sequence[bytes]:
        """What each rank gave, by rank."""
        call = "all-gather"
        sizes = torch.empty(self.size, dtype=torch.int64)
        mine = torch.tensor([len(data)], dtype=torch.int64)
        self._run(call, timeout, lambda: self._group.allgather([list(sizes.view(-1, 1).unbind())], [mine]))
        lengths: list[int] = sizes.tolist()
        largest = max(lengths)
        if largest == 0:
            return [b""] * self.size
        if largest * self.size > max(_PAD_BYTES, 4 * sum(lengths)):
            return [self._part(call, data, r, n, timeout) if n else b"" for r, n in enumerate(lengths)]
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: len(data)] = _tensor(data)
        got = torch.empty(self.size * largest, dtype=torch.uint8)
        self._run(
            call,
            timeout,
            lambda: self._group.allgather([list(got.view(self.size, -1).unbind())], [padded]),
            first=False,
        )
        raw = _bytes(got)
        return [raw[r * largest : r * largest + n] for r, n in enumerate(lengths)]

    def _part(self, call: str, data: bytes, root: int, size: int, timeout: float) -> bytes:
        t = _tensor(data) if self.rank == root else torch.empty(size, dtype=torch.uint8)
        self._run(call, timeout, lambda: self._broadcast(t, root), first=False)
        return data if self.rank == root else _bytes(t)

    def _broadcast(self, t: torch.Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._group.broadcast([t], options)

    def broadcast(self, data: bytes, root: int, timeout: float) -> bytes:
        """What ``root`` gave."""
        call = "broadcast"
        size = torch.tensor([len(data)], dtype=torch.int64)
        self._run(call, timeout, lambda: self._broadcast(size, root))
        n = int(size.item())
        return self._part(call, data, root, n, timeout) if n else b""

    def all_to_all(self, parts: Sequence[bytes], timeout: float) -> Sequence[bytes]:
        """``parts[r]`` goes to rank r; returns what each rank sent here."""
        call = "all-to-all"
        send = torch.tensor([len(p) for p in parts], dtype=torch.int64)
        recv = torch.empty_like(send)
        self._run(call, timeout, lambda: self._group.alltoall_base(recv, send, [], []))
        out_sizes, in_sizes = recv.tolist(), send.tolist()
        got = torch.empty(sum(out_sizes), dtype=torch.uint8)
        data = _tensor(b"".join(parts))
        self._run(call, timeout, lambda: self._group.alltoall_base(got, data, out_sizes, in_sizes), first=False)
        raw = _bytes(got)
        found, at = [], 0
        for n in out_sizes:
            found.append(raw[at : at + n])
            at += n
        return found


class StoreKeys:
    """A key-value store of torch.distributed through which ranks tell each other how a save in the background goes
    (``Session(kv=StoreKeys())``): quicker than files where a shared folder is slow to show new ones.

    Args:
        store: a store that all ranks of the session share; None: that of torch.distributed's default group. Its keys
            begin with ``lastgood/``, and those of earlier saves are deleted where the store can.
    """

    def __init__(self, store: Any = None) -> None:
        if store is None:
            if not dist.is_initialized():
                raise InvalidError("torch.distributed is not initialised; one process alone needs no store")
            _check_torch(_STORE)
            found: Any = dist.group.WORLD
            store = found.get_group_store()
        self._store: Any = store
        # A connection of its own, if it can: another thread may wait for a key on that one.
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
            self._store = self._store.clone()
        self._mine: list[str] = []

    def set(self, key: str, value: bytes, /) -> None:
        """Sets a key for all ranks."""
        self._store.set(key, value)
        # A save begins when the one before has ended on all ranks: its keys have been read.
        save = key.rpartition("/")[0]
        for old in [k for k in self._mine if k.rpartition("/")[0] != save]:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                self._store.delete_key(old)
            self._mine.remove(old)
        self._mine.append(key)

    def get(self, key: str, /) -> bytes | None:
        """The value of a key, or None if it is not set."""
        if not self._store.check([key]):
            return None
        value: bytes = self._store.get(key)
        return value


def _leave(group: object) -> None:
    """Keeps a group for as long as the process lives. Its end would wait for what is under way in it, and that for ranks
    that may never come: for as long as the group's own timeout."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _check_torch(needed: Sequence[str]) -> None:
    """That this torch has what is used of torch.distributed.

    Raises:
        UnsupportedError: it lacks something, by name.
    """
    for name in needed:
        found: Any = dist
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise UnsupportedError(
                f"torch {torch.__version__} has no torch.distributed.{name}, which lastgood's ranks over torch.distributed "
                "need: another torch (2.13 or later, with gloo), or a lastgood.Communicator of your own"
            )


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes(t: torch.Tensor) -> bytes:
    # Without NumPy, which need not be installed.
    from lastgood._core import ffi

    return bytes(ffi.buffer(ffi.cast("char *", t.data_ptr()), t.numel())) if t.numel() else b""
