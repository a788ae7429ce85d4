# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what Python adds runs, and has every row in every round."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench" / "python_costs.py"


def test_the_quick_benchmark_of_python_measures_imports_and_tensors(roots, tmp_path):
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, BENCH, "--quick", "--folder", roots.folder, "--json", figures],
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert found["machine"]["torch"] == torch.__version__
    assert {"lastgood", "numpy", "torch"} <= set(found["import"])
    for what in ("save", "load"):
        assert {"the library alone", "torch tensors", "NumPy arrays"} <= set(found[what])
    for what in ("import", "save", "load"):
        for row, samples in found[what].items():
            assert len(samples) == (1 if what == "import" else found["rounds"]), (what, row)
            assert all(s["seconds"] > 0 and s["cpu"] > 0 for s in samples), (what, row)
            assert row in done.stdout
    assert list(roots.folder.iterdir()) == []


@pytest.mark.parametrize("what", ["save", "load"])
def test_what_is_measured_as_the_library_alone_is_the_same_operation(what, roots):
    sys.path.insert(0, str(BENCH.parent))
    try:
        from python_costs import Tensors
    finally:
        sys.path.pop(0)
    roots.folder.mkdir(exist_ok=True)
    tensors = Tensors(40, 8, roots.folder)
    try:
        rows = tensors.saves() if what == "save" else tensors.loads()
        for row in ("the library alone", "torch tensors", "NumPy arrays"):
            rows[row]()  # a load compares what it has read
            if what == "load":
                continue
            import lastgood

            with lastgood.open(roots.folder / row.replace(" ", "-"), framework="torch") as checkpoint:
                assert set(checkpoint) == set(tensors.torch)
                assert all(torch.equal(checkpoint[n][...], t) for n, t in tensors.torch.items())
    finally:
        tensors.close()
