# SPDX-License-Identifier: Apache-2.0
"""Exceptions, one class for each kind of error that somebody may want to catch.

Every exception is an :class:`Error`. Where Python has an exception of the same
meaning, ours is one of these too: a full disk is an ``OSError``, a missing
tensor a ``KeyError``, a wrong argument a ``ValueError``. What each status
means, and what to do, is in docs/errors.md.
"""

from __future__ import annotations

import builtins
import enum
import threading
from typing import Any, NoReturn, cast

from lastgood._core import ffi, lib

__all__ = [
    "CancelledError",
    "CommunicatorError",
    "ConflictError",
    "CorruptError",
    "DamageError",
    "EmptyRootError",
    "Error",
    "ExistsError",
    "FormatError",
    "InvalidError",
    "LimitError",
    "MismatchError",
    "MissingError",
    "NoGoodCheckpoint",
    "NoSpaceError",
    "NotDurableError",
    "NotFoundError",
    "OtherRunError",
    "OutOfMemoryError",
    "PermissionDeniedError",
    "ProtectedError",
    "StateError",
    "Status",
    "StoreError",
    "SupersededError",
    "TimeoutError",
    "UnsupportedError",
    "VersionError",
    "WorldError",
]


class Status(enum.IntEnum):
    """What went wrong, as the C library numbers it. Numbers never change."""

    OK = 0
    INVALID = 1
    STATE = 2
    NOMEM = 3
    UNSUPPORTED = 4
    CONFLICT = 5
    LIMIT = 6
    CANCELLED = 7
    NOT_FOUND = 20
    EXISTS = 21
    IO = 22
    NO_SPACE = 23
    PERMISSION = 24
    READ_ONLY = 25
    NOT_DURABLE = 26
    NOT_EMPTY = 27
    CORRUPT = 40
    FORMAT = 41
    VERSION = 42
    MISSING = 43
    MISMATCH = 44
    COVERAGE = 45
    WORLD = 46
    EMPTY = 60
    NO_GOOD = 61
    SUPERSEDED = 62
    OTHER_RUN = 63
    NOT_WHOLE = 64
    PROTECTED = 65
    COMM = 80
    TIMEOUT = 81
    PEER = 82
    INTERNAL = 99


class Error(Exception):
    """Any error of lastgood. ``str(error)`` is one line that leads from the outside in and names file, tensor, rank,
    offset or option.

    Attributes:
        status: the kind, as the C library numbers it.
        errno: the operating system's number, ``None`` where it had no part in it.
        rank: the rank where it happened first, ``None`` if unknown or if there is one process only.
    """

    default = Status.INTERNAL

    def __init__(
        self, message: str, status: Status | None = None, errno: int | None = None, rank: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = self.default if status is None else status
        self.errno = errno
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status, self.errno, self.rank)


class InvalidError(Error, ValueError):
    """An argument is wrong."""

    default = Status.INVALID


class StateError(Error, RuntimeError):
    """The call is not allowed now: on something closed, say."""

    default = Status.STATE


class OutOfMemoryError(Error, MemoryError):
    """Out of memory."""

    default = Status.NOMEM


class UnsupportedError(Error, NotImplementedError):
    """What was asked for is not supported: a dtype, a kind of tensor, an operation of this store."""

    default = Status.UNSUPPORTED


class ConflictError(Error):
    """Ranks or calls contradict each other: another step, two values of one key, tensors that should be equal."""

    default = Status.CONFLICT


class LimitError(Error):
    """A documented limit is exceeded."""

    default = Status.LIMIT


class CancelledError(Error):
    """The caller stopped it."""

    default = Status.CANCELLED


class StoreError(Error, OSError):
    """Something failed in the store: input or output, permission, a folder that is not empty."""

    default = Status.IO


class NotFoundError(StoreError, FileNotFoundError):
    """A root, checkpoint or file is not there."""

    default = Status.NOT_FOUND


class ExistsError(StoreError, FileExistsError):
    """The name is taken."""

    default = Status.EXISTS


class PermissionDeniedError(StoreError, PermissionError):
    """Permission denied."""

    default = Status.PERMISSION


class NoSpaceError(StoreError):
    """No space left. The save failed, the checkpoint before is untouched."""

    default = Status.NO_SPACE


class NotDurableError(StoreError):
    """A sync failed: what was written is not known to survive a power cut."""

    default = Status.NOT_DURABLE


class DamageError(Error):
    """What is on disk is damaged. Resume steps back to an older checkpoint on these."""

    default = Status.NOT_WHOLE


class CorruptError(DamageError):
    """Bytes are not those that were saved; the message names file, range, tensor and rank."""

    default = Status.CORRUPT


class FormatError(DamageError):
    """Not a valid file of its kind."""

    default = Status.FORMAT


class VersionError(Error):
    """Written by a newer version of lastgood."""

    default = Status.VERSION


class MissingError(Error, KeyError):
    """The checkpoint has no tensor or state of this name."""

    default = Status.MISSING


class MismatchError(Error, ValueError):
    """The dtype or shape is another one; nothing is converted unless asked for."""

    default = Status.MISMATCH


class WorldError(Error):
    """State of single ranks, saved by another number of ranks: it cannot be cut anew."""

    default = Status.WORLD


class EmptyRootError(Error):
    """The root holds no checkpoint."""

    default = Status.EMPTY


class NoGoodCheckpoint(Error):
    """There are checkpoints, and none is good. Never start over silently.

    Attributes:
        skipped: which were tried and why each was passed over, newest first (:class:`lastgood.Skipped`).
    """

    default = Status.NO_GOOD
    skipped: tuple[Any, ...] = ()


class SupersededError(Error):
    """Another session took the root over; this one must not save any more."""

    default = Status.SUPERSEDED


class OtherRunError(Error):
    """The root holds checkpoints of a run that this session did not resume."""

    default = Status.OTHER_RUN


class ProtectedError(Error):
    """It may not be removed: the last good one, or pinned."""

    default = Status.PROTECTED


class CommunicatorError(Error):
    """The ranks cannot talk any more; the communicator is broken for good."""

    default = Status.COMM


class TimeoutError(CommunicatorError, builtins.TimeoutError):
    """Ranks did not arrive within the deadline; the message names them."""

    default = Status.TIMEOUT


_CLASSES: dict[Status, type[Error]] = {
    Status.INVALID: InvalidError,
    Status.STATE: StateError,
    Status.NOMEM: OutOfMemoryError,
    Status.UNSUPPORTED: UnsupportedError,
    Status.CONFLICT: ConflictError,
    Status.LIMIT: LimitError,
    Status.CANCELLED: CancelledError,
    Status.NOT_FOUND: NotFoundError,
    Status.EXISTS: ExistsError,
    Status.IO: StoreError,
    Status.NO_SPACE: NoSpaceError,
    Status.PERMISSION: PermissionDeniedError,
    Status.READ_ONLY: StoreError,
    Status.NOT_DURABLE: NotDurableError,
    Status.NOT_EMPTY: StoreError,
    Status.CORRUPT: CorruptError,
    Status.FORMAT: FormatError,
    Status.VERSION: VersionError,
    Status.MISSING: MissingError,
    Status.MISMATCH: MismatchError,
    Status.COVERAGE: DamageError,
    Status.WORLD: WorldError,
    Status.EMPTY: EmptyRootError,
    Status.NO_GOOD: NoGoodCheckpoint,
    Status.SUPERSEDED: SupersededError,
    Status.OTHER_RUN: OtherRunError,
    Status.NOT_WHOLE: DamageError,
    Status.PROTECTED: ProtectedError,
    Status.COMM: CommunicatorError,
    Status.TIMEOUT: TimeoutError,
    Status.PEER: CommunicatorError,
}


def text_of(c_string: Any) -> str:
    """A C string; bytes that are no UTF-8 (names of files of others) are escaped."""
    return cast(bytes, ffi.string(c_string)).decode("utf-8", "backslashreplace")


def status_of(number: int) -> Status:
    """The status of this number; INTERNAL for one that this package does not know."""
    try:
        return Status(number)
    except ValueError:
        return Status.INTERNAL


def of_status(number: int, message: str, rank: int | None = None) -> Error:
    """The exception for a status, with a text of ours."""
    status = status_of(number)
    return _CLASSES.get(status, Error)(message, status, None, rank)


def error_of(number: int, err: Any) -> Error:
    """The exception for a status and the ``lg_error *`` that came with it."""
    status = status_of(number)
    message = text_of(err.message) or text_of(lib.lg_status_text(number))
    make = _CLASSES.get(status, Error)
    return make(message, status, err.os_errno or None, err.rank if err.rank >= 0 else None)


# What a function of ours that the library called has raised, until the call of
# the library is back. A call may be inside another one's function.
_raised = threading.local()


def new_error() -> Any:
    """An empty ``lg_error *``."""
    err = ffi.new("lg_error *")
    err.rank = -1
    return err


def hold(error: BaseException, err: Any, status: Status | None = None) -> int:
    """Ends a function that the library called: fills ``err`` and returns a status. :func:`call` raises ``error`` once
    the library is back.
    """
    _raised.error = error
    if status is None:
        status = error.status if isinstance(error, Error) else Status.CANCELLED
    text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    lib.lg_error_set(err, status, b"%s", ffi.new("char[]", text.encode("utf-8", "backslashreplace")))
    if isinstance(error, Error) and error.rank is not None:
        err.rank = error.rank
    return int(status)


def finish(status: int, err: Any) -> None:
    """Raises the exception that belongs to a status, unless it is OK."""
    raised: BaseException | None = getattr(_raised, "error", None)
    if raised is not None:
        _raised.error = None
    if status == 0:
        if raised is not None and not isinstance(raised, Exception):
            raise raised  # KeyboardInterrupt
        return
    if raised is None:
        raise error_of(status, err)
    if isinstance(raised, Error):
        raise error_of(status, err) from raised
    raise raised


def call(function: Any, *args: Any) -> None:
    """Calls a function of the library, whose last argument is an ``lg_error *``, and raises on failure."""
    err = new_error()
    finish(function(*args, err), err)


def invalid(message: str) -> NoReturn:
    """Raises :class:`InvalidError`."""
    raise InvalidError(message)
