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
from lastgood.device import in_host_memory
from lastgood.errors import InvalidError, MismatchError, call
from lastgood.layout import Layout

if TYPE_CHECKING:
    from lastgood.checkpoint import Checkpoint


# Host memory that is read into for devices at a time, bytes.
_STAGING_BYTES = 256 << 20


class _Window:
    """Tensors of devices that are read at a time: host memory first, then copied on."""

    def __init__(self) -> None:
        self.columns = Columns()
        self.copies: list[tuple[Any, Any]] = []  # of a device, and host memory
        self.nbytes = 0

    def deliver(self) -> None:
        """Copies all, and frees each as soon as it is."""
        torch = dtypes.imported("torch")
        self.columns = Columns()  # keeps the memory otherwise
        with torch.no_grad():
            while self.copies:
                target, host = self.copies.pop()
                target.copy_(host)


class Load:
    """Describes what is to be read where; :meth:`run` reads all of it at once, so that the reads of all tensors are
    sorted and joined. In a resume it is given to your function, and the session runs it.

    Tensors on devices are read into host memory and copied on, so many at a time as ``staging_bytes`` holds.

    Args:
        checkpoint: the one to read from.
        verify: check every byte that is used.
        staging_bytes: cap of that host memory, but for a tensor that is larger itself; 0: 256 MiB.
    """

    def __init__(self, checkpoint: Checkpoint, *, verify: bool = True, staging_bytes: int = 0) -> None:
        self.checkpoint = checkpoint
        self.rank: int | None = None  # in a resume, the rank that loads
        self.columns = Columns()
        self._flags = 0 if verify else int(lib.LG_LOAD_UNVERIFIED)
        self._staging_bytes = staging_bytes or _STAGING_BYTES
        self._windows: list[_Window] = []
        self._window_of: dict[int, _Window] = {}  # by the id of host memory
        self._round = 0  # what was handed over
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
            if found is not None and in_host_memory(array):
                self._written.append(array)
                self.columns.add_packed(name, *found, flags)
            else:
                self.add(name, self.memory(name, array, optional), flags=flags)

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
        self.add(
            name, memory, shape=shape, region=region, flags=flags, layout=layout, flat_offset=flat_offset, rank=number
        )

    def memory(self, name: str, array: Any, optional: bool = False) -> Memory:
        """Where an array is to be read into, for :meth:`add`: its own memory, or, for one on a device, host memory that
        is copied on. What is optional may not be read: it begins as it is on the device.
        """
        torch = dtypes.imported("torch")
        if torch is not None and isinstance(array, torch.Tensor):
            if not array.is_meta and not in_host_memory(array):
                # Takes no memory before it is read into.
                host = array.detach().cpu().clone() if optional else torch.empty(array.shape, dtype=array.dtype)
                self._window_of[id(host)] = self._room(array, host)
                array = host
            else:
                self._written.append(array)
        return arrays.describe(name, array, to_write=True)

    def _room(self, target: Any, host: Any) -> _Window:
        size = host.numel() * host.element_size()
        if not self._windows or self._windows[-1].nbytes + size > self._staging_bytes:
            self._windows.append(_Window())
        window = self._windows[-1]
        window.nbytes += size
        window.copies.append((target, host))
        return window

    def add(self, name: str, memory: Memory, **how: Any) -> None:
        """One tensor or part into memory of :meth:`memory`, or described otherwise; as :meth:`Columns.add`. A function
        for other parts of the package.
        """
        window = self._window_of.get(id(memory.keep))
        (self.columns if window is None else window.columns).add(name, memory, **how)

    @property
    def names(self) -> list[str]:
        """Of all tensors that are described."""
        return [*self.columns.names, *(name for window in self._windows for name in window.columns.names)]

    @property
    def written(self) -> list[Any]:
        """Torch tensors in host memory that are read into; views of what was given, maybe."""
        return self._written

    def hand_over(self, raw: Any) -> bool:
        """Adds what is to be read in the next round to an ``lg_load *``, and delivers what was read in the round
        before. Returns whether there are more rounds.
        """
        round_, self._round = self._round, self._round + 1
        if round_ == 0:
            self.columns.load(raw)
        elif round_ <= len(self._windows):  # another rank may need more rounds
            self._windows[round_ - 1].deliver()
        if round_ < len(self._windows):
            self._windows[round_].columns.load(raw)
        return self._round < len(self._windows)

    def deliver(self) -> None:
        """Once all is read: copies what is still in host memory to its device, and tells autograd which tensors have
        changed.
        """
        torch = dtypes.imported("torch")
        if torch is None:
            return
        for window in self._windows:
            window.deliver()
        self._windows, self._window_of = [], {}
        changed = [t for t in self._written if not t.is_inference()]
        if changed:
            torch.autograd.graph.increment_version(changed)

    def run(self) -> None:
        """Reads. After an error the contents of the arrays are undefined.

        Raises:
            CorruptError: stored bytes are damaged.
            MissingError, MismatchError: the checkpoint lacks what was asked for, or has it in another form.
        """
        more = True
        while more:
            out = ffi.new("lg_load **")
            with self.checkpoint.pointer as c:
                call(lib.lg_load_begin, c, self._flags, out)
                load = ffi.gc(out[0], lib.lg_load_free)
                try:
                    more = self.hand_over(load)
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
