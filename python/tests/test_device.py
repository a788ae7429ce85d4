# SPDX-License-Identifier: Apache-2.0
"""Launches of what lies on a device: what is saved is what was there at the launch, and nobody waits for it."""

import contextlib
import inspect
import threading

import lastgood
import pytest
import torch
from fake_device import FakeDevice, devices
from lastgood.device import CudaDevice, _dense


class Trainer:
    """A parameter that the update changes, and a buffer that each forward pass changes."""

    def __init__(self, fake):
        self.fake = fake
        self.weight = fake.tensor(torch.zeros(50000))
        self.moment = fake.tensor(torch.zeros(7, 11).t())  # not contiguous
        self.mean = fake.tensor(torch.zeros(30000))

    def forward(self, step):
        self.fake.compute(lambda: self.mean.fill_(step + 0.5), reads=[self.weight], writes=[self.mean])

    def update(self, step):
        def work():
            self.weight.fill_(step)
            self.moment.copy_(torch.arange(77.0).reshape(11, 7) + step)

        self.fake.compute(work, writes=[self.weight, self.moment])

    def launch(self, session, step, **options):
        with session.launch(step, **options) as save:
            save.tensors({"weight": self.weight, "moment": self.moment}, lazy=True)
            save.tensors({"mean": self.mean}, buffer=True)
            save.tensors({"host": torch.full((3,), float(step))})
        return save.launched


def check(root, step):
    found = lastgood.load(f"{root}@{step}", framework="torch")
    assert torch.equal(found["weight"], torch.full((50000,), float(step))), step
    assert torch.equal(found["moment"], torch.arange(77.0).reshape(11, 7) + step), step
    assert torch.equal(found["mean"], torch.full((30000,), step + 0.5)), step
    assert torch.equal(found["host"], torch.full((3,), float(step)))


@pytest.mark.parametrize("seed", range(5))
def test_k04_what_was_on_the_device_at_the_launch_is_saved_however_late_its_copies_run(seed, root):
    fake = FakeDevice(seed)
    with devices(fake), lastgood.Session(root, timeout=60) as session:
        trainer = Trainer(fake)
        held = set()
        for step in range(1, 9):
            trainer.forward(step)
            session.fence()
            trainer.update(step)
            launched = trainer.launch(session, step)
            assert not launched.windowed
            held.add(session.status().staging_bytes)
        trainer.forward(100)
        session.fence()
        trainer.update(100)
        assert session.wait().step == 8
        fake.synchronize()
        assert fake.faults == [], seed
        assert fake.copied == 8 * 3
        # K07 F118: allocated once, and no second copy of it
        assert len(held) == 1
        assert held.pop() < 1.5e6
    assert fake.pinned == {}
    for step in range(1, 9):
        check(root, step)


def test_k04_neither_the_launch_nor_the_fence_waits_for_the_device_and_the_save_does(root):
    fake = FakeDevice()
    with devices(fake), lastgood.Session(root, timeout=60) as session:
        trainer = Trainer(fake)
        trainer.forward(1)
        trainer.update(1)
        fake.hold("compute")
        fake.hold("copies")
        trainer.launch(session, 1)
        assert not session.staged
        session.fence()
        trainer.update(2)
        with pytest.raises(lastgood.TimeoutError):
            session.wait(0.2)
        assert session.status().phase == "writing"
        fake.release("compute")
        fake.release("copies")
        assert session.wait().step == 1
        assert session.staged
        fake.synchronize()
        assert fake.faults == []
    check(root, 1)


@pytest.mark.parametrize("broken", ["no fence", "no wait at the launch", "copies do not wait for the trainer"])
def test_the_fake_device_notices_what_nothing_puts_in_order(broken, root, monkeypatch):
    fake = FakeDevice()
    if broken == "no wait at the launch":
        monkeypatch.setattr(fake, "wait", lambda event: None)
    if broken == "copies do not wait for the trainer":
        monkeypatch.setattr(fake, "begin", lambda: None)
    with devices(fake), lastgood.Session(root, timeout=60) as session:
        trainer = Trainer(fake)
        for step in (1, 2):
            trainer.forward(step)
            if broken != "no fence":
                session.fence()
            trainer.update(step)
            trainer.launch(session, step)
        session.wait()
    what = {
        "no fence": "fake compute writes beside fake copies",
        "no wait at the launch": "fake compute writes beside fake copies",
        "copies do not wait for the trainer": "fake copies reads beside fake compute",
    }[broken]
    assert what in fake.faults


def test_a_save_of_two_devices_waits_for_the_copies_of_both(root):
    first, second = FakeDevice(1, "first"), FakeDevice(2, "second")
    with devices(first, second), lastgood.Session(root, timeout=60) as session:
        a, b = first.tensor(torch.zeros(10)), second.tensor(torch.zeros(20))
        for held in (first, second):
            held.hold("copies")
            first.compute(lambda: a.add_(1), writes=[a])
            second.compute(lambda: b.add_(1), writes=[b])
            with session.launch(1 if held is first else 2) as save:
                save.tensors({"a": a, "b": b}, lazy=True)
            with pytest.raises(lastgood.TimeoutError):
                session.wait(0.2)
            held.release("copies")
            session.wait()
            session.fence()
        assert first.faults + second.faults == []
    found = lastgood.load(root, framework="torch")
    assert torch.equal(found["a"], torch.full((10,), 2.0))
    assert torch.equal(found["b"], torch.full((20,), 2.0))


def test_k12_tensors_of_any_strides_and_dtypes_come_from_a_device(root):
    fake = FakeDevice()
    base = torch.arange(240.0)
    tensors = {
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": base.reshape(12, 20).t(),
        "every other": base[::2],
        "expanded": base[:5].expand(4, 5),
        "one": torch.tensor(3.0),
        "none": torch.empty(0, 3),
        "flags": torch.arange(9) % 2 == 0,
        "half": base.bfloat16(),
        "small": base[:40].to(torch.float8_e4m3fn),
        "complex": torch.complex(base, -base).conj(),
    }
    with devices(fake), lastgood.Session(root, timeout=60) as session:
        for t in tensors.values():
            fake.tensor(t)
        with session.launch(1) as save:
            save.tensors(tensors, lazy={"transposed", "half", "expanded"})
        session.wait()
        assert fake.faults == []
    found = lastgood.load(root, framework="torch")
    for name, t in tensors.items():
        as_bytes = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (found[name], t))
        got, want = (x.contiguous().reshape(-1).view(torch.uint8) for x in as_bytes)
        assert torch.equal(got, want), name


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((1, 3), (77, 1), True),
        ((3,), (2,), False),
        ((), (), True),
    ],
)
def test_memory_without_gaps_and_overlaps_is_copied_as_it_lies(shape, strides, dense):
    assert _dense(torch.empty(100).as_strided(shape, strides)) is dense


def test_nothing_is_launched_while_a_graph_is_recorded(root):
    fake = FakeDevice()
    with devices(fake), lastgood.Session(root, timeout=60) as session:
        trainer = Trainer(fake)
        fake.captures = True
        with pytest.raises(lastgood.StateError, match="while a graph is recorded"):
            trainer.launch(session, 1)
        assert fake.copied == 0
        fake.captures = False
        trainer.forward(2)
        trainer.update(2)
        trainer.launch(session, 2)
        session.wait()
    check(root, 2)
    assert [e.step for e in lastgood.entries(root) if e.kind == "committed"] == [2]


def test_a_launch_that_is_skipped_copies_nothing(root):
    fake = FakeDevice()
    with devices(fake), lastgood.Session(root, timeout=60) as session:
        trainer = Trainer(fake)
        trainer.forward(1)
        trainer.update(1)
        fake.hold("copies")
        trainer.launch(session, 1, when_busy="skip")
        session.fence()
        assert trainer.launch(session, 2, when_busy="skip").skipped == "in flight"
        assert fake.copied == 3
        fake.release("copies")
        session.wait()
    check(root, 1)


def test_a_save_that_was_begun_as_a_launch_may_be_committed(root):
    fake = FakeDevice()
    with devices(fake), lastgood.Session(root, timeout=60) as session:
        trainer = Trainer(fake)
        trainer.forward(1)
        trainer.update(1)
        with session.launch(1) as save:
            save.tensors({"weight": trainer.weight, "moment": trainer.moment, "mean": trainer.mean})
            save.tensors({"host": torch.full((3,), 1.0)})
            save.commit()
        assert fake.faults == []
    check(root, 1)


def test_k06_copies_that_never_end_fail_the_save_within_the_timeout_and_the_next_one_works(root):
    fake = FakeDevice()
    with devices(fake), lastgood.Session(root, timeout=1.0) as session:
        trainer = Trainer(fake)
        trainer.forward(1)
        trainer.update(1)
        fake.hold("copies")
        trainer.launch(session, 1)
        with pytest.raises(lastgood.TimeoutError, match="was not filled within 500 ms"):
            session.wait(5)
        fake.release("copies")
        session.fence()
        trainer.forward(2)
        trainer.update(2)
        trainer.launch(session, 2)
        session.wait(5)
        assert fake.faults == []
    check(root, 2)


def test_k07_memory_for_copies_stays_below_its_cap(root):
    fake = FakeDevice()
    with devices(fake), lastgood.Session(root, timeout=60, staging_bytes=4 << 20) as session:
        tensors = {str(i): fake.tensor(torch.full((1 << 18,), float(i))) for i in range(8)}  # 8 MiB
        with session.launch(1) as save:
            save.tensors(tensors, lazy=True)
        assert 0 < session.staging.bytes_held <= 4 << 20
        assert 0 < fake.copied < 8
        session.fence()
        session.wait()
    found = lastgood.load(root, framework="torch")
    for name, t in tensors.items():
        assert torch.equal(found[name], t)


def test_ranks_save_their_parts_from_their_devices(root):
    comms = lastgood.ThreadCommunicator.create(2)
    layout = lastgood.Layout([2], [lastgood.Split(0)])
    found, fakes = [None] * 2, [FakeDevice(r, f"fake {r}") for r in range(2)]

    def run(rank):
        fake = fakes[rank]
        fake.owner = threading.get_ident()
        part, same = fake.tensor(torch.zeros(500)), fake.tensor(torch.zeros(5))
        try:
            with lastgood.Session(root, comms[rank], timeout=60) as session:
                for step in (1, 2):
                    fake.compute(lambda value=step + rank / 2: part.fill_(value), writes=[part])
                    fake.synchronize()  # "same" is compared between ranks, from host memory
                    with session.launch(step) as save:
                        save.tensor("w", part, shape=(1000,), layout=layout, lazy=True)
                        save.tensors({"same": same})
                    session.fence()
                found[rank] = session.wait().step
        except lastgood.Error as why:
            found[rank] = why

    with devices(*fakes):
        threads = [threading.Thread(target=run, args=(r,)) for r in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert found == [2, 2]
    assert [f.faults for f in fakes] == [[], []]
    assert [f.copied for f in fakes] == [2, 2]
    w = lastgood.load(root, framework="torch")["w"]
    assert torch.equal(w, torch.tensor([2.0, 2.5]).repeat_interleave(500))


# ------------------------------------------------------------ CUDA's own calls


class Recorder:
    """Stands for torch.cuda, which is not to be had here, and writes down what is asked of it."""

    def __init__(self, calls):
        self.calls = calls

    def Stream(self, device):
        return Stream(self.calls)

    def current_stream(self, device):
        return "compute"

    @contextlib.contextmanager
    def stream(self, stream):
        self.calls.append("on the copy stream {")
        yield
        self.calls.append("}")


class Stream:
    def __init__(self, calls):
        self.calls = calls

    def wait_stream(self, stream):
        self.calls.append(f"copies wait for {stream}")


class Tensor:
    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def copy_(self, source, non_blocking=False):
        self.calls.append(f"{self.name} <- {source.name}{' at once' if non_blocking else ''}")

    def fill_(self, value):
        self.calls.append(f"{self.name} = {value}")


def test_the_calls_that_a_cuda_device_makes():
    calls = []
    fake = type("torch", (), {"cuda": Recorder(calls)})
    device = CudaDevice.__new__(CudaDevice)
    device._torch, device._device, device._copies = fake, "cuda:0", Stream(calls)
    device._value = Tensor(calls, "value")
    device.begin()
    device.copy(Tensor(calls, "host"), Tensor(calls, "source"))
    device.signal(Tensor(calls, "flag"), 7)
    assert calls == [
        "copies wait for compute",
        "on the copy stream {", "host <- source at once", "}",
        "on the copy stream {", "value = 7", "flag <- value at once", "}",
    ]  # fmt: skip


def test_the_functions_of_torch_that_a_cuda_device_uses_are_there():
    for name in ("wait_stream", "wait_event", "record_event", "synchronize"):
        assert callable(getattr(torch.cuda.Stream, name))
    for name in ("current_stream", "stream", "is_current_stream_capturing", "cudart", "check_error", "device"):
        assert callable(getattr(torch.cuda, name))
    assert "non_blocking" in inspect.getdoc(torch.Tensor.copy_)
