# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a PyTorch training run in a few lines: when to save, how to go on, when to stop."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from lastgood import errors, roots
from lastgood.checkpoint import Generation
from lastgood.durations import seconds_of
from lastgood.errors import (
    CommunicatorError,
    ConflictError,
    Error,
    InvalidError,
    StateError,
    Status,
    SupersededError,
    UnsupportedError,
)
from lastgood.parts import Ranks, Restoring, Saving
from lastgood.preempt import Agreement, Decision, Requeue, check_requeue
from lastgood.preempt import requeue as start_again
from lastgood.progress import Progress, logger
from lastgood.ranks import communicator, ranks_of, store_keys
from lastgood.run import Run
from lastgood.saving import LaunchInfo, Save, SaveInfo, WhenBusy
from lastgood.session import Session, SessionStatus
from lastgood.staging import Fences, before_change, name_of, with_gradients, wrapped

if TYPE_CHECKING:
    from lastgood.background import KeyValueStore
    from lastgood.comm import Communicator
    from lastgood.load import Load
    from lastgood.state import State

Background = Literal["lazy", "eager", "off"]
Attach = Mapping[str, bytes | str] | Callable[[], Mapping[str, bytes | str]]

# How many names a message holds.
_NAMES = 5
# What a scheduler leaves a job that it ends, unless it is told otherwise; seconds.
_GRACE = 30.0


class Checkpointer:
    """Saves a training run as it goes, and takes it up again where it was::

        state = lastgood.State(model=model, optim=optimizer, scheduler=scheduler, loader=loader)
        with lastgood.Checkpointer("runs/a", every=500, keep=3, time_limit="4h") as ckpt:
            run = ckpt.resume(state, init=lambda: model.init_weights())
            for batches in run.steps(100_000, accumulate=4):
                for batch in batches:
                    (loss_of(model, batch) / 4).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                ckpt.step(state)

    *Collective*: all ranks make it, resume, step and save alike. It claims the root: a run that was started earlier and
    still lives fails its next save.

    Args:
        root: folder that holds the run's checkpoints; made if its parent exists.
        every: save after so many steps, or so often by rank 0's clock (``"20min"``, ``"1h30min"``); None: only when
            :meth:`save` is called, when the ranks agree to stop, and at the end of :meth:`Run.steps`.
        keep: keep the last N checkpoints; 0: all.
        keep_every: and each whose step is a multiple of K; 0: none.
        time_limit: stop in time for this, counted from now: seconds, ``"4h"``, ``"1-12:00:00"``.
        grace: how long the last step and save may take, before the time limit or after a signal: seconds, ``"90s"``;
            ``"auto"``: 30 s, and at most a quarter of the time limit.
        comm: the ranks; None: those of torch.distributed if it is initialised, through a gloo group that is made here.
        mesh: a DeviceMesh over all ranks, with names, where not all of them are data-parallel.
        data_axes: names of the mesh's axes along which ranks take different samples; None: those whose names begin
            with dp, ddp, fsdp, hsdp, replicate, shard or data.
        exact: what would keep a resumed run from computing the same bits is an error.
        background: ``"lazy"``: parameters and optimizer state are copied during the next forward and backward pass;
            ``"eager"``: all is copied before a step returns; ``"off"``: a step returns when the checkpoint is durable.
        when_busy: a save that is due while the one before is under way waits for it (``"wait"``), or is left out
            (``"skip"``), at most ``max_skips`` times in a row.
        max_skips: see there.
        check_sources: for finding errors: digests lazy tensors twice; one that was changed too early is an error that
            names it, and its save fails.
        check_replicas: compare replicas at every K-th save; 0: never.
        new_run: start a new run in a root with checkpoints, of which :meth:`resume` takes none.
        finite: refuse to save NaN and infinity.
        timeout: the longest wait for other ranks, seconds or ``"10min"``.
        kv: how ranks learn of each other's saves: None: through files; ``"store"``: torch.distributed's store; or any
            object with ``set`` and ``get``.
        staging_bytes: cap of the copy that a save in the background needs; 0: one copy of this rank's part.
        buffer_bytes: cap of memory for data under way.
        signals: names of those that ask for a last save and the end; () for none. docs/preemption.md.
        requeue: what follows when the ranks have stopped before the end: ``"scontrol"``: Slurm starts the job again; a
            number: this process leaves with it as exit code; None: nothing.
        attach: files to lie in each step folder, contents by name, or a function that returns them. ``config.json`` of
            a transformers model is attached by itself.
        progress: show a line in the terminal; None: if there is one. Rank 0 only.

    Attributes:
        root: as given.
        session: what saves and loads below this.
        ranks: who this is, and along which axes.
        completed: completed optimizer steps.
        stopping: whether the ranks have agreed to stop and are done with the last save: leave the loop.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every: int | str | None = None,
        keep: int = 0,
        keep_every: int = 0,
        time_limit: float | str | None = None,
        grace: float | str = "auto",
        comm: Communicator | None = None,
        mesh: Any = None,
        data_axes: Sequence[str] | None = None,
        exact: bool = True,
        background: Background = "lazy",
        when_busy: WhenBusy = "wait",
        max_skips: int = 10,
        check_sources: bool = False,
        check_replicas: int = 0,
        new_run: bool = False,
        finite: bool = False,
        timeout: float | str = 600.0,
        kv: KeyValueStore | Literal["store"] | None = None,
        staging_bytes: int = 0,
        buffer_bytes: int = 64 << 20,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        requeue: Requeue = None,
        attach: Attach | None = None,
        progress: bool | None = None,
    ) -> None:
        if background not in ("lazy", "eager", "off"):
            raise InvalidError(f'background is {background!r}, not "lazy", "eager" or "off"')
        if when_busy not in ("wait", "skip"):
            raise InvalidError(f'when_busy is {when_busy!r}, not "wait" or "skip"')
        if kv is not None and kv != "store" and not (hasattr(kv, "set") and hasattr(kv, "get")):
            raise InvalidError(f'kv is {kv!r}, not "store", an object with set and get, or None')
        if not (attach is None or callable(attach) or isinstance(attach, Mapping)):
            raise InvalidError(f"attach is {attach!r}, no mapping from names to contents, and no function of one")
        keep, keep_every = _count("keep", keep), _count("keep_every", keep_every)
        max_skips, check_replicas = _count("max_skips", max_skips), _count("check_replicas", check_replicas)
        timeout = seconds_of("timeout", timeout)
        self.root = os.fspath(root)
        self._every, every_seconds = _every(every)
        limit = None if time_limit is None else seconds_of("time_limit", time_limit)
        self._exact, self._background, self._finite = exact, background, finite
        self._when_busy: WhenBusy = when_busy
        self._max_skips, self._check_sources, self._new_run = max_skips, check_sources, new_run
        check_requeue(requeue)
        self._timeout, self._requeue, self._attach = timeout, requeue, attach
        self.completed = 0
        self.stopping = False
        self._total: int | None = None
        self._state: State | None = None  # the one that was used last
        self._loader: Any = None  # the one that knows its ranks
        self._flying: _Flight | None = None  # a launch whose end was not seen yet
        self._polled = 0  # grows, though a resume may go back
        self._checked = not exact
        self._closed = False
        self._pid = os.getpid()
        with contextlib.ExitStack() as ends:  # unwound from below: what is needed longest comes first
            comm = communicator(comm, timeout, ends)
            self.ranks: Ranks = ranks_of(comm, mesh, data_axes)
            self._agreement = Agreement(
                self.ranks,
                signals=signals,
                time_limit=limit,
                grace=_grace(grace, limit),
                every_seconds=every_seconds,
                timeout=timeout,
            )
            ends.callback(self._agreement.close)
            self.session = Session(
                root,
                comm,
                new_run=new_run,
                timeout=timeout,
                keep_last=keep,
                keep_every=keep_every,
                check_replicas=check_replicas,
                buffer_bytes=buffer_bytes,
                staging_bytes=staging_bytes,
                kv=store_keys(comm) if kv == "store" else kv,
            )
            ends.callback(self.session.close)
            self._fences = Fences(self.session.fence, self._torn)
            ends.callback(self._fences.close)
            self._progress = Progress(progress if self.ranks.rank == 0 else False)
            ends.callback(self._progress.close)
            self._ends = ends.pop_all()

    def __repr__(self) -> str:
        saved = "" if self._closed else f", {self.session.status().saves_committed} saved"
        where = f"rank {self.ranks.rank} of {self.ranks.world}, " if self.ranks.world > 1 else ""
        return f"<Checkpointer {self.root!r}, {where}step {self.completed}{saved}{', closed' * self._closed}>"

    # ------------------------------------------------------------------- the end

    def close(self) -> None:
        """Ends it; every rank closes its own. Waits for a save under way, and raises its error if no call has yet."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with self._ends:
            self.session.drain(self._timeout / 2)
            self._look()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            self.close()
        except Error as why:
            if kind is None:  # else the first error counts
                raise
            self._say(logging.ERROR, "rank %d: %s", self.ranks.rank, why)

    # ------------------------------------------------------------------ resuming

    def resume(
        self,
        state: State,
        init: Callable[[], Any] | None = None,
        *,
        step: int | None = None,
        generation: Generation | None = None,
        strict: bool = False,
        optional: Sequence[str] = (),
    ) -> Run:
        """Takes the run up from the newest good checkpoint; the state's tensors are read into the memory they have.
        *Collective*: all ranks take the same one, and where one fails all do.

        Args:
            state: what to restore. After an error its contents are undefined.
            init: called instead where the root holds no checkpoint, on all ranks.
            step, generation: take this one.
            strict: only the newest: that it is damaged is an error.
            optional: names that the checkpoint or the state may lack, with all below them: keys of the state
                (``"ema"``, ``"scheduler"``), layers and parameters (``"head"``). What lacks is noted, what both have is
                restored: the list may stay in the program. Equal on all ranks.

        Raises:
            NoGoodCheckpoint: there are checkpoints and none is good: a run never starts over silently.
            NotFoundError: ``step`` or ``generation`` asks for one that is not there.
            MissingError: exact, and the checkpoint lacks something of the state, or has something that is in no rank's
                state: a scheduler, an optimizer, a layer.
            MismatchError: the checkpoint is of another state.
        """
        names = _optional(optional)
        self._use(state)
        before_change()
        tried: list[Restoring] = []

        def describe(load: Load) -> None:
            found = load.checkpoint
            seed = hashlib.sha256(f"{found.run_id} {found.generation}".encode()).digest()[:8]
            tried[:] = [Restoring(load, self.ranks, self._exact, int.from_bytes(seed, "little"), names, self._timeout)]
            state.describe(tried[0])

        resumed = None
        if self._new_run and not (step is None and generation is None):
            raise InvalidError("resume is to take a checkpoint, but new_run=True starts a run that takes none")
        if not self._new_run:
            resumed = self.session.resume(describe, step=step, generation=generation, strict=strict)
        if resumed is None:
            if init is not None:
                self.together("init", init)
            run = Run(self, None, new=self._new_run)
        else:
            restoring = tried[0]
            restoring.load.checkpoint = resumed.checkpoint

            def restore() -> dict[str, list[str]]:
                state.restore(restoring)
                return {"notes": restoring.notes, "not_restored": restoring.not_restored}

            told = self.together("restoring the state", restore)
            self._fences.restored(restoring.load.written, _buffers(state), self._overwritten)
            notes = _union(told, "notes", "rank {}: {}")
            run = Run(self, resumed, notes, _union(told, "not_restored", "{1}"))
        self.completed = run.step
        self.stopping = False
        if self.ranks.rank == 0:
            noteworthy = run.skipped or run.notes or run.not_restored
            self._say(logging.WARNING if noteworthy else logging.INFO, "%s", run)
        return run

    # -------------------------------------------------------------------- a step

    def step(
        self,
        state: State,
        *,
        step: int | None = None,
        samples: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """One more optimizer step is done. Saves if a save is due; when the ranks have agreed to stop, saves, waits until
        that is durable, and sets :attr:`stopping`. Call it once a step, behind the update and ``zero_grad``.

        Args:
            state: what the run is made of.
            step: how many are done now; None: one more. Equal on all ranks.
            samples: how many samples of the state's loader all ranks together have used in it; None: those of the
                batches that the loader has handed out for it.
            metrics: numbers, or tensors of one element, by name: kept in the checkpoint, as rank 0 has them. Tensors
                are read only when a save is due.

        Raises:
            Error: the save before has failed, in the background; the same on every rank. Nothing else was done but the
                step is counted, so that training may go on.
            StateError: exact, and parameters have gradients, which a save would lose.
            SystemExit: ``requeue`` is an exit code and the ranks have agreed to stop.
        """
        self._use(state)
        done = self._next(step)
        if not self._checked:  # at the first step already, not when a save is due
            _refuse_gradients(state)
            self._checked = True
        self._count(samples)
        before, self.completed = self.completed, done
        self._fences.step_done()
        if self.stopping:
            self._say(logging.WARNING, "step %d was done after the ranks had agreed to stop: leave the loop", done)
        self._polled = max(done, self._polled + 1)
        decision = self._agreement.poll(self._polled)
        self._look()
        if decision.stop and not self.stopping:
            self._stop(state, decision, metrics)
        else:
            last = self._total is not None and done >= self._total
            due = self._every is not None and done // self._every > before // self._every
            if (decision.save and not decision.stop) or due or last:
                self._save(state, metrics, skip=self._when_busy == "skip" and not last)
        self._progress.update(done, self._total, self._phase())

    def save(self, state: State, *, step: int | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Saves now, whatever is due. *Collective.* A step whose checkpoint is there already is a success: nothing is
        written. :meth:`wait` waits until it is durable.

        Args:
            step: completed optimizer steps; None: as counted by :meth:`step`.
            metrics: as for :meth:`step`.
        """
        self._use(state)
        if step is not None and step != self.completed:
            self.completed = self._next(step)
        self._save(state, metrics, skip=False)

    def fence(self) -> None:
        """Waits until no tensor of the last save is being read. Call it before anything but an optimizer's update or
        ``load_state_dict`` writes to parameters or optimizer state: swapping averaged weights in, clamping weights.
        """
        self._fences.fence()

    def wait(self, timeout: float | None = None) -> SaveInfo | None:
        """Waits until the save under way is durable on all ranks, or raises why it failed, the same on every rank.
        *Collective.*

        Args:
            timeout: seconds; None: the checkpointer's.

        Returns:
            The newest save; None if there was none in the background.
        """
        self._fences.before_change()
        info = self.session.wait(timeout)
        self._look()
        return info

    def poke(self) -> bool:
        """Looks for signals and time limits between two steps: in a long evaluation, say. Takes microseconds, and is
        not collective.

        Returns:
            Whether the run is to stop. Who leaves a loop because of that must call it equally often on all ranks, and
            then do a step: :meth:`step` saves.
        """
        return self._agreement.poke().stop

    def status(self) -> SessionStatus:
        """What was saved so far, and what the newest save is at."""
        return self.session.status()

    def _removed(self, step: int, where: str) -> str:
        """What came of removing a checkpoint that may be torn."""
        try:
            roots.remove(where, last=True)
        except errors.NotFoundError:
            return ""  # it failed, or another rank was first
        except Error as why:
            return f"; the checkpoint {where} of step {step} may be torn: do not resume from it ({why})"
        return f"; the checkpoint of step {step} may have been torn and was removed"

    # ------------------------------------ for the loop of Run.steps, and check_resume

    def aim(self, total: int) -> None:
        """The step at which the run is done, which is always saved."""
        self._total = total

    def batches(self, accumulate: int) -> Iterator[list[Any]]:
        """Of the state's loader, ``accumulate`` a step. Without a loader: empty lists."""
        if self._loader is None:
            return iter(list, None)
        found: Iterator[list[Any]] = self._loader.batches(accumulate)
        return found

    def count(self, state: State) -> None:
        """One more step is done, which is not to be saved: the rest of what :meth:`step` does."""
        self._use(state)
        self._count(None)
        self.completed += 1
        self._fences.step_done()

    def describe(self, save: Save, state: State, metrics: Mapping[str, Any] | None = None) -> None:
        """Adds the state to a save. What raises here fails it on all ranks."""
        self._use(state)
        if self._exact:
            _refuse_gradients(state)
        lazy = self._fences.chooser(state.optimizers if self._background == "lazy" else ())
        state.save(Saving(save, self.completed, self.ranks, lazy))
        if self.ranks.rank == 0:
            if metrics is not None:
                save.state("metrics", plain_metrics(metrics))
            for name, data in self._attached(state).items():
                save.attach(name, data)
        if self._background == "lazy":
            self._fences.launched(lazy.chosen)

    def together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Does something on every rank. Where one fails, all raise.

        Returns:
            What each got, by rank; values of JSON, else None.
        """
        error: Exception | None = None
        mine: dict[str, Any] = {}
        try:
            result = work()
            mine["result"] = result if isinstance(result, (bool, int, float, str, list, dict)) else None
        except Exception as why:
            error = why
            text = str(why) if isinstance(why, Error) else f"{type(why).__name__}: {why}"
            mine["error"] = [int(why.status if isinstance(why, Error) else Status.CANCELLED), text]
        comm = self.ranks.comm
        if comm is None:
            if error is not None:
                raise error
            return [mine["result"]]
        all_ranks = [json.loads(part) for part in comm.all_gather(json.dumps(mine).encode(), self._timeout)]
        if error is not None:
            raise error
        for rank, other in enumerate(all_ranks):
            if "error" in other:
                raise errors.of_status(other["error"][0], f"rank {rank}: {what}: {other['error'][1]}", rank)
        return [other["result"] for other in all_ranks]

    # ---------------------------------------------------------------------------

    def _use(self, state: State) -> None:
        if self._closed:
            raise StateError(f"the checkpointer of {self.root} is closed")
        if os.getpid() != self._pid:
            raise StateError("the checkpointer belongs to the process that made it; a child made by fork cannot use it")
        if not all(hasattr(state, what) for what in ("loader", "modules", "optimizers", "parts", "restore")):
            raise InvalidError(f"a {type(state).__name__} is no state: give a lastgood.State(model=model, …)")
        loader = _position(state)
        if loader is not None and loader is not self._loader:
            loader.bind(self.ranks)
        self._loader = loader
        if state is not self._state:
            self._fences.watch(state.modules, state.optimizers)
            self._state = state

    def _next(self, step: int | None) -> int:
        if step is None:
            return self.completed + 1
        if step <= self.completed:
            raise InvalidError(
                f"step is {step}, but {self.completed} are done already: step counts completed optimizer steps of the "
                "whole run, so a loop goes over range(run.step, total) and gives step=i + 1"
            )
        return step

    def _count(self, samples: int | None) -> None:
        if self._loader is None:
            if samples is not None:
                raise InvalidError("samples is given, but the state has no loader: State(..., loader=loader)")
            return
        used = self._loader.last_samples if samples is None else samples
        if samples is None and not used:
            raise InvalidError(
                "the loader does not know of any batch that was used for this step: take batches from run.steps(), or "
                "say how many samples all ranks together have used: ckpt.step(state, samples=n)"
            )
        self._loader.used(used)

    def _save(self, state: State, metrics: Mapping[str, Any] | None, *, skip: bool) -> None:
        step = self.completed
        self._fences.watch(state.modules, state.optimizers)
        if self._background == "off":
            with self.session.save(step, if_new=True, finite=self._finite) as save:
                self.describe(save, state, metrics)
            if save.info is not None and not save.info.skipped:
                self._agreement.saved(save.info.seconds)
                if self.ranks.rank == 0:
                    self._say(logging.INFO, "step %d is saved (%.1f s)", step, save.info.seconds)
        else:
            launch = self.session.launch(
                step,
                when_busy="skip" if skip else "wait",
                max_skips=self._max_skips,
                check_sources=self._check_sources,
                if_new=True,
                finite=self._finite,
            )
            try:
                with launch as save:
                    self.describe(save, state, metrics)
            except Error:
                self._look()
                raise
            if save.launched is not None:
                self._note(save.launched)
        self._new_run = False

    def _note(self, launched: LaunchInfo) -> None:
        """A launch has come back."""
        if launched.skipped is not None:
            self._fences.forget()
        if launched.skipped == "in flight":
            if self.ranks.rank == 0:
                text = "the save of step %d is left out: the one before is under way"
                self._say(logging.WARNING, text, launched.step)
            return
        if self._flying is not None:  # a launch goes when the one before is durable
            self._landed(self._flying)
            self._flying = None
        if launched.skipped is not None:
            return
        now = time.monotonic()
        self._flying = _Flight(launched.step, launched.generation, now - launched.seconds, now)
        if self.ranks.rank == 0:
            text = "saving step %d in the background; training went on after %.3f s"
            self._say(logging.INFO, text, launched.step, launched.seconds)

    def _attached(self, state: State) -> dict[str, bytes]:
        given = self._attach() if callable(self._attach) else self._attach or {}
        found = {name: data.encode() if isinstance(data, str) else bytes(data) for name, data in given.items()}
        if "config.json" not in found:
            for module in wrapped(state.modules.get("model")):
                to_text = getattr(getattr(module, "config", None), "to_json_string", None)
                if callable(to_text):
                    found["config.json"] = to_text().encode()
                    break
        return found

    def _stop(self, state: State, decision: Decision, metrics: Mapping[str, Any] | None) -> None:
        """The last save, if all ranks have agreed on one."""
        if self.ranks.rank == 0 or not decision.save:
            self._say(
                logging.WARNING, "rank %d stops after step %d: %s", self.ranks.rank, self.completed, decision.reason
            )
        if decision.save:
            try:
                self._save(state, metrics, skip=False)
            except (CommunicatorError, SupersededError, StateError):
                raise
            except Error as why:  # maybe of the save before, which is told once
                self._say(logging.ERROR, "rank %d: %s", self.ranks.rank, why)
                self._save(state, metrics, skip=False)
            self.wait()
        self.stopping = True
        start_again(self._requeue, self.ranks.rank)

    def _look(self) -> None:
        """Says how the save in the background has ended, once it has."""
        flight = self._flying
        if flight is None:
            return
        status = self.session.status()
        if status.phase_step == flight.step and status.phase in ("staging", "writing", "waiting"):
            flight.seen = time.monotonic()
            return
        self._flying = None
        rank = self.ranks.rank
        if status.phase_step == flight.step and status.phase == "failed":
            self._say(logging.ERROR, "rank %d: the save of step %d failed; the next one says why", rank, flight.step)
        elif status.phase_step == flight.step and status.phase == "committed":
            self._landed(flight)

    def _landed(self, flight: _Flight) -> None:
        """A save in the background is durable on all ranks."""
        # It took no less than until it was last seen under way: a last save is not given up for a guess.
        self._agreement.saved(max(flight.seen - flight.began, 0.0))
        if self.ranks.rank == 0:
            seconds = time.monotonic() - flight.began
            self._say(logging.INFO, "step %d is saved, within %.1f s of its launch", flight.step, seconds)

    def _phase(self) -> str:
        if not self._progress.shown or self._flying is None:
            return ""
        return f"save of step {self._flying.step}: {self.session.status().phase}"

    def _overwritten(self, tensors: list[torch.Tensor]) -> None:
        """Something was written between a resume and the first update, though it is no buffer."""
        state = self._state
        found = [name_of(t, state.modules, state.optimizers) for t in tensors[:_NAMES]] if state is not None else []
        text = "rank %d: %s changed between the resume and the first update: it is not what the checkpoint had"
        self._say(logging.WARNING, text, self.ranks.rank, _names(found, len(tensors)))

    def _torn(self, tensors: list[torch.Tensor]) -> None:
        """Lazy tensors were written while a save may still have been reading them: its checkpoint must not stay."""
        state = self._state
        found = [name_of(t, state.modules, state.optimizers) for t in tensors[:_NAMES]] if state is not None else []
        text = (
            f"{_names(found, len(tensors))} changed after a save was launched and before an optimizer's step: call "
            'ckpt.fence() before such a change, or use Checkpointer(background="eager")'
        )
        if self._flying is not None:
            step, where = self._flying.step, f"{self.root}@g{self._flying.generation}"
            self._flying = None
            refused = self.session.refuse(Status.CONFLICT, text)
            self.session.drain(self._timeout / 2)
            if refused:
                text += f"; the save of step {step}, which may be torn, fails"
                if self.ranks.comm is None:
                    with contextlib.suppress(Error):  # it is told here
                        self.session.wait()
            else:
                text += self._removed(step, where)
        raise ConflictError(text, rank=self.ranks.rank if self.ranks.world > 1 else None)

    def _say(self, level: int, text: str, *args: Any) -> None:
        self._progress.clear()
        logger.log(level, text, *args)


def _buffers(state: State) -> list[torch.Tensor]:
    """What a forward pass may write."""
    return [b for module in state.modules.values() for b in module.buffers()]


def _position(state: State) -> Any:
    """What keeps the position in the data: the state's loader, or the part that stands for it; None: there is none."""
    loader = state.loader
    if loader is None or hasattr(loader, "used"):
        return loader
    return next((part for part in state.parts() if getattr(part, "loader", None) is loader), loader)


class _Flight:
    """A save in the background."""

    def __init__(self, step: int, generation: Generation, began: float, seen: float) -> None:
        self.step = step
        self.generation = generation
        self.began = began
        self.seen = seen  # when it was last seen under way


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as plain values.

    Raises:
        InvalidError: they have no names.
        UnsupportedError: one of them is no single number.
    """
    if not isinstance(metrics, Mapping):
        raise InvalidError(f"metrics is {metrics!r}, no mapping from names to numbers: metrics={{'loss': loss}}")
    found = {}
    for name, given in metrics.items():
        value: Any = given
        if isinstance(value, torch.Tensor):
            if hasattr(value, "full_tensor"):
                raise UnsupportedError(
                    f'metric "{name}" is a DTensor, which all ranks must gather: give .full_tensor()'
                )
            if value.numel() != 1:
                raise UnsupportedError(f'metric "{name}" is a tensor of shape {list(value.shape)}, not one number')
            value = value.item()
        elif type(value).__module__ == "numpy" and hasattr(value, "item"):
            value = value.item()
        found[name] = value
    return found


def _count(name: str, value: int) -> int:
    """An option that is a number of things.

    Raises:
        InvalidError: it is something else.
    """
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and operator.index(value) >= 0:
            return operator.index(value)
    raise InvalidError(f"{name} is {value!r}, not 0 or a number above")


def _optional(names: Sequence[str]) -> tuple[str, ...]:
    """Names that may lack.

    Raises:
        InvalidError: they are something else.
    """
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise InvalidError(f'optional is {names!r}, not a list of names such as ["ema", "head.weight"]')
    return tuple(names)


def _every(every: int | str | None) -> tuple[int | None, float | None]:
    """Steps, and seconds."""
    if isinstance(every, str):
        return None, seconds_of("every", every)
    if every is None:
        return None, None
    with contextlib.suppress(TypeError):
        if not isinstance(every, bool) and operator.index(every) >= 1:
            return operator.index(every), None
    raise InvalidError(f'every is {every!r}, not a number of steps, "20min", or None')


def _grace(grace: float | str, limit: float | None) -> float:
    if grace == "auto":
        return _GRACE if limit is None else min(_GRACE, limit / 4)
    return seconds_of("grace", grace)


def _refuse_gradients(state: State) -> None:
    names = with_gradients(state.modules, state.optimizers)
    if names:
        raise StateError(
            f"{_names(names[:_NAMES], len(names))} with gradients, which a checkpoint does not hold: call "
            "optimizer.zero_grad(set_to_none=True) before ckpt.step(), or use Checkpointer(exact=False)"
        )


def _names(first: Sequence[str], count: int) -> str:
    more = f" and {count - len(first)} more" if count > len(first) else ""
    return ", ".join(first) + more


def _union(told: list[Any], key: str, form: str) -> tuple[str, ...]:
    """What any rank has told, once; in ``form`` where it was another rank than the first."""
    found: dict[str, str] = {}
    for rank, each in enumerate(told):
        for text in each[key]:
            found.setdefault(text, text if rank == 0 else form.format(rank, text))
    return tuple(found.values())
