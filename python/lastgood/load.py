# SPDX-License-Identifier: Apache-2.0
"""What is to be read, and where to."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lastgood import arrays, dtypes
from lastgood._columns import RANK_SELF, Columns
from lastgood._core import ffi, lib
from lastgood.arrays import Memory
from lastgood.errors import InvalidError, MismatchError, call
from lastgood.layout import Layout

if TYPE_CHECKING:
    from lastgood.checkpoint import Checkpoint


class Load:
    """Describes what is to be read where; :meth:`run` reads all of it at once, so that the reads of all tensors are
    sorted and joined. In a resume it is given to your function, and the session runs it.

    Args:
        checkpoint: the one to read from.
        verify: check every byte that is used.
    """

    def __init__(self, checkpoint: Checkpoint, *, verify: bool = True) -> None:
        self.checkpoint = checkpoint
        self.rank: int | None = None  # in a resume, the rank that loads
        self.columns = Columns()
        self._flags = 0 if verify else int(lib.LG_LOAD_UNVERIFIED)
        self._staged: list[tuple[Any, Any]] = []
        self._written: list[Any] = []

    def tensors(self, targets: Mapping[str, Any], *, optional: bool = False) -> None:
        """Whole tensors into existing arrays, by name: NumPy arrays and torch tensors of the stored dtype and shape,
        of any strides.

        Args:
            optional: leave arrays alone whose tensors the checkpoint lacks.
        """
        flags = lib.LG_TENSOR_OPTIONAL if optional else 0
        simple = arrays.simple_torch()
        for name, array in targets.items():
            found = simple(array)
            if found is not None:
                self._written.append(array)
                self.columns.add_packed(name, *found, flags)
            else:
                self.columns.add(name, self.memory(name, array, optional), flags=flags)

    def tensor(
        self,
        name: str,
        array: Any,
        *,
        shape: tuple[int, ...] | None = None,
        offset: tuple[int, ...] | None = None,
        layout: Layout | None = None,
        flat_offset: int = 0,
        rank: int | None = None,
        copy_of_rank: int | None = None,
        optional: bool = False,
    ) -> None:
        """One tensor, or a part of it, into an existing array.

        Args:
            shape: the tensor's global shape where the array is a part of it; in elements.
            offset: the array is the box of the array's shape that begins here; in elements.
            layout: the array is the part that this layout gives ``rank``.
            flat_offset: with a flat layout: where the tensor begins in the buffer, in elements.
            rank: whose part; None: in a resume, this rank's.
            copy_of_rank: of a tensor that is kept per rank, that rank's copy.
            optional: leave the array alone when the checkpoint lacks the tensor.

        Raises:
            MismatchError: the array is not of the size of the part.
        """
        memory = self.memory(name, array, optional)
        flags = lib.LG_TENSOR_OPTIONAL if optional else 0
        number = RANK_SELF
        if copy_of_rank is not None:
            flags |= lib.LG_TENSOR_COPY_OF_RANK
            number = copy_of_rank
        region = None
        if (offset is not None or layout is not None) and shape is None:
            raise InvalidError(f'"{name}": to load a part give the global shape too (shape=)')
        if offset is not None:
            region = (offset, memory.shape)
        elif layout is not None:
            assert shape is not None
            whose = self.rank if rank is None else rank
            if whose is None:
                raise InvalidError(f'"{name}": say whose part under the layout it is (rank=)')
            check_part(name, memory, shape, layout, flat_offset, whose)
            number = whose
        elif shape is not None and tuple(shape) != memory.shape:
            raise MismatchError(f'"{name}": the array is {list(memory.shape)}, its global shape is to be {list(shape)}')
        self.columns.add(
            name, memory, shape=shape, region=region, flags=flags, layout=layout, flat_offset=flat_offset, rank=number
        )

    def memory(self, name: str, array: Any, optional: bool = False) -> Memory:
        """Where an array is to be read into: its own memory, or, for one on a device, host memory that
        :meth:`deliver` copies from. What is optional may not be read: it begins as it is on the device.
        """
        torch = dtypes.imported("torch")
        if torch is not None and isinstance(array, torch.Tensor):
            if not array.is_cpu and not array.is_meta:
                host = array.detach().cpu() if optional else torch.empty(array.shape, dtype=array.dtype)
                self._staged.append((array, host))
                array = host
            else:
                self._written.append(array)
        return arrays.describe(name, array, to_write=True)

    @property
    def written(self) -> list[Any]:
        """Torch tensors in host memory that are read into; views of what was given, maybe."""
        return self._written

    def deliver(self) -> None:
        """Once all is read: copies what was staged to its device, and tells autograd which tensors have changed."""
        torch = dtypes.imported("torch")
        if torch is None:
            return
        with torch.no_grad():
            while self._staged:  # each is freed when it is delivered
                target, host = self._staged.pop()
                target.copy_(host)
        changed = [t for t in self._written if not t.is_inference()]
        if changed:
            torch.autograd.graph.increment_version(changed)

    def run(self) -> None:
        """Reads. After an error the contents of the arrays are undefined.

        Raises:
            CorruptError: stored bytes are damaged.
            MissingError, MismatchError: the checkpoint lacks what was asked for, or has it in another form.
        """
        out = ffi.new("lg_load **")
        with self.checkpoint.pointer as c:
            call(lib.lg_load_begin, c, self._flags, out)
            load = ffi.gc(out[0], lib.lg_load_free)
            try:
                self.columns.load(load)
                call(lib.lg_load_run, load)
            finally:
                ffi.release(load)
        self.deliver()


def check_part(name: str, memory: Memory, shape: tuple[int, ...], layout: Layout, flat_offset: int, rank: int) -> None:
    """Refuses memory that is not of the size of the layout's part.

    Args:
        shape: the tensor's global one, in elements.
    """
    if layout.flat:
        _, elements = layout.local_range(rank, shape, flat_offset)
        local: tuple[int, ...] = (elements,)
    else:
        local = _local_shape(layout, rank, tuple(shape))
    if tuple(memory.shape) != local:
        raise MismatchError(
            f'"{name}": the array is {list(memory.shape)}, the part of rank {rank} of {list(shape)} is {list(local)}'
        )


@functools.lru_cache(maxsize=16384)
def _local_shape(layout: Layout, rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Many tensors have the same shape, and every save asks again."""
    return layout.local_shape(rank, shape)
