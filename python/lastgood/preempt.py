# SPDX-License-Identifier: Apache-2.0
"""When a run is asked to stop: all ranks agree on one last step, save it, and end.

::

    agreement = Agreement(ranks, grace=120, time_limit=4 * 3600)
    for step in range(first, total):
        train(...)
        decision = agreement.poll(step + 1)  # the same on every rank for the same step
        if decision.save:
            save(step + 1)
        if decision.stop:
            break

A signal arrives at different times on different ranks, or on one node only; a time limit is seen by one clock first.
docs/preemption.md has what each signal does, and the proof that all ranks stop at the same step.

``python -m lastgood.preempt --watch`` in the place of a training program shows which process gets which signal.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from lastgood import dtypes
from lastgood.errors import CommunicatorError, ConflictError, InvalidError, StateError, TimeoutError
from lastgood.scheduler import Requeue, check_requeue, requeue

if TYPE_CHECKING:
    from lastgood.background import KeyValueStore
    from lastgood.comm import Communicator

__all__ = ["Agreement", "AgreementStatus", "Decision", "Requeue", "check_requeue", "ignore_signals", "requeue"]

_log = logging.getLogger("lastgood")

# How often a rank looks into the key-value store, seconds: when nothing is asked, and when something is.
_CALM, _BUSY = 0.25, 0.02
# Questions a second that all ranks together may put to the store.
_CALM_RATE, _BUSY_RATE = 2000, 20000
# Parts of the grace time after which rank 0 gives up the agreement, and after which others give up rank 0.
_PATIENCE, _MORE_PATIENCE = 0.5, 0.75
# How long a wait may take before Python looks for signals.
_SLICE = 0.1

# A rank's place in its run: completed steps, and calls of poke since then. Ordered as tuples are.
Clock = tuple[int, int]


class Decision(NamedTuple):
    """What to do after a step. The same on all ranks for the same step."""

    save: bool  # save the state of this step
    stop: bool  # then end the run
    reason: str  # for people; empty when there is nothing to do


class AgreementStatus(NamedTuple):
    """How things stand, on this rank."""

    since_poll: float  # seconds since the last poll or poke
    step: int  # of the last poll; -1: none yet
    asked: str | None  # why the run is to stop, once this rank knows
    left: float  # seconds of the grace time; infinite until the run is asked to stop
    signals: tuple[str, ...]  # that this process got


class RanksLike(Protocol):
    """What is needed of :class:`lastgood.parts.Ranks`."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def world(self) -> int:
        """How many there are."""

    @property
    def comm(self) -> Communicator | None:
        """How they talk; None: one process."""


_NOTHING = Decision(False, False, "")


# --------------------------------------------------------------------- signals


def ignore_signals(worker_id: int = 0) -> None:
    """Ignores SIGTERM and SIGUSR1 in this process.

    For those that load data, as ``torch.utils.data.DataLoader(worker_init_fn=ignore_signals)`` (the workers of
    :class:`lastgood.data.DataLoader` need it not): schedulers and torchrun send signals to
    them as well, and a worker that ends takes its trainer down before the last save. They still end with their trainer.
    And for a trainer that has saved its last step and ends: a second signal must not give it another exit code.

    Args:
        worker_id: what DataLoader passes; unused.
    """
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)


class _Signals:
    """Notes signals, and hands them on to the handlers that were there before."""

    def __init__(self, names: Sequence[str]) -> None:
        self.first: tuple[str, float] | None = None  # its name, and when it came
        self.seen: list[str] = []
        self.wake: SimpleQueue[None] = SimpleQueue()  # its put may be called in a handler
        self._pid = os.getpid()
        self._closed = False
        self._before: dict[int, Any] = {}
        numbers = [_number(name) for name in names]
        if not numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                f"{', '.join(names)} will not be noticed on this rank: Python takes handlers of signals only in the main "
                "thread; make the agreement there",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        for number in numbers:
            if signal.getsignal(number) is None:
                warnings.warn(
                    f"{signal.Signals(number).name} will not be noticed: something other than Python handles it",
                    RuntimeWarning,
                    stacklevel=3,
                )
                continue
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        before = self._before.get(number)
        if os.getpid() != self._pid:
            self._in_child(number, before)
        elif not self._closed:
            name = signal.Signals(number).name
            self.seen.append(name)
            if self.first is None:
                self.first = (name, time.monotonic())
            self.wake.put(None)
        if callable(before):
            before(number, frame)

    def _in_child(self, number: int, before: Any) -> None:
        """In a child of fork all is as if this handler were not there, so that its parent can end it. But a signal of
        another kind, which schedulers send to all processes of a job, does not end it.
        """
        if before == signal.SIG_DFL and number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Puts the earlier handlers back, but where somebody else has put his own in the meantime."""
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        if threading.current_thread() is not threading.main_thread():
            return  # cannot; from now on it only hands on
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)


def _number(name: str) -> int:
    number = getattr(signal, name, None) if name.startswith("SIG") and not name.startswith("SIG_") else None
    if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP):
        raise InvalidError(f"{name!r} is no signal that can be noticed; give names such as SIGTERM")
    return int(number)


# ---------------------------------------------------------------------- wishes


class _Wishes:
    """What this rank would have, and since when. Rank 0's clock alone counts for time limit and interval."""

    def __init__(
        self, rank: int, signals: _Signals, time_limit: float | None, grace: float, every: float | None
    ) -> None:
        self.rank = rank
        self.signals = signals
        self.grace = grace
        self.every = every
        self.takes: float | None = None  # seconds of the last save
        self.asked: tuple[str, float] | None = None  # by another rank: why, and when this one learned it
        now = time.monotonic()
        self._limit = time_limit
        self._limit_at = None if time_limit is None or rank != 0 else now + max(0.0, time_limit - grace)
        self._next = None if every is None or rank != 0 else now + every

    def stop(self) -> tuple[str, float] | None:
        """Why to stop, and since when that is known: the earliest, from which the grace time counts."""
        found = self.asked
        first, limit_at = self.signals.first, self._limit_at
        if first is not None and (found is None or first[1] < found[1]):
            found = f"{first[0]} on rank {self.rank}", first[1]
        if limit_at is not None and time.monotonic() >= limit_at and (found is None or limit_at < found[1]):
            found = f"the time limit of {self._limit:g} s ends in {self.grace:g} s", limit_at
        return found

    def save(self) -> str | None:
        """Why to save."""
        if self._next is not None and time.monotonic() >= self._next:
            return f"{self.every:g} s since the last save"
        return None

    def restart(self) -> None:
        """The interval begins anew."""
        if self._next is not None and self.every is not None:
            self._next = time.monotonic() + self.every

    def left(self) -> float:
        """Seconds of the grace time."""
        stop = self.stop()
        return float("inf") if stop is None else stop[1] + self.grace - time.monotonic()

    def last(self, reason: str, takes: float | None, left: float) -> Decision:
        """The end, with a save if there is time for one."""
        if takes is not None and takes > left:
            return Decision(
                False, True, f"{reason}; not saved: the last save took {takes:.1f} s, and {max(left, 0):.1f} s are left"
            )
        if left <= 0:
            return Decision(False, True, f"{reason}; not saved: the grace time of {self.grace:g} s is over")
        return Decision(True, True, reason)


class _Way(Protocol):
    """How ranks come to agree."""

    def call(self, clock: Clock, consume: bool) -> Decision:
        """At a step (consume), or between two."""

    def close(self) -> None:
        """Ends what runs for it."""


class _Alone:
    """One process."""

    def __init__(self, wishes: _Wishes) -> None:
        self._wishes = wishes
        self._end: Decision | None = None

    def call(self, clock: Clock, consume: bool) -> Decision:
        wishes = self._wishes
        if self._end is not None:
            return self._end
        stop = wishes.stop()
        if stop is not None:
            self._end = wishes.last(stop[0], wishes.takes, wishes.left())
            return self._end
        save = wishes.save() if consume else None
        if save is None:
            return _NOTHING
        wishes.restart()
        return Decision(True, False, save)

    def close(self) -> None:
        pass


# -------------------------------------------------- by way of a key-value store


class _ByKeys:
    """Rounds, one after the other, each opened by rank 0 because somebody wishes something.

    In a round every rank, whatever its main thread is at, *answers* with the first clock that its main thread has not
    passed, and from that moment the main thread does not pass it before it knows the outcome. The outcome is the
    largest answer: no rank has passed it, and every rank knows it before it comes there.

    Keys: ``call``, what rank 0 says, with the round before, so that nothing is lost when it is overwritten: the round
    after that begins when all have answered, and so have read, this one. ``ask``, some other rank's wish to stop;
    ``ack-R``, the answers.
    """

    def __init__(self, rank: int, world: int, kv: KeyValueStore, token: str, wishes: _Wishes) -> None:
        self._rank, self._world, self._kv, self._wishes = rank, world, kv, wishes
        self._prefix = f"lastgood/preempt-{token}/"
        self._changed = threading.Condition(threading.Lock())
        # Under its lock:
        self._passed: Clock = (-1, 0)
        self._polled = time.monotonic()
        self._round = 0
        self._stopping = False  # it is one to stop
        self._barrier: Clock | None = None  # not to be passed before the round's outcome is known
        self._barrier_until = 0.0
        self._due: list[tuple[Clock, bool, str]] = []  # outcomes: when, whether to stop, why
        self._go: Decision | None = None  # rank 0's last word at the last step
        self._end: Decision | None = None  # returned by every call from now on
        self._asked_at: float | None = None  # since when this rank wishes to stop, and has told so
        self._calm = True  # nothing of all that is set
        # The thread's own:
        self._said: dict[str, Any] | None = None  # rank 0: the newest round
        self._said_before: dict[str, Any] | None = None
        self._opened = 0.0
        self._answers: dict[int, Clock] = {}
        self._unsent: str | None = None  # others: an answer that the store has not taken yet
        self._heard = b""
        self._told = False  # others: the store has taken the wish
        self._trouble = ""
        self._warned = False
        self._closing = False
        self._pause = max(_CALM, world / _CALM_RATE), max(_BUSY, world / _BUSY_RATE)
        self._thread = threading.Thread(target=self._run, name="lastgood-preempt", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------- the main thread

    def call(self, clock: Clock, consume: bool) -> Decision:
        with self._changed:
            self._polled = time.monotonic()
            if self._calm:
                self._passed = clock
                return _NOTHING
            return self._call(clock, consume)

    def _call(self, clock: Clock, consume: bool) -> Decision:
        wishes = self._wishes
        if self._end is None and self._barrier is not None and clock >= self._barrier:
            self._wait(lambda: self._barrier is None, self._barrier_until, "rank 0 did not say at which step")
        waiting = 0.0 if self._asked_at is None or self._stopping else time.monotonic() - self._asked_at
        if self._end is None and waiting > _MORE_PATIENCE * wishes.grace:
            self._give_up("rank 0 did not answer" if self._rank != 0 else "the other ranks could not be told")
        self._passed = clock
        if self._end is not None:
            return self._end
        due = [d for d in self._due if d[0] <= clock]
        stop = next((d for d in due if d[1]), None)
        if stop is not None:
            return self._last(stop[2])
        if not due or not consume:
            return _NOTHING
        self._due = [d for d in self._due if d[0] > clock]
        self._settle()
        wishes.restart()
        return Decision(True, False, due[-1][2])

    def _last(self, reason: str) -> Decision:
        """The last step: rank 0 says whether there is time to save, and the others wait for its word."""
        wishes = self._wishes
        if self._rank == 0:
            self._go = wishes.last(reason, wishes.takes, wishes.left())
            wishes.signals.wake.put(None)
        else:
            until = time.monotonic() + max(wishes.left(), _SLICE)
            self._wait(lambda: self._go is not None, until, f"rank 0 did not come to step {self._passed[0]}")
        if self._end is None:
            self._end = self._go
        assert self._end is not None
        return self._end

    def _wait(self, done: Callable[[], bool], until: float, why: str) -> None:
        while not done() and self._end is None:
            self._polled = time.monotonic()
            if self._polled >= until:
                self._give_up(why)
                return
            self._changed.wait(_SLICE)

    def _give_up(self, why: str) -> None:
        """For this rank alone; what others do is not known."""
        stop = self._wishes.stop()
        text = f"{why} in time" + (f" ({self._trouble})" if self._trouble else "")
        if stop is None:
            raise TimeoutError(f"no agreement on when to save: {text}", rank=0)
        self._barrier = None
        self._end = Decision(False, True, f"{stop[0]}; not saved: {text}")

    # -------------------------------------------------------------- its thread

    def _run(self) -> None:
        wake = self._wishes.signals.wake
        while True:
            last = self._closing
            busy = True
            try:
                busy = self._lead() if self._rank == 0 else self._follow()
                if last:
                    self._leave()
                self._trouble = ""
            except Exception as why:  # of whatever the store is made of
                if not self._trouble and not last:
                    _log.warning("agreement on the last step: the key-value store does not answer: %s", why)
                self._trouble = f"the key-value store does not answer: {why}"
            if last:
                return
            self._warn_of_silence()
            try:
                wake.get(timeout=self._pause[busy])
                while True:
                    wake.get_nowait()
            except Empty:
                pass

    def _leave(self) -> None:
        """The others need not wait for this rank any more: it has passed its last step, or given up."""
        if self._rank != 0:
            self._kv.set(f"{self._prefix}ack-{self._rank}", b"-1 -1 0")
            return
        self._said_before = said = self._said
        number = 1 if said is None else said["round"] + 1
        self._say({"round": number, "state": "closed", "stop": False, "reason": ""})

    def _warn_of_silence(self) -> None:
        stop = self._wishes.stop()
        if stop is None or self._warned or self._end is not None:
            return
        silence = time.monotonic() - max(self._polled, stop[1])
        if silence > self._wishes.grace / 4:
            self._warned = True
            _log.warning(
                "%s %.0f s ago, and the program has not polled since step %d: poke in loops that take long",
                stop[0],
                silence,
                self._passed[0],
            )

    def _lead(self) -> bool:
        """Rank 0's part. Returns whether a round is under way."""
        self._note(self._wishes.stop())
        if self._said is None or self._said["state"] in ("at", "failed"):
            self._open()
        said = self._said
        if said is None:
            return False
        if said["state"] == "open":
            self._collect(said)
        elif said["state"] == "at" and said["stop"] and self._go is not None:
            self._say({**said, "state": "go", "save": self._go.save, "reason": self._go.reason})
        return not self._calm and self._end is None

    def _open(self) -> None:
        """A new round, if anybody wishes one."""
        wishes, before = self._wishes, self._said
        if before is not None and before["stop"]:
            return  # nothing comes after the end
        stop = wishes.stop()
        if stop is None:
            asked = self._kv.get(self._prefix + "ask")
            if asked is not None:
                stop = wishes.asked = (asked.decode(), time.monotonic())
        save = wishes.save() if stop is None and self._calm else None
        if stop is None and save is None:
            return
        number = 1 if before is None else before["round"] + 1
        self._said_before = before
        self._opened = time.monotonic()
        self._answers = {}
        self._say({"round": number, "state": "open", "stop": stop is not None, "reason": stop[0] if stop else save})

    def _collect(self, said: dict[str, Any]) -> None:
        for rank in range(1, self._world):
            if rank in self._answers:
                continue
            value = self._kv.get(f"{self._prefix}ack-{rank}")
            number, step, pokes = (0, 0, 0) if value is None else (int(n) for n in value.split())
            if number in (said["round"], -1):
                self._answers[rank] = (step, pokes)
        if len(self._answers) == self._world:
            at = max(self._answers.values())
            self._say({**said, "state": "at", "at": list(at)})
            _log.info("%s: all ranks act at their first poll after step %d", said["reason"], at[0])
            return
        seconds = _PATIENCE * self._wishes.grace
        if time.monotonic() > self._opened + seconds:
            missing = [str(r) for r in range(self._world) if r not in self._answers]
            names = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            self._say({**said, "state": "failed", "why": f"rank {names} did not answer within {seconds:g} s"})

    def _say(self, said: dict[str, Any]) -> None:
        """To all, this rank last: until it is said nobody acts on it."""
        value = json.dumps({"before": self._said_before, "now": said})
        self._kv.set(self._prefix + "call", value.encode())
        self._said = said
        self._take(said)

    def _note(self, stop: tuple[str, float] | None) -> None:
        """From now on the main thread looks whether it has waited too long for a round."""
        if stop is not None and self._asked_at is None and not self._stopping:
            with self._changed:
                self._asked_at = time.monotonic()
                self._settle()

    def _follow(self) -> bool:
        """Any other rank's part. Returns whether it waits for something."""
        stop = self._wishes.stop()
        self._note(stop)
        if stop is not None and not self._told and not self._stopping:
            self._kv.set(self._prefix + "ask", stop[0].encode())
            self._told = True
        self._send()
        value = self._kv.get(self._prefix + "call")
        if value is not None and value != self._heard:
            said = json.loads(value)
            for one in (said["before"], said["now"]):
                if one is not None:
                    self._take(one)
            self._heard = value
            self._send()
        return (stop is not None or not self._calm) and self._end is None

    def _send(self) -> None:
        if self._unsent is not None:
            self._kv.set(f"{self._prefix}ack-{self._rank}", self._unsent.encode())
            self._unsent = None

    def _take(self, said: dict[str, Any]) -> None:
        """What rank 0 says, on every rank. The same may come again, or more of it at once."""
        with self._changed:
            if said["round"] < self._round:
                return
            if said["round"] > self._round:
                self._answer(said)
            if said["state"] in ("at", "go") and self._barrier is not None:
                self._due.append(((said["at"][0], said["at"][1]), said["stop"], said["reason"]))
                self._barrier = None
            if said["state"] == "go" and self._go is None:
                self._go = Decision(said["save"], True, said["reason"])
            if said["state"] == "closed":
                self._barrier = None
            if said["state"] == "failed" and self._barrier is not None:
                self._barrier = None
                if said["stop"]:
                    self._end = Decision(False, True, f"{said['reason']}; not saved: {said['why']}")
                else:
                    _log.warning("%s, but not saved: %s", said["reason"], said["why"])
            self._settle()
            self._changed.notify_all()

    def _answer(self, said: dict[str, Any]) -> None:
        """A new round."""
        wishes = self._wishes
        now = time.monotonic()
        self._round = said["round"]
        self._stopping = self._stopping or said["stop"]
        self._barrier = (self._passed[0], self._passed[1] + 1)
        self._barrier_until = now + _MORE_PATIENCE * wishes.grace
        if self._rank == 0:
            self._answers[0] = self._barrier
        else:
            self._unsent = f"{self._round} {self._barrier[0]} {self._barrier[1]}"
        if said["stop"] and wishes.stop() is None:
            wishes.asked = (said["reason"], now)

    def _settle(self) -> None:
        quiet = self._barrier is None and not self._due and self._end is None
        self._calm = quiet and (self._asked_at is None or self._stopping)

    def close(self) -> None:
        self._closing = True
        self._wishes.signals.wake.put(None)
        self._thread.join(5)


# ------------------------------------------------------- by way of a collective


class _ByMessages:
    """An all-gather at every step: where there is no key-value store. It is made in a thread of its own, so that it can
    be given up when the grace time is over.
    """

    def __init__(self, rank: int, comm: Communicator, timeout: float, wishes: _Wishes) -> None:
        self._rank, self._comm, self._timeout, self._wishes = rank, comm, timeout, wishes
        self._end: Decision | None = None
        self._work: SimpleQueue[bytes | None] = SimpleQueue()
        self._done: SimpleQueue[Sequence[bytes] | Exception] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lastgood-preempt", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (data := self._work.get()) is not None:
            try:
                self._done.put(self._comm.all_gather(data, self._timeout))
            except Exception as why:  # of whatever the communicator is made of
                self._done.put(why)

    def call(self, clock: Clock, consume: bool) -> Decision:
        if self._end is not None or not consume:
            return self._end or _NOTHING
        wishes = self._wishes
        stop = wishes.stop()
        mine = {
            "step": clock[0],
            "stop": stop and stop[0],
            "left": None if stop is None else wishes.left(),
            "save": wishes.save(),
            "takes": wishes.takes,
        }
        self._work.put(json.dumps(mine).encode())
        parts = self._gathered()
        if parts is None:
            return self._end or _NOTHING
        said = [json.loads(part) for part in parts]
        steps = {one["step"] for one in said}
        if len(steps) > 1:
            text = ", ".join(f"rank {r} polls step {one['step']}" for r, one in enumerate(said[:8]))
            raise ConflictError(f"all ranks must poll the same steps, but {text}")
        stops = [one for one in said if one["stop"]]
        if stops:
            takes = max((one["takes"] for one in said if one["takes"] is not None), default=None)
            self._end = wishes.last(stops[0]["stop"], takes, min(one["left"] for one in stops))
            if wishes.stop() is None:
                wishes.asked = (stops[0]["stop"], time.monotonic())
            return self._end
        if said[0]["save"]:
            wishes.restart()
            return Decision(True, False, said[0]["save"])
        return _NOTHING

    def _gathered(self) -> Sequence[bytes] | None:
        """None: given up, since this rank is to stop and the others do not come."""
        while True:
            try:
                got = self._done.get(timeout=_SLICE)
            except Empty:
                if self._wishes.left() < (1 - _PATIENCE) * self._wishes.grace:
                    self._fail("the others did not come to this step")
                    return None
                continue
            if not isinstance(got, Exception):
                return got
            if self._wishes.stop() is None:
                raise got
            self._fail(str(got))
            return None

    def _fail(self, why: str) -> None:
        stop = self._wishes.stop()
        assert stop is not None
        self._end = Decision(False, True, f"{stop[0]}; not saved: {why}")

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(0 if self._end is not None and not self._end.save else 5)


# --------------------------------------------------------------- the agreement


class Agreement:
    """Makes all ranks save, and stop, after the same step. *Collective*: every rank makes one, with equal arguments.

    Args:
        ranks: who has to agree: ``rank``, ``world`` and ``comm``, which is used here and, if there is no key-value
            store, at every poll.
        signals: that ask the run to save and stop. What handled them before is called as well. SIGINT stays Python's
            ``KeyboardInterrupt`` unless it is given here.
        time_limit: seconds from now after which the program will be ended; None: none. ``grace`` seconds before, the
            run is asked to stop.
        grace: seconds between being asked to stop and being ended by force: what the scheduler gives (Slurm: the
            number after ``@`` in ``--signal``, else KillWait; Kubernetes: terminationGracePeriodSeconds; torchrun: 30).
        every_seconds: save so often, besides what the program saves by itself; None: never.
        kv: how ranks tell each other: any object with ``set`` and ``get`` (:class:`lastgood.KeyValueStore`) whose keys
            may be set again, for a thread of the agreement alone; None: a connection of its own to the store of
            torch.distributed; ``"collective"``, or None without torch.distributed: an all-gather of ``ranks.comm`` at
            every poll.
        timeout: seconds for the exchange made here, and for each all-gather.

    Raises:
        ConflictError: the ranks' arguments differ.

    A process that is killed, or whose peers are, ends without a last save: the checkpoint before counts. Waits within
    ``poll`` take no longer than ``grace``, once the run is asked to stop.
    """

    def __init__(
        self,
        ranks: RanksLike,
        *,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        time_limit: float | None = None,
        grace: float = 30.0,
        every_seconds: float | None = None,
        kv: KeyValueStore | Literal["collective"] | None = None,
        timeout: float = 600.0,
    ) -> None:
        for name, value in (("grace", grace), ("time_limit", time_limit), ("every_seconds", every_seconds)):
            if value is not None and not 0 < value < float("inf"):
                raise InvalidError(f"{name} is {value!r}, not a number of seconds above 0")
        if time_limit is not None and time_limit <= grace:
            raise InvalidError(f"time_limit is {time_limit:g} s, no longer than the grace time of {grace:g} s")
        if isinstance(signals, str):
            raise InvalidError(f"signals is the string {signals!r}; give a list of names")
        self._pid = os.getpid()
        self._closed = False
        self._clock: Clock = (-1, 0)
        self._polled = time.monotonic()
        store, token = None, ""
        if ranks.world > 1:
            if ranks.comm is None:
                raise InvalidError(f"{ranks.world} ranks need a communicator to agree on a step; ranks.comm is None")
            store = _store(kv)
            arguments = [list(signals), time_limit, grace, every_seconds, store is None]
            token = _exchange(ranks.comm, arguments, timeout)
        self._signals = _Signals(signals)
        self._wishes = _Wishes(ranks.rank, self._signals, time_limit, grace, every_seconds)
        self._way: _Way
        if ranks.world == 1:
            self._way = _Alone(self._wishes)
        elif store is not None:
            self._way = _ByKeys(ranks.rank, ranks.world, store, token, self._wishes)
        else:
            assert ranks.comm is not None
            self._way = _ByMessages(ranks.rank, ranks.comm, timeout, self._wishes)

    def poll(self, step: int) -> Decision:
        """Asks what to do after a step. Every rank calls it after every step, in order; takes microseconds while nobody
        asks for anything (but see ``kv="collective"``). A decision to save is returned once; one to stop again and
        again, if it is not heeded.

        Args:
            step: completed steps, more than at the last call.

        Raises:
            TimeoutError: the ranks were to save by ``every_seconds``, and rank 0 does not say when.
        """
        if step < self._clock[0]:
            raise InvalidError(f"step {step} is polled after step {self._clock[0]}: steps only grow")
        return self._call((step, 0) if step > self._clock[0] else (step, self._clock[1] + 1), True)

    def poke(self) -> Decision:
        """The same between two steps, in loops that take long (evaluation): returns the decision to stop if there is
        one, which :meth:`poll` then returns again. Whoever heeds it, and leaves the loop, must call it equally often on
        all ranks; then all leave at the same call. Whoever only calls it may do so as he likes.
        """
        return self._call((self._clock[0], self._clock[1] + 1), False)

    def _call(self, clock: Clock, consume: bool) -> Decision:
        if self._closed or os.getpid() != self._pid:
            raise StateError("the agreement is closed, or belongs to the parent of this process")
        decision = self._way.call(clock, consume)
        self._clock, self._polled = clock, time.monotonic()
        return decision

    def saved(self, seconds: float) -> None:
        """Tells that a save is committed, and how long it took: a last save that would take longer than what is left of
        the grace time is not begun, and ``every_seconds`` counts from here. Rank 0's word counts.
        """
        self._wishes.takes = seconds
        self._wishes.restart()

    def fits(self, seconds: float) -> bool:
        """Whether so much of the grace time is left on this rank; True as long as the run is not asked to stop. Other
        ranks may see it otherwise: only what :meth:`poll` returns is the same on all.
        """
        return self.left() >= seconds

    def left(self) -> float:
        """Seconds of the grace time, as this rank sees it; infinite until the run is asked to stop."""
        return self._wishes.left()

    def status(self) -> AgreementStatus:
        """How things stand, on this rank."""
        stop = self._wishes.stop()
        return AgreementStatus(
            time.monotonic() - self._polled,
            self._clock[0],
            None if stop is None else stop[0],
            self.left(),
            tuple(self._signals.seen),
        )

    def close(self) -> None:
        """Puts the earlier handlers of signals back. Not collective. Close it when the last save is durable: from then
        on the signals do what they did before. In a child of fork it does nothing.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._way.close()
        self._signals.close()

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _store(kv: KeyValueStore | Literal["collective"] | None) -> KeyValueStore | None:
    """None: there is none."""
    if kv == "collective":
        return None
    if kv is not None and not isinstance(kv, str):
        return kv
    if kv is not None:
        raise InvalidError(f'kv is {kv!r}, neither a key-value store nor "collective"')
    torch = dtypes.imported("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from lastgood.pytorch import StoreKeys

    return StoreKeys()


def _exchange(comm: Communicator, arguments: list[Any], timeout: float) -> str:
    """A name that no other agreement has; refuses arguments that differ."""
    mine = json.dumps([secrets.token_hex(8), arguments]).encode()
    all_ = [json.loads(part) for part in comm.all_gather(mine, timeout)]
    if len(all_) != comm.size:
        raise CommunicatorError(f"all_gather returned {len(all_)} parts for {comm.size} ranks")
    for rank, (_, theirs) in enumerate(all_):
        if theirs != all_[0][1]:
            names = ("signals", "time_limit", "grace", "every_seconds", "without a key-value store")
            differ = [n for n, a, b in zip(names, theirs, all_[0][1], strict=True) if a != b]
            raise ConflictError(f"agreement: ranks 0 and {rank} have different {', '.join(differ)}", rank=rank)
    token: str = all_[0][0]
    return token


if __name__ == "__main__":
    import sys

    from lastgood.watch_signals import main

    sys.exit(main())
