# SPDX-License-Identifier: Apache-2.0
"""The position in a map-style data set, and a sampler over it for loaders of one's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sized
from typing import Any

import torch

from lastgood.data.part import PositionPart
from lastgood.data.source import Collate, Place, Position, Source, Step
from lastgood.data.streams import Keyed, Token
from lastgood.errors import InvalidError, MissingError, StateError
from lastgood.parts import Ranks, Restoring, Saving
from lastgood.sampler import Sampler


class ElasticSampler(torch.utils.data.Sampler[int]):
    """A sampler for a loader of one's own: indices of this rank, from the position to the end of the epoch. Ranks take
    turns, so that any number of them with any batch size take the same samples in the same order between them::

        sampler = lastgood.data.ElasticSampler(dataset, seed=1)
        own = torch.utils.data.DataLoader(dataset, 8, sampler=sampler, generator=torch.Generator())

    The position moves only by :meth:`used`. Give the loader a generator of its own as above: otherwise each iterator
    draws from torch's global one, and a resumed run differs.

    Args:
        data: the data set, or its size: 1 to 2^48.
        seed: of the order; a resume takes that of the checkpoint.
        shuffle: False: in order.
        drop_last: leave out the samples at the end of an epoch that do not go round all ranks; otherwise ranks that
            would get one less take one from the start of the next epoch, so that all get the same number.
    """

    def __init__(self, data: int | Sized, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False) -> None:
        size = data if isinstance(data, int) else len(data)
        self.order = Sampler(size, seed, shuffle=shuffle)
        self.drop_last = drop_last
        self._place: Place | None = None
        self._iterating = 0
        self._iterator = 0

    def __repr__(self) -> str:
        return f"<ElasticSampler of {len(self.order)}, seed {self.seed}, epoch {self.epoch}, consumed {self.consumed}>"

    @property
    def place(self) -> Place:
        """Which rank's indices: as bound, otherwise as torch.distributed has it."""
        return self._place or Place.here()

    def bind(self, ranks: Ranks) -> None:
        """Says which rank this is, where not all ranks take different samples."""
        self.set_place(Place.of(ranks))

    @property
    def seed(self) -> int:
        """Of the order."""
        return self.order.seed

    @property
    def epoch(self) -> int:
        """Current epoch, from 0."""
        return self.order.epoch

    @property
    def consumed(self) -> int:
        """Samples that the whole run has used in this epoch."""
        return self.order.consumed

    @property
    def position(self) -> Position:
        """Both."""
        return Position(self.epoch, self.consumed)

    def __len__(self) -> int:
        """Indices of this rank in a whole epoch."""
        return self._share(len(self.order))

    def _share(self, samples: int) -> int:
        world = self.place.world
        return samples // world if self.drop_last else -(-samples // world)

    def __iter__(self) -> Iterator[int]:
        if not len(self):
            raise InvalidError(f"drop_last drops everything: {len(self.order)} samples for {self.place.world} ranks")
        self.skip_tail(self.place.world)
        self._iterator += 1
        mine, order, (rank, world) = self._iterator, self.order.copy(), self.place
        self._iterating += 1
        try:
            for turn in range(self._share(len(order) - order.consumed)):
                if mine != self._iterator:
                    raise StateError(
                        "another iterator over this sampler was made, its ranks were bound, or its position restored"
                    )
                yield order.peek(1, turn * world + rank)[0]
        finally:
            self._iterating -= 1

    def used(self, samples: int) -> None:
        """The whole run, all ranks together, has used so many more samples."""
        self.order.advance(samples)
        self.skip_tail(self.place.world)

    @property
    def last_samples(self) -> int:
        """0: a sampler does not know which of its indices were used."""
        return 0

    def batches(self, accumulate: int = 1) -> Iterator[list[Any]]:
        """Of a :class:`DataLoader` only.

        Raises:
            InvalidError: always.
        """
        raise InvalidError(
            "a sampler hands out no batches: iterate over your own loader and report samples of all ranks together "
            "(Checkpointer.step(samples=)), or take lastgood.data.DataLoader"
        )

    def lastgood_part(self, key: str) -> PositionPart:
        """The position as a part of a training state."""
        return PositionPart(key, self, _SamplerPosition(self))

    # -------------------------------------------------- for other parts of the package

    def set_place(self, place: Place) -> None:
        """Says which rank this is; an iterator for another one cannot go on."""
        if place != self.place:
            self._iterator += 1
        self._place = place

    def skip_tail(self, whole: int) -> None:
        """With ``drop_last``: where less than this is left of the epoch, the next one begins."""
        left = len(self.order) - self.order.consumed
        if self.drop_last and left < whole <= len(self.order):
            self.order.advance(left)

    def go_to(self, order: Sampler) -> None:
        """Takes over order and position.

        Raises:
            StateError: an iterator is under way, which would go on with what it was made for.
        """
        if self._iterating:
            raise StateError(
                "an iterator over the sampler was made before its position was restored, and its loader may have "
                "fetched from the wrong position: make iterators after resume"
            )
        self._iterator += 1
        self.order = order


class _SamplerPosition:
    """What is kept of a sampler."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    def save(self, to: Saving, key: str) -> None:
        self._sampler.order.save(to.save, key)

    def read(self, of: Restoring, key: str) -> Sampler:
        found = self._sampler.order.copy()
        found.load(of.checkpoint, key)
        return found

    def take(self, found: Sampler, of: Restoring, key: str) -> None:
        own = self._sampler.order
        if (found.seed, found.shuffle) != (own.seed, own.shuffle):
            of.notes.append(
                f'"{key}": the order goes on with the checkpoint\'s seed {found.seed}, shuffle={found.shuffle}; '
                f"given were {own.seed}, shuffle={own.shuffle}"
            )
        self._sampler.go_to(found)


class Samples(Source):
    """Micro-batches of a map-style data set, cut from one global order of samples.

    Args:
        dataset: map-style, with a length.
        batch_size: samples of a rank's micro-batch.
        sampler: has the position.
        read_batches: as for :class:`Keyed`.
    """

    def __init__(self, dataset: Any, batch_size: int, sampler: ElasticSampler, read_batches: bool) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.dataset = dataset
        self.read_batches = read_batches
        self.micro_batches = _MicroBatches(self)
        self._kept = _SamplerPosition(sampler)
        self._accumulate = 1

    @property
    def place(self) -> Place:
        """Which rank's batches."""
        return self.sampler.place

    def bind(self, place: Place) -> None:
        """Says so."""
        self.sampler.set_place(place)

    @property
    def position(self) -> Position:
        """Of what has been used."""
        return self.sampler.position

    @property
    def seed(self) -> int:
        """Of the order and of what data sets draw."""
        return self.sampler.seed

    def whole(self, accumulate: int) -> int:
        """Samples of a step that is not cut short."""
        return self.batch_size * self.place.world * accumulate

    def begin(self, accumulate: int) -> None:
        """An iteration begins at the position, or at the next epoch where a whole step is not left and shorter ones
        are dropped.
        """
        whole, size = self.whole(accumulate), len(self.sampler.order)
        if self.sampler.drop_last and whole > size:
            raise InvalidError(
                f"drop_last drops everything: a step takes batch_size {self.batch_size} * {self.place.world} ranks * "
                f"accumulate {accumulate} = {whole} samples, the data set has {size}"
            )
        self._accumulate = accumulate
        self.sampler.skip_tail(whole)

    def arguments(self, accumulate: int, until: int | None, collate: Collate) -> dict[str, Any]:
        """A sampler of whole micro-batches."""
        self.micro_batches.aim(accumulate, until)
        keyed = Keyed(self.dataset, collate, self.read_batches)
        return {"dataset": keyed, "batch_sampler": self.micro_batches}

    def steps(self, accumulate: int, until: int | None) -> Iterator[Step]:
        """Whole steps, and at the end of an epoch a shorter one with what is left, but at least one sample for each
        micro-batch of each rank, of the next epoch if need be.
        """
        size, slots, whole = len(self.sampler.order), self.place.world * accumulate, self.whole(accumulate)
        epoch, consumed = self.position
        while until is None or epoch < until:
            left = size - consumed
            if left < whole and self.sampler.drop_last:
                epoch, consumed = epoch + 1, 0
                continue
            step = Step(epoch, consumed, whole if left >= whole else max(left, slots))
            yield step
            more, consumed = divmod(consumed + step.samples, size)
            epoch += more

    def unwrapped(self, made: Any) -> Any:
        """The batch is what was made."""
        return made

    def used(self, samples: int) -> None:
        """Moves the position; with drop_last over a tail that no whole step fits in."""
        self.sampler.order.advance(samples)
        self.sampler.skip_tail(self.whole(self._accumulate))

    def save(self, to: Saving, key: str) -> None:
        """Adds the position, and the batch size for people."""
        self._kept.save(to, key)
        to.save.state(f"{key}.batch", self._batch())

    def _batch(self) -> dict[str, int]:
        return {"batch_size": self.batch_size, "data_ranks": self.place.world, "accumulate": self._accumulate}

    def read(self, of: Restoring, key: str) -> tuple[Sampler, dict[str, int] | None]:
        """The position of a checkpoint, and with which batch it was reached."""
        found = self._kept.read(of, key)
        batch: dict[str, int] | None = None
        with contextlib.suppress(MissingError):
            batch = of.checkpoint.state[f"{key}.batch"]
        return found, batch

    def take(self, found: tuple[Sampler, dict[str, int] | None], of: Restoring, key: str) -> None:
        """Goes there, and notes another size of steps."""
        order, batch = found
        self._kept.take(order, of, key)
        if batch is None:
            return
        self._accumulate = batch["accumulate"]  # until an iteration begins
        then = batch["batch_size"] * batch["data_ranks"]
        if then != self.whole(1):
            of.notes.append(
                f'"{key}": micro-batches of all ranks together had {then} samples and have {self.whole(1)} now; '
                f"the order of samples stays, at sample {order.consumed} of epoch {order.epoch}"
            )


class _MicroBatches:
    """What a torch loader takes as its ``batch_sampler``: tokens of this rank's micro-batches, one list each."""

    def __init__(self, source: Samples) -> None:
        self._source = source
        self._aim: tuple[int, int | None] = (1, None)

    def aim(self, accumulate: int, until: int | None) -> None:
        """For the next iterator."""
        self._aim = (accumulate, until)

    def __iter__(self) -> Iterator[list[Token]]:
        source, (accumulate, until) = self._source, self._aim
        order, (rank, world) = source.sampler.order.copy(), source.place
        size, seed = len(order), order.seed
        for step in source.steps(accumulate, until):
            at = order.copy(epoch=step.epoch, consumed=step.start)
            for micro in range(accumulate):
                ahead, n = step.slot(micro * world + rank, world * accumulate)
                first = step.start + ahead
                indices = at.peek(n, ahead)
                yield [(seed, step.epoch + (first + i) // size, index) for i, index in enumerate(indices)]
