# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a sample: what a data set draws for it depends on seed, epoch and sample alone, never on the
worker, rank or batch that it comes in.

Data sets draw from the global generators of Python, NumPy and torch. Those are seeded before each sample, and put
back afterwards where the trainer's own draws come from them: without workers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lastgood import dtypes
from lastgood.sampler import philox4x32

# Seed, epoch and a number of 64 bits that tells samples of an epoch apart.
Token = tuple[int, int, int]

_LOW = 2**32 - 1
# Keeps these bits apart from the order of samples, and from what a trainer draws with the same seed.
_KEY_TAG = int.from_bytes(b"lg-sdraw", "big")
# Last word of the counter: what the draws are for.
SAMPLE, COLLATE, OPEN, WORKERS = range(4)


def words(token: Token, purpose: int) -> tuple[int, int, int, int]:
    """128 bits for a sample."""
    seed, epoch, number = token
    return philox4x32((number & _LOW, number >> 32 & _LOW, epoch & _LOW, purpose), seed ^ _KEY_TAG)


def seed_global(token: Token, purpose: int) -> None:
    """Seeds the global generators; NumPy's if it is imported."""
    a, b, c, d = words(token, purpose)
    random.seed(a | b << 32 | c << 64 | d << 96)
    numpy = dtypes.imported("numpy")
    if numpy is not None:
        numpy.random.seed(c)  # all four words would take ten times as long
    torch.default_generator.manual_seed(a | b << 32)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Puts the global generators back at the end; in a worker there is nobody who needs that."""
    if torch.utils.data.get_worker_info() is not None:
        yield
        return
    numpy = dtypes.imported("numpy")
    python = random.getstate()
    own = None if numpy is None else numpy.random.get_state()
    host = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if own is not None:
            numpy.random.set_state(own)
        torch.default_generator.set_state(host)


def collated(token: Token, collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """The batch of samples; its collate function draws by the first one's token. Call it under :func:`kept`."""
    seed_global(token, COLLATE)
    return collate(samples)


def as_made(batch: Any) -> Any:
    """For torch's loader, in place of a collate function: batches come to it collated."""
    return batch


class Keyed:
    """A map-style data set whose indices are tokens, and which makes whole batches. Other attributes are those of the
    trainer's data set, so that a ``worker_init_fn`` finds what it looks for in ``get_worker_info().dataset``.

    Args:
        dataset: the trainer's.
        collate: the trainer's, or torch's.
        read_batches: use its ``__getitems__``; what it draws then depends on the batch.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], read_batches: bool) -> None:
        self.__dict__.update(dataset=dataset, _collate=collate, _read_batches=read_batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:  # while it is being copied
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, tokens: Sequence[Token]) -> Any:
        with kept():
            if self._read_batches:
                seed_global(tokens[0], SAMPLE)
                samples = list(self.dataset.__getitems__([index for _, _, index in tokens]))
            else:
                samples = []
                for token in tokens:
                    seed_global(token, SAMPLE)
                    samples.append(self.dataset[token[2]])
            return collated(tokens[0], self._collate, samples)
