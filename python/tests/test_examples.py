# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/pytorch, as a user starts, kills and resizes them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import need

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
from torchjob import EXAMPLES, Job, JobError  # noqa: E402

SEED = 7  # of the kills

need("torch")


@pytest.fixture
def start(roots):
    """Starts a program on some ranks, waits for its end, and returns what it said."""

    def run(program, *arguments, world=1):
        roots.folder.mkdir(exist_ok=True)
        return Job(program, arguments, world, roots.new()).finish()

    return run


def losses(said):
    """By step."""
    found = [re.match(r"step (\d+) loss (\S+)$", line) for line in said]
    return {int(match[1]): float(match[2]) for match in found if match}


def values(said):
    """What each step printed, and the digest at the end."""
    return [line for line in said if re.match(r"step \d+ (loss|generator)|done: ", line)]


@pytest.mark.parametrize(
    ("kills", "options"),
    [(3, ["--parallel", "fsdp2"]), (2, ["--parallel", "ddp", "--torchrun"])],
    ids=["fsdp2", "ddp under torchrun"],
)
def test_k09_runs_that_are_killed_at_random_moments_end_with_the_same_bits(roots, kills, options):
    command = [sys.executable, str(TOOLS / "soak-torch"), "--kills", str(kills), "--seed", str(SEED), *options]
    command += ["--steps", "40", "--folder", str(roots.new())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    assert f"soak-torch: {kills} kills" in done.stdout
    assert "all bits equal" in done.stdout


def test_k08_a_run_goes_on_as_ddp_alone_and_as_fsdp2_with_the_losses_of_one_process(start, roots):
    root = roots.new()
    options = ["--dropout", 0, "--every", 5, "--batch", 12]
    whole = losses(start("train.py", "--root", roots.new(), "--steps", 15, *options))
    assert sorted(whole) == list(range(1, 16))
    parts = {}
    for parallel, world, steps in (("ddp", 2, 5), ("none", 1, 10), ("fsdp2", 3, 15)):
        said = start("train.py", "--root", root, "--steps", steps, "--parallel", parallel, *options, world=world)
        mine = losses(said)
        assert sorted(mine) == list(range(steps - 4, steps + 1)), said
        parts.update(mine)
    assert parts == pytest.approx(whole, abs=1e-5)


def test_k09_three_ranks_of_ddp_go_on_with_the_same_bits_or_say_why_not(start, roots):
    whole = start("train.py", "--root", roots.new(), "--steps", 8, "--parallel", "ddp", world=3)
    root, other = roots.new(), roots.new()
    first = start("train.py", "--root", root, "--steps", 4, "--parallel", "ddp", world=3)
    shutil.copytree(root, other)
    second = start("train.py", "--root", root, "--steps", 8, "--parallel", "ddp", world=3)
    assert values(first)[:4] + values(second) == values(whole)
    assert not any("in another order" in line for line in second)

    text = (EXAMPLES / "train.py").read_text(encoding="utf-8")
    program = roots.folder / "plain.py"
    program.write_text(text.replace(", find_unused_parameters=True", ""), encoding="utf-8")
    novel = EXAMPLES.parent / "gpt-c" / "data" / "persuasion.txt"
    options = ["--root", other, "--steps", 8, "--parallel", "ddp", "--text", novel]
    plain = start(program, *options, world=3)
    assert sum("in another order" in line for line in plain) == 1
    assert values(plain) != values(second)  # else the note is out of date


def test_k09_accumulation_and_workers_change_nothing_when_a_run_goes_on(start, roots):
    options = ["--accumulate", 2, "--workers", 2, "--every", 3]
    whole = start("train.py", "--root", roots.new(), "--steps", 6, *options)
    root = roots.new()
    first = start("train.py", "--root", root, "--steps", 3, *options)
    second = start("train.py", "--root", root, "--steps", 6, *options)
    assert values(first)[:3] + values(second) == values(whole)


def test_k09_a_gan_goes_on_with_the_same_bits(start, roots):
    whole = start("gan.py", "--root", roots.new(), "--steps", 8)
    root = roots.new()
    first, second = (start("gan.py", "--root", root, "--steps", steps) for steps in (4, 8))
    assert values(first)[:4] + values(second) == values(whole)


def test_a_lora_run_saves_the_adapters_alone_and_refuses_another_base(start, roots):
    base, root = roots.new(), roots.new()
    start("train.py", "--root", base, "--steps", 2)
    lora = ["lora.py", "--base", base]
    whole = start(*lora, "--root", roots.new(), "--steps", 8)
    first, second = (start(*lora, "--root", root, "--steps", steps) for steps in (4, 8))
    assert values(first)[:4] + values(second) == values(whole)

    shown = subprocess.run(
        [sys.executable, "-c", "import lastgood, sys; print(*sorted(lastgood.open(sys.argv[1])))", str(root)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    model = [name for name in shown.stdout.split() if not name.startswith("optim.")]
    assert model == [f"blocks.{b}.{layer}.{m}" for b in (0, 1) for layer in ("out", "qkv") for m in ("a", "b")]

    start("train.py", "--root", base, "--steps", 3)
    with pytest.raises(JobError, match="frozen weights are not those that the run was trained with"):
        start(*lora, "--root", root, "--steps", 9)


def test_the_commands_of_the_readme_are_those_of_the_programs():
    said = re.findall(
        r"^(?:python|torchrun --nproc-per-node \d) (\w+\.py)(.*)$", (EXAMPLES / "README.md").read_text(), re.M
    )
    assert {name for name, _ in said} == {"train.py", "gan.py", "lora.py"}
    for name, options in said:
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in text, f"{name} has no {option}"
