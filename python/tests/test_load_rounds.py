# SPDX-License-Identifier: Apache-2.0
"""What goes to a device is read through host memory that does not hold all of it."""

import lastgood
import pytest
import torch
from fake_device import FakeDevice, devices
from lastgood.checkpointer import Checkpointer
from lastgood.load import Load
from lastgood.state import State
from test_cost import peak
from test_gloo import on_processes
from torch import nn

MB = 1 << 20


def model(seed, layers=6, width=64):
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def on_device(fake, module):
    for t in module.state_dict().values():
        fake.tensor(t)
    return module


LAYER = 64 * 64 * 4 + 64 * 4


@pytest.mark.parametrize("staging", [1, LAYER, 2 * LAYER + 1, 100 * MB])
def test_every_tensor_arrives_whatever_the_window(staging, root):
    source = model(0)
    names = {n: t.clone() for n, t in source.state_dict().items()}
    lastgood.save(root, names)
    fake = FakeDevice()
    with devices(fake), lastgood.open(root) as checkpoint:
        target = on_device(fake, model(1))
        load = Load(checkpoint, staging_bytes=staging)
        load.tensors(target.state_dict())
        assert sorted(load.names) == sorted(names)
        load.run()
        for name, t in names.items():
            assert torch.equal(target.state_dict()[name], t), name


def test_optional_tensors_that_are_not_there_stay_as_they_are_on_the_device(root):
    lastgood.save(root, {"a": torch.ones(4)})
    fake = FakeDevice()
    with devices(fake), lastgood.open(root) as checkpoint:
        a, b = fake.tensor(torch.zeros(4)), fake.tensor(torch.full((4,), 7.0))
        load = Load(checkpoint, staging_bytes=16)
        load.tensors({"b": b, "a": a}, optional=True)
        load.run()
    assert (a.tolist(), b.tolist()) == ([1.0] * 4, [7.0] * 4)


def test_a_resume_reads_for_devices_in_rounds_and_steps_back_past_damage_in_a_late_one(root):
    source = model(3)
    opt = torch.optim.AdamW(source.parameters(), lr=0.1)
    with Checkpointer(root) as ckpt:
        ckpt.resume(State(model=source, optim=opt))
        kept = {}
        for step in (1, 2):
            source(torch.ones(2, 64)).sum().backward()
            opt.step()
            opt.zero_grad()
            ckpt.save(State(model=source, optim=opt), step=step)
            ckpt.wait()
            kept[step] = {n: t.clone() for n, t in source.state_dict().items()}
    fake = FakeDevice()
    for step in (2, 1):
        with devices(fake) if step == 2 else devices(fake := FakeDevice()):
            target = on_device(fake, model(9))
            other = torch.optim.AdamW(target.parameters(), lr=0.1)
            with Checkpointer(root, staging_bytes=MB) as ckpt:
                ckpt.session.staging.cap = 2 * LAYER
                run = ckpt.resume(State(model=target, optim=other))
                assert run.step == step
            for name, t in kept[step].items():
                assert torch.equal(target.state_dict()[name], t), name
            assert other.state[target[5].weight]["step"] == step
        # Damage in what is read last.
        folder = next(e.name for e in lastgood.entries(root) if e.kind == "committed" and e.step == 2)
        file = next((root / folder).glob("shard-*model*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)


def test_k07_loading_to_a_device_takes_no_more_host_memory_than_the_cap(tmp_path):
    root = tmp_path / "root"
    lastgood.save(root, {str(i): torch.full((8 * MB,), float(i)) for i in range(8)})  # 256 MiB
    code = """
        sys.path.insert(0, TESTS)
        from fake_device import FakeDevice, devices
        fake = FakeDevice()
        with devices(fake), lastgood.open(root) as checkpoint:
            targets = {str(i): fake.tensor(torch.zeros(8 * MB)) for i in range(8)}
            for t in targets.values():
                t += 0  # touched
            load = lastgood.Load(checkpoint, staging_bytes=64 * MB)
            load.tensors(targets)
            start()
            load.run()
            assert all(t[0] == i and t[-1] == i for i, t in enumerate(targets.values()))
    """.replace("TESTS", repr(__file__.rpartition("/")[0]))
    # The cap, and the buffers of the library.
    assert peak(code, root) < (64 + 72) * MB


def uneven(rank, root):
    """Rank 0 needs rounds, rank 1 none; then one of rank 0's rounds finds damage."""
    from lastgood.pytorch import GlooCommunicator

    comm = GlooCommunicator()
    source = model(0)
    names = source.state_dict()
    with lastgood.Session(root, comm, timeout=60) as session:
        for step in (1, 2):
            with session.save(step) as save:
                save.tensors({n: t + step for n, t in names.items()})
    comm.barrier(60)
    if rank == 0:
        folder = next(e.name for e in lastgood.entries(root) if e.step == 2)
        # What a rank 1 that needs all would not miss: only rank 0 reads the last layer.
        import pathlib

        for file in pathlib.Path(root, folder).glob("shard-*model*.safetensors"):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
    comm.barrier(60)
    fake = FakeDevice()
    targets = {n: torch.zeros_like(t) for n, t in names.items()}
    if rank == 1:
        targets = {"0.bias": torch.zeros(64)}
    with devices(fake), lastgood.Session(root, comm, timeout=60) as session:
        if rank == 0:
            for t in targets.values():
                fake.tensor(t)
        session.staging.cap = LAYER
        found = session.resume(targets)
        ok = all(torch.equal(t, names[n] + found.step) for n, t in targets.items())
    comm.close()
    return found.step, [s.step for s in found.skipped], ok, found.tensors_loaded


def test_k06_ranks_with_different_numbers_of_rounds_agree(root, tmp_path):
    found = on_processes(2, tmp_path, uneven, str(root))
    assert not any(isinstance(f, BaseException) for f in found), found
    assert found == [(1, [2], True, 12), (1, [2], True, 1)]
