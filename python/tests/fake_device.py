# SPDX-License-Identifier: Apache-2.0
"""A device that is not there: tensors in host memory that count as its own, and two streams that run late, on threads,
with copies in any order. It notes every use that no event puts in order, whether or not it went wrong this time.
"""

import contextlib
import random
import threading
import time
from collections import defaultdict
from queue import SimpleQueue

from lastgood import device


class Event:
    def __init__(self, clock):
        self.clock = clock
        self.reached = threading.Event()


class Stream:
    """Runs what it is given, in order, some time later. Its clock is a vector clock: how far this stream is, and how
    far it knows the others to be.
    """

    def __init__(self, name, rng):
        self.name, self.rng = name, rng
        self.clock = defaultdict(int)
        self.work = SimpleQueue()
        self.free = threading.Event()  # cleared: stands still
        self.free.set()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while (work := self.work.get()) is not None:
            self.free.wait()
            time.sleep(self.rng.random() * 0.002)
            work()

    def tick(self):
        self.clock[self.name] += 1
        return dict(self.clock)


class FakeDevice:
    """As lastgood.device.Device. In addition: :meth:`tensor`, and :meth:`compute` for the trainer."""

    def __init__(self, seed=0, name="fake"):
        self.rng = random.Random(seed)
        self.name = name
        self.streams = {k: Stream(f"{name} {k}", random.Random(f"{seed} {k}")) for k in ("compute", "copies")}
        self.tensors = []
        self.uses = defaultdict(list)  # memory: (stream's name, its clock, whether it writes)
        self.faults = []  # what no event puts in order, and calls from other threads
        self.copied = 0
        self.pinned = {}
        self.captures = False
        self.batch = []  # copies that may change places
        self.owner = threading.get_ident()

    # ------------------------------------------------------- the trainer's side

    def tensor(self, value):
        """Now one of this device."""
        self.tensors.append(value)
        return value

    def owns(self, tensor):
        return any(tensor.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in self.tensors)

    def compute(self, work, *, reads=(), writes=()):
        """A kernel on the compute stream. While a graph is recorded it becomes part of that, and does not run."""
        if self.captures:
            return
        stream = self.streams["compute"]
        self.use(stream, reads, writes)
        stream.work.put(work)

    def synchronize(self):
        for name in ("compute", "copies"):
            event = Event({})
            self.close_batch()
            self.streams[name].work.put(event.reached.set)
            assert event.reached.wait(60)

    def hold(self, name="copies"):
        """Lets a stream stand still."""
        self.streams[name].free.clear()

    def release(self, name="copies"):
        self.streams[name].free.set()

    def end(self):
        for stream in self.streams.values():
            stream.free.set()
            stream.work.put(None)
            stream.thread.join(60)

    def use(self, stream, reads, writes):
        clock = stream.tick()
        for tensors, writing in ((reads, False), (writes, True)):
            for t in tensors:
                memory = t.untyped_storage().data_ptr()
                for other, before, wrote in self.uses[memory]:
                    if (wrote or writing) and before[other] > clock.get(other, 0):
                        self.faults.append(f"{stream.name} {'writes' if writing else 'reads'} beside {other}")
                self.uses[memory].append((stream.name, clock, writing))

    # ---------------------------------------------------------------- a Device

    def mine(self, allowed=False):
        """A call. ``allowed``: a recording of a graph does not mind it."""
        if threading.get_ident() != self.owner:
            self.faults.append("called from another thread")
        if self.captures and not allowed:
            self.faults.append("called while a graph is recorded")

    def pin(self, host):
        self.mine()
        address = host.data_ptr()
        host.fill_(0xAB)
        self.pinned[address] = host.numel()
        return lambda: self.pinned.pop(address)

    def capturing(self):
        self.mine(allowed=True)
        return self.captures

    def begin(self):
        self.mine()
        event = Event(dict(self.streams["compute"].clock))
        self.streams["compute"].work.put(event.reached.set)
        self.let_wait("copies", event)

    def copy(self, host, source):
        self.mine()
        stream = self.streams["copies"]
        self.use(stream, [source], [])
        self.copied += 1
        self.batch.append(lambda: host.copy_(source))

    def close_batch(self):
        self.rng.shuffle(self.batch)
        for work in self.batch:
            self.streams["copies"].work.put(work)
        self.batch = []

    def record(self):
        self.mine()
        self.close_batch()
        stream = self.streams["copies"]
        event = Event(dict(stream.clock))
        stream.work.put(event.reached.set)
        return event

    def let_wait(self, name, event):
        stream = self.streams[name]
        for other, count in event.clock.items():
            stream.clock[other] = max(stream.clock[other], count)
        stream.work.put(event.reached.wait)

    def wait(self, event):
        self.mine()
        self.let_wait("compute", event)

    def follow(self, event):
        self.mine()
        self.close_batch()
        self.let_wait("copies", event)

    def signal(self, flag, value):
        self.mine()
        self.close_batch()
        self.streams["copies"].work.put(lambda: flag.fill_(value))

    def finish(self):
        self.mine()
        self.synchronize()


@contextlib.contextmanager
def devices(*fakes):
    """They are there, in the block."""

    def find(tensor):
        return next((fake for fake in fakes if fake.owns(tensor)), None)

    device._finders.append(find)
    try:
        yield
    finally:
        device._finders.remove(find)
        for fake in fakes:
            fake.end()
