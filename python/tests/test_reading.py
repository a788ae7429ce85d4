# SPDX-License-Identifier: Apache-2.0
"""Open checkpoints: parts, views, and that no more is read than asked for."""

import gc
import threading

import lastgood
import numpy as np
import pytest
from frameworks import torch
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture
def saved(root):
    tree = {"w": np.arange(3 * 4 * 5, dtype=np.int32).reshape(3, 4, 5), "s": np.full((), 2.5)}
    lastgood.save(root, tree, step=12, attach={"config.json": b"{}"})
    return root, tree


def test_a_checkpoint_is_a_mapping_that_knows_what_it_is(saved):
    root, tree = saved
    with lastgood.open(root) as c:
        assert (c.step, c.world, c.parent, len(c), set(c)) == (12, 1, None, 2, set(tree))
        assert "w" in c
        assert "v" not in c
        assert 5 not in c
        assert c["w"].shape == (3, 4, 5)
        assert (c["w"].dtype, c["w"].ndim, c["w"].nbytes, len(c["w"])) == ("I32", 3, 240, 3)
        assert c.attached("config.json") == b"{}"
        assert c.nbytes == 248
        assert {f.name for f in c.files()} == {
            "shard-00001-model-00001-of-00001.safetensors",
            "rank-00001.sums",
            "config.json",
        }
        assert sum(f.nbytes for f in c.files()) == c.file_bytes
        assert len(c.layouts()) == 1
        assert c.foreign_files() == []
        assert c["w"].boxes() == [lastgood.Box(0, (0, 0, 0), (3, 4, 5))]
        assert c.verify().problems == ()
    with pytest.raises(lastgood.StateError):
        c["w"]
    with pytest.raises(lastgood.StateError):
        c.verify()


def test_a_checkpoint_is_found_by_step_generation_and_folder(saved):
    root, tree = saved
    first = lastgood.open(root)
    lastgood.save(root, {"w": np.zeros(1)}, step=13)
    for where in (f"{root}@12", f"{root}@g{first.generation}", root / first.folder):
        assert lastgood.open(where).step == 12
        assert np.array_equal(lastgood.load(where)["w"], tree["w"])
    assert lastgood.open(root).parent == (12, first.generation)
    with pytest.raises(lastgood.NotFoundError, match="14"):
        lastgood.open(f"{root}@14")


indices = st.one_of(
    st.integers(-7, 7),
    st.slices(6),
    st.just(Ellipsis),
    st.builds(
        slice, st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9), st.sampled_from([None, 1, 2, 3, -1, -2])
    ),
)


@given(st.one_of(indices, st.lists(indices, max_size=4).map(tuple)))
def test_k12_indexing_means_what_it_means_in_numpy(index):
    whole = np.arange(3 * 4 * 5, dtype=np.int32).reshape(3, 4, 5)
    with lastgood.Session("mem:indexing", new_run=True) as session:
        with session.save(1) as save:
            save.tensors({"w": whole})
        stored = lastgood.open(f"mem:indexing@g{save.info.generation}")["w"]
        try:
            wanted = whole[index]
        except IndexError:
            with pytest.raises(IndexError):
                stored[index]
            return
        got = stored[index]
        assert got.shape == wanted.shape
        assert np.array_equal(got, wanted)
        if not any(
            isinstance(i, slice) and (i.step or 1) < 0 for i in (index if isinstance(index, tuple) else (index,))
        ):
            assert np.array_equal(stored.read(index, framework="torch").numpy(), wanted)
        if not any(
            isinstance(i, slice) and (i.step or 1) != 1 for i in (index if isinstance(index, tuple) else (index,))
        ):
            into = np.zeros(wanted.shape, np.int32)
            stored.into(into, index)
            assert np.array_equal(into, wanted)


@pytest.mark.parametrize("index", [None, True, [0, 1], np.array([0]), 1.5, "a", (..., ...)])
def test_other_indices_are_refused(saved, index):
    with pytest.raises((TypeError, IndexError)):
        lastgood.open(saved[0])["w"][index]


def disk_reads():
    """Bytes that this process asked the file system for."""
    with open("/proc/self/io", encoding="ascii") as f:
        return int(next(line for line in f if line.startswith("rchar")).split()[1])


def test_opening_and_reading_rows_touches_only_their_blocks(root):
    rows, columns = 4096, 1024  # 16 MiB of 4 KiB rows, blocks of 64 KiB
    lastgood.save(root, {"w": np.ones((rows, columns), np.float32), "v": np.ones((rows, columns), np.float32)})
    before = disk_reads()
    checkpoint = lastgood.open(root)
    opened = disk_reads()
    assert opened - before < 64 << 10
    part = checkpoint["w"][1000:1016]
    assert part.shape == (16, columns)
    first = disk_reads()
    assert first - opened < 3 * (64 << 10) + (96 << 10)  # 64 KiB in two blocks, header and table
    checkpoint["w"][2000:2016]
    assert disk_reads() - first <= 2 * (64 << 10) + 4096


def test_damage_elsewhere_does_not_stop_a_read_and_damage_here_names_file_tensor_and_rank(root):
    lastgood.save(root, {"a": np.ones(1 << 18, np.float32), "b": np.ones(1 << 18, np.float32)})
    checkpoint = lastgood.open(root)
    shard = root / checkpoint.folder / "shard-00001-model-00001-of-00001.safetensors"
    with open(shard, "r+b") as f:
        f.seek(-5, 2)
        f.write(b"\x55")
    assert (checkpoint["a"][...] == 1).all()
    assert (checkpoint["b"][:1000] == 1).all()
    with pytest.raises(lastgood.CorruptError, match=r'shard-00001-model.*"b" of rank 0') as caught:
        checkpoint["b"][-1]
    assert caught.value.status == lastgood.Status.CORRUPT
    with pytest.raises(lastgood.CorruptError):
        checkpoint["b"].map()
    found = checkpoint.verify()
    assert [(p.status, p.tensor) for p in found.problems] == [(lastgood.Status.CORRUPT, "b")]
    with pytest.raises(lastgood.CorruptError):
        lastgood.load(root)


def test_views_outlive_the_checkpoint_and_are_read_only(root):
    a = np.arange(100000.0)
    lastgood.save(root, {"a": a})
    with lastgood.open(root) as checkpoint:
        view = checkpoint["a"].map(slice(100, 90000))
        whole = checkpoint["a"].map()
    del checkpoint
    gc.collect()
    assert np.array_equal(view, a[100:90000])
    assert np.array_equal(whole, a)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_objects_in_a_cycle_are_freed_in_an_order_that_does_no_harm(root):
    lastgood.save(root, {"a": np.arange(1000.0)})
    for _ in range(20):
        session = lastgood.Session(root)
        resumed = session.resume()
        cycle = {"view": resumed.checkpoint["a"].map(), "resumed": resumed, "session": session}
        cycle["self"] = cycle
        del session, resumed, cycle
        gc.collect()


def test_a_checkpoint_of_a_resume_outlives_its_session(root):
    lastgood.save(root, {"a": np.arange(1000.0)})
    with lastgood.Session(root) as session:
        resumed = session.resume()
    assert np.array_equal(resumed.checkpoint["a"][...], np.arange(1000.0))
    assert resumed.checkpoint.verify().problems == ()


def test_threads_may_share_a_checkpoint(root):
    a = np.arange(1 << 16, dtype=np.int64).reshape(256, 256)
    lastgood.save(root, {"a": a})
    checkpoint = lastgood.open(root)
    wrong = []

    def work(k):
        for i in range(50):
            row = (i * 7 + k) % 256
            if not np.array_equal(checkpoint["a"][row], a[row]):
                wrong.append(row)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_verification_reports_progress_and_can_be_stopped(root):
    lastgood.save(root, {"a": np.ones(1 << 20, np.float32)})
    seen = []
    checkpoint = lastgood.open(root)
    result = checkpoint.verify(progress=lambda done, total: seen.append((done, total)))
    assert result.nbytes > 4 << 20
    assert seen[-1][0] == seen[-1][1]

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.verify(progress=interrupt)
    assert checkpoint.verify().problems == ()


def elsewhere(t):
    """Stands for a tensor on a device, of which there is none here."""

    class Elsewhere(torch.Tensor):
        is_cpu = False

        def cpu(self):
            return self.as_subclass(torch.Tensor).clone()

    return t.as_subclass(Elsewhere)


def test_tensors_on_a_device_are_read_into_by_way_of_host_memory(root):
    a = torch.arange(12.0).reshape(3, 4)
    lastgood.save(root, {"a": a})
    target = elsewhere(torch.zeros(3, 4))
    lastgood.open(root).read_into({"a": target})
    assert torch.equal(target.as_subclass(torch.Tensor), a)


def test_tensors_on_a_device_are_saved_by_way_of_host_memory(root):
    a = torch.arange(12.0).reshape(3, 4)
    lastgood.save(root, {"a": elsewhere(a)})
    assert torch.equal(lastgood.load(root, framework="torch")["a"], a)


def test_arrays_of_every_kind_are_read_in_any_order_by_one_call(root):
    """Packed torch tensors are described by a short way, which must stay in step with the long one."""
    rng = np.random.default_rng(7)
    tree, targets = {}, {}
    for i in range(60):
        shape = tuple(int(n) for n in rng.integers(0, 4, size=rng.integers(0, 4)))
        tree[f"t{i}"] = value = rng.random(shape).astype(np.float32)
        packed = torch.full(shape, -1.0)
        targets[f"t{i}"] = [
            lambda t=packed: t,
            lambda t=packed: torch.nn.Parameter(t),
            lambda s=shape: torch.full(s[::-1], -1.0).permute(tuple(reversed(range(len(s))))),
            lambda s=shape: np.full(s, -1.0, dtype=np.float32),
            lambda s=shape: np.full(s, -1.0, dtype=np.float32, order="F"),
        ][rng.integers(5)]()
        assert tuple(targets[f"t{i}"].shape) == value.shape
    lastgood.save(root, tree)
    with lastgood.open(root) as c:
        c.read_into(targets)
        for name, t in targets.items():
            got = t.detach().numpy() if isinstance(t, torch.Tensor) else t
            assert np.array_equal(got, tree[name]), name
        bad = dict(list(targets.items())[:9])
        bad["t9"] = torch.zeros(7, dtype=torch.float32)
        with pytest.raises(lastgood.MismatchError, match='"t9"'):
            c.read_into(bad)


def test_a_conjugate_view_is_not_read_into_as_if_it_were_plain(root):
    lastgood.save(root, {"z": torch.ones(3, dtype=torch.complex64)})
    with lastgood.open(root) as c, pytest.raises(lastgood.UnsupportedError, match='"z"'):
        c.read_into({"z": torch.zeros(3, dtype=torch.complex64).conj()})


def test_an_optional_tensor_that_is_missing_leaves_its_device_s_memory_alone(root):
    lastgood.save(root, {"a": torch.ones(3)})
    target = elsewhere(torch.full((2,), 7.0))
    with lastgood.Session(root) as session:
        assert session.resume({"b": target}, optional=True).missing == ("b",)
    assert torch.equal(target.as_subclass(torch.Tensor), torch.full((2,), 7.0))


def test_a_safetensors_file_of_any_writer_is_read(tmp_path):
    from safetensors.torch import save_file

    a, b = torch.randn(3, 4).bfloat16(), torch.arange(5)
    save_file({"a": a, "b": b}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with lastgood.SafetensorsFile(tmp_path / "x.safetensors", framework="torch") as f:
        assert (set(f), f.metadata) == ({"a", "b"}, {"format": "pt"})
        assert torch.equal(f["a"].read(), a)
        assert torch.equal(f["b"][1:3], b[1:3])
    with pytest.raises(lastgood.StateError):
        f["a"].read()
    (tmp_path / "y.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(lastgood.FormatError, match="zip"):
        lastgood.SafetensorsFile(tmp_path / "y.safetensors")
