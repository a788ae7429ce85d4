# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import tempfile
from pathlib import Path

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
