# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import signal
import tempfile
from pathlib import Path

import frameworks
import pytest
from hypothesis import HealthCheck, settings

# Failures print what to pass to @reproduce_failure; the examples are the same on every run.
settings.register_profile(
    "lastgood",
    deadline=None,
    derandomize=True,
    print_blob=True,
    max_examples=int(os.environ.get("LASTGOOD_EXAMPLES", "60")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("lastgood")

# A shell without job control starts what is in the background with Ctrl-C ignored, which the tests' programs would inherit.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

frameworks.begin_to_read()


def pytest_collection_finish():
    frameworks.end_of_reading()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """A test that imports what need not be installed, itself or through the package, is skipped where it is not."""
    try:
        return (yield)
    except ModuleNotFoundError as why:
        if why.name in frameworks.MISSING:
            frameworks.skip(why.name)
        raise


class Roots:
    """Names of roots that do not exist yet, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def new(self) -> Path:
        self.count += 1
        return self.folder / f"root-{self.count}"


@pytest.fixture
def roots():
    memory = "/dev/shm"
    folder = tempfile.mkdtemp(prefix="lastgood-", dir=memory if os.access(memory, os.W_OK) else None)
    yield Roots(Path(folder))
    shutil.rmtree(folder)


@pytest.fixture
def root(roots):
    return roots.new()
