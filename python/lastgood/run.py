# SPDX-License-Identifier: Apache-2.0
"""What a run goes on from, and its loop over optimizer steps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lastgood.checkpoint import Generation
from lastgood.errors import InvalidError, StateError
from lastgood.session import Skipped

if TYPE_CHECKING:
    from lastgood.checkpointer import Checkpointer
    from lastgood.session import Resumed


class Run:
    """A run that :meth:`Checkpointer.resume` has started or taken up again. ``str(run)`` is a short report.

    Attributes:
        step: completed optimizer steps that it goes on from; 0 at the start.
        resumed: whether there was a checkpoint.
        source: path of the step folder; None at the start.
        generation: the checkpoint's; None at the start.
        run_id: 32 hex digits; empty at the start.
        saved_world: how many ranks had saved it; 0 at the start.
        skipped: newer checkpoints that were passed over and why, newest first.
        notes: sentences on what was derived, left as it was, or given up.
        not_restored: names of what the checkpoint lacks and kept its value.
    """

    def __init__(
        self,
        ckpt: Checkpointer,
        resumed: Resumed | None,
        notes: tuple[str, ...] = (),
        not_restored: tuple[str, ...] = (),
        *,
        new: bool = False,
    ) -> None:
        self._new = new
        self._ckpt = ckpt
        self.resumed = resumed is not None
        self.step = 0 if resumed is None else resumed.step
        self.source = None if resumed is None else os.path.join(ckpt.root, resumed.folder)
        self.generation: Generation | None = None if resumed is None else resumed.generation
        self.run_id = "" if resumed is None else resumed.run_id
        self.saved_world = 0 if resumed is None else resumed.saved_world
        self.skipped: tuple[Skipped, ...] = () if resumed is None else resumed.skipped
        self.notes = notes
        self.not_restored = not_restored

    def steps(self, total: int, accumulate: int = 1) -> Iterator[list[Any]]:
        """The loop of the run: yields the micro-batches of one optimizer step at a time, over the ends of epochs,
        until ``total`` steps are done or the ranks have agreed to stop::

            for batches in run.steps(10_000, accumulate=4):
                for batch in batches:
                    (loss_of(batch) / 4).backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step(state)

        The last step is always saved. Look at :attr:`Checkpointer.stopping` behind the loop to tell its two ends apart.

        Args:
            total: completed optimizer steps at which the run is done.
            accumulate: micro-batches of a step.

        Yields:
            Lists of ``accumulate`` batches of the state's loader; empty lists when the state has no loader.

        Raises:
            StateError: :meth:`Checkpointer.step` was not called since the last one was yielded.
        """
        for name, value in (("total", total), ("accumulate", accumulate)):
            if not hasattr(value, "__index__"):
                raise InvalidError(f"{name} is {value!r}, not a whole number")
        if accumulate < 1:
            raise InvalidError(f"accumulate is {accumulate}, not 1 or more")
        self._ckpt.aim(total)
        return self._steps(total, accumulate)

    def _steps(self, total: int, accumulate: int) -> Iterator[list[Any]]:
        ckpt = self._ckpt
        batches = None
        while ckpt.completed < total and not ckpt.stopping:
            if batches is None:
                batches = ckpt.batches(accumulate)
            before = ckpt.completed
            batch = next(batches, None)
            if batch is None:
                raise StateError(f"the loader has no more batches after step {before}, of {total}")
            yield batch
            if ckpt.completed == before:
                raise StateError(
                    f"the loop body ended without ckpt.step(state): call it once, after the update of step {before + 1}"
                )

    def __str__(self) -> str:
        if not self.resumed:
            lines = [f"{self._ckpt.root} holds no checkpoint: the run starts at step 0"]
            if self._new:
                lines = [
                    f"new_run=True: a new run starts at step 0; checkpoints in {self._ckpt.root} were not looked at"
                ]
        else:
            ranks = "1 rank" if self.saved_world == 1 else f"{self.saved_world} ranks"
            lines = [f"goes on from {self.source}: step {self.step}, generation {self.generation}, saved by {ranks}"]
        lines += [f"passed over {s.folder}: {s.reason}" for s in self.skipped]
        if self.not_restored:
            lines.append(f"not in the checkpoint, left as it was: {', '.join(self.not_restored)}")
        lines += self.notes
        return "\n  ".join(lines)

    def __repr__(self) -> str:
        source = "the start" if self.source is None else repr(self.source)
        return f"<Run at step {self.step} from {source}, {len(self.skipped)} passed over, {len(self.notes)} notes>"
