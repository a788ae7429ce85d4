# SPDX-License-Identifier: Apache-2.0
"""What a worker of the loader does before its first sample."""

from __future__ import annotations

import os
from collections.abc import Callable

from lastgood._core import lib
from lastgood.errors import call

Init = Callable[[int], None]


class WorkerInit:
    """Keeps a worker alive when a scheduler signals all processes of a job, since torch ends a trainer whose worker
    died, before the last save. The trainer itself can still end it. Then calls the trainer's own function. Made in the trainer, sent to its workers.

    Args:
        then: the trainer's ``worker_init_fn``.
    """

    def __init__(self, then: Init | None) -> None:
        self._then = then
        self._trainer = os.getpid()

    def __call__(self, worker: int) -> None:
        """In the worker, with its number."""
        call(lib.lgpy_outlive_signals, self._trainer)
        if self._then is not None:
            self._then(worker)
