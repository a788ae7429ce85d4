# SPDX-License-Identifier: Apache-2.0
"""The programs of the how-to pages run as they stand there, and print what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ["python.md", "data.md"]


def programs(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "number"), [(page, n) for page in PAGES for n in range(len(programs(page)))])
def test_a_program_runs_as_it_stands(page, number, tmp_path):
    program = programs(page)[number]
    (tmp_path / "runs").mkdir()
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "train.py"]
    if program.startswith("# torchrun"):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py"]
    for _ in range(2):  # the second time it finds what the first has left
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
            env=dict(os.environ, OMP_NUM_THREADS="1"),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if "runs/a" in program:
            break  # names its generation
    for line in re.findall(r"# prints: (.*)$", program, re.MULTILINE):
        assert line in done.stdout.splitlines()


def test_there_are_programs():
    assert len(programs("python.md")) >= 6
    assert all(programs(page) for page in PAGES)
