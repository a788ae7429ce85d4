# SPDX-License-Identifier: Apache-2.0
"""One safetensors file of any writer. Its form is checked; it has no checksums."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from lastgood import arrays, dtypes
from lastgood._core import ffi, lib
from lastgood.arrays import Framework, Memory
from lastgood.errors import StateError, call
from lastgood.handles import Pointer, path_bytes


class FileTensor:
    """A tensor of a safetensors file, not read yet.

    Attributes:
        name, shape (elements), nbytes
    """

    group = "model"
    alias_of: str | None = None

    def __init__(self, file: SafetensorsFile, index: int, name: str, number: int, shape: tuple[int, ...]) -> None:
        self._file = file
        self._index = index
        self.name = name
        self.number = number  # the dtype as the library numbers it
        self.shape = shape
        self.nbytes = arrays.nbytes(number, shape)

    @property
    def dtype(self) -> str:
        """Name of the safetensors format."""
        return dtypes.NAMES[self.number]

    def read(self, *, framework: Framework | None = None) -> Any:
        """All of it as a new array."""
        chosen = self._file.framework if framework is None else arrays.check_framework(framework)
        array, memory = arrays.allocate(self.number, self.shape, chosen)
        self.read_packed(memory)
        return arrays.finish(array, chosen)

    def read_packed(self, memory: Memory) -> None:
        """All of it into memory that is packed row-major."""
        self._file.read_packed(self._index, memory)

    def __getitem__(self, index: Any) -> Any:
        array = self.read()
        return array if index is ... else array[index]


class SafetensorsFile(Mapping[str, FileTensor]):
    """A mapping from names to tensors, which are read as wholes when they are indexed.

    Args:
        path: links are followed.
        framework: what arrays are made.

    Raises:
        FormatError: it is something else; the message says what.
    """

    def __init__(self, path: str | os.PathLike[str], framework: Framework = "numpy") -> None:
        self.framework: Framework = arrays.check_framework(framework)
        out = ffi.new("lg_safetensors **")
        call(lib.lg_safetensors_open, path_bytes(path), out)
        self._pointer: Pointer | None = Pointer(out[0], lib.lg_safetensors_close)
        self._tensors: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self.metadata: dict[str, str] = {}
        name, dtype, ndim = ffi.new("char const **"), ffi.new("lg_dtype *"), ffi.new("uint32_t *")
        shape, begin, end = ffi.new("uint64_t const **"), ffi.new("uint64_t *"), ffi.new("uint64_t *")
        value = ffi.new("char const **")
        with self._pointer as f:
            for i in range(lib.lg_safetensors_count(f)):
                call(lib.lg_safetensors_tensor, f, i, name, dtype, ndim, shape, begin, end)
                dims = tuple(shape[0][0 : ndim[0]]) if ndim[0] else ()
                self._tensors[ffi.string(name[0]).decode()] = (i, int(dtype[0]), dims)
            for i in range(lib.lg_safetensors_metadata_count(f)):
                call(lib.lg_safetensors_metadata, f, i, name, value)
                self.metadata[ffi.string(name[0]).decode()] = ffi.string(value[0]).decode()

    def read_packed(self, index: int, memory: Memory) -> None:
        """Reads a tensor into memory that is packed row-major."""
        if self._pointer is None:
            raise StateError("the file is closed")
        size = arrays.nbytes(memory.dtype, memory.shape)
        with self._pointer as f:
            call(lib.lg_safetensors_read, f, index, ffi.cast("void *", memory.address), size)

    def close(self) -> None:
        """Closes it."""
        self._pointer = None

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> FileTensor:
        index, number, shape = self._tensors[name]
        return FileTensor(self, index, name, number, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
