# SPDX-License-Identifier: Apache-2.0
"""A DataLoader whose position is what the trainer has used, in samples of the whole run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lastgood.data.iterable import Sharded, Shards
from lastgood.data.part import PositionPart
from lastgood.data.sampler import ElasticSampler, Samples
from lastgood.data.source import Place, Position, Source
from lastgood.data.streams import WORKERS, as_made, words
from lastgood.data.worker import WorkerInit
from lastgood.errors import InvalidError, StateError, UnsupportedError
from lastgood.parts import Ranks, Restoring, Saving

_REFUSED = {
    "sampler": "the order is the loader's own (seed=, shuffle=); for a sampler of yours keep its position yourself",
    "batch_sampler": "batches are cut from the loader's own order (batch_size=)",
    "generator": "it draws from generators of its own (seed=)",
}


class DataLoader(torch.utils.data.DataLoader[Any]):
    """``torch.utils.data.DataLoader`` with a position that a checkpoint keeps: epoch, and samples that the whole run
    has used in it. The order of samples is a function of seed and epoch alone, so a run goes on at the right sample on
    any number of ranks, with any number of workers and any batch size (docs/data.md)::

        loader = lastgood.data.DataLoader(dataset, batch_size=8, shuffle=True, seed=1, num_workers=4)
        for batches in loader.batches(accumulate=4):  # of one optimizer step, for ever
            ...
            loader.used(loader.last_samples)  # Checkpointer.step does that

    Every rank makes one with the same arguments. The position moves by :meth:`used` alone, whatever workers have
    fetched. What a data set and a collate function draw from the global generators of Python, NumPy and torch depends
    on seed, epoch and sample alone, and is not seen by the trainer's own draws.

    Args:
        dataset: map-style, with a length; or :class:`Sharded`.
        batch_size: samples of one rank's micro-batch.
        shuffle: permute anew in each epoch; False: in order.
        seed: of the order and of random numbers in the data set, 64 bits; a resume takes that of the checkpoint.
        num_workers: processes that fetch; 0: this one does. SIGTERM and SIGUSR1, which schedulers and torchrun send to
            them too, do not end them: they end with the trainer, or when it ends them.
        collate_fn: makes a batch of a list of samples.
        drop_last: leave out what does not fill a step at the end of an epoch: batch_size times ranks times
            accumulation. Otherwise the last step of an epoch is shorter, on all ranks as alike as can be, and no
            micro-batch is empty: where fewer samples are left than that needs, it takes some of the next epoch.
        worker_init_fn: called in each worker first.
        read_batches: fetch by the data set's ``__getitems__``, a batch in one call. What it draws then depends on the
            batch's first sample, and on which samples are in it.
        options: others of torch's: ``pin_memory``, ``timeout``, ``multiprocessing_context``, ``prefetch_factor``,
            ``persistent_workers``.

    Raises:
        InvalidError: an option would take the order away from the loader.
        UnsupportedError: an iterable data set without shards, which has no position.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        read_batches: bool = False,
        **options: Any,
    ) -> None:
        for name, reason in _REFUSED.items():
            if options.pop(name, None) is not None:
                raise InvalidError(f"DataLoader takes no {name}: {reason}")
        if options.pop("in_order", True) is not True:
            raise InvalidError("DataLoader takes no in_order=False: batches would come in another order on each run")
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise InvalidError(f"batch_size is {batch_size!r}, not a number of samples from 1 on")
        if not isinstance(num_workers, int) or num_workers < 0:
            raise InvalidError(f"num_workers is {num_workers!r}, not a number from 0 on")
        sampler: ElasticSampler | None = None
        if isinstance(dataset, Sharded):
            if read_batches or drop_last:
                raise InvalidError("a Sharded data set has no batched reads and no end: no read_batches, no drop_last")
            self._source: Source = Shards(dataset, batch_size, num_workers, seed, shuffle)
        elif isinstance(dataset, torch.utils.data.IterableDataset):
            raise UnsupportedError(
                f"{type(dataset).__qualname__} is an iterable data set, whose position cannot be kept: a resume would "
                "have to read it again from the start. Give lastgood.data.Sharded(shards, open), or a map-style one"
            )
        else:
            if read_batches and not hasattr(dataset, "__getitems__"):
                raise InvalidError(f"read_batches: {type(dataset).__qualname__} has no __getitems__")
            sampler = ElasticSampler(dataset, seed=seed, shuffle=shuffle, drop_last=drop_last)
            self._source = Samples(dataset, batch_size, sampler, read_batches)
        super().__init__(
            dataset,
            batch_size,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            drop_last=drop_last,
            worker_init_fn=worker_init_fn,
            **options,
        )
        self._own_generator = torch.Generator()
        self._inner: torch.utils.data.DataLoader[Any] | None = None
        self._iteration = 0  # the one that may go on
        self._outstanding = 0  # samples handed out by it and not used
        self._ran_from: Position | None = None  # where an iteration began that ran to its end

    def __repr__(self) -> str:
        epoch, consumed = self.position
        return f"<DataLoader of {self.dataset!r}, batch_size {self.batch_size}, epoch {epoch}, consumed {consumed}>"

    # ----------------------------------------------------------------- position

    def bind(self, ranks: Ranks) -> None:
        """Says which rank this is; unless it is said, torch.distributed does, all ranks taking different samples. An
        iterator made before for another place cannot go on.
        """
        place = Place.of(ranks)
        if place != self._source.place:
            self._stop()
        self._source.bind(place)

    @property
    def position(self) -> Position:
        """What the whole run has used: epoch, and samples in it."""
        return self._source.position

    @property
    def epoch(self) -> int:
        """Current epoch, from 0."""
        return self.position.epoch

    @property
    def consumed(self) -> int:
        """Samples that the whole run has used in this epoch."""
        return self.position.consumed

    @property
    def seed(self) -> int:
        """Of the order of samples, and of what the data set draws."""
        return self._source.seed

    @property
    def last_samples(self) -> int:
        """Samples of all data-parallel ranks together that were handed out and are not used yet: those of the last
        step, when each is reported by :meth:`used`.
        """
        return self._outstanding

    def step_samples(self, accumulate: int = 1) -> int:
        """Samples of all data-parallel ranks together that a step takes which is not cut short."""
        assert self.batch_size is not None
        return self.batch_size * self._source.place.world * accumulate

    def used(self, samples: int) -> None:
        """The whole run, all data-parallel ranks together, has used so many more samples. Called on every rank with
        the same number.
        """
        self._source.used(samples)
        self._outstanding = max(0, self._outstanding - samples)

    # ---------------------------------------------------------------- iteration

    def __len__(self) -> int:
        """Micro-batches of this rank in a whole epoch.

        Raises:
            TypeError: a :class:`Sharded` data set does not end.
        """
        if isinstance(self._source, Shards):
            raise TypeError("a loader of a Sharded data set goes on for ever")
        whole, more = divmod(len(self.dataset), self.step_samples())  # type: ignore[arg-type]
        return whole + (more > 0 and not self.drop_last)

    def __iter__(self) -> Any:
        """Micro-batches of this rank from the position to the end of the epoch (of a :class:`Sharded` data set for
        ever). Report what is used, or the next pass would be the same one again: that is an error.
        """
        return self._flat(lambda: None if isinstance(self._source, Shards) else self.epoch + 1)

    def iterate(self, epochs: int | None = None) -> Iterator[Any]:
        """Micro-batches of this rank from the position on.

        Args:
            epochs: end where this epoch, counted from 0, begins: ``epochs=3`` trains on three in all. None: for ever.
        """
        if epochs is not None and isinstance(self._source, Shards):
            raise InvalidError("the epochs of a Sharded data set do not end on all ranks at once; count steps")
        return self._flat(lambda: epochs)

    def batches(self, accumulate: int = 1) -> Iterator[list[Any]]:
        """Of each optimizer step its micro-batches of this rank, from the position on and for ever.

        Args:
            accumulate: micro-batches of a rank in a step.
        """
        if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
            raise InvalidError(f"accumulate is {accumulate!r}, not a number of micro-batches from 1 on")
        return self._steps(accumulate, lambda: None)

    def _flat(self, until: Callable[[], int | None]) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._steps(1, until))

    def _steps(self, accumulate: int, until: Callable[[], int | None]) -> Iterator[list[Any]]:
        """Begins at the first call of next, so that an iterator may be made before the position is restored."""
        source = self._source
        self._stop()
        mine = self._iteration
        source.begin(accumulate)
        begun = source.position
        if begun == self._ran_from:
            raise StateError(
                f"the pass before this one ended, and the position is still {begun}: nothing was reported as used, and "
                "the same samples would come again. Call used() for each step (Checkpointer.step does); for "
                "evaluation take a torch DataLoader"
            )
        end = until()
        fetched = iter(self._torch_loader(accumulate, end))
        any_made = False
        for step in source.steps(accumulate, end):
            made = [source.unwrapped(next(fetched)) for _ in range(accumulate)]
            any_made = True
            self._outstanding += step.samples
            yield made
            if mine != self._iteration:
                raise StateError(
                    "this iterator was made before the position was restored, the ranks were bound, or another "
                    "iterator was made: it would hand out other samples than those that come next. Make a new one"
                )
        if any_made:
            self._ran_from = begun

    def _stop(self) -> None:
        """Iterators that are under way cannot go on; what was handed out and not used comes again."""
        self._iteration += 1
        self._outstanding = 0

    def _torch_loader(self, accumulate: int, until: int | None) -> torch.utils.data.DataLoader[Any]:
        """One that fetches from the position on."""
        epoch, consumed = self.position
        a, b, _, _ = words((self.seed, epoch, consumed), WORKERS)
        self._own_generator.manual_seed(a | b << 32)
        arguments = self._source.arguments(accumulate, until, self.collate_fn)
        keeps_workers = self.persistent_workers and not isinstance(self._source, Shards)
        if self._inner is None or not keeps_workers:
            self._inner = torch.utils.data.DataLoader(
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                timeout=self.timeout,
                worker_init_fn=WorkerInit(self.worker_init_fn),
                multiprocessing_context=self.multiprocessing_context,
                prefetch_factor=self.prefetch_factor,
                persistent_workers=keeps_workers,
                generator=self._own_generator,
                collate_fn=as_made,
                **arguments,
            )
        return self._inner

    # --------------------------------------------------------------- checkpoint

    def lastgood_part(self, key: str) -> PositionPart:
        """The position as a part of a training state."""
        return PositionPart(key, self, _Restored(self))


class _Restored:
    """The position of a loader, whose iterators end when it changes from outside."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def save(self, to: Saving, key: str) -> None:
        self._loader._source.save(to, key)

    def read(self, of: Restoring, key: str) -> Any:
        return self._loader._source.read(of, key)

    def take(self, found: Any, of: Restoring, key: str) -> None:
        self._loader._stop()
        self._loader._ran_from = None
        self._loader._source.take(found, of, key)
