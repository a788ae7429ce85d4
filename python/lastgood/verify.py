# SPDX-License-Identifier: Apache-2.0
"""Reading every byte of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lastgood._core import ffi, lib
from lastgood.errors import Status, finish, new_error, status_of, text_of
from lastgood.handles import Pointer

Progress = Callable[[int, int], Any]


class Problem(NamedTuple):
    """Something that verification found."""

    status: Status
    file: str
    tensor: str  # "" where no tensor is concerned
    offset: int  # first bad byte range in the file
    nbytes: int
    message: str


class Verified(NamedTuple):
    """What a verification read, and what it found."""

    files: int
    nbytes: int
    problems: tuple[Problem, ...]


class _Calls:
    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.problems: list[Problem] = []
        self.raised: BaseException | None = None


def verify(pointer: Pointer, threads: int, progress: Progress | None) -> Verified:
    """All of an open checkpoint."""
    calls = _Calls(progress)
    handle = ffi.new_handle(calls)
    options, result, err = ffi.new("lg_verify_options *"), ffi.new("lg_verify_result *"), new_error()
    options.size, options.threads, options.arg = ffi.sizeof("lg_verify_options"), threads, handle
    options.progress, options.problem = lib.lgpy_progress, lib.lgpy_problem
    with pointer as c:
        status = lib.lg_verify(c, options, result, err)
    if calls.raised is not None:
        raise calls.raised
    if not calls.problems:
        finish(status, err)
    return Verified(int(result.files), int(result.bytes), tuple(calls.problems))


@ffi.def_extern(name="lgpy_progress")  # type: ignore[untyped-decorator]
def _call_progress(done: int, total: int, arg: Any) -> int:
    calls: _Calls = ffi.from_handle(arg)
    try:
        if calls.raised is None and calls.progress is not None:
            calls.progress(done, total)
    except BaseException as why:  # KeyboardInterrupt too
        calls.raised = why
    return 0 if calls.raised is None else 1


@ffi.def_extern(name="lgpy_problem")  # type: ignore[untyped-decorator]
def _call_problem(problem: Any, arg: Any) -> None:
    calls: _Calls = ffi.from_handle(arg)
    calls.problems.append(
        Problem(
            status_of(problem.status),
            text_of(problem.file),
            text_of(problem.tensor),
            int(problem.offset),
            int(problem.bytes),
            text_of(problem.message),
        )
    )
