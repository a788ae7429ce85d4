# SPDX-License-Identifier: Apache-2.0
"""Descriptions of many tensors, handed to the library in one call: a call and a
struct for each would cost more than all that the library does with them.
"""

from __future__ import annotations

from array import array
from itertools import repeat
from typing import Any

from lastgood._core import ffi, lib
from lastgood.arrays import Memory
from lastgood.errors import InvalidError, call

RANK_SELF = 0xFFFFFFFF  # LG_RANK_SELF: in a resume, the rank that loads


class Columns:
    """Collects descriptions; :meth:`save` and :meth:`load` hand them over. Keeps what owns the memory."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.keep: list[Any] = []
        self._dtypes: list[int] = []
        self._groups: list[int] = []
        self._ndims: list[int] = []
        self._dims: list[int] = []
        self._local_dims: list[int] = []
        self._strides: list[int] = []
        self._offsets: list[int] = []
        self._extents: list[int] = []
        self._data: list[int] = []
        self._layouts: list[int] = []
        self._flat_offsets: list[int] = []
        self._ranks: list[int] = []
        self._flags: list[int] = []
        self._forms: list[int] = []

    def add(
        self,
        name: str,
        memory: Memory,
        *,
        group: int = 0,
        flags: int = 0,
        shape: tuple[int, ...] | None = None,
        region: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
        layout: Any = None,
        flat_offset: int = 0,
        rank: int = RANK_SELF,
    ) -> None:
        """One tensor. ``shape`` is the global one where it is not the memory's; that the memory is of the size of the
        region or of the layout's part is checked by the caller.
        """
        local = memory.shape
        if shape is None:
            shape = local
        elif len(local) != len(shape) and not (layout is not None and layout.flat):
            raise InvalidError(f'"{name}": the array has {len(local)} dimensions, the tensor {len(shape)}')
        form = 0
        if len(self._forms) < len(self.names):
            self._pad()
        self.names.append(name)
        self.keep.append(memory.keep)
        self._dtypes.append(memory.dtype)
        self._groups.append(group)
        self._ndims.append(len(shape))
        self._dims.extend(shape)
        self._data.append(memory.address)
        self._flags.append(flags)
        self._ranks.append(rank)
        if memory.strides is not None:
            form |= lib.LGPY_STRIDED
        if region is not None:
            form |= lib.LGPY_REGION
        if layout is not None and not layout.flat:
            form |= lib.LGPY_LOCAL
        # Entries that do not count keep the columns in step.
        n = len(shape)
        zeros = (0,) * n
        self._strides.extend(memory.strides if memory.strides is not None and len(memory.strides) == n else zeros)
        self._offsets.extend(region[0] if region is not None else zeros)
        self._extents.extend(region[1] if region is not None else zeros)
        self._local_dims.extend(local if form & lib.LGPY_LOCAL else zeros)
        self._layouts.append(0 if layout is None else layout.address)
        self._flat_offsets.append(flat_offset)
        if layout is not None:
            self.keep.append(layout)
        self._forms.append(form)

    def add_packed(self, name: str, dtype: int, shape: tuple[int, ...], address: int, flags: int) -> None:
        """As :meth:`add`, of a whole packed array in a fraction of the time. The caller keeps what owns the memory."""
        self.names.append(name)
        self._dtypes.append(dtype)
        self._ndims.append(len(shape))
        self._dims.extend(shape)
        self._data.append(address)
        self._flags.append(flags)

    def _pad(self) -> None:
        """After :meth:`add_packed`: what it left out, for all that it has added since."""
        n = len(self.names)
        for column, value in (
            (self._groups, 0),
            (self._layouts, 0),
            (self._flat_offsets, 0),
            (self._forms, 0),
            (self._ranks, RANK_SELF),
        ):
            column.extend(repeat(value, n - len(column)))
        for column in (self._strides, self._offsets, self._extents, self._local_dims):
            column.extend(repeat(0, len(self._dims) - len(column)))

    def _struct(self) -> tuple[Any, list[Any]]:
        self._pad()
        try:
            names = "\0".join(self.names).encode()
        except UnicodeEncodeError as why:
            raise InvalidError(
                f"a tensor's name has a lone surrogate: {why.object[why.start - 20 : why.end]!r}"
            ) from None
        if names.count(b"\0") != max(len(self.names) - 1, 0):
            bad = next(n for n in self.names if "\0" in n)
            raise InvalidError(f"a tensor's name has a NUL in it: {bad!r}")
        c = ffi.new("lgpy_columns *")
        c.n = len(self.names)
        keep: list[Any] = [ffi.from_buffer(names + b"\0")]
        c.names = keep[0]
        columns: list[tuple[str, str, str, list[int]]] = [
            ("dtypes", "int32_t[]", "i", self._dtypes),
            ("groups", "int32_t[]", "i", self._groups),
            ("ndims", "uint32_t[]", "I", self._ndims),
            ("dims", "uint64_t[]", "Q", self._dims),
            ("local_dims", "uint64_t[]", "Q", self._local_dims),
            ("strides", "int64_t[]", "q", self._strides),
            ("offsets", "uint64_t[]", "Q", self._offsets),
            ("extents", "uint64_t[]", "Q", self._extents),
            ("data", "uint64_t[]", "Q", self._data),
            ("layouts", "uint64_t[]", "Q", self._layouts),
            ("flat_offsets", "uint64_t[]", "Q", self._flat_offsets),
            ("ranks", "uint32_t[]", "I", self._ranks),
            ("flags", "uint32_t[]", "I", self._flags),
            ("forms", "uint32_t[]", "I", self._forms),
        ]
        for member, kind, code, values in columns:
            try:
                column = array(code, values)
            except OverflowError as why:
                raise InvalidError(f"a shape, offset or rank is out of range: {why}") from None
            pointer = ffi.from_buffer(kind, column)
            keep.append(pointer)
            setattr(c, member, pointer)
        return c, keep

    def save(self, save: Any) -> None:
        """Adds all to an ``lg_save *``."""
        columns, _keep = self._struct()
        call(lib.lgpy_save_tensors, save, columns)

    def load(self, load: Any) -> None:
        """Adds all to an ``lg_load *``."""
        columns, _keep = self._struct()
        call(lib.lgpy_load_tensors, load, columns)
