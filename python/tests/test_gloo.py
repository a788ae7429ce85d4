# SPDX-License-Identifier: Apache-2.0
"""Ranks of torch.distributed, each a process."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import lastgood
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lastgood.pytorch import GlooCommunicator, StoreKeys


def one(rank, size, store, work, queue, args):
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        queue.put((rank, None, work(rank, *args)))
    except BaseException as why:
        queue.put((rank, why, None))
    # Groups that are broken do not end well, and need not.
    queue.close()
    queue.join_thread()
    os._exit(0)


def on_processes(size, folder, work, *args, without=()):
    """Calls work(rank, …) in processes; what each returned, or the exception it raised. None for those that are killed."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    store = os.path.join(folder, f"store-{time.monotonic_ns()}")
    processes = [context.Process(target=one, args=(r, size, store, work, queue, args)) for r in range(size)]
    for p in processes:
        p.start()
    found = [None] * size
    try:
        for _ in range(size - len(without)):
            rank, error, result = queue.get(timeout=120)
            found[rank] = result if error is None else error
        for p in processes:
            p.join(60)
    finally:
        for p in processes:
            if p.is_alive():
                p.kill()
                p.join()
    return found


def save_and_resume(rank, root):
    comm = GlooCommunicator()
    assert (comm.rank, comm.size) == (rank, 3)
    whole = torch.arange(70.0).reshape(10, 7)
    layout = lastgood.Layout([3], [lastgood.Split(0)])
    mine = whole.chunk(3)[rank]
    with lastgood.Session(root, comm) as session:
        assert session.resume() is None
        with session.save(5) as save:
            save.tensor("w", mine, shape=(10, 7), layout=layout)
            save.tensors({"mean": torch.full((4,), float(rank))}, buffer=True)
            save.tensors({"same": torch.ones(3)})
            save.state(f"of {rank}", "x" * (1000 * rank))
            save.rank_state("rng", (rank, torch.get_rng_state().numpy().tobytes()))
    got, mean = torch.zeros_like(mine), torch.zeros(4)

    def targets(load):
        load.tensor("w", got, shape=(10, 7), layout=layout)
        load.tensors({"mean": mean})

    with lastgood.Session(root, comm) as session:
        resumed = session.resume(targets)
        state = {k: len(v) for k, v in resumed.checkpoint.state.items()}
        rng = resumed.checkpoint.rank_state("rng", rank, 3)
    comm.close()
    return resumed.step, torch.equal(got, mine), mean[0].item(), state, rng[0]


def test_three_processes_save_and_resume(root, tmp_path):
    found = on_processes(3, tmp_path, save_and_resume, str(root))
    for rank, f in enumerate(found):
        assert f == (5, True, rank, {"of 0": 0, "of 1": 1000, "of 2": 2000}, rank)
    assert torch.equal(lastgood.load(root, framework="torch")["w"], torch.arange(70.0).reshape(10, 7))


def collectives(rank, size):
    comm = GlooCommunicator()
    own = [bytes([r]) * r * 1000 for r in range(size)]
    assert comm.all_gather(own[rank], 60) == own
    assert comm.all_gather(b"", 60) == [b""] * size
    huge = [b"x" * (30 << 20)] + [b"y"] * (size - 1)
    assert comm.all_gather(huge[rank], 60) == huge
    for root in range(size):
        for data in (b"", b"abc", bytes(300000)):
            assert comm.broadcast(data if rank == root else b"", root, 60) == data
    comm.barrier(60)
    sent = [bytes([rank, r]) * (r + 2 * rank) for r in range(size)]
    assert comm.all_to_all(sent, 60) == [bytes([r, rank]) * (rank + 2 * r) for r in range(size)]
    assert comm.all_to_all([b""] * size, 60) == [b""] * size
    comm.close()
    return True


def test_the_collectives_pass_messages_of_any_sizes(tmp_path):
    assert on_processes(3, tmp_path, collectives, 3) == [True] * 3


def on_a_part(rank, root):
    group = dist.new_group([1, 2])
    if rank == 0:
        with pytest.raises((lastgood.InvalidError, ValueError)):
            GlooCommunicator(group)
        return None
    comm = GlooCommunicator(group)
    with lastgood.Session(root, comm) as session, session.save(1) as save:
        save.rank_state("me", rank)
    return comm.rank


def test_a_part_of_the_ranks_saves_on_its_own(root, tmp_path):
    assert on_processes(3, tmp_path, on_a_part, str(root)) == [None, 0, 1]
    checkpoint = lastgood.open(root)
    assert [checkpoint.rank_state("me", r) for r in range(2)] == [1, 2]


def again(rank):
    """A group is made again when an earlier one of the same ranks has ended, at once on one rank and late on another;
    and ranks 1 and 2 have a group while rank 1 has others besides.
    """
    part = dist.new_group([1, 2])
    more = [dist.new_group([0, 1]) for _ in range(3)]  # rank 2 is in none
    for i in range(5):
        if rank:
            comm = GlooCommunicator(part, timeout=40)
            assert comm.all_gather(bytes([rank, i]), 30) == [bytes([1, i]), bytes([2, i])]
            if rank == 2 and i % 2:
                time.sleep(0.3)
            comm.close()
        whole = GlooCommunicator(dist.group.WORLD if i % 2 else None, timeout=40)
        other = GlooCommunicator(timeout=40)
        assert whole.all_gather(bytes([rank]), 30) == [b"\0", b"\1", b"\2"]
        if rank != i % 3:
            whole.close()
        assert other.all_gather(bytes([rank]), 30) == [b"\0", b"\1", b"\2"]
        other.close()
        whole.close()
        with pytest.raises(lastgood.CommunicatorError, match="closed"):
            whole.barrier(1)
    return len(more)


def test_k06_a_group_may_be_made_again_after_it_has_ended_and_by_ranks_that_are_in_different_groups(tmp_path):
    assert on_processes(3, tmp_path, again) == [3, 3, 3]


def stay_until(done, *ranks):
    """Until these ranks are done, which say so by a file."""
    end = time.monotonic() + 100
    while not all(os.path.exists(f"{done}-{r}") for r in ranks) and time.monotonic() < end:
        time.sleep(0.01)


def late(rank, root, done):
    comm = GlooCommunicator()
    session = lastgood.Session(root, comm, timeout=3)
    comm.barrier(60)  # the others arrive together
    if rank == 1:
        stay_until(done, 0, 2)
        return None
    try:
        return refused(session)
    finally:
        open(f"{done}-{rank}", "x").close()


def refused(session):
    began = time.monotonic()
    try:
        with session.save(1) as save:
            save.tensors({"w": torch.ones(1)})
    except lastgood.Error as why:
        with pytest.raises(lastgood.Error, match="broken"), session.save(1) as save:
            save.tensors({"w": torch.ones(1)})
        return type(why).__name__, why.rank, str(why), time.monotonic() - began
    return None


def test_k06_a_late_process_is_named_on_all_others_within_the_deadline(root, tmp_path):
    found = on_processes(3, tmp_path, late, str(root), str(tmp_path / "done"))
    for rank in (0, 2):
        name, culprit, text, seconds = found[rank]
        assert (name, culprit) == ("TimeoutError", 1)
        assert f"rank 1 did not arrive within 3000 ms (rank {rank} waited in all-gather" in text
        assert seconds < 60  # rank 1 stays until they have given up


def dying(rank, root):
    comm = GlooCommunicator()
    session = lastgood.Session(root, comm, timeout=20)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        with session.save(1) as save:
            save.tensors({"w": torch.ones(1)})
    except lastgood.Error as why:
        return why.rank, str(why), time.monotonic() - began
    return None


def test_k06_a_process_that_dies_is_named_on_all_others(root, tmp_path):
    found = on_processes(3, tmp_path, dying, str(root), without=(1,))
    for rank in (0, 2):
        culprit, text, seconds = found[rank]
        assert culprit == 1, text
        assert "rank 1" in text
        assert seconds < 60


def astray(rank, root):
    comm = GlooCommunicator()
    comm.barrier(60)  # they arrive together
    if rank == 0:
        with pytest.raises(lastgood.ConflictError, match=r"rank 1 called barrier #2, but rank 0 called all-gather #2"):
            comm.all_gather(b"x", 4)
    else:
        with pytest.raises(lastgood.ConflictError, match=r"rank 0 called all-gather #2, but rank 1 called barrier #2"):
            comm.barrier(4)
    return True


def test_processes_in_different_calls_are_named_with_their_calls(root, tmp_path):
    assert on_processes(2, tmp_path, astray, str(root)) == [True, True]


class Slow:
    """An operation of a process that gets no processor: each wait ends just before the operation does."""

    def __init__(self, work):
        self.work = work

    def is_completed(self):
        return self.work.is_completed()

    def wait(self, timeout):
        if not self.work.is_completed():
            end = time.monotonic() + 60
            while not self.work.is_completed() and time.monotonic() < end:
                time.sleep(0.001)
            raise RuntimeError("Operation timed out!")
        return self.work.wait(timeout)


class OtherGroup:
    """A group whose operations are of another kind."""

    def __init__(self, group, kind):
        self.group, self.kind = group, kind

    def __getattr__(self, name):
        return lambda *arguments: self.kind(getattr(self.group, name)(*arguments))


class Interrupted(Slow):
    """The first wait for it is interrupted, as by a person who presses Ctrl-C."""

    pressed = False

    def wait(self, timeout):
        if not Interrupted.pressed:
            Interrupted.pressed = True
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
        return self.work.wait(timeout)


def interrupted(rank, root, done):
    comm = GlooCommunicator()
    session = lastgood.Session(root, comm, timeout=100)
    if rank == 1:
        stay_until(done, 0)
        return None
    comm._group = OtherGroup(comm._group, Interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), session.save(1) as save:
        save.tensors({"w": torch.ones(1)})
    open(f"{done}-0", "x").close()
    return time.monotonic() - began


def test_a_keyboard_interrupt_ends_the_wait_for_others(root, tmp_path):
    found = on_processes(2, tmp_path, interrupted, str(root), str(tmp_path / "done"))
    assert found[0] < 100  # rank 1 never came, and the deadline had not passed


def starved(rank):
    comm = GlooCommunicator()
    comm._group = OtherGroup(comm._group, Slow)
    for i in range(50):
        assert comm.all_gather(bytes([rank, i]), 60) == [bytes([0, i]), bytes([1, i])]
        assert comm.broadcast(b"x" if rank == 0 else b"", 0, 60) == b"x"
        comm.barrier(60)
    assert comm.all_to_all([b"a", b"b"], 60) == [b"ab"[rank : rank + 1]] * 2
    comm.close()
    return True


def test_k06_an_operation_that_ends_just_after_a_wait_for_it_has_not_failed(tmp_path):
    assert on_processes(2, tmp_path, starved) == [True, True]


def test_without_torch_distributed_it_says_so():
    with pytest.raises(lastgood.InvalidError, match="not initialised"):
        GlooCommunicator()


@pytest.mark.parametrize(
    "missing",
    [
        "BroadcastOptions",
        "PrefixStore",
        "ProcessGroup.get_group_store",
        "ProcessGroupGloo",
        "ProcessGroupGloo.allgather",
        "ProcessGroupGloo.alltoall_base",
        "ProcessGroupGloo.barrier",
        "ProcessGroupGloo.broadcast",
    ],
)
def test_a_torch_that_lacks_what_a_group_is_made_of_is_refused_by_name(missing, monkeypatch, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        GlooCommunicator().close()
        if missing.endswith("get_group_store"):
            StoreKeys()
        place, _, name = missing.rpartition(".")
        if place:
            # A class of C++ from which nothing can be taken away.
            rest = {n: getattr(getattr(dist, place), n) for n in dir(getattr(dist, place)) if n != name}
            monkeypatch.setattr(dist, place, SimpleNamespace(**rest))
        else:
            monkeypatch.delattr(dist, name)
        makers = [GlooCommunicator, StoreKeys] if missing.endswith("get_group_store") else [GlooCommunicator]
        for make in makers:
            with pytest.raises(
                lastgood.UnsupportedError, match=rf"torch {torch.__version__.split('+')[0]}.* has no .*{missing}"
            ):
                make()
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


# ------------------------------------------------------- saves in the background


def keys(kind):
    if kind == "files":
        return None
    return (
        StoreKeys()
        if kind == "the group's store"
        else StoreKeys(dist.PrefixStore("mine", dist.group.WORLD.get_group_store()))
    )


def launching(rank, root, kind):
    comm = GlooCommunicator()
    whole = torch.arange(70.0).reshape(10, 7)
    layout = lastgood.Layout([2], [lastgood.Split(0)])
    mine = whole.chunk(2)[rank].clone()
    found = []
    with lastgood.Session(root, comm, timeout=60, kv=keys(kind)) as session:
        for step in (1, 2, 3):
            with session.launch(step) as save:
                save.tensor("w", mine, shape=(10, 7), layout=layout, lazy=True)
                save.tensors({"mean": torch.full((4,), float(rank))}, buffer=True)
            session.fence()
            mine += 100
        found.append(session.wait().step)
        bad = torch.full_like(mine, float("nan")) if rank == 1 else mine
        with session.launch(4, finite=True) as save:
            save.tensor("w", bad, shape=(10, 7), layout=layout)
        for call in (session.wait, session.wait):
            try:
                found.append(call().step)
            except lastgood.Error as why:
                found.append((type(why).__name__, why.rank, str(why)))
    comm.close()
    return found


@pytest.mark.parametrize("kind", ["files", "the group's store", "another store"])
def test_k04_two_processes_save_in_the_background_and_both_hear_of_an_error_of_one(kind, root, tmp_path):
    first, second = on_processes(2, tmp_path, launching, str(root), kind)
    assert first == second
    good, (_, culprit, text), after = first
    assert (good, culprit, after) == (3, 1, 3)
    assert "save step 4 in the background: rank 1" in text
    assert '"w"' in text
    for step in (1, 2, 3):
        w = lastgood.load(f"{root}@{step}", framework="torch")["w"]
        assert torch.equal(w, torch.arange(70.0).reshape(10, 7) + 100 * (step - 1))


@pytest.mark.parametrize("kind", ["file", "hash", "tcp", "prefix"])
def test_keys_of_torch_stores(kind, tmp_path):
    store = {
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "hash": dist.HashStore,
        "tcp": lambda: dist.TCPStore("localhost", 0, 1, True, use_libuv=True),
        "prefix": lambda: dist.PrefixStore("x", dist.HashStore()),
    }[kind]()
    keys = StoreKeys(store)
    assert keys.get("lastgood/a/rank-0") is None  # without waiting
    value = b"lastgood 1 0\n\xff\x00text" * 100
    keys.set("lastgood/a/rank-0", value)
    keys.set("lastgood/a/result", b"")
    assert keys.get("lastgood/a/rank-0") == value
    assert keys.get("lastgood/a/result") == b""
    keys.set("lastgood/b/rank-0", b"2")  # those of the save before are of no use any more
    assert keys.get("lastgood/b/rank-0") == b"2"
    if kind != "file":
        assert keys.get("lastgood/a/rank-0") is None


def test_without_torch_distributed_there_is_no_store():
    with pytest.raises(lastgood.InvalidError, match="not initialised"):
        StoreKeys()
