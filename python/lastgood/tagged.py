# SPDX-License-Identifier: Apache-2.0
"""Python values as tagged JSON, which keeps what plain JSON loses: tuples, sets,
keys that are no strings, bytes, every bit of every float, integers of any size.

Nothing is pickled, and reading runs nothing. What has no form here is refused
with the path to it. docs/format-shards.md specifies the form.
"""

from __future__ import annotations

import binascii
import collections
import json
import math
import struct
from collections.abc import Callable, Iterable
from typing import Any

from lastgood import dtypes
from lastgood.errors import FormatError, UnsupportedError

_PLAIN = 2**53
_QUIET_NAN = 0x7FF8000000000000
_FACTORIES: dict[Any, Any] = {
    "int": int,
    "float": float,
    "list": list,
    "dict": dict,
    "set": set,
    "str": str,
    None: None,
}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_NUMPY_SCALARS = ("|b1", "|i1", "|u1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8", "<c8", "<c16")


class Tensor:
    """A reference to a tensor of the same checkpoint, by its name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and self.name == other.name

    def __hash__(self) -> int:
        return hash((Tensor, self.name))

    def __repr__(self) -> str:
        return f"Tensor({self.name!r})"


class Foreign:
    """A value of a package that is not installed here: a NumPy scalar, a torch dtype or device. Written again it is
    what it was."""

    __slots__ = ("content", "tag")

    def __init__(self, tag: str, content: Any) -> None:
        self.tag = tag
        self.content = content

    def _text(self) -> str:
        return json.dumps({self.tag: self.content}, ensure_ascii=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Foreign) and self._text() == other._text()

    def __hash__(self) -> int:
        return hash(self._text())

    def __repr__(self) -> str:
        return f"Foreign({self._text()})"


def encode(value: Any, what: str = "value") -> str:
    """The JSON text of a value.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, OrderedDict, Counter,
            defaultdict of a builtin type, deque, NumPy scalars, torch.dtype, torch.device, :class:`Tensor`, and these
            inside each other. Two equal sets have the same text.
        what: begins the path in messages.

    Raises:
        UnsupportedError: something has no form; the message leads to it.
    """
    try:
        return _text(value, what)
    except RecursionError:
        raise UnsupportedError(f"{what}: values nest without end, or more than a thousand deep") from None


def decode(text: str | bytes) -> Any:
    """The value that :func:`encode` was given.

    Raises:
        FormatError: the text is something else.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as why:
        raise FormatError(f"tagged JSON: {why}") from why


# --------------------------------------------------------------------- writing


def _refuse(value: Any, path: str, why: str = "") -> UnsupportedError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return UnsupportedError(f"{path}: {why or f'{kind} has no form in a checkpoint; save what it is made of'}")


def _string(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as why:
        raise _refuse(value, path, f"the string has a lone surrogate at {why.start}") from None
    return json.dumps(value, ensure_ascii=False)


def _float(value: float) -> str:
    if math.isfinite(value) and not (value == 0 and math.copysign(1, value) < 0):
        text = repr(value)
        return text if "." in text or "e" in text else text + ".0"
    if math.isnan(value):
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        name = "nan" if bits == _QUIET_NAN else f"0x{bits:016x}"
    else:
        name = "-0.0" if value == 0 else "inf" if value > 0 else "-inf"
    return f'{{"$float": "{name}"}}'


def _int(value: int) -> str:
    if -_PLAIN <= value <= _PLAIN:
        return str(value)
    return f'{{"$int": "{_decimal(value)}"}}'


def _decimal(value: int) -> str:
    """As str, for numbers of any length too, at which Python stops."""
    digits: list[str] = []
    sign, value = ("-", -value) if value < 0 else ("", value)
    while value >= 10**4000:
        value, low = divmod(value, 10**4000)
        digits.append(f"{low:04000}")
    return sign + str(value) + "".join(reversed(digits))


def _list(values: Iterable[Any], path: str) -> str:
    return "[" + ", ".join([_text(v, f"{path}[{i}]") for i, v in enumerate(values)]) + "]"


def _set(values: Iterable[Any], path: str) -> str:
    # In an order of its own, since sets of strings have another one in each
    # process, and ranks must agree.
    return "[" + ", ".join(sorted(_key(v, path) for v in values)) + "]"


def _pairs(value: dict[Any, Any], path: str) -> str:
    pairs = [f"[{_key(k, path)}, {_text(v, f'{path}[{k!r}]')}]" for k, v in value.items()]
    return "[" + ", ".join(pairs) + "]"


def _dict(value: dict[Any, Any], path: str) -> str:
    if all(type(k) is str and not k.startswith("$") and "\0" not in k for k in value):
        members = [f"{_string(k, path)}: {_text(v, f'{path}[{k!r}]')}" for k, v in value.items()]
        return "{" + ", ".join(members) + "}"
    return f'{{"$dict": {_pairs(value, path)}}}'


def _defaultdict(value: collections.defaultdict[Any, Any], path: str) -> str:
    if value.default_factory not in _FACTORY_NAMES:
        names = ", ".join(n for n in _FACTORIES if n)
        raise _refuse(value, path, f"a defaultdict of {value.default_factory!r}; of these it can be: {names}")
    factory = json.dumps(_FACTORY_NAMES[value.default_factory])
    return f'{{"$defaultdict": {{"factory": {factory}, "items": {_pairs(value, path)}}}}}'


def _deque(value: collections.deque[Any], path: str) -> str:
    maxlen = "null" if value.maxlen is None else str(value.maxlen)
    return f'{{"$deque": {{"maxlen": {maxlen}, "items": {_list(value, path)}}}}}'


def _counter(value: collections.Counter[Any], path: str) -> str:
    for key, n in value.items():
        if type(n) not in (int, float):
            raise _refuse(n, f"{path}[{key!r}]")
    return f'{{"$counter": {_pairs(value, path)}}}'


_WRITERS: dict[type, Callable[[Any, str], str]] = {
    type(None): lambda v, p: "null",
    bool: lambda v, p: "true" if v else "false",
    str: _string,
    int: lambda v, p: _int(v),
    float: lambda v, p: _float(v),
    complex: lambda v, p: f'{{"$complex": [{_float(v.real)}, {_float(v.imag)}]}}',
    bytes: lambda v, p: f'{{"$bytes": "{binascii.b2a_base64(v, newline=False).decode()}"}}',
    list: _list,
    dict: _dict,
    tuple: lambda v, p: f'{{"$tuple": {_list(v, p)}}}',
    set: lambda v, p: f'{{"$set": {_set(v, p)}}}',
    frozenset: lambda v, p: f'{{"$frozenset": {_set(v, p)}}}',
    collections.OrderedDict: lambda v, p: f'{{"$ordered": {_pairs(v, p)}}}',
    collections.Counter: _counter,
    collections.defaultdict: _defaultdict,
    collections.deque: _deque,
    Tensor: lambda v, p: f'{{"$tensor": {_string(v.name, p)}}}',
    Foreign: lambda v, p: v._text(),
}


def _text(value: Any, path: str) -> str:
    writer = _WRITERS.get(type(value))
    if writer is not None:
        return writer(value, path)
    numpy = dtypes.imported("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        dtype = value.dtype.newbyteorder("<")
        if dtype.str not in _NUMPY_SCALARS:
            raise _refuse(value, path, f"a NumPy scalar of dtype {dtype} has no form in a checkpoint")
        return f'{{"$numpy": {{"dtype": "{dtype.str}", "hex": "{value.astype(dtype).tobytes().hex()}"}}}}'
    torch = dtypes.imported("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return f'{{"$dtype": "{value}"}}'
    if torch is not None and isinstance(value, torch.device):
        return f'{{"$device": "{value}"}}'
    raise _refuse(value, path)


_KEYS = (type(None), bool, int, float, str, bytes, complex, Foreign)


def _key(value: Any, path: str) -> str:
    """What Python can hash and tagged JSON compare."""
    if type(value) is tuple:
        return '{"$tuple": [' + ", ".join([_key(v, path) for v in value]) + "]}"
    numpy, torch = dtypes.imported("numpy"), dtypes.imported("torch")
    known = (
        type(value) in _KEYS
        or type(value) is frozenset
        or (numpy is not None and isinstance(value, numpy.generic))
        or (torch is not None and isinstance(value, (torch.dtype, torch.device)))
    )
    if not known:
        raise _refuse(value, f"{path}: key {value!r}")
    return _text(value, f"{path}: key {value!r}")


# --------------------------------------------------------------------- reading


def _no_constant(text: str) -> Any:
    raise FormatError(f"tagged JSON: {text} is no number of JSON")


def _read_float(text: str) -> float:
    if text.startswith("0x"):
        return float(struct.unpack("<d", struct.pack("<Q", int(text, 16)))[0])
    return float(text)


def _read_int(text: str) -> int:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    value = 0
    for at in range(0, len(digits), 4000):
        part = digits[at : at + 4000]
        value = value * 10 ** len(part) + int(part)
    return sign * value


def _read_numpy(content: dict[str, str]) -> Any:
    dtype, data = _checked_text(content["dtype"]), bytes.fromhex(content["hex"])
    try:
        import numpy as np
    except ImportError:
        return Foreign("$numpy", content)
    return np.frombuffer(data, dtype=dtype)[0]


def _checked_text(content: Any) -> str:
    """What is no text is refused whether or not the package is there that reads it."""
    if not isinstance(content, str):
        raise TypeError(f"{content!r} is no text")
    return content


def _read_torch(tag: str) -> Callable[[str], Any]:
    def read(content: str) -> Any:
        _checked_text(content)
        try:
            import torch
        except ImportError:
            return Foreign(tag, content)
        if tag == "$device":
            return torch.device(content)
        found = vars(torch).get(content.removeprefix("torch."))  # getattr might import
        if not isinstance(found, torch.dtype):
            return Foreign(tag, content)
        return found

    return read


def _read_defaultdict(content: dict[str, Any]) -> Any:
    return collections.defaultdict(_FACTORIES[content["factory"]], [(k, v) for k, v in content["items"]])


def _read_counter(content: list[Any]) -> Any:
    counter: collections.Counter[Any] = collections.Counter()
    counter.update(dict(content))
    return counter


_READERS: dict[str, Callable[[Any], Any]] = {
    "$int": _read_int,
    "$float": _read_float,
    "$bytes": binascii.a2b_base64,
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$ordered": lambda c: collections.OrderedDict([(k, v) for k, v in c]),
    "$counter": _read_counter,
    "$defaultdict": _read_defaultdict,
    "$deque": lambda c: collections.deque(c["items"], c["maxlen"]),
    "$complex": lambda c: complex(c[0], c[1]),
    "$numpy": _read_numpy,
    "$dtype": _read_torch("$dtype"),
    "$device": _read_torch("$device"),
    "$tensor": Tensor,
}


def _object(members: list[tuple[str, Any]]) -> Any:
    """One JSON object, members first: a tag or a dict."""
    if len(members) == 1 and members[0][0].startswith("$"):
        tag, content = members[0]
        reader = _READERS.get(tag)
        if reader is None:
            raise FormatError(f"tagged JSON: unknown tag {tag!r}")
        try:
            return reader(content)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RuntimeError) as why:
            raise FormatError(f"tagged JSON: {tag}: {why}") from why
    found = dict(members)
    if len(found) != len(members):
        raise FormatError("tagged JSON: a member is there twice")
    return found
