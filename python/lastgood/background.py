# SPDX-License-Identifier: Apache-2.0
"""What a save in the background needs of Python: memory that must stay, a
key-value store for the ranks' messages, and an end before the interpreter's.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from lastgood._core import ffi, lib
from lastgood.errors import Error, Status, error_of, new_error
from lastgood.handles import allocated

if TYPE_CHECKING:
    from lastgood.session import Session


class KeyValueStore(Protocol):
    """What ranks share to tell each other how a save in the background goes: any object with these two functions. They
    are called from a thread of the library, one at a time; each key is set once, and values are small (8 kB at most).
    What they raise fails the save.
    """

    def set(self, key: str, value: bytes, /) -> None:
        """Sets a key for all ranks."""

    def get(self, key: str, /) -> bytes | None:
        """The value of a key, or None if it is not set; never waits for it."""


class Kept:
    """What the library reads, in the background, after its functions have returned. It outlives the session when a
    save does.

    Args:
        store, kv: handles and objects behind them.
    """

    def __init__(self, store: Any, kv: Any) -> None:
        self.memory: list[Any] = []  # of lazy tensors
        self.staging: Any = None  # host memory that devices write to
        self.pid = os.getpid()
        self._others = (store, kv)

    def close(self, raw: Any) -> tuple[int, Any]:
        """Closes the session and returns status and error. In a child of fork nothing happens: the session is its
        parent's.
        """
        err = new_error()
        if os.getpid() != self.pid:
            return 0, err
        status = None
        try:
            status = lib.lg_session_close(raw, err)
        finally:  # interrupted: nobody knows
            if status is None or status == Status.TIMEOUT:
                _never_free((self.memory, self.staging, self._others))
        return status, err

    def finalize(self, raw: Any) -> None:
        """Closes a session that nobody holds any more."""
        status, err = self.close(raw)
        if status != 0:
            _report(error_of(status, err))


def _never_free(what: Any) -> None:
    """A save that did not end in time still reads it, maybe when the interpreter is gone."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def _report(error: Error) -> None:
    """Where nobody is left to catch it."""
    if sys.stderr is not None:
        print(f"lastgood: a session was never closed: {error}", file=sys.stderr)


# ------------------------------------------------------- the interpreter's end

# Those that have launched something.
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def note(session: Session) -> None:
    """Ends the session with the interpreter, if nobody does before."""
    _sessions.add(session)


@atexit.register
def _end_all() -> None:
    """The library itself ends saves when the process does, but by then arrays, and functions of a key-value store, are
    gone.
    """
    sessions = list(_sessions)
    try:
        for session in sessions:
            try:
                session.close()
            except Error as why:
                _report(why)
    except BaseException:  # interrupted: the library waits for what is left
        _never_free(sessions)
        raise


# ------------------------------------------------------------ key-value stores


class KeyValues:
    """The library's view of a key-value store. Must live as long as the session."""

    def __init__(self, store: KeyValueStore) -> None:
        self.store = store
        self._handle = ffi.new_handle(self)
        self.raw = ffi.new("lg_kv *", {"ops": _OPS, "ctx": self._handle})


def failed(why: BaseException, err: Any) -> int:
    """Fills the error of the thread of the library that called; nobody there raises it."""
    status = why.status if isinstance(why, Error) else Status.COMM
    text = str(why) if isinstance(why, Error) else f"{type(why).__name__}: {why}"
    lib.lg_error_set(err, status, b"%s", ffi.new("char[]", text.encode("utf-8", "backslashreplace")))
    return int(status)


@ffi.def_extern(name="lgpy_kv_set")  # type: ignore[untyped-decorator]
def _call_set(ctx: Any, key: Any, data: Any, size: int, err: Any) -> int:
    kv: KeyValues = ffi.from_handle(ctx)
    try:
        kv.store.set(ffi.string(key).decode(), bytes(ffi.buffer(data, size)))
    except BaseException as why:
        return failed(why, err)
    return 0


@ffi.def_extern(name="lgpy_kv_get")  # type: ignore[untyped-decorator]
def _call_get(ctx: Any, key: Any, data: Any, size: Any, err: Any) -> int:
    kv: KeyValues = ffi.from_handle(ctx)
    try:
        value = kv.store.get(ffi.string(key).decode())
        if value is None:
            return int(Status.NOT_FOUND)
        data[0], size[0] = allocated(value), len(value)
    except BaseException as why:
        # That something is not found would mean that the key is not set yet.
        if isinstance(why, Error) and why.status == Status.NOT_FOUND:
            why = RuntimeError(str(why))
        return failed(why, err)
    return 0


_OPS = ffi.new("lg_kv_ops *", {"version": lib.LG_KV_OPS_VERSION, "set": lib.lgpy_kv_set, "get": lib.lgpy_kv_get})
