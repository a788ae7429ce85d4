# SPDX-License-Identifier: Apache-2.0
"""The programs of the how-to pages run as they stand there, and print what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import need

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ["python.md", "data.md", "fsdp2.md", "resize.md", "migrate.md", "inference.md", "when-a-resume-differs.md"]


def programs(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "number"), [(page, n) for page in PAGES for n in range(len(programs(page)))])
def test_a_program_runs_as_it_stands(page, number, tmp_path):
    program = programs(page)[number]
    if page != "python.md" or "torch" in program:
        need("torch")
    (tmp_path / "runs").mkdir()
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    if program.startswith("# needs "):
        pytest.importorskip(program.split()[2])
    resized = "and later: torchrun --nproc-per-node 3" in program
    for ranks in (2, 3 if resized else 2):  # the second time it finds what the first has left
        command = [sys.executable, "train.py"]
        if program.startswith("# torchrun"):
            run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*run, f"--nproc-per-node={ranks}", "train.py"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
            env=dict(os.environ, OMP_NUM_THREADS="1"),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if "runs/a" in program or "runs/2d" in program:
            break  # names its generation; takes long to start, and its resume is tested elsewhere
    # Ranks write to one pipe: the ends of two lines may come after both.
    several = program.startswith("# torchrun")
    for line in re.findall(r"# prints: (.*)$", program, re.MULTILINE):
        assert line in (done.stdout if several else done.stdout.splitlines())


def test_the_first_program_of_the_readme_is_that_of_a_training_run(tmp_path):
    """It is a sketch in which only the model and the data are left out."""
    need("torch")
    program = programs("../README.md")[0]
    assert len(program.splitlines()) <= 12
    before = (
        "import lastgood, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)\n"
        "loader = lastgood.data.DataLoader(torch.rand(40, 2), batch_size=2, seed=1)\n"
        "loss_of = lambda model, batch: model(batch).square().mean()\n"
        "total = 7\n"
    )
    (tmp_path / "runs").mkdir()
    (tmp_path / "train.py").write_text(before + program + "print(ckpt.completed)\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "7\n"


def test_there_are_programs():
    assert len(programs("python.md")) >= 6
    assert all(programs(page) for page in PAGES)
