# SPDX-License-Identifier: Apache-2.0
"""Handles of the library, and text on its way in and memory on its way out."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from lastgood._core import ffi, lib
from lastgood.errors import InvalidError, StateError


class Pointer:
    """A handle with its lock, since one thread at a time may use it. Freed when nobody holds it any more: arrays over
    mapped files do, so that closing what they came from does not pull their memory away.

    Use it as ``with pointer as raw:``.

    Args:
        raw: the handle.
        free: what frees it.
        keep: what must live longer than the handle. Kept by the finalizer and not by this object: when the garbage
            collector takes both at once it would not heed their order.
    """

    def __init__(self, raw: Any, free: Callable[[Any], Any], keep: Any = None) -> None:
        self._raw = raw
        self._lock = threading.RLock()
        self._finalizer = weakref.finalize(self, _freed, free, raw, keep)
        self._finalizer.atexit = False

    def __enter__(self) -> Any:
        self._lock.acquire()
        if self._raw is None:
            self._lock.release()
            raise StateError("used after it was closed")
        return self._raw

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def consume(self) -> Any:
        """The raw handle, for a call that frees it whatever its result. Nobody can use it afterwards."""
        with self as raw:
            self._raw = None
            self._finalizer.detach()
            return raw


def _freed(free: Callable[[Any], Any], raw: Any, _keep: Any) -> None:
    free(raw)


def nothing(_: Any) -> None:
    """Frees what another handle frees."""


def text_bytes(value: str) -> bytes:
    """A name or key for the library."""
    if not isinstance(value, str):
        raise InvalidError(f"names and keys are strings, not {type(value).__name__}")
    try:
        data = value.encode()
    except UnicodeEncodeError:
        raise InvalidError(f"{value!r} has a lone surrogate") from None
    if b"\0" in data:
        raise InvalidError(f"{value!r} has a NUL in it")
    return data


def path_bytes(where: str | os.PathLike[str]) -> bytes:
    """A path or URI for the library, as the file system has it."""
    data = os.fsencode(where)
    if b"\0" in data:
        raise InvalidError(f"{where!r} has a NUL in it")
    return data


def allocated(data: bytes) -> Any:
    """A copy in memory that the library will free."""
    memory = lib.malloc(max(len(data), 1))
    if memory == ffi.NULL:
        raise MemoryError(f"no memory for a message of {len(data)} bytes")
    ffi.memmove(memory, data, len(data))
    return memory


def taken(data: Any, size: int) -> bytes:
    """Memory that the library hands over, as bytes."""
    try:
        return bytes(ffi.buffer(data, size)) if size else b""
    finally:
        lib.lg_free(data)
