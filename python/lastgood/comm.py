# SPDX-License-Identifier: Apache-2.0
"""How ranks talk: communicators made of Python functions, and threads.

lastgood uses them for small messages: who is there, did all succeed, which
checkpoint is loaded. Tensors do not pass through them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from lastgood._core import ffi, lib
from lastgood.errors import CommunicatorError, Status, call, hold
from lastgood.handles import Pointer, allocated


class Communicator(abc.ABC):
    """The ranks that save and load together. Subclass it and implement the four functions, which are *collective*: all
    ranks call the same in the same order, with a timeout in seconds. One that passes it should raise
    :class:`lastgood.TimeoutError`, with the late ranks' names. After an error the communicator is never used again.

    Args:
        rank: this process's number.
        size: how many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abc.abstractmethod
    def barrier(self, timeout: float) -> None:
        """Returns once all ranks have called it."""

    @abc.abstractmethod
    def all_gather(self, data: bytes, timeout: float) -> Sequence[bytes]:
        """What each rank gave, by rank. Lengths may differ and be zero."""

    @abc.abstractmethod
    def broadcast(self, data: bytes, root: int, timeout: float) -> bytes:
        """What ``root`` gave; others give ``b""``."""

    @abc.abstractmethod
    def all_to_all(self, parts: Sequence[bytes], timeout: float) -> Sequence[bytes]:
        """``parts[r]`` goes to rank r; returns what each rank sent here, by rank."""

    def pointer(self) -> Pointer:
        """The library's handle, for sessions."""
        handle = ffi.new_handle(self)
        out = ffi.new("lg_comm **")
        call(lib.lg_comm_create, _OPS, handle, self.rank, self.size, out)
        return Pointer(out[0], lib.lg_comm_free, keep=(self, handle))


class ThreadCommunicator(Communicator):
    """A rank that is a thread of this process, for tests. :meth:`create` makes all of them."""

    def __init__(self, pointer: Pointer) -> None:
        with pointer as comm:
            super().__init__(int(lib.lg_comm_rank(comm)), int(lib.lg_comm_size(comm)))
        self._pointer = pointer

    @staticmethod
    def create(n: int) -> list[ThreadCommunicator]:
        """One for each of ``n`` threads."""
        out = ffi.new("lg_comm *[]", max(n, 1))
        call(lib.lg_comm_threads_create, n, out)
        return [ThreadCommunicator(Pointer(out[i], lib.lg_comm_free)) for i in range(n)]

    def pointer(self) -> Pointer:
        """The library's handle, for sessions."""
        return self._pointer

    def barrier(self, timeout: float) -> None:
        """Used by the library only."""
        raise NotImplementedError

    def all_gather(self, data: bytes, timeout: float) -> Sequence[bytes]:
        """Used by the library only."""
        raise NotImplementedError

    def broadcast(self, data: bytes, root: int, timeout: float) -> bytes:
        """Used by the library only."""
        raise NotImplementedError

    def all_to_all(self, parts: Sequence[bytes], timeout: float) -> Sequence[bytes]:
        """Used by the library only."""
        raise NotImplementedError


# ------------------------------------------------- what the library calls


def _guarded(work: Callable[[], None], err: Any) -> int:
    try:
        work()
    except BaseException as why:  # KeyboardInterrupt too: raised again when the library is back
        return hold(why, err, None if hasattr(why, "status") else Status.COMM)
    return 0


def _bytes(data: Any, size: int) -> bytes:
    return bytes(ffi.buffer(data, size)) if size else b""


def _checked(what: str, parts: Sequence[bytes], size: int) -> Sequence[bytes]:
    if len(parts) != size:
        raise CommunicatorError(f"{what} returned {len(parts)} parts for {size} ranks")
    return parts


@ffi.def_extern(name="lgpy_barrier")  # type: ignore[untyped-decorator]
def _call_barrier(ctx: Any, deadline_ms: int, err: Any) -> int:
    comm: Communicator = ffi.from_handle(ctx)
    return _guarded(lambda: comm.barrier(deadline_ms / 1000), err)


@ffi.def_extern(name="lgpy_all_gather")  # type: ignore[untyped-decorator]
def _call_all_gather(ctx: Any, data: Any, size: int, all_: Any, sizes: Any, deadline_ms: int, err: Any) -> int:
    comm: Communicator = ffi.from_handle(ctx)

    def work() -> None:
        parts = _checked("all_gather", comm.all_gather(_bytes(data, size), deadline_ms / 1000), comm.size)
        memory = allocated(b"".join(parts))
        for i, part in enumerate(parts):
            sizes[i] = len(part)
        all_[0] = memory

    return _guarded(work, err)


@ffi.def_extern(name="lgpy_broadcast")  # type: ignore[untyped-decorator]
def _call_broadcast(ctx: Any, data: Any, size: Any, root: int, deadline_ms: int, err: Any) -> int:
    comm: Communicator = ffi.from_handle(ctx)

    def work() -> None:
        if comm.rank == root:
            comm.broadcast(_bytes(data[0], size[0]), root, deadline_ms / 1000)
            return
        got = comm.broadcast(b"", root, deadline_ms / 1000)
        data[0] = allocated(got)
        size[0] = len(got)

    return _guarded(work, err)


@ffi.def_extern(name="lgpy_all_to_all")  # type: ignore[untyped-decorator]
def _call_all_to_all(
    ctx: Any, send: Any, send_sizes: Any, recv: Any, recv_sizes: Any, deadline_ms: int, err: Any
) -> int:
    comm: Communicator = ffi.from_handle(ctx)

    def work() -> None:
        parts = [_bytes(send[i], send_sizes[i]) for i in range(comm.size)]
        got = _checked("all_to_all", comm.all_to_all(parts, deadline_ms / 1000), comm.size)
        memory: list[Any] = []
        try:
            for part in got:
                memory.append(allocated(part) if part else ffi.NULL)
        except MemoryError:
            for m in memory:
                lib.lg_free(m)
            raise
        for i, part in enumerate(got):
            recv[i], recv_sizes[i] = memory[i], len(part)

    return _guarded(work, err)


_OPS = ffi.new(
    "lg_comm_ops *",
    {
        "version": lib.LG_COMM_OPS_VERSION,
        "barrier": lib.lgpy_barrier,
        "all_gather": lib.lgpy_all_gather,
        "broadcast": lib.lgpy_broadcast,
        "all_to_all": lib.lgpy_all_to_all,
    },
)
