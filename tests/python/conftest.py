# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

import pytest
import written


@pytest.fixture(scope="session")
def build():
    return Path(os.environ.get("BUILD", written.ROOT / "build")).resolve()


@pytest.fixture(scope="session")
def checkpoint(build, tmp_path_factory):
    """A step folder that the library wrote on four ranks."""
    return written.make(build, tmp_path_factory.mktemp("written") / "root")
