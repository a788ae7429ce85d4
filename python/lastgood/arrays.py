# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of arrays are: NumPy's, torch's and JAX's, described for the
library without copying, and new ones made to be read into.

None of the three has to be installed; each is imported only when it is asked
for by name, and looked at only when something else has imported it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from lastgood import dtypes
from lastgood._core import ffi
from lastgood.errors import InvalidError, UnsupportedError

Framework = Literal["numpy", "torch", "jax"]


class Memory(NamedTuple):
    """An array as the library sees it."""

    dtype: int  # the library's number
    shape: tuple[int, ...]
    address: int
    strides: tuple[int, ...] | None  # bytes; None: packed row-major
    keep: Any  # what owns the memory


class RawArray:
    """The bytes of a tensor whose dtype the framework has no arrays of: packed, row-major, little-endian.

    Args:
        dtype: name of the safetensors format, ``"F6_E2M3"`` for example.
        shape: in elements; together they must fill whole bytes.
        data: the bytes, anything that has the buffer protocol.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: Any) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)
        self.data = data

    def __repr__(self) -> str:
        return f"<RawArray {self.dtype} {list(self.shape)}>"

    @property
    def nbytes(self) -> int:
        """Length of ``data`` that dtype and shape ask for, bytes."""
        return nbytes(dtypes.number(self.dtype), self.shape)


def nbytes(dtype: int, shape: tuple[int, ...]) -> int:
    """Bytes of a packed array; shape in elements."""
    return (math.prod(shape) * dtypes.BITS[dtype] + 7) // 8


def form(dtype: int, shape: tuple[int, ...]) -> str:
    """Dtype and shape in words: ``F32 [2, 3]``."""
    return f"{dtypes.NAMES[dtype]} {list(shape)}"


def check_framework(framework: str) -> Framework:
    """Refuses any other name."""
    for known in get_args(Framework):
        if framework == known:
            return known  # type: ignore[no-any-return]
    raise InvalidError(f'framework is {framework!r}, not "numpy", "torch" or "jax"')


# -------------------------------------------------------------- existing arrays

Describe = Callable[[str, Any, bool], Memory]
_describers: dict[type, Describe | None] = {}


def _describer(kind: type) -> Describe | None:
    """How arrays of a type are described; ``None`` if it is none of an array. Decided once a type."""
    try:
        return _describers[kind]
    except KeyError:
        pass
    found: Describe | None = None
    numpy, torch, jax = (dtypes.imported(m) for m in ("numpy", "torch", "jax"))
    if issubclass(kind, RawArray):
        found = _raw_memory
    elif torch is not None and issubclass(kind, torch.Tensor):
        found = _torch_memory
    elif numpy is not None and issubclass(kind, numpy.ndarray):
        found = _masked if issubclass(kind, numpy.ma.MaskedArray) else _numpy_memory
    elif jax is not None and issubclass(kind, jax.Array):
        found = _jax_memory
    elif jax is None and kind.__module__.split(".")[0] in ("jax", "jaxlib"):
        return None  # being imported; ask again
    _describers[kind] = found
    return found


def is_array(value: Any) -> bool:
    """Whether it is an array of any framework."""
    return _describer(type(value)) is not None


def describe(name: str, value: Any, to_write: bool = False) -> Memory:
    """Where the bytes of an array are.

    Args:
        name: for messages.
        value: NumPy or JAX array, torch tensor, :class:`RawArray`.
        to_write: the library will write there.

    Raises:
        UnsupportedError: it has no memory that can be described, or a dtype that safetensors lacks.
        InvalidError: it is no array, or not writable.
    """
    describer = _describer(type(value))
    if describer is None:
        raise InvalidError(f'"{name}": {type(value).__module__}.{type(value).__qualname__} is no array')
    return describer(name, value, to_write)


def owner(value: Any, memory: Memory) -> Any:
    """What must be kept so that the memory of an array stays, whatever becomes of the array's name; None if the memory
    is that of a copy made for :func:`describe`, and not what the array's owner changes.
    """
    if memory.keep is value:
        torch = dtypes.imported("torch")
        # Something else may be put into a tensor (`parameter.data = …`), which frees what it had.
        return value.detach() if torch is not None and isinstance(value, torch.Tensor) else value
    return memory.keep if type(value) is RawArray else None


@functools.lru_cache(maxsize=4096)
def overlaps(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether two elements may share bytes. Exact for memory that slicing, transposing and broadcasting make; for
    stranger strides it may say so where none do.
    """
    if 0 in shape:
        return False
    reach = itemsize
    for stride, size in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def _numpy_memory(name: str, a: Any, to_write: bool) -> Memory:
    dtype = dtypes.of_numpy(a.dtype)
    if dtype is None:
        hint = ""
        if a.dtype.newbyteorder("<") != a.dtype and dtypes.of_numpy(a.dtype.newbyteorder("<")) is not None:
            hint = f": its bytes are big-endian; give array.astype({a.dtype.newbyteorder('<').str!r})"
        raise UnsupportedError(f'"{name}": safetensors has no dtype for NumPy\'s {a.dtype}{hint}')
    interface = a.__array_interface__
    address, read_only = interface["data"]
    strides = interface["strides"]  # None: packed
    shape = interface["shape"]
    if to_write:
        if read_only:
            raise InvalidError(f'"{name}": the array to read into is read-only')
        if strides is not None and overlaps(shape, strides, a.dtype.itemsize):
            raise InvalidError(f'"{name}": elements of the array to read into share memory (a broadcast view?)')
    return Memory(dtype, shape, address, strides, a)


def _masked(name: str, a: Any, to_write: bool) -> Memory:
    raise UnsupportedError(f'"{name}": a masked array; save its data and mask as two')


def torch_dtype(name: str, t: Any) -> int:
    """The library's number of a torch tensor's dtype.

    Raises:
        UnsupportedError: it has none, or the tensor no memory of its own that can be described.
    """
    dtype = dtypes.from_torch().get(t.dtype)
    if dtype is None:
        raise UnsupportedError(f'"{name}": safetensors has no dtype for {t.dtype}')
    torch = dtypes.imported("torch")
    if t.layout is not torch.strided:
        raise UnsupportedError(f'"{name}": layout {t.layout}; convert it to strided, or save its parts')
    if t.is_meta:
        raise UnsupportedError(f'"{name}": a tensor on the meta device has no data')
    if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        kind = f"{type(t).__module__}.{type(t).__qualname__}"
        raise UnsupportedError(f'"{name}": {kind} keeps its values in other tensors; save those, with a layout')
    return dtype


def torch_memory(name: str, t: Any, dtype: int) -> Memory:
    """Where a torch tensor in host memory is, whose dtype is known."""
    if t.is_contiguous():
        strides = None
    else:
        size = t.element_size()
        strides = tuple([s * size for s in t.stride()])
    shape = t.shape
    if dtype == dtypes.F4:
        if t.ndim == 0 or strides is not None:
            raise UnsupportedError(f'"{name}": {t.dtype} tensors must be contiguous, of one dimension or more')
        shape = (*shape[:-1], 2 * shape[-1])
    return Memory(dtype, shape, t.data_ptr(), strides, t)


def simple_torch() -> Callable[[Any], tuple[int, tuple[int, ...], int] | None]:
    """A function of an array that finds what nearly all torch tensors are, whole, packed, in host memory, in a fraction
    of the time of :func:`describe`: dtype, shape and address. Of anything else it gives None, and does not say why.
    """
    torch = dtypes.imported("torch")
    if torch is None:
        return lambda _: None
    kinds = (torch.Tensor, torch.nn.Parameter)
    numbers = {dtype: n for dtype, n in dtypes.from_torch().items() if n != dtypes.F4}
    strided = torch.strided

    def simple(t: Any) -> tuple[int, tuple[int, ...], int] | None:
        if type(t) not in kinds or not t.is_cpu or t.layout is not strided or not t.is_contiguous():
            return None
        number = numbers.get(t.dtype)
        if number is None or t.is_conj() or t.is_neg():
            return None
        return number, t.shape, t.data_ptr()

    return simple


def _torch_memory(name: str, t: Any, to_write: bool) -> Memory:
    dtype = torch_dtype(name, t)
    if not t.is_cpu:
        if to_write:
            raise InvalidError(f'"{name}": on {t.device}; the library writes to host memory')
        t = t.detach().cpu()
    if t.is_conj() or t.is_neg():
        # Its memory is not its values.
        if to_write:
            raise UnsupportedError(f'"{name}": a conjugate or negative view cannot be read into')
        t = t.detach().resolve_conj().resolve_neg()
    memory = torch_memory(name, t, dtype)
    if to_write and memory.strides is not None and overlaps(memory.shape, memory.strides, t.element_size()):
        raise InvalidError(f'"{name}": elements of the tensor to read into share memory (an expanded view?)')
    return memory


def _jax_memory(name: str, a: Any, to_write: bool) -> Memory:
    if to_write:
        raise UnsupportedError(f'"{name}": JAX arrays never change; load new ones (load with like=)')
    if not a.is_fully_addressable:
        raise UnsupportedError(f'"{name}": parts of the array are on other processes; save addressable_shards')
    import numpy as np

    if not isinstance(a.dtype, np.dtype):  # keys of random generators
        raise UnsupportedError(
            f'"{name}": safetensors has no dtype for JAX\'s {a.dtype}; give jax.random.key_data(key)'
        )
    return _numpy_memory(name, np.asarray(a), False)


def _raw_memory(name: str, a: RawArray, to_write: bool) -> Memory:
    dtype = dtypes.number(a.dtype)
    try:
        view = ffi.from_buffer("char[]", a.data, require_writable=to_write)
    except (TypeError, BufferError, ValueError) as why:
        raise InvalidError(f'"{name}": data of a raw array: {why}') from why
    if len(view) != a.nbytes or math.prod(a.shape) * dtypes.BITS[dtype] % 8 != 0:
        raise InvalidError(f'"{name}": {form(dtype, a.shape)} takes {a.nbytes} whole bytes, data has {len(view)}')
    return Memory(dtype, a.shape, int(ffi.cast("uintptr_t", view)), None, (a, view))


# ------------------------------------------------------------------ new arrays

# Memory that begins a few bytes behind a page is read into at a quarter of the
# speed (docs/performance.md), and NumPy's does, by 16.
_ALIGNMENT = 64


def allocate(dtype: int, shape: tuple[int, ...], framework: Framework) -> tuple[Any, Memory]:
    """A new array in host memory, contents undefined, and where it is. For JAX a NumPy array, which :func:`finish`
    turns into one of its own.
    """
    if framework == "torch":
        import torch

        kind = dtypes.torch_dtypes().get(dtype)
        if kind is None:
            return allocate_raw(dtype, shape)
        own = (*shape[:-1], shape[-1] // 2) if dtype == dtypes.F4 else shape
        if dtype == dtypes.F4 and (not shape or shape[-1] % 2):
            return allocate_raw(dtype, shape)
        t = torch.empty(own, dtype=kind)
        return t, Memory(dtype, shape, t.data_ptr(), None, t)
    import numpy as np

    numpy_dtype = dtypes.numpy_dtypes().get(dtype)
    if numpy_dtype is None:
        return allocate_raw(dtype, shape)
    size = nbytes(dtype, shape)
    if size < 65536:
        a = np.empty(shape, dtype=numpy_dtype)
        return a, Memory(dtype, shape, a.__array_interface__["data"][0], None, a)
    buffer = np.empty(size + _ALIGNMENT, dtype=np.uint8)
    address = buffer.__array_interface__["data"][0]
    skip = -address % _ALIGNMENT
    a = np.ndarray(shape, dtype=numpy_dtype, buffer=buffer, offset=skip)
    return a, Memory(dtype, shape, address + skip, None, a)


def allocate_raw(dtype: int, shape: tuple[int, ...]) -> tuple[RawArray, Memory]:
    """A new raw array, and where it is."""
    raw = RawArray(dtypes.NAMES[dtype], shape, bytearray(nbytes(dtype, shape)))
    return raw, _raw_memory("", raw, True)


def finish(array: Any, framework: Framework) -> Any:
    """What :func:`allocate` made, once it is filled, as an array of the framework."""
    if framework == "jax" and not isinstance(array, RawArray):
        import jax.numpy as jnp

        # 64-bit types without jax_enable_x64 would lose half of their bits.
        made = jnp.asarray(array)
        if made.dtype != array.dtype:
            raise UnsupportedError(
                f"JAX turns {array.dtype} into {made.dtype}: enable jax_enable_x64, or load as numpy"
            )
        return made
    return array
