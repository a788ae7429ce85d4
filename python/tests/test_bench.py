# SPDX-License-Identifier: Apache-2.0
"""The benchmark beside other tools runs, and its page says what it found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "peers.py"


@pytest.fixture(autouse=True)
def _a_disk(tmp_path):
    """Cold loads need files that can leave memory."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
    if kind.strip() in ("tmpfs", "ramfs"):
        pytest.skip(f"the folder of the tests is on {kind.strip()}")


def test_the_quick_benchmark_measures_every_section_and_writes_a_page(tmp_path):
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    command = [sys.executable, BENCH, "--quick", "--folder", tmp_path, "--json", figures, "--out", page]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert set(found["sections"]) == {"save", "load", "partial one", "partial rows", "train 1", "small"}
    for title, section in found["sections"].items():
        for key, rows in section.items():
            for tool in ("lastgood", "safetensors"):
                if title == "train 1" and tool == "safetensors":
                    continue
                samples = rows[tool]
                assert len(samples) == 2, (title, key, tool)
                assert all(s["seconds"] > 0 and s["cpu"] >= 0 for s in samples), (title, key, tool)
    text = page.read_text(encoding="utf-8")
    for heading in (
        "Saving, until durable",
        "Loading, cold",
        "Loading, warm",
        "Training time lost",
        "One tensor",
        "16 rows",
    ):
        assert heading in text
    assert text.count("| **lastgood** |") >= 7
    again = tmp_path / "again.md"
    subprocess.run([sys.executable, BENCH, "--page", figures, "--out", again], check=True, timeout=60)
    assert again.read_text(encoding="utf-8") == text
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("lastgood-peers-")]


def test_the_quick_benchmark_of_several_ranks_saves_and_reshards_and_says_how_fast(tmp_path):
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    command = [sys.executable, BENCH, "--quick", "--only", "ranks", "--folder", tmp_path]
    command += ["--json", figures, "--out", page]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text(encoding="utf-8"))
    loads = {f"ranks {a} to {b}" for a, b in ((4, 4), (2, 4), (4, 2))}
    assert set(found["sections"]) == {"ranks 4 save", *loads}
    for title, section in found["sections"].items():
        assert set(section) == ({"cold", "warm"} if title in loads else {"save"})
        for key, rows in section.items():
            assert set(rows) == {"lastgood", "DCP", *([] if key == "warm" else ["(disk, direct)"])}, (title, key)
            for tool, samples in rows.items():
                assert len(samples) == 2, (title, key, tool)
                assert all(s["seconds"] > 0 and s["cpu"] > 0 for s in samples), (title, key, tool)
    text = page.read_text(encoding="utf-8")
    assert text.count("## Four ranks") == 5 and text.count("## Two ranks") == 2
    assert text.count("| **lastgood** |") == 7
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("lastgood-peers-")]


def test_a_ratio_whose_interval_holds_1_is_not_called_faster_or_slower():
    sys.path.insert(0, str(BENCH.parent / "peers"))
    try:
        from report import ratio
    finally:
        sys.path.pop(0)

    def rows(*values):
        return [{"seconds": v} for v in values]

    assert ratio(rows(*[1] * 9), rows(*[0.5, 2] * 4, 1), "seconds").endswith("*not resolved*")
    assert ratio(rows(*[1] * 9), rows(*[2.0, 2.1, 1.9] * 3), "seconds") == "2.00 (1.90 to 2.10)"
    assert ratio(rows(2, 2, 2, 2), [None, *rows(1, 1, 1)], "seconds") == "0.50 (0.50 to 0.50)"
    assert ratio([], [], "seconds") == ""
