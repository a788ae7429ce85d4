# SPDX-License-Identifier: Apache-2.0
"""What a run shows of itself: one line in a terminal that is written over, and the logger ``lastgood``."""

from __future__ import annotations

import collections
import logging
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

logger = logging.getLogger("lastgood")

# Between two lines, and what the rate is taken over; seconds.
_PAUSE = 0.2
_WINDOW = 30.0


class Progress:
    """One line: step, rate, time left, and how far the last save is.

    Args:
        shown: whether to write anything; None: if the stream is a terminal.
        stream: None: standard error.
        now: a clock, seconds.
    """

    def __init__(
        self, shown: bool | None = None, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._now = now
        if shown is None:
            shown = self._stream is not None and self._stream.isatty()
        self.shown = shown
        self._last = -_PAUSE
        self._there = False
        self._times: collections.deque[tuple[float, int]] = collections.deque()

    def update(self, step: int, total: int | None = None, save: str = "", *, force: bool = False) -> None:
        """One more step is done.

        Args:
            step: completed steps.
            total: of how many, if that is known.
            save: what the save under way is at.
            force: show it even if the last line is younger than the eye.
        """
        if not self.shown:
            return
        now = self._now()
        self._times.append((now, step))
        while self._times[0][0] < now - _WINDOW and len(self._times) > 2:
            self._times.popleft()
        if now - self._last < _PAUSE and not force:
            return
        self._last = now
        self._write(self.line(step, total, save))

    def line(self, step: int, total: int | None, save: str) -> str:
        """What is shown."""
        parts = [f"step {step}" if total is None else f"step {step}/{total}"]
        (began, first), (ended, last) = self._times[0], self._times[-1]
        if ended > began and last > first:
            rate = (last - first) / (ended - began)
            parts.append(f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step")
            if total is not None and total > step:
                parts.append(f"{_clock((total - step) / rate)} left")
        if save:
            parts.append(save)
        return ", ".join(parts)

    def clear(self) -> None:
        """Takes the line away, so that something else can be written."""
        if self._there:
            self._there = False
            self._put("\r\x1b[K")

    def close(self) -> None:
        """Leaves the line as it is and ends it."""
        if self._there:
            self._there = False
            self._put("\n")

    def _write(self, line: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._there = True
        self._put("\r\x1b[K" + line[:width])

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a terminal that is gone is no reason to stop training
            self.shown = self._there = False


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
