# SPDX-License-Identifier: Apache-2.0
"""Dtypes: one table from the library's to NumPy's, ml_dtypes' and torch's."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

from lastgood._core import ffi, lib
from lastgood.errors import InvalidError

if TYPE_CHECKING:
    import numpy as np
    import torch

# Names of the safetensors format, by the library's number.
NAMES: list[str] = [ffi.string(lib.lg_dtype_name(i)).decode() for i in range(lib.LG_DTYPE_COUNT)]
BITS: list[int] = [int(lib.lg_dtype_bits(i)) for i in range(lib.LG_DTYPE_COUNT)]
NUMBERS: dict[str, int] = {name: i for i, name in enumerate(NAMES)}

# NumPy's own, little-endian. What is not here is in ml_dtypes, or packed below a
# byte, which NumPy has no arrays of.
_NUMPY = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "C64": "<c8",
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
}
_ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",  # two elements in one of torch's
}

# Metadata key of unsigned integers that stand for a dtype that NumPy lacks here.
STANDS_FOR = "lastgood"

F4 = NUMBERS["F4"]
FLOATS = frozenset(
    NUMBERS[n] for n in ("F16", "BF16", "F32", "F64", "F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
)
_INTEGERS = {NUMBERS[n]: (n[0] == "I", int(n[1:])) for n in NAMES if n[0] in "IU" and n[1:].isdigit()}


def number(name: str) -> int:
    """The library's number of a dtype's name."""
    try:
        return NUMBERS[name]
    except KeyError:
        raise InvalidError(f"{name!r} is no dtype; there are: {', '.join(NAMES)}") from None


def converts(source: int, target: int) -> bool:
    """Whether values of ``source`` may be cast to ``target``: between floats of any width, and to integers that hold
    all values.
    """
    if source in FLOATS and target in FLOATS:
        return True
    if source in _INTEGERS and target in _INTEGERS:
        (signed, bits), (wanted_signed, wanted_bits) = _INTEGERS[source], _INTEGERS[target]
        return bits < wanted_bits and (wanted_signed or not signed)
    return False


@functools.cache
def numpy_dtypes() -> dict[int, np.dtype[Any]]:
    """NumPy's dtype for each of the library's that it has. Without ml_dtypes, unsigned integers of the same width,
    whose ``dtype.metadata`` names what they stand for, take the place of its dtypes.
    """
    import numpy as np

    found: dict[int, np.dtype[Any]] = {NUMBERS[name]: np.dtype(text) for name, text in _NUMPY.items()}
    try:
        ml_dtypes: Any = importlib.import_module("ml_dtypes")
    except ImportError:
        ml_dtypes = None
    for name, attribute in _ML_DTYPES.items():
        n = NUMBERS[name]
        own = getattr(ml_dtypes, attribute, None)
        bits = "<u2" if BITS[n] == 16 else "|u1"
        found[n] = np.dtype(own) if own is not None else np.dtype(bits, metadata={STANDS_FOR: name})
    return found


@functools.cache
def _from_numpy() -> dict[Any, int]:
    return {dtype: n for n, dtype in numpy_dtypes().items() if dtype.metadata is None}


def of_numpy(dtype: np.dtype[Any]) -> int | None:
    """The library's number of a NumPy dtype, ``None`` if it has none."""
    if dtype.metadata is not None and STANDS_FOR in dtype.metadata:
        return NUMBERS.get(dtype.metadata[STANDS_FOR])
    return _from_numpy().get(dtype)


@functools.cache
def torch_dtypes() -> dict[int, torch.dtype]:
    """Torch's dtype for each of the library's that this version of torch has."""
    import torch

    found = {NUMBERS[name]: getattr(torch, attribute, None) for name, attribute in _TORCH.items()}
    return {n: dtype for n, dtype in found.items() if dtype is not None}


@functools.cache
def from_torch() -> dict[torch.dtype, int]:
    """The library's numbers by torch's dtypes."""
    return {dtype: n for n, dtype in torch_dtypes().items()}


def imported(module: str) -> Any:
    """A module if something has imported it, else ``None``: values of its types cannot exist before."""
    return sys.modules.get(module)
