# SPDX-License-Identifier: Apache-2.0
"""Data that is read in order, shard by shard: files of records, say. The position is kept by shard, and within the
shards that are being read.

Shards come in an endless order, epoch after epoch, each epoch permuted anew. They are dealt like cards to *lanes*,
one for each worker of each rank; a lane reads its shards one after the other. A rank's micro-batches come from its
lanes in turn. While there are as many lanes as before, a resume goes on exactly; for another number the shards that
are not finished are dealt anew, so that nothing is read twice and nothing is left out.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from lastgood.data.source import Collate, Place, Position, Source, Step
from lastgood.data.streams import OPEN, SAMPLE, Token, collated, kept, seed_global
from lastgood.errors import FormatError, InvalidError, MismatchError, MissingError, StateError
from lastgood.parts import Restoring, Saving
from lastgood.sampler import Sampler

T = TypeVar("T")
# Items of a shard, as far as their numbers must tell them apart.
_SHARD_SHIFT = 32


class Sharded(torch.utils.data.IterableDataset[Any], Generic[T]):
    """An iterable data set whose position can be kept: for :class:`lastgood.data.DataLoader`.

    Args:
        shards: what ``open`` takes: names of files, for example. Their number and order belong to the position. At
            least as many as ranks times workers, or lanes read different epochs at once.
        open: the samples of a shard, in an order of their own that is the same each time. From a sequence, something
            with a length and indices, a resume takes the rest at once; another iterable is read again up to there.
            Must be picklable where workers are spawned.
    """

    def __init__(self, shards: Sequence[T], open: Callable[[T], Iterable[Any]]) -> None:
        if not len(shards):
            raise InvalidError("Sharded: there are no shards")
        self.shards = shards
        self.open = open

    def __iter__(self) -> Iterator[Any]:
        """All samples in order, once."""
        for shard in self.shards:
            yield from self.open(shard)

    def __repr__(self) -> str:
        return f"<Sharded of {len(self.shards)} shards>"


class Deal(NamedTuple):
    """Which shards are left to be dealt. A shard's number counts through all epochs."""

    first: int  # all before it are finished
    done: tuple[int, ...]  # finished ones from there on, ascending
    partial: dict[int, int]  # samples used of others that were begun
    lanes: int  # to how many they are dealt; 0: not dealt yet

    def number(self, card: int) -> int:
        """The shard that is dealt as the card-th."""
        found = self.first + card
        for done in self.done:
            if done > found:
                break
            found += 1
        return found

    def of_lane(self, lane: int, turn: int) -> int:
        """The shard that a lane gets in a turn."""
        return self.number(lane + self.lanes * turn)


class Progress(NamedTuple):
    """How far a lane is."""

    turn: int = 0  # shards finished since they were dealt
    used: int = 0  # samples of the current one; 0: none since it was dealt


def redealt(deal: Deal, progress: Sequence[Progress]) -> Deal:
    """What is left of a deal, for any number of lanes.

    Args:
        progress: of all its lanes.
    """
    done = set(deal.done)
    partial = dict(deal.partial)
    for lane, (turn, used) in enumerate(progress):
        for t in range(turn):
            number = deal.of_lane(lane, t)
            done.add(number)
            partial.pop(number, None)
        if used:
            partial[deal.of_lane(lane, turn)] = used
    first = deal.first
    while first in done:
        done.remove(first)
        first += 1
    return Deal(first, tuple(sorted(done)), partial, 0)


class Shards(Source):
    """Micro-batches of a :class:`Sharded` data set.

    Args:
        dataset: the trainer's.
        batch_size: samples of a rank's micro-batch.
        workers: of each rank.
        seed, shuffle: of the order of shards.
    """

    def __init__(self, dataset: Sharded[Any], batch_size: int, workers: int, seed: int, shuffle: bool) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.own_lanes = max(1, workers)
        self.order = Sampler(len(dataset.shards), seed, shuffle=shuffle)
        self.deal = Deal(0, (), {}, 0)
        self._place: Place | None = None
        self._progress = [Progress()] * self.own_lanes
        self._next_lane = 0
        self._used = 0  # samples, by all ranks
        self._handed: collections.deque[tuple[int, Progress]] = collections.deque()

    @property
    def place(self) -> Place:
        """Which rank's batches."""
        return self._place or Place.here()

    def bind(self, place: Place) -> None:
        """Says so."""
        self._place = place

    @property
    def lanes(self) -> int:
        """Of all ranks."""
        return self.place.world * self.own_lanes

    @property
    def seed(self) -> int:
        """Of the order and of what data sets draw."""
        return self.order.seed

    @property
    def position(self) -> Position:
        """The epoch of this rank's hindmost shard, and the samples of all ranks in all epochs."""
        lanes = [self._lane(own) for own in range(self.own_lanes)]
        numbers = [self.deal.of_lane(lane, p.turn) for lane, p in zip(lanes, self._progress, strict=True)]
        return Position(min(numbers) // len(self.order), self._used)

    def _lane(self, own: int) -> int:
        return self.place.rank * self.own_lanes + own

    def begin(self, accumulate: int) -> None:
        """Deals the shards, the first time."""
        if not self.deal.lanes:
            self.deal = self.deal._replace(lanes=self.lanes)
        elif self.deal.lanes != self.lanes:
            raise StateError(
                f"shards were dealt to {self.deal.lanes} lanes and there are {self.lanes} now: ranks and workers "
                "change by saving and resuming only"
            )
        self._handed.clear()

    def arguments(self, accumulate: int, until: int | None, collate: Collate) -> dict[str, Any]:
        """A data set of whole micro-batches."""
        return {"dataset": _Lanes(self, collate), "batch_size": None}

    def steps(self, accumulate: int, until: int | None) -> Iterator[Step]:
        """All whole, for ever."""
        samples = self._micro_samples * accumulate
        while True:
            yield Step(0, 0, samples)

    @property
    def _micro_samples(self) -> int:
        return self.batch_size * self.place.world

    def unwrapped(self, made: Any) -> Any:
        """The batch without the mark that says where it ends."""
        batch, (own, turn, used) = made
        self._handed.append((own, Progress(turn, used)))
        return batch

    def used(self, samples: int) -> None:
        """Moves the position over whole micro-batches that were handed out."""
        n, rest = divmod(samples, self._micro_samples)
        if rest or not 0 <= n <= len(self._handed):
            raise InvalidError(
                f"{samples} samples used: a micro-batch of all ranks has {self._micro_samples}, and "
                f"{len(self._handed)} were handed out; give the samples of all ranks together"
            )
        for _ in range(n):
            own, self._progress[own] = self._handed.popleft()
            self._next_lane = (own + 1) % self.own_lanes
        self._used += samples

    # --------------------------------------------------------------- checkpoint

    def save(self, to: Saving, key: str) -> None:
        """Adds what was dealt, of the whole run, and how far this rank's lanes are."""
        self.order.save(to.save, key)
        rank, world = self.place
        deal = {
            "first": self.deal.first,
            "done": list(self.deal.done),
            "partial": self.deal.partial,
            "lanes": self.deal.lanes,
            "data_ranks": world,
            "batch_size": self.batch_size,
        }
        to.save.state(f"{key}.deal", deal)
        to.save.state(f"{key}.used", self._used)
        if self.deal.lanes:
            own = {"lanes": [list(p) for p in self._progress], "next": self._next_lane}
            to.save.state(f"{key}.rank.{rank}", own)

    def read(self, of: Restoring, key: str) -> _Saved:
        """What was dealt, and how far all lanes are."""
        order = self.order.copy()
        order.load(of.checkpoint, key)
        state = of.checkpoint.state
        saved = state[f"{key}.deal"]
        ranks: list[Any] = []
        for rank in range(saved["data_ranks"] if saved["lanes"] else 0):
            try:
                ranks.append(state[f"{key}.rank.{rank}"])
            except MissingError:
                raise MissingError(
                    f'"{key}": the checkpoint has the positions of {rank} of {saved["data_ranks"]} data-parallel '
                    "ranks; with some of them missing, samples would be read twice or left out"
                ) from None
        progress = [Progress(*p) for r in ranks for p in r["lanes"]]
        if len(progress) != saved["lanes"]:
            raise FormatError(f'"{key}": {saved["lanes"]} lanes, and positions of {len(progress)}')
        deal = Deal(saved["first"], tuple(saved["done"]), dict(saved["partial"]), saved["lanes"])
        return _Saved(order, deal, progress, [r["next"] for r in ranks], state[f"{key}.used"])

    def take(self, found: _Saved, of: Restoring, key: str) -> None:
        """Goes there; deals anew to another number of lanes."""
        self.order, self._used = found.order, found.used
        self._handed.clear()
        self._progress, self._next_lane = [Progress()] * self.own_lanes, 0
        rank, world = self.place
        if found.deal.lanes == self.lanes and len(found.next) == world:
            self.deal = found.deal
            begin = rank * self.own_lanes
            self._progress = found.progress[begin : begin + self.own_lanes]
            self._next_lane = found.next[rank]
            return
        self.deal = redealt(found.deal, found.progress)
        if found.deal.lanes:
            of.notes.append(
                f'"{key}": shards were dealt to {found.deal.lanes} lanes (ranks times workers) and are dealt to '
                f"{self.lanes} now: no sample comes twice or is left out, and batches are others"
            )

    def reader(self, worker: int, collate: Collate) -> _Reader:
        """Of the lane that the worker-th micro-batch from now on comes from."""
        own = (self._next_lane + worker) % self.own_lanes
        lane, progress = self._lane(own), self._progress[own]
        return _Reader(self.dataset, self.batch_size, collate, self.order, self.deal, own, lane, progress)


class _Saved(NamedTuple):
    """What a checkpoint has."""

    order: Sampler
    deal: Deal
    progress: list[Progress]  # of all lanes
    next: list[int]  # lane of the next micro-batch, by data-parallel rank
    used: int


class _Lanes(torch.utils.data.IterableDataset[Any]):
    """Whole micro-batches of a rank. torch takes them from its workers in turn, and each worker reads a lane."""

    def __init__(self, source: Shards, collate: Collate) -> None:
        self._readers = [source.reader(w, collate) for w in range(source.own_lanes)]

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        reader = self._readers[0 if info is None else info.id]
        while True:
            yield reader.batch()


class _Reader:
    """Reads a lane.

    Args:
        own: the lane's number on its rank; ``lane``: among all.
        progress: where it begins.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        collate: Collate,
        order: Sampler,
        deal: Deal,
        own: int,
        lane: int,
        progress: Progress,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._collate = collate
        self._order = (len(order), order.seed, order.shuffle)  # the sampler itself cannot be sent to a worker
        self._deal = deal
        self._own, self._lane = own, lane
        self._turn, self._used = progress
        self._samples: Iterator[Any] | None = None
        self._token: Token = (order.seed, 0, 0)  # of the shard's first sample

    def batch(self) -> tuple[Any, tuple[int, int, int]]:
        """The next one, and where it ends: own lane, turn, samples used of its shard."""
        with kept():
            made: list[Any] = []
            first: Token | None = None
            idle = 0
            while len(made) < self._batch_size:
                if self._samples is None:
                    self._samples = self._opened()
                seed, epoch, number = self._token
                token = (seed, epoch, number + self._used)
                seed_global(token, SAMPLE)
                try:
                    made.append(next(self._samples))
                except StopIteration:
                    self._samples = None
                    self._turn, self._used = self._turn + 1, 0
                    idle += 1
                    if idle > self._order[0]:
                        raise InvalidError(f"all {self._order[0]} shards are empty") from None
                    continue
                self._used += 1
                idle = 0
                first = first or token
            assert first is not None
            return collated(first, self._collate, made), (self._own, self._turn, self._used)

    def _draws(self) -> Iterator[int]:
        """Before each sample that was used: what is read again draws what it drew."""
        seed, epoch, number = self._token
        for i in range(self._used):
            seed_global((seed, epoch, number + i), SAMPLE)
            yield i

    def _opened(self) -> Iterator[Any]:
        """The rest of the current shard."""
        size, seed, shuffle = self._order
        number = self._deal.of_lane(self._lane, self._turn)
        epoch, position = divmod(number, size)
        index = Sampler(size, seed, shuffle=shuffle).at(epoch, position)
        self._used = self._used or self._deal.partial.get(number, 0)
        self._token = (seed, epoch, index << _SHARD_SHIFT)
        seed_global(self._token, OPEN)
        shard = self._dataset.shards[index]
        samples = self._dataset.open(shard)
        if hasattr(samples, "__getitem__") and hasattr(samples, "__len__"):
            have = min(self._used, len(samples))
            rest: Iterator[Any] = (samples[i] for i in range(self._used, len(samples)))
        else:
            rest = iter(samples)
            have = sum(1 for _ in zip(self._draws(), rest, strict=False))
        if have < self._used:
            raise MismatchError(f"shard {shard!r} has {have} samples, and {self._used} of it were used before")
        return rest
