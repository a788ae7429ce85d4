# SPDX-License-Identifier: Apache-2.0
"""Committed checkpoints, open for reading."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lastgood import arrays, dtypes, regions, tagged
from lastgood._core import ffi, lib
from lastgood.arrays import Framework, Memory
from lastgood.errors import InvalidError, MismatchError, MissingError, StateError, call, text_of
from lastgood.handles import Pointer, path_bytes, taken, text_bytes
from lastgood.load import Load
from lastgood.verify import Progress, Verified, verify

_GROUPS = ("model", "optim", "raw")


class Generation(NamedTuple):
    """Owner epoch and serial: a later one is newer, whatever the steps say."""

    epoch: int
    serial: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.serial}"


class Box(NamedTuple):
    """A box of a tensor as it is stored."""

    rank: int
    offset: tuple[int, ...]  # elements
    size: tuple[int, ...]  # elements


class StoredFile(NamedTuple):
    """A file that the manifest lists."""

    name: str
    nbytes: int
    rank: int | None  # None: attached
    group: str | None  # "model", "optim" or "raw"; None: checksums, or attached
    domain: str  # failure domain of the rank


class StoredTensor:
    """A tensor of a checkpoint that is not read yet. Indexing reads that part and no more::

        rows = checkpoint["h.0.weight"][16:32]

    Attributes:
        name: unique in the checkpoint.
        shape: global, in elements.
        nbytes: of all its elements.
        group: ``"model"`` or ``"optim"``.
        alias_of: name of the tensor it is tied to, or None.
        per_rank: the ranks' copies differ, and each is kept.
        n_boxes: in how many boxes it is stored.
    """

    __slots__ = ("_checkpoint", "alias_of", "group", "n_boxes", "name", "nbytes", "number", "per_rank", "shape")

    def __init__(self, checkpoint: Checkpoint, info: Any) -> None:
        self._checkpoint = checkpoint
        self.number = int(info.dtype)  # the dtype as the library numbers it
        self.name: str = ffi.string(info.name).decode()
        self.shape: tuple[int, ...] = tuple(info.shape[0 : info.ndim]) if info.ndim else ()
        self.nbytes = int(info.bytes)
        self.group = _GROUPS[info.group]
        self.alias_of: str | None = ffi.string(info.alias_of).decode() if info.alias_of else None
        self.per_rank = bool(info.per_rank)
        self.n_boxes = int(info.n_boxes)

    @property
    def dtype(self) -> str:
        """Name of the safetensors format, ``"BF16"`` for example."""
        return dtypes.NAMES[self.number]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __repr__(self) -> str:
        return f"<StoredTensor {self.name!r} {arrays.form(self.number, self.shape)}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self.read(i) for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        return self.read(index)

    def read(self, index: Any = ..., *, framework: Framework | None = None, copy_of_rank: int | None = None) -> Any:
        """A new array with the part that ``index`` means: that is read and verified, and no more than its blocks.

        Args:
            index: integers, slices and ``...``, as in NumPy. A slice with a step reads from its first to its last
                element.
            framework: ``"numpy"``, ``"torch"`` or ``"jax"``; None: the one the checkpoint was opened for.
            copy_of_rank: of a tensor that is kept per rank, that rank's copy; None: the first one's.

        Raises:
            CorruptError: the stored bytes are damaged.
        """
        chosen = self._checkpoint.framework if framework is None else arrays.check_framework(framework)
        region = regions.normalised(index, self.shape)
        if region.steps is not None and chosen == "torch" and any(s.step < 0 for s in region.steps):
            raise InvalidError("torch has no negative steps: read with a positive one and flip")
        array, memory = arrays.allocate(self.number, region.extent, chosen)
        load = Load(self._checkpoint)
        flags, rank = (0, 0) if copy_of_rank is None else (lib.LG_TENSOR_COPY_OF_RANK, copy_of_rank)
        box = (region.offset, region.extent)
        load.add(self.name, memory, shape=self.shape, region=box, flags=flags, rank=rank)
        load.run()
        return region.applied(arrays.finish(array, chosen))

    def into(self, array: Any, index: Any = ...) -> None:
        """Reads the part that ``index`` means into existing memory: a NumPy array or torch tensor of that shape and of
        the stored dtype, of any strides. After an error its contents are undefined.
        """
        region = regions.normalised(index, self.shape)
        if region.steps is not None:
            raise InvalidError(f'"{self.name}": a step is not read into memory; read an array of its own')
        load = Load(self._checkpoint)
        memory = load.memory(self.name, array)
        if memory.shape != region.shape:
            raise MismatchError(f'"{self.name}": the array is {list(memory.shape)}, the part {list(region.shape)}')
        memory = memory._replace(shape=region.extent, strides=region.widened(memory.strides))
        load.add(self.name, memory, shape=self.shape, region=(region.offset, region.extent))
        load.run()

    def read_packed(self, memory: Memory) -> None:
        """All of it into memory described already."""
        load = Load(self._checkpoint)
        load.add(self.name, memory)
        load.run()

    def numpy(self) -> Any:
        """All of it as a NumPy array."""
        return self.read(framework="numpy")

    def torch(self) -> Any:
        """All of it as a torch tensor in host memory."""
        return self.read(framework="torch")

    def jax(self) -> Any:
        """All of it as a JAX array."""
        return self.read(framework="jax")

    def map(self, index: Any = ..., *, verify: bool = True) -> Any:
        """A read-only NumPy array over the mapped file: nothing is copied. Its blocks are verified once, now. It keeps
        the checkpoint open.

        Raises:
            UnsupportedError: the part is not contiguous in one stored box, or the store cannot map; read it instead.
        """
        import numpy as np

        numpy_dtype = dtypes.numpy_dtypes().get(self.number)
        region = regions.normalised(index, self.shape)
        if numpy_dtype is None or region.steps is not None:
            raise InvalidError(f'"{self.name}": {self.dtype} by this index cannot be a view; read it')
        data = self._checkpoint.map(self.name, region, 0 if verify else lib.LG_LOAD_UNVERIFIED)
        array = np.frombuffer(data, dtype=numpy_dtype).reshape(region.shape)
        array.flags.writeable = False
        return array

    def boxes(self, index: Any = ...) -> list[Box]:
        """The stored boxes that the part which ``index`` means touches."""
        return self._checkpoint.boxes(self.name, regions.normalised(index, self.shape))


class State(Mapping[str, Any]):
    """Global state of a checkpoint: small values by key, decoded when asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, key: str) -> Any:
        out = ffi.new("char const **")
        with self._checkpoint.pointer as c:
            call(lib.lg_checkpoint_global_json, c, text_bytes(key), out)
            text = ffi.string(out[0]).decode()
        return tagged.decode(text)

    def __iter__(self) -> Iterator[str]:
        with self._checkpoint.pointer as c:
            keys = [lib.lg_checkpoint_global_key(c, i) for i in range(lib.lg_checkpoint_global_count(c))]
            return iter([ffi.string(key).decode() for key in keys])

    def __len__(self) -> int:
        with self._checkpoint.pointer as c:
            return int(lib.lg_checkpoint_global_count(c))

    def __repr__(self) -> str:
        return f"<State {list(self)}>"


class Checkpoint(Mapping[str, StoredTensor]):
    """A committed checkpoint: a mapping from names to tensors that are read when they are indexed. Opening it reads the
    manifest and no tensor. Threads may share it; one of them reads at a time.

    Args:
        where: a root (its newest good checkpoint), a step folder, ``ROOT@STEP`` or ``ROOT@gEPOCH.SERIAL``.
        framework: what is made when a tensor is read: arrays of ``"numpy"``, ``"torch"`` or ``"jax"``.

    Attributes:
        step: completed optimizer steps.
        generation: which of two checkpoints is newer.
        folder: the step folder's name.
        run_id: 32 hex digits.
        parent: step and generation of the checkpoint before it, or None.
        world: how many ranks saved it.
        created: UTC, informative.
        nbytes: of all tensors.
        file_bytes: of all files.
        block_bytes: what one checksum covers.
        manifest_sha256: hex digits.
        pinned: protected from removal.
        state: global state, a mapping.

    Raises:
        EmptyRootError, NoGoodCheckpoint, NotFoundError, FormatError, CorruptError, VersionError: it cannot be opened.
    """

    def __init__(self, where: str | os.PathLike[str], framework: Framework = "numpy") -> None:
        framework = arrays.check_framework(framework)
        out = ffi.new("lg_checkpoint **")
        call(lib.lg_checkpoint_open, path_bytes(where), out)
        self._begin(Pointer(out[0], lib.lg_checkpoint_close), framework)

    @classmethod
    def of(cls, pointer: Pointer, framework: Framework = "numpy") -> Checkpoint:
        """One that something else owns: the result of a resume."""
        made = cls.__new__(cls)
        made._begin(pointer, framework)
        return made

    def _begin(self, pointer: Pointer, framework: Framework) -> None:
        self._pointer: Pointer | None = pointer
        self.framework: Framework = framework
        info = ffi.new("lg_checkpoint_info *")
        with pointer as c:
            call(lib.lg_checkpoint_get_info, c, info)
        self.step = int(info.step)
        self.generation = Generation(int(info.generation.epoch), int(info.generation.serial))
        self.folder = text_of(info.folder)
        self.run_id = text_of(info.run_id)
        self.manifest_sha256 = text_of(info.manifest_sha256)
        self.parent: tuple[int, Generation] | None = None
        if info.has_parent:
            self.parent = (int(info.parent_step), Generation(int(info.parent.epoch), int(info.parent.serial)))
        self.world = int(info.world)
        self.created = text_of(info.created)
        self.block_bytes = int(info.block_bytes)
        self.nbytes = int(info.tensor_bytes)
        self.file_bytes = int(info.file_bytes)
        self.pinned = bool(info.pinned)
        self._n_tensors = int(info.n_tensors)
        self._n_files = int(info.n_files)
        self._n_layouts = int(info.n_layouts)
        self._tensors: dict[str, StoredTensor] | None = None
        self.state: Mapping[str, Any] = State(self)

    @property
    def pointer(self) -> Pointer:
        """The handle, for other parts of the package."""
        if self._pointer is None:
            raise StateError("the checkpoint is closed")
        return self._pointer

    def close(self) -> None:
        """Frees it, as soon as no view of a mapped tensor is left."""
        self._pointer = None
        self._tensors = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint step {self.step}, generation {self.generation}, {self._n_tensors} tensors>"

    # ------------------------------------------------------------- as a mapping

    def _all(self) -> dict[str, StoredTensor]:
        if self._tensors is None:
            infos = ffi.new("lg_tensor_info[]", self._n_tensors)
            with self.pointer as c:
                call(lib.lgpy_tensor_infos, c, infos, self._n_tensors)
                tensors = [StoredTensor(self, info) for info in infos]
            self._tensors = {t.name: t for t in tensors}
        return self._tensors

    def __getitem__(self, name: str) -> StoredTensor:
        if self._tensors is not None and name in self._tensors:
            return self._tensors[name]
        info = ffi.new("lg_tensor_info *")
        with self.pointer as c:
            call(lib.lg_checkpoint_find, c, text_bytes(name), info)
            return StoredTensor(self, info)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return self._n_tensors

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        try:
            self[name]
        except MissingError:
            return False
        return True

    # ------------------------------------------------------------------ reading

    def read(self, names: Iterable[str] | None = None, framework: Framework | None = None) -> dict[str, Any]:
        """New arrays of many tensors, read all at once.

        Args:
            names: None: all.
            framework: None: the one the checkpoint was opened for.
        """
        chosen = self.framework if framework is None else arrays.check_framework(framework)
        known = self._all()
        load = Load(self)
        made: dict[str, Any] = {}
        for name in known if names is None else names:
            tensor = known[name] if name in known else self[name]
            made[name], memory = arrays.allocate(tensor.number, tensor.shape, chosen)
            load.add(name, memory)
        load.run()
        if chosen == "jax":
            return {name: arrays.finish(array, chosen) for name, array in made.items()}
        return made

    def read_into(self, targets: Mapping[str, Any], *, verify: bool = True) -> None:
        """Reads tensors into existing memory, all at once: NumPy arrays and torch tensors of the stored dtype and
        shape, of any strides. After an error their contents are undefined.

        Args:
            targets: arrays by tensors' names.
            verify: check every byte that is used.
        """
        load = Load(self, verify=verify)
        load.tensors(targets)
        load.run()

    def map(self, name: str, region: regions.Region, flags: int) -> Any:
        """The bytes of a region as a buffer over the mapped file; :meth:`StoredTensor.map` makes an array of it."""
        view = ffi.new("lg_view *")
        offset, extent = ffi.new("uint64_t[]", [*region.offset, 0]), ffi.new("uint64_t[]", [*region.extent, 0])
        pointer = self.pointer
        with pointer as c:
            call(lib.lg_checkpoint_map, c, text_bytes(name), offset, extent, flags, view)

        if view.bytes == 0:
            _release(pointer, view)
            return b""
        data = ffi.cast("char *", view.data)
        weakref.finalize(data, _release, pointer, view).atexit = False
        return ffi.buffer(data, view.bytes)

    # -------------------------------------------------------------------- state

    def rank_bytes(self, key: str, rank: int, world: int | None = None) -> bytes:
        """What ``rank`` saved under ``key`` as state of its own; verified.

        Args:
            world: number of ranks that read it now. Another than saved it is a :class:`WorldError`, since such state
                cannot be cut anew. None: take it regardless.
        """
        data, size = ffi.new("void **"), ffi.new("size_t *")
        with self.pointer as c:
            call(lib.lg_checkpoint_rank_bytes, c, text_bytes(key), rank, world or 0, data, size)
        return taken(data[0], size[0])

    def rank_state(self, key: str, rank: int, world: int | None = None) -> Any:
        """The same for a value that :meth:`Save.rank_state` saved."""
        return tagged.decode(self.rank_bytes(key, rank, world))

    def attached(self, name: str) -> bytes:
        """Contents of an attached file; verified."""
        data, size = ffi.new("void **"), ffi.new("size_t *")
        with self.pointer as c:
            call(lib.lg_checkpoint_attached, c, text_bytes(name), data, size)
        return taken(data[0], size[0])

    # ------------------------------------------------------------------ looking

    def files(self) -> list[StoredFile]:
        """All files that the manifest lists."""
        info = ffi.new("lg_file_info *")
        found = []
        with self.pointer as c:
            for i in range(self._n_files):
                call(lib.lg_checkpoint_file, c, i, info)
                group = None if info.is_sums or info.is_attached else _GROUPS[info.group]
                rank = None if info.is_attached else int(info.rank)
                domain = text_of(info.domain) if info.domain else ""
                found.append(StoredFile(text_of(info.name), int(info.bytes), rank, group, domain))
        return found

    def layouts(self) -> list[str]:
        """Canonical texts of the layouts (docs/format-layouts.md)."""
        with self.pointer as c:
            return [ffi.string(lib.lg_checkpoint_layout(c, i)).decode() for i in range(self._n_layouts)]

    def foreign_files(self) -> list[str]:
        """Names of files in the step folder that neither manifest nor side record lists."""
        found: list[str] = []
        handle = ffi.new_handle(found)
        with self.pointer as c:
            call(lib.lg_checkpoint_foreign, c, lib.lgpy_foreign, handle)
        return found

    def boxes(self, name: str, region: regions.Region) -> list[Box]:
        """The stored boxes of a tensor that touch a region."""
        found: list[Box] = []
        handle = ffi.new_handle(found)
        offset, extent = ffi.new("uint64_t[]", [*region.offset, 0]), ffi.new("uint64_t[]", [*region.extent, 0])
        with self.pointer as c:
            call(lib.lg_checkpoint_boxes, c, text_bytes(name), offset, extent, lib.lgpy_box, handle)
        return found

    def verify(self, *, threads: int = 0, progress: Progress | None = None) -> Verified:
        """Reads every byte and checks it: manifest, sizes, headers, each block.

        Args:
            threads: 0: one a core, at most 16.
            progress: called with bytes done and bytes in all, from one thread at a time. What it raises stops the
                verification and is raised here.

        Returns:
            What was read, and all problems. Only what keeps it from verifying at all is an exception.
        """
        return verify(self.pointer, threads, progress)


def _release(pointer: Pointer, view: Any) -> None:
    with pointer:
        lib.lg_view_release(view)


@ffi.def_extern(name="lgpy_box")  # type: ignore[untyped-decorator]
def _call_box(box: Any, arg: Any) -> int:
    n = int(box.ndim)
    ffi.from_handle(arg).append(Box(int(box.rank), tuple(box.offset[0:n]), tuple(box.size[0:n])))
    return 0


@ffi.def_extern(name="lgpy_foreign")  # type: ignore[untyped-decorator]
def _call_foreign(name: Any, arg: Any) -> int:
    ffi.from_handle(arg).append(text_of(name))
    return 0
