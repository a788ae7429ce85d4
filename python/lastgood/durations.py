# SPDX-License-Identifier: Apache-2.0
"""Durations as people write them."""

from __future__ import annotations

import math
import re

from lastgood.errors import InvalidError

_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_PARTS = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")


def seconds_of(option: str, value: float | str) -> float:
    """Seconds of a number of seconds, ``"20min"``, ``"1h30min"``, ``"1.5h"``, ``"2d"``, or Slurm's ``"1-12:00:00"``.

    Args:
        option: what it is the value of, for messages.

    Raises:
        InvalidError: it is nothing of these, or not above 0.
    """
    seconds = _seconds(value) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise InvalidError(f'{option} is {value!r}, not seconds above 0 or a time such as "20min", "4h", "1-12:00:00"')
    return float(seconds)


def _seconds(text: str) -> float | None:
    clock = _CLOCK.fullmatch(text.strip())
    if clock is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return 86400 * days + 3600 * hours + 60 * minutes + seconds
    text = text.strip().lower()
    parts = _PARTS.findall(text)
    if not parts or _PARTS.sub("", text) or any(unit not in _UNITS for _, unit in parts):
        return None
    return math.fsum(float(number) * _UNITS[unit] for number, unit in parts)
