# SPDX-License-Identifier: Apache-2.0
"""A save that is being described, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lastgood import arrays, tagged
from lastgood._columns import Columns
from lastgood._core import ffi, lib
from lastgood.background import failed
from lastgood.checkpoint import Generation
from lastgood.device import Reserved, may_be_on_device
from lastgood.errors import Error, InvalidError, MismatchError, StateError, Status, call, text_of
from lastgood.handles import Pointer, text_bytes
from lastgood.layout import Layout
from lastgood.load import check_part

if TYPE_CHECKING:
    from lastgood.session import Session

Group = Literal["model", "optim"]
Lazy = bool | Collection[str] | Callable[[str], bool]
WhenBusy = Literal["wait", "skip"]
SkipReason = Literal["committed", "in flight"]
_GROUPS = {"model": 0, "optim": 1}
_SKIPS: dict[int, SkipReason | None] = {0: None, 1: "committed", 2: "in flight"}


class SaveInfo(NamedTuple):
    """What a save has committed."""

    step: int
    generation: Generation
    folder: str
    bytes_written: int  # by this rank
    bytes_total: int  # by all ranks
    skipped: bool  # `if_new` found it committed
    unshared: int  # tensors kept per rank because the ranks' copies differ
    seconds: float


class LaunchInfo(NamedTuple):
    """What a launch has started. The checkpoint counts only once it is committed."""

    step: int
    generation: Generation
    folder: str  # its name once it is committed
    skipped: SkipReason | None  # why nothing was launched: `if_new`, or the save before is under way
    bytes_staged: int  # copied before the launch returned, by this rank
    bytes_lazy: int  # to be copied until the fence, by this rank
    windowed: bool  # the part did not fit the staging memory: copied as it is written
    seconds: float  # the launch took, with its waiting


class Item(NamedTuple):
    """A tensor, or this rank's part of one, for :meth:`Save.items`; what each is for :meth:`Save.tensor`."""

    name: str
    array: Any
    shape: tuple[int, ...] | None = None
    layout: Layout | None = None
    buffer: bool = False
    lazy: bool = False


class LaunchOptions(NamedTuple):
    """As the arguments of :meth:`Session.launch` of these names."""

    when_busy: WhenBusy = "wait"
    max_skips: int = 10
    check_sources: bool = False
    copy_threads: int = 0
    lazy_threads: int = 0

    def struct(self) -> Any:
        """For the library."""
        if self.when_busy not in ("wait", "skip"):
            raise InvalidError(f'when_busy is {self.when_busy!r}, not "wait" or "skip"')
        o = ffi.new("lg_launch_options *")
        o.size = ffi.sizeof("lg_launch_options")
        o.flags = (lib.LG_LAUNCH_SKIP if self.when_busy == "skip" else 0) | (
            lib.LG_LAUNCH_CHECK_SOURCES if self.check_sources else 0
        )
        if self.max_skips < 1:
            raise InvalidError(f"max_skips is {self.max_skips}, not 1 or more")
        try:
            o.copy_threads, o.lazy_threads, o.max_skips = self.copy_threads, self.lazy_threads, self.max_skips
        except OverflowError as why:
            raise InvalidError(f"an option of the launch is out of range: {why}") from None
        return o


def generation_of(g: Any) -> Generation:
    """The library's struct."""
    return Generation(int(g.epoch), int(g.serial))


def save_info(out: Any) -> SaveInfo:
    """The library's struct."""
    return SaveInfo(
        int(out.step),
        generation_of(out.generation),
        text_of(out.folder),
        int(out.bytes_written),
        int(out.bytes_total),
        bool(out.skipped),
        int(out.unshared),
        float(out.seconds),
    )


class Save:
    """A save that is being described. Arrays are not copied: their memory must not change until it is committed, or
    launched.

    Used as a context manager it commits at the end of the block, or launches if it is of :meth:`Session.launch`. When
    the block raises, the save fails *on all ranks* with that error: a rank that gave up alone would leave the others
    waiting.

    Attributes:
        info: what was committed, once it is.
        launched: what was launched, once it is.
    """

    def __init__(self, session: Session, pointer: Pointer, options: LaunchOptions | None = None) -> None:
        self._session = session
        self._pointer = pointer
        self._options = options  # None: the block's end commits
        self._keep: list[Any] = []
        self._lazy: list[Any] = []  # what owns memory that is read after the launch
        self._reserved = None if options is None else Reserved(session.staging)  # for what devices have
        self.info: SaveInfo | None = None
        self.launched: LaunchInfo | None = None

    def with_pointer(self, use: Callable[[Any], None]) -> None:
        """Calls a function with the raw handle."""
        with self._pointer as raw:
            use(raw)

    def tensors(
        self, tensors: Mapping[str, Any], *, group: Group = "model", buffer: bool = False, lazy: Lazy = False
    ) -> None:
        """Adds whole tensors by name: NumPy or JAX arrays, torch tensors, of any strides. Every rank adds them; their
        contents are compared, and one rank writes.

        Args:
            group: ``"model"``: parameters, in files that PyTorch and transformers read as a model; ``"optim"``: all
                else.
            buffer: may differ between ranks (running statistics); where it does, each rank's own copy is kept.
            lazy: which of them change only between :meth:`Session.fence` and the next launch, as parameters and
                optimizer state do: names, a function of the name, or True for all. A launch may return before it has
                copied them. What must be converted first is never lazy. On a CUDA device the trainer's stream waits for
                the copies, at the launch, for what is lazy at the fence, and the host does not (docs/gpu.md).
        """
        columns = Columns()
        number, flags = _group(group), lib.LG_TENSOR_BUFFER if buffer else 0
        with self._noted():
            is_lazy = _chooser(lazy)
            compared = self._session.world > 1
            for name, array in tensors.items():
                memory, more = self._memory(name, array, is_lazy is not None and is_lazy(name), compared)
                columns.add(name, memory, group=number, flags=flags | more)
            self._add(columns)

    def tensor(
        self,
        name: str,
        array: Any,
        *,
        group: Group = "model",
        shape: tuple[int, ...] | None = None,
        layout: Layout | None = None,
        flat_offset: int = 0,
        buffer: bool = False,
        lazy: bool = False,
    ) -> None:
        """Adds one tensor, or the part of it that this rank holds.

        Args:
            shape: the global one, in elements, where the array is a part.
            layout: which part of the tensor the array is.
            flat_offset: with a flat layout: where the tensor begins in the buffer, in elements; the array is the
                rank's range of it, of one dimension.
            group, buffer, lazy: as for :meth:`tensors`.
        """
        with self._noted():
            session = self._session
            compared = session.world > 1 and (layout is None or session.compares)
            memory, flags = self._memory(name, array, lazy, compared)
            if layout is not None:
                if shape is None:
                    raise InvalidError(f'"{name}": a part under a layout needs the tensor\'s global shape')
                check_part(name, memory, shape, layout, flat_offset, self._session.rank)
            elif shape is not None and tuple(shape) != memory.shape:
                raise MismatchError(
                    f'"{name}": the array is {list(memory.shape)}, its global shape is to be {list(shape)}; '
                    "give the layout of which it is a part"
                )
            flags |= lib.LG_TENSOR_BUFFER if buffer else 0
            columns = Columns()
            columns.add(
                name,
                memory,
                group=_group(group),
                flags=flags,
                shape=shape,
                layout=layout,
                flat_offset=flat_offset,
            )
            self._add(columns)

    def items(self, items: Iterable[Item], *, group: Group = "model") -> None:
        """As :meth:`tensor` for each, in one call of the library: for thousands of tensors of which some are parts.

        Args:
            group: of all of them.
        """
        columns = Columns()
        number = _group(group)
        with self._noted():
            for name, array, shape, layout, buffer, lazy in items:
                compared = self._session.world > 1 and (layout is None or self._session.compares)
                memory, flags = self._memory(name, array, lazy, compared)
                if layout is not None:
                    if shape is None or layout.flat:
                        raise InvalidError(f'"{name}": an item needs the global shape, and no flat layout')
                    check_part(name, memory, shape, layout, 0, self._session.rank)
                flags |= lib.LG_TENSOR_BUFFER if buffer else 0
                columns.add(name, memory, group=number, flags=flags, shape=shape, layout=layout)
            self._add(columns)

    def boxes(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        boxes: list[tuple[tuple[int, ...], Any]],
        *,
        group: Group = "model",
        lazy: bool = False,
    ) -> None:
        """Adds boxes of a tensor that follow no rule.

        Args:
            dtype: name of the safetensors format.
            shape: global, in elements.
            boxes: offset (elements) and array of each box that this rank holds.
            group, lazy: as for :meth:`tensors`.
        """
        from lastgood import dtypes

        with self._noted():
            t = ffi.new("lg_tensor *")
            t.size, t.dtype, t.group, t.ndim = ffi.sizeof("lg_tensor"), dtypes.number(dtype), _group(group), len(shape)
            text, dims = ffi.new("char[]", text_bytes(name)), ffi.new("uint64_t[]", [*shape, 0])
            t.name, t.shape = text, dims
            raw_boxes = ffi.new("lg_box[]", max(len(boxes), 1))
            keep: list[Any] = []
            owners: list[Any] = []
            on_device = self._on_device(name, [array for _, array in boxes], lazy)
            for i, (offset, array) in enumerate(boxes):
                raw = raw_boxes[i]
                memory = arrays.describe(name, array) if on_device is None else on_device[i]
                if memory.dtype != t.dtype or len(offset) != len(shape) or len(memory.shape) != len(shape):
                    raise MismatchError(
                        f'"{name}": a box at {list(offset)} is {arrays.form(memory.dtype, memory.shape)}, '
                        f"the tensor {arrays.form(t.dtype, shape)}"
                    )
                members = [ffi.new("uint64_t[]", [*offset, 0]), ffi.new("uint64_t[]", [*memory.shape, 0])]
                raw.offset, raw.size = members
                raw.data = ffi.cast("void *", memory.address)
                if memory.strides is not None:
                    members.append(ffi.new("int64_t[]", [*memory.strides, 0]))
                    raw.strides = members[-1]
                keep.append((members, memory.keep))
                owners.append(arrays.owner(array, memory) if lazy else None)
            t.boxes, t.n_boxes = raw_boxes, len(boxes)
            if on_device is not None:
                t.flags = lib.LG_TENSOR_KEPT
            elif lazy and all(o is not None for o in owners):
                t.flags = lib.LG_TENSOR_LAZY
                self._lazy.extend(owners)
            self._keep.append(keep)
            with self._pointer as save:
                call(lib.lg_save_tensor, save, t)

    def alias(self, alias: str, name: str) -> None:
        """Declares ``alias`` to be the same tensor as ``name``, which was added before. Both names load."""
        with self._noted(), self._pointer as save:
            call(lib.lg_save_alias, save, text_bytes(alias), text_bytes(name))

    def state(self, key: str, value: Any) -> None:
        """Adds a small value of the whole run. All bits are kept. The checkpoint has the union over ranks; a key with
        two different values is an error.

        Args:
            value: numbers, strings, bytes, lists, tuples, sets, dicts and the like (:func:`lastgood.tagged.encode`).
        """
        with self._noted():
            text = tagged.encode(value, f'state "{key}"')
        self.state_text(key, text)

    def state_text(self, key: str, text: str) -> None:
        """The same for a value that is tagged JSON already."""
        with self._noted(), self._pointer as save:
            call(lib.lg_save_global_json, save, text_bytes(key), ffi.new("char[]", text.encode()))

    def rank_bytes(self, key: str, data: bytes) -> None:
        """Adds state of this rank alone, as bytes that mean something to the caller."""
        with self._noted(), self._pointer as save:
            call(lib.lg_save_rank_bytes, save, text_bytes(key), ffi.from_buffer(data), len(data))

    def rank_state(self, key: str, value: Any) -> None:
        """Adds state of this rank alone, as a value like those of :meth:`state`."""
        with self._noted():
            data = tagged.encode(value, f'state "{key}" of a rank').encode()
        self.rank_bytes(key, data)

    def attach(self, name: str, data: bytes) -> None:
        """Adds a file that lies in the step folder as it is: config.json, say. Rank 0's counts."""
        with self._noted(), self._pointer as save:
            call(lib.lg_save_attach, save, text_bytes(name), ffi.from_buffer(data), len(data))

    def fail(self, error: BaseException) -> None:
        """Makes the commit fail on all ranks with this error."""
        status = error.status if isinstance(error, Error) else Status.CANCELLED
        text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        with self._pointer as save:
            call(lib.lg_save_fail, save, status, ffi.new("char[]", text.encode("utf-8", "backslashreplace")[:2000]))

    def commit(self) -> SaveInfo:
        """Writes, commits, and returns once the checkpoint is durable on all ranks. *Collective.* A failure is the same
        on all ranks, and the checkpoint before is untouched. A keyboard interrupt in the meantime is raised when it is
        done.
        """
        out = ffi.new("lg_save_info *")
        over = self._session.drain(self._session.timeout / 4)
        if (
            self._reserved is not None and self._reserved.expects() is not None
        ):  # of launch(), but committed all the same
            if over:
                self._reserved.fill()
                self._session.staging.finish()
            else:
                self.fail(StateError("the save before still reads the memory that this one copies to"))
        try:
            with self._session.pointer:
                call(lib.lg_save_commit, self._pointer.consume(), out)
        finally:
            self._keep.clear()
            self._lazy.clear()
        self.info = save_info(out)
        return self.info

    def launch(self) -> LaunchInfo:
        """Starts to write in the background, and returns when all that is not lazy has been copied. *Collective.* When
        it raises, nothing was launched, on all ranks; the error may be that of the save before, which is told once.
        """
        options = self._options or LaunchOptions()
        o = options.struct()
        expects = None if self._reserved is None else self._reserved.expects()
        handle = ffi.new_handle(self._reserved)
        if expects is not None:
            o.ready, o.ready_value = ffi.cast("int64_t *", expects[0]), expects[1]
            o.fill, o.fill_arg = lib.lgpy_fill, handle
        out = ffi.new("lg_launch_info *")
        session = self._session
        session.make_room(options)
        try:
            with session.pointer, session.reading(self._lazy):
                call(lib.lg_save_launch, self._pointer.consume(), o, out)
        finally:
            self._keep.clear()
            self._lazy = []
        self.launched = LaunchInfo(
            int(out.step),
            generation_of(out.generation),
            text_of(out.folder),
            _SKIPS.get(int(out.skipped)),
            int(out.bytes_staged),
            int(out.bytes_lazy),
            bool(out.windowed),
            float(out.seconds),
        )
        return self.launched

    def abort(self) -> None:
        """Forgets it, on this rank. Where other ranks commit, they wait for this one in vain: use :meth:`fail` and
        :meth:`commit` instead.
        """
        lib.lg_save_abort(self._pointer.consume())
        self._keep.clear()
        self._lazy.clear()

    def __enter__(self) -> Save:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        if error is None:
            if self.info is None and self.launched is None:
                self._end()
            return
        try:
            if self._session.world == 1:
                self.abort()
            else:  # brings the error to the other ranks, which are on their way to commit or launch
                self.fail(error)
                self._end()
        except Error:
            pass  # the first error counts; or it was committed in the block

    # ---------------------------------------------------------------------------

    def _end(self) -> None:
        if self._options is None:
            self.commit()
        else:
            self.launch()

    def _memory(self, name: str, array: Any, lazy: bool, compared: bool) -> tuple[arrays.Memory, int]:
        """Where an array is, and flags that say how long it stays there.

        Args:
            compared: the library reads it while the launch is agreed on, before anything could be copied from a device.
        """
        if self._reserved is not None and not compared and may_be_on_device(array):
            memory = self._reserved.add(name, array, lazy)
            if memory is not None:
                return memory, int(lib.LG_TENSOR_KEPT)
        memory = arrays.describe(name, array)
        return memory, int(lib.LG_TENSOR_LAZY) if lazy and self._keep_lazy(array, memory) else 0

    def _on_device(self, name: str, boxes: list[Any], lazy: bool) -> list[arrays.Memory] | None:
        """Where the boxes of a tensor are, if all of them are taken from a device."""
        if self._reserved is None or not boxes or not all(may_be_on_device(array) for array in boxes):
            return None
        found = [self._reserved.add(name, array, lazy) for array in boxes]
        return None if any(memory is None for memory in found) else [memory for memory in found if memory is not None]

    def _keep_lazy(self, array: Any, memory: arrays.Memory) -> bool:
        """Whether it can be lazy: the memory is the array's own. Keeps that memory."""
        owner = arrays.owner(array, memory)
        if owner is None:
            return False
        self._lazy.append(owner)
        return True

    def _add(self, columns: Columns) -> None:
        self._keep.append(columns.keep)
        with self._pointer as save:
            columns.save(save)

    def _noted(self) -> _Noted:
        return _Noted(self)


@ffi.def_extern(name="lgpy_fill")  # type: ignore[untyped-decorator]
def _call_fill(arg: Any, err: Any) -> int:
    reserved: Reserved = ffi.from_handle(arg)
    try:
        reserved.fill()
    except BaseException as why:
        return failed(why, err)
    return 0


class _Noted:
    """An error of ours in describing the state is noted in the save as the library notes its own."""

    def __init__(self, save: Save) -> None:
        self._save = save

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, StateError):
            self._save.fail(error)


def _group(group: str) -> int:
    if group not in _GROUPS:
        raise InvalidError(f'group is {group!r}, not "model" or "optim"')
    return _GROUPS[group]


def _chooser(lazy: Lazy) -> Callable[[str], bool] | None:
    if isinstance(lazy, str):
        raise InvalidError(f"lazy is the string {lazy!r}; give a set of names, or a function")
    if isinstance(lazy, bool):
        return (lambda _: True) if lazy else None
    return lazy if callable(lazy) else frozenset(lazy).__contains__
