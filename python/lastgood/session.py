# SPDX-License-Identifier: Apache-2.0
"""A training run's sessions: open, resume, save, close, on any number of ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from lastgood._core import ffi, lib
from lastgood.background import Kept, KeyValues, KeyValueStore, note
from lastgood.checkpoint import Checkpoint, Generation
from lastgood.comm import Communicator
from lastgood.device import Staging
from lastgood.errors import (
    ConflictError,
    EmptyRootError,
    Error,
    InvalidError,
    NoGoodCheckpoint,
    StateError,
    Status,
    TimeoutError,
    call,
    finish,
    hold,
    new_error,
    status_of,
    text_of,
)
from lastgood.handles import Pointer, nothing, path_bytes, text_bytes
from lastgood.load import Load
from lastgood.saving import LaunchOptions, Save, SaveInfo, WhenBusy, generation_of, save_info

Phase = Literal["none", "staging", "writing", "waiting", "committed", "failed"]
_PHASES: tuple[Phase, ...] = get_args(Phase)
# How long a wait may take before Python looks for signals, seconds.
_SLICE = 0.1
Targets = Callable[[Load], Any] | Mapping[str, Any] | None


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
    saves_skipped: int  # launches that found one under way and skipped
    skips_in_a_row: int  # since the last launch that went
    phase: Phase  # of this rank's newest save in the background; only "committed" means that it is durable
    phase_step: int  # its step
    staging_bytes: int  # memory kept for copies now


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


class Session:
    """A run's hold on a root. *Collective*: all ranks of the communicator open, resume, save and close alike. Opening
    claims the root: a session that was opened earlier and still runs fails its next save as superseded.

    Args:
        root: path or URI of the folder that holds the run's checkpoints; made if its parent exists.
        comm: the ranks; None: this process alone.
        new_run: save into a root with checkpoints that this session does not resume from, as a new run.
        read_only: claim and write nothing.
        plain: for one save by itself: a :class:`ProtectedError` where the root was last claimed without this, by a
            training run, which would lose it.
        take_over: with ``plain``: even there.
        timeout: the longest wait for other ranks, seconds.
        keep_last: retention: keep the last N; 0: all.
        keep_every: and every K-th step; 0: none.
        check_replicas: compare declared replicas at every K-th save; 0: never.
        block_bytes: what one checksum covers: a power of two from 4096 to 64 MiB.
        buffer_bytes: cap of memory for data under way, this process; at least 1 MiB.
        domain: failure domain of this rank; None: the host's name.
        staging_bytes: cap of the copy of this rank's part that a launch needs; 0: one copy. What does not fit is
            copied in windows as the files are written. The memory that CUDA devices copy to has the same cap of its
            own; what does not fit there is copied before the launch goes on. A resume reads what goes to devices into
            host memory of at most this at a time (0: 256 MiB).
        kv: how ranks learn of each other's saves in the background; None: through files in the folder that is being
            written. Any object with ``set`` and ``get`` (:class:`KeyValueStore`), such as
            :class:`lastgood.pytorch.StoreKeys`.

    A session belongs to the process that opened it: in a child of fork (a worker of a DataLoader) its functions raise
    :class:`StateError`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        comm: Communicator | None = None,
        *,
        new_run: bool = False,
        read_only: bool = False,
        plain: bool = False,
        take_over: bool = False,
        timeout: float = 600.0,
        keep_last: int = 0,
        keep_every: int = 0,
        check_replicas: int = 0,
        block_bytes: int = 65536,
        buffer_bytes: int = 64 << 20,
        domain: str | None = None,
        staging_bytes: int = 0,
        kv: KeyValueStore | None = None,
    ) -> None:
        self.timeout = timeout
        self.compares = check_replicas != 0
        self.staging = Staging(staging_bytes)
        self.rank = 0 if comm is None else comm.rank
        self.world = 1 if comm is None else comm.size
        comm_pointer = None if comm is None else comm.pointer()
        o = ffi.new("lg_session_options *")
        o.size = ffi.sizeof("lg_session_options")
        o.flags = (
            (lib.LG_SESSION_NEW_RUN if new_run else 0)
            | (lib.LG_SESSION_READ_ONLY if read_only else 0)
            | (lib.LG_SESSION_PLAIN if plain else 0)
            | (lib.LG_SESSION_TAKE_OVER if take_over else 0)
        )
        try:
            o.deadline_ms = max(1, round(timeout * 1000))
            o.keep_last, o.keep_every, o.check_replicas = keep_last, keep_every, check_replicas
            o.block_bytes, o.buffer_bytes, o.staging_bytes = block_bytes, buffer_bytes, staging_bytes
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
        keys = None if kv is None else KeyValues(kv)
        o.kv = ffi.NULL if keys is None else keys.raw
        out = ffi.new("lg_session **")
        if comm_pointer is None:
            call(lib.lg_session_open, path_bytes(root), o, out)
        else:
            with comm_pointer as c:
                o.comm = c
                call(lib.lg_session_open, path_bytes(root), o, out)
        self._store = store_pointer
        self._kept = Kept(store_pointer, keys)
        self._kept.staging = self.staging
        self._pointer = Pointer(out[0], self._kept.finalize, keep=(comm_pointer, store_pointer))
        self._closed = False

    @property
    def pointer(self) -> Pointer:
        """The handle, for other parts of the package."""
        if os.getpid() != self._kept.pid:  # before the lock, which another thread of the parent may have held
            raise StateError("the session belongs to the process that opened it; a child made by fork cannot use it")
        return self._pointer

    @property
    def epoch(self) -> int:
        """The owner epoch that it claimed; 0 if read-only."""
        with self.pointer as s:
            return int(lib.lg_session_epoch(s))

    def status(self) -> SessionStatus:
        """What it has done so far."""
        out = self._status()
        last = generation_of(out.last_committed)
        return SessionStatus(
            int(out.saves_committed),
            int(out.saves_failed),
            int(out.removed),
            int(out.removal_failures),
            text_of(out.last_removal_error),
            last if last.epoch else None,
            int(out.saves_skipped),
            int(out.skips_in_a_row),
            _PHASES[out.phase],
            int(out.phase_step),
            int(out.staging_bytes) + self.staging.bytes_held,
        )

    def _status(self) -> Any:
        out = ffi.new("lg_session_status *")
        with self.pointer as s:
            call(lib.lg_session_get_status, s, out)
        return out

    def close(self) -> None:
        """Ends it; every rank closes its own. Waits for a save in the background, at most one and a half times the
        session's timeout, and raises its error if no call has yet. A session that the program leaves open is closed
        when the interpreter ends.

        Raises:
            TimeoutError: the save has not ended; the message says what may be lost.
        """
        if self._closed or os.getpid() != self._kept.pid:
            return
        self.drain(self.timeout / 2)
        self._closed = True
        status, err = self._kept.close(self._pointer.consume())
        if status != Status.TIMEOUT:  # else it is still read
            self.staging.close()
        finish(status, err)

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
        return self._begin(step, if_new, finite, aliases_once, None)

    def _begin(self, step: int, if_new: bool, finite: bool, aliases_once: bool, launch: LaunchOptions | None) -> Save:
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
        with self.pointer as s:
            call(lib.lg_save_begin, s, step, options, out)
        return Save(self, Pointer(out[0], lib.lg_save_abort, keep=self._pointer), launch)

    def launch(
        self,
        step: int,
        *,
        when_busy: WhenBusy = "wait",
        max_skips: int = 10,
        check_sources: bool = False,
        copy_threads: int = 0,
        lazy_threads: int = 0,
        if_new: bool = False,
        finite: bool = False,
        aliases_once: bool = False,
    ) -> Save:
        """Starts to describe a save that is written in the background::

            with session.launch(step) as save:
                save.tensors(model.state_dict(), lazy=True)
                save.state("samples", samples)
            loss.backward()  # reads the parameters
            session.fence()  # before they change
            optimizer.step()

        Leaving the block returns when all that is not lazy has been copied; ``save.launched`` says what was done.
        What goes wrong later is raised by the next collective call (launch, commit, wait, resume) on every rank, or by
        :meth:`close`: that call has then done nothing else, and can be made again with a save described anew. The
        checkpoint before stays.

        Args:
            when_busy: what to do when the save before is still under way on any rank: ``"wait"`` for it, at most half
                of the session's timeout, or ``"skip"`` this one, on all ranks. Equal on all ranks.
            max_skips: after so many skips in a row it waits.
            check_sources: for finding errors: :meth:`fence` raises :class:`ConflictError` with the name of a lazy
                tensor that was changed before, and the save fails. Costs two passes over the memory.
            copy_threads: threads that copy before the launch returns; 0: one a processor, at most 8.
            lazy_threads: threads that copy in the background; 0: one.
            if_new, finite, aliases_once: as for :meth:`save`.
        """
        options = LaunchOptions(when_busy, max_skips, check_sources, copy_threads, lazy_threads)
        options.struct()
        return self._begin(step, if_new, finite, aliases_once, options)

    @property
    def staged(self) -> bool:
        """Whether all is copied that the last launch wanted: lazy tensors may change."""
        out = ffi.new("int *")
        with self.pointer as s:
            call(lib.lg_session_staged, s, out)
            if out[0]:
                self._kept.memory.clear()
        return bool(out[0]) and self.staging.done

    def fence(self, timeout: float | None = None) -> None:
        """Waits until all is copied that the last launch wanted: lazy tensors may change afterwards. Not collective.
        For tensors of CUDA devices their current streams wait, and this process does not. A keyboard interrupt ends the wait and changes nothing: they may not change yet.

        Args:
            timeout: seconds; None: the session's.

        Raises:
            TimeoutError: the tensors are still being read.
            ConflictError: with ``check_sources``: a lazy tensor was changed.
        """
        timeout = self.timeout if timeout is None else timeout
        self.staging.fence()
        if not self._fenced(time.monotonic() + timeout):
            step = int(self._status().phase_step)
            raise TimeoutError(
                f"the save of step {step} still reads the trainer's memory after {timeout:g} s: tensors must not be "
                "changed yet"
            )

    def refuse(self, status: Status, message: str) -> bool:
        """Says that lazy tensors were changed too early, so that the save under way may be torn. Not collective.

        Returns:
            Whether the save fails, with this error, which the next collective call raises on every rank. Otherwise it
            was too late, and the checkpoint should be removed (``roots.remove(…, last=True)``).
        """
        out = ffi.new("int *")
        with self.pointer as s:
            call(lib.lg_session_refuse, s, int(status), text_bytes(message), out)
        return bool(out[0])

    def wait(self, timeout: float | None = None) -> SaveInfo | None:
        """Waits until the save under way is durable on all ranks, or raises why it failed, the same on every rank.
        *Collective.* A keyboard interrupt ends the wait; the save stays under way.

        Args:
            timeout: seconds; None: the session's.

        Returns:
            The session's newest save that was launched and committed; None if there is none.

        Raises:
            TimeoutError: names the ranks and what they are at; the save stays under way.
        """
        end = time.monotonic() + (self.timeout if timeout is None else timeout)
        self.drain(end - time.monotonic())
        out = ffi.new("lg_save_info *")
        with self.pointer as s:
            call(lib.lg_session_wait, s, max(1, round((end - time.monotonic()) * 1000)), out)
        return save_info(out) if out.generation.epoch else None

    def _fenced(self, end: float) -> bool:
        """Waits until all is copied, in slices between which Python looks for signals."""
        while True:
            err = new_error()
            left = end - time.monotonic()
            with self.pointer as s:
                status = lib.lg_session_fence(s, max(1, round(min(left, _SLICE) * 1000)), err)
                if status != Status.TIMEOUT:
                    self._kept.memory.clear()
            if status != Status.TIMEOUT:
                finish(status, err)
                return True
            if left <= 0:
                return False

    def drain(self, seconds: float) -> bool:
        """Waits until nothing is under way on this rank, and leaves it to a collective call to say how it went.

        A function for other parts of the package. The library's own waits cannot be interrupted.
        """
        end = time.monotonic() + seconds
        if not self._under_way():
            return True
        try:
            if not self._fenced(end):
                return False
        except ConflictError:
            pass  # the save has failed
        pause = 0.001
        while self._under_way():
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.02)
        return True

    def _under_way(self) -> bool:
        return _PHASES[self._status().phase] in ("staging", "writing", "waiting")

    def make_room(self, options: LaunchOptions) -> None:
        """Before a launch: waits for the save before, if the launch would."""
        if options.when_busy == "wait" or self._status().skips_in_a_row >= options.max_skips:
            self.drain(self.timeout / 4)

    @contextlib.contextmanager
    def reading(self, memory: list[Any]) -> Iterator[None]:
        """Keeps memory that a launch reads until it is copied, whatever happens in the block."""
        note(self)
        self._kept.memory.extend(memory)
        try:
            yield
        finally:
            self.staged  # noqa: B018

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

        calls = _Resume(describe, self.rank, self.staging.cap)
        handle = ffi.new_handle(calls)
        options = ffi.new("lg_resume_options *")
        options.size = ffi.sizeof("lg_resume_options")
        options.flags = (
            lib.LG_RESUME_ROUNDS | (lib.LG_RESUME_STRICT if strict else 0) | (0 if verify else lib.LG_RESUME_UNVERIFIED)
        )
        keep = []
        if step is not None:
            keep.append(ffi.new("uint64_t *", step))
            options.step = keep[-1]
        if generation is not None:
            keep.append(ffi.new("lg_generation *", tuple(generation)))
            options.generation = keep[-1]
        out, err = ffi.new("lg_resume_result **"), new_error()
        self.drain(self.timeout / 4)
        with self.pointer as s:
            status = lib.lg_resume(s, options, lib.lgpy_targets, handle, out, err)
        skipped: tuple[Skipped, ...] = ()
        result = out[0]
        if result != ffi.NULL:
            owner = Pointer(result, lib.lg_resume_result_free, keep=self._store)
            skipped = tuple(
                Skipped(
                    int(k.step), generation_of(k.generation), text_of(k.folder), status_of(k.status), text_of(k.reason)
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
            generation_of(result.generation),
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


class _Resume:
    """What the library calls during a resume."""

    def __init__(self, describe: Callable[[Load], Any] | None, rank: int, staging_bytes: int) -> None:
        self.describe = describe
        self.rank = rank
        self.staging_bytes = staging_bytes
        self.load: Load | None = None  # the last one, which was loaded


@ffi.def_extern(name="lgpy_targets")  # type: ignore[untyped-decorator]
def _call_targets(raw: Any, arg: Any, err: Any) -> int:
    calls: _Resume = ffi.from_handle(arg)
    if calls.describe is None:
        return 0
    if lib.lg_load_round(raw) > 0:
        assert calls.load is not None
        return _hand_over(calls.load, raw, err)
    calls.load = None
    checkpoint = Checkpoint.of(Pointer(lib.lg_load_checkpoint(raw), nothing))
    try:
        load = Load(checkpoint, staging_bytes=calls.staging_bytes)
        load.rank = calls.rank
        calls.describe(load)
        calls.load = load
        return _hand_over(load, raw, err)
    except BaseException as why:  # KeyboardInterrupt too
        return hold(why, err)
    finally:
        checkpoint.close()


def _hand_over(load: Load, raw: Any, err: Any) -> int:
    try:
        if load.hand_over(raw):
            lib.lg_load_again(raw)
    except BaseException as why:
        return hold(why, err)
    return 0
