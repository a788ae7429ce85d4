# SPDX-License-Identifier: Apache-2.0
"""Runs on one rank and on ranks that are threads."""

import threading
import time

import lastgood
import numpy as np
import pytest
from frameworks import torch


def on_ranks(n, work):
    """Calls work(comm) on n threads; returns what each returned, or the exception it raised."""
    found = [None] * n

    def one(comm):
        try:
            found[comm.rank] = work(comm)
        except BaseException as why:
            found[comm.rank] = why

    threads = [threading.Thread(target=one, args=(c,)) for c in lastgood.ThreadCommunicator.create(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    return found


def all_good(found):
    for f in found:
        if isinstance(f, BaseException):
            raise f
    return found


def train(root, steps, keep_last=0):
    with lastgood.Session(root, keep_last=keep_last) as session:
        w = np.zeros(4)
        resumed = session.resume({"w": w})
        first = resumed.step if resumed else 0
        for step in range(first + 1, steps + 1):
            w += step
            with session.save(step) as save:
                save.tensors({"w": w})
                save.state("seen", step * 10)
                save.rank_state("rng", {"pos": (step, "x")})
        return w, resumed, session.status()


def test_a_run_resumes_where_it_was(root):
    _, resumed, status = train(root, 3)
    assert resumed is None
    assert status.saves_committed == 3
    again, resumed, _ = train(root, 5)
    assert (resumed.step, resumed.saved_world, resumed.verified, resumed.skipped) == (3, 1, True, ())
    assert (resumed.tensors_loaded, resumed.bytes_loaded) == (1, 32)
    assert resumed.checkpoint.state["seen"] == 30
    assert resumed.checkpoint.rank_state("rng", 0, 1) == {"pos": (3, "x")}
    assert np.array_equal(again, np.full(4, 15.0))


def test_retention_keeps_the_last_ones(root):
    _, _, status = train(root, 5, keep_last=2)
    assert [e.step for e in lastgood.entries(root)] == [5, 4]
    assert status.removed == 3


def test_a_damaged_newest_checkpoint_is_passed_over_with_the_reason(root):
    train(root, 3)
    newest = next(e for e in lastgood.entries(root) if e.newest)
    (shard,) = (root / newest.name).glob("shard-*-model-*")
    with open(shard, "r+b") as f:
        f.seek(-2, 2)
        f.write(b"\x55")
    w = np.zeros(4)
    with lastgood.Session(root) as session:
        resumed = session.resume({"w": w})
        assert resumed.step == 2
        assert [(s.step, s.status) for s in resumed.skipped] == [(3, lastgood.Status.CORRUPT)]
        assert '"w" of rank 0' in resumed.skipped[0].reason
        assert np.array_equal(w, np.full(4, 3.0))
    with lastgood.Session(root) as session, pytest.raises(lastgood.DamageError, match='"w" of rank 0'):
        session.resume({"w": w}, strict=True)


def test_a_root_with_damaged_checkpoints_only_never_starts_over(root):
    train(root, 2)
    for shard in root.glob("step-*/shard-*"):
        shard.write_bytes(b"")
    with lastgood.Session(root) as session:
        with pytest.raises(lastgood.NoGoodCheckpoint) as caught:
            session.resume()
        assert [s.step for s in caught.value.skipped] == [2, 1]
    with pytest.raises(lastgood.NoGoodCheckpoint):
        lastgood.open(root)


def test_a_run_that_did_not_resume_may_not_save_unless_it_says_that_it_is_new(root):
    train(root, 1)
    with lastgood.Session(root) as session, pytest.raises(lastgood.OtherRunError), session.save(5) as save:
        save.tensors({"w": np.ones(1)})
    with lastgood.Session(root, new_run=True) as session, session.save(5) as save:
        save.tensors({"w": np.ones(1)})
    assert lastgood.open(root).step == 5


def test_a_later_session_supersedes_an_earlier_one(root):
    first = lastgood.Session(root)
    with lastgood.Session(root), pytest.raises(lastgood.SupersededError), first.save(1) as save:
        save.tensors({"w": np.ones(1)})
    first.close()


def test_a_chosen_step_or_generation_is_resumed_from(root):
    train(root, 3)
    generation = lastgood.open(f"{root}@1").generation
    with lastgood.Session(root) as session:
        assert session.resume(step=2).step == 2
    with lastgood.Session(root) as session:
        assert session.resume(generation=generation).step == 1


def test_targets_may_be_described_by_a_function_that_looks_at_the_checkpoint(root):
    train(root, 2)
    got = {}

    def targets(load):
        assert load.checkpoint.step == 2
        got["w"] = np.empty(load.checkpoint["w"].shape)
        load.tensor("w", got["w"])
        load.tensor("absent", np.empty(3), optional=True)

    with lastgood.Session(root) as session:
        resumed = session.resume(targets)
    assert resumed.missing == ("absent",)
    assert np.array_equal(got["w"], np.full(4, 3.0))


def test_what_the_function_raises_is_raised_and_ends_the_resume(root):
    train(root, 2)

    def targets(load):
        raise ZeroDivisionError("mine")

    with lastgood.Session(root) as session:
        with pytest.raises(ZeroDivisionError, match="mine"):
            session.resume(targets)
        with pytest.raises(lastgood.MissingError, match="nothing"):
            session.resume({"nothing": np.ones(1)})
        with pytest.raises(lastgood.MismatchError):
            session.resume({"w": np.ones(1)})
        assert session.resume().step == 2


def test_a_keyboard_interrupt_in_the_function_is_one(root):
    train(root, 1)

    def targets(load):
        raise KeyboardInterrupt

    with lastgood.Session(root) as session, pytest.raises(KeyboardInterrupt):
        session.resume(targets)


def test_non_finite_values_are_refused_when_asked_for(root):
    with lastgood.Session(root) as session:
        with pytest.raises(lastgood.Error, match='"w"'), session.save(1, finite=True) as save:
            save.tensors({"w": np.array([1, np.nan])})
        assert lastgood.entries(root) == []


def test_a_save_that_is_new_only_once(root):
    with lastgood.Session(root) as session:
        for expected in (False, True):
            save = session.save(1, if_new=True)
            save.tensors({"w": np.ones(1)})
            assert save.commit().skipped is expected


def test_an_error_in_the_block_commits_nothing(root):
    with lastgood.Session(root) as session:
        with pytest.raises(ZeroDivisionError), session.save(1) as save:
            save.tensors({"w": np.ones(1)})
            raise ZeroDivisionError
        assert lastgood.entries(root) == []
        with session.save(1) as save:
            save.tensors({"w": np.ones(1)})
    assert lastgood.open(root).step == 1


def test_what_is_closed_is_not_used_again(root):
    session = lastgood.Session(root)
    save = session.save(1)
    save.tensors({"w": np.ones(1)})
    save.commit()
    for again in (save.commit, save.abort, lambda: save.tensors({"v": np.ones(1)})):
        with pytest.raises(lastgood.StateError):
            again()
    late = session.save(2)
    late.tensors({"w": np.ones(1)})
    session.close()
    session.close()
    for again in (late.commit, session.resume, session.status, lambda: session.save(3)):
        with pytest.raises(lastgood.StateError):
            again()


def test_the_memory_that_is_saved_is_kept_until_the_commit(root):
    with lastgood.Session(root) as session, session.save(1) as save:
        save.tensors({f"t{i}": np.full(1000, i) for i in range(100)})
    got = lastgood.load(root)
    assert all((got[f"t{i}"] == i).all() for i in range(100))


@pytest.mark.parametrize(
    "options",
    [{"block_bytes": 5}, {"buffer_bytes": 1}, {"keep_last": -1}, {"domain": "a\0b"}],
)
def test_options_out_of_range_are_refused_by_name(options, root):
    with pytest.raises(lastgood.InvalidError):
        lastgood.Session(root, **options)


def test_pin_rollback_prune_remove_and_sweep(root):
    train(root, 4)
    lastgood.pin(f"{root}@1", "baseline")
    assert [(e.step, e.pinned, e.note) for e in lastgood.entries(root)][-1] == (1, True, "baseline")
    with pytest.raises(lastgood.ProtectedError):
        lastgood.remove(f"{root}@1")
    lastgood.remove(f"{root}@3")
    lastgood.rollback(f"{root}@2", "spike")
    assert lastgood.open(root).step == 2
    record = next(e for e in lastgood.entries(root) if e.kind == "rollback")
    assert (record.target[0], record.note) == (2, "spike")
    lastgood.unpin(f"{root}@1")
    plan = lastgood.prune(root, keep_last=1)
    assert {(p.step, p.removed) for p in plan} >= {(2, False), (1, True)}
    assert len(list(root.glob("step-*"))) == 3
    lastgood.prune(root, keep_last=1, dry_run=False)
    assert lastgood.open(root).step == 2
    (root / ".step-000000000009.g1.9.0123456789abcdef.partial").mkdir()
    assert [s.name for s in lastgood.sweep(root)] == [] or lastgood.sweep(root)[0].name.startswith(".step-")
    assert any(e.kind == "owner" for e in lastgood.entries(root, all=True))


# ---------------------------------------------------------------------- ranks


def test_k08_sharded_tensors_are_saved_by_four_ranks_and_loaded_by_three(root):
    whole = np.arange(10 * 6, dtype=np.float32).reshape(10, 6)

    def save(comm):
        layout = lastgood.Layout([4], [lastgood.Split(0)])
        with lastgood.Session(root, comm) as session, session.save(7) as s:
            at = layout.offset(comm.rank, whole.shape)
            n = layout.local_shape(comm.rank, whole.shape)
            s.tensor("w", whole[at[0] : at[0] + n[0]], shape=whole.shape, layout=layout)
            flat = lastgood.Layout.flat_buffer(60, [4])
            begin, length = flat.local_range(comm.rank, whole.shape, 0)
            part = whole.reshape(-1)[begin : begin + length]
            s.tensor("m", part, shape=whole.shape, layout=flat, group="optim")
            s.tensors({"same": np.ones(5)})
            s.state("step", 7)
            s.rank_bytes("rng", bytes([comm.rank]))
        return s.info

    infos = all_good(on_ranks(4, save))
    assert len({i.generation for i in infos}) == 1

    def load(comm):
        layout = lastgood.Layout([3], [lastgood.Split(1, mode="even")])
        mine = np.zeros(layout.local_shape(comm.rank, whole.shape), np.float32)
        same, m = np.zeros(5), np.zeros(whole.shape, np.float32)

        def targets(load):
            load.tensor("w", mine, shape=whole.shape, layout=layout)
            load.tensors({"same": same, "m": m})

        with lastgood.Session(root, comm) as session:
            resumed = session.resume(targets)
            with pytest.raises(lastgood.WorldError):
                resumed.checkpoint.rank_bytes("rng", comm.rank, comm.size)
            assert resumed.checkpoint.rank_bytes("rng", comm.rank) == bytes([comm.rank])
        at = layout.offset(comm.rank, whole.shape)[1]
        assert np.array_equal(mine, whole[:, at : at + mine.shape[1]])
        assert np.array_equal(m, whole)
        return resumed.step

    assert all_good(on_ranks(3, load)) == [7, 7, 7]
    assert lastgood.open(root)["w"].n_boxes == 4
    assert np.array_equal(lastgood.load(root)["w"], whole)


def test_boxes_that_follow_no_rule(root):
    whole = np.arange(20.0).reshape(4, 5)
    parts = {0: [((0, 0), whole[:3, :2]), ((3, 0), whole[3:, :])], 1: [((0, 2), whole[:3, 2:])]}

    def save(comm):
        with lastgood.Session(root, comm) as session, session.save(1) as s:
            s.boxes("w", "F64", (4, 5), parts[comm.rank])

    all_good(on_ranks(2, save))
    assert np.array_equal(lastgood.load(root)["w"], whole)


@pytest.mark.parametrize("shape", [(3, 6), (2, 5), (18,)])
def test_k11_a_part_of_the_wrong_size_is_refused_before_memory_is_touched(shape, root):
    layout = lastgood.Layout([1], [lastgood.Split(0)])
    with lastgood.Session(root) as session:
        save = session.save(1)
        with pytest.raises(lastgood.MismatchError, match=r'"w".*\[2, 6\]'):
            save.tensor("w", np.ones(shape), shape=(2, 6), layout=layout)
        save.abort()
        with session.save(1) as save:
            save.tensor("w", np.ones((2, 6)), shape=(2, 6), layout=layout)
        with pytest.raises(lastgood.MismatchError, match=r'"w".*\[2, 6\]'):
            session.resume(lambda load: load.tensor("w", np.ones(shape), shape=(2, 6), layout=layout))
        with pytest.raises(lastgood.MismatchError, match="layout of which"):
            session.save(2).tensor("w", np.ones((1, 6)), shape=(2, 6))


def test_k06_an_error_of_one_rank_in_describing_reaches_all_at_once(root):
    def save(comm):
        with lastgood.Session(root, comm, timeout=30) as session, session.save(1) as s:
            s.tensors({"w": np.zeros(2, np.complex128) if comm.rank == 1 else np.ones(2)})

    began = time.monotonic()
    found = on_ranks(3, save)
    assert time.monotonic() - began < 20
    assert all(isinstance(f, lastgood.UnsupportedError) for f in found)
    assert all('"w": safetensors has no dtype for NumPy\'s complex128' in str(f) for f in found)
    assert [f.rank for f in (found[0], found[2])] == [1, 1]


def test_k06_an_error_of_the_trainer_in_the_block_reaches_all_at_once(root):
    def save(comm):
        with lastgood.Session(root, comm, timeout=30) as session, session.save(1) as s:
            s.tensors({"w": np.ones(2)})
            if comm.rank == 2:
                raise ZeroDivisionError("of the trainer")

    began = time.monotonic()
    found = on_ranks(3, save)
    assert time.monotonic() - began < 20
    assert isinstance(found[2], ZeroDivisionError)
    for other in found[:2]:
        assert isinstance(other, lastgood.CancelledError)
        assert "rank 2" in str(other)
        assert "ZeroDivisionError: of the trainer" in str(other)
    assert lastgood.entries(root) == []


def test_k06_an_error_of_one_rank_in_describing_targets_reaches_all(root):
    lastgood.save(root, {"w": np.ones(2)})

    def load(comm):
        def targets(load):
            if comm.rank == 1:
                raise OSError("no such host memory")
            load.tensors({"w": np.zeros(2)})

        with lastgood.Session(root, comm, timeout=30) as session:
            session.resume(targets)

    found = on_ranks(2, load)
    assert type(found[1]) is OSError
    assert isinstance(found[0], lastgood.CancelledError)
    assert "no such host memory" in str(found[0])


def test_k06_a_rank_that_is_late_is_named(root):
    def save(comm):
        with lastgood.Session(root, comm, timeout=1) as session:
            if comm.rank == 1:
                return
            with session.save(1) as s:
                s.tensors({"w": np.ones(2)})

    found = on_ranks(2, save)
    assert isinstance(found[0], lastgood.CommunicatorError)
    assert found[0].rank == 1


def test_tensors_that_should_be_equal_and_are_not_are_named(root):
    def save(comm):
        with lastgood.Session(root, comm) as session, session.save(1) as s:
            s.tensors({"w": np.full(2, comm.rank)})

    found = on_ranks(2, save)
    assert all(isinstance(f, lastgood.ConflictError) and '"w"' in str(f) for f in found)


def test_buffers_that_differ_are_kept_per_rank(root):
    def save(comm):
        with lastgood.Session(root, comm) as session, session.save(1) as s:
            s.tensors({"mean": np.full(2, float(comm.rank))}, buffer=True)
        return s.info.unshared

    assert all_good(on_ranks(2, save)) == [1, 1]
    stored = lastgood.open(root)["mean"]
    assert stored.per_rank
    assert [stored.read(copy_of_rank=r)[0] for r in range(2)] == [0, 1]

    def load(comm):
        mean = np.full(2, 9.0)
        with lastgood.Session(root, comm) as session:
            session.resume({"mean": mean})
        return mean[0]

    assert all_good(on_ranks(2, load)) == [0, 1]


class Queues(lastgood.Communicator):
    """Ranks that are threads, by Python functions: what a user writes."""

    def __init__(self, rank, shared):
        super().__init__(rank, len(shared["slots"]))
        self.shared = shared

    def exchange(self, value, timeout):
        self.shared["slots"][self.rank] = value
        try:
            self.shared["barrier"].wait(timeout)
            found = list(self.shared["slots"])
            self.shared["barrier"].wait(timeout)
        except threading.BrokenBarrierError:
            raise lastgood.TimeoutError("somebody is late", rank=0) from None
        return found

    def barrier(self, timeout):
        self.exchange(None, timeout)

    def all_gather(self, data, timeout):
        return self.exchange(data, timeout)

    def broadcast(self, data, root, timeout):
        return self.exchange(data, timeout)[root]

    def all_to_all(self, parts, timeout):
        return [theirs[self.rank] for theirs in self.exchange(parts, timeout)]


def on_queues(n, work, kind=Queues):
    shared = {"slots": [None] * n, "barrier": threading.Barrier(n)}
    found = [None] * n

    def one(rank):
        try:
            found[rank] = work(kind(rank, shared))
        except BaseException as why:
            found[rank] = why

    threads = [threading.Thread(target=one, args=(r,)) for r in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return found


def test_a_communicator_of_python_functions(root):
    def work(comm):
        with lastgood.Session(root, comm) as session:
            assert session.resume() is None
            with session.save(1) as s:
                s.tensors({"mean": torch.full((3,), float(comm.rank))}, buffer=True)
                s.state(f"of {comm.rank}", comm.rank)
        mean = torch.zeros(3)
        with lastgood.Session(root, comm) as session:
            assert dict(session.resume({"mean": mean}).checkpoint.state) == {f"of {r}": r for r in range(3)}
        return mean[0].item()

    assert all_good(on_queues(3, work)) == [0, 1, 2]


def test_what_a_communicator_raises_is_the_cause_and_keeps_status_and_rank(root):
    class Late(Queues):
        def all_gather(self, data, timeout):
            raise lastgood.TimeoutError("rank 4 did not arrive", rank=4)

    found, _ = on_queues(2, lambda comm: lastgood.Session(root, comm), Late)
    assert isinstance(found, lastgood.TimeoutError)
    assert (found.rank, found.status) == (4, lastgood.Status.TIMEOUT)
    assert "rank 4 did not arrive" in str(found)

    class Broken(Queues):
        def all_gather(self, data, timeout):
            raise ConnectionError("cable")

    found, _ = on_queues(2, lambda comm: lastgood.Session(root, comm), Broken)
    assert isinstance(found, ConnectionError)

    class Interrupted(Queues):
        def all_gather(self, data, timeout):
            raise KeyboardInterrupt

    found, _ = on_queues(2, lambda comm: lastgood.Session(root, comm), Interrupted)
    assert isinstance(found, KeyboardInterrupt)


@pytest.mark.parametrize("wrong", [[], [b"x", b"y"], [5], None, ["text"]])
def test_a_communicator_that_returns_nonsense_is_an_error(wrong, root):
    class Wrong(Queues):
        def all_gather(self, data, timeout):
            return wrong

    found, _ = on_queues(2, lambda comm: lastgood.Session(root, comm), Wrong)
    assert isinstance(found, (lastgood.CommunicatorError, TypeError))


# -------------------------------------------------------------------- sampler


def test_k10_a_sampler_goes_on_where_the_run_was(root):
    sampler = lastgood.Sampler(1000, seed=7)
    first = sampler.peek(1500)
    assert sorted(first[:1000]) == list(range(1000))
    assert first[:1000] != list(range(1000))
    sampler.advance(1200)
    assert (sampler.epoch, sampler.consumed) == (1, 200)
    with lastgood.Session(root) as session, session.save(1) as save:
        sampler.save(save, "data")
    again = lastgood.Sampler(1000)
    again.load(lastgood.open(root), "data")
    assert (again.seed, again.peek(300)) == (7, first[1200:])
    assert again.at(1, 0) == first[1000]
    with pytest.raises(lastgood.MismatchError):
        lastgood.Sampler(999).load(lastgood.open(root), "data")
    assert lastgood.Sampler(5, shuffle=False).peek(7) == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.at(0, 1000),
        lambda s: s.at(0, -1),
        lambda s: s.advance(-1),
        lambda s: lastgood.Sampler(0),
        lambda s: lastgood.Sampler(2**49),
        lambda s: lastgood.Sampler(-1),
    ],
)
def test_positions_and_sizes_out_of_range_are_refused(call):
    with pytest.raises((IndexError, lastgood.Error, ValueError)):
        call(lastgood.Sampler(1000))
