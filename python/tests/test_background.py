# SPDX-License-Identifier: Apache-2.0
"""Saves that are written in the background while the trainer goes on."""

import gc
import subprocess
import sys
import textwrap
import threading
import time

import lastgood
import numpy as np
import pytest
from frameworks import need, torch
from lastgood import arrays

MB = 1 << 20


class Gate:
    """A key-value store on whose functions a save in the background waits until the gate is opened."""

    def __init__(self, closed=True):
        self.values = {}
        self.open = threading.Event()
        self.reached = threading.Event()
        if not closed:
            self.open.set()

    def set(self, key, value):
        assert isinstance(value, bytes)
        self.reached.set()
        assert self.open.wait(60)
        self.values[key] = value

    def get(self, key):
        return self.values.get(key)


def on_two(root, work, **options):
    """Calls work(rank, session) on two ranks that are threads; returns what each returned or raised."""
    found = [None, None]

    def one(comm):
        try:
            with lastgood.Session(root, comm, timeout=20, **options) as session:
                found[comm.rank] = work(comm.rank, session)
        except BaseException as why:
            found[comm.rank] = why

    threads = [threading.Thread(target=one, args=(c,)) for c in lastgood.ThreadCommunicator.create(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    return found


def state(kind):
    """Arrays of many forms, with a function that changes each in place."""
    made = {
        "big": torch.ones(MB),
        "strided": torch.ones(512, 700).t(),
        "half": torch.ones(1000, dtype=torch.bfloat16),
        "scalar": torch.ones(()),
    }
    if kind == "torch parameters":
        return {n: torch.nn.Parameter(t) for n, t in made.items()}
    return {n: t.numpy() for n, t in made.items() if n != "half"} if kind == "numpy" else made


def add_one(tree):
    with torch.no_grad():
        for name in tree:
            tree[name].__iadd__(1)


@pytest.mark.parametrize("kind", ["torch", "torch parameters", "numpy"])
def test_k04_values_at_the_launch_are_what_is_saved(kind, root):
    """F056: what the trainer writes after the launch is not in the checkpoint."""
    tree = state(kind)
    with lastgood.Session(root) as session:
        with session.launch(1) as save:
            save.tensors(tree)
        add_one(tree)
        assert save.launched.step == 1
        assert save.launched.bytes_lazy == 0
        assert save.launched.bytes_staged == sum(a.nbytes for a in tree.values())
        assert session.wait().step == 1
    for name, array in lastgood.load(root, framework="torch").items():
        assert (array == 1).all(), name


@pytest.mark.parametrize("kind", ["torch", "torch parameters", "numpy"])
def test_k04_lazy_tensors_may_change_after_the_fence(kind, root):
    tree = state(kind)
    with lastgood.Session(root) as session:
        for step in range(1, 6):
            with session.launch(step) as save:
                save.tensors(tree, lazy=True)
            assert save.launched.bytes_staged == 0
            assert save.launched.bytes_lazy == sum(a.nbytes for a in tree.values())
            session.fence()
            assert session.staged
            add_one(tree)
        assert session.wait().step == 5
    for step in range(1, 6):
        for name, array in lastgood.load(f"{root}@{step}", framework="torch").items():
            assert (array == step).all(), (step, name)


def test_k04_step_and_state_are_those_of_the_launch(root):
    """F059"""
    seen, w = {"tokens": [1, 2]}, np.ones(MB)
    with lastgood.Session(root, staging_bytes=MB) as session:
        step = 100
        with session.launch(step) as save:
            save.tensors({"w": w}, lazy=True)
            save.state("seen", seen)
            save.rank_bytes("rng", buffer := bytearray(b"old"))
        step += 3
        seen["tokens"].append(3)
        buffer[:] = b"new"
        info = session.wait()
    checkpoint = lastgood.open(root)
    assert (info.step, checkpoint.step) == (100, 100)
    assert checkpoint.state["seen"] == {"tokens": [1, 2]}
    assert checkpoint.rank_bytes("rng", 0, 1) == b"old"


def test_k04_staging_memory_is_used_again_by_the_next_save_only(root):
    """F058: saves back to back, each with its own values."""
    with lastgood.Session(root) as session:
        for step in range(1, 9):
            with session.launch(step) as save:
                save.tensors({"w": np.full(MB, step), "v": np.full(MB, -step)}, lazy={"v"})
    for step in range(1, 9):
        got = lastgood.load(f"{root}@{step}")
        assert (got["w"] == step).all() and (got["v"] == -step).all()


def test_k20_launching_a_step_that_is_committed_is_a_success_without_a_new_checkpoint(root):
    """F317"""
    with lastgood.Session(root) as session:
        for expected in (None, "committed", "committed"):
            with session.launch(9, if_new=True) as save:
                save.tensors({"w": np.ones(4)})
            assert save.launched.skipped == expected
            assert session.wait().step == 9
        assert session.status().skips_in_a_row == 0
    assert [e.step for e in lastgood.entries(root)] == [9]


def test_which_tensors_are_lazy_is_said_by_names_or_a_function(root):
    tree = {"a": np.ones(1000), "b": np.ones(10), "c": np.ones(100)}
    with lastgood.Session(root) as session:
        for lazy, nbytes in [
            (True, 8880), (False, 0), ({"a", "other"}, 8000), (["b", "c"], 880), (lambda n: n != "b", 8800),
        ]:  # fmt: skip
            with session.launch(1) as save:
                save.tensors(tree, lazy=lazy)
            assert (save.launched.bytes_lazy, save.launched.bytes_staged) == (nbytes, 8880 - nbytes)
        with session.launch(2) as save:
            save.tensor("a", tree["a"], lazy=True)
            save.boxes("b", "F64", (20,), [((0,), tree["b"]), ((10,), np.zeros(10))], lazy=True)
        assert (save.launched.bytes_lazy, save.launched.bytes_staged) == (8160, 0)
        with pytest.raises(lastgood.InvalidError, match="lazy is the string 'a'"):
            session.launch(3).tensors(tree, lazy="a")
        with pytest.raises(lastgood.InvalidError, match="LAZY"), session.launch(3) as save:
            save.tensors(tree, lazy=True, buffer=True)


def test_what_must_be_converted_first_is_never_lazy(root):
    """A negative view's memory is not its values; a JAX array's host copy is nobody's to keep."""
    done = run(
        """
        import jax
        tree = {"negative": torch.complex(torch.ones(4), torch.ones(4)).conj().imag, "jax": jax.numpy.ones(8)}
        assert tree["negative"].is_neg()
        with lastgood.Session(root) as session, session.launch(1) as save:
            save.tensors(tree, lazy=True)
        assert (save.launched.bytes_lazy, save.launched.bytes_staged) == (0, 48), save.launched
        """,
        root,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (lastgood.load(root)["negative"] == -1).all()


def test_k04_dropped_and_replaced_arrays_are_kept_until_they_are_copied(root):
    """The trainer drops lazy arrays, and gives a parameter other memory, while they are still to be copied."""
    size = 8 * MB
    parameter = torch.nn.Parameter(torch.full((size,), 3.0))
    with lastgood.Session(root, staging_bytes=MB) as session:
        with session.launch(1) as save:
            save.tensors({"numpy": np.full(size, 1.0), "torch": torch.full((size,), 2.0), "p": parameter}, lazy=True)
        assert save.launched.windowed
        parameter.data = torch.zeros(1)
        gc.collect()
        other = [np.full(size, 9.0) for _ in range(3)]  # takes the memory, were it free
        session.fence()
        assert session._kept.memory == []
        session.wait()
        del other
    got = lastgood.load(root)
    assert (got["numpy"] == 1).all() and (got["torch"] == 2).all() and (got["p"] == 3).all()


def test_eager_arrays_are_let_go_when_the_launch_returns_and_lazy_ones_at_the_fence(root):
    class Mine(np.ndarray):
        freed = 0

        def __del__(self):
            Mine.freed += self.base is not None  # not the temporary one that the view is made of

    def make():
        return np.ones(1000).view(Mine)

    with lastgood.Session(root) as session:
        with session.launch(1) as save:
            save.tensors({"a": make()})
        gc.collect()
        assert Mine.freed == 1
        with session.launch(2) as save:
            save.tensors({"a": make()}, lazy=True)
        session.fence()
        gc.collect()
        assert Mine.freed == 2


def test_the_fence_has_a_deadline_and_check_sources_names_what_was_changed(root):
    a = np.ones(1000)
    with lastgood.Session(root) as session:
        with session.launch(1, check_sources=True) as save:
            save.tensors({"a": a, "b": np.ones(10)}, lazy=True)
        a += 1
        with pytest.raises(lastgood.ConflictError, match='"a" was changed'):
            session.fence()
        with pytest.raises(lastgood.ConflictError, match='"a" was changed'):
            session.wait()
        with session.launch(2, check_sources=True) as save:
            save.tensors({"a": a}, lazy=True)
        session.fence()
        a += 1
        assert session.wait().step == 2
        assert [e.step for e in lastgood.entries(root)] == [2]


def test_phases_and_info_of_a_save_in_the_background(root):
    gate = Gate()

    def work(rank, session):
        assert session.wait() is None
        assert session.status().phase == "none"
        with session.launch(7) as save:
            save.tensors({"w": np.ones(1000)})
        if rank == 1:
            assert gate.reached.wait(30)
            assert session.status().phase in ("writing", "waiting")
            assert session.staged
            with pytest.raises(lastgood.Error):
                lastgood.open(root)  # K04, F062: launched is not saved
            gate.open.set()
        info = session.wait()
        status = session.status()
        assert (info.step, info.generation, info.folder) == (7, save.launched.generation, save.launched.folder)
        assert (status.phase, status.phase_step, status.saves_committed) == ("committed", 7, 1)
        return info.bytes_total, status.staging_bytes

    (total, first), (same, second) = on_two(root, work, kv=gate)
    assert total == same > 8000
    assert first + second >= 8000  # one of them wrote
    assert lastgood.open(root).step == 7
    assert len(gate.values) == 2  # rank 1's word, and the result


def test_a_launch_that_finds_one_under_way_skips_or_waits(root):
    gate = Gate()

    def work(rank, session):
        def launch(step, **options):
            with session.launch(step, **options) as save:
                save.tensors({"w": np.full(10, step)})
            return save.launched

        assert launch(1).skipped is None
        assert gate.reached.wait(30)
        assert launch(2, when_busy="skip").skipped == "in flight"
        assert launch(3, when_busy="skip").skipped == "in flight"
        assert (session.status().saves_skipped, session.status().skips_in_a_row) == (2, 2)
        gate.open.set()
        last = launch(4, when_busy="skip", max_skips=2)  # so it waits
        assert last.skipped is None
        assert launch(5).skipped is None  # waits
        assert session.status().skips_in_a_row == 0
        with session.save(6) as save:  # waits too
            save.tensors({"w": np.full(10, 6)})
        return True

    assert on_two(root, work, kv=gate) == [True, True]
    assert [e.step for e in lastgood.entries(root)] == [6, 5, 4, 1]


@pytest.mark.parametrize(
    "options", [{"when_busy": "hurry"}, {"max_skips": 0}, {"copy_threads": -1}, {"lazy_threads": 1 << 40}]
)
def test_options_of_a_launch_out_of_range_are_refused_by_name(options, root):
    with lastgood.Session(root) as session, pytest.raises(lastgood.InvalidError, match=r"when_busy|max_skips|range"):
        session.launch(1, **options)


class Broken:
    """A key-value store that fails at one rank's word."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        if key.endswith("rank-1"):
            raise ConnectionError("the store is gone")
        return self.values.get(key)


@pytest.mark.parametrize("trouble", ["a value of rank 1", "the key-value store of rank 0"])
def test_k04_a_failed_save_is_told_once_by_the_next_call_on_every_rank(trouble, root):
    """F065"""
    layout = lastgood.Layout([2], [lastgood.Split(0)])
    part = np.ones((5, 4))

    def work(rank, session):
        def launch(step, value):
            with session.launch(step, finite=True) as save:
                save.tensor("w", part * value, shape=(10, 4), layout=layout)

        bad = np.nan if trouble == "a value of rank 1" and rank == 1 else 1
        texts = []
        for call in (
            lambda: launch(1, bad), session.wait, session.wait, lambda: launch(2, bad), lambda: launch(3, 1),
            session.resume,
        ):  # fmt: skip
            try:
                call()
                texts.append("")
            except lastgood.Error as why:
                texts.append(f"{type(why).__name__}: {why}")
        assert session.status().saves_failed == 2
        assert session.status().phase == "failed"
        return texts

    kv = Broken() if trouble.startswith("the key") else None
    first, second = on_two(root, work, kv=kv)
    assert first == second
    told = "ConnectionError: the store is gone" if kv else '"w"'
    assert first[0] == ""
    assert "save step 1 in the background" in first[1]
    assert told in first[1]
    assert (first[2], first[3]) == ("", "")
    assert "save step 2 in the background" in first[4]
    assert told in first[4]
    assert first[5] == ""
    assert [e for e in lastgood.entries(root) if e.kind == "committed"] == []


def test_closing_drains_and_tells_what_nobody_has_heard(root):
    """K04, F064, F065."""
    session = lastgood.Session(root)
    with session.launch(1) as save:
        save.tensors({"w": np.ones(MB)})
    session.close()
    assert lastgood.open(root).step == 1
    session = lastgood.Session(root)
    session.resume()
    with session.launch(2, finite=True) as save:
        save.tensors({"w": np.array([np.nan])})
    with pytest.raises(lastgood.Error, match=r'save step 2 in the background.*"w"'):
        session.close()
    session.close()
    assert lastgood.open(root).step == 1


@pytest.mark.parametrize("then", ["the save goes on", "the program ends"])
def test_k04_closing_has_a_deadline_and_says_what_may_be_lost_and_what_is_still_read_stays(then, root):
    """F068. A key-value store that hangs: its save cannot end."""
    done = run(
        f"""
        import gc, time
        class Hangs:
            def __init__(self):
                self.values, self.open, self.done = {{}}, threading.Event(), threading.Event()
            def set(self, key, value):
                if key.endswith("rank-1"):
                    self.open.wait()
                self.values[key] = value
            def get(self, key):
                if self.open.is_set():
                    self.done.set()
                return self.values.get(key)
        keys = Hangs()
        def work(comm, kv):
            session = lastgood.Session(root, comm, timeout=1, kv=kv)
            with session.launch(1) as save:
                save.tensors({{"w": np.ones(1000)}}, lazy=True)
            began = time.monotonic()
            try:
                session.close()
            except lastgood.TimeoutError as why:
                assert time.monotonic() - began < 10
                print(comm.rank, why)
        threads = [threading.Thread(target=work, args=(c, keys)) for c in lastgood.ThreadCommunicator.create(2)]
        for t in threads: t.start()
        for t in threads: t.join()
        gc.collect()
        if {then == "the save goes on"}:
            keys.open.set()
            assert keys.done.wait(30)
        """,
        root,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = sorted(done.stdout.splitlines())
    assert "save step 1 in the background: rank 1 had not written its part" in first
    assert "closed before the save was durable, so it may be lost: the save of step 1 is still writing" in second


def test_a_session_that_is_dropped_drains(root):
    session = lastgood.Session(root)
    with session.launch(1) as save:
        save.tensors({"w": np.ones(4 * MB)}, lazy=True)
    del session, save
    gc.collect()
    assert lastgood.open(root).step == 1
    assert (lastgood.load(root)["w"] == 1).all()


def run(code, root, **options):
    modules = "lastgood, numpy as np, os, sys, threading"
    if "torch." in code:
        need("torch")
        modules += ", torch"
    program = f"import {modules}\nroot = {str(root)!r}\n" + textwrap.dedent(code)
    # Python 3.12 and later say that a process with threads should not fork.
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True, text=True, check=False, timeout=120, **options,
    )  # fmt: skip


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise RuntimeError('of the trainer')"])
def test_k04_what_was_launched_is_committed_when_the_program_just_ends(lazy, end, root):
    """F067"""
    done = run(
        f"""
        def main():
            global session
            session = lastgood.Session(root, staging_bytes=8 << 20)
            with session.launch(1) as save:
                save.tensors({{"w": np.ones(2 << 20), "v": np.ones(2 << 20)}}, lazy={lazy})
        main()
        {end}
        """,
        root,
    )
    assert done.returncode == {"": 0, "sys.exit(3)": 3}.get(end, 1), done.stderr
    assert "lastgood" not in done.stderr
    assert (lastgood.load(root)["w"] == 1).all()


def test_k04_a_save_that_fails_when_the_program_ends_is_told(root):
    """F068: exactly what was lost."""
    done = run(
        """
        session = lastgood.Session(root)
        with session.launch(1, finite=True) as save:
            save.tensors({"w": np.array([np.nan])})
        """,
        root,
    )
    assert done.returncode == 0
    assert "lastgood: a session was never closed: save step 1 in the background" in done.stderr
    assert '"w"' in done.stderr


def test_k20_a_program_that_ends_itself_on_sigterm_loses_nothing_that_it_launched(root):
    """F068, F313: the trainer's own handler runs, while it launches or trains."""
    done = run(
        """
        import signal
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        session = lastgood.Session(root, keep_last=2)
        for step in range(1, 1 << 40):
            with session.launch(step) as save:
                save.tensors({"w": np.full(1 << 20, step)}, lazy=True)
                save.state("step", step)
            print(step, flush=True)
            if step == 1:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        """,
        root,
    )
    assert (done.returncode, done.stderr) == (5, "")
    checkpoint = lastgood.open(root)
    assert checkpoint.step >= int(done.stdout.split()[-1])
    assert (checkpoint["w"][...] == checkpoint.step).all()
    assert checkpoint.state["step"] == checkpoint.step


def test_the_end_of_the_program_waits_for_functions_of_a_key_value_store(root):
    done = run(
        """
        import time
        class Slow:
            values = {}
            def set(self, key, value):
                time.sleep(0.3)  # a slow network
                self.values[key] = value
            def get(self, key):
                return self.values.get(key)
        keys, comms, sessions = Slow(), lastgood.ThreadCommunicator.create(2), {}
        def work(comm):
            sessions[comm.rank] = lastgood.Session(root, comm, kv=keys)
            with sessions[comm.rank].launch(1) as save:
                save.tensors({"w": np.ones(10)})
        threads = [threading.Thread(target=work, args=(c,)) for c in comms]
        for t in threads: t.start()
        for t in threads: t.join()
        """,
        root,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert lastgood.open(root).step == 1


# ----------------------------------------------------------------- signals


def test_a_keyboard_interrupt_ends_a_wait_and_the_session_goes_on(root):
    """One rank's key is held back; both ranks' waits are interrupted one after the other, as only the main thread can be."""
    done = run(
        """
        import signal, time
        class Gate:
            def __init__(self):
                self.values, self.open = {}, threading.Event()
            def set(self, key, value):
                self.open.wait()
                self.values[key] = value
            def get(self, key):
                return self.values.get(key)
        gate = Gate()
        comms = lastgood.ThreadCommunicator.create(2)
        def body(comm, interrupted):
            with lastgood.Session(root, comm, kv=gate) as session:
                with session.launch(1) as save:
                    save.tensors({"w": np.ones(10)})
                if interrupted:
                    for call in (session.wait, session.close, lambda: session.launch(2).launch(), session.resume):
                        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                        began = time.monotonic()
                        try:
                            call()
                        except KeyboardInterrupt:
                            assert time.monotonic() - began < 5
                        else:
                            raise SystemExit("not interrupted")
                        assert session.status().phase in ("writing", "waiting")
                    gate.open.set()
                assert session.wait().step == 1
                with session.save(2) as save:
                    save.tensors({"w": np.ones(10)})
        other = threading.Thread(target=body, args=(comms[1], False))
        other.start()
        body(comms[0], True)
        other.join()
        """,
        root,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [e.step for e in lastgood.entries(root)] == [2, 1]


def test_a_keyboard_interrupt_ends_a_fence_and_nothing_changes(root):
    lines = """
        import signal, time
        session = lastgood.Session(root, staging_bytes=1 << 20)
        real, lib = lastgood.session.lib, lastgood.session.lib
        class Slow:  # a copy that takes long
            def __getattr__(self, name):
                return getattr(real, name)
            def lg_session_fence(self, s, ms, err):
                time.sleep(0.05)
                return int(lastgood.Status.TIMEOUT)
        with session.launch(1) as save:
            save.tensors({"w": np.ones(4 << 20)}, lazy=True)
        lastgood.session.lib = Slow()
        session._kept.memory.append("still read")
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            session.fence()
        except KeyboardInterrupt:
            pass
        else:
            raise SystemExit("not interrupted")
        assert session._kept.memory[-1] == "still read"
        try:
            session.fence(0.2)
        except lastgood.TimeoutError as why:
            assert "step 1 still reads the trainer's memory after 0.2 s" in str(why)
        else:
            raise SystemExit("no deadline")
        lastgood.session.lib = real
        session.fence()
        assert session._kept.memory == []
        session.close()
    """
    done = run(lines, root)
    assert (done.returncode, done.stderr) == (0, "")
    assert lastgood.open(root).step == 1


# ------------------------------------------------------------------- processes


class Uses:
    """Items are made in workers; some try to use the session of the trainer."""

    def __init__(self, session, w, use):
        self.session, self.w, self.use = session, w, use

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if i == self.use:
            return self.session.status()
        self.w += 1  # of the child's own copy
        return torch.full((1000,), float(i))


def test_k04_workers_of_a_data_loader_that_fork_during_a_save_do_not_disturb_it(root):
    w = np.ones(4 * MB, np.float32)
    with lastgood.Session(root, staging_bytes=2 * MB) as session:
        for step in range(1, 4):
            with session.launch(step) as save:
                save.tensors({"w": w, "lazy": torch.ones(4 * MB)}, lazy={"lazy"})
            loader = torch.utils.data.DataLoader(
                Uses(session, w, -1), batch_size=4, num_workers=2, multiprocessing_context="fork"
            )
            assert sum(len(batch) for batch in loader) == 64
            session.fence()
            assert session.wait().step == step
    for step in range(1, 4):
        assert lastgood.open(f"{root}@{step}").verify().problems == ()
        got = lastgood.load(f"{root}@{step}")
        assert (got["w"] == 1).all() and (got["lazy"] == 1).all()


def test_k04_a_worker_that_uses_the_session_of_its_parent_gets_a_clear_error(root):
    with lastgood.Session(root) as session:
        with session.launch(1) as save:
            save.tensors({"w": np.ones(MB)})
        loader = torch.utils.data.DataLoader(
            Uses(session, np.ones(1), 7), batch_size=4, num_workers=1, multiprocessing_context="fork"
        )
        with pytest.raises(lastgood.StateError, match="belongs to the process that opened it"):
            list(loader)
        assert session.wait().step == 1


def test_k04_a_child_of_fork_can_neither_use_nor_close_nor_end_the_session_of_its_parent(root):
    done = run(
        """
        session = lastgood.Session(root, staging_bytes=1 << 20)
        with session.launch(1) as save:
            save.tensors({"w": np.ones(2 << 20)}, lazy=True)
        locked, go = threading.Event(), threading.Event()
        def hold():  # another thread is in a function of the session when the process forks
            with session.pointer:
                locked.set()
                go.wait()
        holder = threading.Thread(target=hold)
        holder.start()
        locked.wait()
        pid = os.fork()
        if pid == 0:
            for call in (session.status, session.fence, session.wait, session.resume, lambda: session.launch(2), lambda: session.staged):
                try:
                    call()
                except lastgood.StateError as why:
                    assert "a child made by fork" in str(why)
                else:
                    os._exit(9)
            session.close()
            sys.exit(4)  # with all that is done at the end of a program
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        go.set()
        holder.join()
        assert status == 4, status
        session.fence()
        assert session.wait().step == 1
        session.close()
        """,
        root,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (lastgood.load(root)["w"] == 1).all()


# ------------------------------------------------------------------------ cost


def test_a_launch_describes_each_tensor_once_and_hands_all_over_in_one_call(root, monkeypatch, capsys):
    """What Python adds to a launch of 1,000 tensors: as many descriptions, and one call of the library."""
    tensors = {f"model.layers.{i // 9}.block.{i % 9}.weight": torch.ones(8, 8) for i in range(1000)}
    calls = []
    with lastgood.Session(root) as session:

        def launch():
            saving = session.launch(1)
            saving.tensors(tensors, lazy=True)
            began = time.process_time()
            saving.abort()
            return began

        spent = []
        for _ in range(10):
            began = time.process_time()
            spent.append(launch() - began)
        describe = arrays.describe
        monkeypatch.setattr(arrays, "describe", lambda *a: calls.append(a[0]) or describe(*a))
        columns = lastgood.saving.Columns.save
        monkeypatch.setattr(lastgood.saving.Columns, "save", lambda *a: calls.append(None) or columns(*a))
        with session.launch(1) as save:
            save.tensors(tensors, lazy=True)
        session.wait()
    assert sorted(n for n in calls if n is not None) == sorted(tensors)
    assert calls.count(None) == 1
    with capsys.disabled():
        print(f"\n  describing 1,000 lazy tensors: {min(spent) * 1000:.1f} ms of processor time")
