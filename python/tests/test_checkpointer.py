# SPDX-License-Identifier: Apache-2.0
"""When a run saves, how it goes on, what it says; one process."""

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import lastgood
import numpy as np
import pytest
import torch
from lastgood.checkpointer import Checkpointer, plain_metrics
from torch import nn
from training import State, indices_loader

PAGE = Path(__file__).resolve().parents[2] / "docs" / "first-checkpoint.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


class Trainer:
    """A small model, its optimizer, a loader of indices."""

    def __init__(self, seed=0, **more):
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.loader = indices_loader(40, 2)
        self.state = State(model=self.model, optim=self.optimizer, scheduler=self.scheduler, loader=self.loader, **more)

    def train(self, batches=()):
        self.model(torch.randn(2, 4) + sum(b.sum() for b in batches)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def run(self, ckpt, total, accumulate=1):
        """What is left of a run of ``total`` steps; the batches it has seen."""
        run = ckpt.resume(self.state)
        seen = []
        for batches in run.steps(total, accumulate):
            self.train(batches)
            seen.append([b.tolist() for b in batches])
            ckpt.step(self.state)
        return run, seen


def committed(root):
    return [e.step for e in lastgood.entries(root) if e.kind == "committed"]


def damage(root, step):
    folder = next(e.name for e in lastgood.entries(root) if e.kind == "committed" and e.step == step)
    file = next((Path(root) / folder).glob("shard-*model*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def not_finite(trainer):
    """What is copied later is looked at later: a save with ``finite`` then fails in the background."""
    with torch.no_grad():
        trainer.model.bias[0] = float("nan")


def finite(trainer, ckpt):
    ckpt.fence()
    with torch.no_grad():
        trainer.model.bias[0] = 0.0


# ------------------------------------------------------------------ the page


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_of_the_page_runs_as_it_stands(number, tmp_path):
    program = PROGRAMS[number]
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
    for line in re.findall(r"# prints: (.*)$", program, re.MULTILINE):
        assert line in done.stdout.splitlines(), done.stdout


def test_the_page_has_programs():
    assert len(PROGRAMS) >= 2


# ------------------------------------------------------------------ the loop


def test_a_run_goes_on_where_it_was_with_the_batches_that_follow(root):
    whole = Trainer()
    with Checkpointer(f"{root}-whole") as ckpt:
        run, expected = whole.run(ckpt, 9, accumulate=2)
    assert (run.step, run.resumed, run.source, run.generation) == (0, False, None, None)

    found = []
    for total in (4, 9):
        part = Trainer(seed=0 if total == 4 else 9)
        with Checkpointer(root, every=2) as ckpt:
            run, seen = part.run(ckpt, total, accumulate=2)
            found += seen
    assert (run.step, run.resumed, run.saved_world) == (4, True, 1)
    assert run.source == os.path.join(root, next(e.name for e in lastgood.entries(root) if e.step == 4))
    assert found == expected
    for name, t in whole.model.state_dict().items():
        assert torch.equal(t, part.model.state_dict()[name]), name
    assert part.scheduler.state_dict() == whole.scheduler.state_dict()


def test_every_keep_and_the_last_step(root):
    trainer = Trainer()
    with Checkpointer(root, every=3, keep=2) as ckpt:
        trainer.run(ckpt, 10)
        assert ckpt.completed == 10
    assert committed(root) == [10, 9]


def test_a_loop_of_one_s_own(root):
    for _ in range(2):
        trainer = Trainer()
        with Checkpointer(root, every=2) as ckpt:
            run = ckpt.resume(trainer.state)
            for i in range(run.step, run.step + 3):
                trainer.train()
                ckpt.step(trainer.state, step=i + 1, samples=5)
    assert committed(root) == [4, 2]
    assert run.step == 2
    assert trainer.loader.consumed == 25


def test_every_counts_steps_that_are_passed_over(root):
    trainer = Trainer()
    with Checkpointer(root, every=10) as ckpt:
        for step in (7, 12, 19, 31):
            trainer.train()
            ckpt.step(trainer.state, step=step, samples=1)
    assert committed(root) == [31, 12]


def test_every_by_the_clock(root):
    trainer = Trainer()
    with Checkpointer(root, every="0.2s", background="off") as ckpt:
        ckpt.resume(trainer.state)
        steps = 0
        while len(committed(root)) < 2:
            steps += 1
            assert steps < 1_000_000
            ckpt.step(trainer.state, samples=1)
    assert committed(root)[-1] > 1


def test_a_loop_body_without_a_step_is_an_error(root):
    trainer = Trainer()
    with Checkpointer(root) as ckpt:
        run = ckpt.resume(trainer.state)
        with pytest.raises(lastgood.StateError, match=r"without ckpt\.step\(state\).*step 1"):
            for _ in run.steps(3):
                pass
        with pytest.raises(lastgood.InvalidError, match="accumulate"):
            run.steps(3, accumulate=0)


def test_without_a_loader_the_lists_are_empty(root):
    model = nn.Linear(2, 2)
    state = State(model=model)
    with Checkpointer(root) as ckpt:
        for batches in ckpt.resume(state).steps(3):
            assert batches == []
            ckpt.step(state)
        with pytest.raises(lastgood.InvalidError, match="no loader"):
            ckpt.step(state, samples=3)
    assert committed(root) == [3]


def test_samples_that_nobody_told_are_asked_for(root):
    trainer = Trainer()
    with Checkpointer(root) as ckpt:
        ckpt.resume(trainer.state)
        with pytest.raises(lastgood.InvalidError, match=r"samples=n"):
            ckpt.step(trainer.state)


def test_k09_f155_step_counts_optimizer_steps_whatever_is_accumulated(root):
    for accumulate, total in ((4, 2), (1, 5)):
        trainer = Trainer()
        with Checkpointer(root) as ckpt:
            trainer.run(ckpt, total, accumulate)
    assert committed(root) == [5, 2]
    assert trainer.loader.consumed == 2 * (4 * 2 + 3)


def test_steps_only_grow(root):
    trainer = Trainer()
    with Checkpointer(root) as ckpt:
        ckpt.step(trainer.state, step=5, samples=1)
        for step in (5, 4, 0):
            with pytest.raises(lastgood.InvalidError, match="5 are done already"):
                ckpt.step(trainer.state, step=step, samples=1)
        assert ckpt.completed == 5


# ------------------------------------------------------------------ resuming


def test_init_is_called_only_where_the_root_is_empty(root):
    calls = []
    for _ in range(2):
        trainer = Trainer()
        with Checkpointer(root) as ckpt:
            run = ckpt.resume(trainer.state, init=lambda: calls.append(1))
            ckpt.save(trainer.state)
    assert calls == [1]
    assert run.resumed
    assert run.step == 0


def test_a_run_steps_back_past_damage_and_says_so(root, caplog):
    trainer = Trainer()
    with Checkpointer(root, every=1) as ckpt:
        trainer.run(ckpt, 3)
    damage(root, 3)
    with Checkpointer(root) as ckpt, caplog.at_level(logging.INFO, "lastgood"):
        run = ckpt.resume(trainer.state)
    assert run.step == 2
    assert [s.step for s in run.skipped] == [3]
    assert "passed over step-000000000003" in str(run)
    assert "shard-00001-model" in str(run)
    assert "step 2, generation 1.2, saved by 1 rank" in str(run)
    assert repr(run) == f"<Run at step 2 from {run.source!r}, 1 passed over, 0 notes>"
    report = next(r for r in caplog.records if "passed over" in r.getMessage())
    assert report.levelno == logging.WARNING


def test_a_run_never_starts_over_silently(root):
    trainer = Trainer()
    with Checkpointer(root, every=1) as ckpt:
        trainer.run(ckpt, 1)
    damage(root, 1)
    calls = []
    with Checkpointer(root) as ckpt, pytest.raises(lastgood.NoGoodCheckpoint):
        ckpt.resume(trainer.state, init=lambda: calls.append(1))
    assert calls == []


def test_a_step_that_is_asked_for_must_be_there(root):
    trainer = Trainer()
    with Checkpointer(root, every=1) as ckpt:
        with pytest.raises(lastgood.NotFoundError, match="step 7"):
            ckpt.resume(trainer.state, step=7)
        trainer.run(ckpt, 3)
        assert ckpt.resume(trainer.state, step=2).step == 2
        assert ckpt.completed == 2
        # And the run goes on from there, within the same session.
        trainer.run(ckpt, 3)


def test_k08_f121_a_refused_resume_changes_nothing(root):
    trainer = Trainer()
    with Checkpointer(root, every=1) as ckpt:
        trainer.run(ckpt, 2)
    before = lastgood.open(root).manifest_sha256
    other = State(model=nn.Linear(5, 4))
    with Checkpointer(root) as ckpt, pytest.raises(lastgood.Error):
        ckpt.resume(other)
    again = Trainer(seed=1)
    with Checkpointer(root) as ckpt:
        assert ckpt.resume(again.state).step == 2
    assert torch.equal(again.model.weight, trainer.model.weight)
    assert lastgood.open(root).manifest_sha256 == before
    assert not lastgood.open(root).verify().problems


def test_a_new_run_takes_none_of_the_checkpoints(root):
    trainer = Trainer()
    with Checkpointer(root, every=1) as ckpt:
        trainer.run(ckpt, 3)
    with Checkpointer(root) as ckpt, pytest.raises(lastgood.OtherRunError):
        ckpt.save(Trainer().state)
    with Checkpointer(root, new_run=True) as ckpt:
        with pytest.raises(lastgood.InvalidError, match="new_run"):
            ckpt.resume(trainer.state, step=2)
        fresh = Trainer()
        run = ckpt.resume(fresh.state)
        assert not run.resumed
        assert str(run) == f"new_run=True: a new run starts at step 0; checkpoints in {root} were not looked at"
        fresh.train()
        ckpt.step(fresh.state, samples=1)
        ckpt.save(fresh.state)
    with Checkpointer(root) as ckpt:
        assert ckpt.resume(Trainer().state).step == 1


def test_a_loader_that_the_checkpoint_does_not_know_is_an_error_that_says_what_to_do(root):
    model = nn.Linear(4, 4)
    with Checkpointer(root) as ckpt:
        ckpt.save(State(model=model), step=1)
    state = State(model=model, loader=indices_loader(40, 2))
    with (
        Checkpointer(root) as ckpt,
        pytest.raises(lastgood.MissingError, match=r'no position of "loader".*exact=False'),
    ):
        ckpt.resume(state)
    with Checkpointer(root, exact=False) as ckpt:
        assert ckpt.resume(state).not_restored == ("loader",)


def test_what_is_no_state_is_refused_by_its_type(root):
    trainer = Trainer()
    with Checkpointer(root) as ckpt:
        with pytest.raises(lastgood.InvalidError, match=r"a Linear is no state: give a lastgood\.State\(model=model"):
            ckpt.resume(trainer.model)
        run = ckpt.resume(trainer.state)
        with pytest.raises(lastgood.InvalidError, match="a Linear is no state"):
            ckpt.step(trainer.model)
        for wrong in ((10.5,), ("10",), (10, 1.5)):
            with pytest.raises(lastgood.InvalidError, match="not a whole number"):
                run.steps(*wrong)
        with pytest.raises(lastgood.InvalidError, match=r"metrics is 0\.5, no mapping"):
            ckpt.save(trainer.state, step=1, metrics=0.5)


def test_notes_and_what_was_not_restored_are_reported(root, caplog):
    class Partial(State):
        def restore(self, of):
            super().restore(of)
            of.notes.append("the stream noise was derived")
            of.not_restored.append("extra")

    model = nn.Linear(2, 2)
    with Checkpointer(root) as ckpt:
        ckpt.save(State(model=model))
    with Checkpointer(root) as ckpt, caplog.at_level(logging.INFO, "lastgood"):
        run = ckpt.resume(Partial(model=model))
    assert run.notes == ("the stream noise was derived",)
    assert run.not_restored == ("extra",)
    assert "not in the checkpoint, left as it was: extra" in str(run)
    assert any(r.levelno == logging.WARNING and "derived" in r.getMessage() for r in caplog.records)


def test_k09_f161_what_is_overwritten_between_a_resume_and_the_first_update_is_named(root, caplog):
    trainer = Trainer(bn=nn.BatchNorm1d(4))
    with Checkpointer(root, every=1) as ckpt:
        trainer.run(ckpt, 2)
    for overwrite in (False, True):
        caplog.clear()
        with Checkpointer(root) as ckpt:
            ckpt.resume(trainer.state)
            trainer.state.modules["bn"](torch.randn(3, 4))  # changes its buffers
            if overwrite:
                with torch.no_grad():
                    trainer.model.weight.zero_()
            trainer.train()
        said = [r.getMessage() for r in caplog.records if "between the resume and the first update" in r.getMessage()]
        assert said == (["rank 0: weight changed between the resume and the first update: it is not what the "
                         "checkpoint had"] if overwrite else [])  # fmt: skip


# -------------------------------------------------------------------- saving


def test_gradients_are_refused_with_their_names_and_what_to_do(root):
    trainer = Trainer()
    trainer.model(torch.randn(2, 4)).sum().backward()
    with Checkpointer(root) as ckpt:
        for call in (lambda: ckpt.step(trainer.state, samples=1), lambda: ckpt.save(trainer.state)):
            with pytest.raises(lastgood.StateError, match=r"weight, bias with gradients.*zero_grad"):
                call()
        trainer.optimizer.zero_grad()
        ckpt.step(trainer.state, samples=1)
        assert ckpt.completed == 1
    assert committed(root) == []
    trainer.model(torch.randn(2, 4)).sum().backward()
    with Checkpointer(root, exact=False) as ckpt:
        ckpt.step(trainer.state, samples=1)
        ckpt.save(trainer.state)
    assert committed(root) == [1]


def test_metrics_are_kept_with_the_checkpoint(root):
    trainer = Trainer()
    metrics = {"loss": torch.tensor([0.25]), "lr": np.float64(0.5), "n": 3, "nan": float("nan")}
    with Checkpointer(root, every=1) as ckpt:
        ckpt.step(trainer.state, samples=1, metrics=metrics)
    kept = lastgood.open(root).state["metrics"]
    assert (kept["loss"], kept["lr"], kept["n"]) == (0.25, 0.5, 3)
    assert type(kept["lr"]) is float
    assert np.isnan(kept["nan"])
    with pytest.raises(lastgood.UnsupportedError, match=r'metric "loss".*\[2\]'):
        plain_metrics({"loss": torch.ones(2)})


def test_metrics_that_are_no_numbers_fail_the_save_and_the_next_one_goes(root):
    trainer = Trainer()
    with Checkpointer(root, every=1) as ckpt:
        with pytest.raises(lastgood.UnsupportedError, match='metric "loss"'):
            ckpt.step(trainer.state, samples=1, metrics={"loss": torch.ones(2)})
        ckpt.step(trainer.state, samples=1)
    assert committed(root) == [2]


def test_files_are_attached_and_a_model_s_config_by_itself(root):
    class Config:
        def to_json_string(self):
            return '{"model_type": "x"}'

    trainer = Trainer()
    trainer.model.config = Config()
    with Checkpointer(root, attach={"notes.txt": "a", "b.bin": b"\0"}) as ckpt:
        ckpt.save(trainer.state)
        ckpt.save(trainer.state, step=1)
    checkpoint = lastgood.open(root)
    assert checkpoint.attached("notes.txt") == b"a"
    assert checkpoint.attached("b.bin") == b"\0"
    assert checkpoint.attached("config.json") == b'{"model_type": "x"}'
    with Checkpointer(f"{root}-2", attach=lambda: {"config.json": "{}"}) as ckpt:
        ckpt.save(trainer.state)
    assert lastgood.open(f"{root}-2").attached("config.json") == b"{}"


def test_k20_f317_saving_a_step_that_is_there_is_a_success(root):
    for background in ("off", "lazy"):
        trainer = Trainer()
        with Checkpointer(root, every=1, background=background) as ckpt:
            run, seen = trainer.run(ckpt, 3)
            ckpt.save(trainer.state)
            ckpt.wait()
            ckpt.save(trainer.state)
    assert (run.step, seen) == (3, [])
    assert committed(root) == [3, 2, 1]


def test_nan_is_refused_if_asked(root):
    trainer = Trainer()
    with torch.no_grad():
        trainer.model.bias[0] = float("nan")
    with Checkpointer(root, finite=True, background="off") as ckpt, pytest.raises(lastgood.Error, match="bias"):
        ckpt.save(trainer.state)


# ------------------------------------------------- in the background: errors, the end


def test_k04_f065_a_failure_in_the_background_is_raised_by_the_next_call(root, caplog):
    trainer = Trainer()
    with Checkpointer(root, every=2, finite=True) as ckpt:
        ckpt.resume(trainer.state)
        told = []
        for step in range(1, 7):
            trainer.train()
            if step == 2:
                not_finite(trainer)
            try:
                ckpt.step(trainer.state, samples=1)
            except lastgood.Error as why:
                told.append((step, str(why)))
            if step == 2:
                finite(trainer, ckpt)
        assert [step for step, _ in told] == [4]
        assert "save step 2 in the background" in told[0][1]
        assert "bias" in told[0][1]
    assert committed(root) == [6]
    assert any("the save of step 2 failed" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_k04_f067_the_end_waits_for_the_save_under_way_and_makes_no_other(error, root):
    trainer = Trainer()
    try:
        with Checkpointer(root, every=1) as ckpt:
            ckpt.resume(trainer.state)
            trainer.train()
            ckpt.step(trainer.state, samples=1)
            trainer.train()
            if error is not None:
                raise error("why")
    except BaseException as why:
        assert type(why) is error
        assert why.args == ("why",)
    assert committed(root) == [1]
    with pytest.raises(lastgood.StateError, match="closed"):
        ckpt.step(trainer.state, samples=1)
    ckpt.close()


def failing(trainer, ckpt):
    ckpt.resume(trainer.state)
    trainer.train()
    not_finite(trainer)
    ckpt.step(trainer.state, samples=1)


def test_the_first_error_wins_and_the_other_is_logged(root, caplog):
    with pytest.raises(ValueError, match="first"), Checkpointer(root, every=1, finite=True) as ckpt:
        failing(Trainer(), ckpt)
        raise ValueError("first")
    assert any("bias" in r.getMessage() for r in caplog.records)


def test_k04_f067_a_failure_that_nobody_was_told_is_raised_by_the_end(root):
    with pytest.raises(lastgood.Error, match="bias"), Checkpointer(root, every=1, finite=True) as ckpt:
        failing(Trainer(), ckpt)


def test_a_child_of_fork_cannot_use_it(root):
    trainer = Trainer()
    with Checkpointer(root) as ckpt:
        ckpt.resume(trainer.state)
        pid = os.fork()
        if pid == 0:
            try:
                ckpt.step(trainer.state, samples=1)
            except lastgood.StateError:
                ckpt.close()
                os._exit(17)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
        ckpt.save(trainer.state)
    assert committed(root) == [0]


# ------------------------------------------------------------------ stopping


def test_k20_sigterm_saves_the_step_and_ends_the_loop(root):
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    try:
        trainer = Trainer()
        with Checkpointer(root) as ckpt:
            run = ckpt.resume(trainer.state)
            for batches in run.steps(1000):
                trainer.train(batches)
                if ckpt.completed == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                ckpt.step(trainer.state)
            assert ckpt.stopping
            assert ckpt.completed == 3
            assert committed(root) == [3]  # durable already, before the end
        assert called == [1]
        with Checkpointer(root) as ckpt:
            assert ckpt.resume(trainer.state).step == 3
            assert not ckpt.stopping
    finally:
        signal.signal(signal.SIGTERM, before)


def test_k20_an_exit_code_is_raised_when_the_last_save_is_durable(root):
    trainer = Trainer()
    with pytest.raises(SystemExit) as exit, Checkpointer(root, requeue=75, signals=("SIGUSR1",)) as ckpt:
        for batches in ckpt.resume(trainer.state).steps(1000):
            trainer.train(batches)
            os.kill(os.getpid(), signal.SIGUSR1)
            ckpt.step(trainer.state)
    assert exit.value.code == 75
    assert committed(root) == [1]


def test_k20_a_time_limit_ends_the_loop(root):
    trainer = Trainer()
    with Checkpointer(root, time_limit="0.5s", grace="0.3s") as ckpt:
        for batches in ckpt.resume(trainer.state).steps(10_000_000):
            trainer.train(batches)
            ckpt.step(trainer.state)
        assert ckpt.stopping
        assert committed(root) == [ckpt.completed]


def test_k20_f311_a_poke_looks_between_two_steps(root):
    trainer = Trainer()
    with Checkpointer(root, signals=("SIGUSR1",)) as ckpt:
        ckpt.resume(trainer.state)
        assert ckpt.poke() is False
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ckpt.poke() is True
        trainer.train()
        ckpt.step(trainer.state, samples=1)
        assert ckpt.stopping


def test_k20_a_failed_save_before_does_not_keep_the_last_one_from_being_made(root, caplog):
    trainer = Trainer()
    with Checkpointer(root, every=1, finite=True, signals=("SIGUSR1",)) as ckpt:
        failing(trainer, ckpt)
        finite(trainer, ckpt)
        os.kill(os.getpid(), signal.SIGUSR1)
        trainer.train()
        ckpt.step(trainer.state, samples=1)
        assert ckpt.stopping
    assert committed(root) == [2]
    assert any("bias" in r.getMessage() for r in caplog.records)


# ------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"background": "fast"}, "background"),
        ({"when_busy": "fail"}, "when_busy"),
        ({"every": 0}, "every"),
        ({"every": True}, "every"),
        ({"every": 2.5}, "every"),
        ({"keep": -1}, "keep"),
        ({"keep": "3"}, "keep"),
        ({"max_skips": 1.5}, "max_skips"),
        ({"timeout": "soon"}, "timeout"),
        ({"kv": "files"}, "kv"),
        ({"attach": 3}, "attach"),
        ({"mesh": 3}, "mesh"),
        ({"every": "20 parsecs"}, "every"),
        ({"time_limit": -1}, "time_limit"),
        ({"grace": "soon"}, "grace"),
        ({"requeue": "please"}, "requeue"),
        ({"signals": ("SIGNONE",)}, "SIGNONE"),
        ({"data_axes": ["dp"]}, "mesh"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(options, word, root):
    with pytest.raises(lastgood.InvalidError, match=word):
        Checkpointer(root, **options)
    assert not root.exists() or committed(root) == []


def test_a_launcher_s_process_that_knows_of_no_others_is_refused(root, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(lastgood.InvalidError, match=r"WORLD_SIZE is 4.*init_process_group"):
        Checkpointer(root)


def test_repr_says_where_it_is(root):
    trainer = Trainer()
    ckpt = Checkpointer(root)
    ckpt.step(trainer.state, samples=1)
    assert repr(ckpt) == f"<Checkpointer {os.fspath(root)!r}, step 1, 0 saved>"
    ckpt.close()
    assert repr(ckpt) == f"<Checkpointer {os.fspath(root)!r}, step 1, closed>"


def test_what_needs_torch_is_imported_when_it_is_asked_for():
    code = (
        "import lastgood, sys\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'Checkpointer' in dir(lastgood)\n"
        "lastgood.Checkpointer\n"
        "assert 'torch' in sys.modules\n"
        "try:\n    lastgood.nothing\nexcept AttributeError as why:\n    assert 'nothing' in str(why)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
