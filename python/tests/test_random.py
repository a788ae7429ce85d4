# SPDX-License-Identifier: Apache-2.0
"""Random streams in checkpoints."""

import contextlib
import random
import subprocess
import sys
import types

import lastgood
import lastgood.random
import numpy as np
import pytest
import torch
from lastgood.random import RandomPart
from positions import Spoiled, on_mesh, ranks, resume, save, save_on_ranks


class FakeCuda:
    """A device module whose generators are of the host."""

    def __init__(self, count=1, current=0, used=(), initialised=True):
        self.generators = [torch.Generator().manual_seed(100 + i) for i in range(count)]
        self.current, self.used, self.initialised = current, used, initialised
        self.is_available = lambda: True
        self.is_initialized = lambda: self.initialised
        self.current_device = lambda: self.current
        self.device_count = lambda: len(self.generators)
        self.get_rng_state = lambda i: self.generators[i].get_state()
        self.set_rng_state = lambda state, i: self.generators[i].set_state(state)

    def manual_seed(self, seed):
        self.generators[self.current].manual_seed(seed)

    @contextlib.contextmanager
    def device(self, i):
        before, self.current = self.current, i
        yield
        self.current = before

    def draw(self, i=0):
        return torch.rand((), generator=self.generators[i]).item()


@pytest.fixture
def cuda(monkeypatch):
    def install(**options):
        made = FakeCuda(**options)
        fake = types.SimpleNamespace(
            cuda=made,
            backends=types.SimpleNamespace(),
            _C=types.SimpleNamespace(_cuda_hasPrimaryContext=lambda i: i in made.used),
        )
        monkeypatch.setattr(lastgood.random, "_devices", lambda _: devices(fake))
        return made

    devices = lastgood.random._devices
    return install


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


GLOBALS = {
    "python": lambda: (random.random(), random.gauss(0, 1)),
    "numpy": lambda: (np.random.rand(), np.random.randn()),
    "torch.cpu": lambda: (torch.rand(()).item(), torch.randn(3).tolist()),
}


def draw_all(cuda=None):
    found = {name: draw() for name, draw in GLOBALS.items()}
    if cuda is not None:
        found["torch.cuda.0"] = cuda.draw(cuda.current)
    return found


def test_every_global_stream_goes_on_exactly(root, cuda):
    device = cuda()
    seed_all(1)
    random.gauss(0, 1)  # the second of a pair is kept for the next call
    np.random.randn()
    save(root, random=RandomPart())
    wanted = [draw_all(device) for _ in range(3)]
    seed_all(2)
    device.manual_seed(2)
    of = resume(root, random=RandomPart())
    assert [draw_all(device) for _ in range(3)] == wanted
    assert of.notes == []


KINDS = {
    "torch": (lambda: torch.Generator().manual_seed(5), lambda g: torch.randn(3, generator=g).tolist()),
    "pcg64": (lambda: np.random.default_rng(5), lambda g: (g.random(3).tolist(), int(g.integers(9)), g.normal())),
    "mt19937": (lambda: np.random.Generator(np.random.MT19937(5)), lambda g: g.random(3).tolist()),
    "philox": (lambda: np.random.Generator(np.random.Philox(5)), lambda g: (g.random(3).tolist(), int(g.integers(9)))),
    "sfc64": (lambda: np.random.Generator(np.random.SFC64(5)), lambda g: g.random(3).tolist()),
    "legacy": (lambda: np.random.RandomState(5), lambda g: (g.rand(3).tolist(), g.randn())),
    "python": (lambda: random.Random(5), lambda g: (g.random(), g.gauss(0, 1))),
}


def test_named_generators_of_every_kind_go_on_exactly(root):
    made = {name: make() for name, (make, _) in KINDS.items()}
    for name, (_, draw) in KINDS.items():
        draw(made[name])
    save(root, random=RandomPart(made))
    wanted = {name: draw(made[name]) for name, (_, draw) in KINDS.items()}
    fresh = {name: make() for name, (make, _) in KINDS.items()}
    resume(root, random=RandomPart(fresh))
    assert {name: draw(fresh[name]) for name, (_, draw) in KINDS.items()} == wanted


def test_what_is_no_generator_is_refused_by_name():
    for bad in (5, random.SystemRandom(), object()):
        with pytest.raises(lastgood.InvalidError, match=r'generator "noise": .*torch\.Generator'):
            RandomPart({"noise": bad})


def test_it_needs_neither_torch_nor_numpy_and_the_standard_library_stays_reachable():
    code = (
        "import random, sys, lastgood.random\n"
        "assert random.__name__ == 'random' and lastgood.random.random is random\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(lastgood.random.RandomPart())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "<RandomPart python>\n"


def test_numpy_that_only_the_checkpoint_has_is_imported(root):
    seed_all(3)
    save(root, random=RandomPart())
    wanted = np.random.rand()
    code = (
        "import sys, lastgood\n"
        "from lastgood.parts import Axis, Ranks, Restoring\n"
        "from lastgood.random import RandomPart\n"
        "of = Restoring(lastgood.Load(lastgood.open(sys.argv[1])), Ranks(0, 1, (), (), None), exact=False)\n"
        "part = RandomPart()\n"
        "part.describe(of)\n"
        "part.restore(of)\n"
        "import numpy\n"
        "print(numpy.random.rand(), 'torch' in sys.modules, of.notes)"
    )
    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=True)
    drawn, torch_there, notes = done.stdout.split(maxsplit=2)
    assert (float(drawn), torch_there) == (wanted, "False")
    assert '"random.torch.cpu" was saved and is not here' in notes


STREAMS = ["python", "numpy", "torch.cpu", "torch.cuda.0"]


def spoiled(root, device, spoil):
    """Saves with one stream spoiled; returns what an undisturbed run draws next."""
    seed_all(7)
    device.manual_seed(7)
    save(root, spoil=spoil, random=RandomPart())
    wanted = draw_all(device)
    seed_all(8)
    device.manual_seed(8)
    return wanted


def states(device):
    return (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        [g.get_state().tolist() for g in device.generators],
    )


@pytest.mark.parametrize("lost", STREAMS)
def test_k09_f146_a_missing_stream_hides_none_of_the_others(lost, roots, cuda, caplog):
    device, root = cuda(), roots.new()
    wanted = spoiled(root, device, lambda s: Spoiled(s, drop=(f"random.{lost}",)))
    before = states(device)
    with pytest.raises(lastgood.MissingError, match=f'"{lost}" is missing') as why:
        resume(root, random=RandomPart())
    assert not any(f'"{other}"' in str(why.value) for other in STREAMS if other != lost)
    assert states(device) == before  # refused before anything changed
    of = resume(root, exact=False, random=RandomPart())
    found = draw_all(device)
    assert {n: v for n, v in found.items() if n != lost} == {n: v for n, v in wanted.items() if n != lost}
    assert found[lost] != wanted[lost]
    assert len(of.notes) == 1
    assert f'"random.{lost}" is missing' in of.notes[0]
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == of.notes


@pytest.mark.parametrize("lost", STREAMS)
@pytest.mark.parametrize(
    "change",
    [lambda d: d[: len(d) // 2], lambda d: d + b"1", lambda d: b'{"some": "other value"}', lambda d: b"", lambda d: b"[1, 2]"],
    ids=["truncated", "too long", "another value", "empty", "a list"],
)  # fmt: skip
def test_k09_f145_a_damaged_or_mistyped_stream_is_an_error_in_exact_mode_and_a_warning_otherwise(
    lost, change, roots, cuda, caplog
):
    device, root = cuda(), roots.new()
    wanted = spoiled(root, device, lambda s: Spoiled(s, change={f"random.{lost}": change}))
    before = states(device)
    with pytest.raises(
        lastgood.MismatchError, match=f'"{lost}" of rank 0 is damaged or of another kind: .*exact=False'
    ):
        resume(root, random=RandomPart())
    assert states(device) == before
    of = resume(root, exact=False, random=RandomPart())
    found = draw_all(device)
    assert {n: v for n, v in found.items() if n != lost} == {n: v for n, v in wanted.items() if n != lost}
    assert f'"random.{lost}" of rank 0' in of.notes[0]
    assert of.notes[0].endswith("derived anew from run and generation")
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == of.notes


def test_k09_f145_a_generator_of_another_kind_is_told(root):
    save(root, random=RandomPart({"noise": np.random.default_rng(1)}))
    other = RandomPart({"noise": np.random.Generator(np.random.SFC64(1))})
    with pytest.raises(lastgood.MismatchError, match=r'"generator\.noise" .*the state of a PCG64; here is a SFC64'):
        resume(root, random=other)


def test_k09_f143_the_absence_of_all_streams_or_of_a_named_one_is_an_error(roots):
    empty, plain, more = roots.new(), roots.new(), roots.new()
    save(empty, step=5)
    with pytest.raises(lastgood.MissingError, match="step 5 was saved without random streams"):
        resume(empty, random=RandomPart())
    of = resume(empty, exact=False, random=RandomPart())
    assert len(of.notes) >= 3
    save(plain, random=RandomPart())
    with pytest.raises(lastgood.MissingError, match=r'"generator\.noise" is missing'):
        resume(plain, random=RandomPart({"noise": torch.Generator()}))
    save(more, random=RandomPart({"noise": torch.Generator()}))
    with pytest.raises(
        lastgood.MismatchError, match=r'was saved and is not here: give RandomPart\(generators={"noise"'
    ):
        resume(more, random=RandomPart())


def test_bytes_that_are_damaged_on_disk_are_damage_of_the_checkpoint(root):
    save(root, random=RandomPart())
    (raw,) = root.glob("step-*/shard-*-raw-*")
    data = bytearray(raw.read_bytes())
    data[-1] ^= 1
    raw.write_bytes(data)
    with pytest.raises(lastgood.DamageError):
        resume(root, random=RandomPart(), exact=False)


# ------------------------------------------------------------------------ ranks


def on_four(who):
    return {"random": RandomPart({"own": torch.Generator().manual_seed(who.rank)})}


def next_of(root, who, **options):
    """What a rank of any mesh draws next, from its own generator and from Python's."""
    own = torch.Generator().manual_seed(99)
    of = resume(root, who, random=RandomPart({"own": own}), **options)
    return torch.rand((), generator=own).item(), random.random(), of


def test_each_rank_of_the_same_mesh_gets_its_own_stream_whatever_the_axes_are_called(roots):
    root = roots.new()
    mesh = ({"dp": 2, "tp": 2}, ["dp"])
    save_on_ranks(root, 4, on_four, mesh=mesh)
    wanted = [torch.rand((), generator=torch.Generator().manual_seed(r)).item() for r in range(4)]
    assert [next_of(root, on_mesh(r, *mesh))[0] for r in range(4)] == wanted
    renamed = ({"replicate": 2, "one": 1, "tensor": 2}, ["replicate", "one"])
    assert [next_of(root, on_mesh(r, *renamed))[0] for r in range(4)] == wanted


def test_a_rank_finds_its_stream_by_its_place_in_the_mesh(root):
    save_on_ranks(root, 4, on_four, mesh=({"dp": 2, "tp": 2}, ["dp"]))
    wanted = [torch.rand((), generator=torch.Generator().manual_seed(r)).item() for r in range(4)]
    # Ranks 1 and 2 have changed places.
    for rank, place in enumerate([0, 2, 1, 3]):
        who = on_mesh(place, {"dp": 2, "tp": 2}, ["dp"])._replace(rank=rank)
        assert next_of(root, who)[0] == wanted[place]


def test_on_another_mesh_streams_are_derived_equal_in_a_tensor_parallel_group_and_reported(root):
    save_on_ranks(root, 4, on_four)
    mesh = ({"dp": 2, "tp": 2}, ["dp"])
    found = [next_of(root, on_mesh(r, *mesh), seed=11) for r in range(4)]  # exact: resharding was asked for
    pairs = [f[:2] for f in found]
    assert pairs[0] == pairs[1] != pairs[2] == pairs[3]
    assert pairs[0][0] != pairs[0][1]
    for _, _, of in found:
        (note,) = of.notes
        assert "python, numpy, torch.cpu, generator.own: derived anew" in note
        assert "saved on dp 4 and this is dp 2 x tp 2" in note
    again = [next_of(root, on_mesh(r, *mesh), seed=11)[:2] for r in range(4)]
    assert again == pairs
    assert [next_of(root, on_mesh(r, *mesh), seed=12)[:2] for r in range(4)] != pairs
    # As many ranks, but they do not take the samples in the same way.
    assert next_of(root, on_mesh(0, {"dp": 4}, []))[2].notes
    # One rank takes what the first data-parallel rank takes on any mesh.
    assert next_of(root, ranks(), seed=11)[:2] == pairs[0]


def test_derived_streams_differ_between_generations(root):
    save(root, step=1, random=RandomPart())
    resume(root, ranks(0, 2), random=RandomPart())
    one = draw_all()
    save(root, step=2, random=RandomPart())
    resume(root, ranks(0, 2), random=RandomPart())
    other = draw_all()
    assert all(one[name] != other[name] for name in GLOBALS)


# ---------------------------------------------------------------------- devices


def test_a_rank_finds_its_device_stream_again_whatever_number_the_device_has(root, cuda):
    device = cuda(count=4, current=2, used=(0, 2))
    assert repr(RandomPart()) == "<RandomPart python, numpy, torch.cpu, torch.cuda.0, torch.cuda.1>"
    save(root, random=RandomPart())
    wanted = device.draw(2), device.draw(0)
    device = cuda(count=2, current=0, used=(1,))
    resume(root, random=RandomPart())
    assert (device.draw(0), device.draw(1)) == wanted


def test_a_device_that_is_not_in_use_is_not_asked(root, cuda):
    device = cuda(initialised=False)
    device.get_rng_state = None
    save(root, random=RandomPart())
    assert resume(root, random=RandomPart()).notes == []


def test_a_device_that_is_gone_is_told_and_one_that_is_new_stays(roots, cuda):
    with_device, without = roots.new(), roots.new()
    device = cuda()
    save(with_device, random=RandomPart())
    device.initialised = False
    save(without, random=RandomPart())
    with pytest.raises(lastgood.MismatchError, match=r'"torch\.cuda\.0" was saved and is not here'):
        resume(with_device, random=RandomPart())
    device.initialised = True
    before = device.generators[0].get_state()
    assert resume(without, random=RandomPart()).notes == []
    assert torch.equal(device.generators[0].get_state(), before)


def test_on_another_mesh_each_device_is_seeded_and_the_current_one_stays(root, cuda):
    device = cuda(count=2, current=1, used=(0, 1))
    save(root, random=RandomPart())
    resume(root, ranks(1, 3), random=RandomPart())
    assert device.current == 1
    assert device.draw(0) != device.draw(1)
