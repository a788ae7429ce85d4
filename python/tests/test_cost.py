# SPDX-License-Identifier: Apache-2.0
"""What Python adds to the core: calls for many tensors, memory for large ones."""

import subprocess
import sys
import textwrap

import lastgood
import numpy as np
import pytest
import torch
from counting import calls

SAVING, LOADING = 50, 65  # calls for a tensor; 29 to 40 and 16 to 51 they are


@pytest.mark.parametrize("kind", ["torch", "torch strided", "numpy"])
def test_describing_a_tensor_takes_few_calls(kind, root):
    tensors = {f"model.layers.{i // 9}.block.{i % 9}.weight": torch.ones(8, 8) for i in range(1000)}
    if kind == "torch strided":
        tensors = {n: t.t() for n, t in tensors.items()}
    if kind == "numpy":
        tensors = {n: t.numpy() for n, t in tensors.items()}
    with lastgood.Session(root) as session:

        def save():
            saving = session.save(1)
            saving.tensors(tensors)
            saving.abort()

        assert calls(save) < 1000 * SAVING

        saving = session.save(1)
        saving.tensors(tensors)
        saving.commit()
    checkpoint = lastgood.open(root)

    def describe():
        load = lastgood.Load(checkpoint)
        load.tensors(tensors)
        load.columns._struct()

    assert calls(describe) < 1000 * LOADING


def peak(code, root):
    """Runs code in a process of its own; returns the peak of its memory above what it was at the line `start()`."""
    program = f"""
        import ctypes, gc, sys
        import lastgood, numpy as np, torch
        def value(key):
            with open("/proc/self/status") as f:
                return next(int(line.split()[1]) * 1024 for line in f if line.startswith(key))
        def start():
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            with open("/proc/self/clear_refs", "w") as f:
                f.write("5")
            global before
            before = value("VmRSS")
        root = {str(root)!r}
        MB = 1 << 20
{textwrap.indent(textwrap.dedent(code), "        ")}
        print(value("VmHWM") - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


MB = 1 << 20


@pytest.fixture
def disk_root(tmp_path):
    return tmp_path / "root"


@pytest.mark.parametrize(
    "make",
    [
        "torch.ones(64 * MB)",
        "np.ones(64 * MB, np.float32)",
        "torch.ones(8192, 8192).t()",
        "torch.ones(8192, 8192)[:, ::2]",
    ],
)
def test_k07_saving_takes_no_more_memory_than_the_buffers(make, disk_root):
    """F110, F112: 256 MiB are saved through 64 MiB of buffers at most."""
    code = f"""
        tree = {{"a": {make}}}
        lastgood.save(root, {{"warm": np.ones(MB)}})
        start()
        lastgood.save(root, tree, step=1)
    """
    assert peak(code, disk_root) < 80 * MB


@pytest.mark.parametrize(
    "make", ["torch.zeros(64 * MB)", "np.zeros(64 * MB, np.float32)", "torch.zeros(8192, 8192).t()"]
)
def test_k07_loading_into_existing_memory_takes_no_more_than_the_buffers(make, disk_root):
    """F109: no second copy of the state."""
    lastgood.save(disk_root, {"a": torch.ones(8192, 8192) if "8192" in make else torch.ones(64 * MB)})
    code = f"""
        tree = {{"a": {make}}}
        for a in tree.values():
            a += 0  # touched
        start()
        lastgood.load_into(tree, root)
        assert tree["a"][0].sum() > 0
    """
    assert peak(code, disk_root) < 80 * MB


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("make", ["torch.ones(64 * MB)", "np.ones(64 * MB, np.float32)", "torch.ones(8192, 8192).t()"])
def test_k07_a_save_in_the_background_takes_one_copy_and_the_next_none_more(make, lazy, disk_root):
    """256 MiB are copied once, into memory that later saves use again."""
    code = f"""
        tree = {{"a": {make}}}
        lastgood.save(root, {{"warm": np.ones(MB)}})
        session = lastgood.Session(root, new_run=True, keep_last=1)
        start()
        for step in range(2, 4):
            with session.launch(step) as save:
                save.tensors(tree, lazy={lazy})
            session.wait()
        session.close()
    """
    assert 256 * MB < peak(code, disk_root) < (256 + 80) * MB


def test_k07_staging_memory_has_a_cap(disk_root):
    code = """
        tree = {"a": torch.ones(64 * MB)}
        lastgood.save(root, {"warm": np.ones(MB)})
        session = lastgood.Session(root, new_run=True, keep_last=1, staging_bytes=32 * MB)
        start()
        for lazy in (False, True):
            with session.launch(2) as save:
                save.tensors(tree, lazy=lazy)
            session.wait()
        session.close()
    """
    assert peak(code, disk_root) < 80 * MB


def test_k07_loading_new_arrays_takes_the_state_once(disk_root):
    lastgood.save(disk_root, {"a": torch.ones(64 * MB)})
    for framework in ("numpy", "torch"):
        code = f"""
            start()
            tree = lastgood.load(root, framework="{framework}")
        """
        assert peak(code, disk_root) < (256 + 80) * MB, framework


def test_k07_conversion_goes_block_by_block(disk_root):
    """F113: a stored tensor is never whole in memory beside the converted one."""
    lastgood.save(disk_root, {"a": torch.ones(64, MB)})
    code = """
        tree = {"a": torch.zeros(64, MB, dtype=torch.bfloat16)}
        tree["a"] += 0
        start()
        lastgood.load_into(tree, root, cast=True)
        assert tree["a"][63, -1] == 1
    """
    assert peak(code, disk_root) < 120 * MB


def test_k07_reading_and_dropping_many_tensors_keeps_none(disk_root):
    """F113"""
    lastgood.save(disk_root, {f"t{i}": np.full(MB, i, np.float32) for i in range(64)})
    code = """
        checkpoint = lastgood.open(root)
        start()
        for name in checkpoint:
            assert checkpoint[name][...][-1] == int(name[1:])
        for name in checkpoint:
            assert checkpoint[name].map()[-1] == int(name[1:])
    """
    assert peak(code, disk_root) < 64 * MB


def test_k07_many_saves_do_not_add_up(root):
    """F118"""
    code = """
        tree = {f"t{i}": torch.ones(1000) for i in range(500)}
        session = lastgood.Session(root, keep_last=1)
        def resident(first):
            for step in range(first, first + 40):
                with session.save(step) as s:
                    s.tensors(tree)
                    s.state("tree", {"lr": 0.1, "list": list(range(100))})
                lastgood.open(root)["t3"][5:9]
            start()
            return before
        resident(0)
        first = resident(40)
        before = value("VmHWM") - (resident(80) - first)  # what is printed is the growth
    """
    assert peak(code, root) < MB
