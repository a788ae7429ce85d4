# SPDX-License-Identifier: Apache-2.0
"""Which sample comes when: a seeded permutation of the data set, computed on the
fly, that any number of ranks walks through in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lastgood._core import ffi, lib
from lastgood.errors import InvalidError, call
from lastgood.handles import text_bytes

if TYPE_CHECKING:
    from lastgood.checkpoint import Checkpoint
    from lastgood.saving import Save

_NONE = 2**64 - 1
_LOW = 2**32 - 1


def philox4x32(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """128 random bits as a function of a counter of four 32-bit words and a key of 64 bits
    (docs/data-position.md). There is no state: equal arguments, equal bits.

    Returns:
        Four words of 32 bits.
    """
    out = ffi.new("uint32_t[4]")
    lib.lg_philox4x32(ffi.new("uint32_t[4]", counter), ffi.new("uint32_t[2]", (key & _LOW, key >> 32)), out)
    return out[0], out[1], out[2], out[3]


class Sampler:
    """The order of samples, as a function of seed and epoch alone; constant memory for any size. What is kept in a
    checkpoint is seed, epoch and how many samples the whole run has consumed in it, so ranks, micro-batches and
    workers may change in between (docs/data-position.md).

    Args:
        samples: size of the data set, 1 to 2^48.
        seed: of the permutation.
        shuffle: False: in order.
    """

    def __init__(self, samples: int, seed: int = 0, *, shuffle: bool = True) -> None:
        self._s = ffi.new("lg_sampler *")
        flags = 0 if shuffle else lib.LG_SAMPLER_SEQUENTIAL
        try:
            call(lib.lg_sampler_init, self._s, samples, seed, flags)
        except OverflowError as why:
            raise InvalidError(f"samples {samples}, seed {seed}: {why}") from None

    @property
    def samples(self) -> int:
        """Size of the data set."""
        return int(self._s.samples)

    @property
    def seed(self) -> int:
        """Seed of the permutation."""
        return int(self._s.seed)

    @property
    def epoch(self) -> int:
        """Current epoch, from 0."""
        return int(self._s.epoch)

    @property
    def consumed(self) -> int:
        """Samples that the whole run has used in this epoch."""
        return int(self._s.consumed)

    @property
    def shuffle(self) -> bool:
        """Whether it permutes."""
        return not self._s.flags & lib.LG_SAMPLER_SEQUENTIAL

    def __repr__(self) -> str:
        return f"<Sampler of {self.samples}, seed {self.seed}, epoch {self.epoch}, consumed {self.consumed}>"

    def __len__(self) -> int:
        return self.samples

    def at(self, epoch: int, position: int) -> int:
        """The sample at a position of an epoch; nothing moves."""
        found = int(lib.lg_sampler_at(self._s, epoch, position)) if 0 <= position < self.samples else _NONE
        if found == _NONE:
            raise IndexError(f"position {position} of {self.samples} samples")
        return found

    def copy(self, *, epoch: int | None = None, consumed: int | None = None) -> Sampler:
        """Another one of the same order, at the same position or at the given one."""
        made = Sampler.__new__(Sampler)
        made._s = ffi.new("lg_sampler *", self._s[0])
        try:
            made._s.epoch = self.epoch if epoch is None else epoch
            made._s.consumed = 0 if consumed is not None else self.consumed
        except OverflowError as why:
            raise InvalidError(f"epoch {epoch}: {why}") from None
        made.advance(consumed or 0)
        return made

    def peek(self, n: int, ahead: int = 0) -> list[int]:
        """The ``n`` samples that come next, or ``ahead`` places later, over the ends of epochs; nothing moves."""
        if n < 0 or ahead < 0:
            raise InvalidError(f"{n} samples, {ahead} ahead: a sampler looks forward only")
        at = self._s
        if ahead:
            at = ffi.new("lg_sampler *", self._s[0])
            lib.lg_sampler_advance(at, ahead)
        out = ffi.new("uint64_t[]", n)
        lib.lgpy_sampler_peek(at, n, out)
        return list(out)

    def advance(self, n: int) -> None:
        """The whole run has consumed ``n`` more samples."""
        if n < 0:
            raise InvalidError(f"{n} samples consumed: a sampler does not go back")
        lib.lg_sampler_advance(self._s, n)

    def save(self, save: Save, key: str = "sampler") -> None:
        """Writes its position to a checkpoint's global state, under ``key`` with a dot and more behind it."""
        save.with_pointer(lambda raw: call(lib.lg_sampler_save, self._s, raw, text_bytes(key)))

    def load(self, checkpoint: Checkpoint, key: str = "sampler") -> None:
        """Takes its position from there.

        Raises:
            MismatchError: the data set is of another size.
        """
        with checkpoint.pointer as c:
            call(lib.lg_sampler_load, self._s, c, text_bytes(key))
