# SPDX-License-Identifier: Apache-2.0
"""Random generators as a part of a training state: Python's, NumPy's, torch's on the host and on each device, and
those that the trainer names. Each is a *stream* of its own, saved by each rank, so that one that cannot be restored
hides none of the others.

docs/data.md says what is restored when.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import logging
import math
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lastgood import dtypes, tagged
from lastgood._core import ffi
from lastgood.errors import FormatError, InvalidError, MismatchError, MissingError
from lastgood.parts import Part, Ranks, Restoring, Saving
from lastgood.sampler import philox4x32

__all__ = ["RandomPart", "derived_words"]

_log = logging.getLogger("lastgood")

# Keeps the bits of derived streams apart from all others that are drawn with the same seed.
_KEY_TAG = int.from_bytes(b"lg-deriv", "big")
_LOW = 2**32 - 1
# Words of Python's and NumPy's Mersenne twister, and the position among them.
_TWISTER_WORDS = 625

Words = tuple[int, int, int, int]


def derived_words(seed: int, generation: tuple[int, int], stream: str, data_rank: int) -> Words:
    """128 bits that seed a stream which cannot be restored: a function of run, generation, stream and place among the
    ranks that take different samples. Ranks of one tensor-parallel group get equal ones.

    Args:
        seed: of the run, 64 bits.
        generation: owner epoch and serial of the checkpoint.
        stream: its name.
        data_rank: :attr:`lastgood.parts.Ranks.data_rank`.
    """
    epoch, serial = generation
    words = philox4x32((epoch & _LOW, epoch >> 32 & _LOW, serial & _LOW, serial >> 32 & _LOW), _u64(seed) ^ _KEY_TAG)
    name = zlib.crc32(stream.encode())
    return philox4x32((name, data_rank & _LOW, words[2], words[3]), words[0] | words[1] << 32)


def _u64(value: int) -> int:
    return value & (2**64 - 1)


# --------------------------------------------------------------------- streams


class _Stream(abc.ABC):
    """A random generator."""

    @abc.abstractmethod
    def take(self) -> bytes:
        """Its state."""

    @abc.abstractmethod
    def prepared(self, data: bytes) -> Callable[[], Any]:
        """What puts a state back. Nothing changes before that is called.

        Raises:
            Exception: the bytes are no state of such a generator; any kind, with the reason as its text.
        """

    @abc.abstractmethod
    def seed(self, words: Words) -> None:
        """Begins anew."""


class _Python(_Stream):
    """Python's: the module itself, or a generator of one's own."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def take(self) -> bytes:
        version, words, gauss = self._generator.getstate()
        packed = struct.pack(f"<{len(words)}I", *words)
        return tagged.encode({"version": version, "words": packed, "gauss": gauss}).encode()

    def prepared(self, data: bytes) -> Callable[[], Any]:
        found = tagged.decode(data)
        words = found["words"]
        if len(words) != 4 * _TWISTER_WORDS:
            raise ValueError(f"{len(words)} bytes of state instead of {4 * _TWISTER_WORDS}")
        state = (found["version"], struct.unpack(f"<{_TWISTER_WORDS}I", words), found["gauss"])
        random.Random().setstate(state)
        return lambda: self._generator.setstate(state)

    def seed(self, words: Words) -> None:
        self._generator.seed(_joined(words))


def _joined(words: Words) -> int:
    return words[0] | words[1] << 32 | words[2] << 64 | words[3] << 96


class _Numpy(_Stream):
    """One of NumPy's whose state is a dict. The arrays in it are kept as dtype and bytes."""

    def take(self) -> bytes:
        return tagged.encode(_without_arrays(self._get())).encode()

    def prepared(self, data: bytes) -> Callable[[], Any]:
        state = _with_arrays(tagged.decode(data))
        kind, own = state["bit_generator"], self._get()["bit_generator"]
        if kind != own:
            raise ValueError(f"the state of a {kind}; here is a {own}")
        self._try(state)
        return lambda: self._set(state)

    @abc.abstractmethod
    def _get(self) -> Any: ...

    @abc.abstractmethod
    def _set(self, state: Any) -> None: ...

    @abc.abstractmethod
    def _try(self, state: Any) -> None:
        """Raises if the state is none of this kind."""


class _NumpyLegacy(_Numpy):
    """The functions of ``numpy.random``, or a RandomState."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def _get(self) -> Any:
        return self._generator.get_state(legacy=False)

    def _set(self, state: Any) -> None:
        self._generator.set_state(state)

    def _try(self, state: Any) -> None:
        import numpy as np

        np.random.RandomState(getattr(np.random, state["bit_generator"])()).set_state(state)

    def seed(self, words: Words) -> None:
        import numpy as np

        kind = self._get()["bit_generator"]
        fresh = np.random.RandomState(getattr(np.random, kind)(list(words)))
        self._generator.set_state(fresh.get_state(legacy=False))


class _NumpyGenerator(_Numpy):
    """A ``numpy.random.Generator``."""

    def __init__(self, generator: Any) -> None:
        self._bits = generator.bit_generator

    def _get(self) -> Any:
        return self._bits.state

    def _set(self, state: Any) -> None:
        self._bits.state = state

    def _try(self, state: Any) -> None:
        type(self._bits)().state = state

    def seed(self, words: Words) -> None:
        self._bits.state = type(self._bits)(list(words)).state


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_arrays(v) for k, v in value.items()}
    if hasattr(value, "tobytes") and hasattr(value, "shape") and value.shape:
        return (value.dtype.newbyteorder("<").str, value.astype(value.dtype.newbyteorder("<")).tobytes())
    return value


def _with_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _with_arrays(v) for k, v in value.items()}
    if isinstance(value, tuple):
        import numpy as np

        dtype, data = value
        return np.frombuffer(data, dtype=dtype).copy()
    return value


class _Torch(_Stream):
    """A torch.Generator: torch's own of the host, or one of the trainer's on any device."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def take(self) -> bytes:
        return _bytes(self._generator.get_state())

    def prepared(self, data: bytes) -> Callable[[], Any]:
        import torch

        state = _tensor(data, self._generator.get_state().numel())
        torch.Generator(device=self._generator.device).set_state(state)
        return lambda: self._generator.set_state(state)

    def seed(self, words: Words) -> None:
        self._generator.manual_seed(words[0] | words[1] << 32)


class _Device(_Stream):
    """The default generator of a device.

    Args:
        module: ``torch.cuda`` or one like it.
        index: which device of it; None: there is one.
    """

    def __init__(self, module: Any, index: int | None) -> None:
        self._module = module
        self._index = () if index is None else (index,)

    def take(self) -> bytes:
        return _bytes(self._module.get_rng_state(*self._index))

    def prepared(self, data: bytes) -> Callable[[], Any]:
        state = _tensor(data, self._module.get_rng_state(*self._index).numel())
        return lambda: self._module.set_rng_state(state, *self._index)

    def seed(self, words: Words) -> None:
        seed = words[0] | words[1] << 32
        if not self._index:
            self._module.manual_seed(seed)
            return
        with self._module.device(*self._index):
            self._module.manual_seed(seed)


def _bytes(state: Any) -> bytes:
    state = state.cpu().contiguous()
    return bytes(ffi.buffer(ffi.cast("char *", state.data_ptr()), state.numel()))


def _tensor(data: bytes, size: int) -> Any:
    import torch

    if len(data) != size:
        raise ValueError(f"{len(data)} bytes of state instead of {size}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _devices(torch: Any) -> dict[str, _Stream]:
    """Default generators of the devices that this process uses. The current device comes first, so that a rank finds
    its stream again whatever number its device has the next time.
    """
    found: dict[str, _Stream] = {}
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is None or not module.is_available() or not module.is_initialized():
            continue
        current, count = module.current_device(), module.device_count()
        others = [i for i in range(count) if i != current and _in_use(torch, kind, i)]
        for n, index in enumerate([current, *others]):
            found[f"torch.{kind}.{n}"] = _Device(module, index)
    mps = getattr(torch.backends, "mps", None)
    if mps is not None and mps.is_available():
        found["torch.mps"] = _Device(torch.mps, None)
    return found


def _in_use(torch: Any, kind: str, index: int) -> bool:
    """Whether the process has a context there. Asking must not make one."""
    if kind == "cuda" and hasattr(torch._C, "_cuda_hasPrimaryContext"):
        return bool(torch._C._cuda_hasPrimaryContext(index))
    return False


def _named(name: str, generator: Any) -> _Stream:
    """The stream of one that the trainer names."""
    torch, numpy = dtypes.imported("torch"), dtypes.imported("numpy")
    if torch is not None and isinstance(generator, torch.Generator):
        return _Torch(generator)
    if numpy is not None and isinstance(generator, numpy.random.Generator):
        return _NumpyGenerator(generator)
    if numpy is not None and isinstance(generator, numpy.random.RandomState):
        return _NumpyLegacy(generator)
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return _Python(generator)
    kind = f"{type(generator).__module__}.{type(generator).__qualname__}"
    raise InvalidError(
        f'generator "{name}": {kind} is none that can be saved; give a torch.Generator, numpy.random.Generator, '
        "numpy.random.RandomState or random.Random"
    )


# ------------------------------------------------------------------------ part


class _Found(NamedTuple):
    """What a checkpoint has."""

    mesh: str  # on which it was saved, in words
    derive: bool  # that is another one
    ready: dict[str, Callable[[], Any]]  # puts a stream back
    reasons: dict[str, str]  # why a stream cannot be put back
    missing: bool  # one of them because the checkpoint lacks it


class RandomPart(Part):
    """The random generators of a training state. Its restore must be the last act before training goes on, since what
    runs in between may draw from them; :class:`lastgood.State` sees to it.

    On the same mesh (sizes of its axes, and which of them take different samples) every stream goes on exactly where
    it was. On another one streams cannot go on: each is derived anew by Philox from run, generation and data-parallel
    coordinate, and a note says so.

    Args:
        generators: further ones, by name: ``torch.Generator``, ``numpy.random.Generator``,
            ``numpy.random.RandomState``, ``random.Random``. Python's, NumPy's (once imported), torch's own on the host
            and on each device that is in use are there anyway.
        key: what its names in the checkpoint begin with.
    """

    def __init__(self, generators: Mapping[str, Any] | None = None, *, key: str = "random") -> None:
        self.key = key
        self._own = {f"generator.{name}": _named(name, g) for name, g in (generators or {}).items()}
        self._found: _Found | None = None

    def __repr__(self) -> str:
        return f"<RandomPart {', '.join(self._streams())}>"

    def lastgood_part(self, key: str) -> RandomPart:
        """Itself, under the key that it has in the state."""
        self.key = key
        return self

    def _streams(self, wanted: tuple[str, ...] = ()) -> dict[str, _Stream]:
        """Those that are there; of the optional packages also those of ``wanted``."""
        found: dict[str, _Stream] = {"python": _Python(random)}
        if "numpy" in wanted:
            with contextlib.suppress(ImportError):
                importlib.import_module("numpy")
        numpy, torch = dtypes.imported("numpy"), dtypes.imported("torch")
        if numpy is not None:
            found["numpy"] = _NumpyLegacy(numpy.random)
        if torch is not None:
            found["torch.cpu"] = _Torch(torch.default_generator)
            found.update(_devices(torch))
        return found | self._own

    def save(self, to: Saving) -> None:
        """Adds every stream of this rank, and its place in the mesh."""
        streams = self._streams()
        to.save.state(f"{self.key}.mesh", _mesh(to.ranks))
        to.save.rank_state(f"{self.key}.streams", {"at": _coordinate(to.ranks), "names": list(streams)})
        for name, stream in streams.items():
            to.save.rank_bytes(f"{self.key}.{name}", stream.take())

    def describe(self, of: Restoring) -> None:
        """Reads all streams and checks them; none changes.

        Raises:
            MissingError, MismatchError: in exact mode, on the same mesh: a stream is missing, or none of its kind.
        """
        self._found = found = self._read(of)
        reasons = {n: r for n, r in found.reasons.items() if not of.may_lack(f"{self.key}.{n}")}
        if of.exact and reasons:
            parts = "; ".join(f'"{name}" {reason}' for name, reason in reasons.items())
            kind = MissingError if found.missing else MismatchError
            raise kind(
                f'random streams under "{self.key}" cannot be restored: {parts}; '
                f'to derive them anew: resume(state, optional=["{self.key}"]), or '
                "Checkpointer(exact=False) for whatever is lacking"
            )

    def _read(self, of: Restoring) -> _Found:
        checkpoint, world = of.checkpoint, of.ranks.world
        try:
            mesh = checkpoint.state[f"{self.key}.mesh"]
        except MissingError:
            reason = f"is missing: step {checkpoint.step} was saved without random streams"
            return _Found("", False, {}, dict.fromkeys(self._streams(), reason), True)
        words = _in_words(mesh, checkpoint.world)
        if checkpoint.world != world or not _same_mesh(mesh, _mesh(of.ranks)):
            return _Found(words, True, {}, {}, False)
        rank, names, reason = self._place(of)
        if reason:
            return _Found(words, False, {}, dict.fromkeys(self._streams(), reason), True)
        ready: dict[str, Callable[[], Any]] = {}
        reasons: dict[str, str] = {}
        missing = False
        streams = self._streams(names)
        for name in dict.fromkeys([*streams, *names]):
            if name not in names and name not in self._own:
                continue  # a package or a device that was not in use then
            try:
                if name not in names:
                    raise MissingError(name)
                data = checkpoint.rank_bytes(f"{self.key}.{name}", rank, world)
            except MissingError:
                reasons[name] = f"is missing in what rank {rank} saved at step {checkpoint.step}"
                missing = True
                continue
            if name not in streams:
                reasons[name] = _absent(name)
                continue
            try:
                ready[name] = streams[name].prepared(data)
            except Exception as why:  # whatever a generator says of bytes that are not its own
                reasons[name] = f"of rank {rank} is damaged or of another kind: {type(why).__name__}: {why}"
        return _Found(words, False, ready, reasons, missing)

    def _place(self, of: Restoring) -> tuple[int, tuple[str, ...], str]:
        """Which rank saved from this rank's place in the mesh, the names of its streams, or why nobody knows."""
        key, own = f"{self.key}.streams", _coordinate(of.ranks)
        for rank in [of.ranks.rank, *(r for r in range(of.checkpoint.world) if r != of.ranks.rank)]:
            try:
                data = of.checkpoint.rank_bytes(key, rank, of.ranks.world)
            except MissingError:
                return rank, (), f"is missing: rank {rank} saved none"
            try:
                found = tagged.decode(data)
                at, names = tuple(found["at"]), tuple(found["names"])
            except (FormatError, TypeError, KeyError) as why:
                return rank, (), f"is missing: the list of rank {rank} is damaged ({why})"
            if at == own:
                return rank, names, ""
        return 0, (), f"is missing: no rank saved from {list(own)} of the mesh"

    def restore(self, of: Restoring) -> None:
        """Puts every stream back, or derives it. Nothing that may draw should run afterwards."""
        found, self._found = self._found, None
        if found is None:
            raise InvalidError("the random streams were not read; describe comes before restore")
        derive = self._streams() if found.derive else {n: s for n, s in self._streams().items() if n in found.reasons}
        generation = of.checkpoint.generation
        for name, stream in derive.items():
            stream.seed(derived_words(of.seed, generation, name, of.ranks.data_rank))
        if found.derive:
            now = _in_words(_mesh(of.ranks), of.ranks.world)
            of.notes.append(
                f"random streams {', '.join(derive)}: derived anew from run and generation, "
                f"since they were saved on {found.mesh} and this is {now}"
            )
        for name, reason in found.reasons.items():
            what = "derived anew from run and generation" if name in derive else "not restored"
            note = f'random stream "{self.key}.{name}" {reason}; {what}'
            of.notes.append(note)
            _log.warning("%s", note)
        for put_back in found.ready.values():
            put_back()


def _absent(name: str) -> str:
    if name.startswith("generator."):
        short = name.removeprefix("generator.")
        return f'was saved and is not here: give RandomPart(generators={{"{short}": …}})'
    return "was saved and is not here: there is no such package or device in this process"


def _mesh(ranks: Ranks) -> list[list[Any]]:
    return [[axis.name, axis.size, axis.name in ranks.data] for axis in ranks.mesh]


def _coordinate(ranks: Ranks) -> tuple[int, ...]:
    """Along the axes of more than one rank; where the mesh does not tell ranks apart, the rank."""
    if math.prod(axis.size for axis in ranks.mesh) != ranks.world:
        return (ranks.rank,)
    return tuple(axis.coordinate for axis in ranks.mesh if axis.size > 1)


def _same_mesh(one: Any, other: Any) -> bool:
    """Whatever the axes are called, and whether those of one rank are named."""
    return [row[1:] for row in one if row[1] > 1] == [row[1:] for row in other if row[1] > 1]


def _in_words(mesh: Any, world: int) -> str:
    axes = " x ".join(f"{name} {size}" for name, size, _ in mesh if size > 1)
    return axes or f"{world} rank{'s' if world != 1 else ''}"
