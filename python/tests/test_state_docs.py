# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/training-state.md run as they stand there, and print what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import need

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training-state.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_about_states_runs_as_it_stands(number, tmp_path):
    need("torch")
    (tmp_path / "runs").mkdir()
    (tmp_path / "train.py").write_text(PROGRAMS[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in re.findall(r"# prints: (.*)$", PROGRAMS[number], re.MULTILINE):
        assert line in done.stdout.splitlines()


def test_the_page_about_states_has_programs():
    assert len(PROGRAMS) == 2
