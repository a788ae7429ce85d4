# SPDX-License-Identifier: Apache-2.0
"""A training run's sessions: open, resume, save, close, on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from lastgood import arrays, tagged
from lastgood._columns import Columns
from lastgood._core import ffi, lib
from lastgood.checkpoint import Checkpoint, Generation
from lastgood.comm import Communicator
from lastgood.errors import (
    EmptyRootError,
    Error,
    InvalidError,
    MismatchError,
    NoGoodCheckpoint,
    StateError,
    Status,
    call,
    finish,
    hold,
    new_error,
    status_of,
    text_of,
)
from lastgood.handles import Pointer, nothing, path_bytes, text_bytes
from lastgood.layout import Layout
from lastgood.load import Load, check_part

Group = Literal["model", "optim"]
_GROUPS = {"model": 0, "optim": 1}
Targets = Callable[[Load], Any] | Mapping[str, Any] | None


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


class Skipped(NamedTuple):
    """A checkpoint that a resume passed over."""

    step: int
    generation: Generation
    folder: str
    status: Status
    reason: str


class SessionStatus(NamedTuple):
    """What a session has done, for logs and status pages."""

    saves_committed: int
    saves_failed: int
    removed: int  # checkpoints removed by retention
    removal_failures: int  # removals that failed and will be tried again
    last_removal_error: str
    last_committed: Generation | None


class Resumed(NamedTuple):
    """What a run goes on from."""

    step: int
    generation: Generation
    folder: str
    run_id: str
    saved_world: int  # ranks that saved it
    verified: bool
    tensors_loaded: int  # by this rank
    bytes_loaded: int  # by this rank
    skipped: tuple[Skipped, ...]  # newer ones that were passed over, newest first
    missing: tuple[str, ...]  # optional targets that the checkpoint lacks
    checkpoint: Checkpoint  # open, for reading state


def _generation(g: Any) -> Generation:
    return Generation(int(g.epoch), int(g.serial))


class Session:
    """A run's hold on a root. *Collective*: all ranks of the communicator open, resume, save and close alike. Opening
    claims the root: a session that was opened earlier and still runs fails its next save as superseded.

    Args:
        root: path or URI of the folder that holds the run's checkpoints; made if its parent exists.
        comm: the ranks; None: this process alone.
        new_run: save into a root with checkpoints that this session does not resume from, as a new run.
        read_only: claim and write nothing.
        timeout: the longest wait for other ranks, seconds.
        keep_last: retention: keep the last N; 0: all.
        keep_every: and every K-th step; 0: none.
        check_replicas: compare declared replicas at every K-th save; 0: never.
        block_bytes: what one checksum covers: a power of two from 4096 to 64 MiB.
        buffer_bytes: cap of memory for data under way, this process; at least 1 MiB.
        domain: failure domain of this rank; None: the host's name.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        comm: Communicator | None = None,
        *,
        new_run: bool = False,
        read_only: bool = False,
        timeout: float = 600.0,
        keep_last: int = 0,
        keep_every: int = 0,
        check_replicas: int = 0,
        block_bytes: int = 65536,
        buffer_bytes: int = 64 << 20,
        domain: str | None = None,
    ) -> None:
        self.rank = 0 if comm is None else comm.rank
        self.world = 1 if comm is None else comm.size
        comm_pointer = None if comm is None else comm.pointer()
        o = ffi.new("lg_session_options *")
        o.size = ffi.sizeof("lg_session_options")
        o.flags = (lib.LG_SESSION_NEW_RUN if new_run else 0) | (lib.LG_SESSION_READ_ONLY if read_only else 0)
        try:
            o.deadline_ms = max(1, round(timeout * 1000))
            o.keep_last, o.keep_every, o.check_replicas = keep_last, keep_every, check_replicas
            o.block_bytes, o.buffer_bytes = block_bytes, buffer_bytes
        except OverflowError as why:
            raise InvalidError(f"an option of the session is out of range: {why}") from None
        # Opened here, so that checkpoints and views of a resume may outlive the session.
        store = ffi.new("lg_store **")
        store_pointer = None
        if lib.lg_store_open(path_bytes(root), store, ffi.NULL) == 0:
            store_pointer = Pointer(store[0], lib.lg_store_free)
            o.store = store[0]
        name = None if domain is None else ffi.new("char[]", text_bytes(domain))
        o.domain = ffi.NULL if name is None else name
        out = ffi.new("lg_session **")
        if comm_pointer is None:
            call(lib.lg_session_open, path_bytes(root), o, out)
        else:
            with comm_pointer as c:
                o.comm = c
                call(lib.lg_session_open, path_bytes(root), o, out)
        self._store = store_pointer
        self._pointer = Pointer(out[0], _close_session, keep=(comm_pointer, store_pointer))
        self._closed = False

    @property
    def pointer(self) -> Pointer:
        """The handle, for other parts of the package."""
        return self._pointer

    @property
    def epoch(self) -> int:
        """The owner epoch that it claimed; 0 if read-only."""
        with self._pointer as s:
            return int(lib.lg_session_epoch(s))

    def status(self) -> SessionStatus:
        """What it has done so far."""
        out = ffi.new("lg_session_status *")
        with self._pointer as s:
            call(lib.lg_session_get_status, s, out)
        last = _generation(out.last_committed)
        return SessionStatus(
            int(out.saves_committed),
            int(out.saves_failed),
            int(out.removed),
            int(out.removal_failures),
            text_of(out.last_removal_error),
            last if last.epoch else None,
        )

    def close(self) -> None:
        """Ends it; every rank closes its own."""
        if not self._closed:
            self._closed = True
            call(lib.lg_session_close, self._pointer.consume())

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            self.close()
        except Error:
            if kind is None:  # else the first error counts
                raise

    # ------------------------------------------------------------------- saving

    def save(self, step: int, *, if_new: bool = False, finite: bool = False, aliases_once: bool = False) -> Save:
        """Starts to describe a save of the state after ``step`` completed optimizer steps::

            with session.save(step) as save:
                save.tensors(model.state_dict())
                save.state("samples", samples)

        Leaving the block commits. Nothing is written and nobody is waited for before.

        Args:
            if_new: succeed without a new checkpoint when this session's newest one has this step already.
            finite: refuse NaN and infinity.
            aliases_once: store tied tensors once; transformers cannot open such a folder.
        """
        options = ffi.new("lg_save_options *")
        options.size = ffi.sizeof("lg_save_options")
        options.flags = (
            (lib.LG_SAVE_IF_NEW if if_new else 0)
            | (lib.LG_SAVE_FINITE if finite else 0)
            | (lib.LG_SAVE_ALIASES_ONCE if aliases_once else 0)
        )
        if not 0 <= step < 2**53:
            raise InvalidError(f"step {step} is not between 0 and 2^53")
        out = ffi.new("lg_save **")
        with self._pointer as s:
            call(lib.lg_save_begin, s, step, options, out)
        return Save(self, Pointer(out[0], lib.lg_save_abort, keep=self._pointer))

    # ----------------------------------------------------------------- resuming

    def resume(
        self,
        targets: Targets = None,
        *,
        step: int | None = None,
        generation: Generation | None = None,
        strict: bool = False,
        verify: bool = True,
        optional: bool = False,
    ) -> Resumed | None:
        """Finds the newest good checkpoint, reads into ``targets`` and verifies; when any rank finds damage, all ranks
        step back together to the next older one. *Collective.*

        Args:
            targets: arrays by name; or a function that is called with a :class:`Load` for each checkpoint that is
                tried and describes what is wanted from it; or None.
            step: resume from this step.
            generation: resume from this generation.
            strict: only the newest; damaged is an error.
            verify: False: check no digests; the next save records it.
            optional: leave alone the arrays of ``targets`` that the checkpoint lacks.

        Returns:
            What was loaded, or None: no checkpoint was ever committed here, a fresh start.

        Raises:
            NoGoodCheckpoint: there are checkpoints and none is good; its ``skipped`` says why.
            MissingError, MismatchError: the checkpoint lacks a target, or has it in another form.
        """
        if targets is None or callable(targets):
            describe = targets
        else:
            wanted = targets

            def describe(load: Load) -> None:
                load.tensors(wanted, optional=optional)

        calls = _Resume(describe, self.rank)
        handle = ffi.new_handle(calls)
        options = ffi.new("lg_resume_options *")
        options.size = ffi.sizeof("lg_resume_options")
        options.flags = (lib.LG_RESUME_STRICT if strict else 0) | (0 if verify else lib.LG_RESUME_UNVERIFIED)
        keep = []
        if step is not None:
            keep.append(ffi.new("uint64_t *", step))
            options.step = keep[-1]
        if generation is not None:
            keep.append(ffi.new("lg_generation *", tuple(generation)))
            options.generation = keep[-1]
        out, err = ffi.new("lg_resume_result **"), new_error()
        with self._pointer as s:
            status = lib.lg_resume(s, options, lib.lgpy_targets, handle, out, err)
        skipped: tuple[Skipped, ...] = ()
        result = out[0]
        if result != ffi.NULL:
            owner = Pointer(result, lib.lg_resume_result_free, keep=self._store)
            skipped = tuple(
                Skipped(
                    int(k.step), _generation(k.generation), text_of(k.folder), status_of(k.status), text_of(k.reason)
                )
                for k in (result.skipped[i] for i in range(result.n_skipped))
            )
        try:
            finish(status, err)
        except EmptyRootError:
            return None
        except NoGoodCheckpoint as why:
            why.skipped = skipped
            raise
        if calls.load is not None:
            calls.load.deliver()
        pointer = Pointer(result.checkpoint, nothing, keep=owner)
        return Resumed(
            int(result.step),
            _generation(result.generation),
            text_of(result.folder),
            text_of(result.run_id),
            int(result.saved_world),
            bool(result.verified),
            int(result.tensors_loaded),
            int(result.bytes_loaded),
            skipped,
            tuple(text_of(result.missing[i]) for i in range(result.n_missing)),
            Checkpoint.of(pointer),
        )


def _close_session(raw: Any) -> None:
    lib.lg_session_close(raw, ffi.NULL)


class _Resume:
    """What the library calls during a resume."""

    def __init__(self, describe: Callable[[Load], Any] | None, rank: int) -> None:
        self.describe = describe
        self.rank = rank
        self.load: Load | None = None  # the last one, which was loaded


@ffi.def_extern(name="lgpy_targets")  # type: ignore[untyped-decorator]
def _call_targets(raw: Any, arg: Any, err: Any) -> int:
    calls: _Resume = ffi.from_handle(arg)
    calls.load = None
    if calls.describe is None:
        return 0
    checkpoint = Checkpoint.of(Pointer(lib.lg_load_checkpoint(raw), nothing))
    try:
        load = Load(checkpoint)
        load.rank = calls.rank
        calls.describe(load)
        load.columns.load(raw)
        calls.load = load
    except BaseException as why:  # KeyboardInterrupt too
        return hold(why, err)
    finally:
        checkpoint.close()
    return 0


class Save:
    """A save that is being described. Arrays are not copied: their memory must not change until it is committed.

    Used as a context manager it commits at the end of the block. When the block raises, the save fails *on all ranks*
    with that error: a rank that gave up alone would leave the others waiting.
    """

    def __init__(self, session: Session, pointer: Pointer) -> None:
        self._session = session
        self._pointer = pointer
        self._keep: list[Any] = []
        self.info: SaveInfo | None = None

    def with_pointer(self, use: Callable[[Any], None]) -> None:
        """Calls a function with the raw handle."""
        with self._pointer as raw:
            use(raw)

    def tensors(self, tensors: Mapping[str, Any], *, group: Group = "model", buffer: bool = False) -> None:
        """Adds whole tensors by name: NumPy or JAX arrays, torch tensors, of any strides. Every rank adds them; their
        contents are compared, and one rank writes.

        Args:
            group: ``"model"``: parameters, in files that PyTorch and transformers read as a model; ``"optim"``: all
                else.
            buffer: may differ between ranks (running statistics); where it does, each rank's own copy is kept.
        """
        columns = Columns()
        number, flags = _group(group), lib.LG_TENSOR_BUFFER if buffer else 0
        with self._noted():
            for name, array in tensors.items():
                columns.add(name, arrays.describe(name, array), group=number, flags=flags)
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
    ) -> None:
        """Adds one tensor, or the part of it that this rank holds.

        Args:
            shape: the global one, in elements, where the array is a part.
            layout: which part of the tensor the array is.
            flat_offset: with a flat layout: where the tensor begins in the buffer, in elements; the array is the
                rank's range of it, of one dimension.
            group, buffer: as for :meth:`tensors`.
        """
        with self._noted():
            memory = arrays.describe(name, array)
            if layout is not None:
                if shape is None:
                    raise InvalidError(f'"{name}": a part under a layout needs the tensor\'s global shape')
                check_part(name, memory, shape, layout, flat_offset, self._session.rank)
            elif shape is not None and tuple(shape) != memory.shape:
                raise MismatchError(
                    f'"{name}": the array is {list(memory.shape)}, its global shape is to be {list(shape)}; '
                    "give the layout of which it is a part"
                )
            columns = Columns()
            columns.add(
                name,
                memory,
                group=_group(group),
                flags=lib.LG_TENSOR_BUFFER if buffer else 0,
                shape=shape,
                layout=layout,
                flat_offset=flat_offset,
            )
            self._add(columns)

    def boxes(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        boxes: list[tuple[tuple[int, ...], Any]],
        *,
        group: Group = "model",
    ) -> None:
        """Adds boxes of a tensor that follow no rule.

        Args:
            dtype: name of the safetensors format.
            shape: global, in elements.
            boxes: offset (elements) and array of each box that this rank holds.
        """
        from lastgood import dtypes

        with self._noted():
            t = ffi.new("lg_tensor *")
            t.size, t.dtype, t.group, t.ndim = ffi.sizeof("lg_tensor"), dtypes.number(dtype), _group(group), len(shape)
            text, dims = ffi.new("char[]", text_bytes(name)), ffi.new("uint64_t[]", [*shape, 0])
            t.name, t.shape = text, dims
            raw_boxes = ffi.new("lg_box[]", max(len(boxes), 1))
            keep: list[Any] = []
            for raw, (offset, array) in zip(raw_boxes, boxes, strict=False):
                memory = arrays.describe(name, array)
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
            t.boxes, t.n_boxes = raw_boxes, len(boxes)
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
        try:
            with self._session.pointer:
                call(lib.lg_save_commit, self._pointer.consume(), out)
        finally:
            self._keep.clear()
        self.info = SaveInfo(
            int(out.step),
            _generation(out.generation),
            text_of(out.folder),
            int(out.bytes_written),
            int(out.bytes_total),
            bool(out.skipped),
            int(out.unshared),
            float(out.seconds),
        )
        return self.info

    def abort(self) -> None:
        """Forgets it, on this rank. Where other ranks commit, they wait for this one in vain: use :meth:`fail` and
        :meth:`commit` instead.
        """
        lib.lg_save_abort(self._pointer.consume())
        self._keep.clear()

    def __enter__(self) -> Save:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        if error is None:
            if self.info is None:
                self.commit()
            return
        try:
            if self._session.world == 1:
                self.abort()
            else:  # brings the error to the other ranks, which are on their way to commit
                self.fail(error)
                self.commit()
        except Error:
            pass  # the first error counts; or it was committed in the block

    # ---------------------------------------------------------------------------

    def _add(self, columns: Columns) -> None:
        self._keep.append(columns.keep)
        with self._pointer as save:
            columns.save(save)

    def _noted(self) -> _Noted:
        return _Noted(self)


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
