# SPDX-License-Identifier: Apache-2.0
"""Arrays and nested state to a checkpoint and back, each in one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lastgood import arrays, dtypes, tagged, trees
from lastgood.arrays import Framework
from lastgood.checkpoint import Checkpoint, StoredTensor
from lastgood.device import in_host_memory
from lastgood.errors import InvalidError, MismatchError, MissingError, NoGoodCheckpoint, UnsupportedError
from lastgood.load import Load
from lastgood.safetensors_file import FileTensor, SafetensorsFile
from lastgood.saving import SaveInfo
from lastgood.session import Session

Path = str | os.PathLike[str]
Rename = Callable[[str], str | None] | Mapping[str, str | None]

# Key of the global state under which the structure of a saved tree lies.
TREE = "tree"

# How much is converted at once.
_CAST_BYTES = 16 << 20


def save(
    root: Path,
    tree: Any,
    *,
    step: int = 0,
    attach: Mapping[str, bytes] | None = None,
    finite: bool = False,
    take_over: bool = False,
) -> SaveInfo:
    """Writes one checkpoint from one process, and returns once it is durable.

    Args:
        root: folder that holds the checkpoints, made if its parent exists. One that holds some already gets another.
        tree: NumPy and JAX arrays and torch tensors in dicts, lists and tuples, with numbers, strings and the like
            among them; or a torch module. Arrays get dotted names, ``{"a": [x]}`` is ``a.0``. One object that occurs
            twice is stored as tied.
        step: completed optimizer steps.
        attach: files to lie in the step folder as they are.
        finite: refuse NaN and infinity.
        take_over: save into the root of a training run too, whose sessions then fail their next save.

    Raises:
        ProtectedError: the root is that of a training run.
        UnsupportedError: something in the tree has no form in a checkpoint; nothing is pickled, ever.
    """
    flat = trees.Flat(tree)
    skeleton = None if flat.plain else tagged.encode(flat.skeleton, "tree")
    with _opened(root, take_over) as session:
        saving = session.save(step, finite=finite)
        saving.tensors(flat.tensors)
        for alias, name in flat.aliases.items():
            saving.alias(alias, name)
        if skeleton is not None:
            saving.state_text(TREE, skeleton)
        for name, data in (attach or {}).items():
            saving.attach(name, data)
        return saving.commit()


def _opened(root: Path, take_over: bool) -> Session:
    """A session that goes on with the run that the root holds, if any of its checkpoints is good."""
    session = Session(root, plain=True, take_over=take_over)
    try:
        session.resume()
        return session
    except NoGoodCheckpoint:
        session.close()
        return Session(root, plain=True, new_run=True)
    except BaseException:
        session.close()
        raise


def load(where: Path, *, framework: Framework = "numpy", like: Any = None) -> Any:
    """Reads a whole checkpoint, verified, into new arrays.

    Args:
        where: a root (its newest good checkpoint), a step folder, ``ROOT@STEP`` or ``ROOT@gEPOCH.SERIAL``.
        framework: ``"numpy"``, ``"torch"`` (in host memory) or ``"jax"``. Without ml_dtypes, bfloat16 and the 8-bit
            floats come as unsigned integers whose ``dtype.metadata["lastgood"]`` names what they are.
        like: a tree like the one that was saved, whose structure (named tuples too) and arrays' frameworks the result
            takes; what else is in it stays what it is.

    Returns:
        The tree that :func:`save` was given; for other checkpoints a dict of arrays by name.
    """
    with Checkpoint(where, framework) as checkpoint:
        if like is not None:
            return _load_like(checkpoint, like)
        found = checkpoint.read()
        if TREE not in checkpoint.state:
            return found
        return trees.resolved(checkpoint.state[TREE], found)


def open(where: Path, *, framework: Framework = "numpy") -> Checkpoint:
    """Opens a checkpoint; its tensors are read when they are indexed, and no more of them than that::

        with lastgood.open("runs/a") as checkpoint:
            rows = checkpoint["h.0.weight"][16:32]

    Args:
        where: a root (its newest good checkpoint), a step folder, ``ROOT@STEP`` or ``ROOT@gEPOCH.SERIAL``.
        framework: ``"numpy"``, ``"torch"`` or ``"jax"``.
    """
    return Checkpoint(where, framework)


def _framework_of(value: Any) -> Framework:
    torch, jax = dtypes.imported("torch"), dtypes.imported("jax")
    if torch is not None and isinstance(value, torch.Tensor):
        return "torch"
    return "jax" if jax is not None and isinstance(value, jax.Array) else "numpy"


def _load_like(checkpoint: Checkpoint, like: Any) -> Any:
    if isinstance(like, arrays.RawArray) or (not isinstance(like, (dict, list, tuple)) and not trees.is_module(like)):
        raise InvalidError(f"like is a tree of arrays or a module, not {type(like).__name__}")
    load = Load(checkpoint)
    made: dict[str, tuple[Any, Framework, Any]] = {}
    for name, value in trees.leaves(like):
        framework = _framework_of(value)
        tensor = checkpoint[name]
        wanted = _form_of(name, value)
        if wanted != (tensor.number, tensor.shape):
            raise MismatchError(
                f'"{name}": the tree has {arrays.form(*wanted)}, the checkpoint {arrays.form(tensor.number, tensor.shape)}'
            )
        array, memory = arrays.allocate(tensor.number, tensor.shape, framework)
        load.add(name, memory)
        made[name] = (array, framework, value)
    load.run()
    return trees.replaced(like, {name: _placed(*item) for name, item in made.items()})


def _placed(array: Any, framework: Framework, like: Any) -> Any:
    """On the device of the array that it is like."""
    if framework == "torch" and not isinstance(array, arrays.RawArray):
        return array if like.is_cpu else array.to(like.device)
    if framework == "jax":
        import jax

        return jax.device_put(arrays.finish(array, framework), like.sharding)
    return array


def _form_of(name: str, value: Any) -> tuple[int, tuple[int, ...]]:
    """Dtype and shape, of arrays without data too."""
    torch = dtypes.imported("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        number = dtypes.from_torch().get(value.dtype)
        if number is None:
            raise UnsupportedError(f'"{name}": safetensors has no dtype for {value.dtype}')
        shape = tuple(value.shape)
        return number, (*shape[:-1], 2 * shape[-1]) if number == dtypes.F4 and shape else shape
    memory = arrays.describe(name, value)
    return memory.dtype, tuple(memory.shape)


# ------------------------------------------------------------------ warm starts


class Mismatch(NamedTuple):
    """A tensor that is there in another form."""

    name: str
    wanted: str  # "F32 [2, 3]"
    stored: str


class Loaded(NamedTuple):
    """What :func:`load_into` did, and what it did not."""

    loaded: tuple[str, ...]  # names in the model
    cast: tuple[str, ...]  # those of them that were converted
    missing: tuple[str, ...]  # in the model, not in the source: left as they were
    unused: tuple[str, ...]  # in the source, not in the model
    mismatched: tuple[Mismatch, ...]  # of another shape, or dtype: left as they were


def _renamed(source: Mapping[str, Any], rename: Rename | None) -> dict[str, str]:
    """Names in the source, by names in the model."""
    found: dict[str, str] = {}
    for name in source:
        if rename is None:
            new: str | None = name
        elif callable(rename):
            new = rename(name)
        else:
            new = rename.get(name, name)
        if new is None:
            continue
        if new in found:
            raise InvalidError(f'rename makes "{new}" of both "{found[new]}" and "{name}"')
        found[new] = name
    return found


def _place(value: Any) -> Any:
    """Equal for arrays that are the same elements of the same memory; None where there are none."""
    torch = dtypes.imported("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        where = (value.device, value.dtype, value.shape, value.stride(), value.data_ptr())
        return where if value.numel() else None
    memory = arrays.describe("", value)
    return memory[:4] if 0 not in memory.shape else None


class _Plan:
    """Which tensor of the source goes to which of the model."""

    def __init__(self, model: Any, source: Checkpoint | SafetensorsFile, rename: Rename | None, cast: bool) -> None:
        self.source = source
        self.targets: dict[str, Any] = dict(trees.leaves(model))
        self.names = _renamed(source, rename)
        self.direct: list[str] = []
        self.converted: list[str] = []
        self.missing: list[str] = []
        self.mismatched: list[Mismatch] = []
        self.ties: list[tuple[str, str]] = []  # two of the model that are the same memory
        first: dict[Any, str] = {}
        absent: list[tuple[str, Any]] = []
        for target, array in self.targets.items():
            place = _place(array)
            if target not in self.names:
                absent.append((target, place))
                continue
            stored = source[self.names[target]]
            wanted = _form_of(target, array)
            if wanted != (stored.number, stored.shape):
                if cast and wanted[1] == stored.shape and dtypes.converts(stored.number, wanted[0]):
                    self.converted.append(target)
                    first.setdefault(place, target)
                    continue
                forms = arrays.form(*wanted), arrays.form(stored.number, stored.shape)
                self.mismatched.append(Mismatch(target, *forms))
                continue
            if place is not None and place in first:
                self.ties.append((first[place], target))
            else:
                first[place] = target
                self.direct.append(target)
        # A tied tensor is often stored under one of its names only.
        self.missing = [target for target, place in absent if place is None or place not in first]
        used = {self.names[t] for t in self.targets if t in self.names}
        self.unused = [n for n in source if n not in used]

    def check_strict(self) -> None:
        """Raises if something of the model would stay, or of the source's model be left over."""
        wanted = set(self.names.values())
        over = [n for n in self.unused if n in wanted and self.source[n].group == "model"]
        if self.missing or over:
            parts = []
            if self.missing:
                parts.append(f"the source lacks {_some(self.missing)}")
            if over:
                parts.append(f"the model has no {_some(over)}")
            raise MissingError("; ".join(parts))
        if self.mismatched:
            m = self.mismatched[0]
            more = f" ({len(self.mismatched) - 1} more differ)" if len(self.mismatched) > 1 else ""
            raise MismatchError(f'"{m.name}": the model has {m.wanted}, the source {m.stored}{more}')

    def check_ties(self) -> None:
        """Raises if what the model ties is stored as two different tensors."""
        for one, other in self.ties:
            a, b = self.source[self.names[one]], self.source[self.names[other]]
            if (a.alias_of or a.name) != (b.alias_of or b.name) and _packed(a) != _packed(b):
                raise MismatchError(f'the model ties "{one}" and "{other}", which differ in the source')

    def read(self) -> None:
        """Reads what needs no conversion straight into the model, then the rest block by block."""
        if isinstance(self.source, Checkpoint):
            load = Load(self.source)
            for target in self.direct:
                load.add(self.names[target], load.memory(target, self.targets[target]))
            load.run()
        else:
            for target in self.direct:
                _read_file(self.source[self.names[target]], target, self.targets[target])
        for target in self.converted:
            _convert(target, self.source[self.names[target]], self.targets[target])


def _some(names: list[str]) -> str:
    shown = ", ".join(f'"{n}"' for n in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _packed(stored: StoredTensor | FileTensor) -> Any:
    """Bytes of a whole tensor, in a buffer that compares by contents."""
    raw, memory = arrays.allocate_raw(stored.number, stored.shape)
    stored.read_packed(memory)
    return raw.data


def _read_file(stored: Any, name: str, array: Any) -> None:
    torch = dtypes.imported("torch")
    if torch is None or not isinstance(array, torch.Tensor) or in_host_memory(array):
        memory = arrays.describe(name, array, to_write=True)
        if memory.strides is None:
            stored.read_packed(memory)
            return
    _copy(array, stored.read(framework=_framework_of(array)))


def _copy(target: Any, values: Any) -> None:
    if _framework_of(target) == "torch":
        with dtypes.imported("torch").no_grad():
            target.copy_(values)
        return
    import numpy as np

    np.copyto(target, values, casting="unsafe")


def _convert(name: str, stored: StoredTensor | FileTensor, target: Any) -> None:
    """Reads and converts, in blocks of rows where the source can."""
    framework = _framework_of(target)
    if framework == "numpy":
        for dtype in (dtypes.numpy_dtypes()[stored.number], target.dtype):
            if dtype.metadata is not None:
                raise UnsupportedError(f'"{name}": converting {stored.dtype} in NumPy needs the package ml_dtypes')
    if not stored.shape or isinstance(stored, FileTensor) or stored.nbytes <= _CAST_BYTES:
        _copy(target, stored.read(framework=framework))
        return
    rows = max(1, _CAST_BYTES * stored.shape[0] // stored.nbytes)
    for begin in range(0, stored.shape[0], rows):
        _copy(target[begin : begin + rows], stored.read(slice(begin, begin + rows), framework=framework))


def load_into(
    model: Any,
    src: Path | Checkpoint | SafetensorsFile,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    cast: bool = False,
) -> Loaded:
    """Reads tensors into the memory of a model, for a warm start from another run or from published weights.

    Args:
        model: a torch module, or a tree of NumPy arrays and torch tensors.
        src: whatever :func:`open` takes, a ``.safetensors`` file, or one of both that is open.
        strict: every tensor of the model is loaded, and every one of the source's group ``model`` that ``rename``
            keeps is used; or nothing is loaded and it is an error. Otherwise the result says what was not.
        rename: from a name in the source to the name in the model, None for what is not wanted; a function, or a
            mapping in which all others keep their names.
        cast: convert between floats, and to wider integers. Otherwise another dtype is a mismatch.

    Raises:
        MissingError, MismatchError: with ``strict``. Nothing was changed.
        CorruptError: stored bytes are damaged. What is in the model then is undefined.
    """
    if not isinstance(src, (Checkpoint, SafetensorsFile)):
        alone = os.fspath(src).endswith(".safetensors") and os.path.isfile(src)
        with SafetensorsFile(src) if alone else Checkpoint(src) as opened:
            return load_into(model, opened, strict=strict, rename=rename, cast=cast)
    if not (rename is None or callable(rename) or isinstance(rename, Mapping)):
        raise InvalidError(f"rename is {rename!r}, no function and no mapping")
    plan = _Plan(model, src, rename, cast)
    if not plan.targets and not isinstance(model, Mapping) and not hasattr(model, "state_dict"):
        raise InvalidError(f"model is a {type(model).__name__}, neither a torch module nor a tree of arrays")
    if strict:
        plan.check_strict()
    plan.check_ties()
    plan.read()
    tied = [other for _, other in plan.ties]
    return Loaded(
        (*plan.direct, *plan.converted, *tied),
        tuple(plan.converted),
        tuple(plan.missing),
        tuple(plan.unused),
        tuple(plan.mismatched),
    )
