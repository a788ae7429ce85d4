# SPDX-License-Identifier: Apache-2.0
"""What is installed, and what importing it costs."""

import importlib.resources
import pickle
import subprocess
import sys
from pathlib import Path

import lastgood
import pytest
from frameworks import need
from lastgood._core import ffi, lib

FRAMEWORKS = ("torch", "numpy", "jax", "ml_dtypes")


def run(code, *options):
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_brings_few_modules_and_no_framework():
    code = (
        "import sys; before = len(sys.modules); import lastgood\n"
        f"print(len(sys.modules) - before, [m for m in {FRAMEWORKS} if m in sys.modules])"
    )
    n, frameworks = run(code).strip().split(" ", 1)
    assert frameworks == "[]"
    assert int(n) < 120  # 72 with Python 3.11; NumPy brings 140, torch 1,110


@pytest.mark.parametrize("missing", [("torch", "jax"), ("numpy", "ml_dtypes", "jax")])
def test_it_works_without_the_frameworks_that_are_not_installed(missing, root):
    there = "torch" if "torch" not in missing else "numpy"
    need(there)
    make = {"numpy": "numpy.arange(6.0)", "torch": "torch.arange(6.0)"}[there]
    run(
        f"import sys\nfor m in {missing}: sys.modules[m] = None\n"
        f"import lastgood, {there}\n"
        f"lastgood.save({str(root)!r}, {{'a': {make}, 'n': 3}})\n"
        f"tree = lastgood.load({str(root)!r}, framework={there!r})\n"
        f"assert tree['n'] == 3 and (tree['a'] == {make}).all()"
    )


def test_the_extension_is_built_for_the_stable_abi():
    names = [p.name for p in importlib.resources.files("lastgood").iterdir()]
    assert "_core.abi3.so" in names
    assert "py.typed" in names


def test_the_version_is_the_library_s():
    assert lastgood.__version__ == ffi.string(lib.lg_version()).decode()


def test_the_console_script_is_the_c_program(root):
    lastgood.save(root, {})
    script = Path(sys.executable).parent / "lastgood"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"lastgood {lastgood.__version__}\n")
    done = subprocess.run([script, "verify", root], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([script, "nonsense"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2


def test_every_status_of_the_library_is_a_status_here_with_a_class_of_its_own_kind():
    numbers = {n for n in range(100) if ffi.string(lib.lg_status_name(n)) != b"LG_ERR_?"}
    assert numbers == {int(s) for s in lastgood.Status}
    for status in lastgood.Status:
        name = ffi.string(lib.lg_status_name(int(status))).decode()
        assert name == ("LG_OK" if status == 0 else f"LG_ERR_{status.name}")
        err = ffi.new("lg_error *")
        err.status, err.os_errno, err.rank = int(status), 5, 3
        lib.lg_error_set(err, int(status), b"%s", ffi.new("char[]", b"what happened"))
        error = lastgood.errors.error_of(int(status), err)
        assert isinstance(error, lastgood.Error)
        assert (error.status, str(error)) == (status, "what happened")


@pytest.mark.parametrize(
    ("ours", "python"),
    [
        (lastgood.InvalidError, ValueError),
        (lastgood.StateError, RuntimeError),
        (lastgood.OutOfMemoryError, MemoryError),
        (lastgood.UnsupportedError, NotImplementedError),
        (lastgood.StoreError, OSError),
        (lastgood.NoSpaceError, OSError),
        (lastgood.NotFoundError, FileNotFoundError),
        (lastgood.ExistsError, FileExistsError),
        (lastgood.PermissionDeniedError, PermissionError),
        (lastgood.MissingError, KeyError),
        (lastgood.MismatchError, ValueError),
        (lastgood.TimeoutError, TimeoutError),
        (lastgood.CorruptError, lastgood.DamageError),
    ],
)
def test_errors_are_python_s_of_the_same_meaning_too_and_survive_pickling(ours, python):
    error = ours("file: why", errno=28, rank=2)
    assert isinstance(error, python)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ours
    assert (str(again), again.status, again.errno, again.rank) == ("file: why", ours.default, 28, 2)


def test_all_public_names_exist_and_are_documented():
    for name in lastgood.__all__:
        assert getattr(lastgood, name).__doc__, name
